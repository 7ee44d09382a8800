"""The step to resume from if each rank has a store: the newest common one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from ..codec.errors import BadArgumentError, CorruptDataError, ShrinkpointError
from .files import DAMAGE, StoreWarning
from .memory_copies import MemoryCopies
from .store import Store

_NONE = -1
_MESSAGE = 1000
"""Characters of a rank's error message."""


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

    def newest() -> int:
        if not isinstance(store, Store):
            raise BadArgumentError(f"store must be a Store, not {type(store).__qualname__}")
        try:
            steps.extend(store.candidates())
        except CorruptDataError as e:
            warnings.warn(f"{e}: the highest step counts as the newest", StoreWarning, stacklevel=4)
            steps.extend(store.steps()[::-1])
        return _newest_intact(store, steps)

    step, everyone = _on_every_rank(newest, group)
    while (least := min(everyone)) != max(everyone):
        below = [lower for lower in steps if lower <= least]
        again = partial(int, step) if step == least else partial(_newest_intact, store, below)
        step, everyone = _on_every_rank(again, group)
    if step == _NONE:
        raise CorruptDataError(f"{store.url}: no step that all {len(everyone)} ranks hold intact")
    newer = [later for later in steps[: steps.index(step)] if later > step]

    def drop_newer() -> int:
        if newer:
            store.drop(*newer)
            if store.in_memory:
                MemoryCopies(store.url, store.in_memory).drop(newer)
        return step

    if drop:
        _on_every_rank(drop_newer, group, "drop its newer steps")
    return step


def _newest_intact(store: Store, steps: list[int]) -> int:
    for step in steps:
        try:
            store.read(step)
        except DAMAGE:
            continue
        return step
    return _NONE


def _on_every_rank(
    work: Callable[[], int], group: Any, does: str = "look for its newest step"
) -> tuple[int, list[int]]:
    """Return the result of `work` here and those of all ranks; raise on all if it raises on one."""
    import torch.distributed as dist

    error: Exception | None = None
    step, text = _NONE, ""
    try:
        step = work()
    except Exception as e:
        error, text = e, f"{type(e).__name__}: {e}"[:_MESSAGE]
    everyone = [(step, text)]
    if dist.is_available() and dist.is_initialized():
        everyone *= dist.get_world_size(group)
        dist.all_gather_object(everyone, (step, text), group)
    message = "; ".join(f"rank {rank} cannot {does}: {why}" for rank, (_, why) in enumerate(everyone) if why)
    if error is None and message:
        raise ShrinkpointError(message)
    if error is not None:
        if len(everyone) > 1:
            error.add_note(f"All ranks raise now: {message}")
        raise error
    return step, [rank[0] for rank in everyone]
