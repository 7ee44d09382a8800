"""The rate-distortion encoder: prices from the statistics being coded, iterated towards a fixed point.

An encoder-only choice: the decoder reads levels and never knows. The error is always against the true weights, so it
does not accumulate along a chain.
"""

from __future__ import annotations

import numpy as np

from ..kernels.arrays import is_torch
from ..kernels.levels import joint_counts
from ..kernels.ratedistortion import rate_distortion_levels
from .leaves import Array, NpArray, on_host

ROUNDS = 3


def cheapest_levels(
    x: Array,
    nearest: Array,
    parent: NpArray | None,
    parent_size: int,
    codebook: NpArray,
    price: float,
    importance: Array | None = None,
) -> Array:
    """Levels that cost least in `importance * error**2 + price * bits`, the bits being what a conditional coder needs.

    Args:
        x: values, shape (n,).
        nearest: uint8, what `assign` gave.
        parent: uint8 on the host, the parent's levels, or None: all in one context.
        parent_size: number of levels of the parent, 1 without one.
        codebook: float64, ascending.
        price: squared error (times importance) worth one bit, >= 0.
        importance: float32, shape (n,), in the library and on the device of x; None: 1 for all.
    """
    size = codebook.size + 2
    contexts = max(parent_size, 2)
    before: Array = np.zeros(nearest.shape[0], np.uint8) if parent is None else parent
    if is_torch(x):
        import torch

        before = torch.from_numpy(before).to(x.device)
    codes = codebook.astype(np.float32)
    levels = nearest
    for _ in range(ROUNDS):
        prices = (price * _bits(on_host(joint_counts(before, levels, contexts, size)))).astype(np.float32)
        chosen = rate_distortion_levels(x, nearest, before, codes, prices, importance)
        if bool((chosen == levels).all()):
            break
        levels = chosen
    return levels


def _bits(counts: NpArray) -> NpArray:
    """Ideal code lengths, half a count added to each: a level nobody uses yet is dear, not impossible."""
    smoothed = counts + 0.5
    bits: NpArray = np.log2(smoothed.sum(axis=1, keepdims=True) / smoothed)
    return bits
