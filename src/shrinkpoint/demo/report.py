"""The results of a demo run, as numbers and as tables."""

from __future__ import annotations

import platform
import statistics
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from ..bench.machine import commit
from .config import SIZES, threads

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .config import DemoConfig
    from .process import Event
    from .supervisor import History

LATE = 0.75
"""Start of the late part of a run, as a share of its steps."""
PARTS = {"weights": "weights", "optimizer": "optimizer state", "whole": "whole training state"}


def summarize(config: DemoConfig, run: History, baseline: History) -> dict[str, Any]:
    """The result of a demo as plain JSON: sizes in bytes, losses in nats per byte."""
    saved = [run.checkpoints[step] for step in sorted(run.checkpoints)]
    late = [event for event in saved if event["delta"] and event["step"] > LATE * config.steps]
    probes = [
        {key: probe[key] for key in ("step", "exact", "restored")}
        | {"change_percent": _percent(probe["restored"], probe["exact"])}
        for probe in run.probes
    ]
    return {
        "config": {name: value for name, value in asdict(config).items() if name != "out"},
        "commit": commit(),
        "machine": {
            "processor": platform.machine(),
            "system": platform.system(),
            "threads": threads(SIZES[config.size]),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("shrinkpoint", "torch", "numpy", "numba")},
        },
        "parameters": run.parameters,
        "seconds": {"run": run.seconds, "baseline": baseline.seconds},
        "checkpoints": [
            {key: event[key] for key in ("step", "delta", "raw", "stored", "ms", "parts")} for event in saved
        ],
        "save_ms": _median(event["ms"] for event in saved),
        "load_ms": _median(probe["ms"] for probe in run.probes),
        "ratio": {part: _ratio(saved, part) for part in PARTS},
        "late_delta_ratio": {part: _ratio(late, part) for part in PARTS},
        "restores": run.restores,
        "held_out": {
            "run": run.final,
            "baseline": baseline.final,
            "change_percent": _percent(run.final, baseline.final),
        },
        "one_restore": probes,
        "one_restore_change_percent": _median(probe["change_percent"] for probe in probes),
        "equal_until": _equal_until(run, baseline),
    }


def curves(run: History, baseline: History) -> dict[str, Any]:
    """Loss by step of both runs: every training step of each life, and the held-out losses."""
    return {
        name: {"lives": history.lives, "readings": sorted(history.readings.items())}
        for name, history in (("run", run), ("baseline", baseline))
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """The result as two tables: sizes, and the quality of the model."""
    config, saved = result["config"], result["checkpoints"]
    sizes = Table(
        title=f"{len(saved)} checkpoints of {result['parameters'] / 1e6:.2f} million parameters, "
        f"preset {config['preset']}",
        box=box.SIMPLE_HEAD,
        title_justify="left",
    )
    sizes.add_column("part")
    for name in ("raw MB", "stored MB", "ratio", "late deltas"):
        sizes.add_column(name, justify="right")
    for part, name in PARTS.items():
        raw, stored = _bytes(saved, part)
        sizes.add_row(
            name,
            f"{raw / 1e6:,.1f}",
            f"{stored / 1e6:,.1f}",
            _times(result["ratio"][part]),
            _times(result["late_delta_ratio"][part]),
            style="bold" if part == "whole" else None,
        )
    outcome = Table(box=box.SIMPLE, show_header=False)
    outcome.add_column()
    outcome.add_column(justify="right")
    held_out, restores = result["held_out"], result["restores"]
    in_save = sum(restore["during"] == "save" for restore in restores)
    outcome.add_row("killed and resumed", f"{len(restores)} x, {in_save} in the middle of a save")
    outcome.add_row("held-out loss, killed and compressed", f"{held_out['run']:.4f}")
    outcome.add_row("held-out loss, baseline", f"{held_out['baseline']:.4f}")
    outcome.add_row("change against the baseline", f"{held_out['change_percent']:+.2f} %", style="bold")
    if result["one_restore"]:
        low, high = (pick(probe["change_percent"] for probe in result["one_restore"]) for pick in (min, max))
        outcome.add_row(
            "change by one restore late in the run",
            f"{result['one_restore_change_percent']:+.2f} % ({low:+.2f} ... {high:+.2f})",
        )
    if result["equal_until"]:
        outcome.add_row("losses bit-equal to the baseline", f"until step {result['equal_until']}")
    outcome.add_row("a save (median)", f"{result['save_ms']:.0f} ms")
    if result["load_ms"]:
        outcome.add_row("a load (median)", f"{result['load_ms']:.0f} ms")
    outcome.add_row("time of both runs", f"{sum(result['seconds'].values()):.0f} s")
    return [sizes, outcome]


def _bytes(saved: Sequence[Event], part: str) -> tuple[int, int]:
    if part == "whole":
        return sum(event["raw"] for event in saved), sum(event["stored"] for event in saved)
    raw, stored = (sum(event["parts"][part][i] for event in saved) for i in (0, 1))
    return raw, stored


def _ratio(saved: Sequence[Event], part: str) -> float | None:
    raw, stored = _bytes(saved, part)
    return raw / stored if stored else None


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1f} x"


def _percent(new: float | None, old: float | None) -> float | None:
    return None if new is None or not old else 100 * (new - old) / old


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def _equal_until(run: History, baseline: History) -> int:
    """The last step up to which every training loss is bit-equal to the baseline's."""
    ours, theirs = run.losses(), baseline.losses()
    until = 0
    for step in sorted(theirs):
        if ours.get(step) != theirs[step]:
            break
        until = step
    return until
