"""The worker process of a `Saver`: `python -m shrinkpoint.store.saver.worker`.

It is a new process, never a fork. Before the first save it compiles the kernels (`warm_up`). It ends on request of its
trainer, or after the trainer has ended; a save whose snapshot is complete is finished first. It ignores signals, which
are meant for the trainer.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import select
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .channel import close_all, ignore, receive, send

if TYPE_CHECKING:
    from ...codec.config import Config
    from ...codec.state.leaves import NpArray
    from ..store import Store
    from .snapshot import Arena

_KNOWN_MODULES = ("builtins", "shrinkpoint.codec.errors", "shrinkpoint.kernels.errors")
_SHAPE = (256, 512)
"""Shape of a matrix that is large enough for every coding method, and for compiled code (`backend.dispatch`)."""


def _failure(error: BaseException) -> dict[str, Any]:
    """Return an error as plain values."""
    kind = next((c.__name__ for c in type(error).__mro__ if c.__module__ in _KNOWN_MODULES), "Exception")
    return {
        "error": kind,
        "qualname": type(error).__qualname__,
        "errno": getattr(error, "errno", None),
        "message": str(error) if not isinstance(error, OSError) else error.strerror or str(error),
        "filename": str(error.filename) if isinstance(error, OSError) and error.filename is not None else None,
        "trace": "".join(traceback.format_exception(error))[-8000:],
    }


class _Parent:
    """The connection to the trainer: its messages, and the end of its process."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self._sock, self._pid = sock, pid
        self._pidfd: int | None = None
        # Not `select`, which takes no descriptor above 1023: the trainer may have many open files.
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(pid)
                self._poll.register(self._pidfd, select.POLLIN)

    def next(self) -> tuple[dict[str, Any], list[int]] | None:
        """Wait for the trainer's next message; return None after its end."""
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
        """Return whether a message is waiting, or the trainer has ended."""
        return bool(self._poll.poll(0)) or os.getppid() != self._pid

    def answer(self, message: dict[str, Any]) -> None:
        """Send an answer, unless the trainer has ended."""
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            send(self._sock, message)


def main() -> None:
    """Run the worker; arguments: the descriptor of its socket, the trainer's process id."""
    ignore()
    # What the worker writes is shown as the reason of its death; a notice that kernels are compiled is not one.
    logging.getLogger("shrinkpoint").setLevel(logging.ERROR)
    parent = _Parent(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    first = parent.next()
    if first is None:
        return
    options = first[0]
    # Linux weighs niceness within a session only ("autogroup"), and sessions by a niceness of their own.
    with contextlib.suppress(OSError):
        os.nice(options["nice"])
    with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
        file.write(str(os.getpriority(os.PRIO_PROCESS, 0)))
    # Imported at the lower priority: it takes a second.
    from .executors import Maintainer, Maintenance, open_store
    from .snapshot import Arena

    store: Store | None = None
    broken: dict[str, Any] = {}
    try:
        store = open_store(options["store"])
        store.session.spools, store.session.consumes = True, options["consumes"]
        maintainer = Maintainer(store, Maintenance.from_json(options["maintenance"]))
        warm_up(store.cfg, _converter(options["modules"]), parent.is_calling)
    except Exception as e:
        broken = _failure(e)
    arena, text, last = Arena(), -1, -1

    def stops() -> bool:
        return arena.stop or parent.is_calling()

    while (message := parent.next()) is not None:
        job, descriptors = message
        if job["do"] == "end":
            return
        if job["do"] == "maintain":
            parent.answer({} if broken else _recorded(lambda: maintainer.run(stops, alone=False)))
            continue
        if job["number"] == last:  # sent twice, because the trainer could not know whether it had arrived
            close_all(descriptors)
            continue
        last = job["number"]
        if descriptors:
            arena.close()
            arena, text = Arena(descriptors[0], job["size"]), descriptors[1]
        elif job["size"] != arena.size:
            arena = Arena(arena.fd, job["size"])
        if broken or store is None:
            parent.answer(dict(broken))
        else:
            parent.answer(_save(store, json.loads(os.pread(text, job["words"], 0)), arena))


def _converter(modules: list[str]) -> Callable[[Any], Any]:
    """Return what makes an array of the trainer's library of a NumPy array."""
    if "torch" not in modules:
        return lambda x: x
    import torch

    torch.set_num_threads(1)
    return torch.from_numpy


def _save(store: Store, job: dict[str, Any], arena: Arena) -> dict[str, Any]:
    from .executors import outcome, perform
    from .snapshot import Snapshot

    def save() -> dict[str, Any]:
        snapshot = Snapshot.from_json(job["snapshot"])
        if job["origin"] is not None:
            _follow(store, *job["origin"])
        return outcome(perform(store.session, job["step"], snapshot, arena, lambda: arena.stop, alone=False))

    return _recorded(save)


def _recorded(work: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    """Return the result of some work, its error and its warnings as plain values."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            answer = work() or {}
        except BaseException as e:
            answer = _failure(e)
    return {**answer, "warnings": [(w.category.__name__, str(w.message)) for w in caught]}


def _follow(store: Store, step: int, identity: str, back: bool) -> None:
    """Continue the chain that the trainer loaded, if it is unchanged; see `executors.Origin`."""
    from ...codec.errors import ShrinkpointError

    if store.head is not None and not back:
        return
    try:
        store.follow(step, identity)
    except ShrinkpointError as e:
        what = "a new chain begins" if store.head is None else "the chain of the last save continues"
        warnings.warn(f"{what}, because the one of step {step} cannot be continued: {e}", stacklevel=2)


def sample_states(convert: Callable[[NpArray], Any]) -> Iterator[dict[str, Any]]:
    """Yield successive states of a model that is trained with AdamW.

    Args:
        convert: what makes an array of the wanted library and dtype of a NumPy array (float32).
    """
    import numpy as np

    random = np.random.default_rng(0)
    shapes = {
        "embedding.weight": (4096, 64),
        "linear.weight": _SHAPE,
        "convolution.weight": (128, 64, 3, 3),
        "norm.weight": _SHAPE[1:],
        **{f"layers.{number}.weight": (48, 48) for number in range(12)},  # small ones are coded together
    }

    def drawn(shape: tuple[int, ...], scale: float) -> NpArray:
        return scale * random.standard_normal(shape, dtype=np.float32)

    weights = {name: drawn(shape, 1.0) for name, shape in shapes.items()}
    # Some rows are larger than others, as in trainings, because entropy coding has contexts for that.
    moments = {name: drawn(shape, 1e-3) for name, shape in shapes.items()}
    exact = [drawn(_SHAPE, 1.0), drawn(_SHAPE, 1.0)]
    for moment in moments.values():
        moment[: len(moment) // 4] *= 8
    for step in itertools.count():
        for name, moment in moments.items():
            weights[name] = weights[name] + moment
            moments[name] = np.float32(0.9) * moment + drawn(moment.shape, 1e-4)
        for number, share in enumerate((1e-2, 1e-5)):  # few and very few changes
            change = np.float32(1e-3) * (random.random(_SHAPE) < share)
            exact[number] = exact[number] + change
        optimizer = {
            number: {"step": 1.0, "exp_avg": convert(m), "exp_avg_sq": convert(np.float32(1e-3) * m * m)}
            for number, m in enumerate(moments.values())
        }
        yield {
            "model": {name: convert(x) for name, x in weights.items()},
            "exact": [convert(x) for x in exact],
            "lists": [[*range(1 << 14), step], [float(x) for x in exact[0].reshape(-1)[: 1 << 14]]],
            "random": random.integers(0, 256, 5056, dtype=np.uint8),
            "optimizer": {"state": optimizer, "param_groups": [{"params": list(optimizer)}]},
        }


def warm_up(cfg: Config, convert: Callable[[NpArray], Any], stop: Callable[[], bool]) -> None:
    """Load the kernels of saves, and compile those that are not in the cache.

    Loading takes a second of processor time, and compiling about eleven.

    Args:
        cfg: of the saves.
        convert: as in `sample_states`.
        stop: whether a save waits; asked between steps of some seconds.
    """
    from ...codec.compress import compress
    from ...codec.evidence.kind import Kind

    states = sample_states(convert)
    first, second = next(states), next(states)
    for parts in (("model",), ("model", "optimizer")):
        # A model without optimizer uses other kernels, because the importance of its weights is unknown.
        kinds = {f"model/{name}": Kind("linear") for name in first["model"]} if parts == ("model",) else None
        base = None
        for state in (first, second):
            if stop():
                return
            base = compress({name: state[name] for name in parts}, base, cfg, kinds=kinds)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is on the disk: do not spend time on taking libraries down.
    os._exit(0)
