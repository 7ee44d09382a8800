"""Launch of GPU kernels: array conversion, device, and one fixed configuration per kernel.

Configurations are written next to each kernel instead of being tuned at run time. Every launch is then the same, no
warm-up is needed, and ahead-of-time compilation checks exactly the code that will run.
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
