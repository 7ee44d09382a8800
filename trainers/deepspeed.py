"""DeepSpeed: compressed checkpoints of an engine, with ZeRO of any stage or without it.

    store = sp.Store("runs/a/store")
    compress_checkpoints(engine, store)
    engine.save_checkpoint("runs/a", client_state={"epoch": 3})
    engine.load_checkpoint("runs/a")

DeepSpeed decides which rank writes which file. In the place of each file stands a placeholder; the contents of all
files are one step of the store, committed at once. `TAG/shrinkpoint.json` points to it.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load

from ..codec.errors import BadArgumentError, MissingParentError, UnsupportedLeafError
from ..codec.evidence.entries import Entry
from ..codec.evidence.kind import Kind
from ..codec.evidence.module import class_of, kinds
from ..store.store import Store
from . import required
from .dcp import Reader
from .dcp.metadata import insert, place
from .fully_sharded import ShardedSaves, pointer_to_shards
from .pointers import POINTER, PathLike, is_placeholder, load_at, read_pointer, store_of
from .processes import on_all
from .state import leaves

with required("this adapter needs DeepSpeed", "pip install deepspeed"):
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

_REST = "rest"
"""Key of a file's contents without its tensors: bytes that torch loads with `weights_only=True`."""
_EXACT = Kind("other", "state")
_FLAT, _MASTER = ("single_partition_of_fp32_groups", "fp32_flat_groups"), "master"
"""Keys of DeepSpeed's flat partitions of masters, and the name of a master as an entry of its parameter."""

Keys = tuple[str, ...]
Part = tuple[str, int, tuple[int, ...]]
"""A parameter in a flat partition: its name, where it begins, and its shape."""
Piece = tuple[Keys, int, tuple[int, ...]]
"""A part of a tensor: its keys in the step, where it begins, and its shape."""


class CompressedFiles(CheckpointEngine):  # type: ignore[misc]
    """DeepSpeed's interface to files; `compress_checkpoints` makes it.

    A flat partition of ZeRO is saved in parts, one a parameter, so that moments of matrices can be compressed, and
    masters, norms, biases, padding and all that is not recognized stay exact.

    Args:
        engine: of DeepSpeed.
        store_of: the store for a folder given to `save_checkpoint`.
        in_tag: whether the pointer is in the folder of the tag, else in the folder above.
        waits: whether a commit is made by `finish`, when the rest of the folder is written.
        background: see `ShardedSaves`.
    """

    def __init__(
        self,
        engine: Any,
        store_of: Callable[[str], Store],
        *,
        in_tag: bool = True,
        waits: bool = False,
        background: bool = False,
    ) -> None:
        super().__init__(None)
        self.name, self.engine = "shrinkpoint", engine
        self.raw = getattr(engine.checkpoint_engine, "raw", engine.checkpoint_engine)
        self.saves: ShardedSaves | None = None
        self._store_of, self._in_tag, self._waits, self._background = store_of, in_tag, waits, background
        self._files: dict[str, Any] = {}
        self._info: Any = None

    def preserves_storage_sharing(self) -> bool:
        """Return False: a view is saved alone, so that DeepSpeed need not copy it before."""
        return False

    def create(self, info: Any) -> None:
        """Begin a checkpoint; called by DeepSpeed."""
        self.wait()
        self._files = {}

    def save(self, state_dict: Any, path: str) -> None:
        """Keep the contents of a file until the commit, and write a placeholder."""
        self._files[path] = state_dict
        torch.save({"shrinkpoint": POINTER}, path)

    def commit(self, info: Any) -> bool:
        """Save all files of all ranks as one step of the store; called by DeepSpeed on all ranks.

        Raises:
            UnsupportedLeafError: a file has an object that `torch.load(weights_only=True)` refuses.
            Exception: what the save raised, on all ranks.
        """
        self._info = info
        if not self._waits:
            self.finish()
        return True

    def finish(self) -> ShardedSaves:
        """Make the commit; called on all ranks. Raises as `commit` does."""
        info = self._info
        files, self._files = self._files, {}
        (state, table), _ = on_all(lambda: self._state(files), lambda _: None)
        store = self._store_of(info.save_dir)
        if self.saves is None or self.saves.store is not store:
            self.wait()
            self.saves = ShardedSaves(store, background=self._background)
        folder = os.path.join(info.save_dir, info.tag) if self._in_tag else info.save_dir
        self.saves.save(os.path.join(folder, POINTER), state, table)
        return self.saves

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the contents of a file, compressed or raw; called by DeepSpeed.

        Raises:
            MissingParentError: the save of this checkpoint was interrupted.
        """
        if not is_placeholder(path):
            return self.raw.load(path, map_location)
        folder = os.path.dirname(path) if self._in_tag else os.path.dirname(os.path.dirname(path))
        pointer = os.path.join(folder, POINTER)
        if read_pointer(pointer) is None:
            raise MissingParentError(f"{path}: no {POINTER} in {folder}: its save was cut off; load the one before")
        return _read(pointer, self._store_of(os.path.dirname(os.path.dirname(path))), _root(path))

    def wait(self) -> None:
        """Wait until nothing is in flight."""
        if self.saves is not None:
            self.saves.wait()

    def _state(self, files: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Kind]]:
        """Return the tensors of this rank's files as a tree, and their kinds by path."""
        state: dict[str, Any] = {}
        table: dict[str, Kind] = {}
        of_names = kinds(self.engine.module)
        # Of stage 3 parameters have no shape of their own between steps.
        shapes = {name: tuple(_shape(p)) for name, p in self.engine.module.named_parameters()}
        matrices = {name: of_names.get(name, _EXACT) for name, shape in shapes.items() if len(shape) > 1}
        owner = None if self.engine.optimizer is None else class_of(self.engine.optimizer)
        for path, contents in files.items():
            groups = list(_groups(self.engine, contents))
            pieces: dict[Keys, list[Piece]] = {}
            for keys, tensor in _tensors(contents):
                pieces[keys] = _pieces(keys, tensor, groups)
                for piece, start, shape in pieces[keys]:
                    view = tensor.detach().reshape(-1)[start : start + _size(shape)].view(shape)
                    table[_insert(state, (_root(path), *piece), view)] = _kind(piece, of_names, matrices, owner)
            rest = io.BytesIO()
            torch.save({"pieces": list(pieces.values()), "tree": _without(contents)}, rest)
            _rest(rest.getbuffer(), path)
            _insert(state, (_root(path), _REST), torch.frombuffer(rest.getbuffer(), dtype=torch.uint8))
        return state, table


def compress_checkpoints(engine: Any, store: Store) -> CompressedFiles:
    """Let a DeepSpeed engine save its checkpoints to a store, and load them from it.

    Call it on all ranks, before `load_checkpoint`. `save_checkpoint` returns when the checkpoint is durable; after a
    load the next save is a delta. Raw checkpoints are loaded as before. As in DeepSpeed's own checkpoints, the number
    of ranks may not change; `expand` writes the files that its tools read (`zero_to_fp32.py`, `ds_to_universal.py`).

    Args:
        engine: from `deepspeed.initialize`.
        store: below the folder given to `save_checkpoint`, or next to it; each rank opens the same one.

    Returns:
        The engine's new `checkpoint_engine`.

    Raises:
        BadArgumentError: not an engine, or not a Store; swapping to NVMe, whose files DeepSpeed copies by itself.
    """
    if not isinstance(store, Store):
        raise BadArgumentError(f"store must be a Store, not {type(store).__qualname__}")
    return attach(engine, lambda _: store)


def attach(engine: Any, store_of: Callable[[str], Store], **settings: Any) -> CompressedFiles:
    """Set the `checkpoint_engine` of a DeepSpeed engine, see `CompressedFiles`."""
    if not hasattr(engine, "checkpoint_engine") or not hasattr(engine, "zero_optimization_stage"):
        raise BadArgumentError(f"engine must come from deepspeed.initialize, not be a {type(engine).__qualname__}")
    if engine.zero_nvme_offload_optimizer():
        raise BadArgumentError("an optimizer on NVMe is saved by DeepSpeed itself; use its own checkpoints")
    if engine.checkpoint_engine.is_decoupled():
        raise BadArgumentError('the writer "decoupled" of DeepSpeed saves in the background; leave it out')
    found = engine.checkpoint_engine = CompressedFiles(engine, store_of, **settings)
    return found


def expand(folder: PathLike) -> str:
    """Write the raw files of a checkpoint, for DeepSpeed's own tools; return the folder.

    Args:
        folder: of the tag, or the checkpoint folder of Transformers or Accelerate.

    Raises:
        BadArgumentError: not a compressed checkpoint of DeepSpeed.
    """
    pointer = os.path.join(folder, POINTER)
    found = read_pointer(pointer)
    if found is None:
        raise BadArgumentError(f"{os.fspath(folder)}: not a compressed checkpoint")
    store = store_of(pointer, found)
    for path in [path for path in Path(folder).rglob("*.pt") if is_placeholder(path)]:
        torch.save(_read(pointer, store, _root(path)), path)
    return os.fspath(folder)


def _root(path: PathLike) -> str:
    return os.path.basename(path).removesuffix(".pt")


def _shape(parameter: Any) -> Any:
    return getattr(parameter, "ds_shape", parameter.shape)


def _size(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _insert(state: dict[str, Any], keys: Keys, value: Any) -> str:
    """Put a tensor into a tree; return its path in the container."""
    insert(state, keys, value, "/".join(keys))
    return "/".join(place(".".join(keys), keys))


def _tensors(tree: Any) -> Iterator[tuple[Keys, torch.Tensor]]:
    """Yield the tensors with elements of a tree, in the order of `_mapped`."""
    for keys, value in leaves(tree):
        if isinstance(value, torch.Tensor) and value.ndim and value.numel():
            yield keys, value


def _without(tree: Any) -> Any:
    """Return a tree in which tensors with elements have none (they are on the device "meta")."""
    return _mapped(tree, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def _mapped(tree: Any, of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a tree with other tensors, where they have elements."""
    if isinstance(tree, torch.Tensor):
        return of(tree) if tree.ndim and tree.numel() else tree.detach().cpu()
    if isinstance(tree, dict):
        pairs = {key: _mapped(value, of) for key, value in tree.items()}
        return type(tree)(pairs) if type(tree) is not dict and not hasattr(tree, "default_factory") else pairs
    if isinstance(tree, (list, tuple)):
        made = [_mapped(value, of) for value in tree]
        return type(tree)(*made) if hasattr(tree, "_fields") else type(tree)(made)
    return tree


def _rest(data: Any, path: str) -> Any:
    """Load a file's contents without its tensors, as torch does without running code."""
    import deepspeed.runtime.fp16.loss_scaler as scalers
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    known = [scalers.LossScaler, scalers.DynamicLossScaler, ZeroStageEnum, fragment_address]
    with torch.serialization.safe_globals(known):
        try:
            return torch.load(io.BytesIO(data), weights_only=True)
        except Exception as e:
            raise UnsupportedLeafError(f"{path}: cannot be stored without pickle: {str(e)[:400]}") from None


def _groups(engine: Any, contents: Any) -> Iterator[list[Part]]:
    """Yield name, place and shape of each parameter in this rank's flat partitions."""
    state = contents.get("optimizer_state_dict") if isinstance(contents, dict) else None
    if not isinstance(state, dict):
        return
    for slices in state.get("param_slice_mappings", ()) if _FLAT[0] in state else ():  # stages 1 and 2
        shapes = {name: tuple(_shape(engine.module.get_parameter(name))) for name in slices}
        parts = [
            (name, part.start, shapes[name] if _size(shapes[name]) == part.numel else (part.numel,))
            for name, part in slices.items()
        ]
        yield sorted(parts, key=lambda part: part[1])
    for parameters in engine.optimizer.fp16_groups if _FLAT[1] in state else ():  # stage 3: slices of all parameters
        parts, start = [], 0
        for parameter in parameters:
            size, row = parameter.ds_tensor.ds_numel, tuple(_shape(parameter))[1:]
            shape = (size // _size(row), *row) if size % _size(row) == 0 else (size,)
            parts.append((engine.param_names[parameter], start, shape))
            start += size
        yield parts


def _pieces(keys: Keys, tensor: torch.Tensor, groups: Sequence[list[Part]]) -> list[Piece]:
    """Return the parts in which a tensor is saved.

    A flat partition has one for each parameter, and the padding.
    """
    if keys[-2:-1] and keys[-2] in _FLAT:
        number, entry = keys[-1], _MASTER
    elif keys[-3:-2] == ("state",):
        number, entry = keys[-2:]
    else:
        return [(keys, 0, tuple(tensor.shape))]
    parts = groups[int(number)] if number.isdecimal() and int(number) < len(groups) else []
    size = parts[-1][1] + _size(parts[-1][2]) if parts else tensor.numel() + 1
    if tensor.ndim != 1 or tensor.numel() < size:
        return [(keys, 0, tuple(tensor.shape))]
    pieces: list[Piece] = []
    end = 0
    for name, start, shape in [*parts, ("", tensor.numel(), (0,))]:
        if start > end:
            pieces.append((("state", f"padding of {number} at {end}", entry), end, (start - end,)))
        if name:
            pieces.append((("state", name, entry), start, shape))
        end = start + _size(shape)
    return pieces


def _kind(keys: Keys, of_names: Mapping[str, Kind], matrices: Mapping[str, Kind], optimizer: str | None) -> Kind:
    """Return the kind of a part: weight of the module, moment of a matrix, or exact."""
    if keys[0] == "module" and len(keys) == 2:
        return of_names.get(keys[1], _EXACT)
    of = matrices.get(keys[1], _EXACT) if keys[0] == "state" and len(keys) == 3 else _EXACT
    if of.role != "weight":
        return _EXACT
    return Kind(of.layer, Entry("", "state", keys[1], keys[2]).role, of.parameter, optimizer)


def _read(pointer: str, store: Store, root: str) -> Any:
    """Return the contents of a file from the step that a pointer names."""
    found = pointer_to_shards(pointer, store)
    if found is None or store.describe(found.step).identity != found.identity:
        load_at(pointer, store=store)  # raises, with the reason
        raise BadArgumentError(f"{pointer}: not a checkpoint of DeepSpeed")
    sizes: dict[str, Any] = dict(Reader(store, found.step).read_metadata().state_dict_metadata)
    name = f"{root}.{_REST}"
    if name not in sizes:
        raise BadArgumentError(f"{pointer}: its step has no file {root}.pt; it was saved by other ranks")
    data = torch.empty(sizes[name].size, dtype=torch.uint8, device="cpu")
    _fill({root: {_REST: data}}, store, found.step)
    rest = _rest(data.numpy().tobytes(), root)
    whole = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for _, tensor in _tensors(rest["tree"])]
    state: dict[str, Any] = {}
    for tensor, pieces in zip(whole, rest["pieces"], strict=True):
        for keys, start, shape in pieces:
            _insert(state, (root, *keys), tensor.view(-1)[start : start + _size(shape)].view(shape))
    _fill(state, store, found.step)
    tensors = iter(whole)
    return _mapped(rest["tree"], lambda _: next(tensors))


def _fill(state: dict[str, Any], store: Store, step: int) -> None:
    """Load tensors of a step; ranks read other files, and each by itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*assuming the intent is to load in a single process", module="torch"
        )
        load(state, storage_reader=Reader(store, step), no_dist=True)
