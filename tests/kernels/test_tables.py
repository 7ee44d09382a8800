"""Tables have one form each, and both readers agree on every input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.errors import BadArgumentError, CorruptDataError
from shrinkpoint.kernels.huffman import huffman_lengths
from shrinkpoint.kernels.rans import rans_frequencies
from shrinkpoint.kernels.tables import cpu
from shrinkpoint.kernels.tables import reference as oracle

if TYPE_CHECKING:
    from collections.abc import Callable

LONGEST = 24


def array(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8).copy()


def outcome(read: Callable[..., Any], *given: Any) -> list[Any] | None:
    try:
        return list(np.asarray(read(*given)).tolist())
    except CorruptDataError:
        return None


def damaged(data: bytes, rng: np.random.Generator) -> list[bytes]:
    """Return bytes with another end, and with single bits turned."""
    found = [data[:-1], data + b"\0", data + b"\1", data + bytes(5), b"\xff" * 4 + data, bytes(4)]
    for bit in rng.integers(0, 8 * len(data), 12).tolist() if data else []:
        other = bytearray(data)
        other[bit // 8] ^= 1 << bit % 8
        found.append(bytes(other))
    return found


counts = st.integers(1, 7).flatmap(
    lambda columns: st.lists(
        st.lists(st.sampled_from([0, 0, 1, 2, 3, 50, 4000]), min_size=columns, max_size=columns), min_size=1, max_size=6
    )
)


@given(counts, st.integers(8, 16), st.booleans(), st.integers(0, 2**32))
def test_frequencies(drawn: list[list[int]], precision: int, exact: bool, seed: int) -> None:
    table = rans_frequencies(np.array(drawn, np.int64), precision, exact=exact)
    rows, columns = table.shape
    data = cpu.pack(table, precision, False)
    assert data == oracle.pack_frequencies(table.tolist(), precision)
    np.testing.assert_array_equal(cpu.unpack(array(data), rows, columns, precision, False), table)
    assert oracle.unpack_frequencies(data, rows, columns, precision) == table.tolist()
    for other in damaged(data, np.random.default_rng(seed)):
        found = outcome(cpu.unpack, array(other), rows, columns, precision, False)
        assert found == outcome(oracle.unpack_frequencies, other, rows, columns, precision)
        assert found is None or oracle.pack_frequencies(found, precision) == other


@given(st.lists(st.sampled_from([0, 0, 1, 2, 30, 900, 10**6]), min_size=1, max_size=40), st.integers(0, 2**32))
def test_lengths(drawn: list[int], seed: int) -> None:
    lengths = huffman_lengths(np.array(drawn, np.int64)).astype(np.uint32)
    data = cpu.pack(lengths[None, :].copy(), LONGEST, True)
    assert data == oracle.pack_lengths(lengths.tolist(), LONGEST)
    np.testing.assert_array_equal(cpu.unpack(array(data), 1, lengths.size, LONGEST, True)[0], lengths)
    assert oracle.unpack_lengths(data, lengths.size, LONGEST) == lengths.tolist()
    for other in damaged(data, np.random.default_rng(seed)):
        found = outcome(cpu.unpack, array(other), 1, lengths.size, LONGEST, True)
        expected = outcome(oracle.unpack_lengths, other, lengths.size, LONGEST)
        assert found == (None if expected is None else [expected])
        assert expected is None or oracle.pack_lengths(expected, LONGEST) == other


@pytest.mark.parametrize("size", [1, 7, 40])
def test_random_bytes(fresh: np.random.Generator, size: int) -> None:
    """Both readers agree on random bytes, and the writer writes accepted ones again."""
    tables = 0
    for _ in range(2000):
        data = fresh.integers(0, 256, int(fresh.integers(0, 6)), np.uint8).tobytes()
        found = outcome(cpu.unpack, array(data), 1, size, LONGEST, True)
        tables += found is not None
        assert found == ([f] if (f := outcome(oracle.unpack_lengths, data, size, LONGEST)) is not None else None)
        assert found is None or cpu.pack(np.array(found, np.uint32), LONGEST, True) == data
        found = outcome(cpu.unpack, array(data), 3, size, 8, False)
        assert found == outcome(oracle.unpack_frequencies, data, 3, size, 8)
        assert found is None or cpu.pack(np.array(found, np.uint32), 8, False) == data
        tables += found is not None
    assert tables > 20


def test_the_largest_table_fits_its_buffer(fresh: np.random.Generator) -> None:
    """A table of 256 x 256 with extreme frequencies and distances comes back."""
    table = np.zeros((256, 256), np.uint32)
    for c in range(256):
        some = fresh.choice(256, int(fresh.integers(1, 5)), replace=False)
        table[c, some] = fresh.choice([1, 3, 5000, 8191], some.size)
        table[c, some[0]] = 0
        table[c, some[0]] = (1 << 16) - table[c].sum()
    data = cpu.pack(table, 16, False)
    np.testing.assert_array_equal(cpu.unpack(array(data), 256, 256, 16, False), table)


def test_lengths_of_no_complete_code_are_refused() -> None:
    with pytest.raises(BadArgumentError):
        cpu.pack(np.array([[1, 2, 0]], np.uint32), LONGEST, True)
