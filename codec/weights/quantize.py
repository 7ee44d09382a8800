"""Weights as codebook levels: prune, protect, quantize, delta (as in Inshrinkerator).

`Quantize.quantized` takes one array. In the ordinary case many arrays are quantized at once, or a large one in chunks:
float32, equidistant entries, no pruning, rate, gradient or error target, and values that the sketch distinguishes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...kernels.backend.arrays import on_gpu
from ...kernels.error_sums import Distortion
from ...kernels.histogram import Histogram
from ...kernels.kmeans import least_losses
from ...kernels.quantizer import LARGEST_STEP, SMALLEST_STEP, Thresholds, uniform_levels_many
from .. import entropy
from ..base import CHUNK, EncodedGroup, EncodedGroups, Leaf, Parents, Reference, Stored, rounded_error
from ..format.fields import Piece
from ..lossless.exact import exactly
from ..moments.logbuckets import FINEST, LogBuckets
from ..parallel import map_chunks
from ..state.casting import float_values, unit
from ..state.leaves import NpArray, on_host
from .codebook import (
    BLURRED,
    FEW_BINS,
    FINER,
    MOST,
    NEGLIGIBLE,
    Lost,
    few_values,
    fit,
    fit_closely,
    has_zero,
    held_codebook,
    largest_of,
    lost_share,
    lost_to_step,
    predicted_error,
    with_zero,
)
from .error_targets import LADDER, choices, spent
from .level_assignment import Quantized, Trade, assigned
from .levels import (
    MAX_BINS,
    LevelsReference,
    compatible_parent,
    compatible_parents,
    held_values,
    level_pieces,
    metadata,
)
from .planning import (
    Filled,
    Plan,
    QuantizeSettings,
    check_gradients,
    limits,
    plans,
    share_at_or_above,
    sketched,
    thresholds_before,
)
from .uniform_quantizer import store_multiples

_LOST, _FINE, _STRICT, _RELATIVE = 0.5, 12, 0.1, 0.125
"""Share of lost elements (about zero after quantization), least bins or largest error target, and relative error: an
array that would lose more than this share, with a configuration that fine, is stored with this relative error of each
element instead. Weights of trained models lose 5 to 15 % with 24 bins."""
_LOST_SINCE = 0.75
"""Share of lost elements if the parent has levels: arrays with heavy tails pass the lower share now and then, and each
change of the codec costs as much as a base."""


@dataclass(frozen=True, slots=True)
class Quantize(QuantizeSettings):
    """Pruning, protection and quantization of float weights to codebook levels, also as deltas.

    Args:
        bins: number of codebook entries, 2 to 254; default 64. With "uniform", the codebook has the error of the best
            codebook with this number of entries, and 1.3 to 2.8 times as many equidistant entries (at most 254).
        embedding_bins: the same for embeddings; None: as `bins`.
        prune: fraction set to zero, per layer type, in [0, 1); default 0. Embeddings are never pruned.
        prune_metric: "magnitude" or "sensitivity" (|g w|; needs `grads`).
        protect: fraction kept as bfloat16, over all arrays, in [0, 1); default 0.0005.
        alpha: relative error of the sketch, in [2**-13, 1); default 0.01. Codebooks of arrays that need a finer one are
            fitted to a finer one, see `codec.weights.codebook`; not with "kmeans++", which is as published.
        sigma: weight of frequency against magnitude in the codebook, in [0, 1]; default 1 (frequency alone).
        solver: "uniform" (default: equidistant entries with the error of the best `bins` entries), "exact" (the best
            `bins` entries) or "kmeans++"; see `codec.weights.codebook`. With "uniform" and 12 bins or more, or an error
            target of 0.1 or less, an array whose parts have very different scales is stored in log buckets with a
            relative error of 1/8 instead, if more than half of its elements would become about zero (in a delta against
            levels, more than three quarters); its note says so.
        policy: "frozen" (default), "refit", or "warm" (Lloyd's iteration from the parent's entries; not with "uniform",
            whose codebook is a step only); see `codec.weights.codebook`.
        trigger: loss ratio at which a frozen codebook is refit, >= 1; default 1.05.
        coder: "smallest" (default) or "published" (run lengths and Huffman per group).
        seed: of kmeans++.
        max_error: relative L2 error an array may have, in (0, 1). With "uniform" it picks step, protected share and,
            where `rate` is 0, lambda for each array, in place of `bins` and `protect`; with other solvers the bins
            alone. None: `Config.max_rel_error`.
        rate: lambda of the rate-distortion encoder, see `Config`, >= 0. None: `Config.rate`.
        residual: storage of a float32 or float64 array whose target needs more than 254 bins. False (default): exact.
            True: a second, residual codebook as fine as the target needs (`multiples`).

    Raises:
        BadArgumentError: a value out of range; the message names it and its limits.

    Source: Inshrinkerator, sections 4 and 6.
    """

    id: ClassVar[str] = "quantize"

    @property
    def by_kind(self) -> bool:
        """Return whether pruning or bins of embeddings depend on the layer type."""
        return bool(self.prune or self.embedding_bins)

    def prepare(self, leaves: Sequence[Leaf], parents: Sequence[Reference | None]) -> Sequence[Plan]:
        """Sketch every array, then take thresholds over all of them."""
        if not leaves:
            return []
        check_gradients(self, leaves)
        sketches = sketched(self, leaves)
        return plans(self, leaves, parents, sketches, limits(self, sketches, thresholds_before(parents)))

    def encode(self, leaf: Leaf, parent: Reference | None, plan: Plan) -> Stored:
        """Encode one array; `error` is the relative L2 error met."""
        made = self.encode_group([leaf], [parent], [plan])
        if made.groups:
            return made.groups[0].only
        stored = made.alone[0]
        return exactly(leaf, parent, "no smaller as levels") if stored is None else stored

    def groups(self, leaf: Leaf) -> Hashable | None:
        """Return True if arrays can be coded together: no published coder, no error target."""
        return True if self.coder == "smallest" and self.max_error is None else None

    def encode_group(self, leaves: Sequence[Leaf], parents: Parents, plans: Sequence[Plan]) -> EncodedGroups:
        """Quantize weights of one dtype, and encode their levels together; a large one alone."""
        alone: dict[int, Stored | None] = {}
        found: dict[int, Quantized] = {}
        ordinary = quantized_many(self, leaves, parents, plans)
        for i, (leaf, parent, plan) in enumerate(zip(leaves, parents, plans, strict=True)):
            quantized = ordinary[i] if i in ordinary else self.quantized(leaf, parent, plan)
            if isinstance(quantized, Stored):
                alone[i] = quantized
            else:
                found[i] = quantized
        if not found:
            return EncodedGroups(alone=alone)
        specs, references = [leaves[i].spec for i in found], [q.levels for q in found.values()]
        befores = compatible_parents([parents[i] for i in found], specs)
        pieces = level_pieces(specs, references, befores, self.coder)
        if _are_larger(pieces, sum(spec.nbytes for spec in specs)):  # most is not finite, and stored as it is
            return EncodedGroups(alone=alone | dict.fromkeys(found))
        stored = [
            Stored("levels", {}, (), dataclasses.replace(reference, device_chunks=()), q.error, "relative L2", q.note)
            for reference, q in zip(references, found.values(), strict=True)
        ]
        meta = metadata(references)
        return EncodedGroups([EncodedGroup(list(found), "levels", meta, pieces, befores is not None, stored)], alone)

    def quantized(self, leaf: Leaf, parent: Reference | None, plan: Plan) -> Quantized | Stored:
        """Quantize one array to levels, or encode it otherwise if no codebook suits it."""
        before = compatible_parent(parent, leaf.spec)
        scale = unit(largest_of(plan.sketch.signed))
        target = np.inf if self.max_error is None else rounded_error(self.max_error, up=False)
        is_fine = self.fit_for(leaf).bins >= _FINE if self.max_error is None else self.max_error <= _STRICT
        for thresholds, fitted, reason, may_err in self._attempts(leaf, plan, before):
            codebook = with_zero(fitted, plan.cells) if self.solver == "uniform" else fitted
            lost = lost_share(plan.cells, codebook) if self.solver == "uniform" else Lost(0.0, 0.0)
            parts_are_lost = lost.counted > (_LOST if before is None else _LOST_SINCE) and is_fine
            if parts_are_lost and target == np.inf:  # further attempts do not exist
                break
            note, goal = f"codebook {reason}{self.moved(thresholds, before)}", min(may_err, target)
            trade = dataclasses.replace(plan.trade, has_zero=has_zero(plan.cells))
            reference, met = assigned(leaf, thresholds, trade, codebook, before, scale)
            if met.relative_l2 > target and trade.price:  # the target bounds the rate
                trade = Trade(0.0, has_zero=trade.has_zero)
                reference, met = assigned(leaf, thresholds, trade, codebook, before, scale)
            if target == np.inf or met.relative_l2 <= target:
                break
        else:
            return self._finer_or_exact(leaf, parent, plan, target)
        if parts_are_lost:
            return self._each_by_its_size(leaf, parent, lost.counted)
        if lost.nonzero > _LOST:
            note += f"; {lost.nonzero:.0%} of it are as good as zero"
        if not trade.price and (self.chooses_step or plan.trade.price):
            reference, met, rate = spent(leaf, reference, met, before, goal, scale, trade.has_zero)
            note += f"; {np.mean(reference.levels == 1):.2g} protected, rate {rate:.2g}"
        return Quantized(reference, met.relative_l2, note)

    def _finer_or_exact(self, leaf: Leaf, parent: Reference | None, plan: Plan, target: float) -> Stored:
        """Encode an array that no codebook is fine enough for."""
        why = f"{MAX_BINS} bins miss the error target {self.max_error:g}"
        finer = store_multiples(leaf, parent, target) if self.residual else None
        size = 0 if finer is None else sum(map(len, finer.pieces))
        if finer is not None and (lost := lost_to_step(plan.cells, finer.meta["s"])).nonzero > _LOST:
            why += f", and by a finer step {lost.nonzero:.0%} of it would be as good as zero"
        elif finer is not None and 2 * size < leaf.spec.nbytes:  # values that are not few take more than this
            return finer
        stored = exactly(leaf, parent, why)
        if finer is not None and lost.nonzero <= _LOST and size < sum(map(len, stored.pieces)):
            return finer
        return stored

    def _each_by_its_size(self, leaf: Leaf, parent: Reference | None, lost: float) -> Stored:
        """Encode an array in log buckets, whose error is relative to each element.

        This serves arrays for which one step cannot do, such as those with parts of very different scale.
        """
        alpha = min(_RELATIVE, max(self.max_error or _RELATIVE, FINEST))
        stored = LogBuckets(alpha, max_error=self.max_error).encode(leaf, parent)
        why = f"log buckets: by a common step {lost:.0%} of it would be as good as zero"
        return dataclasses.replace(stored, note=f"{why}; {stored.note}" if stored.note else why)

    def _attempts(
        self, leaf: Leaf, plan: Plan, before: LevelsReference | None
    ) -> Iterator[tuple[Thresholds, NpArray, str, float]]:
        """Yield thresholds and codebooks to try in turn until one keeps to the error target.

        With each come the reason and the error that levels may have.
        """
        how = self.fit_for(leaf)
        few = few_values(leaf, plan.cells, how.bins) if self.coder == "smallest" else None
        if self.chooses_step:
            magnitudes, target = plan.sketch.signed.magnitude(), self.max_error or 0.0
            yield from choices(leaf, target, plan.thresholds, magnitudes, plan.cells, few, before, self)
            return
        cells, looked, old = plan.cells, 0, None if before is None else before.codebook
        for bins in (how.bins,) if self.max_error is None else LADDER:
            how = dataclasses.replace(how, bins=bins)
            codebook, reason, cells, looked = fit_closely(
                leaf, plan.thresholds, cells, how, old, looked, plan.codes, few
            )
            if self.max_error is not None and predicted_error(cells, codebook) > 1.1 * self.max_error:
                continue
            if reason == "frozen":
                protected = share_at_or_above(plan.sketch.signed.magnitude(), plan.thresholds.protect_magnitude)
                if grown := self.outgrown(protected, before, leaf.spec):
                    codebook, reason = fit(cells, how, None)[0], grown
            if reason != "frozen":
                codebook = held_codebook(codebook, cells, how, leaf.spec)
            yield plan.thresholds, codebook, reason, np.inf


def _are_larger(pieces: Sequence[Piece], nbytes: int) -> bool:
    """Return whether pieces have more bytes.

    Where their upper limit decides, pieces that wait to be coded go on waiting.
    """
    return sum(map(entropy.most_bytes, pieces)) > nbytes and sum(map(len, pieces)) > nbytes


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
        has_zero = (chosen.firsts <= 0) & (chosen.firsts + chosen.sizes > 0)
        needs_zero = sketches.sums(1.0 * (sketches.values == 0)) > 0
        fits = (has_zero | ~needs_zero) & ~(blurred | self._are_lost(sketches, misses))
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
