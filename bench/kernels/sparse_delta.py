"""Changes of 16-bit patterns: found, applied, split for coding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from shrinkpoint.kernels import sparse_delta as kernels

from ..harness import Case, Job, same
from .place import Place, comes_back, oracle, require

_EVERY = 97
"""One element in so many changes: a share of 1 %."""


def cases(at: Place) -> list[Case]:
    """Return a case for each function, in bytes of the array that changes."""
    jobs = {
        "collect_changes": collected,
        "locate_changes": located,
        "collect_and_locate": collected_and_located,
        "apply_changes": applied,
        "gap_shifts": shifts,
        "split_changes": split,
        "join_changes": joined,
    }
    return [at.case(row, lambda make=make: make(at), on="cpu") for row, make in jobs.items()]  # type: ignore[misc]


def _pair(at: Place) -> tuple[Any, Any]:
    before = at.patterns()[0]
    after = before.copy()
    after[::_EVERY] += 1 + np.arange(after[::_EVERY].size, dtype=np.uint16) % 7
    return before, after


def _delta(before: Any, after: Any) -> Any:
    found = kernels.collect_changes(after, before)
    require(found is not None, "too many changes")
    return found


def _job(at: Place, call: Any, check: Callable[[], str], moves: float) -> Job:
    return at.job(call, check, moves, width=2, note=f"16-bit patterns, one in {_EVERY} changed")


def collected(at: Place) -> Job:
    """Find changes: both arrays are read once."""
    before, after = _pair(at)
    old, new = before[: at.prefix], after[: at.prefix]
    expected = oracle("sparse_delta").collect_changes(new, old, (), at.prefix, None, "uint16")
    check = comes_back("changes", lambda: _delta(old, new), expected, at.says)
    return _job(at, lambda: kernels.collect_changes(after, before), check, 4.0)


def located(at: Place) -> Job:
    """Find the positions of changes: only the changes move."""
    before, after = _pair(at)
    delta, changed = _delta(before, after), before != after

    def call() -> Any:
        return kernels.locate_changes(before, delta)

    def check() -> str:
        positions, values = call()
        same("positions", positions, np.flatnonzero(changed))
        same("values", values, after[changed])
        return f"all {positions.size:,} positions"

    return _job(at, call, check, 12 / _EVERY)


def collected_and_located(at: Place) -> Job:
    """Find changes and their positions in one pass: both arrays are read once."""
    before, after = _pair(at)
    changed = before != after

    def call() -> Any:
        return kernels.collect_and_locate(after, before)

    def check() -> str:
        delta, positions, values = call()
        same("changes", delta, _delta(before, after))
        same("positions", positions, np.flatnonzero(changed))
        same("values", values, after[changed])
        return f"all {positions.size:,} changes"

    return _job(at, call, check, 4.0)


def applied(at: Place) -> Job:
    """Apply changes to a new array: one array is read, one written."""
    before, after = _pair(at)
    delta = _delta(before, after)

    def call() -> Any:
        return kernels.apply_changes(before, delta)

    return _job(at, call, comes_back("values", call, after, "all elements come back"), 4.0)


def shifts(at: Place) -> Job:
    """Choose the open bits of gaps: only the changes are read."""
    delta = _delta(*_pair(at))

    def check() -> str:
        (bits,) = kernels.gap_shifts(delta)
        require(0 <= bits <= int(_EVERY).bit_length(), f"{bits} bits")
        return f"{bits} bits for gaps of {_EVERY}"

    return _job(at, lambda: kernels.gap_shifts(delta), check, 4 / _EVERY)


def split(at: Place) -> Job:
    """Split changes into symbols and open bits: only the changes move."""
    delta = _delta(*_pair(at))
    bits = kernels.gap_shifts(delta)
    expected = oracle("sparse_delta").split_changes(delta, np.asarray(bits))

    def call() -> Any:
        return kernels.split_changes(delta, bits)

    says = f"{delta.ranks.size:,} changes = oracle"
    return _job(at, call, comes_back("parts", call, expected, says), 8 / _EVERY)


def joined(at: Place) -> Job:
    """Join symbols and open bits to changes: only the changes move."""
    delta = _delta(*_pair(at))
    bits = kernels.gap_shifts(delta)
    parts = kernels.split_changes(delta, bits)

    def call() -> Any:
        return kernels.join_changes(delta.counts, bits, at.n, *parts)

    check = comes_back("changes", call, delta, "all changes come back")
    return _job(at, call, check, 8 / _EVERY)
