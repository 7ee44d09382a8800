"""Rows of the sparse kernels: changes of 16-bit patterns found, applied, split for coding."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from shrinkpoint.kernels import sparse_delta as kernels
from shrinkpoint.kernels.sparse_delta import SparseDelta

from .elementwise import Place, oracle
from .harness import Case, Job, same

_EVERY = 97
"""One element in so many changes: a share of 1 %."""
Patterns = npt.NDArray[np.uint16]


def cases(at: Place) -> list[Case]:
    """Return a case for each function, in bytes of the array that changes."""
    return [
        at.case("collect_changes", collect),
        at.case("locate_changes", locate),
        at.case("collect_and_locate", collect_and_locate),
        at.case("apply_changes", apply),
        at.case("gap_shifts", shifts),
        at.case("split_changes", split),
        at.case("join_changes", join),
    ]


def _pair(at: Place) -> tuple[Patterns, Patterns]:
    before = np.ascontiguousarray(at.sample.before(at.n).view(np.uint16)[1::2])
    after = before.copy()
    after[::_EVERY] += 1 + np.arange(after[::_EVERY].size, dtype=np.uint16) % 7
    return before, after


def _delta(before: Patterns, after: Patterns) -> SparseDelta:
    found = kernels.collect_changes(after, before)
    assert found is not None
    return found


def _job(at: Place, call: Any, check: Any, moves: float) -> Job:
    return at.job(call, check, moves, width=2, note=f"16-bit patterns, one in {_EVERY} changed")


def collect(at: Place) -> Job:
    """Find changes: both arrays are read once."""
    before, after = _pair(at)

    def check() -> str:
        part = slice(at.prefix)
        expected = oracle("sparse_delta").collect_changes(
            after[part], before[part], (), at.prefix, "arithmetic", None, "uint16"
        )
        for name, own, other in zip(SparseDelta._fields, _delta(before[part], after[part]), expected, strict=True):
            same(name, own, other)
        return at.says

    return _job(at, lambda: kernels.collect_changes(after, before), check, 4.0)


def locate(at: Place) -> Job:
    """Find the positions of changes: only the changes move."""
    before, after = _pair(at)
    delta = _delta(before, after)

    def check() -> str:
        positions, values = kernels.locate_changes(before, delta)
        same("positions", positions, np.flatnonzero(before != after))
        same("values", values, after[before != after])
        return f"all {positions.size:,} positions"

    return _job(at, lambda: kernels.locate_changes(before, delta), check, 12 / _EVERY)


def collect_and_locate(at: Place) -> Job:
    """Find changes and their positions in one pass: both arrays are read once."""
    before, after = _pair(at)

    def call() -> Any:
        return kernels.collect_and_locate(after, before)

    def check() -> str:
        delta, positions, values = call()
        for name, own, other in zip(SparseDelta._fields, delta, _delta(before, after), strict=True):
            same(name, own, other)
        same("positions", positions, np.flatnonzero(before != after))
        same("values", values, after[before != after])
        return f"all {positions.size:,} changes"

    return _job(at, call, check, 4.0)


def apply(at: Place) -> Job:
    """Apply changes to a new array: one array is read, one written."""
    before, after = _pair(at)
    delta = _delta(before, after)

    def check() -> str:
        same("values", kernels.apply_changes(before, delta), after)
        return "all elements come back"

    return _job(at, lambda: kernels.apply_changes(before, delta), check, 4.0)


def shifts(at: Place) -> Job:
    """Choose the open bits of gaps: only the changes are read."""
    delta = _delta(*_pair(at))

    def check() -> str:
        (bits,) = kernels.gap_shifts(delta)
        assert 0 <= bits <= int(_EVERY).bit_length(), bits
        return f"{bits} bits for gaps of {_EVERY}"

    return _job(at, lambda: kernels.gap_shifts(delta), check, 4 / _EVERY)


def split(at: Place) -> Job:
    """Split changes into symbols and open bits: only the changes move."""
    delta = _delta(*_pair(at))
    bits = kernels.gap_shifts(delta)

    def check() -> str:
        found = oracle("sparse_delta").split_changes(delta, np.asarray(bits))
        own = kernels.split_changes(delta, bits)
        for name, part, other in zip(("symbols", "bits", "large"), own, found, strict=True):
            same(name, part, other)
        return f"{delta.ranks.size:,} changes = oracle"

    return _job(at, lambda: kernels.split_changes(delta, bits), check, 8 / _EVERY)


def join(at: Place) -> Job:
    """Join symbols and open bits to changes: only the changes move."""
    delta = _delta(*_pair(at))
    bits = kernels.gap_shifts(delta)
    symbols, extra, large = kernels.split_changes(delta, bits)

    def call() -> SparseDelta:
        return kernels.join_changes(delta.counts, bits, at.n, symbols, extra, large)

    def check() -> str:
        for name, own, other in zip(SparseDelta._fields, call(), delta, strict=True):
            same(name, own, other)
        return "all changes come back"

    return _job(at, call, check, 8 / _EVERY)
