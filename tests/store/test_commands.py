"""Commands on a store: bytes that they read, and `gc` as a dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shrinkpoint as sp
from shrinkpoint.store.local import LocalFiles
from tests.face.test_cli import good, parsed
from tests.store.common import data_path, fill, listing, lossless, state

HEADER = 64 << 10


@pytest.fixture
def store(tmp_path: Path) -> sp.Store:
    """Return a store of five steps, each several times larger than its header."""
    store = sp.Store(tmp_path / "run", lossless())
    for step in range(5):
        store.save(step, state(step, 600_000))
    return store


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the bytes of each data request to a local store."""
    sizes: list[int] = []
    reads = {"read": LocalFiles.read, "read_range": LocalFiles.read_range}

    def watched(how: str) -> Any:
        def read(self: LocalFiles, name: str, *where: int) -> bytes:
            data: bytes = reads[how](self, name, *where)  # type: ignore[operator]
            if name.startswith("data/"):
                sizes.append(len(data))
            return data

        return read

    for how in reads:
        monkeypatch.setattr(LocalFiles, how, watched(how))
    return sizes


def test_looking_reads_no_more_than_headers(store: sp.Store, fetched: list[int]) -> None:
    whole = data_path(Path(store.url), 4).stat().st_size
    assert whole > 2 * HEADER
    assert store.steps() == [0, 1, 2, 3, 4]
    assert set(store.manifests()[0]) == set(store.steps())
    assert len(parsed("ls", store.url)["steps"]) == 5
    assert fetched == []
    assert parsed("info", store.url, "--step", 4)["nbytes"] == whole
    assert fetched == [HEADER]


def test_info_of_a_file_reads_its_header_only(store: sp.Store, tmp_path: Path) -> None:
    """`info` of a file reads the header only: a damaged body does not matter."""
    file = tmp_path / "alone.spt"
    data = data_path(Path(store.url), 0).read_bytes()
    file.write_bytes(data)
    expected = parsed("info", file)
    assert expected["id"] is None
    assert expected["rows"] == parsed("info", store.url, "--step", 0)["rows"]
    file.write_bytes(data[:-9] + bytes(9))
    assert parsed("info", file) == expected
    assert "id" not in good("info", file).splitlines()[0].split("base")[1]


def test_manifests_are_read_once(store: sp.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    real = LocalFiles.list
    monkeypatch.setattr(
        LocalFiles, "list", lambda self, folder: (listed.append(self.path(folder)), real(self, folder))[1]
    )
    parsed("ls", store.url)
    assert listed.count(f"{store.url}/steps") == 2, "once to see that it is a store"


def test_a_dry_run_says_what_gc_then_does(store: sp.Store) -> None:
    root = Path(store.url)
    store.compact(1)
    store.pin(1)
    (root / "data" / ".tmp-0-x").write_bytes(b"left by a crash")
    (root / "steps" / ".tmp-0-y").write_bytes(b"and this")
    (root / "steps" / "000000000003.json").write_bytes(b"a generation that was replaced")
    before = listing(root)
    words = ("gc", store.url, "--keep-last", 2)
    told = parsed(*words, "--dry-run")
    assert told["dry_run"]
    assert told["removed_steps"] == [0, 2]
    lines = good(*words, "--dry-run").splitlines()
    assert lines[-1] == f"2 steps and {len(told['removed_files'])} files would be removed; 3 steps kept"
    assert lines[:-1] == [f"would remove {name}" for name in told["removed_files"]]
    assert listing(root) == before
    done = parsed(*words)
    assert done == {**told, "dry_run": False}
    assert set(listing(root)) == set(before) - set(done["removed_files"])
    assert store.steps() == [1, 3, 4]
    assert parsed(*words)["removed_files"] == []


def test_a_dry_run_waits_for_savers(tmp_path: Path) -> None:
    """A dry run of `gc` waits for savers, whose files are not garbage."""
    store = fill(sp.Store(tmp_path / "run", lossless()), 1)
    other = sp.Store(store.url)
    with other._lock.shared(), pytest.raises(TimeoutError):
        store.gc(timeout=0.05, dry_run=True)
    assert store.gc(dry_run=True) == []


def test_gc_of_a_store_whose_steps_were_all_dropped(store: sp.Store) -> None:
    for step in store.steps():
        store.drop(step)
    left = parsed("gc", store.url)
    assert left["removed_steps"] == []
    assert len(left["removed_files"]) == 5
    assert not listing(Path(store.url) / "data")
