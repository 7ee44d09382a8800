"""Object storage servers: conditional puts, ranges, races, a whole life of a store."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

import shrinkpoint as sp
from shrinkpoint.store.files import Files
from shrinkpoint.store.lock import ObjectLock
from shrinkpoint.store.objects import ObjectFiles
from shrinkpoint.store.retention import Retention
from shrinkpoint.store.urls import open_files
from tests.store import ceph, gcs
from tests.store.common import fill, lossless, same
from tests.store.racing import race

ROOT = Path(__file__).resolve().parents[2]
# gcsfs gives aiohttp the parts of a large object as bytes.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")


@pytest.fixture(scope="module")
def amazon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A new bucket on an S3 server."""
    s3fs: Any = pytest.importorskip("s3fs", reason="s3fs is not installed (pip install s3fs)")
    if (reason := ceph.missing()) is not None:
        pytest.skip(reason)
    name = f"b{uuid.uuid4().hex}"
    with ceph.running(tmp_path_factory.mktemp("ceph")) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", server.key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", server.secret)
        patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem().mkdir(name)
        yield f"s3://{name}"


@pytest.fixture(scope="module", params=["s3", "obstore", "gs"], ids=["amazon", "amazon-obstore", "google"])
def bucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A new bucket on a server."""
    if request.param != "gs":
        if request.param == "obstore":
            pytest.importorskip("obstore", reason="obstore is not installed (pip install obstore)")
        found = request.getfixturevalue("amazon")
        yield f"obstore::{found}" if request.param == "obstore" else found
        return
    name = f"b{uuid.uuid4().hex}"
    with pytest.MonkeyPatch.context() as patch:
        if (reason := gcs.missing()) is not None:
            pytest.skip(reason)
        # Another API, by gRPC, which the server has not.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        gcsfs: Any = importlib.import_module("gcsfs")
        with gcs.running(tmp_path_factory.mktemp("gcs") / "log") as endpoint:
            patch.setenv("FSSPEC_GS_TOKEN", "anon")
            patch.setenv("FSSPEC_GS_ENDPOINT_URL", endpoint)
            patch.setitem(fsspec.config.conf, "gs", {"token": "anon", "endpoint_url": endpoint})
            gcsfs.GCSFileSystem(project="tests").mkdir(name)
            yield f"gs://{name}"


@pytest.fixture
def url(bucket: str) -> str:
    return f"{bucket}/{uuid.uuid4().hex}"


def files(url: str) -> Files:
    found = open_files(url)
    assert isinstance(found, ObjectFiles)
    assert found._conditional
    return found


def test_files(url: str) -> None:
    """The file operations that a store needs work on a server."""
    f = files(url)
    assert f.list("data") == []
    assert not f.exists("data/x")
    for read in (lambda: f.read("data/x"), lambda: f.size("data/x")):
        with pytest.raises(FileNotFoundError):
            read()
    f.write("data/x", bytes(range(100)))
    assert f.read("data/x") == bytes(range(100))
    assert f.read_range("data/x", 10, 20) == bytes(range(10, 20))
    assert f.size("data/x") == 100
    assert f.exists("data/x")
    assert f.create("data/y", b"a")
    assert f.create("data/y", b"a")
    assert not f.create("data/y", b"b")
    assert f.read("data/y") == b"a"
    assert f.list("data") == ["x", "y"]
    assert abs(f.modified("data/x") - f.modified("data/y")) < 60
    f.write("data/empty", b"")
    assert f.read("data/empty") == b""
    f.remove(["data/x", "data/y", "data/never", "data/empty"])
    assert f.list("data") == []


def test_a_whole_life(url: str) -> None:
    store = fill(sp.Store(url, lossless()), *range(6))
    other = sp.Store(url, lossless())
    assert other.steps() == list(range(6))
    assert same(other.load(), 5)
    assert same(other.load(2, "*"), 2)
    assert list(other.load(5, "ids")) == ["ids"]
    assert other.compact(2.0)
    store.tag("best", 1)
    store.pin(2)
    store.rate(3, 0.5)
    store.gc(Retention(last=1, best=1))
    assert other.steps() == [1, 2, 3, 5]
    assert other.verify() == {}
    assert all(same(other.load(step), step) for step in other.steps())
    assert store.save(6, {"x": 1}).is_delta
    assert sp.Store(url).restores() == 5
    assert other.copy(f"memory://{uuid.uuid4()}").verify() == {}
    other.drop(6)
    assert files(url).list("locks") == []


def test_a_large_file_in_parts(url: str) -> None:
    """A large data file is written in parts."""
    f = files(url)
    data = os.urandom(1 << 20) * 101
    f.write("data/x", data)
    assert f.size("data/x") == len(data)
    assert f.read_range("data/x", len(data) - 10, len(data)) == data[-10:]
    f.write("data/x", data[:-1])
    assert f.read("data/x") == data[:-1]


def test_locks(url: str) -> None:
    one, two = ObjectLock(files(url), patience=0.1), ObjectLock(files(url), patience=0.1)
    with one.shared() as lease, two.shared():
        lease.renew()
        with pytest.raises(TimeoutError), two.alone(0.2):
            raise AssertionError
    with one.alone(5.0), pytest.raises(TimeoutError), two.shared():
        raise AssertionError


_WRITER = """
import sys
import warnings
import shrinkpoint as sp
from tests.store.common import fill, lossless
warnings.simplefilter("ignore")  # one may be behind the other
url, first = sys.argv[1], int(sys.argv[2])
store = sp.Store(url, lossless())
for i in range(6):
    fill(store, first + 2 * i)
    if i == 3:
        store.compact(2.0)
"""


def test_writers_of_steps_of_their_own(url: str) -> None:
    """Two writers and a collector lose no step."""
    running = [subprocess.Popen([sys.executable, "-c", _WRITER, url, first], cwd=ROOT) for first in ("0", "1")]
    store = sp.Store(url)
    store.gc()
    assert [process.wait(600) for process in running] == [0, 0]
    assert store.steps() == list(range(12))
    store.gc()
    assert store.verify() == {}
    assert all(same(store.load(step, count=False), step) for step in range(12))


def test_ranks_killed_at_random(url: str, tmp_path: Path) -> None:
    """Sharded steps in a bucket survive killed ranks, and other numbers of ranks resume.

    Four ranks, then two; with obstore two, then one.
    """
    world = "2" if url.startswith("obstore") else "4"
    command = [sys.executable, str(ROOT / "tests/trainers/sharded_ranks.py"), url, world, "2", "1", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 runs killed" in done.stdout


def test_racing_writers(url: str, tmp_path: Path) -> None:
    """Of two conditional puts of one name the server refuses one."""
    race(url, tmp_path / "meeting")


def test_that_an_unconditional_put_is_noticed(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test itself fails if puts are unconditional."""
    site = tmp_path / "site"
    site.mkdir()
    if url.startswith("obstore::"):
        (site / "sitecustomize.py").write_text(
            "from shrinkpoint.store.objects import Obstore\n"
            "real = Obstore.pipe_file\n"
            "Obstore.pipe_file = lambda self, path, data, mode='': real(self, path, data)\n"
        )
    else:
        (site / "sitecustomize.py").write_text(
            f"from {'s3fs import S3FileSystem' if url.startswith('s3:') else 'gcsfs import GCSFileSystem'} as Files\n"
            "real = Files._pipe_file\n"
            "async def put(self, path, data, *args, mode='overwrite', **more):\n"
            "    return await real(self, path, data, *args, mode='overwrite', **more)\n"
            "Files._pipe_file = put\n"
        )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
    with pytest.raises(AssertionError, match="one must lose"):
        race(url, tmp_path / "meeting", 2)
