"""Maintenance between saves: compaction and collection, stopped by the next save."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import sys
import threading
import uuid
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shrinkpoint as sp
from shrinkpoint.codec.parallel import Stopped, give_way, map_chunks
from shrinkpoint.store import chain
from shrinkpoint.store.compaction import Compaction
from shrinkpoint.store.retention import Retention
from shrinkpoint.store.saver import executors
from shrinkpoint.store.saver.executors import Maintainer, Maintenance
from shrinkpoint.store.saver.saver import SaverWarning

from .common import lossless, manifest_path, same, state

posix = pytest.mark.skipif(os.name != "posix", reason="a worker process needs POSIX")
MODES = pytest.mark.parametrize("mode", [pytest.param("process", marks=posix), "thread"])
PATIENCE = 300.0
"""Seconds for what takes one or two where nothing else runs."""
MOMENTS = 50
"""Questions whether to stop, until the answer is yes: enough for a part of a compaction."""


def tended(saver: sp.Saver) -> None:
    """Wait until the maintenance after the newest save is done."""
    assert saver._runner is not None
    assert saver._runner.maintaining is not None
    saver._runner.maintaining.result(PATIENCE)


def save(saver: sp.Saver, step: int) -> sp.SaveResult:
    return saver.save(step, state(step)).result(PATIENCE)


@MODES
def test_chains_stay_short_and_nothing_is_left_over(mode: str, tmp_path: Path) -> None:
    store, plain = sp.Store(tmp_path / "run", lossless()), sp.Store(tmp_path / "plain", lossless())
    costs = []
    with sp.Saver(store, mode=mode, compact=5.0) as saver:
        for step in range(14):
            assert save(saver, step).is_delta == (step > 0)
            plain.save(step, state(step))
            tended(saver)
            assert store.describe(step).identity == plain.describe(step).identity
            costs.append(max(store.describe(s).restore_cost for s in store.steps()))
    # It is left alone until a step costs more, then all are brought down.
    assert costs[:5] == pytest.approx([1, 2, 3, 4, 5], rel=0.2)
    assert min(costs[4:]) <= 2.5
    assert max(costs) <= 5.0
    assert sp.Store(tmp_path / "run").verify() == {}
    assert all(same(store.load(step), step) for step in store.steps())
    assert store.steps() == list(range(14))
    assert store.gc() == []


@MODES
def test_old_steps_go(mode: str, tmp_path: Path) -> None:
    store = sp.Store(tmp_path, lossless())
    store.save(0, state(0))
    store.pin(0)
    with sp.Saver(store, mode=mode, keep=Retention(last=2, every=4)) as saver:
        for step in range(1, 8):
            save(saver, step)
            tended(saver)
            assert store.steps() == sorted({0, *range(4, step + 1, 4), *range(max(0, step - 1), step + 1)})
    assert store.verify() == {}
    assert all(same(store.load(step), step) for step in store.steps())


def test_bases_of_old_chains_go_once_nothing_needs_them() -> None:
    """Old bases are removed when no chain needs them."""
    for against in ("previous", "base"):
        store = sp.Store(f"memory://{uuid.uuid4()}", lossless(against=against, base_every=4))
        with sp.Saver(store, compact=2.0, keep=Retention(last=1)) as saver:
            for step in range(10):
                save(saver, step)
                tended(saver)
        assert store.steps() == [9]
        assert len(store._files.list("data")) == len(store.describe(9).chain) == 2


def test_others_that_write_are_not_waited_for(tmp_path: Path) -> None:
    store = sp.Store(tmp_path, lossless())
    with sp.Saver(store, mode="thread", keep=Retention(last=1)) as saver:
        with store._lock.shared():
            for step in range(3):
                save(saver, step)
                tended(saver)
            assert store.steps() == [0, 1, 2]
        save(saver, 3)
        tended(saver)
        assert store.steps() == [3]


def test_what_was_given_up_is_done_after_the_next_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maintenance that was stopped at any point is completed after a later save."""
    url = f"memory://{uuid.uuid4()}"
    store = sp.Store(url, lossless())
    for step in range(9):
        store.save(step, state(step))
    maintainer = Maintainer(store, Maintenance(compact=4.0))
    for moments in range(200):
        asked = 0

        def stop(most: int = moments) -> bool:
            nonlocal asked
            asked += 1
            return asked > most

        maintainer.run(stop, alone=True)
        assert sp.Store(url).verify() == {}
        assert all(same(sp.Store(url).load(step, count=False), step) for step in (0, 5, 8))
        if asked <= moments:
            break
    else:
        raise AssertionError("it never came to an end")
    assert moments > 5
    assert max(store.describe(step).restore_cost for step in store.steps()) <= 2.5
    assert store.gc() == []
    # There is nothing to do any more.
    with monkeypatch.context() as patch:
        patch.setattr(Compaction, "run", lambda self: pytest.fail("compacted again"))
        store.save(9, state(9))
        maintainer.run(lambda: False, alone=True)


ENDLESS = """
import time
from pathlib import Path
from shrinkpoint.codec.parallel import map_chunks
from shrinkpoint.store.compaction import Compaction

log = Path({log!r})

def run(self):
    log.write_text(log.read_text() + "begun ")
    try:
        while True:
            map_chunks(time.sleep, [0.001])
    finally:
        log.write_text(log.read_text() + "ended ")

Compaction.run = run
"""


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Make compaction in the worker endless; return its log."""
    site, log = tmp_path / "site", tmp_path / "log"
    site.mkdir()
    (site / "sitecustomize.py").write_text(ENDLESS.format(log=str(log)))
    monkeypatch.syspath_prepend(site)
    log.touch()
    return lambda: log.read_text().split()


def begun(said: Callable[[], list[str]], times: int) -> None:
    """Wait until it has begun `times` times."""
    for _ in range(int(PATIENCE * 100)):
        if said().count("begun") >= times:
            return
        threading.Event().wait(0.01)
    raise AssertionError(said())


@posix
def test_a_save_does_not_wait_for_it(tmp_path: Path, endless: Callable[[], list[str]]) -> None:
    store = sp.Store(tmp_path / "run", lossless())
    with sp.Saver(store, compact=1.0) as saver:
        for step in range(1, 5):
            # The first delta is over the bound.
            assert save(saver, step).status == "saved"
            begun(endless, step - 1)
        assert not saver.busy
        assert saver.wait() is saver.last
    # Nor does the end of the run.
    assert endless() == ["begun", "ended"] * 3
    assert store.steps() == [1, 2, 3, 4]
    assert store.verify() == {}


@posix
def test_a_worker_killed_in_the_middle_of_it(tmp_path: Path, endless: Callable[[], list[str]]) -> None:
    store = sp.Store(tmp_path / "run", lossless())
    with sp.Saver(store, compact=1.0) as saver:
        save(saver, 1)
        save(saver, 2)
        begun(endless, 1)
        assert saver.pid is not None
        os.kill(saver.pid, signal.SIGKILL)
        tended(saver)
        with pytest.raises(ChildProcessError, match="killed by SIGKILL") as error:
            saver.save(3, state(3))
        assert any("continues the chain" in note for note in error.value.__notes__)
        assert save(saver, 3).is_delta
    assert endless()[0] == "begun"
    assert store.steps() == [1, 2, 3]
    assert store.verify() == {}


@posix
def test_a_trainer_that_is_gone_ends_it(tmp_path: Path, endless: Callable[[], list[str]]) -> None:
    """The end of the trainer ends maintenance, even with a forked child alive."""
    import subprocess

    code = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[2])
import shrinkpoint as sp
from tests.store.common import lossless, state
saver = sp.Saver(sp.Store(sys.argv[1], lossless()), compact=1.0)
for step in (1, 2):
    saver.save(step, state(step)).result()
print(saver.pid, flush=True)
while "begun" not in open(sys.argv[3]).read():
    time.sleep(0.01)
child = os.fork()
if child == 0:
    os.close(1); os.close(2)
    time.sleep(3600)
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run"), str(tmp_path / "site"), str(tmp_path / "log")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=2 * PATIENCE, check=False)
    assert done.returncode == -signal.SIGKILL
    _, child = map(int, done.stdout.split())
    try:
        for _ in range(int(PATIENCE * 100)):
            if endless() == ["begun", "ended"]:
                break
            threading.Event().wait(0.01)
        assert endless() == ["begun", "ended"]
    finally:
        os.kill(child, signal.SIGKILL)


def test_in_a_thread_a_save_does_not_wait_either(monkeypatch: pytest.MonkeyPatch) -> None:
    running, ended = threading.Event(), 0

    def run(self: Any) -> list[int]:
        nonlocal ended
        running.set()
        try:
            while True:
                map_chunks(threading.Event().wait, [0.001])
        except Stopped:
            ended += 1
            raise

    monkeypatch.setattr(Compaction, "run", run)
    store = sp.Store(f"memory://{uuid.uuid4()}", lossless())
    with sp.Saver(store, compact=1.0) as saver:
        save(saver, 0)
        for step in range(1, 4):
            save(saver, step)
            assert running.wait(PATIENCE)
            running.clear()
    assert ended == 3
    assert store.verify() == {}


@MODES
def test_what_goes_wrong_is_told_and_no_save_is_refused_for_it(mode: str, tmp_path: Path) -> None:
    """An unreadable manifest stops removal with a warning, and saves succeed."""
    store = sp.Store(tmp_path, lossless())
    with sp.Saver(store, mode=mode, keep=Retention(last=1)) as saver:
        save(saver, 0)
        save(saver, 1)
        tended(saver)
        broken = manifest_path(tmp_path, 1)
        whole = broken.read_bytes()
        for step in range(2, 8):
            # Reported once, and again after a success in between.
            broken.write_bytes(whole if step == 5 else whole[:-1])
            assert save(saver, step).status == "saved"
            tended(saver)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                saver.wait()
            assert [w.category for w in told] == [SaverWarning] * (step in (2, 6))
            assert all("could not be done: CorruptDataError: " in str(w.message) for w in told)
            assert all("that step 1 needs" in str(w.message) for w in told)
            assert store.steps() == ([5] if step == 5 else store.steps())
        assert store.steps() == [1, 5, 6, 7]
    assert same(store.load(), 7)


@posix
def test_what_is_no_error_is_a_warning(tmp_path: Path) -> None:
    store = sp.Store(tmp_path, lossless(base_every=3))
    with sp.Saver(store, compact=2.5) as saver:
        for step in range(2):
            save(saver, step)
        old = store.describe(1)
        path = tmp_path / "data" / old.file
        path.write_bytes(path.read_bytes()[:-1])
        save(saver, 2)
        tended(saver)
        with pytest.warns(SaverWarning, match="after step 2: NotCompactedWarning: .*steps 1, 2 not intact"):
            saver.wait()
    assert store.describe(1) == old


def test_a_skipped_or_failed_save_is_followed_by_nothing(tmp_path: Path) -> None:
    needs_gradients = sp.presets.inshrinkerator(prune=0.3, prune_metric="sensitivity")
    with sp.Saver(sp.Store(tmp_path, lossless()), mode="thread", keep=Retention()) as saver:
        with pytest.raises(sp.BadArgumentError):
            saver.save(1, {"weight": np.zeros((64, 64), np.float32)}, cfg=needs_gradients).result(PATIENCE)
        with pytest.raises(sp.BadArgumentError):
            saver.wait()
        assert saver._runner is not None
        assert saver._runner.maintaining is None


def test_without_being_asked_nothing_is_done(tmp_path: Path) -> None:
    with sp.Saver(sp.Store(tmp_path, lossless()), mode="thread") as saver:
        for step in range(4):
            save(saver, step)
        assert saver._runner is not None
        assert saver._runner.maintaining is None
    assert sp.Store(tmp_path).describe(3).restore_cost > 3


@pytest.mark.parametrize("bad", [{"compact": 0.5}, {"compact": "2"}, {"compact": float("nan")}, {"keep": 3}])
def test_arguments_that_are_none(bad: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(sp.BadArgumentError, match=next(iter(bad))):
        sp.Saver(sp.Store(tmp_path), **bad)


@pytest.mark.parametrize(
    "upkeep", [Maintenance(), Maintenance(3.0), Maintenance(keep=Retention(2, every=5, best=1, largest=True))]
)
def test_it_crosses_to_the_worker_as_json(upkeep: Maintenance) -> None:
    assert Maintenance.from_json(json.loads(json.dumps(asdict(upkeep)))) == upkeep
    assert bool(upkeep) == (upkeep != Maintenance())


def test_futures_of_callers_are_done_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save's future is done before the maintenance after it."""
    going, go = threading.Event(), threading.Event()

    def run(self: Any) -> list[int]:
        going.set()
        go.wait()
        return []

    monkeypatch.setattr(Compaction, "run", run)
    with sp.Saver(sp.Store(f"memory://{uuid.uuid4()}", lossless()), compact=1.0) as saver:
        save(saver, 0)
        future = saver.save(1, state(1))
        assert going.wait(PATIENCE)
        assert concurrent.futures.wait([future], PATIENCE).done
        assert saver.wait() is not None
        go.set()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the data files that are read while a step is resolved."""
    seen: list[str] = []
    plain = chain.read

    def read(files: Any, step: int, name: str, *rest: Any) -> Any:
        seen.append(name)
        return plain(files, step, name, *rest)

    monkeypatch.setattr(chain, "read", read)
    return seen


def test_what_is_within_the_bound_is_not_read_again(reads: list[str]) -> None:
    """On an endless chain each compaction costs the same."""
    store = sp.Store(f"memory://{uuid.uuid4()}", lossless())
    maintainer, costs = Maintainer(store, Maintenance(compact=6.0)), []
    for step in range(60):
        store.save(step, state(step))
        reads.clear()
        maintainer.run(lambda: False, alone=True)
        if reads:
            costs.append(len(reads))
    assert len(costs) > 8
    assert max(costs) <= 10
    assert max(store.describe(step).restore_cost for step in store.steps()) <= 6.0
    assert store.verify() == {}
    assert all(same(store.load(step, count=False), step) for step in store.steps())
    assert store.gc() == []


def tend_for(maintainer: Maintainer, moments: int) -> None:
    """Run maintenance until its stop function was called `moments` times."""
    asked = 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked > moments

    maintainer.run(stop, alone=True)


def test_it_goes_on_where_it_was_cut_off() -> None:
    """Maintenance continues where it was stopped, so chains stay bounded."""
    store = sp.Store(f"memory://{uuid.uuid4()}", lossless())
    maintainer, costs = Maintainer(store, Maintenance(compact=6.0)), []
    for step in range(80):
        store.save(step, state(step))
        # Another process each time: nothing rests on what one remembers.
        if step % 7 == 0:
            maintainer = Maintainer(store, Maintenance(compact=6.0))
        tend_for(maintainer, MOMENTS)
        costs.append(store.describe(step).restore_cost)
    assert max(costs) <= 12.0
    assert store.verify() == {}
    assert all(same(store.load(step, count=False), step) for step in store.steps())


def test_old_steps_go_though_compaction_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: Any) -> list[int]:
        while True:
            give_way()

    monkeypatch.setattr(Compaction, "run", run)
    store = sp.Store(f"memory://{uuid.uuid4()}", lossless())
    maintainer = Maintainer(store, Maintenance(compact=1.0, keep=Retention(last=2)))
    for step in range(6):
        store.save(step, state(step))
        tend_for(maintainer, 100)
        assert store.steps() == [*range(max(0, step - 1), step + 1)]


def test_a_damaged_chain_is_not_tried_after_every_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, runs, plain = sp.Store(tmp_path, lossless()), [], Compaction.run

    def run(self: Compaction) -> list[int]:
        runs.append(step)
        return plain(self)

    monkeypatch.setattr(Compaction, "run", run)
    maintainer = Maintainer(store, Maintenance(compact=3.0))
    for step in range(20):
        store.save(step, state(step))
        if step == 1:
            path = tmp_path / "data" / store.describe(1).file
            path.write_bytes(path.read_bytes()[:-1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            maintainer.run(lambda: False, alone=True)
    assert runs == [3, 8, 18]  # at costs of 4, 8 and 17, about
    # A new chain is compacted as any other.
    store = sp.Store(tmp_path, lossless())
    maintainer._store = store
    for step in range(20, 25):
        store.save(step, state(step))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            maintainer.run(lambda: False, alone=True)
    assert runs[3:] == [23]
    assert store.describe(23).restore_cost <= 2.5


def test_what_storage_says_is_no_busy_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = sp.Store(f"memory://{uuid.uuid4()}", lossless())
    store.save(0, state(0))

    def out(*_: Any) -> Any:
        raise TimeoutError("no answer")

    monkeypatch.setattr(store._files, "list", out)
    with pytest.raises(TimeoutError, match="no answer"):
        Maintainer(store, Maintenance(keep=Retention(last=1))).run(lambda: False, alone=True)


def test_steps_go_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removal is done in parts, can be stopped between them, and renews the lock."""
    store = sp.Store(f"memory://{uuid.uuid4()}", lossless(base_every=1))
    for step in range(150):
        store.save(step, {"weight": step})
    removed, plain = [], store._files.remove

    def remove(names: Any) -> None:
        names = list(names)
        if names and names[0].startswith("steps/"):
            removed.append(len(names))
        plain(names)

    monkeypatch.setattr(store._files, "remove", remove)
    store.gc(Retention(last=1))
    assert [n for n in removed if n] == [64, 64, 21]
    assert store.steps() == [149]


def test_of_two_errors_the_save_s_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the worker dies and the next save fails, the save's own error is raised."""
    began, go = threading.Event(), threading.Event()

    def tend(self: Any, *_: Any, **__: Any) -> None:
        began.set()
        go.wait(PATIENCE)
        raise ChildProcessError("killed")

    monkeypatch.setattr(Maintainer, "run", tend)
    saver = sp.Saver(sp.Store(f"memory://{uuid.uuid4()}", lossless()), keep=Retention())
    save(saver, 0)
    assert began.wait(PATIENCE)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(executors, "perform", full)
    future = saver.save(1, state(1))
    go.set()
    with pytest.raises(OSError, match="No space left") as error:
        saver.close()
    assert error.value is future.exception()
    assert error.value.__notes__ == ["Before that: ChildProcessError: killed"]


@posix
def test_who_removes_steps_need_not_wait_for_it(tmp_path: Path, endless: Callable[[], list[str]]) -> None:
    store = sp.Store(tmp_path / "run", lossless())
    with sp.Saver(store, compact=1.0) as saver:
        saver.rest()
        for step in range(1, 4):
            save(saver, step)
            begun(endless, step - 1)
            saver.rest()
            with store._lock.alone(0.0):
                pass
            assert endless().count("begun") == endless().count("ended")
        assert save(saver, 4).status == "saved"
        begun(endless, 3)
    saver.rest()
    assert store.steps() == [1, 2, 3, 4]
