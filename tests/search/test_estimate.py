"""Estimated sizes and errors are within a few percent of compressing."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec import entropy
from shrinkpoint.codec.weights.error_targets import blocks
from shrinkpoint.codec.weights.levels import LevelsReference, head_piece
from shrinkpoint.kernels.quantizer import Thresholds
from shrinkpoint.searching import sample as sampling
from shrinkpoint.searching.cube import Cube, Point
from shrinkpoint.searching.estimate import Estimator
from shrinkpoint.searching.sample import nbytes_of_levels, nbytes_of_protected
from shrinkpoint.searching.search_state import SearchState

from .calls import search_state
from .common import perceptron

CUBE = Cube()
SOME = [p for p in CUBE if p.bins in (4, 12, 32) and p.prune in (0.0, 0.3) and p.protect in (0.0005, 0.01)]


def estimator(prepared: SearchState) -> Estimator:
    return Estimator(prepared.leaves, prepared.parents, prepared.codec)


def relative_error(a: Any, b: Any) -> float:
    return float(((a - b) ** 2).sum() / (a**2).sum())


@pytest.mark.parametrize("system", ["default", "inshrinkerator"])
@pytest.mark.parametrize("delta", [False, True])
def test_sizes_and_errors_are_those_of_compressing(system: str, delta: bool) -> None:
    chain = perceptron()
    points = [Point(p.bins, p.prune, p.metric, p.protect, 0.0, 32, system) for p in SOME]
    last = Point(12, 0.0, "magnitude", 0.0005, 0.0, 32, system)
    prev = sp.compress(chain.states[1], cfg=last.config(), grads=chain.grads[1]) if delta else None
    prepared = search_state(chain.states[2], points[0], prev, chain.grads[2])
    ratios = []
    for point, found in zip(points, estimator(prepared)(points), strict=True):
        ckpt = sp.compress(chain.states[2], prev, point.config(), grads=chain.grads[2])
        ratios.append((found.nbytes + prepared.rest_nbytes(point.rate)) / ckpt.nbytes)
        back = sp.decompress(ckpt)
        true = {leaf.path: leaf.spec.size for leaf in prepared.leaves}
        weight, key = chain.states[2]["model"], "model/"
        met = sum(
            n * relative_error(weight[path.removeprefix(key)], back["model"][path.removeprefix(key)])
            for path, n in true.items()
        ) / sum(true.values())
        assert found.error == pytest.approx(met, rel=0.06)
    assert np.abs(np.array(ratios) - 1).max() < 0.025


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("mean", "deviation"), [(1.0, 0.02), (-3.0, 0.3)])
def test_narrow_arrays_of_sixteen_bits(dtype: torch.dtype, mean: float, deviation: float) -> None:
    """Estimates hold for 16-bit values that are sparse between codebook entries."""
    generator = torch.Generator().manual_seed(0)
    x = (mean + deviation * torch.randn(256, 256, generator=generator)).to(dtype)
    points = [Point(b, p, "magnitude", 0.0005, 0.0, 32) for b in (4, 8, 16, 32) for p in (0.0, 0.2)]
    prepared = search_state({"weight": x}, points[0])
    for point, found in zip(points, estimator(prepared)(points), strict=True):
        ckpt = sp.compress({"weight": x}, cfg=point.config())
        met = relative_error(x.double(), sp.decompress(ckpt)["weight"].double())
        assert found.error == pytest.approx(met, rel=0.03)
        assert found.nbytes + prepared.rest_nbytes(point.rate) == pytest.approx(ckpt.nbytes, rel=0.025)


def test_patterns_say_how_alike_errors_are() -> None:
    chain = perceptron()
    points = [Point(p.bins, p.prune, p.metric, p.protect, 0.0, 32) for p in SOME]
    prepared = search_state(chain.states[2], points[0], None, chain.grads[2])
    patterns = np.array([e.pattern for e in estimator(prepared)(points)], np.float64)
    paths = [leaf.path.removeprefix("model/") for leaf in prepared.leaves]
    weights = chain.states[2]["model"]
    true = np.zeros((len(points), len(points)))
    for path in paths:
        off = []
        for point in points:
            back = sp.decompress(sp.compress(chain.states[2], None, point.config(), grads=chain.grads[2]))
            off.append((back["model"][path] - weights[path]).flatten().double().numpy() / float(weights[path].norm()))
        true += np.array(off) @ np.array(off).T / len(paths)
    lengths = np.sqrt(np.diag(true))
    assert np.diag(patterns @ patterns.T) == pytest.approx(np.diag(true), rel=0.1)
    assert np.abs(patterns @ patterns.T - true).max(initial=0.0) <= 0.1 * np.outer(lengths, lengths).max()


def test_the_pruned_share_of_the_error() -> None:
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    prepared = search_state({"weight": x}, SOME[0])
    points = [Point(32, 0.3, "magnitude", 0.0, embedding_bins=32), Point(32, 0.0, "magnitude", 0.0, embedding_bins=32)]
    some, none = estimator(prepared)(points)
    small = x.abs() < x.abs().flatten().quantile(0.3)
    assert some.pruned * some.error == pytest.approx(float((x[small] ** 2).sum() / (x**2).sum()), rel=0.05)
    assert none.pruned == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_sample_stands_for_a_large_array(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 512, generator=generator).to(dtype)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), 0.0])
    point = Point(12, 0.2, "magnitude", 0.005, embedding_bins=32)
    prev = sp.compress({"weight": x}, cfg=point.config())
    moved = (x.double() + 0.02 * torch.randn(x.shape, generator=generator)).to(dtype)
    for parent in (None, prev):
        prepared = search_state({"weight": moved}, point, parent)
        whole = estimator(prepared)([point])[0]
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "SAMPLE", 1 << 15)
            part = estimator(prepared)([point])[0]
        assert part != whole
        assert part.nbytes == pytest.approx(whole.nbytes, rel=0.05)
        assert part.error == pytest.approx(whole.error, rel=0.05)


@pytest.mark.parametrize("system", ["default", "inshrinkerator"])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_small_arrays(system: str, delta: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates count records, tables and codebooks of many small arrays."""
    generator = torch.Generator().manual_seed(0)
    state = {f"{i}.weight": torch.randn(32, 48 + 16 * (i % 3), generator=generator) * (1 + i % 5) for i in range(40)}
    points = [
        Point(bins, prune, "magnitude", protect, 0.0, 32, system)
        for bins in (4, 16)
        for prune in (0.0, 0.3)
        for protect in (0.0005, 0.01)
    ]
    before = {name: x.to(dtype) for name, x in state.items()}
    after = {name: (x + 0.02 * torch.randn(x.shape, generator=generator)).to(dtype) for name, x in state.items()}
    prev = sp.compress(before, cfg=points[0].config()) if delta else None
    prepared = search_state(after, points[0], prev)
    few = estimator(prepared)(points)
    monkeypatch.setattr(sampling, "GROUPS", 1000)
    ratios = []
    for point, all_of_them, some in zip(points, estimator(prepared)(points), few, strict=True):
        real = sp.compress(after, prev, point.config()).nbytes - prepared.rest_nbytes(point.rate)
        # What notes say, and so how long they are, is not known before.
        assert all_of_them.nbytes == pytest.approx(real, abs=5 * len(state))
        ratios.append(some.nbytes / real)
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.04)


@pytest.mark.parametrize("coder", ["smallest", "published"])
@pytest.mark.parametrize("scale", [1, 2])
@pytest.mark.parametrize(
    ("size", "parent"), [(256, "none"), (18, "none"), (66, "another"), (34, "near")], ids=lambda v: str(v)
)
def test_levels_take_what_the_coder_writes_tables_too(size: int, parent: str, scale: int, coder: str) -> None:
    """The estimate of levels equals the coder's bytes, also from half of them."""
    rng = np.random.default_rng(0)

    def drawn() -> Any:
        return np.clip(rng.normal(size / 2, size / 6, 20_000), 2, size - 1).astype(np.uint8)

    levels = drawn()
    near = np.where(rng.random(levels.size) < 0.1, np.maximum(levels, 3) - 1, levels).astype(np.uint8)
    before = {"none": None, "another": drawn(), "near": near}[parent]
    written = len(entropy.encode_levels(levels, size, before, 0 if before is None else size, coder))
    some = slice(levels.size // scale)
    memory = None
    if before is not None:
        nothing = Thresholds(np.inf, np.inf, 0.0, 0.0)
        memory = LevelsReference(before[some], np.zeros(size - 2), np.empty(0, np.uint8), nothing)
    x = np.zeros(levels[some].size, np.float32)
    part = sampling.Sample(x, x, None, None, x, 1.0, 0.0, memory, float(scale))
    close = 0.001 if coder == "published" and scale == 1 else 0.01
    if coder == "published" and memory is not None and scale > 1:
        close = 0.08  # runs are coded on half of the sample and on all of it, and two blocks of 1,024 are not alike
    assert nbytes_of_levels(levels[some], size, part, coder) == pytest.approx(written, rel=close)


def test_levels_of_a_small_matrix_take_what_is_written_rows_and_columns_known() -> None:
    """The estimate of a small matrix uses its row and column classes."""
    levels = np.random.default_rng(0).integers(2, 10, (100, 80)).astype(np.uint8)
    levels[:, ::2] = 5
    levels = levels.reshape(-1)
    written = len(entropy.encode_levels(levels, 10, None, 0, "smallest", entropy.Matrix(80)))
    assert written < 0.8 * len(entropy.encode_levels(levels, 10, None, 0, "smallest"))
    x = np.zeros(levels.size, np.float32)
    part = sampling.Sample(x, x, None, None, x, 1.0, 0.0, None, 1.0)
    assert nbytes_of_levels(levels, 10, part, "smallest", 80) == written


def test_protected_values_take_what_is_written_of_them() -> None:
    """The estimate of protected values counts the parent's values."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 400, generator=generator)
    point = Point(8, 0.0, "magnitude", 0.05, 0.0, 32)
    prev = sp.compress({"weight": x}, cfg=point.config())
    moved = {"weight": x * (1 + 0.001 * torch.randn(x.shape, generator=generator))}
    (before,) = search_state(moved, point, prev).parents
    assert isinstance(before, LevelsReference)
    for parent in (None, before):
        ckpt = sp.compress(moved, None if parent is None else prev, point.config())
        prepared = search_state(moved, point, ckpt)
        (leaf,), (memory,) = prepared.leaves, prepared.parents
        assert isinstance(memory, LevelsReference)
        none = LevelsReference(memory.levels[:0], memory.codebook, memory.protected[:0], memory.thresholds)
        parents = None if parent is None else [parent]
        whole, alone = (len(head_piece([leaf.spec], [own], parents)) for own in (memory, none))
        written = whole - alone
        part = sampling.sample(leaf, parent, leaf.spec.size)
        assert part.scale == 1.0
        assert nbytes_of_protected(memory.levels, part, leaf.spec) == written
        part = sampling.sample(leaf, parent, sampling.SAMPLE * leaf.spec.size // (1 << 15))
        levels = np.ascontiguousarray(memory.levels[blocks(leaf.spec.size, 1 << 15, sampling.BLOCK)])
        assert part.scale > 2
        assert nbytes_of_protected(levels, part, leaf.spec) == pytest.approx(written, rel=0.1)
    assert 0 < 5 * written < memory.protected.size


def test_few_arrays_stand_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {f"{i}.weight": torch.randn(32, 48 + 16 * (i % 3), generator=generator) * (1 + i % 5) for i in range(40)}
    points = [
        Point(6, 0.2, "magnitude", 0.005, embedding_bins=32),
        Point(16, 0.0, "magnitude", 0.005, embedding_bins=32),
    ]
    prepared = search_state(state, points[0])
    few = estimator(prepared)(points)
    monkeypatch.setattr(sampling, "GROUPS", 1000)
    for a, b in zip(few, estimator(prepared)(points), strict=True):
        assert a != b
        assert a.nbytes == pytest.approx(b.nbytes, rel=0.08)
        assert a.error == pytest.approx(b.error, rel=0.1)


def test_a_group_is_spoken_for_by_one_of_its_usual_size_and_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is represented by an array of typical size and scale."""
    generator = torch.Generator().manual_seed(0)
    sizes = [17, 17, 17, 31, 31, 17, 31, 17, 31, 17]
    state = {f"{i}.weight": torch.randn(64, n, generator=generator) for i, n in enumerate(sizes)}
    monkeypatch.setattr(sampling, "GROUPS", 2)
    leaves = search_state(state, SOME[0]).leaves
    scales = [0.1, 0.3, 0.4, 0.2, 0.5, 1.0, 3.0, 2.0, 5.0, 4.0]  # of the larger ones 3 and 6 are nearer to the middle
    assert sampling.representatives(leaves, scales) == [(3, 113 / 31), (6, 113 / 31)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_parent_knows_of_some_elements(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 60, generator=generator).to(dtype)
    ckpt = sp.compress({"weight": x}, cfg=Point(8, 0.1, "magnitude", 0.01).config())
    prepared = search_state({"weight": x}, SOME[0], ckpt)
    memory = prepared.parents[0]
    assert isinstance(memory, LevelsReference)
    at = np.flatnonzero(np.arange(6000) // 7 % 3 == 1)
    some = sampling.held_of(memory, at, prepared.leaves[0].spec)
    spec = prepared.leaves[0].spec
    whole = memory.values(spec)
    assert 0 < np.count_nonzero(some.levels == 1) < np.count_nonzero(memory.levels == 1)
    part = dataclasses.replace(spec, shape=(at.size,))
    assert torch.equal(some.values(part), whole[torch.from_numpy(at)])


def test_what_is_counted_is_kept() -> None:
    prepared = search_state({"weight": torch.randn(64, 64)}, SOME[0])
    made = estimator(prepared)
    first = made(SOME[:3])
    assert all(a is b for a, b in zip(first, made(SOME[:3]), strict=True))


def test_rate_lowers_the_size_and_raises_the_error() -> None:
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    prev = sp.compress({"weight": x})
    moved = x + 0.02 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    for state, parent, rates in (
        ({"weight": x}, None, (0.0, 0.03, 0.1)),
        ({"weight": moved}, prev, (0.0, 0.001, 0.003)),
    ):
        points = [Point(24, 0.0, "magnitude", 0.0005, rate, 32) for rate in rates]
        prepared = search_state(state, SOME[0], parent)
        found = estimator(prepared)(points)
        assert found[0].nbytes > found[1].nbytes > found[2].nbytes
        assert found[0].error < found[1].error < found[2].error
        for e, point in zip(found, points, strict=True):
            nbytes = sp.compress(state, parent, point.config()).nbytes
            assert e.nbytes + prepared.rest_nbytes(point.rate) == pytest.approx(nbytes, rel=0.02, abs=100)


def few_values(values: list[float], shares: list[float], size: int) -> torch.Tensor:
    drawn = np.random.default_rng(0).choice(np.array(values, np.float32), size=(size, size), p=shares)
    return torch.from_numpy(drawn)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(
    "tensor",
    [
        few_values([1.0, 1.001, 1.002, 50.0], [0.3, 0.3, 0.3, 0.1], 768),
        few_values([-2, -0.5, -0.49, 0.0, 0.001, 0.0011, 0.5, 3], [0.02, 0.2, 0.1, 0.3, 0.08, 0.2, 0.05, 0.05], 768),
        few_values([k / 10 for k in range(-8, 8)], [1 / 16] * 16, 768),
    ],
    ids=["near", "eight", "4 bit"],
)
def test_arrays_of_few_different_values(tensor: torch.Tensor, delta: bool) -> None:
    """Arrays of few distinct values have exact estimates if each value has an entry."""
    points = [
        Point(bins, prune, "magnitude", protect, 0.0, 32)
        for bins in (4, 6, 8, 16, 32)
        for prune in (0.0, 0.3)
        for protect in (0.0005, 0.01)
    ]
    generator = torch.Generator().manual_seed(0)
    other = torch.randn(64, 64, generator=generator)
    state, prev = {"a.weight": tensor, "b.weight": other}, None
    if delta:
        prev = sp.compress(state)
        moved = tensor.flatten().clone()
        at = torch.randperm(moved.numel(), generator=generator)[: moved.numel() // 20]
        moved[at] = moved[at.flip(0)]
        state = {"a.weight": moved.view(tensor.shape), "b.weight": other}
    prepared = search_state(state, points[0], prev)
    for point, found in zip(points, estimator(prepared)(points), strict=True):
        ckpt = sp.compress(state, prev, point.config())
        back = sp.decompress(ckpt)
        met = sum(state[k].numel() * relative_error(state[k], back[k]) for k in state) / sum(
            x.numel() for x in state.values()
        )
        assert found.nbytes + prepared.rest_nbytes(point.rate) == pytest.approx(ckpt.nbytes, rel=0.03)
        assert found.error == pytest.approx(met, rel=0.05, abs=1e-5)


def test_constant_empty_and_zero_arrays() -> None:
    state = {"a.weight": torch.zeros(64, 64), "b.weight": torch.full((64, 64), 3.0), "c.weight": torch.zeros(0, 2048)}
    prepared = search_state(state, SOME[0])
    for found in estimator(prepared)([p for p in SOME if p.metric == "magnitude"]):
        assert np.isfinite([found.nbytes, found.error, found.pruned]).all()
        assert found.nbytes < 2000
