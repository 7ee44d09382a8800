"""Sparse deltas: exact, small, with shared parent memory; hostile streams."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.base import CHUNK
from shrinkpoint.codec.errors import CorruptDataError
from shrinkpoint.codec.format.fields import Reader
from shrinkpoint.codec.groups import BytesReference, PatchedReference
from shrinkpoint.codec.lossless import exact, sparse
from shrinkpoint.codec.lossless.exact import SPARSE, UNCHANGED, copied_pieces, decode_chunk
from shrinkpoint.codec.state.leaves import LeafSpec

from ..seeds import fresh_seed

DTYPES = ["bfloat16", "float16", "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2", "uint8", "int64"]


def moved(dtype: str, n: int, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, LeafSpec]:
    """Return bytes of an array, those of it with changed elements, and its spec."""
    rng = np.random.default_rng(seed)
    spec = LeafSpec("torch", dtype, (n,))
    made = torch.from_numpy(rng.normal(size=2 * n)).mul(40)
    kind = getattr(torch, dtype)
    old = (torch.view_as_complex(made.reshape(-1, 2)).to(kind) if kind.is_complex else made[:n].to(kind)).contiguous()
    before = old.view(torch.uint8).numpy()
    how = sparse.Patterns.of(spec)
    assert how is not None
    after = before.copy()
    patterns = how.view(after)
    at = np.flatnonzero(rng.random(patterns.size) < share)
    patterns[at] += rng.choice(np.asarray([1, 1, 1, 2, 7, 100], patterns.dtype), at.size)
    return after, before, spec


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "share"), [(70, 0.05), (5000, 0.002), (30000, 0.03), (30000, 0.12)])
def test_every_bit_comes_back(dtype: str, n: int, share: float) -> None:
    after, before, spec = moved(dtype, n, share)
    found = sparse.encode_sparse(after, before, spec)
    assert found is not None
    assert found.coded is not None
    how = sparse.Patterns.of(spec)
    assert how is not None
    assert found.changes == int((how.view(after) != how.view(before)).sum())
    piece = found.coded.done()
    changes = sparse.read_sparse(Reader(piece, "x"), after.size, spec)
    out = np.zeros_like(before)
    changes.apply(before, out)
    np.testing.assert_array_equal(out, after)
    positions, values = changes.positions(before)
    width = values.dtype
    np.testing.assert_array_equal(positions, np.flatnonzero(after.view(width) != before.view(width)))
    np.testing.assert_array_equal(values, after.view(width)[positions])
    place = before.copy()
    changes.apply(place, place)
    np.testing.assert_array_equal(place, after)


def test_a_few_bits_a_change() -> None:
    """A delta is within two percent of the entropy of positions and changes."""
    n, share = 1 << 20, 0.01
    rng = np.random.default_rng(1)
    old = torch.from_numpy(rng.normal(size=n)).bfloat16()
    at = torch.from_numpy(np.flatnonzero(rng.random(n) < share))
    new = old.clone().view(torch.int16)
    new[at] += torch.from_numpy(rng.choice([-1, 1], at.numel())).short()
    base = sp.compress({"w": old}, cfg=sp.presets.lossless())
    delta = sp.compress({"w": new.view(torch.bfloat16)}, base, sp.presets.lossless())
    p = at.numel() / n
    bits = n * -(p * np.log2(p) + (1 - p) * np.log2(1 - p)) + at.numel()
    assert 8 * delta.records[0].nbytes < 1.02 * bits
    assert next(iter(delta.pieces_of(delta.records[0])))[0] == SPARSE
    assert torch.equal(sp.decompress(delta)["w"].view(torch.int16), new)


def test_steps_of_one_size_are_coded_by_magnitude() -> None:
    rng = np.random.default_rng(2)
    w = torch.from_numpy(rng.normal(size=1 << 19)).float()
    old, new = w.bfloat16(), (w + 1e-4 * torch.from_numpy(rng.normal(size=w.numel()))).bfloat16()
    spec = LeafSpec("torch", "bfloat16", (w.numel(),))
    after, before = (x.view(torch.uint8).numpy() for x in (new, old))
    found = sparse.encode_sparse(after, before, spec)
    assert found is not None
    assert found.coded is not None
    changes = sparse.read_sparse(Reader(found.coded.done(), "x"), after.size, spec)
    assert len(changes.edges) >= 4
    dense = exact._smallest(after, spec, before, 0)[1]
    assert len(found.coded) < 1.03 * len(dense)


def test_too_many_changes_are_not_collected() -> None:
    after, before, spec = moved("bfloat16", 40000, 0.6)
    assert sparse.encode_sparse(after, before, spec) is None
    # Past what a sample shows: the second half differs.
    after, before, spec = moved("float32", 1 << 19, 0.0)
    after.view(np.uint32)[1::7] ^= 1
    after.view(np.uint32)[2::7] ^= 1
    copy = np.zeros_like(after)
    found = sparse.encode_sparse(after, before, spec, copy)
    assert found is None or found.coded is None
    if found is not None:
        np.testing.assert_array_equal(copy, after)


def test_an_unchanged_array_shares_its_parents_memory() -> None:
    cfg = sp.presets.lossless()
    w = torch.randn(300, 300)
    base = sp.compress({"w": w}, cfg=cfg)
    delta = sp.compress({"w": w.clone()}, base, cfg)
    old, new = (c.reference_of(c.records[0]) for c in (base, delta))
    assert isinstance(old, BytesReference)
    assert isinstance(new, BytesReference)
    assert new.data is old.data
    back = sp.decompress(delta)["w"]
    back.zero_()  # what a caller does with it does not reach the memory
    assert torch.equal(sp.decompress(delta)["w"], w)
    assert torch.equal(sp.decompress(base)["w"], w)


@pytest.mark.parametrize("changed", [[], [0], [1], [2], [0, 2], [0, 1, 2]])
def test_parts_that_changed_and_parts_that_did_not(changed: list[int]) -> None:
    step = 4 * CHUNK
    before = np.random.default_rng(3).integers(0, 256, 2 * step + 1000, dtype=np.uint8)
    after = before.copy()
    for part in changed:
        after[part * step + 77 :: step * 3] ^= 3
    spec = LeafSpec("torch", "float32", (before.size // 4,))
    pieces, reference = copied_pieces(after, spec, BytesReference(before))
    data = reference.data
    np.testing.assert_array_equal(data, after)
    assert (data is before) == (not changed)
    assert not np.shares_memory(data, after)
    assert [piece.done()[0] == UNCHANGED for piece in pieces] == [part not in changed for part in range(3)]


def test_any_damage_is_refused_or_decoded() -> None:
    seed = fresh_seed()
    rng = random.Random(seed)
    sources = []
    for dtype in ("bfloat16", "float64", "uint8", "complex64"):
        after, before, spec = moved(dtype, 4000, 0.02, seed)
        found = sparse.encode_sparse(after, before, spec)
        assert found is not None
        assert found.coded is not None
        sources.append((bytes([SPARSE]) + found.coded.done(), before, spec))
    for _ in range(3000):
        piece, before, spec = rng.choice(sources)
        bad = bytearray(piece)
        for _ in range(rng.choice([1, 1, 2, 5])):
            at = rng.randrange(1, min(len(bad), rng.choice([8, 24, 10**9])))
            bad[at] = rng.choice([0, 1, 2, 127, 128, 255, bad[at] ^ (1 << rng.randrange(8))])
        if rng.random() < 0.2:
            bad = bad[: rng.randrange(1, len(bad))]
        out, kept = np.empty_like(before), before.copy()
        try:
            decode_chunk(memoryview(bytes(bad)), out, spec, before)
        except CorruptDataError:
            pass
        except Exception as e:
            raise AssertionError(f"seed {seed}: {type(e).__name__}: {e}") from e
        np.testing.assert_array_equal(before, kept)


def piece(edges: list[int], counts: list[int], shifts: list[int], symbols: bytes, rest: bytes = b"\0\0") -> bytes:
    """Build a stream from its fields; numbers are below 128."""
    return bytes([SPARSE, 0, len(edges), *edges, *counts, *shifts, len(symbols), *symbols]) + rest


STORED = 9
HOSTILE: dict[str, bytes] = {
    "nothing": bytes([SPARSE]),
    "form": bytes([SPARSE, 2, 0, 0, 0, 0, 0, 0]),
    "edges for integers": piece([5], [0, 0], [0, 0], b"\0\0"),
    "too many edges": piece(list(range(1, 9)), [0] * 9, [0] * 9, b"\0\0"),
    "edges that descend": piece([7, 5], [1, 0, 0], [0, 0, 0], b"\0\0"),
    "an edge of 0": piece([0], [1, 0], [0, 0], b"\0\0"),
    "more changes than a quarter": piece([], [26], [0], b"\0\0"),
    "a shift of 25": piece([], [1], [25], b"\0\0"),
    "a symbol that does not exist": piece([], [1], [0], bytes([STORED, 250])),
    "a rank beyond the end": piece([], [1], [0], bytes([STORED, 235]), bytes([3, 255, 255, 127, 0])),
    "too few open bits": piece([], [1], [0], bytes([STORED, 30])),
    "too many open bits": piece([], [1], [0], bytes([STORED, 0]), bytes([1, 1, 0])),
    "large changes that no symbol has": piece([], [1], [0], bytes([STORED, 0]), bytes([0, 1, 2, STORED, 0])),
    "large changes that are missing": piece([], [1], [0], bytes([STORED, 4])),
    "a rank beyond its class": piece([1], [0, 1], [0, 0], bytes([STORED, 0])),
    "something after the end": piece([], [1], [0], bytes([STORED, 0]), bytes([0, 0, 0])),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_streams(name: str) -> None:
    spec = LeafSpec("torch", "int32" if name == "edges for integers" else "float32", (100,))
    before = np.zeros(400, np.uint8)
    with pytest.raises(CorruptDataError):
        decode_chunk(memoryview(HOSTILE[name]), np.empty(400, np.uint8), spec, before)
    good = piece([], [1], [0], bytes([STORED, 0]))
    out = np.empty(400, np.uint8)
    decode_chunk(memoryview(good), out, LeafSpec("torch", "int32", (100,)), before)
    assert out.view(np.int32).tolist() == [-1] + [0] * 99
    with pytest.raises(CorruptDataError, match="without a parent"):
        decode_chunk(memoryview(good), out, spec, None)
    with pytest.raises(CorruptDataError, match="no sparse changes"):
        decode_chunk(memoryview(good), np.empty(300, np.uint8), LeafSpec("numpy", "|S3", (100,)), before[:300])


@pytest.mark.parametrize("n", [300_000, 700_000])
def test_the_array_may_change_while_it_is_compressed(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Stored bytes equal the reference, even if the array is changed meanwhile."""
    after, before, spec = moved("bfloat16", n, 0.02)
    asked = []

    def then_write(name: str) -> None:
        real = getattr(sparse, name)

        def writing(*args: Any, **kwargs: Any) -> Any:
            found = real(*args, **kwargs)
            after[:] = 0
            asked.append(name)
            return found

        monkeypatch.setattr(sparse, name, writing)

    then_write("collect_changes")
    then_write("collect_and_locate")
    wanted = after.copy()
    pieces, reference = copied_pieces(after, spec, BytesReference(before))
    np.testing.assert_array_equal(reference.data, wanted)
    out = np.empty_like(before)
    decode_chunk(memoryview(pieces[0].done()), out, spec, before)
    np.testing.assert_array_equal(out, wanted)
    assert asked == ["collect_and_locate" if n > 1 << 19 else "collect_changes"]


def test_changes_are_joined_in_the_parents_memory_if_nothing_else_needs_it() -> None:
    after, before, spec = moved("bfloat16", 700_000, 0.02)
    kept = before.copy()
    parent = BytesReference(before.copy())
    address = parent.data.ctypes.data

    def patched(source: Any, of: BytesReference) -> PatchedReference:
        found = copied_pieces(source, spec, of)[1]
        assert isinstance(found, PatchedReference)
        return found

    first = patched(after, parent)
    np.testing.assert_array_equal(first.data, after)
    np.testing.assert_array_equal(parent.data, kept)  # it is still there, so it stays
    assert first.data.ctypes.data != address
    second, third = patched(after, parent), patched(after, parent)
    view = parent.data[10:20]
    del parent
    np.testing.assert_array_equal(second.data, after)  # the third needs the parent's bytes
    assert second.data.ctypes.data != address
    np.testing.assert_array_equal(third.data, after)  # a view of them is left
    assert third.data.ctypes.data != address
    np.testing.assert_array_equal(view, kept[10:20])
    last = patched(kept, second)
    address = second.data.ctypes.data
    del second
    assert last.data.ctypes.data == address
    np.testing.assert_array_equal(last.data, kept)


def test_a_chain_of_sparse_deltas_decodes_everywhere() -> None:
    cfg = sp.presets.lossless()
    states = [moved("bfloat16", 700_000, 0.01, seed)[0] for seed in (1,)]
    for seed in range(3):
        step = states[-1].copy()
        step.view(np.uint16)[np.random.default_rng(seed).integers(0, 700_000, 5000)] += 1
        states.append(step)
    tensors = [torch.from_numpy(x).view(torch.bfloat16) for x in states]
    chain = []
    for tensor in tensors:
        chain.append(sp.compress({"w": tensor}, chain[-1] if chain else None, cfg))
    for ckpt, tensor in reversed(list(zip(chain, tensors, strict=True))):
        assert torch.equal(sp.decompress(ckpt)["w"].view(torch.uint8), tensor.view(torch.uint8))
    prev = None
    for ckpt, tensor in zip(chain, tensors, strict=True):
        prev = sp.Checkpoint.from_bytes(ckpt.to_bytes(), prev)
        assert torch.equal(sp.decompress(prev)["w"].view(torch.uint8), tensor.view(torch.uint8))
