"""Weights as levels of a codebook: prune, protect, quantize, and a delta of the levels (Inshrinkerator's pipeline).

Piece 0 is what the levels refer to: the codebook (or "the parent's"), the protected values as bfloat16 differences to
the parent's, and those values that bfloat16 cannot hold, to the bit. The other pieces are chunks of levels
(`entropy.encode_levels`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..kernels.arguments import choice
from ..kernels.arrays import is_torch, on_gpu
from ..kernels.assign import Thresholds, assign, dequantize
from ..kernels.distortion import Distortion
from ..kernels.floats import FORMATS, bits_for
from ..kernels.histogram import Histogram, kept_histogram, log_histogram
from ..kernels.planes import difference, merge_planes, split_planes, undifference
from . import bfloat16, entropy
from .base import CHUNK, Leaf, Memory, Stored, check_range
from .cells import fit_closely
from .codebook import (
    MOST,
    Cells,
    Fit,
    fit,
    largest_of,
    predicted_error,
    scaled_distortion,
    spacing,
    unit,
    variance,
)
from .errors import BadArgumentError, CorruptDataError
from .exact import Exact
from .fields import Reader, Writer
from .importance import mean_root, weights_of
from .leaves import Array, LeafSpec, NpArray, as_bytes, check_memory, from_bytes, on_host
from .multiples import store_multiples
from .parallel import map_chunks
from .partition import Sketch, kept, protection, pruning, share_at_or_above
from .ratedistortion import cheapest_levels

_EXPLICIT, _PARENTS, _MULTIPLES = 0, 1, 2
MAX_BINS = MOST
FINEST_SKETCH = 2.0**-13
_FARTHEST = 1 << 31
"""Multiples beyond this have no codebook of their own kind: their steps would be lost in rounding."""
_STEP = 8
"""A codebook is refit when its array's protected share passes a power of this times the share that was asked for."""
_FEW = 32
"""Fewer protected elements than these may come and go by chance."""
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
    """What `prepare` decided for one array."""

    sketch: Sketch
    thresholds: Thresholds
    trade: Trade


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
        max_error: relative L2 error an array may have, in (0, 1); picks its bins. None: `Config.max_rel_error`.
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
        sketches = map_chunks(self.sketch, leaves)
        protect = self.protection_limits(sketches, parents)
        by_layer = {}
        if self.prune:
            self.check_gradients(leaves)
            by_layer = pruning(sketches, self.prune, self.prune_metric)
        thresholds = [Thresholds(*protect, *by_layer.get(sketch.layer, (0.0, 0.0))) for sketch in sketches]
        trades = [Trade(0.0)] * len(leaves)
        if self.rate:
            trades = self.trades(leaves, [kept(s.signed, t) for s, t in zip(sketches, thresholds, strict=True)])
        return [Plan(*decided) for decided in zip(sketches, thresholds, trades, strict=True)]

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

    def sketch(self, leaf: Leaf) -> Sketch:
        """Histograms of an array's values and, where there is a gradient, of its sensitivity."""
        bits = bits_for(self.alpha, FORMATS[leaf.spec.dtype])
        signed = log_histogram(leaf.flat, bits, signed=True)
        if leaf.gradient is None:
            return Sketch(leaf.kind.layer, signed, None)
        wide = FORMATS["float64" if leaf.spec.dtype == "float64" else "float32"]
        return Sketch(
            leaf.kind.layer, signed, log_histogram(leaf.flat, bits_for(self.alpha, wide), gradient=leaf.gradient)
        )

    def protection_limits(self, sketches: Sequence[Sketch], parents: Sequence[Memory | None]) -> tuple[float, float]:
        """Protection thresholds; the parent's stay while they protect about what was asked (moving costs bits)."""
        if not self.protect:
            return (np.inf, np.inf)
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
        before = parent if isinstance(parent, LevelsMemory) and parent.levels.size == leaf.spec.size else None
        histogram = kept(plan.sketch.signed, plan.thresholds)
        if leaf.gradient is not None:
            histogram = kept_histogram(leaf.flat, plan.thresholds, histogram.bits, gradient=leaf.gradient)
        scale = unit(largest_of(plan.sketch.signed))
        bins = self.embedding_bins if self.embedding_bins and leaf.kind.layer == "embedding" else self.bins
        few = few_values(leaf, histogram, bins) if self.coder == "smallest" else None
        target = np.inf if self.max_error is None else self.max_error
        old = before.codebook if before is not None else None
        cells, looked = Cells.of(histogram), 0
        for count in (bins,) if self.max_error is None else _LADDER:
            how = Fit(count, self.sigma, self.solver, self.policy, self.trigger, self.seed)
            if few is None:
                codebook, reason, cells, looked = fit_closely(leaf, plan.thresholds, cells, how, old, looked)
            else:
                codebook, reason = fit(cells, how, old)
                if not np.isin(few, codebook).all():
                    codebook, reason = few, "of all its values"
            if target < np.inf and predicted_error(cells, codebook) > 1.1 * target:
                continue
            if reason == "frozen" and (grown := self._outgrown(plan, before, leaf.spec)):
                codebook, reason = fit(cells, how, None)[0], grown
            if reason != "frozen":
                codebook = _held(codebook, cells, how, leaf.spec)
            memory, met = _quantize(leaf, plan, codebook, before, scale)
            if target == np.inf or met.relative_l2 <= target:
                break
        else:
            stored = Exact().encode(leaf, parent)
            twice = store_multiples(leaf, parent, target) if self.residual else None
            if twice is not None and sum(map(len, twice.pieces)) < sum(map(len, stored.pieces)):
                return twice
            return dataclasses.replace(stored, note=f"exact: {MAX_BINS} bins miss the error target {target:g}")
        pieces = [_references(memory, leaf.spec, before), *_level_chunks(memory, before, self.coder)]
        if sum(map(len, pieces)) > leaf.spec.nbytes:  # most of it is not finite, and was kept beside its level
            return dataclasses.replace(Exact().encode(leaf, parent), note="exact: no smaller as levels")
        limits = plan.thresholds
        meta = {
            "t": [
                _finite(limits.protect_magnitude),
                _finite(limits.protect_sensitivity),
                float(limits.prune_magnitude),
                float(limits.prune_sensitivity),
            ]
        }
        note = f"codebook {reason}{self._moved(limits, before)}"
        return Stored("levels", meta, pieces, memory, met.relative_l2, "relative L2", note)


def _held(codebook: NpArray, cells: Cells, how: Fit, spec: LeafSpec) -> NpArray:
    """The codebook as the array's dtype holds it; the best one where a uniform one has suffered from that by too much.

    Equidistant entries hardly further apart than the values of a 16-bit array fall now on one, now between two.
    """
    held = rounded_codebook(codebook, spec)
    if not cells.sharp or how.solver != "uniform":
        return held
    best = rounded_codebook(fit(cells, dataclasses.replace(how, solver="exact"), None)[0], spec)
    return best if cells.loss(held) > how.trigger * cells.loss(best) else held


def _finite(threshold: float) -> float | None:
    return None if np.isinf(threshold) else threshold


def _quantize(
    leaf: Leaf, plan: Plan, codebook: NpArray, before: LevelsMemory | None, scale: float
) -> tuple[LevelsMemory, Distortion]:
    """Levels of all elements, the values of the protected ones as they will be restored, and the distortion."""
    levels = np.empty(leaf.spec.size, np.uint8)
    native = codebook_array(codebook, leaf.spec)

    def one(start: int) -> tuple[NpArray, Distortion]:
        x = leaf.flat[start : start + CHUNK]
        gradient = None if leaf.gradient is None else leaf.gradient[start : start + CHUNK]
        own = assign(x, plan.thresholds, codebook, gradient=gradient)
        if plan.trade.price and codebook.size:
            parent = None if before is None else before.levels[start : start + CHUNK]
            matters = None
            if plan.trade.mean and leaf.importance is not None:
                matters = weights_of(leaf.importance[start : start + CHUNK], plan.trade.mean, plan.trade.scale)
            parent_size = 1 if before is None else before.size
            own = cheapest_levels(x, own, parent, parent_size, codebook, plan.trade.price, matters)
        held = bfloat16.held(_where_protected(x, own), leaf.spec)
        values = native.to(x.device) if is_torch(x) else native
        protected = from_bytes(held, leaf.spec)
        restored = dequantize(own, values, protected=protected.to(x.device) if is_torch(x) else protected)
        levels[start : start + CHUNK] = on_host(own)
        return held, scaled_distortion(x, restored, scale)

    parts = map_chunks(one, range(0, leaf.spec.size, CHUNK))
    protected = np.concatenate([h for h, _ in parts]) if parts else np.empty(0, np.uint8)
    met = sum((d for _, d in parts), Distortion(0.0, 0.0, 0.0))
    return LevelsMemory(levels, codebook, protected, plan.thresholds), met


def few_values(leaf: Leaf, histogram: Histogram, most: int) -> NpArray | None:
    """All finite values, ascending, where they are at most `most`: each has an entry then, and none is lost."""
    if not 0 < np.count_nonzero(histogram.counts[:-1]) <= most:
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
    if codebook.size > 1:
        step = spacing(codebook)
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
