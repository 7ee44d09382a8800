"""Huffman codes on the CPU: several symbols per table look-up, four streams in parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..backend.arrays import like, writeable
from ..backend.instructions import local_array
from ..backend.jit import njit_in_place, njit_inline
from ..errors import BadArgumentError, CorruptDataError
from ..tables import cpu as tables

if TYPE_CHECKING:
    from ..backend.arrays import Array

NumPy = np.ndarray[Any, Any]
Int = Any  # a machine integer or truth value inside compiled code
U8 = np.uint8
U64 = np.uint64
LIMIT = 24
"""The longest code, as in `kernels.huffman` (a compiled function must not take it from another module: see `jit`)."""
PLACES = LIMIT + 2
TABLE_BITS = 11
"""Bits of a look-up: 2**11 entries of eight bytes are half of a first-level cache."""
WIDE_BITS = 16
"""Bits of a look-up of one symbol, used if codes of more than `TABLE_BITS` are frequent."""
SPARE = 16
"""Bytes after the data that may be read (their value does not matter)."""
ROOM = 36
"""Bytes that five look-ups may write: seven each, and one in excess."""
BULK = 4096
"""Number of symbols from which the table with several symbols per entry is worth building."""


@njit_in_place
def _package_merge(weights: NumPy, limit: Int, lengths: NumPy, packages: NumPy, lists: NumPy) -> None:
    """Code lengths for ascending weights by the package-merge algorithm.

    packages[l] marks the items of list l that are pairs of items of list l - 1.
    """
    n = weights.size
    size = np.int64(0)  # of the list of the level before
    for level in range(limit):
        pairs = size // 2
        before = lists[(level + 1) & 1]
        here = lists[level & 1]
        single, pair, at = np.int64(0), np.int64(0), np.int64(0)
        while single < n or pair < pairs:
            weight = np.int64(0)
            if pair < pairs:
                weight = before[2 * pair] + before[2 * pair + 1]
            if single < n and (pair >= pairs or weights[single] <= weight):
                here[at] = weights[single]
                packages[level, at] = False
                single += 1
            else:
                here[at] = weight
                packages[level, at] = True
                pair += 1
            at += 1
        size = at
    take: Int = 2 * n - 2
    for s in range(n):
        lengths[s] = 0
    for level in range(limit - 1, -1, -1):
        taken = np.int64(0)
        for k in range(take):
            taken += packages[level, k]
        for s in range(take - taken):
            lengths[s] += 1
        take = 2 * taken


@njit_in_place
def _canonical(lengths: NumPy, codes: NumPy, offsets: NumPy, order: NumPy) -> None:
    """Codes of all symbols, and symbols sorted by code length and then by symbol.

    offsets[0, l], offsets[1, l]: first code of length l, and that after the last; offsets[2, l]: its place in `order`.
    """
    count = local_array(PLACES, np.int64)
    count[:] = 0
    for s in range(lengths.size):
        count[lengths[s]] += 1
    code = np.int64(0)
    place = np.int64(0)
    for length in range(1, LIMIT + 1):
        offsets[0, length] = code
        offsets[1, length] = code + count[length]
        offsets[2, length] = place
        place += count[length]
        code = (code + count[length]) << 1
        count[length] = 0
    for s in range(lengths.size):
        length = lengths[s]
        codes[s] = 0
        if length > 0:
            codes[s] = offsets[0, length] + count[length]
            order[offsets[2, length] + count[length]] = s
            count[length] += 1


def _codes(lengths: NumPy) -> tuple[NumPy, NumPy, NumPy]:
    """Codes, offsets and order of checked lengths; see `_canonical`."""
    codes, order = np.empty(lengths.size, np.uint32), np.zeros(lengths.size, np.int32)
    offsets = np.empty((3, PLACES), np.int64)
    _canonical(lengths, codes, offsets, order)
    return codes, offsets, order


@njit_inline
def _load(data: NumPy, at: Any) -> Any:
    """Load eight bytes from `at` on, most significant first (LLVM makes one load of it)."""
    return (
        (U64(data[at]) << U64(56))
        | (U64(data[at + U64(1)]) << U64(48))
        | (U64(data[at + U64(2)]) << U64(40))
        | (U64(data[at + U64(3)]) << U64(32))
        | (U64(data[at + U64(4)]) << U64(24))
        | (U64(data[at + U64(5)]) << U64(16))
        | (U64(data[at + U64(6)]) << U64(8))
        | U64(data[at + U64(7)])
    )


@njit_inline
def _store(data: NumPy, at: Any, word: Any) -> None:
    """Store eight bytes from `at` on, most significant first (LLVM makes one store of it)."""
    data[at] = U8(word >> U64(56))
    data[at + U64(1)] = U8((word >> U64(48)) & U64(255))
    data[at + U64(2)] = U8((word >> U64(40)) & U64(255))
    data[at + U64(3)] = U8((word >> U64(32)) & U64(255))
    data[at + U64(4)] = U8((word >> U64(24)) & U64(255))
    data[at + U64(5)] = U8((word >> U64(16)) & U64(255))
    data[at + U64(6)] = U8((word >> U64(8)) & U64(255))
    data[at + U64(7)] = U8(word & U64(255))


@njit_inline
def _append(out: NumPy, at: Any, held: Any, bits: Any, code: Any, length: Any) -> Any:
    """Append a code to the bits that are held, and store these; return `at`, `held` and `bits`."""
    bits += length
    held |= code << ((U64(64) - bits) & U64(63))
    _store(out, at, held)
    return at + (bits >> U64(3)), held << (bits & U64(56)), bits & U64(7)


@njit_in_place
def _encode(symbols: NumPy, table: NumPy, short: Int, out: NumPy, at: Int) -> Int:
    """Write the codes of `symbols` to `out` from byte `at`; return the end, or -1.

    -1: a symbol has no code.

    An entry of `table` is code | length << 32. `short`: no length exceeds 14, so that 4 * 14 + 7 bits fit a word.
    """
    n = symbols.size
    p = U64(at)
    held = U64(0)  # bits not yet in `out`, from the most significant on
    bits = U64(0)  # how many: 0 ... 7 between two steps
    low = U64(0xFFFFFFFF)
    absent = U64(0)
    step = 4 if short else 2
    whole = n - n % step
    if short:
        for j in range(whole // 4):
            i = U64(4 * j)
            e0, e1 = table[symbols[i]], table[symbols[i + U64(1)]]
            e2, e3 = table[symbols[i + U64(2)]], table[symbols[i + U64(3)]]
            absent |= (e0 | e1) | (e2 | e3)
            l1, l3 = (e1 >> U64(32)) & U64(31), (e3 >> U64(32)) & U64(31)
            la, lb = ((e0 >> U64(32)) & U64(31)) + l1, ((e2 >> U64(32)) & U64(31)) + l3
            a = ((e0 & low) << l1) | (e1 & low)
            b = ((e2 & low) << l3) | (e3 & low)
            p, held, bits = _append(out, p, held, bits, (a << lb) | b, la + lb)
    else:
        for j in range(whole // 2):
            i = U64(2 * j)
            e0, e1 = table[symbols[i]], table[symbols[i + U64(1)]]
            absent |= e0 | e1
            l1 = (e1 >> U64(32)) & U64(31)
            both = ((e0 & low) << l1) | (e1 & low)
            p, held, bits = _append(out, p, held, bits, both, ((e0 >> U64(32)) & U64(31)) + l1)
    for one in range(whole, n):
        e = table[symbols[one]]
        absent |= e
        p, held, bits = _append(out, p, held, bits, e & low, (e >> U64(32)) & U64(31))
    if absent >> U64(63):
        return -1
    _store(out, p, held)
    return np.int64(p) + np.int64(bits > U64(0))


@njit_in_place
def _single_table(lengths: NumPy, codes: NumPy, width: Int, single: NumPy) -> None:
    """Table of the single code that each `width`-bit window starts with.

    single[b] = length | symbol << 8; 0 if the code is longer or does not exist.
    """
    for b in range(single.size):
        single[b] = 0
    for s in range(lengths.size):
        length = np.int64(lengths[s])
        if 0 < length <= width:
            first = np.int64(codes[s]) << (width - length)
            for b in range(first, first + (np.int64(1) << (width - length))):
                single[b] = length | (s << 8)


@njit_in_place
def _many_table(single: NumPy, width: Int, unit: Int, table: NumPy) -> None:
    """Table of all whole codes in each `width`-bit window, as far as they fit.

    An entry holds the symbols in its low 56 bits, `unit` bytes each, the first symbol lowest. Above them are the number
    of bits and, in the highest four bits, the number of bytes. It is 0 if the window does not start with a code of at
    most `width` bits.
    """
    size = np.int64(single.size)
    for b in range(size):
        entry = U64(0)
        used = np.int64(0)
        held = np.int64(0)
        while held + unit <= 7:
            e = np.int64(single[(b << used) & (size - 1)])
            length = e & 255
            if length == 0 or used + length > width:
                break
            entry |= U64(e >> 8) << U64(8 * held)
            used += length
            held += unit
        table[b] = entry | (U64(used | (held << 4)) << U64(56))


@njit_inline
def _long(window: Any, width: Int, offsets: NumPy, order: NumPy) -> Int:
    """Decode a code longer than `width` at the start of `window`: length | symbol << 8.

    64 if no code matches.
    """
    # A single entry and exit, and no array in only one branch: otherwise Numba counts references for each symbol.
    length = width + 1
    while length < LIMIT and np.int64(window >> U64(64 - length)) >= offsets[1, length]:
        length += 1
    code = np.int64(window >> U64(64 - length))
    fits = code < offsets[1, length]
    place = offsets[2, length] + code - offsets[0, length] if fits else 0
    found = np.int64(length) | (np.int64(order[place]) << 8)
    return found if fits else np.int64(64)


@njit_in_place
def _finish(
    data: NumPy, place: NumPy, width: Int, single: NumPy, offsets: NumPy, order: NumPy, unit: Int, out: NumPy
) -> Int:
    """Decode a stream's last symbols one by one; return whether it ends correctly, in zero bits.

    place = next bit, end of the data, next byte of `out`, end of the stream's bytes there.
    """
    bit, end, at, stop = place[0], place[1], place[2], place[3]
    while at < stop:
        if bit >= end * 8:
            return False
        window = _load(data, U64(bit >> 3)) << U64(bit & 7)
        e = np.int64(single[window >> U64(64 - width)])
        if e == 0:
            e = _long(window, width, offsets, order)
            if e == 64:
                return False
        out[at] = U8((e >> 8) & 255)
        if unit > 1:
            out[at + 1] = U8(e >> 16)
        at += unit
        bit += e & 255
    if bit > end * 8 or (bit + 7) >> 3 != end:
        return False
    return bit & 7 == 0 or (np.int64(data[bit >> 3]) << (bit & 7)) & 255 == 0


@njit_inline
def _step(window: Any, shift: Any, table: NumPy, out: NumPy, at: Any, bit: Any) -> Any:
    """Decode the symbols of one look-up: write eight bytes, advance by the number of symbols."""
    e = table[window >> shift]
    out[at] = U8(e & U64(255))
    out[at + U64(1)] = U8((e >> U64(8)) & U64(255))
    out[at + U64(2)] = U8((e >> U64(16)) & U64(255))
    out[at + U64(3)] = U8((e >> U64(24)) & U64(255))
    out[at + U64(4)] = U8((e >> U64(32)) & U64(255))
    out[at + U64(5)] = U8((e >> U64(40)) & U64(255))
    out[at + U64(6)] = U8((e >> U64(48)) & U64(255))
    out[at + U64(7)] = U8(e >> U64(56))
    used = (e >> U64(56)) & U64(15)
    return window << used, at + (e >> U64(60)), bit + used, e


@njit_inline
def _longer(
    data: NumPy, entry: Any, width: Int, offsets: NumPy, order: NumPy, unit: Int, out: NumPy, at: Any, bit: Any
) -> Any:
    """Decode a code that the last look-up did not find; return whether it does not exist.

    `entry` is the result of that look-up; 0 if the code is longer, or does not exist.
    """
    failed = False
    if entry == U64(0):
        e = _long(_load(data, bit >> U64(3)) << (bit & U64(7)), width, offsets, order)
        failed = e == 64
        out[at] = U8((e >> 8) & 255)
        out[at + U64(unit - 1)] = U8((e >> (8 * unit)) & 255)
        at += U64(unit)
        bit += U64(e & 63)
    return at, bit, failed


@njit_in_place
def _decode4(
    data: NumPy, places: NumPy, width: Int, table: NumPy, offsets: NumPy, order: NumPy, unit: Int, out: NumPy
) -> Int:
    """Decode the bulk of four streams in parallel, away from their ends; False if corrupt.

    places[k]: as `place` in `_finish`; the next bit and the next byte are moved on.
    """
    for k in range(4):
        if places[k, 3] - places[k, 2] < ROOM:
            return True
    shift = U64(64 - width)
    b0, b1, b2, b3 = U64(places[0, 0]), U64(places[1, 0]), U64(places[2, 0]), U64(places[3, 0])
    o0, o1, o2, o3 = U64(places[0, 2]), U64(places[1, 2]), U64(places[2, 2]), U64(places[3, 2])
    d0, d1 = U64(places[0, 1]) * U64(8), U64(places[1, 1]) * U64(8)
    d2, d3 = U64(places[2, 1]) * U64(8), U64(places[3, 1]) * U64(8)
    s0, s1 = U64(places[0, 3] - ROOM), U64(places[1, 3] - ROOM)
    s2, s3 = U64(places[2, 3] - ROOM), U64(places[3, 3] - ROOM)
    while o0 <= s0 and o1 <= s1 and o2 <= s2 and o3 <= s3 and b0 <= d0 and b1 <= d1 and b2 <= d2 and b3 <= d3:
        w0 = _load(data, b0 >> U64(3)) << (b0 & U64(7))
        w1 = _load(data, b1 >> U64(3)) << (b1 & U64(7))
        w2 = _load(data, b2 >> U64(3)) << (b2 & U64(7))
        w3 = _load(data, b3 >> U64(3)) << (b3 & U64(7))
        e0 = e1 = e2 = e3 = U64(0)
        for _ in range(5):  # 5 * 11 bits of the 57 available
            w0, o0, b0, e0 = _step(w0, shift, table, out, o0, b0)
            w1, o1, b1, e1 = _step(w1, shift, table, out, o1, b1)
            w2, o2, b2, e2 = _step(w2, shift, table, out, o2, b2)
            w3, o3, b3, e3 = _step(w3, shift, table, out, o3, b3)
        o0, b0, f0 = _longer(data, e0, width, offsets, order, unit, out, o0, b0)
        o1, b1, f1 = _longer(data, e1, width, offsets, order, unit, out, o1, b1)
        o2, b2, f2 = _longer(data, e2, width, offsets, order, unit, out, o2, b2)
        o3, b3, f3 = _longer(data, e3, width, offsets, order, unit, out, o3, b3)
        if f0 | f1 | f2 | f3:
            return False
    places[0, 0], places[1, 0], places[2, 0], places[3, 0] = np.int64(b0), np.int64(b1), np.int64(b2), np.int64(b3)
    places[0, 2], places[1, 2], places[2, 2], places[3, 2] = np.int64(o0), np.int64(o1), np.int64(o2), np.int64(o3)
    return True


def huffman_lengths(counts: Array, limit: int = 15) -> Array:
    """See `kernels.huffman.huffman_lengths`."""
    c = writeable(counts, np.int64)
    if int(c.min()) < 0 or float(c.sum(dtype=np.float64)) > 2.0**57 or int(c.sum()) > 1 << 56:
        raise BadArgumentError("counts holds a negative one, or their sum exceeds 2**56")
    present = np.flatnonzero(c)
    if present.size > 1 << limit:
        raise BadArgumentError(f"limit is {limit}; {present.size} symbols need longer codes")
    lengths = np.zeros(c.size, np.uint8)
    if present.size == 1:
        lengths[present] = 1
    elif present.size > 1:
        weights = c[present]
        by_weight = np.argsort(weights, kind="stable")
        limit = min(limit, present.size - 1)
        found = np.empty(present.size, np.uint8)
        packages = np.empty((limit, 2 * present.size), np.bool_)
        _package_merge(weights[by_weight], limit, found, packages, np.empty((2, 2 * present.size), np.int64))
        lengths[present[by_weight]] = found
    return like(lengths, counts)


@njit_in_place
def _space(lengths: NumPy) -> Any:
    """Number of codes, the longest code, and the code space they use in units of `2**-LIMIT`."""
    present, longest, space = np.int64(0), np.int64(0), np.int64(0)
    for s in range(lengths.size):
        length = np.int64(lengths[s])
        present += np.int64(length > 0)
        longest = max(longest, length)
        if 0 < length <= LIMIT:
            space += np.int64(1) << (LIMIT - length)
    return present, longest, space


def _fault(lengths: NumPy) -> str:
    """Describe the fault in a table of code lengths; empty if it is valid."""
    present, longest, space = _space(lengths)
    if longest > LIMIT:
        return f"lengths holds {longest}; a code has at most {LIMIT} bits"
    if present == 0 or (present == 1 and longest == 1):
        return ""
    if space != 1 << LIMIT:
        return f"lengths belong to no complete code: 2**-lengths sums to {space / (1 << LIMIT)}"
    return ""


def _checked(lengths: Array, error: type[Exception]) -> NumPy:
    found = writeable(lengths)
    fault = _fault(found)
    if fault:
        raise error(fault)
    return found


def huffman_codes(lengths: Array) -> Array:
    """See `kernels.huffman.huffman_codes`."""
    return like(_codes(_checked(lengths, BadArgumentError))[0], lengths)


def _varint(value: int) -> bytes:
    """Encode a number in seven bits per byte, lowest first; the top bit marks continuation."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def huffman_encode(symbols: Array, lengths: Array, *, streams: int = 4) -> Array:
    """See `kernels.huffman.huffman_encode`."""
    s = writeable(symbols)
    found = _checked(lengths, BadArgumentError)
    if s.size == 0:
        return like(np.empty(0, np.uint8), symbols)
    if int(s.max()) >= found.size:
        raise BadArgumentError(f"symbols holds {int(s.max())}; lengths has {found.size} elements")
    table = np.where(found > 0, _codes(found)[0] | (found.astype(np.uint64) << U64(32)), U64(1 << 63))
    longest = int(found.max())
    part = -(-s.size // streams)
    buffer = np.empty((s.size * longest + 7) // 8 + streams + 8, np.uint8)
    ends = [0]
    for k in range(streams):
        at = _encode(s[k * part : (k + 1) * part], table, longest <= 14, buffer, ends[-1])
        if at < 0:
            raise BadArgumentError("symbols holds one that has no code")
        ends.append(at)
    head = b"".join(_varint(ends[k + 1] - ends[k]) for k in range(streams - 1))
    out = np.empty(len(head) + ends[-1], np.uint8)
    out[: len(head)] = np.frombuffer(head, np.uint8)
    out[len(head) :] = buffer[: ends[-1]]
    return like(out, symbols)


def _stream_ends(data: NumPy, streams: int) -> list[int]:
    """First and last byte of each stream, from the sizes stored in front of them."""
    at = 0
    sizes = []
    for _ in range(streams - 1):
        value, shift = 0, 0
        while True:
            if at >= data.size or shift > 56:
                raise CorruptDataError("the sizes of the Huffman streams are cut off")
            byte = int(data[at])
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        if byte == 0 and shift > 7:
            raise CorruptDataError("the size of a Huffman stream is written with more bytes than it needs")
        sizes.append(value)
    ends = [at]
    for size in sizes:
        ends.append(ends[-1] + size)
    if ends[-1] > data.size:
        raise CorruptDataError(f"the Huffman streams take {ends[-1]} bytes; there are {data.size}")
    return [*ends, data.size]


def huffman_decode(data: Array, lengths: Array, n: int, dtype: str = "uint8", *, streams: int = 4) -> Array:
    """See `kernels.huffman.huffman_decode`."""
    d = writeable(data)
    found = _checked(lengths, CorruptDataError)
    if found[1 << int(dtype[4:]) :].any():
        raise BadArgumentError(f"lengths has a code for a symbol that {dtype} cannot hold")
    if n == 0 or d.size == 0:
        if n or d.size:
            raise CorruptDataError(f"{d.size} bytes are not {n} Huffman codes")
        return like(np.empty(0, dtype), data)
    if n > 8 * d.size:
        raise CorruptDataError(f"{d.size} bytes are too few for {n} Huffman codes")
    if not found.any():
        raise CorruptDataError(f"no symbol has a Huffman code; {n} were to be read")
    ends = _stream_ends(d, streams)
    padded = np.zeros(d.size + SPARE, np.uint8)
    padded[: d.size] = d
    unit = int(dtype[4:]) // 8
    codes, offsets, order = _codes(found)
    longest = int(found.max())
    width = min(longest, TABLE_BITS)
    bulk = streams == 4 and n >= BULK
    if longest > TABLE_BITS and n >= 1 << WIDE_BITS and (0.5 ** found[found > TABLE_BITS]).sum() > 0.125:
        width, bulk = min(longest, WIDE_BITS), False  # an alphabet so large that most look-ups would fail
    single = np.empty(1 << width, np.int32)
    _single_table(found, codes, width, single)
    out = np.empty(n * unit, np.uint8)
    part = -(-n // streams)
    places = np.asarray(
        [(8 * ends[k], ends[k + 1], unit * min(k * part, n), unit * min((k + 1) * part, n)) for k in range(streams)],
        np.int64,
    )
    fine = True
    if bulk:
        table = np.empty(1 << width, np.uint64)
        _many_table(single, width, unit, table)
        fine = _decode4(padded, places, width, table, offsets, order, unit, out)
    for k in range(streams):
        if not (fine and _finish(padded, places[k], width, single, offsets, order, unit, out)):
            raise CorruptDataError(f"the bytes are not {n} Huffman codes of these lengths")
    return like(out.view(f"<u{unit}").astype(dtype, copy=False), data)


def pack_lengths(lengths: Array) -> bytes:
    """See `kernels.huffman.pack_lengths`."""
    found = _checked(lengths, BadArgumentError)
    return tables.pack(found.astype(np.uint32).reshape(1, -1), LIMIT, True)


def unpack_lengths(data: Array, size: int) -> Array:
    """See `kernels.huffman.unpack_lengths`."""
    return like(tables.unpack(writeable(data), 1, size, LIMIT, True)[0].astype(np.uint8), data)
