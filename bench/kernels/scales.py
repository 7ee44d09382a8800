"""Second moments by factors of rows and columns, and classes for their contexts."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from shrinkpoint.kernels import histogram
from shrinkpoint.kernels import scales as kernels
from shrinkpoint.kernels.backend.floats import FORMATS

from ..harness import Case, Job, host, same
from .place import COLUMNS, FEW, PREFIX, ROUNDING, ROWS, Call, Place, comes_back, oracle, require


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject."""
    return [
        at.case("factor_sums", lambda: sums(at)),
        at.case("residual_symbols", lambda: symbols(at)),
        at.case("residual_values", lambda: values(at)),
        at.case("split_octaves", lambda: octaves(at, decode=False), unit="Gsym/s"),
        at.case("join_octaves", lambda: octaves(at, decode=True), unit="Gsym/s"),
        at.case("row_column_sums", lambda: row_column_sums(at), on="cpu"),
        at.case("class_sums", lambda: classes(at), on="cpu"),
        at.case("pattern_classes", lambda: patterns(at), on="cpu"),
        at.case("residual_factors", lambda: factors(at), unit="us", on="cpu"),
    ]


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


def _whole(means: tuple[Any, Any]) -> Any:
    """Return the shape of the matrix, as back ends take it."""
    return np.array([[mean.size for mean in means]])


def symbols(at: Place) -> Job:
    """Round the residuals over the factors."""
    square = _square(at)
    means, first = _factors(square), min(at.prefix, square.size)
    oracle = *means, _whole(means), 0, 8, None
    call = Call("scales.residual_symbols", (square,), (*means, 0, 1), oracle, first=first, within=ROUNDING)
    return at.compared(call, 5, note=f"{ROWS}, an octave a cell")


def values(at: Place) -> Job:
    """Restore residuals times the factors."""
    square = _square(at)
    means = _factors(square)
    found = kernels.residual_symbols(square, *means, 0, 1)[0]
    table = np.linspace(0.5, 2, 256, dtype=np.float32)
    call = Call("scales.residual_values", (found,), (*means, 0, table), (*means, _whole(means), 0, table))
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
    found = lambda: kernels.class_sums(part, columns, few)  # noqa: E731
    check = comes_back("classes", found, expected, f"{few:,} elements = oracle")
    return at.job(lambda: kernels.class_sums(rows, columns, at.n), check, 1, width=1, note=ROWS)


def patterns(at: Place) -> Job:
    """Look up classes by sign and exponent."""
    values, table = at.sample.before(at.n).view(np.uint32), (np.arange(1 << 9) % 61).astype(np.uint8)
    call = Call(
        "scales.pattern_classes", (values,), (23, table), first=min(at.n, FEW),
        back=lambda found: (found, table[values >> 23]),
    )  # fmt: skip
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
