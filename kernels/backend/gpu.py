"""Parts that GPU kernels share: launches with fixed configurations, and device functions.

Configurations are written next to each kernel instead of being tuned at run time. Every launch is then the same, no
warm-up is needed, and ahead-of-time compilation checks exactly the code that will run.

Device functions read bit patterns of floats and their log buckets, and add up sums by symbol. `WIDTH` and `M` are the
format's width and mantissa width. Patterns come as signed integers, as torch views them. For sums by symbol each
program counts and sums some blocks and writes a row of counts and sums; the rows are added up afterwards. Without
floating-point atomics, the same input always gives the same sums. Programs of one warp need no barrier for a sum.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
import triton
import triton.language as tl

from .arrays import Array, is_torch

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1 when this module was imported)."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel's fixed configuration for data of n elements.

    Args:
        block: elements one program handles, a power of two.
        warps: warps per program.
        registers: maximum number of registers per thread; with a limit, the assembler does not spill registers to
            increase occupancy. Default: no limit.
        interpreted: maximum number of elements per program in the interpreter, where a program takes about a
            millisecond.
        rounds: blocks that one program handles one after another (`ROUNDS`), so that its counts are added once; 2
            in the interpreter. Default: the kernel has no such loop.
    """

    block: int
    warps: int
    registers: int | None = None
    interpreted: int = 1 << 17
    rounds: int | None = None

    def size(self, n: int) -> int:
        """Elements that one program handles (`BLOCK`).

        In the interpreter about n / 4, so that several programs run.
        """
        if not INTERPRETED:
            return self.block
        return min(max(1 << (max(n // 4, 1) - 1).bit_length(), 1 << 10), self.interpreted)

    @property
    def repeats(self) -> int:
        """Blocks of a program."""
        return 1 if self.rounds is None else 2 if INTERPRETED else self.rounds

    def programs(self, n: int) -> int:
        """Number of programs that cover n elements."""
        return -(-n // (self.size(n) * self.repeats))

    def constants(self, n: int) -> dict[str, Any]:
        """`BLOCK`, `ROUNDS` of a kernel with that loop, and the compiler options.

        A multiply and an add are never fused, because no other back end fuses them.
        """
        loop = {} if self.rounds is None else {"ROUNDS": self.repeats}
        return {"BLOCK": self.size(n), **loop, **self.options}

    @property
    def options(self) -> dict[str, Any]:
        """The compiler options alone."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "enable_fp_fusion": False, **limit}

    def run(self, kernel: Any, n: int, *arguments: Any, **constants: Any) -> None:
        """Launch a kernel for n elements on the device of its first argument; nothing for n = 0.

        Args:
            kernel: has the compile-time parameters `BLOCK`, and `ROUNDS` if this configuration has rounds.
            n: elements that the programs share.
            arguments: inputs, the first a tensor, then outputs.
            constants: compile-time parameters of the kernel's own.
        """
        run(kernel, self.programs(n), *arguments, **constants, **self.constants(n))


def tensor(x: Array) -> torch.Tensor:
    """Return x as a contiguous torch tensor on its device, without a copy where possible."""
    t: torch.Tensor = x.detach().resolve_conj().resolve_neg() if is_torch(x) else torch.utils.dlpack.from_dlpack(x)
    return t.contiguous()


def like(t: torch.Tensor, x: Array) -> Array:
    """Return the result t in the library of x, on the same device."""
    if is_torch(x):
        return t
    return importlib.import_module("array_api_compat").array_namespace(x).from_dlpack(t)


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype for the bit patterns of a float, by its number of bytes (one byte: unsigned)."""


def bit_view(t: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as integers of the same width, flat, without a copy."""
    return t.reshape(-1).view(INTEGERS[t.element_size()])


def on(t: torch.Tensor) -> AbstractContextManager[Any]:
    """Context in which a launch on t's data goes to the current stream of t's device.

    The interpreter computes with NumPy, so its warnings about overflows and NaNs, which kernels allow, are suppressed.
    """
    return np.errstate(all="ignore") if INTERPRETED or not t.is_cuda else torch.cuda.device(t.device)


def run(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel with some programs on the device of its first argument; nothing for none."""
    if programs:
        with on(arguments[0]):
            kernel[(programs,)](*arguments, **constants)


def on_device(values: np.ndarray[Any, Any], t: torch.Tensor) -> torch.Tensor:
    """Return a NumPy array, such as a table, as a tensor on the device of t."""
    return torch.from_numpy(np.ascontiguousarray(values)).to(t.device)


@triton.jit
def elements(n, BLOCK: tl.constexpr):
    """The numbers of this program's elements, and which of them are below n."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return offsets, offsets < n


@triton.jit
def magnitude_bits(bits, WIDTH: tl.constexpr):
    """The pattern without its sign, as int32 (int64 for a 64-bit format)."""
    if WIDTH == 64:
        magnitude = bits & 0x7FFFFFFFFFFFFFFF
    elif WIDTH == 32:
        magnitude = bits & 0x7FFFFFFF
    elif WIDTH == 16:
        magnitude = bits.to(tl.int32) & 0x7FFF
    else:
        magnitude = bits.to(tl.int32) & 0x7F
    return magnitude


@triton.jit
def bucket_of(magnitude, bits, WIDTH: tl.constexpr, M: tl.constexpr):
    """Magnitude bucket j of a pattern without sign.

    0 for zero, 1 ... J for finite numbers, J + 1 for infinities and NaNs.

    A subnormal is an integer below `2**M`. The exact conversion to a float normalizes it: the exponent field then holds
    the position of its leading one, and the top mantissa bits hold the fraction.
    """
    nonfinite: tl.constexpr = (1 << (WIDTH - 1 - M)) - 1  # the exponent field of infinities and NaNs
    octaves: tl.constexpr = (1 << (WIDTH - 1 - M)) + M - 2
    normal = (magnitude >> (M - bits)) + (((M - 1) << bits) + 1)
    if WIDTH == 64:
        shifted = magnitude.to(tl.float64).to(tl.int64, bitcast=True) >> (52 - bits)
        subnormal = shifted - (1023 << bits) + 1
    else:
        shifted = magnitude.to(tl.float32).to(tl.int32, bitcast=True) >> (23 - bits)
        subnormal = shifted - (127 << bits) + 1
    field = magnitude >> M
    j = tl.where(field > 0, normal, subnormal)
    j = tl.where(magnitude == 0, 0, j)
    j = tl.where(field == nonfinite, (octaves << bits) + 1, j)
    return j.to(tl.int32)


@triton.jit
def pattern_of(x):
    """The bit pattern of a float as a signed integer of its width."""
    if x.dtype.primitive_bitwidth == 64:
        pattern = x.to(tl.int64, bitcast=True)
    elif x.dtype.primitive_bitwidth == 32:
        pattern = x.to(tl.int32, bitcast=True)
    else:
        pattern = x.to(tl.int16, bitcast=True)
    return pattern


@triton.jit
def widened(x, DOUBLE: tl.constexpr):
    """Convert x to float32, or to float64 with DOUBLE: exact for every narrower format."""
    if x.dtype == tl.bfloat16:  # the upper half of a float32
        y = (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif x.dtype == tl.float16:
        y = x.to(tl.float32)
    else:
        y = x
    if DOUBLE:
        y = y.to(tl.float64)
    return y


@triton.jit
def single(x):
    """Convert x to float32: exact for 16-bit formats, rounded to nearest from float64."""
    if x.dtype == tl.float64:
        y = x.to(tl.float32)
    else:
        y = widened(x, False)
    return y


@triton.jit
def order_key(s, WIDTH: tl.constexpr):
    """Map sign-and-magnitude patterns to ordered two's complement; its own inverse.

    For negative numbers all bits but the sign flip.
    """
    low: tl.constexpr = (1 << (WIDTH - 1)) - 1
    return tl.where(s < 0, s ^ low, s)


@triton.jit
def product_magnitude(x, gradient, DOUBLE: tl.constexpr):
    """Pattern of |gradient * x|: one product, rounded to float32, or to float64 with DOUBLE."""
    product = widened(gradient, DOUBLE) * widened(x, DOUBLE)
    if DOUBLE:
        magnitude = magnitude_bits(pattern_of(product), 64)
    else:
        magnitude = magnitude_bits(pattern_of(product), 32)
    return magnitude


@triton.jit
def special_levels(magnitude, sensitivity, protect, prune, protect_sensitivity, prune_sensitivity):
    """Decide which elements are protected and which are pruned, from patterns without sign.

    Thresholds are the patterns of the smallest magnitudes that reach them, so infinities and NaNs are always protected.
    Without a gradient `sensitivity` is None.
    """
    if magnitude.dtype == tl.int32:  # the patterns fit, and 64-bit comparisons cost two instructions
        protect = protect.to(tl.int32)
        prune = prune.to(tl.int32)
    protected = magnitude >= protect
    pruned = magnitude < prune
    if sensitivity is not None:
        if sensitivity.dtype == tl.int32:
            protect_sensitivity = protect_sensitivity.to(tl.int32)
            prune_sensitivity = prune_sensitivity.to(tl.int32)
        protected = protected | (sensitivity >= protect_sensitivity)
        pruned = pruned | (sensitivity < prune_sensitivity)
    return protected, pruned


@triton.jit
def rounded(x):
    """Round a float32 below 2**22 to the nearest whole number, halves to even.

    Past 2**23 no bits are left for a fraction.
    """
    return (x + 12582912.0) - 12582912.0


@triton.jit
def tally(symbol, value, inside, first, counts, sums):
    """Add the number of each of the 256 symbols to `counts`, and sums of `value` to `sums`.

    Sums are by symbol, in float64. Only symbols from `first` on are summed.
    """
    counts += tl.histogram(symbol, 256, mask=inside)
    wide = value.to(tl.float64)
    summed = inside & (symbol >= first)
    lowest = tl.min(tl.where(summed, symbol, 255), axis=0)
    highest = tl.max(tl.where(summed, symbol, 0), axis=0)
    symbols = tl.arange(0, 256)
    for s in range(lowest, highest + 1):
        total = tl.sum(tl.where(summed & (symbol == s), wide, 0.0), axis=0)
        sums = tl.where(symbols == s, sums + total, sums)
    return counts, sums


def tables(programs: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of counts and sums, one of each for every program."""
    counts = torch.empty((programs, 256), dtype=torch.int32, device=device)
    return counts, torch.empty((programs, 256), dtype=torch.float64, device=device)


def totals(counts: torch.Tensor, *sums: torch.Tensor) -> torch.Tensor:
    """Add up the rows of all programs: float64 [1 + number of sums, 256] on the host.

    Counts come first.
    """
    return torch.stack([counts.sum(0).to(torch.float64), *(s.sum(0) for s in sums)]).cpu()
