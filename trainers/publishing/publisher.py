"""Publish the versions of a model that trains, as exact deltas with a base now and then."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from ...codec.errors import BadArgumentError, CorruptDataError, NewerFormatError, ShrinkpointError
from ...codec.format import container
from ...codec.format.schema import StoredArray, StoredGroup, groups_to_json
from ...codec.state.leaves import NpArray, is_sharded
from ...kernels.backend.arguments import flag, integer, or_none
from ...kernels.backend.arguments import instance as instance_of
from ...store.files import Files
from ...store.urls import opened
from . import layout
from .layout import LARGEST, Shard, ShardFile, Version, Where
from .ranks import FOLDER, Alone, Counted, Grouped, InStore, PublishConflictError, Ranks, one_value, together
from .subscriber import Subscriber
from .tensors import Own, encode, hash_of, host_bytes, sample_hash, shards_of

_FILE = 1 << 28
"""Bytes of the tensors of a file, if it has more than one; they bound a rank's memory."""
Key = tuple[str, Where]


@dataclass(frozen=True, slots=True)
class Published:
    """Result of `Publisher.publish`, of all ranks together.

    Args:
        version: its number.
        nbytes: bytes that receivers of the version before fetch: of the deltas, or of the base without one.
        base_bytes: bytes of the base; 0 where none was written.
        raw_bytes: bytes of the tensors of this rank.
        seconds: time that it took.
    """

    version: int
    nbytes: int
    base_bytes: int
    raw_bytes: int
    seconds: float


class Publisher:
    """Publish a model's versions to a folder or an object store.

    Each rank of the trainer writes its shards, and keeps one copy of them on the host, to compare the next version
    with. After a restart the copy is read back from the URL, so that receivers continue with deltas; if that fails
    (damaged files, other names or shapes), the first version is a base. One thread publishes at a time.

    All ranks call `publish` where the state has DTensors, and with `ranks`; else rank 0 alone publishes.

    Args:
        url: a path or any fsspec URL. Everyone with write access to it decides what receivers serve (docs/security.md).
        base_every: number of versions from one base to the next; a base is also written when the deltas since the last
            one are larger than it. Receivers that are up to date still fetch the delta.
        keep: number of versions that are kept, at least 1; versions that a kept one needs are kept as well.
        sliced: let receivers take parts of what a rank holds; deltas of floats are then up to a third larger.
        ranks: a process group of `torch.distributed` whose ranks publish together: tensors that several of them have
            are divided between them by name. Or `Counted`, for processes without a group. Default: see above.
        dtype: convert floating-point tensors to it, one by one, as masters of float32 to bfloat16.
        key: Ed25519 private key, 32 bytes or of the package `cryptography`, that signs each version.

    Raises:
        BadArgumentError: an argument out of range.

    Example:
        >>> import shrinkpoint as sp
        >>> trained, served = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        >>> publisher = sp.Publisher("memory://doc-publisher")
        >>> publisher.publish(1, trained.state_dict()).version
        1
        >>> subscriber = sp.Subscriber("memory://doc-publisher", served)
        >>> subscriber.update(), torch.equal(served.weight, trained.weight)
        (1, True)

    Source: Check-N-Run, sections 1 and 5.1 (publishing to inference), with exact deltas (BitSnap, section 3.3).
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        base_every: int = 50,
        keep: int = 100,
        sliced: bool = False,
        ranks: Any = None,
        dtype: torch.dtype | None = None,
        key: Any = None,
    ) -> None:
        self._files: Files = opened(url)
        self._base_every = integer("base_every", base_every, 1)
        self._keep = integer("keep", keep, 1)
        self._sliced = flag("sliced", sliced)
        self._dtype = or_none("dtype", dtype, instance_of, torch.dtype)
        if dtype is not None and not dtype.is_floating_point:
            raise BadArgumentError(f"dtype is {dtype}; it must be one of floating point, as the tensors it converts")
        self._url, self._key, self._keys = url, key, layout.private_key(key)
        self._group: Any = InStore(ranks, self._files, self._keys) if isinstance(ranks, Counted) else ranks
        self._token = ranks.run if isinstance(ranks, Counted) else uuid.uuid4().hex
        self._failed = -1
        self._last: Version | None = None
        self._kept: dict[Key, tuple[Shard, NpArray]] = {}
        self._since_base, self._chain_bytes, self._base_bytes = 0, 0, 0
        self._may_read_back = True

    @property
    def newest(self) -> int | None:
        """The newest version at the URL, by any publisher; None without one."""
        return max(layout.versions_at(self._files), default=None)

    def publish(
        self,
        version: int,
        state: Mapping[str, Any],
        *,
        shards: Mapping[str, tuple[str, Sequence[int], Sequence[slice]]] | None = None,
    ) -> Published:
        """Publish a version; durable and visible as a whole when this returns.

        Args:
            version: above every version at the URL; the same as the last one only with the same state, which changes
                nothing.
            state: a state dict of tensors, any device; they must not change until this returns, which is checked.
                Of DTensors the local part is read, and nothing is gathered.
            shards: `{name: (published name, its shape, (slice, ...))}` for plain tensors that are a slice of a
                published one, as in tensor-parallel trainers without DTensors.

        Raises:
            BadArgumentError: the version is not above the newest; the state has values other than tensors, or another
                thread changed it meanwhile; ranks disagree, or their shards overlap or leave a hole.
            PublishConflictError: another publisher has written since.
            ShrinkpointError: another rank failed, or did not arrive.
            OSError: it could not be written; the version then does not exist, and may be published again.
        """
        begin = time.perf_counter()
        version = integer("version", version, 0, LARGEST)
        ranks = self._ranks(state)
        if ranks is None:
            return Published(version, 0, 0, 0, time.perf_counter() - begin)
        if not ranks.collective and version <= self._failed:
            raise BadArgumentError(
                f"version {version} failed, and parts of it may be left; publish it as {self._failed + 1} or higher"
            )
        self._failed = version
        own: list[Own] = []

        def greeting() -> dict[str, Any]:
            own.extend(shards_of(state, shards))
            newest = self._check(version) if ranks.index == 0 or not ranks.collective else None
            plain = {}
            if isinstance(ranks, Grouped):
                plain = {o.name: [o.tensor.nbytes, sample_hash(o.tensor)] for o in own if o.is_plain}
            return {"version": version, "newest": newest, "plain": plain}

        everyone = together(ranks, version, greeting) if ranks.collective else []
        if everyone:
            one_value(everyone, "version", "the version")
        owner = _divided([rank["plain"] for rank in everyone])

        def part() -> dict[str, Any]:
            newest = (everyone or [greeting()])[0]["newest"]
            own[:] = [o for o in own if not o.is_plain or owner.get(o.name, ranks.index) == ranks.index]
            return self._part(version, own, newest)

        made = self._merged(version, together(ranks, version, part))
        if made is not None:
            self._commit(ranks, made, own)
        self._failed = -1
        raw = sum(self._nbytes(o) for o in own)
        nbytes, base = (0, 0) if made is None else (made.nbytes(), made.base_bytes())
        return Published(version, nbytes, base, raw, time.perf_counter() - begin)

    # ------------------------------------------------------------------ the ranks

    def _ranks(self, state: Any) -> Ranks | None:
        """Return with whom this process publishes; None if another one does."""
        distributed = torch.distributed
        if isinstance(self._group, InStore):
            return self._group
        if not (distributed.is_available() and distributed.is_initialized()):
            return Alone()
        if self._group is not None:
            return Grouped(self._group)
        values = state.values() if isinstance(state, Mapping) else ()
        sizes = {t.device_mesh.size() for t in values if is_sharded(t)} - {1}
        if sizes - {distributed.get_world_size()}:  # a gather from all processes might wait for ever
            raise BadArgumentError(
                f"state has DTensors over {min(sizes)} of {distributed.get_world_size()} processes: give the group of "
                "those that publish as ranks="
            )
        if sizes:
            return Grouped(None)
        return Alone() if distributed.get_rank() == 0 else None

    def _check(self, version: int) -> int | None:
        """Return the newest version; raise an error if this one cannot follow it."""
        newest, last = self.newest, self._last
        if last is not None and newest != last.version:
            there = None if newest is None else self._version(newest)
            self._forget()
            if there is None or there.version < last.version or there.publisher != self._token:
                raise PublishConflictError(
                    f"{self._files.path('versions')}: the newest version is {newest}; this publisher wrote "
                    f"{last.version} last: another one writes to the same URL, or its files were removed. The next "
                    "version is a base"
                )
        if newest is not None and version < newest:
            raise self._not_above(version, newest)
        return newest

    def _not_above(self, version: int, newest: int) -> BadArgumentError:
        return BadArgumentError(
            f"version {version} is not above {newest}, the newest at {self._files.path('versions')}; versions ascend, "
            "also after a restart from an older checkpoint (Publisher.newest says where to go on)"
        )

    # ------------------------------------------------------------------ the part of this rank

    def _bytes(self, own: Own) -> NpArray:
        return host_bytes(own.tensor.to(self._dtype_of(own)))

    def _dtype_of(self, own: Own) -> torch.dtype:
        return self._dtype if self._dtype is not None and own.tensor.is_floating_point() else own.tensor.dtype

    def _is_kept(self, own: Own) -> bool:
        """Return whether there is a copy of an earlier version of a shard."""
        kept = self._kept.get(own.key)
        return kept is not None and (kept[0].shape, kept[0].dtype) == (own.shape, self._dtype_name(own))

    def _dtype_name(self, own: Own) -> str:
        return str(self._dtype_of(own)).removeprefix("torch.")

    def _nbytes(self, own: Own) -> int:
        return own.tensor.numel() * self._dtype_of(own).itemsize

    def _shard(self, own: Own, data: NpArray) -> Shard:
        made = Shard(own.name, self._dtype_name(own), own.shape, own.where, "")
        return replace(made, hash=hash_of(made.spec, data))

    def _part(self, version: int, own: list[Own], newest: int | None) -> dict[str, Any]:
        """Write the shards of this rank; return what the version's file needs of them."""
        repeated = version == newest
        said = {"version": version, "publisher": self._token, "sliced": self._sliced, "repeated": repeated}
        if repeated:
            self._check_repeated(version, [self._shard(o, self._bytes(o)) for o in own])
            return {**said, "parent": None, "files": []}
        if self._last is None and self._may_read_back and newest is not None:
            self._read_back(own, newest)
        if self._last is not None and self._last.version != newest:
            self._forget()  # it was published while this rank had an error
        last = self._last
        known = last is not None and self._kept.keys() == {o.key for o in own} and all(map(self._is_kept, own))
        based = not known or self._since_base + 1 >= self._base_every or self._chain_bytes > self._base_bytes
        files = [self._file(version, batch, known, based) for batch in self._batches(own)]
        shards = [shard for file in files for shard in file.shards]
        changing = [s.name for o, s in zip(own, shards, strict=True) if self._shard(o, self._bytes(o)) != s]
        if changing:
            raise BadArgumentError(f"state changed while it was published: {', '.join(changing[:5])}")
        parent = None if last is None or not known else [last.version, last.state]
        return {**said, "parent": parent, "files": [file.row() for file in files]}

    def _batches(self, own: list[Own]) -> Iterator[list[Own]]:
        batch: list[Own] = []
        size = 0
        for o in own:
            if batch and size + self._nbytes(o) > _FILE:
                yield batch
                batch, size = [], 0
            batch.append(o)
            size += self._nbytes(o)
        if batch:
            yield batch

    def _file(self, version: int, batch: list[Own], known: bool, based: bool) -> ShardFile:
        """Write the delta and the base of some shards."""
        data = [self._bytes(o) for o in batch]
        shards = [self._shard(o, own) for o, own in zip(batch, data, strict=True)]
        written: dict[str, tuple[str | None, int]] = {"d": (None, 0), "b": (None, 0)}
        for kind, wanted in (("d", known), ("b", based)):
            if wanted:
                blob = self._blob(shards, data, kind == "d")
                identity = blake3(blob).hexdigest()
                self._files.write(layout.data_name(version, kind, identity), blob)
                written[kind] = (identity, len(blob))
        return ShardFile(*written["d"], *written["b"], tuple(shards))

    def _blob(self, shards: Sequence[Shard], data: Sequence[NpArray], is_delta: bool) -> bytes:
        pieces, groups = [], []
        for i, (shard, own) in enumerate(zip(shards, data, strict=True)):
            before = None
            if is_delta:
                # Hashes of unchanged tensors are equal, and there is nothing to compare.
                last, kept = self._kept[shard.key]
                before = own if shard.hash == last.hash else kept
            made = encode(own, before, shard.spec, self._sliced)
            lengths = [len(piece) for piece in made]
            groups.append(StoredGroup([i], "bytes", lengths, is_delta=is_delta))
            pieces += made
        labels = [shard.label for shard in shards]
        if len(set(labels)) < len(labels):  # a tensor has the label of another one's shard as its name
            labels = [f"{i}: {label}" for i, label in enumerate(labels)]
        header = {
            "parent": self._last.state * 2 if is_delta and self._last is not None else None,
            "raw": sum(own.size for own in data),
            "tree": [{"d": labels}, *({"a": i} for i in range(len(data)))],
            "arrays": [StoredArray(shard.dtype, shard.spec.shape).to_json() for shard in shards],
            "groups": groups_to_json(groups),
        }
        return container.write(header, pieces)[0]

    def _check_repeated(self, version: int, own: list[Shard]) -> None:
        """Raise BadArgumentError unless exactly this version exists; make its files durable."""
        there = self._version(version)
        if there is None or not set(own) <= set(there.shards):
            raise self._not_above(version, version)
        for file in there.files:  # its publisher may have been killed before they were durable
            for kind in ("d", "b"):
                if (identity := file.id(kind)) is not None:
                    self._files.sync([layout.data_name(version, kind, identity)])
        self._files.sync([layout.version_name(version)])

    # ------------------------------------------------------------------ the version

    def _merged(self, version: int, parts: list[dict[str, Any]]) -> Version | None:
        """Return the version of all parts; None if it exists already."""
        for key, what in (("version", "the version"), ("sliced", "sliced"), ("repeated", "whether it exists")):
            one_value(parts, key, what)
        if parts[0]["repeated"]:
            return None
        try:
            files = tuple(ShardFile.of(row) for part in parts for row in part["files"])
            shards = [shard for file in files for shard in file.shards]
            if not shards:
                raise ValueError("it has no tensors")
            layout.check_layout(shards)
            with_delta = [part for part in parts if any(row[0] is not None for row in part["files"])]
            parent = one_value(with_delta, "parent", "the version before")[0] if with_delta else None
        except (ValueError, TypeError, KeyError) as e:
            raise BadArgumentError(f"state: {e}; nothing was published") from None
        return Version(version, parent, layout.state_hash(shards), parts[0]["publisher"], self._sliced, files)

    def _commit(self, ranks: Ranks, made: Version, own: list[Own]) -> None:
        name = layout.version_name(made.version)

        def commit() -> dict[str, Any]:
            if ranks.commits and not self._files.create(name, made.to_bytes(self._keys)):
                raise PublishConflictError(
                    f"{self._files.path(name)}: another publisher has written version {made.version}"
                )
            return {}

        try:
            if ranks.collective:
                together(ranks, made.version, commit)
            else:
                commit()
        except PublishConflictError:
            self._forget()
            raise
        self._token = made.publisher
        self._remember(made, own)
        if isinstance(ranks, InStore):
            ranks.committed()
        if ranks.index == 0:
            self._remove_old()

    def _remember(self, made: Version, own: list[Own]) -> None:
        self._kept = {o.key: self._kept[o.key] for o in own if self._is_kept(o)}
        shards, is_other = {shard.key: shard for shard in made.shards}, False
        for o in own:
            kept, shard = self._kept.get(o.key), shards[o.key]
            if kept is not None and kept[0].hash == shard.hash:
                continue
            data = self._bytes(o).copy() if kept is None else kept[1]
            if kept is not None:
                np.copyto(data, self._bytes(o))
            self._kept[o.key] = shard, data
            is_other |= self._shard(o, data) != shard
        self._followed([made])
        if is_other:
            self._forget()  # the state changed after it was written, so that the copy is not the published one

    def _followed(self, chain: Sequence[Version]) -> None:
        """Count versions, the oldest first."""
        for version in chain:
            self._last = version
            self._since_base, self._chain_bytes = self._since_base + 1, self._chain_bytes + version.nbytes()
            if version.has_base:
                self._since_base, self._chain_bytes, self._base_bytes = 0, 0, version.base_bytes()

    def _forget(self) -> None:
        """Begin again with a base."""
        self._may_read_back = False
        self._last, self._kept = None, {}
        self._since_base, self._chain_bytes, self._base_bytes = 0, 0, 0

    # ------------------------------------------------------------------ the store

    def _version(self, number: int) -> Version | None:
        """Read a version; None if it is missing, damaged or of a newer format."""
        try:
            return Version.from_bytes(self._files.read(layout.version_name(number)), number, self._keys)
        except (OSError, CorruptDataError, NewerFormatError):
            return None

    def _read_back(self, own: list[Own], newest: int) -> None:
        """Continue from the newest version if it can be read and has the same tensors."""
        self._may_read_back = False
        read = {o.key: torch.empty(o.tensor.shape, dtype=self._dtype_of(o), device="cpu") for o in own}
        names = {str(i): key for i, key in enumerate(read)}
        select = {i: (name, [slice(at, at + n) for at, n in where]) for i, (name, where) in names.items()}
        chain: list[Version] = []
        try:
            tensors = {i: read[key] for i, key in names.items()}
            Subscriber(self._url, tensors, select=select, key=self._keys).update(version=newest)
        except (ShrinkpointError, OSError):
            return
        number: int | None = newest
        while number is not None and (not chain or not chain[-1].has_base):
            if (version := self._version(number)) is None:
                return
            chain.append(version)
            number = version.parent
        kept = {key: host_bytes(tensor) for key, tensor in read.items()}
        shards = [self._shard(o, kept[o.key]) for o in own]
        if not self._agrees(chain[0], shards):
            return
        self._kept = {shard.key: (shard, kept[shard.key]) for shard in shards}
        self._followed(chain[::-1])

    def _agrees(self, version: Version, own: list[Shard]) -> bool:
        """Return whether shards are those of a version, as far as it has their hashes."""
        there = {shard.key: shard for shard in version.shards}
        shapes = {s.name: (s.dtype, s.shape) for s in version.shards}
        return all(there.get(s.key, s) == s and shapes.get(s.name) == (s.dtype, s.shape) for s in own)

    def _remove_old(self) -> None:
        """Remove versions beyond `keep` that no kept version needs; errors delay that."""
        versions = layout.versions_at(self._files)
        if len(versions) <= self._keep:
            return
        known: dict[int | None, Version] = {}
        for number in versions:
            try:
                known[number] = Version.from_bytes(self._files.read(layout.version_name(number)), number, self._keys)
            except (OSError, CorruptDataError):
                continue
            except NewerFormatError:  # the files that it needs are unknown
                return
        made = known.get(versions[-self._keep])
        while made is not None and not made.has_base:
            made = known.get(made.parent)
        if made is None:  # the files that it needs are unknown
            return
        oldest = made.version
        try:
            self._files.remove([layout.version_name(n) for n in versions if n < oldest])
            # Also what a publisher left that was killed before its version existed.
            for folder in ("data", FOLDER):
                names = [name.rsplit("/", 1)[-1] for name in self._files.list(folder)]
                old = [name for name in names if name[:12].isdecimal() and int(name[:12]) < oldest]
                self._files.remove([f"{folder}/{name}" for name in old])
        except OSError:
            return


def publisher_of_all(url: str | os.PathLike[str], options: Mapping[str, Any] | None) -> Publisher:
    """Return the publisher of all ranks of the default group; without one, of this process.

    Args:
        url: of the `Publisher`.
        options: further arguments of it.
    """
    distributed = torch.distributed
    group = distributed.group.WORLD if distributed.is_available() and distributed.is_initialized() else None
    return Publisher(url, **{"ranks": group, **(options or {})})


def _divided(plain: Sequence[Mapping[str, Sequence[Any]]]) -> dict[str, int]:
    """Return the rank that publishes each plain tensor: of its holders the least loaded one.

    Args:
        plain: of each rank, name -> bytes and a hash of some elements.

    Raises:
        BadArgumentError: ranks have different tensors of one name.
    """
    holders: dict[str, list[int]] = {}
    for rank, own in enumerate(plain):
        for name in own:
            holders.setdefault(name, []).append(rank)
    load, owner = [0] * len(plain), {}
    for name, ranks in sorted(holders.items(), key=lambda item: (-plain[item[1][0]][item[0]][0], item[0])):
        if any(plain[rank][name] != plain[ranks[0]][name] for rank in ranks):
            raise BadArgumentError(
                f"state: {name} is not the same tensor on the ranks {ranks[:8]}; say what slices they are by shards="
            )
        owner[name] = min(ranks, key=lambda rank: load[rank])
        load[owner[name]] += plain[ranks[0]][name][0]
    return owner
