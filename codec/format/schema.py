"""The header of a file, described once: the records of arrays and of groups of arrays.

Writers make these dataclasses, and `to_json` gives what the file holds; readers get them from `from_json`, which
refuses unknown keys and values of another type. The short names of the fields stand in this module only.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar

from ..errors import CorruptDataError

HEADER = frozenset(("parent", "as", "raw", "tree", "why", "arrays", "bundles"))
"""Keys of a header."""
_ARRAY = {
    "library": "l",
    "dtype": "d",
    "shape": "s",
    "stream": "f",
    "meta": "m",
    "lengths": "b",
    "is_delta": "p",
    "pair": "v",
    "measure": "q",
    "error": "e",
    "note": "n",
    "reason": "y",
    "codec": "c",
}
_GROUP = {"members": "a", "stream": "f", "meta": "m", "lengths": "b", "is_delta": "p"}
ARRAY_KEYS = frozenset(_ARRAY.values())
"""Keys of the record of an array."""
_GROUP_KEYS = frozenset(_GROUP.values())
Record = TypeVar("Record", "StoredArray", "StoredGroup")


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """The record of an array.

    Args:
        dtype: name of its dtype.
        shape: its shape.
        library: where it is restored to.
        stream: stream format; None: the array is part of a group.
        meta: the stream's metadata.
        lengths: bytes of each piece.
        is_delta: whether decoding needs the parent's reference of the same array.
        codec: id of the codec that was chosen; None: the one that writes the stream format.
        measure: what the error is: "exact", "relative L2" or "relative".
        error: achieved error.
        note: remark of the codec, or "".
        reason: number of the reason for the codec.
        pair: number of the array whose values decoding needs, or None.
    """

    dtype: Any
    shape: Any
    library: Any = "torch"
    stream: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    lengths: Sequence[int] = ()
    is_delta: bool = False
    codec: str | None = None
    measure: str = "exact"
    error: float = 0.0
    note: str = ""
    reason: int | None = None
    pair: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON, without fields that have their default value.

        Example:
            >>> StoredArray("float32", [2, 3], stream="bytes", lengths=[5]).to_json()
            {'d': 'float32', 's': [2, 3], 'f': 'bytes', 'b': [5]}
        """
        found = _as_json(self, _ARRAY)
        if self.stream is not None:
            found["b"] = list(self.lengths)
        return found

    @staticmethod
    def from_json(row: Mapping[str, Any], path: str) -> StoredArray:
        """Return the record of plain JSON; raises CorruptDataError."""
        if "f" not in row and row.keys() & {"b", "m", "p"}:
            raise CorruptDataError(f"header: {path}: in a bundle, and with pieces of its own")
        found = _from_json(StoredArray, _ARRAY, {**row, "d": row.get("d"), "s": row.get("s")}, path)
        if found.stream is not None and "b" not in row:
            raise CorruptDataError(f"header: {path}: its record is malformed")
        return found


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """The record of arrays that were coded together.

    Args:
        members: their numbers.
        stream: stream format.
        meta: the stream's metadata.
        lengths: bytes of each piece.
        is_delta: whether decoding needs the parents of all members.
    """

    members: Sequence[int]
    stream: str
    meta: dict[str, Any]
    lengths: Sequence[int]
    is_delta: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON."""
        return {**_as_json(self, _GROUP), "a": _gaps(self.members), "b": list(self.lengths)}

    @staticmethod
    def from_json(row: Any, below: int) -> StoredGroup:
        """Return the record of plain JSON, of numbers in [0, below); raises CorruptDataError."""
        if not isinstance(row, dict):
            raise CorruptDataError("header: its bundles are malformed")
        check_keys(row, _GROUP_KEYS, "a bundle")
        members = _from_gaps(row.get("a"), below)
        return _from_json(StoredGroup, _GROUP, {"m": {}, **row, "a": members}, f"a bundle of {len(members)} arrays")


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "stream": _is(str),
    "meta": _is(dict),
    "lengths": _is_numbers,
    "is_delta": _is(bool),
    "codec": _is(str),
    "measure": _is(str),
    "error": _is(float),
    "note": _is(str),
    "reason": lambda value: type(value) is int and value >= 0,
    "pair": lambda value: type(value) is int and value >= 0,
}
"""Whether a value may stand in a field; dtype, shape and library are checked where they become a spec."""


def _as_json(record: StoredArray | StoredGroup, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that do not have their default value, by their short names."""
    found = {}
    for name, short in names.items():
        value = getattr(record, name)
        if value != _DEFAULTS.get(name, MISSING) and (value or name not in ("meta", "lengths")):
            found[short] = list(value) if name == "shape" else value
    return found


_DEFAULTS = {one.name: one.default for one in fields(StoredArray) if one.default is not MISSING}


def _from_json(kind: type[Record], names: Mapping[str, str], row: Mapping[str, Any], where: str) -> Record:
    given = {name: row[short] for name, short in names.items() if short in row}
    for name, value in given.items():
        if name in _CHECKS and not _CHECKS[name](value):
            raise CorruptDataError(f"header: {where}: its record is malformed")
    if kind is StoredGroup and given.keys() < names.keys() - {"is_delta"}:
        raise CorruptDataError(f"header: {where}: its record is malformed")
    return kind(**given)


def check_keys(found: Iterable[str], known: frozenset[str], what: str) -> None:
    """Raise CorruptDataError for a key that is not known: new keys come with a new version.

    Example:
        >>> check_keys({"raw": 1, "x": 2}, HEADER, "it")
        Traceback (most recent call last):
        ...
        shrinkpoint.kernels.errors.CorruptDataError: header: it has the unknown key 'x'
    """
    for key in found:
        if key not in known:
            raise CorruptDataError(f"header: {what} has the unknown key {key[:40]!r}")


def _gaps(numbers: Sequence[int]) -> list[int]:
    """Return numbers as differences from the number before.

    Example:
        >>> _gaps([3, 4, 8])
        [3, 1, 4]
    """
    return [number - before for number, before in zip(numbers, (0, *numbers), strict=False)]


def _from_gaps(found: Any, below: int) -> list[int]:
    """Return the distinct numbers in [0, below) whose `_gaps` these are.

    Raises:
        CorruptDataError: a number is repeated or out of range, or the list is empty.

    Example:
        >>> _from_gaps([3, 1, 4], 9)
        [3, 4, 8]
    """
    if not isinstance(found, list) or not found or not all(type(gap) is int and abs(gap) < 1 << 48 for gap in found):
        raise CorruptDataError("header: a bundle names no arrays")
    numbers = list(itertools.accumulate(found))
    if min(numbers) < 0 or max(numbers) >= below or len(set(numbers)) != len(numbers):
        raise CorruptDataError(f"header: a bundle names an array twice, or one that is not among {below}")
    return numbers
