"""The number of restores of a run, as one small numbered file per restore."""

from __future__ import annotations

import contextlib
import json
import re
import uuid

from ..codec.errors import CorruptDataError
from ..codec.format.bounded_json import loads
from .files import Files

FOLDER = "restores"
_NAME = re.compile(r"([0-9]{9})\.json")
_MOST = 10**9 - 1
_TRIES = 10


def count(files: Files) -> int:
    """Return the number of restores so far: the highest number."""
    numbers = [int(match.group(1)) for name in files.list(FOLDER) if (match := _NAME.fullmatch(name))]
    return max(numbers, default=0)


def steps(files: Files) -> list[int]:
    """Return the steps that were restored, in order; unreadable records are left out."""
    found = []
    for name in filter(_NAME.fullmatch, files.list(FOLDER)):
        try:
            step = loads(files.read(f"{FOLDER}/{name}"))["step"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if type(step) is int and step >= 0:
            found.append(step)
    return found


def add(files: Files, step: int, known: int) -> int:
    """Count a restore of this step; return the new number of restores."""
    number = max(known, count(files)) + 1
    # The token distinguishes this restore from another of the same step with the same number at the same moment.
    data = json.dumps({"step": step, "token": uuid.uuid4().hex}).encode()
    while not _created(files, _path(files, number), data):
        number += 1
    return number


def copy(source: Files, target: Files, _: object) -> None:
    """Count the source's restores, of all steps, in the target too, each only once."""
    there = set(_records(target))
    number = count(target)
    for data in _records(source):
        if data not in there:
            number += 1
            while not _created(target, _path(target, number), data):
                number += 1


def _records(files: Files) -> list[bytes]:
    """Return the bytes of each record, in order; its token makes each unique."""
    return [files.read(f"{FOLDER}/{name}") for name in sorted(files.list(FOLDER)) if _NAME.fullmatch(name)]


def _path(files: Files, number: int) -> str:
    """Return the path of a record; a number of over nine digits would not be found."""
    if number > _MOST:
        last = files.path(f"{FOLDER}/{_MOST:09d}.json")
        raise CorruptDataError(f"{last}: a run is not restored so often; remove it")
    return f"{FOLDER}/{number:09d}.json"


def _created(files: Files, name: str, data: bytes) -> bool:
    for _ in range(_TRIES - 1):
        # A reader holds no lock, so `gc` may remove the temporary file as garbage, even several times.
        with contextlib.suppress(FileNotFoundError):
            return files.create(name, data)
    return files.create(name, data)
