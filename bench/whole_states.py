"""The check of a restored state, and `torch.save` as its peer."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np

import shrinkpoint as sp

from .data import arrays
from .harness import CheckFailed


def check_errors(state: Any, back: Any, stored: sp.Checkpoint) -> str:
    """Hold every array against the error its summary states, and name the comparisons.

    Raises:
        CheckFailed: a key, shape, dtype or exact value differs, or an error is above the stated one.
    """
    before, after = dict(arrays(state)), dict(arrays(back))
    if list(before) != list(after):
        raise CheckFailed("other arrays come back")
    exact = 0
    for row in stored.summary():
        x, y = before[row.path], after[row.path]
        if x.shape != y.shape or x.dtype != y.dtype:
            raise CheckFailed(f"{row.path}: {x.dtype}{x.shape} comes back as {y.dtype}{y.shape}")
        if row.measure == "exact":
            if x.tobytes() != y.tobytes():
                raise CheckFailed(f"{row.path}: is not exact")
            exact += 1
            continue
        a, b = x.astype(np.float64), y.astype(np.float64)
        if row.measure == "relative":
            some = a != 0
            error = float(np.max(np.abs(a - b)[some] / np.abs(a[some]), initial=0.0))
        else:
            error = float(np.linalg.norm(a - b)) / max(float(np.linalg.norm(a)), 1e-300)
        if error > row.error * 1.01:  # the summary has three digits
            raise CheckFailed(f"{row.path}: {row.measure} error {error:.4g}, stated {row.error:.4g}")
    return f"{exact} arrays exact, {len(before) - exact} within the stated error, same bytes again"


def torch_calls(state: Any, *, decode: bool) -> Callable[[], object]:
    """Return the call that saves a state with `torch.save` to memory, or with `decode` loads it."""
    import torch

    def save() -> bytes:
        stream = io.BytesIO()
        torch.save(state, stream)
        return stream.getvalue()

    if not decode:
        return save
    saved = save()
    return lambda: torch.load(io.BytesIO(saved), weights_only=False)
