"""Several ranks agree on the newest step that all of them hold."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shrinkpoint as sp
from shrinkpoint.store.files import StoreWarning
from shrinkpoint.store.memory_copies import MemoryCopies
from shrinkpoint.store.ranks import newest_common_step

LOSSLESS = sp.presets.lossless(chain=sp.ChainPolicy(3))


def state(step: int) -> dict[str, Any]:
    return {"step": step, "w": np.random.default_rng(step // 4).standard_normal(500) + step}


_RANK = """
import sys
from datetime import timedelta
import torch.distributed as dist
import shrinkpoint as sp
from shrinkpoint.store.ranks import newest_common_step

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"file://{folder}/meet", timedelta(seconds=600), rank=rank, world_size=3)
two = dist.new_group([0, 1])
store = sp.Store(f"{folder}/rank{rank}", in_memory=2 if rank == 0 else 0)
if rank < 2:
    step = newest_common_step(store, two, drop=True)
    print("step", step, store.load(step)["step"], store.steps())
try:
    newest_common_step(store)
except sp.ShrinkpointError as e:
    print(type(e).__name__, e)
dist.destroy_process_group()
"""


def test_ranks_agree_on_the_newest_step_all_of_them_hold(tmp_path: Path) -> None:
    base_only = sp.presets.lossless(chain=sp.ChainPolicy(1))
    for rank, steps in enumerate([(60, 80, 100), (60, 80), (60, 70, 80, 100)]):
        store = sp.Store(tmp_path / f"rank{rank}", base_only, in_memory=2 if rank == 0 else 0)
        for step in steps:
            store.save(step, state(step))
    for rank, broken in ((0, 60), (0, 80), (2, 80)):
        (tmp_path / f"rank{rank}" / "data" / sp.Store(tmp_path / f"rank{rank}").describe(broken).file).write_bytes(b"x")
    started = [
        subprocess.Popen([sys.executable, "-c", _RANK, str(r), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for r in range(3)
    ]
    found = [p.communicate(timeout=600)[0].splitlines() for p in started]
    memory = MemoryCopies(str(tmp_path / "rank0"))
    assert memory.steps() == [80]
    memory.clear()
    # The first has 80 in memory only. Of all three one has no intact 60 left, one no intact 80.
    assert [lines[0] for lines in found[:2]] == ["step 80 80 [60, 80]"] * 2
    assert [lines[-1].split()[0] for lines in found] == ["CorruptDataError"] * 3
    assert all("no step that all 3 ranks" in lines[-1] for lines in found)


def test_one_rank_alone(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "run", LOSSLESS)
    with pytest.raises(sp.CorruptDataError, match="no step"):
        newest_common_step(store)
    for step in range(3):
        store.save(step, state(step))
    assert newest_common_step(store) == 2
    (tmp_path / "run" / "data" / store.describe(2).file).unlink()
    assert newest_common_step(store) == 1
    assert store.steps() == [0, 1, 2]
    assert newest_common_step(store, drop=True) == 1
    assert store.steps() == [0, 1]


def test_a_rank_that_cannot_look_stops_them_all(tmp_path: Path) -> None:
    """A rank without a readable store is an error on all ranks, without a wait."""
    for rank in range(2):
        store = sp.Store(tmp_path / f"rank{rank}", sp.presets.lossless(chain=sp.ChainPolicy(1)))
        for step in range(3):
            store.save(step, state(step))
    (tmp_path / "rank0" / "data" / sp.Store(tmp_path / "rank0").describe(2).file).unlink()
    code = """
    import sys
    from datetime import timedelta
    import torch.distributed as dist
    import shrinkpoint as sp
    from shrinkpoint.store.local import LocalFiles as files

    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", f"file://{folder}/meet", timedelta(seconds=600), rank=rank, world_size=2)
    store = sp.Store(f"{folder}/rank{rank}")
    real = files.read

    def away(self, name):
        raise ConnectionError(f"no answer for {name}")

    def away_later(self, name):
        return away(self, name) if name.startswith("data/000000000001") else real(self, name)

    for given, broken in ((store, away), (store, away_later), (store if rank == 0 else "x", real), (store, real)):
        files.read = broken if rank == 1 else real
        try:
            print("step", sp.newest_common_step(given), flush=True)
        except Exception as e:
            print(type(e).__name__, e, *getattr(e, "__notes__", []), flush=True)
    dist.destroy_process_group()
    """
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    others, own = (p.communicate(timeout=600)[0].splitlines() for p in started)
    why = ["ConnectionError: no answer"] * 2 + ["BadArgumentError: store must be a Store, not str"]
    assert len(others) == len(own) == 4
    for line, at, reason in zip(others, own, why, strict=False):
        assert line.startswith(f"ShrinkpointError rank 1 cannot look for its newest step: {reason}")
        assert at.startswith(f"{reason.partition(':')[0]} ")
        assert "All ranks raise now: rank 1 cannot look" in at
    assert others[3] == own[3] == "step 1"


def test_what_is_no_store_has_no_step() -> None:
    with pytest.raises(sp.BadArgumentError, match="store must be a Store, not str"):
        newest_common_step("x")  # type: ignore[arg-type]


def test_what_a_run_left_behind_is_not_its_newest_step(tmp_path: Path) -> None:
    first = sp.Store(tmp_path / "run", LOSSLESS)
    for step in (10, 20, 30):
        first.save(step, state(step))
    again = sp.Store(tmp_path / "run", LOSSLESS)
    again.load(10)
    with pytest.warns(StoreWarning):
        again.save(15, state(15))
    assert newest_common_step(sp.Store(tmp_path / "run"), drop=True) == 15
    assert sp.Store(tmp_path / "run").steps() == [10, 15, 20, 30]
