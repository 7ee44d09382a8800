"""Parsing of JSON that others may have written; its values are counted before it is parsed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

MOST_DEPTH = 256
"""Arrays and objects within one another. The parser of C descends in the stack of the machine."""
MOST_CONTAINERS = 1 << 22
"""Arrays and objects. An object with one key takes 184 bytes; an array in a header has about 5 of them."""
MOST_VALUES = 1 << 23
"""Elements of arrays and objects, containers included; the text `"ab"` takes 60 bytes."""
_OTHERS = bytes(set(range(256)) - set(b'"[]{},'))
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1
_BLOCK = 1 << 18


def loads(data: bytes) -> Any:
    """Return the value of a JSON text in UTF-8; NaN and infinities are not JSON.

    Raises:
        ValueError: not JSON, nested too deep, or with too many values.

    Example:
        >>> loads(b'{"a": [1, 2]}')
        {'a': [1, 2]}
        >>> loads(b"[" * 100_000)
        Traceback (most recent call last):
        ...
        ValueError: JSON nested deeper than 256
    """
    check_limits(data)
    try:
        return json.loads(bytes(data).decode("utf-8-sig"), parse_constant=_no_constant)
    except RecursionError as error:  # little of the stack was left
        raise ValueError(str(error)) from None


def check_limits(data: bytes) -> None:
    """Raise ValueError for a JSON text beyond the limits; its syntax is not checked."""
    if len(data) <= min(MOST_CONTAINERS, MOST_VALUES) and data.count(b"[") + data.count(b"{") <= MOST_DEPTH:
        return  # it is too short for more values, and has too few brackets to nest them
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = np.frombuffer(data.translate(None, _OTHERS), np.uint8)
    depth = containers = values = 0
    inside = np.uint8(0)
    for start in range(0, marks.size, _BLOCK):
        block = marks[start : start + _BLOCK]
        # The number of quotes up to each mark, modulo 256: odd within a text.
        quotes = np.cumsum(block == ord('"'), dtype=np.uint8) + inside
        outside = quotes % 2 == 0
        steps = _STEPS[block] * outside
        depths = np.cumsum(steps, dtype=np.int32)
        opened = int(np.count_nonzero(steps > 0))
        containers += opened
        values += opened + int(np.count_nonzero((block == ord(",")) & outside))
        if depth + int(depths.max()) > MOST_DEPTH:
            raise ValueError(f"JSON nested deeper than {MOST_DEPTH}")
        if containers > MOST_CONTAINERS or values > MOST_VALUES:
            raise ValueError(f"JSON of more than {MOST_VALUES} values, or {MOST_CONTAINERS} arrays and objects")
        depth, inside = depth + int(depths[-1]), quotes[-1] % 2


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
