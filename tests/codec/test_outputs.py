"""Decoding into arrays that the caller gives."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.outputs import copy_parts


def state(t: int) -> dict[str, Any]:
    w = torch.randn(300, 400, generator=torch.Generator().manual_seed(0))
    w[t::50] += t
    entry = {"exp_avg": w / 9, "exp_avg_sq": w * w, "step": torch.tensor(float(t))}
    return {
        "w": w.bfloat16(),
        "n": np.arange(9.0) + t,
        "e": torch.zeros(0, 2),
        "opt": [entry],
        "s": np.float32(t),
        "k": t,
    }


def empty(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: empty(v) for k, v in tree.items()}
    if isinstance(tree, list):
        return [empty(v) for v in tree]
    if isinstance(tree, torch.Tensor):
        return torch.full_like(tree, 7)
    return np.full_like(tree, 7) if isinstance(tree, np.ndarray) else tree


@pytest.mark.parametrize("preset", [sp.presets.lossless, sp.presets.exact_weights])
@pytest.mark.parametrize("is_resolved", [False, True])
def test_out_has_what_decompress_gives(preset: Any, is_resolved: bool) -> None:
    cfg = preset()
    base = sp.compress(state(0), cfg=cfg)
    for ckpt, prev in ((base, None), (sp.compress(state(1), base, cfg), base)):
        read = ckpt if is_resolved else sp.Checkpoint.from_bytes(ckpt.to_bytes())
        above = prev if not is_resolved else None
        wanted, out = sp.decompress(read, above), empty(state(0))
        got = sp.decompress(read, above, out=out)
        assert got["w"] is out["w"]
        assert got["n"] is out["n"]
        assert got["opt"][0]["exp_avg_sq"] is out["opt"][0]["exp_avg_sq"]
        for a, b in ((wanted, got), (wanted["opt"][0], got["opt"][0])):
            for name in a:
                if isinstance(a[name], torch.Tensor):
                    assert torch.equal(a[name], b[name]), name
                elif name != "opt":
                    np.testing.assert_array_equal(a[name], b[name])


def test_out_is_checked_before_it_is_written() -> None:
    ckpt = sp.compress(state(0), cfg=sp.presets.lossless())
    for change, message in (
        ({"w": torch.full((400, 300), 7).bfloat16()}, r"w: bfloat16 \(300, 400\), in out bfloat16 \(400, 300\)"),
        ({"w": torch.full((300, 400), 7)}, "in out int64"),
        ({"w": torch.full((300, 800), 7).bfloat16()[:, ::2]}, "w: a Tensor in out that is not dense and writable"),
        ({"n": np.broadcast_to(np.float64(7), (9,))}, "n: a ndarray"),
        ({"w": None}, "w: not in out"),
    ):
        out = empty(state(0)) | change
        with pytest.raises(sp.BadArgumentError, match=message):
            sp.decompress(ckpt, out=out)
        assert (out["opt"][0]["exp_avg"] == 7).all()
        assert (np.asarray(out["n"]) == 7).all()
    with pytest.raises(sp.BadArgumentError, match="out must be a tree"):
        sp.decompress(ckpt, out=3)


@pytest.mark.parametrize("n", [10, 300_000])
def test_arrays_of_out_that_share_memory_are_refused(n: int) -> None:
    """Each would be written over by the other, and the state would be another one."""
    ckpt = sp.compress({"a": torch.arange(float(n)), "b": torch.arange(float(n)) + 1}, cfg=sp.presets.lossless())
    x = torch.zeros(2 * n)
    host = x.numpy()
    for out in ({"a": x[:n], "b": x[:n]}, {"a": x[: 2 * n : 2], "b": x[:n]}, {"a": x[5 : n + 5], "b": host[:n]}):
        with pytest.raises(sp.BadArgumentError, match="a: "):
            sp.decompress(ckpt, out=out)
        assert not x.any()
    assert sp.decompress(ckpt, out={"a": x[:n], "b": host[n:]})["a"] is not None
    assert torch.equal(x, torch.cat([torch.arange(float(n)), torch.arange(float(n)) + 1]))


@pytest.mark.parametrize("n", [10, 300_000])
def test_each_place_of_a_tied_array_is_filled(n: int, tmp_path: Any) -> None:
    w = torch.arange(float(n))
    state = {"model": {"a": w, "b": w, "c": w.detach()}, "n": 3}
    store = sp.Store(tmp_path, sp.presets.lossless())
    ckpt = store.save(1, state).checkpoint
    for load in (sp.decompress, lambda ckpt, out: store.load(1, out=out)):
        x, y = torch.zeros(n), torch.zeros(n, requires_grad=True)
        got = load(ckpt, out={"model": {"a": x, "b": y, "c": x.detach()}, "n": 0})
        assert got["model"]["a"] is x
        assert got["model"]["b"] is y
        assert torch.equal(x, w)
        assert torch.equal(y, w)
        assert load(ckpt, out={"model": {"a": x}})["model"]["b"] is x
        x.zero_()
        with pytest.raises(sp.BadArgumentError, match="model/b: float32"):
            load(ckpt, out={"model": {"a": x, "b": torch.zeros(n + 1)}})
        assert not x.any()


def test_every_array_that_fits_is_written_and_every_other_one_is_refused() -> None:
    numbers = torch.arange(12.0).reshape(3, 4)
    cases: list[tuple[Any, Any]] = [
        (numbers[:1, 0], torch.zeros(20)[::5][:1]),
        (numbers.numpy(), torch.zeros(4, 3).t()),
        (numbers, np.zeros((4, 3), np.float32).T),
        (numbers.bfloat16(), np.zeros((4, 3), ml_dtypes.bfloat16).T),
    ]
    for value, target in cases:
        for further in ({}, {"x": value + 1}):  # alone, and in a group
            ckpt = sp.compress({"a": value, **further}, cfg=sp.presets.lossless())
            sp.decompress(ckpt, out={"a": target, "other": {1, 2}, **{k: x * 0 for k, x in further.items()}})
            assert np.array_equal(np.asarray(target, float), np.asarray(value.tolist()))
    ckpt = sp.compress({"a": numbers}, cfg=sp.presets.lossless())
    for target in (torch.zeros(3, 4, device="meta"), torch.zeros(3, 4).to_sparse(), np.ma.zeros((3, 4), np.float32)):
        with pytest.raises(sp.BadArgumentError, match=r"a: a .* in out that is not dense and writable"):
            sp.decompress(ckpt, out={"a": target})


def as_numpy(x: Any) -> Any:
    return x.numpy() if isinstance(x, torch.Tensor) else x


def owner(x: Any) -> Any:
    """Return the array that owns the memory of a view."""
    return x if x.base is None else owner(x.base)


def test_new_arrays_that_share_memory_do_not_overlap_and_are_saved_alone() -> None:
    """Writing, saving or freeing one of several arrays in shared memory leaves the others alone."""
    rng = np.random.default_rng(0)
    sizes = [40_001, 50_000, 70_003, 9_000_000, 40_000, 10]
    before: dict[str, Any] = {str(i): rng.integers(0, 1 << 30, n).astype(np.int32) for i, n in enumerate(sizes)}
    before |= {f"torch {name}": torch.from_numpy(x) for name, x in before.items()}
    after = sp.decompress(sp.Checkpoint.from_bytes(sp.compress(before, cfg=sp.presets.lossless()).to_bytes()))
    spans = sorted((as_numpy(x).ctypes.data, as_numpy(x).nbytes) for x in after.values())
    assert all(start % 64 == 0 or size < 1 << 17 for start, size in spans)
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(spans))
    assert [owner(after["0"]) is owner(after[name]) for name in "1234"] == [True, True, False, False]
    for name in list(after):
        x = after.pop(name)
        if isinstance(x, torch.Tensor):
            assert x.untyped_storage().nbytes() == x.nbytes, "torch.save would write the neighbours"
        x[:] = 0
        assert all((as_numpy(other) == as_numpy(before[key])).all() for key, other in after.items())


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "uint16", "bfloat16", "float16", "float8_e5m2", "float64", "complex64", "complex128"]
)
def test_parts_on_a_gpu_are_copied_bit_by_bit(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torch copies several 16-bit floats by way of float32, which changes NaNs."""
    kind = getattr(torch, dtype)
    width = torch.empty(0, dtype=kind).element_size()
    data = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, 24 * width).astype(np.uint8)
    joined, rooms = torch.from_numpy(data).view(kind), [torch.empty(n, dtype=kind) for n in (5, 0, 19)]
    real, kinds = torch._foreach_copy_, set[torch.dtype]()

    def copied(to: list[torch.Tensor], parts: list[torch.Tensor]) -> Any:
        kinds.update(x.dtype for x in (*to, *parts))
        return real(to, parts)

    monkeypatch.setattr(torch, "_foreach_copy_", copied)
    copy_parts(joined, rooms)
    assert kinds == {getattr(torch, f"int{8 * min(width, 8)}")}
    assert b"".join(room.view(torch.uint8).numpy().tobytes() for room in rooms) == data.tobytes()
