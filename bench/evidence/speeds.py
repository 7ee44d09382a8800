"""The table of speeds: compress and decompress of a large state, next to the peers."""

from __future__ import annotations

from collections.abc import Iterator

from ..codec import FRESH
from .cells import NONE, Json, crossed, markdown, number
from .results import commit_of, rows_of

DRAWN = "default, GPT"
"""What the names of the rows of the large state hold."""
LEVELS = ("default", "precise", "exact_weights", "lossless")


def _rows() -> Iterator[tuple[str, str, str, Json]]:
    """Yield what was measured, configuration, state and row of `bench codec`."""
    for row in rows_of("codec.json"):
        what, config, state = [*row["row"].split(", "), "", ""][:3]
        if config in LEVELS:
            yield what, config, state, row


def choices() -> str:
    """Return the size and speed of every level and peer on the states of the GPT, on one thread."""
    found: dict[str, dict[str, float | None]] = {}
    for what, config, state, row in _rows():
        if state != "GPT" or row["device"] != "cpu, 1 thread":
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
    for what, config, state, row in _rows():
        if not what.startswith("size of") or row["value"] is None:
            continue
        found.setdefault(state, {}).setdefault(config, {})[what] = row["value"]
        if row["peer_value"] is not None:
            best[state] = max(best.get(state, (0.0, "")), (row["peer_value"], row["peer"]))
    lines = []
    for state, of in found.items():
        cells = (" / ".join(map(number, of[name].values())) if name in of else "" for name in LEVELS)
        lines.append([state, *cells, f"{number(best[state][0])} ({best[state][1]})" if state in best else ""])
    return markdown(["base / delta", *LEVELS, "smallest exact peer"], lines)


def speed() -> str:
    """Return MB/s of `bench codec` on its large state, on one and two threads, and the peers'."""
    cells, size, one = [], 0, "cpu, 1 thread"
    columns = {name: name for name in ("1 thread", "2 threads", "zstd -1", "zipnn", "OpenZL", "torch.save")}
    columns |= {"memcpy": "memory copy", FRESH: "copy to new memory"}
    for what, config, state, row in _rows():
        if f"{config}, {state}" != DRAWN or not row["device"].startswith("cpu") or row["unit"] != "MB/s":
            continue
        size = row["size"]
        pairs = [(row["device"].removeprefix("cpu, "), row["value"])]
        pairs += [(row["peer"], row["peer_value"])] if row["device"] == one else []
        cells += [(what, columns[name], number(value)) for name, value in pairs if name in columns]
    title = f"MB/s of raw state, {size / 1e6:.0f} M parameters, commit {commit_of('codec.json', DRAWN)}"
    # Only decompression writes to new memory.
    cells = [*((what, columns[FRESH], "") for what, _, _ in cells), *cells]
    return crossed(cells, columns.values(), NONE, title)
