"""Read and write `.pt` and safetensors files and DCP folders, executing nothing in them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..codec.errors import BadArgumentError, CorruptDataError, UnsupportedLeafError
from ..codec.format.bounded_json import loads
from ..codec.state import tree
from ..codec.state.leaves import is_array
from ..store.local import regular
from .dcp import is_dcp, load_dcp, load_plain, save_dcp
from .inputs import is_spt, is_utf8
from .outputs import check_apart, check_free, listed, note, write_file, write_folder

FORMATS = ("pt", "safetensors", "dcp")
_TREE = "shrinkpoint.tree"
METADATA = "__metadata__"
"""Key of a state that holds the texts in the header of a safetensors file; safetensors reserves the name for them."""
SUFFIXES = {".pt": "pt", ".pth": "pt", ".bin": "pt", ".ckpt": "pt", ".safetensors": "safetensors"}
"""Ends of the names of files, and their formats."""


def format_of(target: Path, requested: str | None) -> str:
    """Return the format of an output: as requested, otherwise by its suffix."""
    if requested is not None:
        if requested not in FORMATS:
            raise BadArgumentError(f"--to is {requested!r}; it must be one of {', '.join(FORMATS)}")
        return requested
    found = SUFFIXES.get(target.suffix)
    if found is None:
        raise BadArgumentError(f"{target} must end in one of {', '.join(SUFFIXES)}; or use --to {'|'.join(FORMATS)}")
    return found


def load_state(path: Path) -> Any:
    """Load the state in a `.pt` file, a safetensors file or a DCP folder.

    The type is recognized by the contents.

    Raises:
        CorruptDataError: it is a file of another type, truncated or damaged; the message names the type.
        UnsupportedLeafError: it holds objects that only pickle can load.
        OSError: it does not exist, or cannot be read.
    """
    if path.is_dir():
        if not is_dcp(path):
            kind = "a store" if (path / "steps").is_dir() else "not a folder of torch.distributed.checkpoint"
            names = listed(sorted(p.name for p in path.iterdir() if p.suffix in SUFFIXES), 3)
            raise CorruptDataError(
                f"{path}: is {kind}; a .pt or safetensors file or a DCP folder is needed here"
                + (f", such as its {names}" if names else "")
            )
        return load_dcp(path)
    if (reason := unreadable(path)) is not None:
        raise CorruptDataError(f"{path}: cannot be read: {reason}")
    with open(path, "rb", opener=regular) as file:
        start = file.read(9)
    if path.suffix == ".safetensors" or (len(start) == 9 and start[8:] == b"{" and start[:2] != b"PK"):
        return _load_safetensors(path)
    state = load_plain(path, str(path))
    if not isinstance(state, (dict, list, tuple)):
        raise UnsupportedLeafError(f"{path}: holds a {type(state).__qualname__}, not a dict, list or tuple of tensors")
    return state


def _load_safetensors(path: Path) -> Any:
    from ..trainers.hub import read_safetensors

    metadata, arrays = read_safetensors(path)
    own = {key: text for key, text in metadata.items() if key != _TREE and (key, text) != ("format", "pt")}
    if _TREE not in metadata:
        return arrays | {METADATA: own} if own else arrays
    used: set[str] = set()

    def place(_number: int, where: Any) -> Any:
        name = where()[0]
        if name not in arrays:
            raise CorruptDataError(f"{path}: its tree has an array {name[:80]!r} that is not in the file")
        used.add(name)
        return arrays[name]

    try:
        nodes = loads(metadata[_TREE].encode())
    except ValueError as error:
        raise CorruptDataError(f"{path}: {_TREE}: {str(error)[:200]}") from None
    if not isinstance(nodes, list):
        raise CorruptDataError(f"{path}: {_TREE} is not a tree")
    state = tree.unflatten(nodes, place)
    if used != set(arrays):
        raise CorruptDataError(f"{path}: its tree lacks {len(set(arrays) - used)} of its arrays")
    if own and not isinstance(state, dict):
        note(f"the header's metadata is left out, because the state is a {type(state).__name__}: {listed(list(own))}")
    return state | {METADATA: own} if own and isinstance(state, dict) else state


def check_target(target: Path, kind: str, force: bool, read: Iterable[str]) -> None:
    """Check before the work that an output may be written.

    Args:
        target: the output.
        kind: its format, one of `FORMATS`.
        force: whether it may replace an existing file or DCP folder.
        read: its inputs, see `check_apart`.

    Raises:
        BadArgumentError: it may not be written.
    """
    check_apart(target, read)
    check_free(target, force)
    is_store = (target / "steps").is_dir()
    if target.is_dir() and (is_store or not (kind == "dcp" and (is_dcp(target) or not any(target.iterdir())))):
        what = "a store" if is_store else "not a DCP folder" if kind == "dcp" else "a folder"
        raise BadArgumentError(f"{target} is {what}, and --force does not replace it")


def save_state(state: Any, target: Path, kind: str, force: bool) -> None:
    """Write a state in a format of `FORMATS`, completely or not at all.

    Call `check_target` first.
    """
    if kind != "safetensors" and isinstance(state, dict) and _are_texts(state.get(METADATA)):
        note(f"the header's metadata of a safetensors file becomes the entry {METADATA!r}")
    if kind == "safetensors":
        arrays, metadata = _for_safetensors(state)
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        with _as_os_error(target, SafetensorError):
            write_file(target, force, lambda path: save_file(arrays, path, metadata))
    elif kind == "dcp":
        _check_dcp(state)
        with _as_os_error(target, CorruptDataError):
            write_folder(target, force, lambda path: save_dcp(state, path))
    else:
        import numpy as np
        import torch

        _, found = tree.flatten(state, is_array)
        foreign = sum(not isinstance(a.value, torch.Tensor) for a in found)
        if any(not isinstance(a.value, (torch.Tensor, np.ndarray, np.generic)) for a in found):
            raise UnsupportedLeafError(
                f"{target}: arrays that are neither torch tensors nor NumPy arrays would have to be pickled"
            )
        if foreign:
            note(
                f"{foreign} NumPy arrays are written as NumPy arrays: torch.load needs weights_only=False to read them"
            )
        with _as_os_error(target, RuntimeError):
            write_file(target, force, lambda path: _torch_save(state, path))


class _Remembering(io.BufferedWriter):
    """A file that keeps the error of a write, because torch raises another error instead."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write, and keep an error."""
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def _torch_save(state: Any, path: Path) -> None:
    """Call `torch.save`, and raise the system's error for a full disk."""
    import torch

    with _Remembering(io.FileIO(path, "wb")) as file:
        try:
            torch.save(state, file)
        except RuntimeError:
            if file.error is None:
                raise
            raise file.error from None


@contextlib.contextmanager
def _as_os_error(target: Path, kind: type[Exception]) -> Iterator[None]:
    """Raise a library's error on a full disk as an OSError with the name of the output."""
    try:
        yield
    except kind as error:
        raise OSError(f"{target} could not be written: {str(error).strip().splitlines()[0][:300]}") from None


def _for_safetensors(state: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Return tensors by path, and the texts of the header.

    These are `METADATA`, and the tree unless it is a flat dict.
    """
    import numpy as np
    import torch

    own = {"format": "pt"}
    if type(state) is dict and _are_texts(state.get(METADATA)):
        own |= state[METADATA]
        state = {key: value for key, value in state.items() if key != METADATA}
    nodes, found = tree.flatten(state, is_array)
    arrays: dict[str, Any] = {}
    pointers: set[int] = set()
    tied = 0
    for node in found:
        value = node.value
        if not isinstance(value, torch.Tensor):
            array = np.array(value)
            try:
                value = torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
            except TypeError as error:
                raise UnsupportedLeafError(f"{node.path}: safetensors: {error}") from None
        if node.path == "__metadata__" or not is_utf8(node.path):
            raise BadArgumentError(f"safetensors does not allow the array name {ascii(node.path)[:80]}; use --to pt")
        if node.path in arrays:
            raise BadArgumentError(f"two arrays have the path {node.path!r}, and names in safetensors must be unique")
        if value.dtype in (torch.complex32, torch.complex128):
            raise UnsupportedLeafError(f"{node.path}: safetensors has no {value.dtype}; use --to pt")
        value = value.contiguous()
        if value.numel() and value.data_ptr() in pointers:
            value, tied = value.clone(), tied + 1
        pointers.add(value.data_ptr())
        arrays[node.path] = value
    if tied:
        note(f"{tied} tied arrays are written once per name")
    flat = type(state) is dict and all(is_array(v) for v in state.values()) and list(state) == list(arrays)
    if flat:
        return arrays, own
    # Arrays are found by their paths; their numbers are not used.
    return arrays, own | {_TREE: json.dumps(nodes)}


def _are_texts(value: Any) -> bool:
    """Return whether a value can be the metadata of a safetensors header."""
    texts = [*value, *value.values()] if type(value) is dict else []
    return bool(texts) and _TREE not in texts and all(type(text) is str and is_utf8(text) for text in texts)


def _check_dcp(state: Any) -> None:
    """Raise for a state that a DCP folder cannot hold, and note the parts that it does not keep."""
    if not isinstance(state, dict):
        raise BadArgumentError(f"a DCP folder holds a dict, not a {type(state).__qualname__}; use --under PATH")
    lost: list[str] = []
    renamed = 0
    stack: list[tuple[str, Any]] = [("", state)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict):
            if not value and path:
                lost.append(path)
            renamed += sum(type(k) is not str for k in value)
            if len({str(k) for k in value}) != len(value):
                raise BadArgumentError(f"{path or 'the state'}: two keys become the same text in DCP")
            stack.extend((f"{path}/{k}" if path else str(k), v) for k, v in value.items())
        elif isinstance(value, list):
            stack.extend((f"{path}/{i}", v) for i, v in enumerate(value))
    if renamed:
        note(f"{renamed} keys that are not text become text, because DCP has no other keys")
    if lost:
        note(f"DCP has no empty dicts; omitted: {listed(lost)}")


_HEAD = 1024
"""Number of bytes at the start of a file that are examined."""
_LFS = b"version https://git-lfs.github.com/spec/"
_MAGIC = (
    (b"GGUF", "a GGUF file of llama.cpp"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy .npy file"),
    (b"\x1f\x8b", "a gzip file: unpack it first"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard file: unpack it first"),
    (b"BZh", "a bzip2 file: unpack it first"),
    (b"\xfd7zXZ\x00", "an xz file: unpack it first"),
    (b"PAR1", "a Parquet file"),
)
_ONNX = tuple(bytes([8, version, field]) for version in range(1, 16) for field in (0x12, 0x1A, 0x3A, 0x42))
"""An ONNX model is a protobuf message that begins with the version of its format."""
_LARGEST_HEADER = 100_000_000
"""Bytes of the largest header that safetensors accepts."""
_ZIP = b"PK\x03\x04"


def unreadable(path: Path) -> str | None:
    """Return why a file cannot be a checkpoint of torch or safetensors, or None.

    Args:
        path: an existing file.

    Raises:
        OSError: it cannot be read.
    """
    with open(path, "rb", opener=regular) as file:
        head = file.read(_HEAD)
    if not head:
        return "the file is empty"
    if head.startswith(_LFS):
        return "a Git LFS pointer, not the file itself: `git lfs pull` fetches it"
    if is_spt(path):
        return "a checkpoint file of shrinkpoint: `shrinkpoint restore` converts it to another format"
    if head[8:9] == b"{" and struct.unpack("<Q", head[:8])[0] <= _LARGEST_HEADER:
        return _truncated_safetensors(path, head)  # it begins with a length, which may look like another format
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return f"{name}; a .pt or safetensors file or a DCP folder is needed here"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        kind = "an XML document" if text.startswith(b"<?xml") else "an HTML page"
        return f"{kind}, perhaps the error page of a failed download"
    if path.suffix == ".onnx" or head.startswith(_ONNX):
        return "an ONNX model; a .pt or safetensors file or a DCP folder is needed here"
    if head.startswith(_ZIP):
        return _unreadable_zip(path)
    if path.suffix == ".safetensors" or (len(head) > 8 and head[8:9] == b"{"):
        return _truncated_safetensors(path, head)
    if text.startswith((b"{", b"[")) and all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in head):
        return "a JSON document; a .pt or safetensors file or a DCP folder is needed here"
    return None


def _unreadable_zip(path: Path) -> str | None:
    try:
        with open(path, "rb", opener=regular) as file, zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError):
        return "the file is truncated or damaged: it begins as an archive of torch.save, whose end is missing"
    if any(name.endswith("/constants.pkl") for name in names):
        return "a TorchScript archive; save the state_dict() of the module instead"
    if any(name.endswith("/models/model.json") for name in names):
        return "an archive of torch.export; save the state_dict() of the module instead"
    if names and all(name.endswith(".npy") for name in names):
        return "a NumPy .npz file; a .pt or safetensors file or a DCP folder is needed here"
    return None


def _truncated_safetensors(path: Path, head: bytes) -> str | None:
    """The reason, if the file is shorter than its header says."""
    size = os.stat(path).st_size
    if size < 8:
        return f"the file is truncated: {size} bytes are less than any safetensors header"
    (length,) = struct.unpack("<Q", head[:8])
    if length > size - 8:
        if head[8:9] != b"{":
            return None  # not a safetensors file at all
        return f"the file is truncated: its header has {length} bytes, and the file {size}"
    if length > _LARGEST_HEADER:
        return None  # safetensors refuses it
    try:
        with open(path, "rb", opener=regular) as file:
            file.seek(8)
            header = loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
        return f"the file is truncated: it has {size} of {whole} bytes" if size < whole else None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None
