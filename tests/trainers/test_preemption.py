"""Preemption of real processes: signals to ranks and groups, torchrun, grace periods."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch import nn

import shrinkpoint as sp
from shrinkpoint import trainers
from shrinkpoint.trainers.preemption import Choice, Preempted, choose
from shrinkpoint.trainers.save_timing import Running, SaveTiming

from ..forking import Script
from .preempted_run import main

PATIENCE = 120.0
"""Seconds until a run must have got there."""
RUN = Path(__file__).with_name("preempted_run.py")


def timing(deltas: tuple[float, ...] = (), bases: tuple[float, ...] = (), durable: int | None = None) -> SaveTiming:
    found = SaveTiming(durable=durable)
    found.deltas.extend(deltas)
    found.bases.extend(bases)
    return found


def running(step: int, elapsed: float) -> Running:
    return Running(step, time.monotonic() - elapsed, Future())


@pytest.mark.parametrize(
    ("measured", "flight", "is_delta", "left", "what"),
    [
        (timing(), None, None, 0.1, "save"),  # nothing is known, and nothing can be damaged
        (timing((1.0, 0.2)), None, True, 1.6, "save"),
        (timing((1.0, 0.2)), None, True, 1.4, "last"),
        (timing((0.1,), (2.0,)), None, True, 1.0, "save"),  # a delta fits
        (timing((0.1,), (2.0,)), None, False, 1.0, "last"),  # the base that is due does not
        (timing((0.1,), (2.0,)), None, None, 1.0, "last"),
        (timing((1.0,)), (15, 1.0), True, 1.9, "running"),  # 0.5 s more for it, 1.5 s for a new one
        (timing((1.0,)), (15, 1.0), True, 2.2, "save"),
        (timing((1.0,)), (15, 0.0), True, 0.3, "last"),
        (timing((1.0,)), (20, 0.0), True, 0.3, "running"),  # this very state is being saved
        (timing((1.0,), durable=20), None, True, 30.0, "last"),  # and here it is durable
        (timing((1.0,)), None, True, -1.0, "last"),
    ],
)
def test_what_is_surely_durable_in_time(
    measured: SaveTiming, flight: tuple[int, float] | None, is_delta: bool | None, left: float, what: str
) -> None:
    measured.running = None if flight is None else running(*flight)
    found = choose(measured, 20, left, (is_delta, is_delta))
    assert isinstance(found, Choice)
    assert found.what == what, found.why


def test_saves_are_measured(tmp_path: Path) -> None:
    from shrinkpoint.trainers.save_timing import timing_of

    store, model = sp.Store(tmp_path), nn.Linear(64, 64)
    with sp.Saver(store, mode="thread") as saver:
        for step in (1, 2):
            future = trainers.save(saver, step, model)
            assert future is not None
            future.result()  # type: ignore[union-attr]
    found = timing_of(str(tmp_path))
    assert (len(found.bases), len(found.deltas), found.durable, found.running) == (1, 1, 2, None)
    found.add(3, False, 9.0)
    found.add(4, False, 8.0)
    assert list(found.bases) == [9.0, 8.0]  # the first, which also loads kernels, does not count any more
    trainers.save(sp.Store(tmp_path / "other"), 7, model)
    assert timing_of(str(tmp_path / "other")).durable == 7


def test_one_line_saves_and_exits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, model = sp.Store(tmp_path), nn.Linear(4, 4)
    before = signal.getsignal(signal.SIGUSR2)
    with trainers.Preemption(("SIGUSR2",), code=7) as preemption:
        preemption.check(store, 3, model)
        assert store.steps() == []
        os.kill(os.getpid(), signal.SIGUSR2)
        assert preemption.requested
        with pytest.raises(Preempted) as ended:
            preemption.check(store, 4, model)
    assert (ended.value.code, ended.value.step) == (7, 4)
    assert store.steps() == [4]
    assert "preempted by SIGUSR2 after 4 steps: step 4 was saved and is durable" in caplog.text
    assert signal.getsignal(signal.SIGUSR2) is before


def test_a_failed_save_before_it_does_not_prevent_the_last_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    with trainers.Preemption(("SIGUSR2",)) as preemption, sp.Saver(sp.Store(tmp_path), mode="thread") as saver:
        monkeypatch.setattr(saver, "wait", _failing_once(saver))
        os.kill(os.getpid(), signal.SIGUSR2)
        with pytest.raises(Preempted):
            preemption.check(saver, 4, model)
    assert "an earlier save failed: OSError: disk" in caplog.text
    assert sp.Store(tmp_path).steps() == [4]


def _failing_once(saver: sp.Saver) -> object:
    wait, failed = saver.wait, []

    def waiting(timeout: float | None = None) -> object:
        if not failed:
            failed.append(True)
            raise OSError("disk")
        return wait(timeout)

    return waiting


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"signals": ("SIGNONE",)}, "signals: 'SIGNONE' is not a signal"),
        ({"grace": 0}, "grace is 0"),
        ({"code": 256}, "code is 256"),
        ({"every": 0}, "every is 0"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], why: str) -> None:
    with pytest.raises(sp.BadArgumentError, match=why):
        trainers.Preemption(**arguments)  # type: ignore[arg-type]


def test_another_thread_is_refused() -> None:
    raised: list[BaseException] = []

    def make() -> None:
        try:
            trainers.Preemption()
        except sp.BadArgumentError as e:
            raised.append(e)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


def test_a_forked_worker_lives_through_the_signal_for_the_grace() -> None:
    with trainers.Preemption(("SIGUSR2",), grace=0.5):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        begin = time.monotonic()
        time.sleep(0.1)
        os.kill(child, signal.SIGUSR2)
        _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGALRM
    assert 0.4 < time.monotonic() - begin < 10


# ---- real processes


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with Script(RUN) as found:
        yield found


def steps_of(log: Path) -> list[str]:
    """Return steps and losses of a run."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.rsplit(" ", 1)[0] for line in lines if not line.startswith("begin") and line.count(" ") == 2]


def wait_for(log: Path, steps: int) -> None:
    end = time.monotonic() + PATIENCE
    while len(steps_of(log)) < steps:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "to_group"), [("saver", False), ("saver", True), ("store", True)])
def test_a_terminated_run_loses_no_step(script: Script, tmp_path: Path, how: str, to_group: bool) -> None:
    folder, log = tmp_path / "a", tmp_path / "log"
    run = script.start(folder, log, 5, 32, 10**6, how)
    wait_for(Path(f"{log}.0"), 22)  # the first save alone takes long: its worker loads kernels
    kill = os.killpg if to_group else os.kill
    kill(run._pid, signal.SIGTERM)
    assert run.wait() == 75, run.trouble
    done = len(steps_of(Path(f"{log}.0")))
    assert sp.Store(folder).steps()[-1] == done
    assert f"preempted by SIGTERM after {done} steps" in run.trouble
    assert "durable" in run.trouble
    main(str(folder), str(log), 5, 32, done + 5, "store")
    main(str(tmp_path / "whole"), str(tmp_path / "whole.log"), 5, 32, done + 5, "store")
    assert steps_of(Path(f"{log}.0")) == steps_of(tmp_path / "whole.log.0")


@pytest.mark.slow
def test_a_grace_too_short_for_a_save_keeps_the_last_durable_step(script: Script, tmp_path: Path) -> None:
    folder, log = tmp_path / "a", tmp_path / "log"
    run = script.start(folder, log, 0.2, 2400, 10**6, "store")
    wait_for(Path(f"{log}.0"), 12)
    os.kill(run._pid, signal.SIGTERM)
    assert run.wait() == 75, run.trouble
    kept = sp.Store(folder).steps()
    done = len(steps_of(Path(f"{log}.0")))
    # A delta of 5.8 million parameters with their moments takes more than 0.13 s; it is exact, so nothing is smaller.
    assert kept[-1] % 5 == 0
    assert (done in kept) == (done % 5 == 0)
    assert f"number {kept[-1]} is the newest durable one" in run.trouble
    assert "no save was begun" in run.trouble


@pytest.mark.slow
def test_torchrun_restarts_what_a_signal_to_one_rank_ended(tmp_path: Path) -> None:
    """torchrun restarts after a signal to one rank; a signal to the group ends it."""
    folder, log = tmp_path / "a", tmp_path / "log"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--max-restarts=1", str(RUN), str(folder), str(log)]
    # Else gloo of torch 2.13 connects to the addresses of the first life, which the store of the agent still has.
    own = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command += ["60", "32", "1000000"]
    with subprocess.Popen(command, env=own, start_new_session=True, stderr=subprocess.PIPE) as run:
        try:
            wait_for(Path(f"{log}.0"), 22)
            second = int(Path(f"{log}.1").read_text().split()[1])
            os.kill(second, signal.SIGTERM)
            end = time.monotonic() + PATIENCE
            while (begins := _begins(f"{log}.0")) != 2:
                assert time.monotonic() < end, begins
                time.sleep(0.05)
            stopped = int(_lines(f"{log}.0", "begin")[1].split()[2])
            assert stopped >= 22
            wait_for(Path(f"{log}.0"), stopped + 18)
            os.killpg(run.pid, signal.SIGTERM)
            _, errors = run.communicate(timeout=PATIENCE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    text = errors.decode()
    assert run.returncode != 0
    assert f"preempted by a signal to another process after {stopped} steps" in text
    # Each rank has done every step once, in both lives.
    ranks = [[line.split()[0] for line in steps_of(Path(f"{log}.{rank}"))] for rank in (0, 1)]
    assert ranks[0] == ranks[1] == [str(n + 1) for n in range(len(ranks[0]))]
    assert sp.Store(folder).steps()[-1] == len(ranks[0])


def _lines(path: str, start: str) -> list[str]:
    return [line for line in Path(path).read_text().splitlines() if line.startswith(start)]


def _begins(path: str) -> int:
    return len(_lines(path, "begin"))


def test_the_agreement_needs_no_group_where_there_is_one_process() -> None:
    with trainers.Preemption(("SIGUSR2",), grace=9) as preemption:
        assert preemption.agreed() is None
        os.kill(os.getpid(), signal.SIGUSR2)
        left = preemption.agreed()
    assert left is not None
    assert 8 < left <= 9
    assert not torch.distributed.is_initialized()
