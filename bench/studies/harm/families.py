"""Nine small model families, each trained to a plateau in seconds, and their outputs.

Each is a `Workload`: its weights, batches and their order are functions of a seed and a step alone, so that two runs of
one seed differ by the checkpoint alone. Models have 0.04 to 0.2 million parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..workloads import Embedded, Workload, digits, encoder, text_batch, text_held_out

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


def losses(outputs: Callable[[nn.Module, Any], Tensor], targets: Callable[[Any], Tensor]) -> Any:
    return lambda model, batch: F.cross_entropy(outputs(model, batch), targets(batch))


def first(model: nn.Module, batch: Any) -> Any:
    return model(batch[0])


second: Callable[[Any], Tensor] = itemgetter(1)


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
    workload = Workload(name, model, _digits_batch, losses(first, second), _digits_held_out, steps, rate, **more)
    return Family(workload, first, second, classifies=True)


def mlp() -> Family:
    """A perceptron of three layers, 0.08 M parameters."""
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, _DIGITS)
    )
    return on_digits("MLP", make, 500, 1e-3)


def _convolutions(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), norm(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), norm(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, _DIGITS),
    )  # fmt: skip


def cnn() -> Family:
    """Two convolutions with group norm and a perceptron, 0.05 M parameters."""
    return on_digits("CNN", lambda: _convolutions(lambda n: nn.GroupNorm(8, n)), 400, 2e-3)


def cnn_batch_norm() -> Family:
    """A CNN with batch norm, whose running statistics are kept exactly."""
    return on_digits("CNN, batch norm", lambda: _convolutions(nn.BatchNorm2d), 400, 2e-3)


class _SmallViT(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, (2, 4), stride=(2, 4))
        self.places = nn.Parameter(0.02 * torch.randn(1, 8, width))
        self.blocks = encoder(width, 4, 2 * width, layers)
        self.head = nn.Linear(width, _DIGITS)

    def forward(self, images: Tensor) -> Any:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.blocks(tokens).mean(dim=1))


def vit() -> Family:
    """A vision transformer on 8 patches, 0.07 M parameters."""
    return on_digits("ViT", _SmallViT, 500, 3e-3)


def autoencoder() -> Family:
    """A denoising autoencoder with a bottleneck of 32, 0.05 M parameters."""
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32), nn.Linear(32, 256), nn.ReLU(),
        nn.Linear(256, 64),
    )  # fmt: skip

    def batch(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        images = digits()[0][rng.integers(0, _TRAINED_ON, 64)]
        return _noisy(images, rng), images.flatten(1)

    @cache
    def held_out() -> list[tuple[Tensor, Tensor]]:
        images, rng = digits()[0][_TRAINED_ON:], np.random.default_rng(1)
        return [(_noisy(images, rng), images.flatten(1)) for _ in range(_COPIES)]

    def loss(model: nn.Module, given: Any) -> Tensor:
        return F.mse_loss(model(given[0]), given[1])

    return Family(Workload("autoencoder", make, batch, loss, held_out, 500, 1e-3), first, second, classifies=False)


# -------------------------------------------------------------------------------------------------------------- text

_CONTEXT = 48


def _next_bytes(model: nn.Module, text: Any) -> Any:
    return model(text[:, :-1]).flatten(0, 1)


def _bytes_to_come(text: Any) -> Any:
    return text[:, 1:].flatten()


def on_text(name: str, model: Callable[[], nn.Module], steps: int, rate: float, **more: Any) -> Family:
    """Return a family of byte-level language models; `more` are arguments of `Workload`."""
    loss = losses(_next_bytes, _bytes_to_come)
    batch, held_out = partial(text_batch, context=_CONTEXT, batch=8), partial(text_held_out, _CONTEXT, 120, 40)
    workload = Workload(name, model, batch, loss, held_out, steps, rate, **more)
    return Family(workload, _next_bytes, _bytes_to_come, classifies=True)


def gpt() -> Family:
    """A byte-level GPT of two layers, 0.12 M parameters, on the standard library's sources."""
    from shrinkpoint.demo.task import GPT

    return on_text("GPT", lambda: GPT(2, 64, 4, _CONTEXT, dropout=0.0, bias=False), 500, 3e-3)


class _SmallLSTM(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 48)
        self.lstm = nn.LSTM(48, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Any:
        return self.head(self.lstm(self.embedding(text))[0])


def lstm() -> Family:
    """A byte-level LSTM, 0.09 M parameters, on the standard library's sources."""
    return on_text("LSTM", _SmallLSTM, 500, 5e-3)


# ------------------------------------------------------------------------------------------------- tables and graphs

_IDS, _WIDTH, CLICK_FIELDS = 1500, 24, 4


def clicks(rng: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Draw ids by a power law, and clicks by products of the fields' hidden vectors."""
    truth = np.random.default_rng(7)
    vectors, pairs = (
        truth.standard_normal((CLICK_FIELDS, _IDS, 4)),
        truth.standard_normal((CLICK_FIELDS, CLICK_FIELDS, 4)),
    )
    ids = np.minimum((np.exp(rng.random((count, CLICK_FIELDS)) * np.log(_IDS + 1)) - 1).astype(np.int64), _IDS - 1)
    found = vectors[np.arange(CLICK_FIELDS), ids]
    score = 0.4 * np.einsum("bid,ijd,bjd->b", found, pairs, found)
    clicked = rng.random(count) < 1 / (1 + np.exp(-score))
    return torch.from_numpy(ids), torch.from_numpy(clicked.astype(np.int64))


@cache
def click_held_out() -> list[tuple[Tensor, Tensor]]:
    rng = np.random.default_rng(11)
    return [clicks(rng, 5000) for _ in range(4)]


def embedding() -> Family:
    """Four tables of 1,500 x 24 and a perceptron, 0.16 M parameters: a click predictor."""
    return on_clicks("embedding", 2e-3)


def on_clicks(name: str, rate: float, **more: Any) -> Family:
    """Return a family of click predictors; `more` are arguments of `Workload`."""
    make, batch = partial(Embedded, CLICK_FIELDS, _IDS, _WIDTH, 2), partial(clicks, count=512)
    workload = Workload(name, make, batch, losses(first, second), click_held_out, 500, rate, **more)
    return Family(workload, first, second, classifies=True)


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

    workload = Workload("graph network", _GraphNetwork, batch, losses(outputs, second), held_out, 500, 2e-3)
    return Family(workload, outputs, second, classifies=True)


FAMILIES: dict[str, Callable[[], Family]] = {
    "MLP": mlp,
    "CNN": cnn,
    "CNN, batch norm": cnn_batch_norm,
    "ViT": vit,
    "GPT": gpt,
    "embedding": embedding,
    "autoencoder": autoencoder,
    "LSTM": lstm,
    "graph network": graph,
}
SET_ASIDE = ("LSTM", "graph network")
"""Looked at once, after the default was chosen on the others."""
