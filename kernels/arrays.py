"""Arrays of any library: which dtype, which device, as NumPy or torch, and back again.

The compiled back ends work on NumPy arrays (CPU) and torch CUDA tensors (GPU). Whatever array-API array comes in is
viewed as one of these without a copy where the library allows (DLPack), and results go back to the caller's library.
"""

from __future__ import annotations

import importlib
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import BadArgumentError

if TYPE_CHECKING:
    from types import ModuleType

Array = Any
"""Any array-API array; the standard has no nominal type to name."""


def is_torch(x: Array) -> bool:
    """Whether x is a torch tensor, without importing torch for those who do not use it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def on_gpu(x: Array) -> bool:
    """Whether x lives on a CUDA device (torch, CuPy or JAX)."""
    if isinstance(x, np.ndarray):
        return False
    if is_torch(x):
        return bool(x.is_cuda)
    if not hasattr(x, "__dlpack_device__"):
        raise BadArgumentError(f"{type(x).__name__} is not an array: NumPy, torch or any array-API array is needed")
    return int(x.__dlpack_device__()[0]) == 2  # DLPack's kDLCUDA


def back_end(x: Array, subject: str) -> ModuleType:
    """The module that computes `subject` where x lives: `kernels.gpu.SUBJECT` or `kernels.cpu.SUBJECT`."""
    return _module("gpu" if on_gpu(x) else "cpu", subject)


@lru_cache(None)
def _module(where: str, subject: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{where}.{subject}")


def dtype_name(x: Array) -> str:
    """Name of x's dtype without its library's prefix: `torch.bfloat16` is `bfloat16`, `<f4` is `float32`."""
    return _name_of(x.dtype.__class__.__module__, x.dtype)


@lru_cache(1024)
def _name_of(library: str, dtype: Any) -> str:
    # NumPy takes microseconds to spell a dtype, and every kernel asks. The library is part of the key: dtypes
    # of two libraries may hash alike and warn when compared.
    return str(dtype).rsplit(".", 1)[-1]


def to_numpy(x: Array) -> np.ndarray[Any, Any]:
    """A CPU array as NumPy, contiguous, without a copy where possible; bfloat16 comes as its uint16 bit patterns."""
    if isinstance(x, np.ndarray):
        if x.dtype.kind == "V" and dtype_name(x) == "bfloat16":  # ml_dtypes
            x = x.view(np.uint16)
        return np.ascontiguousarray(x).reshape(x.shape)
    if is_torch(x):
        import torch

        t = x.detach().resolve_conj().resolve_neg().contiguous()
        if t.dtype == torch.bfloat16:
            t = t.view(torch.uint16)
        out: np.ndarray[Any, Any] = t.numpy()
        return out
    array = np.asarray(x) if hasattr(x, "__array__") else np.from_dlpack(x)
    return to_numpy(array)


def bit_view(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bit patterns of a contiguous NumPy array as unsigned integers of the same width, no copy."""
    return x.reshape(-1).view(np.dtype(f"uint{8 * x.dtype.itemsize}"))


def like(result: np.ndarray[Any, Any], x: Array, dtype: str | None = None) -> Array:
    """`result` in the library of `x`; `dtype="bfloat16"` marks uint16 bit patterns that are really bfloat16."""
    if is_torch(x):
        import torch

        t = torch.from_numpy(result)
        return t.view(torch.bfloat16) if dtype == "bfloat16" else t
    if dtype == "bfloat16":
        import ml_dtypes

        result = result.view(ml_dtypes.bfloat16)
    if isinstance(x, np.ndarray):
        return result
    namespace = importlib.import_module("array_api_compat").array_namespace(x)
    return namespace.asarray(result)
