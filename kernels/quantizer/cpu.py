"""Levels by table look-up, compiled.

The level is a step function of the bit pattern of a float, including the sign: pruning, nearest code and protection are
all cuts on one line. A table is indexed by the upper bits of the pattern. An entry holds the position of the one cut
within it, and the levels below and above that cut. If two cuts share an entry, the kernel bisects the list of cuts.
Levels of equidistant entries need one rounding and no table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend.arrays import Array, bit_view, dtype_name, like, to_numpy
from ..backend.floats import FloatFormat, format_named
from ..backend.instructions import AHEAD, local_array, prefetch
from ..backend.jit import njit_in_place
from ..errors import CorruptDataError
from ..histogram.cpu import keep_range, product_blocks
from . import FIRST_CODE, PROTECTED, Thresholds, boundaries, product_format

Vector = np.ndarray[Any, np.dtype[np.float64]]
Patterns = np.ndarray[Any, Any]
Levels = np.ndarray[Any, np.dtype[np.uint8]]

TABLE_BITS = 16
"""Upper bits that index the table: sign, exponent and seven mantissa bits of a float32; all of a 16-bit format."""


@njit_in_place
def _look_up_16(u: Any, table: Any, out: Any) -> None:
    for i in range(u.size):
        out[i] = table[u[i]]


@njit_in_place
def _look_up_32(u: Any, table: Any, out: Any) -> None:
    """Look up levels in a table of packed entries.

    An entry is `cut | level below << 16 | level from the cut on << 24`, the cut being 16 bits of the pattern.

    The patterns are processed in short blocks, which stay in the cache: one loop looks up the entries, and a vectorized
    loop computes the levels.
    """
    half = np.uint32(0xFFFF)
    entries = local_array(128, np.uint32)
    whole = u.size // 128 * 128
    for begin in range(0, whole, 128):
        v, levels = u[begin : begin + 128], out[begin : begin + 128]
        for i in range(0, 128, 16):
            prefetch(v, i + AHEAD // 4)
        for i in range(128):
            entries[i] = table[v[i] >> np.uint32(16)]
        for i in range(128):
            entry = entries[i]
            past = (v[i] & half) >= (entry & half)
            levels[i] = np.uint8(entry >> np.uint32(24)) if past else np.uint8(entry >> np.uint32(16))
    for i in range(whole, u.size):
        entry = table[u[i] >> np.uint32(16)]
        past = (u[i] & half) >= (entry & half)
        out[i] = np.uint8(entry >> np.uint32(24)) if past else np.uint8(entry >> np.uint32(16))


@njit_in_place
def _merge(cuts: Any, negative: int, codes: int, low: Any, high: Any, sign: Any, starts: Any, levels: Any) -> int:
    """Merge step functions into one over all patterns; return its number of steps.

    Steps go to `starts` and `levels`.

    cuts: uint64, patterns of the boundaries' magnitudes, the first `negative` of them of boundaries <= 0, descending.
    low, high: magnitudes below `low` are pruned (level 0), those from `high` on protected (level 1).
    sign: the sign's bit.
    """
    found = 0
    for half in range(2):
        number = negative if half else cuts.size - negative
        special, passed = 0, 0  # 0, low and high; and cuts
        while special < 3 or passed < number:
            limit = np.uint64(0) if special == 0 else (low if special == 1 else high)
            at = limit
            if passed < number:
                # Upward, a boundary is the first value of the next code; downward, the last value of its own code.
                cut = cuts[negative - 1 - passed] + np.uint64(1) if half else cuts[negative + passed]
                if special == 3 or cut <= limit:
                    at = cut
                    passed += 1
            if special < 3 and at == limit:
                special += 1
            if at < low:
                level = 0
            elif at >= high or codes == 0:
                level = 1
            else:
                level = 2 + negative - passed if half else 2 + negative + passed
            start = at | sign if half else at
            if found > 0 and starts[found - 1] == start:
                found -= 1
            if found == 0 or levels[found - 1] != level:
                starts[found], levels[found] = start, level
                found += 1
    return found


@njit_in_place
def _fill(starts: Any, levels: Any, shift: int, table: Any) -> bool:
    """Fill the table of a step function; False if two cuts share an entry.

    Entries are as in `_look_up_32`, or levels (shift 0).
    """
    kind = table.dtype.type
    for step in range(starts.size):
        begin = np.int64(starts[step] >> np.uint64(shift))
        end = np.int64(starts[step + 1] >> np.uint64(shift)) if step + 1 < starts.size else table.size
        if begin == end:
            return False
        level = np.uint32(levels[step])
        if shift == 0:
            table[begin:end] = kind(level)
        else:
            before = np.uint32(levels[step - 1]) if step > 0 else level
            cut = np.uint32(starts[step] & np.uint64((1 << shift) - 1))
            table[begin:end] = kind(level << np.uint32(24))
            table[begin] = kind(level << np.uint32(24) | before << np.uint32(16) | cut)
    return True


@njit_in_place
def _index(starts: Any, shift: int, first: Any) -> None:
    """Last step that starts before each table entry."""
    end = np.int64(starts[0] >> np.uint64(shift)) + 1
    first[:end] = 0
    for step in range(starts.size):
        begin = end
        end = np.int64(starts[step + 1] >> np.uint64(shift)) + 1 if step + 1 < starts.size else first.size
        first[begin:end] = step


@njit_in_place
def _search(u: Any, shift: int, first: Any, starts: Any, levels: Any, out: Any) -> None:
    """Last step that starts at or below u, by bisection within its upper bits."""
    for i in range(u.size):
        entry = np.uint64(u[i]) >> np.uint64(shift)
        low, high = np.int64(first[entry]), np.int64(first[entry + np.uint64(1)])
        while low < high:
            middle = (low + high + 1) >> 1
            if starts[middle] <= u[i]:
                low = middle
            else:
                high = middle - 1
        out[i] = levels[low]


@njit_in_place
def _by_product(out: Any, product: Any, magnitude: Any, low: Any, high: Any) -> None:
    """Apply the sensitivity thresholds: protect high products, prune low ones not protected."""
    for i in range(out.size):
        p = product[i] & magnitude
        out[i] = 1 if p >= high or out[i] == 1 else (0 if p < low else out[i])


@njit_in_place
def _values(levels: Any, table: Any, out: Any) -> None:
    whole = levels.size // 4 * 4
    for i in range(0, whole, 4):
        a, b, c, d = table[levels[i]], table[levels[i + 1]], table[levels[i + 2]], table[levels[i + 3]]
        out[i], out[i + 1], out[i + 2], out[i + 3] = a, b, c, d
    for i in range(whole, levels.size):
        out[i] = table[levels[i]]


@njit_in_place
def _put_protected(levels: Any, protected: Any, out: Any) -> int:
    """Write the protected values where the level is 1; return the number of such levels."""
    at = 0
    for begin in range(0, levels.size, 128):
        v, o = levels[begin : begin + 128], out[begin : begin + 128]
        some = np.uint8(0)
        for i in range(v.size):
            some |= np.uint8(v[i] == 1)
        if some != 0:
            for i in range(v.size):
                if v[i] == 1:
                    if at < protected.size:
                        o[i] = protected[at]
                    at += 1
    return at


def _pattern(values: Vector, fmt: FloatFormat) -> Patterns:
    """Bit patterns of non-negative values that the format holds exactly, as uint64."""
    if fmt.name == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint64)
    return bit_view(values.astype(fmt.name)).astype(np.uint64)


def _steps(fmt: FloatFormat, thresholds: Thresholds, codes: Vector) -> tuple[Patterns, Levels]:
    """Level as a step function over the patterns 0 ... 2**width - 1.

    From `starts[i]` (uint64, first 0) on the level is `levels[i]`.
    """
    _, low, high = keep_range(fmt, thresholds.prune_magnitude, thresholds.protect_magnitude)
    edges = boundaries(codes, fmt.name)
    cuts = _pattern(np.abs(edges), fmt)
    negative = int(np.searchsorted(edges, 0.0, side="right"))
    starts, levels = np.empty(cuts.size + 6, np.uint64), np.empty(cuts.size + 6, np.uint8)
    sign = np.uint64(1 << (fmt.width - 1))
    found = _merge(cuts, negative, codes.size, np.uint64(low), np.uint64(high), sign, starts, levels)
    return starts[:found], levels[:found]


class _Assigner:
    """The step function of one call as a table, applied to patterns."""

    def __init__(self, fmt: FloatFormat, thresholds: Thresholds, codes: Vector) -> None:
        starts, levels = _steps(fmt, thresholds, codes)
        self.shift = fmt.width - TABLE_BITS
        size = 1 << TABLE_BITS
        self.simple = fmt.width <= 32
        if self.simple:
            self.table = np.empty(size, dtype=np.uint8 if fmt.width == 16 else np.uint32)
            self.simple = _fill(starts, levels, self.shift, self.table)
        if not self.simple:
            self.starts, self.levels = starts.astype(f"uint{fmt.width}"), levels
            self.first = np.empty(size + 1, np.int16)
            _index(starts, self.shift, self.first)

    def __call__(self, u: Patterns, out: Levels) -> None:
        if not self.simple:
            _search(u, self.shift, self.first, self.starts, self.levels, out)
        elif u.dtype == np.uint16:
            _look_up_16(u, self.table, out)
        else:
            _look_up_32(u, self.table, out)


def assign(x: Array, thresholds: Thresholds, codebook: Array, *, gradient: Array | None = None) -> Array:
    """See `shrinkpoint.kernels.quantizer.assign`; the codebook is float64 NumPy."""
    # Without codes, kept elements become protected, but only after the product's thresholds: until then they
    # have a code.
    stand_in = gradient is not None and codebook.size == 0
    apply = _Assigner(format_named(dtype_name(x)), thresholds, np.zeros(1) if stand_in else codebook)
    values = to_numpy(x)
    levels = np.empty(values.shape, dtype=np.uint8)
    u, out = bit_view(values), levels.reshape(-1)
    if gradient is None:
        apply(u, out)
    else:
        limits = keep_range(
            format_named(product_format(x, gradient)), thresholds.prune_sensitivity, thresholds.protect_sensitivity
        )
        for begin, end, product in product_blocks(x, gradient):
            apply(u[begin:end], out[begin:end])
            _by_product(out[begin:end], product, *limits)
    if stand_in:
        out[out == FIRST_CODE] = PROTECTED
    return like(levels, x)


def dequantize(levels: Array, codebook: Array, *, protected: Array | None = None) -> Array:
    """See `shrinkpoint.kernels.quantizer.dequantize`."""
    flat = to_numpy(levels).reshape(-1)
    codes = to_numpy(codebook)
    largest = int(flat.max()) if flat.size else 0
    if largest >= FIRST_CODE + codes.size:
        raise CorruptDataError(f"a level is {largest}; the codebook's {codes.size} codes end at {codes.size + 1}")
    table = np.zeros(256, dtype=codes.dtype)
    table[FIRST_CODE : FIRST_CODE + codes.size] = codes
    out = np.empty(tuple(levels.shape), dtype=codes.dtype)
    _values(flat, bit_view(table), bit_view(out))
    if protected is not None:
        exact = to_numpy(protected)
        wanted = _put_protected(flat, bit_view(exact), bit_view(out))
        if exact.size != wanted:
            raise CorruptDataError(f"{exact.size} protected values, but {wanted} elements of level {PROTECTED}")
    return like(out, codebook, dtype="bfloat16" if dtype_name(codebook) == "bfloat16" else None)


_LANES = 64
"""Partial sums of an array, so that additions need not wait for each other."""


@njit_in_place
def _levels(
    x: Any, ends: Any, steps: Any, firsts: Any, sizes: Any, limit: float, out: Any, sums: Any, error: Any, norm: Any
) -> None:
    begin = 0
    for m in range(ends.size):
        step, first = steps[m], np.float64(firsts[m])
        last = first + np.float64(sizes[m] - 1)
        error[:] = 0.0
        norm[:] = 0.0
        for at in range(begin, ends[m], _LANES):
            n = min(_LANES, ends[m] - at)
            own, levels = x[at : at + n], out[at : at + n]
            for i in range(n):
                value = np.float64(own[i])
                # Exact enough: float32 values and steps of 8 bits are never nearly half-way, unless they are.
                nearest = min(max(np.ceil(value / step - 0.5), first), last)
                inside = abs(value) < limit  # false for NaN
                miss = nearest * step - value if inside else 0.0
                error[i] += miss * miss
                norm[i] += value * value if inside else 0.0
                levels[i] = np.uint8(np.int32(nearest - first) + 2) if inside else np.uint8(1)
        sums[m, 0] = sums[m, 1] = 0.0
        for i in range(_LANES):
            sums[m, 0] += error[i]
            sums[m, 1] += norm[i]
        begin = ends[m]


@njit_in_place
def _uniform_values(levels: Any, ends: Any, steps: Any, firsts: Any, table: Any, out: Any) -> None:
    """Values of each array; entries 0 and 1 of `table` are 0."""
    begin = 0
    for m in range(ends.size):
        for level in range(2, 256):
            table[level] = np.float32(np.float64(firsts[m] + level - 2) * steps[m])
        for i in range(begin, ends[m]):
            out[i] = table[levels[i]]
        begin = ends[m]


def uniform_levels_many(
    x: Array, ends: Any, steps: Any, firsts: Any, sizes: Any, limit: float
) -> tuple[Array, np.ndarray[Any, np.dtype[np.float64]]]:
    """See `kernels.uniform_levels`."""
    values = to_numpy(x)
    out, sums = np.empty(values.size, np.uint8), np.empty((ends.size, 2))
    # Infinities count as not finite under every limit.
    below = min(limit, float(np.finfo(np.float64).max))
    _levels(values, ends, steps, firsts, sizes, below, out, sums, np.empty(_LANES), np.empty(_LANES))
    return like(out, x), sums


def uniform_values_many(levels: Array, ends: Any, steps: Any, firsts: Any) -> Array:
    """See `kernels.uniform_levels`."""
    own = to_numpy(levels)
    out = np.empty(own.size, np.float32)
    _uniform_values(own, ends, steps, firsts, np.zeros(256, np.float32), out)
    return like(out, levels)
