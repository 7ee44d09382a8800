"""Moments whose values, shapes or neighbours contradict their names; they stay exact."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...kernels.backend.arrays import is_torch, on_gpu
from ...kernels.backend.floats import FORMATS
from ..parallel import map_arrays
from ..state.leaves import LeafSpec, on_host, wide
from .entries import Entry
from .moments import in_other_bases, possible_maxima, unpaired_roots
from .parameters import Matches

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
    moments = [i for i, role in roles.items() if role.endswith("moment") and arrays.specs[i].dtype in FORMATS]

    def wrong(i: int) -> str:
        return _wrong_values(arrays.flats[i], roles[i]) if i not in spoilt else ""

    for i, why in zip(moments, map_arrays(wrong, moments, lambda i: arrays.specs[i].size), strict=True):
        if why:
            spoilt[i] = why
    owners = {entries[i].owner: why for i, why in spoilt.items() if roles[i] == "second moment"}
    shapes = [spec.shape for spec in arrays.specs]
    spoilt |= {i: why for i, why in in_other_bases(entries, roles, shapes).items() if i not in spoilt}
    parameters = {owner: i for i, owner in matches.trained.items()}
    for i in moments:
        if entries[i].owner in owners and i not in spoilt:
            spoilt[i] = f"{owners[entries[i].owner]} (next to it)"
        parameter = parameters.get(entries[i].owner)
        if entries[i].owner in matches.contradicted or (parameter is not None and shapes[parameter] != shapes[i]):
            spoilt[i] = "its parameter has another shape"
        elif (
            parameter is not None and roles[i] == "first moment" and _follows(arrays.flats[i], arrays.flats[parameter])
        ):
            spoilt[i] = "it follows the weights, not their gradients"
    return spoilt


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
    m, w = (on_host(wide(x[::stride])) for x in (moment, parameter))
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
