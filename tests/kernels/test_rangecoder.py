"""Tables and sparse changes have one form each: both readers agree on every input."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shrinkpoint.kernels.errors import CorruptDataError
from shrinkpoint.kernels.rangecoder import cpu
from shrinkpoint.kernels.rangecoder import reference as oracle
from shrinkpoint.kernels.rans import rans_frequencies

if TYPE_CHECKING:
    from collections.abc import Callable

DRAWS = 300


class Liar(oracle._Encoder):
    """An encoder that sometimes writes a wrong value, and continues like a reader."""

    def __init__(self, rng: np.random.Generator, lies: float) -> None:
        super().__init__()
        self.rng, self.lies = rng, lies

    def split(self, probability: int, bit: int) -> int:
        return super().split(probability, bit ^ int(self.rng.random() < self.lies))


def said(rng: np.random.Generator, walk: Callable[..., object], *given: Any) -> bytes:
    """Return the bytes that a `Liar` writes, up to the oracle's end of reading."""
    liar = Liar(rng, float(rng.choice([0.0, 0.01, 0.05, 0.3])))
    with suppress(CorruptDataError, IndexError):  # a lie that cannot be followed
        walk(oracle._Walk(liar), *given)
    return liar.done()


def ends(data: bytes) -> list[bytes]:
    """Yield the bytes, and variants with another end."""
    last = data[-1:] or b"\0"
    other = [bytes([(last[0] + k) % 256]) for k in (-1, 1)]
    return [
        data,
        data[:-1],
        data + b"\0",
        data + b"\1",
        data + bytes(5) + b"\1",
        b"\xff" * 4 + data,
        *(data[:-1] + k for k in other),
    ]


def outcome(read: Callable[..., Any], *given: Any) -> list[Any] | None:
    try:
        return list(np.asarray(read(*given)).tolist())
    except CorruptDataError:
        return None


def array(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8).copy()


@pytest.mark.parametrize("columns", [1, 2, 5, 20])
def test_frequencies(fresh: np.random.Generator, columns: int) -> None:
    accepted = 0
    for _ in range(DRAWS):
        rows, precision = int(fresh.integers(1, 6)), int(fresh.integers(8, 17))
        counts = (fresh.gamma(0.4, 20, (rows, columns)) * fresh.choice([0, 1, 1, 40], (rows, columns))).astype(np.int64)
        table = rans_frequencies(counts, precision, exact=bool(fresh.integers(2))).tolist()
        for data in ends(said(fresh, oracle._walk_frequencies, table, precision)):
            expected = outcome(oracle.unpack_frequencies, data, rows, columns, precision)
            found = outcome(cpu.unpack, array(data), rows, columns, precision, False)
            assert found == expected, (data, rows, columns, precision)
            accepted += found is not None
    assert accepted > DRAWS // 10


@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_lengths(fresh: np.random.Generator, size: int) -> None:
    accepted = 0
    for _ in range(DRAWS):
        lengths = fresh.integers(0, 5, size).tolist()
        for data in ends(said(fresh, oracle._walk_lengths, lengths, 24)):
            expected = outcome(oracle.unpack_lengths, data, size, 24)
            found = outcome(cpu.unpack, array(data), 1, size, 24, True)
            assert found == (None if expected is None else [expected]), (data, size)
            accepted += found is not None
    assert accepted > 0


@pytest.mark.parametrize("n", [1, 3, 200, 100_000])
def test_changes(fresh: np.random.Generator, n: int) -> None:
    accepted = 0
    for _ in range(DRAWS if n <= 200 else 20):
        usual = fresh.integers(0, fresh.choice([2, 256]), n)
        symbols = usual.copy()
        at = fresh.choice(n, min(n, int(fresh.integers(1, 12))), replace=False)
        symbols[at] = np.clip(symbols[at] + fresh.integers(-2, 3, at.size), 0, 255)
        for data in ends(said(fresh, oracle._walk_changes, symbols.tolist(), usual.tolist())):
            expected = outcome(oracle.unpack_changes, data, usual.tolist())
            out = usual.astype(np.uint8)
            fine = cpu.unpack_changes(array(data), usual.astype(np.uint8), out)
            assert (out.tolist() if fine else None) == expected, (data, usual.tolist())
            accepted += fine
    assert accepted > 0
