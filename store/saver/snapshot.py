"""A consistent copy of a state in memory that two processes share.

The copy is in one anonymous file in memory that is allocated once and used for every save: no file is left behind, and
no page faults occur after the first save. Trees are passed as JSON nodes, arrays as their bytes; nothing is pickled.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...codec.errors import ShrinkpointError, UnsupportedLeafError
from ...codec.memory_limit import available_memory
from ...codec.state import leaves, tree
from ...kernels.backend.arrays import imported, is_torch
from . import host_copy

Bytes = npt.NDArray[np.uint8]
CONTROL = 64
"""Bytes at the start of the arena that are not part of the snapshot: `Arena.stop`."""
_ALIGN = 64
_GROW = 1 << 20


class Arena:
    """Anonymous memory that can be shared with another process; it never shrinks.

    Args:
        fd: descriptor of the other process's arena, which this object then owns; None: a new one.
        size: its size in bytes.
    """

    def __init__(self, fd: int | None = None, size: int = 0) -> None:
        self.size = 0
        self.fd = anonymous("shrinkpoint-snapshot") if fd is None and os.name == "posix" else fd
        self._map: mmap.mmap | None = None
        self._pinned: int | None = None
        if size:
            self._attach(size)

    def _attach(self, size: int) -> None:
        """Map the memory; if that fails or is interrupted, the arena is empty."""
        self._map, self.size = None, 0
        if self.fd is None:
            self._map = mmap.mmap(-1, size)
        else:
            # Map every page now: one by one, during the first copy, takes many times as long.
            populate = getattr(mmap, "MAP_POPULATE", 0)
            self._map = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED | populate)
        self.size = size

    def reserve(self, nbytes: int) -> bool:
        """Make room for `nbytes` and the control bytes; return whether the memory was replaced.

        Raises:
            MemoryError: too little memory; the arena is unchanged, or empty if it could be allocated but not mapped.
        """
        size = -(-(nbytes + CONTROL) // _GROW) * _GROW
        if size <= self.size:
            return False
        available = available_memory()
        if available is not None and size - self.size > available:
            raise MemoryError(f"a snapshot of {nbytes} bytes: {available} bytes are available here")
        if self.fd is not None:
            try:
                os.ftruncate(self.fd, size)
                # Allocated now, so that too little memory is an error here rather than a SIGBUS during a copy.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self.fd, 0, size)
            except OSError as e:
                with contextlib.suppress(OSError):
                    os.ftruncate(self.fd, self.size)
                raise MemoryError(f"a snapshot of {nbytes} bytes: {e.strerror}") from None
        self.unpin()
        try:
            self._attach(size)
        except OSError as e:
            raise MemoryError(f"a snapshot of {nbytes} bytes: {e.strerror}") from None
        return True

    def view(self, offset: int, nbytes: int) -> Bytes:
        """Return bytes of the snapshot, shared, not copied."""
        if self._map is None or not 0 <= offset <= offset + nbytes <= self.size - CONTROL:
            raise ValueError(f"bytes {offset} to {offset + nbytes} of an arena of {self.size - CONTROL}")
        return np.frombuffer(self._map, np.uint8, nbytes, CONTROL + offset)

    @property
    def address(self) -> int:
        """Address of the first byte of the snapshot."""
        return int(np.frombuffer(self._map or b"", np.uint8).ctypes.data) + CONTROL

    @property
    def stop(self) -> bool:
        """Flag by which the owner of the arena asks the other process to stop its work."""
        return self._map is not None and self._map[0] != 0

    @stop.setter
    def stop(self, value: bool) -> None:
        if self._map is not None:
            self._map[0] = int(value)

    def pin(self, device: Any) -> None:
        """Lock the memory for direct copies from CUDA devices; warn if that is refused."""
        if self._pinned is not None or self._map is None:
            return
        import torch

        pointer = self.address - CONTROL
        with torch.cuda.device(device):  # the current one may be one that this process does not use
            status = int(torch.cuda.cudart().cudaHostRegister(pointer, self.size, 0))  # type: ignore[no-untyped-call]
            if status:
                # It stays CUDA's last error, which the next launch in this thread would raise as its own.
                with contextlib.suppress(RuntimeError):
                    torch.ones(1, device=device)
        if status:
            warnings.warn(
                f"snapshot memory of {self.size} bytes cannot be pinned (CUDA error {status}): copies will be slow",
                RuntimeWarning,
                stacklevel=4,
            )
            pointer = 0
        self._pinned = pointer

    def unpin(self) -> None:
        """Undo `pin`."""
        if self._pinned:
            import torch

            torch.cuda.cudart().cudaHostUnregister(self._pinned)  # type: ignore[no-untyped-call]
        self._pinned = None

    def close(self) -> None:
        """Release the memory; arrays that still view it keep it alive."""
        self.unpin()
        self._map, self.size = None, 0
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def anonymous(name: str) -> int:
    """Return the descriptor of a file without a name, in memory if the system has such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as f:
        return os.dup(f.fileno())


@dataclass(slots=True)
class Source:
    """An array that is to be copied.

    Args:
        spec: of the array.
        values: without gaps; the live array itself.
        pointer: to the values in host memory; 0 if they are elsewhere.
        storage: of a torch tensor, which keeps the memory if another thread gives the tensor another storage.
        size: in bytes.
        offset: in the arena.
    """

    spec: leaves.LeafSpec
    values: Any
    pointer: int
    storage: Any
    size: int
    offset: int

    def check_allocated(self) -> None:
        """Raise UnsupportedLeafError if the storage has become smaller or moved."""
        if self.storage is None:
            return
        begin = self.storage.data_ptr()
        pointer = self.pointer or begin
        if not begin <= pointer <= pointer + self.size <= begin + self.storage.nbytes():
            raise UnsupportedLeafError(
                f"the storage of a {self.spec.dtype} tensor of shape {list(self.spec.shape)} was freed while its copy "
                "began"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """The layout of some trees in an arena; nothing is copied yet.

    Args:
        trees: name -> nodes (see `codec.state.tree`), array numbers counted through all trees.
        sources: the arrays.
        nbytes: bytes of all arrays in the arena.
    """

    trees: dict[str, list[Any]]
    sources: list[Source]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A finished copy and its layout in the arena.

    Args:
        trees: name -> nodes.
        specs: of each array.
        offsets: of each array in the arena.
        kept: number -> flat copy of an array that stayed on its device.
        ready: (device, event) pairs: when those copies are complete.
    """

    trees: dict[str, list[Any]]
    specs: list[leaves.LeafSpec]
    offsets: list[int]
    kept: dict[int, Any] = field(default_factory=dict)
    ready: list[tuple[Any, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for another process that has the same arena."""
        # Few specs differ, and the trainer waits during this.
        numbers: dict[int, int] = {}
        of = [numbers.setdefault(id(spec), len(numbers)) for spec in self.specs]
        distinct = {id(spec): [spec.library, spec.dtype, list(spec.shape), list(spec.order)] for spec in self.specs}
        return {"trees": self.trees, "specs": [distinct[i] for i in numbers], "of": of, "offsets": self.offsets}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Snapshot:
        """Invert `to_json`."""
        distinct = [leaves.LeafSpec(lib, dtype, tuple(s), tuple(order)) for lib, dtype, s, order in data["specs"]]
        return Snapshot(data["trees"], [distinct[number] for number in data["of"]], data["offsets"])


def plan(trees: Mapping[str, Any]) -> Plan:
    """Flatten trees and lay them out, with tied arrays only once.

    Args:
        trees: name -> dict, list or tuple, as for `compress`.

    Raises:
        BadArgumentError, UnsupportedLeafError: see `compress`; the message has the path.
    """
    planned: dict[str, list[Any]] = {}
    sources: list[Source] = []
    first: dict[Any, int] = {}
    specs: dict[Any, leaves.LeafSpec] = {}
    end = 0
    for name, value in trees.items():
        nodes, arrays = tree.flatten(value, leaves.is_stored_as_array, spell=False)
        numbers: list[int] = []
        for node in arrays:
            plain = _plain_tensor(node.value)
            key = leaves.same_storage_key(node.value) if plain is None else plain[:4]
            number = None if key is None else first.get(key)
            if number is None:
                number = len(sources)
                if plain is not None:
                    pointer, *kind, storage = plain
                    if (spec := specs.get(tuple(kind))) is None:  # as `read_leaf` makes it; equal ones share one
                        order = leaves.memory_order(node.value)
                        spec = leaves.LeafSpec("torch", str(kind[0]).removeprefix("torch."), tuple(kind[1]), order)
                        specs[tuple(kind)] = spec
                    source = Source(spec, node.value, pointer, storage, node.value.nbytes, end)
                else:
                    try:
                        spec, flat = leaves.read_leaf(node.value, "", in_memory=True)
                    except ShrinkpointError:
                        # Spelling the paths of all arrays takes time: it is done only for a message.
                        _, spelled = tree.flatten(value, leaves.is_stored_as_array)
                        leaves.read_leaf(node.value, spelled[len(numbers)].path)
                        raise
                    storage = flat.untyped_storage() if is_torch(flat) else None
                    source = Source(spec, flat, _pointer(flat), storage, spec.nbytes, end)
                sources.append(source)
                end += -(-source.size // _ALIGN) * _ALIGN
                if key is not None:
                    first[key] = number
            numbers.append(number)
        planned[name] = [{"a": numbers[n["a"]]} if type(n) is dict and "a" in n else n for n in nodes]
    return Plan(planned, sources, end)


def _plain_tensor(t: Any) -> tuple[Any, ...] | None:
    """Return address, dtype, shape, strides and storage of a plain tensor on the host, or None.

    Most arrays of a state are such tensors, and `read_leaf`, which handles all kinds, takes five times as long.
    """
    torch = imported("torch")
    if torch is None or type(t) not in (torch.Tensor, torch.nn.Parameter):
        return None
    plain = (
        t.is_cpu
        and t.layout is torch.strided
        and not (t.is_nested or t.is_quantized or t.is_neg() or t.is_conj())
        and (t.is_contiguous() or leaves.memory_order(t))
    )
    if not plain:
        return None
    storage = t.untyped_storage()
    fits = 0 < t.storage_offset() * t.itemsize + t.nbytes <= storage.nbytes()
    return (t.data_ptr(), t.dtype, t.shape, t.stride(), storage) if fits else None


def _pointer(flat: Any) -> int:
    if not is_torch(flat):
        return int(flat.__array_interface__["data"][0])
    return int(flat.data_ptr()) if flat.device.type == "cpu" else 0


def take(planned: Plan, arena: Arena, *, on_device: bool = False) -> Snapshot:
    """Copy the arrays of a plan. When this returns, the live arrays may change.

    Args:
        planned: the plan, made from the arrays as they are now.
        arena: the target; its former contents are lost.
        on_device: copy arrays on a GPU there, for a reader in this process, rather than to the host.

    Raises:
        MemoryError: the arena cannot grow to this size.
        UnsupportedLeafError: another thread has freed the memory of an array since it was planned.
    """
    arena.reserve(planned.nbytes)
    there = next((source.values for source in planned.sources if source.size and not source.pointer), None)
    if there is not None and not on_device:
        arena.pin(there.device)
    base = arena.address
    kept: dict[int, Any] = {}
    pieces: list[tuple[int, int, int]] = []
    devices = set()
    for number, source in enumerate(planned.sources):
        if not source.size:
            continue
        source.check_allocated()
        if source.pointer:
            pieces.append((base + source.offset, source.pointer, source.size))
            continue
        devices.add(source.values.device)
        if on_device:
            kept[number] = source.values.clone()
        else:
            target = leaves.from_bytes(arena.view(source.offset, source.size), source.spec)
            target.copy_(source.values, non_blocking=True)
    host_copy.copy(pieces)
    specs, offsets = [source.spec for source in planned.sources], [source.offset for source in planned.sources]
    return Snapshot(planned.trees, specs, offsets, kept, _finish(devices, on_device))


def _finish(devices: set[Any], on_device: bool) -> list[tuple[Any, Any]]:
    """Wait for copies to the host; return the events that complete copies on a device."""
    events = []
    for device in devices:
        import torch

        if on_device:
            with torch.cuda.device(device):
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                events.append((device, event))
        else:
            torch.cuda.current_stream(device).synchronize()
    return events


def rebuild(snapshot: Snapshot, arena: Arena) -> dict[str, Any]:
    """Return the trees of a snapshot; their arrays are views, valid until the next snapshot."""
    arrays: list[Any] = []
    for number, (spec, offset) in enumerate(zip(snapshot.specs, snapshot.offsets, strict=True)):
        if number in snapshot.kept:
            arrays.append(leaves.build_leaf(snapshot.kept[number], spec, in_memory=True))
            continue
        flat = leaves.from_bytes(arena.view(offset, spec.nbytes), spec)
        if spec.library in ("torch", "numpy", *leaves.SCALARS):
            arrays.append(leaves.build_leaf(flat, spec, in_memory=True))
        else:
            arrays.append(HostArray(spec.library, flat.reshape(spec.shape)))
    return {name: tree.unflatten(nodes, lambda number, _: arrays[number]) for name, nodes in snapshot.trees.items()}


class HostArray:
    """The values of an array of another library, which the reader need not import.

    JAX, for example, would allocate a GPU.

    `compress` reads it like the array itself: same library, dtype, shape and values.
    """

    def __init__(self, library: str, values: npt.NDArray[Any]) -> None:
        self._library, self._values = library, values

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self._values.shape

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        return types.SimpleNamespace(__name__=self._library)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self._values

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._values.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self._values.__dlpack_device__()

    def get(self) -> npt.NDArray[Any]:
        """Return the values, as CuPy's method of this name."""
        return self._values
