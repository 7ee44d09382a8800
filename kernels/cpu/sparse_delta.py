"""Sparse deltas on the CPU: compare 64 elements at once, then walk the changed ones.

The comparison of vectors of elements gives one bit per lane. NumPy and Numba's vectorizer would first produce a byte
per element, so this comparison is written as a vector instruction of LLVM, which is available on every processor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import cgutils, config, types
from numba.extending import intrinsic

from ..arrays import is_torch, like, to_numpy
from ..coder_arguments import compiled, lent
from ..planes import ordered_by_sign
from ..sparse_delta import GAP_BITS, SMALL, SYMBOLS, SparseDelta, wrong_changes, wrong_gap, wrong_rank
from .jit import njit
from .planes import as_values, patterns

if TYPE_CHECKING:
    from ..arrays import Array

LANES = 64
BLOCK = 1 << 14
"""Elements per block that is copied and then compared while it is in the cache."""
MUCH = 1 << 20
"""Bytes that do not stay in the cache anyway."""
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def collect_changes(
    current: Array,
    previous: Array,
    edges: tuple[int, ...],
    limit: int,
    method: str,
    copy_to: Array | None,
    dtype: str,
) -> SparseDelta | None:
    """See `shrinkpoint.kernels.sparse_delta.collect_changes`."""
    found = _collect(current, previous, edges, limit, method, copy_to, dtype)
    return None if found is None else found[0]


def collect_and_locate(
    current: Array, previous: Array, edges: tuple[int, ...], limit: int, method: str, dtype: str
) -> tuple[SparseDelta, Array, Array] | None:
    """See `shrinkpoint.kernels.sparse_delta.collect_and_locate`."""
    found = _collect(current, previous, edges, limit, method, None, dtype)
    if found is None:
        return None
    delta, positions, values = found
    return delta, like(positions.copy(), current), as_values(values.copy(), previous)


def _collect(
    current: Array,
    previous: Array,
    edges: tuple[int, ...],
    limit: int,
    method: str,
    copy_to: Array | None,
    dtype: str,
) -> tuple[SparseDelta, np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """The changes, and their positions and new patterns in memory that is larger."""
    c, p = _readable(current), _readable(previous)
    copy = c[:0] if copy_to is None else _writable(copy_to)
    signed, xor = ordered_by_sign(dtype), method == "xor"
    positions, changes = np.empty(limit + LANES, np.int64), np.empty(limit + LANES, p.dtype)
    values = np.empty(limit + LANES, p.dtype)
    if not edges:
        m = int(_compact(c, p, copy, copy_to is not None, limit, signed, xor, positions, changes, values))
        if m < 0:
            return None
        # Copied: the buffer for many changes is not kept for a few.
        found = SparseDelta(
            np.asarray([m], np.int64), like(positions[:m].copy(), current), like(changes[:m].copy(), current)
        )
        return found, positions[:m], values[:m]
    classes, counts = np.empty(limit + LANES, np.uint8), np.zeros(len(edges) + 1, np.int64)
    ranks, given = np.empty(limit + LANES, np.int64), _padded(edges, p.dtype)
    m = int(
        _compact_classes(
            c,
            p,
            copy,
            copy_to is not None,
            given,
            limit,
            signed,
            xor,
            ranks,
            changes,
            classes,
            counts,
            positions,
            values,
        )
    )
    if m < 0:
        return None
    grouped_ranks, grouped = np.empty(m, np.int64), np.empty(m, p.dtype)
    _group(classes[:m], ranks, changes, np.cumsum(counts) - counts, grouped_ranks, grouped)
    found = SparseDelta(counts, like(grouped_ranks, current), like(grouped, current))
    return found, positions[:m], values[:m]


def locate_changes(
    previous: Array, delta: SparseDelta, edges: tuple[int, ...], method: str, dtype: str
) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.sparse_delta.locate_changes`."""
    p = _readable(previous)
    positions, values = np.empty(delta.ranks.shape[0], np.int64), np.empty(delta.ranks.shape[0], p.dtype)
    _apply(p, delta, edges, method, dtype, p[:0], False, positions, values)
    return like(positions, previous), as_values(values, previous)


def apply_changes(
    previous: Array, delta: SparseDelta, edges: tuple[int, ...], method: str, out: Array | None, dtype: str
) -> Array:
    """See `shrinkpoint.kernels.sparse_delta.apply_changes`."""
    p = _readable(previous)
    target = np.empty_like(p) if out is None else _writable(out)
    in_place = target.ctypes.data == p.ctypes.data
    _apply(p, delta, edges, method, dtype, target, not in_place, np.empty(0, np.int64), p[:0])
    return as_values(target.reshape(tuple(previous.shape)), previous) if out is None else out


def split_changes(delta: SparseDelta, shifts: Any) -> tuple[Array, Array, Array]:
    """See `shrinkpoint.kernels.sparse_delta.split_changes`."""
    ranks, changes = compiled(delta.ranks), compiled(delta.changes)
    symbols, large = np.empty(ranks.size, np.uint8), np.empty(ranks.size, changes.dtype)
    words = np.empty(ranks.size * (GAP_BITS - 1) // 64 + 2, np.uint64)
    state = np.zeros(3, np.int64)
    if not _split(delta.counts, shifts, ranks, changes, symbols, words, large, state):
        raise wrong_gap(int(state[0]))
    extra = words.view(np.uint8)[: (int(state[1]) + 7) // 8].copy()
    out = delta.ranks
    return like(symbols, out), like(extra, out), like(large[: int(state[2])].copy(), out)


def join_changes(counts: Any, shifts: Any, n: int, symbols: Array, extra: Array, large: Array) -> SparseDelta:
    """See `shrinkpoint.kernels.sparse_delta.join_changes`."""
    own, data, wide = compiled(symbols), to_numpy(extra), compiled(large)
    words = np.zeros((data.size + 7) // 8 + 2, np.uint64)
    words.view(np.uint8)[: data.size] = data
    ranks, changes = np.empty(own.size, np.int64), np.empty(own.size, wide.dtype)
    state = np.zeros(2, np.int64)
    problem = int(_join(counts, shifts, n, own, words, 8 * data.size, wide, ranks, changes, state))
    if problem:
        raise wrong_changes(_PROBLEMS[problem])
    used = int(state[0])
    if data.size != (used + 7) // 8 or (used % 8 and int(data[-1]) >> (used % 8)):
        raise wrong_changes(f"{data.size} bytes are not the {used} bits that the gaps leave open")
    if int(state[1]) != wide.size:
        raise wrong_changes(f"{wide.size} large ones, {int(state[1])} are needed")
    return SparseDelta(counts, like(ranks, large), like(changes, large))


_PROBLEMS = {
    1: "a symbol does not exist",
    2: "too few bits for the gaps",
    3: "a rank is beyond the last element",
    4: "too few large ones",
    5: "one is wider than its dtype",
}


def _readable(x: Array) -> np.ndarray[Any, Any]:
    """The patterns of an array, as `lent`."""
    return lent(patterns(x))


def _writable(x: Array) -> np.ndarray[Any, Any]:
    """The patterns of a flat array, in its own memory."""
    if is_torch(x):
        return patterns(x)
    flat: np.ndarray[Any, Any] = to_numpy(x)
    return flat.view(UNSIGNED[flat.itemsize])


def _padded(edges: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Return seven edges; the unused ones are above every pattern."""
    top = 1 << (8 * dtype.itemsize - 1)
    return np.asarray([*edges, *[top] * (7 - len(edges))], dtype)


def _apply(
    p: np.ndarray[Any, Any],
    delta: SparseDelta,
    edges: tuple[int, ...],
    method: str,
    dtype: str,
    out: np.ndarray[Any, Any],
    copy: bool,
    positions: np.ndarray[Any, Any],
    values: np.ndarray[Any, Any],
) -> None:
    """Write to `out`, or where that is empty to `positions` and `values`."""
    ranks, changes = compiled(delta.ranks), compiled(delta.changes)
    signed, xor = ordered_by_sign(dtype), method == "xor"
    if not edges:
        fits = _put(p, ranks, changes, signed, xor, out, copy, positions, values)
    else:
        ends = np.cumsum(delta.counts)
        padded = _padded(edges, p.dtype)
        begins, streams = ends - delta.counts, copy and p.nbytes >= MUCH and out.ctypes.data % 16 == 0
        fits = _put_classes(p, padded, begins, ends, ranks, changes, signed, xor, out, copy, streams, positions, values)
    if not fits:
        raise wrong_rank()


def _vector(context: Any, builder: Any, array: Any, value: Any, index: Any) -> Any:
    """LANES elements of an array from an index on, and their type."""
    data = context.make_array(array)(context, builder, value).data
    kind = ir.VectorType(ir.IntType(array.dtype.bitwidth), LANES)
    at = builder.bitcast(builder.gep(data, [index]), kind.as_pointer())
    return builder.load(at, align=array.dtype.bitwidth // 8), kind


def _differing(typing: Any, x: Any, y: Any, index: Any) -> Any:
    """Code for a mask of the lanes in which two arrays differ."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, _ = _vector(context, builder, signature.args[0], arguments[0], arguments[2])
        second, _ = _vector(context, builder, signature.args[1], arguments[1], arguments[2])
        return builder.bitcast(builder.icmp_unsigned("!=", first, second), ir.IntType(64))

    return types.uint64(x, y, types.int64), generate


def _at_least(typing: Any, x: Any, index: Any, edge: Any) -> Any:
    """Code for a mask of the lanes whose pattern without its sign reaches an edge."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        loaded, kind = _vector(context, builder, signature.args[0], arguments[0], arguments[1])
        low = ir.Constant(kind, [(1 << (signature.args[0].dtype.bitwidth - 1)) - 1] * LANES)
        nothing, number = ir.Constant(kind, ir.Undefined), ir.IntType(32)
        one = builder.insert_element(nothing, arguments[2], ir.Constant(number, 0))
        zeros = ir.Constant(ir.VectorType(number, LANES), [0] * LANES)
        edges = builder.shuffle_vector(one, nothing, zeros)
        reached = builder.icmp_unsigned(">=", builder.and_(loaded, low), edges)
        return builder.bitcast(reached, ir.IntType(64))

    return types.uint64(x, types.int64, x.dtype), generate


def _move(typing: Any, target: Any, source: Any, start: Any, stop: Any) -> Any:
    """Code that copies elements start ... stop - 1 from one array to the same place of another."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target_type, source_type = signature.args[:2]
        to = context.make_array(target_type)(context, builder, arguments[0]).data
        own = context.make_array(source_type)(context, builder, arguments[1]).data
        start, count = arguments[2], builder.sub(arguments[3], arguments[2])
        at, source_at = builder.gep(to, [start]), builder.gep(own, [start])
        cgutils.raw_memcpy(builder, at, source_at, count, target_type.dtype.bitwidth // 8)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(target, source, types.int64, types.int64), generate


def _word_copier(around_cache: bool) -> Any:
    """Code that copies LANES elements from an index of one array to an index of another.

    Args:
        around_cache: write to memory without reading it into the cache first, as `memcpy` does with much memory: of the
            array that is written, elements must begin at a multiple of 16 bytes.
    """

    def typed(typing: Any, target: Any, to: Any, source: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value, kind = _vector(context, builder, signature.args[2], arguments[2], arguments[3])
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            at = builder.bitcast(builder.gep(data, [arguments[1]]), kind.as_pointer())
            stored = builder.store(value, at, align=16 if around_cache else target.dtype.bitwidth // 8)
            if around_cache:
                stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
            return context.get_dummy_value()

        return types.void(target, types.int64, source, types.int64), generate

    return typed


def _barrier(typing: Any) -> Any:
    """Emit code after which other threads see the stores that bypassed the cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _ones(typing: Any, x: Any) -> Any:
    """Code for the number of set bits."""
    return types.uint64(types.uint64), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


def _zeros_below(typing: Any, x: Any) -> Any:
    """Code for the position of the lowest set bit."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


def _zeros_above(typing: Any, x: Any) -> Any:
    """Code for the number of clear bits above the highest set bit."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


def _deposit(typing: Any, bits: Any, mask: Any) -> Any:
    """Generate code that spreads a number's bits over the set bits of a mask (BMI2 on x86)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(word, [word, word])
        name = "llvm.x86.bmi.pdep.64"
        found = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        return builder.call(found, arguments)

    return types.uint64(types.uint64, types.uint64), generate


INTERPRETED = bool(config.DISABLE_JIT)  # type: ignore[attr-defined]
HAS_DEPOSIT = not INTERPRETED and bool(dict(binding.get_host_cpu_features()).get("bmi2"))

if INTERPRETED:

    def differing(x: Any, y: Any, index: Any) -> Any:
        """The mask of lanes in which two arrays differ."""
        return _mask(x[index : index + LANES] != y[index : index + LANES])

    def at_least(x: Any, index: Any, edge: Any) -> Any:
        """The mask of lanes whose pattern without its sign reaches an edge."""
        low = x.dtype.type((1 << (8 * x.itemsize - 1)) - 1)
        return _mask((x[index : index + LANES] & low) >= edge)

    def _mask(flags: Any) -> Any:
        assert flags.size == LANES
        return np.packbits(flags, bitorder="little").view(np.uint64)[0]

    def move(target: Any, source: Any, start: Any, stop: Any) -> None:
        """Copy elements start ... stop - 1."""
        target[start:stop] = source[start:stop]

    def copy_word(target: Any, to: Any, source: Any, index: Any) -> None:
        """Copy LANES elements."""
        target[to : to + LANES] = source[index : index + LANES]

    stream_word = copy_word

    def barrier() -> None:
        """Nothing is written around the cache."""

    def ones(x: Any) -> Any:
        """The number of set bits."""
        return np.uint64(int(x).bit_count())

    def zeros_below(x: Any) -> Any:
        """The position of the lowest set bit."""
        return np.uint64((int(x) & -int(x)).bit_length() - 1)

    def zeros_above(x: Any) -> Any:
        """The number of clear bits above the highest set bit."""
        return np.uint64(64 - int(x).bit_length())
else:
    differing: Any = intrinsic(_differing)  # type: ignore[no-redef]
    at_least: Any = intrinsic(_at_least)  # type: ignore[no-redef]
    move: Any = intrinsic(_move)  # type: ignore[no-redef]
    copy_word: Any = intrinsic(_word_copier(around_cache=False))  # type: ignore[no-redef]
    stream_word: Any = intrinsic(_word_copier(around_cache=True))  # type: ignore[no-redef]
    barrier: Any = intrinsic(_barrier)  # type: ignore[no-redef]
    ones: Any = intrinsic(_ones)  # type: ignore[no-redef]
    zeros_below: Any = intrinsic(_zeros_below)  # type: ignore[no-redef]
    zeros_above: Any = intrinsic(_zeros_above)  # type: ignore[no-redef]

if HAS_DEPOSIT:
    _deposited: Any = intrinsic(_deposit)

    @njit
    def _select(mask: Any, rank: Any) -> Any:
        """The position of the set bit that has `rank` set bits below it."""
        return zeros_below(_deposited(np.uint64(1) << rank, mask))

else:

    @njit
    def _select(mask: Any, rank: Any) -> Any:
        """The position of the set bit that has `rank` set bits below it, by halves."""
        one, at, size = np.uint64(1), np.uint64(0), np.uint64(32)
        while size > np.uint64(0):
            below = ones((mask >> at) & ((one << size) - one))
            if rank >= below:
                rank -= below
                at += size
            size >>= one
        return at


@njit
def _begin(copy: Any, current: Any, previous: Any, start: Any, i: Any, stop: Any) -> None:
    """Copy the unchanged elements before word i from the parent, and the rest of its block."""
    move(copy, current, start, stop)
    move(copy, previous, 0, i)


@njit
def _compact(
    current: Any,
    previous: Any,
    copy: Any,
    copies: Any,
    limit: Any,
    signed: Any,
    xor: Any,
    ranks: Any,
    changes: Any,
    values: Any,
) -> Any:
    """Fill `ranks` with positions, `changes` and `values`; return the count, -1 above the limit."""
    one, zero = np.uint64(1), np.uint64(0)
    kind = previous.dtype.type
    none, bit, half = kind(0), kind(1), kind(1 << (8 * previous.itemsize - 1))
    low = kind(half - bit)
    whole = kind(low | half)
    first, second = np.zeros(LANES, previous.dtype), np.zeros(LANES, previous.dtype)
    k, n = np.int64(0), previous.size
    full = n - n % LANES
    begun = False
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        if begun:
            move(copy, current, start, stop)
        if k > limit:
            if not copies:
                return np.int64(-1)
            continue
        source = copy if begun else current
        for i in range(start, stop, LANES):
            if i < full:
                d = differing(source, previous, i)
            else:
                first[: n - full] = source[full:]
                second[: n - full] = previous[full:]
                d = differing(first, second, 0)
            if d != zero and copies and not begun:
                _begin(copy, current, previous, start, i, stop)
                begun, source = True, copy
            while d != zero:
                at = i + np.int64(zeros_below(d))
                d &= d - one
                x, y = source[at], previous[at]
                values[k] = x
                if xor:
                    z = kind(x ^ y)
                else:
                    if signed:
                        x = kind(x ^ (low if x >= half else none))
                        y = kind(y ^ (low if y >= half else none))
                    z = kind(x - y)
                    z = kind(kind(z << bit) ^ (whole if z >= half else none))
                ranks[k] = at
                changes[k] = z
                k += np.int64(z != none)  # another thread may have written since the comparison
            if k > limit:
                break
    return np.int64(-1) if k > limit else k


@njit
def _compact_classes(
    current: Any,
    previous: Any,
    copy: Any,
    copies: Any,
    edges: Any,
    limit: Any,
    signed: Any,
    xor: Any,
    ranks: Any,
    changes: Any,
    classes: Any,
    counts: Any,
    positions: Any,
    values: Any,
) -> Any:
    """Collect changes of several classes in the order of positions; count each class's elements."""
    one, zero = np.uint64(1), np.uint64(0)
    kind = previous.dtype.type
    none, bit, half = kind(0), kind(1), kind(1 << (8 * previous.itemsize - 1))
    low = kind(half - bit)
    whole = kind(low | half)
    first, second = np.zeros(LANES, previous.dtype), np.zeros(LANES, previous.dtype)
    e0, e1, e2, e3, e4, e5, e6 = edges[0], edges[1], edges[2], edges[3], edges[4], edges[5], edges[6]
    # Elements before the word that reach each edge, and the lanes of the word that do.
    n0 = n1 = n2 = n3 = n4 = n5 = n6 = np.int64(0)
    before, reach = np.zeros(9, np.int64), np.zeros(9, np.uint64)
    reach[0] = ~zero
    k, n = np.int64(0), previous.size
    full = n - n % LANES
    begun = False
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        if begun:
            move(copy, current, start, stop)
        if k > limit:
            if not copies:
                return np.int64(-1)
            continue
        source = copy if begun else current
        for i in range(start, stop, LANES):
            if i < full:
                d = differing(source, previous, i)
                m0, m1, m2 = at_least(previous, i, e0), at_least(previous, i, e1), at_least(previous, i, e2)
                m3, m4, m5 = at_least(previous, i, e3), at_least(previous, i, e4), at_least(previous, i, e5)
                m6 = at_least(previous, i, e6)
            else:
                first[: n - full] = source[full:]
                second[: n - full] = previous[full:]
                d = differing(first, second, 0)
                m0, m1, m2 = at_least(second, 0, e0), at_least(second, 0, e1), at_least(second, 0, e2)
                m3, m4, m5 = at_least(second, 0, e3), at_least(second, 0, e4), at_least(second, 0, e5)
                m6 = at_least(second, 0, e6)
            if d != zero:
                if copies and not begun:
                    _begin(copy, current, previous, start, i, stop)
                    begun, source = True, copy
                before[0], before[1], before[2], before[3] = i, n0, n1, n2
                before[4], before[5], before[6], before[7] = n3, n4, n5, n6
                reach[1], reach[2], reach[3], reach[4] = m0, m1, m2, m3
                reach[5], reach[6], reach[7] = m4, m5, m6
                while d != zero:
                    b = zeros_below(d)
                    d &= d - one
                    at = i + np.int64(b)
                    c = ((m0 >> b) & one) + ((m1 >> b) & one) + ((m2 >> b) & one) + ((m3 >> b) & one)
                    c += ((m4 >> b) & one) + ((m5 >> b) & one) + ((m6 >> b) & one)
                    j = np.int64(c)
                    members = reach[j] & ~reach[j + 1] & ((one << b) - one)
                    x, y = source[at], previous[at]
                    positions[k] = at
                    values[k] = x
                    if xor:
                        z = kind(x ^ y)
                    else:
                        if signed:
                            x = kind(x ^ (low if x >= half else none))
                            y = kind(y ^ (low if y >= half else none))
                        z = kind(x - y)
                        z = kind(kind(z << bit) ^ (whole if z >= half else none))
                    ranks[k] = before[j] - before[j + 1] + np.int64(ones(members))
                    changes[k] = z
                    classes[k] = np.uint8(j)
                    is_one = np.int64(z != none)  # another thread may have written since the comparison
                    counts[j] += is_one
                    k += is_one
                if k > limit:
                    break
            n0 += np.int64(ones(m0))
            n1 += np.int64(ones(m1))
            n2 += np.int64(ones(m2))
            n3 += np.int64(ones(m3))
            n4 += np.int64(ones(m4))
            n5 += np.int64(ones(m5))
            n6 += np.int64(ones(m6))
    return np.int64(-1) if k > limit else k


@njit
def _group(classes: Any, ranks: Any, changes: Any, starts: Any, grouped_ranks: Any, grouped: Any) -> None:
    """Group the changes by class, in order within each class; `starts` is modified."""
    for i in range(classes.size):
        c = classes[i]
        at = starts[c]
        grouped_ranks[at] = ranks[i]
        grouped[at] = changes[i]
        starts[c] = at + 1


@njit
def _put(
    previous: Any, ranks: Any, changes: Any, signed: Any, xor: Any, out: Any, copy: Any, positions: Any, values: Any
) -> Any:
    """Apply changes whose ranks are positions; return whether the ranks are valid."""
    kind = previous.dtype.type
    none, bit, half = kind(0), kind(1), kind(1 << (8 * previous.itemsize - 1))
    low = kind(half - bit)
    whole = kind(low | half)
    k, n, m = np.int64(0), previous.size, ranks.size
    last = np.int64(-1)
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        if copy:
            move(out, previous, start, stop)
        while k < m and ranks[k] < stop:
            at = ranks[k]
            if at <= last:
                return False
            last = at
            y, z = previous[at], changes[k]
            if xor:
                x = kind(y ^ z)
            else:
                z = kind(kind(z >> bit) ^ (whole if kind(z & bit) != none else none))
                if signed:
                    y = kind(y ^ (low if y >= half else none))
                x = kind(y + z)
                if signed:
                    x = kind(x ^ (low if x >= half else none))
            if out.size > 0:
                out[at] = x
            else:
                positions[k] = at
                values[k] = x
            k += 1
    return k == m


@njit
def _put_classes(
    previous: Any,
    edges: Any,
    starts: Any,
    ends: Any,
    ranks: Any,
    changes: Any,
    signed: Any,
    xor: Any,
    out: Any,
    copy: Any,
    streams: Any,
    positions: Any,
    values: Any,
) -> Any:
    """Do the same for several classes.

    A word of elements is copied when it is looked at, after its changes were made: around the cache if `streams`.
    """
    one, zero = np.uint64(1), np.uint64(0)
    kind = previous.dtype.type
    none, bit, half = kind(0), kind(1), kind(1 << (8 * previous.itemsize - 1))
    low = kind(half - bit)
    whole = kind(low | half)
    never = np.int64(1 << 62)
    padding = np.zeros(LANES, previous.dtype)
    found = np.zeros(LANES, previous.dtype)
    e0, e1, e2, e3, e4, e5, e6 = edges[0], edges[1], edges[2], edges[3], edges[4], edges[5], edges[6]
    n0 = n1 = n2 = n3 = n4 = n5 = n6 = np.int64(0)
    # For each class, the next rank to find and its position in the lists.
    at = np.zeros(8, np.int64)
    waiting = np.zeros(8, np.int64)
    before, reach, top = np.zeros(9, np.int64), np.zeros(9, np.uint64), np.zeros(8, np.int64)
    for c in range(8):
        at[c] = starts[c] if c < starts.size else 0
        waiting[c] = ranks[at[c]] if c < starts.size and at[c] < ends[c] else never
        if waiting[c] < 0:
            return False
    w0, w1, w2, w3 = waiting[0], waiting[1], waiting[2], waiting[3]
    w4, w5, w6, w7 = waiting[4], waiting[5], waiting[6], waiting[7]
    k, n = np.int64(0), previous.size
    full = n - n % LANES
    direct = out.size > 0 and not copy
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        for i in range(start, stop, LANES):
            lanes = ~zero
            if i < full:
                m0, m1, m2 = at_least(previous, i, e0), at_least(previous, i, e1), at_least(previous, i, e2)
                m3, m4, m5 = at_least(previous, i, e3), at_least(previous, i, e4), at_least(previous, i, e5)
                m6 = at_least(previous, i, e6)
                t = i + LANES
            else:
                padding[: n - full] = previous[full:]
                m0, m1, m2 = at_least(padding, 0, e0), at_least(padding, 0, e1), at_least(padding, 0, e2)
                m3, m4, m5 = at_least(padding, 0, e3), at_least(padding, 0, e4), at_least(padding, 0, e5)
                m6 = at_least(padding, 0, e6)
                lanes = (one << np.uint64(n - full)) - one
                t = n
            t0, t1, t2 = n0 + np.int64(ones(m0)), n1 + np.int64(ones(m1)), n2 + np.int64(ones(m2))
            t3, t4, t5 = n3 + np.int64(ones(m3)), n4 + np.int64(ones(m4)), n5 + np.int64(ones(m5))
            t6 = n6 + np.int64(ones(m6))
            hit = np.uint64(w0 < t - t0) | np.uint64(w1 < t0 - t1) << one | np.uint64(w2 < t1 - t2) << np.uint64(2)
            hit |= np.uint64(w3 < t2 - t3) << np.uint64(3) | np.uint64(w4 < t3 - t4) << np.uint64(4)
            hit |= np.uint64(w5 < t4 - t5) << np.uint64(5) | np.uint64(w6 < t5 - t6) << np.uint64(6)
            hit |= np.uint64(w7 < t6) << np.uint64(7)
            if hit == zero and copy:
                if i >= full:
                    move(out, previous, i, n)
                elif streams:
                    stream_word(out, i, previous, i)
                else:
                    copy_word(out, i, previous, i)
            if hit != zero:
                if copy and i < full:
                    copy_word(found, 0, previous, i)
                elif copy:
                    move(out, previous, i, n)
                before[0], before[1], before[2], before[3] = i, n0, n1, n2
                before[4], before[5], before[6], before[7] = n3, n4, n5, n6
                reach[0], reach[1], reach[2], reach[3] = lanes, m0, m1, m2
                reach[4], reach[5], reach[6], reach[7] = m3, m4, m5, m6
                top[0], top[1], top[2], top[3] = t - t0, t0 - t1, t1 - t2, t2 - t3
                top[4], top[5], top[6], top[7] = t3 - t4, t4 - t5, t5 - t6, t6
                d = zero
                while hit != zero:
                    own = np.int64(zeros_below(hit))
                    hit &= hit - one
                    members = reach[own] & ~reach[own + 1]
                    below = before[own] - before[own + 1]
                    rank, j, end, limit = waiting[own], at[own], ends[own], top[own]
                    while rank < limit:
                        b = _select(members, np.uint64(rank - below))
                        y, z = previous[i + np.int64(b)], changes[j]
                        if xor:
                            x = kind(y ^ z)
                        else:
                            z = kind(kind(z >> bit) ^ (whole if kind(z & bit) != none else none))
                            if signed:
                                y = kind(y ^ (low if y >= half else none))
                            x = kind(y + z)
                            if signed:
                                x = kind(x ^ (low if x >= half else none))
                        if direct or (copy and i >= full):
                            out[i + np.int64(b)] = x
                        else:
                            found[np.int64(b)] = x
                            d |= one << b
                        j += 1
                        following = ranks[j] if j < end else never
                        if following <= rank:
                            return False
                        rank = following
                    waiting[own], at[own] = rank, j
                w0, w1, w2, w3 = waiting[0], waiting[1], waiting[2], waiting[3]
                w4, w5, w6, w7 = waiting[4], waiting[5], waiting[6], waiting[7]
                if copy and i < full:
                    if streams:
                        stream_word(out, i, found, 0)
                    else:
                        copy_word(out, i, found, 0)
                    d = zero
                while d != zero:
                    b = zeros_below(d)
                    d &= d - one
                    positions[k] = i + np.int64(b)
                    values[k] = found[np.int64(b)]
                    k += 1
            n0, n1, n2, n3, n4, n5, n6 = t0, t1, t2, t3, t4, t5, t6
    if streams:
        barrier()
    for c in range(starts.size):
        if at[c] != ends[c]:
            return False
    return True


@njit
def _split(counts: Any, shifts: Any, ranks: Any, changes: Any, symbols: Any, words: Any, large: Any, state: Any) -> Any:
    """Write symbols, open bits and large changes.

    `state` returns a gap that does not fit, and the numbers of open bits and large changes.
    """
    one, two, sixty = np.uint64(1), np.uint64(2), np.uint64(63)
    kind = changes.dtype.type
    most, five = kind(SMALL), kind(SMALL + 1)
    word, fill, at = np.uint64(0), np.uint64(0), np.int64(0)
    k, far = np.int64(0), np.int64(0)
    for c in range(counts.size):
        last, shift = np.int64(-1), np.uint64(shifts[c])
        for _ in range(counts[c]):
            gap = ranks[k] - last - 1
            last = ranks[k]
            if gap < 0 or gap >= (1 << GAP_BITS) or changes[k] == kind(0):
                state[0] = gap
                return False
            g = np.uint64(gap)
            bits = np.uint64(62) - zeros_above((g >> shift) | two)
            category = two * bits
            bits += shift
            category += g >> bits
            z = changes[k]
            if z <= most:
                symbols[k] = np.uint8(np.uint64(SMALL + 1) * category + np.uint64(z) - one)
            else:
                symbols[k] = np.uint8(np.uint64(SMALL + 1) * category + np.uint64(SMALL))
                large[far] = kind(z - five)
                far += 1
            x = g & ((one << bits) - one)
            word |= x << fill
            words[at] = word
            filled = fill + bits
            if filled > sixty:
                at += 1
                word = (x >> one) >> (sixty - fill)
            fill = filled & sixty
            k += 1
    words[at] = word
    state[1] = 64 * at + np.int64(fill)
    state[2] = far
    return True


@njit
def _join(
    counts: Any,
    shifts: Any,
    n: Any,
    symbols: Any,
    words: Any,
    bits_given: Any,
    large: Any,
    ranks: Any,
    changes: Any,
    state: Any,
) -> Any:
    """Read ranks and changes; return 0, or the number of the fault.

    `state` returns the numbers of open bits and large changes that were used.
    """
    one, two, sixty, six = np.uint64(1), np.uint64(2), np.uint64(63), np.uint64(6)
    kind = changes.dtype.type
    five = kind(SMALL + 1)
    top = np.uint64(bits_given)
    at = np.uint64(0)
    k, far = np.int64(0), np.int64(0)
    for c in range(counts.size):
        last, shift = np.int64(-1), np.uint64(shifts[c])
        for _ in range(counts[c]):
            symbol = np.uint64(symbols[k])
            if symbol >= np.uint64(SYMBOLS):
                return 1
            category = symbol // np.uint64(SMALL + 1)
            small = symbol - np.uint64(SMALL + 1) * category
            half = category >> one
            bits = half - np.uint64(half > 0)
            category -= two * bits
            bits += shift
            if at + bits > top:
                return 2
            part = at & sixty
            w = np.int64(at >> six)
            x = (words[w] >> part) | ((words[w + 1] << one) << (sixty - part))
            gap = (category << bits) + (x & ((one << bits) - one))
            at += bits
            last += np.int64(gap) + 1
            if last >= n:
                return 3
            ranks[k] = last
            if small < np.uint64(SMALL):
                changes[k] = kind(small + one)
            else:
                if far >= large.size:
                    return 4
                z = kind(large[far] + five)
                if z < five:
                    return 5
                changes[k] = z
                far += 1
            k += 1
    state[0] = np.int64(at)
    state[1] = far
    return 0
