"""`sp.search` with its options among the keywords, for tests that vary any of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import shrinkpoint as sp
from shrinkpoint.codec.inputs import Inputs
from shrinkpoint.searching.cube import Point
from shrinkpoint.searching.search_state import SearchInputs, SearchState

OPTIONS = {field.name for field in dataclasses.fields(sp.SearchOptions)}


def search(*arguments: Any, **keywords: Any) -> sp.SearchResult:
    """Call `sp.search`; keywords that are fields of `SearchOptions` become its `options`."""
    options = {name: value for name, value in keywords.items() if name in OPTIONS}
    others = {name: value for name, value in keywords.items() if name not in OPTIONS}
    return sp.search(*arguments, **others, options=sp.SearchOptions(**options))


def search_state(state: Any, point: Point, prev: sp.Checkpoint | None = None, grads: Any = None) -> SearchState:
    """The flattened state of a search whose cube begins with `point`."""
    return SearchState.made(SearchInputs(state, grads, Inputs.of(state, prev, None, grads)), point)
