"""Output files and folders of commands, written completely or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from ..kernels.errors import BadArgumentError
from ..store import local
from ..store.files import TEMPORARY
from ..store.local import follow_umask
from ..store.regular_files import regular


def check_free(target: Path, force: bool) -> None:
    """Raise BadArgumentError if the target exists and may not be replaced."""
    if os.path.lexists(target) and not force:
        raise BadArgumentError(f"{target} exists; use --force to replace it")


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
            follow_umask(str(temporary))
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


def is_spt(path: Path) -> bool:
    """Return whether a file is a shrinkpoint checkpoint file."""
    from ..codec.format.container import MAGIC

    if not os.path.isfile(path):
        return False
    with open(path, "rb", opener=regular) as file:
        return file.read(len(MAGIC)) == MAGIC
