"""Reading chains: the data files of a step from its base upwards, each resolved by the one below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from ..codec.checkpoint import Checkpoint
from ..codec.errors import CorruptDataError, MissingParentError, ShrinkpointError
from ..codec.format.ranged import Ranged
from .catalog import Entry
from .files import Files, is_damage
from .manifest import Manifest

T = TypeVar("T")
FOLDER = "data"


def _guarded(files: Files, step: int, name: str, work: Callable[[], T]) -> T:
    """Do something with a data file; what goes wrong is said with the step and the path."""
    path = files.path(f"{FOLDER}/{name}")
    try:
        return work()
    except FileNotFoundError:
        below = name.partition("-")[0].lstrip("0") or "0"
        whose = "" if below == str(step) else f"below it, step {below}: "
        raise MissingParentError(f"step {step}: {whose}its file {path} is gone") from None
    except ShrinkpointError as e:
        raise type(e)(f"step {step}: {path}: {e}") from None
    except OSError as e:
        if not is_damage(e, local=files.local):
            raise
        raise CorruptDataError(f"step {step}: {path} cannot be read: {e}") from None


def read(files: Files, step: int, name: str, parent: Checkpoint | None) -> Checkpoint:
    """A data file's checkpoint, resolved.

    Raises:
        CorruptDataError, MissingParentError, NewerFormatError: with the step and the path.
    """
    return _guarded(files, step, name, lambda: Checkpoint.from_bytes(files.read(f"{FOLDER}/{name}"), parent))


def check(manifest: Manifest, found: Checkpoint) -> None:
    """Raise CorruptDataError unless a checkpoint is the one a manifest names."""
    if (found.id, found.nbytes, found.identity) != (manifest.id, manifest.nbytes, manifest.identity):
        raise CorruptDataError(f"step {manifest.step}: {manifest.file} is not the checkpoint its manifest names")


def resolve(files: Files, manifest: Manifest) -> tuple[Checkpoint, Checkpoint]:
    """A step's checkpoint, resolved by reading its chain from the base upwards, and that base."""
    base: Checkpoint | None = None
    found: Checkpoint | None = None
    for name in reversed(manifest.chain):
        found = read(files, manifest.step, name, found)
        base = base or found
    assert found is not None
    assert base is not None
    check(manifest, found)
    return found, base


def opener(files: Files, manifest: Manifest) -> Callable[[Checkpoint | None], Checkpoint]:
    """For `codec.partial`: opens the files of a chain one below the other, fetching their headers only."""
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
            # Its hash is not computed: that would take all of it. The name has the beginning of it.
            claimed = manifest.id if above is None else str(above.parent_id)
            data = Ranged(size, lambda start, stop: files.read_range(path, start, stop))
            ckpt = Checkpoint(data, None, claimed)
            if above is not None and "as" not in ckpt.header and not name.endswith(f"-{claimed[:16]}.spt"):
                raise CorruptDataError("is not the parent it should be")
            return ckpt

        return _guarded(files, manifest.step, name, work)

    return open_next


def carried_by(ckpt: Checkpoint) -> int:
    """Bytes of the arrays that have to be decoded of a parent before its child can be."""
    return sum(r.spec.nbytes for r in ckpt.records if r.format.has_deltas)


@dataclass(eq=False)
class Node:
    """A file in the forest of all chains; the entry is the step it is the checkpoint of, if any is left."""

    name: str
    step: int
    entry: Entry | None = None
    children: dict[str, Node] = field(default_factory=dict)

    def below(self) -> Iterator[Node]:
        """It and all nodes over it."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def forest(entries: Iterable[Entry]) -> list[Node]:
    """All chains, those with the same files at their bottom joined there; one tree a base."""
    roots: dict[str, Node] = {}
    for entry in sorted(entries, key=lambda e: e.manifest.step):
        level, node = roots, None
        for name in reversed(entry.manifest.chain):
            node = level.setdefault(name, Node(name, entry.manifest.step))
            level = node.children
        assert node is not None
        node.entry = entry
    return list(roots.values())


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a file on the way up: its checkpoint, or why there is none."""

    node: Node
    checkpoint: Checkpoint | None
    problem: ShrinkpointError | None


def walk(files: Files, root: Node) -> Iterator[Found]:
    """Resolve a tree from its base upwards, each file once; a parent is kept in memory until its last child is read.

    Whoever takes children from a node that it was given is not given what is over them.
    """
    stack: list[tuple[Node, Checkpoint | None, ShrinkpointError | None]] = [(root, None, None)]
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
        yield Found(node, ckpt, problem)
        stack.extend((child, ckpt, problem) for child in reversed(node.children.values()))
