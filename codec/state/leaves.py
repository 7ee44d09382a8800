"""Array leaves: their specification, conversion to flat values, and restored arrays.

Inside the codec an array is flat and contiguous, and either a NumPy array or a torch tensor. CUDA tensors stay on their
device until only a small result must be copied. Arrays of JAX and other libraries are read as NumPy and returned
through their own namespace.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...kernels.backend.arrays import DEVICES, imported, is_allocated, is_torch, on_gpu, to_cpu
from ..errors import CorruptDataError, UnsupportedLeafError
from ..memory_limit import NEVER_TOO_LARGE, total_memory

if TYPE_CHECKING:
    from .tree import ArrayNode

Array = Any
NpArray = np.ndarray[Any, Any]

# Libraries a file may name: nothing else is ever imported because a file says so.
LIBRARIES = {
    "torch": "torch",
    "numpy": "numpy",
    "numpy scalar": "numpy",
    "list": "numpy",
    "tuple": "numpy",
    "jax": "jax.numpy",
    "cupy": "cupy",
    "array_api_strict": "array_api_strict",
}
SEQUENCES = ("list", "tuple")
"""Libraries of Python's lists and tuples of numbers."""
SCALARS = ("numpy scalar", *SEQUENCES)
"""Libraries whose values are read and built as NumPy and are not arrays of the caller."""
LONG = 64
"""Length from which a list or tuple of numbers is stored like an array; a shorter one costs less in the tree."""
_NUMBERS = {bool: ("bool",), int: ("int64", "uint64"), float: ("float64",)}
"""dtypes that hold a list or tuple of numbers, by the type of all its items."""
_OBJECT = 40
"""Bytes that an item of a list takes, at most: a pointer and a Python number."""
_MAX_ELEMENTS = 1 << 48
_MAX_ITEM = 1 << 14
_UNKNOWN_MEMORY = 1 << 46
"""Bytes that a system may have which does not say how many it has."""


_COMPUTED = ("size", "itemsize", "nbytes", "columns")


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """Library, dtype, shape and order in memory of an array.

    `dtype` is the library's name of it (`bfloat16`), or NumPy's typestring where the name would lose something (`>f4`).
    """

    library: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] = field(default=(), compare=False, repr=False)
    """Its dimensions from the outermost in memory to the innermost (`memory_order`); a delta may change it."""
    size: int = field(init=False, repr=False, compare=False)
    """Number of elements; computed once, because every step asks for it, as for `itemsize` and `nbytes`."""
    itemsize: int = field(init=False, repr=False, compare=False)
    """Bytes an element."""
    nbytes: int = field(init=False, repr=False, compare=False)
    """Bytes of all elements."""
    columns: int = field(init=False, repr=False, compare=False)
    """Length of the rows of a matrix, with all further axes joined to the second; 0 for a vector, and for one row."""

    def __post_init__(self) -> None:
        size, itemsize = math.prod(self.shape), _item_size(self.library, self.dtype)
        columns = math.prod(self.shape[1:]) if len(self.shape) > 1 and self.shape[0] > 1 else 0
        for name, value in zip(_COMPUTED, (size, itemsize, size * itemsize, columns), strict=True):
            object.__setattr__(self, name, value)

    @property
    def memory(self) -> int:
        """Bytes that the restored values take, at most."""
        return self.nbytes + (self.size * _OBJECT if self.library in SEQUENCES else 0)


def import_libraries(specs: Iterable[LeafSpec]) -> None:
    """Import what these arrays need, before threads would import it, each at the same time."""
    for name in {LIBRARIES[spec.library] for spec in specs}:
        with contextlib.suppress(ImportError):  # reported for the array that needs it
            importlib.import_module(name)


def is_array(value: Any) -> bool:
    """Return whether a value is an array: torch, NumPy (including scalars) or array-API."""
    return isinstance(value, (np.ndarray, np.generic)) or is_torch(value) or hasattr(value, "__array_namespace__")


def is_stored_as_array(value: Any) -> bool:
    """Return whether a value is an array, or a long list or tuple of numbers of one type."""
    kind = type(value)
    if kind in _PLAIN:
        return False
    return _numbers_dtype(value) is not None if kind is list or kind is tuple else is_array(value)


_PLAIN = frozenset({str, int, float, bool, type(None), dict})


def _numbers_dtype(values: list[Any] | tuple[Any, ...]) -> str | None:
    """Return the dtype that holds the numbers of a long list or tuple exactly, or None."""
    kind = type(values[0]) if len(values) >= LONG else None
    if kind not in _NUMBERS or set(map(type, values)) != {kind}:
        return None
    for name in _NUMBERS[kind]:
        if kind is not int or (np.iinfo(name).min <= min(values) and max(values) <= np.iinfo(name).max):
            return name
    return None


@functools.cache
def _torch() -> Any:
    return importlib.import_module("torch")


_NATIVE = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64|96|128)|complex(64|128|192|256)")
_EXTENSION = re.compile(r"bfloat16|b?complex32|float8_\w{1,20}|float[46]_\w{1,20}|u?int[1-7]")
_TYPESTRING = re.compile(r"[<>|=][biufcmMSU][1-9]\d{0,8}(\[\d{0,6}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?|[<>][mM]8")


def _numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype named in a file: numbers, fixed strings and dates only."""
    # A missing dtype does not mean a damaged file: a load must not fall back to an older step.
    try:
        if _NATIVE.fullmatch(name) or _TYPESTRING.fullmatch(name):
            return np.dtype(name)
    except (TypeError, ValueError):
        if _NATIVE.fullmatch(name):
            raise UnsupportedLeafError(f"header: NumPy has no dtype {name} on this machine") from None
    if _EXTENSION.fullmatch(name):
        try:
            extension: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
            return extension
        except ImportError as e:
            message = f"header: the dtype {name} needs the package ml_dtypes: {e}"
            raise UnsupportedLeafError(message) from None
        except AttributeError:
            raise UnsupportedLeafError(f"header: the ml_dtypes installed here has no dtype {name}") from None
    raise CorruptDataError(f"header: no dtype {name[:40]!r} here")


def _torch_dtype(name: str) -> Any:
    torch = _torch()
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype) and not name.startswith(("qint", "quint")):
        return dtype
    if _EXTENSION.fullmatch(name) and dtype is None:
        raise UnsupportedLeafError(f"header: torch {torch.__version__} has no dtype {name}")
    # A quantized tensor needs a quantizer, which no record has.
    raise CorruptDataError(f"header: torch has no plain dtype {name!r}")


_TORCH_ITEMSIZES = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64", "complex64"), 8),
}
"""Bytes per element of common dtypes of torch, so that reading a header does not import torch (1.3 s)."""


@functools.cache
def _item_size(library: str, dtype: str) -> int:
    if library == "torch" and dtype in _TORCH_ITEMSIZES:
        return _TORCH_ITEMSIZES[dtype]
    return int(_torch_dtype(dtype).itemsize if library == "torch" else _numpy_dtype(dtype).itemsize)


def memory_order(x: Array) -> tuple[int, ...]:
    """Return the dimensions of a permuted tensor or NumPy array, outermost in memory first.

    () for arrays in row-major order, and for those whose memory overlaps or has gaps: they are restored in that order.

    Example:
        >>> memory_order(np.zeros((2, 3)).T), memory_order(np.zeros((2, 3))), memory_order(np.zeros((3, 8))[:, ::2].T)
        ((1, 0), (), ())
    """
    if is_torch(x):
        return _order(x.shape, x.stride())
    return () if x.flags.c_contiguous else _order(x.shape, tuple(stride / x.itemsize for stride in x.strides))


@functools.lru_cache(1024)
def _order(shape: tuple[int, ...], strides: tuple[float, ...]) -> tuple[int, ...]:
    # Axes of length 1 count: by their strides torch decides whether a convolution is in channels_last.
    order = tuple(sorted(range(len(shape)), key=lambda i: (-strides[i], shape[i] == 1)))
    inside = [math.prod(shape[i] for i in order[at + 1 :]) for at in range(len(order))]
    is_permuted = 0 not in shape and order != tuple(range(len(shape)))
    return order if is_permuted and inside == [strides[i] for i in order] else ()


def _permuted(x: Array, order: Iterable[int]) -> Array:
    return x.permute(*order) if is_torch(x) else x.transpose(*order)


def read_leaf(value: Array, path: str, *, in_memory: bool = False) -> tuple[LeafSpec, Array]:
    """Return the spec of an array leaf and its values as a flat, contiguous array.

    Contiguous arrays are not copied. NumPy arrays of foreign byte order come as their bytes (uint8).

    Args:
        value: the array.
        path: for messages.
        in_memory: return the values of a permuted array in the order of its memory, not copied; else row by row.

    Raises:
        UnsupportedLeafError: object arrays, structured arrays, sparse, quantized, meta tensors, unknown subclasses.
    """
    if is_torch(value):
        return _read_torch(value, path, in_memory)
    if isinstance(value, np.generic):
        if isinstance(value, (bytes, str)):
            return _read_text(value, path)
        spec, flat = _read_numpy(np.asarray(value), path)
        return LeafSpec("numpy scalar", spec.dtype, ()), flat
    if isinstance(value, np.ndarray):
        return _read_numpy(value, path, in_memory)
    if isinstance(value, (list, tuple)) and (dtype := _numbers_dtype(value)) is not None:
        return LeafSpec(type(value).__name__, dtype, (len(value),)), np.array(value, dtype)
    try:
        library = value.__array_namespace__().__name__.split(".")[0]
    except (NotImplementedError, TypeError, AttributeError):
        raise UnsupportedLeafError(f"{path}: {type(value).__qualname__} is not an array with values") from None
    if library not in LIBRARIES:
        raise UnsupportedLeafError(f"{path}: arrays of {library} are not known; convert it to NumPy or torch")
    try:
        if library == "array_api_strict":
            host = np.from_dlpack(value)
        elif library == "cupy":
            host = value.get()
        else:
            host = np.asarray(value)
    except (RuntimeError, TypeError) as e:  # JAX: deleted or donated arrays, tracers
        why = str(e).partition("\n")[0]
        raise UnsupportedLeafError(f"{path}: the values of this {library} array cannot be read: {why}") from None
    spec, flat = _read_numpy(host, path)
    return LeafSpec(library, spec.dtype, spec.shape), flat


def _read_numpy(x: NpArray, path: str, in_memory: bool = False) -> tuple[LeafSpec, NpArray]:
    if type(x) is not np.ndarray and not isinstance(x, np.memmap):
        raise UnsupportedLeafError(
            f"{path}: the ndarray subclass {type(x).__qualname__} cannot be rebuilt from its values"
        )
    dtype = x.dtype
    if not 0 < dtype.itemsize <= _MAX_ITEM:
        raise UnsupportedLeafError(f"{path}: items of {dtype.itemsize} bytes; 1 to {_MAX_ITEM} can be stored")
    if (
        dtype.hasobject
        or dtype.names is not None
        or (dtype.kind == "V" and dtype.str.startswith("|V") and dtype.name[0:4] == "void")
    ):
        raise UnsupportedLeafError(f"{path}: NumPy dtype {dtype} cannot be stored without pickle")
    extension = dtype.kind == "V" or dtype.type.__module__ == "ml_dtypes"
    if extension and not dtype.isnative:
        raise UnsupportedLeafError(
            f"{path}: {dtype.name} in foreign byte order cannot be stored; give it in the machine's, "
            'x.astype(x.dtype.newbyteorder("="))'
        )
    plain = dtype.kind in "biufc" and dtype.isnative
    name = dtype.name if extension or plain else dtype.str
    order = memory_order(x)
    flat = _flat(x.transpose(order) if order and in_memory else x)
    if not extension and not plain:
        flat = flat.view(np.uint8)
    return LeafSpec("numpy", name, tuple(x.shape), order), flat


def _read_text(value: bytes | str, path: str) -> tuple[LeafSpec, NpArray]:
    """Return a text scalar. As an array it would lose trailing NULs; empty text has no element."""
    dtype = np.dtype(f"{'S' if isinstance(value, bytes) else 'U'}{max(1, len(value))}")
    if dtype.itemsize > _MAX_ITEM:
        raise UnsupportedLeafError(f"{path}: items of {dtype.itemsize} bytes; 1 to {_MAX_ITEM} can be stored")
    data = bytes(value) if isinstance(value, bytes) else value.encode(f"utf-32-{sys.byteorder[0]}e", "surrogatepass")
    return LeafSpec("numpy scalar", dtype.str, () if data else (0,)), np.frombuffer(data, np.uint8)


@functools.cache
def _plain_tensors() -> tuple[type, ...]:
    nn = _torch().nn
    return (_torch().Tensor, nn.Parameter, nn.Buffer, nn.parameter.UninitializedParameter)


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def is_sharded(value: Any) -> bool:
    """Return whether a tensor is a DTensor, without importing torch.distributed."""
    distributed = imported("torch.distributed.tensor")
    return distributed is not None and isinstance(value, distributed.DTensor)


def local_part(value: Any) -> Any:
    """Return this process's part of a sharded tensor; return other values unchanged."""
    return value.to_local() if is_sharded(value) else value


def _read_torch(t: Any, path: str, in_memory: bool) -> tuple[LeafSpec, Any]:
    torch = _torch()
    if is_sharded(t):
        t = t.full_tensor()
    plain = _plain_tensors()
    if type(t) not in plain and not (isinstance(t, torch.nn.Parameter) and type(t.data) is torch.Tensor):
        raise UnsupportedLeafError(
            f"{path}: the tensor subclass {type(t).__qualname__} cannot be rebuilt from its values"
        )
    if type(t) is plain[3]:
        raise UnsupportedLeafError(f"{path}: an uninitialized parameter has no values")
    if t.is_nested or t.layout is not torch.strided or t.is_quantized or t.device.type == "meta":
        odd = (("nested", t.is_nested), ("quantized", t.is_quantized), ("meta", t.device.type == "meta"))
        what = next((name for name, is_so in odd if is_so), str(t.layout))
        raise UnsupportedLeafError(f"{path}: a {what} tensor has no plain values; convert it first")
    if torch._C._functorch.is_functorch_wrapped_tensor(t):
        raise UnsupportedLeafError(f"{path}: a tensor inside vmap or grad has no values of its own")
    if t._is_zerotensor():
        t = torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    name = _dtype_name(t.dtype)
    shape = tuple(t.shape)
    if not is_allocated(t):
        raise UnsupportedLeafError(f"{path}: the storage of this tensor was freed")
    t = t.detach().resolve_conj().resolve_neg()
    order = memory_order(t)
    flat = _flat(t.permute(order) if order and in_memory else t)
    if flat.device.type not in DEVICES:
        flat = flat.cpu()
    return LeafSpec("torch", name, shape, order), flat


def _flat(t: Array) -> Array:
    """Return the values of an array row by row, copied only if it is not contiguous."""
    if not is_torch(t):
        return np.ascontiguousarray(t).reshape(-1)
    if t.is_contiguous():
        flat = t.reshape(-1)
        # The slice of a row is contiguous for torch, but not for a view.
        return flat.as_strided((1,), (1,)) if flat.numel() == 1 and flat.stride(0) != 1 else flat
    # Copied as integers: torch cannot copy every dtype it has.
    integers = {n: getattr(_torch(), f"int{8 * n}") for n in (1, 2, 4, 8)}.get(t.element_size())
    plain = t if integers is None else t.view(integers)
    return plain.reshape(-1).contiguous().view(t.dtype)


def as_bytes(flat: Array) -> NpArray:
    """Return the bytes of a flat array on the host as uint8, without a copy if possible."""
    if is_torch(flat):
        torch = _torch()
        if flat.numel() == 0:
            return np.empty(0, np.uint8)
        flat = to_cpu(flat)
        data: NpArray = flat.view(torch.uint8).numpy() if flat.dtype != torch.uint8 else flat.numpy()
        return data
    return np.asarray(flat).view(np.uint8)


def bytes_of_each(arrays: Sequence[Array]) -> list[NpArray]:
    """Return the bytes of flat arrays of one device on the host, from a GPU in a single copy."""
    if len(arrays) < 2 or not on_gpu(arrays[0]):
        return [as_bytes(x) for x in arrays]
    torch = _torch()
    parts = [x.view(torch.uint8) for x in arrays]
    return list(np.split(as_bytes(torch.cat(parts)), np.cumsum([x.numel() for x in parts])[:-1]))


def on_host(x: Array) -> NpArray:
    """Return a torch tensor or NumPy array as NumPy."""
    host: NpArray = to_cpu(x).numpy() if is_torch(x) else x
    return host


def from_bytes(data: Array, spec: LeafSpec) -> Array:
    """Return a flat tensor or NumPy array that shares these bytes (uint8, `spec.nbytes`).

    Bytes on a GPU are a tensor.
    """
    if is_torch(data):
        return data.view(_torch_dtype(spec.dtype))
    if spec.library == "torch":
        # NumPy gives an empty array strides that torch does not view.
        tensor = _torch().from_numpy(data) if data.size else _torch().empty(0, dtype=_torch().uint8, device="cpu")
        return tensor.view(_torch_dtype(spec.dtype))
    return data.view(_numpy_dtype(spec.dtype))


def floats(data: Array, spec: LeafSpec) -> Array:
    """View bytes as values of a float dtype; on the host as NumPy's, except for bfloat16."""
    return from_bytes(data, spec) if spec.dtype == "bfloat16" or is_torch(data) else data.view(spec.dtype)


def on_meta(spec: LeafSpec) -> Array:
    """Return a tensor like the one that was stored, without memory."""
    return _torch().empty(spec.shape, dtype=_torch_dtype(spec.dtype), device="meta")


def build_leaf(flat: Array, spec: LeafSpec, *, in_memory: bool = False) -> Array:
    """Return an array with its original library, dtype, shape and order (torch on the CPU).

    Args:
        flat: its values.
        spec: of the array.
        in_memory: whether these are in the order of its memory, so that they are not copied; else row by row.
    """
    shaped = flat.reshape(spec.shape)
    if spec.order:
        flat = flat if in_memory else _flat(_permuted(shaped, spec.order))
        shaped = flat.reshape([spec.shape[i] for i in spec.order])
        shaped = _permuted(shaped, sorted(range(len(spec.order)), key=spec.order.__getitem__))
    if spec.library in ("torch", "numpy"):
        return shaped
    if spec.library == "numpy scalar":
        return _text(shaped) if shaped.dtype.kind in "SU" else shaped[()]
    if spec.library in SEQUENCES:
        return shaped.tolist() if spec.library == "list" else tuple(shaped.tolist())
    try:
        namespace = importlib.import_module(LIBRARIES[spec.library])
    except ImportError:
        raise UnsupportedLeafError(
            f"an array of {spec.library} was stored, and {spec.library} is not installed here"
        ) from None
    array = namespace.asarray(shaped)
    if str(array.dtype).rsplit(".", 1)[-1] != spec.dtype:
        raise UnsupportedLeafError(
            f"{spec.library} makes {array.dtype} of a stored {spec.dtype} (JAX: enable jax_enable_x64 to read it)"
        )
    return array


def _text(x: NpArray) -> np.bytes_ | np.str_:
    """Return the text scalar of an array; indexing would remove trailing NULs as padding."""
    if x.dtype.kind == "S":
        return np.bytes_(x.tobytes())
    order = "be" if x.dtype.str.startswith(">") else "le"
    try:
        return np.str_(x.tobytes().decode(f"utf-32-{order}", "surrogatepass"))
    except UnicodeDecodeError:
        raise CorruptDataError("a text holds an invalid character") from None


def spec_from_header(library: Any, dtype: Any, shape: Any, order: Sequence[int], path: str) -> LeafSpec:
    """Check and return the spec of an array from a file's header."""
    known = isinstance(library, str) and library in LIBRARIES
    if not known or not isinstance(dtype, str) or len(dtype) > 40 or not isinstance(shape, list):
        raise CorruptDataError(f"header: no array of {str(library)[:40]!r}, {str(dtype)[:40]!r}")
    if len(shape) > 64 or not all(type(n) is int and 0 <= n < _MAX_ELEMENTS for n in shape):
        raise CorruptDataError(f"header: {str(shape)[:60]} is not a shape")
    fits = len(order) == len(shape) and sorted(order) == list(range(len(shape)))
    if order != () and (library not in ("torch", "numpy") or not fits):
        raise CorruptDataError(f"header: {path}: {library} has no order {str(order)[:60]} of {len(shape)} dimensions")
    spec = LeafSpec(library, dtype, tuple(shape), tuple(order))
    is_empty_text = shape == [0] and dtype.lstrip("<>|=")[:1] in ("S", "U")
    if library == "numpy scalar" and shape and not is_empty_text:
        raise CorruptDataError(f"header: {path}: a {library} with the shape {str(shape)[:60]}")
    if library in SEQUENCES and (len(shape) != 1 or dtype not in ("bool", "int64", "uint64", "float64")):
        raise CorruptDataError(f"header: a {library} of {dtype[:40]!r} with the shape {str(shape)[:60]}")
    if library not in ("torch", "numpy", *SCALARS) and not (_NATIVE.fullmatch(dtype) or _EXTENSION.fullmatch(dtype)):
        raise CorruptDataError(f"header: {library} has no dtype {dtype[:40]!r}")
    # Libraries multiply the other axes even where one is zero.
    if math.prod(max(n, 1) for n in shape) >= _MAX_ELEMENTS or spec.itemsize > _MAX_ITEM:
        raise CorruptDataError(f"header: {str(shape)[:60]} of {dtype} is more than any array has")
    return spec


def check_memory(nbytes: int, what: str) -> None:
    """Raise CorruptDataError for more memory than this process may ever allocate."""
    if nbytes <= NEVER_TOO_LARGE:
        return
    limit = total_memory()
    if nbytes > (_UNKNOWN_MEMORY if limit is None else limit):
        raise CorruptDataError(f"{what}: needs {nbytes} bytes, this machine or container has {limit}")


def same_storage_key(value: Array) -> tuple[Any, ...] | None:
    """Return a key that is equal for leaves with the same memory and view; None if unknown."""
    if is_torch(value):
        torch = _torch()
        if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            # A wrapper (DTensor and the like) has no storage of its own to compare.
            return ("object", id(value))
        if value.is_nested or value.layout is not torch.strided or value.device.type == "meta" or value.numel() == 0:
            return None
        try:
            pointer = value.data_ptr()
        except RuntimeError:  # inside vmap or grad, or zeros without memory
            return None
        view = value.shape, value.stride(), value.dtype, value.is_neg(), value.is_conj()
        return "torch", pointer, value.device, *view
    if isinstance(value, np.ndarray) and value.size:
        return ("numpy", value.__array_interface__["data"][0], value.shape, value.strides, value.dtype.str)
    return None if isinstance(value, np.ndarray | np.generic) else ("object", id(value))


def tie(nodes: list[Any], found: list[ArrayNode]) -> tuple[list[Any], list[ArrayNode]]:
    """Return tree and arrays with each array once; nodes with one memory refer to one array."""
    first: dict[Any, int] = {}
    number: list[int] = []
    unique: list[ArrayNode] = []
    for node in found:
        key = same_storage_key(node.value)
        if key is not None and key in first:
            number.append(first[key])
            continue
        if key is not None:
            first[key] = len(unique)
        number.append(len(unique))
        unique.append(node)
    renumbered = [{"a": number[n["a"]]} if isinstance(n, dict) and "a" in n else n for n in nodes]
    return renumbered, unique
