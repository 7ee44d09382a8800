"""Huffman coding of levels, and its tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shrinkpoint.kernels import huffman as kernels

from .. import peers
from ..harness import Case, Job, Peer, at_least, same
from .place import LEVELS, PREFIX, Place, oracle

ENTROPY = ("zstd entropy stage", "dahuffman", "constriction")
_SYMBOLS = "256 symbols"


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject."""
    zstd, dahuffman = ("zstd -19",), ("dahuffman",)
    found = [
        at.case("huffman_encode", lambda: coded(at, decode=False), at_least(0.85, "value"), ENTROPY, unit="Gsym/s"),
        at.case("huffman_decode", lambda: coded(at, decode=True), at_least(1.4, "value"), ENTROPY, unit="Gsym/s"),
        at.case("huffman_lengths", lambda: lengths(at), others=dahuffman, unit="us"),
        at.case("huffman_codes", lambda: codes(at), unit="us"),
        at.case("pack_lengths", lambda: packed(at, unpack=False), others=zstd, unit="us"),
        at.case("unpack_lengths", lambda: packed(at, unpack=True), others=zstd, unit="us"),
    ]
    return [case.only("cpu") for case in found]


def entropy(counts: Any) -> float:
    """Bits a symbol: the floor in size."""
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def coded(at: Place, *, decode: bool) -> Job:
    """Code levels in four streams."""
    levels = at.sample.levels_after(at.n)
    counts = np.bincount(levels, minlength=LEVELS).astype(np.int64)
    lengths = kernels.huffman_lengths(counts)
    data, few = kernels.huffman_encode(levels, lengths), levels[: PREFIX // 8]

    def check() -> str:
        same("symbols", kernels.huffman_decode(data, lengths, at.n), levels)
        short = oracle("huffman").huffman_encode(few, lengths, streams=4)
        same("huffman_encode", kernels.huffman_encode(few, lengths, streams=4), short)
        expected = oracle("huffman").huffman_decode(short, lengths, few.size, "uint8", streams=4)
        same("huffman_decode", kernels.huffman_decode(short, lengths, few.size, "uint8", streams=4), expected)
        return "round trip, prefix = oracle"

    others, size = peers.entropy_coders(levels, counts, decode=decode), f"{8 * data.size / at.n:.3f} bits a symbol"
    if decode:
        note = "4 streams, multi-symbol tables"
        return at.symbols(lambda: kernels.huffman_decode(data, lengths, at.n), check, others, note)
    note = f"4 streams, {size}, entropy {entropy(counts):.3f}"
    return at.symbols(lambda: kernels.huffman_encode(levels, lengths), check, others, note)


def _byte_counts(at: Place) -> Any:
    """Counts of the bytes of float32 weights, where most of 256 symbols occur."""
    return np.bincount(at.sample.before(at.n).view(np.uint8), minlength=256).astype(np.int64)


def lengths(at: Place) -> Job:
    """Compute code lengths."""
    counts = _byte_counts(at)

    def other() -> Callable[[], object]:
        codec = peers.library("dahuffman").HuffmanCodec
        frequencies = {symbol: int(count) for symbol, count in enumerate(counts) if count}
        return lambda: codec.from_frequencies(frequencies)

    theirs = Peer("dahuffman", other, note="the codes too, of any length")
    expected = lambda: oracle("huffman").huffman_lengths(counts)  # noqa: E731
    return at.table(lambda: kernels.huffman_lengths(counts), expected, _SYMBOLS, others=[theirs])


def codes(at: Place) -> Job:
    """Compute codes from lengths."""
    lengths = kernels.huffman_lengths(_byte_counts(at))
    return at.table(lambda: kernels.huffman_codes(lengths), lambda: oracle("huffman").huffman_codes(lengths), _SYMBOLS)


def packed(at: Place, *, unpack: bool) -> Job:
    """Pack code lengths."""
    lengths = kernels.huffman_lengths(_byte_counts(at))
    data = kernels.pack_lengths(lengths)
    call = (lambda: kernels.unpack_lengths(data, 256)) if unpack else (lambda: kernels.pack_lengths(lengths))
    expected = lambda: lengths if unpack else oracle("huffman").pack_lengths(lengths)  # noqa: E731
    note = f"256 lengths in {len(data)} bytes"
    others = [peers.zstd_table(lengths.tobytes(), unpack=unpack)]
    return at.table(call, expected, note, says="comes back" if unpack else "= oracle", others=others)
