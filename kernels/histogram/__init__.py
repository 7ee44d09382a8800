"""Log buckets of floats and their histograms, for quantiles, thresholds and codebooks.

The bucket of a float is its own bit pattern shifted right (`docs/kernels.md`), so counting needs no logarithm, merging
is addition, and every back end gives the same counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..backend.arguments import (
    array,
    check_arrays,
    check_ends,
    check_field,
    check_table,
    flag,
    instance,
    integer,
    number,
    same_device,
    sequence,
)
from ..backend.arrays import Array, dtype_name
from ..backend.dispatch import Dispatch, OnHost
from ..backend.floats import FORMATS, FloatFormat, format_named
from ..errors import BadArgumentError
from ..quantizer import Thresholds, check_gradient, dtype_name_of, product_format


class BackEnd(Protocol):
    """Functions that every back end of this subject has."""

    def bucket_index(self, x: Array, bits: int) -> Array: ...
    def bucket_value(self, index: Array, bits: int, dtype: str) -> Array: ...
    def log_histogram(
        self, x: Array, bits: int, *, signed: bool = False, gradient: Array | None = None
    ) -> Histogram: ...
    def log_histogram_many(
        self, xs: Sequence[Array], bits: int, *, signed: bool = False, gradients: Sequence[Array | None]
    ) -> list[Histogram]: ...
    def kept_histogram(
        self, x: Array, thresholds: Thresholds, bits: int, *, gradient: Array | None = None
    ) -> Histogram: ...
    def kept_histogram_many(
        self, xs: Sequence[Array], thresholds: Sequence[Thresholds], bits: int, *, gradients: Sequence[Array | None]
    ) -> list[Histogram]: ...


class HostBackEnd(Protocol):
    """Functions that only the back ends on the host have."""

    def used_buckets_many(self, x: Array, ends: Any, bits: int) -> tuple[Any, Any, Any]: ...


back_end = Dispatch[BackEnd]("histogram")
on_host = OnHost[HostBackEnd]("histogram")

if TYPE_CHECKING:
    from . import cpu, gpu, reference

    _EVERYWHERE: tuple[BackEnd, ...] = (reference, cpu, gpu)
    _ON_HOST: tuple[HostBackEnd, ...] = (reference, cpu)


def _checked_bits(bits: int, dtype: str) -> int:
    fmt = format_named(dtype)
    limit = min(fmt.mantissa, (2**30 // fmt.octaves).bit_length() - 1)  # the largest index, 2 J + 1, is an int32
    return integer(f"{dtype}: bits", bits, 0, limit)


def bucket_index(x: Array, bits: int) -> Array:
    """Position of each element in the signed log-bucket layout of `docs/kernels.md`.

    `J - j` for negative x in magnitude bucket j, `J` for both zeros, `J + j` for positive x, `2 J + 1` for infinities
    and NaNs; `J = FORMATS[dtype].buckets(bits)`.

    Args:
        x: any shape, float16, bfloat16, float32 or float64.
        bits: sub-bucket bits, 0 ... min(mantissa, 21) (18 for float64): `2**bits` buckets an octave.

    Returns:
        int32, shape and library of x.

    Raises:
        BadArgumentError: bits out of range or another dtype.

    Example:
        >>> import numpy as np
        >>> bucket_index(np.array([0.0, 1.0, 2.0, -1.0, np.nan], dtype=np.float32), 0).tolist()
        [277, 427, 428, 127, 555]

    Source: LC-Checkpoint, section 3 (exponent buckets), with sub-buckets.
    """
    check_arrays(x=x)
    return back_end(x).bucket_index(x, _checked_bits(bits, dtype_name(x)))


def bucket_value(index: Array, bits: int, dtype: Any) -> Array:
    """Midpoint of each bucket; for finite x within `2**-(bits + 1) |x|` of the original.

    Args:
        index: int32, any shape, as `bucket_index` returns it; numbers outside 0 ... 2 J (2 J + 1 too) give NaN.
        bits: as given to `bucket_index`.
        dtype: dtype of the values (a name such as "float32", or a dtype): float16, bfloat16, float32 or float64.

    Returns:
        Values of that dtype, shape and library of `index`; zeros are +0, NaN is the positive quiet one without payload.

    Raises:
        BadArgumentError: bits out of range, another dtype, or an index that is not int32.

    Example:
        >>> import numpy as np
        >>> bucket_value(np.array([277, 427, 127], dtype=np.int32), 0, "float32").tolist()
        [0.0, 1.5, -1.5]
    """
    array("index", index, ("int32",))
    name = dtype_name_of(dtype)
    bits = _checked_bits(bits, name)
    return back_end(index).bucket_value(index, bits, name)


Buckets = np.ndarray[Any, np.dtype[np.int32]]
Counts = np.ndarray[Any, np.dtype[np.int64]]
Ends = np.ndarray[Any, np.dtype[np.int64]]
MAX_BITS = 12
"""Most sub-bucket bits of a histogram: 2**-13 relative error, 9 MiB of counters for a float32 magnitude histogram."""


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of floats in log buckets, on the host.

    Args:
        counts: int64, `J + 2` entries (magnitudes) or `2 J + 2` (signed), `J = FORMATS[format].buckets(bits)`; the last
            one counts infinities and NaNs. Signed: `J - j` is magnitude bucket j of negative values, `J` zero (of
            either sign), `J + j` positive values.
        bits: sub-bucket bits b, 0 ... 12 and at most the format's mantissa; an octave has `2**b` buckets.
        format: name of the float format whose values were counted.
        signed: whether negative values have buckets of their own.

    Raises:
        BadArgumentError: the length or dtype of `counts` does not fit the other fields.

    Source: the sketch of Inshrinkerator, section 4.3 (approximate quantiles by log-space buckets), on bit patterns.
    """

    counts: np.ndarray[Any, np.dtype[np.int64]]
    bits: int
    format: str
    signed: bool

    def __post_init__(self) -> None:
        fmt = format_named(self.format)
        check_field(self, "bits", integer, 0, min(MAX_BITS, fmt.mantissa))
        check_field(self, "signed", flag)
        length = (2 if self.signed else 1) * fmt.buckets(self.bits) + 2
        check_table("counts", self.counts, "int64", (length,))

    @property
    def total(self) -> int:
        """Number of finite values counted."""
        return int(self.counts[:-1].sum())

    def values(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Value of each bucket but the last: its midpoint, exact in the format.

        float64, ascending.

        A bucket of less than one unit in the last place (among the smallest subnormals, or at full mantissa) has the
        one float that it contains as its value, or the next float above if it contains no float.
        """
        fmt = FORMATS[self.format]
        return _both_signs(fmt, self.bits) if self.signed else _bucket_edges(fmt, self.bits, midpoint=True)

    @staticmethod
    def values_of(format: str, bits: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """`values` of signed histograms of a format."""
        return _both_signs(format_named(format), bits)

    def lower_bounds(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Smallest magnitude in each bucket but the last.

        float64, ascending; 0 for the zero bucket.

        `|x| < lower_bounds()[j]` holds exactly for the elements counted in the buckets below j, so these bounds serve
        as thresholds. A bucket that contains no float gets the next float above.

        Raises:
            BadArgumentError: the histogram is signed; fold it with `magnitude()` first.
        """
        if self.signed:
            raise BadArgumentError("histogram is signed; lower bounds are of magnitudes, call magnitude() first")
        return _bucket_edges(FORMATS[self.format], self.bits, midpoint=False)

    def magnitude(self) -> Histogram:
        """Histogram of |x|: negative buckets are added to the positive ones.

        A magnitude histogram is returned unchanged.
        """
        if not self.signed:
            return self
        middle = (self.counts.size - 2) // 2
        folded = self.counts[middle:].copy()
        folded[1:-1] += self.counts[middle - 1 :: -1] if middle else 0
        return Histogram(folded, self.bits, self.format, signed=False)


@lru_cache(64)
def _bucket_edges(fmt: FloatFormat, bits: int, *, midpoint: bool) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Midpoint or smallest member of magnitude buckets 0 ... J, exact in float64."""
    j = np.arange(fmt.buckets(bits), dtype=np.int64)
    octave, fraction = j >> bits, j & ((1 << bits) - 1)
    significand = (1 << bits) + fraction  # bucket = [significand, significand + 1) * 2**(octave - bits) smallest units
    narrow = octave < bits  # less than one unit wide: round up to the next whole unit
    lift = np.maximum(bits - octave, 0)
    units = np.where(narrow, -(-significand >> lift), significand).astype(np.float64)
    scale = np.where(narrow, 0, octave - bits)
    if midpoint:
        units += np.where(scale > 0, 0.5, 0.0) * np.where(narrow, 0.0, 1.0)
    if bits == fmt.mantissa:  # one value a bucket above the subnormals as well
        units = np.floor(units)
    edges = np.concatenate([np.zeros(1), np.ldexp(units, scale + fmt.lowest_exponent)])
    edges.flags.writeable = False  # shared by all histograms of this layout
    return edges


@lru_cache(16)
def _both_signs(fmt: FloatFormat, bits: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Midpoints of all buckets of a signed histogram."""
    magnitude = _bucket_edges(fmt, bits, midpoint=True)
    values = np.concatenate([-magnitude[:0:-1], magnitude])
    values.flags.writeable = False
    return values


def target(x: Array, gradient: Array | None, bits: int) -> tuple[FloatFormat, int]:
    """Format and sub-bucket bits of the histogram that `log_histogram` would return.

    With a gradient the format is the product's; the bits are capped at its mantissa.
    """
    name = dtype_name(x)
    if gradient is not None:
        name = product_format(x, gradient)
    fmt = format_named(name)
    return fmt, min(int(bits), fmt.mantissa)


def _check_values(x: Array, gradient: Array | None) -> None:
    check_arrays(x=x)
    format_named(dtype_name(x))
    if gradient is not None:
        check_gradient(x, gradient)


def _check_options(bits: int, signed: bool, *, with_gradient: bool) -> tuple[int, bool]:
    bits, signed = integer("bits", bits, 0, MAX_BITS), flag("signed", signed)
    if with_gradient and signed:
        raise BadArgumentError("signed is True; with a gradient only magnitudes are counted")
    return bits, signed


def _check_many(xs: Sequence[Array], gradients: Sequence[Array | None] | None) -> tuple[list[Array], list[Any]]:
    """Return checked lists of arrays on one device and of their gradients (or None)."""
    arrays = sequence("xs", xs)
    paired = [None] * len(arrays) if gradients is None else sequence("gradients", gradients)
    if len(paired) != len(arrays):
        raise BadArgumentError(f"{len(arrays)} arrays, but {len(paired)} gradients")
    for x, gradient in zip(arrays, paired, strict=True):
        _check_values(x, gradient)
        same_device("the first array", arrays[0], "another", x)
    return arrays, paired


def log_histogram(x: Array, bits: int, *, signed: bool = False, gradient: Array | None = None) -> Histogram:
    """Count x, or |x|, or |gradient * x|, in log buckets.

    `counts[index(x)]` with `index` of `docs/kernels.md`: the bit pattern shifted right, `2**bits` buckets an octave, so
    a bucket's value is within `2**-(bits + 1)` of each of its members.

    Args:
        x: any shape, float16, bfloat16, float32 or float64.
        bits: sub-bucket bits, 0 ... 12, capped at the mantissa of the counted format (`floats.bits_for` chooses them).
        signed: keep the signs (default: magnitudes).
        gradient: same shape, any of the four dtypes: counts |gradient * x| instead, one rounded product per element, in
            float64 if either is float64, else in float32 (the whole product is never stored). Magnitudes only.

    Returns:
        The histogram, always on the host; infinities and NaNs (of the product, with a gradient; an
        overflowing product too) are in its last counter.

    Raises:
        BadArgumentError: bits out of range, another dtype, a gradient of another shape, or one together with `signed`.

    Example:
        >>> import numpy as np
        >>> h = log_histogram(np.array([0.0, 1.0, -1.5, np.inf], dtype=np.float32), 1)
        >>> h.total, int(h.counts[-1]), [float(v) for v in h.values()[h.counts[:-1] > 0]]
        (3, 1, [0.0, 1.25, 1.75])

    Source: Inshrinkerator, section 4.3; |gradient * x| is its sensitivity (section 4.1).
    """
    _check_values(x, gradient)
    bits, signed = _check_options(bits, signed, with_gradient=gradient is not None)
    return back_end(x).log_histogram(x, bits, signed=signed, gradient=gradient)


def log_histogram_many(
    xs: Sequence[Array], bits: int, *, signed: bool = False, gradients: Sequence[Array | None] | None = None
) -> list[Histogram]:
    """Return the `log_histogram` of each of many arrays, in one call.

    A GPU counts all arrays of a dtype in one launch, the CPU one array after another.

    Args:
        xs: arrays on one device, each as x of `log_histogram`; dtypes and shapes may differ.
        bits: as in `log_histogram`, capped for each array at its own mantissa.
        signed: as in `log_histogram`, the same for all arrays.
        gradients: for each array a gradient, or None to count the array itself; default None, no gradients.

    Returns:
        One histogram per array, equal to that of `log_histogram`.

    Raises:
        BadArgumentError: as `log_histogram`, `gradients` of another length than `xs`, or arrays on several devices.

    Example:
        >>> import numpy as np
        >>> a, b = np.ones(3, dtype=np.float32), np.zeros(2, dtype=np.float16)
        >>> [(h.format, h.total) for h in log_histogram_many([a, b], 6)]
        [('float32', 3), ('float16', 2)]
    """
    arrays, beside = _check_many(xs, gradients)
    bits, signed = _check_options(bits, signed, with_gradient=any(g is not None for g in beside))
    if not arrays:
        return []
    return back_end(arrays[0]).log_histogram_many(arrays, bits, signed=signed, gradients=beside)


def used_buckets_many(x: Array, ends: Ends, bits: int) -> tuple[Buckets, Counts, Ends]:
    """Return the buckets in use of the signed histograms of several joined arrays.

    Args:
        x: float32 [n] on the host.
        ends: int64 [m] NumPy, ascending: where each array ends; the last is n.
        bits: as in `log_histogram`.

    Returns:
        buckets: int32 [k], of one array after another and in each ascending: indices into `Histogram.counts`.
        counts: int64 [k], each above 0.
        ends: int64 [m], where the buckets of each array end.

    Raises:
        BadArgumentError: another dtype, or ends that do not fit.

    Example:
        >>> x = np.array([1.0, 1.0, -1.0, 1.0], np.float32)
        >>> [found.tolist() for found in used_buckets_many(x, np.array([3, 4]), 0)]
        [[127, 427, 427], [1, 2, 1], [2, 3]]
    """
    array("x", x, ("float32",), 1, host=True)
    check_ends("ends", ends, int(x.shape[0]))
    return on_host().used_buckets_many(x, ends, _check_options(bits, True, with_gradient=False)[0])


def kept_histogram(x: Array, thresholds: Thresholds, bits: int, *, gradient: Array | None = None) -> Histogram:
    """Signed histogram of the elements that get a codebook level from `assign`.

    These are the elements that are neither pruned nor protected.

    Args:
        x: any shape, float16, bfloat16, float32 or float64.
        thresholds: the pruning and protection limits; see `Thresholds`.
        bits: sub-bucket bits, 0 ... 12, capped at x's mantissa.
        gradient: as in `assign`; without it the two sensitivity thresholds have no effect.

    Returns:
        The signed histogram in x's format; its last counter (not finite) is 0, because such elements are protected.

    Raises:
        BadArgumentError: bits out of range, another dtype, or a gradient of another shape.

    Example:
        >>> import numpy as np
        >>> from shrinkpoint.kernels.quantizer import Thresholds
        >>> x = np.array([0.01, 0.5, -0.5, 9.0], dtype=np.float32)
        >>> kept_histogram(x, Thresholds(protect_magnitude=4.0, prune_magnitude=0.1), 6).total
        2

    Source: Inshrinkerator, section 4.4: the codebook is fitted to the elements neither pruned nor protected.
    """
    _check_values(x, gradient)
    bits = integer("bits", bits, 0, MAX_BITS)
    instance("thresholds", thresholds, Thresholds)
    return back_end(x).kept_histogram(x, thresholds, bits, gradient=gradient)


def kept_histogram_many(
    xs: Sequence[Array],
    thresholds: Sequence[Thresholds],
    bits: int,
    *,
    gradients: Sequence[Array | None] | None = None,
) -> list[Histogram]:
    """Return the `kept_histogram` of each of many arrays, in one call.

    A GPU counts all arrays of a dtype in one launch, the CPU one array after another.

    Args:
        xs: arrays on one device, each as x of `kept_histogram`; dtypes and shapes may differ.
        thresholds: one an array.
        bits: as in `kept_histogram`, capped for each array at its own mantissa.
        gradients: a gradient (or None) an array; default None, no gradients.

    Returns:
        One histogram per array, equal to that of `kept_histogram`.

    Raises:
        BadArgumentError: as `kept_histogram`, lists of other lengths than `xs`, or arrays on several devices.

    Example:
        >>> import numpy as np
        >>> from shrinkpoint.kernels.quantizer import Thresholds
        >>> x = np.array([0.01, 0.5, -0.5, 9.0], dtype=np.float32)
        >>> limits = [Thresholds(prune_magnitude=0.1), Thresholds(protect_magnitude=4.0, prune_magnitude=0.1)]
        >>> [h.total for h in kept_histogram_many([x, x], limits, 6)]
        [3, 2]
    """
    arrays, beside = _check_many(xs, gradients)
    bits = integer("bits", bits, 0, MAX_BITS)
    limits = sequence("thresholds", thresholds)
    if len(limits) != len(arrays):
        raise BadArgumentError(f"{len(arrays)} arrays, but {len(limits)} thresholds")
    for one in limits:
        instance("thresholds", one, Thresholds)
    if not arrays:
        return []
    return back_end(arrays[0]).kept_histogram_many(arrays, limits, bits, gradients=beside)


def merge(*histograms: Histogram) -> Histogram:
    """The histogram of all values counted in any of `histograms`.

    Octaves are the same in all formats, so a bucket of the narrower format F becomes the bucket of the wider format G
    that starts at the same value: index j becomes `j + ((lowest_exponent_F - lowest_exponent_G) << bits)`.

    Args:
        histograms: one or more, of the same bits and signedness; formats may differ, the result has the one with the
            widest range (float16 < bfloat16 < float32 < float64).

    Raises:
        BadArgumentError: no histogram, or bits or signedness differ.

    Example:
        >>> import numpy as np
        >>> a = log_histogram(np.ones(3, dtype=np.float16), 4)
        >>> b = log_histogram(np.ones(2, dtype=np.float32), 4)
        >>> both = merge(a, b)
        >>> both.format, both.total, int(both.counts.max())
        ('float32', 5, 5)

    Source: mergeable sketches, Inshrinkerator section 4.3.
    """
    if not histograms:
        raise BadArgumentError("histograms is empty; merge needs at least one")
    first = instance("histogram", histograms[0], Histogram)
    for h in histograms[1:]:
        instance("histogram", h, Histogram)
        if h.bits != first.bits or h.signed != first.signed:
            raise BadArgumentError(
                f"histograms differ: bits {first.bits} and {h.bits}, signed {first.signed} and {h.signed}"
            )
    wide = max((format_named(h.format) for h in histograms), key=lambda f: f.octaves)
    middle = wide.buckets(first.bits) if first.signed else 0
    counts = np.zeros(wide.buckets(first.bits) + middle + 2, dtype=np.int64)
    for h in histograms:
        narrow = format_named(h.format)
        size = narrow.buckets(h.bits)
        shift = (narrow.lowest_exponent - wide.lowest_exponent) << h.bits
        zero = size if h.signed else 0
        counts[middle] += h.counts[zero]
        counts[middle + shift + 1 : middle + shift + 1 + size] += h.counts[zero + 1 : -1]
        if h.signed:
            counts[middle - shift - size : middle - shift] += h.counts[:size]
        counts[-1] += h.counts[-1]
    return Histogram(counts, first.bits, wide.name, first.signed)


def quantile(histogram: Histogram, q: float) -> float:
    """Value of the bucket that holds the q-quantile of the counted values.

    The element of rank `floor(q * (n - 1))` in ascending order, n = `total`.

    `|result - exact| <= 2**-(bits + 1) * |exact|` against the exact order statistic of the counted values.

    Args:
        histogram: signed or of magnitudes; infinities and NaNs have no rank.
        q: 0 ... 1.

    Raises:
        BadArgumentError: q out of range, or nothing finite was counted.

    Example:
        >>> import numpy as np
        >>> h = log_histogram(np.arange(1, 101, dtype=np.float32), 6, signed=True)
        >>> quantile(h, 0.5)
        50.25

    Source: Inshrinkerator, section 4.3.
    """
    q = number("q", q, 0, 1)
    instance("histogram", histogram, Histogram)
    cumulative = np.cumsum(histogram.counts[:-1])
    n = int(cumulative[-1])
    if n == 0:
        raise BadArgumentError("histogram counts no finite value; it has no quantile")
    bucket = int(np.searchsorted(cumulative, math.floor(q * (n - 1)), side="right"))
    return float(histogram.values()[bucket])
