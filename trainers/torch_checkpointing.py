"""torch-checkpointing: a storage that compresses the files of its `CheckpointManager`.

    storage = CompressedStorageConfig(cfg=sp.Config(), kinds=sp.kinds(model, optimizer))
    manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))

Its writers, barriers, resharding and commit (a folder that is renamed when all ranks have written) stay its own.
"""

from __future__ import annotations

import functools
import io
import operator
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..codec.checkpoint import Checkpoint, decompress
from ..codec.compress import compress_inputs
from ..codec.config import Config
from ..codec.errors import CorruptDataError, ShrinkpointWarning
from ..codec.evidence.kind import check_kinds
from ..codec.format.container import MAGIC
from ..codec.inputs import Inputs
from ..codec.named_presets import check_config
from . import required
from .dcp.metadata import Place, insert, kinds_of, place

with required("this adapter needs torch-checkpointing", "pip install torch-checkpointing"):
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorage, LocalFileSystemStorageConfig

TORCH, STATE = "torch", "state"


@dataclass
class CompressedStorageConfig(LocalFileSystemStorageConfig):  # type: ignore[misc]
    """Storage of a `CheckpointManager` on local disks that compresses its files.

    Each file that torch would write holds a base of its tensors instead, and torch's own pickle of everything else; the
    manager reads what torch would have written. An item that cannot be compressed is stored as torch stores it, and so
    are files of other formats (JSON, safetensors, raw bytes).

    Args:
        cfg: how to compress; default `Config()`.
        kinds: `{path: layer type or Kind}` by the paths within an item, as `shrinkpoint.kinds(model, optimizer)` gives
            it; default: by the optimizer's entries, and exact without them.

    Raises:
        BadArgumentError: (when the manager is built) an argument of a wrong kind.
    """

    # Unaligned writes past the page cache fail.
    use_direct_io: bool = False
    cfg: Config | str | None = None
    kinds: Mapping[str, Any] | None = None

    def create_storage(self) -> CompressedStorage:
        """Return the storage; called by torch-checkpointing, also in its worker process."""
        return CompressedStorage(self)


class CompressedStorage(LocalFileSystemStorage):  # type: ignore[misc]
    """The storage itself, which `CompressedStorageConfig` creates."""

    def __init__(self, config: CompressedStorageConfig) -> None:
        super().__init__(config)
        self.cfg = Config() if config.cfg is None else check_config(config.cfg)
        self.kinds = config.kinds
        check_kinds(self.kinds)
        self._lock = threading.Lock()
        # The file that was read last: the package reads one in several parts.
        self._last: tuple[Any, bytes] | None = None

    def stream_write(self, path: Path) -> io.IOBase:
        """Return the stream that a file of torch is written to."""
        return _Packed(self, path)

    def stream_read(self, path: Path, read_args: Any = None) -> io.RawIOBase:
        """Return the bytes that torch would have written."""
        found = self._unpacked(path)
        return super().stream_read(path, read_args) if found is None else io.BytesIO(found)  # type: ignore[return-value]

    def getsize(self, path: Path) -> int:
        """Return the number of bytes that torch would have written."""
        found = self._unpacked(path)
        return int(super().getsize(path)) if found is None else len(found)

    def _unpacked(self, path: Path) -> bytes | None:
        """Return the expanded bytes of a file; None if it is not compressed."""
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                return None
            with self._lock:
                status = path.stat()
                key = (path, status.st_ino, status.st_mtime_ns)
                if self._last is None or self._last[0] != key:
                    self._last = None
                    self._last = key, unpack(MAGIC + file.read())
                return self._last[1]


class _Packed(io.RawIOBase):
    """A stream in memory, which is compressed into a file when it is closed without an error."""

    def __init__(self, storage: CompressedStorage, path: Path) -> None:
        super().__init__()
        self._storage, self._path, self._data = storage, path, bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._data += data
        return len(data)

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            try:
                data: Any = pack(self._data, self._storage.cfg, self._storage.kinds)
            except Exception as e:
                # A state that cannot be compressed must not be lost.
                warnings.warn(f"{self._path}: stored as torch does: {e}", ShrinkpointWarning, stacklevel=2)
                data = self._data
            self._storage.write(self._path, data)
        self.close()


def pack(data: bytearray, cfg: Config, kinds: Mapping[str, Any] | None) -> bytes:
    """Return the bytes of a checkpoint of what `torch.save` wrote in this process.

    Its tree has the tensors, all other bytes, and for each tensor the number of those before it and its keys.

    Raises:
        UnsupportedLeafError, BadArgumentError: it cannot be compressed.
    """
    state: dict[str, Any] = {}
    shards: dict[Place, Any] = {}
    rest, pieces, end = [], [], 0
    whole = torch.load(io.BytesIO(data), map_location="meta", weights_only=False)
    for begin, path, like in sorted(_tensors(whole, (), set()), key=lambda found: found[0]):
        keys = place(".".join(path), path)
        values = torch.frombuffer(data, dtype=like.dtype, count=like.numel(), offset=begin)
        shards[keys] = values.as_strided(like.shape, like.stride())
        insert(state, keys, shards[keys], ".".join(path))
        rest.append(data[end:begin])
        pieces.append([begin - end, list(keys)])
        end = begin + like.untyped_storage().nbytes()
    own = {"rest": np.frombuffer(b"".join([*rest, data[end:]]), np.uint8), "pieces": pieces}
    known = {f"{STATE}/{path}": kind for path, kind in kinds_of(shards, {}, kinds).items()}
    inputs = Inputs.of({TORCH: own, STATE: state}, None, known)
    # An item has only some of the arrays that rules are for.
    return compress_inputs(replace(inputs, is_whole=False), cfg).to_bytes()


def unpack(data: bytes) -> bytes:
    """Return what `torch.save` wrote, with the values that were kept.

    Raises:
        CorruptDataError: altered bytes, or those of another checkpoint.
    """
    found: Any = decompress(Checkpoint.from_bytes(data))
    out, at = [], 0
    try:
        rest = found[TORCH]["rest"].tobytes()
        for before, keys in found[TORCH]["pieces"]:
            tensor = functools.reduce(operator.getitem, keys, found[STATE])
            values = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
            out += [rest[at : at + before], values.numpy().tobytes()]
            at += before
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as e:
        raise CorruptDataError(f"not a file of torch-checkpointing: {type(e).__name__}: {e}") from None
    return b"".join([*out, rest[at:]])


def _tensors(node: Any, path: tuple[str, ...], seen: set[int]) -> Iterator[tuple[int, tuple[str, ...], Any]]:
    """Yield tensors that fill their memory, each once, with their offsets and paths."""
    if isinstance(node, (Mapping, list, tuple)):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _tensors(value, (*path, str(key)), seen)
        return
    tensor = getattr(node, "_local_tensor", node)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        return
    memory, size = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    offset = getattr(memory, "_checkpoint_offset", None)
    if offset is None or offset in seen or memory.nbytes() != size or not size:
        return
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        seen.add(offset)
        yield offset, path, tensor
