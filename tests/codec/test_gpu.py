"""States on a GPU: the same bytes as on the CPU, and few bytes copied to the host.

Without a GPU torch's CPU tensors pass for CUDA ones and Triton's interpreter runs the kernels, so that the codec's way
over the device is taken here too.
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.moments import clusters, firstmoment, secondmoment, symbolvalues
from shrinkpoint.codec.parallel import set_threads
from shrinkpoint.codec.state import leaves
from shrinkpoint.codec.weights import planning, quantize
from shrinkpoint.codec.weights.codebook import Problem
from shrinkpoint.kernels.backend.arrays import is_torch

from .common import take_apart

HERE = torch.cuda.is_available()
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed on this platform"),
    *([pytest.mark.gpu] if HERE else []),
]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Device whose tensors are treated as CUDA tensors."""
    if HERE:
        yield "cuda"
        return
    for name, module in list(sys.modules.items()):
        if name.startswith("shrinkpoint.") and hasattr(module, "on_gpu"):
            monkeypatch.setattr(module, "on_gpu", is_torch)
    set_threads(1)  # Triton's interpreter runs one kernel at a time
    yield "cpu"
    set_threads(None)


def moments(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    rows = torch.exp(torch.randn(shape[0], *[1] * (len(shape) - 1), generator=g))
    v = 1e-8 * rows * torch.exp(0.5 * torch.randn(shape, generator=g))
    m = 0.3 * v.sqrt() * torch.randn(shape, generator=g)
    return {"step": torch.tensor(7.0), "exp_avg": m.to(dtype), "exp_avg_sq": v.to(dtype)}


def training(t: int) -> dict[str, Any]:
    """Return weights of several types and their moments at step t, some of them unusual."""
    g = torch.Generator().manual_seed(1)
    model = {
        "emb.weight": torch.randn(120, 24, generator=g),
        "fc.weight": torch.randn(60, 50, generator=g) * 0.02,
        "half.weight": (torch.randn(40, 64, generator=g) * 0.1).bfloat16(),
        "norm.weight": torch.ones(24),
        "ternary.weight": torch.tensor([-0.3, -0.0, 0.0, 0.7])[torch.randint(4, (64, 64), generator=g)],
    }
    model = {k: (x.float() * (1 + 0.003 * t)).to(x.dtype) for k, x in model.items()}
    entries = [moments(tuple(x.shape), 10 * i + t // 2, x.dtype) for i, x in enumerate(model.values())]
    odd = entries[1]
    odd["exp_avg_sq"][3] = 0.0
    odd["exp_avg"][3] = 0.0
    odd["exp_avg"][5, 5], odd["exp_avg_sq"][6, 6], odd["exp_avg_sq"][7, 7] = 1e9, -1e-9, float("nan")
    return {"model": model, "optimizer": {"state": dict(enumerate(entries))}, "step": t}


def to(tree: Any, device: str) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, tree)


CONFIGS = {
    "default": sp.Config(),
    "rate": sp.Config(rate=0.004),
    "target": sp.Config(max_rel_error=0.02),
    "few bins": sp.Config([("weight", sp.Quantize(bins=3))]),
    "exact": sp.Config([("weight", sp.Quantize(bins=3, solver="exact", protect=0.01))]),
    "refit": sp.Config([("weight", sp.Quantize(policy="refit", sigma=0.2))]),
    "warm": sp.Config([("weight", sp.Quantize(solver="exact", policy="warm"))]),
    "residual": sp.Config([("weight", sp.Quantize(residual=True))], max_rel_error=1e-3),
    "inshrinkerator": sp.presets.inshrinkerator(prune=0.1),
    "lc": sp.presets.lc_checkpoint(3),
    "check-n-run": sp.presets.check_n_run(4),
    "bitsnap": sp.presets.bitsnap(),
    "lossless": sp.presets.lossless(),
    "log buckets": sp.Config([("*", sp.LogBuckets())]),
    "fine log buckets": sp.Config([("*", sp.LogBuckets(2.0**-12))]),
    "rows": sp.Config([("weight", sp.Rows(3, "asymmetric"))]),
    "rows by k-means": sp.Config([("weight", sp.Rows(2, "kmeans"))]),
}


def gradients(t: int) -> dict[str, Any]:
    """Return float32 gradients of all weights but one."""
    g = torch.Generator().manual_seed(50 + t)
    model = training(t)["model"]
    return {k: torch.randn(x.shape, generator=g) for k, x in model.items() if k != "ternary.weight"}


SOLVED_THERE = ("few bins", "exact")
"""Configurations whose codebooks Triton's interpreter solves; it takes seconds for one of more bins."""


def one_by_one(problems: Sequence[Problem], place: torch.Tensor) -> list[Any]:
    """Replacement for `solve_together` with equal results (`tests/kernels/test_kmeans.py`)."""
    return [problem.solve() for problem in problems]


def earlier(t: int, device: str = "cpu") -> sp.PastWeights:
    """Return the weights of five checkpoints earlier, for a gain of the first delta."""
    return sp.PastWeights(to(training(t - 5)["model"], device), steps=50)


def coded_twice(name: str, device: str = "cpu") -> list[sp.Checkpoint]:
    """Compress a base and a delta of states on a device."""
    cfg, chain = CONFIGS[name.partition(",")[0]], list[sp.Checkpoint]()
    for t in range(2):
        grads = to(gradients(t), device) if "gradients" in name else None
        before = earlier(t, device) if "earlier" in name else None
        prev = chain[-1] if chain else None
        chain.append(sp.compress(to(training(t), device), prev, cfg, grads=grads, earlier=before))
    return chain


def check_same_bytes(chain: list[sp.Checkpoint], others: list[sp.Checkpoint]) -> None:
    """Check that files are equal apart from stated errors and the parent's checksum."""
    for one, other in zip(chain, others, strict=True):
        (header, body), (other_header, other_body) = (take_apart(c.to_bytes()) for c in (one, other))
        for record, other_record in zip(header["arrays"], other_header["arrays"], strict=True):
            # The order of an error's sum is the device's own.
            assert record.pop("e", 0) == pytest.approx(other_record.pop("e", 0), rel=0.02)
        del header["parent"], other_header["parent"]
        assert header == other_header
        assert body == other_body


@pytest.mark.parametrize(
    "name", [*CONFIGS, "default, gradients", "exact, gradients", "inshrinkerator, gradients", "rate, earlier"]
)
def test_the_same_bytes_as_on_the_cpu(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = coded_twice(name)
    gains = [record.meta.get("a", [0])[0] for record in expected[0].records]
    assert any(gains) is ("earlier" in name)
    device = request.getfixturevalue("device")
    if not HERE and not name.startswith(SOLVED_THERE):
        monkeypatch.setattr(planning, "solve_together", one_by_one)
    check_same_bytes(coded_twice(name, device), expected)


@pytest.mark.skipif(HERE, reason="a real device says so itself, in every other test")
def test_nothing_of_the_host_is_computed_with_what_lies_on_a_device() -> None:
    """No operation mixes host and device tensors, by torch's rules on pretended devices."""
    script = Path(__file__).with_name("pretended_gpu.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.split() == ["refused", "refused", "done"]


@pytest.mark.parametrize("given", [False, True])
def test_sketches_and_codebooks_of_a_model_take_one_launch_each(
    device: str, monkeypatch: pytest.MonkeyPatch, given: bool
) -> None:
    """All tensors of a model share one launch for sketches and one for codebooks."""
    seen: dict[str, int] = {}

    def count(subject: str, name: str) -> None:
        module = importlib.import_module(f"shrinkpoint.kernels.{subject}.gpu")
        real = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            seen[name] = seen.get(name, 0) + 1
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, counted)

    count("histogram", "_launch")
    count("kmeans", "weighted_kmeans_many")
    cfg = sp.Config([("weight", sp.Quantize(bins=2, solver="exact"))])
    for tensors in (1, 5):
        model = {f"{i}.weight": torch.randn(64 + i, 64).to(device) for i in range(tensors)}
        seen.clear()
        sp.compress(model, cfg=cfg, grads=model if given else None)
        assert seen == {"_launch": 3 if given else 1, "weighted_kmeans_many": 1}


def test_moments_stay_on_the_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only symbols and rare values of moments are copied to the host."""
    state = {"optimizer": {"state": {0: to(moments((70, 80), 3), device)}}}
    fetched: list[tuple[str, int]] = []
    bring, raw = leaves.on_host, leaves.as_bytes

    def seen(x: Any) -> Any:
        fetched.append((str(x.dtype), x.shape[0] if len(x.shape) else 1))
        return bring(x)

    def seen_raw(x: Any) -> Any:
        fetched.append((str(x.dtype), len(x)))
        return raw(x)

    for module in (firstmoment, secondmoment, symbolvalues, quantize, clusters):
        for name, spy in (("on_host", seen), ("as_bytes", seen_raw)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, spy)
    base = sp.compress(state)
    sp.compress(state, base)
    assert ("torch.uint8", 5600) in fetched
    assert [size for dtype, size in fetched if dtype != "torch.uint8" and size > 100] == []


@pytest.fixture
def crossed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record dtype and size of every tensor that is copied to the host."""
    found: list[tuple[str, int]] = []
    bring, move = torch.Tensor.cpu, torch.Tensor.copy_

    def seen(x: torch.Tensor) -> torch.Tensor:
        found.append((str(x.dtype), x.numel()))
        return bring(x)

    def moved(place: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.is_cuda and not place.is_cuda:
            found.append((str(x.dtype), x.numel()))
        return move(place, x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "cpu", seen)
    monkeypatch.setattr(torch.Tensor, "copy_", moved)
    return found


def test_copies_are_compared_on_the_device(device: str, crossed: list[tuple[str, int]]) -> None:
    """Comparing masters with their halves copies only the first elements to the host."""
    masters = {f"{i}.weight": torch.randn(70, 80, generator=torch.Generator().manual_seed(i)) for i in range(3)}
    state = {"model": {k: x.bfloat16() for k, x in masters.items()}, "master": masters}
    expected = sp.compress(state, cfg=sp.presets.lossless())
    state["model"]["2.weight"][-1, -1] = 7.0
    crossed.clear()
    found = sp.compress(to(state, device), cfg=sp.presets.lossless())
    codecs = {row.path: row.stream for row in found.summary()}
    assert {row.path for row in expected.summary() if row.stream == "copy"} == {f"model/{i}.weight" for i in range(3)}
    assert [codecs[f"model/{i}.weight"] == "copy" for i in range(3)] == [True, True, False]
    assert sorted(x for x in crossed if x[1] == 3 * 64) == [("torch.bfloat16", 3 * 64), ("torch.float32", 3 * 64)]
    assert sorted(size for _, size in crossed if size > 3 * 64) == [2 * 5600, *3 * [4 * 5600]], "bytes"


@pytest.mark.parametrize("alpha", [0.25, 2.0**-12])
def test_log_buckets_are_taken_apart_on_the_device(device: str, crossed: list[tuple[str, int]], alpha: float) -> None:
    """Log buckets are split on the device: bytes of symbols, signs and fractions are copied."""
    x = torch.randn(70, 80, generator=torch.Generator().manual_seed(2))
    x[3, 5] = float("inf")
    sp.compress({"weight": x.to(device)}, cfg=sp.Config([("*", sp.LogBuckets(alpha))]))
    assert ("torch.uint8", 5600) in crossed
    streams = 2 if alpha == 0.25 else 3
    assert ("torch.uint8", streams * 5599) in crossed
    assert [size for dtype, size in crossed if dtype != "torch.uint8" and size > 300] == []


def test_packed_codes_alone_come_to_the_host(device: str, crossed: list[tuple[str, int]]) -> None:
    x = torch.randn(70, 80, generator=torch.Generator().manual_seed(2)).to(device)
    sp.compress({"weight": x}, cfg=sp.Config([("*", sp.Rows(4, "asymmetric"))]))
    hashes, numbers, codes = (70 * n for n in (8, 8, 40))
    assert ("torch.uint8", hashes + numbers + codes) in crossed
    assert max(size for _, size in crossed) == hashes + numbers + codes


def test_few_values_are_found_on_the_device(device: str, crossed: list[tuple[str, int]]) -> None:
    """Arrays with few distinct values are detected on the device."""
    few = torch.tensor([-0.3, -0.0, 0.0, 0.7, float("nan")])[torch.arange(6400).reshape(80, 80) % 5]
    many = 1 + 1e-3 * torch.rand(80, 80, generator=torch.Generator().manual_seed(2))
    for x, codec in ((few, sp.Quantize(bins=3)), (many, sp.Quantize(bins=3))):
        crossed.clear()
        cfg = sp.Config([("*", codec)])
        expected = sp.compress({"weight": x.numpy()}, cfg=cfg)
        found = sp.compress({"weight": x.to(device)}, cfg=cfg)
        assert found.summary()[0].error == pytest.approx(expected.summary()[0].error)
        assert [size for dtype, size in crossed if dtype.startswith("torch.float") and size > 2000] == []
