"""The bench `saver`: the cost of an asynchronous save for a trainer, against peers.

The stall: how long the call keeps the trainer, everything it started before being finished. Overhead: the processor
time of a save against that of 50 steps; on the wall, a training loop on all cores in blocks of 50 steps, every other
block with a save at its start, in pairs, so that a busy machine is as busy for both. Memory: what the worker's process
holds beyond the snapshot it shares.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import shrinkpoint as sp

from . import data, save_memory
from .data import Pair
from .file_peers import DCP_PROCESS, DCP_THREAD, TORCH, beginner, remove_saved, tensors
from .harness import CheckFailed, Options, Row, Rows, absent, at_least, at_most, spread, times_smaller
from .peers import library

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
    return rows + options.done(save_memory.rows(options)) + _overheads(options)


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
        calls: dict[str, Callable[[], object]] = {FLOOR: _copy(pair)}
        notes: dict[str, str] = {}
        for name in (TORCH, DCP_THREAD, DCP_PROCESS):
            try:
                calls[name] = _other(pair, beginner(name, root, stack))
            except Exception as error:
                notes[name] = f"not measured: {type(error).__name__}: {error}"
        try:
            calls[MOONCLIP] = _moonclip(pair, root)
        except ImportError as error:
            notes[MOONCLIP] = absent(error)
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


def _copy(pair: Pair) -> Callable[[], object]:
    arrays = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for _, x in data.arrays(pair.before)]
    into = [np.ones_like(x) for x in arrays]

    def call() -> None:
        for source, target in zip(arrays, into, strict=True):
            np.copyto(target, source)

    return call


def _other(pair: Pair, begin: Callable[[Any], Callable[[], object]]) -> Callable[[], object]:
    """Return the call of another library, after a first save, which may start helpers."""
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
        if options.wanted("overhead in processor time"):
            options.say("overhead in processor time")
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
