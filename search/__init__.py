"""The search for the smallest configuration that keeps the quality asked for: `shrinkpoint.search(...)`.

The package is callable, so that `shrinkpoint.search` is the same thing whether or not one of its modules was imported.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

from .cube import Cube, Point
from .result import SearchResult, Trial
from .run import search

__all__ = ["Cube", "Point", "SearchResult", "Trial", "search"]


class _Callable(ModuleType):
    """A module that is called as its function `search`."""

    __signature__ = inspect.signature(search)

    def __call__(self, *args: Any, **kwargs: Any) -> SearchResult:
        return search(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
