"""Formats of floats: the fewest bits of a sketch that meet an error."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels import FORMATS, bits_for
from shrinkpoint.kernels.errors import BadArgumentError


@given(st.floats(1e-9, 0.5, exclude_max=True), st.sampled_from(sorted(FORMATS)))
def test_bits_are_the_fewest_that_meet_the_error(alpha: float, name: str) -> None:
    bits, most = bits_for(alpha, FORMATS[name]), FORMATS[name].mantissa
    assert 0 <= bits <= most
    assert bits == most or math.ldexp(1.0, -(bits + 1)) <= alpha
    assert bits == 0 or math.ldexp(1.0, -bits) > alpha


@pytest.mark.parametrize("alpha", [0.0, -0.1, math.nan, math.inf])
def test_an_error_that_is_none_is_refused(alpha: float) -> None:
    with pytest.raises(BadArgumentError, match="alpha"):
        bits_for(alpha, FORMATS["float32"])
