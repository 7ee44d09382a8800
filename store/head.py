"""What the next delta builds on, and the manifest of what is saved over it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from ..codec.checkpoint import Checkpoint
from ..codec.config import ChainPolicy
from ..codec.errors import CorruptDataError, NewerFormatError
from .catalog import Catalog
from .chain import FOLDER, carried_by
from .files import Files, StoreWarning
from .manifest import Manifest, data_name
from .policy import Size, wants_base


@dataclass(frozen=True, slots=True)
class Head:
    """What the next delta builds on.

    Args:
        checkpoint: the parent to be, resolved.
        manifest: of the parent.
        last: of the checkpoint saved or loaded last: the parent itself, or one over it.
    """

    checkpoint: Checkpoint
    manifest: Manifest
    last: Manifest

    @staticmethod
    def at(policy: ChainPolicy, manifest: Manifest, ckpt: Checkpoint, base: Checkpoint) -> Head:
        """After reading a chain: its end, or its base, as the policy says."""
        if policy.against == "previous" or base is ckpt:
            return Head(ckpt, manifest, manifest)
        return Head(base, _of_base(manifest, base), manifest)

    @staticmethod
    def after(policy: ChainPolicy, manifest: Manifest, ckpt: Checkpoint, head: Head | None) -> Head:
        """After saving over `head` (None: a base): what was saved, or its base, as the policy says."""
        if policy.against == "base" and head is not None:
            return replace(head, last=manifest)
        return Head(ckpt, manifest, manifest)

    @property
    def base_size(self) -> Size:
        """Of the chain's base, about: that its state was as large as the parent's is an assumption."""
        return Size(self.last.base_nbytes, self.checkpoint.raw_nbytes)

    @property
    def carried(self) -> int:
        """Bytes of the arrays that have to be decoded before a delta over it can be."""
        return self.manifest.carried + carried_by(self.checkpoint)

    def next(self, policy: ChainPolicy) -> Head | None:
        """Itself; None where a base is due."""
        raw = self.checkpoint.raw_nbytes
        return None if wants_base(policy, self.last, 1.0 + (self.carried / raw if raw else 0.0)) else self

    def now(self, files: Files, catalog: Catalog) -> Head | None:
        """As the store has it now: compaction moves steps to other files, `gc` removes them; then there is none."""
        try:
            entry = catalog.get(self.manifest.step)
        except (CorruptDataError, NewerFormatError):
            entry = None
        is_same = entry is not None and entry.manifest.identity == self.manifest.identity
        now = replace(self, manifest=entry.manifest) if is_same and entry is not None else self
        # Files of a step that was replaced or removed may still be there for others.
        gone = set(now.manifest.chain).difference(files.list(FOLDER))
        if gone and is_same:
            names = ", ".join(files.path(f"{FOLDER}/{name}") for name in sorted(gone)[:3])
            message = f"step {now.manifest.step}: {names} is gone: a new chain begins; verify() says what is lost"
            warnings.warn(message, StoreWarning, stacklevel=3)
        elif gone and not catalog.steps():
            message = f"step {now.manifest.step} and all others are gone from {files.root}: moved, removed, unmounted? "
            message += "What is saved from now on stands there alone, and begins with a base"
            warnings.warn(message, StoreWarning, stacklevel=3)
        return None if gone else now


def manifest_over(head: Head | None, step: int, ckpt: Checkpoint, metric: float | None) -> Manifest:
    """The manifest of a checkpoint saved over `head`; None: as a base."""
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
    """What the manifest of a chain's base says, read off one over it: the base's own may be gone."""
    file = manifest.chain[-1]
    size = base.nbytes
    return Manifest(
        int(file[:12]), file, base.id, base.identity, size, base.raw_nbytes, (), 0, 0, base_nbytes=size, spent=0
    )
