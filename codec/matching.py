"""Which codec each array of a state gets: ties, kinds, gradients and targets, before anything is encoded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..kernels.arrays import is_torch
from ..kernels.floats import FORMATS
from . import tree
from .base import Codec, Leaf
from .clusters import Clusters
from .config import Config
from .errors import BadArgumentError
from .exact import Exact
from .exponent import ExponentDelta
from .kinds import by_path, kind_of, touched_rows
from .leaves import is_array, read_leaf, same_storage_key
from .moments import LogBuckets
from .optimizer import FirstMoment, SecondMoment, cell_octaves, grid_step
from .quantize import Quantize
from .rows import Rows

_TARGETED = (Clusters, ExponentDelta, FirstMoment, LogBuckets, Rows, SecondMoment)


def tie(nodes: list[Any], found: list[tree.ArrayNode]) -> tuple[list[Any], list[tree.ArrayNode]]:
    """Let array nodes that are the same memory refer to one array."""
    first: dict[Any, int] = {}
    number: list[int] = []
    unique: list[tree.ArrayNode] = []
    for node in found:
        key = same_storage_key(node.value)
        if key is not None and key in first:
            number.append(first[key])
            continue
        if key is not None:
            first[key] = len(unique)
        number.append(len(unique))
        unique.append(node)
    renumbered = [{"a": number[n["a"]]} if isinstance(n, dict) and "a" in n else n for n in nodes]
    return renumbered, unique


def gradients_by_path(grads: Any, found: list[tree.ArrayNode]) -> dict[str, Any]:
    """Gradients by path; each must belong to an array of the state, if only to the second name of a tied one."""
    if grads is None:
        return {}
    _, arrays = tree.flatten(grads, is_array)
    table = {a.path: a.value for a in arrays}
    matches = (by_path(table, node.path) for node in found)
    used = {match[0] for match in matches if match is not None}
    for name in table:
        if name not in used:
            raise BadArgumentError(f"grads/{name}: the state has no such weight")
    return table


def matched(
    found: list[tree.ArrayNode], cfg: Config, kinds: Mapping[str, Any] | None, grads: dict[str, Any], over_base: bool
) -> tuple[list[Leaf], list[Codec]]:
    """Every array with its kind, gradient and touched rows, and beside it the codec that will encode it.

    Args:
        found: the arrays, each once.
        cfg: whose rules and targets hold.
        kinds: as `compress` has them.
        grads: gradients by path, see `gradients_by_path`.
        over_base: whether the parent, if any, is a base: rows touched since the base are then those that count.

    Raises:
        BadArgumentError: a gradient of another shape than its weight, or of no float dtype.
        UnsupportedLeafError: an array that cannot be stored.
    """
    leaves: list[Leaf] = []
    codecs: list[Codec] = []
    touched = touched_rows((node.path for node in found), kinds, over_base)
    for node in found:
        spec, flat = read_leaf(node.value, node.path)
        kind = kind_of(node.path, spec, kinds)
        codec = Exact() if node.exact else cfg.codec_for(node.path, spec, kind)
        gradient = None
        match = by_path(grads, node.path) if grads and kind.role == "weight" else None
        if match is not None:
            grad_spec, gradient = read_leaf(match[1], f"grads/{match[0]}")
            if grad_spec.shape != spec.shape:
                raise BadArgumentError(f"{node.path}: its gradient has shape {grad_spec.shape}, not {spec.shape}")
            if grad_spec.dtype not in FORMATS:
                raise BadArgumentError(
                    f"{node.path}: its gradient has dtype {grad_spec.dtype}; one of {', '.join(FORMATS)} is needed"
                )
            gradient = beside(gradient, flat)
        codec = with_targets(codec, cfg)
        gradient = gradient if isinstance(codec, Quantize) else None
        leaves.append(Leaf(node.path, node.key, spec, kind, flat, gradient, touched=touched.get(node.path)))
        codecs.append(codec)
    return leaves, codecs


def with_targets(codec: Codec, cfg: Config) -> Codec:
    """The codec under the configuration's error target and rate, where it has none of its own."""
    if isinstance(codec, Quantize):
        max_error = cfg.max_rel_error if codec.max_error is None else codec.max_error
        return dataclasses.replace(codec, max_error=max_error, rate=cfg.rate if codec.rate is None else codec.rate)
    if isinstance(codec, FirstMoment) and codec.step is None:
        codec = dataclasses.replace(codec, step=grid_step(cfg.rate))
    if isinstance(codec, SecondMoment) and codec.octaves is None:
        codec = dataclasses.replace(codec, octaves=cell_octaves(cfg.rate))
    if isinstance(codec, _TARGETED) and codec.max_error is None:
        return dataclasses.replace(codec, max_error=cfg.max_rel_error)
    return codec


def beside(gradient: Any, flat: Any) -> Any:
    """A gradient, or another companion, in the library and on the device of its weight."""
    if is_torch(flat):
        import torch

        tensor = gradient if is_torch(gradient) else torch.from_numpy(np.require(gradient, requirements="W"))
        return tensor.to(flat.device)
    if is_torch(gradient):
        return gradient.float().cpu().numpy() if str(gradient.dtype) == "torch.bfloat16" else gradient.cpu().numpy()
    return gradient
