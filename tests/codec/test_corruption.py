"""Damaged and hostile files: a typed error or the right answer within time and memory."""

from __future__ import annotations

import itertools
import json
import random
import re
import signal
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import shrinkpoint as sp
from shrinkpoint.codec.format import container
from shrinkpoint.codec.format.schema import GROUP_KEYS
from shrinkpoint.codec.registry import STREAMS

from ..golden.make import KINDS, cases
from ..seeds import fresh_seed
from .common import difference, pieces_of, put_together, stored_records, take_apart

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.usefixtures("warm")]


@contextmanager
def within(seconds: int = 20, gigabytes: float = 2.0) -> Iterator[None]:
    """Limit the processor time and (on Linux) the additional memory of a block."""

    def late(_signal: int, _frame: Any) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    old = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    limits = None
    if sys.platform == "linux":
        import resource

        limits = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm") as f:
            now = int(f.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + int(gigabytes * 2**30), limits[1]))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
        if limits is not None:
            resource.setrlimit(resource.RLIMIT_AS, limits)


def read(blob: bytes, prev: sp.Checkpoint | None = None) -> Any:
    """Read a file in every way that a reader has."""
    ckpt = sp.Checkpoint.from_bytes(blob, prev)
    repr(ckpt)
    json.dumps([row.path for row in ckpt.summary()])
    if prev is None and ckpt.is_delta:
        with pytest.raises(sp.MissingParentError):
            sp.decompress(ckpt)
        return None
    sp.compress({"weight": np.zeros(3)}, ckpt)
    return sp.decompress(ckpt)


def small() -> tuple[dict[str, Any], sp.Checkpoint, dict[str, Any], sp.Checkpoint]:
    rng = np.random.default_rng(0)
    w, m = rng.standard_normal(1100).astype("f4"), rng.standard_normal(1024).astype("f2")
    state = {"weight": w, "i": torch.arange(40), 1: [True, 0.5, "x", None], "o": {"0": {"exp_avg": m}}}
    later = {
        **state,
        "weight": w + np.float32(0.01) * rng.standard_normal(1100).astype("f4"),
        "i": torch.arange(40) * 3,
    }
    base = sp.compress(state)
    delta = sp.compress(later, base)
    return sp.decompress(base), base, sp.decompress(delta), delta


@pytest.fixture(scope="module")
def warm() -> None:
    """Import and compile everything first, which could exceed a memory limit later."""
    try:
        import jax.numpy as jnp

        jnp.zeros(3).block_until_ready()
    except ImportError:
        pass
    for blob, prev in _sources():
        read(blob, prev)


def test_every_flipped_byte_and_every_truncation_of_a_base_and_of_a_delta() -> None:
    first, base, second, delta = small()
    rng = random.Random()
    for blob, prev, expected in ((base.to_bytes(), None, first), (delta.to_bytes(), base, second)):
        assert difference(read(blob, prev), expected) == ""
        for at in range(len(blob)):
            bad = bytearray(blob)
            bad[at] ^= rng.choice([1, 0x80, 0xFF, 1 << rng.randrange(8)])
            _typed_or_right(bytes(bad), prev, expected)
            _typed_or_right(blob[:at], prev, expected)
        for more in (b"\0", b"x" * 24, blob):
            _typed_or_right(blob + more, prev, None)
            _typed_or_right(more + blob, prev, None)


def _typed_or_right(blob: bytes, prev: sp.Checkpoint | None, expected: Any) -> None:
    try:
        got = read(blob, prev)
    except (sp.CorruptDataError, sp.NewerFormatError, sp.MissingParentError):
        return
    assert expected is not None
    assert difference(got, expected) == ""


def _sources() -> list[tuple[bytes, sp.Checkpoint | None]]:
    """Return files that together use every stream format and every coder."""
    rng = np.random.default_rng(0)
    n = 1500
    x = rng.standard_normal(n).astype("f4")

    def state(t: float) -> dict[str, Any]:
        y = x + np.float32(t) * rng.standard_normal(n).astype("f4")
        return {
            "weight": y,
            "bf": torch.from_numpy(y).bfloat16(),
            "d": torch.from_numpy(y).double(),
            "zero": np.zeros(n, "f4"),
            "odd": np.where(rng.random(n) < 0.02, np.nan, y * 1e30).astype("f4"),
            "o": {"0": {"exp_avg": y, "exp_avg_sq": torch.from_numpy(y**2), "step": torch.tensor(3.0)}},
            "p": {
                "0": {"exp_avg": torch.from_numpy(y).view(30, 50), "exp_avg_sq": torch.from_numpy(y**2).view(30, 50)}
            },
            "i": rng.integers(0, 100, 600),
            "b": rng.integers(0, 2, 900).astype(bool),
            "c": (y[:700] + 1j * y[:700]).astype("c8"),
            "u": np.array(["ab", "c"]),
            "e": np.zeros((0, 3)),
        }

    out: list[tuple[bytes, sp.Checkpoint | None]] = []
    for cfg in (
        sp.Config(),
        sp.presets.inshrinkerator(),
        sp.presets.inshrinkerator(prune=0.3, bins=254),
        sp.Config([("*", sp.Quantize(bins=2, prune=0.5, protect=0.2, policy="refit"))]),
        sp.presets.lossless(),
        sp.Config([("*", sp.LogBuckets(2.0**-17))]),
        sp.presets.lc_checkpoint(second_moments="exponent"),
        sp.presets.lc_checkpoint(None, huffman=False),
        sp.presets.bitsnap(),
        sp.Config([("weight", sp.Changed()), ("*", sp.Clusters(3))]),
    ):
        base = sp.compress(state(0.0), cfg=cfg)
        delta = sp.compress(state(0.01), base, cfg)
        out += [(base.to_bytes(), None), (delta.to_bytes(), base)]
    # Classes of rows and columns; few changes; streams of 64 states; groups.
    for name in ("uneven", "sparse", "many", "small"):
        make, cfg, _ = cases()[name]
        base = sp.compress(make(0), cfg=cfg, kinds=KINDS.get(make))
        out += [(base.to_bytes(), None), (sp.compress(make(1), base, cfg, kinds=KINDS.get(make)).to_bytes(), base)]
    return out


def test_altered_streams_with_right_checksums() -> None:
    """With valid checksums, decoders check every length and value of damaged streams."""
    seed = fresh_seed()
    rng = random.Random(seed)
    sources = [(take_apart(blob), prev) for blob, prev in _sources()]
    for _ in range(600):
        (header, chunks), prev = rng.choice(sources)
        header = json.loads(json.dumps(header))
        pieces = pieces_of(header, b"".join(chunks))
        records = stored_records(header)
        for _ in range(rng.choice([1, 1, 1, 3])):
            _damage(rng, header, pieces)
        for record, own in zip(records, pieces, strict=True):
            record["b"] = [len(p) for p in own]
        header["raw"] = _raw(header)
        blob = put_together(header, [b"".join(p for own in pieces for p in own)])
        try:
            with within(), np.errstate(all="ignore"):
                read(blob, prev)
        except sp.ShrinkpointError:
            pass
        except Exception as e:
            raise AssertionError(f"seed {seed}: {type(e).__name__}: {e}") from e


def _raw(header: dict[str, Any]) -> int:
    total = 0
    for r in header["arrays"]:
        item = torch.empty(0, dtype=getattr(torch, r["d"])).itemsize if "l" not in r else np.dtype(r["d"]).itemsize
        total += int(np.prod(r["s"], dtype=object)) * item
    return total


def _damage(rng: random.Random, header: dict[str, Any], pieces: list[list[bytes]]) -> None:
    number = rng.choice([i for i, own in enumerate(pieces) if own])
    record, own = stored_records(header)[number], pieces[number]
    member = header["arrays"][rng.choice(_members(header["groups"], number, len(header["arrays"])))]
    i = rng.randrange(len(own))
    piece = bytearray(own[i])
    how = rng.random()
    if how < 0.5 and piece:
        at = rng.randrange(min(len(piece), rng.choice([4, 16, 64, 10**9])))
        piece[at] = rng.choice([0, 1, 2, 5, 127, 128, 255, rng.randrange(256), piece[at] ^ (1 << rng.randrange(8))])
    elif how < 0.6:
        piece = piece[: rng.randrange(len(piece) + 1)]
    elif how < 0.7:
        piece += rng.randbytes(rng.randrange(1, 9))
    elif how < 0.8 and piece:
        at = rng.randrange(min(len(piece), 32))
        piece[at : at + 1] = b"\xff" * rng.randrange(1, 9) + b"\x7f"
    elif how < 0.85:
        piece = bytearray(rng.choice(rng.choice([p for p in pieces if p])))
    elif how < 0.9:
        record["f"] = rng.choice(sorted(STREAMS))
        if rng.random() < 0.5:
            member["v"] = rng.choice([-1, 0, number, len(pieces) - 1, len(pieces), 10**30, "x", None, 0.0, True])
    elif how < 0.95:
        thresholds = [[0] * 4, [None] * 4, [-1, 0, 0, 0], [10**400, 0, 0, 0], [1], ["x"] * 4, {}]
        record["m"] = rng.choice([{}, {"b": rng.randrange(-1, 25)}, *({"t": t, "b": 6} for t in thresholds)])
    else:
        other = dict(rng.choice(header["arrays"]))
        for name in ("d", "s", "l"):
            member.pop(name, None)
            if name in other:
                member[name] = other[name]
        if rng.random() < 0.3:
            member["s"] = [rng.choice([0, 1, 3, 1499, 1501])]
    if rng.random() < 0.2:
        record["p"] = not record.get("p", False)
    if "a" in record and rng.random() < 0.1:
        at = rng.randrange(len(record["a"]))
        record["a"][at] += rng.choice([-1, 1, 7, -(10**6), 2**50])
    own[i] = bytes(piece)


def _members(groups: list[dict[str, Any]], number: int, count: int) -> list[int]:
    """Numbers of the arrays of a group that exist, at least one."""
    before = sum(group.get("a", [1])[0] for group in groups[:number]) - 1
    numbers = list(itertools.accumulate(groups[number].get("a", [1]), initial=before))[1:]
    return [i for i in numbers if 0 <= i < count] or [0]


def _plain() -> tuple[dict[str, Any], list[bytes]]:
    return take_apart(sp.compress({"x": torch.tensor([1.0, 2.0, 3.0])}).to_bytes())


def _with(record: dict[str, Any] | None = None, **fields: Any) -> bytes:
    header, chunks = _plain()
    for name, value in (record or {}).items():
        header["groups" if name in GROUP_KEYS else "arrays"][0][name] = value
    header.update(fields)
    return put_together(header, chunks)


def _empty(dtype: str, library: str, shape: list[int] | None = None) -> bytes:
    header, _ = _plain()
    header["arrays"] = [{"d": dtype, "s": shape or [0], "l": library}]
    header["groups"][0]["b"] = []
    header["raw"] = 0
    return put_together(header, [])


def _raw_header(text: str) -> bytes:
    return put_together(text.encode("utf-8", "surrogatepass"), _plain()[1])


HEADER = json.dumps(_plain()[0])
TREE = '{"parent":null,"raw":0,"arrays":[],"tree":['
DTYPES = [
    *("O", "object", "f4,f4", "(2,3)f4", "(1000000,)f4", "3f4", "V8", "V0", "S0", "U0", "str", "bytes", "void", ""),
    *("(1,", "(-1,)f4", "(99999999,99999999,99999999)f4", "M8[zz]", "M8[3D/7]", "M8[99999999999999999999s]", "a5"),
    *(
        "S2147483647",
        "U536870912",
        "V99999999999",
        "\ud800",
        "\0",
        "{'names':['a']}",
        "T",
        "finfo",
        "iinfo",
        "f16",
        "c",
    ),
    *("float 32", "nn", "_inductor", "Tensor", "load", "__doc__", "p", "=", "<", "datetime64", ">i8", "longdouble"),
]


def _pair(fields: dict[str, Any]) -> bytes:
    """Return a file in which the record of a second moment has other fields."""
    y = np.random.default_rng(0).standard_normal((30, 50)).astype("f4")
    header, chunks = take_apart(sp.compress({"o": {"0": {"exp_avg": y, "exp_avg_sq": y**2}}}).to_bytes())
    number = next(row["v"] for row in header["arrays"] if "v" in row)
    # It comes after the one that names it, which is looked at first.
    header["groups"][number] |= fields
    return put_together(header, chunks)


HOSTILE: dict[str, Callable[[], bytes]] = {
    "no header": lambda: _raw_header(""),
    "no JSON": lambda: _raw_header("{"),
    "no object": lambda: _raw_header("[1]"),
    "null": lambda: _raw_header("null"),
    "not UTF-8": lambda: put_together(b"\xff\xfe{", _plain()[1]),
    "nothing in it": lambda: _raw_header("{}"),
    "deep JSON": lambda: _raw_header("[" * 10**6),
    "deep JSON objects": lambda: _raw_header('{"a":' * 10**5),
    "deep key": lambda: _raw_header(TREE + '{"d":[' + '{"k":[' * 900 + "]}" * 900 + "]},1]}"),
    "digits": lambda: _raw_header(HEADER.replace('"raw": 12', '"raw": ' + "9" * 5000)),
    "infinite": lambda: _raw_header(HEADER.replace('"raw": 12', '"raw": 1e999')),
    "NaN": lambda: _raw_header(HEADER.replace('"raw": 12', '"raw": NaN')),
    "raw negative": lambda: _with(raw=-12),
    "raw wrong": lambda: _with(raw=13),
    "raw huge": lambda: _with(raw=2**80),
    "raw text": lambda: _with(raw="12"),
    "parent number": lambda: _with(parent=7),
    "parent short": lambda: _with(parent="ab"),
    "parent elsewhere": lambda: _with(parent="../" * 21 + "x"),
    "tree number": lambda: _with(tree=3),
    "tree empty": lambda: _with(tree=[]),
    "tree without array": lambda: _with(tree=[1]),
    "tree too long": lambda: _with(tree=[{"d": ["x"]}, {"a": 0}, 1]),
    "tree too short": lambda: _with(tree=[{"d": ["x", "y"]}, {"a": 0}]),
    "array number negative": lambda: _with(tree=[{"d": ["x"]}, {"a": -1}]),
    "array number beyond": lambda: _with(tree=[{"d": ["x"]}, {"a": 1}]),
    "array number huge": lambda: _with(tree=[{"d": ["x"]}, {"a": 10**30}]),
    "array number a float": lambda: _with(tree=[{"d": ["x"]}, {"a": 0.0}]),
    "list negative": lambda: _with(tree=[{"l": -1}, {"a": 0}]),
    "list huge": lambda: _with(tree=[{"l": 2**62}, {"a": 0}]),
    "key a list": lambda: _with(tree=[{"d": [["x"]]}, {"a": 0}]),
    "key unhashable": lambda: _with(tree=[{"d": [{"l": 1}]}, {"a": 0}]),
    "key of many digits": lambda: _with(tree=[{"d": [{"i": "f" * 10000}]}, {"a": 0}], raw=13),
    "hexadecimal that is none": lambda: _with(tree=[{"l": 2}, {"a": 0}, {"i": "xyz"}]),
    "float bits that are none": lambda: _with(tree=[{"l": 2}, {"a": 0}, {"f": "00"}]),
    "base64 that is none": lambda: _with(tree=[{"l": 2}, {"a": 0}, {"b": "?"}]),
    "arrays number": lambda: _with(arrays=3),
    "arrays numbers": lambda: _with(arrays=[3]),
    "stream unknown": lambda: _with({"f": "nosuch"}),
    "stream a list": lambda: _with({"f": ["bytes"]}),
    "stream of a pair a list": lambda: _pair({"f": ["rank-one"]}),
    "stream of a pair an object": lambda: _pair({"f": {}}),
    "stream null": lambda: _with({"f": None}),
    "library unknown": lambda: _with({"l": "os"}),
    "library a list": lambda: _with({"l": ["torch"]}),
    "library an object": lambda: _with({"l": {}}),
    "dtype null": lambda: _with({"d": None}),
    "dtype a list": lambda: _with({"d": ["float32"]}),
    "dtype long": lambda: _with({"d": "f" * 10**6}),
    "shape negative": lambda: _with({"s": [-3]}),
    "shape float": lambda: _with({"s": [3.0]}),
    "shape bool": lambda: _with({"s": [True, 3]}),
    "shape huge": lambda: _with({"s": [2**47]}, raw=2**49),
    "shape huge, zero": lambda: _empty("f4", "numpy", [0, 2**47, 2**47]),
    "shape huge, zero, torch": lambda: _empty("float32", "torch", [0, 2**47, 2**47]),
    "shape beyond": lambda: _with({"s": [2**70]}),
    "many dimensions": lambda: _with({"s": [1] * 100 + [3]}),
    "shape text": lambda: _with({"s": "3"}),
    "lengths negative": lambda: _with({"b": [-1, 15]}),
    "lengths huge": lambda: _with({"b": [2**63]}),
    "lengths too many": lambda: _with({"b": [0] * 1000 + _plain()[0]["groups"][0]["b"]}),
    "lengths none": lambda: _with({"b": []}),
    "lengths text": lambda: _with({"b": ["14"]}),
    **{
        f"grid paired with {v!r}": lambda v=v: _with({"f": "grid", "v": v})
        for v in (0, 1, -1, 2**70, "x", None, [0], True, 0.0)
    },
    "grid paired with nothing": lambda: _with({"f": "grid"}),
    "grids paired with each other": lambda: _ring(),
    "factors of a vector": lambda: _with({"f": "rank-one"}),
    "factors of a huge matrix": lambda: _with({"f": "rank-one", "s": [2**23, 2**23]}, raw=2**48),
    "meta a list": lambda: _with({"m": []}),
    "error huge": lambda: _with({"e": 10**400, "q": "relative"}),
    "error text": lambda: _with({"e": "0"}),
    "note number": lambda: _with({"n": 3}),
    "delta in a base": lambda: _with({"p": True}),
    "newer stream in levels": lambda: _with({"f": "levels", "m": {"t": [None, None, 0, 0]}}),
    "moments of integers": lambda: _with({"f": "log-buckets", "d": "int32", "m": {"b": 6}}),
    "count of chunks": lambda: put_together(*_plain(), count=2**32 - 1),
    "plain length": lambda: put_together(*_plain(), plain_length=2**28),
    "plain length huge": lambda: put_together(*_plain(), plain_length=2**63),
    "chunk length": lambda: put_together(*_plain(), lengths=[2**63]),
    "chunk length negative": lambda: put_together(*_plain(), lengths=[-1]),
    "trailing bytes after the header": lambda: put_together(*_plain(), tail=b"more"),
    "a second frame after the header": lambda: put_together(*_plain(), tail=bytes.fromhex("28b52ffd2000010000")),
    "pieces across chunks": lambda: put_together(_plain()[0], [_plain()[1][0][:5], _plain()[1][0][5:]]),
    "pieces beyond": lambda: put_together(_plain()[0], [*_plain()[1], b"xyz"]),
    "bomb of lists": lambda: _raw_header(TREE + "[]," * (10 << 20) + "1]}"),
    "bomb of nodes": lambda: _raw_header(TREE + '{"l":30000000}' + ",1" * 10_000_000 + "]}"),
    "bomb of depth": lambda: _raw_header(TREE + '{"l":1},' * 200_000 + "1]}"),
    "bomb of paths": lambda: put_together(
        (
            '{"parent":null,"raw":0,"arrays":['
            + ",".join(['{"d":"uint8","s":[0]}'] * 300)
            + '],"groups":['
            + ",".join(['{"f":"bytes","b":[]}'] * 300)
            + '],"tree":[{"d":["'
            + "x" * (8 << 20)
            + '"]},{"l":300},'
            + ",".join(f'{{"a":{i}}}' for i in range(300))
            + "]}"
        ).encode(),
        [],
    ),
    "bomb of pieces": lambda: _state([{"d": "uint8", "s": [0]}] * 600, [{"f": "bytes", "b": [0] * 20_000}] * 600),
    "bomb of thresholds": lambda: _state(
        [{"d": "float32", "s": [1]}] * 1000,
        [{"f": "levels", "m": {"t": [[None, None, 0.0, 0.0]] * 1000}, "b": [16, 2]}] * 1000,
        body=(b"\2\0\0\2\0\0\0\0\0\2\0\0\2\0\0\0" + b"\0\0") * 1000,
    ),
    "a key twice in an OrderedDict": lambda: _with(tree=[{"o": ["x", "x"]}, {"a": 0}, {"a": 0}]),
    "key a tuple of many digits": lambda: _with(tree=[{"d": [{"k": [{"i": "f" * 10000}]}]}, {"a": 0}], raw=13),
    "tree a scalar": lambda: _state([], [], [1]),
    "tree an array": lambda: _with(tree=[{"a": 0}]),
    "infinite scalar": lambda: put_together(
        b'{"parent":null,"raw":0,"arrays":{"count":0},"groups":{"count":0},"tree":[{"l":1},1e999]}', []
    ),
    "no groups": lambda: put_together(b'{"parent":null,"raw":0,"arrays":{"count":0},"tree":[{"l":0}]}', []),
    "no parent": lambda: put_together(b'{"raw":0,"arrays":{"count":0},"groups":{"count":0},"tree":[{"l":0}]}', []),
    "metadata unknown": lambda: _with({"m": {"zzz": 1}}),
    "order long": lambda: _with({"o": [0] * 1000}),
    "style of a huge ratio": lambda: _with({"f": "rows", "s": [1, 3], "m": {"s": [["adaptive", 2, 5, 10**400]]}}),
    "copy of texts": lambda: _state(
        [{"l": "numpy", "d": "<U2", "s": [1]}, {"l": "numpy", "d": "float32", "s": [1], "v": 0}],
        [{"f": "bytes", "b": [10]}, {"f": "copy", "b": []}],
        body=b"\0\x09" + np.array(["ab"]).tobytes(),
    ),
    "scalar with a shape": lambda: _with({"l": "numpy scalar", "d": "float32"}),
    "quantized tensor": lambda: _with({"l": "torch", "d": "quint8", "s": [12]}),
    "multiples of a negative step": lambda: _negative_step(),
    "bomb of spaces": lambda: put_together(b" " * (100 << 20) + b"{}", []),
    "zstandard bomb in a piece": lambda: _zstandard_bomb(),
    **{f"dtype {d!r}, {lib}": lambda d=d, lib=lib: _empty(d, lib) for d in DTYPES for lib in ("numpy", "torch")},
    **{f"dtype {d!r} of one": lambda d=d: _with({"d": d, "l": "numpy", "s": [1]}) for d in DTYPES},
    **{f"dtype {d!r} of jax": lambda d=d: _empty(d, "jax") for d in ("V8", "S5", "M8[ns]", "f16", ">i8", "(2,3)f4")},
}


def _state(
    arrays: list[dict[str, Any]], groups: list[dict[str, Any]], tree: list[Any] | None = None, body: bytes = b""
) -> bytes:
    """Return a file of a list of arrays."""
    sizes = [np.dtype(a["d"]).itemsize * int(np.prod(a["s"])) for a in arrays]
    nodes = tree or [{"l": len(arrays)}, *({"a": i} for i in range(len(arrays)))]
    header = {"parent": None, "raw": sum(sizes), "tree": nodes, "arrays": arrays, "groups": groups}
    return put_together(header, [body] if body else [])


def _negative_step() -> bytes:
    """Return a file with a codebook of the multiples of -1."""

    def block(*data: int) -> bytes:
        return bytes([len(data) + 1, 9, *data])

    step = np.array(-1.0, ">f8").tobytes()[:2]
    # Mode 2, one entry, the third multiple; no protected values; all elements of level 2.
    head = block(2) + block(1) + b"\1" + block(6) + b"\2" + block(step[0]) + block(step[1])
    head += b"\0" + block() + block() + b"\0"
    group = {"f": "levels", "m": {"t": [[None, None, 0.0, 0.0]]}, "b": [len(head), 4]}
    return _state([{"l": "numpy", "d": "float32", "s": [3]}], [group], body=head + b"\x09\2\2\2")


def _ring() -> bytes:
    """Return a file with two arrays that each need the values of the other."""
    header, chunks = _plain()
    first = header["arrays"][0]
    header["arrays"] = [{**first, "v": 1}, {**first, "v": 0}]
    header["groups"] = [{**header["groups"][0], "f": "grid"} for _ in range(2)]
    header["tree"] = [{"l": 2}, {"a": 0}, {"a": 1}]
    header["raw"] *= 2
    return put_together(header, chunks * 2)


def _zstandard_bomb() -> bytes:
    """Return a frame that claims three bytes and decompresses to a gigabyte."""
    import zstandard

    frame = zstandard.ZstdCompressor(level=3, write_content_size=False).compress(bytes(1 << 26))
    header, _ = _plain()
    piece = b"\0\x08" + frame
    header["groups"][0]["b"] = [len(piece)]
    return put_together(header, [piece])


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_with_right_checksums(name: str) -> None:
    blob = HOSTILE[name]()
    with within(), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            read(blob)
        except sp.CorruptDataError as e:
            said = str(e)
            assert len(said) < 2000
            return
        except sp.ShrinkpointError:
            assert name in ("parent elsewhere", "parent short") or "dtype" in name
            return
    # Neither refused nor wrong: an empty array of a valid dtype, or zero elements of an unusual shape.
    assert name.startswith(("dtype", "shape huge, zero", "float bits"))


def test_files_do_not_make_python_import_things() -> None:
    before = set(sys.modules)
    for name in ("_inductor", "_dynamo", "onnx", "this", "antigravity"):
        for library in ("torch", "numpy", name):
            with pytest.raises(sp.CorruptDataError):
                read(_empty(name, library))
    assert not {m for m in set(sys.modules) - before if m.startswith(("torch.", "this", "antigravity"))}


def test_newer_versions_are_refused_by_name() -> None:
    for version in (3, 7, 2**32 - 1):
        with pytest.raises(sp.NewerFormatError, match=rf"version {version}\b.*\b2\b"):
            sp.Checkpoint.from_bytes(put_together(*_plain(), version=version))
    with pytest.raises(sp.CorruptDataError):
        sp.Checkpoint.from_bytes(put_together(*_plain(), version=0))


@pytest.mark.parametrize("blob", [b"", b"x", b"\x89SPT\r\n\x1a", b"\x89SPT\n\x1a\n" + bytes(100), b"PK\x03\x04" * 50])
def test_other_files_are_refused(blob: bytes) -> None:
    for kind in (bytes, bytearray, memoryview):
        with pytest.raises(sp.CorruptDataError):
            sp.Checkpoint.from_bytes(kind(blob))


def test_more_memory_than_there_is_is_refused_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that fit singly but not together are refused before allocation."""
    import os

    real = os.sysconf
    pages = {"SC_PHYS_PAGES": (300 << 20) // real("SC_PAGE_SIZE")}
    monkeypatch.setattr(os, "sysconf", lambda name: pages.get(name) or real(name))
    n = 64 << 20
    record = {"d": "uint8", "s": [n], "f": "bytes", "b": [3] * 4}
    header = {
        "parent": None,
        "raw": 20 * n,
        "tree": [{"l": 20}, *({"a": i} for i in range(20))],
        "arrays": [record] * 20,
    }
    blob = put_together(header, [b"\0\0\x07" * 80])
    with within(60, 1.0), pytest.raises(sp.CorruptDataError):
        sp.decompress(sp.Checkpoint.from_bytes(blob))


def test_a_parent_that_does_not_fit_is_an_error_not_a_wrong_answer() -> None:
    """A delta that refers to arrays its parent does not have is an error."""
    w = np.random.default_rng(0).standard_normal(2000).astype("f4")
    base = sp.compress({"weight": w, "x": np.arange(50)})
    delta = sp.compress({"weight": w * np.float32(1.001), "x": np.arange(50)}, base)
    header, chunks = take_apart(delta.to_bytes())
    for change in (
        {"tree": [{"d": ["v", "x"]}, {"a": 0}, {"a": 1}]},
        {"tree": [{"d": ["x", "weight"]}, {"a": 0}, {"a": 1}]},
        {"parent": "0" * 64},
        {"parent": None},
    ):
        blob = put_together({**header, **change}, chunks)
        with pytest.raises((sp.CorruptDataError, sp.MissingParentError)):
            sp.decompress(sp.Checkpoint.from_bytes(blob, base))


def with_number(blob: bytes, offset: int, number: int) -> bytes:
    """Return a file with another number in its prefix and a valid checksum."""
    out = bytearray(blob)
    struct.pack_into("<I", out, offset, number)
    stored, count = struct.unpack_from("<Q", out, 16)[0], struct.unpack_from("<I", out, 32)[0]
    out[40:56] = xxhash.xxh3_128(bytes(out[:40] + out[56 : 56 + stored + 24 * count])).digest()
    return bytes(out)


def test_a_file_of_version_1_is_refused_with_what_converts_it() -> None:
    blob = sp.compress({"weight": np.arange(5000.0)}).to_bytes()
    assert with_number(blob, 8, container.VERSION) == blob
    said = rf"format version 1,.* commit {container.CONVERTER} of shrinkpoint, .*shrinkpoint restore"
    with pytest.raises(sp.CorruptDataError, match=said):
        sp.Checkpoint.from_bytes(with_number(blob, 8, 1))
    for offset, number in ((8, 0), (12, 1), (36, 1)):
        with pytest.raises(sp.CorruptDataError, match="reserved"):
            sp.Checkpoint.from_bytes(with_number(blob, offset, number))


def test_the_converter_is_a_commit_of_this_history() -> None:
    """The abbreviated commit of the converter is unique in this repository's history."""
    assert re.fullmatch(r"[0-9a-f]{12}", container.CONVERTER)
    git = ["git", "-C", str(Path(__file__).parents[2])]
    try:
        shallow = subprocess.run(
            [*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("no repository, or no git")
    if shallow.stdout.strip() == "true":
        pytest.skip("a clone without its history")
    ancestor = [*git, "merge-base", "--is-ancestor", container.CONVERTER, "HEAD"]
    assert subprocess.run(ancestor, check=False, capture_output=True).returncode == 0
