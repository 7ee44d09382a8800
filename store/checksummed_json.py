"""Small JSON files with a checksum, so that every altered bit is noticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import xxhash

from ..codec.errors import CorruptDataError
from ..codec.format.bounded_json import loads
from .files import Files, is_damage

T = TypeVar("T")
_CHECKSUM = b',\n "checksum": "'


def seal(fields: dict[str, Any]) -> bytes:
    """Return the JSON of some fields and its XXH3-128."""
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(fields, indent=1).encode("ascii"))
    return json.dumps({**fields, "checksum": checksum}, indent=1).encode("ascii")


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


def read_sealed(files: Files, name: str, parse: Callable[[dict[str, Any]], T], what: str, remedy: str) -> T | None:
    """Return the contents of a file that `seal` made; None if it does not exist.

    Args:
        files: of the store.
        name: of the file.
        parse: makes the result of the fields, or raises.
        what: what the file should be, for messages.
        remedy: what to do about a damaged one.

    Raises:
        CorruptDataError: it is damaged, or of another version.
    """
    try:
        fields = unseal(files.read(name))
        if (version := fields.get("version", 1)) != 1:
            raise ValueError(f"its version is {version!s:.40}, which this release does not know")
        return parse(fields)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
        if isinstance(e, OSError) and not is_damage(e, local=files.local):
            raise
        raise CorruptDataError(f"{files.path(name)}: not {what}: {e!s:.200}; {remedy}") from None
