"""Finer sketches, for narrow distributions far from zero and for very many bins.

Log buckets are as wide as values are large. Of weights at 1 +- 0.001 a sketch to 1 % sees two or three values, and a
codebook fitted to it flattens them. Their distances from their own middle are sketched instead, in one more pass over
the array, which ordinary weights do not need.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ...kernels.backend.arrays import on_gpu
from ...kernels.backend.floats import FORMATS
from ...kernels.histogram import Histogram, log_histogram, merge
from ...kernels.quantizer import Thresholds, assign
from ..base import CHUNK, Leaf
from ..parallel import map_chunks
from ..state.casting import unit
from ..state.leaves import Array, LeafSpec, NpArray, as_bytes, from_bytes, on_host
from .codebook import Cells, Fit, Floats, fit, too_coarse
from .levels import rounded_codebook, widened

_ROUNDS = 4
_FINEST = 8
"""Bits of the finest sketch of distances: 1 MiB of counters for float32, to 2**-9 of each distance."""


def middle(cells: Cells) -> float:
    """Return the mean of the counted elements, or 0 if they are not concentrated around it."""
    scale = unit(float(np.abs(cells.values).max()))
    weights, local, offset = cells.counts / cells.counts.sum(), cells.local * scale, cells.offset * scale
    mean = float((weights * local).sum())
    about_zero = float((weights * np.abs(local + offset)).sum())
    spread = float((weights * np.abs(local - mean)).sum())
    return (offset + mean) / scale if spread < 0.25 * about_zero else 0.0


def fit_closely(
    leaf: Leaf,
    thresholds: Thresholds,
    cells: Cells,
    how: Fit,
    parent: Floats | None,
    looked: int = 0,
    codes: Floats | None = None,
    few: Floats | None = None,
) -> tuple[Floats, str, Cells, int]:
    """Fit a codebook to a fine enough sketch; return codebook, reason, sketch and refinements.

    The published k-means++ has the published sketch.

    Args:
        leaf: the array.
        thresholds: which of its elements are neither pruned nor protected.
        cells: a sketch of these.
        how: as for `fit`.
        parent: as for `fit`.
        looked: how many times `cells` were refined already.
        codes: as for `fit`, of these cells.
        few: all distinct values of the array if they are few, so that each gets an entry; else None.
    """
    codebook, reason = fit(cells, how, parent, codes)
    if few is not None:
        known = np.isin(few, codebook).all()
        return codebook if known else few, reason if known else "of all its values", cells, looked
    while how.solver != "kmeans++" and too_coarse(cells, codebook):
        closer = finer(leaf, thresholds, cells, looked)
        if closer is None:
            break
        cells, looked = closer, looked + 1
        codebook, reason = fit(cells, how, parent)
    return codebook, reason, cells, looked


def finer(leaf: Leaf, thresholds: Thresholds, cells: Cells, number: int) -> Cells | None:
    """Count the quantized elements in finer buckets; return None if that is impossible.

    Args:
        leaf: the array.
        thresholds: which of its elements are neither pruned nor protected.
        cells: a sketch of these.
        number: of the attempt, from 0; each looks closer.
    """
    fmt = FORMATS[leaf.spec.dtype]
    if number == _ROUNDS or cells.sharp:
        return None
    # An array of 16 bits has few values: buckets that are as fine hold one each.
    sharp = fmt.width == 16
    bits = fmt.mantissa if sharp else max(cells.bits, min(cells.bits + 2, _FINEST))
    offset = 0.0 if sharp else _rounded(middle(cells), leaf)
    if not math.isfinite(offset) or (not sharp and (bits, offset) == (cells.bits, cells.offset)):
        return None

    def one(start: int) -> Histogram:
        x = leaf.flat[start : start + CHUNK]
        gradient = None if leaf.gradient is None else leaf.gradient[start : start + CHUNK]
        # Below the codebook there are two levels, of elements without an entry.
        kept = x[assign(x, thresholds, np.zeros(1), gradient=gradient) >= 2]
        with np.errstate(over="ignore"):
            return log_histogram(kept - offset if offset else kept, bits, signed=True)

    counted = merge(*map_chunks(one, range(0, leaf.spec.size, CHUNK)))
    # The kept are finite; a distance that is not is beyond the format's range.
    return None if counted.counts[-1] else Cells.of(counted, offset, sharp=sharp)


def _rounded(offset: float, leaf: Leaf) -> float:
    """Round to the array's format, so that differences of nearby values are exact."""
    wide = np.float64 if leaf.spec.dtype == "float64" else np.float32
    with np.errstate(over="ignore"):
        return float(wide(offset))


def held_codebook(codebook: NpArray, cells: Cells, how: Fit, spec: LeafSpec) -> NpArray:
    """Round the codebook to the array's dtype; use the best one if a uniform one loses too much.

    If equidistant entries are only a little farther apart than the values of a 16-bit array, some fall on a value, and
    others between two values.
    """
    held = rounded_codebook(codebook, spec)
    if not cells.sharp or how.solver != "uniform":
        return held
    best = rounded_codebook(fit(cells, dataclasses.replace(how, solver="exact"), None)[0], spec)
    return best if cells.loss(held) > how.trigger * cells.loss(best) else held


def few_values(leaf: Leaf, cells: Cells, most: int) -> NpArray | None:
    """Return all distinct finite values, ascending, if at most `most`: each becomes an entry."""
    if not 0 < cells.counts.size <= most:
        return None
    values = np.empty(0)
    for start in range(0, leaf.spec.size, CHUNK):
        part = _patterns(leaf.flat[start : start + CHUNK], leaf.spec, most)
        values = np.union1d(values, part[np.isfinite(part)] + 0.0)
        if values.size > most:
            return None
    return values if values.size else None


def _patterns(x: Array, spec: LeafSpec, most: int) -> NpArray:
    """Return the values of the bit patterns in x, float64 on the host.

    From a GPU only finite values come, and no more than needed to decide whether they are at most `most`.
    """
    if on_gpu(x):
        import torch

        found = torch.unique(x.view(getattr(torch, f"int{8 * spec.itemsize}"))).view(x.dtype)
        return on_host(found[torch.isfinite(found)][: most + 2].double())  # two of them may be zeros
    # Integers are hashed, floats are sorted.
    return widened(from_bytes(np.unique(as_bytes(x).view(f"<u{spec.itemsize}")).view(np.uint8), spec))
