"""Encode the arrays of a plan: each by its codec, moments in pairs, copies by number."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .base import Codec, Leaf, Prepare, Reference, Stored
from .deduplication import keeps_promise, store_copy
from .format.fields import parts_of
from .moments.firstmoment import FirstMoment, square_of
from .parallel import map_arrays
from .plan import ArrayPlan
from .streams import STREAMS


def encode(planned: Sequence[ArrayPlan], prepare: Mapping[Codec, Prepare]) -> list[Stored]:
    """Return each array encoded.

    Args:
        planned: the plan of each array.
        prepare: what prepares the arrays of a codec in place of its own `prepare`.
    """
    prepared = _prepared(planned, prepare)

    def one(i: int, leaf: Leaf) -> Stored:
        return planned[i].codec.encode(leaf, planned[i].parent, prepared[i])

    firsts = {p.pair: i for i, p in enumerate(planned) if p.pair is not None and isinstance(p.codec, FirstMoment)}
    paired = set(firsts.values())

    def work(i: int) -> list[tuple[int, Stored]]:
        """Encode an array, and its first moment while its decoded values are in memory."""
        leaf = planned[i].leaf
        stored = one(i, leaf)
        done = [(i, dataclasses.replace(stored, decoded=None))]
        if i in firsts:
            first = firsts[i]
            square = square_of(_decoded(leaf, stored, planned[i].parent), leaf.spec)
            encoded = one(first, dataclasses.replace(planned[first].leaf, sibling=square))
            done.append((first, dataclasses.replace(encoded, sibling=i) if STREAMS[encoded.stream].beside else encoded))
        return done

    order = [i for i, p in enumerate(planned) if i not in paired and p.original is None]
    found = {i: s for done in map_arrays(work, order, lambda i: planned[i].leaf.spec.size) for i, s in done}
    for i, p in enumerate(planned):
        if p.original is None:
            continue
        original, stored = planned[p.original], found[p.original]
        values = None if stored.measure == "exact" else _decoded(original.leaf, stored, original.parent)
        copy = store_copy(p.leaf, original.leaf, p.original, values)
        found[i] = copy if keeps_promise(copy, p.leaf, original.leaf, p.codec) else one(i, p.leaf)
    return [found[i] for i in range(len(planned))]


def _prepared(planned: Sequence[ArrayPlan], prepare: Mapping[Codec, Prepare]) -> list[Any]:
    """What each codec found out about all of its arrays together."""
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
    """An array as a reader of the file will see it, flat on the host."""
    if stored.decoded is not None:
        return stored.decoded()
    memory = stored.memory
    if memory is None:
        pieces = [memoryview(b"".join(parts_of(piece))) for piece in stored.pieces]
        memory = STREAMS[stored.stream].decode(leaf.spec, stored.meta, pieces, parent, None)
    return memory.values(leaf.spec)
