"""The configuration search behind `shrinkpoint.search`.

The package is imported as `shrinkpoint.searching`, so that `shrinkpoint.search` can be the function.
"""

from __future__ import annotations

from .arguments import SearchOptions
from .cube import Cube, Point
from .result import SearchResult, Trial
from .run import search

__all__ = ["Cube", "Point", "SearchOptions", "SearchResult", "Trial", "search"]
