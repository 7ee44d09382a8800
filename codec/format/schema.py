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

HEADER = frozenset(("parent", "as", "raw", "tree", "why", "arrays", "groups"))
"""Keys of a header."""
OPTIONAL = frozenset(("as", "why"))
"""Keys that a header may lack."""
_ARRAY = {
    "library": "l",
    "dtype": "d",
    "shape": "s",
    "order": "o",
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
GROUP_KEYS = frozenset(_GROUP.values())
"""Keys of the record of a group."""
MOST_PIECES = 1 << 22
"""Pieces of all groups together; records may share one list of lengths, so that few bytes can name many."""
_MOST_AXES = 64  # as in `state.leaves.spec_from_header`
_NEXT = [1]
"""Members of a group of one: the array after the first of the group before."""
COLUMNS = {"arrays": ARRAY_KEYS, "groups": GROUP_KEYS}
"""Keys of a header whose records are stored as columns, and the keys of these records."""
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
        order: its dimensions, outermost in memory first; (): as in its shape.
        library: where it is restored to.
        codec: id of the codec that was chosen; None: the one that writes the stream format.
        measure: what the error is: "exact", "relative L2" or "relative".
        error: achieved error.
        note: remark of the codec, or "".
        reason: number of the reason for the codec.
        pair: number of the array whose values decoding needs, or None.
    """

    dtype: Any
    shape: Any
    order: Sequence[int] = ()
    library: Any = "torch"
    codec: str | None = None
    measure: str = "exact"
    error: float = 0.0
    note: str = ""
    reason: int | None = None
    pair: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON, without fields that have their default value.

        Example:
            >>> StoredArray("float32", [2, 3], error=0.5).to_json()
            {'d': 'float32', 's': [2, 3], 'e': 0.5}
        """
        return _as_json(self, _ARRAY)

    @staticmethod
    def from_json(row: Mapping[str, Any], path: str) -> StoredArray:
        """Return the record of plain JSON; raises CorruptDataError."""
        return _from_json(StoredArray, _ARRAY, {**row, "d": row.get("d"), "s": row.get("s")}, path)


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """The record of a group: one array, or several that were coded together.

    Args:
        members: numbers of its arrays.
        stream: stream format.
        lengths: bytes of each piece.
        meta: the stream's metadata.
        is_delta: whether decoding needs the parents' references of the same arrays.
    """

    members: Sequence[int]
    stream: str
    lengths: Sequence[int]
    meta: dict[str, Any] = field(default_factory=dict)
    is_delta: bool = False


def groups_to_json(groups: Sequence[StoredGroup]) -> list[dict[str, Any]]:
    """Return the records of groups as plain JSON.

    Example:
        >>> groups_to_json([StoredGroup([0, 2], "bytes", [5]), StoredGroup([1], "bytes", [9])])
        [{'a': [1, 2], 'f': 'bytes', 'b': [5]}, {'f': 'bytes', 'b': [9]}]
    """
    before, rows = -1, []
    for group in groups:
        row = {**_as_json(group, _GROUP), "a": _gaps(group.members, before)}
        before = group.members[0]
        if row["a"] == _NEXT:
            del row["a"]
        rows.append(row)
    return rows


def groups_from_json(rows: Any, below: int) -> list[StoredGroup]:
    """Return the records of groups, whose members are the numbers in [0, below), each once.

    Raises:
        CorruptDataError: a record is malformed.
    """
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise CorruptDataError("header: its groups are malformed")
    before, groups, known, pieces = -1, [], set[int](), 0
    for row in rows:
        pieces += len(row["b"]) if isinstance(row.get("b"), list) else 0
        if pieces > MOST_PIECES:
            raise CorruptDataError(f"header: more than {MOST_PIECES} pieces")
        members = _from_gaps(row.get("a", _NEXT), below, before)
        before = members[0]
        if not known.isdisjoint(members):
            raise CorruptDataError("header: an array is in two groups")
        known.update(members)
        groups.append(_from_json(StoredGroup, _GROUP, {**row, "a": members}, f"a group of {len(members)} arrays"))
    if len(known) != below:
        raise CorruptDataError(f"header: {below - len(known)} arrays are in no group")
    return groups


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "stream": _is(str),
    "meta": _is(dict),
    "lengths": _is_numbers,
    "is_delta": _is(bool),
    # Records may share one long list, which `spec_from_header` refuses by its length.
    "order": lambda value: isinstance(value, list) and (len(value) > _MOST_AXES or _is_numbers(value)),
    "codec": _is(str),
    "measure": _is(str),
    "error": _is(float),
    "note": _is(str),
    "reason": lambda value: type(value) is int and value >= 0,
    "pair": lambda value: type(value) is int and value >= 0,
}
"""Whether a value may stand in a field; dtype, shape and library are checked where they become a spec."""


def _as_json(record: StoredArray | StoredGroup, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields without a default value, by short names, checked as a reader does."""
    found = {}
    for name, short in names.items():
        value = getattr(record, name)
        if value != _DEFAULTS.get(name, MISSING) and (value or name != "meta"):
            found[short] = list(value) if isinstance(value, tuple) else value
            _check(name, found[short], "an array or group")
    return found


def _check(name: str, value: Any, where: str) -> None:
    if name in _CHECKS and not _CHECKS[name](value):
        raise CorruptDataError(f"header: {where}: its record is malformed")


_DEFAULTS = {
    one.name: one.default for kind in (StoredArray, StoredGroup) for one in fields(kind) if one.default is not MISSING
}


def _from_json(kind: type[Record], names: Mapping[str, str], row: Mapping[str, Any], where: str) -> Record:
    given = {name: row[short] for name, short in names.items() if short in row}
    for name, value in given.items():
        _check(name, value, where)
    if kind is StoredGroup and not given.keys() >= {"stream", "lengths"}:
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


def _gaps(numbers: Sequence[int], first: int) -> list[int]:
    """Return numbers as differences from the number before; that before the first is given.

    Example:
        >>> _gaps([3, 4, 8], 1)
        [2, 1, 4]
    """
    return [number - before for number, before in zip(numbers, (first, *numbers), strict=False)]


def _from_gaps(found: Any, below: int, first: int) -> list[int]:
    """Return the distinct numbers in [0, below) whose `_gaps` these are.

    Raises:
        CorruptDataError: a number is repeated or out of range, or the list is empty.

    Example:
        >>> _from_gaps([2, 1, 4], 9, 1)
        [3, 4, 8]
    """
    if not isinstance(found, list) or not found or not all(type(gap) is int and abs(gap) < 1 << 48 for gap in found):
        raise CorruptDataError("header: a group names no arrays")
    numbers = list(itertools.accumulate(found, initial=first))[1:]
    if min(numbers) < 0 or max(numbers) >= below or len(set(numbers)) != len(numbers):
        raise CorruptDataError(f"header: a group names an array twice, or one that is not among {below}")
    return numbers
