"""Row-wise quantization on the CPU: a row stays in the first-level cache during the search."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend.arrays import Array, dtype_name, is_torch, like, to_numpy
from ..backend.jit import njit, njit_in_place, njit_inline
from . import ERROR_STEPS, KMEANS_STEPS, search_steps, unknown_code

SHIFTER = np.float32(1.5 * 2**23)
"""Adding and subtracting this rounds a float32 of magnitude up to 2**22 to a whole number, halves to even."""

ERROR_UNIT = np.float32(ERROR_STEPS)
KMEANS_UNIT = np.float32(KMEANS_STEPS)
ZERO = np.float32(0)
NAN = np.float32(np.nan)
METHODS = {"symmetric": 0, "asymmetric": 1, "adaptive": 2}


def as_float32(x: Array) -> np.ndarray[Any, Any]:
    """Convert x to contiguous float32, rounded to nearest; out of range becomes infinity."""
    if is_torch(x):
        import torch

        t: np.ndarray[Any, Any] = x.detach().to(torch.float32).contiguous().numpy()
        return t
    a = to_numpy(x)
    if dtype_name(x) == "bfloat16":
        return (a.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(all="ignore"):
        return a.astype(np.float32, copy=False)


def row_quantize(
    x: Array, bits: int, method: str = "adaptive", *, num_bins: int = 25, ratio: float = 1.0
) -> tuple[Array, Array, Array]:
    """See `shrinkpoint.kernels.rows.row_quantize`."""
    rows = as_float32(x)
    codes = np.empty(rows.shape, np.uint8)
    scale, minimum = np.empty(rows.shape[0], np.float32), np.empty(rows.shape[0], np.float32)
    steps = search_steps(num_bins, ratio)
    _quantize(rows, np.float32(2**bits - 1), METHODS[method], num_bins, steps, codes, scale, minimum)
    return like(codes, x), like(scale, x), like(minimum, x)


def row_dequantize(codes: Array, scale: Array, minimum: Array) -> Array:
    """See `shrinkpoint.kernels.rows.row_dequantize`."""
    c = to_numpy(codes)
    out = np.empty(c.shape, np.float32)
    _dequantize(c, to_numpy(scale), to_numpy(minimum), out)
    return like(out, codes)


def row_kmeans(x: Array, bits: int, *, iterations: int = 15) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.rows.row_kmeans`."""
    rows = as_float32(x)
    codes = np.empty(rows.shape, np.uint8)
    codebook = np.empty((rows.shape[0], 2**bits), np.float32)
    _kmeans(rows, bits, iterations, codes, codebook)
    return like(codes, x), like(codebook, x)


def row_lookup(codes: Array, codebook: Array) -> Array:
    """See `shrinkpoint.kernels.rows.row_lookup`."""
    c, book = to_numpy(codes), to_numpy(codebook)
    top = int(c.max()) if c.size else 0
    if top >= book.shape[1]:
        raise unknown_code(top, book.shape[1])
    out = np.empty(c.shape, np.float32)
    _lookup(c, book, out)
    return like(out, codes)


@njit_inline
def _ends(row: Any) -> Any:
    """Minimum and maximum of a row, and whether all of it is finite; zeros lose their sign."""
    lowest, highest = np.float32(np.inf), np.float32(-np.inf)
    finite = True
    for d in range(row.size):
        v = row[d]
        finite &= np.abs(v) < np.float32(np.inf)
        lowest = v if v < lowest else lowest
        highest = v if v > highest else highest
    return lowest + ZERO, highest + ZERO, finite


@njit_inline
def _cost(y: Any, top: Any, bins: Any, i: Any, j: Any) -> Any:
    """Squared error E(i, j) of quantizing y over [i / bins, (bins - j) / bins]."""
    n = np.float32(bins)
    a = np.float32(i) / n
    r = np.float32(bins - j) / n - a
    scale = r / top
    inverse = top / r if r > ZERO else ZERO
    total = np.int64(0)
    for d in range(y.size):
        t = (y[d] - a) * inverse
        t = t if t > ZERO else ZERO
        t = t if t < top else top
        q = (t + SHIFTER) - SHIFTER
        product = q * scale
        v = product + a
        e = (v - y[d]) * ERROR_UNIT
        k = np.int64(np.int32((e + SHIFTER) - SHIFTER))
        total += k * k
    return total


@njit_inline
def _search(y: Any, top: Any, bins: Any, steps: Any) -> Any:
    """Run the greedy search; return how many bins to cut off below and above."""
    i, j = 0, 0
    best, best_i, best_j = _cost(y, top, bins, 0, 0), 0, 0
    for _ in range(steps):
        up, down = _cost(y, top, bins, i + 1, j), _cost(y, top, bins, i, j + 1)
        if up < down:
            i, cost = i + 1, up
        else:
            j, cost = j + 1, down
        if cost < best:
            best, best_i, best_j = cost, i, j
    return best_i, best_j


@njit
def _quantize(rows: Any, top: Any, method: Any, bins: Any, steps: Any, codes: Any, scales: Any, minima: Any) -> None:
    y = np.empty(rows.shape[1], np.float32)
    for r in range(rows.shape[0]):
        row, out = rows[r], codes[r]
        if row.size == 0:
            scales[r], minima[r] = ZERO, ZERO
            continue
        low, high, finite = _ends(row)
        if method == 0:
            high = max(high, -low)
            low = -high + ZERO
        width = high - low
        if not (finite and width < np.float32(np.inf)):
            out[:] = 0
            scales[r], minima[r] = NAN, NAN
            continue
        if method == 2 and width > ZERO:
            for d in range(row.size):
                y[d] = (row[d] - low) / width
            i, j = _search(y, top, bins, steps)
            step = width / np.float32(bins)
            below, above = np.float32(i) * step, np.float32(j) * step
            low, high = low + below, high - above
        scale = (high - low) / top if high > low else ZERO
        scales[r], minima[r] = scale, low
        if scale > ZERO:
            for d in range(row.size):
                t = (row[d] - low) / scale
                t = t if t > ZERO else ZERO
                t = t if t < top else top
                out[d] = np.uint8(np.int32((t + SHIFTER) - SHIFTER))
        else:
            out[:] = 0


@njit_in_place
def _dequantize(codes: Any, scales: Any, minima: Any, out: Any) -> None:
    for r in range(codes.shape[0]):
        source, target = codes[r], out[r]
        scale, low = scales[r], minima[r]
        for d in range(source.size):
            product = np.float32(source[d]) * scale
            target[d] = product + low


@njit_inline
def _nearest(value: Any, centres: Any, bits: Any) -> Any:
    """Number of midpoints below `value`, by bisection over the ascending centres."""
    low = 0
    half = 1 << bits >> 1
    while half:
        if 2 * value > centres[low + half - 1] + centres[low + half]:
            low += half
        half >>= 1
    return low


@njit
def _kmeans(rows: Any, bits: Any, iterations: Any, codes: Any, codebook: Any) -> None:
    entries = 1 << bits
    y = np.empty(rows.shape[1], np.int64)
    centres, sums, counts = np.empty(entries, np.int64), np.empty(entries, np.int64), np.empty(entries, np.int64)
    for r in range(rows.shape[0]):
        row = rows[r]
        if row.size == 0:
            codebook[r] = ZERO
            continue
        low, high, finite = _ends(row)
        width = high - low
        if not (finite and width < np.float32(np.inf)):
            codes[r] = 0
            codebook[r] = NAN
            continue
        for d in range(row.size):
            t = (row[d] - low) / width if width > ZERO else ZERO
            y[d] = np.int64((t * KMEANS_UNIT + SHIFTER) - SHIFTER)
        for c in range(entries):
            centres[c] = (c * KMEANS_STEPS) // (entries - 1)
        for _ in range(iterations):
            sums[:] = 0
            counts[:] = 0
            for d in range(row.size):
                c = _nearest(y[d], centres, bits)
                sums[c] += y[d]
                counts[c] += 1
            moved = False
            for c in range(entries):
                if counts[c]:
                    mean = (2 * sums[c] + counts[c]) // (2 * counts[c])
                    moved |= mean != centres[c]
                    centres[c] = mean
            if not moved:
                break
        for d in range(row.size):
            codes[r, d] = np.uint8(_nearest(y[d], centres, bits))
        for c in range(entries):
            product = (np.float32(centres[c]) / KMEANS_UNIT) * width
            codebook[r, c] = product + low


@njit_in_place
def _lookup(codes: Any, codebook: Any, out: Any) -> None:
    for r in range(codes.shape[0]):
        for d in range(codes.shape[1]):
            out[r, d] = codebook[r, codes[r, d]]
