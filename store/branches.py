"""Runs that went back: which steps were left behind when an older one was gone on from.

A run that goes back to step 50 of 100 and saves 60 and 70 has two ends. Numbers cannot tell which is meant, nor clocks;
the first save after going back knows, and writes it down, before its step exists:

    left/000000000060-0123456789abcdef.json     {"step": 60, "since": 50, "passed": true, "left": {"80": "...", ...}}

Steps are named with their identities: one that is saved anew is another one and not left behind. `passed` says that
`load()` takes the others first; it is false where a step was saved below others by somebody who had not loaded any,
which may be an old step that is added late. `gc` keeps what it would keep with either end as the newest.
"""

from __future__ import annotations

import contextlib
import re
import uuid
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..codec.errors import CorruptDataError, NewerFormatError
from .catalog import Catalog, named
from .files import Files, is_damage
from .manifest import MAX_STEP, Manifest
from .sealed import seal, unseal

FOLDER = "left"
_NAME = re.compile(r"[0-9]{12}-[0-9a-f]{16}\.json")
_IDENTITY = re.compile("[0-9a-f]{64}")
_WITHOUT = "remove it once you know which steps are wanted: without it load() takes the highest"


@dataclass(frozen=True, slots=True)
class Branch:
    """One time that steps were left behind.

    Args:
        file: name of the record.
        step: the one whose save left them behind.
        since: the one it goes on from; None: nobody knows.
        passed: whether `load()` takes others first.
        left: step -> identity.
    """

    file: str
    step: int
    since: int | None
    passed: bool
    left: Mapping[int, str]

    def is_followed(self, steps: Mapping[int, str]) -> bool:
        """Whether any of these steps (and their identities) is on the way for which the others were left behind."""
        return any(step >= self.step and self.left.get(step) != identity for step, identity in steps.items())

    @property
    def path(self) -> str:
        """Of the record, relative to the store."""
        return f"{FOLDER}/{self.file}"

    def told(self, root: str) -> str:
        """What is said to whoever saves; `root` is where the store is."""
        if self.passed:
            return (
                f"{root}: step {self.step} goes on from step {self.since} and leaves {named(self.left)} behind: "
                "load() passes over them, gc keeps them for now; drop them when they are not needed"
            )
        return (
            f"{root}: step {self.step} is saved below {named(self.left)}: load() still takes the highest; a run "
            "that starts over should have a store of its own, or drop_after(step) first"
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """The step that was loaded, and what was above it then."""

    step: int
    above: frozenset[int]

    @staticmethod
    def of(catalog: Catalog, step: int) -> Loaded:
        """As it is now."""
        return Loaded(step, frozenset(s for s in catalog.steps() if s > step))

    def replayed(self, step: int) -> Loaded:
        """As if a step had been loaded that was saved anew to the bit: so far the run has gone no other way."""
        return Loaded(max(step, self.step), self.above.difference([step]))


def is_there(catalog: Catalog, manifest: Manifest) -> bool:
    """Whether the very same step is."""
    with contextlib.suppress(CorruptDataError, NewerFormatError):
        present = catalog.get(manifest.step)
        return present is not None and present.manifest.identity == manifest.identity
    return False


def going_back(
    catalog: Catalog, steps: Sequence[int], manifest: Manifest, loaded: Loaded | None, told: Collection[int]
) -> Branch | None:
    """A record of the steps above the one that a new step goes on from, if it is to be below any of them.

    Args:
        catalog: of the store.
        steps: those that are there, ascending.
        manifest: of the new step, which is not committed yet, nor there already (`is_there`).
        loaded: what was; None: nothing, or there was a save since.
        told: steps that were left behind and written down already.
    """
    step = manifest.step
    if not steps or step >= steps[-1]:
        return None
    since, beyond = None, frozenset[int]()
    if loaded is not None and loaded.step < step:
        # What another writer has added since is not left behind by this one.
        since, beyond = loaded.step, loaded.above.intersection(steps).difference([step])
    passed = bool(beyond) and max(beyond) > step
    if not passed:
        since, beyond = None, frozenset(s for s in steps if s > step)
    beyond = beyond.difference(told)
    if not beyond:
        return None
    return Branch(f"{step:012d}-{uuid.uuid4().hex[:16]}.json", step, since, passed, _identities(catalog, beyond))


def _identities(catalog: Catalog, steps: Iterable[int]) -> dict[int, str]:
    """Step -> identity, of those of these steps that are there and readable."""
    generations = catalog.generations()
    found: dict[int, str] = {}
    for step in sorted(set(steps) & generations.keys()):
        with contextlib.suppress(CorruptDataError, NewerFormatError):
            entry = catalog.get(step, generations[step][-1])
            if entry is not None:
                found[step] = entry.manifest.identity
    return found


def write(files: Files, record: Branch) -> None:
    """Make a record durable."""
    left = {str(step): identity for step, identity in record.left.items()}
    fields = {"version": 1, "step": record.step, "since": record.since, "passed": record.passed, "left": left}
    files.write(record.path, seal(fields))


def take_back(files: Files, catalog: Catalog, record: Branch, manifest: Manifest) -> None:
    """Remove the record of a save that failed, unless its step is there: an interrupt may come after the commit. Where
    that cannot be seen it stays, as after a crash."""
    with contextlib.suppress(Exception):
        present = catalog.get(manifest.step)
        if present is None or present.manifest.identity != manifest.identity:
            files.remove([record.path])


def read(files: Files) -> list[Branch]:
    """All records.

    Raises:
        CorruptDataError: one is not readable, so nobody can say which end of the run is the newest.
    """
    return [b for name in files.list(FOLDER) if _NAME.fullmatch(name) and (b := _read(files, name)) is not None]


def unreadable(files: Files) -> dict[str, str]:
    """Path -> what is wrong, of the records that are damaged."""
    found = {}
    for name in files.list(FOLDER):
        if _NAME.fullmatch(name):
            try:
                _read(files, name)
            except CorruptDataError as e:
                found[f"{FOLDER}/{name}"] = str(e)
    return found


def _read(files: Files, name: str) -> Branch | None:
    path = files.path(f"{FOLDER}/{name}")
    try:
        fields = unseal(files.read(f"{FOLDER}/{name}"))
        left = {int(step): identity for step, identity in fields["left"].items()}
        found = Branch(name, fields["step"], fields["since"], fields["passed"], left)
        steps = [found.step, *left, *([] if found.since is None else [found.since])]
        sound = (
            fields["version"] == 1
            and type(found.passed) is bool
            and all(type(s) is int and 0 <= s <= MAX_STEP for s in steps)
            and all(isinstance(i, str) and _IDENTITY.fullmatch(i) for i in left.values())
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
        if isinstance(e, OSError) and not is_damage(e, local=files.local):
            raise
        raise CorruptDataError(f"{path}: no record of a run that went back: {e!s:.200}; {_WITHOUT}") from None
    if not sound:
        known = fields["version"] == 1
        why = _WITHOUT if known else f"its version is {fields['version']!r:.40}, which this release does not know"
        raise CorruptDataError(f"{path}: no record of a run that went back; {why}")
    return found


def come_back(files: Files, step: int, identity: str) -> None:
    """Forget that a checkpoint was left behind: it is saved again, the very same one."""
    with contextlib.suppress(CorruptDataError):
        for found in read(files):
            if found.left.get(step) == identity:
                write(files, replace(found, left={s: i for s, i in found.left.items() if s != step}))


def behind(catalog: Catalog, records: Collection[Branch]) -> dict[int, Branch]:
    """Steps that are left behind, each with the record that says so; if several do, one by which `load()` passes it."""
    now = _identities(catalog, (step for record in records for step in record.left)) if records else {}
    return {
        step: record
        for record in sorted(records, key=lambda r: r.passed)
        for step, identity in record.left.items()
        if now.get(step) == identity
    }


def passed_over(files: Files, catalog: Catalog) -> dict[int, Branch]:
    """The steps that `load()` passes over while there are others.

    Raises:
        CorruptDataError: as `read`.
    """
    return {step: record for step, record in behind(catalog, read(files)).items() if record.passed}


def in_order(steps: Iterable[int], behind: Container[int]) -> list[int]:
    """Steps as `load()` tries them: descending, but those last that were left behind."""
    return sorted(steps, key=lambda s: (s not in behind, s), reverse=True)


def not_taken(root: str, step: int, behind: Mapping[int, Branch]) -> str:
    """What is said where `load()` took a step and passed over higher ones; "" where there are none."""
    left = [s for s in behind if s > step]
    if not left or step in behind:
        return ""
    return (
        f"{root}: loaded step {step}; passed over {named(left)}, left behind when the run went back to step "
        f"{behind[max(left)].since}: load one by its number, or drop them"
    )


def copied(files: Files, catalog: Catalog, chosen: Mapping[int, str]) -> list[Branch]:
    """The records that a copy of some steps needs: without any step of the new way it is one from before that.

    Args:
        files: of the store.
        catalog: of the store.
        chosen: identities of the steps.
    """
    records = [r for r in read(files) if any(chosen.get(step) == identity for step, identity in r.left.items())]
    # Where no step of it is in the store either, the run has gone back and saved nothing yet.
    present = _identities(catalog, catalog.steps()) if any(not r.is_followed(chosen) for r in records) else {}
    return [r for r in records if r.is_followed(chosen) or not r.is_followed(present)]


def garbage(records: Collection[Branch], now: Mapping[int, str]) -> list[str]:
    """Paths of the records of which no step is left; `now` are the identities of the steps that are."""
    return [r.path for r in records if not any(now.get(step) == identity for step, identity in r.left.items())]
