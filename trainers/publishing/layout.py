"""The files of a publisher: a small JSON file for each version, and deltas and bases.

Deltas and bases are ordinary checkpoint files.

    versions/000000000012.json   checksummed; names the files of this version, its parent and the hash of its state
    data/000000000012-d-HASH.spt what changed since the version before it
    data/000000000012-b-HASH.spt everything

A version exists once its JSON file does, which is written last and never written over.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from ...codec.errors import CorruptDataError, NewerFormatError
from ...codec.format.bounded_json import loads

FORMAT = 1
_NAME = re.compile(r"versions/(\d{12})\.json")
_DATA = re.compile(r"data/\d{12}-[bd]-[0-9a-f]{16}\.spt")
_HASH = re.compile(r"[0-9a-f]{32}")
LARGEST = 10**12 - 1


@dataclass(frozen=True, slots=True)
class Version:
    """Properties of a published version.

    Args:
        version: its number.
        parent: number of the version that `delta` is against; None without a delta.
        delta: name of the file with the delta, or None.
        delta_bytes: its size.
        base: name of the file with everything, or None.
        base_bytes: its size.
        state: hash of names, dtypes, shapes and bits of all tensors.
        publisher: random name of the publisher's run.
        sliced: whether a receiver can take slices of the tensors.
    """

    version: int
    parent: int | None
    delta: str | None
    delta_bytes: int
    base: str | None
    base_bytes: int
    state: str
    publisher: str
    sliced: bool

    def to_bytes(self) -> bytes:
        """The JSON file, with a checksum of the rest."""
        fields = {"format": FORMAT, **asdict(self)}
        return _plain({**fields, "checksum": xxhash.xxh3_128_hexdigest(_plain(fields))})

    @staticmethod
    def from_bytes(data: bytes, version: int) -> Version:
        """Read a JSON file.

        Raises:
            CorruptDataError: it is not what `to_bytes` writes of this version.
            NewerFormatError: a newer release wrote it.
        """
        try:
            fields = loads(data)
            number = fields["format"]
            if type(number) is int and number > FORMAT:
                raise NewerFormatError(
                    f"version {version}: its file has format {str(number)[:20]}; this reader knows up to {FORMAT}"
                )
            found = fields.pop("checksum")
            if found != xxhash.xxh3_128_hexdigest(_plain(fields)) or fields.pop("format") != FORMAT:
                raise ValueError("the checksum or the format number does not match")
            made = Version(**fields)
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise CorruptDataError(f"version {version}: its file is damaged: {e}") from None
        if not made._is_sound() or made.version != version:
            raise CorruptDataError(f"version {version}: its file has fields that do not fit")
        return made

    def _is_sound(self) -> bool:
        numbers = (self.version, self.delta_bytes, self.base_bytes)
        if any(type(n) is not int or not 0 <= n <= 1 << 60 for n in numbers) or type(self.sliced) is not bool:
            return False
        if not isinstance(self.state, str) or not _HASH.fullmatch(self.state) or not isinstance(self.publisher, str):
            return False
        for name in (self.delta, self.base):
            if name is not None and not (isinstance(name, str) and _DATA.fullmatch(name)):
                return False
        if self.delta is None:
            return self.parent is None and self.base is not None
        return type(self.parent) is int and 0 <= self.parent < self.version


def _plain(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True).encode("ascii")


def version_name(version: int) -> str:
    """Name of a version's JSON file."""
    return f"versions/{version:012}.json"


def version_of(name: str) -> int | None:
    """The version whose JSON file has this name; None for other files."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def data_name(version: int, kind: str, identity: str) -> str:
    """Name of a data file; `kind` is "b" for a base and "d" for a delta."""
    return f"data/{version:012}-{kind}-{identity[:16]}.spt"
