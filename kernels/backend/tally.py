"""Sums by symbol within a program, which the grid and rank-one kernels report.

Each program counts and sums some blocks and writes a row of counts and sums; the rows are added up afterwards. Without
floating-point atomics, the same input always gives the same sums. Programs of one warp need no barrier for a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def tally(symbol, value, inside, first, counts, sums):
    """Add the number of each of the 256 symbols to `counts`, and sums of `value` to `sums`.

    Sums are by symbol, in float64. Only symbols from `first` on are summed.
    """
    counts += tl.histogram(symbol, 256, mask=inside)
    wide = value.to(tl.float64)
    summed = inside & (symbol >= first)
    lowest = tl.min(tl.where(summed, symbol, 255), axis=0)
    highest = tl.max(tl.where(summed, symbol, 0), axis=0)
    symbols = tl.arange(0, 256)
    for s in range(lowest, highest + 1):
        total = tl.sum(tl.where(summed & (symbol == s), wide, 0.0), axis=0)
        sums = tl.where(symbols == s, sums + total, sums)
    return counts, sums


def tables(programs: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of counts and sums, one of each for every program."""
    counts = torch.empty((programs, 256), dtype=torch.int32, device=device)
    return counts, torch.empty((programs, 256), dtype=torch.float64, device=device)


def totals(counts: torch.Tensor, *sums: torch.Tensor) -> torch.Tensor:
    """Add up the rows of all programs: float64 [1 + number of sums, 256] on the host.

    Counts come first.
    """
    return torch.stack([counts.sum(0).to(torch.float64), *(s.sum(0) for s in sums)]).cpu()
