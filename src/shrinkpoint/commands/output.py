"""Output of commands: results on standard output, notes and progress on standard error."""

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
"""Maximum number of lines of progress where standard error is not a terminal."""


def line(text: str = "") -> None:
    """Print a line of the result."""
    typer.echo(printable(text))


def note(text: str) -> None:
    """Print a line that is not part of the result, on standard error."""
    typer.echo(f"shrinkpoint: {printable(text)}", err=True)


def emit(data: Any) -> None:
    """Print the result as one JSON document, with null for numbers that are not finite."""
    typer.echo(json.dumps(plain(data), indent=1, allow_nan=False))


def plain(data: Any) -> Any:
    """Replace numbers that JSON does not have by None."""
    if isinstance(data, dict):
        return {k: plain(v) for k, v in data.items()}
    if isinstance(data, (list, tuple)):
        return [plain(v) for v in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def listed(names: Sequence[str], most: int = 8) -> str:
    """A few names of many.

    Example:
        >>> listed(["a", "b", "c"], 2)
        'a, b and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows in aligned columns; a column whose name begins with ">" is aligned right."""
    cells = [[printable(c) for c in row] for row in rows]
    names = [c.removeprefix(">") for c in columns]
    widths = [max(len(name), *(len(row[i]) for row in cells), 0) for i, name in enumerate(names)]
    placed = [
        (str.rjust if column.startswith(">") else str.ljust, w) for column, w in zip(columns, widths, strict=True)
    ]
    lines = [
        "  ".join([place(cell, width) for (place, width), cell in zip(placed, row, strict=True)]).rstrip()
        for row in [names, *cells]
    ]
    typer.echo("\n".join(lines))  # at once: each call flushes


def _is_terminal() -> bool:
    """Return whether standard error is a terminal; it may be closed (`2>&-`)."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def count_done(what: str, *, quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Show how many of a number of things are done, on standard error.

    It is a bar on a terminal, and otherwise a few lines unless `quiet`.

    The function it yields is called with (done, total, the name of the last item, or "").
    """
    if not _is_terminal():

        def show_line(done: int, total: int, last: str) -> None:
            every = -(-total // LINES)
            if not quiet and total and (done % every == 0 or done == total):
                note(f"{what}: {last} ({done} of {total})" if last else f"{what}: {done}/{total}")

        yield show_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)

        def show(done: int, total: int, last: str) -> None:
            description = f"{what}: {last}" if last else what
            progress.update(task, completed=done, total=total, description=description)

        yield show


@contextlib.contextmanager
def steps_done(what: str, *, quiet: bool) -> Iterator[Callable[[int, int, int], None]]:
    """Show progress over steps as `count_done` does.

    The function it yields is called with (step, done, total), like the callbacks of `Store`.
    """
    with count_done(what, quiet=quiet) as show:
        yield lambda step, done, total: show(done, total, f"step {step}")


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
    """Show an activity on a terminal while work without steps is done; nothing elsewhere."""
    if not _is_terminal():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


@contextlib.contextmanager
def stages_done(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar over named stages on a terminal; nothing elsewhere.

    The function it yields is called with the name of each stage when it begins.
    """
    if not _is_terminal():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        begun = 0

        def show(stage: str) -> None:
            nonlocal begun
            progress.update(task, completed=begun, description=stage)
            begun += 1

        yield show
