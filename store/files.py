"""File operations of a store on any file system; files are never seen incomplete.

Names are relative and contain one folder (`steps/000000000010.json`). There are two implementations: a local folder
(`local.LocalFiles`) uses temporary names, fsync of file and folder, rename and link; any other fsspec file system
(`objects.ObjectFiles`) has objects that appear whole or not at all.

Small files of JSON have a checksum, so that every altered bit is noticed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, Protocol, TypeVar

import xxhash

from ..codec.errors import CorruptDataError, MissingParentError, NewerFormatError, ShrinkpointWarning
from ..codec.format.bounded_json import loads
from ..codec.format.fields import Bytes

T = TypeVar("T")
Fields = dict[str, Any]
TEMPORARY = ".tmp-"
"""Prefix of the name of a file that is being written; after a crash such a file is garbage."""
DAMAGE = (CorruptDataError, MissingParentError, NewerFormatError)
"""Errors of a checkpoint that cannot be read."""
_DISK_DAMAGE = {
    getattr(errno, name)
    for name in ("EIO", "EINVAL", "ELOOP", "ENXIO", "EBADMSG", "ENODATA", "EUCLEAN", "EOVERFLOW", "EFBIG")
    if hasattr(errno, name)
}
"""Errors of a disk that cannot read a file, or of something that is not a file."""


class StoreWarning(ShrinkpointWarning):
    """A condition of a store that its user should know, but that is not an error."""


class Files(Protocol):
    """The file operations of a store."""

    root: str
    local: bool

    def path(self, name: str) -> str:
        """Return the full path of a name, for messages."""
        return posixpath.join(self.root, name)

    def read(self, name: str) -> bytes:
        """Return all bytes of a file; FileNotFoundError if it does not exist."""

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes start..stop of a file; fewer if it ends before."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; FileNotFoundError if it does not exist."""

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""

    def list(self, folder: str) -> Sequence[str]:
        """Return the sorted names of the files in a folder; empty if it does not exist."""
        return sorted(self.sizes(folder))

    def write(self, name: str, data: bytes | Iterable[Bytes]) -> None:
        """Write or replace a file: durable when this returns; when it raises, old or new, but whole.

        Args:
            name: of the file.
            data: its bytes, or blocks of them in order.
        """

    @contextlib.contextmanager
    def staged(self, name: str, data: Iterable[Bytes]) -> Iterator[None]:
        """Write a file before this, or in one commit with the file that is created within this."""
        self.write(name, data)
        yield

    def spool(self, folder: str) -> IO[bytes] | None:
        """Return a temporary file without a name on the disk of a folder; None without a disk."""
        return None

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that must not exist; False if it does, with other bytes."""

    def sync(self, names: Sequence[str]) -> None:
        """Make existing files of one folder durable."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, durably; missing ones are skipped."""

    def below(self, folder: str) -> Files:
        """Return the files of a folder within these."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return name -> size in bytes of the files in a folder; empty if it does not exist."""

    def modified(self, name: str) -> float:
        """Return when a file was written, in seconds by the clock of the storage."""

    def stamp(self, name: str) -> object:
        """Return a value that changes with a file or folder; None if missing or unknown."""


def is_damage(error: OSError, *, local: bool) -> bool:
    """Return whether a reading error means damaged data rather than unreachable storage.

    Busy storage, too many open files and an unreachable host say nothing about the data, and neither does an unknown
    error code of an object store, which s3fs reports as EIO.

    Args:
        error: not a FileNotFoundError.
        local: whether it comes from a disk.
    """
    return isinstance(error, (IsADirectoryError, NotADirectoryError)) or (local and error.errno in _DISK_DAMAGE)


def read_error(files: Files, where: str, error: OSError) -> Exception:
    """Return a CorruptDataError if an error of reading means damage, otherwise the error itself."""
    is_damaged = is_damage(error, local=files.local)
    return CorruptDataError(f"{where} cannot be read: {type(error).__name__}: {error}") if is_damaged else error


# ------------------------------------------------------------------------------------------------- JSON with a checksum


_CHECKSUM = b',\n "checksum": "'


def _indented(fields: Fields) -> bytes:
    """Return the JSON of some fields, an entry a line."""
    return json.dumps(fields, indent=1).encode("ascii")


def seal(fields: Fields, dump: Callable[[Fields], bytes] = _indented) -> bytes:
    """Return the JSON of some fields and of its checksum, the last one.

    Args:
        fields: plain values.
        dump: makes JSON of fields.
    """
    return dump({**fields, "checksum": xxhash.xxh3_128_hexdigest(dump(fields))})


def unseal(data: bytes) -> Fields:
    """Return the fields of what `seal` made by its defaults.

    Raises:
        ValueError: the bytes were not made by `seal`, or were altered.
    """
    fields = loads(data)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    check_sum(data)
    fields.pop("checksum", None)
    return fields


def check_sum(data: bytes) -> None:
    """Raise ValueError unless the checksum at the end is that of the text without it."""
    body, _, checksum = bytes(data).rpartition(_CHECKSUM)
    if checksum != xxhash.xxh3_128_hexdigest(body + b"\n}").encode() + b'"\n}':
        raise ValueError("the checksum does not match")


def read_sealed(files: Files, name: str, parse: Callable[[Fields], T], what: str, remedy: str) -> T | None:
    """Return the contents of a file that `seal` made; None if it does not exist.

    Args:
        files: of the store.
        name: of the file.
        parse: makes the result of the fields, or raises.
        what: what the file should be, for messages.
        remedy: what to do about a damaged one.

    Raises:
        CorruptDataError: it is damaged, or of another version.
    """
    try:
        fields = unseal(files.read(name))
        if (version := fields.get("version", 1)) != 1:
            raise ValueError(f"its version is {version!s:.40}, which this release does not know")
        return parse(fields)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
        if isinstance(e, OSError) and not is_damage(e, local=files.local):
            raise
        raise CorruptDataError(f"{files.path(name)}: not {what}: {e!s:.200}; {remedy}") from None
