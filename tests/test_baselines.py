"""Baselines: exact parts are exact, errors are bounded, and sizes are real."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.bench.studies.baselines.excp import ExCP
from shrinkpoint.bench.studies.baselines.partial import Scar, TopN, affordable
from shrinkpoint.bench.studies.baselines.parts import Baseline, Saved, State
from shrinkpoint.bench.studies.baselines.quantizers import (
    Adaptive,
    Naive8Bit,
    QDCompressor,
    centroids,
    clustered,
    outliers,
)
from shrinkpoint.codec.errors import BadArgumentError, MissingParentError

BASELINES: dict[str, Callable[[], Baseline]] = {
    "naive 8-bit": Naive8Bit,
    "QD-compressor": QDCompressor,
    "ExCP": ExCP,
    "Adaptive": Adaptive,
    "SCAR": Scar,
    "TOPN": TopN,
    "naive 8-bit, moments too": lambda: Naive8Bit(moments=True),
}
"""By name; each with its published settings."""
ROOT = Path(__file__).parent.parent
CODED = ("first.weight", "second.weight", "half.weight")
SHAPES = {"first.weight": (64, 32), "second.weight": (40, 64), "half.weight": (48, 32)}


def state(seed: int = 0, step: int = 10, *, of: State | None = None) -> State:
    """Return a state with every kind of array for a baseline, or the successor of `of`."""
    g = torch.Generator().manual_seed(seed)
    if of is not None:
        moved: State = torch.utils._pytree.tree_map(
            lambda x: x + 2e-4 * torch.randn(x.shape, generator=g).to(x.dtype) if is_weight(x) else x, of
        )
        return {**moved, "step": step}
    model = {
        name: (torch.randn(shape, generator=g) * 0.02).to(torch.bfloat16 if "half" in name else torch.float32)
        for name, shape in SHAPES.items()
    }
    moments = {
        i: {
            "step": torch.tensor(10.0),
            "exp_avg": torch.randn(shape, generator=g) * 1e-4,
            "exp_avg_sq": torch.rand(shape, generator=g) ** 4 * 1e-6,
        }
        for i, shape in enumerate(SHAPES.values())
    }
    small = {"norm.weight": torch.ones(64), "ids": torch.arange(5000), "empty.weight": torch.empty(0, 4)}
    broken = torch.randn(64, 32, generator=g)
    broken[3, 5] = math.nan
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1, 2]}]
    optimizer = {"state": moments, "param_groups": groups}
    return {"model": {**model, **small, "broken.weight": broken}, "optimizer": optimizer, "step": step}


def is_weight(x: Any) -> bool:
    """Return True for a coded weight (moments do not change here)."""
    return isinstance(x, torch.Tensor) and x.ndim == 2 and x.numel() >= 1024 and float(x.abs().max()) > 0.01


def bits(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return x.dtype, tuple(x.shape), x.reshape(-1).view(torch.uint8).tolist() if x.numel() else []


def chain(baseline: Baseline, length: int = 4) -> list[tuple[State, Saved, State]]:
    """(exact, saved, restored) of a closed loop."""
    found: list[tuple[State, Saved, State]] = []
    exact = state()
    for i in range(length):
        previous = found[-1][2] if found else None
        saved = baseline.encode(exact, previous)
        found.append((exact, saved, baseline.decode(saved, previous)))
        exact = state(i + 1, 20 + 10 * i, of=exact)
    return found


def error(exact: State, restored: State, name: str) -> float:
    return float((exact["model"][name].double() - restored["model"][name].double()).abs().max())


def raw(name: str) -> int:
    return math.prod(SHAPES[name]) * (2 if "half" in name else 4)


RAW = sum(raw(name) for name in CODED)


@pytest.mark.parametrize("make", BASELINES.values(), ids=list(BASELINES))
def test_round_trip(make: Callable[[], Baseline]) -> None:
    for exact, saved, restored in chain(make()):
        assert torch.utils._pytree.tree_structure(restored) == torch.utils._pytree.tree_structure(exact)
        for name, value in exact["model"].items():
            other = restored["model"][name]
            assert (other.dtype, other.shape) == (value.dtype, value.shape)
            if name not in CODED:
                assert bits(other) == bits(value), name
            else:
                assert error(exact, restored, name) < 0.05
        for i, entry in exact["optimizer"]["state"].items():
            assert bits(restored["optimizer"]["state"][i]["step"]) == bits(entry["step"])
        assert restored["optimizer"]["param_groups"] == exact["optimizer"]["param_groups"]
        assert restored["step"] == exact["step"]
        assert saved.nbytes == len(saved.weights) + len(saved.rest)
        assert 0.01 * RAW < len(saved.weights) < 1.1 * RAW


@pytest.mark.parametrize("make", BASELINES.values(), ids=list(BASELINES))
def test_pure(make: Callable[[], Baseline]) -> None:
    """Equal input gives equal bytes, and the arguments are not changed."""
    baseline = make()
    first, second = state(), state(1, 20, of=state())
    restored = baseline.decode(baseline.encode(first, None), None)
    kept = [bits(x) for x in torch.utils._pytree.tree_leaves([second, restored])]
    saved = baseline.encode(second, restored)
    baseline.decode(saved, restored)
    assert make().encode(second, restored) == saved
    assert [bits(x) for x in torch.utils._pytree.tree_leaves([second, restored])] == kept
    with pytest.raises(FrozenInstanceError):
        baseline.name = ""  # type: ignore[misc]


CITED = re.compile(
    r"^[A-Z]\.( [A-Z]\.)* [A-Z][a-z]+(, ([A-Z]\. )+[A-Z][a-z]+)+: [A-Z].{20,}, (ICML|ICCD|ICPP|MICRO|NSDI) 20[12]\d\b"
    r"|BitSnap, section \d\.\d: '.{40,}'$"
)
"""Authors, title, venue and year; or the place in one of the papers that has it as a yardstick, with its words."""


def test_sources_are_cited_and_say_what_they_leave_open() -> None:
    made = [make() for make in BASELINES.values()]
    systems = {type(baseline) for baseline in made}
    cited = set()
    for system in systems:
        paragraphs = [" ".join(part.split()) for part in (system.__doc__ or "").split("\n\n")]
        (source,) = (part.removeprefix("Source: ") for part in paragraphs if part.startswith("Source: "))
        (left_open,) = (part.removeprefix("Left open: ") for part in paragraphs if part.startswith("Left open: "))
        assert CITED.search(source.removesuffix(".")), source
        # Choices that the source leaves open, and those made here.
        assert re.search(r"\bhere\b", left_open), system
        assert len(left_open.split()) > 20, system
        cited |= {source, left_open}
    assert len(cited) == 2 * len(systems)
    assert {baseline.name for baseline in made} == set(BASELINES)


DELTAS = ("QD-compressor", "ExCP", "SCAR", "TOPN")


@pytest.mark.parametrize("name", DELTAS)
def test_a_wrong_parent_is_an_error(name: str) -> None:
    baseline = BASELINES[name]()
    (_, _, first), (second, saved, _), *_ = chain(baseline, 2)
    for wrong in (None, state(5), {"model": {}, "step": 1}):
        with pytest.raises(MissingParentError):
            baseline.decode(saved, wrong)
    first["model"]["first.weight"] = first["model"]["first.weight"][:32]
    with pytest.raises(BadArgumentError, match=r"model/first\.weight"):
        baseline.encode(second, first)


@pytest.mark.parametrize("moments", [False, True])
def test_naive_8_bit_errs_by_half_a_step(moments: bool) -> None:
    baseline = Naive8Bit(moments=moments)
    exact, saved, restored = chain(baseline, 1)[0]
    for name in ("first.weight", "second.weight"):
        x = exact["model"][name]
        assert error(exact, restored, name) <= float(x.max() - x.min()) / 255 / 2 * 1.001
        assert restored["model"][name].unique().numel() > 128
    entry, other = exact["optimizer"]["state"][0], restored["optimizer"]["state"][0]
    same = bool(torch.equal(entry["exp_avg_sq"], other["exp_avg_sq"]))
    assert same is not moments
    assert float((entry["exp_avg_sq"] - other["exp_avg_sq"]).abs().max()) <= 1e-6 / 510 * 1.01
    assert len(saved.weights) < sum(math.prod(SHAPES[name]) for name in CODED)


def test_qd_compressor_follows_the_entropy_and_does_not_drift() -> None:
    baseline = QDCompressor(least=8, most=64)
    found = chain(baseline, 4)
    normal = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    spiked = np.where(np.arange(4096) % 50 == 0, normal, 0).astype(np.float32)
    assert baseline.bins(normal) == 64
    assert baseline.bins(spiked) == 8
    for x in (normal, normal**3, np.sign(normal) * 3):
        share = np.histogram(x, 256)[0] / x.size
        entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
        assert QDCompressor(least=2).bins(x) == max(2, 2 ** math.ceil(round(entropy, 2)))
    for exact, _, restored in found:
        x = exact["model"]["first.weight"]
        assert error(exact, restored, "first.weight") <= float(x.max() - x.min()) / 63 / 2 * 1.001
    assert len(found[1][1].weights) < 0.8 * len(found[0][1].weights)


def test_excp_prunes_by_both_and_keeps_fifteen_centers() -> None:
    baseline = ExCP()
    (base, _, first), (second, _, restored) = chain(baseline, 2)
    for i, name in enumerate(CODED[:2]):
        assert torch.equal(base["model"][name], first["model"][name])
        old, new = first["model"][name], restored["model"][name]
        residual = (second["model"][name] - old).flatten().numpy()
        entry, other = second["optimizer"]["state"][i], restored["optimizer"]["state"][i]
        scale = math.sqrt(float(entry["exp_avg_sq"].double().mean()))
        threshold = min(2.5, 5e-5 / scale) * float(np.median(np.abs(residual)))
        kept = np.abs(residual) > threshold
        assert 0.1 < kept.mean() < 0.99
        moved = (new != old).flatten().numpy()
        assert not moved[~kept].any()
        assert moved[kept].mean() > 0.99
        mean = entry["exp_avg"].abs().mean()
        own = kept & (entry["exp_avg"].abs() > 2 * mean).flatten().numpy()
        for moment in ("exp_avg", "exp_avg_sq"):
            assert np.array_equal((other[moment] != 0).flatten().numpy(), own)
            assert other[moment].unique().numel() <= 16
        error = (entry["exp_avg"] - other["exp_avg"]).flatten()[torch.from_numpy(own)]
        assert float(error.abs().max()) < 0.3 * float(entry["exp_avg"].abs().max())


def test_excp_refuses_moments_it_cannot_place() -> None:
    odd = state()
    odd["model"]["twin.weight"] = odd["model"]["first.weight"] + 1
    with pytest.raises(BadArgumentError, match=r"\(64, 32\)"):
        ExCP().encode(odd, None)
    # Under two names it is still one parameter.
    odd["model"]["twin.weight"] = odd["model"]["first.weight"].clone()
    restored = ExCP().decode(ExCP().encode(odd, None), None)
    assert torch.equal(restored["model"]["twin.weight"], odd["model"]["first.weight"])
    only = {"model": odd["model"], "step": 1}
    assert ExCP().decode(ExCP().encode(only, None), None)["step"] == 1


def test_gobo_keeps_outliers_and_lowers_the_distance() -> None:
    exact = state()["model"]["first.weight"]
    exact[0, :3] = torch.tensor([0.5, -0.4, 0.3])
    x = exact.flatten().numpy()
    y, kept = clustered(x, 8), outliers(x)
    assert kept[:3].all()
    assert kept.mean() < 0.02
    assert np.array_equal(x[kept], y[kept])
    assert np.unique(y[~kept]).size == 8
    # Nearest of its centroids, and nearer in sum than the groups of equal size that it started from.
    codes = np.unique(y[~kept])
    assert np.array_equal(np.abs(x[~kept] - y[~kept]), np.abs(x[~kept][:, None] - codes).min(axis=1))
    start = np.array([group.mean() for group in np.array_split(np.sort(x[~kept]), 8)])
    assert np.abs(x[~kept] - y[~kept]).sum() < np.abs(x[~kept][:, None] - start).min(axis=1).sum()


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=80), st.integers(1, 12))
def test_centroids(values: list[float], count: int) -> None:
    found = centroids(values, count, 50)
    assert 1 <= found.size <= count
    assert (np.diff(found) >= -1e-9).all()
    assert min(values) - 1e-6 <= found[0] <= found[-1] + 1e-9 <= max(values) + 1e-6


def changed(old: State, new: State) -> np.ndarray[Any, np.dtype[np.bool_]]:
    parts = [(new["model"][n] != old["model"][n]).flatten().numpy() for n in CODED]
    return np.concatenate(parts)


def test_scar_updates_one_partition_after_the_other() -> None:
    baseline = Scar(share=0.25)
    found = chain(baseline, 5)
    total = sum(math.prod(shape) for shape in SHAPES.values())
    seen = np.zeros(total, np.int64)
    for (_, _, old), (exact, saved, new) in pairwise(found):
        moved = changed(old, new)
        places = np.flatnonzero(moved)
        assert places[-1] - places[0] < total / 4 + 1
        assert not (changed(exact, new) & moved).any()
        seen[places[0] : places[-1] + 1] += 1
        assert len(saved.weights) <= 0.25 * total * 4 + 40
    assert (seen == 1).mean() > 0.99


def test_topn_updates_the_largest_within_its_share() -> None:
    baseline = TopN(share=0.2)
    for (_, _, old), (exact, saved, new) in pairwise(chain(baseline, 3)):
        distance = np.concatenate(
            [(exact["model"][n].float() - old["model"][n].float()).abs().flatten().numpy() for n in CODED]
        )
        moved = changed(old, new)
        assert not (changed(exact, new) & moved).any()
        assert distance[~moved].max() <= distance[moved].min()
        assert moved.sum() == affordable([math.prod(shape) for shape in SHAPES.values()], 0.2)
        assert 0.19 * distance.size * 4 < len(saved.weights) <= 0.2 * distance.size * 4 + 20


def test_scar_needs_steps() -> None:
    first = state()
    with pytest.raises(BadArgumentError, match="step is 10, previous step 10"):
        Scar().encode(state(1, 10, of=first), first)


def test_the_wheel_has_no_studies_and_no_bench_needs_them() -> None:
    """The wheel has the packages that setuptools finds, and each of its benches can be imported."""
    from setuptools import find_namespace_packages

    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packages = find_namespace_packages(where=str(ROOT / found["where"][0]), exclude=found["exclude"])
    assert "shrinkpoint.bench" in packages
    assert not [
        name for name in packages if any(f"bench.{part}" in name for part in ("studies", "evidence", "results"))
    ]
    lines = (
        "import sys, importlib",
        "from shrinkpoint.bench.__main__ import BENCHMARKS",
        "[importlib.import_module(f'shrinkpoint.bench.{name}') for name in BENCHMARKS]",
        "sys.exit(any('bench.studies.' in name or 'bench.evidence' in name for name in sys.modules))",
    )
    assert subprocess.run([sys.executable, "-c", "; ".join(lines)], check=False).returncode == 0


def test_adaptive_packs_its_levels_and_keeps_to_its_range() -> None:
    for bins in (8, 32, 256):
        exact, saved, restored = chain(Adaptive(bins), 1)[0]
        size = sum(math.prod(SHAPES[name]) for name in CODED)
        assert len(saved.weights) <= size * (bins.bit_length() - 1) / 8 + 16 * len(CODED)
        for name in CODED[:2]:
            found, x = restored["model"][name], exact["model"][name]
            assert found.unique().numel() <= bins
            step = float(found.max() - found.min()) / (bins - 1)
            inside = (x >= found.min()) & (x <= found.max())
            assert float((found - x)[inside].abs().max()) <= 0.51 * step
