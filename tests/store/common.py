"""Helpers of the store's tests: states by step, and files of a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shrinkpoint as sp
from shrinkpoint.store import local


def state(step: int, size: int = 600) -> dict[str, Any]:
    """Return a distinct state for each step, most of it unchanged since the step before."""
    rng = np.random.default_rng(7)
    w = rng.standard_normal(size).astype(np.float32)
    w[: size // 8] += step
    return {"step": step, "model": {"weight": w, "n": [np.arange(20) * step, np.ones(3)]}, "ids": np.arange(200) + step}


def same(found: Any, step: int) -> bool:
    """Return whether a state equals this step's, bit for bit."""
    expected = state(step, found["model"]["weight"].size)
    return (
        found["step"] == step
        and found["model"]["weight"].tobytes() == expected["model"]["weight"].tobytes()
        and all(a.tobytes() == b.tobytes() for a, b in zip(found["model"]["n"], expected["model"]["n"], strict=True))
        and found["ids"].tobytes() == expected["ids"].tobytes()
    )


def lossless(*, against: str = "previous", base_every: int | None = None, **policy: Any) -> sp.Config:
    """Return exact storage under a chain policy; by default one long chain."""
    return sp.presets.lossless(chain=sp.ChainPolicy(base_every, against, **policy))


def fill(store: sp.Store, *steps: int) -> sp.Store:
    """Save these steps."""
    for step in steps:
        store.save(step, state(step))
    return store


def listing(root: Path) -> dict[str, bytes]:
    """Return every file of a store except locks and restore counters."""
    names = sorted(p for p in root.rglob("*") if p.is_file())
    found = {str(p.relative_to(root)): p.read_bytes() for p in names}
    return {name: data for name, data in found.items() if name != "lock" and not name.startswith("restores/")}


def manifest_path(root: Path, step: int) -> Path:
    """Return the path of a step's current manifest."""
    found = list((root / "steps").glob(f"{step:012d}*.json"))
    return max(found, key=lambda p: int(p.name.split(".r")[1].split(".")[0]) if ".r" in p.name else 0)


def data_path(root: Path, step: int) -> Path:
    """Return the path of a step's data file."""
    return root / "data" / str(json.loads(manifest_path(root, step).read_text())["file"])


def leftovers(root: Path) -> list[Path]:
    """Return the temporary files."""
    return [p for p in root.rglob(".tmp-*") if p.is_file()]


def spied_folders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that receives the path of each folder that is synced from now on."""
    found: list[str] = []
    sync_folder = local.sync_folder

    def spied(folder: str) -> None:
        found.append(folder)
        sync_folder(folder)

    monkeypatch.setattr(local, "sync_folder", spied)
    return found
