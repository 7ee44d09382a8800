"""Levels and published systems by name."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

import shrinkpoint as sp
from shrinkpoint.codec.named_presets import NAMED

W = np.random.default_rng(0).normal(size=(64, 64)).astype("f4")


def test_every_preset_without_required_arguments_has_a_name() -> None:
    found = {n for n, f in vars(sp.presets).items() if inspect.isfunction(f) and f.__module__ == sp.presets.__name__}
    assert {n for n in found if not n.startswith("_")} - {"expected_failures"} == NAMED.keys() - {"default"}


@pytest.mark.parametrize("name", NAMED)
def test_a_name_stands_for_its_preset(name: str) -> None:
    state, kinds = {"weight": W}, {"weight": "linear"}
    expected = sp.compress(state, cfg=NAMED[name](), kinds=kinds).to_bytes()
    assert sp.compress(state, cfg=name, kinds=kinds).to_bytes() == expected
    assert sp.compress(state, cfg=name.replace("_", "-"), kinds=kinds).to_bytes() == expected


def test_stores_and_savers_take_names(tmp_path: Any) -> None:
    store = sp.Store(tmp_path, "exact_weights")
    assert store.cfg == sp.presets.exact_weights()
    store.save(1, {"weight": W}, kinds={"weight": "linear"}, cfg="lossless")
    with sp.Saver(store) as saver:
        saver.save(2, {"weight": W}, kinds={"weight": "linear"}, cfg="lossless").result()
    assert all((store.load(step)["weight"] == W).all() for step in (1, 2))


@pytest.mark.parametrize(
    ("name", "nearest"), [("losless", "lossless"), ("exact_weight", "exact_weights"), ("Compact", "compact")]
)
def test_a_misspelt_name_gets_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(sp.BadArgumentError, match=f"cfg is {name!r}; the names are .*; did you mean {nearest!r}"):
        sp.compress({"weight": W}, cfg=name)


def test_a_name_like_none_is_refused_without_a_guess() -> None:
    with pytest.raises(sp.BadArgumentError, match="the names are default, lossless") as error:
        sp.Store("memory://named", "xyz")
    assert "did you mean" not in str(error.value)
