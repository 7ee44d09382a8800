"""Quantization of weights to levels (pruned, protected, or a codebook entry) and back.

Levels of codebooks with equidistant entries are computed for several joined arrays at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..backend.arguments import array, check_arrays, check_ends, check_field, check_table, instance, number, same_device
from ..backend.arrays import Array, dtype_name, is_torch, to_host
from ..backend.dispatch import Dispatch, OnHost
from ..backend.floats import FORMATS, FloatFormat, format_named
from ..errors import BadArgumentError
from ..planes import WIDTHS


class BackEnd(Protocol):
    """Functions that every back end of this subject has."""

    def assign(
        self, x: Array, thresholds: Thresholds, codebook: np.ndarray[Any, Any], *, gradient: Array | None = None
    ) -> Array: ...
    def dequantize(self, levels: Array, codebook: Array, *, protected: Array | None = None) -> Array: ...


class HostBackEnd(Protocol):
    """Functions that only the back ends on the host have."""

    def uniform_levels_many(
        self, x: Array, ends: Any, steps: Any, firsts: Any, sizes: Any, limit: float
    ) -> tuple[Array, np.ndarray[Any, np.dtype[np.float64]]]: ...
    def uniform_values_many(self, levels: Array, ends: Any, steps: Any, firsts: Any) -> Array: ...


back_end = Dispatch[BackEnd]("quantizer")
on_host = OnHost[HostBackEnd]("quantizer")

if TYPE_CHECKING:
    from . import cpu, gpu, reference

    _EVERYWHERE: tuple[BackEnd, ...] = (reference, cpu, gpu)
    _ON_HOST: tuple[HostBackEnd, ...] = (reference, cpu)


def product_format(x: Array, gradient: Array) -> str:
    """Format in which `gradient * x` is computed: float64 if either is float64, else float32."""
    return "float64" if "float64" in (dtype_name(x), dtype_name(gradient)) else "float32"


def check_gradient(x: Array, gradient: Array) -> None:
    """Raise BadArgumentError if the shape, dtype or device of a gradient does not fit x."""
    array("gradient", gradient, FORMATS, x.shape)
    same_device("gradient", gradient, "x", x)


PROTECTED = 1
FIRST_CODE = 2
MAX_CODES = 254
"""Most codebook entries: with the two special levels a level is one byte."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds that decide which elements are pruned and which are protected.

    Protection wins. Elements that are not finite are always protected.

    Args:
        protect_magnitude: |x| >= it is protected; default inf, which protects no finite x.
        protect_sensitivity: |gradient * x| >= it is protected; default inf. A product that is not finite (it
            overflowed, or the gradient is infinite or NaN) is always protected.
        prune_magnitude: |x| < it is pruned; default 0, which prunes nothing.
        prune_sensitivity: |gradient * x| < it is pruned; default 0. Either condition prunes.

    All four are float64 and compared exactly with x of any format: rounding a threshold *up* to x's format changes no
    decision. The sensitivities have no effect without a gradient.

    Raises:
        BadArgumentError: a threshold is negative or NaN.

    Source: Inshrinkerator, section 4.2.
    """

    protect_magnitude: float = math.inf
    protect_sensitivity: float = math.inf
    prune_magnitude: float = 0.0
    prune_sensitivity: float = 0.0

    def __post_init__(self) -> None:
        for name in ("protect_magnitude", "protect_sensitivity", "prune_magnitude", "prune_sensitivity"):
            check_field(self, name, number, 0, math.inf)


def magnitude_bits(threshold: float, fmt: FloatFormat) -> int:
    """Bit pattern of the smallest magnitude of the format that is >= threshold.

    Infinity's pattern if no finite magnitude is that large.

    `|x| >= threshold` is then `magnitude pattern of x >= magnitude_bits(threshold)`, NaN included as the largest.
    """
    threshold = number("threshold", threshold, 0, math.inf) + 0.0  # a negative zero becomes 0.0
    wide = np.dtype(np.float32 if instance("fmt", fmt, FloatFormat).name == "bfloat16" else fmt.name).type
    with np.errstate(all="ignore"):
        rounded = wide(threshold)
        if float(rounded) < threshold:
            rounded = np.nextafter(rounded, wide(np.inf))
    pattern = int(rounded.view(f"uint{8 * rounded.itemsize}"))
    return (pattern + 0xFFFF) >> 16 if fmt.name == "bfloat16" else pattern


def codebook_float64(codebook: Array) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a codebook of any library, dtype or device as float64 on the host, exactly."""
    check_arrays(codebook=codebook)
    if dtype_name(codebook) not in WIDTHS and getattr(codebook.dtype, "kind", None) not in tuple("biuf"):
        raise BadArgumentError(f"codebook has dtype {dtype_name(codebook)}; real numbers are needed")
    if is_torch(codebook):
        import torch

        codebook = codebook.detach().to(device="cpu", dtype=torch.float64)
    elif isinstance(codebook, np.ndarray):
        return codebook.astype(np.float64)
    host = to_host(codebook)
    if dtype_name(codebook) == "bfloat16":  # as bit patterns, the upper half of a float32
        host = (host.astype(np.uint32) << 16).view(np.float32)
    return host.astype(np.float64)


def _checked_codebook(codebook: Array) -> np.ndarray[Any, np.dtype[np.float64]]:
    codes = codebook_float64(codebook)
    if codes.ndim != 1 or codes.size > MAX_CODES:
        raise BadArgumentError(f"codebook has shape {codes.shape}; one dimension of 0 ... {MAX_CODES} is needed")
    if not np.isfinite(codes).all() or (codes[1:] < codes[:-1]).any():
        raise BadArgumentError("codebook is not finite and ascending")
    return codes


def boundaries(codebook: Array, dtype: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Smallest value of `dtype` above the midpoint of each pair of adjacent codes.

    For codes a <= b the midpoint is `0.5 * a + 0.5 * b`; the boundary lies strictly above it.

    The nearest code of a value x of that dtype is then number `count(boundary <= x)`. An element at the float64
    midpoint gets the lower code.

    Args:
        codebook: 1-D, ascending, finite, any library and dtype; 0 ... 254 entries.
        dtype: name of x's dtype, such as "float32".

    Returns:
        float64 [max(entries - 1, 0)], ascending, each exactly a value of dtype (inf where all of dtype is below).

    Raises:
        BadArgumentError: the codebook is too long, not ascending or not finite, or the dtype is not a float format.

    Example:
        >>> import numpy as np
        >>> boundaries(np.array([0.0, 1.0]), "bfloat16").tolist()
        [0.50390625]
    """
    fmt = format_named(dtype_name_of(dtype))
    codes = _checked_codebook(codebook)
    wide = np.dtype(np.float32 if fmt.name == "bfloat16" else fmt.name)
    with np.errstate(all="ignore"):
        middle = 0.5 * codes[:-1] + 0.5 * codes[1:]
        above = middle.astype(wide)
        # Compared with twice the midpoint, because float64 cannot hold half of its smallest unit.
        twice, total = 2.0 * above.astype(np.float64), codes[:-1] + codes[1:]
        short = np.where(np.isfinite(total), twice <= total, above.astype(np.float64) <= middle)
        above = np.where(short, np.nextafter(above, wide.type(np.inf)), above)
    if fmt.name == "bfloat16":  # up to the next multiple of 2**16 on the number line
        bits = above.astype(np.float32).view(np.uint32)
        up = np.where(bits >> 31 == 1, bits, bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
        above = up.astype(np.uint32).view(np.float32)
    return above.astype(np.float64) + 0.0  # no negative zero


def dtype_name_of(dtype: Any) -> str:
    """Name of a dtype given as a string, a NumPy dtype or scalar type, or a torch dtype."""
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, type):
        return dtype.__name__
    return str(dtype).rsplit(".", 1)[-1]


def assign(x: Array, thresholds: Thresholds, codebook: Array, *, gradient: Array | None = None) -> Array:
    """Level of each element: 0 pruned, 1 protected, else 2 + the index of the nearest code.

    `level = 1` if x is not finite or `|x| >= protect_magnitude` or `|g x| >= protect_sensitivity`; else 0 if
    `|x| < prune_magnitude` or `|g x| < prune_sensitivity`; else `2 + count(boundaries <= x)`, or 1 (protected) where
    the codebook is empty. `g x` is one rounded product, in float64 if either is float64, else in float32.

    Args:
        x: any shape, float16, bfloat16, float32 or float64.
        thresholds: see `Thresholds`.
        codebook: 1-D, ascending, finite, 0 ... 254 entries, of any library and float dtype. It should be rounded to
            x's dtype already, because distances are measured to the entries as given.
        gradient: same shape as x, any of the four dtypes; default None, no sensitivity.

    Returns:
        uint8, shape, library and device of x.

    Raises:
        BadArgumentError: another dtype, a bad codebook, or a gradient of another shape.

    Example:
        >>> import numpy as np
        >>> x = np.array([0.01, -0.9, 0.4, 0.6, 7.0], dtype=np.float32)
        >>> assign(x, Thresholds(protect_magnitude=4.0, prune_magnitude=0.1), np.array([-1.0, 0.0, 1.0])).tolist()
        [0, 2, 3, 4, 1]

    Source: Inshrinkerator, section 4 (prune, protect, quantize).
    """
    check_arrays(x=x)
    format_named(dtype_name(x))
    instance("thresholds", thresholds, Thresholds)
    codes = _checked_codebook(codebook)
    if gradient is not None:
        check_gradient(x, gradient)
    return back_end(x).assign(x, thresholds, codes, gradient=gradient)


def dequantize(levels: Array, codebook: Array, *, protected: Array | None = None) -> Array:
    """Values of levels: the inverse of `assign` up to quantization.

    Level 0 gives 0, level 1 the next of `protected` in flat order (0 if None), level l >= 2 gives `codebook[l - 2]`.

    Args:
        levels: uint8, any shape.
        codebook: 1-D, 0 ... 254 entries, float16, bfloat16, float32 or float64, on the device of `levels`.
        protected: 1-D, dtype and library of the codebook, as many entries as there are levels 1; default None.

    Returns:
        Array of the codebook's dtype and library, shape of `levels`.

    Raises:
        BadArgumentError: levels are not uint8, or codebook and protected differ in dtype or are not 1-D.
        CorruptDataError: a level beyond the codebook, or too few or too many protected values.

    Example:
        >>> import numpy as np
        >>> codebook = np.array([-1.0, 1.0], dtype=np.float32)
        >>> dequantize(np.array([0, 3, 1, 2], dtype=np.uint8), codebook, protected=np.float32([9.5])).tolist()
        [0.0, 1.0, 9.5, -1.0]
    """
    array("levels", levels, ("uint8",))
    if array("codebook", codebook, FORMATS, 1).shape[0] > MAX_CODES:
        raise BadArgumentError(
            f"codebook has shape {tuple(codebook.shape)}; one dimension of 0 ... {MAX_CODES} is needed"
        )
    same_device("levels", levels, "codebook", codebook)
    if protected is not None:
        array("protected", protected, (dtype_name(codebook),), 1)
        same_device("levels", levels, "protected", protected)
    return back_end(levels).dequantize(levels, codebook, protected=protected)


Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
SMALLEST_STEP, LARGEST_STEP = 2.0**-100, 2.0**100
"""Range of steps whose multiples, and the midpoints between them, float32 holds exactly."""


def uniform_levels_many(
    x: Array, ends: Integers, steps: Floats, firsts: Integers, sizes: Integers, limit: float
) -> tuple[Array, Floats]:
    """Return the level of each element's nearest entry, as `quantizer.assign`, and array errors.

    The entries of an array are `k * step` for k = first ... first + size - 1; entry number i has level 2 + i. An
    element half-way between two takes the lower. One with |x| >= limit, or that is not finite, has level 1.

    Args:
        x: float32 [n] on the host.
        ends: int64 [m] NumPy, ascending: where each array ends; the last is n.
        steps: float64 [m], each with at most 8 significant bits, within 2**-100 ... 2**100.
        firsts: int64 [m], first multiple, within -2**15 ... 2**15.
        sizes: int64 [m], entries, 1 ... 254.
        limit: of the protected elements, > 0, may be infinite.

    Returns:
        levels: uint8 [n].
        sums: float64 [m, 2]: squared error and squared norm over the elements that are not protected.

    Raises:
        BadArgumentError: dtypes, shapes or ranges do not fit.

    Example:
        >>> x, one = np.array([0.2, 0.9, 9.0], np.float32), np.ones(1)
        >>> uniform_levels_many(x, np.array([3]), one, np.array([0]), np.array([2]), 5.0)[0].tolist()
        [2, 3, 1]
    """
    array("x", x, ("float32",), 1, host=True)
    _check(int(x.shape[0]), ends, steps, firsts)
    check_table("sizes", sizes, "int64", ends.shape)
    if sizes.size and not 1 <= int(sizes.min()) <= int(sizes.max()) <= MAX_CODES:
        raise BadArgumentError(f"sizes are not all within 1 ... {MAX_CODES}")
    limit = number("limit", limit, 0, math.inf, open_low=True)
    return on_host().uniform_levels_many(x, ends, steps, firsts, sizes, limit)


def uniform_values_many(levels: Array, ends: Integers, steps: Floats, firsts: Integers) -> Array:
    """Return the float32 values of levels of `uniform_levels_many`; 0 for levels 0 and 1.

    Args:
        levels: uint8 [n] on the host.
        ends: as in `uniform_levels_many`.
        steps: as in `uniform_levels_many`.
        firsts: as in `uniform_levels_many`.

    Raises:
        BadArgumentError: dtypes, shapes or ranges do not fit.

    Example:
        >>> levels = np.array([2, 3, 1], np.uint8)
        >>> uniform_values_many(levels, np.array([3]), np.full(1, 0.5), np.array([-1])).tolist()
        [-0.5, 0.0, 0.0]
    """
    array("levels", levels, ("uint8",), 1, host=True)
    _check(int(levels.shape[0]), ends, steps, firsts)
    return on_host().uniform_values_many(levels, ends, steps, firsts)


def _check(n: int, ends: Integers, steps: Floats, firsts: Integers) -> None:
    check_ends("ends", ends, n)
    for name, table, dtype in (("steps", steps, "float64"), ("firsts", firsts, "int64")):
        check_table(name, table, dtype, ends.shape)
    if not ends.size:
        return
    if not SMALLEST_STEP <= float(steps.min()) <= float(steps.max()) <= LARGEST_STEP:
        raise BadArgumentError("a step is not within 2**-100 ... 2**100")
    if not -(1 << 15) <= int(firsts.min()) <= int(firsts.max()) <= 1 << 15:
        raise BadArgumentError("a first multiple is not within -2**15 ... 2**15")
