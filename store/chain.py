"""Chains: the data files of a step, from its base upwards, and the head for the next delta."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..codec.checkpoint import Checkpoint, content_hash
from ..codec.config import ChainPolicy
from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError, NewerFormatError, ShrinkpointError
from ..codec.format.ranged import Ranged
from ..codec.parallel import give_way
from .files import Files, StoreWarning, read_error
from .manifest import DATA, Catalog, Entry, Manifest, data_name

Reader = Callable[[str], bytes]
_FEW = 4
"""Objects that are looked for one by one, rather than listed."""


@contextlib.contextmanager
def naming_errors(files: Files, step: int, name: str) -> Iterator[None]:
    """Let the errors of reading a data file name the step and the path."""
    path = files.path(f"{DATA}/{name}")
    try:
        yield
    except FileNotFoundError:
        below = name.partition("-")[0].lstrip("0") or "0"
        whose = "" if below == str(step) else f"below it, step {below}: "
        raise MissingParentError(f"step {step}: {whose}its file {path} is missing") from None
    except ShrinkpointError as e:
        raise type(e)(f"step {step}: {path}: {e}") from None
    except OSError as e:
        raise read_error(files, f"step {step}: {path}", e) from None


def read(files: Files, step: int, name: str, parent: Checkpoint | None, reader: Reader | None = None) -> Checkpoint:
    """Return the checkpoint of a data file, resolved; `reader` replaces `files.read`.

    Raises:
        CorruptDataError, MissingParentError, NewerFormatError: with the step and the path.
    """
    with naming_errors(files, step, name):
        return Checkpoint.from_bytes((reader or files.read)(f"{DATA}/{name}"), parent)


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
        return {name for name in names if not files.exists(f"{DATA}/{name}")}
    # A listing may lag behind other hosts.
    absent = set(names).difference(files.list(DATA))
    return {name for name in absent if not files.exists(f"{DATA}/{name}")}


def resolve(files: Files, manifest: Manifest, reader: Reader | None = None) -> tuple[Checkpoint, Checkpoint]:
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
        path = f"{DATA}/{name}"

        with naming_errors(files, manifest.step, name):
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

    return open_next


class _Fetched:
    """Files of a bucket, each fetched whole, when it is first asked for."""

    local = False

    def __init__(self, files: Files) -> None:
        self.path, self.root, self._read, self._held = files.path, files.root, files.read, dict[str, memoryview]()

    def size(self, name: str) -> int:
        """See `Files`."""
        if name not in self._held:
            self._held[name] = memoryview(self._read(name))
        return len(self._held[name])

    def read_range(self, name: str, start: int, stop: int) -> memoryview:
        """See `Files`."""
        return self._held[name][start:stop]


def intact(files: Files, manifest: Manifest) -> Callable[[Checkpoint | None], Checkpoint]:
    """Return `opener(files, manifest)` that also checks the content hash of each file.

    Files of a disk are read twice, by parts. Those of a bucket are fetched once and stay in memory.
    """
    source: Any = files if files.local else _Fetched(files)
    open_next, names = opener(source, manifest), iter(manifest.chain)

    def open_checked(above: Checkpoint | None) -> Checkpoint:
        ckpt, name = open_next(above), next(names)
        with naming_errors(files, manifest.step, name):
            digest = content_hash(ckpt.blocks())
            if not name.endswith(f"-{digest[:16]}.spt") or (above is None and digest != manifest.id):
                raise CorruptDataError("its bytes differ from those written")
        return ckpt

    return open_checked


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


def is_whole(files: Files, name: str) -> bool:
    """Return whether a data file exists, is intact, and matches its name.

    The work may be interrupted before the file is read.
    """
    give_way()
    try:
        return name.endswith(f"-{read(files, 0, name, None).id[:16]}.spt")
    except ShrinkpointError:
        return False


_LEAST = 1 << 16
_WORTH = 0.99


class ChainSizes(Protocol):
    """The sizes of the checkpoint saved last, by which `wants_base` decides; see `Manifest`."""

    @property
    def nbytes(self) -> int: ...
    @property
    def since_base(self) -> int: ...
    @property
    def base_nbytes(self) -> int: ...
    @property
    def spent(self) -> int: ...


def wants_base(policy: ChainPolicy, last: ChainSizes, restore_cost: float) -> bool:
    """Return whether the checkpoint after `last` must be a base.

    The size predictor compares two sums for the next i + 1 checkpoints, in multiples of the base. If the first is a
    base and the others grow as since the last base, they take `1 + S1 + ... + Si`; as deltas they take at least
    `(i + 1) Si`. The predictor is meant for deltas against the base, which grow; deltas of a linear chain grow little.

    Args:
        policy: the chain policy.
        last: the checkpoint saved last.
        restore_cost: of the delta that would be made, in multiples of a base.

    Example:
        >>> from shrinkpoint import ChainPolicy
        >>> last = Manifest(1, "", "", "", 30, 100, ("base",), 0, since_base=2, base_nbytes=50, spent=40)
        >>> wants_base(ChainPolicy(None, predictor="size"), last, 2.0)  # 50 + 10 + 30 <= 3 * 30
        True

    Source: Check-N-Run, section 5.1 (intermittent differential checkpoint).
    """
    i = last.since_base
    if policy.base_every is not None and i + 1 >= policy.base_every:
        return True
    if policy.predictor == "size" and i >= 1 and last.base_nbytes + last.spent <= (i + 1) * last.nbytes:
        return True
    return policy.max_restore_cost is not None and restore_cost > policy.max_restore_cost


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes of a checkpoint, stored and raw."""

    stored: int
    raw: int

    @staticmethod
    def of(ckpt: Checkpoint) -> Size:
        """Return the size of a checkpoint."""
        return Size(ckpt.nbytes, ckpt.raw_nbytes)


def is_pointless(delta: Size, base: Size) -> bool:
    """Return whether a delta saves less than a hundredth of a base's bytes.

    With a mask of one bit per value, as in BitSnap, this is so if over 15/16 of the 16-bit values changed. The
    hundredth allows for the few arrays (norms, counters) that are coded differently. Below 64 KiB the answer is no:
    headers dominate there.

    Args:
        delta: a delta.
        base: a base. It may be of another state, of another size: shares of the raw bytes are compared.

    Example:
        >>> [is_pointless(Size(n, 400_000), Size(90_000, 300_000)) for n in (118_000, 119_000)]
        [False, True]

    Source: BitSnap, section 3.3.
    """
    return delta.stored >= _LEAST and delta.stored * base.raw >= _WORTH * base.stored * delta.raw


def smaller(
    policy: ChainPolicy, delta: Checkpoint, base: Size, whole: Callable[[], Checkpoint]
) -> tuple[Checkpoint, Size | None]:
    """Return a delta, or a base if the policy allows it and the delta saves almost nothing.

    Args:
        policy: the chain policy.
        delta: the delta.
        base: the size of a base, as far as it is known.
        whole: makes the base; called only if the decision is close.

    Returns:
        The one to be saved, and the size of the base of this state; None if it was not made.
    """
    if not policy.only_smaller or not is_pointless(Size.of(delta), base):
        return delta, None
    made = whole()
    # Without the headers: that of a delta is larger.
    sizes = [Size(sum(record.nbytes for record in ckpt.records), ckpt.raw_nbytes) for ckpt in (delta, made)]
    return made if is_pointless(*sizes) else delta, Size.of(made)


@dataclass(frozen=True, slots=True)
class Parent:
    """A step that others may become deltas over: its checkpoint, resolved, and its manifest."""

    checkpoint: Checkpoint
    manifest: Manifest

    @property
    def carried(self) -> int:
        """Bytes of the arrays that must be decoded before a delta over this step."""
        return self.manifest.carried + carried_by(self.checkpoint)


@dataclass(frozen=True, slots=True)
class ChainHead(Parent):
    """The parent of the next delta, and the checkpoint saved or loaded last.

    Args:
        checkpoint: the future parent, resolved.
        manifest: of the parent.
        last: manifest of the checkpoint saved or loaded last: the parent itself, or one above it.
    """

    last: Manifest

    @staticmethod
    def at(policy: ChainPolicy, manifest: Manifest, ckpt: Checkpoint, base: Checkpoint) -> ChainHead:
        """Return the head after a chain was read: its end or its base, as the policy says."""
        if policy.against == "previous" or base is ckpt:
            return ChainHead(ckpt, manifest, manifest)
        # The base's own manifest may be removed.
        return ChainHead(base, manifest_over(None, int(manifest.chain[-1][:12]), base, None), manifest)

    @staticmethod
    def after(policy: ChainPolicy, manifest: Manifest, ckpt: Checkpoint, head: ChainHead | None) -> ChainHead:
        """Return the head after saving over `head` (None: a base), as the policy says."""
        if policy.against == "base" and head is not None:
            return replace(head, last=manifest)
        return ChainHead(ckpt, manifest, manifest)

    @property
    def base_size(self) -> Size:
        """Return the size of the chain's base if its state was as large as the parent's."""
        return Size(self.last.base_nbytes, self.checkpoint.raw_nbytes)

    def next(self, policy: ChainPolicy) -> ChainHead | None:
        """Return this head, or None if a base is due."""
        raw = self.checkpoint.raw_nbytes
        return None if wants_base(policy, self.last, 1.0 + (self.carried / raw if raw else 0.0)) else self

    def now(self, catalog: Catalog) -> ChainHead | None:
        """Return the head with its present files, or None if it was removed."""
        files, entry = catalog.files, None
        with contextlib.suppress(CorruptDataError, NewerFormatError):
            entry = catalog.get(self.manifest.step)
        # A thinned step has the identity of the whole one, but not its moments.
        is_same = (
            entry is not None
            and entry.manifest.identity == self.manifest.identity
            and entry.manifest.lacks == self.manifest.lacks
        )
        now = replace(self, manifest=entry.manifest) if entry is not None and is_same else self
        # Files of a step that was replaced or removed may still exist for others.
        gone = missing(files, now.manifest.chain)
        if gone and is_same:
            names = ", ".join(files.path(f"{DATA}/{name}") for name in sorted(gone)[:3])
            message = f"step {now.manifest.step}: {names} is missing: a new chain begins; verify() lists the losses"
            warnings.warn(message, StoreWarning, stacklevel=3)
        elif gone and not catalog.steps():
            message = f"step {now.manifest.step} and all others are missing from {files.root}: moved or unmounted? "
            message += "The next save begins a new chain with a base"
            warnings.warn(message, StoreWarning, stacklevel=3)
        return None if gone else now


def manifest_over(head: ChainHead | None, step: int, ckpt: Checkpoint, metric: float | None) -> Manifest:
    """Return the manifest of a checkpoint saved over `head`; None: as a base."""
    fields = (step, data_name(step, ckpt.id), ckpt.id, ckpt.identity, ckpt.nbytes, ckpt.raw_nbytes)
    if head is None:
        return Manifest(*fields, (), 0, since_base=0, base_nbytes=ckpt.nbytes, spent=0, metric=metric)
    return Manifest(
        *fields,
        head.manifest.chain,
        head.carried,
        since_base=head.last.since_base + 1,
        base_nbytes=head.last.base_nbytes,
        spent=head.last.spent + ckpt.nbytes,
        metric=metric,
    )
