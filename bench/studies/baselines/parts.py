"""The interface of the baselines, even grids, and states in parts.

The tree and the exact arrays are one zstandard frame. A weight is coded if it is a 16 or 32-bit float of two or more
axes and 1024 or more finite elements; its moments go with it. All else is exact.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from shrinkpoint.codec.errors import BadArgumentError, MissingParentError
from shrinkpoint.codec.evidence.kind import TINY
from shrinkpoint.codec.evidence.moments import guess
from shrinkpoint.codec.format.fields import Reader, Writer
from shrinkpoint.codec.state import tree
from shrinkpoint.codec.state.leaves import (
    LeafSpec,
    as_bytes,
    build_leaf,
    from_bytes,
    is_array,
    read_leaf,
    spec_from_header,
)

Floats = npt.NDArray[np.float32]
Bytes = bytes | memoryview
LEVEL = 3
"""Level of zstandard for exact data."""
_LOSSY = ("float16", "bfloat16", "float32")


State = dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """The bytes of one checkpoint.

    Args:
        weights: the model's weights, coded by the system under comparison.
        rest: everything else: the tree, exact arrays (zstandard), and moments.
    """

    weights: bytes
    rest: bytes

    @property
    def nbytes(self) -> int:
        """Bytes together."""
        return len(self.weights) + len(self.rest)


class Baseline(Protocol):
    """A published system. Pure: the same state and parent give the same bytes.

    Its docstring cites the source, and names the choices that the source leaves open and those made here.
    Implementations are frozen dataclasses.
    """

    @property
    def name(self) -> str:
        """Name in tables."""

    def encode(self, state: State, previous: State | None) -> Saved:
        """Encode a state `{"model": state_dict, "optimizer": optimizer's, ...}`.

        Args:
            state: the exact state.
            previous: the *restored* checkpoint before it (the result of `decode`), or None for a base.

        Raises:
            BadArgumentError: `previous` is a state of another model.
        """

    def decode(self, saved: Saved, previous: State | None) -> State:
        """Restore the state as far as it was kept.

        Args:
            saved: the result of `encode`.
            previous: the same restored state that `encode` had; ignored for a base.

        Raises:
            MissingParentError: `previous` is another state, or missing.
        """


@dataclass(frozen=True)
class Grid:
    """`bins` even values from low to high, including both.

    Args:
        low, high: range; low <= high.
        bins: 2 to 256.

    Example:
        >>> grid = Grid(0.0, 3.0, 4)
        >>> grid.levels(np.array([0.2, 2.9], np.float32)).tolist(), grid.values(np.array([1, 3], np.uint8)).tolist()
        ([0, 3], [1.0, 3.0])
    """

    low: float
    high: float
    bins: int

    @staticmethod
    def over(x: Floats, bins: int) -> Grid:
        """Return the grid over the range of x."""
        return Grid(float(x.min()), float(x.max()), bins)

    @property
    def step(self) -> float:
        """Distance of two values; 0 if all are equal."""
        return (self.high - self.low) / (self.bins - 1)

    def levels(self, x: Floats) -> npt.NDArray[np.uint8]:
        """Return the number of the nearest grid value, uint8; values outside take the nearest end."""
        if self.step == 0.0:
            return np.zeros(x.size, np.uint8)
        places = np.rint((x.astype(np.float64) - self.low) / self.step)
        found: npt.NDArray[np.uint8] = np.clip(places, 0, self.bins - 1).astype(np.uint8)
        return found

    def values(self, levels: npt.NDArray[np.uint8]) -> Floats:
        """Return the grid values of levels."""
        table: Floats = (self.low + self.step * np.arange(self.bins)).astype(np.float32)
        return table[levels]


@dataclass(frozen=True)
class Part:
    """An array of a state.

    Args:
        path: as rules and messages have it.
        key: unique.
        spec: library, dtype and shape.
        role: "weight", "first moment", "second moment" or "state".
        data: its bytes, uint8.
    """

    path: str
    key: str
    spec: LeafSpec
    role: str
    data: npt.NDArray[np.uint8]

    @cached_property
    def values(self) -> Floats:
        """Values as float32 (exact for the 16-bit formats), flat."""
        return to_float32(self.data, self.spec)

    @property
    def coded(self) -> bool:
        """True if a baseline may code the array."""
        large = self.spec.dtype in _LOSSY and len(self.spec.shape) >= 2 and self.spec.size >= TINY
        return large and self.role != "state" and bool(np.isfinite(self.values).all())


def to_float32(data: npt.NDArray[np.uint8], spec: LeafSpec) -> Floats:
    """Bytes of a float array as float32."""
    import torch

    wide: Floats = torch.from_numpy(data).view(getattr(torch, spec.dtype)).float().numpy()
    return wide


def _narrow(values: Floats, spec: LeafSpec) -> npt.NDArray[np.uint8]:
    """float32 as bytes of the array's own format, rounded to nearest."""
    import torch

    narrowed = torch.from_numpy(np.ascontiguousarray(values)).to(getattr(torch, spec.dtype))
    found: npt.NDArray[np.uint8] = narrowed.view(torch.uint8).numpy()
    return found


@dataclass(frozen=True)
class Parts:
    """A state in parts: the nodes of its tree, and its arrays in order."""

    nodes: list[Any]
    arrays: list[Part]

    def of(self, role: str) -> list[Part]:
        """Arrays of a role that may be coded."""
        return [part for part in self.arrays if part.role == role and part.coded]


def parts(state: State) -> Parts:
    """Split a state into the nodes of its tree and its arrays.

    Raises:
        BadArgumentError: it is not a tree.
        UnsupportedLeafError: a leaf that cannot be stored without pickle.
    """
    nodes, found = tree.flatten(state, is_array)
    arrays = []
    for node in found:
        spec, flat = read_leaf(node.value, node.path)
        arrays.append(Part(node.path, node.key, spec, guess(node.path, spec).role, as_bytes(flat)))
    return Parts(nodes, arrays)


def before(part: Part, previous: Parts) -> Floats:
    """Return the values of this array in the previous checkpoint.

    Raises:
        BadArgumentError: no array has this shape.
    """
    for other in previous.arrays:
        if other.key == part.key and other.spec == part.spec:
            return other.values
    raise BadArgumentError(f"{part.path}: the previous state has no {part.spec.dtype} array {part.spec.shape} there")


def fingerprint(state: Parts) -> str:
    """Hash of a state's weights, by which a delta identifies its parent."""
    digest = xxhash.xxh3_64()
    for part in state.arrays:
        if part.role == "weight":
            digest.update(part.data.data)
    return digest.hexdigest()


def save(state: Parts, pieces: dict[str, bytes], previous: Parts | None = None) -> Saved:
    """Put coded and exact arrays together.

    Args:
        state: all of it.
        pieces: coded arrays by key; those of weights make up `Saved.weights`, those of moments go into `Saved.rest`.
        previous: the parent, if any piece needs it.
    """
    exact, coded_weights, coded_moments = Writer(), Writer(), Writer()
    records = []
    for part in state.arrays:
        where = "x" if part.key not in pieces else "w" if part.role == "weight" else "m"
        records.append([where, part.spec.library, part.spec.dtype, list(part.spec.shape)])
        if where == "x":
            exact.raw(part.data)
        else:
            (coded_weights if where == "w" else coded_moments).block(pieces[part.key])
    header = {"parent": None if previous is None else fingerprint(previous), "tree": state.nodes, "arrays": records}
    plain = Writer()
    plain.block(json.dumps(header).encode())
    plain.raw(exact.done())
    rest = Writer()
    rest.block(zstandard.ZstdCompressor(LEVEL).compress(plain.done()))
    rest.raw(coded_moments.done())
    return Saved(coded_weights.done(), rest.done())


Decode = Callable[[Bytes, LeafSpec, Floats | None], Floats]


def load(saved: Saved, previous: State | None, weight: Decode, moment: Decode | None = None) -> State:
    """Restore a state: the inverse of `save`.

    Args:
        saved: its bytes.
        previous: the restored parent; ignored for a base.
        weight: a coded piece, the array's spec and its values in the parent (None in a base) to float32 values.
        moment: the same for pieces of moments, which have no parent.

    Raises:
        MissingParentError: as `Baseline.decode`.
    """
    rest, pieces = Reader(saved.rest, "rest"), Reader(saved.weights, "weights")
    plain = Reader(zstandard.ZstdDecompressor().decompress(rest.block()), "rest")
    header = json.loads(bytes(plain.block()))
    known: dict[str, Part] = {}
    if header["parent"] is not None:
        parent = Parts([], []) if previous is None else parts(previous)
        if fingerprint(parent) != header["parent"]:
            raise MissingParentError("the previous state is not the one that this delta was made against")
        known = {part.key: part for part in parent.arrays}

    def array(number: int, place: Callable[[], tuple[str, str]]) -> Any:
        where, library, dtype, shape = header["arrays"][number]
        spec = spec_from_header(library, dtype, shape, (), where)
        if where == "x":
            data = np.frombuffer(plain.raw(spec.nbytes), np.uint8).copy()
        elif where == "m" and moment is not None:
            data = _narrow(moment(rest.block(), spec, None), spec)
        else:
            old = known[place()[1]].values if known else None
            data = _narrow(weight(pieces.block(), spec, old), spec)
        return build_leaf(from_bytes(data, spec), spec)

    state: State = tree.unflatten(header["tree"], array)
    return state


def each(chosen: Iterable[Part], encode: Callable[[Part], bytes]) -> dict[str, bytes]:
    """Encode the chosen arrays, and return the coded pieces by key."""
    return {part.key: encode(part) for part in chosen}
