"""Sums by symbol within a program, which the grid and rank-one kernels report.

Each program writes its own row of counts and sums, which are added up afterwards. Without floating-point atomics, the
same input always gives the same sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def tally_counts(symbol, inside, counts_ptr):
    """Write how often each of the 256 symbols occurs to this program's row."""
    counts = tl.histogram(symbol, 256, mask=inside)
    tl.store(counts_ptr + tl.arange(0, 256), counts)
    tl.debug_barrier()  # `tally_sums` reads them back


@triton.jit
def tally_sums(symbol, value, inside, first, counts_ptr, sums_ptr):
    """Write the float64 sum of `value` by symbol to this program's row.

    Only symbols from `first` on that occur are summed.
    """
    for s in range(first, 256):
        if tl.load(counts_ptr + s) > 0:
            mine = inside & (symbol == s)
            tl.store(sums_ptr + s, tl.sum(tl.where(mine, value.to(tl.float64), 0.0), axis=0))


def totals(counts: torch.Tensor, *sums: torch.Tensor) -> torch.Tensor:
    """Add up the rows of all programs: float64 [1 + number of sums, 256] on the host.

    Counts come first.
    """
    return torch.stack([counts.sum(0).to(torch.float64), *(s.sum(0) for s in sums)]).cpu()
