"""Exact sparse deltas: positions and changes of the few changed elements of an array.

Elements are in classes of their parent's magnitude (`kernels.sparse_delta`), and changes are coded class by class: the
gap since the previous change in its class and a small difference are one symbol, the low bits of large gaps are
stored raw, and large differences follow as categories and extra bits.

    byte: 0 arithmetic differences, 1 exclusive or; varint number of edges, varints: the edges;
    varints: changes in each class; a byte for each class: the shift of its gaps;
    block: the symbols, class after class, in the context of the class, with one class without;
    block: the open bits of the gaps; varint number L of large differences;
    if L > 0, items of one byte: block: symbols; others: block: categories in the context of the class,
    their extra bits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kernels.backend.arrays import is_torch, numbers, on_gpu, placed_with, to_host, write
from ...kernels.planes import join_categories, most_bits, split_categories
from ...kernels.sparse_delta import (
    GAP_BITS,
    MOST_EDGES,
    SMALL,
    SparseDelta,
    apply_changes,
    collect_and_locate,
    collect_changes,
    gap_shifts,
    join_changes,
    locate_changes,
    split_changes,
)
from .. import entropy
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from ..state.leaves import Array, LeafSpec, NpArray
from .floats import LAYOUTS

MOST = 4
"""At most one of this number of elements may have changed; a reader refuses more."""
LONGEST = 1 << GAP_BITS
"""Elements of one stream at most, for the gaps."""
_LIKELY = 0.17
"""Share in a sample from which on changes are not even collected."""
_LARGE = 1 << 20
"""Bytes of an array from which on changes may be remembered instead of a copy."""
_LITTLE = 1 / 16
"""Share in a sample up to which they are: ten bytes a change, of 16-bit floats 0.3 of a copy."""
_FEW = 1 << 8
"""Expected changes a class, fewer than which may not pay for the class's edge, number and shift."""
_METHODS: tuple[Any, Any] = ("arithmetic", "xor")
_MANTISSA = {
    **{name: layout.mantissa for name, layout in LAYOUTS.items()},
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz"), 3),
    **dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz"), 2),
}
_ORDERED = {1: "float8_e5m2", 2: "float16", 4: "float32", 8: "float64"}
"""A dtype of each width whose patterns have the order of all floats of that width: sign and magnitude."""


@dataclass(frozen=True, slots=True)
class Patterns:
    """Width, order and mantissa of the patterns of an array's items.

    Args:
        width: bytes; of a complex number, of its parts.
        dtype: whose order the patterns have.
        mantissa: bits below the exponent; None for integers.
    """

    width: int
    dtype: str
    mantissa: int | None

    @staticmethod
    def of(spec: LeafSpec) -> Patterns | None:
        """Return the patterns of an array's items; None if no number has their width."""
        width = spec.itemsize // 2 if spec.dtype.startswith("complex") else spec.itemsize
        if width not in _ORDERED:
            return None
        mantissa = _MANTISSA.get(spec.dtype)
        return Patterns(width, f"uint{8 * width}" if mantissa is None else _ORDERED[width], mantissa)

    def view(self, data: Array) -> Array:
        """View bytes as patterns, unsigned on the host and signed on a GPU."""
        return numbers(data, self.width, "int" if is_torch(data) else "uint")


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a comparison of an array with its parent.

    Args:
        changes: number of changes; None if there were too many to collect.
        coded: the stream for `read_sparse`; None if nothing or too much changed.
        is_number: whether items are numbers, whose differences are small. Wide integers may be sets of bits, whose
            exclusive or is smaller in planes.
        located: positions and new patterns of the changes, if they were requested.
    """

    changes: int | None
    coded: Writer | None
    is_number: bool = True
    located: tuple[NpArray, NpArray] | None = None


def encode_sparse(
    data: Array,
    before: NpArray,
    spec: LeafSpec,
    copy_to: NpArray | None = None,
    *,
    classes: bool = True,
    located: tuple[int, ...] | None = None,
) -> Found | None:
    """Encode bytes by their changes against the parent's bytes, if they are few.

    Args:
        data: uint8, items of an array of `spec.dtype`, on the host or, wider than a byte, on a GPU.
        before: as many of the parent, on the host.
        spec: says the dtype.
        copy_to: as many bytes, which receive `data` in the same pass unless nothing changed.
        classes: whether floats may be in classes of their parent's magnitude; without classes, a reader that has only
            some of the parent's items finds their changes.
        located: edges from `located_edges`; requests positions and new patterns. Together with the parent these equal
            the coded bytes, even if another thread writes to `data` meanwhile. No sample is taken.

    Returns:
        None if the width of the items is not supported, or a sample, or on a GPU all, has too many changes; nothing was
        copied then.
    """
    how = Patterns.of(spec)
    if how is None:
        return None
    new, old = how.view(data), how.view(before)
    if old.size > LONGEST:
        return None
    limit = old.size // MOST
    if located is not None:
        placed = placed_with(before, data).view(new.dtype)
        found = collect_and_locate(new, placed, located, limit=limit, dtype=how.dtype)
        if found is None:
            return Found(None, None)
        changes, (positions, values) = SparseDelta(*map(to_host, found[0])), map(to_host, found[1:])
        if not positions.size:
            return Found(0, None)
        return Found(int(positions.size), _written(changes, located, xor=False), located=(positions, values))
    some = entropy.sample(old.size)
    sampled = some(old)
    share = np.count_nonzero(some(new).view(old.dtype) != sampled) / max(sampled.size, 1)
    if share > _LIKELY:
        return None
    edges = _edges(sampled, how, float(share), old.size) if classes else ()
    target = None if copy_to is None else how.view(copy_to)
    placed, copied = placed_with(before, data).view(new.dtype), None if is_torch(data) else target
    delta = collect_changes(new, placed, edges, limit=limit, copy_to=copied, dtype=how.dtype)
    if delta is None:
        return None if is_torch(data) else Found(None, None)
    delta = SparseDelta(*map(to_host, delta))
    if target is not copied and delta.ranks.size:
        apply_changes(old, delta, edges, out=target, dtype=how.dtype)
    if not delta.ranks.size:
        return Found(0, None)
    xor = False
    if how.mantissa is None:
        delta, xor = _shorter(delta, new if target is None else target, old)
    is_number = how.mantissa is not None or how.width == 1
    return Found(int(delta.ranks.size), _written(delta, edges, xor), is_number)


def located_edges(data: Array, before: NpArray, spec: LeafSpec, nbytes: int) -> tuple[int, ...] | None:
    """Return edges of classes for all parts of an array in which little changed.

    For such an array the changes are remembered instead of a copy.

    Args:
        data: uint8, all items of an array of `spec.dtype`, on the host or on a GPU.
        before: as many of the parent, on the host.
        spec: says the dtype.
        nbytes: of the largest part.

    Returns:
        The value of `located` for `encode_sparse`; None for small arrays, for dtypes other than floats, and if a sample
        has many changes.
    """
    how = Patterns.of(spec)
    if how is None or how.mantissa is None or before.size < _LARGE:
        return None
    some = entropy.sample(before.size // how.width)
    sampled = some(how.view(before))
    share = np.count_nonzero(some(how.view(data)).view(sampled.dtype) != sampled) / sampled.size
    return _edges(sampled, how, float(share), nbytes // how.width) if share <= _LITTLE else None


def _edges(sampled: NpArray, how: Patterns, share: float, n: int) -> tuple[int, ...]:
    """Return edges of classes by exponents, as many as the number of changes justifies."""
    most = min(int(share * n / _FEW), MOST_EDGES + 1)
    if how.mantissa is None or most < 2:
        return ()
    low = sampled.dtype.type((1 << (8 * how.width - 1)) - 1)
    fields = ((sampled & low) >> sampled.dtype.type(how.mantissa)).astype(np.int64)
    return tuple(field << how.mantissa for field in best_edges(fields, share, most))


def best_edges(fields: NpArray, share: float, most: int) -> tuple[int, ...]:
    """Choose the exponents at which classes begin, so that equal steps take the fewest bits.

    Such a step changes an element with a probability that halves with each exponent, up to 1. The sum of the classes'
    binary entropies is made least by dynamic programming over the exponents that occur.

    Args:
        fields: int64, exponent fields of a sample.
        share: of elements that change.
        most: classes, at least 1.

    Example:
        >>> best_edges(np.repeat(np.arange(100, 104), [10, 20, 40, 80]), 0.01, 3)
        (101, 102)
    """
    number_of = np.bincount(fields)
    exponents = np.flatnonzero(number_of)
    counts = number_of[exponents]
    halved = np.exp2(np.maximum(exponents[0] - exponents, -1000).astype(np.float64))
    # The scale of the steps: the first k exponents change with probability 1, so that the changes add up.
    full, rest = np.cumsum(counts) - counts, np.cumsum((counts * halved)[::-1])[::-1]
    k = int(np.argmax(full + rest / halved >= share * fields.size))
    scale = (share * fields.size - full[k]) / rest[k]
    hits = np.concatenate([[0.0], np.cumsum(counts * np.minimum(1, scale * halved))])
    sums = np.concatenate([[0], np.cumsum(counts)])
    number = (sums[None, :] - sums[:, None]).astype(np.float64)
    p = np.clip((hits[None, :] - hits[:, None]) / np.maximum(number, 1), 1e-12, 1 - 1e-12)
    cost = np.where(number > 0, -number * (p * np.log2(p) + (1 - p) * np.log2(1 - p)), np.inf)
    least, cuts = cost[0], []
    for _ in range(min(most, exponents.size) - 1):
        ways = least[:, None] + cost
        cuts.append(ways.argmin(axis=0))
        least = ways.min(axis=0)
    edges, at = [], exponents.size
    for cut in reversed(cuts):
        at = int(cut[at])
        edges.append(int(exponents[at]))
    return tuple(reversed(edges))


def _shorter(delta: SparseDelta, new: NpArray, old: NpArray) -> tuple[SparseDelta, bool]:
    """Choose differences or exclusive or for integers by size, because fields may be packed."""
    xor = new[delta.ranks] ^ old[delta.ranks]
    if not xor.all():  # another thread wrote to an array that was not copied
        return delta, False
    if _bits(xor) < _bits(delta.changes):
        return delta._replace(changes=xor), True
    return delta, False


def _bits(changes: NpArray) -> float:
    """Estimate the bits of changes: entropy for single bytes, else the width of each."""
    if changes.dtype.itemsize == 1:
        counts = np.bincount(changes, minlength=256)
        shares = counts[counts > 0] / changes.size
        return float(-(shares * np.log2(shares)).sum() * changes.size)
    return float(np.log2(changes.astype(np.float64) + 1).sum())


def _written(delta: SparseDelta, edges: tuple[int, ...], xor: bool) -> Writer:
    shifts = gap_shifts(delta)
    symbols, extra, large = split_changes(delta, shifts)
    out = Writer(int(xor))
    out.varint(len(edges), *edges, *delta.counts.tolist())
    out.byte(*shifts)
    out.block(_in_class(symbols, delta.counts), extra)
    out.varint(large.size)
    if large.size and large.dtype.itemsize == 1:
        out.block(_in_class(large, _large_counts(delta.counts, symbols)))
    elif large.size:
        categories, digits = split_categories(large, most_bits(8 * large.dtype.itemsize))
        out.block(_in_class(categories, _large_counts(delta.counts, symbols)))
        out.raw(digits)
    return out


def _in_class(symbols: NpArray, counts: Any) -> Writer:
    """Code symbols ordered by class, in the context of the class if that is smaller."""
    if counts.size == 1:
        return entropy.coded(symbols)
    return entropy.in_context(symbols, _classes(counts), counts.size)[0]


def _from_class(data: memoryview, counts: Any) -> NpArray:
    """Decode the symbols that `_in_class` coded."""
    total = int(counts.sum())
    if counts.size == 1:
        return entropy.decode(data, total)
    return entropy.decode(data, total, _classes(counts), counts.size)


def _classes(counts: Any) -> NpArray:
    return np.repeat(np.arange(counts.size, dtype=np.uint8), counts)


def _large_counts(counts: Any, symbols: NpArray) -> Any:
    """Number of large changes in each class."""
    ends = np.cumsum(counts)
    classes = [symbols[end - count : end] for end, count in zip(ends, counts, strict=True)]
    return np.asarray([int(entropy.counts_of(own)[SMALL :: SMALL + 1].sum()) for own in classes])


@dataclass(frozen=True, slots=True)
class Changes:
    """Contents of a sparse stream, checked as far as possible without the parent.

    Args:
        delta: the changes.
        edges: between the classes.
        method: of the changes.
        how: the patterns of the items.
    """

    delta: SparseDelta
    edges: tuple[int, ...]
    method: Any
    how: Patterns

    def apply(self, before: NpArray, out: Array) -> None:
        """Fill `out` with the parent's bytes and the changes; in place if the memory is the same.

        Args:
            before: the parent's bytes, on the host.
            out: bytes, on the host or on a GPU, which then applies the changes.

        Raises:
            CorruptDataError: a rank is beyond the last element of its class.
        """
        target, old, delta = self.how.view(out), self.how.view(before), self.delta
        if on_gpu(out):
            write(out, before)
            ranks, changes = (placed_with(x, out) for x in (delta.ranks, delta.changes))
            old, delta = target, SparseDelta(delta.counts, ranks, changes)
        apply_changes(old, delta, self.edges, method=self.method, out=target, dtype=self.how.dtype)

    def positions(self, before: NpArray) -> tuple[NpArray, NpArray]:
        """Return the positions of the changes and the new patterns; raise errors as `apply` does."""
        positions, values = locate_changes(
            self.how.view(before), self.delta, self.edges, method=self.method, dtype=self.how.dtype
        )
        return positions, values


def read_sparse(data: Reader, nbytes: int, spec: LeafSpec) -> Changes:
    """Read a stream that `encode_sparse` wrote.

    Args:
        data: where it begins; all of it is read.
        nbytes: bytes of the items.
        spec: says the dtype.

    Raises:
        CorruptDataError: it is not such a stream, or has another number of items.
    """
    how = Patterns.of(spec)
    if how is None:
        raise CorruptDataError(f"exact: items of {spec.itemsize} bytes have no sparse changes")
    n, form = nbytes // how.width, data.byte()
    if n > LONGEST:
        raise CorruptDataError(f"exact: sparse changes of {n} items; at most {LONGEST}")
    if form >= len(_METHODS):
        raise CorruptDataError(f"exact: changes of form {form}")
    number = data.varint()
    if number > (0 if how.mantissa is None else MOST_EDGES):
        raise CorruptDataError(f"exact: {number} edges for {spec.dtype}")
    edges = tuple(data.varint() for _ in range(number))
    top = 1 << (8 * how.width - 1)
    if any(not a < b < top for a, b in zip((0, *edges), edges, strict=False)):
        raise CorruptDataError("exact: edges that do not ascend")
    counts = [data.varint() for _ in range(number + 1)]
    if sum(counts) > n // MOST:
        raise CorruptDataError(f"exact: {sum(counts)} changes of {n} items")
    shifts = [data.byte() for _ in counts]
    if max(shifts) >= GAP_BITS:
        raise CorruptDataError(f"exact: a shift of {max(shifts)} bits")
    totals = np.asarray(counts, np.int64)
    symbols = _from_class(data.block(), totals)
    extra = np.frombuffer(data.block(), np.uint8)
    many, large_counts = data.varint(), _large_counts(totals, symbols)
    if many != int(large_counts.sum()):
        raise CorruptDataError(f"exact: {many} large changes, {int(large_counts.sum())} symbols for them")
    large = np.empty(0, f"uint{8 * how.width}")
    if many and how.width == 1:
        large = _from_class(data.block(), large_counts)
    elif many:
        categories = _from_class(data.block(), large_counts)
        large = join_categories(categories, data.rest(), most_bits(8 * how.width), f"uint{8 * how.width}")
    data.end()
    return Changes(join_changes(totals, shifts, n, symbols, extra, large), edges, _METHODS[form], how)
