"""Tables of `bench ratio`: bytes against loss, of every system and next to other libraries."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from ..harness import Row
from ..studies import ratio as bench_ratio
from ..studies.lossypeers import LOSSY
from ..studies.outcomes import PUBLISHED, RUINED, System, lost_later, medians, percent, setting_of
from .cells import NONE, Json, aimed, markdown, number, order, system_name
from .results import rows_of

FINE = (
    "*fine* has 128 bins and second moments to a quarter of each, *finer* both moments to an eighth, *finest* 254 bins "
    "and both to a sixteenth"
)


def measured() -> list[Json]:
    """Return the rows of `bench ratio` of all models."""
    return rows_of("ratio-*.json")


def chains() -> str:
    """Bytes against loss: ratio of the chain and loss change later, by system and model."""
    chain, later = "whole state, chain with its bases", "loss change later"
    cells: dict[str, dict[str, dict[str, Json]]] = {}
    sizes: dict[str, int] = {}
    for row in measured():
        where, _, what = row["row"].partition(": ")
        model, _, system = where.partition(", ")
        # "weights, ...": next to the published moments, no setting for whole states.
        if system and what in (chain, later) and not system.startswith("weights"):
            cells.setdefault(system, {}).setdefault(model, {})[what] = row
            sizes[model] = row["size"]
    models = sorted(sizes, key=lambda m: -sizes[m])
    lines = []
    for system in sorted(cells, key=order):
        line = [system_name(system)]
        for model in models:
            found = cells[system].get(model, {})
            pair = [found.get(what, {}).get("value") for what in (chain, later)]
            change = RUINED if pair[1] is None else f"{pair[1]:+.2f} %"
            line.append(f"{number(pair[0])} x, {change}" if later in found and pair[0] is not None else NONE)
        lines.append(line)
    return markdown(["", *(f"{m}, {sizes[m] / 1e6:.1f} M" for m in models)], lines)


def targets() -> str:
    """Table of the targets of `bench ratio`, with medians over the models last."""
    held = [row for row in measured() if row["target"] is not None and not _is_peer(row)]
    return aimed([*held, *map(dataclasses.asdict, medians(Row(**row) for row in measured()))])


def _systems() -> dict[str, dict[str, System]]:
    """Return all systems of `bench ratio`, by model and name."""
    rows: dict[str, dict[str, dict[str, Row]]] = {}
    for row in measured():
        where, _, what = row["row"].partition(": ")
        model, _, system = where.partition(", ")
        if system and not system.startswith(("against ", "alone, ")):
            rows.setdefault(model, {}).setdefault(system, {})[what] = Row(**row)
    return {m: {s: System.of_rows(found) for s, found in systems.items()} for m, systems in rows.items()}


def _change(loss: str) -> str:
    """Return a loss with its unit, or the word for a ruined training."""
    return loss if loss == RUINED else f"{loss} %"


def losses() -> str:
    """Table of every system: loss at once and after further steps, and staleness."""
    found = _systems()
    names = sorted({system for systems in found.values() for system in systems}, key=order)
    lines = []
    for name in names:
        line = [system_name(name)]
        for systems in found.values():
            if name not in systems:
                line.append(NONE)
                continue
            mean = systems[name].mean
            stale = "" if math.isnan(mean.staleness) else f", {mean.staleness:+.0f}"
            line.append(f"{_change(percent(mean.at_once))}, {_change(percent(mean.later))}{stale}")
        lines.append(line)
    return markdown(["at once, later, steps", *found], lines if found else [])


def weights() -> str:
    """Return bits a weight of late deltas next to the published pipeline's, and our smallest."""
    found = _systems()
    names = [s for s in bench_ratio.SYSTEMS if s.startswith("weights") or s in PUBLISHED]
    lines = []
    for name in names:
        cells = [systems.get(name) for systems in found.values()]
        some = [NONE if c is None else f"{c.mean.weight_bits:.2f}, {_change(percent(c.mean.later))}" for c in cells]
        lines.append([system_name(name), *some])
    words = []
    for published in (p for p in PUBLISHED if all(p in systems for systems in found.values())):
        parts = [_without_a_rate(model, systems, published) for model, systems in found.items()]
        words.append(f"- Next to {system_name(published)}: {'; '.join(parts)}.")
    table = markdown(["bits a weight, loss later", *found], lines if found else [])
    text = "Our smallest without a rate whose mean loss is not larger, and how many times smaller:"
    return "\n".join([table, "", text, "", *words]) if words else table


def _without_a_rate(model: str, systems: Mapping[str, System], published: str) -> str:
    theirs = systems[published].mean
    fitting = {
        name: one.mean.weight_bits
        for name, one in systems.items()
        if name.partition(", ")[0] == "weights" and "rate 0," in f"{name}," and one.mean.later <= theirs.later
    }
    if not fitting:
        return f"{model} none"
    best = min(fitting, key=lambda name: fitting[name])
    return f"{model} {theirs.weight_bits / fitting[best]:.1f} x ({_bins(best)})"


def _bins(system: str) -> str:
    """Return the bins of our weights from the name; 24 without a number."""
    said = re.search(r"(\d+) bins", system)
    return f"{said[1]} bins" if said else "24 bins"


def peers() -> str:
    """Return our ratio and theirs for each other library, and the losses of either."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    models: dict[str, None] = {}
    for row in filter(_is_peer, measured()):
        model, _, rest = row["row"].partition(", against ")
        peer, _, what = rest.partition(": whole state")
        models[model] = None
        for case in [what.removeprefix(", ")] if what else ["no parent", "10 steps apart"]:
            cells.setdefault((peer, case), {})[model] = _pair(row)
    lines = [[peer, case, *(found.get(m, NONE) for m in models)] for (peer, case), found in cells.items()]
    table = markdown(["", "ours / theirs", *models], lines)
    single = [
        row["row"].partition(", ")[0] for row in measured() if row["peer"] in LOSSY and "; one seed" in row["note"]
    ]
    words = [f"In brackets our setting where it is not `Config()`: {FINE}."] if "(fine" in table else []
    words += [f"Lossy ones on one seed only: {', '.join(dict.fromkeys(single))}."] if single else []
    return "\n\n".join([table, *words])


def _pair(row: Json) -> str:
    """Return ours and theirs with their later losses; "no" where ours is not larger.

    Raises:
        BadArgumentError: its note lacks the losses or our setting.
    """
    if row["value"] is None:
        return NONE
    ours, theirs = lost_later(row["note"])
    setting = setting_of(row["note"])
    said = f" ({setting})" if row["peer"] in LOSSY and setting != "default" else ""
    text = f"{number(row['value'])}{said} / {number(row['peer_value'])} x"
    if {ours, theirs} != {"+0.00"}:
        text += f", {_change(ours)} / {_change(theirs)}"
    if row["met"] is None:
        return f"{text} ({NONE})"
    return text if row["met"] else f"**no:** {text}"


def _is_peer(row: Json) -> bool:
    return ", against " in row["row"]
