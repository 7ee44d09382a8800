"""The bench `trainers`: the cost of checkpoints in each framework against its own.

A small network is trained without checkpoints, with the framework's own, and with this package's, in turn. Exactness:
a run that was stopped at half and resumed from a lossless checkpoint ends with the weights of one that was not, bit for
bit; nothing else of a framework is reported where it does not. The change of loss is that of the same stop and resume
with the default configuration. Ranks: the same state of one size, cut over 1, 2 and 4 processes over gloo.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import shrinkpoint as sp

from . import frameworks, fresh
from .frameworks import FRAMEWORKS, Job, Outcome, saved_bytes
from .harness import CheckFailed, Options, Row, Rows, at_most, times_smaller

TITLE = "checkpoints in trainers, against each framework's own"
DEVICE = "cpu, training on 1 thread"
QUICK = ("plain loop", "DCP")
ROUNDS = 5
"""Trainings of each kind; a stall is the median over all saves of all of them, 20 or more in the full form."""
DIFFERENT = at_most(0)


def run(options: Options) -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    for name in FRAMEWORKS:
        if not options.begins(name):
            continue
        found = Rows(name, device=DEVICE)
        if options.quick and name not in QUICK:
            found.add("", None, "ms", note="not measured: --quick")
            rows += found
            continue
        try:
            found += _framework(name, options)
        except ImportError as error:
            found.add("", None, "ms", note=f"not measured: {error.name or error} is not installed")
        except CheckFailed as error:
            found.add("resume, lossless", None, "weights", note=f"CHECK FAILED: {error}", target=DIFFERENT)
            found[-1] = replace(found[-1], met=False)
        rows += options.done(found)
    if options.wanted("ranks"):
        rows += _ranks(options)
    return rows


def _framework(name: str, options: Options) -> list[Row]:
    """Rows of one framework: exactness first, which fails for all."""
    width, steps, every = (192, 240, 120) if options.quick else (1280, 240, 60)
    about = FRAMEWORKS[name]

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)

        def train(what: str, how: str, to: int, cfg: sp.Config | None = None, *, timed: bool = False) -> Outcome:
            job = Job(root / what, how, sp.Config() if cfg is None else cfg, to, every, width, timed)
            return frameworks.run(name, job)

        half = steps // 2 // every * every
        whole = train("whole", "none", steps)
        rows = Rows(name, sum(w.numel() for w in whole.weights), DEVICE)
        train("exact", "ours", half, sp.presets.lossless())
        different = _different(train("exact", "ours", steps, sp.presets.lossless()).weights, whole.weights)
        if different:
            raise CheckFailed(f"{name}: {different} of {rows.size} weights differ after a lossless resume")
        train("lossy", "ours", half)
        lossy = frameworks.held_out_loss(train("lossy", "ours", steps).weights, width)
        loss = frameworks.held_out_loss(whole.weights, width)

        taken: dict[str, list[Outcome]] = {"none": [], "own": [], "ours": []}
        nbytes: dict[str, float] = {}
        for number in range(1 if options.quick else ROUNDS):
            for how in ("own", "ours", "none")[number % 3 :] + ("own", "ours", "none")[: number % 3]:
                what = f"{how}-{number}"
                taken[how].append(train(what, how, steps, timed=True))
                if how != "none":
                    nbytes[how] = saved_bytes(root / what) / taken[how][-1].saves
    ours, own = (taken[how] for how in ("ours", "own"))
    seconds, saves = median(one.seconds for one in taken["none"]), sum(len(one.stalls) for one in ours)
    over = {how: _overhead(found, taken["none"]) for how, found in (("ours", ours), (about.peer, own))}
    said = f"{steps} steps of {seconds / steps * 1e3:.1f} ms, a save every {every}; {saves} saves"
    waited = [s for one in ours for s in one.waited]

    def against(what: str, unit: str, note: str, value: float | None, peer: float | None) -> None:
        ratio = times_smaller(value, peer) if value and peer and value > 0 and peer > 0 else None
        rows.add(what, value, unit, (about.peer, peer), note, ratio=ratio)

    stalls = (1e3 * median(s for one in found for s in one.stalls) for found in (ours, own))
    stalled = f"{said}; of it {median(waited) * 1e3:.1f} ms waiting for the save before" if waited else said
    against("stall of a save", "ms", stalled, *stalls)
    spent = "; ".join(f"{who}: {_spread(found)}" for who, found in over.items())
    made = _made_of(ours, seconds, median(over["ours"]))
    against("overhead of the run", "%", f"{said}; {spent}; {made}", *map(_told, over.values()))
    note = f"the folder over its saves, the base among them; {saves} saves"
    against("bytes of a save", "bytes", note, nbytes["ours"], nbytes["own"])
    lines = (sum(1 for line in text.splitlines() if line.strip()) for text in (about.ours, about.own))
    against("lines", "lines", about.ours.replace("\n", "; "), *lines)
    exact = f"stopped after {half} of {steps} steps and resumed, every weight compared bit for bit; {about.drawn}"
    rows.add("resume, lossless", different, "weights", note=f"weights that differ; {exact}", target=DIFFERENT)
    changed = f"held-out loss {lossy:.5g} against {loss:.5g} uninterrupted; Config(); one seed"
    rows.add("loss after a lossy resume", 100 * (lossy / loss - 1), "%", note=changed)
    return rows


def _overhead(found: list[Outcome], none: list[Outcome]) -> list[float]:
    """Percent by which each training took longer than the one of its round without checkpoints."""
    return [100 * (a.seconds / b.seconds - 1) for a, b in zip(found, none, strict=True)]


def _told(over: list[float]) -> float | None:
    """Return the median of the rounds; None if their signs differ."""
    return None if min(over) < 0 < max(over) else median(over)


def _spread(over: list[float]) -> str:
    if len(over) == 1:
        return "one training each"
    text = f"median {median(over):+.1f} % of {len(over)} rounds, {min(over):+.1f} to {max(over):+.1f} %"
    return text if _told(over) is not None else f"{text}, not to be told from noise"


def _made_of(found: list[Outcome], seconds: float, over: float) -> str:
    """Return the parts of the time: calls, the end, and the worker's share."""
    calls = 100 * median([sum(one.stalls) for one in found]) / seconds
    closing = 100 * median([one.closing for one in found]) / seconds
    rest = over - calls - closing
    return f"of ours {calls:.1f} % in the calls of save, {closing:.1f} % after the last step, {rest:+.1f} % beside them"


def _different(found: list[torch.Tensor], expected: list[torch.Tensor]) -> int:
    """Number of weights whose bits differ."""
    pairs = zip(found, expected, strict=True)
    return sum(int((a.view(torch.int32) != b.contiguous().view(torch.int32)).sum()) for a, b in pairs)


# ------------------------------------------------------------------------------------------- saves by several processes

SAVES = 5
_LAYERS = 8


def ranked(world: int, parameters: int) -> dict[str, Any]:
    """Return seconds, bytes and metadata bytes of a save by some ranks, ours and torch's.

    Args:
        world: number of processes, 1 or more.
        parameters: weights of the whole state; two moments each come on top.

    Raises:
        ValueError: a process failed; its last words are in the message.
    """
    found: dict[str, Any] = fresh.ranks("shrinkpoint.bench.trainers:rank", world, parameters, seconds=600)[0]
    return found


def _ranks(options: Options) -> list[Row]:
    """Rows of several processes on this machine."""
    rows = Rows(size=8_000_000, device=DEVICE)
    for world in (1, 2, 4):
        rows.start = f"DCP, {world} ranks"
        if options.quick:
            rows.add("save", None, "s", note="not measured: --quick")
            continue
        options.say(f"{world} ranks")
        found = ranked(world, rows.size)
        said = (
            f"{world} processes over gloo, one thread each; {rows.size:,} weights with AdamW's moments; deltas, lossy"
        )
        for what, unit, key, more in (
            ("save", "s", "seconds", f"; the slowest rank, median of {found['saves']} saves"),
            ("bytes of a save", "bytes", "nbytes", "; the last save's own files"),
            ("metadata", "bytes", "metadata", ""),
        ):
            value, peer = found["ours"][key], found["own"][key]
            ratio = times_smaller(value, peer)
            rows.add(what, value, unit, ("FileSystemWriter", peer), said + more, ratio=ratio)
    return rows


def rank(meeting: str, world: int, number: int, parameters: int) -> dict[str, Any] | None:
    """Run one rank; the first one returns the figures."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh

    from shrinkpoint.trainers.dcp import Reader, Writer

    warnings.simplefilter("ignore")
    folder, answer = Path(meeting), None
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=number, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    seconds: dict[str, list[float]] = {"ours": [], "own": []}
    writer = Writer()
    state = _first(mesh, parameters)
    for save_number in range(SAVES + 1):
        for how in ("ours", "own") if save_number % 2 else ("own", "ours"):
            where = folder / f"{how}-{save_number}"
            storage = writer if how == "ours" else FileSystemWriter(where)
            dist.barrier()
            begin = time.perf_counter()
            save(state, storage_writer=storage, checkpoint_id=where)
            slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if save_number:  # the first is a base, and pays for loading
                seconds[how].append(float(slowest))
        _drift(state)
    if number == 0:
        answer = dict[str, Any](saves=SAVES)
        for how, times in seconds.items():
            last = folder / f"{how}-{SAVES}"
            own = sum(p.stat().st_size for p in last.rglob("*") if p.is_file() and p.stat().st_nlink == 1)
            metadata = (last / ".metadata").stat().st_size
            answer[how] = {"seconds": statistics.median(times), "nbytes": own, "metadata": metadata}
        Reader(folder / f"ours-{SAVES}").read_metadata()
    dist.barrier()
    dist.destroy_process_group()
    return answer


def _first(mesh: Any, parameters: int) -> dict[str, Any]:
    """Return weights and moments of a few square matrices, cut by rows."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    width = round((parameters / _LAYERS) ** 0.5)
    torch.manual_seed(0)
    state: dict[str, Any] = {"model": {}, "optim": {"state": {}}}
    for i in range(_LAYERS):
        gradient = torch.randn(width, width) * 1e-3
        made = {"weight": torch.randn(width, width) * 0.02, "exp_avg": gradient, "exp_avg_sq": gradient.square()}
        cut = {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in made.items()}
        state["model"][f"layer{i}.weight"] = cut.pop("weight")
        state["optim"]["state"][f"layer{i}.weight"] = cut
    return state


def _drift(state: dict[str, Any]) -> None:
    """Change the state as some training steps would."""
    import torch

    for name, weight in state["model"].items():
        here, moments = weight.to_local(), state["optim"]["state"][name]
        first, second = moments["exp_avg"].to_local(), moments["exp_avg_sq"].to_local()
        first.mul_(0.9).add_(torch.randn_like(first), alpha=1e-4)
        second.mul_(0.99).add_(first.square(), alpha=0.01)
        here.sub_(first / (second.sqrt() + 1e-8), alpha=1e-4)
