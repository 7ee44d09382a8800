"""Optimizer moments or other float arrays as log buckets with a bounded relative error.

With `2**b` linear sub-buckets an octave and the midpoint as value, |x~ - x| <= 2**-(b+1) |x| <= alpha |x| for every
finite x; zero stays zero and nothing else becomes zero. A chunk is

    octave of the smallest and largest magnitude present (varints; none for a chunk of zeros),
    flags (1: signs follow, 2: values that are not finite follow),
    an `entropy` block of octave symbols (0 = zero, 1 + octave - smallest), signs and fraction bytes of the nonzero,
    positions and bit patterns of elements that are not finite.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ...kernels.backend.arguments import check_field, number, or_none
from ...kernels.backend.arrays import is_torch, on_gpu, placed_with, wide
from ...kernels.backend.floats import FORMATS, bits_for
from ...kernels.error_sums import Distortion, distortion_many
from ...kernels.histogram import bucket_index, bucket_value
from ...kernels.scales import MAX_OCTAVES, Octaves, join_octaves, split_octaves
from .. import entropy
from ..base import CHUNK, EncodedGroup, EncodedGroups, Leaf, Parents, Reference, Stored, Unplanned
from ..errors import CorruptDataError
from ..format.fields import Chunk, Reader, Writer, chunks_of
from ..groups import Coded, FilledReference, ends_of, joined_leaf, own_parts, parts
from ..lossless.exact import exactly
from ..parallel import map_chunks
from ..state.casting import largest, scaled_distortion, unit
from ..state.leaves import Array, LeafSpec, NpArray, as_bytes, on_host
from .symbolvalues import put, sent

_SIGNS, _NOT_FINITE = 1, 2
FINEST = 2.0**-17
_FINEST_BITS = round(-math.log2(FINEST)) - 1
_LEAST_ERROR = 0.7 / math.sqrt(12)
"""About the relative L2 error of one bucket an octave, of values spread evenly over their octaves' logarithms."""
_SAMPLE = 1 << 18
"""Elements from which a gain is computed."""
_GAIN_STEPS = 256
"""Gains are multiples of 1 / 256, so that no rounding of sums is seen in the bytes."""
_ATTEMPTS = 4
"""Gains that are tried."""


@dataclass(frozen=True, slots=True)
class ValuesReference(FilledReference):
    """Decoded values; no later delta is coded against them."""

    flat: Array

    def fill(self, spec: LeafSpec, out: NpArray) -> None:
        """Write the bytes of the decoded array, unless they were decoded there."""
        data = as_bytes(self.flat)
        if data.ctypes.data != out.ctypes.data:
            out[:] = data

    def values(self, spec: LeafSpec) -> Array:
        """The decoded array."""
        return self.flat


def check_alpha(codec: Any) -> None:
    """Check `alpha`, which all codecs of moments have."""
    check_field(codec, "alpha", number, FINEST, 0.5)


def check_limits(codec: Any) -> None:
    """Check `alpha` and `max_error`."""
    check_alpha(codec)
    check_field(codec, "max_error", or_none, number, 0, 1, open_low=True, open_high=True)


@dataclass(frozen=True, slots=True)
class LogBuckets(Unplanned):
    """Store floats as log buckets, with a bound for the relative error of each value.

    Args:
        alpha: largest |x~ - x| / |x|, in [2**-17, 0.5]; default 0.25. It is rounded down to a power of two.
        max_error: relative L2 error the array may have, in (0, 1): alpha is halved until it has no more, and the array
            stored exactly where 2**-17 is not enough. None (default): `Config.max_rel_error`.

    Raises:
        BadArgumentError: a value out of range.

    Example:
        >>> LogBuckets(alpha=0.01)
        LogBuckets(alpha=0.01, max_error=None)
    """

    alpha: float = 0.25
    max_error: float | None = None
    id: ClassVar[str] = "log-buckets"

    def __post_init__(self) -> None:
        check_limits(self)

    def encode(self, leaf: Leaf, parent: Reference | None, plan: None = None, *, unbiased: bool = False) -> Stored:
        """Encode one array; `error` is the largest relative error, or relative L2 with `max_error`.

        Args:
            leaf: the array.
            parent: not used.
            plan: not used.
            unbiased: whether to move the limits of the buckets, as far as `alpha` allows, so that <x~, x> = <x, x>.
                Midpoints alone are too large where smaller values are more frequent.
        """
        fmt = FORMATS[leaf.spec.dtype]
        bits = bits_for(self.alpha, fmt)
        if self.max_error is None:
            return self._at(bits, leaf, parent, unbiased=unbiased)[0]
        # One more bit halves the error, so the number of bits follows from the error of the first attempt.
        bits = max(bits, math.ceil(math.log2(_LEAST_ERROR) - math.log2(self.max_error)))
        scale = unit(largest(leaf.flat)) if leaf.spec.dtype == "float64" else 1.0
        while bits <= min(_FINEST_BITS, fmt.mantissa):
            stored, met = self._at(bits, leaf, parent, scale, unbiased=unbiased)
            if stored.measure == "exact":
                return stored
            if met <= self.max_error:
                return dataclasses.replace(stored, error=met, measure="relative L2")
            bits += max(1, math.floor(math.log2(met) - math.log2(self.max_error)))
        return exactly(leaf, parent, f"log buckets miss the error target {self.max_error:g}")

    def groups(self, leaf: Leaf) -> Hashable | None:
        """Return True if arrays can be coded together: without an error target for each."""
        return True if self.max_error is None else None

    def encode_group(self, leaves: Sequence[Leaf], parents: Parents, plans: Sequence[None]) -> EncodedGroups:
        """Encode arrays of one dtype together."""
        specs, leaf = [leaf.spec for leaf in leaves], joined_leaf(leaves)
        stored = self.encode(leaf, None)
        if stored.stream != "log-buckets" or stored.decoded is None:
            return EncodedGroups(alone=dict.fromkeys(range(len(specs))))
        values = stored.decoded()
        errors = distortion_many(leaf.flat, values, ends_of(specs))
        found = [
            dataclasses.replace(stored, pieces=(), error=met.largest_relative, decoded=partial(given, own))
            for met, own in zip(errors, parts(values, specs), strict=True)
        ]
        group = EncodedGroup(range(len(specs)), stored.stream, stored.meta, stored.pieces, False, found)
        return EncodedGroups([group])

    def _at(
        self, bits: int, leaf: Leaf, parent: Reference | None, scale: float = 1.0, *, unbiased: bool = False
    ) -> tuple[Stored, float]:
        """Encode with `2**bits` buckets per octave; also return the relative L2 error."""
        fmt = FORMATS[leaf.spec.dtype]
        gain = _gain(leaf, bits) if unbiased else 1.0
        alone = leaf.spec.size <= CHUNK

        def one(start: int) -> tuple[bytes, Distortion, Array | None] | None:
            x = leaf.flat[start : start + CHUNK]
            index = bucket_index(x if gain == 1 else x * (1 / gain), bits)
            octaves = split_octaves(index, bits, fmt.buckets(bits))
            if octaves is None:
                return None
            values = bucket_value(index, bits, leaf.spec.dtype)
            met = scaled_distortion(x, values, scale)
            if octaves.odd.size:
                values[octaves.odd] = x[octaves.odd]
            return _encode_chunk(octaves, x), met, values if alone else None

        coded = map_chunks(one, range(0, leaf.spec.size, CHUNK))
        done = [chunk for chunk in coded if chunk is not None]
        if len(done) < len(coded):
            return exactly(leaf, parent, f"magnitudes span more than {MAX_OCTAVES} octaves"), 0.0
        pieces = [piece for piece, _, _ in done]
        met = sum((d for _, d, _ in done), Distortion(0.0, 0.0, 0.0))
        # The first moment needs the decoded values of its second moment, which are available here.
        decoded = (lambda: done[0][2]) if alone and done else None
        stored = Stored("log-buckets", {"b": bits}, pieces, None, met.largest_relative, "relative", decoded=decoded)
        return stored, met.relative_l2


def given(values: Array) -> Array:
    """Return values, for `Stored.decoded`."""
    return values


def _gain(leaf: Leaf, bits: int) -> float:
    """Return the factor of the limits that makes <x~, x> = <x, x>, where `alpha` allows it."""
    x = leaf.flat[:: max(1, leaf.spec.size // _SAMPLE)]
    x = x.contiguous() if is_torch(x) else np.ascontiguousarray(x)
    host = on_host(wide(x))
    finite = np.isfinite(host)
    top = np.abs(host[finite]).max(initial=0.0)
    if not top:
        return 1.0
    scaled = host[finite] / top
    width = 2.0**-bits
    most = max(1.0, (1 + width / 2) / ((1 + width) * (1 - width / 2)) * (1 - 1 / _GAIN_STEPS))
    gain, found, least = 1.0, 1.0, math.inf
    for _ in range(_ATTEMPTS):
        values = bucket_value(bucket_index(x if gain == 1 else x * (1 / gain), bits), bits, leaf.spec.dtype)
        with np.errstate(over="ignore"):
            ratio = float((on_host(wide(values))[finite] / top * scaled).sum() / (scaled * scaled).sum())
        if abs(ratio - 1) < least:
            found, least = gain, abs(ratio - 1)
        wanted = math.floor(_GAIN_STEPS * min(max(gain * ratio, 1.0), most)) / _GAIN_STEPS
        if not math.isfinite(ratio) or wanted == gain:
            break
        gain = wanted
    return found


def _encode_chunk(octaves: Octaves, x: Array) -> bytes:
    out = Writer()
    out.varint(octaves.low, octaves.high)
    signs = bool(octaves.negative.any())
    out.byte(_SIGNS * signs | _NOT_FINITE * bool(octaves.odd.size))
    out.block(entropy.encode(octaves.symbols))
    if signs:
        out.block(entropy.encode(octaves.negative))
    out.block(*map(entropy.encode, octaves.fraction))
    if octaves.odd.size:
        out.varint(octaves.odd.size)
        out.raw(octaves.odd.astype("<u4"), as_bytes(x[octaves.odd]))
    return out.done()


def decode_log_buckets(coded: Coded) -> list[ValuesReference]:
    """Decode the stream format "log-buckets"."""
    spec, pieces = coded.spec, coded.pieces
    if spec.dtype not in FORMATS:
        raise CorruptDataError(f"log buckets: dtype {spec.dtype} cannot be stored in log buckets")
    fmt = FORMATS[spec.dtype]
    bits = coded.meta.get("b")
    if type(bits) is not int or not 0 <= bits <= min(16, fmt.mantissa):
        raise CorruptDataError(f"log buckets: {bits!r} bits out of range")
    chunks = chunks_of("log buckets", pieces, spec.nbytes, spec.nbytes, step=CHUNK * spec.itemsize)
    data = coded.room()

    def one(chunk: Chunk) -> None:
        piece, part = chunk
        start, end = part.start // spec.itemsize, part.stop // spec.itemsize
        _decode_chunk(piece, data, start, end - start, spec, fmt.octaves, bits)

    map_chunks(one, chunks)
    return [ValuesReference(flat) for flat in own_parts(data, coded.specs)]


def _decode_chunk(piece: memoryview, room: Array, start: int, n: int, spec: LeafSpec, octaves: int, bits: int) -> None:
    """Write the n values of a chunk to memory, from element `start` on."""
    data = Reader(piece, "log buckets")
    low, high, flags = data.varint(), data.varint(), data.byte()
    if not low <= high < octaves or high - low >= MAX_OCTAVES or flags > 3:
        raise CorruptDataError(f"log buckets: octaves {low} to {high}, flags {flags} out of range")
    symbols = entropy.decode(data.block(), n)
    if symbols.size and int(symbols.max()) > high - low + 1:
        raise CorruptDataError("log buckets: an octave is out of range")
    count = int(np.count_nonzero(symbols))
    negative = entropy.decode(data.block(), count) if flags & _SIGNS else np.zeros(count, np.uint8)
    fraction = np.empty(((bits + 7) // 8, count), np.uint8)
    for plane in fraction:
        plane[:] = entropy.decode(data.block(), count)
    if bits % 8 and count and int(fraction[-1].max()) >= 1 << bits % 8:
        raise CorruptDataError("log buckets: a fraction is out of range")
    planes = sent(fraction.reshape(-1), min(bits, 8), room).reshape(fraction.shape)
    streams = sent(symbols, 8, room), sent(negative, 1, room), planes
    index = join_octaves(Octaves(low, high, *streams, np.empty(0, np.int64)), bits, octaves << bits)
    is_torch_here = spec.library == "torch" and not on_gpu(index)
    put(room, start, _torch_values(index, bits, spec) if is_torch_here else bucket_value(index, bits, spec.dtype))
    if flags & _NOT_FINITE:
        odd = data.varint()
        if odd > n:
            raise CorruptDataError("log buckets: more values that are not finite than values")
        at = data.array("<u4", odd)
        if odd and int(at.max()) >= n:
            raise CorruptDataError("log buckets: a position is out of range")
        patterns = data.array(f"u{spec.itemsize}", odd)
        values = room[start : start + n] if on_gpu(room) else room.view(patterns.dtype)[start : start + n]
        known = placed_with(patterns.view(np.uint8), room).view(values.dtype)
        values[placed_with(at.astype(np.int64), room)] = known
    data.end()


def _torch_values(index: NpArray, bits: int, spec: LeafSpec) -> Array:
    import torch

    return bucket_value(torch.from_numpy(index), bits, spec.dtype)
