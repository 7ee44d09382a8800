"""Run lengths: exact against the oracle and `itertools.groupby`; other tokens are refused."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.errors import BadArgumentError
from shrinkpoint.kernels.runlength import LONGEST, cpu, rle_decode, rle_encode
from shrinkpoint.kernels.runlength import reference as oracle

from .hostile import outcome

if TYPE_CHECKING:
    from .conftest import BackEnd

SIZES = [0, 1, 2, 3, 15, 16, 17, 18, cpu.SHORT + 1, 1000, cpu.BLOCK - 1, cpu.BLOCK, cpu.BLOCK + 1, 2 * cpu.BLOCK + 1]
CHANGE = [0.0, 0.01, 0.3, 1.0]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def sticky(rng: np.random.Generator, n: int, change: float) -> Bytes:
    """Return n values that change with probability `change`."""
    drawn = rng.choice(np.asarray([0, 1, 2, 17, 254, 255], np.uint8), n)
    keep = np.maximum.accumulate(np.where(rng.random(n) < change, np.arange(n), 0))
    return drawn[keep]


def grouped(values: Bytes, longest: int = LONGEST) -> list[int]:
    """Return run lengths by definition, run by run."""
    tokens = []
    for value, group in groupby(values.tolist()):
        run = len(list(group))
        pieces = [longest] * ((run - 1) // longest)
        for piece in [*pieces, run - sum(pieces)]:
            tokens += [-value, piece] if piece > 1 else [-value]
    return tokens


def test_tokens_and_back(sequential_back_end: BackEnd, fresh: np.random.Generator) -> None:
    module = sequential_back_end.module("runlength")
    for n in SIZES:
        for change in CHANGE:
            values = sticky(fresh, n, change)
            tokens = module.rle_encode(sequential_back_end.array(values))
            found = sequential_back_end.numpy(tokens)
            np.testing.assert_array_equal(found, np.asarray(grouped(values), np.int32), strict=True)
            back = sequential_back_end.numpy(module.rle_decode(tokens, n))
            np.testing.assert_array_equal(back, values, strict=True)


def test_oracle_on_strict(fresh: np.random.Generator) -> None:
    strict = pytest.importorskip("array_api_strict")
    for n in (0, 1, 2, 257):
        values = sticky(fresh, n, 0.3)
        tokens = oracle.rle_encode(strict.asarray(values))
        assert np.asarray(tokens._array).tolist() == grouped(values)
        assert np.asarray(oracle.rle_decode(tokens, n)._array).tolist() == values.tolist()


def test_strided_and_read_only(fresh: np.random.Generator) -> None:
    values = sticky(fresh, 3000, 0.2)
    assert rle_encode(values[::3]).tolist() == grouped(values[::3])
    assert rle_encode(values[::-1]).tolist() == grouped(values[::-1])
    values.flags.writeable = False
    tokens = rle_encode(values)
    tokens.flags.writeable = False
    np.testing.assert_array_equal(rle_decode(tokens, 3000), values)


@pytest.mark.parametrize("longest", [2, 3, 7])
def test_long_runs_are_cut(fresh: np.random.Generator, longest: int) -> None:
    """Runs beyond the longest are cut (tested with a smaller limit)."""
    for n in (1, longest, longest + 1, 2 * longest, 2 * longest + 1, 500):
        values = sticky(fresh, n, 0.1)
        tokens = np.zeros(2 * n, np.int32)
        written = cpu._encode(values, tokens, np.empty(8, np.int64), longest)
        assert tokens[:written].tolist() == grouped(values, longest)
        assert oracle.encode(values, longest).tolist() == grouped(values, longest)
        out = np.empty(n, np.uint8)
        assert cpu._decode(tokens[:written], out, longest)
        np.testing.assert_array_equal(out, values)
        np.testing.assert_array_equal(oracle.decode(tokens[:written], n, longest), values)


def test_the_longest_length_token() -> None:
    assert outcome(rle_decode, np.asarray([0, LONGEST], np.int32), 5) is None
    # 2**31 - 1 and a rest of the same value is a cut run, 2**31 - 2 and a rest is not.
    out = np.empty(1, np.uint8)
    assert not cpu._decode(np.asarray([0, LONGEST, 0], np.int32), out, LONGEST)


def mutations(tokens: list[int]) -> list[list[int]]:
    """Yield tokens with one left out, doubled, swapped or replaced."""
    out = [tokens[:k] for k in range(len(tokens))]
    out += [[*tokens, extra] for extra in (0, 1, 2, -1, tokens[-1])]
    for k, token in enumerate(tokens):
        out.append(tokens[:k] + tokens[k + 1 :])
        out.append([*tokens[:k], token, token, *tokens[k + 1 :]])
        out.append(tokens[:k] + tokens[k + 1 : k + 2] + [token] + tokens[k + 2 :])
        for new in (-(2**31), -256, -255, -1, 0, 1, 2, 3, token - 1, token + 1, 2**31 - 1):
            out.append([*tokens[:k], new, *tokens[k + 1 :]])
    return out


def test_hostile_tokens(fresh: np.random.Generator) -> None:
    for change in (0.1, 0.5, 1.0):
        values = sticky(fresh, 24, change)
        for wrong in mutations(grouped(values)):
            tokens = np.asarray(wrong, np.int32)
            for n in (0, 23, 24, 25, 40):
                found = outcome(rle_decode, tokens, n)
                assert found == outcome(oracle.rle_decode, tokens, n)
                assert found is None or (len(found) == n and grouped(np.asarray(found, np.uint8)) == wrong)


@given(st.lists(st.integers(-260, 20) | st.integers(-(2**31), 2**31 - 1), max_size=12), st.integers(0, 60))
def test_any_tokens(tokens: list[int], n: int) -> None:
    array = np.asarray(tokens, np.int32)
    found = outcome(rle_decode, array, n)
    assert found == outcome(oracle.rle_decode, array, n)
    if found is not None:
        assert len(found) == n
        assert rle_encode(np.asarray(found, np.uint8)).tolist() == tokens


@given(st.lists(st.integers(0, 3), max_size=200))
def test_any_values(values: list[int]) -> None:
    array = np.asarray(values, np.uint8)
    tokens = rle_encode(array)
    assert tokens.tolist() == grouped(array)
    assert rle_decode(tokens, len(values)).tolist() == values


def test_bad_arguments() -> None:
    tokens = np.zeros(1, np.int32)
    for call in (
        lambda: rle_encode(np.zeros(3, np.int32)),
        lambda: rle_encode(np.zeros((3, 1), np.uint8)),
        lambda: rle_encode([1, 2]),
        lambda: rle_decode(np.zeros(3, np.int64), 3),
        lambda: rle_decode(tokens, -1),
        lambda: rle_decode(tokens, 1.5),  # type: ignore[arg-type]
    ):
        with pytest.raises(BadArgumentError):
            call()
