"""Coding of symbols without a context, by the smallest of several coders.

Source of run lengths with Huffman: Inshrinkerator, section 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from ...kernels.backend.arrays import placed_with, to_host
from ...kernels.huffman import huffman_decode, huffman_encode, huffman_lengths, pack_lengths, unpack_lengths
from ...kernels.packing import pack_bits, unpack_bits
from ...kernels.rans import entropy_bits
from ...kernels.runlength import rle_decode, rle_encode
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from .table import I64, SLACK, U8, Table, array, counts_of, least_table, read_rans, sampled_bits

CONSTANT, PACKED, HUFFMAN, PUBLISHED, RANS, CONDITIONAL, REARRANGED, UNCHANGED, ZSTANDARD, STORED, MATRIX = range(11)
"""Numbers of the coding methods, which are the first byte of a stream."""
_SHORT, _MODEST = 2048, 4096
_HIGH_ENTROPY = 2.5
"""Bits a symbol above which Huffman comes within half a percent of the entropy often enough to be tried."""
SAMPLE, PARTS = 1 << 14, 64
"""Size of the sample from which the coder of an array is chosen, and its number of contiguous parts."""
_MANY = 4 * SAMPLE
_NOISE = 8 / SLACK
"""Bits a symbol from which storing is as good."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A coder for given symbols, with the size of its result.

    Args:
        method: its number.
        size: bytes.
        write: what follows the method's number.
    """

    method: int
    size: float
    write: Callable[[Writer], None]

    def done(self) -> Writer:
        """Return the complete stream, method byte included."""
        out = Writer(self.method)
        self.write(out)
        return out


def smallest(symbols: U8, counts: I64) -> tuple[Candidate, float]:
    """Return the fastest candidate within half a percent of the smallest, and the smallest size.

    Args:
        symbols: uint8, shape (n,).
        counts: int64 [256], how often each occurs.
    """
    present = counts.nonzero()[0]
    if present.size <= 1:
        constant = _constant(int(present[0]) if present.size else 0)
        return constant, constant.size
    # By how fast they are decoded.
    found = [_stored(symbols), _packed(symbols, int(present[-1]).bit_length())]
    least = min(c.size for c in found)
    bits = entropy_bits(counts)
    # No table is tried that cannot win: for noise (mantissas), and for streams shorter than a table.
    if SLACK * (bits / 8 + least_table(present)) < least:
        if symbols.size < _MODEST or bits > _HIGH_ENTROPY * symbols.size:
            found.append(_huffman(symbols, counts))
            least = min(c.size for c in found)
        if (symbols.size >= _SHORT or bits < symbols.size) and SLACK * (bits / 8 + least_table(present)) < least:
            found.append(_rans(symbols, counts))
            least = min(c.size for c in found)
    return next(c for c in found if c.size <= SLACK * least), least


def coded(symbols: U8) -> Writer:
    """Code symbols, uint8 (n,), by the coder with the smallest result.

    Symbols that no coder makes smaller are not copied: they must not change before the writer is used. If a sample of
    many symbols is noise, they are not counted.
    """
    if symbols.size <= 1:  # as the head of most arrays has them
        return _constant(int(symbols[0]) if symbols.size else 0).done()
    if symbols.size < _MANY or sampled_bits(np.bincount(sample(symbols.size)(symbols))) < _NOISE * SAMPLE:
        return encode_plain(symbols, counts_of(symbols))
    return _stored(symbols).done()


def sample(n: int) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
    """Return a function that takes the same small sample of any array of n elements."""
    if n <= SAMPLE:
        return lambda x: x
    length = SAMPLE // PARTS
    starts = np.linspace(0, n - length, PARTS).astype(np.int64)
    at = (starts[:, None] + np.arange(length)).reshape(-1)
    return lambda x: to_host(x[placed_with(at, x)])


def encode_plain(symbols: U8, counts: I64) -> Writer:
    """Code symbols with known counts, int64 [256], by the coder with the smallest result."""
    return smallest(symbols, counts)[0].done()


def encode_huffman(symbols: U8) -> bytes:
    """Code symbols by Huffman only, as the published system codes a base."""
    counts = counts_of(symbols)
    if np.count_nonzero(counts) <= 1:
        return encode_plain(symbols, counts).done()
    return _huffman(symbols, counts).done().done()


def _constant(value: int) -> Candidate:
    return Candidate(CONSTANT, 2.0, lambda out: out.byte(value))


def _stored(symbols: U8) -> Candidate:
    return Candidate(STORED, float(symbols.size), lambda out: out.raw(symbols))


def _packed(symbols: U8, width: int) -> Candidate:
    def write(out: Writer) -> None:
        out.byte(width)
        out.raw(pack_bits(symbols, width))

    return Candidate(PACKED, 1 + float(np.ceil(symbols.size * width / 8)), write)


def _huffman(symbols: U8, counts: I64) -> Candidate:
    lengths = huffman_lengths(counts)
    packed = pack_lengths(lengths)

    def write(out: Writer) -> None:
        out.block(packed)
        out.raw(huffman_encode(symbols, lengths))

    return Candidate(HUFFMAN, len(packed) + 8 + float((counts * lengths).sum()) / 8, write)


def _rans(symbols: U8, counts: I64) -> Candidate:
    table = Table.best(counts[None, :])
    return Candidate(RANS, table.cost, lambda out: table.write(out, symbols, None))


def decode_plain(data: memoryview, n: int) -> U8:
    """Decode n symbols of a stream that may not contain context or position coding.

    Parts of other streams are decoded by this function, so that hostile bytes cannot nest streams deeply.

    Raises:
        CorruptDataError: the bytes are not such a stream.
    """
    return decoded(data, n, plain_decoder)


def plain_decoder(method: int) -> Callable[[Reader, int], U8]:
    """Return the decoder of a method without context and position."""
    if method not in _DECODERS:
        raise CorruptDataError(f"symbols: method {method} is unknown, or not for a stream inside another")
    return _DECODERS[method]


def decoded(data: memoryview, n: int, decoder_of: Callable[[int], Callable[[Reader, int], U8]]) -> U8:
    """Decode exactly n symbols with the decoder of the stream's method."""
    reader = Reader(data, "symbols")
    symbols = decoder_of(reader.byte())(reader, n)
    reader.end()
    if symbols.shape[0] != n:
        raise CorruptDataError(f"symbols: {symbols.shape[0]} decoded, {n} expected")
    return symbols


def _decode_constant(data: Reader, n: int) -> U8:
    return np.full(n, data.byte(), np.uint8)


def _decode_packed(data: Reader, n: int) -> U8:
    width = data.byte()
    if width > 8:
        raise CorruptDataError(f"packed: a width of {width} bits")
    symbols: U8 = unpack_bits(array(data.rest()), width, n)
    return symbols


def _decode_huffman(data: Reader, n: int) -> U8:
    lengths = unpack_lengths(array(data.block()), 256)
    symbols: U8 = huffman_decode(array(data.rest()), lengths, n)
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


def encode_published(symbols: U8) -> bytes:
    """Encode by run lengths and Huffman as published; a single symbol as a constant."""
    if symbols.size == 0 or (symbols == symbols[0]).all():
        return bytes([CONSTANT, int(symbols[0]) if symbols.size else 0])
    tokens = rle_encode(symbols)
    alphabet, dense, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    lengths = huffman_lengths(counts.astype(np.int64), limit=24)
    out = Writer(PUBLISHED)
    # The alphabet ascends: first the values, negated, then the run lengths.
    out.varint(tokens.size, alphabet.size, int(-alphabet[0]), *np.diff(alphabet).tolist())
    out.block(pack_lengths(lengths))
    out.raw(huffman_encode(dense.astype(np.uint16), lengths))
    return out.done()


def decode_published(data: Reader, n: int) -> U8:
    """Decode the symbols that `encode_published` coded, uint8 (n,)."""
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
    lengths = unpack_lengths(array(data.block()), size)
    dense = huffman_decode(array(data.rest()), lengths, count, dtype="uint16")
    decoded: U8 = rle_decode(alphabet[dense].astype(np.int32), n)
    return decoded


_DECODERS: dict[int, Callable[[Reader, int], U8]] = {
    CONSTANT: _decode_constant,
    PACKED: _decode_packed,
    HUFFMAN: _decode_huffman,
    PUBLISHED: decode_published,
    RANS: lambda data, n: read_rans(data, None, 1, n),
    ZSTANDARD: _decode_zstandard,
    STORED: lambda data, n: array(data.raw(n)),
}
