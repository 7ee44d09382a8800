"""LC-Checkpoint: the closed loop against an oracle, code tables, super-steps, exact arrays."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec.errors import CorruptDataError
from shrinkpoint.codec.lossless.addends import MOST, decode_addends, encode_addends
from shrinkpoint.codec.rebase import rebase
from shrinkpoint.codec.state.leaves import LeafSpec
from shrinkpoint.codec.weights.exponent import ExponentReference

from .common import bits, difference, put_together, regression, small_chunks, take_apart, through_bytes

DTYPES = ["float16", "bfloat16", "float32", "float64"]


def own(dtype: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def walk(seed: int, dtype: str, n: int = 3000) -> tuple[np.ndarray[Any, Any], np.random.Generator]:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 0.05, n), rng


def moved(w: np.ndarray[Any, Any], rng: np.random.Generator, size: float = 1e-3) -> np.ndarray[Any, Any]:
    return np.asarray(w + size * rng.standard_t(3, w.shape))


def lc(x: int | None = 2, coder: str = "huffman") -> sp.Config:
    return sp.Config([("*", sp.ExponentDelta(x, coder))])


def oracle(x: np.ndarray[Any, Any], before: np.ndarray[Any, Any], keep: int | None) -> np.ndarray[Any, Any]:
    """Compute one step of the loop element by element, as the paper describes it."""
    # Many differences of float16 are subnormal in it; in float32 they have exponents.
    delta = x.astype(np.float32) - before.astype(np.float32) if x.dtype == np.float16 else x - before
    groups: dict[tuple[int, bool], list[float]] = {}
    tiny = float(ml_dtypes.finfo(delta.dtype).tiny)

    def bucket(d: float) -> tuple[int, bool]:
        # Subnormals share one exponent field.
        return (int(np.frexp(max(abs(d), tiny / 2))[1]), d < 0)

    for d in delta.astype(np.float64).tolist():
        if d:
            groups.setdefault(bucket(d), []).append(d)
    ranked = sorted(groups, key=lambda b: (-b[0], b[1]))[: None if keep is None else 2**keep - 1]
    kept = {b: _rounded((Fraction(min(groups[b])) + Fraction(max(groups[b]))) / 2, x.dtype) for b in ranked}
    out = before.copy()
    for i, d in enumerate(delta.astype(np.float64).tolist()):
        if d and bucket(d) in kept:
            out[i] = before[i] + kept[bucket(d)]
    return out


def _rounded(v: Fraction, dtype: np.dtype[Any]) -> Any:
    """Round to nearest, ties to the even pattern, by comparing neighbours."""
    near = np.asarray(float(v)).astype(dtype)
    pattern = np.dtype(f"u{dtype.itemsize}")
    u = int(near.view(pattern))
    candidates = [np.array(k, pattern).view(dtype) for k in (u - 1, u, u + 1)]
    return min(candidates, key=lambda c: (abs(Fraction(float(c)) - v), int(c.view(pattern)) % 2))[()]


@pytest.mark.parametrize("keep", [1, 2, 3, None])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_closed_loop_is_the_papers(dtype: str, keep: int | None) -> None:
    w, rng = walk(1, dtype)
    w[:50] *= 1e-6  # differences and sums among subnormals of float16
    prev, restored = None, None
    for t in range(4):
        x = w.astype(own(dtype))
        ckpt = sp.compress({"w": x}, prev, lc(keep))
        (row,) = ckpt.summary()
        restored = x if restored is None else oracle(x, restored, keep)
        for y in (sp.decompress(ckpt)["w"], through_bytes(ckpt, prev)["w"]):
            assert y.dtype == x.dtype
            assert bits(y) == bits(restored)
        assert (row.stream, row.measure) == (("exponent", "relative L2") if t else ("bytes", "exact"))
        wide = x.astype(np.float64)
        error = np.linalg.norm(restored.astype(np.float64) - wide) / np.linalg.norm(wide)
        assert error <= row.error <= 1.02 * error
        prev = sp.Checkpoint.from_bytes(ckpt.to_bytes(), prev)  # as another process would go on
        w = moved(w, rng)


@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(DTYPES),
    st.sampled_from([1, 2, 8, None]),
    st.sampled_from(["huffman", "packed", "smallest"]),
    st.lists(st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e30]), min_size=1, max_size=4),
    st.sampled_from([400, 1 << 22]),
)
def test_chains_of_any_size(seed: int, dtype: str, x: int | None, coder: str, sizes: list[float], chunk: int) -> None:
    """Chains restore the same bits from bytes, memory, small chunks and after a rebase."""
    rng = np.random.default_rng(seed)
    values = [rng.standard_normal(1100) * np.exp(rng.normal(0, 5, 1100))]
    for size in sizes:
        values.append(np.where(rng.random(1100) < 0.3, -0.0, values[-1] + size * rng.standard_t(2, 1100)))
    with small_chunks(chunk), np.errstate(over="ignore"):
        chain: list[sp.Checkpoint] = []
        for v in values:
            state = {"w": torch.from_numpy(v).to(getattr(torch, dtype))}
            prev = chain[-1] if chain else None
            ckpt = sp.compress(state, prev, lc(x, coder))
            assert ckpt.to_bytes() == sp.compress(state, prev, lc(x, coder)).to_bytes()
            found = sp.Checkpoint.from_bytes(ckpt.to_bytes(), prev)
            assert memory(found) == memory(ckpt)
            assert difference(sp.decompress(found), sp.decompress(ckpt)) == ""
            chain.append(found)
        for parent in (None, chain[0]):
            anew = sp.Checkpoint.from_bytes(rebase(chain[-1], parent).to_bytes(), parent)
            assert difference(sp.decompress(anew), sp.decompress(chain[-1])) == ""
            assert memory(anew) == memory(chain[-1])


def memory(ckpt: sp.Checkpoint) -> list[Any]:
    found = [ckpt.reference_of(r) for r in ckpt.records]
    return [(bits(m.data), m.tables if isinstance(m, ExponentReference) else None) for m in found]  # type: ignore[attr-defined]


@pytest.mark.parametrize("keep", [2, 3, None])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_is_kept_comes_nearer_however_small_the_steps(dtype: str, keep: int | None) -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(0, 0.02, 20_000)
    x = [(w + t * 5e-5 * rng.standard_normal(w.size)).astype(dtype) for t in range(2)]
    r = sp.decompress(sp.compress({"w": x[1]}, sp.compress({"w": x[0]}, cfg=lc(keep)), lc(keep)))["w"]
    a, b, c = (np.asarray(v, np.float64) for v in (*x, r))
    kept = b != c if keep is None else c != a
    assert kept.any() or keep is None
    half_a_place = np.spacing(np.abs(np.maximum(x[1], r)).astype(dtype)).astype(np.float64) / 2
    assert (np.abs(b - c)[kept] <= np.abs(b - a)[kept] / 2 + half_a_place[kept]).all()


def test_errors_do_not_add_up() -> None:
    w, rng = walk(2, "float32", 20_000)
    errors, open_loop = [], []
    prev = sp.compress({"w": w.astype("f4")}, cfg=lc(3))
    drifted = w.astype("f4")
    for _ in range(15):
        before, w = w.astype("f4"), moved(w, rng)
        prev = sp.compress({"w": w.astype("f4")}, prev, lc(3))
        errors.append(prev.summary()[0].error)
        # Without the loop: quantized steps from one true state to the next.
        step = sp.compress({"w": w.astype("f4")}, sp.compress({"w": before}, cfg=lc(3)), lc(3))
        drifted = drifted + (sp.decompress(step)["w"] - before)
        open_loop.append(np.linalg.norm(drifted - w) / np.linalg.norm(w))
    assert errors[-1] < 4 * errors[0]
    assert open_loop[-1] > 1.3 * errors[-1]


def test_ties_between_signs_go_to_the_positive_bucket() -> None:
    base = np.zeros(1024, "f4")
    x = base.copy()
    x[:6] = [-4.0, 4.0, -5.0, 1.5, -1.0, -1.25]
    y = sp.decompress(sp.compress({"w": x}, sp.compress({"w": base}, cfg=lc()), lc()))["w"]
    assert y[:6].tolist() == [-4.5, 4.0, -4.5, 1.5, 0.0, 0.0]


def test_level_zero_leaves_every_bit() -> None:
    base = np.full(2000, -0.0, "f4")
    x = base.copy()
    x[0], x[1:1000] = 8.0, 0.0
    y = sp.decompress(sp.compress({"w": x}, sp.compress({"w": base}, cfg=lc(1)), lc(1)))["w"]
    assert y[0] == 8
    assert np.signbit(y[1:]).all()


def note(ckpt: sp.Checkpoint) -> str:
    return str(ckpt.summary()[0].note)


def stored(ckpt: sp.Checkpoint) -> int:
    return int(ckpt.summary()[0].stored_bytes)


def test_shares_are_written_as_in_the_paper_and_meet_its_sizes() -> None:
    """Figure 4: below 5 % with 2 bits, below 10 % with 3; fixed-width codes take x / 32."""
    w, rng = walk(3, "float32", 50_000)
    base = sp.compress({"w": w.astype("f4")}, cfg=lc())
    x = {"w": moved(w, rng).astype("f4")}
    sizes = {}
    for b in (2, 3):
        with_codes, fixed = sp.compress(x, base, lc(b)), sp.compress(x, base, lc(b, "packed"))
        e, ep, eph = (float(s) / 100 for s in re.findall(r"([\d.]+) %", note(with_codes)))
        assert note(with_codes).startswith("E ")
        assert "E+P+H" in note(with_codes)
        assert f"{2**b - 1} of " in note(with_codes)
        assert eph == pytest.approx(stored(with_codes) / 200_000, rel=0.01)
        assert ep == pytest.approx(b / 32, rel=0.01)
        assert stored(fixed) == pytest.approx(50_000 * b / 8, abs=60)
        assert "H" not in note(fixed)
        assert 0.15 < e < 0.2
        assert eph < (0.05 if b == 2 else 0.10)
        sizes[b] = stored(with_codes)
        assert difference(sp.decompress(with_codes), sp.decompress(fixed)) == ""
    every = sp.compress(x, base, lc(None))
    e, _ = (float(s) / 100 for s in re.findall(r"([\d.]+) %", note(every)))
    assert "E+H" in note(every)
    assert sizes[2] < sizes[3] < stored(every) < 50_000 * 4 * e
    smallest = sp.compress(x, base, lc(2, "smallest"))
    assert stored(smallest) < sizes[2]
    assert "E+P+C" in note(smallest)


def test_code_tables_are_cached_by_the_number_of_buckets() -> None:
    rng = np.random.default_rng(4)

    def step(shares: list[float]) -> np.ndarray[Any, Any]:
        """Return differences whose buckets have these shares; the rest is zero."""
        sizes = [4.0, 2.0, 1.0, -4.0]
        return np.asarray(rng.choice([*sizes[: len(shares)], 0.0], 5000, p=[*shares, 1 - sum(shares)]), "f4")

    x = np.zeros(5000, "f4")
    prev = sp.compress({"w": x}, cfg=lc(3))
    first = None
    plan = [
        ([0.1, 0.2, 0.05], "new"),
        ([0.2, 0.05, 0.1], "reused"),  # other buckets take the ranks
        ([0.3, 0.3], "new"),
        ([0.1, 0.2, 0.05], "reused"),  # the table for four levels is still there
        ([0.25, 0.25, 0.25], "new"),  # as many levels, but it no longer fits
        ([0.2, 0.3, 0.25], "reused"),
    ]
    for shares, how in plan:
        x = x + step(shares)
        ckpt = sp.compress({"w": x}, prev, lc(3))
        assert ("code table reused" in note(ckpt)) == (how == "reused"), shares
        assert ("new code table" in note(ckpt)) == (how == "new"), shares
        assert bits(through_bytes(ckpt, prev)["w"]) == bits(x)
        # The cache is in what `prev` carries: a process that read its parent goes on with the same bytes.
        prev = sp.Checkpoint.from_bytes(ckpt.to_bytes(), prev)
        first = first or prev
    assert first is not None
    # A table that the parent lacks is refused.
    header, chunks = take_apart(ckpt.to_bytes())
    bare = sp.compress({"w": x}, cfg=lc(3))
    blob = put_together({**header, "parent": bare.id}, chunks)
    with pytest.raises(CorruptDataError, match="no code table for 4"):
        sp.Checkpoint.from_bytes(blob, bare)


def test_the_cache_is_bounded() -> None:
    x = np.zeros(4000, "f8")
    prev = sp.compress({"w": x}, cfg=lc(None))
    for k in range(2, 20):
        step = np.zeros(4000)
        step[: 10 * k] = 2.0 ** -np.repeat(np.arange(k), 10)
        prev = sp.compress({"w": sp.decompress(prev)["w"] + step}, prev, lc(None))
    (m,) = (prev.reference_of(r) for r in prev.records)
    assert isinstance(m, ExponentReference)
    assert [len(t) for t in m.tables] == list(range(13, 21))


def test_more_buckets_than_a_byte_numbers() -> None:
    """Differences of float64 may have more buckets than a byte can number."""
    exponents = np.arange(-1000, 1000)
    x = np.concatenate([2.0**exponents, -(2.0**exponents)])
    base = sp.compress({"w": np.zeros_like(x)}, cfg=lc(None))
    for coder in ("huffman", "packed", "smallest"):
        ckpt = sp.compress({"w": x}, base, lc(None, coder))
        assert bits(through_bytes(ckpt, base)["w"]) == bits(x)
        assert "4000 of 4000" in note(ckpt)
    for parent in (None, base):
        assert bits(through_bytes(rebase(ckpt, parent), parent)["w"]) == bits(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_stored_exactly_and_the_chain_goes_on(dtype: str) -> None:
    w, rng = walk(5, dtype)
    prev = None
    for t, odd in enumerate([None, np.nan, np.nan, None, None, np.inf, "overflow", None]):
        x = w.astype(own(dtype))
        if isinstance(odd, float):
            x[7] = odd
        if odd == "overflow":
            x[:] = ml_dtypes.finfo(own(dtype)).max
        ckpt = sp.compress({"w": x}, prev, lc())
        y = through_bytes(ckpt, prev)["w"]
        if ckpt.summary()[0].stream == "bytes":
            assert bits(y) == bits(x)
            assert t == 0 or "exact: " in note(ckpt)
        else:
            assert odd is None
            assert np.isfinite(y.astype("f8")).all()
        assert (t in (1, 2, 3, 5, 6)) <= (ckpt.summary()[0].stream == "bytes")
        assert t != 4 or ckpt.summary()[0].stream == "exponent"
        prev = ckpt
        w = moved(w, rng)


def test_an_error_target_is_kept() -> None:
    w, rng = walk(6, "float32", 5000)
    base = sp.compress({"w": w.astype("f4")}, cfg=lc())
    x = moved(w, rng, 0.05).astype("f4")
    loose = sp.compress({"w": x}, base, lc())
    assert loose.summary()[0].error > 0.1
    for cfg in (
        sp.Config([("*", sp.ExponentDelta(2))], max_rel_error=0.01),
        sp.Config([("*", sp.ExponentDelta(2, max_error=0.01))], max_rel_error=0.9),
    ):
        ckpt = sp.compress({"w": x}, base, cfg)
        assert bits(sp.decompress(ckpt)["w"]) == bits(x)
        assert "error target 0.01" in note(ckpt)


def adam(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    m = (1e-3 * rng.standard_t(3, (50, 60))).astype("f4")
    return {
        "model": {"weight": rng.standard_normal((50, 60)).astype("f4"), "norm.weight": np.ones(2000, "f4") + seed},
        "optimizer": {"state": {0: {"step": np.float32(seed), "exp_avg": m, "exp_avg_sq": m * m}}},
    }


def test_the_preset_and_second_moments() -> None:
    """Second moments have a relative bound by default, and may follow as differences."""
    base = sp.compress(adam(0), cfg=sp.presets.lc_checkpoint())
    rows = {r.path: r.stream for r in sp.compress(adam(1), base, sp.presets.lc_checkpoint()).summary()}
    assert rows == {
        "model/weight": "exponent",
        "model/norm.weight": "bytes",
        "optimizer/state/0/step": "bytes",
        "optimizer/state/0/exp_avg": "exponent",
        "optimizer/state/0/exp_avg_sq": "rank-one",
    }
    everything = sp.presets.lc_checkpoint(second_moments="exponent")
    prev = sp.compress(adam(0), cfg=everything)
    for t in range(1, 6):
        prev = sp.compress(adam(t), prev, everything)
        assert {r.stream for r in prev.summary() if "exp_avg_sq" in r.path} == {"exponent"}
        v = sp.decompress(prev)["optimizer"]["state"][0]["exp_avg_sq"]
        assert (v >= 0).all()
        assert bits(through_bytes(rebase(prev))["optimizer"]["state"][0]["exp_avg_sq"]) == bits(v)
    # The same numbers as a weight do pass zero: the guard is what keeps a second moment from it.
    plain = None
    for t in range(6):
        plain = sp.compress({"weight": adam(t)["optimizer"]["state"][0]["exp_avg_sq"]}, plain, everything)
    assert plain is not None
    assert (sp.decompress(plain)["weight"] < 0).any()
    for bad in ("x", None, 3):
        with pytest.raises(sp.BadArgumentError, match="second_moments"):
            sp.presets.lc_checkpoint(second_moments=bad)  # type: ignore[arg-type]
    assert sp.presets.lc_checkpoint(huffman=False).rules[0].codec == sp.ExponentDelta(2, "packed")
    chain = sp.ChainPolicy(base_every=7)
    assert sp.presets.lc_checkpoint(None, chain=chain).chain == chain


def test_a_first_moment_beside_a_quantized_difference_decodes() -> None:
    """A grid decodes with a second moment that is stored as a difference."""
    cfg = sp.Config([("second moment", sp.ExponentDelta(8))])
    prev = None
    for t in range(3):
        ckpt = sp.compress(adam(t), prev, cfg)
        assert {r.stream for r in ckpt.summary() if r.path.endswith("exp_avg")} == {"grid"}
        assert difference(through_bytes(ckpt, prev), sp.decompress(ckpt)) == ""
        prev = ckpt


@pytest.mark.parametrize("other", [sp.Config(), sp.presets.lossless(), sp.presets.inshrinkerator()], ids=str)
def test_over_a_parent_of_another_system_and_under_a_child_of_one(other: sp.Config) -> None:
    w, rng = walk(7, "float32")
    a, b, c = (w.astype("f4"), moved(w, rng).astype("f4"), moved(w, rng).astype("f4"))
    first = sp.compress({"w": a}, cfg=other, kinds={"w": "linear"})
    second = sp.compress({"w": b}, first, lc())
    has_bytes = first.summary()[0].stream == "bytes"
    # A difference to levels is not possible: the array starts again, exactly.
    assert second.summary()[0].stream == ("exponent" if has_bytes else "bytes")
    third = sp.compress({"w": c}, second, lc())
    assert third.summary()[0].stream == "exponent"
    fourth = sp.compress({"w": a}, third, other, kinds={"w": "linear"})
    for ckpt, prev in ((second, first), (third, second), (fourth, third)):
        assert difference(through_bytes(ckpt, prev), sp.decompress(ckpt)) == ""


# ------------------------------------------------------------------------------------------------ super-steps


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_super_step_restores_to_the_bit_and_is_smaller(dtype: str) -> None:
    """A super-step restores exactly, serves later deltas, and is smaller than its chain."""
    w, rng = walk(8, dtype, 40_000)
    chain: list[sp.Checkpoint] = []
    for _ in range(6):
        state = {"w": torch.from_numpy(w).to(getattr(torch, dtype))}
        chain.append(sp.compress(state, chain[-1] if chain else None, lc(3)))
        w = moved(w, rng)
    last = sp.compress({"w": torch.from_numpy(w).to(getattr(torch, dtype))}, chain[-1], lc(3))
    base = sp.Checkpoint.from_bytes(chain[0].to_bytes())
    step = sp.Checkpoint.from_bytes(rebase(chain[-1], base).to_bytes(), base)
    assert difference(sp.decompress(step), sp.decompress(chain[-1])) == ""
    assert difference(sp.decompress(sp.Checkpoint.from_bytes(last.to_bytes(), step)), sp.decompress(last)) == ""
    exact = sp.compress(sp.decompress(chain[-1]), base, sp.presets.lossless())
    assert stored(step) < sum(stored(c) for c in chain[1:])
    # An exact difference of bfloat16 is nearly as small; of float32 and float64 it is several times as large.
    assert stored(step) < {"float16": 0.9, "bfloat16": 1.0, "float32": 0.5, "float64": 0.3}[dtype] * stored(exact)
    alone = sp.Checkpoint.from_bytes(rebase(chain[-1]).to_bytes())
    assert not alone.is_delta
    assert difference(sp.decompress(sp.Checkpoint.from_bytes(last.to_bytes(), alone)), sp.decompress(last)) == ""


def addends_of(after: np.ndarray[Any, Any], before: np.ndarray[Any, Any], dtype: str) -> bytes:
    """Encode and decode addends; return the coded bytes."""
    spec = LeafSpec("numpy", dtype, after.shape)
    coded = encode_addends(after.view(np.uint8), before.view(np.uint8), spec)
    assert coded is not None
    out = np.empty(after.nbytes, np.uint8)
    decode_addends(memoryview(coded), out, spec, before.view(np.uint8))
    assert out.tobytes() == after.tobytes()
    return coded


@given(st.integers(0, 2**32 - 1), st.sampled_from(DTYPES), st.integers(1, 200), st.booleans())
@example(seed=0, dtype="float32", n=1, wild=True)
def test_addends_take_any_array_to_any_other(seed: int, dtype: str, n: int, wild: bool) -> None:
    """Addends restore any array from any other, with NaNs, infinities and both zeros."""
    rng = np.random.default_rng(seed)
    width = own(dtype).itemsize
    before = np.frombuffer(rng.bytes(n * width), own(dtype)).copy()
    if wild:
        after = np.frombuffer(rng.bytes(n * width), own(dtype)).copy()
    else:
        with np.errstate(all="ignore"):
            after = (before.astype("f8") + rng.choice([0, 1, -1e-3, 1e5], n)).astype(own(dtype))
    some = rng.random(n) < 0.2
    after[some] = rng.choice(np.array([0.0, -0.0, np.nan, np.inf, -np.inf]), n)[some].astype(own(dtype))
    addends_of(after, before, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_as_few_addends_as_there_were(dtype: str) -> None:
    """The few distinct sums of addends are found again."""
    rng = np.random.default_rng(9)
    before = rng.normal(0, 1, 20_000).astype(own(dtype))
    after = before
    steps = np.array([0.0, 0.0, 0.01, -0.013]).astype(own(dtype))
    chosen = rng.integers(0, 4, (3, after.size))
    for numbers in chosen:
        after = after + steps[numbers]
    coded = addends_of(after, before, dtype)
    # a * 0.01 - b * 0.013 with a + b of at most 3, zero among them: ten sums.
    kinds, counts = np.unique(np.stack([(chosen == k).sum(axis=0) for k in (2, 3)]), axis=1, return_counts=True)
    assert kinds.shape[1] == 10
    entropy = float(-(counts * np.log2(counts / after.size)).sum()) / 8
    # Roundings on the way make a few sums more; in coarse formats they make some of them the same.
    assert len(coded) < 1.6 * entropy
    assert 9 <= coded[0] < 64  # a varint: the number of addends


def test_too_many_addends_are_not_tried() -> None:
    rng = np.random.default_rng(10)
    before, after = (rng.standard_normal(4096).astype("f8") for _ in range(2))
    spec = LeafSpec("numpy", "float64", (4096,))
    assert encode_addends(after.view(np.uint8), before.view(np.uint8), spec) is None
    assert MOST + 1 < 1 << 16


# ------------------------------------------------------------------------------------------------ hostile bytes


def _delta() -> tuple[dict[str, Any], bytes, sp.Checkpoint, sp.Checkpoint]:
    w, rng = walk(11, "float32", 1200)
    base = sp.compress({"w": w.astype("f4")}, cfg=lc())
    delta = sp.compress({"w": moved(w, rng).astype("f4")}, base, lc())
    header, chunks = take_apart(delta.to_bytes())
    return header, b"".join(chunks), base, delta


def _varint(n: int) -> bytes:
    out = b""
    while n >= 128:
        out, n = out + bytes([n % 128 + 128]), n >> 7
    return out + bytes([n])


HEADS = {
    "empty": b"",
    "unknown form": b"\x09",
    "too many buckets": b"\0" + _varint(5000),
    "huge number of buckets": b"\0" + _varint(2**60),
    "addends cut short": b"\0\x03" + b"\0" * 11,
    "unknown coding": b"\0\x00\x07",
    "constant beyond": b"\0\x00\x00\x01",
    "one level coded": b"\0\x01" + b"\0" * 4 + b"\x02\x01\x00",
    "more levels than there are": b"\0\x01" + b"\0" * 4 + b"\x02\x03\x00\x01\x02",
    "a level with two ranks": b"\0\x01" + b"\0" * 4 + b"\x02\x02\x00\x00",
    "a level that is none": b"\0\x01" + b"\0" * 4 + b"\x02\x02\x00\x05",
    "no such table": b"\0\x01" + b"\0" * 4 + b"\x03\x02\x00\x01",
    "bytes after": b"\0\x00\x00\x00\x00",
    "too many tables": b"\x01\x09",
    "a table of one": b"\x01\x01\x01\x00",
    "a huge table": b"\x01\x01" + _varint(2**40) + b"\x00",
    "a table of nothing": b"\x01\x01\x02\x00",
}


@pytest.mark.parametrize("name", HEADS)
def test_hostile_heads(name: str) -> None:
    header, body, base, _ = _delta()
    record = header["groups"][0]
    record["b"] = [len(HEADS[name]), record["b"][1]]
    blob = put_together(header, [HEADS[name] + body[-record["b"][1] :]])
    with pytest.raises(CorruptDataError):
        sp.Checkpoint.from_bytes(blob, base)


def test_levels_without_a_parent_and_of_integers() -> None:
    header, body, base, delta = _delta()
    header["parent"] = None
    header["groups"][0].pop("p")
    with pytest.raises(CorruptDataError, match="without a parent"):
        sp.decompress(sp.Checkpoint.from_bytes(put_together(header, [body])))
    anew, chunks = take_apart(rebase(delta, base).to_bytes())
    anew["parent"] = None
    anew["groups"][0].pop("p")
    with pytest.raises(CorruptDataError, match="without a parent"):
        sp.decompress(sp.Checkpoint.from_bytes(put_together(anew, chunks)))
    header["arrays"][0]["d"] = "int32"
    with pytest.raises(CorruptDataError, match="int32"):
        sp.decompress(sp.Checkpoint.from_bytes(put_together(header, [body])))


@pytest.mark.parametrize("seed", range(3))
def test_damaged_chunks_raise_or_decode(seed: int) -> None:
    """Damaged chunks give a typed error or an array."""
    header, body, base, delta = _delta()
    rng = np.random.default_rng(seed)
    anew, chunks = take_apart(rebase(delta, base).to_bytes())
    assert chunks[0][anew["groups"][0]["b"][0]] == 1  # by addends
    for plain, data in ((header, body), (anew, b"".join(chunks))):
        for _ in range(150):
            bad = bytearray(data)
            for _ in range(int(rng.integers(1, 4))):
                bad[int(rng.integers(len(bad)))] = int(rng.integers(256))
            try:
                found = sp.Checkpoint.from_bytes(put_together(plain, [bytes(bad)]), base)
            except CorruptDataError:
                continue
            assert sp.decompress(found)["w"].shape == (1200,)


# ------------------------------------------------------------------------------------------------ training


def test_a_run_resumes_from_a_chain() -> None:
    """SGD with momentum resumed from the tenth 3-bit delta ends near the exact run."""
    run, fresh = regression(lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9))
    model, optimizer = fresh()
    prev = None
    for t in range(11):
        run(model, optimizer, 10, t)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        prev = sp.compress(state, prev, sp.presets.lc_checkpoint(3))
    assert prev is not None
    assert {r.stream for r in prev.summary() if "momentum" in r.path and len(r.shape) == 2} == {"exponent"}
    exact = sp.decompress(sp.compress(state, cfg=sp.presets.lossless()))
    ends = []
    for start in (exact, sp.decompress(prev)):
        model, optimizer = fresh()
        model.load_state_dict(start["model"])
        optimizer.load_state_dict(start["optimizer"])
        ends.append(np.mean([run(model, optimizer, 50, seed) for seed in (50, 51)]))
    assert ends[1] == pytest.approx(ends[0], rel=0.02)


@pytest.mark.parametrize("b", [0, 9, 2.0, "2", True])
def test_bits_out_of_range(b: Any) -> None:
    with pytest.raises(sp.BadArgumentError, match="bits"):
        sp.presets.lc_checkpoint(b)


@pytest.mark.parametrize("fields", [{"coder": "x"}, {"coder": None}, {"max_error": 0}, {"max_error": 1.0}])
def test_fields_out_of_range(fields: dict[str, Any]) -> None:
    with pytest.raises(sp.BadArgumentError, match=next(iter(fields))):
        sp.ExponentDelta(**fields)


def test_what_did_not_change_is_the_same_where_subnormal_numbers_count_as_zero() -> None:
    """Unchanged subnormal weights are exact when read with flush-to-zero."""
    before = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    before[::7] *= 1e-37
    after = before.clone()
    after[::3] += 1e-5
    cfg = sp.presets.lc_checkpoint()
    base = sp.compress({"w": before}, cfg=cfg)
    delta = sp.compress({"w": after}, base, cfg)
    written = sp.decompress(delta)["w"].view(torch.int32)
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this processor cannot take subnormal numbers for zero")
        read = sp.decompress(sp.Checkpoint.from_bytes(delta.to_bytes(), base))["w"].view(torch.int32)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(read, written)
