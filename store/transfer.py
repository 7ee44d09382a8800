"""Copies of steps with their labels and records from one store to another."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from blake3 import blake3

from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError
from . import labels
from .catalog import Catalog, manifest_path
from .chain import FOLDER, opener
from .files import Files
from .frozen_sets import FrozenSets, needed_by
from .lock import Lease
from .manifest import Manifest
from .parts import PARTS


def copy_all(
    source: Catalog,
    chosen: Mapping[int, Manifest],
    target: Catalog,
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
    there = _existing(source, chosen, target)
    sound: set[str] = set()
    source_sets, target_sets, copied = FrozenSets(source.files), FrozenSets(target.files), set[str]()
    has_sets = bool(source_sets.catalog.steps())

    def copy_sets(manifest: Manifest) -> None:
        """Copy the frozen sets of a step, each once."""
        for digest in sorted(needed_by(opener(source.files, manifest)(None)) - copied) if not manifest.shards else ():
            try:
                source_sets.copy_to(target_sets, digest, repair=repair)
            except (CorruptDataError, MissingParentError) as e:
                raise type(e)(f"step {manifest.step}: {e}") from None
            copied.add(digest)

    def copy_step(manifest: Manifest) -> None:
        copy_files(source.files, manifest, target.files, sound)
        copy_sets(manifest)
        target.commit(manifest)

    chosen = dict(chosen)
    for step in sorted(chosen):
        if step not in there:
            try:
                source.settled(step, lambda e: copy_step(e.manifest))
            except MissingParentError:
                if not may_go or source.get(step) is not None:
                    raise
                del chosen[step]
            lease.renew()
            continue
        if has_sets:
            source.settled(step, lambda e: copy_sets(e.manifest))
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


def _existing(source: Catalog, chosen: Mapping[int, Manifest], target: Catalog) -> dict[int, Manifest]:
    """Return the manifests of chosen steps that the target has, made durable.

    Raises: as `copy_all`, where the target has a different step or tag.
    """
    tags = {name: step for name, step in labels.tags(source.files).items() if step in chosen}
    try:
        entries = {step: e for step, e in target.all().items() if step in chosen}
    except CorruptDataError as e:
        raise CorruptDataError(f"{target.url}: {e}; drop the step there, and copy again") from None
    for step, entry in entries.items():
        if entry.manifest.identity != chosen[step].identity:
            raise BadArgumentError(f"step {step}: {target.url} has another one of that number")
    labels.check_alike(target.files, tags)
    for name, step in labels.tags(target.files).items():
        if tags.get(name, step) != step:
            raise BadArgumentError(f"tag {name!r}: {target.url} has it at step {step}")
    # A copy may have been killed after it created a manifest, before that was durable.
    target.files.sync([manifest_path(e) for e in entries.values()])
    return {step: entry.manifest for step, entry in entries.items()}


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
        path, is_sound = f"{FOLDER}/{name}", name in sound
        with contextlib.suppress(FileNotFoundError):
            if not is_sound and target.exists(path) and _is_named(name, target.read(path)):
                target.sync([path])
                is_sound = True
        if not is_sound:
            try:
                data = source.read(path)
            except FileNotFoundError:
                raise MissingParentError(f"step {manifest.step}: its file {source.path(path)} is missing") from None
            if not _is_named(name, data):
                raise CorruptDataError(f"step {manifest.step}: {source.path(path)} does not match its name")
            target.write(path, data)
        sound.add(name)


def _is_named(name: str, data: bytes) -> bool:
    return name.endswith(f"-{blake3(data).hexdigest()[:16]}.spt")
