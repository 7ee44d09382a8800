"""The fixtures themselves: poisoned memory, and sizes that cross a GPU's blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import pytest
import torch

from .conftest import POISON, BackEnd

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "ask",
    [
        lambda: np.empty((3, 5), np.float32),
        lambda: np.empty(()),
        lambda: np.empty_like(np.zeros((4, 3), order="F")),
        lambda: np.empty_like(np.zeros(7, np.uint16)),
        lambda: torch.empty((2, 3), dtype=torch.int16).numpy(),
        lambda: torch.empty_like(torch.zeros(3, 4).T).numpy(),
        lambda: torch.zeros(2).new_empty(9).numpy(),
        lambda: torch.empty_strided((2, 2), (2, 1)).numpy(),
    ],
)
def test_memory_is_poisoned(ask: Callable[[], Any]) -> None:
    x = ask()
    assert (np.ascontiguousarray(x).reshape(-1).view(np.uint8) == POISON).all()


@pytest.mark.usefixtures("poisoned")
def test_memory_for_nothing_and_for_objects_is_left_alone() -> None:
    assert np.empty(0).size == 0
    assert torch.empty(0).numel() == 0
    assert np.empty(2, object).tolist() == [None, None]


@pytest.mark.usefixtures("poisoned")
def test_what_asks_for_memory_itself_still_compiles() -> None:
    """Code that allocates memory compiles under the fixture of poisoned memory."""

    @numba.njit
    def doubled(x: Any) -> Any:
        out, other = np.empty(x.size, np.float64), np.empty_like(x)
        for i in range(x.size):
            other[i] = x[i]
            out[i] = 2 * other[i]
        return out

    assert doubled(np.array([1.0, 2.0])).tolist() == [2.0, 4.0]
    assert np.empty(1, np.uint8)[0] == POISON


def test_back_ends_are_poisoned(back_end: BackEnd, sequential_back_end: BackEnd) -> None:
    assert {back_end.name, sequential_back_end.name} <= {"reference", "cpu", "gpu"}
    assert np.empty(1, np.uint8)[0] == POISON


def test_sizes_cross_the_blocks_of_a_gpu(back_end: BackEnd) -> None:
    sizes = back_end.sizes([0, 7], "planes.ELEMENTS", "levels.SUBTRACT")
    if back_end.name != "gpu":
        assert sizes == [0, 7]
        return
    for block in (4096, 8192):
        assert {0, 7, block - 1, block, block + 1, 2 * block + 3} <= set(sizes)
