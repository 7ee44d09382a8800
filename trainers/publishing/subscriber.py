"""Follow the published versions of a model, in place."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ...codec.checkpoint import Checkpoint
from ...codec.errors import BadArgumentError, CorruptDataError, MissingParentError
from ...codec.records import ArrayRecord
from ...codec.state.leaves import LeafSpec, NpArray
from ...store.files import Files
from ...store.urls import open_files
from .layout import Version, version_name, version_of
from .patches import Patch, of_one, stage, write
from .tensors import Part, hash_of, parts_of, spec_of, state_hash


@dataclass(frozen=True, slots=True)
class Staged:
    """What the last update did.

    Args:
        version: that the model was brought to.
        links: files that were read for it.
        nbytes: their size.
        changed: elements that were written.
        fetch_seconds: time to read and check the files.
        stage_seconds: time to find positions and values.
        pause_seconds: time in which the model was written, with the lock held.
    """

    version: int
    links: int
    nbytes: int
    changed: int
    fetch_seconds: float
    stage_seconds: float
    pause_seconds: float


class Subscriber:
    """Bring a model to the newest published version, in place, again and again.

    The model's own tensors are what deltas are applied to, so that no copy of it is kept. At the start they are hashed:
    where they are a published version, the first update is a delta, else a base. Everything is read, checked and staged
    before the first byte of the model changes; an update that fails leaves the model as it was.

    One thread updates at a time. Other threads may run the model meanwhile if they hold `lock` while they do.

    Args:
        url: the URL of the `Publisher`.
        model: a module, or a mapping from names to tensors, contiguous, on any device. DTensors take their local part,
            and need versions published with `sliced=True`.
        select: `{name: (published name, (slice, ...))}` for tensors that are a slice of a published one, as those of
            tensor- and expert-parallel engines are; needs `sliced=True`. Default: names are equal and tensors whole.

    Raises:
        BadArgumentError: a model without tensors, one that is not contiguous, or a selection that does not fit it.

    Example: see `Publisher`.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        select: Mapping[str, tuple[str, Sequence[slice]]] | None = None,
    ) -> None:
        self._files: Files = open_files(url)
        tensors = dict(model.state_dict(keep_vars=True)) if isinstance(model, torch.nn.Module) else dict(model)
        tensors = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}
        if not tensors:
            raise BadArgumentError("model has no tensors")
        self._parts = parts_of(tensors, select)
        for name, part in self._parts.items():
            if not part.tensor.is_contiguous():
                raise BadArgumentError(f"model: {name} is not contiguous, with strides {part.tensor.stride()}")
        self._at: Version | None = self._recognised()
        self._marks = self._versions_of_tensors()
        self.last: Staged | None = None

    @property
    def version(self) -> int | None:
        """The version that the model holds; None if it is not known."""
        return None if self._at is None else self._at.version

    @property
    def newest(self) -> int | None:
        """The newest version at the URL; None without one."""
        return max(self._versions(), default=None)

    def update(self, *, lock: AbstractContextManager[Any] | None = None, verify: bool = False) -> int | None:
        """Bring the model to the newest version.

        Args:
            lock: entered once, while the model is written; may be entered again by the next update (`threading.Lock`).
            verify: hash the model first, so that every change that others made to it is found. Default: those changes
                are found that PyTorch counts (not those by way of `.data` or of shared memory).

        Returns:
            The version that the model now holds; None where nothing has been published.

        Raises:
            BadArgumentError: the published tensors are not the model's; the model is as it was.
            CorruptDataError: files are damaged, and no intact base is there; the model is as it was.
            MissingParentError: versions are there, but no base that they lead to; the model is as it was.
        """
        found = self._stage(verify)
        if found is None:
            return self.version
        version, patches, report = found
        self._commit(version, patches, report, lock)
        return version.version

    def patches(self, *, verify: bool = False) -> Iterator[tuple[str, NpArray, torch.Tensor]]:
        """Yield the changes to the newest version, for an engine that applies them itself.

        Apply each to the model's tensors; nothing is written here. The model is taken to hold the new version once the
        iterator is at its end; where that stops before, the next update begins from a base.

        Args:
            verify: as `update` has it.

        Yields:
            (name, int64 flat positions, ascending; values, as many, of the tensor's dtype, on the host).

        Raises: what `update` raises.
        """
        found = self._stage(verify)
        if found is None:
            return
        version, patches, report = found
        self._at = None
        for patch in patches:
            for positions, values in of_one(self._parts[patch.name].tensor, [patch]):
                yield patch.name, positions, values
        self._at, self.last = version, report
        self._marks = self._versions_of_tensors()

    def _versions(self) -> list[int]:
        found = (version_of(f"versions/{name.rsplit('/', 1)[-1]}") for name in self._files.list("versions"))
        return [v for v in found if v is not None]

    def _read(self, version: int) -> Version | None:
        """A version's JSON file; None where it is gone or damaged."""
        try:
            return Version.from_bytes(self._files.read(version_name(version)), version)
        except (OSError, CorruptDataError):
            return None

    def _recognised(self) -> Version | None:
        """The published version that the model holds, by hash; None for a model with slices."""
        if any(part.where is not None for part in self._parts.values()):
            return None
        versions = sorted(self._versions(), reverse=True)
        if not versions:
            return None
        mine = state_hash({part.source: hash_of(part.tensor) for part in self._parts.values()})
        read = (self._read(v) for v in versions)
        return next((v for v in read if v is not None and v.state == mine), None)

    def _versions_of_tensors(self) -> dict[str, tuple[int, int]]:
        """What changes when a tensor is written to in place, or its memory replaced."""
        return {
            name: (0 if part.tensor.is_inference() else part.tensor._version, part.tensor.data_ptr())
            for name, part in self._parts.items()
        }

    def _stage(self, verify: bool) -> tuple[Version, list[Patch], Staged] | None:
        """The newest version that can be reached, and what changes; None where the model holds it."""
        if self._at is not None and (verify or self._marks != self._versions_of_tensors()):
            self._at = self._recognised()
            self._marks = self._versions_of_tensors()
        versions = sorted(self._versions(), reverse=True)
        if not versions or (self._at is not None and versions[0] == self._at.version and self._is_there(self._at)):
            return None
        problems: list[str] = []
        for number in versions:
            if self._at is not None and number <= self._at.version and self._is_there(self._at):
                break
            for chain in self._chains(number, problems):
                try:
                    return self._staged(chain)
                except (OSError, CorruptDataError) as e:
                    problems.append(str(e))
        if self._at is not None:
            return None
        kind = CorruptDataError if problems else MissingParentError
        shown = "; ".join(problems[:5]) or "no base"
        raise kind(f"{self._files.path('versions')}: no version can be read: {shown}")

    def _is_there(self, at: Version) -> bool:
        return self._read(at.version) == at

    def _chains(self, number: int, problems: list[str]) -> Iterator[list[tuple[Version, str, int]]]:
        """Ways to a version, the smaller first: deltas from what the model holds, or from a base."""
        deltas: list[tuple[Version, str, int]] = []
        base: list[tuple[Version, str, int]] | None = None
        at: int | None = number
        reached = False
        while at is not None:
            version = self._read(at)
            if version is None:
                problems.append(f"version {at} is missing or damaged")
                break
            if self._at is not None and version == self._at:
                reached = True
                break
            if version.base is not None and base is None:
                base = [(version, version.base, version.base_bytes), *deltas]
            if version.delta is None:
                break
            deltas = [(version, version.delta, version.delta_bytes), *deltas]
            at = version.parent
        ways = [way for way in (deltas if reached else None, base) if way is not None]
        yield from sorted(ways, key=lambda way: sum(size for _, _, size in way))

    def _staged(self, chain: list[tuple[Version, str, int]]) -> tuple[Version, list[Patch], Staged]:
        begin = time.perf_counter()
        links = []
        before = self._at
        for version, name, size in chain:
            data = self._files.read(name)
            ckpt = Checkpoint.from_bytes(data)  # every checksum
            if len(data) != size or ckpt.id[:16] != name[-20:-4]:
                raise CorruptDataError(f"{self._files.path(name)}: not the file that version {version.version} names")
            if ckpt.is_delta and (before is None or ckpt.parent_id != before.state * 2):
                raise CorruptDataError(f"{self._files.path(name)}: not a delta against the version before it")
            links.append(ckpt)
            before = version
        fetched = time.perf_counter()
        records = [self._records(ckpt, version) for ckpt, (version, _, _) in zip(links, chain, strict=True)]
        patches = []
        for name, part in self._parts.items():
            patches += stage(part, [(ckpt, own[name]) for ckpt, own in zip(links, records, strict=True)])
        staged = time.perf_counter()
        changed = sum(int(patch.values.shape[0]) for patch in patches)
        nbytes = sum(ckpt.nbytes for ckpt in links)
        version = chain[-1][0]
        report = Staged(version.version, len(links), nbytes, changed, fetched - begin, staged - fetched, 0.0)
        return version, patches, report

    def _records(self, ckpt: Checkpoint, version: Version) -> dict[str, ArrayRecord]:
        """The record of each tensor; raises BadArgumentError where names, dtypes or shapes differ."""
        published = {record.path: record for record in ckpt.records}
        lines, found = [], {}
        for name, part in self._parts.items():
            record = published.get(part.source)
            if record is None:
                lines.append(f"{part.source}: not published")
                continue
            own = _expected(part, record.spec)
            if own != record.spec:
                lines.append(
                    f"{name}: {record.spec.dtype} {record.spec.shape} is published, {own.dtype} {own.shape} is here"
                )
            elif part.where is not None and not version.sliced:
                lines.append(
                    f"{name}: a slice is here, and version {version.version} was not published with sliced=True"
                )
            found[name] = record
        sources = {part.source for part in self._parts.values()}
        if all(part.where is None for part in self._parts.values()):
            lines += [f"{path}: not in the model" for path in published if path not in sources]
        if lines:
            shown = "\n  ".join(lines[:20])
            raise BadArgumentError(f"version {version.version} does not fit the model; nothing was changed\n  {shown}")
        return found

    def _commit(
        self, version: Version, patches: list[Patch], report: Staged, lock: AbstractContextManager[Any] | None
    ) -> None:
        self._at = None  # should this stop half way, the next update begins from a base
        with contextlib.nullcontext() if lock is None else lock:
            begin = time.perf_counter()
            with torch.no_grad():
                for patch in patches:
                    _write(self._parts[patch.name].tensor, patch)
            pause = time.perf_counter() - begin
        self._at = version
        self._marks = self._versions_of_tensors()
        self.last = Staged(
            *(report.version, report.links, report.nbytes, report.changed),
            *(report.fetch_seconds, report.stage_seconds, pause),
        )


_write: Callable[[torch.Tensor, Patch], None] = write
"""What writes a patch; tests stop it half way."""


def _expected(part: Part, published: LeafSpec) -> LeafSpec:
    """The spec that a published tensor must have; of a slice, a shape that contains it."""
    own = spec_of(part.tensor)
    if part.where is None:
        return own
    inside = len(part.where) == len(published.shape) and all(
        start >= 0 and start + length <= size for (start, length), size in zip(part.where, published.shape, strict=True)
    )
    return LeafSpec("torch", own.dtype, published.shape if inside else own.shape)
