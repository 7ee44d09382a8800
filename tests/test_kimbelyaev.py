"""The baseline of Kim and Belyaev: codes are restored, and contexts save bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shrinkpoint.bench.studies.baselines.excp import ExCP, KimBelyaev, Restored, _decode, _encode, coded_size
from shrinkpoint.bench.studies.baselines.parts import Saved, State
from shrinkpoint.codec.errors import MissingParentError
from shrinkpoint.codec.state.leaves import LeafSpec

SHAPE = (48, 64)


def states(count: int = 4) -> list[State]:
    """Checkpoints that move most where they moved before."""
    g = torch.Generator().manual_seed(0)
    where = torch.randn(SHAPE, generator=g).pow(3)
    weight, found = torch.randn(SHAPE, generator=g) * 0.02, []
    for step in range(count):
        weight = weight + 1e-4 * where * (1 + 0.1 * torch.randn(SHAPE, generator=g))
        moments = {"step": torch.tensor(float(step)), "exp_avg": 1e-3 * where, "exp_avg_sq": 1e-6 * where.square()}
        optimizer = {"state": {0: moments}, "param_groups": [{"lr": 1e-3, "params": [0]}]}
        found.append({"model": {"a.weight": weight, "ids": torch.arange(9)}, "optimizer": optimizer, "step": step})
    return found


def chain() -> list[tuple[State, Saved, Restored]]:
    system, previous, found = KimBelyaev(), None, []
    for state in states():
        saved = system.encode(state, previous)
        previous = system.decode(saved, previous)
        found.append((state, saved, previous))
    return found


def test_restores_what_excp_does() -> None:
    """A chain restores the same values as ExCP, whose codes it codes."""
    other = None
    for state, _, restored in chain():
        other = ExCP().decode(ExCP().encode(state, other), other)
        for a, b in zip(*map(torch.utils._pytree.tree_leaves, (restored.state, other)), strict=True):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_a_delta_is_smaller_than_excp_s() -> None:
    found, excp = chain(), None
    for state, saved, _ in found:
        theirs = ExCP().encode(state, excp)
        excp = ExCP().decode(theirs, excp)
        if state["step"] >= 2:  # the first delta has no residuals before it
            assert saved.nbytes < theirs.nbytes


def test_other_codes_as_parent_are_an_error() -> None:
    (_, _, first), (_, _, second), (state, saved, _), *_ = chain()
    with pytest.raises(MissingParentError):
        KimBelyaev().decode(saved, first)
    changed = {key: codes[::-1].copy() for key, codes in second.codes.items()}
    with pytest.raises(MissingParentError, match="codes"):
        KimBelyaev().decode(saved, Restored(second.state, changed))
    with pytest.raises(MissingParentError):
        KimBelyaev().decode(saved, None)
    assert KimBelyaev().encode(state, second) == saved  # pure


@pytest.mark.parametrize("seed", range(3))
def test_contexts_help_where_codes_repeat(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spec = LeafSpec("numpy", "float32", (256, 256))
    last = (rng.random(spec.size) ** 4 * 16).astype(np.uint8)
    same = coded_size(last, last, spec)
    alone = coded_size(last, None, spec)
    assert same < 0.4 * alone
    counts = np.bincount(last) / last.size
    entropy = -(counts[counts > 0] * np.log2(counts[counts > 0])).sum() * last.size / 8
    assert entropy < alone < 1.15 * entropy + 64


@pytest.mark.parametrize(
    "codes", [np.arange(5000) % 251, np.full(5000, 255), np.zeros(5000)], ids=["many", "one", "zero"]
)
def test_hard_codes_come_back(codes: np.ndarray) -> None:  # type: ignore[type-arg]
    """Codes are restored, including those whose carries run through bytes of 255."""
    codes = np.random.default_rng(1).permutation(codes.astype(np.uint8))
    data, contexts, again = (
        np.zeros(8 * codes.size + 64, np.uint8),
        np.zeros(codes.size, np.int64),
        np.zeros_like(codes),
    )
    size = _encode(codes, contexts, data)
    assert _decode(data[:size].copy(), contexts, again) <= size + 4
    assert np.array_equal(codes, again)
