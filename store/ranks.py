"""The step to resume from if each rank has a store: the newest common one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError, NewerFormatError, ShrinkpointError
from .files import StoreWarning
from .memory_copies import MemoryCopies
from .store import Store

_NONE, _FAILED = -1, -2
_MESSAGE = 1000
"""Bytes of a rank's error message."""


def newest_common_step(store: Store, group: Any = None, *, drop: bool = False) -> int:
    """Return the newest step that every rank can load; equal on all ranks.

    Each rank reports the newest step that it has intact, in memory or in storage (read and checked, as by `load`).
    While they differ, each rank goes back to its newest intact step up to the least of them, after an all-gather:

        s_r <- max {s intact on rank r : s <= min_q s_q}

    Steps are compared by their numbers alone. If a run went back and ranks saved other states under the same numbers
    since, use `drop=True` each time: it removes the steps above the answer.

    Args:
        store: of this rank.
        group: a `torch.distributed` process group; None: the default one, or only this process without one.
        drop: remove this rank's newer steps, which some rank lacks, from the store and from memory; the same value on
            all ranks. Default False.

    Raises:
        CorruptDataError: no step is intact on all ranks; raised on all of them.
        Exception: this rank cannot read its store, or `store` is not a Store.
        ShrinkpointError: another rank cannot read or drop; the message says which, and why.
        BadArgumentError: a step to be dropped is pinned or tagged.

    Example:
        >>> import shrinkpoint as sp
        >>> from shrinkpoint.store.ranks import newest_common_step
        >>> store = sp.Store("memory://docs-ranks")
        >>> saved = [store.save(step, {"step": step}) for step in (60, 80)]
        >>> newest_common_step(store)
        80

    Source: BitSnap section 3.2 (all-gather check, pruning of broken checkpoints).
    """
    steps: list[int] = []

    def first() -> int:
        if not isinstance(store, Store):
            raise BadArgumentError(f"store must be a Store, not {type(store).__qualname__}")
        steps.extend(_in_order(store))
        return _newest_intact(store, steps)

    def again(held: int, least: int) -> int:
        return held if held == least else _newest_intact(store, [s for s in steps if s <= least])

    everyone = _told(first, group)
    while min(everyone) != max(everyone):
        everyone = _told(partial(again, everyone[_own(group)], min(everyone)), group)
    mine = everyone[0]
    if mine == _NONE:
        raise CorruptDataError(f"{store.url}: no step that all {len(everyone)} ranks hold intact")
    newer = [step for step in steps[: steps.index(mine)] if step > mine]

    def dropped() -> int:
        if newer:
            store.drop(*newer)
            if store.in_memory:
                MemoryCopies(store.url, store.in_memory).drop(newer)
        return mine

    if drop:
        _told(dropped, group, "drop its newer steps")
    return mine


def _in_order(store: Store) -> list[int]:
    """Return the steps in the order of `load`: those that a run left behind come last."""
    try:
        return store.candidates()
    except CorruptDataError as e:
        warnings.warn(f"{e}: the highest step counts as the newest", StoreWarning, stacklevel=4)
        return store.steps()[::-1]


def _newest_intact(store: Store, steps: list[int]) -> int:
    for step in steps:
        try:
            store.read(step)
        except (CorruptDataError, MissingParentError, NewerFormatError):
            continue
        return step
    return _NONE


def _told(work: Callable[[], int], group: Any, does: str = "look for its newest step") -> list[int]:
    """Return the results of `work` on every rank; raise on all if it raises on one."""
    error: Exception | None = None
    step = _FAILED
    try:
        step = work()
    except Exception as e:
        error = e
    everyone = [rank[0] for rank in _gathered([step], group)]
    if _FAILED not in everyone:
        return everyone
    said = f"{type(error).__name__}: {error}".encode() if error is not None else b""
    texts = _gathered(list(said[:_MESSAGE].ljust(_MESSAGE, b"\0")), group)
    problems = {
        rank: bytes(text).rstrip(b"\0").decode(errors="replace")
        for rank, text in enumerate(texts)
        if everyone[rank] == _FAILED
    }
    message = "; ".join(f"rank {rank} cannot {does}: {why}" for rank, why in problems.items())
    if error is None:
        raise ShrinkpointError(message)
    if len(everyone) > 1:
        error.add_note(f"All ranks raise now: {message}")
    raise error


def _is_distributed() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


def _own(group: Any) -> int:
    """Return the index of this process in gathered lists."""
    import torch.distributed as dist

    return dist.get_rank(group) if _is_distributed() else 0


def _gathered(numbers: list[int], group: Any) -> list[list[int]]:
    """Gather lists of numbers, of equal length, from all ranks."""
    import torch
    import torch.distributed as dist

    if not _is_distributed():
        return [numbers]
    device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group)
    return [t.tolist() for t in found]
