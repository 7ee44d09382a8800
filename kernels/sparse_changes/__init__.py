"""Coding of a few changes among many symbols, without a table of frequencies.

The reader has the expected symbols, such as those of the parent checkpoint. The stream holds the positions of the
symbols that differ, and the new symbols. The distances between changes are coded as if every remaining element were
equally likely to change. This takes the logarithm of the number of possible positions, and no table. It suits a few
changes among millions, for which the precision of a static coder is too low, and arrays smaller than such a table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..backend.arguments import array, stored_bytes
from ..backend.dispatch import OnHost
from ..errors import BadArgumentError

if TYPE_CHECKING:
    from ..backend.arrays import Array
    from . import cpu, reference


class HostBackEnd(Protocol):
    """Functions of the back ends on the host."""

    def rare_encode(self, symbols: Array, expected: Array) -> Array: ...
    def rare_decode(self, data: Array, expected: Array) -> Array: ...


on_host = OnHost[HostBackEnd]("sparse_changes")

if TYPE_CHECKING:
    _ON_HOST: tuple[HostBackEnd, ...] = (reference, cpu)

LONGEST = 2**31 - 1
"""Elements that one stream can hold."""


def rare_encode(symbols: Array, expected: Array) -> Array:
    """Encode the elements of `symbols` that differ from `expected`.

    k changes among n elements take about `log2(n choose k)` bits for their positions and one or two adaptive yes/no
    decisions each for the new symbols: whether the symbol is a neighbour of the expected one, and which.

    Args:
        symbols: uint8[n], n < 2**31.
        expected: uint8[n], known to the reader as well, such as the levels of the checkpoint before.

    Returns:
        uint8[bytes]; empty if every symbol equals its expected one.

    Raises:
        BadArgumentError: wrong dtypes or shapes, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> before = np.full(1_000_000, 7, np.uint8)
        >>> after = before.copy()
        >>> after[[5, 400_000, 999_999]] = 8
        >>> rare_encode(after, before).size
        9
        >>> bool((rare_decode(rare_encode(after, before), before) == after).all())
        True

    Source: the digits of a geometric variable are independent, so each is coded with a known probability. Counting the
    remaining elements and changes makes it an enumerative code (Cover 1973). docs/entropy.md defines the bytes.
    """
    array("symbols", symbols, ("uint8",), 1, host=True)
    array("expected", expected, ("uint8",), 1, host=True)
    _check(symbols.shape[0], expected.shape[0])
    return on_host().rare_encode(symbols, expected)


def rare_decode(data: Array | bytes, expected: Array) -> Array:
    """Return the symbols that `rare_encode` encoded.

    Bytes that `rare_encode` would not write are refused.

    Args:
        data: uint8[bytes], or bytes.
        expected: as given to `rare_encode`.

    Returns:
        uint8[n].

    Raises:
        BadArgumentError: wrong dtype or shape, or an array on a GPU.
        CorruptDataError: the bytes do not encode the changes of n elements.

    Example: see `rare_encode`.
    """
    data, expected = stored_bytes(data), array("expected", expected, ("uint8",), 1, host=True)
    _check(expected.shape[0], expected.shape[0])
    return on_host().rare_decode(data, expected)


def _check(n: int, expected: int) -> None:
    if n != expected:
        raise BadArgumentError(f"symbols have {n} elements and expected {expected}")
    if n > LONGEST:
        raise BadArgumentError(f"{n} elements; at most {LONGEST} fit one stream")
