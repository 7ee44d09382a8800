"""`python -m bench overview`: costs of a checkpoint by level, next to torch.save.

The demo's GPT of 3.2 million parameters trains for a while; then `CHECKPOINTS` of its states, ten steps apart, are
saved by a `Saver`, as one base and deltas. Rows say how large a checkpoint is on average, how long the training waits
for a save, when it is durable, and how long a restore of the newest checkpoint takes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import shrinkpoint as sp
from shrinkpoint.codec.named_presets import NAMED
from shrinkpoint.demo import SIZES
from shrinkpoint.demo.trainer import Corpus, Training

from ..harness import Options, Row, Rows
from .workloads import cloned

TITLE = "size, waiting and restore of the demo's checkpoints by level, next to torch.save"
SAVED = "torch.save"
LEVELS = ("lossless", "exact_weights", "precise", "default", "compact")
WHAT = {"size": "MB", "training waits": "ms", "durable after": "s", "restore": "ms"}
CHECKPOINTS = 20
_FIRST, _SPACING = 200, 10
_RESTORES = 5


def run(options: Options) -> list[Row]:
    """Measure all levels; two of them on a small model with `--quick`."""
    size, first, count = ("tiny", 20, 4) if options.quick else ("small", _FIRST, CHECKPOINTS)
    states, kinds, parameters = _states(size, first, count)
    rows = Rows(size=parameters, device="cpu")
    for level in (SAVED, *(("lossless", "default") if options.quick else LEVELS)):
        if not options.begins(level):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = _plain(states, Path(folder)) if level == SAVED else _stored(states, kinds, level, folder)
        note = f"mean of {count} checkpoints, {_SPACING} steps apart" if level != SAVED else "each in a file of its own"
        rows.start = level
        for (what, unit), value in zip(WHAT.items(), found, strict=True):
            rows.add(what, value, unit, note=note)
    return options.done(rows)


def _states(size: str, first: int, count: int) -> tuple[list[Any], dict[str, Any], int]:
    torch.set_num_threads(SIZES[size].threads)
    training = Training(SIZES[size], steps=first + count * _SPACING, seed=0, text=Corpus().train)
    states: list[Any] = []
    while len(states) < count:
        training.advance()
        if training.step >= first and training.step % _SPACING == 0:
            states.append(cloned(training.state()))
    parameters = sum(p.numel() for p in training.model.parameters())
    return states, dict(sp.kinds(training.model, training.optimizer)), parameters


def _plain(states: list[Any], folder: Path) -> tuple[float, float, float, float]:
    """Return size, wait, time until durable and restore of torch.save."""
    waits = list(_timed(lambda state: torch.save(state, folder / "checkpoint.pt"), states))
    loads = list(_timed(lambda _: torch.load(folder / "checkpoint.pt", weights_only=False), range(_RESTORES)))
    wait = statistics.median(waits)
    return (folder / "checkpoint.pt").stat().st_size / 1e6, 1e3 * wait, wait, 1e3 * statistics.median(loads)


def _stored(states: list[Any], kinds: dict[str, Any], level: str, folder: str) -> tuple[float, float, float, float]:
    """Return the same of a `Saver`, whose kernels were compiled by a chain before."""
    with sp.Saver(sp.Store(f"{folder}/warm", NAMED[level]())) as saver:
        for step, state in enumerate(states[:3]):
            saver.save(step, state, kinds=kinds).result()
    store = sp.Store(f"{folder}/run", NAMED[level]())
    with sp.Saver(store) as saver:
        done = [saver.save(step, state, kinds=kinds).result() for step, state in enumerate(states)]
    loads = list(_timed(lambda _: sp.Store(store.url).load(), range(_RESTORES)))
    sizes = [one.nbytes / 1e6 for one in done]
    waits, seconds = ([getattr(one, name) for one in done] for name in ("stall", "seconds"))
    return (
        statistics.fmean(sizes), 1e3 * statistics.median(waits), statistics.median(seconds),
        1e3 * statistics.median(loads),
    )  # fmt: skip


def _timed(call: Any, arguments: Any) -> Iterator[float]:
    for argument in arguments:
        begin = time.perf_counter()
        call(argument)
        yield time.perf_counter() - begin
