"""Several ranks, each with a store of its own, agree on the step to go on from."""

from __future__ import annotations

from typing import Any

from ..codec.errors import CorruptDataError, MissingParentError, NewerFormatError
from .agent import InMemory
from .store import Store

_NONE = -1


def newest_common_step(store: Store, group: Any = None, *, drop: bool = False) -> int:
    """The newest step that every rank can load; the same answer on all of them.

    Each rank says the newest step it has intact, in memory or in storage (read and checked, as `load` will). While they
    differ, each goes back to the newest it has that is no newer than the least of them: after an all-gather each,

        s_r <- max {s intact on rank r : s <= min_q s_q}

    Args:
        store: this rank's.
        group: a `torch.distributed` process group; None: the default one, or this process alone where there is none.
        drop: remove this rank's newer steps, which some rank lacks: from memory, and from the store. Default False.

    Raises:
        CorruptDataError: there is no such step; on all ranks alike.
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
    steps = store.steps()
    mine = _newest_intact(store, steps)
    while True:
        everyone = _gathered(mine, group)
        if min(everyone) == max(everyone):
            break
        mine = mine if mine == min(everyone) else _newest_intact(store, [s for s in steps if s <= min(everyone)])
    if mine == _NONE:
        raise CorruptDataError(f"{store.url}: there is no step that all {len(everyone)} ranks hold intact")
    newer = [step for step in steps if step > mine]
    if drop and newer:
        if store.in_memory:
            InMemory(store.url, store.in_memory).drop(newer)
        store.drop(*newer)
    return mine


def _newest_intact(store: Store, steps: list[int]) -> int:
    for step in reversed(steps):
        try:
            store.read(step)
        except (CorruptDataError, MissingParentError, NewerFormatError):
            continue
        return step
    return _NONE


def _gathered(step: int, group: Any) -> list[int]:
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return [step]
    device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    mine = torch.tensor([step], dtype=torch.int64, device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, mine, group)
    return [int(t.item()) for t in found]
