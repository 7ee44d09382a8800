"""The chain head: the checkpoint that is the parent of the next delta."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from ..codec.checkpoint import Checkpoint
from ..codec.config import ChainPolicy
from ..codec.errors import CorruptDataError, NewerFormatError
from .catalog import Catalog
from .chain import FOLDER, carried_by, missing
from .files import Files, StoreWarning
from .manifest import Manifest, data_name
from .policy import Size, wants_base


@dataclass(frozen=True, slots=True)
class ChainHead:
    """The parent of the next delta, and the checkpoint saved or loaded last.

    Args:
        checkpoint: the future parent, resolved.
        manifest: of the parent.
        last: manifest of the checkpoint saved or loaded last: the parent itself, or one above it.
    """

    checkpoint: Checkpoint
    manifest: Manifest
    last: Manifest

    @staticmethod
    def at(policy: ChainPolicy, manifest: Manifest, ckpt: Checkpoint, base: Checkpoint) -> ChainHead:
        """Return the head after a chain was read: its end or its base, as the policy says."""
        if policy.against == "previous" or base is ckpt:
            return ChainHead(ckpt, manifest, manifest)
        return ChainHead(base, _of_base(manifest, base), manifest)

    @staticmethod
    def after(policy: ChainPolicy, manifest: Manifest, ckpt: Checkpoint, head: ChainHead | None) -> ChainHead:
        """Return the head after saving over `head` (None: a base), as the policy says."""
        if policy.against == "base" and head is not None:
            return replace(head, last=manifest)
        return ChainHead(ckpt, manifest, manifest)

    @property
    def base_size(self) -> Size:
        """Return the size of the chain's base if its state was as large as the parent's."""
        return Size(self.last.base_nbytes, self.checkpoint.raw_nbytes)

    @property
    def carried(self) -> int:
        """Bytes of the arrays that must be decoded before a delta against this head."""
        return self.manifest.carried + carried_by(self.checkpoint)

    def next(self, policy: ChainPolicy) -> ChainHead | None:
        """Return this head, or None if a base is due."""
        raw = self.checkpoint.raw_nbytes
        return None if wants_base(policy, self.last, 1.0 + (self.carried / raw if raw else 0.0)) else self

    def now(self, files: Files, catalog: Catalog) -> ChainHead | None:
        """Return the head with its present files, or None if it was removed."""
        try:
            entry = catalog.get(self.manifest.step)
        except (CorruptDataError, NewerFormatError):
            entry = None
        is_same = entry is not None and entry.manifest.identity == self.manifest.identity
        now = replace(self, manifest=entry.manifest) if is_same and entry is not None else self
        # Files of a step that was replaced or removed may still exist for others.
        gone = missing(files, now.manifest.chain)
        if gone and is_same:
            names = ", ".join(files.path(f"{FOLDER}/{name}") for name in sorted(gone)[:3])
            message = f"step {now.manifest.step}: {names} is missing: a new chain begins; verify() lists the losses"
            warnings.warn(message, StoreWarning, stacklevel=3)
        elif gone and not catalog.steps():
            message = f"step {now.manifest.step} and all others are missing from {files.root}: moved or unmounted? "
            message += "The next save begins a new chain with a base"
            warnings.warn(message, StoreWarning, stacklevel=3)
        return None if gone else now


def manifest_over(head: ChainHead | None, step: int, ckpt: Checkpoint, metric: float | None) -> Manifest:
    """Return the manifest of a checkpoint saved over `head`; None: as a base."""
    fields = (step, data_name(step, ckpt.id), ckpt.id, ckpt.identity, ckpt.nbytes, ckpt.raw_nbytes)
    if head is None:
        return Manifest(*fields, (), 0, since_base=0, base_nbytes=ckpt.nbytes, spent=0, metric=metric)
    return Manifest(
        *fields,
        head.manifest.chain,
        head.carried,
        since_base=head.last.since_base + 1,
        base_nbytes=head.last.base_nbytes,
        spent=head.last.spent + ckpt.nbytes,
        metric=metric,
    )


def _of_base(manifest: Manifest, base: Checkpoint) -> Manifest:
    """Make the manifest of a chain's base, because its own may be removed."""
    file = manifest.chain[-1]
    size = base.nbytes
    return Manifest(
        int(file[:12]), file, base.id, base.identity, size, base.raw_nbytes, (), 0, 0, base_nbytes=size, spent=0
    )
