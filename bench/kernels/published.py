"""Quantizers of BitSnap, LC-Checkpoint and Check-N-Run."""

from __future__ import annotations

from typing import Any

import numpy as np

from shrinkpoint.kernels import cluster, exponent
from shrinkpoint.kernels.rows import row_quantize

from ..harness import Case, Job, host, near
from .place import COLUMNS, FEW, ROWS, Call, Place

_SLOW = 1 << 20
"""Most elements of a case that takes many steps an element."""


def cases(at: Place) -> list[Case]:
    """Return the cases of the three subjects."""
    few = at.few(_SLOW)
    clustered = lambda: at.compared(Call("cluster.cluster_quantize", (at.pair()[0],), (16,)), 6)  # noqa: E731
    return [
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
