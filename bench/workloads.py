"""Small real trainings that benches of quality share: a GPT on text, three models on digits, an embedding model.

A `Run` is a function of its seed: weights, data and their order. Batch t is drawn from (seed, t), so a run resumed at
step t sees exactly what the uninterrupted one would have seen, and a difference in held-out loss is the checkpoint's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shrinkpoint.demo.corpus import Corpus
from shrinkpoint.demo.model import GPT
from shrinkpoint.demo.model import loss as text_loss

State = dict[str, Any]
BETAS = (0.9, 0.999)


@dataclass(frozen=True)
class Workload:
    """One model and its task.

    Args:
        name: as shown.
        model: builds it.
        batch: the training batch of a step, from a generator of that step alone.
        loss: of a model on a batch, mean.
        held_out: batches of the held-out set, always the same.
        steps: length of the whole schedule.
        rate: largest learning rate; a short warm-up, then a cosine to a tenth of it.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[np.random.Generator], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    held_out: Callable[[], list[Any]]
    steps: int
    rate: float


class Run:
    """A training of a workload, at some step."""

    def __init__(self, workload: Workload, seed: int, *, betas: tuple[float, float] = BETAS) -> None:
        self.workload, self.seed, self.step = workload, seed, 0
        torch.manual_seed(seed)
        self.model = workload.model()
        decayed = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=workload.rate, betas=betas)

    def learning_rate(self) -> float:
        """Of the step to come."""
        warm = max(1, self.workload.steps // 20)
        if self.step < warm:
            return self.workload.rate * (self.step + 1) / warm
        share = (self.step - warm) / max(1, self.workload.steps - warm)
        return self.workload.rate * (0.55 + 0.45 * math.cos(math.pi * min(1.0, share)))

    def train(self, until: int) -> None:
        """Train up to step `until`."""
        while self.step < until:
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            batch = self.workload.batch(np.random.default_rng([self.seed, self.step]))
            self.optimizer.zero_grad(set_to_none=True)
            self.workload.loss(self.model, batch).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1

    def state(self) -> State:
        """Everything a resumed run needs, cloned."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        cloned: State = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)
        return cloned

    def restore(self, state: State) -> None:
        """Go on from a state, which stays as it is."""
        state = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss over the held-out set."""
        self.model.eval()
        total = count = 0.0
        for batch in self.workload.held_out():
            size = len(batch[0] if isinstance(batch, tuple) else batch)
            total += float(self.workload.loss(self.model, batch)) * size
            count += size
        self.model.train()
        return total / count


def chain(workload: Workload, seed: int, steps: Iterator[int] | list[int]) -> Iterator[tuple[int, State]]:
    """States of one training at ascending steps."""
    run = Run(workload, seed)
    for step in steps:
        run.train(step)
        yield step, run.state()


# ---------------------------------------------------------------------------------------------------- text

_CONTEXT, _BATCH, _WINDOWS = 128, 4, 1600


@cache
def _corpus() -> Corpus:
    return Corpus()


def _windows(text: np.ndarray[Any, np.dtype[np.uint8]], starts: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(text[starts[:, None] + np.arange(_CONTEXT + 1)].astype(np.int64))


def _text_batch(rng: np.random.Generator) -> Tensor:
    text = _corpus().train
    return _windows(text, rng.integers(0, len(text) - _CONTEXT - 1, _BATCH))


@cache
def _text_held_out() -> list[Tensor]:
    return list(torch.split(_corpus().held_out_windows(_WINDOWS, _CONTEXT), 64))


def gpt(layers: int = 4, width: int = 128, heads: int = 4, steps: int = 900) -> Workload:
    """A byte-level GPT (0.8 M parameters by default, no biases) on the standard library's sources.

    The held-out set is 204,800 tokens.
    """
    return Workload(
        "GPT",
        lambda: GPT(layers, width, heads, _CONTEXT, dropout=0.0, bias=False),
        _text_batch,
        lambda model, batch: text_loss(model, batch),  # type: ignore[arg-type]
        _text_held_out,
        steps,
        2e-3,
    )


# ---------------------------------------------------------------------------------------------------- digits


@cache
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = torch.from_numpy(found.data[order].astype(np.float32) / 16.0).view(-1, 1, 8, 8)
    return images, torch.from_numpy(found.target[order].astype(np.int64))


_HELD_OUT_DIGITS = 500


def _digits_batch(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """64 images, each shifted by up to a pixel and with noise, so that 1,297 of them are not learned by heart."""
    images, labels = _digits()
    chosen = rng.integers(_HELD_OUT_DIGITS, len(labels), 64)
    dy, dx = rng.integers(-1, 2, 2)
    shifted = torch.roll(images[chosen], (int(dy), int(dx)), dims=(2, 3))
    noise = torch.from_numpy(rng.standard_normal(shifted.shape, dtype=np.float32))
    return shifted + 0.3 * noise, labels[chosen]


@cache
def _digits_held_out() -> list[tuple[Tensor, Tensor]]:
    """The held-out images in 20 noisy copies: enough that the loss is not a matter of a few images."""
    images, labels = _digits()
    rng = np.random.default_rng(1)
    batches = []
    for _ in range(20):
        x = images[:_HELD_OUT_DIGITS]
        noise = torch.from_numpy(rng.standard_normal(x.shape, dtype=np.float32))
        batches.append((x + 0.3 * noise, labels[:_HELD_OUT_DIGITS]))
    return batches


def _classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.05)


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1), nn.GroupNorm(8, 128), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10),
    )  # fmt: skip


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


class SmallViT(nn.Module):
    """A vision transformer on patches of 2 x 2 pixels: 16 of them and a class token, no dropout."""

    def __init__(self, width: int = 64, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 17, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """float32 [batch, 1, 8, 8] -> logits [batch, 10]."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.places
        logits: Tensor = self.head(self.blocks(tokens)[:, 0])
        return logits


def cnn(steps: int = 900) -> Workload:
    """A CNN of 0.36 M parameters on scikit-learn's digits."""
    return Workload("CNN", _cnn, _digits_batch, _classified, _digits_held_out, steps, 2e-3)


def mlp(steps: int = 900) -> Workload:
    """A three-layer perceptron of 0.3 M parameters on scikit-learn's digits."""
    return Workload("MLP", _mlp, _digits_batch, _classified, _digits_held_out, steps, 2e-3)


def vit(steps: int = 900) -> Workload:
    """A vision transformer of 0.2 M parameters on scikit-learn's digits."""
    return Workload("ViT", SmallViT, _digits_batch, _classified, _digits_held_out, steps, 1e-3)


# ---------------------------------------------------------------------------------------------------- embeddings

_IDS, _WIDTH, _FIELDS = 10_000, 32, 4


class Embedded(nn.Module):
    """Four fields of ids, one table each, their vectors into a small perceptron: the shape of a click predictor."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(_IDS, _WIDTH) for _ in range(_FIELDS))
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.1)  # type: ignore[arg-type]
        self.top = nn.Sequential(nn.Linear(_FIELDS * _WIDTH, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [batch, 4] -> logits [batch]."""
        vectors = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        logits: Tensor = self.top(torch.cat(vectors, dim=1)).squeeze(1)
        return logits


@cache
def _click_truth() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """What the clicks are drawn from: a vector an id, and how two fields go together."""
    rng = np.random.default_rng(7)
    return rng.standard_normal((_FIELDS, _IDS, 4)), rng.standard_normal((_FIELDS, _FIELDS, 4)) * 0.5


def _clicks(rng: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Ids by a power law (probability ~ 1 / rank), and clicks."""
    u = rng.random((count, _FIELDS))
    ids = np.minimum((np.exp(u * math.log(_IDS + 1)) - 1).astype(np.int64), _IDS - 1)
    vectors, pairs = _click_truth()
    found = vectors[np.arange(_FIELDS), ids]
    score = np.einsum("bid,ijd,bjd->b", found, pairs, found) * 0.5
    clicked = rng.random(count) < 1 / (1 + np.exp(-score))
    return torch.from_numpy(ids), torch.from_numpy(clicked.astype(np.float32))


@cache
def _click_held_out() -> list[tuple[Tensor, Tensor]]:
    rng = np.random.default_rng(11)
    return [_clicks(rng, 20_000) for _ in range(10)]


def embedding(steps: int = 900) -> Workload:
    """Four tables of 10,000 x 32 and a perceptron (1.3 M parameters), ids by a power law; 200,000 held-out samples."""
    return Workload(
        "embedding",
        Embedded,
        lambda rng: _clicks(rng, 1024),
        lambda model, batch: F.binary_cross_entropy_with_logits(model(batch[0]), batch[1]),
        _click_held_out,
        steps,
        5e-3,
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {"GPT": gpt, "CNN": cnn, "MLP": mlp, "embedding": embedding, "ViT": vit}
