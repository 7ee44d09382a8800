"""Megatron-Core: compressing strategies for its distributed checkpoints.

    save, load = CompressedSave(sp.Config()), CompressedLoad()
    dist_checkpointing.save(sharded_state_dict, folder, save)
    state = dist_checkpointing.load(sharded_state_dict, folder, load)

With `async_sharded_save=True` the first call returns a request for Megatron-Core's `AsyncCallsQueue`. Everything but
sharded tensors (`common.pt`, sharded objects) is written and read by Megatron-Core itself, with its own pickles.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.checkpoint.utils import _DistWrapper

from ...codec.config import Config
from .. import required
from .metadata import Index
from .places import Folders
from .reader import Reader
from .writer import Writer

with required("this adapter needs Megatron-Core", "pip install megatron-core"):
    from megatron.core.dist_checkpointing.strategies import torch as theirs
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy

BACKEND, VERSION = "torch_dist", 1


class _Uncommitted(Folders):
    """Folders in which only the trainers commit: a worker may outlive a trainer that was killed."""

    def commit(self, index: Index, alone: int | None) -> None:
        """Leave the metadata to `CompressedSave`, which receives them."""


class _Copies:
    """Stager that copies Megatron-Core's shards, which the stagers of torch do not know."""

    should_synchronize_after_execute = False

    def stage(self, state_dict: Any) -> Any:
        """Return copies on the CPU as what torch can save."""
        copies = {
            key: [replace(shard, data=shard.data.detach().to("cpu", copy=True)) for shard in shards]
            for key, shards in state_dict.items()
        }
        return theirs.mcore_to_pyt_state_dict(copies, False)


class CompressedSave(AsyncSaveShardedStrategy):  # type: ignore[misc]
    """Strategy for `dist_checkpointing.save`; keep one for a run, on every rank.

    It saves main replicas only. Moments (`optimizer.state.exp_avg.<parameter>`) are recognized; fp32 master weights are
    exact, as are all optimizer entries other than known moments. Synchronous and asynchronous saves have chains of
    their own, and one of the latter is in flight at a time.

    Args:
        cfg, parent, kinds, process_group: as for `Writer`; asynchronous saves use a gloo group of all ranks.

    Raises:
        BadArgumentError: an argument of a wrong kind.
    """

    def __init__(
        self,
        cfg: Config | str | None = None,
        *,
        parent: str | Path | None = None,
        kinds: Mapping[str, Any] | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(BACKEND, VERSION)
        self.writer = Writer(cfg=cfg, parent=parent, kinds=kinds, process_group=process_group)
        self._background = Writer(cfg=cfg, parent=parent, kinds=kinds)
        self._background.target = _Uncommitted(None)
        self._group: Any = None
        self._written: Any = None

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Return False: these objects are Megatron-Core's pickles."""
        return False

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Save a sharded state; called by Megatron-Core."""
        state = theirs.mcore_to_pyt_state_dict(_by_key(sharded_state_dict), False)
        group = self.writer.process_group
        save(state, storage_writer=self.writer, checkpoint_id=checkpoint_dir, planner=_planner(), process_group=group)

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Copy a sharded state, and let a worker process of each rank compress and write it.

        Called by Megatron-Core. The call waits until the workers have written the save before it.

        Returns:
            The request. Its function ends when this rank's worker has written; its finalization makes the checkpoint
            exist if all ranks have, and raises CheckpointException on all of them if one has not.
        """
        if self._group is None:
            # Training may have no group for the CPU.
            self._group = dist.new_group(backend="gloo")
        stager: Any = _Copies()
        if self._written is not None:
            concurrent.futures.wait([self._written])
        written: Any = async_save(
            _by_key(sharded_state_dict),
            storage_writer=self._background,
            checkpoint_id=checkpoint_dir,
            planner=_planner(),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=stager,
        )
        self._written = written
        reader, end = multiprocessing.Pipe(duplex=False)
        written.add_done_callback(lambda _: end.send(None))

        def commit() -> None:
            _DistWrapper(self._group, True, 0).all_reduce(
                "commit",
                lambda: written.result() and None,
                lambda _: Folders(checkpoint_dir).commit(written.result().storage_data, None),
            )

        return AsyncRequest(_wait, (reader, os.getpid()), [commit])


def _wait(written: Connection, trainer: int) -> None:
    """Wait until a worker has written; Megatron-Core calls this in a process of its own."""
    while not written.poll(0.5) and os.getppid() == trainer:
        pass


def _by_key(sharded_state_dict: Any) -> Any:
    return theirs._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)[0]


def _planner() -> Any:
    return theirs.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)


class CompressedLoad(theirs.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Strategy for `dist_checkpointing.load`, for any number of ranks and any mesh."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Return False: these objects are Megatron-Core's pickles."""
        return False

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Load a sharded state; called by Megatron-Core."""
        from megatron.core.dist_checkpointing.dict_utils import nested_values

        checked, flexible = [], {}
        for tensor in nested_values(sharded_state_dict):
            if tensor.allow_shape_mismatch:
                flexible[tensor.key] = tensor
            else:
                checked.append(tensor)
        by_key, flat, renamed = theirs._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = theirs.mcore_to_pyt_state_dict(by_key, True)
        planner = theirs.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=checked, allow_shape_mismatch_sharded_tensors=flexible
        )
        load(state, storage_reader=Reader(checkpoint_dir), planner=planner)
        unwrapped = {key: theirs._unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        found = theirs._replace_sharded_keys_with_state_dict_keys(unwrapped, flat, renamed)
        theirs._restore_dict_types(found, sharded_state_dict)
        return found

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Any = None) -> Any:
        """Return names and shapes of the saved tensors; called by Megatron-Core."""
        found = Reader(checkpoint_dir).read_metadata() if metadata is None else metadata
        return super().load_tensors_metadata(checkpoint_dir, found)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Return the metadata of all sharded entries, which are tensors only."""
        return self.load_tensors_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: str, key_prefix: str) -> None:
        """Refuse to remove tensors, because a checkpoint's files are never changed.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"{checkpoint_dir}: tensors cannot be taken out of a compressed checkpoint")
