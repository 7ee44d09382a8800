"""Canonical Huffman codes of limited length, in several streams that decode in parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..backend.arguments import COUNTS, array, choice, integer, room_for, stored_bytes
from ..backend.dispatch import OnHost
from ..errors import BadArgumentError

if TYPE_CHECKING:
    from ..backend.arrays import Array
    from . import cpu, reference


class HostBackEnd(Protocol):
    """Functions of the back ends on the host."""

    def huffman_lengths(self, counts: Array, limit: int = 15) -> Array: ...
    def huffman_codes(self, lengths: Array) -> Array: ...
    def huffman_encode(self, symbols: Array, lengths: Array, *, streams: int = 4) -> Array: ...
    def huffman_decode(
        self, data: Array, lengths: Array, n: int, dtype: str = "uint8", *, streams: int = 4
    ) -> Array: ...
    def pack_lengths(self, lengths: Array) -> bytes: ...
    def unpack_lengths(self, data: Array, size: int) -> Array: ...


on_host = OnHost[HostBackEnd]("huffman")

if TYPE_CHECKING:
    _ON_HOST: tuple[HostBackEnd, ...] = (reference, cpu)

LIMIT = 24
"""Largest code length in bits."""
ALPHABET = 1 << 16
"""Largest number of symbols."""


def huffman_lengths(counts: Array, limit: int = 15) -> Array:
    """Return the code lengths of the optimal prefix code with lengths of at most `limit`.

    Minimises `sum(counts * lengths)` subject to `sum(2**-lengths) = 1` over the symbols that occur. Equal weights are
    taken in the order of the symbols, single symbols before packages.

    Args:
        counts: int64[S] (or narrower integers), >= 0, a sum of at most 2**56; S in 1 ... 65536.
        limit: 1 ... 24, and `2**limit` at least the number of symbols that occur.

    Returns:
        uint8[S]: 0 for a symbol that does not occur; 1 for one that occurs alone.

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> huffman_lengths(np.asarray([50, 20, 0, 5, 1])).tolist()
        [1, 2, 0, 3, 3]

    Source: Larmore and Hirschberg, "A fast algorithm for optimal length-limited Huffman codes" (1990).
    """
    counts = array("counts", counts, COUNTS, 1, host=True)
    _check_alphabet("counts", counts)
    return on_host().huffman_lengths(counts, integer("limit", limit, 1, LIMIT))


def huffman_codes(lengths: Array) -> Array:
    """Canonical codes with these lengths: short codes first, ties in the order of the symbols.

    Args:
        lengths: uint8[S], each 0 ... 24, with `sum(2**-lengths) = 1` over those above zero; or all 0 except for at most
            one 1.

    Returns:
        uint32[S]: the code in the lowest `lengths` bits, whose most significant bit is written first; 0 if absent.

    Raises:
        BadArgumentError: wrong dtype, shape or range, lengths that are not a complete code, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> huffman_codes(np.asarray([1, 2, 0, 3, 3], np.uint8)).tolist()
        [0, 2, 0, 6, 7]

    Source: Schwartz and Kallick, "Generating a canonical prefix encoding" (1964).
    """
    lengths = array("lengths", lengths, ("uint8",), 1, host=True)
    _check_alphabet("lengths", lengths)
    return on_host().huffman_codes(lengths)


def huffman_encode(symbols: Array, lengths: Array, *, streams: int = 4) -> Array:
    """Encode symbols by their canonical Huffman codes in several streams.

    Codes are written most significant bit first; each stream holds an equal part of the symbols.

    Part k holds symbols `k * q ... (k + 1) * q - 1` with `q = ceil(n / streams)`, and is filled with zero bits to whole
    bytes. The sizes of all parts but the last precede the parts.

    Args:
        symbols: uint8[n] or uint16[n], any n.
        lengths: uint8[S] as for `huffman_codes`.
        streams: 1 ... 255.

    Returns:
        uint8[m] (docs/entropy.md); nothing for n = 0.

    Raises:
        BadArgumentError: wrong dtype, shape or range, a symbol without a code, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> lengths = np.asarray([1, 2, 0, 3, 3], np.uint8)
        >>> data = huffman_encode(np.asarray([0, 0, 1, 4], np.uint8), lengths, streams=1)  # 0 0 10 111 and a zero
        >>> data.tolist(), huffman_decode(data, lengths, 4, streams=1).tolist()
        ([46], [0, 0, 1, 4])

    Source: Huffman (1952); streams as in Collet's Zstandard (RFC 8878, 4.2.2).
    """
    symbols = array("symbols", symbols, ("uint8", "uint16"), 1, host=True)
    lengths = array("lengths", lengths, ("uint8",), 1, host=True)
    _check_alphabet("lengths", lengths)
    return on_host().huffman_encode(symbols, lengths, streams=integer("streams", streams, 1, 255))


def huffman_decode(data: Array | bytes, lengths: Array, n: int, dtype: str = "uint8", *, streams: int = 4) -> Array:
    """Return the n symbols that `huffman_encode` encoded into `data`.

    Args:
        data: uint8[m] or bytes.
        lengths: uint8[S] as for encoding.
        n: number of symbols, >= 0.
        dtype: "uint8" or "uint16" of the result.
        streams: 1 ... 255, as for encoding.

    Returns:
        array of dtype, [n], of the same library as `data` (NumPy for bytes).

    Raises:
        BadArgumentError: wrong dtype, shape or range, a code for a symbol that dtype cannot hold, or an array on a GPU.
        CorruptDataError: lengths that are not a complete code, a stream that ends too early or too late, or a set bit
            after it.

    Example: see `huffman_encode`.

    Source: Huffman (1952); Moffat and Turpin, "On the implementation of minimum redundancy prefix codes" (1997).
    """
    data = stored_bytes(data)
    lengths = array("lengths", lengths, ("uint8",), 1, host=True)
    _check_alphabet("lengths", lengths)
    choice("dtype", dtype, ("uint8", "uint16"))
    n, streams = integer("n", n, 0, 2**56), integer("streams", streams, 1, 255)
    with room_for(n):
        return on_host().huffman_decode(data, lengths, n, dtype, streams=streams)


def pack_lengths(lengths: Array) -> bytes:
    """Encode a table of code lengths as bytes.

    Args:
        lengths: uint8[S] as for `huffman_codes`.

    Raises:
        BadArgumentError: wrong dtype, shape or range, lengths that are not a complete code, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> data = pack_lengths(np.asarray([1, 2, 0, 3, 3], np.uint8))
        >>> unpack_lengths(data, 5).tolist()
        [1, 2, 0, 3, 3]
    """
    lengths = array("lengths", lengths, ("uint8",), 1, host=True)
    _check_alphabet("lengths", lengths)
    return bytes(on_host().pack_lengths(lengths))


def unpack_lengths(data: Array | bytes, S: int) -> Array:
    """Decode a table of code lengths: the inverse of `pack_lengths`.

    Args:
        data: uint8[m] or bytes; the table uses every byte.
        S: number of symbols, 1 ... 65536.

    Returns:
        uint8[S], of the same library as `data` (NumPy for bytes); always lengths of a complete code.

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.
        CorruptDataError: the bytes are not a table of this size.

    Example: see `pack_lengths`.
    """
    data = stored_bytes(data)
    return on_host().unpack_lengths(data, integer("S", S, 1, ALPHABET))


def _check_alphabet(name: str, table: Array) -> None:
    if not 1 <= table.shape[0] <= ALPHABET:
        raise BadArgumentError(f"{name} has {table.shape[0]} elements; 1 ... {ALPHABET} are needed")
