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
Fields = dict[str, Any]
_CHECKSUM = b',\n "checksum": "'


def indented(fields: Fields) -> bytes:
    """Return the JSON of some fields, an entry a line."""
    return json.dumps(fields, indent=1).encode("ascii")


def seal(
    fields: Fields,
    dump: Callable[[Fields], bytes] = indented,
    digest: Callable[[bytes], str] = xxhash.xxh3_128_hexdigest,
) -> bytes:
    """Return the JSON of some fields and of its checksum, the last one.

    Args:
        fields: plain values.
        dump: makes JSON of fields.
        digest: makes the checksum of JSON.
    """
    return dump({**fields, "checksum": digest(dump(fields))})


def unseal(data: bytes) -> Fields:
    """Return the fields of what `seal` made by its defaults.

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


def read_sealed(files: Files, name: str, parse: Callable[[Fields], T], what: str, remedy: str) -> T | None:
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
