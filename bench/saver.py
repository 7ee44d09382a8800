"""The bench `saver`: the cost of an asynchronous save for a trainer, against peers.

The stall: how long the call keeps the trainer, everything it started before being finished. Overhead: the processor
time of a save against that of 50 steps; on the wall, a training loop on all cores in blocks of 50 steps, every other
block with a save at its start, in pairs, so that a busy machine is as busy for both. Memory: what the worker's process
holds beyond the snapshot it shares.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import shrinkpoint as sp

from . import data, save_memory
from .data import Pair
from .harness import CheckFailed, Options, Row, Target, at_least, at_most, lacking
from .plot import Bars, draw

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
        real = data.trained(quick=True) if options.state is None else data.read(options.state)
        # Larger than the cache also with --quick: a copy within the cache would measure something else.
        for parameters in (5_000_000,) if options.quick else (5_000_000, 50_000_000):
            rows += options.done(stalls(data.drawn_state(real, parameters), parameters, options))
    return rows + options.done(save_memory.rows(options)) + _overheads(options)


def stalls(pair: Pair, parameters: int, options: Options) -> list[Row]:
    """Rows of one state: stall, time until durable, memory."""
    options.say(f"stall ({pair.nbytes / 1e6:.0f} MB)")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        root = Path(folder)
        saver = stack.enter_context(sp.Saver(sp.Store(root / "ours")))
        saver.save(0, pair.before).result()
        try:
            checked = _check(saver, pair)
        except CheckFailed as error:
            return [_row("stall of save", parameters, None, "ms", STALL, note=f"CHECK FAILED: {error}", met=False)]
        calls: dict[str, Callable[[], object]] = {FLOOR: _copy(pair), "torch.save": _torch_save(pair, root)}
        notes: dict[str, str] = {}
        for kind in ("thread", "process"):
            name = f"DCP async_save, {kind}"
            try:
                calls[name] = stack.enter_context(_dcp(pair, root, kind))
            except Exception as error:
                notes[name] = f"not measured: {type(error).__name__}: {error}"
        try:
            calls[MOONCLIP] = _moonclip(pair, root)
        except ImportError as error:
            notes[MOONCLIP] = f"not measured: {lacking(str(error.name))}"
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

        for number in range(1, options.rounds + 3):
            names = ["", *calls]
            first = number % len(names)  # so that the call after the longest write is not always the same one
            for name in names[first:] + names[:first]:
                theirs(name) if name else ours(number)
        extra, how = _memory(saver)
        arrays = sum(1 for _ in data.arrays(pair.before))
        about = f"{arrays} arrays, {pair.nbytes / 1e6:.0f} MB; quartiles {{:.0%}} apart; {checked}"
        rows = [
            _row(
                "stall of save, processor time",
                parameters,
                _median(processor[""]) * 1e3,
                "ms",
                STALL,
                peer=FLOOR,
                peer_value=_median(processor[FLOOR]) * 1e3,
                note=about.format(_spread(processor[""])) + "; of the calling thread",
            )
        ]
        for name in (*calls, *notes):
            peer = _median(seconds[name]) * 1e3 if name in calls else None
            said = about.format(_spread(seconds[""]))
            said = f"{notes[name]}; {said}" if name in notes else said
            value = _median(seconds[""]) * 1e3
            rows.append(_row("stall of save", parameters, value, "ms", None, peer=name, peer_value=peer, note=said))
        took = _row("time until durable", parameters, _median(durable), "s", None, note="deltas, 1 thread, nice 10")
        share = None if extra is None else extra / pair.nbytes
        held = _row("memory of the worker", parameters, share, "x raw state", MEMORY, note=how)
        return [*rows, took, held]


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


def _torch_save(pair: Pair, root: Path) -> Callable[[], object]:
    import torch

    return lambda: torch.save(pair.before, root / "torch.pt")


@contextlib.contextmanager
def _dcp(pair: Pair, root: Path, kind: str) -> Iterator[Callable[[], object]]:
    """Yield the call of `async_save` by torch.distributed.checkpoint on the same state."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", f"file://{root}/meet", rank=0, world_size=1)
    folder = root / f"dcp-{kind}"
    how = AsyncCheckpointerType.THREAD if kind == "thread" else AsyncCheckpointerType.PROCESS

    def call() -> object:
        future = dcp.async_save(  # type: ignore[attr-defined]
            pair.before, checkpoint_id=str(folder), async_checkpointer_type=how
        )
        return lambda: _finish(future, folder)

    try:
        _finish(call(), folder)
        yield call
    finally:
        if ours:
            dist.destroy_process_group()


def _moonclip(pair: Pair, root: Path) -> Callable[[], object]:
    """Return the call of moonclip's asynchronous save, which saves both states in turn."""
    import torch

    manager = importlib.import_module("moonclip").MoonclipManager(str(root / "moon"), async_save=True)
    states = [{path: torch.from_numpy(np.array(x)) for path, x in data.arrays(s)} for s in (pair.before, pair.after)]
    steps = itertools.count()

    def call() -> object:
        step = next(steps)
        manager.save_tensors(step, states[step % 2])
        return manager.flush

    manager.flush()
    call()
    manager.flush()
    return call


def _finish(future: Any, folder: Path) -> None:
    if callable(future):
        future()
        return
    future.result()
    shutil.rmtree(folder)


def _memory(saver: sp.Saver) -> tuple[int | None, str]:
    """Return the peak of the worker's own memory, without the snapshot and its initial memory."""
    path = Path(f"/proc/{saver.pid}/status")
    if not path.exists():
        return None, "not measured: no /proc"
    fields = dict(line.split(":", 1) for line in path.read_text(encoding="ascii").splitlines() if ":" in line)
    peak, shared = (int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "RssShmem"))
    with tempfile.TemporaryDirectory() as folder, sp.Saver(sp.Store(folder)) as idle:
        idle.save(0, {"step": 0}).result()
        lines = Path(f"/proc/{idle.pid}/status").read_text(encoding="ascii").splitlines()
        start = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    how = (
        f"peak {peak / 1e6:.0f} MB, of these {shared / 1e6:.0f} MB the shared snapshot and {start / 1e6:.0f} MB "
        "what an idle worker has; the next delta's parent included"
    )
    return max(0, peak - shared - start), how


class Trainer:
    """A GPT that trains on random bytes, `threads` at a time."""

    def __init__(self, threads: int) -> None:
        import torch

        from shrinkpoint.demo.config import SIZES
        from shrinkpoint.demo.model import GPT

        size = SIZES["small"]
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.model = GPT(size.layers, size.width, size.heads, size.context)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.batch = torch.randint(0, 256, (16, size.context + 1))
        self.parameters = sum(p.numel() for p in self.model.parameters())

    def step(self) -> None:
        """Run one training step."""
        from shrinkpoint.demo.model import loss

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
    import torch

    before = torch.get_num_threads()
    rows = []
    try:
        if options.wanted("overhead in processor time"):
            options.say("overhead in processor time")
            rows.append(_overhead_of_processor(options))
        if options.wanted("overhead on the wall") and not options.quick:
            options.say("overhead on the wall")
            rows.append(_overhead_on_the_wall(options))
    finally:
        torch.set_num_threads(before)
    return rows


def _overhead_of_processor(options: Options) -> Row:
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
    name = f"overhead in processor time, a save every {EVERY} steps"
    if not worker:
        return _row(name, trainer.parameters, None, "%", OVERHEAD, note="not measured: no /proc")
    value = 100 * (_median(worker) + _median(calls)) / (EVERY * _median(steps))
    note = (
        f"{done.raw_nbytes / 1e6:.0f} MB; a step {_median(steps) * 1e3:.0f} ms of processor, a save "
        f"{_median(worker):.2f} s in the worker and {_median(calls) * 1e3:.1f} ms in the trainer"
    )
    return _row(name, trainer.parameters, value, "%", OVERHEAD, note=note)


def _overhead_on_the_wall(options: Options) -> Row:
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
    value = statistics.median(more)
    low, _, high = statistics.quantiles(more, n=4, method="inclusive")
    note = (
        f"{_median(plain) / EVERY * 1e3:.0f} ms a step, {len(plain)} pairs of blocks, quartiles {low:+.1f} and "
        f"{high:+.1f} %, of the plain blocks {_spread(plain):.1%} apart; "
        f"stall {_median(stall) * 1e3:.1f} ms, durable after {_median(seconds):.2f} s"
    )
    return _row(
        f"overhead on the wall, a save every {EVERY} steps", trainer.parameters, value, "%", OVERHEAD, note=note
    )


def _cpu_seconds(pid: int | None) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _median(values: list[float]) -> float:
    return statistics.median(values)


def _spread(values: list[float]) -> float:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle if middle else 0.0


def _row(
    name: str,
    size: int,
    value: float | None,
    unit: str,
    target: Target | None,
    *,
    peer: str | None = None,
    peer_value: float | None = None,
    note: str = "",
    met: bool | None = None,
) -> Row:
    ratio = peer_value / value if value and peer_value is not None else None
    if target is not None and met is None:
        met = target.met(value, ratio)
    text = target.text(unit) if target else None
    return Row(name, "cpu, all cores", size, value, unit, peer, peer_value, ratio, text, met, note)


def plot(rows: list[Row], path: Path) -> None:
    """Stall of each size next to its peers'."""
    bars: list[tuple[str, float, float | None]] = []
    for row in rows:
        if row.row != "stall of save" or row.value is None or row.peer_value is None:
            continue
        if row.peer == FLOOR:
            bars.append((f"{row.size / 1e6:.0f} M parameters", row.value, row.peer_value))
        else:
            bars.append((f"vs {row.peer}", row.peer_value, None))
    draw(path, [Bars("stall of a save, ms (mark: one copy)", "ms", bars)])
