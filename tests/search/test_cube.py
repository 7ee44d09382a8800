"""The configuration cube: its published size, its order, its refusals."""

from __future__ import annotations

import pytest

from shrinkpoint.codec.errors import BadArgumentError
from shrinkpoint.codec.quantize import Quantize
from shrinkpoint.search.cube import Cube, Point


def test_published_cube_has_216_points_in_order_of_size() -> None:
    points = list(Cube())
    assert len(points) == len(Cube()) == len(set(points)) == 216
    sizes = [p.expected_bits() for p in points]
    assert sizes == sorted(sizes)
    assert points[0].bins == 4
    assert points[0].prune == 0.5
    assert points[-1] == Point(32, 0.0, "sensitivity", 0.01)


def test_each_axis_moves_the_expected_size_the_right_way() -> None:
    assert Point(8, 0.1, "magnitude", 0.005).expected_bits() < Point(16, 0.1, "magnitude", 0.005).expected_bits()
    assert Point(8, 0.5, "magnitude", 0.005).expected_bits() < Point(8, 0.4, "magnitude", 0.005).expected_bits()
    assert Point(8, 0.1, "magnitude", 0.005).expected_bits() < Point(8, 0.1, "magnitude", 0.01).expected_bits()


def test_a_point_is_a_configuration() -> None:
    codec = Point(6, 0.3, "sensitivity", 0.01).config(embedding_bins=32).rules[0].codec
    assert isinstance(codec, Quantize)
    assert (codec.bins, codec.prune, codec.prune_metric, codec.protect) == (6, 0.3, "sensitivity", 0.01)
    assert codec.embedding_bins == 32


@pytest.mark.parametrize("axis", [{"bins": ()}, {"prune": (0.2, 0.1)}, {"protect": (0.1, 0.1)}])
def test_bad_axes_are_refused(axis: dict[str, tuple[float, ...]]) -> None:
    with pytest.raises(BadArgumentError, match=next(iter(axis))):
        Cube(**axis)  # type: ignore[arg-type]
