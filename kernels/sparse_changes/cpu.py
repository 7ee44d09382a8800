"""Sparse changes on the CPU: NumPy finds the positions, the range coder codes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..backend.arrays import like, to_numpy, writeable
from ..errors import CorruptDataError
from ..rangecoder import cpu as rangecoder

if TYPE_CHECKING:
    from ..backend.arrays import Array


def rare_encode(symbols: Array, expected: Array) -> Array:
    """See `shrinkpoint.kernels.sparse_changes.rare_encode`."""
    own, usual = to_numpy(symbols), to_numpy(expected)
    places = np.flatnonzero(own != usual)
    data = rangecoder.pack_changes(own[places], usual[places], places, own.size)
    return like(data, symbols)


def rare_decode(data: Array, expected: Array) -> Array:
    """See `shrinkpoint.kernels.sparse_changes.rare_decode`."""
    own = writeable(expected)
    out = own.copy()
    if not rangecoder.unpack_changes(writeable(data), own, out):
        raise CorruptDataError(f"{data.shape[0]} bytes do not encode the changes of {own.size} elements")
    return like(out, expected)
