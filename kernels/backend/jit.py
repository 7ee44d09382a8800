"""Numba settings shared by all CPU kernels.

Every compiled function of the CPU back end is decorated with `njit` from here: no fastmath and no contraction, so that
the three back ends agree to the bit; the GIL released; the result cached on disk (see `cache`). Numba's disk cache does
not notice a change in a callee in another module. A cached function may therefore only call functions of its own
module. The only exceptions are `prefetch`, `local_array` and `lanes`, which are part of the cache key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

from . import compile_notice
from .cache import Kept, warn_uncached
from .compiler import EntryCompiler, Helper, HelperCompiler

F = TypeVar("F", bound="Callable[..., object]")
compile_notice.install()


_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy", "no_cfunc_wrapper": True}
_WITHOUT_ALLOCATION: dict[str, Any] = {**_OPTIONS, "_nrt": False}


def njit(function: F) -> F:
    """Compile a function in nopython mode: cached, without the GIL, with IEEE arithmetic.

    Operations keep the written order.
    """
    return cast("F", _cached(numba.njit(**_OPTIONS, pipeline_class=EntryCompiler)(function)))


def njit_in_place(function: F) -> F:
    """Compile as `njit` does a function that creates no arrays.

    It compiles in two thirds of the time, because it needs nothing of Numba's memory management.
    """
    return cast("F", _cached(numba.njit(**_WITHOUT_ALLOCATION, pipeline_class=EntryCompiler)(function)))


def njit_inline(function: F) -> F:
    """Compile as `njit_in_place` does a helper that only functions of its module call.

    It does not get its own machine code, in memory or in the cache. Called from Python, it runs uncompiled.
    """
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
        return function
    options = {**_WITHOUT_ALLOCATION, "nopython": True, "boundscheck": None, "no_cpython_wrapper": True}
    return cast("F", Helper(function, targetoptions=options, pipeline_class=HelperCompiler))


def _cached(dispatcher: Any) -> Any:
    """Return the dispatcher with caching on disk enabled, if a folder can be written."""
    if hasattr(dispatcher, "enable_caching"):  # with NUMBA_DISABLE_JIT it is the function itself
        try:
            dispatcher._cache = Kept(dispatcher.py_func)
        except (RuntimeError, OSError) as error:
            warn_uncached(str(error))
    return dispatcher
