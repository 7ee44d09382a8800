"""Coding of symbols by the smallest of all coders, with or without a context, and decoding."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ...kernels.levels import joint_counts
from ...kernels.rans import entropy_bits
from ...kernels.sparse_changes import rare_decode, rare_encode
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from .matrices import ALONE, Matrix, decode_matrix, in_matrix
from .method_ids import CONDITIONAL, FEW, MATRIX, RARE, REARRANGED, SLACK, UNCHANGED
from .plain import coded, decoded, encode_huffman, encode_plain, plain_decoder, smallest
from .rearranged import decode_rearranged, encode_rearranged
from .table import I64, U8, Table, array, counts_of, least_stream, least_table, read_rans


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
    plain, least = smallest(symbols, counts)
    placed = in_matrix(symbols, None, int(counts.argmax()), matrix, least) if matrix.columns else None
    return (plain.done() if placed is None else placed).done()


def encode_levels(
    levels: U8, size: int, parent: U8 | None, parent_size: int, coder: str, matrix: Matrix = ALONE
) -> bytes:
    """Code levels, as a delta if the parent's levels are given.

    Args:
        levels: uint8, shape (n,), values below `size`.
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
    out = Writer()
    changes = symbols.size - int(np.trace(counts))
    if changes == 0:
        out.byte(UNCHANGED)
        return out, alone
    rare = rare_encode(symbols, context) if changes <= min(FEW, symbols.size // 2) else None
    cost, table, plain = math.inf if rare is None else float(rare.size), None, None
    # Lower bound of a stream with a table: no table is made that is larger than coding without context.
    least = least_stream(counts)
    if slack * least < cost:
        if _plain_may_win(total, alone, least):
            plain = encode_plain(symbols, total)
        if plain is None or len(plain) > least + 1:
            table = Table.best(counts, slack, contexts)
            if rare is not None and slack * table.cost >= rare.size:
                table = None
            else:
                cost = table.cost
    if plain is None and _plain_may_win(total, alone, cost):
        plain = encode_plain(symbols, total)
    if matrix.columns:
        size = cost if plain is None else min(cost, len(plain))
        placed = in_matrix(symbols, context, 0, matrix, size)
        if placed is not None:
            return placed, alone
    if plain is not None and len(plain) <= cost + 1:
        return plain, alone
    if table is not None:
        out.byte(CONDITIONAL)
        table.write(out, symbols, context)
    elif rare is not None:
        out.byte(RARE)
        out.raw(rare)
    return out, alone


def _plain_may_win(counts: I64, bits: float, cost: float) -> bool:
    """Return whether coding without context may take at most `cost` bytes."""
    n = int(counts.sum())
    if n - int(counts.max()) <= min(FEW, n // 2):
        return bits / 8 + 2 < cost
    # Entropy and table are a lower bound; if that is larger than `cost`, no table need be made.
    return bits / 8 + least_table(np.flatnonzero(counts)) < cost and Table.best(counts[None, :]).cost <= cost


def decode(data: memoryview, n: int, context: U8 | None = None, contexts: int = 0) -> U8:
    """Decode n symbols; the inverse of every encoder of this package.

    Args:
        data: what an encoder wrote.
        n: number of symbols.
        context: uint8, shape (n,), values below `contexts`; None where the encoder had none.

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


def _decode_rare(data: Reader, n: int, context: U8, _contexts: int) -> U8:
    symbols: U8 = rare_decode(array(data.rest()), context)
    return symbols


_IN_CONTEXT: dict[int, Callable[[Reader, int, U8, int], U8]] = {
    CONDITIONAL: lambda data, n, context, contexts: read_rans(data, context, contexts, n),
    REARRANGED: decode_rearranged,
    UNCHANGED: lambda _data, _n, context, _contexts: context,
    RARE: _decode_rare,
}
