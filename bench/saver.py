"""The bench `saver`: the cost of an asynchronous save for a trainer, against peers.

The stall: how long the call keeps the trainer, everything it started before being finished. Overhead: the processor
time of a save against that of 50 steps; on the wall, a training loop on all cores in blocks of 50 steps, every other
block with a save at its start, in pairs, so that a busy machine is as busy for both. Memory: what the worker's process
holds beyond the snapshot it shares.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import shrinkpoint as sp
from shrinkpoint.codec.memory_limit import check_room

from . import data, fresh
from .data import Pair
from .harness import CheckFailed, Options, Row, Rows, absent, at_least, at_most, spread, times_smaller
from .peers import DCP_PROCESS, DCP_THREAD, DURABLE, ORBAX, TORCH, beginner, library, pids, remove_saved, tensors
from .whole_states import copies

TITLE = "what an asynchronous save costs a trainer, against memcpy, torch.save, DCP async_save and moonclip"
FLOOR, MOONCLIP = "memcpy", "moonclip, asynchronous"
STALL, OVERHEAD, MEMORY = at_least(1.0), at_most(1.5), at_most(1.0)
EVERY = 50
"""Steps from one save to the next in the overhead row."""
PAIRS = 2
"""Pairs of blocks a round: a block varies by more than a save adds."""


def run(options: Options) -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    if options.wanted("stall, memory, durable"):
        options.say("making the states")
        real = data.trained(quick=True)
        # Larger than the cache also with --quick: a copy within the cache would measure something else.
        for parameters in (5_000_000,) if options.quick else (5_000_000, 50_000_000):
            rows += options.done(stalls(data.drawn_state(real, parameters), parameters, options))
    return rows + options.done(modes(options)) + _overheads(options)


def stalls(pair: Pair, parameters: int, options: Options) -> list[Row]:
    """Rows of one state: stall, time until durable, memory."""
    options.say(f"stall ({pair.nbytes / 1e6:.0f} MB)")
    rows = Rows("", parameters, "cpu, all cores")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        root = Path(folder)
        saver = stack.enter_context(sp.Saver(sp.Store(root / "ours")))
        saver.save(0, pair.before).result()
        try:
            checked = _check(saver, pair)
        except CheckFailed as error:
            rows.add("stall of save", None, "ms", note=f"CHECK FAILED: {error}")
            return rows
        calls: dict[str, Callable[[], object]] = {
            FLOOR: copies([np.ascontiguousarray(x).reshape(-1) for _, x in data.arrays(pair.before)])
        }
        notes: dict[str, str] = {}
        peers: dict[str, Callable[[], Callable[[], object]]] = {
            name: partial(_other, pair, name, root, stack) for name in (TORCH, DCP_THREAD, DCP_PROCESS)
        }
        for name, make in (peers | {MOONCLIP: partial(_moonclip, pair, root)}).items():
            try:
                calls[name] = make()
            except ImportError as error:
                notes[name] = absent(error)
            except Exception as error:
                notes[name] = f"not measured: {type(error).__name__}: {error}"
        seconds: dict[str, list[float]] = {name: [] for name in ("", *calls)}
        processor: dict[str, list[float]] = {"": [], FLOOR: []}
        durable: list[float] = []

        def ours(number: int) -> None:
            begin = time.thread_time()
            future = saver.save(number, pair.after if number % 2 else pair.before)
            processor[""].append(time.thread_time() - begin)
            done = future.result()
            seconds[""].append(done.stall - done.waited)
            durable.append(done.seconds)

        def theirs(name: str) -> None:
            begin, used = time.perf_counter(), time.thread_time()
            after = calls[name]()
            seconds[name].append(time.perf_counter() - begin)
            if name == FLOOR:
                processor[name].append(time.thread_time() - used)
            if callable(after):
                after()
            remove_saved(root)

        for number in range(1, options.rounds + 3):
            names = ["", *calls]
            first = number % len(names)  # so that the call after the longest write is not always the same one
            for name in names[first:] + names[:first]:
                theirs(name) if name else ours(number)
        extra, how = _memory(saver)
    about = f"{sum(1 for _ in data.arrays(pair.before))} arrays, {pair.nbytes / 1e6:.0f} MB"
    ends = {
        name: f"{about}; quartiles {spread(of['']):.0%} apart; {checked}"
        for name, of in (("processor", processor), ("wall", seconds))
    }
    value, copy = (1e3 * median(processor[name]) for name in ("", FLOOR))
    note, ratio = f"{ends['processor']}; of the calling thread", times_smaller(value, copy)
    rows.add("stall of save, processor time", value, "ms", (FLOOR, copy), note, ratio=ratio, target=STALL)
    value = 1e3 * median(seconds[""])
    for name in (*calls, *notes):
        peer = 1e3 * median(seconds[name]) if name in calls else None
        note = f"{notes[name]}; {ends['wall']}" if name in notes else ends["wall"]
        rows.add("stall of save", value, "ms", (name, peer), note, ratio=times_smaller(value, peer))
    rows.add("time until durable", median(durable), "s", note="deltas, 1 thread, nice 10")
    share = None if extra is None else extra / pair.nbytes
    rows.add("memory of the worker", share, "x raw state", note=how, target=MEMORY)
    return rows


def _check(saver: sp.Saver, pair: Pair) -> str:
    """Check that the saver's file equals the one that a synchronous compression gives."""
    expected = sp.compress(pair.before, cfg=saver.store.cfg)
    if saver.last is None or saver.last.id != expected.id:
        raise CheckFailed("the saved checkpoint is not what compress gives")
    return "checked: same bytes as compress"


def _other(pair: Pair, name: str, root: Path, stack: contextlib.ExitStack) -> Callable[[], object]:
    """Return the call of another library, after a first save, which may start helpers."""
    begin = beginner(name, root, stack)
    begin(pair.before)()
    return lambda: begin(pair.before)


def _moonclip(pair: Pair, root: Path) -> Callable[[], object]:
    """Return the call of moonclip's asynchronous save, which saves both states in turn."""
    manager = library("moonclip").MoonclipManager(str(root / "moon"), async_save=True)
    states, steps = [tensors(state) for state in (pair.before, pair.after)], itertools.count()

    def call() -> object:
        step = next(steps)
        manager.save_tensors(step, states[step % 2])
        return manager.flush

    manager.flush()
    call()
    manager.flush()
    return call


def _memory(saver: sp.Saver) -> tuple[int | None, str]:
    """Return the peak of the worker's own memory, without the snapshot and its initial memory."""
    fields = _status(saver.pid)
    if not fields:
        return None, "not measured: no /proc"
    peak, shared = fields["VmHWM"], fields["RssShmem"]
    with tempfile.TemporaryDirectory() as folder, sp.Saver(sp.Store(folder)) as idle:
        idle.save(0, {"step": 0}).result()
        start = _status(idle.pid)["VmHWM"]
    how = (
        f"peak {peak / 1e6:.0f} MB, of these {shared / 1e6:.0f} MB the shared snapshot and {start / 1e6:.0f} MB "
        "what an idle worker has; the next delta's parent included"
    )
    return max(0, peak - shared - start), how


def _status(pid: int | None) -> dict[str, int]:
    """Return the amounts of memory of a process in bytes; empty without /proc."""
    path = Path(f"/proc/{pid}/status")
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith(" kB")}


class Trainer:
    """A GPT that trains on random bytes, `threads` at a time."""

    def __init__(self, threads: int) -> None:
        from shrinkpoint.demo.config import SIZES
        from shrinkpoint.demo.task import GPT

        size = SIZES["small"]
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.model = GPT(size.layers, size.width, size.heads, size.context)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = torch.randint(0, 256, (16, size.context + 1))
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def step(self) -> None:
        """Run one training step."""
        from shrinkpoint.demo.task import loss

        self.optimizer.zero_grad()
        loss(self.model, self.batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """The state to save."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def block(self, number: int, saver: sp.Saver | None) -> float:
        """Seconds of wall time of `EVERY` steps, the first one with a save."""
        begin = time.perf_counter()
        for step in range(EVERY):
            self.step()
            if step == 0 and saver is not None:
                saver.save(number, self.state())
        return time.perf_counter() - begin


def _overheads(options: Options) -> list[Row]:
    """Overhead of saves on a training loop: processor time and, without `--quick`, wall time."""
    before, rows = torch.get_num_threads(), list[Row]()
    try:
        if options.begins("overhead in processor time"):
            rows += _overhead_of_processor(options)
        if options.wanted("overhead on the wall") and not options.quick:
            options.say("overhead on the wall")
            rows += _overhead_on_the_wall(options)
    finally:
        torch.set_num_threads(before)
    return rows


def _overhead_of_processor(options: Options) -> list[Row]:
    """Return the overhead of saves on busy cores as the processor time that they take."""
    trainer = Trainer(threads=1)
    steps, calls, worker = [], [], []
    with tempfile.TemporaryDirectory() as folder, sp.Saver(sp.Store(folder)) as saver:
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


def _overhead_on_the_wall(options: Options) -> list[Row]:
    trainer = Trainer(threads=os.cpu_count() or 1)
    plain, saving, stall, seconds = [], [], [], []
    with tempfile.TemporaryDirectory() as folder, sp.Saver(sp.Store(folder)) as saver:
        trainer.step()
        saver.save(0, trainer.state()).result()
        for number in range(1, PAIRS * options.rounds + 1):
            plain.append(trainer.block(number, None))
            saving.append(trainer.block(number, saver))
            done = saver.wait()
            assert done is not None
            stall.append(done.stall)
            seconds.append(done.seconds)
    # The median of the pairs: a disturbance that lasts longer than a pair affects both of its blocks.
    more = [100 * (s / p - 1) for s, p in zip(saving, plain, strict=True)]
    low, _, high = statistics.quantiles(more, n=4, method="inclusive")
    note = (
        f"{median(plain) / EVERY * 1e3:.0f} ms a step, {len(plain)} pairs of blocks, quartiles {low:+.1f} and "
        f"{high:+.1f} %, of the plain blocks {spread(plain):.1%} apart; "
        f"stall {median(stall) * 1e3:.1f} ms, durable after {median(seconds):.2f} s"
    )
    rows = Rows("", trainer.parameters, "cpu, all cores")
    rows.add(f"overhead on the wall, a save every {EVERY} steps", median(more), "%", note=note, target=OVERHEAD)
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
