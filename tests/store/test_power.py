"""Power losses at any instant keep saved steps and leave only readable ones."""

from __future__ import annotations

import contextlib
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.store import local
from shrinkpoint.store.retention import Retention
from tests.store.common import fill, lossless, manifest_path, same, state
from tests.store.power import Disk, Killed


def check(root: Path, must: set[int], may: set[int]) -> None:
    """Check that all steps are readable, `must` are there, and only `must` and `may`."""
    store = sp.Store(root, lossless())
    steps = store.steps()
    assert must <= set(steps) <= must | may
    assert store.verify() == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in {*steps[-2:], *steps[:1]}:
            assert same(store.load(step, count=False), step)
    store.gc()
    assert store.steps() == steps
    assert store.verify() == {}
    store.save(99, state(99))


def every_image(disk: Disk, scratch: Path, must: Callable[[str], set[int]], may: set[int]) -> int:
    for number, (what, image) in enumerate(disk.images):
        target = scratch / str(number)
        image.lay_out(disk.root, target)
        try:
            check(target / "run", must(what), may)
        except Exception as e:
            e.add_note(f"power lost at: {what}; files: {[Path(n).name for n, _ in image.files]}")
            raise
        shutil.rmtree(target)
    return len(disk.images)


def test_saves(tmp_path: Path) -> None:
    """Every step is durable once `save` has returned, with its folders."""
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")
    store = sp.Store(tmp_path / "disk" / "run", lossless())
    saved: set[int] = set()
    count = 0
    for step in range(3):
        disk.images.clear()
        with disk.recording():
            fill(store, step)
        must = set(saved)
        count += every_image(disk, tmp_path / "images", lambda _, must=must: must, {step})
        saved.add(step)
        disk.images.clear()
        disk.event("saved")
        every_image(disk, tmp_path / "images", lambda _: saved, set())
    assert count > 20


@pytest.mark.parametrize(
    ("act", "drops"),
    [
        (lambda store: store.compact(1.0), set()),
        (lambda store: store.gc(Retention(last=2)), {0, 1, 2}),
        (lambda store: (store.compact(2.0), store.gc(Retention(last=2))), {0, 1, 2}),
        (lambda store: sp.Store(store.url, store.cfg).save(4, state(4)), set()),
    ],
    ids=["compact to bases", "gc", "compact and gc", "save again"],
)
def test_housekeeping(act: Callable[[sp.Store], object], drops: set[int], tmp_path: Path) -> None:
    run = tmp_path / "disk" / "run"
    store = fill(sp.Store(run, lossless()), *range(5))
    disk = Disk(tmp_path / "disk")
    with disk.recording():
        act(store)
    assert every_image(disk, tmp_path / "images", lambda _: set(range(5)) - drops, drops) > 5


def test_labels(tmp_path: Path) -> None:
    """Each label is durable once its call returns, and complete or missing before."""
    run = tmp_path / "disk" / "run"
    store = fill(sp.Store(run, lossless()), *range(5))
    acts: list[Callable[[], object]] = [
        lambda: store.rate(4, 1.0),
        lambda: store.pin(3),
        lambda: store.tag("best", 2),
        lambda: store.tag("best", 4),
        lambda: store.unpin(3),
        lambda: store.load(1),
        lambda: store.untag("best"),
    ]

    def labels(url: Path | str) -> tuple[object, ...]:
        found = sp.Store(url)
        return found.describe(4).metric, found.pins(), found.tags(), found.restores()

    for number, act in enumerate(acts):
        disk, earlier = Disk(tmp_path / "disk"), labels(run)
        with disk.recording():
            act()
        later = labels(run)
        assert later != earlier
        disk.images.append(("after", disk.images[-1][1]))
        for place, (what, image) in enumerate(disk.images):
            target = tmp_path / f"{number}-{place}"
            image.lay_out(disk.root, target)
            assert labels(target / "run") in ((later,) if what in ("end", "after") else (earlier, later)), what
            check(target / "run", set(range(5)), set())
            shutil.rmtree(target)


def test_a_former_generation_does_not_come_back(tmp_path: Path) -> None:
    """Dropping a step with two manifests does not uncover the older one."""
    run = tmp_path / "disk" / "run"
    store = fill(sp.Store(run, lossless(base_every=1)), 0, 1)
    former = manifest_path(run, 1)
    old = former.read_bytes()
    store.save(1, state(100))
    former.write_bytes(old)
    disk = Disk(tmp_path / "disk")
    with disk.recording():
        store.drop(1)
    for number, (_, image) in enumerate(disk.images):
        image.lay_out(disk.root, tmp_path / str(number))
        found = sp.Store(tmp_path / str(number) / "run")
        assert found.steps() == [0] or same(found.load(1), 100)
    assert len(disk.images) > 2
    assert sp.Store(run).steps() == [0]


@pytest.mark.parametrize(
    ("act", "kept"),
    [
        (lambda store: fill(store, 0), lambda store: store.steps() == [0] and same(store.load(0), 0)),
        (lambda store: fill(store, 0).copy(f"{store.url}-b"), lambda store: sp.Store(f"{store.url}-b").steps() == [0]),
        (lambda store: fill(store, 0).tag("best", 0), lambda store: store.tags() == {"best": 0}),
        (lambda store: fill(store, 0, 1).drop_after(0), lambda store: store.steps() == [0]),
        (
            lambda store: sp.Publisher(store.url).publish(1, {"w": torch.ones(8)}),
            lambda store: sp.Subscriber(store.url, {"w": torch.zeros(8)}).update() == 1,
        ),
    ],
    ids=["save", "copy", "tag", "drop", "publish"],
)
def test_a_call_repeated_after_a_kill(
    act: Callable[[sp.Store], object], kept: Callable[[sp.Store], bool], tmp_path: Path
) -> None:
    """A call that returns has made durable what a killed process left of the same call."""
    calls, done, run = 0, False, Path("runs/all/run")
    while not done:
        home = tmp_path / str(calls)
        home.mkdir()
        disk = Disk(home, calls_left=calls)
        with contextlib.suppress(Killed), disk.recording():
            act(sp.Store(home / run, lossless()))
            done = True
        disk.calls_left = math.inf
        with disk.recording():
            act(sp.Store(home / run, lossless()))
        disk.images.clear()
        disk.event("returned")
        for number, (_, image) in enumerate(disk.images):
            image.lay_out(home, tmp_path / "image")
            assert kept(sp.Store(tmp_path / "image" / run)), f"killed before call {calls}, image {number}"
            shutil.rmtree(tmp_path / "image")
        calls += 1
    assert calls > 20


@pytest.mark.parametrize("forgotten", ["file", "folder"])
def test_that_a_forgotten_sync_is_noticed(forgotten: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test itself fails if either sync is left out."""
    (tmp_path / "disk" / "run").mkdir(parents=True)
    if forgotten == "folder":
        monkeypatch.setattr(local, "sync_folder", lambda folder: None)
    disk = Disk(tmp_path / "disk")
    with disk.recording():
        if forgotten == "file":
            real = local.os.fsync

            def fsync(fd: int) -> None:
                if Path(disk.fds[fd]).is_dir():
                    real(fd)

            local.os.fsync = fsync  # type: ignore[assignment]
        fill(sp.Store(tmp_path / "disk" / "run", lossless()), 0)
    last = disk.images[-1][1]
    last.lay_out(disk.root, tmp_path / "image")
    found = sp.Store(tmp_path / "image" / "run")
    assert found.steps() == [] or found.verify() != {}
