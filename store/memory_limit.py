"""The memory that this process may still take, within the limits of its cgroup."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

CGROUPS = "/sys/fs/cgroup"
MEMINFO = "/proc/meminfo"
OWN_CGROUPS = "/proc/self/cgroup"
_VERSIONS = (
    # limit, usage, and the part of the usage that the kernel gives back on demand, for cgroup v2 and v1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory() -> int | None:
    """Return the bytes of memory that are available to this process; None if unknown.

    The least of the machine's `MemAvailable` and, for each cgroup (v1 or v2) above this process, its limit less its
    usage: a container is killed at its own limit, however much memory the machine has.
    """
    return min((room for room in (_machine(), *_cgroups()) if room is not None), default=None)


def _machine() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError), open(MEMINFO, encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _cgroups() -> Iterator[int]:
    """Room below the limit of each memory cgroup, from this process's own up to the root."""
    with contextlib.suppress(OSError, ValueError):
        with open(OWN_CGROUPS, encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
        for _, controllers, path in lines:
            if controllers and "memory" not in controllers.split(","):
                continue
            mount = os.path.join(CGROUPS, "memory") if controllers else CGROUPS
            folder = os.path.normpath(mount + path)
            # In a container the path may be the one outside of it, which does not exist here; the mount itself does.
            while folder.startswith(mount):
                room = _room(folder, *_VERSIONS[bool(controllers)])
                if room is not None:
                    yield room
                folder = os.path.dirname(folder)


def _room(folder: str, limit_file: str, usage_file: str, reclaimable: str) -> int | None:
    try:
        limit, usage = (_read(os.path.join(folder, name)).strip() for name in (limit_file, usage_file))
        if limit == "max":
            return None
        stat = dict(line.split() for line in _read(os.path.join(folder, "memory.stat")).splitlines())
        return max(0, int(limit) - int(usage) + int(stat.get(reclaimable, 0)))
    except (OSError, ValueError):
        return None


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()
