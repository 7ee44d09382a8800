"""`compress`: inputs -> plan -> groups -> encode -> container. Pure: same input, same bytes.

Small arrays of one codec, role and dtype are encoded in groups, others alone. A first moment follows its second
moment, which scales it. A copy is stored as the number of its original.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ..kernels.backend.arrays import is_torch
from .base import Codec, EncodedGroup, GroupCodec, Leaf, Prepare, Reference, Stored, rounded_error
from .checkpoint import Checkpoint
from .config import Config
from .deduplication import keeps_promise, store_copy
from .evidence.kind import REASONS
from .format.fields import parts_of
from .format.ranged import Spool
from .format.schema import StoredArray, StoredGroup, groups_to_json
from .groups import MOST_BYTES, BytesReference, Coded
from .inputs import Inputs
from .moments.firstmoment import FirstMoment, square_of
from .named_presets import check_config
from .parallel import map_arrays, own_arithmetic
from .plan import ArrayPlan, plan
from .records import Records
from .registry import STREAMS
from .weights.planning import SMALL

FEWEST = 8
"""Least number of arrays that are coded together; in a smaller group each array has a stream of its own."""
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


@dataclass(frozen=True, slots=True)
class Encoded:
    """Encoded arrays and groups of a plan.

    Args:
        arrays: stored arrays by number; those of a group of several have no pieces.
        groups: all groups; a large array is a group of one.
    """

    arrays: dict[int, Stored] = field(default_factory=dict)
    groups: list[EncodedGroup] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Economy:
    """Means to save memory while a state is encoded; the bytes are the same.

    Args:
        spool: coded pieces go there at once; None: they stay in memory.
        parent: its references are freed as soon as the arrays are encoded that need them, also in the plan; None: kept.
    """

    spool: Spool | None = None
    parent: Checkpoint | None = None

    def after(self, made: Encoded, planned: list[ArrayPlan]) -> Encoded:
        """Return encoded arrays and groups, with their pieces in the spool."""
        arrays, groups, spool = made.arrays, made.groups, self.spool
        if spool is not None:
            groups = [dataclasses.replace(g, pieces=spool.add(g.pieces)) for g in groups]
            alone = {g.members[0]: g.pieces for g in groups if len(g.members) == 1}
            arrays = {i: dataclasses.replace(own, pieces=alone.get(i, ())) for i, own in arrays.items()}
        if self.parent is not None:
            for i in arrays.keys() - {p.original for p in planned}:
                self.parent.release(planned[i].leaf.key)
                planned[i] = dataclasses.replace(planned[i], parent=None)
        return Encoded(arrays, groups)


def encode(planned: list[ArrayPlan], prepare: Mapping[Codec, Prepare], economy: Economy | None = None) -> Encoded:
    """Encode all arrays of a plan.

    Args:
        planned: the plan of each array.
        prepare: functions to call in place of `Codec.prepare`, by codec.
        economy: how memory is saved; None: not at all.
    """
    encoder = _Encoder(planned, _prepared(planned, prepare))
    jobs = encoder.jobs()
    sizes = [sum(planned[i].leaf.spec.size for i in job) for job in jobs]

    def one(number: int) -> Encoded:
        made = encoder.encode(jobs[number])
        return made if economy is None else economy.after(made, planned)

    done = map_arrays(one, range(len(jobs)), lambda number: sizes[number])
    found = Encoded()
    for part in done:
        found.arrays.update(part.arrays)
        found.groups.extend(part.groups)
    for i, p in enumerate(planned):
        if p.original is not None:
            encoder.copy(i, p.original, found)
    return found


class _Encoder:
    """Encoder of the arrays of a plan in jobs; a job may run in any thread.

    Args:
        planned: the plan of each array.
        prepared: the result of `Codec.prepare` for each array.
    """

    def __init__(self, planned: Sequence[ArrayPlan], prepared: Sequence[Any]) -> None:
        self.planned, self.prepared = planned, prepared
        self.firsts = {
            p.pair: i for i, p in enumerate(planned) if p.pair is not None and isinstance(p.codec, FirstMoment)
        }

    def jobs(self) -> list[list[int]]:
        """Return groups of arrays to encode together, in the order of the state.

        First moments are left out: `encode` encodes them after their second moments.
        """
        paired = set(self.firsts.values())
        groups = planned_groups(self.planned, self.firsts)
        taken = paired.union(*groups)
        alone = [[i] for i, p in enumerate(self.planned) if i not in taken and p.original is None]
        return sorted(groups + alone)

    def encode(self, job: Sequence[int]) -> Encoded:
        """Encode the arrays of a job and then their first moments, which need the decoded values."""
        found = Encoded()
        self._encode([(i, self.planned[i].leaf) for i in job], found)
        following: dict[bool, list[tuple[int, Leaf]]] = {True: [], False: []}
        for i in job:
            if i in self.firsts:
                leaf, first = self.planned[i].leaf, self.planned[self.firsts[i]]
                square = square_of(_decoded(leaf, found.arrays[i], self.planned[i].parent), leaf.spec)
                scaled = dataclasses.replace(first.leaf, pair=square)
                following[groups_of(first.codec, scaled) is not None].append((self.firsts[i], scaled))
        self._encode(following[True], found)
        for one in following[False]:
            self._encode([one], found)
        for i in job:
            if found.arrays[i].decoded is not None:
                found.arrays[i] = dataclasses.replace(found.arrays[i], decoded=None)
            first_number = self.firsts.get(i)
            if first_number is not None and STREAMS[found.arrays[first_number].stream].pair:
                found.arrays[first_number] = dataclasses.replace(found.arrays[first_number], pair=i)
        return found

    def copy(self, number: int, of: int, found: Encoded) -> None:
        """Encode an array as a copy of one that is already encoded."""
        own, original, stored = self.planned[number], self.planned[of], found.arrays[of]
        values = None if stored.measure == "exact" else _decoded(original.leaf, stored, original.parent)
        copy = store_copy(own.leaf, original.leaf, of, values)
        is_kept = keeps_promise(copy, own.leaf, original.leaf, own.codec)
        self._add(number, copy if is_kept else self._alone(number, own.leaf), found)

    def _alone(self, number: int, leaf: Leaf) -> Stored:
        return self.planned[number].codec.encode(leaf, self.planned[number].parent, self.prepared[number])

    def _add(self, number: int, stored: Stored, found: Encoded) -> None:
        """Add an array as a group of one."""
        found.arrays[number] = stored
        is_delta = self.planned[number].parent is not None and STREAMS[stored.stream].has_deltas
        found.groups.append(EncodedGroup([number], stored.stream, stored.meta, stored.pieces, is_delta, ()))

    def _encode(self, arrays: Sequence[tuple[int, Leaf]], found: Encoded) -> None:
        """Encode arrays in groups, and those that belong to no group alone."""
        done: dict[int, Stored | None] = {}
        if len(arrays) > 1:
            numbers = [i for i, _ in arrays]
            plans, parents = [self.prepared[i] for i in numbers], [self.planned[i].parent for i in numbers]
            codec = self.planned[numbers[0]].codec
            made = cast(GroupCodec, codec).encode_group([leaf for _, leaf in arrays], parents, plans)
            done = {numbers[at]: stored for at, stored in made.alone.items()}
            for group in made.groups:
                members = [numbers[at] for at in group.members]
                found.arrays.update(zip(members, group.stored, strict=True))
                # Without the members' decoded values, which would stay in memory until all arrays are encoded.
                found.groups.append(dataclasses.replace(group, members=members, stored=()))
        for i, leaf in arrays:
            if i not in found.arrays:
                stored = done.get(i)
                self._add(i, self._alone(i, leaf) if stored is None else stored, found)


def _prepared(planned: Sequence[ArrayPlan], prepare: Mapping[Codec, Prepare]) -> list[Any]:
    """Return for each array the result of its codec's `prepare` over all arrays of that codec."""
    found: list[Any] = [None] * len(planned)
    groups: dict[Codec, list[int]] = {}
    for i, p in enumerate(planned):
        groups.setdefault(p.codec, []).append(i)
    for codec, group in groups.items():
        leaves, parents = [planned[i].leaf for i in group], [planned[i].parent for i in group]
        for i, one in zip(group, prepare.get(codec, codec.prepare)(leaves, parents), strict=True):
            found[i] = one
    return found


def _decoded(leaf: Leaf, stored: Stored, parent: Reference | None) -> Any:
    """Return an array as a reader of the file will see it, flat on the host."""
    if stored.decoded is not None:
        return stored.decoded()
    reference = stored.reference
    if reference is None:
        pieces = [memoryview(b"".join(parts_of(piece))) for piece in stored.pieces]
        (reference,) = STREAMS[stored.stream].decode(Coded((leaf.spec,), stored.meta, pieces, (parent,)))
    return reference.values(leaf.spec)


def planned_groups(planned: Sequence[ArrayPlan], firsts: dict[int, int]) -> list[list[int]]:
    """Return the groups of arrays to code together, without first moments.

    Raw bytes of a group are at most `MOST_BYTES`. First moments follow their second moments.

    Args:
        planned: the plan of each array.
        firsts: number of the first moment by the number of its second moment.
    """
    paired = set(firsts.values())
    able = [i for i, p in enumerate(planned) if i not in paired and p.original is None]
    some = [planned[i] for i in able]
    following = [planned[firsts[i]] if i in firsts else None for i in able]
    firsts_of = [None if first is None else (first.codec, first.leaf.spec.dtype) for first in following]
    found = grouped([p.leaf for p in some], [p.codec for p in some], [p.parent for p in some], firsts_of)
    return [[able[at] for at in group] for group in found]


def grouped(
    leaves: Sequence[Leaf],
    codecs: Sequence[Codec],
    parents: Sequence[Reference | None],
    also: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Return the groups of arrays to code together, each at most `MOST_BYTES` of raw bytes.

    Args:
        leaves: the arrays.
        codecs: the codec of each.
        parents: what a delta of each is coded against, or None.
        also: what the arrays of a group have in common in addition; None: nothing.
    """
    keys = [_key(*one) for one in zip(leaves, codecs, parents, strict=True)]
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        if key is not None:
            groups.setdefault((key, None if also is None else also[i]), []).append(i)
    large = [group for group in groups.values() if len(group) >= FEWEST]
    return [part for group in large for part in _within([leaf.spec.nbytes for leaf in leaves], group)]


def _within(sizes: Sequence[int], group: list[int]) -> list[list[int]]:
    """Divide a group into parts of about equal size."""
    total = sum(sizes[i] for i in group)
    wanted = -(-total // (-(-total // (MOST_BYTES - SMALL))))
    found: list[list[int]] = [[]]
    size = 0
    for i in group:
        if size >= wanted:
            found.append([])
            size = 0
        found[-1].append(i)
        size += sizes[i]
    return found


def _key(leaf: Leaf, codec: Codec, parent: Reference | None) -> Hashable | None:
    """Return a key that arrays coded together share; None for an array that is coded alone."""
    spec, common = leaf.spec, groups_of(codec, leaf)
    if common is None or leaf.touched is not None:
        return None
    device = str(leaf.flat.device) if is_torch(leaf.flat) else ""
    kind = BytesReference if isinstance(parent, BytesReference) else type(parent)
    return (codec, leaf.kind.role, spec.library, spec.dtype, device, spec.columns, common, kind)


def groups_of(codec: Codec, leaf: Leaf) -> Hashable | None:
    """Return what an array has in common with others of its group; None: it is coded alone."""
    is_small = 0 < leaf.spec.nbytes <= SMALL and hasattr(codec, "encode_group")
    return cast(GroupCodec, codec).groups(leaf) if is_small else None
