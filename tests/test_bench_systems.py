"""`bench systems`: its experiments, the form of its tables, and the page."""

from __future__ import annotations

import doctest
import functools
import importlib
import importlib.util
import json
import math
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.bench import peers
from shrinkpoint.bench.__main__ import main
from shrinkpoint.bench.evidence import pages, results
from shrinkpoint.bench.evidence import systems as papers
from shrinkpoint.bench.harness import Options, Row, threads, times_smaller
from shrinkpoint.bench.studies import merge, systems, workloads
from shrinkpoint.bench.studies.baselines.partial import Scar
from shrinkpoint.bench.studies.baselines.quantizers import POWERS, RATIOS, STEPS, QDCompressor, Sketch, greedy_ranges
from shrinkpoint.bench.studies.search import Checkpoint, Training
from shrinkpoint.bench.studies.systems import (
    bitsnap,
    inshrinkerator,
    lc,
    others,
    rows,
    table,
)
from shrinkpoint.codec.errors import BadArgumentError
from shrinkpoint.codec.plan import UnknownArraysWarning
from shrinkpoint.kernels.planes import undifference

FOLDER = Path(systems.__file__).parent
QUICK = Options(quick=True)


def named(found: list[Row]) -> dict[str, Row]:
    return {row.row.partition(": ")[2]: row for row in found}


# ---------------------------------------------------------------------------------------------------- the whole


def test_quick_rows_json_and_picture(tmp_path: Path) -> None:
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    only = "sizes of its steps,weight of a bucket,by changed values,on matrix factorization"
    assert main(["systems", "--quick", "--only", only, "--json", str(out), "--plot", str(picture)]) == 0
    found = json.loads(out.read_text())["rows"]
    prefixes = {row["row"].partition(": ")[0] for row in found}
    assert prefixes == {one.name for one in systems.EXPERIMENTS if any(part in one.name for part in only.split(","))}
    assert len(prefixes) == 4
    assert all(row["met"] is not False for row in found)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_every_published_table_has_an_experiment() -> None:
    names = [one.name for one in systems.EXPERIMENTS]
    assert len(set(names)) == len(names)
    # `--only` cuts at commas.
    assert not [name for name in names if "," in name]
    wanted = {
        *(f"Inshrinkerator {what} on {m}" for what in ("bins", "spaces") for m in inshrinkerator.workloads.WORKLOADS),
        *(f"LC-Checkpoint rework on {task}" for task in ("logistic regression", "LeNet", "matrix factorization")),
        "Inshrinkerator delta coder",
        "Inshrinkerator rankings",
        "LC-Checkpoint sizes of its steps",
        "LC-Checkpoint weight of a bucket",
        "LC-Checkpoint cost of a failure",
        "LC-Checkpoint overhead",
        "LC-Checkpoint exponents",
        *(f"Check-N-Run {what}" for what in ("error of the quantizers", "greedy search", "modified rows", "restores")),
        "Check-N-Run policies",
        "Check-N-Run row tracker",
        *(f"BitSnap ratio by {what}" for what in ("changed values", "iterations")),
        *(f"BitSnap {what}" for what in ("error of the moments", "loss after a restore", "quality score")),
        "BitSnap error by model size",
        "BitSnap stages by parallelism",
        "BitSnap loss of sparsified states",
        "lossless ratio",
        "Prior art",
    }
    assert wanted == set(names)
    assert lc.SEEDS >= 20


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # zipnn's import
def test_what_is_not_installed_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, options: Options) -> list[Row]:
        raise ImportError("no module", name="sklearn")

    (row,) = table.Experiment("a table", missing).rows(QUICK)
    assert (row.row, row.value, row.met) == ("a table", None, None)
    assert row.note == "not measured: sklearn is not installed"
    monkeypatch.setitem(sys.modules, "pcodec", None)
    found = [row for row in others.compared("lossless ratio", QUICK) if "float32, single" in row.row]
    peers = {row.peer: row for row in found if not row.row.endswith("the best")}
    assert peers["pcodec"].peer_value is None
    assert peers["pcodec"].note.startswith("not measured: pcodec")
    zstd = peers["zstd -19"]
    assert zstd.peer_value is not None
    assert zstd.value is not None
    assert 1 < zstd.peer_value < zstd.value < 4
    assert [row.met for row in found if row.row.endswith("the best")] == [True]


@pytest.mark.parametrize("path", sorted([*FOLDER.glob("*.py"), *(FOLDER.parent / "baselines").glob("*.py")]), ids=str)
def test_examples(path: Path) -> None:
    name = ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
    module = importlib.import_module(f"shrinkpoint.bench.studies.{name}".removesuffix(".__init__"))
    assert not doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE).failed


def test_mean_and_its_interval() -> None:
    found = table.mean([1.0, 2.0, 3.0, 6.0])
    assert found.mean == 3.0
    assert found.half == pytest.approx(3.182 * np.std([1, 2, 3, 6], ddof=1) / 2)
    assert str(table.mean([2.0])) == "2 (one run)"
    assert table.mean([1.0] * 25).half == 0.0
    assert times_smaller(2.0, 6.0) == 3.0
    assert times_smaller(0.0, 6.0) is None


# ---------------------------------------------------------------------------------------------------- exact coding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peers_get_the_better_of_both_differences(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    before = {"a": torch.randn(300, 200, generator=g).to(dtype), "b": torch.randn(64, generator=g).to(dtype)}
    later = {name: (x.float() * 1.01 + 0.001).to(dtype) for name, x in before.items()}
    flipped = {name: torch.where(torch.rand(x.shape, generator=g) < 0.5, x, -x) for name, x in before.items()}
    for after, better in ((later, others.ARITHMETIC), (flipped, others.XOR)):
        found = others.inputs(after, before)
        assert set(found) == {others.ARITHMETIC, others.XOR}
        now, old = (others._patterns(model) for model in (after, before))
        assert np.array_equal(found[others.XOR] ^ old, now)
        name = str(dtype).removeprefix("torch.")
        assert np.array_equal(undifference(found[others.ARITHMETIC], old, dtype=name), now)
        sizes = {how: peers.coded_size("zstd -19", [values]) for how, values in found.items()}
        assert min(sizes, key=lambda how: sizes[how]) == better
        for peer in ("zstd -19", "pcodec") if importlib.util.find_spec("pcodec") else ("zstd -19",):
            size, note = others.PEERS[peer](after, before)
            assert note.startswith(better), peer
            if peer == "zstd -19":
                assert size == sizes[better] < max(sizes.values())
    assert list(others.inputs(later, None)) == ["patterns"]


# ---------------------------------------------------------------------------------------------------- LC-Checkpoint


def test_rework_counts_iterations_until_the_loss_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lc, "MOST_REWORK", 9)
    task = lc.TASKS["matrix factorization"]
    with threads(1):
        run = lc.Training(task, 0)
        first = run.state()
        losses = []
        for _ in range(6):
            run.advance()
            losses.append(run.loss())
        last = run.state()
        assert lc.Training(task, 0).rework(last, 6, losses[-1]) == 0
        # The same batches from the start: it is back when the loss was first so low.
        expected = next(i + 1 for i, loss in enumerate(losses) if loss <= losses[-1])
        assert lc.Training(task, 0).rework(first, 0, losses[-1]) == expected
        assert lc.Training(task, 0).rework(first, 0, -1.0) == lc.MOST_REWORK


@pytest.mark.parametrize("label", ["logistic regression", "matrix factorization"])
def test_the_three_systems_get_the_same_size_and_lc_wins(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = (2, 3) if label == "matrix factorization" else (2,)
    monkeypatch.setattr(lc, "SEEDS", 2)
    with threads(1):
        found = lc.rework(lc.TASKS[label], "x", Options(quick=len(bits) == 1))
    for width in bits:
        for peer, low in (("SCAR", {2: 2.88, 3: 1.9}), ("TOPN", {2: 2.17, 3: 1.52})):
            (row,) = (r for r in found if r.row == f"x: iterations of rework, {width} bits" and r.peer == peer)
            (quotient,) = (r for r in found if r.row == f"x: {peer} over LC-Checkpoint, {width} bits")
            sizes = [float(part.split()[-1]) for part in row.note.split(";")[1].split(" % ")[:2]]
            assert 2 < sizes[0] < 10
            assert sizes[1] == pytest.approx(sizes[0], rel=0.04), peer
            assert row.value is not None
            assert row.peer_value is not None
            assert row.ratio == pytest.approx(row.peer_value / row.value)
            assert quotient.value == row.ratio > 1.8
            assert quotient.peer_value == low[width]


def test_all_systems_count_the_same_arrays() -> None:
    """All systems count the same arrays; biases and LeNet's outer weights are exact."""
    with threads(1):
        run = lc.Training(lc.TASKS["LeNet"], 0)
        first = run.state()
        ours, scar = table.Chain(sp.presets.lc_checkpoint(2)), table.Chain(Scar(1.0))
        for chain in (ours, scar):
            chain.save(first, lc._kinds(first))
        run.advance()
        for chain in (ours, scar):
            chain.save(run.state(), lc._kinds(first))
    exact = sum(x.numel() for x in first["model"].values() if x.ndim == 1 or x.numel() < 1024)
    assert exact == 1226
    raw = lc.coded_bytes(first)
    assert raw == lc.raw_bytes(run.model) - 4 * exact
    assert scar.sizes[0] == pytest.approx(raw, abs=40)
    assert ours.sizes[0] < 0.06 * raw


def test_each_step_makes_it_smaller() -> None:
    found = named(lc.shares("x", QUICK))
    for bits, limit in ((2, 5.0), (3, 10.0)):
        steps = [found[f"logistic regression, {bits} bits, {step}"].value or 0 for step in ("E", "E+P", "E+P+H")]
        assert 20 > steps[0] > steps[1] > steps[2] > 0
        assert steps[2] < limit


def test_a_bucket_set_to_zero_changes_the_loss() -> None:
    with threads(1):
        errors = lc._bucket_errors(lc.TASKS["logistic regression"], 0, 10)
    assert len(errors) > 10
    assert min(errors) >= 0
    assert sum(errors[:8]) > 100 * sum(errors[-8:])


def test_chains_restore_what_they_saved() -> None:
    run = lc.Training(lc.TASKS["matrix factorization"], 0)
    ours, theirs = table.Chain(sp.presets.lc_checkpoint(3)), table.Chain(Scar(0.25))
    with threads(1):
        for _ in range(5):
            for chain in (ours, theirs):
                chain.save(run.state(), lc._kinds(run.state()))
            run.advance()
    assert len(ours.sizes) == len(theirs.sizes) == 4
    exact = run.state()["model"]["users"]
    for chain in (ours, theirs):
        assert chain.restored()["step"] == 4
        assert float((chain.restored()["model"]["users"] - exact).abs().mean()) < 0.2


# ---------------------------------------------------------------------------------------------------- Check-N-Run


def test_the_order_of_the_quantizers() -> None:
    found = named(rows.methods("x", QUICK))
    for bits in (2, 3, 4):
        errors = [found[f"{bits} bits, {method}"].value or 0 for method in rows.METHODS]
        assert errors[0] > errors[1] > errors[2] > errors[3] > 0
    assert found["8 bits, symmetric"].ratio is not None
    assert found["8 bits, symmetric"].ratio < 1


def test_mean_error_is_a_mean_of_lengths() -> None:
    x = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)
    assert rows.mean_error(x, np.zeros_like(x)) == 2.5


def test_rows_that_no_batch_looked_up_stay() -> None:
    run = rows.AdagradRun(0, 20)
    before = run.tables().copy()
    run.train(2)
    share = float((run.tables() != before).any(axis=1).mean())
    assert 0.02 < share < 0.2
    found = named(rows.modified("x", QUICK))
    values = [row.value or 0 for what, row in found.items() if what.startswith("share after")]
    assert values == sorted(values)
    assert values[0] == pytest.approx(26, abs=3)


def test_what_a_restore_costs_is_said_of_the_loss_and_of_accuracy() -> None:
    run = rows.AdagradRun(0, 20)
    run.train(20)
    with torch.no_grad():
        hits = [
            ((run.model(ids).squeeze(1) > 0).float() == clicked).float().sum()
            for ids, clicked in run.workload.held_out()
        ]
    count = sum(len(clicked) for _, clicked in run.workload.held_out())
    assert run.accuracy() == pytest.approx(float(sum(hits)) / count)
    assert 0.5 < run.accuracy() < 1
    found = named(rows.restores("x", QUICK))
    assert set(found) == {f"{bits} bits, 1 restores{what}" for bits in (2, 8) for what in ("", ", accuracy lost")}
    assert abs(found["8 bits, 1 restores, accuracy lost"].value or 0) < 0.5


def test_the_consecutive_policy_writes_less() -> None:
    sizes = {"consecutive": (100, 20, 20), "intermittent": (100, 20, 40), "one_shot": (100, 20, 80)}
    chains = {policy: [(i > 0, n, 400) for i, n in enumerate(found)] for policy, found in sizes.items()}
    row = rows._less_written("x", chains)
    assert row.value == pytest.approx(100 * (1 - 140 / 160))
    assert row.note.endswith("than by one-shot 30 %")


def test_capacity_by_policy() -> None:
    sizes = [(False, 100, 400), (True, 20, 400), (True, 30, 400), (False, 110, 400), (True, 20, 400)]
    assert rows._capacity(sizes, "intermittent") == [1.0, 1.2, 1.3, 1.1, 1.3]
    assert rows._capacity(sizes[:3], "consecutive") == [1.0, 1.2, 1.5]


def test_a_resumed_run_is_the_same_but_for_the_quantization() -> None:
    with threads(1):
        exact = rows.AdagradRun(0, 6)
        exact.train(6)
        tables = exact.tables()
        assert np.array_equal(rows._resumed(0, 6, 8, 0).tables(), tables)
        changes = [float(np.abs(rows._resumed(0, 6, bits, 2).tables() - tables).mean()) for bits in (2, 8)]
    assert 0 < 10 * changes[1] < changes[0]


# ---------------------------------------------------------------------------------------------------- BitSnap


def test_the_mask_is_as_small_as_published() -> None:
    for what, row in named(bitsnap.sparsified("x", QUICK)).items():
        assert row.value is not None
        assert row.peer_value is not None
        if not what.endswith("beside COO"):
            assert row.value == pytest.approx(row.peer_value, rel=0.01), what
        else:
            assert row.value > 0.99 * row.peer_value
    assert bitsnap.coo_bytes(10, 1000) == 60
    assert bitsnap.coo_bytes(500, 1000) == 2000


def test_smaller_steps_change_fewer_values() -> None:
    found = named(bitsnap.iterations("x", QUICK))
    ratios = {what: row.value or 0 for what, row in found.items()}
    for stage in ("", ", learning rate / 10", ", learning rate / 100"):
        along = [ratios[f"{apart} iterations from the base{stage}"] for apart in (1, 2, 5, 10)]
        assert along == sorted(along, reverse=True)
        assert 1 <= along[-1] <= along[0] <= 16
    assert ratios["1 iterations from the base, learning rate / 100"] > 2 * ratios["1 iterations from the base"]


def test_a_sparsified_run_is_the_same_run() -> None:
    (row,) = bitsnap.continued("x", QUICK)
    assert row.value == row.peer_value == 0.0
    smallest = float(row.note.split("base, ")[1].split(" to ")[0])
    assert smallest > 1


def test_the_loss_after_a_restore_is_followed() -> None:
    found = named(bitsnap.resumed("x", QUICK))
    assert list(found) == ["MLP, loss at once", "MLP, loss after 5 steps", "MLP, loss after 20 steps"]
    assert found["MLP, loss at once"].value == 0.0
    assert 0 < abs(found["MLP, loss after 20 steps"].value or 0) < 5


def test_errors_by_size_are_those_of_each_model() -> None:
    found = named(bitsnap.by_size("x", QUICK))
    assert len(found) == 2 * 2 * 2
    assert len({row.size for row in found.values()}) == 2
    for what, row in found.items():
        assert 0 < (row.value or 0) < (0.2 if "MRE" in what else 1e-6), what
    assert [row.peer_value for what, row in found.items() if "exp_avg, MRE" in what] == [9.86, 9.89]


def test_errors_of_the_moments_and_the_score() -> None:
    found = named(bitsnap.clustered("x", QUICK))
    assert found["ratio of the moments"].value == pytest.approx(2.67, abs=0.02)
    for moment in ("exp_avg", "exp_avg_sq"):
        ours, naive = (found[f"{moment}, MSE, {system}"].value or 0 for system in ("BitSnap", "naive 8-bit"))
        assert 0 < ours < naive
    scores = named(bitsnap.score("x", QUICK))
    assert len(scores) == 12
    assert all(0 < (row.value or 0) <= 1 for row in scores.values())


def test_stages_are_those_of_one_rank() -> None:
    found = bitsnap.stages("x", QUICK)
    sizes = {row.row.partition(": ")[2].partition(", ")[0]: row.size for row in found}
    assert sizes == {"one rank": 16 * 128 * 128, "mp4 pp1": 4 * 128 * 128, "mp2 pp2": 4 * 128 * 128}
    assert len(found) == 6
    assert all((row.value or 0) > 0 and row.peer == "one rank" for row in found)
    assert [row.ratio for row in found[:2]] == [1.0, 1.0]
    before = np.array([1, 2, 3, 4], np.uint16)
    assert bitsnap._packed(np.array([1, 9, 3, 8], np.uint16), before).tolist() == [9, 8]


# ---------------------------------------------------------------------------------------------------- Inshrinkerator


def training(evaluate: Any) -> Training:
    return Training("a model", 1, [Checkpoint(1, {}, None)], evaluate, evaluate, {})


def weights(**sizes: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a state of drawn weights and their kinds; "wte" is an embedding."""
    g = torch.Generator().manual_seed(0)
    model = {name: torch.randn(shape, generator=g) for name, shape in sizes.items()}
    return {"model": model}, {name: sp.Kind("embedding" if name == "wte" else "linear", "weight") for name in sizes}


def test_paper_figures_fall_with_the_threshold_and_ours_needs_the_fewest() -> None:
    assert set(inshrinkerator._PAPER) == {"GPT", "CNN", "ViT"}
    for paper in inshrinkerator._PAPER.values():
        columns = {name: figures for name, figures in paper.items() if name != "model"}
        assert {inshrinkerator.ADAPTIVE, inshrinkerator.UNIFORM, inshrinkerator.PUBLISHED} <= set(columns)
        for threshold in (f"{100 * share:g} %" for share in inshrinkerator.THRESHOLDS):
            values = {name: figures[threshold] for name, figures in columns.items() if threshold in figures}
            assert min(values, key=lambda name: values[name]) == inshrinkerator.PUBLISHED
        for figures in columns.values():
            assert list(figures.values()) == sorted(figures.values(), reverse=True)
            assert len(figures) >= 2


def test_least_bins_are_the_first_that_pass() -> None:
    def evaluate(state: dict[str, Any]) -> float:
        return 2.0 * (1 + (0.29 / state["bins"] if state else 0.0))

    for times, expected in ((1, {0.001: None, 0.01: 32, 0.05: 6}), (10, {0.001: 32, 0.01: 4, 0.05: 4})):
        space = inshrinkerator.ladder(lambda _, bins, kinds, times=times: {"bins": bins * times})  # type: ignore[misc]
        assert inshrinkerator.least_bins(training(evaluate), {}, space({}, {})) == expected


def test_what_restores_the_same_is_evaluated_once() -> None:
    asked: list[int] = []

    def restore(number: int) -> dict[str, Any]:
        asked.append(number)
        return {"loss": (1.2, 1.2, 1.04, 1.0)[number]}

    candidates = [
        inshrinkerator.Candidate(bins, same, functools.partial(restore, number))
        for number, (bins, same) in enumerate([(8, "a"), (8, "a"), (8.5, "b"), (16, "c")])
    ]
    found = inshrinkerator.least_bins(training(lambda state: state.get("loss", 1.0)), {}, candidates)
    assert found == {0.001: 16, 0.01: 16, 0.05: 8.5}
    assert asked == [0, 2, 3]


def test_the_spaces_are_those_of_tables_9_to_12() -> None:
    assert POWERS == (8, 16, 32, 64, 128, 256)
    assert (STEPS, RATIOS) == ((10, 25, 50, 100), (0.1, 0.2, 0.3, 0.4, 0.5))
    assert {name: one.space for name, one in inshrinkerator.IN_THEIR_SPACES.items()} == {
        inshrinkerator.PUBLISHED: inshrinkerator.published,
        inshrinkerator.UNIFORM: inshrinkerator.uniform,
        inshrinkerator.ADAPTIVE: inshrinkerator.adaptive,
        inshrinkerator.KMEANS: inshrinkerator.kmeans,
    }
    state, kinds = weights(wte=(64, 32), fc=(64, 96))
    # Every configuration of the tables: for uniform bins those whose limits are in order.
    numbers = {inshrinkerator.PUBLISHED: 6 * 2 * 3, inshrinkerator.UNIFORM: 21}
    numbers |= {inshrinkerator.ADAPTIVE: 6 * 4 * 5, inshrinkerator.KMEANS: 6 * 2}
    for name, one in inshrinkerator.IN_THEIR_SPACES.items():
        found = list(one.space(state, kinds))
        assert len(found) == numbers[name]
        assert [c.bins for c in found] == sorted(c.bins for c in found)


def test_bins_are_a_mean_over_elements() -> None:
    state, kinds = weights(wte=(64, 32), fc=(64, 96))
    for space, least in ((inshrinkerator.published, 4), (inshrinkerator.kmeans, 8)):
        assert next(iter(space(state, kinds))).bins == (16 * 1 + least * 3) / 4
        # Without an embedding there is nothing to choose for it.
        own = list(space({"model": {"fc": state["model"]["fc"]}}, kinds))
        assert {c.bins for c in own} == {4, 6, 8, 12, 16, 32} if least == 4 else {8, 16, 32, 64, 128, 256}
        assert len({c.same for c in own}) == len(own) / 2


def test_a_tied_head_is_an_embedding() -> None:
    kinds = inshrinkerator.kinds_of(inshrinkerator.workloads.gpt(1, 32, 2).model())
    assert {name for name, kind in kinds.items() if kind.layer == "embedding"} == {"embed.weight", "head.weight"}
    apart = inshrinkerator._apart(
        {name: np.zeros(1, np.float32) for name in ("embed.weight", "head.weight")}, kinds, 4, 16
    )
    assert apart == {"embed.weight": 16, "head.weight": 16}


def test_uniform_bins_follow_the_entropy_within_the_limits() -> None:
    state, kinds = weights(fc=(64, 96), peak=(64, 96))
    # One value far off leaves the rest within a few of 256 bins: a small entropy.
    state["model"]["peak"][0, 0] = 1e4
    normal, peaked = (QDCompressor(2, 256).bins(x) for x in inshrinkerator.weights_of(state).values())
    assert normal == 128
    assert peaked == 2
    found = {one.same: one for one in inshrinkerator.uniform(state, kinds)}
    assert {(128, 8), (8, 8), (128, 16), (256, 256)} < set(found)
    assert (8, 128) not in found
    restored = found[128, 8].restore()["model"]
    assert found[128, 8].bins == (128 + 8) / 2
    assert restored["fc"].unique().numel() > 64
    assert restored["peak"].unique().numel() <= 8


@pytest.mark.parametrize("system", list(inshrinkerator.ON_THE_LADDER))
def test_more_bins_err_less(system: str) -> None:
    torch.manual_seed(0)
    state = {"model": {"a.weight": torch.randn(64, 64), "a.bias": torch.randn(64)}}
    errors = []
    space = inshrinkerator.ON_THE_LADDER[system].space
    for one in space(state, {"a.weight": "linear"}):
        if one.bins in (4, 16, 64):
            restored = one.restore()
            assert torch.equal(restored["model"]["a.bias"], state["model"]["a.bias"])
            found = restored["model"]["a.weight"]
            kept = system not in (inshrinkerator.BARE, inshrinkerator.UNIFORM, inshrinkerator.ADAPTIVE)
            assert found.unique().numel() <= one.bins + 200 * kept
            errors.append(float((found - state["model"]["a.weight"]).square().mean()))
    assert len(errors) == 3
    assert errors[0] > 2 * errors[1] > 4 * errors[2] > 0


@pytest.mark.parametrize("system", list(inshrinkerator.IN_THEIR_SPACES))
def test_candidates_restore_what_they_say(system: str) -> None:
    """Candidates have the number of bins they report, and more bins give smaller errors."""
    state, kinds = weights(wte=(64, 32), fc=(64, 96))
    found = list(inshrinkerator.IN_THEIR_SPACES[system].space(state, kinds))
    errors = []
    for one in (found[0], found[-1]):
        restored = one.restore()["model"]
        counts = {name: x.unique().numel() for name, x in restored.items()}
        apart = system == inshrinkerator.PUBLISHED or system == inshrinkerator.KMEANS
        assert counts["fc"] <= one.bins + 200 * apart
        assert restored["wte"].shape == (64, 32)
        errors.append(sum(float((restored[name] - x).square().sum()) for name, x in state["model"].items()))
    assert errors[0] > 4 * errors[1] > 0


def test_the_greedy_range_leaves_an_outlier_out() -> None:
    sketch = Sketch.of(np.append(np.linspace(-1, 1, 4001), 2.0).astype(np.float32))
    ((low, high),) = greedy_ranges(sketch, 8, 25, (0.5,))
    assert low == pytest.approx(-1, abs=0.13)
    assert 0.9 < high < 1.6
    even = Sketch.of(np.linspace(-1, 1, 4001).astype(np.float32))
    assert greedy_ranges(even, 64, 25, (0.5,)) == [(-1.0, 1.0)]


def test_one_walk_gives_the_range_of_each_ratio() -> None:
    sketch = Sketch.of(np.random.default_rng(0).standard_normal(20_000).astype(np.float32))
    together = greedy_ranges(sketch, 8, 50, RATIOS)
    assert together == [greedy_ranges(sketch, 8, 50, (ratio,))[0] for ratio in RATIOS]
    losses = [sketch.loss(*found, 8) for found in together]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 1.5 * losses[-1]


def test_coders_of_the_same_levels() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnknownArraysWarning)  # levels of exact arrays would be no levels
        found = named(inshrinkerator.ablation("x", QUICK))
    values = {label: row.value or 0 for label, row in found.items()}
    for policy in ("codebook refit", "codebook frozen", "searched"):
        of_coder = [values[f"MLP, {policy}, {coder}, overall"] for coder in inshrinkerator.CODERS]
        assert max(of_coder) == of_coder[-1] > 1.2 * of_coder[0] > 4
    assert math.isclose(values["MLP, codebook refit, Huffman, highest"], 30, rel_tol=0.2)
    assert found["MLP, codebook refit, Huffman, overall"].peer_value is None
    assert found["MLP, searched, Huffman, overall"].peer_value == 25.0
    # With pruning the levels migrate at different rates, which the rearrangement separates.
    assert values["MLP, searched, rearranged, overall"] > 1.2 * values["MLP, searched, run lengths + Huffman, overall"]
    said = re.search(r"loss: ([\d.]+) bins, ([\d.]+) % pruned", found["MLP, searched, rearranged, overall"].note)
    assert said is not None
    assert 4 <= float(said[1]) <= 16
    assert float(said[2]) > 0


def test_rankings_are_of_all_matrices() -> None:
    model = {"a": torch.tensor([[1.0, -3.0], [2.0, 0.5]]), "b": torch.tensor([[-0.1, 4.0]]), "bias": torch.ones(2)}
    grads = {"a": torch.tensor([[0.0, 1.0], [-1.0, 1.0]]), "b": torch.tensor([[9.0, 1.0]]), "bias": torch.ones(2)}
    magnitude, sensitivity = inshrinkerator._ranks(model, grads)
    assert (5 * magnitude).round().tolist() == [2, 4, 3, 1, 0, 5]
    assert (5 * sensitivity).round().tolist() == [0, 4, 3, 1, 2, 5]
    found = named(inshrinkerator.rankings("x", QUICK))
    values = {label.partition(", ")[2]: row.value or 0 for label, row in found.items()}
    few, many = (f"of the {share} % largest, those also most sensitive" for share in ("0.5", "20"))
    assert list(values) == ["correlation of the ranks", few, many]
    assert 0.2 < values["correlation of the ranks"] < 0.9
    assert values[few] > 2 * 0.5
    assert 20 < values[many] < 90
    assert found["MLP at step 60, correlation of the ranks"].size == sum(
        x.numel() for x in workloads.mlp().model().parameters() if x.ndim > 1
    )


# ---------------------------------------------------------------------------------------------------- the page


def test_the_page_is_made_from_the_results() -> None:
    text = (results.HOME / "docs" / "systems.md").read_text(encoding="utf-8")
    assert pages.regenerated(text.replace("| MLP", "| changed")) == text, "run python -m bench.evidence"


def test_every_item_of_the_papers_has_a_file_a_test_and_a_status() -> None:
    """The lists name files and rows that exist, and every other status has a reason."""
    text = (results.HOME / "bench" / "studies" / "systems" / "items.md").read_text(encoding="utf-8")
    lists = re.findall(r"^\| item .*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert len(lists) == 4
    items = [[cell.strip() for cell in line.strip("|").split("|")] for part in lists for line in part.splitlines()]
    found: dict[str, int] = {}
    for item, code, test, row, status in items:
        for bench, _, what in (name.strip().partition(": ") for name in row.split(";") if row):
            assert any(what.strip("`") in one["row"] for one in results.rows_of(f"{bench}*.json")), f"{item}: {row}"
        for cell, folder in ((code, ""), (test, "tests/")):
            for name in re.findall(r"`([^`]+)`", cell):
                assert (results.HOME / folder / name).exists(), f"{item}: {name}"
        kind = status.split(":")[0].split(";")[0].split(",")[0].split(" ")[0]
        found[kind] = found.get(kind, 0) + 1
        if kind == "done":
            assert code, f"{item} is done by no file"
            assert test, f"{item} is tested by none"
        else:
            assert len(status.split()) > 1 or status.startswith("["), f"{item} gives no reason"
    stated = re.search(r"(\d+) entries, (\d+) done and (\d+) partly", text)
    assert stated is not None
    assert [len(items), found["done"], found["partly"]] == [int(n) for n in stated.groups()]
    assert stated[0] in (results.HOME / "docs" / "systems.md").read_text(encoding="utf-8")


def test_the_committed_results_have_every_experiment() -> None:
    names = {row["row"].partition(": ")[0] for row in papers.measured()}
    assert names == {one.name for one in systems.EXPERIMENTS}
    for row in papers.measured():
        assert row["value"] is not None or row["note"], row["row"]
        assert not row["note"].startswith("CHECK FAILED"), row["row"]


def test_the_short_form_has_a_line_for_each_system() -> None:
    found = papers.figures(papers.measured())
    assert len(found) == len(papers.FIGURES), "a line has no row"
    titles = " ".join(line[0] for line in found)
    assert all(system in titles for system in ("Inshrinkerator", "LC-Checkpoint", "Check-N-Run", "BitSnap"))
    cells = {title: (theirs, ours) for title, theirs, ours in found}
    assert cells["LC-Checkpoint, figure 3: SCAR's rework over its, 2 bits"][0] == "2.88 to 5.77 x"
    assert cells["section 3.4: ratio of the moments"][0] == "2.67 x"


def test_experiments_measured_again_take_the_place_of_the_old_ones() -> None:
    def document(commit: str, *named: tuple[str, float], **machine: object) -> dict[str, Any]:
        return {
            "machine": {"cpu": "a", "cores": 2, "load": [len(named)], **machine},
            "versions": {"torch": "1", **({"lmzip": "1"} if len(named) > 2 else {})},
            "commit": commit,
            "rows": [{"row": name, "value": value, "note": "n"} for name, value in named],
        }

    old = document("a" * 40, ("one: x", 1.0), ("one: y", 2.0), ("two: x", 3.0))
    again = document("b" * 40 + "+", ("one: z", 4.0), ("three: x", 5.0))
    found = merge.replaced(old, [again, document("c" * 40, ("four: x", 6.0), cpu="a Xeon")])
    assert [(row["row"], row["value"], row["note"]) for row in found["rows"]] == [
        ("one: z", 4.0, "n; measured at bbbbbbb+"),
        ("two: x", 3.0, "n"),
        ("three: x", 5.0, "n; measured at bbbbbbb+"),
        ("four: x", 6.0, "n; measured at ccccccc on a Xeon"),
    ]
    assert (found["commit"], found["versions"]) == (old["commit"], old["versions"])
    assert results.commits(found) == {"aaaaaaa": 1, "bbbbbbb+": 2, "ccccccc": 1}
    assert results.manifest_line("x", found)[3].endswith("; 1 row on a Xeon")
    with pytest.raises(BadArgumentError, match=r"other versions \(torch\) does not go into this one"):
        merge.replaced(old, [{**again, "versions": {"torch": "2"}}])


def test_the_command_knows_which_result_it_has(tmp_path: Path) -> None:
    one = {"machine": {}, "versions": {}, "commit": None, "rows": [{"row": "e: x", "value": 1, "note": ""}]}
    into, new = tmp_path / "old.json", tmp_path / "new.json"
    into.write_text(json.dumps(one))
    new.write_text(json.dumps({**one, "rows": [{"row": "e: x", "value": 2, "note": ""}]}))
    assert merge.main([str(into), str(new)]) == 0
    found = json.loads(into.read_text())
    assert [row["value"] for row in found["rows"]] == [2]
    assert found["run"] == {"command": "python -m bench.studies.merge old.json new.json"}


RESULTS = sorted(path.stem for path in results.RESULTS.glob("systems*.json"))


@pytest.mark.parametrize("name", RESULTS)
def test_the_committed_results_are_of_a_commit(name: str) -> None:
    commit = json.loads((results.RESULTS / f"{name}.json").read_text())["commit"]
    assert re.fullmatch("[0-9a-f]{40}", commit), f"{commit}: results of a checkout with changes"
