"""The families of the campaign, by use: to choose settings, or only to judge them."""

from __future__ import annotations

from collections.abc import Callable

from . import held_back, sensitive
from .families import FAMILIES, Family

SENSITIVE: dict[str, Callable[[], Family]] = {
    "regression": sensitive.regression,
    "PINN": sensitive.physics,
    "state space": sensitive.state_space,
}
"""They chose `presets.precise()`, together with the nine of `FAMILIES`, which chose the other levels."""
HELD_BACK: dict[str, Callable[[], Family]] = {
    "VAE": held_back.vae,
    "experts": held_back.experts,
    "recommender": held_back.recommender,
}
"""They chose nothing: the levels were measured on them afterwards."""
REGRESSIONS = ("autoencoder", "regression", "VAE")
"""Families whose outputs are values, without the physics-informed network."""
ALL = FAMILIES | SENSITIVE | HELD_BACK
