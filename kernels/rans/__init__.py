"""Static asymmetric numeral systems with 4 or 64 interleaved states and a table per context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from ..backend.arguments import COUNTS, array, flag, integer, room_for, same_device, stored_bytes
from ..backend.arrays import on_gpu
from ..backend.dispatch import Dispatch, OnHost, module_of
from ..errors import BadArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..backend.arrays import Array
    from . import cpu, gpu, reference

STATES = 4
"""Symbol i belongs to state i mod 4."""


class BackEnd(Protocol):
    """Functions that every back end of this subject has."""

    def rans_encode(
        self, symbols: Array, contexts: Array | None, frequencies: Array, precision: int, lanes: int = STATES
    ) -> Array: ...
    def rans_decode(
        self, data: Array, contexts: Array | None, frequencies: Array, precision: int, n: int, lanes: int = STATES
    ) -> Array: ...


class GpuBackEnd(BackEnd, Protocol):
    """Functions of the back end on a GPU."""

    def rans_encode_many(self, blocks: Sequence[Block]) -> list[Array]: ...
    def rans_decode_many(self, blocks: Sequence[Block], sizes: Sequence[int]) -> list[Array]: ...


class HostBackEnd(Protocol):
    """Functions of the back ends on the host."""

    def rans_frequencies(self, counts: Array, precision: int, *, exact: bool = False) -> Array: ...
    def coding_cost(self, counts: Array, frequencies: Array, precision: int) -> float: ...
    def entropy_bits(self, counts: Array) -> float: ...
    def pack_frequencies(self, frequencies: Array, precision: int) -> bytes: ...
    def unpack_frequencies(self, data: Array, rows: int, columns: int, precision: int) -> Array: ...


back_end = Dispatch[BackEnd]("rans")
on_host = OnHost[HostBackEnd]("rans")

if TYPE_CHECKING:
    _EVERYWHERE: tuple[BackEnd, ...] = (reference, cpu, gpu)
    _ON_HOST: tuple[HostBackEnd, ...] = (reference, cpu)
    _ON_GPU: GpuBackEnd = gpu

NumPy = np.ndarray[Any, Any]


START = 1 << 16
"""Every state starts and ends here; between two symbols a state is in [START, START << 16)."""
WIDE_STATES = 64
"""States of a stream that processors decode in vectors; symbol i then belongs to state i mod 64."""
WIDE_START = 1 << 15
"""Every one of these starts and ends here; between two symbols it is in [WIDE_START, WIDE_START << 16)."""
WIDE_PRECISION = 12
"""Precision of a stream with 64 states."""
PRECISIONS = (8, 16)
"""Least and greatest logarithm of the sum of a row of frequencies."""


def rans_frequencies(counts: Array, precision: int, *, exact: bool = False) -> Array:
    """Integer frequencies that minimize the coded size, the table included.

    Each row of `counts` is scaled to the sum `2**precision`.

    Minimises `sum(counts * -log2(frequencies / 2**precision))` over integers that are at least 1 where the count is
    above zero and 0 elsewhere. The gain of raising f to f + 1, `count * log(1 + 1 / f)`, is ranked by
    `count / sqrt(f * (f + 1))`, which differs by less than 2 % and is the same float64 on every machine. Among equal
    ranks the lowest symbol comes first. Then all frequencies but the greatest of each row are rounded to a number of
    significant bits (`short_digits`) for which the table of `pack_frequencies` shrinks by more than the symbols grow.

    Args:
        counts: int64[C, S] (or narrower integers), 0 ... 2**48 each; 1 ... 256 contexts C, 1 ... 256 symbols S.
        precision: 8 ... 16.
        exact: whether to omit the rounding to few significant bits; default False.

    Returns:
        uint32[C, S]; a row of zeros stays a row of zeros.

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> counts = np.asarray([[98, 1, 1, 0], [0, 0, 0, 0], [0, 5, 0, 0]])
        >>> rans_frequencies(counts, 8, exact=True).tolist()
        [[250, 3, 3, 0], [0, 0, 0, 0], [0, 256, 0, 0]]
        >>> rans_frequencies(counts, 8).tolist()
        [[248, 4, 4, 0], [0, 0, 0, 0], [0, 256, 0, 0]]

    Source: Duda, "Asymmetric numeral systems" (2013); the rounding is Huntington's and Hill's apportionment.
    """
    counts = array("counts", counts, COUNTS, 2, host=True)
    _check_table("counts", counts)
    precision, exact = integer("precision", precision, *PRECISIONS), flag("exact", exact)
    return on_host().rans_frequencies(counts, precision, exact=exact)


def short_digits(others: int, present: int) -> int:
    """Return the number of significant bits per frequency that minimizes the total size.

    Rounding to d bits has a relative error of at most `2**-(d + 1)`. It costs about `0.24 * 4**-d` bits for each symbol
    that is not the likeliest of its row. One more bit per frequency costs `present` bits of table.

    Args:
        others: number of symbols to be coded that are not the likeliest of their context.
        present: number of frequencies above zero that are not the greatest of their row.
    """
    digits = 1
    while 9 * others > 50 * present << 2 * digits:
        digits += 1
    return digits


def rans_encode(
    symbols: Array, contexts: Array | None, frequencies: Array, precision: int, *, states: int = STATES
) -> Array:
    """Encode symbols in about `-log2(frequencies[context, symbol] / 2**precision)` bits each.

    A symbol of frequency f and start c changes a state x by `x -> ((x // f) << precision) + x % f + c`. Before that, 16
    bits of x are written if the result would not fit 32 bits. The start c is 0 for the greatest frequency of the row;
    for another symbol it is the greatest frequency plus the sum of the other frequencies before it. A symbol of
    frequency `2**precision` costs nothing.

    Args:
        symbols: uint8[n], any n.
        contexts: uint8[n], the row of each symbol; None: all of row 0.
        frequencies: uint32[C, S], as made by `rans_frequencies`.
        precision: 8 ... 16, the same.
        states: 4 (default), or 64 with a precision of 12: about three times as fast, and 240 bytes longer.

    Returns:
        uint8[m]: the states, then 16-bit words (docs/entropy.md); with four states nothing if all symbols are certain.

    Raises:
        BadArgumentError: wrong dtype, shape or range, a symbol of frequency zero, a row of frequencies that sums to
            neither 0 nor `2**precision`, or arrays on different devices.

    Example:
        >>> import numpy as np
        >>> symbols, contexts = np.asarray([0, 1, 0, 0], np.uint8), np.asarray([0, 1, 0, 0], np.uint8)
        >>> table = np.asarray([[192, 64], [0, 256]], np.uint32)
        >>> data = rans_encode(symbols, contexts, table, 8)
        >>> rans_decode(data, contexts, table, 8, 4).tolist()
        [0, 1, 0, 0]

    Source: Duda (2013); Giesen, "Interleaved entropy coders" (2014).
    """
    block = Block(symbols, contexts, frequencies, precision, states)
    _check_block("symbols", block)
    return back_end(symbols).rans_encode(symbols, contexts, frequencies, precision, states)


def rans_decode(
    data: Array | bytes, contexts: Array | None, frequencies: Array, precision: int, n: int, *, states: int = STATES
) -> Array:
    """Return the n symbols that `rans_encode` encoded into `data`.

    Args:
        data: uint8[m] or bytes.
        contexts: uint8[n], as for encoding.
        frequencies: uint32[C, S], as for encoding.
        precision: 8 ... 16, as for encoding.
        n: number of symbols, >= 0.
        states: as for encoding.

    Returns:
        uint8[n], of the same library as `data` (NumPy for bytes).

    Raises:
        BadArgumentError: wrong dtype, shape or range, or arrays on different devices.
        CorruptDataError: the data end too early or too late, or a state does not end at its start value.

    Example: see `rans_encode`.

    Source: Duda (2013); Giesen (2014).
    """
    data = stored_bytes(data, anywhere=True)
    n = integer("n", n, 0, 2**62)
    _check_block("data", Block(data, contexts, frequencies, precision, states), n)
    with room_for(n):
        return back_end(data).rans_decode(data, contexts, frequencies, precision, n, states)


@dataclass(frozen=True, slots=True)
class Block:
    """Symbols to encode or bytes to decode, and how.

    Args:
        data: uint8[n] symbols, or the uint8[m] bytes that they were encoded to.
        contexts: uint8[n], the row of each symbol; None: all of row 0.
        frequencies: uint32[C, S], as made by `rans_frequencies`.
        precision: 8 ... 16, the same.
        states: 4, or 64 with a precision of 12.
    """

    data: Array
    contexts: Array | None
    frequencies: Array
    precision: int = WIDE_PRECISION
    states: int = WIDE_STATES


def rans_encode_many(blocks: Sequence[Block]) -> list[Array]:
    """Encode several blocks of symbols on one device as `rans_encode` does.

    A GPU encodes them at the same time.

    Args:
        blocks: their `data` are the symbols.

    Returns:
        The bytes of each block.

    Raises:
        BadArgumentError: as of `rans_encode`; or the blocks are not on one device.

    Example:
        >>> import numpy as np
        >>> symbols, table = np.asarray([0, 1, 0, 0], np.uint8), np.asarray([[192, 64]], np.uint32)
        >>> [data] = rans_encode_many([Block(symbols, None, table, 8, 4)])
        >>> rans_decode_many([Block(data, None, table, 8, 4)], [4])[0].tolist()
        [0, 1, 0, 0]
    """
    for block in blocks:
        _check_block("symbols", block, first=blocks[0])
    if blocks and on_gpu(blocks[0].data):
        return _on_gpu().rans_encode_many(blocks)
    return [rans_encode(b.data, b.contexts, b.frequencies, b.precision, states=b.states) for b in blocks]


def rans_decode_many(blocks: Sequence[Block], sizes: Sequence[int]) -> list[Array]:
    """Decode several blocks on one device as `rans_decode` does, on a GPU at the same time.

    Args:
        blocks: their `data` are the bytes.
        sizes: number of symbols of each block, >= 0.

    Returns:
        The symbols of each block.

    Raises:
        BadArgumentError: as of `rans_decode`; or the blocks are not on one device.
        CorruptDataError: as of `rans_decode`, of any block.

    Example: see `rans_encode_many`.
    """
    sizes = [integer("sizes", n, 0, 2**62) for n in sizes]
    for block, n in zip(blocks, sizes, strict=True):
        _check_block("data", block, n, first=blocks[0])
    with room_for(sum(sizes)):
        if blocks and on_gpu(blocks[0].data):
            return _on_gpu().rans_decode_many(blocks, sizes)
        each = zip(blocks, sizes, strict=True)
        return [rans_decode(b.data, b.contexts, b.frequencies, b.precision, n, states=b.states) for b, n in each]


def _on_gpu() -> GpuBackEnd:
    return cast("GpuBackEnd", module_of("rans", "gpu"))


def _check_block(name: str, block: Block, n: int | None = None, first: Block | None = None) -> None:
    """Raise BadArgumentError for what no back end codes.

    n is the number of symbols, if these are not the data.
    """
    data = array(name, block.data, ("uint8",), 1)
    n = data.shape[0] if n is None else n
    if block.contexts is not None:
        array("contexts", block.contexts, ("uint8",), 1)
        if block.contexts.shape[0] != n:
            raise BadArgumentError(f"contexts has {block.contexts.shape[0]} elements; there are {n} symbols")
        same_device("contexts", block.contexts, name, data)
    if first is not None:
        same_device(name, data, f"the first {name}", first.data)
    _check_table("frequencies", array("frequencies", block.frequencies, ("uint32",), 2))
    if on_gpu(block.frequencies):
        same_device("frequencies", block.frequencies, name, data)
    states, precision = block.states, integer("precision", block.precision, *PRECISIONS)
    if states not in (STATES, WIDE_STATES) or (states == WIDE_STATES and precision != WIDE_PRECISION):
        raise BadArgumentError(
            f"states is {states!r} with precision {precision}; {STATES} are possible, and {WIDE_STATES} with precision "
            f"{WIDE_PRECISION}"
        )


def coding_cost(counts: Array, frequencies: Array, precision: int) -> float:
    """Bits that `rans_encode` spends on symbols with these counts, without its initial states.

    `sum(counts * (precision - log2(frequencies)))`; infinite if a counted symbol has frequency zero.

    Args:
        counts: int64[C, S] (or narrower integers).
        frequencies: uint32[C, S].
        precision: 8 ... 16.

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> coding_cost(np.asarray([[3, 1]]), np.asarray([[192, 64]], np.uint32), 8)  # doctest: +ELLIPSIS
        3.245...

    Source: Shannon (1948).
    """
    counts = array("counts", counts, COUNTS, 2, host=True)
    frequencies = array("frequencies", frequencies, ("uint32",), 2, host=True)
    if counts.shape != frequencies.shape:
        raise BadArgumentError(f"counts has shape {tuple(counts.shape)}; frequencies has {tuple(frequencies.shape)}")
    precision = integer("precision", precision, *PRECISIONS)
    return float(on_host().coding_cost(counts, frequencies, precision))


def entropy_bits(counts: Array) -> float:
    """Entropy in bits of all symbols with these counts, each row in its own context.

    `sum(counts * log2(n / counts))` with n the sum of a row, a lower bound for every table of frequencies.

    Args:
        counts: int64[C, S], or int64[S] for a single row (or narrower integers), 0 ... 2**48 each.

    Raises:
        BadArgumentError: wrong dtype or shape, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> entropy_bits(np.asarray([[2, 2, 0], [0, 7, 0]]))
        4.0

    Source: Shannon (1948).
    """
    counts = array("counts", counts, COUNTS, 1 if getattr(counts, "ndim", 2) == 1 else 2, host=True)
    return float(on_host().entropy_bits(counts))


def pack_frequencies(frequencies: Array, precision: int) -> bytes:
    """Encode a table of frequencies as bytes.

    Args:
        frequencies: uint32[C, S]; each row sums to 0 or `2**precision`.
        precision: 8 ... 16.

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> table = np.asarray([[192, 64], [0, 256]], np.uint32)
        >>> unpack_frequencies(pack_frequencies(table, 8), 2, 2, 8).tolist()
        [[192, 64], [0, 256]]
    """
    _check_table("frequencies", array("frequencies", frequencies, ("uint32",), 2, host=True))
    precision = integer("precision", precision, *PRECISIONS)
    return bytes(on_host().pack_frequencies(frequencies, precision))


def unpack_frequencies(data: Array | bytes, C: int, S: int, precision: int) -> Array:
    """Decode a table of frequencies: the inverse of `pack_frequencies`.

    Args:
        data: uint8[m] or bytes; the table uses every byte.
        C: number of contexts (rows), 1 ... 256.
        S: number of symbols (columns), 1 ... 256.
        precision: 8 ... 16.

    Returns:
        uint32[C, S], of the same library as `data` (NumPy for bytes); each row sums to 0 or `2**precision`.

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.
        CorruptDataError: the bytes are not a table of this size.

    Example: see `pack_frequencies`.
    """
    data = stored_bytes(data)
    rows, columns = integer("C", C, 1, 256), integer("S", S, 1, 256)
    precision = integer("precision", precision, *PRECISIONS)
    return on_host().unpack_frequencies(data, rows, columns, precision)


def _check_table(name: str, table: Array) -> None:
    rows, columns = table.shape
    if not (1 <= rows <= 256 and 1 <= columns <= 256):
        raise BadArgumentError(f"{name} has shape {(rows, columns)}; 1 ... 256 contexts and symbols are needed")
