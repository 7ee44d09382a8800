"""`compress`: a state, maybe its parent, and a configuration, to a checkpoint. Pure: same input, same bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .arithmetic import own_arithmetic
from .base import Codec, Leaf, Memory, Prepare, Stored, rounded_error
from .checkpoint import Checkpoint
from .config import Config, check_config
from .copies import copies, keeps_promise, store_copy
from .format import container
from .format.fields import parts_of
from .matching import matched, overlooked, with_importance
from .moments.firstmoment import FirstMoment, square_of
from .moments.siblings import siblings
from .opened import Opened
from .parallel import map_arrays
from .streams import STREAMS
from .weights.drift import with_lead
from .weights.quantize import Quantize


def compress(
    state: Any,
    prev: Checkpoint | None = None,
    cfg: Config | None = None,
    *,
    grads: Any = None,
    kinds: Mapping[str, Any] | None = None,
    earlier: Any = None,
) -> Checkpoint:
    """Compress a training state.

    Args:
        state: dict, list or tuple (any nesting, any plain keys) of arrays and plain scalars. Arrays may be torch
            tensors on any device, NumPy arrays, or arrays of any array-API library.
        prev: the parent, resolved: the result is then a delta against it. None: a base.
        cfg: what to do with which array; default `Config()`.
        grads: gradient averages for sensitivity, a tree with the keys of the weights (or the tails of their paths).
            With `Config.rate`, and no second moments in the state, their squares stand in for these.
        kinds: `{path: layer type or Kind}`, as `kinds(module, optimizer)` gives it; default: guessed from names and
            shapes. Paths that the state does not have are passed over, unless it has none of them.
        earlier: the weights as they were ten checkpoints ago or so, or a slow average of them: a tree with their keys
            (or the tails of their paths), or an `Earlier`, which says when that was. Levels that the rate-distortion
            encoder keeps back lag behind the training; each weight is extrapolated along its way since then to make up
            for that (`codec.weights.aim`). `Store` and `Saver` see to it themselves.

    Returns:
        A resolved checkpoint.

    Raises:
        BadArgumentError: an argument out of range; a state that is no tree; a gradient or earlier values without a
            weight; kinds of which no path is that of an array.
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
    return compressed(Opened.of(state, prev, kinds, grads, earlier), cfg)


@own_arithmetic()
def compressed(opened: Opened, cfg: Config, prepare: Mapping[Codec, Prepare] | None = None) -> Checkpoint:
    """`compress`, of a state that is open.

    Args:
        opened: the state.
        cfg: as `compress` has it.
        prepare: what plans arrays in place of a codec's own `prepare`, where that would have to know more than this
            state.
    """
    prev, kinds = opened.prev, opened.kinds
    leaves, codecs = matched(opened, cfg)
    leaves = with_lead(leaves, codecs, opened.earlier)
    leaves = with_importance(leaves, [isinstance(codec, Quantize) and bool(codec.rate) for codec in codecs])
    parents = opened.parents(leaves)
    stored = _encode(leaves, codecs, parents, prepare or {})
    for i, (leaf, codec) in enumerate(zip(leaves, codecs, strict=True)):
        if not stored[i].note and (why := overlooked(leaf, codec, cfg, kinds)):
            stored[i] = dataclasses.replace(stored[i], note=why)
    header = {
        "parent": None if prev is None else prev.identity,
        "raw": sum(leaf.spec.nbytes for leaf in leaves),
        "tree": opened.nodes,
        "arrays": [_record(a, s, p is not None) for a, s, p in zip(leaves, stored, parents, strict=True)],
    }
    data = container.write(header, [piece for s in stored for piece in s.pieces])
    memory = {
        leaf.key: s.memory
        for leaf, s in zip(leaves, stored, strict=True)
        if s.memory is not None and STREAMS[s.stream].has_deltas
    }
    return Checkpoint(data, memory)


def _encode(
    leaves: list[Leaf], codecs: list[Codec], parents: list[Memory | None], prepare: Mapping[Codec, Prepare]
) -> list[Stored]:
    plans: list[Any] = [None] * len(leaves)
    for codec in dict.fromkeys(codecs):
        group = [i for i, c in enumerate(codecs) if c == codec]
        prepared = prepare.get(codec, codec.prepare)([leaves[i] for i in group], [parents[i] for i in group])
        for i, plan in zip(group, prepared, strict=True):
            plans[i] = plan

    def one(i: int) -> Stored:
        return codecs[i].encode(leaves[i], parents[i], plans[i])

    firsts = {j: i for i, j in siblings(leaves).items() if isinstance(codecs[i], FirstMoment)}
    second = set(firsts.values())

    def work(i: int) -> list[tuple[int, Stored]]:
        """Encode an array, and the first moment that stands beside it while its decoded values are at hand."""
        stored = one(i)
        done = [(i, dataclasses.replace(stored, decoded=None))]
        if i in firsts:
            beside = firsts[i]
            square = square_of(_decoded(leaves[i], stored, parents[i]), leaves[i].spec)
            leaf = dataclasses.replace(leaves[beside], sibling=square)
            first = codecs[beside].encode(leaf, parents[beside], plans[beside])
            done.append((beside, dataclasses.replace(first, sibling=i) if STREAMS[first.stream].beside else first))
        return done

    copied = copies(leaves, codecs)
    order = [i for i in range(len(leaves)) if i not in second and i not in copied]
    results = {i: stored for done in map_arrays(work, order, lambda i: leaves[i].spec.size) for i, stored in done}
    for i, j in copied.items():
        exact = results[j].measure == "exact"
        copy = store_copy(leaves[i], leaves[j], j, None if exact else _decoded(leaves[j], results[j], parents[j]))
        results[i] = copy if keeps_promise(copy, leaves[i], leaves[j], codecs[i]) else one(i)
    return [results[i] for i in range(len(leaves))]


def _decoded(leaf: Leaf, stored: Stored, parent: Memory | None) -> Any:
    """An array as a reader of the file will see it, flat on the host."""
    if stored.decoded is not None:
        return stored.decoded()
    memory = stored.memory
    if memory is None:
        pieces = [memoryview(b"".join(parts_of(piece))) for piece in stored.pieces]
        memory = STREAMS[stored.stream].decode(leaf.spec, stored.meta, pieces, parent, None)
    return memory.values(leaf.spec)


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
        record["e"] = rounded_error(stored.error, up=True)
    if stored.note:
        record["n"] = stored.note
    if has_parent and STREAMS[stored.stream].has_deltas:
        record["p"] = True
    if stored.sibling is not None:
        record["v"] = stored.sibling
    return record
