"""Encoding of the arrays of a plan.

Small arrays are encoded in bundles, others alone. A first moment follows its second moment, which scales it. A copy
is stored as the number of its original.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .base import Codec, Leaf, Prepare, Reference, Stored
from .bundles.grouping import bundled, can_follow, encode_together
from .bundles.joined import StoredBundle
from .deduplication import keeps_promise, store_copy
from .format.fields import parts_of
from .moments.firstmoment import FirstMoment, square_of
from .parallel import map_arrays
from .plan import ArrayPlan
from .streams import STREAMS


@dataclass(frozen=True, slots=True)
class Encoded:
    """Encoded arrays and bundles of a plan.

    Args:
        arrays: stored arrays by number; members of bundles have no pieces.
        bundles: arrays that were coded together.
    """

    arrays: dict[int, Stored] = field(default_factory=dict)
    bundles: list[StoredBundle] = field(default_factory=list)


def encode(planned: Sequence[ArrayPlan], prepare: Mapping[Codec, Prepare]) -> Encoded:
    """Encode all arrays of a plan.

    Args:
        planned: the plan of each array.
        prepare: functions to call in place of `Codec.prepare`, by codec.
    """
    encoder = _Encoder(planned, _prepared(planned, prepare))
    jobs = encoder.jobs()
    sizes = [sum(planned[i].leaf.spec.size for i in job) for job in jobs]
    done = map_arrays(lambda number: encoder.encode(jobs[number]), range(len(jobs)), lambda number: sizes[number])
    found = Encoded()
    for part in done:
        found.arrays.update(part.arrays)
        found.bundles.extend(part.bundles)
    for i, p in enumerate(planned):
        if p.original is not None:
            found.arrays[i] = encoder.copy(i, p.original, found.arrays[p.original])
    return found


class _Encoder:
    """Encoder of the arrays of a plan in jobs; a job may run in any thread.

    Args:
        planned: the plan of each array.
        prepared: the result of `Codec.prepare` for each array.
    """

    def __init__(self, planned: Sequence[ArrayPlan], prepared: Sequence[Any]) -> None:
        self.planned, self.prepared = planned, prepared
        self.firsts = {
            p.pair: i for i, p in enumerate(planned) if p.pair is not None and isinstance(p.codec, FirstMoment)
        }

    def jobs(self) -> list[list[int]]:
        """Return groups of arrays to encode together, in the order of the state.

        First moments are left out: `encode` encodes them after their second moments.
        """
        paired = set(self.firsts.values())
        groups = bundled(self.planned, self.firsts)
        taken = paired.union(*groups)
        alone = [[i] for i, p in enumerate(self.planned) if i not in taken and p.original is None]
        return sorted(groups + alone)

    def encode(self, job: Sequence[int]) -> Encoded:
        """Encode the arrays of a job and then their first moments, which need the decoded values."""
        found = Encoded()
        self._encode([(i, self.planned[i].leaf) for i in job], found)
        following: dict[bool, list[tuple[int, Leaf]]] = {True: [], False: []}
        for i in job:
            if i in self.firsts:
                leaf, first = self.planned[i].leaf, self.planned[self.firsts[i]]
                square = square_of(_decoded(leaf, found.arrays[i], self.planned[i].parent), leaf.spec)
                following[can_follow(first)].append((self.firsts[i], dataclasses.replace(first.leaf, pair=square)))
        self._encode(following[True], found)
        for one in following[False]:
            self._encode([one], found)
        for i in job:
            found.arrays[i] = dataclasses.replace(found.arrays[i], decoded=None)
            first_number = self.firsts.get(i)
            if first_number is not None and STREAMS[found.arrays[first_number].stream].pair:
                found.arrays[first_number] = dataclasses.replace(found.arrays[first_number], pair=i)
        return found

    def copy(self, number: int, of: int, stored: Stored) -> Stored:
        """Encode an array as a copy of one that is already encoded."""
        own, original = self.planned[number], self.planned[of]
        values = None if stored.measure == "exact" else _decoded(original.leaf, stored, original.parent)
        copy = store_copy(own.leaf, original.leaf, of, values)
        return copy if keeps_promise(copy, own.leaf, original.leaf, own.codec) else self._alone(number, own.leaf)

    def _alone(self, number: int, leaf: Leaf) -> Stored:
        return self.planned[number].codec.encode(leaf, self.planned[number].parent, self.prepared[number])

    def _encode(self, arrays: Sequence[tuple[int, Leaf]], found: Encoded) -> None:
        """Encode arrays in bundles, and those that belong to no bundle alone."""
        done: dict[int, Stored | None] = {}
        if len(arrays) > 1:
            numbers = [i for i, _ in arrays]
            plans, parents = [self.prepared[i] for i in numbers], [self.planned[i].parent for i in numbers]
            codec = self.planned[numbers[0]].codec
            together = encode_together(codec, [leaf for _, leaf in arrays], parents, plans)
            done = {numbers[at]: stored for at, stored in together.alone.items()}
            for bundle in together.bundles:
                members = [numbers[at] for at in bundle.members]
                found.arrays.update(zip(members, bundle.stored, strict=True))
                found.bundles.append(dataclasses.replace(bundle, members=members))
        for i, leaf in arrays:
            if i not in found.arrays:
                stored = done.get(i)
                found.arrays[i] = self._alone(i, leaf) if stored is None else stored


def _prepared(planned: Sequence[ArrayPlan], prepare: Mapping[Codec, Prepare]) -> list[Any]:
    """Return for each array the result of its codec's `prepare` over all arrays of that codec."""
    found: list[Any] = [None] * len(planned)
    groups: dict[Codec, list[int]] = {}
    for i, p in enumerate(planned):
        groups.setdefault(p.codec, []).append(i)
    for codec, group in groups.items():
        leaves, parents = [planned[i].leaf for i in group], [planned[i].parent for i in group]
        for i, one in zip(group, prepare.get(codec, codec.prepare)(leaves, parents), strict=True):
            found[i] = one
    return found


def _decoded(leaf: Leaf, stored: Stored, parent: Reference | None) -> Any:
    """Return an array as a reader of the file will see it, flat on the host."""
    if stored.decoded is not None:
        return stored.decoded()
    reference = stored.reference
    if reference is None:
        pieces = [memoryview(b"".join(parts_of(piece))) for piece in stored.pieces]
        reference = STREAMS[stored.stream].decode(leaf.spec, stored.meta, pieces, parent, None)
    return reference.values(leaf.spec)
