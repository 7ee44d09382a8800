"""What commands say: tables and JSON on standard output, notes and progress on standard error."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer

from .text import printable as printable
from .text import size as size

LINES = 20
"""Where there is no terminal, progress over many steps is told in at most so many lines."""


def line(text: str = "") -> None:
    """A line of the result."""
    typer.echo(printable(text))


def note(text: str) -> None:
    """A line that is no part of the result."""
    typer.echo(f"shrinkpoint: {printable(text)}", err=True)


def emit(data: Any) -> None:
    """The result as one JSON document; what is no finite number becomes null."""
    typer.echo(json.dumps(plain(data), indent=1, allow_nan=False))


def plain(data: Any) -> Any:
    """Data with null for each number that JSON does not have."""
    if isinstance(data, dict):
        return {k: plain(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [plain(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Aligned columns, one line a row, nothing cut off; a column whose name begins with ">" is aligned right."""
    cells = [[printable(c) for c in row] for row in rows]
    names = [c.removeprefix(">") for c in columns]
    widths = [max(len(name), *(len(row[i]) for row in cells), 0) for i, name in enumerate(names)]
    for row in [names, *cells]:
        parts = [
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for column, cell, width in zip(columns, row, widths, strict=True)
        ]
        typer.echo("  ".join(parts).rstrip())


def _is_terminal() -> bool:
    """Whether standard error is one; it is None where it was closed (`2>&-`)."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def steps_done(what: str, *, quiet: bool) -> Iterator[Callable[[int, int, int], None]]:
    """Progress over steps: a bar on a terminal, elsewhere some lines, none if `quiet`; all on standard error.

    The function it gives is called with (step, done, total), as those of `Store`.
    """
    if not _is_terminal():

        def tell(step: int, done: int, total: int) -> None:
            every = -(-total // LINES)
            if not quiet and total and (done % every == 0 or done == total):
                note(f"{what}: step {step} ({done} of {total})")

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)

        def show(step: int, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, description=f"{what}: step {step}")

        yield show


@contextlib.contextmanager
def bytes_done(what: str, *, quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """Progress over the bytes of files: a bar on a terminal, nothing elsewhere or if `quiet`.

    The function it yields, if any, is called with (file, bytes done, bytes in all).
    """
    if quiet or not _is_terminal():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)

        def show(_file: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield show


@contextlib.contextmanager
def busy(what: str) -> Iterator[None]:
    """A sign of life on a terminal while something without steps is done; nothing elsewhere."""
    if not _is_terminal():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
