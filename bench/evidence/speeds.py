"""Tables of what it costs: speed and memory by size of the state, stages of a save, and how far two runs lie apart."""

from __future__ import annotations

from .. import cost
from ..codec import FRESH
from . import trainings
from .cells import NONE, Json, markdown, number, shown
from .results import commit_of, rows_of

DRAWN = "default, drawn"
"""What the names of the rows of the large state hold."""


def speed() -> str:
    """Megabytes a second of `bench codec` on its large state, on one thread and on two, beside the peers' on one."""
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
    # Only what is decompressed goes to new memory.
    lines = [
        [what, *(number(cells.get(c)) for c in columns), number(cells[FRESH]) if FRESH in cells else ""]
        for what, cells in found.items()
    ]
    title = f"MB/s of raw state, {size / 1e6:.0f} M parameters, commit {commit_of('codec.json', DRAWN)}"
    return markdown([title, *columns.values(), "copy to new memory"], lines)


def sizes() -> str:
    """Speed and memory against the size of the state."""
    found: dict[str, dict[int, Json]] = {}
    for row in trainings.measured():
        if row["row"].startswith("cost, ") and not row["row"].startswith(cost.STAGES):
            name = row["row"].removeprefix("cost, ").rpartition(", default")[0] or row["row"].removeprefix("cost, ")
            found.setdefault(f"{name}, {row['device'].removeprefix('cpu, ')}", {})[_million(row["size"])] = row
    columns = sorted({size for by_size in found.values() for size in by_size})
    lines = [
        [name, *(f"{shown(by_size.get(size))} {by_size[size]['unit'] if size in by_size else ''}" for size in columns)]
        for name, by_size in found.items()
    ]
    title = f"commit {commit_of('training-cost.json')}" if lines else ""
    return markdown([title, *(f"{size} M parameters" for size in columns)], lines)


def two_runs() -> str:
    """How far the speeds of one state lie apart in the two results that have it, and which commits those are from."""
    ours = {
        (row["row"].removeprefix("cost, ").partition(",")[0], row["device"]): row["value"]
        for row in trainings.measured()
        if row["row"].startswith("cost, ") and row["unit"] == "MB/s" and _million(row["size"]) == 100
    }
    apart = {}
    for row in rows_of("codec.json"):
        what, _, rest = row["row"].partition(", ")
        other = ours.get((what, row["device"]))
        if rest == DRAWN and other and row["value"]:
            apart[f"{what}, {row['device'].removeprefix('cpu, ')}"] = (row["value"], other)
    if not apart:
        return f"*{NONE}*"
    worst = max(apart, key=lambda name: max(apart[name]) / min(apart[name]))
    one, two = apart[worst]
    large = commit_of("codec.json", DRAWN)
    runs = f"commit {commit_of('training-cost.json')}, the README's table of 100 M one of {large}"
    factor = f"{max(one, two) / min(one, two):.1f} times ({worst}: {number(two)} and {number(one)} MB/s)"
    return (
        f"This is a run of {runs}.\n"
        f"Their speeds of the same state differ by up to {factor}, so compare within a table only."
    )


def _million(size: int) -> int:
    """Millions of parameters, as asked for: a drawn state has a few more or less."""
    asked = min((*cost.SIZES, *cost.LARGER), key=lambda s: abs(s - size))
    return asked // 1_000_000


def stages() -> str:
    """Stages of a save with at least 3 % of its time, six deep at most."""
    lines = [
        ["&nbsp;&nbsp;" * (len(stack) - 1) + stack[-1], f"{share:.0%}"]
        for stack, share in cost.flames(trainings.measured()).items()
        if share >= 0.03 and len(stack) <= 6
    ]
    return markdown(["stage, with what it calls", "share"], lines)
