"""The families of the campaign, by use: to choose settings, or only to judge them."""

from __future__ import annotations

from collections.abc import Callable

from . import held_back, sensitive
from .by_optimizer import BY_OPTIMIZER
from .families import FAMILIES, Family

SENSITIVE: dict[str, Callable[[], Family]] = {
    "regression": sensitive.regression,
    "PINN": sensitive.physics,
    "state space": sensitive.state_space,
    "grokking": sensitive.grokking,
}
"""They chose `presets.precise()`, together with the nine of `FAMILIES`, which chose the other levels.

Grokking spoke against noise in second moments when it was proposed."""
HELD_BACK: dict[str, Callable[[], Family]] = {
    "VAE": held_back.vae,
    "experts": held_back.experts,
    "recommender": held_back.recommender,
    "diffusion, EMA": held_back.diffusion,
    "LoRA": held_back.lora,
    **BY_OPTIMIZER,
}
"""They chose nothing: the levels were measured on them afterwards. Their schedules end near zero."""
CHOSE = tuple(FAMILIES | SENSITIVE)
"""The first group. Two of it were set aside when the default was chosen."""
REGRESSIONS = ("autoencoder", "regression", "VAE", "diffusion, EMA")
"""Families whose outputs are values, without the physics-informed network."""
ALL = FAMILIES | SENSITIVE | HELD_BACK
