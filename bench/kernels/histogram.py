"""Sketches of weights: histograms over logarithmic buckets, and their quantiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shrinkpoint.kernels import histogram as kernels

from .. import peers
from ..harness import Case, Job, Peer, at_least, same
from .place import BITS, Call, Place, comes_back, oracle, require

TENSORS, SMALL = 500, 10_000
ONE, EACH = "one tensor", "a call each"


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject."""
    others: tuple[str, ...] = ("torch.histc", "torch.quantile")
    kept_many = lambda parts: kernels.kept_histogram_many(parts, [at.sample.thresholds] * TENSORS, BITS)  # noqa: E731
    others = (*others, "cupy.percentile") if at.device.gpu else ("np.histogram", "np.quantile", *others, "ddsketch")
    return [
        at.case("log_histogram", lambda: whole(at), at.target(0.70, 0.85), others),
        at.case("log_histogram bfloat16", lambda: halved(at)),
        at.case("log_histogram |g w|", lambda: sensitivity(at)),
        at.case("kept_histogram", lambda: at.compared(_kept(at), 4)),
        at.case("bucket_index", lambda: at.compared(Call("histogram.bucket_index", (at.pair()[0],), (1,)), 8)),
        at.case("bucket_value", lambda: values(at)),
        at.case("merge", lambda: merged(at), unit="us", on="cpu"),
        at.case("quantile", lambda: quantiles(at), unit="us", on="cpu"),
        many(at, "log_histogram", lambda parts: kernels.log_histogram_many(parts, BITS, signed=True), sketch),
        many(at, "kept_histogram", kept_many, lambda x: kernels.kept_histogram(x, at.sample.thresholds, BITS)),
    ]


def sketch(x: Any) -> Any:
    """Return the signed histogram of values."""
    return kernels.log_histogram(x, BITS, signed=True)


def whole(at: Place) -> Job:
    """Count all elements; the counts must add up."""
    values = at.sample.before(at.n)
    (x,) = at.arrays(values)

    def check() -> str:
        expected = oracle("histogram").log_histogram(values[: at.prefix], BITS, signed=True)
        same("counts", sketch(x[: at.prefix]), expected)
        require(sketch(x).total == at.n, "counts do not add up to the number of elements")
        return at.says

    others = peers.gpu_quantiles(x, at_least(20)) if at.device.gpu else peers.host_quantiles(values)
    return at.job(lambda: sketch(x), check, 4, others)


def halved(at: Place) -> Job:
    """Count bfloat16 weights."""
    import torch

    values = torch.from_numpy(at.sample.before(at.n)).to(torch.bfloat16)
    x, p = values.cuda() if at.device.gpu else values, at.prefix
    expected = oracle("histogram").log_histogram(values[:p], BITS, signed=True)
    return at.job(lambda: sketch(x), comes_back("counts", lambda: sketch(x[:p]), expected, at.says), 2, width=2)


def sensitivity(at: Place) -> Job:
    """Count products of weights and gradients."""
    x, gradient = at.pair()
    return at.compared(Call("histogram.log_histogram", (x,), (BITS,), named={"gradient": gradient}), 8)


def _kept(at: Place) -> Call:
    limits = at.sample.thresholds
    return Call("histogram.kept_histogram", (at.sample.before(at.n),), (limits, BITS), named={"gradient": None})


def values(at: Place) -> Job:
    """Return the values of buckets."""
    index = kernels.bucket_index(at.sample.before(at.n), 1)
    return at.compared(Call("histogram.bucket_value", (index,), (1, "float32")), 8)


def filled(counts: Any) -> str:
    """Describe how many buckets of a sketch are filled."""
    return f"{np.count_nonzero(counts):,} of {counts.size:,} buckets"


def merged(at: Place) -> Job:
    """Merge the sketches of two parts."""
    x, total = at.sample.before(at.n), sketch(at.sample.before(at.n))
    parts = [sketch(x[: at.n // 3]), sketch(x[at.n // 3 :])]
    note = f"two sketches, {filled(total.counts)}"
    return at.table(lambda: kernels.merge(*parts), lambda: total, note, says="two parts = the whole")


def quantiles(at: Place) -> Job:
    """Read a quantile from a sketch, and five for the check."""
    x, found = at.sample.before(at.n), sketch(at.sample.before(at.n))

    def check() -> str:
        for q in (0.0, 0.01, 0.5, 0.999, 1.0):
            exact, value = float(np.quantile(x, q, method="lower")), kernels.quantile(found, q)
            require(abs(value - exact) <= 2.0 ** -(BITS + 1) * abs(exact), f"quantile {q} is {value}, in truth {exact}")
        return "five quantiles within their bound"

    note = f"{filled(found.counts)}; data {at.sample.origin}"
    return Job(lambda: kernels.quantile(found, 0.999), check, 1.0, (), note)


# --------------------------------------------------------------------------------------------- models of many tensors


def row(name: str) -> str:
    """Row name of a kernel on many tensors."""
    return f"{TENSORS} tensors: {name}"


def many(at: Place, name: str, together: Callable[[list[Any]], Any], single: Callable[[Any], Any]) -> Case:
    """Return a case of many tensors; its peers are the same kernel on one tensor, and a call for each of them.

    Args:
        at: where.
        name: of the kernel.
        together: counts all tensors in one call.
        single: counts one tensor.
    """
    step = min(SMALL, at.n // TENSORS)
    size = step * TENSORS

    def make() -> Job:
        (whole,) = at.arrays(at.sample.before(size))
        parts = [whole[i : i + step] for i in range(0, size, step)]

        def check() -> str:
            same("counts", kernels.merge(*together(parts)), single(whole))
            return "merged counts = counts of one tensor"

        one = Peer(ONE, lambda: lambda: single(whole), note="the same kernel, all elements in one tensor")
        each = Peer(EACH, lambda: lambda: [single(part) for part in parts], note=f"{TENSORS} calls of one tensor")
        note = f"one call with {TENSORS} tensors of {step:,} elements"
        return Job(lambda: together(parts), check, 4.0 * size, [one, each, at.device.copy(4 * size)], note)

    names = (ONE, EACH, at.device.floor)
    return Case(row(name), size, "GB/s", make, at.device.name, None, names, at.device.missing)
