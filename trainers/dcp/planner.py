"""A load planner that reports all mismatches at once, or loads the entries that fit."""

from __future__ import annotations

import warnings
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from ...codec.errors import BadArgumentError, ShrinkpointWarning


class PartialLoadWarning(ShrinkpointWarning):
    """A load that may be partial left entries unchanged."""


class LoadPlanner(DefaultLoadPlanner):
    """Planner that lists all mismatches: `dcp.load(..., planner=LoadPlanner())`.

    Args:
        strict: True (default): an entry of the state that the checkpoint lacks, or has in another size or kind, is an
            error. False: such entries keep their values, and a warning lists them.

    Raises:
        BadArgumentError: (while planning) the state does not fit.

    Example:
        >>> LoadPlanner(strict=False).strict
        False
    """

    def __init__(self, strict: bool = True) -> None:
        super().__init__(allow_partial_load=not strict)
        self.strict = strict

    def create_local_plan(self) -> LoadPlan:
        """Return torch's plan for the entries that fit."""
        problems = self._problems()
        if problems:
            unused = sorted(set(self._stored()) - set(self.state_dict))
            text = "; ".join(problems.values())
            if unused:
                text += f"; in the checkpoint, not in the state: {', '.join(unused[:50])}"
            if self.strict:
                raise BadArgumentError(f"the state does not fit the checkpoint: {text}")
            warnings.warn(f"left as they were: {text}", PartialLoadWarning, stacklevel=2)
            for fqn in problems:
                del self.state_dict[fqn]
        if self.metadata is None:
            raise BadArgumentError("set_up_planner comes before create_local_plan")
        # The inherited method would treat missing entries as a checkpoint of torch 2.3.
        return create_default_local_load_plan(self.state_dict, self.metadata, False)

    def _stored(self) -> dict[str, Any]:
        return dict(self.metadata.state_dict_metadata) if self.metadata is not None else {}

    def _problems(self) -> dict[str, str]:
        """Return the problems of entries, by entry."""
        stored = self._stored()
        problems = {}
        for fqn, value in self.state_dict.items():
            saved, size = stored.get(fqn), getattr(value, "shape", None)
            if saved is None:
                problems[fqn] = f"{fqn} is not in the checkpoint"
            elif isinstance(saved, TensorStorageMetadata) != (size is not None):
                problems[fqn] = f"{fqn} is {'a tensor' if size is None else 'no tensor'} in the checkpoint"
            elif size is not None and tuple(saved.size) != tuple(size):
                problems[fqn] = f"{fqn} is {tuple(saved.size)} in the checkpoint and {tuple(size)} here"
        return problems
