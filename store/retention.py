"""The steps that are kept, whole or thinned, and garbage collection of all other files.

A thinned step keeps its weights, and loses the moments of its optimizer: it has the data file of the whole one without
those arrays (`codec.rebase`), and all others to the bit. It keeps its identity. Steps above it are decoded from the
former file until they are thinned, removed or compacted.

The new file is written and read back while others may save. The step moves to it by one new generation of its manifest,
while the store is held alone and the step is still one to be thinned: a kill leaves the whole or the thinned step. The
former file is then garbage, unless a whole step needs it.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from ..codec.checkpoint import Checkpoint
from ..codec.errors import BadArgumentError, CorruptDataError, ShrinkpointError
from ..codec.parallel import give_way
from ..codec.rebase import has_moments, moments
from ..kernels.backend.arguments import check_field, flag, integer, or_none
from . import history, labels
from .chain import Node, Parent, forest, is_whole, missing, opener, resolve, walk
from .compaction import rewritten
from .files import TEMPORARY, Files, StoreWarning
from .frozen_sets import TAG, FrozenSets, needed_by
from .lock import InUseError, Lease
from .manifest import DATA, FROZEN, STEPS, Catalog, Entry, Manifest, is_data, manifest_path, named, unknown
from .parts import PARTS

T = TypeVar("T")
UNUSED_FOR = 86_400.0
"""Seconds since its last mark from which a set may be removed: a save marks it before the step that needs it exists."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules for the steps to keep; others are removed unless they are pinned or tagged.

    Of the kept steps, old ones may be thinned: they keep all but the moments of the optimizer, for evaluation or
    averages, and training cannot continue from them. See docs/store.md.

    Args:
        last: number of newest intact steps to keep, 1 or more; default 1.
        every: keep the steps that are multiples of this number, 1 or more; None: no such rule.
        best: number of steps with the best metric to keep, 0 or more; default 0. Among equal metrics the newest.
        largest: whether a larger metric is better; default False (a loss).
        thin_after: number of newest intact steps that stay whole, 1 or more; older ones are thinned, except pinned and
            tagged ones. None (default): none is thinned.

    Example:
        >>> sorted(Retention(last=2, every=100, best=1).kept({90: None, 100: 0.5, 110: 0.3, 120: 0.4, 130: None}))
        [100, 110, 120, 130]
    """

    last: int = 1
    every: int | None = None
    best: int = 0
    largest: bool = False
    thin_after: int | None = None

    def __post_init__(self) -> None:
        check_field(self, "last", integer, 1)
        check_field(self, "every", or_none, integer, 1)
        check_field(self, "best", integer, 0)
        check_field(self, "largest", flag)
        check_field(self, "thin_after", or_none, integer, 1)

    def kept(self, metrics: Mapping[int, float | None]) -> set[int]:
        """Return the steps to keep, given the metric of each (None: not measured)."""
        steps = sorted(metrics)
        keep = set(steps[-self.last :])
        if self.every is not None:
            keep.update(step for step in steps if step % self.every == 0)
        measured = [(value if self.largest else -value, step) for step, value in metrics.items() if value is not None]
        keep.update(step for _, step in sorted(measured, reverse=True)[: self.best])
        return keep


_AT_ONCE = 64
"""Files that are removed before the lock is renewed and the work may be interrupted."""


def collect(
    catalog: Catalog, lease: Lease, retention: Retention | None, *, drop: Collection[int] = (), dry_run: bool = False
) -> list[str]:
    """Remove steps by a retention (None: keep all), then files that no step needs.

    Manifests are removed first, so that a step never needs a missing file.

    Args:
        catalog: of the store.
        lease: on the store, held alone.
        retention: which steps to keep; pinned and tagged steps are always kept.
        drop: steps to remove in any case.
        dry_run: remove nothing.

    Returns:
        Names of the files that were removed, or would be.

    Raises:
        CorruptDataError: a manifest, tag or record of `history` cannot be read, so that the files it needs are unknown.
    """
    files = catalog.files
    generations = catalog.generations()
    entries, problems = catalog.readable()
    if problems:
        step = min(problems)
        raise CorruptDataError(
            f"{files.root}: nothing was removed, because the files that {named(problems)} needs are unknown: "
            f"{problems[step]}; remove the step with Store.drop({step}) or `shrinkpoint drop {files.root} {step}`, "
            "then collect again"
        )
    protected, records = labels.protected(files), history.read_rewinds(files)
    if retention is not None and retention.best and all(e.manifest.metric is None for e in entries.values()):
        if entries:
            message = f"{files.root}: best={retention.best}, but no step has a metric: all are kept; see Store.rate"
            warnings.warn(message, StoreWarning, stacklevel=3)
    elif retention is not None:
        behind = history.left_behind(catalog, records)
        keep = protected | kept(files, retention, entries)
        if behind:
            # A run that went back has two ends; each keeps its steps as if it were the newest.
            keep |= kept(files, retention, {s: e for s, e in entries.items() if s not in behind})
        entries = {s: e for s, e in entries.items() if s in keep}
    entries = {s: e for s, e in entries.items() if s not in drop}
    needed = {name for entry in entries.values() for name in entry.manifest.files}
    doomed = {s: g[:-1] if s in entries else g for s, g in generations.items() if s not in entries or g[:-1]}
    garbage = [
        f"{part.folder}/{name}"
        for part in PARTS
        if not part.is_store
        for name in files.list(part.folder)
        if name.startswith(TEMPORARY) or (part.folder == DATA and is_data(name) and name not in needed)
    ]
    garbage += history.garbage(records, {s: e.manifest.identity for s, e in entries.items()})
    if not dry_run:
        for steps in _in_turn(list(doomed), lease):
            catalog.drop({step: doomed[step] for step in steps})
        for names in _in_turn(garbage, lease):
            files.remove(names)
    return [*sorted(manifest_path(s, n) for s, known in doomed.items() for n in known), *garbage]


def _in_turn(items: list[T], lease: Lease) -> Iterator[list[T]]:
    """Yield a few items at a time; before each, renew the lock and allow an interruption."""
    for start in range(0, len(items), _AT_ONCE):
        lease.renew()
        give_way()
        yield items[start : start + _AT_ONCE]


def drop(catalog: Catalog, steps: Collection[int]) -> None:
    """Remove steps, regardless of a retention; the store must be held alone.

    Raises:
        BadArgumentError: one does not exist, or is pinned or tagged.
        CorruptDataError: the manifest of one is a folder.
    """
    generations = catalog.generations()
    protected = labels.protected(catalog.files)
    for step in steps:
        if step not in generations:
            raise unknown(catalog.files, f"step {step!r}", list(generations))
        if step in protected:
            raise BadArgumentError(f"step {step} is pinned or tagged")
    catalog.drop({step: generations[step] for step in steps})


def remove_unused(catalog: Catalog, file: str) -> None:
    """Remove the data file of a failed save, unless a step names it, whose bytes are the same.

    If others are writing, it is left as garbage.
    """
    with contextlib.suppress(Exception), catalog.lock.alone(0.0):
        if not any(file.endswith(name) for e in catalog.all().values() for name in e.manifest.files):
            catalog.files.remove([file])


def kept(files: Files, retention: Retention, entries: Mapping[int, Entry]) -> set[int]:
    """Return the steps to keep; a damaged step never takes the place of an intact one."""
    is_intact_file = functools.cache(functools.partial(is_whole, files))

    def is_intact(step: int) -> bool:
        manifest = entries[step].manifest
        # Of a sharded step, which no single process could read in time, the files of the ranks need only exist.
        is_there = not manifest.shards or not missing(files, manifest.files)
        return is_there and all(map(is_intact_file, manifest.chain))

    intact: dict[int, float | None] = {step: e.manifest.metric for step, e in entries.items()}
    damaged: set[int] = set()
    while True:
        keep = retention.kept(intact) if intact else set()
        bad = {step for step in keep if not is_intact(step)} if len(keep) < len(intact) else set()
        if not bad:
            return keep | damaged
        damaged |= bad
        intact = {step: metric for step, metric in intact.items() if step not in bad}


def collect_frozen(files: Files, entries: Callable[[], Iterable[Entry]], *, dry_run: bool = False) -> list[str]:
    """Remove the frozen sets that no step needs and no save has marked for a day.

    Unneeded files among them are removed too. While another process writes a set, or a step or set cannot be read,
    nothing is removed.

    Args:
        files: of the store, whose lock is held alone.
        entries: returns all steps that are kept; called only if a set is unmarked.
        dry_run: remove nothing.

    Returns:
        Names of the files that were removed, or would be.
    """
    catalog = FrozenSets(files).catalog
    if not catalog.files.list(STEPS) and not catalog.files.list(DATA):
        return []
    with contextlib.suppress(InUseError, ShrinkpointError), catalog.lock.alone(0.0) as lease:
        tags = labels.tags(catalog.files)
        doomed = _unmarked(catalog, tags)
        digests = {name.removeprefix(TAG) for name, step in tags.items() if step in doomed}
        used: set[str] = set()
        for entry in sorted(entries(), key=lambda e: -e.manifest.step) if digests else ():
            if digests <= used:
                break
            if not entry.manifest.shards:  # `Writer` for torch.distributed.checkpoint has no frozen sets
                used |= needed_by(opener(files, entry.manifest)(None))
        doomed -= {step for name, step in tags.items() if name.removeprefix(TAG) in used}
        names = [labels.tag_name(name) for name, step in tags.items() if step in doomed]
        if not dry_run:
            catalog.files.remove(names)
        removed = collect(catalog, lease, None, drop=doomed, dry_run=dry_run)
        return [f"{FROZEN}/{name}" for name in (*names, *removed)]
    return []


def _unmarked(catalog: Catalog, tags: dict[str, int]) -> set[int]:
    """Return the sets that no save has marked for a day.

    By the storage's clock; where it does not give ages, the result is empty.
    """
    files = catalog.files
    kept = labels.pins(files) | {step for name, step in tags.items() if not name.startswith(TAG)}
    marks = {s: [e.path] for s, e in catalog.all().items() if s not in kept}
    for name, step in tags.items():
        if step in marks:
            marks[step].append(labels.tag_name(name))
    clock = f"{STEPS}/{TEMPORARY}{uuid.uuid4().hex}"
    files.write(clock, b"")
    try:
        now = files.modified(clock)
        return {s for s, names in marks.items() if now - max(map(files.modified, names)) > UNUSED_FOR}
    except (FileNotFoundError, NotImplementedError, KeyError):
        return set()
    finally:
        files.remove([clock])


# ------------------------------------------------------------------------------------------------------------- thinning


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
        there = set(self._files.list(DATA)) if prepared else set()
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
