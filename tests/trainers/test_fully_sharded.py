"""Sharded saves in the background whose start fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shrinkpoint as sp
from shrinkpoint.trainers import fully_sharded
from shrinkpoint.trainers.pointers import in_flight, read_pointer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_nothing_waits_for_a_save_that_did_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for the copy")

    saves = fully_sharded.ShardedSaves(sp.Store(tmp_path / "store", "lossless"), background=True)
    calls: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(fully_sharded, "async_save", fail)
        with pytest.raises(MemoryError, match="no room"):
            saves.save(tmp_path / "a.json", {"w": torch.ones(4)})
    assert not in_flight
    assert read_pointer(tmp_path / "a.json") is None
    saves.save(tmp_path / "a.json", {"w": torch.ones(4)})
    saves.then(lambda store: calls.append(1))
    saves.close()
    assert calls == [1]
    assert read_pointer(tmp_path / "a.json") is not None
