"""Tables of `bench systems`: the four papers' tables next to ours, and their short form."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from .results import NONE, Json, crossed, markdown, number, rows_of


def measured() -> list[Json]:
    """Return the rows of `bench systems`, including experiments that were run separately."""
    return rows_of("systems*.json")


def _rows(experiment: str) -> list[tuple[str, Json]]:
    """Return (label, row) pairs of an experiment, in order."""
    split = ((row["row"].partition(": "), row) for row in measured())
    return [(what, row) for (name, _, what), row in split if name == experiment and what]


def _with_peer(value: float | None, peer: float | Literal[False] | None) -> str:
    return number(value) + ("" if peer is None or peer is False else f" ({number(peer)})")


def beside(experiment: str) -> str:
    """Table of all rows of an experiment, with the paper's or the peer's figure."""
    lines = []
    for what, row in _rows(experiment):
        peer = "" if row["peer_value"] is None else f"{number(row['peer_value'])} ({row['peer']})"
        lines.append([what, f"{number(row['value'])} {row['unit']}".strip(), peer])
    return markdown(["", "measured", "next to it"], lines)


def rework() -> str:
    """Rework of the three systems by task and width, with the paper's range of quotients."""
    return crossed(_reworks(), ("LC-Checkpoint", "SCAR", "TOPN"))


def _reworks() -> Iterator[tuple[str, str, str]]:
    for row in measured():
        name, _, what = row["row"].partition(": ")
        task = name.removeprefix("LC-Checkpoint rework on ")
        if task == name or not what:
            continue
        label, _, bits = what.rpartition(", ")
        line = f"{task}, {bits}"
        if label == "iterations of rework":
            means = row["note"].split(";")[0].replace(" (95 %, n = 20)", "").split(" against ")
            yield from (
                (line, system, mean) for system, mean in zip(("LC-Checkpoint", row["peer"]), means, strict=True)
            )
        else:
            range_ = row["peer"].removeprefix("LC-Checkpoint, figure 3: ").partition(" over its tasks")[0]
            yield line, f"{label} (paper)", f"{number(row['value'])} x ({range_})"


def pivot(experiment: str, pattern: str, columns: str = "{}", *, peers: bool = False) -> str:
    """Return the table of an experiment.

    Args:
        experiment: its name.
        pattern: of the labels of its rows, with the groups "line" and "column"; rows that do not match are left out.
        columns: format of the columns' names.
        peers: show the peer's value in parentheses.
    """
    found = ((re.fullmatch(pattern, what), row) for what, row in _rows(experiment))
    return crossed(
        (m["line"], columns.format(m.groupdict().get("column")), _with_peer(row["value"], peers and row["peer_value"]))
        for m, row in found
        if m
    )


def bins(experiment: str) -> str:
    """Mean bins by model and threshold, of one of the forms of the table."""
    found = re.compile(rf"{experiment} on (.*): (.*) % degradation, (.*)")
    matches = ((match, row) for row in measured() if (match := found.fullmatch(row["row"])))
    return crossed(
        (f"{m[1]}, {m[2]} %", m[3], "-" if row["value"] is None else _with_peer(row["value"], row["peer_value"]))
        for m, row in matches
    )


def exact() -> str:
    """Exact ratios: ours and each peer's."""
    rows = [(what, row) for what, row in _rows("lossless ratio") if not what.endswith("the best")]
    cells = ((what, row["peer"], number(row["peer_value"])) for what, row in rows)
    return crossed([*((what, "ours", number(row["value"])) for what, row in rows), *cells], missing=NONE)


_RANGE = re.compile(r": ([\d.]+) to ([\d.]+) ")
_DATA = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FIGURES: list[Json] = _DATA["figures"]
"""Of each paper the figures that its abstract or its conclusion rests on: title, pattern of the rows' names, unit."""


def papers() -> str:
    """Table of the central figures of the published systems' papers, and ours."""
    return markdown(["", "published", "measured here"], figures(measured()))


def figures(rows: Sequence[Json]) -> list[list[str]]:
    """Return title, published and measured figures of the lines that were measured."""
    found = []
    for figure in FIGURES:
        own = [
            row
            for row in rows
            if re.fullmatch(figure["pattern"], row["row"]) and None not in (row["value"], row["peer_value"])
        ]
        if own:
            # Where a paper has a range, its row is held against the lower end and names both.
            named = _RANGE.search(own[0]["peer"])
            theirs = [float(end) for end in named.groups()] if named else [row["peer_value"] for row in own]
            spans = (_span(values) for values in (theirs, [row["value"] for row in own]))
            found.append([figure["title"], *(span + figure.get("unit", "") for span in spans)])
    return found


def _span(values: Sequence[float]) -> str:
    # A value below a thousandth counts as zero here.
    low, high = (number(round(end(values), 3)) for end in (min, max))
    return low if low == high else f"{low} to {high}"


TABLES: dict[str, Callable[[], str]] = {
    "bins": partial(bins, "Inshrinkerator bins"),
    "spaces": partial(bins, "Inshrinkerator spaces"),
    "rework": rework,
    "exact": exact,
    **{name: partial(pivot if "pattern" in how else beside, **how) for name, how in _DATA["tables"].items()},
}
