"""Exact sparse deltas: the changed elements and their changes, found in one pass.

A changed element is coded by its rank among the elements of its class. A class is a range of magnitudes of the
*previous* array, which the reader has. A training step changes small and large weights by similar amounts, so small
weights change by more units in the last place, and more often. Within a class the changes are spread evenly, and the
distances between them take little more than their entropy.

    collect_changes  compares two arrays and collects the changes: classes, ranks, differences
    split_changes    splits them into symbols for an entropy coder and bits that are noise
    join_changes     the inverse
    apply_changes    changes an array, in place or into another one
    locate_changes   returns the positions and new values only, checks every rank and writes nothing

Source: BitSnap, section 3.3 (sparse changes of 16-bit weights); the geometric gaps are Golomb's (1966).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ..backend.arguments import array, check_arrays, choice, integer, same_device, sequence, stored_bytes
from ..backend.arrays import Array, dtype_name
from ..backend.dispatch import Dispatch, OnHost
from ..errors import BadArgumentError, CorruptDataError
from ..planes import VALUE_WIDTHS as LARGE
from ..planes import Method, check_alike, ordered_by_sign, width_of


class BackEnd(Protocol):
    """Functions that every back end of this subject has."""

    def collect_changes(
        self, current: Array, previous: Array, edges: tuple[int, ...], limit: int, copy_to: Array | None, dtype: str
    ) -> SparseDelta | None: ...
    def collect_and_locate(
        self, current: Array, previous: Array, edges: tuple[int, ...], limit: int, dtype: str
    ) -> tuple[SparseDelta, Array, Array] | None: ...
    def locate_changes(
        self, previous: Array, delta: SparseDelta, edges: tuple[int, ...], method: str, dtype: str
    ) -> tuple[Array, Array]: ...
    def apply_changes(
        self, previous: Array, delta: SparseDelta, edges: tuple[int, ...], method: str, out: Array | None, dtype: str
    ) -> Array: ...


class HostBackEnd(Protocol):
    """Functions that only the back ends on the host have."""

    def split_changes(self, delta: SparseDelta, shifts: Any) -> tuple[Array, Array, Array]: ...
    def join_changes(
        self, counts: Any, shifts: Any, n: int, symbols: Array, extra: Array, large: Array
    ) -> SparseDelta: ...


back_end = Dispatch[BackEnd]("sparse_delta")
on_host = OnHost[HostBackEnd]("sparse_delta")

if TYPE_CHECKING:
    from . import cpu, gpu, reference

    _EVERYWHERE: tuple[BackEnd, ...] = (reference, cpu, gpu)
    _ON_HOST: tuple[HostBackEnd, ...] = (reference, cpu)

MOST_EDGES = 7
"""Largest number of edges between classes, for eight classes."""
GAP_BITS = 25
"""Gaps of `split_changes` are below `2**GAP_BITS`, so that a gap's category and a small change fit one byte."""
SMALL = 4
"""Changes 1 ... SMALL are part of a symbol; a larger change is stored as a separate number."""
SYMBOLS = ((GAP_BITS - 2 << 1) + 4) * (SMALL + 1)
"""Symbols of `split_changes` are below this: category of the gap times `SMALL + 1`, plus the change."""


class SparseDelta(NamedTuple):
    """The changes between two arrays, class by class, ascending within a class.

    Args:
        counts: NumPy int64 [classes], number of changes in each class.
        ranks: int64 [m], for each change the number of elements of its class before it.
        changes: unsigned [m], as wide as the arrays' elements: differences as `planes.difference` gives them, never 0.
    """

    counts: Any
    ranks: Array
    changes: Array


def collect_changes(
    current: Array,
    previous: Array,
    edges: Sequence[int] = (),
    *,
    limit: int | None = None,
    copy_to: Array | None = None,
    dtype: str | None = None,
) -> SparseDelta | None:
    """Collect the changes from `previous` to `current`.

    Patterns are compared, so 0.0 and -0.0 differ and a NaN equals itself. Class c holds the elements whose previous
    pattern without its sign is at least `edges[c - 1]` and below `edges[c]`.

    Args:
        current: array of any shape, taken in C order; any dtype in `planes.WIDTHS`.
        previous: the same shape and dtype.
        edges: at most 7 patterns without sign, ascending, of a float dtype; default (): one class, where a rank is the
            position.
        limit: largest number of changes to collect; default: no limit.
        copy_to: flat contiguous array of the same dtype and size, which receives `current` in the same pass. The
            changes are those of this copy, even if `current` is written at the same time. Without changes it is not
            written. Default: no copy.
        dtype: dtype of the values, if the arrays hold patterns; see `planes.difference`. Default: that of `previous`.

    Returns:
        The changes; None if there are more than `limit`, in which case `copy_to` is filled too.

    Raises:
        BadArgumentError: shapes, dtypes or devices differ; edges out of order or range.

    Example:
        >>> import numpy as np
        >>> before = np.asarray([1.0, 8.0, -2.0, 9.0], np.float32)
        >>> after = np.asarray([1.0, 8.5, -2.0, 9.5], np.float32)
        >>> found = collect_changes(after, before, edges=[int(np.float32(4).view(np.uint32))])
        >>> found.counts.tolist(), found.ranks.tolist()  # 8.0 and 9.0 are elements 0 and 1 of the class from 4 on
        ([0, 2], [0, 1])
        >>> apply_changes(before, found, edges=[int(np.float32(4).view(np.uint32))]).tolist()
        [1.0, 8.5, -2.0, 9.5]
    """
    name, checked, most = _pair(current, previous, edges, limit, dtype)
    if copy_to is not None:
        _out(copy_to, current, "copy_to")
    return back_end(current).collect_changes(current, previous, checked, most, copy_to, name)


def collect_and_locate(
    current: Array,
    previous: Array,
    edges: Sequence[int] = (),
    *,
    limit: int | None = None,
    dtype: str | None = None,
) -> tuple[SparseDelta, Array, Array] | None:
    """Do the work of `collect_changes` and `locate_changes` in one pass on the CPU.

    Args:
        current: as for `collect_changes`.
        previous: the same.
        edges: the same.
        limit: the same.
        dtype: the same.

    Returns:
        (the changes, int64 [m] positions, ascending, [m] values of the dtype of `previous`), of the same state of
        `current` even if it is written meanwhile; None where there are more than `limit`.

    Raises:
        BadArgumentError: as `collect_changes`.

    Example:
        >>> import numpy as np
        >>> before, after = np.asarray([3, 4, 5], np.uint8), np.asarray([3, 9, 5], np.uint8)
        >>> delta, positions, values = collect_and_locate(after, before)
        >>> delta.changes.tolist(), positions.tolist(), values.tolist()
        ([10], [1], [9])
    """
    name, checked, most = _pair(current, previous, edges, limit, dtype)
    return back_end(current).collect_and_locate(current, previous, checked, most, name)


def locate_changes(
    previous: Array,
    delta: SparseDelta,
    edges: Sequence[int] = (),
    *,
    method: Method = "arithmetic",
    dtype: str | None = None,
) -> tuple[Array, Array]:
    """Return the positions of the changes and the new values, and write nothing.

    Args:
        previous: as given to `collect_changes`.
        delta: its result.
        edges: the same.
        method: of the changes, "arithmetic" (default) or "xor", as in `planes.difference`; those of `collect_changes`
            are arithmetic.
        dtype: the same.

    Returns:
        (int64 [m] positions, ascending; [m] values of the dtype of `previous`).

    Raises:
        BadArgumentError: wrong dtypes, shapes or devices.
        CorruptDataError: ranks that do not ascend, or beyond the last element of their class.

    Example:
        >>> import numpy as np
        >>> before = np.asarray([3, 4, 5], np.uint8)
        >>> positions, values = locate_changes(before, collect_changes(np.asarray([3, 9, 5], np.uint8), before))
        >>> positions.tolist(), values.tolist()
        ([1], [9])
    """
    name = _pattern_dtype(dtype, previous)
    checked = _delta(previous, delta, edges, method, name)
    return back_end(previous).locate_changes(previous, delta, checked, method, name)


def apply_changes(
    previous: Array,
    delta: SparseDelta,
    edges: Sequence[int] = (),
    *,
    method: Method = "arithmetic",
    out: Array | None = None,
    dtype: str | None = None,
) -> Array:
    """Apply the changes to `previous`: the inverse of `collect_changes`.

    Args:
        previous: as given to `collect_changes`.
        delta: its result.
        edges: the same.
        method: as for `locate_changes`.
        out: flat contiguous array of the same dtype and size to write to. If it is `previous` itself, only the changes
            are written, in place. Default: a new array.
        dtype: the same.

    Returns:
        `out`, or a new array of the dtype and shape of `previous`.

    Raises:
        BadArgumentError: wrong dtypes, shapes or devices.
        CorruptDataError: ranks that do not ascend, or beyond the last element of their class. `out` then holds a part
            of the changes; `locate_changes` checks without writing.

    Example: see `collect_changes`.
    """
    name = _pattern_dtype(dtype, previous)
    checked = _delta(previous, delta, edges, method, name)
    if out is not None:
        _out(out, previous, "out")
    return back_end(previous).apply_changes(previous, delta, checked, method, out, name)


def gap_shifts(delta: SparseDelta) -> tuple[int, ...]:
    """Choose how many low bits of each class's gaps to leave open.

    The remaining gaps of all classes are then of similar size.

    Args:
        delta: as `collect_changes` gives it, on the host.

    Returns:
        For each class a number from 0 to 24, with which its shortened gaps are about 4 to 8 on average; 0 if the gaps
        are short already.

    Example:
        >>> import numpy as np
        >>> ranks = np.asarray([0, 1, 2, 999, 2999])
        >>> gap_shifts(SparseDelta(np.asarray([3, 2]), ranks, np.ones(5, np.uint16)))
        (0, 8)
    """
    counts, ranks, _ = _parts(delta, host=True)
    shifts = []
    for count, end in zip(counts.tolist(), np.cumsum(counts).tolist(), strict=True):
        mean = (int(ranks[end - 1]) + 1 - count) // count if count else 0
        shifts.append(min(max(mean.bit_length() - 3, 0), GAP_BITS - 1))
    return tuple(shifts)


def split_changes(delta: SparseDelta, shifts: Sequence[int]) -> tuple[Array, Array, Array]:
    """Split changes into symbols, low bits of their gaps, and changes too large for a symbol.

    The gap g of a change is the number of unchanged elements of its class since the previous change, and s is the shift
    of its class. With L the bit length of `(g >> s) | 2` and `k = s + L - 2`, the category of g is
    `2 (k - s) + (g >> k)`, and its k lowest bits are left open. A change d is small if it is at most 4:

        symbol = 5 category + d - 1   if d is small,   else 5 category + 4, and d - 5 is one of `large`

    Args:
        delta: as `collect_changes` gives it, on the host; gaps below 2**25.
        shifts: of each class, 0 to 24, as `gap_shifts` chooses them.

    Returns:
        (uint8 [m] symbols, in the order of the changes; uint8 open bits: change after change, the lowest bit first,
        zeros after the last; unsigned [large changes], as wide as the changes).

    Raises:
        BadArgumentError: wrong dtypes, ranks that do not ascend, changes of 0, or a gap of 2**25 or more.

    Example:
        >>> import numpy as np
        >>> before = np.arange(100, dtype=np.uint16)
        >>> after = before.copy()
        >>> after[[2, 50]] += np.asarray([1, 100], np.uint16)
        >>> symbols, extra, large = split_changes(collect_changes(after, before), [0])
        >>> symbols.tolist(), extra.tolist(), large.tolist()  # gaps 2 and 47 = 32 + 15; changes 2 and 200
        ([11, 54], [15], [195])
    """
    counts, ranks, changes = _parts(delta, host=True)
    given = _shifts(shifts, counts)
    return on_host().split_changes(SparseDelta(counts, ranks, changes), given)


def join_changes(
    counts: Any, shifts: Sequence[int], n: int, symbols: Array | bytes, extra: Array | bytes, large: Array
) -> SparseDelta:
    """Rebuild the changes from the parts that `split_changes` returned.

    Args:
        counts: NumPy int64 [classes], number of changes in each class.
        shifts: as given to `split_changes`.
        n: elements of the array, at most 2**25.
        symbols: uint8 [sum of counts], or bytes.
        extra: uint8, or bytes.
        large: unsigned, as wide as the array's elements.

    Returns:
        The changes; ranks ascend within a class and are below n.

    Raises:
        BadArgumentError: wrong dtypes, or on a GPU.
        CorruptDataError: a rank of n or more, a symbol that does not exist, a change that is too wide, or a wrong
            number of symbols, open bits or large changes.

    Example:
        >>> import numpy as np
        >>> symbols, extra = np.asarray([11, 54], np.uint8), bytes([15])
        >>> found = join_changes(np.asarray([2]), [0], 100, symbols, extra, np.asarray([195], np.uint16))
        >>> found.ranks.tolist(), found.changes.tolist()
        ([2, 50], [2, 200])
    """
    n = integer("n", n, 0, 1 << GAP_BITS)
    array("large", large, ("uint8", *LARGE), 1, host=True)
    given = _counts(counts)
    bits = _shifts(shifts, given)
    symbols, extra = stored_bytes(symbols), stored_bytes(extra)
    if int(given.sum()) != symbols.shape[0]:
        raise CorruptDataError(f"{symbols.shape[0]} symbols for {int(given.sum())} changes")
    if int(given.max(initial=0)) > n:
        raise CorruptDataError(f"{int(given.max())} changes among {n} elements")
    return on_host().join_changes(given, bits, n, symbols, extra, large)


def wrong_rank() -> CorruptDataError:
    """Return the error for ranks that do not ascend or are beyond their class."""
    return CorruptDataError("a rank does not ascend, or is beyond the last element of its class")


def wrong_gap(gap: int) -> BadArgumentError:
    """Return the error for a gap that `split_changes` cannot write."""
    return BadArgumentError(f"a gap is {gap}; ranks must ascend, with gaps below {1 << GAP_BITS}")


def wrong_changes(what: str) -> CorruptDataError:
    """Return the error for parts that `join_changes` cannot join."""
    return CorruptDataError(f"changes: {what}")


def _pair(
    current: Array, previous: Array, edges: Sequence[int], limit: int | None, dtype: str | None
) -> tuple[str, tuple[int, ...], int]:
    """Check two arrays and the settings of their comparison; return dtype, edges and limit."""
    check_alike(current, previous)
    name = _pattern_dtype(dtype, previous)
    checked = _edges(edges, name)
    n = math.prod(previous.shape)
    return name, checked, n if limit is None else min(integer("limit", limit, 0), n)


def _out(out: Array, x: Array, name: str) -> None:
    array(name, out, (dtype_name(x),), (math.prod(x.shape),))
    same_device(name, out, "the array", x)


def _edges(edges: Sequence[int], dtype: str) -> tuple[int, ...]:
    found = tuple(sequence("edges", edges))
    if not found:
        return ()
    if not ordered_by_sign(dtype):
        raise BadArgumentError(f"edges are for floats, whose patterns have a sign; the arrays are {dtype}")
    top = 1 << (width_of(dtype) - 1)
    found = tuple(integer("an edge", e, 1, top - 1) for e in found)
    if len(found) > MOST_EDGES or any(a >= b for a, b in itertools.pairwise(found)):
        raise BadArgumentError(f"edges are {found}; at most {MOST_EDGES}, ascending, are needed")
    return found


def _counts(counts: Any) -> Any:
    if not isinstance(counts, np.ndarray) or counts.dtype.kind not in "iu" or counts.ndim != 1:
        raise BadArgumentError("counts must be a NumPy array of integers of one axis")
    if counts.size > MOST_EDGES + 1 or (counts.size and int(counts.min()) < 0):
        raise BadArgumentError(f"counts are {counts.tolist()[:9]}; at most {MOST_EDGES + 1}, none below 0")
    return counts.astype(np.int64, copy=False)


def _shifts(shifts: Sequence[int], counts: Any) -> Any:
    found = [integer("a shift", s, 0, GAP_BITS - 1) for s in sequence("shifts", shifts)]
    if len(found) != counts.size:
        raise BadArgumentError(f"{len(found)} shifts for {counts.size} classes")
    return np.asarray(found, np.int64)


def _parts(delta: SparseDelta, *, host: bool = False) -> SparseDelta:
    if not isinstance(delta, tuple) or len(delta) != 3:
        raise BadArgumentError(f"delta is a {type(delta).__name__}; a SparseDelta is needed")
    counts, ranks, changes = delta
    found = _counts(counts)
    array("ranks", ranks, ("int64",), 1, host=host)
    array("changes", changes, ("uint8", *LARGE), (int(ranks.shape[0]),), host=host)
    if int(found.sum()) != ranks.shape[0]:
        raise BadArgumentError(f"counts add up to {int(found.sum())}, and there are {ranks.shape[0]} ranks")
    return SparseDelta(found, ranks, changes)


def _pattern_dtype(dtype: str | None, x: Array) -> str:
    """Return the dtype of the values of x; raise BadArgumentError for a dtype of another width."""
    check_arrays(previous=x)
    width = width_of(dtype_name(x))
    if dtype is not None and width_of(dtype) != width:
        raise BadArgumentError(f"dtype is {dtype}, and the arrays are {dtype_name(x)}; their widths must be the same")
    return dtype or dtype_name(x)


def _delta(previous: Array, delta: SparseDelta, edges: Sequence[int], method: str, dtype: str) -> tuple[int, ...]:
    width = width_of(dtype)
    counts, ranks, changes = _parts(delta)
    checked = _edges(edges, dtype)
    choice("method", method, ("arithmetic", "xor"))
    if dtype_name(changes) != f"uint{width}":
        raise BadArgumentError(f"changes are {dtype_name(changes)}; uint{width} is needed for {dtype_name(previous)}")
    if counts.shape != (len(checked) + 1,):
        raise BadArgumentError(f"{counts.size} counts for {len(checked) + 1} classes")
    same_device("previous", previous, "ranks", ranks)
    same_device("previous", previous, "changes", changes)
    return checked
