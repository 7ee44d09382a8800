"""Frozen sets: arrays that many steps share, stored once in the folder `frozen` of a store.

A set is a step of a store of its own, with a tag that contains its hash. A checkpoint that needs the set has the hash
among its plain values.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable

from ..codec.errors import ShrinkpointError
from . import labels
from .catalog import FOLDER as STEPS
from .catalog import Catalog, Entry
from .chain import FOLDER as DATA
from .chain import opener
from .files import TEMPORARY, Files
from .lock import InUseError, open_lock
from .manifest import manifest_name
from .urls import opened

FOLDER = "frozen"
UNUSED_FOR = 86_400.0
"""Seconds since its last mark from which a set may be removed: a save marks it before the step that needs it exists."""
_TAG = "frozen-"


def tag_of(digest: str) -> str:
    """Return the tag of the set with a hash."""
    return f"{_TAG}{digest}"


def collect_frozen(
    files: Files, url: str, entries: Callable[[], Iterable[Entry]], *, dry_run: bool = False
) -> list[str]:
    """Remove the frozen sets that no step needs and no save has marked for a day.

    While another process writes a set, or a step or set cannot be read, nothing is removed.

    Args:
        files: of the store, whose lock is held alone.
        url: of the store.
        entries: returns all steps that are kept; called only if a set is unmarked.
        dry_run: remove nothing.

    Returns:
        Names of the files that were removed, or would be.
    """
    if not files.list(f"{FOLDER}/{STEPS}"):
        return []
    own = opened(f"{url.rstrip('/')}/{FOLDER}")
    catalog = Catalog(own)
    with contextlib.suppress(InUseError, ShrinkpointError), open_lock(own).alone(0.0):
        sets, tags = catalog.all(), labels.tags(own)
        old = _unmarked(own, sets, tags)
        digests = {name.removeprefix(_TAG) for name, step in tags.items() if step in old}
        used = _needed(files, entries(), digests) if digests else set()
        doomed = old - {step for name, step in tags.items() if name.removeprefix(_TAG) in used}
        shared = {name for step, entry in sets.items() if step not in doomed for name in entry.manifest.files}
        names = [labels.tag_name(name) for name, step in tags.items() if step in doomed]
        generations = {step: catalog.generations()[step] for step in sorted(doomed)}
        data = sorted({name for step in doomed for name in sets[step].manifest.files} - shared)
        found = [f"{STEPS}/{manifest_name(step, n)}" for step, known in generations.items() for n in known]
        if not dry_run:
            own.remove(names)
            catalog.drop(generations)
            own.remove([f"{DATA}/{name}" for name in data])
        return [f"{FOLDER}/{name}" for name in (*names, *found, *(f"{DATA}/{name}" for name in data))]
    return []


def _unmarked(own: Files, sets: dict[int, Entry], tags: dict[str, int]) -> set[int]:
    """Return the sets that no save has marked for a day.

    By the storage's clock; where it does not give ages, the result is empty.
    """
    kept = labels.pins(own) | {step for name, step in tags.items() if not name.startswith(_TAG)}
    marks = {s: [f"{STEPS}/{manifest_name(s, e.generation)}"] for s, e in sets.items() if s not in kept}
    for name, step in tags.items():
        if step in marks:
            marks[step].append(labels.tag_name(name))
    clock = f"{STEPS}/{TEMPORARY}{uuid.uuid4().hex}"
    own.write(clock, b"")
    try:
        now = own.modified(clock)
        return {s for s, names in marks.items() if now - max(map(own.modified, names)) > UNUSED_FOR}
    except (FileNotFoundError, NotImplementedError, KeyError):
        return set()
    finally:
        own.remove([clock])


def _needed(files: Files, entries: Iterable[Entry], digests: set[str]) -> set[str]:
    """Return the hashes that occur among the plain values of any step.

    Raises:
        ShrinkpointError: a step cannot be read.
    """
    found: set[str] = set()
    for entry in sorted(entries, key=lambda e: -e.manifest.step):
        if found == digests:
            break
        if not entry.manifest.shards:  # `Writer` for torch.distributed.checkpoint has no frozen sets
            tree = opener(files, entry.manifest)(None).header["tree"]
            found |= digests.intersection(node for node in tree if isinstance(node, str))
    return found
