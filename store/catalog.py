"""The steps of a store: which there are, and committing one.

Nothing here is remembered between calls: another process may save, compact or collect at any time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError, NewerFormatError
from .files import Files, is_damage
from .manifest import MAX_GENERATION, Manifest, manifest_name, parse_name

T = TypeVar("T")
FOLDER = "steps"
_ATTEMPTS = 100


def named(steps: Iterable[int]) -> str:
    """Steps for a message, the lowest ones and the last."""
    found = sorted(steps)
    shown = found if len(found) <= 10 else [*found[:8], "...", found[-1]]
    return f"step{'s' * (len(found) > 1)} {', '.join(map(str, shown))}"


def unknown(files: Files, what: str, steps: Sequence[int]) -> BadArgumentError:
    """That there is no such step or tag, with those that there are."""
    shown = f"it has {'... ' if len(steps) > 10 else ''}{', '.join(map(str, steps[-10:]))}" if steps else "it is empty"
    return BadArgumentError(f"{what} is not in {files.root}; {shown}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A step's manifest as it was found."""

    generation: int
    manifest: Manifest


class Catalog:
    """The folder of manifests."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def generations(self) -> dict[int, list[int]]:
        """Step -> generations of its manifest, ascending (more than one only while one replaces another)."""
        found: dict[int, list[int]] = {}
        for name in self._files.list(FOLDER):
            parsed = parse_name(name)
            if parsed is not None:
                found.setdefault(parsed[0], []).append(parsed[1])
        return {step: sorted(found[step]) for step in sorted(found)}

    def steps(self) -> list[int]:
        """The committed steps, ascending."""
        return list(self.generations())

    def get(self, step: int, generation: int | None = None) -> Entry | None:
        """A step's manifest, of the highest generation unless told; None where there is no such step.

        Raises:
            CorruptDataError, NewerFormatError: it is not readable.
        """
        for _ in range(_ATTEMPTS):
            newest = self.generations().get(step, [None])[-1] if generation is None else generation
            if newest is None:
                return None
            try:
                return Entry(newest, self._read(step, newest))
            except FileNotFoundError:
                # It was replaced, or removed, since the folder was listed.
                generation = None
        raise CorruptDataError(f"step {step}: its manifest is listed but cannot be read")

    def settled(self, step: int, work: Callable[[Entry], T]) -> T:
        """Read a step; once more where its files went because compaction had moved it to others meanwhile.

        Raises:
            MissingParentError: a file of it is gone, or the step itself.
        """
        entry = self.present(step)
        while True:
            try:
                return work(entry)
            except MissingParentError:
                now = self.present(step)
                if now.generation == entry.generation:
                    raise
                entry = now

    def present(self, step: int) -> Entry:
        """As `get`, of a step that was there a moment ago; MissingParentError where it is not any more."""
        entry = self.get(step)
        if entry is None:
            raise MissingParentError(f"step {step}: it was removed while it was read")
        return entry

    def _read(self, step: int, generation: int) -> Manifest:
        try:
            return Manifest.from_bytes(self._files.read(f"{FOLDER}/{manifest_name(step, generation)}"), step)
        except FileNotFoundError:
            raise
        except OSError as e:
            if not is_damage(e, local=self._files.local):
                raise
            raise CorruptDataError(f"step {step}: its manifest cannot be read: {e}") from None

    def all(self) -> dict[int, Entry]:
        """Every step's manifest.

        Raises:
            CorruptDataError, NewerFormatError: one is not readable, so nobody can say what it needs.
        """
        found = ((step, self.get(step, generations[-1])) for step, generations in self.generations().items())
        return {step: entry for step, entry in found if entry is not None}

    def readable(self) -> tuple[dict[int, Entry], dict[int, str]]:
        """Every step's manifest where it is readable, and what is wrong with the others."""
        entries: dict[int, Entry] = {}
        problems: dict[int, str] = {}
        for step, generations in self.generations().items():
            try:
                entry = self.get(step, generations[-1])
            except (CorruptDataError, NewerFormatError) as e:
                problems[step] = str(e)
                continue
            if entry is not None:
                entries[step] = entry
        return entries, problems

    def commit(self, manifest: Manifest) -> Entry:
        """Make a step exist, in the place of whatever it was; one atomic step. Nothing happens where it is the same."""
        known = self.generations().get(manifest.step, [])
        with contextlib.suppress(CorruptDataError, NewerFormatError):
            present = self.get(manifest.step, known[-1]) if known else None
            if present is not None and present.manifest == manifest:
                return present
        while True:
            entry = Entry(known[-1] + 1 if known else 0, manifest)
            if self._create(entry):
                self._forget(manifest.step, known)
                return entry
            known = self.generations().get(manifest.step, [])

    def replace(self, old: Entry, manifest: Manifest) -> Entry | None:
        """Replace a manifest by another of the same step, unless someone else has done so since it was read."""
        known = self.generations().get(manifest.step, [])
        entry = Entry(old.generation + 1, manifest)
        if not known or known[-1] != old.generation or not self._create(entry):
            return None
        self._forget(manifest.step, known)
        return entry

    def _create(self, entry: Entry) -> bool:
        name = manifest_name(entry.manifest.step, entry.generation)
        if entry.generation > MAX_GENERATION:
            # Under a name that no reader takes for a manifest the step would be gone.
            last = self._files.path(f"{FOLDER}/{manifest_name(entry.manifest.step, MAX_GENERATION)}")
            raise CorruptDataError(f"step {entry.manifest.step}: {last} is the last generation there can be; drop it")
        return self._files.create(f"{FOLDER}/{name}", entry.manifest.to_bytes())

    def _forget(self, step: int, generations: list[int]) -> None:
        """Remove generations that a higher one has replaced; what cannot be removed now is garbage.

        Whatever the error: the step is there, and network libraries have some that are no OSError.
        """
        with contextlib.suppress(Exception):
            self._files.remove([f"{FOLDER}/{manifest_name(step, g)}" for g in generations])

    def drop(self, steps: dict[int, list[int]]) -> None:
        """Remove steps with these generations, the highest last: a crash must not bring a former one back.

        Raises:
            CorruptDataError: one is no file.
        """
        for part in (slice(None, -1), slice(-1, None)):
            names = [f"{FOLDER}/{manifest_name(step, n)}" for step, known in steps.items() for n in known[part]]
            try:
                self._files.remove(names)
            except IsADirectoryError as e:
                where = e.filename or self._files.path(FOLDER)
                raise CorruptDataError(f"{where} is a folder in the place of a manifest; remove it by hand") from None
