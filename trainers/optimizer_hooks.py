"""Hooks of torch that end with their object's life, and nested optimizer steps."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.optim import Optimizer, optimizer


def weak(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that calls a method while its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else alive(*args)

    untraced: Callable[..., Any] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]

    def hook(*args: Any) -> Any:
        # Not `untraced` alone, which takes longer than most calls of a hook do.
        return untraced(*args) if torch.compiler.is_compiling() else call(*args)

    return hook


def remove(handles: Sequence[Any]) -> None:
    """Remove hooks by their handles."""
    for handle in handles:
        handle.remove()


class Nesting:
    """Detection of optimizer steps that run within another step.

    A wrapper's step (`ZeroRedundancyOptimizer`, or a subclass that calls `super().step()`) calls the step of the inner
    optimizer, and torch's hooks see both. The hooks call `enter` before and `leave` after each step; a step that raises
    does not call `leave`, and the next `enter` removes it. Only numbers of a step are kept, so that its optimizer and
    weights can be freed.
    """

    def __init__(self) -> None:
        self._under_way: dict[int, list[tuple[int, frozenset[int]]]] = {}
        """By thread, the outermost first: the ids of the frame and of the parameters of each step."""

    def enter(self, parameters: Sequence[Any], ids: frozenset[int]) -> Sequence[Any]:
        """Enter a step; return its parameters that no step around it covers."""
        # The frame of torch's function around `step` exists until the step ends, also by an error.
        step: FrameType | None = sys._getframe()
        while step is not None and step.f_code.co_filename != optimizer.__file__:
            step = step.f_back
        mine = self._under_way.setdefault(threading.get_ident(), [])
        if mine:
            # Only of frames of that function: another one may have come to the place in memory of a step that is over.
            around = set()
            frame = None if step is None else step.f_back
            while step is not None and frame is not None:
                if frame.f_code is step.f_code:
                    around.add(id(frame))
                frame = frame.f_back
            mine[:] = [one for one in mine if one[0] in around]
        found = self._outermost(parameters)
        mine.append((0 if step is None else id(step), ids))
        return found

    def leave(self, parameters: Sequence[Any]) -> Sequence[Any]:
        """End the last step entered over these parameters; return the same as `enter`."""
        mine = self._under_way.get(threading.get_ident())
        if mine:
            mine.pop()
        if not mine:
            self._under_way.pop(threading.get_ident(), None)
        return self._outermost(parameters)

    def clear(self) -> None:
        """Forget all steps that are in progress."""
        self._under_way.clear()

    def _outermost(self, parameters: Sequence[Any]) -> Sequence[Any]:
        covered = {p for _, those in self._under_way.get(threading.get_ident(), ()) for p in those}
        return [p for p in parameters if id(p) not in covered] if covered else parameters


def closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return the closure that `step` was called with, or None."""
    if not kwargs and len(args) == 1 and isinstance(args[0], Optimizer):
        return None
    found = [kwargs.get("closure"), *args]
    return next((one for one in found if callable(one) and not isinstance(one, Optimizer)), None)


def after_closure(
    args: Sequence[Any], kwargs: Mapping[str, Any], then: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `step` with a closure that calls `then` once."""
    closure = closure_of(args, kwargs)
    if closure is None:
        return tuple(args), dict(kwargs)
    first = True

    @functools.wraps(closure)
    def evaluate(*inner: Any, **named: Any) -> Any:
        nonlocal first
        value = closure(*inner, **named)
        if first:
            first = False
            then()
        return value

    new = [evaluate if one is closure else one for one in args]
    return tuple(new), {key: evaluate if one is closure else one for key, one in kwargs.items()}
