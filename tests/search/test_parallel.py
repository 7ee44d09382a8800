"""Searches by several processes: one choice, fewer rounds, common errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shrinkpoint as sp

from . import worker

WORKER = Path(worker.__file__)


def run(size: int, folder: Path) -> list[dict[str, Any]]:
    """Run a group of real processes; return the results of all ranks."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(size), str(folder)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=900)[0].decode() for p in processes]
    finally:
        for p in processes:
            p.kill()
    codes = [p.returncode for p in processes]
    assert codes == [3 if rank == 1 else 0 for rank in range(size)], said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4])
def test_a_group_finds_one_choice_in_fewer_rounds_and_fails_together(size: int, tmp_path: Path) -> None:
    found = run(size, tmp_path)
    exact = worker.state()
    alone = sp.search(exact, worker.evaluate(exact), 0.02, options=sp.SearchOptions(cube=worker.CUBE))
    first = [sp.SearchResult.from_json(f["first"]) for f in found]
    assert all(result == first[0] for result in first)
    assert first[0].met
    assert first[0].degradation is not None
    assert first[0].degradation <= 0.02
    assert first[0].nbytes <= 1.02 * alone.nbytes
    assert first[0].rounds < alone.rounds
    # Each process evaluated its own points and nobody else's.
    assert sum(f["calls"] for f in found) == first[0].evaluations
    assert {t.rank for t in first[0].trials} == set(range(size))
    points = [t.point for t in first[0].trials if t.point is not None]
    assert len(set(points)) == len(points)
    # In the steady state: the baseline, then one round.
    following = [sp.SearchResult.from_json(f["next"]) for f in found]
    assert all(result == following[0] for result in following)
    assert (following[0].method, following[0].rounds) == ("neighbourhood", 2)

    assert "evaluate raised ValueError" in found[1]["broken"]
    assert "threshold is -1.0" in found[1]["bad argument"]
    for rank, f in enumerate(found):
        if rank != 1:
            assert "failed on rank 1" in f["broken"]
            assert "out of luck" in f["broken"]
            assert "failed on rank 1" in f["bad argument"]
            assert "process group failed" in (tmp_path / f"{rank}.gone").read_text()
        assert "do not have the same state" in f["states"]
        assert "not comparable" in f["uneven"]
        # The round in which all evaluated the wreck is recorded, and the next search need not ask again.
        assert f["accurate"][1] <= 2
        told = "the same number for every state on rank 1"
        assert all(any(told in note for note in f[name]) for name in ("blind", "blind, next"))
        assert not any("the same number for every state" in note for note in [*first[0].notes, *following[0].notes])
        assert "do not have the same budget" in f["sharded, other budget"]
        assert ("failed on rank 1" in f["sharded, bad threshold"]) == (rank != 1)
        assert "threshold is -1.0" in f["sharded, bad threshold"]
        assert "kind 'nonsense' is unknown" in f["sharded, bad kinds"]
        # Of a sharded state all processes try the same point, as one process alone would.
        parts = sp.SearchResult.from_json(f["sharded"])
        assert parts.point == alone.point
        assert parts.rounds == alone.rounds
