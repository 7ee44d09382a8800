"""Tables of text and HTML for terminals and notebooks; `Checkpoint.summary()` is one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from typing import Any, SupportsIndex, overload

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


_LINE = 100
"""Most characters of a line of a text table, if each column keeps `_NARROW`."""
_NARROW = 12


def size(nbytes: float) -> str:
    """Bytes in decimal units.

    Example:
        >>> size(999), size(1234), size(56_700_000)
        ('999 B', '1.23 kB', '56.7 MB')
    """
    if abs(nbytes) < 1000:
        return f"{nbytes:.0f} B"
    unit = min(int(math.log10(abs(nbytes)) // 3), 5)
    value = nbytes / 1000**unit
    if abs(value) >= 999.5 and unit < 5:
        value, unit = value / 1000, unit + 1
    return f"{value:#.3g}".rstrip(".") + f" {'kMGTP'[unit - 1]}B"


def printable(text: object) -> str:
    """Escape control characters, so that names in files cannot control a terminal.

    Example:
        >>> printable("a\\x1b[31m/b")
        'a\\\\x1b[31m/b'
    """
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in plain)


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of text, in which the longest cells are cut to fit a line.

    Numbers are aligned to the right.

    Example:
        >>> print(text_table(["name", "bits"], [["a", "4.25"], ["bc", "12.00"]]))
        name   bits
        a      4.25
        bc    12.00
    """
    whole = [list(map(printable, row)) for row in (head, *rows)]
    needed = [max(map(len, column)) for column in zip(*whole, strict=True)]
    room = _LINE - 2 * (len(needed) - 1)
    caps = range(max(needed, default=0), _NARROW, -1)
    cap = next((cap for cap in caps if sum(min(width, cap) for width in needed) <= room), _NARROW)
    cells = [[_short(cell, cap) for cell in row] for row in whole]
    widths = [min(width, cap) for width in needed]
    right = [bool(rows) and all(_is_number(cell) for cell in column) for column in zip(*rows, strict=True)]
    right = right or [False] * len(widths)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if aligned else cell.ljust(width)
            for cell, width, aligned in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in cells
    )


def _short(text: str, most: int) -> str:
    """Cut the middle out of a long text: paths differ at their ends."""
    kept = most - 3
    return text if len(text) <= most else f"{text[: kept // 2]}...{text[-(kept - kept // 2) :]}"


def _is_number(text: str) -> bool:
    return text in ("", "exact") or text.removeprefix("<= ")[:1].isdigit()


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a notebook; all text is escaped, and colours are the notebook's."""
    line = "".join(f"<th style='text-align:left'>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{line}</tr></thead><tbody>{body}</tbody></table>"


def html_fields(title: str, fields: Mapping[str, str]) -> str:
    """Return a small table of names and values with a title."""
    body = "".join(f"<tr><td>{escape(name)}</td><td>{escape(str(value))}</td></tr>" for name, value in fields.items())
    return f"<table><caption style='text-align:left'>{escape(title)}</caption><tbody>{body}</tbody></table>"
