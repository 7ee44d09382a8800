"""The configuration cube: size, orders, neighbourhoods, JSON, errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.codec.config import Config
from shrinkpoint.codec.errors import BadArgumentError
from shrinkpoint.codec.moments.logbuckets import LogBuckets
from shrinkpoint.codec.presets import inshrinkerator
from shrinkpoint.codec.weights.quantize import Quantize
from shrinkpoint.searching.cube import Cube, Point, normal, same

CUBE = Cube()
POINTS = list(CUBE)


def test_published_cube_has_216_points_in_order_of_size() -> None:
    assert len(POINTS) == len(CUBE) == len(set(POINTS)) == 216
    sizes = [p.expected_bits() for p in POINTS]
    assert sizes == sorted(sizes)
    assert (POINTS[0].bins, POINTS[0].prune) == (4, 0.5)
    assert POINTS[-1] == Point(32, 0.0, "sensitivity", 0.01, embedding_bins=32)
    assert {p.embedding_bins for p in POINTS} == {32}


def test_each_axis_moves_the_expected_size_the_right_way() -> None:
    assert Point(8, 0.1, "magnitude", 0.005).expected_bits() < Point(16, 0.1, "magnitude", 0.005).expected_bits()
    assert Point(8, 0.5, "magnitude", 0.005).expected_bits() < Point(8, 0.4, "magnitude", 0.005).expected_bits()
    assert Point(8, 0.1, "magnitude", 0.005).expected_bits() < Point(8, 0.1, "magnitude", 0.01).expected_bits()


def test_a_point_configures_either_system() -> None:
    own = Point(6, 0.3, "sensitivity", 0.01, 0.002, 24)
    codec = own.config().rules[0].codec
    assert isinstance(codec, Quantize)
    assert (codec.bins, codec.prune, codec.prune_metric, codec.protect) == (6, 0.3, "sensitivity", 0.01)
    assert (codec.embedding_bins, codec.rate) == (24, 0.002)
    assert (codec.coder, codec.policy) == ("smallest", "frozen")
    assert own.config(embedding_bins=16).rules[0].codec == Quantize(
        bins=6, embedding_bins=16, prune=0.3, prune_metric="sensitivity", protect=0.01, rate=0.002
    )
    published = Point(6, 0.3, "sensitivity", 0.01, embedding_bins=24, system="inshrinkerator")
    expected = inshrinkerator(6, embedding_bins=24, prune=0.3, prune_metric="sensitivity", protect=0.01)
    assert published.config() == Config(expected.rules, ahead=False)  # it is stored as it was evaluated
    assert isinstance(published.config().rules[1].codec, LogBuckets)
    assert own.config().rules[1:] == Config().rules


@given(st.sampled_from(POINTS), st.sampled_from(POINTS), st.sampled_from(POINTS))
def test_the_order_of_quality_is_a_partial_order(a: Point, b: Point, c: Point) -> None:
    assert a.at_least(a)
    if a.at_least(b) and b.at_least(a):
        assert same(a, b)
    if a.at_least(b) and b.at_least(c):
        assert a.at_least(c)
    if a.at_least(b):
        assert (a.bins, a.protect, -a.prune) >= (b.bins, b.protect, -b.prune) or a.bins >= b.bins
        assert a.bins >= b.bins
        assert a.protect >= b.protect
        assert a.prune <= b.prune
    assert same(a, normal(a))


def test_more_aggressive_axes_are_never_at_least() -> None:
    base = Point(16, 0.1, "magnitude", 0.005, 0.001, 32)
    for worse in (
        Point(12, 0.1, "magnitude", 0.005, 0.001, 32),
        Point(16, 0.2, "magnitude", 0.005, 0.001, 32),
        Point(16, 0.1, "sensitivity", 0.005, 0.001, 32),
        Point(16, 0.1, "magnitude", 0.0005, 0.001, 32),
        Point(16, 0.1, "magnitude", 0.005, 0.002, 32),
        Point(16, 0.1, "magnitude", 0.005, 0.001, 16),
    ):
        assert not worse.at_least(base)
        assert worse.metric != base.metric or base.at_least(worse)


@settings(max_examples=20)
@given(st.sampled_from(POINTS), st.integers(0, 4))
def test_neighbours_are_near_and_never_more_aggressive(point: Point, steps: int) -> None:
    found = CUBE.neighbours(point, steps)
    assert found[0] == point
    for other in found:
        assert CUBE.steps(point, other) <= steps
        assert other.bins >= point.bins
        assert other.protect >= point.protect
        assert other.prune <= point.prune
    relaxed = CUBE.neighbours(point, steps, relax=True)
    assert {normal(p) for p in found} <= {normal(p) for p in relaxed}
    count = sum(CUBE.steps(point, p) <= steps for p in POINTS if p.metric == point.metric)
    assert len({p for p in relaxed if p.metric == point.metric and p.embedding_bins == 32}) == count


def test_points_and_cubes_go_through_json() -> None:
    cube = Cube(bins=(8, 16), rate=(0.0, 0.01), embedding_bins=(32,))
    for point in (*POINTS[:5], Point(5, 0.0, "magnitude", 0.0, system="inshrinkerator")):
        assert Point.from_json(json.loads(json.dumps(point.to_json()))) == point
    assert Cube.from_json(json.loads(json.dumps(cube.to_json()))) == cube
    for bad in ({}, None, {"bins": 3}, {**POINTS[0].to_json(), "more": 1}):
        with pytest.raises(BadArgumentError):
            Point.from_json(bad)
        with pytest.raises(BadArgumentError):
            Cube.from_json(bad)


@pytest.mark.parametrize(
    "axis",
    [
        {"bins": ()},
        {"metric": ()},
        {"prune": (0.2, 0.1)},
        {"protect": (0.1, 0.1)},
        {"rate": ()},
        {"bins": (1, 4)},
        {"bins": (4, 16, 300)},
        {"prune": (0.0, 1.0)},
        {"protect": (-0.1, 0.1)},
        {"metric": ("loudness",)},
        {"metric": ("magnitude", "magnitude")},
        {"embedding_bins": (0,)},
        {"rate": (-1.0,)},
        {"prune": (0.0, 0.9), "protect": (0.2,)},
        {"rate": (0.0, 0.1), "system": "inshrinkerator"},
        {"system": "nobody's"},
        {"bins": (4, "8")},
        {"bins": None},
        {"bins": range(4, 9)},
        {"metric": (["magnitude"],)},
    ],
)
def test_bad_axes_are_refused(axis: dict[str, Any]) -> None:
    with pytest.raises(BadArgumentError):
        Cube(**axis)


def test_axes_may_be_lists() -> None:
    assert Cube(bins=[4, 8]) == Cube(bins=(4, 8))  # type: ignore[arg-type]
