"""Low-bit optimizers: states are restored exactly, and trainings continue exactly."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shrinkpoint as sp

from .common import difference

BITSANDBYTES = ("AdamW8bit", "Adam8bit", "Lion8bit", "RMSprop8bit", "SGD8bit", "AdEMAMix8bit")
TORCHAO = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def imported(name: str) -> Any:
    """Import a library without its warnings; skip the test if it is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except ImportError:
            pytest.skip(f"{name} is not installed; `make frameworks` has it")


@pytest.fixture(params=[*(f"bitsandbytes.optim.{n}" for n in BITSANDBYTES), *(f"torchao.optim.{n}" for n in TORCHAO)])
def optimizer(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Make an optimizer whose steps are not compiled."""
    module, _, name = request.param.rpartition(".")
    found = getattr(imported(module), name)
    torch.compiler.set_stance("force_eager")
    yield found
    torch.compiler.set_stance("default")


class Run:
    """A small training, its batches drawn from their number."""

    def __init__(self, optimizer: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(128, 96), torch.nn.Tanh(), torch.nn.Linear(96, 128))
        more = {"momentum": 0.9} if "SGD" in optimizer.__name__ else {}
        self.optimizer = optimizer(self.model.parameters(), lr=1e-3, **more)
        self.done = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = torch.randn(32, 128, generator=torch.Generator().manual_seed(self.done))
            (self.model(x) - x.roll(1, 1)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.done += 1

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "done": self.done}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]


def low_bit(state: dict[str, Any]) -> bool:
    """Return whether an optimizer entry holds codes of 8 bits or fewer."""
    leaves = torch.utils._pytree.tree_leaves(state)
    inner = [getattr(x, n) for x in leaves if hasattr(x, "__tensor_flatten__") for n in x.__tensor_flatten__()[0]]
    tensors = [x for x in [*leaves, *inner] if isinstance(x, torch.Tensor)]
    return any(x.element_size() == 1 and x.numel() > 1000 for x in tensors)


@pytest.mark.filterwarnings("ignore")
def test_states_come_back_to_the_bit_and_the_training_goes_on_as_if_never_stopped(optimizer: Any) -> None:
    """Low-bit states are exact in bases and deltas, and a resumed run continues exactly."""
    run = Run(optimizer)
    run.train(3)
    prev = read = kept = None
    for _ in range(3):
        run.train(2)
        state = run.state()
        coded = [k for k, entry in state["optimizer"]["state"].items() if low_bit(entry)]
        assert len(coded) >= 2  # the matrices; the state of biases is plain
        prev, kept = sp.compress(state, prev), sp.compress(state, kept, sp.presets.lossless())
        read = sp.Checkpoint.from_bytes(prev.to_bytes(), prev=read)
        found = sp.decompress(read)["optimizer"]["state"]
        for k in coded:
            assert difference(found[k], state["optimizer"]["state"][k]) == ""
        assert difference(sp.decompress(kept), state) == ""
    assert kept is not None
    again = Run(optimizer)
    again.restore(sp.decompress(sp.Checkpoint.from_bytes(sp.compress(state, cfg=sp.presets.lossless()).to_bytes())))
    run.train(4)
    again.train(4)
    assert difference(again.state(), run.state()) == ""
