"""Let Accelerate shard models on the CPU, where it offers FSDP on accelerators only."""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def offer_fsdp() -> None:
    """Take several processes on the CPU for accelerators that need no library."""
    begin = AcceleratorState.__init__

    def begin_sharded(self: AcceleratorState, *args: Any, **keywords: Any) -> None:
        PartialState(cpu=True)
        shared = PartialState._shared_state
        if shared.get("distributed_type") == DistributedType.MULTI_CPU:
            shared["distributed_type"] = DistributedType.MULTI_HPU
        begin(self, *args, **keywords)

    AcceleratorState.__init__ = begin_sharded
