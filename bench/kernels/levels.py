"""Changes between checkpoints: counts, groups and differences of levels; 16-bit patterns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from shrinkpoint.kernels import levels as kernels
from shrinkpoint.kernels import runlength, sparse_delta

from .. import peers
from ..harness import Case, Job, same
from .place import LEVELS, PREFIX, Call, Place, oracle, require


def cases(at: Place) -> list[Case]:
    """Return the cases of the subjects."""
    sort = ("torch.sort",) if at.device.gpu else ("np.argsort", "torch.sort")
    return [
        at.case("joint_counts", lambda: at.compared(Call("levels.joint_counts", at.levels(), (LEVELS, LEVELS)), 2)),
        at.case("split_by_level", lambda: split(at), at.target(0.45, 0.60), sort),
        at.case("merge_by_level", lambda: merge(at), at.target(0.45, 0.60), sort),
        at.case("delta", lambda: delta(at)),
        at.case("undelta", lambda: undelta(at)),
        at.case("rle_encode", lambda: runs(at, decode=False), unit="Gsym/s", on="cpu"),
        at.case("rle_decode", lambda: runs(at, decode=True), unit="Gsym/s", on="cpu"),
        *(at.case(row, partial(changes, at, row), on="cpu") for row in _MOVED),
    ]


def split(at: Place) -> Job:
    """Group levels by the levels before."""
    before, after = at.levels()
    others = peers.sorting(at.device, at.device.array(before))
    return at.compared(Call("levels.split_by_level", (after, before), (LEVELS,)), 3, others)


def merge(at: Place) -> Job:
    """Put grouped levels back."""
    keys, values = at.arrays(*at.levels())
    grouped, _ = kernels.split_by_level(values, keys, LEVELS)

    def check() -> str:
        before, after = (part[: at.prefix] for part in at.levels())
        part, _ = kernels.split_by_level(values[: at.prefix], keys[: at.prefix], LEVELS)
        same("groups", part, oracle("levels").split_by_level(after, before, LEVELS)[0])
        same("merged", kernels.merge_by_level(part, keys[: at.prefix], LEVELS), after)
        same("merged", kernels.merge_by_level(grouped, keys, LEVELS), values)
        return f"{at.says}, all merge back"

    others = peers.unsorting(at.device, keys, grouped)
    return at.job(lambda: kernels.merge_by_level(grouped, keys, LEVELS), check, 3, others)


def delta(at: Place) -> Job:
    """Subtract levels."""
    before, after = at.levels()
    (previous,) = at.arrays(before)
    back = lambda steps: (kernels.undelta(previous, steps, LEVELS), after)  # noqa: E731
    return at.compared(Call("levels.delta", (before, after), (LEVELS,), back=back), 3)


def undelta(at: Place) -> Job:
    """Add differences to levels."""
    before, after = at.levels()
    steps = kernels.delta(before, after, LEVELS)
    return at.compared(Call("levels.undelta", (before, steps), (LEVELS,), back=lambda found: (found, after)), 3)


def runs(at: Place, *, decode: bool) -> Job:
    """Code runs of differences grouped by the earlier level, or restore them."""
    previous, current = at.levels()
    values = kernels.split_by_level(kernels.delta(previous, current, LEVELS), previous, LEVELS)[0]
    tokens, part = runlength.rle_encode(values), values[: PREFIX // 8]
    few = lambda: (runlength.rle_encode(part), oracle("runlength").rle_encode(part))  # noqa: E731
    calls = partial(runlength.rle_encode, values), partial(runlength.rle_decode, tokens, at.n)
    return at.coding(*calls, values, few, f"{tokens.size / at.n:.3f} tokens a symbol", decoding=decode)


# ------------------------------------------------------------------------------------------- changes of 16-bit patterns

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


def _found(before: Any, after: Any) -> Any:
    delta = sparse_delta.collect_changes(after, before)
    require(delta is not None, "too many changes")
    return delta


def changes(at: Place, name: str) -> Job:
    """Find the changes of 16-bit patterns, split them for coding, or apply them."""
    before = at.patterns()[0]
    after = before.copy()
    after[::_EVERY] += 1 + np.arange(after[::_EVERY].size, dtype=np.uint16) % 7
    delta, changed, few = _found(before, after), before != after, slice(at.prefix)
    bits = sparse_delta.gap_shifts(delta)
    parts, places = sparse_delta.split_changes(delta, bits), (np.flatnonzero(changed), after[changed])
    calls: dict[str, Callable[[], Any]] = {
        "collect_changes": partial(sparse_delta.collect_changes, after, before),
        "locate_changes": partial(sparse_delta.locate_changes, before, delta),
        "collect_and_locate": partial(sparse_delta.collect_and_locate, after, before),
        "apply_changes": partial(sparse_delta.apply_changes, before, delta),
        "gap_shifts": partial(sparse_delta.gap_shifts, delta),
        "split_changes": partial(sparse_delta.split_changes, delta, bits),
        "join_changes": partial(sparse_delta.join_changes, delta.counts, bits, at.n, *parts),
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
