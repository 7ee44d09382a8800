"""Cluster quantization on the GPU: sums by a fixed tree, labels with extremes, codes."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ..backend.arrays import Array
from ..backend.gpu import Launch, elements, like, on_device, order_key, single, tensor
from . import MOST, SHIFT, SUM_BLOCK, Clusters, boundaries, dynamic_map, first_code, ranges, thresholds, unknown_label

SUMS = Launch(block=8192, warps=8)
LABEL = Launch(block=1024, warps=1, rounds=16)
ELEMENTS = Launch(block=1024, warps=8)


@triton.jit
def folded(s, ROWS: tl.constexpr):
    """Sum each row of 64 by repeated halving: s[i] + s[i + 32], and so on.

    A sum of two numbers does not depend on their order.
    """
    s = tl.sum(tl.reshape(s, (ROWS, 2, 32)), axis=1)
    s = tl.sum(tl.reshape(s, (ROWS, 2, 16)), axis=1)
    s = tl.sum(tl.reshape(s, (ROWS, 2, 8)), axis=1)
    s = tl.sum(tl.reshape(s, (ROWS, 2, 4)), axis=1)
    s = tl.sum(tl.reshape(s, (ROWS, 2, 2)), axis=1)
    return tl.sum(s, axis=1)


@triton.jit
def terms(values_ptr, at, n, FIRST: tl.constexpr):
    """Return x and x * x in float64 (FIRST), or a sum from each of two rows of n sums."""
    inside = at < n
    if FIRST:
        a = single(tl.load(values_ptr + at, mask=inside, other=0.0)).to(tl.float64)
        b = a * a
    else:
        a = tl.load(values_ptr + at, mask=inside, other=0.0)
        b = tl.load(values_ptr + n + at, mask=inside, other=0.0)
    return a, b


@triton.jit
def terms_512_apart(values_ptr, at, n, FIRST: tl.constexpr):
    """Sums of the terms at `at` and 512 further on."""
    a, b = terms(values_ptr, at, n, FIRST)
    c, d = terms(values_ptr, at + 512, n, FIRST)
    return a + c, b + d


@triton.jit
def terms_256_apart(values_ptr, at, n, FIRST: tl.constexpr):
    """Sums of four terms: `terms_512_apart` at `at` and 256 further on."""
    a, b = terms_512_apart(values_ptr, at, n, FIRST)
    c, d = terms_512_apart(values_ptr, at + 256, n, FIRST)
    return a + c, b + d


@triton.jit
def terms_128_apart(values_ptr, at, n, FIRST: tl.constexpr):
    """Sums of eight terms: `terms_256_apart` at `at` and 128 further on."""
    a, b = terms_256_apart(values_ptr, at, n, FIRST)
    c, d = terms_256_apart(values_ptr, at + 128, n, FIRST)
    return a + c, b + d


@triton.jit
def sums_kernel(
    values_ptr,
    n: tl.int64,
    blocks: tl.int64,
    sums_ptr,
    FIRST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sums over blocks of 1024, in float64.

    Summed are x and x * x (FIRST), or both rows of `values` [2, n]. The first four halvings of a block add what a
    thread loads; the others move sums between threads.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = row[:, None] * 1024 + tl.arange(0, 64)[None, :]
    a, b = terms_128_apart(values_ptr, at, n, FIRST)
    c, d = terms_128_apart(values_ptr, at + 64, n, FIRST)
    tl.store(sums_ptr + row, folded(a + c, ROWS), mask=row < blocks)
    tl.store(sums_ptr + blocks + row, folded(b + d, ROWS), mask=row < blocks)


def _sums(x: torch.Tensor) -> tuple[float, float]:
    """Sums S1 and S2 of all elements; the host waits for them."""
    values, first, n = x, True, x.numel()
    while n > 1 or first:
        blocks = -(-n // SUM_BLOCK)
        sums = torch.empty((2, blocks), dtype=torch.float64, device=x.device)
        SUMS.run(sums_kernel, n, values, n, blocks, sums, FIRST=first, ROWS=SUMS.size(n) // SUM_BLOCK)
        values, first, n = sums, False, blocks
    total, squares = values.reshape(-1).tolist()
    return total, squares


@triton.jit
def label_kernel(
    x_ptr,
    edges_ptr,
    n: tl.int64,
    clusters: tl.int32,
    labels_ptr,
    lowest_ptr,
    highest_ptr,
    LABELS: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Label each element and find the extremes of each label in ROUNDS blocks.

    Extremes are order keys, by one atomic per program and label.
    """
    first = tl.program_id(0).to(tl.int64) * (BLOCK * ROUNDS)
    labels = tl.arange(0, LABELS)
    lowest = tl.full((LABELS,), 2147483647, tl.int32)
    highest = tl.full((LABELS,), -2147483648, tl.int32)
    for start in range(first, tl.minimum(first + BLOCK * ROUNDS, n), BLOCK):
        offsets = start + tl.arange(0, BLOCK)
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
            lowest = tl.where(labels == k, tl.minimum(lowest, low), lowest)
            highest = tl.where(labels == k, tl.maximum(highest, high), highest)
    occurs = lowest <= highest
    tl.atomic_min(lowest_ptr + labels, lowest, mask=occurs, sem="relaxed")
    tl.atomic_max(highest_ptr + labels, highest, mask=occurs, sem="relaxed")


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
    offsets, inside = elements(n, BLOCK)
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
    edges = on_device(boundaries(total, squares, n, clusters), t)
    labels = torch.empty(n, dtype=torch.uint8, device=t.device)
    codes = torch.empty(n, dtype=torch.uint8, device=t.device)
    none = torch.tensor([[float("inf")], [-float("inf")]], dtype=torch.float32, device=t.device).view(torch.int32)
    keys = _order_keys(none).repeat(1, clusters)
    LABEL.run(label_kernel, n, t, edges, n, clusters, labels, keys[0], keys[1], LABELS=MOST)
    lowest, highest = _order_keys(keys).view(torch.float32).cpu().numpy()
    scale, minimum = (on_device(v, t) for v in ranges(lowest, highest))
    first, limits, _ = _tables(t.device)
    ELEMENTS.run(encode_kernel, n, t, labels, scale, minimum, first, limits, n, codes, SHIFT=SHIFT)
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
    offsets, inside = elements(n, BLOCK)
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
        ELEMENTS.run(decode_kernel, c.numel(), c, k, s, b, _tables(c.device)[2], c.numel(), s.numel(), out, top)
        found = int(top.item())
        if found >= s.numel():
            raise unknown_label(found, s.numel())
    return like(out, codes)
