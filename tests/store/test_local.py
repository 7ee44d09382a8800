"""A folder on a local disk: links, pipes, permissions, names that lead elsewhere."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shrinkpoint as sp
from shrinkpoint.store import local
from shrinkpoint.store.checksummed_json import seal, unseal
from shrinkpoint.store.local import LocalFiles
from shrinkpoint.store.retention import Retention
from shrinkpoint.store.store import RestoreNotCountedWarning
from shrinkpoint.store.urls import open_files
from tests.store.common import data_path, fill, leftovers, lossless, manifest_path, same, spied_folders
from tests.store.racing import race

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file outside the store."""
    path = tmp_path / "elsewhere" / "secret"
    path.parent.mkdir()
    path.write_bytes(b"keep me")
    return path


def test_the_store_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    fill(sp.Store(tmp_path / "link", lossless()), 1)
    assert same(sp.Store(tmp_path / "real").load(), 1)


@pytest.mark.parametrize("what", ["data", "manifest"])
def test_links_in_the_place_of_files(what: str, tmp_path: Path, secret: Path) -> None:
    """A link in place of a store's file is damage, even if its bytes are equal."""
    root = tmp_path / "run"
    store = fill(sp.Store(root, lossless(base_every=1)), 1, 2)
    path = data_path(root, 2) if what == "data" else manifest_path(root, 2)
    secret.write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(sp.CorruptDataError, match="step 2"):
        store.load(2)
    with pytest.raises(sp.CorruptDataError, match="step 2"):
        store.load(2, "ids")
    with pytest.warns(UserWarning, match="skipped step 2"):
        assert same(store.load(), 1)
    before = secret.read_bytes()
    fill(store, 2)
    store.gc()
    assert secret.read_bytes() == before
    assert same(sp.Store(root).load(2), 2)
    assert not any(p.is_symlink() for p in root.rglob("*"))


@pytest.mark.parametrize("folder", ["data", "steps"])
def test_links_in_the_place_of_folders(folder: str, tmp_path: Path, secret: Path) -> None:
    """A link in place of a store's folder is refused for reading, writing and removal."""
    root = tmp_path / "run"
    store = fill(sp.Store(root, lossless()), 1, 2)
    (root / folder).rename(secret.parent / folder)
    (root / folder).symlink_to(secret.parent / folder)
    (secret.parent / folder / ".tmp-1-x").write_bytes(b"theirs")
    before = sorted(p.name for p in (secret.parent / folder).iterdir())
    for act in (store.gc, lambda: fill(store, 3), lambda: sp.Store(root).load(2), lambda: store.load(2, "ids")):
        with pytest.raises((OSError, sp.CorruptDataError), match="link"):
            act()
    assert sorted(p.name for p in (secret.parent / folder).iterdir()) == before


def test_links_where_files_are_to_be_written(tmp_path: Path, secret: Path) -> None:
    """A link with a temporary name is not followed; another name is used."""
    root = tmp_path / "run"
    store = fill(sp.Store(root, lossless()), 1)
    for folder in ("data", "steps"):
        for number in range(3):
            for name in ("000000000002.json", Path(data_path(root, 1)).name):
                (root / folder / f".tmp-{number}-{name}").symlink_to(secret)
    fill(store, 1, 2)
    assert secret.read_bytes() == b"keep me"
    assert same(sp.Store(root).load(), 2)
    store.gc()
    assert secret.read_bytes() == b"keep me"
    assert not any(p.is_symlink() for p in root.rglob("*"))


def test_a_lock_that_is_a_link(tmp_path: Path, secret: Path) -> None:
    store = sp.Store(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(secret)
    with pytest.raises(OSError):
        fill(store, 1)
    assert secret.read_bytes() == b"keep me"


def test_a_pipe_in_the_place_of_a_file_hangs_nobody(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path, lossless()), 1)
    path = data_path(tmp_path, 1)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(sp.CorruptDataError, match="not a regular file"):
        sp.Store(tmp_path).load(1)
    assert list(store.verify()) == [1]


def test_manifests_cannot_lead_elsewhere(tmp_path: Path, secret: Path) -> None:
    root = tmp_path / "run"
    store = fill(sp.Store(root, lossless()), 1, 2)
    whole = unseal(manifest_path(root, 2).read_bytes())
    for name in ("../../elsewhere/secret", str(secret), "..", "x/../../../elsewhere/secret", "\0", "a" * 10**6):
        for fields in ({"file": name}, {"parents": [name]}, {"parents": [*whole["parents"], name]}):
            manifest_path(root, 2).write_bytes(seal({**whole, **fields}))
            for act in (
                lambda: store.load(2),
                lambda: store.load(2, "*"),
                store.gc,
                lambda: store.copy(tmp_path / "c"),
            ):
                with pytest.raises(sp.CorruptDataError, match="step 2"):
                    act()
    assert secret.read_bytes() == b"keep me"


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    store = fill(sp.Store(tmp_path, lossless()), 1, 2)
    store.save(2, {"other": 1})
    assert sp.Store(tmp_path).load() == {"other": 1}
    assert leftovers(tmp_path) == []
    assert not open_files(tmp_path).create("steps/000000000001.json", b"x")
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"):
        fill(store, 3)
    assert leftovers(tmp_path) == []
    assert store.steps() == [1, 2]


def test_reading_in_parts(tmp_path: Path) -> None:
    files = open_files(tmp_path)
    files.write("data/x", bytes(range(100)))
    assert files.read_range("data/x", 10, 20) == bytes(range(10, 20))
    assert files.read_range("data/x", 90, 200) == bytes(range(90, 100))
    assert files.read_range("data/x", 200, 300) == b""
    assert files.size("data/x") == 100
    files.write("data/empty", b"")
    assert files.read("data/empty") == b""
    assert files.create("data/empty", b"")
    assert local._read(os.open(tmp_path / "data" / "x", os.O_RDONLY), 10**9) == bytes(range(100))


_UNPRIVILEGED = """
import os, sys, warnings
import shrinkpoint as sp
from shrinkpoint.store.store import RestoreNotCountedWarning
from tests.store.common import fill, lossless, same
root, to = sys.argv[1:]
for warm in (to + "/warm", root):  # lazy imports must happen before the rights are dropped
    store = sp.Store(warm, lossless())
    if warm != root:
        fill(store, 1, 2)
        store.compact(1.0)
    assert same(store.load(1, "*"), 1) and same(store.load(2, count=False), 2)
    if warm != root:
        store.copy(to + "/warm copy")
os.setgid(65534)
os.setuid(65534)
warnings.simplefilter("error")
assert same(store.load(2, count=False), 2)
assert same(store.load(count=False), 2)
assert same(store.load(1, "*"), 1)
assert store.verify() == {}
assert store.steps() == [1, 2] and store.restores() == 0 and store.tags() == {}
refused = (lambda: fill(store, 3), store.gc, store.compact, lambda: store.pin(1), lambda: store.drop(1))
for act, error in ((store.load, RestoreNotCountedWarning), *((act, PermissionError) for act in refused)):
    try:
        act()
    except error:
        continue
    raise SystemExit("no error")
assert same(store.copy(to + "/copy").load(), 2)
print("fine")
"""


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, to become nobody")
def test_a_store_that_may_only_be_read(tmp_path: Path) -> None:
    """A read-only store can be loaded, verified and copied, and reports refused changes."""
    root = tmp_path / "run"
    fill(sp.Store(root, lossless()), 1, 2)
    (tmp_path / "to").mkdir(mode=0o777)
    os.chmod(tmp_path / "to", 0o777)
    for folder in (tmp_path, *tmp_path.parents):
        if str(folder).startswith("/tmp/"):
            os.chmod(folder, 0o755)
    done = subprocess.run(
        [sys.executable, "-c", _UNPRIVILEGED, str(root), str(tmp_path / "to")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        env={**os.environ, "SHRINKPOINT_THREADS": "1"},
    )
    assert done.stdout.strip() == "fine", done.stderr
    assert sp.Store(root).steps() == [1, 2]


def test_a_restore_that_cannot_be_counted(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path, lossless()), 1)
    (tmp_path / "restores").write_bytes(b"in the way")
    with pytest.warns(RestoreNotCountedWarning, match="count=False"):
        assert same(store.load(), 1)
    assert same(store.load(count=False), 1)


def test_racing_writers(tmp_path: Path) -> None:
    """Of two processes that link one manifest name, one is refused each time."""
    race(str(tmp_path / "run"), tmp_path / "meeting")


def test_clocks_do_not_matter(tmp_path: Path) -> None:
    """File times do not decide which step is newest or which file is garbage."""
    store = fill(sp.Store(tmp_path, lossless()), 1, 2, 3)
    for number, path in enumerate(sorted(tmp_path.rglob("*"))):
        when = (0, 10**10, 1)[number % 3]
        os.utime(path, (when, when))
    assert same(sp.Store(tmp_path).load(), 3)
    store.compact(2.0)
    store.gc()
    assert sp.Store(tmp_path).verify() == {}
    assert same(sp.Store(tmp_path).load(), 3)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.EBUSY, errno.EIO])
def test_a_disk_that_cannot_be_asked_is_not_damaged(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older step is loaded only if a sector is unreadable, not for other I/O errors."""
    store = fill(sp.Store(tmp_path, lossless(base_every=1)), 1, 2)
    (newest,) = (p.name for p in (tmp_path / "data").glob("000000000002-*.spt"))
    real = LocalFiles.read

    def read(self: LocalFiles, name: str) -> bytes:
        if name.endswith(newest):
            raise OSError(number, os.strerror(number), name)
        return real(self, name)

    monkeypatch.setattr(LocalFiles, "read", read)
    if number == errno.EIO:
        with pytest.warns(sp.SkippedCheckpointWarning):
            assert same(sp.Store(tmp_path).load(), 1)
        return
    for act in (sp.Store(tmp_path).load, lambda: store.gc(Retention(last=1)), sp.Store(tmp_path).verify):
        with pytest.raises(OSError, match=re.escape(os.strerror(number))):
            act()
    assert store.steps() == [1, 2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = open

    def full(path: str, mode: str = "r", *rest: Any, **named: Any) -> Any:
        return real("/dev/full", "wb", 0) if mode == "xb" else real(path, mode, *rest, **named)

    store = fill(sp.Store(tmp_path, lossless()), 1)
    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", full)
        with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}") as caught:
            store.save(2, {"weight": 1})
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.__notes__ == ["This happened while step 2 was saved; no step that was saved before is lost."]
    assert same(sp.Store(tmp_path).load(), 1)


def test_an_absolute_path_needs_no_working_folder(tmp_path: Path) -> None:
    code = f"""
import os, tempfile, torch, shrinkpoint as sp
here = tempfile.mkdtemp(dir={str(tmp_path)!r})
os.chdir(here)
os.rmdir(here)
store = sp.Store({str(tmp_path / "run")!r})
store.save(1, {{"weight": torch.ones(3)}})
assert store.load()["weight"].sum() == 3
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}
    )


def test_an_interrupt_while_a_file_is_written_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = fill(sp.Store(tmp_path, lossless()), 1)

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fill(store, 2)
    assert len(os.listdir(tmp_path / "data")) == 1
    assert sp.Store(tmp_path).steps() == [1]


def test_folders_are_made_durable_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = spied_folders(monkeypatch)
    (tmp_path / "made").mkdir()  # by a process that may have been killed before it was durable
    files = LocalFiles(str(tmp_path / "made/new"))
    files.write("data/one", b"1")
    above = [str(folder) for folder in (tmp_path, tmp_path / "made", tmp_path / "made/new", tmp_path / "made/new/data")]
    assert {folder: synced.count(folder) for folder in above} == dict.fromkeys(above, 1)
    synced.clear()
    files.write("data/two", b"2")
    assert synced == above[-1:]
