"""Residual levels: error targets beyond 254 bins without exact storage."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import shrinkpoint as sp

from .common import difference, put_together, take_apart, through_bytes

RESIDUAL = sp.Quantize(residual=True)


def config(target: float) -> sp.Config:
    return sp.Config([("weight", RESIDUAL)], max_rel_error=target)


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (0.02 * torch.randn(300, 200, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def relative(x: Any, y: Any) -> float:
    a, b = (np.asarray(v, np.float64) for v in (x, y))
    return float(np.linalg.norm(b - a) / np.linalg.norm(a))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("target", [3e-3, 1e-3, 1e-4, 2e-6])
def test_the_target_is_met_in_fewer_bytes_than_all_bits_take(target: float, dtype: torch.dtype) -> None:
    w = weights(dtype=dtype)
    ckpt = sp.compress({"weight": w}, cfg=config(target))
    (row,) = ckpt.summary()
    assert (row.stream, row.measure) == ("multiples", "relative L2")
    met = relative(w, sp.decompress(ckpt)["weight"])
    assert 0.8 * target < met <= row.error <= target
    # The entropy of a normal variable in steps of that size, and half a bit for symbols coded byte by byte.
    bits = 0.5 * np.log2(2 * np.pi * np.e) - np.log2(0.93 * target * np.sqrt(12))
    assert row.bits_per_element < bits + (0.6 if target > 2e-5 else 4.6)
    assert row.stored_bytes < 0.8 * sp.compress({"weight": w}, cfg=sp.presets.lossless()).summary()[0].stored_bytes
    assert difference(through_bytes(ckpt), sp.decompress(ckpt)) == ""


def test_without_it_such_an_array_is_exact() -> None:
    w = weights()
    ckpt = sp.compress({"weight": w}, cfg=sp.Config(max_rel_error=1e-3))
    assert torch.equal(sp.decompress(ckpt)["weight"], w)
    assert "254 bins miss" in ckpt.summary()[0].note


def test_a_step_that_would_make_zeros_of_most_is_not_taken() -> None:
    w = weights()
    w *= torch.where(torch.arange(w.shape[0]) < 4, 1e5, 1.0)[:, None]
    ckpt = sp.compress({"weight": w}, cfg=config(1e-4))
    assert torch.equal(sp.decompress(ckpt)["weight"], w)
    assert re.search(r"by a finer step 9\d% of it would be as good as zero", ckpt.summary()[0].note)


def test_where_bins_are_enough_or_the_dtype_is_too_coarse_nothing_changes() -> None:
    state = {"coarse": weights(), "half": weights(1, torch.bfloat16)}
    kinds = {"coarse": "linear", "half": "linear"}
    plain = sp.compress(state, cfg=sp.Config(max_rel_error=0.02), kinds=kinds)
    other = sp.compress(state, cfg=config(0.02), kinds=kinds)
    assert [row.stream for row in plain.summary()] == [row.stream for row in other.summary()]
    assert take_apart(plain.to_bytes())[1] == take_apart(other.to_bytes())[1]
    assert torch.equal(sp.decompress(sp.compress(state, cfg=config(1e-4), kinds=kinds))["half"], state["half"])


def test_the_error_does_not_grow_along_a_chain_and_deltas_are_small() -> None:
    w, cfg = weights(), config(1e-3)
    base = prev = sp.compress({"weight": w}, cfg=cfg)
    read = sp.Checkpoint.from_bytes(base.to_bytes())
    for t in range(1, 41):
        w = 0.99 * w + 1e-4 * torch.randn(w.shape, generator=torch.Generator().manual_seed(t))
        prev = sp.compress({"weight": w}, prev, cfg)
        read = sp.Checkpoint.from_bytes(prev.to_bytes(), prev=read)
        assert relative(w, sp.decompress(read)["weight"]) <= 1e-3
        assert difference(sp.decompress(read), sp.decompress(prev)) == ""
    small = sp.compress({"weight": w + 1e-6}, prev, cfg)
    assert small.nbytes < base.nbytes / 5


@given(
    hnp.arrays(
        st.sampled_from([np.float32, np.float64]),
        st.sampled_from([(33, 40), (1500,)]),
        elements=st.floats(width=32),
        fill=st.just(0.25),
    ),
    st.floats(1e-7, 5e-3),
)
@settings(max_examples=60)
def test_whatever_is_in_it_the_target_is_met_or_every_bit_kept(x: Any, target: float) -> None:
    cfg = config(target)
    base = sp.compress({"weight": x}, cfg=cfg)
    for ckpt in (base, sp.compress({"weight": x * np.float32(0.999)}, base, cfg)):
        (row,) = ckpt.summary()
        assert row.error <= target
        back = through_bytes(ckpt, base if ckpt.is_delta else None)
        assert difference(back, sp.decompress(ckpt)) == ""
    if base.summary()[0].measure == "exact":
        assert difference(sp.decompress(base), {"weight": x}) == ""


@pytest.mark.parametrize(
    "meta", [{"s": float("nan")}, {"s": 0.0}, {"s": -1.0}, {"s": 1}, {"s": "1"}, {"w": 3}, {"w": 8}]
)
def test_a_lying_record_is_refused(meta: dict[str, Any]) -> None:
    header, chunks = take_apart(sp.compress({"weight": weights()}, cfg=config(1e-3)).to_bytes())
    header["groups"][0]["m"] |= meta
    with pytest.raises(sp.CorruptDataError, match=r"multiples|NaN"):
        sp.decompress(sp.Checkpoint.from_bytes(put_together(header, chunks)))


def test_the_field_is_checked() -> None:
    with pytest.raises(sp.BadArgumentError, match="residual is 1"):
        sp.Quantize(residual=1)  # type: ignore[arg-type]
