"""Run-length coding with sign-marked tokens.

A run is stored as its negated value, followed by its length if that is greater than one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..backend.arguments import array, integer, room_for
from ..backend.arrays import Array
from ..backend.dispatch import OnHost


class HostBackEnd(Protocol):
    """Functions of the back ends on the host."""

    def rle_encode(self, values: Array) -> Array: ...
    def rle_decode(self, tokens: Array, n: int) -> Array: ...


on_host = OnHost[HostBackEnd]("runlength")

if TYPE_CHECKING:
    from . import cpu, reference

    _ON_HOST: tuple[HostBackEnd, ...] = (reference, cpu)

LONGEST = 2**31 - 1
"""The longest run of one length token; a longer run is split."""


def rle_encode(values: Array) -> Array:
    """Encode the runs of `values` as signed tokens.

    Every maximal run of a value v becomes the token -v (zero or negative), followed by its length (positive) if that is
    greater than one. A run of more than 2**31 - 1 becomes runs of 2**31 - 1 and a rest.

    Args:
        values: uint8[n], any n.

    Returns:
        int32[t] tokens, t <= n, for `rle_decode`.

    Raises:
        BadArgumentError: wrong dtype or shape, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> rle_encode(np.asarray([0, 0, 0, 5, 0, 7, 7], np.uint8)).tolist()
        [0, 3, -5, 0, -7, 2]

    Source: Inshrinkerator, section 6, "Encoding Delta".
    """
    values = array("values", values, ("uint8",), 1, host=True)
    return on_host().rle_encode(values)


def rle_decode(tokens: Array, n: int) -> Array:
    """Return the values from their run tokens: the inverse of `rle_encode`.

    Tokens that `rle_encode` would not write are refused.

    Args:
        tokens: int32[t].
        n: number of values, >= 0; the length of the result.

    Returns:
        uint8[n].

    Raises:
        BadArgumentError: wrong dtype or shape, negative n, or an array on a GPU.
        CorruptDataError: the tokens are not those of n values: a length without a value, a length of one, two
            neighbouring runs of the same value, a value above 255, or a total other than n.

    Example:
        >>> import numpy as np
        >>> rle_decode(np.asarray([0, 3, -5, 0, -7, 2], np.int32), 7).tolist()
        [0, 0, 0, 5, 0, 7, 7]

    Source: Inshrinkerator, section 6.
    """
    tokens = array("tokens", tokens, ("int32",), 1, host=True)
    n = integer("n", n, 0, 2**62)
    with room_for(n):
        return on_host().rle_decode(tokens, n)
