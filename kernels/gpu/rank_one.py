"""Rank-one residuals on the GPU: the estimate is computed where needed, never stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..rank_one import FARTHEST, FIRST, SCALE, cell_centers
from .bits import rounded
from .launch import Launch, like, on, tensor
from .tally import tally_counts, tally_sums, totals

if TYPE_CHECKING:
    from ..arrays import Array
    from ..rank_one import Factors

SYMBOLS = Launch(block=4096, warps=8)
VALUES = Launch(block=2048, warps=4)
NARROW = 1 << 30
"""Maximum number of columns for which positions in a row, plus a block, fit 32 bits."""


@triton.jit
def estimate_of(rows_ptr, columns_ptr, start, columns, inside, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Estimates rows[i] * columns[j] of BLOCK matrix elements from `start` on, in C order."""
    row = start // columns
    across = start - row * columns + tl.arange(0, BLOCK)
    if not WIDE:  # one 64-bit division per program; those per element are 32-bit
        across = across.to(tl.int32)
        columns = columns.to(tl.int32)
    down = across // columns
    r = tl.load(rows_ptr + (row + down), mask=inside, other=0.0)
    return r * tl.load(columns_ptr + (across - down * columns), mask=inside, other=0.0)


def factor_sums(x: Array, columns: int) -> tuple[Any, Any]:
    """See `shrinkpoint.kernels.rank_one.factor_sums`."""
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
    eighths: tl.int32,
    centers_ptr,
    previous_ptr,
    symbols_ptr,
    counts_ptr,
    sums_ptr,
    FIRST: tl.constexpr,
    FARTHEST: tl.constexpr,
    SCALE: tl.constexpr,
    SETTLED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Symbol of each element, with counts and sums by symbol per program."""
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    estimate = estimate_of(rows_ptr, columns_ptr, start + block * BLOCK, columns, inside, WIDE, BLOCK)
    key = x.to(tl.int32, bitcast=True)
    base = estimate.to(tl.int32, bitcast=True)
    usable = (key >= 0x00800000) & (key < 0x7F800000) & (base >= 0x00800000) & (base < 0x7F800000)
    ratio = tl.div_rn(tl.where(usable, x, 1.0), tl.where(usable, estimate, 1.0))
    pattern = ratio.to(tl.int32, bitcast=True)
    normal = usable & (pattern >= 0x00800000) & (pattern < 0x7F800000)
    distance = tl.where(normal, pattern - 0x3F800000, 0)
    # floor((distance + cell / 2) / cell) in two steps; the offset keeps the second dividend positive.
    k = ((distance >> 19) + eighths + 4096 * eighths) // (2 * eighths) - 2048
    symbol = tl.where(normal & (tl.abs(k) <= FARTHEST), FIRST + FARTHEST + k, 1)
    symbol = tl.where((key & 0x7FFFFFFF) == 0, 0, symbol)
    if SETTLED:
        old = tl.load(previous_ptr + offsets, mask=inside, other=0).to(tl.int32)
        beyond = tl.abs(distance.to(tl.int64) - (old - (FIRST + FARTHEST)).to(tl.int64) * eighths * 1048576)
        near = beyond - eighths * 524288 <= eighths * 262144
        symbol = tl.where((symbol >= FIRST) & (old >= FIRST) & near, old, symbol)
    tl.store(symbols_ptr + offsets, symbol.to(tl.uint8), mask=inside)
    center = tl.load(centers_ptr + symbol)
    share = rounded(tl.sqrt_rn(tl.div_rn(center, tl.where(symbol >= FIRST, ratio, 1.0))) * SCALE)
    tally_counts(symbol, inside, counts_ptr + 256 * block)
    tally_sums(symbol, share, inside, FIRST, counts_ptr + 256 * block, sums_ptr + 256 * block)


def residual_symbols(
    x: Array, rows: Factors, columns: Factors, start: int, eighths: int, previous: Array | None = None
) -> tuple[Array, Any, Any]:
    """See `shrinkpoint.kernels.rank_one.residual_symbols`."""
    t = tensor(x)
    programs = SYMBOLS.programs(t.numel())
    symbols = torch.empty(t.numel(), dtype=torch.uint8, device=t.device)
    counts = torch.empty((programs, 256), dtype=torch.int32, device=t.device)
    sums = torch.zeros((programs, 256), dtype=torch.float64, device=t.device)
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
                eighths,
                _on_device(cell_centers(eighths), t),
                symbols if previous is None else tensor(previous),
                # outputs
                symbols,
                counts,
                sums,
                # constants
                FIRST=FIRST,
                FARTHEST=FARTHEST,
                SCALE=SCALE,
                SETTLED=previous is not None,
                WIDE=columns.size > NARROW,
                **SYMBOLS.constants(t.numel()),
            )
    count, total = totals(counts, sums).numpy()
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
    """Compute (rows[i] * columns[j]) * table[symbol] for each element."""
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    symbol = tl.load(symbols_ptr + offsets, mask=inside, other=0).to(tl.int32)
    estimate = estimate_of(rows_ptr, columns_ptr, start + block * BLOCK, columns, inside, WIDE, BLOCK)
    tl.store(out_ptr + offsets, estimate * tl.load(table_ptr + symbol), mask=inside)


def residual_values(symbols: Array, rows: Factors, columns: Factors, start: int, table: Factors) -> Array:
    """See `shrinkpoint.kernels.rank_one.residual_values`."""
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
