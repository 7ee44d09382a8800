"""Tables of `bench scale`, of killed trainings, and of fine-tuning."""

from __future__ import annotations

from ..studies import continued
from ..studies.accuracy import PREFIX
from .cells import NONE, Json, figure, markdown, number, shown, spread
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


# ------------------------------------------------------------------------------------------------------------ trainings


def table5_rows() -> dict[str, dict[str, Json]]:
    """Return the rows by training and system, then by label."""
    return by_place(rows_of("training-table-5-*.json"), PREFIX)


def _split(place: str) -> tuple[str, str]:
    """Split a name into training, which ends with "steps", and system.

    Example:
        >>> _split("MLP, 3,600 steps, Config(), fixed")
        ('MLP, 3,600 steps', 'Config(), fixed')
    """
    training, _, system = place.partition(" steps, ")
    return f"{training} steps", system


def table5() -> str:
    """Table of final accuracy, final loss and ratio of weights, by training and system."""
    lines = []
    for place, rows in table5_rows().items():
        training, system = _split(place)
        accuracy, loss, weights = (
            rows.get(label)
            for label in ("accuracy lost at the end", "degradation of the loss at the end", "weights, all checkpoints")
        )
        ratio = NONE if weights is None else f"{number(weights['value'])} x"
        lines.append([training, system, spread(accuracy), spread(loss), ratio])
    return markdown(["", "", "accuracy lost, %", "loss, %", "weights"], lines)


def going_on() -> str:
    """Loss and accuracy of the real training that went on, by level."""
    lines = [
        [
            name,
            spread(rows.get("loss at the end")),
            spread(rows.get("accuracy lost at the end")),
            NONE if (ratio := rows.get("whole state, all checkpoints")) is None else f"{number(ratio['value'])} x",
        ]
        for name, rows in by_place(rows_of("real-continued.json"), continued.NAME).items()
    ]
    return markdown(["", "loss at the end, %", "accuracy lost, points", "whole state"], lines)


def transferred() -> str:
    """Return the table of transfer: ratios, losses and accuracies."""
    lines = [
        [
            name,
            shown(found.get("ratio"), " x"),
            shown(found.get("loss change straight after restore"), " %"),
            spread(found.get("loss change after fine-tuning")),
            spread(found.get("accuracy lost after fine-tuning")),
        ]
        for name, found in by_place(rows_of("training-transfer-*.json"), "transfer ").items()
    ]
    return markdown(
        ["", "ratio", "loss straight after restore", "loss after fine-tuning, %", "accuracy lost, points"], lines
    )
