"""Thirteen small families of models that chose settings, each trained in seconds.

Each is a `Workload`: its weights, batches and their order are functions of a seed and a step alone, so that two runs of
one seed differ by the checkpoint alone. Models have 0.02 to 0.2 million parameters. Nine train to a plateau. Small
errors change the other four: a physics-informed network, a precise regression, a state-space model, and modular
addition that is learnt late (grokking). Their losses fall by many orders of magnitude, so that an error that a
classifier does not notice is a large part of the remaining loss.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shrinkpoint.demo.trainer import GPT

from ..workloads import BETAS, CLICK_FIELDS, Embedded, Workload, clicks, digits, encoder, text_batch, text_held_out

_DIGITS = 10
_TRAINED_ON = 1297
"""Of the 1,797 images of scikit-learn's digits; the others are held out."""
_COPIES = 6
NEAR_ZERO = 0.01
"""Share of the largest learning rate at which the schedule of a held-back family ends."""


@dataclass(frozen=True)
class Family:
    """A workload, and the outputs of its model.

    Args:
        workload: the model and its task.
        outputs: of a model on a batch: logits [n, classes], or values [n, ...] of a regression.
        targets: of a batch: classes [n], or values as the outputs have them.
        classifies: whether outputs are logits; else values.
    """

    workload: Workload
    outputs: Callable[[nn.Module, Any], Tensor]
    targets: Callable[[Any], Tensor]
    classifies: bool

    @property
    def name(self) -> str:
        """Name in rows."""
        return self.workload.name


def digit_images(rng: np.random.Generator | None, count: int) -> Tensor:
    """Return digits drawn from the training set; without a generator, held-out ones."""
    images = digits()[0]
    return images[_TRAINED_ON:][:count] if rng is None else images[rng.integers(0, _TRAINED_ON, count)]


def first(model: nn.Module, batch: Any) -> Any:
    return model(batch[0])


second: Callable[[Any], Tensor] = itemgetter(1)


def supervised(
    name: str, model: Callable[[], nn.Module], batch: Callable[[np.random.Generator], Any],
    held_out: Callable[[], list[Any]], steps: int, rate: float, *, outputs: Callable[[nn.Module, Any], Tensor] = first,
    targets: Callable[[Any], Tensor] = second, classifies: bool = True, **more: Any,
) -> Family:  # fmt: skip
    """Return a family by the cross entropy of its classes, or the squared error of its values.

    Args:
        name, model, batch, held_out, steps, rate: as of `Workload`.
        outputs, targets, classifies: as of `Family`; by default the model gets a batch's first part, whose targets are
            the second.
        more: further arguments of `Workload`.
    """
    error: Callable[..., Tensor] = F.cross_entropy if classifies else F.mse_loss

    def loss(model: nn.Module, given: Any) -> Tensor:
        return error(outputs(model, given), targets(given))

    return Family(Workload(name, model, batch, loss, held_out, steps, rate, **more), outputs, targets, classifies)


# ------------------------------------------------------------------------------------------------------------ digits


def _noisy(images: Tensor, rng: np.random.Generator) -> Tensor:
    return images + 0.5 * torch.from_numpy(rng.standard_normal(tuple(images.shape), dtype=np.float32))


def _digits_batch(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    images, labels = digits()
    chosen = rng.integers(0, _TRAINED_ON, 64)
    return _noisy(images[chosen], rng), labels[chosen]


@cache
def _digits_held_out() -> list[tuple[Tensor, Tensor]]:
    """Return the held-out images in noisy copies, so that no loss hangs on a few images."""
    images, labels = digits()
    rng = np.random.default_rng(1)
    return [(_noisy(images[_TRAINED_ON:], rng), labels[_TRAINED_ON:]) for _ in range(_COPIES)]


def on_digits(name: str, model: Callable[[], nn.Module], steps: int, rate: float, **more: Any) -> Family:
    """Return a family of classifiers of noisy digits; `more` are arguments of `Workload`."""
    return supervised(name, model, _digits_batch, _digits_held_out, steps, rate, **more)


def _layers(*widths: int) -> nn.Module:
    """Return linear layers with ReLU between them, on flattened images."""
    pairs = itertools.pairwise(widths)
    parts = [part for into, out in pairs for part in (nn.Linear(into, out), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *parts[:-1])


def _convolutions(norm: Callable[[int], nn.Module]) -> nn.Module:
    """Return two convolutions with norms, and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), norm(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), norm(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, _DIGITS),
    )  # fmt: skip


class _SmallViT(nn.Module):
    """A vision transformer on 8 patches."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, (2, 4), stride=(2, 4))
        self.places = nn.Parameter(0.02 * torch.randn(1, 8, width))
        self.blocks = encoder(width, 4, 2 * width, layers)
        self.head = nn.Linear(width, _DIGITS)

    def forward(self, images: Tensor) -> Any:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.blocks(tokens).mean(dim=1))


def autoencoder() -> Family:
    """A denoising autoencoder with a bottleneck of 32, 0.05 M parameters."""
    make = lambda: nn.Sequential(_layers(64, 256, 32), _layers(32, 256, 64))  # noqa: E731

    def batch(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        images = digits()[0][rng.integers(0, _TRAINED_ON, 64)]
        return _noisy(images, rng), images.flatten(1)

    @cache
    def held_out() -> list[tuple[Tensor, Tensor]]:
        images, rng = digits()[0][_TRAINED_ON:], np.random.default_rng(1)
        return [(_noisy(images, rng), images.flatten(1)) for _ in range(_COPIES)]

    return supervised("autoencoder", make, batch, held_out, 500, 1e-3, classifies=False)


# -------------------------------------------------------------------------------------------------------------- text

_CONTEXT = 48


def _next_bytes(model: nn.Module, text: Any) -> Any:
    return model(text[:, :-1]).flatten(0, 1)


def _bytes_to_come(text: Any) -> Any:
    return text[:, 1:].flatten()


def on_text(name: str, model: Callable[[], nn.Module], steps: int, rate: float, **more: Any) -> Family:
    """Return a family of byte-level language models; `more` are arguments of `Workload`."""
    batch, held_out = partial(text_batch, context=_CONTEXT, batch=8), partial(text_held_out, _CONTEXT, 120, 40)
    given: dict[str, Any] = {"outputs": _next_bytes, "targets": _bytes_to_come}
    return supervised(name, model, batch, held_out, steps, rate, **given, **more)


class _SmallLSTM(nn.Module):
    """A byte-level LSTM."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 48)
        self.lstm = nn.LSTM(48, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Any:
        return self.head(self.lstm(self.embedding(text))[0])


# ------------------------------------------------------------------------------------------------- tables and graphs

_IDS, _WIDTH = 1500, 24


def _clicks(rng: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
    ids, clicked = clicks(rng, count, _IDS, 0.4)
    return ids, clicked.long()


@cache
def _click_held_out() -> list[tuple[Tensor, Tensor]]:
    rng = np.random.default_rng(11)
    return [_clicks(rng, 5000) for _ in range(4)]


def on_clicks(name: str, rate: float, **more: Any) -> Family:
    """Return a family of click predictors; `more` are arguments of `Workload`."""
    make, batch = partial(Embedded, CLICK_FIELDS, _IDS, _WIDTH, 2), partial(_clicks, count=512)
    return supervised(name, make, batch, _click_held_out, 500, rate, **more)


_NODES, _FEATURES, _GROUPS = 1200, 96, 8


@cache
def _graph() -> tuple[Tensor, Tensor, np.ndarray[Any, Any]]:
    """Return adjacency (normalised), groups and their features of a stochastic block model."""
    rng = np.random.default_rng(3)
    groups = rng.integers(0, _GROUPS, _NODES)
    near = np.where(groups[:, None] == groups, 0.02, 0.004)
    links = np.triu(rng.random((_NODES, _NODES)) < near, 1)
    adjacency = (links | links.T | np.eye(_NODES, dtype=bool)).astype(np.float32)
    root = 1 / np.sqrt(adjacency.sum(axis=1))
    adjacency *= root[:, None] * root
    return torch.from_numpy(adjacency), torch.from_numpy(groups), rng.standard_normal((_GROUPS, _FEATURES))


class _GraphNetwork(nn.Module):
    def __init__(self, width: int = 160) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(_FEATURES, width), nn.Linear(width, width), nn.Linear(width, _GROUPS)])

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            nodes = layer(adjacency @ nodes)
            nodes = nodes if i == 2 else F.relu(nodes)
        return nodes


def graph() -> Family:
    """A graph convolutional network of three layers, 0.04 M parameters; nodes are the examples.

    A batch is a graph of 200 nodes drawn at random from the training half, with fresh noise on their groups' features.
    """

    def part(rng: np.random.Generator, nodes: Any) -> tuple[Tensor, Tensor, Tensor]:
        adjacency, groups, features = _graph()
        at = torch.from_numpy(nodes)
        seen = 0.3 * features[groups[at].numpy()] + rng.standard_normal((len(nodes), _FEATURES))
        return torch.from_numpy(seen.astype(np.float32)), groups[at], adjacency[at][:, at]

    def batch(rng: np.random.Generator) -> Any:
        return part(rng, rng.permutation(_NODES // 2)[:200])

    @cache
    def held_out() -> list[Any]:
        rng = np.random.default_rng(13)
        return [part(rng, np.arange(_NODES // 2, _NODES)) for _ in range(6)]

    def outputs(model: nn.Module, given: Any) -> Any:
        return model(given[0], given[2])

    return supervised("graph network", _GraphNetwork, batch, held_out, 500, 2e-3, outputs=outputs)


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

    more: dict[str, Any] = {"classifies": False, "optimizer": _ADAM, "decay": 0.0}
    return supervised("regression", partial(_perceptron, 3, 128, 3), batch, held_out, 1000, 3e-3, **more)


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
    """A byte-level model of two state-space layers."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.Sequential(_Layer(width), _Layer(width))
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Any:
        return self.head(self.layers(self.embedding(text)))


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
    more: dict[str, Any] = {"optimizer": optimizer, "decay": 1.0}
    return supervised("grokking", _Adder, batch, held_out, 1500, 1e-2, **more)


FAMILIES: dict[str, Callable[[], Family]] = {
    "MLP": partial(on_digits, "MLP", partial(_layers, 64, 256, 256, _DIGITS), 500, 1e-3),
    "CNN": partial(on_digits, "CNN", partial(_convolutions, partial(nn.GroupNorm, 8)), 400, 2e-3),
    "CNN, batch norm": partial(on_digits, "CNN, batch norm", partial(_convolutions, nn.BatchNorm2d), 400, 2e-3),
    "ViT": partial(on_digits, "ViT", _SmallViT, 500, 3e-3),
    "GPT": partial(on_text, "GPT", partial(GPT, 2, 64, 4, _CONTEXT, dropout=0.0, bias=False), 500, 3e-3),
    "embedding": partial(on_clicks, "embedding", 2e-3),
    "autoencoder": autoencoder,
    "LSTM": partial(on_text, "LSTM", _SmallLSTM, 500, 5e-3),
    "graph network": graph,
}
SET_ASIDE = ("LSTM", "graph network")
"""Looked at once, after the default was chosen on the others."""
SENSITIVE: dict[str, Callable[[], Family]] = {
    "regression": regression,
    "PINN": physics,
    "state space": partial(on_text, "state space", _StateSpace, 500, 3e-3, optimizer=torch.optim.NAdam, decay=0.0),
    "grokking": grokking,
}
"""They chose `presets.precise()`, together with the nine of `FAMILIES`, which chose the other levels.

Grokking spoke against noise in second moments when it was proposed."""
CHOSE = tuple(FAMILIES | SENSITIVE)
"""Those that chose settings."""
