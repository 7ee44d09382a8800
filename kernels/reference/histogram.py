"""Oracle of the histograms: the bucket of every element, then a count of each bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import array_namespace

from ..arrays import Array
from ..floats import format_named
from ..gradient_products import product_format
from ..histogram import Histogram, target
from .logbucket import bucket_index
from .quantizer import kept, product

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..quantizer import Thresholds


def log_histogram(x: Array, bits: int, *, signed: bool = False, gradient: Array | None = None) -> Histogram:
    """See `shrinkpoint.kernels.histogram.log_histogram`."""
    fmt, bits = target(x, gradient, bits)
    values = x if gradient is None else product(x, gradient, product_format(x, gradient))
    histogram = _count(values, fmt.name, bits)
    return histogram if signed else histogram.magnitude()


def log_histogram_many(
    xs: Sequence[Array], bits: int, *, signed: bool = False, gradients: Sequence[Array | None]
) -> list[Histogram]:
    """See `shrinkpoint.kernels.histogram.log_histogram_many`."""
    return [log_histogram(x, bits, signed=signed, gradient=g) for x, g in zip(xs, gradients, strict=True)]


def kept_histogram(x: Array, thresholds: Thresholds, bits: int, *, gradient: Array | None = None) -> Histogram:
    """See `shrinkpoint.kernels.histogram.kept_histogram`."""
    xp = array_namespace(x)
    fmt, bits = target(x, None, bits)
    histogram = _count(xp.where(kept(x, thresholds, gradient), x, xp.asarray(xp.nan, dtype=x.dtype)), fmt.name, bits)
    histogram.counts[-1] = 0
    return histogram


def kept_histogram_many(
    xs: Sequence[Array], thresholds: Sequence[Thresholds], bits: int, *, gradients: Sequence[Array | None]
) -> list[Histogram]:
    """See `shrinkpoint.kernels.histogram.kept_histogram_many`."""
    each = zip(xs, thresholds, gradients, strict=True)
    return [kept_histogram(x, limits, bits, gradient=g) for x, limits, g in each]


def _count(values: Array, name: str, bits: int) -> Histogram:
    xp = array_namespace(values)
    counts = np.zeros(2 * format_named(name).buckets(bits) + 2, dtype=np.int64)
    present, number = xp.unique_counts(bucket_index(values, bits))
    for i in range(present.shape[0]):
        counts[int(present[i])] = int(number[i])
    return Histogram(counts, bits, name, signed=True)


def used_buckets_many(x: Array, ends: Any, bits: int) -> tuple[Any, Any, Any]:
    """See `shrinkpoint.kernels.histogram.used_buckets_many`."""
    parts = zip((0, *ends.tolist()), ends.tolist(), strict=False)
    counts = [log_histogram(x[a:b], bits, signed=True).counts for a, b in parts]
    used = [np.flatnonzero(c) for c in counts]
    nothing = [np.empty(0, np.int64)]
    return (
        np.concatenate(nothing + used).astype(np.int32),
        np.concatenate(nothing + [c[u] for c, u in zip(counts, used, strict=True)]),
        np.cumsum([u.size for u in used], dtype=np.int64),
    )
