"""Classes of rows and columns: definition, savings, and damaged streams."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec import entropy
from shrinkpoint.codec.entropy import context_coders as placed
from shrinkpoint.codec.entropy.row_column_classes import Places, classes_of, columns_of, off_mean, populations
from shrinkpoint.codec.entropy.table import Table
from shrinkpoint.codec.errors import CorruptDataError
from shrinkpoint.codec.format.fields import Reader, Writer
from shrinkpoint.codec.rebase import rebase as restate
from shrinkpoint.kernels.levels import joint_counts
from shrinkpoint.kernels.rans import cpu as rans
from shrinkpoint.kernels.rans import entropy_bits, pack_frequencies

from .common import difference, small_chunks, through_bytes

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@pytest.fixture(name="fresh")
def _fresh() -> np.random.Generator:
    return np.random.default_rng(7)


def scales(rng: np.random.Generator, rows: int, columns: int, spread: float = 1.0) -> np.ndarray[Any, Any]:
    """Return products of row and column scales."""
    return np.asarray(np.exp(spread * (rng.standard_normal((rows, 1)) + rng.standard_normal((1, columns)))))


def uneven(rng: np.random.Generator, rows: int, columns: int, spread: float = 1.0) -> Bytes:
    """Return symbols around 20 whose spread depends on row and column."""
    found = np.rint(20 + scales(rng, rows, columns, spread) * rng.standard_normal((rows, columns)))
    return np.clip(found, 0, 39).astype(np.uint8).reshape(-1)


def changed(rng: np.random.Generator, rows: int, columns: int, size: int) -> tuple[Bytes, Bytes]:
    """Return a parent's and a child's levels, whose changes depend on row and column."""
    old = rng.integers(0, size, rows * columns).astype(np.uint8)
    rate = np.minimum(scales(rng, rows, columns) * np.exp(-2), 0.9).reshape(-1)
    return old, np.where(rng.random(old.size) < rate, np.minimum(old + 1, size - 1), old).astype(np.uint8)


def plainly(symbols: Bytes, origin: int | Bytes, columns: int, start: int, contexts: int) -> Any:
    """Return (rows, columns, phase, base, classes) by definition; None without classes."""
    n = symbols.size
    most = min(16, 256 // contexts, max(2, n // (512 * contexts)))
    if n < 4096 or not 2 <= columns <= n // 2 or most < 2:
        return None
    phase = start % columns
    origins = [origin] * n if isinstance(origin, int) else origin.tolist()
    far: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    many: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    total = 0
    for i, (s, o) in enumerate(zip(symbols.tolist(), origins, strict=True)):
        total += min(abs(s - o), 8)
        for axis, at in enumerate(divmod(phase + i, columns)):
            far[axis][at] += min(abs(s - o), 8)
            many[axis][at] += 1
    if not total:
        return None

    def class_of(ratio: float) -> int:
        """Return the class: half octaves from the mean, eight in either direction."""
        return sum(Fraction(ratio) ** 4 > Fraction(2) ** (2 * k - 1) for k in range(-7, 9))

    classes = [[class_of(far[axis][at] * (n / total) / many[axis][at]) for at in sorted(many[axis])] for axis in (0, 1)]

    def counted() -> list[int]:
        mass = [0] * (max(classes[0]) + max(classes[1]) + 1)
        for r, times in Counter(classes[0]).items():
            for c, often in Counter(classes[1]).items():
                mass[r + c] += times * often
        return mass

    mass = counted()
    whole = sum(mass)
    below = [Fraction(sum(mass[: k + 1]), whole) for k in range(len(mass))]
    lowest = next(k for k, share in enumerate(below) if share >= Fraction(1, 128))
    highest = next(k for k, share in enumerate(below) if share >= Fraction(127, 128))
    if highest - lowest + 1 > most:
        classes = [[c // 2 for c in axis] for axis in classes]
        mass = counted()
    if 64 * max(mass) >= 63 * whole:
        return None
    windows = [sum(mass[max(0, end - most + 1) : end + 1]) for end in range(len(mass) + most - 1)]
    base = max(0, windows.index(max(windows)) - most + 1)
    return (*classes, phase, base, min(most, len(mass) - base))


@pytest.mark.parametrize(("rows", "columns"), [(64, 80), (5, 1000), (2100, 2), (70, 64), (2, 3000)])
@pytest.mark.parametrize("spread", [0.0, 0.5, 1.5, 4.0])
def test_classes_are_what_they_are_defined_to_be(
    fresh: np.random.Generator, rows: int, columns: int, spread: float
) -> None:
    symbols = uneven(fresh, rows, columns, spread)
    beside = fresh.integers(15, 25, symbols.size).astype(np.uint8)
    origins: list[tuple[int | Bytes, int]] = [(20, 1), (beside, 6), (beside, 40), (beside, 128), (0, 1)]
    for origin, contexts in origins:
        for start in (0, columns - 1, 3 * columns + columns // 2):
            part = symbols[: symbols.size - start % 7]
            own = origin if isinstance(origin, int) else origin[: part.size]
            found = classes_of(part, own, columns, start, contexts)
            right = plainly(part, own, columns, start, contexts)
            assert (found is None) == (right is None)
            if found is None:
                continue
            got = found.rows.tolist(), found.columns.tolist(), found.phase, found.base, found.classes
            assert got == right
            assert found.classes * contexts <= 256


def test_what_has_no_classes(fresh: np.random.Generator) -> None:
    symbols = uneven(fresh, 64, 80)
    assert classes_of(symbols, 20, 80, 0, 1) is not None
    for columns in (0, 1, symbols.size, symbols.size // 2 + 1):
        assert classes_of(symbols, 20, columns, 0, 1) is None
    assert classes_of(symbols, symbols, 80, 0, 40) is None  # nothing differs
    assert classes_of(symbols, 20, 80, 0, 129) is None  # no room next to the other contexts
    assert classes_of(symbols[:4095], 20, 80, 0, 1) is None


def test_the_class_of_a_place(fresh: np.random.Generator) -> None:
    rows, columns = fresh.integers(0, 17, 20).astype(np.uint8), fresh.integers(0, 17, 30).astype(np.uint8)
    for contexts in (1, 5):
        context = fresh.integers(0, contexts, 555).astype(np.uint8)
        found = Places(rows, columns, 17, 9, 11).beside(None if contexts == 1 else context, 555)
        for i, own in enumerate(found.tolist()):
            r, c = divmod(17 + i, 30)
            assert own == int(context[i]) * 11 + min(max(int(rows[r]) + int(columns[c]) - 9, 0), 10)


def test_columns_of_a_shape() -> None:
    assert [columns_of(shape) for shape in ((), (5,), (1, 9), (4, 9), (4, 3, 2, 2))] == [0, 0, 0, 9, 12]
    assert columns_of((4, 9), 2) == 18


def test_a_line_is_as_far_off_the_mean_as_its_own_elements_say(fresh: np.random.Generator) -> None:
    """The distance of a line from the mean depends on its own elements only."""
    for _ in range(100):
        columns = int(fresh.integers(2, 40))
        phase, n = int(fresh.integers(0, columns)), int(fresh.integers(1, 300 * columns))
        for numbers in populations(n, columns, phase, -(-(phase + n) // columns)):
            sums = np.minimum(fresh.integers(0, 4, numbers.size), numbers) * int(fresh.integers(1, 4))
            one_by_one = [off_mean(sums[i : i + 1], numbers[i : i + 1], 0.7)[0] for i in range(sums.size)]
            assert off_mean(sums, numbers, 0.7).tolist() == one_by_one


@pytest.mark.parametrize("rows", [64, 300])
def test_uneven_symbols_take_their_entropy_given_their_class(fresh: np.random.Generator, rows: int) -> None:
    """Uneven symbols take their entropy given the class, plus classes and table."""
    columns = 200
    symbols = uneven(fresh, rows, columns)
    alone, data = entropy.encode(symbols), entropy.encode(symbols, None, columns)
    assert data[0] == entropy.PLACES
    assert alone[0] != entropy.PLACES
    _bounded(data, alone, symbols, None, classes_of(symbols, 20, columns, 0, 1), 1)
    np.testing.assert_array_equal(entropy.decode(memoryview(data), symbols.size), symbols)
    assert entropy.encode(symbols, entropy.counts_of(symbols), columns) == data


@pytest.mark.parametrize("contexts", [2, 6, 40, 120])
def test_uneven_changes_take_their_entropy_given_parent_and_class(fresh: np.random.Generator, contexts: int) -> None:
    """Uneven changes take their entropy given the parent's level and the class."""
    rows, columns = 600, 400
    old, new = changed(fresh, rows, columns, contexts)
    alone = entropy.encode_levels(new, contexts, old, contexts, "smallest")
    data = entropy.encode_levels(new, contexts, old, contexts, "smallest", columns)
    assert data[0] == entropy.PLACES
    _bounded(data, alone, new, old, classes_of(new, old, columns, 0, contexts), contexts)
    np.testing.assert_array_equal(entropy.decode(memoryview(data), new.size, old, contexts), new)
    assert entropy.encode_levels(new, contexts, old, contexts, "published", columns)[0] == entropy.REARRANGED


def _bounded(
    data: bytes, alone: bytes, symbols: Bytes, context: Bytes | None, places: Places | None, contexts: int
) -> None:
    assert places is not None
    assert (places.classes == min(16, 256 // contexts)) or contexts < 40
    both = places.beside(context, symbols.size)
    counts = joint_counts(both, symbols, contexts * places.classes, 256)
    table = Table.best(counts, 1.0, contexts * places.classes).packed
    side = len(entropy.encode(places.rows)) + len(entropy.encode(places.columns)) + len(table) + 40
    assert len(data) <= 1.01 * entropy_bits(counts) / 8 + side
    assert len(data) <= (0.9 if contexts < 40 else 0.97) * len(alone)


def test_symbols_that_do_not_depend_on_their_place_are_coded_without_it(fresh: np.random.Generator) -> None:
    for n, columns in ((5_000, 50), (60_000, 200), (400_000, 1000), (8_000, 2), (8_000, 4_000)):
        symbols = fresh.permutation(uneven(fresh, n // columns, columns))
        assert entropy.encode(symbols, None, columns) == entropy.encode(symbols)
        old = fresh.integers(0, 9, n).astype(np.uint8)
        new = np.where(fresh.random(n) < 0.1, 8 - old, old).astype(np.uint8)
        alone = entropy.encode_levels(new, 9, old, 9, "smallest")
        assert entropy.encode_levels(new, 9, old, 9, "smallest", columns) == alone


@pytest.mark.parametrize("start", [0, 1, 199, 200, 12_345])
@pytest.mark.parametrize("n", [5_000, 11_111, 40_000])
def test_chunks_that_start_inside_a_row(fresh: np.random.Generator, start: int, n: int) -> None:
    whole, columns = uneven(fresh, 300, 200), 200
    part = np.ascontiguousarray(whole[start : start + n])
    data = entropy.encode(part, None, columns, start)
    assert data[0] == entropy.PLACES
    np.testing.assert_array_equal(entropy.decode(memoryview(data), n), part)
    # Were the place another one, the classes would say less.
    assert n < 40_000 or len(data) < len(entropy.encode(part, None, columns, start + 100))
    old, new = changed(fresh, 300, 200, 6)
    old, new = (np.ascontiguousarray(x[start : start + n]) for x in (old, new))
    data = entropy.encode_levels(new, 6, old, 6, "smallest", columns, start)
    np.testing.assert_array_equal(entropy.decode(memoryview(data), n, old, 6), new)
    assert n < 40_000 or data[0] == entropy.PLACES


def test_tiny_and_degenerate_matrices(fresh: np.random.Generator) -> None:
    for n in (0, 1, 2, 100, 4095, 4096, 5000):
        noise = fresh.integers(0, 30, n).astype(np.uint8)
        for symbols in (np.full(n, 7, np.uint8), noise, np.sort(noise)):
            for columns in {1, 2, 3, max(1, n // 2), max(1, n - 1), max(1, n), n + 1}:
                for start in (0, 1, columns - 1, 10 * n + 3):
                    data = entropy.encode(symbols, None, columns, start)
                    np.testing.assert_array_equal(entropy.decode(memoryview(data), n), symbols)
                    data = entropy.encode_levels(symbols, 30, noise, 30, "smallest", columns, start)
                    np.testing.assert_array_equal(entropy.decode(memoryview(data), n, noise, 30), symbols)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(4000, 9000),
    st.integers(1, 300),
    st.integers(0, 1000),
    st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    st.sampled_from([2, 7, 60, 200]),
)
def test_never_larger_than_without_and_the_same_each_time(
    seed: int, n: int, columns: int, start: int, spread: float, contexts: int
) -> None:
    rng = np.random.default_rng(seed)
    symbols = uneven(rng, -(-n // columns), columns, spread)[:n]
    data = entropy.encode(symbols, None, columns, start)
    assert len(data) <= len(entropy.encode(symbols)) + 4
    assert data == entropy.encode(symbols.copy(), None, columns, start)
    np.testing.assert_array_equal(entropy.decode(memoryview(data), n), symbols)
    old, new = (x[:n].copy() for x in changed(rng, -(-n // columns), columns, contexts))
    data = entropy.encode_levels(new, contexts, old, contexts, "smallest", columns, start)
    assert len(data) <= len(entropy.encode_levels(new, contexts, old, contexts, "smallest")) + 4
    np.testing.assert_array_equal(entropy.decode(memoryview(data), n, old, contexts), new)


# ------------------------------------------------------------------------------------------------ hostile bytes


def _streams(rng: np.random.Generator) -> list[tuple[bytes, int, Bytes | None, int]]:
    symbols = uneven(rng, 90, 50)
    old, new = changed(rng, 150, 80, 6)
    found = [
        (entropy.encode(symbols, None, 50), symbols.size, None, 0),
        (entropy.encode_levels(new, 6, old, 6, "smallest", 80), new.size, old, 6),
    ]
    assert all(data[0] == entropy.PLACES for data, _, _, _ in found)
    return found


def _right_length_or_corrupt(data: bytes, n: int, context: Bytes | None, contexts: int) -> None:
    with contextlib.suppress(CorruptDataError):
        assert entropy.decode(memoryview(data), n, context, contexts).shape == (n,)


def test_damaged_bytes_are_an_error_or_as_many_symbols(fresh: np.random.Generator) -> None:
    """Altered or cut streams give an error or the right number of symbols."""
    for data, n, context, contexts in _streams(fresh):
        head = 150  # fields, both blocks of classes, and where the table starts
        for at in range(head):
            for value in (0, 1, 0x7F, 0x80, 0xFF, data[at] ^ 1, (data[at] + 1) % 256):
                _right_length_or_corrupt(data[:at] + bytes([value]) + data[at + 1 :], n, context, contexts)
            _right_length_or_corrupt(data[:at] + b"\xff" * 8 + b"\x7f" + data[at + 1 :], n, context, contexts)
        for end in [*range(head), *range(head, len(data), 37), len(data) - 1]:
            with pytest.raises(CorruptDataError):
                entropy.decode(memoryview(data[:end]), n, context, contexts)
        with pytest.raises(CorruptDataError):
            entropy.decode(memoryview(data + b"\0\0"), n, context, contexts)
        # Another number of symbols, and of the parent's.
        _right_length_or_corrupt(data, 50, None if context is None else context[:50], contexts)


def _made(fields: tuple[int, ...], rows: bytes, columns: bytes, rest: bytes = b"") -> bytes:
    out = Writer()
    out.byte(entropy.PLACES)
    for number in fields:
        out.varint(number)
    out.block(rows)
    out.block(columns)
    out.raw(rest)
    return out.done()


def _rest() -> bytes:
    """Return the bytes after the classes for 12 symbols of 3 in class 1 of 2."""
    out = Writer()
    counts = np.zeros((2, 4), np.int64)
    counts[1, 3] = 12
    Table.best(counts, 1.0, 2).write(out, np.full(12, 3, np.uint8), np.ones(12, np.uint8))
    return out.done()


CONSTANT_ROWS, CONSTANT_COLUMNS = bytes([entropy.CONSTANT, 1]), bytes([entropy.CONSTANT, 2])


def test_each_field_out_of_range() -> None:
    """Each header field one beyond its bounds is refused."""
    right = (4, 1, 1, 2, 2)
    context = np.arange(12, dtype=np.uint8) % 3
    made = _made(right, CONSTANT_ROWS, CONSTANT_COLUMNS, _rest())
    assert entropy.decode(memoryview(made), 12).tolist() == [3] * 12
    assert entropy.decode(memoryview(made), 12, context, 3).tolist() == [3] * 12
    huge = 2**56
    for fields in (
        *((0, 0, 1, 2, 2), (13, 1, 1, 2, 2), (huge, 1, 1, 2, 2), (4, 4, 1, 2, 2), (4, huge, 1, 2, 2)),
        *((4, 1, 0, 2, 2), (4, 1, 257, 2, 2), (4, 1, huge, 2, 2), (4, 1, 1, 0, 2), (4, 1, 1, 257, 2)),
        *((4, 1, 1, huge, 2), (4, 1, 3, 86, 2), (4, 1, 2, 2, 2), (4, 1, 1, 2, 256), (4, 1, 1, 2, huge)),
        (4, 1, 1, 1, 2),
    ):
        made = _made(fields, CONSTANT_ROWS, CONSTANT_COLUMNS, _rest())
        with pytest.raises(CorruptDataError, match="places:"):
            entropy.decode(memoryview(made), 12, context, 3)
    with pytest.raises(CorruptDataError, match="places:"):
        entropy.decode(memoryview(_made(right, CONSTANT_ROWS, CONSTANT_COLUMNS, _rest())), 0)
    # A parent that is not there, or has more levels than the stream says.
    made = _made((4, 1, 3, 2, 2), CONSTANT_ROWS, CONSTANT_COLUMNS, _rest())
    for parent in (None, context + 1):
        with pytest.raises(CorruptDataError, match="not those of a parent"):
            entropy.decode(memoryview(made), 12, parent, 4)


def test_classes_that_are_coded_by_their_places_are_refused() -> None:
    """Classes that are themselves coded by classes are refused."""
    for first in (True, False):
        data = CONSTANT_ROWS
        for _ in range(3000):
            blocks = (data, CONSTANT_COLUMNS) if first else (CONSTANT_ROWS, data)
            data = _made((1 if first else 12, 0, 1, 2, 0), *blocks)
        with pytest.raises(CorruptDataError, match=r"method 12 .* not for a stream inside another"):
            entropy.decode(memoryview(data), 12)


@pytest.mark.parametrize("precision", [12, 13, 16])
def test_tables_for_many_more_symbols_than_there_are_are_refused(
    precision: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables that are much larger than the symbols are refused."""
    certain = np.zeros((256, 2), np.uint32)
    certain[:, 1] = 1 << precision
    out = Writer()
    out.byte(12)
    for number in (1, 0, 1, 256, 0):  # columns, phase, contexts, classes, base
        out.varint(number)
    for _ in ("rows", "columns"):
        out.block(bytes([0, 0]))
    out.byte(precision)
    out.varint(2)
    out.block(pack_frequencies(certain, precision))
    data = memoryview(out.done())
    if precision == 12:
        laid_out: list[int] = []
        lay_out = rans._decode_table
        monkeypatch.setattr(rans, "_decode_table", lambda f, *rest: laid_out.append(int(f.sum())) or lay_out(f, *rest))
        assert entropy.decode(data, 2).tolist() == [1, 1]
        assert laid_out == [1 << precision]  # of the one context that occurs
    else:
        with pytest.raises(CorruptDataError, match="256 contexts"):
            entropy.decode(data, 2)


def test_no_memory_that_the_symbols_do_not_admit_to(fresh: np.random.Generator) -> None:
    """Decoding allocates a few bytes a symbol, and at most one table."""
    n = 1 << 20
    tracemalloc.start()
    try:
        for columns in (1, n, n // 2 + 1):
            made = _made((columns, columns - 1, 1, 256, 255), CONSTANT_ROWS, CONSTANT_COLUMNS, bytes([16, 128, 2, 0]))
            _right_length_or_corrupt(made, n, None, 0)
        assert tracemalloc.get_traced_memory()[1] < 8 * n + (1 << 26)
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------------ whole states


def states(count: int) -> list[dict[str, Any]]:
    """Return AdamW states with rarely active rows and columns."""
    rng = np.random.default_rng(3)
    scale = scales(rng, 500, 300, 1.2)
    w, m, v = rng.standard_normal(scale.shape), np.zeros(scale.shape), np.zeros(scale.shape)
    found = []
    for step in range(10 * count):
        g = scale * rng.standard_normal(w.shape) * (rng.random(w.shape) < np.minimum(scale, 1) / 2)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w = w - 5e-3 * np.minimum(scale, 3) * m / np.sqrt(v + 1e-12)
        if step % 10 == 9:
            moments = {"exp_avg": torch.from_numpy(m).float(), "exp_avg_sq": torch.from_numpy(v).float()}
            state = {0: {"step": torch.tensor(float(step)), **moments}}
            found.append({"model": {"fc.weight": torch.from_numpy(w).float()}, "optimizer": {"state": state}})
    return found


_COARSE = sp.Config([("weight", sp.Quantize(bins=24)), ("second moment", sp.SecondMoment(octaves=2))])


def chain(of: list[dict[str, Any]]) -> list[sp.Checkpoint]:
    found: list[sp.Checkpoint] = []
    for state in of:
        found.append(sp.compress(state, found[-1] if found else None, _COARSE))
    return found


@pytest.mark.parametrize("chunk", [70_001, 1 << 22])
def test_states_of_uneven_rows_and_columns(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored states do not depend on chunks, bytes, rebase or classes."""
    taken: set[tuple[bool, int, bytes]] = set()  # with a parent or not, the column of the first symbol, the stream
    decode = entropy.decode

    def spy(data: memoryview, n: int, context: Bytes | None = None, contexts: int = 0) -> Bytes:
        reader = Reader(data, "symbols")
        if reader.byte() >= entropy.PLACES:
            assert reader.varint() == 300
            taken.add((context is not None, reader.varint(), bytes(data)))
        return decode(data, n, context, contexts)

    monkeypatch.setattr(entropy, "decode", spy)
    with small_chunks(chunk):
        made = chain(states(3))
        previous = None
        for own in made:
            taken.clear()
            read = sp.Checkpoint.from_bytes(own.to_bytes(), previous)
            assert difference(sp.decompress(read), sp.decompress(own)) == ""
            # Both moments of the base, and weights of the others, wherever a chunk starts.
            found = Counter((parent, phase) for parent, phase, _ in taken)
            for first in range(0, min(2 * chunk, 150_000), chunk):
                assert read.is_delta or found[False, first % 300] == 2
                assert found[True, first % 300] == read.is_delta
            previous = read
        for parent in (None, made[0]):
            anew = restate(made[2], parent)
            known = sp.Checkpoint.from_bytes(anew.to_bytes(), parent)
            assert difference(sp.decompress(known), sp.decompress(made[2])) == ""
            again = sp.compress(states(3)[2], known, _COARSE).to_bytes()
            assert again == sp.compress(states(3)[2], made[2], _COARSE).to_bytes()
        assert difference(through_bytes(made[0]), sp.decompress(made[0])) == ""
    with small_chunks(chunk), monkeypatch.context() as patch:
        patch.setattr(placed, "_WORTH_PLACES", 1 << 60)
        others = chain(states(3))
        for own, other in zip(made, others, strict=True):
            assert difference(sp.decompress(own), sp.decompress(other)) == ""
            assert own.nbytes < other.nbytes
    assert sum(own.nbytes for own in made) < 0.98 * sum(other.nbytes for other in others)
