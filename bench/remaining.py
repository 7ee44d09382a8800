"""Cases of the kernels over arrays that `elementwise`, `coders` and `codebooks` leave out.

Inverses, the optimizer's symbols, rows of tables, and the lossless categories, classes and products. Each check
compares a prefix with the oracle, bit for bit where the kernel promises that. With an inverse, the whole output of the
round trip is compared with the input.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .elementwise import COLUMNS, LEVELS, Place, as_oracle, oracle, quantized_rows, table
from .harness import Case, Job, host, near, same

_ROWS = f"rows of {COLUMNS}"
_CHANGES = 1000
_RANK = 8
_ROUNDING = 1e-9
_SLOW = 1 << 20
"""Most elements of a case that takes many steps an element."""
_PREFIX = 1 << 14
"""Elements that are compared with an oracle that goes one by one."""


def cases(at: Place) -> list[Case]:
    """Every case of this module at one size; those that are not sequential on a GPU, too."""
    few = Place(at.device, at.sample, min(at.n, _SLOW))
    rows = [
        at.case("undelta", undelta),
        at.case("grid_symbols", grid_symbols),
        at.case("grid_values", grid_values),
        at.case("factor_sums", factor_sums),
        at.case("residual_symbols", residual_symbols),
        at.case("residual_values", residual_values),
        few.case("row_quantize 2 bit adaptive", lambda here: quantized_rows(here, 2, "adaptive", 25)),
        few.case("row_quantize 3 bit adaptive", lambda here: quantized_rows(here, 3, "adaptive", 25)),
        few.case("row_kmeans 2 bit", row_kmeans),
        at.case("row_lookup", row_lookup),
        at.case("exponent_dequantize", exponent_values),
        at.case("pack_mask", pack_mask),
        at.case("unpack_mask", unpack_mask),
    ]
    return rows if at.device.gpu else rows + _on_host(at)


def _on_host(at: Place) -> list[Case]:
    return [
        at.case("rare_encode", lambda here: _rare(here, decode=False)),
        at.case("rare_decode", lambda here: _rare(here, decode=True)),
        at.case("split_categories", split_categories),
        at.case("join_categories", join_categories),
        at.case("row_column_sums", row_column_sums),
        at.case("class_sums", class_sums),
        at.case("pattern_classes", pattern_classes),
        at.case("low_rank_factors", low_rank_factors),
        at.case("low_rank_predictions", low_rank_predictions),
    ]


def undelta(at: Place) -> Job:
    from shrinkpoint.kernels.levels import delta
    from shrinkpoint.kernels.levels import undelta as back

    old, new = at.sample.levels_before(at.n), at.sample.levels_after(at.n)
    previous, current = at.device.array(old), at.device.array(new)
    steps = delta(previous, current, LEVELS)

    def check() -> str:
        p = at.prefix
        same(
            "levels", back(previous[:p], steps[:p], LEVELS), oracle("levels").undelta(old[:p], host(steps)[:p], LEVELS)
        )
        same("levels", back(previous, steps, LEVELS), current)
        return f"{at.says}, all come back"

    return at.job(lambda: back(previous, steps, LEVELS), check, 3)


def _moments(at: Place) -> tuple[Any, Any]:
    """A first moment and the square of its scale: two checkpoints' weights stand for them."""
    x = at.sample.before(at.n)
    return x, np.square(at.sample.after(at.n))


def grid_symbols(at: Place) -> Job:
    from shrinkpoint.kernels.moment_grid import grid_symbols as symbols_of

    x, square = _moments(at)
    a, b = at.device.array(x), at.device.array(square)

    def check() -> str:
        p = at.prefix
        (found, sums, counts), expected = (
            symbols_of(a[:p], b[:p], 0.5),
            oracle("moment_grid").grid_symbols(x[:p], square[:p], 0.5),
        )
        same("symbols and counts", (found, counts), (expected[0], expected[2]))
        near("sums", sums, expected[1], _ROUNDING, _ROUNDING)
        return f"{at.says}, sums to 1e-9"

    return at.job(lambda: symbols_of(a, b, 0.5), check, 9, note="step 0.5")


def grid_values(at: Place) -> Job:
    from shrinkpoint.kernels.moment_grid import grid_symbols as symbols_of

    x, square = _moments(at)
    table = np.linspace(-3, 3, 256, dtype=np.float32)
    return as_oracle(at, "moment_grid.grid_values", (symbols_of(x, square, 0.5)[0], square), (table,), 9)


def _second(at: Place) -> Any:
    """Second moments as a matrix of `COLUMNS` columns, flat."""
    return np.square(at.sample.before(at.n)[: at.n // COLUMNS * COLUMNS])


def factor_sums(at: Place) -> Job:
    from shrinkpoint.kernels.scales import factor_sums as sums_of

    square = _second(at)
    x, part = at.device.array(square), at.prefix // COLUMNS * COLUMNS

    def check() -> str:
        for mine, expected in zip(
            sums_of(x[:part], COLUMNS), oracle("scales").factor_sums(square[:part], COLUMNS), strict=True
        ):
            near("sums", mine, expected, _ROUNDING, _ROUNDING)
        return f"{part:,} elements = oracle to 1e-9"

    return at.job(lambda: sums_of(x, COLUMNS), check, 4, note=_ROWS)


def _factors(square: Any) -> tuple[Any, Any]:
    """Row and column means, the second over their mean, as of a matrix of rank one."""
    matrix = square.reshape(-1, COLUMNS)
    rows, columns = matrix.mean(axis=1), matrix.mean(axis=0)
    tiny = np.float32(1e-30)
    return np.maximum(rows, tiny), np.maximum(columns / max(float(columns.mean()), 1e-30), tiny).astype(np.float32)


def residual_symbols(at: Place) -> Job:
    from shrinkpoint.kernels.scales import residual_symbols as symbols_of

    square = _second(at)
    rows, columns = _factors(square)
    x, p = at.device.array(square), min(at.prefix, square.size)

    def check() -> str:
        found, sums, counts = symbols_of(x[:p], rows, columns, 0, 1)
        expected = oracle("scales").residual_symbols(square[:p], rows, columns, 0, 8)
        same("symbols and counts", (found, counts), (expected[0], expected[2]))
        near("sums", sums, expected[1], _ROUNDING, _ROUNDING)
        return f"{p:,} elements = oracle, sums to 1e-9"

    return at.job(lambda: symbols_of(x, rows, columns, 0, 1), check, 5, note=f"rows of {COLUMNS}, an octave a cell")


def residual_values(at: Place) -> Job:
    from shrinkpoint.kernels.scales import residual_symbols as symbols_of

    square = _second(at)
    rows, columns = _factors(square)
    symbols, _, _ = symbols_of(square, rows, columns, 0, 1)
    settings = (rows, columns, 0, np.linspace(0.5, 2, 256, dtype=np.float32))
    return as_oracle(at, "scales.residual_values", (symbols,), settings, 5, note=_ROWS)


def row_kmeans(at: Place) -> Job:
    note = f"{_ROWS}, 15 iterations at most"
    return as_oracle(at, "rows.row_kmeans", (table(at),), (2,), 5, first=_few_rows(at), note=note)


def row_lookup(at: Place) -> Job:
    rows = table(at)
    codes = (at.sample.levels_before(rows.size) % 4).reshape(rows.shape)
    values, note = (codes, np.ascontiguousarray(rows[:, :4])), f"{_ROWS}, 4 entries each"
    return as_oracle(at, "rows.row_lookup", values, (), 5, first=_few_rows(at), note=note)


def _few_rows(at: Place) -> int:
    """Number of rows to compare with an oracle that is a Python loop."""
    return max(1, min(at.n, _PREFIX) // COLUMNS)


def exponent_values(at: Place) -> Job:
    from shrinkpoint.kernels.exponent import exponent_buckets, exponent_quantize, promote

    x = at.sample.after(at.n) - at.sample.before(at.n)
    promotion = promote(exponent_buckets(x), 3)
    levels = exponent_quantize(x, promotion)
    return as_oracle(at, "exponent.exponent_dequantize", (levels,), (promotion.codebook,), 5, note="3 bits")


def _mask(at: Place) -> Any:
    """Mask of the elements whose level changed."""
    return at.sample.levels_before(at.n) != at.sample.levels_after(at.n)


def _rare(at: Place, *, decode: bool) -> Job:
    from shrinkpoint.kernels.sparse_changes import rare_decode, rare_encode

    expected = at.sample.levels_before(at.n)
    symbols = expected.copy()
    symbols[:: -(-at.n // _CHANGES)] += 1
    data = rare_encode(symbols, expected)

    def check() -> str:
        own, usual = symbols[:_PREFIX], expected[:_PREFIX]
        same("changes", rare_encode(own, usual), oracle("sparse_changes").rare_encode(own, usual))
        same("symbols", rare_decode(data, expected), symbols)
        return f"{min(_PREFIX, at.n):,} elements = oracle, all come back"

    call = (lambda: rare_decode(data, expected)) if decode else (lambda: rare_encode(symbols, expected))
    changes = int((symbols != expected).sum())
    return at.job(call, check, 2, width=1, note=f"{changes} changes, {8 * data.size / changes:.1f} bits each")


def pack_mask(at: Place) -> Job:
    from shrinkpoint.kernels.packing import pack_mask as packed

    flags = _mask(at)
    mask = at.device.array(flags)

    def check() -> str:
        same("bits", packed(mask), np.packbits(flags, bitorder="little"))
        return "all = NumPy"

    return at.job(lambda: packed(mask), check, 1.125, width=1, note=f"{flags.mean():.1%} set")


def unpack_mask(at: Place) -> Job:
    from shrinkpoint.kernels.packing import unpack_mask as unpacked

    flags = _mask(at)
    bits = at.device.array(np.packbits(flags, bitorder="little"))

    def check() -> str:
        same("flags", unpacked(bits, at.n), flags)
        return "all come back"

    return at.job(lambda: unpacked(bits, at.n), check, 1.125, width=1, note=f"{flags.mean():.1%} set")


def _steps(at: Place) -> Any:
    """Lossless differences of two checkpoints, whose magnitudes the categories code."""
    from shrinkpoint.kernels.planes import difference

    return difference(at.sample.after(at.n), at.sample.before(at.n))


def split_categories(at: Place) -> Job:
    values, note = (_steps(at),), "differences of float32"
    return as_oracle(at, "planes.split_categories", values, (2,), 8, first=min(at.n, _PREFIX), note=note)


def join_categories(at: Place) -> Job:
    from shrinkpoint.kernels.planes import join_categories as join
    from shrinkpoint.kernels.planes import split_categories as split

    values = _steps(at)
    categories, extra = split(values, 2)

    def check() -> str:
        same("values", join(categories, extra, 2, "uint32"), values)
        return "all come back"

    return at.job(lambda: join(categories, extra, 2, "uint32"), check, 8, note="differences of float32")


def row_column_sums(at: Place) -> Job:
    values, full = (at.sample.levels_before(at.n),), (COLUMNS, 0, 255)
    settings, part = (COLUMNS,), min(at.n, _PREFIX)
    kernel = "scale_classes.row_column_sums"
    return as_oracle(at, kernel, values, settings, 1, full=full, first=part, width=1, note=_ROWS)


def class_sums(at: Place) -> Job:
    from shrinkpoint.kernels.scales import class_sums as classes_of

    rows = at.sample.levels_before(-(-at.n // COLUMNS))
    columns = at.sample.levels_after(at.n)[:COLUMNS]

    def check() -> str:
        few = min(at.n, _PREFIX)
        part = rows[: -(-few // COLUMNS)]
        expected = oracle("scales").class_sums(part, columns, few, 0, 0, 256)
        same("classes", classes_of(part, columns, few), expected)
        return f"{few:,} elements = oracle"

    return at.job(lambda: classes_of(rows, columns, at.n), check, 1, width=1, note=_ROWS)


def pattern_classes(at: Place) -> Job:
    from shrinkpoint.kernels.scales import pattern_classes as classes_of

    patterns = at.sample.before(at.n).view(np.uint32)
    table = (np.arange(1 << 9) % 61).astype(np.uint8)

    def check() -> str:
        expected = oracle("scales").pattern_classes(patterns[:_PREFIX], 23, table)
        same("classes", classes_of(patterns[:_PREFIX], 23, table), expected)
        same("classes", classes_of(patterns, 23, table), table[patterns >> 23])
        return f"{min(at.n, _PREFIX):,} elements = oracle, all = NumPy"

    return at.job(lambda: classes_of(patterns, 23, table), check, 5, note="by sign and exponent")


def _low_rank(at: Place) -> tuple[Any, Any, Any]:
    """Return small signed numbers and factors of rows and columns, drawn from levels."""
    middle = np.int8(LEVELS // 2)
    values = at.sample.levels_before(at.n).view(np.int8) - middle
    others = at.sample.levels_after(at.n).view(np.int8) - middle
    rows, columns = (np.resize(others, (lines, _RANK)) for lines in (-(-at.n // COLUMNS), COLUMNS))
    return values, rows, columns


def low_rank_factors(at: Place) -> Job:
    from shrinkpoint.kernels.prediction import low_rank_factors as factors_of

    numbers, _, _ = _low_rank(at)
    numbers = numbers[: at.n // COLUMNS * COLUMNS]
    heights, few = np.array([numbers.size // COLUMNS]), np.array([max(1, _PREFIX // 16 // COLUMNS)])

    def check() -> str:
        part = numbers[: int(few[0]) * COLUMNS]
        for found, expected in zip(
            factors_of(part, few, COLUMNS), oracle("prediction").low_rank_factors(part, few, COLUMNS, 0), strict=True
        ):
            same("factors", found, expected)
        return f"{part.size:,} elements = oracle"

    return at.job(lambda: factors_of(numbers, heights, COLUMNS), check, 1, width=1, note=f"rows of {COLUMNS}")


def low_rank_predictions(at: Place) -> Job:
    from shrinkpoint.kernels.prediction import low_rank_predictions as predictions_of

    _, rows, columns = _low_rank(at)
    heights = np.array([rows.shape[0]])

    def check() -> str:
        n = min(at.n, _PREFIX)
        few = np.array([-(-n // COLUMNS)])
        part = rows[: int(few[0])]
        for found, expected in zip(
            predictions_of(part, columns, few, n),
            oracle("prediction").low_rank_predictions(part, columns, few, n, 0),
            strict=True,
        ):
            same("predictions", found, expected)
        return f"{n:,} elements = oracle"

    note = f"rank {_RANK}, rows of {COLUMNS}"
    return at.job(lambda: predictions_of(rows, columns, heights, at.n), check, 2, width=1, note=note)
