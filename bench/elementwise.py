"""Cases of the kernels that look at every element once, the same on the CPU and on the GPU.

A rate is the bytes of the numbers an array stands for, 4 an element for float32 weights and for levels of such, over
the time, and its share is held against copying as many bytes. Each check compares a prefix with the oracle bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from . import peers
from .data import CODES, Sample
from .devices import Array, Device
from .harness import Case, CheckFailed, Job, Peer, Target, at_least, host, same

PREFIX = (1 << 16) + 1
"""Elements that are compared with the oracle."""
BITS = 6
"""Sub-bucket bits of the sketch: relative error 1 %."""
LEVELS = CODES + 2


def oracle(subject: str) -> Any:
    """The reference back end of a subject."""
    return import_module(f"shrinkpoint.kernels.{subject}.reference")


@dataclass(frozen=True)
class Place:
    """Device, data and number of elements of a case."""

    device: Device
    sample: Sample
    n: int

    @property
    def prefix(self) -> int:
        return min(self.n, PREFIX)

    @property
    def says(self) -> str:
        """Text for a passed check: the number of elements compared."""
        return f"{self.prefix:,} elements = oracle"

    def target(self, cpu: float, gpu: float) -> Target:
        """Target for the share of a copy, by device."""
        return at_least(gpu if self.device.gpu else cpu)

    def case(
        self, row: str, make: Callable[[Place], Job], target: Target | None = None, others: tuple[str, ...] = ()
    ) -> Case:
        """A case whose first peer is the copy."""
        names = (self.device.floor, *others)
        return Case(row, self.n, "GB/s", lambda: make(self), self.device.name, target, names, self.device.missing)

    def job(
        self,
        call: Callable[[], object],
        check: Callable[[], str],
        moves: float,
        others: list[Peer] | None = None,
        *,
        width: int = 4,
        note: str = "",
    ) -> Job:
        """Return a job over n elements of `width` bytes, `moves` bytes an element."""
        nbytes = width * self.n
        said = f"{moves:g} bytes an element move; data {self.sample.origin}"
        notes = f"{note}; {said}" if note else said
        return Job(call, check, float(nbytes), [self.device.copy(nbytes), *(others or [])], notes)


def as_oracle(
    at: Place,
    kernel: str,
    values: tuple[Any, ...],
    settings: tuple[Any, ...],
    moves: float,
    *,
    full: tuple[Any, ...] | None = None,
    named: Mapping[str, Any] | None = None,
    first: int | None = None,
    width: int = 4,
    note: str = "",
) -> Job:
    """Return the job of a kernel whose result is compared with the oracle's, bit for bit.

    Args:
        at: where it is measured.
        kernel: "subject.function".
        values: its arrays, on the host.
        settings: the arguments after them.
        moves: bytes an element.
        full: the oracle's arguments after the arrays, which have no defaults; None: the same settings.
        named: arguments by name, of both.
        first: length of that part along the first axis; None: the usual prefix.
        width: bytes of an element.
        note: for the row.
    """
    subject, name = kernel.split(".")
    function = getattr(import_module(f"shrinkpoint.kernels.{subject}"), name)
    arrays, by_name, part = _on(at, *values), named or {}, first or at.prefix

    def check() -> str:
        further = settings if full is None else full
        expected = getattr(oracle(subject), name)(*(x[:part] for x in values), *further, **by_name)
        same(name, function(*(x[:part] for x in arrays), *settings, **by_name), expected)
        return f"{part:,} {'rows' if values[0].ndim > 1 else 'elements'} = oracle"

    return at.job(lambda: function(*arrays, *settings, **by_name), check, moves, width=width, note=note)


def cases(device: Device, sample: Sample, n: int) -> list[Case]:
    """Every case of this module at one size."""
    at = Place(device, sample, n)
    gpu = device.gpu
    quantiles: tuple[str, ...] = ("torch.histc", "torch.quantile")
    quantiles = (*quantiles, "cupy.percentile") if gpu else ("np.histogram", "np.quantile", *quantiles, "ddsketch")
    search = ("torch.bucketize",) if gpu else ("np.searchsorted", "torch.bucketize")
    sort = ("torch.sort",) if gpu else ("np.argsort", "torch.sort")
    return [
        at.case("copy to new memory", fresh_copy),
        at.case("log_histogram", histogram, at.target(0.70, 0.85), quantiles),
        at.case("log_histogram bfloat16", histogram_bfloat16),
        at.case("log_histogram |g w|", histogram_sensitivity),
        at.case("kept_histogram", kept),
        at.case("assign", assign, at.target(0.55, 0.85), search),
        at.case("assign with gradient", assign_gradient),
        at.case("assign + joint_counts", assign_joint, at.target(0.30, 0.85)),
        at.case("joint_counts", joint),
        at.case("dequantize", dequantize),
        at.case("rate_distortion_levels", rate_distortion),
        at.case("unsettled", unsettled_elements),
        at.case("split_by_level", split, at.target(0.45, 0.60), sort),
        at.case("merge_by_level", merge, at.target(0.45, 0.60), sort),
        at.case("delta", delta),
        at.case("bucket_index", bucket_index),
        at.case("bucket_value", bucket_value),
        at.case("distortion", distortion),
        at.case("extrapolate", extrapolate),
        at.case("split_planes", split_planes),
        at.case("merge_planes", merge_planes),
        at.case("difference", difference),
        at.case("undifference", undifference),
        at.case("changed_mask", changed_mask),
        at.case("gather", gather),
        at.case("scatter", scatter),
        at.case("row_quantize 4 bit adaptive", rows_adaptive),
        at.case("row_quantize 8 bit", rows_uniform),
        at.case("row_dequantize", rows_back),
        at.case("cluster_quantize", cluster),
        at.case("cluster_dequantize", cluster_back),
        at.case("exponent_buckets", exponent_count),
        at.case("exponent_quantize", exponent_levels),
    ]


def _on(at: Place, *arrays: Any) -> list[Array]:
    return [at.device.array(x) for x in arrays]


def fresh_copy(at: Place) -> Job:
    """Return the peer that copies to newly allocated memory, where page faults count."""
    (x,) = _on(at, at.sample.before(at.n))
    copied: Callable[[], Any] = x.clone if at.device.gpu else x.copy

    def check() -> str:
        same("copy", copied(), x)
        return "all"

    return at.job(copied, check, 8)


def histogram(at: Place) -> Job:
    from shrinkpoint.kernels.histogram import log_histogram

    values = at.sample.before(at.n)
    (x,) = _on(at, values)

    def check() -> str:
        part = values[: at.prefix]
        same(
            "counts",
            log_histogram(x[: at.prefix], BITS, signed=True),
            oracle("histogram").log_histogram(part, BITS, signed=True),
        )
        if log_histogram(x, BITS, signed=True).total != at.n:
            raise CheckFailed("counts do not add up to the number of elements")
        return at.says

    others = peers.gpu_quantiles(x, at_least(20)) if at.device.gpu else peers.host_quantiles(values)
    return at.job(lambda: log_histogram(x, BITS, signed=True), check, 4, others)


def histogram_bfloat16(at: Place) -> Job:
    import torch

    from shrinkpoint.kernels.histogram import log_histogram

    values = torch.from_numpy(at.sample.before(at.n)).to(torch.bfloat16)
    x = values.cuda() if at.device.gpu else values

    def check() -> str:
        expected = oracle("histogram").log_histogram(values[: at.prefix], BITS, signed=True)
        same("counts", log_histogram(x[: at.prefix], BITS, signed=True), expected)
        return at.says

    return at.job(lambda: log_histogram(x, BITS, signed=True), check, 2, width=2)


def histogram_sensitivity(at: Place) -> Job:
    from shrinkpoint.kernels.histogram import log_histogram

    values, gradients = at.sample.before(at.n), at.sample.after(at.n)
    x, g = _on(at, values, gradients)

    def check() -> str:
        expected = oracle("histogram").log_histogram(
            values[: at.prefix], BITS, signed=False, gradient=gradients[: at.prefix]
        )
        same("counts", log_histogram(x[: at.prefix], BITS, gradient=g[: at.prefix]), expected)
        return at.says

    return at.job(lambda: log_histogram(x, BITS, gradient=g), check, 8)


def kept(at: Place) -> Job:
    limits = at.sample.thresholds
    values = (at.sample.before(at.n),)
    return as_oracle(at, "histogram.kept_histogram", values, (limits, BITS), 4, named={"gradient": None})


def _expected_levels(at: Place, gradient: Any = None) -> Any:
    codes = at.sample.codebook.astype(np.float64)
    part = at.sample.before(at.prefix)
    return oracle("quantizer").assign(part, at.sample.thresholds, codes, gradient=gradient)


def assign(at: Place) -> Job:
    from shrinkpoint.kernels.quantizer import boundaries

    values, limits, codebook = at.sample.before(at.n), at.sample.thresholds, at.sample.codebook
    bounds = boundaries(codebook, "float32").astype(np.float32)
    others = peers.bucketing(at.device, at.device.array(values), bounds, values)
    full, named = (limits, codebook.astype(np.float64)), {"gradient": None}
    return as_oracle(at, "quantizer.assign", (values,), (limits, codebook), 5, full=full, named=named).next_to(others)


def assign_gradient(at: Place) -> Job:
    from shrinkpoint.kernels.quantizer import assign as levels_of

    limits, codebook = at.sample.thresholds, at.sample.codebook
    x, g = _on(at, at.sample.before(at.n), at.sample.after(at.n))

    def check() -> str:
        expected = _expected_levels(at, at.sample.after(at.prefix))
        same("levels", levels_of(x[: at.prefix], limits, codebook, gradient=g[: at.prefix]), expected)
        return at.says

    return at.job(lambda: levels_of(x, limits, codebook, gradient=g), check, 9)


def assign_joint(at: Place) -> Job:
    from shrinkpoint.kernels.levels import joint_counts
    from shrinkpoint.kernels.quantizer import assign as levels_of

    limits, codebook = at.sample.thresholds, at.sample.codebook
    x, previous = _on(at, at.sample.after(at.n), at.sample.levels_before(at.n))

    def both(count: int) -> tuple[Any, Any]:
        levels = levels_of(x[:count], limits, codebook)
        return levels, joint_counts(previous[:count], levels, LEVELS, LEVELS)

    def check() -> str:
        codes = codebook.astype(np.float64)
        levels = oracle("quantizer").assign(at.sample.after(at.prefix), limits, codes, gradient=None)
        counts = oracle("levels").joint_counts(at.sample.levels_before(at.prefix), levels, LEVELS, LEVELS)
        same("levels and counts", both(at.prefix), (levels, counts))
        return at.says

    return at.job(lambda: both(at.n), check, 7)


def joint(at: Place) -> Job:
    levels = (at.sample.levels_before(at.n), at.sample.levels_after(at.n))
    return as_oracle(at, "levels.joint_counts", levels, (LEVELS, LEVELS), 2)


def dequantize(at: Place) -> Job:
    levels, codebook = (at.sample.levels_before(at.n),), at.sample.codebook
    codes, named = (at.device.array(codebook),), {"protected": None}
    return as_oracle(at, "quantizer.dequantize", levels, codes, 5, full=(codebook,), named=named)


def _prices(at: Place) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Prices of level changes in bits, where most weights keep their level."""
    bits = np.where(np.eye(LEVELS, dtype=bool), 0.2, 5.0).astype(np.float32)
    return bits * np.float32(0.003 * float(at.sample.after(at.prefix).var()))


def rate_distortion(at: Place) -> Job:
    values = (at.sample.after(at.n), at.sample.levels_after(at.n), at.sample.levels_before(at.n))
    return as_oracle(at, "rate_distortion.rate_distortion_levels", values, (at.sample.codebook, _prices(at)), 7)


def unsettled_elements(at: Place) -> Job:
    from shrinkpoint.kernels.rate_distortion import settled_bounds, unsettled

    values, old, new = at.sample.after(at.n), at.sample.levels_before(at.n), at.sample.levels_after(at.n)
    bounds = settled_bounds(at.sample.codebook, _prices(at))
    x, previous, levels = _on(at, values, old, new)

    def check() -> str:
        p = at.prefix
        expected = oracle("rate_distortion").unsettled(values[:p], new[:p], old[:p], bounds)
        found = unsettled(x[:p], levels[:p], previous[:p], bounds)
        for name, part in zip(("at", "x", "levels", "previous"), expected, strict=False):
            same(name, getattr(found, name), part)
        return f"{at.says}, {found.at.shape[0] / p:.1%} of them open"

    return at.job(lambda: unsettled(x, levels, previous, bounds), check, 6)


def split(at: Place) -> Job:
    old, new = at.sample.levels_before(at.n), at.sample.levels_after(at.n)
    others = peers.sorting(at.device, at.device.array(old))
    return as_oracle(at, "levels.split_by_level", (new, old), (LEVELS,), 3).next_to(others)


def merge(at: Place) -> Job:
    from shrinkpoint.kernels.levels import merge_by_level, split_by_level

    keys, values = _on(at, at.sample.levels_before(at.n), at.sample.levels_after(at.n))
    grouped, _ = split_by_level(values, keys, LEVELS)

    def check() -> str:
        old, new = at.sample.levels_before(at.prefix), at.sample.levels_after(at.prefix)
        part, _ = split_by_level(values[: at.prefix], keys[: at.prefix], LEVELS)
        expected, _ = oracle("levels").split_by_level(new, old, LEVELS)
        same("groups", part, expected)
        same("merged", merge_by_level(part, keys[: at.prefix], LEVELS), new)
        same("merged", merge_by_level(grouped, keys, LEVELS), values)
        return f"{at.says}, all merge back"

    return at.job(lambda: merge_by_level(grouped, keys, LEVELS), check, 3, peers.unsorting(at.device, keys, grouped))


def delta(at: Place) -> Job:
    from shrinkpoint.kernels.levels import delta as difference_of
    from shrinkpoint.kernels.levels import undelta

    old, new = at.sample.levels_before(at.n), at.sample.levels_after(at.n)
    previous, current = _on(at, old, new)

    def check() -> str:
        expected = oracle("levels").delta(old[: at.prefix], new[: at.prefix], LEVELS)
        steps = difference_of(previous, current, LEVELS)
        same("steps", host(steps)[: at.prefix], expected)
        same("levels", undelta(previous, steps, LEVELS), current)
        return f"{at.says}, all come back"

    return at.job(lambda: difference_of(previous, current, LEVELS), check, 3)


def bucket_index(at: Place) -> Job:
    return as_oracle(at, "histogram.bucket_index", (at.sample.before(at.n),), (1,), 8)


def bucket_value(at: Place) -> Job:
    from shrinkpoint.kernels.histogram import bucket_index as index_of

    index = index_of(at.sample.before(at.n), 1)
    return as_oracle(at, "histogram.bucket_value", (index,), (1, "float32"), 8)


def distortion(at: Place) -> Job:
    from shrinkpoint.kernels.error_sums import distortion as distance

    values, others = at.sample.before(at.n), at.sample.after(at.n)
    x, y = _on(at, values, others)

    def check() -> str:
        mine = distance(x[: at.prefix], y[: at.prefix])
        expected = oracle("error_sums").distortion(values[: at.prefix], others[: at.prefix])
        if not np.isclose(mine.relative_l2, expected.relative_l2, rtol=1e-9):
            raise CheckFailed(f"relative L2 {mine.relative_l2}, not {expected.relative_l2}")
        same("largest relative error", mine.largest_relative, expected.largest_relative)
        return f"{at.prefix:,} elements = oracle to 1e-9"

    return at.job(lambda: distance(x, y), check, 8)


def extrapolate(at: Place) -> Job:
    return as_oracle(at, "rate_distortion.extrapolate", (at.sample.after(at.n), at.sample.before(at.n)), (1.5,), 12)


def split_planes(at: Place) -> Job:
    return as_oracle(at, "planes.split_planes", (at.sample.before(at.n),), (), 8)


def merge_planes(at: Place) -> Job:
    from shrinkpoint.kernels.planes import merge_planes as merged
    from shrinkpoint.kernels.planes import split_planes as planes_of

    values = at.sample.before(at.n)
    (x,) = _on(at, values)
    planes = planes_of(x)

    def check() -> str:
        expected = oracle("planes").split_planes(values[: at.prefix])
        same("planes", planes_of(x[: at.prefix]), expected)
        same("patterns", host(merged(planes, "float32")).view(np.float32), values)
        return f"{at.says}, all come back"

    return at.job(lambda: merged(planes, "float32"), check, 8)


def difference(at: Place) -> Job:
    values, named = (at.sample.after(at.n), at.sample.before(at.n)), {"dtype": "float32"}
    return as_oracle(at, "planes.difference", values, ("arithmetic",), 12, named=named)


def undifference(at: Place) -> Job:
    from shrinkpoint.kernels.planes import difference as steps_of
    from shrinkpoint.kernels.planes import undifference as back

    old, new = at.sample.before(at.n), at.sample.after(at.n)
    previous, current = _on(at, old, new)
    steps = steps_of(current, previous)

    def check() -> str:
        expected = oracle("planes").undifference(
            host(steps)[: at.prefix], old[: at.prefix], "arithmetic", dtype="float32"
        )
        same("values", back(steps[: at.prefix], previous[: at.prefix]), expected)
        same("values", back(steps, previous), current)
        return f"{at.says}, all come back"

    return at.job(lambda: back(steps, previous), check, 12)


def _bfloat16_patterns(at: Place) -> tuple[Any, Any]:
    """Return upper halves of both checkpoints' float32 patterns; a tenth to a half differ."""
    return tuple(np.ascontiguousarray(x.view(np.uint16)[1::2]) for x in (at.sample.before(at.n), at.sample.after(at.n)))  # type: ignore[return-value]


def changed_mask(at: Place) -> Job:
    old, new = _bfloat16_patterns(at)
    return as_oracle(at, "packing.changed_mask", (new, old), (), 4.125, width=2, note=_changed(old, new))


def _changed(old: Any, new: Any) -> str:
    return f"bfloat16, {float((old != new).mean()):.0%} changed"


def gather(at: Place) -> Job:
    from shrinkpoint.kernels.packing import changed_mask as mask_of
    from shrinkpoint.kernels.packing import gather as gathered

    old, new = _bfloat16_patterns(at)
    previous, current = _on(at, old, new)
    bits = mask_of(current, previous)

    def check() -> str:
        same("values", gathered(current, bits), new[old != new])
        return "all = NumPy"

    return at.job(lambda: gathered(current, bits), check, 2.125, width=2, note=_changed(old, new))


def scatter(at: Place) -> Job:
    from shrinkpoint.kernels.packing import changed_mask as mask_of
    from shrinkpoint.kernels.packing import gather as gathered
    from shrinkpoint.kernels.packing import scatter as scattered

    old, new = _bfloat16_patterns(at)
    previous, current = _on(at, old, new)
    bits = mask_of(current, previous)
    values = gathered(current, bits)

    def check() -> str:
        same("values", scattered(previous, bits, values), new)
        return "all come back"

    return at.job(lambda: scattered(previous, bits, values), check, 4.125, width=2, note=_changed(old, new))


COLUMNS = 64
"""Elements of a row of an embedding table."""


def table(at: Place) -> Any:
    """The weights as rows of an embedding table."""
    return at.sample.before(at.n)[: at.n // COLUMNS * COLUMNS].reshape(-1, COLUMNS)


def quantized_rows(at: Place, bits: int, method: Any, bins: int) -> Job:
    """Return the job of `row_quantize`."""
    named, first = {"num_bins": bins, "ratio": 1.0}, max(1, at.prefix // COLUMNS)
    note = f"rows of {COLUMNS}"
    return as_oracle(at, "rows.row_quantize", (table(at),), (bits, method), 5, named=named, first=first, note=note)


def rows_adaptive(at: Place) -> Job:
    return quantized_rows(at, 4, "adaptive", 45)


def rows_uniform(at: Place) -> Job:
    return quantized_rows(at, 8, "asymmetric", 45)


def rows_back(at: Place) -> Job:
    from shrinkpoint.kernels.rows import row_dequantize, row_quantize

    (x,) = _on(at, table(at))
    codes, scale, minimum = row_quantize(x, 8, "asymmetric")
    part = max(1, at.prefix // COLUMNS)

    def check() -> str:
        few = [z[:part] for z in (codes, scale, minimum)]
        same("values", row_dequantize(*few), oracle("rows").row_dequantize(*(host(z) for z in few)))
        return f"{part:,} rows = oracle"

    return at.job(lambda: row_dequantize(codes, scale, minimum), check, 5, note=f"rows of {COLUMNS}")


def cluster(at: Place) -> Job:
    return as_oracle(at, "cluster.cluster_quantize", (at.sample.before(at.n),), (16,), 6)


def cluster_back(at: Place) -> Job:
    from shrinkpoint.kernels.cluster import cluster_dequantize, cluster_quantize

    (x,) = _on(at, at.sample.before(at.n))
    found = cluster_quantize(x)

    def check() -> str:
        p = at.prefix
        few = (found.codes[:p], found.labels[:p], found.scale, found.minimum)
        same("values", cluster_dequantize(*few), oracle("cluster").cluster_dequantize(*(host(z) for z in few)))
        return at.says

    return at.job(lambda: cluster_dequantize(*found), check, 6)


def exponent_count(at: Place) -> Job:
    from shrinkpoint.kernels.exponent import exponent_buckets

    values = at.sample.after(at.n) - at.sample.before(at.n)
    (x,) = _on(at, values)

    def check() -> str:
        expected = oracle("exponent").exponent_buckets(values[: at.prefix])
        mine = exponent_buckets(x[: at.prefix])
        parts = [(b.counts, b.lowest, b.highest, b.zeros) for b in (mine, expected)]
        same("buckets", *parts)
        return at.says

    return at.job(lambda: exponent_buckets(x), check, 4)


def exponent_levels(at: Place) -> Job:
    from shrinkpoint.kernels.exponent import exponent_buckets, promote

    values = at.sample.after(at.n) - at.sample.before(at.n)
    return as_oracle(at, "exponent.exponent_quantize", (values,), (promote(exponent_buckets(values), 3),), 5)
