"""The saver: files as of synchronous saves, no silent loss, no process left."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import array_api_strict
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec.parallel import Stopped, map_chunks, stoppable
from shrinkpoint.codec.state.leaves import is_array, read_leaf
from shrinkpoint.store.local import LocalFiles
from shrinkpoint.store.memory_copies import MemoryCopies
from shrinkpoint.store.saver import executors, host_copy
from shrinkpoint.store.saver.executors import Maintenance, kinds_tree, perform, save_options
from shrinkpoint.store.saver.saver import SaverWarning
from shrinkpoint.store.saver.snapshot import Arena, HostArray, plan, rebuild, take
from shrinkpoint.store.saver.worker import _save

from ..codec.common import difference, threads

posix = pytest.mark.skipif(os.name != "posix", reason="a worker process needs POSIX")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
LOSSLESS = sp.presets.lossless()
PATIENCE = 300.0
"""Seconds for what takes one or two where nothing else runs: a worker stands back for all others, and imports torch."""
PRESETS = ["default", "lossless", "inshrinkerator", "lc_checkpoint", "bitsnap", "check_n_run"]


def state(step: int, n: int = 4000) -> dict[str, Any]:
    """Return a state with many types of values, different for each step."""
    rng = np.random.default_rng(step)
    w = torch.from_numpy(np.random.default_rng(0).standard_normal(n).astype(np.float32).reshape(-1, 20))
    w = w + 1e-3 * torch.from_numpy(rng.standard_normal(w.shape).astype(np.float32))
    return {
        "model": OrderedDict(fc=w, tied=w, half=w.to(torch.bfloat16), strided=w.t(), empty=torch.empty(0, 3)),
        "optimizer": {"state": {"fc": {"step": torch.tensor(float(step)), "exp_avg": w * 0.1, "exp_avg_sq": w * w}}},
        "rng": {"numpy": rng.integers(0, 2**32, 600, dtype=np.uint32), "swapped": np.arange(9, dtype=">i4")},
        "plain": [step, 1.5, float("nan"), -0.0, True, None, "ü\ud800", b"\0x", 2**80, (1, (2,)), np.float16(3)],
        ("a", 1): Counter("abca"),
    }


def memory_url() -> str:
    return f"memory://saver-{uuid.uuid4().hex}"


def files(root: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted((root / "data").iterdir()) if p.suffix == ".spt"}


def change(tree: Any) -> None:
    """Change the live arrays, as the next training step does."""
    for tensor in tree["model"].values():
        tensor.zero_()
    for moment in tree["optimizer"]["state"]["fc"].values():
        moment.fill_(7)
    tree["rng"]["numpy"][:] = 0


def gone(pid: int, seconds: float = PATIENCE) -> bool:
    """Return whether a process that is not our child ends in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):  # the second where it ends between open and read
            return True
        time.sleep(0.02)
    return False


def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


# ---------------------------------------------------------------------------------------------- the snapshot


def through_arena(tree: Any, arena: Arena, **how: Any) -> Any:
    return rebuild(take(plan({"state": tree}), arena, **how), arena)["state"]


def test_a_snapshot_is_equal_and_a_copy() -> None:
    arena = Arena()
    live, expected = state(3), state(3)
    found = through_arena(live, arena)
    change(live)
    assert difference(expected, found) == ""
    assert found["model"]["fc"] is found["model"]["tied"]
    arena.close()


def test_an_arena_is_used_again_and_grows() -> None:
    arena = Arena()
    through_arena({"a": np.zeros(3_000_000, np.uint8)}, arena)
    size, address = arena.size, arena.address
    for _ in range(3):
        through_arena({"a": np.ones(2_999_999, np.uint8)}, arena)
        assert (arena.size, arena.address) == (size, address)
    big = np.arange(5_000_000, dtype=np.uint8)
    assert np.array_equal(through_arena({"a": big}, arena)["a"], big)
    assert arena.size > size
    with pytest.raises(MemoryError, match=str(1 << 60)):
        arena.reserve(1 << 60)
    assert np.array_equal(through_arena({"a": big}, arena)["a"], big)
    with pytest.raises(ValueError, match="arena"):
        arena.view(arena.size, 1)
    arena.close()


def test_memory_that_cannot_be_pinned_leaves_no_error_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's last error would be raised by the trainer's next launch."""
    current, pending = [0], list[int]()

    def register(pointer: int, size: int, flags: int) -> int:
        assert current == [0, 1], "a context of a device that the process does not use"
        pending.append(2)
        return 2

    def launch(n: int, device: int) -> None:
        if pending:
            raise RuntimeError(f"CUDA error: {pending.pop()}")

    @contextlib.contextmanager
    def on(device: int) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch, "ones", launch)
    arena = Arena()
    arena.reserve(100)
    with pytest.warns(RuntimeWarning, match=r"cannot be pinned \(CUDA error 2\)"):
        arena.pin(1)
    launch(1, 1)
    arena.close()


def test_saves_of_arrays_on_a_gpu_use_one_stream(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """PyTorch keeps freed memory for the stream that it was used on."""
    made, used, waited = list[str](), list[Any](), list[int]()

    def stream(device: str) -> Any:
        made.append(device)
        return SimpleNamespace(wait_event=waited.append)

    @contextlib.contextmanager
    def using(stream: Any) -> Iterator[None]:
        used.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", using)
    arena, session = Arena(), sp.Store(tmp_path / "run").session
    trees = {"state": {"a": np.ones(4)}, "options": [None, None, None], "kinds": {}}
    for step in range(3):
        snapshot = dataclasses.replace(take(plan(trees), arena), ready=[("cuda of this test", step)])
        assert perform(session, step, snapshot, arena, lambda: False, alone=True) is not None
    assert made == ["cuda of this test"]
    assert used == used[:1] * 3
    assert waited == [0, 1, 2]
    arena.close()


@posix
def test_another_process_sees_what_stands_in_the_arena() -> None:
    arena = Arena()
    made = take(plan({"state": state(1)}), arena)
    assert arena.fd is not None
    other = Arena(os.dup(arena.fd), arena.size)
    assert difference(state(1), rebuild(type(made).from_json(made.to_json()), other)["state"]) == ""
    assert not other.stop
    arena.stop = True
    assert other.stop
    arena.close()
    other.close()


@pytest.mark.parametrize("cores", [1, 4])
def test_copies_past_the_cache(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming copies are right at any address and number of threads, and write only targets."""
    if host_copy.kernel() is None:
        pytest.skip("Numba does not compile here")
    monkeypatch.setattr(host_copy, "_PART", 1024)
    monkeypatch.setattr(host_copy, "STREAMED", 0)
    monkeypatch.setattr(host_copy.ctypes, "memmove", None)
    sizes = (1, 63, 64, 65, 1023, 1024, 1025, 12345)
    source = np.random.default_rng(0).integers(1, 256, 20_000, dtype=np.uint8)
    room = np.zeros(40_064, np.uint8)
    target = room[-room.ctypes.data % 64 :]
    expected = target.copy()
    pieces, at, to = [], 0, 64
    for size in sizes:
        pieces.append((target.ctypes.data + to, source.ctypes.data + at, size))
        expected[to : to + size] = source[at : at + size]
        at, to = at + size, to + -(-size // 64) * 64 + 64
    with threads(cores):
        host_copy.copy(pieces)
    assert np.array_equal(target, expected)


def test_ordinary_tensors_are_read_as_all_others_are() -> None:
    """`plan` reads ordinary tensors as `read_leaf` does, and leaves the others to it."""
    z = torch.arange(6.0).reshape(2, 3)
    tree: dict[str, Any] = {
        "plain": z,
        "again": z.view(2, 3),
        "flat": z.view(6),
        "part": z[1],
        "scalar": torch.tensor(3),
        "half": z.to(torch.bfloat16),
        "parameter": torch.nn.Parameter(z + 1),
        "buffer": torch.nn.Buffer(z + 2),
        "graph": (torch.nn.Parameter(z) * 2),
        "columns": z.t(),
        "spread": z[:, ::2],
        "empty": torch.empty(0, 3),
        "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
        "negative": torch.tensor([1 + 2j, 3j]).conj().imag,
        "negated": torch._neg_view(torch.arange(3.0)),
        "bool": z > 2,
    }
    planned = plan({"state": tree})
    specs = [source.spec for source in planned.sources]
    assert len(specs) == len(tree) - 1, "the same memory seen the same way is copied once"
    assert [source.size for source in planned.sources] == [spec.nbytes for spec in specs]
    read = {name: read_leaf(t, "")[0] for name, t in tree.items() if name != "again"}
    assert specs == list(read.values())
    arena = Arena()
    found = through_arena(tree, arena)
    assert all(torch.equal(found[name], tree[name]) for name in tree)
    assert sp.compress(found, cfg=LOSSLESS).id == sp.compress(tree, cfg=LOSSLESS).id
    freed = torch.zeros(9)
    freed.untyped_storage().resize_(8)
    with pytest.raises(sp.UnsupportedLeafError, match=r"a/0.*freed"):
        plan({"state": {"a": [freed]}})
    arena.close()


def test_arrays_that_stay_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of a (simulated) GPU stay on their device in a snapshot."""

    class Elsewhere:
        type = "cuda"

    class OnDevice(torch.Tensor):
        device = Elsewhere()

    monkeypatch.setattr("shrinkpoint.store.saver.snapshot._finish", lambda devices, on_device: [])
    arena = Arena()
    planned = plan({"state": state(2)})
    held = set()
    for number, source in enumerate(planned.sources):
        if isinstance(source.values, torch.Tensor):
            source.values = source.values.as_subclass(OnDevice)
            if source.values.numel():
                source.pointer = 0
                held.add(number)
    made = take(planned, arena, on_device=True)
    assert set(made.kept) == held
    for source in planned.sources:
        source.values.as_subclass(torch.Tensor).zero_() if isinstance(source.values, torch.Tensor) else None
    found = rebuild(made, arena)["state"]
    assert torch.equal(found["model"]["fc"].as_subclass(torch.Tensor), state(2)["model"]["fc"])
    arena.close()


def test_arrays_of_other_libraries_give_the_same_bytes() -> None:
    tree = {"j": jnp.arange(2000.0), "jb": jnp.ones(30, jnp.bfloat16), "s": array_api_strict.asarray([1, 2, 3])}
    arena = Arena()
    found = through_arena(tree, arena)
    assert all(isinstance(x, HostArray) and is_array(x) for x in found.values())
    assert sp.compress(found).to_bytes() == sp.compress(tree).to_bytes()
    arena.close()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_arrays_of_other_libraries_are_coded_ahead_too(dtype: Any) -> None:
    """Arrays of JAX get a weight average in the worker."""
    weights = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    cfg, arena = sp.Config(rate=0.01), Arena()
    given, rebuilt = sp.Store(memory_url(), cfg), sp.Store(memory_url(), cfg)
    for step in range(4):
        tree = {"weight": jnp.asarray(weights * (1 + 0.02 * step), dtype)}
        expected = given.save(step, tree).checkpoint.to_bytes()
        assert rebuilt.save(step, through_arena(tree, arena)).checkpoint.to_bytes() == expected
    arena.close()
    plain = sp.Store(memory_url(), sp.Config(rate=0.01, ahead=False))
    for step in range(4):
        last = plain.save(step, {"weight": jnp.asarray(weights * (1 + 0.02 * step), dtype)})
    assert last.checkpoint.to_bytes() != expected


_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
_arrays = st.builds(
    lambda dtype, shape, torch_too: (torch.from_numpy if torch_too else np.asarray)(
        np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    ),
    st.sampled_from(["float32", "int64", "uint8", "bool", "complex64", "float64"]),
    st.lists(st.integers(0, 5), max_size=3),
    st.booleans(),
)
_trees = st.recursive(
    _scalars | _arrays,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


@given(_trees, st.data())
@settings(max_examples=80)
def test_any_tree_crosses_unchanged(tree: Any, data: st.DataObject) -> None:
    arena = Arena()
    wrapped = [tree]
    for _ in range(data.draw(st.integers(1, 2))):
        assert difference(wrapped, through_arena(wrapped, arena)) == ""
    arena.close()


def test_kinds_cross_as_a_tree() -> None:
    module = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 4))
    rows = np.array([3, 255], np.uint8)
    touched = sp.Kind("embedding", "weight", "0.weight", rows=rows)
    kinds = {**sp.kinds(module, torch.optim.Adam(module.parameters())), "0.weight": touched, "other": "norm"}
    arena = Arena()
    found = rebuild(take(plan({"options": [None] * 3, "kinds": kinds_tree(kinds)}), arena), arena)
    crossed = save_options(found)["kinds"]
    assert crossed == kinds
    assert crossed is not None
    assert np.array_equal(crossed["0.weight"].rows, rows)
    assert save_options({**found, "kinds": {}})["kinds"] is None
    arena.close()


@pytest.mark.parametrize("mode", ["thread", "process"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(12, "no memory")], ids=["interrupt", "memory"])
def test_a_save_whose_memory_could_not_be_mapped_is_followed_by_others(
    mode: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one copied to memory that was not there, and the process crashed."""
    state = {"w": np.arange(9.0)}
    with sp.Saver(sp.Store(tmp_path), mode=mode) as saver:
        with monkeypatch.context() as patched:
            patched.setattr("mmap.mmap", Mock(side_effect=error))
            with pytest.raises(MemoryError if isinstance(error, OSError) else KeyboardInterrupt):
                saver.save(1, state)
        assert saver.save(2, state).result().status == "saved"
    assert sp.Store(tmp_path).load()["w"].tolist() == state["w"].tolist()


def test_work_can_be_told_to_stop() -> None:
    done: list[int] = []
    for alone in (True, False):
        with threads(2), pytest.raises(Stopped), stoppable(lambda: len(done) >= 3, alone=alone):
            map_chunks(done.append, range(100))
        assert 3 <= len(done) <= 4
        done.clear()
    assert map_chunks(str, range(5)) == list("01234")


# ---------------------------------------------------------------------------------------------- the worker process


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[sp.Saver, Path]]:
    """A saver with one worker for tests that do not change it."""
    root = tmp_path_factory.mktemp("shared") / "run"
    with sp.Saver(sp.Store(root, LOSSLESS)) as saver:
        yield saver, root


@posix
def test_the_same_files_as_a_synchronous_save(tmp_path: Path) -> None:
    cfg = sp.Config(chain=sp.ChainPolicy(4))
    kinds = {"fc": "linear"}
    plainly = sp.Store(tmp_path / "plainly", cfg)
    with sp.Saver(sp.Store(tmp_path / "beside", cfg)) as saver:
        for step in range(6):
            live = state(step, 20_000 + 10_000 * (step > 3))
            grads = {"fc": torch.ones_like(live["model"]["fc"])} if step % 2 else None
            saved = plainly.save(step, live, grads=grads, kinds=kinds)
            future = saver.save(step, live, grads=grads, kinds=kinds)
            change(live)
            done = future.result(PATIENCE)
            assert (done.step, done.status, done.id) == (step, "saved", saved.checkpoint.id)
            assert (done.nbytes, done.raw_nbytes, done.is_delta) == (saved.nbytes, saved.raw_nbytes, saved.is_delta)
            assert done.ratio == saved.ratio
            assert os.path.exists(done.path)
            assert done == saver.last == saver.wait()
            assert 0 <= done.waited <= done.stall
    assert files(tmp_path / "beside") == files(tmp_path / "plainly")
    store = sp.Store(tmp_path / "beside")
    assert store.steps() == list(range(6))
    assert store.verify() == {}


@posix
def test_the_snapshot_memory_is_bounded_and_kept(shared: tuple[sp.Saver, Path]) -> None:
    saver, _ = shared
    big = {"weight": np.zeros(3 << 20, np.uint8)}
    sizes = []
    for step in range(100, 104):
        saver.save(step, big)
        saver.wait()
        sizes.append(saver.nbytes)
    assert len(set(sizes)) == 1
    assert 3 << 20 <= sizes[0] <= 5 << 20


@posix
@linux
def test_the_worker_stands_back(shared: tuple[sp.Saver, Path]) -> None:
    saver, _ = shared
    saver.save(200, {"a": 1})
    saver.wait()
    fields = Path(f"/proc/{saver.pid}/stat").read_text().rpartition(")")[2].split()
    assert int(fields[16]) == min(19, os.nice(0) + 10)
    assert int(fields[2]) == saver.pid, "a process group of its own"
    assert int(fields[3]) == saver.pid, "and a session"


@posix
def test_what_cannot_be_stored_is_refused_at_once(shared: tuple[sp.Saver, Path]) -> None:
    saver, root = shared
    with pytest.raises(sp.UnsupportedLeafError, match="model/bad"):
        saver.save(300, {"model": {"bad": object()}})
    with pytest.raises(sp.UnsupportedLeafError, match="x/0"):
        saver.save(300, {"x": [torch.empty(3, device="meta")]})
    with pytest.raises(sp.BadArgumentError, match="step"):
        saver.save(-1, {})
    with pytest.raises(sp.BadArgumentError, match="tree"):
        saver.save(300, np.zeros(3))
    with pytest.raises(sp.BadArgumentError, match="kinds"):
        saver.save(300, {"a": 1}, kinds={"a": "nonsense"})
    saver.save(301, {"a": 1})
    saver.wait()
    assert 300 not in sp.Store(root).steps()
    assert 301 in sp.Store(root).steps()


@posix
def test_errors_of_the_worker_come_with_the_next_call(tmp_path: Path) -> None:
    blocked = tmp_path / "run"
    saver = sp.Saver(sp.Store(blocked, LOSSLESS))
    saver.save(0, {"a": 1}).result(PATIENCE)
    shutil.rmtree(blocked)
    blocked.write_text("in the way")
    bad = saver.save(1, {"a": 1})
    with pytest.raises(OSError, match=r"exists|directory") as first:
        saver.wait()
    assert bad.exception() is first.value
    assert any("saving step 1" in note and "Traceback" in note for note in first.value.__notes__)
    # The library's own errors keep their type. An error is reported once.
    blocked.unlink()
    needs_gradients = sp.presets.inshrinkerator(prune=0.3, prune_metric="sensitivity")
    saver.save(2, {"weight": np.zeros((64, 64), np.float32)}, cfg=needs_gradients, kinds={"weight": "linear"})
    with pytest.raises(sp.BadArgumentError, match="gradient"):
        saver.close()
    saver.close()
    assert repr(saver).endswith("closed>")
    with pytest.raises(sp.BadArgumentError, match="closed"):
        saver.save(3, {"a": 1})
    last = saver.wait()
    assert last is not None
    assert last.step == 0


@posix
@linux
def test_a_killed_worker_is_noticed_and_replaced(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "run", LOSSLESS)
    with sp.Saver(store) as saver:
        saver.save(1, state(1))
        saver.wait()
        first = saver.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        lost = saver.save(2, state(2))
        os.kill(first, signal.SIGKILL)
        assert gone(first)
        with pytest.raises(ChildProcessError, match=r"killed by SIGKILL") as error:
            saver.save(3, state(3))
        assert lost.exception(PATIENCE) is error.value
        assert saver.pid is None
        done = saver.save(3, state(3)).result(PATIENCE)
        assert (done.status, done.is_delta) == ("saved", True)
        second = saver.pid
        assert second not in (None, first)
        # Also where it had nothing to do.
        os.kill(second, signal.SIGKILL)
        assert gone(second)
        with pytest.raises(ChildProcessError, match=r"killed by SIGKILL"):
            saver.wait()
        assert saver.last == done
    assert store.steps() == [1, 3]
    assert store.verify() == {}


def killed(saver: sp.Saver) -> None:
    """Kill the worker, and wait for the error."""
    assert saver.pid is not None
    os.kill(saver.pid, signal.SIGKILL)
    assert gone(saver.pid)
    with pytest.raises(ChildProcessError, match="killed by SIGKILL"):
        saver.wait()


@posix
@linux
@pytest.mark.parametrize(("against", "in_memory"), [("previous", 0), ("base", 0), ("previous", 2)])
def test_the_worker_after_a_killed_one_goes_on_with_the_chain(against: str, in_memory: int, tmp_path: Path) -> None:
    """Files after killed workers equal those of an undisturbed run."""
    cfg = sp.Config(chain=sp.ChainPolicy(5, against))  # type: ignore[arg-type]
    plainly = sp.Store(tmp_path / "plainly", cfg)
    store = sp.Store(tmp_path / "beside", cfg, in_memory=in_memory)
    with sp.Saver(store) as saver:
        for step in range(6):
            expected = plainly.save(step, state(step))
            assert saver.save(step, state(step)).result(PATIENCE).id == expected.checkpoint.id
            if step in (0, 2, 3):
                killed(saver)
    assert files(tmp_path / "beside") == files(tmp_path / "plainly")
    assert store.verify() == {}
    if in_memory:
        copies = MemoryCopies(store.url)
        assert copies.steps()[-1] == 5
        copies.clear()


@posix
@linux
def test_a_chain_that_workers_die_of_is_given_up(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "run", LOSSLESS)
    store.save(0, state(0))
    with sp.Saver(store) as saver:
        for step in (1, 2):
            saver._ready()
            assert saver.pid is not None
            os.kill(saver.pid, signal.SIGSTOP)
            saver.save(step, state(step))
            killed(saver)
        assert not saver.save(3, state(3)).result(PATIENCE).is_delta
        killed(saver)
        assert saver.save(4, state(4)).result(PATIENCE).is_delta
    assert store.steps() == [0, 3, 4]


@posix
@pytest.mark.parametrize("sent", [False, True])
def test_an_interrupt_between_saver_and_worker(sent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt while a job is sent neither repeats the job nor mixes answers."""
    store = sp.Store(tmp_path / "run", LOSSLESS)
    real = executors.send
    with sp.Saver(store) as saver:

        def interrupted(*args: Any) -> None:
            monkeypatch.setattr(executors, "send", real)
            if sent:
                real(*args)
            raise KeyboardInterrupt

        for first in (1, 4):  # with the descriptors of the shared memory, and without
            monkeypatch.setattr(executors, "send", interrupted)
            with pytest.raises(KeyboardInterrupt):
                saver.save(first, state(first))
            for step in (first + 1, first + 2):
                assert saver.save(step, state(step)).result(PATIENCE).step == step
                assert difference(state(step), store.load(step)) == ""
    assert store.steps() == [1, 2, 3, 4, 5, 6]
    assert difference(state(1), store.load(1)) == ""
    assert store.verify() == {}


@posix
def test_a_large_tree_does_not_wait_for_the_worker(tmp_path: Path) -> None:
    """A tree larger than the socket's buffer does not block `save`."""
    store = sp.Store(tmp_path / "run", LOSSLESS)
    with sp.Saver(store) as saver:
        assert saver.pid is not None
        os.kill(saver.pid, signal.SIGSTOP)
        waker = threading.Timer(PATIENCE, os.kill, (saver.pid, signal.SIGCONT))
        waker.start()
        future = saver.save(1, {f"name {i}": i for i in range(30_000)})
        assert not future.done()
        assert waker.is_alive(), "save has waited"
        waker.cancel()
        os.kill(saver.pid, signal.SIGCONT)
        assert future.result(PATIENCE).stall < PATIENCE
    assert len(store.load(1)) == 30_000


def test_nobody_waits_for_the_copying_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    released, asked = threading.Event(), threading.Event()

    @functools.cache
    def kernel() -> None:
        asked.set()
        released.wait()

    monkeypatch.setattr(host_copy, "kernel", kernel)
    monkeypatch.setattr(host_copy, "STREAMED", 1)
    monkeypatch.setattr(host_copy.os, "register_at_fork", lambda **_: None)
    host_copy.load_in_thread.cache_clear()
    try:
        with sp.Saver(sp.Store(memory_url(), LOSSLESS)) as saver:
            for step in range(3):
                assert saver.save(step, state(step)).result(PATIENCE).status == "saved"
            assert asked.wait(PATIENCE)
            assert host_copy.load_in_thread().is_alive()
    finally:
        released.set()
        host_copy.load_in_thread().join()
        host_copy.load_in_thread.cache_clear()


@posix
def test_busy_wait_skip_cancel_in_a_process(shared: tuple[sp.Saver, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    saver, root = shared
    saver.save(400, state(0)).result(PATIENCE)
    assert saver.pid is not None
    assert saver._runner is not None
    pid, wait, wakers = saver.pid, saver._runner.wait, list[threading.Timer]()

    def wake_once_waited_for(timeout: float | None = None) -> None:
        if timeout is None:
            wakers.append(threading.Timer(0.2, os.kill, (pid, signal.SIGCONT)))
            wakers[-1].start()
        wait(timeout)

    monkeypatch.setattr(saver._runner, "wait", wake_once_waited_for)
    for step, on_busy, expected in (
        (410, "wait", ["saved", "saved"]),
        (420, "skip", ["saved", "skipped"]),
        (430, "cancel", ["cancelled", "saved"]),
    ):
        monkeypatch.setattr(saver, "on_busy", on_busy)
        os.kill(saver.pid, signal.SIGSTOP)
        first = saver.save(step, state(step))
        assert saver.busy
        with pytest.raises(TimeoutError, match="in flight"):
            saver.wait(0.05)
        second = saver.save(step + 1, state(step + 1))
        assert first.done() == (on_busy != "skip")
        saver.wait()
        while wakers:
            wakers.pop().join()
        assert [first.result().status, second.result().status] == expected
        assert second.result().waited >= 0.2 or on_busy == "skip"
    monkeypatch.undo()
    assert saver.save(440, state(440)).result(PATIENCE).is_delta
    store = sp.Store(root)
    assert [step for step in store.steps() if step >= 400] == [400, 410, 411, 420, 431, 440]
    assert store.verify() == {}
    assert difference(state(440), store.load(440)) == ""


@posix
@pytest.mark.parametrize(("against", "mode"), [("previous", "process"), ("base", "thread")])
def test_a_restarted_run_goes_on_with_its_chain(against: str, mode: str, tmp_path: Path) -> None:
    """A restarted run continues its chain, also if the saver is older than the load."""
    cfg = sp.Config(chain=sp.ChainPolicy(5, against))  # type: ignore[arg-type]
    for name in ("plainly", "beside"):
        first = sp.Store(tmp_path / name, cfg)
        for step in range(3):
            first.save(step, state(step))
    plainly, beside = sp.Store(tmp_path / "plainly", cfg), sp.Store(tmp_path / "beside", cfg)
    with sp.Saver(beside, mode=mode) as saver:
        assert difference(plainly.load(), beside.load()) == ""
        for step in range(3, 7):
            expected = plainly.save(step, state(step))
            done = saver.save(step, state(step)).result(PATIENCE)
            assert (done.id, done.is_delta) == (expected.checkpoint.id, step != 5)
            # Other loads of the trainer do not change the running chain.
            beside.load(0)
            plainly.follow(step)
    assert files(tmp_path / "beside") == files(tmp_path / "plainly")
    assert sp.Store(tmp_path / "beside").verify() == {}


@posix
@pytest.mark.parametrize("what", ["saved anew", "dropped", "damaged"])
def test_a_chain_that_is_no_more_is_left_with_a_warning(what: str, tmp_path: Path) -> None:
    fresh = sp.Store(tmp_path / "run", LOSSLESS)
    fresh.save(0, state(0))
    fresh.save(1, state(1))
    store = sp.Store(tmp_path / "run", LOSSLESS)
    store.load(1)
    if what == "saved anew":
        fresh.save(1, state(9))
    elif what == "dropped":
        fresh.drop(1)
    else:
        for path in (tmp_path / "run" / "data").iterdir():
            path.write_bytes(path.read_bytes()[:-1])
    worker, arena = sp.Store(tmp_path / "run", LOSSLESS), Arena()
    assert store.head is not None
    job: dict[str, Any] = {"origin": [store.head.last.step, store.head.last.identity, False]}
    answers = []
    for step in (2, 3):
        trees = {"state": state(step), "options": [None, None, None], "kinds": {}}
        answers.append(_save(worker, {**job, "step": step, "snapshot": take(plan(trees), arena).to_json()}, arena))
    ((_, message),) = answers[0]["warnings"]
    assert message.startswith("a new chain begins, because the one of step 1 ")
    assert [a["is_delta"] for a in answers] == [False, True]
    assert answers[1]["warnings"] == []
    assert difference(state(3), sp.Store(tmp_path / "run").load(3)) == ""
    arena.close()


def test_a_thread_goes_on_with_the_chain_that_was_loaded() -> None:
    url = memory_url()
    for step in range(2):
        sp.Store(url, LOSSLESS).save(step, state(step))
    store = sp.Store(url, LOSSLESS)
    store.load(0)
    assert store.head is not None
    with sp.Saver(store) as saver:
        assert saver.save(2, state(2)).result().is_delta
        assert saver.save(3, state(3)).result().is_delta
    assert [len(store.describe(step).parents) for step in (2, 3)] == [1, 2]
    assert store.head.last.step == 0
    assert store.verify() == {}


def test_arguments_that_are_none(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "run")
    for bad in ({"on_busy": "drop"}, {"mode": "fork"}, {"nice": 20}, {"nice": -1}, {"threads": 0}, {"threads": True}):
        with pytest.raises(sp.BadArgumentError, match=next(iter(bad))):
            sp.Saver(store, **bad)  # type: ignore[arg-type]
    with pytest.raises(sp.BadArgumentError, match="store"):
        sp.Saver(str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(sp.BadArgumentError, match="memory"):
        sp.Saver(sp.Store(memory_url()), mode="process")
    with sp.Saver(sp.Store(memory_url())) as saver:
        wrong: Any
        for wrong in (math.nan, "5"):
            with pytest.raises(sp.BadArgumentError, match="timeout"):
                saver.wait(wrong)


# ---------------------------------------------------------------------------------------------- a thread


def test_a_store_in_this_memory_is_saved_by_a_thread() -> None:
    store = sp.Store(memory_url())
    with sp.Saver(store) as saver:
        assert saver.mode == "thread"
        assert saver.pid is None
        for step in range(3):
            live = state(step)
            done = saver.save(step, live)
            change(live)
            assert done.result().is_delta == (step > 0)
    twin = sp.Store(memory_url())
    for step in range(3):
        twin.save(step, state(step))
    assert [difference(twin.load(i), store.load(i)) for i in range(3)] == [""] * 3


def test_callbacks_may_save_but_not_close() -> None:
    store = sp.Store(memory_url(), LOSSLESS)
    found: list[Any] = []
    over = threading.Event()

    def back(_: Any) -> None:
        with pytest.raises(sp.ShrinkpointError, match="cannot be closed by a callback"):
            saver.close()
        with pytest.raises(sp.ShrinkpointError, match="cannot rest by a callback"):
            saver.rest()
        assert saver.wait() is not None
        found.append(saver.save(2, {"a": 2}))
        for waiting in (saver.wait, lambda: saver.save(3, {"a": 3})):
            with pytest.raises(sp.ShrinkpointError, match="cannot be waited for by a callback"):
                waiting()
        over.set()

    with sp.Saver(store) as saver:
        saver.save(1, {"a": 1}).add_done_callback(back)
        assert over.wait(PATIENCE)
        assert found[0].result(PATIENCE).status == "saved"
    assert store.steps() == [1, 2]


@pytest.mark.parametrize("preset", PRESETS)
def test_no_codec_keeps_what_it_was_given(preset: str) -> None:
    """References do not share memory with the snapshot, which is overwritten."""
    cfg = sp.Config() if preset == "default" else getattr(sp.presets, preset)()
    url, twin = memory_url(), memory_url()
    plainly = sp.Store(twin, cfg)
    with sp.Saver(sp.Store(url, cfg)) as saver:
        for step in range(4):
            expected = plainly.save(step, state(step))
            assert saver.save(step, state(step)).result().id == expected.checkpoint.id


class Gate:
    """A gate that holds saves back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.entered = threading.Event(), threading.Event()
        self.stop: Any = None
        real = executors.perform

        def held(store: Any, step: int, snapshot: Any, arena: Any, stop: Any, **more: Any) -> Any:
            self.stop = stop
            self.entered.set()
            while not (self.open.wait(0.01) or stop()):
                pass
            return real(store, step, snapshot, arena, stop, **more)

        monkeypatch.setattr(executors, "perform", held)


@pytest.mark.parametrize("on_busy", ["wait", "skip", "cancel"])
def test_busy_in_a_thread(on_busy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    store = sp.Store(memory_url())
    with sp.Saver(store, on_busy=on_busy) as saver:
        first = saver.save(1, {"a": np.ones(3)})
        assert gate.entered.wait(PATIENCE)
        assert saver.busy
        assert repr(saver).endswith("busy>")
        if on_busy == "wait":
            threading.Timer(0.1, gate.open.set).start()
        second = saver.save(2, {"a": np.ones(4)})
        assert first.done() != (on_busy == "skip")
        gate.open.set()
        statuses = [first.result(PATIENCE).status, second.result(PATIENCE).status]
    assert statuses == {"wait": ["saved"] * 2, "skip": ["saved", "skipped"], "cancel": ["cancelled", "saved"]}[on_busy]
    assert store.steps() == [n for n, s in zip((1, 2), statuses, strict=True) if s == "saved"]


@pytest.mark.parametrize("what", ["replaced", "freed"])
def test_memory_replaced_or_freed_during_the_wait(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    store = sp.Store(memory_url())
    parameter = torch.nn.Parameter(torch.zeros(5000))

    def during_the_wait() -> None:
        if what == "replaced":
            parameter.data = torch.ones(5000)
        else:
            parameter.untyped_storage().resize_(0)
        gate.open.set()

    with sp.Saver(store) as saver:
        saver.save(1, {"a": 1})
        assert gate.entered.wait(PATIENCE)
        threading.Timer(0.05, during_the_wait).start()
        if what == "freed":
            with pytest.raises(sp.UnsupportedLeafError, match=r"a: .*freed"):
                saver.save(2, {"a": parameter})
            return
        saver.save(2, {"a": parameter})
    assert store.load(2)["a"].tolist() == [1.0] * 5000


def test_memory_freed_or_replaced_before_the_copy() -> None:
    arena = Arena()
    live = {"plain": torch.ones(100), "row": torch.ones(9, 9).T[2], "kept": torch.nn.Parameter(torch.ones(100))}
    planned = plan({"state": live})
    live["kept"].data = torch.zeros(100)
    assert rebuild(take(planned, arena), arena)["state"]["kept"].tolist() == [1.0] * 100
    live["plain"].untyped_storage().resize_(8)
    with pytest.raises(sp.UnsupportedLeafError, match=r"float32 tensor of shape \[100\] was freed"):
        take(planned, arena)
    arena.close()


def test_a_refused_state_cancels_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with sp.Saver(sp.Store(memory_url()), on_busy="cancel") as saver:
        first = saver.save(1, {"a": 1})
        with pytest.raises(sp.UnsupportedLeafError):
            saver.save(2, {"a": {1, 2}})
        gate.open.set()
        assert first.result(PATIENCE).status == "saved"


def test_an_exception_inside_says_what_became_of_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    store = sp.Store(memory_url())

    def interrupted(step: int) -> None:
        with sp.Saver(store) as saver:
            saver.save(step, {"a": 1})
            close = saver.close
            monkeypatch.setattr(saver, "close", lambda: (gate.open.set(), close()))
            raise KeyError("mine")

    with pytest.raises(KeyError) as error:
        interrupted(5)
    assert any("Step 5 was in flight" in note and "saved" in note for note in error.value.__notes__)
    assert store.steps() == [5]

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError(28, "no space")

    monkeypatch.setattr(executors, "perform", broken)
    with pytest.raises(KeyError) as error:
        interrupted(6)
    assert any("failed as well: OSError" in note for note in error.value.__notes__)


def test_what_the_save_before_said_is_not_said_again(tmp_path: Path) -> None:
    """A warning of the worker is not repeated, and a new one is shown."""
    every = sp.ChainPolicy(base_every=1)
    with (
        sp.Saver(sp.Store(tmp_path / "s", sp.Config(chain=every)), mode="process") as saver,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        for step, rule in enumerate(["weights", "weights", "weights", "Embedding"]):
            cfg = sp.Config([(rule, sp.Exact())], chain=every)
            saver.save(step, {"model": {"weight": np.ones((4, 5), np.float32)}}, cfg=cfg).result()
            saver.wait()
    said = [str(w.message).split(" matches")[0] for w in caught if issubclass(w.category, SaverWarning)]
    assert said == [f"step {n}: UnmatchedRuleWarning: rule {rule!r}" for n, rule in ((0, "weights"), (3, "Embedding"))]


def test_warnings_of_the_worker_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = executors.ThreadExecutor.run
    monkeypatch.setattr(executors.ThreadExecutor, "run", lambda *a: (real(*a)[0], [("UserWarning", "careful")]))
    saver = sp.Saver(sp.Store(memory_url()))
    saver.save(7, {"a": 1})
    with pytest.warns(SaverWarning, match="step 7: UserWarning: careful"):
        saver.wait()
    saver.close()


@pytest.mark.parametrize(("mode", "category"), [("process", SaverWarning), ("thread", sp.StoreWarning)])
def test_a_step_that_is_replaced_is_named(tmp_path: Path, mode: Any, category: type[Warning]) -> None:
    """A replaced step gets a warning, but not in a run that went back to an older step."""
    path = tmp_path / "s"
    with sp.Saver(sp.Store(path), mode=mode) as saver:
        for step in (1, 2, 3):
            saver.save(step, {"w": np.full(3, step)}).result()
        saver.wait()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saver.save(3, {"w": np.full(3, 9)}).result()
            saver.wait()
        assert [w.category for w in caught] == [category]
        assert str(caught[0].message).endswith("/s: step 3 was stored with another state, which this save replaces")
    store = sp.Store(path)
    assert store.load(1)["w"].tolist() == [1] * 3
    with warnings.catch_warnings(record=True) as caught, sp.Saver(store, mode=mode) as saver:
        warnings.simplefilter("always")
        for step in (2, 3):
            saver.save(step, {"w": np.full(3, step + 10)}).result()
        saver.wait()
    assert [str(w.message) for w in caught if "another state" in str(w.message)] == []
    assert [sp.Store(path).load(step)["w"][0] for step in (1, 2, 3)] == [1, 12, 13]


def test_training_is_the_same_with_a_saver(tmp_path: Path) -> None:
    def losses(saver: sp.Saver | None) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(20, 50), torch.nn.Dropout(0.1), torch.nn.Linear(50, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for step in range(12):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 20)).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
            if saver is not None and step % 3 == 0:
                saver.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        return found

    with sp.Saver(sp.Store(memory_url())) as saver:
        assert losses(saver) == losses(None)


# ---------------------------------------------------------------------------------------------- whole programs


def program(body: str, *arguments: object, before: str = "", **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a script without a `__main__` guard, which must not be imported again."""
    text = "import os, signal, sys, time\nimport numpy as np, shrinkpoint as sp\n" + textwrap.dedent(body)
    path = Path(str(arguments[0])) / "train.py"
    path.write_text(text)
    command = [sys.executable, str(path), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE, **how)


@posix
def test_a_script_without_a_guard_and_without_standard_input(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    (here / "random.py").write_text("print('the wrong random')")
    done = program(
        """
        os.close(0); os.close(2)
        saver = sp.Saver(sp.Store("run", sp.presets.lossless()))
        os.chdir("/")
        saver.save(1, {"weight": np.arange(1000)})
        print("left to itself", saver.pid)
        """,
        tmp_path,
        cwd=here,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[:3] == ["left", "to", "itself"]
    assert gone(int(done.stdout.split()[3]))
    assert sp.Store(here / "run").load()["weight"].tolist() == list(range(1000))


@posix
@pytest.mark.parametrize(
    ("end", "status"),
    [("", 120), ("sys.exit(3)", 120), ("raise KeyError('mine')", 1), ("saver.close()", 1), ("sys.stderr = None", 120)],
)
def test_an_error_nobody_asked_for_is_shown_at_exit(end: str, status: int, tmp_path: Path) -> None:
    """An unread error is shown at exit and sets the exit status; all handlers run."""
    done = program(
        f"""
        import atexit
        atexit._clear()
        atexit.register(lambda: print("the last handler", flush=True))
        atexit.register(lambda: sys.stderr and print("to stderr", file=sys.stderr, flush=True))
        store = sp.Store(sys.argv[1] + "/run")
        open(sys.argv[1] + "/run", "w").close()
        saver = sp.Saver(store)
        saver.save(1, {{"weight": np.arange(1000)}})
        {end}
        """,
        tmp_path,
    )
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout == "the last handler\n"
    if end != "sys.stderr = None":
        assert "saving step 1" in done.stderr
        assert done.stderr.endswith("to stderr\n")


@posix
def test_an_error_of_a_saver_that_is_forgotten_counts_too(tmp_path: Path) -> None:
    done = program(
        """
        store = sp.Store(sys.argv[1] + "/run")
        open(sys.argv[1] + "/run", "w").close()
        saver = sp.Saver(store)
        saver.save(1, {"weight": np.arange(1000)})
        del saver
        print("trained on", flush=True)
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (120, "trained on\n"), done.stderr
    assert "saving step 1" in done.stderr


@pytest.mark.parametrize("mode", ["process", "thread"])
@posix
def test_a_saver_may_be_forgotten_in_its_own_thread(mode: str, tmp_path: Path) -> None:
    """A saver collected in its own thread does not deadlock."""
    done = program(
        f"""
        import gc
        from shrinkpoint.store.saver import executors

        place = executors.{mode.title()}Executor
        run = place.run

        def collecting(*args):
            gc.collect()
            return run(*args)

        place.run = collecting

        def train():
            saver = sp.Saver(sp.Store(sys.argv[1] + "/run"), mode={mode!r})
            cycle = [saver]
            cycle.append(cycle)
            gc.disable()
            saver.save(1, {{"weight": np.arange(1000)}})

        train()
        print("over", flush=True)
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "over\n", "")
    assert sp.Store(tmp_path / "run").load()["weight"].sum() == 499_500


@pytest.mark.parametrize("mode", ["process", "thread"])
@posix
def test_one_that_was_ended_at_exit_says_that_it_is_closed(mode: str, tmp_path: Path) -> None:
    """A saver used after exit cleanup raises that it is closed."""
    done = program(
        f"""
        import atexit
        from shrinkpoint.store.saver import saver as module

        atexit.unregister(module.EXIT_CLEANUP._end)

        @atexit.register
        def last():
            try:
                saver.save(2, {{"weight": np.arange(10)}})
            except sp.BadArgumentError as e:
                print(e, saver, flush=True)
            saver.wait()
            saver.close()

        atexit.register(module.EXIT_CLEANUP._end)
        saver = sp.Saver(sp.Store(sys.argv[1] + "/run"), mode={mode!r})
        saver.save(1, {{"weight": np.arange(1000)}})
        """,
        tmp_path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("the saver is closed <Saver to ")
    assert sp.Store(tmp_path / "run").steps() == [1]


@posix
def test_every_unclosed_saver_has_its_error_shown(tmp_path: Path) -> None:
    """Every unclosed saver shows its error, also if warnings are errors."""
    done = program(
        """
        import warnings
        savers = []
        for n in range(4):
            where = f"{sys.argv[1]}/{n}"
            savers.append(sp.Saver(sp.Store(where, sp.Config([("wieght", sp.Exact())] if n % 2 else []))))
            if n % 2 == 0:
                open(where, "w").close()
            savers[-1].save(1, {"weight": np.arange(1000.0)})
        warnings.simplefilter("error", sp.SaverWarning)
        """,
        tmp_path,
    )
    assert done.returncode == 120
    assert done.stderr.count("SaverWarning: step 1: UnmatchedRuleWarning") == 2
    assert done.stderr.count("saving step 1") == 2


@posix
def test_a_callback_does_not_wait_for_who_closes(tmp_path: Path) -> None:
    """A callback during `close` may save and gets an error; `close` waits for it."""
    store = sp.Store(tmp_path / "run", LOSSLESS)
    found: list[BaseException] = []

    def back(_: Any) -> None:
        until(lambda: saver._closing)
        with pytest.raises(sp.BadArgumentError, match="is being closed") as refused:
            saver.save(3, {"a": 3})
        found.append(refused.value)

    saver = sp.Saver(store)
    saver.save(1, {"a": 1}).result()
    assert saver.pid is not None
    os.kill(saver.pid, signal.SIGSTOP)  # a callback of a save that is done would run in this thread
    saver.save(2, {"a": 2}).add_done_callback(back)
    os.kill(saver.pid, signal.SIGCONT)
    saver.close()
    assert len(found) == 1
    assert store.steps() == [1, 2]


@pytest.mark.parametrize("moment", ["take", "hand"])
@posix
def test_a_signal_handler_cannot_save_within_a_save(moment: str, tmp_path: Path) -> None:
    """A save from a signal handler within a save is refused with a warning."""
    done = program(
        f"""
        import signal, warnings
        from shrinkpoint.store.saver import executors

        def then_a_signal(function):
            def call(*args, **options):
                result = function(*args, **options)
                if not sent:
                    sent.append(True)
                    os.kill(os.getpid(), signal.SIGUSR1)
                return result
            return call

        sent = []
        if {moment!r} == "take":
            executors.take = then_a_signal(executors.take)
        else:
            executors.ProcessExecutor.hand = then_a_signal(executors.ProcessExecutor.hand)
        store = sp.Store(sys.argv[1] + "/run", sp.presets.lossless())
        signal.signal(signal.SIGUSR1, lambda *_: saver.save(20, {{"weight": np.full(1000, 2)}}))
        warnings.simplefilter("always")
        with sp.Saver(store) as saver:
            try:
                saver.save(10, {{"weight": np.full(1000, 1)}})
            except sp.ShrinkpointError as e:
                print("refused:", e, flush=True)
            saver.save(30, {{"weight": np.full(1000, 3)}})
        print({{step: int(store.load(step)["weight"].max()) for step in store.steps()}}, flush=True)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    said = "within one of its own calls, for example by a signal handler"
    if moment == "take":
        assert said in done.stdout
        assert done.stdout.endswith("{30: 3}\n")
    else:
        assert f"refused meanwhile: a saver was called {said}" in done.stderr
        assert done.stdout.endswith("{10: 1, 30: 3}\n")


@posix
def test_an_error_that_was_told_is_no_failure_at_exit(tmp_path: Path) -> None:
    done = program(
        """
        store = sp.Store(sys.argv[1] + "/run")
        open(sys.argv[1] + "/run", "w").close()
        saver = sp.Saver(store)
        saver.save(1, {"weight": np.arange(1000)})
        try:
            saver.wait()
        except Exception as e:
            print("told")
        os.remove(sys.argv[1] + "/run")
        """,
        tmp_path,
    )
    assert (done.returncode, done.stdout) == (0, "told\n"), done.stderr


@posix
@linux
@pytest.mark.parametrize("size", [1000, 3_000_000])
@pytest.mark.parametrize("when", ["first", "second", "beside a forked child"])
def test_a_killed_trainer_leaves_the_save_and_nothing_else(when: str, size: int, tmp_path: Path) -> None:
    """A trainer killed right after `save` leaves the step and no process.

    The worker may be starting, stopped or compiling, and a forked child of the trainer may keep its descriptors.
    """
    done = program(
        """
        when, size = sys.argv[2], int(sys.argv[3])
        saver = sp.Saver(sp.Store(sys.argv[1] + "/run", sp.presets.lossless()))
        states = [{"weight": np.random.default_rng(i).random(size)} for i in range(3)]
        child = 0
        if when != "first":
            saver.save(1, states[1]).result()
        if when == "beside a forked child":
            child = os.fork()
            if child == 0:
                os.close(1); os.close(2)
                time.sleep(3600)
                os._exit(0)
        if when != "first":
            os.kill(saver.pid, signal.SIGSTOP)
        print(saver.pid, child, flush=True)
        saver.save(2, states[2])
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
        when,
        size,
    )
    worker, child = (int(n) for n in done.stdout.split())
    assert done.returncode == -signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, signal.SIGCONT)
    try:
        assert gone(worker)
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
    store = sp.Store(tmp_path / "run")
    assert store.steps() == ([2] if when == "first" else [1, 2])
    assert store.verify() == {}
    assert np.array_equal(store.load()["weight"], np.random.default_rng(2).random(size))


@posix
@linux
def test_two_saves_and_a_kill(tmp_path: Path) -> None:
    """Two accepted saves are both completed after the trainer is killed."""
    done = program(
        """
        saver = sp.Saver(sp.Store(sys.argv[1] + "/run", sp.presets.lossless()))
        print(saver.pid, flush=True)
        for step in range(2):
            saver.save(step, {"weight": np.full(3_000_000, step)})
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        tmp_path,
    )
    assert gone(int(done.stdout))
    assert sp.Store(tmp_path / "run").load()["weight"].tolist()[::1_000_000] == [1, 1, 1]


@posix
@linux
def test_a_forked_child_cannot_use_it_and_does_not_end_it(tmp_path: Path) -> None:
    done = program(
        """
        saver = sp.Saver(sp.Store(sys.argv[1] + "/run", sp.presets.lossless()))
        saver.save(1, {"weight": np.arange(1000)}).result()
        child = os.fork()
        if child == 0:
            try:
                saver.save(2, {"weight": np.arange(10)})
            except sp.ShrinkpointError as e:
                print("refused:", e, flush=True)
            saver.close()
            sys.exit()
        print(os.waitpid(child, 0)[1], flush=True)
        print(saver.save(3, {"weight": np.arange(1000)}).result().is_delta)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("refused: this saver belongs to process")
    assert lines[1:] == ["0", "True"]
    assert sp.Store(tmp_path / "run").steps() == [1, 3]


@posix
@linux
def test_a_forked_child_may_leave_the_block(tmp_path: Path) -> None:
    """A forked child may leave the `with` block during a save of its parent."""
    done = program(
        """
        import threading

        held, go_on = threading.Event(), threading.Event()

        def hold():
            with saver._lock:
                held.set()
                go_on.wait()

        with sp.Saver(sp.Store(sys.argv[1] + "/run", sp.presets.lossless())) as saver:
            saver.save(1, {"weight": np.arange(1_000_000)})
            thread = threading.Thread(target=hold)
            thread.start()
            held.wait()
            if (child := os.fork()) == 0:
                try:
                    saver.wait()
                except sp.ShrinkpointError as e:
                    print("refused:", e, flush=True)
                sys.exit(3)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            go_on.set()
            thread.join()
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("refused: this saver belongs to process")
    assert done.stdout.endswith("\n3\n")
    assert sp.Store(tmp_path / "run").steps() == [1]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"metric": float("nan")}, "metric is nan"),
        ({"metric": "good"}, "metric is 'good'"),
        ({"kinds": {"zz": "norm"}}, "kinds: none of its 1 paths"),
        ({"grads": {"zz": np.zeros(3, np.float32)}}, "grads/zz: the state has no such weight"),
    ],
)
def test_an_argument_that_no_save_can_take_is_refused_at_once(tmp_path: Path, wrong: Any, said: str) -> None:
    """An invalid argument is refused before the worker gets the save."""
    state = {"weight": np.arange(4096, dtype=np.float32)}
    store = sp.Store(tmp_path / "run")
    with sp.Saver(store, mode="thread") as saver:
        saver.save(1, state, kinds={"weight": "linear"}).result()
        with pytest.raises(sp.BadArgumentError, match=re.escape(said)):
            saver.save(2, state, **wrong)
        assert saver.save(3, state, kinds={"weight": "linear"}, metric=np.float32(0.5)).result().status == "saved"
    assert store.steps() == [1, 3]
    assert store.describe(3).metric == 0.5


@pytest.mark.parametrize("chain", ["simplecache::", "filecache::", "dir::simplecache::"])
def test_a_cache_in_the_url_is_refused(chain: str) -> None:
    """A URL with a cache is refused, because it would give outdated files."""
    with pytest.raises(sp.BadArgumentError, match="it contains a cache"):
        sp.Store(f"{chain}{memory_url()}")


def test_memory_behind_another_file_system_is_of_this_process() -> None:
    url = f"dir::{memory_url()}"
    store = sp.Store(url)
    with sp.Saver(store) as saver:
        assert saver.mode == "thread"
        saver.save(1, {"weight": torch.ones(3)})
    assert sp.Store(url).steps() == [1]
    with pytest.raises(sp.BadArgumentError, match="memory"):
        sp.Saver(store, mode="process")


_ODD = """
import os, pathlib, resource, sys, tempfile
import numpy as np
import shrinkpoint as sp

folder = tempfile.mkdtemp(dir=sys.argv[1])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
sys.path += [pathlib.Path("/nowhere"), ""]
os.chdir(folder)
os.rmdir(folder)
with sp.Saver(sp.Store(sys.argv[1] + "/run", sp.presets.lossless()), mode="process") as saver:
    for step in (1, 2):
        assert saver.save(step, {"weight": np.arange(8.0) + step}).result().status == "saved"
"""


def test_a_trainer_with_many_files_an_odd_path_and_no_folder(tmp_path: Path) -> None:
    """A saver works with a thousand open files and odd entries of `sys.path`."""
    resource = pytest.importorskip("resource")
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2000:
        pytest.skip("no process may have so many files open here")
    run = subprocess.run(
        [sys.executable, "-c", _ODD, str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(sp.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert sp.Store(tmp_path / "run").steps() == [1, 2]


def test_close_ends_though_nobody_can_be_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` ends even if the lock of `Popen.wait` is never released."""
    monkeypatch.setattr(executors, "_PATIENCE", 0.5)
    place = executors.ProcessExecutor(
        sp.Store(tmp_path / "run"), nice=0, threads=1, maintenance=Maintenance(), consumes=True
    )
    closing = threading.Thread(target=place.close, daemon=True)
    with place._process._waitpid_lock:  # type: ignore[attr-defined]
        closing.start()
        closing.join(20)
        assert not closing.is_alive()
    assert place._process.wait(60) is not None


@pytest.mark.parametrize("where", ["rest", "_process.wait"])
@posix
def test_close_that_was_interrupted_may_be_called_again(where: str, tmp_path: Path) -> None:
    """The second call frees worker, snapshot and descriptors."""
    saver, before = sp.Saver(sp.Store(tmp_path)), len(os.listdir("/dev/fd"))
    saver.save(1, {"w": np.arange(9.0)})
    pid, runner = saver.pid, saver._runner
    assert runner is not None
    owner: Any = runner if where == "rest" else runner.executor
    with (
        patch.object(*((owner, where) if where == "rest" else (owner._process, "wait")), side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        saver.close()
    with pytest.raises(sp.BadArgumentError, match="is closed"):
        saver.save(2, {})
    for _ in range(2):
        saver.close()
    assert not runner._thread.is_alive()
    assert not os.path.exists(f"/proc/{pid}")
    assert len(os.listdir("/dev/fd")) < before
    assert sp.Store(tmp_path).steps() == [1]


def test_a_second_saver_of_a_process_is_reported(tmp_path: Path) -> None:
    with sp.Saver(sp.Store(tmp_path / "run"), mode="thread") as first:
        for _ in range(2):
            with pytest.warns(SaverWarning, match=r"/run: this process has an open Saver .* close\(\) the"):
                second = sp.Saver(sp.Store(f"{tmp_path}/x/../run"), mode="thread")
            second.close()
        sp.Saver(sp.Store(tmp_path / "other"), mode="thread").close()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                sp.Saver(sp.Store(tmp_path / "run"), mode="thread")  # a warning is an error here
                os._exit(0)
            os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        first.close()
        sp.Saver(sp.Store(tmp_path / "run"), mode="thread").close()


def test_a_saver_that_was_left_open_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save of a Saver that nothing refers to comes before those of the next one."""
    may_go, real = threading.Event(), LocalFiles.create
    monkeypatch.setattr(LocalFiles, "create", lambda *args: may_go.wait() and real(*args))
    saver: sp.Saver | None = sp.Saver(sp.Store(tmp_path), mode="thread")
    assert saver is not None
    saver.save(10, {"w": np.ones(3)})
    saver = None
    gc.collect()
    threading.Timer(0.2, may_go.set).start()
    with sp.Saver(sp.Store(tmp_path), mode="thread"):
        assert sp.Store(tmp_path).steps() == [10]
