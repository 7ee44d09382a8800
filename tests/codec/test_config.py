"""Configurations: frozen, compared by value, stable through JSON, with checked ranges."""

from __future__ import annotations

import dataclasses
import inspect
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shrinkpoint as sp

unit = st.floats(0, 0.99)
codecs = st.one_of(
    st.just(sp.Exact()),
    st.builds(sp.LogBuckets, st.floats(2**-17, 0.5)),
    st.builds(
        sp.Rows,
        st.sampled_from([None, 2, 3, 4, 8, "auto"]),
        st.sampled_from(["adaptive", "asymmetric", "symmetric", "kmeans"]),
        st.none() | st.integers(1, 4096),
        st.none() | st.floats(0.1, 1),
        st.integers(0, 100) | st.floats(0, 100),
    ),
    st.builds(
        sp.Quantize,
        bins=st.integers(2, 254),
        embedding_bins=st.none() | st.integers(2, 254),
        prune=st.floats(0, 0.5),
        protect=st.floats(0, 0.5),
        sigma=st.floats(0, 1),
        policy=st.sampled_from(["frozen", "warm", "refit"]),
        coder=st.sampled_from(["smallest", "published"]),
        solver=st.sampled_from(["exact", "kmeans++"]),
        seed=st.integers(0, 2**63 - 1),
        max_error=st.none() | st.floats(0.001, 0.999),
    ),
)
rules = st.tuples(st.sampled_from(["*", "a/*", "embedding", "norm", "first moment", "[ab]?", "λ"]), codecs)


@given(st.lists(rules, max_size=4), st.none() | st.floats(0.001, 0.99), st.floats(0, 10), st.integers(1, 99))
def test_json_and_back(given_: list[Any], target: float | None, rate: float, every: int) -> None:
    for against in ("previous", "base"):
        cfg = sp.Config(given_, max_rel_error=target, rate=rate, chain=sp.ChainPolicy(every, against))
        again = sp.Config.from_json(json.loads(json.dumps(cfg.to_json(), allow_nan=False)))
        assert again == cfg
        assert hash(again) == hash(cfg)
        assert again.to_json() == cfg.to_json()


def presets() -> dict[str, Any]:
    return {n: f for n, f in vars(sp.presets).items() if inspect.isfunction(f) and f.__module__ == sp.presets.__name__}


@pytest.mark.parametrize("name", [n for n in presets() if not n.startswith("_")])
def test_every_preset_is_nothing_but_a_configuration(name: str) -> None:
    cfg = presets()[name]()
    assert type(cfg) is sp.Config
    assert sp.Config.from_json(json.loads(json.dumps(cfg.to_json()))) == cfg
    ckpt = sp.compress({"weight": np.random.default_rng(0).normal(size=(50, 50)).astype("f4")}, cfg=cfg)
    assert sp.decompress(sp.Checkpoint.from_bytes(ckpt.to_bytes()))["weight"].shape == (50, 50)


def test_frozen() -> None:
    for thing in (sp.Config(), sp.Quantize(), sp.LogBuckets(), sp.ChainPolicy(), sp.Rule("*", sp.Exact())):
        field = dataclasses.fields(thing)[0].name
        with pytest.raises((AttributeError, TypeError)):
            setattr(thing, field, 1)
        assert thing == dataclasses.replace(thing)


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (sp.Quantize, {"policy": "warm"}, "policy"),
    *[(sp.Quantize, {"bins": v}, "bins") for v in (1, 0, -1, 255, 16.0, "16", True, None, np.int64(1), np.True_)],
    *[(sp.Quantize, {"embedding_bins": v}, "embedding_bins") for v in (1, 255, 2.5, "x")],
    *[(sp.Quantize, {"prune": v}, "prune") for v in (-0.1, 1.0, 1.5, float("nan"), "x", None, True)],
    *[(sp.Quantize, {"protect": v}, "protect") for v in (-0.1, 1.0, float("inf"), float("nan"), "x")],
    *[(sp.Quantize, {"alpha": v}, "alpha") for v in (0, 1, -1, float("nan"), "x", 1e-300, 1e-9)],
    *[(sp.Quantize, {"sigma": v}, "sigma") for v in (-0.1, 1.1, float("nan"), [])],
    *[(sp.Quantize, {"trigger": v}, "trigger") for v in (0.9, float("inf"), float("nan"))],
    *[(sp.Quantize, {"seed": v}, "seed") for v in (-1, 2**63, 0.5, True)],
    *[(sp.Quantize, {n: "x"}, n) for n in ("prune_metric", "solver", "policy", "coder")],
    *[(sp.Quantize, {n: []}, n) for n in ("prune_metric", "solver", "policy", "coder")],
    *[(sp.Quantize, {"max_error": v}, "max_error") for v in (0, 1, -0.1, float("nan"))],
    (sp.Quantize, {"prune": 0.6, "protect": 0.6}, "prune"),
    *[(sp.LogBuckets, {"alpha": v}, "alpha") for v in (0, 0.6, 2**-18, float("nan"), "x", None)],
    *[(sp.Config, {"max_rel_error": v}, "max_rel_error") for v in (0, 1, -0.1, float("nan"), "x", True)],
    *[(sp.Config, {"rate": v}, "rate") for v in (-1, float("nan"), float("inf"), "x", None)],
    *[(sp.Config, {"chain": v}, "chain") for v in ("base", 5, {"base_every": 3})],
    *[(sp.Config, {"rules": v}, "rule") for v in (5, "ab", ["ab"], [("a",)], [("", sp.Exact())], [(3, sp.Exact())])],
    *[(sp.Config, {"rules": v}, "rule") for v in ([("a", "exact")], [("a", sp.Exact)], [None], [("a", sp.Exact(), 1)])],
    *[(sp.ChainPolicy, {"base_every": v}, "base_every") for v in (0, -1, 1.5, "x", True)],
    *[(sp.ChainPolicy, {"against": v}, "against") for v in ("x", None, 3, [])],
    *[(sp.Kind, {"layer": v}, "kind|layer") for v in ("x", None, 3, [])],
    *[(sp.Kind, {"role": v}, "role") for v in ("x", None, 3)],
    *[(sp.presets.inshrinkerator, {"bins": v}, "bins") for v in (1, 255)],
    *[(sp.presets.inshrinkerator, {"alpha": v}, "alpha") for v in (0, 1, 1.5, float("nan"))],
    (sp.presets.inshrinkerator, {"sigma": 2}, "sigma"),
    (sp.presets.inshrinkerator, {"protect": 1}, "protect"),
]


@pytest.mark.parametrize(("make", "arguments", "words"), BAD, ids=lambda v: getattr(v, "__name__", str(v))[:40])
def test_values_out_of_range_are_named(make: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(sp.BadArgumentError, match=words):
        make(**arguments)


@pytest.mark.parametrize("alpha", [0.99, 0.5, 0.3, 1e-2, 1e-3, 1.3e-4, 1e-4, 1e-5])
def test_every_alpha_that_is_accepted_works(alpha: float) -> None:
    try:
        codec = sp.Quantize(alpha=alpha)
    except sp.BadArgumentError as e:
        assert "alpha" in str(e)  # noqa: PT017 - either is right
        return
    rng = np.random.default_rng(0)
    for dtype in ("f2", "f4", "f8"):
        w = rng.normal(size=(50, 50)).astype(dtype)
        sp.compress({"weight": w}, cfg=sp.Config([("*", codec)]))
        sp.compress({"weight": w}, cfg=sp.Config([("*", codec)]), grads={"weight": w})


@pytest.mark.parametrize(
    "change",
    [
        lambda d: None,
        lambda d: [],
        lambda d: "x",
        lambda d: {},
        lambda d: {**d, "rules": 3},
        lambda d: {**d, "rules": [["*"]]},
        lambda d: {**d, "rules": [["*", {"id": "nosuch"}]]},
        lambda d: {**d, "rules": [["*", {"id": ["exact"]}]]},
        lambda d: {**d, "rules": [["*", {"id": "exact", "more": 1}]]},
        lambda d: {**d, "rules": [["*", {"id": "quantize", "bins": 1}]]},
        lambda d: {**d, "rules": [["*", None]]},
        lambda d: {**d, "rate": "x"},
        lambda d: {**d, "chain": None},
        lambda d: {**d, "chain": {"base_every": 0, "against": "base"}},
        lambda d: {**d, "chain": {"nosuch": 0}},
        lambda d: {k: v for k, v in d.items() if k != "rate"},
        lambda d: {**d, "from_the_future": 1},
    ],
)
def test_json_that_is_no_configuration(change: Any) -> None:
    with pytest.raises(sp.BadArgumentError):
        sp.Config.from_json(change(sp.Config([("*", sp.Quantize())]).to_json()))


def test_first_match_wins_and_globs_match_whole_paths() -> None:
    rng = np.random.default_rng(0)
    w = {k: rng.normal(size=(40, 40)).astype("f4") for k in ("a", "b", "c", "A")}
    state = {"model": {**w, "deep": {"a": rng.normal(size=(40, 40)).astype("f4")}}}
    cfg = sp.Config(
        [
            ("model/a", sp.Exact()),
            ("model/a", sp.Quantize()),
            ("*/b", sp.LogBuckets()),
            ("model/deep/*", sp.LogBuckets()),
            ("nosuch", sp.Exact()),
            ("b", sp.Exact()),
        ]
    )
    kinds = dict.fromkeys(["model/c", "model/A"], "linear")
    got = {row.path: row.stream for row in sp.compress(state, cfg=cfg, kinds=kinds).summary()}
    assert got == {
        "model/a": "bytes",
        "model/b": "log-buckets",
        "model/c": "levels",
        "model/A": "levels",
        "model/deep/a": "log-buckets",
    }
