"""Chains: reading the data files of a step, from its base upwards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from ..codec.checkpoint import Checkpoint
from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError, ShrinkpointError
from ..codec.format.ranged import Ranged
from .catalog import Entry
from .files import Files, is_damage
from .manifest import Manifest

T = TypeVar("T")
FOLDER = "data"
_FEW = 4
"""Objects that are looked for one by one, rather than listed."""


def _guarded(files: Files, step: int, name: str, work: Callable[[], T]) -> T:
    """Call `work` on a data file; its errors name the step and the path."""
    path = files.path(f"{FOLDER}/{name}")
    try:
        return work()
    except FileNotFoundError:
        below = name.partition("-")[0].lstrip("0") or "0"
        whose = "" if below == str(step) else f"below it, step {below}: "
        raise MissingParentError(f"step {step}: {whose}its file {path} is missing") from None
    except ShrinkpointError as e:
        raise type(e)(f"step {step}: {path}: {e}") from None
    except OSError as e:
        if not is_damage(e, local=files.local):
            raise
        raise CorruptDataError(f"step {step}: {path} cannot be read: {e}") from None


def read(
    files: Files, step: int, name: str, parent: Checkpoint | None, reader: Callable[[str], bytes] | None = None
) -> Checkpoint:
    """Return the checkpoint of a data file, resolved; `reader` replaces `files.read`.

    Raises:
        CorruptDataError, MissingParentError, NewerFormatError: with the step and the path.
    """
    reader = reader or files.read
    return _guarded(files, step, name, lambda: Checkpoint.from_bytes(reader(f"{FOLDER}/{name}"), parent))


def check(manifest: Manifest, ckpt: Checkpoint) -> None:
    """Raise CorruptDataError unless a checkpoint is the one that a manifest names."""
    if (ckpt.id, ckpt.nbytes, ckpt.identity) != (manifest.id, manifest.nbytes, manifest.identity):
        raise CorruptDataError(f"step {manifest.step}: {manifest.file} is not the checkpoint its manifest names")


def _refuse_sharded(files: Files, manifest: Manifest) -> None:
    if manifest.shards:
        raise BadArgumentError(
            f"step {manifest.step} of {files.root} was saved by several ranks: load it by torch.distributed.checkpoint "
            f"with storage_reader=shrinkpoint.trainers.dcp.Reader(store, {manifest.step})"
        )


def missing(files: Files, names: Collection[str]) -> set[str]:
    """Return the missing ones of these data files; on a disk, without listing a large folder."""
    if files.local or len(names) <= _FEW:
        return {name for name in names if not files.exists(f"{FOLDER}/{name}")}
    # A listing may lag behind other hosts.
    absent = set(names).difference(files.list(FOLDER))
    return {name for name in absent if not files.exists(f"{FOLDER}/{name}")}


def resolve(
    files: Files, manifest: Manifest, reader: Callable[[str], bytes] | None = None
) -> tuple[Checkpoint, Checkpoint]:
    """Return a step's checkpoint, resolved by reading its chain upwards, and the base.

    Args:
        files: of the store.
        manifest: of the step.
        reader: reads a file; None: `files.read`.

    Raises:
        BadArgumentError: several ranks saved it.
        CorruptDataError, MissingParentError, NewerFormatError: with the step and the path.
    """
    _refuse_sharded(files, manifest)
    ckpt = base = read(files, manifest.step, manifest.chain[-1], None, reader)
    for name in reversed(manifest.chain[:-1]):
        ckpt = read(files, manifest.step, name, ckpt, reader)
    check(manifest, ckpt)
    return ckpt, base


def reason(step: int, problem: ShrinkpointError) -> str:
    """Return the reason of a problem in the chain of a step, with the step."""
    text = str(problem)
    return text if text.startswith(f"step {step}:") else f"step {step}: below it, {text}"


def opener(files: Files, manifest: Manifest) -> Callable[[Checkpoint | None], Checkpoint]:
    """Return a function that opens the headers of a chain downwards, for `codec.partial`."""
    _refuse_sharded(files, manifest)
    names = iter(manifest.chain)

    def open_next(above: Checkpoint | None) -> Checkpoint:
        name = next(names, None)
        if name is None:
            raise MissingParentError(f"step {manifest.step}: its manifest names no parent of its last file")
        path = f"{FOLDER}/{name}"

        def work() -> Checkpoint:
            size = files.size(path)
            if above is None and size != manifest.nbytes:
                raise CorruptDataError(f"{size} bytes; its manifest says {manifest.nbytes}")
            # Its hash is not computed, which would read all of it. The name contains the beginning of the hash.
            claimed = manifest.id if above is None else str(above.parent_id)
            data = Ranged(size, lambda start, stop: files.read_range(path, start, stop))
            ckpt = Checkpoint(data, None, claimed)
            if above is not None and "as" not in ckpt.header and not name.endswith(f"-{claimed[:16]}.spt"):
                raise CorruptDataError("is not the parent it should be")
            return ckpt

        return _guarded(files, manifest.step, name, work)

    return open_next


def carried_by(ckpt: Checkpoint) -> int:
    """Return the bytes of the arrays of a parent that must be decoded before its child."""
    return sum(r.spec.nbytes for r in ckpt.records if r.format.has_deltas)


@dataclass(eq=False)
class Node:
    """A file in the forest of all chains; `entry` is its step, None if that was removed."""

    name: str
    step: int
    entry: Entry | None = None
    children: dict[str, Node] = field(default_factory=dict)

    def below(self) -> Iterator[Node]:
        """Yield this node and all nodes above it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def forest(entries: Iterable[Entry]) -> list[Node]:
    """Return all chains as trees, one per base; chains that share files share nodes."""
    roots: dict[str, Node] = {}
    for entry in sorted(entries, key=lambda e: e.manifest.step):
        level, node = roots, None
        for name in reversed(entry.manifest.chain):
            node = level.setdefault(name, Node(name, entry.manifest.step))
            level = node.children
        assert node is not None
        node.entry = entry
    return list(roots.values())


Visit = tuple[Node, Checkpoint | None, ShrinkpointError | None]
"""A file that was read: its node, and its checkpoint or the reason why it is unusable."""


def walk(files: Files, root: Node) -> Iterator[Visit]:
    """Resolve a tree from its base upwards; hold a parent until its last child is read.

    A caller that removes children from a node that was yielded skips everything above them.
    """
    # Each file with its parent's checkpoint.
    stack: list[Visit] = [(root, None, None)]
    while stack:
        node, parent, problem = stack.pop()
        ckpt = None
        if problem is None:
            try:
                ckpt = read(files, node.step, node.name, parent)
                if node.entry is not None:
                    check(node.entry.manifest, ckpt)
            except ShrinkpointError as e:
                ckpt, problem = None, e
        parent = None
        yield node, ckpt, problem
        stack.extend((child, ckpt, problem) for child in reversed(node.children.values()))
