"""Oracle of cluster quantization: sums by halving, nearest map entry by 256 comparisons."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ..backend.arrays import Array
from . import SUM_BLOCK, Clusters, boundaries, dynamic_map, ranges, unknown_label


def cluster_quantize(x: Array, clusters: int = 16) -> Clusters:
    """See `shrinkpoint.kernels.cluster.cluster_quantize`."""
    xp = array_namespace(x)
    with np.errstate(over="ignore", invalid="ignore"):
        flat = xp.reshape(xp.astype(x, xp.float32), (-1,))
        wide = xp.astype(flat, xp.float64)
        edges = boundaries(_tree_sum(xp, wide), _tree_sum(xp, wide * wide), flat.shape[0], clusters)
    labels = xp.zeros(flat.shape, dtype=xp.int64)
    for edge in edges.tolist():
        labels = labels + xp.astype(edge <= flat, xp.int64)
    lowest, highest = np.full(clusters, np.inf, np.float32), np.full(clusters, -np.inf, np.float32)
    for k in range(clusters):
        members = flat[labels == k]
        if members.shape[0]:
            lowest[k], highest[k] = float(xp.min(members)), float(xp.max(members))
    host_scale, host_minimum = ranges(lowest, highest)
    scale, minimum = xp.asarray(host_scale), xp.asarray(host_minimum)
    s, b = xp.take(scale, labels), xp.take(minimum, labels)
    place = xp.where(s > 0.0, (flat - b) / xp.where(s > 0.0, s, 1.0), 0.0)
    entries = xp.astype(xp.asarray(dynamic_map().copy()), xp.float64)
    codes = xp.zeros(flat.shape, dtype=xp.int64)
    if flat.shape[0]:
        codes = xp.argmin(xp.abs(xp.astype(place, xp.float64)[:, None] - entries[None, :]), axis=1)
    return Clusters(xp.astype(codes, xp.uint8), xp.astype(labels, xp.uint8), scale, minimum)


def cluster_dequantize(codes: Array, labels: Array, scale: Array, minimum: Array) -> Array:
    """See `shrinkpoint.kernels.cluster.cluster_dequantize`."""
    xp = array_namespace(codes)
    label = xp.astype(labels, xp.int64)
    top = int(xp.max(label)) if label.shape[0] else 0
    if top >= scale.shape[0]:
        raise unknown_label(top, scale.shape[0])
    entries = xp.asarray(dynamic_map().copy())
    with np.errstate(all="ignore"):
        product = xp.take(entries, xp.astype(codes, xp.int64)) * xp.take(scale, label)
        return product + xp.take(minimum, label)


def _tree_sum(xp: Any, values: Array) -> float:
    """Sum float64 values by the fixed tree."""
    if values.shape[0] == 0:
        return 0.0
    while values.shape[0] > 1:
        rows = -(-values.shape[0] // SUM_BLOCK)
        padding = xp.zeros(rows * SUM_BLOCK - values.shape[0], dtype=xp.float64)
        table = xp.reshape(xp.concat([values, padding]), (rows, SUM_BLOCK))
        while table.shape[1] > 1:
            half = table.shape[1] // 2
            table = table[:, :half] + table[:, half:]
        values = table[:, 0]
    return float(values[0])
