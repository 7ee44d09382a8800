"""`python -m bench harm`: harm of lossy checkpoints, seen on answers of restored models.

Twenty-six small model families train to a plateau: thirteen that chose settings, and thirteen that chose nothing, with
nine further optimizers and schedules that end near zero. Each setting is judged by (a) how far the restored model's
answers are from the original's, (b) the same after further steps against an exact resume, and (c) loss and accuracy at
the end of a training that is killed ten times, paired by seed with the uninterrupted training and with the null. Rows
are kept one JSON line each under `results/harm.jsonl`; a run measures the missing ones, so it may be stopped at any
time.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from ...harness import Options, Row
from . import campaign, families
from .campaign import NULL, bench_rows
from .held_back import ALL

TITLE = "what lossy checkpoints change: answers at a restore, further steps, trainings killed ten times"
SEEDS = 4
"""Of a whole campaign."""


def run(options: Options) -> list[Row]:
    """Measure the missing rows and return all; with `--quick` one short training, kept nowhere."""
    if options.quick:
        return _quick(options)
    rows = campaign.RowFile(campaign.RESULTS)
    chosen = [name for name in ALL if options.wanted(name)]
    options.seeds.update(range(SEEDS))
    campaign.measure(rows, range(SEEDS), families=chosen, say=options.say)
    sizes = {name: make().workload.parameters for name, make in ALL.items()}
    return options.done(bench_rows(rows, sizes))


def _quick(options: Options) -> list[Row]:
    made = families.FAMILIES["MLP"]()
    family = dataclasses.replace(made, workload=dataclasses.replace(made.workload, steps=80))
    with tempfile.TemporaryDirectory() as folder:
        rows = campaign.RowFile(Path(folder) / "harm.jsonl")
        rows.add("end", family.name, campaign.UNINTERRUPTED, 0, campaign.uninterrupted(family, 0))
        for setting in (NULL, "default"):
            options.say(f"{family.name}: killed, {setting}")
            rows.add("killed", family.name, setting, 0, campaign.killed(family, setting, 0, failures=2))
        found = bench_rows(rows, dict.fromkeys(ALL, family.workload.parameters))
    return options.done([row for row in found if row.row.startswith(f"{family.name}, default")])
