"""Places of the parts of a training run in its tree: `ema`, `more/teacher`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Place: TypeAlias = tuple[str, ...]
MORE = "more"
"""Key of the parts that users name."""


def label(place: Place) -> str:
    """Return the argument that a place belongs to.

    Example:
        >>> label(("ema",)), label(("more", "teacher"))
        ('ema', "more['teacher']")
    """
    return place[0] if len(place) == 1 else f"{place[0]}[{place[1]!r}]"


def put(state: dict[str, Any], place: Place, value: Any) -> None:
    """Store a value at its place, below levels that exist."""
    for name in place[:-1]:
        state = state[name]
    state[place[-1]] = value


def at(state: Mapping[str, Any], place: Place) -> Any:
    """Return the value at a place."""
    for name in place:
        state = state[name]
    return state


def has(state: Mapping[str, Any], place: Place) -> bool:
    """Return whether there is a value at a place."""
    for name in place:
        if not isinstance(state, Mapping) or name not in state:
            return False
        state = state[name]
    return True
