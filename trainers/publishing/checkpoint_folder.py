"""A folder of safetensors files that follows a `Publisher`, for inference engines.

SGLang loads such a folder when `/update_weights_from_disk` is called with its path.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from ...codec.errors import BadArgumentError, CorruptDataError
from ...codec.format.bounded_json import loads
from ...store.local import LocalFiles, check_link, follow_umask, regular
from .subscriber import Subscriber, published_tensors

MARKER = "shrinkpoint-version.json"
"""File that names the version of a folder; it is missing while the folder is written."""
_DTYPES = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "BOOL": "bool",
    "C64": "complex64",
    **{f"F{n}": f"float{n}" for n in (16, 32, 64)},
    **{f"{kind}{n}": f"{name}{n}" for kind, name in (("I", "int"), ("U", "uint")) for n in (8, 16, 32, 64)},
}
_LONGEST_HEADER = 100 << 20


class CheckpointFolder:
    """Bring the safetensors files of a folder to published versions, in place.

    Nothing may read the folder during an update: the file `shrinkpoint-version.json` is missing then, and after an
    update that was interrupted; the next update begins from a base.

    Args:
        url: the URL of the `Publisher`.
        folder: has safetensors files with the published names, dtypes and shapes; without such files, one is made.
            Other files, as the configuration and the tokenizer, are left as they are.
        key: as `Subscriber` has it.

    Raises:
        BadArgumentError: a folder whose tensors cannot be mapped, or with a safetensors file that is a link out of it.
    """

    def __init__(self, url: str | os.PathLike[str], folder: str | os.PathLike[str], *, key: Any = None) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files = LocalFiles(os.path.abspath(self.folder))
        if not any(self.folder.glob("*.safetensors")):
            write_safetensors(self.folder / "model.safetensors", published_tensors(url, key))
        self._maps: list[mmap.mmap] = []
        tensors: dict[str, torch.Tensor] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            check_link(path, self.folder, writes=True)
            mapped, own = _mapped(path)
            twice = next((name for name in own if name in tensors), None)
            if twice is not None:
                raise BadArgumentError(f"{path}: {twice} is in another file as well")
            tensors |= own
            self._maps.append(mapped)
        self._subscriber = Subscriber(url, tensors, key=key)
        if not self._is_marked(self.version):
            self._files.remove([MARKER])

    @property
    def version(self) -> int | None:
        """The version that the folder holds; None if it is not known."""
        return self._subscriber.version

    def update(self, version: int | None = None) -> int | None:
        """Bring the folder to the newest or a given version, durably.

        Returns:
            The version that the folder now holds; None if no version exists.

        Raises: what `Subscriber.update` raises; the folder is as it was.
        """
        reached = self._subscriber.update(version=version, lock=self._without_marker())
        if reached is not None and not self._is_marked(reached):
            for mapped in self._maps:
                mapped.flush()
            self._files.write(MARKER, _marker(reached))
        return reached

    def _is_marked(self, version: int | None) -> bool:
        """Return whether the marker names a version, and not an earlier or another one."""
        with contextlib.suppress(OSError):
            return version is not None and self._files.read(MARKER) == _marker(version)
        return False

    @contextlib.contextmanager
    def _without_marker(self) -> Iterator[None]:
        """Remove the marker durably before the files are written."""
        self._files.remove([MARKER])
        yield


def _marker(version: int) -> bytes:
    return json.dumps({"version": version}).encode()


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file; BadArgumentError if it cannot hold a tensor."""
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)  # it may be a link
    try:
        save_file(tensors, temporary, metadata={"format": "pt"})
    except KeyError as e:
        raise BadArgumentError(f"{path}: safetensors cannot hold {e}") from None
    follow_umask(str(temporary))
    os.replace(temporary, path)


def _mapped(path: Path) -> tuple[mmap.mmap, dict[str, torch.Tensor]]:
    """Map a safetensors file into memory; return the mapping and its tensors."""
    with open(path, "r+b", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise CorruptDataError(f"{path}: {size} bytes, not a safetensors file")
        mapped = mmap.mmap(file.fileno(), 0)
    (length,) = struct.unpack("<Q", mapped[:8])
    if length > min(_LONGEST_HEADER, size - 8):
        raise CorruptDataError(f"{path}: a header of {length} bytes in a file of {size}")
    try:
        header = loads(mapped[8 : 8 + length])
        header.pop("__metadata__", None)
        return mapped, {name: _tensor(mapped, 8 + length, own) for name, own in header.items()}
    except (ValueError, TypeError, LookupError, AttributeError) as e:
        raise CorruptDataError(f"{path}: its header does not fit: {e!r:.200}") from None


def _tensor(mapped: mmap.mmap, data: int, entry: dict[str, Any]) -> torch.Tensor:
    dtype, shape, (begin, end) = getattr(torch, _DTYPES[entry["dtype"]]), entry["shape"], entry["data_offsets"]
    if entry["dtype"] == "F4":  # two elements a byte, which are one of torch's
        shape = [*shape[:-1], shape[-1] // 2]
    shape = tuple(map(int, shape))
    nbytes = math.prod(shape) * dtype.itemsize
    if not 0 <= begin <= end <= len(mapped) - data or end - begin != nbytes or any(n < 0 for n in shape):
        raise ValueError(f"{shape} of {entry['dtype']} at {begin} to {end}")
    if nbytes == 0:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    raw = np.frombuffer(mapped, np.uint8, nbytes, data + begin)
    return torch.from_numpy(raw).view(dtype).reshape(shape)
