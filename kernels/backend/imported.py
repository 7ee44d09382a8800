"""Look-up of modules that this process has imported, without importing them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


def imported(name: str) -> ModuleType | None:
    """Return a module that this process has imported completely, else None.

    `sys.modules` already holds a module while another thread still imports it, and then most of its names are missing.
    No object of such a module can have reached the caller yet.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else module
