"""The results of a demo run, as numbers, tables and a picture."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from ..bench.machine import commit
from ..report.charts import COLOURS, FAINT, INK, PLAIN, RED
from . import SIZES, threads

if TYPE_CHECKING:
    from . import DemoConfig
    from .supervisor import Event, History

LATE = 0.75
"""Start of the late part of a run, as a share of its steps."""
PARTS = {"weights": "weights", "optimizer": "optimizer state", "whole": "whole training state"}
_BLUE, _ORANGE = COLOURS[:2]


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


def draw(result: dict[str, Any], curves: dict[str, Any], path: Path) -> bool:
    """Draw the picture of a result into a PNG file; False if matplotlib is not installed.

    Args:
        result: of `summarize`.
        curves: of `curves`.
        path: the file.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    style = PLAIN | {
        "font.size": 11,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "legend.edgecolor": "none",
        "legend.framealpha": 0.9,
    }
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(style):
        figure = Figure(figsize=(10, 8), layout="constrained")
        FigureCanvasAgg(figure)
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _losses(top, result, curves)
        _ratios(bottom, result)
        top.set_title(_title(result), fontsize=13)
        bottom.set_xlabel("training step")
        bottom.set_xlim(0, result["config"]["steps"] * 1.01)
        for axes in (top, bottom):
            _restores(axes, result["restores"], label=axes is bottom)
        figure.savefig(path, dpi=150)
    return True


def _title(result: dict[str, Any]) -> str:
    kills, ratio, change = len(result["restores"]), result["ratio"], result["held_out"]["change_percent"]
    killed = f"killed {kills} times" if kills > 1 else "killed once" if kills else "never killed"
    return (
        f"A GPT of {result['parameters'] / 1e6:.1f} M parameters, {killed}: "
        f"held-out loss {abs(change):.2f} % {'worse' if change > 0 else 'better'}\n"
        f"with checkpoints {ratio['whole']:.1f} times smaller (weights {ratio['weights']:.1f} times)"
    )


def _losses(axes: Any, result: dict[str, Any], curves: dict[str, Any]) -> None:
    baseline = {step: loss for life in curves["baseline"]["lives"] for step, loss in life}
    smooth = _smooth(baseline)
    axes.plot(*smooth, color=_ORANGE, linewidth=5, alpha=0.5, label="baseline: not compressed, not killed")
    kept = {step: loss for life in curves["run"]["lives"] for step, loss in life}
    axes.plot(*_smooth(kept), color=_BLUE, linewidth=1.6, label="killed, and resumed from compressed checkpoints")
    for name, colour, marker in (("baseline", _ORANGE, "s"), ("run", _BLUE, "o")):
        steps, losses = zip(*curves[name]["readings"], strict=True)
        face, size = ("white", 4) if name == "run" else (colour, 7)
        axes.plot(steps, losses, marker, color=colour, markersize=size, markerfacecolor=face)
    axes.plot([], [], "o", color=FAINT, markersize=4, label="on held-out text (lines: training, smoothed)")
    axes.set_ylabel("loss (nats a byte)")
    held_out = [loss for _, loss in curves["baseline"]["readings"]]
    axes.set_ylim(0.96 * min(*held_out, *smooth[1]), 1.15 * max(held_out))
    axes.legend(loc="upper right")


def _ratios(axes: Any, result: dict[str, Any]) -> None:
    saved = result["checkpoints"]
    steps = [event["step"] for event in saved]
    weights, optimizer = (
        [event["parts"][part][0] / event["parts"][part][1] for event in saved] for part in ("weights", "optimizer")
    )
    whole = [event["raw"] / event["stored"] for event in saved]
    for values, name, colour, width in (
        (weights, "weights", _BLUE, 1.4),
        (optimizer, "optimizer state", _ORANGE, 1.4),
        (whole, "whole training state", INK, 2.2),
    ):
        axes.plot(steps, values, "o-", color=colour, linewidth=width, markersize=4, label=name)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} x")
    axes.set_ylabel("times smaller (log scale)")
    axes.legend(loc="upper left", ncols=3)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 1.0), high * 1.6)


def _restores(axes: Any, restores: Sequence[dict[str, Any]], *, label: bool) -> None:
    row, before = 0, float("-inf")
    for restore in restores:
        at, back = restore["at"], restore["resumed"] or 0
        # A label that would overlap the one before is placed above it.
        row, before = (row + 1 if at - before < 0.2 * axes.get_xlim()[1] else 0), at
        axes.axvspan(back, at, color=RED, alpha=0.10, linewidth=0)
        axes.axvline(at, color=RED, linewidth=1.2, linestyle="--")
        if label:
            where = "killed in a save" if restore["during"] == "save" else "killed"
            left = at < 0.75 * axes.get_xlim()[1]
            axes.annotate(
                f"{where} at {at},\nresumed from {back}",
                xy=(at, 0.02 + 0.15 * (row % 3)),
                xycoords=("data", "axes fraction"),
                xytext=(5 if left else -5, 0),
                ha="left" if left else "right",
                textcoords="offset points",
                color=RED,
                fontsize=9.5,
                va="bottom",
                bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1},
            )


def _smooth(losses: dict[int, float]) -> tuple[list[int], list[float]]:
    """Exponential moving average over about 1/40 of the steps, corrected for its start."""
    steps, smooth, mean, weight = sorted(losses), [], 0.0, 0.0
    new = 1 / (1 + len(steps) / 40)
    for step in steps:
        mean, weight = mean + new * (losses[step] - mean), weight + new * (1 - weight)
        smooth.append(mean / weight)
    return steps, smooth
