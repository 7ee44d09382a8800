"""The bench `saver`: the cost of an asynchronous save for a trainer, against peers.

Extra memory, stall (how long the call keeps the trainer) and time until durable of each mode and peer; the processor
time of a save against that of 50 steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import shrinkpoint as sp
from shrinkpoint.codec.memory_limit import check_room

from . import fresh
from .harness import Options, Row, Rows, at_most, threads, times_smaller
from .peers import DCP_PROCESS, DCP_THREAD, DURABLE, ORBAX, TORCH, beginner, pids, remove_saved

TITLE = "what an asynchronous save costs a trainer, against memcpy, torch.save, DCP async_save and Orbax"
OVERHEAD = at_most(1.5)
EVERY = 50
"""Steps from one save to the next in the overhead row."""


def run(options: Options) -> list[Row]:
    """All rows."""
    return options.done(modes(options)) + overhead(options)


class Trainer:
    """A GPT that trains on random bytes, on one thread."""

    def __init__(self) -> None:
        from shrinkpoint.demo import SIZES
        from shrinkpoint.demo.trainer import GPT

        size = SIZES["small"]
        torch.manual_seed(0)
        self.model = GPT(size.layers, size.width, size.heads, size.context)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = torch.randint(0, 256, (16, size.context + 1))
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def step(self) -> None:
        """Run one training step."""
        from shrinkpoint.demo.trainer import loss

        self.optimizer.zero_grad()
        loss(self.model, self.batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """The state to save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def overhead(options: Options) -> list[Row]:
    """Return the overhead of saves on busy cores as the processor time that they take."""
    if not options.begins("overhead in processor time"):
        return []
    trainer = Trainer()
    steps, calls, worker = [], [], []
    with threads(1), tempfile.TemporaryDirectory() as folder, sp.Saver(sp.Store(folder)) as saver:
        trainer.step()
        saver.save(0, trainer.state()).result()
        for number in range(1, options.rounds + 1):
            for _ in range(2):
                begin = time.process_time()
                trainer.step()
                steps.append(time.process_time() - begin)
            begin, before = time.process_time(), _cpu_seconds(saver.pid)
            future = saver.save(number, trainer.state())
            calls.append(time.process_time() - begin)
            done = future.result()
            after = _cpu_seconds(saver.pid)
            if before is not None and after is not None:
                worker.append(after - before)
    value, note = None, "not measured: no /proc"
    if worker:
        value = 100 * (median(worker) + median(calls)) / (EVERY * median(steps))
        note = (
            f"{done.raw_nbytes / 1e6:.0f} MB; a step {median(steps) * 1e3:.0f} ms of processor, a save "
            f"{median(worker):.2f} s in the worker and {median(calls) * 1e3:.1f} ms in the trainer"
        )
    rows = Rows("", trainer.parameters, "cpu, all cores")
    rows.add(f"overhead in processor time, a save every {EVERY} steps", value, "%", note=note, target=OVERHEAD)
    return rows


def _cpu_seconds(pid: int | None) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------------------- modes and peers in processes of their own

# Memory is the anonymous and shared memory of trainer and worker together (proportional, so that a shared page counts
# once), sampled every 20 ms, above the memory before the save. Pages of files are left out: the system drops them on
# demand, and other processes share them. Each mode first saves a small state, so that code is loaded. Next to each time
# stands a copy of the state to memory that is in use already, in the same process, since a busy machine slows both
# down; for the same reason the worker has the trainer's niceness here.

MODES: dict[str, tuple[dict[str, Any] | None, Any, float]] = {
    "Saver": ({"nice": 0}, at_most(1.3), 1.5),
    "Saver(mode='thread')": ({"mode": "thread"}, None, 1.6),
    "Saver(snapshot='compressed')": ({"snapshot": "compressed"}, at_most(0.35), 0.6),
    TORCH: (None, None, 0.1),
    DCP_THREAD: (None, None, 1.2),
    DCP_PROCESS: (None, None, 3.2),
    ORBAX: (None, None, 2.2),
}
"""Arguments of a Saver (None: a peer), target, and about how much memory it takes, in multiples of the state."""
SIZES = (8_388_608, 83_886_080, 335_544_320)
_EVERY, _SAVES, _BLOCK = 0.02, 3, 1 << 26
_SMALL = 1 << 18
"""Parameters of the state that is saved first."""


def modes(options: Options) -> list[Row]:
    """Three rows for each mode or peer and size."""
    found: list[Row] = []
    for parameters in SIZES[: 1 if options.quick else 3]:
        for name, (_, target, takes) in MODES.items():
            now = Rows(f"{name} of {12 * parameters / 1e9:.1f} GB", parameters, "cpu, all cores")
            if not options.wanted(f"{now.start}: extra memory"):
                continue
            options.say(now.start)
            got = dict[str, Any]()
            try:
                check_room(round((1.5 + takes) * 12 * parameters), now.start)
                got = fresh.call("shrinkpoint.bench.saver:child", name, parameters)
                note = f"{got['extra'] / 1e6:.0f} MB in addition to {got['raw'] / 1e6:.0f} MB"
            except (MemoryError, OSError, ValueError) as error:
                note = f"not measured: {str(error).strip().splitlines()[-1]}"
            extra = got["extra"] / got["raw"] if got else None
            now.add("extra memory", extra, "x raw state", note=note, target=target)
            for part in ("stall", "until durable"):
                value, copy = got.get(part), got.get("copy")
                now.add(part, value, "s", ("memcpy", copy), note, ratio=times_smaller(value, copy))
            found += options.done(now)
    return found


def child(name: str, parameters: int) -> dict[str, float]:
    """Measure a mode or peer in this process."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        begin, of = _call(name, Path(folder), stack)
        _load_code(name, begin, of()[1:])
        arrays, step, kinds = _run(parameters)
        step()
        raw = sum(array.nbytes for array in arrays())
        buffer = memoryview(bytearray(_BLOCK))
        copies = [_copied(arrays, buffer)]
        before, extra, stalls, durables = 0, 0, list[float](), list[float]()
        for _ in range(_SAVES):
            now = step()
            _trim()
            before = before or sum(map(_held, of()))
            with _watched(of) as log:
                start = time.perf_counter()
                finish = begin(now, kinds)
                stalls.append(time.perf_counter() - start)
                finish()
                durables.append(time.perf_counter() - start)
            extra = max(extra, max(log) - before)
            copies.append(_copied(arrays, buffer))
            remove_saved(Path(folder))
    return {"extra": extra, "raw": raw, "stall": min(stalls), "until durable": min(durables), "copy": min(copies)}


def _load_code(name: str, begin: Callable[..., Any], others: list[int]) -> None:
    """Save a small state once other processes are idle.

    Ours begins a chain of its own, so that the large state becomes a base.
    """
    used = -1.0
    while used != (used := sum(_cpu_seconds(pid) or 0.0 for pid in others)):
        time.sleep(2)
    _, step, kinds = _run(_SMALL)
    if MODES[name][0] is None:
        begin(step(), kinds)()
        return
    base = sp.compress(step(), kinds=kinds)
    sp.compress(step(), base, kinds=kinds)
    begin({"step": 0}, {})()


def _run(parameters: int) -> tuple[Callable[[], list[Any]], Callable[[], Any], Any]:
    """Return functions for a state's arrays and for one more step, and the kinds."""
    torch.manual_seed(0)
    side = parameters // 8 // 4096
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, side, bias=False) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> dict[str, Any]:
        for p in model.parameters():
            p.grad = 1e-3 * torch.randn_like(p)
        optimizer.step()
        optimizer.zero_grad()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def arrays() -> list[Any]:
        held = [value for entry in optimizer.state.values() for value in entry.values() if value.ndim]
        return [*(p.detach() for p in model.parameters()), *held]

    return arrays, step, sp.kinds(model, optimizer)


def _copied(arrays: Callable[[], list[Any]], buffer: memoryview) -> float:
    """Return the seconds of a copy of all bytes to memory that is in use."""
    views = [memoryview(array.numpy().reshape(-1)).cast("B") for array in arrays()]
    start = time.perf_counter()
    for view in views:
        for at in range(0, len(view), _BLOCK):
            part = view[at : at + _BLOCK]
            buffer[: len(part)] = part
    return time.perf_counter() - start


def _call(name: str, root: Path, stack: contextlib.ExitStack) -> tuple[Callable[..., Any], Callable[[], list[int]]]:
    """Return a function to begin a save, which returns one to wait for it, and one for pids."""
    options, number = MODES[name][0], itertools.count()
    if options is None:
        other = beginner(DURABLE if name == TORCH else name, root, stack)
        return lambda state, _: other(state), partial(pids, name)
    saver = stack.enter_context(sp.Saver(sp.Store(root / "ours"), **options))
    return (
        lambda state, kinds: saver.save(next(number), state, kinds=kinds).result,
        lambda: [*pids(name), *([saver.pid] if saver.pid else [])],
    )


def _held(pid: int) -> int:
    """Return the bytes of anonymous and shared memory of a process, shared pages in proportion."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
    return 0


@contextlib.contextmanager
def _watched(pids: Callable[[], list[int]]) -> Iterator[list[int]]:
    """Record the memory of processes meanwhile."""
    log, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(_EVERY):
            log.append(sum(map(_held, pids())))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield log
    finally:
        ended.set()
        thread.join()


def _trim() -> None:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
