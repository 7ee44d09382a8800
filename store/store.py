"""A store: chains of checkpoints in a folder or bucket, each visible by one atomic step after its bytes are durable."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..codec.checkpoint import Checkpoint, Row, decompress
from ..codec.compress import compress
from ..codec.config import Config, check_config
from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError, NewerFormatError
from ..codec.partial import check_patterns, decompress_only
from ..codec.weights.drift import Earlier
from ..kernels.arguments import flag, function, instance, number, or_none, sequence
from . import branches, labels, restores
from .agent import InMemory, InMemoryWarning, check_keep
from .catalog import Catalog, Entry, named, unknown
from .chain import FOLDER as DATA
from .chain import opener, resolve
from .checking import Progress, problems
from .compaction import Compaction
from .files import StoreWarning, opened
from .garbage import collect, drop, take_back
from .head import Head, manifest_over
from .inmemory import NearFiles, still_held
from .lock import open_lock
from .manifest import Manifest, check_metric, check_step
from .policy import Size, smaller
from .retention import Retention
from .trail import Trail, aims
from .transfer import Side, copy_all
from .upkeep import TARGET

DAMAGE = (CorruptDataError, MissingParentError, NewerFormatError)


@dataclass(frozen=True, slots=True)
class Saved:
    """What `Store.save` did: the step, where it went, and the checkpoint itself (resolved)."""

    step: int
    path: str
    checkpoint: Checkpoint

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.checkpoint.nbytes

    @property
    def raw_nbytes(self) -> int:
        """Bytes of the state."""
        return self.checkpoint.raw_nbytes

    @property
    def ratio(self) -> float:
        """`raw_nbytes / nbytes`."""
        return self.checkpoint.ratio

    @property
    def is_delta(self) -> bool:
        """Whether it was stored as a delta."""
        return self.checkpoint.is_delta

    def summary(self) -> list[Row]:
        """One row an array."""
        return self.checkpoint.summary()


class SkippedCheckpointWarning(StoreWarning):
    """`Store.load()` passed over a newer checkpoint that is not intact."""


class NotCompactedWarning(StoreWarning):
    """`Store.compact` left steps as they were that are not intact."""


class RestoreNotCountedWarning(StoreWarning):
    """A restore could not be counted: the store cannot be written."""


_TURNS = 10
"""How often a copy lists the steps anew where all that it was to copy were removed before their turn."""
_TRIES = 10
"""How often steps are listed anew by a `load` beside a run that removes them; one that is faster is not chased on."""


class _Outdated(Exception):
    """What was listed is not what is there."""


class Store:
    """Checkpoints by step, as chains of bases and deltas.

    Any number of processes may use a store at once. Those that add to it wait for nobody but `gc`; readers for nobody.

    Args:
        url: a folder, or any fsspec URL ("s3://bucket/run", "memory://run"). It need not exist yet.
        cfg: how to compress, and when to take a base (`cfg.chain`).
        in_memory: how many of the newest checkpoints are also kept in memory that outlives this process, for `load`
            after a crash; default 0. See `store.agent`.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> store = sp.Store("memory://docs-store")
        >>> store.save(10, {"weight": np.arange(6.0)}).step
        10
        >>> store.load()["weight"].tolist(), store.steps()
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [10])
    """

    def __init__(self, url: str | os.PathLike[str], cfg: Config | None = None, *, in_memory: int = 0) -> None:
        self.cfg = Config() if cfg is None else check_config(cfg)
        self._files = opened(url)
        self._catalog = Catalog(self._files)
        self._lock = open_lock(self._files)
        self._head: Head | None = None
        self._trail: Trail | None = None
        """What weights are compared with to see where they go; None: the head's, once it is needed."""
        self._at: branches.Loaded | None = None
        """The step that was loaded; None from the first save on."""
        self._beyond: set[int] = set()
        """Steps that were left behind, of which that is said already."""
        self._whole: Size | None = None
        self._restores: int | None = None
        self.url = self._files.root if self._files.local else str(os.fspath(url))
        """Where it is: `Store(store.url)` is the same store from any working folder."""
        self.in_memory = check_keep(in_memory, self.url)
        self._memory = InMemory(self.url, self.in_memory) if self.in_memory else None
        self._near = NearFiles(self._files, self._memory) if self._memory is not None else None

    def __repr__(self) -> str:
        return f"<Store {self.url}>"

    # ---------------------------------------------------------------------------------------------- what is there

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return self._catalog.steps()

    def candidates(self) -> list[int]:
        """The committed steps in the order in which `load()` tries them: descending, but those last that a run has left
        behind when it went back to an older one and saved anew from there.

        Raises:
            CorruptDataError: what was left behind cannot be read.
        """
        return branches.in_order(self.steps(), branches.passed_over(self._files, self._catalog))

    def manifests(self) -> tuple[dict[int, Manifest], dict[int, str]]:
        """What the store knows of all steps, as `describe`, and of steps whose manifest is not readable, why."""
        entries, problems = self._catalog.readable()
        return {step: entry.manifest for step, entry in entries.items()}, problems

    def describe(self, step: int | str) -> Manifest:
        """What the store knows of a step (or tag) without reading it: sizes, chain, restore cost, metric.

        Raises:
            BadArgumentError: no such step.
            CorruptDataError, NewerFormatError: its manifest is not readable.
        """
        return self._catalog.present(self._step(step)).manifest

    def header(self, manifest: Manifest) -> Checkpoint:
        """The checkpoint of a manifest that `describe` or `manifests` gave, only its header read: for `summary()`.

        Raises:
            CorruptDataError, MissingParentError, NewerFormatError: it is not readable.
        """
        instance("manifest", manifest, Manifest)
        try:
            return opener(self._files, manifest)(None)
        except MissingParentError:
            now = self._catalog.present(manifest.step).manifest
            if now.file == manifest.file:
                raise
            return opener(self._files, now)(None)

    @property
    def head(self) -> Head | None:
        """What the next delta builds on: set by `save`, `load` and `follow`; None: the next checkpoint is a base."""
        return self._head

    @property
    def loaded(self) -> int | None:
        """The step that was loaded last, and that the next save goes on from; None from the first save on.

        A save that finds the very same step in its place counts as loading that: the run is where it has been before.
        """
        return None if self._at is None else self._at.step

    @property
    def parent(self) -> Checkpoint | None:
        """What the next save will be a delta against, as `prev` for `search`; None: it will be a base, as `cfg.chain`
        has it now. With `cfg.chain.only_smaller` (default) a delta that then turns out to spare next to nothing is
        saved as a base all the same."""
        head = self._next_head()
        return None if head is None else head.checkpoint

    def earlier(self, state: Any, step: int | None = None) -> Earlier:
        """The weights as they were, a slow average of what was saved: what a save of this state is coded ahead of where
        the configuration says so (`Config.ahead`), for `search(earlier=)`. The next save changes the arrays.

        Args:
            state: the state that will be saved.
            step: its training step; None: not known.

        Example:
            >>> import numpy as np
            >>> import shrinkpoint as sp
            >>> store = sp.Store("memory://earlier-example", sp.Config(ahead=True))
            >>> w = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
            >>> _ = store.save(1, {"weight": w})
            >>> store.earlier({"weight": 1.01 * w}, 2).steps
            1.0
        """
        return self._trail_from(self._next_head()).earlier(state, step)

    def follow(self, step: int | str, identity: str | None = None) -> None:
        """Let the next delta build on a step, as after `load`, without restoring its state; it is read from storage.

        Args:
            step: which, or its tag.
            identity: `Manifest.identity` that it must have; None: whichever it has.

        Raises:
            MissingParentError: it was saved anew and has another identity. Else as `load`; the head is left as it was.
        """
        number = self._step(step)
        entry, ckpt, base = self._catalog.settled(number, lambda e: (e, *resolve(self._files, e.manifest)))
        if identity not in (None, entry.manifest.identity):
            raise MissingParentError(f"step {number}: it was saved anew, it is not {str(identity)[:16]}... any more")
        self._head, self._trail = Head.at(self.cfg.chain, entry.manifest, ckpt, base), None
        self._at = branches.Loaded.of(self._catalog, number)

    def go_on(self, head: Head) -> None:
        """Let the next delta build on what another object for the same store has as its head, in this process."""
        self._at = branches.Loaded.of(self._catalog, instance("head", head, Head).last.step)
        self._head, self._trail = head, None

    def read(self, step: int | str) -> Checkpoint:
        """A step's (or tag's) checkpoint, resolved: for `summary()`, or as a parent.

        Raises: as `load`.
        """
        return self._resolve(self._step(step))[1]

    def restores(self) -> int:
        """How often `load` has restored from this store, in all processes."""
        self._restores = restores.count(self._files)
        return self._restores

    def _step(self, step: Any) -> int:
        return labels.meant(self._files, self._catalog, step)

    # ------------------------------------------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        state: Any,
        *,
        grads: Any = None,
        kinds: Mapping[str, Any] | None = None,
        metric: float | None = None,
        cfg: Config | None = None,
    ) -> Saved:
        """Compress a state and commit it; when this returns it is durable, when it raises nothing has changed. (Only
        an interrupt may come after the commit: `steps()` says whether the step is there.)

        A delta against the checkpoint this object saved or loaded last (or its base, as `cfg.chain` says), else a base;
        a base, too, where a delta would spare next to nothing (`ChainPolicy.only_smaller`).

        A step below others that are there is saved with a StoreWarning that names them. If it goes on from an older one
        that this object has loaded, they are left behind: `load()` passes over them from then on. Otherwise it may be
        an old step that is added late, and `load()` takes the highest as ever. `gc` keeps either end.

        Args:
            step: training step, 0 to 10**12 - 1. A step that exists is replaced in one atomic step. It may number
                anything that grows: how many steps were taken says the optimizer's state, where it counts them.
            state: see `compress`.
            grads: see `compress`.
            kinds: see `compress`.
            metric: how good the model is, finite, for `Retention(best=...)`; may be given later by `rate`.
            cfg: how to compress this one, as `search` found it; default: as the store has it. When to take a base is
                the store's affair either way (`Store.cfg.chain`).

        Raises:
            BadArgumentError, UnsupportedLeafError: see `compress`.
            OSError: the bytes could not be written.
        """
        step, metric = check_step(step), check_metric(metric)
        asked = self.cfg if cfg is None else replace(check_config(cfg), chain=self.cfg.chain)
        with contextlib.ExitStack() as undo:
            # Held from before the parent is looked at until the manifest is there: no collector removes it meanwhile.
            with self._lock.shared() as lease:
                ckpt, head = self._compressed(state, step, self._config(asked), grads, kinds)
                manifest = manifest_over(head, step, ckpt, metric)
                file = f"{DATA}/{manifest.file}"
                undo.callback(take_back, self._files, self._catalog, self._lock, file)
                self._files.write(file, ckpt.to_bytes())
                lease.renew()
                branches.come_back(self._files, step, manifest.identity)
                steps, record = self._catalog.steps(), None
                replays = step in steps and branches.is_there(self._catalog, manifest)
                if not replays:
                    record = branches.going_back(self._catalog, steps, manifest, self._at, self._beyond)
                if record is not None:
                    undo.callback(branches.take_back, self._files, self._catalog, record, manifest)
                    warnings.warn(record.told(self._files.root), StoreWarning, stacklevel=2)
                    # First: whoever is killed in between has gone back and saved nothing, not gone on from the end.
                    branches.write(self._files, record)
                if self._files.local and not self._files.exists(file):
                    raise FileNotFoundError(errno.ENOENT, "moved or removed while it was saved", self._files.path(file))
                self._catalog.commit(manifest)
            undo.pop_all()
        self._head = Head.after(self.cfg.chain, manifest, ckpt, head)
        if self._trail is not None:
            try:
                self._trail.follow(state, ckpt, step)
            except (MemoryError, RuntimeError):  # torch's for want of memory is the latter
                self._trail = None  # the step is there: no reason to say that it is not
        self._at = self._at.replayed(step) if self._at is not None and replays else None
        if record is not None:
            self._beyond.update(record.left)
        if self._memory is not None:
            self._memory.put(step, manifest.file, manifest.parents, ckpt.to_bytes())
        return Saved(step, self._files.path(file), ckpt)

    def _compressed(
        self, state: Any, step: int, cfg: Config, grads: Any, kinds: Mapping[str, Any] | None
    ) -> tuple[Checkpoint, Head | None]:
        """What a state is saved as, and what that is a delta over; None: it is a base."""
        head = self._next_head()
        if aims(cfg):
            earlier = self._trail_from(head).earlier(state, step)
        else:
            self._trail = earlier = None

        def made(parent: Checkpoint | None) -> Checkpoint:
            return compress(state, parent, cfg, grads=grads, kinds=kinds, earlier=earlier)

        if head is None:
            ckpt = made(None)
            self._whole = Size.of(ckpt)
            return ckpt, None
        delta, size = made(head.checkpoint), self._whole or head.base_size
        ckpt, whole = smaller(self.cfg.chain, delta, size, lambda: made(None))
        self._whole = whole or self._whole
        return ckpt, head if ckpt.is_delta else None

    def _config(self, asked: Config) -> Config:
        """A configuration, told how often this run was restored, by whatever process, where it depends on that."""
        if not any(hasattr(rule.codec, "for_restores") for rule in asked.rules):
            return asked
        known = self._restores or 0
        return asked.for_restores(max(known, self.restores()))

    def _next_head(self) -> Head | None:
        """What the next save builds on; None: a base is due."""
        head = None if self._head is None else self._head.now(self._files, self._catalog)
        return None if head is None else head.next(self.cfg.chain)

    def _trail_from(self, head: Head | None) -> Trail:
        """The trail so far, else one that begins with what the next save builds on."""
        if self._trail is None:
            self._trail = Trail() if head is None else Trail(head.checkpoint, head.manifest.step)
        return self._trail

    # ----------------------------------------------------------------------------------------------------- loading

    def load(
        self, step: int | str | None = None, paths: str | Sequence[str] | None = None, *, count: bool = True
    ) -> Any:
        """The state at a step, or the newest intact one.

        Args:
            step: that step (or tag) or an error; None: the newest that is intact, with a SkippedCheckpointWarning
                naming each newer one that was passed over and why. Steps that a run left behind when it went back
                to an older one (`save`) come last; a StoreWarning names them.
            paths: shell glob over paths, or several: only the part of the state that matches, and no more is read than
                that needs. `*` also matches `/`. Containers without a match are left out; lists keep their positions,
                with None in place of the rest.
            count: whether this is a restore of the run, to be counted; never one with `paths`.

        Raises:
            BadArgumentError: no such step, an empty store, or a pattern that matches nothing.
            CorruptDataError, MissingParentError, NewerFormatError: the step (with None: every step) is not readable.
            OSError: the storage cannot be reached.
        """
        patterns, count = None if paths is None else check_patterns(paths), flag("count", count)
        if step is not None:
            return self._load(self._step(step), patterns, count)
        for _ in range(_TRIES):
            with contextlib.suppress(_Outdated):
                return self._newest(patterns, count, listed=False)
        return self._newest(patterns, count, listed=True)

    def _newest(self, patterns: Sequence[str] | None, count: bool, *, listed: bool) -> Any:
        """The newest intact state; `listed`: of the steps there are now, whatever comes meanwhile.

        Raises:
            _Outdated: a step is not readable any more, and there are others than were listed.
        """
        steps = self.steps()
        if not steps:
            raise BadArgumentError(f"{self.url} holds no checkpoint")
        skipped: list[str] = []
        behind: Mapping[int, branches.Branch] = {}
        try:
            behind = branches.passed_over(self._files, self._catalog)
        except CorruptDataError as e:
            warnings.warn(f"{e}: load() takes the highest step", StoreWarning, stacklevel=3)
        for candidate in branches.in_order(steps, behind):
            try:
                state = self._load(candidate, patterns, count)
            except DAMAGE as e:
                if not listed and not set(self.steps()) <= set(steps):
                    # A run saves and removes beside us: its newest step is none of those that were listed.
                    raise _Outdated from None
                skipped.append(str(e))
                continue
            if skipped:
                message = f"{self._files.root}: loaded step {candidate}; skipped {'; '.join(skipped)}"
                warnings.warn(message, SkippedCheckpointWarning, stacklevel=3)
            if message := branches.not_taken(self._files.root, candidate, behind):
                warnings.warn(message, StoreWarning, stacklevel=3)
            return state
        if patterns is None and self._near is None and (near := still_held(self._files, self.url)) is not None:
            self._near = near
            try:
                state = self._newest(None, count, listed=True)
            finally:
                self._near = None
            message = f"{self._files.root}: no checkpoint is intact in storage; loaded from the memory of its agent"
            warnings.warn(message, InMemoryWarning, stacklevel=3)
            return state
        raise CorruptDataError(f"{self._files.root}: no checkpoint is intact: {'; '.join(skipped)}")

    def _load(self, step: int, patterns: Sequence[str] | None, count: bool) -> Any:
        if patterns is not None:
            return self._catalog.settled(step, lambda e: decompress_only(opener(self._files, e.manifest), patterns))
        hits = self._near.hits if self._near is not None else 0
        entry, ckpt, base = self._resolve(step)
        state = decompress(ckpt)
        if self._near is not None and self._near.hits > hits:
            # What was not read from storage may be damaged there: nothing is built on it.
            self._head = self._trail = None
        else:
            self._head, self._trail = Head.at(self.cfg.chain, entry.manifest, ckpt, base), None
        self._at = branches.Loaded.of(self._catalog, step)
        if count:
            self._count_restore(step)
        return state

    def _count_restore(self, step: int) -> None:
        try:
            self._restores = restores.add(self._files, step, self._restores or 0)
        except (OSError, CorruptDataError) as e:
            message = f"{self._files.root}: this restore could not be counted ({e}); say load(..., count=False)"
            warnings.warn(message, RestoreNotCountedWarning, stacklevel=4)

    def _resolve(self, step: int) -> tuple[Entry, Checkpoint, Checkpoint]:
        """A step's manifest, its checkpoint resolved by reading its chain from the base upwards, and that base."""
        return self._catalog.settled(step, lambda e: (e, *resolve(self._near or self._files, e.manifest)))

    # ---------------------------------------------------------------------------------------------------- checking

    def verify(self, progress: Progress | None = None) -> dict[int, str]:
        """Read and check every step with its whole chain; what is not intact, and why. Empty: all is well.

        Args:
            progress: called with (step, done, total) after each step.
        """
        return problems(self._files, self._catalog, or_none("progress", progress, function))

    def verify_labels(self) -> dict[str, str]:
        """Read all tags, and the records of runs that went back; name of each that is damaged -> what is wrong.

        They are no steps, which `verify` reads; but while one is damaged `gc` removes nothing.
        """
        return labels.unreadable(self._files) | branches.unreadable(self._files)

    # ----------------------------------------------------------------------------------------------- housekeeping

    def compact(self, max_cost: float = TARGET, progress: Progress | None = None) -> list[int]:
        """Shorten long chains: afterwards restoring a step decodes at most `max_cost` times the bytes of a base.

        Every step stays loadable at every instant and keeps its bits; deltas saved later decode as before. It may run
        beside a saver. The files of before are garbage afterwards: `gc` frees them.

        Args:
            max_cost: of restoring any step, in multiples of a base, in [1, 1e6]; 1 makes every step a base. Default
                2.5: decoding exact differences takes up to 1.33 times as long as decoding a base of as many bytes, and
                with 2.5 no step takes over three times as long as a base.
            progress: called with (step, done, total) after each step.

        Returns:
            The steps that are stored otherwise than before, ascending. A NotCompactedWarning names those that are not
            readable and stay as they are.
        """
        max_cost = number("max_cost", max_cost, 1, 1e6)
        progress = or_none("progress", progress, function)
        if not self._is_there():
            return []
        with self._lock.shared() as lease:
            work = Compaction(self._files, self._catalog, lease, max_cost, progress)
            moved = work.run()
        if work.problems:
            told = "; ".join(why for _, why in sorted(work.problems.items())[:10])
            message = f"{self._files.root}: {named(work.problems)} not intact and not compacted: {told}"
            warnings.warn(message, NotCompactedWarning, stacklevel=2)
        return moved

    def _is_there(self) -> bool:
        """Whether the folder is: what would do nothing shall not make it. Other storage has none."""
        return not self._files.local or os.path.isdir(self._files.root)

    def gc(self, retention: Retention | None = None, *, timeout: float = 60.0, dry_run: bool = False) -> list[str]:
        """Remove steps that need not be kept, then the files that no step needs and what crashed writers left behind.

        A file that a step needs is never removed, whatever becomes of the step it was saved for. With an unreadable
        manifest or tag nothing is removed. Steps that are not intact do not count as kept and are left alone. Where a
        run went back (`save`) a retention is applied twice, once without the steps left behind, and what either keeps
        is kept. With `best` and no metric at all every step is, with a StoreWarning.

        Args:
            retention: what to keep; None: every step. Pinned and tagged ones are always kept.
            timeout: seconds to wait for savers to finish, 0 or more.
            dry_run: remove nothing, only say what would be. It waits for savers too: what they write is no garbage.

        Returns:
            Names of the removed files.

        Raises:
            CorruptDataError, NewerFormatError: a manifest or tag is not readable, so nobody can say what it needs.
            TimeoutError: others did not stop writing.
        """
        retention = or_none("retention", retention, instance, Retention)
        timeout, dry_run = number("timeout", timeout, 0, math.inf), flag("dry_run", dry_run)
        if not self._is_there():
            return []
        with self._lock.alone(timeout) as lease:
            return collect(self._files, self._catalog, lease, retention, dry_run=dry_run)

    def drop(self, *steps: int) -> None:
        """Remove steps, intact or not; others that are coded against them stay readable. `gc` frees the files.

        Raises:
            BadArgumentError: one is not there, or is pinned or tagged.
            CorruptDataError: what stands for one is no file.
            TimeoutError: others did not stop writing.
        """
        numbers = [check_step(step) for step in steps]
        for step in set(numbers).difference(self.steps()):
            raise unknown(self._files, f"step {step!r}", self.steps())
        with self._lock.alone(60.0):
            drop(self._files, self._catalog, numbers)
            if not self._catalog.steps():
                self._head = self._trail = None  # there is nothing to go on from, and no reason to wonder why

    def drop_after(self, step: int | str) -> list[int]:
        """Remove all steps above one, to start over from it; the highest first, so that a crash leaves no gap.

        Args:
            step: the one that shall be the newest, or its tag.

        Returns:
            The removed ones, ascending.

        Raises: as `drop`.
        """
        number = self._step(step)
        later = [s for s in self.steps() if s > number]
        if later:
            self.drop(*reversed(later))
        return later

    # ------------------------------------------------------------------------------------------------------- labels

    def rate(self, step: int | str, metric: float | None) -> None:
        """Say how good the model of a step is, for `Retention(best=...)`; None takes it back.

        Raises:
            BadArgumentError: no such step, or the metric is not finite.
        """
        metric = check_metric(metric)
        self._step(step)
        with self._lock.shared():
            number = self._step(step)
            while True:
                entry = self._catalog.present(number)
                if entry.manifest.metric == metric:
                    return
                if self._catalog.replace(entry, replace(entry.manifest, metric=metric)) is not None:
                    return

    def pin(self, step: int | str) -> None:
        """Keep a step whatever the retention."""
        self._step(step)
        with self._lock.shared():
            self._files.write(labels.pin_name(self._step(step)), b"")

    def unpin(self, step: int | str) -> None:
        """Take a pin back, of a step or a tag's; nothing happens where there is none."""
        number = self.tags().get(step) if isinstance(step, str) else check_step(step)
        if number is not None:
            self._files.remove([labels.pin_name(number)])

    def pins(self) -> list[int]:
        """The pinned steps, ascending."""
        return sorted(labels.pins(self._files))

    def tag(self, name: str, step: int | str) -> None:
        """Give a step a name, by which it can be loaded and which keeps it; a name that exists moves.

        Args:
            name: letters, digits, "_", "." and "-", at most 100; the first is a letter or "_".
            step: which.

        Raises:
            BadArgumentError: no such step; no name that can be given; one that differs from it by case only is there.
        """
        labels.check_tag(name)
        self._step(step)
        with self._lock.shared():
            labels.check_alike(self._files, [name])
            self._files.write(labels.tag_name(name), labels.tag_data(self._step(step)))

    def untag(self, name: str) -> bool:
        """Forget a name; whether there was one. It may be damaged."""
        file = labels.tag_name(labels.check_tag(name))
        there = self._files.exists(file)
        self._files.remove([file])
        return there

    def tags(self) -> dict[str, int]:
        """Name -> step, sorted by name."""
        return labels.tags(self._files)

    # ------------------------------------------------------------------------------------------------------ copying

    def copy(
        self, url: str | os.PathLike[str], steps: Iterable[int | str] | None = None, *, repair: bool = False
    ) -> Store:
        """Copy steps with all they need to another store, their pins and tags too; every file is checked on its way.

        The restores so far are copied, whatever the steps: who goes on there goes on with the same run.

        Args:
            url: where to. Steps that are there already must be the same ones.
            steps: which, by number or tag; None: all.
            repair: also read the files of steps that are there already, and write those anew that are damaged; default
                False, which reads no more there than what a new step is stored over.

        Returns:
            The other store.

        Raises:
            BadArgumentError: no such step, or the target has another one of that number or tag; nothing is copied.
            CorruptDataError, MissingParentError, NewerFormatError: a step is not intact; those before it are copied.
            MissingParentError: a run beside this removes its steps faster than they are copied.
        """
        target, repair = Store(url, self.cfg), flag("repair", repair)
        if isinstance(steps, str):
            raise BadArgumentError(f"steps is {steps!r}; it must be a list of steps, or None")
        if steps is None:
            chosen = self._manifests()
        else:
            asked = [self._step(step) for step in sequence("steps", steps)]
            chosen = {step: self._catalog.present(step).manifest for step in asked}
        with target._lock.shared() as lease:
            for _ in range(_TURNS):
                if copy_all(self._side, chosen, target._side, lease, may_go=steps is None, repair=repair) or not chosen:
                    return target
                # A run beside this has removed all of them before their turn, and has others now.
                chosen = self._manifests()
        raise MissingParentError(
            f"{self.url}: every step was removed before it was copied, {_TURNS} times over; pin one, or stop the run"
        )

    def _manifests(self) -> dict[int, Manifest]:
        """Those of all steps there are."""
        return {step: entry.manifest for step in self.steps() if (entry := self._catalog.get(step)) is not None}

    @property
    def _side(self) -> Side:
        return Side(self.url, self._files, self._catalog)
