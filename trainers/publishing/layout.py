"""Files of a publisher: a signed JSON file for each version; deltas and bases of its shards.

Deltas and bases are ordinary checkpoint files. A *shard* is a box of a tensor: all of it, or what one rank of a trainer
holds. Each file has the shards of one rank, about 256 MiB of them at most.

    versions/000000000012.json   checksummed; names the files of this version, its parent, every shard and its hash
    data/000000000012-d-HASH.spt what changed in some shards since the version before it
    data/000000000012-b-HASH.spt everything in some shards
    parts/000000000012-1-of-4-RUN.json  what one of several processes wrote that have no process group

A version exists once its JSON file does, which is written last and never written over. What holds for it, and is
checked when it is written and when it is read:

- Bounds: a shard lies within its tensor, and its array in a file has its dtype and lengths.
- Disjointness: the shards of a tensor do not overlap.
- Completeness: they leave no hole.
- Parent: a delta names the hash of the state that it is against.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash

from ...codec.errors import BadArgumentError, CorruptDataError, NewerFormatError
from ...codec.extras import install
from ...codec.format.bounded_json import loads
from ...codec.state.leaves import LeafSpec
from ...store.files import Files, seal

FORMAT = 2
LARGEST = 10**12 - 1
Where = tuple[tuple[int, int], ...]
"""Of each axis the first index and the length."""
_NAME = re.compile(r"(\d{12})\.json")
_ID = re.compile(r"[0-9a-f]{64}")
_HASH = re.compile(r"[0-9a-f]{32}")
_MOST_AXES = 64  # as in `state.leaves.spec_from_header`
_MOST_CORNERS = 1 << 24
"""Corners of a tensor's shards, which are compared to find holes and overlaps."""
KEY_LENGTH = 32
"""Bytes of a key."""


class Keys(NamedTuple):
    """Functions that sign and check signatures; without a key everything is accepted.

    Args:
        sign: data -> signature.
        accepts: (signature, data) -> whether it is the key's.
    """

    sign: Callable[[bytes], bytes] | None = None
    accepts: Callable[[bytes, bytes], bool] | None = None


def private_key(key: Any) -> Keys:
    """Return the functions of a private key (32 bytes, `Ed25519PrivateKey`, or None).

    Raises:
        BadArgumentError: not such a key, or `cryptography` is not installed.
    """
    if key is None:
        return Keys()
    own = _loaded(key, "Ed25519PrivateKey", "from_private_bytes", "sign")
    return Keys(own.sign, public_key(own.public_key()).accepts)


def public_key(key: Any) -> Keys:
    """Return the functions of a public key (32 bytes, `Ed25519PublicKey`, or None).

    Raises:
        BadArgumentError: not such a key, or `cryptography` is not installed.
    """
    if key is None:
        return Keys()
    own = _loaded(key, "Ed25519PublicKey", "from_public_bytes", "verify")

    def accepts(signature: bytes, data: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            own.verify(signature, data)
        except InvalidSignature:
            return False
        return True

    return Keys(None, accepts)


def _loaded(key: Any, kind: str, read: str, does: str) -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise BadArgumentError(f"key: signatures need cryptography: {install('sign')}") from None
    if isinstance(key, bytes) and len(key) == KEY_LENGTH:
        return getattr(getattr(ed25519, kind), read)(key)
    if not isinstance(key, getattr(ed25519, kind)):
        raise BadArgumentError(
            f"key must be {KEY_LENGTH} bytes or an {kind}, which can {does}; not {type(key).__qualname__}"
        )
    return key


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a published tensor.

    Args:
        name: of the tensor.
        dtype: of the tensor.
        shape: of the whole tensor.
        where: what of it this is.
        hash: of dtype, lengths and bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    where: Where
    hash: str

    @property
    def key(self) -> tuple[str, Where]:
        """Name and box, which no other shard has."""
        return self.name, self.where

    @property
    def spec(self) -> LeafSpec:
        """The array in the file."""
        return LeafSpec("torch", self.dtype, tuple(n for _, n in self.where))

    @property
    def is_whole(self) -> bool:
        """Return whether this is the whole tensor."""
        return self.where == whole(self.shape)

    @property
    def label(self) -> str:
        """Its name in the file, and in messages."""
        box = ", ".join(f"{start}:{start + n}" for start, n in self.where)
        return self.name if self.is_whole else f"{self.name}[{box}]"

    def row(self) -> list[Any]:
        """JSON values, which `of` reads."""
        box = [] if self.is_whole else [[start for start, _ in self.where], [n for _, n in self.where]]
        return [self.name, self.dtype, list(self.shape), self.hash, *box]

    @staticmethod
    def of(row: Any) -> Shard:
        """Read and check a row; ValueError if it is not one."""
        name, dtype, shape, digest, *box = row
        starts, lengths = box or ([0] * len(shape), shape)
        numbers = [*shape, *starts, *lengths]
        is_shape = len(numbers) <= 3 * _MOST_AXES and all(type(n) is int and 0 <= n <= 1 << 60 for n in numbers)
        if not is_shape or not isinstance(name, str):
            raise ValueError(f"a shard of {shape!s:.200} at {starts!s:.200} of {lengths!s:.200}")
        if not isinstance(dtype, str) or not isinstance(digest, str) or not _HASH.fullmatch(digest):
            raise ValueError(f"{name}: dtype or hash is malformed")
        made = Shard(name, dtype, tuple(shape), tuple(zip(starts, lengths, strict=True)), digest)
        _ = made.spec.itemsize  # an error for an unknown dtype
        if len(made.where) != len(shape) or any(at + n > size for (at, n), size in zip(made.where, shape, strict=True)):
            raise ValueError(f"{made.label} is outside of {shape}")
        return made


@dataclass(frozen=True, slots=True)
class ShardFile:
    """The files of some shards of a version: a delta, a base, or both.

    Args:
        delta: content hash of the file with the delta, or None.
        delta_bytes: its size.
        base: content hash of the file with everything, or None.
        base_bytes: its size.
        shards: those in the files, in order.
    """

    delta: str | None
    delta_bytes: int
    base: str | None
    base_bytes: int
    shards: tuple[Shard, ...]

    @property
    def kind(self) -> str:
        """The smaller way from the version before: "d" or "b"."""
        return "b" if self.delta is None else "d"

    def id(self, kind: str) -> str | None:
        """Content hash of the delta or the base."""
        return self.delta if kind == "d" else self.base

    def nbytes(self, kind: str) -> int:
        """Size of the delta or the base."""
        return self.delta_bytes if kind == "d" else self.base_bytes

    def row(self) -> list[Any]:
        """JSON values, which `of` reads."""
        return [self.delta, self.delta_bytes, self.base, self.base_bytes, [shard.row() for shard in self.shards]]

    @staticmethod
    def of(row: Any) -> ShardFile:
        """Read and check a row; ValueError if it is not one."""
        delta, delta_bytes, base, base_bytes, shards = row
        if any(type(n) is not int or not 0 <= n <= 1 << 60 for n in (delta_bytes, base_bytes)):
            raise ValueError(f"files of {delta_bytes} and {base_bytes} bytes")
        ids = [i for i in (delta, base) if i is not None]
        if not ids or not all(isinstance(i, str) and _ID.fullmatch(i) for i in ids):
            raise ValueError("the names of files do not fit")
        return ShardFile(delta, delta_bytes, base, base_bytes, tuple(map(Shard.of, shards)))


@dataclass(frozen=True, slots=True)
class Version:
    """Properties of a published version.

    Args:
        version: its number.
        parent: number of the version that deltas are against; None without one.
        state: hash of names, dtypes, shapes and bits of all tensors.
        publisher: random name of the publisher's run.
        sliced: whether a receiver can take parts of the shards.
        files: its files.
    """

    version: int
    parent: int | None
    state: str
    publisher: str
    sliced: bool
    files: tuple[ShardFile, ...]

    @property
    def has_base(self) -> bool:
        """Return whether it can be read without an earlier version."""
        return all(file.base is not None for file in self.files)

    @property
    def shards(self) -> list[Shard]:
        """All shards."""
        return [shard for file in self.files for shard in file.shards]

    def nbytes(self) -> int:
        """Bytes that receivers of the version before fetch."""
        return sum(file.nbytes(file.kind) for file in self.files)

    def base_bytes(self) -> int:
        """Bytes of the base; 0 where there is not a whole one."""
        return sum(file.base_bytes for file in self.files) if self.has_base else 0

    def to_bytes(self, keys: Keys = Keys()) -> bytes:  # noqa: B008
        """The JSON file, with a checksum of the rest, signed if there is a key."""
        names = ("version", "parent", "state", "publisher", "sliced")
        fields = {"format": FORMAT, **{name: getattr(self, name) for name in names}}
        return sealed({**fields, "files": [file.row() for file in self.files]}, keys)

    @staticmethod
    def from_bytes(data: bytes, version: int, keys: Keys = Keys()) -> Version:  # noqa: B008
        """Read a JSON file, and check all that holds for a version.

        Raises:
            CorruptDataError: it is not what `to_bytes` writes of this version, or not signed by the key.
            NewerFormatError: a newer release wrote it.
        """
        fields = unsealed(data, f"version {version}", keys)
        try:
            del fields["format"]
            made = Version(**{**fields, "files": tuple(map(ShardFile.of, fields["files"]))})
            made._check()
            if made.version != version:
                raise ValueError(f"it is of version {made.version}")
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise CorruptDataError(f"version {version}: its file has fields that do not fit: {e}") from None
        return made

    def _check(self) -> None:
        if type(self.version) is not int or not 0 <= self.version <= LARGEST or type(self.sliced) is not bool:
            raise ValueError("version or sliced")
        if not isinstance(self.state, str) or not _HASH.fullmatch(self.state) or not isinstance(self.publisher, str):
            raise ValueError("state or publisher")
        if not any(file.delta for file in self.files):
            if self.parent is not None or not self.has_base:
                raise ValueError("neither a delta nor a base")
        elif type(self.parent) is not int or not 0 <= self.parent < self.version:
            raise ValueError("a delta without a parent")
        check_layout(self.shards)


def check_layout(shards: Sequence[Shard]) -> None:
    """Raise ValueError unless shards of each tensor agree, are disjoint and leave no hole."""
    tensors: dict[str, list[Shard]] = {}
    for shard in shards:
        tensors.setdefault(shard.name, []).append(shard)
    for name, own in tensors.items():
        if len({(shard.dtype, shard.shape) for shard in own}) > 1:
            kinds = sorted({f"{shard.dtype} {shard.shape}" for shard in own})
            raise ValueError(f"{name}: shards of different tensors: {', '.join(kinds[:3])}")
        if math.prod(own[0].shape):
            _check_cover([shard for shard in own if shard.spec.size], name, own[0].shape)


def _check_cover(own: Sequence[Shard], name: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless boxes of a tensor cover each element once.

    The number of boxes that cover an element is the sum of signed corners before it: a start counts 1, a stop -1 on
    each axis. So the signed corners of all boxes must add up to those of the tensor, in linear time.
    """
    axes = [i for i, n in enumerate(shape) if any(shard.where[i] != (0, n) for shard in own)]
    if len(own) == 1 and not axes:
        return
    if len(own) << len(axes) > _MOST_CORNERS:
        raise ValueError(f"{name}: {len(own)} shards that are divided on {len(axes)} axes")
    boxes = np.array([whole(shape), *(s.where for s in own)], np.int64).reshape(len(own) + 1, -1, 2)[:, axes]
    start, stop = boxes[..., 0], boxes.sum(axis=2)
    ends = np.array(list(itertools.product((0, 1), repeat=len(axes))), bool).reshape(1 << len(axes), -1)
    corners = np.where(ends[:, None], stop, start).reshape(len(ends) * len(boxes), len(axes))
    signs = np.outer(1 - 2 * (ends.sum(axis=1) % 2), np.r_[-1, np.ones(len(own), int)]).reshape(-1)
    order = np.lexsort(corners.T[::-1]) if axes else np.arange(signs.size)
    corners, signs = corners[order], signs[order]
    begins = np.flatnonzero(np.r_[True, (corners[1:] != corners[:-1]).any(axis=1)])
    wrong = np.flatnonzero(np.add.reduceat(signs, begins))
    if wrong.size:
        at = corners[begins[wrong[0]]]  # the first in this order, so that the sum up to it is its own
        there = np.flatnonzero(((start <= at) & (at < stop)).all(axis=1)[1:])
        if there.size > 1:
            raise ValueError(f"{own[there[0]].label} and {own[there[1]].label} overlap")
        raise ValueError(f"{name}: shards of {sum(s.spec.size for s in own)} elements leave a hole in {shape}")


def whole(shape: Iterable[int]) -> Where:
    """Return the box that is the whole tensor."""
    return tuple((0, n) for n in shape)


def meets(a: Where, b: Where) -> bool:
    """Return whether two boxes of a tensor have a common element."""
    return all(x < y + m and y < x + n for (x, n), (y, m) in zip(a, b, strict=True)) and all(n for _, n in (*a, *b))


def is_inside(a: Where, b: Where) -> bool:
    """Return whether all of a box is in another one."""
    return all(y <= x and x + n <= y + m for (x, n), (y, m) in zip(a, b, strict=True))


def state_hash(shards: Iterable[Shard]) -> str:
    """Return a hash of all tensors from the hashes of their shards, independent of the order."""
    h = xxhash.xxh3_128()
    for shard in sorted(shards, key=lambda s: (s.name, s.where)):
        box = "" if shard.is_whole else f"@{shard.where};"
        h.update(f"{len(shard.name)} {shard.name} {shard.hash}{box}".encode())
    return str(h.hexdigest())


def sealed(fields: dict[str, Any], keys: Keys) -> bytes:
    """Return JSON with a checksum of the fields, signed if there is a private key."""
    if keys.sign is not None:
        fields = {**fields, "signature": keys.sign(_plain(fields)).hex()}
    return seal(fields, _plain)


def unsealed(data: bytes, what: str, keys: Keys) -> dict[str, Any]:
    """Return the fields of a JSON file that `sealed` wrote.

    Raises:
        CorruptDataError: it was altered, or is not signed by the key.
        NewerFormatError: a newer release wrote it.
    """
    try:
        fields: dict[str, Any] = loads(data)
        number = fields["format"]
        if type(number) is int and number > FORMAT:
            raise NewerFormatError(f"{what}: its file has format {str(number)[:20]}; this reader knows up to {FORMAT}")
        if type(number) is int and number < FORMAT:
            raise CorruptDataError(
                f"{what}: its file has format {number}, which is not read any more: publish it again"
            )
        if fields.pop("checksum") != xxhash.xxh3_128_hexdigest(_plain(fields)) or number != FORMAT:
            raise ValueError("the checksum or the format number does not match")
        signature = fields.pop("signature", None)
        signed = b"" if signature is None else bytes.fromhex(signature)
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise CorruptDataError(f"{what}: its file is damaged: {e}") from None
    if keys.accepts is not None and not keys.accepts(signed, _plain(fields)):
        why = "its signature is not of the key" if signed else "it is not signed, and a key is given"
        raise CorruptDataError(f"{what}: {why}")
    return fields


def _plain(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True).encode("ascii")


def version_name(version: int) -> str:
    """Name of a version's JSON file."""
    return f"versions/{version:012}.json"


def versions_at(files: Files) -> list[int]:
    """Return the versions whose JSON files are in a store, ascending."""
    found = (_NAME.fullmatch(name.rsplit("/", 1)[-1]) for name in files.list("versions"))
    return sorted(int(name[1]) for name in found if name)


def data_name(version: int, kind: str, identity: str) -> str:
    """Name of a data file; `kind` is "b" for a base and "d" for a delta."""
    return f"data/{version:012}-{kind}-{identity[:16]}.spt"
