"""Helpers of the codec's tests: bitwise equality, round trips, files in parts."""

from __future__ import annotations

import importlib
import json
import pkgutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash
import zstandard

import shrinkpoint as sp
from shrinkpoint import codec
from shrinkpoint.codec.format.container import from_columns, to_columns
from shrinkpoint.codec.format.schema import COLUMNS
from shrinkpoint.codec.state.tree import is_wrapper, taken_apart

_PREFIX = struct.Struct("<8sIIQQII")


def bits(x: Any) -> bytes:
    """The bytes of an array of any library, in C order."""
    if isinstance(x, torch.Tensor):
        flat = x.detach().resolve_conj().resolve_neg()
        same_width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(flat.element_size())
        flat = flat.view(same_width) if same_width is not None else torch.view_as_real(flat)
        return flat.contiguous().numpy().tobytes()
    return np.asarray(x).tobytes()


def _atom(x: Any) -> Any:
    """Return a scalar in a form that `==` compares bit for bit."""
    if type(x) is float:
        return struct.pack(">d", x)
    if type(x) is tuple:
        return tuple((type(i), _atom(i)) for i in x)
    return x


def is_array(x: Any) -> bool:
    return isinstance(x, (torch.Tensor, np.ndarray, np.generic)) or hasattr(x, "__array_namespace__")


def short(key: Any) -> str:
    """A key in a few characters; Python refuses to spell huge integers in decimal."""
    return format(key, "x")[:40] if type(key) is int else f"{key!r:.40}"


def difference(a: Any, b: Any) -> str:
    """Describe the first difference of two states in type, key, dtype, shape, bits; or ""."""
    stack = [("", a, b)]
    while stack:
        path, x, y = stack.pop()
        if is_wrapper(x) and type(x) is type(y):
            stack.append((path, taken_apart(x, path), taken_apart(y, path)))
        elif is_array(x):
            torches = isinstance(x, torch.Tensor), isinstance(y, torch.Tensor)
            kinds = (torch.Tensor, torch.Tensor) if all(torches) else (type(x), type(y))
            if kinds[0] is not kinds[1] or x.dtype != y.dtype or tuple(x.shape) != tuple(y.shape):
                return f"{path}: {type(x)} {getattr(x, 'dtype', '')} became {type(y)} {getattr(y, 'dtype', '')}"
            if bits(x) != bits(y):
                return f"{path}: bits differ"
        elif type(x) is not type(y):
            return f"{path}: {type(x)} became {type(y)}"
        elif isinstance(x, dict):
            if [(type(k), _atom(k)) for k in x] != [(type(k), _atom(k)) for k in y]:
                return f"{path}: keys {list(x)!r} became {list(y)!r}"
            stack.extend((f"{path}/{short(k)}", v, w) for (k, v), w in zip(x.items(), y.values(), strict=True))
        elif isinstance(x, (list, tuple)):
            if len(x) != len(y):
                return f"{path}: {len(x)} items became {len(y)}"
            stack.extend((f"{path[-200:]}/{i}", v, w) for i, (v, w) in enumerate(zip(x, y, strict=True)))
        elif _atom(x) != _atom(y):
            return f"{path}: {x!r} became {y!r}"
    return ""


def through_bytes(ckpt: sp.Checkpoint, prev: sp.Checkpoint | None = None) -> Any:
    """Return the state as a reader restores it from bytes, with the parent if given."""
    return sp.decompress(sp.Checkpoint.from_bytes(ckpt.to_bytes()), prev)


def round_trip(state: Any, cfg: sp.Config | None = None, kinds: Any = None) -> Any:
    return through_bytes(sp.compress(state, cfg=cfg, kinds=kinds))


def known(*paths: str) -> dict[str, str]:
    """Return kinds that declare each path as the weights of a linear layer."""
    return dict.fromkeys(paths, "linear")


def take_apart(blob: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Return header, records of arrays as rows, and chunks of a file."""
    _, _, _, stored, _, count, _ = _PREFIX.unpack_from(blob)
    header = json.loads(zstandard.decompress(blob[56 : 56 + stored]))
    for name, keys in COLUMNS.items():
        header[name] = from_columns(header[name], len(header["tree"]), keys)
    table, at = 56 + stored, 56 + stored + 24 * count
    chunks = []
    for i in range(count):
        (n,) = struct.unpack_from("<Q", blob, table + 24 * i)
        chunks.append(blob[at : at + n])
        at += n
    return header, chunks


def put_together(
    header: dict[str, Any] | bytes,
    chunks: list[bytes],
    *,
    version: int = 2,
    plain_length: int | None = None,
    count: int | None = None,
    lengths: list[int] | None = None,
    tail: bytes = b"",
) -> bytes:
    """Build a file with valid checksums from any header and chunks."""
    for name in ("arrays", "groups") if isinstance(header, dict) else ():
        rows = header.get(name)
        if isinstance(rows, list) and all(isinstance(row, dict) and None not in row.values() for row in rows):
            header = header | {name: to_columns(rows)}
    plain = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    stored = zstandard.ZstdCompressor(level=3).compress(plain) + tail
    sizes = [len(c) for c in chunks] if lengths is None else lengths
    table = b"".join(
        struct.pack("<Q", n % (1 << 64)) + xxhash.xxh3_128(c).digest() for n, c in zip(sizes, chunks, strict=True)
    )
    prefix = _PREFIX.pack(
        b"\x89SPT\r\n\x1a\n",
        version,
        0,
        len(stored),
        len(plain) if plain_length is None else plain_length,
        len(chunks) if count is None else count,
        0,
    )
    return b"".join([prefix, xxhash.xxh3_128(prefix + stored + table).digest(), stored, table, *chunks])


def stored_records(header: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the records with pieces in the order of the body."""
    found: list[dict[str, Any]] = header["groups"]
    return found


def pieces_of(header: dict[str, Any], body: bytes) -> list[list[bytes]]:
    """The pieces of each of `stored_records`."""
    pieces: list[list[bytes]] = []
    at = 0
    for record in stored_records(header):
        pieces.append([])
        for n in record["b"]:
            pieces[-1].append(body[at : at + n])
            at += n
    assert at == len(body)
    return pieces


@contextmanager
def small_chunks(n: int) -> Iterator[None]:
    """Context in which arrays are cut into chunks of n elements, and values are computed by quarters of them."""
    names = [m.name for m in pkgutil.walk_packages(codec.__path__, "shrinkpoint.codec.")]
    sizes = {"CHUNK": n, "PART": max(1, n // 4)}
    modules = [(m, name) for m in map(importlib.import_module, names) for name in sizes if hasattr(m, name)]
    found = [(m, name, getattr(m, name)) for m, name in modules]
    assert len(found) >= 16
    for module, name in modules:
        setattr(module, name, sizes[name])
    try:
        yield
    finally:
        for module, name, size in found:
            setattr(module, name, size)


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Context in which the codec runs on n threads."""
    sp.set_threads(n)
    try:
        yield
    finally:
        sp.set_threads(None)


def regression(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[Callable[..., float], Callable[[], Any]]:
    """Return the training function of a small regression, and one that makes its model."""
    torch.manual_seed(0)
    x = torch.randn(512, 64)
    target = torch.tanh(x @ torch.randn(64, 64)) + 0.1 * torch.randn(512, 64)

    def run(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> float:
        order = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            at = torch.randint(0, 512, (64,), generator=order)
            optimizer.zero_grad()
            (model(x[at]) - target[at]).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            return float((model(x) - target).square().mean())

    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64))
        return model, make(model.parameters())

    return run, fresh
