"""Asymmetric numeral systems: exact against the oracle, near the entropy, safe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.errors import BadArgumentError, CorruptDataError
from shrinkpoint.kernels.rans import (
    START,
    coding_cost,
    cpu,
    entropy_bits,
    pack_frequencies,
    rans_decode,
    rans_encode,
    rans_frequencies,
    unpack_frequencies,
)
from shrinkpoint.kernels.rans import reference as oracle
from shrinkpoint.kernels.rans import wide as wide_rans

from .hostile import outcome

if TYPE_CHECKING:
    from .conftest import BackEnd

Array = np.ndarray[Any, Any]


def levels(rng: np.random.Generator, n: int, size: int, change: float) -> tuple[Array, Array]:
    """Return symbols that mostly equal their context, as levels of successive checkpoints do."""
    contexts = rng.integers(0, size, n)
    steps = np.where(rng.random(n) < change, rng.choice([-2, -1, 1, 2], n, p=[0.05, 0.45, 0.45, 0.05]), 0)
    return np.clip(contexts + steps, 0, size - 1).astype(np.uint8), contexts.astype(np.uint8)


def joint(symbols: Array, contexts: Array, size: int) -> Array:
    counts = np.bincount(contexts.astype(np.int64) * size + symbols, minlength=size * size)
    return counts.reshape(size, size)


def any_counts(rng: np.random.Generator, rows: int, columns: int) -> Array:
    """Return counts with empty rows, single symbols, ties, rare and frequent symbols."""
    counts = rng.integers(0, rng.choice([2, 3, 50, 10**9]), (rows, columns))
    counts *= rng.random((rows, columns)) < rng.choice([0.1, 0.5, 1.0])
    counts[rng.random(rows) < 0.1] = 0
    heavy = rng.random(rows) < 0.5
    counts[heavy, rng.integers(0, columns, int(heavy.sum()))] += rng.choice([100, 10**6])
    return counts.astype(np.int64)


# frequencies


@pytest.mark.parametrize("exact", [True, False])
def test_frequencies_are_those_of_the_oracle(
    sequential_back_end: BackEnd, fresh: np.random.Generator, exact: bool
) -> None:
    module = sequential_back_end.module("rans")
    for rows, columns in ((1, 1), (1, 2), (3, 18), (18, 18), (2, 256)):
        for precision in (8, 12, 16):
            counts = any_counts(fresh, rows, columns)
            expected = oracle.rans_frequencies(counts, precision, exact=exact)
            found = module.rans_frequencies(sequential_back_end.array(counts), precision, exact=exact)
            found = sequential_back_end.numpy(found)
            np.testing.assert_array_equal(found, expected, strict=True)
            assert ((found > 0) == (counts > 0)).all()
            assert (found.sum(axis=1) == np.where(counts.any(axis=1), 1 << precision, 0)).all()


def test_exact_frequencies_cost_least(fresh: np.random.Generator) -> None:
    a, b = np.meshgrid(np.arange(1, 255), np.arange(1, 255), indexing="ij")
    c = 256 - a - b
    inside = c > 0
    a, b, c = a[inside], b[inside], c[inside]
    for counts in fresh.integers(1, fresh.choice([5, 100, 10**5], (20, 1)), (20, 3)).astype(np.int64):
        costs = counts[0] * (8 - np.log2(a)) + counts[1] * (8 - np.log2(b)) + counts[2] * (8 - np.log2(c))
        table = rans_frequencies(counts[None], 8, exact=True)
        assert coding_cost(counts[None], table, 8) <= costs.min() * (1 + 1e-4)


def test_the_peak_stays_the_peak() -> None:
    """Rounding keeps the most frequent symbol the most frequent."""
    assert rans_frequencies(np.asarray([[127, 129]]), 8).tolist() == [[127, 129]]
    assert rans_frequencies(np.asarray([[129, 127]]), 8).tolist() == [[128, 128]]


def test_short_frequencies_pay_for_themselves(fresh: np.random.Generator) -> None:
    """Rounding costs the symbols less than it saves in the table, up to a few bytes."""
    for n in (3_000, 100_000, 3_000_000):
        for change in (0.01, 0.1, 0.5):
            counts = joint(*levels(fresh, 100_000, 34, change), 34) * n // 100_000
            exact, short = rans_frequencies(counts, 12, exact=True), rans_frequencies(counts, 12)
            more = (coding_cost(counts, short, 12) - coding_cost(counts, exact, 12)) / 8
            less = len(pack_frequencies(exact, 12)) - len(pack_frequencies(short, 12))
            assert more - less <= 8 + 0.05 * len(pack_frequencies(exact, 12))
    assert (exact != short).any()


@given(
    st.lists(st.lists(st.integers(0, 5) | st.integers(0, 2**48), min_size=3, max_size=3), min_size=1, max_size=4),
    st.integers(8, 16),
)
def test_any_counts(rows: list[list[int]], precision: int) -> None:
    counts = np.asarray(rows, np.int64)
    for exact in (False, True):
        found = rans_frequencies(counts, precision, exact=exact)
        np.testing.assert_array_equal(found, oracle.rans_frequencies(counts, precision, exact=exact))


def test_cost(sequential_back_end: BackEnd, fresh: np.random.Generator) -> None:
    module = sequential_back_end.module("rans")
    counts = any_counts(fresh, 5, 9)
    table = rans_frequencies(counts, 12)
    found = module.coding_cost(sequential_back_end.array(counts), sequential_back_end.array(table), 12)
    assert found == pytest.approx(oracle.coding_cost(counts, table, 12), rel=1e-12)
    counts[0, 0] += 1
    table[0, 0] = 0
    assert module.coding_cost(sequential_back_end.array(counts), sequential_back_end.array(table), 12) == np.inf


def test_entropy(sequential_back_end: BackEnd, fresh: np.random.Generator) -> None:
    """The entropy equals the oracle's and is a lower bound of the best table's cost."""
    module = sequential_back_end.module("rans")
    for rows, columns in ((1, 1), (1, 256), (7, 19), (3, 0)):
        counts = any_counts(fresh, rows, columns) if columns else np.zeros((rows, 0), np.int64)
        found = module.entropy_bits(sequential_back_end.array(counts))
        assert found == pytest.approx(oracle.entropy_bits(counts), rel=1e-12)
        if columns:
            assert found <= coding_cost(counts, rans_frequencies(counts, 15), 15) * (1 + 1e-12)
            alone = sum(module.entropy_bits(sequential_back_end.array(row)) for row in counts)
            assert alone == pytest.approx(found, rel=1e-12)
    assert module.entropy_bits(sequential_back_end.array(np.asarray([[4, 2, 2], [0, 9, 0]]))) == 12.0


# symbols


@pytest.mark.parametrize(("size", "precision"), [(1, 8), (2, 12), (18, 12), (34, 15), (256, 16)])
def test_bytes_and_back(sequential_back_end: BackEnd, fresh: np.random.Generator, size: int, precision: int) -> None:
    module = sequential_back_end.module("rans")
    array = sequential_back_end.array
    for n in (0, 1, 2, 3, 4, 5, 63, 64, 501):
        for change in (0.0, 0.05, 1.0):
            symbols, contexts = levels(fresh, n, size, change)
            counts = joint(symbols, contexts, size)
            for given_contexts, table in (
                (contexts, rans_frequencies(counts, precision)),
                (None, rans_frequencies(counts.sum(axis=0, keepdims=True), precision)),
            ):
                expected = oracle.rans_encode(symbols, given_contexts, table, precision)
                where = None if given_contexts is None else array(given_contexts)
                data = module.rans_encode(array(symbols), where, array(table), precision)
                np.testing.assert_array_equal(sequential_back_end.numpy(data), expected, strict=True)
                back = module.rans_decode(data, where, array(table), precision, n)
                np.testing.assert_array_equal(sequential_back_end.numpy(back), symbols, strict=True)


@pytest.mark.parametrize("change", [0.002, 0.1, 0.9])
@pytest.mark.parametrize("states", [4, 64])
def test_many_symbols(fresh: np.random.Generator, change: float, states: int) -> None:
    """Symbols with a changing rate equal the oracle's bytes, near the entropy."""
    n = (1 << 16) + 4001 + int(fresh.integers(4))
    symbols, contexts = levels(fresh, n, 18, change)
    symbols[: n // 8], contexts[: n // 8] = levels(fresh, n // 8, 18, 0.5)
    counts = joint(symbols, contexts, 18)
    table = rans_frequencies(counts, 12)
    data = rans_encode(symbols, contexts, table, 12, states=states)
    np.testing.assert_array_equal(data, oracle.rans_encode(symbols, contexts, table, 12, states))
    np.testing.assert_array_equal(rans_decode(data, contexts, table, 12, n, states=states), symbols)
    assert abs(data.size - coding_cost(counts, table, 12) / 8) <= 4 * states + 1


@pytest.mark.parametrize("size", [1, 2, 18, 256])
def test_64_states(sequential_back_end: BackEnd, fresh: np.random.Generator, size: int) -> None:
    """64 states give the oracle's bytes and decode, with whole and partial rows."""
    module, array = sequential_back_end.module("rans"), sequential_back_end.array
    for n in (0, 1, 15, 16, 17, 63, 64, 65, 129, 501):
        symbols, contexts = levels(fresh, n, size, 0.4)
        counts = joint(symbols, contexts, size)
        for given_contexts, table in (
            (contexts, rans_frequencies(counts, 12)),
            (None, rans_frequencies(counts.sum(axis=0, keepdims=True), 12)),
        ):
            expected = oracle.rans_encode(symbols, given_contexts, table, 12, 64)
            where = None if given_contexts is None else array(given_contexts)
            data = module.rans_encode(array(symbols), where, array(table), 12, 64)
            np.testing.assert_array_equal(sequential_back_end.numpy(data), expected, strict=True)
            back = module.rans_decode(data, where, array(table), 12, n, 64)
            np.testing.assert_array_equal(sequential_back_end.numpy(back), symbols, strict=True)


def test_64_states_of_any_frequency(fresh: np.random.Generator) -> None:
    """Division by multiplication is exact at the critical multiples of every frequency."""
    for f in (*range(1, 400), *fresh.integers(1, 4096, 500).tolist(), 4095, 4096):
        entries = np.zeros(2, np.uint64)
        wide_rans._tables(np.asarray([[f, 4096 - f]], np.uint32), False, entries, np.empty(0, np.uint32))
        reciprocal, shift = int(entries[0]) & (2**32 - 1), 31 + (int(entries[0]) >> 58)
        for q in (*range(8, 12), *fresh.integers(8, 1 << 19, 20).tolist(), (1 << 19) - 1):
            for x in (q * f, q * f + f - 1):
                assert (x * reciprocal) >> shift == q
                assert x * reciprocal < 2**64


def test_64_states_of_hostile_bytes(fresh: np.random.Generator) -> None:
    """Damaged bytes give the same symbols or error as the oracle."""
    symbols, contexts = levels(fresh, 333, 9, 0.3)
    counts = joint(symbols, contexts, 9)
    counts[4] = 0
    contexts[contexts == 4] = 3
    np.add.at(counts, (contexts, symbols), 1)
    table = rans_frequencies(counts, 12)
    data = rans_encode(symbols, contexts, table, 12, states=64)
    hostile = [data[:k] for k in (0, 1, 16, 255, 256, 257, data.size - 2, data.size - 1)]
    hostile += [np.concatenate([data, data[:k]]) for k in (1, 2)]
    for _ in range(200):
        changed = data.copy()
        changed[fresh.integers(data.size)] ^= np.uint8(1 << fresh.integers(8))
        hostile.append(changed)
    for wrong in hostile:
        found = outcome(lambda *a: rans_decode(*a, states=64), wrong, contexts, table, 12, 333)
        assert found == outcome(lambda *a: oracle.rans_decode(*a, 64), wrong, contexts, table, 12, 333)
    for at in (0, 100, 332):
        wrong = contexts.copy()
        wrong[at] = 4  # a row without symbols
        assert outcome(lambda *a: rans_decode(*a, states=64), data, wrong, table, 12, 333) is None
    for at in (0, 100, 319, 320, 332):
        absent = symbols.copy()
        absent[at], own = 0, contexts.copy()
        own[at] = 4
        with pytest.raises(BadArgumentError):
            rans_encode(absent, own, table, 12, states=64)


def test_certain_symbols_cost_nothing() -> None:
    table = np.asarray([[0, 256, 0], [0, 0, 256], [0, 0, 0]], np.uint32)
    contexts = np.asarray([0, 1, 1, 0, 1] * 1000, np.uint8)
    data = rans_encode(contexts + np.uint8(1), contexts, table, 8)
    assert data.size == 0
    np.testing.assert_array_equal(rans_decode(data, contexts, table, 8, 5000), contexts + 1)
    assert coding_cost(np.asarray([[0, 9, 0], [0, 0, 9], [0, 0, 0]]), table, 8) == 0.0


def test_rare_symbols(fresh: np.random.Generator) -> None:
    """Frequencies of 1 and of all but 1, the limits of reciprocals, are exact."""
    for precision in (8, 12, 16):
        table = np.asarray([[(1 << precision) - 1, 1], [1, (1 << precision) - 1]], np.uint32)
        symbols, contexts = fresh.integers(0, 2, (2, 1001)).astype(np.uint8)
        data = rans_encode(symbols, contexts, table, precision)
        np.testing.assert_array_equal(data, oracle.rans_encode(symbols, contexts, table, precision))
        np.testing.assert_array_equal(rans_decode(data, contexts, table, precision, 1001), symbols)


def test_reciprocals_are_exact(fresh: np.random.Generator) -> None:
    """Division by multiplication is exact at the critical multiples of every f."""
    for precision in (8, 12, 16):
        f = np.unique(np.concatenate([np.arange(1, 400), fresh.integers(1, 1 << precision, 500), [1 << precision]]))
        f = f[f <= 1 << precision].astype(np.uint64)
        frequencies = np.stack([f, (1 << precision) - f], axis=1).astype(np.uint32)
        for at in range(0, f.size, 256):
            table = np.empty((2 * frequencies[at : at + 256].shape[0], 4), np.uint64)
            cpu._encode_table(frequencies[at : at + 256], precision, table)
            for limit, reciprocal, g in zip(table[::2, 0], table[::2, 1], f[at : at + 256], strict=True):
                assert limit == int(g) << (32 - precision)
                low = np.uint64(START)
                top = min(int(limit), 1 << 32)
                q = fresh.integers(int(low) // int(g), top // int(g), 50, dtype=np.uint64, endpoint=True)
                x = np.concatenate([q * g, q * g + g - np.uint64(1), [np.uint64(top - 1)]])
                x = x[x < top]
                np.testing.assert_array_equal((x * reciprocal) >> np.uint64(32 + precision), x // g)


def test_strided_read_only_and_bytes(fresh: np.random.Generator) -> None:
    symbols, contexts = levels(fresh, 6000, 9, 0.2)
    table = rans_frequencies(joint(symbols, contexts, 9), 12)
    data = rans_encode(symbols[::-3], contexts[::-3], table, 12)
    np.testing.assert_array_equal(data, rans_encode(symbols[::-3].copy(), contexts[::-3].copy(), table, 12))
    np.testing.assert_array_equal(rans_decode(data.tobytes(), contexts[::-3], table, 12, 2000), symbols[::-3])
    for x in (symbols, contexts, table):
        x.flags.writeable = False
    data = rans_encode(symbols, contexts, table, 12)
    np.testing.assert_array_equal(rans_decode(data, contexts, table, 12, 6000), symbols)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=120), st.integers(8, 16), st.booleans())
def test_any_symbols(pairs: list[tuple[int, int]], precision: int, exact: bool) -> None:
    contexts = np.asarray([c for c, _ in pairs], np.uint8)
    symbols = np.asarray([s for _, s in pairs], np.uint8)
    counts = np.bincount(contexts.astype(np.int64) * 6 + symbols, minlength=24).reshape(4, 6)
    table = rans_frequencies(counts, precision, exact=exact)
    data = rans_encode(symbols, contexts, table, precision)
    np.testing.assert_array_equal(rans_decode(data, contexts, table, precision, len(pairs)), symbols)
    np.testing.assert_array_equal(
        unpack_frequencies(pack_frequencies(table, precision), 4, 6, precision), table, strict=True
    )


# hostile data


@pytest.mark.parametrize("change", [0.1, 1.0])
def test_truncated_and_flipped(fresh: np.random.Generator, change: float) -> None:
    """Every truncation, flip and extension is refused or read as the oracle reads it."""
    n = 61
    symbols, contexts = levels(fresh, n, 6, change)
    table = rans_frequencies(joint(symbols, contexts, 6), 8)
    data = rans_encode(symbols, contexts, table, 8).tobytes()
    start = START.to_bytes(4, "little")
    hostile = [data[:k] for k in range(len(data))] + [data + b"\0", data + b"\0\0", start * 4, bytes(16), b"\xff" * 30]
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << (bit % 8)
        hostile.append(bytes(changed))
    for wrong in hostile:
        array = np.frombuffer(wrong, np.uint8)
        for count in (n, n - 1, 4, 1, 0):
            found = outcome(rans_decode, wrong, contexts[:count], table, 8, count)
            assert found == outcome(oracle.rans_decode, array, contexts[:count], table, 8, count)
            if found is not None:  # nothing is read that would not have been written
                assert len(found) == count
                again = rans_encode(np.asarray(found, np.uint8), contexts[:count], table, 8)
                assert again.tobytes() == wrong


@pytest.mark.parametrize("change", [0.01, 0.8])
def test_other_contexts_and_empty_rows(fresh: np.random.Generator, change: float) -> None:
    symbols, contexts = levels(fresh, 3001, 7, change)
    counts = joint(symbols, contexts, 7)
    counts = np.concatenate([counts, np.zeros_like(counts[:1])])
    table = rans_frequencies(counts, 12)
    data = rans_encode(symbols, contexts, table, 12)
    for at in (0, 1501, 1502, 2999, 3000):
        wrong = contexts.copy()
        wrong[at] = 7  # a row without symbols
        assert outcome(rans_decode, data, wrong, table, 12, 3001) is None
        assert outcome(oracle.rans_decode, data, wrong, table, 12, 3001) is None
        wrong[at] = (contexts[at] + 3) % 7
        assert outcome(rans_decode, data, wrong, table, 12, 3001) == outcome(
            oracle.rans_decode, data, wrong, table, 12, 3001
        )


@pytest.mark.parametrize("n", [3, 4, 8])
@pytest.mark.parametrize("with_contexts", [False, True])
def test_a_table_without_symbols_decodes_nothing(n: int, with_contexts: bool) -> None:
    """Symbols of frequency 0 must not bring every state back to its start."""
    groups = -(-n // 4)
    states = np.full(4, START + 1, "<u4")
    states[n - 4 * groups + 4 :] = START
    words = np.ones(n, "<u2")
    words[max(0, n - 4) :] = 0
    data = np.concatenate([states.view(np.uint8), words.view(np.uint8)])
    contexts = np.zeros(n, np.uint8) if with_contexts else None
    for decode in (rans_decode, oracle.rans_decode):
        with pytest.raises(CorruptDataError):
            decode(data, contexts, np.zeros((1, 3), np.uint32), 12, n)


@pytest.mark.parametrize("with_contexts", [False, True])
@pytest.mark.parametrize("missing", [0, 1, 4, 8])
def test_no_loop_reads_beyond_the_words_that_may_be_read(with_contexts: bool, missing: int) -> None:
    """Uncompiled, where an index beyond the end is an error; each symbol takes a word."""
    n, precision = 16, 16
    frequencies = np.asarray([[(1 << precision) - 255, *[1] * 255]], np.uint32)
    symbol_of = np.zeros(1 << precision, np.uint8)
    table, peaks = np.empty(256, np.uint64), np.empty(1, np.uint64)
    cpu._decode_table(frequencies, precision, symbol_of, table, peaks)
    words = np.full(n - missing + 4, 0xFFFF, np.uint16)
    states, out = np.full(4, START, np.uint64), np.empty(n, np.uint8)
    contexts = np.zeros(n, np.uint8) if with_contexts else None
    run = getattr(cpu._decode_groups, "py_func", cpu._decode_groups)
    read = run(words, contexts, symbol_of, table, peaks, 256, precision, states, out)
    assert read == (n if not missing else -1)


@given(st.binary(min_size=14, max_size=60), st.integers(0, 90), st.booleans())
def test_any_bytes(data: bytes, n: int, with_contexts: bool) -> None:
    table = np.asarray([[200, 50, 6], [0, 0, 0], [1, 0, 255], [0, 256, 0]], np.uint32)
    contexts = np.asarray([0, 2, 3, 0, 0][: n % 5] + [0, 2, 0, 3, 2] * (n // 5), np.uint8)
    array = np.frombuffer(data, np.uint8)
    given_contexts = contexts if with_contexts else None
    table = table if with_contexts else table[:1]
    found = outcome(rans_decode, data, given_contexts, table, 8, n)
    assert found == outcome(oracle.rans_decode, array, given_contexts, table, 8, n)


# tables


def test_tables_are_those_of_the_oracle(sequential_back_end: BackEnd, fresh: np.random.Generator) -> None:
    module = sequential_back_end.module("rans")
    for rows, columns in ((1, 1), (1, 2), (4, 3), (18, 18), (2, 256)):
        for precision in (8, 12, 16):
            for exact in (False, True):
                table = rans_frequencies(any_counts(fresh, rows, columns), precision, exact=exact)
                table[fresh.permutation(rows)] = table.copy()
                data = module.pack_frequencies(sequential_back_end.array(table), precision)
                assert data == oracle.pack_frequencies(table, precision)
                given_data = sequential_back_end.array(np.frombuffer(data, np.uint8))
                back = module.unpack_frequencies(given_data, rows, columns, precision)
                np.testing.assert_array_equal(sequential_back_end.numpy(back), table, strict=True)


def test_great_tables(fresh: np.random.Generator) -> None:
    for counts in (any_counts(fresh, 256, 256), joint(*levels(fresh, 10**5, 256, 0.5), 256)):
        for precision in (8, 16):
            table = rans_frequencies(counts, precision)
            data = pack_frequencies(table, precision)
            np.testing.assert_array_equal(unpack_frequencies(data, 256, 256, precision), table)


def test_documented_bytes() -> None:
    """The examples of docs/entropy.md are right."""
    table = np.asarray([[192, 64], [0, 256]], np.uint32)
    bits = np.asarray([0, 1, 0, 0], np.uint8)
    assert rans_encode(bits, bits, table, 8).tobytes().hex(" ", 4) == "40550100 00000100 40550100 40550100"
    assert pack_frequencies(table, 8).hex() == "71d705"
    # The peak has the first slots: frequencies 10 200 46 start at 200, 0 and 210.
    table = np.asarray([[10, 200, 46]], np.uint32)
    for symbol, state in ((0, 6553 * 256 + 6 + 200), (1, 327 * 256 + 136), (2, 1424 * 256 + 32 + 210)):
        data = rans_encode(np.asarray([symbol], np.uint8), None, table, 8)
        assert int.from_bytes(data[:4].tobytes(), "little") == state


def test_tables_are_small(fresh: np.random.Generator) -> None:
    counts = joint(*levels(fresh, 10**6, 34, 0.05), 34)
    assert 130 <= (counts > 0).sum() <= 170
    assert len(pack_frequencies(rans_frequencies(counts, 12), 12)) <= 115
    assert len(pack_frequencies(rans_frequencies(counts, 12, exact=True), 12)) <= 190
    identity = np.eye(34, dtype=np.int64)
    assert len(pack_frequencies(rans_frequencies(identity, 12), 12)) <= 10


def test_hostile_tables(fresh: np.random.Generator) -> None:
    table = rans_frequencies(any_counts(fresh, 4, 5), 9)
    data = pack_frequencies(table, 9)
    hostile = [data[:k] for k in range(len(data))] + [data + bytes([k]) for k in range(256)]
    hostile += [bytes([k]) for k in range(256)] + [bytes(8), b"\xff" * 8, b"\xff" * 300, bytes([0xF0] * 50)]
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << (bit % 8)
        hostile.append(bytes(changed))
    for wrong in hostile:
        for rows, columns, precision in ((4, 5, 9), (5, 4, 9), (1, 1, 8), (7, 3, 16)):
            found = outcome(unpack_frequencies, wrong, rows, columns, precision)
            array = np.frombuffer(wrong, np.uint8)
            assert found == outcome(oracle.unpack_frequencies, array, rows, columns, precision)
            if found is not None:
                again = np.asarray(found, np.uint32)
                assert again.shape == (rows, columns)
                assert set(again.sum(axis=1).tolist()) <= {0, 1 << precision}
                assert pack_frequencies(again, precision) == wrong


@given(st.binary(max_size=30), st.integers(1, 6), st.integers(1, 9), st.integers(8, 16))
def test_any_table(data: bytes, rows: int, columns: int, precision: int) -> None:
    found = outcome(unpack_frequencies, data, rows, columns, precision)
    array = np.frombuffer(data, np.uint8)
    assert found == outcome(oracle.unpack_frequencies, array, rows, columns, precision)


def test_bad_arguments(sequential_back_end: BackEnd) -> None:
    module = sequential_back_end.module("rans")
    array = sequential_back_end.array
    symbols, contexts = np.asarray([0, 1], np.uint8), np.asarray([0, 1], np.uint8)
    table = np.asarray([[200, 56], [0, 256]], np.uint32)
    for wrong_symbols, wrong_contexts, wrong_table in (
        (symbols + np.uint8(1), contexts, table),  # beyond the columns
        (symbols, contexts + np.uint8(1), table),  # beyond the rows
        (np.zeros(2, np.uint8), contexts, table),  # frequency zero, in the rest
        (np.zeros(4 * 65536 // 1000, np.uint8), np.ones(4 * 65536 // 1000, np.uint8), table),
        (symbols, contexts, table + np.uint32(1)),  # another sum
        (symbols, contexts, np.asarray([[2**32 - 1, 257], [0, 256]], np.uint32)),  # the sum modulo 2**32
    ):
        with pytest.raises(BadArgumentError):
            module.rans_encode(array(wrong_symbols), array(wrong_contexts), array(wrong_table), 8)
    for call in (
        lambda: module.rans_decode(array(symbols[:0]), array(contexts + np.uint8(1)), array(table), 8, 2),
        lambda: module.rans_decode(array(symbols[:0]), array(contexts), array(table), 9, 2),
        lambda: module.pack_frequencies(array(table), 9),
        lambda: module.rans_frequencies(array(np.asarray([[-1, 1]])), 8),
        lambda: module.rans_frequencies(array(np.asarray([[2**48 + 1, 1]])), 8),
    ):
        with pytest.raises(BadArgumentError):
            call()


def test_absent_symbols(fresh: np.random.Generator) -> None:
    """One symbol of frequency zero is refused at any position."""
    n = 3 << 16
    for table in ([[250, 6, 0]], [[90, 80, 86, 0]]):
        frequencies = np.asarray(table, np.uint32)
        symbols = fresh.choice(frequencies.size, n, p=frequencies[0] / 256).astype(np.uint8)
        rans_encode(symbols, None, frequencies, 8)
        for at in (0, 1, 2, 3, n // 2, n - 4, n - 3, n - 2, n - 1):
            wrong = symbols.copy()
            wrong[at] = frequencies.size - 1
            with pytest.raises(BadArgumentError):
                rans_encode(wrong, None, frequencies, 8)


def test_bad_public_arguments() -> None:
    symbols, table = np.asarray([0, 1], np.uint8), np.asarray([[200, 56]], np.uint32)
    for call in (
        lambda: rans_frequencies(np.ones((1, 3)), 8),
        lambda: rans_frequencies(np.ones(3, np.int64), 8),
        lambda: rans_frequencies(np.ones((257, 3), np.int64), 8),
        lambda: rans_frequencies(np.ones((1, 0), np.int64), 8),
        lambda: rans_frequencies(np.ones((1, 3), np.int64), 7),
        lambda: rans_frequencies(np.ones((1, 3), np.int64), 17),
        lambda: rans_encode(symbols.astype(np.int64), None, table, 8),
        lambda: rans_encode(symbols, symbols[:1], table, 8),
        lambda: rans_encode(symbols, symbols.astype(np.int64), table, 8),
        lambda: rans_encode(symbols, None, table.astype(np.int64), 8),
        lambda: rans_decode(b"", symbols, table, 8, 3),
        lambda: rans_decode(b"", None, table, 8, -1),
        lambda: coding_cost(np.ones((1, 2), np.int64), np.ones((2, 1), np.uint32), 8),
        lambda: entropy_bits(np.ones((1, 2))),
        lambda: entropy_bits(np.ones((1, 1, 2), np.int64)),
        lambda: pack_frequencies(table[0], 8),
        lambda: unpack_frequencies(b"", 0, 1, 8),
        lambda: unpack_frequencies(b"", 1, 257, 8),
    ):
        with pytest.raises(BadArgumentError):
            call()
