"""Tables of `bench scale`."""

from __future__ import annotations

from .cells import NONE, Json, figure, markdown, number
from .results import by_place, rows_of

_SHARD = "175 M shard, "


def shard() -> str:
    """Seconds, extra memory and ratio of one rank's shard, by level."""
    found: dict[str, dict[str, Json]] = {}
    for place, rows in by_place(rows_of("scale.json"), _SHARD).items():
        level, _, what = place.rpartition(", ")
        for label, row in rows.items():
            found.setdefault(level, {})[f"{what}: {label}"] = row
    lines = []
    for level, rows in found.items():
        for what in ("compress base", "compress delta", "restore base"):
            cells = []
            for label in ("seconds", "extra memory", "ratio"):
                row = rows.get(f"{what}: {label}")
                cells.append("" if row is None else figure(row))
            ratio = rows.get(f"{what}: ratio")
            every = "" if ratio is None else ratio["note"].split(";")[0].rpartition(": ")[2].partition(" for ")[0]
            lines.append([level, what, *cells, every])
    return markdown(["", "", "seconds", "extra memory", "ratio", "1,000 ranks"], lines)


def others() -> str:
    """Every other row: the long chain, the search by eight ranks."""
    lines = []
    for row in rows_of("scale.json"):
        if not row["row"].startswith(_SHARD):
            peer = "" if row["peer"] is None else f"{number(row['peer_value'])} ({row['peer']})"
            lines.append([row["row"], figure(row) if row["value"] is not None else NONE, peer])
    return markdown(["", "measured", "next to it"], lines)
