"""Levels of equidistant entries equal the oracle's, and those of `assign`."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint import kernels as k
from shrinkpoint.kernels.quantizer import reference as uniform_oracle

from .test_many import LENGTHS, drawn


@given(LENGTHS, st.integers(0, 2**32), st.sampled_from([np.inf, 3.0, 1e-3]))
def test_levels_of_equidistant_entries_are_those_of_the_codebook(lengths: list[int], seed: int, limit: float) -> None:
    rng = np.random.default_rng(seed)
    ends, m = np.cumsum(lengths, dtype=np.int64), len(lengths)
    steps = np.ldexp(rng.integers(128, 256, m).astype(np.float64), rng.integers(-20, -6, m))
    firsts, sizes = rng.integers(-200, 50, m), rng.integers(1, 255, m)
    x = drawn(seed, sum(lengths))
    member = np.repeat(np.arange(m), lengths)
    halves = rng.random(x.size) < 0.3  # exactly between two entries
    x[halves] = ((rng.integers(-300, 300, x.size) / 2) * steps[member])[halves].astype(np.float32)
    levels, sums = k.uniform_levels_many(x, ends, steps, firsts, sizes, limit)
    others, their_sums = uniform_oracle.uniform_levels_many(x, ends, steps, firsts, sizes, limit)
    np.testing.assert_array_equal(levels, others)
    np.testing.assert_allclose(sums, their_sums, rtol=1e-10)
    values = k.uniform_values_many(levels, ends, steps, firsts)
    np.testing.assert_array_equal(values, uniform_oracle.uniform_values_many(levels, ends, steps, firsts))
    for i, part in enumerate(np.split(np.arange(x.size), ends)[:-1]):
        codebook = (np.arange(firsts[i], firsts[i] + sizes[i]) * steps[i]).astype(np.float32)
        np.testing.assert_array_equal(levels[part], k.assign(x[part], k.Thresholds(limit), codebook))
        table = np.concatenate([np.zeros(2, np.float32), codebook])
        np.testing.assert_array_equal(values[part], table[levels[part]])
