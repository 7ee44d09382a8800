"""Arrays that a thinned checkpoint leaves out: moments of optimizers, by evidence only.

The evidence is what the file records of an array: the kind or the structure that chose its codec. Where a rule for all
arrays chose it, as in lossless presets, the file does not record the role; then the structure of the state decides, as
it does in `compress`. An array whose role is unknown is kept.
"""

from __future__ import annotations

from .checkpoint import Checkpoint
from .evidence.entries import Outline, entries_of
from .evidence.gather import gather
from .evidence.kind import TINY_MOMENT
from .evidence.moments import Arrays
from .evidence.reasons import FIRST, SECOND
from .records import ArrayRecord
from .state import tree
from .state.leaves import SEQUENCES

ROLES = ("first moment", "second moment")
_RECORDED = {FIRST: ROLES[0], SECOND: ROLES[1]}
_RECORDED |= {reason: role for role in ROLES for reason in (f"kinds: {role}", f"rule {role!r}")}
"""Recorded reasons that state the role of an array."""
_TINY = f"exact: less than {TINY_MOMENT} elements"
"""Recorded reason of moments only, of both roles."""


def moments(ckpt: Checkpoint) -> dict[int, str]:
    """Return number -> role of the moments that can be left out of a checkpoint.

    A moment that decoding another array needs is not among them.

    Args:
        ckpt: the checkpoint, resolved.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> m = np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64)
        >>> state = {"model": {"w": m}, "optimizer": {"state": {"w": {"exp_avg": m / 2, "exp_avg_sq": m * m}}}}
        >>> sorted(moments(sp.compress(state, cfg="lossless")).values())
        ['first moment', 'second moment']
    """
    named = _named(ckpt)
    found = {i: role for i, role in named.items() if not _is_by_path(ckpt.records[i])}
    if len(found) < len(named):
        for i, known in enumerate(gather(ckpt.header["tree"], _decoded(ckpt), None)):
            is_moment = known.source == "structure" and known.kind.role in ROLES
            if i in named and i not in found and is_moment and (not known.is_bound or known.why == _TINY):
                found[i] = known.kind.role
    return _separable(ckpt, found)


def has_moments(ckpt: Checkpoint) -> bool:
    """Return whether a checkpoint may have moments to leave out; only its header is read."""
    return bool(_named(ckpt))


def _named(ckpt: Checkpoint) -> dict[int, str]:
    """Return number -> role of the arrays that are called moments.

    By the recorded reason; where the file records no role, by place and name.
    """
    outline = Outline.of(tree.unflatten(ckpt.header["tree"], lambda _, place: None))
    found = {}
    for i, entry in enumerate(entries_of([record.path for record in ckpt.records], outline)):
        record = ckpt.records[i]
        role = _RECORDED.get(record.why, "state")
        if entry is not None and (record.why == _TINY or _is_by_path(record)):
            role = entry.role
        if role in ROLES:
            found[i] = role
    return found


def _is_by_path(record: ArrayRecord) -> bool:
    """Return whether a rule for paths chose the codec, so that the role is not recorded."""
    return record.why.startswith("rule ") and record.why not in _RECORDED


def _decoded(ckpt: Checkpoint) -> Arrays:
    """Return the arrays of a checkpoint, as `compress` reads those of a state."""
    records = ckpt.records
    specs = [record.spec for record in records]
    held = [spec.library in SEQUENCES for spec in specs]
    return Arrays([record.path for record in records], specs, [ckpt.values_of(record) for record in records], held)


def _separable(ckpt: Checkpoint, found: dict[int, str]) -> dict[int, str]:
    """Return the arrays without those that are needed to decode others."""
    found = dict(found)
    while True:
        needed = {r.pair for i, r in enumerate(ckpt.records) if i not in found and r.pair in found}
        for group in ckpt.groups:
            # Arrays of these formats are coded with others and cannot be coded again.
            if not group.format.has_deltas and not found.keys() >= set(group.members):
                needed |= found.keys() & set(group.members)
        if not needed:
            return found
        found = {i: role for i, role in found.items() if i not in needed}
