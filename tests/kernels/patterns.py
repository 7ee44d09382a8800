"""Arrays of given bit patterns in a back end's library, NaN payloads and -0.0 included."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from shrinkpoint.kernels.backend.floats import FORMATS
from shrinkpoint.kernels.planes import WIDTHS

if TYPE_CHECKING:
    from .conftest import BackEnd

ABSENT = {
    "numpy": ("bfloat16", "float8"),
    "strict": ("bfloat16", "float8", "float16"),
    "torch": (),
}


def random_patterns(rng: np.random.Generator, dtype: str, n: int) -> np.ndarray[Any, Any]:
    """n patterns of `dtype` as unsigned integers, edge cases mixed in; 0 and 1 for bool."""
    width = WIDTHS[dtype]
    unsigned = np.dtype(f"uint{width}")
    if dtype == "bool":
        return rng.integers(0, 2, n, dtype=np.uint8)
    out = rng.integers(0, 2**width - 1, n, dtype=unsigned, endpoint=True)
    edges = [0, 1, 2, 2 ** (width - 1) - 1, 2 ** (width - 1), 2 ** (width - 1) + 1, 2**width - 1]
    if dtype in FORMATS:
        fmt = FORMATS[dtype]
        infinity = ((1 << fmt.exponent) - 1) << fmt.mantissa
        edges += [(1 << fmt.mantissa) - 1, 1 << fmt.mantissa, infinity - 1, infinity, infinity + 1]
        edges += [e | 1 << (width - 1) for e in edges[-5:]]
    chosen = rng.random(n) < 0.3
    out[chosen] = rng.choice(np.array(edges, unsigned), int(chosen.sum()))
    return out


def array_of(back_end: BackEnd, u: np.ndarray[Any, Any], dtype: str) -> Any:
    """Return the array of `dtype` with patterns u; skip the test if the library lacks it."""
    if dtype.startswith(ABSENT[back_end.library]):
        pytest.skip(f"{back_end.library} has no {dtype}")
    if back_end.library == "torch":
        t = torch.from_numpy(u.copy()).view(getattr(torch, dtype))
        return t.cuda() if back_end.name == "gpu" and torch.cuda.is_available() else t
    return back_end.array(u.view(dtype)) if back_end.library == "numpy" else _strict(u.view(dtype))


def patterns_of(x: Any) -> np.ndarray[Any, Any]:
    """The patterns of an array of any library, in its shape."""
    if isinstance(x, torch.Tensor):
        unsigned = getattr(torch, f"uint{8 * x.element_size()}")
        out: np.ndarray[Any, Any] = x.cpu().contiguous().view(unsigned).numpy()
        return out
    a = np.ascontiguousarray(getattr(x, "_array", x)).reshape(x.shape)
    return a.view(f"uint{8 * a.dtype.itemsize}")


def assert_same_bits(back_end: BackEnd, found: Any, expected: np.ndarray[Any, Any]) -> None:
    """Check that arrays are equal bit for bit, with dtype and shape."""
    array = back_end.numpy(found)
    assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(patterns_of(array), patterns_of(expected))


def _strict(x: np.ndarray[Any, Any]) -> Any:
    return pytest.importorskip("array_api_strict").asarray(x)


def over_all_octaves(rng: np.random.Generator, n: int) -> np.ndarray:
    """n float32 values over some thirty octaves, a dozen of them special.

    Zeros, subnormals, huge numbers, infinities and NaNs.
    """
    x = (rng.normal(size=n) * np.exp(rng.normal(size=n) * 4)).astype(np.float32)
    at = rng.integers(0, max(n, 1), 12)[: min(n, 12)]
    x[at] = np.array([0, -0.0, np.nan, np.inf, -np.inf, 1e-42, 3e38, -3e38, 1, 2, 4, 1e-38], np.float32)[: at.size]
    return x
