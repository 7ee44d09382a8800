"""`python -m bench.evidence [--check]`: tables and pictures of the documents, made from the committed results.

In a page, what stands between `<!-- table NAME -->` and `<!-- end -->` is the table NAME, made from the JSON under
`bench/results`; nothing there is written by hand. `--check` only says which pages are out of step, and returns 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shrinkpoint.codec.errors import BadArgumentError
from shrinkpoint.demo.picture import draw as demo_picture

from . import ablation, cost, kernels, spending, training, workloads
from . import ratio as bench_ratio
from .harness import Row
from .lossypeers import LOSSY
from .outcomes import PUBLISHED, RUINED, System, lost_later, medians, percent
from .provenance import HEADER, manifest_line
from .systems import short

HOME = Path(__file__).resolve().parent.parent
RESULTS = HOME / "bench" / "results"
PAGES = ("README.md", "docs/evidence.md", "docs/saver.md", "docs/trainers.md", "docs/scaling.md", "docs/security.md")
PICTURES = HOME / "docs" / "pictures"
NONE = "not measured"
_RESUMES = ("resume, lossless", "loss after a lossy resume")
_MET = {True: "yes", False: "**no**", None: NONE}
_OPEN = "cannot tell"
_PRESETS = ("inshrinkerator", "lc_checkpoint", "check_n_run", "bitsnap", "lossless")
_BLOCK = re.compile(r"(<!-- table ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
Json = dict[str, Any]


# ---------------------------------------------------------------------------------------------------- results


def documents(pattern: str) -> dict[str, Json]:
    """The JSON documents under `bench/results` whose names match, by name."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(pattern))}


def rows_of(pattern: str) -> list[Json]:
    """Their rows, together."""
    return [row for document in documents(pattern).values() for row in document["rows"]]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table; without lines the words "not measured".

    Example:
        >>> print(markdown(["a", "b"], [["1", "2"]]))
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    found = [f"| {' | '.join(line)} |" for line in lines]
    if not found:
        return f"*{NONE}*"
    return "\n".join([f"| {' | '.join(header)} |", "|" + "---|" * len(header), *found])


def number(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits, without an exponent; "not measured" for None.

    Example:
        >>> number(1234.5), number(0.01234), number(None)
        ('1,234', '0.0123', 'not measured')
    """
    if value is None:
        return NONE
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def _spread(row: Json | None) -> str:
    """Mean and range over seeds, as the note of the row begins."""
    if row is None or row["value"] is None:
        return NONE
    text: str = row["note"].split(";")[0]
    return text


def _value(row: Json | None, unit: str = "") -> str:
    return NONE if row is None else number(row["value"]) + (unit if row["value"] is not None else "")


# ---------------------------------------------------------------------------------------------------- README


def demo() -> str:
    """What `make demo` stored."""
    found = documents("demo.json").get("demo.json")
    if found is None:
        return f"*{NONE}*"
    totals = {"weights": (0, 0), "optimizer": (0, 0), "whole": (0, 0)}
    for ckpt in found["checkpoints"]:
        for part, sizes in [*ckpt["parts"].items(), ("whole", (ckpt["raw"], ckpt["stored"]))]:
            if part in totals:
                raw, stored = totals[part]
                totals[part] = raw + sizes[0], stored + sizes[1]
    names = {"weights": "weights", "optimizer": "optimizer state", "whole": "whole training state"}
    lines = [
        [
            names[part],
            f"{raw / 1e6:.1f} MB",
            f"{stored / 1e6:.1f} MB",
            f"{found['ratio'][part]:.1f} x",
            f"{found['late_delta_ratio'][part]:.1f} x",
        ]
        for part, (raw, stored) in totals.items()
    ]
    what = f"{len(found['checkpoints'])} checkpoints, {len(found['restores'])} kills"
    during = [restore["during"] for restore in found["restores"]].count("save")
    what += f" ({during} of them in the middle of a save)" if during else ""
    return markdown([what, "raw", "stored", "ratio", "late deltas"], lines)


def _system(name: str) -> str:
    """How a system of the benches is called in code."""
    main, _, rest = name.partition(", ")
    if main == "default":
        code = "`Config()`"
    elif main.startswith("rate "):
        code = f"`Config(rate={main.removeprefix('rate ')})`"
    else:
        preset, _, argument = main.partition(" ")
        if preset not in _PRESETS:
            return name
        code = f"`presets.{preset}({argument})`"
    return f"{code}, {rest}" if rest else code


def speed() -> str:
    """Megabytes a second of `bench codec` on its large state, on one thread and on two, beside the peers' on one."""
    found: dict[str, dict[str, float | None]] = {}
    size = 0
    for row in rows_of("codec.json"):
        what, config, state = [*row["row"].split(", "), "", ""][:3]
        if (config, state) != ("default", "drawn"):
            continue
        cells = found.setdefault(what, {})
        cells[row["device"].removeprefix("cpu, ")] = row["value"]
        size = row["size"]
        if row["device"] == "cpu, 1 thread":
            cells[row["peer"]] = row["peer_value"]
    columns = {"1 thread": "1 thread", "2 threads": "2 threads", "zstd -3": "zstd -3", "torch.save": "torch.save"}
    columns |= {"memcpy": "memory copy"}
    lines = [[what, *(number(cells.get(c)) for c in columns)] for what, cells in found.items()]
    title = f"MB/s of raw state, {size / 1e6:.0f} M parameters, commit {_at('codec.json')}"
    return markdown([title, *columns.values()], lines)


def _at(name: str) -> str:
    """The commit a result says it is from."""
    commit = str(documents(name).get(name, {}).get("commit"))
    return f"`{commit[:7]}{'+' if commit.endswith('+') else ''}`"


def ratio() -> str:
    """Bytes against loss: ratio of the chain and loss change later, by system and model."""
    chain, later = "whole state, chain with its bases", "loss change later"
    cells: dict[str, dict[str, dict[str, Json]]] = {}
    sizes: dict[str, int] = {}
    for row in _ratio():
        where, _, what = row["row"].partition(": ")
        model, _, system = where.partition(", ")
        # "weights, ...": beside the published moments, no setting for whole states.
        if system and what in (chain, later) and not system.startswith("weights"):
            cells.setdefault(system, {}).setdefault(model, {})[what] = row
            sizes[model] = row["size"]
    models = sorted(sizes, key=lambda m: -sizes[m])
    lines = []
    for system in sorted(cells, key=_order):
        line = [_system(system)]
        for model in models:
            found = cells[system].get(model, {})
            pair = [found.get(what, {}).get("value") for what in (chain, later)]
            change = RUINED if pair[1] is None else f"{pair[1]:+.2f} %"
            line.append(f"{number(pair[0])} x, {change}" if later in found and pair[0] is not None else NONE)
        lines.append(line)
    return markdown(["", *(f"{m}, {sizes[m] / 1e6:.1f} M" for m in models)], lines)


def ratio_lacks() -> str:
    """The small models that `bench ratio` was not run on, and what ten kills do to them, so that none is left out."""
    there = {row["row"].partition(": ")[0].partition(", ")[0] for row in _ratio()}
    killed_ten_times = _models(_training(), training.FAILURES[0])
    label = training.COLUMNS[0][0]
    said = []
    for model, systems in killed_ten_times.items():
        found = [systems.get(s, {}).get(label, {}) for s in ("default", "rate 0.0005")]
        if model in there or any(row.get("value") is None for row in found):
            continue
        default, rated = (row["value"] for row in found)
        others = [s["default"][label]["value"] for m, s in killed_ten_times.items() if m != model and "default" in s]
        worst = ", more than any other model" if all(default > (other or 0.0) for other in others) else ""
        ends = f"{default:+.2f} % with {_system('default')}{worst}, and {rated:+.2f} % with {_system('rate 0.0005')}"
        size, where = f"{found[0]['size'] / 1e6:.1f} M", "([below](#killed-ten-times))"
        said.append(f"Not run here: the {model} ({size}). Killed ten times it ends {ends} {where}.")
    return "\n".join(said) or "Every small model of these benches is in the table."


def _ratio() -> list[Json]:
    return rows_of("ratio-*.json")


def ratio_targets() -> str:
    """What `bench ratio` aims at, medians over the models last."""
    aimed = [row for row in _ratio() if row["target"] is not None and not _is_peer(row)]
    return _aims([*aimed, *map(dataclasses.asdict, medians(Row(**row) for row in _ratio()))])


def _systems() -> dict[str, dict[str, System]]:
    """Every system of `bench ratio`, by model and name, as its rows have it."""
    rows: dict[str, dict[str, dict[str, Row]]] = {}
    for row in _ratio():
        where, _, what = row["row"].partition(": ")
        model, _, system = where.partition(", ")
        if system and not system.startswith(("against ", "alone, ")):
            rows.setdefault(model, {}).setdefault(system, {})[what] = Row(**row)
    return {m: {s: System.of_rows(found) for s, found in systems.items()} for m, systems in rows.items()}


def _change(loss: str) -> str:
    """A loss with its unit, which one that is no number has not."""
    return loss if loss == RUINED else f"{loss} %"


def ratio_losses() -> str:
    """Loss at once and after further steps, and staleness, of every system."""
    found = _systems()
    names = sorted({system for systems in found.values() for system in systems}, key=_order)
    lines = []
    for name in names:
        line = [_system(name)]
        for systems in found.values():
            if name not in systems:
                line.append(NONE)
                continue
            mean = systems[name].mean
            stale = "" if math.isnan(mean.staleness) else f", {mean.staleness:+.0f}"
            line.append(f"{_change(percent(mean.at_once))}, {_change(percent(mean.later))}{stale}")
        lines.append(line)
    return markdown(["at once, later, steps", *found], lines if found else [])


def ratio_weights() -> str:
    """Bits a weight of late deltas beside the published pipeline's, and what is smallest of ours at no more loss."""
    found = _systems()
    names = [s for s in bench_ratio.SYSTEMS if s.startswith("weights") or s in PUBLISHED]
    lines = []
    for name in names:
        cells = [systems.get(name) for systems in found.values()]
        some = [NONE if c is None else f"{c.mean.weight_bits:.2f}, {_change(percent(c.mean.later))}" for c in cells]
        lines.append([_system(name), *some])
    words = []
    for published in (p for p in PUBLISHED if all(p in systems for systems in found.values())):
        parts = [_without_a_rate(model, systems, published) for model, systems in found.items()]
        words.append(f"- Beside {_system(published)}: {'; '.join(parts)}.")
    table = markdown(["bits a weight, loss later", *found], lines if found else [])
    text = "Our smallest without a rate whose mean loss is no larger, and how many times smaller:"
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
    """Bins of our weights; 24 if the name has none."""
    said = re.search(r"(\d+) bins", system)
    return f"{said[1]} bins" if said else "24 bins"


def ratio_peers() -> str:
    """Other libraries on the same two states: our ratio and theirs, and where either loses, what is lost later."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    models: dict[str, None] = {}
    for row in filter(_is_peer, _ratio()):
        model, _, rest = row["row"].partition(", against ")
        peer, _, what = rest.partition(": whole state")
        models[model] = None
        for case in [what.removeprefix(", ")] if what else ["no parent", "10 steps apart"]:
            cells.setdefault((peer, case), {})[model] = _pair(row)
    lines = [[peer, case, *(found.get(m, NONE) for m in models)] for (peer, case), found in cells.items()]
    table = markdown(["", "ours / theirs", *models], lines)
    single = [row["row"].partition(", ")[0] for row in _ratio() if row["peer"] in LOSSY and "; one seed" in row["note"]]
    return f"{table}\n\nLossy ones on one seed only: {', '.join(dict.fromkeys(single))}." if single else table


def _pair(row: Json) -> str:
    """Ours and theirs, and what either loses later; "no" where ours is not larger at no more loss.

    Raises:
        BadArgumentError: its note does not say what was lost.
    """
    if row["value"] is None:
        return NONE
    text = f"{number(row['value'])} / {number(row['peer_value'])} x"
    ours, theirs = lost_later(row["note"])
    if {ours, theirs} != {"+0.00"}:
        text += f", {_change(ours)} / {_change(theirs)}"
    if row["met"] is None:
        return f"{text} ({NONE})"
    return text if row["met"] else f"**no:** {text}"


def _is_peer(row: Json) -> bool:
    return ", against " in row["row"]


def _order(system: str) -> tuple[int, float, str]:
    rate = re.fullmatch(r"rate ([0-9.]+).*", system)
    return (0 if system == "default" else 1 if rate else 2, float(rate[1]) if rate else 0.0, system)


# ---------------------------------------------------------------------------------------------------- training


def _training() -> list[Json]:
    return rows_of("training*.json")


def _models(
    rows: Sequence[Json], failures: int, studies: Iterable[str] = training.STUDIES
) -> dict[str, dict[str, dict[str, Json]]]:
    found = training.table(rows, failures)
    return {name: found[name] for name in studies if name in found}


_TABLE = (
    ("at the end, %", "degradation at the end", _spread),
    ("at a restore", "loss change at a restore", lambda r: _value(r, " %")),
    ("rework", "rework", _value),
    ("staleness", "staleness", _value),
    ("weights", "weights, all checkpoints", lambda r: _value(r, " x")),
    ("whole state", "whole state, all checkpoints", lambda r: _value(r, " x")),
    ("smallest: weights", "weights, smallest checkpoint", lambda r: _value(r, " x")),
    ("whole", "whole state, smallest checkpoint", lambda r: _value(r, " x")),
)


_RATIOS = ("weights, all checkpoints", "whole state, all checkpoints")


def failures(model: str) -> str:
    """Every system of one model with ten failures."""
    systems = _models(_training(), training.FAILURES[0], [model]).get(model, {})
    lines = [
        [_system(system), *(show(columns.get(label)) for _, label, show in _TABLE)]
        for system, columns in sorted(systems.items(), key=lambda found: _order(found[0]))
        if not training.is_searched(system)
    ]
    return markdown(["", *(title for title, _, _ in _TABLE)], lines)


def killed() -> str:
    """Ratios and degradation with ten failures, a line a system that was run on all models."""
    models = _models(_training(), training.FAILURES[0])
    names = [
        system
        for system in dict.fromkeys(s for systems in models.values() for s in systems)
        if not training.is_searched(system) and all(system in systems for systems in models.values())
    ]
    return _killed(models, sorted(names, key=_order))


def killed_long() -> str:
    """The same over the long schedules, a line a system that was run on any model."""
    models = _models(_training(), training.FAILURES[0], training.LONG)
    names = sorted({s for systems in models.values() for s in systems}, key=_order)
    titles = {name: f"{name.partition(' ')[0]}, {training.LONG[name].steps:,} steps" for name in models}
    return _killed({titles[name]: systems for name, systems in models.items()}, names)


def _killed(models: Mapping[str, Mapping[str, Mapping[str, Json]]], names: Sequence[str]) -> str:
    lines = []
    for system in names:
        line = [_system(system)]
        for systems in models.values():
            columns = systems.get(system, {})
            found = [columns.get(label, {}).get("value") for label in (*_RATIOS, training.COLUMNS[0][0])]
            x, y, loss = found
            line.append(NONE if None in found else f"{number(x)} x, {number(y)} x, {loss:+.2f} %")
        lines.append(line)
    return markdown(["weights, whole state, loss at the end", *models], lines if models else [])


def counts() -> str:
    """Degradation with 5, 10 and 20 failures."""
    rows = _training()
    by_count = {n: _models(rows, n) for n in sorted(training.FAILURES)}
    label = training.COLUMNS[0][0]
    lines = []
    for model in training.STUDIES:
        several = [n for n in by_count if model in by_count[n]]
        if len(several) < 2:
            continue
        for system in by_count[min(several)][model]:
            cells = [_spread(by_count[n].get(model, {}).get(system, {}).get(label)) for n in by_count]
            lines.append([model, _system(system), *cells])
    return markdown(["at the end, %", "", *(f"{n} failures" for n in by_count)], lines)


def thresholds() -> str:
    """Systems whose configuration is searched for under a threshold per checkpoint."""
    lines = []
    for model, systems in _models(_training(), training.FAILURES[0]).items():
        for system, columns in systems.items():
            if training.is_searched(system):
                about = next(p for p in columns["degradation at the end"]["note"].split("; ") if "evaluate" in p)
                lines.append([model, system, *(show(columns.get(label)) for _, label, show in _TABLE[:6]), about])
    return markdown(["", "", *(title for title, _, _ in _TABLE[:6]), ""], lines)


def targets() -> str:
    """What `bench training` aims at; what a model's systems reach together is made anew from all files' rows."""
    rows = _training()
    made = [dataclasses.asdict(row) for row in training.targets(rows)]
    known = {row["row"] for row in made}
    others = [r for r in rows if r["target"] is not None and not (training.is_target(r) and r["row"] in known)]
    return _aims([*made, *others])


def beaten() -> str:
    """Settings of ours that another system beats in ratio and in loss, with the figures of both."""
    rows = _training()
    lines = []
    for row in training.targets(rows):
        model, _, what = row.row.partition(training.TARGET)
        if row.met is not False or not what.startswith("settings beaten"):
            continue
        column = f"{what.rpartition(', ')[2]}, all checkpoints"
        standing = training.standing(rows, model)
        for ours, others in training.beaten_on(standing, column).items():
            by = "; ".join(_point(s, standing[s], column) for s in others)
            lines.append([model, what.rpartition(", ")[2], _point(ours, standing[ours], column), by])
    return markdown(["", "", "ours", "beaten by"], lines) if lines else "None."


def _point(system: str, columns: Mapping[str, Json], column: str) -> str:
    loss = columns[training.COLUMNS[0][0]]["value"]
    return f"{_system(system)}: {number(columns[column]['value'])} x, {loss:+.2f} %"


def _met(row: Json) -> str:
    """Whether a target is met: also that the row was measured and does not tell."""
    return _OPEN if row["met"] is None and row["value"] is not None else _MET[row["met"]]


def _aims(rows: Iterable[Json]) -> str:
    """Rows with a target, and whether it is met."""
    lines = []
    for row in rows:
        if row["target"] is None:
            value = "none" if row["value"] is None else f"{number(row['value'])} {row['unit']}"
            lines.append([row["row"], value, "none", "", row["note"]])
            continue
        lacking = NONE if row["met"] is None else "none"
        value = lacking if row["value"] is None else f"{number(row['value'])} {row['unit']}"
        lines.append([row["row"], value, row["target"], _met(row), row["note"]])
    return markdown(["", "measured", "target", "met", ""], lines)


def aims(bench: str) -> str:
    """What a bench aims at, from its committed results: the figure, beside which peer, whether the target is met."""
    lines = []
    for row in rows_of(f"{bench}*.json"):
        if row["target"] is None or row["row"].startswith(_FLIPPED):
            continue
        against = "" if row["ratio"] is None else f", {number(row['ratio'])} x {row['peer']}{_on_fewer(row)}"
        lacking = NONE if row["met"] is None else "none"
        value = lacking if row["value"] is None else f"{number(row['value'])} {row['unit']}{against}"
        where = f"{number(row['size'])}, {row['device']}"
        lines.append([row["row"], where, value, row["target"], _met(row)])
    return markdown(["", "size, device", "measured", "target", "met"], lines)


def _on_fewer(row: Json) -> str:
    """What to say of a peer that was too slow for all elements: rates at two sizes are not like with like."""
    few = re.search(r"\bon (?:the first )?([\d,]+) elements", row["note"].split(";")[0])
    if few is None or int(few[1].replace(",", "")) >= row["size"]:
        return ""
    return f" at its rate on {few[1]}"


def kernel_sizes() -> str:
    """Rates of the kernels over the sizes, 10,000 to 10**9 elements, on one CPU thread."""
    found: dict[str, dict[int, str]] = {}
    for row in rows_of("kernels.json"):
        swept = row["size"] == 10 ** (len(str(row["size"])) - 1)
        if row["peer"] == "memcpy" and row["device"].startswith("cpu") and swept and row["value"] is not None:
            rate = row["value"] * (4 if row["unit"] == "Gsym/s" else 1)
            found.setdefault(row["row"], {}).setdefault(row["size"], number(rate))
    found = {name: cells for name, cells in found.items() if len(cells) > 2}
    sizes = sorted({size for cells in found.values() for size in cells})
    lines = [[name, *(cells.get(size, NONE) for size in sizes)] for name, cells in found.items()]
    return markdown(["GB/s of float32 weights (a symbol stands for one)", *map(number, sizes)], lines)


def beside(pattern: str, units: Sequence[str]) -> str:
    """Rows that are held against several others, target or not: ours and each of theirs, a line a row and size.

    Args:
        pattern: of the files.
        units: rows with one of these.
    """
    lines: dict[tuple[str, int], dict[str, str]] = {}
    peers: dict[str, None] = {}
    found = [row for row in rows_of(pattern) if row["unit"] in units and row["peer"] and row["value"] is not None]
    several = {key for key, count in Counter((r["row"], r["size"]) for r in found).items() if count > 1}
    for row in found:
        key = row["row"], row["size"]
        if key not in several:
            continue
        peers[row["peer"]] = None
        cells = lines.setdefault(key, {"": f"{number(row['value'])} {row['unit']}"})
        cells[row["peer"]] = number(row["peer_value"])
    header = ["", "parameters", "shrinkpoint", *peers]
    return markdown(
        header, [[what, f"{n / 1e6:.0f} M", *(c.get(p, "") for p in ("", *peers))] for (what, n), c in lines.items()]
    )


_FLIPPED = "flipped bits"


def flips() -> str:
    """Of so many flipped bits, how many each library loads without a word, side by side."""
    rows = [row for row in rows_of("store.json") if row["row"].startswith(_FLIPPED)]
    columns = ["shrinkpoint", *(str(row["peer"]) for row in rows)]
    values = [rows[0]["value"], *(row["peer_value"] for row in rows)] if rows else []
    cells = [NONE if value is None else number(value) for value in values]
    size = number(rows[0]["size"]) if rows else NONE
    return markdown(["", *columns], [[f"of {size} flipped bits, loaded silently", *cells]])


def fuzzed() -> str:
    """How long each fuzzer went on, what it read and reached, and what it found."""
    lines = [
        [
            row["fuzzer"],
            f"{number(row['seconds'] / 60, 2)} min",
            number(row["inputs"]),
            f"{row['branches at first']:,} to {row['branches reached']:,}",
            f"{row['seeds']} to {row['inputs worth keeping']:,}",
            str(len(row["found"])),
        ]
        for row in rows_of("fuzz.json")
    ]
    return markdown(["", "time", "inputs read", "branches reached", "inputs kept", "found"], lines)


def frameworks() -> str:
    """Each framework: a save by ours / by its own, and what a resume gives."""
    cells: dict[str, dict[str, Json]] = {}
    for row in rows_of("trainers.json"):
        name, _, what = row["row"].partition(": ")
        cells.setdefault(name, {})[what] = row
    both = ("stall of a save", "overhead of the run", "bytes of a save", "lines", "save", "metadata")
    lines = []
    for name, found in cells.items():
        peer = next(r["peer"] for r in found.values() if r["peer"])
        line = [f"{name} / {peer}"]
        for what in both:
            pair = found.get(what)
            line.append(f"{number(pair['value'])} / {number(pair['peer_value'])} {pair['unit']}" if pair else "")
        line += [_value(found[w], f" {found[w]['unit']}") if w in found else "" for w in _RESUMES]
        lines.append(line)
    return markdown(["", *both, *_RESUMES], lines)


def trainers() -> str:
    """Bytes of a save in each framework beside its own, and the loss after a lossy resume."""
    cells: dict[str, dict[str, Json]] = {}
    for row in rows_of("trainers.json"):
        name, _, what = row["row"].partition(": ")
        cells.setdefault(name, {})[what] = row
    lines, title = [], ""
    for name, found in cells.items():
        stored, loss = found.get("bytes of a save"), found.get(_RESUMES[1])
        if stored is None or loss is None:
            continue
        how = re.match(r"(\d+) steps of .*, a save every (\d+)", found["overhead of the run"]["note"])
        title = f"{stored['size']:,} parameters" + (f", {how[1]} steps, a save every {how[2]}" if how else "")
        own, change = f"{stored['peer']} {_bytes(stored['peer_value'])}", f"{loss['value']:+.2f} %"
        lines.append([name, _bytes(stored["value"]), own, f"{stored['ratio']:.1f} x", change])
    return markdown([title, "bytes of a save", "its own", "", "change of loss"], lines)


def _bytes(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def ranks() -> str:
    """What saves by several processes took, ours beside torch's."""
    cells: dict[str, dict[str, Json]] = {}
    for row in rows_of("trainers.json"):
        named = re.fullmatch(r"DCP, (\d+) ranks: (.*)", row["row"])
        if named and row["value"] is not None:
            cells.setdefault(named[1], {})[named[2]] = row
    columns = list(dict.fromkeys(what for found in cells.values() for what in found if what != "save"))
    lines = []
    for world, found in cells.items():
        line = [world]
        for what in columns:
            pair = found.get(what)
            line += [_bytes(pair["value"]), _bytes(pair["peer_value"])] if pair else [NONE, NONE]
        lines.append(line)
    return markdown(["ranks", *(text for what in columns for text in (what, "torch"))], lines)


_SAVER = (
    ("stall, processor time of the calling thread", "stall of save, processor time"),
    ("stall, on the wall", "stall of save"),
    ("until the save is durable", "time until durable"),
    ("worker's memory beyond the snapshot and an idle worker's", "memory of the worker"),
)


def saver() -> str:
    """What a save costs the trainer and the worker, by size of the state, beside one copy of it by NumPy."""
    cells: dict[int, dict[str, Json]] = {}
    titles: dict[int, str] = {}
    for row in rows_of("saver*.json"):
        if row["peer"] in (None, "memcpy"):
            cells.setdefault(row["size"], {})[row["row"]] = row
        if row["row"] == _SAVER[0][1]:
            titles[row["size"]] = row["note"].split(";")[0]
    lines = []
    for title, name in _SAVER:
        line = [title]
        for size in titles:
            cell = cells[size].get(name)
            copy = (
                "" if cell is None or cell["peer"] is None else f"; one copy {_ms(cell['peer_value'])} {cell['unit']}"
            )
            line.append(NONE if cell is None else f"{_ms(cell['value'])} {cell['unit']}{copy}")
        lines.append(line)
    return markdown(["", *titles.values()], lines if titles else [])


def _ms(value: float | None) -> str:
    return number(value, 2)


def saver_overhead() -> str:
    """By how much saving every so many steps lengthens a training on busy cores."""
    return _aims(row for row in rows_of("saver*.json") if row["row"].startswith("overhead"))


def published() -> str:
    """What the paper reports, and ours beside it: the default, the rates, and what was searched under a threshold."""
    lines = [
        [f"Inshrinkerator, {name}", f"{loss:+.2f} %", f"{times:g} x", "not stated" if over is None else f"{over:g} %"]
        for name, (loss, times, over) in training.PUBLISHED.items()
    ]
    for model, systems in _models(_training(), training.FAILURES[0], training.STUDIES | training.LONG).items():
        steps = f"{training.LONG[model].steps:,} steps" if model in training.LONG else ""
        title = ", ".join(part for part in (model.partition(" ")[0], steps) if part)
        for system in sorted(filter(training.is_own, systems), key=_order):
            loss, weights, over = (
                systems[system].get(label) for label in (training.COLUMNS[0][0], _RATIOS[0], "runtime overhead")
            )
            change = NONE if loss is None or loss["value"] is None else f"{loss['value']:+.2f} %"
            lines.append([f"{title}: {_system(system)}", change, _value(weights, " x"), _value(over, " %")])
    return markdown(["", "degradation", "weights", "overhead"], lines)


def papers() -> str:
    """The figures that the published systems' papers rest on, ours beside them."""
    return markdown(["", "published", "measured here"], short.table(rows_of("systems*.json"), number))


def costs() -> str:
    """Processor milliseconds a save and a restore, and overhead, of each model's systems."""
    rows = _models(_training(), training.FAILURES[0])
    names = dict.fromkeys(s for systems in rows.values() for s in systems if not training.is_searched(s))
    lines = []
    for system in names:
        line = [_system(system)]
        for systems in rows.values():
            columns = systems.get(system, {})
            pair = [columns.get(label, {}).get("value") for label in ("seconds a save", "seconds a restore")]
            line.append(" / ".join(NONE if s is None else number(1e3 * s) for s in pair))
        lines.append(line)
    return markdown(["ms a save / a restore", *rows], lines)


def ablations(model: str) -> str:
    """Each part off in turn."""
    cells: dict[str, dict[str, Json]] = {}
    for row in _training():
        where, _, what = row["row"].partition(": ")
        prefix = f"{model} ablation, "
        if where.startswith(prefix) and not where.startswith(f"{prefix}coders"):
            cells.setdefault(where.removeprefix(prefix), {})[what] = row
    lines = [
        [
            variant,
            _value(found.get("late weight deltas")),
            _value(found.get("weights, all checkpoints"), " x"),
            _spread(found.get("loss change at a restore")),
            _spread(found.get("degradation at the end")),
        ]
        for variant, found in cells.items()
    ]
    return markdown(["", "bits a weight, late", "weights, all", "loss at a restore, %", "loss at the end, %"], lines)


def coders() -> str:
    """What coders make of the same levels."""
    rows = [row for row in _training() if " ablation, coders, " in row["row"]]
    models = list(dict.fromkeys(row["row"].partition(" ablation")[0] for row in rows))
    values = {row["row"]: row["value"] for row in rows}
    lines = []
    for coder in ablation.CODERS:
        line = [coder]
        for model in models:
            for policy in ("refit", "kept"):
                name = f"{model} ablation, coders, {coder}, codebook {policy}: late weight deltas"
                line.append(number(values.get(name)))
        lines.append(line)
    header = [f"{model}, codebook {policy}" for model in models for policy in ("refit", "kept")]
    return markdown(["bits a weight", *header], lines if models else [])


def transferred() -> str:
    """Ratio and losses of transfer."""
    cells: dict[str, dict[str, Json]] = {}
    for row in _training():
        if row["row"].startswith("transfer "):
            where, _, what = row["row"].partition(": ")
            cells.setdefault(where.removeprefix("transfer "), {})[what] = row
    lines = [
        [
            name,
            _value(found.get("ratio"), " x"),
            _value(found.get("loss change straight after restore"), " %"),
            _spread(found.get("loss change after fine-tuning")),
        ]
        for name, found in cells.items()
    ]
    return markdown(["", "ratio", "loss straight after restore", "loss after fine-tuning, %"], lines)


def sizes() -> str:
    """Speed and memory against the size of the state."""
    found: dict[str, dict[int, Json]] = {}
    for row in _training():
        if row["row"].startswith("cost, ") and not row["row"].startswith(cost.STAGES):
            name = row["row"].removeprefix("cost, ").rpartition(", default")[0] or row["row"].removeprefix("cost, ")
            found.setdefault(f"{name}, {row['device'].removeprefix('cpu, ')}", {})[_million(row["size"])] = row
    columns = sorted({size for by_size in found.values() for size in by_size})
    lines = [
        [name, *(f"{_value(by_size.get(size))} {by_size[size]['unit'] if size in by_size else ''}" for size in columns)]
        for name, by_size in found.items()
    ]
    title = f"commit {_at('training-cost.json')}" if lines else ""
    return markdown([title, *(f"{size} M parameters" for size in columns)], lines)


def two_runs() -> str:
    """How far the speeds of one state lie apart in the two results that have it, and which commits those are from."""
    ours = {
        (row["row"].removeprefix("cost, ").partition(",")[0], row["device"]): row["value"]
        for row in _training()
        if row["row"].startswith("cost, ") and row["unit"] == "MB/s" and _million(row["size"]) == 100
    }
    apart = {}
    for row in rows_of("codec.json"):
        what, _, rest = row["row"].partition(", ")
        other = ours.get((what, row["device"]))
        if rest == "default, drawn" and other and row["value"]:
            apart[f"{what}, {row['device'].removeprefix('cpu, ')}"] = (row["value"], other)
    if not apart:
        return f"*{NONE}*"
    worst = max(apart, key=lambda name: max(apart[name]) / min(apart[name]))
    one, two = apart[worst]
    runs = f"commit {_at('training-cost.json')}, the README's table of 100 M one of {_at('codec.json')}"
    factor = f"{max(one, two) / min(one, two):.1f} times ({worst}: {number(two)} and {number(one)} MB/s)"
    return (
        f"This is a run of {runs}, both on a machine that others were using.\n"
        f"Their speeds of the same state differ by up to {factor}, so compare within a table only."
    )


def _million(size: int) -> int:
    """Millions of parameters, as asked for: a drawn state has a few more or less."""
    asked = min((*cost.SIZES, *cost.LARGER), key=lambda s: abs(s - size))
    return asked // 1_000_000


def stages() -> str:
    """Stages of a save with at least 3 % of its time, six deep at most."""
    lines = [
        ["&nbsp;&nbsp;" * (len(stack) - 1) + stack[-1], f"{share:.0%}"]
        for stack, share in cost.flames(_training()).items()
        if share >= 0.03 and len(stack) <= 6
    ]
    return markdown(["stage, with what it calls", "share"], lines)


def manifest() -> str:
    """Where the results come from; "+": with changes that were not committed yet."""
    return markdown(HEADER, [manifest_line(*found) for found in documents("*.json").items()])


TABLES: dict[str, Callable[[], str]] = {
    "demo": demo,
    "speed": speed,
    "frameworks": frameworks,
    "saver": saver,
    "saver overhead": saver_overhead,
    "trainers": trainers,
    "ranks": ranks,
    "ratio": ratio,
    "ratio lacks": ratio_lacks,
    "ratio targets": ratio_targets,
    "ratio losses": ratio_losses,
    "ratio weights": ratio_weights,
    "ratio peers": ratio_peers,
    "killed": killed,
    "killed long": killed_long,
    "targets": targets,
    "beaten": beaten,
    "published": published,
    "papers": papers,
    "counts": counts,
    "thresholds": thresholds,
    "costs": costs,
    "coders": coders,
    "transfer": transferred,
    "sizes": sizes,
    "two runs": two_runs,
    "stages": stages,
    "manifest": manifest,
    "flips": flips,
    "fuzzed": fuzzed,
    "kernel sizes": kernel_sizes,
    "store peers": lambda: beside("store.json", ("MB/s", "x raw state")),
    "stall peers": lambda: beside("saver.json", ("ms",)),
    **{f"aims {b}": lambda b=b: aims(b) for b in ("kernels", "codec", "search", "store", "saver", "systems")},  # type: ignore[misc]
    **{f"failures {m}": lambda m=m: failures(m) for m in (*training.STUDIES, *training.LONG, *workloads.LARGE)},  # type: ignore[misc]
    **{f"ablation {m}": lambda m=m: ablations(m) for m, study in training.STUDIES.items() if study.ablation},  # type: ignore[misc]
}


def regenerated(text: str) -> str:
    """A page with its tables made anew.

    Raises:
        BadArgumentError: a marker names no table.
    """

    def block(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise BadArgumentError(f"table {name!r} is unknown; one of {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[name]()}\n{match[3]}"

    return _BLOCK.sub(block, text)


def out_of_step() -> list[str]:
    """Pages whose tables are not those of the results."""
    wrong = []
    for page in PAGES:
        text = (HOME / page).read_text(encoding="utf-8")
        if regenerated(text) != text:
            wrong.append(page)
    return wrong


def pictures() -> dict[str, Callable[[Path], object]]:
    """File under `docs/pictures` -> what draws it; of those whose results are there."""
    found: dict[str, Callable[[Path], object]] = {}
    if _ratio():
        found["ratio.png"] = lambda path: bench_ratio.plot([Row(**row) for row in _ratio()], path)
    speeds = [Row(**row) for row in rows_of("kernels.json")]
    if speeds:
        found["kernels.png"] = lambda path: kernels.plot(speeds, path)
    rows = _training()
    if _models(rows, training.FAILURES[0]):
        apart = (*training.LONG, *workloads.LARGE)
        short = [row for row in rows if row["row"].partition(", ")[0] not in apart]
        found["training.png"] = lambda path: training.plot(short, path)
    if cost.flames(rows):
        found["save.png"] = lambda path: cost.picture(rows, path)
    spent = {name: rows_of(f"{name}.json") for name in ("codec", "saver")}
    if all(spent.values()):
        found["cost.png"] = lambda path: spending.picture(spent["codec"], spent["saver"], path)
    ran = documents("demo.json").get("demo.json")
    if ran is not None:
        found["demo.png"] = lambda path: demo_picture(ran, ran["curves"], path)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Write pages and pictures anew, or only check the pages."""
    parser = argparse.ArgumentParser(prog="bench.evidence", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if a page is out of step")
    asked = parser.parse_args(arguments)
    if asked.check:
        wrong = out_of_step()
        for page in wrong:
            print(f"{page}: its tables are not those of bench/results; run python -m bench.evidence")
        return 1 if wrong else 0
    for page in PAGES:
        path = HOME / page
        text = path.read_text(encoding="utf-8")
        path.write_text(regenerated(text), encoding="utf-8")
    for name, draw in pictures().items():
        draw(PICTURES / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
