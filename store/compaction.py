"""Compaction: long chains become short ones, and every step stays what it was, to the bit, at every instant.

A chain of n deltas takes n decodes to restore its last step. Compaction gives each step another parent: number its
steps 0 (the base), 1, 2, ... and write i in base g; the parent of i is i with its lowest non-zero digit cleared. No
step is then farther from the base than it has non-zero digits, at most D for n <= g**D, and most deltas still span few
steps. The least g that meets the bound is taken. A delta whose parent changes is *stated anew* (`codec.rebase`: a
super-step where it spans several); the others stay as they are, for a checkpoint that was stated anew answers to its
old identity.

A step moves to its new files by one new generation of its manifest, after they are durable. The old files are garbage
then, for `gc`. Only what is over the bound is visited, and what it stands on. A run that was interrupted is gone on
with by the next one, of whatever process: first, what stands on old files of moved steps is put on their new ones.

Source: LC-Checkpoint, section 4.3 (super-steps).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..codec.checkpoint import Checkpoint
from ..codec.errors import CorruptDataError, ShrinkpointError
from ..codec.parallel import give_way
from ..codec.rebase import rebase
from ..codec.state.leaves import as_bytes
from .catalog import Catalog, Entry
from .chain import FOLDER, Node, carried_by, forest, opener, walk
from .files import Files
from .lock import Lease
from .manifest import Manifest, data_name

LEAST_SHARE = 0.7
"""What a delta is taken to cost at the least, in multiples of a base, however little of it has to be decoded: its file
is read and checked too. Measured by the default configuration (5 M parameters, one core): 0.3 from one step to the
next, 0.75 over ten steps and more, as compaction makes them."""


def without_lowest_digit(number: int, base: int) -> int:
    """A positive number with its lowest non-zero digit cleared.

    Example:
        >>> [without_lowest_digit(i, 10) for i in (7, 30, 37, 100)]
        [0, 0, 30, 0]
    """
    unit = 1
    while number // unit % base == 0:
        unit *= base
    return number - number // unit % base * unit


def digit_base(steps: int, depth: int) -> int:
    """The least base g >= 2 in which no number below `steps` has more than `depth` (1 or more) non-zero digits.

    Example:
        >>> digit_base(100, 2), digit_base(100, 6), digit_base(100, 1)
        (10, 2, 99)
    """
    for base in itertools.count(2):
        # The number with the most non-zero digits below g**k has k of them; 11...1 is the least such.
        least = sum(base**i for i in range(depth + 1))
        if steps <= least:
            return base
    raise AssertionError


@dataclass(frozen=True, slots=True)
class _Live:
    """A step on the way up: its number in the chain, its checkpoint, its manifest as it will be."""

    number: int
    checkpoint: Checkpoint
    manifest: Manifest

    @property
    def carried(self) -> int:
        return self.manifest.carried + carried_by(self.checkpoint)


class Compaction:
    """One run over a store.

    Args:
        files: of the store.
        catalog: of the store.
        lease: held shared; renewed from step to step.
        max_cost: of restoring any step, in multiples of a base, 1 or more.
        progress: called after each step with (step, done, total).
    """

    def __init__(
        self,
        files: Files,
        catalog: Catalog,
        lease: Lease,
        max_cost: float,
        progress: Callable[[int, int, int], None] | None,
    ) -> None:
        self._files, self._catalog, self._lease = files, catalog, lease
        self._max_cost, self._progress = max_cost, progress
        self._changed: set[int] = set()
        self.problems: dict[int, str] = {}
        """Steps that are not readable and stayed as they were, and why."""
        self._done = self._total = 0

    def run(self) -> list[int]:
        """Compact every tree that has a step over the bound; returns the steps that were moved, ascending."""
        roots = []
        # Of a step with an unreadable manifest nothing is known; it stays as it is.
        entries, self.problems = self._catalog.readable()
        self._go_on(entries)
        for root in forest(entries.values()):
            costs = [n.entry.manifest.restore_cost for n in root.below() if n.entry is not None]
            if max(costs) > self._max_cost:
                roots.append(root)
                self._total += len(costs)
        for root in roots:
            self._tree(root)
        return sorted(self._changed)

    def _go_on(self, entries: dict[int, Entry]) -> None:
        """Put steps whose parent was moved without them on its new files: no data is read for it but headers."""
        for step in sorted(entries):
            m = entries[step].manifest
            below = entries.get(int(m.parents[0][:12])) if m.parents else None
            if below is None or below.manifest.chain == m.parents:
                continue
            parent = below.manifest
            give_way()
            self._lease.renew()
            try:
                same = parent.file == m.parents[0] or opener(self._files, m)(None).parent_id == parent.identity
                carried = parent.carried + carried_by(opener(self._files, parent)(None))
            except (ShrinkpointError, FileNotFoundError):
                continue  # the walk says why
            moved = replace(m, parents=parent.chain, carried=carried)
            if same and carried <= m.carried and (entry := self._catalog.replace(entries[step], moved)) is not None:
                entries[step] = entry
                self._changed.add(step)

    def _tree(self, root: Node) -> None:
        base, over = self._base_for(root), self._over(root)
        # For each file: the steps below it that something above may still be coded against, and whether any was moved.
        below: dict[Node, tuple[tuple[_Live, ...], bool]] = {root: ((), False)}
        for found in walk(self._files, root):
            live, is_moved = below.pop(found.node)
            entry = found.node.entry
            if entry is not None and found.checkpoint is not None:
                live = self._step(entry, found.checkpoint, live, base)
                is_moved = live[-1].manifest.chain != entry.manifest.chain
            elif entry is not None and found.problem is not None:
                why, step = str(found.problem), entry.manifest.step
                self.problems[step] = why if why.startswith(f"step {step}:") else f"step {step}: below it, {why}"
            if not is_moved:
                # What is within the bound and stands on what stays is left alone, unread.
                for name, child in list(found.node.children.items()):
                    if child not in over:
                        self._done += sum(node.entry is not None for node in found.node.children.pop(name).below())
            if entry is not None:
                self._done += 1
                if self._progress is not None:
                    self._progress(entry.manifest.step, self._done, self._total)
            self._lease.renew()
            give_way()
            below.update((child, (live, is_moved)) for child in found.node.children.values())

    def _over(self, root: Node) -> set[Node]:
        """The nodes of steps over the bound, and of what these stand on."""
        found: set[Node] = set()
        for node in reversed(list(root.below())):
            is_over = node.entry is not None and node.entry.manifest.restore_cost > self._max_cost
            if is_over or not found.isdisjoint(node.children.values()):
                found.add(node)
        return found

    def _base_for(self, root: Node) -> int | None:
        """The base of the numbers of a tree's steps; None where the bound leaves room for no delta."""
        deepest, share = 0, LEAST_SHARE
        stack = [(root, 0)]
        while stack:
            node, above = stack.pop()
            if node.entry is not None:
                m = node.entry.manifest
                if m.parents and m.raw_nbytes:
                    share = max(share, m.carried / m.raw_nbytes / len(m.parents))
                above += 1
                deepest = max(deepest, above)
            stack.extend((child, above) for child in node.children.values())
        room = int((self._max_cost - 1) / share + 1e-6)
        return digit_base(deepest, room) if room else None

    def _step(self, entry: Entry, ckpt: Checkpoint, live: tuple[_Live, ...], base: int | None) -> tuple[_Live, ...]:
        """Move a step to its new parent; returns what the steps above it may be coded against."""
        number = live[-1].number + 1 if live else 0
        parent = None
        if base is not None and number:
            target = without_lowest_digit(number, base)
            parent = next(known for known in live if known.number == target)
            raw = ckpt.raw_nbytes
            if raw and 1 + parent.carried / raw > self._max_cost:
                parent = None
        manifest = self._restated(entry.manifest, ckpt, parent)
        if manifest != entry.manifest and self._catalog.replace(entry, manifest) is not None:
            self._changed.add(manifest.step)
        # Of what the next step may need: this one, and where this one's number has fewer digits.
        kept = [known for known in live if base is not None and _is_prefix(known.number, number, base)]
        return (*kept, _Live(number, ckpt, manifest))

    def _restated(self, manifest: Manifest, ckpt: Checkpoint, parent: _Live | None) -> Manifest:
        """The step's manifest over another parent, its data file durable."""
        chain = parent.manifest.chain if parent is not None else ()
        carried = parent.carried if parent is not None else 0
        if ckpt.parent_id == (parent.checkpoint.identity if parent is not None else None):
            return replace(manifest, parents=chain, carried=carried)
        new = rebase(ckpt, parent.checkpoint if parent is not None else None)
        _check_same(ckpt, Checkpoint.from_bytes(new.to_bytes(), parent.checkpoint if parent is not None else None))
        file = data_name(manifest.step, new.id)
        self._files.write(f"{FOLDER}/{file}", new.to_bytes())
        moved = replace(
            manifest, file=file, id=new.id, identity=new.identity, nbytes=new.nbytes, parents=chain, carried=carried
        )
        return moved if parent is not None else replace(moved, since_base=0, base_nbytes=new.nbytes, spent=0)


def _is_prefix(low: int, number: int, base: int) -> bool:
    """Whether clearing lowest digits of a number leads to `low`."""
    while number > low:
        number = without_lowest_digit(number, base)
    return number == low


def _check_same(old: Checkpoint, new: Checkpoint) -> None:
    """Raise CorruptDataError unless two checkpoints hold the same: nothing is replaced on trust."""
    same = old.identity == new.identity and len(old.records) == len(new.records)
    for a, b in zip(old.records, new.records, strict=True) if same else ():
        if a.format.has_deltas:
            values = [as_bytes(c.values_of(r)) for c, r in ((old, a), (new, b))]
            same = same and bool((values[0] == values[1]).all())
        else:
            same = same and [bytes(p) for p in old.pieces_of(a)] == [bytes(p) for p in new.pieces_of(b)]
    if not same:
        raise CorruptDataError(f"{old.id[:12]}...: restated as {new.id[:12]}... it is not the same")
