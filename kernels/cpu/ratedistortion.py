"""Rate-distortion-optimised levels on the CPU: one pass, four candidates, no branch on the data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import dtype_name, like, to_numpy
from ..errors import BadArgumentError
from .jit import njit

if TYPE_CHECKING:
    from ..arrays import Array

_STEP = 1 << 20


@njit
def _choose(x: Any, levels: Any, previous: Any, codebook: Any, prices: Any, importance: Any, out: Any) -> bool:
    two, top = np.int64(2), np.int64(codebook.size + 1)
    contexts = prices.shape[0]
    weighted = importance.size > 0
    s = np.float32(1.0)
    for i in range(x.size):
        nearest: Any = np.int64(levels[i])
        p: Any = np.int64(previous[i])
        if p >= contexts or nearest > top:
            return False
        if nearest < 2:
            out[i] = nearest
            continue
        v = x[i]
        if weighted:
            s = importance[i]
        below, above = max(nearest - 1, two), min(nearest + 1, top)
        old = min(p, top) if p >= two else nearest
        d = v - codebook[nearest - 2]
        best = nearest
        least = s * (d * d) + prices[p, nearest]
        for candidate in (below, above, old):
            d = v - codebook[candidate - 2]
            cost = s * (d * d) + prices[p, candidate]
            best = candidate if cost < least else best
            least = min(cost, least)
        out[i] = best
    return True


def rate_distortion_levels(
    x: Array,
    levels: Array,
    previous: Array,
    codebook: Array,
    prices: np.ndarray[Any, np.dtype[np.float32]],
    importance: Array | None = None,
) -> Array:
    """See `kernels.ratedistortion`."""
    own, before = to_numpy(levels), to_numpy(previous)
    out = np.empty(own.size, np.uint8)
    weights = np.empty(0, np.float32) if importance is None else to_numpy(importance)
    for start in range(0, own.size, _STEP):
        part = slice(start, start + _STEP)
        values = to_numpy(x[part])
        if dtype_name(x) == "bfloat16":
            values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        values = values.astype(np.float32, copy=False)
        if not _choose(values, own[part], before[part], codebook, prices, weights[part], out[part]):
            raise BadArgumentError("a level is beyond the codebook, or a previous level beyond the prices")
    return like(out, x)
