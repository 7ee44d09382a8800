"""Run lengths and Huffman, as the published system codes the groups of a delta.

Source: Inshrinkerator, section 6.
"""

from __future__ import annotations

import numpy as np

from ...kernels.huffman import huffman_decode, huffman_encode, huffman_lengths, pack_lengths, unpack_lengths
from ...kernels.runlength import rle_decode, rle_encode
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from .method_ids import CONSTANT, PUBLISHED
from .table import U8, array


def encode_published(symbols: U8) -> bytes:
    """Encode by run lengths and Huffman as published; a single symbol as a constant."""
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
