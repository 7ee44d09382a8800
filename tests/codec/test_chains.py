"""Chains of changing configurations, shapes, dtypes and keys are read as they were written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec.rebase import rebase

from .common import bits, difference, small_chunks

configs = st.one_of(
    st.just(sp.Config()),
    st.just(sp.presets.lossless()),
    st.builds(
        lambda bins, prune, protect, sigma: sp.presets.inshrinkerator(bins, prune=prune, protect=protect, sigma=sigma),
        st.sampled_from([2, 3, 16, 254]),
        st.sampled_from([0.0, 0.3, 0.9]),
        st.sampled_from([0.0, 0.001, 0.1]),
        st.sampled_from([0.0, 0.2, 1.0]),
    ),
    st.builds(
        lambda bins, prune, protect, policy, coder, trigger: sp.Config(
            [
                (
                    "*",
                    sp.Quantize(
                        bins=bins,
                        prune=prune,
                        protect=protect,
                        solver="exact" if policy == "warm" else "uniform",
                        policy=policy,
                        coder=coder,
                        trigger=trigger,
                    ),
                )
            ]
        ),
        st.integers(2, 254),
        st.sampled_from([0.0, 0.2]),
        st.sampled_from([0.0, 0.0005, 0.2]),
        st.sampled_from(["frozen", "warm", "refit"]),
        st.sampled_from(["smallest", "published"]),
        st.sampled_from([1.0, 1.05, 1e9]),
    ),
    st.just(sp.Config([("*", sp.LogBuckets(0.01))])),
    st.just(sp.Config(max_rel_error=0.05)),
    st.just(sp.Config(rate=0.01)),
    st.just(sp.Config([("weight", sp.Quantize(residual=True))], max_rel_error=1e-3)),
    st.builds(sp.presets.lc_checkpoint, st.sampled_from([2, 3, None]), second_moments=st.just("exponent")),
    st.just(sp.presets.bitsnap()),
    st.just(sp.Config([("a*", sp.Exact()), ("*", sp.Quantize(bins=5))])),
)
steps = st.tuples(
    configs,
    st.sampled_from([0.0, 0.001, 0.1, 1.0]),  # how far the values move
    st.dictionaries(
        st.sampled_from(["a", "b", "c", "wte", "o"]),
        st.sampled_from(["absent", "(40, 30)", "(1200,)", "(1500,)", "float16", "float64", "bfloat16", "nan", "zero"]),
        max_size=3,
    ),
)

KINDS = {"a": "linear", "b": "linear", "c/0": "linear", "wte": "embedding"}


class World:
    """A state that changes step by step."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.values = {k: self.rng.standard_normal(1500) for k in ("a", "b", "c", "wte", "o")}

    def step(self, move: float, changes: dict[str, str]) -> dict[str, Any]:
        state: dict[str, Any] = {"step": torch.tensor(float(self.rng.integers(100))), "k": self.rng.random()}
        for name, value in self.values.items():
            value += move * self.rng.standard_normal(1500)
            change = changes.get(name, "(40, 30)")
            if change == "absent":
                continue
            shape = {"(1200,)": (1200,), "(1500,)": (1500,)}.get(change, (40, 30))
            x = torch.from_numpy(value[: int(np.prod(shape))].reshape(shape).copy())
            if change == "nan":
                x[::7] = float("nan")
                x[1] = float("-inf")
            if change == "zero":
                x.zero_()
            x = x.to(getattr(torch, change) if change in ("float16", "float64", "bfloat16") else torch.float32)
            if name == "o":
                state["opt"] = {"state": {0: {"exp_avg": x, "exp_avg_sq": x.double().square().to(x.dtype)}}}
            else:
                state[name] = x if name != "c" else [x]
        return state


def memories(ckpt: sp.Checkpoint) -> dict[str, tuple[Any, ...]]:
    """Return all references for a later delta in comparable form."""
    out: dict[str, tuple[Any, ...]] = {}
    for key, m in (ckpt._kept or {}).items():
        names = [n for n in ("levels", "codebook", "protected", "data") if hasattr(m, n)]
        out[key] = tuple((n, getattr(m, n).dtype, bits(getattr(m, n))) for n in names)
        for name in ("thresholds", "tables"):
            if hasattr(m, name):
                out[key] += (getattr(m, name),)
    return out


@settings(max_examples=60)
@given(
    st.integers(0, 2**32 - 1), st.lists(steps, min_size=2, max_size=5), st.booleans(), st.sampled_from([400, 1 << 22])
)
def test_decoded_levels_are_encoded_levels(seed: int, plan: list[Any], linear: bool, chunk: int) -> None:
    """Decoding gives the encoder's reference for linear and base-parented chains."""
    world = World(seed)
    with small_chunks(chunk):
        prev = read = first = None
        for number, (cfg, move, changes) in enumerate(plan):
            state = world.step(move, changes)
            ckpt = sp.compress(state, prev, cfg, kinds=KINDS)
            blob = ckpt.to_bytes()
            found = sp.Checkpoint.from_bytes(blob, read)
            assert found.to_bytes() == blob
            assert found.id == ckpt.id
            assert found.is_delta == ckpt.is_delta == (number > 0)
            assert found.is_resolved
            if found.is_delta:
                assert memories(found) == memories(ckpt)
                unresolved = sp.Checkpoint.from_bytes(blob)
                assert not unresolved.is_resolved
                assert difference(sp.decompress(unresolved, read), sp.decompress(ckpt)) == ""
            y = sp.decompress(found)
            assert difference(y, sp.decompress(ckpt)) == ""
            assert difference(shape_of(state), shape_of(y)) == ""
            assert difference([state["step"], state["k"]], [y["step"], y["k"]]) == ""
            assert [(r.path, r.stream, r.error) for r in found.summary()] == [
                (r.path, r.stream, r.error) for r in ckpt.summary()
            ]
            for parent in (None, first):
                anew = rebase(found, parent)
                stands = sp.Checkpoint.from_bytes(anew.to_bytes(), parent)
                assert (stands.identity, stands.is_delta) == (found.id, parent is not None)
                assert difference(sp.decompress(stands), y) == ""
                assert parent is None or memories(stands) == memories(ckpt)
                again = sp.Checkpoint.from_bytes(rebase(stands, read).to_bytes(), read)  # and back
                assert difference(sp.decompress(again), y) == ""
                assert again.identity == found.id
            if read is not None and linear:
                # A delta decodes over its parent however that is stated.
                assert memories(sp.Checkpoint.from_bytes(blob, rebase(read))) == memories(ckpt)
            first = found if first is None else first
            if linear or number == 0:
                # Half of the time the next delta is made by a process that read its parent from bytes.
                prev, read = (found if seed % 2 else ckpt), found


def shape_of(tree: Any) -> Any:
    """Return the tree with arrays replaced by zeros."""
    if isinstance(tree, dict):
        return {k: shape_of(v) for k, v in tree.items()}
    if isinstance(tree, list):
        return [shape_of(v) for v in tree]
    return torch.zeros_like(tree) if isinstance(tree, torch.Tensor) else type(tree)


def test_it_does_not_matter_whether_the_parent_came_from_memory_or_from_bytes() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((64, 64)).astype("f4")
    for cfg in (sp.Config(), sp.presets.inshrinkerator(prune=0.2), sp.presets.lossless(), sp.Config(rate=0.01)):
        base = sp.compress({"weight": w}, cfg=cfg)
        later = {"weight": w + np.float32(0.01) * rng.standard_normal((64, 64)).astype("f4")}
        read = sp.Checkpoint.from_bytes(base.to_bytes())
        assert sp.compress(later, base, cfg).to_bytes() == sp.compress(later, read, cfg).to_bytes()
        delta = sp.compress(later, base, cfg)
        again = sp.Checkpoint.from_bytes(delta.to_bytes(), read)
        assert sp.compress({"weight": w}, delta, cfg).to_bytes() == sp.compress({"weight": w}, again, cfg).to_bytes()


def test_an_unchanged_state_costs_almost_nothing() -> None:
    w, m, kinds = torch.randn(200, 200), torch.randn(200, 200), {"m": "linear", "weight": "linear"}
    for cfg in (sp.Config(), sp.presets.inshrinkerator(), sp.presets.lossless()):
        base = sp.compress({"weight": w}, cfg=cfg)
        assert sp.compress({"weight": w}, base, cfg).nbytes < 2000
    assert (
        sp.compress({"weight": w, "m": m}, sp.compress({"m": m, "weight": w}, kinds=kinds), kinds=kinds).nbytes < 2000
    )


def test_rows_say_what_was_done() -> None:
    w, kinds = torch.randn(64, 64), {"grown": "linear", "weight": "linear"}
    base = sp.compress({"weight": w, "gone": torch.arange(3), "grown": torch.randn(40, 40)}, kinds=kinds)
    delta = sp.compress({"weight": w, "new": torch.arange(4), "grown": torch.randn(41, 40)}, base, kinds=kinds)
    assert [row.path for row in delta.summary()] == ["weight", "new", "grown"]
    records = {r.path: r for r in delta.records}
    assert records["weight"].is_delta
    assert not records["new"].is_delta
    assert not records["grown"].is_delta
    assert delta.raw_nbytes == sum(row.raw_bytes for row in delta.summary()) == 64 * 64 * 4 + 32 + 41 * 40 * 4
    assert delta.ratio == pytest.approx(delta.raw_nbytes / delta.nbytes)
    assert sum(row.stored_bytes for row in delta.summary()) < delta.nbytes == len(delta.to_bytes())
