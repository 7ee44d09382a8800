"""Orbax: a handler for pytrees of JAX arrays whose checkpoints are compressed, deltas of one another.

`CheckpointManager(folder, item_handlers=CompressedHandler(sp.Store(folder / "shrinkpoint")))` names and removes step
folders as ever; each holds a pointer into the store beside them. The handler is one of whole trees, for a delta is
against the tree before it: Orbax's type handlers see one array at a time.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np

from ..codec.errors import ShrinkpointError
from ..kernels.errors import BadArgumentError
from ..store.saver import Saver, SaveResult
from ..store.store import Store
from .pointers import drop, load_at, next_step, read_pointer, store_of, write_pointer

if TYPE_CHECKING:
    import jax
    import orbax.checkpoint as ocp
    from jax.experimental import multihost_utils
else:
    try:
        import jax
        import orbax.checkpoint as ocp
        from jax.experimental import multihost_utils
    except ImportError:
        raise ImportError("this adapter needs Orbax: pip install 'shrinkpoint[orbax]'") from None

POINTER = "shrinkpoint.json"
_SHOWN = 20


class CompressedHandler(ocp.handlers.AsyncCheckpointHandler):  # type: ignore[misc]
    """A checkpoint handler of one item of a `CheckpointManager`, or of a `Checkpointer`.

    `manager.save(step, args=CompressedSave(tree))` and `manager.restore(step, args=CompressedRestore(abstract_tree))`.
    A step's folder appears, by Orbax's own atomic step, once its checkpoint is durable. What Orbax has removed
    (`max_to_keep` and its like) leaves the store at the next save and when the manager is closed; what later deltas
    need of it stays. Arrays that are spread over several processes come together in each, and the first one writes.

    Args:
        saver: where to: a store beside the step folders, of this item alone: steps that no folder points to are removed
            from it. A Store: the checkpoint is durable when `manager.save` returns, and the folder follows. A Saver:
            it returns as soon as the tree is copied; training may go on, and give its buffers away. The Saver is closed
            by whoever made it.

    Raises:
        BadArgumentError: no Saver and no Store.

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
        if not isinstance(saver, (Saver, Store)):
            raise BadArgumentError(f"saver must be a Saver or a Store, not {type(saver).__qualname__}")
        self.saver = saver
        self.store = saver.store if isinstance(saver, Saver) else saver
        self._home = os.path.dirname(self.store.url)
        self._pending: tuple[str, Future[SaveResult]] | None = None

    def save(self, directory: Any, args: CompressedSave) -> None:
        """Called by Orbax's synchronous Checkpointer."""
        for commit in self._begin(directory, args):
            commit.result()

    async def async_save(self, directory: Any, args: CompressedSave) -> list[_Commit]:
        """Called by Orbax, on all processes."""
        return self._begin(directory, args)

    def _begin(self, directory: Any, args: CompressedSave) -> list[_Commit]:
        above = [_real(directory.parent), _real(directory.parent.parent)]
        if _real(self._home) not in above:
            raise BadArgumentError(f"{self.store.url}: the store must be beside the steps, in {' or '.join(above)}")
        state, grads = (None if part is None else _nested(part) for part in (args.item, args.grads))
        if jax.process_index():
            return []
        self._follow()
        step, more = next_step(self.store), {"grads": grads, "kinds": args.kinds}
        if isinstance(self.saver, Saver):
            future = self.saver.save(step, state, **more)
        else:
            saved, future = self.saver.save(step, state, **more), Future()
            future.set_result(SaveResult(step, "saved", id=saved.checkpoint.identity))
        self._pending = str(directory), future
        return [_Commit(self.saver, future)]

    def finalize(self, directory: Any) -> None:
        """Called by Orbax on one process when all is durable, before it renames the folder."""
        name, future = self._pending or ("", Future())
        if name != str(directory):
            raise BadArgumentError(f"{directory}: not what was saved last; a handler and its store are of one item")
        self._pending, result, store = None, future.result(), Store(self.store.url)
        if store.describe(result.step).identity != result.id:
            raise ShrinkpointError(f"{directory}: step {result.step} of {store.url} was saved by another handler too")
        write_pointer(str(directory / POINTER), store, result.step, result.id)

    def restore(self, directory: Any, args: CompressedRestore | None = None) -> Any:
        """Called by Orbax, on all processes.

        Raises:
            BadArgumentError: not a checkpoint of this handler; it does not fit `item`.
            MissingParentError, CorruptDataError: see `Store.load`.
        """
        path = str(directory / POINTER)
        pointer = read_pointer(path)
        store = None if pointer is None else store_of(path, pointer)
        # By our own store where it is that, for the next save to be a delta over what is loaded.
        store = self.store if store is not None and store.url == self.store.url else store
        state = load_at(path, store=store, first=jax.process_index() == 0)
        item = None if args is None else args.item
        return state if item is None else _fitted(path, state, item)

    def close(self) -> None:
        """Called by Orbax when the manager is closed."""
        if not jax.process_index():
            self._follow()

    def _follow(self) -> None:
        """Remove from the store what no step folder points to any more; nothing of this item is in flight."""
        if not self.store.steps():
            return
        fs, home = fsspec.core.url_to_fs(self._home)
        found = [p for p in fs.find(home, maxdepth=3) if p.endswith(f"/{POINTER}")]
        pointers = [read_pointer(fs.unstrip_protocol(path)) for path in found]
        mine = os.path.basename(self.store.url)
        kept = {p.step for p in pointers if p is not None and os.path.basename(p.store) == mine}
        drop(self.store, set(self.store.steps()) - kept)


@ocp.args.register_with_handler(CompressedHandler, for_save=True)
@dataclass
class CompressedSave(ocp.args.CheckpointArgs):  # type: ignore[misc]
    """What to save.

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
    """How to restore.

    Args:
        item: a pytree of the structure that was saved, of `jax.ShapeDtypeStruct` (or arrays) and scalars: what comes
            back has its containers, dtypes and shardings; without a sharding, on the default device. NumPy arrays come
            back where it has NumPy arrays. None (default): nested dicts by name, as they were saved.
    """

    item: Any = None


@dataclass(frozen=True, slots=True)
class _Commit:
    """A save in flight, as Orbax waits for it."""

    saver: Saver | Store
    future: Future[SaveResult]

    def result(self, timeout: float | None = None) -> None:
        """Until it is durable; raises what it raised."""
        if isinstance(self.saver, Saver):
            self.saver.wait(timeout)  # and has told of its error by that, so that the next save is not refused
        result = self.future.result(timeout)
        if result.status != "saved":
            raise ShrinkpointError(f"{self.saver}: the save of step {result.step} was {result.status}")


def _real(path: Any) -> str:
    """A folder by the name that it has only one of; URLs as they are."""
    return str(path) if "://" in str(path) else os.path.realpath(path)


def _flat(tree: Any) -> dict[tuple[str, ...], Any]:
    """Leaves by their names.

    Raises:
        BadArgumentError: two have the same one, by keys of one text in a container of one's own.
    """
    found: dict[tuple[str, ...], Any] = ocp.tree.to_flat_dict(tree)
    if len(found) != len(jax.tree.leaves(tree)):
        raise BadArgumentError(
            f"item: {len(jax.tree.leaves(tree))} leaves have {len(found)} names; keys must differ as text"
        )
    return found


def _nested(tree: Any) -> Any:
    """A pytree as nested dicts by name, its arrays whole on this process."""
    return ocp.tree.from_flat_dict({name: _whole(leaf) for name, leaf in _flat(tree).items()})


def _whole(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return multihost_utils.process_allgather(leaf, tiled=True)
    return leaf


def _fitted(path: str, state: Any, item: Any) -> Any:
    """A saved tree as a given one is, which must have the same names and shapes."""
    saved, wanted = _flat(state), _flat(item)
    lines = [f"{'/'.join(name)}: not in the checkpoint" for name in wanted if name not in saved]
    lines += [f"{'/'.join(name)}: not in item" for name in saved if name not in wanted]
    for name in wanted.keys() & saved.keys():
        before, now = np.shape(saved[name]), tuple(getattr(wanted[name], "shape", ()))
        if before != now:
            lines.append(f"{'/'.join(name)}: shape {before} in the checkpoint, {now} in item")
    if lines:
        shown = "\n  ".join(sorted(lines)[:_SHOWN])
        raise BadArgumentError(f"{path}: the checkpoint does not fit item\n  {shown}")
    leaves = [_placed(saved[name], leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(item), leaves)


def _placed(saved: Any, wanted: Any) -> Any:
    """A leaf of the wanted type, dtype and sharding."""
    if not hasattr(wanted, "shape"):
        return type(wanted)(saved)
    host = np.asarray(saved).astype(wanted.dtype, copy=False)
    if isinstance(wanted, (np.ndarray, np.generic)):
        return host
    if wanted.sharding is None:
        return jax.numpy.asarray(host)
    return jax.make_array_from_callback(host.shape, wanted.sharding, lambda index: host[index])
