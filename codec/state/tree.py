"""Conversion of a state, a tree of containers, to a list of nodes and back, without pickle.

The tree is written in preorder, one JSON value a node, so nesting has no depth limit in either direction:

    {"d": [keys]}  dict     {"o": [keys]}  OrderedDict     {"c": [keys]}  Counter     {"w": [keys]}  tensor subclass
    {"l": n}       list     {"t": n}       tuple           {"a": i}       array number i
    {"i": "-ff"}   integer beyond 53 bits, hexadecimal     {"f": "7ff8000000000000"}  float that JSON lacks (bits)
    {"b": "..."}   bytes, base64                           {"k": [..]}    a tuple used as a key
    {"s": "..."}   text with surrogates, base64 of UTF-8 that lets them pass
    anything else  itself: a finite float (always with '.' or 'e'), an int, a bool, a str, null

A tensor subclass (quantized weights, low-bit moments) that PyTorch can trace describes its own parts:
`__tensor_flatten__` gives the names of its inner tensors and a context, `__tensor_unflatten__` builds it from them. The
inner tensors are stored exactly under all rules: they are codes and scales, not weights. A file names the class but
never imports it: only a class whose module this process has imported already is used, and only if it is a tensor with
that method.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from json.encoder import encode_basestring_ascii
from typing import Any

from ...kernels.backend.arrays import imported, is_torch
from ..errors import BadArgumentError, CorruptDataError, UnsupportedLeafError

CLASS, TENSORS, CONTEXT, SIZE, STRIDE = "class", "tensors", "context", "size", "stride"
PARTS = {CLASS, TENSORS, CONTEXT, SIZE, STRIDE}


class Wrapper(dict[str, Any]):
    """Parts of a tensor subclass: class, inner tensors by name, context, size and stride."""


Json = Any
_DICTS: dict[type, str] = {dict: "d", OrderedDict: "o", Counter: "c", Wrapper: "w"}
DICT_TAGS = tuple(_DICTS.values())
_SEQUENCES: dict[type, str] = {list: "l", tuple: "t"}
_EXACT_INT = 1 << 53
_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_PATHS = 1 << 27
"""Characters of all arrays' paths and keys together."""
MOST_STEPS = 100
"""Taken slots met for each key, on average, beyond which keys are refused. Numbers at random meet 2, multiples of a
large power of two 40, the worst honest family tried (20,000 floats of 900 powers of two) 80."""
FEW_KEYS = 1024
"""This number of keys is never checked: at worst they take half a million steps."""
_SHIFT, _WORD = 5, (1 << 64) - 1
CROWDED = "the keys of a dict have hashes that collide; it would take quadratic time to build"


# These classes are not frozen, although they never change: freezing takes half the time of a walk.
@dataclass(slots=True)
class ArrayNode:
    """An array in a tree: `path` for users and rules, and `key`, which is always unique.

    Args:
        exact: whether it is part of a tensor subclass, which no rule may make lossy.
    """

    path: str
    key: str
    value: Any
    exact: bool = False


@dataclass(slots=True)
class Place:
    """Position of a value; path and key are computed only on demand, because a tree may be deep."""

    above: Place | None
    name: Any
    node: Json
    exact: bool = False

    def path(self) -> str:
        """Return the keys joined by "/", as users and rules write them."""
        return "/".join(_name(p.name) for p in self._line())

    def key(self) -> str:
        """Return the typed keys, which are unique even if paths are not."""
        return "\x1f".join(_json(p.node) for p in self._line())

    def _line(self) -> list[Place]:
        line = []
        place: Place | None = self
        while place is not None and place.above is not None:
            line.append(place)
            place = place.above
        return line[::-1]


def _json(node: Json) -> str:
    # What `json.dumps` makes of a string, without its overhead: almost every key is one.
    return encode_basestring_ascii(node) if type(node) is str else json.dumps(node)


def _name(key: Any) -> str:
    # Python refuses to spell huge integers in decimal.
    if type(key) is tuple:
        parts = [_name(part) if type(part) in (int, tuple) else repr(part) for part in key]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    return format(key, "x") if type(key) is int and not -_EXACT_INT <= key <= _EXACT_INT else str(key)


class _Spelled:
    """Paths and keys of a tree, with a limit on their total memory."""

    def __init__(self, error: type[Exception]) -> None:
        self._left = MAX_PATHS
        self._error = error

    def __call__(self, place: Place) -> tuple[str, str]:
        path, key = place.path(), place.key()
        self._left -= len(path) + len(key)
        if self._left < 0:
            raise self._error(f"the paths of this tree are longer than {MAX_PATHS} characters together")
        return path, key


def _is_itself(value: Any) -> bool:
    """Return whether a value is its own node; for most scalars, and faster than `encode_scalar`."""
    kind = type(value)
    if kind is str:
        return bool(value.isascii())
    if kind is float:
        return math.isfinite(value)
    return kind is bool or value is None or (kind is int and -_EXACT_INT <= value <= _EXACT_INT)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def encode_scalar(value: Any, place: Place) -> Json:
    """Return the JSON node of a plain scalar; raise UnsupportedLeafError for other values."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if kind is str:
        # JSON would join two surrogates to one character.
        return {"s": _base64(value.encode("utf-8", "surrogatepass"))} if _SURROGATE.search(value) else value
    if kind is int:
        return value if -_EXACT_INT <= value <= _EXACT_INT else {"i": format(value, "x")}
    if kind is float:
        return value if math.isfinite(value) else {"f": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"b": _base64(value)}
    raise UnsupportedLeafError(
        f"{place.path() or '<root>'}: {kind.__module__}.{kind.__qualname__} cannot be stored without pickle; "
        f"allowed are dict, list, tuple, arrays, int, float, bool, str, bytes and None{_hint(value)}"
    )


_PLAIN_FORMS = {
    "vars(args), a dict": "Namespace SimpleNamespace",
    "str(value)": "device dtype UUID Decimal",
    "sorted(value)": "set frozenset",
    "list(value)": "deque range",
    "bytes(value)": "bytearray",
    "value.isoformat()": "datetime date",
    "value.value": "Enum",
    "its get_state(), or bit_generator.state": "Generator",
}
"""How to pass values of types that cannot be stored."""


def _hint(value: Any) -> str:
    """Return advice on how to pass a value that cannot be stored as it is, or ""."""
    if callable(getattr(value, "state_dict", None)):
        return "; pass its state_dict()"
    if isinstance(value, os.PathLike):
        return "; pass str(path)"
    names = {kind.__name__ for kind in type(value).__mro__}
    for form, types in _PLAIN_FORMS.items():
        if not names.isdisjoint(types.split()):
            return f"; pass {form}"
    tree = "of a JAX pytree pass trainers.jax.nested(tree), fitted gives it back"
    if is_dataclass(value) and not isinstance(value, type):
        return f"; pass dataclasses.asdict(value); {tree}"
    return f"; {tree}" if hasattr(value, "_fields") else ""


def _encode_key(key: Any, place: Place) -> Json:
    if _is_itself(key):
        return key
    if type(key) is tuple:
        return {"k": [_encode_key(k, place) for k in key]}
    try:
        return encode_scalar(key, place)
    except UnsupportedLeafError:
        kind = type(key)
        raise UnsupportedLeafError(
            f"{place.path() or '<root>'}: a key of type {kind.__module__}.{kind.__qualname__} "
            "cannot be stored without pickle"
        ) from None


def flatten(
    state: Any, is_array: Callable[[Any], bool], *, spell: bool = True, name: str = "the state"
) -> tuple[list[Json], list[ArrayNode]]:
    """Flatten a state to a list of nodes and its arrays.

    Args:
        state: dict, list or tuple, any nesting.
        is_array: says which values are arrays; every other leaf must be a plain scalar.
        spell: give each array its path and key; without, they are "", which takes half the time.
        name: what messages call the root.

    Returns:
        The nodes in preorder, and the arrays in the order of their `{"a": i}` nodes.

    Raises:
        BadArgumentError: the root is not a dict, list or tuple, or the tree contains itself.
        UnsupportedLeafError: a leaf, key or container type that cannot be rebuilt without pickle.
    """
    if type(state) not in _DICTS and type(state) not in _SEQUENCES:
        raise BadArgumentError(
            f"{name} must be a tree (dict, list or tuple of arrays and scalars), not {type(state).__qualname__}"
            f"{_hint(state)}"
        )
    nodes: list[Json] = []
    arrays: list[ArrayNode] = []
    ancestors: set[int] = set()
    spelled = _Spelled(BadArgumentError)
    # Open containers: their place, their remaining children (name, its node, value), and their id.
    stack: list[tuple[Place | None, Iterator[tuple[Any, Json, Any]], int]] = [(None, iter([("", "", state)]), 0)]
    while stack:
        above, children, own = stack[-1]
        for key, node, value in children:
            if _is_itself(value):
                nodes.append(value)
                continue
            place = Place(above, key, node, above is not None and above.exact)
            if is_array(value):
                if not is_wrapper(value):
                    nodes.append({"a": len(arrays)})
                    arrays.append(ArrayNode(*(spelled(place) if spell else ("", "")), value, place.exact))
                    continue
                value = taken_apart(value, place.path())
                place.exact = True
            opened = _opened(value, place)
            if opened is None:
                nodes.append(encode_scalar(value, place))
                continue
            if id(value) in ancestors:
                raise BadArgumentError(f"{place.path()}: the tree contains itself")
            ancestors.add(id(value))
            nodes.append(opened[0])
            stack.append((place, opened[1], id(value)))
            break
        else:
            stack.pop()
            ancestors.discard(own)
    return nodes, arrays


def _opened(value: Any, place: Place) -> tuple[Json, Iterator[tuple[Any, Json, Any]]] | None:
    """Return the node of a container and its children (name, its node, value), or None."""
    kind = type(value)
    if kind in _DICTS:
        names = list(value)
        keys = [_encode_key(k, place) for k in names]
        if is_crowded(names):
            raise UnsupportedLeafError(f"{place.path() or '<root>'}: {CROWDED}")
        return {_DICTS[kind]: keys}, zip(names, keys, list(value.values()), strict=True)
    if kind in _SEQUENCES:
        return {_SEQUENCES[kind]: len(value)}, zip(range(len(value)), range(len(value)), list(value), strict=True)
    if isinstance(value, dict | list | tuple):
        raise UnsupportedLeafError(
            f"{place.path() or '<root>'}: {kind.__module__}.{kind.__qualname__} cannot be rebuilt without pickle; "
            f"convert it to a plain dict, list or tuple{_hint(value)}"
        )
    return None


def is_crowded(keys: Sequence[Any], *, few: int = FEW_KEYS, most: int = MOST_STEPS) -> bool:
    """Return whether a dict with these keys takes more than `most` steps per key.

    Hashes of text and bytes are secret in each process; those of numbers, and of tuples of them, are not. Integers that
    differ by multiples of 2**61 - 1 have one hash, tuples with one hash are easily found, and of integers of 64 bits
    some walk through all slots that the others hold. A dict of n such keys takes n**2 / 2 steps to build, and a file of
    some kilobytes hours. So before a dict is built its insertions are counted, by numbers that are not used as keys.

    The table of CPython's dict is walked as it does: slot `h mod 2**k` first, then `i -> 5 i + p + 1` with the hash's
    higher bits shifted into p; it grows when two thirds are taken.

    Args:
        keys: what can be hashed, all different.
        few: fewer keys, text and bytes not counted, are not looked at. Default 1024.
        most: steps a key. Default 100.

    Example:
        >>> is_crowded(range(5000)), is_crowded([i * (2**61 - 1) for i in range(5000)])
        (False, True)
    """
    hashes = [hash(key) for key in keys if type(key) is not str and type(key) is not bytes]
    if len(hashes) < max(1, few):
        return False
    if min(hashes) >= 0 and max(hashes) < 4 * len(hashes) and len(set(hashes)) == len(hashes):
        # Small numbers, all different: near to slots of their own.
        return False
    left = most * len(hashes)
    # Every size of the table on the way, each filled to two thirds; the last with the remaining keys.
    bits = 3
    while left >= 0:
        slots, mask = bytearray(1 << bits), (1 << bits) - 1
        for h in hashes[: (2 << bits) // 3]:
            at, rest = h & mask, h & _WORD
            while slots[at]:
                rest >>= _SHIFT
                at = (5 * at + rest + 1) & mask
                left -= 1
                if left < 0:
                    return True
            slots[at] = 1
        if len(hashes) <= (2 << bits) // 3:
            return False
        bits += 1
    return True


def is_wrapper(value: Any) -> bool:
    """Return whether a value is a tensor subclass from outside PyTorch."""
    kind = type(value)
    return not kind.__module__.startswith("torch.") and is_torch(value) and hasattr(kind, "__tensor_flatten__")


def taken_apart(value: Any, path: str) -> Wrapper:
    """Return a tensor subclass as a tree of plain tensors and scalars.

    Raises:
        UnsupportedLeafError: its context holds what cannot be stored without pickle.
    """
    kind = type(value)
    names, context = value.__tensor_flatten__()
    return Wrapper(
        {
            CLASS: f"{kind.__module__}:{kind.__qualname__}",
            TENSORS: {name: getattr(value, name) for name in names},
            CONTEXT: _plain(context, path, kind),
            SIZE: list(value.shape),
            STRIDE: list(value.stride()),
        }
    )


def _plain(value: Any, path: str, owner: type) -> Any:
    """Convert a context to lists, dicts and scalars; other values become a dict with their kind."""
    import torch

    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if type(value) is list:
        return [_plain(v, path, owner) for v in value]
    if type(value) in (tuple, torch.Size):
        return {"size" if type(value) is torch.Size else "tuple": [_plain(v, path, owner) for v in value]}
    if type(value) is dict:
        return {"dict": [[_plain(k, path, owner), _plain(v, path, owner)] for k, v in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise UnsupportedLeafError(
        f"{path}: the context of the tensor subclass {owner.__qualname__} holds a {type(value).__qualname__}, "
        "which cannot be stored without pickle"
    )


def _decode_scalar(node: Json) -> Any:
    if node is None or isinstance(node, (bool, int, str)) or (isinstance(node, float) and math.isfinite(node)):
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
                if tag == "s":
                    return base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass")
            except (ValueError, struct.error, binascii.Error):
                pass
    raise CorruptDataError(f"header: {str(node)[:60]} is not a tree node")


def _decode_key(node: Json) -> Any:
    if isinstance(node, dict) and set(node) == {"k"} and isinstance(node["k"], list):
        return tuple(_decode_key(k) for k in node["k"])
    return _decode_scalar(node)


@dataclass(slots=True)
class _Open:
    """A container whose children are not all read yet."""

    tag: str
    keys: list[Any] | None
    nodes: list[Any] | None
    place: Place
    items: list[Any]
    size: int
    rebuild: bool = False

    def next_place(self) -> Place:
        at = len(self.items)
        if self.keys is None or self.nodes is None:
            return Place(self.place, at, at)
        return Place(self.place, self.keys[at], self.nodes[at])

    def close(self) -> Any:
        if self.keys is None:
            return self.items if self.tag == "l" else tuple(self.items)
        kinds: dict[str, type[dict[Any, Any]]] = {"o": OrderedDict, "c": Counter, "w": Wrapper}
        made = kinds.get(self.tag, dict)()
        for key, value in zip(self.keys, self.items, strict=True):
            made[key] = value
        if len(made) != len(self.keys):
            raise CorruptDataError("header: a key stands twice")
        # Of a partial load there may be no whole one.
        if self.rebuild and isinstance(made, Wrapper) and made.keys() == PARTS:
            return put_together(made, self.place.path())
        return made


def unflatten(
    nodes: Sequence[Json], array: Callable[[int, Callable[[], tuple[str, str]]], Any], *, rebuild: bool = False
) -> Any:
    """Rebuild the tree from its nodes; the inverse of `flatten`.

    Args:
        nodes: nodes in preorder.
        array: called for each array node, in preorder, with its number and a function that spells (path, key) of its
            place; its result becomes the leaf.
        rebuild: put tensor subclasses together; else they stay `Wrapper`s, which `flatten` treats as the subclass.

    Raises:
        CorruptDataError: the nodes do not form a tree.
        UnsupportedLeafError: a tensor subclass is not known here.
    """
    first = nodes[0] if nodes else None
    if not isinstance(first, dict) or not first.keys() & {"l", "t", *DICT_TAGS}:
        raise CorruptDataError("header: the root of the tree must be a container")
    spelled = _Spelled(CorruptDataError)
    root: list[Any] = []
    # The root's own place has no name: it stands above all paths.
    stack = [_Open("l", None, None, Place(None, "", ""), root, 1)]
    top = stack[0]
    for node in nodes:
        while len(top.items) == top.size and len(stack) > 1:
            done = stack.pop()
            top = stack[-1]
            top.items.append(done.close())
        if len(top.items) == top.size:
            raise CorruptDataError("header: the tree has nodes beyond its end")
        if not isinstance(node, dict):
            top.items.append(_decode_scalar(node))
            continue
        place = top.next_place() if len(stack) > 1 else top.place
        tag, body = next(iter(node.items())) if len(node) == 1 else ("", None)
        if tag == "a" and type(body) is int:
            top.items.append(array(body, partial(spelled, place)))
        elif tag in ("l", "t") and type(body) is int and 0 <= body <= len(nodes):
            top = _Open(tag, None, None, place, [], body)
            stack.append(top)
        elif tag in DICT_TAGS and isinstance(body, list):
            keys = [k if type(k) is str else _decode_key(k) for k in body]
            if is_crowded(keys):
                raise CorruptDataError(f"header: {CROWDED}")
            top = _Open(tag, keys, body, place, [], len(keys), rebuild)
            stack.append(top)
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


def put_together(parts: Wrapper, path: str) -> Any:
    """Rebuild a tensor subclass from its `PARTS`.

    Raises:
        UnsupportedLeafError: its class is not imported here, or refuses the stored parts.
        CorruptDataError: the parts are not what `taken_apart` gives.
    """
    name = parts[CLASS]
    if not isinstance(name, str):
        raise CorruptDataError(f"{path}: a tensor subclass without a name")
    module, _, qualified = name.partition(":")
    kind: Any = imported(module)
    for step in qualified.split("."):
        kind = getattr(kind, step, None)
    import torch

    if not (isinstance(kind, type) and issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise UnsupportedLeafError(
            f"{path}: the tensor subclass {qualified} of {module} is not known here; import it before loading"
        )
    tensors, size, stride = parts[TENSORS], parts[SIZE], parts[STRIDE]
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise CorruptDataError(f"{path}: a tensor subclass without inner tensors")
    if not all(isinstance(s, list) and all(type(n) is int for n in s) for s in (size, stride)):
        raise CorruptDataError(f"{path}: a tensor subclass without size and stride")
    try:
        context = _from_plain(parts[CONTEXT], path)
    except RecursionError:
        raise CorruptDataError(f"{path}: the context of a tensor subclass is nested too deeply") from None
    try:
        return kind.__tensor_unflatten__(tensors, context, torch.Size(size), tuple(stride))
    except Exception as error:
        # The class's own code may raise any error for parts that it did not make.
        raise UnsupportedLeafError(f"{path}: {qualified} cannot be built from its parts: {error}") from error


def _from_plain(value: Any, path: str) -> Any:
    import torch

    if type(value) is list:
        return [_from_plain(v, path) for v in value]
    if type(value) is not dict:
        return value
    tag: str
    body: Any
    tag, body = next(iter(value.items())) if len(value) == 1 else ("", None)
    try:
        if tag == "dict":
            return {_from_plain(k, path): _from_plain(v, path) for k, v in body}
        if tag in ("size", "tuple"):
            return (torch.Size if tag == "size" else tuple)([_from_plain(v, path) for v in body])
        if tag == "dtype" and isinstance(getattr(torch, body), torch.dtype):
            return getattr(torch, body)
        if tag == "device":
            return torch.device(body)
    except (TypeError, ValueError, AttributeError, RuntimeError, RecursionError):
        pass
    raise CorruptDataError(f"{path}: {str(value)[:60]} is not a valid part of a tensor subclass's context")
