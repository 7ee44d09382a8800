"""Choice of the greedy search's parameters on a small sample of rows.

Source: Check-N-Run, section 5.2 ("Parameter selection").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...kernels.rows import row_dequantize, row_quantize
from ..state.leaves import NpArray

SHARE = 1e-5
LEAST_ROWS = 256
BINS = tuple(range(5, 65, 5))
RATIOS = tuple(round(0.1 * k, 1) for k in range(1, 11))
_BINS_SLACK, _RATIO_SLACK = 0.008, 0.002
"""Where the gain tapers off: the first candidate within this share of the plain quantizer's error of the best one. With
it, rows of 64 normal numbers get 15 bins at 2 bits, 25 to 30 at 3 and 40 at 4; the paper found 25, 25 and 45."""
_LARGEST = np.float32(1e30)
DEFAULT_BINS = {2: 25, 3: 25, 4: 45}


def sample_sizes(rows: Sequence[int]) -> list[int]:
    """Return the number of rows to sample per table: `SHARE` of all rows, or `LEAST_ROWS`."""
    total = sum(rows)
    wanted = max(LEAST_ROWS, SHARE * total)
    return [min(n, int(np.ceil(wanted * n / total))) for n in rows]


def evenly(rows: int, count: int) -> NpArray:
    """Return `count` evenly spaced row numbers below `rows`."""
    return (2 * np.arange(count, dtype=np.int64) + 1) * rows // (2 * count) if count else np.empty(0, np.int64)


def search_parameters(
    samples: Sequence[NpArray], bits: int, num_bins: int | None = None, ratio: float | None = None
) -> tuple[int, float]:
    """Choose num_bins and ratio of the adaptive quantizer, if None, by mean L2 error on samples.

    First num_bins at ratio 1, then ratio at that num_bins; each the smallest candidate whose error is within a small
    share of what the best one reaches.

    Args:
        samples: float32 [R, D] each, of any D; rows that are not finite (or near it) do not count.
        bits: 2, 3 or 4.
        num_bins: as given, or None.
        ratio: as given, or None.

    Example:
        >>> search_parameters([], 4)
        (45, 1.0)
        >>> search_parameters([np.random.default_rng(0).normal(size=(256, 64)).astype("f4")], 4, num_bins=45)[1] < 0.5
        True

    Source: Check-N-Run, section 5.2.
    """
    finite = [x[(np.abs(x) < _LARGEST).all(axis=1)] for x in samples if x.size]
    finite = [x for x in finite if x.size]
    if not finite:
        return num_bins or DEFAULT_BINS[bits], 1.0 if ratio is None else ratio
    plain = mean_error(finite, bits, 0, 0.0)
    if num_bins is None:
        num_bins = int(_first(BINS, lambda n: mean_error(finite, bits, int(n), 1.0), _BINS_SLACK * plain))
    if ratio is None:
        ratio = _first(RATIOS, lambda r: mean_error(finite, bits, num_bins, r), _RATIO_SLACK * plain)
    return num_bins, ratio


def _first(candidates: Sequence[float], error: Callable[[float], float], slack: float) -> float:
    errors = [error(c) for c in candidates]
    return next(c for c, e in zip(candidates, errors, strict=True) if e <= min(errors) + slack)


def mean_error(samples: Sequence[NpArray], bits: int, num_bins: int, ratio: float) -> float:
    """Return the mean L2 error of the rows; num_bins = 0 means the asymmetric quantizer."""
    total, count = 0.0, 0
    for x in samples:
        if num_bins:
            codes, scale, minimum = row_quantize(x, bits, "adaptive", num_bins=num_bins, ratio=ratio)
        else:
            codes, scale, minimum = row_quantize(x, bits, "asymmetric")
        miss = row_dequantize(codes, scale, minimum).astype(np.float64) - x
        total += float(np.sqrt((miss * miss).sum(axis=1)).sum())
        count += x.shape[0]
    return total / count
