"""The session of a run: its data between two saves to a store.

It remembers the chain that it extends, past weights, and the step that it went back to. A `Store` has one session; a
`Saver` saves through the session of its worker. Both save in the same way.
"""

from __future__ import annotations

import contextlib
import errno
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..codec.checkpoint import Checkpoint
from ..codec.compress import compress
from ..codec.config import Config
from ..codec.named_presets import check_config
from ..codec.summary import Summary
from ..codec.weights.past_weights import PastWeights
from . import restore_counter, rewinds
from .catalog import Catalog, Entry
from .chain import FOLDER, resolve
from .chain_head import ChainHead, Size, manifest_over, smaller
from .files import Files, StoreWarning
from .lock import Lease, Lock
from .manifest import Manifest, check_metric, check_step
from .memory_copies import MemoryCopies
from .retention import take_back
from .weight_average import WeightAverage, arrays_by_path, needs_average


@contextlib.contextmanager
def _noted(step: int) -> Iterator[None]:
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


class Session:
    """The data that one run keeps between its saves.

    Args:
        files: of the store.
        catalog: of the store.
        lock: of the store.
        cfg: how to compress, and when to take a base.
        copies: also keep each checkpoint there; None: do not.
    """

    def __init__(self, files: Files, catalog: Catalog, lock: Lock, cfg: Config, copies: MemoryCopies | None) -> None:
        self.head: ChainHead | None = None
        """What the next delta builds on; None: the next checkpoint is a base."""
        self.loaded: rewinds.Loaded | None = None
        """The step that was loaded; None from the first save on."""
        self._files, self._catalog, self._lock, self._cfg, self._copies = files, catalog, lock, cfg, copies
        self._average: WeightAverage | None = None
        """Past weights; None: not started, begins with the weights of the head."""
        self._left: set[int] = set()
        """Steps that were left behind and have been reported."""
        self._base_size: Size | None = None
        self._restores: int | None = None

    # ------------------------------------------------------------------------------------------- where the run is

    def resume(self, entry: Entry, ckpt: Checkpoint, base: Checkpoint) -> None:
        """Continue from a step that was read from storage."""
        self.head = ChainHead.at(self._cfg.chain, entry.manifest, ckpt, base)
        self._average = None
        self.loaded = rewinds.Loaded.of(self._catalog, entry.manifest.step)

    def resume_without_parent(self, step: int) -> None:
        """Continue from a step that may be damaged in storage: the next checkpoint is a base."""
        self.forget()
        self.loaded = rewinds.Loaded.of(self._catalog, step)

    def adopt(self, head: ChainHead) -> None:
        """Continue from the head of another session for the same store, in this process."""
        self.loaded = rewinds.Loaded.of(self._catalog, head.last.step)
        self.head, self._average = head, None

    def follow(self, entry: Entry) -> None:
        """Continue from a step without restoring its state; it is read from storage."""
        self.resume(entry, *resolve(self._files, entry.manifest))

    def forget(self) -> None:
        """Let the next checkpoint be a base."""
        self.head = self._average = None

    def next_head(self) -> ChainHead | None:
        """Return the parent of the next save; None: a base is due."""
        head = None if self.head is None else self.head.now(self._files, self._catalog)
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
        self._restores = restore_counter.count(self._files)
        return self._restores

    def add_restore(self, step: int) -> None:
        """Count a restore of this step."""
        self._restores = restore_counter.add(self._files, step, self._restores or 0)

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
        """See `Store.save`."""
        step, metric = check_step(step), check_metric(metric)
        asked = self._cfg if cfg is None else replace(check_config(cfg), chain=self._cfg.chain)
        head = None
        with _noted(step), contextlib.ExitStack() as undo:
            # Held from before the parent is read until the manifest exists, so that `gc` does not remove the parent.
            with self._lock.shared() as lease:
                asked = self._for_restores(asked)
                head = self.next_head()
                # The average's view of the state: computed once, used before and after the save.
                arrays = arrays_by_path(state) if needs_average(asked) else None
                ckpt, head = self._compress(state, step, asked, head, arrays, grads, kinds)
                manifest = manifest_over(head, step, ckpt, metric)
                file = f"{FOLDER}/{manifest.file}"
                undo.callback(take_back, self._files, self._catalog, self._lock, file)
                self._files.write(file, ckpt.to_bytes())
                self.commit(manifest, lease, undo)
            undo.pop_all()
        self.head = ChainHead.after(self._cfg.chain, manifest, ckpt, head)
        self._update_average(arrays, ckpt, step)
        if self._copies is not None:
            self._copies.put(step, manifest.file, manifest.parents, ckpt.to_bytes())
        return Saved(step, self._files.path(file), ckpt)

    def commit(self, manifest: Manifest, lease: Lease, undo: contextlib.ExitStack) -> None:
        """Commit a step whose data files are durable.

        Args:
            manifest: of the step.
            lease: on the store, held shared since before the files were written.
            undo: callbacks to run if the save fails, also by an error after this call.
        """
        lease.renew()
        replays, record = self._go_back(manifest, undo)
        if self._files.local and not self._files.exists(f"{FOLDER}/{manifest.file}"):
            path = self._files.path(f"{FOLDER}/{manifest.file}")
            raise FileNotFoundError(errno.ENOENT, "moved or removed during the save", path)
        self._catalog.commit(manifest)
        self.loaded = self.loaded.replayed(manifest.step) if self.loaded is not None and replays else None
        if record is not None:
            self._left.update(record.left)

    def _go_back(self, manifest: Manifest, undo: contextlib.ExitStack) -> tuple[bool, rewinds.Rewind | None]:
        """Record the steps left behind; return whether the same step exists, and the record."""
        step = manifest.step
        rewinds.come_back(self._files, step, manifest.identity)
        steps = list(self._catalog.recent())
        if step in steps and rewinds.is_there(self._catalog, manifest):
            return True, None
        record = rewinds.going_back(self._catalog, steps, manifest, self.loaded, self._left)
        if record is not None:
            undo.callback(rewinds.take_back, self._files, self._catalog, record, manifest)
            warnings.warn(record.message(self._files.root), StoreWarning, stacklevel=5)
            # Before the step: a process killed in between has gone back and saved nothing.
            rewinds.write(self._files, record)
        elif step in steps and self.loaded is None and step not in self._left:
            message = f"{self._files.root}: step {step} was stored with another state, which this save replaces"
            warnings.warn(message, StoreWarning, stacklevel=5)
        return False, record

    def _compress(
        self,
        state: Any,
        step: int,
        cfg: Config,
        head: ChainHead | None,
        arrays: Mapping[str, Any] | None,
        grads: Any,
        kinds: Mapping[str, Any] | None,
    ) -> tuple[Checkpoint, ChainHead | None]:
        """Compress a state; also return the head of its parent, None for a base."""
        earlier = None
        if arrays is None:
            self._average = None
        else:
            earlier = self._average_from(head).earlier(arrays, step)

        def compressed(parent: Checkpoint | None) -> Checkpoint:
            return compress(state, parent, cfg, grads=grads, kinds=kinds, earlier=earlier)

        if head is None:
            ckpt = compressed(None)
            self._base_size = Size.of(ckpt)
            return ckpt, None
        delta, size = compressed(head.checkpoint), self._base_size or head.base_size
        ckpt, base_size = smaller(self._cfg.chain, delta, size, lambda: compressed(None))
        self._base_size = base_size or self._base_size
        return ckpt, head if ckpt.is_delta else None

    def _for_restores(self, asked: Config) -> Config:
        """Return the configuration with the number of restores, if it depends on that."""
        if not any(hasattr(rule.codec, "for_restores") for rule in asked.rules):
            return asked
        known = self._restores or 0
        return asked.for_restores(max(known, self.count_restores()))

    def _update_average(self, arrays: Mapping[str, Any] | None, ckpt: Checkpoint, step: int) -> None:
        if self._average is None or arrays is None:
            return
        try:
            self._average.follow(arrays, ckpt, step)
        except (MemoryError, RuntimeError):  # PyTorch raises the latter where memory is short
            self._average = None  # the step exists, so this is not an error of the save
