"""Compilation of kernels before the first save of a worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.kernels.backend import dispatch
from shrinkpoint.store.saver.worker import warm_up


@pytest.fixture
def compressed(monkeypatch: pytest.MonkeyPatch) -> list[sp.Checkpoint]:
    """Record the checkpoints that a warm-up makes."""
    made: list[sp.Checkpoint] = []
    right = sp.compress

    def compress(*given: Any, **named: Any) -> sp.Checkpoint:
        made.append(right(*given, **named))
        return made[-1]

    monkeypatch.setattr("shrinkpoint.codec.compress.compress", compress)
    return made


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_bases_and_deltas_are_those_of_a_training(compressed: list[sp.Checkpoint], convert: Any) -> None:
    warm_up(sp.Config(), convert, lambda: False)
    assert [made.is_delta for made in compressed] == [False, True, False, True]
    for made in compressed:
        rows = {row.path: row for row in made.summary()}
        assert rows["model/linear.weight"].codec == "quantize"
        assert rows["model/norm.weight"].codec == "exact"
        # Small arrays take NumPy, and nothing of theirs would be compiled.
        assert rows["model/linear.weight"].raw_bytes > 4 * dispatch.SMALL
    moments = {row.path.rsplit("/", 1)[1]: row.codec for row in compressed[-1].summary() if row.path.startswith("opt")}
    assert moments["exp_avg"] == "first moment"
    assert moments["exp_avg_sq"] == "second moment"


def test_a_save_that_waits_ends_it(compressed: list[sp.Checkpoint]) -> None:
    warm_up(sp.presets.lossless(), np.asarray, lambda: len(compressed) == 3)
    assert len(compressed) == 3
