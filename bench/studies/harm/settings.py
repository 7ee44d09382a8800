"""Settings: the five levels, the null, and each part of a state lossy alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import shrinkpoint as sp

NULL = "null"
"""All arrays within 1e-4, and not stored at all: what a training's own sensitivity makes of next to nothing."""
LEVELS: dict[str, Callable[[], sp.Config]] = {
    "default": sp.Config,
    "precise": sp.presets.precise,
    "exact_weights": sp.presets.exact_weights,
    "compact": sp.presets.compact,
    "lossless": sp.presets.lossless,
}
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


def _together(bins: int, step: float, octaves: float) -> Callable[[], sp.Config]:
    rules: list[tuple[str, sp.codec.base.Codec]] = [
        ("weight", sp.Quantize(bins=bins)),
        ("first moment", sp.FirstMoment(step=step)),
        ("second moment", sp.SecondMoment(octaves=octaves)),
    ]
    return lambda: sp.Config(rules)


CANDIDATES: dict[str, Callable[[], sp.Config]] = {
    f"{bins} bins, step {step:g}, {octaves:g} octaves": _together(bins, step, octaves)
    for bins, step, octaves in (
        (24, 0.5, 2.0),
        (64, 0.5, 0.5),
        (64, 0.5, 0.25),
        (96, 0.5, 0.5),
        (96, 0.25, 0.5),
        (128, 0.5, 0.5),
    )
}
"""What the default was chosen from; the first was the default before."""


ABLATIONS: dict[str, Callable[[], sp.Config]] = {
    "compact, not ahead": lambda: dataclasses.replace(sp.presets.compact(), ahead=False)
}
"""Levels without one of their mechanisms."""


def config_of(setting: str) -> sp.Config:
    """Return the configuration of a setting by its name."""
    return (LEVELS | PARTS | CANDIDATES | ABLATIONS)[setting]()
