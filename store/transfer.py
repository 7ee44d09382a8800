"""Copies of steps with their labels and records from one store to another."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from blake3 import blake3

from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError
from . import labels
from .catalog import FOLDER as STEPS
from .catalog import Catalog
from .chain import FOLDER, opener
from .files import Files
from .frozen_sets import FrozenSets, needed_by
from .lock import Lease
from .manifest import Manifest, manifest_name
from .parts import PARTS


@dataclass(frozen=True, slots=True)
class Side:
    """Source or target of a copy."""

    url: str
    files: Files
    catalog: Catalog


def copy_all(
    source: Side,
    chosen: Mapping[int, Manifest],
    target: Side,
    lease: Lease,
    *,
    may_go: bool = False,
    repair: bool = False,
) -> list[int]:
    """Copy steps, the lowest first, each after its frozen set; then the other parts.

    Args:
        source: the store to copy from.
        chosen: manifests of the steps.
        target: the store to copy to.
        lease: on the target, held shared; renewed at every step.
        may_go: leave out a step that another process removes before its turn; otherwise it is an error.
        repair: also read the files of steps that the target has already, and rewrite damaged ones.

    Returns:
        The chosen steps that the target has now.

    Raises:
        BadArgumentError: the target has a different step or tag of that name; nothing is copied.
        CorruptDataError, MissingParentError, NewerFormatError: a step is not intact; those before it are copied.
    """
    tags = {name: step for name, step in labels.tags(source.files).items() if step in chosen}
    try:
        entries = {step: e for step, e in target.catalog.all().items() if step in chosen}
    except CorruptDataError as e:
        raise CorruptDataError(f"{target.url}: {e}; drop the step there, and copy again") from None
    there = {step: e.manifest for step, e in entries.items()}
    for step, manifest in there.items():
        if manifest.identity != chosen[step].identity:
            raise BadArgumentError(f"step {step}: {target.url} has another one of that number")
    labels.check_alike(target.files, tags)
    for name, step in labels.tags(target.files).items():
        if tags.get(name, step) != step:
            raise BadArgumentError(f"tag {name!r}: {target.url} has it at step {step}")
    # A copy may have been killed after it created a manifest, before that was durable.
    target.files.sync([f"{STEPS}/{manifest_name(step, e.generation)}" for step, e in entries.items()])
    sound: set[str] = set()
    frozen = _FrozenCopy(source.files, target.files, repair)
    chosen = dict(chosen)
    for step in sorted(chosen):
        if step not in there:
            try:
                source.catalog.settled(step, lambda e: _copy_step(source.files, e.manifest, target, sound, frozen))
            except MissingParentError:
                if not may_go or source.catalog.get(step) is not None:
                    raise
                del chosen[step]
            lease.renew()
            continue
        if frozen.any:
            source.catalog.settled(step, lambda e: frozen.of(e.manifest))
        if repair:
            try:
                copy_files(source.files, there[step], target.files, sound)
            except MissingParentError:
                raise MissingParentError(
                    f"step {step}: damaged in {target.url}, and {source.url} has it in other files, because one was "
                    "compacted: drop it there, and copy again"
                ) from None
        lease.renew()
    identities = {step: manifest.identity for step, manifest in chosen.items()}
    for part in PARTS:
        if part.copy is not None:
            part.copy(source.files, target.files, identities)
    return sorted(chosen)


def copy_files(source: Files, manifest: Manifest, target: Files, sound: set[str]) -> None:
    """Copy the missing or damaged files of a step, the base of its chain before its deltas.

    Args:
        source: the files to copy from.
        manifest: of the step.
        target: the files to copy to.
        sound: names of files that the target is known to have; the files of the chain are added.

    Raises:
        CorruptDataError, MissingParentError: a file does not match its name, or is missing.
    """
    for name in reversed(manifest.files):
        path = f"{FOLDER}/{name}"
        if name in sound:
            continue
        if _is_sound(target, name):
            target.sync([path])
            sound.add(name)
            continue
        try:
            data = source.read(path)
        except FileNotFoundError:
            raise MissingParentError(f"step {manifest.step}: its file {source.path(path)} is missing") from None
        if not _is_named(name, data):
            raise CorruptDataError(f"step {manifest.step}: {source.path(path)} does not match its name")
        target.write(path, data)
        sound.add(name)


class _FrozenCopy:
    """Copies of the frozen sets that steps need, each once."""

    def __init__(self, source: Files, target: Files, repair: bool) -> None:
        self._files, self._source, self._target = source, FrozenSets(source), FrozenSets(target)
        self._repair, self._done = repair, set[str]()
        self.any = bool(self._source.catalog.steps())

    def of(self, manifest: Manifest) -> None:
        """Copy the sets of a step.

        Raises:
            CorruptDataError, MissingParentError: with the step.
        """
        if manifest.shards:
            return
        for digest in sorted(needed_by(opener(self._files, manifest)(None)) - self._done):
            try:
                self._source.copy_to(self._target, digest, repair=self._repair)
            except (CorruptDataError, MissingParentError) as e:
                raise type(e)(f"step {manifest.step}: {e}") from None
            self._done.add(digest)


def _copy_step(source: Files, manifest: Manifest, target: Side, sound: set[str], frozen: _FrozenCopy) -> None:
    copy_files(source, manifest, target.files, sound)
    frozen.of(manifest)
    target.catalog.commit(manifest)


def _is_sound(files: Files, name: str) -> bool:
    """Return whether a file exists and matches its name."""
    path = f"{FOLDER}/{name}"
    with contextlib.suppress(FileNotFoundError):
        return files.exists(path) and _is_named(name, files.read(path))
    return False


def _is_named(name: str, data: bytes) -> bool:
    return name.endswith(f"-{blake3(data).hexdigest()[:16]}.spt")
