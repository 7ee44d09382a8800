"""Unreliable object storage: requests are repeated, commits happen once."""

from __future__ import annotations

import errno
import importlib.util
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import example, given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.store.files import StoreWarning
from shrinkpoint.store.objects import ObjectFiles
from shrinkpoint.store.retention import Retention
from tests.store.common import fill, lossless, same, state

METHODS = ("pipe_file", "cat_file", "ls", "info", "rm_file", "exists", "modified")


class Weather(Exception):
    """An error of a network library that is not an OSError."""


class Flaky:
    """A file system whose requests fail, before or after their effect.

    Args:
        plan: one letter a request: "." goes well, "b" fails before, "a" after; then all go well.
        error: makes the exception.

    A put of data is answered once `held` is set.
    """

    def __init__(self, plan: str = "", error: Callable[[], Exception] = Weather) -> None:
        self.inner, self.plan, self.error = MemoryFileSystem(), list(plan), error
        self.delay = 0.0
        self.held: threading.Event | None = None
        self.made: list[str] = []
        self.put: list[str] = []

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if name not in METHODS:
            return found

        def request(*args: Any, **kwargs: Any) -> Any:
            self.made.append(name)
            time.sleep(self.delay)
            fate = self.plan.pop(0) if self.plan else "."
            if fate == "b":
                raise self.error()
            result = found(*args, **kwargs)
            if name == "pipe_file":
                self.put.append(args[0])
                if self.held is not None and "/data/" in args[0]:
                    self.held.wait()
            if fate == "a":
                raise self.error()
            return result

        # The real one's parameters tell whether it knows conditional puts.
        request.__signature__ = __import__("inspect").signature(found)  # type: ignore[attr-defined]
        return request


def flaky_store(url: str, plan: str, **more: Any) -> tuple[sp.Store, Flaky, list[float]]:
    store, fs, waits = sp.Store(url, lossless()), Flaky(plan, **more), list[float]()
    files = store._files
    assert isinstance(files, ObjectFiles)
    files.fs = fs
    files._sleep = waits.append
    return store, fs, waits


ERRORS = (Weather, lambda: OSError(errno.EIO, "reset"), TimeoutError, ConnectionResetError)


@settings(max_examples=50)
@given(st.text(".....ab", max_size=60), st.sampled_from(ERRORS))
@example(".....aaaa.aaab.ab", TimeoutError)  # a commit whose answer is lost, and then every second request
def test_everything_goes_well_in_the_end(plan: str, error: Callable[[], Exception]) -> None:
    """Up to five failures in a row are retried without effects on the store."""
    while "aaaaaa" in plan.replace("b", "a"):
        plan = plan[1:]
    url = f"memory://{uuid.uuid4()}"
    store, fs, waits = flaky_store(url, plan, error=error)
    fill(store, 0, 1, 2)
    store.compact(2.0)
    store.tag("x", 1)
    store.gc(Retention(last=2))
    assert same(store.load(), 2)
    with pytest.warns(StoreWarning, match="step 1 is saved below step 2"):
        fill(store, 1)
    other = sp.Store(url)
    assert other.steps() == [1, 2]
    assert other.verify() == {}
    assert same(other.load(1), 1)
    assert other.restores() == 2
    assert len(waits) <= len(plan)
    assert len(fs.made) > 20
    names = [p for p in MemoryFileSystem().find(store._files.root) if "/steps/" in p]
    assert len(names) == 2


def test_slow_storage() -> None:
    """`gc` waits for a slow save up to its timeout, and no request is repeated."""
    url = f"memory://{uuid.uuid4()}"
    fill(sp.Store(url, lossless()), 0, 1)
    store, fs, waits = flaky_store(url, "")
    fs.delay, fs.held = 0.02, threading.Event()
    saving = threading.Thread(target=fill, args=(store, 2))
    saving.start()
    try:
        while not any("/data/" in path for path in fs.put):
            time.sleep(0.001)
        other = sp.Store(url)
        with pytest.raises(TimeoutError, match="in use"):
            other.gc(Retention(), timeout=0.02)
        threading.Timer(0.1, fs.held.set).start()
        assert other.gc(Retention(last=2), timeout=60.0)
    finally:
        fs.held.set()
        saving.join()
    assert other.steps() == [1, 2]
    assert other.verify() == {}
    assert same(other.load(), 2)
    assert waits == []


def test_backoff() -> None:
    url = f"memory://{uuid.uuid4()}"
    store, _, waits = flaky_store(url, "." * 3 + "b" * 5)
    fill(store, 0)
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6]


@pytest.mark.parametrize("at", range(24))
def test_storage_that_stays_away(at: int) -> None:
    """If storage fails for good, saving raises, and earlier steps are intact later."""
    url = f"memory://{uuid.uuid4()}"
    fill(sp.Store(url, lossless()), 0, 1)
    store, fs, _ = flaky_store(url, "." * at + "b" * 500)
    committed = False
    try:
        fill(store, 2)
        committed = True
    except Weather:
        assert "b" in fs.plan
        # The answer to the last request that matters may be lost; here requests fail before they do anything.
        committed = any("/steps/000000000002" in path for path in fs.put)
    other = sp.Store(url, lossless())
    assert other.steps() == ([0, 1, 2] if committed else [0, 1])
    assert other.verify() == {}
    assert all(same(other.load(step), step) for step in other.steps())
    fill(other, 3)
    assert same(sp.Store(url).load(), 3)


@pytest.mark.parametrize("error", [PermissionError, NotADirectoryError, ValueError])
def test_answers_that_are_final(error: type[Exception]) -> None:
    """Final errors are not retried."""
    store, _, waits = flaky_store(f"memory://{uuid.uuid4()}", "..b", error=error)
    with pytest.raises(error):
        fill(store, 0)
    assert waits == []


@pytest.mark.parametrize("error", [PermissionError, TimeoutError, ConnectionResetError])
def test_what_cannot_be_reached_is_not_damaged(error: type[Exception]) -> None:
    """A network failure does not make `load` fall back to an older step."""
    url = f"memory://{uuid.uuid4()}"
    fill(sp.Store(url, lossless(base_every=1)), 0, 1)
    for good in range(1, 4):
        store, _, _ = flaky_store(url, "." * good + "b" * 100, error=error)
        for arguments in ((), (1,), (1, "ids")):
            with pytest.raises(error):
                store.load(*arguments)


# s3fs: EBUSY of SlowDown and ServiceUnavailable, EREMOTEIO of InternalError, EIO of a code that it does not know.
@pytest.mark.parametrize("number", [errno.EBUSY, errno.EIO, errno.EREMOTEIO, errno.EHOSTUNREACH, errno.EMFILE])
@pytest.mark.parametrize("folder", ["data", "steps"])
def test_storage_that_is_busy_is_not_damaged(number: int, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy storage does not make `load` or `gc` treat the newest step as damaged."""
    url = f"memory://{uuid.uuid4()}"
    fill(sp.Store(url, lossless(base_every=1)), 0, 1, 2)
    (newest,) = (name for name in sp.Store(url)._files.list(folder) if name.startswith("000000000002"))
    real = ObjectFiles.read

    def read(self: ObjectFiles, name: str) -> bytes:
        if name.endswith(newest):
            raise OSError(number, os.strerror(number))
        return real(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectFiles, "read", read)
        patch.setattr(ObjectFiles, "read_range", lambda self, name, start, stop: read(self, name)[start:stop])
        store = sp.Store(url)
        keep = Retention(last=1)
        for act in (store.load, lambda: store.load(2, "ids"), store.verify, lambda: store.gc(keep)):
            with pytest.raises(OSError, match=os.strerror(number)):
                act()
    store = sp.Store(url)
    assert store.steps() == [0, 1, 2]
    assert store.verify() == {}


def test_racing_writers() -> None:
    """A conditional put notices that another writer committed the same step."""
    url = f"memory://{uuid.uuid4()}"
    one, fs, _ = flaky_store(url, "")
    raced = 0
    real = fs.inner.pipe_file

    class Racing(MemoryFileSystem):  # type: ignore[misc]
        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
            nonlocal raced
            if "/steps/" in path and raced < 3:
                raced += 1
                sp.Store(url, lossless()).save(5, state(50 + raced))
            real(path, value, mode=mode, **more)

    fs.inner = Racing()
    one.save(5, state(5))
    assert raced == 3
    # Refused three times, it took the generation after the others' three.
    assert sp.Store(url)._catalog.generations() == {5: [3]}
    assert same(sp.Store(url).load(5), 5)
    assert sp.Store(url).verify() == {}


def test_a_failed_precondition_without_a_name() -> None:
    """An EINVAL from s3fs for a failed precondition is recognised."""
    url = f"memory://{uuid.uuid4()}"
    fs = Flaky()
    files = ObjectFiles(fs, f"/{uuid.uuid4()}")
    files._sleep = lambda _: None
    assert files.create("steps/x", b"mine")

    def refuse(path: str, value: bytes, mode: str = "overwrite") -> None:
        raise OSError(errno.EINVAL, "PreconditionFailed")

    fs.__dict__["pipe_file"] = refuse
    assert files.create("steps/x", b"mine")
    assert not files.create("steps/x", b"theirs")
    with pytest.raises(OSError, match="PreconditionFailed"):
        files.create("steps/y", b"new")
    assert url


def test_a_file_system_without_conditional_puts() -> None:
    class Plain(MemoryFileSystem):  # type: ignore[misc]
        def pipe_file(self, path: str, value: bytes) -> None:
            super().pipe_file(path, value)

    files = ObjectFiles(Plain(), f"/{uuid.uuid4()}")
    assert not files._conditional
    assert files.create("steps/x", b"a")
    assert files.create("steps/x", b"a")
    assert not files.create("steps/x", b"b")
    assert files.read("steps/x") == b"a"
    assert ObjectFiles(MemoryFileSystem(), "/x")._conditional


@pytest.mark.parametrize("module", ["huggingface_hub.hf_file_system", "obstore.fsspec"])
def test_file_systems_that_ignore_the_mode(module: str) -> None:
    """These accept `mode="create"` and write over an existing object, so it is looked for first."""

    class Ignoring(MemoryFileSystem):
        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> Any:
            return super().pipe_file(path, value, mode="overwrite", **kwargs)

    Ignoring.__module__ = module
    files = ObjectFiles(Ignoring(), f"/{uuid.uuid4()}")
    assert files.create("steps/x", b"a")
    assert not files.create("steps/x", b"b")
    assert files.read("steps/x") == b"a"


def test_the_hub_without_its_package() -> None:
    """The error names the package to install."""
    if importlib.util.find_spec("huggingface_hub") is not None:
        pytest.skip("huggingface_hub is installed")
    with pytest.raises(sp.BadArgumentError, match=r"hf://user/repo/run.*huggingface_hub"):
        sp.Store("hf://user/repo/run")
