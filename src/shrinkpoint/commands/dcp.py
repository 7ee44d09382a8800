"""Read folders of torch.distributed.checkpoint without executing anything in them.

The metadata is a pickle, and so is every value that is not a tensor; torch unpickles both without limits. Here the
metadata may contain only the classes that DCP needs, values are loaded by `torch.load(weights_only=True)`, and the
files must be in the folder. Folders written by `shrinkpoint.trainers.dcp.Writer`, whose metadata is JSON, are read by
its own reader.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import math
import os
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..codec.errors import CorruptDataError, ShrinkpointError, UnsupportedLeafError
from ..codec.format.bounded_json import MOST_VALUES
from ..codec.state.leaves import check_memory, is_array, same_storage_key
from ..store.local import read_file, unlinked

if TYPE_CHECKING:
    from ..store.store import Store

METADATA = ".metadata"
_MOST_FIELDS = 64
"""Fields of an object in the metadata, and dimensions of a shape."""
_OURS = b'{"checksum":'
_DCP = "torch.distributed.checkpoint."
_ALLOWED = {
    _DCP + "metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    _DCP + "filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
    "collections": {"OrderedDict"},
}


class _Unpickler(pickle._Unpickler):
    """Loads the metadata's own classes, dtypes and `torch.Size`; refuses everything else.

    The unpickler in Python, because that in C allocates as many places as the number of a memo says. What is
    unpickled never takes many times the bytes of the pickle: nothing copies a collection that another part holds.
    """

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if module == "torch":
            found = getattr(torch, name, None)
            if found is torch.Size:
                return _size
            if isinstance(found, torch.dtype):
                return found
        elif module == "pathlib" and name in _ALLOWED[module]:
            return _ignored_path
        elif module == "collections" and name in _ALLOWED[module]:
            return _empty
        elif name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise UnsupportedLeafError(f"its metadata names {module}.{name}, which is not allowed in a checkpoint")

    def _build(self) -> None:
        """Set the attributes of an object, which are few."""
        if len(self.stack[-1]) > _MOST_FIELDS:  # type: ignore[attr-defined]
            raise CorruptDataError(f"an object of more than {_MOST_FIELDS} fields")
        self.load_build()  # type: ignore[attr-defined]

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _build}  # type: ignore[dict-item]  # noqa: RUF012
    del dispatch[pickle.BYTEARRAY8[0]]  # allocates before it reads


def _size(shape: Any) -> Any:
    """Return a torch.Size."""
    import torch

    if len(shape) > _MOST_FIELDS:
        raise CorruptDataError(f"a shape of more than {_MOST_FIELDS} dimensions")
    return torch.Size(shape)


def _empty() -> OrderedDict[Any, Any]:
    """Return an ordered dict, which a pickle fills afterwards."""
    return OrderedDict()


def _ignored_path(*_parts: object) -> None:
    """Replace the former path of the checkpoint, which is not used.

    A Windows path could not be created on another system.
    """


def is_dcp(path: Path) -> bool:
    """Return whether a folder looks like a distributed checkpoint."""
    return (path / METADATA).is_file()


def load_dcp(folder: Path) -> dict[str, Any]:
    """Load the state in a folder of torch.distributed.checkpoint, with its shards joined.

    Raises:
        CorruptDataError: it cannot be read.
        MissingParentError: a file of a folder written by shrinkpoint is missing.
        NewerFormatError: the folder was written by a newer version of shrinkpoint.
        UnsupportedLeafError: it holds pickled objects that are not plain values.
    """
    from ..trainers.dcp import Reader

    return _load(
        *(_own_reader(Reader(folder), f"{folder / METADATA}") if is_ours(folder) else _torch_reader(folder)), folder
    )


def load_step(store: Store, step: int) -> dict[str, Any]:
    """Load the state of a sharded step of a store, with its shards joined.

    Raises:
        CorruptDataError, MissingParentError, NewerFormatError: it cannot be read.
    """
    from ..trainers.dcp import Reader

    where = f"{store.url}: step {step}"
    return _load(*_own_reader(Reader(store, step), where), where)


def _load(reader: Any, metadata: Any, where: Path | str) -> dict[str, Any]:
    """Load all entries of a distributed checkpoint in one process."""
    import torch
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            name = read_item.dest_index.fqn
            values[name] = load_plain(value, f"{where}: {name}")

    flat: dict[str, Any] = {}
    values: dict[str, Any] = {}
    total = 0
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            if not _is_sound(entry):
                raise CorruptDataError(f"{where}: the entry of {name[:80]} is malformed")
            total += math.prod(entry.size) * entry.properties.dtype.itemsize
            check_memory(total, f"{where}: the state")
            if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
                raise CorruptDataError(f"{where}: the shards of {name[:80]} do not fill it")
            # Zeros, because shards that overlap leave places where an empty tensor has memory of the process.
            flat[name] = torch.zeros(entry.size, dtype=entry.properties.dtype)
        else:
            flat[name] = None
    try:
        with _quiet():
            load(flat, storage_reader=reader, planner=Planner(flatten_state_dict=False), no_dist=True)
    except (Exception, CheckpointException) as error:
        raise _plain_error(where, error) from None
    missing = [name for name, value in flat.items() if value is None and name not in values]
    if missing:
        raise CorruptDataError(f"{where}: the value {missing[0][:80]!r} was not found")
    return _nested(flat | values, metadata.planner_data, where)


def _is_sound(entry: Any) -> bool:
    """Return whether shape, dtype and shards of a tensor's entry are valid."""
    import torch

    def is_shape(found: Any) -> bool:
        is_sound = isinstance(found, tuple) and all(type(n) is int and n >= 0 for n in found)
        return is_sound and math.prod(max(n, 1) for n in found) < 1 << 60  # also where an axis is zero

    chunks = entry.chunks
    return (
        is_shape(entry.size)
        and isinstance(getattr(entry.properties, "dtype", None), torch.dtype)
        and isinstance(chunks, list)
        and all(is_shape(chunk.sizes) and is_shape(chunk.offsets) for chunk in chunks)
    )


def is_ours(folder: Path) -> bool:
    """Return whether the writer of shrinkpoint wrote the metadata of a folder."""
    with open(folder / METADATA, "rb", opener=unlinked) as file:
        return file.read(len(_OURS)) == _OURS


def _own_reader(reader: Any, where: str) -> tuple[Any, Any]:
    """Return reader and metadata of a checkpoint that shrinkpoint's storage writer wrote."""
    metadata = reader.read_metadata()
    if metadata.storage_data.partial:
        raise CorruptDataError(f"{where}: the shards in it do not cover their tensors")
    return reader, metadata


def _torch_reader(folder: Path) -> tuple[Any, Any]:
    """Return reader and metadata of a folder that torch's storage writer wrote."""
    from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader

    metadata = _metadata(folder)

    class Regular(FileSystem):
        @contextlib.contextmanager
        def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
            with open(path, mode, opener=unlinked) as stream:
                yield stream

    class Reader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return metadata

    reader = Reader(folder)
    reader.fs = Regular()
    return reader, metadata


def load_plain(file: Any, where: str) -> Any:
    """Load tensors, NumPy arrays of numbers and plain values of `torch.save`, executing nothing.

    Raises:
        CorruptDataError: it is another file, or damaged.
        UnsupportedLeafError: it holds other objects.
    """
    import torch

    try:
        with _quiet(), torch.serialization.safe_globals(_numpy_globals()):
            found = torch.load(file, map_location="cpu", weights_only=True)
        _check_loaded(found, where)
        return found
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        if named is not None:
            raise UnsupportedLeafError(
                f"{where}: holds a pickled object of {named.group(1)}, which is neither a tensor nor a plain value; "
                "save the state_dict() of a module, not the module"
            ) from None
        # The reason is the last line, after a page of advice.
        reasons = str(error).partition("Check the documentation")[0].strip().split("\n")
        raise CorruptDataError(f"{where}: cannot be loaded without pickle: {reasons[-1][:300]}") from None
    except OSError as error:
        if error.filename is not None:
            raise
        raise CorruptDataError(f"{where}: cannot be read as a file of torch.save: {_first_line(error)}") from None
    except (ShrinkpointError, MemoryError):
        raise
    except Exception as error:  # torch and pickle raise almost anything for other files
        said = _first_line(error)
        if isinstance(error, EOFError) or "unexpected EOF" in said:
            said = "the file is truncated"
        elif isinstance(error, LookupError):  # a look-up inside pickle, whose text is not understandable
            said = f"it is neither its archive nor a pickle ({type(error).__name__}: {said})"
        raise CorruptDataError(f"{where}: cannot be read as a file of torch.save: {said[:300]}") from None


def _check_loaded(value: Any, where: str) -> None:
    """Raise CorruptDataError if a tree has too many values or arrays too large for this machine.

    In a pickle of a kilobyte, lists that contain one list twice can have 2**60 places, and a tensor any size.
    """
    sizes: dict[Any, int] = {}
    stack, count = [value], 0
    while stack:
        found = stack.pop()
        count += 1
        if count > MOST_VALUES:
            raise CorruptDataError(f"{where}: more than {MOST_VALUES} values")
        if isinstance(found, dict):
            stack.extend(found.values())
        elif isinstance(found, (list, tuple)):
            stack.extend(found)
        elif is_array(found) and (key := same_storage_key(found)) is not None:
            sizes[key] = found.nbytes
    check_memory(sum(sizes.values()), where)


def _numpy_globals() -> list[Any]:
    """The globals in a pickle of NumPy arrays of numbers, under the names of NumPy 1 and 2."""
    import numpy as np

    core = import_module("numpy._core.multiarray")
    found: list[Any] = [np.ndarray, np.dtype, *(type(np.dtype(c)) for c in "?bBhHiIlLqQefdFD")]
    for name in ("_reconstruct", "scalar"):
        function = getattr(core, name)
        found += [(function, f"numpy.{package}.multiarray.{name}") for package in ("core", "_core")]
    return found


def _metadata(folder: Path) -> Any:
    from torch.distributed.checkpoint.metadata import Metadata

    from ..trainers.dcp.metadata import MAX_BYTES, is_path, is_tree

    try:
        found = _Unpickler(io.BytesIO(read_file(folder / METADATA, MAX_BYTES))).load()
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(f"{folder / METADATA}: {error}") from None
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        raise CorruptDataError(f"{folder / METADATA}: not DCP metadata: {_first_line(error)}") from None
    if not isinstance(found, Metadata) or (damage := _damage(found)):
        what = f": {damage}" if isinstance(found, Metadata) else ""
        raise CorruptDataError(f"{folder / METADATA}: not the metadata of a distributed checkpoint{what}")
    root = os.path.realpath(folder)
    infos = list(found.storage_data.values())
    size = 0
    names: set[Any] = {getattr(info, "relative_path", None) for info in infos}
    for name in names:
        inside = isinstance(name, str) and "\0" not in name
        if not inside or not os.path.realpath(os.path.join(root, name)).startswith(root + os.sep):
            raise CorruptDataError(f"{folder / METADATA}: the file {str(name)[:120]!r} is not in the folder")
        size += os.lstat(os.path.join(root, name)).st_size
    if any(type(n) is not int or n < 0 for info in infos for n in (info.offset, info.length)):
        raise CorruptDataError(f"{folder / METADATA}: offsets or lengths in files are malformed")
    if (wanted := sum(info.length for info in infos)) > size:
        raise CorruptDataError(f"{folder}: its files have {size} bytes, the entries in them {wanted}")
    paths = found.planner_data or {}
    if not isinstance(paths, dict) or not all(map(is_path, paths.values())) or not is_tree(paths):
        raise CorruptDataError(f"{folder / METADATA}: its paths do not form a tree")
    return found


def _damage(metadata: Any) -> str:
    """Return the fault in the fields and names of unpickled metadata, or ""."""
    stack: list[Any] = [metadata]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            stack += [*value, *value.values()]
        elif isinstance(value, list):
            stack += value
        elif dataclasses.is_dataclass(value):
            found = vars(value)
            known = {field.name: field for field in dataclasses.fields(value)}
            missing = [name for name in known if name not in found]
            # Other versions of torch have fewer fields, or more; damage renames one.
            if any(_is_required(known[name]) for name in missing) or (missing and found.keys() - known.keys()):
                return f"{type(value).__name__} has no {missing[0]}"
            for name in found.keys() & known.keys():
                kind = known[name].type
                if isinstance(kind, type) and kind is not Any and not isinstance(found[name], kind):
                    return f"{name} of {type(value).__name__} is {str(found[name])[:60]!r}"
            stack += found.values()
    names, data, paths = metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data
    if not isinstance(names, dict) or not isinstance(data, dict) or not isinstance(paths, dict | None):
        return "a table of it is not a dict"
    if not all(type(name) is str for name in names):
        return "its entries are not named"
    strange = {getattr(index, "fqn", index) for index in data} - names.keys()
    strange |= names.keys() - paths.keys() if paths else set()
    return f"it has {str(min(strange, key=str))[:60]!r} in one of its tables only" if strange else ""


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _nested(flat: dict[str, Any], paths: Any, where: Path | str) -> dict[str, Any]:
    """Rebuild the tree from its flat form.

    In `paths` text stands for keys of dicts, and integers for positions in lists.
    """
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    paths = paths or {}
    ordered = {name: flat[name] for name in [*paths, *flat] if name in flat}
    try:
        tree: dict[str, Any] = unflatten_state_dict(ordered, {name: paths.get(name, (name,)) for name in ordered})
    except (TypeError, AttributeError, IndexError, KeyError) as error:
        raise CorruptDataError(f"{where}: its paths do not form a tree: {_first_line(error)}") from None
    return tree


def save_dcp(state: dict[str, Any], folder: Path) -> None:
    """Write a state as a folder of torch.distributed.checkpoint, synced."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        with _quiet():
            save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    except CheckpointException as error:
        raise _plain_error(folder, error) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warnings about single processes and pickles, and its log of errors."""
    logger = logging.getLogger("torch.distributed")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _plain_error(where: Path | str, error: BaseException) -> BaseException:
    """The cause of an error that torch has wrapped (also Ctrl-C), as an error of this package."""
    causes = list(getattr(error, "failures", {}).values())
    cause = causes[0][0] if causes else error
    if isinstance(cause, (ShrinkpointError, OSError, MemoryError)):
        return cause
    if not isinstance(cause, Exception):
        return cause
    return CorruptDataError(f"{where}: {type(cause).__name__}: {_first_line(cause)}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:300] or type(error).__name__
