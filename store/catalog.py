"""The catalog of a store: its steps by manifest, and the commit of a step."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError, NewerFormatError
from .files import Files, is_damage
from .lock import open_lock
from .manifest import MAX_GENERATION, Manifest, manifest_name, parse_name

T = TypeVar("T")
FOLDER = "steps"
FROZEN = "frozen"
"""The folder of the store within a store that holds its frozen sets."""
_ATTEMPTS = 100


def named(steps: Iterable[int]) -> str:
    """Return steps for a message: the lowest ones and the last."""
    ascending = sorted(steps)
    shown = ascending if len(ascending) <= 10 else [*ascending[:8], "...", ascending[-1]]
    return f"step{'s' * (len(ascending) > 1)} {', '.join(map(str, shown))}"


def unknown(files: Files, what: str, steps: Sequence[int]) -> BadArgumentError:
    """Return the error for a step or tag that does not exist, with the existing ones."""
    shown = f"it has {'... ' if len(steps) > 10 else ''}{', '.join(map(str, steps[-10:]))}" if steps else "it is empty"
    return BadArgumentError(f"{what} is not in {files.root}; {shown}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A step's manifest and its generation."""

    generation: int
    manifest: Manifest


def manifest_path(entry: Entry) -> str:
    """Return the path of a manifest, relative to the store."""
    return _path(entry.manifest.step, entry.generation)


def _path(step: int, generation: int) -> str:
    return f"{FOLDER}/{manifest_name(step, generation)}"


_LISTED_FOR = 1.0
"""Seconds after which a save lists the steps again, even if the folder looks unchanged."""


class Catalog:
    """The folder of manifests.

    Another process may save, compact or collect at any time. Between two calls this object keeps parsed files only
    together with a stamp that shows whether they are still the same, so that a call reads only changed files.

    Args:
        files: of the store.
        url: of the store, for messages; None: the folder.
    """

    def __init__(self, files: Files, url: str | None = None) -> None:
        self.files, self.lock = files, open_lock(files)
        self.url = files.root if url is None else url
        self._names: set[str] = set()
        self._known: dict[int, list[int]] = {}
        self._parsed: dict[str, tuple[object, Manifest]] = {}
        self._listed: tuple[float, object] = (-math.inf, None)

    def generations(self) -> Mapping[int, list[int]]:
        """Return step -> generations of its manifest, ascending.

        There is more than one only while one replaces another.
        """
        self._listed = time.monotonic(), self.files.stamp(FOLDER)
        names = set(self.files.list(FOLDER))
        if names != self._names:
            known = {step: set(generations) for step, generations in self._known.items()}
            for step, generation in filter(None, map(parse_name, names ^ self._names)):
                known[step] = known.get(step, set()) ^ {generation}
            self._names, self._known = names, {step: sorted(known[step]) for step in sorted(known) if known[step]}
            for name in self._parsed.keys() - names:
                del self._parsed[name]
        return self._known

    def recent(self) -> Mapping[int, list[int]]:
        """Return `generations` as they were at most a second ago, with this object's own commits.

        The folder is not listed again if it is unchanged. For decisions that a concurrent writer could invalidate
        anyway.
        """
        when, stamp = self._listed
        is_recent = stamp is not None and time.monotonic() - when < _LISTED_FOR and self.files.stamp(FOLDER) == stamp
        return self._known if is_recent else self.generations()

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        return list(self.generations())

    def get(self, step: int, generation: int | None = None) -> Entry | None:
        """Return a step's manifest, by default the highest generation; None if it does not exist.

        Raises:
            CorruptDataError, NewerFormatError: it cannot be read.
        """
        known = self._known.get(step)
        # Generations follow each other without a gap: without a next one the last known is the highest, if it exists.
        if generation is None and known and not self.files.exists(_path(step, known[-1] + 1)):
            generation = known[-1]
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
        """Read a step, and read it again if compaction moved it to other files meanwhile.

        Raises:
            MissingParentError: one of its files is missing, or the step itself.
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
        """Return `get` of a step that existed a moment ago, or raise MissingParentError."""
        entry = self.get(step)
        if entry is None:
            raise MissingParentError(f"step {step}: it was removed while it was read")
        return entry

    def _read(self, step: int, generation: int) -> Manifest:
        name = manifest_name(step, generation)
        path = f"{FOLDER}/{name}"
        stamp = self.files.stamp(path)
        before, manifest = self._parsed.get(name, (None, None))
        if manifest is not None and stamp is not None and stamp == before:
            return manifest
        try:
            manifest = Manifest.from_bytes(self.files.read(path), step)
            self._parsed[name] = stamp, manifest
            return manifest
        except OSError as e:
            if isinstance(e, FileNotFoundError) or not is_damage(e, local=self.files.local):
                raise
            raise CorruptDataError(f"step {step}: its manifest cannot be read: {e}") from None

    def all(self) -> dict[int, Entry]:
        """Return the manifest of every step.

        Raises:
            CorruptDataError, NewerFormatError: one cannot be read, so the files that it needs are unknown.
        """
        entries = ((step, self.get(step, generations[-1])) for step, generations in self.generations().items())
        return {step: entry for step, entry in entries if entry is not None}

    def readable(self) -> tuple[dict[int, Entry], dict[int, str]]:
        """Return the manifests that can be read, and the reason for each other step."""
        entries: dict[int, Entry] = {}
        problems: dict[int, str] = {}
        for step, generations in self.generations().items():
            try:
                if (entry := self.get(step, generations[-1])) is not None:
                    entries[step] = entry
            except (CorruptDataError, NewerFormatError) as e:
                problems[step] = str(e)
        return entries, problems

    def commit(self, manifest: Manifest) -> Entry:
        """Create or replace a step in one atomic operation; leave an identical step unchanged."""
        known = self.recent().get(manifest.step, [])
        with contextlib.suppress(CorruptDataError, NewerFormatError):
            present = self.get(manifest.step, known[-1]) if known else None
            if present is not None and present.manifest == manifest:
                # A process may have been killed after it created the file, before that was durable.
                self.files.sync([manifest_path(present)])
                return present
        if self.files.exists(_path(manifest.step, known[-1] + 2 if known else 1)):
            # Another writer has replaced the step since the folder was listed.
            known = self.generations().get(manifest.step, [])
        while True:
            entry = Entry(known[-1] + 1 if known else 0, manifest)
            if self._create(entry, known):
                return entry
            known = self.generations().get(manifest.step, [])

    def replace(self, old: Entry, manifest: Manifest) -> Entry | None:
        """Replace a manifest by another of the same step, unless another process has done so first."""
        known = self.generations().get(manifest.step, [])
        entry = Entry(old.generation + 1, manifest)
        return entry if known and known[-1] == old.generation and self._create(entry, known) else None

    def _create(self, entry: Entry, replaced: list[int]) -> bool:
        """Create a manifest that must not exist; then remove the generations that it replaces."""
        name = manifest_name(entry.manifest.step, entry.generation)
        if entry.generation > MAX_GENERATION:
            # A name that no reader takes for a manifest would lose the step.
            last = self.files.path(_path(entry.manifest.step, MAX_GENERATION))
            raise CorruptDataError(f"step {entry.manifest.step}: {last} is the last generation there can be; drop it")
        when, stamp = self._listed
        is_current = stamp is not None and self.files.stamp(FOLDER) == stamp
        created = self.files.create(f"{FOLDER}/{name}", entry.manifest.to_bytes())
        if created and is_current:
            step = entry.manifest.step
            is_last = not self._known or step > next(reversed(self._known))
            self._known[step] = [*self._known.get(step, []), entry.generation]
            if not is_last:
                self._known = {s: self._known[s] for s in sorted(self._known)}
            self._names.add(name)
            self._listed = when, self.files.stamp(FOLDER)
        # All errors are ignored: the step exists, and network libraries have errors that are not an OSError.
        with contextlib.suppress(Exception):
            if created:
                self.files.remove([_path(entry.manifest.step, generation) for generation in replaced])
        return created

    def drop(self, steps: dict[int, list[int]]) -> None:
        """Remove steps with these generations, the highest last, so that a crash restores none.

        Raises:
            CorruptDataError: one is not a file.
        """
        for part in (slice(None, -1), slice(-1, None)):
            names = [_path(step, n) for step, known in steps.items() for n in known[part]]
            try:
                self.files.remove(names)
            except IsADirectoryError as e:
                where = e.filename or self.files.path(FOLDER)
                raise CorruptDataError(f"{where} is a folder in the place of a manifest; remove it") from None
