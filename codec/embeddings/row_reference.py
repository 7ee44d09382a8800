"""Rows of a matrix as records of numbers and packed codes, in one style for each row.

A *record* holds a row: the float32 numbers of its quantizer, then its codes, bit-packed; or the row's own bytes. Rows
of one *style* (quantizer and width) have records of one length and lie in one array, in the order of the rows, so a
reference is as small as the checkpoint's codes, and any subset of rows is an index.

The parameters of the greedy search, which a style has, are chosen on a small sample of rows.

Source: Check-N-Run, section 5.2 ("Parameter selection").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.backend.arrays import bytes_of, is_torch, on_gpu, placed_with
from ...kernels.backend.arrays import numbers as viewed
from ...kernels.packing import pack_bits, unpack_bits
from ...kernels.rows import row_dequantize, row_kmeans, row_lookup, row_quantize
from ..base import CHUNK
from ..errors import CorruptDataError
from ..groups import FilledReference
from ..parallel import map_chunks
from ..state.casting import float_values, rounded
from ..state.leaves import Array, LeafSpec, NpArray, as_bytes, bytes_of_each, from_bytes, on_host

UNIFORM = ("adaptive", "asymmetric", "symmetric")
METHODS = (*UNIFORM, "kmeans")
WIDTHS = (2, 3, 4, 8)
MOST_STYLES = 255
_SMALLEST = 2.0**-110
_RELATIVE = 2.0**-20
"""Where the step of a row is below `_SMALLEST`, float32 underflows or the row is constant: an error above this share of
the row's largest magnitude means that its quantizer has lost it."""


@dataclass(frozen=True, order=True, slots=True)
class Style:
    """Storage of a row: a quantizer and its width; `RAW` is the row itself.

    Args:
        method: one of `METHODS`, or "raw".
        bits: width of a code, one of `WIDTHS`; 0 for "raw".
        num_bins: steps of the greedy search ("adaptive" only, else 0).
        ratio: share of the range it walks through ("adaptive" only, else 0).
    """

    method: str
    bits: int = 0
    num_bins: int = 0
    ratio: float = 0.0

    @property
    def numbers(self) -> int:
        """Number of float32 values at the start of a record."""
        if self.method == "raw":
            return 0
        # A symmetric range is known by its lower end.
        return {"symmetric": 1, "kmeans": 1 << self.bits}.get(self.method, 2)

    @property
    def fineness(self) -> int:
        """Bits per element of the codes; more than any code for raw rows."""
        return self.bits or 64

    def length(self, columns: int, itemsize: int) -> int:
        """Bytes of a record; the codes of eight columns end on a byte."""
        if self.method == "raw":
            return columns * itemsize
        return 4 * self.numbers + -(-columns // 8) * self.bits


RAW = Style("raw")


@dataclass(frozen=True, slots=True)
class RowsReference(FilledReference):
    """Reference of an array as row records, which decode to its values.

    Args:
        table: the styles in use, ascending.
        style: uint8 [R] (uint16 while references are put together), each row's number in the table.
        records: uint8 [rows of that style, length of a record], one array a style.
    """

    table: tuple[Style, ...]
    style: NpArray
    records: tuple[NpArray, ...]

    def fill(self, spec: LeafSpec, out: NpArray) -> None:
        """Write the bytes of the decoded values."""
        columns = row_length(spec)
        data, step = out.reshape(self.style.size, columns * spec.itemsize), max(1, CHUNK // columns)

        def one(part: tuple[int, RowsReference]) -> None:
            start, reference = part
            data[start : start + step] = reference.decoded(spec)

        map_chunks(one, zip(range(0, self.style.size, step), self.split(step), strict=True))

    def fill_there(self, spec: LeafSpec, out: Array) -> None:
        """Decode the rows into a flat tensor on a GPU, from records that go there."""
        columns = row_length(spec)
        data, step = out.view(self.style.size, columns), max(1, CHUNK // columns)
        for start, reference in zip(range(0, self.style.size, step), self.split(step), strict=True):
            data[start : start + step] = reference.near(data, spec)

    def near(self, x: Array, spec: LeafSpec) -> Array:
        """Return the decoded rows in the library and on the device of a matrix."""
        shape = self.style.size, row_length(spec)
        if not on_gpu(x):
            return from_bytes(self.decoded(spec).reshape(-1), spec).reshape(shape)
        out = x.new_empty(shape)
        for style, at, records in self.groups():
            if not at.size:
                continue
            there = placed_with(records, x)
            raw = style.method == "raw"
            values = there.reshape(-1).view(x.dtype) if raw else dequantized(there, style, shape[1]).to(x.dtype)
            out[placed_with(at, x)] = values.reshape(at.size, shape[1])
        return out

    def decoded(self, spec: LeafSpec) -> NpArray:
        """Return the bytes of the rows, uint8 [R, bytes of a row]."""
        columns = row_length(spec)
        out = np.empty((self.style.size, columns * spec.itemsize), np.uint8)
        for style, at, records in self.groups():
            values = records if style.method == "raw" else _narrowed(dequantized(records, style, columns), spec)
            out[slice(None) if at.size == out.shape[0] else at] = values
        return out

    def groups(self) -> list[tuple[Style, NpArray, NpArray]]:
        """Return each style with the ascending numbers of its rows, and their records."""
        at = [np.flatnonzero(self.style == number) for number in range(len(self.table))]
        return list(zip(self.table, at, self.records, strict=True))

    def split(self, step: int) -> list[RowsReference]:
        """Split into references of `step` rows each, without a copy of any record."""
        starts = range(0, self.style.size, step)
        if len(starts) <= 1:
            return [self] * len(starts)
        counts = [np.add.reduceat(self.style == k, list(starts), dtype=np.int64) for k in range(len(self.table))]
        ends = [[0, *itertools.accumulate(c.tolist())] for c in counts]
        return [
            RowsReference(
                self.table,
                self.style[start : start + step],
                tuple(r[e[i] : e[i + 1]] for r, e in zip(self.records, ends, strict=True)),
            )
            for i, start in enumerate(starts)
        ]

    def take(self, rows: NpArray) -> RowsReference:
        """Return the reference of some rows, given by ascending numbers."""
        records = []
        for number, group in enumerate(self.records):
            rank = np.cumsum(self.style == number) - 1
            records.append(group[rank[rows[self.style[rows] == number]]])
        return RowsReference(self.table, self.style[rows], tuple(records))


def row_length(spec: LeafSpec) -> int:
    """Return the number of elements of a row, for rows along the first axis."""
    return spec.size // spec.shape[0]


def all_of(style: Style, records: NpArray) -> RowsReference:
    """Return the reference of rows that all have one style."""
    return RowsReference((style,), np.zeros(records.shape[0], np.uint8), (records,))


def joined(parts: Sequence[RowsReference]) -> RowsReference:
    """Concatenate the rows of several references, with a table of the styles in use.

    Raises:
        CorruptDataError: they are more than `MOST_STYLES`.
    """
    used = {p.table[k] for p in parts for k in np.flatnonzero([r.shape[0] for r in p.records])}
    table = tuple(sorted(used))
    if len(table) > MOST_STYLES:
        raise CorruptDataError(f"rows: {len(table)} styles, more than {MOST_STYLES}")
    style = np.concatenate([_renumbered(p, table) for p in parts]).astype(np.uint8)
    records = [
        np.concatenate([r for p in parts for s, r in zip(p.table, p.records, strict=True) if s == wanted])
        for wanted in table
    ]
    return RowsReference(table, style, tuple(records))


def replaced(before: RowsReference, at: NpArray, by: RowsReference) -> RowsReference:
    """Return `before` with the rows at ascending numbers `at` replaced by those of `by`."""
    table = tuple(sorted({*before.table, *by.table}))
    style = _renumbered(before, table)
    style[at] = _renumbered(by, table)
    kept = np.ones(style.size, bool)
    kept[at] = False
    old = {s: (rows, records) for s, rows, records in before.groups()}
    new = {s: (at[rows], records) for s, rows, records in by.groups()}
    records = []
    for number, wanted in enumerate(table):
        rows = np.flatnonzero(style == number)
        length = (old.get(wanted) or new[wanted])[1].shape[1]
        out = np.empty((rows.size, length), np.uint8)
        if wanted in old:
            own = kept[old[wanted][0]]
            out[np.searchsorted(rows, old[wanted][0][own])] = old[wanted][1][own]
        if wanted in new:
            out[np.searchsorted(rows, new[wanted][0])] = new[wanted][1]
        records.append(out)
    return RowsReference(table, style, tuple(records))


def _renumbered(reference: RowsReference, table: tuple[Style, ...]) -> NpArray:
    """Return the style of each row as a number in another table of styles."""
    number = np.array([table.index(s) if s in table else 0 for s in reference.table], np.uint16)
    out: NpArray = number[reference.style]
    return out


def same_records(reference: RowsReference, other: RowsReference) -> NpArray:
    """Return bool [R]: whether each row has the same style and record in both references."""
    same = np.zeros(reference.style.size, bool)
    for number, style in enumerate(reference.table):
        if style not in other.table:
            continue
        mine, theirs = reference.style == number, other.style == other.table.index(style)
        both = np.flatnonzero(mine & theirs)
        a, b = reference.records[number], other.records[other.table.index(style)]
        same[both] = (a[(np.cumsum(mine) - 1)[both]] == b[(np.cumsum(theirs) - 1)[both]]).all(axis=1)
    return same


def quantized(x: Array, spec: LeafSpec, style: Style) -> tuple[NpArray, NpArray]:
    """Return records of rows, and which rows the style cannot hold (not finite, out of range).

    Args:
        x: [R, D] NumPy or torch, on any device; quantized where it is.
        spec: of the array these rows are of.
        style: how to keep them.

    Returns:
        records uint8 [R, length], lost bool [R].
    """
    return checked(bytes_of_each([records_of(x, style).reshape(-1)])[0].reshape(x.shape[0], -1), x, spec, style)


def records_of(x: Array, style: Style) -> Array:
    """Return the records of rows, uint8 [R, length], on a GPU if x is there."""
    if style.method == "raw":
        return _bytes_of(x) if on_gpu(x) else as_bytes(x.reshape(-1)).reshape(x.shape[0], -1)
    if style.method == "kmeans":
        codes, *found = row_kmeans(x, style.bits)
    else:
        search = {"num_bins": style.num_bins, "ratio": style.ratio} if style.method == "adaptive" else {}
        codes, *found = row_quantize(x, style.bits, style.method, **search)  # type: ignore[arg-type]
        found = [one[:, None] for one in (found[1:] if style.method == "symmetric" else found)]
    parts = [*map(_bytes_of, found), pack_codes(codes, style.bits)]
    return _side_by_side(parts) if on_gpu(x) else np.concatenate([*map(on_host, parts)], axis=1)


def checked(records: NpArray, x: Array, spec: LeafSpec, style: Style) -> tuple[NpArray, NpArray]:
    """Return records of rows, and which of the rows x the style cannot hold."""
    if style.method == "raw":
        return records, np.zeros(x.shape[0], bool)
    columns, numbers = x.shape[1], _numbers(records, style)
    span = numbers[:, -1] - numbers[:, 0] if style.method == "kmeans" else _scale(numbers, style)
    lost = np.asarray(~np.isfinite(numbers).all(axis=1))
    narrow = np.flatnonzero(~(span >= _SMALLEST) & ~lost)
    if narrow.size:
        rows = float_values(as_bytes(picked(x, narrow).reshape(-1)), spec).reshape(narrow.size, columns)
        wide = rows.astype(np.float64)
        miss = np.abs(dequantized(records[narrow], style, columns) - wide).max(axis=1)
        lost[narrow] = miss > _RELATIVE * np.abs(wide).max(axis=1)
    return records, lost


def dequantized(records: Array, style: Style, columns: int) -> Array:
    """Return the values, float32 [R, D], of records of a style other than "raw"."""
    numbers, codes = opened(records, style, columns)
    if style.method == "kmeans":
        return row_lookup(codes, numbers)
    return row_dequantize(codes, _scale(numbers, style), dense(numbers[:, -1]))


def _scale(numbers: Array, style: Style) -> Array:
    """Return the distance of the values of each row, float32 [R]; the quantizer is uniform."""
    if style.method != "symmetric":
        return dense(numbers[:, 0])
    top = (1 << style.bits) - 1
    # On a GPU, torch multiplies by the reciprocal of a plain number.
    return (-numbers[:, 0] - numbers[:, 0]) / (numbers.new_full((1,), top) if is_torch(numbers) else np.float32(top))


def _numbers(records: Array, style: Style) -> Array:
    """Return the float32 numbers [R, n] of records."""
    return viewed(dense(records[:, : 4 * style.numbers]), 4, "float")


def _bytes_of(numbers: Array) -> Array:
    """Return a matrix of floats as bytes, with as many rows."""
    return bytes_of(dense(numbers))


def dense(x: Array) -> Array:
    """Return a matrix whose rows follow one another in memory."""
    return x.contiguous() if is_torch(x) else np.ascontiguousarray(x)


def _side_by_side(parts: Sequence[Array]) -> Array:
    """Join tensors with equally many rows."""
    import torch

    return torch.cat(list(parts), dim=1)


def opened(records: Array, style: Style, columns: int) -> tuple[Array, Array]:
    """Split records into float32 numbers [R, n] and codes uint8 [R, D]; the style is not "raw"."""
    padded = -(-columns // 8) * 8
    flat = dense(records[:, 4 * style.numbers :]).reshape(-1)
    codes = unpack_bits(flat, style.bits, records.shape[0] * padded).reshape(records.shape[0], padded)
    return _numbers(records, style), dense(codes[:, :columns])


def pack_codes(codes: Array, bits: int) -> Array:
    """Pack the codes of each row into bits, uint8 [R, bytes], on their device."""
    count, columns = codes.shape
    padded = -(-columns // 8) * 8
    if padded != columns:
        wider = codes.new_zeros((count, padded)) if is_torch(codes) else np.zeros((count, padded), np.uint8)
        wider[:, :columns] = codes
        codes = wider
    return pack_bits(codes.reshape(-1), bits, checked=False).reshape(count, padded // 8 * bits)


def picked(x: Array, rows: NpArray) -> Array:
    """Return the rows of x with these ascending numbers; x itself if these are all."""
    return x if rows.size == x.shape[0] else x[placed_with(rows, x)]


def _narrowed(values: NpArray, spec: LeafSpec) -> NpArray:
    """Round float32 values to the array's dtype and return them as bytes [R, bytes of a row]."""
    return rounded(values, spec).reshape(values.shape[0], values.shape[1] * spec.itemsize)


SHARE = 1e-5
LEAST_ROWS = 256
BINS = tuple(range(5, 65, 5))
RATIOS = tuple(round(0.1 * k, 1) for k in range(1, 11))
_BINS_SLACK, _RATIO_SLACK = 0.008, 0.002
"""Where the gain tapers off: the first candidate within this share of the plain quantizer's error of the best one. With
it, rows of 64 normal numbers get 15 bins at 2 bits, 25 to 30 at 3 and 40 at 4; the paper found 25, 25 and 45."""
_LARGEST = np.float32(1e30)
DEFAULT_BINS = {2: 25, 3: 25, 4: 45}


def sample_sizes(rows: Sequence[int]) -> list[int]:
    """Return the number of rows to sample per table: `SHARE` of all rows, or `LEAST_ROWS`."""
    total = sum(rows)
    wanted = max(LEAST_ROWS, SHARE * total)
    return [min(n, int(np.ceil(wanted * n / total))) for n in rows]


def evenly(rows: int, count: int) -> NpArray:
    """Return `count` evenly spaced row numbers below `rows`."""
    return (2 * np.arange(count, dtype=np.int64) + 1) * rows // (2 * count) if count else np.empty(0, np.int64)


def search_parameters(
    samples: Sequence[NpArray], bits: int, num_bins: int | None = None, ratio: float | None = None
) -> tuple[int, float]:
    """Choose num_bins and ratio of the adaptive quantizer, if None, by mean L2 error on samples.

    First num_bins at ratio 1, then ratio at that num_bins; each the smallest candidate whose error is within a small
    share of what the best one reaches.

    Args:
        samples: float32 [R, D] each, of any D; rows that are not finite (or near it) do not count.
        bits: 2, 3 or 4.
        num_bins: as given, or None.
        ratio: as given, or None.

    Example:
        >>> search_parameters([], 4)
        (45, 1.0)
        >>> search_parameters([np.random.default_rng(0).normal(size=(256, 64)).astype("f4")], 4, num_bins=45)[1] < 0.5
        True

    Source: Check-N-Run, section 5.2.
    """
    finite = [x[(np.abs(x) < _LARGEST).all(axis=1)] for x in samples if x.size]
    finite = [x for x in finite if x.size]
    if not finite:
        return num_bins or DEFAULT_BINS[bits], 1.0 if ratio is None else ratio
    plain = mean_error(finite, bits, 0, 0.0)
    if num_bins is None:
        num_bins = int(_first(BINS, lambda n: mean_error(finite, bits, int(n), 1.0), _BINS_SLACK * plain))
    if ratio is None:
        ratio = _first(RATIOS, lambda r: mean_error(finite, bits, num_bins, r), _RATIO_SLACK * plain)
    return num_bins, ratio


def _first(candidates: Sequence[float], error: Callable[[float], float], slack: float) -> float:
    errors = [error(c) for c in candidates]
    return next(c for c, e in zip(candidates, errors, strict=True) if e <= min(errors) + slack)


def mean_error(samples: Sequence[NpArray], bits: int, num_bins: int, ratio: float) -> float:
    """Return the mean L2 error of the rows; num_bins = 0 means the asymmetric quantizer."""
    total, count = 0.0, 0
    for x in samples:
        if num_bins:
            codes, scale, minimum = row_quantize(x, bits, "adaptive", num_bins=num_bins, ratio=ratio)
        else:
            codes, scale, minimum = row_quantize(x, bits, "asymmetric")
        miss = row_dequantize(codes, scale, minimum).astype(np.float64) - x
        total += float(np.sqrt((miss * miss).sum(axis=1)).sum())
        count += x.shape[0]
    return total / count
