"""A model's folder: its safetensors files, raw or compressed, and other files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from blake3 import blake3

from ..codec.checkpoint import Checkpoint, decompress
from ..codec.errors import CorruptDataError, MissingParentError
from ..codec.format import container
from ..codec.format.schema import StoredArray, StoredGroup, groups_to_json
from ..codec.lossless.reference import BytesReference
from ..codec.state import tree
from ..codec.state.leaves import as_bytes, is_array, read_leaf
from ..kernels.errors import BadArgumentError
from ..store.regular_files import check_link, read_file

PathLike: TypeAlias = str | os.PathLike[str]
Tensors: TypeAlias = dict[str, torch.Tensor]
Sort: TypeAlias = tuple[str, tuple[int, ...]]
SUFFIX = ".spt"


class ModelFolder:
    """The safetensors files of a folder, raw or compressed."""

    def __init__(self, folder: PathLike, base: PathLike | None = None) -> None:
        try:
            self.folder = Path(folder)
        except TypeError:
            raise BadArgumentError(f"a folder must be a path, not {type(folder).__qualname__}") from None
        if not self.folder.is_dir():
            raise BadArgumentError(f"{self.folder} is not a folder")
        self.files = sorted(p.relative_to(self.folder) for p in _walk(self.folder, self.folder))
        self.compressed = [p for p in self.files if p.name.endswith(f".safetensors{SUFFIX}")]
        self.raw = [p for p in self.files if p.suffix == ".safetensors"]
        self.rest = [p for p in self.files if p not in {*self.compressed, *self.raw}]
        self.base = None if base is None else ModelFolder(base)
        self._names: dict[str, list[Path]] | None = None
        self._open: tuple[Path, Tensors] | None = None

    def read(self, file: Path) -> tuple[dict[str, str], Tensors]:
        """Return metadata and tensors of one file."""
        path = self.folder / file
        if file in self.raw:
            return _read_safetensors(path)
        ckpt = _read_checkpoint(path)
        if ckpt.is_delta:
            if self.base is None:
                raise MissingParentError(f"{path}: a delta; the folder of its base model is needed as base")
            wanted = _keys(ckpt)
            plain = file.with_name(file.name.removesuffix(SUFFIX))
            parent = base_parent(self.base.some(wanted, plain), wanted)
            if parent.identity != ckpt.parent_id:
                raise MissingParentError(f"{path}: {self.base.folder} is not the base it was compressed against")
            state = decompress(ckpt, parent)
        else:
            state = decompress(ckpt)
        return _check_state(state, path)

    def all(self) -> Tensors:
        """Return all tensors of the folder.

        Raises:
            BadArgumentError: two files have one of the same name.
        """
        found: Tensors = {}
        for file in self.compressed or self.raw:
            tensors = self.read(file)[1]
            twice = next((name for name in tensors if name in found), None)
            if twice is not None:
                raise BadArgumentError(f"{self.folder}: {twice} is in several files; restore the folder with to=")
            found |= tensors
        return found

    def some(self, names: Mapping[str, Any], preferred: Path) -> Tensors:
        """Return the tensors of these names that exist, preferably from one file."""
        where = self._where()
        chosen: dict[Path, list[str]] = {}
        for name in names:
            files = where.get(name, [])
            fitting = [f for f in files if str(f).removesuffix(SUFFIX) == str(preferred)] or files
            if fitting:
                chosen.setdefault(fitting[0], []).append(name)
        found: Tensors = {}
        for file, present in chosen.items():
            tensors = self._cached(file)
            found |= {name: tensors[name] for name in present}
        return found

    def _cached(self, file: Path) -> Tensors:
        # The parts of a base follow those of the model, so the same file is asked for again and again.
        if self._open is None or self._open[0] != file:
            self._open = None
            self._open = (file, self.read(file)[1])
        return self._open[1]

    def _where(self) -> dict[str, list[Path]]:
        if self._names is None:
            self._names = {}
            for file in self.compressed or self.raw:
                path = self.folder / file
                names = _keys(_read_checkpoint(path)) if file in self.compressed else _safetensors_names(path)
                for name in names:
                    self._names.setdefault(name, []).append(file)
            if not self._names:
                raise BadArgumentError(f"{self.folder}: no safetensors in it")
        return self._names


def base_parent(base: Tensors, wanted: Mapping[str, Sort]) -> Checkpoint:
    """Return the base's tensors that fit in name, dtype and shape, as a parent checkpoint.

    Its identity is a hash of these tensors, not of a compressed file. So a delta made with one release of the codec is
    readable with another, whether the given base is compressed or not. The base is not encoded.
    """
    same = {name: t for name, t in sorted(base.items()) if wanted.get(name) == sort_of(t)}
    nodes, found = tree.flatten({"tensors": same}, is_array)
    digest = blake3()
    arrays, memory, total = [], {}, 0
    for node in found:
        spec, flat = read_leaf(node.value, node.path)
        data = as_bytes(flat)
        digest.update(json.dumps([node.path, spec.dtype, list(spec.shape)]).encode())
        digest.update(data.data)
        memory[node.key] = BytesReference(data)
        arrays.append(StoredArray(spec.dtype, spec.shape).to_json())
        total += spec.nbytes
    groups = groups_to_json([StoredGroup([i], "bytes", []) for i in range(len(arrays))])
    header = {"parent": None, "as": digest.hexdigest(), "raw": total, "tree": nodes, "arrays": arrays, "groups": groups}
    return Checkpoint(container.write(header, [])[0], dict(memory))


def sort_of(tensor: torch.Tensor) -> Sort:
    """Return dtype and shape of a tensor, which are equal for interchangeable tensors."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _keys(ckpt: Checkpoint) -> dict[str, Sort]:
    """Return dtype and shape of a compressed file's tensors, by name."""
    return {r.path.removeprefix("tensors/"): (r.spec.dtype, r.spec.shape) for r in ckpt.records}


def _check_state(state: Any, path: Path) -> tuple[dict[str, str], Tensors]:
    ok = isinstance(state, dict) and set(state) == {"metadata", "tensors"}
    ok = ok and all(isinstance(part, dict) for part in state.values())
    ok = ok and all(isinstance(k, str) and isinstance(v, str) for k, v in state["metadata"].items())
    if not ok or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in state["tensors"].items()):
        raise CorruptDataError(f"{path}: not what save_pretrained writes")
    return state["metadata"], state["tensors"]


def _read_checkpoint(path: Path) -> Checkpoint:
    try:
        return Checkpoint.from_bytes(read_file(path))
    except CorruptDataError as e:
        raise CorruptDataError(f"{path}: {e}") from None


def _read_safetensors(path: Path) -> tuple[dict[str, str], Tensors]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as e:
        raise CorruptDataError(f"{path}: {e}") from None


def _safetensors_names(path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as e:
        raise CorruptDataError(f"{path}: {e}") from None


def _walk(folder: Path, top: Path, above: tuple[Path, ...] = ()) -> Iterator[Path]:
    """Yield the files below a folder, except in hidden folders, where tools keep caches.

    Args:
        folder: which.
        top: the folder that the user has named.
        above: the real folders that this one is in.

    Raises:
        BadArgumentError: an entry is a link to nothing, to a folder that it is in, or out of `top` (see `check_link`),
            or neither a file nor a folder.
    """
    above = (*above, folder.resolve())
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            if entry.name.startswith("."):
                continue
            if entry.resolve() in above:
                raise BadArgumentError(f"{entry} links to {entry.resolve()}, a folder that it is in")
            check_link(entry, top)
            yield from _walk(entry, top, above)
        elif entry.is_file():
            check_link(entry, top)
            yield entry
        else:
            what = f"a link to {os.readlink(entry)}, which is not there" if entry.is_symlink() else "no ordinary file"
            raise BadArgumentError(f"{entry} is {what}")


def refuse_within(target: PathLike, *folders: Path) -> None:
    """Refuse to write into a folder that is read.

    Raises:
        BadArgumentError: the target is in one of the folders.
    """
    try:
        path = Path(target).resolve()
    except TypeError:
        raise BadArgumentError(f"a folder must be a path, not {type(target).__qualname__}") from None
    for folder in folders:
        if folder.resolve() in path.parents:
            raise BadArgumentError(f"{path} is in {folder}, which it would be made from; choose a place outside")


def new_folder(path: PathLike) -> Path:
    """Check that a folder is new or empty, and create its parents."""
    try:
        target = Path(path).absolute()
    except TypeError:
        raise BadArgumentError(f"a folder must be a path, not {type(path).__qualname__}") from None
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadArgumentError(f"{target} is not empty")
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def write_file(path: Path, data: bytes) -> None:
    """Write a new file durably, making its folder; FileExistsError if it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's bytes, and create the folder of the copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
