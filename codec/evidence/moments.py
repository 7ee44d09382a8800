"""Moments among optimizer entries: those that are updates, and those that stay exact.

A moment stays exact where its values, its shape or its neighbours contradict its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...kernels.backend.arrays import is_torch, on_gpu, to_host, wide
from ...kernels.backend.floats import FORMATS
from ..parallel import map_arrays
from ..state.leaves import LeafSpec
from .entries import KNOWN, Entry, Matches, parse
from .kind import Kind
from .names import layer_of

_SUBTRACTED = {"grad_avg", "average_gradient", "average_grad", "mean_grad", "mg"}
"""Averages of the gradient whose square an update subtracts from the second moment, before it takes a root."""
_PAIRS = {"exp_avg": "exp_avg_sq", "mu": "nu", "m": "v"}
"""First and second moments whose update is the one over the root of the other: Adam's, by any name."""
_ADAMS = {
    "adam", "adamw", "nadam", "radam", "sparseadam", "lamb", "fusedadam", "fusedlamb", "deepspeedcpuadam", "ademamix",
    "prodigy", "stableadamw", "adamp", "yogi",
}  # fmt: skip
"""Optimizers of whose moments that is so, by the name in lower case of the class that has their `step`."""
_SETTINGS = {"amsgrad", "bias_correction", "momentum_decay", "decoupled_weight_decay"}
"""Adam and its variants have one of these settings, next to `betas`."""
_COMMON = {"lr", "initial_lr", "betas", "eps", "weight_decay"}
"""Settings that say nothing of the entries' meaning."""
_SLOW = "exp_avg_slow"
"""AdEMAMix's second average of gradients: its unit is its own, not that of sqrt(v)."""
_MAXIMA = {"max_exp_avg_sq", "nu_max"}
_SUMS = {"sum"}
"""Sums of squares (Adagrad), which no update squares."""
_CHUNK = 1 << 20
_SAMPLE = 1 << 14
_ALIKE = 0.9
"""Cosine of a first moment and its parameter above which it is an average of the weights, if their norms agree, too."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """The arrays of a state, as the input of `gather`.

    Args:
        paths: of all arrays.
        specs: library, dtype and shape of each.
        flats: the values of each, flat.
        held: whether an array is part of a tensor subclass, which stays exact, or a list of numbers.
    """

    paths: Sequence[str]
    specs: Sequence[LeafSpec]
    flats: Sequence[Any]
    held: Sequence[bool]


def guess(path: str, spec: LeafSpec) -> Kind:
    """Return the kind of an array by its name and shape, for display only."""
    entry = parse(path)
    return Kind(layer_of(path, spec), "weight" if entry is None else entry.role)


def updates(
    entries: Mapping[int, Entry],
    roles: Mapping[int, str],
    shapes: Sequence[tuple[int, ...]],
    classes: Mapping[int, str | None],
    settings: Mapping[str, set[str]],
) -> set[int]:
    """Return the first moments m whose m / sqrt(v) is the update, v their second moment.

    Names alone prove it where nothing is known of the optimizer. Its class, the settings of its groups and arrays that
    Adam does not keep for a parameter can contradict: LaProp and ADOPT call an average of g / sqrt(v) `exp_avg`.

    Args:
        entries: of the arrays below optimizers, by number.
        roles: of the same arrays.
        shapes: of all arrays.
        classes: of the optimizer of each entry, where `kinds=` gives one.
        settings: names of the settings of each optimizer, by its path.
    """
    found = set()
    for numbers in _by_owner(entries).values():
        seconds = [i for i in numbers if roles[i] == "second moment"]
        further = any(shapes[i] and entries[i].name not in KNOWN | _MAXIMA for i in numbers)
        for i in numbers:
            if roles[i] != "first moment" or len(seconds) != 1 or entries[i].name == _SLOW:
                continue
            cls = classes.get(i)
            if cls is not None:
                proven = cls.lower() in _ADAMS
            else:
                named = _PAIRS.get(entries[i].name) == entries[seconds[0]].name
                proven = named and not further and _are_adams(settings.get(entries[i].optimizer, set()))
            if proven:
                found.add(i)
    return found


def _are_adams(settings: set[str]) -> bool:
    """Return whether settings may be those of Adam; without any nothing is known."""
    plain = settings <= _COMMON or bool(settings & _SETTINGS and "centered" not in settings)
    return not settings or ("betas" in settings and plain)


def _by_owner(entries: Mapping[int, Entry]) -> dict[tuple[str, str], list[int]]:
    owners: dict[tuple[str, str], list[int]] = {}
    for i, entry in entries.items():
        owners.setdefault(entry.owner, []).append(i)
    return owners


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
    there is no `count` next to them and `v >= m**2` holds everywhere. Where the update is not proven to be Adam's, an
    entry of unknown meaning may be such an average, too (centered LaProp).

    Args:
        entries: of the arrays below optimizers, by number.
        roles: of the same arrays.
        variance: whether `v >= m**2` holds for the arrays of two numbers, v and m; asked of few.
    """
    found: set[int] = set()
    optax: dict[str, list[tuple[int, int]]] = {}
    counted = {entry.above for entry in entries.values() if entry.name == "count" and not entry.parameter}
    for numbers in _by_owner(entries).values():
        names = {entries[i].name: i for i in numbers}
        if names.keys() & _SUBTRACTED:
            # Next to such an average everything but a first moment may be the square, by any name.
            found.update(i for i in numbers if roles[i] != "first moment")
        elif {"mu", "nu"} <= names.keys():
            optax.setdefault(entries[numbers[0]].above, []).append((names["nu"], names["mu"]))
        elif not any(entries[i].is_update for i in numbers):
            unknown = [i for name, i in names.items() if roles[i] == "state" and name not in KNOWN | _SUMS]
            seconds = [i for i in numbers if roles[i] == "second moment"]
            found.update(v for v in seconds if any(variance(v, i) for i in unknown))
    for above, pairs in optax.items():
        if above not in counted and all(variance(second, first) for second, first in pairs):
            found.update(i for pair in pairs for i in pair)
    return dict.fromkeys(sorted(found), "an update subtracts the square of an average from it")


def possible_maxima(entries: Mapping[int, Entry], bounds: Callable[[int, int], bool]) -> dict[int, str]:
    """Return the moments of Optax whose `nu` may be a maximum (Adamax), and why.

    A maximum bounds the average of the same gradients; an average of squares does only where all gradients are large.

    Args:
        entries: of the arrays below optimizers, by number.
        bounds: whether `v >= abs(m)` holds for the arrays of two numbers, v and m.
    """
    trees: dict[str, list[dict[str, int]]] = {}
    for numbers in _by_owner(entries).values():
        names = {entries[i].name: i for i in numbers if entries[i].is_tree}
        if {"mu", "nu"} <= names.keys():
            trees.setdefault(entries[numbers[0]].above, []).append(names)
    maxima = [pair for pairs in trees.values() if all(bounds(p["nu"], p["mu"]) for p in pairs) for pair in pairs]
    return {pair[name]: "it may be a maximum of gradients" for pair in maxima for name in ("mu", "nu")}


def contradicted(
    arrays: Arrays, entries: Mapping[int, Entry], roles: Mapping[int, str], matches: Matches
) -> dict[int, str]:
    """Return the moments whose values or entries contradict their names, with the reason.

    Args:
        arrays: of the state.
        entries: of optimizers, by number.
        roles: of the same arrays.
        matches: parameters that the entries belong to.
    """
    spoilt = unpaired_roots(entries, roles, partial(_bounds, arrays, power=2))
    spoilt |= possible_maxima(entries, partial(_bounds, arrays, power=1))
    other_bases = in_other_bases(entries, roles, [spec.shape for spec in arrays.specs])
    moments = [i for i, role in roles.items() if role.endswith("moment") and arrays.specs[i].dtype in FORMATS]
    unlike = _unlike_parameters({i: entries[i].owner for i in moments}, arrays, roles, matches)

    def wrong(i: int) -> str:
        return _wrong_values(arrays.flats[i], roles[i]) if i not in spoilt else ""

    values = map_arrays(wrong, moments, lambda i: arrays.specs[i].size)
    spoilt |= {i: why for i, why in zip(moments, values, strict=True) if why}
    seconds = {entries[i].owner: why for i, why in spoilt.items() if roles[i] == "second moment"}
    next_to = {i: f"{seconds[entries[i].owner]} (next to it)" for i in moments if entries[i].owner in seconds}
    return next_to | other_bases | spoilt | unlike


def _unlike_parameters(
    owners: Mapping[int, tuple[str, str]], arrays: Arrays, roles: Mapping[int, str], matches: Matches
) -> dict[int, str]:
    """Return the moments that cannot be those of their parameters, with the reason."""
    parameters = {owner: i for i, owner in matches.trained.items()}
    found = {}
    for i, owner in owners.items():
        parameter = parameters.get(owner, i)
        if owner in matches.contradicted or arrays.specs[parameter].shape != arrays.specs[i].shape:
            found[i] = "its parameter has another shape"
        elif parameter != i and roles[i] == "first moment" and _follows(arrays.flats[i], arrays.flats[parameter]):
            found[i] = "it follows the weights, not their gradients"
    return found


def _wrong_values(flat: Any, role: str) -> str:
    if not flat.shape[0]:
        return ""
    # NumPy's reductions, unlike torch's, start no threads, which wait for each other on a busy machine.
    numbers = flat.numpy() if is_torch(flat) and not on_gpu(flat) and flat.dtype.itemsize > 2 else flat
    with np.errstate(invalid="ignore"):
        least = float(numbers.min())  # NaN if any element is
    if math.isnan(least):
        return "it holds NaN"
    return "a second moment is never negative" if role == "second moment" and least < 0 else ""


def _follows(moment: Any, parameter: Any) -> bool:
    """Return whether a moment has about the length and direction of its parameter."""
    stride = max(1, moment.shape[0] // _SAMPLE)
    m, w = (to_host(wide(x[::stride])) for x in (moment, parameter))
    norms = math.sqrt(float(np.square(m).sum())), math.sqrt(float(np.square(w).sum()))
    return 0.5 * norms[1] < norms[0] < 2 * norms[1] and float((m * w).sum()) > _ALIKE * norms[0] * norms[1]


def _bounds(arrays: Arrays, second: int, first: int, power: int) -> bool:
    """Return whether `v >= abs(m)**power` for all elements, within the rounding of bfloat16."""
    specs = arrays.specs[second], arrays.specs[first]
    if specs[0].shape != specs[1].shape or {spec.dtype for spec in specs} - FORMATS.keys():
        return False
    for start in range(0, specs[0].size, _CHUNK):
        v, m = (wide(arrays.flats[i][start : start + _CHUNK]) for i in (second, first))
        bounded = abs(m) ** power
        if is_torch(v) != is_torch(bounded):
            bounded = v.new_tensor(bounded) if is_torch(v) else bounded.cpu().numpy()
        if bool((bounded > (1 + 2.0**-6) * v + 1e-30).any()):
            return False
    return True
