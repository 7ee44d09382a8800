"""The bench `gpu`: everything that a first GPU is measured with, in one command.

The GPU's rows of `bench kernels`, and states that are trained on the GPU and compressed from it: quantized there, so
that only stored bytes cross to the host. They are held against copying the state once on the device, and once to the
host, which is the least that a save without compression does. A file is decoded on the host: `bench codec` times that.

With `--json FILE` rows are kept as they are measured; the same command goes on where an earlier one stopped, by
`--minutes` or an interruption.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import shrinkpoint as sp
from shrinkpoint.codec.entropy.blocks import set_device_coding

from . import data, kernels
from .data import Pair
from .harness import ROUNDS, Case, Device, Job, Options, Peer, Row, Rows, gpu, run_cases, threads, wall_clock
from .whole_states import BASE, COMPRESS, DELTA, Work

TITLE = "the GPU's rows: each kernel against a copy on the device, and whole states compressed from it"
plot = kernels.plot
CONFIGS: dict[str, Callable[[], sp.Config]] = {
    "default": sp.Config,
    "precise": sp.presets.precise,
    "exact weights": sp.presets.exact_weights,
    "lossless": sp.presets.lossless,
    "inshrinkerator": sp.presets.inshrinkerator,
    "lc_checkpoint": lambda: sp.presets.lc_checkpoint(3),
    "check_n_run": lambda: sp.presets.check_n_run(4),
    "bitsnap": sp.presets.bitsnap,
    "default, coded there": sp.Config,
}
CODED_THERE = tuple(name for name in CONFIGS if name.endswith("coded there"))
"""Configurations whose symbols the GPU codes."""
TO_HOST = "copy to the host"
PLACE = "from a GPU"
"""Distinguishes its rows from those of the host's states."""
STALL = "stall of Saver.save"
_BYTES = 60
"""Memory of the GPU a parameter: two AdamW states of 12 bytes, both ends of a copy, and what coding needs next to."""


def run(options: Options) -> list[Row]:
    """All rows; open ones without a GPU."""
    device = "cpu" if gpu().missing else "cuda"
    large, medium = (data.LARGE, data.MEDIUM) if device == "cuda" else (data.SMALL,) * 2
    found: list[Row] = []
    every = tuple(name for name in CONFIGS if name not in CODED_THERE)
    usual = ("default", *CODED_THERE)
    if wanted(large.says, options, usual) or options.wanted(STALL):
        pair = data.trained_gpt(large, device)
        found += rows(pair, large.says, options, usual)
        found += stall(pair, large.says, options)
    with threads(1):
        found += kernels.on_gpu(options)
    if wanted(f"all presets, {medium.says}", options, every):
        pair = data.trained_gpt(medium, device)
        found += rows(pair, f"all presets, {medium.says}", options, every)
    return found


def wanted(label: str, options: Options, configs: tuple[str, ...] = ("default",)) -> bool:
    """Return whether any of the rows is asked for."""
    names = [name(kind, config, label) for config in configs for kind in (BASE, DELTA)]
    asked = [options.wanted(row) for row in names]  # all of them, so that `--only` can list them
    return any(asked)


def name(kind: str, config: str, label: str) -> str:
    """Row name of a base or delta."""
    return f"compress {kind} {PLACE}, {config}, {label}"


def rows(pair: Pair, label: str, options: Options, configs: tuple[str, ...] = ("default",)) -> list[Row]:
    """Compress a base and the delta after it, measured where there is a GPU."""
    card = gpu()
    return run_cases(cases(card, pair, label, configs), options, card.clock)


def cases(card: Device, pair: Pair, label: str, configs: tuple[str, ...] = ("default",)) -> list[Case]:
    """Return the cases; without a GPU or room for the states they say so.

    Args:
        card: where the state is.
        pair: the states, on the host.
        label: of the state in the rows' names.
        configs: names in `CONFIGS`.
    """
    size, there = pair.parameters, cache(partial(_moved, card, pair))
    missing, peers = card.missing or no_room(card, size), (card.floor, TO_HOST)

    def job(config: str, kind: str) -> Job:
        return _OnGpu(card, pair, there, config).compressing(kind)

    return [
        Case(name(kind, c, label), size, "MB/s", partial(job, c, kind), card.name, peers=peers, missing=missing)
        for c in configs
        for kind in (BASE, DELTA)
    ]


def stall(pair: Pair, label: str, options: Options) -> list[Row]:
    """Time `Saver.save` of a state on a GPU, against copying the state to the host."""
    card = gpu()
    missing = card.missing or no_room(card, pair.parameters)
    row = f"{STALL} {PLACE}, {label}"
    if not options.begins(row):
        return []
    rows = Rows("", pair.parameters, card.name)
    if missing:
        rows.add(row, None, "ms", (TO_HOST, None), f"not measured: {missing}")
        return options.done(rows)
    before, after = (_moved(card, pair, kind) for kind in (BASE, DELTA))
    copy = to_host(card, after).make()
    waits, copies, durable = [], [], []
    with tempfile.TemporaryDirectory() as folder, sp.Saver(sp.Store(Path(folder) / "run")) as saver:
        saver.save(0, before).result()
        for step in range(1, ROUNDS + 1):
            if card.gpu:
                torch.cuda.synchronize()
            begin = time.perf_counter()
            future = saver.save(step, after)
            waits.append(time.perf_counter() - begin)
            future.result()
            durable.append(time.perf_counter() - begin)
            copies.append(wall_clock(copy, 1))
    value, peer = (1e3 * statistics.median(times) for times in (waits, copies))
    note = f"median of {ROUNDS}, {min(waits) * 1e3:.1f} to {max(waits) * 1e3:.1f} ms; durable after "
    note += f"{statistics.median(durable):.2f} s; {pair.nbytes / 1e6:.0f} MB; {pair.origin}"
    rows.add(row, value, "ms", (TO_HOST, peer), note, ratio=peer / value)
    return options.done(rows)


def no_room(card: Device, parameters: int) -> str:
    """Return why a state of this size cannot be measured on the device; "" if it can."""
    if not card.gpu:
        return ""
    free, _ = torch.cuda.mem_get_info()
    needed = parameters * _BYTES
    return f"needs {needed / 1e9:.0f} GB of the GPU's memory, {free / 1e9:.0f} are free" if needed > free else ""


class _OnGpu(Work):
    """The states of a pair on a device by one configuration.

    Args:
        card: the device.
        pair: the states, on the host.
        there: returns the state of "base" or "delta" on the device.
        config: name in `CONFIGS`.
    """

    def __init__(self, card: Device, pair: Pair, there: Callable[[str], Any], config: str) -> None:
        super().__init__(lambda: pair, CONFIGS[config]())
        self.card, self.there, self.coded_there = card, there, config in CODED_THERE

    def state(self, kind: str) -> Any:
        return self.there(kind)

    def compress(self, kind: str) -> sp.Checkpoint:
        self.parent(kind)  # which is compressed in the same way, so before the setting
        set_device_coding(self.coded_there)
        try:
            return super().compress(kind)
        finally:
            set_device_coding(None)

    def restored(self, kind: str) -> Any:
        return sp.decompress(self.stored(kind), self.parent(kind))

    def compressing(self, kind: str) -> Job:
        """Return the job of a base or a delta."""
        nbytes = self.stored(kind).raw_nbytes
        with _crossed() as copies:
            self.compress(kind)
        job = self.job(COMPRESS, kind, [self.card.copy(nbytes), to_host(self.card, self.state(kind))])
        crossed = f"to the host {sum(copies) / self.pair.parameters:.2f} bytes a parameter in {len(copies)} copies"
        return replace(job, note=f"{job.note}; {crossed}")


def _moved(card: Device, pair: Pair, kind: str) -> Any:
    """Move a state's tensors to the device; AdamW's step counts stay on the host, as in PyTorch."""

    def moved(x: Any) -> Any:
        return card.array(x.numpy()) if isinstance(x, torch.Tensor) and x.ndim else x

    return torch.utils._pytree.tree_map(moved, pair.before if kind == BASE else pair.after)


def to_host(card: Device, state: Any) -> Peer:
    """Copying all tensors to page-locked memory that is there already."""

    def make() -> Callable[[], object]:
        sources = [torch.as_tensor(x) for x in torch.utils._pytree.tree_leaves(state) if hasattr(x, "shape")]
        places = [torch.empty(x.shape, dtype=x.dtype, pin_memory=card.gpu) for x in sources]

        def call() -> None:
            for place, source in zip(places, sources, strict=True):
                place.copy_(source, non_blocking=True)
            if card.gpu:
                torch.cuda.synchronize()

        return call

    return Peer(TO_HOST, make)


@contextmanager
def _crossed() -> Iterator[list[int]]:
    """Collect the bytes of each copy from a GPU to the host."""
    found: list[int] = []
    bring, move = torch.Tensor.cpu, torch.Tensor.copy_

    def brought(x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            found.append(x.numel() * x.element_size())
        return bring(x)

    def moved(place: torch.Tensor, x: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if x.is_cuda and not place.is_cuda:
            found.append(x.numel() * x.element_size())
        return move(place, x, non_blocking)

    torch.Tensor.cpu, torch.Tensor.copy_ = brought, moved  # type: ignore[method-assign,assignment]
    try:
        yield found
    finally:
        torch.Tensor.cpu, torch.Tensor.copy_ = bring, move  # type: ignore[method-assign]
