"""How often a run was restored: one small file each, numbered, so that two at once count as two."""

from __future__ import annotations

import contextlib
import json
import re
import uuid

from ..codec.errors import CorruptDataError
from .files import Files

FOLDER = "restores"
_NAME = re.compile(r"([0-9]{9})\.json")
_MOST = 10**9 - 1
_TRIES = 10


def count(files: Files) -> int:
    """Restores so far: the highest number."""
    numbers = [int(match.group(1)) for name in files.list(FOLDER) if (match := _NAME.fullmatch(name))]
    return max(numbers, default=0)


def steps(files: Files) -> list[int]:
    """The steps restored from, in order; a record that cannot be read is left out: the count stands beside."""
    found = []
    for name in filter(_NAME.fullmatch, files.list(FOLDER)):
        try:
            step = json.loads(files.read(f"{FOLDER}/{name}"))["step"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if type(step) is int and step >= 0:
            found.append(step)
    return found


def add(files: Files, step: int, known: int) -> int:
    """Count one more, of this step; returns how many there are then."""
    number = max(known, count(files)) + 1
    # The token tells this restore from another of the same step that takes the same number at the same moment.
    data = json.dumps({"step": step, "token": uuid.uuid4().hex}).encode()
    while not _created(files, _path(files, number), data):
        number += 1
    return number


def copy(source: Files, target: Files) -> None:
    """Count in the target what is counted in the source, each restore once however often it is copied."""
    there = set(_records(target))
    number = count(target)
    for data in _records(source):
        if data not in there:
            number += 1
            while not _created(target, _path(target, number), data):
                number += 1


def _records(files: Files) -> list[bytes]:
    """The bytes of each record, in order: by its token they tell one restore from every other."""
    return [files.read(f"{FOLDER}/{name}") for name in sorted(files.list(FOLDER)) if _NAME.fullmatch(name)]


def _path(files: Files, number: int) -> str:
    """The record of a number; under one that has no name of nine digits nobody would find it."""
    if number > _MOST:
        last = files.path(f"{FOLDER}/{_MOST:09d}.json")
        raise CorruptDataError(f"{last}: no run is restored so often; remove it")
    return f"{FOLDER}/{number:09d}.json"


def _created(files: Files, name: str, data: bytes) -> bool:
    for _ in range(_TRIES - 1):
        # A reader holds no lock, so `gc` may take the file in the making for garbage, and again the next time.
        with contextlib.suppress(FileNotFoundError):
            return files.create(name, data)
    return files.create(name, data)
