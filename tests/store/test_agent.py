"""In-memory redundancy: it outlives its trainer, gives back what it was given, and is never trusted blindly."""

from __future__ import annotations

import os
import shutil
import signal
import socket
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
from hypothesis import given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.store import agent, channel
from shrinkpoint.store.agent import Held, InMemory, InMemoryWarning, runtime_folder, socket_path
from shrinkpoint.store.files import StoreWarning, one_name
from shrinkpoint.store.ranks import newest_common_step
from shrinkpoint.store.store import SkippedCheckpointWarning

pytestmark = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="needs Unix sockets")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
LOSSLESS = sp.presets.lossless(chain=sp.ChainPolicy(3))


def state(step: int) -> dict[str, Any]:
    return {"step": step, "weight": np.random.default_rng(step // 4).standard_normal(500) + step}


def same(found: dict[str, Any], step: int) -> bool:
    return found["step"] == step and np.array_equal(found["weight"], state(step)["weight"])


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory of the test's own, with a short name; agents left in it are ended."""
    folder = Path(tempfile.mkdtemp(prefix="sp-"))
    folder.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def memory(runtime: Path) -> Iterator[InMemory]:
    found = InMemory("some/run", keep=2)
    yield found
    found.end()


def agent_pid(memory: InMemory) -> int:
    return int(memory._ask({"do": "list"})[0]["pid"])


def ended(pid: int, seconds: float = 120) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def listener(answer: bytes | None) -> subprocess.Popen[bytes]:
    """A process of its own at the agent's socket that answers every request with these bytes, or not at all."""
    code = """
    import socket, sys, time
    s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); print("ready", flush=True)
    while True:
        c, _ = s.accept()
        if sys.argv[2] == "stuck":
            time.sleep(600)
        c.recv(1 << 16); c.sendall(bytes.fromhex(sys.argv[2])); c.close()
    """
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(code),
        socket_path("some/run"),
        "stuck" if answer is None else answer.hex(),
    ]
    found = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert found.stdout is not None
    assert found.stdout.readline() == b"ready\n"
    return found


# ---------------------------------------------------------------------------------------------- the agent alone


def test_put_and_get(memory: InMemory, runtime: Path) -> None:
    assert memory.get("a") is None
    assert memory.steps() == []
    assert not any(runtime.rglob("*.lock")), "asking starts nothing"
    assert memory.put(1, "a", [], b"first")
    assert memory.put(2, "b", ["a"], b"second" * 100_000)
    assert (memory.get("a"), memory.get("b"), memory.get("c")) == (b"first", b"second" * 100_000, None)
    assert InMemory("some/run").get("a") == b"first"
    assert InMemory("other/run").get("a") is None
    assert memory.nbytes() == 600_005
    assert memory.steps() == [1, 2]
    # What the newest two need is kept, whatever it was saved for.
    memory.put(3, "c", ["b", "a"], b"3")
    memory.put(4, "d", ["c", "b", "a"], b"")
    assert memory.steps() == [3, 4]
    assert [memory.get(n) for n in "acd"] == [b"first", b"3", b""]
    memory.put(5, "e", [], b"5")
    memory.put(6, "f", ["e"], b"6")
    assert memory.steps() == [5, 6]
    assert [memory.get(n) for n in "abcdef"] == [None] * 4 + [b"5", b"6"]
    memory.put(5, "e2", [], b"again")
    assert memory.steps() == [5, 6]
    memory.drop([6])
    assert memory.steps() == [5]
    assert (memory.get("f"), memory.get("e2")) == (None, b"again")


def test_only_its_user_finds_it(
    memory: InMemory, runtime: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory.put(1, "a", [], b"x")
    path = Path(socket_path(memory.url))
    assert path.parent == runtime / "shrinkpoint"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert "some" not in path.name
    path.parent.chmod(0o755)
    with pytest.raises(PermissionError, match="only user"):
        runtime_folder()
    assert memory.get("a") is None, "it is not used from a folder that others can enter"
    with pytest.warns(InMemoryWarning, match="step 2 is not kept in memory: PermissionError"):
        assert not memory.put(2, "b", [], b"y")
    path.parent.chmod(0o700)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert runtime_folder() == f"{tmp_path}/shrinkpoint-{os.getuid()}"
    assert stat.S_IMODE(os.stat(runtime_folder()).st_mode) == 0o700
    os.rmdir(runtime_folder())
    (tmp_path / f"shrinkpoint-{os.getuid()}").symlink_to(runtime)
    with pytest.raises(PermissionError):
        runtime_folder()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / ("x" * 100)))
    (runtime / ("x" * 100)).mkdir()
    with pytest.raises(OSError, match="too long"):
        socket_path("some/run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))


@linux
def test_a_killed_agent_is_replaced(memory: InMemory) -> None:
    memory.put(1, "a", [], b"x")
    first = agent_pid(memory)
    os.kill(first, signal.SIGTERM)
    assert memory.get("a") == b"x", "polite requests are not for it"
    os.kill(first, signal.SIGKILL)
    assert ended(first)
    assert os.path.exists(socket_path(memory.url)), "its socket is stale"
    assert memory.get("a") is None
    assert memory.put(2, "b", ["a"], b"y")
    assert agent_pid(memory) != first
    assert memory.get("b") == b"y"


@linux
def test_a_stuck_agent_is_ended_and_replaced(memory: InMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.put(1, "a", [], b"x")
    first = agent_pid(memory)
    os.kill(first, signal.SIGSTOP)
    start = agent._start

    def patient_again(path: str, url: str) -> None:
        monkeypatch.setattr(agent, "_PATIENCE", 60.0)  # the new one may take its time
        start(path, url)

    monkeypatch.setattr(agent, "_start", patient_again)
    monkeypatch.setattr(agent, "_PATIENCE", 0.5)
    assert memory.put(2, "b", [], b"y")
    assert ended(first)
    assert (memory.get("a"), memory.get("b")) == (None, b"y")


def frame(text: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + bytes(4) + text


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frame(b"nonsense"),
        frame(b"[1]"),
        frame(b'{"version": 99, "url": "some/run"}'),
        frame(b'{"version": 1, "url": "other/run"}'),
        b"\xff" * 8,
        (1).to_bytes(4, "little") + (1).to_bytes(4, "little") + b"{",
    ],
)
def test_what_is_no_agent_is_replaced(answer: bytes, memory: InMemory) -> None:
    memory.end()
    impostor = listener(answer)
    try:
        assert memory.get("a") is None
        assert memory.put(1, "a", [], b"x")
        assert memory.get("a") == b"x"
    finally:
        impostor.kill()
        impostor.communicate()


@linux
def test_an_agent_ends_when_it_is_forgotten(memory: InMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.put(1, "a", [], b"x")
    first = agent_pid(memory)
    memory.end()
    assert ended(first)
    assert not os.path.exists(socket_path(memory.url))
    monkeypatch.setattr(agent, "IDLE", 2.0)
    told: list[int] = []
    once = InMemory._once

    def noted(*given: Any) -> Any:
        answer = once(*given)
        told.append(answer[0]["pid"])
        return answer

    with monkeypatch.context() as patch:
        # Asking it who it is would be asking it for something, and it may be too late for that.
        patch.setattr(InMemory, "_once", noted)
        memory.put(1, "a", [], b"x")
    assert ended(told[-1])
    assert not os.path.exists(socket_path(memory.url))


def test_the_agent_lets_go_of_every_descriptor(tmp_path: Path) -> None:
    held = Held("url")

    def fd(data: bytes) -> int:
        (tmp_path / "x").write_bytes(data)
        return os.open(tmp_path / "x", os.O_RDONLY)

    for step in range(20):
        request = {"do": "put", "version": agent.VERSION, "step": step, "file": f"f{step % 7}", "needs": [], "keep": 2}
        given = [fd(b"abc")]
        assert held.answer({**request, "size": 3}, given)[0]["ok"]
        assert given == []
    assert len(held.files) == 2
    given = [fd(b"abc")]
    assert "error" in held.answer({**request, "size": 4}, given)[0]
    channel.close_all(given)
    for number, _ in held.files.values():
        assert os.fstat(number).st_size == 3
        os.close(number)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(["do", "version", "step", "steps", "file", "needs", "keep", "size"]),
        st.sampled_from(["put", "get", "list", "drop", 1, 0]) | _json,
    ),
    st.booleans(),
)
@settings(max_examples=60)
def test_no_request_breaks_the_agent(request_: dict[str, Any], with_descriptor: bool) -> None:
    held = Held("url")
    descriptors = [os.open(os.devnull, os.O_RDONLY)] if with_descriptor else []
    answer, _, _ = held.answer({"version": agent.VERSION, **request_}, descriptors)
    assert answer["version"] == agent.VERSION
    channel.close_all([*descriptors, *(fd for fd, _ in held.files.values())])


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="sealing is Linux's")
def test_nobody_changes_what_was_put() -> None:
    with agent._sealed(b"abc") as fd:
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 1)


# ---------------------------------------------------------------------------------------------- with a store


def filled(root: Path, steps: int = 5, **more: Any) -> sp.Store:
    store = sp.Store(root, LOSSLESS, in_memory=2, **more)
    for step in range(steps):
        store.save(step, state(step))
    return store


@pytest.fixture
def root(tmp_path: Path, runtime: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    InMemory(str(tmp_path / "run")).end()


def test_a_store_loads_from_memory_what_is_there(root: Path) -> None:
    filled(root)
    memory = InMemory(str(root))
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


def test_a_plain_store_finds_an_agent_when_nothing_else_is_left(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(root)
    asked: list[str] = []
    real = InMemory._ask
    monkeypatch.setattr(InMemory, "_ask", lambda self, *a, **k: (asked.append(self.url), real(self, *a, **k))[1])
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
    InMemory(str(root)).end()
    with pytest.raises(sp.CorruptDataError, match="no checkpoint is intact"):
        sp.Store(root).load()


def test_every_spelling_of_a_url_is_one_agent(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(root)
    (tmp_path / "link").symlink_to(root)
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    for file in (root / "data").iterdir():
        file.write_bytes(b"lost")
    for url in (f"{root}/", f"file://{root}", "../run", tmp_path / "there" / ".." / "run", tmp_path / "link"):
        assert InMemory(str(url)).steps() == [3, 4], url
        assert same(sp.Store(url, in_memory=2).load(), 4), url
    assert InMemory("run").steps() == []
    odd = os.fsdecode(b"\xff\xfe")
    sp.Store(odd, LOSSLESS, in_memory=1).save(7, {"weight": np.arange(3)})
    assert InMemory(str(tmp_path / "there" / odd)).steps() == [7]
    # Of other file systems what their URL says, which need not exist for it.
    assert one_name("memory://aa/b/") == one_name("memory:///aa/b")
    assert one_name("memory://aa") != one_name("memory://ab")
    assert one_name("nothing://bucket/run/") == one_name("nothing://bucket/run")


def test_memory_that_dies_with_the_process_is_not_doubled(runtime: Path) -> None:
    with pytest.raises(sp.BadArgumentError, match=r"in_memory is 2; memory://x ends with this process"):
        sp.Store("memory://x", in_memory=2)
    assert list(runtime.iterdir()) == []


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
    memory = InMemory(str(root), 2)
    name = store.describe(4).file
    memory.put(4, name, store.describe(4).parents, b"something else")
    with pytest.warns(InMemoryWarning, match="damaged"):
        assert same(sp.Store(root, in_memory=2).load(), 4)


def test_without_an_agent_the_disk_is_read(root: Path) -> None:
    filled(root)
    InMemory(str(root)).end()
    store = sp.Store(root, LOSSLESS, in_memory=2)
    assert same(store.load(), 4)
    assert store.save(5, state(5)).is_delta
    assert InMemory(str(root)).steps() == [5]
    assert same(sp.Store(root, in_memory=2).load(), 5)


@pytest.mark.parametrize("bad", [-1, 1.0, True, "2", 1001])
def test_numbers_to_keep_that_are_none(bad: Any, tmp_path: Path) -> None:
    with pytest.raises(sp.BadArgumentError, match="in_memory"):
        sp.Store(tmp_path, in_memory=bad)


@linux
def test_it_outlives_a_killed_trainer(root: Path) -> None:
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
    assert InMemory(str(root)).steps() == [1, 2]
    for file in (root / "data").iterdir():
        file.unlink()
    assert sp.Store(root, in_memory=2).load()["weight"][-1] == 1998


# ---------------------------------------------------------------------------------------------- several ranks

_RANK = """
import sys
from datetime import timedelta
import torch.distributed as dist
import shrinkpoint as sp
from shrinkpoint.store.ranks import newest_common_step

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", f"file://{folder}/meet", timedelta(seconds=600), rank=rank, world_size=3)
two = dist.new_group([0, 1])
store = sp.Store(f"{folder}/rank{rank}", in_memory=2 if rank == 0 else 0)
if rank < 2:
    step = newest_common_step(store, two, drop=True)
    print("step", step, store.load(step)["step"], store.steps())
try:
    newest_common_step(store)
except sp.ShrinkpointError as e:
    print(type(e).__name__, e)
dist.destroy_process_group()
"""


def test_ranks_agree_on_the_newest_step_all_of_them_hold(tmp_path: Path, runtime: Path) -> None:
    base_only = sp.presets.lossless(chain=sp.ChainPolicy(1))
    for rank, steps in enumerate([(60, 80, 100), (60, 80), (60, 70, 80, 100)]):
        store = sp.Store(tmp_path / f"rank{rank}", base_only, in_memory=2 if rank == 0 else 0)
        for step in steps:
            store.save(step, state(step))
    for rank, broken in ((0, 60), (0, 80), (2, 80)):
        (tmp_path / f"rank{rank}" / "data" / sp.Store(tmp_path / f"rank{rank}").describe(broken).file).write_bytes(b"x")
    started = [
        subprocess.Popen([sys.executable, "-c", _RANK, str(r), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for r in range(3)
    ]
    found = [p.communicate(timeout=600)[0].splitlines() for p in started]
    memory = InMemory(str(tmp_path / "rank0"))
    assert memory.steps() == [80]
    memory.end()
    # The first has 80 in memory only. Of all three one has no intact 60 left, one no intact 80.
    assert [lines[0] for lines in found[:2]] == ["step 80 80 [60, 80]"] * 2
    assert [lines[-1].split()[0] for lines in found] == ["CorruptDataError"] * 3
    assert all("no step that all 3 ranks" in lines[-1] for lines in found)


def test_one_rank_alone(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "run", LOSSLESS)
    with pytest.raises(sp.CorruptDataError, match="no step"):
        newest_common_step(store)
    for step in range(3):
        store.save(step, state(step))
    assert newest_common_step(store) == 2
    (tmp_path / "run" / "data" / store.describe(2).file).unlink()
    assert newest_common_step(store) == 1
    assert store.steps() == [0, 1, 2]
    assert newest_common_step(store, drop=True) == 1
    assert store.steps() == [0, 1]


def test_a_rank_that_cannot_look_stops_them_all(tmp_path: Path) -> None:
    """Its storage is not there, or what it gave is no store: nobody waits for it."""
    for rank in range(2):
        store = sp.Store(tmp_path / f"rank{rank}", sp.presets.lossless(chain=sp.ChainPolicy(1)))
        for step in range(3):
            store.save(step, state(step))
    (tmp_path / "rank0" / "data" / sp.Store(tmp_path / "rank0").describe(2).file).unlink()
    code = """
    import sys
    from datetime import timedelta
    import torch.distributed as dist
    import shrinkpoint as sp
    from shrinkpoint.store.local import LocalFiles as files

    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", f"file://{folder}/meet", timedelta(seconds=600), rank=rank, world_size=2)
    store = sp.Store(f"{folder}/rank{rank}")
    real = files.read

    def away(self, name):
        raise ConnectionError(f"no answer for {name}")

    def away_later(self, name):
        return away(self, name) if name.startswith("data/000000000001") else real(self, name)

    for given, broken in ((store, away), (store, away_later), (store if rank == 0 else "x", real), (store, real)):
        files.read = broken if rank == 1 else real
        try:
            print("step", sp.newest_common_step(given), flush=True)
        except Exception as e:
            print(type(e).__name__, e, *getattr(e, "__notes__", []), flush=True)
    dist.destroy_process_group()
    """
    started = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    others, own = (p.communicate(timeout=600)[0].splitlines() for p in started)
    why = ["ConnectionError: no answer"] * 2 + ["BadArgumentError: store must be a Store, not str"]
    assert len(others) == len(own) == 4
    for line, at, reason in zip(others, own, why, strict=False):
        assert line.startswith(f"ShrinkpointError rank 1 cannot look for its newest step: {reason}")
        assert at.startswith(f"{reason.partition(':')[0]} ")
        assert "All ranks raise now: rank 1 cannot look" in at
    assert others[3] == own[3] == "step 1"


def test_what_is_no_store_has_no_step() -> None:
    with pytest.raises(sp.BadArgumentError, match="store must be a Store, not str"):
        newest_common_step("x")  # type: ignore[arg-type]


def test_what_a_run_left_behind_is_not_its_newest_step(tmp_path: Path) -> None:
    first = sp.Store(tmp_path / "run", LOSSLESS)
    for step in (10, 20, 30):
        first.save(step, state(step))
    again = sp.Store(tmp_path / "run", LOSSLESS)
    again.load(10)
    with pytest.warns(StoreWarning):
        again.save(15, state(15))
    assert newest_common_step(sp.Store(tmp_path / "run"), drop=True) == 15
    assert sp.Store(tmp_path / "run").steps() == [10, 15, 20, 30]
