"""Oracle of the asymmetric numeral systems: the textbook formulas on Python's integers."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from array_api_compat import array_namespace

from ..backend.arrays import as_list, from_list
from ..errors import BadArgumentError, CorruptDataError
from ..tables import reference as tables
from . import START, STATES, WIDE_START, WIDE_STATES, short_digits

if TYPE_CHECKING:
    from ..backend.arrays import Array

    Model = list[tuple[list[int], list[int]]]


def rans_frequencies(counts: Array, precision: int, *, exact: bool = False) -> Array:
    """See `shrinkpoint.kernels.rans.rans_frequencies`."""
    rows = _rows(counts)
    if any(not 0 <= c <= 2**48 for row in rows for c in row):
        raise BadArgumentError("counts holds one that is not in 0 ... 2**48")
    best = [_best(row, 2**precision) for row in rows]
    if not exact:
        others = sum(sum(row) - max(row) for row in rows)
        present = sum(sum(c > 0 for c in row) - (max(row) > 0) for row in rows)
        for digits in range(short_digits(others, present), precision):
            shortened = [_shorten(row, digits, 2**precision) for row in best]
            if all(shortened):
                best = shortened
                break
    xp = array_namespace(counts)
    return xp.reshape(from_list([f for row in best for f in row], "uint32", counts), tuple(counts.shape))


def _best(counts: list[int], total: int) -> list[int]:
    """Frequencies by giving one unit at a time to the symbol that gains most."""
    out = [int(c > 0) for c in counts]
    queue = [(-c / math.sqrt(2.0), s) for s, c in enumerate(counts) if c > 0]
    heapq.heapify(queue)
    while queue and sum(out) < total:
        for _ in range(total - sum(out)):
            _, s = queue[0]
            out[s] += 1
            f = float(out[s])
            heapq.heapreplace(queue, (-counts[s] / math.sqrt(f * (f + 1.0)), s))
    return out


def _shorten(row: list[int], digits: int, total: int) -> list[int]:
    """Round all frequencies of the row but the greatest; empty if that is impossible.

    To `digits` significant bits, halves up.
    """
    if not any(row):
        return row
    peak = row.index(max(row))
    out = []
    for f in row:
        drop = max(f.bit_length() - digits, 0)
        out.append((2 * f + (1 << drop)) >> (drop + 1) << drop)
    out[peak] = 0
    out[peak] = total - sum(out)
    return out if out[peak] > 0 and out.index(max(out)) == peak else []


def _rows(table: Array) -> list[list[int]]:
    return [as_list(table[c, :]) for c in range(table.shape[0])]


def _starts(row: list[int]) -> list[int]:
    """First slot of each symbol: the greatest frequency first, then the others in order."""
    peak = row.index(max(row))
    starts = [0] * len(row)
    at = row[peak]
    for s, f in enumerate(row):
        if s != peak:
            starts[s] = at
            at += f
    return starts


def _model(frequencies: Array, precision: int) -> list[tuple[list[int], list[int]]]:
    rows = _rows(frequencies)
    if any(sum(row) not in (0, 2**precision) for row in rows):
        raise BadArgumentError(f"a row of frequencies sums to neither 0 nor {2**precision}")
    return [(row, _starts(row)) for row in rows]


def _contexts(contexts: Array | None, n: int, rows: int) -> list[int]:
    found = [0] * n if contexts is None else as_list(contexts)
    if any(c >= rows for c in found):
        raise BadArgumentError(f"contexts holds one of {rows} or more")
    return found


@dataclass(frozen=True)
class _Form:
    """Number of states and their value at the start, and in which order their words stand.

    A stream with four states has the words of one symbol after another from the front; a wide one has those of a row of
    16 symbols together, from the end.
    """

    states: int
    start: int
    row: int
    from_end: bool

    def rows(self, n: int) -> list[range]:
        """Return the numbers of the symbols of each row."""
        return [range(first, min(first + self.row, n)) for first in range(0, n, self.row)]


_FORMS = {STATES: _Form(STATES, START, 1, False), WIDE_STATES: _Form(WIDE_STATES, WIDE_START, 16, True)}


def rans_encode(
    symbols: Array, contexts: Array | None, frequencies: Array, precision: int, lanes: int = STATES
) -> Array:
    """See `shrinkpoint.kernels.rans.rans_encode`."""
    form, model = _FORMS[lanes], _model(frequencies, precision)
    s = as_list(symbols)
    contexts_ = _contexts(contexts, len(s), len(model))
    if any(v >= len(model[c][0]) or model[c][0][v] == 0 for c, v in zip(contexts_, s, strict=True)):
        raise BadArgumentError("symbols holds one whose frequency in its context is zero")
    states = [form.start] * form.states
    words = []
    for row in reversed(form.rows(len(s))):
        for i in row:
            frequency, starts = model[contexts_[i]]
            x, f = states[i % form.states], frequency[s[i]]
            if x >= (form.start << 16 >> precision) * f:
                words.append(x & 0xFFFF)
                x >>= 16
            states[i % form.states] = ((x // f) << precision) + x % f + starts[s[i]]
    if lanes == STATES and not words and states == [START] * STATES:
        return from_list([], "uint8", symbols)
    data = [byte for x in states for byte in x.to_bytes(4, "little")]
    data += [byte for w in (words if form.from_end else reversed(words)) for byte in w.to_bytes(2, "little")]
    return from_list(data, "uint8", symbols)


def _pop(x: int, row: list[int], starts: list[int], precision: int) -> tuple[int, int] | None:
    """Take the last symbol out of a state; return symbol and new state, None for damage."""
    slot = x % 2**precision
    s = next((s for s in range(len(row)) if starts[s] <= slot < starts[s] + row[s]), None)
    return None if s is None else (s, row[s] * (x >> precision) + slot - starts[s])


def rans_decode(
    data: Array, contexts: Array | None, frequencies: Array, precision: int, n: int, lanes: int = STATES
) -> Array:
    """See `shrinkpoint.kernels.rans.rans_decode`."""
    form, model = _FORMS[lanes], _model(frequencies, precision)
    contexts_ = _contexts(contexts, n, len(model))
    d, header = bytes(as_list(data)), 4 * lanes
    wrong = CorruptDataError(f"the bytes are not {n} rANS symbols of these frequencies")
    ends = [form.start] * form.states
    states = list(ends)
    if d or lanes != STATES:
        states = [int.from_bytes(d[k : k + 4], "little") for k in range(0, header, 4)]
        if len(d) < header or len(d) % 2 or min(states) < form.start or max(states) >= form.start << 16:
            raise wrong
        if lanes == STATES and len(d) == header and states == ends:
            raise wrong
    words = [int.from_bytes(d[k : k + 2], "little") for k in range(header, len(d), 2)]
    if not form.from_end:
        words.reverse()
    out = []
    for row in form.rows(n):
        short = []
        for i in row:
            popped = _pop(states[i % form.states], *model[contexts_[i]], precision)
            if popped is None:
                raise wrong
            symbol, states[i % form.states] = popped
            out.append(symbol)
            if states[i % form.states] < form.start:
                short.append(i % form.states)
        if len(short) > len(words):
            raise wrong
        for k in reversed(short):
            states[k] = states[k] << 16 | words.pop()
    if words or states != ends:
        raise wrong
    return from_list(out, "uint8", data)


def coding_cost(counts: Array, frequencies: Array, precision: int) -> float:
    """See `shrinkpoint.kernels.rans.coding_cost`."""
    pairs = [(c, f) for c, f in zip(as_list(counts), as_list(frequencies), strict=True) if c > 0]
    if any(f == 0 for _, f in pairs):
        return math.inf
    return math.fsum(c * (precision - math.log2(f)) for c, f in pairs)


def entropy_bits(counts: Array) -> float:
    """See `shrinkpoint.kernels.rans.entropy_bits`."""
    columns = int(counts.shape[-1])
    cells = as_list(counts)
    rows = [cells[i : i + columns] for i in range(0, len(cells), columns)] if columns else []
    return math.fsum(c * math.log2(sum(row) / c) for row in rows for c in row if c > 0)


def pack_frequencies(frequencies: Array, precision: int) -> bytes:
    """See `shrinkpoint.kernels.rans.pack_frequencies`."""
    return tables.pack_frequencies([row for row, _ in _model(frequencies, precision)], precision)


def unpack_frequencies(data: Array, rows: int, columns: int, precision: int) -> Array:
    """See `shrinkpoint.kernels.rans.unpack_frequencies`."""
    table = tables.unpack_frequencies(bytes(as_list(data)), rows, columns, precision)
    xp = array_namespace(data)
    return xp.reshape(from_list([f for row in table for f in row], "uint32", data), (rows, columns))
