"""A compressing storage writer and reader for torch.distributed.checkpoint.

    writer = Writer("runs/a", cfg=sp.Config())
    dcp.save(state, storage_writer=writer, checkpoint_id=f"runs/a/step-{step}")
    dcp.load(state, storage_reader=Reader(f"runs/a/step-{step}"))

See docs/dcp.md.
"""

from __future__ import annotations

from .reader import LoadPlanner, PartialLoadWarning, Reader
from .torchtitan import CompressedCheckpoints
from .writer import ParentNotUsedWarning, Writer

__all__ = ["CompressedCheckpoints", "LoadPlanner", "ParentNotUsedWarning", "PartialLoadWarning", "Reader", "Writer"]
