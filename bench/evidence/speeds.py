"""The table of speeds: compress and decompress of a large state, next to the peers."""

from __future__ import annotations

from ..codec import FRESH
from .cells import markdown, number
from .results import commit_of, rows_of

DRAWN = "default, GPT"
"""What the names of the rows of the large state hold."""
LEVELS = ("default", "precise", "exact_weights", "lossless")


def choices() -> str:
    """Return the size and speed of every level and peer on the states of the GPT, on one thread."""
    found: dict[str, dict[str, float | None]] = {}
    for row in rows_of("codec.json"):
        what, config, state = [*row["row"].split(", "), "", ""][:3]
        if state != "GPT" or config not in LEVELS or row["device"] != "cpu, 1 thread":
            continue
        found.setdefault(f"**shrinkpoint**, {config}", {})[what] = row["value"]
        if config == "lossless" and what.endswith("base") and row["peer"]:
            found.setdefault(row["peer"], {})[what] = row["peer_value"]
    whats = ("size of the base", "size of the delta", "compress base", "decompress base")
    shown = {who: cells for who, cells in found.items() if cells.get("compress base") is not None}
    order = sorted(shown, key=lambda who: not who.startswith("**"))
    lines = [[who, *(number(shown[who][what]) if what in shown[who] else "" for what in whats)] for who in order]
    return markdown(["", "times smaller", "a delta", "encode, MB/s", "decode, MB/s"], lines)


def states() -> str:
    """Return the ratios of each level on the states of `bench codec`, and the best peer."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    best: dict[str, tuple[float, str]] = {}
    for row in rows_of("codec.json"):
        what, config, state = [*row["row"].split(", "), "", ""][:3]
        if not what.startswith("size of") or row["value"] is None or config not in LEVELS:
            continue
        found.setdefault(state, {}).setdefault(config, {})[what.rpartition(" ")[2]] = row["value"]
        if row["peer_value"] is not None:
            best[state] = max(best.get(state, (0.0, "")), (row["peer_value"], row["peer"]))
    lines = []
    for state, of in found.items():
        cells = (" / ".join(map(number, of[name].values())) if name in of else "" for name in LEVELS)
        lines.append([state, *cells, _peer(best, state)])
    return markdown(["base / delta", *LEVELS, "smallest exact peer"], lines)


def _peer(best: dict[str, tuple[float, str]], state: str) -> str:
    return f"{number(best[state][0])} ({best[state][1]})" if state in best else ""


def speed() -> str:
    """Return MB/s of `bench codec` on its large state, on one and two threads, and the peers'."""
    found: dict[str, dict[str, float | None]] = {}
    size = 0
    for row in rows_of("codec.json"):
        what, config, state = [*row["row"].split(", "), "", ""][:3]
        if f"{config}, {state}" != DRAWN or not row["device"].startswith("cpu") or row["unit"] != "MB/s":
            continue
        cells = found.setdefault(what, {})
        cells[row["device"].removeprefix("cpu, ")] = row["value"]
        size = row["size"]
        if row["device"] == "cpu, 1 thread":
            cells[row["peer"]] = row["peer_value"]
    names = ("1 thread", "2 threads", "zstd -1", "zipnn", "OpenZL", "torch.save")
    columns = {name: name for name in names} | {"memcpy": "memory copy"}
    # Only decompression writes to new memory.
    lines = [
        [what, *(number(cells.get(c)) for c in columns), number(cells[FRESH]) if FRESH in cells else ""]
        for what, cells in found.items()
    ]
    title = f"MB/s of raw state, {size / 1e6:.0f} M parameters, commit {commit_of('codec.json', DRAWN)}"
    return markdown([title, *columns.values(), "copy to new memory"], lines)
