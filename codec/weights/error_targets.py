"""Choice of protection, step and rate that meet an error target in the fewest bits.

Sizes and errors of a choice are predicted from the sketch, its elements spread evenly over their buckets: how many fall
on each level, and how far from it. What then becomes of the target is measured.

    protected  the largest elements, from each of a few shares on: they are dear, and let the step be wider
    step       the widest with a predicted error of `SHARE` of the target
    rate       the largest with which the encoder, given the exact error, stays within the target
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kernels.backend.arrays import is_torch, like, to_cpu
from ...kernels.error_sums import Distortion
from ...kernels.histogram import Histogram
from ...kernels.quantizer import Thresholds
from ..base import Leaf
from ..state.leaves import Array, NpArray
from .codebook import (
    MOST,
    Cells,
    Fit,
    Floats,
    fit_closely,
    held_codebook,
    multiples,
    predicted_error,
    rounded_codebook,
    to_8_bits,
)
from .level_assignment import Trade, assigned, largest_price
from .levels import LevelsReference
from .planning import QuantizeSettings, upper_threshold
from .uniform_quantizer import MULTIPLES_OF

SHARE = 0.9
"""Share of the target that nearest levels take when a codebook is fitted; the encoder has the rest."""
_SLACK = 0.5
"""Bits an element that a parent's thresholds and codebook may take beyond the need of an error target."""
_HELD = 0.98
"""Share of an error target up to which nearest levels of a parent's codebook are good enough."""
_AIMS = (1.0, 0.8, 0.5)
"""Shares of the error to aim at, tried in turn while the measured error is beyond the target."""
_LITTLE = 0.02
"""Share of the allowed squared error; if less than this is unused, no price is searched."""
_SAMPLE, _CAREFUL, _TRIES = 1 << 15, 0.97, 3
"""Elements of the sample for a price; share of the available error that a partial sample may use; tries."""
LADDER = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 254)
"""Entries that are tried where an error target leaves only their number to be chosen."""
SHARES = (0.0, 2.0**-12, 2.0**-9, 2.0**-7, 2.0**-5, 2.0**-3)
_PROTECTED_BITS = 11.0
"""Bits of a protected value in addition to its level: bfloat16, its two bytes coded separately."""
_ROUNDS = 8
_CLOSE = 0.98
"""Share of the error aimed at from which a step is wide enough."""


@dataclass(frozen=True, slots=True)
class Density:
    """The elements of a sketch, spread evenly over their buckets.

    Args:
        low: float64 [n], ascending: lower edges of the buckets, times `scale`.
        high: float64 [n], upper edges, times `scale`.
        counts: float64 [n], elements in each.
        scale: a power of two that brings the largest near 1, so that cubes stay in range.
    """

    low: Floats
    high: Floats
    counts: Floats
    scale: float

    @staticmethod
    def of(cells: Cells) -> Density:
        """Return the density of a sketch with at least one element."""
        values = cells.values
        scale = math.ldexp(1.0, max(-1000, min(1000, -math.frexp(float(np.abs(values).max()))[1])))
        local = cells.local * scale
        _, exponent = np.frexp(local)
        half = np.where((local == 0) | cells.sharp, 0.0, np.ldexp(0.5, exponent - 1 - cells.bits))
        middle = local + cells.offset * scale
        return Density(middle - half, middle + half, cells.counts.astype(np.float64), scale)

    def below(self, threshold: float) -> tuple[Density, Density]:
        """Split the elements at a magnitude, the edge of a bucket: smaller ones, and the others."""
        small = np.abs(self.low + self.high) < 2 * threshold * self.scale
        parts = (Density(self.low[k], self.high[k], self.counts[k], self.scale) for k in (small, ~small))
        return next(parts), next(parts)

    @property
    def squares(self) -> float:
        """Sum of the squares of the elements, times the square of `scale`."""
        low, high = self.low, self.high
        return float((self.counts * (low * low + low * high + high * high)).sum()) / 3

    @np.errstate(over="ignore", invalid="ignore")  # a parent's codebook may be of another order altogether
    def coded(self, codebook: Floats) -> tuple[float, Floats]:
        """Return the sum of squared distances from the nearest entries, scaled, and counts by entry."""
        codes = codebook * self.scale
        cuts = 0.5 * codes[1:] + 0.5 * codes[:-1]
        # Integral of the squared distance up to x: of the cells below, and x's own part.
        cells = ((cuts - codes[:-1]) ** 3 - (cuts - codes[1:]) ** 3) / 3
        below = np.concatenate([np.zeros(1), np.cumsum(cells)])

        def integral(x: Floats) -> Floats:
            entry = cuts.searchsorted(x)
            return below[entry] + (x - codes[entry]) ** 3 / 3

        width = self.high - self.low
        points = codes[cuts.searchsorted(self.low)]
        wide = width > 0
        mean = np.where(
            wide, (integral(self.high) - integral(self.low)) / np.where(wide, width, 1.0), (self.low - points) ** 2
        )
        edges = np.stack([self.low, self.high], axis=1).reshape(-1)
        passed = np.repeat(np.cumsum(self.counts), 2)
        passed[::2] -= self.counts
        at = np.interp(cuts, edges, passed)
        return float((self.counts * mean).sum()), np.diff(at, prepend=0.0, append=float(self.counts.sum()))


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to code an array, and the expected result.

    Args:
        threshold: magnitude from which elements are protected.
        codebook: float64, ascending.
        error: relative L2 error of the nearest levels.
        bits: an element, all in one context.
    """

    threshold: float
    codebook: Floats
    error: float
    bits: float


def expected(density: Density, threshold: float, codebook: Floats, exactly: bool) -> Choice:
    """Return the expected size and error of the nearest levels of a codebook.

    Args:
        density: of all elements that are not pruned.
        threshold: magnitude from which they are protected, the edge of a bucket.
        codebook: of the others; empty only if all are protected.
        exactly: whether bfloat16 holds the protected ones.
    """
    kept, protected = density.below(threshold)
    loss, by_entry = kept.coded(codebook) if kept.counts.size else (0.0, np.empty(0))
    number = float(protected.counts.sum())
    if not exactly:
        loss += _rounding(protected)
    loss = max(loss, 0.0) if math.isfinite(loss) else math.inf
    levels = np.append(by_entry, number)
    levels = levels[levels > 0]
    total = float(density.counts.sum())
    bits = float((levels * np.log2(total / levels)).sum()) + _PROTECTED_BITS * number
    squares = density.squares
    return Choice(threshold, codebook, math.sqrt(loss / squares) if squares else 0.0, bits / total)


def _rounding(protected: Density) -> float:
    """Return the squared error of rounding elements to bfloat16."""
    _, exponent = np.frexp(0.5 * (protected.low + protected.high))
    return float((protected.counts * np.ldexp(1.0, 2 * (exponent - 8))).sum()) / 12


def widest(density: Density, threshold: float, aim: float, exactly: bool) -> Choice | None:
    """Return multiples of the widest step with predicted error <= `aim`; None if above 254.

    Args:
        density: of all elements that are not pruned.
        threshold: magnitude from which they are protected.
        aim: relative L2 error.
        exactly: whether bfloat16 holds the protected ones.
    """
    kept, protected = density.below(threshold)
    if not kept.counts.size:
        return None
    squares = aim * aim * density.squares - (0.0 if exactly else _rounding(protected))
    low, high = float(kept.low[0]) / density.scale, float(kept.high[-1]) / density.scale
    least = (high / 2 - low / 2) / (MOST - 2) * 2
    if squares <= 0:
        return None
    step, found = math.sqrt(12 * squares / float(kept.counts.sum())) / density.scale, None
    for _ in range(_ROUNDS):
        step = to_8_bits(max(step, least), up=True)
        if not 0 < step < math.inf:
            break
        is_finest = step <= to_8_bits(least, up=True)
        entries = multiples(low, high, step)
        if entries.size > MOST:  # no step is as small as it should be, among subnormals
            break
        choice = expected(density, threshold, entries, exactly)
        share = choice.error / aim
        if share <= 1 and (found is None or choice.bits < found.bits):
            found = choice
        if _CLOSE <= share <= 1 or (share > 1 and is_finest):
            break
        # Rounding up does not bring back a step that was too wide.
        step *= min(1 / share, 1.5) if 0 < share <= 1 else 1.5 if share == 0 else max(0.992 / share, 0.7)
    return found


def smallest(density: Density, thresholds: Iterable[float], aim: float, exactly: bool) -> Choice | None:
    """Return the smallest choice of `widest` over all thresholds, or None."""
    choices = (widest(density, threshold, aim, exactly) for threshold in thresholds)
    return min((c for c in choices if c is not None), key=lambda c: c.bits, default=None)


def choices(
    leaf: Leaf,
    target: float,
    limits: Thresholds,
    magnitudes: Histogram,
    cells: Cells,
    few: NpArray | None,
    before: LevelsReference | None,
    how: QuantizeSettings,
) -> Iterator[tuple[Thresholds, NpArray, str, float]]:
    """Yield choices by the sketch: first the smallest that meets the target, then finer ones.

    Yields nothing for an array with many values that no codebook is fine enough for, if `how.residual` allows another
    stream.

    Args:
        leaf: the array.
        target: relative L2 error it may have.
        limits: thresholds of pruning, and of protection by sensitivity.
        magnitudes: of all its elements.
        cells: those that are neither pruned nor protected.
        few: all its distinct values if they are few, else None.
        before: the parent, or None.
        how: the policy for a parent's codebook, and whether finer streams are allowed.

    Yields:
        Thresholds, a codebook, why this one, and the relative L2 error that levels may come to.
    """
    if not cells.counts.size:
        yield limits, np.empty(0), "empty", target
        return
    two = Fit(2, 1.0, "exact", "refit", 1.0, 0)
    coarsest, _, cells, looked = fit_closely(leaf, limits, cells, two, None)
    density = Density.of(cells)
    exactly = leaf.spec.dtype == "bfloat16"
    # An array always keeps at least two entries, even if its deviations are small compared with its mean.
    goal = min(target, expected(density, np.inf, coarsest, exactly).error)
    thresholds = list(dict.fromkeys(upper_threshold(magnitudes, share * magnitudes.total) for share in SHARES))

    def at(choice: Choice) -> Thresholds:
        return dataclasses.replace(limits, protect_magnitude=choice.threshold)

    fresh = smallest(density, thresholds, SHARE * goal, exactly)
    reason = "new" if before is None else "refit"
    if fresh is None and few is None and how.residual and leaf.spec.dtype in MULTIPLES_OF:
        return
    if few is not None:
        own = expected(density, np.inf, few, exactly)
        if fresh is None or own.bits <= fresh.bits + _SLACK:
            yield limits, few, "of all its values", goal
    if before is not None and before.codebook.size and how.policy == "frozen":
        own = expected(density, before.thresholds.protect_magnitude, before.codebook, exactly)
        if own.error > _HELD * goal:
            reason = f"refit: the parent's gives {own.error / target:.3g} times the error target"
        elif fresh is not None and own.bits > fresh.bits + _SLACK:
            reason = f"refit: the parent's takes {own.bits - fresh.bits:.2g} bits more"
        else:
            yield at(own), own.codebook, "frozen", goal
    for aim in _AIMS:
        choice = fresh if aim == 1.0 else smallest(density, thresholds, SHARE * aim * goal, exactly)
        if choice is not None:
            yield at(choice), rounded_codebook(choice.codebook, leaf.spec), reason, goal
    # Last the finest grid there is; and for values that lie on no grid but are few, the best entries.
    for solver, count in (("uniform", MOST), *(("exact", count) for count in LADDER)):
        entries = Fit(count, 1.0, solver, "refit", 1.0, 0)
        codebook, _, cells, looked = fit_closely(leaf, limits, cells, entries, None, looked)
        if count == MOST or predicted_error(cells, codebook) <= goal:
            yield limits, held_codebook(codebook, cells, entries, leaf.spec), reason, goal


def spent(
    leaf: Leaf,
    reference: LevelsReference,
    met: Distortion,
    before: LevelsReference | None,
    target: float,
    scale: float,
    has_zero: bool,
) -> tuple[LevelsReference, Distortion, float]:
    """Choose levels at the largest price of a bit that stays within the error target.

    The price of a bit is found on a sample of nearest levels; its effect on the whole array is measured.

    Returns:
        The levels, their distortion, and the price in units of the mean square.
    """
    codebook, n = reference.codebook, leaf.spec.size
    mean, allowed = met.squared_norm / max(1, n), target**2 * met.squared_norm
    spare = allowed - met.squared_error
    # The kernel works in float32.
    if codebook.size < 2 or spare <= _LITTLE * allowed or scale != 1.0 or not 1e-30 < target**2 * mean < 1e30:
        return reference, met, 0.0
    at = blocks(n, _SAMPLE)
    count = n if isinstance(at, slice) else at.size
    room = spare * (count / n) * (1.0 if count == n else _CAREFUL)
    parent = None if before is None else np.ascontiguousarray(before.levels[at])
    parent_size = 1 if before is None else before.size
    levels = np.ascontiguousarray(reference.levels[at])
    price = largest_price(taken(leaf.flat, at), levels, parent, parent_size, codebook, target**2 * mean, room)
    for _ in range(_TRIES):
        if not price:
            break
        trade = Trade(price, has_zero=has_zero)
        held, error = assigned(leaf, reference.thresholds, trade, codebook, before, scale)
        if error.relative_l2 <= target:
            return held, error, price / mean
        price /= 2
    return reference, met, 0.0


def blocks(size: int, wanted: int, length: int = 1024) -> Any:
    """Return positions of about `wanted` elements out of `size`, in blocks at even distances.

    They are int64 and ascending; a slice if that is all of them.
    """
    if wanted >= size:
        return slice(None)
    starts = np.linspace(0, size - length, -(-wanted // length)).astype(np.int64)
    return np.unique((starts[:, None] + np.arange(length)).reshape(-1))


def taken(flat: Array, at: Any) -> Array:
    """Return the elements at some positions (int64 or a slice), on the host."""
    if not is_torch(flat):
        return np.ascontiguousarray(flat[at])
    if isinstance(at, slice):
        return to_cpu(flat)
    return to_cpu(flat[like(at, flat).to(flat.device)])
