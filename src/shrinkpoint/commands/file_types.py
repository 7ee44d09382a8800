"""Names of file types that `compress` and `diff` cannot read, by the first bytes of a file."""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path

from ..codec.format.bounded_json import loads
from ..store.regular_files import regular
from .files import is_spt

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
    if _is_safetensors(path, head):
        return _truncated_safetensors(path, head)
    if text.startswith((b"{", b"[")) and _is_ascii(head):
        return "a JSON document; a .pt or safetensors file or a DCP folder is needed here"
    return None


def folder_contents(folder: Path) -> str:
    """Name the files in a folder that `compress` could read, for messages; "" without any."""
    endings = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
    names = sorted(p.name for p in folder.iterdir() if p.suffix in endings)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


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


def _is_safetensors(path: Path, head: bytes) -> bool:
    return path.suffix == ".safetensors" or (len(head) > 8 and head[8:9] == b"{")


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


def _is_ascii(head: bytes) -> bool:
    return all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in head)
