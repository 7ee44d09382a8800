"""Symbols to bytes: the choice of coder, uncounted cases, and nested writers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec import entropy
from shrinkpoint.codec.base import Codec, Leaf
from shrinkpoint.codec.entropy import table
from shrinkpoint.codec.evidence.kind import Kind
from shrinkpoint.codec.format.fields import Reader, Writer, parts_of
from shrinkpoint.codec.groups import Coded
from shrinkpoint.codec.lossless import exact
from shrinkpoint.codec.lossless.changed import Changed
from shrinkpoint.codec.registry import STREAMS
from shrinkpoint.codec.state.leaves import LeafSpec
from shrinkpoint.kernels.levels import joint_counts
from shrinkpoint.kernels.rans import entropy_bits


@pytest.fixture(name="fresh")
def _fresh() -> np.random.Generator:
    return np.random.default_rng(7)


def decoded(data: bytes, n: int) -> np.ndarray:
    return entropy.decode(memoryview(data), n)


@pytest.mark.parametrize("n", [entropy.SAMPLE * 4 - 1, entropy.SAMPLE * 4, 300_001])
def test_noise_is_stored_and_what_is_nearly_noise_is_coded(fresh: np.random.Generator, n: int) -> None:
    noise = fresh.integers(0, 256, n, dtype=np.uint8)
    data = entropy.encode(noise)
    assert data[0] == entropy.STORED
    assert len(data) == n + 1
    np.testing.assert_array_equal(decoded(data, n), noise)
    # 240 of 256 symbols take 7.91 bits: one percent less, which a code gets.
    fewer = (noise.astype(np.uint16) * 240 >> 8).astype(np.uint8)
    data = entropy.encode(fewer)
    assert data[0] != entropy.STORED
    assert len(data) < 0.995 * n
    np.testing.assert_array_equal(decoded(data, n), fewer)


def test_noise_in_a_part_is_not_taken_for_noise(fresh: np.random.Generator) -> None:
    symbols = fresh.integers(0, 256, 200_000, dtype=np.uint8)
    symbols[120_000:150_000] = 7
    data = entropy.encode(symbols)
    assert len(data) < 0.95 * symbols.size
    np.testing.assert_array_equal(decoded(data, symbols.size), symbols)


@given(st.lists(st.binary(max_size=9) | st.integers(4000, 9000).map(lambda n: bytes([n % 256]) * n), max_size=8))
def test_writers_in_writers_are_what_their_bytes_are(fields: list[bytes]) -> None:
    flat, nested = Writer(), Writer()
    inner = Writer()
    for field in fields:
        flat.raw(field)
        inner.raw(np.frombuffer(field, np.uint8))
        inner.varint(len(field))
        flat.varint(len(field))
    assert len(inner) == len(flat) == len(flat.done())
    nested.block(inner)
    nested.raw(inner)
    assert len(nested) == len(nested.done())
    reader = Reader(nested.done(), "test")
    assert bytes(reader.block()) == flat.done()
    assert bytes(reader.rest()) == flat.done()


@pytest.mark.parametrize("codec", [exact.Exact(), Changed(), Changed("published")], ids=str)
def test_what_is_stored_does_not_refer_to_the_callers_array(fresh: np.random.Generator, codec: Codec) -> None:
    data = fresh.integers(0, 256, 100_000, dtype=np.uint8)
    spec = LeafSpec("numpy", "uint8", (data.size,))
    kept = data.copy()
    stored = codec.encode(Leaf("x", "x", spec, Kind("other", "state"), data), None, None)
    data[:] = 0
    pieces = [memoryview(b"".join(parts_of(piece))) for piece in stored.pieces]
    (memory,) = STREAMS[stored.stream].decode(Coded((spec,), stored.meta, pieces, (None,)))
    np.testing.assert_array_equal(memory.values(spec), kept)


def drifting(rng: np.random.Generator, n: int, drift: float) -> tuple[np.ndarray, np.ndarray]:
    """Return levels of normal weights before and after steps of `drift` deviations."""
    w = rng.standard_normal(n)
    later = w + drift * rng.standard_normal(n) * np.exp(rng.standard_normal(n))
    return tuple(np.clip(np.rint(x / 0.27) + 20, 2, 39).astype(np.uint8) for x in (w, later))


@pytest.mark.parametrize("n", [5_000, 40_000, 300_000, 2_000_000])
@pytest.mark.parametrize("drift", [0.0, 1e-5, 1e-4, 1e-3, 1e-2, 0.1])
def test_levels_take_their_conditional_entropy_and_a_table(n: int, drift: float, fresh: np.random.Generator) -> None:
    """Levels take little more than their conditional entropy and their table.

    The entropy is the empirical one of each context: it assumes known frequencies, which a coder must store or learn.
    """
    before, after = drifting(fresh, n, drift)
    data = entropy.encode_levels(after, 40, before, 40, "smallest")
    np.testing.assert_array_equal(entropy.decode(memoryview(data), n, before, 40), after)
    counts = joint_counts(before, after, 40, 40)
    assert int(counts.sum()) == n
    least = entropy_bits(counts) / 8 + len(table.Table.best(counts, 1.0, 40).packed)
    changes = n - int(np.trace(counts))
    assert len(data) <= (1.05 * least + 24 if changes < 1000 else 1.01 * least + 20)


def test_few_exceptions_take_a_few_bytes(fresh: np.random.Generator) -> None:
    """Five exceptions in a million equal symbols take at most 40 bytes."""
    symbols = np.full(1_000_000, 9, np.uint8)
    symbols[fresh.choice(symbols.size, 5, replace=False)] = 200
    data = entropy.encode(symbols)
    assert len(data) <= 40
    np.testing.assert_array_equal(decoded(data, symbols.size), symbols)


def test_what_is_plain_without_its_context_is_coded_without_it(fresh: np.random.Generator) -> None:
    """Symbols that are constant without their context are coded without it."""
    symbols = np.full(100_000, 7, np.uint8)
    symbols[5] = 8
    context = np.full(symbols.size, 7, np.uint8)
    context[fresh.choice(symbols.size, 30, replace=False)] = 3
    data = entropy.encode_levels(symbols, 40, context, 40, "smallest")
    assert data[0] == entropy.RANS
    assert len(data) <= 32
    np.testing.assert_array_equal(entropy.decode(memoryview(data), symbols.size, context, 40), symbols)


def test_counts_that_are_known_change_no_byte(fresh: np.random.Generator) -> None:
    for n in (3, 700, 5_000, 100_000):
        for symbols in (fresh.poisson(2.0, n).astype(np.uint8), (fresh.random(n) < 0.001).astype(np.uint8)):
            assert entropy.encode(symbols, np.bincount(symbols, minlength=256)) == entropy.encode(symbols)


def test_no_table_of_contexts_is_made_that_cannot_pay(
    fresh: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of contexts is not built if it would be larger than the symbols."""
    made: list[int] = []
    model = table.Table.__init__

    def counted(self: table.Table, counts: np.ndarray, precision: int, contexts: int) -> None:
        made.append(counts.shape[0])
        model(self, counts, precision, contexts)

    monkeypatch.setattr(table.Table, "__init__", counted)
    symbols = np.clip(fresh.normal(120, 20, 256), 0, 255).astype(np.uint8)
    context = fresh.integers(0, 16, 256, dtype=np.uint8)
    data = entropy.in_context(symbols, context, 16)[0].done()
    assert data == entropy.encode(symbols)
    assert made.count(16) == 0
    # Where the context says nearly all, one is.
    symbols[:] = 12 * context
    symbols[fresh.integers(0, 256, 200)] += 1
    assert entropy.in_context(symbols, context, 16)[0].done()[0] == entropy.CONDITIONAL
    assert made.count(16) > 0


def test_what_a_table_of_contexts_takes_at_least(fresh: np.random.Generator) -> None:
    """The estimated least size of a table of contexts is rarely above its real size."""
    shares = []
    for n in (100, 2_000, 50_000):
        levels = [drifting(fresh, n, float(drift)) for drift in np.geomspace(1e-3, 3, 8)]
        noise = [fresh.integers(0, size, (2, n), dtype=np.uint8) for size in (2, 9, 40)]
        for context, symbols in (*levels, *noise):
            counts = joint_counts(context, symbols, 40, 40)
            made = table.Table(counts, table.PRECISIONS[0], 40).packed
            shares.append(table.least_of_contexts(counts) / max(1, len(made)))
    assert sorted(shares)[-2] <= 1.1
    assert max(shares) <= 1.5


@pytest.mark.parametrize("n", [1 << 14, 1 << 18])
def test_tables_have_no_more_slots_than_symbols_where_that_costs_nothing(fresh: np.random.Generator, n: int) -> None:
    """Tables of few symbols have fewer slots, at almost no cost."""
    context = fresh.integers(0, 40, n, dtype=np.uint8)
    symbols = np.minimum(context + fresh.integers(0, 3, n), 39).astype(np.uint8)
    data = entropy.in_context(symbols, context, 40)[0].done()
    assert data[0] == entropy.CONDITIONAL
    assert data[1] == (10 if n < 40 << 12 else 64)  # 12, in 64 states
    assert np.array_equal(entropy.decode(memoryview(data), n, context, 40), symbols)
    counts = joint_counts(context, symbols, 40, 40)
    assert len(data) <= 1.005 * table.Table(counts, 12, 40).cost + 3


def test_runs_between_the_stretches_of_a_sample_are_seen(fresh: np.random.Generator) -> None:
    """Runs of untouched rows that a sample of eight stretches would miss are found."""
    x = (fresh.standard_normal((4687, 64)) * 1e-2).astype(np.float32)
    for start in np.linspace(0, 4687 - 32, 8).astype(int)[:-1]:
        x[start + 64 : start + 470] = 0
    touched = float((x != 0).any(axis=1).mean())
    assert sp.compress({"m": x}, cfg=sp.presets.lossless()).nbytes < touched * x.nbytes
