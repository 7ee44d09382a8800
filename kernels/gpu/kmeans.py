"""Weighted k-means on the GPU: the codebooks of a whole model in one launch, one program a codebook.

Prefix sums and seeding run on the host: they are sums in one fixed order, the histograms they start from are there
already, and they are a thousandth of the work. The order of operations is the one written in `docs/kernels.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..kmeans import prepare
from .launch import Launch, like, on, tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..arrays import Array

Vector = np.ndarray[Any, np.dtype[np.float64]]

EXACT = Launch(block=2048, warps=8)
LLOYD = Launch(block=256, warps=4)
CODES = 256
"""Codes whose means a program takes side by side."""


@triton.jit
def solve_level(
    weight_ptr,
    moment_ptr,
    best_ptr,
    following_ptr,
    cut_ptr,
    depth,
    low,
    high,
    first,
    last,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """All segments of one depth of the divide and conquer: NODES of them side by side, WIDTH candidates at a time.

    The segment number's bits say which half to take at each depth. The bounds of its candidates are the cuts of the
    segments' middles just below and above it, which earlier depths have left in `cut`.
    """
    lane = tl.arange(0, WIDTH)
    for group in range(0, 1 << depth, NODES):
        node = group + tl.arange(0, NODES)
        exists = node < (1 << depth)
        node_low = tl.zeros((NODES,), tl.int32) + low
        node_high = tl.zeros((NODES,), tl.int32) + high
        for step in range(depth):
            middle = (node_low + node_high) >> 1
            upper = ((node >> (depth - 1 - step)) & 1) == 1
            node_low = tl.where(upper, middle + 1, node_low)
            node_high = tl.where(upper, node_high, middle - 1)
        exists = exists & (node_low <= node_high)
        j = tl.where(exists, (node_low + node_high) >> 1, high)
        from_below = tl.load(cut_ptr + (node_low - 1), mask=exists & (node_low > low), other=0)
        from_above = tl.load(cut_ptr + (node_high + 1), mask=exists & (node_high < high), other=0)
        begin = tl.where(node_low > low, from_below, first)
        end = tl.minimum(tl.where(node_high < high, from_above, last), j - 1)
        end = tl.where(exists, end, begin - 1)
        weight_j = tl.load(weight_ptr + j)
        moment_j = tl.load(moment_ptr + j)
        most = tl.full((NODES,), -float("inf"), tl.float64)
        at = begin
        for offset in range(0, tl.max(end - begin, axis=0) + 1, WIDTH):
            i = begin[:, None] + (offset + lane)[None, :]
            mine = i <= end[:, None]
            i = tl.where(mine, i, 0)
            mass = weight_j[:, None] - tl.load(weight_ptr + i)
            lever = moment_j[:, None] - tl.load(moment_ptr + i)
            product = lever * lever
            positive = mass > 0.0
            share = tl.where(positive, product / tl.where(positive, mass, 1.0), 0.0)
            gain = tl.where(mine, tl.load(best_ptr + i) + share, -float("inf"))
            top = tl.max(gain, axis=1)
            # The smallest candidate that reaches the maximum, found by a reduction of its own.
            where = tl.min(tl.where(gain == top[:, None], i, 2147483647), axis=1)
            better = top > most
            at = tl.where(better, where, at)
            most = tl.where(better, top, most)
        tl.store(following_ptr + j, most, mask=exists)
        tl.store(cut_ptr + j, at, mask=exists)
    tl.debug_barrier()


@triton.jit
def segment_means(x_ptr, w_ptr, start, end, nonempty, shift):
    """Sums of w and of w * (x - shift) over each [start, end), ascending, one lane a segment; and the clipped means."""
    mass = tl.zeros_like(start).to(tl.float64)
    lever = tl.zeros_like(start).to(tl.float64)
    for offset in range(0, tl.max(tl.where(nonempty, end - start, 0), axis=0)):
        i = start + offset
        mine = nonempty & (i < end)
        w = tl.load(w_ptr + i, mask=mine, other=0.0)
        x = tl.load(x_ptr + i, mask=mine, other=0.0)
        step = w * (x - shift)
        mass = tl.where(mine, mass + w, mass)
        lever = tl.where(mine, lever + step, lever)
    lowest = tl.load(x_ptr + start, mask=nonempty, other=0.0)
    highest = tl.load(x_ptr + (end - 1), mask=nonempty, other=0.0)
    mean = shift + lever / tl.where(mass > 0.0, mass, 1.0)
    mean = tl.where(mean < lowest, lowest, mean)
    mean = tl.where(mean > highest, highest, mean)
    return mass, mean


@triton.jit
def exact_kernel(
    x_ptr,
    w_ptr,
    weight_ptr,
    moment_ptr,
    table_ptr,
    scratch_ptr,
    cuts_ptr,
    codes_ptr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Optimal codebook of one problem by dynamic programming; `table` has one row of FIELDS numbers a problem."""
    row_ptr = table_ptr + tl.program_id(0) * 7
    x_ptr += tl.load(row_ptr)
    w_ptr += tl.load(row_ptr)
    prefix_start = tl.load(row_ptr + 1)
    weight_ptr += prefix_start
    moment_ptr += prefix_start
    scratch_ptr += 2 * prefix_start
    cuts_ptr += tl.load(row_ptr + 2)
    codes_ptr += tl.load(row_ptr + 3)
    m = tl.load(row_ptr + 4).to(tl.int32)
    k = tl.load(row_ptr + 5).to(tl.int32)
    exponent = tl.load(row_ptr + 6).to(tl.int32)
    lanes = tl.arange(0, BLOCK)
    for begin in range(0, m + 1, BLOCK):
        j = begin + lanes
        mine = j <= m
        mass = tl.load(weight_ptr + j, mask=mine, other=0.0)
        moment = tl.load(moment_ptr + j, mask=mine, other=0.0)
        product = moment * moment
        positive = mass > 0.0
        tl.store(scratch_ptr + j, tl.where(positive, product / tl.where(positive, mass, 1.0), 0.0), mask=mine)
    tl.debug_barrier()
    for row in range(2, k + 1):
        best_ptr = scratch_ptr + (row & 1) * (m + 1)
        following_ptr = scratch_ptr + (1 - (row & 1)) * (m + 1)
        cut_ptr = cuts_ptr + row.to(tl.int64) * (m + 1)
        low = tl.where(row == k, m, row)
        high = m - (k - row)
        # The first segments are few and long, the last ones many and short.
        depth = 0
        while (1 << depth) <= high - low + 1:
            if depth < 3:
                solve_level(weight_ptr, moment_ptr, best_ptr, following_ptr, cut_ptr, depth, low, high, row - 1, m - 1,
                            4, BLOCK // 4)
            elif depth < 7:
                solve_level(weight_ptr, moment_ptr, best_ptr, following_ptr, cut_ptr, depth, low, high, row - 1, m - 1,
                            64, BLOCK // 64)
            else:
                solve_level(weight_ptr, moment_ptr, best_ptr, following_ptr, cut_ptr, depth, low, high, row - 1, m - 1,
                            256, BLOCK // 256)
            depth += 1
    # Walk back: the cut of row r is where cluster r begins. Stored for all codes, then one lane a cluster.
    end = m
    for step in range(0, k):
        row = k - step
        start = tl.load(cuts_ptr + row.to(tl.int64) * (m + 1) + end, mask=row > 1, other=0)
        tl.store(cuts_ptr + (row - 1), start)
        end = start
    tl.debug_barrier()
    shift = tl.load(x_ptr + (m >> 1))
    for begin in range(0, k, CODES):
        c = begin + tl.arange(0, CODES)
        mine = c < k
        start = tl.load(cuts_ptr + c, mask=mine, other=0)
        stop = tl.load(cuts_ptr + (c + 1), mask=c + 1 < k, other=m)
        mass, mean = segment_means(x_ptr, w_ptr, start, stop, mine, shift)
        tl.store(codes_ptr + c, scaled(mean, exponent), mask=mine)


@triton.jit
def scaled(x, exponent):
    """x * 2**exponent, in two steps that are each a power of two of float64, the first of them exact."""
    half = exponent >> 1
    rest = exponent - half
    first = (half.to(tl.int64) + 1023) << 52
    second = (rest.to(tl.int64) + 1023) << 52
    return x * first.to(tl.float64, bitcast=True) * second.to(tl.float64, bitcast=True)
