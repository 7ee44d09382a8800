"""Output of commands: results on standard output, notes and progress on standard error."""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import typer

from ..codec.display import printable as printable
from ..codec.display import size as size

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


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known name most similar to a mistyped one.

    The hint is for the end of a message. It is "" if no name is similar.

    Example:
        >>> nearest("modle/*", ["model", "optimizer"]), nearest("x", ["model"])
        ("; did you mean 'model'?", '')
    """
    found = difflib.get_close_matches(name.rstrip("*").rstrip("/"), list(known), n=1)
    return f"; did you mean {printable(found[0])!r}?" if found else ""


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
def _bar(what: str, total: int | None, *numbers: str) -> Iterator[Callable[..., None]]:
    """Show a bar on standard error.

    The function it yields is called with the fields of the bar's task that change (`completed`, `description`).

    Args:
        what: description at the beginning.
        total: at which the bar is full; None: it comes with an update.
        numbers: classes of rich's columns behind the bar.
    """
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        *(getattr(progress, n)() for n in numbers),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield functools.partial(bar.update, bar.add_task(what, total=total))


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
    with _bar(what, None, "MofNCompleteColumn", "TimeRemainingColumn") as update:

        def show(done: int, total: int, last: str) -> None:
            update(completed=done, total=total, description=f"{what}: {last}" if last else what)

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
    with _bar(what, None, "DownloadColumn", "TimeRemainingColumn") as update:
        yield lambda _file, done, total: update(completed=done, total=total)


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
    with _bar("", total, "MofNCompleteColumn", "TimeElapsedColumn") as update:
        begun = itertools.count()
        yield lambda stage: update(completed=next(begun), description=stage)
