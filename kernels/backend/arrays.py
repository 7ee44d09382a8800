"""Conversion between array libraries: dtype names, devices, NumPy and torch views, and back.

The compiled back ends work on NumPy arrays (CPU) and torch CUDA tensors (GPU). Any array-API array is
viewed as one of these without a copy where the library allows (DLPack), and results go back to the caller's library.

Copies between a GPU and the host go through page-locked memory. A copy to ordinary memory waits for the pages of that
memory and for a buffer of the driver: on an H200 it moves 1.3 GB/s, and 55 GB/s to memory that is page-locked. PyTorch
keeps page-locked memory for the next copy.
"""

from __future__ import annotations

import importlib
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import BadArgumentError

if TYPE_CHECKING:
    from types import ModuleType

    import torch

Array = Any
"""Any array-API array; the standard has no nominal type to name."""


DEVICES = ("cpu", "cuda")
"""Kinds of torch's devices that kernels run on."""


def imported(name: str) -> ModuleType | None:
    """Return a module that this process has imported completely, else None.

    `sys.modules` already holds a module while another thread still imports it, and then most of its names are missing.
    No object of such a module can have reached the caller yet.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else module


_tensor: type | None = None
"""torch.Tensor, once torch is imported."""


def is_torch(x: Array) -> bool:
    """Return whether x is a torch tensor, without importing torch."""
    global _tensor
    if type(x) is np.ndarray:
        return False
    if _tensor is None:
        torch = imported("torch")
        if torch is None:
            return False
        _tensor = torch.Tensor
    return isinstance(x, _tensor)


def is_allocated(t: Array) -> bool:
    """Return whether the storage of a strided tensor covers its elements.

    FSDP, for example, frees storages that it does not need.
    """
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return not t.numel() or (t.storage_offset() + last + 1) * t.element_size() <= t.untyped_storage().nbytes()


def on_gpu(x: Array) -> bool:
    """Return whether x is on a CUDA device (torch, CuPy or JAX)."""
    if isinstance(x, np.ndarray):
        return False
    if is_torch(x):
        return bool(x.is_cuda)
    if not hasattr(x, "__dlpack_device__"):
        raise BadArgumentError(f"{type(x).__name__} is not an array: NumPy, torch or any array-API array is needed")
    return int(x.__dlpack_device__()[0]) == 2  # DLPack's kDLCUDA


def device_of(x: Array) -> tuple[int, int]:
    """DLPack's kind and number of the device x lives on; (1, 0) for any host memory."""
    if isinstance(x, np.ndarray):
        return 1, 0
    if is_torch(x):
        return (2, int(x.device.index or 0)) if x.is_cuda else (1, 0)
    kind, number = (int(part) for part in x.__dlpack_device__())
    return (1, 0) if kind == 1 else (kind, number)


def dtype_name(x: Array) -> str:
    """Name of x's dtype without its library: `torch.bfloat16` is `bfloat16`, `<f4` is `float32`."""
    return _name_of(x.dtype.__class__.__module__, x.dtype)


@lru_cache(1024)
def _name_of(library: str, dtype: Any) -> str:
    # Cached, because NumPy takes microseconds to name a dtype and every kernel needs the name. The library is part of
    # the key, because dtypes of two libraries may have the same hash and warn when they are compared.
    return str(dtype).rsplit(".", 1)[-1]


def to_numpy(x: Array) -> np.ndarray[Any, Any]:
    """Return a CPU array as contiguous NumPy, without a copy where possible.

    bfloat16 is returned as uint16 bit patterns.

    Raises:
        BadArgumentError: the memory cannot be read, for example because the array is being vectorized.
    """
    if isinstance(x, np.ndarray):
        if x.dtype.kind == "V" and dtype_name(x) == "bfloat16":  # ml_dtypes
            x = x.view(np.uint16)
        # The usual case comes first, because every kernel runs this.
        return x if type(x) is np.ndarray and x.flags.c_contiguous else np.ascontiguousarray(x).reshape(x.shape)
    try:
        if is_torch(x):
            import torch

            t = x.detach().resolve_conj().resolve_neg().contiguous()
            if t.dtype == torch.bfloat16:
                t = t.view(torch.uint16)
            out: np.ndarray[Any, Any] = t.numpy()
            return out
        array = np.asarray(x) if hasattr(x, "__array__") else np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()
        raise BadArgumentError(
            f"an array of type {type(x).__module__}.{type(x).__qualname__} cannot be read from the CPU"
            f"{': ' + reason[0][:200] if reason else ''}"
        ) from error
    return to_numpy(array)


def writeable(x: Array, dtype: type[np.generic] | None = None) -> np.ndarray[Any, Any]:
    """Return x as a contiguous, writeable NumPy array.

    Numba would compile a second version for a read-only array.

    Args:
        x: any array on the CPU.
        dtype: dtype to convert it to; default: no conversion.
    """
    found = to_numpy(x)
    if dtype is not None:
        found = found.astype(dtype, copy=False)
    return found if found.flags.writeable else found.copy()


def writeable_view(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the same memory as a writeable array, for code that only reads it.

    Numba would compile a second version for a read-only array, and `writeable` would copy it.
    """
    if x.flags.writeable:
        return x
    interface = dict(x.__array_interface__)
    interface["data"] = (interface["data"][0], False)
    return np.asarray(_Memory(interface, x))


class _Memory:
    """Owner of memory that NumPy reads through the array interface."""

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def to_host(x: Array) -> np.ndarray[Any, Any]:
    """Return an array on any device as NumPy, copied from the GPU if necessary.

    bfloat16 is returned as in `to_numpy`.
    """
    if isinstance(x, np.ndarray) or not on_gpu(x):
        return to_numpy(x)
    if is_torch(x):
        return to_numpy(to_cpu(x.detach()))
    if hasattr(x, "get"):  # CuPy copies to the host only on request
        return to_numpy(x.get())
    from torch.utils.dlpack import from_dlpack

    return to_numpy(from_dlpack(x).cpu())


def placed_with(x: Array, other: Array) -> Array:
    """Return an array as a tensor on the GPU of another, or as NumPy if that is on the host."""
    if not on_gpu(other):
        return to_host(x)
    torch: Any = imported("torch")
    return to_device(x if is_torch(x) else torch.from_numpy(np.require(x, requirements="W")), other.device)


def write(out: Array, x: np.ndarray[Any, Any]) -> None:
    """Copy a flat NumPy array to memory of its dtype and length, on the host or on a GPU."""
    if not on_gpu(out):
        out[:] = x
        return
    torch: Any = imported("torch")
    send(torch.from_numpy(np.require(x, requirements=("C", "W"))), out)


def bytes_of(memory: Array) -> Array:
    """View flat memory, NumPy or a torch tensor, as bytes, uint8."""
    return numbers(memory, 1)


def numbers(data: Array, width: int, kind: str = "uint") -> Array:
    """View flat memory, NumPy or a torch tensor, as numbers.

    Args:
        data: any dtype.
        width: bytes of a number, 1 to 8.
        kind: "uint", "int" or "float".
    """
    torch: Any = imported("torch")
    return data.view(getattr(torch, f"{kind}{8 * width}") if is_torch(data) else f"<{kind[0]}{width}")


def bit_view(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """View a contiguous NumPy array as unsigned integers of the same width, without a copy."""
    return x.reshape(-1).view(np.dtype(f"uint{8 * x.dtype.itemsize}"))


def narrow_to_numpy(integers: Array) -> np.ndarray[Any, Any]:
    """Return flat integers on the host: from a GPU two bytes each, then the few that need more.

    Args:
        integers: int16 or int32, shape (n,).
    """
    if not on_gpu(integers):
        return to_numpy(integers)
    if integers.element_size() == 2:
        return to_cpu(integers).numpy()
    import torch

    low = integers.to(torch.int16)
    far = (integers != low).nonzero().reshape(-1)
    numbers = to_cpu(low).numpy().astype(np.int32)
    places = 8 * far.numel()
    few = to_cpu(torch.cat([far.view(torch.uint8), integers[far].view(torch.uint8)])).numpy()
    numbers[few[:places].view(np.int64)] = few[places:].view(np.int32)
    return numbers


def like(result: np.ndarray[Any, Any], x: Array, dtype: str | None = None, *, rounded: bool = False) -> Array:
    """Return `result` in the library of `x` and on its device.

    JAX has no 64-bit dtypes unless `jax_enable_x64` is set. Without it, int64 is returned as int32 if every value fits.

    Args:
        result: NumPy.
        x: an array of the library and on the device wanted.
        dtype: "bfloat16": `result` holds bfloat16 as uint16 bit patterns.
        rounded: whether float64 may be returned as float32, each value rounded once, if the library has no float64.

    Raises:
        BadArgumentError: the library cannot hold the result without loss.
    """
    if is_torch(x):
        import torch

        t = torch.from_numpy(result)
        return t.view(torch.bfloat16) if dtype == "bfloat16" else t
    if dtype == "bfloat16":
        import ml_dtypes

        result = result.view(ml_dtypes.bfloat16)
    if isinstance(x, np.ndarray):
        return result
    compat = importlib.import_module("array_api_compat")
    out = compat.array_namespace(x).asarray(result, device=compat.device(x))
    if dtype_name(out) != dtype_name(result) and not (rounded and result.dtype == np.float64):
        _check_same_values(result, out)
    return out


def to_place_of(values: Array, flat: Array) -> Array:
    """Return values of torch or NumPy in the library of another such array and on its device."""
    if is_torch(flat):
        return (values if is_torch(values) else like(np.require(values, requirements="W"), flat)).to(flat.device)
    if is_torch(values):
        return values.float().cpu().numpy() if str(values.dtype) == "torch.bfloat16" else values.cpu().numpy()
    return values


def wide(x: Array) -> Array:
    """Return a torch tensor or NumPy array as float64, where it is."""
    return x.double() if is_torch(x) else x.astype(np.float64)


def _check_same_values(result: np.ndarray[Any, Any], out: Array) -> None:
    """Raise BadArgumentError unless a library's int32 version of int64 holds the same numbers."""
    if result.dtype == np.int64 and dtype_name(out) == "int32" and (result == result.astype(np.int32)).all():
        return
    raise BadArgumentError(
        f"the result is {result.dtype}, which {type(out).__module__.partition('.')[0]} turns into {dtype_name(out)}, "
        "so values would change; JAX has 64-bit numbers after jax.config.update('jax_enable_x64', True)"
    )


_SMALL = 1 << 15
"""Bytes up to which a copy to ordinary memory is as fast."""
_PIECE = 1 << 26
"""Most bytes that are page-locked for one copy."""


def to_cpu(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU: itself, or a copy that is complete when this returns.

    Args:
        t: any dtype and shape.
    """
    import torch

    nbytes = t.numel() * t.element_size()
    if not t.is_cuda or nbytes <= _SMALL:
        return t.cpu()
    t = t.contiguous()
    if nbytes <= _PIECE:
        return _page_locked(t)
    host = torch.empty(t.shape, dtype=t.dtype, device="cpu")
    flat, place = t.view(-1), host.view(-1)
    step = _PIECE // t.element_size()
    for start in range(0, flat.numel(), step):
        place[start : start + step] = _page_locked(flat[start : start + step])
    return host


def to_device(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device: itself, or a copy, which may run on while the host does.

    Args:
        t: any dtype and shape.
        device: kernels launched there on the current stream find the copy complete.
    """
    if t.is_cuda or device.type != "cuda" or t.numel() * t.element_size() <= _SMALL:
        return t.to(device)
    import torch

    there = torch.empty(t.shape, dtype=t.dtype, device=device)
    send(t.contiguous().view(-1), there.view(-1))
    return there


def send(t: torch.Tensor, room: torch.Tensor) -> None:
    """Copy a flat tensor of the host to one on a device; the copy may run on."""
    if not room.is_cuda:
        room.copy_(t)
        return
    step = _PIECE // t.element_size()
    for start in range(0, t.numel(), step):
        part = t[start : start + step]
        if part.numel() * part.element_size() > _SMALL:
            part = part.pin_memory()
        room[start : start + step].copy_(part, non_blocking=part.is_pinned())


def _page_locked(t: torch.Tensor) -> torch.Tensor:
    """Copy a contiguous CUDA tensor to page-locked memory."""
    import torch

    host = torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True)
    with torch.cuda.device(t.device):
        host.copy_(t, non_blocking=True)
        torch.cuda.current_stream().synchronize()
    return host


def as_list(x: Array) -> list[int]:
    """Return the elements of an integer array as a list, row by row, for the sequential oracles."""
    xp = importlib.import_module("array_api_compat").array_namespace(x)
    flat = xp.reshape(xp.astype(x, xp.int64), (-1,))
    if hasattr(flat, "tolist"):  # not in the standard, but faster where it is
        return list(flat.tolist())
    return [int(flat[i]) for i in range(flat.shape[0])]


def from_list(values: list[int], dtype: str, like: Array) -> Array:
    """Return integers as a one-dimensional array in the library of `like`."""
    xp = importlib.import_module("array_api_compat").array_namespace(like)
    return xp.astype(xp.asarray(values, dtype=xp.int64), getattr(xp, dtype))
