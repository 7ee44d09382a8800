"""Compressed training checkpoints: `compress(state, prev, cfg)`, kernels, a store."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .codec import presets
from .codec.base import Codec
from .codec.checkpoint import Checkpoint, decompress
from .codec.compress import compress
from .codec.config import ChainPolicy, Config, Rule, UnmatchedRuleWarning
from .codec.embeddings.rows import Rows
from .codec.errors import (
    BadArgumentError,
    CorruptDataError,
    MissingParentError,
    NewerFormatError,
    ShrinkpointError,
    ShrinkpointWarning,
    UnsupportedLeafError,
)
from .codec.lossless.changed import Changed
from .codec.lossless.exact import Exact
from .codec.moments.clusters import Clusters
from .codec.moments.firstmoment import FirstMoment
from .codec.moments.logbuckets import LogBuckets
from .codec.moments.secondmoment import SecondMoment
from .codec.parallel import set_threads, threads
from .codec.state.kinds import Kind, kinds
from .codec.weights.drift import Earlier
from .codec.weights.exponent import ExponentDelta
from .codec.weights.quantize import Quantize

if TYPE_CHECKING:
    from .search.result import SearchResult
    from .search.run import search
    from .store.agent import InMemoryWarning
    from .store.files import StoreWarning
    from .store.ranks import newest_common_step
    from .store.retention import Retention
    from .store.saver import Saver, SaveResult, SaverWarning
    from .store.store import NotCompactedWarning, RestoreNotCountedWarning, SkippedCheckpointWarning, Store
    from .store.trail import Trail
    from .trainers.hub import load_pretrained, save_pretrained
    from .trainers.rows import RowTracker
    from .trainers.sensitivity import SensitivityTracker

__version__ = "0.1.0.dev0"

_LATER = {
    name: module
    for module, names in {
        "search.result": ("SearchResult",),
        "store.agent": ("InMemoryWarning",),
        "store.files": ("StoreWarning",),
        "store.ranks": ("newest_common_step",),
        "store.retention": ("Retention",),
        "store.saver": ("SaveResult", "Saver", "SaverWarning"),
        "store.store": ("NotCompactedWarning", "RestoreNotCountedWarning", "SkippedCheckpointWarning", "Store"),
        "store.trail": ("Trail",),
        "trainers.hub": ("load_pretrained", "save_pretrained"),
        "trainers.rows": ("RowTracker",),
        "trainers.sensitivity": ("SensitivityTracker",),
    }.items()
    for name in names
}
"""What is imported when it is first asked for, and where from."""

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
    "InMemoryWarning",
    "Kind",
    "LogBuckets",
    "MissingParentError",
    "NewerFormatError",
    "NotCompactedWarning",
    "Quantize",
    "RestoreNotCountedWarning",
    "Retention",
    "RowTracker",
    "Rows",
    "Rule",
    "SaveResult",
    "Saver",
    "SaverWarning",
    "SearchResult",
    "SecondMoment",
    "SensitivityTracker",
    "ShrinkpointError",
    "ShrinkpointWarning",
    "SkippedCheckpointWarning",
    "Store",
    "StoreWarning",
    "Trail",
    "UnmatchedRuleWarning",
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


_PACKAGES = ("kernels", "search", "store", "trainers")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})


def __getattr__(name: str) -> Any:
    """On first use: file systems and torch need not be imported by those who only compress."""
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)  # of `search` the package itself is what is called
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LATER[name]}", __name__), name)
