"""Headers of sharded checkpoints: one container for each rank."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .dcp import METADATA, is_ours

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ..codec.checkpoint import Checkpoint
    from ..store.files import Files
    from ..store.store import Store
    from ..trainers.dcp.metadata import RankFile

_ALONE = re.compile(r"__(\d{1,6})\.metadata")
"""Metadata of a rank that saved without the others (`use_collectives=False`)."""


def is_sharded(folder: Path) -> bool:
    """Return whether a folder is a checkpoint that the storage writer of shrinkpoint wrote."""
    return folder.is_dir() and (_own_ranks(folder) != [] or ((folder / METADATA).is_file() and is_ours(folder)))


def headers_of_folder(folder: Path) -> dict[int, Checkpoint]:
    """Read the header of each rank's container.

    Raises:
        CorruptDataError, MissingParentError, NewerFormatError: one cannot be read.
    """
    from ..trainers.dcp.chain import open_folder, read_index

    files = open_folder(folder)
    alone = [None] if (folder / METADATA).is_file() else _own_ranks(folder)
    return _headers(files, [file for rank in alone for file in read_index(files, rank).files])


def headers_of_step(store: Store, step: int) -> dict[int, Checkpoint]:
    """Read the header of each rank's container in a sharded step of a store.

    Raises:
        CorruptDataError, MissingParentError, NewerFormatError: one cannot be read.
    """
    from ..trainers.dcp.target import read_step

    return _headers(store.session.catalog.files, read_step(store, step).files)


def _own_ranks(folder: Path) -> list[int]:
    """Return the ranks that saved to a folder without the others."""
    return sorted(int(found[1]) for path in folder.iterdir() if (found := _ALONE.fullmatch(path.name)))


def _headers(files: Files, ranks: Iterable[RankFile]) -> dict[int, Checkpoint]:
    from ..trainers.dcp.chain import opener

    return {file.rank: opener(files, file)(None) for file in ranks}
