"""Grids on the GPU: correctly rounded root and quotients, symbols, and sums by symbol."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..backend.arrays import Array
from ..backend.gpu import Launch, elements, like, on_device, rounded, tables, tally, tensor, totals
from . import ESCAPE, FARTHEST

SYMBOLS = Launch(block=256, warps=1, registers=255, rounds=32)
VALUES = Launch(block=1024, warps=4)


@triton.jit
def symbols_kernel(
    x_ptr,
    square_ptr,
    n: tl.int64,
    step: tl.float32,
    symbols_ptr,
    counts_ptr,
    sums_ptr,
    FARTHEST: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Symbol of each element's grid point, with counts and sums of ROUNDS blocks per program.

    Sums are of x / sqrt(square).
    """
    program = tl.program_id(0).to(tl.int64)
    first = program * (BLOCK * ROUNDS)
    counts = tl.zeros((256,), tl.int32)
    sums = tl.zeros((256,), tl.float64)
    for start in range(first, tl.minimum(first + BLOCK * ROUNDS, n), BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < n
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
        scale = tl.sqrt_rn(tl.load(square_ptr + offsets, mask=inside, other=0.0))
        positive = scale > 0.0
        beyond = tl.where(x == 0.0, 0.0, float("inf"))
        u = tl.where(positive, tl.div_rn(x, tl.where(positive, scale, 1.0)), beyond)
        quotient = tl.div_rn(u, tl.zeros_like(u) + step)
        near = tl.abs(quotient) < FARTHEST + 1
        q = rounded(tl.where(near, quotient, 0.0))
        on_grid = near & (tl.abs(q) <= FARTHEST)
        k = q.to(tl.int32)
        symbol = tl.where(on_grid, 1 + 2 * tl.abs(k) - (k < 0).to(tl.int32), 0)
        tl.store(symbols_ptr + offsets, symbol.to(tl.uint8), mask=inside)
        counts, sums = tally(symbol, u, inside, 1, counts, sums)
    tl.store(counts_ptr + 256 * program + tl.arange(0, 256), counts)
    tl.store(sums_ptr + 256 * program + tl.arange(0, 256), sums)


def grid_symbols(x: Array, square: Array, step: float) -> tuple[Array, Any, Any]:
    """See `shrinkpoint.kernels.moment_grid.grid_symbols`."""
    t, v = tensor(x), tensor(square)
    symbols = torch.empty(t.numel(), dtype=torch.uint8, device=t.device)
    counts, sums = tables(SYMBOLS.programs(t.numel()), t.device)
    given = t, v, t.numel(), float(np.float32(step))
    SYMBOLS.run(symbols_kernel, t.numel(), *given, symbols, counts, sums, FARTHEST=FARTHEST)
    count, total = totals(counts, sums).numpy()
    return like(symbols, x), total, count


@triton.jit
def values_kernel(symbols_ptr, square_ptr, table_ptr, n: tl.int64, out_ptr, BLOCK: tl.constexpr):
    """Compute table[symbol] * sqrt(square) for each element."""
    offsets, inside = elements(n, BLOCK)
    symbol = tl.load(symbols_ptr + offsets, mask=inside, other=0).to(tl.int32)
    scale = tl.sqrt_rn(tl.load(square_ptr + offsets, mask=inside, other=0.0))
    tl.store(out_ptr + offsets, tl.load(table_ptr + symbol) * scale, mask=inside)


def grid_values(symbols: Array, square: Array, table: np.ndarray[Any, np.dtype[np.float32]]) -> Array:
    """See `shrinkpoint.kernels.moment_grid.grid_values`."""
    t, v = tensor(symbols), tensor(square)
    out = torch.empty(t.shape, dtype=torch.float32, device=t.device)
    VALUES.run(values_kernel, t.numel(), t, v, on_device(table, t), t.numel(), out)
    return like(out, symbols)


@triton.jit
def products_kernel(
    x_ptr, square_ptr, symbols_ptr, table_ptr, n: tl.int64, sums_ptr, ESCAPE: tl.constexpr, BLOCK: tl.constexpr
):
    """Sums of x x, x y and y y of each program's elements, to `sums[3 * program ...]`."""
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    symbol = tl.load(symbols_ptr + offsets, mask=offsets < n, other=ESCAPE).to(tl.int32)
    on_grid = symbol != ESCAPE
    x = tl.load(x_ptr + offsets, mask=on_grid, other=0.0).to(tl.float64)
    scale = tl.sqrt_rn(tl.load(square_ptr + offsets, mask=on_grid, other=0.0))
    y = (tl.load(table_ptr + symbol, mask=on_grid, other=0.0) * scale).to(tl.float64)
    tl.store(sums_ptr + 3 * block, tl.sum(x * x, axis=0))
    tl.store(sums_ptr + 3 * block + 1, tl.sum(x * y, axis=0))
    tl.store(sums_ptr + 3 * block + 2, tl.sum(y * y, axis=0))


def grid_products(
    x: Array, square: Array, symbols: Array, table: np.ndarray[Any, np.dtype[np.float32]]
) -> tuple[float, float, float]:
    """See `shrinkpoint.kernels.moment_grid.grid_products`."""
    t = tensor(x)
    sums = torch.zeros((VALUES.programs(t.numel()), 3), dtype=torch.float64, device=t.device)
    inputs = t, tensor(square), tensor(symbols), on_device(table, t), t.numel()
    VALUES.run(products_kernel, t.numel(), *inputs, sums, ESCAPE=ESCAPE)
    norm, products, squares = sums.sum(0).tolist()
    return norm, products, squares
