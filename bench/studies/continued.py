"""A real training that goes on: Resemblyzer's encoder from its own Adam state.

The file that the package ships holds weights and Adam's moments after 1,564,501 steps. Its recordings are not shipped,
so training goes on with drawn spectrograms: a speaker is a spectral envelope, an utterance the envelope under moving
noise. The loss is the package's (GE2E: each utterance is to be nearest to the mean of its speaker's others).
Each level saves every `SPACING` steps and is killed twice, half way between two saves; it goes on from what its store
gives. The same is done without compression, once with the same and once with other batches after each kill.
`python -m bench real --only continued`.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shrinkpoint as sp

from ..data import arrays
from ..harness import Options, Row
from .faults import of_seeds, through_kills
from .harm.settings import LEVELS
from .workloads import cloned

STEPS, SPACING, KILLS = 200, 20, 2
OTHER_BATCHES = "no compression, other batches"
SEEDS = 2
NAME = "continued resemblyzer, "
"""What the names of its rows begin with."""
_SPEAKERS, _UTTERANCES, _FRAMES, _BANDS = 8, 4, 60, 40
_HELD_OUT = 6
_NUMBERS = itertools.count()
State = dict[str, Any]


class Encoder(nn.Module):
    """Three LSTM layers, a linear one, scale and offset of similarities; names as in the file."""

    def __init__(self) -> None:
        super().__init__()
        self.similarity_weight = nn.Parameter(torch.tensor([10.0]))
        self.similarity_bias = nn.Parameter(torch.tensor([-5.0]))
        self.lstm = nn.LSTM(_BANDS, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, frames: Tensor) -> Tensor:
        """[speakers, utterances, frames, bands] -> similarities [utterances of all, speakers]."""
        speakers, utterances = frames.shape[:2]
        hidden = torch.relu(self.linear(self.lstm(frames.flatten(0, 1))[1][0][-1]))
        found = F.normalize(hidden, dim=1).view(speakers, utterances, -1)
        total = found.sum(1)
        means = F.normalize(total, dim=1)
        others = F.normalize(total[:, None] - found, dim=2)
        cosine = torch.einsum("sud,kd->suk", found, means)
        own = (found * others).sum(2)
        same = torch.eye(speakers, dtype=torch.bool)[:, None, :]
        cosine = torch.where(same, own[:, :, None], cosine)
        return (cosine * self.similarity_weight + self.similarity_bias).flatten(0, 1)


def drawn(seed: int, number: int) -> Tensor:
    """Return drawn spectrograms: [speakers, utterances, frames, bands]."""
    g = torch.Generator().manual_seed(1_000_003 * seed + number)
    voices = torch.randn(64, _BANDS, generator=torch.Generator().manual_seed(seed))
    chosen = torch.randperm(64, generator=g)[:_SPEAKERS]
    smooth = torch.nn.functional.avg_pool1d(voices[None], 5, 1, 2)[0][chosen]
    noise = torch.randn(_SPEAKERS, _UTTERANCES, _FRAMES, _BANDS, generator=g)
    moving = F.avg_pool2d(noise.flatten(0, 1)[:, None], (5, 3), 1, (2, 1))[:, 0].view_as(noise)
    return 0.02 * torch.exp(0.35 * smooth[:, None, None] + 2.0 * moving)


class Training:
    """The encoder and its Adam, as the file has them or as a state has them.

    Args:
        file: the state in the package's file.
        seed: of the data.
    """

    def __init__(self, file: State, seed: int) -> None:
        self.model, self.seed, self.step = Encoder(), seed, 0
        self.model.load_state_dict(file["model_state"])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        # The optimizer would otherwise change the given tensors.
        self.optimizer.load_state_dict(cloned(file["optimizer_state"]))

    def train(self, until: int) -> None:
        """Train up to step `until`."""
        while self.step < until:
            self.optimizer.zero_grad(set_to_none=True)
            self.loss(drawn(self.seed, self.step)).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), 3.0)
            self.optimizer.step()
            self.step += 1

    def loss(self, frames: Tensor) -> Tensor:
        """Mean loss of a batch."""
        return F.cross_entropy(self.model(frames), self._speakers())

    @torch.no_grad()
    def held_out(self) -> tuple[float, float]:
        """Loss and accuracy on utterances that are never trained on."""
        batches = [drawn(self.seed, 10**6 + number) for number in range(_HELD_OUT)]
        found = [self.model(frames) for frames in batches]
        losses = [float(F.cross_entropy(one, self._speakers())) for one in found]
        right = [float((one.argmax(1) == self._speakers()).double().mean()) for one in found]
        return statistics.fmean(losses), statistics.fmean(right)

    def _speakers(self) -> Tensor:
        return torch.arange(_SPEAKERS).repeat_interleave(_UTTERANCES)

    def state(self) -> State:
        """State that a resumed run needs."""
        return {"model_state": self.model.state_dict(), "optimizer_state": self.optimizer.state_dict()}


@dataclass(frozen=True)
class End:
    """Held-out loss and accuracy at the end, raw over stored bytes of all checkpoints."""

    loss: float
    accuracy: float
    ratio: float


def killed(file: State, seed: int, config: sp.Config | None, *, reshuffled: bool = False, steps: int = STEPS) -> End:
    """Train with two kills, each followed by a restore.

    Args:
        file: the state in the package's file.
        seed: of the data.
        config: of the store; None: states are kept as they are.
        reshuffled: other batches after each kill.
        steps: of the training.
    """
    url, kept = f"memory://bench-continued-{next(_NUMBERS)}", (0, file)
    store = None if config is None else sp.Store(url, config)
    sizes = [0, 0]

    def save(run: Training) -> None:
        nonlocal kept
        kept = run.step, cloned(run.state())
        sizes[0] += sum(x.nbytes for _, x in arrays(kept[1]))
        if store is not None:
            sizes[1] += store.save(*kept, kinds=sp.kinds(run.model, run.optimizer)).nbytes

    def restore(run: Training) -> Training:
        nonlocal store
        store = None if config is None else sp.Store(url, config)
        step, state = kept if store is None else (store.steps()[-1], store.load())
        again = Training(state, run.seed + (100 if reshuffled else 0))
        again.step = step
        return again

    run = Training(file, seed)
    run = through_kills(run, steps, KILLS, SPACING, advance=Training.train, save=save, restore=restore)
    run.seed = seed
    return End(*run.held_out(), sizes[0] / sizes[1] if sizes[1] else 1.0)


def rows(file: State, options: Options) -> list[Row]:
    """Loss and accuracy at the end by level, against the uninterrupted training.

    Only levels that `--only` asks for; with `--quick` a few steps, where asked for.
    """
    wanted = [name for name in (*LEVELS, OTHER_BATCHES) if options.wanted(f"{NAME}{name}".replace(",", ""))]
    if not wanted or (options.quick and options.only is None):
        return []
    seeds = range(1 if options.quick else SEEDS)
    steps = 40 if options.quick else STEPS
    exact, before = {}, {}
    for seed in seeds:
        run = Training(file, seed)
        before[seed] = run.held_out()
        run.train(steps)
        exact[seed] = run.held_out()
    systems: dict[str, Callable[[int], End]] = {
        name: lambda seed, make=make: killed(file, seed, make(), steps=steps)  # type: ignore[misc]
        for name, make in LEVELS.items()
    }
    systems[OTHER_BATCHES] = lambda seed: killed(file, seed, None, reshuffled=True, steps=steps)
    found: list[Row] = []
    for name in wanted:
        options.say(f"{NAME}{name}")
        found += options.done(_of_system(name, [systems[name](seed) for seed in seeds], exact, before, steps))
    return found


def _of_system(
    name: str, ends: list[End], exact: dict[int, tuple[float, float]], before: dict[int, tuple[float, float]],
    steps: int,
) -> list[Row]:  # fmt: skip
    losses = [100 * (end.loss / exact[seed][0] - 1) for seed, end in enumerate(ends)]
    points = [100 * (exact[seed][1] - end.accuracy) for seed, end in enumerate(ends)]
    loss, right = (statistics.fmean(found[i] for found in exact.values()) for i in (0, 1))
    first = statistics.fmean(found[0] for found in before.values())
    about = (
        f"seeds 0 to {len(ends) - 1}; {steps} steps from the file's own Adam state, {KILLS} kills, a checkpoint every "
        f"{SPACING}; drawn spectrograms; loss {first:.4f} before, {loss:.4f} uninterrupted, accuracy {right:.2%}"
    )
    wrong = "lossless does not end where the uninterrupted training does" * (name == "lossless" and any(losses))
    columns = (
        ("loss at the end", "%", losses),
        ("accuracy lost at the end", "points", points),
        ("whole state, all checkpoints", "x", [end.ratio for end in ends]),
    )
    size = sum(p.numel() for p in Encoder().parameters())
    return of_seeds(f"{NAME}{name}", ("cpu, 1 thread", size), columns, about, wrong)
