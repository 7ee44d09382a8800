"""Held-back families by optimizer: a mixer of patches and a convolution over text.

Optimizers that torch does not have come from `pytorch_optimizer` and `schedulefree`, which a family imports when its
training begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .families import NEAR_ZERO, Family, on_digits, on_text

Made = Callable[..., torch.optim.Optimizer]
PACKAGES = ("pytorch_optimizer", "schedulefree")
"""Where these optimizers come from; `pip install pytorch_optimizer schedulefree`."""


def _made(package: str, name: str, groups: Iterable[Any], **settings: Any) -> Any:
    return getattr(import_module(package), name)(list(groups), **settings)


def of_package(name: str) -> Made:
    """Return a constructor of an optimizer of `pytorch_optimizer`."""
    return partial(_made, "pytorch_optimizer", name)


def muon(groups: Iterable[dict[str, Any]], lr: float) -> Any:
    """Make a Muon of matrices, which takes Adam's steps for other parameters."""
    for group in (groups := list(groups)):
        group["use_muon"] = group["params"][0].ndim >= 2
    return _made("pytorch_optimizer", "Muon", groups, lr=lr)


def schedule_free(groups: Iterable[dict[str, Any]], lr: float) -> Any:
    """Make a schedule-free AdamW, whose second average of the weights is z."""
    return _made("schedulefree", "AdamWScheduleFree", groups, lr=lr)


# ------------------------------------------------------------------------------------------------------------ models


class _Mixed(nn.Module):
    """A block that mixes patches, then channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.across = nn.Sequential(nn.Linear(patches, 64), nn.GELU(), nn.Linear(64, patches))
        self.within = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Any:
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norms[1](x))


class _Mixer(nn.Module):
    """A mixer of 16 patches of 2 x 2 pixels."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Linear(4, width)
        self.blocks = nn.Sequential(_Mixed(16, width), _Mixed(16, width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Any:
        patches = F.unfold(images, 2, stride=2).transpose(1, 2)
        return self.head(self.norm(self.blocks(self.patches(patches))).mean(dim=1))


class _TextConvolution(nn.Module):
    """Two gated causal convolutions over bytes."""

    def __init__(self, width: int = 64, reach: int = 5) -> None:
        super().__init__()
        self.reach = reach
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, reach) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            before = F.pad(norm(x).transpose(1, 2), (self.reach - 1, 0))
            x = x + F.glu(layer(before), dim=1).transpose(1, 2)
        logits: Tensor = self.head(x)
        return logits.float()


# ---------------------------------------------------------------------------------------------------------- families


def _family(name: str, optimizer: Made, rate: float, more: dict[str, Any]) -> Callable[[], Family]:
    settings = {"end": NEAR_ZERO, "decay": 0.0, "optimizer": optimizer} | more
    if name.startswith("mixer"):
        return lambda: on_digits(name, _Mixer, 400, rate, **settings)
    return lambda: on_text(name, _TextConvolution, 400, rate, **settings)


_SETTINGS: dict[str, tuple[Made, float, dict[str, Any]]] = {
    "mixer, SGD": (partial(torch.optim.SGD, momentum=0.9), 0.1, {}),
    "mixer, Muon": (muon, 1e-2, {}),
    "mixer, schedule-free": (schedule_free, 1e-2, {"end": 1.0}),
    "mixer, SOAP": (of_package("SOAP"), 3e-3, {}),
    "text, Lion": (of_package("Lion"), 1e-3, {}),
    "text, ADOPT": (of_package("ADOPT"), 5e-3, {}),
    "text, AdEMAMix": (of_package("AdEMAMix"), 3e-3, {}),
    "text, bf16 masters": (torch.optim.AdamW, 5e-3, {"masters": True}),
}
"""Optimizer, learning rate, and further settings of the workload, each with an optimizer that no other family has."""
BY_OPTIMIZER = {name: _family(name, *settings) for name, settings in _SETTINGS.items()}
"""Constructors of families by name."""
