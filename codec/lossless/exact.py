"""Exact storage of any dtype, by the smallest of byte planes, differences and plain bytes.

A chunk's first byte names the method:

    0 plain        the bytes, coded by `entropy` (small or compressible ones as a zstandard frame)
    1 planes       one `entropy` block a byte plane, least significant byte first
    2 difference   planes of the arithmetic difference to the parent's bit patterns
    3 unchanged    the parent's bytes
    4 scaled       floats alone: `codec.lossless.floats`
    5 sizes        floats against their parent: `codec.lossless.floats`
    6 xor          planes of the exclusive or with the parent's bit patterns: flags, packed fields, flipped signs
    7 sparse       the changes since the parent, if they are few: `codec.lossless.sparse`

A chunk is compared with its parent while its changes are collected; if there are too many, it is coded whole. A sample
decides which of the other methods is used for a large chunk with a parent, and for a large chunk of floats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import zstandard

from ...kernels.backend.arrays import bytes_of, is_torch, numbers, placed_with, to_host, write
from ...kernels.levels import joint_counts
from ...kernels.planes import Method, difference, merge_planes, split_planes, undifference
from .. import entropy
from ..base import CHUNK, EncodedGroup, EncodedGroups, Leaf, Parents, Reference, Stored, Unplanned
from ..errors import CorruptDataError
from ..format.fields import Chunk, Reader, Writer, chunks_of
from ..groups import (
    BytesReference,
    Coded,
    Patch,
    PatchedReference,
    joined_bytes,
    joined_parents,
    joined_spec,
    split_reference,
)
from ..parallel import map_chunks
from ..state.leaves import Array, LeafSpec, NpArray, as_bytes
from .floats import (
    LAYOUTS,
    Layout,
    decode_differences,
    decode_scaled,
    difference_bits,
    encode_differences,
    encode_scaled,
    planes_near,
)
from .sparse import Patterns, encode_sparse, located_edges, read_sparse

PLAIN, PLANES, DIFFERENCE, UNCHANGED, SCALED, SIZES, XOR, SPARSE = range(8)
_CHANGES: dict[int, Method] = {DIFFERENCE: "arithmetic", XOR: "xor"}
_SMALL = 64
_REDUNDANT = 0.5
_WORTHWHILE = 0.5
"""A difference below this share of the bytes is taken without trying the rest."""
_EARLY = 1 << 12
_BOTH = 1 << 18
"""Bytes up to which a chunk with few changes is also coded whole, for there a table of symbols decides.

Up to as many leave a GPU as they are.
"""
_PART, _LIKELY = 4, 1.15
_NEAR = 1.06
"""Methods whose estimates are this near to the least are carried out: of small chunks all, else that without parent."""


@dataclass(frozen=True, slots=True)
class Exact(Unplanned):
    """Store every bit, as a delta if that is smaller.

    Example:
        >>> Exact()
        Exact()
    """

    id: ClassVar[str] = "exact"

    def encode(self, leaf: Leaf, parent: Reference | None, plan: None = None) -> Stored:
        """Encode one array; `error` is 0."""
        pieces, reference = copied_pieces(joined_bytes([leaf.flat], there=True), leaf.spec, parent)
        return Stored("bytes", {}, pieces, reference)

    def groups(self, leaf: Leaf) -> Hashable | None:
        """Return True: all exact arrays can be coded together."""
        return True

    def encode_group(self, leaves: Sequence[Leaf], parents: Parents, plans: Sequence[None]) -> EncodedGroups:
        """Encode arrays of one dtype together."""
        specs = [leaf.spec for leaf in leaves]
        before = joined_parents(parents, specs)
        source = joined_bytes([leaf.flat for leaf in leaves], there=True)
        pieces, reference = copied_pieces(source, joined_spec(specs), before)
        stored = [Stored("bytes", {}, (), own) for own in split_reference(reference, specs)]
        return EncodedGroups([EncodedGroup(range(len(leaves)), "bytes", {}, pieces, before is not None, stored)])


def exactly(leaf: Leaf, parent: Reference | None, why: str) -> Stored:
    """Store every bit of an array that its own codec cannot take, and note why."""
    return dataclasses.replace(Exact().encode(leaf, parent), note=f"exact: {why}")


def copied_pieces(source: Array, spec: LeafSpec, parent: Reference | None) -> tuple[list[Writer], BytesReference]:
    """Encode an array given as bytes; return its pieces and the reference for the next delta.

    The bytes are on the host or on a GPU. Stored bytes and reference are equal even if another thread writes to the
    array meanwhile: each part is copied before it is coded, or equals the parent's part, which the reference then
    shares. If nothing changed, the reference is the parent's; if little changed, it holds the changes instead of a
    copy.
    """
    before, step, starts = parent_bytes(parent, spec), CHUNK * 4, range(0, spec.nbytes, CHUNK * 4)
    edges = None if before is None else located_edges(source, before, spec, min(step, spec.nbytes))
    if before is not None and edges is not None:
        return _patched_pieces(source, spec, before, edges)
    data = np.empty(spec.nbytes, np.uint8)

    def one(start: int) -> tuple[Writer, bool]:
        part = slice(start, start + step)
        old = None if before is None else before[part]
        return _encode(near(source[part], spec), spec, old, start // spec.itemsize, data[part])

    done = map_chunks(one, starts)
    pieces = [piece for piece, _ in done]
    if before is not None and not any(copied for _, copied in done):
        return pieces, BytesReference(before)
    for start, (_, copied) in zip(starts, done, strict=True):
        if before is not None and not copied:
            data[start : start + step] = before[start : start + step]
    return pieces, BytesReference(data)


def _patched_pieces(
    source: Array, spec: LeafSpec, before: NpArray, edges: tuple[int, ...]
) -> tuple[list[Writer], BytesReference]:
    """Encode an array that changed little; its reference is the parent and the changes."""
    step = CHUNK * 4

    def one(start: int) -> tuple[Writer, Patch | None]:
        part = slice(start, start + step)
        own, old = near(source[part], spec), before[part]
        found = encode_sparse(own, old, spec, located=edges) if old.size > _BOTH else None
        if _same(own, old) if found is None else found.changes == 0:
            return Writer(UNCHANGED), None
        if found is not None and found.coded is not None and found.located is not None:
            return Writer(SPARSE, found.coded), (start, *found.located)
        copy = np.empty_like(old)
        out, copied = _encode(own, spec, old, start // spec.itemsize, copy)
        return out, (start, None, copy) if copied else None

    done = map_chunks(one, range(0, spec.nbytes, step))
    patches = [patch for _, patch in done if patch is not None]
    return [piece for piece, _ in done], PatchedReference(before, patches) if patches else BytesReference(before)


def near(data: Array, spec: LeafSpec) -> Array:
    """Return a part of an array's bytes where it is encoded; on a GPU in a copy.

    Few bytes, and items of one byte, are encoded on the host.
    """
    how = Patterns.of(spec)
    is_there = is_torch(data) and data.shape[0] > _BOTH and how is not None and how.width > 1
    return data.clone() if is_there else to_host(data)


def pieces_of(data: NpArray, spec: LeafSpec, parent: Reference | None) -> list[Writer]:
    """Encode an array given as its bytes; return its pieces.

    They are a delta if the parent is a `BytesReference` of the same size.
    """
    before = parent_bytes(parent, spec)
    step = CHUNK * 4

    def one(start: int) -> Writer:
        stop = start + step
        old = None if before is None else before[start:stop]
        return encode_chunk(data[start:stop], spec, old, start // spec.itemsize)

    return map_chunks(one, range(0, data.size, step))


def rebase_bytes(
    specs: Sequence[LeafSpec], references: Sequence[Reference], parents: Parents
) -> tuple[dict[str, Any], list[Writer]]:
    """Encode the same bytes as a base or against other parents."""
    found = [
        r.data if isinstance(r, BytesReference) else as_bytes(r.values(spec))
        for r, spec in zip(references, specs, strict=True)
    ]
    return {}, pieces_of(joined_bytes(found), joined_spec(specs), joined_parents(parents, specs))


def _patterns(data: Array, spec: LeafSpec) -> Array | None:
    """View bytes as numbers for `difference`: floats as floats of their width, others unsigned.

    Order needs only sign and magnitude, so bfloat16 may pass for float16. Complex numbers are two floats each. None
    for a width that no number has.
    """
    width = spec.itemsize // 2 if spec.dtype.startswith("complex") else spec.itemsize
    if width not in (1, 2, 4, 8):
        return None
    is_float = width > 1 and ("float" in spec.dtype or "complex" in spec.dtype)
    return numbers(data, width, "float" if is_float else "uint")


def _coded(planes: NpArray) -> Writer:
    out = Writer()
    out.block(*map(entropy.coded, planes))
    return out


def _encode_plain(data: NpArray) -> Writer:
    best = entropy.coded(data)
    if data.size > _SMALL:
        frame = zstandard.ZstdCompressor(level=3, write_content_size=True).compress(data.data)
        if 1 + len(frame) < len(best):
            best = Writer(entropy.ZSTANDARD, frame)
    return best


def encode_chunk(
    data: Array, spec: LeafSpec, before: NpArray | None, start: int | None = None, copy_to: NpArray | None = None
) -> Writer:
    """Encode bytes of items of a dtype, alone or against the parent's bytes.

    `data` must not change before the writer's `done`.

    Args:
        data: uint8, any number of items, at least one.
        spec: of the array they are from.
        before: the parent's bytes of the same items, or None.
        start: number of the first item in the array; None: the items are not contiguous.
        copy_to: as many bytes, which receive `data` unless nothing changed; needed of `data` on a GPU.
    """
    return _encode(data, spec, before, start, copy_to)[0]


def _encode(
    data: Array, spec: LeafSpec, before: NpArray | None, start: int | None, copy_to: NpArray | None
) -> tuple[Writer, bool]:
    """Encode a chunk as `encode_chunk` does; return whether `copy_to` received the bytes.

    It receives nothing if nothing changed.
    """
    nbytes = data.shape[0]
    # Of few bytes the comparison takes less time than the kernel, which a first process would have to compile.
    same = before is not None and nbytes <= _BOTH and _same(data, before)
    found = encode_sparse(data, before, spec, copy_to) if before is not None and nbytes > _SMALL and not same else None
    if same or (found is not None and found.changes == 0):
        return Writer(UNCHANGED), False
    sparse = None if found is None else found.coded
    if found is not None and sparse is not None and found.is_number and nbytes > _BOTH:
        return Writer(SPARSE, sparse), True
    there = data if found is None and is_torch(data) and spec.dtype in LAYOUTS else None
    if copy_to is not None:
        if found is None and there is None:
            copy_to[:] = to_host(data)
        data = copy_to
    if found is None and there is None and before is not None and _same(data, before):
        return Writer(UNCHANGED), True
    method, coded = _smallest(data, spec, before, start, there)
    if sparse is not None and len(sparse) < len(coded):
        method, coded = SPARSE, sparse
    return Writer(method, coded), True


def _same(data: NpArray, before: NpArray) -> bool:
    """Return whether two byte arrays are equal."""
    return np.array_equal(data[:_EARLY], before[:_EARLY]) and np.array_equal(data, before)


def _smallest(
    data: NpArray, spec: LeafSpec, before: NpArray | None, start: int | None, there: Array | None = None
) -> tuple[int, Writer]:
    """Return the method with the fewest bytes among the promising ones, and its bytes.

    `there` holds floats on a GPU, which cross once, in the form that the first method codes; `data` receives them.
    """
    current = _patterns(data, spec)
    if current is None or data.size <= _SMALL:
        return PLAIN, _encode_plain(data)
    if spec.dtype in LAYOUTS:
        return _encode_floats(data, spec, before, start, there)
    found: dict[int, Writer] = {}
    if before is not None:
        method, found = _difference_or_xor(current, before.view(current.dtype))
        if len(found[method]) < _WORTHWHILE * data.size:
            return method, found[method]
    if current.dtype.itemsize > 1:
        found[PLANES] = _coded(split_planes(current))
    # The mantissas of floats are noise to a general compressor, unless their planes already turned out not to be.
    if current.dtype.kind == "u" or len(found[PLANES]) < _REDUNDANT * data.size:
        found[PLAIN] = _encode_plain(data)
    return min(found.items(), key=lambda way: len(way[1]))


def _difference_or_xor(current: NpArray, before: NpArray) -> tuple[int, dict[int, Writer]]:
    """Return the smaller of `_CHANGES`, and the bytes of each method that was tried."""
    some = entropy.sample(current.size)
    x, y = some(current), some(before)
    bits = {method: _planes_bits(split_planes(difference(x, y, how))) for method, how in _CHANGES.items()}
    near = _NEAR if current.size <= entropy.SAMPLE else 1.0
    found = {
        method: _coded(split_planes(difference(current, before, how)))
        for method, how in _CHANGES.items()
        if bits[method] <= near * min(bits.values())
    }
    return min(found, key=lambda method: len(found[method])), found


def _planes_bits(planes: NpArray) -> float:
    """Estimate the bits that the byte planes of a sample take."""
    count, n = planes.shape
    counts = joint_counts(np.repeat(np.arange(count, dtype=np.uint8), n), planes.reshape(-1), max(2, count), 256)
    return entropy.sampled_bits(counts)


def _encode_floats(
    data: NpArray, spec: LeafSpec, before: NpArray | None, start: int | None, there: Array | None = None
) -> tuple[int, Writer]:
    layout = LAYOUTS[spec.dtype]
    parts = 8 * spec.itemsize // layout.width
    u = data.view(f"<u{layout.width // 8}")
    columns = 0 if start is None else parts * spec.columns
    x: Array = u if there is None else Patterns(u.itemsize, "", None).view(there)
    old: Array = None if before is None else before.view(u.dtype)
    chosen, kind = [SCALED], 0
    if old is not None:
        bits, kind = _estimates(x, old, layout)
        # The estimate leaves out the bytes that the scale of rows and columns saves for an array alone.
        near = {m: _NEAR if u.size <= entropy.SAMPLE or m == SCALED else 1.0 for m in bits}
        chosen = [m for m in bits if bits[m] <= near[m] * min(bits.values()) + _SMALL]
    found: dict[int, Writer] = {}
    for method in chosen:
        part = to_host(_prepared(method, x, before, layout))
        if x is not u:
            _restore(method, part, old, layout, u)
            x = u
        if method == SCALED:
            found[method] = encode_scaled(part, layout, columns, (start or 0) * parts)
        else:
            found[method] = encode_differences(part, old, layout, kind) if method == SIZES else _coded(part)
    best = min(found, key=lambda method: len(found[method]))
    # The mantissas of floats are noise to a general compressor, unless their planes already turned out not to be.
    if best == SCALED and len(found[best]) < _REDUNDANT * data.size:
        found[PLAIN] = _encode_plain(data)
        best = min((best, PLAIN), key=lambda method: len(found[method]))
    return best, found[best]


def _prepared(method: int, x: Array, before: NpArray | None, layout: Layout) -> Array:
    """Return what a method codes of float patterns: planes, or the differences for `SIZES`."""
    if method == SCALED:
        return split_planes(x, layout.rotation)
    # Order depends on sign and magnitude alone, so that all 16-bit floats are treated alike.
    old, how = placed_with(before, x).view(x.dtype), _CHANGES.get(method, "arithmetic")
    steps = difference(x, old, how, dtype=f"float{layout.width}")
    return steps if method == SIZES else split_planes(steps)


def _restore(method: int, part: NpArray, old: Array, layout: Layout, out: NpArray) -> None:
    """Fill `out` with the patterns that a method codes in parts, `part` among them."""
    if method != SIZES:
        part = merge_planes(part, out.dtype.name, layout.rotation if method == SCALED else 0, out=out)
    if method != SCALED:
        undifference(part, old, _CHANGES.get(method, "arithmetic"), dtype=f"float{layout.width}", out=out)


def _estimates(x: Array, old: NpArray, layout: Layout) -> tuple[dict[int, float], int]:
    """Estimate a sample's bits by each promising method, and the kind of context for `SIZES`."""
    some = entropy.sample(old.size)
    u, old = some(x).view(old.dtype), some(old)
    steps = _prepared(SIZES, u, old.view(np.uint8), layout)
    sizes, kind = difference_bits(steps, old, layout)
    bits: dict[int, float] = {SIZES: sizes}
    # The other methods seldom win: the whole sample is only used if a quarter of it does not exclude them.
    for method, patterns, rotation in (
        (SCALED, u, layout.rotation),
        (DIFFERENCE, steps, 0),
        (XOR, difference(u, old, "xor"), 0),
    ):
        part = patterns[::_PART]
        if _PART * _planes_bits(split_planes(part, rotation)) <= _LIKELY * min(bits.values()):
            bits[method] = _planes_bits(split_planes(patterns, rotation))
    return bits, kind


def decode_bytes(coded: Coded) -> list[BytesReference]:
    """Decode the stream format "bytes"."""
    parent = joined_parents(coded.parents, coded.specs)
    joined = decode_parts("exact", coded, parent_bytes(parent, coded.spec), CHUNK * 4, decode_chunk)
    return split_reference(joined, coded.specs)


DecodePart = Callable[[memoryview, Array, LeafSpec, NpArray | None], None]
"""Fills a part of an array, the second argument, from its piece and the parent's same bytes.

The part is on the host or on a GPU, the parent's bytes are on the host.
"""


def parent_bytes(parent: Reference | None, spec: LeafSpec) -> NpArray | None:
    """Return the parent's restored bytes if their number is right, else None."""
    return parent.data if isinstance(parent, BytesReference) and parent.data.size == spec.nbytes else None


def decode_parts(
    what: str, coded: Coded, before: NpArray | None, step: int, decode: DecodePart, *, head: bool = False
) -> BytesReference:
    """Decode arrays in parts of `step` bytes, each against the parents' same bytes, if any.

    Args:
        what: of the stream, for errors.
        coded: the arrays.
        before: the parents' bytes.
        step: bytes of a part.
        decode: decodes one.
        head: whether the first piece is not a part.
    """
    spec, out = coded.spec, coded.out
    needed = spec.nbytes if out is None else 0
    chunks = chunks_of(what, coded.pieces, spec.nbytes, needed, step=step, head=head)
    data = bytes_of(coded.room())

    def one(chunk: Chunk) -> None:
        piece, part = chunk
        decode(piece, data[part], spec, None if before is None else before[part])

    map_chunks(one, chunks)
    return BytesReference(data)


def decode_chunk(piece: memoryview, out: Array, spec: LeafSpec, before: NpArray | None) -> None:
    """Fill `out` with the bytes that `encode_chunk` coded; raises CorruptDataError."""
    data, nbytes = Reader(piece, "exact"), out.shape[0]
    method = data.byte()
    if method == PLAIN:
        write(out, entropy.decode(data.rest(), nbytes))
        return
    if method in (UNCHANGED, DIFFERENCE, XOR, SPARSE) and before is None:
        raise CorruptDataError("exact: a difference without a parent")
    if method == UNCHANGED and before is not None:
        write(out, before)
    elif method == SPARSE and before is not None:
        read_sparse(data, nbytes, spec).apply(before, out)
    elif method in (PLANES, DIFFERENCE, XOR):
        patterns = _patterns(out, spec)
        if patterns is None:
            raise CorruptDataError(f"exact: items of {spec.itemsize} bytes have no planes")
        size, n = patterns.dtype.itemsize, patterns.shape[0]
        target = numbers(out, size)
        planes = [entropy.decode(data.block(), n) for _ in range(size)]
        merge_planes(planes_near(planes, out), f"uint{8 * size}", out=target)
        if method in _CHANGES and before is not None:
            undifference(target, _patterns(placed_with(before, out), spec), _CHANGES[method], out=target)
    elif method in (SCALED, SIZES) and spec.dtype in LAYOUTS:
        layout = LAYOUTS[spec.dtype]
        if method == SCALED:
            decode_scaled(data, out, layout)
        elif before is None:
            raise CorruptDataError("exact: sizes without a parent")
        else:
            decode_differences(data, before, out, layout)
    else:
        raise CorruptDataError(f"exact: method {method} is unknown, or not for {spec.dtype}")
    data.end()
