"""Distortion on the GPU: torch reductions in float64 over chunks; sums, not decisions, so no agreement to the bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..distortion import Distortion

if TYPE_CHECKING:
    from ..arrays import Array

_STEP = 1 << 24


def distortion(x: Array, y: Array) -> Distortion:
    """See `kernels.distortion`."""
    x, y = torch.as_tensor(x).reshape(-1), torch.as_tensor(y).reshape(-1)
    total = Distortion(0.0, 0.0, 0.0)
    for start in range(0, x.numel(), _STEP):
        a, b = x[start : start + _STEP].double(), y[start : start + _STEP].double()
        finite = torch.isfinite(a)
        a, d = torch.where(finite, a, 0.0), torch.where(finite, b - a, 0.0)
        relative = torch.where(a == 0, torch.where(d != 0, torch.inf, 0.0), d.abs() / a.abs())
        sums = torch.stack([(d * d).sum(), (a * a).sum(), relative.max()]).tolist()
        total += Distortion(*sums)
    return total
