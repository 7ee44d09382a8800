"""Rows as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .harness import Row, is_red

_MET = {True: "[green]yes[/green]", False: "[red]no[/red]", None: ""}


def show(rows: Sequence[Row], title: str, console: Console) -> None:
    """Print the rows with a number, then missing measurements and failed checks."""
    if not console.is_terminal:
        console = Console(file=console.file, width=160)
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    for name in ("row", "size", "value", "unit", "peer", "peer value", "ratio", "target", "met"):
        right = name in ("size", "value", "peer value", "ratio")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    shown: tuple[str, str, int] | None = None
    device = ""
    for row in rows:
        if row.value is None and not is_red(row):
            continue
        if row.device != device:
            table.add_section()
            table.add_row(f"[bold]{row.device}[/bold]")
            device = row.device
        this = (row.row, row.device, row.size)
        first = this != shown
        shown = this
        table.add_row(
            row.row if first else "",
            f"{row.size:,}" if first else "",
            _number(row.value) if first else "",
            row.unit if first else "",
            row.peer or "",
            _number(row.peer_value),
            _number(row.ratio),
            row.target or "",
            "[red]WRONG[/red]" if is_red(row) else _MET[row.met],
        )
    console.print(table)
    for reason, names in _reasons(rows).items():
        console.print(
            f"{reason}: {', '.join(names)}", markup=False, style="red" if reason.startswith("CHECK") else "dim"
        )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _reasons(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the rows without a number, grouped by reason."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.value is None or (row.peer and row.peer_value is None):
            what = row.row if row.value is None else f"{row.row} / {row.peer}"
            names = found.setdefault(row.note.split(";")[0], [])
            if what not in names:
                names.append(what)
    return found
