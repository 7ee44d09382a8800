"""Published versions as slime's folders, for the endpoint `/pull_weights` of SGLang.

    weight_v000001/   a whole checkpoint: model.safetensors
    weight_v000002/   changes: model-00000-of-00001.safetensors with the compressed changes of each tensor, their
                      checksums in its metadata, and model.safetensors.index.json with the format's fields

The numbers ascend by one. The endpoint is in slime's patch of SGLang, not in SGLang itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
import xxhash
import zstandard
from safetensors.torch import save_file

from ...codec.errors import BadArgumentError
from ...codec.state.leaves import NpArray
from ...store.regular_files import check_link
from ..model_folder import PathLike
from .host_copy import Change, HostCopy
from .tensors import host_bytes

_NAME = re.compile(r"weight_v(\d{6})")
_LONGEST = 1 << 32
"""Bytes of a tensor; positions have 32 bits."""


class DeltaFolders:
    """Repeat the versions of a `Publisher` as numbered folders in a shared file system.

    The first folder of a run, and one after a base had to be read, is a whole checkpoint; others are changes against
    the folder before. Only one process writes to a folder.

    Args:
        url: the URL of the `Publisher`; it must have a version.
        folder: where numbered folders are written; they are not removed.
        model: a folder whose other files (configuration, tokenizer) are copied into whole checkpoints, because the
            endpoint removes files that a whole checkpoint lacks.

    Raises:
        BadArgumentError: a tensor of 4 GiB or more, for which the format has no positions.
    """

    def __init__(self, url: str | os.PathLike[str], folder: PathLike, *, model: PathLike | None = None) -> None:
        self.folder, self._model = Path(folder), None if model is None else Path(model)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._copy = HostCopy(url)
        for name, tensor in self._copy.tensors.items():
            if tensor.nbytes >= _LONGEST:
                raise BadArgumentError(f"{name}: {tensor.nbytes} bytes, at most {_LONGEST - 1}")
        self._whole = True
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        self.number = max((int(name[1]) for name in found if name), default=0)

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
            save_file(self._copy.tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        else:
            self._write_changes(temporary, changes, number)
        for path in temporary.iterdir():
            _sync(path)
        _sync(temporary)
        os.rename(temporary, target)
        _sync(self.folder)
        self.number = number

    def _write_changes(self, folder: Path, changes: Sequence[Change], number: int) -> None:
        name = "model-00000-of-00001.safetensors"
        packed = {change.name: np.frombuffer(encode(change), np.uint8) for change in changes}
        checksums = {
            change.name: xxhash.xxh3_128_hexdigest(host_bytes(self._copy.tensors[change.name]).data)
            for change in changes
        }
        if packed:
            safetensors.numpy.save_file(packed, folder / name, metadata=checksums)
        metadata = {
            "version": f"{number:06d}",
            "base_version": f"{number - 1:06d}",
            "delta_encoding": "overwrite",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        }
        index = {"metadata": metadata, "weight_map": dict.fromkeys(packed, name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def encode(change: Change) -> bytes:
    """Encode the changes of a tensor, their number, positions and values, by zstd-1."""
    size = change.values.element_size()
    old, new = (_bytes(values, size) for values in (change.before, change.values))
    differs = old != new
    positions = (change.positions[:, None] * size + np.arange(size))[differs].astype("<u4")
    count = np.array([positions.size], "<u4")
    return zstandard.ZstdCompressor(level=1).compress(count.tobytes() + positions.tobytes() + new[differs].tobytes())


def _bytes(values: torch.Tensor, size: int) -> NpArray:
    return host_bytes(values).reshape(-1, size)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
