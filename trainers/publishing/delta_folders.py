"""Numbered folders with changes, which slime writes and its SGLang reads, both ways.

    weight_v000001/   a whole checkpoint: model.safetensors
    weight_v000002/   changes: model-00000-of-00001.safetensors with the compressed changes of each tensor, their
                      checksums in its metadata, and model.safetensors.index.json with the format's fields

The numbers ascend by one. A tensor's changes are, compressed by zstd, the exclusive or of its bytes ("xor"), or the
number, positions and values of the bytes that changed ("overwrite"). `DeltaFolders` repeats published versions for
engines with the endpoint `/pull_weights` (in slime's patch of SGLang, not in SGLang itself); `DeltaReader` brings
tensors to what a trainer wrote in this format.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import xxhash
import zstandard
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from ...codec.errors import BadArgumentError, CorruptDataError
from ...codec.format.bounded_json import loads
from ...codec.state.leaves import NpArray
from ...kernels.backend.arguments import choice, integer
from ...store.local import LocalFiles, check_link, follow_umask, sync_folder
from .checkpoint_folder import write_safetensors
from .subscriber import Change, HostCopy
from .tensors import host_bytes

_NAME = re.compile(r"weight_v(\d{6})")
_ENCODINGS = ("overwrite", "xor")
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError, zstandard.ZstdError)
"""Errors of reading a folder that is damaged or not of this format."""
_LONGEST = 1 << 32
"""Bytes of a tensor; positions have 32 bits."""


class DeltaFolders:
    """Repeat the versions of a `Publisher` as numbered folders in a shared file system.

    The first folder of a run, and one after a base had to be read, is a whole checkpoint; others are changes against
    the folder before. Only one process writes to a folder.

    Args:
        url: the URL of the `Publisher`; it must have a version.
        folder: where numbered folders are written; they are not removed.
        encoding: "overwrite" or "xor"; see above.
        model: a folder whose other files (configuration, tokenizer) are copied into whole checkpoints, because the
            endpoint removes files that a whole checkpoint lacks.
        key: as `Subscriber` has it.

    Raises:
        BadArgumentError: a tensor of 4 GiB or more, for which the format has no positions.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        folder: str | os.PathLike[str],
        *,
        encoding: str = "overwrite",
        model: str | os.PathLike[str] | None = None,
        key: Any = None,
    ) -> None:
        self._encoding = choice("encoding", encoding, _ENCODINGS)
        self.folder, self._model = Path(folder), None if model is None else Path(model)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._copy = HostCopy(url, key=key)
        for name, tensor in self._copy.tensors.items():
            if tensor.nbytes >= _LONGEST:
                raise BadArgumentError(f"{name}: {tensor.nbytes} bytes, at most {_LONGEST - 1}")
        self._whole = True
        self.number = newest_number(self.folder)

    @property
    def version(self) -> int | None:
        """The published version that the newest folder holds; None before the first update."""
        return None if self._whole else self._copy.version

    def update(self, version: int | None = None) -> int:
        """Write a folder with the newest or a given version, if that is not in the newest one.

        Returns:
            The number of the newest folder, the `target_version` of `/pull_weights`.

        Raises: what `Subscriber.update` raises; no folder is written.
        """
        whole, self._whole = self._whole, True  # should this stop half way, the next folder is a whole checkpoint
        before = self._copy.version
        try:
            changes = self._copy.changes(version)
        except BaseException:
            self._whole = whole or self._copy.version != before
            raise
        if self._copy.version is None:  # all versions were removed meanwhile
            return self.number
        if whole or changes is None:
            self._write(None)
        elif self._copy.version != before:
            self._write(changes)
        self._whole = False
        return self.number

    def _write(self, changes: Sequence[Change] | None) -> None:
        number = self.number + 1
        target = self.folder / f"weight_v{number:06d}"
        temporary = self.folder / f".tmp-weight_v{number:06d}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        if changes is None:
            for path in () if self._model is None else self._model.iterdir():
                if path.is_file() and not path.name.endswith((".safetensors", ".safetensors.index.json")):
                    check_link(path, path.parent)
                    shutil.copyfile(path, temporary / path.name)
            write_safetensors(temporary / "model.safetensors", self._copy.tensors)
        else:
            self._write_changes(temporary, changes, number)
        LocalFiles(os.path.abspath(temporary)).sync(os.listdir(temporary))
        os.rename(temporary, target)
        sync_folder(str(self.folder))
        self.number = number

    def _write_changes(self, folder: Path, changes: Sequence[Change], number: int) -> None:
        name = "model-00000-of-00001.safetensors"
        data = {change.name: host_bytes(self._copy.tensors[change.name]) for change in changes}
        packed = {c.name: np.frombuffer(encode(c, data[c.name].size, self._encoding), np.uint8) for c in changes}
        checksums = {name: _checksum("xxh3-128", own) for name, own in data.items()}
        if packed:
            safetensors.numpy.save_file(packed, folder / name, metadata=checksums)
            follow_umask(str(folder / name))
        metadata = {
            "version": f"{number:06d}",
            "base_version": f"{number - 1:06d}",
            "delta_encoding": self._encoding,
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        }
        index = {"metadata": metadata, "weight_map": dict.fromkeys(packed, name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class DeltaReader:
    """Bring tensors to the numbered folders that a trainer writes in this format.

    Args:
        folder: with the numbered folders.
        tensors: names and contiguous tensors on the host, which are written to.
        number: of the folder that the tensors are equal to; 0: what the trainer began with.
    """

    def __init__(self, folder: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], number: int = 0) -> None:
        self._folder, self._tensors, self.number = Path(folder), tensors, integer("number", number, 0)

    def update(self, number: int | None = None) -> int:
        """Bring the tensors to a folder, and return its number; default: the newest one.

        Everything is read and checked by its checksums before the first tensor is written.

        Raises:
            CorruptDataError: a folder is missing, damaged, or against other values; the tensors are as they were.
        """
        target = newest_number(self._folder) if number is None else integer("number", number, self.number)
        staged: dict[str, NpArray] = {}
        for at in range(self.number + 1, target + 1):
            path = self._folder / f"weight_v{at:06d}"
            try:
                self._stage(path, at, staged)
            except _DAMAGE as e:
                raise CorruptDataError(f"{path}: {e!r:.300}") from None
        with torch.no_grad():
            for name, data in staged.items():
                self._tensors[name].view(-1).view(torch.uint8).copy_(torch.from_numpy(data))
        self.number = max(self.number, target)
        return self.number

    def _stage(self, path: Path, number: int, staged: dict[str, NpArray]) -> None:
        files = sorted(path.glob("*.safetensors"))
        index = path / "model.safetensors.index.json"
        fields = loads(index.read_bytes())["metadata"] if index.exists() else {}
        if "delta_encoding" not in fields:  # a whole checkpoint
            found = {name: t for file in files for name, t in load_file(file).items()}
            missing = [name for name in self._tensors if name not in found]
            if missing:
                raise ValueError(f"the whole checkpoint lacks {missing[:5]}")
            for name, tensor in found.items():
                self._check(
                    name, tensor.dtype == self._tensors[name].dtype and tensor.shape == self._tensors[name].shape
                )
                staged[name] = host_bytes(tensor)
            return
        if (int(fields["version"]), int(fields["base_version"])) != (number, number - 1):
            raise ValueError(f"changes from {fields['base_version']} to {fields['version']}")
        if fields["delta_encoding"] not in _ENCODINGS or fields["compression_format"] != "zstd":
            raise ValueError(f"{fields['delta_encoding']} by {fields['compression_format']} is not known")
        for file in files:
            with safe_open(file, "np") as opened:
                checksums = opened.metadata() or {}
                for name in opened.keys():  # noqa: SIM118
                    before = staged[name] if name in staged else host_bytes(self._tensors[name])
                    data = decode(opened.get_tensor(name).tobytes(), before, fields["delta_encoding"])
                    self._check(name, _checksum(fields["checksum_format"], data) == checksums[name])
                    staged[name] = data

    def _check(self, name: str, fits: bool) -> None:
        if not fits:
            raise ValueError(f"{name}: not what the tensor here and its changes give")


def newest_number(folder: Path) -> int:
    """Return the number of the newest folder; 0 without one."""
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return max((int(name[1]) for name in found if name), default=0)


def encode(change: Change, nbytes: int, encoding: str) -> bytes:
    """Encode the changes of a tensor of so many bytes, by zstd-1."""
    size = change.values.element_size()
    old, new = (host_bytes(values).reshape(-1, size) for values in (change.before, change.values))
    differs = old != new
    positions = (change.positions[:, None] * size + np.arange(size))[differs]
    if encoding == "xor":
        plain = np.zeros(nbytes, np.uint8)
        plain[positions] = (old ^ new)[differs]
        return zstandard.ZstdCompressor(level=1).compress(plain.data)
    count = np.array([positions.size], "<u4")
    text = count.tobytes() + positions.astype("<u4").tobytes() + new[differs].tobytes()
    return zstandard.ZstdCompressor(level=1).compress(text)


def decode(data: bytes, before: NpArray, encoding: str) -> NpArray:
    """Return the bytes of a tensor after changes; ValueError or ZstdError if they do not fit."""
    most = before.size if encoding == "xor" else 4 + 5 * before.size
    if zstandard.frame_content_size(data) > most:
        raise ValueError(f"changes of more than {most} bytes")
    plain = np.frombuffer(zstandard.ZstdDecompressor().decompress(data, max_output_size=most), np.uint8)
    if encoding == "xor":
        if plain.size != before.size:
            raise ValueError(f"{plain.size} bytes for a tensor of {before.size}")
        return before ^ plain
    count = int.from_bytes(plain[:4].tobytes(), "little")
    positions = np.frombuffer(plain[4 : 4 + 4 * count].tobytes(), "<u4")
    if plain.size != 4 + 5 * count or (count and int(positions.max()) >= before.size):
        raise ValueError(f"{count} changes in {plain.size} bytes for a tensor of {before.size}")
    after = before.copy()
    after[positions] = plain[4 + 4 * count :]
    return after


def _checksum(kind: str, data: NpArray) -> str:
    if kind == "adler32":
        return f"{zlib.adler32(data.data):08x}"
    h = {"xxh3-128": xxhash.xxh3_128, "blake3": blake3}[kind]()
    h.update(data.data)
    return str(h.hexdigest())
