"""Tables of frequencies: estimates of their cost, the cheapest table, and its rANS stream."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...kernels.backend.arrays import Array
from ...kernels.levels import joint_counts
from ...kernels.rans import (
    STATES,
    WIDE_PRECISION,
    WIDE_STATES,
    coding_cost,
    entropy_bits,
    pack_frequencies,
    rans_decode,
    rans_encode,
    rans_frequencies,
    unpack_frequencies,
)
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer

U8 = np.ndarray[Any, np.dtype[np.uint8]]
I64 = np.ndarray[Any, np.dtype[np.int64]]

SLACK = 1.005
"""Methods within half a percent of the smallest are chosen by decoding speed."""
PRECISIONS = (10, 12, 15)
"""Bits of a frequency; the fewest only if a table would otherwise have more slots than symbols to decode."""
STATE_BYTES = 4 * STATES
FRAME = STATE_BYTES + 4
"""Bytes of a stream with four states, without its table and its symbols."""
WIDE = 4 * (WIDE_STATES - STATES)
"""Bytes that a stream with 64 states takes more; it is coded three times as fast."""
_MODEST = 4096
_NEARLY = 1.05
"""A small stream that is so much larger than its entropy and table is not coded more finely."""
_BINCOUNT = 1 << 12
_A_TIE = 0.5
"""Bytes by which a finer table must be cheaper, so that no choice depends on the last digits of a logarithm."""


def array(data: memoryview) -> U8:
    """View bytes as symbols, without a copy."""
    return np.frombuffer(data, np.uint8)


def counts_of(symbols: U8) -> I64:
    """Count each of the 256 symbols."""
    if symbols.size < _BINCOUNT:
        return np.bincount(symbols, minlength=256)
    counts: I64 = joint_counts(np.zeros(symbols.size, np.uint8), symbols, 2, 256)[0]
    return counts


def least_table(present: I64) -> float:
    """Return an approximate lower bound of the bytes of a table of these symbols.

    It counts the frame, the runs of present symbols, and a bit and a half for each symbol. Without this bound a few
    symbols of noise look as if a table could save bytes.
    """
    runs = 1 + np.count_nonzero(present[1:] - present[:-1] > 1)
    return 8 + (1.5 * int(present.size) + 2.0 * int(runs)) / 8


def least_of_contexts(counts: I64) -> float:
    """Return an approximate lower bound of the bytes of a table with one row for each context.

    It counts three bits for each frequency that is not the greatest of its row, and up to three more the fewer symbols
    occur twice. Of 148,137 tables of random symbols seven were more than 9 % smaller, and one was 15 % smaller.
    """
    cells = np.count_nonzero(counts)
    return (3 + 3 * cells / int(counts.sum())) * (cells - np.count_nonzero(counts.any(axis=1))) / 8


def least_stream(counts: I64) -> float:
    """Return an approximate lower bound of the bytes of a stream and table with these counts."""
    return entropy_bits(counts) / 8 + FRAME + least_of_contexts(counts)


def sampled_bits(counts: I64) -> float:
    """Return the `entropy_bits` of a sample, corrected for the bias of small samples.

    Source: Miller 1955, Note on the bias of information estimates.
    """
    rows = np.count_nonzero(counts.sum(axis=-1))
    return entropy_bits(counts) + (np.count_nonzero(counts) - int(rows)) / math.log(4)


class Table:
    """Frequencies for all contexts of `counts`, and the cost of coding with them in bytes."""

    def __init__(self, counts: I64, precision: int, contexts: int) -> None:
        self.precision, self.states = precision, STATES
        self.symbols = int(np.flatnonzero(counts.any(axis=0))[-1]) + 1 if counts.any() else 1
        self.frequencies = rans_frequencies(counts[:, : self.symbols], precision)
        rest = np.zeros((contexts - counts.shape[0], self.symbols), self.frequencies.dtype)
        self.packed = pack_frequencies(
            np.concatenate((self.frequencies, rest)) if rest.size else self.frequencies, precision
        )
        self.cost = coding_cost(counts[:, : self.symbols], self.frequencies, precision) / 8 + len(self.packed) + FRAME

    @staticmethod
    def best(counts: I64, slack: float = 1.0, contexts: int = 1) -> Table:
        """Return the cheapest precision, or one with faster decoding if it costs little or `slack`."""
        first = 0 if int(counts.sum()) < counts.shape[0] << PRECISIONS[1] else 1
        found = Table(counts, PRECISIONS[first], contexts)
        bound = entropy_bits(counts) / 8 + STATE_BYTES
        fast = max(slack, SLACK)
        if found.precision == WIDE_PRECISION and found.cost + WIDE <= fast * (bound + len(found.packed)):
            return found.widened()
        wide = found if found.precision == WIDE_PRECISION else None
        for precision in PRECISIONS[first + 1 :]:
            # A finer table is not shorter, and no table beats the entropy.
            least = bound + len(found.packed)
            modest = found.cost < _MODEST and found.precision > PRECISIONS[0] and found.cost < _NEARLY * least
            if modest or found.cost <= slack * least:
                break
            if contexts << precision > most_slots(int(counts.sum())):
                break
            finer = Table(counts, precision, contexts)
            if precision == WIDE_PRECISION:
                wide = finer
            # Costs of equal tables may differ by the rounding of logarithms on this machine.
            if found.cost <= slack * finer.cost + _A_TIE:
                break
            found = finer
        return wide.widened() if wide is not None and wide.cost + WIDE <= fast * found.cost else found

    def widened(self) -> Table:
        """Switch to 64 states."""
        self.states = WIDE_STATES
        self.cost += WIDE
        return self

    def write_head(self, out: Writer) -> None:
        """Write the form of the stream and the table."""
        out.byte(self.precision if self.states == STATES else self.states)
        out.varint(self.symbols)
        out.block(self.packed)

    def write(self, out: Writer, symbols: U8, contexts: U8 | None) -> None:
        """Write the table, then the stream of symbols, uint8 (n,), in these contexts."""
        self.write_head(out)
        out.raw(rans_encode(symbols, contexts, self.frequencies, self.precision, states=self.states))


def most_slots(n: int) -> int:
    """Return the maximum number of slots of decoding tables for n symbols, to bound their cost."""
    return (1 << 20) + 128 * n


def rans_bytes(counts: I64) -> float:
    """Estimate the bytes of a stream with these pair counts, and of its table."""
    return Table.best(counts, contexts=counts.shape[0]).cost


def read_table(data: Reader, n_contexts: int, n: int) -> tuple[Array, int, int]:
    """Read the frequencies of a stream of n symbols, its precision and its number of states."""
    form = data.byte()
    states, precision = (WIDE_STATES, WIDE_PRECISION) if form == WIDE_STATES else (STATES, form)
    symbols = data.varint()
    if precision not in range(8, 17) or not 1 <= symbols <= 256 or n_contexts << precision > most_slots(n):
        raise CorruptDataError(
            f"rANS: precision {precision} or {symbols} symbols out of range for {n_contexts} contexts"
        )
    return unpack_frequencies(array(data.block()), n_contexts, symbols, precision), precision, states


def read_rans(data: Reader, contexts: U8 | None, n_contexts: int, n: int) -> U8:
    """Decode the symbols that `Table.write` coded, uint8 (n,)."""
    table, precision, states = read_table(data, n_contexts, n)
    decoded: U8 = rans_decode(array(data.rest()), contexts, table, precision, n, states=states)
    return decoded
