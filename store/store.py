"""A store: chains of checkpoints in a folder or bucket, each visible by one atomic step after its bytes are durable."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..codec.checkpoint import Checkpoint, Row, decompress
from ..codec.compress import compress
from ..codec.config import Config, check_config
from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError, NewerFormatError, ShrinkpointError
from .files import TEMPORARY, Files
from .manifest import Manifest, data_name, step_of

_DATA, _STEPS = "data", "steps"
_MAX_STEP = 10**12 - 1


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


@dataclass(frozen=True, slots=True)
class _Head:
    """What the next delta builds on: the resolved parent, its chain of files (the nearest first), its distance."""

    parent: Checkpoint
    chain: tuple[str, ...]
    since_base: int


class SkippedCheckpointWarning(UserWarning):
    """`Store.load()` passed over a newer checkpoint that is not intact."""


class Store:
    """Checkpoints by step, as chains of bases and deltas.

    Args:
        url: a folder, or any fsspec URL ("s3://bucket/run", "memory://run"). It need not exist yet.
        cfg: how to compress, and when to take a base (`cfg.chain`).

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> store = sp.Store("memory://docs-store")
        >>> store.save(10, {"w": np.arange(6.0)}).step
        10
        >>> store.load()["w"].tolist(), store.steps()
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [10])
    """

    def __init__(self, url: str | os.PathLike[str], cfg: Config | None = None) -> None:
        self.cfg = Config() if cfg is None else check_config(cfg)
        if not isinstance(url, (str, os.PathLike)):
            raise BadArgumentError(f"url must be a path or an fsspec URL, not {type(url).__qualname__}")
        try:
            self._files = Files(url)
        except (ValueError, ImportError) as e:
            raise BadArgumentError(f"url {os.fspath(url)!r}: {e}") from None
        self._head: _Head | None = None

    def __repr__(self) -> str:
        return f"<Store {self._files.root}>"

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return sorted(s for s in map(step_of, self._files.list(_STEPS)) if s is not None)

    def save(self, step: int, state: Any, *, grads: Any = None, kinds: Mapping[str, Any] | None = None) -> Saved:
        """Compress a state and commit it; when this returns it is durable, when it raises nothing has changed.

        A delta against the checkpoint this object saved or loaded last (or its base, as `cfg.chain` says), else a base.

        Args:
            step: training step, 0 or more. A step that exists is replaced in one atomic step.
            state: see `compress`.
            grads: see `compress`.
            kinds: see `compress`.

        Raises:
            BadArgumentError, UnsupportedLeafError: see `compress`.
            OSError: the bytes could not be written.
        """
        if type(step) is not int or not 0 <= step <= _MAX_STEP:
            raise BadArgumentError(f"step is {step!r}; it must be an integer in [0, {_MAX_STEP}]")
        head = self._head
        if head is not None and head.since_base + 1 >= self.cfg.chain.base_every:
            head = None
        ckpt = compress(state, head.parent if head else None, self.cfg, grads=grads, kinds=kinds)
        file = data_name(step, ckpt.id)
        manifest = Manifest(
            step,
            file,
            ckpt.id,
            ckpt.nbytes,
            ckpt.raw_nbytes,
            parents=head.chain if head else (),
            since_base=head.since_base + 1 if head else 0,
        )
        new = self._files.write(f"{_DATA}/{file}", ckpt.to_bytes())
        try:
            self._files.write(f"{_STEPS}/{manifest.name}", manifest.to_bytes())
        except BaseException:
            if new:
                self._files.remove(f"{_DATA}/{file}")
            raise
        self._advance(manifest, ckpt, head.parent if head else ckpt)
        return Saved(step, self._files.path(f"{_DATA}/{file}"), ckpt)

    def _advance(self, manifest: Manifest, ckpt: Checkpoint, base: Checkpoint) -> None:
        """Let the next delta build on this checkpoint, or on its base."""
        chain = (manifest.file, *manifest.parents)
        if self.cfg.chain.against == "previous":
            self._head = _Head(ckpt, chain, manifest.since_base)
        else:
            self._head = _Head(base, chain[-1:], manifest.since_base)

    def load(self, step: int | None = None) -> Any:
        """The state at a step, or the newest intact one.

        Args:
            step: that step or an error; None: the newest that is intact, with a SkippedCheckpointWarning naming each
                newer one that was passed over and why.

        Raises:
            BadArgumentError: no such step, or an empty store.
            CorruptDataError, MissingParentError, NewerFormatError: the step (with None: every step) is not readable.
        """
        steps = self.steps()
        if step is not None:
            if step not in steps:
                raise BadArgumentError(f"step {step} is not in {self._files.root}; {_listed(steps)}")
            return self._load(step)
        if not steps:
            raise BadArgumentError(f"{self._files.root} holds no checkpoint")
        skipped: list[str] = []
        for candidate in reversed(steps):
            try:
                state = self._load(candidate)
            except (CorruptDataError, MissingParentError, NewerFormatError) as e:
                skipped.append(str(e))
                continue
            if skipped:
                message = f"{self._files.root}: loaded step {candidate}; skipped {'; '.join(skipped)}"
                warnings.warn(message, SkippedCheckpointWarning, stacklevel=2)
            return state
        raise CorruptDataError(f"{self._files.root}: no checkpoint is intact: {'; '.join(skipped)}")

    def _load(self, step: int) -> Any:
        manifest, ckpt, base = self._resolve(step)
        state = decompress(ckpt)
        self._advance(manifest, ckpt, base)
        return state

    def _resolve(self, step: int) -> tuple[Manifest, Checkpoint, Checkpoint]:
        """A step's manifest, its checkpoint resolved by reading its chain from the base upwards, and that base."""
        manifest = self._manifest(step)
        first = found = self._read(step, manifest.parents[-1] if manifest.parents else manifest.file, None)
        for name in [*reversed(manifest.parents[:-1]), manifest.file] if manifest.parents else []:
            found = self._read(step, name, found)
        if found.id != manifest.id or found.nbytes != manifest.nbytes:
            raise CorruptDataError(f"step {step}: {manifest.file} is not the checkpoint its manifest names")
        return manifest, found, first

    def _read(self, step: int, name: str, parent: Checkpoint | None) -> Checkpoint:
        path = self._files.path(f"{_DATA}/{name}")
        try:
            return Checkpoint.from_bytes(self._files.read(f"{_DATA}/{name}"), parent)
        except FileNotFoundError:
            raise MissingParentError(f"step {step}: its file {path} is gone") from None
        except OSError as e:
            raise CorruptDataError(f"step {step}: {path} cannot be read: {e}") from None
        except ShrinkpointError as e:
            raise type(e)(f"step {step}: {path}: {e}") from None

    def _manifest(self, step: int) -> Manifest:
        name = f"{_STEPS}/{step:012d}.json"
        try:
            return Manifest.from_bytes(self._files.read(name), step)
        except OSError as e:
            raise CorruptDataError(f"step {step}: its manifest cannot be read: {e}") from None

    def verify(self) -> dict[int, str]:
        """Read and check every step with its whole chain; what is not intact, and why. Empty: all is well."""
        problems: dict[int, str] = {}
        for step in self.steps():
            try:
                self._resolve(step)
            except ShrinkpointError as e:
                problems[step] = str(e)
        return problems

    def gc(self) -> list[str]:
        """Remove data files that no step needs and what crashed writers left behind; returns their names.

        Not to be run while another process saves into the same store. With an unreadable manifest it removes nothing.

        Raises:
            CorruptDataError, NewerFormatError: a manifest is not readable, so nobody can say what it needs.
        """
        needed: set[str] = set()
        for step in self.steps():
            manifest = self._manifest(step)
            needed.update((manifest.file, *manifest.parents))
        removed = []
        for folder in (_DATA, _STEPS):
            for name in self._files.list(folder):
                orphan = folder == _DATA and name.endswith(".spt") and name not in needed
                if name.startswith(TEMPORARY) or orphan:
                    self._files.remove(f"{folder}/{name}")
                    removed.append(f"{folder}/{name}")
        return removed


def _listed(steps: list[int]) -> str:
    if not steps:
        return "it is empty"
    shown = ", ".join(map(str, steps[-10:]))
    return f"it has {'... ' if len(steps) > 10 else ''}{shown}"
