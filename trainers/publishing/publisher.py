"""Publish the versions of a model that trains, as exact deltas with a base now and then."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from ...codec.errors import BadArgumentError, CorruptDataError, NewerFormatError, ShrinkpointError
from ...codec.format import container
from ...codec.state.leaves import LeafSpec, NpArray
from ...kernels.backend.arguments import flag, integer
from ...store.files import Files
from ...store.urls import opened
from .layout import LARGEST, Version, data_name, version_name, version_of
from .patches import encode
from .subscriber import Subscriber
from .tensors import hash_of, host_bytes, spec_of, state_hash, tensors_of


class PublishConflictError(ShrinkpointError):
    """Another publisher has written to the same URL."""


@dataclass(frozen=True, slots=True)
class Published:
    """Result of `Publisher.publish`.

    Args:
        version: its number.
        nbytes: bytes that receivers of the version before fetch: of the delta, or of the base without a delta.
        base_bytes: bytes of the base; 0 where none was written.
        raw_bytes: bytes of all tensors.
        seconds: time that it took.
    """

    version: int
    nbytes: int
    base_bytes: int
    raw_bytes: int
    seconds: float


class Publisher:
    """Publish a model's versions to a folder or an object store.

    One copy of the last version's tensors is kept on the host, to compare the next version with. After a restart it is
    read back from the URL, so that receivers continue with deltas; if that fails (damaged files, other names or
    shapes), the first version is a base. One thread publishes at a time.

    Args:
        url: a path or any fsspec URL. Everyone with write access to it decides what receivers serve (docs/security.md).
        base_every: number of versions from one base to the next; a base is also written when the deltas since the last
            one are larger than it. Receivers that are up to date still fetch the delta.
        keep: number of versions that are kept, at least 1; versions that a kept one needs are kept as well.
        sliced: let receivers take slices of the tensors (tensor and expert parallelism); deltas of floats are then up
            to a third larger.

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

    Source: Check-N-Run, section 2 (publishing to inference), with exact deltas (BitSnap, section 3.3).
    """

    def __init__(
        self, url: str | os.PathLike[str], *, base_every: int = 50, keep: int = 100, sliced: bool = False
    ) -> None:
        self._files: Files = opened(url)
        self._base_every = integer("base_every", base_every, 1)
        self._keep = integer("keep", keep, 1)
        self._sliced = flag("sliced", sliced)
        self._url = url
        self._token = uuid.uuid4().hex
        self._may_read_back = True
        self._last: Version | None = None
        self._identity: str | None = None
        self._kept: dict[str, tuple[LeafSpec, NpArray]] = {}
        self._hashes: dict[str, str] = {}
        self._since_base, self._chain_bytes, self._base_bytes = 0, 0, 0

    @property
    def newest(self) -> int | None:
        """The newest version at the URL, by any publisher; None without one."""
        return max(self._versions(), default=None)

    def publish(self, version: int, state: Mapping[str, Any]) -> Published:
        """Publish a version; durable and visible as a whole when this returns.

        Args:
            version: above every version at the URL; the same as the last one only with the same state, which changes
                nothing.
            state: a state dict of tensors, any device; they must not change until this returns, which is checked.
                DTensors are gathered: all ranks call this, and only rank 0 writes.

        Raises:
            BadArgumentError: the version is not above the newest; the state has values other than tensors, or another
                thread changed it meanwhile.
            PublishConflictError: another publisher has written since.
            OSError: it could not be written; the version then does not exist, and may be published again.
        """
        begin = time.perf_counter()
        version = integer("version", version, 0, LARGEST)
        tensors = tensors_of(state, "state")
        raw = sum(t.numel() * t.element_size() for t in tensors.values())
        if _rank() != 0:
            return Published(version, 0, 0, raw, time.perf_counter() - begin)
        data = {name: host_bytes(tensor) for name, tensor in tensors.items()}
        specs = {name: spec_of(tensor) for name, tensor in tensors.items()}
        hashes = {name: hash_of(specs[name], own) for name, own in data.items()}
        state_is = state_hash(hashes)
        if self._is_repeated(version, state_is):
            return Published(version, 0, 0, raw, time.perf_counter() - begin)
        if self._last is None and self._may_read_back:
            self._read_back(tensors)
        last = self._last
        same_tensors = last is not None and {n: s for n, (s, _) in self._kept.items()} == specs
        delta = base = delta_name = base_name = None
        if last is not None and same_tensors:
            delta, identity = self._file(data, specs, hashes)
            delta_name = data_name(version, "d", identity)
        if (
            delta is None
            or self._since_base + 1 >= self._base_every
            or self._chain_bytes + len(delta) > self._base_bytes
        ):
            base, base_identity = self._file(data, specs, None)
            base_name = data_name(version, "b", base_identity)
        made = Version(
            version,
            None if delta is None or last is None else last.version,
            delta_name,
            0 if delta is None else len(delta),
            base_name,
            0 if base is None else len(base),
            state_is,
            self._token,
            self._sliced,
        )
        changing = [name for name, own in data.items() if hash_of(specs[name], own) != hashes[name]]
        if changing:
            raise BadArgumentError(f"state changed while it was published: {', '.join(changing[:5])}")
        for name, blob in ((delta_name, delta), (base_name, base)):
            if name is not None and blob is not None:
                self._files.write(name, blob)
        if not self._files.create(version_name(version), made.to_bytes()):
            self._forget()
            raise PublishConflictError(
                f"{self._files.path(version_name(version))}: another publisher has written version {version}"
            )
        copied = [name for name in data if self._hashes.get(name) != hashes[name]]
        self._remember(made, data, specs, hashes, len(base or b""))
        if any(hash_of(*self._kept[name]) != hashes[name] for name in copied):
            self._forget()  # the state changed after it was written, so that the copy is not the published one
        self._remove_old()
        nbytes = len(delta if delta is not None else base or b"")
        return Published(version, nbytes, len(base or b""), raw, time.perf_counter() - begin)

    def _versions(self) -> list[int]:
        found = (version_of(f"versions/{name.rsplit('/', 1)[-1]}") for name in self._files.list("versions"))
        return [v for v in found if v is not None]

    def _is_repeated(self, version: int, state_is: str) -> bool:
        """Return whether exactly this version exists; raise an error if its number is taken."""
        newest, last = self.newest, self._last
        if last is not None and newest != last.version:
            mine = last.version
            self._forget()
            raise PublishConflictError(
                f"{self._files.path('versions')}: the newest version is {newest}; this publisher wrote {mine} last: "
                "another one writes to the same URL, or its files were removed. The next version is a base"
            )
        if newest is None or version > newest:
            return False
        if version == newest:
            there = Version.from_bytes(self._files.read(version_name(version)), version)
            if there.state == state_is:
                for name in (there.delta, there.base, version_name(version)):
                    if name is not None:  # its publisher may have been killed before they were durable
                        self._files.sync([name])
                return True
        raise BadArgumentError(
            f"version {version} is not above {newest}, the newest at {self._files.path('versions')}; versions ascend, "
            "also after a restart from an older checkpoint (Publisher.newest says where to go on)"
        )

    def _read_back(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue from the newest version if it can be read and has the same tensors."""
        self._may_read_back = False
        newest = self.newest
        if newest is None:
            return
        read = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in tensors.items()}
        try:
            Subscriber(self._url, read).update(version=newest)
            chain = [Version.from_bytes(self._files.read(version_name(newest)), newest)]
            while chain[-1].base is None and chain[-1].parent is not None:
                parent = chain[-1].parent
                chain.append(Version.from_bytes(self._files.read(version_name(parent)), parent))
        except (ShrinkpointError, OSError):
            return
        specs = {name: spec_of(t) for name, t in read.items()}
        hashes = {name: hash_of(specs[name], host_bytes(t)) for name, t in read.items()}
        if state_hash(hashes) != chain[0].state:
            return
        self._remember(chain[0], {name: host_bytes(t) for name, t in read.items()}, specs, hashes, chain[-1].base_bytes)
        self._since_base, self._chain_bytes = len(chain) - 1, sum(v.delta_bytes for v in chain[:-1])

    def _file(
        self, data: dict[str, NpArray], specs: dict[str, LeafSpec], hashes: dict[str, str] | None
    ) -> tuple[bytes, str]:
        """Return a checkpoint file of these tensors and its identity; a delta if hashes are given."""
        pieces, records = [], []
        for name, own in data.items():
            before = None
            if hashes is not None:
                # Hashes of unchanged tensors are equal, and there is nothing to compare.
                before = own if hashes[name] == self._hashes[name] else self._kept[name][1]
            made = encode(own, before, specs[name], self._sliced)
            record: dict[str, Any] = {"d": specs[name].dtype, "s": list(specs[name].shape), "f": "bytes"}
            record["b"] = [len(piece) for piece in made]
            if hashes is not None:
                record["p"] = True
            records.append(record)
            pieces += made
        header = {
            "parent": None if hashes is None else self._identity,
            "raw": sum(own.size for own in data.values()),
            "tree": [{"d": list(data)}, *({"a": i} for i in range(len(data)))],
            "arrays": records,
        }
        blob, _ = container.write(header, pieces)
        return blob, blake3(blob).hexdigest()

    def _remember(
        self, made: Version, data: dict[str, NpArray], specs: dict[str, LeafSpec], hashes: dict[str, str], base: int
    ) -> None:
        for name, own in data.items():
            kept = self._kept.get(name)
            if kept is None or kept[0] != specs[name]:
                self._kept[name] = (specs[name], own.copy())
            elif self._hashes.get(name) != hashes[name]:
                np.copyto(kept[1], own)
        for name in set(self._kept) - set(data):
            del self._kept[name]
        self._hashes, self._last, self._identity = hashes, made, made.state * 2
        if base:
            self._since_base, self._chain_bytes, self._base_bytes = 0, 0, base
        else:
            self._since_base += 1
            self._chain_bytes += made.delta_bytes

    def _forget(self) -> None:
        """Begin again with a base."""
        self._may_read_back = False
        self._last, self._identity = None, None
        self._kept, self._hashes = {}, {}

    def _remove_old(self) -> None:
        """Remove versions beyond `keep` that no kept version needs; errors delay that."""
        versions = sorted(self._versions())
        if len(versions) <= self._keep:
            return
        first = versions[-self._keep]
        chain = {}
        for number in versions:
            try:
                chain[number] = Version.from_bytes(self._files.read(version_name(number)), number)
            except (OSError, CorruptDataError):
                continue
            except NewerFormatError:  # the files that it needs are unknown
                return
        oldest: int | None = first
        while oldest in chain and chain[oldest].base is None:
            oldest = chain[oldest].parent
        if oldest is None:
            return
        try:
            self._files.remove([version_name(n) for n in versions if n < oldest])
            # Also what a publisher left that was killed before its version existed.
            names = [name.rsplit("/", 1)[-1] for name in self._files.list("data")]
            self._files.remove([f"data/{name}" for name in names if name[:12].isdigit() and int(name[:12]) < oldest])
        except OSError:
            return


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
