"""Quantization of ordinary weights, of many at once or of a large one in chunks.

This does the work of `Quantize.quantized` in the ordinary case: float32, equidistant entries, no pruning, rate,
gradient or error target, and values that the sketch distinguishes. All other arrays are left to `Quantize.quantized`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kernels.backend.arrays import on_gpu
from ...kernels.error_sums import Distortion
from ...kernels.histogram import Histogram
from ...kernels.kmeans import least_losses
from ...kernels.quantizer import LARGEST_STEP, SMALLEST_STEP, uniform_levels_many
from ..base import CHUNK, Leaf, Reference
from ..parallel import map_chunks
from ..state.casting import float_values
from ..state.leaves import NpArray, on_host
from .codebook import BLURRED, FEW_BINS, FINER, MOST, NEGLIGIBLE
from .level_assignment import Quantized
from .levels import LevelsReference, compatible_parent
from .partition import Filled
from .planning import Plan, QuantizeSettings
from .protected import held_values

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class _Sketches:
    """Buckets of the elements of several arrays that are neither pruned nor protected.

    Args:
        member: int64 [k], number of the array of each bucket.
        values: float64 [k], ascending in each array.
        shares: float64 [k], share of the bucket in its array's elements.
        widths: float64 [k], of the buckets.
        ends: int64 [m], where the buckets of each array end.
        totals: int64 [m], elements that are neither pruned nor protected.
    """

    member: Integers
    values: Floats
    shares: Floats
    widths: Floats
    ends: Integers
    totals: Integers

    def sums(self, terms: Floats) -> Floats:
        """Sum terms of buckets for each array, in the order of the buckets."""
        return np.bincount(self.member, terms, self.ends.size).astype(np.float64, copy=False)

    def within(self) -> Floats:
        """Return the variance inside the buckets, for each array."""
        return self.sums(self.shares * self.widths * self.widths) / 12

    def misses(self, codebooks: _Codebooks) -> Floats:
        """Return the signed distance of each bucket from its nearest entry."""
        step, first = codebooks.steps[self.member], codebooks.firsts[self.member]
        last = first + codebooks.sizes[self.member] - 1
        return np.clip(np.ceil(self.values / step - 0.5), first, last) * step - self.values


@dataclass(frozen=True, slots=True)
class _Codebooks:
    """Codebooks of several arrays, each of consecutive multiples of a step.

    Args:
        firsts: int64 [m], number of the first multiple.
        sizes: int64 [m], number of entries.
        steps: float64 [m].
    """

    firsts: Integers
    sizes: Integers
    steps: Floats


def quantized_many(
    codec: QuantizeSettings, leaves: Sequence[Leaf], parents: Sequence[Reference | None], plans: Sequence[Plan]
) -> dict[int, Quantized]:
    """Quantize those of several arrays that need no special treatment.

    Args:
        codec: the same for all.
        leaves: the arrays.
        parents: references that their deltas are coded against.
        plans: see `Quantize.prepare`.
    """
    befores = [compatible_parent(parent, leaf.spec) for parent, leaf in zip(parents, leaves, strict=True)]
    if codec.solver != "uniform" or codec.policy == "warm" or codec.max_error is not None or codec.sigma != 1:
        return {}
    found: dict[int, Quantized] = {}
    groups: dict[tuple[int, float], list[int]] = {}
    for i, (leaf, before, plan) in enumerate(zip(leaves, befores, plans, strict=True)):
        # A large array on a GPU is quantized there.
        if _is_ordinary(leaf, before, plan) and (len(leaves) > 1 or not on_gpu(leaf.flat)):
            groups.setdefault((codec.fit_for(leaf).bins, plan.thresholds.protect_magnitude), []).append(i)
    for (bins, _), group in groups.items():
        if bins < FEW_BINS:
            continue
        found |= _Some(codec, bins, leaves, befores, plans).of(group)
    return found


def _is_ordinary(leaf: Leaf, before: LevelsReference | None, plan: Plan) -> bool:
    return (
        leaf.spec.dtype == "float32"
        and leaf.gradient is None
        and leaf.earlier is None
        and not plan.trade.price
        and not plan.thresholds.prune_magnitude
        and plan.kept is None
        and (before is None or before.codebook.size < 2 or before.uniform(leaf.spec) is not None)
    )


class _Some:
    """Quantizer of arrays with the same number of bins and the same threshold.

    Args:
        codec: the same for all.
        bins: number of best entries whose error is the aim.
        leaves: the arrays.
        befores: their parents.
        plans: their plans.
    """

    def __init__(
        self,
        codec: QuantizeSettings,
        bins: int,
        leaves: Sequence[Leaf],
        befores: Sequence[LevelsReference | None],
        plans: Sequence[Plan],
    ) -> None:
        self.codec, self.bins, self.leaves, self.befores, self.plans = codec, bins, leaves, befores, plans
        self.limit = plans[0].thresholds.protect_magnitude

    def quantized(self) -> dict[int, Quantized]:
        """Quantize the arrays whose values need no special treatment."""
        sketches = _sketches([plan.sketch.values for plan in self.plans], self.limit)
        used = np.diff(sketches.ends, prepend=0)
        fits = used > self.bins
        if not fits.all():  # few values: each may have an entry of its own
            return self._without(~fits)
        best, loss = _best(sketches, self.bins)
        fits = (best.sizes <= MOST) & (best.steps >= SMALLEST_STEP) & (best.steps <= LARGEST_STEP)
        if not fits.all():
            return self._without(~fits)
        chosen, reasons = self._chosen(sketches, best, loss)
        misses = sketches.misses(chosen)
        blurred = sketches.within() > BLURRED * sketches.sums(sketches.shares * misses * misses)
        fits = ~(blurred | self._are_lost(sketches, misses))
        if not fits.all():
            return self._without(~fits)
        return self._assigned(chosen, reasons)

    def _without(self, odd: NpArray) -> dict[int, Quantized]:
        rest = np.flatnonzero(~odd).tolist()
        if not rest:
            return {}
        return self.of(rest)

    def of(self, numbers: Sequence[int]) -> dict[int, Quantized]:
        """Quantize those of the arrays with these numbers that need no special treatment."""
        some = _Some(
            self.codec,
            self.bins,
            [self.leaves[i] for i in numbers],
            [self.befores[i] for i in numbers],
            [self.plans[i] for i in numbers],
        )
        return {numbers[k]: quantized for k, quantized in some.quantized().items()}

    def _chosen(self, sketches: _Sketches, best: _Codebooks, loss: Floats) -> tuple[_Codebooks, list[str]]:
        """Return each array's codebook, from its parent or the best, and why; see `codebook.fit`."""
        reasons = ["new"] * len(self.leaves)
        old = [i for i, before in enumerate(self.befores) if before is not None and before.codebook.size > 1]
        if not old:
            return best, reasons
        firsts, sizes, steps = best.firsts.copy(), best.sizes.copy(), best.steps.copy()
        for i in old:
            before = self.befores[i]
            uniform = None if before is None else before.uniform(self.leaves[i].spec)
            assert before is not None
            assert uniform is not None
            firsts[i], steps[i] = uniform
            sizes[i] = before.codebook.size
        kept = _Codebooks(firsts, sizes, steps)
        misses, floor = sketches.misses(kept), sketches.within()
        own = sketches.sums(sketches.shares * misses * misses) + floor
        least = loss + floor
        stays = np.zeros(len(self.leaves), bool)
        for i in old:
            if self.codec.policy == "refit":
                reasons[i] = "refit"
            elif steps[i] < FINER * best.steps[i]:
                reasons[i] = f"refit: the parent's step is {steps[i] / best.steps[i]:.3g} of the new one"
            elif own[i] > self.codec.trigger * least[i]:
                reasons[i] = f"refit: the parent's gives {own[i] / least[i]:.3g} times the error"
            else:
                grown = self.codec.outgrown(self._share(i, sketches), self.befores[i], self.leaves[i].spec)
                reasons[i], stays[i] = grown or "frozen", not grown
        made = (np.where(stays, a, b) for a, b in ((firsts, best.firsts), (sizes, best.sizes), (steps, best.steps)))
        return _Codebooks(*made), reasons

    def _share(self, i: int, sketches: _Sketches) -> float:
        """Return the protected share of an array's finite elements."""
        filled = self.plans[i].sketch.values
        total = int(filled.counts.sum()) - _not_finite(filled)
        return 1 - int(sketches.totals[i]) / total

    def _are_lost(self, sketches: _Sketches, misses: Floats) -> NpArray:
        """Return, for each array, whether most of it would become about zero at this step.

        Such an array may be better stored in another way.
        """
        size, shares = np.abs(sketches.values), sketches.shares
        least = NEGLIGIBLE * np.sqrt(sketches.sums(shares * size * size))
        lost = np.abs(misses) >= size
        counted = size >= least[sketches.member]
        share = sketches.sums(shares * (lost & counted)) / np.maximum(sketches.sums(shares * counted), 1e-300)
        nonzero = sketches.sums(shares * (lost & (size > 0))) / np.maximum(sketches.sums(shares * (size > 0)), 1e-300)
        return np.maximum(share, nonzero) > 0.5

    def _assigned(self, codebooks: _Codebooks, reasons: Sequence[str]) -> dict[int, Quantized]:
        spec, sizes = self.leaves[0].spec, [leaf.spec.size for leaf in self.leaves]
        flats = [on_host(leaf.flat) for leaf in self.leaves]
        x = flats[0] if len(flats) == 1 else np.concatenate(flats)
        levels = np.empty(x.size, np.uint8)

        def one(start: int) -> tuple[NpArray, NpArray, NpArray]:
            """Return protected values, and for each array their number and errors and squares."""
            part = x[start : start + CHUNK]
            ends = np.cumsum(sizes) if len(sizes) > 1 else np.array([part.size])
            levels[start : start + CHUNK], sums = uniform_levels_many(
                part, ends, codebooks.steps, codebooks.firsts, codebooks.sizes, self.limit
            )
            at = np.flatnonzero(levels[start : start + CHUNK] == 1)
            own = part[at]
            held = held_values(own, spec)
            with np.errstate(invalid="ignore"):
                finite = np.isfinite(own)
                misses = np.where(finite, float_values(held, spec).astype(np.float64) - own, 0.0)
                norms = np.where(finite, own.astype(np.float64), 0.0)
            member = np.searchsorted(ends, at, "right")
            terms = (None, misses * misses, norms * norms)
            counts, *more = (np.bincount(member, own, ends.size) for own in terms)
            return held, counts, sums + np.stack(more, axis=1)

        chunks = map_chunks(one, range(0, x.size, CHUNK))  # one of several arrays
        held = np.concatenate([chunk[0] for chunk in chunks])
        counts, sums = (np.sum([chunk[i] for chunk in chunks], axis=0) for i in (1, 2))
        ends, until = np.cumsum(sizes), np.cumsum(counts) * spec.itemsize
        found = {}
        start = begin = 0
        for i, end in enumerate(ends.tolist()):
            first, step = int(codebooks.firsts[i]), float(codebooks.steps[i])
            before, limits = self.befores[i], self.plans[i].thresholds
            codebook = np.arange(first, first + int(codebooks.sizes[i])) * step
            protected = held[begin : int(until[i])]
            reference = LevelsReference(levels[start:end], codebook, protected, limits, multiples=(first, step))
            error = Distortion(float(sums[i, 0]), float(sums[i, 1]), 1.0 if sums[i, 0] else 0.0).relative_l2
            note = f"codebook {reasons[i]}{self.codec.moved(limits, before)}"
            found[i] = Quantized(reference, error, note)
            start, begin = end, int(until[i])
        return found


def _not_finite(filled: Filled) -> int:
    """Return the number of elements that are not finite, which the last bucket counts."""
    last = int(filled.buckets[-1]) if filled.buckets.size else 0
    return int(filled.counts[-1]) if last == _layout(filled).size else 0


def _layout(filled: Filled) -> Floats:
    """Return the values of all buckets but the last."""
    return Histogram.values_of(filled.format, filled.bits)


def _sketches(filled: Sequence[Filled], limit: float) -> _Sketches:
    table = _layout(filled[0])
    buckets = np.concatenate([f.buckets for f in filled])
    counts = np.concatenate([f.counts for f in filled])
    member = np.repeat(np.arange(len(filled)), [f.buckets.size for f in filled])
    finite = buckets < table.size
    values = np.where(finite, table[np.where(finite, buckets, 0)], np.inf)
    inside = np.abs(values) < limit
    values, counts, member = values[inside], counts[inside], member[inside]
    totals = np.bincount(member, counts, len(filled)).astype(np.int64)
    _, exponents = np.frexp(values)
    widths = np.where(values == 0, 0.0, np.ldexp(1.0, exponents - 1 - filled[0].bits))
    ends = np.cumsum(np.bincount(member, minlength=len(filled)))
    return _Sketches(member, values, counts / totals[member], widths, ends, totals)


def _best(sketches: _Sketches, bins: int) -> tuple[_Codebooks, Floats]:
    """Return each array's best multiples, as `codebook.uniform`, and their loss between buckets."""
    loss = least_losses(sketches.values, sketches.shares, sketches.ends, bins) + sketches.within()
    begins = np.concatenate([[0], sketches.ends[:-1]])
    low, high = sketches.values[begins], sketches.values[sketches.ends - 1]
    total = sketches.sums(sketches.shares)
    steps = np.maximum(np.sqrt(12 * (loss / total)), (high / 2 - low / 2) / (MOST - 2) * 2)
    mantissas, exponents = np.frexp(steps)
    steps = np.ldexp(np.ceil(mantissas * 256), exponents - 8)
    firsts = np.floor(low / steps + 0.5)
    sizes = np.maximum(firsts, np.ceil(high / steps - 0.5)) - firsts + 1
    fits = np.isfinite(sizes) & (sizes <= MOST)
    made = _Codebooks(
        np.where(fits, firsts, 0).astype(np.int64), np.where(fits, sizes, MOST + 1).astype(np.int64), steps
    )
    misses = sketches.misses(made)
    return made, sketches.sums(sketches.shares * misses * misses)
