"""Tables of `bench ratio`: bytes against loss, of every system and next to other libraries."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from ..harness import Row
from ..studies import ratio as bench_ratio
from ..studies.outcomes import PUBLISHED, RUINED, System, lost_later, medians, percent, setting_of
from ..studies.systems.others import LOSSY
from .results import NONE, Json, aimed, crossed, documents, markdown, number, order, rows_of, system_name

FINE = (
    "*fine* has 128 bins and second moments to a quarter of each, *finer* both moments to an eighth, *finest* 254 bins "
    "and both to a sixteenth"
)


def measured() -> list[Json]:
    """Return the rows of `bench ratio` of all models."""
    return rows_of("ratio-*.json")


def _placed() -> Iterator[tuple[str, str, str, Json]]:
    """Yield model, system ("" for the model itself), label and row of each row."""
    for row in measured():
        where, _, what = row["row"].partition(": ")
        model, _, system = where.partition(", ")
        yield model, system, what, row


def ratio() -> str:
    """Bytes against loss: ratio of the chain and loss change later, by system and model."""
    chain, later = "whole state, chain with its bases", "loss change later"
    values: dict[tuple[str, str], dict[str, float | None]] = {}
    sizes: dict[str, int] = {}
    for model, system, what, row in _placed():
        # "weights, ...": next to the published moments, no setting for whole states.
        if system and what in (chain, later) and not system.startswith("weights"):
            values.setdefault((system, model), {})[what] = row["value"]
            sizes[model] = row["size"]
    names = {model: f"{model}, {sizes[model] / 1e6:.1f} M" for model in sorted(sizes, key=lambda m: -sizes[m])}
    cells = []
    for (system, model), found in sorted(values.items(), key=lambda one: order(one[0][0])):
        change = RUINED if found.get(later) is None else f"{found[later]:+.2f} %"
        known = later in found and found.get(chain) is not None
        cells.append((system_name(system), names[model], f"{number(found[chain])} x, {change}" if known else NONE))
    return crossed(cells, names.values(), NONE)


def targets() -> str:
    """Table of the targets of `bench ratio`, with medians over the models last."""
    held = [row for row in measured() if row["target"] is not None and not _is_peer(row)]
    return aimed([*held, *map(dataclasses.asdict, medians(Row(**row) for row in measured()))])


def _systems() -> dict[str, dict[str, System]]:
    """Return all systems of `bench ratio`, by model and name."""
    found: dict[str, dict[str, System]] = {}
    for document in documents("ratio-*.json").values():
        for place, outcomes in document["outcomes"].items():
            model, _, system = place.partition(", ")
            found.setdefault(model, {})[system] = System.of_json(outcomes)
    return found


def _change(loss: str) -> str:
    """Return a loss with its unit, or the word for a ruined training."""
    return loss if loss == RUINED else f"{loss} %"


def losses() -> str:
    """Table of every system: loss at once and after further steps, and staleness."""
    found = [(name, model, system.mean) for model, of in _systems().items() for name, system in of.items()]
    cells = []
    for name, model, mean in sorted(found, key=lambda one: order(one[0])):
        stale = "" if math.isnan(mean.staleness) else f", {mean.staleness:+.0f}"
        text = f"{_change(percent(mean.at_once))}, {_change(percent(mean.later))}{stale}"
        cells.append((system_name(name), model, text))
    return crossed(cells, dict.fromkeys(model for _, model, _ in found), NONE, "at once, later, steps")


def weights() -> str:
    """Return bits a weight of late deltas next to the published pipeline's, and our smallest."""
    found = _systems()
    cells = [
        (system_name(name), model, f"{of[name].mean.weight_bits:.2f}, {_change(percent(of[name].mean.later))}")
        for name in bench_ratio.SYSTEMS
        for model, of in found.items()
        if (name.startswith("weights") or name in PUBLISHED) and name in of
    ]
    words = []
    for published in (p for p in PUBLISHED if all(p in systems for systems in found.values())):
        parts = [_without_a_rate(model, systems, published) for model, systems in found.items()]
        words.append(f"- Next to {system_name(published)}: {'; '.join(parts)}.")
    table = crossed(cells, found, NONE, "bits a weight, loss later")
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
    for row in filter(_is_peer, measured()):
        model, _, rest = row["row"].partition(", against ")
        peer, _, what = rest.partition(": whole state")
        for case in [what.removeprefix(", ")] if what else ["no parent", "10 steps apart"]:
            cells.setdefault((peer, case), {})[model] = _pair(row)
    models = list(dict.fromkeys(model for of in cells.values() for model in of))
    lines = [[*place, *(found.get(model, NONE) for model in models)] for place, found in cells.items()]
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
