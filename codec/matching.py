"""Which codec each array of a state gets: kinds, gradients and targets, before anything is encoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..kernels.arrays import is_torch
from ..kernels.floats import FORMATS
from .base import CHUNK, Codec, Leaf
from .config import Config, warn_of_unmatched
from .embeddings.rows import DTYPES, Rows
from .errors import BadArgumentError
from .lossless.exact import Exact
from .moments.clusters import Clusters
from .moments.firstmoment import LARGEST_ERROR, FirstMoment
from .moments.logbuckets import LogBuckets
from .moments.secondmoment import SecondMoment
from .opened import Opened, entries
from .state.kinds import (
    TINY,
    Kind,
    by_path,
    guess,
    kinds_of,
    no_moments,
    subtracted,
    touched_rows,
    unowned,
    without_root,
)
from .state.leaves import read_leaf
from .weights.exponent import ExponentDelta
from .weights.importance import second_moments, squared
from .weights.quantize import Quantize

_TARGETED = (Clusters, ExponentDelta, FirstMoment, LogBuckets, Rows, SecondMoment)


def matched(opened: Opened, cfg: Config) -> tuple[list[Leaf], list[Codec]]:
    """Every array with its kind and touched rows, a quantized one with its gradient and earlier values, and beside it
    the codec that will encode it.

    Args:
        opened: the state.
        cfg: whose rules and targets hold.

    Raises:
        BadArgumentError: a gradient or earlier values of another shape than their weight, or of no float dtype.
        UnsupportedLeafError: an array that cannot be stored.
    """
    found, kinds = opened.arrays, opened.kinds
    warn_of_unmatched(cfg.rules, [node.path for node in found])
    # Over a base, if over anything, the rows touched since the base are those that count.
    over_base = opened.prev is None or not opened.prev.is_delta
    leaves: list[Leaf] = []
    codecs: list[Codec] = []
    touched = touched_rows((node.path for node in found), kinds, over_base)
    read = [read_leaf(node.value, node.path) for node in found]
    told = kinds_of([node.path for node in found], [spec for spec, _ in read], kinds)
    for node, (spec, flat), kind in zip(found, read, told, strict=True):
        leaves.append(Leaf(node.path, node.key, spec, kind, flat, None, touched=touched.get(node.path)))
    leaves = _by_values(leaves, kinds)
    gradient_of = entries(opened.grads, found)
    earlier_of = entries({} if opened.earlier is None else opened.earlier.weights, found)
    for i, (node, leaf) in enumerate(zip(found, leaves, strict=True)):
        codec = with_targets(Exact() if node.exact else cfg.codec_for(node.path, leaf.spec, leaf.kind), cfg)
        codecs.append(codec)
        gradient, before = _companion(leaf, gradient_of, "grads"), _companion(leaf, earlier_of, "earlier")
        if isinstance(codec, Quantize):
            leaves[i] = dataclasses.replace(leaf, gradient=gradient, earlier=before)
    return leaves, codecs


def _companion(leaf: Leaf, entry: Callable[[str], tuple[str, Any] | None], name: str) -> Any:
    """What stands beside a weight in an argument, flat and where the weight is; None where there is nothing for it."""
    match = entry(leaf.path) if leaf.kind.role == "weight" else None
    if match is None:
        return None
    path = f"{name}/{match[0]}"
    spec, values = read_leaf(match[1], path)
    if spec.shape != leaf.spec.shape:
        raise BadArgumentError(f"{leaf.path}: {path} has shape {spec.shape}, not {leaf.spec.shape}")
    if spec.dtype not in FORMATS:
        raise BadArgumentError(f"{leaf.path}: {path} has dtype {spec.dtype}; one of {', '.join(FORMATS)} is needed")
    return beside(values, leaf.flat)


def _by_values(leaves: list[Leaf], told: Mapping[str, Any] | None) -> list[Leaf]:
    """The kinds that names gave, where values or what stands beside tell better: no moments, and exact moments."""
    paths, kinds = [leaf.path for leaf in leaves], [leaf.kind for leaf in leaves]
    for i in no_moments(paths, kinds, lambda i: leaves[i].spec.dtype in FORMATS and has_negative(leaves[i].flat)):
        kinds[i] = without_root(paths[i], kinds[i])
    for i, role in unowned(paths, kinds).items():
        match = by_path(told, paths[i]) if told else None
        if match is None or not isinstance(match[1], Kind):
            kinds[i] = dataclasses.replace(kinds[i], role=role)
    for i in subtracted(paths, kinds, lambda j, i: _is_variance(leaves[j], leaves[i])):
        kinds[i] = dataclasses.replace(kinds[i], role="state")
    return [
        leaf if leaf.kind is kind else dataclasses.replace(leaf, kind=kind)
        for leaf, kind in zip(leaves, kinds, strict=True)
    ]


def has_negative(flat: Any) -> bool:
    """Whether some value is below zero; of weights the first chunk tells."""
    return any(bool((flat[start : start + CHUNK] < 0).any()) for start in range(0, flat.shape[0], CHUNK))


def _is_variance(second: Leaf, first: Leaf) -> bool:
    """Whether `v >= m**2` for all elements, to what rounding to bfloat16 may have done."""
    if second.spec.shape != first.spec.shape or {second.spec.dtype, first.spec.dtype} - FORMATS.keys():
        return False
    for start in range(0, second.spec.size, CHUNK):
        v, m = (_wide(x.flat[start : start + CHUNK]) for x in (second, first))
        if bool((beside(m * m, v) > (1 + 2.0**-6) * v + 1e-30).any()):
            return False
    return True


def _wide(x: Any) -> Any:
    """As float64, in its library."""
    return x.double() if is_torch(x) else x.astype(np.float64)


def overlooked(leaf: Leaf, codec: Codec, cfg: Config, kinds: Mapping[str, Any] | None) -> str:
    """Why an array is kept as it is where that may surprise; or "".

    A second moment from which the square of an average is subtracted; a table that may be an embedding, under rules
    that quantize embeddings by rows.
    """
    if leaf.kind.role == "state" and leaf.spec.dtype in FORMATS and guess(leaf.path, leaf.spec).role == "second moment":
        return "exact: an update takes the square of an average from it" if not has_negative(leaf.flat) else ""
    shape = leaf.spec.shape
    tall = len(shape) == 2 and shape[0] > shape[1] and leaf.spec.size >= TINY and leaf.spec.dtype in DTYPES
    if not (tall and isinstance(codec, Exact) and leaf.kind.role == "weight" and leaf.kind.layer == "linear"):
        return ""
    by_rows = any(r.match == "embedding" and isinstance(r.codec, Rows) and not r.codec.lossless for r in cfg.rules)
    if not by_rows or (kinds and by_path(kinds, leaf.path)):
        return ""
    return "exact: not known for an embedding, by its name or by kinds"


def with_targets(codec: Codec, cfg: Config) -> Codec:
    """The codec under the configuration's error target and rate, where it has none of its own."""
    if isinstance(codec, Quantize):
        max_error = cfg.max_rel_error if codec.max_error is None else codec.max_error
        return dataclasses.replace(codec, max_error=max_error, rate=cfg.rate if codec.rate is None else codec.rate)
    if isinstance(codec, FirstMoment) and codec.max_error is None and (cfg.max_rel_error or 1) > LARGEST_ERROR:
        return codec
    if isinstance(codec, _TARGETED) and codec.max_error is None:
        return dataclasses.replace(codec, max_error=cfg.max_rel_error)
    return codec


def with_importance(leaves: list[Leaf], wanted: Sequence[bool]) -> list[Leaf]:
    """Beside each weight that the rate-distortion encoder will code, the second moment of its parameter.

    Where none of them has one, the squares of the gradients that were given: an estimate of the same, from few batches.

    Args:
        leaves: all arrays of a state.
        wanted: which of them the encoder will code.
    """
    if not any(wanted):
        return leaves
    pairs = {i: j for i, j in second_moments(leaves).items() if wanted[i] and leaves[j].spec.dtype in FORMATS}
    if not pairs:
        squares = squared([leaf.gradient if want else None for leaf, want in zip(leaves, wanted, strict=True)])
        return [
            leaf if square is None else dataclasses.replace(leaf, importance=square)
            for leaf, square in zip(leaves, squares, strict=True)
        ]
    return [
        dataclasses.replace(leaf, importance=beside(leaves[pairs[i]].flat, leaf.flat)) if i in pairs else leaf
        for i, leaf in enumerate(leaves)
    ]


def beside(gradient: Any, flat: Any) -> Any:
    """A gradient, or another companion, in the library and on the device of its weight."""
    if is_torch(flat):
        import torch

        tensor = gradient if is_torch(gradient) else torch.from_numpy(np.require(gradient, requirements="W"))
        return tensor.to(flat.device)
    if is_torch(gradient):
        return gradient.float().cpu().numpy() if str(gradient.dtype) == "torch.bfloat16" else gradient.cpu().numpy()
    return gradient
