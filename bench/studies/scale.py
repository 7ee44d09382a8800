"""The bench `scale`: one rank's shard of a large model, a long chain, a search by 8 ranks.

The shard is that of a state of 175 billion parameters on 1,000 ranks: 175 million parameters with AdamW's moments,
drawn in blocks from a small GPT that is trained here; each of its measurements has a fresh process. The chain saves a
small state 10,000 times, so that what counts is the store, not the codec. The eight processes meet over gloo and search
for one configuration, as eight ranks of a training do.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .. import data, memory
from ..harness import Options, Row
from ..ranks import run_ranks

TITLE = "one rank's shard of 175 billion parameters, a chain of 10,000 steps, a search by 8 ranks"
SHARD, SHARDS = 175_000_000, 1000
STEPS, QUICK_STEPS = 10_000, 200
RANKS = 8
_SLICE = 100


def run(options: Options) -> list[Row]:
    """Return all rows; smaller ones with `--quick`."""
    rows: list[Row] = []
    for name, measured in (("175 M shard", shard), (_chain_name(options), chain), (f"{RANKS} ranks", ranks)):
        if options.wanted(name):
            options.say(name)
            rows += options.done(measured(options))
    return rows


def _row(name: str, size: int, value: float, unit: str, note: str, **more: Any) -> Row:
    empty: dict[str, Any] = {"peer": None, "peer_value": None, "ratio": None, "target": None, "met": None}
    return Row(name, more.pop("device", "cpu, 1 thread"), size, value, unit, note=note, **(empty | more))


def _in_process(function: str, *arguments: Any) -> dict[str, Any]:
    """Run a function of this module in a fresh process, and return its output as JSON.

    Raises:
        ValueError: the process failed.
    """
    code = f"from shrinkpoint.bench.studies.scale import {function}; {function}()"
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise ValueError(done.stderr[-2000:] or f"status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---------------------------------------------------------------------------------------------------- one shard


def shard(options: Options) -> list[Row]:
    """Seconds, memory and bytes of base, delta and restore of one shard, and bytes of all ranks."""
    parameters = 2_000_000 if options.quick else SHARD
    pair = data.trained(quick=options.quick)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "pools.npz"
        np.savez(source, **{f"{role}_{i}": pool for role, pools in pair.pools.items() for i, pool in enumerate(pools)})  # type: ignore[arg-type]
        for level in ("default", "exact_weights"):
            for what in ("compress base", "compress delta", "restore base"):
                found = _in_process("shard_child", source, parameters, what, level)
                note = (
                    f"one thread; {parameters:,} parameters with AdamW's moments, {found['raw']:,} bytes; {pair.origin}"
                )
                name = f"175 M shard, {level}, {what}"
                rows.append(_row(f"{name}: seconds", parameters, found["seconds"], "s", note))
                extra = f"{found['how']}; {note}"
                rows.append(_row(f"{name}: extra memory", parameters, found["extra"] / found["raw"], "x raw", extra))
                if what != "restore base":
                    every = f"{SHARDS:,} ranks: {found['stored'] * SHARDS / 1e9:,.0f} GB for {parameters * SHARDS:,}"
                    rows.append(
                        _row(f"{name}: ratio", parameters, found["raw"] / found["stored"], "x", f"{every}; {note}")
                    )
    return rows


def shard_child() -> None:
    """Measure in this process; arguments: pools, parameters, operation, level."""
    import shrinkpoint as sp

    from ..devices import threads

    source, parameters, what, level = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    config = sp.Config() if level == "default" else sp.presets.exact_weights()
    with np.load(source) as stored:
        pair = memory.pair_of({name: stored[name] for name in stored.files})
    with threads(1):
        small = data.drawn_state(pair, 200_000)
        warm = sp.compress(small.before, cfg=config)
        sp.compress(small.after, warm, config)
        sp.decompress(sp.Checkpoint.from_bytes(warm.to_bytes()))
        state = data.drawn_state(pair, parameters)
        parent = None if what == "compress base" else sp.compress(state.before, cfg=config)
        if parent is not None and what == "restore base":
            parent = sp.Checkpoint.from_bytes(parent.to_bytes())

        def call() -> Any:
            if what == "restore base" and parent is not None:
                return sp.decompress(parent)
            return sp.compress(state.before if parent is None else state.after, parent, config)

        kept: list[Any] = []
        begin = time.process_time()
        extra, how = memory.peak(lambda: kept.append(call()))
        seconds = time.process_time() - begin
    if what == "restore base":
        extra, how, stored_bytes = extra - state.nbytes, f"{how}, without the state returned", 0
    else:
        stored_bytes = kept[0].nbytes
        how += ", file and reference included"
    answer = {"seconds": seconds, "extra": extra, "how": how, "raw": state.nbytes, "stored": stored_bytes}
    print(json.dumps(answer))


# ---------------------------------------------------------------------------------------------------- a long chain


def _chain_name(options: Options) -> str:
    return f"chain of {QUICK_STEPS if options.quick else STEPS:,} steps"


def chain(options: Options) -> list[Row]:
    """Time of saves early and late, of `steps`, of `load`, and of removing all but a few steps."""
    import shrinkpoint as sp

    count, name = QUICK_STEPS if options.quick else STEPS, _chain_name(options)
    rng = np.random.default_rng(0)
    state: dict[str, Any] = {"model": {"layer.weight": rng.standard_normal((64, 64), dtype=np.float32)}, "step": 0}
    saves: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        store = sp.Store(folder)
        for step in range(1, count + 1):
            state["model"]["layer.weight"] += 1e-4 * rng.standard_normal((64, 64), dtype=np.float32)
            state["step"] = step
            begin = time.perf_counter()
            store.save(step, state, kinds={"layer.weight": "linear"})
            saves.append(time.perf_counter() - begin)
        raw = 64 * 64 * 4
        about = (
            f"one weight of 64 x 64; {count:,} saves in {sum(saves):.0f} s, base every 20; files, each with an fsync"
        )

        def row(what: str, value: float, note: str = about) -> Row:
            return _row(f"{name}: {what}", raw, 1e3 * value, "ms", note)

        edge = min(_SLICE, count // 2)
        rows = [
            row(f"a save, median of the first {edge}", statistics.median(saves[:edge])),
            row(f"a save, median of the last {edge}", statistics.median(saves[-edge:])),
            row("steps(), same store", _median(store.steps)),
            row("steps(), store opened again", _median(lambda: sp.Store(folder).steps())),
            row("load of the newest, store opened again", _median(lambda: sp.Store(folder).load())),
            row("shrinkpoint ls", _seconds(lambda: _listed(folder)), f"the command in a process of its own; {about}"),
            row("verify of all steps", _seconds(store.verify)),
        ]
        collected = _seconds(lambda: store.gc(sp.Retention(last=10)))
        rows.append(row("gc to the newest 10", collected, f"{len(store.steps())} steps left; {about}"))
    return rows


def _listed(folder: str) -> None:
    subprocess.run([sys.executable, "-P", "-m", "shrinkpoint", "ls", folder], check=True, capture_output=True)


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _median(call: Callable[[], object]) -> float:
    return statistics.median(_seconds(call) for _ in range(5))


# ---------------------------------------------------------------------------------------------------- eight ranks


def ranks(options: Options) -> list[Row]:
    """Rounds, evaluations and seconds of a search by eight processes against one, same choice."""
    steps = 60 if options.quick else 300
    one, many = _searched(1, steps), _searched(RANKS, steps)
    rows = []
    for what in ("first checkpoint", "next checkpoint"):
        single, found = one[what], many[what]
        note = (
            f"gloo, one round is one trial a process at once, without the baseline; {found['evaluations']} evaluations "
            f"({single['evaluations']} by one process); {found['point']}, by one process {single['point']}; "
            f"threshold 1 % of the loss, MLP after {steps} steps; all ranks chose the same: checked"
        )
        name = f"search, {RANKS} ranks, {what}"
        where = f"cpu, {RANKS} processes"
        rows.append(
            _row(
                f"{name}: rounds",
                found["size"],
                found["rounds"],
                "rounds",
                note,
                device=where,
                peer="one process",
                peer_value=single["rounds"],
                target="<= 1 rounds" if what == "next checkpoint" else None,
                met=found["rounds"] <= 1 if what == "next checkpoint" else None,
            )
        )
    return rows


def _searched(world: int, steps: int) -> dict[str, Any]:
    """Run the search by `world` processes, and check that all found the same."""
    code = "from shrinkpoint.bench.studies.scale import ranks_child; ranks_child()"
    answers = run_ranks(code, world, [str(steps)], seconds=1200)
    points = [[answer[what]["point"] for what in ("first checkpoint", "next checkpoint")] for answer in answers]
    if any(one != points[0] for one in points):
        raise ValueError(f"the ranks chose different points: {points}")
    found: dict[str, Any] = answers[0]
    return found


def ranks_child() -> None:
    """Search on one rank; arguments: folder, number of ranks, training steps, rank."""
    import dataclasses

    import torch
    import torch.distributed as dist

    import shrinkpoint as sp

    from . import workloads
    from .faults import quality
    from .workloads import Run

    folder, world, steps, rank = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    run, answer = Run(dataclasses.replace(workloads.mlp(), steps=2 * steps), 0), {}
    last, prev = None, None
    for what, until in (("first checkpoint", steps), ("next checkpoint", steps + 10)):
        run.train(until)
        state = {"model": run.state()["model"]}
        asked: list[int] = []
        evaluate = quality(run, 2, "loss")

        def counted(restored: Any, asked: list[int] = asked, evaluate: Any = evaluate) -> float:
            asked.append(1)
            return float(evaluate(restored))

        last = sp.search(
            state,
            counted,
            0.01,
            prev=prev,
            last=last,
            group=dist.group.WORLD if world > 1 else None,
            options=sp.SearchOptions(direction="lower", progress=False),
        )
        prev = sp.compress(state, prev, last.config)
        answer[what] = {
            "point": str(last.point),
            "rounds": len({trial.round for trial in last.trials if trial.point is not None}),
            "evaluations": last.evaluations,
            "here": len(asked),
            "size": run.workload.parameters,
        }
    print(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def plot(rows: list[Row], path: Path) -> None:
    """Draw seconds of the shard."""
    from ..plot import Bars, draw

    bars = [(row.row, row.value, None) for row in rows if row.unit == "s" and row.value is not None]
    draw(path, [Bars("one shard", "seconds", bars)])
