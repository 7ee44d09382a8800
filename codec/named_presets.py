"""Levels and published systems by name, as every argument `cfg` takes them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

from .config import Config
from .errors import BadArgumentError
from .presets import bitsnap, check_n_run, compact, exact_weights, inshrinkerator, lc_checkpoint, lossless, precise

NAMED: dict[str, Callable[[], Config]] = {
    "default": Config,
    "lossless": lossless,
    "exact_weights": exact_weights,
    "precise": precise,
    "compact": compact,
    "inshrinkerator": inshrinkerator,
    "lc_checkpoint": lc_checkpoint,
    "check_n_run": check_n_run,
    "bitsnap": bitsnap,
}


def by_name(name: str) -> Config:
    """Return the level or published system of a name, with its default arguments.

    Raises:
        BadArgumentError: an unknown name; the message gives the nearest known one.

    Example:
        >>> by_name("exact_weights") == exact_weights()
        True
    """
    preset = NAMED.get(name.replace("-", "_"))
    if preset is None:
        near = difflib.get_close_matches(name.replace("-", "_").lower(), NAMED, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise BadArgumentError(f"cfg is {name[:60]!r}; the names are {', '.join(NAMED)}{hint}")
    return preset()


def check_config(cfg: Any) -> Config:
    """Return a Config, or the preset of a name; refuse other objects."""
    if isinstance(cfg, str):
        return by_name(cfg)
    if not isinstance(cfg, Config):
        got = "the preset itself; call it" if callable(cfg) else repr(cfg)[:60]
        raise BadArgumentError(f"cfg must be a Config or the name of a preset, not {got}")
    return cfg
