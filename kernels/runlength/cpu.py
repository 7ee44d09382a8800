"""Run lengths on the CPU: run starts are collected without branches, then written as tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend.arrays import Array, like, writeable
from ..backend.jit import njit_in_place, njit_inline
from ..errors import CorruptDataError
from . import LONGEST

NumPy = np.ndarray[Any, Any]
Int = Any  # a machine integer or truth value inside compiled code
BLOCK = 4096
"""Values per block, whose list of run starts stays in the first-level cache."""
SHORT = 16
"""Runs up to this length are written with one store of this many bytes."""


@njit_inline
def _write_run(tokens: NumPy, at: Int, value: Int, run: Int, longest: Int) -> Int:
    """Write the tokens of one run; return the next position."""
    while run > longest:
        tokens[at] = -value
        tokens[at + 1] = longest
        at += 2
        run -= longest
    tokens[at] = -value
    tokens[at + 1] = run  # counts if it exceeds one; a branch here could not be predicted
    return at + 1 + np.int64(run > 1)


@njit_in_place
def _encode(values: NumPy, tokens: NumPy, starts: NumPy, longest: Int) -> Int:
    """Fill `tokens` and return their number; `starts` is scratch space for run starts."""
    n = values.size
    if n == 0:
        return 0
    written = np.int64(0)
    begin = np.int64(0)  # of the run that is open
    block: Int = starts.size
    low: Int = 1
    while low < n:
        high = min(low + block, n)
        found = np.uint64(0)
        before = values[low - 1]
        for i in range(np.uint64(low), np.uint64(high)):  # unsigned, to avoid a check for negative indices
            starts[found] = i
            value = values[i]
            found += np.uint64(value != before)
            before = value
        for k in range(np.int64(found)):
            start = np.int64(starts[k])
            written = _write_run(tokens, written, np.int64(values[begin]), start - begin, longest)
            begin = start
        low = high
    return _write_run(tokens, written, np.int64(values[begin]), n - begin, longest)


@njit_in_place
def _decode(tokens: NumPy, out: NumPy, longest: Int) -> Int:
    """Fill `out`; return whether the tokens are those that `_encode` would write."""
    n = np.int64(out.size)
    m = np.int64(tokens.size)
    at = np.int64(0)
    i = np.int64(0)
    before = np.int64(-1)  # the value that the next run must not have: that of this run, unless this one was cut
    while i < m:
        value = -np.int64(tokens[i])
        i += 1
        if value < 0 or value > 255 or value == before or at >= n:
            return False
        run = np.int64(1)
        if i < m and tokens[i] > 0:
            run = np.int64(tokens[i])
            i += 1
            if run == 1 or run > longest or run > n - at:
                return False
        byte = np.uint8(value)
        start = np.uint64(at)
        if run <= SHORT and at + SHORT <= n:
            for k in range(SHORT):  # one store of fixed size; the next run overwrites the excess
                out[start + np.uint64(k)] = byte
        else:
            for k in range(start, start + np.uint64(run)):
                out[k] = byte
        before = value
        if run == longest:
            before = np.int64(-1)
        at += run
    return at == n


def rle_encode(values: Array) -> Array:
    """See `kernels.runlength.rle_encode`."""
    v = writeable(values)
    tokens = np.empty(v.size + 1, np.int32)  # a run of r takes min(r, 2) tokens, and one token is in excess
    written = _encode(v, tokens, np.empty(BLOCK, np.int64), LONGEST)
    return like(tokens[:written].copy(), values)


def rle_decode(tokens: Array, n: int) -> Array:
    """See `kernels.runlength.rle_decode`."""
    t = writeable(tokens)
    if (n > 0) != (t.size > 0) or n > t.size * LONGEST:
        raise CorruptDataError(f"{t.size} run-length tokens cannot hold {n} values")
    out = np.empty(n, np.uint8)
    if not _decode(t, out, LONGEST):
        raise CorruptDataError(f"the tokens are not the run lengths of {n} values")
    return like(out, tokens)
