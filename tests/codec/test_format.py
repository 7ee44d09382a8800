"""The second reader, tests/second_reader.py, reads the same states as the library."""

from __future__ import annotations

import ast
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from blake3 import blake3

import shrinkpoint as sp
from shrinkpoint.codec.evidence.kind import REASONS
from shrinkpoint.codec.rebase import rebase
from shrinkpoint.codec.state.tree import taken_apart

from .. import second_reader
from ..golden.make import FILES, INDEX, KINDS, cases
from ..golden.subclass import Coded
from ..second_reader import Leaf, read
from .common import difference


def as_library(x: Any) -> Any:
    """Return a state of the second reader with arrays of the recorded libraries."""
    if isinstance(x, dict):
        made = type(x)()
        for key, value in x.items():
            made[key] = as_library(value)
        return made
    if isinstance(x, (list, tuple)):
        return type(x)(as_library(value) for value in x)
    if not isinstance(x, Leaf):
        return x
    data = bytearray(x.items.tobytes())
    if x.library == "torch":
        flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        tensor = flat.view(getattr(torch, x.dtype)).reshape(x.shape)
        return tensor.permute(x.order).contiguous().permute(np.argsort(x.order).tolist()) if x.order else tensor
    if x.library == "numpy scalar" and np.dtype(x.dtype).kind in "SU":  # NumPy drops the NULs at the end of a text
        codec = "utf-32-be" if x.dtype[0] == ">" else "utf-32-le"
        return np.bytes_(data) if np.dtype(x.dtype).kind == "S" else np.str_(data.decode(codec, "surrogatepass"))
    array = np.frombuffer(data, np.dtype(x.dtype)).reshape(x.shape)
    if x.library in ("list", "tuple"):
        return array.tolist() if x.library == "list" else tuple(array.tolist())
    if x.order:
        array = np.ascontiguousarray(array.transpose(x.order)).transpose(np.argsort(x.order))
    return array[()] if x.library == "numpy scalar" else array


def apart(x: Any) -> Any:
    """Return a state whose tensor subclasses are dicts of their parts."""
    if isinstance(x, Coded):
        return {**taken_apart(x, "")}
    return {k: apart(v) for k, v in x.items()} if type(x) is dict else x


def load(name: str, index: dict[str, Any]) -> tuple[Any, str, dict[str, Leaf]]:
    """Read a golden file by the second reader."""
    parent = index[name]["parent"]
    blob = (INDEX.parent / name).read_bytes()
    return read(blob, load(parent, index)) if parent else read(blob)


@pytest.mark.parametrize("name", FILES)
def test_the_second_reader_finds_what_the_index_says(name: str) -> None:
    """The second reader agrees with the golden index."""
    index = json.loads(INDEX.read_text())
    _, identity, arrays = load(name, index)
    found = {
        key: [
            *(leaf.library, leaf.dtype, list(leaf.shape), blake3(leaf.items.tobytes()).hexdigest()),
            *([leaf.order] if leaf.order else []),
        ]
        for key, leaf in arrays.items()
    }
    assert identity == index[name]["id"]
    assert found == index[name]["arrays"]


@pytest.mark.parametrize("name", FILES)
def test_the_second_reader_finds_the_same_state(name: str) -> None:
    """The second reader restores types, keys, scalars and arrays bit for bit."""
    index = json.loads(INDEX.read_text())

    def ours(name: str) -> sp.Checkpoint:
        parent = index[name]["parent"]
        return sp.Checkpoint.from_bytes((INDEX.parent / name).read_bytes(), ours(parent) if parent else None)

    state, _, _ = load(name, index)
    assert difference(apart(sp.decompress(ours(name))), as_library(state)) == ""


@pytest.mark.parametrize("name", [name for name, (_, _, length) in cases().items() if length > 1])
def test_the_second_reader_finds_the_same_after_a_rebase(name: str) -> None:
    """The second reader reads rebased checkpoints: bases, and super-steps over the first."""
    make, cfg, length = cases()[name]
    chain: list[sp.Checkpoint] = []
    for t in range(length):
        chain.append(sp.compress(make(t), chain[-1] if chain else None, cfg, kinds=KINDS.get(make)))
    first = read(chain[0].to_bytes())
    for parent, known in ((None, ()), (chain[0], (first,))):
        state, identity, _ = read(rebase(chain[-1], parent).to_bytes(), *known)
        assert difference(apart(sp.decompress(chain[-1])), as_library(state)) == ""
        assert identity == chain[-1].id


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_second_reader_finds_the_same_in_large_arrays(dtype: str) -> None:
    """The second reader reads large arrays with row and column scales and both contexts."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(0, 2, (150, 1)) + rng.normal(0, 2, (1, 120)))
    w = scale * rng.standard_normal((150, 120))
    v = (w * w).astype(np.float32).astype(np.float64)
    states = [
        {"weight": torch.from_numpy(x).to(getattr(torch, dtype)), "v": torch.from_numpy(y).to(getattr(torch, dtype))}
        for x, y in ((w, v), (w + 1e-2 * rng.standard_normal(w.shape), 0.95 * v + 1e-9 * v * w))
    ]
    base = sp.compress(states[0], cfg=sp.presets.lossless())
    delta = sp.compress(states[1], base, sp.presets.lossless())
    first = read(base.to_bytes())
    for ckpt, theirs, state in ((base, first, states[0]), (delta, read(delta.to_bytes(), first), states[1])):
        assert difference(sp.decompress(ckpt), state) == ""
        assert difference(as_library(theirs[0]), state) == ""
    assert {bytes(base.pieces_of(r)[0][:1]) for r in base.records} == {b"\x04"}
    used = {bytes(delta.pieces_of(r)[0][:2]) for r in delta.records}
    assert b"\x05\x00" in used


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_a_copy_of_wide_numbers_rounds_as_its_library_does(library: str) -> None:
    """A float16 copy of float64 is rounded as torch or NumPy rounds it."""
    master = np.full(8192, 1 + 2.0**-11 + 2.0**-40) * np.exp2(np.arange(8192) % 8)
    half = torch.from_numpy(master).half() if library == "torch" else master.astype(np.float16)
    state = {"master": torch.from_numpy(master) if library == "torch" else master, "half": half}
    kinds = {"master": "linear", "half": "linear"}
    ckpt = sp.compress(state, cfg=sp.presets.lossless(), kinds=kinds)
    assert [row.stream for row in ckpt.summary()] == ["bytes", "copy"]
    assert difference(as_library(read(ckpt.to_bytes())[0]), state) == ""


def test_a_reader_refuses_the_next_version_by_its_number() -> None:
    """Both readers refuse the next format version by its number."""
    blob = bytearray((INDEX.parent / FILES[0]).read_bytes())
    blob[8:12] = struct.pack("<I", 3)
    stored, count = struct.unpack_from("<Q", blob, 16)[0], struct.unpack_from("<I", blob, 32)[0]
    blob[40:56] = xxhash.xxh3_128(bytes(blob[:40] + blob[56 : 56 + stored + 24 * count])).digest()
    with pytest.raises(sp.NewerFormatError, match="format version 3; this reader knows versions up to 2"):
        sp.Checkpoint.from_bytes(bytes(blob))
    with pytest.raises(ValueError, match="version 3"):
        read(bytes(blob))


def test_the_format_lists_the_standard_reasons() -> None:
    """docs/format-reasons.txt lists the numbered reasons, which must not change their numbers."""
    lines = (INDEX.parents[3] / "docs/format-reasons.txt").read_text(encoding="utf-8").splitlines()
    assert lines == [f"{number} {reason}" for number, reason in enumerate(REASONS)]
    assert len(REASONS) == 39


def test_the_second_reader_stands_alone() -> None:
    """The second reader does not import the library, and has at most 660 lines."""
    text = Path(second_reader.__file__).read_text()
    tree = ast.walk(ast.parse(text))
    names = [
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in tree if is_import(node)
    ]
    used = {str(name).partition(".")[0] for name in names} - {"__future__"}
    assert not used & {"shrinkpoint", "tests", "torch", "None"}
    assert len(text.splitlines()) <= 660


def is_import(node: ast.AST) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))
