"""The steps that are kept, and garbage collection of all other files."""

from __future__ import annotations

import contextlib
import functools
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from ..codec.errors import BadArgumentError, CorruptDataError, ShrinkpointError
from ..codec.parallel import give_way
from ..kernels.backend.arguments import check_field, flag, integer, or_none
from . import history, labels
from .catalog import FOLDER as STEPS
from .catalog import FROZEN, Catalog, Entry, manifest_path, named, unknown
from .chain import FOLDER as DATA
from .chain import is_whole, missing, opener
from .files import TEMPORARY, Files, StoreWarning
from .frozen_sets import TAG, FrozenSets, needed_by
from .lock import InUseError, Lease
from .manifest import is_data, manifest_name
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
    return [*sorted(f"{STEPS}/{manifest_name(s, n)}" for s, known in doomed.items() for n in known), *garbage]


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
    marks = {s: [manifest_path(e)] for s, e in catalog.all().items() if s not in kept}
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
