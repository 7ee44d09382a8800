"""Tables of trainings: Inshrinkerator's table 5, a real training that goes on, fine-tuning."""

from __future__ import annotations

from ..studies import continued
from ..studies.accuracy import PREFIX
from .cells import NONE, Json, markdown, number, shown, spread
from .results import by_place, rows_of


def measured() -> dict[str, dict[str, Json]]:
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
    for place, rows in measured().items():
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
