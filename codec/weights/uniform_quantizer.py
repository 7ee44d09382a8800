"""Weights as whole multiples of a step, for error targets beyond codebooks of 254 entries.

The high bytes of a multiple are a coarse level, its low byte the residual inside it: a second level of codebook, with
entries as many as the target needs. Both are coded as exact integers are, a delta as differences to the parent's.

    x~ = i step,  i = round(x / step),  error <= step / 2 an element, step / sqrt(12) on average

so a relative L2 target e allows step = e sqrt(12 mean(x**2)). A parent's step is kept if it is only a little finer.

Pieces: those of the exact stream for integers of `w` bytes, i + 2**(8 w - 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kernels.backend.arrays import narrow_to_numpy, on_gpu, placed_with
from ...kernels.error_sums import Distortion, distortion
from ...kernels.multiples import square_sum, step_multiples, step_values
from ..base import CHUNK, Leaf, Parents, Reference, Stored
from ..errors import BadArgumentError, CorruptDataError
from ..format.fields import Writer
from ..groups import BytesReference, Coded, FilledReference
from ..lossless.exact import decode_bytes, pieces_of
from ..parallel import map_chunks
from ..state.leaves import Array, LeafSpec, NpArray, as_bytes, check_memory

MULTIPLES_OF = ("float32", "float64")
"""Dtypes that this stream stores."""
_WIDTHS = (2, 4)
_FRESH, _OLD, _FINEST = 0.93, 0.99, 0.7
"""Shares of the step that would do: a new one, so that it lasts; the most and the least at which a parent's stays."""


@dataclass(frozen=True, slots=True)
class MultiplesReference(FilledReference):
    """Reference of an array as multiples, two or four bytes an element, unsigned by a bias."""

    numbers: NpArray
    step: float

    def chunk(self, start: int, dtype: str) -> NpArray:
        """Return the decoded elements of the chunk at `start`."""
        values: NpArray = step_values(_signed(self.numbers[start : start + CHUNK]), self.step, dtype)
        return values

    def fill(self, spec: LeafSpec, out: NpArray) -> None:
        """Write the bytes of the decoded array."""
        data = out.view(f"<{_letter(spec)}")

        def one(start: int) -> None:
            data[start : start + CHUNK] = self.chunk(start, spec.dtype)

        map_chunks(one, range(0, spec.size, CHUNK))

    def fill_there(self, spec: LeafSpec, out: Array) -> None:
        """Scale the multiples into a flat tensor on a GPU, where they are sent."""
        for start in range(0, spec.size, CHUNK):
            part = placed_with(_signed(self.numbers[start : start + CHUNK]), out)
            out[start : start + CHUNK] = step_values(part, self.step, spec.dtype)


def _letter(spec: LeafSpec) -> str:
    return f"f{spec.itemsize}"


def _bias(width: int) -> int:
    return 1 << (8 * width - 1)


def _signed(numbers: NpArray) -> NpArray:
    """Return stored numbers as multiples."""
    signed: NpArray = (numbers ^ numbers.dtype.type(_bias(numbers.itemsize))).view(f"<i{numbers.itemsize}")
    return signed


def _integers(spec: LeafSpec, width: int) -> LeafSpec:
    return LeafSpec("numpy", f"uint{8 * width}", spec.shape)


def store_multiples(leaf: Leaf, parent: Reference | None, target: float) -> Stored | None:
    """Store an array with relative L2 error <= `target`; None if multiples cannot reach it.

    Args:
        leaf: the array.
        parent: reference for a delta, used if it is of this stream.
        target: in (0, 1).
    """
    if leaf.spec.dtype not in MULTIPLES_OF:
        return None
    x = leaf.flat if on_gpu(leaf.flat) else as_bytes(leaf.flat).view(f"<{_letter(leaf.spec)}")
    n, starts = leaf.spec.size, range(0, leaf.spec.size, CHUNK)
    sums = map_chunks(lambda s: square_sum(x[s : s + CHUNK]), starts)
    squares, most = math.fsum(own for own, _ in sums), max((own for _, own in sums), default=0.0)
    wanted = target * math.sqrt(12 * squares / max(1, n))
    before = parent if isinstance(parent, MultiplesReference) and parent.numbers.size == n else None
    if before is not None and not _FINEST * wanted <= before.step <= _OLD * wanted:
        before = None
    step = _FRESH * wanted if before is None else before.step
    # Neither infinite nor so small that squares of errors underflow; sums that overflow end here, too.
    if not 1e-140 < step < 1e290 or not most / step < _bias(_WIDTHS[-1]) - 1:
        return None
    width = next(w for w in _WIDTHS if most / step < _bias(w) - 1)
    width = width if before is None else max(width, before.numbers.itemsize)
    numbers = np.empty(n, f"<u{width}")

    def one(start: int) -> Distortion:
        part = x[start : start + CHUNK]
        multiples = step_multiples(part, step, f"int{8 * width}")
        numbers[start : start + CHUNK] = narrow_to_numpy(multiples).view(numbers.dtype) ^ numbers.dtype.type(
            _bias(width)
        )
        return distortion(part, step_values(multiples, step, leaf.spec.dtype))

    met = sum(map_chunks(one, starts), Distortion(0.0, 0.0, 0.0))
    if met.relative_l2 > target:
        return None
    reference = MultiplesReference(numbers, step)
    meta, pieces = rebase_multiples((leaf.spec,), (reference,), (parent,))
    return Stored("multiples", meta, pieces, reference, met.relative_l2, "relative L2", f"multiples of {step:.3g}")


def rebase_multiples(
    specs: Sequence[LeafSpec], references: Sequence[Reference], parents: Parents
) -> tuple[dict[str, Any], list[Writer]]:
    """Encode the same multiples as a base or against another parent."""
    (spec,), (reference,), (parent,) = specs, references, parents
    if not isinstance(reference, MultiplesReference):
        raise BadArgumentError("multiples: the reference of another stream cannot be rebased")
    width = reference.numbers.itemsize
    before = _comparable(parent, reference.step, width, spec.size)
    meta = {"s": reference.step, "w": width}
    return meta, pieces_of(reference.numbers.view(np.uint8), _integers(spec, width), before)


def _comparable(parent: Reference | None, step: float, width: int, size: int) -> BytesReference | None:
    """Return the parent's multiples in this width if their step is the same, else None."""
    if not isinstance(parent, MultiplesReference) or parent.step != step or parent.numbers.size != size:
        return None
    own = parent.numbers.itemsize
    if own > width:
        return None
    numbers = parent.numbers
    if own < width:
        numbers = (numbers.astype(np.int64) + (_bias(width) - _bias(own))).astype(f"<u{width}")
    return BytesReference(numbers.view(np.uint8))


def decode_multiples(coded: Coded) -> list[MultiplesReference]:
    """Decode the stream format "multiples"."""
    spec, step, width = coded.spec, coded.meta.get("s"), coded.meta.get("w")
    if spec.dtype not in MULTIPLES_OF or type(step) is not float or not 0 < step < math.inf or width not in _WIDTHS:
        raise CorruptDataError(f"multiples: {width!r} bytes of a step of {step!r} for {spec.dtype}")
    check_memory(spec.size * width, "multiples")
    before = _comparable(coded.parent, step, width, spec.size)
    (numbers,) = decode_bytes(Coded((_integers(spec, width),), {}, coded.pieces, (before,)))
    return [MultiplesReference(numbers.data.view(f"<u{width}"), step)]
