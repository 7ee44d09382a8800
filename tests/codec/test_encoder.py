"""Small deltas: frozen codebooks and thresholds, warm starts, one slope, several rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec import entropy
from shrinkpoint.codec.entropy import table
from shrinkpoint.codec.weights import level_assignment
from shrinkpoint.codec.weights.level_assignment import cheapest_levels
from shrinkpoint.codec.weights.levels import LevelsReference
from shrinkpoint.kernels.kmeans import quantization_loss, weighted_kmeans
from shrinkpoint.kernels.levels import joint_counts
from shrinkpoint.kernels.quantizer import Thresholds, assign
from shrinkpoint.kernels.rate_distortion import rate_distortion_levels, unsettled


def drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


def memory(ckpt: sp.Checkpoint, number: int = 0) -> LevelsReference:
    found = ckpt.reference_of(ckpt.records[number])
    assert isinstance(found, LevelsReference)
    return found


def note(ckpt: sp.Checkpoint, path: str = "weight") -> str:
    return next(row.note for row in ckpt.summary() if row.path == path)


def test_the_summary_says_why_a_codebook_was_kept_or_not() -> None:
    w = drawn(200, 200)
    base = sp.compress({"weight": w})
    assert note(base) == "codebook new"
    near = sp.compress({"weight": w * np.float32(1.001)}, base)
    assert note(near) == "codebook frozen"
    np.testing.assert_array_equal(memory(near).codebook, memory(base).codebook)
    far = sp.compress({"weight": w * np.float32(0.8)}, base)
    assert note(far).startswith("codebook refit: the parent's gives 1.")
    assert not np.array_equal(memory(far).codebook, memory(base).codebook)
    refit = sp.Config([("*", sp.Quantize(policy="refit"))])
    assert note(sp.compress({"weight": w}, base, refit)) == "codebook refit"


def test_a_threshold_stays_while_it_protects_about_what_was_asked_and_the_note_says_when_not() -> None:
    """The parent's threshold is kept while it protects at most 1.25 times the given share."""
    w = drawn(300, 300)
    cfg = sp.Config([("*", sp.Quantize(protect=0.01, trigger=1e9))])
    prev = sp.compress({"weight": w}, cfg=cfg)
    stayed = moved = 0
    for factor in np.linspace(1.002, 1.08, 12, dtype="f4"):
        now = w * factor
        ckpt = sp.compress({"weight": now}, prev, cfg)
        old, new = (memory(c).thresholds.protect_magnitude for c in (prev, ckpt))
        share = float((abs(now) >= old).mean())
        if 0.005 <= share <= 0.0125:
            assert new == old
            assert note(ckpt) == "codebook frozen"
            stayed += 1
        else:
            assert new > old
            assert note(ckpt) == f"codebook frozen; protected from {new:.6g} on, before from {old:.6g}"
            assert (abs(now) >= new).mean() <= 0.01
            moved += 1
        prev = ckpt
    assert stayed >= 4
    assert moved >= 1


def test_an_array_that_comes_to_protect_much_more_gets_a_new_codebook() -> None:
    """An array that protects over 8 times the given share gets a new codebook."""
    large, small = drawn(600, 600), drawn(100, 100, seed=1)
    prev = sp.compress({"weight": small, "x": large}, kinds={"x": "linear", "weight": "linear"})
    asked = sp.Quantize().protect
    notes = []
    for far in (0, 20, 160, 165):
        now = small.copy()
        now.flat[:far] = 5.0
        was = float((memory(prev).levels == 1).mean())
        prev = sp.compress({"weight": now, "x": large}, prev, sp.Config([("*", sp.Quantize(trigger=1e9))]))
        share = float((memory(prev).levels == 1).mean())
        passed = was < 8 * asked <= share
        assert (f"refit: {share:.2%} are protected, {was:.2%} were" in note(prev)) == passed
        assert note(prev, "x").startswith("codebook frozen")
        notes.append(passed)
    assert notes == [False, False, True, False]


def test_a_warm_start_is_lloyds_iteration_from_the_parents_entries() -> None:
    cfg = sp.Config([("*", sp.Quantize(bins=16, solver="exact", policy="warm"))])
    w = drawn(200, 200)
    base = sp.compress({"weight": w}, cfg=cfg)
    moved = np.float32(0.8) * w + np.float32(0.3) * np.abs(drawn(200, 200, seed=1))
    warm = sp.compress({"weight": moved}, base, cfg)
    anew = sp.compress(
        {"weight": moved}, base, sp.Config([("*", sp.Quantize(bins=16, solver="exact", policy="refit"))])
    )
    assert (note(warm), note(anew)) == ("codebook warm", "codebook refit")
    old, new, best = (memory(c).codebook for c in (base, warm, anew))
    assert old.size == new.size == best.size == 16
    assert not np.array_equal(new, old)
    assert np.abs(new - old).max() < np.abs(best - old).max()
    assert warm.summary()[0].error < sp.compress({"weight": moved}, base, sp.Config([("*", sp.Quantize(
        bins=16, solver="exact", trigger=1e9))])).summary()[0].error  # fmt: skip


def test_a_warm_start_of_a_uniform_codebook_is_refused() -> None:
    with pytest.raises(sp.BadArgumentError, match="policy 'warm' is for solver 'exact' or 'kmeans\\+\\+'"):
        sp.Quantize(policy="warm")
    for other in ("exact", "kmeans++"):
        sp.Quantize(policy="warm", solver=other)


def _cost(x: Any, codebook: Any, before: Any, levels: Any, price: float) -> float:
    """Squared error and the price of the empirical conditional entropy, together."""
    size = codebook.size + 2
    counts = joint_counts(before, levels, size, size)
    rows = counts.sum(axis=1, keepdims=True)
    bits = float((counts * np.log2(np.maximum(rows, 1) / np.maximum(counts, 1))).sum())
    return float(((x - codebook[levels.astype(int) - 2]) ** 2).sum()) + price * bits


def test_more_rounds_of_the_encoder_cost_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rounds lower the cost, because prices follow the levels of the round before."""
    x = drawn(60_000)
    codebook = np.arange(-20, 21) * 0.25
    before = assign(x, Thresholds(), codebook)
    moved = x + np.float32(0.05) * drawn(60_000, seed=1)
    nearest = assign(moved, Thresholds(), codebook)
    price = 0.01
    several = cheapest_levels(moved, nearest, before, codebook.size + 2, codebook, price)
    monkeypatch.setattr(level_assignment, "ROUNDS", 1)
    one = cheapest_levels(moved, nearest, before, codebook.size + 2, codebook, price)
    costs = [_cost(moved, codebook, before, levels, price) for levels in (nearest, one, several)]
    assert costs[2] < 0.99 * costs[1] < costs[0]


def _every_element(x: Any, nearest: Any, before: Any, codebook: Any, price: float, importance: Any, size: int) -> Any:
    """Compute the levels of `cheapest_levels` over all elements, without shortcuts."""
    levels = nearest
    for _ in range(3):
        counts = joint_counts(before, levels, size, codebook.size + 2) + 0.5
        prices = (price * np.log2(counts.sum(axis=1, keepdims=True) / counts)).astype(np.float32)
        levels = rate_distortion_levels(x, nearest, before, codebook.astype(np.float32), prices, importance)
    return levels


@pytest.mark.parametrize(
    ("bins", "step", "rate", "parent", "weighted", "looks"),
    [
        (24, 0.02, 0.0005, True, False, "few all"),
        (12, 0.3, 0.03, False, True, "few all"),
        (24, 0.02, 0.01, True, True, "few all few all"),
        (200, 0.02, 0.001, False, False, "few all few all few"),
        (200, 0.02, 0.001, False, True, "few"),
        (200, 0.02, 0.001, True, False, ""),
    ],
)
def test_settled_elements_need_no_look(
    bins: int, step: float, rate: float, parent: bool, weighted: bool, looks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds over open elements only give the same levels as rounds over all elements."""
    x, codebook = drawn(90_000), np.linspace(-3.2, 3.2, bins)
    before = assign(x, Thresholds(prune_magnitude=0.01), codebook)
    x += np.float32(step) * drawn(x.size, seed=1)
    nearest = assign(x, Thresholds(protect_magnitude=2.8, prune_magnitude=0.01), codebook)
    importance = None
    if weighted:
        importance = np.clip(np.random.default_rng(7).lognormal(0, 1, x.size), 0.05, 50).astype(np.float32)
    calls: list[str] = []

    def counted(part: Any, *others: Any) -> Any:
        calls.append("all" if part.shape[0] == x.size else "few")
        return unsettled(part, *others)

    monkeypatch.setattr(level_assignment, "unsettled", counted)
    size = codebook.size + 2 if parent else 1
    inside = before if parent else np.zeros_like(before)
    expected = _every_element(x, nearest, inside, codebook, rate, importance, max(size, 2))
    for wrap in (lambda a: a, lambda a: None if a is None else torch.from_numpy(a)):
        calls.clear()
        given = wrap(x), wrap(nearest), before if parent else None, size, codebook, rate, wrap(importance)
        np.testing.assert_array_equal(np.asarray(cheapest_levels(*given)), expected)
        assert " ".join(calls) == looks


def test_one_slope_holds_for_all_arrays() -> None:
    """An array with smaller gradients gets larger errors and fewer bytes under one slope."""
    first = {name: drawn(200, 200, seed=i) for i, name in enumerate("ab")}
    second = {name: w + np.float32(0.1) * drawn(200, 200, seed=5 + i) for i, (name, w) in enumerate(first.items())}
    spread = np.random.default_rng(0).lognormal(0, 0.3, (200, 200)).astype("f4")
    optimizer = {"state": {n: {"exp_avg_sq": spread * np.float32(v)} for n, v in (("a", 1e-2), ("b", 1e-8))}}
    base = sp.compress({"model": first, "optimizer": optimizer})
    delta = sp.compress({"model": second, "optimizer": optimizer}, base, sp.Config(rate=0.001))
    rows = {row.path: row for row in delta.summary()}
    a, b = rows["model/a"], rows["model/b"]
    assert b.stored_bytes < 0.5 * a.stored_bytes
    assert b.error > 1.5 * a.error
    # The array with large gradients hardly changes, in spite of the rate.
    nearest = sp.compress({"model": second, "optimizer": optimizer}, base).summary()[0]
    assert a.error < 1.5 * nearest.error


def test_many_rare_symbols_need_fine_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rare symbols need tables of more than 12 bits to stay near the entropy."""
    rng = np.random.default_rng(0)
    symbols = np.where(rng.random(1_000_000) < 0.01, rng.integers(1, 250, 1_000_000), 0).astype(np.uint8)
    counts = np.bincount(symbols)
    least = float((counts * np.log2(symbols.size / np.maximum(counts, 1))).sum()) / 8
    fine = len(entropy.encode(symbols))
    assert fine < 1.03 * least
    monkeypatch.setattr(table, "PRECISIONS", (12, 12, 12))
    assert fine < 0.95 * len(entropy.encode(symbols))


@pytest.mark.parametrize("rate", [0.001, 0.01])
@pytest.mark.parametrize("walk", ["random", "one direction", "all one way"])
def test_what_the_encoder_holds_back_is_bounded_however_long_the_chain(rate: float, walk: str) -> None:
    """The error of each delta is bounded along a chain of any length.

    Each delta is decided against the true weights: for every weight, at every checkpoint,

        error**2 <= (half a step)**2 + rate * variance * log2(2 n + levels),

    because a level is cheaper by at most the price of the dearest one. The bound includes walks in one direction.
    """
    rng = np.random.default_rng(3)
    w = rng.standard_normal((120, 120)).astype("f4")
    way = np.sign(rng.standard_normal(w.shape)).astype("f4") if walk == "one direction" else np.ones_like(w)
    cfg = sp.Config([("*", sp.Quantize(protect=0.0))], rate=rate)
    prev = read = None
    behind = []
    for number in range(101):
        prev = sp.compress({"weight": w}, prev, cfg)
        read = sp.Checkpoint.from_bytes(prev.to_bytes(), read)
        got = np.asarray(sp.decompress(read)["weight"], np.float64)
        codebook = memory(read).codebook
        half = np.diff(codebook).max() / 2
        nearest = np.abs(w.astype("f8")[..., None] - codebook).min(-1)
        price = rate * w.astype("f8").var() * 1.02 * np.log2(2 * w.size + codebook.size + 2)
        assert ((got - w) ** 2 <= nearest**2 + price).all()
        within = (w >= codebook[0]) & (w <= codebook[-1])
        assert nearest[within].max() <= half * 1.001
        met = float(np.linalg.norm(got - w) / np.linalg.norm(w.astype("f8")))
        assert prev.summary()[0].error == pytest.approx(met, rel=0.01)
        if number:
            behind.append(float(((w - got) * way).mean()))
        step = np.float32(0.003)
        w = w + step * (rng.standard_normal(w.shape).astype("f4") if walk == "random" else way)
    # The weights moved a third of a standard deviation; the lag is a small part of it, and does not grow.
    assert max(np.abs(behind)) < 0.1
    assert np.mean(np.abs(behind[80:])) < 1.5 * np.mean(np.abs(behind[20:60])) + 0.005


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "float16"])
@pytest.mark.parametrize("spread", [0.1, 0.03, 0.01, 0.003, 0.001, 1e-4])
@pytest.mark.parametrize("middle", [1.0, -3.0, 0.007])
def test_narrow_weights_far_from_zero_are_as_good_as_the_best_codebook(
    dtype: str, spread: float, middle: float
) -> None:
    """Narrow weights far from zero are within 1.05 times the error of the best codebook."""
    x = middle * (1 + spread * np.random.default_rng(0).standard_normal((120, 120)))
    w = torch.from_numpy(x).to(getattr(torch, dtype))
    prev = None
    for factor in (1.0, 1.0 + spread / 100):
        now = (w.double() * factor).to(w.dtype)
        parent, prev = prev, sp.compress({"weight": now}, prev)
        got = sp.decompress(sp.Checkpoint.from_bytes(prev.to_bytes(), parent))["weight"]
        true = now.double().numpy()
        error = np.sqrt(((got.double().numpy() - true) ** 2).mean())
        values, counts = np.unique(true - middle, return_counts=True)
        best = weighted_kmeans(values, counts.astype("f8"), 24)
        # An entry is a value of the dtype, too.
        held = torch.from_numpy(best + middle).to(w.dtype).double().numpy() - middle
        least = np.sqrt(quantization_loss(values, counts.astype("f8"), np.unique(held)) / true.size)
        assert error <= 1.05 * least + 1e-12


def test_ordinary_weights_are_sketched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from shrinkpoint.codec.weights import codebook

    def never(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(codebook, "finer", never)
    for x in (drawn(200, 200), drawn(200, 200) ** 3, np.random.default_rng(0).uniform(-1, 2, (200, 200)).astype("f4")):
        for like in (torch.float32, torch.bfloat16):
            sp.compress({"weight": torch.from_numpy(x).to(like)}, cfg=sp.Config())
