"""The processes of one search, which exchange results and errors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

from ..codec.errors import BadArgumentError, ShrinkpointError

Json = Any


class ProcessGroup:
    """A process group, or this process alone.

    Args:
        group: a `torch.distributed` process group; None: this process alone.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._is_informed = False
        self.size, self.rank = 1, 0
        if group is not None:
            import torch.distributed as dist

            if not dist.is_available() or not dist.is_initialized():
                raise BadArgumentError("group is given, but torch.distributed is not initialized")
            self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
            if self.rank < 0:
                raise BadArgumentError("group does not contain this process")

    def all(self, work: Callable[[], Json]) -> list[Json]:
        """Do the work on every process and return all results on each, in the order of the ranks.

        Args:
            work: returns plain JSON.

        Raises:
            BadArgumentError: it failed on another process; an error of this process is raised unchanged.
            ShrinkpointError: a process has ended.
        """
        if self.size == 1:
            return [work()]
        error: BaseException | None = None
        self._is_informed = True  # errors raised from here on reach all processes
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
        self._is_informed = False
        return [other["result"] for other in messages]

    def fail(self, error: BaseException) -> None:
        """Report an error outside of `all` to the processes that wait in their next `all`."""
        if self.size > 1 and not self._is_informed:
            with contextlib.suppress(RuntimeError):
                self._exchange(json.dumps({"error": f"{type(error).__name__}: {error}"}))

    def _exchange(self, text: str) -> list[str]:
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, text, group=self._group)
        return found
