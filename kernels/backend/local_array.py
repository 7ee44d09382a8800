"""Small arrays of a fixed size on the stack of a compiled function."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.core import cgutils, config
from numba.extending import intrinsic
from numba.np import arrayobj

ALIGNMENT = 64
"""Bytes: of a line of the cache, and of any view of another dtype."""


def _local_array(typing: Any, count: Any, kind: Any) -> Any:
    """Generate the allocation of `count` elements, a literal number, and an array over them."""
    if not isinstance(count, numba.types.IntegerLiteral):
        return None
    result: Any = numba.types.Array(kind.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        element = context.get_data_type(kind.dtype)
        data = cgutils.alloca_once(builder, element, size=count.literal_value)  # type: ignore[no-untyped-call]
        data.align = ALIGNMENT
        size, width = (context.get_constant(numba.types.intp, n) for n in (count.literal_value, element_size(context)))
        array = context.make_array(result)(context, builder)
        arrayobj.populate_array(array, data=data, shape=[size], strides=[width], itemsize=width, meminfo=None)  # type: ignore[no-untyped-call]
        return array._getvalue()

    def element_size(context: Any) -> int:
        return int(context.get_abi_sizeof(context.get_data_type(kind.dtype)))

    return result(count, kind), generate


def _heap_array(count: int, kind: Any) -> np.ndarray[Any, Any]:
    """Return an array on the heap: uncompiled code has no other."""
    return np.empty(count, kind)


local_array: Any = _heap_array if config.DISABLE_JIT else intrinsic(prefer_literal=True)(_local_array)  # type: ignore[attr-defined]
"""`local_array(count, kind)`, in a compiled function: count elements of a dtype, not set; freed when it returns."""
