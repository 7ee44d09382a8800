"""Residual on the GPU: the array-API functions of the reference, elementwise on the device; not fused yet."""

from __future__ import annotations

from ..reference.residual import residual_symbols, residual_values

__all__ = ["residual_symbols", "residual_values"]
