"""Other libraries that save states, during a call or asynchronously."""

from __future__ import annotations

import contextlib
import io
import itertools
import multiprocessing
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import data
from .harness import Call, CheckFailed
from .peers import library

TORCH, DURABLE = "torch.save", "torch.save + fsync"
DCP, MOONCLIP = "DCP", "moonclip"
DCP_THREAD, DCP_PROCESS = "DCP async_save, thread", "DCP async_save, process"
ORBAX = "Orbax AsyncCheckpointer"
Arrays = dict[str, Any]


def tensors(state: Any) -> Arrays:
    """Return the arrays of a state by path as torch tensors, as every library can store them."""
    return {path: torch.from_numpy(np.array(x)) for path, x in data.arrays(state)}


def equal(a: Arrays, b: Arrays) -> bool:
    """Return whether two sets of arrays are equal bit for bit."""
    return set(a) == set(b) and all(
        x.shape == b[n].shape and x.dtype == b[n].dtype and x.numpy().tobytes() == b[n].numpy().tobytes()
        for n, x in a.items()
    )


@dataclass(frozen=True)
class Other:
    """Another library: how it saves arrays below a path, and how it loads them again."""

    name: str
    save: Callable[[Arrays, Path], object]
    load: Callable[[Arrays, Path], Any]


def checked_calls(other: Other, arrays: Arrays, path: Path) -> tuple[Call, Call]:
    """Return the calls by which a library saves and loads arrays, once they have come back.

    Raises:
        CheckFailed: other arrays come back.
    """
    other.save(arrays, path)
    if not equal(arrays, other.load(arrays, path)):
        raise CheckFailed(f"{other.name}: other arrays come back")
    return partial(other.save, arrays, path), partial(other.load, arrays, path)


def torch_save(state: Any, path: Path, *, durable: bool = False) -> None:
    """Save by `torch.save`, with `durable` also to the disk."""
    with path.open("wb") as file:
        torch.save(state, file)
        if durable:
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield library("torch.distributed.checkpoint")


def _dcp_save(arrays: Arrays, path: Path, *, zstd: bool = False) -> None:
    more: dict[str, Any] = {}
    with _quiet() as dcp:
        if zstd:
            extension = library("torch.distributed.checkpoint._extension").ZStandard()
            more["storage_writer"] = dcp.FileSystemWriter(path, _extensions=[extension])
        dcp.save(arrays, checkpoint_id=path, **more)


def _dcp_load(arrays: Arrays, path: Path) -> Any:
    into = {name: torch.zeros_like(x) for name, x in arrays.items()}
    with _quiet() as dcp:
        dcp.load(into, checkpoint_id=path)
    return into


def _npz_save(arrays: Arrays, path: Path) -> None:
    named: Arrays = {f"a{i}": x.numpy() for i, x in enumerate(arrays.values())}
    np.savez(path.with_name(f"{path.name}.npz"), **named)


def _npz_load(arrays: Arrays, path: Path) -> Any:
    with np.load(path.with_name(f"{path.name}.npz")) as found:
        return {name: torch.from_numpy(found[f"a{i}"]) for i, name in enumerate(arrays)}


def _moonclip_save(arrays: Arrays, path: Path) -> None:
    # Over an earlier snapshot it would store only changed arrays, and here nothing changes.
    shutil.rmtree(path, ignore_errors=True)
    library("moonclip").MoonclipManager(str(path), async_save=False).save_tensors(0, arrays)


def _moonclip_load(arrays: Arrays, path: Path) -> Any:
    found = library("moonclip").MoonclipManager(str(path), async_save=False).load_latest()[1]
    return {name: torch.frombuffer(found[name], dtype=x.dtype).reshape(x.shape) for name, x in arrays.items()}


def _torch_load(_: Arrays, path: Path) -> Any:
    return torch.load(path, weights_only=True)


OTHERS = (
    Other(TORCH, torch_save, _torch_load),
    Other(DURABLE, partial(torch_save, durable=True), _torch_load),
    Other(
        "safetensors",
        lambda arrays, path: library("safetensors.torch").save_file(arrays, path),
        lambda _, path: library("safetensors.torch").load_file(path),
    ),
    Other(DCP, _dcp_save, _dcp_load),
    Other("DCP with zstd", partial(_dcp_save, zstd=True), _dcp_load),
    Other("npz", _npz_save, _npz_load),
    Other(MOONCLIP, _moonclip_save, _moonclip_load),
)
UNSYNCED = tuple(other for other in OTHERS if other.name != DURABLE)
"""Those whose files differ."""


# ------------------------------------------------------------------------------------------------------- asynchronous

Begin = Callable[[Any], Callable[[], object]]
"""Begins to save a state, and returns the call that waits until it is durable."""


def beginner(name: str, root: Path, stack: contextlib.ExitStack) -> Begin:
    """Return the function by which a library begins a save below a folder.

    Args:
        name: `TORCH`, `DURABLE`, `DCP_THREAD`, `DCP_PROCESS` or `ORBAX`.
        root: of all its files, each save in its own.
        stack: ends what the library starts.
    """
    number = itertools.count()

    def path() -> Path:
        return root / f"peer-{name.replace(' ', '')}-{next(number)}"

    if name in (TORCH, DURABLE):

        def torch_begin(state: Any) -> Callable[[], object]:
            torch_save(state, path(), durable=name == DURABLE)
            return lambda: None

        return torch_begin
    if name == ORBAX:
        ocp = library("orbax.checkpoint")
        orbax = stack.enter_context(ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()))

        def orbax_begin(state: Any) -> Callable[[], object]:
            orbax.save(path(), _as_numpy(state))
            finish: Callable[[], object] = orbax.wait_until_finished
            return finish

        return orbax_begin
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    if not dist.is_initialized():
        dist.init_process_group("gloo", f"file://{root}/meet", rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
    how = AsyncCheckpointerType.PROCESS if name == DCP_PROCESS else AsyncCheckpointerType.THREAD

    def dcp_begin(state: Any) -> Callable[[], object]:
        future: Any = dcp.async_save(state, checkpoint_id=str(path()), async_checkpointer_type=how)  # type: ignore[attr-defined]
        finish: Callable[[], object] = future.result
        return finish

    return dcp_begin


def remove_saved(root: Path) -> None:
    """Remove the files that such saves left below a folder."""
    for old in root.glob("peer-*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()


def pids(name: str) -> list[int]:
    """Return the processes that a library's saves take place in."""
    return [os.getpid(), *(p.pid for p in multiprocessing.active_children() if p.pid and name == DCP_PROCESS)]


def _as_numpy(state: Any) -> Any:
    """Return a state with NumPy arrays, which share the memory, in the place of tensors."""
    if isinstance(state, dict):
        return {str(key): _as_numpy(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_as_numpy(value) for value in state]
    return state.numpy() if hasattr(state, "numpy") else state
