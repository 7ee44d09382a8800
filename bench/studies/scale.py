"""The bench `scale`: one rank's shard of a large model, a long chain, a search by 8 ranks.

The shard is that of a state of 175 billion parameters on 1,000 ranks: 175 million parameters with AdamW's moments,
drawn in blocks from a small GPT that is trained here; each of its measurements has a fresh process. The chain saves a
small state 10,000 times, so that what counts is the store, not the codec. The eight processes meet over gloo and search
for one configuration, as eight ranks of a training do.
"""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import tempfile
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import shrinkpoint as sp

from .. import data, fresh
from ..harness import Options, Row, Rows, at_most, wall_clock
from . import workloads
from .faults import quality
from .workloads import Run

TITLE = "one rank's shard of 175 billion parameters, a chain of 10,000 steps, a search by 8 ranks"
SHARD, SHARDS = 175_000_000, 1000
STEPS, QUICK_STEPS = 10_000, 200
RANKS = 8
_SLICE = 100


def run(options: Options) -> list[Row]:
    """Return all rows; smaller ones with `--quick`."""
    rows: list[Row] = []
    for name, measured in (("175 M shard", shard), (_chain_name(options), chain), (f"{RANKS} ranks", ranks)):
        if options.begins(name):
            rows += options.done(measured(options))
    return rows


# ---------------------------------------------------------------------------------------------------- one shard


def shard(options: Options) -> list[Row]:
    """Seconds, memory and bytes of base, delta and restore of one shard, and bytes of all ranks."""
    rows = Rows(size=2_000_000 if options.quick else SHARD)
    pair = data.trained(quick=options.quick)
    with tempfile.TemporaryDirectory() as folder:
        source = str(fresh.write_pools(pair, folder))
        for level, (action, what) in itertools.product(("default", "exact_weights"), _ACTIONS.items()):
            rows.start = f"175 M shard, {level}, {action}"
            found = fresh.call("shrinkpoint.bench.fresh:memory_child", source, rows.size, what, level, 1)
            note = f"one thread; {rows.size:,} parameters with AdamW's moments, {found['raw']:,} bytes; {pair.origin}"
            rows.add("seconds", found["seconds"], "s", note=note)
            rows.add("extra memory", found["extra"] / found["raw"], "x raw", note=f"{found['how']}; {note}")
            if what != "decompress":
                every = f"{SHARDS:,} ranks: {found['stored'] * SHARDS / 1e9:,.0f} GB for {rows.size * SHARDS:,}"
                rows.add("ratio", found["raw"] / found["stored"], "x", note=f"{every}; {note}")
    return rows


_ACTIONS = {"compress base": "compress", "compress delta": "delta", "restore base": "decompress"}


# ---------------------------------------------------------------------------------------------------- a long chain


def _chain_name(options: Options) -> str:
    return f"chain of {QUICK_STEPS if options.quick else STEPS:,} steps"


def chain(options: Options) -> list[Row]:
    """Time of saves early and late, of `steps`, of `load`, and of removing all but a few steps."""
    count, rows = QUICK_STEPS if options.quick else STEPS, Rows(_chain_name(options), 64 * 64 * 4)
    rng = np.random.default_rng(0)
    state: dict[str, Any] = {"model": {"layer.weight": rng.standard_normal((64, 64), dtype=np.float32)}, "step": 0}
    with tempfile.TemporaryDirectory() as folder:
        store = sp.Store(folder)

        def save() -> None:
            store.save(state["step"], state, kinds={"layer.weight": "linear"})

        saves = []
        for step in range(1, count + 1):
            state["step"] = step
            state["model"]["layer.weight"] += 1e-4 * rng.standard_normal((64, 64), dtype=np.float32)
            saves.append(wall_clock(save, 1))
        edge = min(_SLICE, count // 2)
        about = (
            f"one weight of 64 x 64; {count:,} saves in {sum(saves):.0f} s, base every 20; files, each with an fsync"
        )
        for which, some in (("first", saves[:edge]), ("last", saves[-edge:])):
            rows.add(f"a save, median of the {which} {edge}", 1e3 * median(some), "ms", note=about)
        for what, call in (
            ("steps(), same store", store.steps),
            ("steps(), store opened again", lambda: sp.Store(folder).steps()),
            ("load of the newest, store opened again", lambda: sp.Store(folder).load()),
        ):
            rows.add(what, 1e3 * median(wall_clock(call, 1) for _ in range(5)), "ms", note=about)
        listing = [sys.executable, "-P", "-m", "shrinkpoint", "ls", folder]
        listed = wall_clock(lambda: subprocess.run(listing, check=True, capture_output=True), 1)
        rows.add("shrinkpoint ls", 1e3 * listed, "ms", note=f"the command in a process of its own; {about}")
        rows.add("verify of all steps", 1e3 * wall_clock(store.verify, 1), "ms", note=about)
        collected = wall_clock(lambda: store.gc(sp.Retention(last=10)), 1)
        rows.add("gc to the newest 10", 1e3 * collected, "ms", note=f"{len(store.steps())} steps left; {about}")
    return rows


# ---------------------------------------------------------------------------------------------------- eight ranks

_SEARCHES = ("first checkpoint", "next checkpoint")


def ranks(options: Options) -> list[Row]:
    """Rounds, evaluations and seconds of a search by eight processes against one, same choice."""
    steps, rows = 60 if options.quick else 300, Rows(device=f"cpu, {RANKS} processes")
    single, many = _searched(1, steps), _searched(RANKS, steps)
    for what, most in zip(_SEARCHES, (None, at_most(1)), strict=True):
        alone, found = single[what], many[what]
        note = (
            f"gloo, one round is one trial a process at once, without the baseline; {found['evaluations']} evaluations "
            f"({alone['evaluations']} by one process); {found['point']}, by one process {alone['point']}; "
            f"threshold 1 % of the loss, MLP after {steps} steps; all ranks chose the same: checked"
        )
        name, peer = f"search, {RANKS} ranks, {what}: rounds", ("one process", alone["rounds"])
        rows.add(name, found["rounds"], "rounds", peer, note, target=most, size=found["size"])
    return rows


def _searched(world: int, steps: int) -> dict[str, Any]:
    """Run the search by `world` processes, and check that all found the same."""
    answers = fresh.ranks("shrinkpoint.bench.studies.scale:ranks_child", world, steps, seconds=1200)
    points = [[answer[what]["point"] for what in _SEARCHES] for answer in answers]
    if any(one != points[0] for one in points):
        raise ValueError(f"the ranks chose different points: {points}")
    found: dict[str, Any] = answers[0]
    return found


def ranks_child(folder: str, world: int, rank: int, steps: int) -> dict[str, Any]:
    """Search on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    run, answer = Run(dataclasses.replace(workloads.mlp(), steps=2 * steps), 0), dict[str, Any]()
    last, prev = None, None
    group, how = dist.group.WORLD if world > 1 else None, sp.SearchOptions(direction="lower", progress=False)
    for what, until in zip(_SEARCHES, (steps, steps + 10), strict=True):
        run.train(until)
        state = {"model": run.state()["model"]}
        known: Any = {"kinds": sp.kinds(run.model)}
        evaluate = quality(run, 2, "loss")
        last = sp.search(state, evaluate, 0.01, prev=prev, last=last, group=group, options=how, **known)
        prev = sp.compress(state, prev, last.config, **known)
        answer[what] = {
            "point": str(last.point),
            "rounds": len({trial.round for trial in last.trials if trial.point is not None}),
            "evaluations": last.evaluations,
            "size": run.workload.parameters,
        }
    dist.barrier()
    dist.destroy_process_group()
    return answer
