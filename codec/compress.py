"""`compress`: a state, maybe its parent, and a configuration, to a checkpoint. Pure: same input, same bytes."""

from __future__ import annotations

import dataclasses
import decimal
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..kernels.arrays import is_torch
from ..kernels.floats import FORMATS
from . import container, tree
from .base import CHUNK, Codec, Leaf, Memory, Stored
from .checkpoint import Checkpoint, check_resolved
from .clusters import Clusters
from .config import Config, check_config
from .copies import copies, store_copy
from .errors import BadArgumentError
from .exact import Exact
from .exponent import ExponentDelta
from .importance import second_moments
from .kinds import by_path, check_kinds, kind_of, touched_rows
from .leaves import is_array, read_leaf, same_storage_key
from .moments import FINEST, LogBuckets
from .optimizer import FirstMoment, SecondMoment, grid_step, square_of
from .parallel import map_chunks
from .quantize import Quantize
from .rows import Rows
from .streams import DELTA_STREAMS, SIBLING_STREAMS, STREAMS


def compress(
    state: Any,
    prev: Checkpoint | None = None,
    cfg: Config | None = None,
    *,
    grads: Any = None,
    kinds: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Compress a training state.

    Args:
        state: dict, list or tuple (any nesting, any plain keys) of arrays and plain scalars. Arrays may be torch
            tensors on any device, NumPy arrays, or arrays of any array-API library.
        prev: the parent, resolved: the result is then a delta against it. None: a base.
        cfg: what to do with which array; default `Config()`.
        grads: gradient averages for sensitivity, a tree with the keys of the weights (or the tails of their paths).
        kinds: `{path: layer type or Kind}`, as `kinds(module, optimizer)` gives it; default: guessed from names and
            shapes.

    Returns:
        A resolved checkpoint.

    Raises:
        BadArgumentError: an argument out of range; a state that is no tree; a gradient without a weight.
        UnsupportedLeafError: a leaf that cannot be stored without pickle; the message has its path.
        MissingParentError: `prev` is not resolved.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> w = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
        >>> base = sp.compress({"w": w})
        >>> delta = sp.compress({"w": w * 1.0001}, prev=base)
        >>> delta.is_delta, delta.nbytes < base.nbytes / 5
        (True, True)
    """
    cfg = Config() if cfg is None else check_config(cfg)
    if prev is not None:
        check_resolved(prev)
    check_kinds(kinds)
    nodes, found = tree.flatten(state, is_array)
    nodes, unique = _tie(nodes, found)
    leaves, codecs = _leaves(unique, cfg, kinds, _gradients(grads, found), prev is None or not prev.is_delta)
    leaves = _with_importance(leaves, codecs)
    parents: list[Memory | None] = [None] * len(leaves)
    if prev is not None:
        parents = [prev.parent_memory(leaf.key, leaf.spec) for leaf in leaves]
    stored = _encode(leaves, codecs, parents)
    header = {
        "parent": None if prev is None else prev.identity,
        "raw": sum(leaf.spec.nbytes for leaf in leaves),
        "tree": nodes,
        "arrays": [_record(a, s, p is not None) for a, s, p in zip(leaves, stored, parents, strict=True)],
    }
    data = container.write(header, [piece for s in stored for piece in s.pieces])
    memory = {
        leaf.key: s.memory
        for leaf, s in zip(leaves, stored, strict=True)
        if s.memory is not None and s.stream in DELTA_STREAMS
    }
    return Checkpoint(data, memory)


def _tie(nodes: list[Any], found: list[tree.ArrayNode]) -> tuple[list[Any], list[tree.ArrayNode]]:
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


def _gradients(grads: Any, found: list[tree.ArrayNode]) -> dict[str, Any]:
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


def _leaves(
    found: list[tree.ArrayNode], cfg: Config, kinds: Mapping[str, Any] | None, grads: dict[str, Any], over_base: bool
) -> tuple[list[Leaf], list[Codec]]:
    leaves: list[Leaf] = []
    codecs: list[Codec] = []
    touched = touched_rows((node.path for node in found), kinds, over_base)
    for node in found:
        spec, flat = read_leaf(node.value, node.path)
        kind = kind_of(node.path, spec, kinds)
        codec = cfg.codec_for(node.path, spec, kind)
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
            gradient = _beside(gradient, flat)
        codec = _with_targets(codec, cfg)
        gradient = gradient if isinstance(codec, Quantize) else None
        leaves.append(Leaf(node.path, node.key, spec, kind, flat, gradient, touched=touched.get(node.path)))
        codecs.append(codec)
    return leaves, codecs


def _with_importance(leaves: list[Leaf], codecs: list[Codec]) -> list[Leaf]:
    """Beside each weight that the rate-distortion encoder will code, the second moment of its parameter."""
    wanted = [isinstance(codec, Quantize) and bool(codec.rate) for codec in codecs]
    if not any(wanted):
        return leaves
    pairs = {i: j for i, j in second_moments(leaves).items() if wanted[i] and leaves[j].spec.dtype in FORMATS}
    return [
        dataclasses.replace(leaf, importance=_beside(leaves[pairs[i]].flat, leaf.flat)) if i in pairs else leaf
        for i, leaf in enumerate(leaves)
    ]


def _with_targets(codec: Codec, cfg: Config) -> Codec:
    """The codec under the configuration's error target and rate, where it has none of its own."""
    if isinstance(codec, Quantize):
        max_error = cfg.max_rel_error if codec.max_error is None else codec.max_error
        return dataclasses.replace(codec, max_error=max_error, rate=cfg.rate if codec.rate is None else codec.rate)
    if isinstance(codec, FirstMoment) and codec.step is None:
        codec = dataclasses.replace(codec, step=grid_step(cfg.rate))
    target = cfg.max_rel_error
    if isinstance(codec, ExponentDelta | Clusters | Rows) and codec.max_error is None:
        return dataclasses.replace(codec, max_error=target)
    if target is not None and isinstance(codec, LogBuckets | FirstMoment | SecondMoment):
        if isinstance(codec, LogBuckets) and target >= codec.alpha:
            return codec
        return LogBuckets(min(target, codec.alpha)) if target >= FINEST else Exact()
    return codec


def _beside(gradient: Any, flat: Any) -> Any:
    """A gradient, or another companion, in the library and on the device of its weight."""
    if is_torch(flat):
        import torch

        tensor = gradient if is_torch(gradient) else torch.from_numpy(np.require(gradient, requirements="W"))
        return tensor.to(flat.device)
    if is_torch(gradient):
        return gradient.float().cpu().numpy() if str(gradient.dtype) == "torch.bfloat16" else gradient.cpu().numpy()
    return gradient


def _encode(leaves: list[Leaf], codecs: list[Codec], parents: list[Memory | None]) -> list[Stored]:
    plans: list[Any] = [None] * len(leaves)
    for codec in dict.fromkeys(codecs):
        group = [i for i, c in enumerate(codecs) if c == codec]
        prepared = codec.prepare([leaves[i] for i in group], [parents[i] for i in group])
        for i, plan in zip(group, prepared, strict=True):
            plans[i] = plan

    def one(i: int) -> Stored:
        return codecs[i].encode(leaves[i], parents[i], plans[i])

    siblings = {j: i for i, j in _siblings(leaves).items() if isinstance(codecs[i], FirstMoment)}
    second = set(siblings.values())

    def work(i: int) -> list[tuple[int, Stored]]:
        """Encode an array, and the first moment that stands beside it while its decoded values are at hand."""
        stored = one(i)
        done = [(i, dataclasses.replace(stored, decoded=None))]
        if i in siblings:
            beside = siblings[i]
            square = square_of(_decoded(leaves[i], stored, parents[i]), leaves[i].spec)
            leaf = dataclasses.replace(leaves[beside], sibling=square)
            first = codecs[beside].encode(leaf, parents[beside], plans[beside])
            done.append((beside, dataclasses.replace(first, sibling=i) if first.stream in SIBLING_STREAMS else first))
        return done

    copied = copies(leaves, codecs)
    # Large arrays one after another, each on all cores by its chunks; small ones beside each other.
    order = [i for i in range(len(leaves)) if i not in second and i not in copied]
    results: dict[int, Stored] = {}
    for done in map_chunks(work, [i for i in order if leaves[i].spec.size <= CHUNK]):
        results.update(done)
    for i in order:
        if leaves[i].spec.size > CHUNK:
            results.update(work(i))
    for i, j in copied.items():
        exact = results[j].measure == "exact"
        results[i] = store_copy(leaves[i], leaves[j], j, None if exact else _decoded(leaves[j], results[j], parents[j]))
    return [results[i] for i in range(len(leaves))]


def _siblings(leaves: list[Leaf]) -> dict[int, int]:
    """For each first moment the number of the second moment beside it: same place and shape, a dtype grids take."""
    seconds = {(leaf.path.rpartition("/")[0], leaf.spec): j for j, leaf in _moments(leaves, "second moment")}
    found = {}
    for i, leaf in _moments(leaves, "first moment"):
        j = seconds.get((leaf.path.rpartition("/")[0], leaf.spec))
        if j is not None and leaf.spec.dtype in ("float32", "bfloat16"):
            found[i] = j
    return found


def _moments(leaves: list[Leaf], role: str) -> list[tuple[int, Leaf]]:
    return [(i, leaf) for i, leaf in enumerate(leaves) if leaf.kind.role == role]


def _decoded(leaf: Leaf, stored: Stored, parent: Memory | None) -> Any:
    """An array as a reader of the file will see it, flat on the host."""
    if stored.decoded is not None:
        return stored.decoded()
    memory = stored.memory
    if memory is None:
        memory = STREAMS[stored.stream](leaf.spec, stored.meta, [memoryview(p) for p in stored.pieces], parent, None)
    return memory.values(leaf.spec)


def _rounded_up(error: float) -> float:
    """Three digits, never below the error met."""
    return float(decimal.Context(prec=3, rounding=decimal.ROUND_CEILING).create_decimal_from_float(min(error, 1e300)))


def _record(leaf: Leaf, stored: Stored, has_parent: bool) -> dict[str, Any]:
    """A leaf's header record; what has its default value is left out."""
    record: dict[str, Any] = {
        "d": leaf.spec.dtype,
        "s": list(leaf.spec.shape),
        "f": stored.stream,
        "b": [len(p) for p in stored.pieces],
    }
    if leaf.spec.library != "torch":
        record["l"] = leaf.spec.library
    if stored.meta:
        record["m"] = stored.meta
    if stored.measure != "exact":
        record["q"] = stored.measure
        record["e"] = _rounded_up(stored.error)
    if stored.note:
        record["n"] = stored.note
    if has_parent and stored.stream in DELTA_STREAMS:
        record["p"] = True
    if stored.sibling is not None:
        record["v"] = stored.sibling
    return record
