"""Small trainings that the studies share: a GPT, models on digits, an embedding model.

A `Run` is a function of its seed: weights, data and their order. Batch t is drawn from (seed, t), so a run resumed at
step t sees exactly what the uninterrupted one would have seen, and a difference in held-out loss is the checkpoint's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shrinkpoint as sp
from shrinkpoint.demo.trainer import GPT, Corpus
from shrinkpoint.demo.trainer import loss as text_loss

State = dict[str, Any]
BETAS = (0.9, 0.999)
adamw = partial(torch.optim.AdamW, betas=BETAS)
"""The optimizer of most workloads."""


@dataclass(frozen=True)
class Workload:
    """A model and its task.

    Args:
        name: as shown.
        model: builds it.
        batch: the training batch of a step, from a generator of that step alone.
        loss: of a model on a batch, mean.
        held_out: batches of the held-out set, always the same.
        steps: length of the whole schedule.
        rate: largest learning rate; a short warm-up, then a cosine to `end` of it.
        right: which predictions of a model on a batch are right; None: accuracy is not defined for the task.
        optimizer: makes it from parameter groups, given `lr`; default AdamW.
        decay: weight decay of matrices.
        end: share of the largest learning rate at the end of the schedule; 1: constant after the warm-up.
        average: decay of an exponential moving average of the weights, which is stored and judged; None: no average.
        masters: whether the model is in bfloat16 and the optimizer keeps its parameters in float32.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[np.random.Generator], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    held_out: Callable[[], list[Any]]
    steps: int
    rate: float
    right: Callable[[nn.Module, Any], Tensor] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] = adamw
    decay: float = 0.1
    end: float = 0.1
    average: float | None = None
    masters: bool = False

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once; allocates no memory for them."""
        with torch.device("meta"):
            return sum(p.numel() for p in self.model().parameters())


class Run:
    """A training of a workload, at some step.

    Args:
        workload: the training.
        seed: of weights and batches.
        until: step that it is trained to.
    """

    def __init__(self, workload: Workload, seed: int, *, until: int = 0) -> None:
        self.workload, self.seed, self.step = workload, seed, 0
        torch.manual_seed(seed)
        self.model = workload.model()
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.masters: list[Tensor] | None = None
        if workload.masters:
            self.masters = [p.detach().clone() for p in self.trained]
            self.model.bfloat16()
        own = self.trained if self.masters is None else self.masters
        decayed, others = ([p for p in own if (p.ndim >= 2) == matrix] for matrix in (True, False))
        groups = [{"params": decayed, "weight_decay": workload.decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = workload.optimizer(groups, lr=workload.rate)
        _mode(self.optimizer, "train")
        self.average: AveragedModel | None = None
        if workload.average is not None:
            self.average = AveragedModel(self.model, multi_avg_fn=_average(workload.average))
        self.train(until)

    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        warm = max(1, self.workload.steps // 20)
        if self.step < warm:
            return self.workload.rate * (self.step + 1) / warm
        share = (self.step - warm) / max(1, self.workload.steps - warm)
        middle, swing = (1 + self.workload.end) / 2, (1 - self.workload.end) / 2
        return self.workload.rate * (middle + swing * math.cos(math.pi * min(1.0, share)))

    def train(self, until: int) -> Self:
        """Train up to step `until`, and return the run."""
        while self.step < until:
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            batch = self.workload.batch(np.random.default_rng([self.seed, self.step]))
            self.optimizer.zero_grad(set_to_none=True)
            self.loss(batch).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._update()
            self.step += 1
        return self

    def _update(self) -> None:
        """Take the optimizer's step, on masters where there are any, and the average's."""
        for master, p in zip(self.masters or (), self.trained, strict=False):
            master.grad = None if p.grad is None else p.grad.float()
        self.optimizer.step()
        if self.masters is not None:
            with torch.no_grad():
                for master, p in zip(self.masters, self.trained, strict=True):
                    p.copy_(master)
                    p.grad = None
        if self.average is not None:
            self.average.update_parameters(self.model)

    @contextmanager
    def judged(self) -> Iterator[nn.Module]:
        """Lend the model that a user would evaluate; afterwards the run is as before.

        It is the average of the weights where one is kept, and for a schedule-free optimizer the average that the
        optimizer's own evaluation mode gives.
        """
        model = self.model if self.average is None else self.average.module
        swaps = hasattr(self.optimizer, "eval")
        kept = [p.detach().clone() for p in self.trained] if swaps else []
        model.eval()
        _mode(self.optimizer, "eval")
        try:
            yield model
        finally:
            model.train()
            _mode(self.optimizer, "train")
            with torch.no_grad():
                for p, before in zip(self.trained if swaps else (), kept, strict=True):
                    p.copy_(before)  # to and from the average rounds

    def kinds(self) -> dict[str, sp.Kind]:
        """Return what `sp.kinds` says of the model, its optimizer, average and masters."""
        averages = None if self.average is None else {"ema": self.average}
        if self.masters is None:
            return sp.kinds(self.model, self.optimizer, averages=averages)
        # The parameters of the optimizer are the masters: with it, the module's would count as frozen.
        model = sp.kinds(self.model, averages=averages, masters={"masters": self.masters})
        return model | sp.kinds(optimizer=self.optimizer)

    def loss(self, batch: Any, model: nn.Module | None = None) -> Tensor:
        """Mean loss on a batch, of the run's own model or of another one."""
        return self.workload.loss(self.model if model is None else model, batch)

    def state(self) -> State:
        """Everything a resumed run needs, cloned."""
        state: State = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        if self.average is not None:
            state["ema"] = self.average.state_dict()
        if self.masters is not None:
            state["masters"] = self.masters
        return cloned(state)

    def restore(self, state: State) -> None:
        """Go on from a state, which stays as it is."""
        state = cloned(state)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.average is not None:
            self.average.load_state_dict(state["ema"])
        with torch.no_grad():
            for master, kept in zip(self.masters or (), state.get("masters", ()), strict=True):
                master.copy_(kept)
        self.step = state["step"]

    @torch.no_grad()
    def accuracy(self, batches: int | None = None, model: nn.Module | None = None, first: int = 0) -> float:
        """Return the share of held-out predictions that are right; NaN for a task without accuracy.

        Args:
            batches: how many of the held-out set; None: all.
            model: another one than the run's own.
            first: number of the first batch.
        """
        right, model = self.workload.right, self.model if model is None else model
        if right is None:
            return math.nan
        was_training = model.training
        model.eval()
        found = [right(model, batch).flatten() for batch in self.workload.held_out()[first:][:batches]]
        model.train(was_training)
        return float(torch.cat(found).double().mean())

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Mean loss over the held-out set."""
        self.model.eval()
        total = count = 0.0
        for batch in self.workload.held_out():
            size = len(batch[0] if isinstance(batch, tuple) else batch)
            total += float(self.loss(batch)) * size
            count += size
        self.model.train()
        return total / count


def cloned(state: State) -> State:
    """Return a state whose tensors are copies."""
    found: State = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)
    return found


def _average(decay: float) -> Callable[..., None]:
    """Return the function that updates an exponential moving average."""
    update: Callable[..., None] = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    return update


def _mode(optimizer: Any, name: str) -> None:
    """Switch a schedule-free optimizer between its modes; others have none."""
    getattr(optimizer, name, lambda: None)()


# ---------------------------------------------------------------------------------------------------- text

_CONTEXT, _BATCH, _WINDOWS = 128, 4, 1600


@cache
def _corpus() -> Corpus:
    return Corpus()


def text_batch(rng: np.random.Generator, context: int, batch: int) -> Tensor:
    """Draw windows of the standard library's sources, as bytes."""
    text = _corpus().train
    starts = rng.integers(0, len(text) - context - 1, batch)
    return torch.from_numpy(text[starts[:, None] + np.arange(context + 1)].astype(np.int64))


@cache
def text_held_out(context: int, windows: int, batch: int) -> list[Tensor]:
    """Return held-out windows in batches."""
    return list(torch.split(_corpus().held_out_windows(windows, context), batch))


def _right_byte(model: nn.Module, windows: Tensor) -> Tensor:
    return torch.eq(model(windows[:, :-1]).argmax(-1), windows[:, 1:])


def gpt(layers: int = 4, width: int = 128, heads: int = 4, steps: int = 900) -> Workload:
    """A byte-level GPT (0.8 M parameters by default) on the standard library's sources.

    The held-out set is 204,800 tokens.
    """
    make = partial(GPT, layers, width, heads, _CONTEXT, dropout=0.0, bias=False)
    batch, held_out = (
        partial(text_batch, context=_CONTEXT, batch=_BATCH),
        partial(text_held_out, _CONTEXT, _WINDOWS, 64),
    )
    return Workload("GPT", make, batch, text_loss, held_out, steps, 2e-3, right=_right_byte)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------- digits


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's images of digits in [0, 1], shuffled, and their labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images = torch.from_numpy(found.data[order].astype(np.float32) / 16.0).view(-1, 1, 8, 8)
    return images, torch.from_numpy(found.target[order].astype(np.int64))


_HELD_OUT_DIGITS = 500


def _digits_batch(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return 64 images, shifted by up to a pixel and with noise."""
    images, labels = digits()
    chosen = rng.integers(_HELD_OUT_DIGITS, len(labels), 64)
    dy, dx = rng.integers(-1, 2, 2)
    shifted = torch.roll(images[chosen], (int(dy), int(dx)), dims=(2, 3))
    noise = torch.from_numpy(rng.standard_normal(shifted.shape, dtype=np.float32))
    return shifted + 0.3 * noise, labels[chosen]


@cache
def _digits_held_out() -> list[tuple[Tensor, Tensor]]:
    """Return the held-out images in 20 noisy copies."""
    images, labels = digits()
    rng = np.random.default_rng(1)
    batches = []
    for _ in range(20):
        x = images[:_HELD_OUT_DIGITS]
        noise = torch.from_numpy(rng.standard_normal(x.shape, dtype=np.float32))
        batches.append((x + 0.3 * noise, labels[:_HELD_OUT_DIGITS]))
    return batches


def _right_class(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return torch.eq(model(batch[0]).argmax(1), batch[1])


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


def encoder(width: int, heads: int, inner: int, layers: int) -> nn.Module:
    """Return the blocks of a transformer without dropout, each behind a norm."""
    how: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    block = nn.TransformerEncoderLayer(width, heads, inner, **how)
    return nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)


class SmallViT(nn.Module):
    """A vision transformer on patches of 2 x 2 pixels: 16 of them and a class token, no dropout."""

    def __init__(self, width: int = 64, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = encoder(width, heads, 4 * width, layers)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Any:
        """float32 [batch, 1, 8, 8] -> logits [batch, 10]."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.places
        return self.head(self.blocks(tokens)[:, 0])


def _on_digits(name: str, model: Callable[[], nn.Module], rate: float, steps: int = 900) -> Workload:
    """Return a classifier of scikit-learn's digits."""
    return Workload(name, model, _digits_batch, _classified, _digits_held_out, steps, rate, right=_right_class)


cnn = partial(_on_digits, "CNN", _cnn, 2e-3)
"""A CNN of 0.23 M parameters."""
mlp = partial(_on_digits, "MLP", _mlp, 2e-3)
"""A three-layer perceptron of 0.3 M parameters."""
vit = partial(_on_digits, "ViT", SmallViT, 1e-3)
"""A vision transformer of 0.2 M parameters."""


# ---------------------------------------------------------------------------------------------------- embeddings

_IDS, _WIDTH, CLICK_FIELDS = 10_000, 32, 4


class Embedded(nn.Module):
    """A click predictor: fields of ids, a table each, and a small perceptron."""

    def __init__(self, fields: int, ids: int, width: int, outputs: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ids, width) for _ in range(fields))
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.1)  # type: ignore[arg-type]
        self.top = nn.Sequential(nn.Linear(fields * width, 128), nn.ReLU(), nn.Linear(128, outputs))

    def forward(self, ids: Tensor) -> Any:
        """int64 [batch, fields] -> logits [batch, outputs]."""
        vectors = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.top(torch.cat(vectors, dim=1))


@cache
def _click_truth(ids: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Draw the hidden model of clicks: a vector for each id, and one for each pair of fields."""
    rng = np.random.default_rng(7)
    return rng.standard_normal((CLICK_FIELDS, ids, 4)), rng.standard_normal((CLICK_FIELDS, CLICK_FIELDS, 4))


def clicks(rng: np.random.Generator, count: int, ids: int = _IDS, scale: float = 0.25) -> tuple[Tensor, Tensor]:
    """Draw ids by a power law (1 / rank), and clicks by products of hidden vectors."""
    u = rng.random((count, CLICK_FIELDS))
    drawn = np.minimum((np.exp(u * math.log(ids + 1)) - 1).astype(np.int64), ids - 1)
    vectors, pairs = _click_truth(ids)
    found = vectors[np.arange(CLICK_FIELDS), drawn]
    score = scale * np.einsum("bid,ijd,bjd->b", found, pairs, found)
    clicked = rng.random(count) < 1 / (1 + np.exp(-score))
    return torch.from_numpy(drawn), torch.from_numpy(clicked.astype(np.float32))


@cache
def _click_held_out() -> list[tuple[Tensor, Tensor]]:
    rng = np.random.default_rng(11)
    return [clicks(rng, 20_000) for _ in range(10)]


def embedding(steps: int = 900) -> Workload:
    """Four tables of 10,000 x 32 and a perceptron (1.3 M parameters), ids by a power law."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1])

    def right(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.eq(model(batch[0]).squeeze(1) > 0, batch[1] > 0)

    make, batch = partial(Embedded, CLICK_FIELDS, _IDS, _WIDTH, 1), partial(clicks, count=1024)
    return Workload("embedding", make, batch, loss, _click_held_out, steps, 5e-3, right=right)


WORKLOADS: dict[str, Callable[[], Workload]] = {"GPT": gpt, "CNN": cnn, "MLP": mlp, "embedding": embedding, "ViT": vit}
"""Those that one thread of a CPU trains in minutes."""
