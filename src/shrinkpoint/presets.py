"""The public name of the module `shrinkpoint.codec.presets`."""

from __future__ import annotations

import sys

from .codec import presets
from .codec.presets import (
    bitsnap,
    check_n_run,
    compact,
    exact_weights,
    expected_failures,
    inshrinkerator,
    lc_checkpoint,
    lossless,
    precise,
)

__all__ = [
    "bitsnap",
    "check_n_run",
    "compact",
    "exact_weights",
    "expected_failures",
    "inshrinkerator",
    "lc_checkpoint",
    "lossless",
    "precise",
]

sys.modules[__name__] = presets
