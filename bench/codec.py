"""The bench `codec`: whole training states, against exact coders and memcpy.

States of models that were trained: a GPT of 25.5 million parameters, a vision transformer, a ResNet with batch norm;
and of models of many small arrays, whose gradients are drawn. Each is a base and the delta of a later step, by every
level, on one thread, and the default also on two. Next to them are exact coders of arrays; for the GPT also files of
torch.distributed.checkpoint, safetensors and moonclip. Weights of the GPT alone are coded exactly, in both formats and
one step of training from their parent. Further rows: bases on two threads by the size of arrays, many small arrays, the
first call, and the peak of extra memory.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from shrinkpoint.codec.base import CHUNK
from shrinkpoint.codec.named_presets import NAMED
from shrinkpoint.codec.weights.level_assignment import cheapest_levels

from . import data, fresh, peers, small_arrays
from .data import Pair
from .harness import (
    Call,
    Case,
    Job,
    Options,
    Peer,
    Row,
    Rows,
    Target,
    absent,
    at_least,
    one_thread_clock,
    run_cases,
    same,
    threads,
    wall_clock,
)
from .peers import OTHERS, checked_calls, tensors
from .whole_states import BASE, COMPRESS, DECOMPRESS, DELTA, Work, copies, torch_calls

TITLE = "compress and decompress whole training states, against memcpy, exact coders and torch.save"
CONFIGS = {name: NAMED[name] for name in ("default", "precise", "exact_weights", "lossless")}
DEFAULT, EXACT = "default", "lossless"
FLOOR, FRESH, TORCH, ZIPNN = "memcpy", "memcpy, fresh", "torch.save", "zipnn"
CODERS = ("zstd -1", ZIPNN, "blosc2", "pcodec", "OpenZL", "z4ai")
FILES = ("safetensors", "DCP with zstd", "moonclip")
"""Peers that write files; sizes and times include them."""
GPT = "GPT"
Targets = Mapping[tuple[str, str, str], Target]
"""By way, kind and peer."""
OF_GPT: dict[str, Targets] = {
    DEFAULT: {
        (COMPRESS, BASE, FLOOR): at_least(0.09),
        (COMPRESS, DELTA, FLOOR): at_least(0.08),
        (DECOMPRESS, BASE, FLOOR): at_least(0.14),
        (DECOMPRESS, DELTA, FLOOR): at_least(0.14),
        (COMPRESS, BASE, ZIPNN): at_least(2.0),
        (COMPRESS, DELTA, ZIPNN): at_least(2.0),
        (DECOMPRESS, BASE, ZIPNN): at_least(1.5),
        (DECOMPRESS, DELTA, ZIPNN): at_least(1.7),
    },
    EXACT: {(way, BASE, ZIPNN): at_least(1.0) for way in (COMPRESS, DECOMPRESS)},
}
"""Of the GPT's states, on one thread."""
OF_WEIGHTS: Targets = {
    (COMPRESS, DELTA, FLOOR): at_least(500, "value"),
    (DECOMPRESS, DELTA, FLOOR): at_least(800, "value"),
    **OF_GPT[EXACT],
}
SQUARES = {1: at_least(600, "value"), 2: at_least(1000, "value")}
"""Of arrays of 512 x 512, by threads."""
SCALED = {512: at_least(1.6, "value"), 2048: at_least(1.8, "value")}
"""Two threads over one, by the width of the matrices."""
FORMATS = ("float32", "bfloat16")
ENCODER, RATE = "levels under a rate", 0.0005
ENCODED = at_least(0.2, "value")
PREFIX = (1 << 16) + 1
"""Elements that are compared with the oracle."""


@dataclass(frozen=True)
class Plan:
    """State, configuration, number of threads, what to measure, and the peers of a base and of a delta."""

    label: str
    pair: Callable[[], Pair]
    config: str
    threads: int = 1
    ways: tuple[str, ...] = (COMPRESS, DECOMPRESS)
    kinds: tuple[str, ...] = (BASE, DELTA)
    peers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By kind, after the copies of memory."""
    targets: Targets = field(default_factory=dict)

    @property
    def device(self) -> str:
        return f"cpu, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def name(self, what: str) -> str:
        """Return the name of a row."""
        return f"{what}, {self.config}, {self.label}"

    def names(self, way: str, kind: str) -> tuple[str, ...]:
        """Return the peers of a row, in the order of the table."""
        return (FLOOR, *((FRESH,) if way == DECOMPRESS else ()), *self.peers.get(kind, ()))

    def cases(self, wanted: Callable[[str], bool] = lambda _: True) -> Iterator[Case]:
        """Cases of compress and decompress of each kind; the states are made if a row is wanted."""
        work = Work(self.pair, CONFIGS[self.config]())
        for kind in self.kinds:
            for way in self.ways:
                name = self.name(f"{way} {kind}")
                size = work.pair.parameters if wanted(name) else 0
                make, target = partial(self._job, work, way, kind), self.targets.get((way, kind, FLOOR))
                yield Case(name, size, "MB/s", make, self.device, target, self.names(way, kind))

    def _job(self, work: Work, way: str, kind: str) -> Job:
        return work.job(way, kind, list(self._peers(work.state(kind), way, kind)))

    def _peers(self, state: Any, way: str, kind: str) -> Iterator[Peer]:
        raw, decode, names = _flat(state), way == DECOMPRESS, self.names(way, kind)
        targets = {peer: target for (*place, peer), target in self.targets.items() if place == [way, kind]}
        yield Peer(FLOOR, lambda: copies(raw, self.threads), target=targets.get(FLOOR))
        if FRESH in names:
            note = "into newly allocated arrays, as decompressed values arrive"
            yield Peer(FRESH, lambda: copies(raw, self.threads, fresh=True), note=note)
        known = [name for name in names if name in CODERS]
        yield from peers.coder_peers(raw, known, threads=self.threads, decode=decode, targets=targets)
        if TORCH in names:
            yield Peer(TORCH, lambda: torch_calls(state, decode=decode), note="no compression, to and from memory")
        for name in names:
            if name in FILES:
                yield Peer(name, partial(_through_files, name, state, decode), note="exact, through files")

    def ratios(self, wanted: Callable[[str], bool]) -> list[Row]:
        """Rows of the sizes of each kind, next to those of the exact peers of the same arrays."""
        work, rows = Work(self.pair, CONFIGS[self.config]()), Rows(device=self.device)
        for kind in self.kinds:
            name = self.name(f"size of the {kind}")
            if not wanted(name):
                continue
            stored, rows.size = work.stored(kind), work.pair.parameters
            ours = stored.raw_nbytes / stored.nbytes
            others = [peer for peer in self.peers.get(kind, ()) if peer in (*CODERS, *FILES)]
            for peer in (*others,) or (None,):
                theirs, note = None, f"{stored.raw_nbytes:,} bytes to {stored.nbytes:,}; {work.pair.origin}"
                try:
                    theirs = None if peer is None else _ratio(peer, work.state(kind))
                except ImportError as error:
                    note = f"{absent(error)}; {note}"
                rows.add(name, ours, "x", (peer, theirs), note, ratio=None if theirs is None else ours / theirs)
        return rows


def _flat(state: Any) -> list[Any]:
    """Arrays of a state for peers: flat, the tiny ones joined."""
    return peers.flat_parts(x for _, x in data.arrays(state))


def _ratio(peer: str, state: Any) -> float:
    """Return how many times smaller a peer stores a state without loss."""
    raw = _flat(state)
    amount = float(sum(x.nbytes for x in raw))
    if peer in CODERS:
        return amount / peers.coded_size(peer, raw)
    with tempfile.TemporaryDirectory() as folder:
        _saved(peer, state, Path(folder))
        return amount / sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def _saved(name: str, state: Any, folder: Path) -> tuple[Call, Call]:
    """Return the calls by which a peer of `bench store` saves and loads a state."""
    return checked_calls(next(other for other in OTHERS if other.name == name), tensors(state), folder / "state")


def _through_files(name: str, state: Any, decode: bool) -> Callable[[], object]:
    """Return the call by which a peer saves or loads files, which live as long as it."""
    folder = tempfile.mkdtemp()
    call = _saved(name, state, Path(folder))[decode]
    weakref.finalize(call, shutil.rmtree, folder, ignore_errors=True)
    return call


def trained_states(options: Options) -> dict[str, Callable[[], Pair]]:
    """Return the states by their names in rows; each is made once, when it is first needed."""
    quick = options.quick
    made = {
        "ViT": lambda: data.seeing("ViT", quick=quick),
        "ResNet-18": lambda: data.seeing("ResNet-18", quick=quick),
        "192 matrices 256 x 256": lambda: small_arrays.trained(small_arrays.squares(quick=quick)),
        "400 layers 64 x 64": lambda: small_arrays.trained(small_arrays.layers(quick=quick)),
        "LoRA rank 16": lambda: small_arrays.trained(small_arrays.lora(quick=quick)),
    }
    return {name: cache(make) for name, make in made.items()}


def plans(gpt: Callable[[], Pair], others: Mapping[str, Callable[[], Pair]], *, quick: bool) -> list[Plan]:
    """Return the plans of whole states: all levels of each, the default also on two threads."""
    if quick:
        return [
            Plan(GPT, gpt, DEFAULT, peers={BASE: ("zstd -1", ZIPNN)}),
            Plan(GPT, gpt, DEFAULT, 2, kinds=(BASE,)),
            Plan(GPT, gpt, EXACT, peers={BASE: (*CODERS, TORCH)}, kinds=(BASE,)),
            *(Plan(name, pair, DEFAULT, ways=(COMPRESS,), kinds=(BASE,)) for name, pair in others.items()),
        ]
    found = []
    for name, pair in ((GPT, gpt), *others.items()):
        few = {BASE: (ZIPNN,), DELTA: (ZIPNN,)}
        every = {BASE: (*CODERS, TORCH), DELTA: (ZIPNN,)}
        peers = {DEFAULT: every, EXACT: every | {BASE: (*every[BASE], *FILES)}} if name == GPT else {EXACT: every}
        targets = OF_GPT if name == GPT else {}
        for config in CONFIGS:
            found.append(Plan(name, pair, config, peers=peers.get(config, few), targets=targets.get(config, {})))
        found.append(Plan(name, pair, DEFAULT, 2))
    two = {BASE: ("zstd -1", "blosc2")}
    return [*found, Plan(GPT, gpt, EXACT, 2, peers=two)]


def scaling(real: Callable[[], Pair], options: Options) -> list[Row]:
    """Return rows of bases on one and two threads, of many and of few arrays."""
    rows = Rows(device="cpu, 2 threads")
    for width, count in ((512, 38), (2048, 4)):
        label = f"{width} x {width}"
        name = f"2 threads over 1, compress base, {label}"
        # Every name is looked up, so that `--only` can list it.
        wanted = [options.wanted(row) for row in (f"compress base, default, {label}", name)]
        if options.quick or not any(wanted):
            continue
        pair = data.drawn_shapes(real(), {f"layers.{i}.weight": (width, width) for i in range(count)})
        speeds = []
        for number in (1, 2):
            targets = {(COMPRESS, BASE, FLOOR): SQUARES[number]} if width == 512 else {}
            plan = Plan(label, lambda pair=pair: pair, DEFAULT, number, (COMPRESS,), (BASE,), targets=targets)  # type: ignore[misc]
            with threads(number):
                rows += run_cases(plan.cases(), options, wall_clock)
            speeds.append(rows[-1].value)
        if None not in speeds:
            value = float(speeds[1] or 0) / float(speeds[0] or 1)
            note = f"{speeds[0]:.0f} and {speeds[1]:.0f} MB/s"
            rows.add(name, value, "x", note=note, size=pair.parameters, target=SCALED[width])
    return rows


def exact_plans(pair: Callable[[], Pair], *, quick: bool = False) -> list[Plan]:
    """Return plans of weights alone in both formats, exactly, and one step later.

    Args:
        pair: states one step apart.
        quick: fewer peers.
    """

    def weights(dtype: str) -> Pair:
        import torch

        both = pair()
        before, after = (
            {name: x.to(getattr(torch, dtype)) for name, x in state["model"].items()}
            for state in (both.before, both.after)
        )
        return Pair(before, after, both.origin)

    names = (ZIPNN, TORCH) if quick else (*CODERS, TORCH)
    return [
        Plan(f"{dtype} weights", cache(partial(weights, dtype)), EXACT, peers={BASE: names}, targets=OF_WEIGHTS)
        for dtype in FORMATS
    ]


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


def _gpt(options: Options) -> Callable[[], tuple[Pair, Pair]]:
    """Return what trains the GPT once."""

    @cache
    def make() -> tuple[Pair, Pair]:
        options.say("making the states")
        size = data.SMALL if options.quick else data.MEDIUM
        at = (size.steps, size.steps + 1, size.steps + 10)
        before, near, later = data.gpt_states(size, "cpu", at)
        origin = f"{size.says} trained here, steps {at[0]} and"
        return Pair(before, later, f"{origin} {at[2]}"), Pair(before, near, f"{origin} {at[1]}")

    return make


def run(options: Options) -> list[Row]:
    """Return all rows."""
    rows = [*small_arrays.rows(options), *fresh.first_calls(options)]
    if small_arrays.alone(options):
        return rows
    make = _gpt(options)

    def gpt() -> Pair:
        return make()[0]

    asked = plans(gpt, trained_states(options), quick=options.quick)
    asked += exact_plans(lambda: make()[1], quick=options.quick)
    for plan in asked:
        with threads(plan.threads):
            clock = one_thread_clock() if plan.threads == 1 else wall_clock
            rows += run_cases(plan.cases(options.wanted), options, clock)
            if plan.threads == 1:
                rows += options.done(plan.ratios(options.wanted))
    rows += scaling(gpt, options)
    with threads(1):
        n = CHUNK if options.quick else 25_000_000
        if options.wanted(ENCODER):
            rows += run_cases([encoder(data.Sample(n, gpt()), n)], options, one_thread_clock())
    return rows + fresh.memory(gpt, 5_000_000 if options.quick else 100_000_000, options)
