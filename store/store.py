"""A store: chains of checkpoints in a folder or bucket, with atomic commits."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Never

from ..codec.checkpoint import Checkpoint, decompress
from ..codec.config import Config
from ..codec.display import html_fields
from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError
from ..codec.inputs import PastWeights
from ..codec.named_presets import check_config
from ..codec.partial import check_patterns, decompress_into, decompress_only
from ..kernels.backend.arguments import flag, function, instance, no_device, number, or_none, sequence
from . import history, labels
from .chain import ChainHead, intact, opener, resolve
from .compaction import MAX_COST, Compaction
from .files import DAMAGE, StoreWarning
from .frozen_sets import FrozenSets
from .lock import InUseError
from .manifest import DATA, Catalog, Entry, Manifest, check_metric, check_step, lacking, named, unknown
from .memory_copies import CopyReader, InMemoryWarning, MemoryCopies, check_keep, reader_of_copies
from .parts import Progress, copy_all, problems, stores, unreadable
from .retention import Retention, collect, collect_frozen, drop, thin
from .saver.exit import EXIT_CLEANUP
from .session import Saved, Session
from .urls import one_name, opened


class DiskUsage(NamedTuple):
    """Bytes of a store's data files.

    Args:
        steps: of the files of the steps that `steps()` lists, and of frozen sets.
        total: of all data files, including files of removed steps that chains need, and garbage.
    """

    steps: int
    total: int


class SkippedCheckpointWarning(StoreWarning):
    """`Store.load()` skipped a newer checkpoint that is not intact."""


class ThinnedCheckpointWarning(StoreWarning):
    """A step was loaded that `gc` has thinned: training cannot continue from it."""


class NotCompactedWarning(StoreWarning):
    """`Store.compact` left steps unchanged that are not intact."""


class RestoreNotCountedWarning(StoreWarning):
    """A restore could not be counted, because the store cannot be written."""


_ATTEMPTS = 10
"""Most attempts of `load` or `copy` to list the steps while another process removes listed steps."""


class _Outdated(Exception):
    """The steps have changed since they were listed."""


class Store:
    """Checkpoints by step, as chains of bases and deltas.

    Any number of processes may use a store at once. Writers wait for `gc` only; readers never wait.

    Args:
        url: a folder, or any fsspec URL ("s3://bucket/run", "memory://run"). It need not exist yet.
        cfg: how to compress, and when to take a base (`cfg.chain`); or the name of a preset, such as "exact_weights".
        in_memory: how many of the newest checkpoints are also kept in shared memory, for `load` after a crash; default
            0. See `store.memory_copies`.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> store = sp.Store("memory://docs-store")
        >>> store.save(10, {"weight": np.arange(6.0)}).step
        10
        >>> store.load()["weight"].tolist(), store.steps()
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [10])
    """

    def __init__(self, url: str | os.PathLike[str], cfg: Config | str | None = None, *, in_memory: int = 0) -> None:
        self.cfg = Config() if cfg is None else check_config(cfg)
        self._files = opened(url)
        self.url = self._files.root if self._files.local else str(os.fspath(url))
        """The location: `Store(store.url)` is the same store from any working folder."""
        self._catalog = Catalog(self._files, self.url)
        self._lock = self._catalog.lock
        self.in_memory = check_keep(in_memory, self.url)
        self._read_copies: CopyReader | None = None
        self._without_moments: set[str] = set()
        self.lacks: tuple[tuple[str, int], ...] = ()
        """Role and number of the arrays that the step loaded last lacks, because it was thinned."""
        copies = MemoryCopies(self.url, self.in_memory) if self.in_memory else None
        if copies is not None:
            copies.clean()
            self._read_copies = CopyReader(self._files, copies)
        self.session = Session(self._catalog, self.cfg, copies)
        """What `save` remembers between two calls."""

    def __repr__(self) -> str:
        return f"<Store {self.url}>"

    def _repr_html_(self) -> str:
        steps = self.steps()
        return html_fields(
            "Store", {"at": self.url, "steps": str(len(steps)), "newest": str(steps[-1]) if steps else "none"}
        )

    # ---------------------------------------------------------------------------------------------------- contents

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        return self._catalog.steps()

    def candidates(self) -> list[int]:
        """Return the committed steps in the order in which `load()` tries them.

        Descending, but with those last that a run left behind when it went back to an older step and saved from there.

        Raises:
            CorruptDataError: a record of a run that went back cannot be read.
        """
        return history.load_order(self.steps(), history.skipped_by_load(self._catalog))

    def manifests(self) -> tuple[dict[int, Manifest], dict[int, str]]:
        """Return the manifests by step, and the reasons for steps whose manifest cannot be read."""
        entries, problems = self._catalog.readable()
        return {step: entry.manifest for step, entry in entries.items()}, problems

    def describe(self, step: int | str) -> Manifest:
        """Return the manifest of a step or tag: sizes, chain, restore cost and metric.

        Raises:
            BadArgumentError: the step does not exist.
            CorruptDataError, NewerFormatError: its manifest cannot be read.
        """
        return self._catalog.present(self._step(step)).manifest

    def header(self, manifest: Manifest) -> Checkpoint:
        """Return the checkpoint of a manifest with only its header read, for `summary()`.

        Args:
            manifest: as `describe` or `manifests` returned it.

        Raises:
            CorruptDataError, MissingParentError, NewerFormatError: it cannot be read.
        """
        instance("manifest", manifest, Manifest)
        try:
            return opener(self._files, manifest)(None)
        except MissingParentError:
            now = self._catalog.present(manifest.step).manifest
            if now.file == manifest.file:
                raise
            return opener(self._files, now)(None)

    def disk_usage(self) -> DiskUsage:
        """Return the bytes of the steps' own files, and of all data files.

        The second is larger where chains need files of steps that were removed, or garbage is not collected yet.

        Example:
            >>> import numpy as np
            >>> import shrinkpoint as sp
            >>> store = sp.Store("memory://usage-example")
            >>> saved = store.save(1, {"weight": np.arange(6.0)})
            >>> store.disk_usage() == (saved.nbytes, saved.nbytes)
            True
        """
        steps = total = 0
        for _, files in stores(self._files):
            sizes = files.sizes(DATA)
            listed = {name for entry in Catalog(files).readable()[0].values() for name in entry.manifest.own_files}
            steps += sum(size for name, size in sizes.items() if name in listed)
            total += sum(sizes.values())
        return DiskUsage(steps, total)

    def read(self, step: int | str) -> Checkpoint:
        """Return a step's checkpoint (by number or tag), resolved: for `summary()`, or as a parent.

        Raises: as `load`.
        """
        return self._resolve(self._step(step))[1]

    @property
    def frozen_sets(self) -> FrozenSets:
        """Arrays that many steps share, see `trainers.save(frozen="once")`."""
        return FrozenSets(self._files)

    def restores(self) -> int:
        """Return how often `load` has restored from this store, in all processes."""
        return self.session.count_restores()

    def _step(self, step: Any) -> int:
        return labels.step_number(self._catalog, step)

    # ------------------------------------------------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        state: Any,
        *,
        grads: Any = None,
        kinds: Mapping[str, Any] | None = None,
        metric: float | None = None,
        cfg: Config | str | None = None,
    ) -> Saved:
        """Compress a state and commit it as a step.

        When this returns, the step is durable; when it raises, nothing has changed. (An interrupt may come after the
        commit: `steps()` shows whether the step exists.)

        The step becomes a delta against the checkpoint that this object saved or loaded last (or against its base, see
        `cfg.chain`), or a base, also if a delta would save almost nothing (`ChainPolicy.only_smaller`).

        A step below existing ones is saved with a StoreWarning that names them. If this object has loaded an older step
        and continues from it, the higher steps are left behind: `load()` skips them from then on. Otherwise the step
        may be an old one that is added late, and `load()` still takes the highest. `gc` keeps both ends.

        Args:
            step: training step, 0 to 10**12 - 1. An existing step is replaced in one atomic operation. Any growing
                number is allowed: the optimizer's own count of steps is read from its state.
            state: see `compress`.
            grads: see `compress`.
            kinds: see `compress`.
            metric: quality of the model, finite, for `Retention(best=...)`; may be set later with `rate`.
            cfg: configuration of this checkpoint, for example from `search`; default: the store's. The store's own
                `cfg.chain` always decides when to take a base.

        Raises:
            BadArgumentError, UnsupportedLeafError: see `compress`.
            OSError: the bytes could not be written.
        """
        return self.session.save(step, state, grads=grads, kinds=kinds, metric=metric, cfg=cfg)

    @property
    def head(self) -> ChainHead | None:
        """Parent of the next delta, set by `save`, `load` and `follow`; None: a base is next."""
        return self.session.read_head()

    @property
    def loaded(self) -> int | None:
        """Step that was loaded last, from which the next save continues; None after a save.

        A save that finds exactly the same step already stored counts as loading it: the run repeats itself.
        """
        return None if self.session.loaded is None else self.session.loaded.step

    @property
    def parent(self) -> Checkpoint | None:
        """Parent of the next save, as `prev` for `search`; None: it will be a base.

        With `cfg.chain.only_smaller` (default), a delta that saves almost nothing is stored as a base nevertheless.
        """
        head = self.session.next_head()
        return None if head is None else head.checkpoint

    def earlier(self, state: Any, step: int | None = None) -> PastWeights:
        """Return past weights, a slow average of the saved ones, for `search(earlier=)`.

        With `Config.ahead`, a save of this state is extrapolated from these weights. The next save changes
        the arrays.

        Args:
            state: the state that will be saved.
            step: its training step; None: unknown.

        Example:
            >>> import numpy as np
            >>> import shrinkpoint as sp
            >>> store = sp.Store("memory://earlier-example", sp.Config(ahead=True))
            >>> w = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
            >>> _ = store.save(1, {"weight": w}, kinds={"weight": "linear"})
            >>> store.earlier({"weight": 1.01 * w}, 2).steps
            1.0
        """
        return self.session.earlier(state, step)

    def follow(self, step: int | str, identity: str | None = None) -> None:
        """Let the next delta build on a step, as after `load`, without restoring its state.

        Args:
            step: which, or its tag; it is read from storage.
            identity: the `Manifest.identity` that it must have; None: any.

        Raises:
            MissingParentError: the step was replaced and has another identity. Otherwise as `load`; the head stays.
        """
        number = self._step(step)

        def follow(entry: Entry) -> None:
            if identity not in (None, entry.manifest.identity):
                raise MissingParentError(f"step {number}: it was replaced and is not {str(identity)[:16]}... any more")
            self.session.follow(entry)

        self._catalog.settled(number, follow)

    # ----------------------------------------------------------------------------------------------------- loading

    def load(
        self,
        step: int | str | None = None,
        paths: str | Sequence[str] | None = None,
        *,
        count: bool = True,
        out: Any = None,
        **unknown: Never,
    ) -> Any:
        """Return the state at a step, or the newest intact one.

        Saves that Savers of this process have in flight to this store are waited for.

        Args:
            step: this step (or tag), or an error; None: the newest that is intact. A SkippedCheckpointWarning names
                each newer one that was skipped and why. Steps that a run left behind when it went back (see `save`)
                come last; a StoreWarning names them.
            paths: a shell glob over paths, or several: only the matching part of the state, and only the bytes that it
                needs are read. `*` also matches `/`. Containers without a match are left out; lists keep their
                positions, with None for the rest.
            count: whether this is a restore of the run, to be counted; with `paths` it never is.
            out: a tree of arrays to decode into, see `decompress`: a group of arrays at a time is in memory in addition
                to them. If this raises, they may hold parts of several steps. Not with `paths`.

        Raises:
            BadArgumentError: no such step, an empty store, or a pattern without a match.
            CorruptDataError, MissingParentError, NewerFormatError: the step (with None: every step) cannot be read.
            OSError: the storage cannot be reached.
        """
        no_device("load", unknown)
        patterns, count = None if paths is None else check_patterns(paths), flag("count", count)
        if out is not None and patterns is not None:
            raise BadArgumentError("out and paths were both given: a part of a state is returned in new arrays")
        self.wait_for_saves()
        if step is not None:
            return self._load(self._step(step), patterns, count, out)
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(_Outdated):
                return self._newest(patterns, count, out, is_final=False)
        return self._newest(patterns, count, out, is_final=True)

    def wait_for_saves(self) -> None:
        """Wait for saves to this store that Savers of this process have in flight.

        Errors of those saves are raised by their Savers. A StoreWarning names a worker that is stopped, see `Saver`:
        its save is not waited for.
        """
        try:
            EXIT_CLEANUP.wait_for(one_name(self.url))
        except ChildProcessError as e:
            warnings.warn(f"{self.url}: a save in flight is not seen: {e}", StoreWarning, stacklevel=3)

    def _newest(self, patterns: Sequence[str] | None, count: bool, out: Any, *, is_final: bool) -> Any:
        """Return the newest intact state of the steps that exist now.

        Raises:
            _Outdated: a step cannot be read any more and others have appeared; never if `is_final`.
        """
        steps = self.steps()
        if not steps:
            raise BadArgumentError(f"{self.url} holds no checkpoint")
        skipped: list[str] = []
        behind: Mapping[int, history.Rewind] = {}
        try:
            behind = history.skipped_by_load(self._catalog)
        except CorruptDataError as e:
            warnings.warn(f"{e}: load() takes the highest step", StoreWarning, stacklevel=3)
        for candidate in history.load_order(steps, behind):
            try:
                state = self._load(candidate, patterns, count, out)
            except DAMAGE as e:
                if not is_final and not set(self.steps()) <= set(steps):
                    # Another process saves and removes: its newest step is not among those that were listed.
                    raise _Outdated from None
                skipped.append(str(e))
                continue
            if skipped:
                message = f"{self._files.root}: loaded step {candidate}; skipped {'; '.join(skipped)}"
                warnings.warn(message, SkippedCheckpointWarning, stacklevel=3)
            if message := history.skipped_message(self._files.root, candidate, behind):
                warnings.warn(message, StoreWarning, stacklevel=3)
            return state
        reader = None if patterns or self._read_copies else reader_of_copies(self._files, self.url)
        if reader is not None:
            self._read_copies = reader
            try:
                state = self._newest(None, count, out, is_final=True)
            finally:
                self._read_copies = None
            message = f"{self._files.root}: no checkpoint is intact in storage; loaded from its copy in memory"
            warnings.warn(message, InMemoryWarning, stacklevel=3)
            return state
        raise CorruptDataError(f"{self._files.root}: no checkpoint is intact: {'; '.join(skipped)}")

    def _load(self, step: int, patterns: Sequence[str] | None, count: bool, out: Any) -> Any:
        if patterns is not None:
            return self._catalog.settled(step, lambda e: self._load_only(e.manifest, patterns))
        reader = self._read_copies
        hits = 0 if reader is None else reader.hits
        if out is not None and reader is None:
            entry, state = self._catalog.settled(step, lambda e: (e, self._load_into(e.manifest, out)))
            self.session.resume_later(entry)
        else:
            entry, ckpt, base = self._resolve(step)
            state = decompress(ckpt, out=None if callable(out) else out)
            if reader is not None and reader.hits > hits:
                # Files that were not read from storage may be damaged there: no delta is built on them.
                self.session.resume_without_parent(step)
            else:
                self.session.resume(entry, ckpt, base)
        self._note_thinned(entry.manifest)
        self._count(step, count)
        return state

    def _load_into(self, manifest: Manifest, out: Any) -> Any:
        self.lacks = manifest.lacks  # which the caller may ask for before anything is written
        return decompress_into(intact(self._files, manifest), out)

    def _load_only(self, manifest: Manifest, patterns: Sequence[str]) -> Any:
        try:
            return decompress_only(opener(self._files, manifest), patterns)
        except BadArgumentError as e:
            if manifest.lacks:
                raise BadArgumentError(f"{e}; step {manifest.step} was thinned: {lacking(manifest.lacks)}") from None
            raise

    def _note_thinned(self, manifest: Manifest) -> None:
        """Remember what the loaded step lacks, and warn of it."""
        self.lacks = manifest.lacks
        if self.lacks:
            message = f"{self._files.root}: step {manifest.step} was thinned: {lacking(manifest.lacks)}"
            warnings.warn(f"{message}; training cannot continue from it", ThinnedCheckpointWarning, stacklevel=4)

    def _count(self, step: int, count: bool) -> None:
        """Count a restore, or warn that this is impossible."""
        try:
            if count:
                self.session.add_restore(step)
        except (OSError, CorruptDataError) as e:
            message = f"{self._files.root}: this restore could not be counted ({e}); use load(..., count=False)"
            warnings.warn(message, RestoreNotCountedWarning, stacklevel=4)

    def _resolve(self, step: int) -> tuple[Entry, Checkpoint, Checkpoint]:
        """Return a step's manifest, its resolved checkpoint, and the base of its chain."""
        return self._catalog.settled(step, lambda e: (e, *resolve(self._files, e.manifest, self._read_copies)))

    # ---------------------------------------------------------------------------------------------------- checking

    def verify(self, progress: Progress | None = None) -> dict[int, str]:
        """Read and check every step; return the damaged ones and the reasons.

        A step is read with its chain and its frozen set.

        Args:
            progress: called with (step, done, total) after each step.
        """
        return problems(self._catalog, or_none("progress", progress, function))

    def verify_labels(self) -> dict[str, str]:
        """Read all tags and records of runs that went back; return the damaged ones and the reasons.

        `verify` does not read them, because they are not steps; but while one is damaged, `gc` removes nothing.
        """
        return unreadable(self._files)

    # ----------------------------------------------------------------------------------------------- housekeeping

    def compact(self, max_cost: float = MAX_COST, progress: Progress | None = None) -> list[int]:
        """Shorten long chains: restoring a step then decodes at most `max_cost` times a base.

        Every step stays loadable at every moment and keeps its bits; deltas saved later decode as before. A saver may
        run at the same time. The former files are garbage afterwards: `gc` removes them.

        Args:
            max_cost: of restoring any step, in multiples of a base, in [1, 1e6]; 1 makes every step a base. Default
                2.5: decoding exact differences takes up to 1.33 times as long as decoding a base of as many bytes, so
                that no step takes over three times as long as a base.
            progress: called with (step, done, total) after each step.

        Returns:
            The steps that are stored differently now, ascending. A NotCompactedWarning names the steps that cannot be
            read and were not changed.
        """
        max_cost = number("max_cost", max_cost, 1, 1e6)
        progress = or_none("progress", progress, function)
        if not self._exists():
            return []
        with self._lock.shared() as lease:
            compaction = Compaction(self._catalog, lease, max_cost, progress)
            moved = compaction.run()
        if compaction.problems:
            reasons = "; ".join(why for _, why in sorted(compaction.problems.items())[:10])
            message = f"{self._files.root}: {named(compaction.problems)} not intact and not compacted: {reasons}"
            warnings.warn(message, NotCompactedWarning, stacklevel=2)
        return moved

    def _exists(self) -> bool:
        """Return whether the folder exists; true for storage without folders."""
        return not self._files.local or os.path.isdir(self._files.root)

    def gc(self, retention: Retention | None = None, *, timeout: float = 60.0, dry_run: bool = False) -> list[str]:
        """Remove steps that a retention does not keep, then all files that no step needs.

        A file that a step needs is never removed, even if its own step is removed. So chains of kept steps may begin
        with files of removed steps. If these take over twice the bytes of the bases that would replace them, the chains
        are compacted to free space.

        Nothing is removed while a manifest or tag cannot be read. Steps that are not intact do not count as kept and
        are not removed. If a run went back (see `save`), the retention is applied twice, once without the steps left
        behind, and both results are kept. With `best`, and without any metric, every step is kept, with a StoreWarning.

        With `thin_after`, old steps lose the moments of optimizers, each in one atomic operation; saves wait only while
        a chain moves to its new files. See docs/store.md.

        Frozen parameters that are stored once (`trainers.save`) are removed when no step needs them and no save has
        used them for a day.

        Args:
            retention: rules for the steps to keep; None: every step. Pinned and tagged steps are always kept.
            timeout: seconds to wait for savers to finish, 0 or more.
            dry_run: only return the names, remove nothing. It also waits for savers, whose files are not garbage.

        Returns:
            Names of the removed files.

        Raises:
            CorruptDataError: a manifest, tag or record cannot be read, so the files that it needs are unknown; the
                message names it and the remedy.
            TimeoutError: others did not stop writing.
        """
        retention = or_none("retention", retention, instance, Retention)
        timeout, dry_run = number("timeout", timeout, 0, math.inf), flag("dry_run", dry_run)
        if not self._exists():
            return []
        with self._lock.alone(timeout) as lease:
            removed = collect(self._catalog, lease, retention, dry_run=dry_run)
            gone = set(removed)

            def kept() -> list[Entry]:
                return [e for e in self._catalog.all().values() if e.path not in gone]

            removed += collect_frozen(self._files, kept, dry_run=dry_run)
        if retention is None or dry_run:
            return removed
        moved: list[int] = []
        with contextlib.suppress(InUseError):
            moved = thin(self._catalog, retention, self._without_moments, timeout)
        # Compact chains that begin with files of removed or thinned steps, if that saves space.
        with self._lock.shared() as lease:
            moved += Compaction(self._catalog, lease, math.inf).free()
        if moved:
            with contextlib.suppress(InUseError), self._lock.alone(timeout) as lease:
                removed += collect(self._catalog, lease, None)
        return removed

    def drop(self, *steps: int) -> None:
        """Remove steps, intact or not; `gc` removes their files.

        Steps that are coded against them stay readable.

        Raises:
            BadArgumentError: one does not exist, or is pinned or tagged.
            CorruptDataError: the manifest of one is a folder.
            TimeoutError: others did not stop writing.
        """
        numbers = [check_step(step) for step in steps]
        for step in set(numbers).difference(self.steps()):
            raise unknown(self._files, f"step {step!r}", self.steps())
        with self._lock.alone(60.0):
            drop(self._catalog, numbers)
            if not self._catalog.steps():
                self.session.forget()  # there is nothing to continue from, and no reason to warn about it

    def drop_after(self, step: int | str) -> list[int]:
        """Remove all steps above one, the highest first, to start over from it.

        Args:
            step: the one that is to be the newest, or its tag.

        Returns:
            The removed steps, ascending.

        Raises: as `drop`.
        """
        number = self._step(step)
        later = [s for s in self.steps() if s > number]
        if later:
            self.drop(*reversed(later))
        elif (entry := self._catalog.get(number)) is not None:
            # A process may have removed them and been killed before that was durable.
            self._files.sync([entry.path])
        return later

    # ------------------------------------------------------------------------------------------------------- labels

    def rate(self, step: int | str, metric: float | None) -> None:
        """Set the quality of the model of a step, for `Retention(best=...)`; None removes it.

        Raises:
            BadArgumentError: no such step, or the metric is not finite.
        """
        metric = check_metric(metric)
        self._step(step)
        with self._lock.shared():
            number = self._step(step)
            while (entry := self._catalog.present(number)).manifest.metric != metric:
                self._catalog.replace(entry, replace(entry.manifest, metric=metric))

    def pin(self, step: int | str) -> None:
        """Keep a step regardless of a retention."""
        self._step(step)
        with self._lock.shared():
            self._files.write(labels.pin_name(self._step(step)), b"")

    def unpin(self, step: int | str) -> None:
        """Remove the pin of a step, or of a tag's step; without a pin this does nothing."""
        number = self.tags().get(step) if isinstance(step, str) else check_step(step)
        if number is not None:
            self._files.remove([labels.pin_name(number)])

    def pins(self) -> list[int]:
        """Return the pinned steps, ascending."""
        return sorted(labels.pins(self._files))

    def tag(self, name: str, step: int | str) -> None:
        """Name a step, which is then kept and can be loaded by name; an existing name moves.

        Args:
            name: letters, digits, "_", "." and "-", at most 100; the first is a letter or "_".
            step: which.

        Raises:
            BadArgumentError: no such step, an invalid name, or another tag that differs by case only.
        """
        labels.check_tag(name)
        self._step(step)
        with self._lock.shared():
            labels.check_alike(self._files, [name])
            self._files.write(labels.tag_name(name), labels.tag_data(self._step(step)))

    def untag(self, name: str) -> bool:
        """Remove a tag, which may be damaged; return whether it existed."""
        file = labels.tag_name(labels.check_tag(name))
        existed = self._files.exists(file)
        self._files.remove([file])
        return existed

    def tags(self) -> dict[str, int]:
        """Return name -> step, sorted by name."""
        return labels.tags(self._files)

    # ------------------------------------------------------------------------------------------------------ copying

    def copy(
        self, url: str | os.PathLike[str], steps: Iterable[int | str] | None = None, *, repair: bool = False
    ) -> Store:
        """Copy steps with all that they need to another store; every file is checked.

        That is their chains, frozen sets, pins and tags. The number of restores is copied too: a run that continues
        there is the same run.

        Args:
            url: the target. Steps that exist there already must be the same ones.
            steps: which, by number or tag; None: all.
            repair: also read the files of steps that exist there already, and rewrite damaged ones; default False,
                which reads no more there than the parents of new steps.

        Returns:
            The other store.

        Raises:
            BadArgumentError: no such step, or the target has a different one of that number or tag; nothing is copied.
            CorruptDataError, MissingParentError, NewerFormatError: a step is not intact; those before it are copied.
            MissingParentError: another process removes steps faster than they are copied.
        """
        target, repair = Store(url, self.cfg), flag("repair", repair)
        if isinstance(steps, str):
            raise BadArgumentError(f"steps is {steps!r}; it must be a list of steps, or None")
        asked = None if steps is None else [self._step(step) for step in sequence("steps", steps)]
        with target._lock.shared() as lease:
            for _ in range(_ATTEMPTS):
                # With `None`, another process may remove all of them before their turn, and have others then.
                entries = self._catalog.all() if asked is None else {s: self._catalog.present(s) for s in asked}
                chosen = {step: entry.manifest for step, entry in entries.items()}
                may_go = asked is None
                if copy_all(self._catalog, chosen, target._catalog, lease, may_go=may_go, repair=repair) or not chosen:
                    return target
        raise MissingParentError(
            f"{self.url}: every step was removed before it was copied, {_ATTEMPTS} times; pin one, or stop the run"
        )
