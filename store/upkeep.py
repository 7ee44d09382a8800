"""What a saver does between saves: chains that have become long are compacted, and what nobody needs is removed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..codec.parallel import Stopped, stoppable
from .lock import InUseError
from .retention import Retention

if TYPE_CHECKING:
    from .store import Store

TARGET = 2.5
"""What a compacted chain costs at most, in multiples of a base; see `Store.compact`."""


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What is to be done.

    Args:
        compact: restore cost of a step, in multiples of a base, above which chains are compacted; None: never.
        keep: which steps are kept; None: all.
    """

    compact: float | None = None
    keep: Retention | None = None

    def __bool__(self) -> bool:
        return self.compact is not None or self.keep is not None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"compact": self.compact, "keep": None if self.keep is None else asdict(self.keep)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Upkeep:
        """The inverse of `to_json`."""
        return Upkeep(data["compact"], None if data["keep"] is None else Retention(**data["keep"]))


class Keeper:
    """Does it, as far as it gets each time.

    Args:
        store: whose saves these are.
        upkeep: what is to be done.
    """

    def __init__(self, store: Store, upkeep: Upkeep) -> None:
        self._store, self._upkeep = store, upkeep
        self._worst = self._left = 0.0
        self._moved = False

    def tend(self, stop: Callable[[], bool], *, alone: bool) -> None:
        """What is due after a save; given up once `stop()` comes true, and gone on with after the next one.

        Whatever moment that is, every step is as loadable as after a crash at this moment: entirely.

        Args:
            stop: asked between pieces of work.
            alone: stay in this one thread.
        """
        compact, head = self._upkeep.compact, self._store.head
        cost = head.last.restore_cost if head is not None else 0.0
        self._worst = max(self._worst, cost)
        if compact is not None and cost <= compact < self._left:
            self._left, self._worst = 0.0, cost  # a new chain
        with contextlib.suppress(Stopped), stoppable(stop, alone=alone):
            # First: however little time there is, old steps do not pile up, and fewer are left to compact.
            if self._upkeep.keep is not None:
                self._collect()
            # A chain that could not be compacted, for it is damaged, is not tried again until it is twice as long.
            if compact is not None and self._worst > max(compact, 2 * self._left):
                self._moved = True
                moved = self._store.compact(min(compact, TARGET))
                self._left = cost if cost > compact and head is not None and head.last.step not in moved else 0.0
                self._worst = 0.0
            if self._moved:
                self._collect()

    def _collect(self) -> None:
        """Remove what is not needed. Where others write they are not waited for: there is a next time."""
        with contextlib.suppress(InUseError):
            self._store.gc(self._upkeep.keep, timeout=0.0)
            self._moved = False
