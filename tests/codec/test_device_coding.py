"""Blocks of symbols that a GPU could code, on the host and on a pretended GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec import entropy
from shrinkpoint.codec.entropy import blocks
from shrinkpoint.codec.errors import BadArgumentError, CorruptDataError
from shrinkpoint.codec.format.fields import Writer, parts_of
from shrinkpoint.kernels.backend.arrays import is_torch

U8 = np.ndarray[Any, np.dtype[np.uint8]]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(blocks, "LEAST", 256)
    yield
    blocks.set_device_coding(None)


def coded(symbols: U8, context: U8 | None = None, contexts: int = 2) -> bytes:
    return b"".join(parts_of(entropy.CodedBlock(symbols, context, contexts)))


def levels(seed: int, n: int, size: int) -> tuple[U8, U8]:
    rng = np.random.default_rng(seed)
    context = rng.integers(0, size, n).astype(np.uint8)
    moved = rng.random(n) < 0.1
    return np.where(moved, rng.integers(0, size, n), context).astype(np.uint8), context


@pytest.mark.parametrize("with_context", [False, True])
@given(st.integers(0, 2**32), st.integers(1, 3000), st.integers(2, 200))
def test_any_block_comes_back(with_context: bool, seed: int, n: int, size: int) -> None:
    symbols, context = levels(seed, n, size)
    before = context if with_context else None
    data = coded(symbols, before, size)
    assert len(data) <= n + 1
    assert np.array_equal(entropy.decode(memoryview(data), n, before, size), symbols)


def test_the_method_follows_from_the_counts() -> None:
    symbols, context = levels(1, 5000, 16)
    noise = np.random.default_rng(2).integers(0, 256, 5000).astype(np.uint8)
    for given_, expected in (
        ((symbols,), entropy.RANS),
        ((symbols, context, 16), entropy.CONDITIONAL),
        ((symbols, np.sort(context), 16), entropy.RANS),
        ((symbols, symbols, 16), entropy.UNCHANGED),
        ((np.full(5000, 7, np.uint8),), entropy.CONSTANT),
        ((noise,), entropy.STORED),
    ):
        data = coded(*given_)
        assert data[0] == expected
        assert np.array_equal(entropy.decode(memoryview(data), 5000, *given_[1:]), given_[0])


def test_known_counts_give_the_same_bytes() -> None:
    symbols, _ = levels(3, 4000, 40)
    counts = np.bincount(symbols, minlength=256)
    assert b"".join(entropy.CodedBlock(symbols, None, 2, counts).parts()) == coded(symbols)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's tensors pass for CUDA ones, and Triton's interpreter run the kernels."""
    pytest.importorskip("triton")
    from shrinkpoint.kernels import rans
    from shrinkpoint.kernels.backend import arguments, arrays, dispatch

    for module in (blocks, rans, arguments, arrays, dispatch):
        monkeypatch.setattr(module, "on_gpu", is_torch)


def test_blocks_wait_for_each_other_and_are_let_go(pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from shrinkpoint.kernels.rans import gpu

    calls: list[int] = []
    real = gpu.rans_encode_many
    monkeypatch.setattr(gpu, "rans_encode_many", lambda some: [calls.append(len(some)), real(some)][1])
    pairs = [levels(k, 1500 + k, 12) for k in range(4)]
    waiting = [entropy.CodedBlock(torch.from_numpy(symbols), context, 12) for symbols, context in pairs]
    assert [entropy.most_bytes(block) for block in waiting] == [1501, 1502, 1503, 1504]
    del waiting[3]
    assert calls == []
    assert [b"".join(block.parts()) for block in waiting] == [coded(s, c, 12) for s, c in pairs[:3]]
    assert calls == [3]
    assert waiting[0].symbols is None
    assert blocks._waiting == []


def test_an_error_leaves_the_others_waiting(pretended: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from shrinkpoint.kernels.rans import gpu

    symbols, context = levels(5, 1500, 12)
    block = entropy.CodedBlock(torch.from_numpy(symbols), context, 12)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "rans_encode_many", lambda _: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError):
            len(block)
    assert b"".join(block.parts()) == coded(symbols, context, 12)


def test_streams_are_decoded_together(pretended: None) -> None:
    """Those by rANS of either form; others, and short ones, are left to the host."""
    pairs = [levels(k, n, 12) for k, n in enumerate((1300, 1400, 200, 2500))]
    streams = [(memoryview(coded(s, c, 12)), s.size, c) for s, c in pairs[:3]]
    streams += [
        (memoryview(entropy.encode(pairs[3][0])), 2500, None),
        (memoryview(coded(np.zeros(900, np.uint8))), 900, None),
    ]
    assert entropy.decoded_there(streams, 12) == [None] * 5
    blocks.set_device_coding(True)
    with blocks.decoding_near([np.zeros(3), torch.zeros(3)]):
        found = entropy.decoded_there(streams, 12)
    assert entropy.decoded_there(streams, 12) == [None] * 5
    assert [symbols is not None for symbols in found] == [True, True, False, streams[3][0][0] == entropy.RANS, False]
    for symbols, (wanted, _) in zip(found[:2], pairs, strict=False):
        assert np.array_equal(symbols, wanted)


@settings(max_examples=15)
@given(st.data())
def test_hostile_streams_are_refused_or_decoded_as_on_the_host(data: st.DataObject) -> None:
    symbols, context = levels(7, 1000, 5)
    stream = bytearray(coded(symbols, context, 5))
    for _ in range(data.draw(st.integers(1, 3))):
        stream[data.draw(st.integers(1, len(stream) - 1))] ^= data.draw(st.integers(1, 255))
    del stream[data.draw(st.integers(1, len(stream))) :]
    with pytest.MonkeyPatch.context() as patch:
        try:
            wanted: Any = entropy.decode(memoryview(stream), 1000, context, 5)
        except CorruptDataError:
            wanted = None
        from shrinkpoint.kernels import rans

        patch.setattr(rans, "on_gpu", is_torch)
        patch.setattr(blocks, "on_gpu", is_torch)
        patch.setattr(blocks, "_is_on", True)
        with blocks.decoding_near([torch.zeros(1)]):
            try:
                (found,) = entropy.decoded_there([(memoryview(stream), 1000, context)], 5)
            except CorruptDataError:
                found = None
        if found is not None or wanted is None:
            assert found is wanted or np.array_equal(found, wanted)


def state(t: int) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    weight = (rng.normal(size=(40, 60)) * (1 + 0.01 * t)).astype(np.float32)
    v = (1e-8 * np.exp(rng.normal(size=(40, 60)))).astype(np.float32)
    m = (0.3 * np.sqrt(v) * rng.normal(size=(40, 60))).astype(np.float32)
    entry = {"step": torch.tensor(3.0), "exp_avg": m, "exp_avg_sq": v}
    return {"model": {"fc.weight": weight}, "optimizer": {"state": {0: entry}}}


def test_every_reader_reads_what_the_setting_writes() -> None:
    plain = [sp.compress(state(0))]
    plain.append(sp.compress(state(1), plain[0]))
    blocks.set_device_coding(True)
    chain = [sp.compress(state(0))]
    chain.append(sp.compress(state(1), chain[0]))
    assert [a != b for a, b in zip(plain, chain, strict=True)] == [True, True]
    blocks.set_device_coding(None)
    for parent, ckpt, other in zip((None, chain[0]), chain, plain, strict=True):
        found = sp.decompress(sp.Checkpoint.from_bytes(ckpt.to_bytes(), parent))
        for x, y in zip(*(torch.utils._pytree.tree_leaves(t) for t in (found, sp.decompress(other))), strict=True):
            assert np.array_equal(x, y)


def test_the_environment_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, expected in (("", False), ("0", False), (" 1 ", True)):
        monkeypatch.setenv(blocks.VARIABLE, text)
        assert blocks.device_coding() is expected
    monkeypatch.setenv(blocks.VARIABLE, "yes")
    with pytest.raises(BadArgumentError, match="SHRINKPOINT_DEVICE_CODING is 'yes'; it must be 0 or 1"):
        blocks.device_coding()
    blocks.set_device_coding(False)
    assert not blocks.device_coding()


def test_a_piece_is_written_once() -> None:
    calls = []

    def write() -> Writer:
        calls.append(1)
        out = Writer()
        out.raw(b"abc")
        return out

    piece = entropy.Later(write)
    assert not calls
    assert (len(piece), b"".join(piece.parts()), len(piece)) == (3, b"abc", 3)
    assert calls == [1]


def test_outputs_are_written_on_default_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads write to outputs after the caller's stream, which finds them complete."""
    calls: list[str] = []

    @contextmanager
    def stream(_: Any) -> Iterator[None]:
        calls.append("default stream")
        yield
        calls.append("stream of the caller")

    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    with blocks._default_streams([torch.device("cuda:0")]):
        calls.append("work")
    assert calls == ["wait", "default stream", "work", "stream of the caller", "wait"]
