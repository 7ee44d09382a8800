"""The job of a worker: a snapshot in shared memory becomes a committed step."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from ..codec.config import Config
from ..codec.evidence.kind import Kind
from ..codec.parallel import Stopped, stoppable
from .session import Saved, Session
from .snapshot import Arena, Snapshot, rebuild
from .store import Store


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
    with contextlib.suppress(Stopped), stoppable(stop, alone=alone), _streams(snapshot):
        return session.save(step, trees["state"], grads=grads, kinds=_kinds(trees["kinds"]), metric=metric, cfg=cfg)
    return None


@contextlib.contextmanager
def _streams(snapshot: Snapshot) -> Iterator[None]:
    """Read arrays that stayed on a GPU on a separate stream, after their copies are complete."""
    if not snapshot.ready:
        yield
        return
    import torch

    with contextlib.ExitStack() as stack:
        for device, event in snapshot.ready:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_event(event)
            stack.enter_context(torch.cuda.stream(stream))
        yield


def outcome(saved: Saved | None) -> dict[str, Any]:
    """Return the fields of a `SaveResult` that a save determines, as plain values."""
    if saved is None:
        return {"status": "cancelled"}
    return {
        "status": "saved",
        "path": saved.path,
        "id": saved.checkpoint.id,
        "nbytes": saved.nbytes,
        "raw_nbytes": saved.raw_nbytes,
        "is_delta": saved.is_delta,
    }


def store_options(store: Store) -> dict[str, Any]:
    """Return the arguments for `open_store`, as plain values."""
    return {"url": store.url, "cfg": json.dumps(store.cfg.to_json()), "in_memory": store.in_memory}


def open_store(options: Mapping[str, Any]) -> Store:
    """Open the same store again, with a session of its own."""
    return Store(options["url"], Config.from_json(json.loads(options["cfg"])), in_memory=options["in_memory"])
