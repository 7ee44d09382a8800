"""Small JSON files with a checksum, so that every altered bit is noticed."""

from __future__ import annotations

import json
from typing import Any

import xxhash

from ..codec.format.bounded_json import loads

_CHECKSUM = b',\n "checksum": "'


def seal(fields: dict[str, Any]) -> bytes:
    """Return the JSON of some fields and its XXH3-128."""
    checksum = xxhash.xxh3_128_hexdigest(_plain(fields))
    return _plain({**fields, "checksum": checksum})


def unseal(data: bytes) -> dict[str, Any]:
    """Return the fields.

    Raises:
        ValueError: the bytes were not made by `seal`, or were altered.
    """
    fields = loads(data)
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    check_sum(data)
    fields.pop("checksum", None)
    return fields


def check_sum(data: bytes) -> None:
    """Raise ValueError unless the checksum at the end is that of the text without it."""
    body, _, checksum = bytes(data).rpartition(_CHECKSUM)
    if checksum != xxhash.xxh3_128_hexdigest(body + b"\n}").encode() + b'"\n}':
        raise ValueError("the checksum does not match")


def _plain(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, indent=1).encode("ascii")
