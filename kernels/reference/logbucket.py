"""Oracle of the log buckets: octave and significand, subnormals normalized first."""

from __future__ import annotations

from array_api_compat import array_namespace

from ..arrays import Array, dtype_name
from ..floats import FORMATS, FloatFormat, format_named
from .bits import from_bits, sign_and_magnitude


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
    """See `shrinkpoint.kernels.logbucket.bucket_index`."""
    fmt = format_named(dtype_name(x))
    xp = array_namespace(x)
    buckets = fmt.buckets(bits)
    negative, magnitude = sign_and_magnitude(x)
    j = magnitude_index(magnitude, fmt, bits)
    index = xp.where(negative, buckets - j, buckets + j)
    return xp.astype(xp.where(j > buckets, 2 * buckets + 1, index), xp.int32)


def bucket_value(index: Array, bits: int, dtype: str) -> Array:
    """See `shrinkpoint.kernels.logbucket.bucket_value`."""
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
