"""torch-checkpointing: a storage that compresses the files of its `CheckpointManager`.

    storage = CompressedStorageConfig(cfg=sp.Config(), kinds=sp.kinds(model, optimizer))
    manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))

Its writers, barriers, resharding and commit (a folder that is renamed when all ranks have written) stay its own.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..codec.checkpoint import Checkpoint, decompress
from ..codec.compress import compress_inputs
from ..codec.config import Config
from ..codec.errors import CorruptDataError, ShrinkpointError
from ..codec.evidence.kind import check_kinds
from ..codec.format.container import MAGIC
from ..codec.inputs import Inputs
from ..codec.named_presets import check_config
from .dcp.entry_paths import Place, insert, kinds_of, place

if TYPE_CHECKING:
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorage, LocalFileSystemStorageConfig
else:
    try:
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorage, LocalFileSystemStorageConfig
    except ImportError:
        raise ImportError("this adapter needs torch-checkpointing: pip install torch-checkpointing") from None

TORCH, STATE = "torch", "state"


@dataclass
class CompressedStorageConfig(LocalFileSystemStorageConfig):  # type: ignore[misc]
    """Configuration of a storage on local disks, for `CheckpointManager.Config(storage_config=...)`.

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
        """Return the bytes of a compressed file, of which the last one is remembered; None: another file."""
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


class _Packed(io.BytesIO):
    """A stream in memory, which is compressed into a file when it is closed without an error."""

    def __init__(self, storage: CompressedStorage, path: Path) -> None:
        super().__init__()
        self._storage, self._path = storage, path

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            data = self.getvalue()
            try:
                data = pack(data, self._storage.cfg, self._storage.kinds)
            except ShrinkpointError:
                pass  # such as names that are not distinct as text
            self._storage.write(self._path, data)
        self.close()


def pack(data: bytes, cfg: Config, kinds: Mapping[str, Any] | None) -> bytes:
    """Return the bytes of a checkpoint of what `torch.save` wrote in this process.

    Raises:
        UnsupportedLeafError, BadArgumentError: it cannot be compressed.
    """
    whole = torch.load(io.BytesIO(data), map_location="meta", weights_only=False)
    state: dict[str, Any] = {}
    shards: dict[Place, Any] = {}
    pieces: list[tuple[int, int, Place]] = []
    for path, tensor in _tensors(whole, (), set()):
        begin, size = int(tensor.untyped_storage()._checkpoint_offset), tensor.untyped_storage().nbytes()
        keys = place(".".join(path), path)
        stored = torch.frombuffer(bytearray(data[begin : begin + size]), dtype=tensor.dtype)
        shards[keys] = stored.as_strided(tensor.shape, tensor.stride())
        insert(state, keys, shards[keys], ".".join(path))
        pieces.append((begin, begin + size, keys))
    pieces.sort()
    ends = [0, *(end for _, end, _ in pieces)]
    rest = b"".join(data[end:begin] for end, begin in zip(ends, [*(b for b, _, _ in pieces), len(data)], strict=True))
    table = [[begin, end, list(keys)] for begin, end, keys in pieces]
    own = {"size": len(data), "rest": np.frombuffer(rest, np.uint8), "pieces": table}
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
    try:
        own, state = found[TORCH], found[STATE]
        out, rest, at, end = bytearray(own["size"]), own["rest"].tobytes(), 0, 0
        for begin, stop, keys in [*own["pieces"], [len(out), len(out), None]]:
            out[end:begin] = rest[at : at + begin - end]
            at, end = at + begin - end, stop
            if keys is not None:
                tensor = state
                for key in keys:
                    tensor = tensor[key]
                flat = tensor.as_strided((tensor.numel(),), (1,))
                out[begin:stop] = flat.view(torch.uint8).numpy().tobytes()
    except (KeyError, TypeError, AttributeError) as e:
        raise CorruptDataError(f"not a file of torch-checkpointing: {type(e).__name__}: {e}") from None
    if len(out) != own["size"] or at != len(rest):
        raise CorruptDataError("the parts of a file of torch-checkpointing do not fit together")
    return bytes(out)


def _tensors(node: Any, path: tuple[str, ...], seen: set[int]) -> Sequence[tuple[tuple[str, ...], Any]]:
    """Return the tensors of a tree that fill their memory, each once, with their paths."""
    if isinstance(node, Mapping):
        return [found for key, value in node.items() for found in _tensors(value, (*path, str(key)), seen)]
    if isinstance(node, (list, tuple)):
        return [found for i, value in enumerate(node) for found in _tensors(value, (*path, str(i)), seen)]
    tensor = getattr(node, "_local_tensor", node)
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or not tensor.numel():
        return []
    memory, dense = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
    offset = getattr(memory, "_checkpoint_offset", None)
    ordered = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    if offset is None or offset in seen or memory.nbytes() != dense or not ordered or tensor.is_conj() or tensor.is_neg():
        return []
    seen.add(offset)
    return [(path, tensor.detach())]
