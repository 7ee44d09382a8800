"""Copying steps, and what is said of them, from one store's files to another's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blake3 import blake3

from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError
from . import branches, labels, restores
from .catalog import Catalog
from .chain import FOLDER
from .files import Files
from .lock import Lease
from .manifest import Manifest


@dataclass(frozen=True, slots=True)
class Side:
    """A store that is copied from or to."""

    url: str
    files: Files
    catalog: Catalog


def copy_all(source: Side, chosen: Mapping[int, Manifest], target: Side, lease: Lease) -> None:
    """Copy steps with all they need, the lowest first, then their pins and tags, all restores so far, and the records
    of runs that went back.

    Args:
        source: where they are.
        chosen: manifests of the steps.
        target: where to.
        lease: on the target, held shared; renewed from step to step.

    Raises:
        BadArgumentError: the target has another one of a number or tag; nothing is copied.
        CorruptDataError, MissingParentError, NewerFormatError: a step is not intact; those before it are copied.
    """
    tags = {name: step for name, step in labels.tags(source.files).items() if step in chosen}
    there = {step: e.manifest for step, e in target.catalog.all().items() if step in chosen}
    for step, manifest in there.items():
        if manifest.identity != chosen[step].identity:
            raise BadArgumentError(f"step {step}: {target.url} has another one of that number")
    for name, step in labels.tags(target.files).items():
        if tags.get(name, step) != step:
            raise BadArgumentError(f"tag {name!r}: {target.url} has it at step {step}")
    for step in sorted(chosen):
        if step not in there:
            source.catalog.settled(step, lambda e: copy_step(source.files, e.manifest, target.files, target.catalog))
        lease.renew()
    for step in sorted(labels.pins(source.files) & set(chosen)):
        target.files.write(labels.pin_name(step), b"")
    for name, step in tags.items():
        target.files.write(labels.tag_name(name), labels.tag_data(step))
    restores.copy(source.files, target.files)
    for record in branches.read(source.files):
        if chosen.keys() & record.left.keys():
            branches.write(target.files, record)


def copy_step(source: Files, manifest: Manifest, target: Files, catalog: Catalog) -> None:
    """Copy what is missing of a step's chain, the base first, then let the step exist.

    Args:
        source: where the step is.
        manifest: of the step.
        target: where to.
        catalog: of the target.

    Raises:
        CorruptDataError, MissingParentError: a file is not what its name says, or gone.
    """
    for name in reversed(manifest.chain):
        path = f"{FOLDER}/{name}"
        if target.exists(path):
            continue
        try:
            data = source.read(path)
        except FileNotFoundError:
            raise MissingParentError(f"step {manifest.step}: its file {source.path(path)} is gone") from None
        if not name.endswith(f"-{blake3(data).hexdigest()[:16]}.spt"):
            raise CorruptDataError(f"step {manifest.step}: {source.path(path)} is not what its name says")
        target.write(path, data)
    catalog.commit(manifest)
