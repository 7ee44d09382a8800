"""The bench `training`: losses of trainings that are killed and restored compressed, and of fine-tunings.

Inshrinkerator's table 5 (`accuracy.py`, over `faults.py`): small models are killed ten times and end by accuracy and
loss; its section 9.2 (`transfer.py`): a compressed model is fine-tuned. The five levels have a bench of their own,
`harm`. `--only "table 5 MLP 900 steps"` takes one training, `--only "transfer CNN"` one model.
"""

from __future__ import annotations

from ..devices import threads
from ..harness import Options, Row
from . import accuracy, transfer

TITLE = "accuracy, loss and ratio of trainings that are killed and restored; transfer"


def run(options: Options) -> list[Row]:
    """All rows; a few of one small model with `--quick`."""
    with threads(1):
        return accuracy.rows(options) + transfer.rows(options)
