"""Tables of `bench scale`."""

from __future__ import annotations

from .cells import NONE, figure, markdown, number
from .results import by_place, rows_of

_SHARD = "175 M shard, "


def shard() -> str:
    """Seconds, extra memory and ratio of one rank's shard, by level."""
    lines = []
    for place, rows in by_place(rows_of("scale.json"), _SHARD).items():
        cells = [figure(rows[label]) if label in rows else "" for label in ("seconds", "extra memory", "ratio")]
        note = rows["ratio"]["note"] if "ratio" in rows else ""
        every = note.split(";")[0].rpartition(": ")[2].partition(" for ")[0]
        lines.append([*place.rsplit(", ", 1), *cells, every])
    return markdown(["", "", "seconds", "extra memory", "ratio", "1,000 ranks"], lines)


def others() -> str:
    """Table of the other rows: the long chain, and the search by eight ranks."""
    lines = []
    for row in rows_of("scale.json"):
        if not row["row"].startswith(_SHARD):
            peer = "" if row["peer"] is None else f"{number(row['peer_value'])} ({row['peer']})"
            lines.append([row["row"], figure(row) if row["value"] is not None else NONE, peer])
    return markdown(["", "measured", "next to it"], lines)


PAPER_MODELS = {"ResNet-152": 60.2e6, "BERT Base": 110e6, "ViT L32": 306.5e6, "GPT-2 Medium": 335e6}
"""Parameters of Inshrinkerator's models, its table 3."""
_STATE, _INTERVAL = 12, 1800.0
"""Bytes a parameter of float32 weights with AdamW's moments; seconds between checkpoints, Check-N-Run's interval."""


def _rate(name: str, device: str) -> float | None:
    """Return bytes a second of the codec on a large state."""
    rows = (row for row in rows_of("codec.json") if (row["row"], row["device"]) == (name, device))
    return next((1e6 * row["value"] for row in rows if row["size"] > 2e7 and row["value"] is not None), None)


def computed() -> str:
    """Seconds of a save and a search round of the paper's models, as shares of 30 minutes.

    These were not run: seconds are bytes over the measured rates of one thread, without evaluations.
    """
    rates = (_rate(f"{what} delta, default, GPT", "cpu, 1 thread") for what in ("compress", "decompress"))
    compress, decompress = rates
    lines = []
    for name, parameters in PAPER_MODELS.items():
        if compress is None or decompress is None:
            lines.append([name, NONE, NONE, NONE, NONE])
            continue
        save = _STATE * parameters / compress
        trial = save + _STATE * parameters / decompress
        shares = [100 * seconds / _INTERVAL for seconds in (save + trial, trial)]
        lines.append([name, *(f"{number(s)} s" for s in (save, trial)), *(f"{number(share)} %" for share in shares)])
    return markdown(["computed", "a save", "a trial", "both, of 30 min", "save in the background"], lines)
