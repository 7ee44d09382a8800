"""Maintenance between the saves of a `Saver`: compact long chains, and remove old steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..codec.parallel import Stopped, stoppable
from .compaction import MAX_COST
from .lock import InUseError
from .retention import Retention
from .store import Store


@dataclass(frozen=True, slots=True)
class Maintenance:
    """The maintenance that was requested.

    Args:
        compact: restore cost of a step, in multiples of a base, above which chains are compacted; None: never.
        keep: which steps are kept; None: all.
    """

    compact: float | None = None
    keep: Retention | None = None

    def __bool__(self) -> bool:
        return self.compact is not None or self.keep is not None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"compact": self.compact, "keep": None if self.keep is None else asdict(self.keep)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Maintenance:
        """Invert `to_json`."""
        return Maintenance(data["compact"], None if data["keep"] is None else Retention(**data["keep"]))


class Maintainer:
    """Maintenance of a store in the time between saves.

    Args:
        store: of the saves.
        maintenance: the work.
    """

    def __init__(self, store: Store, maintenance: Maintenance) -> None:
        self._store, self._maintenance = store, maintenance
        self._highest = self._remaining = 0.0
        self._moved = False

    def run(self, stop: Callable[[], bool], *, alone: bool) -> None:
        """Do the maintenance due after a save until `stop()` is true; continue after the next save.

        At every moment all steps can be loaded, as after a crash.

        Args:
            stop: asked between pieces of work.
            alone: use this thread only.
        """
        compact, head = self._maintenance.compact, self._store.head
        cost = head.last.restore_cost if head is not None else 0.0
        self._highest = max(self._highest, cost)
        if compact is not None and cost <= compact < self._remaining:
            self._remaining, self._highest = 0.0, cost  # a new chain
        with contextlib.suppress(Stopped), stoppable(stop, alone=alone):
            # First: old steps do not accumulate however little time there is, and fewer are left to compact.
            if self._maintenance.keep is not None:
                self._collect()
            # A chain that could not be compacted, because it is damaged, is tried again once it is twice as long.
            if compact is not None and self._highest > max(compact, 2 * self._remaining):
                self._moved = True
                moved = self._store.compact(min(compact, MAX_COST))
                is_left = cost > compact and head is not None and head.last.step not in moved
                self._remaining = cost if is_left else 0.0
                self._highest = 0.0
            if self._moved:
                self._collect()

    def _collect(self) -> None:
        """Remove old steps and garbage; while others write, it is left to the next save."""
        with contextlib.suppress(InUseError):
            self._store.gc(self._maintenance.keep, timeout=0.0)
            self._moved = False
