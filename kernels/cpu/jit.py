"""Numba defaults, in one place.

Every compiled function of the CPU back end is decorated with `njit` from here: no fastmath and no contraction
(the three back ends agree to the bit), the GIL released, the result cached on disk. Because Numba's disk cache
does not notice a change in a callee that lives in another module, a cached function may only call functions of
its own module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

import numba

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., object]")


def njit(function: F) -> F:
    """Compile `function` in nopython mode: cached, without the GIL, IEEE arithmetic in the written order."""
    return cast("F", numba.njit(cache=True, nogil=True, fastmath=False, error_model="numpy")(function))


def njit_inline(function: F) -> F:
    """Like `njit`, for a small helper that is called in inner loops of the same module."""
    return cast("F", numba.njit(cache=True, nogil=True, fastmath=False, error_model="numpy", inline="never")(function))
