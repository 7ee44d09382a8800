"""Whole states: checkpoints, timed calls, checks; memory copies and `torch.save`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from typing import Any

import numpy as np

import shrinkpoint as sp

from .data import Pair, arrays
from .harness import CheckFailed, Job, Peer

BASE, DELTA = "base", "delta"
COMPRESS, DECOMPRESS = "compress", "decompress"


class Work:
    """Two states of a run by one configuration: checkpoints, timed calls, checks.

    Args:
        pair: makes or returns the states; called when they are first needed.
        cfg: the configuration.
    """

    def __init__(self, pair: Callable[[], Pair], cfg: sp.Config) -> None:
        self._pair, self._cfg = pair, cfg
        self.stored, self._checked = cache(self._stored), cache(self._check)

    @cached_property
    def pair(self) -> Pair:
        """The two states."""
        return self._pair()

    def state(self, kind: str) -> Any:
        """Return the state that a base or the delta holds."""
        return self.pair.after if kind == DELTA else self.pair.before

    def parent(self, kind: str) -> sp.Checkpoint | None:
        """Return the parent of the delta, resolved as a trainer has it; None for the base."""
        return self.stored(BASE) if kind == DELTA else None

    def compress(self, kind: str) -> sp.Checkpoint:
        """Compress the state again."""
        return sp.compress(self.state(kind), self.parent(kind), self._cfg)

    def restored(self, kind: str) -> Any:
        """Return the state that the bytes of its checkpoint give."""
        return sp.decompress(sp.Checkpoint.from_bytes(self.stored(kind).to_bytes()), self.parent(kind))

    def _stored(self, kind: str) -> sp.Checkpoint:
        return self.compress(kind)

    def _check(self, kind: str) -> str:
        blob = self.stored(kind).to_bytes()
        if self.compress(kind).to_bytes() != blob:
            raise CheckFailed("the same state gives other bytes the second time")
        exact = self.pair.after if kind == DELTA else self.pair.before
        return check_errors(exact, self.restored(kind), self.stored(kind))

    def job(self, way: str, kind: str, peers: Sequence[Peer], amount: float | None = None) -> Job:
        """Return the job of `compress` from memory, or of `decompress` from bytes.

        Args:
            way: `COMPRESS` or `DECOMPRESS`.
            kind: `BASE` or `DELTA`.
            peers: of the job.
            amount: work of a call; None: bytes of the state.
        """
        stored, parent = self.stored(kind), self.parent(kind)
        blob = stored.to_bytes()

        def restore() -> object:
            return sp.decompress(sp.Checkpoint.from_bytes(blob), parent)

        call = restore if way == DECOMPRESS else lambda: self.compress(kind)
        note = f"ratio {stored.ratio:.2f}, {stored.raw_nbytes / 1e6:.1f} MB raw; {self.pair.origin}"
        amount = float(stored.raw_nbytes) if amount is None else amount
        return Job(call, lambda: self._checked(kind), amount, peers, note)


def check_errors(state: Any, back: Any, stored: sp.Checkpoint) -> str:
    """Hold every array against the error its summary states, and name the comparisons.

    Raises:
        CheckFailed: a key, shape, dtype or exact value differs, or an error is above the stated one.
    """
    before, after = dict(arrays(state)), dict(arrays(back))
    if list(before) != list(after):
        raise CheckFailed("other arrays come back")
    exact = 0
    for row in stored.summary():
        if row.path not in before:  # a list of numbers that is stored as an array
            continue
        x, y = before[row.path], after[row.path]
        if x.shape != y.shape or x.dtype != y.dtype:
            raise CheckFailed(f"{row.path}: {x.dtype}{x.shape} comes back as {y.dtype}{y.shape}")
        if row.measure == "exact":
            if x.tobytes() != y.tobytes():
                raise CheckFailed(f"{row.path}: is not exact")
            exact += 1
            continue
        a, b = x.astype(np.float64), y.astype(np.float64)
        if row.measure == "relative":
            some = a != 0
            error = float(np.max(np.abs(a - b)[some] / np.abs(a[some]), initial=0.0))
        else:
            error = float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(a)), 1e-300)
        if error > row.error * 1.01:  # the summary has three digits
            raise CheckFailed(f"{row.path}: {row.measure} error {error:.4g}, stated {row.error:.4g}")
    return f"{exact} arrays exact, {len(before) - exact} within the stated error, same bytes again"


def torch_calls(state: Any, *, decode: bool) -> Callable[[], object]:
    """Return the call that saves a state with `torch.save` to memory, or with `decode` loads it."""
    import torch

    def save() -> bytes:
        stream = io.BytesIO()
        torch.save(state, stream)
        return stream.getvalue()

    if not decode:
        return save
    saved = save()
    return lambda: torch.load(io.BytesIO(saved), weights_only=False)


def copies(arrays: list[Any], count: int = 1, *, fresh: bool = False) -> Callable[[], object]:
    """Return the call that copies flat arrays on some threads; `fresh`: to new memory."""
    arrays = [x.view(np.uint8) for x in arrays]
    used = [] if fresh else [np.ones_like(x) for x in arrays]

    def part(number: int, into: list[Any]) -> None:
        for source, target in zip(arrays, into, strict=True):
            cut = slice(number * source.size // count, (number + 1) * source.size // count)
            np.copyto(target[cut], source[cut])

    def call() -> None:
        into = [np.empty_like(x) for x in arrays] if fresh else used
        if count == 1:
            part(0, into)
        else:
            list(pool.map(part, range(count), [into] * count))

    pool = ThreadPoolExecutor(count)
    return call
