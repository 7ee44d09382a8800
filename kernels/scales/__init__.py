"""Scales of values, rows and columns: octaves, classes, and rank-one estimates.

The scales of weights and moments are nearly products of a row's scale and a column's scale, so their logarithms are
sums. Octaves are split from signs and fractions, so that each is coded as a byte stream. Classes give an entropy coder
the scale at each position. Second moments are stored as a rank-one estimate times a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..backend.arguments import array, check_table, instance, integer, number, same_device, shown
from ..backend.arrays import Array, dtype_name, on_gpu
from ..backend.dispatch import Dispatch, OnHost
from ..errors import BadArgumentError


class BackEnd(Protocol):
    """Functions that every back end of this subject has.

    Residuals are of joined matrices of the given shapes, on a GPU of one matrix, from an element of the first on.
    """

    def split_octaves(self, index: Array, bits: int, buckets: int) -> Octaves | None: ...
    def join_octaves(self, octaves: Octaves, bits: int, buckets: int) -> Array: ...
    def factor_sums(self, x: Array, columns: int) -> tuple[Any, Any]: ...
    def residual_symbols(
        self,
        x: Array,
        rows: Factors,
        columns: Factors,
        shapes: Shapes,
        start: int,
        eighths: int,
        previous: Array | None,
    ) -> tuple[Array, Any, Any]: ...
    def residual_values(
        self, symbols: Array, rows: Factors, columns: Factors, shapes: Shapes, start: int, table: Factors
    ) -> Array: ...


class HostBackEnd(Protocol):
    """Functions that only the back ends on the host have."""

    def row_column_sums(self, values: Array, columns: int, phase: int, most: int) -> tuple[Array, Array]: ...
    def class_sums(self, rows: Array, columns: Array, n: int, phase: int, base: int, classes: int) -> Array: ...
    def pattern_classes(self, patterns: Array, shift: int, table: Array) -> Array: ...
    def factors_many(self, x: Array, shapes: Shapes) -> tuple[Factors, Factors]: ...


back_end = Dispatch[BackEnd]("scales")
on_host = OnHost[HostBackEnd]("scales")

if TYPE_CHECKING:
    from . import cpu, gpu, reference

    _EVERYWHERE: tuple[BackEnd, ...] = (reference, cpu, gpu)
    _ON_HOST: tuple[HostBackEnd, ...] = (reference, cpu)

MAX_OCTAVES = 254
"""Number of octaves that fit a byte together with the symbol for zero."""
_LARGEST = 2**30 - 1
"""Largest J: an index goes up to 2 J + 1 and is an int32."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Octaves:
    """Octave, sign and fraction of n log-bucket indices, m of them finite and nonzero.

    The arrays are NumPy, because the entropy coder runs on the host.

    Args:
        low: lowest octave present, counted from the smallest subnormal's; 0 if m is 0.
        high: highest octave present; 0 if m is 0.
        symbols: uint8 [n], 0 for zero, infinities and NaNs, else 1 + octave - low.
        negative: uint8 [m], 1 for negative elements.
        fraction: uint8 [ceil(bits / 8), m], bytes of the sub-bucket number, least significant first.
        odd: int64, positions of infinities and NaNs, ascending.
    """

    low: int
    high: int
    symbols: Bytes
    negative: Bytes
    fraction: Bytes
    odd: np.ndarray[Any, np.dtype[np.int64]]


def split_octaves(index: Array, bits: int, buckets: int) -> Octaves | None:
    """Split the indices of `bucket_index` into octave, sign and fraction.

    None if they span more than `MAX_OCTAVES` octaves.

    Indices on a GPU are split there, and only the streams are copied to the host.

        j = |index - buckets|;  octave = (j - 1) >> bits;  fraction = (j - 1) mod 2**bits;  negative = index < buckets

    Args:
        index: int32 [n], as `logbucket.bucket_index` gives them: 0 ... 2 J + 1, J = `buckets`.
        bits: log2 of the sub-buckets an octave, 0 ... 16.
        buckets: J, `FloatFormat.buckets(bits)`; 0 ... 2**30 - 1.

    Raises:
        BadArgumentError: another dtype or shape, or bits or buckets out of range.

    Example:
        >>> o = split_octaves(np.array([10, 12, 7], dtype=np.int32), 1, 10)
        >>> o.symbols.tolist(), o.negative.tolist(), o.fraction.tolist()
        ([0, 1, 2], [0, 1], [[1, 0]])
    """
    array("index", index, ("int32",), 1)
    bits, buckets = _checked(bits, buckets)
    return back_end(index).split_octaves(index, bits, buckets)


def join_octaves(octaves: Octaves, bits: int, buckets: int) -> Array:
    """Return the indices int32 [n] from their parts: the inverse of `split_octaves`.

    Infinities and NaNs get the index of zero.

    Args:
        octaves: consistent: m is the number of nonzero symbols; any bytes are allowed. Where `symbols`, `negative` and
            `fraction` are arrays on a GPU, all on the same one, the indices are made there.
        bits: as in `split_octaves`.
        buckets: as in `split_octaves`.

    Raises:
        BadArgumentError: m is not the number of nonzero symbols, another dtype or shape, or a number out of range.
    """
    instance("octaves", octaves, Octaves)
    bits, buckets = _checked(bits, buckets)
    integer("octaves.low", octaves.low, 0, _LARGEST)
    for name, ndim in (("symbols", 1), ("negative", 1), ("fraction", 2)):
        stream = getattr(octaves, name)
        array(f"octaves.{name}", stream, ("uint8",), ndim)
        if not isinstance(stream, np.ndarray) and not on_gpu(stream):
            raise BadArgumentError(f"octaves.{name} is {shown(stream)}; NumPy, or an array on a GPU, is needed")
        same_device("octaves.symbols", octaves.symbols, f"octaves.{name}", stream)
    if octaves.fraction.shape[0] != (bits + 7) // 8:
        raise BadArgumentError(
            f"octaves.fraction has {octaves.fraction.shape[0]} planes; {(bits + 7) // 8} are needed for {bits} bits"
        )
    if isinstance(octaves.symbols, np.ndarray):  # on a GPU the kernel counts
        check_counts(octaves, int(np.count_nonzero(octaves.symbols)))
    return back_end(octaves.symbols).join_octaves(octaves, bits, buckets)


def check_counts(octaves: Octaves, m: int) -> None:
    """Raise BadArgumentError unless there are m signs and fractions."""
    if octaves.negative.shape[0] != m or octaves.fraction.shape[1] != m:
        signs, fractions = octaves.negative.shape[0], tuple(octaves.fraction.shape)
        raise BadArgumentError(f"{m} symbols are nonzero; {signs} signs, {fractions}")


def _checked(bits: int, buckets: int) -> tuple[int, int]:
    return integer("bits", bits, 0, 16), integer("buckets", buckets, 0, _LARGEST)


_MOST = 2**56


def row_column_sums(values: Array, columns: int, phase: int = 0, *, most: int = 255) -> tuple[Array, Array]:
    """Sums over the rows and columns of a matrix.

    `values` is a part of the matrix in C order.

        value i stands in row (phase + i) // columns and column (phase + i) % columns
        it counts as min(values[i], most)

    Args:
        values: uint8[n].
        columns: of the matrix, 1 or more.
        phase: column in which the first value stands, 0 ... columns - 1.
        most: largest contribution of one value, 0 ... 255; default 255.

    Returns:
        (int64[ceil((phase + n) / columns)], int64[columns]).

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> values = np.asarray([1, 2, 3, 4], np.uint8)
        >>> rows, columns = row_column_sums(values, 3, phase=1)  # - 1 2 / 3 4 -
        >>> rows.tolist(), columns.tolist()
        ([3, 7], [3, 5, 2])
        >>> row_column_sums(values, 2, most=2)[0].tolist()  # 1 2 / 2 2
        [3, 4]
    """
    values = array("values", values, ("uint8",), 1, host=True)
    columns = integer("columns", columns, 1, _MOST)
    phase, most = integer("phase", phase, 0, columns - 1), integer("most", most, 0, 255)
    return on_host().row_column_sums(values, columns, phase, most)


def class_sums(
    rows: Array,
    columns: Array,
    n: int,
    phase: int = 0,
    *,
    base: int = 0,
    classes: int = 256,
) -> Array:
    """Add the class of its row and the class of its column at each position of a matrix.

    The sum is limited to `classes` values from `base` on.

        out[i] = min(max(rows[(phase + i) // C] + columns[(phase + i) % C] - base, 0), classes - 1)

    Args:
        rows: uint8[ceil((phase + n) / C)].
        columns: uint8[C], C at least 1.
        n: number of positions, >= 0.
        phase: as in `row_column_sums`.
        base: 0 ... 255; default 0.
        classes: 1 ... 256; default 256.

    Returns:
        uint8[n].

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> rows, columns = np.asarray([10, 250], np.uint8), np.asarray([0, 1, 7], np.uint8)
        >>> class_sums(rows, columns, 5, phase=1).tolist()
        [11, 17, 250, 251, 255]
        >>> class_sums(rows, columns, 5, phase=1, base=12, classes=4).tolist()
        [0, 3, 3, 3, 3]
    """
    rows, columns = array("rows", rows, ("uint8",), 1, host=True), array("columns", columns, ("uint8",), 1, host=True)
    width = integer("the number of columns", columns.shape[0], 1, _MOST)
    phase = integer("phase", phase, 0, width - 1)
    n = integer("n", n, 0, _MOST)
    integer("the number of rows", rows.shape[0], -(-(phase + n) // width), -(-(phase + n) // width))
    base, classes = integer("base", base, 0, 255), integer("classes", classes, 1, 256)
    return on_host().class_sums(rows, columns, n, phase, base, classes)


def pattern_classes(patterns: Array, shift: int, table: Array) -> Array:
    """Class of each bit pattern by its upper bits: `table[pattern >> shift]`.

    Args:
        patterns: uint16[n], uint32[n] or uint64[n].
        shift: 0 ... width - 1, with at most 24 bits left.
        table: uint8[2**(width - shift)].

    Returns:
        uint8[n].

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> signs = np.asarray([0, 7], np.uint8)
        >>> pattern_classes(np.asarray([1.0, -1.0], np.float32).view(np.uint32), 31, signs).tolist()
        [0, 7]
    """
    patterns = array("patterns", patterns, ("uint16", "uint32", "uint64"), 1, host=True)
    table = array("table", table, ("uint8",), 1, host=True)
    width = int(dtype_name(patterns)[4:])
    shift = integer("shift", shift, max(0, width - 24), width - 1)
    integer("the number of classes", table.shape[0], 1 << (width - shift), 1 << (width - shift))
    return on_host().pattern_classes(patterns, shift, table)


ZERO, ESCAPE, FIRST = 0, 1, 2
"""Symbols of an element that is 0, of one that has no residual, and of the lowest residual."""
FARTHEST = 126
"""Largest residual, in cells, that has a symbol; FIRST + FARTHEST is the symbol of residual 0."""
MOST_OCTAVES = 16
"""Widest cell."""
SCALE = 2.0**15
"""Scale of inverse roots, which are summed as integers so that the order of additions does not matter."""
Floats = np.ndarray[Any, np.dtype[np.float64]]
Factors = np.ndarray[Any, np.dtype[np.float32]]
Shapes = np.ndarray[Any, np.dtype[np.int64]]


def factor_sums(x: Array, columns: int) -> tuple[Floats, Floats]:
    """Sums of the rows and of the columns of a matrix over its finite elements, in one pass.

    From these the factors of a rank-one estimate are computed.

    Args:
        x: float32 [R * columns], a matrix in C order.
        columns: how many elements a row has, >= 1.

    Returns:
        float64 [R] and float64 [columns] on the host. Each addition is rounded once. Back ends add in different orders,
        so their last bits may differ.

    Raises:
        BadArgumentError: another dtype, or the elements do not fill whole rows.

    Example:
        >>> factor_sums(np.array([1, 2, 3, 10, 20, np.inf], np.float32), 3)[1].tolist()
        [11.0, 22.0, 3.0]

    Source: Shazeer and Stern 2018 (Adafactor), section 3.
    """
    array("x", x, ("float32",), 1)
    columns = integer("columns", columns, 1, 2**56)
    if int(x.shape[0]) % columns:
        raise BadArgumentError(f"{int(x.shape[0])} elements are not a whole number of rows of {columns}")
    return back_end(x).factor_sums(x, columns)


def residual_symbols(
    x: Array, rows: Factors, columns: Factors, start: int, octaves: float, previous: Array | None = None
) -> tuple[Array, Floats, Floats]:
    """Symbol of each element by its ratio to the estimate `rows[i] * columns[j]`.

    The symbol counts cells of `octaves` octaves.

        ratio = x / estimate;  distance = pattern of ratio - pattern of 1;  cell = octaves * 2**23
        k = floor((distance + cell / 2) / cell);  symbol = 2 + 126 + k

    Between powers of two the pattern of a float32 is linear in the value, so distance / 2**23 is the ratio's logarithm
    to base 2 to within 0.09. Zero has symbol 0. Symbol 1 (escape) is for an element that is negative, not finite or
    subnormal, whose estimate or ratio is not a normal number, or with |k| > 126. An element keeps its residual symbol
    in `previous` if it is at most a quarter of a cell outside that cell: the additional error is small, and an
    unchanged symbol costs almost no bits.

    Args:
        x: float32 [n], elements `start` ... of a matrix with these rows and columns, in C order.
        rows: float32 [R] on the host, >= 0.
        columns: float32 [C] on the host, >= 0.
        start: number of the first element, >= 0.
        octaves: width of a cell, a multiple of 1/8 from 1/8 to 16.
        previous: uint8 [n], earlier symbols of the same elements; None (default): nothing is kept.

    Returns:
        symbols: uint8 [n].
        sums: float64 [256] on the host, by symbol the sum of `rint(2**15 * sqrt(center / ratio))`, an integer; `center`
            is the symbol's own ratio, see `cell_centers`. 0 for symbols 0 and 1.
        counts: float64 [256] on the host, number of elements of each symbol.

    Raises:
        BadArgumentError: dtypes, shapes or ranges do not fit.

    Example:
        >>> x = np.array([1, 1, 64, 0], np.float32)
        >>> residual_symbols(x, np.ones(2, np.float32), np.ones(2, np.float32), 0, 3)[0].tolist()
        [128, 128, 130, 0]

    Source: the rank-one estimate is Adafactor's (Shazeer and Stern 2018, section 3).
    """
    array("x", x, ("float32",), 1)
    shapes, start = _checked_start(rows, columns, start, int(x.shape[0]))
    eighths = eighths_of(octaves)
    if previous is not None:
        array("previous", previous, ("uint8",), x.shape)
        same_device("previous", previous, "x", x)
    return back_end(x).residual_symbols(x, rows, columns, shapes, start, eighths, previous)


def eighths_of(octaves: float) -> int:
    """Width of a cell in eighths of an octave.

    Raises:
        BadArgumentError: not a multiple of 1/8 from 1/8 to 16.

    Example:
        >>> eighths_of(0.25), eighths_of(2)
        (2, 16)
    """
    eighths = 8 * number("octaves", octaves, 1 / 8, MOST_OCTAVES)
    if eighths != int(eighths):
        raise BadArgumentError(f"octaves is {octaves}; it must be a multiple of 1/8")
    return int(eighths)


def cell_centers(eighths: int) -> Factors:
    """Ratio at the center of each symbol's cell.

    float32 [256]; 0 for symbols 0 and 1.

    Args:
        eighths: width of a cell in eighths of an octave, 1 to 128.

    Example:
        >>> cell_centers(8)[[1, 127, 128, 129]].tolist()
        [0.0, 0.5, 1.0, 2.0]
    """
    k = np.arange(256) - (FIRST + FARTHEST)
    patterns = np.clip((127 << 23) + k * (eighths << 20), 1 << 23, (255 << 23) - 1).astype(np.int32)
    return np.where(np.arange(256) >= FIRST, patterns.view(np.float32), np.float32(0))


def residual_factors(sums: Floats, counts: Floats, octaves: float) -> Factors:
    """Factor by which the estimates of each symbol's elements are multiplied.

    It keeps the mean of the elements' inverse square roots.

    An optimizer that divides by the root of the values, as Adam does, then takes steps of the same mean length as with
    the values themselves. With the arithmetic mean, which the largest values dominate, most steps would be too small.

    Args:
        sums: float64 [256], of `residual_symbols`, over all chunks.
        counts: float64 [256].
        octaves: width of a cell, as in `residual_symbols`.

    Returns:
        float32 [256], 0 for symbols 0, 1 and those that do not occur.

    Raises:
        BadArgumentError: dtypes or shapes do not fit.

    Example:
        >>> s, n = np.zeros(256), np.zeros(256)
        >>> s[129], n[129] = 3 * 2.0**15, 2
        >>> float(residual_factors(s, n, 1)[129] * 1.5**2)
        2.0
    """
    check_table("sums", sums, "float64", (256,))
    check_table("counts", counts, "float64", (256,))
    centers = cell_centers(eighths_of(octaves))
    used = (counts > 0) & (sums > 0) & (np.arange(256) >= FIRST)
    mean = np.where(used, sums, 1.0) / np.where(used, counts, 1.0) / SCALE
    largest = float(np.finfo(np.float32).max)
    return np.where(used, np.minimum(centers / mean**2, largest), 0.0).astype(np.float32)


def residual_values(symbols: Array, rows: Factors, columns: Factors, start: int, table: Factors) -> Array:
    """Values of residual symbols: `(rows[i] * columns[j]) * table[symbol]` in float32.

    Each operation is rounded once.

    Args:
        symbols: uint8 [n].
        rows: as in `residual_symbols`.
        columns: as in `residual_symbols`.
        start: as in `residual_symbols`.
        table: float32 [256] on the host: factor of each symbol; 0 for zero and the escape.

    Raises:
        BadArgumentError: dtypes, shapes or ranges do not fit.
    """
    array("symbols", symbols, ("uint8",), 1)
    shapes, start = _checked_start(rows, columns, start, int(symbols.shape[0]))
    check_table("table", table, "float32", (256,))
    return back_end(symbols).residual_values(symbols, rows, columns, shapes, start, table)


def factors_many(x: Array, shapes: Shapes) -> tuple[Factors, Factors]:
    """Return the factors of the rank-one estimate of each of several matrices.

    They are row means, and column means divided by the mean of the matrix. A matrix of zeros has factors of 0. Elements
    that are not finite count as 0.

    Args:
        x: float32 [n] on the host, the matrices in C order, one after another.
        shapes: int64 [m, 2] NumPy, rows and columns of each, >= 1; together n elements.

    Returns:
        float32 [sum of rows] and float32 [sum of columns], none negative. The order of additions is the back end's own.

    Raises:
        BadArgumentError: other dtypes, or sizes that do not fit.

    Example:
        >>> factors_many(np.array([1, 3, 1, 3, 5, 5], np.float32), np.array([[2, 2], [1, 2]]))[0].tolist()
        [2.0, 2.0, 5.0]

    Source: Shazeer and Stern 2018 (Adafactor), section 3.
    """
    array("x", x, ("float32",), 1, host=True)
    return on_host().factors_many(x, _checked_shapes(shapes, int(x.shape[0])))


def residual_symbols_many(
    x: Array, rows: Factors, columns: Factors, shapes: Shapes, octaves: float, previous: Array | None = None
) -> tuple[Array, Floats, Floats]:
    """Return the `residual_symbols` of several joined matrices; sums and counts are over all.

    Args:
        x: float32 [n] on the host.
        rows: float32 [sum of rows], of `factors_many`.
        columns: float32 [sum of columns].
        shapes: int64 [m, 2], as in `factors_many`.
        octaves: as in `residual_symbols`.
        previous: as in `residual_symbols`.

    Raises:
        BadArgumentError: dtypes, shapes or ranges do not fit.

    Example:
        >>> x, one = np.array([1, 64, 0], np.float32), np.ones(3, np.float32)
        >>> residual_symbols_many(x, one[:2], one, np.array([[1, 2], [1, 1]]), 3)[0].tolist()
        [128, 130, 0]
    """
    array("x", x, ("float32",), 1, host=True)
    _checked_factors(rows, columns, shapes := _checked_shapes(shapes, int(x.shape[0])))
    eighths = eighths_of(octaves)
    if previous is not None:
        array("previous", previous, ("uint8",), x.shape, host=True)
    return back_end(x).residual_symbols(x, rows, columns, shapes, 0, eighths, previous)


def residual_values_many(symbols: Array, rows: Factors, columns: Factors, shapes: Shapes, table: Factors) -> Array:
    """Return the `residual_values` of several whole matrices, one after another.

    Args:
        symbols: uint8 [n] on the host.
        rows: float32 [sum of rows].
        columns: float32 [sum of columns].
        shapes: int64 [m, 2], as in `factors_many`.
        table: float32 [256], the same for all.

    Raises:
        BadArgumentError: dtypes, shapes or ranges do not fit.

    Example:
        >>> one, table = np.ones(3, np.float32), np.full(256, 2, np.float32)
        >>> residual_values_many(np.zeros(3, np.uint8), one[:2], one, np.array([[1, 2], [1, 1]]), table).tolist()
        [2.0, 2.0, 2.0]
    """
    array("symbols", symbols, ("uint8",), 1, host=True)
    _checked_factors(rows, columns, shapes := _checked_shapes(shapes, int(symbols.shape[0])))
    check_table("table", table, "float32", (256,))
    return back_end(symbols).residual_values(symbols, rows, columns, shapes, 0, table)


def _checked_shapes(shapes: Shapes, n: int) -> Shapes:
    check_table("shapes", shapes, "int64", 2)
    if (
        shapes.shape[1] != 2
        or (shapes < 1).any()
        or (shapes > n).any()
        or int((shapes[:, 0] * shapes[:, 1]).sum()) != n
    ):
        raise BadArgumentError(f"shapes have not {n} elements together, or an axis below 1")
    return shapes


def _checked_factors(rows: Factors, columns: Factors, shapes: Shapes) -> None:
    for name, factors, size in (("rows", rows, shapes[:, 0].sum()), ("columns", columns, shapes[:, 1].sum())):
        check_table(name, factors, "float32", (int(size),))


def _checked_start(rows: Factors, columns: Factors, start: int, n: int) -> tuple[Shapes, int]:
    """Return the shape of one matrix as that of several, and the start."""
    for name, factors in (("rows", rows), ("columns", columns)):
        check_table(name, factors, "float32", 1)
    start = integer("start", start, 0, rows.size * columns.size)
    if start + n > rows.size * columns.size:
        raise BadArgumentError(f"elements {start} to {start + n} are not within {rows.size} x {columns.size}")
    return np.array([[rows.size, columns.size]], np.int64), start
