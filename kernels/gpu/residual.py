"""Residuals to a rank-one estimate on the GPU: the estimate is made where it is needed and never stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..residual import FARTHEST, FIRST
from .launch import Launch, like, on, tensor
from .tally import tally_counts, tally_sums, totals

if TYPE_CHECKING:
    from ..arrays import Array
    from ..residual import Factors

SYMBOLS = Launch(block=4096, warps=8)
VALUES = Launch(block=2048, warps=4)
NARROW = 1 << 30
"""Most columns for which positions in a row, and a block more, fit 32 bits."""


@triton.jit
def estimate_of(rows_ptr, columns_ptr, start, columns, inside, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """rows[i] * columns[j] of the matrix elements `start` ... `start + BLOCK - 1` in C order."""
    row = start // columns
    across = start - row * columns + tl.arange(0, BLOCK)
    if not WIDE:  # one 64-bit division a program; those by element are 32-bit
        across = across.to(tl.int32)
        columns = columns.to(tl.int32)
    down = across // columns
    r = tl.load(rows_ptr + (row + down), mask=inside, other=0.0)
    return r * tl.load(columns_ptr + (across - down * columns), mask=inside, other=0.0)


def factor_sums(x: Array, columns: int) -> tuple[Any, Any]:
    """See `shrinkpoint.kernels.residual.factor_sums`."""
    part = tensor(x).reshape(-1, columns)
    by_row = part.sum(dim=1, dtype=torch.float64)
    if not bool(by_row.isfinite().all()):
        part = torch.where(part.isfinite(), part, 0.0)
        by_row = part.sum(dim=1, dtype=torch.float64)
    return by_row.cpu().numpy(), part.sum(dim=0, dtype=torch.float64).cpu().numpy()


@triton.jit
def symbols_kernel(
    x_ptr,
    rows_ptr,
    columns_ptr,
    n: tl.int64,
    start: tl.int64,
    columns: tl.int64,
    octaves: tl.int32,
    previous_ptr,
    symbols_ptr,
    counts_ptr,
    distances_ptr,
    FIRST: tl.constexpr,
    FARTHEST: tl.constexpr,
    SETTLED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Symbol of each element, and this program's counts and sums of distances from the estimate by symbol."""
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    estimate = estimate_of(rows_ptr, columns_ptr, start + block * BLOCK, columns, inside, WIDE, BLOCK)
    key = x.to(tl.int32, bitcast=True)
    base = estimate.to(tl.int32, bitcast=True)
    normal = (key >= 0x00800000) & (key < 0x7F800000) & (base >= 0x00800000) & (base < 0x7F800000)
    # floor(distance / 2**23 / octaves), one floor after the other; the offset keeps the second dividend positive.
    distance = tl.where(normal, key - base, 0)
    k = (((distance.to(tl.int64) + (octaves << 22)) >> 23).to(tl.int32) + 512 * octaves) // octaves - 512
    symbol = tl.where(normal & (tl.abs(k) <= FARTHEST), FIRST + FARTHEST + k, 1)
    symbol = tl.where((key & 0x7FFFFFFF) == 0, 0, symbol)
    if SETTLED:
        old = tl.load(previous_ptr + offsets, mask=inside, other=0).to(tl.int32)
        beyond = tl.abs(distance.to(tl.int64) - (old - (FIRST + FARTHEST)).to(tl.int64) * octaves * 8388608)
        near = beyond - octaves * 4194304 <= octaves * 2097152
        symbol = tl.where((symbol >= FIRST) & (old >= FIRST) & near, old, symbol)
    tl.store(symbols_ptr + offsets, symbol.to(tl.uint8), mask=inside)
    tally_counts(symbol, inside, counts_ptr + 256 * block)
    tally_sums(symbol, distance, inside, FIRST, counts_ptr + 256 * block, distances_ptr + 256 * block)


def residual_symbols(
    x: Array, rows: Factors, columns: Factors, start: int, octaves: int, previous: Array | None = None
) -> tuple[Array, Any, Any]:
    """See `shrinkpoint.kernels.residual.residual_symbols`."""
    t = tensor(x)
    programs = SYMBOLS.programs(t.numel())
    symbols = torch.empty(t.numel(), dtype=torch.uint8, device=t.device)
    counts = torch.empty((programs, 256), dtype=torch.int32, device=t.device)
    distances = torch.zeros((programs, 256), dtype=torch.float64, device=t.device)
    if programs:
        with on(t):
            symbols_kernel[(programs,)](
                # inputs
                t,
                _on_device(rows, t),
                _on_device(columns, t),
                t.numel(),
                start,
                columns.size,
                octaves,
                symbols if previous is None else tensor(previous),
                # outputs
                symbols,
                counts,
                distances,
                # constants
                FIRST=FIRST,
                FARTHEST=FARTHEST,
                SETTLED=previous is not None,
                WIDE=columns.size > NARROW,
                **SYMBOLS.constants(t.numel()),
            )
    count, total = totals(counts, distances).numpy()
    return like(symbols, x), total, count


@triton.jit
def values_kernel(
    symbols_ptr,
    rows_ptr,
    columns_ptr,
    table_ptr,
    n: tl.int64,
    start: tl.int64,
    columns: tl.int64,
    out_ptr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out = (rows[i] * columns[j]) * table[symbol]."""
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    symbol = tl.load(symbols_ptr + offsets, mask=inside, other=0).to(tl.int32)
    estimate = estimate_of(rows_ptr, columns_ptr, start + block * BLOCK, columns, inside, WIDE, BLOCK)
    tl.store(out_ptr + offsets, estimate * tl.load(table_ptr + symbol), mask=inside)


def residual_values(symbols: Array, rows: Factors, columns: Factors, start: int, table: Factors) -> Array:
    """See `shrinkpoint.kernels.residual.residual_values`."""
    t = tensor(symbols)
    out = torch.empty(t.numel(), dtype=torch.float32, device=t.device)
    if t.numel():
        with on(t):
            values_kernel[VALUES.grid(t.numel())](
                # inputs
                t,
                _on_device(rows, t),
                _on_device(columns, t),
                _on_device(table, t),
                t.numel(),
                start,
                columns.size,
                # outputs
                out,
                # constants
                WIDE=columns.size > NARROW,
                **VALUES.constants(t.numel()),
            )
    return like(out, symbols)


def _on_device(values: np.ndarray[Any, Any], t: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(t.device)
