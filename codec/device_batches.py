"""Batches of arrays on one GPU, which are processed with one launch and one wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..kernels.backend.arrays import device_of, on_gpu
from .base import Leaf
from .parallel import map_chunks

B = TypeVar("B")


def batches(leaves: Sequence[Leaf]) -> list[list[int]]:
    """Return the array numbers of each call: all arrays of a GPU, or one array on the host."""
    groups: dict[tuple[int, int] | int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(device_of(leaf.flat) if on_gpu(leaf.flat) else i, []).append(i)
    return list(groups.values())


def map_batches(work: Callable[[list[int]], Sequence[B]], leaves: Sequence[Leaf]) -> list[B]:
    """Return the results of `work` in order; it is called with a batch's numbers on any thread."""
    groups = batches(leaves)
    done = map_chunks(work, groups)
    found = {
        i: result for group, results in zip(groups, done, strict=True) for i, result in zip(group, results, strict=True)
    }
    return [found[i] for i in range(len(leaves))]
