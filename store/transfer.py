"""Copying steps from one store's files to another's."""

from __future__ import annotations

from blake3 import blake3

from ..codec.errors import CorruptDataError, MissingParentError
from .catalog import Catalog
from .chain import FOLDER
from .files import Files
from .manifest import Manifest


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
