"""The process beside a trainer that compresses and writes: `python -m shrinkpoint.store.worker`, started by `Saver`.

It is a fresh process, never a fork. It ends when its trainer says so or is no more; a save it has the whole snapshot of
is finished first. Interrupts and polite requests to end are the trainer's business: it gets them too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from .channel import close_all, receive, send
from .snapshot import Arena, Snapshot, rebuild
from .upkeep import Keeper, Upkeep

if TYPE_CHECKING:
    from .store import Saved, Store

Warned = tuple[str, str]
"""Category and message of a warning."""


def kinds_tree(kinds: Mapping[str, Any] | None) -> dict[str, Any]:
    """`kinds=` as a tree of plain values and arrays, which crosses to the worker like the state itself."""
    return {
        path: kind if isinstance(kind, str) else {f.name: getattr(kind, f.name) for f in fields(kind)}
        for path, kind in (kinds or {}).items()
    }


def _kinds(tree: Mapping[str, Any]) -> dict[str, Any] | None:
    from ..codec.evidence.kind import Kind

    return {path: kind if isinstance(kind, str) else Kind(**kind) for path, kind in tree.items()} or None


def perform(
    store: Store, step: int, snapshot: Snapshot, arena: Arena, stop: Callable[[], bool], *, alone: bool
) -> Saved | None:
    """Save a snapshot; None where `stop()` came true before anything was written.

    Args:
        store: whose next step it becomes.
        step: training step.
        snapshot: of {"state", "beside": [grads, metric, configuration as JSON or None], "kinds"}.
        arena: where it is.
        stop: asked between pieces of work.
        alone: stay in this one thread.
    """
    from ..codec.config import Config
    from ..codec.parallel import Stopped, stoppable

    trees = rebuild(snapshot, arena)
    grads, metric, asked = trees["beside"]
    cfg = None if asked is None else Config.from_json(json.loads(asked))
    with contextlib.suppress(Stopped), stoppable(stop, alone=alone), _devices(snapshot):
        return store.save(step, trees["state"], grads=grads, kinds=_kinds(trees["kinds"]), metric=metric, cfg=cfg)
    return None


@contextlib.contextmanager
def _devices(snapshot: Snapshot) -> Any:
    """Arrays that stayed on a GPU are read on a stream of their own, once they are there."""
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


def described(saved: Saved | None) -> dict[str, Any]:
    """What a result says of a save, as plain values."""
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


def _failure(error: BaseException) -> dict[str, Any]:
    kind = next((c.__name__ for c in type(error).__mro__ if c.__module__ in _KNOWN_MODULES), "Exception")
    return {
        "error": kind,
        "qualname": type(error).__qualname__,
        "errno": getattr(error, "errno", None),
        "message": str(error) if not isinstance(error, OSError) else error.strerror or str(error),
        "filename": str(error.filename) if isinstance(error, OSError) and error.filename is not None else None,
        "trace": "".join(traceback.format_exception(error))[-8000:],
    }


_KNOWN_MODULES = ("builtins", "shrinkpoint.codec.errors", "shrinkpoint.kernels.errors")


class _Parent:
    """Waits for the trainer's next word, or its end: a forked child of it may hold the socket open."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self._sock, self._pid = sock, pid
        self._pidfd: int | None = None
        # Not `select`: where the trainer has many files open, the socket's number is beyond what that takes.
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(pid)
                self._poll.register(self._pidfd, select.POLLIN)

    def next(self) -> tuple[dict[str, Any], list[int]] | None:
        """Its message; None once there will be no more."""
        while True:
            ready = [fd for fd, _ in self._poll.poll(5000 if self._pidfd is not None else 500)]
            if self._sock.fileno() in ready:
                try:
                    return receive(self._sock)
                except (EOFError, ConnectionError):
                    return None
            if os.getppid() != self._pid:
                return None

    def is_calling(self) -> bool:
        """Whether there is a next word already, or will be no more."""
        return bool(self._poll.poll(0)) or os.getppid() != self._pid

    def tell(self, answer: dict[str, Any]) -> None:
        """Answer, if it is there to hear it."""
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            send(self._sock, answer)


def _warm(modules: list[str]) -> None:
    """Load what the first save needs, compiled kernels too, while the trainer is at its first steps."""
    import numpy as np

    from ..codec.compress import compress

    numbers = np.linspace(-1, 1, 4096, dtype=np.float32)
    state: Any = {"w": numbers, "optimizer": {"state": {0: {"exp_avg": numbers, "exp_avg_sq": numbers**2}}}}
    if "torch" in modules:
        import torch

        torch.set_num_threads(1)
        state["t"] = torch.from_numpy(numbers)
    compress(state, compress(state))


def main() -> None:
    """The process: arguments are the descriptor of its socket and the trainer's process id."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    parent = _Parent(sock, int(sys.argv[2]))
    first = parent.next()
    if first is None:
        return
    options = first[0]
    with contextlib.suppress(OSError):
        os.nice(options["nice"])
    store: Store | None = None
    keeper: Keeper | None = None
    broken: dict[str, Any] | None = None
    try:
        store = open_store(options["store"])
        keeper = Keeper(store, Upkeep.from_json(options["upkeep"]))
        _warm(options["modules"])
    except Exception as e:
        broken = _failure(e)
    arena, words, last = Arena(), -1, -1
    while (message := parent.next()) is not None:
        job, descriptors = message
        if job["do"] == "end":
            return
        if job["do"] == "tend":
            parent.tell(_tend(keeper, arena, parent))
            continue
        if job["number"] == last:  # said twice, because nobody knew whether it had come
            close_all(descriptors)
            continue
        last = job["number"]
        begin = time.perf_counter()
        answer = broken
        if descriptors:
            arena.close()
            arena, words = Arena(descriptors[0], job["size"]), descriptors[1]
        elif job["size"] != arena.size:
            arena = Arena(arena.fd, job["size"])
        if answer is None and store is not None:
            answer = _save(store, json.loads(os.pread(words, job["words"], 0)), arena)
        parent.tell({**(answer or {}), "seconds": time.perf_counter() - begin})


def _save(store: Store, job: dict[str, Any], arena: Arena) -> dict[str, Any]:
    def save() -> dict[str, Any]:
        snapshot = Snapshot.from_json(job["snapshot"])
        if job["origin"] is not None:
            _follow(store, *job["origin"])
        return described(perform(store, job["step"], snapshot, arena, lambda: arena.stop, alone=False))

    return _noting(save)


def _tend(keeper: Keeper | None, arena: Arena, parent: _Parent) -> dict[str, Any]:
    if keeper is None:
        return {}
    return _noting(lambda: keeper.tend(lambda: arena.stop or parent.is_calling(), alone=False))


def _noting(work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """What came of some work, its error and its warnings, as plain values."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            answer = work() or {}
        except BaseException as e:
            answer = _failure(e)
    return {**answer, "warnings": [(w.category.__name__, str(w.message)) for w in caught]}


def _follow(store: Store, step: int, identity: str, back: bool) -> None:
    """Go on with the chain that the trainer loaded, if it is still there as it was; see `process.Origin`."""
    from ..codec.errors import ShrinkpointError

    if store.head is not None and not back:
        return
    try:
        store.follow(step, identity)
    except ShrinkpointError as e:
        what = "a new chain begins" if store.head is None else "the chain of the last save is gone on with"
        warnings.warn(f"{what}, the one of step {step} cannot be gone on with: {e}", stacklevel=2)


def store_options(store: Store) -> dict[str, Any]:
    """What `open_store` needs to open the same store again."""
    return {"url": store.url, "cfg": json.dumps(store.cfg.to_json()), "in_memory": store.in_memory}


def open_store(options: Mapping[str, Any]) -> Store:
    """Another object for the same store."""
    from ..codec.config import Config
    from .store import Store

    return Store(options["url"], Config.from_json(json.loads(options["cfg"])), in_memory=options["in_memory"])


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is on the disk: no need to take libraries down one by one.
    os._exit(0)
