"""Exponent buckets with priority promotion: one value per (sign, exponent) of a difference.

A bucket holds the numbers of one sign and one exponent field, so every decision is made on bit patterns. Within a
bucket the value is a linear function of the pattern, hence the mean of two values is the mean of their patterns.

Source: LC-Checkpoint, section 3.1.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..backend.arguments import array, check_arrays, check_table, instance, integer, same_device, shown
from ..backend.arrays import Array, dtype_name
from ..backend.dispatch import Dispatch
from ..backend.floats import FloatFormat, format_named
from ..errors import BadArgumentError, CorruptDataError


class BackEnd(Protocol):
    """Functions that every back end of this subject has."""

    def exponent_differences(self, current: Array, previous: Array) -> Array: ...
    def exponent_buckets(self, x: Array) -> Buckets: ...
    def exponent_quantize(self, x: Array, promotion: Promotion) -> Array: ...
    def exponent_dequantize(
        self, levels: Array, codebook: np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]
    ) -> Array: ...
    def exponent_sums(
        self, previous: Array, levels: Array, codebook: np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]
    ) -> Array: ...


back_end = Dispatch[BackEnd]("exponent")

if TYPE_CHECKING:
    from . import cpu, gpu, reference

    _EVERYWHERE: tuple[BackEnd, ...] = (reference, cpu, gpu)

MAX_BITS = 12
"""Bits of a level with which all (sign, exponent) pairs of float64, and zero, are distinct."""


@dataclass(frozen=True, eq=False)
class Buckets:
    """Counts and extremes of the exponent buckets of an array, on the host.

    E = 2**(exponent bits) exponent fields.

    Args:
        counts: int64 [2, E], number of elements by sign (row 0 positive, row 1 negative) and exponent field. Field 0
            counts the subnormals, field E - 1 infinities and NaNs.
        lowest: int64 [2, E], pattern without sign of the smallest magnitude in each bucket, 0 for an empty one.
        highest: int64 [2, E], the same of the largest magnitude.
        zeros: number of zeros of either sign; they are in no bucket.
        format: name of the float format.
    """

    counts: np.ndarray[Any, np.dtype[np.int64]]
    lowest: np.ndarray[Any, np.dtype[np.int64]]
    highest: np.ndarray[Any, np.dtype[np.int64]]
    zeros: int
    format: str


@dataclass(frozen=True, eq=False)
class Promotion:
    """The buckets that are kept, with their values, on the host.

    Args:
        codebook: unsigned patterns [k + 1] of the width of `format`: 0 first, then one value a kept bucket, by rank.
        table: uint8 or, for more than 8 bits, uint16 [2 E]: level of each bucket by `sign * E + field` (the pattern
            shifted right past the mantissa); 0 for a bucket that is dropped.
        format: name of the float format.

    Raises:
        BadArgumentError: a dtype or the length of `table` does not fit the format.
    """

    codebook: np.ndarray[Any, Any]
    table: np.ndarray[Any, Any]
    format: str

    def __post_init__(self) -> None:
        fmt = format_named(self.format)
        dtype = "uint16" if getattr(self.table, "dtype", None) == np.uint16 else "uint8"
        check_table("table", self.table, dtype, (2 << fmt.exponent,))
        check_table(
            "codebook", self.codebook, f"uint{fmt.width}", instance("codebook", self.codebook, np.ndarray).shape[:1]
        )


def exponent_differences(current: Array, previous: Array) -> Array:
    """Difference of each element, rounded once; infinity where it is not a number.

    Differences of float16 are float32, for many are subnormal numbers of float16, which share one exponent.

    Args:
        current: array of any shape, float16, bfloat16, float32 or float64.
        previous: the same shape and dtype.

    Returns:
        Array of the shape and library of `current`, of its dtype; of float16 float32.

    Raises:
        BadArgumentError: another dtype, or shapes, dtypes or devices differ.

    Example:
        >>> import numpy as np
        >>> x, y = np.array([1.5, np.inf], np.float16), np.array([1.0, np.inf], np.float16)
        >>> exponent_differences(x, y)
        array([0.5, inf], dtype=float32)

    Source: LC-Checkpoint, section 3.1, the difference to the restored state.
    """
    check_arrays(current=current, previous=previous)
    array("previous", previous, (format_named(dtype_name(current)).name,), tuple(current.shape))
    same_device("current", current, "previous", previous)
    return back_end(current).exponent_differences(current, previous)


def exponent_buckets(x: Array) -> Buckets:
    """Count the elements of each (sign, exponent field) and find their extremes.

    Args:
        x: array of any shape, float16, bfloat16, float32 or float64. Infinities and NaNs are counted, not refused.

    Returns:
        Buckets, on the host.

    Raises:
        BadArgumentError: another dtype.

    Example:
        >>> import numpy as np
        >>> b = exponent_buckets(np.array([1.0, 1.5, -2.0, 0.0], dtype="float32"))
        >>> int(b.counts[0, 127]), int(b.counts[1, 128]), b.zeros, hex(b.lowest[0, 127]), hex(b.highest[0, 127])
        (2, 1, 1, '0x3f800000', '0x3fc00000')

    Source: LC-Checkpoint, section 3.1.1, exponent-based quantization.
    """
    check_arrays(x=x)
    format_named(dtype_name(x))
    return back_end(x).exponent_buckets(x)


def merge_buckets(first: Buckets, *rest: Buckets) -> Buckets:
    """Combine the buckets of several arrays as if the arrays were one.

    Raises:
        BadArgumentError: the formats differ.

    Example:
        >>> import numpy as np
        >>> b = exponent_buckets(np.array([1.0, 0.0]))
        >>> merge_buckets(b, b).zeros
        2
    """
    out = instance("buckets", first, Buckets)
    for other in rest:
        instance("buckets", other, Buckets)
        if other.format != out.format:
            raise BadArgumentError(f"buckets of {out.format} and of {other.format} cannot be merged")
        lowest = np.where(out.counts == 0, other.lowest, np.minimum(out.lowest, other.lowest))
        lowest = np.where(other.counts == 0, out.lowest, lowest)
        counts, zeros = out.counts + other.counts, out.zeros + other.zeros
        out = Buckets(counts, lowest, np.maximum(out.highest, other.highest), zeros, out.format)
    return out


def promote(buckets: Buckets, bits: int) -> Promotion:
    """Keep the 2**bits - 1 nonempty buckets with the largest exponents (priority promotion).

    Elements of the other buckets become 0.

    Buckets are ranked by descending exponent field, with the positive bucket first. The value of a bucket is the mean
    of its smallest and largest magnitude, rounded once: with a and b their patterns (without sign), it has the pattern
    (a + b) / 2, halves rounded to even.

    Args:
        buckets: from `exponent_buckets`.
        bits: 1 to 12; the paper uses 2 and 3, and 12 keep every bucket of every format. Up to 8 a level is one byte.

    Returns:
        Promotion with k = min(2**bits - 1, nonempty buckets) kept buckets.

    Raises:
        BadArgumentError: `bits` out of range, or something counted was a NaN or an infinity.

    Example:
        >>> import numpy as np
        >>> p = promote(exponent_buckets(np.array([1.0, 1.5, -1.25, 0.25], dtype="float32")), 2)
        >>> p.codebook.view("float32").tolist()
        [0.0, 1.25, -1.25, 0.25]

    Source: LC-Checkpoint, section 3.1.1, priority promotion.
    """
    instance("buckets", buckets, Buckets)
    bits = integer("bits", bits, 1, MAX_BITS)
    fmt = format_named(buckets.format)
    fields = buckets.counts.shape[1]
    broken = int(buckets.counts[:, -1].sum())
    if broken:
        raise BadArgumentError(f"x holds {broken} NaNs or infinities; only finite differences have buckets")
    table = np.zeros(2 * fields, np.uint8 if bits <= 8 else np.uint16)
    patterns = [0]
    for field in range(fields - 2, -1, -1):
        for sign in (0, 1):
            if buckets.counts[sign, field] and len(patterns) < 2**bits:
                table[sign * fields + field] = len(patterns)
                patterns.append(_middle(buckets, fmt, sign, field))
    return Promotion(np.array(patterns, dtype=f"uint{fmt.width}"), table, buckets.format)


def exponent_quantize(x: Array, promotion: Promotion) -> Array:
    """Level of each element: the rank of its bucket, 0 for zero and for dropped buckets.

        level = table[pattern >> mantissa bits] if pattern without sign != 0 else 0

    Args:
        x: array of any shape, in the format of `promotion`.
        promotion: from `promote`, of this array's buckets or of those of several.

    Returns:
        uint8 or uint16, as the promotion's table is; shape of x.

    Raises:
        BadArgumentError: x has another dtype than the promotion.

    Example:
        >>> import numpy as np
        >>> x = np.array([1.0, 1.5, -1.25, 0.25, 0.0], dtype="float32")
        >>> exponent_quantize(x, promote(exponent_buckets(x), 1)).tolist()
        [1, 1, 0, 0, 0]
    """
    array("x", x, (instance("promotion", promotion, Promotion).format,))
    return back_end(x).exponent_quantize(x, promotion)


def exponent_dequantize(levels: Array, codebook: np.ndarray[Any, Any]) -> Array:
    """Bit patterns of the codebook values of levels: `codebook[level]`.

    The result holds patterns, as from `planes.merge_planes`, because NumPy has no bfloat16; the caller views them as
    floats.

    Args:
        levels: uint8 or uint16 array of any shape, each below the number of entries.
        codebook: uint16, uint32 or uint64 patterns [1 ... 65536], a NumPy array also for levels on a GPU.

    Returns:
        Array of the codebook's dtype, in the shape, library and device of `levels`.

    Raises:
        BadArgumentError: `levels` is neither uint8 nor uint16, or `codebook` is not as above.
        CorruptDataError: a level has no entry.

    Example:
        >>> import numpy as np
        >>> x = np.array([1.0, 1.5, -1.25, 0.25, 0.0], dtype="float32")
        >>> p = promote(exponent_buckets(x), 2)
        >>> exponent_dequantize(exponent_quantize(x, p), p.codebook).view("float32").tolist()
        [1.25, 1.25, -1.25, 0.25, 0.0]
    """
    _check_codes(levels, codebook, ("uint16", "uint32", "uint64"))
    return back_end(levels).exponent_dequantize(levels, codebook)


def exponent_sums(previous: Array, levels: Array, codebook: np.ndarray[Any, Any]) -> Array:
    """Add the codebook value of each element's level to the element, rounded once.

        out = previous + codebook[level] if level > 0 else previous, to the bit

    A NaN stays the same NaN, made quiet. Another sum that is not a number is the quiet NaN with the sign bit set and no
    payload.

    Args:
        previous: array of any shape, float16, bfloat16, float32 or float64.
        levels: uint8 or uint16, the same shape, each below the number of entries.
        codebook: unsigned patterns [1 ... 65536] as wide as `previous`, NumPy, also for arrays on a GPU. Entry 0 is not
            used.

    Returns:
        Array of the dtype, shape and library of `previous`.

    Raises:
        BadArgumentError: wrong dtypes, shapes or devices.
        CorruptDataError: a level has no entry.

    Example:
        >>> import numpy as np
        >>> codebook = np.array([0, 0.25, -1], np.float32).view(np.uint32)
        >>> exponent_sums(np.array([1.0, 1.0, -0.0], np.float32), np.array([1, 2, 0], np.uint8), codebook).tolist()
        [1.25, 0.0, -0.0]

    Source: LC-Checkpoint, section 3.1, the restored state.
    """
    check_arrays(previous=previous)
    _check_codes(levels, codebook, (f"uint{format_named(dtype_name(previous)).width}",))
    array("levels", levels, ("uint8", "uint16"), tuple(previous.shape))
    same_device("previous", previous, "levels", levels)
    return back_end(previous).exponent_sums(previous, levels, codebook)


def _check_codes(levels: Array, codebook: Any, dtypes: tuple[str, ...]) -> None:
    """Check levels, and a codebook of patterns of one of these dtypes."""
    array("levels", levels, ("uint8", "uint16"))
    patterns = isinstance(codebook, np.ndarray) and dtype_name(codebook) in dtypes
    if not patterns or codebook.ndim != 1 or not 1 <= codebook.size <= 1 << 16:
        raise BadArgumentError(
            f"codebook is {shown(codebook)}; a NumPy array of 1 to 65536 {' or '.join(dtypes)} is needed"
        )


def unknown_level(level: int, entries: int) -> CorruptDataError:
    """Return the error for a level without a codebook entry."""
    return CorruptDataError(f"level {level} has no entry in a codebook of {entries}")


def _middle(buckets: Buckets, fmt: FloatFormat, sign: int, field: int) -> int:
    """Pattern, with sign, of the mean of a bucket's smallest and largest value."""
    total = int(buckets.lowest[sign, field]) + int(buckets.highest[sign, field])
    half = total >> 1
    return half + (total & half & 1) | sign << (fmt.width - 1)
