"""Tables of `bench systems`: the four papers' tables next to ours, and their short form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..studies.systems import short
from .cells import NONE, Json, crossed, markdown, number
from .results import rows_of


def measured() -> list[Json]:
    """Return the rows of `bench systems`, including experiments that were run separately."""
    return rows_of("systems*.json")


def _rows(experiment: str) -> list[tuple[str, Json]]:
    """Return (label, row) pairs of an experiment, in order."""
    found = []
    for row in measured():
        name, _, what = row["row"].partition(": ")
        if name == experiment and what:
            found.append((what, row))
    return found


def _with_peer(value: float | None, peer: float | None) -> str:
    return number(value) + (f" ({number(peer)})" if peer is not None else "")


def beside(experiment: str) -> str:
    """Table of all rows of an experiment, with the paper's or the peer's figure."""
    lines = []
    for what, row in _rows(experiment):
        theirs = NONE if row["peer_value"] is None else number(row["peer_value"])
        peer = "" if row["peer"] is None else f"{theirs} ({row['peer']})"
        lines.append(
            [what, f"{number(row['value'])} {row['unit']}".strip(), peer if row["peer_value"] is not None else ""]
        )
    return markdown(["", "measured", "next to it"], lines)


def rework() -> str:
    """Rework of the three systems by task and width, with the paper's range of quotients."""
    cells: dict[str, dict[str, str]] = {}
    columns = dict.fromkeys(("LC-Checkpoint", "SCAR", "TOPN"))
    for row in measured():
        name, _, what = row["row"].partition(": ")
        task = name.removeprefix("LC-Checkpoint rework on ")
        if task == name or not what:
            continue
        label, _, bits = what.rpartition(", ")
        line = cells.setdefault(f"{task}, {bits}", {})
        if label == "iterations of rework":
            means = row["note"].split(";")[0].replace(" (95 %, n = 20)", "")
            line["LC-Checkpoint"], line[row["peer"]] = means.split(" against ")
        else:
            range_ = row["peer"].removeprefix("LC-Checkpoint, figure 3: ").partition(" over its tasks")[0]
            columns[f"{label} (paper)"] = None
            line[f"{label} (paper)"] = f"{number(row['value'])} x ({range_})"
    return crossed(cells, columns)


def pivot(experiment: str, split: Callable[[str], tuple[str, str] | None], *, peers: bool) -> str:
    """Return the table of an experiment; `split` gives line and column of a row, or None.

    Args:
        experiment: its name.
        split: line and column of a row by its label.
        peers: show the peer's value in parentheses.
    """
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for what, row in _rows(experiment):
        place = split(what)
        if place is not None:
            columns[place[1]] = None
            cells.setdefault(place[0], {})[place[1]] = _with_peer(row["value"], row["peer_value"] if peers else None)
    return crossed(cells, columns)


def bins(experiment: str) -> str:
    """Mean bins by model and threshold, of one of the forms of the table."""
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for row in measured():
        name, _, what = row["row"].partition(": ")
        model = name.removeprefix(f"{experiment} on ")
        if model != name and " % degradation, " in what:
            threshold, system = what.split(" % degradation, ")
            columns[system] = None
            value = "-" if row["value"] is None else _with_peer(row["value"], row["peer_value"])
            cells.setdefault(f"{model}, {threshold} %", {})[system] = value
    return crossed(cells, columns)


def exact() -> str:
    """Exact ratios: ours and each peer's."""
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for what, row in _rows("lossless ratio"):
        if not what.endswith("the best"):
            columns[row["peer"]] = None
            own = cells.setdefault(what, {"ours": number(row["value"])})
            own[row["peer"]] = number(row["peer_value"])
    return crossed(cells, ("ours", *columns), NONE)


def _last(what: str) -> tuple[str, str] | None:
    """Split "a, b, c" into line "a, b" and column "c"; None without a comma."""
    line, _, column = what.rpartition(", ")
    return (line, column) if line else None


def _first(what: str) -> tuple[str, str]:
    """Split "a, b, c" into line "b, c" and column "a"."""
    column, _, line = what.partition(", ")
    return line, column


def _coder(what: str) -> tuple[str, str]:
    """Split a row into line (coder, mean or highest) and column (model and policy)."""
    model, policy, coder, kind = what.split(", ")
    return f"{coder}, {kind}", f"{model}, {policy}"


def _searched(what: str) -> tuple[str, str] | None:
    """Split a row of search gains into line (bins and ratio) and column (width)."""
    if what.startswith("seconds"):
        return None
    width, _, rest = what.partition(", ")
    return rest.partition(":")[0], f"{width}, % less"


def _latency(what: str) -> tuple[str, str] | None:
    """Split a row of latencies into line (bins and ratio) and column; None for other rows."""
    start = "seconds, 4 bits, "
    return (what.removeprefix(start), "seconds, 4 bits") if what.startswith(start) else None


_SAME_CODES = "coder of the same codes, "


def _prior_art(what: str) -> tuple[str, str] | None:
    """Split a row of the late delta into line (system) and column (part of the state)."""
    system, _, part = what.removesuffix(", late delta").partition(", ")
    return None if what.startswith(_SAME_CODES) else (system, f"{part}, x")


def _same_codes(what: str) -> tuple[str, str] | None:
    """Split a row of entropy coders into line (coder) and column; None for other rows."""
    return (what.removeprefix(_SAME_CODES), "bits a code") if what.startswith(_SAME_CODES) else None


def papers() -> str:
    """Table of the central figures of the published systems' papers, and ours."""
    return markdown(["", "published", "measured here"], short.table(measured(), number))


TABLES: dict[str, Callable[[], str]] = {
    "bins": partial(bins, "Inshrinkerator bins"),
    "spaces": partial(bins, "Inshrinkerator spaces"),
    "coders": partial(pivot, "Inshrinkerator delta coder", _coder, peers=True),
    "rankings": partial(beside, "Inshrinkerator rankings"),
    "rework": rework,
    "steps": partial(pivot, "LC-Checkpoint sizes of its steps", _last, peers=True),
    "buckets": partial(beside, "LC-Checkpoint weight of a bucket"),
    "failure": partial(beside, "LC-Checkpoint cost of a failure"),
    "overhead": partial(beside, "LC-Checkpoint overhead"),
    "exponents": partial(beside, "LC-Checkpoint exponents"),
    "quantizers": partial(pivot, "Check-N-Run error of the quantizers", _first, peers=False),
    "greedy": partial(pivot, "Check-N-Run greedy search", _searched, peers=False),
    "latency": partial(pivot, "Check-N-Run greedy search", _latency, peers=False),
    "modified": partial(beside, "Check-N-Run modified rows"),
    "restores": partial(pivot, "Check-N-Run restores", _first, peers=False),
    "policies": partial(beside, "Check-N-Run policies"),
    "changed": partial(beside, "BitSnap ratio by changed values"),
    "iterations": partial(beside, "BitSnap ratio by iterations"),
    "moments": partial(pivot, "BitSnap error of the moments", _last, peers=True),
    "moments by size": partial(pivot, "BitSnap error by model size", _last, peers=True),
    "sparsified": partial(beside, "BitSnap loss of sparsified states"),
    "resumed": partial(beside, "BitSnap loss after a restore"),
    "stages": partial(beside, "BitSnap stages by parallelism"),
    "score": partial(pivot, "BitSnap quality score", _first, peers=False),
    "prior art": partial(pivot, "Prior art", _prior_art, peers=False),
    "same codes": partial(pivot, "Prior art", _same_codes, peers=False),
    "exact": exact,
}
