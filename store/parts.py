"""The parts of a store: the folders that copies, checks, sizes and collection cover.

Manifests, data files and frozen sets are copied step by step (`transfer`); the other parts have a `copy` of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..codec.errors import CorruptDataError
from . import labels, restore_counter, rewinds
from .catalog import FOLDER as STEPS
from .catalog import FROZEN
from .chain import FOLDER as DATA
from .files import Files


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a store.

    Args:
        folder: its name.
        read: reads one of its files, or raises CorruptDataError; None: its files are checked with the steps.
        copy: copies what belongs to some steps (number -> identity) from one store to another; None: copied with them.
        is_store: whether it is a store with the same parts.
    """

    folder: str
    read: Callable[[Files, str], object] | None = None
    copy: Callable[[Files, Files, Mapping[int, str]], None] | None = None
    is_store: bool = False


PARTS = (
    Part(STEPS),
    Part(DATA),
    Part(FROZEN, is_store=True),
    Part(labels.PINS, copy=labels.copy_pins),
    Part(labels.TAGS, read=labels.read_file, copy=labels.copy_tags),
    Part(restore_counter.FOLDER, copy=restore_counter.copy),
    Part(rewinds.FOLDER, read=rewinds.read_file, copy=rewinds.copy),
)


def stores(files: Files) -> Iterator[tuple[str, Files]]:
    """Yield a store and the stores within it: the prefix of their names, and their files."""
    yield "", files
    for part in PARTS:
        if part.is_store:
            yield f"{part.folder}/", files.below(part.folder)


def unreadable(files: Files) -> dict[str, str]:
    """Return path -> reason of the damaged files that are not checked with the steps."""
    reasons = {}
    for prefix, inner in stores(files):
        for folder, read in [(part.folder, part.read) for part in PARTS if part.read is not None]:
            for name in inner.list(folder):
                try:
                    read(inner, name)
                except CorruptDataError as e:
                    reasons[f"{prefix}{folder}/{name}"] = str(e)
    return reasons
