"""Output files and folders of commands: whole under their names or not there, and never over what was there unasked."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from ..kernels.errors import BadArgumentError
from ..store import local
from ..store.files import TEMPORARY, one_name


def check_free(target: Path, force: bool) -> None:
    """Raise BadArgumentError where something is that may not be replaced; before the work, and again after it."""
    if os.path.lexists(target) and not force:
        raise BadArgumentError(f"{target} exists; say --force to replace it")


def check_apart(target: Path, read: Iterable[str]) -> None:
    """Raise BadArgumentError where an output is what it is made from, a folder around that, or a file within it.

    Directly in a folder that is read there may be others: a report beside the folders of a store.

    Args:
        target: the output.
        read: files, folders and URLs.
    """
    own = Path(os.path.realpath(target))
    for name in map(one_name, read):
        path = Path(name)
        if own == path:
            raise BadArgumentError(f"the output {target} is what it would be made from")
        if own in path.parents:
            raise BadArgumentError(f"the output {target} is around {name}, which it would be made from")
        if path in own.parent.parents and own.exists():
            raise BadArgumentError(f"the output {target} is a part of {name}, which it would be made from")


def write_file(target: Path, force: bool, write: Callable[[Path], object]) -> None:
    """Let `write(path)` write a file under a temporary name, make it durable, then give it its name.

    Args:
        target: its name; its folder is made if need be.
        force: whether it may replace a file.
        write: writes the file at the path that it is given.

    Raises:
        BadArgumentError: the name is taken.
    """
    check_free(target, force)
    temporary = _temporary(target)
    try:
        try:
            write(temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = error.filename or str(target)  # a full disk is met in a write, which knows no name
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
    """The same for a folder: `write(path)` makes it and all that is in it, synced; see `write_file`."""
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
        except BaseException:  # a Ctrl-C between the two as well
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
    """A free name beside a target."""
    if not target.name:
        raise BadArgumentError(f"{target} is no name for an output")
    local.make_folder(str(target.parent.absolute()))
    names = (target.parent / f"{TEMPORARY}{os.getpid()}-{n}-{target.name}" for n in itertools.count())
    return next(name for name in names if not os.path.lexists(name))
