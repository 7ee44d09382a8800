"""Small JSON files in which every altered bit is noticed: one way to write them, and a checksum."""

from __future__ import annotations

import json
from typing import Any

import xxhash


def seal(fields: dict[str, Any]) -> bytes:
    """The bytes of these fields, and the XXH3-128 of what they would be without it."""
    checksum = xxhash.xxh3_128_hexdigest(_plain(fields))
    return _plain({**fields, "checksum": checksum})


def unseal(data: bytes) -> dict[str, Any]:
    """The fields.

    Raises:
        ValueError: these are no bytes that `seal` makes.
    """
    try:
        fields = json.loads(data)
    except RecursionError as e:
        raise ValueError(str(e)) from None
    if not isinstance(fields, dict):
        raise ValueError("no JSON object")
    fields.pop("checksum", None)
    if seal(fields) != data:
        raise ValueError("the checksum does not match")
    return fields


def _plain(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, indent=1).encode("ascii")
