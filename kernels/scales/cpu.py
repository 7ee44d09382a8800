"""Octaves, classes and rank-one estimates on the CPU, row after row in vectorized loops."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend.arrays import Array, like, to_numpy, writeable
from ..backend.instructions import local_array
from ..backend.jit import njit, njit_in_place, njit_inline
from . import ESCAPE, FARTHEST, FIRST, MAX_OCTAVES, SCALE, ZERO, Factors, Octaves, Shapes, cell_centers


@njit_in_place
def _range(index: Any, bits: int, buckets: int) -> Any:
    """Smallest and largest nonzero magnitude, and numbers of nonzero and not finite elements."""
    low = np.int32(buckets + 1)
    high = np.int32(0)
    nonzero = 0
    odd = 0
    for i in range(index.size):
        j = abs(index[i] - np.int32(buckets))
        finite = j <= buckets
        some = (j > 0) & finite
        nonzero += some
        odd += not finite
        low = min(low, j if some else low)
        high = max(high, j if some else high)
    return low, high, nonzero, odd


@njit_in_place
def _split(index: Any, bits: int, buckets: int, low: int, symbols: Any, negative: Any, fraction: Any, odd: Any) -> None:
    # One extra slot at the end of each stream: every element is written, but only counted ones advance the position.
    mask = np.int32((1 << bits) - 1)
    planes = fraction.shape[0]
    at = 0
    odd_at = 0
    for i in range(index.size):
        signed = index[i] - np.int32(buckets)
        j = abs(signed)
        if j > buckets:
            symbols[i] = 0
            odd[odd_at] = i
            odd_at += 1
            continue
        m = j - np.int32(1)
        some = j > 0
        symbols[i] = ((m >> bits) - low + 1) if some else 0
        negative[at] = signed < 0
        if planes > 0:
            fraction[0, at] = m & mask & np.int32(255)
        if planes > 1:
            fraction[1, at] = (m & mask) >> np.int32(8)
        at += some


@njit_in_place
def _join(symbols: Any, negative: Any, fraction: Any, bits: int, buckets: int, low: int, out: Any) -> None:
    planes = fraction.shape[0]
    at = 0
    for i in range(symbols.size):
        s = np.int32(symbols[i])
        if s == 0:
            out[i] = buckets
            continue
        j = ((s + np.int32(low - 1)) << bits) + np.int32(1)
        if planes > 0:
            j += np.int32(fraction[0, at])
        if planes > 1:
            j += np.int32(fraction[1, at]) << np.int32(8)
        out[i] = buckets - j if negative[at] else buckets + j
        at += 1


def split_octaves(index: Array, bits: int, buckets: int) -> Octaves | None:
    """See `shrinkpoint.kernels.scales`."""
    host = to_numpy(index)
    smallest, largest, nonzero, n_odd = _range(host, bits, buckets)
    low, high = ((int(smallest) - 1) >> bits, (int(largest) - 1) >> bits) if nonzero else (0, 0)
    if high - low >= MAX_OCTAVES:
        return None
    symbols = np.empty(host.size, np.uint8)
    negative = np.empty(nonzero + 1, np.uint8)
    fraction = np.empty(((bits + 7) // 8, nonzero + 1), np.uint8)
    odd = np.empty(n_odd, np.int64)
    _split(host, bits, buckets, low, symbols, negative, fraction, odd)
    return Octaves(low, high, symbols, negative[:nonzero], fraction[:, :nonzero], odd)


def join_octaves(octaves: Octaves, bits: int, buckets: int) -> Array:
    """See `shrinkpoint.kernels.scales`."""
    out = np.empty(octaves.symbols.size, np.int32)
    _join(octaves.symbols, octaves.negative, octaves.fraction, bits, buckets, octaves.low, out)
    return out


NumPy = np.ndarray[Any, Any]
NARROW = 48
"""Columns below which rows are not processed in separate loops."""
SHORT = 1 << 15
"""Rows, and elements of a row, that are summed in 32 bits before they are added to 64-bit sums."""


def row_column_sums(values: Array, columns: int, phase: int, most: int) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.scales.row_column_sums`."""
    v = writeable(values)
    rows = np.zeros(-(-(phase + v.size) // columns), np.int64)
    sums = np.zeros(columns, np.int64)
    given = v, np.uint8(most), phase, rows, sums
    if columns < NARROW:
        _narrow_sums(*given)
    else:
        _row_column_sums(*given, np.zeros(columns, np.uint32))
    return like(rows, values), like(sums, values)


def class_sums(rows: Array, columns: Array, n: int, phase: int, base: int, classes: int) -> Array:
    """See `shrinkpoint.kernels.scales.class_sums`."""
    out = np.empty(n, np.uint8)
    _classes(writeable(rows), writeable(columns), phase, base, classes, out)
    return like(out, rows)


def pattern_classes(patterns: Array, shift: int, table: Array) -> Array:
    """See `shrinkpoint.kernels.scales.pattern_classes`."""
    u = writeable(patterns)
    out = np.empty(u.size, np.uint8)
    _look_up(u, u.dtype.type(shift), writeable(table), out)
    return like(out, patterns)


@njit_in_place
def _look_up(patterns: NumPy, shift: Any, table: NumPy, out: NumPy) -> None:
    for i in range(out.size):
        out[i] = table[np.int64(patterns[i] >> shift)]


@njit_in_place
def _narrow_sums(values: NumPy, most: Any, phase: int, rows: NumPy, sums: NumPy) -> None:
    """Row and column sums of narrow matrices, one element after another.

    For short rows the vectorized loops of `_row_column_sums` cost more than they save.
    """
    r, c, total = 0, phase, np.int64(0)
    for i in range(values.size):
        far = np.int64(min(values[i], most))
        total += far
        sums[c] += far
        c += 1
        if c == sums.size:
            rows[r] = total
            r, c, total = r + 1, 0, np.int64(0)
    if c:
        rows[r] = total


@njit_in_place
def _row_column_sums(values: NumPy, most: Any, phase: int, rows: NumPy, sums: NumPy, short: NumPy) -> None:
    width = sums.size
    clipped = local_array(SHORT, np.uint8)
    for r in range(rows.size):
        first = max(r * width - phase, 0)
        end = min((r + 1) * width - phase, values.size)
        total = np.int64(0)
        for start in range(first, end, SHORT):
            part = values[start : min(start + SHORT, end)]
            own = clipped[: part.size]
            for i in range(part.size):
                own[i] = min(part[i], most)
            column = short[start + phase - r * width :]
            some = np.uint32(0)
            for i in range(part.size):
                some += np.uint32(own[i])
            total += np.int64(some)
            for i in range(part.size):
                column[i] += np.uint32(own[i])
        rows[r] = total
        if r % SHORT == SHORT - 1 or r == rows.size - 1:
            for c in range(width):
                sums[c] += np.int64(short[c])
                short[c] = np.uint32(0)


@njit_in_place
def _classes(rows: NumPy, columns: NumPy, phase: int, base: int, classes: int, out: NumPy) -> None:
    width = columns.size
    top = np.int16(classes - 1)
    for r in range(rows.size):
        first = max(r * width - phase, 0)
        part = out[first : min((r + 1) * width - phase, out.size)]
        column = columns[first + phase - r * width :]
        own = np.int16(np.int16(rows[r]) - np.int16(base))
        for c in range(part.size):
            part[c] = np.uint8(min(max(np.int16(own + np.int16(column[c])), np.int16(0)), top))


_NORMAL = np.uint32(1 << 23)
_INFINITE = np.uint32(255 << 23)
_MAGNITUDE = np.uint32((1 << 31) - 1)
_ONE = np.int32(127 << 23)
_EQUAL_AT, _ESCAPED_AT, _ZERO_AT = 2048, 4096, 4097
"""Positions in the look-up table: a difference of 0 sixteenths of an octave, no residual, and zero."""


_LANES = 32
"""Partial sums of a row, so that additions do not wait for each other and fill whole registers."""


@njit_in_place
def _sums(x: Any, rows: Any, columns: Any, lanes: Any) -> None:
    width = columns.size
    whole = width - width % _LANES
    for i in range(rows.size):
        own = x[i * width : (i + 1) * width]
        lanes[:] = 0.0
        for at in range(0, whole, _LANES):
            part, below = own[at : at + _LANES], columns[at : at + _LANES]
            for k in range(_LANES):
                value = np.float64(part[k])
                below[k] += value
                lanes[k] += value
        total = 0.0
        for j in range(whole, width):
            value = np.float64(own[j])
            columns[j] += value
            total += value
        for k in range(_LANES):
            total += lanes[k]
        rows[i] = total


def factor_sums(x: Array, columns: int) -> tuple[Any, Any]:
    """See `shrinkpoint.kernels.scales`."""
    values = to_numpy(x)
    rows, below = np.empty(values.size // columns), np.zeros(columns)
    _sums(values, rows, below, np.empty(_LANES))
    if not np.isfinite(rows).all():
        below[:] = 0.0
        _sums(np.where(np.isfinite(values), values, np.float32(0)), rows, below, np.empty(_LANES))
    return rows, below


@njit_inline
def _estimates(rows: Any, columns: Any, i: int, j: int, out: Any) -> Any:
    """Fill `out` with the next estimates from row i, column j; return the next position."""
    t = 0
    while t < out.size:
        n = min(out.size - t, columns.size - j)
        r = rows[i]
        of, to = columns[j : j + n], out[t : t + n]
        for k in range(n):
            to[k] = r * of[k]
        t += n
        j += n
        if j == columns.size:
            j = 0
            i += 1
    return i, j


@njit_inline
def _symbols_of(
    x: Any, keys: Any, rows: Any, columns: Any, start: int, cell: int, lookup: Any, centers: Any, previous: Any,
    estimates: Any, estimate_keys: Any, ratios: Any, patterns: Any, places: Any, out: Any, sums: Any, counts: Any,
) -> None:  # fmt: skip
    """Symbols and sums of a part of the matrix, in short blocks.

    One vectorized loop computes the ratios and their distance from the estimate in sixteenths of an octave; another
    loop computes symbols and sums. The sums are at `[4 * symbol + lane]`, so that an element does not wait for the
    previous one.
    """
    one, scale = np.float32(1.0), np.float32(SCALE)
    i, j = start // columns.size, start % columns.size
    for at in range(0, keys.size, estimates.size):
        n = min(estimates.size, keys.size - at)
        i, j = _estimates(rows, columns, i, j, estimates[:n])
        own, values = keys[at : at + n], x[at : at + n]
        for t in range(n):
            key, base = own[t], estimate_keys[t]
            usable = (key >= _NORMAL) & (key < _INFINITE) & (base >= _NORMAL) & (base < _INFINITE)
            ratios[t] = (values[t] if usable else one) / (estimates[t] if usable else one)
            places[t] = np.int32(0) if usable else np.int32(_ZERO_AT if key & _MAGNITUDE == 0 else _ESCAPED_AT)
        for t in range(n):
            pattern = patterns[t]
            off = np.int32(np.int32(pattern) - _ONE) >> np.int32(19)
            fits = (pattern >= _NORMAL) & (pattern < _INFINITE)
            place = np.int32(off + np.int32(_EQUAL_AT)) if fits else np.int32(_ESCAPED_AT)
            places[t] = place if places[t] == 0 else places[t]
        symbols = out[at : at + n]
        for t in range(n):
            symbols[t] = lookup[places[t]]
        if previous.size:
            old = previous[at : at + n]
            for t in range(n):
                distance = np.int64(np.int32(patterns[t]) - _ONE)
                beyond = abs(distance - (np.int64(old[t]) - (FIRST + FARTHEST)) * cell) - cell // 2
                keeps = (beyond <= cell // 4) & (min(symbols[t], old[t]) >= FIRST)
                symbols[t] = old[t] if keeps else symbols[t]
        shares = estimates
        for t in range(n):
            shares[t] = centers[symbols[t]]
        for t in range(n):
            ratio = ratios[t] if symbols[t] >= FIRST else one
            shares[t] = np.rint(np.sqrt(shares[t] / ratio) * scale)
        whole = n // 4 * 4
        for t in range(0, whole, 4):
            a, b = np.uint64(symbols[t]) << np.uint64(2), np.uint64(symbols[t + 1]) << np.uint64(2)
            c, d = np.uint64(symbols[t + 2]) << np.uint64(2), np.uint64(symbols[t + 3]) << np.uint64(2)
            b, c, d = b + np.uint64(1), c + np.uint64(2), d + np.uint64(3)
            sums[a] += np.float64(shares[t])
            sums[b] += np.float64(shares[t + 1])
            sums[c] += np.float64(shares[t + 2])
            sums[d] += np.float64(shares[t + 3])
            counts[a] += 1
            counts[b] += 1
            counts[c] += 1
            counts[d] += 1
        for t in range(whole, n):
            a = np.uint64(symbols[t]) << np.uint64(2)
            sums[a] += np.float64(shares[t])
            counts[a] += 1


def _lookup(eighths: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Table of the symbol of each distance from the estimate in sixteenths of an octave.

    Distances are rounded down, which can be done in two steps.
    """
    cells = (np.arange(_ESCAPED_AT) - _EQUAL_AT + eighths) // (2 * eighths)
    table = np.full(_ZERO_AT + 1, ESCAPE, np.uint8)
    near = np.abs(cells) <= FARTHEST
    table[:_ESCAPED_AT][near] = cells[near] + (FIRST + FARTHEST)
    table[_ZERO_AT] = ZERO
    return table


@njit_inline
def _values_of(symbols: Any, rows: Any, columns: Any, start: int, table: Any, estimates: Any, out: Any) -> None:
    i, j = start // columns.size, start % columns.size
    for at in range(0, symbols.size, estimates.size):
        n = min(estimates.size, symbols.size - at)
        i, j = _estimates(rows, columns, i, j, estimates[:n])
        own, values = symbols[at : at + n], out[at : at + n]
        for t in range(n):
            values[t] = estimates[t] * table[own[t]]


_STEP = 1 << 12
"""Estimates per block, which stay in the first-level cache."""


@njit
def _factors(x: Any, shapes: Any, rows: Any, columns: Any, lanes: Any) -> None:
    """Row means and column means over the mean of all, of one matrix after another."""
    at = i = j = 0
    for m in range(shapes.shape[0]):
        height, width = shapes[m, 0], shapes[m, 1]
        own, across, down = x[at : at + height * width], np.empty(height), np.zeros(width)
        _sums(own, across, down, lanes)
        total = 0.0
        for k in range(height):
            total += across[k]
        if not np.isfinite(total):
            finite = np.empty(own.size, np.float32)
            for k in range(own.size):
                finite[k] = own[k] if np.isfinite(own[k]) else np.float32(0.0)
            down[:] = 0.0
            _sums(finite, across, down, lanes)
            total = 0.0
            for k in range(height):
                total += across[k]
        mean = total / np.float64(height * width)
        for k in range(height):
            rows[i + k] = np.float32(max(across[k] / np.float64(width), 0.0))
        for k in range(width):
            down_mean = down[k] / np.float64(height)
            columns[j + k] = np.float32(max(down_mean / mean if mean > 0.0 else down_mean, 0.0))
        at, i, j = at + height * width, i + height, j + width


@njit_in_place
def _symbols(
    x: Any, keys: Any, rows: Any, columns: Any, shapes: Any, start: int, cell: int, lookup: Any, centers: Any,
    previous: Any, estimates: Any, estimate_keys: Any, ratios: Any, patterns: Any, places: Any, out: Any, sums: Any,
    counts: Any,
) -> None:  # fmt: skip
    """Symbols and sums of one matrix after another, of the first from element `start` on."""
    at = i = j = 0
    for m in range(shapes.shape[0]):
        height, width = shapes[m, 0], shapes[m, 1]
        end = min(at + height * width - start, x.size)
        old = previous[at:end] if previous.size else previous
        _symbols_of(
            x[at:end], keys[at:end], rows[i : i + height], columns[j : j + width], start, cell, lookup, centers, old,
            estimates, estimate_keys, ratios, patterns, places, out[at:end], sums, counts,
        )  # fmt: skip
        at, i, j, start = end, i + height, j + width, 0


@njit_in_place
def _values(
    symbols: Any, rows: Any, columns: Any, shapes: Any, start: int, table: Any, estimates: Any, out: Any
) -> None:
    """Values of one matrix after another, of the first from element `start` on."""
    at = i = j = 0
    for m in range(shapes.shape[0]):
        height, width = shapes[m, 0], shapes[m, 1]
        end = min(at + height * width - start, symbols.size)
        _values_of(symbols[at:end], rows[i : i + height], columns[j : j + width], start, table, estimates, out[at:end])
        at, i, j, start = end, i + height, j + width, 0


def factors_many(x: Array, shapes: Shapes) -> tuple[Factors, Factors]:
    """See `shrinkpoint.kernels.scales`."""
    rows, columns = (np.empty(int(shapes[:, k].sum()), np.float32) for k in range(2))
    _factors(to_numpy(x), shapes, rows, columns, np.empty(_LANES))
    return rows, columns


def residual_symbols(
    x: Array, rows: Factors, columns: Factors, shapes: Shapes, start: int, eighths: int, previous: Array | None
) -> tuple[Array, Any, Any]:
    """See `shrinkpoint.kernels.scales`."""
    values = to_numpy(x)
    out = np.empty(values.size, np.uint8)
    sums, counts = np.zeros((256, 4)), np.zeros((256, 4), np.int64)
    estimates, ratios = np.empty(_STEP, np.float32), np.empty(_STEP, np.float32)
    old = np.empty(0, np.uint8) if previous is None else to_numpy(previous)
    if values.size:
        _symbols(
            values, values.view(np.uint32), rows, columns, shapes, start, eighths << 20, _lookup(eighths),
            cell_centers(eighths), old, estimates, estimates.view(np.uint32), ratios, ratios.view(np.uint32),
            np.empty(_STEP, np.int32), out, sums.reshape(-1), counts.reshape(-1),
        )  # fmt: skip
    return like(out, x), sums.sum(axis=1), counts.sum(axis=1).astype(np.float64)


def residual_values(
    symbols: Array, rows: Factors, columns: Factors, shapes: Shapes, start: int, table: Factors
) -> Array:
    """See `shrinkpoint.kernels.scales`."""
    own = to_numpy(symbols)
    out = np.empty(own.size, np.float32)
    if own.size:
        _values(own, rows, columns, shapes, start, table, np.empty(_STEP, np.float32), out)
    return like(out, symbols)
