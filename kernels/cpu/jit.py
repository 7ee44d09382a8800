"""Numba settings shared by all CPU kernels.

Every compiled function of the CPU back end is decorated with `njit` from here: no fastmath and no contraction, so that
the three back ends agree to the bit; the GIL released; the result cached on disk (see `cache`). Numba's disk cache does
not notice a change in a callee in another module. A cached function may therefore only call functions of its own
module. The only exception is `prefetch`, which is part of the cache key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import numba

from . import compile_notice
from .cache import Kept, warn_uncached

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., object]")
compile_notice.install()


def njit(function: F) -> F:
    """Compile a function in nopython mode: cached, without the GIL, with IEEE arithmetic.

    Operations keep the written order.
    """
    return cast("F", _cached(numba.njit(nogil=True, fastmath=False, error_model="numpy")(function)))


def njit_inline(function: F) -> F:
    """Like `njit`, for a small helper that is called in inner loops of the same module."""
    compiled = numba.njit(nogil=True, fastmath=False, error_model="numpy", inline="never")
    return cast("F", _cached(compiled(function)))


def _cached(dispatcher: Any) -> Any:
    """Return the dispatcher with caching on disk enabled, if a folder can be written."""
    if hasattr(dispatcher, "enable_caching"):  # with NUMBA_DISABLE_JIT it is the function itself
        try:
            dispatcher._cache = Kept(dispatcher.py_func)
        except (RuntimeError, OSError) as error:
            warn_uncached(str(error))
    return dispatcher
