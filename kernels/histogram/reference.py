"""Oracle of the log buckets and their histograms.

Subnormals are normalized first; the bucket of every element is computed, then each bucket is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ..backend.arrays import Array, dtype_name
from ..backend.floats import FORMATS, FloatFormat, format_named, from_bits, sign_and_magnitude
from ..quantizer import Thresholds, product_format
from ..quantizer.reference import kept, product
from . import Histogram, target


def magnitude_index(magnitude: Array, fmt: FloatFormat, bits: int) -> Array:
    """Magnitude bucket j = 0 ... J, or J + 1, of patterns without sign (int64).

    A finite nonzero magnitude is `significand * 2**(octave - M + lowest_exponent)`, `2**M <= significand < 2**(M + 1)`.
    """
    xp = array_namespace(magnitude)
    mantissa = fmt.mantissa
    field, fraction = magnitude >> mantissa, magnitude & ((1 << mantissa) - 1)
    leading = xp.zeros_like(magnitude)
    for p in range(1, mantissa):
        leading = xp.where(fraction >= (1 << p), p, leading)
    octave = xp.where(field > 0, field - 1 + mantissa, leading)
    significand = xp.where(field > 0, (1 << mantissa) + fraction, fraction << (mantissa - leading))
    j = (octave << bits) + ((significand - (1 << mantissa)) >> (mantissa - bits)) + 1
    j = xp.where(magnitude == 0, 0, j)
    return xp.where(field == (1 << fmt.exponent) - 1, fmt.buckets(bits) + 1, j)


def bucket_index(x: Array, bits: int) -> Array:
    """See `shrinkpoint.kernels.histogram.bucket_index`."""
    fmt = format_named(dtype_name(x))
    xp = array_namespace(x)
    buckets = fmt.buckets(bits)
    negative, magnitude = sign_and_magnitude(x)
    j = magnitude_index(magnitude, fmt, bits)
    index = xp.where(negative, buckets - j, buckets + j)
    return xp.astype(xp.where(j > buckets, 2 * buckets + 1, index), xp.int32)


def bucket_value(index: Array, bits: int, dtype: str) -> Array:
    """See `shrinkpoint.kernels.histogram.bucket_value`."""
    fmt = FORMATS[dtype]
    xp = array_namespace(index)
    mantissa, buckets = fmt.mantissa, fmt.buckets(bits)
    signed = xp.astype(index, xp.int64) - buckets
    outside = (signed > buckets) | (signed < -buckets)
    j = xp.where(outside | (signed == 0), 1, xp.abs(signed))  # placeholders, replaced below
    octave, fraction = (j - 1) >> bits, (j - 1) & ((1 << bits) - 1)
    significand = (1 << bits) + fraction  # the bucket is [significand, significand + 1) * 2**(octave - bits) units

    # Subnormals are counted in units: the midpoint, or the next whole unit where the bucket is at most one unit wide.
    wide, narrow = xp.where(octave < mantissa, octave - bits, 0), xp.where(octave < bits, bits - octave, 0)
    wide = xp.where(wide > 0, wide, 0)
    midpoint = (significand << wide) + ((xp.ones_like(wide) << wide) >> 1)
    rounded_up = (significand + (xp.ones_like(narrow) << narrow) - 1) >> narrow
    subnormal = xp.where(wide > 0, midpoint, rounded_up)

    # Normal numbers: exponent field, the bits of the bucket, then a one (the midpoint) where there is room for it.
    half = 1 << (mantissa - bits - 1) if bits < mantissa else 0
    normal = ((octave - mantissa + 1) << mantissa) + (fraction << (mantissa - bits)) + half

    pattern = xp.where(octave < mantissa, subnormal, normal)
    pattern = xp.where(signed == 0, 0, pattern)
    pattern = xp.where(outside, (((1 << fmt.exponent) - 1) << mantissa) + (1 << (mantissa - 1)), pattern)
    values = from_bits(pattern, dtype)
    return xp.where(outside | (signed >= 0), values, -values)


def log_histogram(x: Array, bits: int, *, signed: bool = False, gradient: Array | None = None) -> Histogram:
    """See `shrinkpoint.kernels.histogram.log_histogram`."""
    fmt, bits = target(x, gradient, bits)
    values = x if gradient is None else product(x, gradient, product_format(x, gradient))
    histogram = _count(values, fmt.name, bits)
    return histogram if signed else histogram.magnitude()


def log_histogram_many(
    xs: Sequence[Array], bits: int, *, signed: bool = False, gradients: Sequence[Array | None]
) -> list[Histogram]:
    """See `shrinkpoint.kernels.histogram.log_histogram_many`."""
    return [log_histogram(x, bits, signed=signed, gradient=g) for x, g in zip(xs, gradients, strict=True)]


def kept_histogram(x: Array, thresholds: Thresholds, bits: int, *, gradient: Array | None = None) -> Histogram:
    """See `shrinkpoint.kernels.histogram.kept_histogram`."""
    xp = array_namespace(x)
    fmt, bits = target(x, None, bits)
    histogram = _count(xp.where(kept(x, thresholds, gradient), x, xp.asarray(xp.nan, dtype=x.dtype)), fmt.name, bits)
    histogram.counts[-1] = 0
    return histogram


def kept_histogram_many(
    xs: Sequence[Array], thresholds: Sequence[Thresholds], bits: int, *, gradients: Sequence[Array | None]
) -> list[Histogram]:
    """See `shrinkpoint.kernels.histogram.kept_histogram_many`."""
    each = zip(xs, thresholds, gradients, strict=True)
    return [kept_histogram(x, limits, bits, gradient=g) for x, limits, g in each]


def _count(values: Array, name: str, bits: int) -> Histogram:
    xp = array_namespace(values)
    counts = np.zeros(2 * format_named(name).buckets(bits) + 2, dtype=np.int64)
    present, number = xp.unique_counts(bucket_index(values, bits))
    for i in range(present.shape[0]):
        counts[int(present[i])] = int(number[i])
    return Histogram(counts, bits, name, signed=True)


def used_buckets_many(x: Array, ends: Any, bits: int) -> tuple[Any, Any, Any]:
    """See `shrinkpoint.kernels.histogram.used_buckets_many`."""
    parts = zip((0, *ends.tolist()), ends.tolist(), strict=False)
    counts = [log_histogram(x[a:b], bits, signed=True).counts for a, b in parts]
    used = [np.flatnonzero(c) for c in counts]
    nothing = [np.empty(0, np.int64)]
    return (
        np.concatenate(nothing + used).astype(np.int32),
        np.concatenate(nothing + [c[u] for c, u in zip(counts, used, strict=True)]),
        np.cumsum([u.size for u in used], dtype=np.int64),
    )
