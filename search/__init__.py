"""The search for the smallest configuration that keeps the quality asked for: `shrinkpoint.search(...)`.

The package is callable, so that `shrinkpoint.search` is the same thing whether or not one of its modules was imported.
"""

from __future__ import annotations

from ..kernels import make_callable
from .cube import Cube, Point
from .result import SearchResult, Trial
from .run import search

__all__ = ["Cube", "Point", "SearchResult", "Trial", "search"]

make_callable(__name__, search)
