"""A kernel of your own, with its test and its bench row (docs/add-a-kernel.md).

TRITON_INTERPRET=1 python examples/own_kernel.py    # the interpreter stands in for the GPU; without it, on a GPU
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numba import njit

import shrinkpoint as sp
from shrinkpoint.bench.harness import Case, Job, Options, Peer, Row, cpu_clock, measure, same

BLOCK = 1024


def round_mantissa(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Round float32 values to the nearest with `bits` mantissa bits, ties away from zero.

    x: float32, any shape and device. bits: 0 ... 22. Values that are or would become infinite or NaN stay.
    """
    if x.dtype != torch.float32 or not 0 <= bits <= 22:
        raise sp.BadArgumentError(f"x is {x.dtype} and bits is {bits}; torch.float32 and 0 ... 22 are needed")
    words = x.contiguous().view(torch.int32).reshape(-1)
    out = on_gpu(words, 23 - bits) if words.is_cuda else torch.from_numpy(on_cpu(words.numpy(), 23 - bits))
    return out.view(torch.float32).reshape(x.shape)


def reference(words: np.ndarray[Any, Any], drop: int) -> np.ndarray[Any, Any]:
    """Return the rounded bit patterns, int32 [n]: the oracle, clear and slow."""
    rounded = ((words.astype(np.int64) + (1 << (drop - 1))) >> drop << drop).astype(np.int32)
    return np.where(((rounded >> 23 & 255) != 255) & ((words >> 23 & 255) != 255), rounded, words)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def on_cpu(words: np.ndarray[Any, Any], drop: int) -> np.ndarray[Any, Any]:
    """Return the same in one pass, compiled by Numba."""
    out = np.empty_like(words)
    for i in range(words.size):
        rounded = np.int32((np.int64(words[i]) + (1 << (drop - 1))) >> drop << drop)
        out[i] = rounded if (rounded >> 23 & 255) != 255 and (words[i] >> 23 & 255) != 255 else words[i]
    return out


@triton.jit
def _kernel(words, n, out, DROP: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    word = tl.load(words + at, at < n, 0)
    rounded = ((word.to(tl.int64) + (1 << (DROP - 1))) >> DROP << DROP).to(tl.int32)
    is_finite = (((rounded >> 23) & 255) != 255) & (((word >> 23) & 255) != 255)
    tl.store(out + at, tl.where(is_finite, rounded, word), at < n)


def on_gpu(words: torch.Tensor, drop: int) -> torch.Tensor:
    """Return the same on the device, a block of elements a program."""
    out = torch.empty_like(words)
    if words.numel():
        _kernel[(triton.cdiv(words.numel(), BLOCK),)](words, words.numel(), out, DROP=drop, SIZE=BLOCK)
    return out


def test_back_ends() -> list[str]:
    """Compare the available back ends with the oracle, any bit patterns; return their names."""
    calls = {"cpu": round_mantissa}
    if torch.cuda.is_available():
        calls["cuda"] = lambda x, bits: round_mantissa(x.cuda(), bits).cpu()
    if os.environ.get("TRITON_INTERPRET") == "1":
        calls["interpreter"] = lambda x, bits: on_gpu(x.view(torch.int32), 23 - bits).view(torch.float32)
    for size in (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 5000):
        words = np.random.default_rng(size).integers(-(1 << 31), 1 << 31, size).astype(np.int32)
        for bits in (0, 7, 22):
            for call in calls.values():
                rounded = call(torch.from_numpy(words).view(torch.float32), bits).view(torch.int32)
                np.testing.assert_array_equal(rounded.numpy(), reference(words, 23 - bits))
    return ["reference", *calls]


def bench_row() -> Row:
    """Check the kernel, then return its rate next to that of a copy of memory."""
    words = np.random.default_rng(0).standard_normal(1 << 20, np.float32).view(np.int32)
    memcpy, target = Peer("memcpy", lambda: lambda: np.copyto(target, words)), np.empty_like(words)

    def check() -> str:
        same("round_mantissa", on_cpu(words[:5000], 16), reference(words[:5000], 16))
        return "a prefix = oracle"

    job = Job(lambda: on_cpu(words, 16), check, words.nbytes, [memcpy])
    return measure(Case("round_mantissa", words.size, "GB/s", lambda: job, peers=("memcpy",)), Options(), cpu_clock)[0]


if __name__ == "__main__":
    print("agree to the bit:", ", ".join(test_back_ends()))
    print(bench_row())
