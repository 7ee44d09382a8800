"""The short table of the papers: the rows of `bench systems` for each figure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_RANGE = re.compile(r": ([\d.]+) to ([\d.]+) ")


class Line(NamedTuple):
    """A published figure, and the pattern of the rows that measure it.

    Args:
        title: system, table, what.
        pattern: of the rows' names; those without a published figure next to them do not count.
        unit: as shown after both.
    """

    title: str
    pattern: str
    unit: str = ""


LINES = (
    Line("Inshrinkerator, table 7: its bins for 1 %", "Inshrinkerator spaces on .*: 1 % .*, Inshrinkerator"),
    Line("table 7: adaptive uniform bins for 1 %", "Inshrinkerator spaces on .*: 1 % .*, adaptive uniform"),
    Line("table 7: uniform bins for 1 %", "Inshrinkerator spaces on .*: 1 % .*, uniform"),
    Line("figure 12: deltas, rearranged", "Inshrinkerator delta coder: .*, rearranged, overall", " x"),
    Line("LC-Checkpoint, figure 3: SCAR's rework over its, 2 bits", "LC-.*: SCAR over LC-Checkpoint, 2 bits", " x"),
    Line("figure 3: TOPN's rework over its, 2 bits", "LC-.*: TOPN over LC-Checkpoint, 2 bits", " x"),
    Line("figure 4: size, 2 bits", r"LC-.*, 2 bits, E\+P\+H", " %"),
    Line("figure 6: iterations that a failure costs", "LC-.* cost of a failure: .*, LC-Checkpoint, .*"),
    Line("Check-N-Run, figure 17: bandwidth, one restore", "Check.*: 2 bits, intermittent: bandwidth .*", " x less"),
    Line("figure 17: capacity, one restore", "Check.*: 2 bits, intermittent: capacity .*", " x less"),
    Line("figure 17: bandwidth, over 20 restores", "Check.*: 8 bits, intermittent: bandwidth .*", " x less"),
    Line("figure 17: capacity, over 20 restores", "Check.*: 8 bits, intermittent: capacity .*", " x less"),
    Line("BitSnap, section 3.3: ratio at 15 % of changes", "BitSnap ratio by changed values: 15 % changed", " x"),
    Line("section 3.4: ratio of the moments", "BitSnap error of the moments: ratio of the moments", " x"),
    Line("figure 13: loss some time after a restore", "BitSnap loss after a restore: .*, loss after 60 steps", " %"),
)
"""Of each paper the figures that its abstract or its conclusion rests on."""


def table(rows: Sequence[Mapping[str, Any]], number: Callable[[float | None], str]) -> list[list[str]]:
    """Return title, published and measured figures of the lines that were measured.

    Args:
        rows: of the results.
        number: as shown.

    Example:
        >>> name = "BitSnap ratio by changed values: 15 % changed"
        >>> rows = [{"row": name, "value": 4.706, "peer": "BitSnap", "peer_value": 4.71}]
        >>> table(rows, lambda x: f"{x:.3g}")
        [['BitSnap, section 3.3: ratio at 15 % of changes', '4.71 x', '4.71 x']]
    """
    found = []
    for line in LINES:
        own = [
            row
            for row in rows
            if re.fullmatch(line.pattern, row["row"]) and None not in (row["value"], row["peer_value"])
        ]
        if own:
            # Where a paper has a range, its row is held against the lower end and names both.
            named = _RANGE.search(own[0]["peer"])
            theirs = [float(end) for end in named.groups()] if named else [row["peer_value"] for row in own]
            published, measured = (_span(values, number) for values in (theirs, [row["value"] for row in own]))
            found.append([line.title, published + line.unit, measured + line.unit])
    return found


def _span(values: Sequence[float], number: Callable[[float | None], str]) -> str:
    # A value below a thousandth counts as zero here.
    low, high = (number(round(end(values), 3)) for end in (min, max))
    return low if low == high else f"{low} to {high}"
