"""Recording of the arguments that adapters give to background saves."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from shrinkpoint.store.store import Store
from shrinkpoint.trainers.background import Background


def bounds_handed_to_savers(patch: pytest.MonkeyPatch, adapter: ModuleType) -> list[float | None]:
    """Record the `compact` argument of each new `Background`."""
    seen: list[float | None] = []

    def background(store: Store, *, compact: float | None = None, **how: Any) -> Background:
        seen.append(compact)
        return Background(store, compact=compact, **how)

    patch.setattr(adapter, "Background", background)
    return seen
