"""Orbax: a handler that compresses checkpoints of JAX pytrees.

`CheckpointManager(folder, item_handlers=CompressedHandler(sp.Store(folder / "shrinkpoint")))` names and removes step
folders as usual; each holds a pointer into the store next to them. The handler works on whole trees, because a delta
is against the whole previous tree, and Orbax's type handlers see one array at a time. `checkpointable_handler` returns
the same as a class for the registries of Orbax v1 (`orbax.checkpoint.v1`).
"""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import fsspec

from ..codec.errors import BadArgumentError, MissingParentError, ShrinkpointError
from ..codec.extras import install
from ..codec.state import tree
from ..store.saver.saver import Saver, SaveResult
from ..store.store import Store
from . import pointers, required
from .jax import fitted, names, nested
from .pointers import POINTER, Pointer
from .save_timing import store_behind

with required("this adapter needs Orbax", install("orbax")):
    import jax
    import orbax.checkpoint as ocp

_STEP_FILE = "_CHECKPOINT_METADATA"
"""File by which Orbax marks the folder of a step, which has a folder for each item."""
_UNFINISHED = ".orbax-checkpoint-tmp"
"""What Orbax adds to the name of a folder until it is complete."""


class CompressedHandler(ocp.handlers.AsyncCheckpointHandler):  # type: ignore[misc]
    """A checkpoint handler of one item of a `CheckpointManager`, or of a `Checkpointer`.

    `manager.save(step, args=CompressedSave(tree))` and `manager.restore(step, args=CompressedRestore(abstract_tree))`.
    A step's folder appears once its checkpoint is durable, by Orbax's own atomic rename. Steps that Orbax has removed
    (`max_to_keep` and similar options) are removed from the store at the next save and when the saving manager is
    closed; data that later deltas need are kept. Arrays that are sharded over several processes are gathered in each,
    and the first process writes.

    Args:
        saver: target: a store next to the step folders, for this item only; steps that no folder points to are removed
            from it. With a Store, the checkpoint is durable when `manager.save` returns, and the folder follows. With a
            Saver, `manager.save` returns as soon as the tree is copied, and training may change or donate its buffers.
            The caller closes the Saver.

    Raises:
        BadArgumentError: no Saver and no Store; a Saver with `keep`, which would remove steps that folders point to.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> handler = CompressedHandler(Store(f"{folder}/shrinkpoint"))
        >>> with ocp.CheckpointManager(folder, item_handlers=handler) as manager:
        ...     _ = manager.save(7, args=CompressedSave({"w": jax.numpy.arange(3.0)}))
        ...     manager.wait_until_finished()
        ...     manager.restore(7, args=CompressedRestore({"w": jax.ShapeDtypeStruct((3,), "float32")}))
        {'w': Array([0., 1., 2.], dtype=float32)}
    """

    def __init__(self, saver: Saver | Store) -> None:
        self.store = store_behind(saver)
        self.saver = pointers.refuse_keep(saver) if isinstance(saver, Saver) else saver
        self._home = os.path.dirname(self.store.url)
        self._pending: _Commit | None = None
        self._in_flight: weakref.WeakSet[_Commit] = weakref.WeakSet()
        """Saves of Orbax v1, until they are collected; no folder points to those that are not over."""
        self._wrote = False

    def save(self, directory: Any, args: CompressedSave) -> None:
        """Save and wait until the checkpoint is durable; called by Orbax's synchronous Checkpointer."""
        for commit in self._begin(directory, args):
            commit.result()

    async def async_save(self, directory: Any, args: CompressedSave) -> list[_Commit]:
        """Start a save; called by Orbax on all processes."""
        return self._begin(directory, args)

    def _begin(self, directory: Any, args: CompressedSave) -> list[_Commit]:
        above = [_real(directory.parent), _real(directory.parent.parent)]
        if _real(self._home) not in above:
            raise BadArgumentError(f"{self.store.url}: the store must be next to the steps, in {' or '.join(above)}")
        state, grads = (None if part is None else nested(part) for part in (args.item, args.grads))
        if jax.process_index():
            return []
        self._wrote, self._pending = True, None
        self._drop_unreferenced()
        step = max([pointers.next_step(self.store), *(step + 1 for step in self._steps_in_flight())])
        more = {"grads": grads, "kinds": args.kinds}
        if isinstance(self.saver, Saver):
            future = self.saver.save(step, state, **more)
        else:
            saved, future = self.saver.save(step, state, **more), Future()
            future.set_result(SaveResult(step, "saved", id=saved.checkpoint.identity))
        self._pending = _Commit(self.saver, future, step, str(directory))
        return [self._pending]

    def finalize(self, directory: Any) -> None:
        """Write the pointer file of a durable save, before Orbax renames the folder."""
        if self._pending is None or self._pending.folder != str(directory):
            raise BadArgumentError(
                f"{directory}: not the folder of the last save; a handler and its store must belong to one item"
            )
        commit, self._pending = self._pending, None
        self._write_pointer(directory, commit)

    def _write_pointer(self, directory: Any, commit: _Commit) -> None:
        """Write the pointer file of a save into its folder."""
        result, store = commit.future.result(), Store(self.store.url)
        if store.describe(result.step).identity != result.id:
            raise ShrinkpointError(f"{directory}: step {result.step} of {store.url} was saved by another handler too")
        pointers.write_pointer(str(directory / POINTER), store, result.step, result.id)
        if result.step not in store.steps():
            raise ShrinkpointError(
                f"{directory}: step {result.step} of {store.url} was removed before the folder had it"
            )

    def restore(self, directory: Any, args: CompressedRestore | None = None) -> Any:
        """Restore a checkpoint; called by Orbax on all processes.

        Raises:
            BadArgumentError: not a checkpoint of this handler; it does not fit `item`.
            MissingParentError, CorruptDataError: see `Store.load`.
        """
        path = str(directory / POINTER)
        pointer = pointers.read_pointer(path)
        store = None if pointer is None else self._store_of(directory, pointer)
        first = store is self.store and jax.process_index() == 0  # a restore of another run is not counted there
        item, part = (None, False) if args is None else (args.item, args.partial_restore)
        try:
            if item is None and part:
                raise BadArgumentError("partial_restore: item must say which part")
            paths = [glob.escape(name) for name in names(item, what="item")] if part else None
            if paths == []:
                raise BadArgumentError("partial_restore: item is empty")
            state = pointers.load_at(path, paths, store=store, first=first)
            return state if item is None else fitted(state, item, what="item", partial=part)
        except BadArgumentError as e:
            raise BadArgumentError(f"{path}: {e}") from None

    def metadata(self, directory: Any) -> Any:
        """Return shapes and dtypes as nested dicts; called by Orbax.

        That is an item to restore to: all comes back as it was saved, in NumPy arrays where JAX does not have the dtype
        now (float64 without `jax_enable_x64`). No array is read for it.

        Raises:
            BadArgumentError: not a checkpoint of this handler.
            MissingParentError, CorruptDataError: see `Store.describe`.
        """
        path = str(directory / POINTER)
        pointer = pointers.pointer_at(path)
        store = self._store_of(directory, pointer)
        manifest = pointers.manifest_of(store, pointer)
        if manifest is None:
            raise MissingParentError(f"{path}: step {pointer.step} of {store.url} is not there, or is another one")
        ckpt = store.header(manifest)
        struct: Any = jax.ShapeDtypeStruct
        specs = [record.spec for record in ckpt.records]
        return tree.unflatten(
            ckpt.header["tree"],
            lambda number, _: struct(specs[number].shape, jax.numpy.dtype(specs[number].dtype)),
            rebuild=True,
        )

    def _store_of(self, directory: Any, pointer: Pointer) -> Store:
        """Return the store that a folder's pointer names; our own object if it is the same.

        The next save is then a delta over the loaded step.
        """
        path = str(directory / POINTER)
        if pointers.points_to(path, pointer, self.store):
            return self.store
        return pointers.store_of(path, pointer, is_item=(directory.parent / _STEP_FILE).exists())

    def close(self) -> None:
        """Remove unreferenced steps when Orbax closes the manager."""
        # A job that only reads leaves alone what another is writing.
        if self._wrote and not jax.process_index():
            self._drop_unreferenced()

    def _steps_in_flight(self) -> set[int]:
        return {save.step for save in self._in_flight if not save.is_over}

    def _drop_unreferenced(self) -> None:
        """Remove the steps from the store that no step folder points to."""
        gone = set(self.store.steps()) - self._steps_in_flight()
        if not gone:
            return
        fs, home = fsspec.core.url_to_fs(self._home)
        mine, before = os.path.basename(self.store.url), None
        while (steps := _entries(fs, home)) != before:  # again, as Orbax may have renamed a folder meanwhile
            before = steps
            # A step's folder, or that of an item in it. Folders in the store itself, or deeper, are not listed.
            for step in steps:
                if os.path.basename(step) == mine or not fs.isdir(step):
                    continue
                with contextlib.suppress(FileNotFoundError):  # Orbax removes folders meanwhile
                    for place in (step, *fs.ls(step, detail=False)):
                        pointer = pointers.read_pointer(fs.unstrip_protocol(f"{place}/{POINTER}"))
                        if pointer is not None and os.path.basename(pointer.store) == mine:
                            gone.discard(pointer.step)
        if gone and isinstance(self.saver, Saver):
            self.saver.rest()  # it would be waited for
        pointers.drop(self.store, gone)


def _entries(fs: Any, folder: str) -> list[str]:
    fs.invalidate_cache()
    return sorted(fs.ls(folder, detail=False))


class _Checkpointable:
    """A handler of one checkpointable, by the interface of Orbax v1.

    Orbax makes an object of the class for each use.
    """

    handler: CompressedHandler
    names: set[str]

    async def save(self, directory: Any, checkpointable: Any) -> Any:
        """Start a save; the result writes the pointer file, in the background."""
        place, args = directory.path, checkpointable
        name = place.name.partition(_UNFINISHED)[0]
        if not self.names <= {name}:
            raise BadArgumentError(f"{name}: the handler and its store belong to {min(self.names)}; make another one")
        commits = self.handler._begin(place, args if isinstance(args, CompressedSave) else CompressedSave(args))
        self.names.add(name)
        self.handler._in_flight.update(commits)
        return self._complete(directory, commits)

    async def _complete(self, directory: Any, commits: list[_Commit]) -> None:
        place = await directory.await_creation()
        for commit in commits:
            try:
                commit.result()
                self.handler._write_pointer(place, commit)
            finally:
                commit.is_over = True  # not discarded: the other thread may be looking through them

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
        """Restore a checkpoint, now: Orbax hides errors that are raised later."""
        wanted = abstract_checkpointable
        args = wanted if isinstance(wanted, CompressedRestore) else CompressedRestore(wanted)
        return asyncio.sleep(0, self.handler.restore(directory, args))

    async def metadata(self, directory: Any) -> Any:
        """Return shapes and dtypes as nested dicts."""
        return self.handler.metadata(directory)

    def is_handleable(self, checkpointable: Any) -> bool:
        """Return whether this is a tree with arrays, or a `CompressedSave`."""
        return isinstance(checkpointable, CompressedSave) or _has_arrays(checkpointable)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """Return whether this is a tree with arrays or their shapes, or a `CompressedRestore`."""
        return isinstance(abstract_checkpointable, CompressedRestore) or _has_arrays(abstract_checkpointable)


def checkpointable_handler(saver: Saver | Store) -> type[Any]:
    """Return a handler class of one checkpointable, for a registry of Orbax v1.

    `registry.add(checkpointable_handler(store), checkpointable_name="state")`, then `ocp.training.Checkpointer` saves
    and loads trees as usual. It stores what `CompressedHandler` stores, and reads it too. `save_checkpointables` and
    `load_checkpointables` also take `CompressedSave` and `CompressedRestore`. Steps that Orbax has removed are removed
    from the store at the next save. `ocp.load` and `ocp.partial` know only Orbax's own format.

    Args:
        saver: see `CompressedHandler`.

    Raises:
        BadArgumentError: see `CompressedHandler`.

    Example:
        >>> import tempfile
        >>> import orbax.checkpoint.experimental.v1 as ocp_v1
        >>> folder, context = tempfile.mkdtemp(), ocp_v1.Context()
        >>> context.checkpointables.registry = ocp_v1.handlers.local_registry(include_global_registry=False)
        >>> handler = checkpointable_handler(Store(f"{folder}/shrinkpoint"))
        >>> _ = context.checkpointables.registry.add(handler, checkpointable_name="state")
        >>> with ocp_v1.training.Checkpointer(folder, context=context) as checkpointer:
        ...     _ = checkpointer.save(7, {"w": jax.numpy.arange(3.0)})
        ...     checkpointer.load(7, {"w": jax.ShapeDtypeStruct((3,), "float32")})
        {'w': Array([0., 1., 2.], dtype=float32)}
    """
    members = {"handler": CompressedHandler(saver), "names": set()}
    return type("CompressedCheckpointable", (_Checkpointable,), members)  # the name that Orbax stores


def _has_arrays(tree: Any) -> bool:
    return any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(tree))


@ocp.args.register_with_handler(CompressedHandler, for_save=True)
@dataclass
class CompressedSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Arguments of a save: the pytree, gradients and kinds.

    Args:
        item: a pytree of arrays (JAX, NumPy) and plain scalars. Its names, for rules, are its keys, attributes and
            positions: `params/dense/kernel`, `opt_state/0/mu/dense/kernel`.
        grads: see `compress`; a pytree with the names of the weights.
        kinds: see `compress`.
    """

    item: Any
    grads: Any = None
    kinds: Any = None


@ocp.args.register_with_handler(CompressedHandler, for_restore=True)
@dataclass
class CompressedRestore(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """Arguments of a restore: the wanted structure.

    Args:
        item: a pytree of the structure that was saved, of `jax.ShapeDtypeStruct` (or arrays) and scalars: what comes
            back has its containers, dtypes and shardings; without a sharding, on the default device. NumPy arrays come
            back where it has NumPy arrays, or a dtype that JAX does not have now. None (default): nested dicts by name,
            as they were saved.
        partial_restore: read only the entries of `item`, which may then be a part of the saved state; such a restore
            is not counted. Default False.
    """

    item: Any = None
    partial_restore: bool = False


@dataclass(eq=False)
class _Commit:
    """A save in flight, in the form in which Orbax waits for it."""

    saver: Saver | Store
    future: Future[SaveResult]
    step: int
    folder: str
    is_over: bool = False

    def result(self, timeout: float | None = None) -> None:
        """Wait until the save is durable; raise its error if it failed."""
        if isinstance(self.saver, Saver):
            self.saver.wait(timeout)  # which also raises its error, so that the next save is not refused
        result = self.future.result(timeout)
        if result.status != "saved":
            raise ShrinkpointError(f"{self.saver}: the save of step {result.step} was {result.status}")


def _real(path: Any) -> str:
    """Return the real path of a folder, without links; a URL unchanged."""
    return str(path) if "://" in str(path) else os.path.realpath(path)
