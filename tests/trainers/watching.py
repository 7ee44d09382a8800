"""Recording of the arguments that adapters give to background saves."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from shrinkpoint.store.store import Store
from shrinkpoint.trainers.pointers import WholeSaves


def bounds_handed_to_savers(patch: pytest.MonkeyPatch, adapter: ModuleType) -> list[float | None]:
    """Record the `compact` argument of each new `WholeSaves`."""
    seen: list[float | None] = []

    def saves(store: Store, *, compact: float | None = None, **how: Any) -> WholeSaves:
        seen.append(compact)
        return WholeSaves(store, compact=compact, **how)

    patch.setattr(adapter, "WholeSaves", saves)
    return seen
