"""Choice of the back end of a call, by the device of its array and by the cost of compiling.

Each subject writes down the functions of its back ends as protocols, which the type checker compares with the modules
`reference`, `cpu` and `gpu` of the subject. `tests/kernels/test_dispatch.py` compares the default values.

Compiling the kernels of a first checkpoint takes many seconds, and a small state runs in milliseconds. The
reference back end computes the same bits without a compiler. A process without compiled code in the disk cache
therefore uses it for small arrays, for `PATIENCE` seconds of each function. Only functions whose result is the same
to the bit take part, so that checkpoints do not depend on the back end (`docs/decisions/first-call.md`).
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np

from .arrays import Array, imported, on_gpu

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

B = TypeVar("B")


@dataclass(frozen=True)
class Dispatch(Generic[B]):
    """The back ends of a subject that has one for each device.

    Args:
        subject: folder of the subject in `kernels/`.
    """

    subject: str

    def __call__(self, x: Array) -> B:
        """Return the module `gpu` or `cpu`, by the device of x; see `cpu`."""
        return cast("B", module_of(self.subject, "gpu") if on_gpu(x) else cpu(self.subject))


@dataclass(frozen=True)
class OnHost(Generic[B]):
    """The back end of functions that run on the CPU only.

    Args:
        subject: folder of the subject in `kernels/`.
    """

    subject: str

    def __call__(self) -> B:
        """Return the module `cpu`; see `cpu`."""
        return cast("B", cpu(self.subject))


_IMPORTING = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A child process has only the thread that forked: it must not inherit the lock, or a module, half-way.
    os.register_at_fork(
        before=_IMPORTING.acquire, after_in_parent=_IMPORTING.release, after_in_child=_IMPORTING.release
    )


def load(name: str) -> ModuleType:
    """Import a module that needs Numba or Triton, while no other thread imports one.

    The modules of Numba import each other in circles. Two threads that enter such a circle at different modules wait
    for each other; Python then gives one of them a module that is imported in part, and its import fails.
    """
    module = imported(name)
    if module is not None:
        return module
    with _IMPORTING:
        return import_module(name)


@cache
def module_of(subject: str, name: str = "cpu") -> ModuleType:
    """Return `kernels.SUBJECT.NAME`, where the name is "cpu", "gpu" or "reference".

    Functions of a back end may also write to given memory.
    """
    return load(f"shrinkpoint.kernels.{subject}.{name}")


PATIENCE = 0.5
"""Processor seconds that a process spends in the reference form of each function; 0: it compiles at once."""
SMALL = 1 << 16
"""Most elements of all arguments together, and greatest integer argument, of a call not worth compiling."""
SAME = {
    "histogram": "bucket_index bucket_value log_histogram log_histogram_many used_buckets_many",
    "huffman": "huffman_codes huffman_decode huffman_encode huffman_lengths pack_lengths unpack_lengths",
    "kmeans": "least_losses weighted_kmeans_many",
    "levels": "joint_counts",
    "moment_grid": "grid_values",
    "packing": "pack_bits unpack_bits",
    "planes": "difference join_categories merge_planes split_categories split_planes undifference",
    "prediction": "low_rank_factors low_rank_predictions",
    "quantizer": "assign dequantize",
    "rans": "pack_frequencies rans_decode rans_encode rans_frequencies unpack_frequencies",
    "scales": "class_sums join_octaves pattern_classes residual_symbols residual_values row_column_sums split_octaves",
}
"""Functions of each module whose reference form gives the same bits."""
_STEPS: dict[str, Callable[..., int]] = {
    "least_losses": lambda centers, weights, ends, k: 32 * int(centers.shape[0]),
    "weighted_kmeans_many": lambda problems, ks, *_: sum(
        4 * int(centers.shape[0]) * k for (centers, _), k in zip(problems, ks, strict=True)
    ),
    "unpack_frequencies": lambda data, rows, columns, precision: rows * columns,
}
"""Number of steps of functions that take more than one step for an element of an argument."""

_found: dict[str, Any] = {}


def cpu(subject: str) -> Any:
    """Return `kernels.SUBJECT.cpu`, or stand-ins for its functions while compiling does not pay."""
    found = _found.get(subject)
    if found is None:
        cold = PATIENCE > 0 and subject in SAME and subject not in _on_disk()
        found = _found[subject] = _Functions(subject) if cold else module_of(subject)
    return found


def compile_at_once() -> None:
    """Compile every kernel of this process at its first call."""
    global PATIENCE
    PATIENCE = 0.0
    _found.clear()


class _Functions:
    """The functions of a kernel module, replaced by compiled forms once compilation pays."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        for name in SAME[subject].split():
            setattr(self, name, partial(self._call, name))
        self._spent = dict.fromkeys(SAME[subject].split(), 0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(module_of(self._subject), name)

    def _call(self, name: str, *given: Any, **named: Any) -> Any:
        """Call the reference form for small arguments, else the compiled form."""
        steps = _STEPS[name](*given, **named) if name in _STEPS else 0
        if max(steps, _work([*given, *named.values()])) > SMALL or named.get("out") is not None:
            return self._compiled(name)(*given, **named)
        begin = time.thread_time()
        try:
            with np.errstate(all="ignore"), _on_host():
                return getattr(module_of(self._subject, "reference"), name)(*given, **named)
        except Exception:  # the compiled form raises the documented error
            return getattr(module_of(self._subject), name)(*given, **named)
        finally:
            self._spent[name] += time.thread_time() - begin
            if self._spent[name] > PATIENCE:
                self._compiled(name)

    def _compiled(self, name: str) -> Callable[..., Any]:
        """Return the compiled form of a function, and use it from now on."""
        function: Callable[..., Any] = getattr(module_of(self._subject), name)
        setattr(self, name, function)
        return function


def _work(given: list[Any]) -> int:
    """Return the number of elements of the arguments; more than `SMALL` for an unknown type."""
    total = 0
    for one in given:
        if one is None or isinstance(one, bool | float | str):
            continue
        if isinstance(one, int | np.integer):
            total = max(total, int(one))
        elif isinstance(one, bytes | memoryview | np.generic):
            total += len(one) if isinstance(one, bytes | memoryview) else 1
        elif isinstance(one, list | tuple):
            total += _work(list(one))
        elif _is_plain(one):
            total += max(int(one.size if isinstance(one.size, int) else one.numel()), 0)
        elif _fields(one):
            total += _work([getattr(one, name) for name in _fields(one)])
        else:
            return SMALL + 1
    return total


def _on_host() -> AbstractContextManager[Any]:
    """Context in which new tensors are on the host, also with another default device of torch."""
    torch: Any = imported("torch")
    if torch is None or torch.get_default_device().type == "cpu":
        return nullcontext()
    return cast("AbstractContextManager[Any]", torch.device("cpu"))


def _is_plain(x: Any) -> bool:
    """Return whether x is exactly a NumPy array or a torch tensor, not a subclass."""
    torch = imported("torch")
    return type(x) is np.ndarray or (torch is not None and type(x) is torch.Tensor)


def _fields(x: Any) -> list[str]:
    """Return the names of the fields of a data class."""
    return list(getattr(x, "__dataclass_fields__", ()))


@cache
def _on_disk() -> frozenset[str]:
    """Return the subjects whose CPU back end has compiled code in a cache folder of Numba."""
    kernels = Path(__file__).parents[1]
    folder = os.environ.get("NUMBA_CACHE_DIR")
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"
    elsewhere = Path(folder) if folder else user

    def compiled(subject: str) -> bool:
        own = [] if folder else [kernels / subject / "__pycache__"]
        return any(any(at.glob("cpu.*.nbc")) for at in (*own, *elsewhere.glob(f"{subject}_*")))

    return frozenset(filter(compiled, SAME))
