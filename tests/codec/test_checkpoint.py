"""Checkpoints are pure values, independent of threads and processes; parents are checked."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.base import Leaf, Reference, Stored
from shrinkpoint.codec.format import container
from shrinkpoint.codec.lossless.exact import Exact
from shrinkpoint.codec.registry import CODECS
from shrinkpoint.codec.state.leaves import as_bytes

from .common import difference, small_chunks, threads, through_bytes

CONFIGS = {
    "default": sp.Config(),
    "inshrinkerator": sp.presets.inshrinkerator(prune=0.1),
    "lossless": sp.presets.lossless(),
    "rate": sp.Config(rate=0.003),
    "target": sp.Config(max_rel_error=0.02),
}


def states(n: int = 3) -> list[dict[str, Any]]:
    """Return a short training, the same in every process."""
    grid = torch.arange(96 * 40, dtype=torch.float64).reshape(96, 40)
    out = []
    for t in range(n):
        w = torch.sin(grid * 0.37 + 0.001 * t).float()
        entry = {"step": torch.tensor(float(t)), "exp_avg": w**3, "exp_avg_sq": w**2}
        entries = [entry, {"exp_avg": 2 * w}, {"exp_avg": 4 * w[0]}]
        out.append(
            {
                "model": {"fc.weight": w, "wte.weight": (w * 0.1).half(), "head": w, "ln.weight": w[0]},
                "opt": {"state": dict(enumerate(entries)), "param_groups": [{"params": [0, 1, 2]}]},
                "np": {"a": w.numpy().astype(">f8"), "i": np.arange(5000) + t},
                "misc": [t, 0.1 * t, None, "x", b"y", (True, 2**70)],
            }
        )
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_do_not_depend_on_threads(name: str) -> None:
    cfg = CONFIGS[name]
    first, second, _ = states()
    blobs = []
    for n in (1, 2, 3):
        with threads(n), small_chunks(1000):
            base = sp.compress(first, cfg=cfg)
            delta = sp.compress(second, base, cfg)
            read = sp.Checkpoint.from_bytes(base.to_bytes())
            back = sp.decompress(sp.Checkpoint.from_bytes(delta.to_bytes(), read))
            assert difference(back, sp.decompress(delta)) == ""
            blobs.append((base.to_bytes(), delta.to_bytes()))
    assert blobs[0] == blobs[1] == blobs[2]


_PRINT = """
import sys
import numba
from blake3 import blake3
import shrinkpoint as sp
sys.path.insert(0, {root!r})
from tests.codec.test_checkpoint import CONFIGS, states
first, second, _ = states()
for name, cfg in CONFIGS.items():
    base = sp.compress(first, cfg=cfg)
    print(name, blake3(base.to_bytes()).hexdigest(), blake3(sp.compress(second, base, cfg).to_bytes()).hexdigest())
"""


def test_bytes_do_not_depend_on_the_process() -> None:
    """Bytes do not depend on the hash seed, the number of threads or the process."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    found = []
    for seed, n in (("1", "1"), ("2", "2")):
        env = {**os.environ, "PYTHONHASHSEED": seed, "SHRINKPOINT_THREADS": n}
        done = subprocess.run(
            [sys.executable, "-c", _PRINT.format(root=root)], env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert found[0] == found[1]
    assert len(found[0].splitlines()) == len(CONFIGS)
    first, second, _ = states()
    base = sp.compress(first, cfg=CONFIGS["default"])
    assert base.id in found[0]
    assert sp.compress(second, base, CONFIGS["default"]).id in found[0]


def test_compress_changes_nothing_and_keeps_nothing_of_the_state() -> None:
    """Changing a state after `compress` changes neither checkpoint nor its use as parent."""
    for name, cfg in CONFIGS.items():
        first, second, third = states()
        copy = states()[0]
        base = sp.compress(first, cfg=cfg)
        assert difference(first, copy) == "", name
        expected = sp.decompress(base)
        for x in (first["model"]["fc.weight"], first["model"]["wte.weight"], first["opt"]["state"][0]["exp_avg"]):
            x.fill_(9)
        first["np"]["i"][:] = 0
        first["np"]["a"][:] = 0
        first["opt"]["state"][0]["step"].fill_(77)
        first["misc"].append("more")
        assert difference(sp.decompress(base), expected) == "", name
        assert difference(through_bytes(base), expected) == "", name
        delta = sp.compress(second, base, cfg)
        assert delta.to_bytes() == sp.compress(states()[1], sp.compress(copy, cfg=cfg), cfg).to_bytes(), name
        second["np"]["i"][:] = 0
        second["model"]["fc.weight"].zero_()
        last = sp.compress(third, delta, cfg)
        read = sp.Checkpoint.from_bytes(base.to_bytes())
        read = sp.Checkpoint.from_bytes(delta.to_bytes(), read)
        assert difference(sp.decompress(sp.Checkpoint.from_bytes(last.to_bytes(), read)), sp.decompress(last)) == "", (
            name
        )


PRESETS = {
    "default": sp.Config,
    "precise": sp.presets.precise,
    "exact_weights": sp.presets.exact_weights,
    "lossless": sp.presets.lossless,
    "inshrinkerator": sp.presets.inshrinkerator,
    "lc_checkpoint": sp.presets.lc_checkpoint,
    "check_n_run": sp.presets.check_n_run,
    "bitsnap": sp.presets.bitsnap,
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_a_checkpoint_shares_no_memory_with_the_state(preset: str, library: str) -> None:
    """Arrays that the caller changes after `compress` change no bytes and no reference."""
    rng = np.random.default_rng(0)
    arrays = {"weight": rng.standard_normal((96, 80)).astype(np.float32)}
    for dtype in ("uint8", "int32", "int64", "float16", "float32", "float64", "complex64"):
        bits = rng.integers(0, 256, 80_000, np.uint8)  # no coder makes noise smaller
        arrays[f"noise {dtype}"] = bits.view(dtype).copy()
    arrays["mask"] = rng.integers(0, 2, 70_000).astype(bool)
    state: dict[str, Any] = {name: torch.from_numpy(x) if library == "torch" else x for name, x in arrays.items()}
    if library == "torch":
        state["half"] = torch.from_numpy(arrays["noise float32"].copy()).to(torch.bfloat16)
        state["strided"] = torch.from_numpy(rng.integers(0, 1 << 62, (300, 400)))[:, ::2]
    kinds, cfg = {"weight": "linear"}, PRESETS[preset]()
    expected = sp.compress(copy.deepcopy(state), cfg=cfg, kinds=kinds)
    base = sp.compress(state, cfg=cfg, kinds=kinds)
    delta = sp.compress(state, base, cfg, kinds=kinds)
    after = sp.compress(copy.deepcopy(state), expected, cfg, kinds=kinds)
    for x in state.values():
        x[...] = 1
    assert base.to_bytes() == expected.to_bytes()
    assert base.id == expected.id
    assert delta.to_bytes() == after.to_bytes()


@dataclass(frozen=True, slots=True)
class Views:
    """A codec whose pieces are views of the caller's arrays."""

    id: ClassVar[str] = "test.views"

    def prepare(self, leaves: Sequence[Leaf], parents: Sequence[Reference | None]) -> Sequence[None]:
        return [None] * len(leaves)

    def encode(self, leaf: Leaf, parent: Reference | None, plan: None = None) -> Stored:
        return dataclasses.replace(Exact().encode(leaf, parent), pieces=[as_bytes(leaf.flat).data])


@pytest.mark.parametrize("array", [np.arange(5000.0), torch.arange(5000.0)], ids=["numpy", "torch"])
def test_pieces_in_the_memory_of_an_array_are_copied(array: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CODECS, Views.id, Views)
    state = {"a": np.zeros(9), "x": array, "z": np.zeros(9)}
    ckpt = sp.compress(state, cfg=sp.Config([sp.Rule("x", Views())]))
    before = bytes(as_bytes(array))
    array[...] = 7
    assert before in ckpt.to_bytes()


def test_buffers_that_another_thread_joins_are_whole() -> None:
    class Joined(list[bytes]):
        """Buffers that another thread joins as soon as one of them is looked at."""

        def __getitem__(self, number: Any) -> Any:
            file._parts = [b"".join(list(self))]
            return super().__getitem__(number)

    file = container.Buffers(Joined([b"front", b"piece"]))
    assert file.joined() == b"frontpiece"


def test_from_bytes_keeps_nothing_of_a_buffer_that_changes() -> None:
    ckpt = sp.compress(states()[0])
    for kind in (bytearray, lambda b: memoryview(bytearray(b))):
        buffer = kind(ckpt.to_bytes())
        read = sp.Checkpoint.from_bytes(buffer)
        buffer[:] = bytes(len(buffer))
        assert difference(sp.decompress(read), sp.decompress(ckpt)) == ""


def test_many_threads_at_once() -> None:
    """Several threads may compress at once while some change the number of threads."""
    expected = {name: sp.compress(states()[1], sp.compress(states()[0], cfg=cfg), cfg) for name, cfg in CONFIGS.items()}
    errors: list[str] = []

    def work(offset: int) -> None:
        try:
            for i in range(len(CONFIGS)):
                name = list(CONFIGS)[(i + offset) % len(CONFIGS)]
                first, second, _ = states()
                base = sp.compress(first, cfg=CONFIGS[name])
                delta = sp.compress(second, base, CONFIGS[name])
                sp.set_threads(1 + (i + offset) % 3)
                if delta.to_bytes() != expected[name].to_bytes():
                    errors.append(f"{name}: bytes differ")
                if difference(sp.decompress(delta), sp.decompress(expected[name])):
                    errors.append(f"{name}: values differ")
                shared = sp.Checkpoint.from_bytes(expected[name].to_bytes(), base)
                if difference(sp.decompress(shared), sp.decompress(expected[name])):
                    errors.append(f"{name}: read values differ")
        except BaseException as e:
            errors.append(repr(e))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join(120)
    sp.set_threads(None)
    assert errors == []


def test_one_base_read_from_bytes_is_shared_by_threads() -> None:
    first, second, third = states()
    base = sp.compress(first)
    read = sp.Checkpoint.from_bytes(base.to_bytes())
    wanted = [sp.compress(s, base).to_bytes() for s in (second, third)]
    got: dict[int, bytes] = {}
    workers = [
        threading.Thread(target=lambda i=i, s=s: got.__setitem__(i, sp.compress(s, read).to_bytes()))
        for i, s in enumerate((second, third))
    ]
    for w in workers:
        w.start()
    for w in workers:
        w.join(60)
    assert [got[0], got[1]] == wanted


def test_wrong_missing_and_unresolved_parents() -> None:
    first, second, third = states()
    base = sp.compress(first)
    other = sp.compress(third)
    delta = sp.compress(second, base)
    last = sp.compress(third, delta)
    blob, last_blob = delta.to_bytes(), last.to_bytes()
    unresolved = sp.Checkpoint.from_bytes(blob)
    assert unresolved.is_delta
    assert not unresolved.is_resolved
    assert unresolved.summary() == delta.summary()
    assert unresolved.parent_id == base.id
    for call in (
        lambda: sp.decompress(unresolved),
        lambda: sp.decompress(unresolved, other),
        lambda: sp.decompress(unresolved, delta),
        lambda: sp.decompress(delta, other),
        lambda: sp.Checkpoint.from_bytes(blob, other),
        lambda: sp.Checkpoint.from_bytes(last_blob, base),
        lambda: sp.Checkpoint.from_bytes(last_blob, unresolved),
        lambda: sp.decompress(sp.Checkpoint.from_bytes(last_blob), unresolved),
        lambda: sp.compress(third, unresolved),
    ):
        with pytest.raises(sp.MissingParentError, match=r"[0-9a-f]{12}|parent"):
            call()
    assert difference(sp.decompress(unresolved, base), sp.decompress(delta)) == ""
    assert not unresolved.is_resolved
    for bad in (blob, "x", 3, {"a": 1}):
        for call in (
            lambda bad=bad: sp.compress(first, bad),
            lambda bad=bad: sp.decompress(delta, bad),
            lambda bad=bad: sp.Checkpoint.from_bytes(blob, bad),
        ):
            with pytest.raises(sp.ShrinkpointError, match="prev must be a Checkpoint"):
                call()
    with pytest.raises(sp.BadArgumentError, match="ckpt must be a Checkpoint"):
        sp.decompress(blob)  # type: ignore[arg-type]
    with pytest.raises(sp.BadArgumentError, match="bytes"):
        sp.Checkpoint.from_bytes("text")  # type: ignore[arg-type]


def test_a_delta_of_an_equal_state_with_another_parent_is_another_checkpoint() -> None:
    first, second, third = states()
    a, b = sp.compress(first), sp.compress(third)
    assert sp.compress(second, a).id != sp.compress(second, b).id
    assert sp.compress(second, a).parent_id == a.id


def test_gradients_and_kinds_that_do_not_fit() -> None:
    w = torch.randn(40, 40)
    state = {"model": {"weight": w, "tied": w, "ids": torch.arange(5)}}
    assert sp.compress(state, grads={"weight": w, "tied": w}).nbytes > 0
    assert sp.compress(state, grads={"model": {"weight": w.bfloat16(), "tied": None}}).nbytes > 0
    frozen = w.numpy().copy()
    frozen.setflags(write=False)
    assert sp.compress(state, grads={"weight": frozen}).nbytes > 0
    for grads, words in (
        ({"v": w}, "grads/v"),
        ({"weight": w[:3]}, "model/weight"),
        ({"weight": w.int()}, "model/weight"),
        ({"weight": w.to(torch.float8_e5m2)}, "model/weight"),
        ({"weight": object()}, "weight"),
        ({"weight": w.to_sparse()}, "grads/weight"),
        (w, "tree"),
    ):
        with pytest.raises(sp.ShrinkpointError, match=words):
            sp.compress(state, grads=grads)
    with pytest.raises(sp.BadArgumentError, match="model/weight"):
        sp.compress(state, cfg=sp.presets.inshrinkerator(prune=0.1, prune_metric="sensitivity"))
    for kinds, words in (
        ({"weight": "foo"}, "w.*foo"),
        ({"weight": 3}, "weight"),
        ({3: "linear"}, "3"),
        (["linear"], "kinds"),
    ):
        with pytest.raises(sp.BadArgumentError, match=words):
            sp.compress(state, kinds=kinds)  # type: ignore[arg-type]


def test_configurations_of_the_wrong_kind() -> None:
    for cfg in (sp.presets.lossless, sp.Exact(), "loss", {}, sp.Config().to_json()):
        with pytest.raises(sp.BadArgumentError, match="cfg"):
            sp.compress({"a": torch.ones(3)}, cfg=cfg)  # type: ignore[arg-type]
    for n in (0, -1, 1.5, "2", True):
        with pytest.raises(sp.BadArgumentError, match="threads"):
            sp.set_threads(n)  # type: ignore[arg-type]


def test_empty_states() -> None:
    for state in ({}, [], {"a": torch.empty(0)}, {"a": {}}, [np.zeros((0, 5))]):
        ckpt = sp.compress(state)
        assert difference(state, through_bytes(ckpt)) == ""
        assert ckpt.raw_nbytes == 0
        assert ckpt.ratio == 0
        assert "base" in repr(ckpt)
        delta = sp.compress(state, ckpt)
        assert difference(state, sp.decompress(sp.Checkpoint.from_bytes(delta.to_bytes()), ckpt)) == ""
        assert all(row.bits_per_element == 0 for row in delta.summary())


def test_the_callers_numpy_error_state_is_no_concern() -> None:
    v = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) ** 2 * 1e-44
    state = {"opt": {"state": {0: {"exp_avg_sq": v}}}}
    expected = sp.compress(state)
    with np.errstate(all="raise"):
        base = sp.compress(state)
        back = sp.decompress(sp.Checkpoint.from_bytes(sp.compress(state, base).to_bytes(), base))
    assert base.to_bytes() == expected.to_bytes()
    assert difference(back, sp.decompress(expected)) == ""


def test_checkpoints_travel_between_processes_and_are_copied() -> None:
    state = {"weight": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}
    base = sp.compress(state)
    delta = sp.compress({"weight": state["weight"] * 1.01}, base)
    for again in (pickle.loads(pickle.dumps(delta)), copy.deepcopy(delta)):
        assert again.id == delta.id
        assert sp.compress(state, again).to_bytes() == sp.compress(state, delta).to_bytes()
    unresolved = sp.Checkpoint.from_bytes(delta.to_bytes())
    assert not pickle.loads(pickle.dumps(unresolved)).is_resolved
