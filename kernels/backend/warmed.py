"""A mark in the cache of compiled code: all kernels of a purpose are compiled."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import llvmlite  # type: ignore[import-untyped]
import numba
import numpy as np
from numba.core.registry import cpu_target

from . import cache

KERNELS = 137
"""Number of kernels that `shrinkpoint warm` compiles; shown as a total before it is known."""


def is_warmed() -> bool:
    """Return whether the cache has a mark of any purpose."""
    folder = _folder()
    return folder is not None and any(folder.glob("warmed.*.nbc"))


def kernels_of(purpose: str) -> int:
    """Return the number of kernels that a purpose needs; 0 if not all are compiled."""
    path = _path(purpose)
    if path is None:
        return 0
    try:
        files = json.loads(path.read_text())
        return len(files) if all(map(os.path.exists, files)) else 0
    except (OSError, ValueError):
        return 0


def mark(purpose: str) -> None:
    """Note that all kernels of a purpose are compiled: those that this process has used."""
    path, files = _path(purpose), sorted(cache.loaded | cache.stored)
    if path is not None and files:
        temporary = path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(files))
            os.replace(temporary, path)


def _folder() -> Path | None:
    try:
        return Path(cache.folder_of(is_warmed))
    except (RuntimeError, OSError):
        return None


def _path(purpose: str) -> Path | None:
    """Return the file of a mark, whose name depends on all that kernels depend on.

    Removing `*.nbc` removes it, too."""
    folder = _folder()
    machine = cpu_target.target_context.codegen().magic_tuple()
    versions = (sys.version, numba.__version__, llvmlite.__version__, np.__version__)
    name = cache.checksum(repr((purpose, machine, versions)).encode()).hex()
    return None if folder is None else folder / f"warmed.{name}.nbc"
