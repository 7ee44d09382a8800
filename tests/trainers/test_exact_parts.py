"""Parts that `trainers.save` keeps exact: frozen parameters, positions, untrained state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shrinkpoint as sp
from shrinkpoint import trainers


class Part:
    """An object with a state dict."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Features(nn.Module):
    """Fixed random features, held in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.B = nn.Parameter(torch.randn(64, 64), requires_grad=False)
        self.out = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.cat([(x @ self.B).sin(), (x @ self.B).cos()], -1))


def trained() -> tuple[Features, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Features()
    optimizer = torch.optim.AdamW(model.out.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("lossy_rate", [0.0, 0.01])
def test_a_frozen_parameter_is_restored_to_the_bit(lossy_rate: float) -> None:
    model, optimizer = trained()
    store = sp.Store(f"memory://exact-parts-{lossy_rate}", sp.Config(rate=lossy_rate))
    trainers.save(store, 1, model, optimizer)
    restored = Features()
    trainers.resume(store, restored, torch.optim.AdamW(restored.out.parameters()))
    assert torch.equal(model.B, restored.B)
    assert not torch.equal(model.out.weight, restored.out.weight)


def test_parts_that_hold_no_weights_are_restored_to_the_bit() -> None:
    model, optimizer = trained()
    stamps, shuffle, table = 1.7e9 + np.arange(2000.0), torch.randn(64, 32), torch.randn(128, 64)
    store = sp.Store("memory://exact-parts-of-a-run")
    given: dict[str, Any] = {
        "loader": Part(buffer=shuffle),
        "more": {"replay": Part(stamps=stamps, weight=table)},
    }
    trainers.save(store, 1, model, optimizer, **given)
    loader, replay = Part(), Part()
    trainers.resume(store, model, optimizer, loader=loader, more={"replay": replay})
    assert np.array_equal(replay.state["stamps"], stamps)
    assert torch.equal(replay.state["weight"], table)
    assert torch.equal(loader.state["buffer"], shuffle)


def test_both_of_two_optimizers_say_what_they_train() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizers = [
        torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(model[1].parameters()),
    ]
    model(torch.randn(8, 64)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    store = sp.Store("memory://two-optimizers")
    trainers.save(store, 1, model, optimizers)
    rows = {row.path: row for row in store.read(1).summary()}
    assert all(rows[f"model/{i}.weight"].why == "kinds: linear" for i in (0, 1))
    assert all(rows[f"model/{i}.weight"].error > 0 for i in (0, 1))
