"""`seal`: write the checksums of a checkpoint of any format, for `verify`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..integrity import SEAL, differences, is_sealed, make_seal, read_seal, seal_path, to_bytes
from ..kernels.errors import BadArgumentError, CorruptDataError, ShrinkpointError
from .files import check_free, is_spt, write_file
from .options import AsJson, Force
from .output import bytes_done, emit, line, note, size
from .sources import check_exists, is_store, read_file

if TYPE_CHECKING:
    from ..integrity import Difference


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
        write_file(target, force, partial(_write, to_bytes(made)))
        nbytes = sum(f.size for f in made.files.values())
        written.append({"path": str(path), "seal": str(target), "files": len(made.files), "nbytes": nbytes})
        if not as_json:
            line(f"{target}: {len(made.files)} files, {size(nbytes)}")
    if as_json:
        emit({"sealed": written})


def _write(data: bytes, file: Path) -> None:
    file.write_bytes(data)


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


def report_differences(path: Path, found: list[Difference]) -> list[dict[str, Any]]:
    """The differences as the problems of `verify`."""
    return [{"path": str(path), "file": d.file, "kind": d.kind, "problem": f"{path}: {d}"} for d in found]
