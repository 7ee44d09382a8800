"""What a save costs: time and memory against the size of the state, and where the time of one save goes.

States are AdamW states of a GPT, drawn from a real one (`data.drawn_state`); compress and decompress are measured as in
`bench codec`, on one and on two threads, extra memory as there (`memory.py`, a fresh process each). Stages are found by
sampling the stack of the thread that saves; what a stage takes includes what it calls. Stalls and whole saves through
files, against torch.save, safetensors and DCP, are `bench saver` and `bench store`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import shrinkpoint as sp

from . import codec, data, gpustates, machine, memory
from .data import Pair
from .devices import threads
from .harness import Options, Row, one_thread_clock, run_cases, wall_clock

SIZES = (1_000_000, 10_000_000, 100_000_000)
LARGER = (300_000_000, 1_000_000_000)
"""With `--large`, where there is memory for them."""
_BYTES = 40
"""Memory a parameter: two AdamW states of 12 bytes, a restored one, and what the codec holds beside."""
_INTERVAL = 5e-4
"""Seconds between two looks at the stack."""
_LEAST = 0.01
"""Share of the time below which a stage has no row."""
_DEPTH = 6
_REPEATS = 12
_PLUMBING = ("parallel",)
"""Modules that only hand work to threads."""
STAGES = "cost, stage of a save: "
Stack = tuple[str, ...]


def rows(options: Options) -> list[Row]:
    """Time, memory and stages; only with `--only cost` where `--quick` is asked for."""
    if options.quick and options.only is None:
        return []
    kinds = [kind for kind in ("time", "memory", "stages") if options.wanted(f"cost {kind}")]
    if not kinds:
        return []
    options.say("cost: making the states")
    real = data.trained(quick=True) if options.state is None else data.read(options.state)
    found: list[Row] = []
    for parameters in SIZES[:1] if options.quick else SIZES + (LARGER if options.large else ()):
        lacking = no_room(parameters, machine.machine()["memory GB"])
        if lacking:
            found += options.done([_missing(kind, parameters, lacking) for kind in kinds if kind != "stages"])
            continue
        if "time" in kinds:
            found += options.done(_times(data.drawn_state(real, parameters), options))
        if "memory" in kinds:
            found += options.done([_named(row) for row in memory.rows(real, parameters, options.apart())])
    if "stages" in kinds:
        found += options.done(_stages(data.drawn_state(real, SIZES[0] if options.quick else SIZES[1]), options))
    return found


def no_room(parameters: int, memory: float | None) -> str:
    """Why a state of so many parameters cannot be measured here; "" if it can, or where nobody knows.

    Args:
        parameters: of the model.
        memory: of the machine, in GB; None: not known.

    Example:
        >>> no_room(1_000_000_000, 23.0), no_room(100_000_000, 23.0)
        ('not measured: needs 40 GB of memory, there are 23', '')
    """
    needed = parameters * _BYTES / 1e9
    if memory is None or needed <= memory:
        return ""
    return f"not measured: needs {needed:.0f} GB of memory, there are {memory:.0f}"


def _missing(kind: str, parameters: int, why: str) -> Row:
    row = {"time": "cost, compress base", "memory": "cost, extra memory, compress base"}[kind]
    unit, device = ("MB/s", "cpu, 1 thread") if kind == "time" else (memory.UNIT, "cpu, all cores")
    return Row(row, device, parameters, None, unit, None, None, None, None, None, why)


def _named(row: Row) -> Row:
    return dataclasses.replace(row, row=f"cost, {row.row}")


def _times(pair: Pair, options: Options) -> list[Row]:
    """Compress and decompress, base and delta, on one thread and on two; compress from a GPU."""
    found: list[Row] = []
    label = f"{codec.parameters(pair) / 1e6:.0f} M"
    for count in (1, 2) if (os.cpu_count() or 1) > 1 else (1,):
        cases = codec.Plan(label, pair, "default", count, peers=False).rows()
        with threads(count):
            rows = run_cases(cases, options.apart(), one_thread_clock() if count == 1 else wall_clock)
        found += [_named(dataclasses.replace(row, target=None, met=None)) for row in rows]
    return found + [_named(row) for row in gpustates.rows(pair, label, options.apart())]


class Sampler:
    """Counts the stacks of the thread that made it, while it is entered; only frames of this library."""

    def __init__(self, root: str) -> None:
        self.counts: Counter[Stack] = Counter()
        self._root, self._of = root, threading.get_ident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Sampler:
        self._switch = sys.getswitchinterval()
        sys.setswitchinterval(_INTERVAL / 2)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        sys.setswitchinterval(self._switch)

    def _look(self) -> None:
        while not self._done.wait(_INTERVAL):
            frame = sys._current_frames().get(self._of)
            stack = stack_of(frame, self._root)
            if stack:
                self.counts[stack] += 1


def stack_of(frame: FrameType | None, root: str) -> Stack:
    """Names of the functions of this library from `root` on, outermost first; empty outside of `root`.

    Args:
        frame: the innermost.
        root: function to begin with.
    """
    names: list[str] = []
    while frame is not None:
        name = _name(frame)
        if name is not None:
            names.append(name)
            if name == root:
                return tuple(reversed(names))
        frame = frame.f_back
    return ()


def _name(frame: FrameType) -> str | None:
    module = frame.f_globals.get("__name__", "")
    function = frame.f_code.co_name
    short = module.rpartition(".")[2]
    ours = module.startswith("shrinkpoint.") and not module.startswith("shrinkpoint.bench")
    if not ours or short in _PLUMBING or function.startswith("<"):
        return None
    return f"{short}.{function}"


def shares(counts: Counter[Stack], depth: int = _DEPTH) -> dict[Stack, float]:
    """Share of all samples in each stack and what it called; stacks are cut at `depth`.

    Example:
        >>> shares(Counter({("a", "b"): 3, ("a",): 1}))
        {('a',): 1.0, ('a', 'b'): 0.75}
    """
    total = sum(counts.values())
    inclusive: Counter[Stack] = Counter()
    for stack, count in counts.items():
        for n in range(1, min(len(stack), depth) + 1):
            inclusive[stack[:n]] += count
    return {stack: inclusive[stack] / total for stack in sorted(inclusive)} if total else {}


def sampled(call: Callable[[], object], root: str, repeats: int = _REPEATS) -> Counter[Stack]:
    """Stacks of a call made again and again."""
    call()
    with Sampler(root) as sampler:
        for _ in range(repeats):
            call()
    return sampler.counts


def _stages(pair: Pair, options: Options) -> list[Row]:
    """Where a delta's time goes."""
    options.say("cost: stages of a save")
    size = codec.parameters(pair)
    parent = sp.compress(pair.before)
    begin = time.perf_counter()
    counts = sampled(lambda: sp.compress(pair.after, parent), "compress.compress")
    seconds = (time.perf_counter() - begin) / (_REPEATS + 1)
    note = f"{sum(counts.values())} samples of {_REPEATS} deltas, {seconds:.3g} s each; {pair.origin}"
    return [
        Row(STAGES + "/".join(stack), "cpu, 1 thread", size, 100 * share, "%", None, None, None, None, None, note)
        for stack, share in shares(counts).items()
        if share >= _LEAST
    ]


def flames(rows: Sequence[Any]) -> dict[Stack, float]:
    """Stacks and their shares, from rows or their JSON."""
    found: dict[Stack, float] = {}
    for row in rows:
        plain = row if isinstance(row, dict) else dataclasses.asdict(row)
        if plain["row"].startswith(STAGES):
            found[tuple(plain["row"].removeprefix(STAGES).split("/"))] = plain["value"] / 100
    return found


def picture(rows: Sequence[Any], path: Path) -> None:
    """Draw the stages of one save: what is called stands on what calls it, as wide as its share of the time.

    Raises:
        BadArgumentError: Matplotlib is not installed.
    """
    from .plot import pyplot

    plt = pyplot()
    found = flames(rows)
    depth = max(len(stack) for stack in found)
    figure, axis = plt.subplots(figsize=(13, 0.9 + 0.55 * depth), layout="constrained")
    lefts: dict[Stack, float] = {(): 0.0}
    used: dict[Stack, float] = {}
    for stack in sorted(found, key=lambda s: (len(s), s[:-1], -found[s])):
        above = stack[:-1]
        left = lefts.get(above, 0.0) + used.get(above, 0.0)
        used[above] = used.get(above, 0.0) + found[stack]
        lefts[stack] = left
        shade = ("#2a6f97", "#468faf", "#61a5c2", "#89c2d9", "#a9d6e5", "#d4ebf2")[(len(stack) - 1) % 6]
        axis.barh(len(stack) - 1, found[stack], left=left, height=0.94, color=shade, edgecolor="white", linewidth=0.8)
        label, middle = f"{stack[-1]} {found[stack]:.0%}", left + found[stack] / 2
        if found[stack] > 0.0048 * len(label):
            axis.text(middle, len(stack) - 1, label, ha="center", va="center", fontsize=7, clip_on=True)
    axis.set_xlim(0, 1)
    axis.set_yticks([])
    axis.set_xlabel("share of the time of one save (a delta)")
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
