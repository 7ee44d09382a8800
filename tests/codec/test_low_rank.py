"""Low-rank predictions: detection, exact predictions, and sums of any shape."""

from __future__ import annotations

import builtins
import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import shrinkpoint as sp
from shrinkpoint.codec import entropy
from shrinkpoint.codec.base import CHUNK
from shrinkpoint.codec.entropy import context_coders as placed
from shrinkpoint.codec.entropy import low_rank as lowrank
from shrinkpoint.codec.entropy.low_rank import CLASSES, HALF_STEPS, Factors, expected, factors_of, signed
from shrinkpoint.kernels.prediction import orthogonal_directions, reference

from .common import small_chunks, threads

pytestmark = pytest.mark.filterwarnings("error")

NpArray = np.ndarray[Any, Any]


@pytest.fixture(name="fixed")
def _fixed() -> np.random.Generator:
    return np.random.default_rng(7)


def symbols_of(numbers: NpArray) -> NpArray:
    """Map 0, -1, 1, -2, ... to 1, 2, 3, 4, ..."""
    n = numbers.astype(np.int64).reshape(-1)
    return np.where(n >= 0, 2 * n + 1, -2 * n).astype(np.uint8)


def planted(rng: np.random.Generator, rows: int, columns: int, strengths: list[float], noise: float = 0.5) -> NpArray:
    """Return a rounded int8 sum of outer products with these strengths, and noise."""
    found = noise * rng.standard_normal((rows, columns))
    for strength in strengths:
        found += strength * rng.standard_normal((rows, 1)) * rng.standard_normal((1, columns))
    return np.clip(np.rint(found), -127, 127).astype(np.int8)


def predicted(factors: Factors, n: int) -> NpArray:
    """Return the predictions of the factors before rounding."""
    both = factors.rows.astype(np.int64) @ factors.columns.T.astype(np.int64)
    found: NpArray = both.reshape(-1)[factors.phase : factors.phase + n] / 2.0 ** (factors.shift + 1)
    return found


def caught(numbers: NpArray, factors: Factors) -> float:
    """Return the energy that the prediction removes from the numbers."""
    x = numbers.reshape(-1).astype(np.float64)
    return float((x**2).sum() - ((x - predicted(factors, x.size)) ** 2).sum())


def same(one: Factors | None, other: Factors | None) -> bool:
    """Return whether two sets of factors are equal."""
    assert one is not None
    assert other is not None
    numbers = (one.phase, one.shift) == (other.phase, other.shift)
    return numbers and all((getattr(one, s) == getattr(other, s)).all() for s in ("rows", "columns"))


def test_symbols_and_their_numbers() -> None:
    symbols = np.arange(256, dtype=np.uint8)
    right = [s >> 1 if s & 1 else -(s >> 1) for s in range(256)]
    assert signed(symbols).tolist() == right
    assert signed(symbols).dtype == np.int8
    assert symbols.tolist() == list(range(256))
    assert (signed(symbols_of(np.arange(-127, 128))) == np.arange(-127, 128)).all()


def test_what_a_class_predicts() -> None:
    found = expected(np.arange(CLASSES, dtype=np.uint8))
    assert found.dtype == np.int8
    assert found.tolist() == [math.floor(Fraction(c - HALF_STEPS, 2) + Fraction(1, 2)) for c in range(CLASSES)]


@pytest.mark.parametrize(("rows", "columns"), [(200, 300), (1000, 40), (40, 1000), (64, 64)])
def test_planted_structure_is_found(fixed: np.random.Generator, rows: int, columns: int) -> None:
    """Planted outer products are found up to noise and rounding."""
    numbers = planted(fixed, rows, columns, [1.5, 1.2, 1.0])
    factors = factors_of(symbols_of(numbers), columns, 0)
    assert factors is not None
    energy = float((numbers.astype(float) ** 2).sum())
    assert factors.rows.shape[1] == factors.columns.shape[1] in (3, 4)
    assert energy - caught(numbers, factors) <= 1.5 * (0.25 + 1 / 12) * numbers.size < energy / 4


def test_as_much_as_singular_vectors_catch(fixed: np.random.Generator) -> None:
    numbers = planted(fixed, 200, 300, [1.6 * 0.8**k for k in range(12)], noise=0.3)
    factors = factors_of(symbols_of(numbers), 300, 0)
    assert factors is not None
    values = np.linalg.svd(numbers.astype(np.float64), compute_uv=False)
    assert factors.rows.shape == (200, 8)
    assert caught(numbers, factors) >= 0.9 * float((values[:8] ** 2).sum())


def test_the_strongest_come_first(fixed: np.random.Generator) -> None:
    numbers = planted(fixed, 256, 256, [0.5, 2.0, 1.0])
    factors = factors_of(symbols_of(numbers), 256, 0)
    assert factors is not None
    sizes = [float((factors.rows[:, k].astype(float) ** 2).sum()) for k in range(3)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("deviation", [0.1, 0.4, 1.0, 4.0, 40.0])
@pytest.mark.parametrize(("rows", "columns"), [(300, 200), (2000, 16), (16, 2000), (64, 64), (4, 4096), (4096, 4)])
def test_noise_has_no_factors(fixed: np.random.Generator, rows: int, columns: int, deviation: float) -> None:
    numbers = planted(fixed, rows, columns, [], deviation)
    assert factors_of(symbols_of(numbers), columns, 3) is None


def test_noise_is_told_by_a_glance(fixed: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise has no low-rank prediction."""
    sought: list[int] = []
    directions = lowrank._directions

    def seek(values: NpArray, columns: int, rank: int) -> NpArray:
        sought.append(values.size)
        return directions(values, columns, rank)

    monkeypatch.setattr(lowrank, "_directions", seek)
    for strengths, most in (([], 1), ([0.6], 2)):
        sought.clear()
        symbols = symbols_of(planted(fixed, 64, 8192, strengths, 1.0))
        assert (factors_of(symbols, 8192, 0) is None) == (not strengths)
        assert len(sought) == most
        assert sought[0] <= lowrank._GLANCE // 2


@pytest.mark.parametrize(
    ("n", "columns"), [(0, 8), (1, 8), (4, 1), (16, 4), (31, 8), (4096, 1), (4096, 3), (3 * 999, 999), (100, 101)]
)
def test_nothing_is_sought_in_what_is_small_or_narrow(n: int, columns: int) -> None:
    """Small or narrow matrices have no low-rank prediction."""
    assert factors_of(np.full(n, 3, np.uint8), columns, 0) is None


def test_nothing_is_sought_in_zeros() -> None:
    for symbol in (0, 1):  # both stand for 0
        assert factors_of(np.full(4096, symbol, np.uint8), 64, 5) is None


@pytest.mark.parametrize("number", [-6, -2, -1, 1, 2, 3])
def test_numbers_that_are_all_alike(number: int) -> None:
    factors = factors_of(symbols_of(np.full(4096, number)), 64, 0)
    assert factors is not None
    assert factors.rows.shape == factors.columns.shape == (64, 1)
    assert (expected(factors.classes(4096)) == max(min(number, 3), -3)).all()


@pytest.mark.parametrize("start", [0, 1, 29, 30, 57 * 30 + 11])
@pytest.mark.parametrize("n", [30 * 200, 30 * 200 + 17])
def test_predictions_are_sums_of_products(fixed: np.random.Generator, start: int, n: int) -> None:
    """Predictions of a part within rows equal sums of products in plain Python."""
    numbers = planted(fixed, 300, 30, [1.5, 1.0]).reshape(-1)[start : start + n]
    factors = factors_of(symbols_of(numbers), 30, start)
    assert factors is not None
    assert factors.phase == start % 30
    assert factors.rows.shape[0] == -(-(start % 30 + n) // 30)
    assert 1 <= factors.shift <= 20
    assert factors.rows.dtype == factors.columns.dtype == np.int8
    rows, columns = factors.rows.tolist(), factors.columns.tolist()
    found = factors.classes(n)
    for t, klass in enumerate(found.tolist()):
        i, j = divmod(factors.phase + t, 30)
        total = Fraction(sum(a * b for a, b in zip(rows[i], columns[j], strict=True)), 2**factors.shift)
        half_steps = math.floor(total + Fraction(1, 2))
        assert klass == max(min(half_steps, HALF_STEPS), -HALF_STEPS) + HALF_STEPS
    # They depend on this part only, not on its neighbours.
    assert caught(numbers, factors) > 0.7 * float((numbers.astype(float) ** 2).sum())


def test_any_layout(fixed: np.random.Generator) -> None:
    symbols = symbols_of(planted(fixed, 100, 60, [1.5, 1.0]))
    right = factors_of(symbols, 60, 7)
    apart = np.repeat(symbols, 3)[::3]
    shifted = np.concatenate([np.zeros(5, np.uint8), symbols])[5:]
    frozen = symbols.copy()
    frozen.flags.writeable = False
    before = symbols.copy()
    for other in (apart, shifted, frozen, symbols[::-1].copy()[::-1]):
        assert same(factors_of(other, 60, 7), right)
    assert (symbols == before).all()
    assert right is not None
    spread = Factors(np.repeat(right.rows, 2, axis=1)[:, ::2], np.asfortranarray(right.columns), 7, right.shift)
    assert (spread.classes(6000) == right.classes(6000)).all()


def test_any_thread_finds_the_same(fixed: np.random.Generator) -> None:
    matrices = [symbols_of(planted(fixed, 500, 80, [1.5 - k / 10, 1.0])) for k in range(6)]
    alone = [factors_of(m, 80, 0) for m in matrices]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda m: factors_of(m, 80, 0), [*matrices, *matrices]))
    assert all(map(same, together, [*alone, *alone]))


@pytest.mark.parametrize(("start", "n"), [(0, 60 * 200), (7, 60 * 200), (61, 60 * 150 + 13)])
def test_streams_come_back(fixed: np.random.Generator, start: int, n: int) -> None:
    numbers = planted(fixed, 220, 60, [1.5, 1.0]).reshape(-1)[start : start + n]
    symbols = symbols_of(numbers)
    coded = entropy.encode(symbols, None, 60, start, numbers=True)
    assert coded[0] == entropy.PRODUCTS
    assert len(coded) < 0.9 * len(entropy.encode(symbols, None, 60, start))
    assert (entropy.decode(memoryview(coded), n) == symbols).all()


def test_states_have_the_same_bytes_on_any_number_of_threads(
    fixed: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of threads does not change the bytes, with chunks within rows."""
    phases: list[int] = []

    def noted(symbols: NpArray, columns: int, start: int) -> Factors | None:
        factors = factors_of(symbols, columns, start)
        phases.extend([] if factors is None else [factors.phase])
        return factors

    monkeypatch.setattr(placed, "factors_of", noted)
    shape = 150, 70
    moments = [planted(fixed, *shape, [1.5, 1.0]).astype(np.float32) for _ in range(3)]
    entries = {i: {"exp_avg": m, "exp_avg_sq": np.ones(shape, np.float32)} for i, m in enumerate(moments)}
    state = {"optimizer": {"state": entries}}
    found = []
    with small_chunks(4000):
        for count in (1, 4):
            with threads(count):
                found.append(sp.compress(state).to_bytes())
        restored = sp.decompress(sp.Checkpoint.from_bytes(found[0]))
    assert found[0] == found[1]
    assert sorted(phases) == sorted(6 * [0, 4000 % 70, 8000 % 70])
    for i, m in enumerate(moments):
        kept = restored["optimizer"]["state"][i]["exp_avg"]
        assert np.abs(kept - m).max() <= 0.51


def extremes() -> dict[str, NpArray]:
    """Matrices of 128 x 128 of the largest numbers."""
    shape = 128, 128
    one_row, one_column = np.zeros(shape, int), np.zeros(shape, int)
    one_row[5], one_column[:, 5] = -127, 127
    checkered = np.where(np.indices(shape).sum(axis=0) % 2, 127, -127)
    one_number = np.zeros(shape, int)
    one_number[-1, -1] = -127
    return {
        "highest": np.full(shape, 127),
        "lowest": np.full(shape, -127),
        "one row": one_row,
        "one column": one_column,
        "checkered": checkered,
        "one number": one_number,
        "halves": np.where(np.arange(128) < 64, 127, -127) * np.ones(shape, int),
    }


@pytest.mark.parametrize("which", list(extremes()))
def test_extremes_warn_of_nothing(which: str) -> None:
    symbols = symbols_of(extremes()[which])
    for start in (0, 77):
        with np.errstate(all="raise"):
            factors = factors_of(symbols, 128, start)
        if factors is not None:
            assert factors.classes(symbols.size).max() < CLASSES


@pytest.mark.parametrize("columns", [4, 2048, CHUNK // 4])
@pytest.mark.parametrize("phase", [0, 3])
def test_the_largest_chunk(columns: int, phase: int) -> None:
    """Extreme numbers in the largest chunk do not overflow."""
    n = CHUNK - phase * (columns == CHUNK // 4)
    signs = np.where(np.arange(phase, phase + n) // columns % 2, 127, -127)
    with np.errstate(all="raise"):
        factors = factors_of(symbols_of(signs), columns, phase)
    if factors is not None:
        found = factors.classes(n)
        assert ((found > HALF_STEPS) == (signs > 0)).all()
    assert factors is not None or columns != 2048


ROWS = CHUNK // 4 + 1
"""Most rows of a chunk in which factors are sought."""


def test_energies_of_the_most_rows() -> None:
    """Energies of the most rows fit in 64 bits, because large numbers are shifted down."""
    for number, kept in ((2**20 - 1, 2**20 - 1), (-(2**40) + 1, -(2**20)), (2**33, 2**19)):
        sums = np.full((ROWS, 1), number, np.int64)
        assert ROWS * kept**2 < 2**63
        shift = max(0, abs(number).bit_length() - 20)
        assert lowrank._energies(sums, np.asarray([3]))[0] == ROWS * kept**2 * 4.0**shift / 3


def test_gram_matrix_of_the_most_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gram matrices of the most rows stay below 2**53, exact in any order of summation."""
    grams: list[list[list[int]]] = []

    def none(gram: list[list[int]]) -> list[None]:
        grams.append(gram)
        return [None] * len(gram)

    monkeypatch.setattr(reference, "_inverse_root", none)
    vectors = np.full((ROWS, 2), -(2**40) + 1, np.int64)
    vectors[:, 1] = 2**40 - 1
    assert not reference._orthogonal(vectors).any()
    # Shifts round down, so that a negative one may be 2**15 itself.
    low, high = -(2**15), 2**15 - 1
    assert grams == [[[ROWS * low * low, ROWS * low * high], [ROWS * low * high, ROWS * high * high]]]
    assert ROWS * low * low < 2**53


def test_directions_are_orthogonal(fixed: np.random.Generator) -> None:
    vectors = fixed.integers(-1000, 1000, (500, 6))
    vectors[:, 3] = 2 * vectors[:, 1] - vectors[:, 0]  # says nothing new
    found = orthogonal_directions(vectors[None])[0].astype(np.int64)
    assert not found[:, 3].any()
    assert np.abs(found).max() == 63
    rest = np.delete(found, 3, axis=1)
    gram = rest.T @ rest
    assert np.abs(gram - np.diag(np.diag(gram))).max() < 0.01 * np.diag(gram).min()
    # And they span what the vectors do.
    combined = np.linalg.lstsq(rest.astype(float), vectors.astype(float), rcond=None)[0]
    assert np.abs(rest @ combined - vectors).max() < 30


def test_nothing_depends_on_how_python_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results do not depend on the float summation of the Python version."""
    gram = [[10**12 // (i + j + 1) for j in range(8)] for i in range(8)]
    before = reference._inverse_root(gram)
    assert before[0] == [1e-6]
    monkeypatch.setattr(builtins, "sum", math.fsum)
    assert reference._inverse_root(gram) == before


def test_signs_are_independent() -> None:
    signs = lowrank._signs(4096, 8)
    assert signs.dtype == np.int8
    assert (np.abs(signs) == 1).all()
    gram = signs.T.astype(int) @ signs
    assert np.abs(gram - 4096 * np.eye(8, dtype=int)).max() < 4 * 64  # four deviations
    assert (lowrank._signs(100, 8) == signs[:100]).all()
