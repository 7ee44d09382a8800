"""The number of restores of a run, as one small numbered file per restore."""

from __future__ import annotations

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
    return max((int(name[:9]) for name in _names(files)), default=0)


def steps(files: Files) -> list[int]:
    """Return the steps that were restored, in order; unreadable records are left out."""
    restored = []
    for name in _names(files):
        try:
            step = loads(files.read(f"{FOLDER}/{name}"))["step"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if type(step) is int and step >= 0:
            restored.append(step)
    return restored


def add(files: Files, step: int, known: int) -> int:
    """Count a restore of this step; return the new number of restores."""
    # The token distinguishes this restore from another of the same step with the same number at the same moment.
    data = json.dumps({"step": step, "token": uuid.uuid4().hex}).encode()
    return _append(files, max(known, count(files)) + 1, data)


def copy(source: Files, target: Files, _: object) -> None:
    """Count the source's restores, of all steps, in the target too, each only once."""
    there, number = {target.read(f"{FOLDER}/{name}") for name in _names(target)}, count(target)
    for data in [source.read(f"{FOLDER}/{name}") for name in _names(source)]:
        if data not in there:
            number = _append(target, number + 1, data)


def _names(files: Files) -> list[str]:
    return [name for name in files.list(FOLDER) if _NAME.fullmatch(name)]


def _append(files: Files, number: int, data: bytes) -> int:
    """Write a record under the first free number from this one on; return the number."""
    tries = 0
    while number <= _MOST:
        try:
            if files.create(f"{FOLDER}/{number:09d}.json", data):
                return number
            number += 1
        except FileNotFoundError:
            # A reader holds no lock, so `gc` may remove the temporary file as garbage, even several times.
            tries += 1
            if tries == _TRIES:
                raise
    # A number of over nine digits would not be found.
    raise CorruptDataError(f"{files.path(f'{FOLDER}/{_MOST:09d}.json')}: a run is not restored so often; remove it")
