"""A tensor subclass like those of low-bit optimizers: codes, a scale and a context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Coded(Tensor):
    """float32 values as uint8 codes times a scale a row."""

    codes: Tensor
    scale: Tensor
    context: tuple[Any, ...]

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, context: tuple[Any, ...]) -> Coded:
        made: Coded = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)  # type: ignore[attr-defined]
        return made

    def __init__(self, codes: Tensor, scale: Tensor, context: tuple[Any, ...]) -> None:
        self.codes, self.scale, self.context = codes, scale, context

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        return ["codes", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: tuple[Any, ...], size: Any, stride: Any) -> Coded:
        if tuple(size) != tuple(inner["codes"].shape) or stride != inner["codes"].stride():
            raise ValueError("size and stride are not those of the codes")
        return cls(inner["codes"], inner["scale"], context)

    def plain(self) -> Tensor:
        """Return the float32 values."""
        return self.codes.float() * self.scale[:, None]

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            (x,) = args
            return cls(x.codes, x.scale, x.context)
        raise NotImplementedError(f"{function} of {cls.__qualname__}")


def coded(t: int) -> Coded:
    """Return codes that change from moment to moment."""
    codes = ((torch.arange(8 * 600) * 37 + t * (torch.arange(8 * 600) % 50 == 0)) % 251).to(torch.uint8).reshape(8, 600)
    context = (
        True,
        None,
        3,
        0.5,
        "text",
        b"\x00",
        [1, [2]],
        {"k": torch.bfloat16, 2: torch.Size([3, 4])},
        torch.device("cpu"),
    )
    return Coded(codes, torch.linspace(0.1, 2.0, 8) + t, context)
