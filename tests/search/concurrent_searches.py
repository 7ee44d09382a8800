"""A process group of threads, which search concurrently and exchange through memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import shrinkpoint as sp
from shrinkpoint.searching import run
from shrinkpoint.searching.arguments import ProcessGroup

from .calls import search


class Meeting:
    """Exchange of a group of threads; a missing member breaks it for all."""

    def __init__(self, size: int) -> None:
        self.slots: list[str] = [""] * size
        self.barrier = threading.Barrier(size, timeout=600)
        self.exchanges = 0

    def exchange(self, rank: int, text: str) -> list[str]:
        self.slots[rank] = text
        self.barrier.wait()
        found = list(self.slots)
        if self.barrier.wait() == 0:
            self.exchanges += 1
        return found


class _Member(ProcessGroup):
    """A member of a group of threads, given by (meeting, rank)."""

    def __init__(self, group: Any = None) -> None:
        super().__init__(None)
        if group is not None:
            self.meeting, self.rank = group
            self.size = len(self.meeting.slots)

    def _exchange(self, text: str) -> list[str]:
        return self.meeting.exchange(self.rank, text)


def searches(
    patch: pytest.MonkeyPatch, size: int, arguments: Callable[[int], dict[str, Any]]
) -> list[sp.SearchResult | sp.ShrinkpointError]:
    """Search in one thread for each member; return results or errors.

    Args:
        patch: for the time of the test.
        size: number of members.
        arguments: of `search`, by rank.
    """
    meeting = Meeting(size)
    found: list[Any] = [None] * size

    def member(rank: int) -> None:
        try:
            found[rank] = search(**arguments(rank), group=(meeting, rank), progress=False)
        except BaseException as e:
            found[rank] = e

    with patch.context() as context:
        context.setattr(run, "ProcessGroup", _Member)
        threads = [threading.Thread(target=member, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for one in found:
        if not isinstance(one, sp.SearchResult | sp.ShrinkpointError):
            raise one
    return found
