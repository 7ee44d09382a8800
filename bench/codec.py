"""The bench `codec`: compress and decompress a whole AdamW training state, against peers.

Two states: a real one (from `--state`, else trained here), and one of 100 million parameters (5 million with --quick)
drawn from it. A base and the delta of the next state, on one thread and on two, and from a GPU (`gpustates.py`), and
the peak of extra memory. Exact coding also of weights alone, in both formats, and one step of training from their
parent. How a base scales to two threads is measured on arrays of 512 x 512 and of 2048 x 2048.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

import shrinkpoint as sp
from shrinkpoint.codec.base import CHUNK
from shrinkpoint.codec.weights.ratedistortion import cheapest_levels

from . import data, memory
from .data import Pair
from .devices import threads
from .harness import (
    Case,
    CheckFailed,
    Job,
    Options,
    Peer,
    Row,
    Target,
    at_least,
    is_red,
    one_thread_clock,
    run_cases,
    same,
    wall_clock,
)
from .plot import Bars, draw
from .whole_states import check_errors, torch_calls

TITLE = "compress and decompress a whole training state, against memcpy, zstandard and torch.save"
CONFIGS: dict[str, Callable[[], sp.Config]] = {
    "default": sp.Config,
    "inshrinkerator": sp.presets.inshrinkerator,
    "lossless": sp.presets.lossless,
}
FLOOR, FRESH, ZSTD, TORCH, ZIPNN = "memcpy", "memcpy, fresh", "zstd -3", "torch.save", "zipnn"
Targets = Mapping[tuple[str, str], Target]
WHOLE: Targets = {
    ("compress", "base"): at_least(800, "value"),
    ("compress", "delta"): at_least(900, "value"),
    ("decompress", "base"): at_least(1000, "value"),
    ("decompress", "delta"): at_least(1300, "value"),
}
"""Of a large state with the default configuration on one thread."""
EXACT: Targets = {("compress", "delta"): at_least(500, "value"), ("decompress", "delta"): at_least(800, "value")}
OF_ZIPNN = {"compress": at_least(1.0), "decompress": at_least(0.7)}
"""Of exact bases, next to zipnn on the same arrays."""
SQUARES = {1: at_least(600, "value"), 2: at_least(1000, "value")}
"""Of arrays of 512 x 512, by threads."""
SCALING, SCALED = "2 threads over 1, compress base, 2048 x 2048", at_least(1.8, "value")
FORMATS = ("float32", "bfloat16")
ENCODER, RATE = "levels under a rate", 0.0005
ENCODED = at_least(0.2, "value")
PREFIX = (1 << 16) + 1
"""Elements that are compared with the oracle."""


@dataclass(frozen=True)
class Plan:
    """Configuration, state, number of threads, operations to measure, and their targets."""

    label: str
    pair: Pair
    config: str
    threads: int
    ways: tuple[str, ...] = ("compress", "decompress")
    delta: bool = True
    peers: bool = True
    targets: Targets = field(default_factory=dict)
    zipnn: str = ""
    """The dtype of all arrays where zipnn is a peer of the base."""

    @property
    def device(self) -> str:
        return f"cpu, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def rows(self) -> list[Case]:
        """Cases of compress and decompress for the base, and for the delta if wanted."""
        found = []
        base = Work(self)
        for delta in (False, True) if self.delta else (False,):
            work = Work(self, base) if delta else base
            kind = "delta" if delta else "base"
            for name in self.ways:
                found.append(
                    Case(
                        f"{name} {kind}, {self.config}, {self.label}",
                        self.pair.parameters,
                        "MB/s",
                        getattr(work, name),
                        self.device,
                        self.targets.get((name, kind)),
                        tuple(self.peer_names(decode=name == "decompress", delta=delta)),
                    )
                )
        return found

    def peer_names(self, *, decode: bool, delta: bool) -> list[str]:
        """The peers of a row, in the order of the table."""
        names = [FLOOR, FRESH] if decode else [FLOOR]
        if self.peers:
            names += [ZSTD, TORCH]
        return [*names, ZIPNN] if self.zipnn and not delta else names


class Work:
    """Compression and decompression of one state: the calls timed, their check, their peers."""

    def __init__(self, plan: Plan, base: Work | None = None) -> None:
        self.plan, self._base = plan, base
        self.cfg = CONFIGS[plan.config]()
        self.state = plan.pair.before if base is None else plan.pair.after

    @property
    def parent(self) -> sp.Checkpoint | None:
        """The parent of the delta, resolved as a trainer has it."""
        return None if self._base is None else self._base.checkpoint

    @cached_property
    def checkpoint(self) -> sp.Checkpoint:
        """Checkpoint that `compress` returns for the state."""
        return sp.compress(self.state, self.parent, self.cfg)

    @property
    def amount(self) -> float:
        return float(self.checkpoint.raw_nbytes)

    def _note(self) -> str:
        stored = self.checkpoint
        return f"ratio {stored.ratio:.2f}, {stored.raw_nbytes / 1e6:.1f} MB raw; {self.plan.pair.origin}"

    def compress(self) -> Job:
        """The job of `compress`, with everything it needs in memory."""
        call = lambda: sp.compress(self.state, self.parent, self.cfg)  # noqa: E731
        return Job(call, self._check, self.amount, self._peers(decode=False), self._note())

    def decompress(self) -> Job:
        """The job of `decompress`, from bytes."""
        blob = self.checkpoint.to_bytes()

        def call() -> object:
            return sp.decompress(sp.Checkpoint.from_bytes(blob), self.parent)

        return Job(call, self._check, self.amount, self._peers(decode=True), self._note())

    def _check(self) -> str:
        return self._checked

    @cached_property
    def _checked(self) -> str:
        again = sp.compress(self.state, self.parent, self.cfg)
        if again.to_bytes() != self.checkpoint.to_bytes():
            raise CheckFailed("the same state gives other bytes the second time")
        back = sp.decompress(sp.Checkpoint.from_bytes(self.checkpoint.to_bytes()), self.parent)
        return check_errors(self.state, back, self.checkpoint)

    def _peers(self, *, decode: bool) -> list[Peer]:
        arrays = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for _, x in data.arrays(self.state)]
        floors = [Peer(FLOOR, lambda: _copies(arrays, self.plan.threads))]
        if decode:
            note = "into arrays allocated anew, as what is decompressed comes in"
            floors.append(Peer(FRESH, lambda: _copies(arrays, self.plan.threads, fresh=True), note=note))
        others = [
            Peer(ZSTD, lambda: _zstd(arrays, self.plan.threads, decode=decode), note="lossless"),
            Peer(TORCH, lambda: torch_calls(self.state, decode=decode), note="no compression, to and from memory"),
            Peer(
                ZIPNN,
                lambda: _zipnn(arrays, self.plan.zipnn, decode=decode),
                target=OF_ZIPNN["decompress" if decode else "compress"],
                note="lossless",
            ),
        ]
        names = self.plan.peer_names(decode=decode, delta=self._base is not None)
        return [*floors, *(peer for peer in others if peer.name in names)]


def _copies(arrays: list[Any], count: int, *, fresh: bool = False) -> Callable[[], object]:
    """Copy all arrays, each thread its share; with `fresh` to memory allocated each time."""
    used = [] if fresh else [np.ones_like(x) for x in arrays]

    def part(number: int, into: list[Any]) -> None:
        for source, target in zip(arrays, into, strict=True):
            cut = slice(number * source.size // count, (number + 1) * source.size // count)
            np.copyto(target[cut], source[cut])

    def call() -> None:
        into = [np.empty_like(x) for x in arrays] if fresh else used
        if count == 1:
            part(0, into)
        else:
            list(pool.map(part, range(count), [into] * count))

    pool = ThreadPoolExecutor(count)
    return call


def _zstd(arrays: list[Any], count: int, *, decode: bool) -> Callable[[], object]:
    import zstandard

    compressor = zstandard.ZstdCompressor(level=3, threads=count if count > 1 else 0)
    if not decode:
        return lambda: [compressor.compress(x) for x in arrays]
    packed = [compressor.compress(x) for x in arrays]
    plain = zstandard.ZstdDecompressor()
    return lambda: [plain.decompress(x) for x in packed]


def _zipnn(arrays: list[Any], dtype: str, *, decode: bool) -> Callable[[], object]:
    from zipnn import ZipNN

    codec = ZipNN(input_format="byte", bytearray_dtype=dtype, threads=1)
    raw = [x.tobytes() for x in arrays]
    if not decode:
        return lambda: [codec.compress(x) for x in raw]
    packed = [codec.compress(x) for x in raw]
    return lambda: [codec.decompress(x) for x in packed]


def plans(real: Pair, drawn: Pair, *, quick: bool) -> list[Plan]:
    """Return the plans: all for the default configuration, fewer for the others."""
    if quick:
        return [
            Plan("drawn", drawn, "default", 1),
            Plan("drawn", drawn, "default", 2, delta=False, peers=False),
            Plan("drawn", drawn, "inshrinkerator", 1, delta=False, peers=False),
            Plan("drawn", drawn, "lossless", 1, delta=False, peers=False),
        ]
    found = [Plan("real", real, config, count) for config in CONFIGS for count in (1, 2)]
    return [*found, Plan("drawn", drawn, "default", 1, targets=WHOLE), Plan("drawn", drawn, "default", 2)]


def scaling(real: Pair, options: Options) -> list[Row]:
    """Rows of bases on one and two threads, of many and of few arrays."""
    rows: list[Row] = []
    for width, count in ((512, 38), (2048, 4)):
        label = f"{width} x {width}"
        names = [f"compress base, default, {label}", *([SCALING] if width == 2048 else [])]
        wanted = [options.wanted(name) for name in names]  # every name is looked up, so that `--only` can list it
        if options.quick or not any(wanted):
            continue
        pair = data.drawn_shapes(real, {f"layers.{i}.weight": (width, width) for i in range(count)})
        speeds = []
        for number in (1, 2):
            targets = {("compress", "base"): SQUARES[number]} if width == 512 else {}
            plan = Plan(label, pair, "default", number, ("compress",), delta=False, peers=False, targets=targets)
            with threads(number):
                rows += run_cases(plan.rows(), options, wall_clock)
            speeds.append(rows[-1].value)
        if width == 2048 and None not in speeds:
            value = float(speeds[1] or 0) / float(speeds[0] or 1)
            text, met = SCALED.text("x"), SCALED.met(value, None)
            note = f"{speeds[0]:.0f} and {speeds[1]:.0f} MB/s"
            rows.append(Row(SCALING, "cpu, 2 threads", pair.parameters, value, "x", None, None, None, text, met, note))
    return rows


def exact_names() -> list[str]:
    """Rows of `exact_plans`."""
    none = Pair({}, {}, "")
    return [case.row for dtype in FORMATS for case in _exact(dtype, none).rows()]


def _exact(dtype: str, pair: Pair) -> Plan:
    return Plan(f"{dtype} weights", pair, "lossless", 1, targets=EXACT, zipnn=dtype)


def exact_plans(*, quick: bool) -> list[Plan]:
    """Return plans of 25 million weights (3 with `quick`) in both formats, and one step later.

    They are drawn from the demo's GPT, whose own arrays are so small that the time of a call would be measured.
    """
    import torch

    drawn = data.drawn_state(data.trained(quick=quick, apart=1), 3_000_000 if quick else 25_000_000)
    plans = []
    for dtype in FORMATS:
        before, after = (
            {name: x.to(getattr(torch, dtype)) for name, x in state["model"].items()}
            for state in (drawn.before, drawn.after)
        )
        plans.append(_exact(dtype, Pair(before, after, drawn.origin)))
    return plans


def encoder(sample: data.Sample, n: int) -> Case:
    """Return the case of the whole rate-distortion encoder on n weights, chunk by chunk.

    That is counts, prices and a pass over the weights, up to three times; the pass itself is a row of `bench kernels`.
    """

    def make() -> Job:
        values, nearest, parent = sample.after(n), sample.levels_after(n), sample.levels_before(n)
        codebook = sample.codebook.astype(np.float64)
        size, price = codebook.size + 2, RATE * float(values.var())

        def part(start: int, stop: int) -> Any:
            cut = slice(start, stop)
            return cheapest_levels(values[cut], nearest[cut], parent[cut], size, codebook, price)

        def call() -> object:
            return [part(start, min(start + CHUNK, n)) for start in range(0, n, CHUNK)]

        def check() -> str:
            few = min(n, PREFIX)
            found = part(0, few)
            same("levels", found, _by_oracle(values[:few], nearest[:few], parent[:few], codebook, price))
            moved = float(np.mean(found != nearest[:few]))
            return f"{few:,} levels = oracle, {moved:.1%} of them not the nearest"

        note = f"rate {RATE:g}, {codebook.size} codes, chunks of {CHUNK:,}; data {sample.origin}"
        return Job(call, check, float(n), [], note)

    return Case(ENCODER, n, "Gsym/s", make, target=ENCODED)


def _by_oracle(values: Any, nearest: Any, parent: Any, codebook: Any, price: float) -> Any:
    """Return the levels that `cheapest_levels` must give, by the reference kernels."""
    from shrinkpoint.kernels.levels import reference as counted
    from shrinkpoint.kernels.rate_distortion import reference as chosen

    size, levels = codebook.size + 2, nearest
    for _ in range(3):
        counts = counted.joint_counts(parent, levels, size, size) + 0.5
        bits = np.log2(counts.sum(axis=1, keepdims=True) / counts)
        prices = (price * bits).astype(np.float32)
        levels = chosen.rate_distortion_levels(values, nearest, parent, codebook.astype(np.float32), prices)
    return levels


def run(options: Options) -> list[Row]:
    """All rows."""
    from . import first_call, gpustates, small_arrays

    small = [*small_arrays.rows(options), *first_call.rows(options)]
    if small_arrays.alone(options):
        return small
    options.say("making the states")
    real = data.trained(quick=options.quick) if options.state is None else data.read(options.state)
    drawn = data.drawn_state(real, 5_000_000 if options.quick else 100_000_000)
    rows = small
    found = plans(real, drawn, quick=options.quick)
    asked = [name for name in exact_names() if options.wanted(name)]
    if asked:
        found += exact_plans(quick=options.quick)
    for plan in found:
        with threads(plan.threads):
            rows += run_cases(plan.rows(), options, one_thread_clock() if plan.threads == 1 else wall_clock)
    rows += scaling(real, options)
    rows += gpustates.rows(drawn, "drawn", options)
    with threads(1):
        n = CHUNK if options.quick else 25_000_000
        rows += run_cases([encoder(data.Sample(n, real), n)], options, one_thread_clock())
    return rows + memory.rows(real, drawn.parameters, options)


def plot(rows: list[Row], path: Path) -> None:
    """Speed of each row, one bar next to its peers'."""
    panels = []
    for direction in ("compress", "decompress"):
        bars = []
        for row in rows:
            if row.value is None or not row.row.startswith(direction) or is_red(row):
                continue
            label = f"{row.row.removeprefix(direction).strip()} ({row.device.removeprefix('cpu, ')})"
            if row.peer == FLOOR:
                target = float(row.target.split()[1]) if row.target else None
                bars.append((label, row.value, target))
            elif row.peer_value is not None and "default" in label:
                bars.append((f"vs {row.peer}, {row.device.removeprefix('cpu, ')}", row.peer_value, None))
        panels.append(Bars(f"{direction}, MB/s of raw state", "MB/s", bars))
    draw(path, panels)
