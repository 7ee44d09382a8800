"""The session of a run: its data between two saves to a store.

It remembers the chain that it extends, past weights, and the step that it went back to. A `Store` has one session; a
`Saver` saves through the session of its worker. Both save in the same way.
"""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ..codec.checkpoint import Checkpoint
from ..codec.compress import Economy, compress_inputs
from ..codec.config import Config
from ..codec.display import Summary
from ..codec.errors import CorruptDataError, MissingParentError, NewerFormatError, ShrinkpointError
from ..codec.format.ranged import Ranged, Spool
from ..codec.inputs import Inputs, PastWeights
from ..codec.named_presets import check_config
from ..codec.parallel import own_arithmetic
from ..codec.plan import plan
from . import history
from .chain import ChainHead, Size, manifest_over, missing, resolve, smaller
from .files import StoreWarning
from .lock import Lease
from .manifest import DATA, Catalog, Entry, Manifest, check_metric, check_step
from .memory_copies import MemoryCopies
from .retention import remove_unused
from .weight_average import WeightAverage, needs_average


@contextlib.contextmanager
def _with_note(step: int) -> Iterator[None]:
    """Add to the error of a full or read-only disk that it concerns this step only."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            error.add_note(f"This happened while step {step} was saved; no step that was saved before is lost.")
        raise


@dataclass(frozen=True, slots=True)
class Saved:
    """Result of `Store.save`: step, path of the file, and the resolved checkpoint."""

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
        """Return whether the step was stored as a delta."""
        return self.checkpoint.is_delta

    def summary(self) -> Summary:
        """Return one row per array."""
        return self.checkpoint.summary()


@dataclass(slots=True)
class Begun:
    """A step whose state is compressed; `Session.finish` commits it.

    Args:
        manifest: of the step.
        checkpoint: its coded state.
        parent: the head that it is a delta against; None: a base.
        inputs: its arrays, if they do not change until it is finished; else None.
        lease: on the store, held shared since before the parent was read.
        lock: releases the lease.
        spools: closes the files of coded bytes.
    """

    manifest: Manifest
    checkpoint: Checkpoint
    parent: ChainHead | None
    inputs: Inputs | None
    lease: Lease
    lock: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    spools: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


class Session:
    """The data that one run keeps between its saves.

    Args:
        catalog: of the store.
        cfg: how to compress, and when to take a base.
        copies: also keep each checkpoint there; None: do not.
    """

    def __init__(self, catalog: Catalog, cfg: Config, copies: MemoryCopies | None) -> None:
        self.head: ChainHead | None = None
        """What the next delta builds on; None: the next checkpoint is a base."""
        self.loaded: history.Loaded | None = None
        """The step that was loaded; None from the first save on."""
        self.catalog = catalog
        self._cfg, self._copies = cfg, copies
        self._average: WeightAverage | None = None
        """Past weights; None: not started, begins with the weights of the head."""
        self._left: set[int] = set()
        """Steps that were left behind and have been reported."""
        self.spools = self.consumes = False
        """How `save` saves memory: coded bytes wait on the disk of the store; and references of the parent are freed
        while the delta is made, for sessions that share their head with no other code."""
        self._spools = contextlib.ExitStack()
        self.unread: Entry | None = None
        """The step to continue from, if its references were not read yet; `head` is then not set."""
        self._is_consumed = False
        """Whether references of the head are missing, because a save failed that had begun to free them."""
        self._base_size: Size | None = None
        self._restores = 0

    # ------------------------------------------------------------------------------------------- where the run is

    def resume(self, entry: Entry, ckpt: Checkpoint, base: Checkpoint) -> None:
        """Continue from a step that was read from storage."""
        self.adopt(ChainHead.at(self._cfg.chain, entry.manifest, ckpt, base))

    def resume_later(self, entry: Entry) -> None:
        """Continue from a step whose references are read from storage when the next save needs them."""
        self.resume_without_parent(entry.manifest.step)
        self.unread = entry

    def resume_without_parent(self, step: int) -> None:
        """Continue from a step that may be damaged in storage: the next checkpoint is a base."""
        self.forget()
        self.loaded = history.Loaded.of(self.catalog, step)

    def adopt(self, head: ChainHead) -> None:
        """Continue from the head of a session for the same store in this process."""
        self.resume_without_parent(head.last.step)
        self.head = head

    def follow(self, entry: Entry) -> None:
        """Continue from a step without restoring its state; it is read from storage."""
        self.resume(entry, *resolve(self.catalog.files, entry.manifest))

    def forget(self) -> None:
        """Let the next checkpoint be a base."""
        self.head = self._average = self.unread = None

    @property
    def newest(self) -> Manifest | None:
        """Manifest of the step to continue from; None without such a step."""
        if self.unread is not None:
            return self.unread.manifest
        return None if self.head is None else self.head.last

    def read_head(self) -> ChainHead | None:
        """Return the head; read it first, if its step was loaded into existing arrays."""
        if self.unread is not None:
            manifest, self.unread = self.unread.manifest, None
            try:
                entry = self.catalog.present(manifest.step)
                if entry.manifest.identity != manifest.identity:
                    raise MissingParentError("it was replaced")
                self.head = ChainHead.at(self._cfg.chain, entry.manifest, *resolve(self.catalog.files, entry.manifest))
            except ShrinkpointError as e:
                self._begin_again(manifest.step, e)
        return self.head

    def _begin_again(self, step: int, error: ShrinkpointError) -> None:
        """Let the next checkpoint be a base, with a warning, because its parent cannot be read."""
        self.forget()
        message = f"{self.catalog.files.root}: a new chain begins, because step {step} cannot be read: {error}"
        warnings.warn(message, StoreWarning, stacklevel=5)

    def next_head(self) -> ChainHead | None:
        """Return the parent of the next save; None: a base is due."""
        head = self.read_head()
        head = None if head is None else head.now(self.catalog)
        if head is not None and self._is_consumed:
            try:
                head = self.head = replace(head, checkpoint=resolve(self.catalog.files, head.manifest)[0])
            except ShrinkpointError as e:
                self._begin_again(head.manifest.step, e)
                head = None
            self._is_consumed = False
        return None if head is None else head.next(self._cfg.chain)

    def earlier(self, state: Any, step: int | None) -> PastWeights:
        """See `Store.earlier`."""
        return self._average_from(self.next_head()).earlier(state, step)

    def _average_from(self, head: ChainHead | None) -> WeightAverage:
        """Return the average so far, or a new one that begins with the next parent."""
        if self._average is None:
            self._average = WeightAverage() if head is None else WeightAverage(head.checkpoint, head.manifest.step)
        return self._average

    # ---------------------------------------------------------------------------------------------------- restores

    def count_restores(self) -> int:
        """Return how often the run was restored, by any process."""
        self._restores = history.count_restores(self.catalog.files)
        return self._restores

    def add_restore(self, step: int) -> None:
        """Count a restore of this step."""
        self._restores = history.add_restore(self.catalog.files, step, self._restores)

    # ------------------------------------------------------------------------------------------------------ saving

    def save(self, step: int, state: Any, *, grads: Any, kinds: Any, metric: Any, cfg: Config | str | None) -> Saved:
        """See `Store.save`."""
        return self.finish(self.begin(step, state, grads=grads, kinds=kinds, metric=metric, cfg=cfg))

    def begin(
        self,
        step: int,
        state: Any,
        *,
        grads: Any,
        kinds: Any,
        metric: Any,
        cfg: Config | str | None,
        last: bool = False,
    ) -> Begun:
        """Compress a state for a step that `finish` commits, in any thread.

        Args:
            step: see `Store.save`; so are the others.
            state: its arrays must not change until `finish`, unless `last` is set.
            grads: gradients.
            kinds: of arrays.
            metric: of the step.
            cfg: configuration.
            last: whether the arrays may change once this returns.
        """
        step, metric = check_step(step), check_metric(metric)
        asked = self._cfg if cfg is None else replace(check_config(cfg), chain=self._cfg.chain)
        with _with_note(step), contextlib.ExitStack() as lock, contextlib.ExitStack() as self._spools:
            # Held from before the parent is read until the manifest exists, so that `gc` does not remove the parent.
            lease = lock.enter_context(self.catalog.lock.shared())
            if any(hasattr(rule.codec, "for_restores") for rule in asked.rules):
                asked = asked.for_restores(max(self._restores, self.count_restores()))
            head = self.next_head()
            inputs = Inputs.of(state, None, kinds, grads)
            average = self._average = self._average_from(head) if needs_average(asked) else None
            if average is not None:
                inputs = replace(inputs, past_weights=average.earlier(inputs, step))
            ckpt = self._compress(inputs, asked, head, may_consume=average is None)
            parent = head if ckpt.is_delta else None
            begun = Begun(manifest_over(parent, step, ckpt, metric), ckpt, parent, None if last else inputs, lease)
            if last:
                self._follow_average(inputs, ckpt, step)
            begun.lock, begun.spools = lock.pop_all(), self._spools.pop_all()
        return begun

    def finish(self, begun: Begun) -> Saved:
        """Write and commit a step; once."""
        files, manifest, ckpt = self.catalog.files, begun.manifest, begun.checkpoint
        step, file = manifest.step, f"{DATA}/{manifest.file}"
        with begun.spools:
            with _with_note(step), contextlib.ExitStack() as undo:
                with begun.lock:
                    undo.callback(remove_unused, self.catalog, file)
                    with files.staged(file, ckpt.blocks()):
                        self.commit(manifest, begun.lease, undo)
                undo.pop_all()
            self._is_consumed = False
            self.head = ChainHead.after(self._cfg.chain, manifest, ckpt, begun.parent)
            if begun.inputs is not None:
                self._follow_average(begun.inputs, ckpt, step)
            if self._copies is not None:
                self._copies.put(step, manifest.file, manifest.parents, ckpt.to_bytes())
            if not ckpt.is_in_memory:
                ckpt.read_from(Ranged(ckpt.nbytes, lambda start, stop: files.read_range(file, start, stop)))
        return Saved(step, files.path(file), ckpt)

    def _follow_average(self, inputs: Inputs, ckpt: Checkpoint, step: int) -> None:
        """Move the average of past weights, if there is one, towards the saved weights."""
        try:
            if self._average is not None:
                self._average.follow(inputs, ckpt, step)
        except (MemoryError, RuntimeError):  # PyTorch raises the latter where memory is short
            self._average = None  # the step exists, so this is not an error of the save

    @own_arithmetic()
    def _compress(self, inputs: Inputs, cfg: Config, head: ChainHead | None, *, may_consume: bool) -> Checkpoint:
        """Compress a state over a head; the result is a base if a delta saves almost nothing."""
        if head is None:
            ckpt = compress_inputs(inputs, cfg, economy=self._economy())
            self._base_size = Size.of(ckpt)
            return ckpt
        inputs = replace(inputs, prev=head.checkpoint)
        planned = plan(inputs, cfg)
        base = replace(inputs, prev=None, evidence=[array.evidence for array in planned])
        self._is_consumed = self.consumes and may_consume and self._cfg.chain.against == "previous"
        economy = self._economy(head.checkpoint if self._is_consumed else None)
        delta = compress_inputs(inputs, cfg, planned=planned, economy=economy)
        planned.clear()
        size = self._base_size or head.base_size
        ckpt, base_size = smaller(cfg.chain, delta, size, lambda: compress_inputs(base, cfg, economy=self._economy()))
        self._base_size = base_size or self._base_size
        return ckpt

    def _economy(self, parent: Checkpoint | None = None) -> Economy:
        """Return how memory is saved, with the parent whose references are freed."""
        file = self.catalog.files.spool(DATA) if self.spools else None
        return Economy(None if file is None else Spool(self._spools.enter_context(file)), parent)

    def commit(self, manifest: Manifest, lease: Lease, undo: contextlib.ExitStack) -> None:
        """Commit a step whose data files are durable; first record the steps that it leaves behind.

        Args:
            manifest: of the step.
            lease: on the store, held shared since before the files were written.
            undo: callbacks to run if the save fails, also by an error after this call.
        """
        lease.renew()
        catalog, files, step = self.catalog, self.catalog.files, manifest.step
        history.unmark(files, step, manifest.identity)
        steps = list(catalog.recent())
        existing: Entry | None = None
        with contextlib.suppress(CorruptDataError, NewerFormatError):
            existing = catalog.get(step) if step in steps else None
        is_replayed = existing is not None and existing.manifest.identity == manifest.identity
        record = None if is_replayed else history.new_record(catalog, steps, manifest, self.loaded, self._left)
        if record is not None:
            undo.callback(history.undo_rewind, catalog, record, manifest)
            warnings.warn(record.message(files.root), StoreWarning, stacklevel=4)
            # Before the step: a process killed in between has gone back and saved nothing.
            history.write_rewind(files, record)
        elif not is_replayed and step in steps and self.loaded is None and step not in self._left:
            message = f"{files.root}: step {step} was stored with another state, which this save replaces"
            warnings.warn(message, StoreWarning, stacklevel=4)
        if files.local and not files.exists(f"{DATA}/{manifest.file}"):
            path = files.path(f"{DATA}/{manifest.file}")
            raise FileNotFoundError(errno.ENOENT, "moved or removed during the save", path)
        catalog.commit(manifest)
        self.loaded = self.loaded.replayed(step) if self.loaded is not None and is_replayed else None
        if record is not None:
            self._left.update(record.left)


class SharedSave:
    """The save of a sharded step, in the process that commits it.

    Several processes write the files of the step.

    It holds the store's lock from its creation until `close`. Meanwhile `gc` removes neither the files that other
    processes have written for this step, nor the parents of these files. So create it before the others begin.

    Args:
        session: of the store to save to.

    Raises:
        TimeoutError: garbage collection did not end in time.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._stack = session, contextlib.ExitStack()
        self._lease = self._stack.enter_context(session.catalog.lock.shared())
        self.close = self._stack.close
        """Release the lock; a second call does nothing."""

    def commit(self, manifest: Manifest, index: Checkpoint) -> None:
        """Write the index of the shards, then commit the step in one atomic operation.

        Raises:
            MissingParentError: a file of a rank is missing; nothing is committed.
            OSError: the bytes could not be written; nothing is committed.
        """
        files = self._session.catalog.files
        if gone := missing(files, [name for name, _ in manifest.shards]):
            path = files.path(f"{DATA}/{min(gone)}")
            raise MissingParentError(
                f"step {manifest.step}: {path} is missing: removed, or the ranks do not see one store"
            )
        files.write(f"{DATA}/{manifest.file}", index.to_bytes())
        with contextlib.ExitStack() as undo:
            self._session.commit(manifest, self._lease, undo)
            undo.pop_all()
