"""Tables of `bench training`: trainings killed and resumed, ablation, transfer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..studies import endurance
from . import levels
from .cells import NONE, Json, aimed, markdown, number, order, shown, spread, system_name
from .results import by_place, rows_of

_TABLE = (
    ("at the end, %", "degradation at the end", spread),
    ("at a restore", "loss change at a restore", lambda r: shown(r, " %")),
    ("rework", "rework", shown),
    ("staleness", "staleness", shown),
    ("weights", "weights, all checkpoints", lambda r: shown(r, " x")),
    ("whole state", "whole state, all checkpoints", lambda r: shown(r, " x")),
    ("smallest: weights", "weights, smallest checkpoint", lambda r: shown(r, " x")),
    ("whole", "whole state, smallest checkpoint", lambda r: shown(r, " x")),
)
_RATIOS = ("weights, all checkpoints", "whole state, all checkpoints")


def measured() -> list[Json]:
    """The rows of `bench training`."""
    return rows_of("training*.json")


def by_model(
    rows: Sequence[Json], failures: int, studies: Iterable[str] = endurance.STUDIES
) -> dict[str, dict[str, dict[str, Json]]]:
    """Return columns of each system, by model and system, of trainings with `failures` failures."""
    found = endurance.table(rows, failures)
    return {name: found[name] for name in studies if name in found}


def failures(model: str) -> str:
    """Table of all systems of one model with ten failures."""
    systems = by_model(measured(), endurance.FAILURES[0], [model]).get(model, {})
    lines = [
        [system_name(system), *(show(columns.get(label)) for _, label, show in _TABLE)]
        for system, columns in sorted(systems.items(), key=lambda found: order(found[0]))
        if not endurance.is_searched(system)
    ]
    return markdown(["", *(title for title, _, _ in _TABLE)], lines)


def killed() -> str:
    """Ratios and degradation with ten failures, a line a system that was run on all models."""
    return _killed(*_on_all_models())


def killed_briefly() -> str:
    """Degradation and ratio of the whole state with ten failures, a cell a system and model."""
    models, names = _on_all_models()
    lines = [
        [
            system_name(system),
            *(
                f"{found[system][endurance.COLUMNS[0][0]]['value']:+.2f}\u00a0%, "
                f"{number(found[system][_RATIOS[1]]['value'])}\u00a0x"
                for found in models.values()
            ),
        ]
        for system in names
    ]
    return markdown(["", *models], lines)


def _on_all_models() -> tuple[Mapping[str, Mapping[str, Mapping[str, Json]]], list[str]]:
    """Return the systems of each model, and the names of those that were run on all models."""
    models = by_model(measured(), endurance.FAILURES[0])
    names = [
        system
        for system in dict.fromkeys(s for systems in models.values() for s in systems)
        if not endurance.is_searched(system) and all(system in systems for systems in models.values())
    ]
    return models, sorted(names, key=order)


def killed_long() -> str:
    """Return the same table for longer schedules and the larger model."""
    models = by_model(measured(), endurance.FAILURES[0], endurance.FURTHER)
    names = sorted({s for systems in models.values() for s in systems}, key=order)
    return _killed({endurance.title(name): systems for name, systems in models.items()}, names)


def _killed(models: Mapping[str, Mapping[str, Mapping[str, Json]]], names: Sequence[str]) -> str:
    columns: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        ("loss at the end", endurance.COLUMNS[0][0], levels.change),
        *((name, label, times) for name, label in zip(("weights", "whole state"), _RATIOS, strict=True)),
    )
    lines = []
    for system in names:
        for what, label, write in columns:
            found = [systems.get(system, {}).get(label, {}).get("value") for systems in models.values()]
            cells = [NONE if value is None else write(value) for value in found]
            lines.append(["" if label in _RATIOS else system_name(system), what, *cells])
    return markdown(["", "", *models], lines if models else [])


def times(value: float) -> str:
    """Write a ratio."""
    return f"{number(value)} x"


def counts() -> str:
    """Degradation with 5, 10 and 20 failures."""
    rows = measured()
    by_count = {n: by_model(rows, n) for n in sorted(endurance.FAILURES)}
    label = endurance.COLUMNS[0][0]
    lines = []
    for model in endurance.STUDIES:
        several = [n for n in by_count if model in by_count[n]]
        if len(several) < 2:
            continue
        for system in by_count[min(several)][model]:
            cells = [spread(by_count[n].get(model, {}).get(system, {}).get(label)) for n in by_count]
            lines.append([model, system_name(system), *cells])
    return markdown(["at the end, %", "", *(f"{n} failures" for n in by_count)], lines)


def thresholds() -> str:
    """Systems whose configuration is searched for under a threshold per checkpoint."""
    lines = []
    for model, systems in by_model(measured(), endurance.FAILURES[0]).items():
        for system, columns in systems.items():
            if endurance.is_searched(system):
                about = next(p for p in columns["degradation at the end"]["note"].split("; ") if "evaluate" in p)
                lines.append([model, system, *(show(columns.get(label)) for _, label, show in _TABLE[:6]), about])
    return markdown(["", "", *(title for title, _, _ in _TABLE[:6]), ""], lines)


def targets() -> str:
    """Return the targets of `bench training`, made again from the rows of all files."""
    rows = measured()
    made = [dataclasses.asdict(row) for row in endurance.targets(rows)]
    known = {row["row"] for row in made}
    others = [r for r in rows if r["target"] is not None and not (endurance.is_target(r) and r["row"] in known)]
    return aimed([*made, *others])


def beaten() -> str:
    """Settings of ours that another system beats in ratio and in loss, with the figures of both."""
    rows = measured()
    lines = []
    for row in endurance.targets(rows):
        model, _, what = row.row.partition(endurance.TARGET)
        if row.met is not False or not what.startswith("settings beaten"):
            continue
        column = f"{what.rpartition(', ')[2]}, all checkpoints"
        standing = endurance.standing(rows, model)
        for ours, others in endurance.beaten_on(standing, column).items():
            by = "; ".join(_point(s, standing[s], column) for s in others)
            lines.append([model, what.rpartition(", ")[2], _point(ours, standing[ours], column), by])
    return markdown(["", "", "ours", "beaten by"], lines) if lines else "None."


def _point(system: str, columns: Mapping[str, Json], column: str) -> str:
    loss = columns[endurance.COLUMNS[0][0]]["value"]
    return f"{system_name(system)}: {number(columns[column]['value'])} x, {loss:+.2f} %"


def published() -> str:
    """Return the paper's figures and ours: the default, the rates, and searched settings."""
    lines = [
        [f"Inshrinkerator, {name}", f"{loss:+.2f} %", f"{times:g} x", "not stated" if over is None else f"{over:g} %"]
        for name, (loss, times, over) in endurance.PUBLISHED.items()
    ]
    for model, systems in by_model(measured(), endurance.FAILURES[0], endurance.STUDIES | endurance.FURTHER).items():
        title = endurance.title(model) if model in endurance.FURTHER else model
        for system in sorted(filter(endurance.is_own, systems), key=order):
            loss, weights, over = (
                systems[system].get(label) for label in (endurance.COLUMNS[0][0], _RATIOS[0], "runtime overhead")
            )
            change = NONE if loss is None or loss["value"] is None else f"{loss['value']:+.2f} %"
            lines.append([f"{title}: {system_name(system)}", change, shown(weights, " x"), shown(over, " %")])
    return markdown(["", "degradation", "weights", "overhead"], lines)


def costs() -> str:
    """Processor milliseconds a save and a restore, and overhead, of each model's systems."""
    rows = by_model(measured(), endurance.FAILURES[0])
    names = dict.fromkeys(s for systems in rows.values() for s in systems if not endurance.is_searched(s))
    lines = []
    for system in names:
        line = [system_name(system)]
        for systems in rows.values():
            columns = systems.get(system, {})
            pair = [columns.get(label, {}).get("value") for label in ("seconds a save", "seconds a restore")]
            line.append(" / ".join(NONE if s is None else number(1e3 * s) for s in pair))
        lines.append(line)
    return markdown(["ms a save / a restore", *rows], lines)


def ablations(model: str) -> str:
    """Table of our settings with each part turned off in turn."""
    lines = [
        [
            variant,
            shown(found.get("late weight deltas")),
            shown(found.get("weights, all checkpoints"), " x"),
            spread(found.get("loss change at a restore")),
            spread(found.get("degradation at the end")),
        ]
        for variant, found in by_place(measured(), f"{model} ablation, ").items()
        if not variant.startswith("coders")
    ]
    return markdown(["", "bits a weight, late", "weights, all", "loss at a restore, %", "loss at the end, %"], lines)


def transferred() -> str:
    """Return the table of transfer: ratios, losses and accuracies."""
    lines = [
        [
            name,
            shown(found.get("ratio"), " x"),
            shown(found.get("loss change straight after restore"), " %"),
            spread(found.get("loss change after fine-tuning")),
            spread(found.get("accuracy lost after fine-tuning")),
        ]
        for name, found in by_place(measured(), "transfer ").items()
    ]
    return markdown(
        ["", "ratio", "loss straight after restore", "loss after fine-tuning, %", "accuracy lost, points"], lines
    )
