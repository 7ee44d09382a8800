"""Grid on the GPU: the array-API functions of the reference, elementwise on the device; not fused yet."""

from __future__ import annotations

from ..reference.grid import grid_symbols, grid_values

__all__ = ["grid_symbols", "grid_values"]
