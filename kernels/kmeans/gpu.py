"""Weighted k-means on the GPU: all codebooks of a model in one launch, one program each.

Exact problems stay on the device. k-means++ is seeded on the host, because each draw needs a sum in a fixed order. The
order of operations is defined in `reference.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..backend.arrays import Array, to_cpu
from ..backend.gpu import Launch, like, run, tensor
from . import prepared

Vector = np.ndarray[Any, np.dtype[np.float64]]
Table = np.ndarray[Any, np.dtype[np.int64]]

EXACT = Launch(block=2048, warps=8, interpreted=1 << 14)
"""`block` is the number of candidates that a program compares at once."""
LLOYD = Launch(block=256, warps=8)
"""`block` is the number of codes whose means a program computes at once, in both kernels."""
CUTS = 1 << 26
"""Maximum number of cuts that the problems of one launch store (256 MiB)."""
FIELDS = 9
"""Number of columns of the table in which a program finds its problem; see `_Problem`."""


@triton.jit
def solve_depth(
    weight_ptr,
    moment_ptr,
    best_ptr,
    next_ptr,
    cut_ptr,
    depth,
    low,
    high,
    first,
    last,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Solve all segments of one depth of the divide and conquer.

    NODES segments are solved in parallel, with BLOCK / NODES candidates at a time. The bits of the segment number
    select a half at each depth. The candidates of a segment are bounded by the cuts of the nearest middles below and
    above it, which earlier depths have stored in `cut`.
    """
    width: tl.constexpr = BLOCK // NODES
    lane = tl.arange(0, width)
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
        for offset in range(0, tl.max(end - begin, axis=0) + 1, width):
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
            # A separate reduction finds the smallest candidate that reaches the maximum.
            where = tl.min(tl.where(gain == top[:, None], i, 2147483647), axis=1)
            better = top > most
            at = tl.where(better, where, at)
            most = tl.where(better, top, most)
        tl.store(next_ptr + j, most, mask=exists)
        tl.store(cut_ptr + j, at, mask=exists)
    tl.debug_barrier()


@triton.jit
def segment_means(x_ptr, w_ptr, start, end, nonempty, shift):
    """Sums and clipped means of the segments [start, end), one lane per segment.

    Sums of w and of w * (x - shift), in ascending order.
    """
    mass = tl.zeros_like(start).to(tl.float64)
    lever = tl.zeros_like(start).to(tl.float64)
    for offset in range(tl.max(tl.where(nonempty, end - start, 0), axis=0)):
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
def scaled(x, exponent):
    """Multiply by 2**exponent with one rounding.

    Powers of two that a float64 cannot hold are split, the small part first.
    """
    most = tl.minimum(tl.maximum(exponent, -1022), 1022)
    rest = (exponent - most).to(tl.int64)
    factor = (most.to(tl.int64) + 1023) << 52
    return x * ((rest + 1023) << 52).to(tl.float64, bitcast=True) * factor.to(tl.float64, bitcast=True)


@triton.jit
def exponent_of(pattern):
    """Exponent e with |x| in [2**(e - 1), 2**e), from the pattern without sign.

    x is a finite float64; 0 for zero.
    """
    normal = (pattern >> 52) - 1022
    subnormal = (pattern.to(tl.float64).to(tl.int64, bitcast=True) >> 52) - 1022 - 1074
    e = tl.where(normal > -1022, normal, subnormal)
    return tl.where(pattern == 0, 0, e).to(tl.int32)


@triton.jit
def prepare_kernel(
    raw_x_ptr,
    raw_w_ptr,
    table_ptr,
    x_ptr,
    w_ptr,
    weight_ptr,
    moment_ptr,
    odd_ptr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scale one problem and write its exponent and prefix sums.

    Prefix sums are added one after another.

    `odd` becomes 1 if the problem needs more preparation: a number is not finite, a center or weight underflows, or two
    centers are equal.
    """
    field_ptr = table_ptr + tl.program_id(0) * FIELDS
    m = tl.load(field_ptr).to(tl.int32)
    x_at = tl.load(field_ptr + 4)
    prefix_at = tl.load(field_ptr + 5)
    raw_x_ptr += x_at
    raw_w_ptr += x_at
    x_ptr += x_at
    w_ptr += x_at
    weight_ptr += prefix_at
    moment_ptr += prefix_at
    lanes = tl.arange(0, BLOCK)
    largest_x = tl.zeros((BLOCK,), tl.int64)
    largest_w = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, m, BLOCK):
        mine = begin + lanes < m
        x = tl.load(raw_x_ptr + begin + lanes, mask=mine, other=0.0)
        w = tl.load(raw_w_ptr + begin + lanes, mask=mine, other=0.0)
        largest_x = tl.maximum(largest_x, x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF)
        largest_w = tl.maximum(largest_w, w.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF)
    top_x = tl.max(largest_x, axis=0)
    top_w = tl.max(largest_w, axis=0)
    exponent = exponent_of(top_x)
    exponent_w = exponent_of(top_w)
    odd = (tl.maximum(top_x, top_w) >= 0x7FF0000000000000).to(tl.int32)
    for begin in range(0, m, BLOCK):
        i = begin + lanes
        mine = i < m
        raw_x = tl.load(raw_x_ptr + i, mask=mine, other=0.0)
        x = scaled(raw_x, -exponent)
        before = scaled(tl.load(raw_x_ptr + (i - 1), mask=mine & (i > 0), other=0.0), -exponent)
        w = scaled(tl.load(raw_w_ptr + i, mask=mine, other=0.0), -exponent_w)
        tl.store(x_ptr + i, x, mask=mine)
        tl.store(w_ptr + i, w, mask=mine)
        bad = mine & ((w == 0.0) | ((x == before) & (i > 0)) | (scaled(x, exponent) != raw_x))
        odd = tl.maximum(odd, tl.max(bad.to(tl.int32), axis=0))
    tl.store(field_ptr + 2, exponent.to(tl.int64))
    tl.store(odd_ptr, 1, mask=odd > 0)  # every program writes the same value
    tl.debug_barrier()
    shift = tl.load(x_ptr + (m >> 1), mask=m > 0, other=0.0)
    mass = shift * 0.0
    lever = mass
    tl.store(weight_ptr, mass)
    tl.store(moment_ptr, lever)
    for at in range(m):
        w = tl.load(w_ptr + at)
        step = w * (tl.load(x_ptr + at) - shift)
        mass = mass + w
        lever = lever + step
        tl.store(weight_ptr + (at + 1), mass)
        tl.store(moment_ptr + (at + 1), lever)


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
    FIELDS: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Optimal codebook of one problem by dynamic programming.

    `table` has a row of FIELDS numbers per problem.
    """
    field_ptr = table_ptr + tl.program_id(0) * FIELDS
    m = tl.load(field_ptr).to(tl.int32)
    k = tl.load(field_ptr + 1).to(tl.int32)
    exponent = tl.load(field_ptr + 2).to(tl.int32)
    codes_ptr += tl.load(field_ptr + 3)
    x_ptr += tl.load(field_ptr + 4)
    w_ptr += tl.load(field_ptr + 4)
    weight_ptr += tl.load(field_ptr + 5)
    moment_ptr += tl.load(field_ptr + 5)
    scratch_ptr += tl.load(field_ptr + 6)
    cuts_ptr += tl.load(field_ptr + 7)
    stride = (m + 1).to(tl.int64)  # of a row of cuts
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
        next_ptr = scratch_ptr + (1 - (row & 1)) * (m + 1)
        cut_ptr = cuts_ptr + row * stride
        low = tl.where(row == k, m, row)
        high = m - (k - row)
        # The first segments are few and long, the last ones many and short.
        depth = 0
        while (1 << depth) <= high - low + 1:
            if depth < 3:
                solve_depth(
                    weight_ptr, moment_ptr, best_ptr, next_ptr, cut_ptr, depth, low, high, row - 1, m - 1, 4, BLOCK
                )
            elif depth < 7:
                solve_depth(
                    weight_ptr, moment_ptr, best_ptr, next_ptr, cut_ptr, depth, low, high, row - 1, m - 1, 64, BLOCK
                )
            else:
                solve_depth(
                    weight_ptr, moment_ptr, best_ptr, next_ptr, cut_ptr, depth, low, high, row - 1, m - 1, 256, BLOCK
                )
            depth += 1
    # Backward pass: cluster r begins at the cut of row r. The cuts of all codes are stored, then used one per lane.
    end = m
    for step in range(k):
        row = k - step
        start = tl.load(cuts_ptr + row * stride + end, mask=row > 1, other=0)
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
def points_up_to(x_ptr, edge, m, steps):
    """Number of ascending x that are <= edge, one lane an edge, by bisection; `2**steps > m`."""
    count = tl.zeros_like(edge).to(tl.int32)
    for step in range(steps):
        ahead = count + (1 << (steps - 1 - step))
        possible = ahead <= m
        last = tl.load(x_ptr + (ahead - 1), mask=possible, other=float("inf"))
        count = tl.where(possible & (last <= edge), ahead, count)
    return count


@triton.jit
def lloyd_kernel(
    x_ptr,
    w_ptr,
    table_ptr,
    iterations: tl.int32,
    scratch_ptr,
    codes_ptr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Lloyd's iteration of one problem from the codes in place, until nothing changes."""
    field_ptr = table_ptr + tl.program_id(0) * FIELDS
    m = tl.load(field_ptr).to(tl.int32)
    k = tl.load(field_ptr + 1).to(tl.int32)
    exponent = tl.load(field_ptr + 2).to(tl.int32)
    codes_ptr += tl.load(field_ptr + 3)
    x_ptr += tl.load(field_ptr + 4)
    w_ptr += tl.load(field_ptr + 4)
    scratch_ptr += tl.load(field_ptr + 6)
    steps = tl.load(field_ptr + 8).to(tl.int32)
    shift = tl.load(x_ptr + (m >> 1))
    lanes = tl.arange(0, BLOCK)
    iteration = 0
    changed = 1
    while (iteration < iterations) & (changed > 0):
        changed = 0
        for begin in range(0, k, BLOCK):
            c = begin + lanes
            mine = c < k
            old = tl.load(codes_ptr + c, mask=mine, other=0.0)
            below = tl.load(codes_ptr + (c - 1), mask=mine & (c > 0), other=0.0)
            above = tl.load(codes_ptr + (c + 1), mask=c + 1 < k, other=0.0)
            start = points_up_to(x_ptr, 0.5 * below + 0.5 * old, m, steps)
            end = points_up_to(x_ptr, 0.5 * old + 0.5 * above, m, steps)
            start = tl.where(c > 0, start, 0)
            end = tl.where(c + 1 < k, end, m)
            nonempty = mine & (end > start)
            mass, mean = segment_means(x_ptr, w_ptr, start, end, nonempty, shift)
            new = tl.where(nonempty & (mass > 0.0), mean, old)
            tl.store(scratch_ptr + c, new, mask=mine)
            changed = tl.maximum(changed, tl.max((mine & (new != old)).to(tl.int32), axis=0))
        tl.debug_barrier()  # all old codes have been read
        for begin in range(0, k, BLOCK):
            c = begin + lanes
            tl.store(codes_ptr + c, tl.load(scratch_ptr + c, mask=c < k, other=0.0), mask=c < k)
        tl.debug_barrier()
        iteration += 1
    for begin in range(0, k, BLOCK):
        c = begin + lanes
        tl.store(codes_ptr + c, scaled(tl.load(codes_ptr + c, mask=c < k, other=0.0), exponent), mask=c < k)


@dataclass(frozen=True, slots=True)
class _Problem:
    """A prepared problem and its codes.

    The codes are the start of Lloyd's iteration, the result (`solver` None), or room for it.

    A row of the table holds m, k, exponent, the positions of its codes, points, prefix sums, scratch and cuts, and the
    number of steps of a bisection among its points.
    """

    x: Vector
    w: Vector
    codes: Vector
    exponent: int
    solver: str | None


def _prepared(centers: Vector, weights: Vector, k: int, method: str, initial: Vector | None, seed: int) -> _Problem:
    """Return a problem in the kernel's form, already solved if there is nothing to choose."""
    x, w, exponent = prepared(centers, weights)
    if initial is not None and x.size:
        return _Problem(x, w, np.ldexp(initial, -exponent), exponent, "lloyd")
    if initial is not None:
        return _Problem(x, w, initial, exponent, None)
    if k >= x.size:
        return _Problem(x, w, np.ldexp(x, exponent), exponent, None)
    if method == "exact":
        return _Problem(x, w, np.empty(k), exponent, "exact")
    return _Problem(x, w, _seeds(x, w, k, seed), exponent, "lloyd")


def _seeds(x: Vector, w: Vector, k: int, seed: int) -> Vector:
    """Draw k distinct centers for k-means++; ascending.

    Each is drawn with probability `w * squared distance to the nearest drawn one`.
    """
    distance = np.ones(x.size)
    drawn = np.zeros(x.size, dtype=bool)
    for t in range(k):
        running = np.cumsum(w * distance)  # NumPy adds one after another here
        over = running > _uniform(seed, t) * running[-1]
        pick = int(np.argmax(over)) if over.any() else int(np.argmin(drawn))
        drawn[pick] = True
        step = x - x[pick]
        distance = step * step if t == 0 else np.minimum(distance, step * step)
    return x[drawn]


def _uniform(seed: int, counter: int) -> float:
    """Random number `counter` of the stream of `seed`, in [0, 1): SplitMix64's upper 53 bits."""
    mask = 2**64 - 1
    z = (seed + (counter + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return float((z ^ (z >> 31)) >> 11) * 2.0**-53


def _prefix(values: Vector) -> Vector:
    """Sums of the first 0 ... m values, added one after another."""
    return np.cumsum(np.concatenate([np.zeros(1), values]))


def _hosted(arrays: Sequence[Array]) -> list[Vector]:
    """Copy float64 arrays from the device to the host in one transfer."""
    flat = [tensor(a).to(torch.float64) for a in arrays]
    whole = to_cpu(torch.cat(flat)).numpy()
    return np.split(whole, np.cumsum([t.numel() for t in flat])[:-1])


@np.errstate(all="ignore")
def weighted_kmeans_many(
    problems: Sequence[tuple[Array, Array]],
    k: Sequence[int],
    method: str,
    initial: Sequence[Array | None],
    seed: int,
    iterations: int,
) -> list[Array]:
    """See `shrinkpoint.kernels.kmeans.weighted_kmeans_many`."""
    codes = None
    if method == "exact" and all(start is None for start in initial):
        codes = _exact(problems, k)
    if codes is None:
        hosted = iter(_hosted([a for p in problems for a in p] + [a for a in initial if a is not None]))
        pairs = [(next(hosted), next(hosted)) for _ in problems]
        starts = [None if a is None else next(hosted) for a in initial]
        prepared = [
            _prepared(*pair, one_k, method, start, seed) for pair, one_k, start in zip(pairs, k, starts, strict=True)
        ]
        codes = _solve(prepared, tensor(problems[0][0]).device, iterations)
    return [like(c, centers) for c, (centers, _) in zip(codes, problems, strict=True)]


def _table(sizes: Sequence[tuple[int, int, int]]) -> tuple[Table, int]:
    """Return the table of the problems (m, k, exponent) and the size of their scratch space.

    The positions of the cuts are not set yet.
    """
    table = np.zeros((len(sizes), FIELDS), dtype=np.int64)
    codes_at = x_at = prefix_at = 0
    for row, (m, k, exponent) in zip(table, sizes, strict=True):
        row[:] = m, k, exponent, codes_at, x_at, prefix_at, 2 * (prefix_at + codes_at), 0, m.bit_length()
        codes_at, x_at, prefix_at = codes_at + k, x_at + m, prefix_at + m + 1
    return table, 2 * (prefix_at + codes_at)


def _launches(table: Table, numbers: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the problems of one launch and the number of cuts each keeps.

    All cuts are kept, unless they take too much memory.
    """
    some: list[int] = []
    cuts: list[int] = []
    for number in numbers:
        own = int((table[number, 0] + 1) * (table[number, 1] + 1))
        if some and sum(cuts) + own > CUTS:
            yield some, cuts
            some, cuts = [], []
        some.append(number)
        cuts.append(own)
    if some:
        yield some, cuts


def _exact(problems: Sequence[tuple[Array, Array]], k: Sequence[int]) -> list[torch.Tensor] | None:
    """Optimal codebooks computed on the device; None for problems it cannot take.

    See `prepare_kernel`.
    """
    centers, weights = ([tensor(p[side]).to(torch.float64) for p in problems] for side in (0, 1))
    w_all = torch.cat(weights)
    if w_all.numel() == 0:
        return None
    used = w_all > 0.0
    ends = torch.tensor([c.numel() for c in centers]).cumsum(0).to(w_all.device)
    counted = torch.nn.functional.pad(used.cumsum(0), (1, 0))[ends].tolist()
    sizes = [b - a for a, b in zip([0, *counted[:-1]], counted, strict=True)]
    raw_x, raw_w = torch.cat(centers)[used], w_all[used]
    table, scratch = _table([(m, min(m, one), 0) for m, one in zip(sizes, k, strict=True)])
    rows = torch.from_numpy(table).to(w_all.device)
    x, w = torch.empty_like(raw_x), torch.empty_like(raw_w)
    weight, moment = raw_x.new_empty(raw_x.numel() + len(problems)), raw_x.new_empty(raw_x.numel() + len(problems))
    odd = torch.zeros(1, dtype=torch.int32, device=w_all.device)
    outputs = rows, x, w, weight, moment, odd  # the rows are inputs also
    run(prepare_kernel, len(problems), raw_x, raw_w, *outputs, FIELDS=FIELDS, **EXACT.constants(32 * max(sizes)))
    if odd.item():
        return None
    codes = raw_x.new_empty(sum(int(row[1]) for row in table))
    mine = [number for number, row in enumerate(table) if row[1] < row[0]]
    _launch_exact(x, w, weight, moment, table, rows, mine, scratch, codes)
    split = list(codes.split([int(row[1]) for row in table]))
    for number, row in enumerate(table):
        if row[1] == row[0]:  # a code for every center
            split[number] = raw_x[int(row[4]) : int(row[4] + row[0])]
    return split


def _launch_exact(
    x: torch.Tensor,
    w: torch.Tensor,
    weight: torch.Tensor,
    moment: torch.Tensor,
    table: Table,
    rows: torch.Tensor,
    numbers: Sequence[int],
    scratch: int,
    codes: torch.Tensor,
) -> None:
    """Launch the exact solution of the given problems; `rows` is their table on the device."""
    for some, cuts in _launches(table, numbers):
        mine = rows[some]
        mine[:, 7] = torch.tensor(np.cumsum([0, *cuts[:-1]]), device=x.device)
        rooms = x.new_empty(scratch), torch.empty(sum(cuts), dtype=torch.int32, device=x.device)
        constants = {"FIELDS": FIELDS, "CODES": LLOYD.block, **EXACT.constants(32 * int(table[some, 0].max()))}
        run(exact_kernel, len(some), x, w, weight, moment, mine, *rooms, codes, **constants)


def _solve(problems: list[_Problem], device: torch.device, iterations: int) -> list[torch.Tensor]:
    """Solve problems prepared on the host: one launch for exact ones, one for Lloyd's."""
    table, scratch = _table([(p.x.size, p.codes.size, p.exponent) for p in problems])
    columns = [
        np.concatenate([p.x for p in problems]),
        np.concatenate([p.w for p in problems]),
        np.concatenate([_prefix(p.w) for p in problems]),
        np.concatenate([_prefix(p.w * (p.x - p.x[p.x.size // 2])) if p.x.size else np.zeros(1) for p in problems]),
        np.concatenate([p.codes for p in problems]),
    ]
    x, w, weight, moment, codes = (torch.from_numpy(c).to(device) for c in columns)
    exact, lloyd = ([i for i, p in enumerate(problems) if p.solver == solver] for solver in ("exact", "lloyd"))
    rows = torch.from_numpy(table).to(device)
    _launch_exact(x, w, weight, moment, table, rows, exact, scratch, codes)
    if lloyd:
        constants = {"FIELDS": FIELDS, "BLOCK": LLOYD.block, **LLOYD.options}
        run(lloyd_kernel, len(lloyd), x, w, rows[lloyd], iterations, x.new_empty(scratch), codes, **constants)
    return list(codes.split([p.codes.size for p in problems]))


@np.errstate(all="ignore")
def quantization_loss(centers: Array, weights: Array, codebook: Array) -> float:
    """See `shrinkpoint.kernels.kmeans.quantization_loss`.

    The sum has a fixed order, so it is computed on the host.
    """
    x, w, codes = _hosted([centers, weights, codebook])
    nearest = codes[np.searchsorted(0.5 * codes[:-1] + 0.5 * codes[1:], x, side="left")]
    step = x - nearest
    terms = np.where(w > 0.0, w * (step * step), 0.0)
    return float(_prefix(terms)[-1])
