"""Parts of a training run other than model and optimizer, by place: `ema`, `more/teacher`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from ..kernels.errors import BadArgumentError
from .state import Stateful, plain

Place: TypeAlias = tuple[str, ...]
_MORE = "more"


@dataclass(frozen=True, slots=True)
class AuxiliaryState:
    """Scheduler, scaler, averaged model and further objects with a state.

    Args:
        parts: place -> object.
        has_more: whether `more` was given, even if it is empty.
    """

    parts: Mapping[Place, Stateful]
    has_more: bool

    @staticmethod
    def of(
        scheduler: Stateful | None, scaler: Stateful | None, ema: Stateful | None, more: Mapping[str, Stateful] | None
    ) -> AuxiliaryState:
        """Return the parts that are not None; BadArgumentError if `more` is not a mapping."""
        if more is not None and not isinstance(more, Mapping):
            raise BadArgumentError(f"more must map names to objects with a state, not be a {type(more).__qualname__}")
        given: dict[Place, Any] = {("scheduler",): scheduler, ("scaler",): scaler, ("ema",): ema}
        given |= {(_MORE, name): part for name, part in (more or {}).items()}
        parts = {place: part for place, part in given.items() if part is not None or place[0] == _MORE}
        return AuxiliaryState(parts, more is not None)

    @property
    def modules(self) -> Iterator[tuple[Place, nn.Module]]:
        """Return the parts that are modules, which all processes save and load together."""
        return ((place, part) for place, part in self.parts.items() if isinstance(part, nn.Module))

    def named(self) -> dict[str, Stateful]:
        """Return the parts by the names that messages use."""
        return {label(place): part for place, part in self.parts.items()}

    def states(self) -> dict[str, Any]:
        """Return the state dict of each part as a plain tree; None for modules."""
        own: dict[str, Any] = {_MORE: {}} if self.has_more else {}
        for place, part in self.parts.items():
            put(own, place, None if isinstance(part, nn.Module) else plain(part.state_dict()))
        return own

    def without_modules(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state in which the states of modules are empty."""
        light = {**state, _MORE: dict(state[_MORE])} if _MORE in state else dict(state)
        for place, _ in self.modules:
            put(light, place, {})
        return light


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
