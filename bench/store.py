"""The bench `store`: save and load, compaction, and detection of flipped bits.

Save and load: whole AdamW states through a file on this machine's disk, against torch.save, safetensors,
torch.distributed.checkpoint and moonclip (torch.save without and with an fsync; ours and moonclip's always have one).
Memory: the peak of the process above its memory before. Restores: the last of a chain of 100 before and after
compaction, in multiples of a base. Flips: one stored bit is altered, 200 times, in the same places for all;
loads without an error are counted. Ours are in a base, a delta over it and a lossless base, with their manifests.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shrinkpoint as sp
from shrinkpoint.commands.trials import peak

from . import data
from .data import Pair
from .harness import (
    Call,
    Case,
    Job,
    Options,
    Peer,
    Row,
    Rows,
    absent,
    at_most,
    one_thread_clock,
    run_cases,
    seconds_of,
    threads,
    wall_clock,
)
from .peers import OTHERS, UNSYNCED, Arrays, Other, checked_calls, tensors
from .whole_states import check_errors, copies

TITLE = (
    "save, load, memory, restore after compaction, flipped bits; against torch.save, safetensors, DCP, moonclip, npz"
)
FLOOR = "memcpy"
FLIPS = 200
CHAIN = 100
CONFIGS: dict[str, Callable[[], sp.Config]] = {"default": sp.Config, "lossless": sp.presets.lossless}


def run(options: Options) -> list[Row]:
    """All rows."""
    options.say("making the states")
    real = data.trained(quick=True)
    parameters = 1_000_000 if options.quick else 5_000_000
    with tempfile.TemporaryDirectory() as place:
        pair, folder = data.drawn_state(real, parameters), Path(place)
        rows = _throughput(pair, parameters, folder, options)
        rows += options.done(_memory(pair, parameters, folder, options))
        side = 316 if options.quick else 1118
        small = data.drawn_shapes(real, {f"l{i}.weight": (side, side) for i in range(4)})
        for measured in (_restores, _parts, _flips):
            rows += options.done(measured(small, folder, options))
    return rows


# ---------------------------------------------------------------------------------------------- saving and loading


def _throughput(pair: Pair, parameters: int, folder: Path, options: Options) -> list[Row]:
    """Save and load one state with each configuration, against the same other libraries."""
    cases = []
    for config in CONFIGS:
        for kind in ("base",) if options.quick else ("base", "delta"):
            work = _Work(pair, config, kind, folder)
            for action, make in (("save", work.save), ("load", work.load)):
                names = (FLOOR, *(other.name for other in (OTHERS if action == "save" else UNSYNCED)))
                name = f"{action} {kind}, {config}"
                cases.append(Case(name, parameters, "MB/s", make, "cpu, all cores", None, names))
    rows = run_cases(cases, options, wall_clock)
    _clear(folder)
    return rows


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


class _Work:
    """Jobs of saving and loading one state with one configuration."""

    def __init__(self, pair: Pair, config: str, kind: str, folder: Path) -> None:
        self.pair, self.kind, self.config = pair, kind, config
        self.cfg = CONFIGS[config]()
        self.root = folder / f"{config}-{kind}"
        self.folder = folder

    def _store(self) -> sp.Store:
        """Return a new store that holds a base."""
        shutil.rmtree(self.root, ignore_errors=True)
        store = sp.Store(self.root, self.cfg)
        store.save(0, self.pair.before)
        return store

    def save(self) -> Job:
        """The job of `Store.save`, the lock, both syncs and the manifest included."""
        store = self._store()
        before = store.session.head

        def call() -> object:
            store.session.head = before if self.kind == "delta" else None
            return store.save(1, self.pair.after)

        return self._job(call, OTHERS, loading=False)

    def load(self) -> Job:
        """The job of `Store.load` in a process without cached data."""
        store = self._store()
        if self.kind == "delta":
            store.save(1, self.pair.after)

        def call() -> object:
            return sp.Store(self.root, self.cfg).load(count=False)

        return self._job(call, UNSYNCED, loading=True)

    def check(self) -> str:
        """Check that a saved state comes back within its stated errors."""
        store = self._store()
        saved = store.save(1, self.pair.after)
        return check_errors(self.pair.after, sp.Store(self.root, self.cfg).load(1, count=False), saved.checkpoint)

    def _job(self, call: Call, others: tuple[Other, ...], *, loading: bool) -> Job:
        arrays = tensors(self.pair.after)
        raw = float(sum(x.nbytes for x in arrays.values()))
        peers = [Peer(other.name, partial(self.other, other, arrays, loading)) for other in others]
        parent = sp.compress(self.pair.before, cfg=self.cfg) if self.kind == "delta" else None
        ratio = sp.compress(self.pair.after, parent, self.cfg).ratio
        note = f"{raw / 1e6:.0f} MB raw, ratio {ratio:.2f}; {self.pair.origin}"
        floor = Peer(FLOOR, lambda: copies([x.numpy().reshape(-1) for x in arrays.values()]))
        return Job(call, self.check, raw, [floor, *peers], note)

    def other(self, other: Other, arrays: Arrays, loading: bool) -> Call:
        """Return the call of another library, once its arrays have come back."""
        return checked_calls(other, arrays, self.folder / f"other-{other.name.replace(' ', '')}")[loading]


# ---------------------------------------------------------------------------------------------------------- memory


def _memory(pair: Pair, parameters: int, folder: Path, options: Options) -> list[Row]:
    """Memory to save and to load, in multiples of the state; a loaded state counts as one."""
    rows = Rows(size=parameters)
    for action in ("save", "load"):
        name = f"memory to {action}"
        if not options.wanted(name):
            continue
        options.say(f"{name} ({parameters:,})")
        work = _Work(pair, "default", "base", folder)
        arrays = tensors(pair.after)
        raw = sum(x.nbytes for x in arrays.values())
        rounds = 1 if options.quick else options.rounds
        checked = work.check()
        ours = _median_peak((work.save() if action == "save" else work.load()).call, rounds)
        note = f"{raw / 1e6:.0f} MB raw, median of {rounds}; page cache not counted; checked: {checked}"
        for other in UNSYNCED:
            peer, said = None, note
            try:
                peer = _median_peak(work.other(other, arrays, action == "load"), rounds)
            except ImportError as error:
                said = f"{absent(error)}; {note}"
            share, theirs = (None if n is None else n / raw for n in (ours, peer))
            if share is None:
                said = f"not measured: no /proc/self/clear_refs; {note}"
            rows.add(name, share, "x raw state", (other.name, theirs), said)
    _clear(folder)
    return rows


def _median_peak(call: Call, rounds: int) -> float | None:
    call()
    found = [n for n in (peak(call) for _ in range(rounds)) if n is not None]
    return statistics.median(found) if found else None


# ------------------------------------------------------------------------------------------- chains and their parts


def _moving(pair: Pair, step: int) -> Any:
    """Return the state a share of the way between the two of the pair."""

    def between(a: Any, b: Any) -> Any:
        return a + (b - a) * (step / CHAIN) if a.is_floating_point() else a

    return torch.utils._pytree.tree_map(between, pair.before, pair.after)


def _seconds(call: Call, rounds: int) -> float:
    """Processor seconds on one thread."""
    with threads(1):
        return seconds_of(call, one_thread_clock(), rounds)


def _restores(pair: Pair, folder: Path, options: Options) -> list[Row]:
    """Times of restoring steps of a chain of 100, and its bytes, before and after compaction."""
    length = 30 if options.quick else CHAIN
    rows, exact = Rows(size=length), sp.presets.lossless()
    for config in list(CONFIGS)[: 1 if options.quick else None]:
        name = f"restore from a chain of {length}, {config}"
        if not options.begins(name):
            continue
        cfg = sp.Config(CONFIGS[config]().rules, chain=sp.ChainPolicy(None))
        root = folder / f"chain-{config}"
        store = sp.Store(root, cfg)
        for step in range(length):
            store.save(step, _moving(pair, step))
        # A base of the last state, to compare with.
        alone = sp.Store(folder / f"alone-{config}", cfg)
        alone.save(0, _moving(pair, length - 1))
        watched = sorted({length - 1, 15} if options.quick else {length - 1, *range(9, length, 10), 63, 80})
        expected = [sp.compress(store.load(step, count=False), cfg=exact).id for step in watched]
        rounds = options.rounds

        def of(step: int, store: sp.Store = store) -> Call:
            return lambda: sp.Store(store.url).load(step, count=False)

        def bytes_in(root: Path = root) -> int:
            return sum(p.stat().st_size for p in (root / "data").iterdir())

        one = _seconds(of(0, alone), rounds)
        before, size = _seconds(of(length - 1), 3) / one, bytes_in()
        begin = time.perf_counter()
        moved = store.compact()
        took = time.perf_counter() - begin
        store.gc()
        same = [sp.compress(store.load(step, count=False), cfg=exact).id for step in watched] == expected
        after: float | None = None
        if same and not store.verify():
            after = max(_seconds(of(step), rounds) / _seconds(of(0, alone), rounds) for step in watched)
        model = max(store.describe(step).restore_cost for step in store.steps())
        note = (
            f"worst of {len(watched)} steps against a base of the same state ({one * 1e3:.0f} ms), in turn; "
            f"{len(moved)} steps restated in {took:.1f} s; {size / 1e6:.1f} MB became {bytes_in() / 1e6:.1f} MB; "
            f"decoded bytes say {model:.2f} x; checked: the same bits before and after"
        )
        if not same:
            note = "CHECK FAILED: compaction changed a step"
        rows.add(name, after, "x base", ("before compaction", before), note, target=at_most(3.0))
    return rows


def _parts(pair: Pair, folder: Path, options: Options) -> list[Row]:
    """Rows of reading one array of a base: time and bytes against the whole."""
    name = "load one array of a base"
    if not options.begins(name):
        return []
    store = sp.Store(folder / "parts")
    store.save(0, pair.after)
    paths = [path for path, x in data.arrays(pair.after) if x.size >= 10_000]
    path = paths[len(paths) // 2]
    part = dict(data.arrays(sp.Store(store.url).load(0, path)))
    whole = dict(data.arrays(store.load(0, count=False)))
    note = f"{path}, {whole[path].nbytes / 1e3:.0f} kB of {sum(x.nbytes for x in whole.values()) / 1e3:.0f} kB"
    rows = Rows(size=whole[path].size)
    if part[path].tobytes() != whole[path].tobytes():
        rows.add(name, None, "ms", note="CHECK FAILED: not what a whole load gives")
        return rows
    some = _seconds(lambda: sp.Store(store.url).load(0, path), 9) * 1e3
    everything = _seconds(lambda: sp.Store(store.url).load(0, count=False), 5) * 1e3
    rows.add(name, some, "ms", ("the whole state", everything), note, target=at_most(everything))
    return rows


# ---------------------------------------------------------------------------------------------------- flipped bits


def _flips(pair: Pair, folder: Path, options: Options) -> list[Row]:
    """Count how many of 200 single flipped bits each library loads without an error."""
    name = "flipped bits that load silently"
    if not options.begins(name):
        return []
    arrays, root, rows = tensors(pair.after), folder / "flips", Rows(size=FLIPS)
    lossy, exact = sp.Store(root / "ours" / "lossy"), sp.Store(root / "ours" / "exact", sp.presets.lossless())
    lossy.save(0, pair.before)
    if not lossy.save(1, pair.after).is_delta:
        rows.add(name, None, "flips", note="CHECK FAILED: no delta to flip bits of")
        return rows
    exact.save(0, pair.after)
    files = [p for p in (root / "ours").rglob("*") if p.is_file() and p.parent.name in ("data", "steps")]
    # Equally many flips in each: in proportion to their sizes the delta would get almost none.
    where = {
        "a base": ("lossy", "000000000000"),
        "a delta": ("lossy", "000000000001"),
        "a lossless base": ("exact", ""),
    }
    groups = [
        [p for p in files if p.parents[1].name == store and p.name.startswith(step)] for store, step in where.values()
    ]

    def load() -> None:
        for store in (lossy, exact):
            for step in store.steps():
                sp.Store(store.url).load(step, count=False)

    ours = float(_silent(groups, load))
    places = ", ".join(where)
    checked = f"of {FLIPS}, anywhere in the stored bytes (ours: {places}, with manifests); the unaltered files load"
    for other in UNSYNCED:
        path = root / other.name / "saved"
        path.parent.mkdir(parents=True)
        silent, note = None, checked
        try:
            other.save(arrays, path)
            files = [p for p in path.parent.rglob("*") if p.is_file()]
            silent = float(_silent([files], partial(other.load, arrays, path)))
        except ImportError as error:
            note = absent(error)
        rows.add(name, ours, "flips", (other.name, silent), note, target=at_most(0))
    return rows


def _silent(groups: list[list[Path]], load: Call) -> int:
    """Count the loads that raise nothing, with one bit flipped in each group of files in turn."""
    load()
    rng = np.random.default_rng(0)
    silent = 0
    for flip in range(FLIPS):
        files = groups[flip % len(groups)]
        ends = np.cumsum([p.stat().st_size for p in files])
        position = int(rng.integers(0, 8 * int(ends[-1])))
        number = int(np.searchsorted(ends, position // 8, side="right"))
        stored = files[number].read_bytes()
        flipped = bytearray(stored)
        flipped[position // 8 - int(ends[number]) + len(stored)] ^= 1 << position % 8
        files[number].write_bytes(flipped)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                load()
            silent += 1
        except KeyboardInterrupt:
            raise
        except BaseException:  # DCP's error is not an Exception
            pass
        finally:
            files[number].write_bytes(stored)
    return silent
