"""Pointer files lead to the step that was saved for them, or to an error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import shrinkpoint as sp
from shrinkpoint.store.local import LocalFiles
from shrinkpoint.trainers.pointers import (
    Pointer,
    WholeSaves,
    drop,
    drop_replaced,
    drop_unreferenced,
    is_shared,
    load_at,
    read_pointer,
    save_at,
    steps_in_use,
    store_of,
)


def state(value: float) -> dict[str, Any]:
    return {"model": {"weight": np.full(500, value)}, "step": value}


def test_files_point_into_one_store_of_deltas(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "store")
    for i in range(4):
        save_at(tmp_path / f"run-{i}" / "p.json", store, state(i))
    assert store.steps() == [0, 1, 2, 3]
    assert all(store.describe(i).is_delta for i in (1, 2, 3))
    for i in range(4):
        assert load_at(tmp_path / f"run-{i}" / "p.json")["step"] == i
    assert list(load_at(tmp_path / "run-2" / "p.json", "model/*")) == ["model"]
    drop(store, [0, 2, 17])
    assert load_at(tmp_path / "run-3" / "p.json")["model"]["weight"][0] == 3
    with pytest.raises(sp.MissingParentError, match=r"points to step 2 of .*store, which has no such checkpoint"):
        load_at(tmp_path / "run-2" / "p.json")


@pytest.mark.parametrize("background", [False, True])
def test_of_gradients_those_of_the_state_are_taken(tmp_path: Path, background: bool) -> None:
    """Of the given gradients only those of arrays in the state are used."""
    rng = np.random.default_rng(0)
    held = {name: rng.standard_normal((100, 200)).astype(np.float32) for name in ("a.weight", "b.weight")}
    grads = {"state_dict": {n: np.abs(w[::-1]).copy() for n, w in held.items()} | {"left.out": np.ones(3, np.float32)}}
    cfg = sp.presets.inshrinkerator(protect=0.05, prune=0.0)
    state, kinds = {"state_dict": held}, dict.fromkeys(held, "linear")
    store = sp.Store(tmp_path / "store", cfg)
    if background:
        saver = WholeSaves(store, background=True)
        saver.save(tmp_path / "p.json", state, grads=grads, kinds=kinds)
        saver.close()
    else:
        save_at(tmp_path / "p.json", store, state, grads=grads, kinds=kinds)
    del grads["state_dict"]["left.out"]
    assert store.read(0).to_bytes() == sp.compress(state, cfg=cfg, grads=grads, kinds=kinds).to_bytes()
    assert store.read(0).to_bytes() != sp.compress(state, cfg=cfg, kinds=kinds).to_bytes()
    save_at(tmp_path / "q.json", store, {"step": 1}, grads=grads)


@pytest.mark.parametrize("spelled", ["memory://{}", "memory:///{}/", "memory://{}/"])
def test_a_store_is_the_same_by_whatever_name(tmp_path: Path, spelled: str) -> None:
    """A step is in use by files that spell the store's URL differently."""
    path, store = tmp_path / "p.json", sp.Store(f"memory://{tmp_path.name}/")
    step = save_at(path, store, state(0)).step
    again = sp.Store(spelled.format(tmp_path.name))
    assert steps_in_use(again, [path]) == {step}
    save_at(path, again, state(1))  # which replaces it
    assert steps_in_use(again, [path]) == set(again.steps()) == {step + 1}


def test_a_file_saved_again_replaces_its_step(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "store")
    for i in range(3):
        save_at(tmp_path / "p.json", store, state(i))
    assert load_at(tmp_path / "p.json")["step"] == 2
    assert len(store.steps()) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.json", "store"]


def test_another_checkpoint_of_that_number_is_not_taken_for_it(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "store")
    save_at(tmp_path / "p.json", store, state(1))
    store.save(0, state(2))
    with pytest.raises(sp.MissingParentError, match="no such checkpoint"):
        load_at(tmp_path / "p.json")


def test_a_step_that_took_the_number_of_a_lost_one_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"  # pytest has a link to `tmp_path` next to it
    store = sp.Store(run / "store")
    for i in range(3):
        save_at(run / f"{i}.json", store, state(i))
    store.drop(2)  # as after a store was restored from a backup
    save_at(run / "2.json", store, state(9))
    assert load_at(run / "2.json")["step"] == 9
    store.drop(2)
    save_at(run / "3.json", store, state(4))
    drop_replaced(run / "2.json", store, read_pointer(run / "2.json"))
    assert load_at(run / "3.json")["step"] == 4


@pytest.mark.parametrize("name", ["run", "lr[0.1]", "a*b?{c,d}"])
@pytest.mark.parametrize("root", ["folder", "memory"])
def test_steps_without_a_folder_are_removed(tmp_path: Path, root: str, name: str) -> None:
    home = f"{tmp_path}/{name}" if root == "folder" else f"memory://unreferenced/{name}"
    store = sp.Store(f"{home}/store")
    for i in range(3):
        save_at(f"{home}/checkpoint-{i}/p.json", store, state(i))
    drop_unreferenced(store, "p.json")
    assert store.steps() == [0, 1, 2]
    fs, path = fsspec.core.url_to_fs(f"{home}/checkpoint-0/p.json")
    fs.rm_file(path)
    drop_unreferenced(store, "p.json")
    assert store.steps() == [1, 2]


def test_pinned_and_tagged_steps_stay(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "store")
    for i in range(3):
        save_at(tmp_path / f"{i}.json", store, state(i))
    store.pin(0)
    store.tag("best", 1)
    drop(store, [0, 1, 2])
    assert store.steps() == [0, 1]


def test_urls_and_moved_folders(tmp_path: Path) -> None:
    store = sp.Store("memory://pointers/store")
    save_at(tmp_path / "p.json", store, state(1))
    save_at("memory://pointers/p.json", store, state(2))
    assert read_pointer(tmp_path / "p.json").store == store.url  # type: ignore[union-attr]
    assert [load_at(tmp_path / "p.json", store=store)["step"], load_at("memory://pointers/p.json")["step"]] == [1, 2]
    save_at(tmp_path / "a" / "x" / "p.json", sp.Store(tmp_path / "a" / "store"), state(3))
    (tmp_path / "a").rename(tmp_path / "b")
    assert load_at(tmp_path / "b" / "x" / "p.json")["step"] == 3


def test_other_files_are_no_pointers(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    good = json.loads(Pointer("store", 1, "ab").to_bytes())
    assert read_pointer(path) is None
    for data in (b"", b"{", b"[1]", b"\xff\xfe", json.dumps({"format": "x"}).encode(), b" " * 70_000, b"[" * 50_000):
        path.write_bytes(data)
        assert read_pointer(path) is None
        with pytest.raises(sp.BadArgumentError, match="not a checkpoint of shrinkpoint"):
            load_at(path)
    versions = ({"version": 0}, {"version": True}, {"version": "1"})
    for change in (
        *versions,
        {"step": "1"},
        {"step": True},
        {"store": None},
        {"store": "a\0b"},
        {"store": "\ud800"},
        {"identity": 3},
    ):
        path.write_text(json.dumps(good | change))
        with pytest.raises(sp.CorruptDataError, match="malformed"):
            read_pointer(path)
    path.write_text(json.dumps({"format": good["format"], "version": 2, "what": "ever"}))
    with pytest.raises(sp.NewerFormatError, match=r"p\.json: a pointer of version 2; this reader knows up to 1"):
        read_pointer(path)
    path.write_text(json.dumps(good | {"step": 10**30}))
    with pytest.raises(sp.MissingParentError):
        load_at(path)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("root", ["folder", "file", "memory"])
def test_a_copy_by_another_name_keeps_its_step(tmp_path: Path, root: str, background: bool) -> None:
    """A copied pointer file keeps its step after the original is replaced or removed."""
    home = {"folder": f"{tmp_path}/", "file": f"file://{tmp_path}/", "memory": f"memory://{tmp_path.name}/"}[root]
    store, fs = sp.Store(f"{home}store", sp.presets.lossless()), fsspec.core.url_to_fs(home)[0]

    def save(value: float) -> None:
        for path in (f"{home}last.ckpt", f"{home}last/p.json"):
            if background:
                saver = WholeSaves(store, background=True)
                saver.save(path, state(value))
                saver.close()
            else:
                save_at(path, store, state(value))

    save(1)
    fs.copy(f"{home}last.ckpt", f"{home}mine.ckpt")
    fs.makedirs(f"{home}best", exist_ok=True)
    fs.copy(f"{home}last/p.json", f"{home}best/p.json")
    save(2)
    save(3)
    assert len(store.steps()) == 4, "the two that were copied, and the newest two"
    for kept, value in (("mine.ckpt", 1), ("best/p.json", 1), ("last.ckpt", 3), ("last/p.json", 3)):
        assert load_at(f"{home}{kept}")["step"] == value
    fs.rm(f"{home}mine.ckpt")
    assert not is_shared(f"{home}mine.ckpt", Pointer(store.url, 0, ""))


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_a_link_from_elsewhere_is_followed(tmp_path: Path, linked: str) -> None:
    save_at(tmp_path / "run" / "a" / "p.json", sp.Store(tmp_path / "run" / "store"), state(1))
    (tmp_path / "far" / "off").mkdir(parents=True)
    link = tmp_path / "far" / "off" / "best"
    link.symlink_to(tmp_path / "run" / "a" / ("p.json" if linked == "file" else ""))
    assert load_at(link if linked == "file" else link / "p.json")["step"] == 1


def test_a_pointer_leads_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store elsewhere is opened only if the caller gives it; reading changes none."""
    private = sp.Store(tmp_path / "home" / "private")
    identity = private.save(1, state(1)).checkpoint.identity
    path = tmp_path / "downloads" / "checkpoint-1" / "p.json"
    (path.parent / "below").mkdir(parents=True)
    (path.parent / "linked").symlink_to(private.url)
    (path.parent.parent / "linked").symlink_to(private.url)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(path.parent)
    opened: list[str] = []
    real = sp.Store.__init__
    monkeypatch.setattr(
        sp.Store, "__init__", lambda self, url, *more: (opened.append(str(url)), real(self, url, *more))[1]
    )
    names = (
        *(
            "http://127.0.0.1:9/x",
            "s3://bucket/run",
            "memory://run",
            "ftp://127.0.0.1/x",
            "zip::http://127.0.0.1:9/x.zip",
        ),
        *(
            private.url,
            f"file://{private.url}",
            f"local://{private.url}",
            "../../home/private",
            "below/../../../home/private",
        ),
        *("linked", "../linked", "below/../linked", "..", ".", "", "/", "dir::home"),
    )
    for name in names:
        path.write_bytes(Pointer(name, 1, identity).to_bytes())
        for given in (path, "p.json", f"file://{path}"):
            with pytest.raises(sp.BadArgumentError, match="neither below nor next to"):
                load_at(given)
        assert not is_shared(path, Pointer(name, 1, identity))
        assert steps_in_use(sp.Store(tmp_path / "other"), [path]) == set()
    assert set(opened) == {str(tmp_path / "other")}
    path.write_bytes(Pointer("~/private", 1, identity).to_bytes())
    with pytest.raises(sp.MissingParentError, match="checkpoint-1/~/private"):
        load_at("p.json")
    assert load_at(path, store=private)["step"] == 1
    assert private.restores() == 1, "of a store that the caller knows"
    near = sp.Store(tmp_path / "downloads" / "near")
    identity = near.save(1, state(2)).checkpoint.identity
    before = sorted(p.name for p in Path(near.url).rglob("*"))
    path.write_bytes(Pointer("../near", 1, identity).to_bytes())
    assert load_at(path)["step"] == 2
    assert sorted(p.name for p in Path(near.url).rglob("*")) == before


@pytest.mark.parametrize("folder", ["s3://bucket", "s3://bucket/run/7", "memory://run/7", "http://host/a"])
@pytest.mark.parametrize("name", ["{}/../../../x", "s3://other", "http://other/a", "memory://x/y", "../../../x"])
def test_a_pointer_at_a_url_leads_nowhere_else(folder: str, name: str) -> None:
    with pytest.raises(sp.BadArgumentError, match="neither below nor next to"):
        store_of(f"{folder}/p.json", Pointer(name.format(folder), 1, ""))


def test_beside_a_pointer_that_is_not_readable_nothing_is_removed(tmp_path: Path) -> None:
    store, path = sp.Store(tmp_path / "store"), tmp_path / "p.json"
    first = save_at(path, store, state(1))
    (tmp_path / "q.json").write_bytes(first.to_bytes().replace(b'"version": 1', b'"version": 2'))
    save_at(path, store, state(2))
    assert load_at(path)["step"] == 2
    assert store.steps() == [0, 1]


def test_a_pointer_is_durable_before_the_step_it_named_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, path = sp.Store(tmp_path / "store"), tmp_path / "new" / "folders" / "p.json"
    done: list[str] = []

    def noted(call: str, real: Any) -> Any:
        def then(*args: Any) -> Any:
            target = os.readlink(f"/proc/self/fd/{args[0]}") if call == "fsync" else args[-1]
            done.append(f"{call} {os.path.relpath(os.fspath(target), tmp_path)}")
            return real(*args)

        return then

    for call in ("fsync", "replace", "unlink"):
        monkeypatch.setattr(os, call, noted(call, getattr(os, call)))
    save_at(path, store, state(1))
    for folder in (".", "new"):  # where a folder was made, its name is made durable too
        assert f"fsync {folder}" in done
    del done[:]
    save_at(path, store, state(2))
    renamed = done.index("replace new/folders/p.json")
    removed = next(k for k, what in enumerate(done) if k > renamed and what.startswith("unlink store/steps"))
    assert "fsync new/folders" in done[renamed:removed]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("lands", [False, True])
def test_a_pointer_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool, lands: bool
) -> None:
    """If a pointer cannot be written, its step is removed unless the file names it."""
    store, path = sp.Store(tmp_path / "store"), tmp_path / "p.json"
    save_at(path, store, state(1))
    real = LocalFiles.write

    def full(self: LocalFiles, name: str, data: bytes) -> None:
        if name == "p.json":
            if lands:
                real(self, name, data)
            raise OSError(28, "No space left on device", str(path))
        real(self, name, data)

    def save() -> None:
        if not background:
            save_at(path, store, state(2))
            return
        saver = WholeSaves(store, background=True)
        saver.save(path, state(2))
        saver.close()

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "write", full)
        with pytest.raises((OSError, sp.ShrinkpointError), match="No space left"):
            save()
    assert load_at(path)["step"] == 1 + lands
    assert store.steps() == ([0, 1] if lands else [0])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["p.json", "store"]
