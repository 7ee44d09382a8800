"""Pins and tags of steps. Both keep a step from being removed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from typing import Any

from ..codec.errors import BadArgumentError
from .files import Files, read_sealed, seal
from .manifest import MAX_STEP, Catalog, check_step, unknown

PINS, TAGS = "pins", "tags"
_PIN = re.compile("[0-9]{12}")
_TAG = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")


def check_tag(name: object) -> str:
    """Return a tag's name or raise BadArgumentError; it becomes a file name."""
    if not isinstance(name, str) or not _TAG.fullmatch(name):
        raise BadArgumentError(
            f"a tag is 1 to 100 letters, digits, '_', '.' or '-' and begins with a letter or '_'; not {name!r:.120}"
        )
    return name


def pins(files: Files) -> set[int]:
    """Return the pinned steps."""
    return {int(name) for name in files.list(PINS) if _PIN.fullmatch(name)}


def pin_name(step: int) -> str:
    """Return the name of the file that pins a step."""
    return f"{PINS}/{step:012d}"


def tag_name(name: str) -> str:
    """Return the name of the file of a tag."""
    return f"{TAGS}/{name}.json"


def tag_data(step: int) -> bytes:
    """Return the contents of the file of a tag."""
    return seal({"step": step})


def tags(files: Files) -> dict[str, int]:
    """Return tag -> step, by name.

    Raises:
        CorruptDataError: one cannot be read, so the step that it protects is unknown.
    """
    steps = ((name, read_tag(files, name)) for name in _names(files))
    return {name: step for name, step in steps if step is not None}


def read_tag(files: Files, name: str) -> int | None:
    """Return the step of a tag, or None."""
    return read_sealed(files, tag_name(name), _step_of, "a tag", f"untag {name!r}")


def read_file(files: Files, file: str) -> int | None:
    """Return the step of the tag that a file holds; None for other files."""
    return read_tag(files, file.removesuffix(".json")) if _is_tag(file) else None


def copy_pins(source: Files, target: Files, chosen: Collection[int]) -> None:
    """Pin in the target the steps that are pinned in the source."""
    for step in sorted(pins(source).intersection(chosen)):
        target.write(pin_name(step), b"")


def copy_tags(source: Files, target: Files, chosen: Collection[int]) -> None:
    """Give steps in the target the tags that they have in the source."""
    for name, step in tags(source).items():
        if step in chosen:
            target.write(tag_name(name), tag_data(step))


def check_alike(files: Files, names: Collection[str]) -> None:
    """Raise BadArgumentError if a new tag differs from another by case only."""
    existing = _names(files)
    for name in set(names).difference(existing):
        for other in (*existing, *names):
            if other != name and other.lower() == name.lower():
                raise BadArgumentError(
                    f"tag {name!r}: {other!r} exists, which is the same file on disks that ignore case; untag it first"
                )


def step_number(catalog: Catalog, step: object) -> int:
    """Return the step number for a number or tag, which must exist.

    Raises:
        BadArgumentError: it does not exist.
        CorruptDataError: the tag cannot be read.
    """
    steps, number = catalog.steps(), None
    with contextlib.suppress(BadArgumentError):
        number = read_tag(catalog.files, check_tag(step)) if isinstance(step, str) else check_step(step)
    if number is None or number not in steps:
        kind = "tag" if isinstance(step, str) and number is not None else "step"
        raise unknown(catalog.files, f"{kind} {step!r}", steps)
    return number


def protected(files: Files) -> set[int]:
    """Return the steps that are pinned or tagged.

    Raises:
        CorruptDataError: as `tags`.
    """
    return pins(files) | set(tags(files).values())


def _is_tag(file: str) -> bool:
    return file.endswith(".json") and _TAG.fullmatch(file.removesuffix(".json")) is not None


def _names(files: Files) -> list[str]:
    """Return the names of all tags, readable or not."""
    return [file.removesuffix(".json") for file in files.list(TAGS) if _is_tag(file)]


def _step_of(fields: dict[str, Any]) -> int:
    step = fields["step"]
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise ValueError(f"step {step!s:.40}")
    return step
