"""Extrapolation by array-API functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from array_api_compat import array_namespace

from ..arrays import dtype_name

if TYPE_CHECKING:
    from ..arrays import Array


def extrapolate(x: Array, earlier: Array, factor: float) -> Array:
    """See `kernels.extrapolate`."""
    xp = array_namespace(x, earlier)
    wide = xp.float64 if dtype_name(x) == "float64" else xp.float32
    own, before = xp.astype(x, wide), xp.astype(earlier, wide)
    way = own - before
    far = own + way * xp.full_like(own, factor)
    return xp.where(xp.isfinite(far), far, xp.where(xp.isnan(own), xp.full_like(own, xp.nan), own))
