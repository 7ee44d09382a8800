"""The demo: small runs that are killed and resumed, and its parts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.__main__ import main
from shrinkpoint.bench.machine import commit
from shrinkpoint.demo import SIZES, DemoError, Job, checkpoint_steps, demo_config, presets
from shrinkpoint.demo.report import draw, summarize, tables
from shrinkpoint.demo.run import Folder
from shrinkpoint.demo.supervisor import History, Killer, supervise
from shrinkpoint.demo.trainer import GPT, Batches, Corpus, held_out_loss

STEPS, EVERY = 24, 4
SAVES = list(range(4, 25, 4))


@dataclass
class Done:
    """A finished run of the command line."""

    out: Path
    result: dict[str, Any]
    shown: str


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Done:
    out = tmp_path_factory.mktemp("demo") / "out"
    command = f"demo --size tiny --steps {STEPS} --every {EVERY} --kills 2 --seed 5 --json --out".split()
    ran = subprocess.run(
        [sys.executable, "-m", "shrinkpoint", *command, str(out)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return Done(out, json.loads(ran.stdout), ran.stderr)


def run_main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Run the command line; return its exit status and standard error."""
    monkeypatch.setattr(sys, "argv", ["shrinkpoint", *words])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert isinstance(exit_.value.code, int)
    return exit_.value.code, capsys.readouterr().err


def test_it_was_killed_and_resumed(demo: Done) -> None:
    restores = demo.result["restores"]
    assert len(restores) == 2
    assert any(restore["during"] == "save" for restore in restores)
    for restore in restores:
        assert restore["resumed"] in SAVES
        assert restore["resumed"] <= restore["at"] < restore["resumed"] + 2 * EVERY
        assert restore["warnings"] == []
        assert f"killed after step {restore['at']}" in demo.shown
        assert f"resumed from the checkpoint of step {restore['resumed']}" in demo.shown
    in_save = [restore for restore in restores if restore["during"] == "save"]
    # The save that was hit left nothing visible: the run resumed from the one before.
    assert all(restore["at"] in SAVES and restore["resumed"] < restore["at"] for restore in in_save)


def test_its_numbers_are_coherent(demo: Done) -> None:
    result = demo.result
    saved = result["checkpoints"]
    assert [event["step"] for event in saved] == SAVES
    assert not saved[0]["delta"]
    assert sum(event["delta"] for event in saved) > len(saved) // 2
    for event in saved:
        parts = event["parts"]
        assert event["raw"] == sum(raw for raw, _ in parts.values())
        assert event["stored"] >= sum(stored for _, stored in parts.values())
        assert parts["optimizer"][0] > 2 * parts["weights"][0] * 0.9
    raw, stored = (sum(event[key] for event in saved) for key in ("raw", "stored"))
    assert result["ratio"]["whole"] == pytest.approx(raw / stored)
    assert result["ratio"]["whole"] > 2
    assert result["ratio"]["weights"] > 1
    assert result["ratio"]["optimizer"] > 1
    assert result["late_delta_ratio"]["weights"] > 1
    held_out = result["held_out"]
    assert held_out["change_percent"] == pytest.approx(100 * (held_out["run"] / held_out["baseline"] - 1))
    assert held_out["baseline"] < 4.5 < np.log(256)
    assert abs(held_out["change_percent"]) < 5
    assert [probe["step"] for probe in result["one_restore"]] == [step for step in SAVES if step >= 0.8 * STEPS]
    assert abs(result["one_restore_change_percent"]) < 5
    assert result["parameters"] == sum(p.numel() for p in model().parameters())


def test_saving_does_not_disturb_training(demo: Done) -> None:
    """Until the first restore the losses equal those of the baseline, bit for bit."""
    assert demo.result["equal_until"] >= demo.result["restores"][0]["resumed"]


def test_it_leaves_store_results_and_picture(demo: Done) -> None:
    files = demo.result["files"]
    assert sp.Store(files["store"]).steps() == SAVES
    written = json.loads(Path(files["results"]).read_text())
    lines = written.pop("curves")
    assert written == demo.result
    assert len(lines["run"]["lives"]) == 3
    assert len(lines["baseline"]["lives"]) == 1
    assert [step for step, _ in lines["baseline"]["lives"][0]] == list(range(1, STEPS + 1))
    picture = Path(files["picture"]).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    state = sp.Store(files["store"]).load()
    assert state["position"]["step"] == STEPS
    assert sorted(state) == ["model", "optimizer", "position", "rng", "scheduler"]


def test_plain_lines_where_there_is_no_terminal(demo: Done) -> None:
    assert "\x1b" not in demo.shown
    assert "\r" not in demo.shown
    lines = demo.shown.splitlines()
    assert sum(line.split()[:1] == ["12"] for line in lines) >= 1
    for name in ("weights", "optimizer state", "whole training state", "change against the baseline"):
        assert sum(name in line for line in lines) == 1


def test_exact_checkpoints_make_the_kills_invisible(demo: Done, tmp_path: Path) -> None:
    """With lossless checkpoints a killed run has the losses of the baseline, bit for bit."""
    threads = demo.result["machine"]["threads"]
    job = Job(STEPS, EVERY, 5, "tiny", threads, "lossless", str(tmp_path / "store"))
    history = supervise(job, tmp_path / "log", lambda _: None, Killer(1, STEPS, EVERY, seed=1))
    assert len(history.restores) == 1
    baseline = json.loads((demo.out / "results.json").read_text())["curves"]["baseline"]
    assert history.losses() == dict(baseline["lives"][0])
    assert history.final == demo.result["held_out"]["baseline"]


def test_a_failing_trainer_is_told_plainly(tmp_path: Path) -> None:
    job = Job(STEPS, EVERY, 0, "tiny", 1, "no-such-preset", str(tmp_path / "store"))
    with pytest.raises(DemoError, match=r"the trainer failed \(exit status 1\): KeyError: 'no-such-preset'; see .*log"):
        supervise(job, tmp_path / "log", lambda _: None)


def test_the_trainer_imports_nothing_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    job = Job(STEPS, EVERY, 0, "tiny", 1, "no-such-preset", str(tmp_path / "store"))
    with pytest.raises(DemoError, match="no-such-preset"):
        supervise(job, tmp_path / "log", lambda _: None)


# --- the command line ---


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--steps 1", "steps is 1; it must be at least 2"),
        ("--steps 10 --every 11", "every is 11; it must be between 1 and steps = 10"),
        ("--steps 10 --every 0", "every is 0; it must be between 1 and steps = 10"),
        ("--steps 10 --every 5 --kills 2", "kills is 2; it must be between 0 and 1"),
        ("--kills -1", "kills is -1"),
        ("--seed -1", "seed is -1"),
        ("--preset none", "preset is 'none'; it must be one of default, lossless"),
        ("--size huge", "size is 'huge'; it must be one of small, tiny"),
    ],
)
def test_wrong_usage_is_told_plainly(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = run_main(monkeypatch, capsys, "demo", *words.split(), "--out", str(tmp_path / "out"))
    assert code == 2
    assert error.startswith("shrinkpoint: ")
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_foreign_folder_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.txt").write_text("years of work")
    code, error = run_main(monkeypatch, capsys, "demo", "--out", str(tmp_path))
    assert code == 1
    assert "'store'" in error
    assert "Traceback" not in error
    assert [path.name for path in tmp_path.rglob("*")] == ["store", "thesis.txt"]


def test_help_is_quick() -> None:
    """`demo --help` imports neither torch nor Numba."""
    code = (
        "import sys, shrinkpoint.__main__ as m\nsys.argv = ['shrinkpoint', 'demo', '--help']\n"
        "try: m.main()\nexcept SystemExit: pass\nassert not {'torch', 'numba', 'rich.progress'} & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "--preset" in ran.stdout


# --- its parts ---


def test_folder_removes_only_what_a_demo_left(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    folder = Folder.fresh(root)
    folder.store.mkdir()
    (folder.store / "x").write_text("x")
    for path in (folder.log, folder.results, folder.picture):
        path.write_text("x")
    assert Folder.fresh(root) == folder
    assert [path.name for path in root.iterdir()] == [".shrinkpoint-demo"]
    (root / "notes.txt").write_text("mine")
    folder.results.write_text("x")
    with pytest.raises(DemoError, match=r"'notes\.txt'"):
        Folder.fresh(root)
    assert folder.results.exists()
    with pytest.raises(DemoError, match="is a file"):
        Folder.fresh(root / "notes.txt")


def test_a_linked_store_is_unlinked_not_emptied(tmp_path: Path) -> None:
    folder = Folder.fresh(tmp_path / "out")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "x").write_text("x")
    folder.store.symlink_to(elsewhere)
    Folder.fresh(tmp_path / "out")
    assert (elsewhere / "x").exists()
    assert not folder.store.exists()


def test_defaults() -> None:
    config = demo_config()
    assert 20 <= len(checkpoint_steps(config.steps, config.every)) <= 30
    assert next(iter(presets())) == "default"
    assert {"inshrinkerator", "lossless"} <= presets().keys()
    assert 3e6 <= sum(p.numel() for p in model("small").parameters()) <= 6e6


def model(size: str = "tiny") -> GPT:
    return GPT(SIZES[size].layers, SIZES[size].width, SIZES[size].heads, SIZES[size].context)


def test_the_model_sees_no_future() -> None:
    gpt = model().eval()
    tokens = torch.randint(256, (2, 64))
    changed = tokens.clone()
    changed[:, 40:] = torch.randint(256, (2, 24))
    with torch.no_grad():
        before, after = gpt(tokens), gpt(changed)
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_held_out_loss_leaves_model_and_generators_as_they_were() -> None:
    gpt = model()
    windows = torch.randint(256, (7, 65))
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first = held_out_loss(gpt, windows, batch=7)
    assert first == pytest.approx(held_out_loss(gpt, windows, batch=3), rel=1e-5)
    assert gpt.training
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)  # noqa: NPY002


def test_the_corpus_holds_files_out() -> None:
    one, two = Corpus(), Corpus()
    assert np.array_equal(one.train, two.train)
    assert np.array_equal(one.held_out, two.held_out)
    assert len(one.train) > 10 * len(one.held_out) > 1_000_000
    windows = one.held_out_windows(50, 32)
    assert windows.shape == (50, 33)
    assert torch.equal(windows, two.held_out_windows(50, 32))
    assert bytes(windows[7].to(torch.uint8).tolist()) in one.held_out.tobytes()


def test_a_python_without_sources_is_told_plainly(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("pass")
    with pytest.raises(DemoError, match="the source code of the standard library is missing"):
        Corpus(tmp_path)


def test_batches_resume_where_they_stood() -> None:
    text = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
    first, second = Batches(text, 8, 4, seed=3), Batches(text, 8, 4, seed=3)
    for _ in range(70):  # into the third epoch
        np.random.seed(1)  # noqa: NPY002
        expected = first.next()
        np.random.seed(1)  # noqa: NPY002
        assert torch.equal(second.next(), expected)
        fresh = Batches(text, 8, 4, seed=3)
        fresh.seek(json.loads(json.dumps(second.position())))
        second = fresh
    assert first.position()["epoch"] == 2


def test_an_epoch_visits_every_window_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np.random, "randint", lambda _: 0)
    text = np.repeat(np.arange(42, dtype=np.uint8), 8)
    batches = Batches(text, 8, 4, seed=0)
    seen = [int(row[0]) for _ in range(10) for row in batches.next()]
    assert sorted(seen) == list(range(40))
    again = [int(row[0]) for _ in range(10) for row in batches.next()]
    assert sorted(again) == list(range(40))
    assert again != seen


@given(st.integers(2, 200), st.data())
def test_kills_are_spread_and_one_hits_a_save(steps: int, data: st.DataObject) -> None:
    every = data.draw(st.integers(1, steps))
    saves = checkpoint_steps(steps, every)
    kills = data.draw(st.integers(0, min(6, len(saves) - 1)))
    killer = Killer(kills, steps, every, seed=data.draw(st.integers(0, 99)))
    fell: list[tuple[int, str]] = []
    for step in range(1, steps + 1):
        for name in ["step", "saving", "saved"] if step in saves else ["step"]:
            event = {"event": name, "step": step, "ms": 100.0}
            killer.learn(event, 0.01)
            delay = killer.delay(event)
            if delay is not None:
                assert 0 <= delay < 0.1
                fell.append((step, name))
                killer.done()
    assert len(fell) == kills
    assert sum(name == "saving" for _, name in fell) == min(1, kills)
    assert all(step < steps for step, _ in fell)


def test_a_blow_that_misses_the_save_is_tried_at_the_next_with_less_delay() -> None:
    killer = Killer(1, 100, 10, seed=0)
    delays = []
    for step in range(10, 101, 10):
        killer.learn({"event": "saved", "step": step, "ms": 1000.0}, 0.0)
        delay = killer.delay({"event": "saving", "step": step})
        if delay is not None:
            assert killer.aims_at_save
            delays.append(delay)
            killer.missed()
    assert delays[0] > 0.1
    assert delays[1] < 0.5
    assert delays[3:] == [0.0] * len(delays[3:])


def history(final: float = 2.0) -> History:
    made = History()
    made.add({"event": "start", "parameters": 7, "resumed": None, "warnings": [], "seconds": 0.0})
    for step in (1, 2, 3):
        made.add({"event": "step", "step": step, "loss": 4.0 - step})
    parts = {"weights": [10, 2], "optimizer": [20, 10], "rest": [2, 2]}
    made.add({"event": "saved", "step": 2, "delta": False, "raw": 32, "stored": 16, "ms": 5.0, "parts": parts})
    made.add({"event": "reading", "step": 2, "loss": 2.5})
    made.add({"event": "saving", "step": 3})
    made.add({"event": "killed", "at": made.last_step(), "during": "save"})
    made.add({"event": "start", "parameters": 7, "resumed": 2, "warnings": ["weight"], "seconds": 0.5})
    assert made.last_step() == 2
    made.add({"event": "step", "step": 3, "loss": 1.5})
    made.add({"event": "final", "step": 3, "loss": final})
    return made


def test_history_and_summary() -> None:
    made = history()
    assert made.losses() == {1: 3.0, 2: 2.0, 3: 1.5}
    assert made.restores == [{"at": 3, "during": "save", "resumed": 2, "warnings": ["weight"], "seconds": 0.5}]
    baseline = history(final=1.6)
    baseline.lives[1] = [(3, 9.0)]
    result = summarize(demo_config(steps=3, every=1), made, baseline)
    assert result["ratio"] == {"weights": 5.0, "optimizer": 2.0, "whole": 2.0}
    assert result["late_delta_ratio"] == {"weights": None, "optimizer": None, "whole": None}
    assert result["held_out"]["change_percent"] == pytest.approx(25.0)
    assert result["equal_until"] == 2
    assert result["one_restore_change_percent"] is None
    assert result["commit"] == commit()
    assert set(result["versions"]) == {"python", "shrinkpoint", "torch", "numpy", "numba"}
    assert "out" not in result["config"]  # where it was written to is nobody's business
    assert len(tables(json.loads(json.dumps(result)))) == 2


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert not draw({}, {}, tmp_path / "x.png")
    assert not list(tmp_path.iterdir())
