"""`diff`: compare two checkpoints array by array."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from ..codec.base import CHUNK
from ..codec.errors import BadArgumentError
from ..codec.parallel import map_chunks
from ..codec.state import tree
from ..codec.state.leaves import as_bytes, is_array, read_leaf, same_storage_key
from ..kernels.backend.arrays import is_torch
from .dcp import load_step
from .inputs import AsJson, Parents, is_spt, open_store, parse_step, resolved
from .interchange import load_state
from .outputs import busy, emit, line, size, table

if TYPE_CHECKING:
    from ..codec.checkpoint import Checkpoint
    from ..codec.records import ArrayRecord
    from ..codec.state.leaves import LeafSpec
    from ..store.store import Store

SHOWN = 40
"""Maximum number of differing plain values that are listed; JSON has all."""


@dataclass(frozen=True, slots=True)
class Side:
    """A checkpoint to compare: its arrays, decoded one at a time, and its plain values.

    Args:
        arrays: path -> spec, stored bytes (None for other formats), and a function that returns the flat values.
        values: path -> plain value.
        nbytes: stored bytes, or None.
    """

    arrays: dict[str, tuple[LeafSpec, int | None, Callable[[], Any]]]
    values: dict[str, Any]
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class Change:
    """The difference of one array.

    Args:
        path: keys joined by "/".
        what: "same", "changed", "added", "removed", or "other" where dtype or shape differ.
        relative_l2: ||new - old|| / ||old||; None where it is not defined.
        changed_share: share of elements whose bits differ.
        elements: number of elements of the new array, or of the old one if it was removed.
        stored_old: stored bytes of the old array; None if it is missing or of another format.
        stored_new: the same for the new array.
    """

    path: str
    what: str
    relative_l2: float | None
    changed_share: float | None
    elements: int
    stored_old: int | None
    stored_new: int | None


def diff(
    things: Annotated[
        list[str], typer.Argument(metavar="STORE OLD NEW | OLD NEW", help="Two steps of a store, or two files.")
    ],
    parents: Parents = None,
    changed_only: Annotated[bool, typer.Option("--changed", help="Omit arrays that are the same.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints by relative L2 distance, changed elements and bytes per array.

    A file is a .spt, .pt or safetensors file, or a DCP folder. The restored values are compared.
    """
    with busy("reading"):
        if len(things) == 3:
            if parents:
                raise BadArgumentError("--parent: a store finds parents by itself")
            store = open_store(things[0])
            old, new = (_of_step(store, parse_step(step)) for step in things[1:])
        elif len(things) == 2:
            paths = [Path(thing) for thing in things]
            known = [*(parents or []), *(path for path in paths if is_spt(path))]  # one may be the other's parent
            old, new = (_of_checkpoint(resolved(p, known)) if is_spt(p) else side_of(load_state(p)) for p in paths)
        else:
            raise BadArgumentError(f"{len(things)} arguments; give STORE OLD NEW, or two files")
    with busy("comparing"):
        changes = compare(old, new)
        values = list(_value_changes(old.values, new.values))
    if as_json:
        emit(
            {
                "old_nbytes": old.nbytes,
                "new_nbytes": new.nbytes,
                "arrays": [dataclasses.asdict(c) for c in changes],
                "values": [{"path": p, "old": _json(a), "new": _json(b)} for p, a, b in values],
            }
        )
        return
    _show([c for c in changes if c.what != "same" or not changed_only], values)
    counts = {what: sum(c.what == what for c in changes) for what in dict.fromkeys(c.what for c in changes)}
    sizes = [f"{size(side.nbytes)}" if side.nbytes is not None else "?" for side in (old, new)]
    line()
    summary = ", ".join(f"{n} {what}" for what, n in counts.items()) or "none"
    line(f"arrays: {summary}; plain values: {len(values)} differ; stored {' -> '.join(sizes)}")


def _show(changes: list[Change], values: list[tuple[str, Any, Any]]) -> None:
    table(
        ("path", "what", ">relative L2", ">changed", ">old", ">new"),
        [
            (
                c.path,
                c.what,
                "" if c.relative_l2 is None else f"{c.relative_l2:.3g}",
                "" if c.changed_share is None else f"{100 * c.changed_share:.2f} %",
                "" if c.stored_old is None else size(c.stored_old),
                "" if c.stored_new is None else size(c.stored_new),
            )
            for c in changes
        ],
    )
    if values:
        line()
        for path, a, b in values[:SHOWN]:
            line(f"{path}: {_short(a)} -> {_short(b)}")
        if len(values) > SHOWN:
            line(f"... and {len(values) - SHOWN} more plain values")


class _Missing:
    def __repr__(self) -> str:
        return "(missing)"


MISSING = _Missing()


def _short(value: Any) -> str:
    return f"{value!r:.60}"


def _json(value: Any) -> Any:
    plain = value is None or isinstance(value, (bool, int, float, str))
    return value if plain else repr(value)


def _of_step(store: Store, step: int | str) -> Side:
    """Return a step of a store; the shards of a sharded one are joined."""
    manifest = store.describe(step)
    if not manifest.shards:
        return _of_checkpoint(store.read(step))
    return replace(side_of(load_step(store, manifest.step)), nbytes=manifest.stored_nbytes)


def _of_checkpoint(ckpt: Checkpoint) -> Side:
    skeleton = tree.unflatten(ckpt.header["tree"], lambda _number, _place: _ARRAY)
    values = dict(_plain_values(skeleton))
    records = _named(ckpt.records, lambda r: (r.path, r.key))
    return Side({name: (r.spec, r.nbytes, partial(_values, ckpt, r)) for name, r in records}, values, ckpt.nbytes)


def _values(ckpt: Checkpoint, record: ArrayRecord) -> Any:
    return ckpt.reference_of(record).values(record.spec)


def side_of(state: Any) -> Side:
    """Return the arrays and plain values of a state."""
    _, found = tree.flatten(state, is_array)
    unique: dict[Any, Any] = {}
    for node in found:
        key = same_storage_key(node.value)
        unique.setdefault(id(node) if key is None else key, node)
    read = {name: read_leaf(node.value, node.path) for name, node in _named(unique.values(), lambda n: (n.path, n.key))}
    values = dict(_plain_values(state))
    return Side({name: (spec, None, partial(_itself, flat)) for name, (spec, flat) in read.items()}, values, None)


def _itself(flat: Any) -> Any:
    return flat


def _named(items: Any, names: Callable[[Any], tuple[str, str]]) -> Iterator[tuple[str, Any]]:
    """Yield each item under its path, or under its unique key if its path is not unique."""
    times = Counter(names(item)[0] for item in items)
    for item in items:
        path, key = names(item)
        yield (path if times[path] == 1 else key), item


_ARRAY = object()


def _plain_values(state: Any) -> Iterator[tuple[str, Any]]:
    """The leaves that are not arrays, by path."""
    stack: list[tuple[str, Any]] = [("", state)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict):
            items = [(str(k), v) for k, v in value.items()]
        elif isinstance(value, (list, tuple)):
            items = [(str(i), v) for i, v in enumerate(value)]
        else:
            if value is not _ARRAY and not is_array(value):
                yield path, value
            continue
        stack.extend((f"{path}/{k}" if path else k, v) for k, v in reversed(items))


def _value_changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for path in dict.fromkeys([*old, *new]):
        a, b = old.get(path, MISSING), new.get(path, MISSING)
        # Two NaNs count as equal.
        if type(a) is not type(b) or (a != b and not (a != a and b != b)):
            yield path, a, b


def compare(old: Side, new: Side) -> list[Change]:
    """The difference of each array, arrays of the new side first."""
    changes = []
    for path in dict.fromkeys([*new.arrays, *old.arrays]):
        a, b = old.arrays.get(path), new.arrays.get(path)
        if a is None or b is None:
            there = a or b
            assert there is not None
            sizes = (None if a is None else a[1], None if b is None else b[1])
            changes.append(Change(path, "added" if a is None else "removed", None, None, there[0].size, *sizes))
        elif (a[0].dtype, a[0].shape) != (b[0].dtype, b[0].shape):
            changes.append(Change(path, "other", None, None, b[0].size, a[1], b[1]))
        else:
            relative, share = distance(a[2](), b[2](), b[0])
            what = "changed" if share else "same"
            changes.append(Change(path, what, relative, share, b[0].size, a[1], b[1]))
    return changes


def distance(old: Any, new: Any, spec: LeafSpec) -> tuple[float | None, float]:
    """Relative L2 distance of two flat arrays, and the share of elements whose bits differ.

    Elements with equal bits are equal, including NaN and infinity. The distance is None for dtypes that are not
    numbers, NaN or infinite for values that are not finite, and infinite if all old values are zero and the new ones
    are not.

    Example:
        >>> import numpy as np
        >>> from shrinkpoint.codec.state.leaves import LeafSpec
        >>> distance(np.array([3.0, 4.0]), np.array([3.0, 4.5]), LeafSpec("numpy", "float64", (2,)))
        (0.1, 0.5)
    """
    if not spec.size:
        return 0.0, 0.0
    numbers = _is_numeric(new)
    width = len(as_bytes(new[:1]))

    def one(start: int) -> tuple[int, float, float]:
        a, b = old[start : start + CHUNK], new[start : start + CHUNK]
        differs = (as_bytes(a).reshape(-1, width) != as_bytes(b).reshape(-1, width)).any(axis=1)
        if not numbers:
            return int(differs.sum()), 0.0, 0.0
        x, y = widened(a), widened(b)
        with np.errstate(all="ignore"):
            miss = np.abs(y[differs] - x[differs])
            return int(differs.sum()), float((miss * miss).sum()), float((np.abs(x[np.isfinite(x)]) ** 2).sum())

    parts = map_chunks(one, range(0, len(new), CHUNK))
    count, square, norm = (sum(part[i] for part in parts) for i in range(3))
    # For arrays of another byte order `new` holds bytes, not elements.
    share = count / len(new)
    if not numbers or len(new) != spec.size:
        return None, share
    if norm == 0:
        return (0.0 if square == 0 else math.inf), share
    return math.sqrt(square / norm) if math.isfinite(norm) else math.nan, share


def _is_numeric(flat: Any) -> bool:
    name = str(flat.dtype).removeprefix("torch.") if is_torch(flat) else flat.dtype.name
    return re.fullmatch(r"u?int(8|16|32|64)|b?float(16|32|64|8_\w+)|complex(64|128)", name) is not None


def widened(flat: Any) -> Any:
    """Convert a flat array of numbers, NumPy or torch, to float64 (or complex128) NumPy."""
    if is_torch(flat):
        import torch

        return flat.to(torch.complex128 if flat.dtype.is_complex else torch.float64).numpy()
    with np.errstate(invalid="ignore"):  # NumPy warns about signalling NaNs
        return flat.astype(np.complex128 if flat.dtype.kind == "c" else np.float64)
