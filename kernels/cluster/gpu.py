"""Cluster quantization on the GPU: sums by a fixed tree, labels with extremes, codes."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..backend.gpu_bits import order_key, single
from ..backend.launch import Launch, like, on, tensor
from . import SHIFT, SUM_BLOCK, Clusters, boundaries, dynamic_map, first_code, ranges, thresholds, unknown_label

if TYPE_CHECKING:
    from ..backend.arrays import Array

SUMS = Launch(block=4096, warps=8)
ELEMENTS = Launch(block=4096, warps=8)


@triton.jit
def folded(s, ROWS: tl.constexpr):
    """Sum each row of 1024 by repeated halving: s[i] + s[i + 512], and so on.

    A sum of two numbers does not depend on their order.
    """
    s = tl.sum(tl.reshape(s, (ROWS, 2, 512)), axis=1)
    s = tl.sum(tl.reshape(s, (ROWS, 2, 256)), axis=1)
    s = tl.sum(tl.reshape(s, (ROWS, 2, 128)), axis=1)
    s = tl.sum(tl.reshape(s, (ROWS, 2, 64)), axis=1)
    s = tl.sum(tl.reshape(s, (ROWS, 2, 32)), axis=1)
    s = tl.sum(tl.reshape(s, (ROWS, 2, 16)), axis=1)
    s = tl.sum(tl.reshape(s, (ROWS, 2, 8)), axis=1)
    s = tl.sum(tl.reshape(s, (ROWS, 2, 4)), axis=1)
    s = tl.sum(tl.reshape(s, (ROWS, 2, 2)), axis=1)
    return tl.sum(s, axis=1)


@triton.jit
def moments_kernel(x_ptr, n: tl.int64, blocks: tl.int64, sums_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of x and of x * x over blocks of 1024, in float64: sums[0, block] and sums[1, block]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = row[:, None] * 1024 + tl.arange(0, 1024)[None, :]
    x = single(tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)).to(tl.float64)
    tl.store(sums_ptr + row, folded(x, ROWS), mask=row < blocks)
    tl.store(sums_ptr + blocks + row, folded(x * x, ROWS), mask=row < blocks)


@triton.jit
def fold_kernel(values_ptr, n: tl.int64, blocks: tl.int64, sums_ptr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums over blocks of 1024 of both rows of `values` [2, n]: the next level of the tree."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offsets = row[:, None] * 1024 + tl.arange(0, 1024)[None, :]
    first = tl.load(values_ptr + offsets, mask=offsets < n, other=0.0)
    second = tl.load(values_ptr + n + offsets, mask=offsets < n, other=0.0)
    tl.store(sums_ptr + row, folded(first, ROWS), mask=row < blocks)
    tl.store(sums_ptr + blocks + row, folded(second, ROWS), mask=row < blocks)


def _sums(x: torch.Tensor) -> tuple[float, float]:
    """Sums S1 and S2 of all elements; the host waits for them."""
    values, kernel = x, moments_kernel
    n = x.numel()
    while n > 1 or kernel is moments_kernel:
        blocks = -(-n // SUM_BLOCK)
        sums = torch.empty((2, blocks), dtype=torch.float64, device=x.device)
        with on(x):
            kernel[SUMS.grid(n)](
                # inputs
                values,
                n,
                blocks,
                # outputs
                sums,
                # constants
                ROWS=SUMS.size(n) // SUM_BLOCK,
                **SUMS.constants(n),
            )
        values, kernel, n = sums, fold_kernel, blocks
    total, squares = values.reshape(-1).tolist()
    return total, squares


@triton.jit
def label_kernel(
    x_ptr, edges_ptr, n: tl.int64, clusters: tl.int32, labels_ptr, lowest_ptr, highest_ptr, BLOCK: tl.constexpr
):
    """Label each element and find the extremes of each label.

    Extremes are order keys, by one atomic per program and label.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = single(tl.load(x_ptr + offsets, mask=inside, other=0.0))
    label = tl.zeros((BLOCK,), tl.int32)
    for k in range(clusters - 1):
        label += (tl.load(edges_ptr + k) <= x).to(tl.int32)
    tl.store(labels_ptr + offsets, label.to(tl.uint8), mask=inside)
    key = order_key((x + 0.0).to(tl.int32, bitcast=True), 32)
    for k in range(clusters):
        mine = inside & (label == k)
        low = tl.min(tl.where(mine, key, 2147483647), axis=0)
        high = tl.max(tl.where(mine, key, -2147483648), axis=0)
        tl.atomic_min(lowest_ptr + k, low, mask=low <= high, sem="relaxed")
        tl.atomic_max(highest_ptr + k, high, mask=low <= high, sem="relaxed")


@triton.jit
def encode_kernel(
    x_ptr,
    labels_ptr,
    scale_ptr,
    minimum_ptr,
    first_ptr,
    limits_ptr,
    n: tl.int64,
    codes_ptr,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Map each element's position in its cluster's range to the nearest map entry."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = single(tl.load(x_ptr + offsets, mask=inside, other=0.0))
    label = tl.load(labels_ptr + offsets, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scale_ptr + label)
    positive = scale > 0.0
    shifted = x - tl.load(minimum_ptr + label)
    place = tl.where(inside & positive, tl.div_rn(shifted, tl.where(positive, scale, 1.0)), 0.0)
    code = tl.load(first_ptr + ((place.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >> SHIFT)).to(tl.int32)
    code += (place > tl.load(limits_ptr + code)).to(tl.int32)
    tl.store(codes_ptr + offsets, code.to(tl.uint8), mask=inside)


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tables first_code, thresholds and dynamic_map on a device, 18 KB that stay there."""
    first, limits, entries = (
        torch.tensor(table, device=device) for table in (first_code(), thresholds(), dynamic_map())
    )
    return first, limits, entries


def cluster_quantize(x: Array, clusters: int = 16) -> Clusters:
    """See `shrinkpoint.kernels.cluster.cluster_quantize`."""
    t = tensor(x).reshape(-1)
    n = t.numel()
    total, squares = _sums(t) if n else (0.0, 0.0)
    edges = torch.from_numpy(boundaries(total, squares, n, clusters)).to(t.device)
    labels = torch.empty(n, dtype=torch.uint8, device=t.device)
    codes = torch.empty(n, dtype=torch.uint8, device=t.device)
    none = torch.tensor([[float("inf")], [-float("inf")]]).view(torch.int32).to(t.device)
    keys = _order_keys(none).repeat(1, clusters)
    if n:
        with on(t):
            label_kernel[ELEMENTS.grid(n)](
                # inputs
                t,
                edges,
                n,
                clusters,
                # outputs
                labels,
                keys[0],
                keys[1],
                # constants
                **ELEMENTS.constants(n),
            )
    lowest, highest = _order_keys(keys).view(torch.float32).cpu().numpy()
    scale, minimum = (torch.from_numpy(v).to(t.device) for v in ranges(lowest, highest))
    first, limits, _ = _tables(t.device)
    if n:
        with on(t):
            encode_kernel[ELEMENTS.grid(n)](
                # inputs
                t,
                labels,
                scale,
                minimum,
                first,
                limits,
                n,
                # outputs
                codes,
                # constants
                SHIFT=SHIFT,
                **ELEMENTS.constants(n),
            )
    return Clusters(like(codes, x), like(labels, x), like(scale, x), like(minimum, x))


def _order_keys(patterns: torch.Tensor) -> torch.Tensor:
    """Map int32 patterns by `bits.order_key`; its own inverse."""
    return torch.where(patterns < 0, patterns ^ 0x7FFFFFFF, patterns)


@triton.jit
def decode_kernel(
    codes_ptr,
    labels_ptr,
    scale_ptr,
    minimum_ptr,
    entries_ptr,
    n: tl.int64,
    clusters: tl.int32,
    out_ptr,
    top_ptr,
    BLOCK: tl.constexpr,
):
    """Compute map[code] * scale[label] + minimum[label] for each element.

    `top` becomes the highest label without a cluster.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    code = tl.load(codes_ptr + offsets, mask=inside, other=0).to(tl.int32)
    label = tl.load(labels_ptr + offsets, mask=inside, other=0).to(tl.int32)
    known = label < clusters
    product = tl.load(entries_ptr + code) * tl.load(scale_ptr + label, mask=known, other=0.0)
    tl.store(out_ptr + offsets, product + tl.load(minimum_ptr + label, mask=known, other=0.0), mask=inside)
    top = tl.max(label, axis=0)
    tl.atomic_max(top_ptr, top, mask=top >= clusters, sem="relaxed")


def cluster_dequantize(codes: Array, labels: Array, scale: Array, minimum: Array) -> Array:
    """See `shrinkpoint.kernels.cluster.cluster_dequantize`."""
    c, k, s, b = tensor(codes), tensor(labels), tensor(scale), tensor(minimum)
    out = torch.empty(c.numel(), dtype=torch.float32, device=c.device)
    if c.numel():
        top = torch.zeros(1, dtype=torch.int32, device=c.device)
        with on(c):
            decode_kernel[ELEMENTS.grid(c.numel())](
                # inputs
                c,
                k,
                s,
                b,
                _tables(c.device)[2],
                c.numel(),
                s.numel(),
                # outputs
                out,
                top,
                # constants
                **ELEMENTS.constants(c.numel()),
            )
        found = int(top.item())
        if found >= s.numel():
            raise unknown_label(found, s.numel())
    return like(out, codes)
