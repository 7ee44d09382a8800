"""States with the moments of an optimizer, for the tests of thinning."""

from __future__ import annotations

from typing import Any

import numpy as np

import shrinkpoint as sp

LACKS = (("first moment", 1), ("second moment", 1))


def state(step: int, size: int = 128) -> dict[str, Any]:
    """Return a distinct training state for each step; most of it never changes."""
    rng = np.random.default_rng(7)
    w, m = (rng.standard_normal(size).astype(np.float32) for _ in range(2))
    w[: size // 8] += step
    m[: size // 8] -= step
    entries = {"step": step, "exp_avg": m, "exp_avg_sq": m * m}
    optimizer = {"state": {"w": entries}, "param_groups": [{"lr": 0.1, "betas": [0.9, 0.99], "params": ["w"]}]}
    return {"step": step, "model": {"w": w}, "optimizer": optimizer, "ids": np.arange(200) + step}


def thinned(whole: dict[str, Any]) -> dict[str, Any]:
    """Return a state without its moments."""
    optimizer = {**whole["optimizer"], "state": {"w": {"step": whole["step"]}}}
    return {**whole, "optimizer": optimizer}


def equal(a: Any, b: Any) -> bool:
    """Return whether two trees are the same, arrays bit for bit."""
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(type(a) is type(b) and a == b)


def is_thinned(store: sp.Store, step: int) -> bool:
    """Return whether a step is thinned; assert that it loads as its manifest says, and is right."""
    lacks = store.describe(step).lacks
    assert lacks in ((), LACKS)
    found = store.load(step, count=False)
    assert equal(found, thinned(state(step)) if lacks else state(step)), f"step {step} is wrong"
    return bool(lacks)
