"""The bench `sync`: exact deltas of bfloat16 weights, and their publication.

Five kinds of rows. *Codec*: `compress` to bytes, `decompress` and `Subscriber.update`, by the share of changed values,
against memcpy and zstd of the exclusive or, in processor time of one core; sizes also against the formats of slime and
verl. *Publishing*: publish, prepare and commit, and 1, 2 and 4 ranks that each write their shards, in processor time of
the slowest one. *Large*: a state of 2 GB, and the memory that its publication takes. *Reinforcement learning*: a small
language model trained by policy gradient on two ranks in float32 and served by two servers in bfloat16. *GPU*: changes
collected on the device, and publishing from it; open without a GPU.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import zstandard

import shrinkpoint as sp
from shrinkpoint.codec.base import CHUNK
from shrinkpoint.kernels.sparse_delta import collect_and_locate
from shrinkpoint.trainers.publishing.ranks import Counted

from .devices import Device, gpu
from .harness import ROUNDS, CheckFailed, Options, Row, Target, at_least, at_most, cpu_clock
from .peers import library
from .plot import Bars, draw

TITLE = "exact deltas at the speed of memory, and publishing to a model that serves"
FLOOR = "memcpy"
MASK = "BitSnap's mask"
TWO_CORES = "two cores, 2 %"
GPU_ROWS = {
    "gpu collect": ">= 0.35 x",
    "gpu collect and move to the host": None,
    "gpu publish": None,
    "gpu prepare": None,
    "gpu pause": None,
}
"""Rows of CUDA tensors with 2 % changed, and their targets: collecting reads twice what a copy on the device does."""
_IDLE = 1.5
"""Load average below which a comparison of one and two cores says something."""
UNHASHED = "apply without a hash"
"""The update of a subscriber that trusts that nobody else wrote to the model."""


@dataclass(frozen=True, slots=True)
class Share:
    """Cases of changed values as multiples of memcpy: encode, apply in place, decode.

    Args:
        name: of the share.
        rate: learning rate that changes about so many values; None: nothing changes.
        targets: encode, apply with and without a hash, decode; None without a target.
    """

    name: str
    rate: float | None
    targets: tuple[float, float, float | None, float | None]


SHARES = (
    Share("unchanged", None, (0.5, 0.8, None, None)),
    Share("0.3 %", 6e-8, (0.5, 0.45, 0.8, 0.4)),
    Share("2 %", 5e-7, (0.35, 0.3, 0.8, 0.2)),
    Share("5 %", 1.35e-6, (0.18, 0.2, 0.8, 0.12)),
    Share("13 %", 4.7e-6, (0.08, 0.1, None, None)),
)


def moved(n: int, rate: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal weights as bfloat16, before and after one step of Adam at this learning rate."""
    g = torch.Generator().manual_seed(0)
    w = 0.02 * torch.randn(n, generator=g)
    if rate is None:
        return w.bfloat16(), w.bfloat16()
    m, v = torch.randn(n, generator=g), torch.randn(n, generator=g).abs() + 0.3
    return w.bfloat16(), (w - rate * m / v).bfloat16()


def run(options: Options) -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    n = 1 << 22 if options.quick else 1 << 24
    for share in SHARES:
        if options.wanted(f"encode apply decode size {share.name}"):
            options.say(f"{share.name} of {n / 1e6:.0f} M values")
            rows += options.done(_codec(share, n))
    if options.wanted(TWO_CORES):
        rows += options.done(_two_cores(n))
    if options.wanted("publish prepare pause"):
        rows += options.done(_publishing(1 << 20 if options.quick else 1 << 23))
    if options.wanted("publish by ranks"):
        rows += options.done(_ranks(1 << 20 if options.quick else 1 << 24))
    if options.wanted(" ".join(GPU_ROWS)):
        rows += options.done(_on_gpu(1 << 22 if options.quick else 1 << 28))
    if options.wanted("large memory"):
        rows += options.done(_large(1 << 24 if options.quick else 1 << 30))
    if options.wanted("reinforcement learning"):
        rows += options.done(_learning(options.quick))
    return rows


def _codec(share: Share, n: int) -> list[Row]:
    """Measure one share of changed values: our calls, memcpy and zstd in turn, by rounds."""
    old, new = moved(n, share.rate)
    changed = float((old.view(torch.int16) != new.view(torch.int16)).float().mean())
    cfg = sp.presets.lossless()
    with _one_thread():
        base = sp.compress({"w": old}, cfg=cfg)
        blob = sp.compress({"w": new}, base, cfg).to_bytes()
        back = sp.decompress(sp.Checkpoint.from_bytes(blob), base)["w"]
        if not torch.equal(back.view(torch.int16), new.view(torch.int16)):
            raise CheckFailed("the delta does not give the same bits")
        with tempfile.TemporaryDirectory() as folder:
            publisher, served = sp.Publisher(folder), {"w": old.clone()}
            publisher.publish(0, {"w": old})
            subscriber = sp.Subscriber(folder, served)
            publisher.publish(1, {"w": new})
            subscriber.update()
            if not torch.equal(served["w"].view(torch.int16), new.view(torch.int16)):
                raise CheckFailed("the served bits are not the published ones")
            target, xor, parent = np.empty(2 * n, np.uint8), _xor(old, new), served["w"].copy_(old)
            source = new.view(torch.uint8).numpy()
            calls: dict[str, Callable[[], object]] = {
                FLOOR: lambda: np.copyto(target, source),
                "encode": lambda: sp.compress({"w": new}, base, cfg).to_bytes(),
                "decode": lambda: sp.decompress(sp.Checkpoint.from_bytes(blob), base),
                "apply": subscriber.update,
                UNHASHED: lambda: subscriber.update(verify=False),
            }
            for level in (1, 3):
                coder = zstandard.ZstdCompressor(level=level)
                calls[f"zstd-{level} of XOR"] = lambda coder=coder: coder.compress(_xor(old, new))  # type: ignore[misc]
            for name, other in _other_coders().items():
                calls[f"{name} of XOR"] = lambda other=other: other(_xor(old, new))  # type: ignore[misc]
            mask = sp.presets.bitsnap()
            calls[MASK] = lambda: sp.compress({"w": new}, base, mask).to_bytes()
            seconds: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(ROUNDS + 1):
                for name, call in calls.items():
                    # The applied changes are undone, outside of the timing.
                    if name in ("apply", UNHASHED):
                        parent.copy_(old)
                        subscriber._at = subscriber._read(0)
                        subscriber._held = ""
                        subscriber._marks = subscriber._versions_of_tensors()
                    seconds[name].append(cpu_clock(call, 1))
    median = {name: statistics.median(found[1:]) for name, found in seconds.items()}
    peers = {level: len(zstandard.ZstdCompressor(level=level).compress(xor)) for level in (1, 3)}
    note = f"{100 * changed:.3g} % changed; memcpy {2 * n / median[FLOOR] / 1e9:.3g} GB/s"
    rows = []
    for name, limit in zip(("encode", "apply", UNHASHED, "decode"), share.targets, strict=True):
        goal = None if limit is None else at_least(limit)
        ours, floor = (2 * n / median[key] / 1e9 for key in (name, FLOOR))
        rows.append(_row(f"{name}, {share.name}", n, ours, floor, goal, note))
    for peer in (name for name in calls if name.endswith("of XOR") or name == MASK):
        speed = 2 * n / median[peer] / 1e9
        rows.append(_row(f"encode, {share.name}", n, 2 * n / median["encode"] / 1e9, speed, None, note, peer))
    for level in (1, 3):
        peer = f"zstd-{level} of XOR"
        size = f"size, {share.name}"
        ratio = peers[level] / len(blob)
        rows.append(Row(size, "cpu", n, len(blob), "bytes", peer, peers[level], ratio, None, None, note))
    for peer, taken in _other_formats(old, new).items():
        values = (len(blob), "bytes", peer, taken, taken / len(blob))
        rows.append(Row(f"size, {share.name}", "cpu", n, *values, None, None, note))
    dense = _dense(old, new)
    if dense is not None:
        limit = 1.12 if share.name == "13 %" else 1.03
        ratio, target_ = len(blob) / dense, Target(limit, "ratio", least=False)
        text, met = target_.text("bytes"), target_.met(None, ratio)
        name = "every element coded"
        rows.append(Row(f"size, {share.name}", "cpu", n, len(blob), "bytes", name, dense, ratio, text, met, note))
    return rows


def _other_coders() -> dict[str, Callable[[bytes], object]]:
    """Coders of bytes that are installed, on one thread."""
    found: dict[str, Callable[[bytes], object]] = {}
    with suppress(ImportError):
        found["LZ4"] = library("lz4.frame").compress
    with suppress(ImportError):
        standalone, config = library("pcodec.standalone"), library("pcodec").ChunkConfig()
        found["pcodec"] = lambda data: standalone.simple_compress(np.frombuffer(data, np.uint16), config)
    with suppress(ImportError):
        zipnn = library("zipnn").ZipNN(input_format="byte", bytearray_dtype="bfloat16", threads=1)
        found["zipnn"] = lambda data: zipnn.compress(bytearray(data))
    return found


def _other_formats(old: torch.Tensor, new: torch.Tensor) -> dict[str, int]:
    """Bytes in the formats of others: positions with values as verl does, and slime's two."""
    from shrinkpoint.trainers.publishing import delta_folders
    from shrinkpoint.trainers.publishing.host_copy import Change

    at = np.flatnonzero(old.view(torch.int16).numpy() != new.view(torch.int16).numpy())
    if not at.size:
        return {}
    found = {"positions and values (48 bits)": 6 * at.size}
    places = torch.from_numpy(at)
    change = Change("w", at, old[places], new[places])
    for encoding in ("xor", "overwrite"):
        found[f"slime's {encoding}"] = len(delta_folders.encode(change, 2 * old.numel(), encoding))
    return found


def _xor(old: torch.Tensor, new: torch.Tensor) -> bytes:
    """The exclusive or of two byte strings."""
    return (old.view(torch.int16) ^ new.view(torch.int16)).numpy().tobytes()


def _dense(old: torch.Tensor, new: torch.Tensor) -> int | None:
    """Return the bytes of the delta with every element coded; None if nothing changed."""
    from shrinkpoint.codec.base import CHUNK
    from shrinkpoint.codec.lossless import exact
    from shrinkpoint.codec.state.leaves import LeafSpec

    if torch.equal(old.view(torch.int16), new.view(torch.int16)):
        return None
    spec, step = LeafSpec("torch", "bfloat16", (old.numel(),)), 4 * CHUNK
    before, after = (x.view(torch.uint8).numpy() for x in (old, new))
    parts = range(0, before.size, step)
    return sum(len(exact._smallest(after[i : i + step], spec, before[i : i + step], i // 2)[1]) for i in parts)


@contextmanager
def _one_thread() -> Iterator[None]:
    before, own = sp.threads(), torch.get_num_threads()
    sp.set_threads(1)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        sp.set_threads(before)
        torch.set_num_threads(own)


def _row(name: str, n: int, value: float, peer_value: float, goal: Target | None, note: str, peer: str = FLOOR) -> Row:
    ratio = value / peer_value
    met = None if goal is None else goal.met(value, ratio)
    text = None if goal is None else goal.text("GB/s")
    return Row(name, "cpu", n, value, "GB/s", peer, peer_value, ratio, text, met, note)


def _two_cores(n: int) -> list[Row]:
    """Return rows of eight tensors on two threads against one, by wall clock."""
    old, new = moved(n, 5e-7)
    cfg = sp.presets.lossless()
    before, after = ({str(i): part for i, part in enumerate(x.chunk(8))} for x in (old, new))
    rows = []
    with _one_thread():
        base = sp.compress(before, cfg=cfg)
        blob = sp.compress(after, base, cfg).to_bytes()
        calls: dict[str, Callable[[], object]] = {
            "encode": lambda: sp.compress(after, base, cfg).to_bytes(),
            "decode": lambda: sp.decompress(sp.Checkpoint.from_bytes(blob), base),
        }
        for name, call in calls.items():
            seconds: dict[int, list[float]] = {1: [], 2: []}
            for _ in range(2 * ROUNDS + 1):
                for count, found in seconds.items():
                    sp.set_threads(count)
                    begin = time.perf_counter()
                    call()
                    found.append(time.perf_counter() - begin)
            # The least of each: other processes use these cores too.
            one, two = (min(found[1:]) for found in seconds.values())
            goal = at_least(1.8)
            load = os.getloadavg()[0]
            note = f"8 tensors; least of {2 * ROUNDS}; wall clock; load average {load:.1f}"
            met = goal.met(None, one / two) if load < _IDLE else None
            values = (2 * n / two / 1e9, "GB/s", "one core", 2 * n / one / 1e9, one / two, goal.text("GB/s"))
            rows.append(Row(f"{name}, {TWO_CORES}", "cpu", n, *values, met, note))
    return rows


def _on_gpu(n: int) -> list[Row]:
    """Return rows of CUDA tensors; without a GPU they are open."""
    device = gpu()
    if device.missing:
        return [
            Row(name, "gpu", n, None, "ms", target=target, note=f"not measured: {device.missing}")
            for name, target in GPU_ROWS.items()
        ]
    old, new = moved(n, 5e-7)
    return _device_rows(old.cuda(), new.cuda(), device)


def _device_rows(old: torch.Tensor, new: torch.Tensor, device: Device) -> list[Row]:
    """Measure the rows of `_on_gpu` for tensors on a device."""
    n = new.numel()
    step, limit = CHUNK * 2, CHUNK // 2
    parts = [(new[i : i + step], old[i : i + step]) for i in range(0, n, step)]
    into = torch.empty_like(new)

    def collect() -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = [collect_and_locate(a, b, limit=limit) for a, b in parts]
        if any(one is None for one in found):
            raise CheckFailed("too many changes")
        return [(one[1], one[2]) for one in found if one is not None]

    for (a, b), (at, values) in zip(parts, collect(), strict=True):
        if not torch.equal(b.clone().index_put_((at,), values).view(torch.int16), a.view(torch.int16)):
            raise CheckFailed("the changes do not give the same bits")
    calls: dict[str, Callable[[], object]] = {
        "device copy": lambda: into.copy_(new),
        "gpu collect": collect,
        "gpu collect and move to the host": lambda: [(at.cpu(), values.cpu()) for at, values in collect()],
    }
    seconds: dict[str, list[float]] = {name: [] for name in [*calls, "gpu publish", "gpu prepare", "gpu pause"]}
    with tempfile.TemporaryDirectory() as folder:
        publisher, served = sp.Publisher(folder), {"w": old.clone()}
        publisher.publish(0, {"w": old})
        subscriber, version = sp.Subscriber(folder, served), 0
        for _ in range(ROUNDS + 1):
            for name, call in calls.items():
                seconds[name].append(device.clock(call, 1))
            for state in (new, old):
                version += 1
                done = publisher.publish(version, {"w": state})
                subscriber.update()
                if not torch.equal(served["w"].view(torch.int16), state.view(torch.int16)):
                    raise CheckFailed("the served bits are not the published ones")
            report = subscriber.last
            assert report is not None
            seconds["gpu publish"].append(done.seconds)
            seconds["gpu prepare"].append(report.prepare_seconds)
            seconds["gpu pause"].append(report.pause_seconds)
    median = {name: 1e3 * statistics.median(found[1:]) for name, found in seconds.items()}
    floor, rows = median["device copy"], []
    for name, text in GPU_ROWS.items():
        ratio = floor / median[name]
        met = None if text is None else at_least(float(text.split()[1])).met(None, ratio)
        note = f"2 % changed; a copy on the device takes {floor:.3g} ms"
        rows.append(Row(name, device.name, n, median[name], "ms", "device copy", floor, ratio, text, met, note))
    return rows


def _publishing(n: int) -> list[Row]:
    """Return rows of milliseconds to publish and prepare, and of the pause."""
    _, new = moved(n, None)
    rows, times = [], {"publish": [], "prepare": [], "pause": []}  # type: ignore[var-annotated]
    g = torch.Generator().manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        publisher = sp.Publisher(folder)
        state = {str(i): part.clone() for i, part in enumerate(torch.split(new, 1 << 20))}
        served = {name: part.clone() for name, part in state.items()}
        publisher.publish(0, state)
        subscriber = sp.Subscriber(folder, served)
        for version in range(1, ROUNDS + 2):
            for part in state.values():
                part.view(torch.int16)[torch.rand(part.shape, generator=g) < 0.01] += 1
            done = publisher.publish(version, state)
            subscriber.update()
            if not all(torch.equal(state[k].view(torch.int16), served[k].view(torch.int16)) for k in state):
                raise CheckFailed("the served bits are not the published ones")
            report = subscriber.last
            assert report is not None
            times["publish"].append(1e3 * done.seconds)
            times["prepare"].append(1e3 * report.prepare_seconds)
            times["pause"].append(1e3 * report.pause_seconds)
    note = f"1 % changed; {done.raw_bytes / done.nbytes:.0f} times smaller than the model; wall clock"
    for name, found in times.items():
        rows.append(Row(name, "cpu", n, statistics.median(found[1:]), "ms", note=note))
    return rows


def _ranks(n: int) -> list[Row]:
    """Return rows of the slowest rank of 1, 2 and 4, each with some rows of a matrix."""
    g, rows = torch.Generator().manual_seed(1), []
    _, first = moved(n, None)
    whole = first.reshape(-1, 1024)
    for count in (1, 2, 4):
        size, rounds = whole.shape[0] // count, []
        state, served = whole.clone(), {"w": torch.zeros_like(whole)}
        with tempfile.TemporaryDirectory() as folder, _one_thread(), ThreadPoolExecutor(count) as pool:
            parts = [sp.Publisher(folder, ranks=Counted(i, count, "bench")) for i in range(count)]
            subscriber = sp.Subscriber(folder, served)

            def publish(i: int, version: int) -> tuple[float, sp.Published]:
                box = (slice(i * size, (i + 1) * size), slice(0, 1024))  # noqa: B023
                begin = time.thread_time()
                shards = {"w": ("w", tuple(state.shape), box)}  # noqa: B023
                done = parts[i].publish(version, {"w": state[box]}, shards=shards)  # noqa: B023
                return time.thread_time() - begin, done

            for version in range(ROUNDS + 2):
                found = [r.result() for r in [pool.submit(publish, i, version) for i in range(count)]]
                subscriber.update(version=version)
                if not torch.equal(served["w"].view(torch.int16), state.view(torch.int16)):
                    raise CheckFailed("the served bits are not the published ones")
                rounds.append((max(seconds for seconds, _ in found), found[0][1].nbytes))
                state.view(torch.int16)[torch.rand(state.shape, generator=g) < 0.01] += 1
        seconds, nbytes = (statistics.median(values) for values in zip(*rounds[2:], strict=True))
        note = f"1 % changed, {nbytes:.0f} bytes; processor time of the slowest rank; no gather"
        name = f"publish, {count} rank{'s' * (count > 1)}"
        rows.append(Row(name, "cpu", n, 1e3 * seconds, "ms", None, None, None, None, None, note))
    return rows


_LARGE_RUN = """
import json, resource, sys, tempfile, time, torch, shrinkpoint as sp
def most(): return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
n = int(sys.argv[1]); g = torch.Generator().manual_seed(0)
warm = tempfile.TemporaryDirectory()
with warm as folder:  # compiles the kernels
    publisher, small = sp.Publisher(folder), {"w": torch.randn(1 << 21, generator=g).bfloat16()}
    for version in range(2):
        publisher.publish(version, small)
        small["w"].view(torch.int16)[::100] += 1
state = {str(i): (0.02 * torch.randn(n // 64, generator=g)).bfloat16() for i in range(64)}
raw = 2 * n
before, times = most(), []
with tempfile.TemporaryDirectory() as folder:
    publisher = sp.Publisher(folder, base_every=2)
    for version in range(3):  # a base, a delta, and both
        begin = time.perf_counter()
        done = publisher.publish(version, state)
        times.append(time.perf_counter() - begin)
        for part in state.values():
            part.view(torch.int16)[version::100] += 1
print(json.dumps({"times": times, "bytes": done.nbytes, "extra": (most() - before - raw) / 2**20}))
"""


def _large(n: int) -> list[Row]:
    """Return rows of a large state: seconds, and memory in addition to the state and a copy."""
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", _LARGE_RUN, str(n)],
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    times = 2 * n / found["bytes"]
    note = f"{n / 1e9:.2g} B parameters, 1 % changed; {times:.0f} times smaller than the model; wall clock"
    goal = at_most(640.0)
    rows = [
        Row(f"large, {what}", "cpu", n, seconds, "s", None, None, None, None, None, note)
        for what, seconds in zip(("base", "delta", "delta and base"), found["times"], strict=True)
    ]
    extra = found["extra"]
    note = "memory in addition to the state and one previous copy"
    met = goal.met(extra, None)
    return [*rows, Row("large, memory", "cpu", n, extra, "MiB", None, None, None, goal.text("MiB"), met, note)]


def _learning(quick: bool) -> list[Row]:
    """Run the example of reinforcement learning, and return rows of its costs."""
    home = Path(__file__).resolve().parents[1] / "examples"
    given = f"versions={3 if quick else 8}, width={64 if quick else 256}"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", f"import json, rl_sync; print(json.dumps(rl_sync.main({folder!r}, {given})))"],
            cwd=home,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    found = json.loads(done.stdout.splitlines()[-1])
    n, rows = found["parameters"], []
    size, peer = found["bytes"], found["zstd-1 of XOR"]
    note = f"{100 * found['changed']:.3g} % changed a version; {'equal' if found['equal'] else 'DIFFERENT'} logits"
    goal = at_most(1.0, "ratio")
    rows.append(
        Row(
            *("reinforcement learning, bytes a sync", "cpu", n, size, "bytes", "zstd-1 of XOR", peer),
            *(size / peer, goal.text("bytes"), found["equal"] and goal.met(size, size / peer), note),
        )
    )
    for name in ("publish", "prepare", "pause"):
        value = found[f"{name} ms"]
        rows.append(Row(f"reinforcement learning, {name}", "cpu", n, value, "ms", note=note))
    return rows


def plot(rows: list[Row], path: Path) -> None:
    """Speed relative to memcpy by share."""
    bars = [(r.row, r.ratio, _limit(r)) for r in rows if r.peer == FLOOR and r.ratio is not None]
    draw(path, [Bars("speed of exact deltas, share of memcpy (mark: target)", "x memcpy", bars)])


def _limit(row: Row) -> float | None:
    """The number in a target's text."""
    return None if row.target is None else float(row.target.split()[1])
