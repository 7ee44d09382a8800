"""Several writers and a collector: no step is lost and all waits end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

import shrinkpoint as sp
from shrinkpoint.store import lock as lock_module
from shrinkpoint.store.files import Files
from shrinkpoint.store.lock import FileLock, ObjectLock
from shrinkpoint.store.urls import open_files
from tests.store.common import fill, lossless, same, state

ROOT = Path(__file__).resolve().parents[2]
Lock = FileLock | ObjectLock


def locks(kind: str, tmp_path: Path) -> tuple[Lock, Lock, Files]:
    """Return two holders of one lock."""
    url = str(tmp_path) if kind != "memory" else f"memory://{uuid.uuid4()}"
    one, two = open_files(url), open_files(url)
    if kind == "flock":
        return FileLock(one), FileLock(two), one
    return ObjectLock(one, patience=0.1, poll=0.01), ObjectLock(two, patience=0.1, poll=0.01), one


KINDS = pytest.mark.parametrize("kind", ["flock", "files", "memory"])


@KINDS
def test_modes(kind: str, tmp_path: Path) -> None:
    one, two, _ = locks(kind, tmp_path)
    with one.shared() as a, two.shared() as b:
        a.renew()
        b.renew()
        for timeout in (0.0, 0.05):
            with pytest.raises(TimeoutError, match="in use"), one.alone(timeout):
                raise AssertionError
    with one.alone(0.0) as a:
        a.renew()
        with pytest.raises(TimeoutError), two.alone(0.0):
            raise AssertionError
        if kind != "flock":  # which waits as long as it takes
            with pytest.raises(TimeoutError), two.shared():
                raise AssertionError
    with two.alone(0.0), contextlib.suppress(ZeroDivisionError):
        raise ZeroDivisionError
    with two.shared(), one.shared():
        pass


@KINDS
def test_a_collector_waits_for_savers_and_savers_for_it(kind: str, tmp_path: Path) -> None:
    one, two, files = locks(kind, tmp_path)
    if kind != "flock":
        two = ObjectLock(files, poll=0.01)
    order: list[str] = []
    held = threading.Event()

    def saver() -> None:
        with one.shared():
            held.set()
            time.sleep(0.2)
            order.append("saved")

    thread = threading.Thread(target=saver)
    thread.start()
    held.wait()
    with two.alone(10.0):
        order.append("collected")
        late = threading.Thread(target=lambda: _late(two, order))
        late.start()
        time.sleep(0.1)
        order.append("done")
    thread.join()
    late.join()
    assert order == ["saved", "collected", "done", "late"]


def _late(lock: Lock, order: list[str]) -> None:
    with lock.shared():
        order.append("late")


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_what_a_crash_leaves_of_a_lock(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks of dead holders count until they are stale; a live holder notices the loss."""
    one, two, files = locks(kind, tmp_path)
    dead = one.shared()
    lease = dead.__enter__()
    with pytest.raises(TimeoutError), two.alone(0.05):
        raise AssertionError
    monkeypatch.setattr(lock_module, "STALE", 0.0)
    time.sleep(0.02)
    with two.alone(0.1):
        pass
    with pytest.raises(TimeoutError, match="lost its lock"):
        lease.renew()
    monkeypatch.setattr(lock_module, "STALE", 3600.0)
    collector = one.alone(0.0)
    lease = collector.__enter__()
    with pytest.raises(TimeoutError), two.shared():
        raise AssertionError
    monkeypatch.setattr(lock_module, "STALE", 0.0)
    time.sleep(0.02)
    with two.shared():
        pass
    with pytest.raises(TimeoutError, match="lost its lock"):
        lease.renew()
    collector.__exit__(None, None, None)
    again = one.alone(0.0)
    again.__enter__()
    time.sleep(0.02)
    with two.alone(60.0):  # the stale object goes at the first look, the lock is had at the second
        pass
    assert [n for n in files.list("locks") if n.startswith("shared")] == []


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_a_collector_that_was_taken_for_dead_keeps_its_hands_off_others_locks(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, files = locks(kind, tmp_path)
    asleep = one.alone(0.0)
    asleep.__enter__()
    with monkeypatch.context() as old:
        old.setattr(lock_module, "STALE", 0.0)
        time.sleep(0.02)
        other = two.alone(60.0)
        other.__enter__()
    asleep.__exit__(None, None, None)  # it wakes up, and another one holds the lock by now
    assert "alone" in files.list("locks")
    with pytest.raises(TimeoutError), one.shared():
        raise AssertionError
    other.__exit__(None, None, None)
    assert files.list("locks") == []


@pytest.mark.parametrize("kind", ["files", "memory"])
def test_a_collector_whose_lock_went_takes_no_saver_for_dead(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector that lost its lock file does not break a saver's lock."""
    one, two, files = locks(kind, tmp_path)
    with two.shared() as saver:
        create = files.create

        def created(name: str, data: bytes) -> bool:
            answer = create(name, data)
            files.remove([name])
            return answer

        monkeypatch.setattr(files, "create", created)
        with pytest.raises(TimeoutError), one.alone(0.05):
            raise AssertionError
        saver.renew()


def test_a_saver_that_was_taken_for_dead_commits_nothing() -> None:
    """A saver that lost its lock does not commit."""
    url = f"memory://{uuid.uuid4()}"
    store = fill(sp.Store(url, lossless()), 0)
    files, write = store._files, store._files.write

    def writing(name: str, data: bytes) -> None:
        write(name, data)
        if name.startswith("data/"):
            files.remove([f"locks/{n}" for n in files.list("locks")])

    files.write = writing  # type: ignore[method-assign]
    with pytest.raises(TimeoutError, match="lost its lock"):
        fill(store, 1)
    assert sp.Store(url).steps() == [0]
    assert files.list("data") == [sp.Store(url).describe(0).file]


def test_a_clock_that_goes_backwards(tmp_path: Path) -> None:
    """A lock file from the future is not stale."""
    one, two, files = locks("files", tmp_path)
    with one.shared():
        name = f"locks/{files.list('locks')[0]}"
        future = time.time() + 10**6
        os.utime(files.path(name), (future, future))
        with pytest.raises(TimeoutError), two.alone(0.05):
            raise AssertionError


def test_where_there_is_no_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(fd: int, mode: int) -> None:
        raise OSError(errno.ENOSYS, "no flock here")

    monkeypatch.setattr(fcntl, "flock", refused)
    store = fill(sp.Store(tmp_path, lossless()), 0, 1)
    holder = FileLock(open_files(tmp_path))
    with holder.shared(), pytest.raises(TimeoutError):
        store.gc(timeout=0.05)
    assert store.gc() == []
    assert same(store.load(), 1)


def test_a_moment_without_locks_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary lack of locks does not switch to lock files."""
    store = fill(sp.Store(tmp_path, lossless()), 0, 1)
    flock, left = fcntl.flock, [3]

    def short(fd: int, mode: int) -> None:
        if mode & fcntl.LOCK_SH and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOLCK, "no locks available")
        flock(fd, mode)

    monkeypatch.setattr(fcntl, "flock", short)
    monkeypatch.setattr(lock_module, "_devices_without_locks", set())
    with FileLock(open_files(tmp_path)).shared(), pytest.raises(TimeoutError):
        store.gc(timeout=0.05)
    assert left == [0]
    assert not (tmp_path / "locks").exists()
    # Where that lasts it is waited for once.
    monkeypatch.setattr(lock_module, "_SHORT_OF_LOCKS", 0.2)
    left[0] = 10**6
    begin = time.monotonic()
    for _ in range(20):
        with FileLock(open_files(tmp_path)).shared():
            assert (tmp_path / "locks").exists()
    assert time.monotonic() - begin < 2.0


def test_a_forked_child_keeps_no_lock(tmp_path: Path) -> None:
    """A child forked during a save does not keep the lock."""
    store = fill(sp.Store(tmp_path, lossless()), 0)
    begin, end = os.pipe()
    with store._lock.shared():
        child = os.fork()
        if child == 0:
            os.close(end)
            os.read(begin, 1)
            os._exit(0)
    try:
        assert store.gc(timeout=0.0) == []
    finally:
        os.close(end)
        os.close(begin)
        os.waitpid(child, 0)


@pytest.mark.parametrize("alone", [False, True])
def test_a_forked_child_of_a_killed_process_keeps_no_lock(alone: bool, tmp_path: Path) -> None:
    """A child of a killed process does not keep the lock of the shared open file."""
    store = fill(sp.Store(tmp_path, lossless()), 0)
    begin, end = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        os.close(end)
        with store._lock.alone(1.0) if alone else store._lock.shared():
            if os.fork() == 0:
                os.read(begin, 1)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(begin)
    try:
        os.waitpid(trainer, 0)
        with store._lock.alone(1.0):
            pass
    finally:
        os.close(end)


def test_gc_does_not_collect_what_a_saver_is_about_to_name(tmp_path: Path) -> None:
    """`gc` at any point of a save waits, and the saved step is complete."""
    store = fill(sp.Store(tmp_path, lossless()), 0, 1)
    files, tried = store._files, 0
    write = files.write

    def writing(name: str, data: bytes) -> None:
        nonlocal tried
        write(name, data)
        tried += 1
        with pytest.raises(TimeoutError):
            sp.Store(tmp_path).gc(timeout=0.0)

    files.write = writing  # type: ignore[method-assign]
    fill(store, 2)
    files.write = write  # type: ignore[method-assign]
    assert tried == 1
    assert sp.Store(tmp_path).gc() == []
    assert same(sp.Store(tmp_path).load(), 2)


_WRITER = """
import sys
import shrinkpoint as sp
from shrinkpoint.store.retention import Retention
from tests.store.common import lossless, state
root, first, stride = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = sp.Store(root, lossless())
for i in range(9):
    store.save(first + stride * i, state(first + stride * i))
    if stride == 2 and i % 3 == 2:
        store.compact(2.0)
    if first == 1 and i % 4 == 3:
        store.gc()
"""


@pytest.mark.parametrize("stride", [2, 0], ids=["steps of their own", "the same step"])
def test_writers_at_once(stride: int, tmp_path: Path) -> None:
    """Concurrent saves, compactions and collections lose no saved step."""
    env = {**os.environ, "SHRINKPOINT_THREADS": "1", "OMP_NUM_THREADS": "1"}
    starts = (0, 1) if stride else (5, 5)
    running = [
        subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path), str(s), str(stride)], cwd=ROOT, env=env)
        for s in starts
    ]
    assert [process.wait(600) for process in running] == [0, 0]
    store = sp.Store(tmp_path)
    expected = sorted({s + stride * i for s in starts for i in range(9)})
    assert store.steps() == expected
    assert store.verify() == {}
    assert all(same(store.load(step, count=False), step) for step in expected)
    store.gc()
    assert store.verify() == {}
    assert len(list((tmp_path / "steps").iterdir())) == len(expected)


def test_two_that_commit_the_same_step(tmp_path: Path) -> None:
    """Of two writers that commit one step, the later replaces the earlier without an error."""
    one, two = (sp.Store(tmp_path, lossless()) for _ in range(2))
    create = one._files.create
    raced = False

    def creating(name: str, data: bytes) -> bool:
        nonlocal raced
        if not raced:
            raced = True
            two.save(7, state(70))
        return create(name, data)

    one._files.create = creating  # type: ignore[method-assign]
    one.save(7, state(7))
    assert same(sp.Store(tmp_path).load(7), 7)
    sp.Store(tmp_path).gc()
    assert same(sp.Store(tmp_path).load(7), 7)
    assert [p.name for p in (tmp_path / "steps").iterdir()] == ["000000000007.r1.json"]
