"""Published systems that ours are compared with; the wheel does not contain them."""

from __future__ import annotations

from collections.abc import Callable

from .adaptive import Adaptive
from .base import Baseline, Saved, State
from .excp import ExCP
from .naive import Naive8Bit
from .partial import Scar, TopN
from .qd import QDCompressor

__all__ = ["BASELINES", "Baseline", "Saved", "State"]

BASELINES: dict[str, Callable[[], Baseline]] = {
    "naive 8-bit": Naive8Bit,
    "QD-compressor": QDCompressor,
    "ExCP": ExCP,
    "Adaptive": Adaptive,
    "SCAR": Scar,
    "TOPN": TopN,
    "naive 8-bit, moments too": lambda: Naive8Bit(moments=True),
}
"""By name; each with its published settings."""
