"""Adapters for training loops and frameworks, each imported on first use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .loader import Loader
    from .loop import resume, save
    from .preemption import Preemption
    from .training_state import TrainingState

__all__ = ["Loader", "Preemption", "TrainingState", "resume", "save"]
_WHERE = {
    "Loader": "loader",
    "Preemption": "preemption",
    "TrainingState": "training_state",
    "resume": "loop",
    "save": "loop",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that torch.distributed and frameworks load only then."""
    if name in _WHERE:
        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@contextlib.contextmanager
def required(need: str, command: str) -> Iterator[None]:
    """Let a failing import name its package and the command that installs it."""
    try:
        yield
    except ImportError:
        raise ImportError(f"{need}: {command}") from None
