"""Frozen sets: arrays that many steps share, stored once in the folder `frozen` of a store.

A set is a step of a store of its own, with a tag that contains its hash. The number of the step is made from the hash,
so that of two processes that store different sets neither replaces the other's. A checkpoint that needs the set has its
record, `Frozen`, among its plain values.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..codec.checkpoint import Checkpoint, decompress
from ..codec.errors import CorruptDataError, MissingParentError, ShrinkpointError
from ..codec.state import tree
from . import labels
from .chain import is_whole, manifest_over, resolve
from .files import Files
from .manifest import DATA, FROZEN, Catalog, Entry

_MARK_EVERY = 3600.0
TAG = "frozen-"
_FIELDS = {"names", "digest", "source"}
_marked: dict[tuple[str, str], float] = {}
"""(Folder, hash) -> when this process marked that set as used."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """The record of frozen parameters in a checkpoint.

    Args:
        names: of the parameters, in the order of the model.
        digest: BLAKE3 of their names, dtypes, shapes and bytes.
        source: where they come from, as the user named it (a folder, or a hub model with its revision); None: they are
            stored in the folder `frozen` of the store.
    """

    names: tuple[str, ...]
    digest: str
    source: str | None

    def to_tree(self) -> dict[str, Any]:
        """Return the record as it is stored."""
        return {**asdict(self), "names": list(self.names)}

    @staticmethod
    def of_tree(tree: Any) -> Frozen | None:
        """Return the record in a stored tree, or None; CorruptDataError if it is malformed."""
        record = tree.get("frozen") if isinstance(tree, Mapping) else None
        if record is None:
            return None
        if not isinstance(record, Mapping) or not record.keys() >= _FIELDS:
            raise CorruptDataError("frozen: malformed record of frozen parameters")
        return Frozen(tuple(record["names"]), str(record["digest"]), record["source"])


def needed_by(ckpt: Checkpoint) -> set[str]:
    """Return the hashes of the sets that a checkpoint needs; only its header is read."""
    digests: set[str] = set()
    stack = [tree.unflatten(ckpt.header["tree"], lambda number, spell: None)]
    while stack:
        node = stack.pop()
        if isinstance(node, Mapping):
            if node.keys() >= _FIELDS and node["source"] is None and isinstance(node["digest"], str):
                digests.add(node["digest"])
            stack.extend(node.values())
        elif isinstance(node, (list, tuple)):
            stack.extend(node)
    return digests


class FrozenSets:
    """The frozen sets of a store.

    Args:
        store: the files of the store.

    Raises:
        NotADirectoryError: the folder is a link.
    """

    def __init__(self, store: Files) -> None:
        self.catalog = Catalog(store.below(FROZEN))
        self.files = self.catalog.files

    def entry(self, digest: str) -> Entry:
        """Return the manifest of a set.

        Raises:
            MissingParentError: the store does not have it.
            CorruptDataError, NewerFormatError: its tag or manifest cannot be read.
        """
        step = labels.read_tag(self.files, f"{TAG}{digest}")
        entry = None if step is None else self.catalog.get(step)
        if entry is None:
            raise MissingParentError(f"{self.files.root}: the frozen parameters with hash {digest[:16]} are missing")
        return entry

    def load(self, digest: str) -> Any:
        """Return the tree of a set.

        Raises: as `entry`, and for a damaged data file.
        """
        return decompress(resolve(self.files, self.entry(digest).manifest)[0])

    def has(self, digest: str, *, read: bool = False) -> bool:
        """Return whether a set is there, by the size of its file or, with `read`, by its contents."""
        try:
            manifest = self.entry(digest).manifest
            if read:
                return is_whole(self.files, manifest.file)
            return self.files.size(f"{DATA}/{manifest.file}") == manifest.nbytes
        except (FileNotFoundError, ShrinkpointError):
            return False

    def mark(self, digest: str) -> bool:
        """Keep garbage collection from removing a set that a step will need; False without it.

        The tag is written again, so that its age is the time since the last use.
        """
        is_marked = time.monotonic() - _marked.get((self.files.root, digest), -math.inf) <= _MARK_EVERY
        if is_marked or not self.has(digest):
            return self.has(digest)
        with self.catalog.lock.shared():
            if not self.has(digest):  # it was removed since
                return False
            entry = self.entry(digest)
            # A process may have stored it, and been killed before it was durable.
            self.files.sync([f"{DATA}/{entry.manifest.file}"])
            self.files.sync([entry.path])
            self._tag(digest, entry.manifest.step)
        return True

    def put(self, digest: str, ckpt: Checkpoint) -> None:
        """Store a set, a base, and mark it; a damaged one is replaced."""
        with self.catalog.lock.shared():
            manifest = manifest_over(None, int(digest[:9], 16), ckpt, None)
            self.files.write(f"{DATA}/{manifest.file}", ckpt.to_bytes())
            self.catalog.commit(manifest)
            self._tag(digest, manifest.step)

    def _tag(self, digest: str, step: int) -> None:
        self.files.write(labels.tag_name(f"{TAG}{digest}"), labels.tag_data(step))
        _marked[self.files.root, digest] = time.monotonic()

    def copy_to(self, target: FrozenSets, digest: str, *, repair: bool) -> None:
        """Copy a set that the target does not have.

        Args:
            target: the sets of another store.
            digest: of the set.
            repair: also read the one that the target has, and replace it if it is damaged.

        Raises: as `load`.
        """
        if (not repair or target.has(digest, read=True)) and target.mark(digest):
            return
        target.put(digest, resolve(self.files, self.entry(digest).manifest)[0])
