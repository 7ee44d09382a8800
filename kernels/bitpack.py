"""Packing of integers with a fixed number of bits each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arguments import array, choice, integer
from .arrays import back_end
from .coder_arguments import UNSIGNED, room_for, stored_bytes

if TYPE_CHECKING:
    from .arrays import Array


def pack_bits(values: Array, width: int) -> Array:
    """Pack integers with `width` bits each, the first value in the lowest bits.

    Value i takes bits `i * width ... (i + 1) * width - 1` of the result, counted from the least significant bit.

    Args:
        values: uint8[n], uint16[n] or uint32[n], each below `2**width`.
        width: bits a value, 0 ... 32; 0 stores nothing and takes only zeros.

    Returns:
        uint8[ceil(n * width / 8)] on the same device; the bits after the last value are zero.

    Raises:
        BadArgumentError: wrong dtype, shape or width, or a value that needs more than `width` bits.

    Example:
        >>> import numpy as np
        >>> pack_bits(np.asarray([1, 2, 3, 7], np.uint8), 3).tolist()  # 111 011 010 001
        [209, 14]

    Source: BitSnap (2025), section 3; the order of bits is that of Arrow and Parquet.
    """
    values = array("values", values, UNSIGNED, 1)
    return back_end(values, "bitpack").pack_bits(values, integer("width", width, 0, 32))


def unpack_bits(data: Array | bytes, width: int, n: int, dtype: str = "uint8") -> Array:
    """Return the n values that `pack_bits` packed into `data`.

    Args:
        data: uint8[ceil(n * width / 8)] or as many bytes.
        width: bits a value, 0 ... the width of dtype.
        n: number of values, >= 0.
        dtype: "uint8", "uint16" or "uint32" of the result.

    Returns:
        array of dtype, [n], of the same library and on the same device as `data` (NumPy for bytes).

    Raises:
        BadArgumentError: an argument out of range.
        CorruptDataError: the number of bytes is not that of n values, or a bit is set after the last value.

    Example:
        >>> unpack_bits(bytes([209, 14]), 3, 4).tolist()
        [1, 2, 3, 7]

    Source: BitSnap (2025), section 3.
    """
    data = stored_bytes(data, anywhere=True)
    width = integer("width", width, 0, int(choice("dtype", dtype, UNSIGNED)[4:]))
    n = integer("n", n, 0, 2**56)
    with room_for(n):
        return back_end(data, "bitpack").unpack_bits(data, width, n, dtype)
