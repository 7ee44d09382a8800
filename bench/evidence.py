"""`python -m bench.evidence [--check]`: tables and pictures of the documents, made from the committed results.

In a page, what stands between `<!-- table NAME -->` and `<!-- end -->` is the table NAME, made from the JSON under
`bench/results`; nothing there is written by hand. `--check` only says which pages are out of step, and returns 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shrinkpoint.codec.errors import BadArgumentError

from . import ablation, cost, kernels, training
from . import ratio as bench_ratio
from .harness import Row

HOME = Path(__file__).resolve().parent.parent
RESULTS = HOME / "bench" / "results"
PAGES = ("README.md", "docs/evidence.md")
PICTURES = HOME / "docs" / "pictures"
NONE = "not measured"
_RESUMES = ("resume, lossless", "loss after a lossy resume")
_MET = {True: "yes", False: "**no**", None: NONE}
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
    if name == "default":
        return "`Config()`"
    main, _, rest = name.partition(", ")
    if main.startswith("rate "):
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
    size, floor = 0, None
    for row in rows_of("codec.json"):
        what, config, state = [*row["row"].split(", "), "", ""][:3]
        if (config, state) != ("default", "drawn"):
            continue
        cells = found.setdefault(what, {})
        cells[row["device"].removeprefix("cpu, ")] = row["value"]
        size = row["size"]
        if row["device"] == "cpu, 1 thread":
            cells[row["peer"]] = row["peer_value"]
            floor = row["peer_value"] if row["peer"] == "memcpy" and floor is None else floor
    columns = ("1 thread", "2 threads", "zstd -3", "torch.save")
    lines = [[what, *(number(cells.get(c)) for c in columns)] for what, cells in found.items()]
    title = f"MB/s of raw state, {size / 1e6:.0f} M parameters; memory copy {number(floor)}"
    return markdown([title, *columns], lines)


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
            line.append(NONE if None in pair else f"{number(pair[0])} x, {pair[1]:+.2f} %")
        lines.append(line)
    return markdown(["", *(f"{m}, {sizes[m] / 1e6:.1f} M" for m in models)], lines)


def _ratio() -> list[Json]:
    return rows_of("ratio-*.json")


def ratio_targets() -> str:
    """What `bench ratio` aims at, medians over the models last."""
    medians = bench_ratio.medians([Row(**row) for row in _ratio()])
    aimed = [row for row in _ratio() if row["target"] is not None and not _is_peer(row)]
    return _aims([*aimed, *map(dataclasses.asdict, medians)])


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
    return markdown(["", "ours / theirs", *models], lines)


def _pair(row: Json) -> str:
    """Ours and theirs; "no" where ours is not larger at no more loss."""
    if row["value"] is None:
        return NONE
    text = f"{number(row['value'])} / {number(row['peer_value'])} x"
    losses = re.fullmatch(r"ours .*, (\S+) % later; theirs .*, (\S+) %", row["note"])
    if losses is not None and set(losses.groups()) != {"+0.00"}:
        ours, theirs = (x if x != "+nan" else "ruined" for x in losses.groups())
        text += f", {ours} / {theirs} %"
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
        for system, columns in systems.items()
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
    return _killed(models, names)


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
                about = columns["degradation at the end"]["note"].rpartition("; ")[2]
                lines.append([model, system, *(show(columns.get(label)) for _, label, show in _TABLE[:6]), about])
    return markdown(["", "", *(title for title, _, _ in _TABLE[:6]), ""], lines)


def targets() -> str:
    """What `bench training` aims at."""
    return _aims([row for row in _training() if row["target"] is not None])


def _aims(rows: Iterable[Json]) -> str:
    """Rows with a target, and whether it is met."""
    lines = []
    for row in rows:
        met = _MET[row["met"]]
        value = "none" if row["value"] is None else f"{number(row['value'])} {row['unit']}"
        lines.append([row["row"], value if row["met"] is not None else NONE, row["target"], met, row["note"]])
    return markdown(["", "measured", "target", "met", ""], lines)


def aims(bench: str) -> str:
    """What a bench aims at, from its committed results: the figure, beside which peer, whether the target is met."""
    lines = []
    for row in rows_of(f"{bench}*.json"):
        if row["target"] is None:
            continue
        against = "" if row["ratio"] is None else f", {number(row['ratio'])} x {row['peer']}"
        lacking = NONE if row["met"] is None else "none"
        value = lacking if row["value"] is None else f"{number(row['value'])} {row['unit']}{against}"
        where = f"{number(row['size'])}, {row['device']}"
        lines.append([row["row"], where, value, row["target"], _MET[row["met"]]])
    return markdown(["", "size, device", "measured", "target", "met"], lines)


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


def published() -> str:
    """What the paper reports, and ours beside it: the best ratio of weights at the degradation allowed."""
    lines = [
        [f"Inshrinkerator, {name}", f"{loss:+.2f} %", f"{times:g} x", "not stated" if over is None else f"{over:g} %"]
        for name, (loss, times, over) in training.PUBLISHED.items()
    ]
    return markdown(["published", "degradation", "weights", "overhead"], lines)


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
    return markdown(["", *(f"{size} M parameters" for size in columns)], lines)


def _million(size: int) -> int:
    """Millions of parameters, as asked for: a drawn state has a few more or less."""
    asked = min((*cost.SIZES, cost.LARGE), key=lambda s: abs(s - size))
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
    lines = []
    for name, document in documents("*.json").items():
        if "rows" not in document or "machine" not in document:
            continue
        machine, versions = document["machine"], document["versions"]
        about = ", ".join(f"{k} {v}" for k, v in versions.items() if k in ("python", "torch", "numpy", "numba"))
        commit = str(document["commit"])
        at = commit[:12] + ("+" if commit.endswith("+") else "")
        lines.append([f"`{name}`", f"`{at}`", _machine(machine), about])
    return markdown(["", "commit", "machine", "versions"], lines)


def _machine(machine: Mapping[str, Any]) -> str:
    cores = f"{machine.get('cores')} cores"
    return ", ".join(str(part) for part in (machine.get("cpu"), cores, machine.get("gpu") or "no GPU") if part)


TABLES: dict[str, Callable[[], str]] = {
    "demo": demo,
    "speed": speed,
    "frameworks": frameworks,
    "ratio": ratio,
    "ratio targets": ratio_targets,
    "ratio peers": ratio_peers,
    "killed": killed,
    "killed long": killed_long,
    "targets": targets,
    "published": published,
    "counts": counts,
    "thresholds": thresholds,
    "costs": costs,
    "coders": coders,
    "transfer": transferred,
    "sizes": sizes,
    "stages": stages,
    "manifest": manifest,
    **{f"aims {b}": lambda b=b: aims(b) for b in ("kernels", "codec", "search", "store", "saver", "systems")},  # type: ignore[misc]
    **{f"failures {m}": lambda m=m: failures(m) for m in training.STUDIES | training.LONG},  # type: ignore[misc]
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
    if _ratio():
        bench_ratio.plot([Row(**row) for row in _ratio()], PICTURES / "ratio.png")
    speeds = [Row(**row) for row in rows_of("kernels.json")]
    if speeds:
        kernels.plot(speeds, PICTURES / "kernels.png")
    rows = _training()
    if _models(rows, training.FAILURES[0]):
        short = [row for row in rows if row["row"].partition(", ")[0] not in training.LONG]
        training.plot(short, PICTURES / "training.png")
    if cost.flames(rows):
        cost.picture(rows, PICTURES / "save.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
