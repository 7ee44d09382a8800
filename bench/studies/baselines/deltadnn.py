"""Delta-DNN: differences to the previous weights in even steps of an error bound."""

from __future__ import annotations

import lzma
import math
from dataclasses import dataclass

import numpy as np

from shrinkpoint.codec.errors import BadArgumentError, CorruptDataError
from shrinkpoint.codec.format.fields import Reader, Writer
from shrinkpoint.codec.state.leaves import LeafSpec

from .base import Saved, State
from .parts import Bytes, Floats, Part, Parts, before, each, load, parts, save, to_float32

_FORMATS = ("i1", "<i2", "<i4")
"""Of the integers, by the first byte of a piece; 3 is an exact array."""
_EXACT = len(_FORMATS)


@dataclass(frozen=True)
class DeltaDNN:
    """Error-bounded differences: k = floor(d / (2 log(1 + bound)) + 1/2).

    Args:
        bound: error bound, above 0; default 1e-3.
        preset: of LZMA, 0 to 9.

    Raises:
        BadArgumentError: the bound is not positive and finite.

    Example:
        >>> round(DeltaDNN(1e-2).step, 4)
        0.0199
    """

    bound: float = 1e-3
    preset: int = 6
    name: str = "Delta-DNN"
    source: str = (
        "Z. Hu, X. Zou, W. Xia, S. Jin, D. Tao, Y. Liu, W. Zhang, Z. Zhang: Delta-DNN: Efficiently Compressing Deep "
        "Neural Networks via Exploiting Floats Similarity, ICPP 2020"
    )
    left_open: str = (
        "its bound is searched by the loss of test accuracy, between 1e-5 and 1e-1: fixed here, to be searched by the "
        "caller. The first checkpoint has no difference: exact here. LZMA is one of its two compressors, at a level it "
        "does not name. Optimizer states are not its subject: exact here"
    )

    def __post_init__(self) -> None:
        if not (0.0 < self.bound < math.inf):
            raise BadArgumentError(f"bound is {self.bound}; it must be above 0 and finite")

    @property
    def step(self) -> float:
        """Distance of two values of a difference."""
        return 2.0 * math.log1p(self.bound)

    def encode(self, state: State, previous: State | None) -> Saved:
        """See `Baseline.encode`."""
        found, parent = parts(state), None if previous is None else parts(previous)
        return save(found, each(found.of("weight"), lambda part: self._encode(part, parent)), {}, parent)

    def decode(self, saved: Saved, previous: State | None) -> State:
        """See `Baseline.decode`."""
        return load(saved, previous, self._decode)

    def _encode(self, part: Part, parent: Parts | None) -> bytes:
        out = Writer()
        if parent is not None:
            steps = np.floor((part.values.astype(np.float64) - before(part, parent)) / self.step + 0.5)
            largest = float(np.abs(steps).max())
            for number, name in enumerate(_FORMATS):
                if largest <= np.iinfo(name).max:
                    out.byte(number)
                    out.raw(lzma.compress(steps.astype(name).tobytes(), preset=self.preset))
                    return out.done()
        out.byte(_EXACT)
        out.raw(lzma.compress(part.data.tobytes(), preset=self.preset))
        return out.done()

    def _decode(self, piece: Bytes, spec: LeafSpec, old: Floats | None) -> Floats:
        data = Reader(piece, "Delta-DNN")
        kind = data.byte()
        try:
            plain = lzma.decompress(data.rest())
        except lzma.LZMAError as error:
            raise CorruptDataError(f"Delta-DNN: {error}") from None
        if kind == _EXACT:
            if len(plain) != spec.nbytes:
                raise CorruptDataError(f"Delta-DNN: {len(plain)} bytes for an array of {spec.nbytes}")
            return to_float32(np.frombuffer(plain, np.uint8).copy(), spec)
        if kind > _EXACT or old is None or len(plain) != spec.size * np.dtype(_FORMATS[kind]).itemsize:
            raise CorruptDataError(f"Delta-DNN: {len(plain)} bytes of kind {kind} for {spec.size} differences")
        restored: Floats = (old + np.frombuffer(plain, _FORMATS[kind]) * self.step).astype(np.float32)
        return restored
