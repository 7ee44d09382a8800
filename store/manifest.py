"""The manifest of a step: the small file whose appearance makes a checkpoint exist.

`steps/000000000010.json` is the first one of step 10. When the step is replaced or its chain compacted, the next
generation `steps/000000000010.r1.json` is created and the former removed. The highest one counts, so that a step always
has a manifest, and only one of two writers can create a generation.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from blake3 import blake3

from ..codec.errors import BadArgumentError, CorruptDataError, NewerFormatError
from ..codec.format.bounded_json import loads
from ..kernels.backend.arguments import integer
from .checksummed_json import check_sum, seal

VERSION = 3
"""The highest that is known: 1 for steps of one process, 2 for sharded ones, 3 for thinned ones."""
MAX_STEP = 10**12 - 1
MAX_GENERATION = 10**9 - 1
_DATA = re.compile(r"[0-9]{12}-[0-9a-f]{16}\.spt")
_NAME = re.compile(r"([0-9]{12})(?:\.r([1-9][0-9]{0,8}))?\.json")
_HASH = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The properties of a step that a store knows without reading its data.

    Args:
        step: training step.
        file: name of the data file.
        id: content hash of that file.
        identity: the name by which deltas refer to it: `id`, or the identity that the checkpoint had before a rebase.
        nbytes: stored bytes.
        raw_nbytes: bytes of the state.
        parents: data files of the chain below it, the nearest first, the base last; empty for a base. They are named
            here so that a chain stays readable when one of its steps is replaced.
        carried: bytes of the arrays that must be decoded below it first.
        since_base: checkpoints saved since the base, 0 for the base itself.
        base_nbytes: stored bytes of that base.
        spent: stored bytes of all checkpoints saved since it, this one included.
        metric: how good the model is, for retention, or None.
        shards: name and bytes of the data files that several processes wrote for a sharded step, and of the files of
            their parents; `file` is then the index of the arrays. Empty for a step of one process.
        lacks: role and number of the arrays that were left out when the step was thinned; empty for a whole step.
    """

    step: int
    file: str
    id: str
    identity: str
    nbytes: int
    raw_nbytes: int
    parents: tuple[str, ...]
    carried: int
    since_base: int
    base_nbytes: int
    spent: int
    metric: float | None = None
    shards: tuple[tuple[str, int], ...] = ()
    lacks: tuple[tuple[str, int], ...] = ()

    @property
    def chain(self) -> tuple[str, ...]:
        """Data files for decoding this step, its own first."""
        return (self.file, *self.parents)

    @property
    def files(self) -> tuple[str, ...]:
        """All data files that the step needs."""
        return (*self.chain, *(name for name, _ in self.shards))

    @property
    def own_files(self) -> dict[str, int]:
        """Name and bytes of the data files that were written for this step."""
        files = {name: size for name, size in self.shards if name.startswith(f"{self.step:012d}-")}
        return files | {self.file: self.nbytes}

    @property
    def stored_nbytes(self) -> int:
        """Bytes of `own_files`; `nbytes` for a step of one process."""
        return sum(self.own_files.values())

    @property
    def is_delta(self) -> bool:
        """Return whether the step needs files of other steps."""
        return len(self.files) > len(self.own_files)

    @property
    def ratio(self) -> float:
        """`raw_nbytes / stored_nbytes`."""
        return self.raw_nbytes / self.stored_nbytes

    @property
    def restore_cost(self) -> float:
        """Bytes decoded to restore the step, in multiples of its own; 1 for a base."""
        return 1.0 + (self.carried / self.raw_nbytes if self.raw_nbytes else 0.0)

    def to_bytes(self) -> bytes:
        """Return JSON with a checksum."""
        fields = {"version": 2 if self.shards else 3 if self.lacks else 1, **asdict(self)}
        for name in ("shards", "lacks"):
            if table := dict(fields.pop(name)):
                fields[name] = table
        return seal(fields)

    @staticmethod
    def from_bytes(data: bytes, step: int) -> Manifest:
        """Read and check a manifest; a name that could leave the folder is refused."""
        try:
            fields = loads(data)
            version = fields.pop("version")
            if type(version) is int and version > VERSION:
                raise NewerFormatError(
                    f"step {step}: manifest version {str(version)[:20]}; this reader knows up to {VERSION}"
                )
            check_sum(data)
            del fields["checksum"]
            shards, lacks = (tuple(fields.pop(name, {}).items()) for name in ("shards", "lacks"))
            if type(version) is not int or version != (2 if shards else 3 if lacks else 1) or (shards and lacks):
                raise ValueError(f"version {str(version)[:20]!r}")
            parents = tuple(fields.pop("parents"))
            manifest = Manifest(**fields, parents=parents, shards=shards, lacks=lacks)
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise CorruptDataError(f"step {step}: its manifest is malformed: {str(e)[:200]}") from None
        if not manifest._is_sound() or manifest.step != step:
            raise CorruptDataError(f"step {step}: its manifest is malformed")
        return manifest

    def _is_sound(self) -> bool:
        counts = (self.carried, self.since_base, self.base_nbytes, self.spent, *(size for _, size in self.shards))
        return (
            all(type(n) is int and n >= 0 for n in (self.step, self.nbytes, self.raw_nbytes, *counts))
            and self.nbytes > 0
            and all(isinstance(n, str) and _DATA.fullmatch(n) for n in self.files)
            and len(set(self.files)) == len(self.files)
            and all(isinstance(h, str) and _HASH.fullmatch(h) for h in (self.id, self.identity))
            and self.file == data_name(self.step, self.id)
            and all(re.fullmatch("[a-z ]{1,40}", role) and type(n) is int and n > 0 for role, n in self.lacks)
            and (self.metric is None or (type(self.metric) is float and math.isfinite(self.metric)))
        )


def lacking(lacks: Iterable[tuple[str, int]]) -> str:
    """Return what a thinned step lacks (`Manifest.lacks`), for a message.

    Example:
        >>> lacking([("first moment", 12), ("second moment", 1)])
        'it lacks 12 first moments, 1 second moment'
    """
    return "it lacks " + ", ".join(f"{n} {role}{'s' * (n > 1)}" for role, n in lacks)


def check_step(step: Any) -> int:
    """Return a step's number, also a NumPy one, or raise BadArgumentError."""
    return integer("step", step, 0, MAX_STEP)


def check_metric(metric: Any) -> float | None:
    """Return a metric as a float, or raise BadArgumentError."""
    if metric is None:
        return None
    value = math.nan
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        value = float(metric)
    if isinstance(metric, (bool, str)) or not math.isfinite(value):
        raise BadArgumentError(f"metric is {metric!r:.80}; it must be a finite number or None")
    return value


def data_name(step: int, identity: str) -> str:
    """Return the name of a data file, which contains the beginning of its hash."""
    return f"{step:012d}-{identity[:16]}.spt"


def manifest_name(step: int, generation: int) -> str:
    """Return the name of a manifest."""
    return f"{step:012d}.r{generation}.json" if generation else f"{step:012d}.json"


def parse_name(name: str) -> tuple[int, int] | None:
    """Return the step and generation in a manifest's file name; None for other files."""
    match = _NAME.fullmatch(name)
    return (int(match.group(1)), int(match.group(2) or 0)) if match else None


def is_data(name: str) -> bool:
    """Return whether a name is that of a data file."""
    return _DATA.fullmatch(name) is not None


def is_content(name: str, data: bytes) -> bool:
    """Return whether some bytes are those of the data file of a name."""
    return name.endswith(f"-{blake3(data).hexdigest()[:16]}.spt")
