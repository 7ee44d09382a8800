"""Outputs of commands: results, notes, progress, and files.

Results go to standard output, notes and progress to standard error. Files and folders are written completely or not
at all.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from ..codec.display import printable as printable
from ..codec.display import size as size
from ..kernels.errors import BadArgumentError
from ..store import local
from ..store.files import TEMPORARY

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


def result(as_json: bool, text: str, **data: object) -> None:
    """Print a result: its data as one JSON document, or a line about it."""
    if as_json:
        emit(data)
    else:
        line(text)


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
def _bar(what: str, total: int | None, *numbers: str, quiet: bool = False) -> Iterator[Callable[..., None]]:
    """Show a bar on standard error, if that is a terminal.

    The function it yields is called with the fields of the bar's task that change (`completed`, `description`).

    Args:
        what: description at the beginning.
        total: at which the bar is full; None: it comes with an update.
        numbers: classes of rich's columns behind the bar.
        quiet: show nothing.
    """
    if quiet or not _is_terminal():
        yield lambda **_: None
        return
    from rich import progress
    from rich.console import Console

    columns = [progress.TextColumn("{task.description}"), *(getattr(progress, n)() for n in ("BarColumn", *numbers))]
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield functools.partial(bar.update, bar.add_task(what, total=total))


@contextlib.contextmanager
def steps_done(what: str, *, quiet: bool) -> Iterator[Callable[[int | None, int, int], None]]:
    """Show how many of a number of things are done, on standard error.

    It is a bar on a terminal, and otherwise a few lines unless `quiet`.

    The function it yields is called with (step, or None for things other than steps, done, total), like the callbacks
    of `Store`.
    """
    with _bar(what, None, "MofNCompleteColumn", "TimeRemainingColumn") as update:

        def show(step: int | None, done: int, total: int) -> None:
            every = -(-total // LINES)
            if _is_terminal():
                update(completed=done, total=total, description=what if step is None else f"{what}: step {step}")
            elif not quiet and total and (done % every == 0 or done == total):
                note(f"{what}: {done}/{total}" if step is None else f"{what}: step {step} ({done} of {total})")

        yield show


@contextlib.contextmanager
def bytes_done(what: str, *, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Progress over the bytes of files: a bar on a terminal, nothing elsewhere or if `quiet`.

    The function it yields is called with (file, bytes done, bytes in all).
    """
    with _bar(what, None, "DownloadColumn", "TimeRemainingColumn", quiet=quiet) as update:
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
    with _bar("", total, "MofNCompleteColumn", "TimeElapsedColumn") as update:
        begun = itertools.count()
        yield lambda stage: update(completed=next(begun), description=stage)


def check_free(target: Path, force: bool) -> None:
    """Raise BadArgumentError if the target exists and may not be replaced, or is a URL."""
    if os.path.lexists(target):
        if not force:
            raise BadArgumentError(f"{target} exists; use --force to replace it")
        if not (target.is_file() or target.is_dir() or target.is_symlink()):
            raise BadArgumentError(f"{target} is neither a file nor a folder, and --force does not replace it")
    if re.match(r"[\w+:.-]+:/", str(target)):  # a Path has one slash less than the URL
        raise BadArgumentError(f"{target} is a URL; outputs are local files and folders, only a store may be a URL")


def check_apart(target: Path, read: Iterable[str]) -> None:
    """Raise BadArgumentError if an output would overwrite an input or a part of one.

    New files directly in an input folder are allowed, such as a report next to the folders of a store.

    Args:
        target: the output.
        read: the inputs: files, folders and URLs.
    """
    from ..store.urls import one_name  # which imports fsspec

    own = Path(os.path.realpath(target))
    for name in map(one_name, read):
        path = Path(name)
        if own == path:
            raise BadArgumentError(f"the output {target} is also the input")
        if own in path.parents:
            raise BadArgumentError(f"the output {target} contains the input {name}")
        if path in own.parent.parents and own.exists():
            raise BadArgumentError(f"the output {target} is a part of the input {name}")


def write_file(target: Path, force: bool, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name with `write(path)`, make it durable, and rename it.

    Its permissions follow the umask.

    Args:
        target: the final name; its folder is created if necessary.
        force: whether the file may replace another.
        write: writes the file at the path passed to it.

    Raises:
        BadArgumentError: the target exists.
    """
    check_free(target, force)
    temporary = _temporary(target)
    try:
        try:
            write(temporary)
            local.follow_umask(str(temporary))
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = error.filename or str(target)  # a write to a full disk raises without a name
            raise
        if force:
            os.replace(temporary, target)
        else:
            try:
                local.link(str(temporary), str(target))
            except FileExistsError:
                check_free(target, force)
                raise
        local.sync_folder(str(target.parent))
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_folder(target: Path, force: bool, write: Callable[[Path], object]) -> None:
    """Write a folder completely or not at all; `write(path)` creates and syncs its files."""
    check_free(target, force)
    temporary = _temporary(target)
    former: Path | None = None
    try:
        write(temporary)
        local.sync_folder(str(temporary))
        if os.path.lexists(target):
            check_free(target, force)
            former = _temporary(target)
        try:
            if former is not None:
                os.rename(target, former)
            os.rename(temporary, target)
        except BaseException:  # also for Ctrl-C between the two calls
            if former is not None and os.path.lexists(former) and not os.path.lexists(target):
                os.rename(former, target)
            raise
        local.sync_folder(str(target.parent))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if former is not None and os.path.lexists(former):
            if former.is_dir() and not former.is_symlink():
                shutil.rmtree(former, ignore_errors=True)
            else:
                former.unlink()


def _temporary(target: Path) -> Path:
    """A free temporary name in the folder of a target."""
    if not target.name:
        raise BadArgumentError(f"{target} is not a name for an output")
    local.make_folder(str(target.parent.absolute()))
    names = (target.parent / f"{TEMPORARY}{os.getpid()}-{n}-{target.name}" for n in itertools.count())
    return next(name for name in names if not os.path.lexists(name))
