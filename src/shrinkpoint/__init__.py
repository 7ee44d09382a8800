"""Compressed training checkpoints: `compress(state, prev, cfg)`, kernels, a store."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .codec import presets
from .codec.base import Codec
from .codec.changed import Changed
from .codec.checkpoint import Checkpoint, decompress
from .codec.clusters import Clusters
from .codec.compress import compress
from .codec.config import ChainPolicy, Config, Rule
from .codec.drift import Earlier
from .codec.errors import (
    BadArgumentError,
    CorruptDataError,
    MissingParentError,
    NewerFormatError,
    ShrinkpointError,
    UnsupportedLeafError,
)
from .codec.exact import Exact
from .codec.exponent import ExponentDelta
from .codec.firstmoment import FirstMoment
from .codec.kinds import Kind, kinds
from .codec.moments import LogBuckets
from .codec.parallel import set_threads, threads
from .codec.quantize import Quantize
from .codec.rows import Rows
from .codec.secondmoment import SecondMoment

if TYPE_CHECKING:
    from .search.result import SearchResult
    from .search.run import search
    from .store.ranks import newest_common_step
    from .store.retention import Retention
    from .store.saver import Saver, SaveResult
    from .store.store import Store
    from .store.trail import Trail
    from .trainers.hub import load_pretrained, save_pretrained
    from .trainers.rows import RowTracker
    from .trainers.sensitivity import SensitivityTracker

__version__ = "0.1.0.dev0"

__all__ = [
    "BadArgumentError",
    "ChainPolicy",
    "Changed",
    "Checkpoint",
    "Clusters",
    "Codec",
    "Config",
    "CorruptDataError",
    "Earlier",
    "Exact",
    "ExponentDelta",
    "FirstMoment",
    "Kind",
    "LogBuckets",
    "MissingParentError",
    "NewerFormatError",
    "Quantize",
    "Retention",
    "RowTracker",
    "Rows",
    "Rule",
    "SaveResult",
    "Saver",
    "SearchResult",
    "SecondMoment",
    "SensitivityTracker",
    "ShrinkpointError",
    "Store",
    "Trail",
    "UnsupportedLeafError",
    "compress",
    "decompress",
    "kinds",
    "load_pretrained",
    "newest_common_step",
    "presets",
    "save_pretrained",
    "search",
    "set_threads",
    "threads",
]


def __getattr__(name: str) -> Any:
    """`Store` on first use: file systems need not be imported by those who only compress."""
    if name == "Store":
        return import_module(".store.store", __name__).Store
    if name == "Trail":
        return import_module(".store.trail", __name__).Trail
    if name == "Retention":
        return import_module(".store.retention", __name__).Retention
    if name in ("SaveResult", "Saver"):
        return getattr(import_module(".store.saver", __name__), name)
    if name == "newest_common_step":
        return import_module(".store.ranks", __name__).newest_common_step
    if name == "search":
        return import_module(".search", __name__)  # the package itself is what is called
    if name == "SearchResult":
        return import_module(".search.result", __name__).SearchResult
    if name == "SensitivityTracker":
        return import_module(".trainers.sensitivity", __name__).SensitivityTracker
    if name == "RowTracker":
        return import_module(".trainers.rows", __name__).RowTracker
    if name in ("load_pretrained", "save_pretrained"):
        return getattr(import_module(".trainers.hub", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
