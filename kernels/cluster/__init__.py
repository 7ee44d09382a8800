"""Cluster quantization of optimizer states: up to 16 clusters, 8 bits per element in each.

The clusters are separated by normal quantiles.

Operations on elements are in float32, each rounded once to nearest even, in the order written, without fused
multiply-add. Mean and deviation are in float64, summed in one fixed tree. Input of another width is first rounded to
float32.

Source: BitSnap, section 3.4 and algorithm 2; the 8-bit map is the unsigned dynamic map of Dettmers et al. 2022 (8-bit
Optimizers via Block-wise Quantization, section 1.3 and its appendix on unsigned inputs).
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ..backend.arguments import array, integer, same_device
from ..backend.arrays import Array
from ..backend.dispatch import Dispatch
from ..backend.floats import FORMATS
from ..errors import BadArgumentError, CorruptDataError


class BackEnd(Protocol):
    """Functions that every back end of this subject has."""

    def cluster_quantize(self, x: Array, clusters: int = 16) -> Clusters: ...
    def cluster_dequantize(self, codes: Array, labels: Array, scale: Array, minimum: Array) -> Array: ...


back_end = Dispatch[BackEnd]("cluster")

if TYPE_CHECKING:
    from . import cpu, gpu, reference

    _EVERYWHERE: tuple[BackEnd, ...] = (reference, cpu, gpu)

SUM_BLOCK = 1024
"""Length of the blocks in which the sums behind mean and deviation are taken."""

MOST = 16
"""Most clusters: a label fits 4 bits."""

SHIFT = 16
"""`first_code` is indexed by the pattern of a float32 in [0, 1], shifted right by this many bits."""


class Clusters(NamedTuple):
    """A quantized array: codes and labels uint8 [n]; scale and minimum float32 [m] per cluster."""

    codes: Array
    labels: Array
    scale: Array
    minimum: Array


def cluster_quantize(x: Array, clusters: int = 16) -> Clusters:
    """Quantize each element to 8 bits within the value range of its cluster.

    The code is the element's position in that range on the 8-bit dynamic map.

    The sums S1 of x and S2 of x * x (exact in float64) run over blocks of 1024 in C order, zeros filled in at the end:
    in a block s, `s[i] + s[i + 512]` for i < 512, then `s[i] + s[i + 256]` for i < 256, and so on down to one number.
    The block sums are summed by the same rule until one is left. Then, in float64,

        mean = S1 / n,   deviation = sqrt(max(S2 / n - mean * mean, 0))
        t_k = float32(mean + deviation * z_k),   z = `normal_quantiles(clusters)`
        label = number of k with t_k <= x
        b = minimum, S = maximum - minimum over the elements of a label (0 and 0 for an empty one; zeros count as +0.0)
        code = the entry of `dynamic_map()` nearest to (x - b) / S, the lower one if halfway; 0 where S is 0

    Args:
        x: array of any shape, float16, bfloat16, float32 or float64; finite.
        clusters: 1 to 16, so that a label fits 4 bits (`bitpack` packs them).

    Returns:
        Clusters(codes uint8 [n], labels uint8 [n], scale float32 [clusters], minimum float32 [clusters]), C order.

    Raises:
        BadArgumentError: an argument out of these ranges, x holds a NaN or an infinity (a float64 beyond the range of
            float32 counts), or maximum - minimum of a cluster overflows float32.

    Example:
        >>> import numpy as np
        >>> q = cluster_quantize(np.array([0.0, 1.0, 5.0, 6.0]), 2)
        >>> q.labels.tolist(), q.scale.tolist(), q.minimum.tolist(), q.codes.tolist()
        ([0, 0, 1, 1], [1.0, 1.0], [0.0, 5.0], [0, 255, 0, 255])
    """
    array("x", x, FORMATS)
    clusters = integer("clusters", clusters, 1, MOST)
    return back_end(x).cluster_quantize(x, clusters)


def cluster_dequantize(codes: Array, labels: Array, scale: Array, minimum: Array) -> Array:
    """Values of cluster codes: `map[code] * scale[label] + minimum[label]` in float32.

    Two roundings.

    Args:
        codes: uint8 [n].
        labels: uint8 [n], each below m.
        scale: float32 [m], m = 1 to 16.
        minimum: float32 [m].

    Returns:
        float32 [n].

    Raises:
        BadArgumentError: dtypes or devices are not these.
        CorruptDataError: lengths differ, m is out of range, or a label is m or above.

    Example:
        >>> import numpy as np
        >>> cluster_dequantize(*cluster_quantize(np.array([0.0, 1.0, 5.0, 6.0]), 2)).tolist()
        [0.0, 1.0, 5.0, 6.0]
    """
    array("codes", codes, ("uint8",), 1)
    same_device("codes", codes, "labels", array("labels", labels, ("uint8",), 1))
    same_device("codes", codes, "scale", array("scale", scale, ("float32",), 1))
    same_device("codes", codes, "minimum", array("minimum", minimum, ("float32",), 1))
    if codes.shape[0] != labels.shape[0]:
        raise CorruptDataError(f"there are {codes.shape[0]} codes and {labels.shape[0]} labels; they must be as many")
    if scale.shape[0] != minimum.shape[0] or not 1 <= scale.shape[0] <= MOST:
        raise CorruptDataError(
            f"scale has {scale.shape[0]} and minimum {minimum.shape[0]} entries; one per cluster, 1 to 16, is needed"
        )
    return back_end(codes).cluster_dequantize(codes, labels, scale, minimum)


def normal_quantiles(clusters: int) -> tuple[float, ...]:
    """Quantiles that split the standard normal distribution into equally likely parts.

    z_k has a share k / clusters below it, k = 1 ... clusters - 1, to nine decimals.

    Nine decimals, because the last bits of the inverse differ between mathematical libraries.

    Args:
        clusters: 1 to 16.

    Raises:
        BadArgumentError: `clusters` is out of range.

    Example:
        >>> normal_quantiles(4)
        (-0.67448975, 0.0, 0.67448975)
    """
    return _quantiles(integer("clusters", clusters, 1, MOST))


@cache
def _quantiles(clusters: int) -> tuple[float, ...]:
    return tuple(round(NormalDist().inv_cdf(k / clusters), 9) + 0.0 for k in range(1, clusters))


def boundaries(total: float, squares: float, n: int, clusters: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Boundaries t_k between clusters from the sums S1 and S2 of n elements.

    float32 [clusters - 1], ascending.

    Raises:
        BadArgumentError: a sum is not finite, so the array is not.

    Example:
        >>> boundaries(12.0, 62.0, 4, 2).tolist()
        [3.0]
    """
    if not (math.isfinite(total) and math.isfinite(squares)):
        raise BadArgumentError("x holds a NaN or an infinity (as float32); only finite numbers have clusters")
    mean = total / max(n, 1)
    square = mean * mean
    deviation = math.sqrt(max(squares / max(n, 1) - square, 0.0))
    quantiles = np.array(normal_quantiles(clusters), np.float64)
    with np.errstate(all="ignore"):  # beyond the largest float32 is infinity: no element is there
        return (mean + deviation * quantiles).astype(np.float32)


def ranges(
    lowest: np.ndarray[tuple[int], np.dtype[np.float32]], highest: np.ndarray[tuple[int], np.dtype[np.float32]]
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float32]], np.ndarray[tuple[int], np.dtype[np.float32]]]:
    """Scale and minimum of each cluster from its extremes.

    An empty cluster has lowest = inf and highest = -inf.

    Raises:
        BadArgumentError: the width of a cluster overflows float32.
    """
    empty = lowest > highest
    low = np.where(empty, np.float32(0), lowest) + np.float32(0)
    with np.errstate(all="ignore"):
        scale = np.where(empty, np.float32(0), highest) + np.float32(0) - low
    if not np.isfinite(scale).all():
        raise BadArgumentError("x spans more than float32 can hold within one cluster; scale it down")
    return scale, low


@cache
def dynamic_map() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The unsigned 8-bit dynamic map: 256 ascending values in [0, 1], finer near 0.

    float32 [256].

    There are seven decades. Decade e = 0 ... 6 reaches from 10**(e - 7) to 10**(e - 6) and is cut into 2**(e + 1) equal
    parts. The entries are the midpoints of these 254 parts, and 0 and 1, each rounded once to float32. The map is
    unsigned, because a value normalized to its cluster's range is never negative.

    Example:
        >>> m = dynamic_map()
        >>> m[:3].tolist() == [0.0, float(np.float32(3.25e-7)), float(np.float32(7.75e-7))], m[-2:].tolist()
        (True, [0.9964843988418579, 1.0])
    """
    entries = [Fraction(0), Fraction(1)]
    for e in range(7):
        parts = 2 ** (e + 1)
        top = Fraction(10**e, 10**6)
        entries += [top * (Fraction(1, 10) + Fraction(9 * (2 * k + 1), 20 * parts)) for k in range(parts)]
    out = np.array([_float32(v) for v in sorted(entries)], np.float32)
    out.setflags(write=False)
    return out


@cache
def thresholds() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Limits between the entries of the dynamic map, for finding the nearest entry.

    `code = number of j with v > thresholds[j]` is the entry nearest to a float32 v; float32 [256], the last is inf.

    Entry j is the midpoint of map entries j and j + 1, rounded down to float32. A float32 v exceeds the rounded
    midpoint exactly if it exceeds the midpoint.
    """
    entries = dynamic_map().astype(np.float64)
    middle = (entries[:-1] + entries[1:]) / 2  # exact: neighbours have few bits and near exponents
    down = middle.astype(np.float32)
    down = np.where(down > middle, np.nextafter(down, np.float32(0)), down)
    out = np.append(down, np.float32(np.inf)).astype(np.float32)
    out.setflags(write=False)
    return out


@cache
def first_code() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Lowest code of the float32 values in [0, 1] that share their upper 16 bits.

    uint8 [16257].

    Such a group holds at most one threshold. With c = first_code[pattern(v) >> 16], the code of v is therefore
    `c + (v > thresholds[c])`.
    """
    starts = np.arange((0x3F800000 >> SHIFT) + 1, dtype=np.uint32) << np.uint32(SHIFT)
    out = np.searchsorted(thresholds(), starts.view(np.float32), side="left").astype(np.uint8)
    out.setflags(write=False)
    return out


def unknown_label(label: int, clusters: int) -> CorruptDataError:
    """Return the error for a label without a cluster."""
    return CorruptDataError(f"label {label} is out of range for {clusters} clusters")


def _float32(v: Fraction) -> float:
    """v rounded once to float32: the nearest of three neighbours, by exact comparison."""
    near = np.float32(float(v))
    candidates = (np.nextafter(near, np.float32(-1)), near, np.nextafter(near, np.float32(2)))
    return float(min(candidates, key=lambda c: abs(Fraction(float(c)) - v)))
