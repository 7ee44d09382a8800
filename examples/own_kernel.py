"""A kernel like those of this package: oracle, Numba, Triton, one dispatch by device.

Everything is decided on the bits of the numbers, so that all three agree to the bit, on every machine.

python examples/own_kernel.py                       # on a GPU too where there is one
TRITON_INTERPRET=1 python examples/own_kernel.py    # Triton's interpreter stands in for the GPU
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numba import njit

MANTISSA = 23
BLOCK = 1024


def round_mantissa(x: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 values, rounded to the nearest that has `bits` mantissa bits, ties away from zero.

    `w = bits_of(x) + 2**(22 - bits)`, its lowest `23 - bits` bits cleared; x itself where that is not finite.

    Args:
        x: float32, any shape and device.
        bits: 0 ... 22.

    Example:
        >>> round_mantissa(torch.tensor([1.3, -0.7]), 1).tolist()
        [1.5, -0.75]
    """
    if x.dtype != torch.float32 or not 0 <= bits < MANTISSA:
        raise ValueError(f"x is {x.dtype} and bits {bits}; torch.float32 and 0 ... {MANTISSA - 1} are needed")
    flat = x.contiguous().reshape(-1)
    if flat.is_cuda:
        return on_gpu(flat, bits).reshape(x.shape)
    return torch.from_numpy(on_cpu(flat.numpy().view(np.uint32), bits).view(np.float32)).reshape(x.shape)


def reference(words: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """The oracle: clear, slow, on bit patterns; uint32 [n] in and out."""
    drop = MANTISSA - bits
    rounded = (words.astype(np.uint64) + (1 << (drop - 1))) >> drop << drop
    finite = ((rounded >> MANTISSA & 255) != 255) & ((words >> MANTISSA & 255) != 255)
    return np.where(finite, rounded, words).astype(np.uint32)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def on_cpu(words: np.ndarray[Any, Any], bits: int) -> np.ndarray[Any, Any]:
    """Numba: one pass; uint32 [n] in and out."""
    out = np.empty_like(words)
    drop = np.uint32(MANTISSA - bits)
    half, mask = np.uint32(1) << (drop - np.uint32(1)), ~((np.uint32(1) << drop) - np.uint32(1))
    for i in range(words.size):
        word = words[i]
        rounded = (word + half) & mask
        finite = (rounded >> np.uint32(MANTISSA)) & np.uint32(255) != np.uint32(255)
        odd = (word >> np.uint32(MANTISSA)) & np.uint32(255) == np.uint32(255)
        out[i] = rounded if finite and not odd else word
    return out


@triton.jit
def _kernel(
    # inputs
    words,
    n,
    # outputs
    out,
    # constants
    DROP: tl.constexpr,
    SIZE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    word = tl.load(words + at, at < n, 0)
    # The sum may pass into the sign only from a NaN, which is put back.
    rounded = (word + (1 << (DROP - 1))) >> DROP << DROP
    finite = ((rounded >> 23) & 255) != 255
    odd = ((word >> 23) & 255) == 255
    tl.store(out + at, tl.where(finite & ~odd, rounded, word), at < n)


def on_gpu(flat: torch.Tensor, bits: int) -> torch.Tensor:
    """Triton: float32 [n] in and out, on the device."""
    out = torch.empty_like(flat)
    grid = (triton.cdiv(flat.numel(), BLOCK),)
    if flat.numel():
        _kernel[grid](flat.view(torch.int32), flat.numel(), out.view(torch.int32), DROP=MANTISSA - bits, SIZE=BLOCK)
    return out


def main() -> list[str]:
    """Compare the available back ends with the oracle; return their names."""
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append("cuda")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    rng = np.random.default_rng(0)
    for size in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5000):
        words = rng.integers(0, 1 << 32, size, dtype=np.uint32)
        x = torch.from_numpy(words.view(np.float32))
        for bits in (0, 7, 22):
            expected = reference(words, bits)
            for device in devices:
                found = round_mantissa(x.to(device), bits).cpu().numpy().view(np.uint32)
                assert np.array_equal(found, expected), (device, size, bits)
            if interpreted:
                assert np.array_equal(on_gpu(x, bits).numpy().view(np.uint32), expected), (size, bits)
    return devices + ["interpreter"] * interpreted


if __name__ == "__main__":
    print("agree to the bit:", ", ".join(["reference", *main()]))
