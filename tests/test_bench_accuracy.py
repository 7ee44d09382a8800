"""Inshrinkerator's table 5 by accuracy, `bench scale`, and the continued real training."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.bench.evidence import tables
from shrinkpoint.bench.harness import Options, threads
from shrinkpoint.bench.studies import real, scale, training, workloads
from shrinkpoint.bench.studies.baselines.quantizers import QDCompressor, adaptive_ladder, uniform_ladder
from shrinkpoint.bench.studies.faults import end_of, quality
from shrinkpoint.bench.studies.workloads import Run, State, Workload


def short(steps: int = 40) -> Workload:
    return dataclasses.replace(workloads.mlp(), steps=steps)


@pytest.fixture(scope="module")
def run() -> Run:
    with threads(1):
        found = Run(short(), 0)
        found.train(40)
        return found


def test_accuracy_is_the_share_of_right_answers(run: Run) -> None:
    wrong = sum(int((run.model(x).argmax(1) != labels).sum()) for x, labels in workloads.mlp().held_out()[:3])
    assert run.accuracy(3) == pytest.approx(1 - wrong / 1500)
    assert end_of(short(), 0).accuracy == run.accuracy()
    assert run.model.training
    blind = dataclasses.replace(short(), right=None)
    assert Run(blind, 0).accuracy() != Run(blind, 0).accuracy()  # NaN: not defined


def test_a_search_sees_loss_or_accuracy_of_what_is_restored(run: Run) -> None:
    state = run.state()
    other: State = {**state, "model": {k: torch.zeros_like(v) for k, v in state["model"].items()}}
    with threads(1):
        by_loss, by_accuracy = quality(run, 2, "loss"), quality(run, 2, "accuracy")
        assert by_accuracy(state) == run.accuracy(2) > 2 * by_accuracy(other)
        assert by_loss(state) < by_loss(other)


def test_ladders_ascend() -> None:
    state = Run(short(), 0).state()
    for ladder in (adaptive_ladder, uniform_ladder):
        places = [place for place, _ in ladder(state)]
        assert places == sorted(places)
        assert len(places) > 5
    assert len(list(adaptive_ladder(state))) == 6 * 4 * 5
    assert all(isinstance(system, QDCompressor) for _, system in uniform_ladder(state))


@pytest.mark.parametrize(("threshold", "met"), [(10.0, True), (-1.0, False)])
def test_a_searched_baseline_takes_the_first_that_passes_and_never_a_coarser_one_later(
    run: Run, threshold: float, met: bool
) -> None:
    system = training.SearchedPeer(uniform_ladder, threshold, "loss", 1)
    with threads(1):
        size = system.save(run)
        first, calls = system.floor, system.evaluations
        system.save(run)
    assert (system.unmet == 0) is met
    rungs = len(list(uniform_ladder(run.state())))
    if met:
        assert (calls, system.evaluations) == (2, 4)
        assert system.floor >= first == next(uniform_ladder(run.state()))[0]
    else:
        assert calls == rungs + 1  # all were tried, and the finest is taken
    assert size.raw_weights > 2 * size.weights


def test_rows_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: training.SYSTEMS[name] for name in ("Config(), fixed", training.OTHER_BATCHES)}
    monkeypatch.setattr(training, "SYSTEMS", few)
    rows = training.table5(Options(quick=True, only="table 5"))
    assert len(rows) == len(few) * len(training.COLUMNS)
    assert {row.row.partition(", quick, ")[2].partition(": ")[0] for row in rows} == set(few)
    by_name = {row.row: row for row in rows}
    exact = f"table 5, MLP, quick, {training.OTHER_BATCHES}"
    assert by_name[f"{exact}: accuracy lost at a restore"].value == 0
    assert by_name[f"{exact}: weights, all checkpoints"].value == 1
    assert "uninterrupted" in rows[0].note
    assert training.table5(Options(quick=True)) == []


def test_a_system_s_name_says_what_it_is() -> None:
    for name in training.SYSTEMS:
        assert "fixed" in name or "searched at each checkpoint for" in name or name == training.OTHER_BATCHES
    assert {"Inshrinkerator, fixed, 32 bins", "Config(), fixed"} < set(training.SYSTEMS)


def test_computed_shares_follow_from_the_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("compress delta, default, GPT", "decompress delta, default, GPT")
    rows = [{"row": n, "device": "cpu, 1 thread", "size": 1e8, "value": 1000.0} for n in names]
    monkeypatch.setattr(tables, "rows_of", lambda _: rows)
    monkeypatch.setattr(tables, "PAPER_MODELS", {"a": 150e6})  # 1.8 GB: 1.8 s each way
    assert tables.computed().splitlines()[-1] == "| a | 1.8 s | 3.6 s | 0.3 % | 0.2 % |"
    monkeypatch.setattr(tables, "rows_of", lambda _: [])
    assert "not measured" in tables.computed()


def test_a_chain_of_many_steps() -> None:
    rows = {row.row.partition(": ")[2]: row for row in scale.chain(Options(quick=True))}
    assert {"shrinkpoint ls", "steps(), same store", "gc to the newest 10"} < set(rows)
    assert "10 steps left" in rows["gc to the newest 10"].note
    assert all(row.value is not None and row.value > 0 for row in rows.values())


def test_the_encoder_learns_and_goes_on_exactly_from_a_state() -> None:
    with threads(1):
        torch.manual_seed(0)
        model = real.Encoder()
        fresh = {"model_state": model.state_dict()}
        fresh["optimizer_state"] = torch.optim.Adam(model.parameters(), lr=1e-4).state_dict()
        run = real.Training(fresh, 0)
        run.train(4)
        blob = sp.compress(run.state(), cfg=sp.presets.lossless()).to_bytes()
        run.train(6)
        again = real.Training(fresh, 0)
        again.restore(sp.decompress(sp.Checkpoint.from_bytes(blob)))
        again.train(6)
    for a, b in zip(run.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert real.drawn(0, 1).shape == (8, 4, 60, 40)
    assert not torch.equal(real.drawn(0, 1), real.drawn(0, 2))
