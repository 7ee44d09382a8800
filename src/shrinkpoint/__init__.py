"""Compressed training checkpoints: what to call.

- `sp.Run(folder, model, optimizer, data=loader)`: a training loop that saves, resumes and stops cleanly.
- `sp.compress(state, prev=None, cfg="exact_weights", kinds=sp.kinds(model, optimizer))`, `sp.decompress(ckpt)`: pure
  functions from a tree of arrays to a checkpoint and back.
- `sp.Store(folder)`: `save(step, state)`, `load()`; `sp.Saver(store)` does it in another process.
- `sp.presets.lossless()`, `exact_weights()`, `precise()`, `Config()`, `compact()`: levels, also by name.
- `sp.search(state, evaluate, threshold)`: the smallest configuration under a quality threshold.
- `sp.Publisher(url)`, `sp.Subscriber(url, model)`: exact differences for models that serve.

Example:
    >>> import numpy as np
    >>> import shrinkpoint as sp
    >>> ckpt = sp.compress({"step": 3, "ids": np.arange(1000)})
    >>> sp.decompress(ckpt)["ids"][-1]
    np.int64(999)

Each name is imported from its module on first use, so that importing the package is fast.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import codec as codec
    from . import kernels as kernels
    from . import presets as presets
    from . import store as store
    from . import trainers as trainers
    from .codec.base import Codec as Codec
    from .codec.checkpoint import Checkpoint as Checkpoint
    from .codec.checkpoint import decompress as decompress
    from .codec.compress import compress as compress
    from .codec.config import ChainPolicy as ChainPolicy
    from .codec.config import Config as Config
    from .codec.config import Rule as Rule
    from .codec.config import UnmatchedRuleWarning as UnmatchedRuleWarning
    from .codec.embeddings.rows import Rows as Rows
    from .codec.errors import BadArgumentError as BadArgumentError
    from .codec.errors import CorruptDataError as CorruptDataError
    from .codec.errors import MissingCodecError as MissingCodecError
    from .codec.errors import MissingParentError as MissingParentError
    from .codec.errors import NewerFormatError as NewerFormatError
    from .codec.errors import ShrinkpointError as ShrinkpointError
    from .codec.errors import ShrinkpointWarning as ShrinkpointWarning
    from .codec.errors import UnsupportedLeafError as UnsupportedLeafError
    from .codec.evidence.gather import Evidence as Evidence
    from .codec.evidence.kind import Kind as Kind
    from .codec.evidence.module import kinds as kinds
    from .codec.inputs import PastWeights as PastWeights
    from .codec.lossless.changed import Changed as Changed
    from .codec.lossless.exact import Exact as Exact
    from .codec.moments.clusters import Clusters as Clusters
    from .codec.moments.firstmoment import FirstMoment as FirstMoment
    from .codec.moments.logbuckets import LogBuckets as LogBuckets
    from .codec.moments.secondmoment import SecondMoment as SecondMoment
    from .codec.parallel import set_threads as set_threads
    from .codec.parallel import threads as threads
    from .codec.plan import UnknownArraysWarning as UnknownArraysWarning
    from .codec.weights.exponent import ExponentDelta as ExponentDelta
    from .codec.weights.quantize import Quantize as Quantize
    from .searching.arguments import SearchOptions as SearchOptions
    from .searching.result import SearchResult as SearchResult
    from .searching.run import search as search
    from .store.files import StoreWarning as StoreWarning
    from .store.memory_copies import InMemoryWarning as InMemoryWarning
    from .store.ranks import newest_common_step as newest_common_step
    from .store.retention import Retention as Retention
    from .store.saver.saver import Saver as Saver
    from .store.saver.saver import SaveResult as SaveResult
    from .store.saver.saver import SaverWarning as SaverWarning
    from .store.store import NotCompactedWarning as NotCompactedWarning
    from .store.store import RestoreNotCountedWarning as RestoreNotCountedWarning
    from .store.store import SkippedCheckpointWarning as SkippedCheckpointWarning
    from .store.store import Store as Store
    from .store.store import ThinnedCheckpointWarning as ThinnedCheckpointWarning
    from .store.weight_average import WeightAverage as WeightAverage
    from .trainers.hub import load_pretrained as load_pretrained
    from .trainers.hub import save_pretrained as save_pretrained
    from .trainers.publishing.publisher import Published as Published
    from .trainers.publishing.publisher import Publisher as Publisher
    from .trainers.publishing.ranks import PublishConflictError as PublishConflictError
    from .trainers.publishing.subscriber import Subscriber as Subscriber
    from .trainers.rows import RowTracker as RowTracker
    from .trainers.run import Run as Run
    from .trainers.sensitivity import SensitivityTracker as SensitivityTracker

__version__ = "0.2.0.dev0"

_SUBJECTS = {
    "codec.base": "Codec",
    "codec.checkpoint": "Checkpoint decompress",
    "codec.compress": "compress",
    "codec.config": "ChainPolicy Config Rule UnmatchedRuleWarning",
    "codec.embeddings.rows": "Rows",
    "codec.errors": "BadArgumentError CorruptDataError MissingCodecError MissingParentError NewerFormatError "
    "ShrinkpointError ShrinkpointWarning UnsupportedLeafError",
    "codec.lossless.changed": "Changed",
    "codec.lossless.exact": "Exact",
    "codec.moments.clusters": "Clusters",
    "codec.moments.firstmoment": "FirstMoment",
    "codec.moments.logbuckets": "LogBuckets",
    "codec.moments.secondmoment": "SecondMoment",
    "codec.parallel": "set_threads threads",
    "codec.evidence.gather": "Evidence",
    "codec.evidence.kind": "Kind",
    "codec.evidence.module": "kinds",
    "codec.plan": "UnknownArraysWarning",
    "codec.inputs": "PastWeights",
    "codec.weights.exponent": "ExponentDelta",
    "codec.weights.quantize": "Quantize",
    "searching.arguments": "SearchOptions",
    "searching.result": "SearchResult",
    "searching.run": "search",
    "store.files": "StoreWarning",
    "store.memory_copies": "InMemoryWarning",
    "store.ranks": "newest_common_step",
    "store.retention": "Retention",
    "store.saver.saver": "SaveResult Saver SaverWarning",
    "store.store": (
        "NotCompactedWarning RestoreNotCountedWarning SkippedCheckpointWarning Store ThinnedCheckpointWarning"
    ),
    "store.weight_average": "WeightAverage",
    "trainers.hub": "load_pretrained save_pretrained",
    "trainers.publishing.publisher": "Published Publisher",
    "trainers.publishing.ranks": "PublishConflictError",
    "trainers.publishing.subscriber": "Subscriber",
    "trainers.rows": "RowTracker",
    "trainers.run": "Run",
    "trainers.sensitivity": "SensitivityTracker",
}
_MODULE_OF = {name: subject for subject, names in _SUBJECTS.items() for name in names.split()}
_HERE = Path(__file__).parent
_NO_LINKS = (
    f"{_HERE / 'codec'} is a file here and a symbolic link in the repository. Clone it again with `git clone -c "
    "core.symlinks=true` (on Windows in developer mode), or install a wheel, which holds no links."
)
_RENAMED = {"Earlier": "PastWeights", "Trail": "WeightAverage"}
"""Former names, which work for one release."""
_MEANT = {
    "decode extract uncompress unpack": "decompress(ckpt)",
    "encode pack": "compress(state)",
    "load restore": "Store(folder).load(), or decompress(ckpt)",
    "dump save": "Store(folder).save(step, state), or trainers.save",
    "resume": "trainers.resume, or Run(folder, model, optimizer)",
    "loads from_bytes": "Checkpoint.from_bytes(blob)",
    "dumps to_bytes": "compress(state).to_bytes()",
    "CheckpointManager Checkpointer Manager Trainer": "Run(folder, model, optimizer), or Store(folder)",
    "delta diff": "compress(state, prev=base)",
    "default": "Config()",
}
"""What names of other libraries are called here."""
_MODULES = ("codec", "kernels", "presets", "searching", "store", "trainers")
"""Names that are modules; `searching` is the package of the function `search`."""

__all__ = sorted([*_MODULE_OF, "presets"])


def __dir__() -> list[str]:
    return sorted({"__version__", "__doc__", *__all__, *_MODULES} - {"searching"})


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if (_HERE / "codec").is_file():
        raise ImportError(_NO_LINKS)
    if name in _MODULES:
        found: Any = import_module(f".{name}", __name__)
    elif name in _RENAMED:
        warnings.warn(f"{name} is now called {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return globals().get(_RENAMED[name]) or __getattr__(_RENAMED[name])
    elif name in _MODULE_OF:
        found = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_hint(name)}")
    globals()[name] = found
    return found


def _hint(name: str) -> str:
    """Return the name that an unknown one probably means, or "" for a private one."""
    if name.startswith("_"):
        return ""
    import difflib

    from .codec.named_presets import NAMED
    from .trainers import __all__ as in_trainers

    meant = {own: own for own in __all__}
    meant |= {preset: f"presets.{preset}()" for preset in NAMED} | {own: f"trainers.{own}" for own in in_trainers}
    meant |= {alias: call for aliases, call in _MEANT.items() for alias in aliases.split()}
    spelt = {own.lower().replace("_", ""): call for own, call in meant.items()}
    near = difflib.get_close_matches(name.lower().replace("_", ""), spelt, 1)
    return f"; did you mean {spelt[near[0]]}?" if near else ""
