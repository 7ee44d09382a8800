"""Settings: the five levels, the null, and each part of a state lossy alone."""

from __future__ import annotations

from collections.abc import Callable

import shrinkpoint as sp
from shrinkpoint.codec.named_presets import NAMED

NULL = "null"
"""All arrays within 1e-4, and not stored at all: what a training's own sensitivity makes of next to nothing."""
LEVELS = {name: NAMED[name] for name in ("default", "precise", "exact_weights", "compact", "lossless")}
KILLED = (NULL, "default", "precise", "exact_weights", "compact")
"""Levels that trainings are killed with; a lossless one ends where the uninterrupted training does."""

_EXACT = {"weight": sp.Exact(), "first moment": sp.Exact(), "second moment": sp.Exact()}


def _alone(kind: str, codec: sp.Quantize | sp.FirstMoment | sp.SecondMoment) -> Callable[[], sp.Config]:
    return lambda: sp.Config([(k, codec if k == kind else exact) for k, exact in _EXACT.items()])


PARTS: dict[str, Callable[[], sp.Config]] = {
    **{f"weights, {n} bins": _alone("weight", sp.Quantize(bins=n)) for n in (24, 48, 64, 96)},
    **{
        f"second moments, {octaves:g} octaves": _alone("second moment", sp.SecondMoment(octaves=octaves))
        for octaves in (2.0, 1.0, 0.5, 0.25)
    },
    **{
        f"first moments, step {step:g}": _alone("first moment", sp.FirstMoment(step=step, max_error=1.0))
        for step in (1.0, 0.5, 0.25)
    },
}
"""One part of the state lossy, everything else exact: its effect per byte."""


def config_of(setting: str) -> sp.Config:
    """Return the configuration of a setting by its name."""
    return (LEVELS | PARTS)[setting]()
