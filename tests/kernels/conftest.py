"""Fixtures that run a kernel test body against every back end, with exact comparison."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import pytest
import torch

from shrinkpoint.kernels.backend.arrays import is_torch, to_numpy

from ..seeds import fresh_seed

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

GPU_HERE = torch.cuda.is_available()
TRITON_HERE = importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class BackEnd:
    """A back end and the array library its inputs are made in."""

    name: str
    library: str

    def module(self, subject: str) -> ModuleType:
        """The module of `subject` in this back end."""
        return importlib.import_module(f"shrinkpoint.kernels.{subject}.{self.name}")

    def array(self, x: Any, dtype: str | None = None) -> Any:
        """x as an array of this back end's library.

        `dtype="bfloat16"` rounds float values to bfloat16 (torch only).
        """
        if dtype == "bfloat16" and self.library != "torch":
            pytest.skip(f"{self.library} has no bfloat16")
        x = np.asarray(x)
        if self.library == "numpy":
            return x if dtype is None else x.astype(dtype)
        if self.library == "strict":
            strict = pytest.importorskip("array_api_strict")
            if dtype not in (None, "float32", "float64"):
                pytest.skip(f"the array API standard has no {dtype}")
            return strict.asarray(x if dtype is None else x.astype(dtype))
        t = torch.from_numpy(x.copy())
        if dtype is not None:
            t = t.to(getattr(torch, dtype))
        return t.cuda() if self.name == "gpu" and GPU_HERE else t

    def sizes(self, always: list[int], *launches: str) -> list[int]:
        """Return `always`, and for the GPU back end also sizes around the blocks of these launches.

        A block has thousands of elements, so that small CPU sizes run in one program there. A launch is
        named by module and name, `levels.GROUP`; the interpreter takes smaller blocks of its own for small data.
        """
        blocks = {_block(name) for name in launches} if self.name == "gpu" else set()
        return sorted({*always, *(n for b in blocks for n in (b - 1, b, b + 1, 2 * b + 3))})

    @staticmethod
    def numpy(x: Any) -> np.ndarray[Any, Any]:
        """A result of any library as NumPy (bfloat16 as bit patterns)."""
        if type(x).__module__.startswith("array_api_strict"):
            return np.asarray(x._array)
        if isinstance(x, torch.Tensor) and x.is_cuda:
            x = x.cpu()
        return to_numpy(x)


def _block(launch: str) -> int:
    subject, name = launch.split(".")
    block: int = getattr(importlib.import_module(f"shrinkpoint.kernels.{subject}.gpu"), name).block
    return block


ALL = [
    BackEnd("reference", "numpy"),
    BackEnd("reference", "torch"),
    BackEnd("reference", "strict"),
    BackEnd("cpu", "numpy"),
    BackEnd("cpu", "torch"),
    BackEnd("gpu", "torch"),
]


def _param(b: BackEnd) -> Any:
    marks = []
    if b.name == "gpu":
        marks.append(pytest.mark.skipif(not TRITON_HERE, reason="Triton is not installed on this platform"))
        if GPU_HERE:
            marks.append(pytest.mark.gpu)
    return pytest.param(b, id=f"{b.name}-{b.library}", marks=marks)


@pytest.fixture(params=[_param(b) for b in ALL])
def back_end(request: pytest.FixtureRequest, poisoned: None) -> BackEnd:
    """Every back end in turn, with poisoned memory."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=[_param(b) for b in ALL if b.name != "gpu" and b.library != "strict"])
def sequential_back_end(request: pytest.FixtureRequest, poisoned: None) -> BackEnd:
    """The back ends of the sequential coders, `reference` and `cpu`, with poisoned memory."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def fresh() -> np.random.Generator:
    """Random data that differs in each run; the seed is printed with a failure."""
    return np.random.default_rng(fresh_seed())


@pytest.fixture(params=[pytest.param("device", marks=pytest.mark.gpu if GPU_HERE else ())])
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Device on which public functions see a GPU; without one, the CPU passes for CUDA."""
    if GPU_HERE:
        return "cuda"
    if not TRITON_HERE:
        pytest.skip("Triton is not installed on this platform")
    for name, module in list(sys.modules.items()):
        if name.startswith("shrinkpoint.kernels.") and hasattr(module, "on_gpu"):
            monkeypatch.setattr(module, "on_gpu", is_torch)
    return "cpu"


POISON = 0xA5
"""The byte that memory holds which a back end asked for and did not write."""


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill newly allocated memory, so that an element that a back end does not write is seen.

    Numba looks functions up by identity when it compiles, so for that time the real ones are put back: compiled code
    may allocate memory of its own, and the compiled code is cached on disk.
    """
    replaced: list[tuple[Any, str, Any, Any]] = []
    for owner, names, fill in (
        (np, ("empty", "empty_like"), _fill_numpy),
        (torch, ("empty", "empty_like", "empty_strided"), _fill_torch),
        (torch.Tensor, ("new_empty",), _fill_torch),
    ):
        for name in names:
            real = getattr(owner, name)
            replaced.append((owner, name, real, _then(real, fill)))
    for owner, name, _, poisoning in replaced:
        monkeypatch.setattr(owner, name, poisoning)

    compile_ = numba.core.dispatcher.Dispatcher.compile

    def unpoisoned(self: Any, signature: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            for owner, name, real, _ in replaced:
                patch.setattr(owner, name, real)
            return compile_(self, signature)

    monkeypatch.setattr(numba.core.dispatcher.Dispatcher, "compile", unpoisoned)


def _then(real: Callable[..., Any], fill: Callable[[Any], None]) -> Callable[..., Any]:
    def poisoning(*args: Any, **kwargs: Any) -> Any:
        out = real(*args, **kwargs)
        fill(out)
        return out

    return poisoning


def _fill_numpy(x: np.ndarray[Any, Any]) -> None:
    if not x.dtype.hasobject and x.size:
        x.ravel(order="K").view(np.uint8)[:] = POISON


def _fill_torch(x: torch.Tensor) -> None:
    if x.layout is torch.strided and x.device.type in ("cpu", "cuda") and x.numel():
        x.untyped_storage().fill_(POISON)


STRICT_SHAPES = [(), (0,), (7,), (2, 3), (0, 4)]


def strict_array(x: np.ndarray[Any, Any]) -> Any:
    """x in a library with only the functions of the array API standard."""
    return pytest.importorskip("array_api_strict").asarray(x)
