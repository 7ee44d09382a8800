"""The five levels keep their promises along a chain of a small AdamW training."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shrinkpoint as sp

from .common import difference

STEPS, SPACING, COUNT, FURTHER = 300, 10, 4, 60


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.ReLU(), torch.nn.Linear(256, 256),
        torch.nn.ReLU(), torch.nn.Linear(256, 10),
    )  # fmt: skip


@cache
def task() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and the classes of a teacher network; the last 4,000 are held out."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8000, 64, generator=generator)
    hidden = torch.tanh(x @ torch.randn(64, 32, generator=generator) / 4)
    return x, (hidden @ torch.randn(32, 10, generator=generator)).argmax(-1)


@dataclass
class Run:
    """A training, a function of its steps alone."""

    net: torch.nn.Sequential = field(default_factory=model)
    step: int = 0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=2e-3)

    def train(self, until: int) -> None:
        x, y = task()
        while self.step < until:
            at = torch.randint(0, 4000, (64,), generator=torch.Generator().manual_seed(self.step))
            self.optimizer.zero_grad()
            F.cross_entropy(self.net(x[at]), y[at]).backward()
            self.optimizer.step()
            self.step += 1

    @torch.no_grad()
    def answers(self) -> tuple[torch.Tensor, float]:
        """Classes of the held-out inputs and the mean loss."""
        x, y = task()
        self.net.eval()
        logits = self.net(x[4000:])
        self.net.train()
        return logits.argmax(-1), float(F.cross_entropy(logits, y[4000:]))

    def state(self) -> Any:
        found = {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        return torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, found)

    def restore(self, state: Any, step: int) -> None:
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = step


@cache
def trained() -> list[Any]:
    """States of the last checkpoints."""
    run, states = Run(), []
    for step in range(STEPS - (COUNT - 1) * SPACING, STEPS + 1, SPACING):
        run.train(step)
        states.append(run.state())
    return states


def chain(cfg: sp.Config) -> list[sp.Checkpoint]:
    found: list[sp.Checkpoint] = []
    run = Run()
    kinds = sp.kinds(run.net, run.optimizer)
    for state in trained():
        found.append(sp.compress(state, found[-1] if found else None, cfg, kinds=kinds))
    return found


def resumed(state: Any) -> tuple[Run, Run]:
    """Return a run from a restored state, and one from the exact state."""
    runs = Run(), Run()
    for run, own in zip(runs, (state, trained()[-1]), strict=True):
        run.restore(own, STEPS)
    return runs


def restored(cfg: sp.Config) -> tuple[Any, list[sp.Checkpoint]]:
    made = chain(cfg)
    return sp.decompress(made[-1]), made


def ratio_of_deltas(made: list[sp.Checkpoint]) -> float:
    assert all(ckpt.is_delta for ckpt in made[1:])
    return sum(c.raw_nbytes for c in made[1:]) / sum(c.nbytes for c in made[1:])


def test_lossless_keeps_every_bit() -> None:
    state, made = restored(sp.presets.lossless())
    assert difference(state, trained()[-1]) == ""
    assert ratio_of_deltas(made) > 1.38


def test_exact_weights_keeps_the_model_and_bounds_the_moments() -> None:
    state, made = restored(sp.presets.exact_weights())
    assert difference(state["model"], trained()[-1]["model"]) == ""
    assert ratio_of_deltas(made) > 3.2
    check_fine_moments(state)
    check_end(state)


def test_precise_bounds_weights_and_moments() -> None:
    state, made = restored(sp.presets.precise())
    assert ratio_of_deltas(made) > 9
    for name, weight in trained()[-1]["model"].items():
        got = state["model"][name]
        if weight.ndim < 2:
            assert torch.equal(got, weight)
        else:
            assert 0 < float((got - weight).norm() / weight.norm()) <= 0.00125
    streams = {row.stream for row in made[-1].summary() if row.path.startswith("model/") and len(row.shape) > 1}
    assert streams == {"multiples"}
    check_fine_moments(state)
    check_end(state)


def check_fine_moments(state: Any) -> None:
    """Check that moments are within a quarter step and 1/8 octave, without bias."""
    for number, entry in trained()[-1]["optimizer"]["state"].items():
        got = state["optimizer"]["state"][number]
        m, v = entry["exp_avg"].double(), entry["exp_avg_sq"].double()
        assert float((got["exp_avg"] - m).norm() / m.norm()) <= 0.3
        assert float((got["exp_avg"] * m).sum() / (m * m).sum()) == pytest.approx(1, abs=0.02)
        kept = v > 0
        assert float(torch.log2(got["exp_avg_sq"].double()[kept] / v[kept]).abs().max()) <= 0.14


def check_end(state: Any) -> None:
    """Check that a resumed training ends as one from the exact state."""
    own, exact = resumed(state)
    for run in (own, exact):
        run.train(STEPS + FURTHER)
    assert own.answers()[1] == pytest.approx(exact.answers()[1], rel=0.003)


def test_the_default_answers_as_the_original_does() -> None:
    state, made = restored(sp.Config())
    own, exact = resumed(state)
    (answers, loss), (expected, original) = own.answers(), exact.answers()
    assert float((answers == expected).double().mean()) >= 0.985
    assert loss == pytest.approx(original, rel=0.003)
    assert made[0].ratio > 9
    assert ratio_of_deltas(made) > 24
    for run in (own, exact):
        run.train(STEPS + FURTHER)
    assert own.answers()[1] == pytest.approx(exact.answers()[1], rel=0.01)


def test_compact_is_small_and_says_what_it_loses() -> None:
    state, made = restored(sp.presets.compact())
    own, exact = resumed(state)
    assert own.answers()[1] == pytest.approx(exact.answers()[1], rel=0.05)
    assert ratio_of_deltas(made) > 60
    notes = [row.note for row in made[-1].summary() if row.path.endswith("/exp_avg")]
    assert any("as good as zero" in note for note in notes)
    for run in (own, exact):
        run.train(STEPS + FURTHER)
    assert own.answers()[1] == pytest.approx(exact.answers()[1], rel=0.05)
