"""Compaction of long chains to short ones, without a change of any step at any moment.

A chain of n deltas takes n decodes to restore its last step. Compaction gives each step another parent: number its
steps 0 (the base), 1, 2, ... and write i in base g; the parent of i is i with its lowest non-zero digit cleared. No
step is then farther from the base than it has non-zero digits, at most D for n <= g**D, and most deltas still span few
steps. The least g that meets the bound is taken. A delta whose parent changes is *rebased* (`codec.rebase`: a
super-step if it spans several); the others stay as they are, because a rebased checkpoint keeps its old identity.

A step moves to its new files by one new generation of its manifest, after they are durable. The old files are then
garbage for `gc`. Only steps over the bound are visited, and those below them. The next run, of any process, continues
an interrupted one: first it gives steps above moved ones the new files as parents.

Source: LC-Checkpoint, section 3.2 (super-steps).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from ..codec.checkpoint import Checkpoint
from ..codec.errors import CorruptDataError, ShrinkpointError
from ..codec.parallel import give_way
from ..codec.rebase import rebase
from ..codec.state.leaves import as_bytes
from .chain import Node, Parent, carried_by, forest, opener, reason, walk
from .files import Files
from .lock import Lease
from .manifest import DATA, Catalog, Entry, Manifest, data_name

MAX_COST = 2.5
"""Most that restoring a step of a compacted chain costs, in multiples of a base; see `Store.compact`."""
LEAST_SHARE = 0.7
"""The least cost assumed for a delta, in multiples of a base, because its whole file is read and checked even if little
of it must be decoded. Measured with the default configuration (5 M parameters, one core): 0.3 from one step to the
next, 0.75 over ten steps and more, as compaction makes them."""


_LEAST_FREED = 1 << 16
"""Files of removed steps of fewer bytes are left alone."""


def without_lowest_digit(number: int, base: int) -> int:
    """Return a positive number with its lowest non-zero digit cleared.

    Example:
        >>> [without_lowest_digit(i, 10) for i in (7, 30, 37, 100)]
        [0, 0, 30, 0]
    """
    unit = 1
    while number // unit % base == 0:
        unit *= base
    return number - number // unit % base * unit


def digit_base(steps: int, depth: int) -> int:
    """Return the least base in which numbers below `steps` have at most `depth` non-zero digits.

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


def placed_over(manifest: Manifest, parent: Parent | None) -> Manifest:
    """Return the manifest of a step that is a delta over another one; None: a base."""
    if parent is None:
        return replace(manifest, parents=(), carried=0)
    return replace(manifest, parents=parent.manifest.chain, carried=parent.carried)


def rewritten(
    files: Files, manifest: Manifest, ckpt: Checkpoint, parent: Parent | None, without: Collection[int] = ()
) -> Parent:
    """Write a step as a delta over another one (None: as a base), and read it back.

    Args:
        files: of the store; the new data file is durable when this returns.
        manifest: of the step.
        ckpt: its checkpoint.
        parent: the step below it.
        without: numbers of arrays to leave out.
    """
    below = None if parent is None else parent.checkpoint
    new = Checkpoint.from_bytes(rebase(ckpt, below, without).to_bytes(), below)
    check_same(ckpt, new, without)
    file = data_name(manifest.step, new.id)
    files.write(f"{DATA}/{file}", new.to_bytes())
    made = replace(manifest, file=file, id=new.id, identity=new.identity, nbytes=new.nbytes)
    if parent is None:
        made = replace(made, since_base=0, base_nbytes=new.nbytes, spent=0)
    return Parent(new, placed_over(made, parent))


@dataclass(frozen=True, slots=True)
class _Live(Parent):
    """A step that was visited, and its number in the chain."""

    number: int


class Compaction:
    """One compaction run over a store.

    Args:
        catalog: of the store.
        lease: held shared; renewed at every step.
        max_cost: of restoring any step, in multiples of a base, 1 or more.
        progress: called after each step with (step, done, total).
    """

    def __init__(
        self, catalog: Catalog, lease: Lease, max_cost: float, progress: Callable[[int, int, int], None] | None = None
    ) -> None:
        self._files, self._catalog, self._lease = catalog.files, catalog, lease
        self._max_cost, self._progress = max_cost, progress
        self._changed: set[int] = set()
        self._nearest = False
        self.problems: dict[int, str] = {}
        """Steps that cannot be read and stay as they were, and why."""
        self._done = self._total = 0

    def run(self) -> list[int]:
        """Compact every tree that has a step over the bound; return the moved steps, ascending."""
        roots = []
        entries = self._entries()
        self._update_parents(entries)
        for root in forest(entries.values()):
            costs = [n.entry.manifest.restore_cost for n in root.below() if n.entry is not None]
            if max(costs) > self._max_cost:
                roots.append(root)
                self._total += len(costs)
        for root in roots:
            over: set[Node] = set()  # the nodes of steps over the bound, and the nodes below them
            for node in reversed(list(root.below())):
                is_over = node.entry is not None and node.entry.manifest.restore_cost > self._max_cost
                if is_over or not over.isdisjoint(node.children.values()):
                    over.add(node)
            self._tree(root, over, self._base_for(root))
        return sorted(self._changed)

    def _entries(self) -> dict[int, Entry]:
        """Return the steps that may be moved: readable and not sharded ones."""
        entries, self.problems = self._catalog.readable()
        return {step: entry for step, entry in entries.items() if not entry.manifest.shards}

    def free(self) -> list[int]:
        """Give steps other parents, to free files of removed steps; return the moved steps.

        Only where these files take over twice the bytes of the bases that are written instead, so that every rewrite
        of a chain frees at least as much as it writes.
        """
        entries = self._entries()
        sizes = self._files.sizes(DATA)
        self._nearest = True
        for root in forest(entries.values()):
            nodes = list(root.below())
            freed = sum(sizes.get(node.name, 0) for node in nodes if node.entry is None)
            moved = {child: child.entry for node in nodes if node.entry is None for child in node.children.values()}
            written = sum(entry.manifest.base_nbytes for entry in moved.values() if entry is not None)
            if freed > max(2 * written, _LEAST_FREED):
                self._tree(root, set(nodes), None)
        return sorted(self._changed)

    def _update_parents(self, entries: dict[int, Entry]) -> None:
        """Update the parents of steps whose parent was moved; only headers are read."""
        for step in sorted(entries):
            m = entries[step].manifest
            below = entries.get(int(m.parents[0][:12])) if m.parents else None
            # A step that was thinned since has the same identity, without moments that the step above it may need.
            if below is None or below.manifest.chain == m.parents or below.manifest.lacks:
                continue
            parent = below.manifest
            give_way()
            self._lease.renew()
            try:
                same = parent.file == m.parents[0] or opener(self._files, m)(None).parent_id == parent.identity
                carried = parent.carried + carried_by(opener(self._files, parent)(None))
            except (ShrinkpointError, FileNotFoundError):
                continue  # the walk reports the reason
            moved = replace(m, parents=parent.chain, carried=carried)
            if same and carried <= m.carried and (entry := self._catalog.replace(entries[step], moved)) is not None:
                entries[step] = entry
                self._changed.add(step)

    def _tree(self, root: Node, over: set[Node], base: int | None) -> None:
        # For each file: the steps below it that may still become parents, and whether the last was moved.
        below: dict[Node, tuple[tuple[_Live, ...], bool]] = {root: ((), False)}
        for node, ckpt, problem in walk(self._files, root):
            live, is_moved = below.pop(node)
            entry = node.entry
            if entry is not None and ckpt is not None:
                live = self._step(entry, ckpt, live, base)
                is_moved = live[-1].manifest.chain != entry.manifest.chain
            elif entry is not None and problem is not None:
                self.problems[entry.manifest.step] = reason(entry.manifest.step, problem)
            if not is_moved:
                # Steps within the bound above unmoved ones are left alone, unread.
                for name, child in list(node.children.items()):
                    if child not in over:
                        self._done += sum(n.entry is not None for n in node.children.pop(name).below())
            if entry is not None:
                self._done += 1
                if self._progress is not None:
                    self._progress(entry.manifest.step, self._done, self._total)
            self._lease.renew()
            give_way()
            below.update((child, (live, is_moved)) for child in node.children.values())

    def _base_for(self, root: Node) -> int | None:
        """Return the base of the numbers of a tree's steps; None if no delta is allowed."""
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
        """Move a step to its new parent; return the steps that may be parents of later steps."""
        number = live[-1].number + 1 if live else 0
        parent = live[-1] if self._nearest and live else None
        if base is not None and number:
            target = without_lowest_digit(number, base)
            parent = next(known for known in live if known.number == target)
            raw = ckpt.raw_nbytes
            if raw and 1 + parent.carried / raw > self._max_cost:
                parent = None
        if ckpt.parent_id == (None if parent is None else parent.checkpoint.identity):
            manifest = placed_over(entry.manifest, parent)
        else:
            manifest = rewritten(self._files, entry.manifest, ckpt, parent).manifest
        if manifest != entry.manifest and self._catalog.replace(entry, manifest) is not None:
            self._changed.add(manifest.step)
        # The next step may need this one, and those whose number is this one's with digits cleared.
        kept = [known for known in live if base is not None and _is_prefix(known.number, number, base)]
        return (*kept, _Live(ckpt, manifest, number))


def _is_prefix(low: int, number: int, base: int) -> bool:
    """Return whether clearing the lowest digits of a number gives `low`."""
    while number > low:
        number = without_lowest_digit(number, base)
    return number == low


def check_same(old: Checkpoint, new: Checkpoint, without: Collection[int] = ()) -> None:
    """Raise CorruptDataError unless two checkpoints hold the same values.

    The second one is without the arrays of some numbers of the first one.
    """
    records = [record for i, record in enumerate(old.records) if i not in without]
    same = old.identity == new.identity and [r.key for r in records] == [r.key for r in new.records]
    seen: set[int] = set()
    for a, b in zip(records, new.records, strict=True) if same else ():
        if a.format.has_deltas:
            values = [as_bytes(c.values_of(r)) for c, r in ((old, a), (new, b))]
            same = same and bool((values[0] == values[1]).all())
        elif a.group.number not in seen:
            seen.add(a.group.number)
            same = same and [bytes(p) for p in old.pieces_of(a)] == [bytes(p) for p in new.pieces_of(b)]
    if not same:
        raise CorruptDataError(f"{old.id[:12]}...: rebased as {new.id[:12]}... it has other values")
