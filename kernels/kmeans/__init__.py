"""Codebooks by weighted one-dimensional k-means: exact, or k-means++ with Lloyd's iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..backend.arguments import array, check_ends, check_table, choice, integer, number, same_device, sequence, shown
from ..backend.arrays import Array, on_gpu, to_numpy
from ..backend.dispatch import Dispatch, OnHost
from ..errors import BadArgumentError


class BackEnd(Protocol):
    """Functions that every back end of this subject has."""

    def weighted_kmeans_many(
        self,
        problems: Sequence[tuple[Array, Array]],
        k: Sequence[int],
        method: str,
        initial: Sequence[Array | None],
        seed: int,
        iterations: int,
    ) -> list[Array]: ...
    def quantization_loss(self, centers: Array, weights: Array, codebook: Array) -> float: ...


class HostBackEnd(Protocol):
    """Functions that only the back ends on the host have."""

    def least_losses(self, centers: Vector, weights: Vector, ends: Any, k: int) -> Vector: ...


back_end = Dispatch[BackEnd]("kmeans")
on_host = OnHost[HostBackEnd]("kmeans")

if TYPE_CHECKING:
    from . import cpu, gpu, reference

    _EVERYWHERE: tuple[BackEnd, ...] = (reference, cpu, gpu)
    _ON_HOST: tuple[HostBackEnd, ...] = (reference, cpu)

Vector = np.ndarray[Any, np.dtype[np.float64]]
Ends = np.ndarray[Any, np.dtype[np.int64]]

METHODS = ("exact", "kmeans++")
DTYPES = ("float16", "float32", "float64", *(f"{kind}{width}" for kind in ("int", "uint") for width in (8, 16, 32, 64)))
"""Dtypes of centers and weights; everything is computed in float64."""


@np.errstate(all="ignore")
def bucket_weights(counts: Array, values: Array, sigma: float = 0.2) -> Vector:
    """Weight of each histogram bucket, by its count and by its magnitude.

    `sigma * count / sum(counts) + (1 - sigma) * |value| / sum(|values|)`.

    The sums run over the non-empty buckets; an empty one weighs 0. Each sum is correctly rounded and so independent of
    the order. Where every non-empty bucket has value 0, or only one bucket is filled, sigma is taken as 1.

    Args:
        counts: integer [m], >= 0, such as `histogram.counts[:-1]`, on the host.
        values: float [m], such as `histogram.values()`, on the host.
        sigma: share of the frequency, 0 ... 1; default 0.2. At 1 the result is plain k-means on the data.

    Returns:
        float64 [m] NumPy, >= 0, sum 1 (or 0 when nothing was counted).

    Raises:
        BadArgumentError: sigma out of range, shapes differ, a count is negative or a used value not finite.

    Example:
        >>> import numpy as np
        >>> bucket_weights(np.array([3, 0, 1]), np.array([-1.0, 0.0, 1.0]), sigma=0.5).tolist()
        [0.625, 0.0, 0.375]

    Source: Inshrinkerator, section 4.4 (frequency and magnitude, each normalized to sum to one).
    """
    sigma = number("sigma", sigma, 0, 1)
    array("counts", counts, DTYPES, host=True)
    array("values", values, DTYPES, host=True)
    count, value = to_numpy(counts), to_numpy(values).astype(np.float64)
    if count.ndim != 1 or count.shape != value.shape:
        raise BadArgumentError(f"counts {count.shape} and values {value.shape} must be 1-D and of one length")
    used = np.flatnonzero(count)
    often, magnitude = count[used].astype(np.float64), np.abs(value[used])
    if (often < 0).any() or not np.isfinite(magnitude).all():
        raise BadArgumentError("counts must be >= 0 and the values of non-empty buckets finite")
    weights = np.zeros(count.size)
    if used.size == 0:
        return weights
    share, whole = 1.0, 0.0
    if sigma < 1.0 and used.size > 1:
        magnitude = np.ldexp(magnitude, -int(np.frexp(magnitude.max())[1]))  # so that a sum of huge ones stays finite
        whole = math.fsum(magnitude)
        share = sigma if whole > 0.0 else 1.0
    weights[used] = share * (often / float(int(count.sum())))  # integers: exact, then rounded once
    if share < 1.0:
        weights[used] += (1.0 - share) * (magnitude / whole)
    return weights


def prepare(centers: Array, weights: Array) -> tuple[Vector, Vector, int]:
    """Scale a k-means problem to strictly ascending centers with positive weights.

    Every back end solves the problem in this form; the scales are powers of two.

    Centers of weight 0 are dropped. The others are multiplied by `2**-exponent`, so that the largest magnitude is in
    [0.5, 1), and the weights by another power of two, so that no square overflows. Both products are exact except for
    underflow. Then equal centers are merged and their weights added in order.

    Args:
        centers: float64 [n], ascending, finite, on the host.
        weights: float64 [n], finite, >= 0, on the host.

    Returns:
        centers float64 [m] scaled, weights float64 [m] scaled, exponent. NumPy, host.

    Raises:
        BadArgumentError: an argument out of its range, or on a GPU.

    Example:
        >>> import numpy as np
        >>> prepare(np.array([-2.0, 1.0, 1.0, 6.0]), np.array([2.0, 1.0, 3.0, 0.0]))
        (array([-0.5 ,  0.25]), array([0.5, 1. ]), 2)
    """
    _check(centers, weights)
    array("centers", centers, DTYPES, host=True)
    return prepared(centers, weights)


@np.errstate(all="ignore")
def prepared(centers: Array, weights: Array) -> tuple[Vector, Vector, int]:
    """Scale a k-means problem whose arguments were checked; see `prepare`."""
    x, w = to_numpy(centers).astype(np.float64), to_numpy(weights).astype(np.float64)
    x, w = x[w > 0.0], w[w > 0.0]
    if x.size == 0:
        return x, w, 0
    exponent = int(np.frexp(np.abs(x).max())[1])
    x, w = np.ldexp(x, -exponent), np.ldexp(w, -int(np.frexp(w.max())[1]))
    x, w = x[w > 0.0], w[w > 0.0]  # some weight may have underflowed
    first = np.concatenate([np.ones(1, dtype=bool), x[1:] != x[:-1]])
    if not first.all():
        merged = np.zeros(int(first.sum()))
        np.add.at(merged, np.cumsum(first) - 1, w)
        x, w = x[first], merged
    return x, w, exponent


def _check(centers: Array, weights: Array) -> None:
    array("centers", centers, DTYPES)
    array("weights", weights, DTYPES)
    same_device("centers", centers, "weights", weights)
    x, w = (None, None) if on_gpu(centers) else (to_numpy(centers), to_numpy(weights))
    if len(centers.shape) != 1 or tuple(centers.shape) != tuple(weights.shape):
        raise BadArgumentError(
            f"centers {tuple(centers.shape)} and weights {tuple(weights.shape)} must be 1-D and of one length"
        )
    if x is None or w is None:
        return  # the GPU's problems come from this module's own functions; a check would wait for the device
    if not np.isfinite(x).all() or (x[1:] < x[:-1]).any():
        raise BadArgumentError("centers are not finite and ascending")
    if not (np.isfinite(w).all() and (w >= 0.0).all()):
        raise BadArgumentError("weights are not all finite and >= 0")


def _checked_options(method: str, seed: int, iterations: int) -> tuple[int, int]:
    choice("method", method, METHODS)
    return integer("seed", seed, -math.inf, math.inf), integer("iterations", iterations, 0, 2**31 - 1)


def _checked_k(k: int, initial: Array | None) -> int:
    k = integer("k", k, 1, 65536)
    if initial is None:
        return k
    if not 1 <= array("initial", initial, DTYPES, 1).shape[0] <= k:
        raise BadArgumentError(f"initial has shape {tuple(initial.shape)}; 1 ... k = {k} codes are needed")
    if not on_gpu(initial):
        codes = to_numpy(initial)
        if not np.isfinite(codes).all() or (codes[1:] < codes[:-1]).any():
            raise BadArgumentError("initial is not finite and ascending")
    return k


def _pair(problem: Any) -> tuple[Array, Array]:
    if not isinstance(problem, tuple | list) or len(problem) != 2:
        raise BadArgumentError(f"a problem is {shown(problem)}; a pair of centers and weights is needed")
    return problem[0], problem[1]


def weighted_kmeans(
    centers: Array,
    weights: Array,
    k: int,
    method: str = "exact",
    *,
    initial: Array | None = None,
    seed: int = 0,
    iterations: int = 50,
) -> Array:
    """Best codebook of at most k codes for weighted points on the line.

    It minimizes `sum(w * (x - nearest code)**2)`.

    `method="exact"` finds the optimum by dynamic programming over prefix sums (divide and conquer, O(k m log m)).
    `"kmeans++"` draws seeds with probability `w * distance**2` by a counter-based generator, then runs Lloyd's
    iteration. With `initial`, only Lloyd's iteration runs and starts there. `reference.py` defines the order of
    operations, ties and rounding, which all back ends share.

    Args:
        centers: float64 [m], ascending, finite.
        weights: float64 [m], finite, >= 0.
        k: most codes, 1 ... 65536.
        method: "exact" (default) or "kmeans++".
        initial: float64 [1 ... k], ascending: warm start; the result has its length (a code without points stays).
        seed: of the k-means++ seeding, any integer (modulo 2**64); default 0.
        iterations: maximum number of Lloyd iterations, 0 ... 2**31 - 1; default 50. They stop when nothing changes.

    Returns:
        float64, ascending, library and device of `centers`; `min(k, distinct centers of positive weight)` codes. (JAX
        without `jax_enable_x64` has no float64: there each code is rounded to float32.)

    Raises:
        BadArgumentError: an argument out of its range (contents are checked on the host only).

    Example:
        >>> import numpy as np
        >>> weighted_kmeans(np.array([0.0, 1.0, 10.0]), np.array([1.0, 3.0, 1.0]), 2).tolist()
        [0.75, 10.0]

    Source: Inshrinkerator, section 4.4 (weighted k-means on the sketch); exact: Grønlund et al. 2017, arXiv 1701.07204.
    """
    _check(centers, weights)
    k, (seed, iterations) = _checked_k(k, initial), _checked_options(method, seed, iterations)
    problem = [(centers, weights)], [k], method, [initial], seed, iterations
    return back_end(centers).weighted_kmeans_many(*problem)[0]


def least_losses(centers: Vector, weights: Vector, ends: Ends, k: int) -> Vector:
    """Return the loss of the best k codes for each of several sets of weighted points.

    Codebooks are not made.

    A codebook that minimizes `sum(w * (x - nearest code)**2) + price * codes` costs one pass over the points, for a
    price of a code. The price is moved until the number of codes is within a sixteenth of k, or six times. The loss of
    k codes follows from that of the nearest number of codes found, by a power law of the price's slope. All back ends
    share the order of operations. On drawn data the loss of 64 codes was within 0.2 % in half of the cases and within
    3 % in all; of 16 codes mostly within 2 %; for fewer codes it is not reliable.

    Args:
        centers: float64 [n] NumPy, of one set after another, in each ascending; finite.
        weights: float64 [n] NumPy, > 0, finite.
        ends: int64 [m] NumPy, ascending: where each set ends; the last is n.
        k: codes, 1 ... 65536.

    Returns:
        float64 [m]; 0 for a set of at most k points.

    Raises:
        BadArgumentError: an argument out of its range.

    Example:
        >>> import numpy as np
        >>> least_losses(np.array([0.0, 1.0, 10.0]), np.ones(3), np.array([3]), 2).tolist()
        [0.5]

    Source: Galil and Park 1992, section 3 (a queue of candidates); Aggarwal, Schieber and Tokuyama 1994 (the price).
    """
    n = int(array("centers", centers, ("float64",), 1, host=True).shape[0])
    for name, table in (("centers", centers), ("weights", weights)):
        check_table(name, table, "float64", (n,))
    check_ends("ends", ends, n)
    return on_host().least_losses(centers, weights, ends, integer("k", k, 1, 65536))


def weighted_kmeans_many(
    problems: Sequence[tuple[Array, Array]],
    k: int | Sequence[int],
    method: str = "exact",
    *,
    initial: Sequence[Array | None] | None = None,
    seed: int = 0,
    iterations: int = 50,
) -> list[Array]:
    """Return the `weighted_kmeans` codebook of each of many problems, in one call.

    A GPU solves all problems in one launch, the CPU one after another.

    Args:
        problems: (centers, weights) each, all on one device.
        k: maximum number of codes, for all problems or one number per problem.
        method, seed, iterations: as in `weighted_kmeans`, the same for all problems.
        initial: for each problem a warm start or None; default None, no warm starts.

    Returns:
        One codebook per problem, equal to that of `weighted_kmeans`.

    Raises:
        BadArgumentError: as `weighted_kmeans`, or `k` or `initial` is of another length than `problems`.

    Example:
        >>> import numpy as np
        >>> x, w = np.array([0.0, 1.0, 10.0]), np.ones(3)
        >>> [c.tolist() for c in weighted_kmeans_many([(x, w), (x[1:], w[1:])], [2, 1])]
        [[0.5, 10.0], [5.5]]
    """
    problems = [_pair(p) for p in sequence("problems", problems)]
    ks = sequence("k", k) if hasattr(k, "__len__") else [k] * len(problems)
    starts = [None] * len(problems) if initial is None else sequence("initial", initial)
    if len(ks) != len(problems) or len(starts) != len(problems):
        raise BadArgumentError(f"{len(problems)} problems, but {len(ks)} values of k and {len(starts)} of initial")
    for centers, weights in problems:
        _check(centers, weights)
        same_device("the first centers", problems[0][0], "centers", centers)
    ks = [_checked_k(one, start) for one, start in zip(ks, starts, strict=True)]
    seed, iterations = _checked_options(method, seed, iterations)
    if not problems:
        return []
    return back_end(problems[0][0]).weighted_kmeans_many(problems, ks, method, starts, seed, iterations)


def quantization_loss(centers: Array, weights: Array, codebook: Array) -> float:
    """Weighted squared error of quantizing centers with a codebook.

    `sum(w * (x - nearest code)**2)`, added in ascending order of the centers; a center half-way takes the lower code.

    Args:
        centers: float64 [m], ascending, finite.
        weights: float64 [m], finite, >= 0.
        codebook: float64 [1 or more], ascending, finite.

    Raises:
        BadArgumentError: shapes do not fit, or the codebook is empty while a weight is positive.

    Example:
        >>> import numpy as np
        >>> quantization_loss(np.array([0.0, 1.0, 10.0]), np.array([1.0, 3.0, 1.0]), np.array([0.75, 10.0]))
        0.75
    """
    _check(centers, weights)
    if array("codebook", codebook, DTYPES, 1).shape[0] == 0:
        raise BadArgumentError("codebook is empty; at least one code is needed")
    same_device("centers", centers, "codebook", codebook)
    return float(back_end(centers).quantization_loss(centers, weights, codebook))
