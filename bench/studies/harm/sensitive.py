"""Four families that small errors change: three chose the settings of `presets.precise()`.

A physics-informed network, a precise regression, a state-space model, and modular addition that is learnt late
(grokking). Their losses fall by many orders of magnitude, so that an error that a classifier does not notice is a large
part of the remaining loss.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..workloads import BETAS, Workload
from .families import Family, first, losses, on_text, second

_ADAM = partial(torch.optim.Adam, betas=BETAS)


def _perceptron(inputs: int, width: int, layers: int) -> nn.Module:
    parts: list[nn.Module] = [nn.Linear(inputs, width), nn.Tanh()]
    for _ in range(layers - 1):
        parts += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(width, 1))


# -------------------------------------------------------------------------------------------------------- regression


def _smooth(x: Tensor) -> Tensor:
    """Return a smooth function of three variables in [-1, 1], of variance about one."""
    return torch.sin(2 * x[:, :1] + x[:, 1:2]) + x[:, 1:2] * x[:, 2:3]


def _points(rng: np.random.Generator, count: int, variables: int) -> Tensor:
    return torch.from_numpy(rng.uniform(-1, 1, (count, variables)).astype(np.float32))


def regression() -> Family:
    """A perceptron of three layers fits a smooth function to a thousandth, 0.03 M parameters."""

    def batch(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        x = _points(rng, 256, 3)
        return x, _smooth(x)

    @cache
    def held_out() -> list[tuple[Tensor, Tensor]]:
        x = _points(np.random.default_rng(17), 4096, 3)
        return [(x, _smooth(x))]

    def loss(model: nn.Module, given: Any) -> Tensor:
        return F.mse_loss(model(given[0]), given[1])

    make = partial(_perceptron, 3, 128, 3)
    workload = Workload("regression", make, batch, loss, held_out, 1000, 3e-3, optimizer=_ADAM, decay=0.0)
    return Family(workload, first, second, classifies=False)


# ----------------------------------------------------------------------------------------------------------- physics


def _solution(x: Tensor) -> Tensor:
    return torch.sin(math.pi * x[:, :1]) * torch.sin(math.pi * x[:, 1:2])


def _residual(model: nn.Module, x: Tensor) -> Tensor:
    """Return the residual of Poisson's equation at the points, for u = 0 on the border."""
    x = x.clone().requires_grad_(True)
    slopes = torch.autograd.grad(_field(model, x).sum(), x, create_graph=True)[0]
    curvature = sum(torch.autograd.grad(slopes[:, i].sum(), x, create_graph=True)[0][:, i : i + 1] for i in range(2))
    return curvature / (2 * math.pi**2) + _solution(x)


def _field(model: nn.Module, x: Tensor) -> Tensor:
    border = x[:, :1] * (1 - x[:, :1]) * x[:, 1:2] * (1 - x[:, 1:2])
    found: Tensor = 4 * border * model(2 * x - 1)
    return found


def physics() -> Family:
    """A physics-informed network for Poisson's equation on a square, 0.02 M parameters.

    It trains on the residual of the equation; held out is the error against the solution.
    """

    def batch(rng: np.random.Generator) -> tuple[Tensor]:
        return (torch.from_numpy(rng.uniform(0, 1, (256, 2)).astype(np.float32)),)

    @cache
    def held_out() -> list[tuple[Tensor, Tensor]]:
        x = torch.from_numpy(np.random.default_rng(19).uniform(0, 1, (4096, 2)).astype(np.float32))
        return [(x, _solution(x))]

    def loss(model: nn.Module, given: Any) -> Tensor:
        if len(given) == 1:
            return _residual(model, given[0]).square().mean()
        return F.mse_loss(_field(model, given[0]), given[1])

    make = partial(_perceptron, 2, 96, 3)
    workload = Workload("PINN", make, batch, loss, held_out, 800, 3e-3, optimizer=_ADAM, decay=0.0)
    return Family(workload, lambda model, given: _field(model, given[0]), second, classifies=False)


# --------------------------------------------------------------------------------------------------------- sequences


class _Layer(nn.Module):
    """A diagonal state-space layer as a long convolution, then a gated matrix."""

    def __init__(self, width: int, states: int = 8) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.rand(width, states).mul(3).sub(4))
        self.mixed = nn.Parameter(torch.randn(width, states) / math.sqrt(states))
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        ages = torch.arange(length, dtype=x.dtype)
        kernel = torch.einsum("ws,wst->wt", self.mixed, torch.exp(-torch.exp(self.rates)[..., None] * ages))
        signal = F.pad(self.norm(x).transpose(1, 2), (length - 1, 0))
        seen = F.conv1d(signal, kernel.flip(-1)[:, None], groups=x.shape[2]).transpose(1, 2)
        return x + F.glu(self.gate(F.gelu(seen)))


class _StateSpace(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.Sequential(_Layer(width), _Layer(width))
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Any:
        return self.head(self.layers(self.embedding(text)))


def state_space() -> Family:
    """A byte-level model of two state-space layers, 0.09 M parameters, trained by NAdam."""
    return on_text("state space", _StateSpace, 500, 3e-3, optimizer=torch.optim.NAdam, decay=0.0)


# ---------------------------------------------------------------------------------------------------------- grokking

_MODULUS, _SHARE = 59, 0.5


@cache
def _sums() -> tuple[Tensor, Tensor]:
    """Return all pairs of residues and their sums, in random order."""
    a, b = np.divmod(np.random.default_rng(31).permutation(_MODULUS**2), _MODULUS)
    return torch.from_numpy(np.stack([a, b], axis=1)), torch.from_numpy((a + b) % _MODULUS)


class _Adder(nn.Module):
    def __init__(self, width: int = 64, hidden: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_MODULUS, width)
        self.up, self.head = nn.Linear(2 * width, hidden), nn.Linear(hidden, _MODULUS)

    def forward(self, pairs: Tensor) -> Any:
        return self.head(self.up(self.embedding(pairs).flatten(1)).relu())


def grokking() -> Family:
    """Addition modulo 59 from half of its table, 0.04 M parameters.

    By AdamW with a weight decay of 1; the held-out half is learnt long after the other.
    """
    known = round(_SHARE * _MODULUS**2)

    def half(chosen: slice) -> tuple[Tensor, Tensor]:
        pairs, sums = _sums()
        return pairs[chosen], sums[chosen]

    optimizer = partial(torch.optim.AdamW, betas=(0.9, 0.98))
    batch, held_out = lambda rng: half(slice(known)), lambda: [half(slice(known, None))]
    loss, more = losses(first, second), {"optimizer": optimizer, "decay": 1.0}
    workload = Workload("grokking", _Adder, batch, loss, held_out, 1500, 1e-2, **more)  # type: ignore[arg-type]
    return Family(workload, first, second, classifies=True)
