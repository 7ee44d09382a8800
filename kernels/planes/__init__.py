"""Byte planes, lossless differences and size categories of fixed-width numbers.

These functions work on bit patterns, so every value is kept exactly: NaN payloads, -0.0, subnormals. The size of a
difference is predictable and is entropy coded as a category of one byte; its low bits are noise and are stored as they
are.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from ..backend.arguments import array, check_arrays, choice, host_memory, integer, same_device, stored_bytes
from ..backend.arrays import Array, dtype_name, is_torch, on_gpu
from ..backend.dispatch import Dispatch, OnHost, module_of
from ..errors import BadArgumentError


class BackEnd(Protocol):
    """Functions that every back end of this subject has."""

    def split_planes(self, x: Array, rotation: int = 0) -> Array: ...
    def merge_planes(self, planes: Array, dtype: str, rotation: int = 0) -> Array: ...
    def difference(
        self, current: Array, previous: Array, method: str = "arithmetic", *, dtype: str | None = None
    ) -> Array: ...
    def undifference(
        self, diff: Array, previous: Array, method: str = "arithmetic", *, dtype: str | None = None
    ) -> Array: ...


class HostBackEnd(Protocol):
    """Functions that only the back ends on the host have."""

    def split_categories(self, values: Array, bits: int) -> tuple[Array, Array]: ...
    def join_categories(self, categories: Array, extra: Array, bits: int, dtype: str) -> Array: ...


back_end = Dispatch[BackEnd]("planes")
on_host = OnHost[HostBackEnd]("planes")

if TYPE_CHECKING:
    from . import cpu, gpu, reference

    _EVERYWHERE: tuple[BackEnd, ...] = (reference, cpu, gpu)
    _ON_HOST: tuple[HostBackEnd, ...] = (reference, cpu)

Method = Literal["arithmetic", "xor"]

WIDTHS: dict[str, int] = {
    "bool": 8,
    **{f"{kind}{width}": width for kind in ("int", "uint") for width in (8, 16, 32, 64)},
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 8),
    "float16": 16,
    "bfloat16": 16,
    "float32": 32,
    "float64": 64,
}
"""Name and width in bits of every supported dtype. The caller views a complex array as real and imaginary parts."""


def width_of(dtype: str) -> int:
    """Width in bits of the dtype `dtype`; raises BadArgumentError if it is not in `WIDTHS`."""
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        hint = " (view it as its real and imaginary parts)" if str(dtype).startswith("complex") else ""
        raise BadArgumentError(f"dtype is {dtype}{hint}; the name of one of {', '.join(WIDTHS)} is needed")
    return WIDTHS[dtype]


def ordered_by_sign(dtype: str) -> bool:
    """Return whether patterns of `dtype` are sign and magnitude instead of two's complement."""
    return ("float" in dtype) and dtype != "float8_e8m0fnu"


def split_planes(x: Array, rotation: int = 0) -> Array:
    """Byte planes of x: all least significant bytes first, then all second bytes, and so on.

        planes[p, i] = (rotl(pattern(x[i]), rotation) >> 8 p) & 255,   x in C order

    Args:
        x: array of any shape, strided or not; any dtype in `WIDTHS` (8 to 64 bits).
        rotation: bits, 0 (default) to 7, by which each pattern is first rotated to the left. A rotation of 1 puts the
            whole exponent of a float32 or bfloat16 into the uppermost plane, and the sign into the lowest.

    Returns:
        uint8 [itemsize, n], n the number of elements of x; plane 0 holds the least significant bytes.

    Raises:
        BadArgumentError: a dtype without a fixed width of 8, 16, 32 or 64 bits; a rotation out of range.

    Example:
        >>> import numpy as np
        >>> split_planes(np.array([1, 258], dtype="uint16")).tolist()
        [[1, 2], [0, 1]]
        >>> split_planes(np.array([1.0, -1.0], dtype="float32"), rotation=1).tolist()
        [[0, 1], [0, 0], [0, 0], [127, 127]]

    Source: byte grouping, Hershcovitch et al. 2024 (ZipNN), section 3; named as an option in BitSnap, section 3.3.
    """
    check_arrays(x=x)
    width_of(dtype_name(x))
    return back_end(x).split_planes(x, integer("rotation", rotation, 0, 7))


def merge_planes(planes: Array | list[Array], dtype: str, rotation: int = 0, *, out: Array | None = None) -> Array:
    """Join byte planes into bit patterns: the exact inverse of `split_planes`.

        pattern[i] = rotr(sum over p of planes[p, i] << 8 p, rotation)

    The result holds patterns, because NumPy has no bfloat16 or float8: the caller views them as the right dtype
    (`patterns.view(np.float32)`, `patterns.view(torch.bfloat16)`) and reshapes them.

    Args:
        planes: uint8 [itemsize, n], or a list of `itemsize` arrays uint8 [n] on the host.
        dtype: name of the dtype that was split, one of `WIDTHS` ("float32", "bfloat16", "int64", "bool", ...).
        rotation: the one the patterns were split with, 0 (default) to 7 bits.
        out: array to write the patterns to, contiguous [n], unsigned and as wide as `dtype`: NumPy, or of planes on a
            GPU a torch tensor there. Default: a new one.

    Returns:
        `out`, or flat [n] array of unsigned integers as wide as `dtype`: uint8, uint16, uint32 or uint64.

    Raises:
        BadArgumentError: `planes` is not uint8, its first axis is not the itemsize of `dtype`, or a rotation out of
            range.

    Example:
        >>> import numpy as np
        >>> x = np.array([1.5, -0.0, float("nan")], dtype="float32")
        >>> merge_planes(split_planes(x), "float32").view("float32").tolist()
        [1.5, -0.0, nan]
    """
    itemsize, bits = width_of(dtype) // 8, integer("rotation", rotation, 0, 7)
    if isinstance(planes, list):
        if len(planes) != itemsize:
            raise BadArgumentError(f"planes has {len(planes)} arrays; {itemsize} are needed for {dtype}")
        n = array("a plane", planes[0], ("uint8",), 1, host=True).shape[0]
        for plane in planes:
            array("a plane", plane, ("uint8",), (n,), host=True)
    else:
        n = array("planes", planes, ("uint8",), 2).shape[1]
        if planes.shape[0] != itemsize:
            raise BadArgumentError(f"planes has shape {tuple(planes.shape)}; ({itemsize}, n) is needed for {dtype}")
    if out is None and not isinstance(planes, list):
        merged: Array = back_end(planes).merge_planes(planes, dtype, bits)
    elif out is None:
        merged = module_of("planes").merge_planes(planes, dtype, bits)
    else:
        merged = _writing(out, planes[0], n, 8 * itemsize).merge_planes(planes, dtype, bits, out)
    return merged


def difference(current: Array, previous: Array, method: Method = "arithmetic", *, dtype: str | None = None) -> Array:
    """Difference of two arrays as unsigned numbers, small where little changed.

    With W the width in bits and u the pattern of a value:

        method "xor":         out = u_current ^ u_previous
        method "arithmetic":  out = zigzag((key(u_current) - key(u_previous)) mod 2**W)
        key(u)    = u ^ (2**(W-1) - 1 if u >= 2**(W-1) else 0)   for floats: value order becomes two's complement order
                  = u                                            for integers and bool
        zigzag(d) = (2 d mod 2**W) ^ (2**W - 1 if d >= 2**(W-1) else 0):   0, -1, 1, -2, ... become 0, 1, 2, 3, ...

    A float that moved k units in the last place up or down gives 2 k or 2 k - 1, also across zero (-0.0 and 0.0 are
    neighbours). Every pattern can be restored exactly.

    Args:
        current: array of any shape, any dtype in `WIDTHS`.
        previous: the same shape and dtype.
        method: "arithmetic" (smaller for floats) or "xor".
        dtype: dtype of the values, if the arrays hold their patterns, such as "bfloat16" for uint16 arrays; default:
            the dtype of the arrays.

    Returns:
        Unsigned integers of the same width and shape as `current`.

    Raises:
        BadArgumentError: shapes, dtypes or devices differ, an unknown method, a `dtype` of another width.

    Example:
        >>> import numpy as np
        >>> a = np.array([1.0, 2.0, 0.0], dtype="float32")
        >>> b = np.nextafter(a, np.float32([9, 0, -9]))
        >>> difference(b, a).tolist(), difference(a, a, "xor").tolist()
        ([2, 1, 3], [0, 0, 0])
    """
    dtype = _check_pair("current", current, "previous", previous, method, dtype)
    if dtype_name(current) != dtype_name(previous):
        raise BadArgumentError(
            f"current has dtype {dtype_name(current)} and previous {dtype_name(previous)}; they must be the same"
        )
    return back_end(current).difference(current, previous, method, dtype=dtype)


def undifference(
    diff: Array,
    previous: Array,
    method: Method = "arithmetic",
    *,
    dtype: str | None = None,
    out: Array | None = None,
) -> Array:
    """Return the current array from `previous` and the `difference` to it.

        method "xor":         u = diff ^ u_previous
        method "arithmetic":  u = key((key(u_previous) + unzigzag(diff)) mod 2**W)      (key is its own inverse)
        unzigzag(z) = (z >> 1) ^ (2**W - 1 if z is odd else 0)

    Args:
        diff: result of `difference`: unsigned integers of the width and shape of `previous`.
        previous: as given to `difference`.
        method: as in `difference`.
        dtype: as in `difference`.
        out: contiguous flat array of unsigned integers for the patterns, of the size and width of `previous`; it may be
            `diff`. NumPy, or of arrays on a GPU a torch tensor there. Default: a new one.

    Returns:
        `out`, or an array of the dtype and shape of `previous`.

    Raises:
        BadArgumentError: `diff` is not unsigned of the width of `previous`, or shapes or devices differ.

    Example:
        >>> import numpy as np
        >>> old, new = np.array([1.0, -0.0]), np.array([float("nan"), 0.0])
        >>> undifference(difference(new, old), old).tolist()
        [nan, 0.0]
    """
    dtype = _check_pair("diff", diff, "previous", previous, method, dtype)
    array("diff", diff, (f"uint{width_of(dtype)}",))
    if out is None:
        values: Array = back_end(diff).undifference(diff, previous, method, dtype=dtype)
        return values
    back = _writing(out, diff, math.prod(previous.shape), width_of(dtype))
    written: Array = back.undifference(diff, previous, method, dtype=dtype, out=out)
    return written


def _writing(out: Array, x: Array, n: int, width: int) -> ModuleType:
    """Check memory for n patterns computed from x; return the back end that writes to it."""
    if not on_gpu(x):
        host_memory(out, n, f"uint{width}")
        return module_of("planes")
    same_device("out", array("out", out, (f"uint{width}",), (n,)), "the array", x)
    if not is_torch(out) or not out.is_contiguous():
        raise BadArgumentError("out must be a contiguous torch tensor")
    return module_of("planes", "gpu")


def _check_pair(name: str, x: Array, other: str, y: Array, method: str, dtype: str | None) -> str:
    """Check the common arguments of `difference` and `undifference`; return the dtype of y."""
    check_arrays(**{name: x, other: y})
    choice("method", method, get_args(Method))
    if tuple(x.shape) != tuple(y.shape):
        raise BadArgumentError(f"{name} has shape {tuple(x.shape)} and {other} {tuple(y.shape)}; they must be the same")
    same_device(name, x, other, y)
    own = dtype_name(y)
    meant = own if dtype is None else dtype
    if width_of(meant) != width_of(own):
        raise BadArgumentError(f"dtype is {meant}, {width_of(meant)} bits wide; {other} has {width_of(own)}")
    return meant


def check_alike(current: Array, previous: Array) -> None:
    """Check that two arrays share one dtype of fixed width, one device and one shape."""
    check_arrays(current=current, previous=previous)
    name, other = dtype_name(current), dtype_name(previous)
    width_of(name)
    if name != other:
        raise BadArgumentError(f"current has dtype {name} and previous {other}; they must be the same")
    same_device("current", current, "previous", previous)
    shape, wanted = tuple(current.shape), tuple(previous.shape)
    if shape != wanted:
        raise BadArgumentError(f"current has shape {shape} and previous {wanted}; they must be the same")


VALUE_WIDTHS = {"uint16": 16, "uint32": 32, "uint64": 64}


def most_bits(width: int) -> int:
    """Largest `bits` for which categories of integers of this width fit one byte.

    3 up to 32 bits, 2 for 64.
    """
    return 3 if width <= 32 else 2


def category_count(width: int, bits: int) -> int:
    """Number of categories of integers of `width` bits.

    Example:
        >>> category_count(16, 3), category_count(32, 3), category_count(64, 2)
        (112, 240, 252)
    """
    return (width - 1 - bits << bits) + (2 << bits)


def split_categories(values: Array, bits: int) -> tuple[Array, Array]:
    """Split each value into its category and the low bits that the category leaves open.

    With L the bit length of `v | 2**bits` and `k = L - 1 - bits` the number of low bits that are left open,

        category = (k << bits) + (v >> k),   extra = the k lowest bits of v

    so that a category consists of the bit length and the `bits` bits after the leading one. A value below `2 << bits`
    is its own category.

    Args:
        values: uint16[n], uint32[n] or uint64[n].
        bits: 1 ... 3 (2 for uint64).

    Returns:
        (uint8[n] categories, uint8[ceil(sum(k) / 8)] extra bits): value after value, the lowest bit first, zeros after
        the last.

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> categories, extra = split_categories(np.asarray([0, 7, 8, 9, 21], np.uint16), 1)
        >>> categories.tolist(), extra.tolist()  # 7: 1 open bit, 1; 8 and 9: 2 open bits, 0 and 1; 21: 3 open bits, 5
        ([0, 5, 6, 6, 8], [169])

    Source: Elias (1975), universal codes; additional bits as in JPEG (ITU T.81, F.1.2).
    """
    values = array("values", values, VALUE_WIDTHS, 1, host=True)
    bits = integer("bits", bits, 1, most_bits(VALUE_WIDTHS[dtype_name(values)]))
    return on_host().split_categories(values, bits)


def join_categories(
    categories: Array, extra: Array | bytes, bits: int, dtype: str, *, out: Array | None = None
) -> Array:
    """Return the values with these categories and extra bits: the inverse of `split_categories`.

    Args:
        categories: uint8[n].
        extra: uint8[m] or bytes.
        bits: as for splitting.
        dtype: "uint16", "uint32" or "uint64" of the result.
        out: NumPy array of dtype, contiguous [n], to write to; only for NumPy arrays. Default: a new one.

    Returns:
        `out`, or array of dtype, [n], of the library of `categories`.

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.
        CorruptDataError: a category that dtype does not have, a wrong number of bytes for the extra bits, or a bit set
            after the last one.

    Example:
        >>> import numpy as np
        >>> join_categories(np.asarray([0, 5, 6, 6, 8], np.uint8), bytes([169]), 1, "uint16").tolist()
        [0, 7, 8, 9, 21]
    """
    categories = array("categories", categories, ("uint8",), 1, host=True)
    bits = integer("bits", bits, 1, most_bits(VALUE_WIDTHS[choice("dtype", dtype, VALUE_WIDTHS)]))
    data = stored_bytes(extra)
    if out is None:
        return on_host().join_categories(categories, data, bits, dtype)
    target = host_memory(out, int(categories.shape[0]), dtype)
    return module_of("planes").join_categories(categories, data, bits, dtype, target)
