"""`compress`: inputs -> plan -> encode -> container. Pure: same input, same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Codec, Prepare, Stored, rounded_error
from .checkpoint import Checkpoint
from .config import Config
from .encode import Economy, encode
from .evidence.kind import REASONS
from .format.schema import StoredArray, StoredGroup, groups_to_json
from .inputs import Inputs
from .named_presets import check_config
from .parallel import own_arithmetic
from .plan import ArrayPlan, plan
from .records import Records
from .streams import STREAMS

_NUMBERS = {reason: number for number, reason in enumerate(REASONS)}


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
            then (`codec.weights.level_assignment`). `Store` and `Saver` keep the average themselves.

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
    planned: list[ArrayPlan] | None = None,
    economy: Economy | None = None,
) -> Checkpoint:
    """Compress checked and flattened arguments of `compress`.

    Args:
        inputs: the arguments of `compress`.
        cfg: as `compress` has it.
        prepare: what prepares arrays in place of a codec's own `prepare`, where that needs to know more than this
            state.
        planned: the plan of these inputs; None: not made yet.
        economy: how memory is saved; None: not at all.
    """
    planned = plan(inputs, cfg) if planned is None else planned
    encoded = encode(planned, prepare or {}, economy)
    stored = [encoded.arrays[i] for i in range(len(planned))]
    parent = None if inputs.prev is None else inputs.prev.identity
    numbers, texts = numbered([one.why for one in planned])
    arrays = [record_of(*one) for one in zip(planned, stored, numbers, strict=True)]
    coded = sorted(encoded.groups, key=lambda group: group.members[0])
    groups = [StoredGroup(g.members, g.stream, [len(p) for p in g.pieces], g.meta, g.is_delta) for g in coded]
    header = {
        "parent": parent,
        "raw": sum(one.leaf.spec.nbytes for one in planned),
        "tree": inputs.nodes,
        "arrays": [one.to_json() for one in arrays],
        "groups": groups_to_json(groups),
    }
    if texts:
        header["why"] = texts
    keys = [(one.leaf.path, one.leaf.key) for one in planned]
    records = Records.of(keys, [one.leaf.spec for one in planned], arrays, groups, texts)
    pieces = [piece for group in coded for piece in group.pieces]
    reference = {
        one.leaf.key: own.reference
        for one, own in zip(planned, stored, strict=True)
        if own.reference is not None and STREAMS[own.stream].has_deltas
    }
    flats = [one.leaf.flat for one in planned]
    is_spooled = economy is not None and economy.spool is not None
    return Checkpoint.written(header, records, pieces, reference, arrays=flats, is_spooled=is_spooled)


def numbered(reasons: list[str]) -> tuple[list[int], list[str]]:
    """Return the number of each reason, and the texts that have no fixed number.

    A number of `len(REASONS)` or more counts into the texts.

    Example:
        >>> numbered(["exact: norm", "rule 'head.*'", "rule 'head.*'"])
        ([20, 39, 39], ["rule 'head.*'"])
    """
    others = list(dict.fromkeys(reason for reason in reasons if reason not in _NUMBERS))
    table = _NUMBERS | {reason: len(REASONS) + at for at, reason in enumerate(others)}
    return [table[reason] for reason in reasons], others


def record_of(planned: ArrayPlan, stored: Stored, reason: int) -> StoredArray:
    """Return the header record of an array."""
    spec, stream = planned.leaf.spec, STREAMS[stored.stream]
    codec = None if planned.codec.id == stream.codec else planned.codec.id
    error = 0.0 if stored.measure == "exact" else rounded_error(stored.error, up=True)
    layout, note = (spec.dtype, spec.shape, spec.order, spec.library), stored.note or planned.note
    return StoredArray(*layout, codec, measure=stored.measure, error=error, note=note, reason=reason, pair=stored.pair)
