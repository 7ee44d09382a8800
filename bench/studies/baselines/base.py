"""The interface of a baseline: a name, its source, and a state to bytes and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

State = dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """The bytes of one checkpoint.

    Args:
        weights: the model's weights, coded by the system under comparison.
        rest: everything else: the tree, exact arrays (zstandard), and moments.
    """

    weights: bytes
    rest: bytes

    @property
    def nbytes(self) -> int:
        """Bytes together."""
        return len(self.weights) + len(self.rest)


class Baseline(Protocol):
    """A published system. Pure: the same state and parent give the same bytes.

    Its docstring cites the source, and names the choices that the source leaves open and those made here.
    Implementations are frozen dataclasses.
    """

    @property
    def name(self) -> str:
        """Name in tables."""

    def encode(self, state: State, previous: State | None) -> Saved:
        """Encode a state `{"model": state_dict, "optimizer": optimizer's, ...}`.

        Args:
            state: the exact state.
            previous: the *restored* checkpoint before it (the result of `decode`), or None for a base.

        Raises:
            BadArgumentError: `previous` is a state of another model.
        """

    def decode(self, saved: Saved, previous: State | None) -> State:
        """Restore the state as far as it was kept.

        Args:
            saved: the result of `encode`.
            previous: the same restored state that `encode` had; ignored for a base.

        Raises:
            MissingParentError: `previous` is another state, or missing.
        """
