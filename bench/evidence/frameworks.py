"""Tables of `bench trainers`: each framework's own saves next to ours."""

from __future__ import annotations

import re

from . import levels
from .cells import NONE, markdown, number, shown
from .results import by_place, rows_of

_RESUMES = ("resume, lossless", "loss after a lossy resume")


def frameworks() -> str:
    """Table of frameworks: saves by ours and by their own, and the result of a resume."""
    both = ("stall of a save", "overhead of the run", "bytes of a save", "lines", "save", "metadata")
    lines = []
    for name, found in by_place(rows_of("trainers.json")).items():
        peer = next(r["peer"] for r in found.values() if r["peer"])
        pairs = (found.get(what) for what in both)
        cells = [f"{number(p['value'])} / {number(p['peer_value'])} {p['unit']}" if p else "" for p in pairs]
        resumes = [shown(found[w], f" {found[w]['unit']}") if w in found else "" for w in _RESUMES]
        lines.append([f"{name} / {peer}", *cells, *resumes])
    return markdown(["", *both, *_RESUMES], lines)


def trainers() -> str:
    """Bytes of a save in each framework next to its own, and the loss after a lossy resume."""
    lines, title = [], ""
    for name, found in by_place(rows_of("trainers.json")).items():
        stored, loss = found.get("bytes of a save"), found.get(_RESUMES[1])
        if stored is None or loss is None:
            continue
        how = re.match(r"(\d+) steps of .*, a save every (\d+)", found["overhead of the run"]["note"])
        title = f"{stored['size']:,} parameters" + (f", {how[1]} steps, a save every {how[2]}" if how else "")
        ratio, change = f"{stored['ratio']:.1f} x", levels.change(loss["value"])
        lines.append([name, _bytes(stored["value"]), stored["peer"], _bytes(stored["peer_value"]), ratio, change])
    return markdown([title, "bytes of a save", "its own", "bytes", "times smaller", "loss after a resume"], lines)


def _bytes(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def ranks() -> str:
    """Table of saves by several processes: ours and torch's."""
    named = ((re.fullmatch(r"DCP, (\d+) ranks: (.*)", row["row"]), row) for row in rows_of("trainers.json"))
    rows = {(m[1], m[2]): row for m, row in named if m and row["value"] is not None and m[2] != "save"}
    worlds, columns = (list(dict.fromkeys(key[i] for key in rows)) for i in (0, 1))
    lines = []
    for world in worlds:
        pairs = (rows.get((world, what), {"value": None, "peer_value": None}) for what in columns)
        lines.append([world, *(_bytes(pair[side]) for pair in pairs for side in ("value", "peer_value"))])
    return markdown(["ranks", *(text for what in columns for text in (what, "torch"))], lines)
