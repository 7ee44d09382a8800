"""Small trained models, their states, and the measured points of a cube."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

import shrinkpoint as sp
from shrinkpoint.bench.studies.workloads import WORKLOADS, Run, Workload
from shrinkpoint.searching.cube import Cube, Point, normal
from shrinkpoint.searching.search_state import SearchState
from shrinkpoint.trainers.sensitivity import SensitivityTracker

from .calls import search_state

State = dict[str, Any]


@dataclass(frozen=True)
class Chain:
    """States of a training, gradient averages before each, and the evaluation of a state."""

    states: list[State]
    grads: list[dict[str, Tensor]]
    evaluate: Callable[[State], float]


@lru_cache(None)
def perceptron() -> Chain:
    """Train a perceptron on a random teacher's classes; return states early to late."""
    generator = torch.Generator().manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 10))
    model = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10))
    with torch.no_grad():
        for p in [*teacher.parameters(), *model.parameters()]:
            p.copy_(torch.randn(p.shape, generator=generator) * (1.5 / p.shape[-1] ** 0.5 if p.ndim > 1 else 0.1))
    inputs = torch.randn(12_000, 32, generator=generator)
    classes = teacher(inputs).argmax(1).detach()
    held_out = 8_000
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, 300)
    states, grads = [], []
    with SensitivityTracker(model, every=None) as tracker:
        for step in range(1, 321):
            batch = torch.randint(held_out, (128,), generator=generator)
            loss = nn.functional.cross_entropy(model(inputs[batch]), classes[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            if step in (60, 300, 310, 320):
                states.append(copy.deepcopy({"model": model.state_dict(), "step": step}))
                grads.append(tracker.grads() or {})
    probe = copy.deepcopy(model)

    @torch.no_grad()
    def evaluate(state: State) -> float:
        probe.load_state_dict(state["model"])
        return float(nn.functional.cross_entropy(probe(inputs[held_out:]), classes[held_out:]))

    return Chain(states, grads, evaluate)


def trained(workload: Workload, steps: tuple[int, ...]) -> Chain:
    """Return states of a workload of the benches, and its loss on held-out data."""
    run = Run(workload, 0)
    states, grads = [], []
    with SensitivityTracker(run.model, every=None) as tracker:
        for step in steps:
            run.train(step)
            states.append({"model": copy.deepcopy(run.model.state_dict())})
            grads.append(tracker.grads() or {})
    probe, batches = copy.deepcopy(run.model).eval(), workload.held_out()[:2]

    @torch.no_grad()
    def evaluate(state: State) -> float:
        probe.load_state_dict(state["model"])
        return statistics.fmean(float(workload.loss(probe, batch)) for batch in batches)

    return Chain(states, grads, evaluate)


@lru_cache(None)
def convolutional() -> Chain:
    """A small CNN on digits in the middle of its training."""
    return trained(WORKLOADS["CNN"](), (130, 150))


@lru_cache(None)
def clicks() -> Chain:
    """Return a click predictor, which consists mostly of embeddings."""
    return trained(WORKLOADS["embedding"](), (60, 80))


@dataclass(frozen=True)
class Measured:
    """Measured bytes and quality of a point."""

    nbytes: int
    quality: float


def brute_force(chain: Chain, number: int, cube: Cube, prev: sp.Checkpoint | None = None) -> dict[Point, Measured]:
    """Compress, restore and evaluate at every point of the cube."""
    found = {}
    for point in dict.fromkeys(normal(p) for p in cube):
        cfg = point.config()
        ckpt = sp.compress(chain.states[number], prev, cfg, grads=chain.grads[number])
        found[point] = Measured(ckpt.nbytes, chain.evaluate(sp.decompress(ckpt)))
    return found


def optimum(measured: dict[Point, Measured], baseline: float, threshold: float) -> int | None:
    """Return the bytes of the smallest point within the threshold."""
    passing = [m.nbytes for m in measured.values() if (m.quality - baseline) / abs(baseline) <= threshold]
    return min(passing, default=None)


def subject(chain: Chain, number: int, prev: sp.Checkpoint | None = None, point: Point | None = None) -> SearchState:
    """Return the search state of a chain's state."""
    return search_state(chain.states[number], point or next(iter(Cube())), prev, chain.grads[number])
