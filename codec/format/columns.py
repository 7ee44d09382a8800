"""Array records stored as columns, one for each field, since many records repeat few values.

    {"count": 3, "d": {"v": ["float32"]}, "f": {"v": ["levels", "bytes"], "i": [0, 0, 1]}, "e": [0.1, null, 0.2]}

A column is a list with a value for each record (null: the record has no such field), or the different values `v` and
for each record the number `i` of its own; without `i` all have the first.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..errors import CorruptDataError
from .schema import ARRAY_KEYS, check_keys

_COUNT = "count"
Record = dict[str, Any]


def to_columns(records: Sequence[Record]) -> dict[str, Any]:
    """Return records as columns.

    Args:
        records: plain JSON. A value is never None: None marks an absent field.

    Example:
        >>> to_columns([{"d": "float32"}, {"d": "float32", "s": [2]}])
        {'count': 2, 'd': {'v': ['float32']}, 's': [None, [2]]}
    """
    names = dict.fromkeys(name for record in records for name in record)
    return {_COUNT: len(records), **{name: _column([r.get(name) for r in records]) for name in names}}


def _column(values: list[Any]) -> Any:
    numbers: dict[Any, int] = {}
    found: list[Any] = []
    index = []
    for value in values:
        key = (type(value), json.dumps(value) if type(value) in (list, dict) else value)
        if key not in numbers:
            numbers[key] = len(found)
            found.append(value)
        index.append(numbers[key])
    if len(found) == 1:
        return {"v": found}
    return values if 2 * len(found) > len(values) else {"v": found, "i": index}


def from_columns(columns: Any, most: int) -> list[Record]:
    """Return the records that `to_columns` stored as columns.

    Args:
        columns: the columns read from a file.
        most: largest number of records; each is an array of the tree.

    Raises:
        CorruptDataError: the columns are malformed, or there are more records.

    Example:
        >>> from_columns({"count": 2, "d": {"v": ["float32"]}, "s": [None, [2]]}, 2)
        [{'d': 'float32'}, {'d': 'float32', 's': [2]}]
    """
    count = columns.get(_COUNT) if isinstance(columns, dict) else None
    if type(count) is not int or not 0 <= count <= most:
        raise CorruptDataError("header: malformed columns of arrays, or more arrays than the tree has")
    check_keys(columns.keys() - {_COUNT}, ARRAY_KEYS, "a record")
    records: list[Record] = [{} for _ in range(count)]
    for name, column in columns.items():
        if name == _COUNT:
            continue
        for record, value in zip(records, _values(name, column, count), strict=True):
            if value is not None:
                record[name] = value
    return records


def _values(name: str, column: Any, count: int) -> Sequence[Any]:
    if isinstance(column, list):
        if len(column) == count:
            return column
    elif isinstance(column, dict) and column.keys() <= {"v", "i"} and isinstance(column.get("v"), list):
        values, index = column["v"], column.get("i")
        if index is None and len(values) == 1:
            return [values[0]] * count
        numbers = index if isinstance(index, list) and len(index) == count else [-1]
        if all(type(i) is int and 0 <= i < len(values) for i in numbers):
            return [values[i] for i in numbers]
    raise CorruptDataError(f"header: the column {name[:20]!r} does not fit {count} arrays")
