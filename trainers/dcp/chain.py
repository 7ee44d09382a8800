"""The chain of one rank's containers: opened, resolved, and copied to another folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from ...codec.checkpoint import Checkpoint
from ...codec.errors import BadArgumentError, CorruptDataError, MissingParentError, ShrinkpointError
from ...codec.format.ranged import Ranged
from ...store.files import Files
from ...store.local import LocalFiles, make_folder
from ...store.urls import open_files
from .metadata import FOLDER, MAX_BYTES, Index, RankFile, metadata_name, parse

T = TypeVar("T")


def open_folder(path: str | os.PathLike[str] | None) -> Files:
    """Open the files of a checkpoint folder.

    Raises:
        BadArgumentError: no path, or no such kind of URL.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise BadArgumentError(f"{path!r} is not a path; give one to the constructor, or as checkpoint_id")
    try:
        return open_files(path)
    except (ValueError, ImportError) as e:
        raise BadArgumentError(f"{os.fspath(path)!r}: {e}") from None


def is_place(path: str | os.PathLike[str]) -> bool:
    """Return whether this is a path, or a URL of an installed file system."""
    try:
        open_folder(path)
    except BadArgumentError:
        return False
    return True


def read_index(files: Files, rank: int | None = None) -> Index:
    """Read the metadata of a checkpoint.

    Raises:
        MissingParentError: a completed checkpoint does not exist.
        CorruptDataError, NewerFormatError: it is not readable.
    """
    name = metadata_name(rank)
    where = files.path(name)
    try:
        size = files.size(name)
        if size > MAX_BYTES:
            raise CorruptDataError(f"{where}: {size} bytes; metadata has at most {MAX_BYTES}")
        return parse(files.read(name), where)
    except FileNotFoundError:
        raise MissingParentError(f"{where} is not there: no checkpoint, or one that was not completed") from None


def _guarded(files: Files, file: RankFile, name: str, work: Callable[[], T]) -> T:
    """Call `work` on a container; its errors name the rank and the path."""
    path = files.path(f"{FOLDER}/{name}")
    try:
        return work()
    except FileNotFoundError:
        raise MissingParentError(
            f"rank {file.rank}: its file {path} is gone: removed, or the checkpoint was saved again while it was read"
        ) from None
    except ShrinkpointError as e:
        raise type(e)(f"rank {file.rank}: {path}: {e}") from None


def opener(files: Files, file: RankFile) -> Callable[[Checkpoint | None], Checkpoint]:
    """Return a function that opens a rank's containers from the newest, headers only."""
    chain = iter(file.chain)

    def open_next(above: Checkpoint | None) -> Checkpoint:
        name, nbytes = next(chain, ("", 0))
        if not name:
            raise MissingParentError(f"rank {file.rank}: its metadata names no parent of its last file")
        path = f"{FOLDER}/{name}"

        def work() -> Checkpoint:
            size = files.size(path)
            if size != nbytes:
                raise CorruptDataError(f"{size} bytes; the metadata says {nbytes}")
            # The hash is not computed: that would take all of the file. Its name has the beginning of it.
            claimed = "" if above is None else str(above.parent_id)
            if above is not None and not name.endswith(f"-{claimed[:16]}.spt"):
                raise MissingParentError(f"the parent of the container above it is {claimed[:16]}..., not this one")
            return Checkpoint(Ranged(size, lambda start, stop: files.read_range(path, start, stop)), None, claimed)

        return _guarded(files, file, name, work)

    return open_next


def resolve(files: Files, file: RankFile) -> Checkpoint:
    """Return a rank's resolved checkpoint: the parent of its next delta."""
    found: Checkpoint | None = None
    for name, _ in reversed(file.chain):

        def work(name: str = name, parent: Checkpoint | None = found) -> Checkpoint:
            ckpt = Checkpoint.from_bytes(files.read(f"{FOLDER}/{name}"), parent)
            if not name.endswith(f"-{ckpt.id[:16]}.spt"):
                raise CorruptDataError("its content hash is not the one in its name")
            return ckpt

        found = _guarded(files, file, name, work)
    assert found is not None
    return found


def carry(source: Files, target: Files, file: RankFile) -> bool:
    """Link or copy the containers of a chain into another checkpoint's folder.

    On one local disk they are linked and take no further space; otherwise they are copied.

    Returns:
        Whether all of them exist now; False: one is missing.
    """
    for name, nbytes in file.chain:
        path = f"{FOLDER}/{name}"
        try:
            if _size(target, path) == nbytes:
                continue
            if source.root != target.root and not _linked(source, target, path):
                target.write(path, source.read(path))
            if _size(target, path) != nbytes:
                return False
        except FileNotFoundError:
            return False
    return True


def _size(files: Files, path: str) -> int:
    try:
        return files.size(path)
    except FileNotFoundError:
        return -1


def _linked(source: Files, target: Files, path: str) -> bool:
    if not isinstance(source, LocalFiles) or not isinstance(target, LocalFiles):
        return False
    make_folder(target.path(FOLDER))
    try:
        os.link(source.path(path), target.path(path), follow_symlinks=False)
    except FileNotFoundError:
        raise
    except (OSError, NotImplementedError):
        return False
    return True
