"""Look-up of imported modules, and imports in one thread at a time."""

from __future__ import annotations

import os
import sys
import threading
from importlib import import_module
from types import ModuleType


def imported(name: str) -> ModuleType | None:
    """Return a module that this process has imported completely, else None.

    `sys.modules` already holds a module while another thread still imports it, and then most of its names are missing.
    No object of such a module can have reached the caller yet.
    """
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return None if getattr(spec, "_initializing", False) else module


_IMPORTING = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A child process has only the thread that forked: it must not inherit the lock, or a module, half-way.
    os.register_at_fork(
        before=_IMPORTING.acquire, after_in_parent=_IMPORTING.release, after_in_child=_IMPORTING.release
    )


def load(name: str) -> ModuleType:
    """Import a module that needs Numba or Triton, while no other thread imports one.

    The modules of Numba import each other in circles. Two threads that enter such a circle at different modules wait
    for each other; Python then gives one of them a module that is imported in part, and its import fails.
    """
    module = imported(name)
    if module is not None:
        return module
    with _IMPORTING:
        return import_module(name)


def back_end_module(subject: str, name: str) -> ModuleType:
    """Return `kernels.SUBJECT.NAME`, where the name is "cpu", "gpu" or "reference"."""
    return load(f"shrinkpoint.kernels.{subject}.{name}")
