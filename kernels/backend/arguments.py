"""Argument checks that all public kernel modules share.

Each takes constant time: none reads an array's elements.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from numbers import Real
from typing import Any, TypeVar

import numpy as np

from ..errors import BadArgumentError
from .arrays import DEVICES, Array, device_of, dtype_name, is_allocated, is_torch, on_gpu

T = TypeVar("T")
UNSIGNED = ("uint8", "uint16", "uint32")
COUNTS = ("int64", "int32", "int16", "int8", *UNSIGNED)
"""Integer dtypes that int64 holds exactly, for libraries without int64."""
PLAUSIBLE = 1 << 32
"""Number of elements up to which a MemoryError is not reported as a wrong argument."""


def check_arrays(**named: Array) -> None:
    """Raise BadArgumentError for arguments that no back end can read.

    Raises:
        BadArgumentError: not an array, an array on several devices, or a torch tensor that is not dense memory on a CPU
            or a CUDA device.
    """
    for name, x in named.items():
        if not isinstance(x, np.ndarray):
            _check_foreign(name, x)


def _check_foreign(name: str, x: Any) -> None:
    if is_torch(x):
        _check_tensor(name, x)
    elif isinstance(x, type) or not all(hasattr(x, a) for a in ("dtype", "shape", "__dlpack_device__")):
        raise BadArgumentError(f"{name} is {shown(x)}, not an array: NumPy, torch or any array-API array is needed")
    else:
        _check_device(name, x)


def _check_device(name: str, x: Any) -> None:
    try:
        device_of(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # a sharded array of JAX, for one
        raise BadArgumentError(
            f"{name} is a {type(x).__name__} that is not on one device: {str(error)[:200]}"
        ) from error


def _check_tensor(name: str, x: Any) -> None:
    import torch

    if x.layout is not torch.strided or x.is_nested or x.device.type not in DEVICES:
        raise BadArgumentError(
            f"{name} is a torch tensor of layout {x.layout} on device {x.device}; a dense one on cpu or cuda is needed"
        )
    try:  # a vectorized or traced tensor, or one that wraps others, has no memory of its own
        storage = x.untyped_storage()
        real = type(x) is torch.Tensor or (
            storage.device.type == x.device.type and (storage.data_ptr() != 0 or x.numel() == 0)
        )
        freed = real and not is_allocated(x)
    except (RuntimeError, NotImplementedError):
        real = freed = False
    if freed:
        raise BadArgumentError(f"{name} is a torch tensor whose storage was freed")
    if not real:
        raise BadArgumentError(
            f"{name} is a torch tensor ({type(x).__name__}) without memory of its own, as within vmap, torch.func or a "
            "fake mode, or of a class that wraps other tensors; kernels take plain ones"
        )


def array(
    name: str, x: Any, dtypes: Collection[str], shape: int | tuple[int, ...] | None = None, *, host: bool = False
) -> Array:
    """Return `x` if it is an array of one of the dtypes and of the given shape.

    Raises BadArgumentError otherwise.

    Args:
        name: name of the argument, for messages.
        x: value of the argument.
        dtypes: names of the allowed dtypes.
        shape: shape, or number of axes; None: any.
        host: whether an array on a GPU is refused (not copied), for functions that run on the CPU only.
    """
    if not isinstance(x, np.ndarray):
        _check_foreign(name, x)
    dtype = dtype_name(x)
    if dtype not in dtypes or not (shape is None or shape == (len(x.shape) if isinstance(shape, int) else x.shape)):
        wanted = " or ".join(dtypes)
        if shape is not None:
            axes = "one axis" if shape == 1 else f"{shape} axes"
            wanted += f" of {axes if isinstance(shape, int) else f'shape {tuple(shape)}'}"
        raise BadArgumentError(f"{name} is {dtype} {tuple(x.shape)}; {wanted} is needed")
    if host and on_gpu(x):
        raise BadArgumentError(f"{name} is on a GPU; this runs on the CPU only, so move it there first")
    return x


def same_device(name: str, x: Array, other: str, y: Array) -> None:
    """Raise BadArgumentError unless x and y live on one device: the host, or one GPU."""
    first, second = device_of(x), device_of(y)
    if on_gpu(x) != on_gpu(y) or first != second:
        where = f" ({_place(first)} and {_place(second)})" if first != second else ""
        raise BadArgumentError(f"{name} and {other} live on different devices{where}; move one of them")


def _place(device: tuple[int, int]) -> str:
    kind, number = device
    return "CPU" if kind == 1 else f"GPU {number}" if kind == 2 else f"DLPack's device {kind}:{number}"


def check_table(name: str, table: Any, dtype: str, shape: int | tuple[int, ...]) -> None:
    """Raise BadArgumentError unless `table` is a NumPy array of this dtype and shape.

    The shape may be the number of axes alone.
    """
    fits = isinstance(table, np.ndarray) and table.dtype == dtype
    if not fits or (table.ndim if isinstance(shape, int) else table.shape) != shape:
        asked = shape if isinstance(shape, tuple) else f"with {shape} axes" if shape > 1 else "with one axis"
        raise BadArgumentError(f"{name} is {shown(table)}; a NumPy array of {dtype} {asked} is needed")


def check_ends(name: str, ends: Any, n: int) -> None:
    """Raise BadArgumentError unless `ends` are the ends of joined arrays with n entries in all."""
    check_table(name, ends, "int64", 1)
    if (not ends.size and n) or (ends.size and (int(ends[-1]) != n or int(np.diff(ends, prepend=0).min()) < 0)):
        raise BadArgumentError(f"{name} are not ascending up to {n}")


def integer(name: str, value: Any, low: float, high: float = math.inf) -> int:
    """Return `value` as an int if it is an integer of any library within [low, high].

    A bool is not an integer here. Raises BadArgumentError otherwise.
    """
    found = value if type(value) is int else _index(value)
    if found is None or not low <= found <= high:
        asked = f" in [{low}, {high}]" if high < math.inf else f" of at least {low}" if low > -math.inf else ""
        raise BadArgumentError(f"{name} is {shown(value if found is None else found)}; it must be an integer{asked}")
    return found


def _index(value: Any) -> int | None:
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):  # torch's have an index
        return None
    try:
        return int(operator.index(value))
    except (TypeError, ValueError, RuntimeError):
        return None


def number(name: str, value: Any, low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> float:
    """Return `value` as a float if it is a real number within the range.

    NumPy's numbers count, bools do not. Raises BadArgumentError otherwise.
    """
    if type(value) is float:  # the usual case; the abstract class takes microseconds
        found = value
    else:
        try:
            found = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
        except OverflowError:
            found = math.nan
    if not low <= found <= high or (open_low and found == low) or (open_high and found == high):
        left, right = "(" if open_low else "[", ")" if open_high else "]"
        raise BadArgumentError(f"{name} is {shown(value)}; it must be a number in {left}{low:g}, {high:g}{right}")
    return found


def flag(name: str, value: Any) -> bool:
    """Return `value` as a bool if it is one; raise BadArgumentError otherwise."""
    if not isinstance(value, bool | np.bool_):
        raise BadArgumentError(f"{name} is {shown(value)}; it must be True or False")
    return bool(value)


def choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Return `value` if it is one of the given strings; raise BadArgumentError otherwise."""
    if not isinstance(value, str) or value not in choices:
        raise BadArgumentError(f"{name} is {shown(value)}; it must be one of {', '.join(choices)}")
    return value


def or_none(name: str, value: Any, check: Callable[..., T], *limits: Any, **how: Any) -> T | None:
    """Return None for None, else the value that `check` returns.

    Raises BadArgumentError where `check` does.
    """
    try:
        return None if value is None else check(name, value, *limits, **how)
    except BadArgumentError as error:
        raise BadArgumentError(f"{error}, or None") from None


def check_field(of: Any, name: str, check: Callable[..., Any], *limits: Any, **how: Any) -> None:
    """Replace a field of a frozen dataclass by its checked and converted value.

    Equal configurations then hold equal Python objects, independent of the library of their numbers.

    Raises:
        BadArgumentError: the check does.
    """
    object.__setattr__(of, name, check(name, getattr(of, name), *limits, **how))


def sequence(name: str, items: Any) -> list[Any]:
    """Return `items` as a list; raise BadArgumentError if they are not a sequence."""
    try:
        return list(items)
    except (TypeError, RuntimeError, NotImplementedError):
        raise BadArgumentError(f"{name} is {shown(items)}; a sequence is needed") from None


def strings(name: str, values: Any) -> tuple[str, ...]:
    """Return `values` as a tuple if they are non-empty strings; else raise BadArgumentError."""
    if not isinstance(values, str):
        with suppress(TypeError):
            listed = tuple(values)
            if all(isinstance(v, str) and v for v in listed):
                return listed
    raise BadArgumentError(f"{name} is {shown(values)}; a sequence of strings is needed, () for none")


def function(name: str, value: Any) -> Callable[..., Any]:
    """Return `value` if it can be called; raise BadArgumentError otherwise."""
    if not callable(value):
        raise BadArgumentError(f"{name} is {shown(value)}; something to call is needed")
    called: Callable[..., Any] = value
    return called


def instance(name: str, value: Any, kind: type[T]) -> T:
    """Return `value` if it is an instance of `kind`; raise BadArgumentError otherwise."""
    if not isinstance(value, kind):
        raise BadArgumentError(f"{name} is {shown(value)}; a {kind.__name__} is needed")
    return value


def no_device(function: str, unknown: Mapping[str, Any]) -> None:
    """Refuse arguments that a function does not have; say how values come to a device."""
    if not unknown:
        return
    name = next(iter(unknown))
    device = "; arrays come back on the CPU: load_state_dict copies them to the model's device, or move them with .to()"
    hint = device if name in ("device", "map_location") else ""
    raise BadArgumentError(f"{function} has no argument {name!r}{hint}")


def shown(value: Any) -> str:
    """Describe a value for an error message.

    Short scalars and strings as written, NumPy arrays by dtype and shape, other values by their type.
    """
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if value is None or (isinstance(value, Real | str | bytes | type) and len(repr(value)) < 100):
        return repr(value)
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def stored_bytes(x: Array | bytes | bytearray | memoryview, *, anywhere: bool = False) -> Array:
    """Return stored bytes as a uint8 array; bytes-like objects become NumPy without a copy."""
    if isinstance(x, bytes | bytearray | memoryview):
        return np.frombuffer(x, dtype=np.uint8)
    return array("data", x, ("uint8",), 1, host=not anywhere)


@contextmanager
def room_for(n: int) -> Iterator[None]:
    """Turn a MemoryError for an implausible number of elements n into a BadArgumentError.

    For a plausible n the MemoryError is raised unchanged.
    """
    try:
        yield
    except MemoryError:
        if n <= PLAUSIBLE:
            raise
        raise BadArgumentError(f"n is {n}; no machine has memory for so many elements") from None


def host_memory(out: Array, n: int, dtype: str) -> np.ndarray[Any, Any]:
    """Return `out` if it is a contiguous NumPy array of n elements that can be written to.

    Raises:
        BadArgumentError: it is not.
    """
    array("out", out, (dtype,), (n,))
    if not isinstance(out, np.ndarray) or not out.flags.c_contiguous or not out.flags.writeable:
        raise BadArgumentError("out must be a contiguous NumPy array that can be written to")
    return out
