"""Names: what path and shape alone say of an array; names of moments and optimizers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from .kind import TINY

if TYPE_CHECKING:
    from ..state.leaves import LeafSpec

FIRST = {"exp_avg", "momentum_buffer", "momentum", "exp_avg_slow", "trace", "mu", "m"}
"""Names of averages in the unit of a gradient or an update."""
SECOND = {"exp_avg_sq", "square_avg", "acc_delta", "nu", "v"}
"""Names of averages of squares."""
_NORM = re.compile(r"(^|[._/])(\w*norm\w*|ln|ln_?\w|bn|bn\d+|running_mean|running_var)([._/]|$)", re.IGNORECASE)
_EMBEDDING = re.compile(r"(^|[._/])(\w*emb\w*|wte|wpe|tok\w*)([._/]|$)", re.IGNORECASE)
_ATTENTION = re.compile(r"(^|[._/])(\w*attn\w*|\w*attention\w*|[qkvo]_proj|qkv\w*|in_proj\w*)([._/]|$)", re.IGNORECASE)
_BIAS = re.compile(r"(^|_)bias(_|$)")
_OPTIMIZER = (
    r"(?:[^/]*optim(?:i[sz]er)?s?|(?:[^/]*[^/a-z])?opt|optax)(?:_?states?)?"
    r"(?:[^/a-z][^/]*|(?-i:[A-Z])(?:[^/a-z][^/]*)?)?"
)
"""A key that holds an optimizer: "opt", "optG", "optimisers", "my_optimizer_0", "optax_state"; not "optical"."""
OPTIMIZER = re.compile(rf"(?!opt/(?:.*/)?(?:layers?|blocks?)/){_OPTIMIZER}(?=/|$)", re.IGNORECASE)
"""Matches at the start of a component of a path. A model called "opt" (with layers or blocks) is not an optimizer."""

_WEIGHT = re.compile(
    r"((in_proj_|out_proj_|[qkv]_proj_)?weight(_(ih|hh|hr)(_l\d+(_reverse)?)?|_v|_orig)?"
    r"|(recurrent_|depthwise_|pointwise_)?kernel|embeddings?)"
)
"""Last names that torch, Flax and Keras give to the weights of layers, and to nothing else."""
_PARAMETRIZED = re.compile(r"parametrizations\.(\w+_)?weight\.original\d*$")
_PLACES = re.compile(
    r"(data|dataset|loaders?|data_?loaders?|samplers?|replay\w*|(\w+_)?buffers?|(lr_?)?schedul\w*|rng\w*|generators?"
    r"|more|position|loops|callbacks|(\w+_)?scaler|(\w+_)?normali[sz]ers?|stats|metrics|train_state|hyper_?param\w*)",
    re.IGNORECASE,
)
"""Keys near the root of a state that hold its other parts: data positions, schedulers, random-number states."""
_AVERAGE = re.compile(
    r"((\w*_)?ema(_\w+)?|(\w*_)?swa(_\w+)?|(\w*_)?polyak(_\w+)?|averages?|averaged(_\w+)?|shadow(_\w+)?|teacher(_\w+)?"
    r"|target(_\w+)?|(\w*_)?slow)",
    re.IGNORECASE,
)
"""Keys near the root of a state that hold an average or a late copy of the weights."""
_CODEBOOK = re.compile(r"(^|[._/])(\w*codebooks?\w*|\w*quanti[sz]e\w*|r?vq\w*)([._/]|$)", re.IGNORECASE)
"""Vector quantizers: their codebooks follow averages, not gradients."""
_MODELS = frozenset({"model", "model_state", "model_state_dict", "module", "net", "network", "params", "state_dict"})
"""Keys at the root of states that hold their model."""
_DEPTH = 2
_KNOWN = 1 << 16
"""Paths whose answers are kept: the saves of a training ask for the same ones."""


@dataclass(frozen=True, slots=True)
class Named:
    """Properties of an array by its path and its shape alone.

    Args:
        layer: layer type.
        is_statistic: whether it is a running statistic of a norm.
        is_other_part: whether it is in a part of the state without weights, such as a loader or scheduler.
        is_average: whether it is in an average or a delayed copy of the model.
        may_be_weight: whether it has the name or the shape of a layer's weights.
        is_codebook: whether it belongs to a vector quantizer.
    """

    layer: str
    is_statistic: bool
    is_other_part: bool
    is_average: bool
    may_be_weight: bool
    is_codebook: bool


def named(paths: Sequence[str], specs: Sequence[LeafSpec]) -> list[Named]:
    """Return what paths and shapes say of the arrays of a state.

    torch's `AveragedModel` counts its updates next to its weights: they are an average by any key.
    """
    found = [_named(path, spec) for path, spec in zip(paths, specs, strict=True)]
    counts = [path for path in paths if path.endswith("n_averaged") and last_name(path) == "n_averaged"]
    averages = tuple(path.removesuffix("n_averaged") + "module." for path in counts)
    return [
        replace(one, is_average=True) if path.startswith(averages) else one
        for path, one in zip(paths, found, strict=True)
    ]


@lru_cache(_KNOWN)
def _named(path: str, spec: LeafSpec) -> Named:
    last = last_name(path)
    return Named(
        layer_of(path, spec),
        last in ("running_mean", "running_var"),
        is_other_part(path),
        is_average(path),
        has_weight_name(path) or could_be_matrix(spec),
        is_codebook(path),
    )


def last_name(path: str) -> str:
    """Return the last name of a path.

    Example:
        >>> last_name("model/layers.0.fc.weight")
        'weight'
    """
    return re.split(r"[./]", path)[-1]


def layer_of(path: str, spec: LeafSpec) -> str:
    """Return the layer type of an array by its name and shape."""
    dims = len(spec.shape)
    last = last_name(path)
    if _NORM.search(path):
        return "norm"
    if _BIAS.search(last):
        return "bias"
    if dims <= 1 and last in ("weight", "gamma", "beta", "scale", "g") and spec.size <= 8 * TINY:
        return "norm"
    if _EMBEDDING.search(path) and dims == 2:
        return "embedding"
    if _ATTENTION.search(path) and dims >= 2:
        return "attention"
    if dims >= 3:
        return "convolution"
    return "linear" if dims == 2 else "other"


def is_norm(name: str) -> bool:
    """Return whether a name is that of a norm or its statistics."""
    return _NORM.search(name) is not None


def is_bias(name: str) -> bool:
    """Return whether a last name is that of a bias."""
    return _BIAS.search(name) is not None


def is_attention(name: str) -> bool:
    """Return whether a name is that of an attention layer's projection."""
    return _ATTENTION.search(name) is not None


def has_weight_name(path: str) -> bool:
    """Return whether the last name is one that only weights of layers have.

    Example:
        >>> [has_weight_name(p) for p in ("fc.weight", "rnn.weight_ih_l0", "freqs", "vq.codebook.weight")]
        [True, True, False, False]
    """
    named = _WEIGHT.fullmatch(last_name(path)) or _PARAMETRIZED.search(path)
    return named is not None and not is_codebook(path)


def is_codebook(path: str) -> bool:
    """Return whether a path is that of a vector quantizer's array."""
    return _CODEBOOK.search(path) is not None


def is_other_part(path: str) -> bool:
    """Return whether a path is in a part without weights, such as a loader or scheduler.

    Example:
        >>> is_other_part("more/replay/weight"), is_other_part("model/position.weight")
        (True, False)
    """
    return _near_root(_PLACES, path)


def is_model(tree: str) -> bool:
    """Return whether a tree stands at the root of a state, under the key of a model.

    Example:
        >>> is_model("model/"), is_model("best_model/"), is_model("best/model/")
        (True, False, False)
    """
    return tree.rstrip("/") in _MODELS


def is_average(path: str) -> bool:
    """Return whether a path is in an average or a delayed copy of the model, by its key.

    Example:
        >>> is_average("ema/fc.weight"), is_average("model/fc.weight")
        (True, False)
    """
    return _near_root(_AVERAGE, path)


def _near_root(pattern: re.Pattern[str], path: str) -> bool:
    keys = [part for part in path.split("/")[:-1] if not part.isdigit() and part != "ranks"]
    return any(pattern.fullmatch(part) for part in keys[:_DEPTH])


def could_be_matrix(spec: LeafSpec) -> bool:
    """Return whether a shape is that of a layer's weights: two axes of 16 or more.

    A table of points or splats has one short record a row, and an error in it moves a point.
    """
    return len(spec.shape) >= 2 and sorted(spec.shape)[-2] >= 16
