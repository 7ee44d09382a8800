"""Long crash tests, run manually: every injection, and 500 kills at random moments.

python -m tests.store.campaign bench/results/crash.json [KILLS]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from shrinkpoint.bench import machine
from tests.store.test_crash import run_module, why_no_strace


def main() -> None:
    """Run all injections and kills, and write their rows."""
    kills = sys.argv[2] if len(sys.argv) > 2 else "500"
    reason = why_no_strace()
    if reason is not None:
        raise SystemExit(reason)
    begin = time.monotonic()
    # On a real disk: what a call means is the same in memory, when it comes is not.
    with tempfile.TemporaryDirectory() as folder:
        random = run_module("random_kills", f"{folder}/random", kills, timeout=7200)
        injected = run_module("injection", f"{folder}/injected", "all", timeout=7200)
    planned, hit = (sum(row[k] for row in injected["rows"]) for k in ("planned", "hit"))
    result = {
        "machine": machine.machine(),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "seconds": round(time.monotonic() - begin),
        "random_kills": random,
        "injections": {"planned": planned, "confirmed_by_strace": hit, "wrong": len(injected["failures"])},
        "rows": injected["rows"],
        "failures": injected["failures"],
    }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["injections"]), json.dumps(random))


if __name__ == "__main__":
    main()
