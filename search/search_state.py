"""The state of a search, split into the arrays that points change and the rest."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from ..codec.base import Array, Leaf, Reference
from ..codec.checkpoint import Checkpoint, decompress
from ..codec.compress import compress_inputs
from ..codec.config import Config
from ..codec.inputs import Inputs, PastWeights
from ..codec.parallel import map_chunks
from ..codec.plan import gathered, plan
from ..codec.state import leaves as arrays
from ..codec.state import tree
from ..codec.weights.importance import with_importance
from ..codec.weights.levels import compatible_parent
from ..codec.weights.quantize import Quantize
from ..kernels.backend.arrays import is_torch
from .cube import Point

_SMALL = 1 << 16
"""Size in bytes up to which an array is compressed again with every trial."""
_RECORD = 20
"""Bytes of an array's record in a header."""


ARRAYS = ("state", "prev", "grads", "kinds", "earlier")
"""Arguments of a search that hold arrays."""


@dataclass(frozen=True)
class SearchInputs:
    """The arrays given to a search, checked without collective operations.

    Args:
        state: as the caller passes it.
        grads: as the caller passes them.
        opened: the same flattened, with parent, kinds and gradients.
    """

    state: Any
    grads: Any
    opened: Inputs

    @property
    def is_sharded(self) -> bool:
        """Return whether this process has only a part of some array."""
        return any(arrays.is_sharded(node.value) for node in self.opened.arrays)

    def watch(self) -> Watched:
        """Hash the state and gradients, for later comparison."""
        trees = {"": self.state} if self.grads is None else {"": self.state, "grads/": self.grads}
        return {name: TreeHashes.of(tree, name) for name, tree in trees.items()}

    def fingerprints(self, watched: Watched) -> dict[str, str]:
        """Return a hash of each argument, equal on processes with the same arguments.

        Values of sharded arrays are not hashed, because each process has its own part.
        """
        prev, past, kinds = self.opened.prev, self.opened.past_weights, self.opened.kinds or {}
        layers = {path: kind if isinstance(kind, str) else _of_kind(kind) for path, kind in kinds.items()}
        hashes = (
            _hashed(watched[""].shared),
            "" if prev is None else prev.id,
            "" if self.grads is None else _hashed(watched["grads/"].shared),
            _hashed(sorted(layers.items())),
            "" if past is None else _hashed([repr(past.steps), TreeHashes.of(past.weights, "earlier/").shared]),
        )
        return dict(zip(ARRAYS, hashes, strict=True))


@dataclass(frozen=True)
class TreeHashes:
    """Hashes of the contents of a tree, by path.

    Args:
        nodes: the tree in preorder with its scalars; array nodes show which of them are the same array.
        arrays: (path, hash of the values on this process, shape and dtype, whether it is sharded).
    """

    nodes: list[Any]
    arrays: list[tuple[str, str, str, bool]]

    @staticmethod
    def of(value: Any, name: str) -> TreeHashes:
        """Hash the arrays of a tree; paths begin with `name`."""
        nodes, unique = arrays.tie(*tree.flatten(value, arrays.is_array))

        def one(node: tree.ArrayNode) -> tuple[str, str, str, bool]:
            spec, flat = arrays.read_leaf(arrays.local_part(node.value), name + node.path)
            parts = (repr(spec).encode(), arrays.as_bytes(flat).data)
            digest = "".join(xxhash.xxh3_128_hexdigest(part) for part in parts)
            layout = f"{node.value.dtype} {tuple(node.value.shape)}"
            return name + node.path, digest, layout, arrays.is_sharded(node.value)

        return TreeHashes(nodes, map_chunks(one, unique))

    @property
    def shared(self) -> list[Any]:
        """Return the data that are equal on all processes: layouts, and hashes of unsharded arrays."""
        return [self.nodes, [(path, layout if apart else digest) for path, digest, layout, apart in self.arrays]]

    def unlike(self, now: TreeHashes, name: str) -> str | None:
        """Return the path of the first difference to another tree, or None.

        Where only the structure differs, it is `name`.
        """
        for (path, old, *_), (other, new, *_) in zip(self.arrays, now.arrays, strict=False):
            if path == other and old != new:
                return path
        # Compared as text, because 3 and 3.0 differ here.
        if json.dumps(self.nodes) == json.dumps(now.nodes):
            return None
        a, b = _places(self.nodes), _places(now.nodes)
        path = next((p for p in [*a, *b] if p and a.get(p) != b.get(p)), "")
        return name + path or "the tree"


Watched = dict[str, TreeHashes]
"""Hashes of the state and gradients, which `evaluate` must not change, by the beginning of their paths."""


def unlike(before: Watched, now: Watched) -> str | None:
    """Return the path of the first difference, or None."""
    paths = (hashes.unlike(now[name], name) for name, hashes in before.items())
    return next((path for path in paths if path is not None), None)


def _places(nodes: Sequence[Any]) -> dict[str, str]:
    """Return the value at each path as text, the deepest path first."""
    found: dict[str, str] = {}

    def array(number: int, place: Any) -> None:
        path, _ = place()
        found[path] = f"array {number}"

    stack: list[tuple[str, Any]] = [("", tree.unflatten(nodes, array))]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict | list | tuple):
            items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
            found.setdefault(path, f"{type(value).__name__} of {[k for k, _ in items]}")
            stack.extend((f"{path}/{k}" if path else str(k), v) for k, v in items)
        else:
            found.setdefault(path, repr(value))
    return dict(sorted(found.items(), key=lambda item: (-item[0].count("/"), item[0])))


def _of_kind(kind: Any) -> list[Any]:
    rows = (kind.rows, kind.rows_since_base)
    return [repr(kind), *(None if r is None else xxhash.xxh3_128_hexdigest(np.ascontiguousarray(r).data) for r in rows)]


def _hashed(value: Any) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(value, default=repr).encode()))


@dataclass(frozen=True)
class SearchState:
    """A state with its parent, and the arrays that the points of a cube encode differently.

    Args:
        opened: the state with its parent and kinds, sharded arrays (DTensor) whole; `leaves` hold the gradients and
            past values. Without past values no array is extrapolated.
        is_sharded: whether processes hold parts of some array.
        quantized: numbers of the arrays that the cube's codec encodes.
        small: numbers of arrays of few bytes that are not moments.
        leaves: the quantized arrays, with gradients where given.
        parents: the decoded parent of each of them, or None.
        codec: their codec at some point of the cube.
        system: the system of the cube.
        others: the configuration of all other arrays except for its rate; the same at every point.
    """

    opened: Inputs
    is_sharded: bool
    quantized: tuple[int, ...]
    small: tuple[int, ...]
    leaves: list[Leaf]
    parents: list[Reference | None]
    codec: Quantize
    system: str
    others: Config
    _sizes: dict[float, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Bytes of the arrays that points do not change, by rate."""

    @staticmethod
    def made(inputs: SearchInputs, point: Point, *, rated: bool = True) -> SearchState:
        """Gather sharded arrays (a collective operation), and find the arrays that points change.

        Args:
            inputs: the state with parent, kinds and gradients.
            point: any point of the cube; all points change the same arrays.
            rated: whether some point has a rate, which needs the importance of each weight; default True.
        """
        cfg = point.config()
        whole = [
            dataclasses.replace(node, value=node.value.full_tensor()) if arrays.is_sharded(node.value) else node
            for node in inputs.opened.arrays
        ]
        opened = gathered(dataclasses.replace(inputs.opened, arrays=whole))
        planned = plan(opened, cfg)
        leaves, codecs = [one.leaf for one in planned], [one.codec for one in planned]
        numbers = tuple(i for i, codec in enumerate(codecs) if isinstance(codec, Quantize))
        leaves = with_importance(leaves, [rated and isinstance(codec, Quantize) for codec in codecs])
        small = tuple(i for i, x in enumerate(leaves) if x.spec.nbytes <= _SMALL and "moment" not in x.kind.role)
        chosen = [leaves[i] for i in numbers]
        own = {x.path: x.gradient.reshape(x.spec.shape) for x in chosen if x.gradient is not None}
        earlier = None
        if opened.past_weights is not None:
            were = {x.path: x.earlier.reshape(x.spec.shape) for x in chosen if x.earlier is not None}
            earlier = PastWeights(were, opened.past_weights.steps)
        parents = [planned[i].parent for i in numbers]
        opened = dataclasses.replace(opened, grads=own, past_weights=earlier)
        return SearchState(opened, inputs.is_sharded, numbers, small, chosen, parents, point.codec(), point.system, cfg)

    def config(self, point: Point) -> Config:
        """Return the configuration of a point, as it is evaluated and stored."""
        return point.config(ahead=self.opened.past_weights is not None)

    def without_drift(self) -> SearchState:
        """Return the search state without past weights, so that no array is coded ahead."""
        leaves = [dataclasses.replace(leaf, earlier=None) for leaf in self.leaves]
        return dataclasses.replace(self, leaves=leaves, opened=dataclasses.replace(self.opened, past_weights=None))

    @property
    def leads(self) -> bool:
        """Return whether some array is extrapolated by its drift.

        This requires an earlier delta that has estimated the drift.
        """
        pairs = zip(self.leaves, self.parents, strict=True)
        held = [compatible_parent(parent, leaf.spec) for leaf, parent in pairs if leaf.earlier is not None]
        return any(before is not None and before.drift_gain > 0 for before in held)

    @property
    def sensitive(self) -> bool:
        """Return whether every array to prune has a gradient, so that sensitivity is known."""
        return all(leaf.gradient is not None for leaf in self.leaves if leaf.kind.layer != "embedding")

    @property
    def has_embeddings(self) -> bool:
        """Return whether the number of bins for embeddings changes any array."""
        return any(leaf.kind.layer == "embedding" for leaf in self.leaves)

    def exact(self) -> Any:
        """Return a bit-exact copy of the state, in the form of a restored state."""

        def one(node: tree.ArrayNode) -> Array:
            spec, flat = arrays.read_leaf(node.value, node.path)
            return arrays.build_leaf(arrays.from_bytes(arrays.as_bytes(flat).copy(), spec), spec)

        made = map_chunks(one, self.opened.arrays)
        return tree.unflatten(self.opened.nodes, lambda number, _place: made[number], rebuild=True)

    def _rest(self, rate: float) -> tuple[Checkpoint, list[int]]:
        """Compress the arrays that are equal at all points with this rate; also return numbers."""
        chosen = set(self.quantized)
        numbers = [i for i in range(len(self.opened.arrays)) if i not in chosen]
        cfg = dataclasses.replace(self.others, rate=rate)
        part = dataclasses.replace(self.opened.part(numbers), grads={}, past_weights=None)
        return compress_inputs(part, cfg), numbers

    @cached_property
    def _taken_over(self) -> tuple[Checkpoint, dict[int, Array]]:
        """Return the arrays that points do not change, and those that all trials share.

        The former are compressed at a rate of 0.
        """
        ckpt, numbers = self._rest(0.0)
        found = self._by_number(decompress(ckpt), numbers)
        return ckpt, {i: found[i] for i in numbers if i not in self._small_others}

    @cached_property
    def _small_others(self) -> frozenset[int]:
        """Return small arrays that are compressed at every point instead of cached."""
        return frozenset(self.small) - frozenset(self.quantized)

    def rest_nbytes(self, rate: float) -> int:
        """Return the bytes of arrays that are equal at all points with this rate, and of the header."""
        if rate not in self._sizes:
            self._sizes[rate] = (self._rest(rate) if rate else self._taken_over)[0].nbytes
        return self._sizes[rate]

    def restored(self, cfg: Config, *, whole: bool = False) -> tuple[Any, int]:
        """Return the state decoded from its checkpoint, and the bytes of the checkpoint.

        The arrays are fresh; the caller may change them.

        Args:
            cfg: the configuration.
            whole: whether it may code all arrays otherwise than the points do; default False.
        """
        # With a rate the encoder reads second moments together with the weights, and moments are coded with the same
        # rate. The drift prediction depends on first moments.
        opened = self.opened
        whole = whole or opened.past_weights is not None or cfg.rate > 0
        numbers = range(len(opened.arrays)) if whole else sorted(self._small_others.union(self.quantized))
        ckpt = compress_inputs(opened.part(numbers), cfg)
        made = self._by_number(decompress(ckpt), numbers)
        nbytes = ckpt.nbytes
        if not whole:
            rest, others = self._taken_over
            made.update({i: _copy(value) for i, value in others.items()})
            kept = {opened.arrays[i].key for i in others}
            nbytes += sum(r.nbytes + _RECORD for r in rest.records if r.key in kept)
        state = tree.unflatten(opened.nodes, lambda number, _place: made[number], rebuild=True)
        return state, nbytes

    def _by_number(self, part: Any, numbers: Sequence[int]) -> dict[int, Array]:
        _, found = tree.flatten(part, arrays.is_stored_as_array)
        by_key = {node.key: node.value for node in found}
        return {i: by_key[self.opened.arrays[i].key] for i in numbers}


def _copy(value: Array) -> Array:
    if is_torch(value):
        return value.clone()
    return value.copy() if isinstance(value, np.ndarray | list) else value
