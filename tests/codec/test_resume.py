"""Trainings resume from lossy checkpoints with every optimizer of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp

from .common import through_bytes

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=2e-3),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=2e-3, amsgrad=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "RMSprop momentum": lambda p: torch.optim.RMSprop(p, lr=3e-4, momentum=0.9),
    "RMSprop centered": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=2e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=2e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=2e-3),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=2e-3),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Muon": lambda p: torch.optim.Muon([x for x in p if x.ndim == 2], lr=1e-2),
}
STEPS = 60
FACTOR = {0.0: 1.03, 0.001: 1.05}
"""How many times the loss of the exact resume the lossy one's may be, by rate: held-out, after as many steps again."""


class Training:
    """A small regression: two layers, both of them large enough to be stored with a loss."""

    def __init__(self, make: Make) -> None:
        torch.manual_seed(0)
        inputs = torch.randn(1024, 48)
        targets = torch.tanh(inputs @ torch.randn(48, 32)) + 0.1 * torch.randn(1024, 32)
        self.train, self.held = (inputs[:768], targets[:768]), (inputs[768:], targets[768:])
        self.model = torch.nn.Sequential(torch.nn.Linear(48, 96), torch.nn.Tanh(), torch.nn.Linear(96, 32))
        self.optimizer = make(list(self.model.parameters()))

    def run(self, steps: int, seed: int) -> None:
        order = torch.Generator().manual_seed(seed)
        whole = isinstance(self.optimizer, torch.optim.Rprop)  # its signs are for the whole batch
        for _ in range(steps):
            at = torch.arange(768) if whole else torch.randint(0, 768, (128,), generator=order)
            self.optimizer.zero_grad()
            (self.model(self.train[0][at]) - self.train[1][at]).square().mean().backward()
            self.optimizer.step()

    def loss(self) -> float:
        with torch.no_grad():
            return float((self.model(self.held[0]) - self.held[1]).square().mean())

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_lossy_resume_goes_on_like_an_exact_one(name: str) -> None:
    training = Training(OPTIMIZERS[name])
    start = training.loss()
    training.run(STEPS - 10, 0)
    before = training.state()
    training.run(10, 1)
    state = training.state()

    def resumed(given: dict[str, Any]) -> float:
        training.load(given)
        training.run(STEPS, 2)
        return training.loss()

    exact = resumed(state)
    assert exact < 0.9 * start
    for rate, factor in FACTOR.items():
        cfg = sp.Config(rate=rate)
        base = sp.compress(before, cfg=cfg)
        # What the rate holds back shows in a delta only.
        delta = sp.compress(state, base, cfg)
        assert any(row.measure != "exact" for row in delta.summary())
        for ckpt, parent in ((sp.compress(state, cfg=cfg), None), (delta, base)):
            ended = resumed(through_bytes(ckpt, parent))
            assert np.isfinite(ended)
            assert ended < factor * exact, (rate, parent is not None, ended / exact)
