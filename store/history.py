"""The history of a run: its restores, and the steps that it left behind (rewinds).

Each restore is one small numbered file.

A run that goes back to step 50 of 100 and saves 60 and 70 has two ends. Neither step numbers nor clocks show which one
is current, but the first save after going back knows, and records it before its step exists:

    left/000000000060-0123456789abcdef.json     {"step": 60, "since": 50, "passed": true, "left": {"80": "...", ...}}

Steps are recorded with their identities: one that is replaced is not left behind any more. `passed` means that `load()`
takes other steps first; it is false if a step was saved below others by a process that had not loaded any, which may be
an old step that is added late. `gc` keeps the steps that it would keep with either end as the newest.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import uuid
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..codec.errors import CorruptDataError, NewerFormatError
from ..codec.format.bounded_json import loads
from .files import Files, read_sealed, seal
from .manifest import MAX_STEP, Catalog, Manifest, named

RESTORES, LEFT = "restores", "left"
_RESTORE = re.compile(r"([0-9]{9})\.json")
_MOST = 10**9 - 1
_TRIES = 10
_REWIND = re.compile(r"[0-9]{12}-[0-9a-f]{16}\.json")
_IDENTITY = re.compile("[0-9a-f]{64}")
_WITHOUT = "remove it once you know which steps are wanted: without it load() takes the highest"


def count_restores(files: Files) -> int:
    """Return the number of restores so far: the highest number."""
    return max((int(name[:9]) for name in _restores(files)), default=0)


def restored_steps(files: Files) -> list[int]:
    """Return the steps that were restored, in order; unreadable records are left out."""
    restored = []
    for name in _restores(files):
        try:
            step = loads(files.read(f"{RESTORES}/{name}"))["step"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if type(step) is int and step >= 0:
            restored.append(step)
    return restored


def add_restore(files: Files, step: int, known: int) -> int:
    """Count a restore of this step; return the new number of restores."""
    # The token distinguishes this restore from another of the same step with the same number at the same moment.
    data = json.dumps({"step": step, "token": uuid.uuid4().hex}).encode()
    return _append(files, max(known, count_restores(files)) + 1, data)


def copy_restores(source: Files, target: Files, _: object) -> None:
    """Count the source's restores, of all steps, in the target too, each only once."""
    there, number = {target.read(f"{RESTORES}/{name}") for name in _restores(target)}, count_restores(target)
    for data in [source.read(f"{RESTORES}/{name}") for name in _restores(source)]:
        if data not in there:
            number = _append(target, number + 1, data)


def _restores(files: Files) -> list[str]:
    return [name for name in files.list(RESTORES) if _RESTORE.fullmatch(name)]


def _append(files: Files, number: int, data: bytes) -> int:
    """Write a record under the first free number from this one on; return the number."""
    tries = 0
    while number <= _MOST:
        try:
            if files.create(f"{RESTORES}/{number:09d}.json", data):
                return number
            number += 1
        except FileNotFoundError:
            # A reader holds no lock, so `gc` may remove the temporary file as garbage, even several times.
            tries += 1
            if tries == _TRIES:
                raise
    # A number of over nine digits would not be found.
    raise CorruptDataError(f"{files.path(f'{RESTORES}/{_MOST:09d}.json')}: a run is not restored so often; remove it")


@dataclass(frozen=True, slots=True)
class Rewind:
    """Record of the steps that one rewind left behind.

    Args:
        file: name of the record.
        step: the one whose save left them behind.
        since: the one that it continues from; None: unknown.
        passed: whether `load()` takes others first.
        left: step -> identity.
    """

    file: str
    step: int
    since: int | None
    passed: bool
    left: Mapping[int, str]

    @staticmethod
    def of(file: str, fields: dict[str, Any]) -> Rewind:
        """Return the record of a file.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: it is malformed.
        """
        left = {int(step): identity for step, identity in fields["left"].items()}
        record = Rewind(file, fields["step"], fields["since"], fields["passed"], left)
        steps = [record.step, *left, *([] if record.since is None else [record.since])]
        if not (
            type(record.passed) is bool
            and all(type(s) is int and 0 <= s <= MAX_STEP for s in steps)
            and all(isinstance(i, str) and _IDENTITY.fullmatch(i) for i in left.values())
        ):
            raise ValueError("it is malformed")
        return record

    def is_followed(self, steps: Mapping[int, str]) -> bool:
        """Return whether any of these steps was saved after the rewind."""
        return any(step >= self.step and self.left.get(step) != identity for step, identity in steps.items())

    @property
    def path(self) -> str:
        """Path of the record, relative to the store."""
        return f"{LEFT}/{self.file}"

    def message(self, root: str) -> str:
        """Return the warning for the save; `root` is the store's location."""
        if self.passed:
            return (
                f"{root}: step {self.step} continues from step {self.since} and leaves {named(self.left)} behind: "
                "load() skips them and gc keeps them for now; drop them when they are not needed"
            )
        return (
            f"{root}: step {self.step} is saved below {named(self.left)}: load() still takes the highest; a run "
            "that starts over should have a store of its own, or drop_after(step) first"
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """The step that was loaded, and the steps above it at that time."""

    step: int
    above: frozenset[int]

    @staticmethod
    def of(catalog: Catalog, step: int) -> Loaded:
        """Return the loaded step with the steps that are above it now."""
        return Loaded(step, frozenset(s for s in catalog.steps() if s > step))

    def replayed(self, step: int) -> Loaded:
        """Return the record after the run saved a step again with the same bits."""
        return Loaded(max(step, self.step), self.above.difference([step]))


def new_record(
    catalog: Catalog, steps: Sequence[int], manifest: Manifest, loaded: Loaded | None, recorded: Collection[int]
) -> Rewind | None:
    """Return a record of the steps that a new step leaves behind, or None.

    Args:
        catalog: of the store.
        steps: the existing ones, ascending.
        manifest: of the new step, which is not committed yet and does not exist yet (`is_there`).
        loaded: the step that was loaded; None: none, or a save came since.
        recorded: steps that were left behind and recorded already.
    """
    step = manifest.step
    if not steps or step >= steps[-1]:
        return None
    since, beyond = None, frozenset[int]()
    if loaded is not None and loaded.step < step:
        # Steps that another writer has added since are not left behind by this save.
        since, beyond = loaded.step, loaded.above.intersection(steps).difference([step])
    passed = bool(beyond) and max(beyond) > step
    if not passed:
        since, beyond = None, frozenset(s for s in steps if s > step)
    beyond = beyond.difference(recorded)
    if not beyond:
        return None
    return Rewind(f"{step:012d}-{uuid.uuid4().hex[:16]}.json", step, since, passed, _identities(catalog, beyond))


def _identities(catalog: Catalog, steps: Iterable[int]) -> dict[int, str]:
    """Return step -> identity for the steps that exist and can be read."""
    generations = catalog.generations()
    identities: dict[int, str] = {}
    for step in sorted(set(steps) & generations.keys()):
        with contextlib.suppress(CorruptDataError, NewerFormatError):
            if (entry := catalog.get(step, generations[step][-1])) is not None:
                identities[step] = entry.manifest.identity
    return identities


def write_rewind(files: Files, record: Rewind) -> None:
    """Make a record durable."""
    fields = {"version": 1, **asdict(record)}
    del fields["file"]
    files.write(record.path, seal(fields))


def undo_rewind(catalog: Catalog, record: Rewind, manifest: Manifest) -> None:
    """Remove the record of a failed save, unless its step exists.

    An interrupt may come after the commit. If that is unknown, the record stays, as after a crash.
    """
    with contextlib.suppress(Exception):
        present = catalog.get(manifest.step)
        if present is None or present.manifest.identity != manifest.identity:
            catalog.files.remove([record.path])


def read_rewinds(files: Files) -> list[Rewind]:
    """Return all records.

    Raises:
        CorruptDataError: one cannot be read, so the newest end of the run is unknown.
    """
    return [record for name in files.list(LEFT) if (record := read_rewind(files, name)) is not None]


def read_rewind(files: Files, name: str) -> Rewind | None:
    """Return the record that a file holds; None for other files."""
    if not _REWIND.fullmatch(name):
        return None
    parse = functools.partial(Rewind.of, name)
    return read_sealed(files, f"{LEFT}/{name}", parse, "a record of a run that went back", _WITHOUT)


def unmark(files: Files, step: int, identity: str) -> None:
    """Remove a checkpoint from the records, because the same one is saved again."""
    with contextlib.suppress(CorruptDataError):
        for record in read_rewinds(files):
            if record.left.get(step) == identity:
                write_rewind(files, replace(record, left={s: i for s, i in record.left.items() if s != step}))


def left_behind(catalog: Catalog, records: Collection[Rewind]) -> dict[int, Rewind]:
    """Return the steps left behind with a record each, if possible one with `passed`."""
    now = _identities(catalog, (step for record in records for step in record.left)) if records else {}
    return {
        step: record
        for record in sorted(records, key=lambda r: r.passed)
        for step, identity in record.left.items()
        if now.get(step) == identity
    }


def skipped_by_load(catalog: Catalog) -> dict[int, Rewind]:
    """Return the steps that `load()` skips while there are others.

    Raises:
        CorruptDataError: as `read_rewinds`.
    """
    return {step: record for step, record in left_behind(catalog, read_rewinds(catalog.files)).items() if record.passed}


def load_order(steps: Iterable[int], behind: Container[int]) -> list[int]:
    """Return steps in the order of `load()`: descending, those left behind last."""
    return sorted(steps, key=lambda s: (s not in behind, s), reverse=True)


def skipped_message(root: str, step: int, behind: Mapping[int, Rewind]) -> str:
    """Return the warning that `load()` skipped higher steps; "" if it did not."""
    left = [s for s in behind if s > step]
    if not left or step in behind:
        return ""
    return (
        f"{root}: loaded step {step}; skipped {named(left)}, left behind when the run went back to step "
        f"{behind[max(left)].since}: load one by its number, or drop them"
    )


def copy_rewinds(source: Files, target: Files, chosen: Mapping[int, str]) -> None:
    """Copy the records that a copy of some steps (number -> identity) needs."""
    catalog = Catalog(source)
    records = [r for r in read_rewinds(source) if not r.left.items().isdisjoint(chosen.items())]
    # If the store has no such step either, the run has gone back and saved nothing yet.
    present = _identities(catalog, catalog.steps()) if any(not r.is_followed(chosen) for r in records) else {}
    for record in records:
        if record.is_followed(chosen) or not record.is_followed(present):
            write_rewind(target, record)


def garbage(records: Collection[Rewind], now: Mapping[int, str]) -> list[str]:
    """Return the paths of records whose steps are all removed; `now`: the other identities."""
    return [r.path for r in records if r.left.items().isdisjoint(now.items())]
