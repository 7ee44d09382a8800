"""The codebook of an array: fitted to its histogram, or kept from its parent if good enough.

A codebook refit from scratch moves every boundary and throws the delta away; a frozen one makes deltas small. So the
default keeps the parent's until its error passes `trigger` times the least possible, and notes the reason.

Log buckets are as wide as values are large. Of weights at 1 +- 0.001 a sketch to 1 % sees two or three values, and a
codebook fitted to it flattens them. Their distances from their own middle are sketched instead, in one more pass over
the array, which ordinary weights do not need.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...kernels.backend.arrays import is_torch, on_gpu, to_cpu
from ...kernels.backend.floats import FORMATS
from ...kernels.histogram import Histogram, log_histogram, merge
from ...kernels.kmeans import bucket_weights, least_losses, quantization_loss, weighted_kmeans, weighted_kmeans_many
from ...kernels.quantizer import Thresholds, assign
from ..base import CHUNK, Leaf
from ..parallel import map_chunks
from ..state.casting import unit
from ..state.leaves import Array, LeafSpec, NpArray, as_bytes, from_bytes, on_host

MOST = 254
"""Most entries of a codebook: a level is a byte, and two levels are taken."""
FINER = 0.8
"""A uniform parent this much finer than need be is replaced: its error is small, but bits are wasted."""
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Fit:
    """Settings for fitting a codebook.

    Args:
        bins: entries, 2 to 254.
        sigma: weight of a bucket = sigma * frequency + (1 - sigma) * magnitude, each summing to one; in [0, 1].
        solver: "exact", "kmeans++", or "uniform": equidistant entries with the error of the exact codebook of `bins`.
        policy: "refit", "warm" (Lloyd from the parent's) or "frozen" (the parent's until `trigger`).
        trigger: frozen codebooks are refit when their loss passes this multiple of the best; at least 1.
        seed: of kmeans++.
    """

    bins: int
    sigma: float
    solver: str
    policy: str
    trigger: float
    seed: int


def largest_of(histogram: Histogram) -> float:
    """Return the magnitude of the largest bucket in use of a signed histogram, or 0."""
    return float(np.abs(histogram.values()[np.flatnonzero(histogram.counts[:-1])]).max(initial=0.0))


def _spread_within(values: Floats, weights: Floats, bits: int) -> float:
    """Return the weighted variance inside buckets, a lower bound for every codebook on buckets."""
    _, exponent = np.frexp(values)
    width = np.where(values == 0, 0.0, np.ldexp(1.0, exponent - 1 - bits))
    return float((weights * width * width).sum() / 12)


@dataclass(frozen=True, slots=True)
class Cells:
    """Counts of values in log buckets, the data for fitting a codebook.

    Args:
        local: float64 [n], ascending: middles of the buckets, as distances from `offset`.
        counts: int64 [n], elements in each, > 0.
        bits: of the buckets, an octave of distances has `2**bits`.
        offset: what the buckets are counted from; 0 in a sketch of the values themselves.
        sharp: whether the elements of a bucket are all equal.
    """

    local: Floats
    counts: NpArray
    bits: int
    offset: float = 0.0
    sharp: bool = False

    @staticmethod
    def of(histogram: Histogram, offset: float = 0.0, *, sharp: bool = False) -> Cells:
        """Return the buckets of a signed histogram that are not empty."""
        present = np.flatnonzero(histogram.counts[:-1])
        return Cells(histogram.values()[present], histogram.counts[present], histogram.bits, offset, sharp)

    @property
    def values(self) -> Floats:
        """Middles of the buckets."""
        return self.restored(self.local)

    def within(self, weights: Floats, scale: float = 1.0) -> float:
        """Weighted variance inside the buckets, of values times `scale`."""
        return 0.0 if self.sharp else _spread_within(self.local * scale, weights, self.bits)

    def loss(self, codebook: Floats, scale: float = 1.0) -> float:
        """Return the sum of squared distances from a codebook, with elements at bucket midpoints."""
        return quantization_loss(self.local * scale, self.counts.astype(np.float64), self.placed(codebook) * scale)

    def placed(self, codebook: Floats) -> Floats:
        """Return entries as distances from `offset`."""
        return codebook - self.offset if self.offset else codebook

    def restored(self, entries: Floats) -> Floats:
        """The inverse of `placed`."""
        return entries + self.offset if self.offset else entries


FEW_BINS = 16
"""Bins from which on the loss of the best codebook is known well enough without the codebook."""
NEGLIGIBLE = 2.0**-20
BLURRED = 0.05
"""A sketch is too coarse where the spread inside of its buckets is more than this share of a codebook's loss."""


def too_coarse(cells: Cells, codebook: Floats) -> bool:
    """Return whether the sketch's own error is as large as the codebook's loss."""
    if codebook.size == 0 or cells.local.size == 0:
        return False
    scale = unit(float(np.abs(cells.values).max()))
    return cells.within(cells.counts.astype(np.float64), scale) > BLURRED * cells.loss(codebook, scale)


class Lost(NamedTuple):
    """Shares of the elements whose error is as large as if they were set to zero.

    Args:
        counted: of those that are not negligible: at least a millionth of the root mean square.
        nonzero: of all but zeros.
    """

    counted: float
    nonzero: float


def lost_share(cells: Cells, codebook: Floats) -> Lost:
    """Return the loss by rounding to the nearest entries of a codebook."""
    scale = unit(float(np.abs(cells.values).max(initial=0.0)))
    values, entries = cells.values * scale, codebook * scale
    if not entries.size or not values.any():
        return Lost(0.0, 0.0)
    nearest = entries[np.searchsorted((entries[1:] + entries[:-1]) / 2, values)]
    return _lost(values, nearest, cells.counts)


def lost_to_step(cells: Cells, step: float) -> Lost:
    """Return the loss by rounding to the multiples of a step."""
    scale = unit(float(np.abs(cells.values).max(initial=0.0)))
    values, width = cells.values * scale, step * scale
    return _lost(values, np.rint(values / width) * width, cells.counts) if values.any() else Lost(0.0, 0.0)


def _lost(values: Floats, nearest: Floats, counts: Floats) -> Lost:
    size, share = np.abs(values), counts / counts.sum()
    least = NEGLIGIBLE * math.sqrt(float((share * size * size).sum()))
    lost = np.abs(nearest - values) >= size
    return Lost(*(float(share[of & lost].sum() / share[of].sum()) for of in (size >= least, size > 0)))


def variance(histogram: Histogram) -> float:
    """Return the variance of the counted elements of a signed histogram."""
    present = np.flatnonzero(histogram.counts[:-1])
    values, counts, n = histogram.values()[present], histogram.counts[present], histogram.total
    if n == 0:
        return 0.0
    mean = float((counts * values).sum()) / n
    return float((counts * (values - mean) ** 2).sum()) / n


@dataclass(frozen=True, slots=True)
class Problem:
    """The weighted k-means problem of `fit`.

    Args:
        centers: float64 [m], ascending.
        weights: float64 [m], >= 0, not all 0.
        bins: most entries.
        method: "exact" or "kmeans++".
        seed: of kmeans++.
        start: float64, ascending: codebook from which Lloyd's iteration starts; None: no iteration.
    """

    centers: Floats
    weights: Floats
    bins: int
    method: str
    seed: int
    start: Floats | None = None

    def solve(self) -> Floats:
        """Return the codebook entries, ascending, on the host."""
        codes: Floats = weighted_kmeans(
            self.centers, self.weights, self.bins, method=self.method, initial=self.start, seed=self.seed
        )
        return codes


def solve_together(problems: Sequence[Problem], place: Array) -> list[Floats]:
    """Solve the problems of one codec in one launch on the tensor's GPU, as `solve` does."""
    import torch

    def moved(columns: Sequence[Floats]) -> list[Array]:
        joined = torch.from_numpy(np.concatenate(columns)).to(place.device)
        return list(torch.split(joined, [column.size for column in columns]))

    first, starts = problems[0], [p.start for p in problems]
    given = iter(moved([start for start in starts if start is not None]) if any(s is not None for s in starts) else ())
    codes = weighted_kmeans_many(
        list(zip(moved([p.centers for p in problems]), moved([p.weights for p in problems]), strict=True)),
        [p.bins for p in problems],
        first.method,
        initial=[None if start is None else next(given) for start in starts],
        seed=first.seed,
    )
    return np.split(to_cpu(torch.cat(codes)).numpy(), np.cumsum([c.shape[0] for c in codes])[:-1])


def problem_of(cells: Cells, how: Fit, parent: Floats | None) -> Problem | None:
    """Return the problem that `fit` with these arguments has to solve.

    None for "uniform", and if nothing is counted.
    """
    if how.solver == "uniform":
        return None
    weights = bucket_weights(cells.counts, cells.values, how.sigma)
    return _problem(cells, weights, how, parent) if weights.any() else None


def _problem(cells: Cells, weights: Floats, how: Fit, parent: Floats | None) -> Problem:
    if _is_warm(how, parent) and parent is not None:
        return Problem(cells.local, weights, how.bins, how.solver, how.seed, cells.placed(parent))
    return Problem(cells.local, weights, how.bins, how.solver, how.seed)


def _is_warm(how: Fit, parent: Floats | None) -> bool:
    return how.policy == "warm" and parent is not None and parent.size == how.bins


def uniform(cells: Cells, weights: Floats, bins: int) -> Floats:
    """Return multiples of a step over all values, with the loss of the best `bins` entries.

        step = sqrt(12 D),  D = mean squared error of the best codebook of `bins` entries

    An optimal codebook of so many entries is not optimal for an entropy coder: of all codebooks with the same error the
    equidistant one has very nearly the least entropy, and the fewest values that cross a boundary between checkpoints.
    The step is rounded to 8 bits, so that multiples are exact; there are at most 254 entries.

    Args:
        cells: the elements.
        weights: of the cells, float64 [n].
        bins: entries of the codebook whose error is aimed at.

    Source: Gish and Pierce 1968 (asymptotically efficient quantizing).
    """
    used = weights > 0
    values, mass = cells.local[used], weights[used]
    if bins >= values.size:
        return cells.restored(values)
    scale = unit(float(np.abs(cells.values).max()))
    if bins < FEW_BINS:
        least = quantization_loss(values * scale, mass, weighted_kmeans(values * scale, mass, bins))
    else:
        least = float(least_losses(values * scale, mass, np.array([values.size]), bins)[0])
    loss = least + cells.within(weights, scale)
    low, high = float(cells.values[0]), float(cells.values[-1])
    step = step_of(loss / float(mass.sum()), scale, low, high)
    if 0 < step < math.inf:
        entries = multiples(low, high, step)
        if entries.size <= MOST:  # more where no step is as small as it should be, among subnormals
            return entries
    bins = min(bins, MOST - has_zero(cells))
    return cells.restored(weighted_kmeans(values * scale, mass, bins) / scale)


def step_of(error: float, scale: float, low: float, high: float) -> float:
    """Return the step of multiples with this mean squared error, wide enough for `MOST` entries.

    Args:
        error: mean squared error of values times `scale`.
        scale: a power of two.
        low, high: the least and the largest value.
    """
    step = max(math.sqrt(12 * error) / scale, (high / 2 - low / 2) / (MOST - 2) * 2)
    return to_8_bits(step, up=True)


def to_8_bits(step: float, *, up: bool = False) -> float:
    """Round a step to 8 bits of mantissa so that multiples are exact; infinite if too large."""
    mantissa, exponent = math.frexp(step)
    try:
        return math.ldexp(math.ceil(mantissa * 256) if up else round(mantissa * 256), exponent - 8)
    except OverflowError:
        return math.inf


def multiples(low: float, high: float, step: float) -> Floats:
    """Return the multiples of a step nearest to values from `low` to `high`; at least one."""
    first = math.floor(low / step + 0.5)
    with np.errstate(over="ignore"):  # half a step beyond the largest float64
        entries = np.arange(first, max(first, math.ceil(high / step - 0.5)) + 1, dtype=np.float64) * step
    most = np.finfo(np.float64).max
    found: Floats = np.clip(entries, -most, most)
    return found


def fit(sketch: Histogram | Cells, how: Fit, parent: Floats | None, codes: Floats | None = None) -> tuple[Floats, str]:
    """Fit a codebook to the elements counted in a signed histogram.

    Args:
        sketch: of the elements to quantize.
        how: bins, weights, solver, policy.
        parent: the parent's codebook of the same array, ascending, or None.
        codes: the solution of `problem_of` these three, where it is known already.

    Returns:
        Ascending float64 codebook of at most `how.bins` entries (fewer when there are fewer distinct buckets), and the
        reason: "new", "refit", "warm", "frozen", or "refit: ..." with what triggered it.
    """
    cells = sketch if isinstance(sketch, Cells) else Cells.of(sketch)
    weights = bucket_weights(cells.counts, cells.values, how.sigma)
    if not weights.any():
        return np.empty(0), "empty"
    if how.solver == "uniform":
        best = uniform(cells, weights, how.bins)
    else:
        codes = _problem(cells, weights, how, parent).solve() if codes is None else codes
        best = cells.restored(codes)
        if _is_warm(how, parent):
            return best, "warm"
    if parent is None or parent.size == 0:
        return best, "new"
    if how.policy != "frozen":
        return best, "refit"
    if how.solver == "uniform":
        if parent.size > 1 and best.size > 1 and spacing(parent) < FINER * spacing(best):
            return best, f"refit: the parent's step is {spacing(parent) / spacing(best):.3g} of the new one"
    elif parent.size != best.size:
        return best, f"refit: {parent.size} entries became {best.size}"
    used = np.flatnonzero(weights)
    kept = dataclasses.replace(cells, local=cells.local[used], counts=cells.counts[used])
    scale = unit(float(np.abs(kept.values).max()))
    floor = kept.within(weights[used], scale)
    own = (cells.placed(c) * scale for c in (parent, best))
    loss, least = (quantization_loss(kept.local * scale, weights[used], c) + floor for c in own)
    if loss <= how.trigger * least:
        return parent, "frozen"
    return (
        best,
        f"refit: the parent's gives {loss / least:.3g} times the error" if least else "refit: the best is exact",
    )


def spacing(codebook: Floats) -> float:
    """Return the mean distance of a codebook's entries; infinite if it overflows float64."""
    half = float(codebook[-1]) / 2 - float(codebook[0]) / 2
    return half / (codebook.size - 1) * 2


def predicted_error(sketch: Histogram | Cells, codebook: Floats) -> float:
    """Predict the relative L2 error of quantization with this codebook, from the sketch alone."""
    cells = sketch if isinstance(sketch, Cells) else Cells.of(sketch)
    if codebook.size == 0 or cells.local.size == 0:
        return 0.0
    values = cells.values
    scale = unit(float(np.abs(values).max()))
    weights = cells.counts.astype(np.float64)
    norm = float((weights * (values * scale) ** 2).sum())
    loss = cells.loss(codebook, scale) + cells.within(weights, scale)
    return math.sqrt(loss / norm) if norm else 0.0


FARTHEST = 1 << 31
"""Multiples beyond this have no codebook of their own kind: their steps would be lost in rounding."""


def codebook_array(codebook: NpArray, spec: LeafSpec) -> Array:
    """Convert a float64 codebook to the array's library and dtype, which hold it exactly."""
    if spec.library == "torch":
        import torch

        return torch.from_numpy(codebook).to(getattr(torch, spec.dtype))
    return codebook.astype(from_bytes(np.empty(0, np.uint8), spec).dtype)


def rounded_codebook(codebook: NpArray, spec: LeafSpec) -> NpArray:
    """Round a codebook to the array's dtype and merge equal entries; float64."""
    with np.errstate(over="ignore"):
        wide = widened(codebook_array(codebook, spec))
    return np.unique(wide[np.isfinite(wide)] + 0.0)


def uniform_of(codebook: NpArray, spec: LeafSpec) -> tuple[int, float] | None:
    """Return first multiple and step of a codebook; None if its entries are not multiples."""
    # Rounding the entries to 16 bits moves their mean distance a little off the step, which has 8 bits.
    for step in (spacing(codebook), to_8_bits(spacing(codebook))) if codebook.size > 1 else ():
        first = round(float(codebook[0]) / step) if 0 < step < np.inf else FARTHEST
        if abs(first) < FARTHEST and np.array_equal(multiples_of(first, codebook.size, step, spec), codebook):
            return first, step
    return None


def multiples_of(first: int, size: int, step: float, spec: LeafSpec) -> NpArray:
    """Return `size` multiples of a step from the `first`-th, in the array's dtype's precision."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        wide = np.arange(first, first + size) * step
        if spec.dtype in ("float32", "float16"):
            return wide.astype(spec.dtype).astype(np.float64)
        return wide if spec.dtype == "float64" else widened(codebook_array(wide, spec))


def widened(codebook: Array) -> NpArray:
    """Return values of any float dtype as float64 on the host."""
    with np.errstate(invalid="ignore"):
        wide: NpArray = codebook.double().numpy() if is_torch(codebook) else codebook.astype(np.float64)
    return wide


_ROUNDS = 4
_FINEST = 8
"""Bits of the finest sketch of distances: 1 MiB of counters for float32, to 2**-9 of each distance."""


def middle(cells: Cells) -> float:
    """Return the mean of the counted elements, or 0 if they are not concentrated around it."""
    scale = unit(float(np.abs(cells.values).max()))
    weights, local, offset = cells.counts / cells.counts.sum(), cells.local * scale, cells.offset * scale
    mean = float((weights * local).sum())
    about_zero = float((weights * np.abs(local + offset)).sum())
    spread = float((weights * np.abs(local - mean)).sum())
    return (offset + mean) / scale if spread < 0.25 * about_zero else 0.0


def fit_closely(
    leaf: Leaf,
    thresholds: Thresholds,
    cells: Cells,
    how: Fit,
    parent: Floats | None,
    looked: int = 0,
    codes: Floats | None = None,
    few: Floats | None = None,
) -> tuple[Floats, str, Cells, int]:
    """Fit a codebook to a fine enough sketch; return codebook, reason, sketch and refinements.

    The published k-means++ has the published sketch.

    Args:
        leaf: the array.
        thresholds: which of its elements are neither pruned nor protected.
        cells: a sketch of these.
        how: as for `fit`.
        parent: as for `fit`.
        looked: how many times `cells` were refined already.
        codes: as for `fit`, of these cells.
        few: all distinct values of the array if they are few, so that each gets an entry; else None.
    """
    codebook, reason = fit(cells, how, parent, codes)
    if few is not None:
        known = np.isin(few, codebook).all()
        return codebook if known else few, reason if known else "of all its values", cells, looked
    while how.solver != "kmeans++" and too_coarse(cells, codebook):
        closer = finer(leaf, thresholds, cells, looked)
        if closer is None:
            break
        cells, looked = closer, looked + 1
        codebook, reason = fit(cells, how, parent)
    return codebook, reason, cells, looked


def finer(leaf: Leaf, thresholds: Thresholds, cells: Cells, number: int) -> Cells | None:
    """Count the quantized elements in finer buckets; return None if that is impossible.

    Args:
        leaf: the array.
        thresholds: which of its elements are neither pruned nor protected.
        cells: a sketch of these.
        number: of the attempt, from 0; each looks closer.
    """
    fmt = FORMATS[leaf.spec.dtype]
    if number == _ROUNDS or cells.sharp:
        return None
    # An array of 16 bits has few values: buckets that are as fine hold one each.
    sharp = fmt.width == 16
    bits = fmt.mantissa if sharp else max(cells.bits, min(cells.bits + 2, _FINEST))
    offset = 0.0 if sharp else _rounded(middle(cells), leaf)
    if not math.isfinite(offset) or (not sharp and (bits, offset) == (cells.bits, cells.offset)):
        return None

    def one(start: int) -> Histogram:
        x = leaf.flat[start : start + CHUNK]
        gradient = None if leaf.gradient is None else leaf.gradient[start : start + CHUNK]
        # Below the codebook there are two levels, of elements without an entry.
        kept = x[assign(x, thresholds, np.zeros(1), gradient=gradient) >= 2]
        with np.errstate(over="ignore"):
            return log_histogram(kept - offset if offset else kept, bits, signed=True)

    counted = merge(*map_chunks(one, range(0, leaf.spec.size, CHUNK)))
    # The kept are finite; a distance, or the middle of a bucket, that is not is beyond the format's range.
    found = Cells.of(counted, offset, sharp=sharp)
    with np.errstate(over="ignore"):
        return None if counted.counts[-1] or not np.isfinite(found.values).all() else found


def _rounded(offset: float, leaf: Leaf) -> float:
    """Round to the array's format, so that differences of nearby values are exact."""
    wide = np.float64 if leaf.spec.dtype == "float64" else np.float32
    with np.errstate(over="ignore"):
        return float(wide(offset))


def held_codebook(codebook: NpArray, cells: Cells, how: Fit, spec: LeafSpec) -> NpArray:
    """Round the codebook to the array's dtype; use the best one if a uniform one loses too much.

    If equidistant entries are only a little farther apart than the values of a 16-bit array, some fall on a value, and
    others between two values.
    """
    held = rounded_codebook(codebook, spec)
    if not cells.sharp or how.solver != "uniform":
        return held
    exact = dataclasses.replace(how, solver="exact", bins=min(how.bins, MOST - has_zero(cells)))
    best = rounded_codebook(fit(cells, exact, None)[0], spec)
    return best if cells.loss(held) > how.trigger * cells.loss(best) else held


def has_zero(cells: Cells) -> bool:
    """Return whether some of the counted elements are 0, such as a padding row."""
    return not cells.offset and bool((cells.local == 0).any())


def with_zero(codebook: NpArray, cells: Cells) -> NpArray:
    """Return a codebook with an entry 0 if some of the counted elements are 0."""
    if not codebook.size or not has_zero(cells) or (codebook == 0).any():
        return codebook
    others = np.delete(codebook, np.abs(codebook).argmin()) if codebook.size == MOST else codebook
    return np.union1d(others, 0.0)


def few_values(leaf: Leaf, cells: Cells, most: int) -> NpArray | None:
    """Return all distinct finite values, ascending, if at most `most`: each becomes an entry."""
    if not 0 < cells.counts.size <= most:
        return None
    values = np.empty(0)
    for start in range(0, leaf.spec.size, CHUNK):
        part = _patterns(leaf.flat[start : start + CHUNK], leaf.spec, most)
        values = np.union1d(values, part[np.isfinite(part)] + 0.0)
        if values.size > most:
            return None
    return values if values.size else None


def _patterns(x: Array, spec: LeafSpec, most: int) -> NpArray:
    """Return the values of the bit patterns in x, float64 on the host.

    From a GPU only finite values come, and no more than needed to decide whether they are at most `most`.
    """
    if on_gpu(x):
        import torch

        found = torch.unique(x.view(getattr(torch, f"int{8 * spec.itemsize}"))).view(x.dtype)
        return on_host(found[torch.isfinite(found)][: most + 2].double())  # two of them may be zeros
    # Integers are hashed, floats are sorted.
    return widened(from_bytes(np.unique(as_bytes(x).view(f"<u{spec.itemsize}")).view(np.uint8), spec))
