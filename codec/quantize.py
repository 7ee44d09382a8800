"""Weights as levels of a codebook: prune, protect, quantize, and a delta of the levels (Inshrinkerator's pipeline).

Piece 0 is what the levels refer to: the codebook (or "the parent's"), the protected values as bfloat16 differences to
the parent's, and those values that bfloat16 cannot hold, to the bit. The other pieces are chunks of levels
(`entropy.encode_levels`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..kernels.arguments import choice
from ..kernels.arrays import is_torch, on_gpu
from ..kernels.assign import Thresholds, assign, dequantize
from ..kernels.distortion import Distortion
from ..kernels.floats import FORMATS, bits_for
from ..kernels.histogram import Histogram, kept_histogram_many, log_histogram_many
from ..kernels.planes import difference, merge_planes, split_planes, undifference
from . import bfloat16, entropy
from .base import CHUNK, Leaf, Memory, Stored, check_range, rounded_error
from .batches import map_batches
from .cells import fit_closely
from .codebook import (
    MOST,
    Cells,
    Fit,
    fit,
    largest_of,
    predicted_error,
    problem_of,
    scaled_distortion,
    solve_together,
    spacing,
    to_8_bits,
    unit,
    variance,
)
from .errors import BadArgumentError, CorruptDataError
from .exact import Exact
from .fields import Reader, Writer
from .importance import mean_root, weights_of
from .leaves import Array, LeafSpec, NpArray, as_bytes, blocks, check_memory, from_bytes, on_host, taken
from .multiples import store_multiples
from .parallel import map_chunks
from .partition import Sketch, kept, protection, pruning, share_at_or_above, upper_threshold
from .ratedistortion import cheapest_levels, dearest_price
from .targets import SHARE, SHARES, Choice, Density, expected, smallest

_EXPLICIT, _PARENTS, _MULTIPLES = 0, 1, 2
MAX_BINS = MOST
FINEST_SKETCH = 2.0**-13
_FARTHEST = 1 << 31
"""Multiples beyond this have no codebook of their own kind: their steps would be lost in rounding."""
_STEP = 8
"""A codebook is refit when its array's protected share passes a power of this times the share that was asked for."""
_FEW = 32
"""Fewer protected elements than these may come and go by chance."""
_SLACK = 0.5
"""Bits an element that a parent's thresholds and codebook may take beyond what is needed for an error target."""
_HELD = 0.98
"""Share of an error target up to which nearest levels of a parent's codebook are good enough."""
_AIMS = (1.0, 0.8, 0.5)
"""Shares of the error that is aimed at, tried in turn where what was measured is beyond the target."""
_LITTLE = 0.02
"""Share of the squared error allowed below which there is nothing to spend."""
_SAMPLE, _CAREFUL, _TRIES = 1 << 15, 0.97, 3
"""Elements on which a price is found; the share of what is to spare they may take where they are not all; tries."""
_LADDER = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 254)


@dataclass(frozen=True, slots=True)
class LevelsMemory:
    """Levels (a byte an element), the codebook, the protected values: what the next delta needs.

    Args:
        levels: uint8, shape (n,).
        codebook: float64, ascending, values of the array's dtype.
        protected: bytes of the protected values in the array's dtype, in order.
        thresholds: those the levels were made with.
    """

    levels: NpArray
    codebook: NpArray
    protected: NpArray
    thresholds: Thresholds

    @property
    def size(self) -> int:
        """Number of levels."""
        return int(self.codebook.size) + 2

    def values(self, spec: LeafSpec) -> Array:
        """Dequantize."""
        codebook = codebook_array(self.codebook, spec)
        out: Array = dequantize(_beside(self.levels, codebook), codebook, protected=from_bytes(self.protected, spec))
        return out


def _beside(levels: NpArray, other: Array) -> Array:
    """Levels in the library of `other`."""
    if is_torch(other):
        import torch

        return torch.from_numpy(levels)
    return levels


def codebook_array(codebook: NpArray, spec: LeafSpec) -> Array:
    """A float64 codebook in the library and dtype of the array; exact, for its values are of that dtype."""
    if spec.library == "torch":
        import torch

        return torch.from_numpy(codebook).to(getattr(torch, spec.dtype))
    return codebook.astype(from_bytes(np.empty(0, np.uint8), spec).dtype)


def rounded_codebook(codebook: NpArray, spec: LeafSpec) -> NpArray:
    """A codebook rounded to the array's dtype, entries that became equal merged; float64."""
    with np.errstate(over="ignore"):
        wide = _widened(codebook_array(codebook, spec))
    return np.unique(wide[np.isfinite(wide)] + 0.0)


@dataclass(frozen=True, slots=True)
class Trade:
    """What the rate-distortion encoder weighs: `importance * error**2 + price * bits`.

    Args:
        price: of a bit; 0: every weight gets its nearest level.
        mean: mean root of the second moment that is the importance; 0 where none is known.
        scale: makes the importances of all arrays 1 on average.
    """

    price: float
    mean: float = 0.0
    scale: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What `prepare` decided for one array.

    Args:
        sketch: of the whole array.
        thresholds: of what is pruned and what is protected.
        trade: what the rate-distortion encoder weighs.
        cells: the elements that are neither pruned nor protected.
        codes: the solution that the codebook rests on, where it was found together with others'; None: not yet.
    """

    sketch: Sketch
    thresholds: Thresholds
    trade: Trade
    cells: Cells
    codes: NpArray | None = None


@dataclass(frozen=True, slots=True)
class Quantize:
    """Prune, protect and quantize float weights to levels of a codebook, coded as a delta where there is a parent.

    Args:
        bins: codebook entries, 2 to 254; default 24.
        embedding_bins: the same for embeddings; None: as `bins`.
        prune: fraction set to zero, per layer type, in [0, 1); default 0. Embeddings are never pruned.
        prune_metric: "magnitude" or "sensitivity" (|g w|; needs `grads`).
        protect: fraction kept as bfloat16, over all arrays, in [0, 1); default 0.0005.
        alpha: relative error of the sketch, in [2**-13, 1); default 0.01. Codebooks of arrays that need a finer one are
            fitted to a finer one, see `codec.cells`; not with "kmeans++", which is as published.
        sigma: weight of frequency against magnitude in the codebook, in [0, 1]; default 1 (frequency alone).
        solver: "uniform" (default: equidistant entries, as many as it takes to err as the best `bins` would), "exact"
            (the best `bins` entries) or "kmeans++"; see `codec.codebook`.
        policy: "frozen" (default), "refit", or "warm" (Lloyd's iteration from the parent's entries; not with "uniform",
            which has but a step); see `codec.codebook`.
        trigger: loss ratio at which a frozen codebook is refit, >= 1; default 1.05.
        coder: "smallest" (default) or "published" (run lengths and Huffman per group).
        seed: of kmeans++.
        max_error: relative L2 error an array may have, in (0, 1). With "uniform" it picks step, protected share and,
            where `rate` is 0, lambda for each array, in place of `bins` and `protect`; with other solvers the bins
            alone. None: `Config.max_rel_error`.
        rate: lambda of the rate-distortion encoder, see `Config`, >= 0. None: `Config.rate`.
        residual: what becomes of a float32 or float64 array whose target 254 bins miss. False (default): it is stored
            exactly. True: it gets a second, residual level of codebook as fine as the target needs (`multiples`).

    Raises:
        BadArgumentError: a value out of range; the message names it and its limits.

    Source: Inshrinkerator, sections 4 and 6.
    """

    bins: int = 24
    embedding_bins: int | None = None
    prune: float = 0.0
    prune_metric: str = "magnitude"
    protect: float = 0.0005
    alpha: float = 0.01
    sigma: float = 1.0
    solver: str = "uniform"
    policy: str = "frozen"
    trigger: float = 1.05
    coder: str = "smallest"
    seed: int = 0
    max_error: float | None = None
    rate: float | None = None
    residual: bool = False
    id: ClassVar[str] = "quantize"

    def __post_init__(self) -> None:
        for name in ("bins", "embedding_bins"):
            value = getattr(self, name)
            if name == "embedding_bins" and value is None:
                continue
            if type(value) is not int or not 2 <= value <= MAX_BINS:
                raise BadArgumentError(f"{name} is {value!r}; it must be an integer in [2, {MAX_BINS}]")
        check_range("prune", self.prune, 0, 1, open_high=True)
        check_range("protect", self.protect, 0, 1, open_high=True)
        if self.prune + self.protect > 1:
            raise BadArgumentError(f"prune + protect is {self.prune + self.protect:g}; it must be at most 1")
        check_range("alpha", self.alpha, FINEST_SKETCH, 1, open_high=True)
        check_range("sigma", self.sigma, 0, 1)
        check_range("trigger", self.trigger, 1, 1e9)
        if self.max_error is not None:
            check_range("max_error", self.max_error, 0, 1, open_low=True, open_high=True)
        if self.rate is not None:
            check_range("rate", self.rate, 0, 1e6)
        if type(self.residual) is not bool:
            raise BadArgumentError(f"residual is {self.residual!r}; it must be True or False")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise BadArgumentError(f"seed is {self.seed!r}; it must be an integer in [0, 2**63)")
        for name, allowed in (
            ("prune_metric", ("magnitude", "sensitivity")),
            ("solver", ("uniform", "exact", "kmeans++")),
            ("policy", ("frozen", "warm", "refit")),
            ("coder", ("smallest", "published")),
        ):
            choice(name, getattr(self, name), allowed)
        if self.policy == "warm" and self.solver == "uniform":
            raise BadArgumentError(
                "policy 'warm' is for solver 'exact' or 'kmeans++': a step, which is all that 'uniform' (the default) "
                "has, is not iterated; 'frozen' or 'refit' is needed"
            )

    def prepare(self, leaves: Sequence[Leaf], parents: Sequence[Memory | None]) -> Sequence[Plan]:
        """Sketch every array, then take thresholds over all of them."""
        if not leaves:
            return []
        sketches = self.sketch(leaves)
        protect = self.protection_limits(sketches, parents)
        by_layer = {}
        if self.prune:
            self.check_gradients(leaves)
            by_layer = pruning(sketches, self.prune, self.prune_metric)
        thresholds = [Thresholds(*protect, *by_layer.get(sketch.layer, (0.0, 0.0))) for sketch in sketches]
        trades = [Trade(0.0)] * len(leaves)
        if self.rate:
            trades = self.trades(leaves, [kept(s.signed, t) for s, t in zip(sketches, thresholds, strict=True)])
        return self.plans(leaves, parents, sketches, thresholds, trades)

    def plans(
        self,
        leaves: Sequence[Leaf],
        parents: Sequence[Memory | None],
        sketches: Sequence[Sketch],
        thresholds: Sequence[Thresholds],
        trades: Sequence[Trade],
    ) -> list[Plan]:
        """One plan an array; codebooks of arrays on a GPU are solved together, there."""
        cells = self._cells(leaves, sketches, thresholds)
        codes = self._codes(leaves, parents, cells)
        return [Plan(*decided) for decided in zip(sketches, thresholds, trades, cells, codes, strict=True)]

    def _cells(self, leaves: Sequence[Leaf], sketches: Sequence[Sketch], limits: Sequence[Thresholds]) -> list[Cells]:
        """The elements of each array that are neither pruned nor protected."""

        def some(numbers: list[int]) -> list[Cells]:
            known = [i for i in numbers if leaves[i].gradient is not None]
            counted = kept_histogram_many(
                [leaves[i].flat for i in known],
                [limits[i] for i in known],
                self._sketch_bits(),
                gradients=[leaves[i].gradient for i in known],
            )
            of = dict(zip(known, counted, strict=True))
            return [Cells.of(of[i] if i in of else kept(sketches[i].signed, limits[i])) for i in numbers]

        return map_batches(some, leaves)

    def _codes(
        self, leaves: Sequence[Leaf], parents: Sequence[Memory | None], cells: Sequence[Cells]
    ) -> list[NpArray | None]:
        """Solutions of the exact problems of arrays on a GPU; None for others, which are solved where they are used.

        Those of an error target are, too: what is solved next depends on the error before.
        """

        def some(numbers: list[int]) -> list[NpArray | None]:
            place = leaves[numbers[0]].flat
            problems = {}
            if self.max_error is None and on_gpu(place):
                for i in numbers:
                    before = _before(leaves[i], parents[i])
                    problem = problem_of(cells[i], self._fit(self._bins(leaves[i])), _codebook(before))
                    if problem is not None and problem.method == "exact" and problem.start is None:
                        problems[i] = problem
            found = dict(zip(problems, solve_together(list(problems.values()), place), strict=True)) if problems else {}
            return [found.get(i) for i in numbers]

        return map_batches(some, leaves)

    def _bins(self, leaf: Leaf) -> int:
        return self.embedding_bins if self.embedding_bins and leaf.kind.layer == "embedding" else self.bins

    def _fit(self, bins: int) -> Fit:
        return Fit(bins, self.sigma, self.solver, self.policy, self.trigger, self.seed)

    def _sketch_bits(self) -> int:
        """Of sketches in float64; those of narrower formats are capped at their mantissas."""
        return bits_for(self.alpha, FORMATS["float64"])

    def trades(self, leaves: Sequence[Leaf], histograms: Sequence[Histogram]) -> list[Trade]:
        """One slope for all arrays whose importance is known, in their mean weighted variance; else one for each."""
        # The kernel works in float32.
        usable = [1e-15 < largest_of(h) < 1e15 for h in histograms]
        variances = [variance(h) if u else 0.0 for h, u in zip(histograms, usable, strict=True)]
        known = [i for i, leaf in enumerate(leaves) if usable[i] and leaf.importance is not None]
        roots = dict(zip(known, map_chunks(lambda i: mean_root(leaves[i].importance), known), strict=True))
        roots = {i: mean for i, mean in roots.items() if 1e-100 < mean < 1e100}
        rate = self.rate or 0.0
        elements = sum(leaves[i].spec.size for i in roots)
        total = sum(leaves[i].spec.size * mean for i, mean in roots.items())
        weighted = sum(leaves[i].spec.size * mean * variances[i] for i, mean in roots.items())
        return [
            Trade(rate * weighted / total, roots[i], elements / total) if i in roots else Trade(rate * variances[i])
            for i in range(len(leaves))
        ]

    def check_gradients(self, leaves: Sequence[Leaf]) -> None:
        """Refuse to prune by sensitivity what has no gradient."""
        if self.prune_metric == "sensitivity":
            for leaf in leaves:
                if leaf.gradient is None and leaf.kind.layer != "embedding":
                    raise BadArgumentError(f"{leaf.path}: pruning by sensitivity needs its gradient in grads=")

    def sketch(self, leaves: Sequence[Leaf]) -> list[Sketch]:
        """Histograms of the values of each array and, where there is a gradient, of its sensitivity."""

        def some(numbers: list[int]) -> list[Sketch]:
            bits, known = self._sketch_bits(), [i for i in numbers if leaves[i].gradient is not None]
            signed = log_histogram_many([leaves[i].flat for i in numbers], bits, signed=True)
            sensitivity = log_histogram_many(
                [leaves[i].flat for i in known], bits, gradients=[leaves[i].gradient for i in known]
            )
            of = dict(zip(known, sensitivity, strict=True))
            return [Sketch(leaves[i].kind.layer, h, of.get(i)) for i, h in zip(numbers, signed, strict=True)]

        return map_batches(some, leaves)

    def protection_limits(self, sketches: Sequence[Sketch], parents: Sequence[Memory | None]) -> tuple[float, float]:
        """Protection thresholds; the parent's stay while they protect about what was asked (moving costs bits).

        Under an error target each array has its own magnitude, and what is protected for its sensitivity stays.
        """
        if not self.protect:
            return (np.inf, np.inf)
        if self._chooses:
            return (np.inf, protection(sketches, self.protect)[1])
        before = [p.thresholds for p in parents if isinstance(p, LevelsMemory)]
        if self.policy == "frozen" and before and not any(s.sensitivity for s in sketches):
            old = before[0].protect_magnitude
            counts = [(share_at_or_above(s.signed.magnitude(), old), s.signed.total) for s in sketches]
            total = sum(n for _, n in counts)
            share = sum(f * n for f, n in counts) / total if total else 0.0
            if 0.5 * self.protect <= share <= 1.25 * self.protect:
                return (old, np.inf)
        return protection(sketches, self.protect)

    def _outgrown(self, plan: Plan, before: LevelsMemory | None, spec: LeafSpec) -> str:
        """Why a codebook is refit though its loss would let it stay: the array protects more than it did; or "".

        Thresholds are for all arrays together, so one array's share may grow unseen. Its codebook is refit each time
        that share passes 8, 64, ... times what is asked over all, and is of 32 elements or more.
        """
        if before is None or not self.protect or not spec.size:
            return ""
        share = share_at_or_above(plan.sketch.signed.magnitude(), plan.thresholds.protect_magnitude)
        was = before.protected.size / spec.itemsize / spec.size
        passed = any(was < _STEP**n * self.protect <= share for n in range(1, 20))
        passed = passed and share * plan.sketch.signed.total >= _FEW
        return f"refit: {share:.2%} are protected, {was:.2%} were" if passed else ""

    def _moved(self, limits: Thresholds, before: LevelsMemory | None) -> str:
        """What to say where the protection threshold, kept as codebooks are, is another than the parent's; or ""."""
        if self.policy != "frozen" or before is None:
            return ""
        now, was = limits.protect_magnitude, before.thresholds.protect_magnitude
        return "" if now == was else f"; protected from {now:.6g} on, before from {was:.6g}"

    def encode(self, leaf: Leaf, parent: Memory | None, plan: Plan) -> Stored:
        """Encode one array; `error` is the relative L2 error met."""
        before = _before(leaf, parent)
        scale = unit(largest_of(plan.sketch.signed))
        target = np.inf if self.max_error is None else rounded_error(self.max_error, up=False)
        for limits, codebook, reason, may_err in self._attempts(leaf, plan, before):
            note, goal = f"codebook {reason}{self._moved(limits, before)}", min(may_err, target)
            memory, met = _quantize(leaf, limits, plan.trade, codebook, before, scale)
            if target == np.inf or met.relative_l2 <= target:
                break
        else:
            stored = Exact().encode(leaf, parent)
            twice = store_multiples(leaf, parent, target) if self.residual else None
            if twice is not None and sum(map(len, twice.pieces)) < sum(map(len, stored.pieces)):
                return twice
            return dataclasses.replace(stored, note=f"exact: {MAX_BINS} bins miss the error target {self.max_error:g}")
        if self._chooses and not plan.trade.price:
            memory, met, rate = _spent(leaf, memory, met, before, goal, scale)
            note += f"; {np.mean(memory.levels == 1):.2g} protected, rate {rate:.2g}"
        pieces = [_references(memory, leaf.spec, before), *_level_chunks(memory, before, self.coder)]
        if sum(map(len, pieces)) > leaf.spec.nbytes:  # most of it is not finite, and was kept beside its level
            return dataclasses.replace(Exact().encode(leaf, parent), note="exact: no smaller as levels")
        meta = {
            "t": [
                _finite(limits.protect_magnitude),
                _finite(limits.protect_sensitivity),
                float(limits.prune_magnitude),
                float(limits.prune_sensitivity),
            ]
        }
        return Stored("levels", meta, pieces, memory, met.relative_l2, "relative L2", note)

    @property
    def _chooses(self) -> bool:
        """Whether the error target chooses step and protection, not the bins alone."""
        return self.max_error is not None and self.solver == "uniform"

    def _attempts(
        self, leaf: Leaf, plan: Plan, before: LevelsMemory | None
    ) -> Iterator[tuple[Thresholds, NpArray, str, float]]:
        """Thresholds and codebooks to try in turn, until one keeps to the error target; the reason with each, and the
        error that levels may come to."""
        few = few_values(leaf, plan.cells, self._bins(leaf)) if self.coder == "smallest" else None
        if self._chooses:
            yield from self._choices(leaf, plan, before, few)
            return
        cells, looked, old = plan.cells, 0, _codebook(before)
        for count in (self._bins(leaf),) if self.max_error is None else _LADDER:
            how = self._fit(count)
            if few is None:
                codebook, reason, cells, looked = fit_closely(
                    leaf, plan.thresholds, cells, how, old, looked, plan.codes
                )
            else:
                codebook, reason = fit(cells, how, old, plan.codes)
                if not np.isin(few, codebook).all():
                    codebook, reason = few, "of all its values"
            if self.max_error is not None and predicted_error(cells, codebook) > 1.1 * self.max_error:
                continue
            if reason == "frozen" and (grown := self._outgrown(plan, before, leaf.spec)):
                codebook, reason = fit(cells, how, None)[0], grown
            if reason != "frozen":
                codebook = held_codebook(codebook, cells, how, leaf.spec)
            yield plan.thresholds, codebook, reason, np.inf

    def _choices(
        self, leaf: Leaf, plan: Plan, before: LevelsMemory | None, few: NpArray | None
    ) -> Iterator[tuple[Thresholds, NpArray, str, float]]:
        """What keeps to the error target in the fewest bits, by the sketch; then what is finer and finer."""
        limits, target = plan.thresholds, self.max_error or 0.0
        if not plan.cells.counts.size:
            yield limits, np.empty(0), "empty", target
            return
        two = Fit(2, 1.0, "exact", "refit", 1.0, 0)
        coarsest, _, cells, looked = fit_closely(leaf, limits, plan.cells, two, None)
        density = Density.of(cells)
        exactly = leaf.spec.dtype == "bfloat16"
        # An array is never flattened altogether, however little it matters beside its mean: two entries are the least.
        goal = min(target, expected(density, np.inf, coarsest, exactly).error)
        magnitudes = plan.sketch.signed.magnitude()
        thresholds = list(dict.fromkeys(upper_threshold(magnitudes, share * magnitudes.total) for share in SHARES))

        def at(choice: Choice) -> Thresholds:
            return dataclasses.replace(limits, protect_magnitude=choice.threshold)

        fresh = smallest(density, thresholds, SHARE * goal, exactly)
        reason = "new" if before is None else "refit"
        if few is not None:
            own = expected(density, np.inf, few, exactly)
            if fresh is None or own.bits <= fresh.bits + _SLACK:
                yield limits, few, "of all its values", goal
        if before is not None and before.codebook.size and self.policy == "frozen":
            own = expected(density, before.thresholds.protect_magnitude, before.codebook, exactly)
            if own.error > _HELD * goal:
                reason = f"refit: {own.error / target:.3g} of the error target"
            elif fresh is not None and own.bits > fresh.bits + _SLACK:
                reason = f"refit: {own.bits - fresh.bits:.2g} bits more than need be"
            else:
                yield at(own), own.codebook, "frozen", goal
        for aim in _AIMS:
            choice = fresh if aim == 1.0 else smallest(density, thresholds, SHARE * aim * goal, exactly)
            if choice is not None:
                yield at(choice), rounded_codebook(choice.codebook, leaf.spec), reason, goal
        # Last the finest grid there is; and for values that lie on no grid but are few, the best entries.
        for solver, count in ((self.solver, MAX_BINS), *(("exact", count) for count in _LADDER)):
            how = Fit(count, 1.0, solver, "refit", 1.0, 0)
            codebook, _, cells, looked = fit_closely(leaf, limits, cells, how, None, looked)
            if count == MAX_BINS or predicted_error(cells, codebook) <= goal:
                yield limits, held_codebook(codebook, cells, how, leaf.spec), reason, goal


def _spent(
    leaf: Leaf, memory: LevelsMemory, met: Distortion, before: LevelsMemory | None, target: float, scale: float
) -> tuple[LevelsMemory, Distortion, float]:
    """Levels that are kept back as far as the error target allows, their distortion, and the price of a bit in units of
    the mean square.

    The price is found on a sample of nearest levels; what it does to the whole array is measured.
    """
    codebook, n = memory.codebook, leaf.spec.size
    mean, allowed = met.squared_norm / max(1, n), target**2 * met.squared_norm
    spare = allowed - met.squared_error
    # The kernel works in float32.
    if codebook.size < 2 or spare <= _LITTLE * allowed or scale != 1.0 or not 1e-30 < target**2 * mean < 1e30:
        return memory, met, 0.0
    at = blocks(n, _SAMPLE)
    count = n if isinstance(at, slice) else at.size
    room = spare * (count / n) * (1.0 if count == n else _CAREFUL)
    parent = None if before is None else np.ascontiguousarray(before.levels[at])
    parent_size = 1 if before is None else before.size
    levels = np.ascontiguousarray(memory.levels[at])
    price = dearest_price(taken(leaf.flat, at), levels, parent, parent_size, codebook, target**2 * mean, room)
    for _ in range(_TRIES):
        if not price:
            break
        held, error = _quantize(leaf, memory.thresholds, Trade(price), codebook, before, scale)
        if error.relative_l2 <= target:
            return held, error, price / mean
        price /= 2
    return memory, met, 0.0


def held_codebook(codebook: NpArray, cells: Cells, how: Fit, spec: LeafSpec) -> NpArray:
    """The codebook as the array's dtype holds it; the best one where a uniform one has suffered from that by too much.

    Equidistant entries hardly further apart than the values of a 16-bit array fall now on one, now between two.
    """
    held = rounded_codebook(codebook, spec)
    if not cells.sharp or how.solver != "uniform":
        return held
    best = rounded_codebook(fit(cells, dataclasses.replace(how, solver="exact"), None)[0], spec)
    return best if cells.loss(held) > how.trigger * cells.loss(best) else held


def _before(leaf: Leaf, parent: Memory | None) -> LevelsMemory | None:
    """The parent where levels can be a delta against it."""
    return parent if isinstance(parent, LevelsMemory) and parent.levels.size == leaf.spec.size else None


def _codebook(before: LevelsMemory | None) -> NpArray | None:
    return None if before is None else before.codebook


def _finite(threshold: float) -> float | None:
    return None if np.isinf(threshold) else threshold


def _quantize(
    leaf: Leaf, limits: Thresholds, trade: Trade, codebook: NpArray, before: LevelsMemory | None, scale: float
) -> tuple[LevelsMemory, Distortion]:
    """Levels of all elements, the values of the protected ones as they will be restored, and the distortion."""
    levels = np.empty(leaf.spec.size, np.uint8)
    native = codebook_array(codebook, leaf.spec)

    def one(start: int) -> tuple[NpArray, Distortion]:
        x = leaf.flat[start : start + CHUNK]
        gradient = None if leaf.gradient is None else leaf.gradient[start : start + CHUNK]
        own = assign(x, limits, codebook, gradient=gradient)
        if trade.price and codebook.size:
            parent = None if before is None else before.levels[start : start + CHUNK]
            matters = None
            if trade.mean and leaf.importance is not None:
                matters = weights_of(leaf.importance[start : start + CHUNK], trade.mean, trade.scale)
            parent_size = 1 if before is None else before.size
            own = cheapest_levels(x, own, parent, parent_size, codebook, trade.price, matters)
        held = bfloat16.held(_where_protected(x, own), leaf.spec)
        values = native.to(x.device) if is_torch(x) else native
        protected = from_bytes(held, leaf.spec)
        restored = dequantize(own, values, protected=protected.to(x.device) if is_torch(x) else protected)
        levels[start : start + CHUNK] = on_host(own)
        return held, scaled_distortion(x, restored, scale)

    parts = map_chunks(one, range(0, leaf.spec.size, CHUNK))
    protected = np.concatenate([h for h, _ in parts]) if parts else np.empty(0, np.uint8)
    met = sum((d for _, d in parts), Distortion(0.0, 0.0, 0.0))
    return LevelsMemory(levels, codebook, protected, limits), met


def few_values(leaf: Leaf, cells: Cells, most: int) -> NpArray | None:
    """All finite values, ascending, where they are at most `most`: each has an entry then, and none is lost."""
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
    """The values behind the bit patterns in x, float64 on the host; from a GPU the finite ones alone, no more than say
    whether they are at most `most`."""
    if on_gpu(x):
        import torch

        found = torch.unique(x.view(getattr(torch, f"int{8 * spec.itemsize}"))).view(x.dtype)
        return on_host(found[torch.isfinite(found)][: most + 2].double())  # two of them may be zeros
    # Integers are hashed, floats are sorted.
    return _widened(from_bytes(np.unique(as_bytes(x).view(f"<u{spec.itemsize}")).view(np.uint8), spec))


def _where_protected(x: Array, levels: Array) -> Array:
    """The elements of level 1, in order."""
    if not is_torch(x) or on_gpu(x):
        return x[levels == 1]
    import torch

    # A mask would be read twice, and slowly: hardly any element is protected.
    return x[torch.from_numpy(np.flatnonzero(levels.numpy() == 1))]


def _level_chunks(memory: LevelsMemory, before: LevelsMemory | None, coder: str) -> list[bytes]:
    def one(start: int) -> bytes:
        part = slice(start, start + CHUNK)
        parent = None if before is None else before.levels[part]
        parent_size = 0 if before is None else before.size
        return entropy.encode_levels(memory.levels[part], memory.size, parent, parent_size, coder)

    return map_chunks(one, range(0, memory.levels.size, CHUNK))


def restate_levels(
    spec: LeafSpec, meta: dict[str, Any], memory: Memory, parent: Memory | None
) -> tuple[dict[str, Any], list[bytes]]:
    """The same levels, codebook and protected values against another parent, see `codec.restate`."""
    if not isinstance(memory, LevelsMemory):
        raise BadArgumentError("levels: the memory of another stream cannot be restated as levels")
    before = parent if isinstance(parent, LevelsMemory) and parent.levels.size == spec.size else None
    return meta, [_references(memory, spec, before), *_level_chunks(memory, before, "smallest")]


def _references(memory: LevelsMemory, spec: LeafSpec, before: LevelsMemory | None) -> bytes:
    out = Writer()
    out.varint(memory.codebook.size)
    if before is not None and np.array_equal(before.codebook, memory.codebook):
        out.byte(_PARENTS)
    else:
        _write_codebook(out, memory.codebook, spec)
    patterns, odd = bfloat16.patterns(memory.protected, spec)
    predicted = _predicted(memory.levels, before, spec)
    out.varint(patterns.size)
    for plane in split_planes(difference(patterns, predicted, dtype="bfloat16")):
        out.block(entropy.encode(np.ascontiguousarray(plane)))
    out.varint(odd.size)
    for step in np.diff(odd, prepend=0):
        out.varint(int(step))
    out.raw(memory.protected.reshape(-1, spec.itemsize)[odd])
    return out.done()


def _write_codebook(out: Writer, codebook: NpArray, spec: LeafSpec) -> None:
    # Rounding the entries to 16 bits moves their mean distance a little off the step, which has 8 bits.
    for step in (spacing(codebook), to_8_bits(spacing(codebook))) if codebook.size > 1 else ():
        first = round(float(codebook[0]) / step) if 0 < step < np.inf else _FARTHEST
        if abs(first) < _FARTHEST and np.array_equal(_multiples(first, codebook.size, step, spec), codebook):
            out.byte(_MULTIPLES)
            out.varint(2 * first if first >= 0 else -2 * first - 1)
            out.raw(np.array([step], "<f8"))
            return
    out.byte(_EXPLICIT)
    out.raw(as_bytes(codebook_array(codebook, spec)))


def _multiples(first: int, size: int, step: float, spec: LeafSpec) -> NpArray:
    """`size` multiples of a step from the `first`-th, rounded to the array's dtype, as float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        return _widened(codebook_array(np.arange(first, first + size) * step, spec))


def _widened(codebook: Array) -> NpArray:
    with np.errstate(invalid="ignore"):
        wide: NpArray = codebook.double().numpy() if is_torch(codebook) else codebook.astype(np.float64)
    return wide


def _predicted(levels: NpArray, before: LevelsMemory | None, spec: LeafSpec) -> NpArray:
    """What the parent protected at each protected position, as bfloat16 patterns; 0 where it protected nothing."""
    at = np.flatnonzero(levels == 1)
    guess = np.zeros(at.size, np.uint16)
    if before is None or before.protected.size == 0 or at.size == 0:
        return guess
    old_at = np.flatnonzero(before.levels == 1)
    old, _ = bfloat16.patterns(before.protected, spec)
    found = np.minimum(np.searchsorted(old_at, at), old_at.size - 1)
    same = old_at[found] == at
    guess[same] = old[found[same]]
    return guess


def decode_levels(
    spec: LeafSpec,
    meta: dict[str, Any],
    pieces: Sequence[memoryview],
    parent: Memory | None,
    sibling: Array | None = None,
) -> LevelsMemory:
    """The stream format "levels"."""
    if spec.dtype not in FORMATS:
        raise CorruptDataError(f"levels: {spec.dtype} has none")
    before = parent if isinstance(parent, LevelsMemory) and parent.levels.size == spec.size else None
    starts = range(0, spec.size, CHUNK)
    if len(pieces) != len(starts) + 1:
        raise CorruptDataError(f"levels: {len(pieces)} pieces for {len(starts)} chunks")
    check_memory(2 * spec.size, "levels")
    levels = np.empty(spec.size, np.uint8)

    def one(number: int) -> None:
        part = slice(starts[number], starts[number] + CHUNK)
        own = levels[part]
        parent_levels = None if before is None else before.levels[part]
        own[:] = entropy.decode(pieces[number + 1], own.size, parent_levels, 0 if before is None else before.size)

    map_chunks(one, range(len(starts)))
    codebook, protected = _read_references(pieces[0], spec, levels, before)
    if levels.size and int(levels.max()) >= codebook.size + 2:
        raise CorruptDataError("levels: a level is beyond the codebook")
    return LevelsMemory(levels, codebook, protected, _read_thresholds(meta))


def _read_thresholds(meta: dict[str, Any]) -> Thresholds:
    values = meta.get("t")
    if not isinstance(values, list) or len(values) != 4 or not all(v is None or type(v) is float for v in values):
        raise CorruptDataError("levels: no thresholds")
    try:
        return Thresholds(*(np.inf if v is None else float(v) for v in values))
    except BadArgumentError as e:
        raise CorruptDataError(f"levels: {e}") from None


def _read_references(
    piece: memoryview, spec: LeafSpec, levels: NpArray, before: LevelsMemory | None
) -> tuple[NpArray, NpArray]:
    data = Reader(piece, "levels")
    size, mode = data.varint(), data.byte()
    if size > MAX_BINS or mode not in (_EXPLICIT, _PARENTS, _MULTIPLES):
        raise CorruptDataError(f"levels: a codebook of {size} entries, mode {mode}")
    if mode == _PARENTS:
        if before is None or before.codebook.size != size:
            raise CorruptDataError("levels: the parent's codebook is wanted and is not there")
        codebook = before.codebook
    else:
        if mode == _MULTIPLES:
            number, step = data.varint(), float(data.array("<f8", 1)[0])
            first = (number >> 1) ^ -(number & 1)
            if abs(first) >= _FARTHEST:
                raise CorruptDataError(f"levels: a codebook from multiple {str(first)[:30]}")
            codebook = _multiples(first, size, step, spec)
        else:
            codebook = _widened(from_bytes(data.array("u1", size * spec.itemsize).copy(), spec))
        if not np.isfinite(codebook).all() or (codebook[1:] <= codebook[:-1]).any():
            raise CorruptDataError("levels: the codebook is not finite and ascending")
    count = data.varint()
    if count != int(np.count_nonzero(levels == 1)):
        raise CorruptDataError(f"levels: {count} protected values do not fit the levels")
    planes = np.empty((2, count), np.uint8)
    for plane in planes:
        plane[:] = entropy.decode(data.block(), count)
    steps = merge_planes(planes, dtype="uint16")
    patterns = undifference(steps, _predicted(levels, before, spec), dtype="bfloat16")
    protected = bfloat16.widened(patterns, spec)
    odd = data.varint()
    if odd > count:
        raise CorruptDataError("levels: more values beyond bfloat16 than protected ones")
    at = np.fromiter(itertools.accumulate(min(data.varint(), count) for _ in range(odd)), np.int64, odd)
    if odd and int(at[-1]) >= count:
        raise CorruptDataError("levels: a position is out of range")
    exact = data.array("u1", odd * spec.itemsize).reshape(odd, spec.itemsize)
    protected.reshape(count, spec.itemsize)[at] = exact
    data.end()
    return codebook, protected
