"""ExCP: residuals of weights and Adam's moments, pruned jointly, quantized by k-means."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from shrinkpoint.codec.errors import BadArgumentError
from shrinkpoint.codec.format.fields import Reader, Writer
from shrinkpoint.codec.state.leaves import LeafSpec
from shrinkpoint.kernels.histogram import log_histogram
from shrinkpoint.kernels.kmeans import weighted_kmeans
from shrinkpoint.kernels.packing import pack_bits, unpack_bits
from shrinkpoint.kernels.quantizer import Thresholds, assign

from .parts import Bytes, Floats, Part, Parts, Saved, State, before, load, parts, save, to_float32

Mask = npt.NDArray[np.bool_]
Quantized = tuple[Floats, npt.NDArray[np.uint8]]
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
