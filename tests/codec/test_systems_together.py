"""Chains of published systems: each over a base of each other, from memory and bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp

from .common import difference

SYSTEMS: dict[str, Callable[[], sp.Config]] = {
    "default": sp.Config,
    "inshrinkerator": sp.presets.inshrinkerator,
    "lc_checkpoint": sp.presets.lc_checkpoint,
    "check_n_run": sp.presets.check_n_run,
    "bitsnap": sp.presets.bitsnap,
    "lossless": sp.presets.lossless,
}
KINDS = {
    "wte": "embedding",
    "flat": "embedding",
    "cube": "embedding",
    "scalar": "embedding",
    "fc": "linear",
    "half": "linear",
}


def state(step: int) -> dict[str, Any]:
    """Return weights of two formats, moments, and embeddings of one to three axes."""
    rng = np.random.default_rng(3)
    shapes = {"wte": (200, 16), "fc": (64, 48), "flat": (1500,), "cube": (12, 10, 10), "scalar": ()}
    start = {name: 0.1 * rng.standard_normal(shape) for name, shape in shapes.items()}
    moves = np.random.default_rng(step)
    now = {name: x + 1e-3 * step * moves.standard_normal(x.shape) for name, x in start.items()}
    model = {name: torch.tensor(x, dtype=torch.float32) for name, x in now.items()}
    model["half"] = model["fc"].bfloat16()
    entry = {
        "exp_avg": 1e-3 * model["fc"],
        "exp_avg_sq": (1e-3 * model["fc"]).square() + 1e-12,
        "step": torch.tensor(5.0),
    }
    return {"model": model, "optimizer": {"state": {0: entry}}, "step": step}


def errors(exact: dict[str, Any], restored: dict[str, Any]) -> dict[str, float]:
    """Return the relative error of each array."""
    found = {}
    for where in (("model",), ("optimizer", "state", 0)):
        a, b = exact, restored
        for key in where:
            a, b = a[key], b[key]
        for name, x in a.items():
            found[name] = float((x.double() - b[name].double()).norm() / x.double().norm())
    return found


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(SYSTEMS, 2)])
def test_a_delta_over_a_base_of_another_system(first: str, second: str) -> None:
    """A delta over another system's base restores, with an error like its own base."""
    base = sp.compress(state(0), cfg=SYSTEMS[first](), kinds=KINDS)
    delta = sp.compress(state(1), base, SYSTEMS[second](), kinds=KINDS)
    third = sp.compress(state(2), delta, SYSTEMS[first](), kinds=KINDS)
    alone = errors(state(1), sp.decompress(sp.compress(state(1), cfg=SYSTEMS[second](), kinds=KINDS)))
    assert delta.is_delta
    assert third.is_delta
    for name, error in errors(state(1), sp.decompress(delta)).items():
        # A difference may be coarser than a base, which LC-Checkpoint stores exactly.
        assert error <= max(1.1 * alone[name], 0.02), name
    from_bytes = sp.Checkpoint.from_bytes(base.to_bytes(), prev=None)
    for checkpoint in (delta, third):
        again = sp.Checkpoint.from_bytes(checkpoint.to_bytes(), prev=from_bytes)
        assert difference(sp.decompress(again), sp.decompress(checkpoint)) == ""
        with pytest.raises(sp.MissingParentError):
            sp.decompress(sp.Checkpoint.from_bytes(checkpoint.to_bytes(), prev=None))
        from_bytes = again


@pytest.mark.parametrize("system", SYSTEMS)
def test_embeddings_of_other_than_two_axes(system: str) -> None:
    """Embeddings of other than two axes are stored by every system."""
    checkpoint = sp.compress(state(1), cfg=SYSTEMS[system](), kinds=KINDS)
    found = errors(state(1), sp.decompress(sp.Checkpoint.from_bytes(checkpoint.to_bytes(), prev=None)))
    exact = system in ("check_n_run", "bitsnap", "lossless", "lc_checkpoint")
    for name in ("flat", "cube", "scalar"):
        assert found[name] == 0 if exact or name == "scalar" else found[name] < 0.1, name
    if system == "check_n_run":
        notes = {row.path: row.note for row in checkpoint.summary() if row.note}
        assert notes["model/cube"] == "exact: 3 dimensions, no rows to quantize"
        assert notes["model/flat"] == "exact: 1 dimensions, no rows to quantize"
        assert "model/wte" not in notes


def test_a_store_goes_on_with_another_system(tmp_path: Path) -> None:
    for step, make in enumerate(SYSTEMS.values()):
        sp.Store(tmp_path, make()).save(step, state(step), kinds=KINDS)
    store = sp.Store(tmp_path)
    assert store.steps() == list(range(len(SYSTEMS)))
    last = len(SYSTEMS) - 1
    assert difference(store.load(last), state(last)) == ""
    for step in range(last):
        assert max(errors(state(step), store.load(step)).values()) < 0.4
