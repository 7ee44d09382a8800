"""Weights to levels and back: codebooks, multiples of a step, published quantizers."""

from __future__ import annotations

from typing import Any

import numpy as np

from shrinkpoint.kernels import cluster, error_sums, exponent, multiples, rate_distortion
from shrinkpoint.kernels import levels as level_kernels
from shrinkpoint.kernels import quantizer as kernels
from shrinkpoint.kernels.rows import row_quantize

from .. import peers
from ..harness import Case, Job, host, near, same
from .place import COLUMNS, FEW, LEVELS, ROUNDING, ROWS, Call, Place, oracle

_STEP = (2.0**-13, "int16")
"""Step of multiples, and their dtype."""


def cases(at: Place) -> list[Case]:
    """Return the cases of the subjects."""
    extrapolated = lambda: at.compared(Call("rate_distortion.extrapolate", at.pair()[::-1], (1.5,)), 12)  # noqa: E731
    multiplied = lambda: at.compared(Call("multiples.step_multiples", at.pair()[:1], _STEP), 6)  # noqa: E731
    search = ("torch.bucketize",) if at.device.gpu else ("np.searchsorted", "torch.bucketize")
    few = at.few(_SLOW)
    clustered = lambda: at.compared(Call("cluster.cluster_quantize", (at.pair()[0],), (16,)), 6)  # noqa: E731
    return [
        at.case("assign", lambda: assign(at), at.target(0.55, 0.85), search),
        at.case("assign with gradient", lambda: at.compared(_assign(at, at.sample.after(at.n)), 9)),
        at.case("assign + joint_counts", lambda: with_counts(at), at.target(0.30, 0.85)),
        at.case("dequantize", lambda: dequantize(at)),
        at.case("boundaries", lambda: boundaries(at), unit="us", on="cpu"),
        at.case("rate_distortion_levels", lambda: cheapest(at)),
        at.case("unsettled", lambda: unsettled(at)),
        at.case("extrapolate", extrapolated),
        at.case("settled_bounds", lambda: bounds(at), unit="us", on="cpu"),
        at.case("distortion", lambda: distortion(at)),
        at.case("square_sum", lambda: at.compared(Call("multiples.square_sum", at.pair()[:1]), 4)),
        at.case("step_multiples", multiplied),
        at.case("step_values", lambda: values_of_multiples(at)),
        at.case("row_quantize 4 bit adaptive", lambda: rows(at, 4, "adaptive", 45)),
        at.case("row_quantize 8 bit", lambda: rows(at, 8, "asymmetric", 45)),
        at.case("row_dequantize", lambda: dequantized_rows(at)),
        few.case("row_quantize 2 bit adaptive", lambda: rows(few, 2, "adaptive", 25)),
        few.case("row_quantize 3 bit adaptive", lambda: rows(few, 3, "adaptive", 25)),
        few.case("row_kmeans 2 bit", lambda: clustered_rows(few)),
        at.case("row_lookup", lambda: looked_up(at)),
        at.case("cluster_quantize", clustered),
        at.case("cluster_dequantize", lambda: dequantized(at)),
        at.case("exponent_buckets", lambda: at.compared(Call("exponent.exponent_buckets", (at.steps(),)), 4)),
        at.case("exponent_quantize", lambda: at.compared(_quantize(at), 5)),
        at.case("exponent_dequantize", lambda: values_of_buckets(at)),
        at.case("exponent_differences", lambda: at.compared(Call("exponent.exponent_differences", _states(at)), 12)),
        at.case("exponent_sums", lambda: summed(at)),
        at.case("merge_buckets", lambda: merged(at), unit="us", on="cpu"),
        at.case("promote", lambda: promoted(at), unit="us", on="cpu"),
    ]


def assign(at: Place) -> Job:
    """Find each weight's level."""
    values, codebook = at.sample.before(at.n), at.sample.codebook
    bounds = kernels.boundaries(codebook, "float32").astype(np.float32)
    return at.compared(_assign(at, None), 5, peers.bucketing(at.device, at.device.array(values), bounds, values))


def _assign(at: Place, gradient: Any) -> Call:
    limits, codebook = at.sample.thresholds, at.sample.codebook
    full = limits, codebook.astype(np.float64)
    return Call("quantizer.assign", (at.sample.before(at.n),), (limits, codebook), full, {"gradient": gradient})


def with_counts(at: Place) -> Job:
    """Find levels and count them by the levels before."""
    limits, codebook, p = at.sample.thresholds, at.sample.codebook, at.prefix
    x, previous = at.arrays(at.sample.after(at.n), at.sample.levels_before(at.n))

    def both(count: int) -> tuple[Any, Any]:
        levels = kernels.assign(x[:count], limits, codebook)
        return levels, level_kernels.joint_counts(previous[:count], levels, LEVELS, LEVELS)

    def check() -> str:
        levels = oracle("quantizer").assign(at.sample.after(p), limits, codebook.astype(np.float64), gradient=None)
        counts = oracle("levels").joint_counts(at.sample.levels_before(p), levels, LEVELS, LEVELS)
        same("levels and counts", both(p), (levels, counts))
        return at.says

    return at.job(lambda: both(at.n), check, 7)


def dequantize(at: Place) -> Job:
    """Look up the values of levels."""
    codebook = at.sample.codebook
    codes, named = (at.device.array(codebook),), {"protected": None}
    return at.compared(Call("quantizer.dequantize", (at.levels()[0],), codes, (codebook,), named), 5)


def boundaries(at: Place) -> Job:
    """Compute the borders between codes."""
    codebook, x = at.sample.codebook, at.sample.before(at.prefix)
    return at.table(
        lambda: kernels.boundaries(codebook, "float32"),
        lambda: np.abs(x[:, None].astype(np.float64) - codebook).argmin(axis=1),
        f"{codebook.size} codes",
        seen=lambda found: np.searchsorted(found, x, side="right"),
        says=f"{x.size:,} elements = the nearest code",
    )


# ------------------------------------------------------------------------------------------------------ rate-distortion


def _prices(at: Place) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Prices of level changes in bits, where most weights keep their level."""
    bits = np.where(np.eye(LEVELS, dtype=bool), 0.2, 5.0).astype(np.float32)
    return bits * np.float32(0.003 * float(at.sample.after(at.prefix).var()))


def cheapest(at: Place) -> Job:
    """Choose the cheapest level of each weight."""
    values = (at.sample.after(at.n), at.sample.levels_after(at.n), at.sample.levels_before(at.n))
    return at.compared(Call("rate_distortion.rate_distortion_levels", values, (at.sample.codebook, _prices(at))), 7)


def unsettled(at: Place) -> Job:
    """Find the weights whose level may still change."""
    values, (before, after) = at.sample.after(at.n), at.levels()
    bounds = rate_distortion.settled_bounds(at.sample.codebook, _prices(at))
    (x, levels, previous), p = at.arrays(values, after, before), at.prefix

    def check() -> str:
        expected = oracle("rate_distortion").unsettled(values[:p], after[:p], before[:p], bounds)
        found = rate_distortion.unsettled(x[:p], levels[:p], previous[:p], bounds)
        for name, part in zip(("at", "x", "levels", "previous"), expected, strict=False):
            same(name, getattr(found, name), part)
        return f"{at.says}, {found.at.shape[0] / p:.1%} of them open"

    return at.job(lambda: rate_distortion.unsettled(x, levels, previous, bounds), check, 6)


def bounds(at: Place) -> Job:
    """Compute between which values a level stays the cheapest."""
    codebook = at.sample.codebook
    prices = (1e-4 * (np.log2(at.n + 1.0) - np.log2(at.joint() + 1.0))).astype(np.float32)
    expected = lambda: oracle("rate_distortion").settled_bounds(codebook, prices, 0.0)  # noqa: E731
    return at.table(lambda: rate_distortion.settled_bounds(codebook, prices), expected, f"{LEVELS} x {LEVELS} pairs")


# ---------------------------------------------------------------------------------------------------- errors, multiples


def distortion(at: Place) -> Job:
    """Sum squared errors and find the largest relative one."""
    (x, y), p = at.arrays(*at.pair()), at.prefix

    def check() -> str:
        found = error_sums.distortion(x[:p], y[:p])
        expected = oracle("error_sums").distortion(*(part[:p] for part in at.pair()))
        near("relative L2", found.relative_l2, expected.relative_l2, ROUNDING)
        same("largest relative error", found.largest_relative, expected.largest_relative)
        return f"{at.says} to {ROUNDING:g}"

    return at.job(lambda: error_sums.distortion(x, y), check, 8)


def values_of_multiples(at: Place) -> Job:
    """Compute the weights of multiples."""
    found = multiples.step_multiples(at.pair()[0], *_STEP)
    return at.compared(Call("multiples.step_values", (found,), (_STEP[0], "float32")), 6)


# ---------------------------------------------------------------------------------------------------- published systems

_SLOW = 1 << 20
"""Most elements of a case that takes many steps an element."""


# --------------------------------------------------------------------------------------------------- rows of embeddings


def rows(at: Place, bits: int, method: Any, bins: int) -> Job:
    """Quantize rows by even levels."""
    named, first = {"num_bins": bins, "ratio": 1.0}, max(1, at.prefix // COLUMNS)
    return at.compared(
        Call("rows.row_quantize", (at.matrix(),), (bits, method), named=named, first=first), 5, note=ROWS
    )


def dequantized_rows(at: Place) -> Job:
    """Restore rows."""
    found = tuple(host(part) for part in row_quantize(at.matrix(), 8, "asymmetric"))
    return at.compared(Call("rows.row_dequantize", found, first=max(1, at.prefix // COLUMNS)), 5, note=ROWS)


def clustered_rows(at: Place) -> Job:
    """Quantize rows by k-means."""
    call = Call("rows.row_kmeans", (at.matrix(),), (2,), first=_few(at))
    return at.compared(call, 5, note=f"{ROWS}, 15 iterations at most")


def looked_up(at: Place) -> Job:
    """Look up the entries of each row's codebook."""
    matrix = at.matrix()
    codes = (at.sample.levels_before(matrix.size) % 4).reshape(matrix.shape)
    call = Call("rows.row_lookup", (codes, np.ascontiguousarray(matrix[:, :4])), first=_few(at))
    return at.compared(call, 5, note=f"{ROWS}, 4 entries each")


def _few(at: Place) -> int:
    return max(1, min(at.n, FEW) // COLUMNS)


# ------------------------------------------------------------------------------------------------ clusters, exponents


def dequantized(at: Place) -> Job:
    """Restore values from labels and codes."""
    found = cluster.cluster_quantize(at.sample.before(at.n))
    parts = found.codes, found.labels, found.scale, found.minimum
    return at.compared(Call("cluster.cluster_dequantize", parts), 6)


def _quantize(at: Place) -> Call:
    steps = at.steps()
    return Call("exponent.exponent_quantize", (steps,), (exponent.promote(exponent.exponent_buckets(steps), 3),))


def values_of_buckets(at: Place) -> Job:
    """Look up the values of buckets."""
    call = _quantize(at)
    levels = exponent.exponent_quantize(*call.values, *call.settings)
    codebook = (call.settings[0].codebook,)
    return at.compared(Call("exponent.exponent_dequantize", (levels,), codebook), 5, note="3 bits")


def _states(at: Place) -> tuple[Any, Any]:
    steps = at.steps()
    return steps + np.float32(1), np.ones_like(steps)


def summed(at: Place) -> Job:
    """Add the values of buckets to an array."""
    steps = at.steps()
    promotion = exponent.promote(exponent.exponent_buckets(steps), 3)
    arrays = np.ones_like(steps), exponent.exponent_quantize(steps, promotion)
    return at.compared(Call("exponent.exponent_sums", arrays, (promotion.codebook,)), 9, note="3 bits")


def _parts(steps: Any) -> list[Any]:
    return [exponent.exponent_buckets(part) for part in (steps[: steps.size // 3], steps[steps.size // 3 :])]


def merged(at: Place) -> Job:
    """Merge the buckets of two arrays."""
    steps = at.steps()
    parts, whole = _parts(steps), lambda: exponent.exponent_buckets(steps)
    return at.table(lambda: exponent.merge_buckets(*parts), whole, "two arrays", says="two parts = the whole")


def promoted(at: Place) -> Job:
    """Choose the buckets that three bits keep."""
    steps = at.steps()
    buckets = exponent.merge_buckets(*_parts(steps))

    def check() -> str:
        values = exponent.promote(buckets, 3).codebook.view(np.float32)
        exponents = np.frexp(np.abs(steps))[1]
        for value in values[1:]:
            members = np.abs(steps[(exponents == np.frexp(abs(value))[1]) & (np.sign(steps) == np.sign(value))])
            # The middle of two patterns of one octave is that of their values, rounded once.
            middle = np.float32((float(members.min()) + float(members.max())) / 2)
            near("value", abs(value), middle, 1e-12)
        return f"{values.size - 1} values = the middle of their buckets"

    return Job(lambda: exponent.promote(buckets, 3), check, 1.0, (), f"3 bits; data {at.sample.origin}")
