"""Inputs of commands: options, configurations, stores, and checkpoint files."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError, NewerFormatError
from ..codec.format.bounded_json import loads
from ..codec.format.ranged import Ranged
from ..demo import presets
from ..store.files import DAMAGE
from ..store.local import read_file as read_bytes
from ..store.local import regular
from ..store.manifest import Catalog
from .dcp import METADATA, is_dcp, is_ours
from .outputs import listed, nearest, note

if TYPE_CHECKING:
    from ..codec.checkpoint import Checkpoint
    from ..codec.config import Config
    from ..store.files import Files
    from ..store.manifest import Manifest
    from ..store.store import Store
    from ..trainers.dcp.metadata import RankFile

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
Step = Annotated[str | None, typer.Option(help="Step or tag of a store; by default the newest intact step.")]
Parents = Annotated[
    list[Path] | None,
    typer.Option("--parent", help="A file of the chain that a delta file needs; repeatable, in any order."),
]
StoreUrl = Annotated[str, typer.Argument(metavar="STORE", help="A folder or fsspec URL.")]
T = TypeVar("T")
_ALONE = re.compile(r"__(\d{1,6})\.metadata")
"""Metadata of a rank that saved without the others (`use_collectives=False`)."""


def config(
    preset: str | None, file: Path | None, rate: float | None = None, max_rel_error: float | None = None
) -> Config:
    """Return the configuration that the options of a command choose.

    Args:
        preset: a name of `presets`; None: the configuration in `file`, else "default".
        file: JSON of `Config.to_json`, or None.
        rate: replaces the rate of the configuration, unless None.
        max_rel_error: replaces the error limit of the configuration, unless None.

    Raises:
        BadArgumentError: both a preset and a file; an unknown preset; a file that is not a configuration; out of range.
        OSError: the file cannot be read.
    """
    if preset is not None and file is not None:
        raise BadArgumentError("--preset and --config are both given; use one of them")
    if file is not None:
        found = _read_config(file)
    else:
        known = presets()
        if (preset or "default") not in known:
            near = nearest(str(preset), known)
            raise BadArgumentError(f"--preset is {preset!r}; it must be one of {', '.join(known)}{near}")
        found = known[preset or "default"]()
    changed: dict[str, Any] = {"rate": rate, "max_rel_error": max_rel_error}
    return replace(found, **{name: value for name, value in changed.items() if value is not None})


def _read_config(file: Path) -> Config:
    from ..codec.config import Config

    try:
        return Config.from_json(loads(file.read_bytes()))
    except BadArgumentError as error:
        raise BadArgumentError(f"{file}: {error}") from None
    except ValueError as error:
        raise BadArgumentError(f"{file}: not JSON: {str(error)[:200]}") from None


def is_url(text: str) -> bool:
    """Return whether the text is an fsspec URL rather than a local path."""
    return "://" in text or "::" in text


def is_store(text: str) -> bool:
    """Return whether the text is a URL, or the path of a folder with a store's steps."""
    return is_url(text) or os.path.isdir(os.path.join(text, "steps"))


def open_store(url: str, *, empty: bool = False) -> Store:
    """Open an existing store that has checkpoints.

    Args:
        url: folder or URL.
        empty: also accept a store without steps that has files to remove; default False.

    Raises:
        OSError: the path does not exist.
        CorruptDataError: it is not a store, or is empty.
    """
    from ..store.store import Store

    _check_store(url)
    store = Store(url)
    if not store.steps() and not (empty and store.gc(dry_run=True)):
        raise CorruptDataError(f"{url}: holds no checkpoint")
    return store


def open_listing(url: str) -> Files:
    """Open the files of a store that has checkpoints, without importing the codecs.

    Raises:
        OSError: the path does not exist.
        CorruptDataError: it is not a store, or is empty.
    """
    from ..store.urls import opened

    _check_store(url)
    files = opened(url)
    if not Catalog(files).steps():
        raise CorruptDataError(f"{url}: holds no checkpoint")
    return files


def _check_store(url: str) -> None:
    if not is_url(url):
        check_exists(url)  # a missing path is not an empty store
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(os.path.join(url, "steps"))  # a folder that may not be read could be a store
        if not is_store(url):
            raise CorruptDataError(f"{url}: not a store: it has no folder 'steps'{_advice(Path(url))}")


def _advice(folder: Path) -> str:
    """Return what a folder that is not a store is instead, for an error message."""
    if not folder.is_dir():
        return ""
    if is_sharded(folder):
        return "; it is one sharded checkpoint, which `shrinkpoint info` shows"
    if is_dcp(folder):
        return "; torch.distributed.checkpoint wrote it: `shrinkpoint try` shows what it becomes"
    above = folder.absolute().parent
    if is_store(str(above)) or is_sharded(above):
        return f"; it is a part of {above}"
    names = sorted(path.name for path in folder.iterdir() if is_store(str(path)) or is_sharded(path))
    return f"; choose a folder in it: {listed(names, 3)}" if names else ""


def check_exists(path: str) -> None:
    """Raise FileNotFoundError for a missing path, with the most similar name in its folder.

    Raises:
        OSError: the path does not exist, or cannot be reached.
    """
    try:
        os.stat(path)
    except FileNotFoundError as error:
        folder, name = os.path.split(path.rstrip("/"))
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = os.listdir(folder or ".")
        found = nearest(name, names)
        raise FileNotFoundError(error.errno, f"{error.strerror}{found}", path) from None


def parse_step(text: str) -> int | str:
    """A step's number, or a tag."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 100 else text


def is_spt(path: Path) -> bool:
    """Return whether a file is a shrinkpoint checkpoint file."""
    from ..codec.format.container import MAGIC

    if not os.path.isfile(path):
        return False
    with open(path, "rb", opener=regular) as file:
        return file.read(len(MAGIC)) == MAGIC


def is_utf8(text: str) -> bool:
    """Return whether a text has no parts that UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def newest_intact(store: Store, read: Callable[[int], T]) -> tuple[int, T]:
    """Return the newest intact step and the result of `read` for it.

    Steps that are skipped are noted on standard error.
    """
    skipped = []
    for step in store.candidates():
        try:
            return step, read(step)
        except DAMAGE as error:
            skipped.append(str(error))
            note(f"warning: skipped {error}")
    raise CorruptDataError(f"{store.url}: no checkpoint is intact: {'; '.join(skipped)}")


def read_step(store: Store, step: str | None, read: Callable[[int], T]) -> tuple[int, T]:
    """Return the step that is asked for and the result of `read`; None: the newest intact one."""
    if step is None:
        return newest_intact(store, read)
    number = store.describe(parse_step(step)).step
    return number, read(number)


def header_of_file(path: Path) -> Checkpoint:
    """Read only the header of a checkpoint file; its content hash is not computed and is "".

    Raises:
        OSError, CorruptDataError, NewerFormatError: with the path.
    """
    from ..codec.checkpoint import Checkpoint

    if not is_spt(path):
        path.stat()  # a missing file is an OSError
        raise CorruptDataError(f"{path}: not a shrinkpoint file; `shrinkpoint try {path}` reads other checkpoints")
    with open(path, "rb", opener=regular) as file:

        def fetch(start: int, stop: int) -> bytes:
            file.seek(start)
            return file.read(stop - start)

        try:
            return Checkpoint(Ranged(os.fstat(file.fileno()).st_size, fetch), None)
        except (CorruptDataError, NewerFormatError) as error:
            raise type(error)(f"{path}: {error}") from None


def is_sharded(folder: Path) -> bool:
    """Return whether a folder is a checkpoint that the storage writer of shrinkpoint wrote."""
    return folder.is_dir() and (_own_ranks(folder) != [] or ((folder / METADATA).is_file() and is_ours(folder)))


def headers_of_folder(folder: Path) -> dict[int | None, Checkpoint]:
    """Read the header of each rank's container.

    Raises:
        CorruptDataError, MissingParentError, NewerFormatError: one cannot be read.
    """
    from ..trainers.dcp.places import open_folder, read_index

    files = open_folder(folder)
    alone = [None] if (folder / METADATA).is_file() else _own_ranks(folder)
    return _headers(files, [file for rank in alone for file in read_index(files, rank).files])


def headers_of_step(store: Store, manifest: Manifest) -> dict[int | None, Checkpoint]:
    """Read the header of a step, under None, or that of each rank's container of a sharded one.

    Raises:
        CorruptDataError, MissingParentError, NewerFormatError: one cannot be read.
    """
    if not manifest.shards:
        return {None: store.header(manifest)}
    from ..trainers.dcp.places import read_step

    return _headers(store.session.catalog.files, read_step(store, manifest.step).files)


def _own_ranks(folder: Path) -> list[int]:
    """Return the ranks that saved to a folder without the others."""
    return sorted(int(found[1]) for path in folder.iterdir() if (found := _ALONE.fullmatch(path.name)))


def _headers(files: Files, ranks: Iterable[RankFile]) -> dict[int | None, Checkpoint]:
    from ..trainers.dcp.places import opener

    return {file.rank: opener(files, file)(None) for file in ranks}


def read_file(path: Path) -> Checkpoint:
    """Read a checkpoint file and verify its checksums; a delta is not resolved.

    Raises:
        OSError, CorruptDataError, NewerFormatError: with the path.
    """
    from ..codec.checkpoint import Checkpoint

    data = read_bytes(path)
    if not is_spt(path):
        raise CorruptDataError(f"{path}: not a shrinkpoint file")
    try:
        return Checkpoint.from_bytes(data)
    except (CorruptDataError, NewerFormatError) as error:
        raise type(error)(f"{path}: {error}") from None


def resolved(path: Path, parents: Sequence[Path]) -> Checkpoint:
    """Read a checkpoint file and resolve it with the files of its chain, in any order.

    Raises:
        MissingParentError: a parent is not among them.
    """
    below = {ckpt.identity: ckpt for ckpt in map(read_file, parents)}
    return chain_of(read_file(path), path, below)


def chain_of(ckpt: Checkpoint, path: Path, below: dict[str, Checkpoint]) -> Checkpoint:
    """Resolve a checkpoint with the other checkpoints of its chain, given by identity.

    Raises MissingParentError if one is missing.
    """
    from ..codec.checkpoint import Checkpoint

    chain = [ckpt]
    while not chain[-1].is_resolved:
        parent = below.get(str(chain[-1].parent_id))
        if parent is None or parent in chain:
            needed = str(chain[-1].parent_id)[:16]
            given = ", and it is not among the given files" if below.keys() - {ckpt.identity} else ""
            raise MissingParentError(f"{path}: needs the checkpoint {needed}...{given}; use --parent FILE")
        chain.append(parent)
    found = chain.pop()
    while chain:
        found = Checkpoint.from_bytes(chain.pop().to_bytes(), found)
    return found


def subtree(state: Any, under: str) -> Any:
    """Return the part of a state at a displayed path of keys joined by "/".

    Raises:
        BadArgumentError: the part does not exist.
    """
    found, rest = state, under
    while rest:
        items: dict[str, Any] = {}
        if isinstance(found, dict):
            items = {str(k): v for k, v in found.items()}
        elif isinstance(found, (list, tuple)):
            items = {str(i): v for i, v in enumerate(found)}
        # A key may contain "/"; the longest matching key is taken.
        fitting = [k for k in items if rest == k or rest.startswith(k + "/")]
        if not fitting:
            near = nearest(rest, items) or f"; the keys here are {', '.join(items)[:200]}"
            raise BadArgumentError(f"--under {under!r}: there is no such part{near}")
        key = max(fitting, key=len)
        found, rest = items[key], rest[len(key) + 1 :]
    return found
