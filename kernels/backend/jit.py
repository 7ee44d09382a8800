"""Numba settings and compilers shared by all CPU kernels.

Every compiled function of the CPU back end is decorated with `njit` from here: no fastmath and no contraction, so that
the three back ends agree to the bit; the GIL released; the result cached on disk (see `cache`). Numba's disk cache does
not notice a change in a callee in another module. A cached function may therefore only call functions of its own
module. The only exception is `instructions`, which is part of the cache key.

Numba gives every compiled function machine code of its own, including the small ones that only other compiled functions
call. Here a helper remains LLVM code until it is part of an entry point, and an entry point that creates no array is
not linked with Numba's memory management (`docs/decisions/first-call.md`).

Long compilations are logged, so that a first call does not seem to hang.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any, TypeVar, cast

import numba
from llvmlite.binding import Linkage  # type: ignore[import-untyped]
from numba.core import event, types
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, Flags
from numba.core.registry import CPUDispatcher
from numba.core.runtime.nrt import rtsys
from numba.core.targetconfig import ConfigStack

from . import cache

_NUMBERS = (types.Number, types.Boolean, types.RangeType, types.RangeIteratorType)
_PLAIN = (*_NUMBERS, types.Array, types.SliceType, types.Tuple, types.UniTuple)
"""Types of arguments for which the same call always has the same signature."""
_OWN = (types.Function, types.NumberClass, BuiltinFunctionType, str)
"""Types of Numba's own functions: of operators, conversions and iterators."""
_signatures: dict[tuple[Any, tuple[types.Type, ...], bool], Any] = {}
"""Signature of each call of these functions with these types, with or without memory management."""


class EntryLibrary(JITCodeLibrary):
    """Code of a function that Python calls."""

    def _optimize_final_module(self) -> None:
        """Make linked functions internal, so that inlining can remove them, and optimize."""
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == Linkage.linkonce_odr:
                function.linkage = Linkage.internal
        super()._optimize_final_module()  # type: ignore[no-untyped-call]

    def add_linking_library(self, library: Any) -> None:
        """Link a library, except Numba's memory management into a function that creates no array."""
        if library is not rtsys.library or ConfigStack.top_or_none().nrt:  # type: ignore[no-untyped-call]
            super().add_linking_library(library)  # type: ignore[no-untyped-call]


class HelperLibrary(EntryLibrary):
    """Code of a function that only compiled functions call and that is linked into them."""

    def _optimize_functions(self, ll_module: Any) -> None:
        """Leave functions unchanged until they are linked into a caller."""
        ll_module.data_layout = self._codegen._data_layout

    def finalize(self) -> None:
        """Link only the functions that this one calls."""
        self._raise_if_finalized()  # type: ignore[no-untyped-call]
        for library in dict.fromkeys(self._linking_libraries):
            getattr(self, "_reload_init", set()).update(getattr(library, "_reload_init", ()))
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalize_dynamic_globals()  # type: ignore[no-untyped-call]
        self._finalized = True

    @property
    def codegen(self) -> Any:
        """Code generator that does not write the environment of a callable function."""
        return _WithoutAddress(self._codegen)


class _WithoutAddress:
    """Code generator of a helper function, which Python cannot call by an address."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, name: str, environment: Any) -> None:
        """Do nothing: exceptions use the environment of the calling function."""


class RememberedCalls:
    """A typing context that keeps the signatures of Numba's own functions.

    For each call, as of `+`, Numba tries all implementations that it knows, again for each place in the source: a
    quarter of the time that compiling takes.

    Args:
        context: the typing context of the compiler.
        nrt: whether code is compiled with memory management; implementations differ.
    """

    def __init__(self, context: Any, nrt: bool) -> None:
        self._context, self._nrt = context, nrt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def resolve_function_type(self, func: Any, args: tuple[types.Type, ...], kws: Any) -> Any:
        """Return the signature of a call; None without one."""
        if kws or not isinstance(func, _OWN) or not all(isinstance(a, _PLAIN) for a in args):
            return self._context.resolve_function_type(func, args, kws)
        key = func, tuple(args), self._nrt
        found = _signatures.get(key)
        if found is None:
            found = _signatures[key] = self._context.resolve_function_type(func, args, kws)
        return found


class KeptFlags(Flags):
    """Flags of the compiler that collect their values once.

    Numba looks signatures up by flags, and collects all values of both for each comparison and each hash.
    """

    __slots__ = ("_known",)
    _known: dict[str, Any] | None

    def __init__(self, flags: Flags) -> None:
        super().__init__(flags)  # type: ignore[no-untyped-call]
        self._known = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name != "_known":
            self._known = None

    def values(self) -> dict[str, Any]:
        """Return the value of each flag."""
        if self._known is None:
            self._known = super().values()  # type: ignore[no-untyped-call]
        return self._known

    def __hash__(self) -> int:
        return hash(KeptFlags)

    def __eq__(self, other: object) -> bool:
        return self.values() == other.values() if isinstance(other, Flags) else NotImplemented  # type: ignore[no-untyped-call]


class EntryCompiler(Compiler):
    """Compiler of functions that Python calls."""

    library_class: type[JITCodeLibrary] = EntryLibrary

    def compile_extra(self, func: Any) -> Any:
        """Compile a function into a library of this compiler's class."""
        if self.state.library is None:
            library: Any = self.library_class(self.state.targetctx.codegen(), func.__qualname__)
            library.enable_object_caching()
            self.state.library = library
        self.state.flags = KeptFlags(self.state.flags)
        self.state.typingctx = RememberedCalls(self.state.typingctx, self.state.flags.nrt)
        return super().compile_extra(func)  # type: ignore[no-untyped-call]


class HelperCompiler(EntryCompiler):
    """Compiler of functions that only compiled functions call."""

    library_class = HelperLibrary


class Helper(CPUDispatcher):
    """A function that only compiled functions call."""

    def __call__(self, *arguments: Any) -> Any:
        """Run uncompiled: Python can call no machine code of a helper."""
        return self.py_func(*arguments)


LOG = logging.getLogger("shrinkpoint")
PATIENCE = 2.0
"""Total seconds of compilation after which the message is logged."""
PERIOD = 10.0
"""Seconds of compilation between two messages."""


class CompileNotice(event.Listener):
    """Log how many kernels are compiled, after `PATIENCE` and then every `PERIOD` seconds.

    Kernels that are read from the disk cache take no such time, and neither does time between two compilations.
    """

    def __init__(self) -> None:
        self._depth, self._spent, self._begin = 0, 0.0, 0.0
        self._timer: threading.Timer | None = None
        self._next: float | None = None

    def on_start(self, event: Any) -> None:
        """Note the begin of a compilation, which may be nested in another one."""
        self._depth += 1
        if self._depth == 1:
            self._begin = time.monotonic()
            if self._next is None:
                self._timer = threading.Timer(max(PATIENCE - self._spent, 0.0), self._log)
                self._timer.daemon = True
                self._timer.start()

    def on_end(self, event: Any) -> None:
        """Note the end of a compilation."""
        self._depth -= 1
        if self._depth == 0:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._spent += time.monotonic() - self._begin
            if self._next is not None and self._spent >= self._next:
                self._log()

    def _log(self) -> None:
        first = self._next is None
        self._next = (self._next or PATIENCE) + PERIOD
        done = len(cache.loaded | cache.stored)
        advice = "; `shrinkpoint warm` does it ahead of time" if first and not cache.is_warmed() else ""
        LOG.warning(
            f"Compiling kernels, once per machine (up to 40 s): {done} of up to {max(done, cache.KERNELS)}{advice}"
        )

    def restart(self) -> None:
        """Reset the state in a forked process, which has no timer thread."""
        self._depth, self._timer = 0, None


_notice = CompileNotice()
event.register("numba:compile", _notice)  # type: ignore[no-untyped-call]
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_notice.restart)


F = TypeVar("F", bound="Callable[..., object]")
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
            dispatcher._cache = cache.Kept(dispatcher.py_func)
        except (RuntimeError, OSError) as error:
            cache.warn_uncached(str(error))
    return dispatcher
