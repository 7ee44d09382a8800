"""Scale classes: one byte for the size of a number, or of the values in a row or column.

The class of a row or column comes from a sum, the class of a number from its upper bits. The scales of weights and
moments are nearly products of a row's scale and a column's scale, so their logarithms are sums. An entropy coder
spends fewer bits on a value if it knows the scale at that position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arguments import array, integer
from .arrays import back_end, dtype_name

if TYPE_CHECKING:
    from .arrays import Array

_MOST = 2**56


def row_column_sums(
    values: Array, columns: int, phase: int = 0, *, origin: int | Array = 0, most: int = 255
) -> tuple[Array, Array]:
    """Sums over the rows and columns of a matrix, of values or of distances from an origin.

    `values` is a part of the matrix in C order.

        value i stands in row (phase + i) // columns and column (phase + i) % columns
        it counts as min(|values[i] - origin|, most)

    Args:
        values: uint8[n].
        columns: of the matrix, 1 or more.
        phase: column in which the first value stands, 0 ... columns - 1.
        origin: origin of the distances, 0 ... 255, or one per value, uint8[n]; default 0, the values themselves.
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
        >>> row_column_sums(values, 2, origin=3, most=1)[0].tolist()  # 1 1 / 0 1
        [2, 1]
    """
    values = array("values", values, ("uint8",), 1, host=True)
    columns = integer("columns", columns, 1, _MOST)
    phase, most = integer("phase", phase, 0, columns - 1), integer("most", most, 0, 255)
    if getattr(origin, "shape", ()):
        origin = array("origin", origin, ("uint8",), 1, host=True)
        integer("the number of origins", origin.shape[0], values.shape[0], values.shape[0])
    else:
        origin = integer("origin", origin, 0, 255)
    rows, sums = back_end(values, "scale_classes").row_column_sums(values, columns, phase, origin, most)
    return rows, sums


def class_sums(
    rows: Array,
    columns: Array,
    n: int,
    phase: int = 0,
    *,
    base: int = 0,
    classes: int = 256,
    context: Array | None = None,
) -> Array:
    """Add the class of its row and the class of its column at each position of a matrix.

    The sum is limited to `classes` values from `base` on.

        own    = min(max(rows[(phase + i) // C] + columns[(phase + i) % C] - base, 0), classes - 1)
        out[i] = context[i] * classes + own

    Args:
        rows: uint8[ceil((phase + n) / C)].
        columns: uint8[C], C at least 1.
        n: number of positions, >= 0.
        phase: as in `row_column_sums`.
        base: 0 ... 255; default 0.
        classes: 1 ... 256; default 256.
        context: uint8[n], another context of each position; None (default): 0. Sums are modulo 256.

    Returns:
        uint8[n].

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> rows, columns = np.asarray([10, 250], np.uint8), np.asarray([0, 1, 7], np.uint8)
        >>> class_sums(rows, columns, 5, phase=1).tolist()
        [11, 17, 250, 251, 255]
        >>> class_sums(rows, columns, 5, phase=1, base=12, classes=4, context=np.arange(5, dtype=np.uint8)).tolist()
        [0, 7, 11, 15, 19]
    """
    rows, columns = array("rows", rows, ("uint8",), 1, host=True), array("columns", columns, ("uint8",), 1, host=True)
    width = integer("the number of columns", columns.shape[0], 1, _MOST)
    phase = integer("phase", phase, 0, width - 1)
    n = integer("n", n, 0, _MOST)
    integer("the number of rows", rows.shape[0], -(-(phase + n) // width), -(-(phase + n) // width))
    base, classes = integer("base", base, 0, 255), integer("classes", classes, 1, 256)
    if context is not None:
        context = array("context", context, ("uint8",), 1, host=True)
        integer("the number of contexts", context.shape[0], n, n)
    return back_end(rows, "scale_classes").class_sums(rows, columns, n, phase, base, classes, context)


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
    return back_end(patterns, "scale_classes").pattern_classes(patterns, shift, table)
