"""Level differences, grouping and pair counts against the oracle; bad levels are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shrinkpoint.kernels import levels as public
from shrinkpoint.kernels.errors import BadArgumentError, CorruptDataError
from shrinkpoint.kernels.levels import reference as oracle

if TYPE_CHECKING:
    from .conftest import BackEnd

SIZES = [0, 1, 2, 3, 4, 5, 63, 64, 65, 1021, 1023, 1024, 1025, 4095, 4096, 4097, 4099]


def levels(rng: np.random.Generator, n: int, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return (
        rng.integers(0, size, n, dtype=np.uint8, endpoint=False)
        if size < 256
        else rng.integers(0, 256, n, dtype=np.uint8)
    )


@pytest.mark.parametrize("size", [2, 5, 34, 255, 256])
def test_everything_matches_the_oracle(back_end: BackEnd, fresh: np.random.Generator, size: int) -> None:
    module = back_end.module("levels")
    for n in back_end.sizes(SIZES, "levels.SUBTRACT", "levels.GROUP", "levels.PAIRS"):
        previous, current = levels(fresh, n, size), levels(fresh, n, min(size, 19))
        a, b = back_end.array(previous), back_end.array(current)

        difference = module.delta(a, b, size)
        expected = ((previous.astype(int) - current.astype(int)) % size).astype(np.uint8)
        np.testing.assert_array_equal(back_end.numpy(difference), expected, strict=True)
        np.testing.assert_array_equal(back_end.numpy(module.undelta(a, difference, size)), current, strict=True)

        grouped, counts = module.split_by_level(b, a, size)
        np.testing.assert_array_equal(
            back_end.numpy(grouped), current[np.argsort(previous, kind="stable")], strict=True
        )
        np.testing.assert_array_equal(back_end.numpy(counts), np.bincount(previous, minlength=size), strict=True)
        np.testing.assert_array_equal(back_end.numpy(module.merge_by_level(grouped, a, size)), current, strict=True)

        pairs = module.joint_counts(a, b, size, min(size, 19))
        np.testing.assert_array_equal(
            back_end.numpy(pairs), oracle.joint_counts(previous, current, size, min(size, 19)), strict=True
        )
        assert int(back_end.numpy(pairs).sum()) == n


@pytest.mark.parametrize("fill", [0, 7, 255])
def test_all_equal(back_end: BackEnd, fill: int) -> None:
    module = back_end.module("levels")
    x = back_end.array(np.full(2051, fill, dtype=np.uint8))
    grouped, counts = module.split_by_level(x, x, 256)
    assert (back_end.numpy(grouped) == fill).all()
    assert back_end.numpy(counts)[fill] == 2051
    assert back_end.numpy(module.joint_counts(x, x, 256, 256))[fill, fill] == 2051
    assert not back_end.numpy(module.delta(x, x, 256)).any()


def test_shapes_and_strides(back_end: BackEnd, fresh: np.random.Generator) -> None:
    module = back_end.module("levels")
    previous, current = levels(fresh, 60, 9).reshape(6, 10), levels(fresh, 60, 9).reshape(6, 10)
    a, b = back_end.array(previous), back_end.array(current)
    assert tuple(module.delta(a, b, 9).shape) == (6, 10)
    np.testing.assert_array_equal(
        back_end.numpy(module.delta(a.T, b.T, 9)), back_end.numpy(module.delta(a, b, 9)).T, strict=True
    )
    np.testing.assert_array_equal(
        back_end.numpy(module.undelta(a[::2, ::3], b[::2, ::3], 9)), back_end.numpy(module.undelta(a, b, 9))[::2, ::3]
    )
    grouped, _ = module.split_by_level(b.T, a.T, 9)
    np.testing.assert_array_equal(
        back_end.numpy(grouped), oracle.split_by_level(current.T.copy(), previous.T.copy(), 9)[0]
    )
    assert tuple(module.merge_by_level(grouped, a.T, 9).shape) == (10, 6)
    np.testing.assert_array_equal(back_end.numpy(module.merge_by_level(grouped, a.T, 9)), current.T)


def test_levels_out_of_range_are_refused(back_end: BackEnd) -> None:
    module = back_end.module("levels")
    for at in (0, 5, 64, 99):
        bad = np.zeros(100, dtype=np.uint8)
        bad[at] = 7
        x, good = back_end.array(bad), back_end.array(bad * 0)
        for call in (
            lambda x=x, good=good: module.delta(x, good, 7),
            lambda x=x, good=good: module.delta(good, x, 7),
            lambda x=x, good=good: module.split_by_level(good, x, 7),
            lambda x=x, good=good: module.joint_counts(x, good, 7, 8),
            lambda x=x, good=good: module.joint_counts(good, x, 8, 7),
        ):
            with pytest.raises(BadArgumentError):
                call()
        for call in (
            lambda x=x, good=good: module.undelta(x, good, 7),
            lambda x=x, good=good: module.undelta(good, x, 7),
            lambda x=x, good=good: module.merge_by_level(good, x, 7),
        ):
            with pytest.raises(CorruptDataError):
                call()
        module.split_by_level(x, good, 7)  # values may be anything
        module.delta(x, good, 8)


pair = hnp.array_shapes(min_dims=1, max_dims=1, max_side=200).flatmap(
    lambda shape: st.tuples(hnp.arrays(np.uint8, shape), hnp.arrays(np.uint8, shape))
)


@given(pair, st.integers(2, 256))
def test_round_trips(arrays: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]], size: int) -> None:
    a, b = (x % size if size < 256 else x for x in arrays)
    a, b = a.astype(np.uint8), b.astype(np.uint8)
    difference = public.delta(a, b, size)
    assert (difference < size).all()
    np.testing.assert_array_equal(public.undelta(a, difference, size), b)
    grouped, counts = public.split_by_level(b, a, size)
    assert int(counts.sum()) == a.size
    np.testing.assert_array_equal(public.merge_by_level(grouped, a, size), b)
    table = public.joint_counts(a, b, size, size)
    np.testing.assert_array_equal(table.sum(axis=1), counts)


def test_bad_arguments() -> None:
    x = np.zeros(4, dtype=np.uint8)
    cases: list[tuple[str, Any]] = [
        ("size", lambda: public.delta(x, x, 1)),
        ("size", lambda: public.undelta(x, x, 257)),
        ("elements", lambda: public.delta(x, x[:3], 4)),
        ("elements", lambda: public.merge_by_level(x[:2], x, 4)),
        ("uint8", lambda: public.split_by_level(x.astype(np.int64), x, 4)),
        ("uint8", lambda: public.joint_counts(x, x.astype(np.int8), 4, 4)),
        ("size", lambda: public.joint_counts(x, x, 4, 1)),
        ("size", lambda: public.joint_counts(x, x, 400, 4)),
        ("not an array", lambda: public.delta(x, [0, 0, 0, 0], 4)),
    ]
    for message, call in cases:
        with pytest.raises(BadArgumentError, match=message):
            call()
