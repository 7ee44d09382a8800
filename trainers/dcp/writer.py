"""The storage writer: each rank writes one container with its shards, often a delta.

Protection and pruning have thresholds over the shards of all ranks. Each rank counts its own weights in log buckets.
The sum of the histograms of all ranks is the histogram of the whole state, from which one rank computes the thresholds
for all. Ranks send only the counts of the buckets in use, for each codec and layer type: about 15 kB, for a model of
any size.

Source: Inshrinkerator, sections 4.1 to 4.3 (global thresholds from mergeable sketches).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ...codec.base import Codec, Leaf, Prepare, Reference
from ...codec.checkpoint import Checkpoint
from ...codec.compress import compress_inputs
from ...codec.config import Config
from ...codec.errors import BadArgumentError, ShrinkpointError, ShrinkpointWarning, UnsupportedLeafError
from ...codec.evidence.kind import check_kinds
from ...codec.inputs import Inputs
from ...codec.named_presets import check_config
from ...codec.plan import ArrayPlan
from ...codec.plan import plan as plan_arrays
from ...codec.weights import planning
from ...codec.weights.planning import Limits, Plan, Sketch
from ...codec.weights.quantize import Quantize
from ...kernels.quantizer import Thresholds
from ...store.chain import Size, carried_by, smaller, wants_base
from ...store.retention import Retention
from ...store.store import Store
from ...store.weight_average import WeightAverage, needs_average
from .metadata import FOLDER, VALUES, Offsets, Place, RankFile, build, check_named, insert, kinds_of, numbered, place
from .places import Folders, StoreSteps, Target, is_place, resolve


class ParentNotUsedWarning(ShrinkpointWarning):
    """The intended parent of a delta cannot be used; a base is written instead."""


@dataclass(frozen=True, slots=True)
class _Parent:
    """The parent of a rank's next delta.

    Args:
        checkpoint: resolved.
        file: its container and those below it.
        place: of its checkpoint, see `Target`.
        shards: sizes of its shards by name and offsets.
        last: file of this rank's last save: the parent itself, or a delta against it.
        whole: size of a base of its last state; None: no base was made since the base of the chain.
        average: average of its weights, if they are extrapolated by their drift.
    """

    checkpoint: Checkpoint
    file: RankFile
    place: str
    shards: Mapping[tuple[str, Offsets], Offsets]
    last: RankFile
    whole: Size | None = None
    average: WeightAverage | None = None

    @property
    def base_size(self) -> Size:
        """Return the approximate size of a base."""
        return self.whole or Size(self.file.base_nbytes, self.checkpoint.raw_nbytes)

    @property
    def carried(self) -> int:
        """Bytes of the arrays that must be decoded before a delta against this parent."""
        return self.file.carried + carried_by(self.checkpoint)

    @property
    def restore_cost(self) -> float:
        """Bytes decoded to restore a delta against this parent, in multiples of a base."""
        raw = self.checkpoint.raw_nbytes
        return 1.0 + (self.carried / raw if raw else 0.0)


_TORCH, _SAVES = "torch.distributed.checkpoint.", {"save", "_save_state_dict"}
"""Where a thread is while torch saves by a writer."""
_claims = threading.Lock()
_MOST_KEPT = 4
_received: dict[str, Writer] = {}
"""Writers that `async_save` in a process pickles for every save, by token: the first of each is kept, with its parent
and its store's session. Of the oldest the parent is read again from the place of their last save."""


class Writer(StorageWriter):
    """Compressing writer: `dcp.save(state, storage_writer=Writer(path))`.

    Each rank writes one container of its own shards, a delta against its save before; rank 0 then writes the metadata,
    which makes the checkpoint exist. Keep one writer for a run, and let one save end before the next begins. Give each
    checkpoint its own folder by `checkpoint_id`, or save to one folder again and again: the former checkpoint stays
    complete until the new one is complete. A folder does not need other folders: the parents of its deltas are linked
    (or if that fails, copied) into it.

    With a `Store` each checkpoint is a step of it, whose number is the `checkpoint_id`. All steps share their files, so
    that a save to a bucket writes the new shards only; rank 0 commits the step, and `Store.gc`, `verify`, `tag`, `copy`
    and the command line treat it as any other.

    Args:
        path: folder, fsspec URL, or `Store` (each rank opens the same one); None: `checkpoint_id` of each save.
        cfg: how to compress, and when to take a base (`cfg.chain`, for each rank); default `Config()`, or that of the
            store. Protection and pruning have one threshold for the weights of all ranks, see `process_group`.
        parent: folder (with a store, step) of the checkpoint that this run resumed from: the first save is a delta
            against it. None: the checkpoint in the target folder, or the one that a `Reader` of this store has loaded.
        keep: with a store, which steps rank 0 keeps after each save, as `Store.gc` does; default all.
        kinds: `{path: layer type or Kind}`, as `shrinkpoint.kinds(model, optimizer)` gives it; default: by
            the optimizer's entries, and exact without them.
        process_group: the group given to `dcp.save` or `dcp.async_save`, over which ranks agree on thresholds. None:
            the default group, in `dcp.save` and in `async_save` with a process. In `async_save` with a thread and None,
            each rank uses its own thresholds, because that thread must not use the default group during training.

    Raises:
        BadArgumentError: an argument of a wrong kind; on saving, while another save by this writer is in flight, or
            where `kinds` names no tensor of the state (not checked with `use_collectives=False`).

    Example:
        >>> import tempfile, warnings, torch, torch.distributed.checkpoint as dcp
        >>> from shrinkpoint.trainers.dcp import Reader, Writer
        >>> warnings.simplefilter("ignore")  # torch warns where there is but one process
        >>> state, folder = {"w": torch.arange(4.0)}, tempfile.mkdtemp()
        >>> metadata = dcp.save(state, storage_writer=Writer(folder), no_dist=True)
        >>> loaded = {"w": torch.zeros(4)}
        >>> dcp.load(loaded, storage_reader=Reader(folder), no_dist=True)
        >>> loaded["w"].tolist()
        [0.0, 1.0, 2.0, 3.0]
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Store | None = None,
        cfg: Config | str | None = None,
        *,
        parent: str | os.PathLike[str] | int | None = None,
        keep: Retention | None = None,
        kinds: Mapping[str, Any] | None = None,
        process_group: Any = None,
    ) -> None:
        super().__init__()
        if keep is not None and not isinstance(path, Store):
            raise BadArgumentError("keep is for a Store; in folders remove those of older steps")
        default = path.cfg if isinstance(path, Store) else Config()
        self.cfg = default if cfg is None else check_config(cfg)
        check_kinds(kinds)
        self.target: Target = StoreSteps(path, keep) if isinstance(path, Store) else Folders(path)
        self.parent: str | None = None
        if parent is not None:
            # A target of its own checks it as a place.
            named: Target = StoreSteps(path) if isinstance(path, Store) else Folders(None)
            named.move(parent)
            self.parent = named.place
        self.kinds = kinds
        self.process_group = process_group
        self._head: _Parent | None = None
        self._saved: str | None = None
        """Place of the last save."""
        self._token = os.urandom(16).hex()
        self._thread: int | None = None
        self._rank, self._collective, self._coordinator = 0, True, True

    def __reduce__(self) -> tuple[Any, ...]:
        # A parent is as large as its checkpoint: it stays in the process that saves. That one has a group of its own.
        self._claim(self.target.place)
        left = {"_head": None, "_saved": None, "process_group": None, "_thread": None}
        return _received_again, (type(self), vars(self) | left)

    def __deepcopy__(self, memo: dict[int, Any]) -> Writer:
        _, (kind, state) = self.__reduce__()
        made: Writer = kind.__new__(kind)
        vars(made).update(copy.deepcopy(state, memo), _token=os.urandom(16).hex())
        return made

    # ---- what torch calls, in this order

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a path, or a URL of an installed file system."""
        return is_place(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The path or step of the next save; "" if unknown."""
        return self.target.place or ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Let the next save go to `checkpoint_id`; None: to the target of the last one.

        Raises:
            BadArgumentError: a save by this writer is in flight in another thread.
        """
        if checkpoint_id is not None:
            self._claim(checkpoint_id)
            self.target.move(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Record the rank, and whether ranks communicate.

        Raises:
            BadArgumentError: a save by this writer is in flight in another thread.
        """
        self._claim(self.target.place)
        distributed = dist.is_available() and dist.is_initialized()
        self._rank = int(kwargs.get("rank", dist.get_rank() if distributed else 0))
        self._collective = bool(kwargs.get("use_collectives", True))
        self._coordinator = is_coordinator
        self.target.begin(is_coordinator=is_coordinator, alone=self._alone)

    def storage_meta(self) -> StorageMeta | None:
        """Return the metadata of this storage for planners."""
        return StorageMeta(checkpoint_id=self.target.place)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans, each with the number of ranks that save together.

        Raises:
            BadArgumentError: `kinds` names no tensor of any rank.
        """
        # A rank alone has some of the tensors only, and so has a plan that torch has kept from the last save.
        if self._collective and all(getattr(plan, "usable", True) for plan in plans):
            items = (item for plan in plans for item in plan.items)
            check_named(self.kinds, {i.index.fqn: None for i in items if i.type != WriteItemType.BYTE_IO})
        # The number is the same for all saves of a run: if torch caches plans, some ranks get that of an earlier save.
        return [dataclasses.replace(plan, storage_data=len(plans)) for plan in plans]

    def _agrees(self, plan: SavePlan) -> bool:
        """Return whether all ranks compute common thresholds before they compress.

        Not where this thread may not use the process group: training may be using the default one in another.
        """
        if not self._collective or not (dist.is_available() and dist.is_initialized()):
            return False
        if self.process_group is None and threading.current_thread() is not threading.main_thread():
            return False
        ranks = plan.storage_data if isinstance(plan.storage_data, int) else 1
        return ranks > 1 and dist.get_world_size(self.process_group) == ranks

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Compress this rank's items and write their container.

        Raises:
            UnsupportedLeafError: a value that cannot be stored without pickle; the message has its name.
            BadArgumentError: two entries with one path.
            ShrinkpointError: another rank could not get so far as to agree on thresholds; the message says why.
            OSError: the bytes could not be written.
        """
        talk = self._agrees(plan)
        try:
            state, shards, kinds = self._state(plan, planner)
            head = self._parent_for(shards) if state else None
            parent = None if head is None else head.checkpoint
            weights = WeightSketches(state, self.cfg, kinds, parent) if talk else None
        except Exception as e:
            if talk:
                # The others wait for this rank.
                agree(e, self.process_group)
            raise
        prepare = None if weights is None else weights.prepared_by(agree(weights.summaries, self.process_group))
        results = []
        if state:
            average = self._average(head, shards)
            earlier = None if average is None else average.earlier(state)

            def against(prev: Checkpoint | None) -> Checkpoint:
                inputs = Inputs.of(state, prev, kinds, earlier=earlier)
                # Rules may match arrays of other ranks only.
                return compress_inputs(dataclasses.replace(inputs, is_whole=False), self.cfg, prepare)

            ckpt, whole = against(parent), None
            if head is not None:
                ckpt, whole = smaller(self.cfg.chain, ckpt, head.base_size, lambda: against(None))
                head = head if ckpt.is_delta else None
            written = _describe(self._rank, self.target.file_name(self._rank, ckpt), ckpt, head)
            self.target.files().write(f"{FOLDER}/{written.chain[0][0]}", ckpt.to_bytes())
            if average is not None:
                average.follow(state, ckpt)
            self._advance(ckpt, written, shards, head, whole, average)
            names = tuple(i.index.fqn for i in plan.items if i.type == WriteItemType.BYTE_IO)
            record = dataclasses.replace(written, shards=tuple(shards), values=names)
            results = [WriteResult(MetadataIndex(written.chain[0][0]), written.nbytes, record)]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, which commits the checkpoint, then remove old containers.

        Raises:
            BadArgumentError: the files of the ranks do not fit the plan; nothing is committed.
            CorruptDataError: the metadata would be beyond the limits of a reader; nothing is committed.
            MissingParentError: another job saved to this folder meanwhile and removed a file; nothing is committed,
                since the folder has that job's checkpoint.
            OSError: the metadata could not be written; nothing is committed.
        """
        ranks = [result.storage_data for of_rank in results for result in of_rank]
        index = dataclasses.replace(build(metadata, ranks), world=len(results))
        if index.partial and len(results) > 1:
            raise BadArgumentError("the shards of all ranks together do not fill their tensors")
        self.target.commit(index, self._alone)
        metadata.storage_data = index
        metadata.storage_meta = self.storage_meta()

    def _claim(self, target: Any) -> None:
        """Reserve the writer for a save of this thread.

        Raises:
            BadArgumentError: another thread is saving by it. Where both went on, the one would be written to the
                folder of the other.
        """
        me = threading.get_ident()
        with _claims:
            if self._thread not in (None, me) and _is_saving(self._thread, self):
                where = "" if target is None else f"{os.fspath(target)}: "
                raise BadArgumentError(
                    f"{where}another save by this writer is still in flight; wait for it (its future's result) before"
                )
            self._thread = me

    # ---- this rank's state

    @property
    def _alone(self) -> int | None:
        """Return this rank if ranks do not communicate, else None."""
        return None if self._collective else self._rank

    def _state(
        self, plan: SavePlan, planner: SavePlanner
    ) -> tuple[dict[str, Any], dict[tuple[str, Offsets], Offsets], dict[str, Any]]:
        """Return this rank's items as a nested dict, the sizes of its shards, and kinds."""
        paths: Mapping[str, Any] = getattr(planner, "mappings", None) or {}
        seen: dict[str, int] = {}
        tensors: dict[Place, Any] = {}
        values: dict[str, Any] = {}
        shards: dict[tuple[str, Offsets], Offsets] = {}
        state: dict[str, Any] = {}
        for item in plan.items:
            fqn = item.index.fqn
            if item.type == WriteItemType.BYTE_IO:
                values[fqn] = _value(planner, item)
                continue
            tensor: Any = planner.resolve_data(item)
            keys = numbered(place(fqn, paths.get(fqn)), seen.get(fqn, 0))
            seen[fqn] = seen.get(fqn, 0) + 1
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            if tuple(tensor.shape) != tuple(chunk.sizes):
                raise BadArgumentError(f"{fqn}: {tuple(tensor.shape)} was planned as {tuple(chunk.sizes)}")
            shards[fqn, tuple(chunk.offsets)] = tuple(chunk.sizes)
            tensors[keys] = tensor.detach()
            insert(state, keys, tensors[keys], fqn)
        if values:
            state[VALUES] = values
        return state, shards, kinds_of(tensors, values, self.kinds)

    # ---- its chain

    def _parent_for(self, shards: Mapping[tuple[str, Offsets], Offsets]) -> _Parent | None:
        """Return the parent of this save, with its containers in place; None: a base."""
        head = self._head
        asked = head is None
        if head is None:
            head = self._stored_parent()
        if head is None:
            return None
        if wants_base(self.cfg.chain, head.last, head.restore_cost):
            return None
        if not _fits(head.shards, shards):
            if asked:
                _warn(f"rank {self._rank}: {head.place} holds other shards than this rank has now: another mesh")
            return None
        if not self.target.provide(head.place, head.file):
            _warn(f"rank {self._rank}: the containers in {head.place} that a delta would need are gone")
            return None
        return head

    def _average(self, head: _Parent | None, shards: Mapping[tuple[str, Offsets], Offsets]) -> WeightAverage | None:
        """Return the slow average of the weights, from the last save or the parent, or None."""
        if not needs_average(self.cfg):
            return None
        last = self._head
        if last is not None and last.average is not None and _fits(last.shards, shards):
            return last.average
        return WeightAverage(None if head is None else head.checkpoint)

    def _stored_parent(self) -> _Parent | None:
        """Return the parent: this object's last save, else `parent=`, else the folder's checkpoint."""
        last, named = self._saved, self.parent if self._saved is None else None
        place = last or named or self.target.parent()
        if place is None:
            return None
        try:
            if named is None and not self.target.exists(place, self._alone):
                if last is not None:
                    _warn(f"rank {self._rank}: the checkpoint in {last}, which was saved last, is gone")
                return None
            index = self.target.index(place, self._alone)
            file, shards = index.of_rank(self._rank)
            if file is None:
                _warn(f"rank {self._rank}: {place} was saved by {index.world} ranks, none of them this one")
                return None
            ckpt = resolve(self.target.files(place), file)
        except ShrinkpointError as e:
            if named is not None:
                raise
            _warn(f"rank {self._rank}: {e}")
            return None
        return _Parent(ckpt, file, place, shards, file)

    def _advance(
        self,
        ckpt: Checkpoint,
        written: RankFile,
        shards: Mapping[tuple[str, Offsets], Offsets],
        head: _Parent | None,
        whole: Size | None,
        average: WeightAverage | None,
    ) -> None:
        """Make the new checkpoint, or its base, the parent of the next delta."""
        self._saved = place = str(self.target.place)
        whole = whole or (None if head is None else head.whole)
        if head is not None and self.cfg.chain.against == "base":
            self._head = dataclasses.replace(head, place=place, last=written, whole=whole, average=average)
        else:
            self._head = _Parent(ckpt, written, place, dict(shards), written, whole, average)


def _received_again(kind: type[Writer], state: dict[str, Any]) -> Writer:
    """Return a writer that was pickled with this state: one object for all its saves here."""
    writer = _received.pop(state["_token"], None)
    if writer is None:
        writer = kind.__new__(kind)
        vars(writer).update(state)
    else:
        # Its user may have set other options. The parent is that of the saves here, and a store's session knows which
        # steps they left behind.
        target, target.place = writer.target, state["target"].place
        vars(writer).update(state, _head=writer._head, _saved=writer._saved, target=target)
    _received[writer._token] = writer
    for old in list(_received.values())[:-_MOST_KEPT]:
        old._head = None
    return writer


def _is_saving(thread: int | None, writer: Writer) -> bool:
    """Return whether a thread is within one of torch's saves by a writer.

    A writer is not informed that a save has failed on another rank; only the coordinator's is informed of its end.
    """
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        inside = frame.f_code.co_name in _SAVES and frame.f_globals.get("__name__", "").startswith(_TORCH)
        if inside and frame.f_locals.get("storage_writer") is writer:
            return True
        frame = frame.f_back
    return False


def _value(planner: SavePlanner, item: Any) -> Any:
    """Return the plain value of an item that is not a tensor."""
    if hasattr(planner, "lookup_object"):
        return planner.lookup_object(item.index)
    # Other planners give it only pickled; only plain values are read from a pickle.
    data: Any = planner.resolve_data(item)
    data.seek(0)
    try:
        return torch.load(data, weights_only=True)
    except Exception as e:
        raise UnsupportedLeafError(f"{item.index.fqn}: cannot be stored without pickle: {str(e)[:200]}") from None


def _describe(rank: int, name: str, ckpt: Checkpoint, head: _Parent | None) -> RankFile:
    own = (name, ckpt.nbytes)
    if head is None:
        return RankFile(rank, (own,), ckpt.raw_nbytes, 0, 0, 0)
    since, spent = head.last.since_base + 1, head.last.spent + ckpt.nbytes
    return RankFile(rank, (own, *head.file.chain), ckpt.raw_nbytes, head.carried, since, spent)


def _fits(parent: Mapping[tuple[str, Offsets], Offsets], shards: Mapping[tuple[str, Offsets], Offsets]) -> bool:
    """Return whether at least half of the elements were in the parent at the same place."""
    same = sum(math.prod(sizes) for key, sizes in shards.items() if parent.get(key) == sizes)
    return 2 * same >= sum(math.prod(sizes) for sizes in shards.values())


def _warn(why: str) -> None:
    warnings.warn(f"{why}; a base is written", ParentNotUsedWarning, stacklevel=3)


@dataclass(frozen=True, slots=True)
class SketchSummary:
    """Sketches of one rank's weights of one codec.

    Args:
        sketches: one of the magnitudes of each layer type.
        before: its parent's thresholds, or None.
    """

    sketches: tuple[Sketch, ...]
    before: Thresholds | None


class WeightSketches:
    """Sketches of a rank's weights whose codecs have global thresholds.

    Args:
        state: what will be compressed.
        cfg: how.
        kinds: as for `compress`.
        parent: checkpoint that it will be a delta against.

    Raises:
        BadArgumentError: pruning by sensitivity, which needs gradients.
        UnsupportedLeafError: a leaf that cannot be stored.
    """

    def __init__(self, state: Any, cfg: Config, kinds: Mapping[str, Any], parent: Checkpoint | None) -> None:
        planned = plan_arrays(dataclasses.replace(Inputs.of(state, parent, kinds), is_whole=False), cfg)
        groups: dict[Quantize, list[ArrayPlan]] = {}
        for one in planned:
            if isinstance(one.codec, Quantize) and (one.codec.protect or one.codec.prune):
                groups.setdefault(one.codec, []).append(one)
        self.sketches: dict[Quantize, dict[str, Sketch]] = {}
        self.summaries: dict[Quantize, SketchSummary] = {}
        for codec, plans_of_codec in groups.items():
            group = [one.leaf for one in plans_of_codec]
            planning.check_gradients(codec, group)
            found = planning.sketched(codec, group)
            self.sketches[codec] = {leaf.key: sketch for leaf, sketch in zip(group, found, strict=True)}
            self.summaries[codec] = SketchSummary(
                _by_layer(found), planning.thresholds_before([one.parent for one in plans_of_codec])
            )

    def prepared_by(self, decided: Mapping[Quantize, Limits]) -> dict[Codec, Prepare]:
        """Return functions that plan these weights under the given thresholds, by codec."""
        return {codec: partial(self._plans, codec, decided[codec]) for codec in self.sketches}

    def _plans(
        self, codec: Quantize, decided: Limits, leaves: Sequence[Leaf], parents: Sequence[Reference | None]
    ) -> list[Plan]:
        return planning.plans(codec, leaves, parents, [self.sketches[codec][leaf.key] for leaf in leaves], decided)


def _by_layer(sketches: Sequence[Sketch]) -> tuple[Sketch, ...]:
    """Merge the sketches of each layer type to one, which is sent to other ranks."""
    layers = dict.fromkeys(s.layer for s in sketches)
    return tuple(
        Sketch.of(layer, planning.magnitudes(s.values for s in sketches if s.layer == layer)) for layer in layers
    )


def decide(summaries: Sequence[Mapping[Quantize, SketchSummary]]) -> dict[Quantize, Limits]:
    """Compute the thresholds of every codec from the summaries of all ranks."""
    decided = {}
    for codec in dict.fromkeys(codec for of_rank in summaries for codec in of_rank):
        received = [of_rank[codec] for of_rank in summaries if codec in of_rank]
        sketches = [sketch for summary in received for sketch in summary.sketches]
        before = next((summary.before for summary in received if summary.before is not None), None)
        decided[codec] = planning.limits(codec, sketches, before)
    return decided


def agree(mine: Mapping[Quantize, SketchSummary] | Exception, group: Any) -> dict[Quantize, Limits]:
    """Compute thresholds over all ranks of a process group; a collective.

    Args:
        mine: this rank's summaries, or its error. The error is raised here, and the other ranks raise one that names
            this rank.
        group: the process group; None: the default one.

    Raises:
        ShrinkpointError: another rank met an error.
        RuntimeError: a rank is gone or does not answer (of torch, after the timeout of the process group).
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    first = dist.get_global_rank(group, 0) if group is not None else 0
    received: list[Any] | None = [None] * world if rank == 0 else None
    sent = f"{type(mine).__name__}: {mine}" if isinstance(mine, Exception) else mine
    dist.gather_object(sent, received, dst=first, group=group)
    answer: list[Any] = [None]
    if received is not None:
        failed = [f"rank {number}: {what}" for number, what in enumerate(received) if isinstance(what, str)]
        answer = ["; ".join(failed)] if failed else [decide(received)]
    dist.broadcast_object_list(answer, src=first, group=group)
    if isinstance(mine, Exception):
        raise mine
    if isinstance(answer[0], str):
        raise ShrinkpointError(f"nothing was written, since another rank could not: {answer[0]}")
    decided: dict[Quantize, Limits] = answer[0]
    return decided
