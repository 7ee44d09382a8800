"""`python -m bench.systems.page [--check]`: the tables of docs/systems.md, made from bench/results/systems.json.

What stands between `<!-- table systems NAME -->` and `<!-- end -->` is the table NAME; none of it is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shrinkpoint.kernels.errors import BadArgumentError

from ..evidence import NONE, markdown, number
from ..provenance import commits, elsewhere

HOME = Path(__file__).resolve().parents[2]
PAGE = HOME / "docs" / "systems.md"
RESULTS = HOME / "bench" / "results"
_BLOCK = re.compile(r"(<!-- table systems (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
Json = dict[str, Any]


def results() -> Json:
    """The committed results: `systems.json` with the rows of experiments that were run by themselves."""
    parts = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("systems*.json"))}
    rows = [row for document in parts.values() for row in document["rows"]]
    found: Json = parts["systems"] | {"rows": rows}
    return found


def _rows(rows: Sequence[Json], experiment: str) -> list[tuple[str, Json]]:
    """(what, row) of an experiment, in order."""
    found = []
    for row in rows:
        name, _, what = row["row"].partition(": ")
        if name == experiment and what:
            found.append((what, row))
    return found


def _with_peer(value: float | None, peer: float | None) -> str:
    return number(value) + (f" ({number(peer)})" if peer is not None else "")


def beside(rows: Sequence[Json], experiment: str) -> str:
    """Every row: measured, and the paper's figure or the peer's."""
    lines = []
    for what, row in _rows(rows, experiment):
        theirs = NONE if row["peer_value"] is None else number(row["peer_value"])
        peer = "" if row["peer"] is None else f"{theirs} ({row['peer']})"
        lines.append(
            [what, f"{number(row['value'])} {row['unit']}".strip(), peer if row["peer_value"] is not None else ""]
        )
    return markdown(["", "measured", "beside it"], lines)


def rework(rows: Sequence[Json]) -> str:
    """Rework of the three systems by task and width, with the paper's range of quotients."""
    cells: dict[tuple[str, str], dict[str, Json]] = {}
    for row in rows:
        name, _, what = row["row"].partition(": ")
        task = name.removeprefix("LC-Checkpoint rework on ")
        if task == name or not what:
            continue
        label, _, bits = what.rpartition(", ")
        key = row["peer"] if label == "iterations of rework" else label
        cells.setdefault((task, bits), {})[key] = row
    lines = []
    for (task, bits), found in cells.items():
        means = found["SCAR"]["note"].split(";")[0], found["TOPN"]["note"].split(";")[0]
        ours, scar = (part.removesuffix(" (95 %, n = 20)") for part in means[0].split(" against "))
        topn = means[1].split(" against ")[1].removesuffix(" (95 %, n = 20)")
        line = [f"{task}, {bits}", ours, scar, topn]
        for peer in ("SCAR", "TOPN"):
            row = found[f"{peer} over LC-Checkpoint"]
            range_ = row["peer"].removeprefix("LC-Checkpoint, figure 3: ").partition(" over its tasks")[0]
            line.append(f"{number(row['value'])} x ({range_})")
        lines.append(line)
    return markdown(["", "LC-Checkpoint", "SCAR", "TOPN", "SCAR / LC (paper)", "TOPN / LC (paper)"], lines)


def pivot(rows: Sequence[Json], experiment: str, split: Callable[[str], tuple[str, str] | None], *, peers: bool) -> str:
    """A table of one experiment: `split` gives line and column of a row, or None to leave it out.

    Args:
        rows: of the results.
        experiment: its name.
        split: of what a row is.
        peers: show the peer's value in parentheses.
    """
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for what, row in _rows(rows, experiment):
        place = split(what)
        if place is not None:
            columns[place[1]] = None
            cells.setdefault(place[0], {})[place[1]] = _with_peer(row["value"], row["peer_value"] if peers else None)
    return markdown(["", *columns], [[line, *(own.get(c, "") for c in columns)] for line, own in cells.items()])


def bins(rows: Sequence[Json], experiment: str) -> str:
    """Mean bins by model and threshold, of one of the forms of the table."""
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for row in rows:
        name, _, what = row["row"].partition(": ")
        model = name.removeprefix(f"{experiment} on ")
        if model != name and " % degradation, " in what:
            threshold, system = what.split(" % degradation, ")
            columns[system] = None
            value = "-" if row["value"] is None else _with_peer(row["value"], row["peer_value"])
            cells.setdefault(f"{model}, {threshold} %", {})[system] = value
    return markdown(["", *columns], [[line, *(own.get(c, "") for c in columns)] for line, own in cells.items()])


def exact(rows: Sequence[Json]) -> str:
    """Exact ratios: ours and each peer's."""
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for what, row in _rows(rows, "lossless ratio"):
        if not what.endswith("the best"):
            columns[row["peer"]] = None
            own = cells.setdefault(what, {"ours": number(row["value"])})
            own[row["peer"]] = number(row["peer_value"])
    lines = [[line, own["ours"], *(own.get(c, NONE) for c in columns)] for line, own in cells.items()]
    return markdown(["", "ours", *columns], lines)


def _last(what: str) -> tuple[str, str]:
    """ "a, b, c" as line "a, b" and column "c"."""
    line, _, column = what.rpartition(", ")
    return line, column


def _first(what: str) -> tuple[str, str]:
    """ "a, b, c" as line "b, c" and column "a"."""
    column, _, line = what.partition(", ")
    return line, column


def _coder(what: str) -> tuple[str, str]:
    """Model and policy, against coder and whether it is the mean or the highest."""
    model, policy, coder, kind = what.split(", ")
    return f"{coder}, {kind}", f"{model}, {policy}"


def _searched(what: str) -> tuple[str, str] | None:
    """Gains by bins and ratio, in columns by width."""
    if what.startswith("seconds"):
        return None
    width, _, rest = what.partition(", ")
    return rest.partition(":")[0], f"{width}, % less"


def _latency(what: str) -> tuple[str, str] | None:
    """Seconds by bins and ratio."""
    start = "seconds, 4 bits, "
    return (what.removeprefix(start), "seconds, 4 bits") if what.startswith(start) else None


TABLES: dict[str, Callable[[Sequence[Json]], str]] = {
    "bins": lambda rows: bins(rows, "Inshrinkerator bins"),
    "spaces": lambda rows: bins(rows, "Inshrinkerator spaces"),
    "coders": lambda rows: pivot(rows, "Inshrinkerator delta coder", _coder, peers=True),
    "rework": rework,
    "steps": lambda rows: pivot(rows, "LC-Checkpoint sizes of its steps", _last, peers=True),
    "buckets": lambda rows: beside(rows, "LC-Checkpoint weight of a bucket"),
    "failure": lambda rows: beside(rows, "LC-Checkpoint cost of a failure"),
    "quantizers": lambda rows: pivot(rows, "Check-N-Run error of the quantizers", _first, peers=False),
    "greedy": lambda rows: pivot(rows, "Check-N-Run greedy search", _searched, peers=False),
    "latency": lambda rows: pivot(rows, "Check-N-Run greedy search", _latency, peers=False),
    "modified": lambda rows: beside(rows, "Check-N-Run modified rows"),
    "restores": lambda rows: pivot(rows, "Check-N-Run restores", _first, peers=False),
    "policies": lambda rows: beside(rows, "Check-N-Run policies"),
    "changed": lambda rows: beside(rows, "BitSnap ratio by changed values"),
    "iterations": lambda rows: beside(rows, "BitSnap ratio by iterations"),
    "moments": lambda rows: pivot(rows, "BitSnap error of the moments", _scientific, peers=True),
    "moments by size": lambda rows: pivot(rows, "BitSnap error by model size", _last, peers=True),
    "sparsified": lambda rows: beside(rows, "BitSnap loss of sparsified states"),
    "resumed": lambda rows: beside(rows, "BitSnap loss after a restore"),
    "score": lambda rows: pivot(rows, "BitSnap quality score", _first, peers=False),
    "exact": exact,
    "machine": lambda _: _machine(results()),
}


def _scientific(what: str) -> tuple[str, str] | None:
    """Moment and measure, by system."""
    return _last(what) if ", " in what else None


def _machine(document: Json) -> str:
    machine, versions = document["machine"], document["versions"]
    names = ("torch", "numpy", "numba", "zstandard", "zipnn", "pcodec", "blosc2", "moonclip", "lmzip")
    about = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    cpu = f"{machine['cpu']}, {machine['cores']} cores, {machine['gpu'] or 'no GPU'}, Python {machine['python']}"
    measured = ", ".join(f"`{commit}`: {count}" for commit, count in commits(document).most_common())
    return markdown(["machine", "versions", "commit: rows"], [[cpu + elsewhere(document), about, measured]])


def regenerated(text: str) -> str:
    """The page with its tables made anew.

    Raises:
        BadArgumentError: a marker names no table.
    """
    rows = results()["rows"]

    def block(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise BadArgumentError(f"table {match[2]!r} is unknown; one of {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[match[2]](rows)}\n{match[3]}"

    return _BLOCK.sub(block, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page anew; with --check only say whether it is out of step."""
    asked = sys.argv[1:] if arguments is None else list(arguments)
    text = PAGE.read_text(encoding="utf-8")
    made = regenerated(text)
    if asked == ["--check"]:
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
