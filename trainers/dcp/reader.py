"""The storage reader, which reads only the arrays that a load needs, and a load planner."""

from __future__ import annotations

import dataclasses
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner import LoadPlanner as AnyLoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ...codec.checkpoint import Checkpoint
from ...codec.errors import BadArgumentError, CorruptDataError, MissingParentError, ShrinkpointWarning
from ...codec.partial import decode_only
from ...codec.state.tree import unflatten
from ...store.files import Files
from ...store.manifest import check_step
from ...store.store import Store
from .metadata import FOLDER, VALUES, Index, RankFile, Shard, key_of, numbered, place
from .places import StoreSteps, is_place, newest_step, open_folder, opener, read_index, read_step

BATCH = 1 << 25
"""Bytes of arrays decoded at a time, a larger array alone: bounds the memory in addition to the state that is filled.

A load takes as long with 8 MiB as with 256. It takes 1.3 to 2.3 times this memory in addition to the state (400 MB in
arrays of 4 MiB, and 6,000 small arrays). But each container and batch needs a request, which counts for remote files.
"""


class Reader(StorageReader):
    """Reader of `Writer`'s checkpoints: `dcp.load(state, storage_reader=Reader(path))`.

    The number of ranks and the mesh may differ from those of the save: each rank reads the shards that overlap with its
    own, one batch after another. No data of the checkpoint are unpickled.

    Args:
        path: folder, fsspec URL, or `Store`; None: `checkpoint_id` of each load.
        step: with a store, which step; None: the newest one whose files all exist, as `Store.load` looks for it.

    Raises:
        BadArgumentError: `path` is neither, or a step without a store.
    """

    def __init__(self, path: str | os.PathLike[str] | Store | None = None, step: int | None = None) -> None:
        super().__init__()
        if step is not None and not isinstance(path, Store):
            raise BadArgumentError(f"step is {step!r:.40}; it is for a Store")
        self.store = path if isinstance(path, Store) else None
        self.step = None if step is None else check_step(step)
        """With a store: the step to load, and after a load the one that was loaded."""
        self.path: str | None = None
        if path is not None and not isinstance(path, Store):
            open_folder(path)
            self.path = os.fspath(path)
        self._index: Index | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a path, or a URL of an installed file system."""
        return is_place(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        """The path or step that is loaded next; "" if unknown."""
        return self.path or ("" if self.step is None else str(self.step))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Let the next load be of `checkpoint_id`; None: of the same checkpoint again."""
        self._index = None
        if checkpoint_id is not None and self.store is not None:
            target = StoreSteps(self.store)
            target.move(checkpoint_id)
            self.step = int(target.place or 0)
        elif checkpoint_id is not None:
            open_folder(checkpoint_id)
            self.path = os.fspath(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata, with `rank=` that of a rank that saved alone.

        Raises:
            MissingParentError: a complete checkpoint does not exist.
            CorruptDataError, NewerFormatError: the metadata is not readable.
        """
        if self.store is None:
            index = read_index(open_folder(self.path), kwargs.get("rank"))
        elif kwargs.get("rank") is not None:
            raise MissingParentError(f"{self.store.url}: no rank of a store's step has metadata of its own")
        elif self.step is None:
            self.step, index = newest_step(self.store)
        else:
            index = read_step(self.store, self.step)
        metadata = index.to_torch()
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Set the metadata that `read_metadata` returned."""
        if not isinstance(metadata.storage_data, Index):
            raise BadArgumentError("this metadata was not read by this reader")
        self._index = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan, with the step of a store in it."""
        return plan if self.store is None else dataclasses.replace(plan, storage_data=self.step)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged.

        Raises:
            BadArgumentError: the newest step is not the same for all ranks, because another job is saving.
        """
        if self.store is not None and len(steps := {plan.storage_data for plan in plans}) > 1:
            raise BadArgumentError(f"{self.store.url}: ranks found different newest steps, {sorted(steps)}; give one")
        return plans

    def read_data(self, plan: LoadPlan, planner: AnyLoadPlanner) -> Future[None]:
        """Fill the planned tensors and values, one file after another.

        Raises:
            MissingParentError: a rank's file, or one it is coded against, is gone.
            CorruptDataError: a file is damaged, or holds other arrays than the metadata says.
        """
        if self._index is None:
            raise BadArgumentError("set_up_storage_reader comes before read_data")
        files = open_folder(self.path) if self.store is None else self.store.session.catalog.files
        wanted: dict[int, list[tuple[ReadItem, Shard | None]]] = {}
        for item in plan.items:
            number, shard = _source(self._index, item)
            wanted.setdefault(number, []).append((item, shard))
        for number in sorted(wanted):
            _Source(files, self._index, self._index.files[number]).fill(wanted[number], planner)
        if self.store is not None and self.step is not None:
            # Where the run continues from: for the parents of a `Writer`, and for steps that it leaves behind.
            self.store.session.resume_without_parent(self.step)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _source(index: Index, item: ReadItem) -> tuple[int, Shard | None]:
    """Return the file of an item, and for tensors the shard."""
    fqn, offset = item.storage_index.fqn, item.storage_index.offset
    entry = index.entries.get(fqn)
    if entry is None:
        raise CorruptDataError(f"{fqn}: the metadata has no such entry")
    if item.type == LoadItemType.BYTE_IO:
        if entry.file is None:
            raise BadArgumentError(f"{fqn}: a tensor was saved, another value is asked for")
        return entry.file, None
    if entry.file is not None:
        raise BadArgumentError(f"{fqn}: no tensor was saved, one is asked for")
    shard = index.layouts[entry.layout].by_offsets.get(tuple(offset or [0] * len(entry.size)))
    if shard is None:
        raise CorruptDataError(f"{fqn}: the metadata has no shard at {tuple(offset or ())}")
    return shard.file, shard


class _Source:
    """One rank's container, opened as far as it was read."""

    def __init__(self, files: Files, index: Index, file: RankFile) -> None:
        self._files, self._index, self._file = files, index, file
        self._next = opener(files, file)
        self._opened: list[Checkpoint] = []
        self._top = self._open(None)
        self._numbers: dict[str, int] = {}
        unflatten(self._top.header["tree"], lambda number, spell: self._numbers.setdefault(spell()[1], number))

    def _open(self, above: Checkpoint | None) -> Checkpoint:
        """Open a container, or the one below another, once: long headers take time to read."""
        at = 0 if above is None else next(i for i, c in enumerate(self._opened) if c is above) + 1
        if at == len(self._opened):
            self._opened.append(self._next(above))
        return self._opened[at]

    def fill(self, items: Sequence[tuple[ReadItem, Shard | None]], planner: AnyLoadPlanner) -> None:
        """Read these items and hand them to the planner."""
        tensors: dict[int, list[ReadItem]] = {}
        values = []
        for item, shard in items:
            if shard is None:
                values.append(item)
            else:
                tensors.setdefault(self._number(item.storage_index.fqn, shard), []).append(item)
        if values:
            self._fill_values(values, planner)
        for batch in self._batches(list(tensors)):
            arrays = self._decoded(batch)
            for number in batch:
                array = arrays.pop(number)
                for item in tensors[number]:
                    _copy(array, item, planner)

    def _number(self, fqn: str, shard: Shard) -> int:
        """Return the number of the array that holds a shard."""
        entry = self._index.entries[fqn]
        number = self._numbers.get(key_of(numbered(place(fqn, entry.path), shard.ordinal)))
        record = None if number is None else self._top.records[number]
        if number is None or record is None:
            raise CorruptDataError(f"{self._where(fqn)}: the file has no such array")
        found = (record.spec.library, record.spec.dtype, record.spec.shape)
        if found != ("torch", entry.dtype, shard.sizes):
            raise CorruptDataError(f"{self._where(fqn)}: {found}; the metadata says {entry.dtype} {shard.sizes}")
        return number

    def _batches(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yield batches of arrays; moments that are decoded together stay in one batch."""
        records, together = self._top.records, dict[int, list[int]]()
        for number in sorted(numbers):
            pair = records[number].pair
            together.setdefault(number if pair is None else pair, []).append(number)
        batch: list[int] = []
        size = 0
        for group in together.values():
            nbytes = sum(records[number].spec.nbytes for number in group)
            if batch and size + nbytes > BATCH:
                yield batch
                batch, size = [], 0
            batch += group
            size += nbytes
        if batch:
            yield batch

    def _decoded(self, numbers: Sequence[int]) -> dict[int, Any]:
        try:
            top, arrays = decode_only(self._open, lambda top: [top.records[n] for n in numbers])
        except CorruptDataError as e:
            raise CorruptDataError(f"rank {self._file.rank}: {self._path} or one it is coded against: {e}") from None
        return {n: arrays[top.records[n].key] for n in numbers}

    def _fill_values(self, items: Sequence[ReadItem], planner: AnyLoadPlanner) -> None:
        """Read values other than tensors from the header, and the arrays within them."""
        wanted = {key_of((VALUES, item.storage_index.fqn)) for item in items}
        inside = [n for key, n in self._numbers.items() if "\x1f".join(key.split("\x1f", 2)[:2]) in wanted]
        arrays = self._decoded(inside) if inside else {}
        state = unflatten(self._top.header["tree"], lambda number, _: arrays.get(number))
        stored = state.get(VALUES) if isinstance(state, dict) else None
        for item in items:
            fqn = item.storage_index.fqn
            if not isinstance(stored, dict) or fqn not in stored:
                raise CorruptDataError(f"{self._where(fqn)}: the file has no such value")
            # Planners want what `torch.save` makes; these bytes were made here, of plain values.
            buffer = io.BytesIO()
            torch.save(stored[fqn], buffer)
            buffer.seek(0)
            planner.load_bytes(item, buffer)

    def _where(self, fqn: str) -> str:
        return f"{fqn}: rank {self._file.rank}: {self._path}"

    @property
    def _path(self) -> str:
        return self._files.path(f"{FOLDER}/{self._file.chain[0][0]}")


def _copy(array: Any, item: ReadItem, planner: AnyLoadPlanner) -> None:
    """Copy the requested part of a decoded shard to its target."""
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        array = array.narrow(dim, offset, length)
    target = planner.resolve_tensor(item).detach()
    if target.shape != array.shape:
        raise BadArgumentError(f"{item.dest_index.fqn}: {tuple(target.shape)} asked for, {tuple(array.shape)} stored")
    target.copy_(array)
    planner.commit_tensor(item, target)


class PartialLoadWarning(ShrinkpointWarning):
    """A load that may be partial left entries unchanged."""


class LoadPlanner(DefaultLoadPlanner):
    """Planner that lists all mismatches: `dcp.load(..., planner=LoadPlanner())`.

    Args:
        strict: True (default): an entry of the state that the checkpoint lacks, or has in another size or kind, is an
            error. False: such entries keep their values, and a warning lists them.

    Raises:
        BadArgumentError: (while planning) the state does not fit.

    Example:
        >>> LoadPlanner(strict=False).strict
        False
    """

    def __init__(self, strict: bool = True) -> None:
        super().__init__(allow_partial_load=not strict)
        self.strict = strict

    def create_local_plan(self) -> LoadPlan:
        """Return torch's plan for the entries that fit."""
        problems = self._problems()
        if problems:
            unused = sorted(set(self._stored()) - set(self.state_dict))
            text = "; ".join(problems.values())
            if unused:
                text += f"; in the checkpoint, not in the state: {', '.join(unused[:50])}"
            if self.strict:
                raise BadArgumentError(f"the state does not fit the checkpoint: {text}")
            warnings.warn(f"left as they were: {text}", PartialLoadWarning, stacklevel=2)
            for fqn in problems:
                del self.state_dict[fqn]
        if self.metadata is None:
            raise BadArgumentError("set_up_planner comes before create_local_plan")
        # The inherited method would treat missing entries as a checkpoint of torch 2.3.
        return create_default_local_load_plan(self.state_dict, self.metadata, False)

    def _stored(self) -> dict[str, Any]:
        return dict(self.metadata.state_dict_metadata) if self.metadata is not None else {}

    def _problems(self) -> dict[str, str]:
        """Return the problems of entries, by entry."""
        stored = self._stored()
        problems = {}
        for fqn, value in self.state_dict.items():
            saved, size = stored.get(fqn), getattr(value, "shape", None)
            if saved is None:
                problems[fqn] = f"{fqn} is not in the checkpoint"
            elif isinstance(saved, TensorStorageMetadata) != (size is not None):
                problems[fqn] = f"{fqn} is {'a tensor' if size is None else 'no tensor'} in the checkpoint"
            elif size is not None and tuple(saved.size) != tuple(size):
                problems[fqn] = f"{fqn} is {tuple(saved.size)} in the checkpoint and {tuple(size)} here"
        return problems
