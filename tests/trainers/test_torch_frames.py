"""Functions of torch that are looked up in stack frames still have their names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.planner import SavePlan
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shrinkpoint.trainers.dcp import Writer
from shrinkpoint.trainers.dcp import writer as writer_module
from shrinkpoint.trainers.optimizer_hooks import Nesting

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:.*no_dist")


class _Watched(Writer):
    """A writer that records whether its thread is seen as saving."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.seen = writer_module._is_saving(threading.get_ident(), self)
        return super().prepare_local_plan(plan)


@pytest.mark.parametrize("call", [dcp.save, dcp.async_save], ids=["save", "async_save"])
def test_a_save_of_torch_is_seen_in_its_thread(tmp_path: Path, call: Callable[..., Any]) -> None:
    writer = _Watched(tmp_path / "a")
    state = {"w": torch.zeros(4)}
    result = call(state, storage_writer=writer)
    if call is dcp.async_save:
        result.result()
    assert writer.seen
    assert not writer_module._is_saving(threading.get_ident(), writer)


def test_the_frame_around_an_optimizer_step_is_found() -> None:
    nesting, frames = Nesting(), []
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def before(_: Any, args: Any, kwargs: Any) -> None:
        parameters = list(model.parameters())
        nesting.enter(parameters, frozenset(map(id, parameters)))
        frames.append(nesting._under_way[threading.get_ident()][-1][0])

    handle = register_optimizer_step_pre_hook(before)
    try:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    finally:
        handle.remove()
    # 0: no frame of torch.optim.optimizer was on the stack, and nested steps cannot be distinguished.
    assert len(frames) == 1
    assert frames[0] != 0
