"""The manifest of a step: the small file whose appearance makes a checkpoint exist."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass

from ..codec.errors import CorruptDataError, NewerFormatError

VERSION = 1
_DATA = re.compile(r"\d{12}-[0-9a-f]{16}\.spt")
_STEP = re.compile(r"(\d{12})\.json")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a store knows of one step.

    Args:
        step: training step.
        file: name of the data file.
        id: content hash of the checkpoint.
        nbytes: stored bytes.
        raw_nbytes: bytes of the state.
        parents: data files of the chain below it, the nearest first, the base last; empty for a base. They are named
            here so that a chain stays readable when one of its steps is saved anew.
        since_base: checkpoints saved since the base, 0 for the base itself.
    """

    step: int
    file: str
    id: str
    nbytes: int
    raw_nbytes: int
    parents: tuple[str, ...]
    since_base: int

    @property
    def name(self) -> str:
        """Name of the manifest's own file."""
        return f"{self.step:012d}.json"

    def to_bytes(self) -> bytes:
        """JSON."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1).encode()

    @staticmethod
    def from_bytes(data: bytes, step: int) -> Manifest:
        """Read and check one; a name that could leave the folder is refused."""
        try:
            fields = json.loads(data)
            version = fields.pop("version")
            if type(version) is int and version > VERSION:
                raise NewerFormatError(f"step {step}: manifest version {version}; this reader knows up to {VERSION}")
            if type(version) is not int or version != VERSION:
                raise ValueError(f"version {str(version)[:20]!r}")
            manifest = Manifest(**{**fields, "parents": tuple(fields["parents"])})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            raise CorruptDataError(f"step {step}: its manifest is malformed: {e}") from None
        names = [manifest.file, *manifest.parents]
        numbers = [manifest.step, manifest.nbytes, manifest.raw_nbytes, manifest.since_base]
        plain = (
            all(type(n) is int and n >= 0 for n in numbers)
            and all(isinstance(n, str) and _DATA.fullmatch(n) for n in names)
            and isinstance(manifest.id, str)
            and manifest.file == data_name(step, manifest.id)
        )
        if not plain or manifest.step != step:
            raise CorruptDataError(f"step {step}: its manifest is malformed")
        return manifest


def data_name(step: int, identity: str) -> str:
    """Name of a checkpoint's data file: the content hash keeps a step saved anew apart from its former self."""
    return f"{step:012d}-{identity[:16]}.spt"


def step_of(name: str) -> int | None:
    """The step a manifest's file name stands for; None for other files."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None
