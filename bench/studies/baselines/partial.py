"""SCAR and TOPN: a checkpoint updates some parameters and leaves the others unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shrinkpoint.codec.errors import BadArgumentError
from shrinkpoint.codec.format.fields import Reader, Writer
from shrinkpoint.codec.state.leaves import LeafSpec

from .parts import Bytes, Floats, Part, Parts, Saved, State, before, each, load, parts, save, to_float32

_FULL, _UPDATE = 0, 1
Places = npt.NDArray[np.int64]
COLUMNS = 4096
"""Of a sparse row: an array is cut into rows of so many elements, for any shape."""


@dataclass(frozen=True)
class Scar:
    """Partial checkpoints of equal partitions of the parameters, one after the other.

    Source: A. Qiao, B. Aragam, B. Zhang, E. Xing: Fault Tolerance in Iterative-Convergent Machine Learning, ICML
    2019, arXiv 1810.07354 (LC-Checkpoint's Qiao et al. 2018b), as LC-Checkpoint, section 4.1, describes it.

    Left open: how parameters are partitioned: into stretches of equal length over all weights here. Which partition
    is next follows from the step and the distance to the previous one, so that encoding stays pure. Its choice of
    the partition by priority is not in LC-Checkpoint's comparison. Optimizer states are not its subject: exact
    here.

    Args:
        share: bytes of an update over those of all weights, above 0 and up to 1; ceil(1 / share) partitions.

    Example:
        >>> Scar(0.05).partitions
        20
    """

    share: float = 0.05
    name: str = "SCAR"

    @property
    def partitions(self) -> int:
        """Number of partitions."""
        return int(np.ceil(1.0 / self.share - 1e-9))

    def encode(self, state: State, previous: State | None) -> Saved:
        """See `Baseline.encode`.

        Raises:
            BadArgumentError: a state without a later step than the previous one's.
        """
        if previous is None:
            return _full(parts(state))
        found, parent = parts(state), parts(previous)
        weights = found.of("weight")
        total = sum(part.spec.size for part in weights)
        number = _number(state, previous) % self.partitions
        places = partition(total, self.partitions, number)
        start, pieces = 0, {}
        for part in weights:
            before(part, parent)
            first, last = (min(max(place - start, 0), part.spec.size) for place in (places.start, places.stop))
            out = Writer()
            out.byte(_UPDATE)
            out.varint(first)
            out.raw(part.values[first:last].astype("<f4"))
            pieces[part.key] = out.done()
            start += part.spec.size
        return save(found, pieces, parent)

    def decode(self, saved: Saved, previous: State | None) -> State:
        """See `Baseline.decode`."""
        return load(saved, previous, _decode_stretch)


@dataclass(frozen=True)
class TopN:
    """Partial checkpoints of the parameters furthest from the last one, in sparse rows.

    Source: Y. Chen, Z. Liu, B. Ren, X. Jin: On Efficient Constructions of Checkpoints, ICML 2020, arXiv 2009.13003,
    sections 2 and 4.1.

    Left open: the width of CSR's numbers (four bytes here, as in scipy, for columns, row starts and values), what a
    row is (4096 elements here: the rows of a thin matrix would take more than the update may), and whether the
    largest are taken over a layer or the model (the model here). 'Previous iteration' is the restored state, as for
    LC-Checkpoint itself. Optimizer states are not its subject: exact here.

    Args:
        share: bytes of an update over those of all weights, above 0 and up to 1.

    Example:
        >>> TopN(0.1).share
        0.1
    """

    share: float = 0.05
    name: str = "TOPN"

    def encode(self, state: State, previous: State | None) -> Saved:
        """See `Baseline.encode`."""
        if previous is None:
            return _full(parts(state))
        found, parent = parts(state), parts(previous)
        weights = found.of("weight")
        count = affordable([part.spec.size for part in weights], self.share)
        distance = [np.abs(part.values - before(part, parent)) for part in weights]
        chosen = largest(np.concatenate(distance) if distance else np.zeros(0, np.float32), count)
        ends = np.cumsum([part.spec.size for part in weights])
        cuts = np.split(chosen, np.searchsorted(chosen, ends)[:-1]) if weights else []
        mine = {
            part.key: places - (end - part.spec.size) for part, places, end in zip(weights, cuts, ends, strict=True)
        }
        return save(found, each(weights, lambda part: _sparse_rows(part, mine[part.key])), parent)

    def decode(self, saved: Saved, previous: State | None) -> State:
        """See `Baseline.decode`."""
        return load(saved, previous, _decode_sparse)


def partition(total: int, partitions: int, number: int) -> range:
    """Return the elements of a partition of `total` in stretches of equal length.

    Example:
        >>> partition(10, 3, 1)
        range(3, 6)
    """
    return range(total * number // partitions, total * (number + 1) // partitions)


def affordable(sizes: Sequence[int], share: float) -> int:
    """Return the elements of an update: (share * 4 n - 4 row starts) / 8.

    Example:
        >>> affordable([4096, 4096], 0.1)
        407
    """
    total, starts = sum(sizes), sum(-(-size // COLUMNS) + 1 for size in sizes)
    return int(np.clip((share * 4 * total - 4 * starts) / 8, 0, total))


def largest(distance: Floats, count: int) -> Places:
    """Positions of the `count` largest values, ascending.

    Example:
        >>> largest(np.array([1.0, 3.0, 2.0], np.float32), 2).tolist()
        [1, 2]
    """
    if count in (0, distance.size):
        return np.arange(count)
    found: Places = np.sort(np.argpartition(distance, distance.size - count)[distance.size - count :])
    return found


def _number(state: State, previous: State) -> int:
    """Number of a state in an evenly spaced chain of checkpoints."""
    step, earlier = state.get("step"), previous.get("step")
    if type(step) is not int or type(earlier) is not int or not step > earlier:
        raise BadArgumentError(f"step is {step!r}, previous step {earlier!r}; integers, the second smaller, are needed")
    return step // (step - earlier)


def _full(found: Parts) -> Saved:
    """Store every weight exactly."""
    return save(found, each(found.of("weight"), lambda part: bytes([_FULL]) + part.data.tobytes()))


def _whole(data: Reader, spec: LeafSpec) -> Floats:
    return to_float32(np.frombuffer(data.rest(), np.uint8).copy(), spec)


def _decode_stretch(piece: Bytes, spec: LeafSpec, old: Floats | None) -> Floats:
    data = Reader(piece, "SCAR")
    if data.byte() == _FULL or old is None:
        return _whole(data, spec)
    values, start = old.copy(), data.varint()
    new = np.frombuffer(data.rest(), "<f4")
    values[start : start + new.size] = new
    return values


def _sparse_rows(part: Part, places: Places) -> bytes:
    """Starts of rows, columns and values of some elements."""
    starts = np.searchsorted(places, np.arange(0, part.spec.size + COLUMNS, COLUMNS))
    out = Writer()
    out.byte(_UPDATE)
    out.raw(starts.astype("<i4"))
    out.raw((places % COLUMNS).astype("<i4"))
    out.raw(part.values[places].astype("<f4"))
    return out.done()


def _decode_sparse(piece: Bytes, spec: LeafSpec, old: Floats | None) -> Floats:
    data = Reader(piece, "TOPN")
    if data.byte() == _FULL or old is None:
        return _whole(data, spec)
    rows = -(-spec.size // COLUMNS)
    counts = np.diff(data.array("<i4", rows + 1).astype(np.int64))
    total = int(counts.sum())
    places = np.repeat(np.arange(rows) * COLUMNS, counts) + data.array("<i4", total)
    values = old.copy()
    values[places] = data.array("<f4", total)
    return values
