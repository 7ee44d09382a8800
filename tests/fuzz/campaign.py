"""Long runs of all fuzzers, started manually (`pip install atheris`), one after the other.

python -m tests.fuzz.campaign bench/results/fuzz.json [SECONDS]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shrinkpoint.bench import machine

ROOT = Path(__file__).resolve().parents[2]
FUZZERS = {"container": 600, "manifest": 480}
"""Default seconds by name."""
_STATE = re.compile(r"^#(\d+)\s+\w+\s+cov: (\d+) ft: (\d+) corp: (\d+)/", re.MULTILINE)


def run(name: str, seconds: int, folder: Path) -> dict[str, Any]:
    """Run a fuzzer; return a row of inputs, branches and findings."""
    corpus, begin = folder / name, time.monotonic()
    command = [sys.executable, "-m", f"tests.fuzz.{name}", "--seconds", str(seconds), "--corpus", str(corpus)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "SHRINKPOINT_THREADS": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    states = _STATE.findall(done.stdout)
    if not states:
        raise SystemExit(f"{name} read nothing:\n{done.stdout[-3000:]}")
    inputs, reached, features, kept = map(int, states[-1])
    peak = re.search(r"stat::peak_rss_mb:\s+(\d+)", done.stdout)
    found = sorted(path.name for path in corpus.glob("found-*"))
    if done.returncode and not found:
        raise SystemExit(f"{name} ended with status {done.returncode}:\n{done.stdout[-3000:]}")
    return {
        "fuzzer": name,
        "seconds": round(time.monotonic() - begin),
        "inputs": inputs,
        "seeds": len(list(corpus.glob("seed-*"))),
        "branches at first": int(states[0][1]),
        "branches reached": reached,
        "features reached": features,
        "inputs worth keeping": kept,
        "peak memory MB": None if peak is None else int(peak.group(1)),
        "found": found,
        "said": done.stdout[-3000:] if found else "",
    }


def main() -> None:
    """Run all fuzzers and write their rows."""
    with tempfile.TemporaryDirectory() as folder:
        given = int(sys.argv[2]) if len(sys.argv) > 2 else None
        rows = [run(name, given or seconds, Path(folder)) for name, seconds in FUZZERS.items()]
    result = {
        "machine": machine.machine(),
        "versions": machine.versions() | {"atheris": version("atheris")},
        "commit": machine.commit(),
        "run": {"command": f"python -m tests.fuzz.campaign {' '.join(sys.argv[1:])}"},
        "rows": rows,
    }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
