"""Error targets: each array's settings follow from its sketch, and the target is met."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec.weights import error_targets as targets
from shrinkpoint.codec.weights.codebook import Cells
from shrinkpoint.codec.weights.error_targets import Density, smallest, widest
from shrinkpoint.codec.weights.levels import LevelsReference
from shrinkpoint.kernels.histogram import log_histogram
from shrinkpoint.kernels.quantizer import Thresholds, assign

from .common import bits, difference, small_chunks, through_bytes

SPREADS = ("normal", "uniform", "heavy", "outliers", "narrow", "sparse", "steps", "decades", "constant", "odd")
SHAPES = ((1024,), (40, 50), (8, 8, 5, 5), (1, 3000))
DTYPES = ("float16", "bfloat16", "float32", "float64")


def drawn(rng: np.random.Generator, spread: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return values of a named, adverse distribution."""
    x = rng.standard_normal(shape)
    if spread == "uniform":
        return rng.uniform(-1, 1, shape)
    if spread == "heavy":
        return x / (np.abs(rng.standard_normal(shape)) + 1e-3)
    if spread == "outliers":
        return np.where(rng.random(shape) < 0.002, 1e3 * x, x)
    if spread == "narrow":
        return 1 + 1e-3 * x
    if spread == "sparse":
        return np.where(rng.random(shape) < 0.98, 0.0, x)
    if spread == "steps":
        return np.round(4 * x) / 4 + 1e-6 * rng.standard_normal(shape)
    if spread == "decades":
        return np.exp(3 * x)
    if spread == "constant":
        return np.full(shape, float(x.reshape(-1)[0]))
    if spread == "odd":
        x.reshape(-1)[:6] = [math.nan, math.inf, -math.inf, 0.0, -0.0, 50.0]
    return x


def as_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def relative(x: Any, y: Any) -> float:
    """Relative L2 error over the finite values of x."""
    a, b = (np.asarray(v, np.float64).reshape(-1) for v in (x, y))
    finite = np.isfinite(a)
    norm = float(np.linalg.norm(a[finite]))
    return float(np.linalg.norm(b[finite] - a[finite])) / norm if norm else float((b[finite] != 0).any())


def row(ckpt: sp.Checkpoint) -> Any:
    return ckpt.summary()[0]


def rate(ckpt: sp.Checkpoint) -> float:
    found = re.search(r"rate ([\d.e+-]+)$", row(ckpt).note)
    assert found
    return float(found[1])


@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(SPREADS),
    st.sampled_from(SHAPES),
    st.sampled_from(DTYPES),
    st.floats(1e-4, 0.9),
    st.sampled_from(["frozen", "refit"]),
    st.booleans(),
)
def test_no_array_is_beyond_its_target(
    seed: int, spread: str, shape: tuple[int, ...], dtype: str, target: float, policy: str, residual: bool
) -> None:
    """Real and reported errors are within the target; non-finite values are exact."""
    rng = np.random.default_rng(seed)
    x = drawn(rng, spread, shape) * 10.0 ** rng.integers(-3, 3)
    cfg = sp.Config([("*", sp.Quantize(policy=policy, residual=residual))], max_rel_error=target)
    prev = None
    for _ in range(3):
        w = as_dtype(x, dtype)
        prev = sp.compress({"weight": w}, prev, cfg, kinds={"weight": "linear"})
        y = sp.decompress(prev)["weight"]
        assert relative(w, y) <= row(prev).error * (1 + 1e-9) <= target * (1 + 1e-9)
        assert bits(y[~np.isfinite(w)]) == bits(w[~np.isfinite(w)])
        x = x * rng.choice([1.0, 0.99, 1.3]) + 1e-3 * rng.standard_normal(shape)


@settings(max_examples=8)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["normal", "heavy", "narrow", "decades"]),
    st.sampled_from(["float32", "bfloat16"]),
    st.floats(0.01, 0.4),
    st.sampled_from([0.0, 1e-3, 0.05]),
)
def test_every_delta_of_a_chain_keeps_to_it(seed: int, spread: str, dtype: str, target: float, drift: float) -> None:
    """Every delta of a chain meets the target, for steady drift and for jumps."""
    rng = np.random.default_rng(seed)
    x = drawn(rng, spread, (50, 60))
    way = drift * np.abs(x).mean() * rng.standard_normal(x.shape)
    prev = read = None
    for _ in range(21):
        w = as_dtype(x, dtype)
        prev = sp.compress({"weight": w}, prev, sp.Config(max_rel_error=target), kinds={"weight": "linear"})
        read = sp.Checkpoint.from_bytes(prev.to_bytes(), prev=read)
        y = sp.decompress(read)["weight"]
        assert relative(w, y) <= row(prev).error <= target
        assert difference({"weight": y}, sp.decompress(prev)) == ""
        x = x + way + drift * np.abs(x) * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.02)


@pytest.mark.parametrize("spread", ["normal", "uniform", "heavy", "outliers", "decades"])
def test_what_the_sketch_foretells_is_what_nearest_levels_take_and_err(spread: str) -> None:
    x = drawn(np.random.default_rng(3), spread, (60_000,)).astype("f4")
    density = Density.of(Cells.of(log_histogram(x, 6, signed=True)))
    for aim in (0.06, 0.02, 0.007):
        for threshold in (math.inf, float(2.0 ** np.floor(np.log2(np.quantile(np.abs(x), 0.99))))):
            found = widest(density, threshold, aim, exactly=False)
            if found is None:
                continue
            levels = assign(x, Thresholds(threshold), found.codebook)
            protected = levels == 1
            held = (x[protected].view(np.uint32) + 0x8000 & 0xFFFF0000).astype(np.uint32).view(np.float32)
            y = np.concatenate([np.zeros(2), found.codebook])[levels]
            y[protected] = held
            assert relative(x, y) == pytest.approx(found.error, rel=0.03)
            assert found.error <= aim
            assert found.error > 0.9 * aim or found.codebook.size < 16
            p = np.bincount(levels) / x.size
            entropy = float(-(p[p > 0] * np.log2(p[p > 0])).sum())
            assert found.bits == pytest.approx(entropy + 11 * protected.mean(), abs=0.02)


def test_the_step_is_the_widest_and_the_protected_share_the_cheapest() -> None:
    rng = np.random.default_rng(0)
    calm, wild = (drawn(rng, "normal", (200, 200)).astype("f4") for _ in range(2))
    wild[rng.random(wild.shape) < 0.002] *= 60
    kinds = {"calm": "linear", "wild": "linear"}
    ckpt = sp.compress({"calm": calm, "wild": wild}, cfg=sp.Config(max_rel_error=0.02), kinds=kinds)
    memories = [ckpt.reference_of(r) for r in ckpt.records]
    shares = []
    for memory in memories:
        assert isinstance(memory, LevelsReference)
        shares.append(float((memory.levels == 1).mean()))
    assert shares[0] == 0.0
    assert 0.0002 < shares[1] < 0.01
    # Found by trying all: no other of the shares takes fewer bits.
    density = Density.of(Cells.of(log_histogram(wild, 6, signed=True)))
    magnitudes = [math.inf, *(float(2.0**k) for k in range(3, 10))]
    by_hand = [widest(density, threshold, 0.018, exactly=False) for threshold in magnitudes]
    best = smallest(density, magnitudes, 0.018, exactly=False)
    assert best is not None
    assert best.bits == min(c.bits for c in by_hand if c is not None)
    assert by_hand[0] is None or by_hand[0].bits > best.bits
    assert best.threshold < math.inf


def test_the_rate_is_chosen_by_array_and_takes_what_is_left_of_the_target() -> None:
    rng = np.random.default_rng(0)
    x = drawn(rng, "normal", (200, 200)).astype("f4")
    notes, prev = [], None
    for t in range(6):
        prev = sp.compress({"weight": x + np.float32(0.01 * t)}, prev, sp.Config(max_rel_error=0.1))
        notes.append(rate(prev))
        assert 0.097 < row(prev).error <= 0.1
    assert len(set(notes)) > 2
    assert min(notes) > 0


def test_what_is_left_makes_deltas_smaller_and_cannot_be_overspent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remaining error makes deltas smaller, and the target holds if the sample misleads."""
    rng = np.random.default_rng(1)
    x = drawn(rng, "normal", (300, 200)).astype("f4")
    y = x + np.float32(0.02) * rng.standard_normal(x.shape).astype("f4")
    cfg = sp.Config(max_rel_error=0.1)

    def chain() -> sp.Checkpoint:
        return sp.compress({"weight": y}, sp.compress({"weight": x}, cfg=cfg), cfg)

    spent = chain()
    given_price = targets.largest_price
    monkeypatch.setattr(targets, "largest_price", lambda *a: 0.0)
    nearest = chain()
    assert spent.nbytes < 0.8 * nearest.nbytes
    assert row(nearest).error < 0.095
    monkeypatch.setattr(targets, "largest_price", lambda *a: 4 * given_price(*a))
    assert row(chain()).error <= 0.1
    monkeypatch.setattr(targets, "largest_price", lambda *a: 1e6 * given_price(*a))
    alone = sp.compress({"weight": x}, cfg=cfg)
    monkeypatch.setattr(targets, "largest_price", lambda *a: 0.0)
    assert alone.to_bytes() == sp.compress({"weight": x}, cfg=cfg).to_bytes()


@settings(max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([s for s in SPREADS if s != "odd"]),
    st.sampled_from(["float16", "bfloat16", "float32"]),
    st.floats(0.005, 0.5),
)
def test_never_more_than_bins_alone_would_take(seed: int, spread: str, dtype: str, target: float) -> None:
    """A target takes few more bytes than the fewest bins that meet it."""
    x = as_dtype(drawn(np.random.default_rng(seed), spread, (64, 80)), dtype)
    chosen = row(sp.compress({"weight": x}, cfg=sp.Config(max_rel_error=target), kinds={"weight": "linear"}))
    if chosen.note.startswith("log buckets"):  # more than half of it would be lost at the target's step, see below
        return
    for bins in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 254):
        plain = row(
            sp.compress({"weight": x}, cfg=sp.Config([("*", sp.Quantize(bins=bins))]), kinds={"weight": "linear"})
        )
        if plain.error <= target and "zero" not in plain.note:  # by a common step half of it would be lost
            break
    else:
        return
    tables = 64 + 2 * 254
    assert chosen.stored_bytes <= plain.stored_bytes + x.size * -math.log2(targets.SHARE) / 8 + tables


@pytest.mark.xfail(reason="a step finer than the target's is not tried before log buckets", strict=True)
def test_outliers_take_a_finer_step_instead_of_log_buckets() -> None:
    """An array that would lose its small elements at the target's step may be smaller at a finer one."""
    x = as_dtype(drawn(np.random.default_rng(4529), "outliers", (64, 80)), "float16")
    chosen = row(sp.compress({"weight": x}, cfg=sp.Config(max_rel_error=0.0625), kinds={"weight": "linear"}))
    assert chosen.stored_bytes <= 2000, "8 bins alone err by 0.033 and take 1,239 bytes"


def test_a_parents_choice_is_kept_while_it_does_and_the_note_says_why_not() -> None:
    rng = np.random.default_rng(2)
    x, cfg = drawn(rng, "normal", (200, 200)).astype("f4"), sp.Config(max_rel_error=0.05)
    base = sp.compress({"weight": x}, cfg=cfg)
    assert row(base).note.startswith("codebook new; 0 protected, rate ")
    assert row(sp.compress({"weight": x * np.float32(1.01)}, base, cfg)).note.startswith("codebook frozen; ")
    coarse = row(sp.compress({"weight": x * np.float32(0.8)}, base, cfg)).note
    assert re.match(r"codebook refit: the parent's gives 1\.\d+ times the error target; ", coarse)
    fine = row(sp.compress({"weight": x}, sp.compress({"weight": x}, cfg=sp.Config(max_rel_error=0.02)), cfg)).note
    assert re.match(r"codebook refit: the parent's takes 1\.\d+ bits more; ", fine)


def test_a_rate_that_is_asked_for_is_the_rate() -> None:
    x = drawn(np.random.default_rng(4), "normal", (200, 200)).astype("f4")
    asked = sp.compress({"weight": x}, cfg=sp.Config(max_rel_error=0.05, rate=1e-5))
    assert "rate" not in row(asked).note
    assert row(asked).error < 0.047


@pytest.mark.parametrize("solver", ["uniform", "exact"])
@pytest.mark.parametrize(("target", "asked"), [(0.02, 0.002), (0.02, 1.0), (0.01, 0.0005)])
def test_a_rate_that_the_target_has_no_room_for_costs_no_bytes(target: float, asked: float, solver: str) -> None:
    """A rate beyond the target costs no bytes and never makes an array exact."""
    rng, rules, stored = np.random.default_rng(4), [("weight", sp.Quantize(solver=solver))], []
    weights = [drawn(rng, "normal", (100, 120)).astype("f4") for _ in range(5)]
    for rate in (0.0, asked):
        prev, rows = None, []
        for i in range(5):
            x = weights[0] + np.float32(0.01 * i) * weights[i]
            prev = sp.compress({"weight": x}, prev, sp.Config(rules, max_rel_error=target, rate=rate))
            rows.append(row(prev))
        assert all(r.stream == "levels" and r.error <= target for r in rows)
        stored.append(sum(r.stored_bytes for r in rows))
    assert stored[1] < 1.05 * stored[0]


def test_narrow_weights_are_not_flattened() -> None:
    """Narrow weights keep at least two entries, although the target would allow one."""
    x = drawn(np.random.default_rng(5), "narrow", (100, 100)).astype("f4")
    y = sp.decompress(sp.compress({"weight": x}, cfg=sp.Config(max_rel_error=0.05)))["weight"]
    assert float(((y - x) ** 2).mean()) < 0.5 * float(x.astype("f8").var())


def test_gradients_still_protect_what_they_make_matter() -> None:
    rng = np.random.default_rng(6)
    x = rng.standard_normal((100, 100)).astype("f4")
    g = np.where(rng.random(x.shape) < 0.0002, 1e6, 1e-6 * rng.standard_normal(x.shape)).astype("f4")
    ckpt = sp.compress({"weight": x}, cfg=sp.Config(max_rel_error=0.05), grads={"weight": g})
    memory = ckpt.reference_of(ckpt.records[0])
    assert isinstance(memory, LevelsReference)
    large = (abs(x * g) > 1).reshape(-1)
    assert large.any()
    assert (memory.levels[large] == 1).all()
    assert row(ckpt).error <= 0.05


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_chunks_and_libraries_do_not_matter(library: str) -> None:
    """Chunks and array libraries do not change the bytes under an error target."""
    x = drawn(np.random.default_rng(7), "normal", (300, 300)).astype("f4")
    state = {"weight": torch.from_numpy(x) if library == "torch" else x}
    cfg = sp.Config(max_rel_error=0.07)
    with small_chunks(10_000):
        ckpt = sp.compress(state, cfg=cfg)
        assert row(ckpt).error <= 0.07
        assert relative(x, through_bytes(ckpt)["weight"]) <= 0.07
    whole = sp.compress(state, cfg=cfg)
    assert 0.065 < row(whole).error <= 0.07
    assert whole.pieces_of(whole.records[0]) == sp.compress({"weight": x}, cfg=cfg).pieces_of(whole.records[0])


def test_published_solvers_choose_among_bins_alone() -> None:
    x = drawn(np.random.default_rng(8), "normal", (100, 100)).astype("f4")
    preset = sp.presets.inshrinkerator(16)
    rules = [dataclasses.replace(r, codec=dataclasses.replace(r.codec, max_error=0.05)) for r in preset.rules[:1]]
    found = row(sp.compress({"weight": x}, cfg=sp.Config(rules)))
    assert found.error <= 0.05
    assert found.note == "codebook new"


def test_few_values_that_lie_on_no_grid_keep_to_a_small_target() -> None:
    rng = np.random.default_rng(1145513408)
    x = np.round(4 * rng.standard_normal((64, 80))) / 4 + 1e-6 * rng.standard_normal((64, 80))
    found = row(sp.compress({"weight": x.astype("f4")}, cfg=sp.Config(max_rel_error=0.003), kinds={"weight": "linear"}))
    assert found.stream == "levels"
    assert found.error <= 0.003
    assert found.stored_bytes < 3000


def test_subnormals_under_a_target() -> None:
    x = np.random.default_rng(0).integers(-300, 300, (100, 200)) * 5e-324
    for cfg in (sp.Config(max_rel_error=1e-3), sp.Config([("*", sp.Quantize(bins=254))])):
        restored = sp.decompress(sp.compress({"weight": x}, cfg=cfg))["weight"]
        assert np.abs(restored - x).max() <= 5e-324 * (1 if cfg.max_rel_error is None else 0)


@pytest.mark.parametrize("by", [1e-130, 1e-160])
def test_the_error_of_multiples_is_stated_where_squares_underflow(by: float) -> None:
    x = by * np.random.default_rng(0).standard_normal((64, 64))
    ckpt = sp.compress({"weight": x}, cfg=sp.Config([("*", sp.Quantize(residual=True, max_error=1e-6))]))
    assert relative(x / by, sp.decompress(ckpt)["weight"] / by) <= row(ckpt).error * (1 + 1e-9) <= 1e-6


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("target", [None, 1e-4])
def test_values_next_to_the_largest_number(target: float | None) -> None:
    x = np.finfo("f8").max * (1 - 1e-3 * np.random.default_rng(0).random((64, 64)))
    ckpt = sp.compress({"weight": x}, cfg=sp.Config([("*", sp.Quantize())], max_rel_error=target))
    assert relative(x / 1e300, sp.decompress(ckpt)["weight"] / 1e300) <= (target or 1e-3)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("by", [1e150, 1e-150])
def test_an_array_of_another_order_than_its_parent(by: float) -> None:
    x, cfg = np.random.default_rng(0).standard_normal((100, 200)), sp.Config(max_rel_error=0.01)
    base = sp.compress({"weight": x * by}, cfg=cfg)
    assert row(sp.compress({"weight": x}, base, cfg)).error <= 0.01
