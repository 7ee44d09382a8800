"""First calls of a process: few compilations, and the bytes of compiled kernels."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from shrinkpoint.kernels import huffman_lengths, joint_counts, split_planes
from shrinkpoint.kernels.backend import dispatch

from .test_cache import start
from .test_start import jit

MOST = 30
"""Compilations of a first base, delta and load of a small state; 212 were needed when all of them compiled."""
STATE = """
import hashlib, json, sys
import numpy as np
import shrinkpoint as sp
from shrinkpoint.kernels.backend import dispatch
if sys.argv[1] == "compiled":
    dispatch.compile_at_once()
random = np.random.default_rng(0)
def state(step):
    w = random.normal(size=(96, 128)).astype(np.float32)
    moments = {"exp_avg": 1e-3 * w, "exp_avg_sq": 1e-6 * w * w, "step": np.asarray(float(step), np.float32)}
    return {"model": {"layer.weight": w, "layer.bias": w[0]}, "optimizer": {"state": {0: moments}}}
before = state(1)
after = {"model": {n: x + np.float32(1e-3) * x for n, x in before["model"].items()}, "optimizer": before["optimizer"]}
base = sp.compress(before)
delta = sp.compress(after, base)
sp.decompress(sp.Checkpoint.from_bytes(delta.to_bytes(), prev=sp.Checkpoint.from_bytes(base.to_bytes())))
compiled = 0
if "numba" in sys.modules:
    from shrinkpoint.kernels.backend import jit
    found = {id(v): v for n, m in list(sys.modules.items()) if n.startswith("shrinkpoint.") for v in vars(m).values()
             if type(v).__name__ in ("CPUDispatcher", "Helper")}
    compiled = sum(len(v.overloads) for v in found.values())
print(json.dumps([hashlib.sha256(base.to_bytes() + delta.to_bytes()).hexdigest(), compiled]))
"""


@jit
def test_a_small_state_compiles_few_kernels_and_has_the_same_bytes(tmp_path: Path) -> None:
    few = start(STATE.replace("sys.argv[1]", "'first'"), NUMBA_CACHE_DIR=str(tmp_path))
    all_of_them = start(STATE.replace("sys.argv[1]", "'compiled'"))  # from the cache of the other tests
    found = []
    for process in (few, all_of_them):
        printed, said = process.communicate(timeout=300)
        assert process.returncode == 0, said[-2000:]
        found.append(json.loads(printed))
    (first, compilations), (second, more) = found
    assert first == second
    assert compilations <= MOST < more


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the compilation choice of a process with an empty cache."""
    monkeypatch.setattr(dispatch, "PATIENCE", 0.5)
    monkeypatch.setattr(dispatch, "_found", {})
    monkeypatch.setattr(dispatch, "_on_disk", frozenset)


@pytest.mark.usefixtures("cold")
def test_a_large_array_is_compiled_and_so_are_small_ones_after_it() -> None:
    small, large = np.zeros(10, np.float32), np.zeros(dispatch.SMALL + 1, np.float32)
    split_planes(small)
    chosen = dispatch.cpu("planes")
    assert chosen.split_planes.__module__ != "shrinkpoint.kernels.planes.cpu"
    split_planes(large)
    assert chosen.split_planes.__module__ == "shrinkpoint.kernels.planes.cpu"
    np.testing.assert_array_equal(split_planes(small), np.zeros((4, 10), np.uint8))


@pytest.mark.usefixtures("cold")
def test_a_function_is_compiled_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    huffman_lengths(np.ones(4, np.int64))
    chosen = dispatch.cpu("huffman")
    assert chosen.huffman_lengths.__module__ != "shrinkpoint.kernels.huffman.cpu"
    monkeypatch.setattr(dispatch, "PATIENCE", 1e-9)
    huffman_lengths(np.ones(4, np.int64))
    assert chosen.huffman_lengths.__module__ == "shrinkpoint.kernels.huffman.cpu"


@pytest.mark.usefixtures("cold")
def test_uncompiled_forms_leave_results_on_the_host() -> None:
    """A caller may have set another default device; on "meta" there would be no values."""
    levels = torch.tensor([0, 2, 1], dtype=torch.uint8)
    with torch.device("meta"):
        counts = joint_counts(levels, levels, 3, 3)
    assert counts.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


@pytest.mark.usefixtures("cold")
def test_work_counts_arrays_within_arguments_and_integers() -> None:
    array = np.zeros(7)
    assert dispatch._work([array, [array, array], True, None, "name", 5]) == 21
    assert dispatch._work([array, 1 << 40]) > dispatch.SMALL
    assert dispatch._work([object()]) > dispatch.SMALL


def test_compiled_code_on_disk_is_used_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    (tmp_path / "planes_0123").mkdir()
    (tmp_path / "planes_0123" / "cpu._split-1.py311.abc.nbc").touch()
    assert dispatch._on_disk.__wrapped__() == {"planes"}


def test_every_subject_finds_its_compiled_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    kernels = Path(dispatch.__file__).parents[1]
    for subject in dispatch.SAME:
        assert "@njit" in (kernels / subject / "cpu.py").read_text(), f"nothing of {subject} is ever on the disk"
        (tmp_path / f"{subject}_0").mkdir(exist_ok=True)
        (tmp_path / f"{subject}_0" / "cpu._f-1.py311.abc.nbc").touch()
        assert subject in dispatch._on_disk.__wrapped__()
