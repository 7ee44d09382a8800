"""Exact copies within a state: half-precision copies of master weights, and clones.

Such an array is stored as the number of the other, its original: reading it is a cast. Where the original is stored
with loss the copy becomes the cast of the restored values, so the two belong together as before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels.backend.arrays import is_torch, numbers, on_gpu, to_cpu
from .base import CHUNK, Codec, Leaf, Stored
from .errors import CorruptDataError
from .groups import Coded
from .lossless.exact import Exact
from .moments.logbuckets import LogBuckets, ValuesReference
from .state.casting import largest, scaled_distortion, unit
from .state.leaves import Array, LeafSpec, NpArray, as_bytes

_HALVES = {"float32": ("float32", "bfloat16", "float16"), "float64": ("float64", "float32", "bfloat16", "float16")}
_GLANCE = 64
_LEAST = 4096
"""Bytes below which copies of an array are not searched."""


def copies(leaves: Sequence[Leaf], codecs: Sequence[Codec]) -> dict[int, int]:
    """Return the number of the original for each array that is a copy.

    Of equal arrays the first is the original; of casts the wider one. An array is stored as a copy only if its own
    codec would not keep more: the original is stored exactly, or both have the same codec, and are of one layer type
    and role where the codec depends on that.
    """
    able = [
        i
        for i, leaf in enumerate(leaves)
        if leaf.spec.nbytes >= _LEAST and leaf.kind.role in ("weight", "state") and _castable(leaf.spec)
    ]
    firsts = dict(zip(able, _firsts([leaves[i] for i in able]), strict=True))
    found: dict[int, int] = {}
    # By their first elements in every dtype they may be cast to; arrays with equal ones are compared completely.
    originals: dict[tuple[Any, ...], list[int]] = {}
    # The widest first, then in the order of the state.
    for i in sorted(able, key=lambda i: (-leaves[i].spec.itemsize, i)):
        for j in originals.get(_glance(leaves[i], firsts[i], leaves[i].spec.dtype), []):
            same = _treatment(leaves[i], codecs[i]) == _treatment(leaves[j], codecs[j])
            if (same or isinstance(codecs[j], Exact)) and _is_cast(leaves[i], leaves[j]):
                found[i] = j
                break
        else:
            for dtype in _casts(leaves[i].spec):
                originals.setdefault(_glance(leaves[i], firsts[i], dtype), []).append(i)
    return found


def _treatment(leaf: Leaf, codec: Codec) -> tuple[Any, ...]:
    """Return the codec of an array, and layer type and role where it depends on them (`Codec`)."""
    return (codec, leaf.kind.layer, leaf.kind.role) if getattr(codec, "by_kind", True) else (codec,)


def _casts(spec: LeafSpec) -> tuple[str, ...]:
    """Return the dtypes that a copy of an array may have; NumPy has no bfloat16."""
    casts = _HALVES.get(spec.dtype, (spec.dtype,))
    return casts if spec.library == "torch" else tuple(dtype for dtype in casts if dtype != "bfloat16")


def _firsts(leaves: Sequence[Leaf]) -> list[Array]:
    """Return the first elements of each array on the host; one transfer per GPU and dtype."""
    found = [leaf.flat[:_GLANCE] for leaf in leaves]
    groups: dict[tuple[Any, Any], list[int]] = {}
    for i, first in enumerate(found):
        if on_gpu(first):
            groups.setdefault((first.device, first.dtype), []).append(i)
    for group in groups.values():
        import torch

        parts = [found[i] for i in group]
        together = torch.split(to_cpu(torch.cat(parts)), [p.numel() for p in parts])
        for i, part in zip(group, together, strict=True):
            found[i] = part
    return found


def _glance(leaf: Leaf, first: Array, dtype: str) -> tuple[Any, ...]:
    """Return a key shared by an array and its copies in `dtype`: library, shape, first elements."""
    spec = LeafSpec(leaf.spec.library, dtype, leaf.spec.shape)
    device = str(leaf.flat.device) if is_torch(leaf.flat) else ""
    return (spec, device, as_bytes(cast(first, spec)).tobytes())


def _castable(spec: LeafSpec) -> bool:
    halves = ("bfloat16", "float16") if spec.library == "torch" else ("float16",)
    return spec.library in ("torch", "numpy") and (spec.dtype in _HALVES or spec.dtype in halves)


def _is_cast(copy: Leaf, original: Leaf) -> bool:
    for at in range(0, copy.spec.size, CHUNK):
        part = slice(at, at + CHUNK)
        if not _same_bits(copy.flat[part], cast(original.flat[part], copy.spec)):
            return False
    return True


def _same_bits(x: Array, y: Array) -> bool:
    if on_gpu(x):
        import torch

        width = x.element_size()
        return torch.equal(numbers(x, width, "int"), numbers(y, width, "int"))
    return np.array_equal(as_bytes(x), as_bytes(y))


def cast(flat: Array, spec: LeafSpec) -> Array:
    """Convert values to the dtype of `spec`, rounded to nearest, ties to even."""
    if is_torch(flat):
        import torch

        return flat.to(getattr(torch, spec.dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        narrow: NpArray = flat.astype(spec.dtype)
    return narrow


def store_copy(copy: Leaf, original: Leaf, number: int, decoded: Array | None) -> Stored:
    """Return the record of a copy of array `number`, with its measured error.

    Args:
        copy: the copy.
        original: its original.
        number: of the original.
        decoded: the original as it will be restored; None if that is bit-exact.
    """
    note = f"a copy of {original.path}"
    if decoded is None:
        return Stored("copy", {}, [], None, note=note, pair=number)
    restored = cast(decoded, copy.spec)
    if is_torch(copy.flat):
        restored = restored.to(copy.flat.device)
    scale = unit(largest(copy.flat)) if copy.spec.dtype == "float64" else 1.0
    met = scaled_distortion(copy.flat, restored, scale)
    return Stored("copy", {}, [], None, met.relative_l2, "relative L2", note, number)


def keeps_promise(stored: Stored, copy: Leaf, original: Leaf, codec: Codec) -> bool:
    """Return whether a copy is within the error bound of its codec, rounding included."""
    if stored.measure == "exact":
        return True
    target = getattr(codec, "max_error", None)
    if target is None and not isinstance(codec, LogBuckets):
        return stored.error < math.inf
    return copy.spec.dtype == original.spec.dtype if target is None else stored.error <= target


def decode_copy(coded: Coded) -> list[ValuesReference]:
    """Decode the stream format "copy"."""
    spec, pair = coded.spec, coded.pair
    if pair is None or coded.pieces or not _castable(spec):
        raise CorruptDataError(f"copy: {spec.dtype} cannot be a copy, or its original is missing")
    flat = cast(pair, spec)
    # A cast to its own dtype is the tensor itself, and two arrays of a state must not become one.
    flat = flat.clone() if flat is pair else flat
    if int(flat.shape[0]) != spec.size:
        raise CorruptDataError("copy: its original is of another size")
    return [ValuesReference(flat)]
