"""Follow the published versions of a model, in place."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...codec.checkpoint import Checkpoint
from ...codec.errors import BadArgumentError, CorruptDataError, MissingParentError, NewerFormatError
from ...codec.records import ArrayRecord
from ...codec.state.leaves import LeafSpec, NpArray
from ...kernels.backend.arguments import integer
from ...store.files import Files, StoreWarning
from ...store.urls import opened
from .layout import LARGEST, Version, version_name, version_of
from .patches import Patch, of_one, stage, write
from .tensors import Part, check_dense, hash_of, host_bytes, parts_of, sharing, spec_of, state_hash


@dataclass(frozen=True, slots=True)
class Staged:
    """Result of the last update.

    Args:
        version: that the model was brought to.
        links: files that were read for it.
        nbytes: their size.
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
            later. DTensors take their local part, and need versions published with `sliced=True`.
        select: `{name: (published name, (slice, ...))}` for tensors that are a slice of a published one, as in tensor-
            and expert-parallel engines; needs `sliced=True`. Default: names are equal and tensors whole.

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
    ) -> None:
        self._files: Files = opened(url)
        self._model, self._select = model, select
        self._updating = threading.Lock()
        self._turn = 0
        self._parts = self._bound()
        self._shared = sharing(self._parts)
        if _places(self._parts) != _places(self._bound()):
            raise BadArgumentError("model: state_dict() returns copies of its tensors, so that it cannot be updated")
        self._at: Version | None = self._recognised()
        self._held = "" if self._at is None else self._at.state
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

    def update(
        self,
        *,
        version: int | None = None,
        lock: AbstractContextManager[Any] | None = None,
        verify: bool = True,
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
        with self._updating:
            self._turn += 1
            found = self._stage(version, verify)
            if found is not None:
                self._commit(*found, lock)
            return self.version

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
        with self._updating:
            self._turn += 1
            turn, found = self._turn, self._stage(version, verify)
            if found is None:
                return
            reached, patches, report = found
            self._at = None
        for patch in patches:
            for positions, values in of_one(self._parts[patch.name].tensor, [patch]):
                yield patch.name, positions, values
        with self._updating:
            if turn == self._turn:  # no other update since
                self._reached(reached, report)

    def _versions(self) -> list[int]:
        found = (version_of(f"versions/{name.rsplit('/', 1)[-1]}") for name in self._files.list("versions"))
        return [v for v in found if v is not None]

    def _read(self, version: int, problems: list[Exception] | None = None) -> Version | None:
        """Read a version's JSON file; None if it is missing, damaged or of a newer format.

        Args:
            version: its number.
            problems: gets the reason if it cannot be read.
        """
        problem: Exception
        try:
            return Version.from_bytes(self._files.read(version_name(version)), version)
        except NewerFormatError as e:
            problem = e
        except (OSError, CorruptDataError):
            problem = CorruptDataError(f"version {version} is missing or damaged")
        if problems is not None:
            problems.append(problem)
        return None

    def _bound(self) -> dict[str, Part]:
        """Return the model's tensors as they are now."""
        model = self._model
        tensors = model.state_dict(keep_vars=True) if isinstance(model, torch.nn.Module) else model
        tensors = {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}
        if not tensors:
            raise BadArgumentError("model has no tensors")
        check_dense(tensors, "model")
        parts = parts_of(tensors, self._select)
        for name, part in parts.items():
            if not part.tensor.is_contiguous() or part.tensor.is_conj() or part.tensor.is_neg():
                how = "lazily conjugated or negated" if part.tensor.is_contiguous() else "not contiguous"
                raise BadArgumentError(f"model: {name} is {how}, with strides {part.tensor.stride()}")
        return parts

    def _hash(self) -> str:
        return state_hash({name: hash_of(spec_of(p.tensor), host_bytes(p.tensor)) for name, p in self._parts.items()})

    def _is_whole(self) -> bool:
        return all(part.where is None for part in self._parts.values())

    def _recognised(self, mine: str | None = None) -> Version | None:
        """Return the published version that the model holds, by hash; None for slices."""
        if not self._is_whole():
            return None
        versions = sorted(self._versions(), reverse=True)
        if not versions:
            return None
        mine = self._hash() if mine is None else mine
        read = (self._read(v) for v in versions)
        return next((v for v in read if v is not None and v.state == mine), None)

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
            self._shared = sharing(parts)
        self._parts = parts
        marks = self._versions_of_tensors()
        if self._at is None or (marks == self._marks and not verify):
            return
        mine = self._hash()
        if mine != self._held:
            self._at, self._held = self._recognised(mine), mine
        self._marks = marks

    def _stage(self, wanted: int | None, verify: bool) -> tuple[Version, list[Patch], Staged] | None:
        """Return the version to reach and its patches; None if the model already holds it."""
        wanted = None if wanted is None else integer("version", wanted, 0, LARGEST)
        self._find_changes(verify=False)
        versions = sorted(self._versions(), reverse=True) if wanted is None else [wanted]
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

    def _chains(self, number: int, problems: list[Exception]) -> Iterator[list[tuple[Version, str, int]]]:
        """Ways to a version, the smaller first: deltas from what the model holds, or from a base."""
        deltas: list[tuple[Version, str, int]] = []
        base: list[tuple[Version, str, int]] | None = None
        at: int | None = number
        reached = False
        while at is not None:
            version = self._read(at, problems)
            if version is None:
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
            try:
                ckpt = Checkpoint.from_bytes(data)  # every checksum
            except (CorruptDataError, NewerFormatError) as e:
                raise type(e)(f"{self._files.path(name)}: {e}") from None
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
        self._check_shared(patches)
        staged = time.perf_counter()
        changed = sum(int(patch.values.shape[0]) for patch in patches)
        nbytes = sum(ckpt.nbytes for ckpt in links)
        version = chain[-1][0]
        from_base = not links[0].is_delta
        report = Staged(version.version, len(links), nbytes, changed, fetched - begin, staged - fetched, 0.0, from_base)
        return version, patches, report

    def _records(self, ckpt: Checkpoint, version: Version) -> dict[str, ArrayRecord]:
        """Return the record of each tensor; raise BadArgumentError for any mismatch."""
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

    def _check_shared(self, patches: list[Patch]) -> None:
        """Raise BadArgumentError where tensors that share memory would become different."""
        for first, *others in self._shared:
            expected = [patch for patch in patches if patch.name == first]
            for name in others:
                if not _same([patch for patch in patches if patch.name == name], expected):
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
                    _write(self._parts[patch.name].tensor, patch)
            pause = time.perf_counter() - begin
        self._reached(version, replace(report, pause_seconds=pause))

    def _reached(self, version: Version, report: Staged) -> None:
        self._at, self.last = version, report
        self._held = version.state if self._is_whole() else self._hash()
        self._marks = self._versions_of_tensors()


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


def _places(parts: Mapping[str, Part]) -> dict[str, tuple[int, torch.dtype, torch.Size, torch.device]]:
    """Return the memory address, dtype, shape and device of each tensor."""
    return {name: (p.tensor.data_ptr(), p.tensor.dtype, p.tensor.shape, p.tensor.device) for name, p in parts.items()}


def _same(a: Sequence[Patch], b: Sequence[Patch]) -> bool:
    return [_bits(patch) for patch in a] == [_bits(patch) for patch in b]


def _bits(patch: Patch) -> tuple[int, bytes | None, bytes]:
    return patch.start, None if patch.positions is None else patch.positions.tobytes(), patch.values.tobytes()


def _shown(problems: Sequence[Exception]) -> str:
    return "; ".join(dict.fromkeys(map(str, problems[:5]))) or "no base"
