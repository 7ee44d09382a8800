"""What a search is about: a state taken apart into the arrays that points change and the rest, and put together."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from ..codec import tree
from ..codec.base import Array, Leaf, Memory
from ..codec.checkpoint import Checkpoint, check_resolved, decompress
from ..codec.compress import compress
from ..codec.config import Config
from ..codec.kinds import check_kinds
from ..codec.leaves import as_bytes, build_leaf, from_bytes, is_array, read_leaf
from ..codec.matching import gradients_by_path, matched, tie
from ..codec.parallel import map_chunks
from ..codec.quantize import Quantize
from ..kernels.arrays import is_torch
from .cube import Point

_SMALL = 1 << 16
"""Bytes of an array that is compressed anew with every trial."""
_RECORD = 20
"""Bytes of an array's record in a header."""


@dataclass(frozen=True)
class Restored:
    """A state as a reader of its checkpoint would see it, and what the checkpoint takes."""

    state: Any
    nbytes: int


@dataclass(frozen=True)
class Subject:
    """A state, its parent, and which of its arrays the points of a cube treat differently.

    Args:
        nodes: the tree in preorder; array nodes refer to `arrays`.
        arrays: every array once, tied ones too; sharded ones (DTensor) whole.
        watched: the same arrays as the caller has them, of sharded ones this process's part.
        quantized: numbers of the arrays that the cube's codec encodes.
        small: numbers of arrays of few bytes that are no moments.
        leaves: those arrays, with gradients where given.
        parents: what a delta of each of them is coded against.
        codec: what encodes them, at some point of the cube.
        system: the cube's.
        rest: the configuration of all others, the same at every point.
        prev: the parent checkpoint, or None.
        grads: gradients by full path.
        kinds: as given.
    """

    nodes: list[Any]
    arrays: list[tree.ArrayNode]
    watched: list[Array]
    quantized: tuple[int, ...]
    small: tuple[int, ...]
    leaves: list[Leaf]
    parents: list[Memory | None]
    codec: Quantize
    system: str
    rest: Config
    prev: Checkpoint | None
    grads: dict[str, Array]
    kinds: Mapping[str, Any] | None

    @staticmethod
    def of(state: Any, point: Point, prev: Checkpoint | None, grads: Any, kinds: Mapping[str, Any] | None) -> Subject:
        """Take a state apart; the other arguments are those of `compress`, and so are the errors.

        Args:
            point: any point of the cube: which arrays it changes is the same for all.
        """
        if prev is not None:
            check_resolved(prev)
        check_kinds(kinds)
        cfg = point.config()
        nodes, found = tree.flatten(state, is_array)
        nodes, unique = tie(nodes, found)
        watched = [_part_of(node.value) for node in unique]
        unique = [tree.ArrayNode(node.path, node.key, _whole(node.value)) for node in unique]
        leaves, codecs = matched(unique, cfg, kinds, gradients_by_path(grads, found), prev is None or not prev.is_delta)
        numbers = tuple(i for i, codec in enumerate(codecs) if isinstance(codec, Quantize))
        small = tuple(i for i, x in enumerate(leaves) if x.spec.nbytes <= _SMALL and "moment" not in x.kind.role)
        chosen = [leaves[i] for i in numbers]
        parents = [None if prev is None else prev.parent_memory(leaf.key, leaf.spec) for leaf in chosen]
        own = {x.path: x.gradient.reshape(x.spec.shape) for x in chosen if x.gradient is not None}
        return Subject(
            nodes, unique, watched, numbers, small, chosen, parents, point.codec(), point.system, cfg, prev, own, kinds
        )

    @property
    def is_sharded(self) -> bool:
        """Whether processes hold parts of some array."""
        return any(a is not b.value for a, b in zip(self.watched, self.arrays, strict=True))

    @property
    def sensitive(self) -> bool:
        """Whether pruning by sensitivity can be done: every array that may be pruned has its gradient."""
        return all(leaf.gradient is not None for leaf in self.leaves if leaf.kind.layer != "embedding")

    @property
    def has_embeddings(self) -> bool:
        """Whether the number of bins for embeddings changes anything."""
        return any(leaf.kind.layer == "embedding" for leaf in self.leaves)

    @property
    def size(self) -> int:
        """Number of elements that a point changes."""
        return sum(leaf.spec.size for leaf in self.leaves)

    def exact(self) -> Any:
        """The state itself in the form in which restored ones come: fresh arrays, on the host, to the bit."""

        def one(node: tree.ArrayNode) -> Array:
            spec, flat = read_leaf(node.value, node.path)
            return build_leaf(from_bytes(as_bytes(flat).copy(), spec), spec)

        made = map_chunks(one, self.arrays)
        return tree.unflatten(self.nodes, lambda number, _place: made[number], rebuild=True)

    @cached_property
    def _others(self) -> tuple[Checkpoint, dict[int, Array]]:
        """What is the same at every point, compressed, and of it the arrays that trials take over as they are."""
        chosen = set(self.quantized)
        numbers = [i for i in range(len(self.arrays)) if i not in chosen]
        ckpt = compress(self._part(numbers), self.prev, self.rest, kinds=self.kinds)
        found = self._by_number(decompress(ckpt), numbers)
        return ckpt, {i: found[i] for i in numbers if i not in self._beside}

    @cached_property
    def _beside(self) -> frozenset[int]:
        """Small arrays that are compressed anew at every point, which is cheaper than keeping them apart."""
        return frozenset(self.small) - frozenset(self.quantized)

    @property
    def rest_nbytes(self) -> int:
        """Bytes of everything that no point changes, the header included."""
        return self._others[0].nbytes

    def restored(self, cfg: Config) -> Restored:
        """The state compressed and decompressed; the arrays are fresh each time, so the caller may change them."""
        numbers = [*self.quantized, *sorted(self._beside)]
        if any(getattr(rule.codec, "rate", None) for rule in cfg.rules):
            # The rate-distortion encoder also looks at the second moments beside the weights.
            numbers = list(range(len(self.arrays)))
        ckpt = compress(self._part(numbers), self.prev, cfg, grads=self.grads or None, kinds=self.kinds)
        rest, others = self._others
        made = self._by_number(decompress(ckpt), numbers)
        apart = {i: value for i, value in others.items() if i not in made}
        made.update({i: _copy(value) for i, value in apart.items()})
        kept = {self.arrays[i].key for i in apart}
        nbytes = sum(r.nbytes + _RECORD for r in rest.records if r.key in kept)
        state = tree.unflatten(self.nodes, lambda number, _place: made[number], rebuild=True)
        return Restored(state, ckpt.nbytes + nbytes)

    def _part(self, numbers: Sequence[int]) -> Any:
        """The state with None in place of all other arrays; what remains keeps its keys, so parents are found."""
        chosen = set(numbers)
        nodes = [None if _number(n) is not None and _number(n) not in chosen else n for n in self.nodes]
        return tree.unflatten(nodes, lambda number, _place: self.arrays[number].value)

    def _by_number(self, part: Any, numbers: Sequence[int]) -> dict[int, Array]:
        _, found = tree.flatten(part, is_array)
        by_key = {node.key: node.value for node in found}
        return {i: by_key[self.arrays[i].key] for i in numbers}

    def hashes(self) -> list[str]:
        """A hash of each array's values, as far as this process holds them."""

        def one(value: Array) -> str:
            spec, flat = read_leaf(value, "")
            return xxhash.xxh3_128_hexdigest(repr(spec).encode()) + xxhash.xxh3_128_hexdigest(as_bytes(flat).data)

        return map_chunks(one, self.watched)

    def fingerprint(self, hashes: Sequence[str], *more: Any) -> str:
        """What two searches must have in common to share their trials."""
        grads = [
            xxhash.xxh3_128_hexdigest(as_bytes(leaf.gradient).data) for leaf in self.leaves if leaf.gradient is not None
        ]
        kinds = [repr(leaf.kind) for leaf in self.leaves]
        parent = None if self.prev is None else self.prev.id
        text = json.dumps([self.nodes, list(hashes), grads, kinds, parent, self.rest.to_json(), more], default=repr)
        return xxhash.xxh3_128_hexdigest(text.encode())


def changed(before: Sequence[str], subject: Subject) -> str | None:
    """Path of the first array whose values are no longer those hashed before; None if all are."""
    for node, old, new in zip(subject.arrays, before, subject.hashes(), strict=True):
        if old != new:
            return node.path
    return None


def _number(node: Any) -> int | None:
    return node["a"] if isinstance(node, dict) and "a" in node else None


def _sharded(value: Array) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _whole(value: Array) -> Array:
    return value.full_tensor() if _sharded(value) else value


def _part_of(value: Array) -> Array:
    return value.to_local() if _sharded(value) else value


def _copy(value: Array) -> Array:
    if is_torch(value):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray) else value
