"""The harm harness: divergences of known outputs, paired bounds, rows that are kept."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shrinkpoint.bench.evidence import levels
from shrinkpoint.bench.studies.harm import campaign, families, groups, measure
from shrinkpoint.bench.studies.harm.measure import Answers, divergence
from shrinkpoint.bench.studies.harm.summary import Campaign, Effect, bench_rows

pytest.importorskip("sklearn")


def short(family: families.Family, steps: int) -> families.Family:
    return dataclasses.replace(family, workload=dataclasses.replace(family.workload, steps=steps))


def test_divergence_of_known_classes() -> None:
    exact = Answers(torch.tensor([[0.0, 0.0], [3.0, 0.0]]), 2.0, 1.0)
    other = Answers(torch.tensor([[math.log(3.0), 0.0], [0.0, 3.0]]), 2.1, 0.5)
    found = divergence(families.mlp(), exact, other)
    first = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    p = 1 / (1 + math.exp(-3.0))
    second = p * 3.0 - (1 - p) * 3.0
    assert found["divergence"] == pytest.approx((first + second) / 2)
    assert found["changed"] == 0.5  # of a tie the first one is the answer
    assert found["loss"] == pytest.approx(0.05)
    assert divergence(families.mlp(), exact, exact) == {"divergence": 0.0, "changed": 0.0, "loss": 0.0}


def test_divergence_of_values_is_relative() -> None:
    exact, other = Answers(torch.tensor([[3.0, 4.0]]), 1.0, None), Answers(torch.tensor([[3.0, 4.5]]), 1.0, None)
    found = divergence(families.autoencoder(), exact, other)
    assert found == {"divergence": pytest.approx(0.1), "changed": None, "loss": 0.0}


def test_bounds_are_one_sided_by_the_t_distribution() -> None:
    found = Effect.of([0.1, 0.3, 0.2, 0.4])
    assert found is not None
    assert found.mean == pytest.approx(0.25)
    assert found.bound == pytest.approx(0.25 + 2.353 * found.error, abs=1e-4)
    assert (Effect.of([]), Effect.of([0.5])) == (None, Effect(0.5, None, None, 1))


def record(what: str, setting: str, seed: int, loss: float, **more: Any) -> dict[str, Any]:
    row = {
        "what": what,
        "family": "MLP",
        "setting": setting,
        "seed": seed,
        "loss": loss,
        "accuracy": 0.9,
        "before": 2.0,
    }
    restores = [{"step": 10, "divergence": 0.1, "changed": 0.01, "loss": 0.002}]
    return row | {"ratio": 25.0, "weights": 20.0, "restores": restores} | more


def test_ends_are_paired_with_the_null_of_their_seed() -> None:
    rows = [record("end", "uninterrupted", seed, 1.0 + seed) for seed in (0, 1, 2)]
    rows += [record("killed", "null", seed, (1.0 + seed) * 1.01) for seed in (0, 1)]
    rows += [
        record("killed", "default", seed, (1.0 + seed) * (1.02 + 0.01 * seed), accuracy=0.89) for seed in (0, 1, 2)
    ]
    found = Campaign(rows).found("MLP", "default")
    assert found is not None
    assert found.loss is not None
    assert found.accuracy is not None
    assert (found.loss.seeds, found.loss.mean) == (2, pytest.approx(1.5))  # seed 2 has no null
    assert found.accuracy.mean == pytest.approx(1.0)
    assert found.rms == pytest.approx(0.2)
    assert found.agreement == pytest.approx(99.0)
    by_name = {row.row: row for row in bench_rows(Campaign(rows), dict.fromkeys(groups.ALL, 1))}
    assert by_name["MLP, default: whole state, chain"].met is True
    assert by_name["MLP, default: same answers at a restore"].met is False
    missing = by_name["GPT, default: loss after ten kills, 95 % bound"]
    assert (missing.value, missing.met) == (None, None)
    assert "not measured" in missing.note


def test_the_table_of_levels_has_a_figure_a_cell_and_names_the_worst_families(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [record("end", "uninterrupted", seed, 1.0) for seed in (0, 1)]
    rows += [record("killed", "null", seed, 1.01) for seed in (0, 1)]
    rows += [record("killed", "default", seed, 1.02 + 0.01 * seed) for seed in (0, 1)]
    better = [{"step": 10, "divergence": 0.1, "changed": 0.02, "loss": -0.5}]
    rows += [row | {"family": "ViT", "ratio": 15.0, "loss": 1.0, "restores": better} for row in rows]
    monkeypatch.setattr(levels, "campaign", lambda: Campaign(rows))
    table = levels.levels()
    line = "| `Config()` | 20 x | 15 x | 98.00 % | 4.66 % worse | not measured | not measured |"
    assert line in table
    assert "`Config()` ViT, ViT, MLP" in table


def test_a_campaign_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "harm.jsonl"
    done: list[str] = []
    monkeypatch.setattr(campaign, "uninterrupted", lambda family, seed: {"loss": 1.0, "accuracy": None})
    monkeypatch.setattr(campaign, "killed", lambda family, setting, seed: done.append(setting) or {"loss": 1.0})
    monkeypatch.setattr(campaign, "resumed", lambda *_: None)
    monkeypatch.setattr(campaign, "chain", lambda *_: {})
    quiet: dict[str, Any] = {"families": ("MLP",), "parts": (), "say": lambda _: None}
    campaign.measure(campaign.Rows(path), [0], levels=("null",), **quiet)
    with path.open("a") as file:
        file.write('{"what": "killed", "family": "MLP", "setti')  # the process was killed while it wrote
    campaign.measure(campaign.Rows(path), [0], levels=("null", "default"), **quiet)
    assert done == ["null", "default"]
    assert len(campaign.Rows(path).rows) == 3
    assert json.loads(path.read_text().splitlines()[0])["what"] == "end"


def test_what_is_stored_exactly_ends_exactly() -> None:
    """An exact setting ends as the uninterrupted training, with equal answers at restores."""
    family = short(families.mlp(), 40)
    found = measure.killed(family, "lossless", 0, failures=2)
    assert (found["loss"], found["accuracy"]) == tuple(
        measure.uninterrupted(family, 0)[k] for k in ("loss", "accuracy")
    )
    assert [r["divergence"] for r in found["restores"]] == [0.0, 0.0]
    assert measure.killed(family, "compact", 0, failures=2)["loss"] != found["loss"]


@pytest.mark.parametrize("name", groups.ALL)
def test_each_family_trains_and_answers(name: str) -> None:
    family = short(groups.ALL[name](), 10)
    rows: dict[str, Any] = {}
    measure.resumed(family, ["lossless"], 0, rows.__setitem__, after=(0,))
    assert rows["lossless"]["after"]["0"]["divergence"] == 0.0
    assert 15_000 < family.workload.parameters < 200_000
