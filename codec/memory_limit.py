"""The memory of this machine, within the limits of the cgroups of this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

CGROUPS = "/sys/fs/cgroup"
MEMINFO = "/proc/meminfo"
OWN_CGROUPS = "/proc/self/cgroup"
NEVER_TOO_LARGE = 1 << 26
"""Bytes for which no limit of a machine or container is read: reading it takes longer than reading a small file."""
_VERSIONS = (
    # Files of limit and usage, and the part of the usage that the kernel gives back on demand: cgroup v2 and v1.
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory() -> int | None:
    """Return the bytes of memory that are available to this process; None if unknown.

    The least of the machine's `MemAvailable` and, for each cgroup (v1 or v2) above this process, its limit less its
    usage: a container is killed at its own limit, however much memory the machine has.
    """
    return min((room for room in (_available(), *_cgroups(_room)) if room is not None), default=None)


def check_room(need: int, what: str) -> None:
    """Refuse work that takes more memory than is available.

    Args:
        need: bytes.
        what: the work, for the message.

    Raises:
        MemoryError: with the need, the available bytes, and the limit of this process.
    """
    available = available_memory()
    if available is not None and need > available:
        raise MemoryError(
            f"{what} needs about {need} bytes of memory; {available} bytes are available here, of a limit of "
            f"{total_memory()} (the machine's memory, or the least limit of this process's cgroups)"
        )


def total_memory() -> int | None:
    """Return the bytes of memory that this process could take alone; None if unknown."""
    return min((size for size in (_installed(), *_cgroups(_limit)) if size is not None), default=None)


def _installed() -> int | None:
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _available() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError), open(MEMINFO, encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _cgroups(found: Callable[[str, tuple[str, str, str]], int | None]) -> Iterator[int]:
    """Yield a result for each memory cgroup with a limit, from the process's own to the root."""
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
                number = found(folder, _VERSIONS[bool(controllers)])
                if number is not None:
                    yield number
                folder = os.path.dirname(folder)


def _limit(folder: str, names: tuple[str, str, str]) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # a ValueError: the limit is "max"
        return int(_read(os.path.join(folder, names[0])))
    return None


def _room(folder: str, names: tuple[str, str, str]) -> int | None:
    limit = _limit(folder, names)
    if limit is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        usage = int(_read(os.path.join(folder, names[1])))
        stat = dict(line.split() for line in _read(os.path.join(folder, "memory.stat")).splitlines())
        return max(0, limit - usage + int(stat.get(names[2], 0)))
    return None


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()
