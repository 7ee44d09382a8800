"""Compressed training checkpoints: `compress(state, prev, cfg)`, kernels, a store."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .codec import presets
from .codec.base import Codec
from .codec.checkpoint import Checkpoint, decompress
from .codec.compress import compress
from .codec.config import ChainPolicy, Config, Rule
from .codec.errors import (
    BadArgumentError,
    CorruptDataError,
    MissingParentError,
    NewerFormatError,
    ShrinkpointError,
    UnsupportedLeafError,
)
from .codec.exact import Exact
from .codec.kinds import Kind, kinds
from .codec.moments import LogBuckets
from .codec.optimizer import FirstMoment, SecondMoment
from .codec.parallel import set_threads, threads
from .codec.quantize import Quantize

if TYPE_CHECKING:
    from .store.store import Store

__version__ = "0.1.0.dev0"

__all__ = [
    "BadArgumentError",
    "ChainPolicy",
    "Checkpoint",
    "Codec",
    "Config",
    "CorruptDataError",
    "Exact",
    "FirstMoment",
    "Kind",
    "LogBuckets",
    "MissingParentError",
    "NewerFormatError",
    "Quantize",
    "Rule",
    "SecondMoment",
    "ShrinkpointError",
    "Store",
    "UnsupportedLeafError",
    "compress",
    "decompress",
    "kinds",
    "presets",
    "set_threads",
    "threads",
]


def __getattr__(name: str) -> Any:
    """`Store` on first use: file systems need not be imported by those who only compress."""
    if name == "Store":
        return import_module(".store.store", __name__).Store
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
