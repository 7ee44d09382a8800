"""Cluster quantization on the CPU in three passes: sums, labels with extremes, codes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend.arrays import Array, like, to_numpy
from ..backend.instructions import local_array
from ..backend.jit import njit_in_place, njit_inline
from ..rows.cpu import as_float32
from . import SHIFT, SUM_BLOCK, Clusters, boundaries, dynamic_map, first_code, ranges, thresholds, unknown_label

HALF = SUM_BLOCK // 2
BLOCK = 1024


def cluster_quantize(x: Array, clusters: int = 16) -> Clusters:
    """See `shrinkpoint.kernels.cluster.cluster_quantize`."""
    flat = as_float32(x).reshape(-1)
    partial = np.empty((2, -(-flat.size // SUM_BLOCK)), np.float64)
    _partial_sums(flat, partial)
    total, squares = _tree_sum(partial[0]), _tree_sum(partial[1])
    edges = boundaries(total, squares, flat.size, clusters)
    labels, codes = np.empty(flat.size, np.uint8), np.empty(flat.size, np.uint8)
    lowest, highest = np.full(clusters, np.inf, np.float32), np.full(clusters, -np.inf, np.float32)
    _label(flat, edges, labels, lowest, highest)
    scale, minimum = ranges(lowest, highest)
    divisor = np.where(scale > np.float32(0), scale, np.float32(1))  # if the range is 0, x - minimum is 0 too
    _encode(flat, labels, divisor, minimum, first_code(), thresholds(), codes)
    return Clusters(like(codes, x), like(labels, x), like(scale, x), like(minimum, x))


def cluster_dequantize(codes: Array, labels: Array, scale: Array, minimum: Array) -> Array:
    """See `shrinkpoint.kernels.cluster.cluster_dequantize`."""
    c, k, s, b = to_numpy(codes), to_numpy(labels), to_numpy(scale), to_numpy(minimum)
    top = int(k.max()) if k.size else 0
    if top >= s.size:
        raise unknown_label(top, s.size)
    out = np.empty(c.size, np.float32)
    _decode(c, k, s, b, dynamic_map(), out)
    return like(out, codes)


def _tree_sum(values: np.ndarray[Any, Any]) -> float:
    """Sum float64 values by the fixed tree, level after level."""
    while values.size > 1:
        sums = np.empty(-(-values.size // SUM_BLOCK), np.float64)
        _block_sums(values, sums)
        values = sums
    return float(values[0]) if values.size else 0.0


@njit_inline
def _fold(s: Any) -> Any:
    """Sum a block of 1024 by repeated halving."""
    half = s.size // 2
    while half:
        for i in range(half):
            s[i] += s[i + half]
        half //= 2
    return s[0]


@njit_in_place
def _block_sums(values: Any, sums: Any) -> None:
    s = local_array(SUM_BLOCK, np.float64)
    for k in range(sums.size):
        part = values[SUM_BLOCK * k : min(SUM_BLOCK * (k + 1), values.size)]
        for i in range(SUM_BLOCK):
            s[i] = part[i] if i < part.size else 0.0
        sums[k] = _fold(s)


@njit_in_place
def _partial_sums(x: Any, partial: Any) -> None:
    """Block sums of x and of its squares, exact in float64.

    The first halving happens while reading.
    """
    s, t = local_array(HALF, np.float64), local_array(HALF, np.float64)
    for k in range(partial.shape[1]):
        part = x[SUM_BLOCK * k : min(SUM_BLOCK * (k + 1), x.size)]
        if part.size == SUM_BLOCK:
            for i in range(HALF):
                a, b = np.float64(part[i]), np.float64(part[i + HALF])
                s[i] = a + b
                t[i] = a * a + b * b
        else:
            for i in range(HALF):
                a = np.float64(part[i] if i < part.size else 0.0)
                b = np.float64(part[i + HALF] if i + HALF < part.size else 0.0)
                s[i] = a + b
                t[i] = a * a + b * b
        partial[0, k], partial[1, k] = _fold(s), _fold(t)


@njit_in_place
def _label(x: Any, edges: Any, labels: Any, lowest: Any, highest: Any) -> None:
    """Label of each element and the extremes of each label, in cached blocks.

    A block is compared with every boundary, which vectorizes.
    """
    for start in range(0, x.size, BLOCK):
        stop = min(start + BLOCK, x.size)
        part, label = x[start:stop], labels[start:stop]
        for i in range(part.size):
            label[i] = 0
        for k in range(edges.size):
            edge = edges[k]
            for i in range(part.size):
                label[i] += np.uint8(1) if edge <= part[i] else np.uint8(0)
        for i in range(part.size):
            v, k = part[i], label[i]
            if v < lowest[k]:
                lowest[k] = v
            if v > highest[k]:
                highest[k] = v


@njit_in_place
def _encode(x: Any, labels: Any, divisor: Any, minimum: Any, first: Any, limits: Any, codes: Any) -> None:
    place = local_array(BLOCK, np.float32)
    pattern = place.view(np.uint32)
    for start in range(0, x.size, BLOCK):
        stop = min(start + BLOCK, x.size)
        part, label = x[start:stop], labels[start:stop]
        for i in range(part.size):
            k = label[i]
            place[i] = (part[i] - minimum[k]) / divisor[k]
        for i in range(part.size):
            code = first[(pattern[i] & np.uint32(0x7FFFFFFF)) >> np.uint32(SHIFT)]
            codes[start + i] = code + (np.uint8(1) if place[i] > limits[code] else np.uint8(0))


@njit_in_place
def _decode(codes: Any, labels: Any, scale: Any, minimum: Any, entries: Any, out: Any) -> None:
    for i in range(out.size):
        k = labels[i]
        product = entries[codes[i]] * scale[k]
        out[i] = product + minimum[k]
