"""Kim and Belyaev: an arithmetic coder with the previous checkpoint's codes as contexts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numba
import numpy as np
import numpy.typing as npt
import xxhash

from shrinkpoint.codec.errors import MissingParentError
from shrinkpoint.codec.format.fields import Reader, Writer
from shrinkpoint.codec.state.leaves import LeafSpec

from .excp import ExCP, paired
from .parts import Bytes, Floats, Saved, State, load, parts, save, to_float32

Codes = npt.NDArray[np.uint8]
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
