"""Follow the published versions of a model: in place, or in a copy on the host."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from ...codec.checkpoint import Checkpoint
from ...codec.errors import BadArgumentError, CorruptDataError, MissingParentError, NewerFormatError
from ...codec.format.ranged import Ranged
from ...codec.state.leaves import LeafSpec, NpArray, check_memory
from ...kernels.backend.arguments import integer
from ...store.files import Files, StoreWarning
from ...store.urls import opened
from . import layout, tensors
from .layout import LARGEST, Keys, Shard, ShardFile, Version
from .tensors import Part, Patch, Stored

_SMALL = 1 << 20
"""Bytes of a file that is read at once."""
_MOST_KNOWN = 8
"""Versions whose files are kept in memory."""
Link = tuple[Version, bool]
"""A version of a chain, and whether its base is read."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Result of the last update.

    Args:
        version: that the model was brought to.
        links: versions that were read for it.
        nbytes: bytes that were read of their files.
        changed: elements that were written.
        fetch_seconds: time to read and check the files.
        stage_seconds: time to find positions and values.
        pause_seconds: time in which the model was written, with the lock held.
        from_base: whether the first file was a base.
    """

    version: int
    links: int
    nbytes: int
    changed: int
    fetch_seconds: float
    stage_seconds: float
    pause_seconds: float
    from_base: bool

    @property
    def prepare_seconds(self) -> float:
        """Time before the pause, in which the model can serve."""
        return self.fetch_seconds + self.stage_seconds


Ready = tuple[Version, list[Patch], Staged]
"""A version to reach, the changes to it, and a report."""


class Subscriber:
    """Bring a model to the newest published version, in place, again and again.

    Deltas are applied to the model's own tensors, so that no copy of it is kept. The tensors are hashed at the start
    and before each delta: a model that holds a published version is updated by deltas, any other by a base. Everything
    is read, checked and staged before the first byte of the model changes; an update that fails does not change the
    model.

    Updates from several threads run one after another. Other threads may run the model during an update if they hold
    `lock` while they do.

    Args:
        url: the URL of the `Publisher`.
        model: a module, or a mapping from names to tensors, contiguous, on any device. Its tensors may be replaced
            later. DTensors take their local part.
        select: `{name: (published name, (slice, ...))}` for tensors that are a slice of a published one, as in tensor-
            and expert-parallel engines. Default: names are equal and tensors whole. A slice that cuts through what a
            rank of the trainer holds needs versions published with `sliced=True`.
        key: Ed25519 public key, 32 bytes or of the package `cryptography`; versions that it did not sign are refused.

    Raises:
        BadArgumentError: a model without tensors, with tensors that are not contiguous or overlap in part, whose
            `state_dict` returns copies; or a selection that does not fit it.

    Example: see `Publisher`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        select: Mapping[str, tuple[str, Sequence[slice]]] | None = None,
        key: Any = None,
    ) -> None:
        self._files: Files = opened(url)
        self._keys = key if isinstance(key, Keys) else layout.public_key(key)
        self._known: dict[int, tuple[bytes, Version]] = {}
        self._prepared: Ready | None = None
        self._model, self._select = model, select
        self._updating = threading.Lock()
        self._turn = 0
        self._parts = self._bound()
        self._shared = tensors.sharing(self._parts)
        if _places(self._parts) != _places(self._bound()):
            raise BadArgumentError("model: state_dict() returns copies of its tensors, so that it cannot be updated")
        self._at: Version | None = self._recognised()
        self._held = self._hash_if_needed(self._at)
        self._marks = self._versions_of_tensors()
        self.last: Staged | None = None

    @property
    def version(self) -> int | None:
        """The version that the model holds; None if it is not known."""
        return None if self._at is None else self._at.version

    @property
    def newest(self) -> int | None:
        """The newest version at the URL; None without one."""
        return max(layout.versions_at(self._files), default=None)

    def update(
        self, *, version: int | None = None, lock: AbstractContextManager[Any] | None = None, verify: bool = True
    ) -> int | None:
        """Bring the model to the newest version, or to a given one.

        Args:
            version: the version to reach, newer or older. Receivers that must agree, such as the ranks of one engine,
                are given the same one. Default: the newest that can be read; a warning says why a newer one cannot.
            lock: entered once, while the model is written; may be entered again by the next update (`threading.Lock`).
            verify: hash the model before a delta is applied, so that every other change of the model is found. False:
                only changes that PyTorch counts are found, not changes through `.data`, NumPy or shared memory.

        Returns:
            The version that the model now holds; None if no version exists.

        Raises:
            BadArgumentError: the published tensors are not the model's; the model is as it was.
            CorruptDataError: files are damaged or `version` is missing, and no intact base is there; the model is as it
                was.
            MissingParentError: versions are there, but no base that they lead to; the model is as it was.
            NewerFormatError: only a newer release can read the version; the model is as it was.
        """
        with self._update():
            found = self._stage(version, verify)
            if found is not None:
                self._commit(*found, lock)
            return self.version

    def prepare(self, *, version: int | None = None, verify: bool = True) -> int | None:
        """Read, check and stage a version on the host, while the model serves; `commit` writes it.

        Args:
            version: as `update` has it.
            verify: as `update` has it.

        Returns:
            The version that `commit` brings the model to; None if no version exists.

        Raises: what `update` raises.
        """
        with self._update():
            self._prepared = self._stage(version, verify)
            return self.version if self._prepared is None else self._prepared[0].version

    def commit(self, *, lock: AbstractContextManager[Any] | None = None) -> int | None:
        """Write the version that was prepared, in one pass; without one, do nothing.

        The model must not have changed since `prepare`; changes that PyTorch counts are found.

        Args:
            lock: as `update` has it.

        Returns:
            The version that the model now holds.

        Raises:
            BadArgumentError: the model has changed since; it stays as it is.
        """
        with self._update() as prepared:
            if prepared is not None:
                self._check_unchanged()
                self._commit(*prepared, lock)
            return self.version

    @contextlib.contextmanager
    def _update(self) -> Iterator[Ready | None]:
        """Let one update run at a time; forget and yield the version that was prepared before."""
        with self._updating:
            self._turn += 1
            prepared, self._prepared = self._prepared, None
            yield prepared

    def _check_unchanged(self) -> None:
        if _places(self._bound()) != _places(self._parts) or self._versions_of_tensors() != self._marks:
            raise BadArgumentError("model: it has changed since the version was prepared")

    def patches(
        self, *, version: int | None = None, verify: bool = True
    ) -> Iterator[tuple[str, NpArray, torch.Tensor]]:
        """Yield the changes to a version, for an engine that applies them itself.

        The caller applies each change to the model's tensors; this method writes nothing. When the iterator ends, the
        model counts as holding the new version; if it is stopped before, the next update begins with a base.

        Args:
            version: as `update` has it.
            verify: as `update` has it.

        Yields:
            (name, int64 flat positions in the model's tensor, ascending; values, as many, of the tensor's dtype, on the
            host). A tensor may come more than once, each time with higher positions.

        Raises: what `update` raises.
        """
        with self._update():
            turn, found = self._turn, self._stage(version, verify)
            if found is None:
                return
            reached, patches, report = found
            self._at = None
        for patch in patches:
            for positions, values in tensors.of_one(self._parts[patch.name].tensor, [patch]):
                yield patch.name, positions, values
        with self._updating:
            if turn == self._turn:  # no other update since
                self._reached(reached, report)

    def _read(self, version: int, problems: list[Exception] | None = None) -> Version | None:
        """Read a version's JSON file; None if it cannot be read, or is not signed by the key.

        Args:
            version: its number.
            problems: gets the reason if it cannot be read.
        """
        problem: Exception
        try:
            data = self._files.read(layout.version_name(version))
            known = self._known.get(version)
            if known is None or known[0] != data:
                known = self._known[version] = data, Version.from_bytes(data, version, self._keys)
            return known[1]
        except (NewerFormatError, CorruptDataError) as e:
            problem = e
        except OSError:
            problem = CorruptDataError(f"version {version} is missing or damaged")
        if problems is not None:
            problems.append(problem)
        return None

    def _bound(self) -> dict[str, Part]:
        """Return the model's tensors as they are now."""
        model = self._model
        state = model.state_dict(keep_vars=True) if isinstance(model, torch.nn.Module) else model
        own = {name: t for name, t in state.items() if isinstance(t, torch.Tensor)}
        if not own:
            raise BadArgumentError("model has no tensors")
        tensors.check_dense(own, "model")
        parts = tensors.parts_of(own, self._select)
        for name, part in parts.items():
            if not part.tensor.is_contiguous() or part.tensor.is_conj() or part.tensor.is_neg():
                how = "lazily conjugated or negated" if part.tensor.is_contiguous() else "not contiguous"
                raise BadArgumentError(f"model: {name} is {how}, with strides {part.tensor.stride()}")
        return parts

    def _hash(self) -> str:
        """Return a hash of the model's parts; of whole tensors, that of a version of whole shards."""
        shards = []
        for part in self._parts.values():
            spec = tensors.spec_of(part.tensor)
            digest = tensors.hash_of(spec, tensors.host_bytes(part.tensor))
            shards.append(Shard(part.name, spec.dtype, spec.shape, layout.whole(spec.shape), digest))
        return layout.state_hash(shards)

    def _hash_if_needed(self, at: Version | None) -> str:
        """Return the hash of the model if the hashes of a version do not determine it."""
        return "" if at is None or self._covered(at) else self._hash()

    def _covered(self, version: Version) -> bool:
        """Return whether all shards of a version that meet the model are inside its tensors."""
        return all(layout.is_inside(shard.where, part.region) for shard, part in self._meeting(version.shards))

    def _meeting(self, shards: Sequence[Shard]) -> Iterator[tuple[Shard, Part]]:
        """Yield shards with the parts of the model that they meet."""
        parts: dict[str, list[Part]] = {}
        for part in self._parts.values():
            parts.setdefault(part.source, []).append(part)
        for shard in shards:
            for part in parts.get(shard.name, ()):
                if len(part.region) == len(shard.where) and layout.meets(shard.where, part.region):
                    yield shard, part

    def _is_held(self, version: Version, hashes: dict[Any, str]) -> bool:
        """Return whether the model has the bits of a version, whose shards are inside its tensors.

        Args:
            version: what to compare with.
            hashes: of parts of the model, kept between calls.
        """
        try:
            self._check_fits(version, self._parts)
        except BadArgumentError:
            return False
        for shard, part in self._meeting(version.shards):
            key = part.name, shard.where
            if key not in hashes:
                hashes[key] = tensors.hash_of(shard.spec, tensors.crop(part, shard.where))
            if hashes[key] != shard.hash:
                return False
        return True

    def _recognised(self) -> Version | None:
        """Return the published version that the model holds, by hashes; None if it cuts shards."""
        hashes: dict[Any, str] = {}
        read = (self._read(v) for v in reversed(layout.versions_at(self._files)))
        return next((v for v in read if v is not None and self._covered(v) and self._is_held(v, hashes)), None)

    def _versions_of_tensors(self) -> dict[str, tuple[int, int]]:
        """Return values that differ after a tensor is written to or its memory is replaced."""
        return {
            name: (0 if part.tensor.is_inference() else part.tensor._version, part.tensor.data_ptr())
            for name, part in self._parts.items()
        }

    def _find_changes(self, verify: bool) -> None:
        """Check whether the model still holds the version of the last update."""
        parts = self._bound()
        if _places(parts) != _places(self._parts):  # tensors were replaced, as by load_state_dict(assign=True)
            self._shared = tensors.sharing(parts)
        self._parts = parts
        marks = self._versions_of_tensors()
        if self._at is None or (marks == self._marks and not verify):
            self._marks = marks
            return
        same = self._is_held(self._at, {}) if self._held == "" else self._hash() == self._held
        if not same:
            self._at = self._recognised()
            self._held = self._hash_if_needed(self._at)
        self._marks = marks

    def _stage(self, wanted: int | None, verify: bool) -> Ready | None:
        """Return the version to reach and its patches; None if the model already holds it."""
        wanted = None if wanted is None else integer("version", wanted, 0, LARGEST)
        self._find_changes(verify=False)
        versions = layout.versions_at(self._files)[::-1] if wanted is None else [wanted]
        self._known = dict(sorted(self._known.items())[-_MOST_KNOWN:])
        if not versions or self._holds(versions[0]):
            return None
        if verify:
            self._find_changes(verify=True)
            if self._holds(versions[0]):
                return None
        problems: list[Exception] = []
        for number in versions:
            if wanted is None and self._at is not None and number <= self._at.version and self._is_there(self._at):
                break
            for chain in self._chains(number, problems):
                try:
                    found = self._staged(chain)
                except (OSError, CorruptDataError, NewerFormatError) as e:
                    problems.append(e)
                else:
                    self._warn(versions[0], number, problems)
                    return found
        if self._at is not None and wanted is None:
            self._warn(versions[0], self._at.version, problems)
            return None
        newer = any(isinstance(problem, NewerFormatError) for problem in problems)
        kind = NewerFormatError if newer else CorruptDataError if problems else MissingParentError
        what = "no version can" if wanted is None else f"version {wanted} cannot"
        raise kind(f"{self._files.path('versions')}: {what} be read: {_shown(problems)}")

    def _holds(self, version: int) -> bool:
        return self._at is not None and self._at.version == version and self._is_there(self._at)

    def _warn(self, newest: int, reached: int, problems: list[Exception]) -> None:
        if reached < newest:
            message = f"version {newest} cannot be read, and the model is at {reached}: {_shown(problems)}"
            warnings.warn(f"{self._files.path('versions')}: {message}", StoreWarning, stacklevel=4)

    def _is_there(self, at: Version) -> bool:
        return self._read(at.version) == at

    def _chains(self, number: int, problems: list[Exception]) -> Iterator[list[Link]]:
        """Ways to a version, the smaller first: deltas from what the model holds, or from a base."""
        deltas: list[Link] = []
        base: list[Link] | None = None
        at: int | None = number
        reached = False
        while at is not None:
            version = self._read(at, problems)
            if version is None:
                break
            if self._at is not None and version == self._at:
                reached = True
                break
            if version.has_base and base is None:
                base = [(version, True), *deltas]
            deltas = [(version, False), *deltas]
            at = version.parent
        ways = [way for way in (deltas if reached else None, base) if way is not None]
        yield from sorted(ways, key=lambda way: sum(n for link in way for _, _, n in self._needed(link)))

    def _needed(self, link: Link) -> list[tuple[ShardFile, str, int]]:
        """Return the files of a version that have something of the model, their kinds and sizes."""
        version, base = link
        found = []
        for file in version.files:
            if any(True for _ in self._meeting(file.shards)):
                kind = "b" if base else file.kind
                found.append((file, kind, file.nbytes(kind)))
        return found

    def _staged(self, chain: list[Link]) -> Ready:
        begin = time.perf_counter()
        before, nbytes = self._at, 0
        self._check_fits(chain[-1][0], self._parts)
        links: dict[str, list[list[Stored]]] = {name: [] for name in self._parts}
        for link in chain:
            stored: dict[str, list[Stored]] = {name: [] for name in self._parts}
            for file, kind, _ in self._needed(link):
                read, found = self._opened(link[0], file, kind, before)
                nbytes += read
                for name, shard in found:
                    stored[name].append(shard)
            for name, own in stored.items():
                links[name].append(own)
            before = link[0]
        first = {name: _first(links[name]) for name in self._parts}
        for i, (version, _) in enumerate(chain[:-1]):
            self._check_fits(version, {name: part for name, part in self._parts.items() if first[name] <= i})
        fetched = time.perf_counter()
        patches = [
            patch
            for name, part in self._parts.items()
            if part.tensor.numel()
            for patch in tensors.stage(part, links[name][first[name] :])
        ]
        self._check_shared(patches)
        staged = time.perf_counter()
        changed = sum(int(patch.values.shape[0]) for patch in patches)
        version, seconds = chain[-1][0], (fetched - begin, staged - fetched)
        report = Staged(version.version, len(chain), nbytes, changed, *seconds, 0.0, chain[0][1])
        return version, patches, report

    def _opened(
        self, version: Version, file: ShardFile, kind: str, before: Version | None
    ) -> tuple[int, list[tuple[str, Stored]]]:
        """Read the shards of a file that the model needs; return bytes, and tensors with shards."""
        identity, size = file.id(kind) or "", file.nbytes(kind)
        name = layout.data_name(version.version, kind, identity)
        inside = [shard for shard, part in self._meeting(file.shards) if layout.is_inside(shard.where, part.region)]
        is_part = size > _SMALL and self._keys.accepts is None and len(inside) < len(file.shards)
        data: bytes | Ranged = b""
        try:
            if is_part:
                data = Ranged(size, lambda start, stop: self._files.read_range(name, start, stop))
                ckpt = Checkpoint(data, None, identity)
            else:
                data = self._files.read(name)
                ckpt = Checkpoint.from_bytes(data)  # every checksum
                if len(data) != size or not ckpt.id.startswith(identity):
                    raise CorruptDataError(f"not the file that version {version.version} names")
            if kind == "d" and (before is None or ckpt.parent_id != before.state * 2):
                raise CorruptDataError("not a delta against the version before it")
            if (kind == "d") != ckpt.is_delta:
                raise CorruptDataError(f"not what version {version.version} says of it")
            if [shard.spec for shard in file.shards] != [record.spec for record in ckpt.records]:
                raise CorruptDataError(f"its arrays are not the shards of version {version.version}")
            records = {s.key: record for s, record in zip(file.shards, ckpt.records, strict=True)}
            found = [
                (part.name, part, Stored(ckpt, records[shard.key], shard.where))
                for shard, part in self._meeting(file.shards)
            ]
            ckpt.fetch((stored.record, stored.needed(part.region)) for _, part, stored in found)
        except (CorruptDataError, NewerFormatError) as e:
            raise type(e)(f"{self._files.path(name)}: {e}") from None
        read = data.fetched if isinstance(data, Ranged) else len(data)
        return read, [(part_name, stored) for part_name, _, stored in found]

    def _check_fits(self, version: Version, parts: Mapping[str, Part]) -> None:
        """Raise BadArgumentError where the tensors of a version are not those of the model."""
        published = {shard.name: (shard.dtype, shard.shape) for shard in version.shards}
        lines = []
        for name, part in parts.items():
            own, (dtype, shape) = tensors.spec_of(part.tensor), published.get(part.source, ("", ()))
            if not dtype:
                lines.append(f"{part.source}: not published")
            elif dtype != own.dtype or not _fits(part, shape):
                lines.append(f"{name}: {dtype} {shape} is published, {own.dtype} {own.shape} is here")
        for shard, part in self._meeting(version.shards) if not version.sliced and not lines else ():
            if part.name in parts and not layout.is_inside(shard.where, part.region):
                lines.append(
                    f"{part.name}: a slice of {shard.label} is here, and version {version.version} was not published "
                    "with sliced=True"
                )
        if parts is self._parts and all(part.where is None for part in parts.values()):
            sources = {part.source for part in parts.values()}
            lines += [f"{path}: not in the model" for path in published if path not in sources]
        if lines:
            shown = "\n  ".join(lines[:20])
            raise BadArgumentError(f"version {version.version} does not fit the model; nothing was changed\n  {shown}")

    def _check_shared(self, patches: list[Patch]) -> None:
        """Raise BadArgumentError where tensors that share memory would become different."""
        for first, *others in self._shared:
            expected = [patch for patch in patches if patch.name == first]
            for name in others:
                if not _same(self._parts[name].tensor, [patch for patch in patches if patch.name == name], expected):
                    raise BadArgumentError(
                        f"{first} and {name} share memory in the model, but the published ones differ"
                    )

    def _commit(
        self, version: Version, patches: list[Patch], report: Staged, lock: AbstractContextManager[Any] | None
    ) -> None:
        self._at = None  # should this stop half way, the next update begins from a base
        with contextlib.nullcontext() if lock is None else lock:
            begin = time.perf_counter()
            with torch.no_grad():
                for patch in patches:
                    tensors.write(self._parts[patch.name].tensor, patch)
            pause = time.perf_counter() - begin
        self._reached(version, replace(report, pause_seconds=pause))

    def _reached(self, version: Version, report: Staged) -> None:
        self._at, self.last = version, report
        self._held = self._hash_if_needed(version)
        self._marks = self._versions_of_tensors()


def _first(links: Sequence[Sequence[Stored]]) -> int:
    """Return the last version that stores a tensor whole; earlier ones are not needed."""
    whole = (i for i, link in enumerate(links) if not any(shard.ckpt.is_delta for shard in link))
    return max(whole, default=0)


def _fits(part: Part, shape: tuple[int, ...]) -> bool:
    """Return whether a part can be of a published tensor of this shape."""
    if part.where is None:
        return shape == tuple(part.tensor.shape)
    begins = all(at >= 0 for at, _ in part.where)
    return begins and len(shape) == len(part.where) and layout.is_inside(part.where, layout.whole(shape))


def _places(parts: Mapping[str, Part]) -> dict[str, tuple[int, torch.dtype, torch.Size, torch.device]]:
    """Return the memory address, dtype, shape and device of each tensor."""
    return {name: (p.tensor.data_ptr(), p.tensor.dtype, p.tensor.shape, p.tensor.device) for name, p in parts.items()}


def _same(tensor: torch.Tensor, a: Sequence[Patch], b: Sequence[Patch]) -> bool:
    """Return whether patches, perhaps of different shards, have the same effect on a tensor."""
    if [_bits(patch) for patch in a] == [_bits(patch) for patch in b]:
        return True
    first, second = (tensors.host_bytes(tensor).copy() for _ in (a, b))
    for copy, patches in ((first, a), (second, b)):
        for patch in patches:
            tensors.write(torch.from_numpy(copy).view(tensor.dtype), patch)
    return np.array_equal(first, second)


def _bits(patch: Patch) -> tuple[int, bytes | None, bytes]:
    return patch.start, None if patch.positions is None else patch.positions.tobytes(), patch.values.tobytes()


def _shown(problems: Sequence[Exception]) -> str:
    return "; ".join(dict.fromkeys(map(str, problems[:5]))) or "no base"


def published_tensors(url: str | os.PathLike[str], key: Any = None) -> dict[str, torch.Tensor]:
    """Return zeros with the names, dtypes and shapes of the newest version that can be read.

    Args:
        url: the URL of the `Publisher`.
        key: as `Subscriber` has it.

    Raises:
        MissingParentError: no version is there.
        CorruptDataError, NewerFormatError: none of them can be read.
    """
    files = opened(url)
    keys, problem = layout.public_key(key), None
    for number in layout.versions_at(files)[::-1]:
        try:
            version = Version.from_bytes(files.read(layout.version_name(number)), number, keys)
        except (OSError, CorruptDataError, NewerFormatError) as e:
            problem = e
            continue
        specs = {shard.name: LeafSpec("torch", shard.dtype, shard.shape) for shard in version.shards}
        check_memory(sum(spec.nbytes for spec in specs.values()), f"version {number}")
        dtypes = {name: getattr(torch, spec.dtype) for name, spec in specs.items()}
        return {name: torch.zeros(spec.shape, dtype=dtypes[name], device="cpu") for name, spec in specs.items()}
    if problem is not None:
        kind = NewerFormatError if isinstance(problem, NewerFormatError) else CorruptDataError
        raise kind(f"{files.path('versions')}: no version can be read: {problem}")
    raise MissingParentError(f"{files.path('versions')}: nothing has been published")


class Change(NamedTuple):
    """The changes of one update in one tensor.

    Args:
        name: of the tensor.
        positions: int64, flat, ascending.
        before: the values that were there.
        values: the new ones.
    """

    name: str
    positions: NpArray
    before: torch.Tensor
    values: torch.Tensor


class HostCopy(Subscriber):
    """Host copy of the published tensors, with the changes of each update.

    Args:
        url: the URL of the `Publisher`; it must have a version.
        key: as `Subscriber` has it.
    """

    def __init__(self, url: str | os.PathLike[str], *, key: Any = None) -> None:
        self.tensors = published_tensors(url, key)
        super().__init__(url, self.tensors, key=key)

    def changes(self, version: int | None = None) -> list[Change] | None:
        """Bring the copy to a version, and return all that differs from the version before.

        Returns:
            One entry for each tensor that changed; None where everything may be different: at first, from a base, and
            after an update that failed.
        """
        with self._update():
            before = self.version
            found = self._stage(version, verify=True)
            if found is None:
                return [] if self.version == before else None
            reached, patches, report = found
            followed = before is not None and self.version == before and not report.from_base
            changes = [self._joined(list(own)) for _, own in groupby(patches, attrgetter("name"))] if followed else None
            self._commit(reached, patches, report, None)
            return changes

    def _joined(self, patches: Sequence[Patch]) -> Change:
        name = patches[0].name
        tensor = self.tensors[name]
        parts = list(tensors.of_one(tensor, patches))
        positions = np.concatenate([positions for positions, _ in parts])
        values = torch.cat([values.view(torch.uint8) for _, values in parts]).view(tensor.dtype)
        before = tensors.host_bytes(tensor).reshape(-1, tensor.element_size())[positions]  # torch indexes few dtypes
        return Change(name, positions, torch.from_numpy(before).view(-1).view(tensor.dtype), values)
