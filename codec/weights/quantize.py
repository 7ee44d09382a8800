"""Weights as codebook levels: prune, protect, quantize, delta (as in Inshrinkerator)."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...kernels.quantizer import Thresholds
from .. import entropy
from ..base import EncodedGroup, EncodedGroups, Leaf, Parents, Reference, Stored, rounded_error
from ..format.fields import Piece
from ..lossless.exact import Exact
from ..moments.logbuckets import FINEST, LogBuckets
from ..state.casting import unit
from ..state.leaves import NpArray
from .codebook import Lost, fit, largest_of, lost_share, lost_to_step, predicted_error
from .error_targets import LADDER, choices, spent
from .level_assignment import Quantized, assigned
from .levels import MAX_BINS, LevelsReference, compatible_parent, compatible_parents, level_pieces, metadata
from .partition import share_at_or_above
from .planning import Plan, QuantizeSettings, check_gradients, limits, plans, sketched, thresholds_before
from .quantize_many import quantized_many
from .ratedistortion import Trade
from .sketch_refinement import few_values, fit_closely, held_codebook
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
            fitted to a finer one, see `codec.weights.sketch_refinement`; not with "kmeans++", which is as published.
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
        if stored is None:
            return dataclasses.replace(Exact().encode(leaf, parent), note="exact: no smaller as levels")
        return stored

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
        for thresholds, codebook, reason, may_err in self._attempts(leaf, plan, before):
            lost = lost_share(plan.cells, codebook) if self.solver == "uniform" else Lost(0.0, 0.0)
            parts_are_lost = lost.counted > (_LOST if before is None else _LOST_SINCE) and is_fine
            if parts_are_lost and target == np.inf:  # further attempts do not exist
                break
            note, goal = f"codebook {reason}{self.moved(thresholds, before)}", min(may_err, target)
            trade = plan.trade
            reference, met = assigned(leaf, thresholds, trade, codebook, before, scale)
            if met.relative_l2 > target and trade.price:  # the target bounds the rate
                trade = Trade(0.0)
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
            reference, met, rate = spent(leaf, reference, met, before, goal, scale)
            note += f"; {np.mean(reference.levels == 1):.2g} protected, rate {rate:.2g}"
        return Quantized(reference, met.relative_l2, note)

    def _finer_or_exact(self, leaf: Leaf, parent: Reference | None, plan: Plan, target: float) -> Stored:
        """Encode an array that no codebook is fine enough for."""
        note = f"exact: {MAX_BINS} bins miss the error target {self.max_error:g}"
        finer = store_multiples(leaf, parent, target) if self.residual else None
        size = 0 if finer is None else sum(map(len, finer.pieces))
        if finer is not None and (lost := lost_to_step(plan.cells, finer.meta["s"])).nonzero > _LOST:
            note += f", and by a finer step {lost.nonzero:.0%} of it would be as good as zero"
        elif finer is not None and 2 * size < leaf.spec.nbytes:  # values that are not few take more than this
            return finer
        stored = Exact().encode(leaf, parent)
        if finer is not None and lost.nonzero <= _LOST and size < sum(map(len, stored.pieces)):
            return finer
        return dataclasses.replace(stored, note=note)

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
