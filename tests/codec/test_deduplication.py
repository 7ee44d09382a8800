"""Copies within a state (half-precision weights, clones) are stored once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.base import Codec, Leaf, Parents, Reference, Stored
from shrinkpoint.codec.lossless.exact import Exact
from shrinkpoint.codec.registry import CODECS

from .common import difference, known, through_bytes


def mixed(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return a mixed-precision state: float32 masters, and weights cast from them."""
    torch.manual_seed(seed)
    masters = {"fc": torch.randn(96, 64) * 0.02, "out": torch.randn(64, 128)}
    return {"model": {k: v.to(dtype) for k, v in masters.items()}, "master": masters}


MIXED = known("model/fc", "model/out", "master/fc", "master/out")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "cfg", [sp.Config(), sp.presets.lossless(), sp.Config(max_rel_error=0.01), sp.Config(rate=0.01)]
)
def test_a_cast_is_stored_as_a_reference(cfg: sp.Config, dtype: torch.dtype) -> None:
    state = mixed(dtype=dtype)
    ckpt = sp.compress(state, cfg=cfg, kinds=MIXED)
    rows = {row.path: row for row in ckpt.summary()}
    assert (rows["model/fc"].stream, rows["model/fc"].stored_bytes) == ("copy", 0)
    assert rows["model/fc"].note == "a copy of master/fc"
    assert rows["master/fc"].stream != "copy"
    back = through_bytes(ckpt)
    assert difference(back["model"], {k: v.to(dtype) for k, v in back["master"].items()}) == ""
    met = float(
        (back["model"]["fc"].double() - state["model"]["fc"].double()).norm() / state["model"]["fc"].double().norm()
    )
    assert met <= rows["model/fc"].error * 1.0001 + 1e-12
    if cfg == sp.presets.lossless():
        assert difference(back, state) == ""
        assert rows["model/fc"].error == 0


def test_one_bit_of_difference_is_no_copy() -> None:
    state = mixed()
    state["model"]["out"].view(torch.int16)[-1, -1] ^= 1
    rows = {row.path: row.stream for row in sp.compress(state, kinds=MIXED).summary()}
    assert rows["model/fc"] == "copy"
    assert rows["model/out"] == "levels"


def test_a_copy_never_loses_what_its_own_codec_would_keep() -> None:
    w = np.random.default_rng(0).standard_normal((64, 64)).astype("f4")
    state = {"a": w, "b": w.copy()}
    exact_b = sp.compress(state, cfg=sp.Config([("b", sp.Exact())]), kinds=known("a", "b"))
    assert [row.stream for row in exact_b.summary()] == ["levels", "bytes"]
    assert difference(through_bytes(exact_b)["b"], w) == ""
    exact_a = sp.compress(state, cfg=sp.Config([("a", sp.Exact())]), kinds=known("a", "b"))
    assert [row.stream for row in exact_a.summary()] == ["bytes", "copy"]
    assert difference(through_bytes(exact_a), state) == ""


@pytest.mark.parametrize("codec", [sp.Quantize(prune=0.5), sp.Quantize(bins=4, embedding_bins=254), sp.Rows(2)])
def test_a_copy_of_another_kind_is_coded_by_its_own(codec: sp.Quantize | sp.Rows) -> None:
    """Embeddings have bins of their own and are not pruned; only weights become rows."""
    w = np.random.default_rng(0).standard_normal((64, 64)).astype("f4")
    cfg = sp.Config([("*", codec)])
    kinds = {"a": "embedding" if isinstance(codec, sp.Rows) else "linear", "b": "embedding"}
    if isinstance(codec, sp.Rows):
        del kinds["b"]
    both = through_bytes(sp.compress({"a": w, "b": w.copy()}, cfg=cfg, kinds=kinds))
    own = through_bytes(sp.compress({"b": w}, cfg=cfg, kinds={"b": "embedding"} if "b" in kinds else None))
    assert difference(both["b"], own["b"]) == ""


@dataclass(frozen=True)
class Doubled:
    """A user's codec, which doubles embeddings."""

    id: ClassVar[str] = "tests.doubled"

    def prepare(self, leaves: Sequence[Leaf], parents: Parents) -> Sequence[None]:
        return [None] * len(leaves)

    def encode(self, leaf: Leaf, parent: Reference | None, plan: None) -> Stored:
        factor = 2 if leaf.kind.layer == "embedding" else 1
        return Exact().encode(replace(leaf, flat=factor * leaf.flat), parent)


class Declared(Doubled):
    """The same, which says that it does not depend on the kind."""

    id: ClassVar[str] = "tests.declared"
    by_kind: ClassVar[bool] = False


@pytest.mark.parametrize(("codec", "factor"), [(Doubled(), 2), (Declared(), 1)])
def test_a_codec_says_whether_it_depends_on_the_kind(
    codec: Codec, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an embedding is restored with the values of an equal linear layer."""
    monkeypatch.setitem(CODECS, codec.id, type(codec))
    w = np.arange(4096, dtype=np.float32)
    cfg = sp.Config([("*", codec)])
    restored = sp.decompress(sp.compress({"a": w, "b": w.copy()}, cfg=cfg, kinds={"a": "linear", "b": "embedding"}))
    assert np.array_equal(restored["b"], factor * w)


def test_the_error_of_a_copy_of_tiny_values_and_a_nan_is_stated() -> None:
    w = np.random.default_rng(0).standard_normal((64, 64)) * 1e-200
    w[0, 0] = np.nan
    first, second = sp.compress({"a": w, "b": w.copy()}, cfg=sp.Config([("*", sp.Quantize(bins=8))])).summary()
    assert second.stream == "copy"
    assert second.error == first.error > 0.1


def test_clones_come_back_as_arrays_of_their_own_and_may_part_later() -> None:
    w = np.random.default_rng(0).standard_normal((64, 64)).astype("f4")
    kinds = known("weight", "ema")
    for cfg in (sp.Config(), sp.presets.lossless()):
        base = sp.compress({"weight": w, "ema": w.copy()}, cfg=cfg, kinds=kinds)
        assert [row.stream for row in base.summary()][1] == "copy"
        back = through_bytes(base)
        assert not np.shares_memory(back["weight"], back["ema"])
        assert difference(back["weight"], back["ema"]) == ""
        moved = {"weight": w * np.float32(1.01), "ema": w}
        delta = sp.compress(moved, base, cfg, kinds=kinds)
        restored = through_bytes(delta, sp.Checkpoint.from_bytes(base.to_bytes()))
        assert difference(restored, sp.decompress(delta)) == ""
        again = sp.compress({"weight": w, "ema": w.copy()}, delta, cfg, kinds=kinds)
        assert difference(*(sp.decompress(again)[k] for k in ("weight", "ema"))) == ""


def test_torch_clones_come_back_as_tensors_of_their_own() -> None:
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    ckpt = sp.compress({"weight": w, "ema": w.clone()}, kinds=known("weight", "ema"))
    assert [row.stream for row in ckpt.summary()][1] == "copy"
    for back in (sp.decompress(ckpt), through_bytes(ckpt)):
        kept = back["ema"].clone()
        back["weight"].zero_()
        assert difference(back["ema"], kept) == ""


def test_moments_and_tied_arrays_are_not_taken_for_copies() -> None:
    w = torch.randn(64, 64)
    m = torch.rand(64, 64)
    state = {"weight": w, "tied": w, "optimizer": {"state": {0: {"exp_avg": m, "exp_avg_sq": m.clone()}}}}
    codecs = [row.stream for row in sp.compress(state).summary()]
    assert codecs == ["levels", "grid", "rank-one"]


@pytest.mark.parametrize("target", [0.02, 0.01, 0.008, 0.007, 0.005])
def test_copies_hold_the_error_target(target: float) -> None:
    """The error target also holds for rounded copies of a restored master."""
    for seed in range(3):
        x = torch.randn(128, 128, generator=torch.Generator().manual_seed(seed))
        state = {"master": x, "model": x.bfloat16(), "clone": x.clone()}
        back = sp.decompress(sp.compress(state, cfg=sp.Config(max_rel_error=target), kinds=known(*state)))
        for name, y in state.items():
            met = (back[name].double() - y.double()).norm() / y.double().norm()
            assert float(met) <= target, name


@pytest.mark.parametrize("scale", [1e160, 1e-310])
def test_copies_of_float64_whose_squares_are_no_numbers(scale: float) -> None:
    x = np.random.default_rng(0).standard_normal((64, 64)) * scale
    ckpt = sp.compress({"a": x, "b": x.copy()}, kinds=known("a", "b"))
    back = through_bytes(ckpt)
    for row, y in zip(ckpt.summary(), (back["a"], back["b"]), strict=True):
        met = np.linalg.norm((y - x) / scale) / np.linalg.norm(x / scale)
        assert met <= row.error < 0.2
