"""Tables of `bench systems`: the four papers' tables next to ours, and their short form."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

from .cells import NONE, Json, crossed, markdown, number
from .results import rows_of


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


_FIRST, _LAST = "(?P<column>.*?), (?P<line>.*)", "(?P<line>.*), (?P<column>.*?)"
"""Labels that begin or end with their column."""
_RANGE = re.compile(r": ([\d.]+) to ([\d.]+) ")
LINES = (
    ("Inshrinkerator, table 7: its bins for 1 %", "Inshrinkerator spaces on .*: 1 % .*, Inshrinkerator", ""),
    ("table 7: adaptive uniform bins for 1 %", "Inshrinkerator spaces on .*: 1 % .*, adaptive uniform", ""),
    ("table 7: uniform bins for 1 %", "Inshrinkerator spaces on .*: 1 % .*, uniform", ""),
    ("figure 12: deltas, rearranged", "Inshrinkerator delta coder: .*, rearranged, overall", " x"),
    ("LC-Checkpoint, figure 3: SCAR's rework over its, 2 bits", "LC-.*: SCAR over LC-Checkpoint, 2 bits", " x"),
    ("figure 3: TOPN's rework over its, 2 bits", "LC-.*: TOPN over LC-Checkpoint, 2 bits", " x"),
    ("figure 4: size, 2 bits", r"LC-.*, 2 bits, E\+P\+H", " %"),
    ("figure 6: iterations that a failure costs", "LC-.* cost of a failure: .*, LC-Checkpoint, .*", ""),
    ("Check-N-Run, figure 17: bandwidth, one restore", "Check.*: 2 bits, intermittent: bandwidth .*", " x less"),
    ("figure 17: capacity, one restore", "Check.*: 2 bits, intermittent: capacity .*", " x less"),
    ("figure 17: bandwidth, over 20 restores", "Check.*: 8 bits, intermittent: bandwidth .*", " x less"),
    ("figure 17: capacity, over 20 restores", "Check.*: 8 bits, intermittent: capacity .*", " x less"),
    ("BitSnap, section 3.3: ratio at 15 % of changes", "BitSnap ratio by changed values: 15 % changed", " x"),
    ("section 3.4: ratio of the moments", "BitSnap error of the moments: ratio of the moments", " x"),
    ("figure 13: loss some time after a restore", "BitSnap loss after a restore: .*, loss after 60 steps", " %"),
)
"""Of each paper the figures that its abstract or its conclusion rests on: title, pattern of the rows' names, unit."""


def papers() -> str:
    """Table of the central figures of the published systems' papers, and ours."""
    return markdown(["", "published", "measured here"], figures(measured()))


def figures(rows: Sequence[Json]) -> list[list[str]]:
    """Return title, published and measured figures of the lines that were measured."""
    found = []
    for title, pattern, unit in LINES:
        own = [
            row for row in rows if re.fullmatch(pattern, row["row"]) and None not in (row["value"], row["peer_value"])
        ]
        if own:
            # Where a paper has a range, its row is held against the lower end and names both.
            named = _RANGE.search(own[0]["peer"])
            theirs = [float(end) for end in named.groups()] if named else [row["peer_value"] for row in own]
            found.append([title, _span(theirs) + unit, _span([row["value"] for row in own]) + unit])
    return found


def _span(values: Sequence[float]) -> str:
    # A value below a thousandth counts as zero here.
    low, high = (number(round(end(values), 3)) for end in (min, max))
    return low if low == high else f"{low} to {high}"


TABLES: dict[str, Callable[[], str]] = {
    "bins": partial(bins, "Inshrinkerator bins"),
    "spaces": partial(bins, "Inshrinkerator spaces"),
    "coders": partial(pivot, "Inshrinkerator delta coder", "(?P<column>[^,]*, [^,]*), (?P<line>.*)", peers=True),
    "rankings": partial(beside, "Inshrinkerator rankings"),
    "rework": rework,
    "steps": partial(pivot, "LC-Checkpoint sizes of its steps", _LAST, peers=True),
    "buckets": partial(beside, "LC-Checkpoint weight of a bucket"),
    "failure": partial(beside, "LC-Checkpoint cost of a failure"),
    "overhead": partial(beside, "LC-Checkpoint overhead"),
    "exponents": partial(beside, "LC-Checkpoint exponents"),
    "quantizers": partial(pivot, "Check-N-Run error of the quantizers", _FIRST),
    "greedy": partial(pivot, "Check-N-Run greedy search", "(?!seconds)(?P<column>.*?), (?P<line>.*?):.*", "{}, % less"),
    "latency": partial(pivot, "Check-N-Run greedy search", "(?P<column>seconds, 4 bits), (?P<line>.*)"),
    "modified": partial(beside, "Check-N-Run modified rows"),
    "restores": partial(pivot, "Check-N-Run restores", _FIRST),
    "policies": partial(beside, "Check-N-Run policies"),
    "changed": partial(beside, "BitSnap ratio by changed values"),
    "iterations": partial(beside, "BitSnap ratio by iterations"),
    "moments": partial(pivot, "BitSnap error of the moments", _LAST, peers=True),
    "moments by size": partial(pivot, "BitSnap error by model size", _LAST, peers=True),
    "sparsified": partial(beside, "BitSnap loss of sparsified states"),
    "resumed": partial(beside, "BitSnap loss after a restore"),
    "stages": partial(beside, "BitSnap stages by parallelism"),
    "score": partial(pivot, "BitSnap quality score", _FIRST),
    "prior art": partial(pivot, "Prior art", "(?!coder)(?P<line>.*?), (?P<column>.*), late delta", "{}, x"),
    "same codes": partial(pivot, "Prior art", "coder of the same codes, (?P<line>.*)", "bits a code"),
    "exact": exact,
}
