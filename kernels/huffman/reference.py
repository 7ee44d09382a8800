"""Oracle of the Huffman codes: codes as strings of ones and zeros."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from ..backend.arrays import as_list, from_list
from ..errors import BadArgumentError, CorruptDataError
from ..tables import reference as tables
from . import LIMIT

if TYPE_CHECKING:
    from ..backend.arrays import Array


def huffman_lengths(counts: Array, limit: int = 15) -> Array:
    """See `shrinkpoint.kernels.huffman.huffman_lengths`."""
    c = as_list(counts)
    if min(c) < 0 or sum(c) > 2**56:
        raise BadArgumentError("counts holds a negative one, or their sum exceeds 2**56")
    present = [s for s in range(len(c)) if c[s] > 0]
    if len(present) > 2**limit:
        raise BadArgumentError(f"limit is {limit}; {len(present)} symbols need longer codes")
    lengths = [0] * len(c)
    if len(present) == 1:
        lengths[present[0]] = 1
    elif present:
        # The coin collector's problem: each symbol has one coin of each value 2**-1 ... 2**-limit. Select the cheapest
        # coins of total value n - 1. The length of a symbol is the number of its coins in the selection.
        coins = sorted(((c[s], [s]) for s in present), key=lambda coin: coin[0])
        row: list[tuple[int, list[int]]] = []
        for _ in range(min(limit, len(present) - 1)):
            pairs = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(row[::2], row[1::2], strict=False)]
            row = sorted(coins + pairs, key=lambda coin: coin[0])  # stable: single coins first
        for _, symbols in row[: 2 * len(present) - 2]:
            for s in symbols:
                lengths[s] += 1
    return from_list(lengths, "uint8", counts)


def _codes(lengths: list[int], error: type[Exception]) -> dict[int, str]:
    """Code of each symbol that has one, as a string of bits."""
    present = sorted((length, s) for s, length in enumerate(lengths) if length)
    lone = len(present) == 1 and present[0][0] == 1
    if any(length > LIMIT for length, _ in present):
        raise error("a code is too long")
    if present and not lone and sum(2 ** (LIMIT - length) for length, _ in present) != 2**LIMIT:
        raise error("lengths belong to no complete code")
    codes = {}
    code, before = 0, 0
    for length, s in present:
        code <<= length - before
        codes[s] = format(code, f"0{length}b")
        code, before = code + 1, length
    return codes


def huffman_codes(lengths: Array) -> Array:
    """See `shrinkpoint.kernels.huffman.huffman_codes`."""
    found = as_list(lengths)
    codes = _codes(found, BadArgumentError)
    return from_list([int(codes.get(s, "0"), 2) for s in range(len(found))], "uint32", lengths)


def huffman_encode(symbols: Array, lengths: Array, *, streams: int = 4) -> Array:
    """See `shrinkpoint.kernels.huffman.huffman_encode`."""
    s = as_list(symbols)
    codes = _codes(as_list(lengths), BadArgumentError)
    if not s:
        return from_list([], "uint8", symbols)
    if not set(s) <= set(codes):
        raise BadArgumentError("symbols holds one that has no code")
    part = -(-len(s) // streams)
    parts = []
    for k in range(streams):
        bits = "".join(codes[x] for x in s[k * part : (k + 1) * part])
        bits += "0" * (-len(bits) % 8)
        parts.append([int(bits[i : i + 8], 2) for i in range(0, len(bits), 8)])
    sizes = [byte for p in parts[:-1] for byte in _varint(len(p))]
    return from_list([*sizes, *(byte for p in parts for byte in p)], "uint8", symbols)


def huffman_decode(data: Array, lengths: Array, n: int, dtype: str = "uint8", *, streams: int = 4) -> Array:
    """See `shrinkpoint.kernels.huffman.huffman_decode`."""
    d = as_list(data)
    codes = _codes(as_list(lengths), CorruptDataError)
    if any(s >> int(dtype[4:]) for s in codes):
        raise BadArgumentError(f"lengths has a code for a symbol that {dtype} cannot hold")
    if n == 0 and not d:
        return from_list([], dtype, data)
    symbol_of = {code: s for s, code in codes.items()}
    sizes = []
    at = 0
    for _ in range(streams - 1 if n else 0):
        size, at = _read_varint(d, at)
        sizes.append(size)
    bounds = [*accumulate(sizes, initial=at), len(d)]
    if any(a > b for a, b in pairwise(bounds)):
        raise CorruptDataError("a stream ends after the data")
    part = -(-n // streams)
    out = []
    for k, (a, b) in enumerate(pairwise(bounds)):
        bits = "".join(format(byte, "08b") for byte in d[a:b])
        place = 0
        for _ in range(min(k * part, n), min((k + 1) * part, n)):
            length = next((i for i in range(1, LIMIT + 1) if bits[place : place + i] in symbol_of), 0)
            if length == 0 or place + length > len(bits):
                raise CorruptDataError("a stream ends within a symbol, or holds an unknown code")
            out.append(symbol_of[bits[place : place + length]])
            place += length
        if len(bits) - place > 7 or "1" in bits[place:]:
            raise CorruptDataError("a stream goes on after its last symbol")
    return from_list(out, dtype, data)


def pack_lengths(lengths: Array) -> bytes:
    """See `shrinkpoint.kernels.huffman.pack_lengths`."""
    found = as_list(lengths)
    _codes(found, BadArgumentError)
    return tables.pack_lengths(found, LIMIT)


def unpack_lengths(data: Array, size: int) -> Array:
    """See `shrinkpoint.kernels.huffman.unpack_lengths`."""
    return from_list(tables.unpack_lengths(bytes(as_list(data)), size, LIMIT), "uint8", data)


def _varint(value: int) -> list[int]:
    return [value] if value < 128 else [value & 127 | 128, *_varint(value >> 7)]


def _read_varint(data: list[int], at: int) -> tuple[int, int]:
    """Read a size; return it and the position after it."""
    for end in range(at, min(at + 9, len(data))):
        if data[end] < 128:
            if data[end] == 0 and end > at:
                break
            return sum((byte & 127) << (7 * i) for i, byte in enumerate(data[at : end + 1])), end + 1
    raise CorruptDataError("the size of a stream is cut off, or written with more bytes than it needs")
