"""The harm harness: divergences of known outputs, paired bounds, rows that are kept."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.bench.evidence import levels
from shrinkpoint.bench.studies.harm import campaign, families, held_back
from shrinkpoint.bench.studies.harm.campaign import Answers, Campaign, Effect, bench_rows, divergence
from shrinkpoint.bench.studies.workloads import Run

pytest.importorskip("sklearn")


def short(family: families.Family, steps: int) -> families.Family:
    return dataclasses.replace(family, workload=dataclasses.replace(family.workload, steps=steps))


def test_divergence_of_known_classes() -> None:
    exact = Answers(torch.tensor([[0.0, 0.0], [3.0, 0.0]]), 2.0, 1.0)
    other = Answers(torch.tensor([[math.log(3.0), 0.0], [0.0, 3.0]]), 2.1, 0.5)
    found = divergence(families.FAMILIES["MLP"](), exact, other)
    first = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    p = 1 / (1 + math.exp(-3.0))
    second = p * 3.0 - (1 - p) * 3.0
    assert found["divergence"] == pytest.approx((first + second) / 2)
    assert found["changed"] == 0.5  # of a tie the first one is the answer
    assert found["loss"] == pytest.approx(0.05)
    assert divergence(families.FAMILIES["MLP"](), exact, exact) == {"divergence": 0.0, "changed": 0.0, "loss": 0.0}


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
    by_name = {row.row: row for row in bench_rows(Campaign(rows), dict.fromkeys(held_back.ALL, 1))}
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
    missing = " | ".join(["not measured"] * 3)
    assert f"| `Config()` | 20 x | 15 x | 98.00 % | 50.00 % | 4.66 % worse | {missing} |" in table
    assert "`Config()` ViT; ViT; ViT; MLP" in table
    assert "| `Config()` | chose settings | 50.00 % | 0.20 % worse |" in levels.evaluation()


def test_the_groups_have_their_own_lines_and_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A held-back family stands in the line of its group, with its number of seeds."""
    rows = [record("end", "uninterrupted", seed, 1.0) for seed in (0, 1)]
    rows += [record("killed", setting, seed, 1.0) for setting in ("null", "default") for seed in (0, 1)]
    rows += [row | {"family": "LoRA", "loss": row["loss"] + 0.1 * (row["setting"] == "default")} for row in rows[:-1]]
    monkeypatch.setattr(levels, "campaign", lambda: Campaign(rows))
    lines = {
        tuple(cell.strip() for cell in line.split("|")[1:3]): line for line in levels.levels_by_group().splitlines()
    }
    chose = f"| {len(families.CHOSE)} | 0 to 2 | 25 x | 25 x | equal |"
    assert chose in lines["`Config()`", "chose settings"]
    nothing = f"| {len(held_back.HELD_BACK)} | 0 to 1 | 25 x | 25 x | not measured |"  # one seed has no bound
    assert nothing in lines["`Config()`", "chose nothing"]
    assert not set(families.CHOSE) & set(held_back.HELD_BACK)


SCRIPT = """
import dataclasses, sys
from pathlib import Path
from shrinkpoint.bench.studies.harm import campaign, held_back
made = held_back.ALL["MLP"]()
family = dataclasses.replace(made, workload=dataclasses.replace(made.workload, steps=130))
held_back.ALL["MLP"] = lambda: family
say = lambda text: print(text, flush=True)
campaign.measure(
    campaign.RowFile(Path(sys.argv[1])), [0, 1], families=("MLP",), levels=("null", "default"), parts=(), say=say
)
"""
"""A campaign of short, real trainings."""


def test_a_campaign_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """Nothing is measured twice or lost, and the rows are those of a campaign without a kill."""
    path, whole = tmp_path / "harm.jsonl", tmp_path / "whole.jsonl"
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen([*command, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = next(line for line in process.stdout if "seed 1: killed, default" in line)
        time.sleep(0.1)
        process.kill()
    assert said
    assert process.returncode != 0
    before = path.read_text()
    measured = [json.loads(line) for line in before.splitlines()]
    assert [row["seed"] for row in measured if row["setting"] == "null"] == [0, 1]
    assert [row["seed"] for row in measured if row["setting"] == "default" and row["what"] == "killed"] == [0]
    with path.open("a") as file:
        file.write('{"what": "killed", "family": "MLP", "setti')  # as if the kill had come while it wrote
    again = subprocess.run([*command, str(path)], capture_output=True, text=True, check=True).stdout
    assert again.splitlines()[0] == "MLP, seed 1: killed, default"
    assert path.read_text().startswith(before)
    subprocess.run([*command, str(whole)], capture_output=True, check=True)
    keys = [(row["what"], row["setting"], row["seed"]) for row in campaign.RowFile(path).rows.values()]
    assert len(keys) == len(set(keys)) == 13
    numbers = [[row | {"commit": None} for row in campaign.RowFile(file).rows.values()] for file in (path, whole)]
    assert numbers[0] == numbers[1]


def test_rows_name_commit_versions_and_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row says what measured it; its configuration can be made again."""
    monkeypatch.setattr(campaign, "_commit", lambda: "abc")
    rows = campaign.RowFile(tmp_path / "harm.jsonl")
    rows.add("killed", "MLP", "precise", 0, {"loss": 0.123456789})
    rows.add("end", "MLP", campaign.UNINTERRUPTED, 0, {"loss": 1.0})
    precise, end = campaign.RowFile(rows.path).rows.values()
    assert (precise["loss"], precise["commit"], precise["torch"]) == (0.1234568, "abc", torch.__version__)
    assert sp.Config.from_json(precise["config"]) == sp.presets.precise()
    assert end["config"] is None


def test_an_exact_end_is_compared_with_a_training_of_its_own_machine() -> None:
    """Another processor rounds differently, which would look like a loss of the level."""
    key = {"family": "MLP", "seed": 0}
    own = {"loss": 0.9, "accuracy": 0.6}
    rows = [
        {"what": "end", "setting": campaign.UNINTERRUPTED, "loss": 1.0, "accuracy": 0.5, **key},
        {"what": "killed", "setting": "lossless", campaign.UNINTERRUPTED: own, **own, **key},
        {"what": "killed", "setting": "null", "loss": 1.1, "accuracy": 0.4, **key},
    ]
    found = Campaign(rows)
    assert [found.ends("MLP", "lossless", what) for what in own] == [{0: 0.0}, {0: 0.0}]
    assert found.ends("MLP", "null", "loss") == {0: pytest.approx(10.0)}


def test_a_family_without_its_package_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are measured; what lacks for another reason is an error."""
    said: list[str] = []
    monkeypatch.setattr(campaign, "killed", lambda family, setting, seed: {"loss": 1.0})
    monkeypatch.setattr(campaign, "chain", lambda *_: {})
    package = [""]

    def uninterrupted(family: families.Family, seed: int) -> dict[str, Any]:
        if family.name == "experts":
            return {"loss": 1.0}
        raise ModuleNotFoundError(name=package[0])

    monkeypatch.setattr(campaign, "uninterrupted", uninterrupted)
    some: dict[str, Any] = {"families": ("mixer, schedule-free", "experts"), "levels": ("null",), "say": said.append}
    rows = campaign.RowFile(tmp_path / "harm.jsonl")
    package[0] = "another"
    with pytest.raises(ModuleNotFoundError):
        campaign.measure(rows, [0], **some)
    package[0] = "schedulefree"
    campaign.measure(rows, [0], **some)
    assert "mixer, schedule-free: not measured: schedulefree is not installed" in said
    assert [row["family"] for row in rows.rows.values() if row["what"] == "end"] == ["experts"]


def test_what_is_stored_exactly_ends_exactly() -> None:
    """An exact setting ends as the uninterrupted training, with equal answers at restores."""
    family = short(families.FAMILIES["MLP"](), 40)
    found = campaign.killed(family, "lossless", 0, failures=2)
    assert (found["loss"], found["accuracy"]) == tuple(
        campaign.uninterrupted(family, 0)[k] for k in ("loss", "accuracy")
    )
    assert [r["divergence"] for r in found["restores"]] == [0.0, 0.0]
    assert campaign.killed(family, "compact", 0, failures=2)["loss"] != found["loss"]


SPECIAL = ("diffusion, EMA", "LoRA", "text, bf16 masters", "mixer, schedule-free")
"""Families with further parts in their state: an average, a frozen model, masters, an iterate."""


def made(name: str) -> families.Family:
    """Return a family, unless its optimizer's package is not installed."""
    family = held_back.ALL[name]()
    try:
        Run(family.workload, 0)
    except ModuleNotFoundError as error:
        if error.name not in held_back.PACKAGES:
            raise
        pytest.skip(f"{error.name} is not installed")
    return family


@pytest.mark.parametrize("name", SPECIAL)
def test_further_parts_of_a_state_go_through_kills(name: str) -> None:
    """A lossless training with an average, masters or an iterate ends as if not killed."""
    family = short(made(name), 40)
    found = campaign.killed(family, "lossless", 0, failures=2)
    assert found["loss"] == campaign.uninterrupted(family, 0)["loss"]
    assert [r["divergence"] for r in found["restores"]] == [0.0, 0.0]


@pytest.mark.parametrize(("name", "why"), [("diffusion, EMA", "average"), ("text, bf16 masters", "master")])
def test_averages_and_masters_are_declared(name: str, why: str) -> None:
    """An undeclared average would be exact, and the harm of a lossy one would not be measured."""
    run = Run(made(name).workload, 0, until=3)
    rows = sp.compress(run.state(), kinds=run.kinds()).summary()
    assert sum(row.error > 0 for row in rows if row.why == f"kinds: {why}") >= 3


def test_the_average_is_judged() -> None:
    """Answers of a family with an average are those of the average."""
    family = made("diffusion, EMA")
    run = Run(family.workload, 0, until=5)
    before = campaign.answers(family, run).outputs
    with torch.no_grad():
        next(run.model.parameters()).add_(1.0)
        assert torch.equal(campaign.answers(family, run).outputs, before)
        assert run.average is not None
        next(run.average.parameters()).add_(1.0)
    assert not torch.equal(campaign.answers(family, run).outputs, before)


def test_judging_a_schedule_free_training_does_not_change_it() -> None:
    """The way to the average and back would round."""
    family = made("mixer, schedule-free")
    run = Run(family.workload, 0, until=5)
    before = run.state()
    with run.judged() as model:
        assert not torch.equal(model.state_dict()["patches.weight"], before["model"]["patches.weight"])
    after = run.state()
    assert all(torch.equal(x, after["model"][name]) for name, x in before["model"].items())
    run.train(6)


def test_the_null_leaves_frozen_parameters() -> None:
    """A level keeps them exactly, so the null must not change them."""
    run = Run(made("LoRA").workload, 0, until=2)
    system = campaign.Perturbed(0)
    system.save(run)
    before, after = run.state()["model"], system.restore()["model"]
    changed = {name for name, x in before.items() if not torch.equal(x, after[name])}
    assert changed == {name for name, p in run.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", held_back.HELD_BACK)
def test_schedules_of_held_back_families_end_near_zero(name: str) -> None:
    """Schedule-free training has no schedule; the others end at a hundredth."""
    workload = held_back.ALL[name]().workload
    assert workload.end == (1.0 if "schedule-free" in name else 0.01)
    run = Run(families.FAMILIES["MLP"]().workload, 0)
    run.step = run.workload.steps
    assert run.learning_rate() == pytest.approx(0.1 * run.workload.rate)


def test_every_optimizer_is_in_the_second_group() -> None:
    """By the names of families, or by the optimizer itself."""
    names = " ".join(held_back.HELD_BACK)
    wanted = ("SGD", "Lion", "Muon", "ADOPT", "AdEMAMix", "schedule-free", "SOAP", "masters", "EMA")
    assert all(word in names for word in wanted)
    made = [held_back.ALL[name]().workload for name in ("VAE", "recommender", "LoRA")]
    kept = [Run(workload, 0, until=1).optimizer for workload in made]
    assert kept[0].param_groups[0]["amsgrad"]
    assert [type(optimizer).__name__ for optimizer in kept[1:]] == ["RMSprop", "NAdam"]


@pytest.mark.parametrize("name", held_back.ALL)
def test_each_family_trains_and_answers(name: str) -> None:
    family = short(made(name), 10)
    rows: dict[str, Any] = {}
    campaign.resumed(family, ["lossless"], 0, rows.__setitem__, after=(0,))
    assert rows["lossless"]["after"]["0"]["divergence"] == 0.0
    assert 15_000 < family.workload.parameters < 200_000
