"""Ranks publish one version, each its shards; receivers take theirs from any layout."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.errors import BadArgumentError, CorruptDataError, MissingParentError
from shrinkpoint.store.files import StoreWarning
from shrinkpoint.trainers.publishing import ranks as ranks_module
from shrinkpoint.trainers.publishing.checkpoint_folder import CheckpointFolder
from shrinkpoint.trainers.publishing.delta_folders import DeltaFolders
from shrinkpoint.trainers.publishing.layout import Version, version_name
from shrinkpoint.trainers.publishing.ranks import Counted
from shrinkpoint.trainers.publishing.subscriber import HostCopy

from .test_publishing import same, step

State = dict[str, torch.Tensor]
SHAPES = {"up": (48, 64), "down": (64, 48), "experts": (4, 32, 20), "norm": (64,), "scale": (), "steps": (7,)}
DTYPES = {"steps": torch.int64, "experts": torch.float8_e4m3fn, "norm": torch.float32, "scale": torch.float32}


def model(seed: int = 0) -> State:
    """A small model: matrices, experts in 8 bits, a norm, a scalar and integers."""
    g = torch.Generator().manual_seed(seed)
    return {n: (9 * torch.randn(s, generator=g)).to(DTYPES.get(n, torch.bfloat16)) for n, s in SHAPES.items()}


def split(name: str, rank: int, count: int, layout: str) -> tuple[slice, ...] | None:
    """The slices of a rank: rows or columns, uneven; small tensors are divided by name."""
    shape = SHAPES[name]
    axis = 0 if layout == "rows" else 1
    if len(shape) < 2:
        return tuple(slice(0, n) for n in shape) if sorted(SHAPES).index(name) % count == rank else None
    size = -(-shape[axis] // count)
    start, stop = min(rank * size, shape[axis]), min((rank + 1) * size, shape[axis])
    if start == stop:
        return None
    return tuple(slice(start, stop) if i == axis else slice(0, n) for i, n in enumerate(shape))


def held(state: State, rank: int, count: int, layout: str) -> tuple[State, dict[str, tuple[slice, ...]]]:
    """The tensors of a rank, and their slices of the whole ones."""
    where = {n: box for n in SHAPES if (box := split(n, rank, count, layout)) is not None}
    return {n: state[n][box].clone().contiguous() if box else state[n].clone() for n, box in where.items()}, where


class Trainer:
    """Some publishers, one for each part, that run in threads."""

    def __init__(self, url: Path, count: int, layout: str = "rows", run: str = "run", **how: Any) -> None:
        self.count, self.layout, timeout = count, layout, how.pop("timeout", 60.0)
        self.parts = [sp.Publisher(url, ranks=Counted(i, count, run, timeout), **how) for i in range(count)]

    def publish_part(self, rank: int, version: int, state: State) -> Any:
        mine, where = held(state, rank, self.count, self.layout)
        shards = {n: (n, SHAPES[n], box) for n, box in where.items()}
        return self.parts[rank].publish(version, mine, shards=shards)

    def publish(self, version: int, state: State) -> list[Any]:
        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(lambda rank: self.publish_part(rank, version, state), range(self.count)))


def receivers(url: Path, count: int, layout: str, **how: Any) -> list[tuple[State, sp.Subscriber]]:
    found = []
    for rank in range(count):
        mine, where = held({n: torch.zeros_like(t) for n, t in model().items()}, rank, count, layout)
        select = None if count == 1 else {n: (n, box) for n, box in where.items()}
        found.append((mine, sp.Subscriber(url, mine, select=select, **how)))
    return found


def right(found: list[tuple[State, sp.Subscriber]], state: State, layout: str) -> bool:
    return all(same(mine, held(state, rank, len(found), layout)[0]) for rank, (mine, _) in enumerate(found))


@pytest.mark.parametrize(
    "layouts", [("rows", "rows"), ("rows", "columns"), ("columns", "rows"), ("columns", "columns")]
)
@pytest.mark.parametrize("serving", [1, 2, 4])
@pytest.mark.parametrize("training", [1, 2, 4])
def test_any_layout_to_any_layout(tmp_path: Path, training: int, serving: int, layouts: tuple[str, str]) -> None:
    now = model()
    trainer = Trainer(tmp_path, training, layouts[0], sliced=True, base_every=3)
    found = receivers(tmp_path, serving, layouts[1])
    for version in range(1, 6):
        done = trainer.publish(version, now)
        assert len({(d.version, d.nbytes, d.base_bytes) for d in done}) == 1
        assert bool(done[0].base_bytes) == (version in (1, 4))
        if version != 2:  # its delta and the next one become one patch
            assert [s.update(version=version) for _, s in found] == [version] * serving
            assert right(found, now, layouts[1])
            assert all(s.last is not None and s.last.from_base == (version == 1) for _, s in found)
        now = step(now, 0.05, version)
    late = receivers(tmp_path, serving, layouts[1])
    assert [s.update() for _, s in late] == [5] * serving
    assert all(s.last is not None and s.last.links == 2 for _, s in late)  # the base of version 4 and a delta
    assert not list((tmp_path / "parts").glob("00000000000[1-4]-*"))


def test_whole_receivers_do_not_need_sliced_deltas(tmp_path: Path) -> None:
    """Classes of magnitudes need the whole shard, not the whole tensor."""
    now = model()
    trainer = Trainer(tmp_path, 2)
    whole, halves, crossing = (receivers(tmp_path, *how) for how in ((1, "rows"), (2, "rows"), (2, "columns")))
    for version in (1, 2):
        trainer.publish(version, now)
        for found in (whole, halves):
            assert {s.update() for _, s in found} == {version}
            assert right(found, now, "rows")
        with pytest.raises(BadArgumentError, match=r"a slice of .*up\[0:24, 0:64\] is here, .*sliced=True"):
            crossing[0][1].update()
        now = step(now, 0.05, version)
    again = sp.Subscriber(tmp_path, whole[0][0])
    assert again.version == 2  # by the hashes of the shards


def test_a_trainer_may_go_on_in_another_layout(tmp_path: Path) -> None:
    """A restart with other ranks reads its shards back, and receivers follow by deltas."""
    now, found = model(), receivers(tmp_path, 2, "columns")
    for version, (count, layout) in enumerate([(1, "rows"), (4, "rows"), (2, "columns"), (2, "rows")], 1):
        done = Trainer(tmp_path, count, layout, run=f"run{version}", sliced=True).publish(version, now)
        assert (done[0].base_bytes > 0) == (version == 1)
        if version != 3:
            assert {s.update() for _, s in found} == {version}
            assert right(found, now, "columns")
        now = step(now, 0.02, version)


@pytest.mark.parametrize("share", [0.004, 0.5])
def test_a_chain_of_several_layouts_is_one_patch(tmp_path: Path, share: float) -> None:
    """Each delta is against values that the one before gives, sparse or dense, of other shards."""
    now, found = model(), receivers(tmp_path, 1, "rows")
    for version, count in ((1, 4), (2, 2), (3, 1)):  # ranks that hold whole shards of the version before
        Trainer(tmp_path, count, "columns", run=f"run{version}").publish(version, now)
        if version != 2:
            assert found[0][1].update() == version
            assert right(found, now, "rows")
        now = step(now, share, version)
    last = found[0][1].last
    assert last is not None
    assert (last.links, last.from_base) == (2, False)


def test_receivers_read_only_what_they_hold(tmp_path: Path) -> None:
    """A rank of four reads a quarter of the files of four ranks, and a part of the file of one."""
    now = {"w": torch.randn(4096, 2048)}
    for count in (1, 4):
        url = tmp_path / str(count)
        parts = [sp.Publisher(url, ranks=Counted(i, count, "run"), sliced=True) for i in range(count)]

        def publish(i: int, parts: Any = parts, count: int = count) -> Any:
            box = (slice(i * 4096 // count, (i + 1) * 4096 // count), slice(0, 2048))
            return parts[i].publish(1, {"w": now["w"][box]}, shards={"w": ("w", (4096, 2048), box)})

        with ThreadPoolExecutor(count) as pool:
            total = next(iter(pool.map(publish, range(count)))).nbytes
        mine = {"w": torch.zeros(1024, 2048)}
        subscriber = sp.Subscriber(url, mine, select={"w": ("w", (slice(1024, 2048), slice(0, 2048)))})
        assert subscriber.update() == 1
        assert torch.equal(mine["w"], now["w"][1024:2048])
        assert subscriber.last is not None
        assert subscriber.last.nbytes < total * (0.3 if count == 4 else 0.6)


def test_memory_of_a_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shrinkpoint.trainers.publishing import publisher as publishing

    monkeypatch.setattr(publishing, "_FILE", 1 << 10)
    now = {str(i): torch.randn(100) for i in range(6)} | {"large": torch.randn(3000)}
    served = {name: torch.zeros_like(t) for name, t in now.items()}
    publisher, subscriber = sp.Publisher(tmp_path), sp.Subscriber(tmp_path, served)
    for version in (1, 2):
        publisher.publish(version, now)
        files = Version.from_bytes((tmp_path / version_name(version)).read_bytes(), version).files
        assert [len(file.shards) for file in files] == [2, 2, 2, 1]
        assert subscriber.update() == version
        assert same(served, now)
        now = step(now, 0.01, version)


def test_a_name_that_looks_like_a_shard(tmp_path: Path) -> None:
    now = {"w": torch.randn(6), "w[0:6]": torch.randn(3), "v": torch.randn(4, 2)}
    shards: Any = {"w": ("w", (12,), (slice(0, 6),))}
    first, second = (sp.Publisher(tmp_path, ranks=Counted(i, 2, "run")) for i in range(2))
    with ThreadPoolExecutor(2) as pool:
        done = pool.submit(first.publish, 1, now, shards=shards)
        second.publish(1, {"w": torch.ones(6)}, shards={"w": ("w", (12,), (slice(6, 12),))})
        done.result()
    served = {"w": torch.zeros(12), "w[0:6]": torch.zeros(3), "v": torch.zeros(4, 2)}
    assert sp.Subscriber(tmp_path, served).update() == 1
    assert same(served, {**now, "w": torch.cat([now["w"], torch.ones(6)])})


def test_masters_are_converted_one_by_one(tmp_path: Path) -> None:
    masters = {"w": torch.randn(300, 40), "steps": torch.arange(5)}
    publisher = sp.Publisher(tmp_path, dtype=torch.bfloat16)
    served = {"w": torch.zeros(300, 40, dtype=torch.bfloat16), "steps": torch.zeros(5, dtype=torch.int64)}
    subscriber = sp.Subscriber(tmp_path, served)
    for version in (1, 2):
        done = publisher.publish(version, masters)
        assert done.raw_bytes == 2 * 300 * 40 + 40
        assert subscriber.update() == version
        assert same(served, {"w": masters["w"].bfloat16(), "steps": masters["steps"]})
        masters["w"] += 1e-4
    assert sum(kept.nbytes for _, kept in publisher._kept.values()) == done.raw_bytes


def test_prepare_while_the_model_serves(tmp_path: Path) -> None:
    now = model()
    publisher, served = sp.Publisher(tmp_path), {n: t.clone() for n, t in now.items()}
    publisher.publish(1, now)
    subscriber, before = sp.Subscriber(tmp_path, served), now
    assert subscriber.prepare() == subscriber.commit() == 1
    now = step(now, 0.05, 1)
    publisher.publish(2, now)
    lock = threading.Lock()
    assert subscriber.prepare() == 2
    assert same(served, before)
    assert subscriber.version == 1
    assert subscriber.commit(lock=lock) == 2
    assert same(served, now)
    last = subscriber.last
    assert last is not None
    assert last.prepare_seconds > 0 < last.pause_seconds
    publisher.publish(3, step(now, 0.05, 2))
    subscriber.prepare()
    served["up"][0] += 1
    with pytest.raises(BadArgumentError, match="changed since the version was prepared"):
        subscriber.commit()
    assert subscriber.commit() == 2  # nothing is prepared any more
    assert subscriber.update() == 3
    other = {n: torch.zeros_like(t) for n, t in now.items()}
    subscriber = sp.Subscriber(tmp_path, other)
    other["up"].fill_(7)  # loaded with something else, before the first version
    assert subscriber.prepare() == subscriber.commit() == 3
    assert same(other, step(now, 0.05, 2))


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("change", ["new", "gone", "shape"])
def test_tensors_of_one_rank_that_change(tmp_path: Path, change: str, restarted: bool) -> None:
    """Another rank goes on with deltas; receivers take the base of the tensors that changed."""
    states = [{"a": torch.randn(40_000)}, {"b": torch.randn(4000), "c": torch.randn(50, 20), "e": torch.zeros(0, 3)}]

    def publish(parts: list[sp.Publisher], version: int) -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda i: parts[i].publish(version, states[i]), range(2)))

    parts = [sp.Publisher(tmp_path, ranks=Counted(i, 2, "one")) for i in range(2)]
    publish(parts, 1)
    if change == "gone":
        del states[1]["c"]
    else:
        states[1] |= {"new": {"d": torch.randn(7), "f": torch.zeros(0)}, "shape": {"c": torch.randn(60, 20)}}[change]
    if restarted:
        parts = [sp.Publisher(tmp_path, ranks=Counted(i, 2, "two")) for i in range(2)]
    for version in (2, 3):
        states = [step(own, 0.001, version) for own in states]
        publish(parts, version)
    served = {n: torch.zeros_like(t) for own in states for n, t in own.items()}
    assert sp.Subscriber(tmp_path, served).update() == 3
    assert same(served, {**states[0], **states[1]})
    assert not Version.from_bytes((tmp_path / version_name(2)).read_bytes(), 2).has_base


# ---------------------------------------------------------------------- bad input


def failures(trainer: Trainer, calls: list[tuple[int, State]]) -> list[Exception | None]:
    """What the parts raise if each publishes its own version and state."""

    def one(rank: int) -> Exception | None:
        try:
            trainer.publish_part(rank, *calls[rank])
        except sp.ShrinkpointError as e:
            return e
        return None

    with ThreadPoolExecutor(trainer.count) as pool:
        return list(pool.map(one, range(trainer.count)))


def test_ranks_at_different_versions(tmp_path: Path) -> None:
    """The one behind gets an error; the one ahead waits for it."""
    now, trainer = model(), Trainer(tmp_path, 2, timeout=0.5)
    trainer.publish(1, now)
    behind, ahead = failures(trainer, [(2, now), (3, now)])
    assert "part 1 of 2 is at version 3; this process publishes nothing" in str(behind)
    assert "they did not arrive in 0.5 s" in str(ahead)
    assert trainer.parts[0].newest == 1
    with pytest.raises(BadArgumentError, match="publish it as 4 or higher"):
        trainer.publish_part(1, 3, now)
    now = step(now, 0.05, 1)
    assert trainer.publish(4, now)[0].base_bytes == 0
    served = {n: torch.zeros_like(t) for n, t in now.items()}
    assert sp.Subscriber(tmp_path, served).update() == 4
    assert same(served, now)


def test_a_part_that_is_late_and_one_that_fails(tmp_path: Path) -> None:
    now, trainer = model(), Trainer(tmp_path, 2, timeout=0.02)
    with pytest.raises(sp.ShrinkpointError, match=r"parts of version 1 are missing: .*-1-of-2-run.*0\.02 s"):
        trainer.publish_part(0, 1, now)
    with pytest.raises(sp.ShrinkpointError, match=r"rank 0: it gave up: .*0\.02 s"):
        trainer.publish_part(1, 1, now)
    trainer = Trainer(tmp_path, 2, run="patient")
    trainer.publish(1, now)
    bad = {n: t.to_sparse() if n == "up" else t for n, t in now.items()}
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(trainer.parts[0].publish, 2, bad), pool.submit(trainer.publish_part, 1, 2, now)]
        first, second = (result.exception() for result in results)
    assert isinstance(first, BadArgumentError)
    assert "rank 0: BadArgumentError: state: up has layout" in str(second)
    now = step(now, 0.05, 1)
    assert trainer.publish(3, now)[0].base_bytes == 0
    served = {n: torch.zeros_like(t) for n, t in now.items()}
    assert sp.Subscriber(tmp_path, served).update() == 3
    assert same(served, now)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda mine, shards: [d.pop("up") for d in (mine, shards)], "leave a hole"),
        (lambda mine, shards: shards.update(up=("up", (48, 64), (slice(23, 47), slice(0, 64)))), "overlap"),
        (lambda mine, shards: shards.update(up=("up", (49, 64), (slice(24, 48), slice(0, 64)))), "different tensors"),
        (lambda mine, shards: mine.update(up=mine["up"].float()), "different tensors"),
        (lambda mine, shards: mine.update(new=torch.ones(3)), None),
    ],
)
def test_layouts_that_do_not_fit(tmp_path: Path, change: Callable[[State, Any], None], message: str | None) -> None:
    now, trainer = model(), Trainer(tmp_path, 2)
    mine, where = held(now, 1, 2, "rows")
    shards: Any = {n: (n, SHAPES[n], box) for n, box in where.items()}
    change(mine, shards)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(trainer.publish_part, 0, 1, now)
        second = pool.submit(trainer.parts[1].publish, 1, mine, shards=shards)
        for result in (first, second):
            if message is None:
                result.result()
                continue
            error = result.exception()
            assert isinstance(error, BadArgumentError)
            assert message in str(error)
    assert (trainer.parts[0].newest is None) == (message is not None)


def test_two_trainers_do_not_mix(tmp_path: Path) -> None:
    """Of two trainers that publish one version at the same time, one fails; nothing is mixed."""
    first, second = model(0), model(1)
    trainers = [Trainer(tmp_path, 2, run="a"), Trainer(tmp_path, 2, run="b")]
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(t.publish, 1, s) for t, s in zip(trainers, (first, second), strict=True)]
        errors = [r.exception() for r in results]
    assert sorted(type(e).__name__ for e in errors if e is not None) in (["PublishConflictError"], ["BadArgumentError"])
    served = {n: torch.zeros_like(t) for n, t in first.items()}
    assert sp.Subscriber(tmp_path, served).update() == 1
    assert same(served, second if errors[0] is not None else first)
    winner, loser = trainers[errors[0] is not None], trainers[errors[0] is None]
    winner.publish(2, first)
    assert any(isinstance(e, (BadArgumentError, sp.PublishConflictError)) for e in failures(loser, [(2, second)] * 2))


def killed(url: str, when: str) -> None:
    trainer = Trainer(Path(url), 2, run="killed")
    if when == "before the part":
        ranks_module.sealed = lambda *_: os._exit(9)  # type: ignore[assignment]
    else:
        share = ranks_module.InStore._names
        ranks_module.InStore._names = lambda self: os._exit(9) if self._written else share(self)  # type: ignore[method-assign]
    trainer.publish_part(1, 2, step(model(), 0.05, 1))


@pytest.mark.parametrize("when", ["before the part", "after the part"])
def test_a_rank_that_is_killed(tmp_path: Path, when: str) -> None:
    """Before its part nothing is published; after it the others complete the version."""
    now, served = model(), {n: torch.zeros_like(t) for n, t in model().items()}
    Trainer(tmp_path, 2, run="first").publish(1, now)
    subscriber = sp.Subscriber(tmp_path, served)
    subscriber.update()
    worker = multiprocessing.get_context("spawn").Process(target=killed, args=(str(tmp_path), when))
    worker.start()
    worker.join(120)
    assert worker.exitcode == 9
    other, later = Trainer(tmp_path, 2, run="killed", timeout=0.02), step(now, 0.05, 1)
    if when == "before the part":
        with pytest.raises(sp.ShrinkpointError, match="-1-of-2-killed"):
            other.publish_part(0, 2, later)
        assert subscriber.update() == 1
        assert same(served, now)
        Trainer(tmp_path, 2, run="restarted").publish(2, step(now, 0.05, 7))  # never with the part of the killed run
        assert subscriber.update() == 2
        assert same(served, step(now, 0.05, 7))
    else:
        other.publish_part(0, 2, later)
        assert subscriber.update() == 2
        assert same(served, later)


@pytest.mark.parametrize("what", ["missing", "cut", "flipped", "of another version"])
def test_files_of_one_rank_that_are_damaged(tmp_path: Path, what: str) -> None:
    now, trainer = model(), Trainer(tmp_path, 2)
    trainer.publish(1, now)
    found = receivers(tmp_path, 1, "rows")
    found[0][1].update()
    later = step(now, 0.05, 1)
    trainer.publish(2, later)
    files = Version.from_bytes((tmp_path / version_name(2)).read_bytes(), 2).files
    path = next((tmp_path / "data").glob(f"*-d-{str(files[1].delta)[:16]}.spt"))
    blob = path.read_bytes()
    if what == "missing":
        path.unlink()
    elif what == "of another version":
        path.write_bytes(next((tmp_path / "data").glob("000000000001-b-*")).read_bytes())
    else:
        path.write_bytes(blob[:-1] if what == "cut" else blob[:-1] + bytes([blob[-1] ^ 1]))
    with pytest.warns(StoreWarning, match="version 2 cannot be read, and the model is at 1"):
        assert found[0][1].update() == 1
    assert right(found, now, "rows")
    with pytest.raises((CorruptDataError, MissingParentError)):
        receivers(tmp_path, 1, "rows")[0][1].update(version=2)
    path.write_bytes(blob)
    assert found[0][1].update() == 2
    assert right(found, later, "rows")


def test_a_version_with_the_file_of_another_one(tmp_path: Path) -> None:
    """A manifest that mixes the files of two versions is refused by the parent's identity."""
    now, trainer = model(), Trainer(tmp_path, 2)
    for version in (1, 2, 3):
        trainer.publish(version, now)
        now = step(now, 0.05, version)
    found = receivers(tmp_path, 1, "rows")
    found[0][1].update(version=2)
    second, third = (Version.from_bytes((tmp_path / version_name(v)).read_bytes(), v) for v in (2, 3))
    mixed = replace(third, files=(second.files[0], third.files[1]))
    (tmp_path / version_name(3)).write_bytes(mixed.to_bytes())
    for path in (tmp_path / "data").glob("000000000002-d-*"):
        (tmp_path / "data" / path.name.replace("02-d", "03-d")).write_bytes(path.read_bytes())
    with pytest.raises(CorruptDataError, match="not a delta against the version before it"):
        found[0][1].update(version=3)


def test_a_receiver_of_another_model(tmp_path: Path) -> None:
    Trainer(tmp_path, 2).publish(1, model())
    for change in (
        {"up": torch.zeros(48, 63)},
        {"norm": torch.zeros(64, dtype=torch.float16)},
        {"extra": torch.zeros(2)},
    ):
        mine = {n: torch.zeros_like(t) for n, t in model().items()} | change
        with pytest.raises(BadArgumentError, match="does not fit the model; nothing was changed"):
            sp.Subscriber(tmp_path, mine).update()
        assert not any(t.float().any() for t in mine.values())
        if "extra" not in change:
            assert HostCopy(tmp_path).changes() is None


def test_signatures(tmp_path: Path) -> None:
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    private, other = ed25519.Ed25519PrivateKey.from_private_bytes(b"k" * 32), b"o" * 32
    public = private.public_key()
    now = model()
    trainer = Trainer(tmp_path / "signed", 2, key=b"k" * 32)
    for version in (1, 2):
        trainer.publish(version, now)
    sp.Publisher(tmp_path / "plain").publish(1, now)
    for key in (public, public.public_bytes_raw()):
        found = receivers(tmp_path / "signed", 1, "rows", key=key)
        assert found[0][1].update() == 2
        assert right(found, now, "rows")
    assert receivers(tmp_path / "signed", 1, "rows")[0][1].update() == 2  # without a key signatures are not checked
    with pytest.raises(CorruptDataError, match="it is not signed, and a key is given"):
        receivers(tmp_path / "plain", 1, "rows", key=public)[0][1].update()
    wrong = ed25519.Ed25519PrivateKey.from_private_bytes(other).public_key()
    for follow in (
        lambda: receivers(tmp_path / "signed", 1, "rows", key=wrong)[0][1].update(),
        lambda: HostCopy(tmp_path / "signed", key=wrong),
        lambda: CheckpointFolder(tmp_path / "signed", tmp_path / "folder", key=wrong),
        lambda: DeltaFolders(tmp_path / "signed", tmp_path / "folders", key=wrong),
    ):
        with pytest.raises(CorruptDataError, match="its signature is not of the key"):
            follow()
    for bad in (b"short", 3, private):
        with pytest.raises(BadArgumentError, match="32 bytes or an Ed25519PublicKey"):
            receivers(tmp_path / "signed", 1, "rows", key=bad)
    # An attacker that recomputes the checksum, but has no key.
    path = tmp_path / "signed" / version_name(2)
    fields = json.loads(path.read_bytes())
    signature = fields.pop("signature")
    fields["files"][0][4][0][3] = "f" * 32
    from shrinkpoint.trainers.publishing.layout import Keys, sealed

    fields.pop("checksum")
    path.write_bytes(sealed({**fields, "signature": signature}, Keys()))
    found = receivers(tmp_path / "signed", 1, "rows", key=public)
    with pytest.raises(CorruptDataError, match="its signature is not of the key"):
        found[0][1].update(version=2)
    with pytest.warns(StoreWarning, match="not of the key"):
        assert found[0][1].update() == 1
    # A part in the store that another one wrote: nothing is signed for it.
    parts = [
        sp.Publisher(tmp_path / "signed", ranks=Counted(i, 2, "run2", 5.0), key=k)
        for i, k in enumerate((b"k" * 32, other))
    ]
    errors = failures_of(parts, now)
    assert all(isinstance(e, sp.ShrinkpointError) for e in errors)


def test_a_key_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    for call in (lambda: sp.Publisher(tmp_path, key=b"k" * 32), lambda: receivers(tmp_path, 1, "rows", key=b"k" * 32)):
        with pytest.raises(BadArgumentError, match="pip install 'cryptography>=42'"):
            call()


def failures_of(parts: list[sp.Publisher], state: State) -> list[BaseException | None]:
    def one(i: int) -> Any:
        mine, where = held(state, i, 2, "rows")
        return parts[i].publish(9, mine, shards={n: (n, SHAPES[n], box) for n, box in where.items()})

    with ThreadPoolExecutor(2) as pool:
        return [r.exception() for r in [pool.submit(one, i) for i in range(2)]]


# ---------------------------------------------------------------------- process groups


def gloo(rank: int, world: int, folder: str, results: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        placements = {
            "fsdp": [Shard(0), Replicate()],
            "tp": [Replicate(), Shard(1)],
            "both": [Shard(0), Shard(1)],
            "twice": [Shard(0), Shard(0)],
            "uneven": [Shard(0), Replicate()],
        }
        g = torch.Generator().manual_seed(0)
        shapes = {n: (3, 6) if n == "uneven" else (8, 6) for n in placements}
        whole = {n: torch.randn(s, generator=g) for n, s in shapes.items()} | {
            "norm": torch.ones(9),
            "bias": torch.ones(4),
        }
        stage = {f"stage{rank}": torch.full((5,), float(rank))}  # a pipeline stage: on this rank alone
        url, publisher = f"{folder}/url", sp.Publisher(f"{folder}/url", sliced=True, ranks=dist.group.WORLD)
        served = {n: distribute_tensor(torch.zeros_like(whole[n]), mesh, [Shard(1), Shard(0)]) for n in placements}
        ok, subscriber = list[bool](), sp.Subscriber(url, served)
        everything = {n: torch.zeros_like(t) for n, t in whole.items()} | {
            f"stage{i}": torch.zeros(5) for i in range(world)
        }
        for version in (1, 2, 3):
            state = {n: distribute_tensor(whole[n], mesh, p) for n, p in placements.items()}
            done = publisher.publish(version, {**state, "norm": whole["norm"], "bias": whole["bias"], **stage})
            ok.append((done.base_bytes > 0) == (version == 1))
            expected = whole | {f"stage{i}": torch.full((5,), float(i)) for i in range(world)}
            ok.append(sp.Subscriber(url, everything).update(version=version) == version)
            ok.append(same(everything, expected))
            ok.append(subscriber.update(version=version) == version)
            ok += [torch.equal(served[n].full_tensor(), whole[n]) for n in placements]
            whole = {n: torch.where(torch.rand(t.shape, generator=g) < 0.1, t + 1, t) for n, t in whole.items()}
            ok.append(
                sum(kept.nbytes for _, kept in publisher._kept.values()) < sum(t.nbytes for t in expected.values()) / 2
            )
        for bad, message in (
            ({"tp": DTensor.from_local(torch.zeros(8, 6), mesh, [Partial(), Replicate()])}, "a sum cannot be updated"),
            (
                {"local": torch.randn(100, generator=torch.Generator().manual_seed(rank))},
                "local is not the same tensor",
            ),
            (
                {"fsdp": state["fsdp"]} if rank else {"fsdp": 3},
                "rank 0: BadArgumentError" if rank else "'fsdp' is a int",
            ),
        ):
            try:
                publisher.publish(9, bad)
                ok.append(False)
            except sp.ShrinkpointError as e:
                ok.append(message in str(e))
        part = DTensor.from_local(torch.ones(2), mesh["tp"], [Shard(0)])
        try:
            sp.Publisher(url).publish(9, {"part": part})
            ok.append(False)
        except BadArgumentError as e:
            ok.append("DTensors over 2 of 4 processes: give the group" in str(e))
        try:
            publisher.publish(10 + rank, state)
            ok.append(False)
        except BadArgumentError as e:
            ok.append("ranks disagree on the version" in str(e))
        ok.append(subscriber.newest == 3)
        results.put((rank, ok))
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(sys.platform != "linux", reason="gloo is tested on Linux")
def test_ranks_of_a_process_group(tmp_path: Path) -> None:
    """FSDP, tensor parallel, plain tensors by name, pipeline stages; ranks that disagree."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [context.Process(target=gloo, args=(i, 4, str(tmp_path), results)) for i in range(4)]
    for worker in workers:
        worker.start()
    found: dict[int, list[bool]] = dict(results.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join()
    assert all(all(ok) for ok in found.values()), found
