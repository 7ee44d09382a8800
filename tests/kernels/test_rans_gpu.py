"""rANS on a GPU: the bytes of the CPU both ways, and no read beyond hostile bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from shrinkpoint.kernels.errors import BadArgumentError, CorruptDataError
from shrinkpoint.kernels.rans import STATES, WIDE_STATES, Block, cpu, gpu, rans_decode_many, rans_encode_many
from shrinkpoint.kernels.rans import rans_frequencies as frequencies_of

HERE = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu] if HERE else []
PLACE = "cuda" if HERE else "cpu"
SIZES = {STATES: (0, 1, 3, 4, 5, 8, 61), WIDE_STATES: (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 300, 1000)}


def there(x: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(x.copy()).to(PLACE)


def drawn(seed: int, n: int, rows: int, columns: int, precision: int, states: int) -> Block:
    """Return symbols in contexts, and a table with empty rows and with certain and rare symbols."""
    rng = np.random.default_rng(seed)
    shares = rng.random((rows, columns)) ** rng.choice([1, 4, 30])
    shares *= rng.random((rows, columns)) < rng.choice([0.2, 1.0])
    shares[:, rng.integers(columns)] += 1e-3
    contexts = rng.integers(0, rows, n).astype(np.uint8)
    symbols = np.array([rng.choice(columns, p=shares[c] / shares[c].sum()) for c in contexts], np.uint8)
    counts = np.zeros((rows, columns), np.int64)
    np.add.at(counts, (contexts, symbols), 1)
    counts += (rng.random((rows, columns)) < 0.3) & counts.any(axis=1)[:, None]
    table = frequencies_of(counts, precision)
    return Block(symbols, None if rows == 1 and seed % 2 else contexts, table, precision, states)


def on_device(block: Block) -> Block:
    return replace(block, data=there(block.data), contexts=None if block.contexts is None else there(block.contexts))


def expected(block: Block) -> np.ndarray[Any, Any]:
    return cpu.rans_encode(block.data, block.contexts, block.frequencies, block.precision, block.states)


def check(blocks: list[Block]) -> None:
    coded = [expected(block) for block in blocks]
    found = gpu.rans_encode_many([on_device(block) for block in blocks])
    for own, wanted in zip(found, coded, strict=True):
        np.testing.assert_array_equal(own.cpu().numpy(), wanted, strict=True)
    bytes_of = [on_device(replace(block, data=data)) for block, data in zip(blocks, coded, strict=True)]
    back = gpu.rans_decode_many(bytes_of, [block.data.size for block in blocks])
    for own, block in zip(back, blocks, strict=True):
        np.testing.assert_array_equal(own.cpu().numpy(), block.data, strict=True)


@pytest.mark.parametrize("states", [STATES, WIDE_STATES])
def test_blocks_of_all_lengths(states: int, poisoned: None) -> None:
    """Blocks of one launch differ in length, table and precision."""
    precisions = range(8, 17) if states == STATES else [12]
    lengths = SIZES[states]
    shapes = [(1, 1), (1, 2), (1, 256), (5, 3), (18, 18), (256, 7)]
    check(
        [
            drawn(k, n, *shapes[k % len(shapes)], precisions[k % len(precisions)], states)
            for k, n in enumerate((*lengths, *lengths[::-1]))
        ]
    )


@settings(max_examples=25)
@given(st.data())
def test_any_block(data: st.DataObject) -> None:
    states = data.draw(st.sampled_from([STATES, WIDE_STATES]))
    precision = 12 if states == WIDE_STATES else data.draw(st.integers(8, 16))
    n = data.draw(st.integers(0, 60 if states == STATES else 400))
    rows, columns = data.draw(st.integers(1, 20)), data.draw(st.sampled_from([1, 2, 3, 18, 200]))
    check([drawn(data.draw(st.integers(0, 2**32)), n, rows, columns, precision, states)])


def outcome(call: Any) -> Any:
    try:
        found = call()
    except (CorruptDataError, BadArgumentError) as error:
        return type(error)
    return (found.cpu().numpy() if isinstance(found, torch.Tensor) else found).tolist()


@settings(max_examples=60)
@given(st.data())
def test_hostile_bytes(data: st.DataObject) -> None:
    """Of all bytes, rows of the table and contexts: the CPU's answer, or its error."""
    states = data.draw(st.sampled_from([STATES, WIDE_STATES]))
    block = drawn(data.draw(st.integers(0, 2**32)), data.draw(st.integers(0, 40)), 3, 5, 12, states)
    coded = bytearray(expected(block).tobytes())
    n = block.data.size
    if data.draw(st.booleans()) and coded:
        for _ in range(data.draw(st.integers(1, 3))):
            coded[data.draw(st.integers(0, len(coded) - 1))] ^= data.draw(st.integers(1, 255))
    change = data.draw(st.sampled_from(["", "cut", "more", "n", "contexts", "empty rows", "random"]))
    if change == "cut":
        del coded[data.draw(st.integers(0, len(coded))) :]
    elif change == "more":
        coded += data.draw(st.binary(min_size=1, max_size=9))
    elif change == "random":
        coded = bytearray(data.draw(st.binary(max_size=300)))
    elif change == "n" and block.contexts is None:
        n = data.draw(st.integers(0, 200))
    elif change == "contexts" and block.contexts is not None:
        block = replace(block, contexts=np.random.default_rng(n).integers(0, 5, n).astype(np.uint8))
    elif change == "empty rows":
        table = block.frequencies.copy()
        table[0] = 0
        block = replace(block, frequencies=table)
    given_ = replace(block, data=np.frombuffer(bytes(coded), np.uint8))
    rest = (block.frequencies, block.precision, n, states)
    wanted = outcome(lambda: cpu.rans_decode(given_.data, given_.contexts, *rest))
    found = outcome(lambda: gpu.rans_decode_many([on_device(given_)], [n])[0])
    assert found == wanted


def test_every_altered_byte_of_a_stream_is_read_within_bounds() -> None:
    """Guards around the arrays stay as they are and are not used."""
    block = drawn(3, 200, 4, 9, 12, WIDE_STATES)
    coded = expected(block)
    rng = np.random.default_rng(5)
    for _ in range(20):
        hostile = rng.integers(0, 256, coded.size).astype(np.uint8)
        hostile[:256] = coded[:256] if rng.random() < 0.5 else hostile[:256]
        answers = []
        for guard in (0, 255):
            room = np.full(coded.size + 64, guard, np.uint8)
            room[32 : 32 + coded.size] = hostile
            own = replace(on_device(block), data=there(room)[32 : 32 + coded.size])
            answers.append(outcome(lambda own=own: gpu.rans_decode_many([own], [200])[0]))
        assert answers[0] == answers[1]


@pytest.mark.parametrize("states", [STATES, WIDE_STATES])
def test_what_the_table_does_not_have_is_refused(states: int) -> None:
    table = np.array([[2048, 2048, 0], [0, 0, 0]], np.uint32)
    for symbols, contexts in (([0, 2], [0, 0]), ([0, 3], [0, 0]), ([0, 1], [0, 1]), ([0, 1], [0, 2])):
        values = np.array(symbols, np.uint8), np.array(contexts, np.uint8)
        block = Block(*values, table, 12, states)
        with pytest.raises(BadArgumentError):
            gpu.rans_encode_many([on_device(block)])
        with pytest.raises(BadArgumentError):
            cpu.rans_encode(*values, table, 12, states)
    with pytest.raises(BadArgumentError, match="sums to neither"):
        gpu.rans_encode_many([on_device(Block(values[0], None, np.array([[1, 2]], np.uint32), 12, states))])


def test_public_functions_on_the_device(device: str) -> None:
    blocks = [drawn(k, n, 4, 9, 12, WIDE_STATES) for k, n in enumerate((70, 200))]
    coded = rans_encode_many([on_device(block) for block in blocks])
    for own, block in zip(coded, blocks, strict=True):
        np.testing.assert_array_equal(own.cpu().numpy(), expected(block))
    pairs = zip(blocks, coded, strict=True)
    back = rans_decode_many([replace(on_device(block), data=own) for block, own in pairs], [70, 200])
    assert [x.cpu().numpy().tolist() for x in back] == [block.data.tolist() for block in blocks]
    assert rans_encode_many([]) == []
    assert rans_decode_many([], []) == []
