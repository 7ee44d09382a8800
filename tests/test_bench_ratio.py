"""`bench ratio`: the numbers of a small training computed again, verdicts, merging, pages."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.bench import codec, data
from shrinkpoint.bench.__main__ import main
from shrinkpoint.bench.evidence import ratios
from shrinkpoint.bench.harness import Options, Row, is_red, measure, threads, wall_clock
from shrinkpoint.bench.studies import merge, ratio, workloads
from shrinkpoint.bench.studies.outcomes import (
    EQUAL,
    WITHIN,
    Outcome,
    Pair,
    Restored,
    System,
    alone_rows,
    lost_later,
    medians,
    nearest_to,
    no_more,
    outcome_of,
    own,
    peer_rows,
    setting_of,
    summary_rows,
    system_rows,
    to_json,
    weights_rows,
)
from shrinkpoint.bench.studies.ratio import SPACING, Training, same_bits, trained
from shrinkpoint.bench.studies.workloads import Run, State, Workload
from shrinkpoint.codec.errors import BadArgumentError

STEPS, EVERY = 90, 4
NAN = math.nan


def workload() -> Workload:
    return dataclasses.replace(workloads.mlp(), steps=STEPS)


CONFIGS = {
    "default": sp.Config(chain=sp.ChainPolicy(base_every=EVERY)),
    "lossless": sp.presets.lossless(chain=sp.ChainPolicy(base_every=EVERY)),
    "bitsnap": sp.presets.bitsnap(max_cached_iteration=EVERY),
}


@pytest.fixture(scope="module")
def training() -> Training:
    with threads(1):
        return trained(workload(), 0, CONFIGS, lambda _: None)


@pytest.fixture(scope="module")
def states() -> dict[int, State]:
    """Return the state of the same training every ten steps, by a plain loop."""
    with threads(1):
        run = Run(workload(), 0)
        return {step: run.train(step).state() for step in range(SPACING, STEPS + 1, SPACING)}


def loss(state: State, until: int) -> float:
    again = Run(workload(), 0)
    again.restore(state)
    again.train(until)
    return again.held_out_loss()


# ---------------------------------------------------------------------------------------------------- a training


def test_a_restart_is_at_seven_ninths_and_its_states_are_the_training_s(
    training: Training, states: dict[int, State]
) -> None:
    assert (training.restart, training.end) == (70, 90)
    assert same_bits(training.state, states[70])
    assert same_bits(training.before, states[60])
    assert not same_bits(training.before, states[70])
    assert training.exact == {70: loss(states[70], 70), 90: loss(states[90], 90)}


def test_ratios_are_sums_over_the_chain_and_late_is_its_last_third(
    training: Training, states: dict[int, State]
) -> None:
    parent, found = None, []
    run = Run(workload(), 0)
    run.train(1)  # so that the optimizer has its entries
    kinds = sp.kinds(run.model, run.optimizer)
    for number, (step, state) in enumerate(states.items()):
        parent = sp.compress(state, None if number % EVERY == 0 else parent, CONFIGS["default"], kinds=kinds)
        found.append((step, parent))
    outcome = training.systems["default"]

    def times(chosen: list[sp.Checkpoint]) -> float:
        return sum(c.raw_nbytes for c in chosen) / sum(len(c.to_bytes()) for c in chosen)

    late = [c for step, c in found if step > STEPS * 2 / 3 and c.is_delta]
    assert [step for step, c in found if c in late] == [70, 80]  # 90 is a base
    assert outcome.chain == pytest.approx(times([c for _, c in found]), rel=1e-9)
    assert outcome.base == pytest.approx(times([c for _, c in found if not c.is_delta]), rel=1e-9)
    assert outcome.late == pytest.approx(times(late), rel=1e-9)
    weights = [row for c in late for row in c.summary() if row.path.startswith("model/")]
    elements = 2 * sum(p.numel() for p in workload().model().parameters())
    assert outcome.weight_bits == pytest.approx(8 * sum(row.stored_bytes for row in weights) / elements)


@pytest.mark.parametrize("name", ["default", "bitsnap"])
def test_losses_are_those_of_the_restored_state(name: str, training: Training, states: dict[int, State]) -> None:
    store = sp.Store(f"memory://test-bench-ratio-{name}", CONFIGS[name])
    with threads(1):
        for step, state in states.items():
            if step <= 70:
                store.save(step, state)
        restored = store.load(70)
        exact, at_once, later = training.exact, loss(restored, 70), loss(restored, 90)
    outcome = training.systems[name]
    assert outcome.at_once == pytest.approx(100 * (at_once / exact[70] - 1), abs=1e-9)
    assert outcome.later == pytest.approx(100 * (later / exact[90] - 1), abs=1e-9)
    assert outcome.later != 0
    a_step = (exact[70] / exact[90] - 1) / 20
    assert outcome.staleness == pytest.approx(outcome.later / 100 / a_step)


def test_a_lossless_chain_loses_nothing(training: Training) -> None:
    outcome = training.systems["lossless"]
    assert (outcome.at_once, outcome.later, outcome.staleness) == (0.0, 0.0, 0.0)
    assert 1 < outcome.base < outcome.chain


def test_a_policy_of_its_own_is_carried_out(training: Training) -> None:
    store = sp.Store("memory://test-bench-ratio-policy", CONFIGS["bitsnap"])
    assert CONFIGS["bitsnap"].chain.against == "base"
    outcome = training.systems["bitsnap"]
    assert outcome.chain > 1
    assert math.isnan(outcome.late) == (outcome.base == outcome.chain)  # without deltas there is nothing late
    assert store.steps() == []


def test_a_base_is_restored_for_the_rows_without_a_parent(training: Training, states: dict[int, State]) -> None:
    with threads(1):
        found = training.ours(sp.Config())
        kinds = Run(training.workload, training.seed).kinds()
        base = sp.compress(states[70], kinds=kinds)
        delta = sp.compress(states[70], sp.compress(states[60], kinds=kinds), kinds=kinds)
        for one, ckpt in ((found.single, base), (found.delta, delta)):
            assert one.ratio == ckpt.ratio
            assert one.at_once == pytest.approx(100 * (loss(sp.decompress(ckpt), 70) / training.exact[70] - 1))
            assert one.later == pytest.approx(100 * (loss(sp.decompress(ckpt), 90) / training.exact[90] - 1))
    assert found.single.later != found.delta.later


def test_a_library_s_base_that_is_exact_has_lost_nothing(
    training: Training, states: dict[int, State], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library with an exact base and a ruined delta has no loss for its base."""

    def stored(floats: Any, before: Any) -> Any:
        return (1000, floats) if before is None else (10, {k: torch.full_like(x, NAN) for k, x in floats.items()})

    monkeypatch.setitem(ratio.LOSSY, "other", stored)
    with threads(1):
        found = training.lossy_peer("other")
    assert (found.single.at_once, found.single.later) == (0.0, 0.0)
    assert math.isnan(found.delta.later)
    raw = sum(4 * x.numel() for x in ratio.floats_of(states[70]).values())
    assert (found.single.ratio, found.delta.ratio) == (raw / 1000, raw / 10)


def test_weights_alone_are_restored_beside_exact_moments(training: Training, states: dict[int, State]) -> None:
    with threads(1):
        found = training.alone(8)
        ckpt = sp.compress({"model": states[70]["model"]}, cfg=sp.Config([("weight", sp.Quantize(bins=8))]))
        restored = {**states[70], **sp.decompress(ckpt)}
        assert found.ratio == ckpt.ratio
        assert found.at_once == pytest.approx(100 * (loss(restored, 70) / training.exact[70] - 1))
        assert found.later == pytest.approx(100 * (loss(restored, 90) / training.exact[90] - 1))


def test_a_measured_model_has_rows_and_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratio, "PEERS", {"absent": _absent})
    monkeypatch.setattr(ratio, "LOSSY", {"half": lambda floats, before: (1, {k: x / 2 for k, x in floats.items()})})
    small = dataclasses.replace(workload(), steps=30)
    found = ratio.measured(small, ["lossless"], ratio.PARTS, lambda _: None, seeds=2, alone=(8,))
    rows = {row.row: row for row in found.rows}
    assert [len(outcomes) for outcomes in found.named("MLP").values()] == [2]
    assert rows["MLP, against absent: whole state"].met is None
    assert rows["MLP, against absent: whole state"].note == "not measured: absent is not installed"
    half = rows["MLP, against half: whole state, no parent"]
    assert half.met is False  # one byte is hard to beat
    assert half.note.endswith("; 2 seeds; ours: default")
    alone = rows["MLP, alone, 8 bins: weights"]
    assert "at once" in alone.note
    assert "later, staleness" in alone.note
    assert {row.size for row in found.rows} == {301_066}
    lossless = found.outcomes["lossless"]
    assert rows["MLP, lossless: whole state, chain with its bases"].value == pytest.approx(
        statistics.fmean(o.chain for o in lossless)
    )


def _absent(state: Any, before: Any) -> Any:
    raise ImportError("absent", name="absent")


# ---------------------------------------------------------------------------------------------------- the encoder


def test_the_encoder_s_row_is_checked_against_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    case = codec.encoder(data.Sample(20_000), 20_000)
    (row,) = measure(case, Options(), wall_clock)
    assert (row.row, row.size, row.unit, row.target) == (codec.ENCODER, 20_000, "Gsym/s", ">= 0.2 Gsym/s")
    assert row.value is not None
    assert row.met is (row.value >= 0.2)
    assert "20,000 levels = oracle" in row.note
    assert "0.0% of them not the nearest" not in row.note  # the price does something
    right = codec.cheapest_levels
    monkeypatch.setattr(codec, "cheapest_levels", lambda *inputs: right(*inputs)[::-1])
    (row,) = measure(case, Options(), wall_clock)
    assert is_red(row)
    assert (row.value, row.met) == (None, False)


# ---------------------------------------------------------------------------------------------------- verdicts


def outcome(**changes: float) -> Outcome:
    return Outcome(**({f.name: 1.0 for f in dataclasses.fields(Outcome)} | changes))


def system(**changes: float | tuple[float, ...]) -> System:
    """Return a system with one outcome for each value."""
    seeds = max(len(v) if isinstance(v, tuple) else 1 for v in changes.values())
    each = {k: v if isinstance(v, tuple) else (v,) * seeds for k, v in changes.items()}
    return System.of([outcome(**{k: v[i] for k, v in each.items()}) for i in range(seeds)])


def restored(times: float, *later: float) -> list[Restored]:
    return [Restored(times, 0.0, one, 0.0) for one in later]


@pytest.mark.parametrize(
    ("ours", "theirs", "met"),
    [
        ((0.1,), (0.1,), True),
        ((0.11,), (0.1,), False),  # one seed: nothing is known of chance
        ((0.2, 0.0, 0.1), (0.1, 0.1, 0.1), True),
        ((0.2, 0.1, 0.1), (0.1, 0.1, 0.1), True),  # +0.033 +- 0.033
        ((0.2, 0.2, 0.1), (0.1, 0.1, 0.1), False),  # +0.067 +- 0.033
        ((0.105, 0.105, 0.105), (0.1, 0.1, 0.1), False),  # little, but in every seed
        ((9.0, 9.0), (NAN, 0.0), True),
        ((NAN, 0.0), (0.0, 0.0), False),
        ((NAN,), (NAN,), False),
    ],
)
def test_a_loss_is_no_more_within_the_standard_error_of_paired_seeds(
    ours: tuple[float, ...], theirs: tuple[float, ...], met: bool
) -> None:
    assert no_more(restored(1, *ours), restored(1, *theirs)) is met


@pytest.mark.parametrize(
    ("times", "later", "met"), [(2.0, 0.0, True), (2.0, 0.1, False), (0.9, -1.0, False), (1.0, 0.0, True)]
)
def test_a_library_is_beaten_by_size_and_loss_both(times: float, later: float, met: bool) -> None:
    ours = [Pair(one, one) for one in restored(times, later)]
    theirs = [Pair(one, one) for one in restored(1.0, 0.05)] if later else [Pair(*restored(1.0, 0.0, 0.0))]
    for row in peer_rows("M", 1, "other", {"default": ours}, theirs):
        assert row.met is met
        assert (row.value, row.peer_value, row.ratio) == (times, 1.0, times)


def test_the_smallest_of_our_settings_that_loses_no_more_speaks_for_us() -> None:
    losses = {"coarse": (9.0, 0.3), "middle": (5.0, 0.04), "fine": (4.0, 0.0), "exact": (1.0, 0.0)}
    ours = {setting: [Pair(*restored(times, later, later))] for setting, (times, later) in losses.items()}
    cases = ((0.5, "coarse", True), (0.05, "middle", True), (0.01, "fine", True), (-1.0, "coarse", False))
    for theirs, setting, met in cases:
        (row, _) = peer_rows("M", 1, "other", ours, [Pair(*restored(2.0, theirs, theirs))])
        assert (setting_of(row.note), row.met, row.value) == (setting, met, losses[setting][0])
        assert lost_later(row.note)[0] == f"{losses[setting][1]:+.2f}"
    with pytest.raises(BadArgumentError, match="no setting of ours"):
        setting_of("ours loses +0.10 % at once; theirs +0.10 %; one seed")


def test_each_case_has_its_own_losses() -> None:
    ours = [Pair(Restored(4, 0.1, 0.2, 1), Restored(40, 0.3, 0.4, 2))]
    theirs = [Pair(Restored(1, 0.0, 0.0, 0), Restored(30, -1.0, NAN, NAN))]
    single, delta = peer_rows("M", 1, "other", {"default": ours}, theirs)
    assert single.row == "M, against other: whole state, no parent"
    assert (single.met, delta.met) == (False, True)
    assert lost_later(single.note) == ("+0.20", "+0.00")
    assert lost_later(delta.note) == ("+0.40", "ruined")
    assert "-1.00 % at once, ruined % later, staleness not defined; one seed" in delta.note


def test_nearest_to_weighs_what_is_missed_most() -> None:
    found = {
        "far on one": system(chain=1000.0, late=10.0),
        "even": system(chain=40.0, late=100.0),
        "less": system(chain=39.0, late=100.0),
    }
    assert nearest_to(found, 80, 200) == "even"
    assert nearest_to({}, 80, 200) is None


def test_only_our_settings_for_whole_states_count_for_targets() -> None:
    found = {
        "default": system(later=0.4),
        "rate 0.01": system(later=0.6),
        "rate 0.001, 12 bins": system(later=(0.4, 0.5)),
        "weights, rate 0": system(later=0.0),
        "lossless": system(later=0.0),
    }
    assert list(own(found, 0.5)) == ["default", "rate 0.001, 12 bins"]


def test_targets_say_losses_and_staleness_of_the_setting() -> None:
    found = {
        "default": system(chain=31.0, late=60.0, at_once=0.3, later=0.05, staleness=7.0),
        "rate 0.002": system(chain=90.0, late=310.0, later=0.4),
    }
    rows = {row.row: row for row in summary_rows("M", 1, found)}
    low = [rows[f"M: whole state, {what}, loss <= 0.1 %"] for what in ("chain with its bases", "late deltas")]
    assert [(row.value, row.met) for row in low] == [(31.0, True), (60.0, False)]
    assert low[0].note == "default; loss at once +0.30 %, later +0.05 %, staleness +7.0 steps"
    assert rows["M: whole state, late deltas, loss <= 0.5 %"].met is True
    none = summary_rows("M", 1, {"default": system(later=3.0)})
    assert [(row.value, row.met) for row in none] == [(None, False)] * 4


def test_our_weights_are_held_against_the_published_ones_strictly_and_within_chance() -> None:
    found = {
        "inshrinkerator 16": system(weight_bits=1.0, later=(0.1, 0.2, 0.3)),
        "weights, a": system(weight_bits=0.5, later=(0.1, 0.2, 0.3)),
        "weights, b": system(weight_bits=0.4, later=(0.0, 0.3, 0.4)),  # +0.03 +- 0.07
        "weights, c": system(weight_bits=0.1, later=(0.2, 0.3, 0.4)),
        "bitsnap": system(weight_bits=0.01, later=-1.0),
    }
    strict, within = weights_rows("M", 1, found, "inshrinkerator 16")
    assert (strict.row, within.row) == (f"M: {EQUAL} inshrinkerator 16", f"M: {WITHIN} inshrinkerator 16")
    assert (strict.value, strict.ratio) == (0.5, 2.0)
    assert within.value == pytest.approx(0.4)
    assert "ours: weights, b; loss later above the published one's by +0.03 +- 0.07 points" in within.note
    assert strict.met is within.met is None
    # A setting for whole states counts too: its loss includes that of its lossier moments.
    for name in ("default", "rate 0.1"):
        strict, _ = weights_rows(
            "M", 1, {**found, name: system(weight_bits=0.2, later=(0.1, 0.1, 0.1))}, "inshrinkerator 16"
        )
        assert (strict.value, strict.ratio) == pytest.approx((0.2, 5.0))
        assert strict.note.startswith(f"ours: {name};")


def test_a_median_counts_a_model_without_a_setting_as_nothing() -> None:
    def rows(*ratios: float | None) -> list[Row]:
        return [
            Row(f"{n}: {EQUAL} inshrinkerator 16", "cpu", 1, None, "bits", "x", None, r, None, None, "")
            for n, r in enumerate(ratios)
        ]

    (row,) = medians(rows(5.0, None, 4.5))
    assert (row.value, row.met, row.target) == (4.5, True, ">= 4 x")
    assert row.note == "median over 3 chains, 2 of them with a setting that loses no more"
    (row,) = medians(rows(5.0, None, 4.5, None))
    assert (row.value, row.met) == (2.25, False)
    assert medians([]) == []


def test_weights_alone_are_the_smallest_that_lose_at_most_a_percent_at_once() -> None:
    found = {
        8: [Restored(12.0, 1.5, 0.1, 3.0), Restored(12.0, 0.6, 0.1, 3.0)],
        10: [Restored(11.0, 0.5, 0.2, 4.0), Restored(11.0, 1.4, 0.4, 6.0)],
        12: [Restored(10.0, 0.1, 0.2, 4.0), Restored(10.0, 0.1, 0.4, 6.0)],
    }
    *rows, best = alone_rows("M", 1, found)
    assert [row.value for row in rows] == [12.0, 11.0, 10.0]
    assert (best.value, best.met) == (11.0, True)
    expected = "loss +0.95 (+0.50 ... +1.40) % at once, +0.30 (+0.20 ... +0.40) % later, staleness +5.0 steps, 2 seeds"
    assert best.note == f"10 bins, {expected}"
    assert alone_rows("M", 1, {8: found[8]})[-1].met is False


# ---------------------------------------------------------------------------------------------------- results


def test_outcomes_are_json_without_numbers_that_json_lacks() -> None:
    text = json.dumps(to_json({"M, default": [outcome(later=NAN)]}), allow_nan=False)
    (again,) = json.loads(text)["M, default"]
    assert math.isnan(outcome_of(again).later)
    assert dataclasses.replace(outcome_of(again), later=1.0) == outcome()


def document(commit: str, systems: dict[str, list[Outcome]], *others: Row) -> dict[str, Any]:
    rows = [row for name, found in systems.items() for row in system_rows("MLP", name, 5, found)]
    found = {f"MLP, {name}": found for name, found in systems.items()}
    return {
        "machine": {"of": commit},
        "versions": {},
        "commit": commit,
        "rows": [dataclasses.asdict(row) for row in (*rows, *others)],
        "outcomes": to_json(found),
    }


def test_results_are_merged_by_system() -> None:
    peers = peer_rows("MLP", 5, "other", {"default": [Pair(*restored(2, 0, 0))]}, [Pair(*restored(1, 0, 0))])
    first = {
        "default": [outcome(chain=90.0, late=400.0, later=0.4), outcome(chain=90.0, late=400.0, later=0.2)],
        "inshrinkerator 16": [outcome(weight_bits=0.6, later=0.1)] * 2,
        "weights, rate 0": [outcome(weight_bits=0.5, later=0.0)] * 2,
        "weights, rate 17": [outcome()] * 2,
    }
    old = document("a" * 40, first, *peers, *summary_rows("MLP", 5, {}))
    again = {
        "rate 0.0005": [outcome(chain=100.0, late=500.0, later=0.05)] * 2,
        "weights, rate 0": [outcome(weight_bits=0.3, later=0.1)] * 2,
    }
    found = merge.merged(old, [document("b" * 40, again)])
    rows = {row["row"]: row for row in found["rows"]}
    assert found["commit"] == "b" * 40
    kept = ["default", "rate 0.0005", "weights, rate 0", "inshrinkerator 16"]
    assert list(found["outcomes"]) == [f"MLP, {name}" for name in kept]
    assert not any("rate 17" in row for row in rows)
    assert rows["MLP, default: loss change later"]["note"].endswith("2 seeds; measured at aaaaaaa")
    assert rows["MLP, rate 0.0005: loss change later"]["note"].endswith("2 seeds; measured at bbbbbbb")
    assert rows["MLP, weights, rate 0: weights, late deltas"]["value"] == pytest.approx(0.3)
    against = rows["MLP, against other: whole state, no parent"]
    assert against["note"].endswith("one seed; ours: default; measured at aaaaaaa")
    chain = rows["MLP: whole state, chain with its bases, loss <= 0.5 %"]
    assert (chain["value"], chain["met"]) == (100.0, True)
    strict = rows[f"MLP: {EQUAL} inshrinkerator 16"]
    assert strict["ratio"] == pytest.approx(2.0)
    assert "+0.00 +- 0.00 points" in strict["note"]
    twice = merge.merged(found, [])
    assert twice["rows"] == found["rows"]
    assert twice["outcomes"] == found["outcomes"]


def test_merging_refuses_what_does_not_fit() -> None:
    old = document("a" * 40, {"default": [outcome()]})
    other = json.loads(json.dumps(old).replace("MLP, ", "CNN, "))
    with pytest.raises(BadArgumentError, match="CNN goes into none of MLP"):
        merge.merged(old, [other])
    with pytest.raises(BadArgumentError, match="one model"):
        merge.merged({**old, "rows": []}, [])
    with pytest.raises(BadArgumentError, match="outcomes are missing of default"):
        merge.merged({**old, "outcomes": {}}, [])


def test_a_few_systems_are_measured_for_a_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def measured(workload: Workload, systems: Any, parts: Any, *_: Any, **__: Any) -> ratio.Measured:
        asked.append((workload.name, systems, parts))
        found = {"rate 0.0005": [outcome(chain=7.0)] * 3}
        return ratio.Measured(system_rows("MLP", "rate 0.0005", 5, found["rate 0.0005"]), 5, found)

    monkeypatch.setattr(ratio, "measured", measured)
    options = Options(only="MLP rate 0.0005,MLP peers")
    rows = ratio.run(options)
    assert asked == [("MLP", ["rate 0.0005", "rate 0.0005, 16 bins"], ["peers"])]
    new = document("b" * 40, {}, *rows) | options.kept
    found = merge.merged(document("a" * 40, {"default": [outcome()]}), [new])
    values = {row["row"]: row["value"] for row in found["rows"]}
    assert values["MLP, rate 0.0005: whole state, chain with its bases"] == 7.0
    assert values["MLP, default: whole state, chain with its bases"] == 1.0


def test_a_row_from_outside_a_checkout_says_so() -> None:
    found = merge.merged({**document("", {"default": [outcome()]}), "commit": None}, [])
    assert found["rows"][0]["note"].endswith("1 seeds; measured at no commit")


def test_the_command_merges_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    into, new = tmp_path / "old.json", tmp_path / "new.json"
    into.write_text(json.dumps(document("a" * 40, {"default": [outcome(chain=1.0)]})), encoding="utf-8")
    new.write_text(json.dumps(document("b" * 40, {"default": [outcome(chain=3.0)]})), encoding="utf-8")
    assert merge.main([str(into), str(new)]) == 0
    found = json.loads(into.read_text(encoding="utf-8"))
    assert found["rows"][0]["value"] == 3.0
    assert found["run"] == {"command": "python -m bench.studies.merge old.json new.json"}
    assert merge.main([str(into), str(tmp_path / "absent.json")]) == 2
    assert "absent.json" in capsys.readouterr().err


def test_the_bench_keeps_outcomes_in_its_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(workload: Workload, systems: Any, *_: Any, **__: Any) -> ratio.Measured:
        found = {name: [outcome(later=NAN)] for name in systems}
        rows = [row for name, one in found.items() for row in system_rows(workload.name, name, 7, one)]
        return ratio.Measured(rows, 7, found)

    monkeypatch.setattr(ratio, "measured", measured)
    path = tmp_path / "rows.json"
    assert main(["ratio", "--quick", "--json", str(path)]) == 0
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert list(kept["outcomes"]) == ["MLP, default", "MLP, rate 0.004", "MLP, inshrinkerator 32"]
    assert kept["outcomes"]["MLP, default"][0]["later"] is None
    assert merge.merged(kept, [])["outcomes"] == kept["outcomes"]
    options = Options(only="GPT,CNN")
    assert {row.row.partition(", ")[0].partition(":")[0] for row in ratio.run(options)} == {"GPT", "CNN"}
    assert set(options.kept["outcomes"]) == {f"{m}, {s}" for m in ("GPT", "CNN") for s in ratio.SYSTEMS}


# ---------------------------------------------------------------------------------------------------- pages


@pytest.mark.parametrize(
    ("note", "losses"),
    [
        ("ours loses +0.01 % at once, +0.18 % later; theirs +0.03 %, +0.03 %", ("+0.18", "+0.03")),
        (
            "ours loses +0.01 % at once, +0.18 % later; theirs -1.38 %, +nan %; measured at 739c206",
            ("+0.18", "ruined"),
        ),
        (
            "ours loses +0.1 (-0.1 ... +0.2) % at once, -0.30 (-0.4 ... -0.2) % later, staleness -1.0 steps; "
            "theirs +0.00 % at once, +0.00 % later, staleness not defined; 3 seeds; measured at 739c206",
            ("-0.30", "+0.00"),
        ),
    ],
)
def test_a_note_gives_its_losses_whatever_follows(note: str, losses: tuple[str, str]) -> None:
    assert lost_later(note) == losses


@pytest.mark.parametrize("note", ["", "ours loses +0.01 %; theirs +0.03 %", "no setting"])
def test_a_note_without_losses_is_an_error_not_an_empty_cell(
    note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadArgumentError, match="no losses"):
        lost_later(note)
    (row, _) = peer_rows("MLP", 5, "other", {"default": [Pair(*restored(2, 0, 0))]}, [Pair(*restored(1, 0, 0))])
    path = tmp_path / "ratio-mlp.json"
    path.write_text(json.dumps({"rows": [dataclasses.asdict(row) | {"note": note}]}), encoding="utf-8")
    monkeypatch.setattr("shrinkpoint.bench.evidence.results.RESULTS", tmp_path)
    with pytest.raises(BadArgumentError, match="no losses"):
        ratios.peers()


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """Write a result of one model to its own folder, with all rows that pages show."""
    systems = {
        "default": [outcome(chain=30.0, late=50.0, weight_bits=0.4, at_once=0.2, later=0.1, staleness=12.4)],
        "rate 0.0005": [outcome(chain=80.0, late=250.0, later=0.3)],
        "rate 0.001, 12 bins": [outcome(chain=110.0, late=400.0, later=0.2)],
        "weights, rate 0": [outcome(weight_bits=0.4, later=0.1)],
        "weights, rate 0, 16 bins": [outcome(weight_bits=0.25, later=0.2)],
        "weights, rate 0.001": [outcome(weight_bits=0.1, later=0.1)],
        "inshrinkerator 16": [outcome(chain=4.6, weight_bits=1.0, later=0.2)],
        "inshrinkerator 32": [outcome(chain=4.5, weight_bits=1.2, later=-0.1)],
        "lc_checkpoint": [outcome(chain=12.0, later=40.0)],
        "bitsnap": [outcome(chain=1.8, late=NAN, later=NAN, staleness=NAN)],
    }
    ours = {"default": [Pair(Restored(14, 0.1, 0.15, 1), Restored(50, 0.1, 0.2, 1))]}
    exactly = {"lossless": [Pair(*restored(1.5, 0, 0))]}
    peers = [
        row
        for name, theirs in (
            ("exact", Pair(*restored(1.2, 0.0, 0.0))),
            ("coarse", Pair(Restored(1.1, 0, 0, 0), Restored(25, 0.1, NAN, NAN))),
            ("fine", Pair(*restored(5.0, 0.3, 0.3))),
        )
        for row in peer_rows("MLP", 5, name, exactly if name == "exact" else ours, [theirs])
    ]
    found = {name: System.of(outcomes) for name, outcomes in systems.items()}
    rows = document("c" * 40, systems, *peers, *summary_rows("MLP", 5, found))
    (tmp_path / "ratio-mlp.json").write_text(json.dumps(rows, allow_nan=False), encoding="utf-8")
    monkeypatch.setattr("shrinkpoint.bench.evidence.results.RESULTS", tmp_path)
    return [Row(**row) for row in rows["rows"]]


def test_the_table_of_libraries_shows_losses_and_what_is_lost(results: list[Row]) -> None:
    table = ratios.peers().splitlines()
    assert table[2:] == [
        "| exact | no parent | 1.5 / 1.2 x |",
        "| exact | 10 steps apart | 1.5 / 1.2 x |",
        "| coarse | no parent | **no:** 14 / 1.1 x, +0.15 % / +0.00 % |",
        "| coarse | 10 steps apart | 50 / 25 x, +0.20 % / ruined |",
        "| fine | no parent | 14 / 5 x, +0.15 % / +0.30 % |",
        "| fine | 10 steps apart | 50 / 5 x, +0.20 % / +0.30 % |",
    ]


def test_the_words_on_weights_without_a_rate_are_the_rows(results: list[Row]) -> None:
    text = ratios.weights()
    assert "| weights, rate 0, 16 bins | 0.25, +0.20 % |" in text
    assert "- Next to `presets.inshrinkerator(16)`: MLP 4.0 x (16 bins)." in text  # not the one with a rate, 10 x
    assert "- Next to `presets.inshrinkerator(32)`: MLP none." in text


def test_the_table_of_losses_has_all_three(results: list[Row]) -> None:
    text = ratios.losses()
    assert "| `Config()` | +0.20 %, +0.10 %, +12 |" in text
    assert "| `presets.bitsnap()` | +1.00 %, ruined |" in text


def test_targets_name_the_medians_and_one_that_is_not_aimed_at(results: list[Row]) -> None:
    text = ratios.targets()
    assert f"| {EQUAL} inshrinkerator 16 | 10 x | >= 4 x | yes |" in text
    assert f"| {WITHIN} inshrinkerator 16 | 0 x | none |  |" in text  # one seed: nothing is paired


def test_the_picture_has_every_preset_and_library(results: list[Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (panel,) = ratio.panels(results).values()
    assert panel.curve == [("default", 30.0, pytest.approx(0.1)), ("rate 0.0005", 80.0, pytest.approx(0.3))]
    assert panel.others == [("rate 0.001, 12 bins", 110.0, pytest.approx(0.2))]
    assert [name for name, _, _ in panel.presets] == [
        "inshrinkerator 16",
        "inshrinkerator 32",
        "lc_checkpoint",
        "bitsnap",
    ]
    assert panel.presets[-1][2] is None
    assert panel.exact == [("exact", pytest.approx(1.2))]
    assert panel.libraries == [("coarse", pytest.approx(25.0), None), ("fine", pytest.approx(5.0), pytest.approx(0.3))]
    assert panel.own == {"default": (pytest.approx(50.0), pytest.approx(0.2))}
    ratio.plot(results, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_a_point_far_off_stands_at_the_edge_with_its_loss() -> None:
    ours = [("default", 30.0, 0.1), ("rate 0.01", 99.0, -0.6)]
    assert ratio.reach(ours) == pytest.approx(1.15 * 0.6)
    reach = ratio.reach(ours, [("one", 5.0, 1.1), ("one", 5.0, 40.0), ("one", 5.0, None)])
    assert reach == pytest.approx(1.15 * 1.1)
    assert ratio.reach([]) > 0
    assert ratio.placed("one", 5.0, 1.1, reach) == ("one", 1.1, "")
    assert ratio.placed("one", 5.0, 40.0, reach) == ("one: +40.00 %", reach, "^")
    assert ratio.placed("one", 5.0, -40.0, reach) == ("one: -40.00 %", -reach, "v")
    assert ratio.placed("one", 5.0, None, reach) == ("one: ruined", reach, "^")
