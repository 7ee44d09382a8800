"""Coding of symbols by the smallest of all coders, with or without a context, and decoding.

Source of symbols rearranged by context: Inshrinkerator, section 6.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from ...kernels.backend.arrays import Array, placed_with, to_host
from ...kernels.levels import delta, joint_counts, merge_by_level, split_by_level, undelta
from ...kernels.rans import entropy_bits
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from .matrices import ALONE, Matrix, Size, decode_matrix, in_matrix
from .plain import (
    CONDITIONAL,
    MATRIX,
    REARRANGED,
    UNCHANGED,
    coded,
    decode_plain,
    decoded,
    encode_huffman,
    encode_plain,
    encode_published,
    plain_decoder,
    smallest,
)
from .table import I64, SLACK, U8, Table, counts_of, least_stream, least_table, read_rans


def encode(
    symbols: U8,
    counts: I64 | None = None,
    matrix: Matrix = ALONE,
) -> bytes:
    """Code symbols without a parent, with the coder that gives the smallest result.

    Args:
        symbols: uint8, shape (n,); n is not stored.
        counts: int64 [256], number of each symbol, if known.
        matrix: where the symbols stand; default: in no matrix.
    """
    if counts is None and not matrix.columns:
        return coded(symbols).done()
    counts = counts_of(symbols) if counts is None else counts
    plain = functools.cache(lambda: smallest(symbols, counts))
    placed = None
    if matrix.columns:
        size = Size(entropy_bits(counts) / 8, lambda: plain()[1])
        placed = in_matrix(symbols, None, int(counts.argmax()), matrix, size)
    return (plain()[0].done() if placed is None else placed).done()


def encode_levels(
    levels: U8, size: int, parent: U8 | None, parent_size: int, coder: str, matrix: Matrix = ALONE
) -> bytes:
    """Code levels, as a delta if the parent's levels are given.

    Args:
        levels: uint8, shape (n,), values below `size`; for the published delta also on a GPU, which then groups them.
        size: number of levels, 2 to 256.
        parent: the parent's levels of the same elements, or None for a base.
        parent_size: number of levels of the parent.
        coder: "smallest", "fast" (up to half a percent larger where that decodes faster), or "published"
            (Inshrinkerator: Huffman for a base, one group per parent level with run lengths and Huffman for a delta).
        matrix: where the levels stand; default: in no matrix.
    """
    if coder == "published":
        return encode_huffman(levels) if parent is None else encode_rearranged(levels, size, parent, parent_size)
    if parent is None:
        return encode(levels, None, matrix)
    return in_context(levels, parent, parent_size, SLACK if coder == "fast" else 1.0, matrix)[0].done()


def in_context(
    symbols: U8, context: U8, contexts: int, slack: float = SLACK, matrix: Matrix = ALONE
) -> tuple[Writer, float]:
    """Code symbols in a context that the decoder knows, or alone if that is not larger.

    Args:
        symbols: uint8, shape (n,).
        context: uint8, shape (n,), values below `contexts`.
        contexts: 2 to 256.
        slack: by how much larger it may be where that decodes faster.
        matrix: where the symbols stand; default: in no matrix.

    Returns:
        The coded bytes, and the bits that the symbols' own entropy would take, without the context.
    """
    counts = joint_counts(context, symbols, *(max(2, int(a.max(initial=0)) + 1) for a in (context, symbols)))
    total = np.zeros(256, np.int64)
    total[: counts.shape[1]] = counts.sum(axis=0)
    alone = entropy_bits(total)
    if int(np.trace(counts)) == symbols.size:
        return Writer(UNCHANGED), alone
    # Lower bound of a stream with a table: no table is made that is larger than coding without context.
    least = least_stream(counts)
    without = functools.cache(lambda: Table.best(total[None, :]).cost)
    cost, table, plain = math.inf, None, None
    if _plain_may_win(total, alone, least, without):
        plain = encode_plain(symbols, total)
    if plain is None or len(plain) > least + 1:
        table = Table.best(counts, slack, contexts)
        cost = table.cost
    if plain is None and _plain_may_win(total, alone, cost, without):
        plain = encode_plain(symbols, total)
    if matrix.columns:
        size = cost if plain is None else min(cost, len(plain))
        placed = in_matrix(symbols, context, 0, matrix, Size(size, lambda: size))
        if placed is not None:
            return placed, alone
    if plain is not None and len(plain) <= cost + 1:
        return plain, alone
    assert table is not None
    out = Writer(CONDITIONAL)
    table.write(out, symbols, context)
    return out, alone


def _plain_may_win(counts: I64, bits: float, cost: float, without: Callable[[], float]) -> bool:
    """Return whether coding without context may take at most `cost` bytes.

    `without` makes a table for it and returns its bytes.
    """
    # Entropy and table are a lower bound; if that is larger than `cost`, no table need be made.
    return bits / 8 + least_table(np.flatnonzero(counts)) < cost and without() <= cost


def decode(data: memoryview, n: int, context: U8 | None = None, contexts: int = 0) -> U8:
    """Decode n symbols; the inverse of every encoder of this package.

    Args:
        data: what an encoder wrote.
        n: number of symbols.
        context: uint8, shape (n,), values below `contexts`; None where the encoder had none. For symbols rearranged by
            context it may be on a GPU, where they are then returned.

    Raises:
        CorruptDataError: the bytes are not such a stream.
    """

    def decoder_of(method: int) -> Callable[[Reader, int], U8]:
        if method == MATRIX:
            return lambda rest, count: decode_matrix(rest, count, context)
        if method in _IN_CONTEXT:
            if context is None:
                raise CorruptDataError(f"symbols: method {method} needs a parent")
            return lambda rest, count: _IN_CONTEXT[method](rest, count, context, contexts)
        return plain_decoder(method)

    return decoded(data, n, decoder_of)


def encode_rearranged(levels: Array, size: int, parent: U8, parent_size: int) -> bytes:
    """Encode cyclic differences, grouped by the parent's level, by run lengths and Huffman.

    Args:
        levels: uint8, shape (n,), on the host or on a GPU, where differences are then taken and grouped.
        size: number of levels.
        parent: uint8, shape (n,), on the host.
        parent_size: number of levels of the parent.
    """
    buffer = max(size, parent_size)
    before = placed_with(parent, levels)
    grouped, counts = map(to_host, split_by_level(delta(before, levels, buffer), before, parent_size))
    out = Writer(REARRANGED)
    out.varint(buffer)
    start = 0
    for count in counts:
        if count:
            out.block(encode_published(grouped[start : start + int(count)]))
        start += int(count)
    return out.done()


def decode_rearranged(data: Reader, n: int, context: Array, contexts: int) -> Array:
    """Decode the symbols that `encode_rearranged` coded, uint8 (n,), where the context is."""
    buffer = data.varint()
    if not 2 <= buffer <= 256 or buffer < contexts:
        raise CorruptDataError(f"rearranged: a cyclic buffer of {buffer} levels")
    counts = to_host(joint_counts(context, context, contexts, contexts)).diagonal()
    groups = [decode_plain(data.block(), int(c)) for c in counts if c]
    grouped = np.concatenate(groups) if groups else np.empty(0, np.uint8)
    if grouped.size and int(grouped.max()) >= buffer:
        raise CorruptDataError(f"rearranged: a difference is beyond the cyclic buffer of {buffer}")
    levels: Array = undelta(context, merge_by_level(placed_with(grouped, context), context, contexts), buffer)
    return levels


def is_rearranged(data: memoryview) -> bool:
    """Return whether `encode_rearranged` wrote a stream."""
    return bytes(data[:1]) == bytes([REARRANGED])


_IN_CONTEXT: dict[int, Callable[[Reader, int, Array, int], Array]] = {
    CONDITIONAL: lambda data, n, context, contexts: read_rans(data, context, contexts, n),
    REARRANGED: decode_rearranged,
    UNCHANGED: lambda _data, _n, context, _contexts: context,
}
