"""Magnitude categories: an unsigned integer as a size class of one byte plus its low bits.

The size of a difference is predictable and is entropy coded; its low bits are noise and are stored as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arguments import array, choice, integer
from .arrays import back_end, compiled_back_end, dtype_name
from .coder_arguments import host_memory, stored_bytes

if TYPE_CHECKING:
    from .arrays import Array

WIDTHS = {"uint16": 16, "uint32": 32, "uint64": 64}


def most_bits(width: int) -> int:
    """Largest `bits` for which categories of integers of this width fit one byte.

    3 up to 32 bits, 2 for 64.
    """
    return 3 if width <= 32 else 2


def category_count(width: int, bits: int) -> int:
    """Number of categories of integers of `width` bits.

    Example:
        >>> category_count(16, 3), category_count(32, 3), category_count(64, 2)
        (112, 240, 252)
    """
    return (width - 1 - bits << bits) + (2 << bits)


def split_categories(values: Array, bits: int) -> tuple[Array, Array]:
    """Split each value into its category and the low bits that the category leaves open.

    With L the bit length of `v | 2**bits` and `k = L - 1 - bits` the number of low bits that are left open,

        category = (k << bits) + (v >> k),   extra = the k lowest bits of v

    so that a category consists of the bit length and the `bits` bits after the leading one. A value below `2 << bits`
    is its own category.

    Args:
        values: uint16[n], uint32[n] or uint64[n].
        bits: 1 ... 3 (2 for uint64).

    Returns:
        (uint8[n] categories, uint8[ceil(sum(k) / 8)] extra bits): value after value, the lowest bit first, zeros after
        the last.

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> categories, extra = split_categories(np.asarray([0, 7, 8, 9, 21], np.uint16), 1)
        >>> categories.tolist(), extra.tolist()  # 7: 1 open bit, 1; 8 and 9: 2 open bits, 0 and 1; 21: 3 open bits, 5
        ([0, 5, 6, 6, 8], [169])

    Source: Elias (1975), universal codes; additional bits as in JPEG (ITU T.81, F.1.2).
    """
    values = array("values", values, WIDTHS, 1, host=True)
    bits = integer("bits", bits, 1, most_bits(WIDTHS[dtype_name(values)]))
    categories, extra = back_end(values, "categories").split_categories(values, bits)
    return categories, extra


def join_categories(
    categories: Array, extra: Array | bytes, bits: int, dtype: str, *, out: Array | None = None
) -> Array:
    """Return the values with these categories and extra bits: the inverse of `split_categories`.

    Args:
        categories: uint8[n].
        extra: uint8[m] or bytes.
        bits: as for splitting.
        dtype: "uint16", "uint32" or "uint64" of the result.
        out: NumPy array of dtype, contiguous [n], to write to; only for NumPy arrays. Default: a new one.

    Returns:
        `out`, or array of dtype, [n], of the library of `categories`.

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.
        CorruptDataError: a category that dtype does not have, a wrong number of bytes for the extra bits, or a bit set
            after the last one.

    Example:
        >>> import numpy as np
        >>> join_categories(np.asarray([0, 5, 6, 6, 8], np.uint8), bytes([169]), 1, "uint16").tolist()
        [0, 7, 8, 9, 21]
    """
    categories = array("categories", categories, ("uint8",), 1, host=True)
    bits = integer("bits", bits, 1, most_bits(WIDTHS[choice("dtype", dtype, WIDTHS)]))
    data = stored_bytes(extra)
    if out is None:
        return back_end(categories, "categories").join_categories(categories, data, bits, dtype)
    target = host_memory(out, int(categories.shape[0]), dtype)
    return compiled_back_end("categories").join_categories(categories, data, bits, dtype, target)
