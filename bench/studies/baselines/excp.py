"""ExCP, and Kim and Belyaev: pruned residuals and moments, packed or coded by contexts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numba
import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from shrinkpoint.codec.errors import BadArgumentError, MissingParentError
from shrinkpoint.codec.format.fields import Reader, Writer
from shrinkpoint.codec.state.leaves import LeafSpec
from shrinkpoint.kernels.histogram import log_histogram
from shrinkpoint.kernels.kmeans import weighted_kmeans
from shrinkpoint.kernels.packing import pack_bits, unpack_bits
from shrinkpoint.kernels.quantizer import Thresholds, assign

from .parts import Bytes, Floats, Part, Parts, Saved, State, before, load, parts, save, to_float32

Mask = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.uint8]
Quantized = tuple[Floats, Codes]
"""Sorted centers, and the code of each value."""
MOST_FACTOR = 2.5
"""Largest multiple of the median that the published code prunes by; the paper does not mention it."""
_EXACT, _CODED = 0, 1
ZSTD_LEVEL = 12


@dataclass(frozen=True)
class ExCP:
    """Weight-momentum joint shrinking.

    A residual d = w - w_previous is kept where |d| > min(2.5, alpha / sqrt(mean v)) * median |d| of its tensor; moments
    m and v are kept where |m| > beta * mean |m| and the residual is. Kept values go to 2**bits - 1 centers by
    k-means, zero to a code of its own; codes are packed and compressed.

    Source: W. Li, X. Chen, H. Shu, Y. Tang, Y. Wang: ExCP: Extreme LLM Checkpoint Compression via Weight-Momentum
    Joint Shrinking, ICML 2024, arXiv 2406.11257; thresholds as in its code, github.com/Gaffey/ExCP.

    Left open: the first checkpoint, which has no residual: its weights are exact here, its moments pruned by beta
    alone. Its codebooks are float16, in which second moments vanish: float32 here. Its k-means is faiss on the
    elements, ours k-means++ and Lloyd on a histogram of relative error 1/128; 7-Zip is zstandard here. Which
    parameter an entry of the optimizer belongs to: the next one of its shape.

    Args:
        alpha, beta: of the two thresholds; defaults as published, 5e-5 and 2.
        bits: of a code, 2 to 8; default 4.

    Example:
        >>> ExCP(bits=3).bits
        3
    """

    alpha: float = 5e-5
    beta: float = 2.0
    bits: int = 4
    name: str = "ExCP"

    def encode(self, state: State, previous: State | None) -> Saved:
        """See `Baseline.encode`."""
        found, parent = parts(state), None if previous is None else parts(previous)
        pieces = {part.key: self._encode(part, codes) for part, codes in self.shrunk(found, parent)}
        return save(found, pieces, parent)

    def shrunk(self, found: Parts, parent: Parts | None) -> Iterator[tuple[Part, Quantized | None]]:
        """Yield each coded array with its centers and codes; None for an exact one."""
        for weight, first, second in paired(found):
            kept = np.ones(weight.spec.size, np.bool_)
            if parent is None:
                yield weight, None
            else:
                residual = weight.values - before(weight, parent)
                if second is not None:
                    kept = self.kept_residual(residual, second.values)
                yield weight, self.quantized(residual, kept)
            if first is not None and second is not None:
                kept = kept & self.kept_moment(first.values)
                for part in (first, second):
                    yield part, self.quantized(part.values, kept)

    def decode(self, saved: Saved, previous: State | None) -> State:
        """See `Baseline.decode`."""

        def weight(piece: Bytes, spec: LeafSpec, old: Floats | None) -> Floats:
            values = self._decode(piece, spec)
            return values if old is None else old + values

        return load(saved, previous, weight, lambda piece, spec, _: self._decode(piece, spec))

    def kept_residual(self, residual: Floats, second: Floats) -> Mask:
        """Return the mask of residuals above the median times a factor of the second moments."""
        scale = math.sqrt(float(second.mean(dtype=np.float64)))
        factor = min(MOST_FACTOR, self.alpha / scale) if scale > 0 else MOST_FACTOR
        size = np.abs(residual)
        kept: Mask = size > np.float32(factor * float(np.median(size)))
        return kept

    def kept_moment(self, first: Floats) -> Mask:
        """Return the mask of first moments that are kept because of their own size."""
        size = np.abs(first)
        kept: Mask = size > np.float32(self.beta * float(size.mean(dtype=np.float64)))
        return kept

    def quantized(self, x: Floats, kept: Mask) -> Quantized:
        """Return the sorted centers and the code of each value; code 0 stands for zero."""
        values = x[kept & (x != 0)]
        codebook = np.zeros(0, np.float32)
        if values.size:
            histogram = log_histogram(values, 6, signed=True)
            counts = histogram.counts[:-1].astype(np.float64)
            met = np.flatnonzero(counts)
            centers = weighted_kmeans(histogram.values()[met], counts[met], (1 << self.bits) - 1, method="kmeans++")
            codebook = np.unique(centers.astype(np.float32))
        codes = np.zeros(x.size, np.uint8)
        if codebook.size:
            # The kernel's levels 0 and 1 are for pruned and protected values, which do not occur here.
            codes[kept & (x != 0)] = assign(values, Thresholds(), codebook) - 1
        return codebook, codes

    def _encode(self, part: Part, quantized: Quantized | None) -> bytes:
        out, plain = Writer(), part.data.tobytes()
        out.byte(_EXACT if quantized is None else _CODED)
        if quantized is not None:
            codebook, codes = quantized
            packed = pack_bits(codes, self.bits)
            plain = bytes([codebook.size]) + codebook.tobytes() + packed.tobytes()
        out.raw(zstandard.ZstdCompressor(ZSTD_LEVEL).compress(plain))
        return out.done()

    def _decode(self, piece: Bytes, spec: LeafSpec) -> Floats:
        data = Reader(piece, "ExCP")
        kind = data.byte()
        plain = Reader(zstandard.ZstdDecompressor().decompress(data.rest()), "ExCP")
        if kind == _EXACT:
            return to_float32(np.frombuffer(plain.raw(spec.nbytes), np.uint8).copy(), spec)
        codebook = np.concatenate([np.zeros(1, np.float32), plain.array("<f4", plain.byte())])
        values: Floats = codebook[unpack_bits(np.frombuffer(plain.rest(), np.uint8), self.bits, spec.size)]
        return values


def paired(state: Parts) -> list[tuple[Part, Part | None, Part | None]]:
    """Return each coded weight with its moments, matched by shape and order.

    Where there are more weights than moments, those equal to the bit are one parameter under two names (tied).

    Raises:
        BadArgumentError: moments and weights of a shape differ in number, so that they cannot be matched.
    """
    by_shape: dict[tuple[int, ...], dict[str, list[Part]]] = defaultdict(lambda: defaultdict(list))
    for part in state.arrays:
        if part.coded:
            by_shape[part.spec.shape][part.role].append(part)
    found: list[tuple[Part, Part | None, Part | None]] = []
    for shape, roles in by_shape.items():
        weights, first, second = roles["weight"], roles["first moment"], roles["second moment"]
        numbers: dict[bytes, int] = {}
        for weight in weights:
            numbers.setdefault(weight.data.tobytes(), len(numbers))
        if not first and not second:
            found += [(weight, None, None) for weight in weights]
        elif len(weights) == len(first) == len(second):
            found += list(zip(weights, first, second, strict=True))
        elif len(numbers) == len(first) == len(second):
            places = [numbers[weight.data.tobytes()] for weight in weights]
            found += [(weight, first[i], second[i]) for weight, i in zip(weights, places, strict=True)]
        else:
            raise BadArgumentError(
                f"{len(numbers)} weights of shape {shape}, but {len(first)} first and {len(second)} second moments"
            )
    return found


# -------------------------------------------------------------------------------------------------- Kim and Belyaev

_TOP, _ONE, _RATE = 1 << 24, 1 << 12, 5
"""Least range before a shift, probability of one, and speed of adaptation of the binary models."""
_DENSITIES = 3
"""Classes of the number of neighbours that are not zero: none, up to three, more."""


@dataclass(frozen=True)
class Restored:
    """A restored state, and its codes by key, from which the next contexts are made."""

    state: State
    codes: dict[str, Codes]


@dataclass(frozen=True)
class KimBelyaev:
    """Pruned, quantized residuals and moments, coded in the context of the last codes.

    It is not a `Baseline`: its parent is a `Restored`, because a restored state alone does not have the last residuals.

    Source: Y. Kim, E. Belyaev: An Efficient Compression of Deep Neural Network Checkpoints Based on Prediction and
    Context Modeling, arXiv 2506.12000, 2025.

    Left open: the abstract was available here, not its code: pruning and quantization are ExCP's, its
    predecessor's; the context of a code is the last checkpoint's code at the same place and how many of that one's
    eight neighbours are not zero (3 classes); probabilities are adaptive counts of a binary tree, not a network's.

    Args:
        quantizer: prunes residuals and moments, and quantizes the kept ones.

    Example:
        >>> KimBelyaev().name
        'Kim and Belyaev'
    """

    quantizer: ExCP = field(default_factory=ExCP)
    name: str = "Kim and Belyaev"

    def encode(self, state: State, previous: Restored | None) -> Saved:
        """Return the bytes of a state.

        Args:
            state: the exact state.
            previous: the result of `decode` for the checkpoint before, or None for a base.
        """
        found, parent = parts(state), None if previous is None else parts(previous.state)
        pieces, known = {}, {} if previous is None else previous.codes
        for part, quantized in self.quantizer.shrunk(found, parent):
            if quantized is None:
                pieces[part.key] = b"\0" + part.data.tobytes()
            else:
                pieces[part.key] = _coded(*quantized, part.spec, known.get(part.key))
        return save(found, pieces, parent)

    def decode(self, saved: Saved, previous: Restored | None) -> Restored:
        """Return the state again, with the codes for the next one.

        Raises:
            MissingParentError: `previous` is not the one that `encode` had.
        """
        known = {} if previous is None else previous.codes
        by_bytes: list[Codes | None] = []

        def values(piece: Bytes, spec: LeafSpec, old: Floats | None) -> Floats:
            data = Reader(piece, self.name)
            if data.byte() == 0:
                by_bytes.append(None)
                return to_float32(np.frombuffer(data.raw(spec.nbytes), np.uint8).copy(), spec)
            codebook, codes = _decoded(data, spec, known)
            by_bytes.append(codes)
            found: Floats = np.concatenate([np.zeros(1, np.float32), codebook])[codes]
            return found if old is None else old + found

        state = load(saved, None if previous is None else previous.state, values, values)
        # Pieces are decoded in the order of the tree, which is that of `parts`.
        keys = [part.key for part in parts(state).arrays if part.key in _coded_keys(state)]
        codes = {key: found for key, found in zip(keys, by_bytes, strict=True) if found is not None}
        return Restored(state, codes)


def _coded_keys(state: State) -> set[str]:
    """Keys of the arrays that are coded, as `encode` chooses them."""
    return {part.key for triple in paired(parts(state)) for part in triple if part is not None}


def _coded(codebook: Floats, codes: Codes, spec: LeafSpec, last: Codes | None) -> bytes:
    context = _contexts(last, spec)
    data = np.zeros(8 * codes.size + 64, np.uint8)  # a code takes 56 bits at most
    out = Writer()
    out.byte(1)
    out.raw(np.array([0 if last is None else xxhash.xxh3_64_intdigest(last.tobytes())], "<u8"))
    out.byte(codebook.size)
    out.raw(codebook.astype("<f4"))
    out.raw(data[: _encode(codes, context, data)])
    return out.done()


def coded_size(codes: Codes, last: Codes | None, spec: LeafSpec) -> int:
    """Return the bytes of the coded codes alone, without codebook and header."""
    return _encode(codes, _contexts(last, spec), np.zeros(8 * codes.size + 64, np.uint8))


def _decoded(data: Reader, spec: LeafSpec, known: dict[str, Codes]) -> tuple[Floats, Codes]:
    digest = int(data.array("<u8", 1)[0])
    last = None
    if digest:
        last = next((c for c in known.values() if xxhash.xxh3_64_intdigest(c.tobytes()) == digest), None)
        if last is None or last.size != spec.size:
            raise MissingParentError("the previous state's codes are not those that the contexts were taken from")
    codebook: Floats = data.array("<f4", data.byte()).astype(np.float32)
    codes = np.zeros(spec.size, np.uint8)
    stream = np.frombuffer(data.rest(), np.uint8)
    _decode(stream, _contexts(last, spec), codes)
    return codebook, codes


def _contexts(last: Codes | None, spec: LeafSpec) -> npt.NDArray[np.int64]:
    """Return each element's context: its last code, and the density of the neighbouring ones."""
    if last is None:
        return np.zeros(spec.size, np.int64)
    codes = last.reshape(spec.shape[0], -1)
    some = np.pad((codes != 0).astype(np.int64), 1)
    rows, columns = codes.shape
    near = sum(
        some[1 + i : 1 + i + rows, 1 + j : 1 + j + columns] for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)
    )
    found: npt.NDArray[np.int64] = codes.astype(np.int64) * _DENSITIES + np.digitize(near, (1, 4))
    return found.reshape(-1)


@numba.njit(cache=False)
def _encode(codes: Codes, contexts: npt.NDArray[np.int64], out: Codes) -> int:
    models = np.full((256 * 3, 256), _ONE // 2, np.int64)
    low, width, size = np.uint64(0), np.uint64(0xFFFFFFFF), 0
    for i in range(codes.size):
        node = 1
        for k in range(7, -1, -1):
            bit = (codes[i] >> k) & 1
            chance = models[contexts[i], node]
            bound = (width >> np.uint64(12)) * np.uint64(chance)
            if bit == 0:
                width = bound
                models[contexts[i], node] = chance + ((_ONE - chance) >> _RATE)
            else:
                low += bound
                width -= bound
                models[contexts[i], node] = chance - (chance >> _RATE)
            if low >> np.uint64(32):
                place = size - 1
                while out[place] == 255:
                    out[place] = 0
                    place -= 1
                out[place] += 1
                low &= np.uint64(0xFFFFFFFF)
            while width < np.uint64(_TOP):
                out[size] = low >> np.uint64(24)
                size += 1
                low = (low << np.uint64(8)) & np.uint64(0xFFFFFFFF)
                width <<= np.uint64(8)
            node = 2 * node + bit
    for _ in range(4):
        out[size] = low >> np.uint64(24)
        size += 1
        low = (low << np.uint64(8)) & np.uint64(0xFFFFFFFF)
    return size


@numba.njit(cache=False)
def _decode(data: Codes, contexts: npt.NDArray[np.int64], codes: Codes) -> int:
    models = np.full((256 * 3, 256), _ONE // 2, np.int64)
    code, width, at = np.uint64(0), np.uint64(0xFFFFFFFF), 0
    for _ in range(4):
        code = (code << np.uint64(8)) | np.uint64(data[at] if at < data.size else 0)
        at += 1
    for i in range(codes.size):
        node = 1
        for _ in range(8):
            chance = models[contexts[i], node]
            bound = (width >> np.uint64(12)) * np.uint64(chance)
            if code < bound:
                width, bit = bound, 0
                models[contexts[i], node] = chance + ((_ONE - chance) >> _RATE)
            else:
                code -= bound
                width -= bound
                bit = 1
                models[contexts[i], node] = chance - (chance >> _RATE)
            while width < np.uint64(_TOP):
                code = (code << np.uint64(8)) | np.uint64(data[at] if at < data.size else 0)
                at += 1
                width <<= np.uint64(8)
            node = 2 * node + bit
        codes[i] = node & 255
    return at
