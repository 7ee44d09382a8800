"""Oracle of the run lengths: runs by their starts, tokens by a mask."""

from __future__ import annotations

from array_api_compat import array_namespace

from ..backend.arrays import Array
from ..errors import CorruptDataError
from . import LONGEST


def rle_encode(values: Array) -> Array:
    """See `shrinkpoint.kernels.runlength.rle_encode`."""
    return encode(values, LONGEST)


def rle_decode(tokens: Array, n: int) -> Array:
    """See `shrinkpoint.kernels.runlength.rle_decode`."""
    return decode(tokens, n, LONGEST)


def encode(values: Array, longest: int) -> Array:
    """Return the tokens of `values`, with runs cut at `longest`."""
    xp = array_namespace(values)
    n = values.shape[0]
    if n == 0:
        return xp.zeros(0, dtype=xp.int32)
    ends = xp.asarray([n], dtype=xp.int64)
    later = xp.astype(xp.nonzero(values[1:] != values[:-1])[0], xp.int64) + 1
    starts = xp.concat([ends - n, later])
    runs = xp.concat([later, ends]) - starts
    v = xp.astype(xp.take(values, starts), xp.int64)
    pieces = (runs + longest - 1) // longest
    last = runs - (pieces - 1) * longest
    first = xp.cumulative_sum(pieces) - pieces  # of each run among all pieces
    total = int(xp.sum(pieces))
    of_run = xp.repeat(xp.arange(runs.shape[0]), pieces)
    is_last = xp.arange(total) == xp.take(first + pieces - 1, of_run)
    length = xp.where(is_last, xp.take(last, of_run), longest)
    table = xp.stack([-xp.take(v, of_run), length], axis=1)
    kept = xp.stack([length > 0, length > 1], axis=1)
    return xp.astype(xp.reshape(table, (-1,))[xp.reshape(kept, (-1,))], xp.int32)


def decode(tokens: Array, n: int, longest: int) -> Array:
    """Return the n values of `tokens`, with runs cut at `longest`."""
    xp = array_namespace(tokens)
    t = xp.astype(tokens, xp.int64)
    wrong = CorruptDataError(f"the tokens are not the run lengths of {n} values")
    if t.shape[0] == 0:
        if n:
            raise wrong
        return xp.zeros(0, dtype=xp.uint8)
    places = xp.nonzero(t <= 0)[0]
    v = -xp.take(t, places)
    after = xp.take(xp.concat([t[1:], xp.zeros(1, dtype=xp.int64)]), places)
    runs = xp.where(after > 0, after, 1)
    if places.shape[0] == 0 or int(xp.sum(xp.astype(t > 0, xp.int64))) != int(xp.sum(xp.astype(after > 0, xp.int64))):
        raise wrong  # a length that follows no value
    if bool(xp.any(after == 1)) or bool(xp.any(after > longest)) or bool(xp.any(v > 255)):
        raise wrong
    if bool(xp.any((v[1:] == v[:-1]) & (runs[:-1] != longest))):
        raise wrong  # two runs that are one
    if int(xp.sum(runs)) != n:
        raise wrong
    return xp.astype(xp.repeat(v, runs), xp.uint8)
