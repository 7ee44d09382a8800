"""Imports of the packages that an adapter is for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def required(need: str, command: str) -> Iterator[None]:
    """Let a failing import name its package and the command that installs it."""
    try:
        yield
    except ImportError:
        raise ImportError(f"{need}: {command}") from None
