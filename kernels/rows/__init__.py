"""Row-wise quantization of embedding tables.

Each row has a range of its own, optionally narrowed by a greedy search, or a codebook from k-means.

Every formula is in float32, each operation rounded once, to nearest even, in the order written; a product and the sum
after it are two roundings (no fused multiply-add). `rint` rounds halves to even. Sums are of integers and so have no
order. A zero that is a row's minimum or maximum counts as +0.0. Input of another width is first rounded to float32.

Source: Check-N-Run, section 5.2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from ..backend.arguments import array, choice, integer, number, same_device
from ..backend.arrays import Array
from ..backend.dispatch import Dispatch
from ..backend.floats import FORMATS
from ..errors import CorruptDataError


class BackEnd(Protocol):
    """Functions that every back end of this subject has."""

    def row_quantize(
        self, x: Array, bits: int, method: str = "adaptive", *, num_bins: int = 25, ratio: float = 1.0
    ) -> tuple[Array, Array, Array]: ...
    def row_dequantize(self, codes: Array, scale: Array, minimum: Array) -> Array: ...
    def row_kmeans(self, x: Array, bits: int, *, iterations: int = 15) -> tuple[Array, Array]: ...
    def row_lookup(self, codes: Array, codebook: Array) -> Array: ...


back_end = Dispatch[BackEnd]("rows")

if TYPE_CHECKING:
    from . import cpu, gpu, reference

    _EVERYWHERE: tuple[BackEnd, ...] = (reference, cpu, gpu)

Method = Literal["symmetric", "asymmetric", "adaptive"]

ERROR_STEPS = 1 << 15
"""The search measures errors in whole units of 1/32768 of a row's range, so that sums of squares are exact integers."""

KMEANS_STEPS = 1 << 22
"""k-means runs on whole units of 2**-22 of a row's range, so that means are exact integers, rounded once."""


def row_quantize(
    x: Array, bits: int, method: Method = "adaptive", *, num_bins: int | None = None, ratio: float = 1.0
) -> tuple[Array, Array, Array]:
    """Quantize each row of x uniformly over its own range.

    With L = 2**bits - 1 and a range [a, b]:

        scale = (b - a) / L                              (0 where b <= a)
        code  = rint(min(max((x - a) / scale, 0), L))    (0 where scale is 0)
        value = code * scale + a                         (`row_dequantize`)

    "asymmetric": a, b = lo, hi = minimum and maximum of the row. "symmetric": b = max |x|, a = -b.
    "adaptive": the greedy search. In units of the range, y = (x - lo) / (hi - lo), an (i, j) candidate stands for
    a = i / num_bins, b = (num_bins - j) / num_bins, r = b - a, and has the cost

        E(i, j) = sum of rint(32768 * (v - y))**2,   v = q * (r / L) + a,   q = rint(min(max((y - a) * (L / r), 0), L))

    (v = a where r is 0). From (0, 0), `search_steps(num_bins, ratio)` times: go to (i + 1, j) if
    E(i + 1, j) < E(i, j + 1), else to (i, j + 1). The candidate with the least E on this path (the first of equals)
    gives a = lo + i * step, b = hi - j * step, step = (hi - lo) / num_bins.

    A row that holds a NaN or an infinity, or whose hi - lo overflows float32, gets codes 0 and NaN (pattern 0x7FC00000)
    as scale and minimum; the caller has to store it in another way. A row without elements gets 0 and 0.

    Args:
        x: [R, D] float16, bfloat16, float32 or float64.
        bits: 1 to 8; the paper uses 2, 3, 4 and 8.
        method: "adaptive" (best, for 4 bits and below), "asymmetric" (enough at 8 bits) or "symmetric".
        num_bins: number of steps in the range, 1 to 4096 ("adaptive" only); default 25 up to 3 bits, 45 above.
        ratio: largest share of the range that the search cuts off, above 0 and up to 1 ("adaptive" only).

    Returns:
        codes uint8 [R, D], scale float32 [R], minimum float32 [R] (the a of each row).

    Raises:
        BadArgumentError: an argument out of the ranges above.

    Example:
        >>> import numpy as np
        >>> codes, scale, minimum = row_quantize(np.array([[0.0, 1.0, 2.0, 3.0]]), 2, "asymmetric")
        >>> codes.tolist(), scale.tolist(), minimum.tolist()
        ([[0, 1, 2, 3]], [1.0], [0.0])

    Source: Check-N-Run, section 5.2, approaches 1 and 3. The loop with the condition printed there would never start.
    The condition here is the one that the text describes: continue while x_max - x_min > (1 - ratio) * range.
    """
    bits = _check_rows(x, bits)
    choice("method", method, get_args(Method))
    num_bins = integer("num_bins", (25 if bits <= 3 else 45) if num_bins is None else num_bins, 1, 4096)
    ratio = number("ratio", ratio, 0, 1, open_low=True)
    return back_end(x).row_quantize(x, bits, method, num_bins=num_bins, ratio=ratio)


def row_dequantize(codes: Array, scale: Array, minimum: Array) -> Array:
    """The values of uniform row codes: `codes * scale + minimum`, two roundings in float32.

    Args:
        codes: uint8 [R, D].
        scale: float32 [R].
        minimum: float32 [R].

    Returns:
        float32 [R, D]; a row of NaN where its scale is NaN.

    Raises:
        BadArgumentError: dtypes or devices are not these.
        CorruptDataError: `scale` or `minimum` does not have R elements.

    Example:
        >>> import numpy as np
        >>> x = np.array([[0.1, 0.5, 0.3]], dtype="float32")
        >>> bool(np.abs(row_dequantize(*row_quantize(x, 8, "asymmetric")) - x).max() <= 0.4 / 255 / 2 * 1.001)
        True
    """
    _check_codes(codes, ("scale", scale), ("minimum", minimum))
    for name, values in (("scale", scale), ("minimum", minimum)):
        if tuple(values.shape) != (codes.shape[0],):
            raise CorruptDataError(f"{name} has shape {tuple(values.shape)}; ({codes.shape[0]},) is needed")
    return back_end(codes).row_dequantize(codes, scale, minimum)


def row_kmeans(x: Array, bits: int, *, iterations: int = 15) -> tuple[Array, Array]:
    """Codebook of 2**bits values for each row by Lloyd's k-means.

    The iteration starts from an even grid over the row's range.

    On integers Y = rint(2**22 * ((x - lo) / (hi - lo))), Y = 0 where hi = lo, with L = 2**bits - 1:

        start   C_i = (i * 2**22) // L,   i = 0 ... L
        assign  code = number of i < L with 2 Y > C_i + C_(i+1)                (nearest; halfway goes to the lower)
        update  C_i = (2 sum + count) // (2 count) over the Y with code i      (an empty cluster keeps its C_i)

    Assign and update are done `iterations` times, then assign once more; codebook_i = (C_i / 2**22) * (hi - lo) + lo.

    A row that holds a NaN or an infinity, or whose hi - lo overflows float32, gets codes 0 and a codebook of NaN
    (pattern 0x7FC00000). A row without elements gets a codebook of 0.

    Args:
        x: [R, D] float16, bfloat16, float32 or float64.
        bits: 1 to 8.
        iterations: 0 to 1000; the paper uses 15.

    Returns:
        codes uint8 [R, D], codebook float32 [R, 2**bits], ascending.

    Raises:
        BadArgumentError: an argument out of the ranges above.

    Example:
        >>> import numpy as np
        >>> codes, codebook = row_kmeans(np.array([[0.0, 1.0, 4.0, 4.0]]), 1)
        >>> codes.tolist(), codebook.tolist()
        ([[0, 0, 1, 1]], [[0.5, 4.0]])

    Source: Check-N-Run, section 5.2, approach 2. The paper starts from random values, this function from a uniform
    grid.
    """
    bits, iterations = _check_rows(x, bits), integer("iterations", iterations, 0, 1000)
    return back_end(x).row_kmeans(x, bits, iterations=iterations)


def row_lookup(codes: Array, codebook: Array) -> Array:
    """Look up row codes in the codebook of their row: `out[r, d] = codebook[r, codes[r, d]]`.

    Args:
        codes: uint8 [R, D], each below K.
        codebook: float32 [R, K], K = 1 to 256.

    Returns:
        float32 [R, D].

    Raises:
        BadArgumentError: dtypes or devices are not these.
        CorruptDataError: the codebook does not have R rows, has no entry, or a code is K or above.

    Example:
        >>> import numpy as np
        >>> row_lookup(np.array([[1, 0]], dtype="uint8"), np.array([[0.5, 2.0]], dtype="float32")).tolist()
        [[2.0, 0.5]]
    """
    _check_codes(codes, ("codebook", codebook))
    shape = tuple(codebook.shape)
    if len(shape) != 2 or shape[0] != codes.shape[0] or not 1 <= shape[1] <= 256:
        raise CorruptDataError(f"codebook has shape {shape}; ({codes.shape[0]}, 1 to 256) is needed")
    return back_end(codes).row_lookup(codes, codebook)


def search_steps(num_bins: int, ratio: float) -> int:
    """Number of steps of the greedy search: the smallest t with `t / num_bins >= ratio`.

    A shortfall of a billionth is tolerated. After fewer steps, x_max - x_min is still above (1 - ratio) * range,
    because each step reduces it by range / num_bins.

    Example:
        >>> search_steps(25, 0.6), search_steps(25, 0.28), search_steps(45, 1.0)
        (15, 7, 45)
    """
    bins = integer("num_bins", num_bins, 1, 4096)
    return math.ceil(number("ratio", ratio, 0, 1, open_low=True) * bins - 1e-9)


def unknown_code(code: int, entries: int) -> CorruptDataError:
    """Return the error for a code without an entry in its codebook."""
    return CorruptDataError(f"code {code} has no entry in a codebook of {entries}")


def _check_rows(x: Array, bits: int) -> int:
    """Check the matrix to quantize and return the bits."""
    array("x", x, FORMATS, 2)
    return integer("bits", bits, 1, 8)


def _check_codes(codes: Array, *others: tuple[str, Array]) -> None:
    """Check the dtypes and devices of stored codes and of the numbers that go with them."""
    array("codes", codes, ("uint8",), 2)
    for name, values in others:
        same_device("codes", codes, name, array(name, values, ("float32",)))
