"""Processor time of the first saves and the first load, with an empty kernel cache."""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from . import processes
from .harness import Options, Row, Rows, at_most

NAMES = {"save": "first base and delta, empty kernel cache", "load": "first load, empty kernel cache"}
LIMITS = {"save": 6.0, "load": 2.5}
LAYERS, WIDTH = 8, 512


def rows(options: Options) -> list[Row]:
    """Both rows: medians of three processes (one with --quick) with kernel caches of their own."""
    found = Rows(size=LAYERS * (WIDTH * WIDTH + WIDTH))
    if not any(options.wanted(name) for name in NAMES.values()):
        return found
    options.say("first call")
    times: dict[str, list[float]] = {what: [] for what in NAMES}
    for _ in range(1 if options.quick else 3):
        with tempfile.TemporaryDirectory() as folder:
            for what, spent in times.items():
                cache = str(Path(folder) / f"cache-{what}")
                spent.append(processes.call("shrinkpoint.bench.first_call:child", what, folder, NUMBA_CACHE_DIR=cache))
    for what, spent in times.items():
        note = f"processor time, {len(spent)} processes, {min(spent):.2f} to {max(spent):.2f} s; imports not counted"
        found.add(NAMES[what], statistics.median(spent), "s", note=note, target=at_most(LIMITS[what]))
    return found


def child(what: str, place: str) -> float:
    """Save or load for the first time in this process, and return the processor seconds.

    Raises:
        ValueError: the result is not that of the state.
    """
    import torch

    import shrinkpoint as sp

    torch.set_num_threads(1)
    sp.set_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer, folder = torch.optim.AdamW(model.parameters()), Path(place)

    def state() -> dict[str, Any]:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(64, WIDTH)).square().mean().backward()
            optimizer.step()
        return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    if what == "save":
        first, second = state(), state()
        begin = time.process_time()
        base = sp.compress(first)
        delta = sp.compress(second, base)
        spent = time.process_time() - begin
        (folder / "base").write_bytes(base.to_bytes())
        (folder / "delta").write_bytes(delta.to_bytes())
        good = delta.is_delta
    else:
        files = (folder / "base").read_bytes(), (folder / "delta").read_bytes()
        begin = time.process_time()
        back = sp.decompress(sp.Checkpoint.from_bytes(files[1], prev=sp.Checkpoint.from_bytes(files[0])))
        spent = time.process_time() - begin
        good = sorted(back["model"]) == sorted(model.state_dict())
    if not good:
        raise ValueError(f"{NAMES[what]}: the result is not that of the state")
    return spent
