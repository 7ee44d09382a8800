"""Pretended devices ("pretended:0", ...): host memory under the rules of another device.

CPU tensors that pass for CUDA ones run the device's code, but a tensor of the host among them goes unnoticed, and would
fail on a GPU. Here torch itself says that a tensor lies on a device of its own; every operation runs on the host's
memory beneath, after a look at where its operands lie. Registering a kind of device cannot be undone and changes what
torch takes for the machine's accelerator, so this is for a process of its own.
"""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

if TYPE_CHECKING:
    from collections.abc import Iterator

KIND = "pretended"
HOST = torch.device("cpu")
_COPIES = ("copy_", "_to_copy")
_BY_PLACES = ("index", "index_put", "index_put_", "_index_put_impl_")


class Elsewhere(torch.Tensor):
    """A tensor on a pretended device; `inner` is the host's tensor over the same memory."""

    inner: torch.Tensor
    place: torch.device
    # __torch_dispatch__ sees every computation below functions; this saves a detour for each function.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, place: torch.device) -> Elsewhere:
        self: Elsewhere = torch.Tensor._make_subclass(  # type: ignore[attr-defined]
            cls, inner, False, dispatch_device=True, device_for_backend_keys=place
        )
        self.inner, self.place = inner, place
        return self

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()


class Rules(TorchDispatchMode):
    """Mode in which new tensors stay on the pretended device, and mixed operands are refused.

    Kernels of Triton's interpreter run on the memory beneath; one that is given anything of the host is refused too.
    """

    operations: ClassVar[int] = 0
    """Operations on tensors of such a device so far."""
    launches: ClassVar[int] = 0
    sent: ClassVar[list[tuple[torch.dtype, int]]] = []
    """Dtype and size of each array copied from the host to such a device."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


@contextmanager
def pretending() -> Iterator[None]:
    """Activate `Rules`, also for kernels of Triton's interpreter."""
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    launch, lifted = interpreter.GridExecutor.__call__, torch._C._only_lift_cpu_tensors()

    def ruled(self: Any, *args: Any, **constants: Any) -> Any:
        if len(places := {_place(a) for a in args if isinstance(a, torch.Tensor)}) != 1 or HOST in places:
            raise RuntimeError(f"{self.fn.__name__} is launched on tensors of {places}")
        Rules.launches += 1
        with _disable_current_modes():
            return launch(self, *map(_beneath, args), **constants)

    interpreter.GridExecutor.__call__ = ruled
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(data, device=...) makes a host's tensor and moves it
    try:
        with Rules():
            yield
    finally:
        interpreter.GridExecutor.__call__ = launch
        torch._C._set_only_lift_cpu_tensors(lifted)


def register() -> None:
    """Make the kind of device known to torch, once in a process."""
    _setup_privateuseone_for_python_backend(KIND)


def _place(x: torch.Tensor) -> torch.device:
    return x.place if isinstance(x, Elsewhere) else HOST


def _beneath(x: Any) -> Any:
    return x.inner if isinstance(x, Elsewhere) else x


def _run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if function is torch.ops.prim.device.default:
        return args[0].place
    operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    wanted = kwargs.get("device")
    if wanted is not None:
        wanted = torch.device(wanted)
        kwargs = {**kwargs, "device": HOST}
    where = _where(function, args, operands, wanted)
    if where != HOST:
        Rules.operations += 1
    if function.overloadpacket.__name__ in _COPIES and where != HOST and _place(operands[-1]) == HOST:
        Rules.sent.append((operands[-1].dtype, operands[-1].numel()))
    known = {id(_beneath(x)): x for x in operands}
    out = function(*tree_map(_beneath, args), **tree_map(_beneath, kwargs))

    def placed(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return known.get(id(x)) if id(x) in known else Elsewhere(x, where) if where != HOST else x

    return tree_map(placed, out)


def _where(function: Any, args: Any, operands: list[torch.Tensor], wanted: torch.device | None) -> torch.device:
    """Return the device of a result, by torch's rules for CUDA.

    Copies may cross; places to index by may be the host's; a tensor without axes may be the host's among others.
    """
    name = function.overloadpacket.__name__
    if name in _COPIES:
        return wanted if wanted is not None and name == "_to_copy" else _place(operands[0])
    if name in _BY_PLACES:
        operands = [x for x in (args[0], *args[2:3]) if isinstance(x, torch.Tensor)]
        if any(_place(i) not in (HOST, _place(args[0])) for i in args[1] if i is not None):
            raise RuntimeError(f"{function}: places of another device")
    with_axes = {_place(x) for x in operands if x.dim()}
    others = {_place(x) for x in operands} - {HOST}
    if len(with_axes) > 1 or len(others) > 1 or (others and with_axes == {HOST}):
        raise RuntimeError(f"{function}: operands on {sorted(str(_place(x)) for x in operands)}")
    return wanted if wanted is not None else next(iter(others), HOST)
