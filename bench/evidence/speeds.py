"""The table of speeds: compress and decompress of a large state, next to the peers."""

from __future__ import annotations

from ..codec import FRESH
from .cells import markdown, number
from .results import commit_of, rows_of

DRAWN = "default, drawn"
"""What the names of the rows of the large state hold."""


def speed() -> str:
    """Return MB/s of `bench codec` on its large state, on one and two threads, and the peers'."""
    found: dict[str, dict[str, float | None]] = {}
    size = 0
    for row in rows_of("codec.json"):
        what, config, state = [*row["row"].split(", "), "", ""][:3]
        if f"{config}, {state}" != DRAWN or not row["device"].startswith("cpu"):
            continue
        cells = found.setdefault(what, {})
        cells[row["device"].removeprefix("cpu, ")] = row["value"]
        size = row["size"]
        if row["device"] == "cpu, 1 thread":
            cells[row["peer"]] = row["peer_value"]
    columns = {"1 thread": "1 thread", "2 threads": "2 threads", "zstd -3": "zstd -3", "torch.save": "torch.save"}
    columns |= {"memcpy": "memory copy"}
    # Only decompression writes to new memory.
    lines = [
        [what, *(number(cells.get(c)) for c in columns), number(cells[FRESH]) if FRESH in cells else ""]
        for what, cells in found.items()
    ]
    title = f"MB/s of raw state, {size / 1e6:.0f} M parameters, commit {commit_of('codec.json', DRAWN)}"
    return markdown([title, *columns.values(), "copy to new memory"], lines)
