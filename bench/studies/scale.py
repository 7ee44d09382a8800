"""The bench `scale`: one rank's shard of a large model, a long chain, a search by 8 ranks.

The shard is that of a state of 175 billion parameters on 1,000 ranks: 175 million parameters with AdamW's moments,
drawn in blocks from a small GPT that is trained here; each of its measurements has a fresh process. The chain saves a
small state 10,000 times, so that what counts is the store, not the codec. The eight processes meet over gloo and search
for one configuration, as eight ranks of a training do.
"""

from __future__ import annotations

import itertools
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
from ..harness import Options, Row, at_most, held
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


# ---------------------------------------------------------------------------------------------------- one shard


def shard(options: Options) -> list[Row]:
    """Seconds, memory and bytes of base, delta and restore of one shard, and bytes of all ranks."""
    parameters, rows = 2_000_000 if options.quick else SHARD, []
    pair = data.trained(quick=options.quick)
    with tempfile.TemporaryDirectory() as folder:
        source = memory.write_pools(pair, folder)
        for level, what in itertools.product(
            ("default", "exact_weights"), ("compress base", "compress delta", "restore base")
        ):
            found = memory.in_process("studies.scale", "shard_child", source, parameters, what, level)
            note = f"one thread; {parameters:,} parameters with AdamW's moments, {found['raw']:,} bytes; {pair.origin}"
            every = f"{SHARDS:,} ranks: {found['stored'] * SHARDS / 1e9:,.0f} GB for {parameters * SHARDS:,}"
            figures = [("seconds", found["seconds"], "s", note)]
            figures.append(("extra memory", found["extra"] / found["raw"], "x raw", f"{found['how']}; {note}"))
            if what != "restore base":
                figures.append(("ratio", found["raw"] / found["stored"], "x", f"{every}; {note}"))
            for label, value, unit, said in figures:
                name = f"175 M shard, {level}, {what}: {label}"
                rows.append(Row(name, "cpu, 1 thread", parameters, value, unit, note=said))
    return rows


def shard_child() -> None:
    """Measure in this process; arguments: pools, parameters, operation, level."""
    import shrinkpoint as sp

    from ..devices import threads

    source, parameters, what, level = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    config = sp.Config() if level == "default" else sp.presets.exact_weights()
    pair = memory.read_pools(source)
    with threads(1):
        memory.warm(pair, config)
        state = data.drawn_state(pair, parameters)
        parent = None if what == "compress base" else sp.compress(state.before, cfg=config)
        if parent is not None and what == "restore base":
            parent = sp.Checkpoint.from_bytes(parent.to_bytes())
        kept: list[Any] = []

        def call() -> None:
            if what == "restore base" and parent is not None:
                kept.append(sp.decompress(parent))
            else:
                kept.append(sp.compress(state.before if parent is None else state.after, parent, config))

        begin = time.process_time()
        extra, how = memory.peak(call)
        seconds = time.process_time() - begin
    answer: dict[str, Any] = {"seconds": seconds, "extra": extra, "raw": state.nbytes, "stored": 0}
    if what == "restore base":
        answer |= {"extra": extra - state.nbytes, "how": f"{how}, without the state returned"}
    else:
        answer |= {"how": f"{how}, file and reference included", "stored": kept[0].nbytes}
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
            return Row(f"{name}: {what}", "cpu, 1 thread", raw, 1e3 * value, "ms", note=note)

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
    single, many = _searched(1, steps), _searched(RANKS, steps)
    rows = []
    for what, most in (("first checkpoint", None), ("next checkpoint", at_most(1))):
        alone, found = single[what], many[what]
        note = (
            f"gloo, one round is one trial a process at once, without the baseline; {found['evaluations']} evaluations "
            f"({alone['evaluations']} by one process); {found['point']}, by one process {alone['point']}; "
            f"threshold 1 % of the loss, MLP after {steps} steps; all ranks chose the same: checked"
        )
        name, peer = f"search, {RANKS} ranks, {what}: rounds", ("one process", alone["rounds"])
        row = Row(name, f"cpu, {RANKS} processes", found["size"], found["rounds"], "rounds", *peer, note=note)
        rows.append(held(row, most))
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
