"""Log buckets and histograms on the CPU: shifted bit patterns, counted in one pass.

Each pattern has four adjacent counters, used in turn, so that equal neighbours do not wait for each other's store and
the counters in use stay in the first-level cache. Subnormals share counters with zero; a second pass over a block, made
only if such a counter changed, separates them. An array with fewer elements than counters is counted directly in
buckets, element by element, because clearing and adding up the counters would take longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ..backend.arrays import Array, bit_view, dtype_name, like, to_numpy
from ..backend.floats import FORMATS, FloatFormat, format_named
from ..backend.instructions import AHEAD, prefetch
from ..backend.jit import njit_in_place, njit_inline
from ..backend.widen import widened
from ..quantizer import Thresholds, magnitude_bits, product_format
from . import Histogram, target


@njit_in_place
def _index(u: Any, mantissa: int, exponent: int, bits: int, buckets: int, out: Any) -> None:
    """Bucket indices in short blocks.

    A vectorized loop handles zeros and normal numbers; a second loop runs where a subnormal occurred.
    """
    low = np.uint64(mantissa - bits)
    magnitude = (np.uint64(1) << np.uint64(mantissa + exponent)) - np.uint64(1)
    fraction = (np.uint64(1) << np.uint64(mantissa)) - np.uint64(1)
    normal = np.int64(((mantissa - 1) << bits) + 1)
    for begin in range(0, u.size, 256):
        v, o = u[begin : begin + 256], out[begin : begin + 256]
        tiny = np.uint8(0)
        for i in range(v.size):
            m = np.uint64(v[i]) & magnitude
            j = np.int64(m >> low) + normal if m > fraction else np.int64(0)
            tiny |= np.uint8(m - np.uint64(1) < fraction)
            at = buckets - j if np.uint64(v[i]) > magnitude else buckets + j
            o[i] = np.int32(2 * buckets + 1 if j > buckets else at)
        if tiny == 0:
            continue
        for i in range(v.size):
            m = np.uint64(v[i]) & magnitude
            if m - np.uint64(1) < fraction:
                p = _highest(m)
                j = (p << bits) + np.int64(((m << np.uint64(mantissa - p)) & fraction) >> low) + 1
                o[i] = np.int32(buckets - j if np.uint64(v[i]) > magnitude else buckets + j)


@njit_in_place
def _value(index: Any, mantissa: int, exponent: int, bits: int, buckets: int, out: Any) -> None:
    """Bucket midpoints in short blocks.

    A vectorized loop handles zero, normal numbers and NaN; a second loop runs where a subnormal occurred.
    """
    kind = out.dtype.type
    infinity = np.int64(((1 << exponent) - 1) << mantissa)
    nan = infinity | np.int64(1 << (mantissa - 1))
    half = np.int64((1 << (mantissa - bits)) >> 1)
    low, first = np.int64(mantissa - bits), np.int64((mantissa - 1) << bits)
    subnormals = np.int64(mantissa << bits)
    sign = np.int64(1) << np.int64(mantissa + exponent)
    for begin in range(0, index.size, 256):
        v, o = index[begin : begin + 256], out[begin : begin + 256]
        tiny = np.uint8(0)
        for i in range(v.size):
            j = np.int64(v[i]) - buckets
            k = abs(j) - 1
            pattern = ((k - first) << low) + half
            pattern = pattern | sign if j < 0 else pattern
            pattern = np.int64(0) if k < 0 else pattern
            tiny |= np.uint8((k >= 0) & (k < subnormals))
            o[i] = kind(nan if k >= buckets else pattern)
        if tiny == 0:
            continue
        for i in range(v.size):
            j = np.int64(v[i]) - buckets
            k = abs(j) - 1
            if k >= 0 and k < subnormals:
                p = k >> bits
                significand = (np.int64(1) << bits) + (k & ((np.int64(1) << bits) - 1))
                if p > bits:
                    pattern = (significand << (p - bits)) + (np.int64(1) << (p - bits - 1))
                else:  # less than one unit wide: the next whole unit
                    pattern = -(-significand >> (bits - p))
                o[i] = kind(pattern | sign if j < 0 else pattern)


def bucket_index(x: Array, bits: int) -> Array:
    """See `shrinkpoint.kernels.histogram.bucket_index`."""
    fmt = format_named(dtype_name(x))
    values = to_numpy(x)
    out = np.empty(values.shape, dtype=np.int32)
    _index(bit_view(values), fmt.mantissa, fmt.exponent, bits, fmt.buckets(bits), out.reshape(-1))
    return like(out, x)


def bucket_value(index: Array, bits: int, dtype: str) -> Array:
    """See `shrinkpoint.kernels.histogram.bucket_value`."""
    fmt = FORMATS[dtype]
    flat = to_numpy(index)
    out = np.empty(flat.shape, dtype=f"uint{fmt.width}")
    _value(flat.reshape(-1), fmt.mantissa, fmt.exponent, bits, fmt.buckets(bits), out.reshape(-1))
    if dtype == "bfloat16":
        return like(out, index, dtype="bfloat16")
    return like(out.view(dtype), index)


BLOCK = 1 << 15
"""Elements of a temporary buffer: a product and a masked pattern stay in the second-level cache."""

CHUNK = 1 << 30
"""Elements between two additions of the uint32 counters to the int64 ones."""


@njit_inline
def _highest(m: Any) -> Any:
    """Position of the highest set bit of m > 0."""
    p = 0
    for half in (32, 16, 8, 4, 2, 1):
        if m >> np.uint64(half):
            m >>= np.uint64(half)
            p += half
    return p


@njit_inline
def _between(v: Any, start: Any, stop: Any) -> Any:
    """Number of elements in [start, stop), of at most 2**31."""
    number = np.int32(0)
    for i in range(v.size):
        number = np.int32(number + np.int32((v[i] >= start) & (v[i] < stop)))
    return number


@njit_in_place
def _count(u: Any, mantissa: int, exponent: int, bits: int, limits: Any, raw: Any, rare: Any, partial: Any) -> None:
    """Count patterns by sign and upper bits, with separate counters for undecided ones.

    limits: uint64 [2], low and high: of magnitudes in [low, high) only, subnormals are counted in `rare`.
    raw: uint32 [4 << (1 + exponent + bits)], four lanes a counter.
    rare: int64 [2, (mantissa << bits) + 1], subnormals in the limits by sign and bucket (j - 1), then all subnormals.
    partial: int64 [2, 2], by limit and sign: patterns below that limit which share its upper bits.
    """
    one, two = np.uint32(1), np.uint64(2)
    shift, lane1, lane2, lane3 = np.uint64(mantissa - bits), np.uint64(1), np.uint64(2), np.uint64(3)
    fraction, magnitude = np.uint64((1 << mantissa) - 1), np.uint64((1 << (mantissa + exponent)) - 1)
    negative = 4 << (exponent + bits)
    below, below_negative = raw[: 4 << bits], raw[negative : negative + (4 << bits)]  # exponent field 0
    low, width = limits[0], limits[1] - limits[0]
    kind, sign = u.dtype.type, magnitude + lane1
    step = max(1 << 16, 64 << bits)
    ahead = AHEAD // u.itemsize
    tiny_before = np.int64(-1)
    for begin in range(0, u.size, step):
        v = u[begin : begin + step]  # indices from 0: the compiler knows that they are not negative
        whole = v.size // 16 * 16
        for at in range(0, whole, 16):
            prefetch(v, at + ahead)
            prefetch(v, at + ahead + 8)  # where 16 elements are two lines
            for i in range(at, at + 16, 4):
                raw[(np.uint64(v[i]) >> shift) << two] += one
                raw[((np.uint64(v[i + 1]) >> shift) << two) + lane1] += one
                raw[((np.uint64(v[i + 2]) >> shift) << two) + lane2] += one
                raw[((np.uint64(v[i + 3]) >> shift) << two) + lane3] += one
        for i in range(whole, v.size):
            raw[(np.uint64(v[i]) >> shift) << two] += one

        for limit in range(2):
            stop = limits[limit]
            start = stop >> shift << shift
            if start < stop:
                partial[limit, 0] += _between(v, kind(start), kind(stop))
                partial[limit, 1] += _between(v, kind(start | sign), kind(stop | sign))

        tiny = np.int64(0)
        for t in range(below.size):
            tiny += np.int64(below[t]) + np.int64(below_negative[t])
        if tiny == tiny_before:
            continue
        tiny_before = tiny
        for at in range(0, v.size, 64):
            part = v[at : at + 64]
            found = np.int64(0)
            for i in range(part.size):
                found += ((np.uint64(part[i]) & magnitude) - lane1) < fraction
            if found == 0:
                continue
            rare[0, -1] += found
            for i in range(part.size):
                m = np.uint64(part[i]) & magnitude
                if m - lane1 < fraction and m - low < width:
                    p = _highest(m)
                    sub = ((m << np.uint64(mantissa - p)) & fraction) >> shift
                    rare[np.uint64(part[i]) >> np.uint64(mantissa + exponent), np.uint64(p << bits) + sub] += 1


@njit_in_place
def _count_few(u: Any, mantissa: int, exponent: int, bits: int, limits: Any, zero: int, counts: Any) -> None:
    """Count a few patterns directly in buckets: magnitudes in [low, high) and not finite ones.

    limits: uint64 [2], low and high.
    zero: position of magnitude bucket 0 in `counts`, int64; if it is 0, signs are ignored.
    """
    one = np.uint64(1)
    shift, sign = np.uint64(mantissa - bits), np.uint64(mantissa + exponent)
    magnitude, fraction = (one << sign) - one, (one << np.uint64(mantissa)) - one
    infinity = ((one << np.uint64(exponent)) - one) << np.uint64(mantissa)
    offset = np.uint64(((mantissa - 1) << bits) + 1)
    low, width = limits[0], limits[1] - limits[0]
    middle, signed, last = np.uint64(zero), zero > 0, np.uint64(counts.size - 1)
    for i in range(u.size):
        v = np.uint64(u[i])
        m = v & magnitude
        if m >= infinity:
            counts[last] += 1
        elif m - low < width:
            if m > fraction:
                j = (m >> shift) + offset
            elif m == 0:
                j = m
            else:
                p = _highest(m)
                j = (((m << np.uint64(mantissa - p)) & fraction) >> shift) + np.uint64(p << bits) + one
            counts[middle - j if signed and v > magnitude else middle + j] += 1


@njit_in_place
def _sum_lanes(raw: Any, out: Any) -> None:
    for t in range(out.size):
        out[t] = np.int64(raw[4 * t]) + np.int64(raw[4 * t + 1]) + np.int64(raw[4 * t + 2]) + np.int64(raw[4 * t + 3])


@njit_in_place
def _keep_by(u: Any, product: Any, magnitude: Any, low: Any, high: Any, out: Any) -> None:
    """Copy each pattern of u whose product is within the limits; write NaN for the others.

    `out = u` where `low <= (product & magnitude) < high`, else all bits 1.
    """
    width = high - low
    for i in range(out.size):
        out[i] = u[i] if (product[i] & magnitude) - low < width else ~(u[i] & ~u[i])


def is_few(size: int, lanes: int) -> bool:
    """Return whether direct counts of `size` patterns were measured faster than counts in lanes."""
    return size < max(lanes // 2, BLOCK)


class _Counter:
    """Counters of one histogram, to which patterns are added block by block.

    `size` is the number of patterns; those with a magnitude in [low, high) count.
    """

    def __init__(
        self, size: int, fmt: FloatFormat, bits: int, *, signed: bool = True, low: int = 0, high: int | None = None
    ) -> None:
        self.fmt, self.bits, self.signed = fmt, bits, signed
        infinity = ((1 << fmt.exponent) - 1) << fmt.mantissa
        self.limits = np.array([low, infinity if high is None else high], dtype=np.uint64)
        lanes = 4 << (1 + fmt.exponent + bits)
        self.few = is_few(size, lanes)
        buckets = fmt.buckets(bits)
        self.zero = buckets if signed or not self.few else 0
        self.counts = np.zeros(self.zero + buckets + 2, dtype=np.int64)
        if not self.few:
            self.raw = np.zeros(lanes, dtype=np.uint32)
            self.rare = np.zeros((2, (fmt.mantissa << bits) + 1), dtype=np.int64)
            self.partial = np.zeros((2, 2), dtype=np.int64)
            self.pending = 0

    def add(self, u: np.ndarray[Any, Any]) -> None:
        """Count the patterns u."""
        fmt = self.fmt
        if self.few:
            _count_few(u, fmt.mantissa, fmt.exponent, self.bits, self.limits, self.zero, self.counts)
            return
        for begin in range(0, u.size, CHUNK):
            part = u[begin : begin + CHUNK]
            if self.pending + part.size > CHUNK:
                self._lay_out()
                for counters in (self.raw, self.rare, self.partial):
                    counters[:] = 0
                self.pending = 0
            _count(part, fmt.mantissa, fmt.exponent, self.bits, self.limits, self.raw, self.rare, self.partial)
            self.pending += part.size

    def _lay_out(self) -> None:
        """Add the raw counters to the signed bucket layout."""
        fmt, bits, buckets = self.fmt, self.bits, self.fmt.buckets(self.bits)
        patterns = np.empty((2, 1 << (fmt.exponent + bits)), dtype=np.int64)
        _sum_lanes(self.raw, patterns.reshape(-1))
        below, top = 1 << bits, patterns.shape[1] - (1 << bits)  # exponent fields 0, normal, and all ones
        if self.limits[0] == 0 < self.limits[1]:
            self.counts[buckets] += patterns[:, :below].sum() - self.rare[0, -1]
        self.counts[-1] += patterns[:, top:].sum()

        low, high = (int(limit) >> (fmt.mantissa - bits) for limit in self.limits)  # the buckets they lie in
        patterns[:, high] = 0
        patterns[:, high] += self.partial[1]
        patterns[:, low] -= self.partial[0]
        patterns[:, high + 1 :] = 0
        patterns[:, :low] = 0
        for half, normal, rare in zip(
            (self.counts[buckets + 1 : -1], self.counts[:buckets][::-1]), patterns[:, below:top], self.rare, strict=True
        ):
            half[: fmt.mantissa << bits] += rare[:-1]
            half[fmt.mantissa << bits :] += normal

    def histogram(self) -> Histogram:
        """The histogram of all patterns added; infinities and NaNs count outside the limits too."""
        if not self.few:
            self._lay_out()
        found = Histogram(self.counts, self.bits, self.fmt.name, signed=self.zero > 0)
        return found if self.signed else found.magnitude()


def product_blocks(x: Array, gradient: Array) -> Iterator[tuple[int, int, np.ndarray[Any, Any]]]:
    """Yield (begin, end, bit patterns of gradient * x) block by block.

    The buffer of one block is used again for the next.
    """
    wide = np.dtype(product_format(x, gradient))
    own, other = dtype_name(x), dtype_name(gradient)
    a, g = to_numpy(x).reshape(-1), to_numpy(gradient).reshape(-1)
    buffer = np.empty(min(BLOCK, a.size), dtype=wide)
    for begin in range(0, a.size, BLOCK):
        end = min(begin + BLOCK, a.size)
        product = buffer[: end - begin]
        with np.errstate(all="ignore"):
            np.multiply(widened(g[begin:end], other), widened(a[begin:end], own), out=product, dtype=wide)
        yield begin, end, bit_view(product)


def log_histogram(x: Array, bits: int, *, signed: bool = False, gradient: Array | None = None) -> Histogram:
    """See `shrinkpoint.kernels.histogram.log_histogram`."""
    u = bit_view(to_numpy(x))
    counter = _Counter(u.size, *target(x, gradient, bits), signed=signed)
    if gradient is None:
        counter.add(u)
    else:
        for _, _, product in product_blocks(x, gradient):
            counter.add(product)
    return counter.histogram()


def log_histogram_many(
    xs: Sequence[Array], bits: int, *, signed: bool = False, gradients: Sequence[Array | None]
) -> list[Histogram]:
    """See `shrinkpoint.kernels.histogram.log_histogram_many`."""
    return [log_histogram(x, bits, signed=signed, gradient=g) for x, g in zip(xs, gradients, strict=True)]


@njit_in_place
def _used_buckets(
    u: Any, ends: Any, mantissa: int, bits: int, limits: Any, counters: Any, buckets: Any, counts: Any, until: Any
) -> None:
    """Buckets in use of each array, and their counts; `counters` is zero before and after.

    limits: uint64 [2], 0 and the pattern of infinity, for `_count_few`.
    """
    shift, sign = np.uint32(mantissa - bits), np.uint32(31)
    magnitude, least = np.uint32((1 << 31) - 1), np.uint32(1 << mantissa)
    infinite = np.uint32(255 << mantissa)
    # From the upper bits of a normal magnitude to its bucket, which comes after those of the subnormals.
    lift = 1 + (mantissa << bits) - (1 << bits)
    last = counters.size - 1
    middle: Any = np.int64(last >> 1)
    begin = found = 0
    for m in range(ends.size):
        own = u[begin : ends[m]]
        # The limits and the unusual patterns first: this loop is vectorized, and the next one then has no branches.
        near, far, unusual = infinite, np.uint32(0), np.uint32(0)
        for i in range(own.size):
            v = own[i] & magnitude
            unusual |= np.uint32(((v - np.uint32(1)) < least - np.uint32(1)) | (v >= infinite))
            near = min(near, v if v >= least else infinite)
            far = max(far, v if v < infinite else np.uint32(0))
        first, end = lift + np.int64(near >> shift), lift + np.int64(far >> shift)
        if unusual == 0:
            for i in range(own.size):
                v = own[i] & magnitude
                j = lift + np.int64(v >> shift) if v >= least else np.int64(0)
                side = -np.int64(own[i] >> sign)
                counters[middle + ((j ^ side) - side)] += 1
        else:
            _count_few(own, mantissa, 8, bits, limits, middle, counters)
            first = np.int64(1)
            end = max(end, np.int64(mantissa << bits))
        for start, stop in (
            (middle - end, middle - first + 1),
            (middle, middle + 1),
            (middle + first, middle + end + 1),
            (last, last + 1),
        ):
            for at in range(start, stop):
                if counters[at] > 0:
                    buckets[found] = at
                    counts[found] = counters[at]
                    counters[at] = 0
                    found += 1
        until[m] = found
        begin = ends[m]


def used_buckets_many(x: Array, ends: Any, bits: int) -> tuple[Any, Any, Any]:
    """See `shrinkpoint.kernels.histogram.used_buckets_many`."""
    fmt = format_named("float32")
    bits, u = min(bits, fmt.mantissa), to_numpy(x).view(np.uint32)
    buckets, counts, until = np.empty(u.size, np.int32), np.empty(u.size, np.int64), np.empty(ends.size, np.int64)
    counters, limits = np.zeros(2 * fmt.buckets(bits) + 2, np.int64), np.array([0, 255 << fmt.mantissa], np.uint64)
    _used_buckets(u, ends, fmt.mantissa, bits, limits, counters, buckets, counts, until)
    found = int(until[-1]) if until.size else 0
    return buckets[:found].copy(), counts[:found].copy(), until


def kept_histogram(x: Array, thresholds: Thresholds, bits: int, *, gradient: Array | None = None) -> Histogram:
    """See `shrinkpoint.kernels.histogram.kept_histogram`."""
    fmt, bits = target(x, None, bits)
    _, low, high = keep_range(fmt, thresholds.prune_magnitude, thresholds.protect_magnitude)
    u = bit_view(to_numpy(x))
    counter = _Counter(u.size, fmt, bits, low=low, high=high)
    if gradient is None:
        counter.add(u)
    else:
        product_fmt = format_named(product_format(x, gradient))
        by_product = keep_range(product_fmt, thresholds.prune_sensitivity, thresholds.protect_sensitivity)
        buffer = np.empty(min(BLOCK, u.size), dtype=u.dtype)
        for begin, end, product in product_blocks(x, gradient):
            kept = buffer[: end - begin]
            _keep_by(u[begin:end], product, *by_product, kept)
            counter.add(kept)
    histogram = counter.histogram()
    histogram.counts[-1] = 0
    return histogram


def kept_histogram_many(
    xs: Sequence[Array], thresholds: Sequence[Thresholds], bits: int, *, gradients: Sequence[Array | None]
) -> list[Histogram]:
    """See `shrinkpoint.kernels.histogram.kept_histogram_many`."""
    each = zip(xs, thresholds, gradients, strict=True)
    return [kept_histogram(x, limits, bits, gradient=g) for x, limits, g in each]


def keep_range(fmt: FloatFormat, prune: float, protect: float) -> tuple[Any, Any, Any]:
    """Magnitude mask and pattern limits [low, high) of elements neither pruned nor protected."""
    kind = _UNSIGNED[fmt.width]
    high = _limit(protect + 0.0, fmt)  # a zero of either sign is one key of the cache
    low = min(_limit(prune + 0.0, fmt), high)
    return kind((1 << (fmt.width - 1)) - 1), kind(low), kind(high)


_UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}
# Infinity and 0 mean no threshold; they come with every call.
_limit = lru_cache(256)(magnitude_bits)
