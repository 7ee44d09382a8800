"""Decoding of some arrays of a checkpoint, and of only the parent arrays that they need."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from .checkpoint import Checkpoint, Reader
from .entropy.blocks import decoding_near
from .errors import BadArgumentError, CorruptDataError, MissingParentError
from .outputs import outputs_of, placed
from .parallel import map_arrays, map_chunks, own_arithmetic
from .records import ArrayRecord, Group
from .state import tree
from .state.leaves import SEQUENCES, Array, build_leaf, import_libraries, on_meta

_GROUP = 1 << 24
"""Bytes of arrays that are decoded at once into existing ones."""
_SMALL = 1 << 12
"""Bytes of a tensor up to which its values are in the outline of a state."""
_ESCAPED = re.compile(r"\[([*?[])\]")


def check_patterns(paths: Any) -> tuple[str, ...]:
    """Return one glob or several as a tuple; raise BadArgumentError for anything else."""
    patterns = (paths,) if isinstance(paths, str) else paths
    if not isinstance(patterns, (list, tuple)) or not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise BadArgumentError(f"paths is {paths!r}; it must be a shell glob over paths, or several in a list")
    return tuple(patterns)


def decompress_only(files: Callable[[Checkpoint | None], Checkpoint], patterns: Sequence[str]) -> Any:
    """Decompress the part of a state whose paths match.

    Containers without a match are left out. A list or tuple with a match keeps its length, with None for the rest, so
    that positions keep their meaning.

    Args:
        files: `files(None)` opens the checkpoint; `files(c)` opens the parent of `c`, or raises.
        patterns: shell globs; `*` also matches `/`. Plain scalars match by their paths too. A long list of numbers,
            which is stored as one array, is restored whole if one of its positions matches.

    Raises:
        BadArgumentError: no path matches a pattern.
        MissingParentError: a needed file is missing.
        CorruptDataError: a needed file is damaged.
    """
    nodes: list[Any] = []

    def matching(top: Checkpoint) -> list[ArrayRecord]:
        lists = {i for i, record in enumerate(top.records) if record.spec.library in SEQUENCES}
        nodes.extend(select(top.header["tree"], patterns, lists))
        return [top.records[n["a"]] for n in nodes if isinstance(n, dict) and "a" in n]

    top, arrays = decode_only(files, matching)
    return tree.unflatten(nodes, lambda number, _place: arrays[top.records[number].key], rebuild=True)


def decode_only(
    files: Callable[[Checkpoint | None], Checkpoint], choose: Callable[[Checkpoint], Sequence[ArrayRecord]]
) -> tuple[Checkpoint, dict[str, Array]]:
    """Decode some arrays of a checkpoint; return the checkpoint and the arrays by their keys.

    Only the headers of the opened files are kept afterwards.

    Args:
        files: as in `decompress_only`.
        choose: function that selects records of the checkpoint.

    Raises:
        MissingParentError: a needed file is missing.
        CorruptDataError: a needed file is damaged.
    """
    top = files(None)
    unique = {r.key: r for r in choose(top)}
    needed = top.with_needed(unique)
    prev = _parent(files, top, needed)
    top.decode(needed, prev)
    if prev is not None:
        prev.let_go()

    def one(record: ArrayRecord) -> Array:
        return build_leaf(top.values_of(record), record.spec)

    arrays = dict(zip(unique, map_chunks(one, unique.values()), strict=True))
    top.let_go()
    return top, arrays


def _parent(
    files: Callable[[Checkpoint | None], Checkpoint], top: Checkpoint, wanted: Sequence[ArrayRecord]
) -> Checkpoint | None:
    """Return the parent with the references that these arrays need; None for no delta."""
    steps = [(top, wanted)]
    while needed := {r.key: r for r in steps[-1][1] if r.is_delta}:
        below = files(steps[-1][0])
        check_parent_named(steps[-1][0], below)
        for key, record in needed.items():
            if below.record_at(key) is None:
                raise MissingParentError(f"{record.path}: a delta, and the parent has no such array")
        steps.append((below, below.with_needed(needed)))
    prev: Checkpoint | None = None
    for ckpt, records in reversed(steps[1:]):
        ckpt.decode(records, prev)
        if prev is not None:
            prev.let_go()
        prev = ckpt
    return prev


@own_arithmetic()
def decompress_into(files: Callable[[Checkpoint | None], Checkpoint], out: Any) -> Any:
    """Decompress a state into existing arrays, group by group, and return it.

    Memory: the references and coded bytes of one group, and the values that are computed at once.

    Args:
        files: as in `decompress_only`; the bytes of a file are fetched when they are needed.
        out: as in `decompress`; or a function that returns the existing arrays at their places, and the others are new.
            It gets the state with large tensors on torch's meta device, without values.

    Raises: as `decompress_only` and `decompress`.
    """
    chain = [files(None)]
    while chain[-1].is_delta:
        chain.append(files(chain[-1]))
    below = {id(above): ckpt for above, ckpt in itertools.pairwise(chain)}
    top = chain[0]
    records = top.records
    import_libraries(record.spec for record in records)

    def opened(above: Checkpoint | None) -> Checkpoint:
        return top if above is None else below[id(above)]

    existing, nodes = out(_outline(opened)) if callable(out) else out, top.header["tree"]
    targets, further = outputs_of(existing, nodes, records, is_whole=not callable(out))
    reader, built = Reader(top, None, targets), dict[int, Array]()
    for jobs in _batches(top):
        members = [record for job in jobs for group in job for record in top.members_of(group)]
        needed = top.with_needed({record.key for record in members})
        reader.prev = _parent(opened, top, needed)
        top.fetch((record, range(len(record.group.lengths))) for record in needed)
        sizes = [sum(records[i].spec.size for group in job for i in group.members) for job in jobs]
        with decoding_near(targets.values()):
            decoded = map_arrays(lambda j: reader.decode(jobs[j]), range(len(jobs)), lambda j: sizes[j])  # noqa: B023
        for found in decoded:
            built |= found
        for ckpt in chain:
            ckpt.let_go()
    return tree.unflatten(nodes, placed(built, further), rebuild=True)


def _outline(files: Callable[[Checkpoint | None], Checkpoint]) -> Any:
    """Return the state of a checkpoint with large tensors on torch's meta device."""

    def is_small(record: ArrayRecord) -> bool:
        return record.spec.library != "torch" or record.spec.nbytes <= _SMALL

    top, arrays = decode_only(files, lambda top: [record for record in top.records if is_small(record)])
    for record in top.records:
        if not is_small(record):
            arrays[record.key] = on_meta(record.spec)
    return tree.unflatten(top.header["tree"], lambda number, _: arrays[top.records[number].key], rebuild=True)


def _batches(ckpt: Checkpoint) -> list[list[list[Group]]]:
    """Return the jobs of a checkpoint in batches of about `_GROUP` bytes."""
    batches: list[list[list[Group]]] = []
    held = 0
    for job in ckpt.jobs():
        nbytes = sum(record.spec.nbytes for group in job for record in ckpt.members_of(group))
        if not batches or held + nbytes > _GROUP:
            batches.append([])
            held = 0
        batches[-1].append(job)
        held += nbytes
    return batches


def check_parent_named(ckpt: Checkpoint, below: Checkpoint) -> None:
    """Raise MissingParentError unless `below` is the parent of `ckpt`, resolved or not."""
    if below.identity != ckpt.parent_id:
        raise MissingParentError(f"the parent is {str(ckpt.parent_id)[:12]}..., not {below.identity[:12]}...")


def select(nodes: Sequence[Any], patterns: Sequence[str], lists: Collection[int] = ()) -> list[Any]:
    """Return the nodes of the tree with only the leaves whose paths match.

    Args:
        nodes: of a whole tree, in preorder, as `tree.unflatten` takes them.
        patterns: shell globs over the keys joined by "/".
        lists: numbers of the arrays that stand for lists of numbers.

    Raises:
        BadArgumentError: a pattern that no path matches.

    Example:
        >>> select([{"d": ["a", "b"]}, {"l": 2}, 1, 2, 3], ["a/1"])
        [{'d': ['a']}, {'l': 2}, None, 2]
    """
    above, paths = _places(nodes)
    keep = [False] * len(nodes)
    used = set()
    # Patterns without wildcards may be as many as paths, so they are looked up, not tried one by one.
    named = {name: p for p in patterns if (name := _only_path(p)) is not None}
    inside: dict[str, list[str]] = {}
    for name, pattern in named.items():
        inside.setdefault(name.rpartition("/")[0], []).append(pattern)
    globs = [p for p in patterns if _only_path(p) is None]
    for i, path in enumerate(paths):
        if path is not None:
            is_list = isinstance(nodes[i], dict) and nodes[i].get("a") in lists
            spelled = (path, f"{path}/0") if is_list else (path,)
            matching = [p for p in globs if any(fnmatch.fnmatchcase(s, p) for s in spelled)]
            matching += [named[path]] if path in named else []
            matching += inside.get(path, []) if is_list else []
            used.update(matching)
            keep[i] = bool(matching)
    for pattern in patterns:
        if pattern not in used:
            some = ", ".join([p for p in paths if p is not None][:5])
            raise BadArgumentError(f"no path matches {pattern!r}; paths are like {some or '(none)'}")
    for i in range(len(nodes) - 1, 0, -1):
        if keep[i]:
            keep[above[i]] = True
    return _pruned(nodes, above, keep)


def without_arrays(nodes: Sequence[Any], numbers: Collection[int]) -> list[Any]:
    """Return the nodes of the tree without some arrays.

    The other arrays are numbered again in their order. Containers stay, also empty ones; in a list or tuple, None
    replaces an array.

    Args:
        nodes: of a whole tree, in preorder.
        numbers: of the arrays to leave out.

    Example:
        >>> without_arrays([{"d": ["w", "m"]}, {"a": 1}, {"l": 2}, {"a": 0}, 5], [0])
        [{'d': ['w', 'm']}, {'a': 0}, {'l': 2}, None, 5]
    """
    above, _ = _places(nodes)
    held = [node["a"] if isinstance(node, dict) and "a" in node else None for node in nodes]
    left = {number: at for at, number in enumerate(sorted({n for n in held if n is not None} - set(numbers)))}
    found = _pruned(nodes, above, [number is None or number in left for number in held])
    return [{"a": left[node["a"]]} if isinstance(node, dict) and "a" in node else node for node in found]


def _pruned(nodes: Sequence[Any], above: Sequence[int], keep: Sequence[bool]) -> list[Any]:
    """Return the nodes to keep; in a list or tuple None replaces the others."""
    children: dict[int, list[int]] = {}
    for i in range(1, len(nodes)):
        children.setdefault(above[i], []).append(i)
    out: list[Any] = []
    stack = [0]
    while stack:
        i = stack.pop()
        if not keep[i]:
            out.append(None)
            continue
        tag, body = _opened(nodes[i])
        below = children.get(i, [])
        if tag in tree.DICT_TAGS:
            kept = [(key, child) for key, child in zip(body, below, strict=True) if keep[child]]
            out.append({tag: [key for key, _ in kept]})
            below = [child for _, child in kept]
        else:
            out.append(nodes[i])
        stack.extend(reversed(below))
    return out


def _only_path(pattern: str) -> str | None:
    """Return the only path that a pattern matches, unescaped; None if it has wildcards."""
    return None if glob.has_magic(_ESCAPED.sub("", pattern)) else _ESCAPED.sub(r"\1", pattern)


def _places(nodes: Sequence[Any]) -> tuple[list[int], list[str | None]]:
    """Return the number of each node's container, and the path of each leaf."""
    above: list[int] = []
    paths: list[str | None] = []
    spelled = tree._Spelled(CorruptDataError)
    open_: list[tuple[int, tree.Place, list[Any], int]] = []  # number, place, keys of the children, how many are done
    for i, node in enumerate(nodes):
        while open_ and open_[-1][3] == len(open_[-1][2]):
            open_.pop()
        place = tree.Place(None, "", "")
        above.append(0)
        if open_:
            parent, at, names, done = open_.pop()
            open_.append((parent, at, names, done + 1))
            above[i] = parent
            place = tree.Place(at, tree._decode_key(names[done]), names[done])
        tag, body = _opened(node)
        if tag in ("l", "t"):
            open_.append((i, place, list(range(body)), 0))
        elif tag in tree.DICT_TAGS:
            open_.append((i, place, body, 0))
        else:
            paths.append(spelled(place)[0])
            continue
        paths.append(None)
    return above, paths


def _opened(node: Any) -> tuple[str, Any]:
    """Return tag and body of a node; the tag of a plain scalar is ""."""
    return next(iter(node.items())) if isinstance(node, dict) else ("", None)
