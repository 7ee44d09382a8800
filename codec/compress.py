"""`compress`: inputs -> plan -> encode -> container. Pure: same input, same bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .arithmetic import own_arithmetic
from .base import Codec, Prepare, Stored, rounded_error
from .checkpoint import Checkpoint
from .config import Config
from .encode import encode
from .evidence.reasons import numbered
from .format.schema import StoredArray, StoredGroup
from .inputs import Inputs
from .named_presets import check_config
from .plan import ArrayPlan, plan, remark
from .streams import STREAMS


def compress(
    state: Any,
    prev: Checkpoint | None = None,
    cfg: Config | str | None = None,
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
        cfg: the codec of each array, error targets and the rate, or the name of a preset such as "lossless"; default
            `Config()`.
        grads: gradient averages for sensitivity, a tree with the keys of the weights (or the tails of their paths).
            With `Config.rate`, their squares replace second moments that the state does not have.
        kinds: `{path: layer type or Kind}`, as `kinds(module, optimizer)` gives it. Without it, an array changes only
            if a rule names it or an optimizer entry belongs to it (`docs/lossy-or-exact.md`). Of several parts of a
            state that have the names of the kinds, the kinds are those of one; see there. Paths that the state does
            not have are ignored, unless all are missing.
        earlier: the weights of about ten checkpoints ago, or a slow average of them: a tree with their keys (or the
            tails of their paths), or `PastWeights`, which also gives the number of steps since then. Levels that the
            encoder keeps to save bits lag behind the training, so each weight is extrapolated along its change since
            then (`codec.weights.drift_gain`). `Store` and `Saver` keep the average themselves.

    Returns:
        A resolved checkpoint.

    Raises:
        BadArgumentError: an argument is out of range; the state is not a tree; a gradient or earlier values have no
            weight; no path of `kinds` is that of an array.
        UnsupportedLeafError: a leaf that cannot be stored without pickle; the message has its path.
        MissingParentError: `prev` is not resolved.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> w = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
        >>> kinds = {"weight": "linear"}
        >>> base = sp.compress({"weight": w}, kinds=kinds)
        >>> delta = sp.compress({"weight": w * 1.0001}, prev=base, kinds=kinds)
        >>> delta.is_delta, delta.nbytes < base.nbytes / 5
        (True, True)
    """
    cfg = Config() if cfg is None else check_config(cfg)
    return compress_inputs(Inputs.of(state, prev, kinds, grads, earlier), cfg)


@own_arithmetic()
def compress_inputs(
    inputs: Inputs,
    cfg: Config,
    prepare: Mapping[Codec, Prepare] | None = None,
    planned: Sequence[ArrayPlan] | None = None,
) -> Checkpoint:
    """Compress checked and flattened arguments of `compress`.

    Args:
        inputs: the arguments of `compress`.
        cfg: as `compress` has it.
        prepare: what prepares arrays in place of a codec's own `prepare`, where that needs to know more than this
            state.
        planned: the plan of these inputs; None: not made yet.
    """
    planned = plan(inputs, cfg) if planned is None else planned
    encoded = encode(planned, prepare or {})
    stored = [encoded.arrays[i] for i in range(len(planned))]
    notes = [own.note or remark(one, cfg, inputs.kinds) for one, own in zip(planned, stored, strict=True)]
    numbers, others = numbered([one.why for one in planned])
    grouped = {i for bundle in encoded.bundles for i in bundle.members}
    header = {
        "parent": None if inputs.prev is None else inputs.prev.identity,
        "raw": sum(one.leaf.spec.nbytes for one in planned),
        "tree": inputs.nodes,
        "arrays": [
            record_of(*one, is_bundled=i in grouped).to_json()
            for i, one in enumerate(zip(planned, stored, notes, numbers, strict=True))
        ],
    }
    if encoded.bundles:
        header["bundles"] = [
            StoredGroup(b.members, b.stream, b.meta, [len(piece) for piece in b.pieces], b.is_delta).to_json()
            for b in encoded.bundles
        ]
    if others:
        header["why"] = others
    reference = {
        one.leaf.key: own.reference
        for one, own in zip(planned, stored, strict=True)
        if own.reference is not None and STREAMS[own.stream].has_deltas
    }
    keys = [(one.leaf.path, one.leaf.key) for one in planned]
    pieces = [piece for own in stored for piece in own.pieces]
    pieces += [piece for bundle in encoded.bundles for piece in bundle.pieces]
    return Checkpoint.written(header, keys, pieces, reference)


def record_of(planned: ArrayPlan, stored: Stored, note: str, reason: int, *, is_bundled: bool) -> StoredArray:
    """Return the header record of an array."""
    spec, stream = planned.leaf.spec, STREAMS[stored.stream]
    is_exact = stored.measure == "exact"
    record = StoredArray(
        spec.dtype,
        spec.shape,
        spec.library,
        codec=None if planned.codec.id == stream.codec else planned.codec.id,
        measure=stored.measure,
        error=0.0 if is_exact else rounded_error(stored.error, up=True),
        note=note,
        reason=reason,
        pair=stored.pair,
    )
    if is_bundled:
        return record
    is_delta = planned.parent is not None and stream.has_deltas
    lengths = [len(piece) for piece in stored.pieces]
    return dataclasses.replace(record, stream=stored.stream, meta=stored.meta, lengths=lengths, is_delta=is_delta)
