"""Bounds of lossy storage on every value: relative errors, quantiles, nearest codes."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import shrinkpoint as sp

from .common import bits, round_trip, small_chunks, through_bytes

WIDE = np.longdouble
FORMATS = ["float16", "bfloat16", "float32", "float64"]
MANTISSA = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}
SPECIAL = [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf]


def numpy_dtype(name: str) -> Any:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def values(rng: np.random.Generator, name: str, n: int, how: str) -> np.ndarray[Any, Any]:
    """Return n values of a float format, drawn by their bit patterns."""
    dtype = numpy_dtype(name)
    width = 8 * dtype.itemsize
    kind = f"uint{width}"
    raw = rng.integers(0, 256, n * dtype.itemsize, dtype=np.uint8).view(kind)
    sign = raw & np.asarray(1 << (width - 1), kind)
    mantissa = np.asarray((1 << MANTISSA[name]) - 1, kind)
    if how == "any bits":
        return raw.view(dtype)
    if how == "subnormal":
        return (raw & mantissa | sign).view(dtype)
    if how == "tiny integers times the smallest":
        return (raw & np.asarray(7, kind) | sign).view(dtype)
    if how == "largest":
        top = (np.asarray((1 << (width - 1)) - 1, kind) & ~mantissa) - np.asarray(1 << MANTISSA[name], kind)
        return (raw & mantissa | sign | top).view(dtype)
    if how == "one value":
        return np.full(n, raw[0], kind).view(dtype)
    if how == "zero":
        return (sign if rng.random() < 0.5 else np.zeros(n, kind)).view(dtype)
    with np.errstate(all="ignore"):
        x = rng.standard_normal(n) * 10.0 ** rng.integers(-6, 4)
        if how == "sparse":
            x *= rng.random(n) < 0.05
        if how == "with specials":
            x = np.where(rng.random(n) < 0.02, rng.choice(SPECIAL, n), x)
        return x.astype(dtype)


KINDS = [
    *("any bits", "subnormal", "tiny integers times the smallest", "largest", "one value", "zero"),
    *("normal", "sparse", "with specials"),
]
cases = st.tuples(
    st.integers(0, 2**32 - 1), st.sampled_from(FORMATS), st.sampled_from([1024, 1025, 3000]), st.sampled_from(KINDS)
)


def as_torch(x: np.ndarray[Any, Any]) -> torch.Tensor:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def as_numpy(x: Any) -> np.ndarray[Any, Any]:
    if isinstance(x, torch.Tensor):
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()
    return np.asarray(x)


def double(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with np.errstate(invalid="ignore"):  # signalling NaN
        return x.astype(np.float64)


def wide(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return double(x).astype(WIDE)


@given(cases, st.sampled_from([2.0**-17, 0.001, 0.01, 0.05, 0.25, 0.5]), st.booleans(), st.sampled_from([500, 1 << 22]))
@example((0, "float64", 1024, "subnormal"), 0.25, True, 500)
@example((0, "float32", 1024, "any bits"), 2.0**-17, False, 500)
@example((0, "float16", 3000, "any bits"), 0.5, True, 500)
def test_moments_keep_their_relative_bound(
    case: tuple[int, str, int, str], alpha: float, torches: bool, chunk: int
) -> None:
    seed, name, n, how = case
    x = values(np.random.default_rng(seed), name, n, how)
    cfg = sp.Config([("*", sp.LogBuckets(alpha=alpha))])
    with small_chunks(chunk):
        ckpt = sp.compress({"x": as_torch(x) if torches else x}, cfg=cfg)
        y = as_numpy(through_bytes(ckpt)["x"])
    assert y.dtype == x.dtype
    finite = np.isfinite(double(x))
    assert bits(x[~finite]) == bits(y[~finite])
    a, b = wide(x[finite]), wide(y[finite])
    assert (abs(b - a) <= WIDE(alpha) * abs(a)).all()
    assert ((b == 0) == (a == 0)).all()
    row = ckpt.summary()[0]
    met = float((abs(b - a)[a != 0] / abs(a)[a != 0]).max()) if (a != 0).any() else 0.0
    assert met * (1 - 0.006) <= row.error <= 1.01 * alpha  # reported with three digits, rounded up
    if row.stream == "bytes":
        assert bits(x) == bits(y)
    assert ckpt.to_bytes() == sp.compress({"x": as_torch(x) if torches else x}, cfg=cfg).to_bytes() or chunk == 500


def test_moments_survive_a_chain_within_the_bound_of_their_last_checkpoint() -> None:
    """Errors of moments do not accumulate along a chain."""
    rng = np.random.default_rng(0)
    prev = read = None
    for _ in range(6):
        v = rng.standard_normal(4000).astype("f4") ** 2
        prev = sp.compress({"o": {"0": {"exp_avg_sq": v}}}, prev)
        read = sp.Checkpoint.from_bytes(prev.to_bytes(), read)
        y = sp.decompress(read)["o"]["0"]["exp_avg_sq"]
        assert (abs(wide(y) - wide(v)) <= 0.25 * wide(v)).all()


quantizers = st.builds(
    lambda bins, prune, protect, alpha, sigma, solver, coder: sp.Quantize(
        bins=bins, prune=prune, protect=protect, alpha=alpha, sigma=sigma, solver=solver, coder=coder
    ),
    st.sampled_from([2, 3, 16, 100, 254]),
    st.sampled_from([0.0, 0.01, 0.4, 0.9]),
    st.sampled_from([0.0, 0.0005, 0.05, 0.1]),
    st.sampled_from([0.4, 0.05, 0.01, 0.001]),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.sampled_from(["exact", "kmeans++"]),
    st.sampled_from(["smallest", "published"]),
)


def bfloat16_of(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Every value by way of bfloat16, or itself where bfloat16 cannot hold it."""
    t = as_torch(x)
    back = t.to(torch.bfloat16).to(t.dtype)
    lost = ~torch.isfinite(t) | ~torch.isfinite(back) | ((back == 0) & (t != 0))
    return as_numpy(torch.where(lost, t, back))


def levels_of(ckpt: sp.Checkpoint, index: int = 0) -> Any:
    """Levels, codebook and protected values, from the stored bytes alone."""
    read = sp.Checkpoint.from_bytes(ckpt.to_bytes())
    return read.reference_of(read.records[index])


@given(cases, quantizers, st.booleans(), st.sampled_from([500, 1 << 22]))
@example((0, "float64", 3000, "largest"), sp.Quantize(), False, 500)
@example((0, "float64", 3000, "any bits"), sp.Quantize(prune=0.4), True, 500)
@example((0, "float64", 3000, "subnormal"), sp.Quantize(), True, 500)
@example((0, "float32", 3000, "subnormal"), sp.Quantize(protect=0.1), True, 500)
@example((0, "float32", 3000, "largest"), sp.Quantize(protect=0.1), True, 500)
@example((1, "float16", 3000, "largest"), sp.Quantize(protect=0.1), False, 500)
def test_pruned_protected_quantized(
    case: tuple[int, str, int, str], codec: sp.Quantize, torches: bool, chunk: int
) -> None:
    seed, name, n, how = case
    x = values(np.random.default_rng(seed), name, n, how)
    with small_chunks(chunk):
        ckpt = sp.compress({"w": as_torch(x) if torches else x}, cfg=sp.Config([("*", codec)]))
        y = as_numpy(through_bytes(ckpt)["w"])
        row = ckpt.summary()[0]
        memory = levels_of(ckpt) if row.stream == "levels" else None
    assert y.dtype == x.dtype
    assert math.isfinite(row.error)
    if memory is None:
        assert bits(x) == bits(y)
        assert row.note
        return
    levels, codebook = memory.levels, memory.codebook
    finite = np.isfinite(double(x))
    magnitude = abs(double(x))

    pruned, protected, rest = levels == 0, levels == 1, levels >= 2
    assert bits(y[~finite]) == bits(x[~finite])
    assert (levels[~finite] == 1).all()
    assert (y[pruned] == 0).all()
    assert bits(y[protected]) == bits(bfloat16_of(x)[protected])

    assert codebook.size <= (254 if codec.solver == "uniform" else codec.bins)
    if codebook.size:
        chosen = codebook[levels[rest] - 2]
        assert (y[rest].astype(np.float64) == chosen).all()
        distance = abs(wide(x[rest])[:, None] - codebook.astype(WIDE)[None, :]).min(axis=1)
        assert (abs(wide(x[rest]) - chosen.astype(WIDE)) <= distance * (1 + WIDE(1e-15))).all()
    else:
        assert not rest.any()

    # Thresholds are quantiles to the sketch's relative error: as many as asked at most, one bucket further too many.
    budget = codec.protect * finite.sum()
    coarsest = 2.0**-8 if name == "bfloat16" else 0.0  # no bucket is finer than its mantissa
    limits = memory.thresholds
    top, low = limits.protect_magnitude, limits.prune_magnitude
    assert (magnitude[finite] >= top).sum() <= budget
    if math.isfinite(top) and top > 0:
        assert (magnitude[finite] >= top * (1 - 2 * max(codec.alpha, coarsest))).sum() > 0
        normal = {"float16": 6.2e-5, "float64": 2.3e-308}.get(name, 1.2e-38)
        if how in ("normal", "largest") and top > 2 * normal:  # subnormals stand further apart
            assert (magnitude[finite] >= top * (1 - 2.1 * max(codec.alpha, coarsest))).sum() > budget
    assert (magnitude[finite] < low).sum() <= codec.prune * finite.sum()
    assert (protected == ((magnitude >= top) | ~finite | ((codebook.size == 0) & ~pruned))).all()
    assert (pruned == (finite & (magnitude < low) & ~protected)).all()
    if low > 0 and how in ("normal", "largest"):
        assert (magnitude < low * (1 + 2.1 * codec.alpha)).sum() > codec.prune * n

    with np.errstate(all="ignore"):
        scale = float(magnitude[finite].max()) if finite.any() else 1.0
        a, b = wide(x[finite]) / WIDE(scale or 1.0), wide(y[finite]) / WIDE(scale or 1.0)
        l2 = float(np.sqrt(((a - b) ** 2).sum() / (a**2).sum())) if (a != 0).any() else 0.0
    if how not in ("any bits",):
        assert row.error == pytest.approx(l2, rel=0.02, abs=1e-6)


def test_what_bfloat16_cannot_hold_is_kept_to_the_bit() -> None:
    x = np.random.default_rng(0).standard_normal(4000)
    odd = [1e300, -1e300, 3.4e38, 3.39e38, 1e-300, -1e-46, math.inf, -math.inf, math.nan, 3.3961775292304601e38, 5e-324]
    x[: len(odd)] = odd
    x[20:24] = np.array([0x7FF0000000000001, 0xFFF8000000000123, 0x7FF8000000000000, 1], np.uint64).view("f8")
    y = round_trip([x], sp.Config([("*", sp.Quantize(protect=0.02))]))[0]
    exact = bfloat16_of(x)
    big = abs(x) > 1e38
    assert bits(y[big | ~np.isfinite(x)]) == bits(exact[big | ~np.isfinite(x)])
    h = np.random.default_rng(0).standard_normal(4000).astype("f2")
    h[:4] = [65504, -65504, 65472, 65280]
    z = round_trip([h], sp.Config([("*", sp.Quantize(protect=0.01))]))[0]
    assert z[:4].tolist() == [65504, -65504, 65472, 65280]
    assert np.isfinite(z).all()


def test_a_state_of_extremes_is_stored_by_default() -> None:
    """Extreme exponents give finite values, finite reported errors and small real ones."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(5000)
    with np.errstate(all="ignore"):
        for scale in (1e-320, 1e-310, 1e-300, 1e-160, 1e160, 1e200, 1e300):
            for cfg in (sp.Config(), sp.presets.inshrinkerator(), sp.Config(max_rel_error=0.05)):
                ckpt = sp.compress({"weight": x * scale, "o": {"0": {"exp_avg": x * scale}}}, cfg=cfg)
                y = through_bytes(ckpt)["weight"]
                assert np.isfinite(y).all()
                assert all(math.isfinite(row.error) for row in ckpt.summary())
                step = x * scale / scale
                error = np.sqrt((((y / scale) - step) ** 2).sum() / (step**2).sum())
                assert error < (cfg.max_rel_error or 0.2), (scale, cfg)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 0.01, 0.1]),
    st.sampled_from(["magnitude", "sensitivity"]),
    st.sampled_from(["torch", "numpy", "mixed", "bfloat16"]),
)
def test_sensitivity(seed: int, prune: float, protect: float, metric: str, library: str) -> None:
    rng = np.random.default_rng(seed)
    w = {k: rng.standard_normal((50, 40)).astype("f4") * 10.0 ** rng.integers(-3, 3) for k in ("a", "b")}
    g = {k: rng.standard_normal((50, 40)).astype("f4") * 10.0 ** rng.integers(-6, 1) for k in w}
    if library == "bfloat16":
        g = {k: v.astype(ml_dtypes.bfloat16) for k, v in g.items()}
    state: Any = {"model": {k: torch.from_numpy(v) if library != "numpy" else v for k, v in w.items()}}
    grads = {k: as_torch(v) if library in ("torch", "bfloat16") else v for k, v in g.items()}
    cfg = sp.Config([("*", sp.Quantize(prune=prune, prune_metric=metric, protect=protect))])
    ckpt = sp.compress(state, cfg=cfg, grads={"model": grads} if seed % 2 else grads)
    memories = [levels_of(ckpt, i) for i in range(2)]
    x = np.stack([v.ravel() for v in w.values()])
    s = abs(x * np.stack([v.ravel().astype("f4") for v in g.values()]))
    levels = np.stack([m.levels for m in memories])
    limits = memories[0].thresholds
    assert limits.protect_magnitude == memories[1].thresholds.protect_magnitude
    by_size, by_gain = abs(x) >= limits.protect_magnitude, s >= limits.protect_sensitivity
    assert (by_size | by_gain == (levels == 1)).all()
    assert by_size.sum() <= protect / 2 * x.size
    assert by_gain.sum() <= protect / 2 * x.size
    if protect == 0.1:
        assert by_size.any()
        assert by_gain.any()
        assert (abs(x) >= limits.protect_magnitude * 0.979).sum() > protect / 2 * x.size
        assert (s >= limits.protect_sensitivity * 0.979).sum() > protect / 2 * x.size
    low = limits.prune_sensitivity if metric == "sensitivity" else limits.prune_magnitude
    measure = s if metric == "sensitivity" else abs(x)
    assert ((measure < low) & ~(by_size | by_gain) == (levels == 0)).all()
    assert (measure < low).sum() <= prune * x.size
    if prune:
        assert (measure < low * 1.021).sum() > prune * x.size


def test_thresholds_are_global_for_protection_and_by_layer_type_for_pruning() -> None:
    rng = np.random.default_rng(0)
    scale = {"fc1": 1.0, "fc2": 100.0, "conv": 1e-3, "wte": 1e-6, "attn": 1e-2, "norm": 50.0, "other": 1.0}
    shape: dict[str, tuple[int, ...]] = {"conv": (16, 16, 3, 3), "norm": (3000,), "other": (4000,)}
    state = {k: torch.from_numpy(rng.standard_normal(shape.get(k, (60, 60))) * v).float() for k, v in scale.items()}
    kinds = {
        "fc1": "linear",
        "fc2": "linear",
        "conv": "convolution",
        "wte": "embedding",
        "attn": "attention",
        "norm": sp.Kind("norm"),
        "other": "other",
    }
    cfg = sp.Config([("weight", sp.Quantize(prune=0.5, protect=0.01, embedding_bins=100, bins=7, solver="exact"))])
    ckpt = sp.compress(state, cfg=cfg, kinds=kinds)
    rows = {row.path: row for row in ckpt.summary()}
    assert rows["norm"].stream == rows["other"].stream == "bytes"  # "other" is not known to be a layer
    memory = {r.path: levels_of(ckpt, i) for i, r in enumerate(ckpt.records) if r.stream == "levels"}
    assert memory.keys() == kinds.keys() - {"norm", "other"}
    pruned = {k: float((m.levels == 0).mean()) for k, m in memory.items()}
    assert pruned["wte"] == 0
    assert pruned["fc1"] > 0.9
    assert pruned["fc2"] < 0.1
    for name in ("conv", "attn"):
        assert 0.45 < pruned[name] <= 0.5
    protected = {k: int((m.levels == 1).sum()) for k, m in memory.items()}
    assert protected["fc2"] > 0
    assert sum(protected.values()) == protected["fc2"]
    assert sum(protected.values()) <= 0.01 * sum(m.levels.size for m in memory.values())
    assert memory["wte"].codebook.size == 100
    assert memory["fc1"].codebook.size == 7
    y = through_bytes(ckpt)
    assert torch.equal(y["norm"], state["norm"])


def test_small_integer_norm_and_bias_arrays_are_exact_whatever_the_rules_say() -> None:
    rng = np.random.default_rng(0)
    state = {
        "tiny": torch.randn(1023),
        "layer.bias": torch.randn(5000),
        "ln_1.weight": torch.randn(5000),
        "running_mean": torch.randn(5000),
        "ids": torch.arange(5000),
        "mask": torch.ones(5000, dtype=torch.bool),
        "complex": torch.randn(5000, dtype=torch.complex64),
        "f8": torch.randn(5000).to(torch.float8_e4m3fn),
        "big": rng.standard_normal(5000).astype(">f4"),
        "scalar": np.float64(1.5),
    }
    for codec in (sp.Quantize(bins=2, protect=0, prune=0.5), sp.LogBuckets(alpha=0.5)):
        ckpt = sp.compress(state, cfg=sp.Config([("*", codec)]))
        y = through_bytes(ckpt)
        for name, x in state.items():
            assert bits(x) == bits(y[name]), name
        assert {row.stream for row in ckpt.summary()} == {"bytes"}


@settings(max_examples=20)
@given(st.sampled_from([0.5, 0.2, 0.05, 0.01, 0.003, 1e-5]), st.sampled_from(FORMATS), st.integers(0, 2**32 - 1))
def test_the_error_target_holds(target: float, name: str, seed: int) -> None:
    """The error target holds along a chain, by exact storage if a codebook cannot reach it."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(5000) * (1 + rng.standard_exponential(5000) ** 3)
    prev = None
    for _ in range(3):
        x = x + 0.01 * rng.standard_normal(5000)
        w = x.astype(numpy_dtype(name))
        prev = sp.compress({"w": w}, prev, sp.Config(max_rel_error=target), kinds={"w": "linear"})
        y = sp.decompress(prev)["w"].astype("f8")
        error = math.sqrt(((y - w.astype("f8")) ** 2).sum() / (w.astype("f8") ** 2).sum())
        row = prev.summary()[0]
        assert error <= target
        assert row.error == pytest.approx(error, rel=0.01)
        assert row.stream == "levels" or "exact" in row.note or (target <= 0.1 and "by a common step" in row.note)


def test_the_default_states_and_keeps_a_small_error() -> None:
    w = torch.randn(300, 300)
    row = sp.compress({"weight": w}).summary()[0]
    assert row.measure == "relative L2"
    assert 0 < row.error < 0.1
    assert row.bits_per_element < 6
    assert row.raw_bytes == 360_000
    assert row.stored_bytes < 360_000 / 5
