"""Metadata of a distributed checkpoint: the file of each shard, as JSON, and its path there.

    {"checksum": XXH3-128 of the rest, "format": "shrinkpoint-dcp", "version": 1,
     "world": ranks that saved, "partial": whether the shards need not cover the tensors,
     "files": [{"rank", "chain": [[name, bytes], ...], "raw", "carried", "since", "spent"}, ...],
     "layouts": [[[offsets, sizes, file], ...], ...],
     "entries": {fqn: {"p": path, "d": dtype, "s": size, "l": layout, "g": requires grad, "m": memory format}
                      or {"p": path, "b": file}}}

Entries of one shape and sharding share a layout, so that the size grows with the ranks times the *different* layouts
plus the entries, not with ranks times entries. File names are bare names in `data/`, so no path leaves the folder.

Each file is the container of a rank: an ordinary checkpoint of a nested dict. The entry
`optim.state.fc.weight.exp_avg`, which the planner flattened from the path `("optim", "state", "fc.weight", "exp_avg")`,
is at that path again, so that rules, kinds and the pairing of moments see the same paths as in a state that was never
distributed. Keys that begin with "@" are the container's own: "@values" holds values other than tensors, "@1", "@2",
... the second and later shards of an entry.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ...codec.errors import BadArgumentError, CorruptDataError, NewerFormatError, UnsupportedLeafError
from ...codec.evidence.kind import Kind, by_path, check_used, kinds_for
from ...codec.format.bounded_json import loads
from ...codec.state.leaves import is_array
from ...codec.state.tree import flatten

FORMAT = "shrinkpoint-dcp"
VERSION = 1
FOLDER = "data"
MAX_BYTES = 1 << 28
"""Of metadata: 1,000 ranks take about a megabyte."""
MAX_PAIRS = 1 << 32
"""Of shards that are compared for overlap, times dimensions; those of a grid need no comparison."""
MAX_POSITION = 1 << 24
"""In a list, in the path of an entry."""
MAX_GAPS = 1 << 16
"""Of all lists in the paths of entries: empty positions that rebuilding the lists allocates."""
_NAME = re.compile(r"(?:[0-9]{6}){1,2}-[0-9a-f]{16}\.spt")
"""In a folder with the rank, in a store with the step."""
_FRONT = re.compile(rb'\{"checksum":"([0-9a-f]{32})",')
_MEMORY_FORMATS = {"channels_last": torch.channels_last, "preserve_format": torch.preserve_format}

Offsets = tuple[int, ...]
Place = tuple[str, ...]
VALUES = "@values"
_SURROGATE = re.compile("[\ud800-\udfff]")
_FLATTENED = re.compile(r"(?:([^.]*optim[^.]*)\.)?state\.(.+)\.([^.]+)", re.IGNORECASE)
"""An optimizer entry whose path was flattened (`StateDictOptions(flatten_optimizer_state_dict=True)`)."""
_BY_ENTRY = re.compile(r"(?:([^.]*optim[^.]*)\.)?state\.(exp_avg_sq|exp_avg|momentum_buffer|fp32_param)\.(.+)")
"""The same with the entry first, as Megatron-Core names them."""


def metadata_name(rank: int | None = None) -> str:
    """Return the name of the file that commits a checkpoint, of all ranks or of one.

    Trainers recognise complete checkpoints by `.metadata`.
    """
    return ".metadata" if rank is None else f"__{rank}.metadata"


def data_name(rank: int, identity: str) -> str:
    """Return the name of a rank's container, which contains its content hash."""
    return f"{rank:06d}-{identity[:16]}.spt"


def is_data(name: str, rank: int | None = None) -> bool:
    """Return whether a name is that of a container, of `rank` if that is given."""
    return _NAME.fullmatch(name) is not None and (rank is None or name.startswith(f"{rank:06d}-"))


@dataclass(frozen=True, slots=True)
class RankFile:
    """The container that one rank wrote, with its chain.

    Args:
        rank: which.
        chain: (name, bytes) of the containers it is decoded from, its own first, the base last.
        raw_nbytes: bytes of its arrays.
        carried: bytes of the arrays of its parents that must be decoded first.
        since_base: checkpoints saved since the base, 0 for the base itself.
        spent: stored bytes of the deltas since it, this one included.
        shards: (fully qualified name, offsets) of each shard, in order; empty in metadata that was read.
        values: fully qualified names of values that are not tensors; empty in metadata that was read.
    """

    rank: int
    chain: tuple[tuple[str, int], ...]
    raw_nbytes: int
    carried: int
    since_base: int
    spent: int
    shards: tuple[tuple[str, Offsets], ...] = ()
    values: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        """Return what the metadata say of it."""
        numbers = {"carried": self.carried, "since": self.since_base, "spent": self.spent}
        return {"rank": self.rank, "chain": self.chain, "raw": self.raw_nbytes, **numbers}

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.chain[0][1]

    @property
    def base_nbytes(self) -> int:
        """Stored bytes of the base."""
        return self.chain[-1][1]


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a tensor: its offsets and sizes, its file, and its number in the file."""

    offsets: Offsets
    sizes: Offsets
    file: int
    ordinal: int


@dataclass(frozen=True)
class Layout:
    """The shards of a tensor."""

    shards: tuple[Shard, ...]

    @cached_property
    def by_offsets(self) -> dict[Offsets, Shard]:
        """Shards by offsets; one with elements has priority over an empty one."""
        return {s.offsets: s for s in sorted(self.shards, key=lambda s: math.prod(s.sizes) > 0)}

    @cached_property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """The shards as torch's chunk metadata."""
        return [ChunkStorageMetadata(torch.Size(s.offsets), torch.Size(s.sizes)) for s in self.shards]

    def problem(self, size: Offsets, partial: bool) -> str:
        """Return why this cannot be a layout of a tensor of that size, or ""."""
        for s in self.shards:
            if len(s.offsets) != len(size) or len(s.sizes) != len(size):
                return f"a shard of {len(s.offsets)} dimensions"
            if any(o + n > whole for o, n, whole in zip(s.offsets, s.sizes, size, strict=True)):
                return f"the shard at {list(s.offsets)} of {list(s.sizes)} is out of bounds"
        covered = sum(math.prod(s.sizes) for s in self.shards)
        if covered != math.prod(size) and not partial:
            return f"its shards have {covered} elements, it has {math.prod(size)}; a shard is missing or there twice"
        return ""

    @cached_property
    def tangled(self) -> list[np.ndarray[Any, Any]]:
        """First and last offsets of groups of shards that no cut along an axis separates.

        A grid has no such group. Shards without elements are left out.
        """
        filled = [(s.offsets, s.sizes) for s in self.shards if math.prod(s.sizes)]
        groups = [np.cumsum(np.array(filled, np.int64), axis=1)] if len(filled) > 1 else []
        for axis in 2 * [*range(groups[0].shape[2])] if groups else ():
            groups = [part for group in groups for part in _cut(group, axis)]
        return groups

    def overlap(self) -> bool:
        """Return whether two of the shards share an element."""
        for group in self.tangled:
            begin, end = group[:, 0], group[:, 1]
            # A block of shards against all, so that memory stays linear in their number.
            count = max(1, min(256, (1 << 24) // (1 + begin.size)))
            for i in range(0, len(group), count):
                apart = (begin[i : i + count, None] >= end[None]) | (begin[None] >= end[i : i + count, None])
                if (~apart.any(axis=-1)).sum() > min(count, len(group) - i):
                    return True
        return False


def _cut(group: np.ndarray[Any, Any], axis: int) -> list[np.ndarray[Any, Any]]:
    """Return the parts of a group that lie apart on an axis, without single shards."""
    group = group[np.argsort(group[:, 0, axis], kind="stable")]
    cuts = 1 + np.flatnonzero(group[1:, 0, axis] >= np.maximum.accumulate(group[:-1, 1, axis]))
    return [part for part in np.split(group, cuts) if len(part) > 1]


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor, or another value if `file` is set.

    Args:
        path: in the nested state, or None if it was unknown.
        dtype: name in torch.
        size: of the whole tensor.
        layout: number of its layout.
        requires_grad: as it was.
        memory_format: "contiguous_format" or another of torch's.
        file: number of the file that has the value.
    """

    path: tuple[str | int, ...] | None
    dtype: str = ""
    size: Offsets = ()
    layout: int = -1
    requires_grad: bool = False
    memory_format: str = "contiguous_format"
    file: int | None = None


@dataclass(frozen=True)
class Index:
    """The metadata of a checkpoint: files, layouts, entries."""

    world: int
    partial: bool
    files: tuple[RankFile, ...]
    layouts: tuple[Layout, ...] = field(repr=False)
    entries: dict[str, Entry] = field(repr=False)

    def of_rank(self, rank: int) -> tuple[RankFile | None, dict[tuple[str, Offsets], Offsets]]:
        """Return one rank's file, and the sizes of its shards by name and offsets."""
        number = next((i for i, f in enumerate(self.files) if f.rank == rank), None)
        if number is None:
            return None, {}
        shards = {
            (fqn, s.offsets): s.sizes
            for fqn, e in self.entries.items()
            if e.file is None
            for s in self.layouts[e.layout].shards
            if s.file == number
        }
        return self.files[number], shards

    def to_torch(self) -> Metadata:
        """Return torch's metadata; entries of one layout share one list of chunks.

        Entries whose paths do not form a tree have none.
        """
        table: dict[str, Any] = {}
        for fqn, e in self.entries.items():
            if e.file is not None:
                table[fqn] = BytesStorageMetadata()
                continue
            properties = TensorProperties(
                dtype=getattr(torch, e.dtype),
                requires_grad=e.requires_grad,
                memory_format=_MEMORY_FORMATS.get(e.memory_format, torch.contiguous_format),
            )
            table[fqn] = TensorStorageMetadata(properties, torch.Size(e.size), self.layouts[e.layout].chunks)
        paths = {fqn: e.path for fqn, e in self.entries.items() if e.path is not None}
        return Metadata(table, planner_data=paths if paths and is_tree(paths) else None, storage_data=self)

    def to_bytes(self) -> bytes:
        """Return the contents of the metadata file."""
        entries = {}
        for fqn, e in self.entries.items():
            row: dict[str, Any] = {} if e.path is None else {"p": list(e.path)}
            if e.file is not None:
                row["b"] = e.file
            else:
                row |= {"d": e.dtype, "s": list(e.size), "l": e.layout}
                row |= {"g": True} if e.requires_grad else {}
                row |= {"m": e.memory_format} if e.memory_format != "contiguous_format" else {}
            entries[fqn] = row
        fields = {
            "format": FORMAT,
            "version": VERSION,
            "world": self.world,
            "partial": self.partial,
            "files": [file.row() for file in self.files],
            "layouts": [[[s.offsets, s.sizes, s.file] for s in layout.shards] for layout in self.layouts],
            "entries": entries,
        }
        body = json.dumps(fields, separators=(",", ":")).encode("ascii")
        return b'{"checksum":"%s",' % xxhash.xxh3_128_hexdigest(body).encode() + body[1:]


def build(metadata: Metadata, files: Sequence[RankFile]) -> Index:
    """Return the index of the files of all ranks, checked against the plan.

    Raises:
        BadArgumentError: shards that were planned were not written, or cannot be described.
        CorruptDataError: the metadata would be beyond the limits of a reader.
    """
    placed: dict[str, list[tuple[Offsets, int]]] = {}
    values: dict[str, int] = {}
    for number, file in enumerate(files):
        for fqn, offsets in file.shards:
            placed.setdefault(fqn, []).append((offsets, number))
        values |= dict.fromkeys(file.values, number)
    paths: Mapping[str, Any] = metadata.planner_data or {}
    numbers: dict[tuple[Any, ...], int] = {}
    layouts: list[Layout] = []
    entries: dict[str, Entry] = {}
    holes = ""
    for fqn, planned in metadata.state_dict_metadata.items():
        try:
            path = _checked_path(fqn, paths.get(fqn))
        except ValueError as e:
            raise BadArgumentError(str(e)) from None
        if not isinstance(planned, TensorStorageMetadata):
            if fqn not in values:
                raise BadArgumentError(f"{fqn}: no rank wrote it")
            entries[fqn] = Entry(path, file=values[fqn])
            continue
        rows = _rows(fqn, {tuple(c.offsets): tuple(c.sizes) for c in planned.chunks}, placed.get(fqn, []), files)
        if rows not in numbers:
            numbers[rows] = len(layouts)
            layouts.append(Layout(_shards(rows)))
        size = tuple(planned.size)
        holes = holes or layouts[numbers[rows]].problem(size, False)
        like = planned.properties
        dtype, memory = (str(name).removeprefix("torch.") for name in (like.dtype, like.memory_format))
        entries[fqn] = Entry(path, dtype, size, numbers[rows], bool(like.requires_grad), memory)
    index = Index(len(files), bool(holes), tuple(files), tuple(layouts), entries)
    parse(index.to_bytes(), "metadata")  # what a reader refuses must not be committed
    return index


def _rows(
    fqn: str, sizes: Mapping[Offsets, Offsets], written: Sequence[tuple[Offsets, int]], files: Sequence[RankFile]
) -> tuple[tuple[Offsets, Offsets, int], ...]:
    """Return offsets, sizes and file of each shard of an entry, without repeated empty shards."""
    ranks: dict[Offsets, int] = {}
    rows = []
    for offsets, number in written:
        if offsets not in sizes:
            raise BadArgumentError(f"{fqn}: rank {files[number].rank} wrote a shard at {offsets} that was not planned")
        first = ranks.setdefault(offsets, number)
        if first == number:
            rows.append((offsets, sizes[offsets], number))
        elif math.prod(sizes[offsets]):
            raise BadArgumentError(f"{fqn}: ranks {files[first].rank} and {files[number].rank} wrote shard {offsets}")
    missing = sorted(sizes.keys() - ranks.keys())
    if missing:
        raise BadArgumentError(f"{fqn}: no rank wrote its shards at {missing[:5]}")
    return tuple(rows)


def _shards(rows: Any) -> tuple[Shard, ...]:
    """Return the shards of one layout; those of one file are counted in order."""
    seen: dict[int, int] = {}
    shards = []
    for offsets, sizes, number in rows:
        shards.append(Shard(offsets, sizes, number, seen.get(number, 0)))
        seen[number] = seen.get(number, 0) + 1
    return tuple(shards)


def _checked_path(fqn: str, path: Any) -> tuple[str | int, ...] | None:
    if path is None:
        return None
    if not is_path(path):
        raise ValueError(f"{fqn}: its path {str(path)[:100]} does not consist of strings and positions")
    return tuple(path)


def is_path(path: Any) -> bool:
    """Return whether this is a path of keys and of positions in lists that begins with a key."""
    return (
        isinstance(path, (list, tuple))
        and 0 < len(path) <= 64
        and isinstance(path[0], str)
        and all(isinstance(k, str) or (type(k) is int and 0 <= k <= MAX_POSITION) for k in path)
    )


def is_tree(paths: Mapping[str, Sequence[str | int]]) -> bool:
    """Return whether the paths of entries form a tree whose lists have few gaps.

    No entry is at or below another one, and all lists have at most `MAX_GAPS` empty positions.

    Example:
        >>> is_tree({"a.0": ("a", 0), "a.1": ("a", 1)}), is_tree({"a.0": ("a", 4_000_000)})
        (True, False)
    """
    places = set(map(tuple, paths.values()))
    if len(places) < len(paths):
        return False
    lengths: dict[tuple[str | int, ...], int] = {}
    for path in places:
        for i, key in enumerate(path):
            above = path[:i]
            if above in places:
                return False
            if isinstance(key, int):
                lengths[above] = max(lengths.get(above, 0), key + 1)
    # A place that is not empty has an element of a path of its own.
    return sum(lengths.values()) <= MAX_GAPS + sum(map(len, paths.values()))


def parse(data: bytes, where: str) -> Index:
    """Read and check a metadata file; the inverse of `Index.to_bytes`.

    Args:
        data: its bytes.
        where: its path, for messages.

    Raises:
        CorruptDataError: truncated, altered, or of another format (such as torch's pickle).
        NewerFormatError: written by a newer version.
    """
    if len(data) > MAX_BYTES:
        raise CorruptDataError(f"{where}: {len(data)} bytes; metadata has at most {MAX_BYTES}")
    front = _FRONT.match(data)
    if front is None:
        raise CorruptDataError(f"{where}: no metadata of a shrinkpoint checkpoint")
    if xxhash.xxh3_128_hexdigest(b"{" + data[front.end() :]).encode() != front.group(1):
        raise CorruptDataError(f"{where}: the checksum does not match")
    try:
        fields = loads(data)
        version = fields["version"]
        if type(version) is int and version > VERSION and fields["format"] == FORMAT:
            raise NewerFormatError(f"{where}: metadata version {version}; this reader knows up to {VERSION}")
        if (fields["format"], version) != (FORMAT, VERSION) or type(version) is not int:
            raise ValueError(f"format {str(fields['format'])[:40]!r}, version {str(version)[:20]}")
        return _index(fields)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as e:
        raise CorruptDataError(f"{where}: malformed: {type(e).__name__} {str(e)[:200]}") from None


def _index(fields: Mapping[str, Any]) -> Index:
    files = tuple(_file(row) for row in fields["files"])
    if len({f.rank for f in files}) != len(files):
        raise ValueError("two files of one rank")
    layouts = tuple(Layout(_shards(_row(r, len(files)) for r in rows)) for rows in fields["layouts"])
    pairs = 0
    for number, layout in enumerate(layouts):
        is_alike = len({len(s.sizes) for s in layout.shards}) < 2
        pairs += sum(len(group) * (1 + group.size) for group in layout.tangled) if is_alike else 0
        if pairs > MAX_PAIRS:
            raise ValueError("more shards than can be compared")
        if not is_alike or layout.overlap():
            raise ValueError(f"layout {number}: two of its shards overlap")
    partial, world = fields["partial"], fields["world"]
    if type(partial) is not bool or type(world) is not int or world < 0:
        raise ValueError("world or partial")
    entries: dict[str, Entry] = {}
    checked: set[tuple[int, Offsets]] = set()
    for fqn, row in fields["entries"].items():
        path = _checked_path(fqn, row.get("p"))
        if "b" in row:
            entries[fqn] = Entry(path, file=_number(row["b"], len(files)))
            continue
        if not isinstance(getattr(torch, str(row["d"]), None), torch.dtype):
            raise ValueError(f"{fqn}: torch has no dtype {str(row['d'])[:40]!r}")
        needs_grad, memory = row.get("g", False) is True, str(row.get("m", "contiguous_format"))
        entry = Entry(path, row["d"], _sizes(row["s"]), _number(row["l"], len(layouts)), needs_grad, memory)
        if (entry.layout, entry.size) not in checked:
            problem = layouts[entry.layout].problem(entry.size, partial)
            if problem:
                raise ValueError(f"{fqn}: {problem}")
            checked.add((entry.layout, entry.size))
        entries[fqn] = entry
    return Index(world, partial, files, layouts, entries)


def _file(row: Any) -> RankFile:
    chain = tuple((name, nbytes) for name, nbytes in row["chain"])
    numbers = (row["rank"], row["raw"], row["carried"], row["since"], row["spent"], *(n for _, n in chain))
    if not chain or not all(isinstance(name, str) and is_data(name) for name, _ in chain):
        raise ValueError(f"{str(row['chain'])[:80]} are not names of data files")
    if len({name for name, _ in chain}) != len(chain) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"the file of rank {str(row['rank'])[:20]}")
    return RankFile(row["rank"], chain, row["raw"], row["carried"], row["since"], row["spent"])


def _row(row: Any, files: int) -> tuple[Offsets, Offsets, int]:
    offsets, sizes, number = row
    return _sizes(offsets), _sizes(sizes), _number(number, files)


def _sizes(numbers: Any) -> Offsets:
    if not isinstance(numbers, list) or len(numbers) > 64:
        raise ValueError(f"{str(numbers)[:60]} is not a shape")
    if not all(type(n) is int and 0 <= n < 1 << 48 for n in numbers):
        raise ValueError(f"{str(numbers)[:60]} is not a shape")
    return tuple(numbers)


def _number(number: Any, limit: int) -> int:
    if type(number) is not int or not 0 <= number < limit:
        raise ValueError(f"number {str(number)[:20]} of {limit}")
    return number


def place(fqn: str, path: Sequence[str | int] | None) -> Place:
    """Return the keys of an entry's shard in the container's tree.

    Args:
        fqn: fully qualified name of the entry.
        path: its path in the nested state if the planner gives it; None: the state was flat.

    Example:
        >>> place("optim.state.fc.weight.exp_avg", ["optim", "state", "fc.weight", "exp_avg"])
        ('optim', 'state', 'fc.weight', 'exp_avg')
        >>> place("optim.state.fc.weight.exp_avg", None)
        ('optim', 'state', 'fc.weight', 'exp_avg')
        >>> place("optimizer.state.exp_avg.fc.weight", None)
        ('optimizer', 'state', 'fc.weight', 'exp_avg')
    """
    keys = [str(key) for key in path] if path else [fqn]
    by_entry = _BY_ENTRY.fullmatch(keys[-1])
    match = by_entry or _FLATTENED.fullmatch(keys[-1])
    if match:
        owner, parameter, entry = match.group(1, 3, 2) if by_entry else match.groups()
        keys[-1:] = [*([owner] if owner else []), "state", parameter, entry]
    if keys[0].startswith("@"):
        keys[0] = "@" + keys[0]
    return tuple(keys)


def key_of(keys: Sequence[str]) -> str:
    """Return the codec's unique key of a place (`ArrayRecord.key`)."""
    return "\x1f".join(json.dumps(key) for key in keys)


def numbered(keys: Place, ordinal: int) -> Place:
    """Return the place of an entry's shard number `ordinal` in one container."""
    return (f"@{ordinal}", *keys) if ordinal else keys


def insert(tree: dict[str, Any], keys: Place, value: Any, fqn: str) -> None:
    """Put a value into nested dicts.

    Raises:
        BadArgumentError: another entry stands there, above or below it.
        UnsupportedLeafError: a name is not a string.
    """
    if any(_SURROGATE.search(key) for key in keys):
        raise UnsupportedLeafError(f"{fqn!a}: a name with lone surrogates cannot be stored")
    node: Any = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise BadArgumentError(f"{fqn}: another entry stands at {'/'.join(keys)} or above it; rename one of them")
    if keys[-1] in node:
        raise BadArgumentError(f"{fqn}: another entry stands at {'/'.join(keys)} or below it; rename one of them")
    node[keys[-1]] = value


def kinds_of(shards: Mapping[Place, Any], values: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the kinds for `compress`: the given ones, and those that paths do not show.

    Optimizer entries other than known moments are exact, however their names were flattened; so are arrays inside of
    values that are not tensors.

    Args:
        shards: tensors by place.
        values: values that are not tensors, by fully qualified name.
        given: `{path: layer type or Kind}`, as `shrinkpoint.kinds` gives it.

    Raises:
        UnsupportedLeafError: a distributed tensor inside of another value, where ranks cannot be distinguished.
    """
    # A rank holds shards of some arrays only, and `compress` refuses kinds that fit no array. Shards have own shapes.
    table = {path: _of_shard(kind) for path, kind in (kinds_for(given, map("/".join, shards)) or {}).items()}
    for node in flatten({VALUES: dict(values)}, is_array)[1]:
        if hasattr(node.value, "device_mesh"):
            raise UnsupportedLeafError(f"{node.path}: a DTensor inside of a tuple or list of values; put it in a dict")
        table[node.path] = Kind("other", "state")
    return table


def check_named(given: Mapping[str, Any] | None, names: Iterable[str]) -> None:
    """Raise BadArgumentError if no key of the kinds is the path of a tensor of any rank.

    Only planners know where a name is to be cut into keys, so that dots and slashes are one here.

    Args:
        given: as for `kinds_of`.
        names: the fully qualified names of all ranks' tensors.

    Raises:
        BadArgumentError: with some of both, see `check_used`.
    """
    paths = ["/".join(place(fqn, None)) for fqn in names]
    table = {path.replace(".", "/"): kind for path, kind in (given or {}).items()}
    if not any(by_path(table, path.replace(".", "/")) for path in paths):
        check_used(given, paths)


def _of_shard(kind: Any) -> Any:
    return replace(kind, shape=None) if isinstance(kind, Kind) else kind
