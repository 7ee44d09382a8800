"""Row-wise quantization on the GPU: a program takes a tile of rows in chunks of columns.

Data that later passes need (positions in the range, centres) are written to scratch memory, which the same program
reads back from its cache. Sums are of integers, so their order does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..backend.arrays import Array
from ..backend.gpu import INTERPRETED, Launch, like, rounded, run, single, tensor
from . import ERROR_STEPS, KMEANS_STEPS, search_steps, unknown_code

TILE = Launch(block=512, warps=4, registers=255)
"""`block` is rows times columns of a tile."""
KMEANS = Launch(block=512, warps=8, registers=255)
"""The same for k-means, whose counters need registers too: at most `COUNTERS` per program."""
COUNTERS = 1024
COLUMNS = (32, 64, 128, 256)
"""Compiled widths of a tile; longer rows are processed in several tiles."""
ENTRIES = (4, 16, 256)
"""Compiled codebook sizes: 2, 4 and 8 bits; other sizes use the next larger one."""
METHODS = {"symmetric": 0, "asymmetric": 1, "adaptive": 2}


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiling of a matrix: `rows` x `columns` a tile, `down` x `across` tiles."""

    rows: int
    columns: int
    down: int
    across: int
    launch: Launch

    @property
    def constants(self) -> dict[str, Any]:
        """Constants and compiler options of a kernel that takes tiles."""
        return {"ROWS": self.rows, "COLUMNS": self.columns, **self.launch.options}


def _tiles(shape: torch.Size, launch: Launch = TILE) -> _Tiles:
    height, width = shape
    columns = next((c for c in COLUMNS if width <= c), COLUMNS[-1])
    tile = min(max(1 << (height * width // 4).bit_length(), launch.block), 1 << 17) if INTERPRETED else launch.block
    rows = max(tile // columns, 1)
    return _Tiles(rows, columns, -(-height // rows), -(-width // columns), launch)


@triton.jit
def cells(row, column, exists, width):
    """Which elements of a tile are in the matrix, and their numbers."""
    return exists[:, None] & (column < width)[None, :], row[:, None] * width + column[None, :]


@triton.jit
def row_ends(x_ptr, row, exists, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Minimum and maximum of the finite elements of each row; whether all are finite.

    Zeros come without sign.
    """
    low = tl.full((ROWS,), float("inf"), tl.float32)
    high = tl.full((ROWS,), -float("inf"), tl.float32)
    finite = tl.full((ROWS,), 1, tl.int32)
    for begin in range(0, width, COLUMNS):
        inside, at = cells(row, begin + tl.arange(0, COLUMNS), exists, width)
        x = single(tl.load(x_ptr + at, mask=inside, other=0.0))
        good = tl.abs(x) < float("inf")
        low = tl.minimum(low, tl.min(tl.where(inside & good, x, float("inf")), axis=1))
        high = tl.maximum(high, tl.max(tl.where(inside & good, x, -float("inf")), axis=1))
        finite = tl.minimum(finite, tl.min((good | ~inside).to(tl.int32), axis=1))
    return low + 0.0, high + 0.0, finite == 1


@triton.jit
def candidate_range(i, j, bins, top):
    """Range of a search candidate that cuts i bins off below and j above.

    Returns a, scale and its inverse.
    """
    n = tl.zeros_like(i).to(tl.float32) + bins.to(tl.float32)
    a = tl.div_rn(i.to(tl.float32), n)
    r = tl.div_rn((bins - j).to(tl.float32), n) - a
    positive = r > 0.0
    limit = tl.zeros_like(a) + top
    return a, tl.div_rn(r, limit), tl.where(positive, tl.div_rn(limit, tl.where(positive, r, 1.0)), 0.0)


@triton.jit
def squared_error(y, a, scale, inverse, top, ERROR_STEPS: tl.constexpr):
    """Square of the error of quantizing y over a candidate range, in whole units."""
    t = (y - a[:, None]) * inverse[:, None]
    t = tl.where(t > 0.0, t, 0.0)
    t = tl.where(t < top, t, top)
    product = rounded(t) * scale[:, None]
    k = rounded((product + a[:, None] - y) * ERROR_STEPS).to(tl.int32)
    return (k * k).to(tl.int64)


@triton.jit
def candidate_costs(
    y_ptr,
    row,
    exists,
    width,
    up_i,
    up_j,
    down_i,
    down_j,
    bins,
    top,
    ERROR_STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Errors E of two search candidates per row, in one pass over the row."""
    up_a, up_scale, up_inverse = candidate_range(up_i, up_j, bins, top)
    down_a, down_scale, down_inverse = candidate_range(down_i, down_j, bins, top)
    up = tl.zeros((ROWS,), tl.int64)
    down = tl.zeros((ROWS,), tl.int64)
    for begin in range(0, width, COLUMNS):
        inside, at = cells(row, begin + tl.arange(0, COLUMNS), exists, width)
        y = tl.load(y_ptr + at, mask=inside, other=0.0)
        error = squared_error(y, up_a, up_scale, up_inverse, top, ERROR_STEPS)
        up += tl.sum(tl.where(inside, error, 0), axis=1)
        error = squared_error(y, down_a, down_scale, down_inverse, top, ERROR_STEPS)
        down += tl.sum(tl.where(inside, error, 0), axis=1)
    return up, down


@triton.jit
def quantize_kernel(
    x_ptr,
    height: tl.int64,
    width: tl.int64,
    top: tl.float32,
    bins: tl.int32,
    steps: tl.int32,
    y_ptr,
    codes_ptr,
    scale_ptr,
    minimum_ptr,
    METHOD: tl.constexpr,
    ERROR_STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Range, scale and codes of a tile of rows; METHOD 0 is symmetric, 1 asymmetric, 2 adaptive."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < height
    low, high, good = row_ends(x_ptr, row, exists, width, ROWS, COLUMNS)
    if METHOD == 0:
        high = tl.maximum(high, -low)
        low = -high + 0.0
    good = good & exists & (high - low < float("inf"))
    low = tl.where(good, low, 0.0)
    high = tl.where(good, high, 0.0)
    if METHOD == 2:
        span = high - low
        wide = span > 0.0
        divisor = tl.where(wide, span, 1.0)
        for begin in range(0, width, COLUMNS):
            inside, at = cells(row, begin + tl.arange(0, COLUMNS), exists, width)
            x = single(tl.load(x_ptr + at, mask=inside & wide[:, None], other=0.0))
            place = tl.div_rn(x - low[:, None], tl.zeros_like(x) + divisor[:, None])
            tl.store(y_ptr + at, tl.where(wide[:, None], place, 0.0), mask=inside)
        tl.debug_barrier()
        i = tl.zeros((ROWS,), tl.int32)
        j = tl.zeros((ROWS,), tl.int32)
        best_i = i
        best_j = j
        best, _same = candidate_costs(y_ptr, row, exists, width, i, j, i, j, bins, top, ERROR_STEPS, ROWS, COLUMNS)
        for step in range(steps):
            up, down = candidate_costs(
                y_ptr, row, exists, width, i + 1, j, i, j + 1, bins, top, ERROR_STEPS, ROWS, COLUMNS
            )
            upward = up < down
            i = tl.where(upward, i + 1, i)
            j = tl.where(upward, j, j + 1)
            cost = tl.where(upward, up, down)
            better = cost < best
            best = tl.where(better, cost, best)
            best_i = tl.where(better, i, best_i)
            best_j = tl.where(better, j, best_j)
        bin_width = tl.div_rn(span, tl.zeros_like(span) + bins.to(tl.float32))
        below = best_i.to(tl.float32) * bin_width
        above = best_j.to(tl.float32) * bin_width
        low = tl.where(wide, low + below, low)
        high = tl.where(wide, high - above, high)
    some = high > low
    scale = tl.where(some, tl.div_rn(high - low, tl.zeros_like(low) + top), 0.0)
    tl.store(scale_ptr + row, tl.where(good, scale, float("nan")), mask=exists)
    tl.store(minimum_ptr + row, tl.where(good, low, float("nan")), mask=exists)
    some = scale > 0.0
    divisor = tl.where(some, scale, 1.0)
    for begin in range(0, width, COLUMNS):
        inside, at = cells(row, begin + tl.arange(0, COLUMNS), exists, width)
        x = single(tl.load(x_ptr + at, mask=inside & some[:, None], other=0.0))
        t = tl.div_rn(x - low[:, None], tl.zeros_like(x) + divisor[:, None])
        t = tl.where(t > 0.0, t, 0.0)
        t = tl.where(t < top, t, top)
        code = tl.where(some[:, None], rounded(t).to(tl.int32), 0)
        tl.store(codes_ptr + at, code.to(tl.uint8), mask=inside)


def row_quantize(
    x: Array, bits: int, method: str = "adaptive", *, num_bins: int = 25, ratio: float = 1.0
) -> tuple[Array, Array, Array]:
    """See `shrinkpoint.kernels.rows.row_quantize`."""
    t = tensor(x)
    codes = torch.zeros(t.shape, dtype=torch.uint8, device=t.device)
    scale = torch.zeros(t.shape[0], dtype=torch.float32, device=t.device)
    minimum = torch.zeros(t.shape[0], dtype=torch.float32, device=t.device)
    if t.numel():
        tiles = _tiles(t.shape)
        places = torch.empty(t.shape if method == "adaptive" else 1, dtype=torch.float32, device=t.device)
        inputs = t, *t.shape, float(2**bits - 1), num_bins, search_steps(num_bins, ratio)
        constants = {"METHOD": METHODS[method], "ERROR_STEPS": ERROR_STEPS, **tiles.constants}
        run(quantize_kernel, tiles.down, *inputs, places, codes, scale, minimum, **constants)
    return like(codes, x), like(scale, x), like(minimum, x)


@triton.jit
def dequantize_kernel(
    codes_ptr,
    scale_ptr,
    minimum_ptr,
    height: tl.int64,
    width: tl.int64,
    across: tl.int64,
    out_ptr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute codes * scale + minimum, two roundings."""
    tile = tl.program_id(0).to(tl.int64)
    row = tile // across * ROWS + tl.arange(0, ROWS)
    exists = row < height
    inside, at = cells(row, tile % across * COLUMNS + tl.arange(0, COLUMNS), exists, width)
    code = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.float32)
    product = code * tl.load(scale_ptr + row, mask=exists, other=0.0)[:, None]
    tl.store(out_ptr + at, product + tl.load(minimum_ptr + row, mask=exists, other=0.0)[:, None], mask=inside)


def row_dequantize(codes: Array, scale: Array, minimum: Array) -> Array:
    """See `shrinkpoint.kernels.rows.row_dequantize`."""
    t = tensor(codes)
    out = torch.empty(t.shape, dtype=torch.float32, device=t.device)
    if t.numel():
        tiles = _tiles(t.shape)
        inputs = t, tensor(scale), tensor(minimum), *t.shape, tiles.across
        run(dequantize_kernel, tiles.down * tiles.across, *inputs, out, **tiles.constants)
    return like(out, codes)


@triton.jit
def nearest_centre(y, centre_ptr, bits):
    """Number of midpoints of the ascending centres below y, by bisection.

    `centre_ptr` has one address per row.
    """
    code = tl.zeros_like(y)
    for step in range(bits):
        half = 1 << (bits - 1 - step)
        lower = centre_ptr + (code + half - 1)
        code = tl.where(2 * y > tl.load(lower) + tl.load(lower + 1), code + half, code)
    return code


@triton.jit
def short_quotient(dividend, divisor):
    """Quotient of two positive int64 by long division; it must be below 2**24.

    The compiler's own 64-bit division is a subroutine, and the registers saved around its call spill.
    """
    quotient = tl.zeros_like(dividend).to(tl.int32)
    for step in tl.static_range(24):
        part = divisor << (23 - step)
        fits = dividend >= part
        dividend = tl.where(fits, dividend - part, dividend)
        quotient = tl.where(fits, quotient + (1 << (23 - step)), quotient)
    return quotient


@triton.jit
def kmeans_kernel(
    x_ptr,
    height: tl.int64,
    width: tl.int64,
    bits: tl.int32,
    iterations: tl.int32,
    y_ptr,
    centres_ptr,
    codes_ptr,
    codebook_ptr,
    STEPS: tl.constexpr,
    ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Lloyd's k-means of a tile of rows on whole numbers.

    `centres` has a row of `2**bits` entries per row of the matrix.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < height
    safe_row = tl.where(exists, row, 0)
    low, high, finite = row_ends(x_ptr, row, exists, width, ROWS, COLUMNS)
    good = finite & exists & (high - low < float("inf"))
    low = tl.where(good, low, 0.0)
    span = tl.where(good, high - low, 0.0)
    wide = span > 0.0
    divisor = tl.where(wide, span, 1.0)
    for begin in range(0, width, COLUMNS):
        inside, at = cells(row, begin + tl.arange(0, COLUMNS), exists, width)
        x = single(tl.load(x_ptr + at, mask=inside & wide[:, None], other=0.0))
        place = tl.div_rn(x - low[:, None], tl.zeros_like(x) + divisor[:, None])
        y = rounded(tl.where(wide[:, None], place, 0.0) * STEPS).to(tl.int32)
        tl.store(y_ptr + at, y, mask=inside)
    entries = 1 << bits
    entry = tl.arange(0, ENTRIES)
    used = exists[:, None] & (entry < entries)[None, :]
    centre_at = row[:, None] * entries + entry[None, :]
    grid = tl.minimum(entry, entries - 1) * STEPS // (entries - 1)  # at most 255 * 2**22
    centre = tl.zeros((ROWS, ENTRIES), tl.int32) + grid[None, :]
    tl.store(centres_ptr + centre_at, centre, mask=used)
    tl.debug_barrier()
    centre_ptr = centres_ptr + (safe_row * entries)[:, None]
    iteration = 0
    moved = 1
    while (iteration < iterations) & (moved > 0):
        sums = tl.zeros((ROWS, ENTRIES), tl.int64)
        counts = tl.zeros((ROWS, ENTRIES), tl.int64)
        for begin in range(0, width, COLUMNS):
            inside, at = cells(row, begin + tl.arange(0, COLUMNS), exists, width)
            y = tl.load(y_ptr + at, mask=inside, other=0)
            code = tl.where(inside, nearest_centre(y, centre_ptr, bits), -1)
            for c in range(entries):
                mine = code == c
                total = tl.sum(tl.where(mine, y, 0).to(tl.int64), axis=1)
                number = tl.sum(mine.to(tl.int32), axis=1).to(tl.int64)
                here = (entry == c)[None, :]
                sums += tl.where(here, total[:, None], 0)
                counts += tl.where(here, number[:, None], 0)
        some = counts > 0
        mean = short_quotient(2 * sums + counts, 2 * tl.where(some, counts, 1))
        new = tl.where(some & used, mean, centre)
        moved = tl.max(tl.max((new != centre).to(tl.int32), axis=1), axis=0)
        centre = new
        tl.debug_barrier()  # all old centres have been read
        tl.store(centres_ptr + centre_at, centre, mask=used)
        tl.debug_barrier()
        iteration += 1
    for begin in range(0, width, COLUMNS):
        inside, at = cells(row, begin + tl.arange(0, COLUMNS), exists, width)
        y = tl.load(y_ptr + at, mask=inside, other=0)
        code = tl.where(good[:, None], nearest_centre(y, centre_ptr, bits), 0)
        tl.store(codes_ptr + at, code.to(tl.uint8), mask=inside)
    product = centre.to(tl.float32) * (1.0 / STEPS) * span[:, None]
    value = tl.where(good[:, None], product + low[:, None], float("nan"))
    tl.store(codebook_ptr + centre_at, value, mask=used)


def kmeans_rows(columns: int, entries: int) -> int:
    """Number of rows in a k-means tile, limited by their counters."""
    return max(min(KMEANS.block // columns, COUNTERS // entries), 1)


def row_kmeans(x: Array, bits: int, *, iterations: int = 15) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.rows.row_kmeans`."""
    t = tensor(x)
    codes = torch.zeros(t.shape, dtype=torch.uint8, device=t.device)
    codebook = torch.zeros((t.shape[0], 2**bits), dtype=torch.float32, device=t.device)
    if t.numel():
        tiles = _tiles(t.shape, KMEANS)
        entries = next(e for e in ENTRIES if 2**bits <= e)
        rows = tiles.rows if INTERPRETED else kmeans_rows(tiles.columns, entries)
        scratch = (torch.empty(x.shape, dtype=torch.int32, device=t.device) for x in (t, codebook))
        constants = {"STEPS": KMEANS_STEPS, "ENTRIES": entries, **tiles.constants, "ROWS": rows}
        run(
            kmeans_kernel, -(-t.shape[0] // rows), t, *t.shape, bits, iterations, *scratch, codes, codebook, **constants
        )
    return like(codes, x), like(codebook, x)


@triton.jit
def lookup_kernel(
    codes_ptr,
    codebook_ptr,
    height: tl.int64,
    width: tl.int64,
    across: tl.int64,
    entries: tl.int32,
    out_ptr,
    highest_ptr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Look up codebook[row, code]; `highest` becomes the highest code without an entry."""
    tile = tl.program_id(0).to(tl.int64)
    row = tile // across * ROWS + tl.arange(0, ROWS)
    inside, at = cells(row, tile % across * COLUMNS + tl.arange(0, COLUMNS), row < height, width)
    code = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.int32)
    value = tl.load(codebook_ptr + (row[:, None] * entries + code), mask=inside & (code < entries), other=0.0)
    tl.store(out_ptr + at, value, mask=inside)
    highest = tl.max(tl.max(code, axis=1), axis=0)
    tl.atomic_max(highest_ptr, highest, mask=highest >= entries, sem="relaxed")


def row_lookup(codes: Array, codebook: Array) -> Array:
    """See `shrinkpoint.kernels.rows.row_lookup`."""
    t, book = tensor(codes), tensor(codebook)
    out = torch.empty(t.shape, dtype=torch.float32, device=t.device)
    if t.numel():
        tiles = _tiles(t.shape)
        highest = torch.zeros(1, dtype=torch.int32, device=t.device)
        inputs = t, book, *t.shape, tiles.across, book.shape[1]
        run(lookup_kernel, tiles.down * tiles.across, *inputs, out, highest, **tiles.constants)
        found = int(highest.item())
        if found >= book.shape[1]:
            raise unknown_code(found, book.shape[1])
    return like(out, codes)
