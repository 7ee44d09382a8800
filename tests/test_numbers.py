"""Numbers of any library are accepted as plain numbers, and other values are errors."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.config import CODECS
from shrinkpoint.codec.inputs import PastWeights
from shrinkpoint.codec.parallel import set_threads, threads
from shrinkpoint.codec.presets import expected_failures
from shrinkpoint.searching.cube import Cube, Point
from shrinkpoint.store.retention import Retention
from shrinkpoint.trainers.sensitivity import SensitivityTracker

RIGHT: dict[str, Any] = {
    "bins": 16,
    "embedding_bins": 8,
    "seed": 3,
    "octaves": 2,
    "bits": 4,
    "num_bins": 10,
    "clusters": 8,
    "base_every": 5,
    "last": 2,
    "every": 3,
    "thin_after": 4,
    "best": 1,
    "prune": 0.25,
    "protect": 0.125,
    "alpha": 0.25,
    "sigma": 0.5,
    "trigger": 1.5,
    "max_error": 0.5,
    "rate": 0.5,
    "step": 0.5,
    "steps": 2.5,
    "ratio": 0.5,
    "expected_restores": 2.5,
    "max_restore_cost": 2.5,
}
"""A value for every field of a configuration that is a number; all are exact in float16."""
STATE = {"weight": np.random.default_rng(0).normal(size=(64, 64)).astype("f4")}


def point(**fields: Any) -> Point:
    """Return a point of the cube with default fields."""
    return Point(**{"bins": 16, "prune": 0.0, "metric": "magnitude", "protect": 0.0, **fields})


MAKERS: list[tuple[type[Any], Callable[..., Any]]] = [
    *[(codec, codec) for codec in CODECS.values() if codec.__module__.startswith("shrinkpoint.")],
    (sp.ChainPolicy, sp.ChainPolicy),
    (Retention, Retention),
    (Point, point),
    (PastWeights, lambda **fields: PastWeights("weights", **fields)),
]


def fields_of(kind: str) -> list[Any]:
    """Return every configuration field of one type of number, with the function that makes it."""
    return [
        pytest.param(make, f.name, id=f"{cls.__name__}-{f.name}")
        for cls, make in MAKERS
        for f in dataclasses.fields(cls)
        if str(f.type).startswith(kind)
    ]


def integers(value: int) -> list[Any]:
    """An integer as libraries have it."""
    return [np.int64(value), np.uint8(value), np.array(value), torch.tensor(value), torch.tensor(value).byte()]


def check_equal(found: Any, plain: Any) -> None:
    """Check that two configurations compare, hash and serialize equally."""
    assert found == plain
    assert (hash(found), repr(found)) == (hash(plain), repr(plain))
    text = json.dumps(dataclasses.asdict(found))
    assert text == json.dumps(dataclasses.asdict(plain))
    assert type(found)(**json.loads(text)) == found


@pytest.mark.parametrize(("make", "name"), fields_of("int"))
def test_integers_of_any_library_configure_alike(make: Callable[..., Any], name: str) -> None:
    for value in integers(RIGHT[name]):
        check_equal(make(**{name: value}), make(**{name: RIGHT[name]}))
    too_large = [] if name in ("base_every", "last", "every", "best", "thin_after") else [2**70]
    for wrong in (True, np.True_, torch.tensor(True), float(RIGHT[name]), np.float32(2), "x", -1, *too_large):
        with pytest.raises(sp.BadArgumentError, match=rf"^{name} is .*; it must be "):
            make(**{name: wrong})


@pytest.mark.parametrize(("make", "name"), fields_of("float"))
def test_numbers_of_any_width_configure_alike(make: Callable[..., Any], name: str) -> None:
    for kind in (np.float16, np.float32, np.float64, np.longdouble):
        check_equal(make(**{name: kind(RIGHT[name])}), make(**{name: RIGHT[name]}))
    for wrong in (True, np.True_, math.nan, np.float32("nan"), "0.5", [0.5], torch.tensor(0.5), -1.0, 10**400):
        with pytest.raises(sp.BadArgumentError, match=rf"^{name} is .*; it must be a number in "):
            make(**{name: wrong})


def test_whole_configurations_and_cubes() -> None:
    found = sp.Config(max_rel_error=np.float32(0.5), rate=np.int64(1), ahead=np.True_)  # type: ignore[arg-type]
    plain = sp.Config(max_rel_error=0.5, rate=1.0, ahead=True)
    assert found == plain
    assert hash(found) == hash(plain)
    assert (repr(found), json.dumps(found.to_json())) == (repr(plain), json.dumps(plain.to_json()))
    axes: dict[str, Any] = {"bins": np.array([4, 8, 16]), "protect": np.array([0.0, 0.5]), "rate": [0, np.float32(0.5)]}
    mixed = Cube(**{name: tuple(axis) for name, axis in axes.items()})
    same = Cube(bins=(4, 8, 16), protect=(0.0, 0.5), rate=(0.0, 0.5))
    check_equal(mixed, same)
    assert Cube.from_json(json.loads(json.dumps(mixed.to_json()))) == same


TRACKED = torch.nn.Linear(2, 1)
CALLS: list[tuple[str, int, Callable[[Any], Any]]] = [
    ("threads", 2, lambda n: (set_threads(n), threads(), set_threads(None))),
    ("nodes", 16, lambda n: expected_failures(0.5, n, 2)),
    ("restores", 3, lambda n: sp.Config([("weight", sp.Rows("auto", expected_restores=1))]).for_restores(n)),
    ("bins", 8, lambda n: sp.presets.inshrinkerator(n)),
    ("seed", 8, lambda n: sp.presets.inshrinkerator(seed=n)),
    ("bits", 3, lambda n: sp.presets.lc_checkpoint(n)),
    ("bits", 3, lambda n: sp.presets.check_n_run(n)),
    ("moment_bits", 8, lambda n: sp.presets.check_n_run(moment_bits=n)),
    ("clusters", 8, lambda n: sp.presets.bitsnap(n)),
    ("max_cached_iteration", 8, lambda n: sp.presets.bitsnap(max_cached_iteration=n)),
    ("in_memory", 2, lambda n: sp.Store("runs/none", in_memory=n).in_memory),
    ("step", 7, lambda n: sp.Store("memory://numbers").save(n, STATE).step),
    ("nice", 5, lambda n: sp.Saver(sp.Store("memory://numbers"), nice=n).close()),
    ("threads", 2, lambda n: sp.Saver(sp.Store("memory://numbers"), threads=n).close()),
    ("every", 5, lambda n: SensitivityTracker(TRACKED, n).batch),
    ("window", 5, lambda n: SensitivityTracker(TRACKED, 5, window=n).batch),
    ("done", 5, lambda n: SensitivityTracker(TRACKED, 5, done=n).batch),
    ("done", 5, lambda n: SensitivityTracker(TRACKED, 5).at(n)),
    ("steps", 2, lambda n: sp.search(STATE, None, 0.1, options=sp.SearchOptions(steps=n))),
    ("budget", 5, lambda n: sp.search(STATE, None, 0.1, options=sp.SearchOptions(budget=n))),
]


@pytest.mark.parametrize(("name", "right", "call"), [pytest.param(*c, id=f"{c[0]}-{i}") for i, c in enumerate(CALLS)])
def test_integers_of_any_library_are_arguments(name: str, right: int, call: Callable[[Any], Any]) -> None:
    for value in integers(right):
        found = call(value)
        assert found == call(right)
        assert type(found) is not np.int64
    for wrong in (True, np.True_, torch.tensor(True), float(right), str(right), -1):
        with pytest.raises(sp.BadArgumentError, match=rf"^{name} is .*; it must be "):
            call(wrong)
