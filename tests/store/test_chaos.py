"""ckpt-chaos kills a training at file changes, resumes it, and compares the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAIL_ON = "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK"


def judged(work: Path, modes: str, points: int, ranks: int, steps: int = 3) -> tuple[int, list[dict[str, Any]], str]:
    """Run ckpt-chaos; return the number of changes seen, the result of each kill, its output."""
    pytest.importorskip("ckpt_chaos", reason="ckpt-chaos is not installed (pip install ckpt-chaos)")
    glob = "{out}/steps/*.json" if ranks == 1 else "{out}/rank0/steps/*.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ckpt_chaos", "run", "--work", str(work), "--modes", modes),
            *("--max-points", str(points), "--ranks", str(ranks), "--fail-on", FAIL_ON, "--grace", "1"),
            *("--step-regex", r"resumed from step (\d+)", "--result-file", "{out}/result0"),
            *("--checkpoint-glob", glob, "--ckpt-ignore-size"),
            *("--", sys.executable, "-m", "tests.store.chaos_trainer", "{out}", str(steps)),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=1800,
        env={**os.environ, "SHRINKPOINT_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = (work / "reference" / "events.log.rank0").read_text().splitlines()
    results = [json.loads(p.read_text()) for p in sorted(work.glob("pt_*/result.json"))]
    return len(events), results, done.stdout


@pytest.mark.parametrize(("modes", "points", "ranks"), [("before,torn,unsynced,term", 4, 1), ("before", 1, 2)])
def test_the_judge(modes: str, points: int, ranks: int, tmp_path: Path) -> None:
    """ckpt-chaos sees the file changes of each save, and reports no failure."""
    seen, results, printed = judged(tmp_path / "work", modes, points, ranks)
    assert seen in (3 * 6 + 3, 3 * 6 + 4) or ranks > 1, printed  # making the folder may be seen as well
    assert seen >= 3 * 6 + 3, printed
    assert len(results) == points + 1
    killed = [r for r in results if r["label"] != "no crash (control)"]
    assert all(r["crashed"] for r in killed), printed
    # Which of two ranks makes the common folder is chance.
    assert ranks > 1 or not any(r["drift"] for r in killed), printed
    assert "HARD_FAIL" not in printed.replace(FAIL_ON, "")
