"""Log-bucket indices split into octave, sign and fraction: separate byte streams to code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import array, instance, integer, same_device, shown
from .arrays import back_end, on_gpu
from .errors import BadArgumentError

if TYPE_CHECKING:
    from .arrays import Array

MAX_OCTAVES = 254
"""Number of octaves that fit a byte together with the symbol for zero."""
_LARGEST = 2**30 - 1
"""Largest J: an index goes up to 2 J + 1 and is an int32."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Octaves:
    """Octave, sign and fraction of n log-bucket indices, m of them finite and nonzero.

    The arrays are NumPy, because the entropy coder runs on the host.

    Args:
        low: lowest octave present, counted from the smallest subnormal's; 0 if m is 0.
        high: highest octave present; 0 if m is 0.
        symbols: uint8 [n], 0 for zero, infinities and NaNs, else 1 + octave - low.
        negative: uint8 [m], 1 for negative elements.
        fraction: uint8 [ceil(bits / 8), m], bytes of the sub-bucket number, least significant first.
        odd: int64, positions of infinities and NaNs, ascending.
    """

    low: int
    high: int
    symbols: Bytes
    negative: Bytes
    fraction: Bytes
    odd: np.ndarray[Any, np.dtype[np.int64]]


def split_octaves(index: Array, bits: int, buckets: int) -> Octaves | None:
    """Split the indices of `bucket_index` into octave, sign and fraction.

    None if they span more than `MAX_OCTAVES` octaves.

    Indices on a GPU are split there, and only the streams are copied to the host.

        j = |index - buckets|;  octave = (j - 1) >> bits;  fraction = (j - 1) mod 2**bits;  negative = index < buckets

    Args:
        index: int32 [n], as `logbucket.bucket_index` gives them: 0 ... 2 J + 1, J = `buckets`.
        bits: log2 of the sub-buckets an octave, 0 ... 16.
        buckets: J, `FloatFormat.buckets(bits)`; 0 ... 2**30 - 1.

    Raises:
        BadArgumentError: another dtype or shape, or bits or buckets out of range.

    Example:
        >>> o = split_octaves(np.array([10, 12, 7], dtype=np.int32), 1, 10)
        >>> o.symbols.tolist(), o.negative.tolist(), o.fraction.tolist()
        ([0, 1, 2], [0, 1], [[1, 0]])
    """
    array("index", index, ("int32",), 1)
    bits, buckets = _checked(bits, buckets)
    result: Octaves | None = back_end(index, "float_split").split_octaves(index, bits, buckets)
    return result


def join_octaves(octaves: Octaves, bits: int, buckets: int) -> Array:
    """Return the indices int32 [n] from their parts: the inverse of `split_octaves`.

    Infinities and NaNs get the index of zero.

    Args:
        octaves: consistent: m is the number of nonzero symbols; any bytes are allowed. Where `symbols`, `negative` and
            `fraction` are arrays on a GPU, all on the same one, the indices are made there.
        bits: as in `split_octaves`.
        buckets: as in `split_octaves`.

    Raises:
        BadArgumentError: m is not the number of nonzero symbols, another dtype or shape, or a number out of range.
    """
    instance("octaves", octaves, Octaves)
    bits, buckets = _checked(bits, buckets)
    integer("octaves.low", octaves.low, 0, _LARGEST)
    for name, ndim in (("symbols", 1), ("negative", 1), ("fraction", 2)):
        stream = getattr(octaves, name)
        array(f"octaves.{name}", stream, ("uint8",), ndim)
        if not isinstance(stream, np.ndarray) and not on_gpu(stream):
            raise BadArgumentError(f"octaves.{name} is {shown(stream)}; NumPy, or an array on a GPU, is needed")
        same_device("octaves.symbols", octaves.symbols, f"octaves.{name}", stream)
    if octaves.fraction.shape[0] != (bits + 7) // 8:
        raise BadArgumentError(
            f"octaves.fraction has {octaves.fraction.shape[0]} planes; {(bits + 7) // 8} are needed for {bits} bits"
        )
    if isinstance(octaves.symbols, np.ndarray):  # on a GPU the kernel counts
        check_counts(octaves, int(np.count_nonzero(octaves.symbols)))
    return back_end(octaves.symbols, "float_split").join_octaves(octaves, bits, buckets)


def check_counts(octaves: Octaves, m: int) -> None:
    """Raise BadArgumentError unless there are m signs and fractions."""
    if octaves.negative.shape[0] != m or octaves.fraction.shape[1] != m:
        signs, fractions = octaves.negative.shape[0], tuple(octaves.fraction.shape)
        raise BadArgumentError(f"{m} symbols are nonzero; {signs} signs, {fractions}")


def _checked(bits: int, buckets: int) -> tuple[int, int]:
    return integer("bits", bits, 0, 16), integer("buckets", buckets, 0, _LARGEST)
