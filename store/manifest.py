"""Manifests, the small files that make checkpoints exist, and the catalog of a store.

`steps/000000000010.json` is the first one of step 10. When the step is replaced or its chain compacted, the next
generation `steps/000000000010.r1.json` is created and the former removed. The highest one counts, so that a step always
has a manifest, and only one of two writers can create a generation.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from blake3 import blake3

from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError, NewerFormatError
from ..codec.format.bounded_json import loads
from ..kernels.backend.arguments import integer
from .files import Files, check_sum, read_error, seal
from .lock import open_lock

T = TypeVar("T")
STEPS, DATA, FROZEN = "steps", "data", "frozen"
"""Folders of a store: of the manifests, of the data files, and of the store within it that holds its frozen sets."""
VERSION = 3
"""The highest that is known: 1 for steps of one process, 2 for sharded ones, 3 for thinned ones."""
MAX_STEP = 10**12 - 1
MAX_GENERATION = 10**9 - 1
_DATA = re.compile(r"[0-9]{12}-[0-9a-f]{16}\.spt")
_NAME = re.compile(r"([0-9]{12})(?:\.r([1-9][0-9]{0,8}))?\.json")
_HASH = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The properties of a step that a store knows without reading its data.

    Args:
        step: training step.
        file: name of the data file.
        id: content hash of that file.
        identity: the name by which deltas refer to it: `id`, or the identity that the checkpoint had before a rebase.
        nbytes: stored bytes.
        raw_nbytes: bytes of the state.
        parents: data files of the chain below it, the nearest first, the base last; empty for a base. They are named
            here so that a chain stays readable when one of its steps is replaced.
        carried: bytes of the arrays that must be decoded below it first.
        since_base: checkpoints saved since the base, 0 for the base itself.
        base_nbytes: stored bytes of that base.
        spent: stored bytes of all checkpoints saved since it, this one included.
        metric: how good the model is, for retention, or None.
        shards: name and bytes of the data files that several processes wrote for a sharded step, and of the files of
            their parents; `file` is then the index of the arrays. Empty for a step of one process.
        lacks: role and number of the arrays that were left out when the step was thinned; empty for a whole step.
    """

    step: int
    file: str
    id: str
    identity: str
    nbytes: int
    raw_nbytes: int
    parents: tuple[str, ...]
    carried: int
    since_base: int
    base_nbytes: int
    spent: int
    metric: float | None = None
    shards: tuple[tuple[str, int], ...] = ()
    lacks: tuple[tuple[str, int], ...] = ()

    @property
    def chain(self) -> tuple[str, ...]:
        """Data files for decoding this step, its own first."""
        return (self.file, *self.parents)

    @property
    def files(self) -> tuple[str, ...]:
        """All data files that the step needs."""
        return (*self.chain, *(name for name, _ in self.shards))

    @property
    def own_files(self) -> dict[str, int]:
        """Name and bytes of the data files that were written for this step."""
        files = {name: size for name, size in self.shards if name.startswith(f"{self.step:012d}-")}
        return files | {self.file: self.nbytes}

    @property
    def stored_nbytes(self) -> int:
        """Bytes of `own_files`; `nbytes` for a step of one process."""
        return sum(self.own_files.values())

    @property
    def is_delta(self) -> bool:
        """Return whether the step needs files of other steps."""
        return len(self.files) > len(self.own_files)

    @property
    def ratio(self) -> float:
        """`raw_nbytes / stored_nbytes`."""
        return self.raw_nbytes / self.stored_nbytes

    @property
    def restore_cost(self) -> float:
        """Bytes decoded to restore the step, in multiples of its own; 1 for a base."""
        return 1.0 + (self.carried / self.raw_nbytes if self.raw_nbytes else 0.0)

    def to_bytes(self) -> bytes:
        """Return JSON with a checksum."""
        fields = {"version": 2 if self.shards else 3 if self.lacks else 1, **asdict(self)}
        for name in ("shards", "lacks"):
            if table := dict(fields.pop(name)):
                fields[name] = table
        return seal(fields)

    @staticmethod
    def from_bytes(data: bytes, step: int) -> Manifest:
        """Read and check a manifest; a name that could leave the folder is refused."""
        try:
            fields = loads(data)
            version = fields.pop("version")
            if type(version) is int and version > VERSION:
                raise NewerFormatError(
                    f"step {step}: manifest version {str(version)[:20]}; this reader knows up to {VERSION}"
                )
            check_sum(data)
            del fields["checksum"]
            shards, lacks = (tuple(fields.pop(name, {}).items()) for name in ("shards", "lacks"))
            if type(version) is not int or version != (2 if shards else 3 if lacks else 1) or (shards and lacks):
                raise ValueError(f"version {str(version)[:20]!r}")
            parents = tuple(fields.pop("parents"))
            manifest = Manifest(**fields, parents=parents, shards=shards, lacks=lacks)
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise CorruptDataError(f"step {step}: its manifest is malformed: {str(e)[:200]}") from None
        if not manifest._is_sound() or manifest.step != step:
            raise CorruptDataError(f"step {step}: its manifest is malformed")
        return manifest

    def _is_sound(self) -> bool:
        counts = (self.carried, self.since_base, self.base_nbytes, self.spent, *(size for _, size in self.shards))
        return (
            all(type(n) is int and n >= 0 for n in (self.step, self.nbytes, self.raw_nbytes, *counts))
            and self.nbytes > 0
            and all(isinstance(n, str) and _DATA.fullmatch(n) for n in self.files)
            and len(set(self.files)) == len(self.files)
            and all(isinstance(h, str) and _HASH.fullmatch(h) for h in (self.id, self.identity))
            and self.file == data_name(self.step, self.id)
            and all(re.fullmatch("[a-z ]{1,40}", role) and type(n) is int and n > 0 for role, n in self.lacks)
            and (self.metric is None or (type(self.metric) is float and math.isfinite(self.metric)))
        )


def lacking(lacks: Iterable[tuple[str, int]]) -> str:
    """Return what a thinned step lacks (`Manifest.lacks`), for a message.

    Example:
        >>> lacking([("first moment", 12), ("second moment", 1)])
        'it lacks 12 first moments, 1 second moment'
    """
    return "it lacks " + ", ".join(f"{n} {role}{'s' * (n > 1)}" for role, n in lacks)


def check_step(step: Any) -> int:
    """Return a step's number, also a NumPy one, or raise BadArgumentError."""
    return integer("step", step, 0, MAX_STEP)


def check_metric(metric: Any) -> float | None:
    """Return a metric as a float, or raise BadArgumentError."""
    if metric is None:
        return None
    value = math.nan
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        value = float(metric)
    if isinstance(metric, (bool, str)) or not math.isfinite(value):
        raise BadArgumentError(f"metric is {metric!r:.80}; it must be a finite number or None")
    return value


def data_name(step: int, identity: str) -> str:
    """Return the name of a data file, which contains the beginning of its hash."""
    return f"{step:012d}-{identity[:16]}.spt"


def manifest_name(step: int, generation: int) -> str:
    """Return the name of a manifest."""
    return f"{step:012d}.r{generation}.json" if generation else f"{step:012d}.json"


def manifest_path(step: int, generation: int) -> str:
    """Return the path of a manifest, relative to the store."""
    return f"{STEPS}/{manifest_name(step, generation)}"


def parse_name(name: str) -> tuple[int, int] | None:
    """Return the step and generation in a manifest's file name; None for other files."""
    match = _NAME.fullmatch(name)
    return (int(match.group(1)), int(match.group(2) or 0)) if match else None


def is_data(name: str) -> bool:
    """Return whether a name is that of a data file."""
    return _DATA.fullmatch(name) is not None


def is_content(name: str, data: bytes) -> bool:
    """Return whether some bytes are those of the data file of a name."""
    return name.endswith(f"-{blake3(data).hexdigest()[:16]}.spt")


# ---------------------------------------------------------------------------------------------------------- the catalog


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

    @property
    def path(self) -> str:
        """Path of the manifest, relative to the store."""
        return manifest_path(self.manifest.step, self.generation)


_LISTED_FOR = 1.0
"""Seconds after which a save lists the steps again, even if the folder looks unchanged."""
_ATTEMPTS = 100


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
        self._listed = time.monotonic(), self.files.stamp(STEPS)
        names = set(self.files.list(STEPS))
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
        is_recent = stamp is not None and time.monotonic() - when < _LISTED_FOR and self.files.stamp(STEPS) == stamp
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
        if generation is None and known and not self.files.exists(manifest_path(step, known[-1] + 1)):
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
        name, path = manifest_name(step, generation), manifest_path(step, generation)
        stamp = self.files.stamp(path)
        before, manifest = self._parsed.get(name, (None, None))
        if manifest is not None and stamp is not None and stamp == before:
            return manifest
        try:
            manifest = Manifest.from_bytes(self.files.read(path), step)
            self._parsed[name] = stamp, manifest
            return manifest
        except OSError as e:
            raise read_error(self.files, f"step {step}: its manifest", e) from None

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
                self.files.sync([present.path])
                return present
        if self.files.exists(manifest_path(manifest.step, known[-1] + 2 if known else 1)):
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
        if entry.generation > MAX_GENERATION:
            # A name that no reader takes for a manifest would lose the step.
            last = self.files.path(manifest_path(entry.manifest.step, MAX_GENERATION))
            raise CorruptDataError(f"step {entry.manifest.step}: {last} is the last generation there can be; drop it")
        when, stamp = self._listed
        is_current = stamp is not None and self.files.stamp(STEPS) == stamp
        created = self.files.create(entry.path, entry.manifest.to_bytes())
        if created and is_current:
            step = entry.manifest.step
            is_last = not self._known or step > next(reversed(self._known))
            self._known[step] = [*self._known.get(step, []), entry.generation]
            if not is_last:
                self._known = {s: self._known[s] for s in sorted(self._known)}
            self._names.add(manifest_name(step, entry.generation))
            self._listed = when, self.files.stamp(STEPS)
        # All errors are ignored: the step exists, and network libraries have errors that are not an OSError.
        with contextlib.suppress(Exception):
            if created:
                self.files.remove([manifest_path(entry.manifest.step, generation) for generation in replaced])
        return created

    def drop(self, steps: dict[int, list[int]]) -> None:
        """Remove steps with these generations, the highest last, so that a crash restores none.

        Raises:
            CorruptDataError: one is not a file.
        """
        for part in (slice(None, -1), slice(-1, None)):
            names = [manifest_path(step, n) for step, known in steps.items() for n in known[part]]
            try:
                self.files.remove(names)
            except IsADirectoryError as e:
                where = e.filename or self.files.path(STEPS)
                raise CorruptDataError(f"{where} is a folder in the place of a manifest; remove it") from None
