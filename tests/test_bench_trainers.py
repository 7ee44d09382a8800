"""`bench trainers`: a wrong resume is reported, and each framework's row has its peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shrinkpoint as sp
from shrinkpoint.bench import frameworks, trainers
from shrinkpoint.bench.frameworks import Job, Outcome, run, saved_bytes
from shrinkpoint.bench.harness import Options, is_red


def stand_in(seconds: dict[str, float], drift: float = 0.0) -> Any:
    """Return a framework with known times and bytes; `drift` is the error of a resumed run."""

    def train(job: Job) -> Outcome:
        resumed = job.folder.exists()
        job.folder.mkdir(parents=True, exist_ok=True)
        saves = 0 if job.how == "none" else job.steps // job.every
        for number in range(saves):
            (job.folder / f"{number}").write_bytes(bytes(10 if job.how == "ours" else 100))
        model = frameworks.net(job.width)
        weights = [p.detach() + drift * resumed for p in model.parameters()]
        return Outcome(seconds[job.how], [seconds[job.how] / 100] * saves, [], 0, weights)

    return frameworks.Framework(train, "own", "one\ntwo\n", "one")


def test_rows_of_a_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    made = stand_in({"none": 2.0, "own": 2.5, "ours": 2.2})
    monkeypatch.setitem(trainers.FRAMEWORKS, "plain loop", made)
    rows = {r.row.partition(": ")[2]: r for r in trainers.run(Options(quick=True, only="plain loop"))}
    assert [r.value for r in rows.values()] == pytest.approx([22.0, 10.0, 10.0, 2, 0, 0.0])
    assert [r.peer_value for r in rows.values()][:4] == pytest.approx([25.0, 25.0, 100.0, 1])
    assert rows["stall of a save"].ratio == pytest.approx(25 / 22)
    assert rows["resume, lossless"].met is True
    assert all(r.peer == "own" for name, r in rows.items() if r.peer_value is not None)


def test_a_framework_whose_resume_is_not_exact_gets_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(trainers.FRAMEWORKS, "DCP", stand_in({"none": 2.0, "own": 2.5, "ours": 2.2}, 1e-6))
    (row,) = trainers.run(Options(quick=True, only="DCP:,DCP"))[:1]
    assert is_red(row)
    assert (row.value, row.met) == (None, False)
    assert "weights differ after a lossless resume" in row.note


def test_what_is_not_here_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Job) -> Outcome:
        raise ImportError("no", name="accelerate")

    monkeypatch.setitem(trainers.FRAMEWORKS, "Accelerate", frameworks.Framework(missing, "own", "", ""))
    (row,) = trainers.run(Options(only="Accelerate"))
    assert (row.value, row.note) == (None, "not measured: accelerate is not installed")
    rows = trainers.run(Options(quick=True, only="Lightning,Transformers,ranks"))
    assert {r.note for r in rows} == {"not measured: --quick"}
    assert len(rows) == 5


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(("name", "how"), [("plain loop", "own"), ("DCP", "own"), ("DCP", "ours")])
def test_a_resumed_training_ends_as_one_that_was_not_stopped(tmp_path: Path, name: str, how: str) -> None:
    def train(folder: str, steps: int, what: str) -> Outcome:
        return run(name, Job(tmp_path / folder, what, sp.presets.lossless(), steps, 3, 32))

    whole = train("whole", 6, "none")
    assert train("stopped", 3, how).saves >= 1
    again = train("stopped", 6, how)
    assert len(again.stalls) == 1
    assert trainers._different(again.weights, whole.weights) == 0
    assert saved_bytes(tmp_path / "stopped") > 5000


def test_bytes_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(bytes(7))
    (tmp_path / "y").hardlink_to(tmp_path / "a" / "x")
    assert saved_bytes(tmp_path) == 7


def test_ranks_measure_a_save_of_real_processes() -> None:
    found = trainers.ranked(1, 40_000)
    for how in ("ours", "own"):
        assert found[how]["seconds"] > 0
        assert found[how]["metadata"] > 500
    assert found["ours"]["nbytes"] < found["own"]["nbytes"] / 4
