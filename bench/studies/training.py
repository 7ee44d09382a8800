"""The bench `training`: losses of trainings that are killed and restored compressed.

Fault tolerance as in Inshrinkerator's section 9.1 (`faults.py`), over five small models, ten and more systems and
several seeds; the same over schedules several times as long, and over a larger model; thresholds per checkpoint
through `sp.search`; each part of the codec off in turn (`ablation.py`); fine-tuning from a compressed model
(`transfer.py`, its section 9.2); time and memory against the size of the state (`cost.py`). `--only MLP` takes one
model, `--only "MLP failures"` one part of it: failures, thresholds, ablation; `--only "MLP failures rate"` some of its
systems; `--only "embedding long"` a long schedule, "GPT wider" the larger model; "table 5" ends by accuracy
(`accuracy.py`); "transfer" and "cost" are the rest.
"""

from __future__ import annotations

from ..devices import threads
from ..harness import Options, Row
from . import ablation, accuracy, endurance, large, transfer

TITLE = "degradation, rework, ratio and cost of trainings that are killed and restored; transfer; ablation; cost"
plot = endurance.plot


def run(options: Options) -> list[Row]:
    """All rows; a few of one small model with `--quick`."""
    rows: list[Row] = []
    with threads(1):
        for name, study in (
            (endurance.STUDIES | endurance.FURTHER).items() if not options.quick else [("MLP", endurance.QUICK)]
        ):
            model = endurance.Model(endurance.workload_of(name, study))
            rows += endurance.failures_of(model, study, options)
            if study.thresholds and options.wanted(f"{name} thresholds"):
                rows += endurance.thresholds_of(model, study, options)
            if study.ablation and options.wanted(f"{name} ablation"):
                rows += ablation.rows(model, study, options)
        rows += endurance.targets(rows)
        rows += accuracy.rows(options)
        rows += transfer.rows(options)
    return rows + large.rows(options)
