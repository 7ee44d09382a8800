"""Distortion on the GPU: sums of each block in float64, added up at the end.

These sums report an error and control an encoder in coarse steps (`codec.weights.level_assignment`), so their order may
differ between back ends.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..backend.arrays import Array
from ..backend.gpu import Launch, elements, tensor, widened
from . import Distortion

SUMS = Launch(block=1024, warps=8)


@triton.jit
def distortion_kernel(x_ptr, y_ptr, n: tl.int64, sums_ptr, BLOCK: tl.constexpr):
    """Squared error, squared norm and largest relative error of each block, over the finite x."""
    block = tl.program_id(0).to(tl.int64)
    offsets, inside = elements(n, BLOCK)
    x = widened(tl.load(x_ptr + offsets, mask=inside, other=0.0), True)
    y = widened(tl.load(y_ptr + offsets, mask=inside, other=0.0), True)
    finite = tl.abs(x) < float("inf")
    x = tl.where(finite, x, 0.0)
    d = tl.where(finite, y - x, 0.0)
    size = tl.abs(x)
    relative = tl.where(size > 0.0, tl.abs(d) / tl.where(size > 0.0, size, 1.0), tl.where(d != 0.0, float("inf"), 0.0))
    relative = tl.where(relative == relative, relative, 0.0)  # a NaN counts as 0
    tl.store(sums_ptr + 3 * block, tl.sum(d * d, axis=0))
    tl.store(sums_ptr + 3 * block + 1, tl.sum(x * x, axis=0))
    tl.store(sums_ptr + 3 * block + 2, tl.max(relative, axis=0))


def distortion(x: Array, y: Array) -> Distortion:
    """See `shrinkpoint.kernels.error_sums.distortion`."""
    a, b = tensor(x), tensor(y)
    if a.numel() == 0:
        return Distortion(0.0, 0.0, 0.0)
    sums = torch.empty((SUMS.programs(a.numel()), 3), dtype=torch.float64, device=a.device)
    SUMS.run(distortion_kernel, a.numel(), a, b, a.numel(), sums)
    error, norm, largest = torch.cat([sums[:, :2].sum(0), sums[:, 2].amax(0, keepdim=True)]).tolist()
    return Distortion(error, norm, largest)
