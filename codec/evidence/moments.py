"""First and second moments among optimizer entries, and moments that must stay exact."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from .entries import KNOWN, Entry, parse
from .kind import Kind
from .names import FIRST, SECOND, layer_of

if TYPE_CHECKING:
    from ..state.leaves import LeafSpec

_SUBTRACTED = {"grad_avg", "average_gradient", "average_grad", "mean_grad", "mg"}
"""Averages of the gradient whose square an update subtracts from the second moment, before it takes a root."""
_PAIRS = {("exp_avg", "exp_avg_sq"), ("mu", "nu"), ("m", "v")}
"""First and second moments whose update is the one over the root of the other: Adam's, by any name."""
_ADAMS = {"adam", "adamw", "nadam", "radam", "lamb"}
"""Optimizers, by class name in lower case, of whose moments that is so under every name."""
_OTHER_UNITS = {"Adafactor", "CAME"}
"""Optimizers that call an average of the update, already divided by the root, `exp_avg`."""
_OPTAX = {"mu", "nu", "trace"}
"""Optax's moments. Its other trees have names that other optimizers use with another meaning."""
_LETTERS = 2
"""A name with at most this number of letters is a moment's only below the number or the name of a parameter."""
_NUMBERED = re.compile(r"(^|/)(\d+|state/.+|state)$")


def role_of(entry: Entry) -> str:
    """Return the role of an optimizer's entry by its name: a moment, or "state".

    Example:
        >>> role_of(parse("optimizer/state/0/exp_avg_sq"))
        'second moment'
        >>> role_of(parse("optimizer/state/0/momentum_of_another_kind"))
        'state'
    """
    if entry.is_tree and entry.name not in _OPTAX:
        return "state"
    role = "first moment" if entry.name in FIRST else "second moment" if entry.name in SECOND else "state"
    short = len(entry.name) <= _LETTERS and not entry.parameter and not _NUMBERED.search(entry.above)
    return "state" if short else role


def guess(path: str, spec: LeafSpec) -> Kind:
    """Return the kind of an array by its name and shape, for display only."""
    entry = parse(path)
    return Kind(layer_of(path, spec), "weight" if entry is None else role_of(entry))


def is_update(first: Entry, kind: Kind, second: Entry) -> bool:
    """Return whether m / sqrt(v) of two entries is the optimizer's update.

    Args:
        first: entry of the first moment.
        kind: its kind.
        second: entry of the second moment.
    """
    if kind.optimizer is not None and kind.optimizer.lower() in _ADAMS:
        return True
    return (first.name, second.name) in _PAIRS and kind.optimizer not in _OTHER_UNITS


def in_other_bases(
    entries: Mapping[int, Entry], roles: Mapping[int, str], shapes: Sequence[tuple[int, ...]]
) -> dict[int, str]:
    """Return the first moments that may be in another basis than their second, and why.

    An optimizer that keeps further matrices for a parameter, of another shape, may turn or project its gradients
    (SOAP's rotations). Its first moment is then no update in units of the second one.

    Args:
        entries: of the arrays below optimizers, by number.
        roles: of the same arrays.
        shapes: of all arrays.
    """
    further: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for i, entry in entries.items():
        if entry.name not in KNOWN and len(shapes[i]) >= 2:
            further.setdefault(entry.owner, set()).add(shapes[i])
    return {
        i: "its optimizer keeps matrices of another basis"
        for i, entry in entries.items()
        if roles[i] == "first moment" and further.get(entry.owner, set()) - {shapes[i]}
    }


def unpaired_roots(
    entries: Mapping[int, Entry], roles: Mapping[int, str], variance: Callable[[int, int], bool]
) -> dict[int, str]:
    """Return the numbers of moments that only exact storage keeps usable, each with the reason.

    Centered RMSprop takes the root of `v - m**2`. An error in either of the two can make that negative, so both stay
    exact. The name of the average says so (torch, timm, Keras); in Optax's `scale_by_stddev`, whose names are Adam's,
    there is no `count` next to them and `v >= m**2` holds everywhere.

    Args:
        entries: of the arrays below optimizers, by number.
        roles: of the same arrays.
        variance: whether `v >= m**2` holds for the arrays of two numbers, v and m; asked of few.
    """
    owners: dict[tuple[str, str], list[int]] = {}
    for i, entry in entries.items():
        owners.setdefault(entry.owner, []).append(i)
    found: set[int] = set()
    optax: dict[str, list[tuple[int, int]]] = {}
    counted = {entry.above for entry in entries.values() if entry.name == "count" and not entry.parameter}
    for numbers in owners.values():
        names = {entries[i].name: i for i in numbers}
        if names.keys() & _SUBTRACTED:
            # Next to such an average everything but a first moment may be the square, by any name.
            found.update(i for i in numbers if roles[i] != "first moment")
        elif {"mu", "nu"} <= names.keys():
            optax.setdefault(entries[numbers[0]].above, []).append((names["nu"], names["mu"]))
    for above, pairs in optax.items():
        if above not in counted and all(variance(second, first) for second, first in pairs):
            found.update(i for pair in pairs for i in pair)
    return dict.fromkeys(sorted(found), "an update subtracts the square of an average from it")
