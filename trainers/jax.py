"""JAX: pytrees of registered containers (Optax states) as plain trees, and back.

    ckpt = sp.compress(nested(state), prev)
    state = fitted(sp.decompress(ckpt, prev), state)

A checkpoint holds dicts, lists and tuples alone: to rebuild another class takes pickle, or the tree that the user has.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..codec.extras import install
from ..kernels.errors import BadArgumentError
from . import required
from .model_state import listed

with required("this adapter needs JAX", install("jax")):
    import jax
    from jax.experimental import multihost_utils

_ORDER = (jax.numpy.bool_, jax.numpy.unsignedinteger, jax.numpy.signedinteger, jax.numpy.floating)
"""Kinds of numbers. A number is never converted to an earlier kind, because that may lose its value."""


def nested(tree: Any) -> dict[str, Any]:
    """Return a pytree as nested dicts by name, which `compress` and `Store.save` take.

    Names are dictionary keys, attributes and positions: `opt_state/0/mu/dense/kernel`. Empty containers and None have
    no leaf and are left out; `fitted` has them from the tree it is given.

    Args:
        tree: a pytree of arrays and plain scalars in any containers that JAX knows. Typed keys (`jax.random.key`) are
            given as their data. Arrays that are spread over several processes come together in each; all of these
            must call this then.

    Raises:
        BadArgumentError: two leaves have one name; the tree is a single leaf, or none of JAX's.

    Example:
        >>> import collections
        >>> Adam = collections.namedtuple("Adam", "count mu")
        >>> nested({"opt": (Adam(3, {"w": 0.5}),)})
        {'opt': {'0': {'count': 3, 'mu': {'w': 0.5}}}}
    """
    found: dict[str, Any] = {}
    for name, leaf in _flat(tree, "the tree").items():
        if not name:
            raise BadArgumentError(f"the tree is a single {type(leaf).__qualname__}, not a container of leaves")
        node = found
        for key in name[:-1]:
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise BadArgumentError(f"{'/'.join(name)}: another leaf stands above it; keys must differ as text")
        if name[-1] in node:
            raise BadArgumentError(f"{'/'.join(name)}: other leaves stand below it; keys must differ as text")
        node[name[-1]] = _whole(leaf)
    return found


def names(tree: Any, *, what: str = "the tree") -> list[str]:
    """Return the names of a pytree's leaves, as paths in the result of `nested`.

    Args:
        tree: a pytree of anything.
        what: how messages call it.

    Raises:
        BadArgumentError: two leaves have one name.

    Example:
        >>> names({"opt": (3, {"w": 0.5})})
        ['opt/0', 'opt/1/w']
    """
    return ["/".join(name) for name in _flat(tree, what)]


def fitted(plain: Any, like: Any, *, what: str = "like", partial: bool = False) -> Any:
    """Return a plain tree in the containers of another; the inverse of `nested`.

    Args:
        plain: result of `nested`, after `decompress` or `Store.load`.
        like: a pytree of arrays, `jax.ShapeDtypeStruct` and scalars. The result has its containers, dtypes and
            shardings; without a sharding, arrays are on the default device. The result has NumPy arrays for NumPy
            arrays, and for a `ShapeDtypeStruct` of a dtype that JAX does not have as configured (int64, float64 and
            complex128 without `jax_enable_x64`).
        what: name of `like` in messages.
        partial: ignore entries that are in `plain` alone; default False.

    Raises:
        BadArgumentError: names, shapes or kinds of numbers differ, an integer is out of range, or a sharding is
            requested for a dtype that JAX does not have as configured; the message lists them.

    Example:
        >>> import collections
        >>> Adam = collections.namedtuple("Adam", "count mu")
        >>> fitted({"opt": {"0": {"count": 4, "mu": {"w": 0.25}}}}, {"opt": (Adam(3, {"w": 0.5}),)})
        {'opt': (Adam(count=4, mu={'w': 0.25}),)}
    """
    saved, wanted = _flat(plain, "the checkpoint"), _flat(like, what)
    lines = [f"{'/'.join(name)}: not in the checkpoint" for name in wanted if name not in saved]
    lines += [f"{'/'.join(name)}: not in {what}" for name in saved if name not in wanted and not partial]
    for name in wanted.keys() & saved.keys():
        problem = _problem(saved[name], wanted[name], what)
        lines += [f"{'/'.join(name)}: {problem}"] if problem else []
    if lines:
        raise BadArgumentError(f"the checkpoint does not fit {what}\n  {listed(sorted(lines))}")
    leaves = [_placed(saved[name], leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _flat(tree: Any, what: str) -> dict[tuple[str, ...], Any]:
    """Return the leaves by their names."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    found = {tuple(_name(key) for key in path): leaf for path, leaf in leaves}
    if len(found) != len(leaves):
        raise BadArgumentError(f"{what}: {len(leaves)} leaves have {len(found)} names; keys must differ as text")
    return found


def _name(key: Any) -> str:
    """Return the name of a key in a pytree path, as Orbax writes it."""
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _is_key(leaf: Any) -> bool:
    """Return whether a leaf is a typed random key (`jax.random.key`)."""
    return hasattr(leaf, "dtype") and bool(jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _data(key: Any) -> Any:
    """Return shape and dtype of the array as which a typed key is stored."""
    return jax.eval_shape(jax.random.key_data, key)


def _whole(leaf: Any) -> Any:
    leaf = jax.random.key_data(leaf) if _is_key(leaf) else leaf
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return multihost_utils.process_allgather(leaf, tiled=True)
    return leaf


def _problem(saved: Any, wanted: Any, what: str) -> str:
    """Return why a saved leaf cannot replace a wanted one, or ""."""
    is_key = _is_key(wanted)
    saved, wanted = (_data(leaf) if _is_key(leaf) else leaf for leaf in (saved, wanted))
    before, now = np.shape(saved), tuple(getattr(wanted, "shape", ()))
    if before != now:
        return f"shape {before} in the checkpoint, {now} in {what}"
    if not hasattr(wanted, "dtype"):
        scalar = saved.item() if hasattr(saved, "item") else saved
        same = type(scalar) is type(wanted) or (type(scalar) is int and type(wanted) is float)
        return "" if same else f"{scalar!r} in the checkpoint, {type(wanted).__qualname__} in {what}"
    if isinstance(saved, (str, bytes)) or saved is None:
        return f"{type(saved).__qualname__} in the checkpoint, {wanted.dtype} in {what}"
    # A dtype is asked for by its name: NumPy knows bfloat16 and its like only through JAX.
    held = saved.dtype if isinstance(saved, (jax.Array, jax.ShapeDtypeStruct)) else np.asarray(saved).dtype
    if is_key:
        return "" if held == wanted.dtype else f"{held} in the checkpoint, a key of {wanted.dtype} in {what}"
    if _rank(held) > _rank(wanted.dtype):
        return f"{held} in the checkpoint, {wanted.dtype} in {what}"
    may_wrap = held != wanted.dtype and jax.numpy.issubdtype(wanted.dtype, jax.numpy.integer)
    if may_wrap and not isinstance(saved, jax.ShapeDtypeStruct):
        host = np.asarray(saved)
        if (host.astype(wanted.dtype) != host).any():
            return f"{held} in the checkpoint with values that {wanted.dtype} in {what} does not hold"
    if getattr(wanted, "sharding", None) is not None and not _has_dtype(wanted.dtype):
        return f"{wanted.dtype} with a sharding in {what}: JAX has no such array without jax_enable_x64"
    return ""


def _rank(dtype: Any) -> int:
    kinds = (number for number, kind in enumerate(_ORDER) if jax.numpy.issubdtype(dtype, kind))
    return next(kinds, len(_ORDER))


def _has_dtype(dtype: Any) -> bool:
    """Return whether JAX, as configured, has arrays of a dtype."""
    return bool(jax.dtypes.canonicalize_dtype(dtype) == dtype)


def _placed(saved: Any, wanted: Any) -> Any:
    """Return a leaf with the wanted type, dtype and sharding."""
    if not hasattr(wanted, "shape"):
        return type(wanted)(saved)
    if _is_key(wanted):
        found: list[Any] = []
        jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), wanted)
        data = jax.random.key_data(saved) if _is_key(saved) else jax.numpy.asarray(saved)
        keys = jax.random.wrap_key_data(data, impl=found[0])
        return keys if wanted.sharding is None else jax.device_put(keys, wanted.sharding)
    host = np.asarray(saved).astype(wanted.dtype, copy=False)
    if isinstance(wanted, (np.ndarray, np.generic)) or not _has_dtype(wanted.dtype):
        return host
    if wanted.sharding is None:
        return jax.numpy.asarray(host)
    return jax.make_array_from_callback(host.shape, wanted.sharding, lambda index: host[index])
