"""Compiled copy that bypasses the cache by non-temporal stores; see `host_copy`.

An ordinary store to a line that is not in the cache reads the line before it is written: a copy moves three bytes per
byte. A non-temporal store moves two. `memmove` uses them only for single arrays of many megabytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

from ...kernels.backend.jit import njit

LINE = 64
"""Bytes of a cache line, to which a target must be aligned."""
_VECTOR = 32


@intrinsic
def _move_line(context: Any, target: Any, source: Any) -> Any:
    """Move one cache line from any address to an aligned one, bypassing the cache."""

    def generate(machine: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(64), _VECTOR // 8)
        hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        to, at = arguments
        for offset in range(0, LINE, _VECTOR):
            shift = ir.Constant(ir.IntType(64), offset)
            value = builder.load(builder.inttoptr(builder.add(at, shift), vector.as_pointer()), align=1)
            place = builder.inttoptr(builder.add(to, shift), vector.as_pointer())
            builder.store(value, place, align=_VECTOR).set_metadata("nontemporal", hint)
        return machine.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


@intrinsic
def _move_byte(context: Any, target: Any, source: Any) -> Any:
    """Move one byte."""

    def generate(machine: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, at = (builder.inttoptr(a, ir.IntType(8).as_pointer()) for a in arguments)
        builder.store(builder.load(at), to)
        return machine.get_dummy_value()

    return types.void(types.uint64, types.uint64), generate


@intrinsic
def _fence(context: Any) -> Any:
    """Complete the non-temporal stores before all later memory accesses."""

    def generate(machine: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return machine.get_dummy_value()

    return types.void(), generate


@njit
def stream(targets: npt.NDArray[np.uint64], sources: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]) -> None:
    """Copy pieces of memory.

    Args:
        targets: addresses, uint64, multiples of `LINE`.
        sources: addresses, uint64; nothing overlaps.
        sizes: bytes of each, uint64.
    """
    for i in range(len(targets)):
        to, at = targets[i], sources[i]
        lines = sizes[i] // np.uint64(LINE)
        for k in range(lines):
            _move_line(to + np.uint64(LINE) * k, at + np.uint64(LINE) * k)  # type: ignore[call-arg]
        for k in range(lines * np.uint64(LINE), sizes[i]):
            _move_byte(to + k, at + k)  # type: ignore[call-arg]
    _fence()  # type: ignore[call-arg]
