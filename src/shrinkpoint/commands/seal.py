"""`seal`: checksums and sizes of the files of a checkpoint of any format, for `verify`.

They find damage that the format itself does not detect.

The seal of a folder is the file `shrinkpoint-seal.json` in it; the seal of a file stands next to it, under the file's
name with `.shrinkpoint-seal.json` appended. Files are read as bytes and never interpreted, so that nothing in them is
executed. The seal has a checksum of its own.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Annotated, Any

import blake3
import typer

from ..codec.format.bounded_json import loads
from ..kernels.errors import BadArgumentError, CorruptDataError, ShrinkpointError
from ..store.local import MOST_JSON, check_link, regular
from ..store.local import read_file as read_bytes
from .inputs import AsJson, Force, check_exists, is_spt, is_store, is_utf8, read_file
from .outputs import bytes_done, check_free, emit, line, note, size, write_file

SEAL = "shrinkpoint-seal.json"
FORMAT = "shrinkpoint seal"
VERSION = 1
_BLOCK = 1 << 23
"""Bytes read at a time."""
_DIGEST = re.compile(r"[0-9a-f]{64}")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Sealed:
    """Size and checksum of a file.

    Args:
        size: in bytes.
        blake3: BLAKE3 of the contents, 64 hexadecimal digits.
    """

    size: int
    blake3: str


@dataclass(frozen=True, slots=True)
class Seal:
    """The files of a checkpoint as they were when it was sealed.

    Args:
        files: by path relative to the folder, with "/" on every system; a single file is under its own name.
        sealed_at: time of sealing, in seconds since the epoch.
    """

    files: dict[str, Sealed]
    sealed_at: float


@dataclass(frozen=True, slots=True)
class Difference:
    """A file that is not as it was sealed.

    Args:
        file: its path relative to the sealed folder.
        kind: "missing", "torn" (shorter than it was), "altered" or "added".
        detail: sizes or the system's error, for messages.
    """

    file: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.file} is {self.kind}{f' ({self.detail})' if self.detail else ''}"


def seal(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Folders or files of any format.")],
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write checksums and sizes of a checkpoint of any format, for `verify`.

    The seal of a folder is the file shrinkpoint-seal.json in it; that of a file NAME is NAME.shrinkpoint-seal.json next
    to it. Files are read as bytes and nothing in them is executed. A store needs no seal: `verify` checks it by itself.
    """
    for path in paths:
        check_exists(str(path))
        if is_store(str(path)):
            raise BadArgumentError(f"{path} is a store, which has checksums of its own: `shrinkpoint verify {path}`")
        check_free(seal_path(path), force)
    written = []
    for path in paths:
        with bytes_done(f"seal {path}", quiet=as_json) as progress:
            made = make_seal(path, progress)
        target = seal_path(path)
        write_file(target, force, methodcaller("write_bytes", to_bytes(made)))
        nbytes = sum(f.size for f in made.files.values())
        written.append({"path": str(path), "seal": str(target), "files": len(made.files), "nbytes": nbytes})
        if not as_json:
            line(f"{target}: {len(made.files)} files, {size(nbytes)}")
    if as_json:
        emit({"sealed": written})


def verify_sealed(path: Path, quiet: bool) -> list[Difference]:
    """The differences of a sealed folder or file to its seal.

    Raises:
        CorruptDataError: the seal is damaged.
    """
    made = read_seal(path)
    with bytes_done(f"verify {path}", quiet=quiet) as progress:
        return differences(path, made, progress)


def newest_sealed(run: Path, quiet: bool) -> Path:
    """Return the newest intact checkpoint in a run folder, and note newer damaged ones.

    Checkpoints are the sealed folders and files directly in the run folder, and `.spt` files, which have checksums of
    their own. They are ordered by the last number in their names if all names have one, else by the time of sealing.

    Raises:
        CorruptDataError: no checkpoint is intact.
    """
    skipped = 0
    for path in _newest_first(run):
        try:
            problem = _problem(path, quiet)
        except (ShrinkpointError, OSError) as error:
            problem = str(error)
        if not problem:
            return path
        skipped += 1
        note(f"skipped: {problem}")
    if skipped:
        raise CorruptDataError(f"{run}: none of its {skipped} checkpoints is intact")
    raise CorruptDataError(f"{run}: holds no sealed checkpoint; `shrinkpoint seal` writes a seal after each save")


def _problem(path: Path, quiet: bool) -> str:
    """The reason why a checkpoint is not intact, or ""."""
    if not is_sealed(path):
        read_file(path)
        return ""
    found = verify_sealed(path, quiet)
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{path}: {found[0]}{more}" if found else ""


def _newest_first(run: Path) -> list[Path]:
    found = list(_candidates(run))
    numbers = [re.findall(r"\d+", path.name.removesuffix(path.suffix) or path.name) for path in found]
    if found and all(numbers):
        ordered = sorted(zip(found, numbers, strict=True), key=lambda p: (int(p[1][-1]), p[0].name), reverse=True)
        return [path for path, _ in ordered]

    def written(path: Path) -> float:
        seal = seal_path(path)
        return os.stat(seal if seal.is_file() else path).st_mtime

    return sorted(found, key=written, reverse=True)


def _candidates(run: Path) -> Iterator[Path]:
    unsealed = []
    names = set()
    for path in sorted(run.iterdir()):
        name = path.name.removesuffix(f".{SEAL}")
        path = run / name
        if name == SEAL or name in names:
            continue
        names.add(name)
        if is_sealed(path) or is_spt(path):
            yield path
        elif path.is_dir():
            unsealed.append(name)
    if unsealed:
        note(f"not sealed, and not considered: {', '.join(unsealed)}")


def seal_path(path: Path) -> Path:
    """The file that holds the seal of a folder or file.

    Example:
        >>> seal_path(Path("model.pt")).name
        'model.pt.shrinkpoint-seal.json'
    """
    return path / SEAL if path.is_dir() else path.with_name(f"{path.name}.{SEAL}")


def is_sealed(path: Path) -> bool:
    """Return whether a folder or file has a seal; the file itself may be missing."""
    return seal_path(path).is_file()


def make_seal(path: Path, progress: Progress | None = None) -> Seal:
    """Read all files of a folder, or one file, and return its seal.

    Args:
        path: the folder or file.
        progress: called with (file, bytes read, bytes in all) after each block.

    Raises:
        BadArgumentError: the folder is empty, or holds something that is neither a file nor a folder.
        OSError: a file cannot be read, or changes while it is read.
    """
    names = list(_files(path))
    if not names:
        raise BadArgumentError(f"{path}: holds no file to seal")
    total = sum(os.stat(file).st_size for _, file in names)
    done = 0
    files = {}
    for name, file in names:
        before = os.stat(file)
        found = _read(file, _from(progress, name, done, total), most=before.st_size)
        after = os.stat(file)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or found.size != after.st_size:
            raise OSError(f"{file}: changed while it was read; seal a checkpoint after it has been written")
        files[name] = found
        done += found.size
    return Seal(files, time.time())


def to_bytes(seal: Seal) -> bytes:
    """The contents of a seal file; `from_bytes` gives an equal seal."""
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "sealed_at": seal.sealed_at,
        "files": {name: {"size": f.size, "blake3": f.blake3} for name, f in sorted(seal.files.items())},
    }
    return _sealed(fields)


def from_bytes(data: bytes) -> Seal:
    """The seal in the contents of a seal file.

    Raises:
        CorruptDataError: the contents are damaged, or of a newer version.
    """
    try:
        fields = loads(data)
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            raise ValueError("it is not a seal")
        if fields["version"] != VERSION:
            raise ValueError(f"it has version {fields['version']!r}; this release reads version {VERSION}")
        fields.pop("checksum", None)
        if _sealed(fields) != data:
            raise ValueError("its checksum does not match")
        files = {str(name): Sealed(f["size"], f["blake3"]) for name, f in fields["files"].items()}
        if not all(type(f.size) is int and f.size >= 0 and _DIGEST.fullmatch(f.blake3) for f in files.values()):
            raise ValueError("a size or checksum in it is malformed")
        return Seal(files, float(fields["sealed_at"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptDataError(f"the seal cannot be used: {str(error)[:200]}") from None


def read_seal(path: Path) -> Seal:
    """The seal of a folder or file.

    Raises:
        CorruptDataError: the seal is damaged.
        OSError: the seal does not exist, or cannot be read.
    """
    file = seal_path(path)
    try:
        return from_bytes(read_bytes(file, MOST_JSON))
    except CorruptDataError as error:
        raise CorruptDataError(f"{file}: {error}") from None


def differences(path: Path, seal: Seal, progress: Progress | None = None) -> list[Difference]:
    """Compare a folder or file with its seal, and return the files that differ, by path.

    All contents are read. An unreadable file counts as altered.

    Args:
        path: the folder or file.
        seal: as `read_seal` returns it.
        progress: called with (file, bytes read, bytes in all) after each block.
    """
    found = dict(_files(path, strict=False))
    out = [Difference(name, "added", "") for name in found.keys() - seal.files.keys()]
    total, done = sum(f.size for f in seal.files.values()), 0
    for name, was in seal.files.items():
        if name not in found:
            out.append(Difference(name, "missing", ""))
        else:
            out += _difference(name, found[name], was, _from(progress, name, done, total))
        done += was.size
    return sorted(out, key=lambda d: d.file)


def _difference(name: str, file: Path, was: Sealed, progress: Callable[[int], object]) -> list[Difference]:
    try:
        size = os.stat(file).st_size
        if size != was.size:  # no need to read it
            sizes = f"{size} of {was.size} bytes"
            return [Difference(name, "torn" if size < was.size else "altered", sizes)]
        now = _read(file, progress, most=size)
    except OSError as error:
        return [Difference(name, "altered", f"cannot be read: {error.strerror or error}")]
    return [] if now == was else [Difference(name, "altered", "")]


def _from(progress: Progress | None, name: str, done: int, total: int) -> Callable[[int], None]:
    """Report the bytes read of one file, after `done` bytes of the files before it."""

    def report(nbytes: int) -> None:
        if progress is not None:
            progress(name, done + nbytes, total)

    return report


def _read(file: Path, progress: Callable[[int], object], most: int) -> Sealed:
    """Return size and checksum of a file; of its beginning if it grows beyond `most` bytes."""
    digest = blake3.blake3(max_threads=blake3.blake3.AUTO)
    block, size = bytearray(_BLOCK), 0
    with open(file, "rb", buffering=0, opener=regular) as opened:
        while size <= most and (count := opened.readinto(block)):
            digest.update(memoryview(block)[:count])
            size += count
            progress(size)
    return Sealed(size, digest.hexdigest())


def _files(path: Path, *, strict: bool = True) -> Iterator[tuple[str, Path]]:
    """Yield the files to seal, sorted by relative path, without the seal itself.

    Links to files are followed, because the caches of model hubs consist of them. With `strict`, entries that cannot be
    sealed, and links out of the folder and its cache, raise BadArgumentError; otherwise they count as files, which the
    seal does not list.
    """
    if not path.is_dir():
        if strict or path.exists():
            yield path.name, path
        return

    def failed(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(path, onerror=failed):
        linked = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = sorted(set(folders) - set(linked))
        for name in sorted([*names, *linked]):
            file = Path(folder, name)
            relative = file.relative_to(path).as_posix()
            if relative == SEAL:
                continue
            if strict and not file.is_file():
                raise BadArgumentError(f"{file}: is neither a file nor a folder, and cannot be sealed")
            if strict:
                check_link(file, path)
            if strict and not is_utf8(relative):
                raise BadArgumentError(f"{relative!a}: its name is not valid UTF-8, and cannot be sealed")
            yield relative, file


def _sealed(fields: dict[str, Any]) -> bytes:
    """Return the JSON of some fields and of its checksum."""

    def dump(found: dict[str, Any]) -> bytes:
        return json.dumps(found, indent=1).encode("ascii") + b"\n"

    return dump({**fields, "checksum": blake3.blake3(dump(fields)).hexdigest()})
