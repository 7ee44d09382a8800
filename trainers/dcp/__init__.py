"""A compressing storage writer and reader for torch.distributed.checkpoint.

    writer = Writer("runs/a", cfg=sp.Config())
    dcp.save(state, storage_writer=writer, checkpoint_id=f"runs/a/step-{step}")
    dcp.load(state, storage_reader=Reader(f"runs/a/step-{step}"))

See docs/dcp.md. `CompressedCheckpoints` has torchtitan use them.
"""

from __future__ import annotations

import gc
from typing import Any

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from ...codec.config import Config
from .reader import LoadPlanner, PartialLoadWarning, Reader
from .writer import ParentNotUsedWarning, Writer

__all__ = ["CompressedCheckpoints", "LoadPlanner", "ParentNotUsedWarning", "PartialLoadWarning", "Reader", "Writer"]


class CompressedCheckpoints:
    """Mixin for torchtitan: `class Manager(CompressedCheckpoints, CheckpointManager): ...`.

    Everything else stays torchtitan's: when to save, asynchronous modes, retention, how a run resumes. Exports for
    Hugging Face go its own way. A class attribute says how to compress:

        class Manager(CompressedCheckpoints, CheckpointManager):
            compression = sp.Config(rate=0.003)

    Example:
        >>> CompressedCheckpoints.compression is None
        True
    """

    compression: Config | None = None
    _writer: Writer | None = None
    _last: str | None = None

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: Any,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save as torchtitan does, through a `Writer`."""
        above: Any = super()
        if to_hf:
            return above.dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        group = getattr(self, "pg", None)  # of all ranks, over which it saves asynchronously
        if self._writer is None:
            self._writer = Writer(cfg=self.compression, parent=self._last, process_group=group)
        mode = str(getattr(async_mode, "value", async_mode))
        result: Any = None
        where: dict[str, Any] = {"checkpoint_id": checkpoint_id, "storage_writer": self._writer}
        if mode == "async_with_pinned_mem":
            where["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
            where["async_stager"] = getattr(self, "stager", None)
        if mode == "disabled":
            save(state_dict, **where)
        else:
            result = async_save(state_dict, process_group=group, **where)
        if enable_garbage_collection:
            gc.collect(1)
        return result

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool = False, from_quantized: bool = False
    ) -> None:
        """Load as torchtitan does, through a `Reader`; the next save is a delta against that state."""
        above: Any = super()
        if from_hf:
            above.dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        load(state_dict, storage_reader=Reader(checkpoint_id))
        self._last = checkpoint_id
        states = getattr(self, "states", {})
        if "model" in states:
            # torchtitan flattens the model's entries into the state and hands them back itself.
            states["model"].load_state_dict(state_dict)
