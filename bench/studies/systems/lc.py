"""LC-Checkpoint's figures 3 to 6: rework, sizes of its steps, buckets, cost of a failure.

A checkpoint is made after every iteration, each over the restored one before it. After a failure at a random iteration
T the run goes on from the restored checkpoint with the batches after T; *rework* is the number of iterations until the
loss over the fixed evaluation set is at most that at T (the paper's footnote 2). SCAR and TOPN get as many bytes
as LC-Checkpoint took on average over the same run. Bytes are those of the arrays that all of them code: biases, which
all of them store exactly, do not count.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shrinkpoint as sp
from shrinkpoint.kernels.exponent import exponent_buckets

from ...harness import Options, Row, Rows, at_most, cpu_clock, threads, times_smaller
from ..baselines.partial import Scar, TopN
from ..baselines.parts import parts
from .table import Chain, Experiment, Mean, mean, stored_bytes

State = dict[str, Any]
SEEDS = 20
MOST_REWORK = 200
PAPER = "LC-Checkpoint, figure 3"
_PAPER_TIMES = {
    ("SCAR", 2): (2.88, 5.77), ("TOPN", 2): (2.17, 4.06), ("SCAR", 3): (1.9, 4.82), ("TOPN", 3): (1.52, 2.17),
}  # fmt: skip
"""By how much LC-Checkpoint's rework is less: smallest and largest of its tasks, by baseline and bits."""


# ---------------------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True)
class Task:
    """A small task that plain SGD trains.

    Args:
        name: as shown.
        model: builds it.
        batches: the minibatches of iteration t of a seed.
        loss: of the model on a batch, mean.
        evaluated: the batch on which the loss is taken between iterations.
        rate: learning rate.
        failures: first and last iteration after which a failure may come.
        note: differences from the paper.
    """

    name: str
    model: Callable[[], nn.Module]
    batches: Callable[[int, int], Iterator[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    evaluated: Callable[[], Any]
    rate: float
    failures: tuple[int, int]
    note: str


class Training:
    """A run of a task; an iteration is all minibatches of its number."""

    def __init__(self, task: Task, seed: int) -> None:
        self.task, self.seed, self.iteration = task, seed, 0
        torch.manual_seed(seed)
        self.model = task.model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=task.rate)

    def advance(self) -> None:
        """Train one iteration."""
        self.iteration += 1
        for batch in self.task.batches(self.seed, self.iteration):
            self.optimizer.zero_grad(set_to_none=True)
            self.task.loss(self.model, batch).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()

    def state(self) -> State:
        """Clone the weights; plain SGD has no other state."""
        model = {name: value.clone() for name, value in self.model.state_dict().items()}
        return {"model": model, "step": self.iteration}

    @torch.no_grad()
    def loss(self) -> float:
        """Loss over the evaluation set."""
        return float(self.task.loss(self.model, self.task.evaluated()))

    def rework(self, state: State, iteration: int, goal: float) -> int:
        """Return the iterations from a restored state to `goal`, at most MOST_REWORK."""
        self.model.load_state_dict(state["model"])
        self.iteration = iteration
        for done in range(MOST_REWORK):
            if self.loss() <= goal:
                return done
            self.advance()
        return MOST_REWORK


@cache
def _images() -> tuple[Tensor, Tensor]:
    """scikit-learn's digits, enlarged to MNIST's 28 x 28."""
    from sklearn.datasets import load_digits

    found = load_digits()
    small = torch.from_numpy(found.data.astype(np.float32) / 16.0).view(-1, 1, 8, 8)
    large = F.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    return large, torch.from_numpy(found.target.astype(np.int64))


def _image_batches(seed: int, iteration: int) -> Iterator[tuple[Tensor, Tensor]]:
    images, labels = _images()
    chosen = torch.from_numpy(np.random.default_rng([seed, iteration]).integers(0, len(labels), 128))
    yield images[chosen], labels[chosen]


def _classified(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
    )  # fmt: skip


_USERS, _ITEMS, _RANK = 600, 400, 8


class Factors(nn.Module):
    """A matrix of ratings as the product of two thin ones of deviation `scale`."""

    def __init__(self, users: int = _USERS, items: int = _ITEMS, rank: int = _RANK, scale: float = 0.3) -> None:
        super().__init__()
        self.users = nn.Parameter(scale * torch.randn(users, rank))
        self.items = nn.Parameter(scale * torch.randn(items, rank))

    def forward(self, places: Tensor) -> Tensor:
        """int64 [n, 2] -> ratings [n]."""
        return (self.users[places[:, 0]] * self.items[places[:, 1]]).sum(dim=1)


@cache
def _ratings() -> tuple[Tensor, Tensor]:
    """A twentieth of a matrix of rank 8 with noise; users and items of unequal popularity."""
    g = torch.Generator().manual_seed(3)
    users, items = (torch.randn(n, _RANK, generator=g) / _RANK**0.25 for n in (_USERS, _ITEMS))
    count = _USERS * _ITEMS // 20
    places = torch.stack([(torch.rand(count, generator=g) ** 1.5 * n).long() for n in (_USERS, _ITEMS)], dim=1)
    values = (users[places[:, 0]] * items[places[:, 1]]).sum(dim=1) + 0.2 * torch.randn(count, generator=g)
    return places, values


def _rating_batches(seed: int, iteration: int) -> Iterator[tuple[Tensor, Tensor]]:
    return _shuffled(_ratings(), 1200, seed, iteration)


def _shuffled(ratings: tuple[Tensor, Tensor], size: int, seed: int, iteration: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the ratings of an iteration in batches, in random order."""
    places, values = ratings
    order = torch.from_numpy(np.random.default_rng([seed, iteration]).permutation(len(values)))
    for chosen in torch.split(order, size):
        yield places[chosen], values[chosen]


def _squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


_TASKS = (
    Task(
        "logistic regression", lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), _image_batches, _classified,
        _images, 0.05, (30, 60), "scikit-learn's digits enlarged to 28 x 28, where the paper has MNIST; batches of 128",
    ),
    Task(
        "LeNet", _lenet, _image_batches, _classified, lambda: tuple(part[:400] for part in _images()), 0.1, (50, 70),
        "LeNet-5 on scikit-learn's digits enlarged to 28 x 28, where the paper has MNIST; batches of 128",
    ),
    Task(
        "matrix factorization", Factors, _rating_batches, _squared, _ratings, 30.0, (20, 40),
        "a drawn matrix of rank 8 (600 x 400, 5 % seen), where the paper has MovieLens; an iteration is a pass",
    ),
)  # fmt: skip
TASKS = {task.name: task for task in _TASKS}


# ---------------------------------------------------------------------------------------------------- systems


def _kinds(state: State) -> dict[str, str]:
    """Return the kinds of a task's matrices and kernels, which their names do not say."""
    return {name: "convolution" if x.ndim == 4 else "linear" for name, x in state["model"].items() if x.ndim > 1}


def raw_bytes(model: nn.Module) -> int:
    """Bytes of all weights of a model."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def coded_bytes(state: State) -> int:
    """Bytes of the weights that the systems code."""
    return sum(part.spec.nbytes for part in parts(state).of("weight"))


def _reworks(task: Task, seed: int, systems: dict[str, Callable[[float], Any]]) -> dict[str, tuple[int, float]]:
    """Return rework and mean size of each system, with a failure at one iteration.

    Args:
        task: the training.
        seed: of the training, the batches and the failure.
        systems: by name, given the first one's mean share of the size along this very run.
    """
    last = int(np.random.default_rng([99, seed]).integers(task.failures[0], task.failures[1] + 1))
    run = Training(task, seed)
    states = [run.state()]
    for _ in range(last):
        run.advance()
        states.append(run.state())
    goal, raw = run.loss(), coded_bytes(states[0])
    found, share = {}, 0.0
    for name, make in systems.items():
        chain = Chain(make(share))
        for state in states:
            chain.save(state, _kinds(state))
        mine = statistics.fmean(chain.sizes) / raw
        share = share or mine
        found[name] = run.rework(chain.restored(), last, goal), mine
    return found


def rework(task: Task, name: str, options: Options) -> list[Row]:
    """Figure 3 on one task; LeNet takes too long for `--quick`."""
    rows: list[Row] = []
    if options.quick and task.name == "LeNet":
        return rows
    with threads(1):
        for bits in (2,) if options.quick else (2, 3):
            # Partitions are not divided: take the number of partitions whose size is nearest.
            systems: dict[str, Callable[[float], Any]] = {
                "LC-Checkpoint": lambda _, bits=bits: sp.presets.lc_checkpoint(bits),  # type: ignore[misc]
                "SCAR": lambda share: Scar(1 / max(1, round(1 / share))),
                "TOPN": TopN,
            }
            seeds = []
            for seed in range(2 if options.quick else SEEDS):
                options.say(f"{name}, {bits} bits: seed {seed}")
                seeds.append(_reworks(task, seed, systems))
            rows += _rework_rows(name, task, bits, seeds)
    return rows


def _rework_rows(name: str, task: Task, bits: int, seeds: list[dict[str, tuple[int, float]]]) -> list[Row]:
    found = {system: mean([seed[system][0] for seed in seeds]) for system in seeds[0]}
    sizes = {system: 100 * statistics.fmean(seed[system][1] for seed in seeds) for system in seeds[0]}
    capped = sum(seed[system][0] >= MOST_REWORK for seed in seeds for system in seed)
    size = sum(p.numel() for p in task.model().parameters())
    ours, rows = found["LC-Checkpoint"], Rows(name)
    for peer in ("SCAR", "TOPN"):
        low, high = _PAPER_TIMES[peer, bits]
        note = (
            f"{ours} against {found[peer]}; {sizes['LC-Checkpoint']:.2f} % and {sizes[peer]:.2f} % of the coded "
            f"weights; {task.note}{f'; {capped} runs stopped at {MOST_REWORK}' if capped else ''}"
        )
        what, theirs = f"iterations of rework, {bits} bits", (peer, found[peer].mean)
        ratio = times_smaller(ours.mean, theirs[1])
        rows.add(what, ours.mean, "iterations", theirs, note, ratio=ratio, size=size)
        paper = f"{PAPER}: {low:g} to {high:g} over its tasks; least", low
        note = f"95 %: {_quotient(found[peer], ours)}"
        rows.add(f"{peer} over LC-Checkpoint, {bits} bits", ratio, "x", paper, note, size=size)
    return rows


def _quotient(above: Mean, below: Mean) -> str:
    """Range of a quotient of two means, by the ends of their intervals."""
    low = (above.mean - above.half) / (below.mean + below.half)
    bottom = below.mean - below.half
    return f"{max(low, 0):.2f} to {f'{(above.mean + above.half) / bottom:.2f}' if bottom > 0 else 'any'}"


# ---------------------------------------------------------------------------------------------------- figures 4 to 6

_STEPS: dict[str, Callable[[int], sp.Config]] = {
    "E": lambda _: sp.presets.lc_checkpoint(None, huffman=False),
    "E+P": lambda bits: sp.presets.lc_checkpoint(bits, huffman=False),
    "E+P+H": lambda bits: sp.presets.lc_checkpoint(bits),
}
_PAPER_SHARE = {
    2: {"E": 15.0, "E+P": 15.0 - 9.26, "E+P+H": 15.0 - 9.26 - 2.0},
    3: {"E": 15.0, "E+P": 15.0 - 6.23, "E+P+H": 15.0 - 6.23 - 1.6},
}
"""Means over the paper's tasks, by the gains that its section 4.3 names; it says below 5 and 10 % of the last."""


def shares(name: str, options: Options) -> list[Row]:
    """Figure 4: sizes after each step, of the same differences."""
    rows = Rows(name)
    with threads(1):
        for label, bits in itertools.product(("logistic regression",) if options.quick else TASKS, (2, 3)):
            run, base = Training(TASKS[label], 0), sp.presets.lc_checkpoint(bits)
            kinds = _kinds(run.state())
            head = sp.compress(run.state(), None, base, kinds=kinds)
            sizes: dict[str, list[int]] = {step: [] for step in _STEPS}
            for _ in range(10 if options.quick else 40):
                run.advance()
                for step, make in _STEPS.items():
                    sizes[step].append(stored_bytes(sp.compress(run.state(), head, make(bits), kinds=kinds)))
                head = sp.compress(run.state(), head, base, kinds=kinds)
            raw, limit = raw_bytes(run.model), {2: 5, 3: 10}[bits]
            for step, values in sizes.items():
                source = f"LC-Checkpoint, section 4.3{f', and below {limit} %' if step == 'E+P+H' else ''}"
                note = f"mean of {len(values)} updates, all bytes of the file's arrays; biases are exact"
                what, value = f"{label}, {bits} bits, {step}", 100 * statistics.fmean(values) / raw
                rows.add(what, value, "% of the weights", (source, _PAPER_SHARE[bits][step]), note, size=raw // 4)
    return rows


def buckets(name: str, options: Options) -> list[Row]:
    """Figure 5: error of the loss when one bucket of the difference is set to zero."""
    task, rows = TASKS["logistic regression"], Rows(name)
    with threads(1):
        for apart in (10,) if options.quick else (10, 30, 60):
            found = [_bucket_errors(task, seed, apart) for seed in range(2 if options.quick else 8)]
            ranks = min(len(errors) for errors in found)
            means = [statistics.fmean(errors[i] for errors in found) for i in range(ranks)]
            note = f"logistic regression, {len(found)} seeds, {ranks} buckets"
            for kept, bits in ((3, 2), (7, 3)):
                what = f"{apart} iterations apart, error in the {kept} highest buckets ({bits} bits keep them)"
                share = 100 * sum(means[:kept]) / sum(means) if any(means) else math.nan
                rows.add(what, share, "% of all buckets'", note=note)
            for i, value in enumerate(means[:8]):
                rows.add(f"{apart} iterations apart, bucket {i + 1}", value, "relative error squared")
    return rows


def _bucket_errors(task: Task, seed: int, apart: int) -> list[float]:
    """((V - V_i) / V)**2 for each nonempty bucket, by falling exponent, positive first."""
    run = Training(task, seed)
    for _ in range(20):
        run.advance()
    start = nn.utils.parameters_to_vector(run.model.parameters()).detach().clone()
    for _ in range(apart):
        run.advance()
    difference = nn.utils.parameters_to_vector(run.model.parameters()).detach() - start
    bits = difference.view(torch.int32).numpy()
    counts = exponent_buckets(difference.numpy()).counts
    truth = run.loss()
    errors = []
    for exponent in range(counts.shape[1] - 1, -1, -1):
        for sign in (0, 1):
            if counts[sign, exponent]:
                mine = ((bits >> 23) & 255 == exponent) & ((bits < 0) == bool(sign))
                changed = difference.masked_fill(torch.from_numpy(mine), 0.0)
                nn.utils.vector_to_parameters(start + changed, run.model.parameters())
                errors.append(((truth - run.loss()) / truth) ** 2)
    return errors


def failure(name: str, options: Options) -> list[Row]:
    """Figure 6: extra iterations to convergence after a failure in the 7th."""
    task, at, end = TASKS["matrix factorization"], 7, 30
    published = {"LC-Checkpoint, 3 bits, each iteration": 1.0, "full, every 10 iterations": 7.0}
    extra: dict[str, list[float]] = {system: [] for system in published}
    with threads(1):
        for seed in range(2 if options.quick else SEEDS):
            run, chain = Training(task, seed), Chain(sp.presets.lc_checkpoint(3))
            first = run.state()
            chain.save(first, _kinds(first))
            for iteration in range(1, end + 1):
                run.advance()
                if iteration <= at:
                    chain.save(run.state(), _kinds(first))
            for system, (state, step) in zip(extra, ((chain.restored(), at), (first, 0)), strict=True):
                extra[system].append(Training(task, seed).rework(state, step, run.loss()) + at - end)
    rows = Rows(name)
    for system, values in extra.items():
        note = f"{mean(values)}; a failure after iteration {at}, loss of iteration {end}; {task.note}"
        paper = "LC-Checkpoint, figure 6", published[system]
        rows.add(f"extra iterations to the same loss, {system}", mean(values).mean, "iterations", paper, note)
    return rows


_BIG_USERS, _BIG_ITEMS, _BIG_RANK, _BIG_RATINGS = 20_000, 10_000, 32, 1_000_000


def overhead(name: str, options: Options) -> list[Row]:
    """Section 4.5: processor time of a save after each iteration, in percent of it."""
    ratings = _BIG_RATINGS // 50 if options.quick else _BIG_RATINGS
    g = torch.Generator().manual_seed(4)
    places = torch.stack([torch.randint(n, (ratings,), generator=g) for n in (_BIG_USERS, _BIG_ITEMS)], dim=1)
    drawn = places, torch.randn(ratings, generator=g)
    model, batches = partial(Factors, _BIG_USERS, _BIG_ITEMS, _BIG_RANK, 1 / 6), partial(_shuffled, drawn, 2000)
    task = Task("matrix factorization", model, batches, _squared, lambda: drawn, 30.0, (0, 0), "")
    run, chain = Training(task, 0), Chain(sp.presets.lc_checkpoint(3))
    kinds = _kinds(run.state())
    spent: dict[str, list[float]] = {"train": [], "save": []}
    with threads(1):
        chain.save(run.state(), kinds)
        for iteration in range(2 if options.quick else 6):
            seconds = cpu_clock(run.advance, 1), cpu_clock(lambda: chain.save(run.state(), kinds), 1)
            if iteration:  # the first save pays for compilation
                for what, one in zip(spent.values(), seconds, strict=True):
                    what.append(one)
    train, save = (statistics.median(spent[what]) for what in ("train", "save"))
    size, value = sum(p.numel() for p in run.model.parameters()), 100 * save / train
    note = (
        f"an iteration {train:.2f} s of processor, a save {1e3 * save:.0f} ms, medians of {len(spent['train'])}; "
        f"{ratings:,} drawn ratings of {_BIG_USERS:,} users and {_BIG_ITEMS:,} items, rank {_BIG_RANK}"
    )
    rows, peer = Rows(name, size), ("LC-Checkpoint, section 4.5: around 4 %", 4.0)
    rows.add("matrix factorization, 3 bits, a save each iteration", value, "%", peer, note, target=at_most(4.0))
    return rows


def exponents(name: str, options: Options) -> list[Row]:
    """Figure 2: the number of exponents that cover nearly all elements of a convolution."""
    with threads(1):
        run = Training(TASKS["LeNet"], 0)
        for _ in range(3 if options.quick else 50):
            run.advance()
        before = run.state()["model"]
        run.advance()
        after = run.state()["model"]
    last = [key for key, value in after.items() if value.ndim == 4][-1]
    rows, paper = Rows(name), ("LC-Checkpoint, section 3.1.1: fewer usually suffice", 32)
    note = f"sign and exponent; LeNet after {run.iteration} iterations"
    for what, x in (("weights", after[last]), ("differences of one iteration", after[last] - before[last])):
        counts = np.sort(exponent_buckets(x.flatten().numpy()).counts.reshape(-1))[::-1]
        for share in (0.99, 1.0):
            needed = int(np.searchsorted(np.cumsum(counts), share * counts.sum() - 0.5)) + 1
            label = f"{what} of the last convolution, buckets of {share:.0%}"
            rows.add(label, needed, "buckets", paper, note, size=int(counts.sum()))
    return rows


EXPERIMENTS = (
    *(Experiment(f"LC-Checkpoint rework on {label}", partial(rework, task)) for label, task in TASKS.items()),
    Experiment("LC-Checkpoint sizes of its steps", shares),
    Experiment("LC-Checkpoint weight of a bucket", buckets),
    Experiment("LC-Checkpoint cost of a failure", failure),
    Experiment("LC-Checkpoint overhead", overhead),
    Experiment("LC-Checkpoint exponents", exponents),
)
