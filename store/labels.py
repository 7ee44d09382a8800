"""Pins and tags of steps. Both keep a step from being removed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection

from ..codec.errors import BadArgumentError, CorruptDataError
from .catalog import Catalog, unknown
from .checksummed_json import seal, unseal
from .files import Files, is_damage
from .manifest import MAX_STEP, check_step

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


def _names(files: Files) -> list[str]:
    """Return the names of all tags, readable or not."""
    found = (file.removesuffix(".json") for file in files.list(TAGS) if file.endswith(".json"))
    return [name for name in found if _TAG.fullmatch(name)]


def tags(files: Files) -> dict[str, int]:
    """Return tag -> step, by name.

    Raises:
        CorruptDataError: one cannot be read, so the step that it protects is unknown.
    """
    found = ((name, read_tag(files, name)) for name in _names(files))
    return {name: step for name, step in found if step is not None}


def read_tag(files: Files, name: str) -> int | None:
    """Return the step of a tag, or None."""
    path = tag_name(name)
    try:
        fields = unseal(files.read(path))
        if (version := fields.get("version", 1)) != 1:
            raise ValueError(f"its version is {str(version)[:40]}, which this release does not know")
        step = fields["step"]
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise ValueError(f"step {str(step)[:40]}")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, OSError) as e:
        if isinstance(e, OSError) and not is_damage(e, local=files.local):
            raise
        raise CorruptDataError(f"{files.path(path)}: not a tag: {str(e)[:200]}; untag {name!r}") from None
    return step


def copy_pins(source: Files, target: Files, chosen: Collection[int]) -> None:
    """Pin in the target the steps that are pinned in the source."""
    for step in sorted(pins(source).intersection(chosen)):
        target.write(pin_name(step), b"")


def copy_tags(source: Files, target: Files, chosen: Collection[int]) -> None:
    """Give steps in the target the tags that they have in the source."""
    for name, step in tags(source).items():
        if step in chosen:
            target.write(tag_name(name), tag_data(step))


def unreadable(files: Files) -> dict[str, str]:
    """Return path -> reason of the damaged tags."""
    found = {}
    for name in _names(files):
        try:
            read_tag(files, name)
        except CorruptDataError as e:
            found[tag_name(name)] = str(e)
    return found


def check_alike(files: Files, names: Collection[str]) -> None:
    """Raise BadArgumentError if a new tag differs from another by case only."""
    there = _names(files)
    for name in names:
        for other in (*there, *names):
            if name not in there and other != name and other.lower() == name.lower():
                raise BadArgumentError(
                    f"tag {name!r}: {other!r} exists, which is the same file on disks that ignore case; untag it first"
                )


def tag_name(name: str) -> str:
    """Return the name of the file of a tag."""
    return f"{TAGS}/{name}.json"


def tag_data(step: int) -> bytes:
    """Return the contents of the file of a tag."""
    return seal({"step": step})


def meant(files: Files, catalog: Catalog, step: object) -> int:
    """Return the step number for a number or tag, which must exist.

    Raises:
        BadArgumentError: it does not exist.
        CorruptDataError: the tag cannot be read.
    """
    steps = catalog.steps()
    found = step
    with contextlib.suppress(BadArgumentError):
        found = read_tag(files, check_tag(step)) if isinstance(step, str) else check_step(step)
    if type(found) is not int or found not in steps:
        raise unknown(files, f"{'tag' if isinstance(step, str) and type(found) is int else 'step'} {step!r}", steps)
    return found


def protected(files: Files) -> set[int]:
    """Return the steps that are pinned or tagged.

    Raises:
        CorruptDataError: as `tags`.
    """
    return pins(files) | set(tags(files).values())
