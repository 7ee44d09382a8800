"""rANS coding of levels given the levels before, and its tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from shrinkpoint.kernels import rans as kernels

from .. import peers
from ..harness import Case, Job, Peer, at_least, near, same
from .huffman import ENTROPY
from .place import LEVELS, PREFIX, Place, numpy_peer, oracle

PRECISION = 12
"""Bits of the tables."""
BLOCK = 1 << 22
"""Symbols of a block, as the codec cuts them."""
HOST = "one thread of the host"
_COUNTS, _NEAR = f"{LEVELS} x {LEVELS} counts", 1e-12


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject."""
    numpy, zstd = ("NumPy",), ("zstd -19",)
    encode, decode = at_least(0.5, "value"), at_least(0.4, "value")
    found = [
        at.case("rans_encode conditional", lambda: coded(at, decode=False), encode, ENTROPY[2:], unit="Gsym/s"),
        at.case("rans_decode conditional", lambda: coded(at, decode=True), decode, ENTROPY[2:], unit="Gsym/s"),
        at.case("rans_frequencies", lambda: frequencies(at), unit="us"),
        at.case("entropy_bits", lambda: bits(at), others=numpy, unit="us"),
        at.case("coding_cost", lambda: cost(at), others=numpy, unit="us"),
        at.case("pack_frequencies", lambda: packed(at, unpack=False), others=zstd, unit="us"),
        at.case("unpack_frequencies", lambda: packed(at, unpack=True), others=zstd, unit="us"),
    ]
    many = [
        at.case("rans_encode conditional", lambda: in_blocks(at, decode=False), others=(HOST,), unit="Gsym/s"),
        at.case("rans_decode conditional", lambda: in_blocks(at, decode=True), others=(HOST,), unit="Gsym/s"),
    ]
    return [*(case.only("cpu") for case in found), *(case.only("gpu") for case in many)]


def in_blocks(at: Place, *, decode: bool) -> Job:
    """Code levels as `coded` does, in blocks: as a GPU codes a state."""
    table, (previous, current) = kernels.rans_frequencies(at.joint(), PRECISION), at.levels()
    on_host = [kernels.Block(current[i : i + BLOCK], previous[i : i + BLOCK], table) for i in range(0, at.n, BLOCK)]
    symbols, blocks = _there(at, on_host), on_host[:1]
    sizes, streams = [block.data.size for block in on_host], kernels.rans_encode_many(symbols)
    coded = [replace(block, data=data) for block, data in zip(symbols, streams, strict=True)]
    streams_of = kernels.rans_encode_many(blocks)

    def check() -> str:
        same("a block", streams[0], streams_of[0])
        for found, block in zip(kernels.rans_decode_many(coded, sizes), on_host, strict=True):
            same("symbols", found, block.data)
        return "a block = host, round trip"

    def host() -> Callable[[], object]:
        if decode:
            given = [replace(blocks[0], data=streams_of[0])]
            return lambda: kernels.rans_decode_many(given, sizes[:1])
        return lambda: kernels.rans_encode_many(blocks)

    def call() -> object:
        return kernels.rans_decode_many(coded, sizes) if decode else kernels.rans_encode_many(symbols)

    note = f"{8 * sum(x.shape[0] for x in streams) / at.n:.3f} bits a symbol in {len(symbols)} blocks"
    return at.symbols(call, check, [Peer(HOST, host, float(sizes[0]))], note)


def _there(at: Place, blocks: list[kernels.Block]) -> list[kernels.Block]:
    """Return blocks on the device."""
    pairs = [at.arrays(block.data, block.contexts) for block in blocks]
    return [replace(block, data=x, contexts=c) for block, (x, c) in zip(blocks, pairs, strict=True)]


def coded(at: Place, *, decode: bool) -> Job:
    """Code the later levels in the context of the earlier ones."""
    previous, current = at.levels()
    table = kernels.rans_frequencies(at.joint(), PRECISION)
    data, few = kernels.rans_encode(current, previous, table, PRECISION), PREFIX // 8

    def check() -> str:
        same("symbols", kernels.rans_decode(data, previous, table, PRECISION, at.n), current)
        part = current[:few], previous[:few], table, PRECISION
        same("rans_encode", kernels.rans_encode(*part), oracle("rans").rans_encode(*part))
        return "round trip, prefix = oracle"

    if decode:
        call = lambda: kernels.rans_decode(data, previous, table, PRECISION, at.n)  # noqa: E731
    else:
        call = lambda: kernels.rans_encode(current, previous, table, PRECISION)  # noqa: E731
    others = peers.entropy_coders(current, np.bincount(current, minlength=LEVELS), decode=decode)[2:]
    changed = float((previous != current).mean())
    note = f"{8 * data.size / at.n:.3f} bits a symbol, {changed:.1%} of levels changed"
    return at.symbols(call, check, others, note)


def frequencies(at: Place) -> Job:
    """Normalise counts."""
    counts = at.joint()
    expected = lambda: oracle("rans").rans_frequencies(counts, PRECISION)  # noqa: E731
    return at.table(lambda: kernels.rans_frequencies(counts, PRECISION), expected, _COUNTS)


def bits(at: Place) -> Job:
    """Compute the bits of counts by their entropy."""
    counts = at.joint()

    def plain() -> float:
        present = np.where(counts > 0, counts, 1)
        return float((counts * np.log2(np.maximum(counts.sum(axis=1, keepdims=True), 1) / present)).sum())

    def expected() -> float:
        near("bits", kernels.entropy_bits(counts), oracle("rans").entropy_bits(counts), _NEAR)
        return plain()

    says = "= oracle and NumPy"
    call = lambda: kernels.entropy_bits(counts)  # noqa: E731
    return at.table(call, expected, _COUNTS, within=_NEAR, says=says, others=[numpy_peer(plain)])


def cost(at: Place) -> Job:
    """Compute the bits of counts by a table."""
    counts = at.joint()
    table = kernels.rans_frequencies(counts, PRECISION)

    def plain() -> float:
        return float((counts * (PRECISION - np.log2(np.where(counts > 0, table, 1)))).sum())

    def call() -> float:
        return kernels.coding_cost(counts, table, PRECISION)

    def expected() -> float:
        near("bits", call(), oracle("rans").coding_cost(counts, table, PRECISION), _NEAR)
        return plain()

    return at.table(call, expected, _COUNTS, within=_NEAR, says="= oracle and NumPy", others=[numpy_peer(plain)])


def packed(at: Place, *, unpack: bool) -> Job:
    """Pack a table of frequencies."""
    table = kernels.rans_frequencies(at.joint(), PRECISION)
    data = kernels.pack_frequencies(table, PRECISION)
    if unpack:
        call = lambda: kernels.unpack_frequencies(data, LEVELS, LEVELS, PRECISION)  # noqa: E731
    else:
        call = lambda: kernels.pack_frequencies(table, PRECISION)  # noqa: E731
    expected = lambda: table if unpack else oracle("rans").pack_frequencies(table, PRECISION)  # noqa: E731
    others = [peers.zstd_table(table.astype(np.uint16).tobytes(), unpack=unpack)]
    note = f"{LEVELS} x {LEVELS} frequencies in {len(data)} bytes"
    return at.table(call, expected, note, says="comes back" if unpack else "= oracle", others=others)
