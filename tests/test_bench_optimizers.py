"""Entries of optimizers: the committed study against a run of all that torch has."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shrinkpoint.bench.evidence import results
from shrinkpoint.bench.evidence import tables as table
from shrinkpoint.bench.studies import optimizers as study

SUBJECTS = dict(study.subjects("torch"))


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    found: dict[str, Any] = results.documents("optimizers.json")["optimizers.json"]["optimizers"]
    return found


@pytest.mark.no_evidence
@pytest.mark.parametrize("name", SUBJECTS)
def test_the_page_says_what_becomes_of_each_entry_of_torchs_optimizers(name: str, committed: dict[str, Any]) -> None:
    record = study.attempted(SUBJECTS[name])
    assert type(record) is type(committed[name])
    if isinstance(record, dict):
        assert table.names_of(record) == table.names_of(committed[name])
        assert record["weights"] == committed[name]["weights"]
        assert record["update"] < 0.35
        assert all(e["error"] <= 0.58 for e in record["entries"].values())


def test_an_entry_that_changes_is_found_and_measured() -> None:
    def made(noise: float) -> Callable[[], study.TorchTraining]:
        class Half(study.TorchTraining):
            def put(self, restored: dict[str, Any]) -> None:
                super().put(restored)
                for entry in self.optimizer.state.values():
                    entry["exp_avg"].mul_(1 - noise)

        return lambda: Half(lambda model: torch.optim.Adam(model.parameters(), lr=1e-3))

    usual, shrunk = (study.examined(made(noise)) for noise in (0.0, 0.5))
    assert table.names_of(usual) == (("exp_avg", "exp_avg_sq"), ("step",))
    assert 0 < usual["update"] < 0.2 < shrunk["update"] < 1
    low, high = usual["entries"]["exp_avg"]["gain"]
    assert 0.98 < low <= high < 1.02


def test_the_example() -> None:
    assert doctest.testmod(table).failed == 0
