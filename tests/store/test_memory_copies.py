"""Copies in shared memory outlive their trainer, are exact, and are verified."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shrinkpoint as sp
from shrinkpoint.store import memory_copies
from shrinkpoint.store.memory_copies import InMemoryWarning, MemoryCopies
from shrinkpoint.store.store import SkippedCheckpointWarning
from shrinkpoint.store.urls import one_name

pytestmark = pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs /dev/shm")
LOSSLESS = sp.presets.lossless(chain=sp.ChainPolicy(3))


def state(step: int) -> dict[str, Any]:
    return {"step": step, "weight": np.random.default_rng(step // 4).standard_normal(500) + step}


def same(found: dict[str, Any], step: int) -> bool:
    return found["step"] == step and np.array_equal(found["weight"], state(step)["weight"])


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Shared memory of the test's own."""
    folder = Path(tempfile.mkdtemp(prefix="sp-", dir="/dev/shm"))
    monkeypatch.setattr(memory_copies, "SHARED", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def memory(shared: Path) -> MemoryCopies:
    return MemoryCopies("some/run", keep=2)


# ---------------------------------------------------------------------------------------------------- by themselves


def name(step: int) -> str:
    """Return the name of a data file."""
    return f"{step:012d}-0123456789abcdef.spt"


def held(memory: MemoryCopies, *steps: int) -> list[bytes | None]:
    return [memory.get(name(step)) for step in steps]


def nbytes(memory: MemoryCopies) -> int:
    return sum(file.stat().st_size for file in Path(memory.folder).glob("*.spt"))


def test_put_and_get(memory: MemoryCopies, shared: Path) -> None:
    assert held(memory, 1) == [None]
    assert memory.steps() == []
    assert not list(shared.iterdir()), "asking creates nothing"
    assert memory.put(1, name(1), [], b"first")
    assert memory.put(2, name(2), [name(1)], b"second" * 100_000)
    assert held(memory, 1, 2, 3) == [b"first", b"second" * 100_000, None]
    assert held(MemoryCopies("some/run"), 1) == [b"first"]
    assert held(MemoryCopies("other/run"), 1) == [None]
    assert nbytes(memory) == 600_005
    assert memory.steps() == [1, 2]
    # All files that the newest two need are kept.
    memory.put(3, name(3), [name(2), name(1)], b"3")
    memory.put(4, name(4), [name(3), name(2), name(1)], b"")
    assert memory.steps() == [3, 4]
    assert held(memory, 1, 3, 4) == [b"first", b"3", b""]
    memory.put(5, name(5), [], b"5")
    memory.put(6, name(6), [name(5)], b"6")
    assert memory.steps() == [5, 6]
    assert held(memory, 1, 2, 3, 4, 5, 6) == [None] * 4 + [b"5", b"6"]
    memory.put(5, name(50), [], b"again")
    assert memory.steps() == [5, 6]
    memory.drop([6])
    assert memory.steps() == [5]
    assert held(memory, 6, 50) == [None, b"again"]
    memory.clear()
    assert memory.steps() == []


def test_one_is_kept_with_its_chain(shared: Path) -> None:
    memory = MemoryCopies("some/run", keep=1)
    memory.put(1, name(1), [], b"1")
    memory.put(2, name(2), [name(1)], b"2")
    assert memory.steps() == [2]
    assert held(memory, 1, 2) == [b"1", b"2"]


def test_only_its_user_can_enter(memory: MemoryCopies, shared: Path) -> None:
    memory.put(1, name(1), [], b"x")
    user = shared / f"shrinkpoint-{os.getuid()}"
    assert Path(memory.folder).parent == user
    for folder in (user, Path(memory.folder)):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    user.chmod(0o755)
    assert held(memory, 1) == [None]
    assert memory.steps() == []
    with pytest.warns(InMemoryWarning, match="PermissionError"):
        assert not memory.put(2, name(2), [], b"y")
    user.chmod(0o700)
    assert held(memory, 1) == [b"x"]
    shutil.move(user, shared / "elsewhere")
    user.symlink_to(shared / "elsewhere")
    assert held(memory, 1) == [None]


def test_old_copies_make_room_for_new_ones(memory: MemoryCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Old copies are removed for new ones; a copy that is too large gives a warning."""
    for step in (1, 2):
        memory.put(step, name(step), [], bytes(100))
    monkeypatch.setattr(memory_copies, "_room", lambda: 250 - nbytes(memory))
    assert memory.put(3, name(3), [], bytes(150))
    assert memory.steps() == [2, 3][-1 - (nbytes(memory) > 150) :]
    assert nbytes(memory) <= 250
    with pytest.warns(InMemoryWarning, match=r"step 4 is not kept in memory: MemoryError: 300 bytes; 250 are free"):
        assert not memory.put(4, name(4), [], bytes(300))
    assert memory.steps() == []
    assert memory.put(5, name(5), [], bytes(10))


def test_shared_memory_that_cannot_be_written_costs_a_warning(
    memory: MemoryCopies, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_copies, "SHARED", str(tmp_path / "missing"))
    with pytest.warns(InMemoryWarning, match="not kept in memory"):
        assert not MemoryCopies("some/run").put(1, name(1), [], b"x")


def test_a_store_that_is_opened_cleans_up(memory: MemoryCopies, tmp_path: Path) -> None:
    """Opening a store removes partial and unneeded copies, and folders of old stores."""
    run = str(tmp_path / "run")
    mine, other, live = MemoryCopies(run, 2), MemoryCopies("old/run"), MemoryCopies("live/run")
    for copies in (mine, other, live):
        copies.put(1, name(1), [], b"x")
    (Path(mine.folder) / ".tmp-99").write_bytes(b"half")
    (Path(mine.folder) / name(9)).write_bytes(b"nobody's")
    past = time.time() - memory_copies.FORGOTTEN - 60
    os.utime(other.folder, (past, past))
    os.utime(mine.folder, (past, past))
    sp.Store(run, in_memory=2)
    assert sorted(os.listdir(mine.folder)) == [name(1), "index.json", "lock"]
    assert not os.path.exists(other.folder)
    assert held(mine, 1) == held(live, 1) == [b"x"]


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1, 2]", b"\xff" * 40])
def test_a_damaged_index_holds_nothing(damage: bytes, memory: MemoryCopies) -> None:
    memory.put(1, name(1), [], b"x")
    (Path(memory.folder) / "index.json").write_bytes(damage)
    assert memory.steps() == []
    assert memory.put(2, name(2), [], b"y")
    assert memory.steps() == [2]
    assert held(memory, 1, 2) == [None, b"y"]


def test_two_processes_put_at_once(memory: MemoryCopies, shared: Path) -> None:
    code = """
    import sys
    from shrinkpoint.store import memory_copies
    memory_copies.SHARED = sys.argv[1]
    memory = memory_copies.MemoryCopies("/some/run", keep=1000)
    for step in range(int(sys.argv[2]), 60, 2):
        assert memory.put(step, f"{step:012d}-0123456789abcdef.spt", [], b"x" * step)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(shared)]
    running = [subprocess.Popen([*command, str(first)]) for first in (0, 1)]
    assert [process.wait(300) for process in running] == [0, 0]
    found = MemoryCopies("/some/run")
    assert found.steps() == list(range(60))
    assert held(found, *range(60)) == [b"x" * step for step in range(60)]


# ---------------------------------------------------------------------------------------------- with a store


def filled(root: Path, steps: int = 5, **more: Any) -> sp.Store:
    store = sp.Store(root, LOSSLESS, in_memory=2, **more)
    for step in range(steps):
        store.save(step, state(step))
    return store


@pytest.fixture
def root(tmp_path: Path, shared: Path) -> Path:
    return tmp_path / "run"


def test_a_store_loads_from_memory_what_is_there(root: Path) -> None:
    filled(root)
    memory = MemoryCopies(str(root))
    assert memory.steps() == [3, 4]
    for file in (root / "data").iterdir():
        file.write_bytes(b"lost")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(sp.Store(root, in_memory=2).load(), 4)
        assert same(sp.Store(root, in_memory=2).load(3), 3)
    # The disk is what verify looks at, and parts are read from.
    assert list(sp.Store(root, in_memory=2).verify()) == [0, 1, 2, 3, 4]
    with pytest.raises(sp.CorruptDataError):
        sp.Store(root).load(paths="weight")


def test_a_plain_store_finds_copies_when_nothing_else_is_left(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(root)
    asked: list[str] = []
    real = MemoryCopies.get
    monkeypatch.setattr(MemoryCopies, "get", lambda self, file: (asked.append(file), real(self, file))[1])
    names = [sp.Store(root).describe(step).file for step in range(5)]
    for name in names[1:]:
        (root / "data" / name).write_bytes(b"lost")
    with pytest.warns(SkippedCheckpointWarning):
        assert same(sp.Store(root).load(), 0)
    assert asked == [], "what storage has is not asked for"
    (root / "data" / names[0]).write_bytes(b"lost")
    store = sp.Store(root, LOSSLESS)
    with pytest.warns(InMemoryWarning, match="no checkpoint is intact in storage"):
        assert same(store.load(), 4)
    assert not store.save(5, state(5)).is_delta, "nothing is built on it"
    (root / "data" / store.describe(5).file).unlink()
    MemoryCopies(str(root)).clear()
    with pytest.raises(sp.CorruptDataError, match="no checkpoint is intact"):
        sp.Store(root).load()


def test_every_spelling_of_a_url_is_one_folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(root)
    (tmp_path / "link").symlink_to(root)
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    for file in (root / "data").iterdir():
        file.write_bytes(b"lost")
    for url in (f"{root}/", f"file://{root}", "../run", tmp_path / "there" / ".." / "run", tmp_path / "link"):
        assert MemoryCopies(str(url)).steps() == [3, 4], url
        assert same(sp.Store(url, in_memory=2).load(), 4), url
    assert MemoryCopies("run").steps() == []
    odd = os.fsdecode(b"\xff\xfe")
    sp.Store(odd, LOSSLESS, in_memory=1).save(7, {"weight": np.arange(3)})
    assert MemoryCopies(str(tmp_path / "there" / odd)).steps() == [7]
    # Of other file systems what their URL says, which need not exist for it.
    assert one_name("memory://aa/b/") == one_name("memory:///aa/b")
    assert one_name("memory://aa") != one_name("memory://ab")
    assert one_name("nothing://bucket/run/") == one_name("nothing://bucket/run")


def test_memory_that_dies_with_the_process_is_not_doubled(shared: Path) -> None:
    with pytest.raises(sp.BadArgumentError, match=r"in_memory is 2; memory://x exists in this process only"):
        sp.Store("memory://x", in_memory=2)
    assert list(shared.iterdir()) == []


def test_nothing_is_built_on_what_only_memory_has(root: Path) -> None:
    filled(root)
    for file in (root / "data").iterdir():
        file.write_bytes(b"lost")
    store = sp.Store(root, LOSSLESS, in_memory=2)
    assert same(store.load(), 4)
    assert not store.save(5, state(5)).is_delta
    assert same(sp.Store(root).load(5), 5)


def test_a_step_is_gone_on_with_as_storage_has_it(root: Path) -> None:
    filled(root)
    store = sp.Store(root, LOSSLESS, in_memory=2)
    store.follow(4)
    assert store.save(5, state(5)).is_delta
    (root / "data" / store.describe(5).file).write_bytes(b"lost")
    other = sp.Store(root, LOSSLESS, in_memory=2)
    with pytest.raises(sp.CorruptDataError, match="step 5"):
        other.follow(5)
    assert other.head is None
    assert same(other.load(), 5)


def test_a_damaged_copy_in_memory_is_passed_over(root: Path) -> None:
    store = filled(root)
    memory = MemoryCopies(str(root), 2)
    name = store.describe(4).file
    memory.put(4, name, store.describe(4).parents, b"something else")
    with pytest.warns(InMemoryWarning, match="damaged"):
        assert same(sp.Store(root, in_memory=2).load(), 4)


def test_without_copies_the_disk_is_read(root: Path) -> None:
    filled(root)
    MemoryCopies(str(root)).clear()
    store = sp.Store(root, LOSSLESS, in_memory=2)
    assert same(store.load(), 4)
    assert store.save(5, state(5)).is_delta
    assert MemoryCopies(str(root)).steps() == [5]
    assert same(sp.Store(root, in_memory=2).load(), 5)


@pytest.mark.parametrize("bad", [-1, 1.0, True, "2", 1001])
def test_numbers_to_keep_that_are_none(bad: Any, tmp_path: Path) -> None:
    with pytest.raises(sp.BadArgumentError, match="in_memory"):
        sp.Store(tmp_path, in_memory=bad)


def test_copies_outlive_a_killed_trainer(tmp_path: Path) -> None:
    """Copies in /dev/shm outlive a killed worker and trainer."""
    root = tmp_path / "run"
    code = """
    import os, signal, sys, numpy as np, shrinkpoint as sp
    saver = sp.Saver(sp.Store(sys.argv[1], sp.presets.lossless(), in_memory=2))
    for step in range(3):
        saver.save(step, {"weight": np.arange(1000) * step}).result()
    os.kill(saver.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(root)], timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL
    assert MemoryCopies(str(root)).steps() == [1, 2]
    for file in (root / "data").iterdir():
        file.unlink()
    try:
        assert sp.Store(root, in_memory=2).load()["weight"][-1] == 1998
    finally:
        MemoryCopies(str(root)).clear()
