"""The bench `sync`: exact deltas of bfloat16 weights, and their publication.

Five kinds of rows. *Codec*: `compress` to bytes, `decompress` and `Subscriber.update`, by the share of changed values,
against memcpy and zstd of the exclusive or, in processor time of one core; sizes also against the formats of slime and
verl. *Publishing*: publish, prepare and commit, and 1, 2 and 4 ranks that each write their shards, in processor time of
the slowest one. *Large*: a state of 2 GB, and the memory that its publication takes. *Reinforcement learning*: a small
language model trained by policy gradient on two ranks in float32 and served by two servers in bfloat16. *GPU*: changes
collected on the device, and publishing from it; open without a GPU.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shrinkpoint as sp
from shrinkpoint.codec.base import CHUNK
from shrinkpoint.kernels.sparse_delta import collect_and_locate
from shrinkpoint.trainers.publishing.ranks import Counted

from . import fresh, peers
from .harness import (
    ROUNDS,
    Call,
    CheckFailed,
    Clock,
    Device,
    Options,
    Row,
    Rows,
    at_least,
    at_most,
    cpu_clock,
    gpu,
    interleave,
    same,
    threads,
    wall_clock,
)

TITLE = "exact deltas at the speed of memory, and publishing to a model that serves"
FLOOR = "memcpy"
MASK = "BitSnap's mask"
SERVED = "bits of the served model"
TWO_CORES = "two cores, 2 %"
GPU_ROWS = {
    "gpu collect": at_least(0.35),
    **dict.fromkeys(("gpu collect and move to the host", "gpu publish", "gpu prepare", "gpu pause")),
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
    parts: dict[str, tuple[Callable[[int], list[Row]], int, int]] = {
        **{f"encode apply decode size {share.name}": (partial(_codec, share), 22, 24) for share in SHARES},
        TWO_CORES: (_two_cores, 22, 24),
        "publish prepare pause": (_publishing, 20, 23),
        "publish by ranks": (_ranks, 20, 24),
        " ".join(GPU_ROWS): (_on_gpu, 22, 28),
        "large memory": (_large, 24, 30),
    }
    for name, (measure, quick, full) in parts.items():
        if options.begins(name):
            rows += options.done(measure(1 << (quick if options.quick else full)))
    if options.wanted("reinforcement learning"):
        rows += options.done(_learning(options.quick))
    return rows


def in_turn(
    calls: Mapping[str, Call], clock: Clock, before: Mapping[str, Call], rounds: int = ROUNDS
) -> dict[str, list[float]]:
    """Return the seconds of each call, all in turn, without those of a first round.

    Args:
        calls: by name.
        clock: how to time.
        before: calls before some of them, outside of the timing.
        rounds: that count.
    """
    each = {name: (call, 1) for name, call in calls.items()}
    found = interleave(each, rounds=rounds + 1, clock=clock, budget=0.0, before=before)
    return {name: list(timing.seconds[1:]) for name, timing in found.items()}


def _codec(share: Share, n: int) -> list[Row]:
    """Measure one share of changed values: our calls, memcpy and zstd in turn, by rounds."""
    old, new = moved(n, share.rate)
    changed = float((old.view(torch.int16) != new.view(torch.int16)).float().mean())
    cfg, mask = sp.presets.lossless(), sp.presets.bitsnap()
    with threads(1), tempfile.TemporaryDirectory() as folder:
        base = sp.compress({"w": old}, cfg=cfg)
        blob = sp.compress({"w": new}, base, cfg).to_bytes()
        back = sp.decompress(sp.Checkpoint.from_bytes(blob), base)["w"]
        same("bits of the delta", back, new)
        publisher, subscriber, served = _served(folder, {"w": old})
        _published(publisher, subscriber, 1, {"w": new}, served)
        target, source = np.empty(2 * n, np.uint8), new.view(torch.uint8).numpy()

        def undo() -> None:
            served["w"].copy_(old)
            subscriber._at = subscriber._read(0)
            subscriber._held = ""
            subscriber._marks = subscriber._versions_of_tensors()

        calls: dict[str, Call] = {
            FLOOR: lambda: np.copyto(target, source),
            "encode": lambda: sp.compress({"w": new}, base, cfg).to_bytes(),
            "decode": lambda: sp.decompress(sp.Checkpoint.from_bytes(blob), base),
            "apply": subscriber.update,
            UNHASHED: lambda: subscriber.update(verify=False),
        }
        for name, other in _other_coders().items():
            calls[f"{name} of XOR"] = lambda other=other: other(_xor(old, new))  # type: ignore[misc]
        calls[MASK] = lambda: sp.compress({"w": new}, base, mask).to_bytes()
        seconds = in_turn(calls, cpu_clock, {"apply": undo, UNHASHED: undo})
    speed = {name: 2 * n / statistics.median(found) / 1e9 for name, found in seconds.items()}
    note = f"{100 * changed:.3g} % changed; memcpy {speed[FLOOR]:.3g} GB/s"
    rows = Rows(size=n, device="cpu")

    def against(name: str, peer: str, limit: float | None = None) -> None:
        ours, theirs, target = speed[name], speed[peer], None if limit is None else at_least(limit)
        rows.add(f"{name}, {share.name}", ours, "GB/s", (peer, theirs), note, ratio=ours / theirs, target=target)

    for name, limit in zip(("encode", "apply", UNHASHED, "decode"), share.targets, strict=True):
        against(name, FLOOR, limit)
    for peer in (name for name in calls if name.endswith("of XOR") or name == MASK):
        against("encode", peer)
    xor, size, ours = _xor(old, new), f"size, {share.name}", len(blob)
    taken = {f"zstd-{level} of XOR": peers.coded_size(f"zstd -{level}", [xor]) for level in (1, 3)}
    for peer, nbytes in (taken | ({} if share.rate is None else _other_formats(old, new))).items():
        rows.add(size, ours, "bytes", (peer, nbytes), note, ratio=nbytes / ours)
    if share.rate is not None:
        dense, most = _dense(old, new), at_most(1.12 if share.name == "13 %" else 1.03, "ratio")
        rows.add(size, ours, "bytes", ("every element coded", dense), note, ratio=ours / dense, target=most)
    return rows


def _other_coders() -> dict[str, Callable[[Any], object]]:
    """Coders of arrays that are installed, on one thread."""
    found: dict[str, Callable[[Any], object]] = {}
    for name in ("zstd -1", "zstd -3", "LZ4", "pcodec", "zipnn"):
        with suppress(ImportError):
            found[name.replace(" ", "")] = peers.CODERS[name](1).encode
    return found


def _other_formats(old: torch.Tensor, new: torch.Tensor) -> dict[str, int]:
    """Bytes in the formats of others: positions with values as verl does, and slime's two."""
    from shrinkpoint.trainers.publishing import delta_folders
    from shrinkpoint.trainers.publishing.subscriber import Change

    at = np.flatnonzero(_xor(old, new))
    found = {"positions and values (48 bits)": 6 * at.size}
    places = torch.from_numpy(at)
    change = Change("w", at, old[places], new[places])
    for encoding in ("xor", "overwrite"):
        found[f"slime's {encoding}"] = len(delta_folders.encode(change, 2 * old.numel(), encoding))
    return found


def _xor(old: torch.Tensor, new: torch.Tensor) -> Any:
    """Return the exclusive or of the bit patterns."""
    return (old.view(torch.int16) ^ new.view(torch.int16)).numpy().view(np.uint16)


def _dense(old: torch.Tensor, new: torch.Tensor) -> int:
    """Return the bytes of the delta with every element coded."""
    from shrinkpoint.codec.lossless import exact
    from shrinkpoint.codec.state.leaves import LeafSpec

    spec, step = LeafSpec("torch", "bfloat16", (old.numel(),)), 4 * CHUNK
    before, after = (x.view(torch.uint8).numpy() for x in (old, new))
    parts = range(0, before.size, step)
    return sum(len(exact._smallest(after[i : i + step], spec, before[i : i + step], i // 2)[1]) for i in parts)


def _two_cores(n: int) -> list[Row]:
    """Return rows of eight tensors on two threads against one, by wall clock."""
    old, new = moved(n, 5e-7)
    cfg = sp.presets.lossless()
    before, after = ({str(i): part for i, part in enumerate(x.chunk(8))} for x in (old, new))
    rows = Rows(size=n, device="cpu")
    with threads(1):
        base = sp.compress(before, cfg=cfg)
        blob = sp.compress(after, base, cfg).to_bytes()
        calls: dict[str, Call] = {
            "encode": lambda: sp.compress(after, base, cfg).to_bytes(),
            "decode": lambda: sp.decompress(sp.Checkpoint.from_bytes(blob), base),
        }
        for name, call in calls.items():
            # The least of each: other processes use these cores too.
            of = {str(count): lambda count=count: sp.set_threads(count) for count in (1, 2)}
            one, two = map(min, in_turn(dict.fromkeys(of, call), wall_clock, of, 2 * ROUNDS).values())
            load = os.getloadavg()[0]
            note = f"8 tensors; least of {2 * ROUNDS}; wall clock; load average {load:.1f}"
            first, second = (2 * n / seconds / 1e9 for seconds in (one, two))
            peer, goal = ("one core", first), at_least(1.8)
            rows.add(f"{name}, {TWO_CORES}", second, "GB/s", peer, note, ratio=one / two, target=goal)
            if load >= _IDLE:
                rows[-1] = replace(rows[-1], met=None)
    return rows


def _on_gpu(n: int) -> list[Row]:
    """Return rows of CUDA tensors; without a GPU they are open."""
    device, rows = gpu(), Rows(size=n, device="gpu")
    if device.missing:
        for name, target in GPU_ROWS.items():
            rows.add(name, None, "ms", note=f"not measured: {device.missing}", target=target)
        return rows
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
        same("bits of the changes", b.clone().index_put_((at,), values), a)
    calls: dict[str, Call] = {
        "device copy": lambda: into.copy_(new),
        "gpu collect": collect,
        "gpu collect and move to the host": lambda: [(at.cpu(), values.cpu()) for at, values in collect()],
    }
    seconds = in_turn(calls, device.clock, {})
    with tempfile.TemporaryDirectory() as folder:
        (publisher, subscriber, served), spent = _served(folder, {"w": old}), []
        for version in range(1, 2 * ROUNDS + 3):
            state = {"w": old if version % 2 == 0 else new}
            spent.append(_published(publisher, subscriber, version, state, served)[1])
    for name in spent[0]:
        seconds[f"gpu {name}"] = [times[name] for times in spent[3::2]]
    floor, rows = 1e3 * statistics.median(seconds["device copy"]), Rows(size=n, device=device.name)
    for name, target in GPU_ROWS.items():
        value = 1e3 * statistics.median(seconds[name])
        note = f"2 % changed; a copy on the device takes {floor:.3g} ms"
        rows.add(name, value, "ms", ("device copy", floor), note, ratio=floor / value, target=target)
    return rows


def _served(folder: str, state: dict[str, Any]) -> tuple[sp.Publisher, sp.Subscriber, dict[str, Any]]:
    """Publish a first version; return publisher, subscriber and the served model."""
    publisher, served = sp.Publisher(folder), {name: part.clone() for name, part in state.items()}
    publisher.publish(0, state)
    return publisher, sp.Subscriber(folder, served), served


def _published(
    publisher: sp.Publisher, subscriber: sp.Subscriber, version: int, state: dict[str, Any], served: dict[str, Any]
) -> tuple[sp.Published, dict[str, float]]:
    """Publish a version and update the model, check it, and return the seconds of both."""
    done = publisher.publish(version, state)
    subscriber.update()
    for name, part in state.items():
        same(SERVED, served[name], part)
    report = subscriber.last
    assert report is not None
    return done, {"publish": done.seconds, "prepare": report.prepare_seconds, "pause": report.pause_seconds}


def _publishing(n: int) -> list[Row]:
    """Return rows of milliseconds to publish and prepare, and of the pause."""
    _, new = moved(n, None)
    spent, rows = [], Rows(size=n, device="cpu")
    g = torch.Generator().manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        state = {str(i): part.clone() for i, part in enumerate(torch.split(new, 1 << 20))}
        publisher, subscriber, served = _served(folder, state)
        for version in range(1, ROUNDS + 2):
            for part in state.values():
                part.view(torch.int16)[torch.rand(part.shape, generator=g) < 0.01] += 1
            done, times = _published(publisher, subscriber, version, state, served)
            spent.append(times)
    note = f"1 % changed; {done.raw_bytes / done.nbytes:.0f} times smaller than the model; wall clock"
    for name in spent[0]:
        rows.add(name, 1e3 * statistics.median(times[name] for times in spent[1:]), "ms", note=note)
    return rows


def _ranks(n: int) -> list[Row]:
    """Return rows of the slowest rank of 1, 2 and 4, each with some rows of a matrix."""
    g, rows = torch.Generator().manual_seed(1), Rows(size=n, device="cpu")
    _, first = moved(n, None)
    whole = first.reshape(-1, 1024)
    for count in (1, 2, 4):
        size, rounds = whole.shape[0] // count, []
        state, served = whole.clone(), {"w": torch.zeros_like(whole)}
        with tempfile.TemporaryDirectory() as folder, threads(1), ThreadPoolExecutor(count) as pool:
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
                same(SERVED, served["w"], state)
                rounds.append((max(seconds for seconds, _ in found), found[0][1].nbytes))
                state.view(torch.int16)[torch.rand(state.shape, generator=g) < 0.01] += 1
        seconds, nbytes = (statistics.median(values) for values in zip(*rounds[2:], strict=True))
        note = f"1 % changed, {nbytes:.0f} bytes; processor time of the slowest rank; no gather"
        rows.add(f"publish, {count} rank{'s' * (count > 1)}", 1e3 * seconds, "ms", note=note)
    return rows


def large_child(n: int) -> dict[str, Any]:
    """Publish a large state three times in this process; return seconds, bytes and extra memory."""
    import resource

    def most() -> int:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def publish(publisher: sp.Publisher, version: int, state: dict[str, torch.Tensor]) -> tuple[float, int]:
        begin = time.perf_counter()
        done = publisher.publish(version, state)
        spent = time.perf_counter() - begin
        for part in state.values():
            part.view(torch.int16)[version::100] += 1
        return spent, done.nbytes

    g = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:  # compiles the kernels
        publisher, small = sp.Publisher(folder), {"w": torch.randn(1 << 21, generator=g).bfloat16()}
        for version in range(2):
            publish(publisher, version, small)
    state = {str(i): (0.02 * torch.randn(n // 64, generator=g)).bfloat16() for i in range(64)}
    before = most()
    with tempfile.TemporaryDirectory() as folder:
        publisher = sp.Publisher(folder, base_every=2)
        found = [publish(publisher, version, state) for version in range(3)]  # a base, a delta, and both
    times, sizes = zip(*found, strict=True)
    return {"times": times, "bytes": sizes[-1], "extra": (most() - before - 2 * n) / 2**20}


def _large(n: int) -> list[Row]:
    """Return rows of a large state: seconds, and memory in addition to the state and a copy."""
    found, rows = fresh.call("shrinkpoint.bench.sync:large_child", n), Rows(size=n, device="cpu")
    smaller = 2 * n / found["bytes"]
    note = f"{n / 1e9:.2g} B parameters, 1 % changed; {smaller:.0f} times smaller than the model; wall clock"
    for what, seconds in zip(("base", "delta", "delta and base"), found["times"], strict=True):
        rows.add(f"large, {what}", seconds, "s", note=note)
    note = "memory in addition to the state and one previous copy"
    rows.add("large, memory", found["extra"], "MiB", note=note, target=at_most(640.0))
    return rows


def _learning(quick: bool) -> list[Row]:
    """Run the example of reinforcement learning, and return rows of its costs."""
    home = Path(__file__).resolve().parents[1] / "examples"
    paths = os.pathsep.join(os.path.abspath(path) for path in (str(home), *sys.path))
    with tempfile.TemporaryDirectory() as folder:
        found = fresh.call("rl_sync:main", folder, *((3, 64) if quick else (8, 256)), PYTHONPATH=paths)
    rows = Rows("", found["parameters"], "cpu")
    size, peer = found["bytes"], found["zstd-1 of XOR"]
    note = f"{100 * found['changed']:.3g} % changed a version; {'equal' if found['equal'] else 'DIFFERENT'} logits"
    name, most = "reinforcement learning, bytes a sync", at_most(1.0, "ratio")
    rows.add(name, size, "bytes", ("zstd-1 of XOR", peer), note, ratio=size / peer, target=most)
    rows[0] = replace(rows[0], met=found["equal"] and rows[0].met)
    for name in ("publish", "prepare", "pause"):
        rows.add(f"reinforcement learning, {name}", found[f"{name} ms"], "ms", note=note)
    return rows
