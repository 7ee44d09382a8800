"""Protected values: as bfloat16, or exactly in their own dtype if bfloat16 cannot hold them.

A value is held when its rounding to bfloat16 (to nearest, ties to even; float64 by way of float32), taken back to its
own dtype, is finite and is zero only if the value is.
"""

from __future__ import annotations

import itertools

import numpy as np

from ...kernels.backend.arrays import is_torch
from ...kernels.planes import difference, merge_planes, split_planes, undifference
from .. import entropy
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from ..state.casting import bfloat16_patterns, float_values, from_bfloat16
from ..state.leaves import Array, LeafSpec, NpArray, as_bytes


def _round(data: NpArray, spec: LeafSpec) -> tuple[NpArray, NpArray]:
    """Return bfloat16 patterns of values, and whether bfloat16 can represent each value."""
    values = float_values(data, spec)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        nearest = bfloat16_patterns(values.astype(np.float32))
    found = np.where(np.isfinite(values), nearest, 0).astype(np.uint16)
    back = float_values(from_bfloat16(found, spec), spec)
    fits = np.isfinite(values) & np.isfinite(back) & ((back != 0) | (values == 0))
    return np.where(fits, found, np.uint16(0)).astype(np.uint16), fits


def held_values(values: Array, spec: LeafSpec) -> NpArray:
    """Return protected values as restored, as bytes: rounded to bfloat16 if it holds them."""
    data = as_bytes(values) if is_torch(values) else np.ascontiguousarray(values).view(np.uint8)
    found, fits = _round(data, spec)
    back = from_bfloat16(found, spec).reshape(-1, spec.itemsize)
    own = data.reshape(-1, spec.itemsize)
    return np.where(fits[:, None], back, own).reshape(-1)


def held_patterns(restored: NpArray, spec: LeafSpec) -> tuple[NpArray, NpArray]:
    """Return bfloat16 patterns of the result of `held_values`, and positions of exact values."""
    found, fits = _round(restored, spec)
    return found, np.flatnonzero(~fits)


def write_protected(out: Writer, protected: NpArray, predicted: NpArray, spec: LeafSpec) -> None:
    """Write protected values as bfloat16 differences to a prediction.

    Values that bfloat16 cannot hold follow exactly, with their positions.

    Args:
        out: receives the bytes.
        protected: bytes of n values, as `held_values` returned them.
        predicted: uint16 [n], bfloat16 patterns.
        spec: of the array, or of arrays of one dtype.
    """
    patterns, odd = held_patterns(protected, spec)
    out.varint(patterns.size)
    for plane in split_planes(difference(patterns, predicted, dtype="bfloat16")):
        out.block(entropy.encode(np.ascontiguousarray(plane)))
    out.varint(odd.size)
    for step in np.diff(odd, prepend=0):
        out.varint(int(step))
    out.raw(protected.reshape(-1, spec.itemsize)[odd])


def read_protected(data: Reader, predicted: NpArray, spec: LeafSpec) -> NpArray:
    """Return the bytes of the protected values that `write_protected` wrote.

    Args:
        data: the bytes, from the position where `write_protected` began.
        predicted: uint16 [n], the same patterns; n is the number of protected elements.
        spec: as in `write_protected`.

    Raises:
        CorruptDataError: the bytes are malformed, or hold another number of values.
    """
    count = data.varint()
    if count != predicted.size:
        raise CorruptDataError(f"levels: {count} protected values do not fit the levels")
    planes = np.empty((2, count), np.uint8)
    for plane in planes:
        plane[:] = entropy.decode(data.block(), count)
    steps = merge_planes(planes, dtype="uint16")
    protected = from_bfloat16(undifference(steps, predicted, dtype="bfloat16"), spec)
    odd = data.varint()
    if odd > count:
        raise CorruptDataError("levels: more values beyond bfloat16 than protected ones")
    at = np.fromiter(itertools.accumulate(min(data.varint(), count) for _ in range(odd)), np.int64, odd)
    if odd and int(at[-1]) >= count:
        raise CorruptDataError("levels: a position is out of range")
    exact = data.array("u1", odd * spec.itemsize).reshape(odd, spec.itemsize)
    protected.reshape(count, spec.itemsize)[at] = exact
    return protected
