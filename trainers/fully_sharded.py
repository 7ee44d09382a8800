"""Sharded states behind pointer files: each rank writes its shards.

One commit makes the step.
For models and optimizers that FSDP2 shards. Nothing is gathered: a state has DTensors, which
`torch.distributed.checkpoint` saves by `trainers.dcp.Writer` as a step of the store. Any number of ranks reads it.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from ..kernels.errors import BadArgumentError
from ..store.store import Store
from .dcp import Reader, Writer
from .pointers import PathLike, PendingPointer, PointedSaves, Pointer, next_step, read_pointer
from .processes import on_rank_0, rank

_NOT_SENT = "the result of the save could not be sent"


class ShardedSaves(PointedSaves):
    """Saves of sharded states behind pointer files. All ranks make the same calls.

    Args:
        store: where to; each rank opens the same one.
        background: whether `save` returns once the shards are copied; a thread of each rank then compresses and writes
            them, and rank 0 writes the pointer file when all have done so.
    """

    def __init__(self, store: Store, *, background: bool) -> None:
        super().__init__(store)
        self.background = background
        # Collectives of a save must not meet those of training, which run in another thread.
        self._group = dist.new_group(backend="gloo") if background else None
        self._writer = Writer(store, process_group=self._group)
        self._future: Any = None

    def save(self, path: PathLike, state: Any, kinds: Mapping[str, Any] | None = None) -> None:
        """Save a state as the store's next step, and let a file point to that.

        Raises:
            Exception: what this save raised, on all ranks; in the background, what the save before this one raised.
        """
        self.wait()
        step = on_rank_0(lambda: next_step(self.store), "nothing was saved")
        self._writer.kinds = kinds
        before = read_pointer(path) if rank() == 0 else None
        if not self.background:
            save(state, storage_writer=self._writer, checkpoint_id=str(step))
            on_rank_0(lambda: self._point_to(path, step, before), _NOT_SENT)
            return
        self._future = async_save(
            state, storage_writer=self._writer, checkpoint_id=str(step), process_group=self._group
        )
        self._pending = pending = PendingPointer(path, self.store.url, is_read=rank() == 0)

        def write(saved: Any) -> None:
            saved.result()
            if rank() == 0:
                self._point_to(path, step, before)

        self._future.add_done_callback(lambda saved: pending.finish(lambda: write(saved)))

    def wait(self) -> None:
        """Wait until nothing is in flight.

        Raises:
            Exception: what the save raised.
        """
        future, pending, self._future = self._future, self._pending, None
        if future is not None and pending is not None:
            concurrent.futures.wait([pending.done])
            future.result()
            on_rank_0(pending.done.result, _NOT_SENT)

    def close(self) -> None:
        """Wait for the save in flight."""
        self.wait()


def check_version(plugin: Any) -> None:
    """Refuse FSDP1, whose optimizers have flat parameters.

    Raises:
        BadArgumentError: the plugin of Accelerate is of version 1.
    """
    version = getattr(plugin, "fsdp_version", 1)
    if version != 2:
        raise BadArgumentError(
            f"FSDP is of version {version}; compressed checkpoints need fsdp_version 2 (fully_shard)"
        )


def sharded_state(pairs: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Return the states of models and their optimizers, by the names of parameters.

    Sharded arrays are DTensors.

    Args:
        pairs: each model with its optimizer or None; of several pairs, each state has the number of its pair as key.
    """
    found: list[dict[str, Any]] = []
    for model, optimizer in pairs:
        if optimizer is None:
            found.append({"model": states.get_model_state_dict(model)})
        else:
            found.append(dict(zip(("model", "optimizer"), states.get_state_dict(model, optimizer), strict=True)))
    return found[0] if len(found) == 1 else {str(i): state for i, state in enumerate(found)}


def pointer_to_shards(path: PathLike, store: Store) -> Pointer | None:
    """Return the pointer in a file if it points to a sharded step of a store; else None."""
    pointer = read_pointer(path)
    if pointer is None or pointer.step not in store.steps():
        return None
    return pointer if store.describe(pointer.step).shards else None


def load_sharded(path: PathLike, store: Store, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Load a sharded step into models and optimizers, on any number of ranks. All ranks call it.

    Args:
        path: a pointer file to it.
        store: where it is; the next save of this store is a delta over it.
        pairs: as for `sharded_state`; the models are sharded in any way, or not. An optimizer of None is not read.

    Raises:
        BadArgumentError: not a pointer to a sharded step of this store.
        CorruptDataError, MissingParentError: it cannot be read.
    """
    pointer = pointer_to_shards(path, store)
    if pointer is None:
        raise BadArgumentError(f"{os.fspath(path)}: not a sharded checkpoint of {store.url}")
    state = sharded_state(pairs)
    alone = not (dist.is_available() and dist.is_initialized())
    load(state, storage_reader=Reader(store, pointer.step), no_dist=alone)
    for number, (model, optimizer) in enumerate(pairs):
        own = state if len(pairs) == 1 else state[str(number)]
        if optimizer is None:
            states.set_model_state_dict(model, own["model"])
        else:
            states.set_state_dict(model, optimizer, model_state_dict=own["model"], optim_state_dict=own["optimizer"])
