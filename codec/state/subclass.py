"""Conversion of tensor subclasses (quantized weights, low-bit moments) to tensors and back.

A subclass that PyTorch can trace describes its own parts: `__tensor_flatten__` gives the names of its inner
tensors and a context, `__tensor_unflatten__` builds it from them. The inner tensors are stored exactly under all
rules: they are codes and scales, not weights. A file names the class but never imports it: only a class whose
module this process has imported already is used, and only if it is a tensor with that method.
"""

from __future__ import annotations

from typing import Any

from ...kernels.backend.arrays import is_torch
from ...kernels.backend.imported import imported
from ..errors import CorruptDataError, UnsupportedLeafError

CLASS, TENSORS, CONTEXT, SIZE, STRIDE = "class", "tensors", "context", "size", "stride"
PARTS = {CLASS, TENSORS, CONTEXT, SIZE, STRIDE}


class Wrapper(dict[str, Any]):
    """Parts of a tensor subclass: class, inner tensors by name, context, size and stride."""


def is_wrapper(value: Any) -> bool:
    """Return whether a value is a tensor subclass from outside PyTorch."""
    kind = type(value)
    return not kind.__module__.startswith("torch.") and is_torch(value) and hasattr(kind, "__tensor_flatten__")


def taken_apart(value: Any, path: str) -> Wrapper:
    """Return a tensor subclass as a tree of plain tensors and scalars.

    Raises:
        UnsupportedLeafError: its context holds what cannot be stored without pickle.
    """
    kind = type(value)
    names, context = value.__tensor_flatten__()
    return Wrapper(
        {
            CLASS: f"{kind.__module__}:{kind.__qualname__}",
            TENSORS: {name: getattr(value, name) for name in names},
            CONTEXT: _plain(context, path, kind),
            SIZE: list(value.shape),
            STRIDE: list(value.stride()),
        }
    )


def put_together(parts: Wrapper, path: str) -> Any:
    """Rebuild a tensor subclass from its `PARTS`.

    Raises:
        UnsupportedLeafError: its class is not imported here, or refuses the stored parts.
        CorruptDataError: the parts are not what `taken_apart` gives.
    """
    name = parts[CLASS]
    if not isinstance(name, str):
        raise CorruptDataError(f"{path}: a tensor subclass without a name")
    module, _, qualified = name.partition(":")
    kind: Any = imported(module)
    for step in qualified.split("."):
        kind = getattr(kind, step, None)
    import torch

    if not (isinstance(kind, type) and issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise UnsupportedLeafError(
            f"{path}: the tensor subclass {qualified} of {module} is not known here; import it before loading"
        )
    tensors, size, stride = parts[TENSORS], parts[SIZE], parts[STRIDE]
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise CorruptDataError(f"{path}: a tensor subclass without inner tensors")
    if not all(isinstance(s, list) and all(type(n) is int for n in s) for s in (size, stride)):
        raise CorruptDataError(f"{path}: a tensor subclass without size and stride")
    context = _from_plain(parts[CONTEXT], path)
    try:
        return kind.__tensor_unflatten__(tensors, context, torch.Size(size), tuple(stride))
    except Exception as error:
        # The class's own code may raise any error for parts that it did not make.
        raise UnsupportedLeafError(f"{path}: {qualified} cannot be built from its parts: {error}") from error


def _plain(value: Any, path: str, owner: type) -> Any:
    """Convert a context to lists, dicts and scalars; other values become a dict with their kind."""
    import torch

    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if type(value) is list:
        return [_plain(v, path, owner) for v in value]
    if type(value) in (tuple, torch.Size):
        return {"size" if type(value) is torch.Size else "tuple": [_plain(v, path, owner) for v in value]}
    if type(value) is dict:
        return {"dict": [[_plain(k, path, owner), _plain(v, path, owner)] for k, v in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise UnsupportedLeafError(
        f"{path}: the context of the tensor subclass {owner.__qualname__} holds a {type(value).__qualname__}, "
        "which cannot be stored without pickle"
    )


def _from_plain(value: Any, path: str) -> Any:
    import torch

    if type(value) is list:
        return [_from_plain(v, path) for v in value]
    if type(value) is not dict:
        return value
    tag: str
    body: Any
    tag, body = next(iter(value.items())) if len(value) == 1 else ("", None)
    try:
        if tag == "dict":
            return {_from_plain(k, path): _from_plain(v, path) for k, v in body}
        if tag in ("size", "tuple"):
            return (torch.Size if tag == "size" else tuple)([_from_plain(v, path) for v in body])
        if tag == "dtype" and isinstance(getattr(torch, body), torch.dtype):
            return getattr(torch, body)
        if tag == "device":
            return torch.device(body)
    except (TypeError, ValueError, AttributeError, RuntimeError, RecursionError):
        pass
    raise CorruptDataError(f"{path}: {str(value)[:60]} is not a valid part of a tensor subclass's context")
