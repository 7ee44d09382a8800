"""Packing of integers of a fixed number of bits, and masks of changed elements.

Source: BitSnap, section 3.3 (improved bitmask sparsification): a mask of n / 8 bytes and the changed values, which is
smaller than the array if less than 15/16 of its 16-bit values changed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from ..backend.arguments import (
    UNSIGNED,
    array,
    check_arrays,
    choice,
    flag,
    integer,
    room_for,
    same_device,
    stored_bytes,
)
from ..backend.arrays import Array, dtype_name
from ..backend.dispatch import Dispatch
from ..errors import CorruptDataError
from ..planes import check_alike, width_of


class BackEnd(Protocol):
    """Functions that every back end of this subject has."""

    def pack_bits(self, values: Array, width: int, *, checked: bool = True) -> Array: ...
    def unpack_bits(self, data: Array, width: int, n: int, dtype: str = "uint8") -> Array: ...
    def changed_mask(self, current: Array, previous: Array) -> Array: ...
    def pack_mask(self, mask: Array) -> Array: ...
    def unpack_mask(self, data: Array, n: int) -> Array: ...
    def gather(self, x: Array, mask_bits: Array) -> Array: ...
    def scatter(self, base: Array, mask_bits: Array, values: Array) -> Array: ...


back_end = Dispatch[BackEnd]("packing")

if TYPE_CHECKING:
    from . import cpu, gpu, reference

    _EVERYWHERE: tuple[BackEnd, ...] = (reference, cpu, gpu)


def pack_bits(values: Array, width: int, *, checked: bool = True) -> Array:
    """Pack integers with `width` bits each, the first value in the lowest bits.

    Value i takes bits `i * width ... (i + 1) * width - 1` of the result, counted from the least significant bit.

    Args:
        values: uint8[n], uint16[n] or uint32[n], each below `2**width`.
        width: bits a value, 0 ... 32; 0 stores nothing and takes only zeros.
        checked: False: values are known to fit, so that a GPU need not be waited for; others give undefined bytes.

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
    return back_end(values).pack_bits(values, integer("width", width, 0, 32), checked=flag("checked", checked))


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
        return back_end(data).unpack_bits(data, width, n, dtype)


def changed_mask(current: Array, previous: Array) -> Array:
    """Packed bit mask of the elements whose bit patterns differ between two arrays.

        mask[k] = sum over q < 8 of [pattern(current[8 k + q]) != pattern(previous[8 k + q])] << q,   C order

    Patterns are compared: 0.0 and -0.0 differ, and a NaN equals itself. Bits after the last element are 0.

    Args:
        current: array of any shape; any dtype in `planes.WIDTHS`.
        previous: the same shape and dtype.

    Returns:
        uint8 [ceil(n / 8)], n the number of elements.

    Raises:
        BadArgumentError: shapes, dtypes or devices differ, or the dtype has no fixed width.

    Example:
        >>> import numpy as np
        >>> changed_mask(np.array([1.0, 0.0, 3.0]), np.array([1.0, -0.0, 4.0])).tolist()
        [6]
    """
    check_alike(current, previous)
    return back_end(current).changed_mask(current, previous)


def pack_mask(mask: Array) -> Array:
    """Pack a bool array into bits.

    Element i is bit i mod 8 of byte i div 8; the bits after the last element are 0.

    Args:
        mask: bool array of any shape, taken in C order.

    Returns:
        uint8 [ceil(n / 8)].

    Raises:
        BadArgumentError: `mask` is not bool.

    Example:
        >>> import numpy as np
        >>> pack_mask(np.array([True, False, True] + 6 * [False])).tolist()
        [5, 0]
    """
    array("mask", mask, ("bool",))
    return back_end(mask).pack_mask(mask)


def unpack_mask(data: Array, n: int) -> Array:
    """Return the n bools of a packed bit mask: the inverse of `pack_mask`.

    Args:
        data: uint8 [ceil(n / 8)].
        n: number of elements, at least 0.

    Returns:
        bool [n].

    Raises:
        BadArgumentError: n is negative, or `data` is not uint8.
        CorruptDataError: `data` has another length, or a bit after the last element is set.

    Example:
        >>> import numpy as np
        >>> unpack_mask(np.array([5], dtype="uint8"), 3).tolist()
        [True, False, True]
    """
    n = integer("n", n, 0, 2**62)
    _check_mask("data", data, n)
    return back_end(data).unpack_mask(data, n)


def gather(x: Array, mask_bits: Array) -> Array:
    """The elements of x whose mask bit is 1, in C order: `x.reshape(-1)[mask]`.

    Args:
        x: array of any shape; any dtype in `planes.WIDTHS`.
        mask_bits: uint8 [ceil(n / 8)] packed bits, n the number of elements of x.

    Returns:
        Flat array of x's dtype, as many elements as bits are set.

    Raises:
        BadArgumentError: `mask_bits` is not uint8 or lives elsewhere, or a dtype of no fixed width.
        CorruptDataError: `mask_bits` has another length, or a bit after the last element is set.

    Example:
        >>> import numpy as np
        >>> gather(np.array([1.0, 2.0, 3.0]), np.array([6], dtype="uint8")).tolist()
        [2.0, 3.0]
    """
    check_arrays(x=x)
    width_of(dtype_name(x))
    _check_mask("mask_bits", mask_bits, math.prod(x.shape))
    same_device("x", x, "mask_bits", mask_bits)
    return back_end(x).gather(x, mask_bits)


def scatter(base: Array, mask_bits: Array, values: Array) -> Array:
    """Replace the elements of `base` whose mask bit is 1 by `values`: the inverse of `gather`.

    Elements are taken in C order.

        out[i] = values[number of bits set before i] if bit i else base[i]

    Args:
        base: array of any shape; any dtype in `planes.WIDTHS`. It is not changed.
        mask_bits: uint8 [ceil(n / 8)] packed bits, n the number of elements of `base`.
        values: flat array of the dtype of `base`, as many elements as bits are set.

    Returns:
        New array of the dtype and shape of `base`.

    Raises:
        BadArgumentError: dtypes or devices differ, or `values` is not flat.
        CorruptDataError: `mask_bits` has another length, a bit after the last element is set, or the number of set bits
            is not the number of values.

    Example:
        >>> import numpy as np
        >>> scatter(np.zeros(3), np.array([6], dtype="uint8"), np.array([2.0, 3.0])).tolist()
        [0.0, 2.0, 3.0]
    """
    check_arrays(base=base)
    width_of(dtype_name(base))
    same_device("base", base, "values", array("values", values, (dtype_name(base),), 1))
    _check_mask("mask_bits", mask_bits, math.prod(base.shape))
    same_device("base", base, "mask_bits", mask_bits)
    return back_end(base).scatter(base, mask_bits, values)


def trailing_bits_set() -> CorruptDataError:
    """Return the error for a mask with a bit set past its last element."""
    return CorruptDataError("mask has a bit set after its last element")


def wrong_count(marked: int, values: int) -> CorruptDataError:
    """Return the error for a mask whose set bits and values differ in number."""
    return CorruptDataError(f"mask marks {marked} elements, but there are {values} values")


def _check_mask(name: str, data: Array, n: int) -> None:
    """Check dtype and length of packed bits for n elements."""
    array(name, data, ("uint8",), 1)
    if data.shape[0] != (n + 7) // 8:
        raise CorruptDataError(f"{name} has {data.shape[0]} bytes; {(n + 7) // 8} are needed for {n} elements")
