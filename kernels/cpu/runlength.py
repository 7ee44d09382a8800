"""Run lengths on the CPU: the starts of runs are collected without a branch, the tokens written run by run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import like
from ..errors import CorruptDataError
from ..runlength import LONGEST
from ..sequential import compiled
from .jit import njit

if TYPE_CHECKING:
    from ..arrays import Array

NumPy = np.ndarray[Any, Any]
BLOCK = 4096
"""Values looked at before their runs are written; the scratch list of starts stays in the first-level cache."""


@njit
def _encode(values: NumPy, tokens: NumPy, starts: NumPy, longest: int) -> int:
    n = values.size
    if n == 0:
        return 0
    written = 0
    begin = 0  # of the run that is open
    block = np.int64(starts.size)
    low = 1
    while low < n:
        high = min(low + block, n)
        found = np.uint64(0)
        for i in range(low, high):
            starts[found] = i
            found += np.uint64(values[i] != values[i - 1])
        for k in range(np.int64(found)):
            run = starts[k] - begin
            value = -np.int32(values[begin])
            while run > longest:
                tokens[written] = value
                tokens[written + 1] = longest
                written += 2
                run -= longest
            tokens[written] = value
            written += 1
            if run > 1:
                tokens[written] = run
                written += 1
            begin = starts[k]
        low = high
    run = n - begin
    value = -np.int32(values[begin])
    while run > longest:
        tokens[written] = value
        tokens[written + 1] = longest
        written += 2
        run -= longest
    tokens[written] = value
    written += 1
    if run > 1:
        tokens[written] = run
        written += 1
    return written


@njit
def _decode(tokens: NumPy, out: NumPy, longest: int) -> bool:
    n = np.int64(out.size)
    m = tokens.size
    at = np.int64(0)
    i = 0
    before = np.int64(-1)  # value that the previous run forbids here: its own, unless it was cut at the longest length
    while i < m:
        token = np.int64(tokens[i])
        i += 1
        if token > 0 or token < -255 or -token == before or at >= n:
            return False
        run = np.int64(1)
        if i < m and tokens[i] > 0:
            run = np.int64(tokens[i])
            i += 1
            if run == 1 or run > longest or run > n - at:
                return False
        value = np.uint8(-token)
        before = -token
        if run == longest:
            before = np.int64(-1)
        for k in range(at, at + run):
            out[k] = value
        at += run
    return at == n


def rle_encode(values: Array) -> Array:
    """See `kernels.runlength.rle_encode`."""
    v = compiled(values)
    tokens = np.empty(v.size + 1, np.int32)  # a run of r takes min(r, 2) tokens, so never more than v.size
    written = _encode(v, tokens, np.empty(BLOCK, np.int64), LONGEST)
    return like(tokens[:written].copy(), values)


def rle_decode(tokens: Array, n: int) -> Array:
    """See `kernels.runlength.rle_decode`."""
    t = compiled(tokens)
    if (n > 0) != (t.size > 0) or n > t.size * LONGEST:
        raise CorruptDataError(f"{t.size} run-length tokens cannot hold {n} values")
    out = np.empty(n, np.uint8)
    if not _decode(t, out, LONGEST):
        raise CorruptDataError(f"the tokens are not the run lengths of {n} values")
    return like(out, tokens)
