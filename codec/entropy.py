"""Symbols (one byte each) to bytes: the smallest of several coders, named by the first byte.

    0 constant     the value
    1 packed       width in bits, then the symbols bit-packed
    2 huffman      code lengths, then the code
    3 published    run lengths > 1 told apart from values by sign, Huffman on top (Inshrinkerator, section 6)
    4 rans         symbol frequencies, then one static rANS stream
    5 conditional  joint frequencies, then a rANS stream conditioned on the context
    6 rearranged   cyclic differences (context - symbol) mod B, one group per context, each by a method from 0 to 4
    7 unchanged    every symbol equals its context
    8 zstandard    a zstandard frame
    9 stored       the symbols themselves
    10 rare        where symbols differ from their context, and what they are
    11 exceptions  the most frequent symbol, then where others stand, and which
    12 places      classes of rows and columns, then as conditional: the class of a place is (part of) the context
    13 products    factors of rows and columns, then as places: what they predict for a place is the other context

The context is known to both sides (the level in the parent checkpoint). docs/format.md has the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import zstandard

from ..kernels.bitpack import pack_bits, unpack_bits
from ..kernels.huffman import huffman_decode, huffman_encode, huffman_lengths, pack_lengths, unpack_lengths
from ..kernels.levels import delta, joint_counts, merge_by_level, split_by_level, undelta
from ..kernels.products import MOST_RANK
from ..kernels.rans import (
    coding_cost,
    entropy_bits,
    pack_frequencies,
    rans_decode,
    rans_encode,
    rans_frequencies,
    unpack_frequencies,
)
from ..kernels.rare import rare_decode, rare_encode
from ..kernels.runlength import rle_decode, rle_encode
from .errors import CorruptDataError
from .fields import Reader, Writer
from .lowrank import CLASSES, Factors, expected, factors_of, signed
from .places import Places, classes_of

U8 = np.ndarray[Any, np.dtype[np.uint8]]
I64 = np.ndarray[Any, np.dtype[np.int64]]

CONSTANT, PACKED, HUFFMAN, PUBLISHED, RANS, CONDITIONAL, REARRANGED, UNCHANGED, ZSTANDARD, STORED = range(10)
RARE, EXCEPTIONS, PLACES, PRODUCTS = 10, 11, 12, 13
PRECISIONS = (10, 12, 15)
"""Bits of a frequency: the fewest only where a table would else have more slots than there are symbols to decode."""
_STATES = 16
_SHORT, _MODEST = 2048, 4096
_BINCOUNT = 1 << 12
_HIGH_ENTROPY = 2.5
"""Bits a symbol above which Huffman comes within half a percent of the entropy often enough to be tried."""
_SLACK = 1.005
FEW = 1024
"""Changes that are coded one by one at most: each takes some hundred nanoseconds, and of more a table says enough."""
SAMPLE, PARTS = 1 << 14, 64
"""Elements of an array that are looked at to choose how to code it, in so many stretches."""
_A_TIE = 0.5
"""Bytes by which a finer table must be cheaper: what is chosen must not depend on the last digits of a logarithm."""
_MANY = 4 * SAMPLE
_WORTH_PLACES = 512
"""Bytes below which classes of places are not tried."""
_BESIDE_PRODUCTS = 8
"""Classes of places at most beside what products predict, which has said much of it: more gain nothing."""
_SIGN = np.uint8(128)
"""What makes a signed byte an unsigned one in the same order, and back."""
_NOISE = 8 / _SLACK
"""Bits a symbol from which storing is as good."""


def counts_of(symbols: U8) -> I64:
    """How often each of the 256 symbols occurs."""
    if symbols.size < _BINCOUNT:
        return np.bincount(symbols, minlength=256)
    counts: I64 = joint_counts(np.zeros(symbols.size, np.uint8), symbols, 2, 256)[0]
    return counts


def encode(symbols: U8, counts: I64 | None = None, columns: int = 0, start: int = 0, *, numbers: bool = False) -> bytes:
    """Code symbols without a context, by whichever coder is smallest.

    Args:
        symbols: uint8, shape (n,); n is not stored.
        counts: int64 [256], how often each occurs, where that is known.
        columns: of the matrix that the symbols are a part of in C order; 0 (default): of none.
        start: number of the first symbol in it; default 0.
        numbers: symbols 1, 2, 3, ... stand for 0, -1, 1, ..., which products may predict; default False.
    """
    if counts is None and not columns:
        return coded(symbols).done()
    return _encode_plain(symbols, counts_of(symbols) if counts is None else counts, columns, start, numbers).done()


def coded(symbols: U8) -> Writer:
    """What `encode` writes, symbols that are stored as they are not yet copied: they must not change before it is.

    Where a sample of many symbols is noise, they are not counted.
    """
    if symbols.size >= _MANY and sampled_bits(np.bincount(sample(symbols.size)(symbols))) >= _NOISE * SAMPLE:
        out = Writer()
        out.byte(STORED)
        out.raw(symbols)
        return out
    return _encode_plain(symbols, counts_of(symbols))


def sample(n: int) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """What takes the same small share of every array of n elements: short stretches all over it."""
    if n <= SAMPLE:
        return lambda x: x
    length = SAMPLE // PARTS
    starts = np.linspace(0, n - length, PARTS).astype(np.int64)
    return lambda x: np.concatenate([x[i : i + length] for i in starts])


def _encode_plain(symbols: U8, counts: I64, columns: int = 0, start: int = 0, numbers: bool = False) -> Writer:
    out = Writer()
    n = symbols.size
    present = counts.nonzero()[0]
    if present.size <= 1:
        out.byte(CONSTANT)
        out.byte(int(present[0]) if present.size else 0)
        return out
    width = int(present[-1]).bit_length()
    sizes = {STORED: float(n), PACKED: 1 + np.ceil(n * width / 8)}
    least = min(sizes.values())
    # What no table can win is not tried: noise (mantissas), and streams so short that a table costs more than it saves.
    bits = entropy_bits(counts)
    if _SLACK * (bits / 8 + _least_table(present)) < least:
        if n < _MODEST or bits > _HIGH_ENTROPY * n:
            lengths = huffman_lengths(counts)
            packed_lengths = pack_lengths(lengths)
            sizes[HUFFMAN] = len(packed_lengths) + 8 + float((counts * lengths).sum()) / 8
        if n >= _SHORT:
            model = _Model.best(counts[None, :])
            sizes[RANS] = model.cost
    peak = int(counts.argmax())
    if n - int(counts[peak]) <= min(FEW, n // 2) and _SLACK * (bits / 8 + 2) < min(sizes.values()):
        exceptions = rare_encode(symbols, np.full(n, peak, np.uint8))
        sizes[EXCEPTIONS] = 1.0 + exceptions.size
    # Within half a percent the faster coder is taken: stored, packed, huffman, rans, exceptions.
    order = (STORED, PACKED, HUFFMAN, RANS, EXCEPTIONS)
    least = min(sizes.values())
    method = next(m for m in order if m in sizes and sizes[m] <= _SLACK * least)
    if columns:
        placed = _by_product(symbols, columns, start, least) if numbers else None
        if placed is None:
            placed = _by_place(symbols, None, counts[None, :], columns, start, least)
        if placed is not None:
            return placed
    out.byte(method)
    if method == STORED:
        out.raw(symbols)
    elif method == PACKED:
        out.byte(width)
        out.raw(pack_bits(symbols, width))
    elif method == HUFFMAN:
        out.block(packed_lengths)
        out.raw(huffman_encode(symbols, lengths))
    elif method == RANS:
        model.write(out, symbols, None)
    else:
        out.byte(peak)
        out.raw(exceptions)
    return out


def _least_table(present: I64) -> float:
    """Bytes that a table of these symbols hardly ever stays below: its frame, which of them there are, by runs, and a
    bit and a half of each. Without it few symbols of noise look as if a table could spare something."""
    runs = 1 + np.count_nonzero(present[1:] - present[:-1] > 1)
    return 8 + (1.5 * int(present.size) + 2.0 * int(runs)) / 8


def _least_of_contexts(counts: I64) -> float:
    """The same of a table with a row a context. Of each frequency that is not the greatest of its row three bits, and
    three more where no symbol occurs twice, so that nothing says which do: of 148,137 tables of drawn symbols seven
    stayed more than 9 % below it, one 15 %."""
    cells = np.count_nonzero(counts)
    return (3 + 3 * cells / int(counts.sum())) * (cells - np.count_nonzero(counts.any(axis=1))) / 8


def sampled_bits(counts: I64) -> float:
    """`entropy_bits` of a sample, corrected for what a sample's entropy lacks on average.

    Source: Miller 1955, Note on the bias of information estimates.
    """
    rows = np.count_nonzero(counts.sum(axis=-1))
    return entropy_bits(counts) + (np.count_nonzero(counts) - int(rows)) / math.log(4)


class _Model:
    """A table of frequencies and what coding with it costs, in bytes; no context beyond those of `counts` occurs."""

    def __init__(self, counts: I64, precision: int, contexts: int) -> None:
        self.precision = precision
        self.symbols = int(np.flatnonzero(counts.any(axis=0))[-1]) + 1 if counts.any() else 1
        self.frequencies = rans_frequencies(counts[:, : self.symbols], precision)
        rest = np.zeros((contexts - counts.shape[0], self.symbols), self.frequencies.dtype)
        self.table = pack_frequencies(
            np.concatenate((self.frequencies, rest)) if rest.size else self.frequencies, precision
        )
        self.cost = (
            coding_cost(counts[:, : self.symbols], self.frequencies, precision) / 8 + len(self.table) + _STATES + 4
        )

    @staticmethod
    def best(counts: I64, slack: float = 1.0, contexts: int = 1) -> _Model:
        """The cheapest of the precisions on offer; a coarser one, which is decoded faster, where it costs `slack`."""
        first = 0 if int(counts.sum()) < counts.shape[0] << PRECISIONS[1] else 1
        found = _Model(counts, PRECISIONS[first], contexts)
        bound = entropy_bits(counts) / 8 + _STATES
        for precision in PRECISIONS[first + 1 :]:
            # A finer table is no shorter, and no table beats the entropy.
            modest = found.cost < _MODEST and found.precision > PRECISIONS[0]
            if modest or found.cost <= slack * (bound + len(found.table)):
                break
            if contexts << precision > most_slots(int(counts.sum())):
                break
            finer = _Model(counts, precision, contexts)
            # Where both tables say the same, their costs are equal but for how this machine rounds logarithms.
            if found.cost <= slack * finer.cost + _A_TIE:
                break
            found = finer
        return found

    def write(self, out: Writer, symbols: U8, contexts: U8 | None) -> None:
        out.byte(self.precision)
        out.varint(self.symbols)
        out.block(self.table)
        out.raw(rans_encode(symbols, contexts, self.frequencies, self.precision))


def most_slots(n: int) -> int:
    """Slots that the decoding tables of n symbols may have: what they take to lay out is within what n symbols take."""
    return (1 << 20) + 128 * n


def rans_bytes(counts: I64) -> float:
    """Bytes of a stream with these pair counts, int64 [contexts, symbols], and of its table."""
    return _Model.best(counts, contexts=counts.shape[0]).cost


def _read_rans(data: Reader, contexts: U8 | None, n_contexts: int, n: int) -> U8:
    precision = data.byte()
    symbols = data.varint()
    if precision not in range(8, 17) or not 1 <= symbols <= 256 or n_contexts << precision > most_slots(n):
        raise CorruptDataError(
            f"rANS: precision {precision} or {symbols} symbols out of range for {n_contexts} contexts"
        )
    table = unpack_frequencies(_array(data.block()), n_contexts, symbols, precision)
    decoded: U8 = rans_decode(_array(data.rest()), contexts, table, precision, n)
    return decoded


def _array(data: memoryview) -> U8:
    return np.frombuffer(data, np.uint8)


def _in_classes(head: Writer, symbols: U8, contexts: U8, rows: int, size: float) -> Writer | None:
    """Symbols in contexts below `rows`, which the head says; None where that is not smaller than `size` bytes by half
    a percent."""
    rest = size / _SLACK - len(head)
    pairs = joint_counts(contexts, symbols, rows, max(2, int(symbols.max()) + 1))
    if entropy_bits(pairs) / 8 + _STATES + 4 + _least_of_contexts(pairs) >= rest:
        return None
    model = _Model.best(pairs, _SLACK, rows)
    if model.cost >= rest:
        return None
    model.write(head, symbols, contexts)
    return head


def _by_place(symbols: U8, context: U8 | None, counts: I64, columns: int, start: int, size: float) -> Writer | None:
    """Symbols in the context of the class of their place, beside another one; None where that is not smaller.

    Args:
        symbols: uint8, shape (n,).
        context: uint8, shape (n,), values below `counts.shape[0]`, or None.
        counts: int64 [contexts, symbols], of the pairs.
        columns: of the matrix that the symbols are a part of.
        start: number of the first one in it.
        size: bytes that they take otherwise.
    """
    if size < _WORTH_PLACES:
        return None
    contexts = counts.shape[0]
    places = classes_of(symbols, int(counts[0].argmax()) if context is None else context, columns, start, contexts)
    if places is None:
        return None
    head = Writer()
    head.byte(PLACES)
    for number in (columns, places.phase, contexts):
        head.varint(number)
    _write_classes(head, places)
    if len(head) >= size / 2:
        return None
    return _in_classes(head, symbols, places.beside(context, symbols.size), contexts * places.classes, size)


def _by_product(symbols: U8, columns: int, start: int, size: float) -> Writer | None:
    """Symbols that stand for signed numbers in the context of what products predict, and of their place's class.

    Arguments as `_by_place`.
    """
    if size < _WORTH_PLACES:
        return None
    factors = factors_of(symbols, columns, start)
    if factors is None:
        return None
    head = Writer()
    head.byte(PRODUCTS)
    for number in (columns, factors.phase, factors.rows.shape[1], factors.shift):
        head.varint(number)
    for factor in (factors.rows, factors.columns):
        head.block(encode(factor.T.reshape(-1).view(np.uint8) ^ _SIGN))
    contexts = factors.classes(symbols.size)
    numbers, origins = (x.view(np.uint8) ^ _SIGN for x in (signed(symbols), expected(contexts)))
    places = classes_of(numbers, origins, columns, start, CLASSES, _BESIDE_PRODUCTS)
    _write_classes(head, places)
    if len(head) >= size / 2:
        return None
    return _in_classes(head, symbols, *_with_classes(contexts, CLASSES, places), size)


def _with_classes(predicted: U8, contexts: int, places: Places | None) -> tuple[U8, int]:
    """Contexts together with the classes of their places, where there are any; and how many that makes."""
    if places is None:
        return predicted, contexts
    return places.beside(predicted, predicted.size), contexts * places.classes


def _write_classes(out: Writer, places: Places | None) -> None:
    if places is None:
        out.varint(1)
        return
    out.varint(places.classes)
    out.varint(places.base)
    out.block(encode(places.rows))
    out.block(encode(places.columns))


def _read_place(data: Reader, n: int) -> tuple[int, int, int]:
    """Columns, column of the first symbol, rows."""
    columns, phase = data.varint(), data.varint()
    if not 1 <= columns <= n or phase >= columns:
        raise CorruptDataError(f"places: {n} symbols in {columns} columns from {phase}")
    return columns, phase, -(-(phase + n) // columns)


def _lines(data: memoryview, n: int) -> U8:
    """A byte for each row, or column; not coded by places itself, or hostile bytes nest as deep as they are long."""
    if not {*data[:1]}.isdisjoint((PLACES, PRODUCTS)):
        raise CorruptDataError("places: what rows and columns have is itself coded by places")
    return decode(data, n)


def _read_classes(data: Reader, columns: int, phase: int, rows: int, contexts: int) -> Places | None:
    """The classes of rows and columns, which may stand beside so many contexts; None for one class."""
    classes = data.varint()
    if not 1 <= classes <= 256 // contexts:
        raise CorruptDataError(f"places: {contexts} contexts with {classes} classes each are out of range")
    if classes == 1:
        return None
    base = data.varint()
    if base > 255:
        raise CorruptDataError(f"places: classes from {base} are out of range")
    return Places(_lines(data.block(), rows), _lines(data.block(), columns), phase, base, classes)


def _decode_places(data: Reader, n: int, context: U8 | None) -> U8:
    columns, phase, rows = _read_place(data, n)
    contexts = data.varint()
    if not 1 <= contexts <= 256:
        raise CorruptDataError(f"places: {contexts} contexts are out of range")
    if contexts == 1:
        context = None
    elif context is None or int(context.max(initial=0)) >= contexts:
        raise CorruptDataError(f"places: {contexts} contexts are not those of a parent")
    places = _read_classes(data, columns, phase, rows, contexts)
    if places is None:
        raise CorruptDataError("places: a single class")
    return _read_rans(data, places.beside(context, n), contexts * places.classes, n)


def _decode_products(data: Reader, n: int) -> U8:
    columns, phase, rows = _read_place(data, n)
    rank, shift = data.varint(), data.varint()
    if not 1 <= rank <= min(MOST_RANK, columns // 4, n // columns // 4) or not 1 <= shift <= 20:
        raise CorruptDataError(f"products: rank {rank} or shift {shift} is out of range for {rows} x {columns}")
    left, right = (
        (_lines(data.block(), rank * lines) ^ _SIGN).view(np.int8).reshape(rank, lines).T for lines in (rows, columns)
    )
    contexts: U8 = Factors(left, right, phase, shift).classes(n)
    places = _read_classes(data, columns, phase, rows, CLASSES)
    return _read_rans(data, *_with_classes(contexts, CLASSES, places), n)


def encode_published(symbols: U8) -> bytes:
    """Run lengths above one and Huffman, as published; constant where there is one symbol, huffman for bases."""
    if symbols.size == 0 or (symbols == symbols[0]).all():
        return bytes([CONSTANT, int(symbols[0]) if symbols.size else 0])
    tokens = rle_encode(symbols)
    alphabet, dense, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    lengths = huffman_lengths(counts.astype(np.int64), limit=24)
    out = Writer()
    out.byte(PUBLISHED)
    out.varint(tokens.size)
    out.varint(alphabet.size)
    # The alphabet ascends: first the values, negated, then the run lengths.
    out.varint(int(-alphabet[0]))
    for step in np.diff(alphabet):
        out.varint(int(step))
    out.block(pack_lengths(lengths))
    out.raw(huffman_encode(dense.astype(np.uint16), lengths))
    return out.done()


def _decode_published(data: Reader, n: int) -> U8:
    count, size = data.varint(), data.varint()
    if not 1 <= size <= min(count, 1 << 16) or not count <= 2 * n:
        raise CorruptDataError(f"run lengths: {count} tokens, {size} of them different, for {n} values")
    alphabet = np.empty(size, np.int64)
    value = -data.varint()
    for i in range(size):
        value += data.varint() if i else 0
        if not -255 <= value <= n:
            raise CorruptDataError("run lengths: a token is out of range")
        alphabet[i] = value
    lengths = unpack_lengths(_array(data.block()), size)
    dense = huffman_decode(_array(data.rest()), lengths, count, dtype="uint16")
    decoded: U8 = rle_decode(alphabet[dense].astype(np.int32), n)
    return decoded


def encode_levels(
    levels: U8, size: int, parent: U8 | None, parent_size: int, coder: str, columns: int = 0, start: int = 0
) -> bytes:
    """Code levels, as a delta against the parent's levels where there are any.

    Args:
        levels: uint8, shape (n,), values below `size`.
        size: number of levels, 2 to 256.
        parent: the parent's levels of the same elements, or None for a base.
        parent_size: number of levels of the parent.
        coder: "smallest", "fast" (up to half a percent larger where that decodes faster), or "published"
            (Inshrinkerator: Huffman for a base, one group per parent level with run lengths and Huffman for a delta).
        columns: of the matrix that the levels are a part of in C order; 0 (default): of none.
        start: number of the first level in it; default 0.
    """
    if coder == "published":
        return encode_huffman(levels) if parent is None else encode_rearranged(levels, size, parent, parent_size)
    if parent is None:
        return encode(levels, None, columns, start)
    return in_context(levels, parent, parent_size, _SLACK if coder == "fast" else 1.0, columns, start)[0].done()


def in_context(
    symbols: U8, context: U8, contexts: int, slack: float = _SLACK, columns: int = 0, start: int = 0
) -> tuple[Writer, float]:
    """Code symbols in a context that both sides know, or without it where that is no larger.

    Args:
        symbols: uint8, shape (n,).
        context: uint8, shape (n,), values below `contexts`.
        contexts: 2 to 256.
        slack: by how much larger it may be where that decodes faster.
        columns: of the matrix that the symbols are a part of in C order; 0 (default): of none.
        start: number of the first symbol in it; default 0.

    Returns:
        What was written, and the bits that the symbols' own entropy would take, without the context.
    """
    counts = joint_counts(context, symbols, *(max(2, int(a.max(initial=0)) + 1) for a in (context, symbols)))
    total = np.zeros(256, np.int64)
    total[: counts.shape[1]] = counts.sum(axis=0)
    alone = entropy_bits(total)
    out = Writer()
    changes = symbols.size - int(np.trace(counts))
    if changes == 0:
        out.byte(UNCHANGED)
        return out, alone
    rare = rare_encode(symbols, context) if changes <= min(FEW, symbols.size // 2) else None
    cost, model, plain = math.inf if rare is None else float(rare.size), None, None
    # What a stream with a table takes at least: none is made that loses to the symbols without their context.
    least = entropy_bits(counts) / 8 + _STATES + 4 + _least_of_contexts(counts)
    if slack * least < cost:
        if _plain_may_win(total, alone, least):
            plain = _encode_plain(symbols, total)
        if plain is None or len(plain) > least + 1:
            model = _Model.best(counts, slack, contexts)
            if rare is not None and slack * model.cost >= rare.size:
                model = None
            else:
                cost = model.cost
    if plain is None and _plain_may_win(total, alone, cost):
        plain = _encode_plain(symbols, total)
    if columns:
        placed = _by_place(symbols, context, counts, columns, start, cost if plain is None else min(cost, len(plain)))
        if placed is not None:
            return placed, alone
    if plain is not None and len(plain) <= cost + 1:
        return plain, alone
    if model is not None:
        out.byte(CONDITIONAL)
        model.write(out, symbols, context)
    elif rare is not None:
        out.byte(RARE)
        out.raw(rare)
    return out, alone


def _plain_may_win(counts: I64, bits: float, cost: float) -> bool:
    """Whether symbols with these counts, of this entropy, may take no more without their context than `cost` bytes."""
    n = int(counts.sum())
    if n - int(counts.max()) <= min(FEW, n // 2):
        return bits / 8 + 2 < cost
    # Its entropy and a table are the least it takes: where that is more, none need be made.
    return bits / 8 + _least_table(np.flatnonzero(counts)) < cost and _Model.best(counts[None, :]).cost <= cost


def encode_huffman(symbols: U8) -> bytes:
    """Huffman alone, as the published system codes a base."""
    counts = counts_of(symbols)
    if np.count_nonzero(counts) <= 1:
        return _encode_plain(symbols, counts).done()
    lengths = huffman_lengths(counts)
    out = Writer()
    out.byte(HUFFMAN)
    out.block(pack_lengths(lengths))
    out.raw(huffman_encode(symbols, lengths))
    return out.done()


def encode_rearranged(levels: U8, size: int, parent: U8, parent_size: int) -> bytes:
    """The published delta: cyclic difference, split by the parent's level, each group by run lengths and Huffman."""
    buffer = max(size, parent_size)
    grouped, counts = split_by_level(delta(parent, levels, buffer), parent, parent_size)
    out = Writer()
    out.byte(REARRANGED)
    out.varint(buffer)
    start = 0
    for count in counts:
        if count:
            out.block(encode_published(grouped[start : start + int(count)]))
        start += int(count)
    return out.done()


def decode(data: memoryview, n: int, context: U8 | None = None, contexts: int = 0) -> U8:
    """Decode n symbols; the inverse of every encoder of this module.

    Args:
        data: what an encoder wrote.
        n: number of symbols.
        context: uint8, shape (n,), values below `contexts`; None where the encoder had none.

    Raises:
        CorruptDataError: the bytes are not such a stream.
    """
    reader = Reader(data, "symbols")
    method = reader.byte()
    if method == PLACES:
        symbols = _decode_places(reader, n, context)
    elif method in _IN_CONTEXT:
        if context is None:
            raise CorruptDataError(f"symbols: method {method} needs a parent")
        symbols = _IN_CONTEXT[method](reader, n, context, contexts)
    elif method in _PLAIN:
        symbols = _PLAIN[method](reader, n)
    else:
        raise CorruptDataError(f"symbols: method {method} is unknown")
    reader.end()
    if symbols.size != n:
        raise CorruptDataError(f"symbols: {symbols.size} decoded, {n} expected")
    return symbols


def _decode_constant(data: Reader, n: int) -> U8:
    return np.full(n, data.byte(), np.uint8)


def _decode_packed(data: Reader, n: int) -> U8:
    width = data.byte()
    if width > 8:
        raise CorruptDataError(f"packed: a width of {width} bits")
    symbols: U8 = unpack_bits(_array(data.rest()), width, n)
    return symbols


def _decode_huffman(data: Reader, n: int) -> U8:
    lengths = unpack_lengths(_array(data.block()), 256)
    symbols: U8 = huffman_decode(_array(data.rest()), lengths, n)
    return symbols


def _decode_zstandard(data: Reader, n: int) -> U8:
    frame = data.rest()
    try:
        if zstandard.get_frame_parameters(frame).content_size != n:
            raise CorruptDataError(f"zstandard: the frame does not hold {n} bytes")
        plain = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(
            frame, max_output_size=n, allow_extra_data=False
        )
    except zstandard.ZstdError as e:
        raise CorruptDataError(f"zstandard: {e}") from None
    return np.frombuffer(plain, np.uint8)


def _decode_exceptions(data: Reader, n: int) -> U8:
    peak = data.byte()
    symbols: U8 = rare_decode(_array(data.rest()), np.full(n, peak, np.uint8))
    return symbols


def _decode_rare(data: Reader, n: int, context: U8, _contexts: int) -> U8:
    symbols: U8 = rare_decode(_array(data.rest()), context)
    return symbols


def _decode_rearranged(data: Reader, n: int, context: U8, contexts: int) -> U8:
    buffer = data.varint()
    if not 2 <= buffer <= 256 or buffer < contexts:
        raise CorruptDataError(f"rearranged: a cyclic buffer of {buffer} levels")
    counts = joint_counts(context, context, contexts, contexts).diagonal()
    groups = [decode(data.block(), int(c)) for c in counts if c]
    grouped = np.concatenate(groups) if groups else np.empty(0, np.uint8)
    if grouped.size and int(grouped.max()) >= buffer:
        raise CorruptDataError(f"rearranged: a difference is beyond the cyclic buffer of {buffer}")
    levels: U8 = undelta(context, merge_by_level(grouped, context, contexts), buffer)
    return levels


_PLAIN: dict[int, Callable[[Reader, int], U8]] = {
    CONSTANT: _decode_constant,
    PACKED: _decode_packed,
    HUFFMAN: _decode_huffman,
    PUBLISHED: _decode_published,
    RANS: lambda data, n: _read_rans(data, None, 1, n),
    ZSTANDARD: _decode_zstandard,
    STORED: lambda data, n: _array(data.raw(n)),
    EXCEPTIONS: _decode_exceptions,
    PRODUCTS: _decode_products,
}
_IN_CONTEXT: dict[int, Callable[[Reader, int, U8, int], U8]] = {
    CONDITIONAL: lambda data, n, context, contexts: _read_rans(data, context, contexts, n),
    REARRANGED: _decode_rearranged,
    UNCHANGED: lambda _data, _n, context, _contexts: context,
    RARE: _decode_rare,
}
