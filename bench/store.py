"""The bench `store`: save and load, compaction, and detection of flipped bits.

Save and load: whole AdamW states through a file on this machine's disk, against torch.save, safetensors,
torch.distributed.checkpoint and moonclip (torch.save without and with an fsync; ours and moonclip's always have one).
Memory: the peak of the process above its memory before. Stall, in the full form: the rows of `python -m
bench saver`, with DCP's async_save in a thread and in a process (BitSnap's table 2 says 7 to 12 times as fast as
torch.save of its own saves, on other machines and states). Restores: the last of a chain of 100 before and after
compaction, in multiples of a base. Flips: one stored bit is altered, 200 times, in the same places for all;
loads without an error are counted. Ours are in a base, a delta over it and a lossless base, with their manifests.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import shrinkpoint as sp
from shrinkpoint.commands.trials import peak

from . import data
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
    at_most,
    lacking,
    one_thread_clock,
    run_cases,
    wall_clock,
)
from .plot import Bars, draw
from .saver import stalls
from .whole_states import check_errors

TITLE = (
    "save, load, memory, restore after compaction, flipped bits; against torch.save, safetensors, DCP, moonclip, npz"
)
FLOOR, TORCH, DURABLE = "memcpy", "torch.save", "torch.save + fsync"
SAFETENSORS, DCP, ZSTD, NPZ, MOONCLIP = "safetensors", "DCP", "DCP with zstd", "npz", "moonclip"
FLIPS = 200
CHAIN = 100
RESTORE = at_most(3.0)
CONFIGS: dict[str, Callable[[], sp.Config]] = {"default": sp.Config, "lossless": sp.presets.lossless}


def run(options: Options) -> list[Row]:
    """All rows."""
    options.say("making the states")
    real = data.trained(quick=True) if options.state is None else data.read(options.state)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        sizes = (1_000_000,) if options.quick else (5_000_000, 50_000_000) if options.large else (5_000_000,)
        for parameters in sizes:
            pair = data.drawn_state(real, parameters)
            rows += _throughput(pair, parameters, Path(folder), options)
            rows += options.done(_memory(pair, parameters, Path(folder), options))
            if not options.quick and options.wanted("stall, memory, durable"):
                rows += options.done(stalls(pair, parameters, options))
        small = few_arrays(data.drawn_state(real, 400_000 if options.quick else 5_000_000), 4)
        rows += options.done(_restores(small, Path(folder), options))
        rows += options.done(_parts(small, Path(folder), options))
        rows += options.done(_flips(small, Path(folder), options))
    return rows


def few_arrays(pair: Pair, count: int) -> Pair:
    """Return a pair of the same values in square matrices with their moments."""
    side = int((pair.pools["weight"][0].size // count) ** 0.5)

    def state(which: int) -> Any:
        import torch

        def matrix(role: str, i: int) -> Any:
            flat = pair.pools[role][which][i * side * side : (i + 1) * side * side]
            return torch.from_numpy(flat.reshape(side, side).copy())

        moments = {i: {m: matrix(m, i) for m in ("exp_avg", "exp_avg_sq")} for i in range(count)}
        return {"model": {f"l{i}.weight": matrix("weight", i) for i in range(count)}, "optimizer": {"state": moments}}

    return Pair(state(0), state(1), f"{count} matrices of {pair.origin}")


def _row(
    name: str,
    size: int,
    value: float | None,
    unit: str,
    note: str,
    *,
    peer: str | None = None,
    peer_value: float | None = None,
    target: Target | None = None,
) -> Row:
    """Row whose value was not timed by the harness."""
    text, met = (target.text(unit), target.met(value, None)) if target is not None else (None, None)
    return Row(name, "cpu, 1 thread", size, value, unit, peer, peer_value, None, text, met, note)


# ---------------------------------------------------------------------------------------------- saving and loading


def tensors(state: Any) -> dict[str, Any]:
    """Return the arrays of a state by path as torch tensors, as every library can store them."""
    import torch

    return {path: torch.from_numpy(np.array(x)) for path, x in data.arrays(state)}


@dataclass(frozen=True)
class Other:
    """Another library: how it saves arrays below a path, and how it loads them again."""

    name: str
    save: Callable[[dict[str, Any], Path], object]
    load: Callable[[dict[str, Any], Path], Any]


def _safetensors() -> Any:
    import safetensors.torch

    return safetensors.torch


def _dcp() -> Any:
    return importlib.import_module("torch.distributed.checkpoint")


def _torch_save(arrays: dict[str, Any], path: Path, *, durable: bool = False) -> None:
    import torch

    with (path.parent / f"{path.name}.pt").open("wb") as f:
        torch.save(arrays, f)
        if durable:
            f.flush()
            os.fsync(f.fileno())


def _torch_load(_: dict[str, Any], path: Path) -> Any:
    import torch

    return torch.load(path.parent / f"{path.name}.pt", weights_only=True)


def _dcp_save(arrays: dict[str, Any], path: Path, *, zstd: bool = False) -> None:
    dcp = _dcp()
    more: dict[str, Any] = {}
    if zstd:
        extension = importlib.import_module("torch.distributed.checkpoint._extension").ZStandard()
        more["storage_writer"] = dcp.FileSystemWriter(path, _extensions=[extension])
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        dcp.save(arrays, checkpoint_id=path, **more)


def _dcp_load(arrays: dict[str, Any], path: Path) -> Any:
    import torch

    dcp = _dcp()
    into = {name: torch.zeros_like(x) for name, x in arrays.items()}
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        dcp.load(into, checkpoint_id=path)
    return into


def _npz_save(arrays: dict[str, Any], path: Path) -> None:
    named: dict[str, Any] = {f"a{i}": x.numpy() for i, x in enumerate(arrays.values())}
    np.savez(path.parent / f"{path.name}.npz", **named)


def _npz_load(arrays: dict[str, Any], path: Path) -> Any:
    import torch

    with np.load(path.parent / f"{path.name}.npz") as found:
        return {name: torch.from_numpy(found[f"a{i}"]) for i, name in enumerate(arrays)}


def _moonclip(path: Path) -> Any:
    """Manager of a folder by moonclip, which writes during the call."""
    return importlib.import_module("moonclip").MoonclipManager(str(path.parent / f"{path.name}.moon"), async_save=False)


def _moonclip_save(arrays: dict[str, Any], path: Path) -> None:
    # Over an earlier snapshot it would store only changed arrays, and here nothing changes.
    shutil.rmtree(path.parent / f"{path.name}.moon", ignore_errors=True)
    _moonclip(path).save_tensors(0, arrays)


def _moonclip_load(arrays: dict[str, Any], path: Path) -> Any:
    import torch

    found = _moonclip(path).load_latest()[1]
    return {name: torch.frombuffer(found[name], dtype=x.dtype).reshape(x.shape) for name, x in arrays.items()}


OTHERS = (
    Other(TORCH, _torch_save, _torch_load),
    Other(DURABLE, lambda a, p: _torch_save(a, p, durable=True), _torch_load),
    Other(
        SAFETENSORS,
        lambda a, p: _safetensors().save_file(a, p.parent / f"{p.name}.safetensors"),
        lambda _, p: _safetensors().load_file(p.parent / f"{p.name}.safetensors"),
    ),
    Other(DCP, _dcp_save, _dcp_load),
    Other(ZSTD, lambda a, p: _dcp_save(a, p, zstd=True), _dcp_load),
    Other(NPZ, _npz_save, _npz_load),
    Other(MOONCLIP, _moonclip_save, _moonclip_load),
)


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two sets of arrays are equal bit for bit."""
    return set(a) == set(b) and all(
        x.shape == b[n].shape and x.dtype == b[n].dtype and x.numpy().tobytes() == b[n].numpy().tobytes()
        for n, x in a.items()
    )


def _throughput(pair: Pair, parameters: int, folder: Path, options: Options) -> list[Row]:
    """Save and load one state with each configuration, against the same other libraries."""
    cases = []
    for config in CONFIGS:
        for kind in ("base",) if options.quick else ("base", "delta"):
            work = _Work(pair, config, kind, folder)
            for action, make in (("save", work.save), ("load", work.load)):
                names = (FLOOR, *(o.name for o in OTHERS if action == "save" or o.name != DURABLE))
                cases.append(
                    Case(f"{action} {kind}, {config}", parameters, "MB/s", make, "cpu, all cores", None, names)
                )
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

        return self._job(call, loading=False)

    def load(self) -> Job:
        """The job of `Store.load` in a process without cached data."""
        store = self._store()
        if self.kind == "delta":
            store.save(1, self.pair.after)

        def call() -> object:
            return sp.Store(self.root, self.cfg).load(count=False)

        return self._job(call, loading=True)

    def _check(self) -> str:
        store = self._store()
        saved = store.save(1, self.pair.after)
        return check_errors(self.pair.after, sp.Store(self.root, self.cfg).load(1, count=False), saved.checkpoint)

    def _job(self, call: Callable[[], object], *, loading: bool) -> Job:
        arrays = tensors(self.pair.after)
        raw = float(sum(x.nbytes for x in arrays.values()))
        into = {name: x.clone() for name, x in arrays.items()}

        def copy() -> None:
            for name, x in arrays.items():
                into[name].copy_(x)

        peers = [Peer(FLOOR, lambda: copy)]
        for other in OTHERS:
            if loading and other.name == DURABLE:
                continue
            peers.append(Peer(other.name, lambda other=other: self._other(other, arrays, loading)))  # type: ignore[misc]
        stored = sp.compress(
            self.pair.after, sp.compress(self.pair.before, cfg=self.cfg) if self.kind == "delta" else None, self.cfg
        )
        note = f"{raw / 1e6:.0f} MB raw, ratio {stored.ratio:.2f}; {self.pair.origin}"
        return Job(call, self._check, raw, peers, note)

    def _other(self, other: Other, arrays: dict[str, Any], loading: bool) -> Callable[[], object]:
        path = self.folder / f"other-{other.name.replace(' ', '')}"
        other.save(arrays, path)
        if not equal(arrays, other.load(arrays, path)):
            raise CheckFailed(f"{other.name}: other arrays come back")
        return (lambda: other.load(arrays, path)) if loading else (lambda: other.save(arrays, path))


# ---------------------------------------------------------------------------------------------------------- memory


def _memory(pair: Pair, parameters: int, folder: Path, options: Options) -> list[Row]:
    """Memory to save and to load, in multiples of the state; a loaded state counts as one."""
    rows = []
    for action in ("save", "load"):
        name = f"memory to {action}"
        if not options.wanted(name):
            continue
        options.say(f"{name} ({parameters:,})")
        work = _Work(pair, "default", "base", folder)
        arrays = tensors(pair.after)
        raw = sum(x.nbytes for x in arrays.values())
        rounds = 1 if options.quick else options.rounds
        checked = work._check()
        ours = _median_peak((work.save() if action == "save" else work.load()).call, rounds)
        note = f"{raw / 1e6:.0f} MB raw, median of {rounds}; page cache not counted; checked: {checked}"
        for other in OTHERS:
            if other.name == DURABLE:
                continue
            peer, said = None, note
            try:
                peer = _median_peak(work._other(other, arrays, action == "load"), rounds)
            except ImportError as error:
                said = f"not measured: {lacking(str(error.name))}; {note}"
            shares = [None if n is None else n / raw for n in (ours, peer)]
            if ours is None:
                said = f"not measured: no /proc/self/clear_refs; {note}"
            rows.append(_row(name, parameters, shares[0], "x raw state", said, peer=other.name, peer_value=shares[1]))
    _clear(folder)
    return rows


def _median_peak(call: Callable[[], object], rounds: int) -> float | None:
    call()
    found = [n for n in (peak(call) for _ in range(rounds)) if n is not None]
    return statistics.median(found) if found else None


# ------------------------------------------------------------------------------------------- chains and their parts


def _moving(pair: Pair, step: int) -> Any:
    """Return the state a share of the way between the two of the pair."""

    def between(a: Any, b: Any) -> Any:
        if isinstance(a, dict):
            return {k: between(a[k], b[k]) for k in a}
        if isinstance(a, list):
            return [between(x, y) for x, y in zip(a, b, strict=True)]
        if hasattr(a, "is_floating_point") and a.is_floating_point():
            return a + (b - a) * (step / CHAIN)
        return a

    return between(pair.before, pair.after)


def _seconds(call: Callable[[], object], rounds: int) -> float:
    """Processor seconds on one thread."""
    with threads(1):
        call()
        return statistics.median(one_thread_clock()(call, 1) for _ in range(rounds))


def _restores(pair: Pair, folder: Path, options: Options) -> list[Row]:
    """Times of restoring steps of a chain of 100, and its bytes, before and after compaction."""
    rows = []
    length = 30 if options.quick else CHAIN
    for config in list(CONFIGS)[: 1 if options.quick else None]:
        name = f"restore from a chain of {length}, {config}"
        if not options.wanted(name):
            continue
        options.say(name)
        cfg = sp.Config(CONFIGS[config]().rules, chain=sp.ChainPolicy(None))
        root = folder / f"chain-{config}"
        store = sp.Store(root, cfg)
        for step in range(length):
            store.save(step, _moving(pair, step))
        # A base of the last state, to compare with.
        alone = sp.Store(folder / f"alone-{config}", cfg)
        alone.save(0, _moving(pair, length - 1))
        watched = sorted({length - 1, 15} if options.quick else {length - 1, *range(9, length, 10), 63, 80})
        expected = {step: sp.compress(store.load(step, count=False), cfg=sp.presets.lossless()).id for step in watched}
        rounds = options.rounds

        def of(step: int, store: sp.Store = store) -> Callable[[], object]:
            return lambda: sp.Store(store.url).load(step, count=False)

        def bytes_in(root: Path = root) -> int:
            return sum(p.stat().st_size for p in (root / "data").iterdir())

        one = _seconds(of(0, alone), rounds)
        before, size = _seconds(of(length - 1), 3) / one, bytes_in()
        begin = time.perf_counter()
        moved = store.compact()
        took = time.perf_counter() - begin
        store.gc()
        same = all(
            sp.compress(store.load(step, count=False), cfg=sp.presets.lossless()).id == expected[step]
            for step in watched
        )
        after: float | None = None
        if same and not store.verify():
            times = {step: (_seconds(of(step), rounds), _seconds(of(0, alone), rounds)) for step in watched}
            after = max(time / base for time, base in times.values())
        model = max(store.describe(step).restore_cost for step in store.steps())
        note = (
            f"worst of {len(watched)} steps against a base of the same state ({one * 1e3:.0f} ms), in turn; "
            f"{len(moved)} steps restated in {took:.1f} s; {size / 1e6:.1f} MB became {bytes_in() / 1e6:.1f} MB; "
            f"decoded bytes say {model:.2f} x; checked: the same bits before and after"
        )
        if not same:
            note = "CHECK FAILED: compaction changed a step"
        rows.append(
            _row(name, length, after, "x base", note, peer="before compaction", peer_value=before, target=RESTORE)
        )
    return rows


def _parts(pair: Pair, folder: Path, options: Options) -> list[Row]:
    """Rows of reading one array of a base: time and bytes against the whole."""
    name = "load one array of a base"
    if not options.wanted(name):
        return []
    options.say(name)
    store = sp.Store(folder / "parts")
    store.save(0, pair.after)
    paths = [path for path, x in data.arrays(pair.after) if x.size >= 10_000]
    path = paths[len(paths) // 2]
    part = dict(data.arrays(sp.Store(store.url).load(0, path)))
    whole = dict(data.arrays(store.load(0, count=False)))
    note = f"{path}, {whole[path].nbytes / 1e3:.0f} kB of {sum(x.nbytes for x in whole.values()) / 1e3:.0f} kB"
    if part[path].tobytes() != whole[path].tobytes():
        return [_row(name, whole[path].size, None, "ms", "CHECK FAILED: not what a whole load gives")]
    some = _seconds(lambda: sp.Store(store.url).load(0, path), 9) * 1e3
    everything = _seconds(lambda: sp.Store(store.url).load(0, count=False), 5) * 1e3
    return [
        _row(
            name,
            whole[path].size,
            some,
            "ms",
            note,
            peer="the whole state",
            peer_value=everything,
            target=at_most(everything),
        )
    ]


# ---------------------------------------------------------------------------------------------------- flipped bits


def _flips(pair: Pair, folder: Path, options: Options) -> list[Row]:
    """Count how many of 200 single flipped bits each library loads without an error."""
    name = "flipped bits that load silently"
    if not options.wanted(name):
        return []
    options.say(name)
    arrays = tensors(pair.after)
    root = folder / "flips"
    lossy, exact = sp.Store(root / "ours" / "lossy"), sp.Store(root / "ours" / "exact", sp.presets.lossless())
    lossy.save(0, pair.before)
    if not lossy.save(1, pair.after).is_delta:
        return [_row(name, FLIPS, None, "flips", "CHECK FAILED: no delta to flip bits of")]
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

    ours = _silent(groups, load)
    places = ", ".join(where)
    checked = f"of {FLIPS}, anywhere in the stored bytes (ours: {places}, with manifests); the unaltered files load"
    rows = []
    for other in OTHERS:
        if other.name == DURABLE:
            continue
        path = root / other.name / "saved"
        path.parent.mkdir(parents=True)
        try:
            other.save(arrays, path)
            files = [p for p in path.parent.rglob("*") if p.is_file()]
            silent = float(_silent([files], lambda other=other, path=path: other.load(arrays, path)))  # type: ignore[misc]
            note = checked
        except ImportError as error:
            silent, note = float("nan"), f"not measured: {lacking(str(error.name))}"
        value = None if np.isnan(silent) else silent
        rows.append(_row(name, FLIPS, float(ours), "flips", note, peer=other.name, peer_value=value, target=at_most(0)))
    return rows


def _silent(groups: list[list[Path]], load: Callable[[], object]) -> int:
    """Count the loads that raise nothing, with one bit flipped in each group of files in turn."""
    load()
    rng = np.random.default_rng(0)
    silent = 0
    for flip in range(FLIPS):
        files = groups[flip % len(groups)]
        sizes = [p.stat().st_size for p in files]
        position = int(rng.integers(0, 8 * sum(sizes)))
        at, number = position // 8, 0
        while at >= sizes[number]:
            at -= sizes[number]
            number += 1
        with files[number].open("r+b") as f:
            f.seek(at)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ (1 << position % 8)]))
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                load()
            silent += 1
        except KeyboardInterrupt:
            raise
        except BaseException:  # DCP's error is not an Exception
            pass
        finally:
            with files[number].open("r+b") as f:
                f.seek(at)
                f.write(bytes([byte]))
    return silent


def plot(rows: list[Row], path: Path) -> None:
    """Speeds next to the others', restores, flips."""
    panels = []
    for action in ("save", "load"):
        largest = max((r.size for r in rows if r.row.startswith(action + " ")), default=0)
        some = [r for r in rows if r.row.startswith(action + " ") and r.size == largest and r.value is not None]
        bars: list[tuple[str, float, float | None]] = []
        for row in some:
            if row.peer == FLOOR and row.value is not None:
                bars.append((row.row, row.value, None))
        bars += [(str(r.peer), r.peer_value, None) for r in some[: len(OTHERS) + 1] if r.peer_value is not None]
        panels.append(Bars(f"{action}, MB/s of raw state", "MB/s", bars))
    flips = [r for r in rows if r.row.startswith("flipped")]
    if flips:
        bars = [("shrinkpoint", flips[0].value or 0.0, None)]
        bars += [(str(r.peer), r.peer_value, None) for r in flips if r.peer_value is not None]
        panels.append(Bars(f"of {FLIPS} flipped bits, loaded silently", "flips", bars))
    draw(path, panels)
