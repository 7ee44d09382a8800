"""Cases of the kernels over arrays that `elementwise`, `coders` and `codebooks` leave out.

Inverses, the optimizer's symbols, rows of tables, and the lossless categories, classes and products. Each check
compares a prefix with the oracle, bit for bit where the kernel promises that, and where there is an inverse the whole
with what went in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .elementwise import LEVELS, Place, oracle
from .harness import Case, Job, host, near, same

_COLUMNS = 64
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
        few.case("row_quantize 2 bit adaptive", lambda here: _row_quantize(here, 2)),
        few.case("row_quantize 3 bit adaptive", lambda here: _row_quantize(here, 3)),
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
        at.case("row_products", row_products),
        at.case("column_products", column_products),
        at.case("product_classes", product_classes),
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
    from shrinkpoint.kernels.grid import grid_symbols as symbols_of

    x, square = _moments(at)
    a, b = at.device.array(x), at.device.array(square)

    def check() -> str:
        p = at.prefix
        (found, sums, counts), expected = (
            symbols_of(a[:p], b[:p], 0.5),
            oracle("grid").grid_symbols(x[:p], square[:p], 0.5),
        )
        same("symbols and counts", (found, counts), (expected[0], expected[2]))
        near("sums", sums, expected[1], _ROUNDING, _ROUNDING)
        return f"{at.says}, sums to 1e-9"

    return at.job(lambda: symbols_of(a, b, 0.5), check, 9, note="step 0.5")


def grid_values(at: Place) -> Job:
    from shrinkpoint.kernels.grid import grid_symbols as symbols_of
    from shrinkpoint.kernels.grid import grid_values as values_of

    x, square = _moments(at)
    a, b = at.device.array(x), at.device.array(square)
    symbols, _, _ = symbols_of(a, b, 0.5)
    table = np.linspace(-3, 3, 256, dtype=np.float32)

    def check() -> str:
        p = at.prefix
        expected = oracle("grid").grid_values(host(symbols)[:p], square[:p], table)
        same("values", values_of(symbols[:p], b[:p], table), expected)
        return at.says

    return at.job(lambda: values_of(symbols, b, table), check, 9)


def _second(at: Place) -> Any:
    """Second moments as a matrix of `_COLUMNS` columns, flat."""
    return np.square(at.sample.before(at.n)[: at.n // _COLUMNS * _COLUMNS])


def factor_sums(at: Place) -> Job:
    from shrinkpoint.kernels.rank_one import factor_sums as sums_of

    square = _second(at)
    x, part = at.device.array(square), at.prefix // _COLUMNS * _COLUMNS

    def check() -> str:
        for mine, expected in zip(
            sums_of(x[:part], _COLUMNS), oracle("rank_one").factor_sums(square[:part], _COLUMNS), strict=True
        ):
            near("sums", mine, expected, _ROUNDING, _ROUNDING)
        return f"{part:,} elements = oracle to 1e-9"

    return at.job(lambda: sums_of(x, _COLUMNS), check, 4, note=f"rows of {_COLUMNS}")


def _factors(square: Any) -> tuple[Any, Any]:
    """Row and column means, the second over their mean, as of a matrix of rank one."""
    matrix = square.reshape(-1, _COLUMNS)
    rows, columns = matrix.mean(axis=1), matrix.mean(axis=0)
    tiny = np.float32(1e-30)
    return np.maximum(rows, tiny), np.maximum(columns / max(float(columns.mean()), 1e-30), tiny).astype(np.float32)


def residual_symbols(at: Place) -> Job:
    from shrinkpoint.kernels.rank_one import residual_symbols as symbols_of

    square = _second(at)
    rows, columns = _factors(square)
    x, p = at.device.array(square), min(at.prefix, square.size)

    def check() -> str:
        found, sums, counts = symbols_of(x[:p], rows, columns, 0, 1)
        expected = oracle("rank_one").residual_symbols(square[:p], rows, columns, 0, 8)
        same("symbols and counts", (found, counts), (expected[0], expected[2]))
        near("sums", sums, expected[1], _ROUNDING, _ROUNDING)
        return f"{p:,} elements = oracle, sums to 1e-9"

    return at.job(lambda: symbols_of(x, rows, columns, 0, 1), check, 5, note=f"rows of {_COLUMNS}, an octave a cell")


def residual_values(at: Place) -> Job:
    from shrinkpoint.kernels.rank_one import residual_symbols as symbols_of
    from shrinkpoint.kernels.rank_one import residual_values as values_of

    square = _second(at)
    rows, columns = _factors(square)
    symbols, _, _ = symbols_of(at.device.array(square), rows, columns, 0, 1)
    table, p = np.linspace(0.5, 2, 256, dtype=np.float32), min(at.prefix, square.size)

    def check() -> str:
        expected = oracle("rank_one").residual_values(host(symbols)[:p], rows, columns, 0, table)
        same("values", values_of(symbols[:p], rows, columns, 0, table), expected)
        return f"{p:,} elements = oracle"

    return at.job(lambda: values_of(symbols, rows, columns, 0, table), check, 5, note=f"rows of {_COLUMNS}")


def _table(at: Place) -> tuple[Any, int]:
    """The weights as rows of an embedding table, and how many of them an oracle looks at."""
    table = at.sample.before(at.n)[: at.n // _COLUMNS * _COLUMNS].reshape(-1, _COLUMNS)
    return table, max(1, min(at.n, _PREFIX) // _COLUMNS)


def _row_quantize(at: Place, bits: int) -> Job:
    from shrinkpoint.kernels.rows import row_quantize

    table, part = _table(at)
    x = at.device.array(table)

    def check() -> str:
        expected = oracle("rows").row_quantize(table[:part], bits, "adaptive", num_bins=25, ratio=1.0)
        same("codes and ranges", row_quantize(x[:part], bits, "adaptive"), expected)
        return f"{part:,} rows = oracle"

    return at.job(lambda: row_quantize(x, bits, "adaptive"), check, 5, note=f"rows of {_COLUMNS}, 25 bins")


def row_kmeans(at: Place) -> Job:
    from shrinkpoint.kernels.rows import row_kmeans as fitted

    table, part = _table(at)
    x = at.device.array(table)

    def check() -> str:
        same("codes and codebooks", fitted(x[:part], 2), oracle("rows").row_kmeans(table[:part], 2))
        return f"{part:,} rows = oracle"

    return at.job(lambda: fitted(x, 2), check, 5, note=f"rows of {_COLUMNS}, 15 iterations at most")


def row_lookup(at: Place) -> Job:
    from shrinkpoint.kernels.rows import row_lookup as values_of

    table, part = _table(at)
    codes = at.device.array((at.sample.levels_before(table.size) % 4).reshape(table.shape))
    books = at.device.array(np.ascontiguousarray(table[:, :4]))

    def check() -> str:
        few = codes[:part], books[:part]
        same("values", values_of(*few), oracle("rows").row_lookup(*(host(z) for z in few)))
        return f"{part:,} rows = oracle"

    return at.job(lambda: values_of(codes, books), check, 5, note=f"rows of {_COLUMNS}, 4 entries each")


def exponent_values(at: Place) -> Job:
    from shrinkpoint.kernels.exponent import exponent_buckets, exponent_dequantize, exponent_quantize, promote

    x = at.device.array(at.sample.after(at.n) - at.sample.before(at.n))
    promotion = promote(exponent_buckets(x), 3)
    levels = exponent_quantize(x, promotion)

    def check() -> str:
        p = at.prefix
        expected = oracle("exponent").exponent_dequantize(host(levels)[:p], promotion.codebook)
        same("patterns", exponent_dequantize(levels[:p], promotion.codebook), expected)
        return at.says

    return at.job(lambda: exponent_dequantize(levels, promotion.codebook), check, 5, note="3 bits")


def _mask(at: Place) -> Any:
    """Which levels changed."""
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
    from shrinkpoint.kernels.mask import pack_mask as packed

    flags = _mask(at)
    mask = at.device.array(flags)

    def check() -> str:
        same("bits", packed(mask), np.packbits(flags, bitorder="little"))
        return "all = NumPy"

    return at.job(lambda: packed(mask), check, 1.125, width=1, note=f"{flags.mean():.1%} set")


def unpack_mask(at: Place) -> Job:
    from shrinkpoint.kernels.mask import unpack_mask as unpacked

    flags = _mask(at)
    bits = at.device.array(np.packbits(flags, bitorder="little"))

    def check() -> str:
        same("flags", unpacked(bits, at.n), flags)
        return "all come back"

    return at.job(lambda: unpacked(bits, at.n), check, 1.125, width=1, note=f"{flags.mean():.1%} set")


def _steps(at: Place) -> Any:
    """Lossless differences of two checkpoints: what the categories are made of."""
    from shrinkpoint.kernels.planes import difference

    return difference(at.sample.after(at.n), at.sample.before(at.n))


def split_categories(at: Place) -> Job:
    from shrinkpoint.kernels.categories import split_categories as split

    values = _steps(at)

    def check() -> str:
        same("streams", split(values[:_PREFIX], 2), oracle("categories").split_categories(values[:_PREFIX], 2))
        return f"{min(at.n, _PREFIX):,} elements = oracle"

    return at.job(lambda: split(values, 2), check, 8, note="differences of float32")


def join_categories(at: Place) -> Job:
    from shrinkpoint.kernels.categories import join_categories as join
    from shrinkpoint.kernels.categories import split_categories as split

    values = _steps(at)
    categories, extra = split(values, 2)

    def check() -> str:
        same("values", join(categories, extra, 2, "uint32"), values)
        return "all come back"

    return at.job(lambda: join(categories, extra, 2, "uint32"), check, 8, note="differences of float32")


def row_column_sums(at: Place) -> Job:
    from shrinkpoint.kernels.scale_classes import row_column_sums as sums_of

    values = at.sample.levels_before(at.n)

    def check() -> str:
        same(
            "sums",
            sums_of(values[:_PREFIX], _COLUMNS),
            oracle("scale_classes").row_column_sums(values[:_PREFIX], _COLUMNS, 0, 0, 255),
        )
        return f"{min(at.n, _PREFIX):,} elements = oracle"

    return at.job(lambda: sums_of(values, _COLUMNS), check, 1, width=1, note=f"rows of {_COLUMNS}")


def class_sums(at: Place) -> Job:
    from shrinkpoint.kernels.scale_classes import class_sums as classes_of

    rows = at.sample.levels_before(-(-at.n // _COLUMNS))
    columns = at.sample.levels_after(at.n)[:_COLUMNS]

    def check() -> str:
        few = min(at.n, _PREFIX)
        part = rows[: -(-few // _COLUMNS)]
        expected = oracle("scale_classes").class_sums(part, columns, few, 0, 0, 256, None)
        same("classes", classes_of(part, columns, few), expected)
        return f"{few:,} elements = oracle"

    return at.job(lambda: classes_of(rows, columns, at.n), check, 1, width=1, note=f"rows of {_COLUMNS}")


def pattern_classes(at: Place) -> Job:
    from shrinkpoint.kernels.scale_classes import pattern_classes as classes_of

    patterns = at.sample.before(at.n).view(np.uint32)
    table = (np.arange(1 << 9) % 61).astype(np.uint8)

    def check() -> str:
        expected = oracle("scale_classes").pattern_classes(patterns[:_PREFIX], 23, table)
        same("classes", classes_of(patterns[:_PREFIX], 23, table), expected)
        same("classes", classes_of(patterns, 23, table), table[patterns >> 23])
        return f"{min(at.n, _PREFIX):,} elements = oracle, all = NumPy"

    return at.job(lambda: classes_of(patterns, 23, table), check, 5, note="by sign and exponent")


def _low_rank(at: Place) -> tuple[Any, Any, Any]:
    """Return small signed numbers and factors of rows and columns, drawn from levels."""
    middle = np.int8(LEVELS // 2)
    values = at.sample.levels_before(at.n).view(np.int8) - middle
    others = at.sample.levels_after(at.n).view(np.int8) - middle
    rows, columns = (np.resize(others, (lines, _RANK)) for lines in (-(-at.n // _COLUMNS), _COLUMNS))
    return values, rows, columns


_OF_RANK = f"rank {_RANK}, rows of {_COLUMNS}"


def row_products(at: Place) -> Job:
    from shrinkpoint.kernels.integer_products import row_products as products_of

    values, _, columns = _low_rank(at)

    def check() -> str:
        few = values[:_PREFIX]
        same("products", products_of(few, columns), oracle("integer_products").row_products(few, columns, 0))
        return f"{few.size:,} elements = oracle"

    return at.job(lambda: products_of(values, columns), check, 1, width=1, note=_OF_RANK)


def column_products(at: Place) -> Job:
    from shrinkpoint.kernels.integer_products import column_products as products_of

    values, rows, _ = _low_rank(at)

    def check() -> str:
        few = values[:_PREFIX]
        part = rows[: -(-few.size // _COLUMNS)]
        expected = oracle("integer_products").column_products(few, part, _COLUMNS, 0)
        same("products", products_of(few, part, _COLUMNS), expected)
        return f"{few.size:,} elements = oracle"

    return at.job(lambda: products_of(values, rows, _COLUMNS), check, 1, width=1, note=_OF_RANK)


def product_classes(at: Place) -> Job:
    from shrinkpoint.kernels.integer_products import product_classes as classes_of

    _, rows, columns = _low_rank(at)

    def check() -> str:
        few = min(at.n, _PREFIX)
        part = rows[: -(-few // _COLUMNS)]
        expected = oracle("integer_products").product_classes(part, columns, few, 0, 5, 6)
        same("classes", classes_of(part, columns, few, shift=5, most=6), expected)
        return f"{few:,} elements = oracle"

    return at.job(lambda: classes_of(rows, columns, at.n, shift=5, most=6), check, 1, width=1, note=_OF_RANK)
