"""Pairing of second moments with weights, and their effect on the encoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.base import Leaf
from shrinkpoint.codec.evidence.gather import gather
from shrinkpoint.codec.evidence.moments import Arrays
from shrinkpoint.codec.state.leaves import LeafSpec, is_array
from shrinkpoint.codec.state.tree import flatten
from shrinkpoint.codec.weights.importance import FLOOR, mean_root, second_moments, weights_of

from .common import through_bytes


def leaves(*paths: str, shapes: dict[str, tuple[int, ...]] | None = None, kinds: Any = None) -> list[Leaf]:
    specs = [LeafSpec("numpy", "float32", (shapes or {}).get(path, (40, 40))) for path in paths]
    flats = [np.zeros(spec.size, np.float32) for spec in specs]
    nodes, _ = flatten([*flats], is_array)
    evidence = gather(nodes, Arrays(paths, specs, flats, [False] * len(paths)), kinds)
    return [
        Leaf(path, path, spec, known.kind, flat, entry=known.entry)
        for path, spec, flat, known in zip(paths, specs, flats, evidence, strict=True)
    ]


def test_by_the_parameters_name() -> None:
    given = leaves(
        "model/b", "model/a", "optim/state/a/exp_avg", "optim/state/a/exp_avg_sq", "optim/state/b/exp_avg_sq"
    )
    assert second_moments(given) == {1: 3, 0: 4}
    nested = leaves("p/fc/weight", "p/out/weight", "opt/0/nu/out/weight", "opt/0/nu/fc/weight", "opt/0/mu/fc/weight")
    assert second_moments(nested) == {1: 2, 0: 3}


def test_by_order_among_equal_shapes_where_only_numbers_are_known() -> None:
    shapes = {"model/big": (80, 40), "optim/state/1/exp_avg_sq": (80, 40)}
    given = leaves(
        "model/a", "model/big", "model/c",
        "optim/state/0/exp_avg_sq", "optim/state/1/exp_avg_sq", "optim/state/2/exp_avg_sq", shapes=shapes,
    )  # fmt: skip
    assert second_moments(given) == {0: 3, 1: 4, 2: 5}
    # One weight more than moments of its shape: nobody can say which is which.
    more = leaves("model/a", "model/b", "model/c", "optim/state/0/exp_avg_sq", "optim/state/1/exp_avg_sq")
    assert second_moments(more) == {}


def test_kinds_settle_what_order_would_get_wrong() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam([parameters[2], parameters[0]])
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    table = sp.kinds(model, optimizer)
    given = leaves(
        "model/0.weight", "model/2.weight", "optim/state/0/exp_avg_sq", "optim/state/1/exp_avg_sq",
        kinds={**table, "2.weight": table["1.weight"]},
    )  # fmt: skip
    assert second_moments(given)[0] == 3


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_importance_is_the_root_within_bounds(library: str) -> None:
    v = np.array([4.0, 1.0, 0.0, 1e-30, np.nan, -1.0, np.inf, 1e30], np.float32)
    got = weights_of(v if library == "numpy" else torch.from_numpy(v), 1.0, 2.0)
    found = np.asarray(got)
    assert found.dtype == np.float32
    assert found[:2].tolist() == [4.0, 2.0]
    np.testing.assert_array_equal(found[2:6], np.float32(2 * FLOOR))
    assert np.isfinite(found).all()
    assert mean_root(np.full(1000, 9.0, np.float32)) == pytest.approx(3, rel=0.1)
    assert mean_root(np.zeros(5, np.float32)) == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("n", [0, 1, (1 << 14) - 1, (1 << 14) + 1, 40_000])
def test_importance_is_the_same_in_every_block_and_library(dtype: str, n: int) -> None:
    v = torch.from_numpy(np.random.default_rng(n).lognormal(-5, 3, n)).to(getattr(torch, dtype))
    with np.errstate(over="ignore"):
        expected = np.clip(np.sqrt(v.double().numpy()) * 0.3, 0.05 * 0.02 * 0.3, 1e6 * 0.02 * 0.3).astype(np.float32)
    given = v.clone()
    found = [weights_of(v, 0.02, 0.3)]
    if dtype != "bfloat16":
        found.append(weights_of(v.numpy(), 0.02, 0.3))
    for got in found:
        np.testing.assert_array_equal(np.asarray(got), expected, strict=True)
    assert torch.equal(v, given)


def state(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((200, 200)).astype("f4")
    v = np.where(np.arange(200) < 100, 1e-2, 1e-6).astype("f4") * rng.lognormal(0, 0.3, (200, 200)).astype("f4")
    m = (1e-3 * rng.standard_normal((200, 200))).astype("f4")
    return {"model": {"weight": w}, "optimizer": {"state": {0: {"exp_avg": m, "exp_avg_sq": v}}}}


def test_bits_are_saved_where_errors_matter_least() -> None:
    first = state()
    base = sp.compress(first)
    moved = {**first, "model": {"weight": first["model"]["weight"] + np.float32(0.1) * state(1)["model"]["weight"]}}
    plain = sp.compress(moved, base)
    cheap = sp.compress(moved, base, sp.Config(rate=0.003))
    assert cheap.summary()[0].stored_bytes < 0.75 * plain.summary()[0].stored_bytes
    error = (
        through_bytes(cheap, sp.Checkpoint.from_bytes(base.to_bytes()))["model"]["weight"] - moved["model"]["weight"]
    ) ** 2
    assert error[:, 100:].mean() > 1.5 * error[:, :100].mean()
    # Without second moments both halves are treated alike.
    alone = sp.compress({"model": moved["model"]}, sp.compress({"model": first["model"]}), sp.Config(rate=0.003))
    even = (sp.decompress(alone)["model"]["weight"] - moved["model"]["weight"]) ** 2
    assert even[:, 100:].mean() < 1.1 * even[:, :100].mean()


def test_the_hundredth_delta_is_no_worse_than_the_first() -> None:
    rng = np.random.default_rng(3)
    now = state()
    cfg = sp.Config(rate=0.01)
    prev = read = None
    errors = []
    for _ in range(101):
        prev = sp.compress(now, prev, cfg)
        # As a reader of every file of the chain has it.
        read = sp.Checkpoint.from_bytes(prev.to_bytes(), read)
        w = now["model"]["weight"].astype("f8")
        errors.append(float(np.linalg.norm(sp.decompress(read)["model"]["weight"] - w) / np.linalg.norm(w)))
        assert errors[-1] <= prev.summary()[0].error <= 1.011 * errors[-1]
        now["model"]["weight"] = now["model"]["weight"] + np.float32(0.003) * rng.standard_normal((200, 200)).astype(
            "f4"
        )
        now["optimizer"]["state"][0]["exp_avg_sq"] *= np.float32(0.99)
    assert max(errors[50:]) < 1.15 * max(errors[1:10])


def test_odd_second_moments_do_no_harm() -> None:
    for value in (0.0, np.nan, np.inf, -1.0, 1e-45, 3e38):
        given = state()
        given["optimizer"]["state"][0]["exp_avg_sq"][:] = value
        ckpt = sp.compress(given, sp.compress(given, cfg=sp.Config(rate=0.01)), sp.Config(rate=0.01))
        assert ckpt.summary()[0].error < 0.2
        through_bytes(sp.compress(given, cfg=sp.Config(rate=0.01)))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_gradients_stand_in_for_second_moments(scale: float) -> None:
    """Without second moments, given gradients decide where the encoder saves bits."""
    first = state()["model"]
    moved = {"weight": first["weight"] + np.float32(0.1) * state(1)["model"]["weight"]}
    base = sp.compress(first, cfg=sp.Config([("*", sp.Quantize(protect=0.0))]))
    cfg = sp.Config([("*", sp.Quantize(protect=0.0))], rate=0.003)
    rng = np.random.default_rng(0)
    gradients = np.where(np.arange(200) < 100, scale, 1e-3 * scale) * rng.standard_normal((200, 200))
    gradients = {"weight": gradients.astype("f4")}
    plain, given = sp.compress(moved, base, cfg), sp.compress(moved, base, cfg, grads=gradients)
    error = (sp.decompress(given)["weight"].astype("f8") - moved["weight"]) ** 2
    assert error[:, 100:].mean() > 1.5 * error[:, :100].mean()
    assert given.summary()[0].stored_bytes < plain.summary()[0].stored_bytes
    # A second moment in the state is known better.
    full = {"model": moved, "optimizer": {"state": {0: {"exp_avg_sq": np.full((200, 200), 1e-6, "f4")}}}}
    before = sp.compress({**full, "model": first})
    rated = sp.Config(rate=0.003)
    weights = [sp.compress(full, before, rated, grads=g).summary()[0].stored_bytes for g in (None, gradients)]
    assert weights[1] > 0.9 * weights[0]


def test_odd_gradients_do_no_harm() -> None:
    first = state()["model"]
    for value in (0.0, np.nan, np.inf, 1e-45, 3e38):
        ckpt = sp.compress(first, sp.compress(first), sp.Config([("*", sp.Quantize(protect=0.0))], rate=0.01),
                           grads={"weight": np.full((200, 200), value, "f4")})  # fmt: skip
        assert ckpt.summary()[0].error < 0.2
