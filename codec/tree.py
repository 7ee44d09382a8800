"""A state as a flat list of nodes, and back: dict, list, tuple of arrays and plain scalars, without pickle.

The tree is written in preorder, one JSON value a node, so nesting has no depth limit in either direction:

    {"d": [keys]}  dict     {"o": [keys]}  OrderedDict     {"c": [keys]}  Counter
    {"l": n}       list     {"t": n}       tuple           {"a": i}       array number i
    {"i": "-ff"}   integer beyond 53 bits, hexadecimal     {"f": "7ff8000000000000"}  float that JSON lacks (bits)
    {"b": "..."}   bytes, base64                           {"k": [..]}    a tuple used as a key
    anything else  itself: a finite float (always with '.' or 'e'), an int, a bool, a str, null
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import BadArgumentError, CorruptDataError, UnsupportedLeafError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Json = Any
_DICTS: dict[type, str] = {dict: "d", OrderedDict: "o", Counter: "c"}
_SEQUENCES: dict[type, str] = {list: "l", tuple: "t"}
_EXACT_INT = 1 << 53


@dataclass(frozen=True, slots=True)
class ArrayNode:
    """An array found in a tree: `path` for people and rules, `key` unique even where paths are not."""

    path: str
    key: str
    value: Any


def encode_scalar(value: Any, path: str) -> Json:
    """A plain scalar as its JSON node; raises UnsupportedLeafError for everything else."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if -_EXACT_INT <= value <= _EXACT_INT else {"i": format(value, "x")}
    if kind is float:
        return value if math.isfinite(value) else {"f": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"b": base64.b64encode(value).decode("ascii")}
    raise UnsupportedLeafError(
        f"{path or '<root>'}: {kind.__module__}.{kind.__qualname__} cannot be stored without pickle; "
        "allowed are dict, list, tuple, arrays, int, float, bool, str, bytes and None"
    )


def _encode_key(key: Any, path: str) -> Json:
    if type(key) is tuple:
        return {"k": [_encode_key(k, path) for k in key]}
    try:
        return encode_scalar(key, path)
    except UnsupportedLeafError:
        kind = type(key)
        raise UnsupportedLeafError(
            f"{path or '<root>'}: a key of type {kind.__module__}.{kind.__qualname__} cannot be stored without pickle"
        ) from None


def flatten(state: Any, is_array: Callable[[Any], bool]) -> tuple[list[Json], list[ArrayNode]]:
    """Take a state apart.

    Args:
        state: dict, list or tuple, any nesting.
        is_array: says which values are arrays; every other leaf must be a plain scalar.

    Returns:
        The nodes in preorder, and the arrays in the order of their `{"a": i}` nodes.

    Raises:
        BadArgumentError: the root is no dict, list or tuple, or the tree contains itself.
        UnsupportedLeafError: a leaf, key or container type that cannot be rebuilt without pickle.
    """
    if type(state) not in _DICTS and type(state) not in _SEQUENCES:
        raise BadArgumentError(
            f"the state must be a tree (dict, list or tuple of arrays and scalars), not {type(state).__qualname__}"
        )
    nodes: list[Json] = []
    arrays: list[ArrayNode] = []
    ancestors: set[int] = set()
    # A stack of (value, path, key); a container's own entry is followed by a marker that ends its ancestry.
    stack: list[tuple[Any, str, str]] = [(state, "", "")]
    end = object()
    while stack:
        value, path, key = stack.pop()
        if isinstance(value, tuple) and len(value) == 2 and value[0] is end:
            ancestors.discard(value[1])
            continue
        if is_array(value):
            nodes.append({"a": len(arrays)})
            arrays.append(ArrayNode(path, key, value))
            continue
        kind = type(value)
        children: list[tuple[Any, str, str]]
        if kind in _DICTS:
            keys = [_encode_key(k, path) for k in value]
            nodes.append({_DICTS[kind]: keys})
            children = [
                (v, f"{path}/{k}" if path else str(k), f"{key}\x1f{json.dumps(e)}")
                for (k, v), e in zip(value.items(), keys, strict=True)
            ]
        elif kind in _SEQUENCES:
            nodes.append({_SEQUENCES[kind]: len(value)})
            children = [(v, f"{path}/{i}" if path else str(i), f"{key}\x1f{i}") for i, v in enumerate(value)]
        else:
            if isinstance(value, (dict, list, tuple)):
                raise UnsupportedLeafError(
                    f"{path or '<root>'}: {kind.__module__}.{kind.__qualname__} cannot be rebuilt without pickle; "
                    "convert it to a plain dict, list or tuple"
                )
            nodes.append(encode_scalar(value, path))
            continue
        if id(value) in ancestors:
            raise BadArgumentError(f"{path}: the tree contains itself")
        ancestors.add(id(value))
        stack.append(((end, id(value)), "", ""))
        stack.extend(reversed(children))
    return nodes, arrays


def _decode_scalar(node: Json) -> Any:
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    if isinstance(node, dict) and len(node) == 1:
        ((tag, text),) = node.items()
        if isinstance(text, str):
            try:
                if tag == "i":
                    return int(text, 16)
                if tag == "f":
                    (value,) = struct.unpack(">d", bytes.fromhex(text))
                    return value
                if tag == "b":
                    return base64.b64decode(text, validate=True)
            except (ValueError, struct.error, binascii.Error):
                pass
    raise CorruptDataError(f"header: {str(node)[:60]} is no tree node")


def _decode_key(node: Json) -> Any:
    if isinstance(node, dict) and set(node) == {"k"} and isinstance(node["k"], list):
        return tuple(_decode_key(k) for k in node["k"])
    return _decode_scalar(node)


@dataclass(slots=True)
class _Open:
    """A container whose children are still to come."""

    tag: str
    keys: list[Any] | None
    path: str
    key: str
    items: list[Any]
    size: int

    def close(self) -> Any:
        if self.keys is None:
            return self.items if self.tag == "l" else tuple(self.items)
        pairs = zip(self.keys, self.items, strict=True)
        if self.tag == "o":
            return OrderedDict(pairs)
        if self.tag == "c":
            counter: Counter[Any] = Counter()
            for k, v in pairs:
                counter[k] = v
            return counter
        return dict(pairs)


def unflatten(nodes: Sequence[Json], array: Callable[[int, str, str], Any]) -> Any:
    """Build the tree again; the inverse of `flatten`.

    Args:
        nodes: nodes in preorder.
        array: called with (number, path, key) for each array node, in preorder; its result becomes the leaf.

    Raises:
        CorruptDataError: the nodes are no tree.
    """
    root: list[Any] = []
    stack = [_Open("l", None, "", "", root, 1)]
    for node in nodes:
        while len(stack) > 1 and len(stack[-1].items) == stack[-1].size:
            done = stack.pop()
            stack[-1].items.append(done.close())
        top = stack[-1]
        at = len(top.items)
        if at == top.size:
            raise CorruptDataError("header: the tree has nodes beyond its end")
        if len(stack) == 1:
            path = key = ""
        elif top.keys is None:
            path, key = f"{top.path}/{at}" if top.path else str(at), f"{top.key}\x1f{at}"
        else:
            name = top.keys[at]
            path = f"{top.path}/{name}" if top.path else str(name)
            key = f"{top.key}\x1f{json.dumps(_encode_key(name, path))}"
        tag, body = next(iter(node.items())) if isinstance(node, dict) and len(node) == 1 else ("", None)
        if tag == "a" and type(body) is int:
            top.items.append(array(body, path, key))
        elif tag in ("l", "t") and type(body) is int and 0 <= body <= len(nodes):
            stack.append(_Open(tag, None, path, key, [], body))
        elif tag in ("d", "o", "c") and isinstance(body, list):
            keys = [_decode_key(k) for k in body]
            stack.append(_Open(tag, keys, path, key, [], len(keys)))
        else:
            top.items.append(_decode_scalar(node))
    while len(stack) > 1:
        done = stack.pop()
        if len(done.items) != done.size:
            raise CorruptDataError("header: the tree ends early")
        stack[-1].items.append(done.close())
    if len(root) != 1:
        raise CorruptDataError("header: the tree is empty")
    return root[0]
