"""The processes that search together: what each found goes to all, and what fails on one fails on all."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from ..codec.errors import BadArgumentError, ShrinkpointError

Json = Any


class Team:
    """A process group, or this process alone.

    Args:
        group: a `torch.distributed` process group; None: this process alone.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._told = False
        self.size, self.rank = 1, 0
        if group is not None:
            import torch.distributed as dist

            if not dist.is_available() or not dist.is_initialized():
                raise BadArgumentError("group is given, but torch.distributed is not initialized")
            self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
            if self.rank < 0:
                raise BadArgumentError("group does not contain this process")

    def all(self, work: Callable[[], Json]) -> list[Json]:
        """Do the work on every process and hand all results to each, in the order of the ranks.

        Args:
            work: returns plain JSON.

        Raises:
            BadArgumentError: it failed on another process; what failed on this one is raised as it is.
            ShrinkpointError: a process is gone.
        """
        if self.size == 1:
            return [work()]
        error: BaseException | None = None
        self._told = True  # whatever is raised from here on, all of them hear of
        try:
            message = {"result": work()}
        except BaseException as e:
            error = e
            message = {"error": f"{type(e).__name__}: {e}"}
        try:
            found = self._exchange(json.dumps(message))
        except RuntimeError as e:
            if error is not None:
                raise error from None
            raise ShrinkpointError(f"rank {self.rank}: the process group failed during the search: {e}") from e
        if error is not None:
            raise error
        messages = [json.loads(text) for text in found]
        for rank, other in enumerate(messages):
            if "error" in other:
                raise BadArgumentError(f"the search failed on rank {rank}: {other['error']}")
        self._told = False
        return [other["result"] for other in messages]

    def fail(self, error: BaseException) -> None:
        """Let the others, who wait at their next `all`, know that this process gave up outside of one."""
        if self.size > 1 and not self._told:
            with contextlib.suppress(RuntimeError):
                self._exchange(json.dumps({"error": f"{type(error).__name__}: {error}"}))

    def _exchange(self, text: str) -> list[str]:
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, text, group=self._group)
        return found
