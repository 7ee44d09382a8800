"""Changes of 16-bit patterns: found, applied, split for coding."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shrinkpoint.kernels import sparse_delta as kernels

from ..harness import Case, Job, same
from .place import Place, oracle, require

_EVERY = 97
"""One element in so many changes: a share of 1 %."""
_MOVED = {
    "collect_changes": 4.0,
    "locate_changes": 12 / _EVERY,
    "collect_and_locate": 4.0,
    "apply_changes": 4.0,
    "gap_shifts": 4 / _EVERY,
    "split_changes": 8 / _EVERY,
    "join_changes": 8 / _EVERY,
}
"""Bytes an element that each function moves: both arrays are read, or one is read and one written, or only changes."""


def cases(at: Place) -> list[Case]:
    """Return a case for each function, in bytes of the array that changes."""
    return [at.case(row, partial(_job, at, row), on="cpu") for row in _MOVED]


def _found(before: Any, after: Any) -> Any:
    delta = kernels.collect_changes(after, before)
    require(delta is not None, "too many changes")
    return delta


def _job(at: Place, name: str) -> Job:
    before = at.patterns()[0]
    after = before.copy()
    after[::_EVERY] += 1 + np.arange(after[::_EVERY].size, dtype=np.uint16) % 7
    delta, changed, few = _found(before, after), before != after, slice(at.prefix)
    bits = kernels.gap_shifts(delta)
    parts, places = kernels.split_changes(delta, bits), (np.flatnonzero(changed), after[changed])
    calls: dict[str, Callable[[], Any]] = {
        "collect_changes": partial(kernels.collect_changes, after, before),
        "locate_changes": partial(kernels.locate_changes, before, delta),
        "collect_and_locate": partial(kernels.collect_and_locate, after, before),
        "apply_changes": partial(kernels.apply_changes, before, delta),
        "gap_shifts": partial(kernels.gap_shifts, delta),
        "split_changes": partial(kernels.split_changes, delta, bits),
        "join_changes": partial(kernels.join_changes, delta.counts, bits, at.n, *parts),
    }
    call = calls[name]

    def collected() -> str:
        old, new = before[few], after[few]
        wanted = oracle("sparse_delta").collect_changes(new, old, (), at.prefix, None, "uint16")
        same("changes", _found(old, new), wanted)
        return at.says

    def shifts() -> str:
        require(0 <= bits[0] <= int(_EVERY).bit_length(), f"{bits[0]} bits")
        return f"{bits[0]} bits for gaps of {_EVERY}"

    def split() -> str:
        same("parts", call(), oracle("sparse_delta").split_changes(delta, np.asarray(bits)))
        return f"{delta.ranks.size:,} changes = oracle"

    def whole() -> str:
        """Compare the result with the changes that were made."""
        known = {"locate_changes": places, "collect_and_locate": (delta, *places), "apply_changes": after}
        same(name, call(), known.get(name, delta))
        return f"all {places[0].size:,} changes"

    checks: dict[str, Callable[[], str]] = {"collect_changes": collected, "gap_shifts": shifts, "split_changes": split}
    note = f"16-bit patterns, one in {_EVERY} changed"
    return at.job(call, checks.get(name, whole), _MOVED[name], width=2, note=note)
