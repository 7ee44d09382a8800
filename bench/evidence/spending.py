"""The picture of costs: speeds next to lossless peers, and stalls of a save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Json = Mapping[str, Any]
_OWN, _OTHER = "#2a6f97", "#b5651d"
WAYS = ("compress base", "compress delta", "decompress base", "decompress delta")
STALL = "stall of save"
OWN = ("shrinkpoint", "Saver")
"""What the names of our own bars begin with."""


def speeds(rows: Sequence[Json]) -> dict[str, dict[str, float]]:
    """Return MB/s of raw state by way and system: ours on one and two threads, peers on one.

    Args:
        rows: of `bench codec`; those of its large state are taken.
    """
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        way, _, rest = row["row"].partition(", ")
        if way not in WAYS or rest != "default, GPT":
            continue
        count = row["device"].removeprefix("cpu, ")
        of = {f"shrinkpoint, {count}": row["value"]}
        if count == "1 thread" and row["peer"] != "memcpy":
            of[row["peer"]] = row["peer_value"]
        found.setdefault(way, {}).update((who, value) for who, value in of.items() if value is not None)
    return {way: dict(sorted(of.items(), key=lambda one: not one[0].startswith(OWN))) for way, of in found.items()}


def stalls(rows: Sequence[Json]) -> dict[str, dict[str, float]]:
    """Return milliseconds that a save blocks the caller, by state and system.

    Args:
        rows: of `bench saver`.
    """
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["row"] != STALL or None in (row["value"], row["peer_value"]):
            continue
        state = found.setdefault(row["note"].partition(";")[0], {"Saver.save": row["value"]})
        state["one copy of memory" if row["peer"] == "memcpy" else row["peer"]] = row["peer_value"]
    return found


def picture(codec: Sequence[Json], saver: Sequence[Json], path: Path) -> None:
    """Draw both, speeds on the left.

    Args:
        codec: rows of `bench codec`.
        saver: rows of `bench saver`.
        path: of the PNG file.

    Raises:
        BadArgumentError: Matplotlib is not installed.
    """
    from ..plot import pyplot

    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 4.6), layout="constrained")
    _bars(axes[0], speeds(codec), "MB/s of raw state (more is better), 25 M parameters")
    _bars(axes[1], stalls(saver), "ms for which a save holds up training (less is better)")
    axes[1].set_xscale("log")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axis: Any, groups: Mapping[str, Mapping[str, float]], label: str) -> None:
    """Draw groups of bars with their values; ours in one colour, others in another."""
    at, ticks = 0.0, []
    for group, bars in groups.items():
        axis.text(0.0, at - 0.75, group, transform=axis.get_yaxis_transform(), fontsize=9, fontweight="bold")
        for who, value in bars.items():
            axis.barh(at, value, height=0.8, color=_OWN if who.startswith(OWN) else _OTHER)
            axis.annotate(f"{value:,.3g}" if value < 100 else f"{value:,.0f}", (value, at), xytext=(3, 0),
                          textcoords="offset points", va="center", fontsize=8)  # fmt: skip
            ticks.append((at, who))
            at += 1.0
        at += 1.3
    axis.set_yticks([y for y, _ in ticks], [who for _, who in ticks], fontsize=8)
    axis.set_ylim(at - 1.3, -1.3)
    axis.margins(x=0.12)
    axis.set_xlabel(label)
    axis.spines[["top", "right"]].set_visible(False)
