"""Files do not depend on settings of the caller, such as torch's default dtype."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.parallel import map_chunks, own_arithmetic, set_threads

CONFIGS = {
    "default": sp.Config(),
    "a rate": sp.Config(rate=0.002),
    "a target": sp.Config(max_rel_error=0.02),
    "rows": sp.Config([("*", sp.Rows(bits=4))]),
    "log buckets": sp.Config([("*", sp.LogBuckets(alpha=0.05))]),
    "inshrinkerator": sp.presets.inshrinkerator(),
    "lc_checkpoint": sp.presets.lc_checkpoint(),
    "check_n_run": sp.presets.check_n_run(bits=4),
    "bitsnap": sp.presets.bitsnap(),
    "lossless": sp.presets.lossless(),
}
KINDS = {f"model/{name}.weight": "linear" for name in ("a", "tiny", "wide", "mixed")}


@contextmanager
def subnormal_numbers_are_zero() -> Iterator[None]:
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot take subnormal numbers for zero")
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def errors_are_raised() -> Iterator[None]:
    with np.errstate(all="raise"):
        yield


def flushes() -> bool:
    return bool(torch.tensor([1e-40]).mul(1.0).view(torch.int32).item() == 0)


def drawn(seed: int) -> dict[str, Any]:
    """Weights and moments, a part of them subnormal; a scalar that is; arrays of both libraries."""
    g = torch.Generator().manual_seed(seed)
    v = (torch.randn(96, 128, generator=g) * 1e-3) ** 2
    v[:, :32] *= 1e-34
    m = torch.randn(96, 128, generator=g) * v.sqrt()
    return {
        "model": {
            "a.weight": torch.randn(96, 128, generator=g),
            "tiny.weight": torch.randn(96, 128, generator=g) * 1e-39,
            "wide.weight": torch.randn(96, 128, generator=g, dtype=torch.float64) * 1e-309,
            "mixed.weight": (torch.randn(96, 128, generator=g) * torch.tensor([1e-3, 1e-41]).repeat(64)).numpy(),
        },
        "optimizer": {"state": {0: {"exp_avg": m, "exp_avg_sq": v, "step": 3}}},
        "least": [5e-324, 1e-310],
    }


def same(x: Any, y: Any) -> bool:
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(same(x[k], y[k]) for k in x)
    if isinstance(x, torch.Tensor):
        return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
    return x.tobytes() == y.tobytes() if isinstance(x, np.ndarray) else bool(repr(x) == repr(y))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("setting", [subnormal_numbers_are_zero, errors_are_raised])
@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_and_values_are_those_of_any_thread(name: str, setting: Any, threads: int) -> None:
    cfg, states = CONFIGS[name], (drawn(0), drawn(1))
    set_threads(threads)
    try:
        base = sp.compress(states[0], cfg=cfg, kinds=KINDS)
        delta = sp.compress(states[1], base, cfg, kinds=KINDS)
        values = [sp.decompress(base), sp.decompress(delta)]
        with setting():
            first = sp.compress(states[0], cfg=cfg, kinds=KINDS)
            second = sp.compress(states[1], first, cfg, kinds=KINDS)
            read = sp.Checkpoint.from_bytes(base.to_bytes())
            found = [sp.decompress(read), sp.decompress(sp.Checkpoint.from_bytes(delta.to_bytes(), read))]
    finally:
        set_threads(None)
    assert (first.to_bytes(), second.to_bytes()) == (base.to_bytes(), delta.to_bytes())
    assert same(found[0], values[0])
    assert same(found[1], values[1])


def test_a_store_reads_and_restates_the_same(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "run", sp.Config(rate=0.002))
    for step in range(4):
        store.save(step, drawn(step), kinds=KINDS)
    wanted = store.load(3)
    with subnormal_numbers_are_zero():
        other = sp.Store(tmp_path / "run")
        part = other.load(3, paths=["model/wide.weight", "model/tiny.weight"])
        other.compact()
        read = other.load(3)
        assert not other.verify()
    assert same(read, wanted)
    assert same(part["model"]["wide.weight"], wanted["model"]["wide.weight"])


def test_the_thread_is_as_it_was() -> None:
    with subnormal_numbers_are_zero():
        with own_arithmetic():
            assert not flushes()
        assert flushes()
        with pytest.raises(sp.BadArgumentError):
            sp.compress({"weight": torch.ones(4)}, cfg="x")  # type: ignore[arg-type]
        with pytest.raises(sp.UnsupportedLeafError):
            sp.compress({"weight": object()})
        assert flushes()
        sp.compress({"weight": torch.randn(64, 64)})
        assert flushes()
    assert not flushes()


def test_threads_of_the_pool_too_whoever_started_them() -> None:
    set_threads(2)
    both = threading.Barrier(2)

    def one(_: int) -> bool:
        both.wait(timeout=30)
        return flushes()

    try:
        with subnormal_numbers_are_zero():
            assert map_chunks(one, range(2)) == [False, False]
            assert flushes()
    finally:
        set_threads(None)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_default_device_and_dtype_have_no_effect(name: str) -> None:
    """`torch.set_default_device` may have set another one; "meta" has no values at all."""
    state = drawn(0) | {"empty": torch.zeros(0, 3), "words": torch.arange(100).to(torch.uint16)}
    expected = sp.compress(state, cfg=CONFIGS[name], kinds=KINDS)
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            ckpt = sp.compress(state, cfg=CONFIGS[name], kinds=KINDS)
            restored = sp.decompress(sp.Checkpoint.from_bytes(ckpt.to_bytes()))
    finally:
        torch.set_default_dtype(torch.float32)
    assert ckpt.to_bytes() == expected.to_bytes()
    assert same(restored, sp.decompress(expected))
