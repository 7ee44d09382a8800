"""Megatron-Core: compressing strategies for its distributed checkpoints.

    save, load = CompressedSave(sp.Config()), CompressedLoad()
    dist_checkpointing.save(sharded_state_dict, folder, save)
    state = dist_checkpointing.load(sharded_state_dict, folder, load)

Everything but sharded tensors (`common.pt`, sharded objects) is written and read by Megatron-Core itself, with
its own pickles.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...codec.config import Config
from .reader import Reader
from .writer import Writer

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies import torch as theirs
    from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
else:
    try:
        from megatron.core.dist_checkpointing.strategies import torch as theirs
        from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
    except ImportError:
        raise ImportError("this adapter needs Megatron-Core: pip install megatron-core") from None

BACKEND, VERSION = "torch_dist", 1


class CompressedSave(SaveShardedStrategy):  # type: ignore[misc]
    """Strategy for `dist_checkpointing.save`; keep one for a run, on every rank.

    Saves are synchronous, and of main replicas only. Moments (`optimizer.state.exp_avg.<parameter>`) are recognized;
    fp32 master weights are exact, as are all optimizer entries other than known moments.

    Args:
        cfg, parent, kinds, process_group: as for `Writer`.

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

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Return False: these objects are Megatron-Core's pickles."""
        return False

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Save a sharded state; called by Megatron-Core."""
        from torch.distributed.checkpoint.state_dict_saver import save

        by_key, _, _ = theirs._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        state = theirs.mcore_to_pyt_state_dict(by_key, False)
        planner = theirs.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        group = self.writer.process_group
        save(state, storage_writer=self.writer, checkpoint_id=checkpoint_dir, planner=planner, process_group=group)


class CompressedLoad(theirs.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Strategy for `dist_checkpointing.load`, for any number of ranks and any mesh."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Return False: these objects are Megatron-Core's pickles."""
        return False

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Load a sharded state; called by Megatron-Core."""
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from torch.distributed.checkpoint.state_dict_loader import load

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
