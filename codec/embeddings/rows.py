"""Embedding tables by rows: each row has its own range; a delta stores changed rows only.

Piece i covers a chunk of rows: a symbol stream, 0 for a row that is the parent's, 1 + k for one in style k of `m.s`;
then for each style present its rows' numbers and codes. The stored bytes depend on the two references alone, so that
storing a checkpoint against another parent (`rebase_rows`) and encoding one end in the same function.

Source: Check-N-Run, sections 5.1 and 5.2.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...kernels.backend.arguments import check_field, choice, integer, number, or_none, shown
from ...kernels.backend.arrays import is_torch, on_gpu, placed_with
from ...kernels.backend.arrays import numbers as viewed
from ...kernels.error_sums import Distortion, distortion
from ...kernels.packing import pack_bits, unpack_mask
from .. import entropy
from ..base import CHUNK, Leaf, Parents, Reference, Stored
from ..errors import BadArgumentError, CorruptDataError
from ..format.fields import Chunk, Reader, Writer, chunks_of
from ..groups import Coded
from ..lossless.exact import Exact, decode_chunk, encode_chunk, exactly
from ..parallel import map_batches, map_chunks
from ..state.casting import FLOATS, float_values
from ..state.leaves import Array, LeafSpec, NpArray, bytes_of_each
from .row_reference import (
    DEFAULT_BINS,
    METHODS,
    MOST_STYLES,
    RAW,
    WIDTHS,
    RowsReference,
    Style,
    all_of,
    checked,
    dense,
    evenly,
    joined,
    opened,
    pack_codes,
    picked,
    quantized,
    records_of,
    replaced,
    row_length,
    same_records,
    sample_sizes,
    search_parameters,
)

ENOUGH = ((1, 2), (3, 3), (20, 4), (math.inf, 8))
"""(restores, width): with codes of `width` bits, up to this number of restores cost at most 0.01 % of accuracy."""
_PLAIN, _CODED = 0, 1
_CONTEXT_BITS = 4
_STIR = 0x2545F4914F6CDD1D
_BLOCK = 1 << 14
_NODES = 10**15


@dataclass(frozen=True, slots=True)
class SeenRows(RowsReference):
    """The reference after encoding, with a hash of the values of each row.

    A row whose fingerprint has not changed has not moved, and need not be quantized. A reference decoded from bytes
    has no fingerprints, and leads to the same deltas.

    Args:
        prints: int64 [R].
    """

    prints: NpArray


def width_for(restores: float) -> int:
    """Return the bits per element for a run with this expected number of restores.

    Example:
        >>> [width_for(n) for n in (0, 1, 2, 3, 4, 20, 21, 1000)]
        [2, 2, 3, 3, 4, 4, 8, 8]

    Source: Check-N-Run, section 6.2.1.
    """
    return next(bits for most, bits in ENOUGH if restores <= most)


def expected_failures(probability: float, nodes: int, duration: float) -> int:
    """Return the expected number of failures of a run: `ceil(probability * nodes * duration)`.

    Args:
        probability: of one node failing within one unit of time (an hour, say), in [0, 1]; from failure logs.
        nodes: number of nodes, 1 to 10**15.
        duration: of the run, in the same unit of time, 0 to 1e15.

    Raises:
        BadArgumentError: a value out of range.

    Example:
        >>> expected_failures(0.001, nodes=16, duration=72)
        2

    Source: Check-N-Run, section 6.2.1.
    """
    probability, nodes = number("probability", probability, 0, 1), integer("nodes", nodes, 1, _NODES)
    return math.ceil(probability * nodes * number("duration", duration, 0, 1e15))


def code_width(name: str, value: Any, also: str = "") -> int:
    """Return `value` as an int if it is a width of codes, else raise BadArgumentError.

    `also` names other accepted values for the message.
    """
    with suppress(BadArgumentError):
        if (width := integer(name, value, min(WIDTHS), max(WIDTHS))) in WIDTHS:
            return width
    raise BadArgumentError(f"{name} is {shown(value)}; it must be one of {', '.join(map(str, WIDTHS))}{also}")


@dataclass(frozen=True, slots=True)
class Rows:
    """Quantize each row of a matrix over its own range; a delta holds only changed rows.

    A row counts as unchanged if its values equal the parent's, or if it quantizes to the codes of the parent. Rows
    that are not finite, and tables whose rows would not get smaller, are stored raw. Optimizer entries are coded row
    by row only if they belong to an embedding; others, and weights that are not matrices, are exact.

    Args:
        bits: width of a code, 2, 3, 4 or 8; "auto": by `expected_restores`; None: raw rows, bit-exact.
        method: "adaptive" (the greedy search; at 8 bits plain "asymmetric" is enough and is used instead),
            "asymmetric", "symmetric" or "kmeans" (15 iterations).
        num_bins: steps that the greedy search cuts a row's range into, 1 to 4096; None: picked on a sample.
        ratio: share of the range it walks through, in (0, 1]; None: picked on a sample.
        expected_restores: how often the run is expected to resume, at least 0. It picks the width of "auto" (1: 2 bits,
            up to 3: 3, up to 20: 4, else 8; limits that short trainings miss, see `presets.check_n_run`), and beyond it
            `for_restores` falls back to 8 bits.
        coder: "smallest" or "published" (bit-packed codes; float32 numbers and masks without entropy coding).
        max_error: relative L2 error an array may have, in (0, 1); raises the width where needed. None:
            `Config.max_rel_error`.

    Raises:
        BadArgumentError: a value out of range; "auto" without `expected_restores`.

    Example:
        >>> Rows("auto", expected_restores=2).width, Rows("auto", expected_restores=2).for_restores(3).width
        (3, 8)

    Source: Check-N-Run, sections 5 and 6.2.1.
    """

    bits: int | str | None = 4
    method: str = "adaptive"
    num_bins: int | None = None
    ratio: float | None = None
    expected_restores: float | None = None
    coder: str = "smallest"
    max_error: float | None = None
    id: ClassVar[str] = "rows"

    def __post_init__(self) -> None:
        if not isinstance(self.bits, str) or self.bits != "auto":
            check_field(self, "bits", or_none, code_width, ", 'auto'")
        check_field(self, "method", choice, METHODS)
        check_field(self, "num_bins", or_none, integer, 1, 4096)
        check_field(self, "ratio", or_none, number, 0, 1, open_low=True)
        check_field(self, "expected_restores", or_none, number, 0, 1e15)
        if self.expected_restores is None and self.bits == "auto":
            raise BadArgumentError(
                "bits is 'auto': expected_restores is needed too (expected_failures estimates it from a node's "
                "probability of failure, the number of nodes and the duration)"
            )
        check_field(self, "coder", choice, ("smallest", "published"))
        check_field(self, "max_error", or_none, number, 0, 1, open_low=True, open_high=True)

    @property
    def width(self) -> int | None:
        """Bits an element; None: raw rows."""
        if self.bits == "auto":
            return width_for(self.expected_restores or 0)
        return self.bits if isinstance(self.bits, int) else None

    @property
    def lossless(self) -> bool:
        """Return whether every bit is kept."""
        return self.bits is None

    def for_restores(self, restores: int) -> Rows:
        """Return the codec after this number of restores: 8 bits if it exceeds the expected number."""
        if self.bits is None or self.expected_restores is None or restores <= self.expected_restores:
            return self
        return dataclasses.replace(self, bits=8, method="asymmetric" if self.method == "kmeans" else self.method)

    def prepare(self, leaves: Sequence[Leaf], parents: Sequence[Reference | None]) -> Sequence[Style]:
        """Choose the style of each array's rows: the given one, the parent's, or by a sample."""
        width = self.width
        if width is None:
            return [RAW] * len(leaves)
        if self.method != "adaptive" or width == 8:
            return [Style("asymmetric" if self.method == "adaptive" else self.method, width)] * len(leaves)
        styles = [self._of_parent(p, width) for p in parents]
        if self.num_bins is not None and self.ratio is not None:
            return [Style("adaptive", width, self.num_bins, float(self.ratio))] * len(leaves)
        new = [leaf for leaf, s in zip(leaves, styles, strict=True) if s is None and _has_rows(leaf)]
        counts = sample_sizes([leaf.spec.shape[0] for leaf in new]) if new else []
        samples = _samples(new, counts)
        fresh = Style("adaptive", width, *search_parameters(samples, width, self.num_bins, self.ratio))
        return [s or fresh for s in styles]

    def _of_parent(self, parent: Reference | None, width: int) -> Style | None:
        """Return the most frequent adaptive style of the parent with this width, if it fits."""
        if not isinstance(parent, RowsReference):
            return None
        asked = [
            (records.shape[0], s)
            for s, records in zip(parent.table, parent.records, strict=True)
            if (s.method, s.bits) == ("adaptive", width)
            and self.num_bins in (None, s.num_bins)
            and self.ratio in (None, s.ratio)
        ]
        return max(asked)[1] if asked else None

    def encode(self, leaf: Leaf, parent: Reference | None, plan: Style) -> Stored:
        """Encode one array; `error` is the relative L2 error met, over all rows."""
        if not _has_rows(leaf):
            if leaf.kind.role != "weight" or not leaf.spec.size:
                return Exact().encode(leaf, parent)
            return exactly(leaf, parent, f"{len(leaf.spec.shape)} dimensions, no rows to quantize")
        before = parent if isinstance(parent, RowsReference) and parent.style.size == leaf.spec.shape[0] else None
        touched = marked_rows(leaf.touched, leaf.spec.shape[0], leaf.path)
        for style in self._ladder(plan, leaf.spec):
            # A full table of styles starts from scratch.
            room = before is not None and len({*before.table, style, RAW}) <= MOST_STYLES
            reference, met, missed = _quantize(leaf, style, before if room else None, touched)
            if self.max_error is None or style == RAW or met.relative_l2 <= self.max_error:
                break
        note = f"{missed:,} rows changed that were not marked as touched; they are stored, too" if missed else ""
        meta, pieces = _write(leaf.spec, reference, before, self.coder)
        if style == RAW and plan != RAW:
            narrow = plan.length(row_length(leaf.spec), leaf.spec.itemsize) >= _row_bytes(leaf.spec)
            why = "rows this short are not smaller quantized" if narrow else f"8 bits miss {self.max_error:g}"
            note = "; ".join(part for part in (f"exact: {why}", note) if part)
        # In `RAW` a row is either the parent's to the bit or stored.
        return Stored(
            "rows", meta, pieces, reference, met.relative_l2, "exact" if style == RAW else "relative L2", note
        )

    def _ladder(self, plan: Style, spec: LeafSpec) -> list[Style]:
        """Return the styles to try: the requested one, and finer ones if there is an error target."""
        styles = [plan]
        if self.max_error is not None and plan != RAW:
            for width in WIDTHS[WIDTHS.index(plan.bits) + 1 :]:
                if plan.method == "adaptive" and width < 8:
                    styles.append(Style("adaptive", width, DEFAULT_BINS[width], 1.0))
                else:
                    styles.append(Style("asymmetric" if plan.method == "adaptive" else plan.method, width))
            styles.append(RAW)
        smaller = [s for s in styles if s == RAW or s.length(row_length(spec), spec.itemsize) < _row_bytes(spec)]
        return smaller or [RAW]


def _row_bytes(spec: LeafSpec) -> int:
    return row_length(spec) * spec.itemsize


def _has_rows(leaf: Leaf) -> bool:
    """Return whether an array is coded by rows: weight matrices and embedding optimizer entries."""
    if not leaf.spec.size or not leaf.spec.shape or leaf.spec.dtype not in FLOATS:
        return False
    return len(leaf.spec.shape) == 2 if leaf.kind.role == "weight" else leaf.kind.layer == "embedding"


def marked_rows(bits: Any, rows: int, path: str) -> NpArray | None:
    """Unpack a bit vector to bool [rows]; return None for None.

    Raises:
        BadArgumentError: the bit vector has another number of rows (the table was resized).
    """
    if bits is None:
        return None
    try:
        out: NpArray = unpack_mask(np.asarray(bits), rows)
    except (CorruptDataError, BadArgumentError) as e:
        raise BadArgumentError(
            f"{path}: the touched rows do not fit a table of {rows} rows; was it resized? ({e})"
        ) from None
    return out


def _rows_of(leaf: Leaf) -> Array:
    """Return the values as a matrix, rows along the first axis."""
    return leaf.flat.reshape(leaf.spec.shape[0], row_length(leaf.spec))


def _samples(leaves: Sequence[Leaf], counts: Sequence[int]) -> list[NpArray]:
    """Return evenly spaced rows of each array as float32 on the host."""
    rows = [picked(_rows_of(leaf), evenly(leaf.spec.shape[0], n)) for leaf, n in zip(leaves, counts, strict=True)]
    found = map_batches(lambda numbers: bytes_of_each([rows[i].reshape(-1) for i in numbers]), leaves)
    with np.errstate(over="ignore"):
        wide = [float_values(own, leaf.spec).astype(np.float32) for own, leaf in zip(found, leaves, strict=True)]
    return [own.reshape(n, -1) for own, n in zip(wide, counts, strict=True)]


def _differ(x: Array, y: Array) -> Array:
    """Return bool [R] where x is: whether the rows of two matrices are not bit-identical."""
    return (viewed(x, x.dtype.itemsize, "int") != viewed(y, x.dtype.itemsize, "int")).any(1)


def _settled(x: Array, spec: LeafSpec, before: RowsReference, new: tuple[NpArray, NpArray], own: Style) -> NpArray:
    """Return bool [R]: whether each row quantizes to its parent's record of a fine enough style.

    A row that the style cannot hold does not. `new` is what `quantized` returns for the rows in the style `own`.
    """
    done = np.zeros(before.style.size, bool)
    for style, at, records in before.groups():
        if at.size and style != RAW and style.fineness >= own.fineness:
            again, lost = (one[at] for one in new) if style == own else quantized(picked(x, at), spec, style)
            done[at] = (again == records).all(axis=1) & ~lost
    return done


@dataclass(frozen=True, slots=True)
class _Part:
    """Result for a chunk of rows: reference, error, hashes, and number of missing marks."""

    reference: RowsReference
    met: Distortion
    prints: NpArray | None
    missed: int = 0


def _quantize(
    leaf: Leaf, style: Style, before: RowsReference | None, touched: NpArray | None
) -> tuple[RowsReference, Distortion, int]:
    """Quantize an array: return its reference, the error, and the number of missing marks.

    Marks say which rows a training has looked up, not which have moved: gradients of other processes, gradients kept
    from step to step, and direct edits move others. So all rows are compared, and a missing mark is counted.
    """
    spec, x = leaf.spec, _rows_of(leaf)
    step = max(1, CHUNK // row_length(spec))
    starts = range(0, spec.shape[0], step)
    parents = [None] * len(starts) if before is None else before.split(step)
    seen = before.prints if isinstance(before, SeenRows) else None

    def one(number: int) -> _Part:
        rows = slice(starts[number], starts[number] + step)
        known = None if seen is None else seen[rows]
        marks = None if touched is None else touched[rows]
        return _quantize_chunk(x[rows], spec, style, parents[number], known, marks)

    parts = map_chunks(one, range(len(starts)))
    reference = joined([p.reference for p in parts])
    prints = [p.prints for p in parts if p.prints is not None]
    if prints:
        reference = SeenRows(reference.table, reference.style, reference.records, np.concatenate(prints))
    return reference, sum((p.met for p in parts), Distortion(0.0, 0.0, 0.0)), sum(p.missed for p in parts)


def _quantize_chunk(
    x: Array, spec: LeafSpec, style: Style, before: RowsReference | None, seen: NpArray | None, touched: NpArray | None
) -> _Part:
    # Raw rows need no hash: they are compared by their values.
    hashes = [] if style == RAW else [fingerprints(x)]
    restored = None if before is None else before.near(x, spec)
    first = records_of(x, style).reshape(-1) if restored is None else _differ(x, restored)
    found, *others = bytes_of_each([first, *hashes])
    prints = others[0].view(np.int64) if others else None
    if before is None or restored is None:
        reference = _kept(x, spec, style, checked(found.reshape(x.shape[0], -1), x, spec, style))
        return _Part(reference, _met(x, reference.near(x, spec), style), prints)
    differ = found.view(bool)
    # Rows kept more coarsely than requested are encoded again even if they did not move.
    coarser = np.array([s.fineness < style.fineness for s in before.table], bool)[before.style]
    if seen is not None and prints is not None:
        differ = differ & ((prints != seen) | coarser)
    at = np.flatnonzero(differ)
    if at.size:
        moved = picked(x, at)
        records, lost = quantized(moved, spec, style)
        stay = np.flatnonzero(~_settled(moved, spec, before.take(at), (records, lost), style))
        at, moved, records, lost = at[stay], *(picked(every, stay) for every in (moved, records, lost))
    if not at.size:
        return _Part(before, _met(x, restored, style), prints)
    missed = 0 if touched is None else int(np.count_nonzero(~(touched | coarser)[at]))
    new = _kept(moved, spec, style, (records, lost))
    restored[placed_with(at, x)] = new.near(moved, spec)
    return _Part(replaced(before, at, new), _met(x, restored, style), prints, missed)


def _met(x: Array, restored: Array, style: Style) -> Distortion:
    """Return the error of restored rows; that of raw rows is 0."""
    return Distortion(0.0, 0.0, 0.0) if style == RAW else distortion(x, restored)


def fingerprints(x: Array) -> Array:
    """Return a hash of 64 bits for each row, int64 [R], where x is.

    Each word is multiplied by an odd number that depends on its column, and mixed; then all words of a row are added
    up. So two changes do not cancel out systematically, as two flipped signs would in a plain sum. Two different rows
    have the same hash with a probability of about 2**-64.

    Args:
        x: [R, D] NumPy or torch, on any device.
    """
    columns = x.shape[1]
    itemsize = x.dtype.itemsize
    size = next(n for n in (8, 4, 2) if columns * itemsize % n == 0)
    factors = _factors(columns * itemsize // size)
    words = viewed(dense(x), size, "int")
    if on_gpu(x):
        return _stirred(words.long() * placed_with(factors, x)).sum(1)
    words = words.numpy() if is_torch(x) else words
    out = np.empty(words.shape[0], np.int64)
    step = max(1, _BLOCK // words.shape[1])
    for start in range(0, out.size, step):
        rows = slice(start, start + step)
        _stirred(words[rows].astype(np.int64, copy=False) * factors).sum(axis=1, out=out[rows])
    return out


def _stirred(words: Array) -> Array:
    """Mix high bits into low bits, in place; a bijection of 64-bit words."""
    words ^= (words >> 32) & 0xFFFFFFFF
    words *= _STIR
    words ^= (words >> 29) & 0x7FFFFFFFF
    return words


@functools.lru_cache(maxsize=32)
def _factors(count: int) -> NpArray:
    """Return fixed pseudorandom odd numbers, int64 [count]."""
    drawn: NpArray = np.random.default_rng(0).integers(-(2**63), 2**63, count, dtype=np.int64, endpoint=False) | 1
    return drawn


def _kept(x: Array, spec: LeafSpec, style: Style, made: tuple[NpArray, NpArray]) -> RowsReference:
    """Return the reference of quantized rows; those that the style cannot hold are raw."""
    records, lost = made
    reference = all_of(style, records)
    if not lost.any():
        return reference
    at = np.flatnonzero(lost)
    raw, _ = quantized(picked(x, at), spec, RAW)
    return replaced(reference, at, all_of(RAW, raw))


# ---------------------------------------------------------------------------------------------- the stream


def _write(
    spec: LeafSpec, reference: RowsReference, before: RowsReference | None, coder: str
) -> tuple[dict[str, Any], list[bytes]]:
    """Return metadata and pieces of a reference, as a delta if it has a parent."""
    step = max(1, CHUNK // row_length(spec))
    parts = reference.split(step)
    parents = [None] * len(parts) if before is None else before.split(step)
    pieces = map_chunks(lambda pair: _write_chunk(spec, *pair, coder), list(zip(parts, parents, strict=True)))
    return {"s": [[s.method, s.bits, s.num_bins, s.ratio] for s in reference.table]}, pieces


def _write_chunk(spec: LeafSpec, reference: RowsReference, before: RowsReference | None, coder: str) -> bytes:
    symbols = reference.style + np.uint8(1)
    if before is not None:
        symbols[same_records(reference, before)] = 0
    out = Writer()
    out.block(_coded(symbols, coder))
    columns = row_length(spec)
    for symbol, (style, at, records) in enumerate(reference.groups(), 1):
        own = np.flatnonzero(symbols == symbol)
        if not own.size:
            continue
        mine = records[np.searchsorted(at, own)]
        known = None if before is None or coder == "published" else before.take(own)
        if style == RAW:
            _write_array(out, mine, _flat(spec, own.size * columns), _parent_bytes(known, spec), coder)
            continue
        numbers, codes = opened(mine, style, columns)
        old_numbers, old_codes = _parent_codes(known, style, columns)
        # All first numbers, then all second ones: similar numbers stand together.
        plain = np.ascontiguousarray(numbers.T).view(np.uint8)
        _write_array(out, plain, _flat32(numbers.size), old_numbers, coder)
        flat = codes.reshape(-1)
        if old_codes is None:
            out.block(_coded(flat, coder))
        else:
            levels = 1 << style.bits
            out.block(entropy.encode_levels(flat, levels, old_codes, levels + 1, "smallest"))
    return out.done()


def _coded(symbols: NpArray, coder: str) -> bytes:
    """Code symbols without a context; "published" packs bits even if another coder is smaller."""
    top = int(symbols.max()) if symbols.size else 0
    if coder == "published" and top != int(symbols.min(initial=top)):
        width = top.bit_length()
        packed: NpArray = pack_bits(symbols, width)
        return bytes([entropy.PACKED, width]) + packed.tobytes()
    return entropy.encode(symbols)


def _flat(spec: LeafSpec, size: int) -> LeafSpec:
    return dataclasses.replace(spec, shape=(size,))


def _flat32(size: int) -> LeafSpec:
    return LeafSpec("numpy", "float32", (size,))


def _parent_bytes(known: RowsReference | None, spec: LeafSpec) -> NpArray | None:
    if known is None:
        return None
    return known.decoded(dataclasses.replace(spec, shape=(known.style.size, row_length(spec)))).reshape(-1)


def _parent_codes(known: RowsReference | None, style: Style, columns: int) -> tuple[NpArray | None, NpArray | None]:
    """Return numbers and codes of the parent's rows of this style as bytes, or None.

    Rows of another style have numbers 0 and the code 2**bits, which no row has. Codes of 8 bits get no context, which
    would save almost nothing.
    """
    if known is None or style not in known.table:
        return None, None
    at, records = next((at, r) for s, at, r in known.groups() if s == style)
    if not at.size:
        return None, None
    count = known.style.size
    numbers = np.zeros((count, style.numbers), "<f4")
    numbers[at], own = opened(records, style, columns)
    plain = np.ascontiguousarray(numbers.T).view(np.uint8).reshape(-1)
    if style.bits > _CONTEXT_BITS:
        return plain, None
    codes = np.full((count, columns), 1 << style.bits, np.uint8)
    codes[at] = own
    return plain, codes.reshape(-1)


def _write_array(out: Writer, data: NpArray, spec: LeafSpec, parent: NpArray | None, coder: str) -> None:
    """Write the bytes of an array plainly, or as a chunk of the stream "bytes" if smaller."""
    flat = np.ascontiguousarray(data).reshape(-1)
    if coder != "published":
        chunk = encode_chunk(flat, spec, parent)
        if len(chunk) < flat.size:
            out.byte(_CODED)
            out.block(chunk)
            return
    out.byte(_PLAIN)
    out.raw(flat)


def _read_array(data: Reader, spec: LeafSpec, parent: NpArray | None) -> NpArray:
    method = data.byte()
    if method == _PLAIN:
        return data.array("u1", spec.nbytes)
    if method != _CODED:
        raise CorruptDataError(f"rows: method {method} is unknown")
    out = np.empty(spec.nbytes, np.uint8)
    decode_chunk(data.block(), out, spec, parent)
    return out


def decode_rows(coded: Coded) -> list[RowsReference]:
    """Decode the stream format "rows"."""
    spec, pieces, parent = coded.spec, coded.pieces, coded.parent
    if not spec.shape or not spec.size or spec.dtype not in FLOATS:
        raise CorruptDataError(f"rows: {spec.dtype} {spec.shape} cannot be stored by rows")
    rows = spec.shape[0]
    before = parent if isinstance(parent, RowsReference) and parent.style.size == rows else None
    table = _read_styles(coded.meta, spec)
    step = max(1, CHUNK // row_length(spec))
    chunks = chunks_of("rows", pieces, rows, spec.nbytes + rows, step=step)
    parents = [None] * len(chunks) if before is None else before.split(step)

    def one(both: tuple[Chunk, RowsReference | None]) -> RowsReference:
        (piece, part), old = both
        return _read_chunk(piece, spec, table, part.stop - part.start, old)

    return [joined(map_chunks(one, zip(chunks, parents, strict=True)))]


def _read_styles(meta: dict[str, Any], spec: LeafSpec) -> tuple[Style, ...]:
    """Read the table of styles, ascending; records must be smaller than the rows themselves."""
    rows = meta.get("s")
    if not isinstance(rows, list) or not 0 < len(rows) <= MOST_STYLES:
        raise CorruptDataError("rows: no table of styles")
    table = []
    for row in rows:
        if (
            not isinstance(row, list)
            or [type(v) for v in row] not in ([str, int, int, float], [str, int, int, int])
            or not (0 <= row[3] <= 1)
        ):
            raise CorruptDataError(f"rows: {str(row)[:60]} is not a style")
        style = Style(row[0], row[1], row[2], float(row[3]))
        quantizer = (
            style.method in METHODS
            and style.bits in WIDTHS
            and 0 <= style.num_bins <= 4096
            and 0.0 <= style.ratio <= 1.0
            and (style.method == "adaptive") == (style.num_bins > 0) == (style.ratio > 0)
        )
        if style != RAW and not (quantizer and style.length(row_length(spec), spec.itemsize) < _row_bytes(spec)):
            raise CorruptDataError(f"rows: {str(row)[:60]} is not a style for rows of {_row_bytes(spec)} bytes")
        table.append(style)
    if any(a >= b for a, b in itertools.pairwise(table)):
        raise CorruptDataError("rows: the table of styles does not ascend")
    return tuple(table)


def _read_chunk(
    piece: memoryview, spec: LeafSpec, table: tuple[Style, ...], count: int, before: RowsReference | None
) -> RowsReference:
    data = Reader(piece, "rows")
    symbols = entropy.decode(data.block(), count)
    if int(symbols.max()) > len(table) or (before is None and int(symbols.min()) == 0):
        raise CorruptDataError("rows: a style is not in the table, or a row is a parent's that is not there")
    own = np.flatnonzero(symbols)
    columns = row_length(spec)
    records = []
    for symbol, style in enumerate(table, 1):
        at = np.flatnonzero(symbols == symbol)
        if not at.size:
            records.append(np.empty((0, style.length(columns, spec.itemsize)), np.uint8))
            continue
        known = None if before is None else before.take(at)
        if style == RAW:
            raw = _read_array(data, _flat(spec, at.size * columns), _parent_bytes(known, spec))
            records.append(raw.reshape(at.size, -1))
            continue
        old_numbers, old_codes = _parent_codes(known, style, columns)
        plain = _read_array(data, _flat32(at.size * style.numbers), old_numbers)
        numbers = plain.view("<f4").reshape(style.numbers, at.size)
        if not np.isfinite(numbers).all():
            raise CorruptDataError("rows: a number of a quantizer is not finite")
        codes = entropy.decode(data.block(), at.size * columns, old_codes, (1 << style.bits) + 1)
        if int(codes.max()) >> style.bits:
            raise CorruptDataError(f"rows: a code is beyond {style.bits} bits")
        record = np.empty((at.size, style.length(columns, spec.itemsize)), np.uint8)
        head = 4 * style.numbers
        record[:, :head] = np.ascontiguousarray(numbers.T).view(np.uint8).reshape(at.size, head)
        record[:, head:] = pack_codes(codes.reshape(at.size, columns), style.bits)
        records.append(record)
    data.end()
    new = RowsReference(table, (symbols[own] - np.uint8(1)).astype(np.uint8), tuple(records))
    return new if before is None else replaced(before, own, new)


def rebase_rows(
    specs: Sequence[LeafSpec], references: Sequence[Reference], parents: Parents
) -> tuple[dict[str, Any], list[bytes]]:
    """Encode a reference as a base or against another parent; return metadata and pieces."""
    (spec,), (reference,), (parent,) = specs, references, parents
    if not isinstance(reference, RowsReference):
        raise BadArgumentError(f"rows: a {type(reference).__qualname__} holds no rows")
    before = parent if isinstance(parent, RowsReference) and parent.style.size == reference.style.size else None
    return _write(spec, reference, before, "smallest")
