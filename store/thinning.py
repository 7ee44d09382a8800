"""Thinning: old steps keep their weights, and lose the moments of their optimizers.

A thinned step has the data file of the whole one without those arrays (`codec.rebase`), and all others to the bit. It
keeps its identity. Steps above it are decoded from the former file until they are thinned, removed or compacted.

The new file is written and read back while others may save. The step moves to it by one new generation of its manifest,
while the store is held alone and the step is still one to be thinned: a kill leaves the whole or the thinned step. The
former file is then garbage, unless a whole step needs it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from ..codec.checkpoint import Checkpoint
from ..codec.errors import ShrinkpointError
from ..codec.parallel import give_way
from ..codec.rebase import has_moments, moments
from . import history, labels
from .catalog import Catalog, Entry
from .chain import FOLDER, Node, Parent, forest, opener, resolve, walk
from .compaction import rewritten
from .lock import Lease
from .manifest import Manifest
from .retention import Retention, kept


def steps_to_thin(catalog: Catalog, retention: Retention, *, read: bool) -> set[int]:
    """Return the whole steps that a retention thins.

    Those are all but the newest intact ones (of a run that went back, the newest of each end), pinned, tagged and
    sharded ones.

    Args:
        catalog: of the store.
        retention: the rule.
        read: whether the files of the newest steps are read: damaged ones do not count and are not thinned. False: all
            count as intact.
    """
    if retention.thin_after is None:
        return set()
    files = catalog.files
    whole = {s: e for s, e in catalog.readable()[0].items() if not e.manifest.lacks}
    rule = Retention(retention.thin_after)

    def newest(entries: Mapping[int, Entry]) -> set[int]:
        return kept(files, rule, entries) if read else rule.kept(dict.fromkeys(entries))

    keep = labels.protected(files) | newest(whole)
    if behind := history.left_behind(catalog, history.read_rewinds(files)):
        keep |= newest({s: e for s, e in whole.items() if s not in behind})
    return {s for s, e in whole.items() if s not in keep and not e.manifest.shards}


@dataclass(frozen=True, slots=True)
class _Step:
    """The nearest step at or below a file, as it will be.

    Args:
        manifest: of the step.
        checkpoint: of the step; None: not read.
    """

    manifest: Manifest
    checkpoint: Checkpoint | None


Prepared = list[tuple[Entry, Manifest]]
"""Steps with the manifests of their thinned files, which are durable."""


class Thinning:
    """One thinning run over a store.

    Args:
        catalog: of the store.
        without_moments: names of data files that are known to have none; new ones are added.
    """

    def __init__(self, catalog: Catalog, without_moments: set[str]) -> None:
        self._files, self._catalog, self._without_moments = catalog.files, catalog, without_moments
        self._wanted: set[int] = set()

    def trees(self, steps: Collection[int]) -> list[Node]:
        """Return the chains in which a step can be thinned."""
        entries, _ = self._catalog.readable()
        self._wanted = {s for s in steps if s in entries and self._has_moments(entries[s].manifest)}
        return [root for root in forest(entries.values()) if self._leads_to_wanted(root)] if self._wanted else []

    def _has_moments(self, manifest: Manifest) -> bool:
        if manifest.file in self._without_moments:
            return False
        try:
            found = has_moments(opener(self._files, manifest)(None))
        except (ShrinkpointError, FileNotFoundError):
            return False  # it is damaged: `verify` reports it
        if not found:
            self._without_moments.add(manifest.file)
        return found

    def prepare(self, root: Node, lease: Lease) -> Prepared:
        """Write the thinned files of a chain; steps that cannot be read are left out.

        Args:
            root: of the chain.
            lease: on the store, held shared; renewed at every step.
        """
        entries, _ = self._catalog.readable()
        living = {e.manifest.identity: e.manifest for e in entries.values() if not e.manifest.shards}
        prepared: Prepared = []
        below: dict[Node, _Step | None] = {root: None}
        for node, ckpt, _ in walk(self._files, root):
            parent, entry = below.pop(node), node.entry
            if ckpt is not None:
                if entry is not None and entry.manifest.step in self._wanted:
                    thinned = self._thinned(ckpt, entry.manifest, parent)
                    if thinned is not None:
                        prepared.append((entry, thinned.manifest))
                    parent = thinned or _Step(entry.manifest, ckpt)
                elif (manifest := living.get(ckpt.identity)) is not None:
                    parent = _Step(manifest, ckpt if manifest.id == ckpt.id else None)
                below.update((child, parent) for child in node.children.values())
                for name in [name for name, child in node.children.items() if not self._leads_to_wanted(child)]:
                    del below[node.children.pop(name)]
            else:
                below.update((child, None) for child in node.children.values())
            lease.renew()
            give_way()
        return prepared

    def _leads_to_wanted(self, node: Node) -> bool:
        return any(n.entry is not None and n.entry.manifest.step in self._wanted for n in node.below())

    def _checkpoint(self, step: _Step) -> Checkpoint | None:
        """Return the checkpoint of a step; None if it cannot be read."""
        if step.checkpoint is None:
            with contextlib.suppress(ShrinkpointError):
                return resolve(self._files, step.manifest)[0]
        return step.checkpoint

    def _thinned(self, ckpt: Checkpoint, manifest: Manifest, parent: _Step | None) -> _Step | None:
        """Write a step without its moments, as a delta over another step; None if it has no moments."""
        dropped = moments(ckpt)
        if not dropped or len(dropped) == len(ckpt.records):
            self._without_moments.add(manifest.file)
            return None
        below = None if parent is None else self._checkpoint(parent)
        base = None if parent is None or below is None else Parent(below, parent.manifest)
        new = rewritten(self._files, manifest, ckpt, base, dropped)
        lacks = tuple(sorted(Counter(dropped.values()).items()))
        return _Step(replace(new.manifest, raw_nbytes=new.checkpoint.raw_nbytes, lacks=lacks), new.checkpoint)

    def commit(self, prepared: Prepared, steps: Collection[int]) -> list[int]:
        """Move steps to their thinned files; return them. The store is held alone.

        Args:
            prepared: as `prepare` returned it.
            steps: those that may still be thinned.
        """
        moved = []
        there = set(self._files.list(FOLDER)) if prepared else set()
        for entry, manifest in prepared:
            step = manifest.step
            # Another process may have collected files that no step named.
            is_complete = there.issuperset(manifest.files)
            if step in steps and is_complete and self._catalog.replace(entry, manifest) is not None:
                moved.append(step)
        return moved


def thin(catalog: Catalog, retention: Retention, without_moments: set[str], timeout: float) -> list[int]:
    """Thin the steps of a store by a retention; return them, ascending.

    Args:
        catalog: of the store, whose lock is free.
        retention: the rule.
        without_moments: see `Thinning`.
        timeout: seconds to wait for savers to finish, before each chain is changed.

    Raises:
        InUseError: others did not stop writing; the chains before are thinned.
    """
    thinning = Thinning(catalog, without_moments)
    if not thinning.trees(steps_to_thin(catalog, retention, read=False)):
        return []
    steps = steps_to_thin(catalog, retention, read=True)
    moved: list[int] = []
    for root in thinning.trees(steps):
        with catalog.lock.shared() as lease:
            prepared = thinning.prepare(root, lease)
        if prepared:
            with catalog.lock.alone(timeout):
                moved += thinning.commit(prepared, steps & steps_to_thin(catalog, retention, read=False))
    return sorted(moved)
