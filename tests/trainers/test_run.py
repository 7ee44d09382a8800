"""`sp.Run`: killed, stopped and resumed runs equal runs without an interruption."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import shrinkpoint as sp
from shrinkpoint import trainers

from ..forking import PATIENCE, Script
from .killing import run_and_kill
from .run_run import main

RUN = Path(__file__).with_name("run_run.py")


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with Script(RUN) as found:
        yield found


def losses(path: Path) -> list[str]:
    """Return the lines by step, after a check that repeated ones are equal."""
    found: dict[int, str] = {}
    for line in path.read_text().splitlines():
        if line.endswith("]") and not line.startswith("begin"):
            assert found.setdefault(int(line.split()[0]), line) == line
    return [found[step] for step in sorted(found)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the losses of a run that was not interrupted: 12 epochs of 5 optimizer steps."""
    home = tmp_path_factory.mktemp("whole")
    main(str(home / "run"), str(home / "log"), 12, 1000)
    found = losses(home / "log.0")
    assert len(found) == 60
    return found


def at(log: Path, steps: int) -> bool:
    return log.exists() and len(losses(log)) >= steps


@pytest.mark.parametrize("steps", [1, 9, 23])
def test_a_killed_run_ends_as_one_that_was_not(tmp_path: Path, script: Script, whole: list[str], steps: int) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    run_and_kill(script, folder, log, 12, 4, once=lambda: at(Path(f"{log}.0"), steps))
    run = script.start(folder, log, 12, 4)
    assert run.wait() == 0, run.trouble
    assert losses(Path(f"{log}.0")) == whole
    assert sp.Store(folder).steps()[-1] == 60


def test_a_run_that_is_told_to_stop_loses_no_step(tmp_path: Path, script: Script, whole: list[str]) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    run = script.start(folder, log, 100_000, 1000)
    while not at(Path(f"{log}.0"), 8):
        assert run.code is None, run.trouble
        time.sleep(0.01)
    os.kill(run._pid, signal.SIGTERM)
    assert run.wait() == 75, run.trouble
    done = len(losses(Path(f"{log}.0")))
    assert sp.Store(folder).steps() == [done]
    again = script.start(folder, log, max(12, done // 5 + 2), 1000)
    assert again.wait() == 0, again.trouble
    lines = Path(f"{log}.0").read_text().splitlines()
    assert [line.split()[2] for line in lines if line.startswith("begin")] == ["0", str(done)]
    assert len([line for line in lines if not line.startswith("begin")]) == len(losses(Path(f"{log}.0")))
    assert losses(Path(f"{log}.0"))[:60] == whole


@pytest.mark.slow
def test_two_ranks_stop_and_go_on_together(tmp_path: Path) -> None:
    """A signal to one rank under torchrun stops both at one step; the restarted ranks repeat nothing."""
    folder, log = tmp_path / "run", tmp_path / "log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += [str(RUN), str(folder), str(log), "40", "7"]
    own = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=own, start_new_session=True, stderr=subprocess.PIPE) as run:
        try:
            end = time.monotonic() + PATIENCE
            while not at(Path(f"{log}.1"), 9):
                assert run.poll() is None
                assert time.monotonic() < end
                time.sleep(0.02)
            os.kill(int(Path(f"{log}.1").read_text().split()[1]), signal.SIGTERM)
            _, errors = run.communicate(timeout=PATIENCE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 0, errors.decode()[-3000:]
    # 37 samples are 19 a rank: 5 batches an epoch, which are not an even number, so 2.5 steps.
    main_steps = 40 * 5 // 2
    begins = []
    for rank in (0, 1):
        lines = Path(f"{log}.{rank}").read_text().splitlines()
        begins.append([line.split()[2] for line in lines if line.startswith("begin")])
        steps = [int(line.split()[0]) for line in lines if not line.startswith("begin")]
        assert steps == list(range(1, len(steps) + 1))
        assert abs(len(steps) - main_steps) <= 1
    assert begins[0] == begins[1]
    assert len(begins[0]) == 2
    assert int(begins[0][1]) >= 9


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 4)
    return model, torch.optim.AdamW(model.parameters())


@contextlib.contextmanager
def begun(folder: Path, **more: Any) -> Iterator[sp.Run]:
    """Enter a run that saves in a thread, which starts faster than a process."""
    with sp.Saver(sp.Store(folder), mode="thread") as saver, sp.Run(saver, *small(), **more) as run:
        yield run


def test_a_loop_without_data_counts_and_saves(tmp_path: Path) -> None:
    with begun(tmp_path, every=3) as run:
        while run.steps < 7:
            run.step()
        assert run.save() is not None
    assert sp.Store(tmp_path).steps() == [3, 6, 7]
    with begun(tmp_path, every=None) as run:
        assert run.steps == 7
    assert sp.Store(tmp_path).steps() == [3, 6, 7]


def test_the_loss_is_read_only_when_a_save_is_due(tmp_path: Path) -> None:
    class Loss:
        reads = 0

        def __float__(self) -> float:
            Loss.reads += 1
            return 0.5

    with begun(tmp_path, every=4, preemption=False) as run:
        for _ in range(8):
            run.step(loss=Loss())
    assert Loss.reads == 2
    assert [sp.Store(tmp_path).describe(step).metric for step in (4, 8)] == [0.5, 0.5]


def test_a_loss_that_is_no_number_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with begun(tmp_path, every=1, preemption=False) as run:
        run.step(loss=torch.tensor(float("nan")))
    assert sp.Store(tmp_path).steps() == [1]
    assert "step 1: the loss is nan; it is not recorded" in caplog.text


def test_an_error_in_the_loop_saves_nothing_more(tmp_path: Path) -> None:
    def fails() -> None:
        with begun(tmp_path, every=2) as run:
            for _ in range(5):
                run.step()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert sp.Store(tmp_path).steps() == [2, 4]
    with begun(tmp_path) as run:
        assert run.steps == 4


def test_signals_are_handled_only_inside(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with begun(tmp_path) as run:
        assert signal.getsignal(signal.SIGTERM) is not before
        run.step()
    assert signal.getsignal(signal.SIGTERM) is before
    with begun(tmp_path, preemption=False):
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_run_that_cannot_resume_leaves_nothing_open(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with begun(tmp_path, every=1) as run:
        run.step()
    other = nn.Linear(3, 3)
    run = sp.Run(tmp_path, other, torch.optim.AdamW(other.parameters()))
    with pytest.raises(sp.BadArgumentError, match="does not fit"), run:
        pass
    assert signal.getsignal(signal.SIGTERM) is before
    assert run.saver.pid is None


def test_a_saver_with_settings_of_its_own_stays_open(tmp_path: Path) -> None:
    with sp.Saver(sp.Store(tmp_path, "lossless"), keep=sp.Retention(last=2)) as saver:
        with sp.Run(saver, *small(), every=1) as run:
            for _ in range(5):
                run.step()
        saver.save(9, {"x": torch.ones(3)}).result()
    assert sp.Store(tmp_path).steps()[-2:] == [5, 9]


def test_a_compiled_model_resumes_a_plain_one(tmp_path: Path) -> None:
    with begun(tmp_path, every=1) as run:
        run.step()
    model, optimizer = small()
    compiled: Any = torch.compile(model, backend="eager")
    with sp.Saver(sp.Store(tmp_path), mode="thread") as saver, sp.Run(saver, compiled, optimizer) as again:
        assert again.steps == 1


class Positioned:
    """A loader with a position, as torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 5:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("make", [lambda: list(range(1, 6)), Positioned, lambda: DataLoader(range(1, 6), batch_size=1)])
@pytest.mark.parametrize(("every", "stop"), [*((1, stop) for stop in (1, 3, 5, 7, 10)), (None, 3)])
def test_a_resumed_epoch_repeats_no_batch(tmp_path: Path, make: Any, every: int | None, stop: int) -> None:
    seen: list[int] = []
    for most in (stop, 1000):
        with begun(tmp_path, data=make(), every=every, preemption=False) as run:
            for batch in run.batches(epochs=3):
                seen.append(int(batch))
                run.step()
                if len(seen) == most:
                    break
    assert seen == [1, 2, 3, 4, 5] * 3
    assert run.epoch == 3


def test_an_epoch_left_early_counts_once(tmp_path: Path) -> None:
    epochs = 0
    with begun(tmp_path, data=[1, 2, 3, 4, 5], every=None, preemption=False) as run:
        while epochs < 9:
            seen = 0
            for _ in run.batches(epochs=3):
                seen += 1
                if seen == 3:
                    break
            if not seen:
                break
            epochs += 1
    assert (epochs, run.epoch) == (3, 3)


def test_a_position_of_another_kind_of_loader_is_refused(tmp_path: Path) -> None:
    with begun(tmp_path, data=[1, 2, 3], every=1, preemption=False) as run:
        for _ in run.batches(epochs=1):
            run.step()
    with pytest.raises(sp.BadArgumentError, match="position"):
        sp.Run(tmp_path, *small(), data=Positioned()).__enter__()


def test_wrong_use_is_said(tmp_path: Path) -> None:
    model, optimizer = small()
    run = sp.Run(tmp_path, model, optimizer, preemption=False)
    with pytest.raises(sp.BadArgumentError, match="this run was not entered"):
        run.step()
    with run:
        with pytest.raises(sp.BadArgumentError, match="this run has no data"):
            next(run.batches(epochs=1))
        with pytest.raises(sp.BadArgumentError, match="epochs"):
            next(run.batches(epochs=-1))
    with pytest.raises(sp.BadArgumentError, match="entered before"):
        run.__enter__()
    state = trainers.TrainingState(model, optimizer, loader=trainers.Loader([1]))
    for message, call in {
        "every is 0": lambda: sp.Run(tmp_path, model, optimizer, every=0),
        "did you mean 'lossless'": lambda: sp.Run(tmp_path, model, optimizer, level="losless"),
        "give level= only with a folder": lambda: sp.Run(sp.Store(tmp_path), model, optimizer, level="lossless"),
        "both given": lambda: sp.Run(tmp_path, state, data=[1]),
        "is a TrainingState": lambda: sp.Run(tmp_path, state, optimizer),
        "preemption must be": lambda: sp.Run(tmp_path, model, optimizer, preemption="SIGTERM"),  # type: ignore[arg-type]
        "model must be": lambda: sp.Run(tmp_path, optimizer, optimizer),  # type: ignore[arg-type]
    }.items():
        with pytest.raises(sp.BadArgumentError, match=message):
            call()
