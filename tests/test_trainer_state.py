"""Captured training state: plain values only, from which a run continues exactly."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shrinkpoint.kernels.errors import BadArgumentError
from shrinkpoint.trainers.state import capture, capture_rng, restore, restore_rng

LEAVES = (bool, int, float, str, bytes, type(None))


class Job:
    """A training that uses every random generator."""

    def __init__(self, seed: int, optimizer: str = "AdamW") -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Embedding(11, 6), nn.Dropout(0.5), nn.Flatten(), nn.Linear(24, 3), nn.BatchNorm1d(3)
        )
        make: Any = getattr(torch.optim, optimizer)
        self.optimizer = make(self.model.parameters(), lr=0.05)
        warm = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 4))
        self.scheduler = torch.optim.lr_scheduler.ChainedScheduler(
            [warm, torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)]
        )
        self.generators = {
            "torch": torch.Generator().manual_seed(seed),
            "numpy": np.random.default_rng(seed),
            "mersenne": np.random.Generator(np.random.MT19937(seed)),
            "python": random.Random(seed),
        }

    def step(self) -> float:
        generators = self.generators
        shift = int(np.random.randint(5)) + random.randrange(3)  # noqa: NPY002
        shift += int(generators["numpy"].integers(4)) + int(generators["mersenne"].integers(4))
        shift += generators["python"].randrange(4) + int(torch.randint(4, (), generator=generators["torch"]))
        tokens = (torch.randint(11, (5, 4)) + shift) % 11
        loss = self.model(tokens).square().sum() + shift
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "generators": self.generators,
        }


def leaves(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    if type(tree) is dict:
        return [leaf for key, value in tree.items() for leaf in leaves(value, f"{path}/{key}")]
    if type(tree) in (list, tuple):
        return [leaf for i, value in enumerate(tree) for leaf in leaves(value, f"{path}/{i}")]
    return [(path, tree)]


def same(a: Any, b: Any) -> bool:
    pairs = list(zip(leaves(a), leaves(b), strict=True))
    return all(
        path == other and (torch.equal(x, y) if isinstance(x, torch.Tensor) else np.array_equal(x, y))
        for (path, x), (other, y) in pairs
    )


def copied(tree: Any) -> Any:
    """Return a copy through plain values and arrays, as a store makes it."""
    if type(tree) is dict:
        return {key: copied(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(copied(value) for value in tree)
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    return tree.copy() if isinstance(tree, np.ndarray) else tree


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad"])
def test_a_restored_run_goes_on_bit_for_bit(optimizer: str) -> None:
    first = Job(1, optimizer)
    for _ in range(5):
        first.step()
    state = copied(capture(**first.parts(), position={"batch": 5, "shards": [2, 3]}))
    expected = [first.step() for _ in range(8)]
    second = Job(2, optimizer)
    second.step()
    torch.rand(7), random.random(), np.random.normal()  # noqa: NPY002
    assert restore(state, **second.parts()) == {"batch": 5, "shards": [2, 3]}
    assert same(capture(**second.parts(), position={"batch": 5, "shards": [2, 3]}), state)
    assert [second.step() for _ in range(8)] == expected
    # The state is untouched by the training that went on from it.
    third = Job(3, optimizer)
    restore(state, **third.parts())
    assert [third.step() for _ in range(8)] == expected


def test_the_state_is_plain() -> None:
    job = Job(0)
    job.step()
    state = capture(**job.parts(), position=OrderedDict(a=defaultdict(list, b=[1])))
    assert sorted(state) == ["generators", "model", "optimizer", "position", "rng", "scheduler"]
    for path, leaf in leaves(state):
        assert isinstance(leaf, torch.Tensor | np.ndarray) or type(leaf) in LEAVES, f"{path}: {type(leaf)}"
    assert state["optimizer"]["state"][0]["step"].ndim == 0
    assert state["position"] == {"a": {"b": [1]}}


def test_every_global_generator_is_captured() -> None:
    state = capture_rng()
    draws = [(random.gauss(0, 1), np.random.normal(), torch.randn(3).tolist()) for _ in range(3)]  # noqa: NPY002
    restore_rng(state)
    assert [(random.gauss(0, 1), np.random.normal(), torch.randn(3).tolist()) for _ in range(3)] == draws  # noqa: NPY002


def test_a_half_used_pair_of_normals_is_captured() -> None:
    """The second of a pair of normal numbers is part of the captured generator state."""
    random.seed(random.getrandbits(32)), np.random.seed(random.getrandbits(32))  # noqa: NPY002
    random.gauss(0, 1), np.random.normal()  # noqa: NPY002
    state = capture_rng()
    assert state["python"]["gauss"] is not None
    assert state["numpy"]["has_gauss"]
    draws = random.gauss(0, 1), np.random.normal()  # noqa: NPY002
    restore_rng(copied(state))
    assert (random.gauss(0, 1), np.random.normal()) == draws  # noqa: NPY002


def test_parts_left_out_are_not_touched() -> None:
    job, other = Job(1), Job(2)
    job.step()
    state = copied(capture(model=job.model))
    assert sorted(state) == ["model", "position", "rng"]
    before = capture_rng()
    assert restore(state, model=other.model, rng=False) is None
    assert same(dict(other.model.state_dict()), dict(job.model.state_dict()))
    assert same(capture_rng(), before)


@pytest.mark.parametrize("part", ["model", "optimizer", "scheduler", "generators"])
def test_a_missing_part_is_named_and_nothing_changes(part: str) -> None:
    job, other = Job(1), Job(2)
    state = copied(capture(**{name: value for name, value in job.parts().items() if name != part}))
    before = copied(capture(**other.parts()))
    with pytest.raises(BadArgumentError, match=f"has no .*{part}"):
        restore(state, **other.parts())
    assert same(capture(**other.parts()), before)


def test_unknown_generators_are_refused_before_anything_changes() -> None:
    job = Job(1)
    with pytest.raises(BadArgumentError, match="generators: 'mine' is a int"):
        capture(generators={"mine": 3})  # type: ignore[dict-item]
    state = copied(capture(model=job.model, generators=job.generators))
    other = Job(2)
    before = copied(capture(model=other.model))
    with pytest.raises(BadArgumentError, match="generators/new"):
        restore(state, model=other.model, generators={"new": random.Random()})
    with pytest.raises(BadArgumentError, match="'torch' is a str"):
        restore(state, model=other.model, generators={"torch": "x"})  # type: ignore[dict-item]
    assert same(capture(model=other.model), before)
