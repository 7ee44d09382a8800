"""Cells of tables: numbers, spreads, names of systems, whether a target is met."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

NONE = "not measured"
_MET = {True: "yes", False: "**no**", None: NONE}
_OPEN = "cannot tell"
_PRESETS = ("inshrinkerator", "lc_checkpoint", "check_n_run", "bitsnap", "lossless")
Json = dict[str, Any]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; without lines the words "not measured".

    Example:
        >>> print(markdown(["a", "b"], [["1", "2"]]))
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    found = [f"| {' | '.join(line)} |" for line in lines]
    if not found:
        return f"*{NONE}*"
    return "\n".join([f"| {' | '.join(header)} |", "|" + "---|" * len(header), *found])


def crossed(
    cells: Iterable[tuple[str, str, str]], columns: Iterable[str] = (), missing: str = "", corner: str = ""
) -> str:
    """Return a table of cells by line and column, each in the order in which it is first named.

    Args:
        cells: (line, column, text) each; the last of a place counts.
        columns: that come first, in order, even if they are empty.
        missing: text for a column that a line lacks.
        corner: heads the names of the lines.

    Example:
        >>> print(crossed([("1", "a", "x"), ("2", "b", "y")], missing="-"))
        |  | a | b |
        |---|---|---|
        | 1 | x | - |
        | 2 | - | y |
    """
    lines: dict[str, dict[str, str]] = {}
    names = dict.fromkeys(columns)
    for line, column, text in cells:
        lines.setdefault(line, {})[column] = text
        names[column] = None
    return markdown([corner, *names], [[line, *(own.get(c, missing) for c in names)] for line, own in lines.items()])


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, without an exponent.

    Example:
        >>> number(1234.5), number(0.01234), number(None)
        ('1,234', '0.0123', 'not measured')
    """
    if value is None:
        return NONE
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def spread(row: Json | None) -> str:
    """Mean and range over seeds, as the note of the row begins."""
    if row is None or row["value"] is None:
        return NONE
    text: str = row["note"].split(";")[0]
    return text


def shown(row: Json | None, unit: str = "") -> str:
    """The value of a row, with its unit where it has one."""
    return NONE if row is None else number(row["value"]) + (unit if row["value"] is not None else "")


def system_name(name: str) -> str:
    """Return the display name of a system of the benches.

    Example:
        >>> system_name("default"), system_name("rate 0.001, 12 bins"), system_name("check_n_run 4")
        ('`Config()`', '12 bins, rate 0.001', '`presets.check_n_run(4)`')
    """
    main, _, rest = name.partition(", ")
    if main == "default" or main.startswith("rate "):
        bins, _, rest = rest.partition(", ") if " bins" in rest else ("`Config()`", "", rest)
        code = bins if main == "default" or main == "rate 0" else f"{bins}, {main}"
    else:
        preset, _, argument = main.partition(" ")
        if preset not in _PRESETS:
            return name
        code = f"`presets.{preset}({argument})`"
    return f"{code}, {rest}" if rest else code


def order(system: str) -> tuple[int, float, str]:
    """Sort key of systems: the default, its rates, the others."""
    rate = re.fullmatch(r"rate ([0-9.]+).*", system)
    return (0 if system == "default" else 1 if rate else 2, float(rate[1]) if rate else 0.0, system)


def figure(row: Json) -> str:
    """Format the value and unit of a row; without a value, whether it is missing or a result.

    Example:
        >>> figure({"value": 1234.5, "unit": "MB/s", "target": None, "met": None})
        '1,234 MB/s'
        >>> [figure({"value": None, "unit": "x", "target": ">= 2 x", "met": met}) for met in (None, False)]
        ['not measured', 'none']
    """
    if row["value"] is None:
        return NONE if row["target"] is not None and row["met"] is None else "none"
    return f"{number(row['value'])} {row['unit']}"


def met(row: Json) -> str:
    """Say whether a target is met, or that a measured row leaves it open."""
    return _OPEN if row["met"] is None and row["value"] is not None else _MET[row["met"]]


def aimed(rows: Iterable[Json]) -> str:
    """Return a table of rows with a target, and whether it is met."""
    lines = []
    for row in rows:
        held = ("none", "") if row["target"] is None else (row["target"], met(row))
        lines.append([row["row"], figure(row), *held, row["note"]])
    return markdown(["", "measured", "target", "met", ""], lines)
