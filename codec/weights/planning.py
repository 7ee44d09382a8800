"""Plans for the quantization of weights.

Planning sketches all arrays and finds thresholds over them, and for each array the price of a bit and the values to
which its codebook is fitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...kernels.backend.arrays import on_gpu
from ...kernels.backend.floats import FORMATS, bits_for
from ...kernels.histogram import kept_histogram_many, log_histogram_many, used_buckets_many
from ...kernels.quantizer import Thresholds
from ..base import Leaf, Reference
from ..errors import BadArgumentError
from ..parallel import map_batches, map_chunks
from ..state.leaves import NpArray, on_host
from .codebook import Cells, problem_of, solve_together
from .levels import LevelsReference, compatible_parent
from .partition import Filled, Sketch, kept, magnitudes, protection, pruning, share_at_or_above
from .ratedistortion import Trade, mean_roots, spread, trades
from .settings import QuantizeSettings

SMALL = 1 << 19
"""Raw bytes up to which an array is coded with others."""
_TOGETHER = 64
"""Small arrays that are sketched at once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds over all arrays of a codec.

    Args:
        protect: (magnitude, sensitivity) from which on weights are protected.
        prune: layer type -> (magnitude, sensitivity) below which its weights are pruned.
    """

    protect: tuple[float, float]
    prune: Mapping[str, tuple[float, float]]

    def of(self, layer: str) -> Thresholds:
        """Return the thresholds of arrays of a layer type."""
        return Thresholds(*self.protect, *self.prune.get(layer, (0.0, 0.0)))


@dataclass(frozen=True)
class Plan:
    """The decisions for one array before any array is encoded.

    Args:
        sketch: of the whole array.
        thresholds: of pruning and protection.
        trade: terms of the rate-distortion cost.
        kept: counts of the elements neither pruned nor protected, if gradients decide that; None: see `sketch`.
        codes: solution of the k-means problem, if it was solved together with others; None: not solved yet.
    """

    sketch: Sketch
    thresholds: Thresholds
    trade: Trade
    kept: Cells | None = None
    codes: NpArray | None = None

    @cached_property
    def cells(self) -> Cells:
        """Return the counts of the elements that are neither pruned nor protected."""
        return _cells_of(self.sketch, self.thresholds) if self.kept is None else self.kept


def check_gradients(codec: QuantizeSettings, leaves: Sequence[Leaf]) -> None:
    """Refuse to prune arrays by sensitivity without gradients."""
    if codec.prune and codec.prune_metric == "sensitivity":
        for leaf in leaves:
            if leaf.gradient is None and leaf.kind.layer != "embedding":
                raise BadArgumentError(f"{leaf.path}: pruning by sensitivity needs its gradient in grads=")


def sketched(codec: QuantizeSettings, leaves: Sequence[Leaf]) -> list[Sketch]:
    """Return histograms of the values and, with a gradient, of the sensitivity of each array."""

    small = [i for i, leaf in enumerate(leaves) if _is_small(leaf)]
    others = [i for i, leaf in enumerate(leaves) if not _is_small(leaf)]
    found = dict(zip(small, _small_sketches(codec, [leaves[i] for i in small]), strict=True))
    found |= zip(others, _large_sketches(codec, [leaves[i] for i in others]), strict=True)
    return [found[i] for i in range(len(leaves))]


def _is_small(leaf: Leaf) -> bool:
    """Return whether an array is sketched together with others."""
    return (
        leaf.spec.nbytes <= SMALL and leaf.spec.dtype == "float32" and leaf.gradient is None and not on_gpu(leaf.flat)
    )


def _small_sketches(codec: QuantizeSettings, leaves: Sequence[Leaf]) -> list[Sketch]:
    bits, found = min(_bits(codec), FORMATS["float32"].mantissa), []
    for begin in range(0, len(leaves), _TOGETHER):
        part = leaves[begin : begin + _TOGETHER]
        joined = np.concatenate([on_host(leaf.flat) for leaf in part])
        buckets, counts, ends = used_buckets_many(joined, np.cumsum([leaf.spec.size for leaf in part]), bits)
        start = 0
        for leaf, end in zip(part, ends.tolist(), strict=True):
            filled = Filled(buckets[start:end], counts[start:end], bits, "float32", True)
            found.append(Sketch(leaf.kind.layer, filled, None))
            start = end
    return found


def _large_sketches(codec: QuantizeSettings, leaves: Sequence[Leaf]) -> list[Sketch]:
    def some(numbers: list[int]) -> list[Sketch]:
        bits, known = _bits(codec), [i for i in numbers if leaves[i].gradient is not None]
        signed = log_histogram_many([leaves[i].flat for i in numbers], bits, signed=True)
        sensitivity = log_histogram_many(
            [leaves[i].flat for i in known], bits, gradients=[leaves[i].gradient for i in known]
        )
        of = dict(zip(known, sensitivity, strict=True))
        return [Sketch.of(leaves[i].kind.layer, h, of.get(i)) for i, h in zip(numbers, signed, strict=True)]

    return map_batches(some, leaves)


def _bits(codec: QuantizeSettings) -> int:
    """Return the sub-bucket bits of float64 sketches; narrower formats may have fewer."""
    return bits_for(codec.alpha, FORMATS["float64"])


def limits(codec: QuantizeSettings, sketches: Sequence[Sketch], before: Thresholds | None) -> Limits:
    """Return the thresholds over all arrays, from their sketches and the parent's thresholds."""
    return Limits(protection_limits(codec, sketches, before), pruning_limits(codec, sketches))


def thresholds_before(parents: Sequence[Reference | None]) -> Thresholds | None:
    """Return the parent's thresholds from its first quantized array, or None."""
    return next((p.thresholds for p in parents if isinstance(p, LevelsReference)), None)


def pruning_limits(codec: QuantizeSettings, sketches: Sequence[Sketch]) -> dict[str, tuple[float, float]]:
    """Return pruning thresholds by layer type."""
    return pruning(sketches, codec.prune, codec.prune_metric) if codec.prune else {}


def protection_limits(
    codec: QuantizeSettings, sketches: Sequence[Sketch], before: Thresholds | None
) -> tuple[float, float]:
    """Return protection thresholds; old ones are kept while the protected share is about right.

    Under an error target each array has its own magnitude, and protection by sensitivity stays.
    """
    if not codec.protect:
        return (np.inf, np.inf)
    if codec.chooses_step:
        return (np.inf, protection(sketches, codec.protect)[1])
    if codec.policy == "frozen" and before is not None and not any(s.products for s in sketches):
        old = before.protect_magnitude
        share = share_at_or_above(magnitudes(s.values for s in sketches), old)
        if 0.5 * codec.protect <= share <= 1.25 * codec.protect:
            return (old, np.inf)
    return protection(sketches, codec.protect)


def spreads(sketches: Sequence[Sketch], thresholds: Sequence[Thresholds]) -> list[float | None]:
    """Return the variance of the coded elements of each array, see `spread`."""
    pairs = list(zip(sketches, thresholds, strict=True))
    return map_chunks(lambda pair: spread(kept(pair[0].signed, pair[1])), pairs)


def plans(
    codec: QuantizeSettings,
    leaves: Sequence[Leaf],
    parents: Sequence[Reference | None],
    sketches: Sequence[Sketch],
    decided: Limits,
) -> list[Plan]:
    """Return a plan for each array, under thresholds that may rest on more arrays than these.

    Codebooks of arrays on a GPU are solved together on that GPU.
    """
    thresholds = [decided.of(sketch.layer) for sketch in sketches]
    slopes = [Trade(0.0)] * len(leaves)
    if codec.rate:
        sizes = [leaf.spec.size for leaf in leaves]
        slopes = trades(codec.rate, sizes, spreads(sketches, thresholds), mean_roots(leaves))
    cells = _kept(codec, leaves, thresholds)
    found = [Plan(*made) for made in zip(sketches, thresholds, slopes, cells, strict=True)]
    if codec.max_error is not None or codec.solver != "exact":
        return found
    codes = _codes(codec, leaves, parents, found)
    return [replace(plan, codes=own) for plan, own in zip(found, codes, strict=True)]


def _cells_of(sketch: Sketch, thresholds: Thresholds) -> Cells:
    return Cells.of(kept(sketch.signed, thresholds))


def _kept(codec: QuantizeSettings, leaves: Sequence[Leaf], thresholds: Sequence[Thresholds]) -> list[Cells | None]:
    """Count the elements neither pruned nor protected of each array with a gradient."""

    def some(numbers: list[int]) -> list[Cells]:
        counted = kept_histogram_many(
            [leaves[i].flat for i in numbers],
            [thresholds[i] for i in numbers],
            _bits(codec),
            gradients=[leaves[i].gradient for i in numbers],
        )
        return [Cells.of(histogram) for histogram in counted]

    known = [i for i, leaf in enumerate(leaves) if leaf.gradient is not None]
    found = map_batches(lambda numbers: some([known[n] for n in numbers]), [leaves[i] for i in known])
    of = dict(zip(known, found, strict=True))
    return [of.get(i) for i in range(len(leaves))]


def _codes(
    codec: QuantizeSettings, leaves: Sequence[Leaf], parents: Sequence[Reference | None], planned: Sequence[Plan]
) -> list[NpArray | None]:
    """Solve the exact problems of arrays on a GPU; None for others, which are solved when used."""

    def some(numbers: list[int]) -> list[NpArray | None]:
        place = leaves[numbers[0]].flat
        problems = {}
        if on_gpu(place):
            for i in numbers:
                before = compatible_parent(parents[i], leaves[i].spec)
                problem = problem_of(
                    planned[i].cells, codec.fit_for(leaves[i]), None if before is None else before.codebook
                )
                if problem is not None and problem.method == "exact" and problem.start is None:
                    problems[i] = problem
        found = dict(zip(problems, solve_together(list(problems.values()), place), strict=True)) if problems else {}
        return [found.get(i) for i in numbers]

    return map_batches(some, leaves)
