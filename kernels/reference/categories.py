"""Oracle of the magnitude categories: one value at a time on Python's integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from array_api_compat import array_namespace

from ..arrays import to_numpy
from ..categories import WIDTHS, category_count
from ..errors import CorruptDataError

if TYPE_CHECKING:
    from ..arrays import Array


def split_categories(values: Array, bits: int) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.categories.split_categories`."""
    xp = array_namespace(values)
    categories, number, at = [], 0, 0
    for v in to_numpy(values).tolist():  # torch converts no uint64 above 2**63
        k = (v | 1 << bits).bit_length() - 1 - bits
        categories.append((k << bits) + (v >> k))
        number |= (v & (1 << k) - 1) << at
        at += k
    extra = list(number.to_bytes((at + 7) // 8, "little"))
    return xp.asarray(categories, dtype=xp.uint8), xp.asarray(extra, dtype=xp.uint8)


def join_categories(categories: Array, extra: Array, bits: int, dtype: str) -> Array:
    """See `shrinkpoint.kernels.categories.join_categories`."""
    xp = array_namespace(categories)
    number = int.from_bytes(bytes(int(extra[i]) for i in range(extra.shape[0])), "little")
    values, at = [], 0
    for i in range(categories.shape[0]):
        c = int(categories[i])
        if c >= category_count(WIDTHS[dtype], bits):
            raise CorruptDataError(f"category {c} is not a category of {dtype}")
        k = max((c >> bits) - 1, 0)
        values.append((c - (k << bits) << k) + (number >> at & (1 << k) - 1))
        at += k
    if extra.shape[0] != (at + 7) // 8 or number >> at:
        raise CorruptDataError(f"{extra.shape[0]} bytes are not the {at} bits that the categories leave open")
    return xp.asarray(values, dtype=getattr(xp, dtype))
