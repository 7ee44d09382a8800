"""Rules: matching by path, kind and dtype, and warnings for rules that match no array."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.config import UnmatchedRuleWarning

X = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))


def codec(cfg: sp.Config, x: Any) -> str:
    return sp.compress({"a": {"weight": x}}, cfg=cfg).summary()[0].stream


def test_a_rule_is_for_its_dtypes_and_the_next_for_the_rest() -> None:
    cfg = sp.Config([sp.Rule("a/*", sp.Clusters(), ("float32",)), ("weight", sp.Changed(), ("float64",))])
    assert codec(cfg, X) == "clusters"
    assert codec(cfg, X.double()) == "changed"
    assert codec(cfg, X.bfloat16()) == codec(sp.Config(), X.bfloat16())
    assert codec(cfg, np.arange(2000)) == "bytes"


def test_rules_in_json() -> None:
    cfg = sp.Config([("a", sp.Exact(), ["float16", "bfloat16"]), ("*", sp.Exact())])  # type: ignore[list-item]
    assert cfg.rules[0].dtypes == ("float16", "bfloat16")
    assert sp.Config.from_json(cfg.to_json()) == cfg
    # Of rules for all dtypes nothing else is written than before there were others.
    assert cfg.to_json()["rules"][1] == ["*", {"id": "exact"}]
    assert cfg.for_restores(3) == cfg
    rows = sp.Config([("embedding", sp.Rows("auto", expected_restores=1), ("float32",))]).for_restores(9)
    assert rows.rules[0].dtypes == ("float32",)
    assert rows.rules[0].codec.width == 8  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtypes", [(), "float32", ("int8",), ("float32", 4), 4, ("",)])
def test_dtypes_that_are_none(dtypes: Any) -> None:
    with pytest.raises(sp.BadArgumentError, match="rule 'a'"):
        sp.Rule("a", sp.Exact(), dtypes)
    with pytest.raises(sp.BadArgumentError):
        sp.Config.from_json({**sp.Config().to_json(), "rules": [["a", {"id": "exact"}, dtypes]]})


@pytest.mark.parametrize(
    ("match", "hint"),
    [
        ("w*t", r"globs are for whole paths, such as a/weight; '\*/w\*t' matches it"),
        ("[vw]*", r"globs are for whole paths, such as a/weight; '\*/\[vw\]\*' matches it"),
        ("weights", "did you mean the kind 'weight'"),
        ("Embedding", "did you mean the kind 'embedding'"),
        ("second_moment", "did you mean the kind 'second moment'"),
    ],
)
def test_a_rule_that_was_meant_for_an_array_and_matches_none_is_told(match: str, hint: str) -> None:
    """A rule that matches no array, but nearly does, gives a warning."""
    with pytest.warns(UnmatchedRuleWarning, match=f"matches no array of this state: {hint}"):
        assert codec(sp.Config([(match, sp.Exact())]), X) == "levels"


def test_a_name_with_a_dot_is_no_slip_of_a_kind() -> None:
    """The warning for a dotted name suggests a path, not a kind."""
    with pytest.warns(UnmatchedRuleWarning, match="the nearest path is model/lin.weight"):
        sp.compress({"model": {"lin.weight": X}}, cfg=sp.Config([("fc.weight", sp.Exact())]))


@pytest.mark.parametrize("match", ["modle/*", "model.0.weight", "optimizer/*"])
def test_a_misspelt_glob_is_said_at_a_base_with_the_nearest_path(match: str) -> None:
    state, cfg = {"model": {"0.weight": X}}, sp.Config([(match, sp.Exact())])
    with pytest.warns(UnmatchedRuleWarning, match="the nearest path is model/0.weight"):
        base = sp.compress(state, cfg=cfg)
    with warnings.catch_warnings():
        warnings.simplefilter("error", sp.ShrinkpointWarning)
        sp.compress(state, base, cfg)


def test_what_is_for_paths_of_any_depth_is_no_mistake() -> None:
    """Rules for several depths, as presets have them, give no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", sp.ShrinkpointWarning)
        assert codec(sp.Config([("weight", sp.Exact()), ("*/weight", sp.Exact())]), X) == "bytes"


@pytest.mark.parametrize("match", ["a/weight", "*w", "*/weight", "weight", "embedding"])
def test_a_rule_for_other_states_is_no_mistake(match: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", sp.ShrinkpointWarning)
        codec(sp.Config([(match, sp.Exact())]), X)
