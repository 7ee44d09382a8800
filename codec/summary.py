"""`Checkpoint.summary()`: one row for each array, printed as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, SupportsIndex, overload

from .display import html_table, text_table

_SHOWN = 40
"""Rows that a printed summary shows."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of `Checkpoint.summary()`: one array and its storage.

    Args:
        path: keys joined by "/".
        codec: the codec that was chosen for it ("quantize", "exact", "first moment"), as a rule may name it.
        stream: the stream format that the codec wrote ("levels", "bytes", "grid").
        raw_bytes: bytes of the array.
        stored_bytes: bytes in the file, without header and checksums.
        bits_per_element: stored bits an element; 0 for an empty array.
        error: achieved error, 0 when exact.
        measure: what `error` is: "exact", "relative L2", or "relative" (largest |x~ - x| / |x|).
        dtype: dtype of the array.
        shape: its shape.
        note: remarks of the codec: why a codebook was refit, why an array is exact although a lossy codec was asked
            for, or that the array is mostly lost (a relative L2 error of 0.9 or more).
        why: the rule or the evidence that chose the codec, or why the array is exact.
    """

    path: str
    codec: str
    stream: str
    raw_bytes: int
    stored_bytes: int
    bits_per_element: float
    error: float
    measure: str
    dtype: str
    shape: tuple[int, ...]
    note: str
    why: str

    def keys(self) -> tuple[str, ...]:
        """Names of the columns, so that `dict(row)` is a row of a table."""
        return tuple(f.name for f in fields(self))

    def __getitem__(self, column: str) -> Any:
        if column not in self.keys():
            raise KeyError(column)
        return getattr(self, column)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())


def _l2(row: Row) -> str:
    """The relative L2 error of an array, or its bound."""
    return "exact" if row.measure == "exact" else f"{'<= ' if row.measure == 'relative' else ''}{row.error:.2g}"


class Summary(list[Row]):
    """The rows of a summary: a list that prints as a table, in a notebook too; so do its slices.

    Example:
        >>> row = Row("w", "quantize", "levels", 4000, 500, 4.0, 0.02, "relative L2", "float32", (1000,), "", "kinds")
        >>> Summary([row])
        path  codec     bits  relative L2  why
        w     quantize  4.00         0.02  kinds
    """

    @overload
    def __getitem__(self, index: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Summary: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Row | Summary:
        return Summary(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        cells = [[row.path, row.codec, f"{row.bits_per_element:.2f}", _l2(row), row.why] for row in self[:_SHOWN]]
        if len(self) > _SHOWN:
            cells.append([f"... {len(self) - _SHOWN} more", "", "", "", ""])
        return ["path", "codec", "bits", "relative L2", "why"], cells

    def __repr__(self) -> str:
        return text_table(*self._table())

    def _repr_html_(self) -> str:
        return html_table(*self._table())
