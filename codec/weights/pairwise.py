"""Sums of squares on a GPU, to the bit those of NumPy on the host.

NumPy halves an array until a part has at most 128 elements, adds up each part in eight lanes, and then the parts. The
step of `uniform_quantizer` follows from such a sum, so that the sum must not depend on the device.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..state.leaves import Array, NpArray

_LANES, _MOST = 8, 128


def square_sum(x: Array) -> Array:
    """Return `numpy.square(x, dtype="float64").sum()` of a tensor, without axes, on its device.

    Args:
        x: float32 or float64 [n], n at least 1.
    """
    import torch

    def there(a: NpArray) -> Any:
        return torch.from_numpy(a).to(x.device)

    halvings, sizes = _parts(x.shape[0])
    size, place = there(sizes)[:, None], torch.arange(_MOST, device=x.device)
    first = size.cumsum(0) - size
    values = x[(first + place).clamp(max=x.shape[0] - 1)].double()
    # Squares past the end are zeros, which change no sum.
    squares = torch.where(place < size, values * values, 0.0)
    whole = size - size % _LANES
    rows = torch.where(place < whole, squares, 0.0).view(-1, _MOST // _LANES, _LANES)
    sums = rows[:, 0]
    for k in range(1, rows.shape[1]):
        sums = sums + rows[:, k]
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    for k in range(_LANES - 1):
        sums = sums + torch.where(whole + k < size, squares.gather(1, (whole + k).clamp(max=_MOST - 1)), 0.0)
    total = sums[:, 0]
    for halved in reversed(halvings):
        split = there(halved)
        at = (1 + split).cumsum(0) - 1 - split
        total = torch.where(split > 0, total[at] + total[at + split], total[at])
    return total[0]


@functools.lru_cache(maxsize=4)
def _parts(n: int) -> tuple[list[NpArray], NpArray]:
    """Return which parts are halved on each level, int64 of 0 and 1, and the sizes of the last, int64."""
    halvings, sizes = [], np.array([n], np.int64)
    while sizes.max() > _MOST:
        is_long = sizes > _MOST
        left = np.where(is_long, sizes // 2 - sizes // 2 % _LANES, sizes)
        halvings.append(is_long.astype(np.int64))
        both = np.stack([left, sizes - left], axis=1).reshape(-1)
        sizes = both[both > 0]
    return halvings, sizes
