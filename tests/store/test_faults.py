"""Faults around a store: signals, read-only disks, odd file systems, containers."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
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
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shrinkpoint as sp
from shrinkpoint.codec import memory_limit
from shrinkpoint.store import local
from shrinkpoint.store.files import StoreWarning
from shrinkpoint.store.manifest import data_name, manifest_name
from shrinkpoint.store.saver import channel

from .common import fill, lossless, manifest_path, same

posix = pytest.mark.skipif(os.name != "posix", reason="a worker process needs POSIX")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")


def script(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in its own process; return its result."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)


# ------------------------------------------------------------------------------------------------------- processes


@posix
@pytest.mark.parametrize("moment", ["starting", "saving"])
def test_signals_of_a_scheduler_lose_no_save(moment: str, tmp_path: Path) -> None:
    """Signals to the worker do not lose a save."""
    done = script(
        """
        import os, sys, time, numpy as np, shrinkpoint as sp
        from shrinkpoint.store.saver.channel import IGNORED
        saver = sp.Saver(sp.Store(sys.argv[1]))
        assert os.getsid(saver.pid) == saver.pid
        if sys.argv[2] == "saving":
            saver.save(1, {"weight": np.zeros(9)}).result()
        saver.save(2, {"weight": np.random.default_rng(0).normal(size=3_000_000)})
        for number in IGNORED:
            os.kill(saver.pid, number)
        saver.save(3, {"weight": np.zeros(9)})
        saver.close()
        """,
        tmp_path,
        moment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sp.Store(tmp_path).steps()[-2:] == [2, 3]


@linux
@pytest.mark.parametrize("to", ["group", "session"])
def test_signals_to_the_job_reach_the_trainer_alone(to: str, tmp_path: Path) -> None:
    """Signals to the trainer's group or session do not lose the save of its worker.

    A child of the trainer without handlers is killed, which shows that the signals arrived.
    """
    code = """
        import os, signal, subprocess, sys, numpy as np, shrinkpoint as sp
        from shrinkpoint.store.saver.channel import IGNORED
        saver = sp.Saver(sp.Store(sys.argv[1]))
        saver.save(1, {"weight": np.zeros(9)}).result()
        other = subprocess.Popen(["sleep", "600"])
        saver.save(2, {"weight": np.random.default_rng(0).normal(size=3_000_000)})
        if sys.argv[2] == "group":
            members = [0]
        else:
            found = []
            for entry in os.scandir("/proc"):
                try:
                    if entry.name.isdigit() and os.getsid(int(entry.name)) == os.getsid(0):
                        found.append(int(entry.name))
                except ProcessLookupError:
                    pass
            assert {os.getpid(), other.pid} <= set(found) and saver.pid not in found
            members = sorted(found, key=lambda pid: pid == os.getpid())
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
            for pid in members:
                os.kill(pid, number)
        assert other.wait() < 0
        saver.save(3, {"weight": np.zeros(9)}).result()
        saver.save(4, {"weight": np.zeros(9)})
        print(saver.pid, flush=True)
        os.kill(members[-1], signal.SIGKILL)
        """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path), to]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    out, err = job.communicate(timeout=300)
    assert (job.returncode, err) == (-signal.SIGKILL, "")
    worker = int(out)
    end = time.monotonic() + 60
    while Path(f"/proc/{worker}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists(), "it ends after its trainer"
    assert sp.Store(tmp_path).steps() == [1, 2, 3, 4], "the save in flight is finished first"


@linux
def test_a_worker_yields_to_its_trainer(tmp_path: Path) -> None:
    """The worker and its session have the given niceness."""
    with sp.Saver(sp.Store(tmp_path), nice=7) as saver:
        saver.save(1, {"weight": np.zeros(9)}).result()
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, saver.pid) == min(mine + 7, 19)
        group = Path(f"/proc/{saver.pid}/autogroup")
        if group.exists():
            assert group.read_text().split()[-1] == str(min(mine + 7, 19))


@posix
def test_every_signal_that_can_be_ignored_is_or_has_a_reason() -> None:
    faults = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS", "SIGSTKFLT", "SIGEMT"}
    others = {"SIGKILL", "SIGSTOP", "SIGCONT", "SIGCHLD", "SIGINFO"}
    named = {s.name for s in signal.Signals if not s.name.startswith("SIGRT")}
    assert {s.name for s in channel.IGNORED} == named - faults - others


@linux
def test_a_stopped_worker_is_waited_for_within_a_limit(tmp_path: Path) -> None:
    done = script(
        """
        import os, signal, sys, time, numpy as np, shrinkpoint as sp
        from shrinkpoint.store.saver import saver as module
        module.STOPPED = 1.0
        saver = sp.Saver(sp.Store(sys.argv[1]))
        saver.save(1, {"weight": np.zeros(9)}).result()
        os.kill(saver.pid, signal.SIGSTOP)
        saver.save(2, {"weight": np.ones(9)})
        print(saver.pid, flush=True)
        """,
        tmp_path,
    )
    pid = int(done.stdout)
    try:
        assert done.returncode == 120
        assert f"ChildProcessError: the saver's worker (process {pid}) has been stopped for 1 s" in done.stderr
        assert sp.Store(tmp_path).steps() == [1]
    finally:
        os.kill(pid, signal.SIGCONT)
    end = time.monotonic() + 60
    while sp.Store(tmp_path).steps() != [1, 2] and time.monotonic() < end:
        time.sleep(0.1)
    assert sp.Store(tmp_path).steps() == [1, 2], "once it goes on, it finishes the save"


@posix
def test_load_waits_for_a_save_in_flight_of_this_process(tmp_path: Path) -> None:
    """`load` waits for a save in flight of another Saver of this process."""
    saver = sp.Saver(sp.Store(tmp_path))
    saver.save(1, {"weight": np.random.default_rng(0).normal(size=2_000_000)})
    assert saver.busy
    assert sp.Store(f"{tmp_path}/.").load()["weight"].size == 2_000_000
    assert not saver.busy
    saver.close()


# ----------------------------------------------------------------------------------------------------- file systems


def _can_mount() -> bool:
    unshare = shutil.which("unshare")
    return (
        unshare is not None and not subprocess.run([unshare, "-m", "true"], capture_output=True, check=False).returncode
    )


@pytest.mark.skipif(not _can_mount(), reason="needs the right to mount")
def test_a_saver_needs_nothing_writable_but_its_store() -> None:
    """A saver works with /, /tmp and /dev/shm mounted read-only."""
    program = """
        import sys, numpy as np, shrinkpoint as sp
        for folder in ("/tmp", "/dev/shm", "/var/tmp"):
            try:
                open(f"{folder}/shrinkpoint-probe", "w")
                raise SystemExit(f"{folder} is writable")
            except OSError:
                pass
        store = sp.Store(sys.argv[1])
        with sp.Saver(store) as saver:
            for step in (1, 2):
                saver.save(step, {"weight": np.arange(9.0) + step})
        print(store.steps(), store.load()["weight"][0])
        """
    with tempfile.TemporaryDirectory(dir="/var/tmp") as store:
        mounts = (
            'mount --bind "$1" "$1" && mount -t tmpfs -o ro none /dev/shm && mount -o remount,ro,bind / && '
            '{ mount -o remount,ro,bind /tmp 2>/dev/null; exec "$2" -W ignore::RuntimeWarning -c "$3" "$1"; }'
        )
        command = ["unshare", "-m", "sh", "-c", mounts, "sh", store, sys.executable, textwrap.dedent(program)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "[1, 2] 2.0\n"


def test_a_file_system_that_syncs_no_folders_costs_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        synced(fd)

    monkeypatch.setattr(local.os, "fsync", fsync)
    monkeypatch.setattr(local, "_unsynced", False)
    with pytest.warns(StoreWarning, match="cannot sync folders"):
        fill(sp.Store(tmp_path), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill(sp.Store(tmp_path), 2)
    assert same(sp.Store(tmp_path).load(), 2)


# ------------------------------------------------------------------------------------------------------- many steps


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count listings of folders and parsed manifests."""
    calls: Counter[str] = Counter()
    listdir, parsed = os.listdir, sp.store.manifest.Manifest.from_bytes  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(local.os, "listdir", lambda path: (calls.update([Path(path).name]), listdir(path))[1])
        patch.setattr(
            "shrinkpoint.store.manifest.Manifest.from_bytes",
            staticmethod(lambda *a: (calls.update(["manifest"]), parsed(*a))[1]),
        )
        yield calls


def test_a_save_lists_and_parses_nothing_that_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shrinkpoint.store.manifest._LISTED_FOR", 3600.0)
    store = fill(sp.Store(tmp_path, lossless()), 1, 2)
    with counted(monkeypatch) as calls:
        fill(store, 3, 4, 5)
    assert calls["steps"] == calls["data"] == 0
    assert calls["manifest"] <= 3  # the head's, once each
    with counted(monkeypatch) as calls:
        assert list(store.manifests()[0]) == [1, 2, 3, 4, 5]
        assert list(store.manifests()[0]) == [1, 2, 3, 4, 5]
    assert calls["manifest"] <= 5


def test_what_others_write_is_seen_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shrinkpoint.store.manifest._LISTED_FOR", 3600.0)
    one, other = sp.Store(tmp_path), sp.Store(tmp_path)
    fill(one, 1, 2)
    fill(other, 9)
    with pytest.warns(StoreWarning, match="step 3 is saved below step 9"):
        fill(one, 3)
    for _ in range(2):
        with pytest.warns(StoreWarning, match="below step 9"):
            sp.Store(tmp_path).save(4, {"weight": np.zeros(3)})
        one.save(4, {"weight": np.ones(3)})
    assert one.load(4)["weight"].tolist() == other.load(4)["weight"].tolist() == [1.0] * 3
    other.drop(4)
    assert one.steps() == [1, 2, 3, 9]
    one.drop(9)
    fill(other, 9)
    assert same(one.load(), 9)


def test_a_replaced_manifest_is_parsed_again(tmp_path: Path) -> None:
    store, other = sp.Store(tmp_path), sp.Store(tmp_path)
    fill(store, 1)
    assert store.describe(1).metric is None
    other.rate(1, 0.5)
    assert store.describe(1).metric == 0.5
    other.drop(1)
    other.save(1, {"weight": np.zeros(3)})
    assert store.describe(1).raw_nbytes == other.describe(1).raw_nbytes == 24


@pytest.fixture(scope="module")
def ten_thousand(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with 10,000 bases, whose files are links to a few."""
    folder = tmp_path_factory.mktemp("ten-thousand")
    first = fill(sp.Store(folder, lossless()), 1).describe(1)
    for step in range(2, 10_001):
        manifest = dataclasses.replace(first, step=step, file=data_name(step, first.id))
        if step % 100 == 0:
            shutil.copyfile(folder / "data" / first.file, folder / "data" / manifest.file)
            source = manifest.file
        else:
            os.link(folder / "data" / (first.file if step < 100 else source), folder / "data" / manifest.file)
        (folder / "steps" / manifest_name(step, 0)).write_bytes(manifest.to_bytes())
    return folder


def fastest(work: Callable[[], object], times: int = 5) -> float:
    """Return the processor seconds of the fastest call."""
    seconds = []
    for _ in range(times):
        begin = time.process_time()
        work()
        seconds.append(time.process_time() - begin)
    return min(seconds)


def test_a_save_takes_no_longer_at_10_000_steps(ten_thousand: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    # In the same file system: a file in shared memory takes less processor time.
    few, many = fill(sp.Store(tmp_path_factory.mktemp("few"), lossless()), 1), sp.Store(ten_thousand, lossless())
    stores = {few: 100, many: 10_100}
    for store, first in stores.items():
        fill(store, first)
    # In turn, so that both meet the same load of the machine.
    seconds = dict.fromkeys(stores, math.inf)
    for number in range(1, 100):
        for store, first in stores.items():
            seconds[store] = min(seconds[store], fastest(lambda s=store, step=first + number: fill(s, step), 1))  # type: ignore[misc]
    many.drop_after(10_000)
    assert seconds[many] <= 1.5 * seconds[few], seconds


def slower(folder: Path) -> float:
    """Return how many times the target of an idle machine work may take here.

    Such a machine (an EPYC of 2026) reads and parses the 10,000 manifests in 0.1 s; twice the time is for noise.
    """

    def read() -> None:
        for path in (folder / "steps").iterdir():
            json.loads(path.read_bytes())

    return 2 * max(1.0, fastest(read) / 0.1)


def test_10_000_steps_are_listed_and_collected_in_seconds(ten_thousand: Path) -> None:
    """10,000 steps: `steps` takes 0.1 s, `ls` 1 s and `gc` 3 s of processor time at most."""
    factor = slower(ten_thousand)
    assert fastest(lambda: sp.Store(ten_thousand).steps()) <= 0.1 * factor
    assert len(sp.Store(ten_thousand).steps()) == 10_000
    for arguments, limit in ((["ls"], 1.0), (["gc", "--keep-last", "9000", "--dry-run"], 3.0)):
        command = [sys.executable, "-m", "shrinkpoint", arguments[0], str(ten_thousand), *arguments[1:]]
        seconds, out = [], ""
        for _ in range(3):
            before = os.times()
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            after = os.times()
            spent = after.children_user + after.children_system - before.children_user - before.children_system
            seconds.append(spent)
        assert min(seconds) <= limit * factor, (arguments, seconds, factor)
        assert ("10000 steps, " if arguments[0] == "ls" else "1000 steps and ") in out
    for step in range(1, 4):
        sp.Store(ten_thousand).drop(step)
    store = sp.Store(ten_thousand)
    assert fastest(lambda: store.gc(sp.Retention(last=9990)), 1) <= 3 * factor
    assert len(store.steps()) == 9990


# -------------------------------------------------------------------------------------------- retention and garbage


def test_a_malformed_manifest_is_named_with_its_remedy(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path), 1, 2, 3)
    os.truncate(manifest_path(tmp_path, 2), 40)
    with pytest.raises(sp.CorruptDataError, match=r"shrinkpoint drop .* 2`") as caught:
        store.gc(sp.Retention(last=1))
    assert str(tmp_path) in str(caught.value)
    assert store.steps() == [1, 2, 3]
    store.drop(2)
    store.gc(sp.Retention(last=1))
    assert store.steps() == [3]


def drifting(store: sp.Store, steps: int) -> dict[int, bytes]:
    """Save states that change everywhere; return the restored weights by step."""
    rng = np.random.default_rng(0)
    w = rng.normal(size=(200, 300)).astype(np.float32)
    for step in range(1, steps + 1):
        w = w + 0.1 * rng.normal(size=w.shape).astype(np.float32)
        store.save(step, {"weight": w})
    return {step: store.load(step, count=False)["weight"].tobytes() for step in store.steps()}


@pytest.mark.parametrize("every", [None, 10])
def test_a_retention_frees_space(every: int | None, tmp_path: Path) -> None:
    store = sp.Store(tmp_path, sp.Config())
    expected = drifting(store, 20)
    before = store.disk_usage()
    assert before.steps == before.total == sum(p.stat().st_size for p in (tmp_path / "data").iterdir())
    store.gc(sp.Retention(last=3, every=every))
    kept = [10, 18, 19, 20] if every else [18, 19, 20]
    assert store.steps() == kept
    after = store.disk_usage()
    assert after.steps == after.total < before.total / 2
    assert all(store.load(step, count=False)["weight"].tobytes() == expected[step] for step in kept)
    assert not store.verify()
    assert store.describe(20).is_delta, "only the lowest step of a chain becomes a base"


def test_little_is_left_to_the_chain(tmp_path: Path) -> None:
    """A removed base stays as a file for its deltas if a new base would take more bytes."""
    store = sp.Store(tmp_path, sp.Config())
    drifting(store, 3)
    store.gc(sp.Retention(last=2))
    usage = store.disk_usage()
    assert store.steps() == [2, 3]
    assert usage.steps < usage.total


# ----------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("version", [1, 2])
def test_the_limits_of_a_container_count(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory limit is the least of the machine's and those of all enclosing cgroups."""
    folder = tmp_path / ("memory" if version == 1 else "") / "job" / "task"
    folder.mkdir(parents=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    cached = "total_inactive_file" if version == 1 else "inactive_file"
    line = "5:cpu,memory:/job/task" if version == 1 else "0::/job/task"
    (tmp_path / "own").write_text(f"3:cpuset:/elsewhere\n{line}\n")
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    for name in ("CGROUPS", "OWN_CGROUPS", "MEMINFO"):
        found = {"CGROUPS": tmp_path, "OWN_CGROUPS": tmp_path / "own", "MEMINFO": tmp_path / "meminfo"}[name]
        monkeypatch.setattr(memory_limit, name, str(found))
    assert memory_limit.available_memory() == 50 * 1024
    assert memory_limit.total_memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def limit(where: Path, most: Any, used: int, cache: int) -> None:
        for name, value in zip(names, (most, used), strict=True):
            (where / name).write_text(f"{value}\n")
        (where / "memory.stat").write_text(f"anon 1\n{cached} {cache}\n")

    limit(folder, 2**63 - 4096 if version == 1 else "max", 9000, 0)
    assert memory_limit.available_memory() == 50 * 1024
    limit(folder.parent, 20000, 9000, 1000)
    assert memory_limit.available_memory() == 12000
    assert memory_limit.total_memory() == 20000
    limit(folder, 10000, 9500, 400)
    assert memory_limit.available_memory() == 900
    limit(folder, 10000, 11000, 0)
    assert memory_limit.available_memory() == 0


CONTAINER = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").is_dir() else Path("/sys/fs/cgroup")


@contextlib.contextmanager
def container(nbytes: int) -> Iterator[Path]:
    """Make a memory cgroup with a limit; skip the test if that is not possible."""
    own = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line.split(":", 2)[2] for line in own if ":memory:" in line or line.startswith("0::")), "/")
    folder = Path(f"{CONTAINER}{path}", f"shrinkpoint-test-{os.getpid()}")
    try:
        folder.mkdir()
        version_1 = folder / "memory.limit_in_bytes"
        (version_1 if version_1.exists() else folder / "memory.max").write_text(str(nbytes))
    except OSError as e:
        pytest.skip(f"no container can be made here: {e}")
    try:
        yield folder
    finally:
        end = time.monotonic() + 30
        while (folder / "cgroup.procs").read_text() and time.monotonic() < end:
            time.sleep(0.1)
        folder.rmdir()


@linux
def test_a_container_too_small_for_a_snapshot_is_an_error_instead_of_a_kill(tmp_path: Path) -> None:
    """A snapshot beyond the limit of a real cgroup is an error before the kernel kills."""
    with container(1 << 30) as folder:
        done = script(
            """
            import os, sys
            open(f"{sys.argv[1]}/cgroup.procs", "w").write(str(os.getpid()))
            import numpy as np, shrinkpoint as sp
            from shrinkpoint.codec.state.leaves import check_memory
            store = sp.Store(sys.argv[2])
            with sp.Saver(store) as saver:
                saver.save(1, {"weight": np.arange(9.0)}).result()
                try:
                    saver.save(2, {"weight": np.zeros(1 << 28, np.float32)})
                except MemoryError as error:
                    print(error)
                saver.save(3, {"weight": np.arange(9.0)}).result()
            print(store.steps())
            try:
                check_memory(1 << 30 | 1, "a file")
            except sp.CorruptDataError as error:
                print(error)
            """,
            folder,
            tmp_path,
        )
    assert done.returncode == 0, done.stderr
    first, steps, limit = done.stdout.splitlines()
    assert "1073741824" in first
    assert "bytes are available" in first
    assert steps == "[1, 3]"
    assert limit == "a file: needs 1073741825 bytes, this machine or container has 1073741824"


def test_a_snapshot_beyond_the_limit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shrinkpoint.store.saver.snapshot.available_memory", lambda: 1 << 20)
    with sp.Saver(sp.Store(tmp_path)) as saver, pytest.raises(MemoryError, match="1048576 bytes are available"):
        saver.save(1, {"weight": np.zeros(1 << 20)})
