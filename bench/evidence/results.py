"""Committed results under `bench/results`: cells of tables, documents, origin."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

NONE = "not measured"
_MET = {True: "yes", False: "**no**", None: NONE}
_OPEN = "cannot tell"
_PRESETS = ("inshrinkerator", "lc_checkpoint", "check_n_run", "bitsnap", "lossless")
Json = dict[str, Any]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; without lines the words "not measured".

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


def crossed(
    cells: Iterable[tuple[str, str, str]], columns: Iterable[str] = (), missing: str = "", corner: str = ""
) -> str:
    """Return a table of cells by line and column, each in the order in which it is first named.

    Args:
        cells: (line, column, text) each; the last of a place counts.
        columns: that come first, in order, even if they are empty.
        missing: text for a column that a line lacks.
        corner: heads the names of the lines.

    Example:
        >>> print(crossed([("1", "a", "x"), ("2", "b", "y")], missing="-"))
        |  | a | b |
        |---|---|---|
        | 1 | x | - |
        | 2 | - | y |
    """
    lines: dict[str, dict[str, str]] = {}
    names = dict.fromkeys(columns)
    for line, column, text in cells:
        lines.setdefault(line, {})[column] = text
        names[column] = None
    return markdown([corner, *names], [[line, *(own.get(c, missing) for c in names)] for line, own in lines.items()])


def number(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, without an exponent.

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


def spread(row: Json | None) -> str:
    """Mean and range over seeds, as the note of the row begins."""
    if row is None or row["value"] is None:
        return NONE
    text: str = row["note"].split(";")[0]
    return text


def shown(row: Json | None, unit: str = "") -> str:
    """The value of a row, with its unit where it has one."""
    return NONE if row is None else number(row["value"]) + (unit if row["value"] is not None else "")


def system_name(name: str) -> str:
    """Return the display name of a system of the benches.

    Example:
        >>> system_name("default"), system_name("rate 0.001, 12 bins"), system_name("check_n_run 4")
        ('`Config()`', '12 bins, rate 0.001', '`presets.check_n_run(4)`')
    """
    main, _, rest = name.partition(", ")
    if main == "default" or main.startswith("rate "):
        bins, _, rest = rest.partition(", ") if " bins" in rest else ("`Config()`", "", rest)
        code = bins if main == "default" or main == "rate 0" else f"{bins}, {main}"
    else:
        preset, _, argument = main.partition(" ")
        if preset not in _PRESETS:
            return name
        code = f"`presets.{preset}({argument})`"
    return f"{code}, {rest}" if rest else code


def order(system: str) -> tuple[int, float, str]:
    """Sort key of systems: the default, its rates, the others."""
    rate = re.fullmatch(r"rate ([0-9.]+).*", system)
    return (0 if system == "default" else 1 if rate else 2, float(rate[1]) if rate else 0.0, system)


def figure(row: Json) -> str:
    """Format the value and unit of a row; without a value, whether it is missing or a result.

    Example:
        >>> figure({"value": 1234.5, "unit": "MB/s", "target": None, "met": None})
        '1,234 MB/s'
        >>> [figure({"value": None, "unit": "x", "target": ">= 2 x", "met": met}) for met in (None, False)]
        ['not measured', 'none']
    """
    if row["value"] is None:
        return NONE if row["target"] is not None and row["met"] is None else "none"
    return f"{number(row['value'])} {row['unit']}"


def met(row: Json) -> str:
    """Say whether a target is met, or that a measured row leaves it open."""
    return _OPEN if row["met"] is None and row["value"] is not None else _MET[row["met"]]


def aimed(rows: Iterable[Json]) -> str:
    """Return a table of rows with a target, and whether it is met."""
    lines = []
    for row in rows:
        held = ("none", "") if row["target"] is None else (row["target"], met(row))
        lines.append([row["row"], figure(row), *held, row["note"]])
    return markdown(["", "measured", "target", "met", ""], lines)


# --------------------------------------------------------------------------------------------------------------- origin

UNKNOWN = "not recorded"
SHOWN = ("python", "torch", "triton", "numpy", "numba")
"""Packages whose versions are shown; all of them are in the JSON."""
HEADER = ("", "commit: rows", "asked for", "machine", "versions")
MARK, ON = "; measured at ", " on "
"""How the note of a row ends that was measured at another commit than its document's, and on another processor."""
_AT = re.compile(rf"{MARK}([0-9a-f]+\+?)(?:{ON}(.+))?$")


def manifest_line(name: str, document: Mapping[str, Any]) -> list[str]:
    """Return the cells of one file, under `HEADER`.

    Args:
        name: of the file.
        document: its JSON: of a benchmark, of the demo, of the ahead-of-time test.
    """
    machine = document.get("machine")
    versions = {"python": (machine or {}).get("python")} | document.get("versions", {})
    about = ", ".join(f"{package} {versions[package]}" for package in SHOWN if versions.get(package))
    return [
        f"`{name}`",
        _commits(document),
        _asked(document),
        _machine(machine) + elsewhere(document),
        about or UNKNOWN,
    ]


def commits(document: Mapping[str, Any]) -> Counter[str]:
    """Count rows by the commit they were measured at; "+" marks uncommitted changes.

    A row that an earlier run left says so at the end of its note; the others are the document's own.

    Example:
        >>> rows = [{"note": "a; measured at abc1234+"}, {"note": "b"}, {"note": "c"}]
        >>> sorted(commits({"commit": "0123456789", "rows": rows}).items())
        [('0123456', 2), ('abc1234+', 1)]
    """
    own = str(document.get("commit") or UNKNOWN)
    if own != UNKNOWN:
        own = own[:7] + ("+" if own.endswith("+") else "")
    found: Counter[str] = Counter()
    for row in document.get("rows", []):
        earlier = _AT.search(str(row.get("note", "")))
        found[earlier[1] if earlier else own] += 1
    return found or Counter({own: 0})


def elsewhere(document: Mapping[str, Any]) -> str:
    """Return the other processors that some rows were measured on, or "".

    Example:
        >>> elsewhere({"rows": [{"note": "a; measured at abc1234 on a Xeon"}, {"note": "b; measured at abc1234"}]})
        '; 1 row on a Xeon'
    """
    notes = (_AT.search(str(row.get("note", ""))) for row in document.get("rows", []))
    found = Counter(match[2] for match in notes if match and match[2])
    return "".join(f"; {rows} row{'s' if rows > 1 else ''}{ON}{cpu}" for cpu, rows in found.most_common())


def _commits(document: Mapping[str, Any]) -> str:
    cells = []
    for commit, rows in commits(document).most_common():
        shown = commit if commit == UNKNOWN else f"`{commit}`"
        cells.append(f"{shown}: {rows}" if rows else shown)
    stopped = f"; did not come to its end ({document['stopped']})" if "stopped" in document else ""
    return ", ".join(cells) + stopped


def _asked(document: Mapping[str, Any]) -> str:
    """Return the command and the seeds; for the demo its configuration."""
    run = document.get("run")
    if isinstance(run, Mapping):
        seeds = run.get("seeds")
        return f"`{run['command']}`" + (f", seeds {', '.join(map(str, seeds))}" if seeds else "")
    config = document.get("config")
    if isinstance(config, Mapping):
        return ", ".join(f"{key} {value}" for key, value in config.items())
    return UNKNOWN


def _machine(machine: Mapping[str, Any] | None) -> str:
    """Return processor, cores and GPU of a result, and whether the machine was busy."""
    if machine is None:
        return UNKNOWN
    if "cores" not in machine:
        return ", ".join(f"{key} {value}" for key, value in machine.items())
    cores, load = machine["cores"], (machine.get("load") or [0.0])[0]
    busy = f"busy (load {load:.0f})" if load > cores else ""
    parts = (machine.get("cpu"), f"{cores} cores", machine.get("gpu") or "no GPU", busy)
    return ", ".join(str(part) for part in parts if part)


# ----------------------------------------------------------------------------------------------------------- documents

HOME = Path(__file__).resolve().parents[2]
RESULTS = HOME / "bench" / "results"


def documents(pattern: str) -> dict[str, Json]:
    """Return the JSON documents under `bench/results` whose names match, by name."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(pattern))}


def rows_of(pattern: str) -> list[Json]:
    """Return the rows of all matching documents."""
    return [row for document in documents(pattern).values() for row in document["rows"]]


def by_place(rows: Iterable[Json], prefix: str = "") -> dict[str, dict[str, Json]]:
    """Group rows by the text before the colon of their names, then by the text after it.

    Args:
        rows: of results.
        prefix: only names that begin with it; it is taken off.

    Example:
        >>> by_place([{"row": "transfer CNN: ratio"}, {"row": "cost: stages"}], "transfer ")
        {'CNN': {'ratio': {'row': 'transfer CNN: ratio'}}}
    """
    found: dict[str, dict[str, Json]] = {}
    for row in rows:
        where, _, what = row["row"].partition(": ")
        if where.startswith(prefix):
            found.setdefault(where.removeprefix(prefix), {})[what] = row
    return found


def commit_of(name: str, holding: str = "") -> str:
    """Return the commits of a result's rows with this in their name, the most frequent first."""
    document = documents(name).get(name, {})
    rows = [row for row in document.get("rows", []) if holding in row["row"]]
    return ", ".join(f"`{commit}`" for commit, _ in commits({**document, "rows": rows}).most_common())


def manifest() -> str:
    """Table of the origin of all results; "+" marks uncommitted changes."""
    return markdown(HEADER, [manifest_line(*found) for found in documents("*.json").items()])
