"""Moments: factors, residuals, the grid of first ones, low-rank predictions."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np

from shrinkpoint.kernels import histogram, prediction
from shrinkpoint.kernels import scales as kernels
from shrinkpoint.kernels.backend.floats import FORMATS
from shrinkpoint.kernels.moment_grid import grid_symbols

from ..harness import Case, Job, host, same
from .place import COLUMNS, FEW, LEVELS, PREFIX, ROUNDING, ROWS, Call, Place, comes_back, oracle, require

_RANK = 8
_TABLE = np.linspace(-3, 3, 256, dtype=np.float32)


def cases(at: Place) -> list[Case]:
    """Return the cases of the subjects."""
    return [
        at.case("grid_symbols", lambda: grid(at, "grid_symbols", 0.5)),
        at.case("grid_values", lambda: grid(at, "grid_values", _TABLE)),
        at.case("grid_products", lambda: grid(at, "grid_products", _TABLE)),
        at.case("factor_sums", lambda: sums(at)),
        at.case("residual_symbols", lambda: symbols(at)),
        at.case("residual_values", lambda: values(at)),
        at.case("split_octaves", lambda: octaves(at, decode=False), unit="Gsym/s"),
        at.case("join_octaves", lambda: octaves(at, decode=True), unit="Gsym/s"),
        at.case("row_column_sums", lambda: row_column_sums(at), on="cpu"),
        at.case("class_sums", lambda: classes(at), on="cpu"),
        at.case("pattern_classes", lambda: patterns(at), on="cpu"),
        at.case("residual_factors", lambda: factors(at), unit="us", on="cpu"),
        at.case("low_rank_factors", lambda: low_rank_factors(at), on="cpu"),
        at.case("low_rank_predictions", lambda: low_rank(at, "predictions", 2), on="cpu"),
        at.case("low_rank_differences", lambda: low_rank(at, "differences", 3), on="cpu"),
        at.case("zigzag", lambda: mapped(at, "zigzag", np.int8), on="cpu"),
        at.case("unzigzag", lambda: mapped(at, "unzigzag", np.uint8), on="cpu"),
    ]


# ------------------------------------------------------------------------------------------------------ first moments


def grid(at: Place, name: str, setting: Any) -> Job:
    """Round moments to the grid, look up those of symbols, or compare the two.

    A first moment and the square of its scale: two checkpoints' weights stand for them.
    """
    x, square = at.pair()[0], np.square(at.pair()[1])
    given: tuple[Any, ...] = x, square
    within, note = ROUNDING, ""
    if name == "grid_symbols":
        note = "step 0.5"
    else:
        found = grid_symbols(x, square, 0.5)[0]
        given, within = ((found, square), 0.0) if name == "grid_values" else ((x, square, found), ROUNDING)
    return at.compared(Call(f"moment_grid.{name}", given, (setting,), within=within), 9, note=note)


# ----------------------------------------------------------------------------------------------------- second moments


def _square(at: Place) -> Any:
    """Second moments as a matrix of `COLUMNS` columns, flat."""
    return np.square(at.sample.before(at.n)[: at.n // COLUMNS * COLUMNS])


def sums(at: Place) -> Job:
    """Sum rows and columns."""
    first = at.prefix // COLUMNS * COLUMNS
    call = Call("scales.factor_sums", (_square(at),), (COLUMNS,), first=first, within=ROUNDING)
    return at.compared(call, 4, note=ROWS)


def _factors(square: Any) -> tuple[Any, Any]:
    """Row and column means, the second over their mean, as of a matrix of rank one."""
    matrix, tiny = square.reshape(-1, COLUMNS), np.float32(1e-30)
    rows, columns = matrix.mean(axis=1), matrix.mean(axis=0)
    return np.maximum(rows, tiny), np.maximum(columns / max(float(columns.mean()), 1e-30), tiny).astype(np.float32)


def _shapes(means: tuple[Any, Any]) -> Any:
    """Return the shape of the matrix, as back ends take it."""
    return np.array([[mean.size for mean in means]])


def symbols(at: Place) -> Job:
    """Round the residuals over the factors."""
    square = _square(at)
    means, first = _factors(square), min(at.prefix, square.size)
    oracle = *means, _shapes(means), 0, 8, None
    call = Call("scales.residual_symbols", (square,), (*means, 0, 1), oracle, first=first, within=ROUNDING)
    return at.compared(call, 5, note=f"{ROWS}, an octave a cell")


def values(at: Place) -> Job:
    """Restore residuals times the factors."""
    square = _square(at)
    means = _factors(square)
    found = kernels.residual_symbols(square, *means, 0, 1)[0]
    table = np.linspace(0.5, 2, 256, dtype=np.float32)
    call = Call("scales.residual_values", (found,), (*means, 0, table), (*means, _shapes(means), 0, table))
    return at.compared(call, 5, note=ROWS)


def octaves(at: Place, *, decode: bool) -> Job:
    """Split log buckets into octaves, signs and fractions."""
    bits = 1
    buckets, values = FORMATS["float32"].buckets(bits), at.sample.before(at.n)
    index = histogram.bucket_index(at.device.array(values), bits)
    found = kernels.split_octaves(index, bits, buckets)
    if found is not None:
        streams = {name: at.device.array(getattr(found, name)) for name in ("symbols", "negative", "fraction")}
        found = dataclasses.replace(found, **streams)

    def check() -> str:
        require(found is not None, "the octaves do not fit a byte")
        same("indices", join(), index)
        expected = oracle("scales").split_octaves(host(index[:PREFIX]), bits, buckets)
        same("octaves", kernels.split_octaves(index[:PREFIX], bits, buckets), expected)
        return "round trip, prefix = oracle"

    def join() -> Any:
        return None if found is None else kernels.join_octaves(found, bits, buckets)

    call = join if decode and found is not None else lambda: kernels.split_octaves(index, bits, buckets)
    crosses = ", the streams come to the host" if at.device.gpu and not decode else ""
    return at.symbols(call, check, [], f"relative error 1/4{crosses}")


def row_column_sums(at: Place) -> Job:
    """Sum the levels of rows and columns."""
    call = Call("scales.row_column_sums", (at.levels()[0],), (COLUMNS,), (COLUMNS, 0, 255), first=min(at.n, FEW))
    return at.compared(call, 1, width=1, note=ROWS)


def classes(at: Place) -> Job:
    """Add the classes of rows and columns."""
    rows, columns = at.sample.levels_before(-(-at.n // COLUMNS)), at.sample.levels_after(at.n)[:COLUMNS]
    few = min(at.n, FEW)
    part = rows[: -(-few // COLUMNS)]
    expected = oracle("scales").class_sums(part, columns, few, 0, 0, 256)
    check = comes_back("classes", partial(kernels.class_sums, part, columns, few), expected, _few(few))
    return at.job(lambda: kernels.class_sums(rows, columns, at.n), check, 1, width=1, note=ROWS)


def _few(elements: int) -> str:
    return f"{elements:,} elements = oracle"


def patterns(at: Place) -> Job:
    """Look up classes by sign and exponent."""
    values, table = at.sample.before(at.n).view(np.uint32), (np.arange(1 << 9) % 61).astype(np.uint8)
    back = lambda found: (found, table[values >> 23])  # noqa: E731
    call = Call("scales.pattern_classes", (values,), (23, table), first=min(at.n, FEW), back=back)
    return at.compared(call, 5, note="by sign and exponent")


def factors(at: Place) -> Job:
    """Compute the value of each symbol."""
    counts = np.zeros(256)
    counts[2:] = np.bincount(at.sample.before(at.n).view(np.uint8)[::4], minlength=256)[2:]
    # Elements at the center of their cell have the cell's ratio, a power of two if it is whole octaves away.
    whole = (counts > 0) & (np.arange(256) % 4 == 0)
    return at.table(
        lambda: kernels.residual_factors(counts * 2.0**15, counts, 0.25),
        lambda: np.exp2((np.flatnonzero(whole) - 128) / 4.0).astype("f4"),
        "256 symbols, a quarter of an octave a cell",
        seen=lambda found: found[whole],
        says="whole octaves = powers of two",
    )


# -------------------------------------------------------------------------------------------------------- predictions


def _signed(at: Place) -> tuple[Any, Any]:
    """Return small signed numbers, drawn from levels."""
    before, after = (part.view(np.int8) - np.int8(LEVELS // 2) for part in at.levels())
    return before, after


def low_rank_factors(at: Place) -> Job:
    """Fit the factors of a matrix."""
    numbers = _signed(at)[0][: at.n // COLUMNS * COLUMNS]
    heights, few = np.array([numbers.size // COLUMNS]), np.array([max(1, FEW // 16 // COLUMNS)])
    part = numbers[: int(few[0]) * COLUMNS]
    expected = oracle("prediction").low_rank_factors(part, few, COLUMNS, 0)
    check = comes_back("factors", partial(prediction.low_rank_factors, part, few, COLUMNS), expected, _few(part.size))
    return at.job(lambda: prediction.low_rank_factors(numbers, heights, COLUMNS), check, 1, width=1, note=ROWS)


def low_rank(at: Place, what: str, moves: int) -> Job:
    """Multiply the factors, or subtract the product from the numbers."""
    numbers, other = _signed(at)
    rows, columns = (np.resize(other, (lines, _RANK)) for lines in (-(-at.n // COLUMNS), COLUMNS))
    kernel, reference = (getattr(m, f"low_rank_{what}") for m in (prediction, oracle("prediction")))

    def given(n: int) -> tuple[Any, ...]:
        heights = np.array([-(-n // COLUMNS)])
        part = rows[: int(heights[0])]
        return (part, columns, heights, n) if what == "predictions" else (numbers[:n], part, columns, heights)

    few = min(at.n, FEW)
    check = comes_back(what, partial(kernel, *given(few)), reference(*given(few), 0), _few(few))
    return at.job(partial(kernel, *given(at.n)), check, moves, width=1, note=f"rank {_RANK}, {ROWS}")


def mapped(at: Place, name: str, dtype: type[np.generic]) -> Job:
    """Map signed bytes to unsigned ones, or back."""
    values = np.ascontiguousarray(_signed(at)[0]).view(dtype)
    return at.compared(Call(f"prediction.{name}", (values,)), 2, width=1)
