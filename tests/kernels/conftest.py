"""One fixture runs a kernel test body against every back end; results come back as NumPy for exact comparison."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from shrinkpoint.kernels.arrays import is_torch, to_numpy

if TYPE_CHECKING:
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
        return importlib.import_module(f"shrinkpoint.kernels.{self.name}.{subject}")

    def array(self, x: Any, dtype: str | None = None) -> Any:
        """x as an array of this back end's library; `dtype="bfloat16"` rounds float values to bfloat16 (torch only)."""
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

    @staticmethod
    def numpy(x: Any) -> np.ndarray[Any, Any]:
        """A result of any library as NumPy (bfloat16 as bit patterns)."""
        if type(x).__module__.startswith("array_api_strict"):
            return np.asarray(x._array)
        if isinstance(x, torch.Tensor) and x.is_cuda:
            x = x.cpu()
        return to_numpy(x)


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
def back_end(request: pytest.FixtureRequest) -> BackEnd:
    """Every back end there is, one after another."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=[_param(b) for b in ALL if b.name != "gpu" and b.library != "strict"])
def sequential_back_end(request: pytest.FixtureRequest) -> BackEnd:
    """The back ends of the sequential coders: `reference` and `cpu`."""
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def fresh() -> np.random.Generator:
    """Random data that differs in each run; the seed is printed with a failure."""
    seed = int.from_bytes(os.urandom(4), "little")
    sys.stderr.write(f"fresh data seed: {seed}\n")
    return np.random.default_rng(seed)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where public functions see a GPU: without one, where torch's tensors pass for CUDA tensors."""
    if GPU_HERE:
        return "cuda"
    if not TRITON_HERE:
        pytest.skip("Triton is not installed on this platform")
    for name, module in list(sys.modules.items()):
        if name.startswith("shrinkpoint.kernels.") and hasattr(module, "on_gpu"):
            monkeypatch.setattr(module, "on_gpu", is_torch)
    return "cpu"


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a back end asks for holds bytes already, so that an element it forgets to write shows."""
    in_torch, in_numpy = torch.empty, np.empty

    def torch_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = in_torch(*args, **kwargs)
        out.view(-1).view(torch.uint8).fill_(0xA5)
        return out

    def numpy_empty(*args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        out = in_numpy(*args, **kwargs)
        if out.dtype.kind != "O":
            out.reshape(-1).view(np.uint8)[:] = 0xA5
        return out

    monkeypatch.setattr(torch, "empty", torch_empty)
    monkeypatch.setattr(np, "empty", numpy_empty)


STRICT_SHAPES = [(), (0,), (7,), (2, 3), (0, 4)]


def strict_array(x: np.ndarray[Any, Any]) -> Any:
    """x in the library that has nothing but what the array API standard says: no method `reshape`, for one."""
    return pytest.importorskip("array_api_strict").asarray(x)
