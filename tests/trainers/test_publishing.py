"""Publisher and subscriber: exact in every dtype, never a mixture after errors."""

from __future__ import annotations

import multiprocessing
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shrinkpoint as sp
from shrinkpoint.codec.errors import BadArgumentError, CorruptDataError, MissingParentError
from shrinkpoint.store.files import StoreWarning
from shrinkpoint.store.local import LocalFiles
from shrinkpoint.trainers.publishing import publisher as publishing
from shrinkpoint.trainers.publishing import tensors as module
from shrinkpoint.trainers.publishing.layout import Shard, ShardFile, Version
from shrinkpoint.trainers.publishing.ranks import PublishConflictError

DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8, torch.int64, torch.bool),
]


def state(seed: int = 0, n: int = 3000) -> dict[str, torch.Tensor]:
    """Return a tensor of every dtype."""
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed)) * 30
    made = {str(d): x.to(d) for d in DTYPES if d not in (torch.complex64, torch.bool)}
    made["complex"] = torch.view_as_complex(x)
    made["bool"] = x > 0
    made["scalar"] = torch.tensor(3.5)
    made["empty"] = torch.zeros(0, 3)
    return made


def step(tensors: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Return tensors with the lowest bit of some bytes flipped."""
    g = torch.Generator().manual_seed(seed)
    made = {}
    for name, t in tensors.items():
        flat = t.clone().reshape(-1).view(torch.uint8)
        at = torch.rand(flat.shape, generator=g) < share
        flat[at] ^= 1
        made[name] = flat.view(t.dtype).reshape(t.shape)
    return made


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Return whether tensors are equal bit for bit."""
    return a.keys() == b.keys() and all(
        torch.equal(a[k].reshape(-1).view(torch.uint8), b[k].reshape(-1).view(torch.uint8)) for k in a
    )


@pytest.mark.parametrize("share", [0.002, 0.3])
def test_every_bit_of_every_dtype(tmp_path: Path, share: float) -> None:
    publisher, now = sp.Publisher(tmp_path), state()
    served = {k: torch.zeros_like(v) for k, v in now.items()}
    places = {k: v.data_ptr() for k, v in served.items()}
    publisher.publish(0, now)
    subscriber = sp.Subscriber(tmp_path, served)
    assert subscriber.version is None
    for version in range(1, 6):
        assert subscriber.update() == version - 1
        assert same(served, now)
        now = step(now, share, version)
        publisher.publish(version, now)
    assert subscriber.update() == subscriber.version == subscriber.newest == 5
    assert same(served, now)
    assert {k: v.data_ptr() for k, v in served.items()} == places
    assert subscriber.last is not None
    assert subscriber.last.links == 1
    assert subscriber.update() == 5


def test_missed_versions_are_one_patch_and_small(tmp_path: Path) -> None:
    w = torch.randn(400, 500).bfloat16()
    publisher, served = sp.Publisher(tmp_path), {"w": w.clone()}
    publisher.publish(10, {"w": w})
    subscriber = sp.Subscriber(tmp_path, served)
    assert subscriber.version == 10  # by its hash: nothing is loaded
    now, sizes = {"w": w}, []
    for version in range(11, 16):
        now = step(now, 0.002, version)
        sizes.append(publisher.publish(version, now).nbytes)
    assert max(sizes) < w.nbytes / 40
    assert subscriber.update() == 15
    assert same(served, now)
    assert subscriber.last is not None
    assert subscriber.last.links == 5
    assert subscriber.last.nbytes == sum(sizes)


def test_bases_keep_and_restart(tmp_path: Path) -> None:
    now = {"w": torch.randn(200, 200)}
    publisher = sp.Publisher(tmp_path, base_every=3, keep=2)
    late = {"w": torch.zeros(200, 200)}
    for version in range(1, 12):
        now = step(now, 0.01, version)
        done = publisher.publish(version, now)
        assert (done.base_bytes > 0) == (version % 3 == 1)
    kept = sorted(p.name for p in (tmp_path / "versions").iterdir())
    assert kept == ["000000000010.json", "000000000011.json"]
    assert all(int(p.name[:12]) >= 10 for p in (tmp_path / "data").iterdir())
    assert sp.Subscriber(tmp_path, late).update() == 11
    assert same(late, now)
    again = sp.Publisher(tmp_path)
    assert again.newest == 11
    with pytest.raises(BadArgumentError, match="not above 11"):
        again.publish(7, now)  # a trainer that went back to an older checkpoint
    now = step(now, 0.01, 99)
    subscriber = sp.Subscriber(tmp_path, late)
    done = again.publish(12, now)  # a delta against the version that another process wrote
    assert done.base_bytes == 0
    assert done.nbytes < done.raw_bytes / 5
    assert subscriber.update() == 12
    assert same(late, now)


def test_a_restart_counts_the_chain_on(tmp_path: Path) -> None:
    """A restarted publisher continues the interval of bases."""
    now, bases = {"w": torch.randn(200, 200)}, []
    for version in range(1, 9):
        now = step(now, 0.01, version)
        bases.append(sp.Publisher(tmp_path, base_every=3).publish(version, now).base_bytes > 0)
    assert bases == [True, False, False, True, False, False, True, False]


@pytest.mark.parametrize("why", ["damaged", "shape", "name", "older"])
def test_a_restart_that_cannot_read_back_writes_a_base(tmp_path: Path, why: str) -> None:
    first = {"w": torch.randn(200, 200)}
    now = step(first, 0.01, 1)
    publisher = sp.Publisher(tmp_path)
    publisher.publish(1, first)
    publisher.publish(2, now)
    if why == "damaged":
        for path in (tmp_path / "data").iterdir():
            path.write_bytes(path.read_bytes()[:-9])
    new = {"shape": {"w": torch.randn(100, 200)}, "name": {"v": now["w"]}, "older": first}.get(why, step(now, 0.01, 2))
    done = sp.Publisher(tmp_path).publish(3, new)
    assert (done.base_bytes > 0) == (why != "older")  # an older state is a delta as any other
    served = {name: torch.zeros_like(t) for name, t in new.items()}
    assert sp.Subscriber(tmp_path, served).update() == 3
    assert same(served, new)


def test_a_version_twice(tmp_path: Path) -> None:
    now = {"w": torch.randn(50)}
    publisher = sp.Publisher(tmp_path)
    publisher.publish(1, now)
    assert publisher.publish(1, now).nbytes == 0
    assert sp.Publisher(tmp_path).publish(1, now).nbytes == 0
    with pytest.raises(BadArgumentError, match="version 1 is not above 1"):
        publisher.publish(1, step(now, 0.5, 0))


def test_two_publishers_one_after_the_other(tmp_path: Path) -> None:
    now = {"w": torch.randn(50)}
    first, second = sp.Publisher(tmp_path), sp.Publisher(tmp_path)
    first.publish(1, now)
    second.publish(2, step(now, 0.5, 1))
    with pytest.raises(PublishConflictError, match=r"newest version is 2.*wrote 1 last"):
        first.publish(3, step(now, 0.5, 2))


def race(url: str, value: float, barrier: Any, results: Any) -> None:
    publisher = sp.Publisher(url)
    barrier.wait()
    try:
        publisher.publish(1, {"w": torch.full((50000,), value)})
        results.put(("done", value))
    except (PublishConflictError, BadArgumentError):
        results.put(("refused", value))


def test_two_processes_publish_the_same_version(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=race, args=(str(tmp_path), float(i), barrier, results)) for i in (1, 2)]
    for worker in workers:
        worker.start()
    found = sorted(results.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join()
    assert [what for what, _ in found] == ["done", "refused"]
    served = {"w": torch.zeros(50000)}
    assert sp.Subscriber(tmp_path, served).update() == 1
    assert (served["w"] == found[0][1]).all()


def killed(url: str, path: str) -> None:
    served = {"a": torch.zeros(200_000), "b": torch.zeros(200_000)}
    subscriber = sp.Subscriber(url, served)
    real, seen = module.write, []

    def dying(tensor: torch.Tensor, patch: Any) -> None:
        if seen:
            torch.save(served, path)
            os._exit(9)
        seen.append(1)
        real(tensor, patch)

    module.write = dying
    subscriber.update()


def test_a_reader_killed_in_the_commit_begins_again(tmp_path: Path) -> None:
    now = {"a": torch.randn(200_000), "b": torch.randn(200_000)}
    publisher = sp.Publisher(tmp_path / "x")
    publisher.publish(1, now)
    worker = multiprocessing.get_context("spawn").Process(
        target=killed, args=(str(tmp_path / "x"), str(tmp_path / "mixed.pt"))
    )
    worker.start()
    worker.join(120)
    assert worker.exitcode == 9
    mixed = torch.load(tmp_path / "mixed.pt")
    assert torch.equal(mixed["a"], now["a"])
    assert not mixed["b"].any()
    subscriber = sp.Subscriber(tmp_path / "x", mixed)
    assert subscriber.version is None
    now = step(now, 0.01, 1)
    publisher.publish(2, now)
    assert subscriber.update() == 2
    assert same(mixed, now)


def test_a_commit_that_fails_begins_from_a_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"a": torch.randn(3000), "b": torch.randn(3000)}
    publisher, served = sp.Publisher(tmp_path), {k: v.clone() for k, v in now.items()}
    publisher.publish(1, now)
    subscriber = sp.Subscriber(tmp_path, served)
    now = step(now, 0.01, 1)
    publisher.publish(2, now)
    real, calls = module.write, []

    def failing(tensor: torch.Tensor, patch: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of order")
        real(tensor, patch)

    monkeypatch.setattr(module, "write", failing)
    with pytest.raises(RuntimeError, match="out of order"):
        subscriber.update()
    assert subscriber.version is None
    assert subscriber.update() == 2
    assert same(served, now)


def by_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[0, 0] += 1


def by_data(tensor: torch.Tensor) -> None:
    tensor.data[0, 0] += 1


def counted(tensor: torch.Tensor) -> None:
    tensor[0, 0] += 1


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("change", [by_numpy, by_data, counted])
def test_a_model_changed_by_hand_is_loaded_whole(tmp_path: Path, change: Any, sliced: bool) -> None:
    now = {"w": torch.randn(300, 300)}
    publisher, served = sp.Publisher(tmp_path, sliced=sliced), {"w": torch.zeros(200 if sliced else 300, 300)}
    select = {"w": ("w", (slice(50, 250), slice(0, 300)))} if sliced else None
    publisher.publish(1, now)
    subscriber = sp.Subscriber(tmp_path, served, select=select)
    subscriber.update()
    change(served["w"])
    for version in (2, 3):
        now = step(now, 0.01, version)
        publisher.publish(version, now)
        assert subscriber.update(verify=change is not counted) == version
        assert same(served, {"w": now["w"][50:250] if sliced else now["w"]})
        assert subscriber.last is not None
        assert (subscriber.last.nbytes > now["w"].nbytes / 2) == (version == 2)  # from a base, then by a delta


@pytest.mark.parametrize("missing", ["versions/000000000003.json", "d", "cut", "flipped"])
def test_missing_and_damaged_links(tmp_path: Path, missing: str) -> None:
    now = {"w": torch.randn(300, 300)}
    publisher, served = sp.Publisher(tmp_path, base_every=5), {"w": now["w"].clone()}
    states = {}
    for version in range(1, 8):
        publisher.publish(version, now)
        states[version] = now
        now = step(now, 0.01, version)
        if version == 2:
            subscriber = sp.Subscriber(tmp_path, served)
            assert subscriber.update() == 2
    path = tmp_path / missing if missing[0] == "v" else next((tmp_path / "data").glob("000000000003-d-*"))
    if missing == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif missing == "flipped":
        blob = bytearray(path.read_bytes())
        blob[-1] ^= 1
        path.write_bytes(blob)
    else:
        path.unlink()
    assert subscriber.update() == 7  # over the base of version 6
    assert same(served, states[7])
    for path in (tmp_path / "data").iterdir():
        path.unlink()
    publisher.publish(8, now)
    for path in (tmp_path / "data").glob("000000000008*"):
        path.write_bytes(b"x")
    with pytest.warns(StoreWarning, match=r"version 8 cannot be read, and the model is at 7: .*000000000008"):
        assert subscriber.update() == 7  # the old version stays whole
    assert same(served, states[7])
    with pytest.raises(CorruptDataError, match="no version can be read"):
        sp.Subscriber(tmp_path, {"w": torch.zeros(300, 300)}).update()


def test_a_store_that_begins_again(tmp_path: Path) -> None:
    import shutil

    now = {"w": torch.randn(300)}
    served = {"w": torch.zeros(300)}
    sp.Publisher(tmp_path / "x").publish(7, now)
    subscriber = sp.Subscriber(tmp_path / "x", served)
    assert subscriber.update() == 7
    shutil.rmtree(tmp_path / "x")
    assert subscriber.update() == 7
    now = {"w": torch.randn(300)}
    sp.Publisher(tmp_path / "x").publish(1, now)
    assert subscriber.update() == 1
    assert same(served, now)


def test_names_and_shapes_that_changed(tmp_path: Path) -> None:
    publisher, served = sp.Publisher(tmp_path), {"w": torch.zeros(4, 5)}
    publisher.publish(1, {"w": torch.ones(4, 5)})
    subscriber = sp.Subscriber(tmp_path, served)
    subscriber.update()
    for version, (other, message) in enumerate(
        [
            ({"w": torch.ones(5, 4)}, r"w: float32 \(5, 4\) is published, float32 \(4, 5\) is here"),
            ({"w": torch.ones(4, 5).half()}, "float16"),
            ({"v": torch.ones(4, 5)}, "w: not published"),
            ({"w": torch.ones(4, 5), "v": torch.ones(1)}, "v: not in the model"),
        ],
        2,
    ):
        assert publisher.publish(version, other).base_bytes > 0
        with pytest.raises(BadArgumentError, match=message):
            subscriber.update()
        assert (served["w"] == 1).all()
    publisher.publish(9, {"w": torch.full((4, 5), 2.0)})
    assert subscriber.update() == 9
    assert (served["w"] == 2).all()


def test_the_lock_is_held_while_the_model_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, held = threading.Lock(), []
    real = module.write
    monkeypatch.setattr(module, "write", lambda t, p: (held.append(lock.locked()), real(t, p)))
    real_stage = module.stage
    monkeypatch.setattr(module, "stage", lambda *a: (held.append(not lock.locked()), real_stage(*a))[1])
    sp.Publisher(tmp_path).publish(1, {"w": torch.ones(5)})
    assert sp.Subscriber(tmp_path, {"w": torch.zeros(5)}).update(lock=lock) == 1
    assert held == [True, True]
    assert not lock.locked()


def test_modules_with_tied_tensors_and_buffers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(9, 9), nn.Linear(9, 9), nn.BatchNorm1d(9)
            self.b.weight = self.a.weight

    trained, served = Net(), Net()
    publisher = sp.Publisher("memory://tied")
    publisher.publish(1, trained.state_dict())
    subscriber = sp.Subscriber("memory://tied", served)
    with torch.no_grad():
        subscriber.update()
        trained.a.weight[0] += 1
        trained.norm.running_mean += 1  # type: ignore[operator]
        publisher.publish(2, trained.state_dict())
        assert subscriber.update() == 2
    assert same(trained.state_dict(), served.state_dict())
    assert served.b.weight is served.a.weight


def test_patches_for_an_engine_that_applies_them(tmp_path: Path) -> None:
    now = {"w": torch.randn(3000).bfloat16(), "v": torch.randn(10)}
    publisher, served = sp.Publisher(tmp_path), {k: v.clone() for k, v in now.items()}
    publisher.publish(1, now)
    subscriber = sp.Subscriber(tmp_path, served)
    now = step(now, 0.01, 5)
    publisher.publish(2, now)
    for name, positions, values in subscriber.patches():
        assert (np.diff(positions) > 0).all()
        served[name].view(-1)[torch.from_numpy(positions)] = values
    assert subscriber.version == 2
    assert same(served, now)
    assert list(subscriber.patches()) == []
    now = step(now, 0.01, 6)
    publisher.publish(3, now)
    next(subscriber.patches())  # given up
    assert subscriber.version is None
    assert subscriber.update() == 3
    assert same(served, now)


@pytest.mark.parametrize("share", [0.01, 0.6])
def test_patches_of_every_dtype_and_of_slices(tmp_path: Path, share: float) -> None:
    """Positions ascend within a name, and dense stretches have positions too."""
    publisher, now = sp.Publisher(tmp_path, sliced=True), state()
    served = {k: torch.zeros_like(v) for k, v in now.items()}
    served["part"] = torch.zeros(1000, 1, dtype=torch.bfloat16)
    where = (slice(500, 1500), slice(1, 2))
    subscriber = sp.Subscriber(tmp_path, served, select={"part": ("torch.bfloat16", where)})
    for version in range(3):
        publisher.publish(version, now)
        last: dict[str, int] = {}
        for name, positions, values in subscriber.patches():
            assert positions.dtype == np.int64
            assert values.dtype == served[name].dtype
            assert positions[0] > last.get(name, -1)
            assert (np.diff(positions) > 0).all()
            last[name] = int(positions[-1])
            served[name].view(-1)[torch.from_numpy(positions)] = values
        assert subscriber.version == version
        assert same(served, {**now, "part": now["torch.bfloat16"][where].contiguous()})
        now = step(now, share, version)


def test_receivers_of_some_experts(tmp_path: Path) -> None:
    """Each rank receives its own experts under other names."""
    experts, hidden, ranks = 4, 6, 2
    now = {f"experts.{i}.up": torch.randn(8, hidden).to(torch.float8_e4m3fn) for i in range(experts)}
    now |= {f"experts.{i}.scale": torch.randn(8) for i in range(experts)} | {"router": torch.randn(experts, hidden)}
    publisher = sp.Publisher(tmp_path, sliced=True)
    engines = []
    for rank in range(ranks):
        mine = range(rank * experts // ranks, (rank + 1) * experts // ranks)
        up = torch.zeros(len(mine), 8, hidden, dtype=torch.float8_e4m3fn)
        scales = torch.zeros(len(mine), 8)
        model = {f"up.{j}": up[j] for j in range(len(mine))} | {f"scale.{j}": scales[j] for j in range(len(mine))}
        select = {f"up.{j}": (f"experts.{i}.up", (slice(0, 8), slice(0, hidden))) for j, i in enumerate(mine)}
        select |= {f"scale.{j}": (f"experts.{i}.scale", (slice(0, 8),)) for j, i in enumerate(mine)}
        engines.append((mine, up, scales, sp.Subscriber(tmp_path, model, select=select)))
    for version in range(3):
        publisher.publish(version, now)
        for mine, up, scales, subscriber in engines:
            assert subscriber.update(version=version) == version
            expected = torch.stack([now[f"experts.{i}.up"].view(torch.uint8) for i in mine])
            assert torch.equal(up.view(torch.uint8), expected)
            assert torch.equal(scales, torch.stack([now[f"experts.{i}.scale"] for i in mine]))
        now = step(now, 0.02, version)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bfloat16, torch.float32, torch.complex64, torch.uint8, torch.int8),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    ],
)
def test_slices(tmp_path: Path, dtype: torch.dtype) -> None:
    """Each receiver gets the rows, columns or block that it holds."""
    g = torch.Generator().manual_seed(0)
    now = {"w": (30 * torch.randn(60, 50, 4, generator=g)).to(dtype), "v": torch.randn(7, generator=g)}
    publisher = sp.Publisher(tmp_path, sliced=True)
    publisher.publish(1, now)
    wheres = [(slice(0, 30), slice(0, 50), slice(0, 4)), (slice(20, 60), slice(10, 35), slice(1, 3))]
    receivers = []
    for where in wheres:
        mine = {"part": torch.zeros_like(now["w"][where]).contiguous(), "v": torch.zeros(7)}
        receivers.append((mine, where, sp.Subscriber(tmp_path, mine, select={"part": ("w", where)})))
    for version, share in ((2, 0.01), (3, 0.5), (4, 0.0), (5, 0.02)):
        now = step(now, share, version)
        publisher.publish(version, now)
        for i, (mine, where, subscriber) in enumerate(receivers):
            if version == 3 and i:
                continue
            assert subscriber.update() == version
            assert same(mine, {"part": now["w"][where].contiguous(), "v": now["v"]})
    with pytest.raises(BadArgumentError, match="slices"):
        sp.Subscriber(tmp_path, {"w": torch.zeros(3)}, select={"w": ("w", (slice(0, 4),))})
    with pytest.raises(BadArgumentError, match="no tensor 'x'"):
        sp.Subscriber(tmp_path, {"w": torch.zeros(3)}, select={"x": ("w", ())})
    outside = {"w": torch.zeros(30, 50, 4, dtype=dtype)}
    with pytest.raises(BadArgumentError, match="does not fit"):
        sp.Subscriber(tmp_path, outside, select={"w": ("w", (slice(31, 61), slice(0, 50), slice(0, 4)))}).update()


def test_slices_need_a_publisher_that_says_so(tmp_path: Path) -> None:
    sp.Publisher(tmp_path).publish(1, {"w": torch.ones(4, 4)})
    mine = {"w": torch.zeros(2, 4)}
    with pytest.raises(BadArgumentError, match="sliced=True"):
        sp.Subscriber(tmp_path, mine, select={"w": ("w", (slice(0, 2), slice(0, 4)))}).update()


def test_bad_arguments(tmp_path: Path) -> None:
    publisher = sp.Publisher(tmp_path)
    served = {"w": torch.zeros(3)}
    assert sp.Subscriber(tmp_path, served).update() is None
    for call, message in (
        (lambda: publisher.publish(-1, served), "version"),
        (lambda: publisher.publish(10**12, served), "version"),
        (lambda: publisher.publish(1, [1]), "state dict"),  # type: ignore[arg-type]
        (lambda: publisher.publish(1, {"w": 3}), "'w' is a int"),
        (lambda: publisher.publish(1, {"w": torch.zeros(3).to_sparse()}), "layout"),
        (lambda: sp.Publisher(tmp_path, keep=0), "keep"),
        (lambda: sp.Publisher(tmp_path, dtype=torch.int8), "dtype is torch.int8"),
        (lambda: sp.Publisher(tmp_path, base_every=0), "base_every"),
        (lambda: sp.Subscriber(tmp_path, {}), "no tensors"),
        (lambda: sp.Subscriber(tmp_path, {"w": torch.zeros(4, 4).T[1:]}), "contiguous"),
    ):
        with pytest.raises(BadArgumentError, match=message):
            call()
    given: Any
    for given in (3, "w", ("w", 3), ("w", slice(0, 3)), ("w", ((0, 3),)), ("w", (slice("a", 3),)), ("w", 3, 3, 3)):
        with pytest.raises(BadArgumentError, match=r"select: w: .* is not \(name, slices\)"):
            sp.Subscriber(tmp_path, served, select={"w": given})
        with pytest.raises(BadArgumentError, match=r"shards: w: .* is not \(name, shape, slices\)"):
            publisher.publish(1, served, shards={"w": given})
    publisher.publish(1, served)
    path = next((tmp_path / "data").iterdir())
    path.unlink()
    with pytest.raises((CorruptDataError, MissingParentError)):
        sp.Subscriber(tmp_path, {"w": torch.ones(3)}).update()


def test_a_version_file_is_checked() -> None:
    def shard(where: tuple[tuple[int, int], ...], **other: Any) -> Shard:
        return replace(Shard("w", "float32", (4, 6), where, "0" * 32), **other)

    left, right = ((0, 4), (0, 2)), ((0, 4), (2, 4))
    files = tuple(ShardFile("a" * 64, 9, None, 0, (shard(where),)) for where in (left, right))
    made = Version(5, 4, "0" * 32, "x", False, files)
    assert Version.from_bytes(made.to_bytes(), 5) == made
    for i in range(len(made.to_bytes())):
        blob = bytearray(made.to_bytes())
        blob[i] ^= 1
        # As with manifests, the number comes first: the checksum of a newer format may be another.
        newer = b'"format": 3' in blob
        with pytest.raises(sp.NewerFormatError if newer else CorruptDataError):
            Version.from_bytes(bytes(blob), 5)

    def holding(*shards: Shard) -> Version:
        return replace(made, files=(replace(files[0], shards=shards),))

    for other, message in (
        (replace(made, parent=5), "a delta without a parent"),
        (replace(made, parent=None), "a delta without a parent"),
        (replace(made, files=(replace(files[0], delta="../x"),)), "names of files"),
        (replace(made, files=(replace(files[0], delta_bytes=-1),)), "-1"),
        (replace(made, files=(replace(files[0], delta=None),)), "names of files"),
        (replace(made, files=()), "neither a delta nor a base"),
        (holding(shard(left), shard(((0, 4), (1, 5)))), "overlap"),
        (holding(shard(left), shard(left)), "overlap"),
        (holding(shard(left)), "leave a hole"),
        (holding(shard(left), shard(((0, 4), (2, 5)))), "outside"),
        (holding(shard(left), shard(right, shape=(4, 7))), "different tensors"),
        (holding(shard(left), shard(right, dtype="int32")), "different tensors"),
        (holding(shard(left), shard(right, dtype="floaty")), "floaty"),
        (holding(shard(left), shard(right, hash="x")), "hash"),
    ):
        with pytest.raises(CorruptDataError, match=message):
            Version.from_bytes(other.to_bytes(), 5)
    with pytest.raises(CorruptDataError):
        Version.from_bytes(made.to_bytes(), 6)
    n = 20_000  # each pair of them would take minutes and gigabytes
    rows = tuple(Shard("w", "float32", (n,), ((i, 1),), "0" * 32) for i in range(n))
    assert Version.from_bytes(holding(*rows).to_bytes(), 5).files[0].shards == rows
    with pytest.raises(CorruptDataError, match=r"w\[3:4\] and w\[3:4\] overlap"):
        Version.from_bytes(holding(*rows[:7], rows[3], *rows[8:]).to_bytes(), 5)
    with pytest.raises(CorruptDataError, match="divided on 30 axes"):
        Version.from_bytes(
            holding(*(Shard("w", "int8", (2,) * 30, ((i, 1),) * 30, "0" * 32) for i in (0, 1))).to_bytes(), 5
        )
    with pytest.raises(CorruptDataError, match="a shard of"):
        Version.from_bytes(
            holding(Shard("w", "int8", (1 << 60,) * 100_000, ((0, 1),) * 100_000, "0" * 32)).to_bytes(), 5
        )
    for blob in (b"", b"[]", b"{", b"null", b"[" * 10**5):
        with pytest.raises(CorruptDataError):
            Version.from_bytes(blob, 5)


def test_all_ranks_reach_the_same_version(tmp_path: Path) -> None:
    """`update(version=)` goes forward and back, or raises if a version is missing."""
    now, states = {"w": torch.randn(100, 100)}, {}
    publisher, served = sp.Publisher(tmp_path, base_every=3), {"w": torch.zeros(100, 100)}
    for version in range(1, 7):
        publisher.publish(version, now)
        states[version] = now
        now = step(now, 0.01, version)
    subscriber = sp.Subscriber(tmp_path, served)
    for version in (2, 5, 5, 3, 6, 1):
        assert subscriber.update(version=version) == version
        assert same(served, states[version])
    with pytest.raises(CorruptDataError, match="version 7 cannot be read: version 7 is missing"):
        subscriber.update(version=7)
    with pytest.raises(BadArgumentError, match="version"):
        subscriber.update(version=-1)
    for name, positions, values in subscriber.patches(version=4):
        served[name].view(-1)[torch.from_numpy(positions)] = values
    assert subscriber.version == 4
    assert same(served, states[4])
    assert subscriber.update() == 6


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(9, 9), nn.Linear(9, 9)


@pytest.mark.parametrize("how", ["assign", "parameter", "half and back"])
def test_parameters_that_were_replaced(tmp_path: Path, how: str) -> None:
    trained, served = Two(), Two()
    publisher = sp.Publisher(tmp_path)
    publisher.publish(1, trained.state_dict())
    subscriber = sp.Subscriber(tmp_path, served)
    subscriber.update()
    if how == "assign":
        served.load_state_dict({k: torch.zeros_like(v) for k, v in trained.state_dict().items()}, assign=True)
    elif how == "parameter":
        served.b.weight = nn.Parameter(served.b.weight.detach().clone())
    else:
        served.half().float()
    with torch.no_grad():
        trained.a.weight[0, 0] += 1
    publisher.publish(2, trained.state_dict())
    assert subscriber.update() == 2
    assert same(trained.state_dict(), served.state_dict())


def test_tensors_that_share_memory_must_agree(tmp_path: Path) -> None:
    trained, served = Two(), Two()
    served.b.weight = served.a.weight
    before = {k: v.clone() for k, v in served.state_dict().items()}
    publisher = sp.Publisher(tmp_path)
    publisher.publish(1, trained.state_dict())
    subscriber = sp.Subscriber(tmp_path, served)
    with pytest.raises(BadArgumentError, match=r"a\.weight and b\.weight share memory"):
        subscriber.update()
    assert same(served.state_dict(), before)
    memory = torch.zeros(20)
    for tensors in ({"a": memory[:12], "b": memory[8:]}, {"a": memory, "b": memory.view(torch.int32)}):
        with pytest.raises(BadArgumentError, match="a and b overlap in memory"):
            sp.Subscriber(tmp_path, tensors)
    sp.Subscriber(tmp_path, {"a": memory[:8], "b": memory[8:]})


@pytest.mark.parametrize("share", [0.0001, 0.3])
def test_tensors_that_share_memory_may_be_published_in_other_shards(tmp_path: Path, share: float) -> None:
    publisher, served = sp.Publisher(tmp_path), torch.zeros(1100, 600)
    now = {"w": torch.randn(served.shape)}
    subscriber = sp.Subscriber(tmp_path, {"a": served, "b": served})
    for version in (1, 2):
        slices = {
            f"b{i}": (slice(start, stop), slice(0, 600)) for i, (start, stop) in enumerate([(0, 300), (300, 1100)])
        }
        tensors = {"a": now["w"], **{name: now["w"][where] for name, where in slices.items()}}
        publisher.publish(version, tensors, shards={n: ("b", (1100, 600), where) for n, where in slices.items()})
        assert subscriber.update() == version
        assert torch.equal(served, now["w"])
        now = step(now, share, version)
    publisher.publish(3, {"a": now["w"], "b": now["w"] + 1})
    with pytest.raises(BadArgumentError, match="share memory"):
        subscriber.update()


class Copies(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {k: v.detach().clone() for k, v in super().state_dict(*args, **kwargs).items()}


def test_models_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    for model, message in (
        (Copies(3, 3), "returns copies"),
        ({"w": torch.zeros(3, device="meta")}, "meta"),
        ({"w": torch.zeros(3).to_sparse()}, "layout"),
        ({"w": torch.zeros(3, dtype=torch.complex64).conj()}, "conjugated"),
    ):
        with pytest.raises(BadArgumentError, match=message):
            sp.Subscriber(tmp_path, model)
    w = {"w": torch.zeros(4)}
    for part in (slice(0, 8, 2), slice(0, None)):
        with pytest.raises(BadArgumentError, match="start and a stop"):
            sp.Subscriber(tmp_path, w, select={"w": ("w", (part,))})
    for call in (sp.Publisher, lambda url: sp.Subscriber(url, w)):
        with pytest.raises(BadArgumentError, match="no-such-protocol"):
            call("no-such-protocol://x")


def test_a_tensor_whose_storage_was_freed_is_refused(tmp_path: Path) -> None:
    freed = torch.zeros(100)
    freed.untyped_storage().resize_(0)
    with pytest.raises(BadArgumentError, match="state: the storage of w was freed"):
        sp.Publisher(tmp_path).publish(1, {"w": freed})
    with pytest.raises(BadArgumentError, match="model: the storage of w was freed"):
        sp.Subscriber(tmp_path, {"w": freed})


def test_updates_from_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow update that staged an older version does not write after a newer one."""
    first = {"w": torch.randn(3000)}
    publisher, served = sp.Publisher(tmp_path), {"w": first["w"].clone()}
    publisher.publish(1, first)
    subscriber = sp.Subscriber(tmp_path, served)
    second, third = step(first, 0.1, 1), step(first, 0.1, 2)
    publisher.publish(2, second)
    staged, published = threading.Event(), threading.Event()
    real = module.stage

    def slow(*args: Any) -> Any:
        made = real(*args)
        staged.set()
        published.wait(60)
        return made

    monkeypatch.setattr(module, "stage", slow)
    thread = threading.Thread(target=subscriber.update)
    thread.start()
    assert staged.wait(60)
    monkeypatch.setattr(module, "stage", real)
    publisher.publish(3, third)
    later = threading.Thread(target=subscriber.update)
    later.start()
    later.join(0.2)
    published.set()
    thread.join(60)
    later.join(60)
    assert subscriber.version == 3
    assert same(served, third)


def test_patches_that_another_update_overtook(tmp_path: Path) -> None:
    now = {"w": torch.randn(3000)}
    publisher, served = sp.Publisher(tmp_path), {"w": now["w"].clone()}
    publisher.publish(1, now)
    subscriber = sp.Subscriber(tmp_path, served)
    publisher.publish(2, step(now, 0.1, 1))
    patches = subscriber.patches()
    next(patches)
    newest = step(now, 0.1, 2)
    publisher.publish(3, newest)
    assert subscriber.update() == 3
    assert list(patches) == []
    assert subscriber.version == 3
    assert same(served, newest)


@pytest.mark.parametrize("when", ["encode", "create"])
def test_a_state_that_changes_while_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    now = {"w": torch.randn(3000)}
    publisher, served = sp.Publisher(tmp_path), {"w": torch.zeros(3000)}
    publisher.publish(1, {"w": now["w"].clone()})
    subscriber = sp.Subscriber(tmp_path, served)
    subscriber.update()
    now["w"][:50] += 1
    meant = now["w"].clone()
    where, name = (publishing, "encode") if when == "encode" else (publisher._files, "create")
    real = getattr(where, name)

    def step_meanwhile(*args: Any) -> Any:
        made = real(*args)
        now["w"][7] += 1
        return made

    monkeypatch.setattr(where, name, step_meanwhile)
    if when == "encode":
        with pytest.raises(BadArgumentError, match="changed while it was published: w"):
            publisher.publish(2, now)
    else:
        publisher.publish(2, now)
    monkeypatch.setattr(where, name, real)
    assert subscriber.update() == (1 if when == "encode" else 2)
    if when == "create":
        assert torch.equal(served["w"], meant)
    publisher.publish(3, now)
    assert subscriber.update() == 3
    assert same(served, now)


def test_a_clock_that_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    now = {"w": torch.randn(3000)}
    publisher, served = sp.Publisher(tmp_path, keep=2), {"w": torch.zeros(3000)}
    subscriber = sp.Subscriber(tmp_path, served)
    for version, clock in enumerate((2e9, 1e9, 0.0, 3e9)):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        now = step(now, 0.01, version)
        publisher.publish(version, now)
        for path in (tmp_path / "versions").iterdir():
            os.utime(path, (clock, clock))
        assert subscriber.update() == version
        assert same(served, now)


@pytest.mark.parametrize("lost", ["newest", "all", "data"])
def test_a_store_that_loses_files(tmp_path: Path, lost: str) -> None:
    """A subscriber stays at an intact version, and the publisher reports missing files."""
    states = [{"w": torch.randn(3000)}]
    publisher, served = sp.Publisher(tmp_path), {"w": torch.zeros(3000)}
    subscriber = sp.Subscriber(tmp_path, served)
    for version in range(3):
        states.append(step(states[-1], 0.01, version))
        publisher.publish(version, states[-1])
    subscriber.update()
    folder = tmp_path / ("data" if lost == "data" else "versions")
    for path in sorted(folder.iterdir())[-1 if lost == "newest" else 0 :]:
        path.unlink()
    reached = subscriber.update()
    assert reached in (1, 2)
    assert same(served, states[reached + 1])
    now = step(states[-1], 0.01, 9)
    if lost != "data":
        with pytest.raises(PublishConflictError, match="its files were removed"):
            publisher.publish(3, now)
    publisher.publish(3, now)
    assert subscriber.update() == 3
    assert same(served, now)
    if lost == "data":  # a receiver that is new finds no base
        with pytest.raises(CorruptDataError):
            sp.Subscriber(tmp_path, {"w": torch.zeros(3000)}).update()


def test_an_error_of_reading_removes_nothing_that_a_kept_version_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, served = {"w": torch.randn(40_000)}, {"w": torch.zeros(40_000)}
    publisher, real = sp.Publisher(tmp_path, keep=2), LocalFiles.read
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / ("²" * 12)).write_text("not a number")

    def failing(self: LocalFiles, name: str) -> bytes:
        if name == "versions/000000000003.json":
            raise OSError(5, "Input/output error", name)
        return real(self, name)

    for version in range(1, 5):
        with monkeypatch.context() as patch:
            if version == 4:
                patch.setattr(LocalFiles, "read", failing)
            publisher.publish(version, now)
        before, now = now, step(now, 0.001, version)
    assert sp.Subscriber(tmp_path, served).update() == 4
    assert same(served, before)
    for version in range(5, 60):  # also in a base of the first interval
        publisher.publish(version, now)
    assert not list((tmp_path / "data").glob("000000000001-*"))


def test_names_of_every_kind(tmp_path: Path) -> None:
    names = ["", "a", "a/b", "a.b", "/", "ü", "0", "\n", "~1", "a\\b"]
    now = {name: torch.full((5,), float(i)) for i, name in enumerate(names)}
    served = {name: torch.zeros(5) for name in names}
    publisher = sp.Publisher(tmp_path)
    publisher.publish(1, now)
    subscriber = sp.Subscriber(tmp_path, served)
    assert subscriber.update() == 1
    assert same(served, now)
    now = step(now, 0.2, 1)
    publisher.publish(2, now)
    assert subscriber.update() == 2
    assert same(served, now)
