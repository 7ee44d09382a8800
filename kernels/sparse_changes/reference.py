"""Oracle of the rare changes: see `rangecoder`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..backend.lists import array, numbers
from ..rangecoder import reference as rangecoder

if TYPE_CHECKING:
    from ..backend.arrays import Array


def rare_encode(symbols: Array, expected: Array) -> Array:
    """See `shrinkpoint.kernels.sparse_changes.rare_encode`."""
    return array(list(rangecoder.pack_changes(numbers(symbols), numbers(expected))), "uint8", symbols)


def rare_decode(data: Array, expected: Array) -> Array:
    """See `shrinkpoint.kernels.sparse_changes.rare_decode`."""
    return array(rangecoder.unpack_changes(bytes(numbers(data)), numbers(expected)), "uint8", expected)
