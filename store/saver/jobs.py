"""The jobs of a worker: a snapshot becomes a committed step, and maintenance between saves."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ...codec.config import Config
from ...codec.evidence.kind import Kind
from ...codec.parallel import Stopped, stoppable
from ..compaction import MAX_COST
from ..lock import InUseError
from ..retention import Retention
from ..session import Saved, Session
from ..store import Store
from .snapshot import Arena, Snapshot, rebuild


def kinds_tree(kinds: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `kinds=` as a tree of plain values and arrays, which is passed like the state."""
    return {
        path: kind if isinstance(kind, str) else {f.name: getattr(kind, f.name) for f in fields(kind)}
        for path, kind in (kinds or {}).items()
    }


def _kinds(tree: Mapping[str, Any]) -> dict[str, Any] | None:
    return {path: kind if isinstance(kind, str) else Kind(**kind) for path, kind in tree.items()} or None


def perform(
    session: Session, step: int, snapshot: Snapshot, arena: Arena, stop: Callable[[], bool], *, alone: bool
) -> Saved | None:
    """Save a snapshot; return None if `stop()` was true before anything was written.

    Args:
        session: whose next step it becomes.
        step: training step.
        snapshot: of {"state", "options": [grads, metric, configuration as JSON or None], "kinds"}.
        arena: the memory of the snapshot.
        stop: asked between pieces of work.
        alone: use this thread only.
    """
    trees = rebuild(snapshot, arena)
    grads, metric, asked = trees["options"]
    cfg = None if asked is None else Config.from_json(json.loads(asked))
    with contextlib.suppress(Stopped), stoppable(stop, alone=alone), contextlib.ExitStack() as streams:
        # Arrays that stayed on a GPU are read on a separate stream, after their copies are complete.
        for device, event in snapshot.ready:
            import torch

            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_event(event)
            streams.enter_context(torch.cuda.stream(stream))
        return session.save(step, trees["state"], grads=grads, kinds=_kinds(trees["kinds"]), metric=metric, cfg=cfg)
    return None


def outcome(saved: Saved | None) -> dict[str, Any]:
    """Return the fields of a `SaveResult` that a save determines, as plain values."""
    if saved is None:
        return {"status": "cancelled"}
    fields = {name: getattr(saved, name) for name in ("path", "nbytes", "raw_nbytes", "is_delta")}
    return {**fields, "status": "saved", "id": saved.checkpoint.id}


def store_options(store: Store) -> dict[str, Any]:
    """Return the arguments for `open_store`, as plain values."""
    return {"url": store.url, "cfg": json.dumps(store.cfg.to_json()), "in_memory": store.in_memory}


def open_store(options: Mapping[str, Any]) -> Store:
    """Open the same store again, with a session of its own."""
    return Store(options["url"], Config.from_json(json.loads(options["cfg"])), in_memory=options["in_memory"])


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
