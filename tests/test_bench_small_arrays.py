"""Rows "many small arrays" of `bench codec`: shapes of the states, and the entropy bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.bench import codec, small_arrays
from shrinkpoint.bench.harness import Options, is_red


def test_shapes_are_those_of_the_named_models() -> None:
    resnet = small_arrays.resnet(quick=False)
    assert len(resnet) == 161
    assert sum(math.prod(shape) for shape in resnet.values()) == 25_557_032
    state = small_arrays._resnet(True).before["model"]
    assert sum("running" in name for name in state) == 106
    assert len(small_arrays.lora(quick=False)) == 448
    assert sum("experts" in name for name in small_arrays.experts(quick=True)) == 3 * 64


def test_rows_of_one_state() -> None:
    rows = codec.run(Options(quick=True, only="LoRA", rounds=2))
    assert not any(is_red(row) for row in rows)
    found = {row.row.rpartition(": ")[2]: row for row in rows}
    times = ["compress base", "compress delta", "decompress delta", "lossless base"]
    sizes = ["bytes above the entropy", "bytes of the base", "bytes of the delta", "bytes of the lossless base"]
    assert list(found) == times + sizes
    assert {found[name].unit for name in times} == {"ms/array"}
    assert found["bytes of the base"].value < found["bytes of the lossless base"].value  # type: ignore[operator]
    assert found["compress base"].size == 2 * 7 * 2 * 4  # two layers; weight, two moments and a step each


def test_entropy_is_that_of_the_values_that_come_back() -> None:
    many, few = torch.arange(256).repeat(4).to(torch.uint8), torch.zeros(10, dtype=torch.int64)
    stored = sp.compress({"many": many, "few": few})
    assert small_arrays.entropy_bytes(stored) == pytest.approx(1024 + 80)
    weights = torch.from_numpy(np.random.default_rng(0).standard_normal((128, 128)).astype(np.float32))
    lossy = sp.compress({"model": {"a.weight": weights}})
    assert lossy.summary()[0].measure != "exact"
    assert 0.5 * lossy.nbytes < small_arrays.entropy_bytes(lossy) < lossy.nbytes
