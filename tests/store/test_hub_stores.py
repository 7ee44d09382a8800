"""Stores on the Hugging Face Hub: huggingface_hub against a server that imitates it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import shrinkpoint as sp
from shrinkpoint.store.lock import ObjectLock
from shrinkpoint.store.objects import HubFiles, RepositoryFiles
from tests.store.hub_server import Hub

hub_api = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed; `make frameworks` has it")
STATE = {"weight": np.arange(3000, dtype=np.float32).reshape(100, 30)}
HOME = "hf://datasets/user/repo/run"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        hub_api.HfFileSystem.clear_instance_cache()
        monkeypatch.setattr("fsspec.config.conf", {"hf": {"endpoint": server.url, "token": "hf_x"}})
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(hub_api.HfApi, "batch_bucket_files", lambda _, *a, **k: server.change_bucket(*a, **k))
        yield server
        server.shutdown()


def opened(url: str = HOME) -> sp.Store:
    return sp.Store(url, cfg=sp.presets.lossless())


def files() -> RepositoryFiles:
    found = opened()._files
    assert isinstance(found, RepositoryFiles)
    found._sleep = lambda _: None
    return found


def moved(step: int) -> dict[str, Any]:
    return {"weight": STATE["weight"] + step}


@pytest.mark.parametrize("url", [HOME, "hf://buckets/user/bucket/run"])
def test_a_store_saves_loads_and_removes(hub: Hub, url: str) -> None:
    store = opened(url)
    assert store.steps() == []
    for step in range(4):
        store.save(step, moved(step))
    store.tag("best", 2)
    other = opened(url)
    assert other.steps() == [0, 1, 2, 3]
    assert other.describe(3).is_delta
    for step in range(4):
        assert np.array_equal(other.load(step)["weight"], moved(step)["weight"])
    assert not other.verify()
    other.gc(sp.Retention(last=1))
    assert opened(url).steps() == [2, 3]
    assert np.array_equal(store.load(2)["weight"], moved(2)["weight"])
    held = hub.bucket if "buckets" in url else hub.files
    assert not [name for name in held if "locks/" in name]


def test_the_files_of_a_save_come_in_one_commit(hub: Hub) -> None:
    store = opened()
    store.save(0, STATE)
    lock, step, unlock = hub.commits
    assert [name.split("/")[1] for name in step] == ["data", "steps"]
    assert unlock == [f"-{lock[0]}"]
    # What a save that failed held back is not written later.
    with pytest.raises(RuntimeError), files().staged("data/x", [b"x"]):
        raise RuntimeError
    before = len(hub.commits)
    found = files()
    with found.staged("data/x", [b"x"]):
        pass
    assert found.create("steps/y", b"y")
    assert hub.commits[before:] == [["run/steps/y"]]
    found.remove(["steps/y", "data/x", "data/none"])
    assert hub.commits[before + 1 :] == [["-run/steps/y"]]


def test_of_two_writers_one_creates(hub: Hub) -> None:
    """The other commits between the look for the file and the commit."""
    hub.between = lambda: files().create("steps/1", b"theirs")
    assert not files().create("steps/1", b"ours")
    assert files().read("steps/1") == b"theirs"
    assert hub.refused == 1
    # After a commit of another file it tries again.
    hub.between = lambda: files().write("labels", b"x")
    assert files().create("steps/2", b"ours")
    assert hub.refused == 2
    writers = [threading.Thread(target=opened().save, args=(5, moved(n))) for n in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert opened().load(5)["weight"][0, 0] in range(3)
    assert not opened().verify()


def test_an_answer_that_is_lost(hub: Hub) -> None:
    hub.lose_answers = 1
    assert files().create("steps/1", b"ours")
    assert not files().create("steps/1", b"theirs")
    assert files().read("steps/1") == b"ours"


def test_a_lock_that_is_renewed_is_young(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client skips files whose bytes are as they were, so that they would grow old."""
    monkeypatch.setattr("shrinkpoint.store.lock.STALE", 0.0)
    found = files()
    with ObjectLock(found).shared() as lease:
        name = next(f"locks/{name}" for name in found.list("locks"))
        before = found.modified(name)
        lease.renew()
        lease.renew()
        assert found.modified(name) > before
    assert not found.list("locks")


def test_what_does_not_exist_is_refused(hub: Hub) -> None:
    for url in ("hf://datasets/user/none/run", "hf://datasets/user/repo@other/run", "hf://buckets/user/none/run"):
        store = opened(url)
        for use in (store.steps, store.load, lambda store=store: store.save(0, STATE)):
            with pytest.raises((FileNotFoundError, sp.BadArgumentError), match=r"not found|none"):
                use()
    assert type(opened("hf://buckets/user/bucket/run")._files) is HubFiles
