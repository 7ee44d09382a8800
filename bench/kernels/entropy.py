"""Entropy coding of levels: Huffman, rANS given the levels before, and their tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from shrinkpoint.kernels import huffman, rans

from .. import peers
from ..harness import Case, Job, Peer, at_least, near, same
from .place import LEVELS, PREFIX, Place, numpy_peer, oracle

PRECISION = 12
"""Bits of the tables of rANS."""
BLOCK = 1 << 22
"""Symbols of a block, as the codec cuts them."""
HOST = "one thread of the host"
_COUNTS, _NEAR = f"{LEVELS} x {LEVELS} counts", 1e-12
ENTROPY = ("zstd entropy stage", "dahuffman", "constriction")
_SYMBOLS, _RATE = "256 symbols", "Gsym/s"


def cases(at: Place) -> list[Case]:
    """Return the cases of the subjects."""
    numpy, zstd = ("NumPy",), ("zstd -19",)
    encode, decode = at_least(0.5, "value"), at_least(0.4, "value")
    host = [
        at.case(
            "huffman_encode", lambda: huffman_coded(at, decode=False), at_least(0.85, "value"), ENTROPY, unit=_RATE
        ),
        at.case("huffman_decode", lambda: huffman_coded(at, decode=True), at_least(1.4, "value"), ENTROPY, unit=_RATE),
        at.case("huffman_lengths", lambda: huffman_lengths(at), others=("dahuffman",), unit="us"),
        at.case("huffman_codes", lambda: huffman_codes(at), unit="us"),
        at.case("pack_lengths", lambda: packed_lengths(at, unpack=False), others=zstd, unit="us"),
        at.case("unpack_lengths", lambda: packed_lengths(at, unpack=True), others=zstd, unit="us"),
        at.case("rans_encode conditional", lambda: rans_coded(at, decode=False), encode, ENTROPY[2:], unit=_RATE),
        at.case("rans_decode conditional", lambda: rans_coded(at, decode=True), decode, ENTROPY[2:], unit=_RATE),
        at.case("rans_frequencies", lambda: frequencies(at), unit="us"),
        at.case("entropy_bits", lambda: bits(at), others=numpy, unit="us"),
        at.case("coding_cost", lambda: cost(at), others=numpy, unit="us"),
        at.case("pack_frequencies", lambda: packed_frequencies(at, unpack=False), others=zstd, unit="us"),
        at.case("unpack_frequencies", lambda: packed_frequencies(at, unpack=True), others=zstd, unit="us"),
    ]
    card = [
        at.case("rans_encode conditional", lambda: in_blocks(at, decode=False), others=(HOST,), unit=_RATE),
        at.case("rans_decode conditional", lambda: in_blocks(at, decode=True), others=(HOST,), unit=_RATE),
    ]
    return [*(case.only("cpu") for case in host), *(case.only("gpu") for case in card)]


def entropy(counts: Any) -> float:
    """Bits a symbol: the floor in size."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def huffman_coded(at: Place, *, decode: bool) -> Job:
    """Code levels in four streams."""
    levels = at.sample.levels_after(at.n)
    counts = np.bincount(levels, minlength=LEVELS).astype(np.int64)
    lengths = huffman.huffman_lengths(counts)
    data, few = huffman.huffman_encode(levels, lengths), levels[: PREFIX // 8]

    def check() -> str:
        same("symbols", huffman.huffman_decode(data, lengths, at.n), levels)
        short = oracle("huffman").huffman_encode(few, lengths, streams=4)
        same("huffman_encode", huffman.huffman_encode(few, lengths, streams=4), short)
        expected = oracle("huffman").huffman_decode(short, lengths, few.size, "uint8", streams=4)
        same("huffman_decode", huffman.huffman_decode(short, lengths, few.size, "uint8", streams=4), expected)
        return "round trip, prefix = oracle"

    others, size = peers.entropy_coders(levels, counts, decode=decode), f"{8 * data.size / at.n:.3f} bits a symbol"
    if decode:
        note = "4 streams, multi-symbol tables"
        return at.symbols(lambda: huffman.huffman_decode(data, lengths, at.n), check, others, note)
    note = f"4 streams, {size}, entropy {entropy(counts):.3f}"
    return at.symbols(lambda: huffman.huffman_encode(levels, lengths), check, others, note)


def _byte_counts(at: Place) -> Any:
    """Counts of the bytes of float32 weights, where most of 256 symbols occur."""
    return np.bincount(at.sample.before(at.n).view(np.uint8), minlength=256).astype(np.int64)


def huffman_lengths(at: Place) -> Job:
    """Compute code lengths."""
    counts = _byte_counts(at)

    def other() -> Callable[[], object]:
        codec = peers.library("dahuffman").HuffmanCodec
        frequencies = {symbol: int(count) for symbol, count in enumerate(counts) if count}
        return lambda: codec.from_frequencies(frequencies)

    theirs = Peer("dahuffman", other, note="the codes too, of any length")
    expected = partial(oracle("huffman").huffman_lengths, counts)
    return at.table(partial(huffman.huffman_lengths, counts), expected, _SYMBOLS, others=[theirs])


def huffman_codes(at: Place) -> Job:
    """Compute codes from lengths."""
    lengths = huffman.huffman_lengths(_byte_counts(at))
    return at.table(lambda: huffman.huffman_codes(lengths), lambda: oracle("huffman").huffman_codes(lengths), _SYMBOLS)


def packed_lengths(at: Place, *, unpack: bool) -> Job:
    """Pack code lengths."""
    lengths = huffman.huffman_lengths(_byte_counts(at))
    data = huffman.pack_lengths(lengths)
    calls = partial(huffman.pack_lengths, lengths), partial(huffman.unpack_lengths, data, 256)
    expected = partial(oracle("huffman").pack_lengths, lengths)
    return _packed(at, calls, lengths, expected, lengths, f"256 lengths in {len(data)} bytes", unpack=unpack)


def _packed(
    at: Place, calls: tuple[Callable[[], Any], Callable[[], Any]], table: Any, expected: Callable[[], Any], plain: Any,
    note: str, *, unpack: bool,
) -> Job:  # fmt: skip
    """Return the job of packing a table, or of unpacking it; `plain` is what zstandard gets."""
    wanted, says = ((lambda: table), "comes back") if unpack else (expected, "= oracle")
    others = peers.zstd_table(plain, unpack=unpack)
    return at.table(calls[unpack], wanted, note, says=says, others=others)


# ----------------------------------------------------------------------------------------------------------------- rANS


def in_blocks(at: Place, *, decode: bool) -> Job:
    """Code levels as `rans_coded` does, in blocks: as a GPU codes a state."""
    table, (previous, current) = rans.rans_frequencies(at.joint(), PRECISION), at.levels()
    on_host = [rans.Block(current[i : i + BLOCK], previous[i : i + BLOCK], table) for i in range(0, at.n, BLOCK)]
    symbols, blocks = _there(at, on_host), on_host[:1]
    sizes, streams = [block.data.size for block in on_host], rans.rans_encode_many(symbols)
    coded = [replace(block, data=data) for block, data in zip(symbols, streams, strict=True)]
    streams_of = rans.rans_encode_many(blocks)

    def check() -> str:
        same("a block", streams[0], streams_of[0])
        for found, block in zip(rans.rans_decode_many(coded, sizes), on_host, strict=True):
            same("symbols", found, block.data)
        return "a block = host, round trip"

    def host() -> Callable[[], object]:
        if decode:
            given = [replace(blocks[0], data=streams_of[0])]
            return lambda: rans.rans_decode_many(given, sizes[:1])
        return lambda: rans.rans_encode_many(blocks)

    def call() -> object:
        return rans.rans_decode_many(coded, sizes) if decode else rans.rans_encode_many(symbols)

    note = f"{8 * sum(x.shape[0] for x in streams) / at.n:.3f} bits a symbol in {len(symbols)} blocks"
    return at.symbols(call, check, [Peer(HOST, host, float(sizes[0]))], note)


def _there(at: Place, blocks: list[rans.Block]) -> list[rans.Block]:
    """Return blocks on the device."""
    pairs = [at.arrays(block.data, block.contexts) for block in blocks]
    return [replace(block, data=x, contexts=c) for block, (x, c) in zip(blocks, pairs, strict=True)]


def rans_coded(at: Place, *, decode: bool) -> Job:
    """Code the later levels in the context of the earlier ones."""
    previous, current = at.levels()
    table = rans.rans_frequencies(at.joint(), PRECISION)
    data, part = rans.rans_encode(current, previous, table, PRECISION), slice(PREFIX // 8)

    def few() -> tuple[Any, Any]:
        given = current[part], previous[part], table, PRECISION
        return rans.rans_encode(*given), oracle("rans").rans_encode(*given)

    others = peers.entropy_coders(current, np.bincount(current, minlength=LEVELS), decode=decode)[2:]
    changed = float((previous != current).mean())
    note = f"{8 * data.size / at.n:.3f} bits a symbol, {changed:.1%} of levels changed"
    encode = partial(rans.rans_encode, current, previous, table, PRECISION)
    calls = encode, partial(rans.rans_decode, data, previous, table, PRECISION, at.n)
    return at.coding(*calls, current, few, note, others, decoding=decode)


def frequencies(at: Place) -> Job:
    """Normalise counts."""
    counts = at.joint()
    expected = partial(oracle("rans").rans_frequencies, counts, PRECISION)
    return at.table(partial(rans.rans_frequencies, counts, PRECISION), expected, _COUNTS)


def bits(at: Place) -> Job:
    """Compute the bits of counts by their entropy."""
    counts = at.joint()

    def plain() -> float:
        present = np.where(counts > 0, counts, 1)
        return float((counts * np.log2(np.maximum(counts.sum(axis=1, keepdims=True), 1) / present)).sum())

    def expected() -> float:
        near("bits", rans.entropy_bits(counts), oracle("rans").entropy_bits(counts), _NEAR)
        return plain()

    says = "= oracle and NumPy"
    call = partial(rans.entropy_bits, counts)
    return at.table(call, expected, _COUNTS, within=_NEAR, says=says, others=[numpy_peer(plain)])


def cost(at: Place) -> Job:
    """Compute the bits of counts by a table."""
    counts = at.joint()
    table = rans.rans_frequencies(counts, PRECISION)

    def plain() -> float:
        return float((counts * (PRECISION - np.log2(np.where(counts > 0, table, 1)))).sum())

    call = partial(rans.coding_cost, counts, table, PRECISION)

    def expected() -> float:
        near("bits", call(), oracle("rans").coding_cost(counts, table, PRECISION), _NEAR)
        return plain()

    return at.table(call, expected, _COUNTS, within=_NEAR, says="= oracle and NumPy", others=[numpy_peer(plain)])


def packed_frequencies(at: Place, *, unpack: bool) -> Job:
    """Pack a table of frequencies."""
    table = rans.rans_frequencies(at.joint(), PRECISION)
    data = rans.pack_frequencies(table, PRECISION)
    unpacked = partial(rans.unpack_frequencies, data, LEVELS, LEVELS, PRECISION)
    calls = partial(rans.pack_frequencies, table, PRECISION), unpacked
    expected = partial(oracle("rans").pack_frequencies, table, PRECISION)
    note = f"{LEVELS} x {LEVELS} frequencies in {len(data)} bytes"
    return _packed(at, calls, table, expected, table.astype(np.uint16), note, unpack=unpack)
