"""Classes of rows and columns: their definition."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from shrinkpoint.codec.entropy.matrices import Places, classes_of, off_mean, populations

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@pytest.fixture(name="fresh")
def _fresh() -> np.random.Generator:
    return np.random.default_rng(7)


def scales(rng: np.random.Generator, rows: int, columns: int, spread: float = 1.0) -> np.ndarray[Any, Any]:
    """Return products of row and column scales."""
    return np.asarray(np.exp(spread * (rng.standard_normal((rows, 1)) + rng.standard_normal((1, columns)))))


def uneven(rng: np.random.Generator, rows: int, columns: int, spread: float = 1.0) -> Bytes:
    """Return symbols from 0 on whose size depends on row and column."""
    found = np.rint(np.abs(scales(rng, rows, columns, spread) * rng.standard_normal((rows, columns))))
    return np.clip(found, 0, 39).astype(np.uint8).reshape(-1)


def plainly(symbols: Bytes, columns: int, start: int) -> Any:
    """Return (rows, columns, phase, base, classes) by definition; None without classes."""
    n = symbols.size
    most = min(16, max(2, n // 512))
    if n < 4096 or not 2 <= columns <= n // 2:
        return None
    phase = start % columns
    far: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    many: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    total = 0
    for i, s in enumerate(symbols.tolist()):
        total += min(s, 8)
        for axis, at in enumerate(divmod(phase + i, columns)):
            far[axis][at] += min(s, 8)
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
    for start in (0, columns - 1, 3 * columns + columns // 2):
        part = symbols[: symbols.size - start % 7]
        found, right = classes_of(part, columns, start), plainly(part, columns, start)
        assert (found is None) == (right is None)
        if found is not None:
            assert (found.rows.tolist(), found.columns.tolist(), found.phase, found.base, found.classes) == right


def test_what_has_no_classes(fresh: np.random.Generator) -> None:
    symbols = uneven(fresh, 64, 80)
    assert classes_of(symbols, 80, 0) is not None
    for columns in (0, 1, symbols.size, symbols.size // 2 + 1):
        assert classes_of(symbols, columns, 0) is None
    assert classes_of(np.zeros_like(symbols), 80, 0) is None  # nothing differs
    assert classes_of(symbols[:4095], 80, 0) is None


def test_the_class_of_a_place(fresh: np.random.Generator) -> None:
    rows, columns = fresh.integers(0, 17, 20).astype(np.uint8), fresh.integers(0, 17, 30).astype(np.uint8)
    for i, own in enumerate(Places(rows, columns, 17, 9, 11).of(555).tolist()):
        r, c = divmod(17 + i, 30)
        assert own == min(max(int(rows[r]) + int(columns[c]) - 9, 0), 10)


def test_a_line_is_as_far_off_the_mean_as_its_own_elements_say(fresh: np.random.Generator) -> None:
    """The distance of a line from the mean depends on its own elements only."""
    for _ in range(100):
        columns = int(fresh.integers(2, 40))
        phase, n = int(fresh.integers(0, columns)), int(fresh.integers(1, 300 * columns))
        for numbers in populations(n, columns, phase, -(-(phase + n) // columns)):
            sums = np.minimum(fresh.integers(0, 4, numbers.size), numbers) * int(fresh.integers(1, 4))
            one_by_one = [off_mean(sums[i : i + 1], numbers[i : i + 1], 0.7)[0] for i in range(sums.size)]
            assert off_mean(sums, numbers, 0.7).tolist() == one_by_one
