"""Inshrinkerator's tables 7 and 9 to 12, figures 5 and 12: bins, rankings, delta coders."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import shrinkpoint as sp
from shrinkpoint.codec import entropy
from shrinkpoint.codec.weights.levels import LevelsReference
from shrinkpoint.codec.weights.quantize import Quantize
from shrinkpoint.kernels.levels import delta
from shrinkpoint.searching.cube import Cube

from ...harness import Options, Row, Rows, threads
from .. import workloads
from ..baselines.parts import Floats, Grid, parts
from ..baselines.quantizers import POWERS, RATIOS, STEPS, Range, Sketch, clustered, greedy_ranges, uniform_space
from ..search import Training, chain, trained
from ..workloads import Run, State, Workload
from .table import FIGURES, Experiment, restored

THRESHOLDS = (0.001, 0.01, 0.05)
CHECKPOINTS = 10
OURS, TAILS, BARE, PUBLISHED = "ours, exact", "ours, sigma 0.2", "ours, nothing protected", "Inshrinkerator"
UNIFORM, ADAPTIVE, KMEANS = "uniform", "adaptive uniform", "k-means, outliers kept"
_PAPER: dict[str, Any] = FIGURES["inshrinkerator table 7"]
"""Table 7. Its text drops cells without a result: of four columns ResNet18 has two figures at 0.1 % and all four at 1
and 5 %. GPT-2 and ViT have eight figures, two, three and three, and none of k-means, which the paper says took over
half an hour for models of their size."""


# ---------------------------------------------------------------------------------------------------- search spaces

# A space gives a state's candidates by ascending bins, and the search, the same for all, takes the first whose restored
# state is good enough. Where layers have bins of their own, their mean counts each layer by its elements.


def weights_of(state: State) -> dict[str, Floats]:
    """The weights of a model that our codec would quantize, flat, by their names."""
    return {part.path.split("/", 1)[1]: part.values for part in parts(state).of("weight")}


def with_weights(state: State, values: Mapping[str, Floats]) -> State:
    """Return the state with some weights replaced."""
    model = {
        name: torch.from_numpy(values[name]).view(value.shape) if name in values else value
        for name, value in state["model"].items()
    }
    return {**state, "model": model}


def even(x: Floats, bins: int, within: Range | None = None) -> Floats:
    """The nearest of `bins` even values in a range, by default that of x."""
    low, high = (float(x.min()), float(x.max())) if within is None else within
    grid = Grid(low, high, bins)
    return grid.values(grid.levels(x))


Kinds = Mapping[str, Any]
LADDER = (4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 160, 192, 254)
"""Numbers of bins that every system is tried with."""


@dataclass(frozen=True)
class Candidate:
    """A configuration of a system, applied to one state.

    Args:
        bins: mean over the quantized weights.
        same: of a space's candidates, those for which it is equal restore the same.
        restore: the state after a save and a load.
    """

    bins: float
    same: Hashable
    restore: Callable[[], State] = field(compare=False)


Space = Callable[[State, Kinds], Iterator[Candidate]]
"""Candidates for a state whose weights are of these kinds, by ascending bins."""


def ladder(restore: Callable[[State, int, Kinds], State]) -> Space:
    """Search space with the same numbers of bins for every system and no other choice."""

    def space(state: State, kinds: Kinds) -> Iterator[Candidate]:
        return (Candidate(bins, bins, partial(restore, state, bins, kinds)) for bins in LADDER)

    return space


def kinds_of(module: nn.Module) -> Kinds:
    """Return the kinds of a module's weights; a tied head counts as an embedding."""
    found: dict[str, Any] = dict(sp.kinds(module))
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for same in names.values():
        table = next((name for name in same if found[name].layer == "embedding"), None)
        found |= {} if table is None else dict.fromkeys(same, found[table])
    return found


def _mean(weights: Mapping[str, Floats], bins: Mapping[str, int]) -> float:
    """Mean number of bins of an element."""
    return sum(bins[name] * x.size for name, x in weights.items()) / sum(x.size for x in weights.values())


def _apart(weights: Mapping[str, Floats], kinds: Kinds, bins: int, embedding_bins: int) -> dict[str, int]:
    """Number of bins of each weight, where embeddings have their own."""
    return {name: embedding_bins if kinds[name].layer == "embedding" else bins for name in weights}


def published(state: State, kinds: Kinds) -> Iterator[Candidate]:
    """Table 9, for `presets.inshrinkerator`: bins, also of embeddings, and protected shares."""
    weights, cube = weights_of(state), Cube(prune=(0.0,), metric=("magnitude",), system="inshrinkerator")

    def restored(config: sp.Config) -> Any:
        return sp.decompress(sp.compress(state, cfg=config, kinds=kinds))

    found = []
    for point, embedding_bins in itertools.product(cube, cube.embedding_bins):
        bins = _apart(weights, kinds, point.bins, embedding_bins)
        config = point.config(embedding_bins=embedding_bins)
        found.append(Candidate(_mean(weights, bins), (*bins.values(), point.protect), partial(restored, config)))
    return iter(sorted(found, key=lambda one: one.bins))


def _quantized(
    state: State, weights: Mapping[str, Floats], quantize: Callable[[Floats, int], Floats], bins: Mapping[str, int]
) -> State:
    """Return the state whose weights were quantized to their numbers of bins."""
    return with_weights(state, {name: quantize(x, bins[name]) for name, x in weights.items()})


def uniform(state: State, _: Kinds) -> Iterator[Candidate]:
    """Table 10, for QD-compressor: even bins by a layer's entropy, between two limits."""
    weights = weights_of(state)
    for mean, bins, _system in uniform_space(weights.values()):
        own = dict(zip(weights, bins, strict=True))
        yield Candidate(mean, bins, partial(_quantized, state, weights, even, own))


def adaptive(state: State, _: Kinds) -> Iterator[Candidate]:
    """Table 11, for Check-N-Run: even bins in a range narrowed by a greedy search."""
    weights = weights_of(state)
    sketches = {name: Sketch.of(x) for name, x in weights.items()}

    def restored(bins: int, ranges: Mapping[str, Range]) -> State:
        return with_weights(state, {name: even(x, bins, ranges[name]) for name, x in weights.items()})

    for bins, steps in itertools.product(POWERS, STEPS):
        ranges = {name: greedy_ranges(one, bins, steps, RATIOS) for name, one in sketches.items()}
        for place in range(len(RATIOS)):
            own = {name: found[place] for name, found in ranges.items()}
            yield Candidate(bins, (bins, *own.values()), partial(restored, bins, own))


def kmeans(state: State, kinds: Kinds) -> Iterator[Candidate]:
    """Table 12, for GOBO: clusters of least L1 distance, outliers apart."""
    weights, found = weights_of(state), []
    for count, embedding_bins in itertools.product(POWERS, (16, 32)):
        bins = _apart(weights, kinds, count, embedding_bins)
        restore = partial(_quantized, state, weights, clustered, bins)
        found.append(Candidate(_mean(weights, bins), tuple(bins.values()), restore))
    return iter(sorted(found, key=lambda one: one.bins))


# ---------------------------------------------------------------------------------------------------- table 7


@dataclass(frozen=True)
class System:
    """A column of table 7.

    Args:
        space: the candidates.
        note: a description.
    """

    space: Space
    note: str


def _exact(**changes: Any) -> Space:
    """Search space of optimal codebooks, by number of entries."""
    how: dict[str, Any] = {"solver": "exact", "policy": "refit", **changes}
    return _of_config(lambda bins: sp.Config([sp.Rule("weight", Quantize(bins=bins, **how))]))


def _of_config(config: Callable[[int], sp.Config]) -> Space:
    return ladder(lambda state, bins, kinds: restored(state, config(bins), kinds))


def _each(quantize: Callable[[Floats, int], Floats]) -> Space:
    """Search space of another quantizer for every weight that our codec would quantize."""

    def restored(state: State, bins: int, _: Kinds) -> State:
        weights = weights_of(state)
        return _quantized(state, weights, quantize, dict.fromkeys(weights, bins))

    return ladder(restored)


def _narrowed(x: Floats, bins: int) -> Floats:
    return even(x, bins, greedy_ranges(Sketch.of(x), bins, 25, (0.5,))[0])


ON_THE_LADDER: dict[str, System] = {
    OURS: System(_exact(), "optimal codebook on the sketch, 0.05 % protected"),
    TAILS: System(_exact(sigma=0.2), "the same for Inshrinkerator's weights of buckets, 0.2 frequency + 0.8 magnitude"),
    BARE: System(_exact(protect=0.0), "optimal codebook on the sketch alone"),
    PUBLISHED: System(_of_config(sp.presets.inshrinkerator), "k-means++ with sigma 0.2, 0.05 % protected"),
    UNIFORM: System(_each(even), "the same bins in every layer, over its whole range"),
    ADAPTIVE: System(_each(_narrowed), "a layer's range narrowed by Check-N-Run's greedy search: 25 bins, ratio 0.5"),
    KMEANS: System(_each(clustered), "as in GOBO"),
}
"""The same numbers of bins for all, and nothing else to choose."""
IN_THEIR_SPACES: dict[str, System] = {
    PUBLISHED: System(published, "table 9: bins, bins of embeddings, protected share; k-means++ with sigma 0.2"),
    UNIFORM: System(uniform, "table 10: limits of the bins that a layer's entropy asks for, as in QD-compressor"),
    ADAPTIVE: System(adaptive, "table 11: bins, step bins and range of Check-N-Run's greedy search"),
    KMEANS: System(kmeans, "table 12: bins, bins of embeddings, outliers below -4, as in GOBO"),
}
"""What each system's search has to choose from in the paper."""


def least_bins(training: Training, state: State, candidates: Iterable[Candidate]) -> dict[float, float | None]:
    """Bins of the first candidate within each threshold; None if no candidate is.

    Args:
        training: evaluates.
        state: the exact one.
        candidates: by ascending bins; of those that restore the same, one is evaluated.
    """
    exact = training.evaluate(state)
    found: dict[float, float | None] = dict.fromkeys(THRESHOLDS)
    known: dict[Hashable, float] = {}
    for one in candidates:
        if one.same not in known:
            known[one.same] = training.evaluate(one.restore()) / exact - 1
        for threshold in THRESHOLDS:
            if found[threshold] is None and known[one.same] <= threshold:
                found[threshold] = one.bins
        if found[THRESHOLDS[0]] is not None:
            break
    return found


def _workload(label: str, quick: bool) -> Workload:
    """Return a workload with a held-out set small enough for hundreds of evaluations."""
    steps = 60 if quick else 360 if label == "GPT" else 600
    workload = dataclasses.replace(workloads.WORKLOADS[label](), steps=steps)
    if label == "GPT":
        windows = workload.held_out()
        return dataclasses.replace(workload, held_out=lambda: [batch[:6] for batch in windows[:12]])
    if label == "embedding":
        clicks = workload.held_out()
        return dataclasses.replace(workload, held_out=lambda: clicks[:4])
    return workload


@cache
def _trained(label: str, quick: bool) -> tuple[Training, Kinds]:
    """Return the checkpoints for both forms of the table, and the kinds of their weights."""
    workload = _workload(label, quick)
    return trained(workload, 1 if quick else CHECKPOINTS), kinds_of(workload.model())


def bins(label: str, systems: Mapping[str, System], name: str, options: Options) -> list[Row]:
    """Table 7 for one model."""
    rows: list[Row] = []
    if options.quick and label != "MLP":
        return rows
    with threads(1):
        training, kinds = _trained(label, options.quick)
        for column, system in systems.items():
            if options.quick and column not in (OURS, UNIFORM):
                continue
            found = []
            for checkpoint in training.checkpoints:
                options.say(f"{name}: {column}, step {checkpoint.step}")
                found.append(least_bins(training, checkpoint.state, system.space(checkpoint.state, kinds)))
            rows += _bins_rows(name, label, column, system, training, found)
    return rows


def _bins_rows(
    name: str, label: str, column: str, system: System, training: Training, found: list[dict[float, float | None]]
) -> list[Row]:
    figures = _PAPER.get(label, {})
    rows, steps = Rows(name), ", ".join(str(checkpoint.step) for checkpoint in training.checkpoints)
    for threshold in THRESHOLDS:
        values = [bins[threshold] for bins in found]
        got = [value for value in values if value is not None]
        of_paper = figures.get(PUBLISHED if column in (OURS, TAILS, BARE) else column, {})
        figure = of_paper.get(f"{100 * threshold:g} %")
        missing = f"; {len(values) - len(got)} checkpoints find none" if len(got) < len(values) else ""
        said = ", ".join("-" if value is None else f"{value:.4g}" for value in values)
        note = f"steps {steps}: {said}{missing}; {system.note}; without pruning, the fewest bins"
        note += " that pass on held-out loss"
        source = f"Inshrinkerator, table 7, {figures['model']}" if figure else None
        mean = statistics.fmean(got) if len(got) == len(values) else None
        what = f"{100 * threshold:g} % degradation, {column}"
        rows.add(what, mean, "bins", (source, figure), note, size=training.size)
    return rows


# ---------------------------------------------------------------------------------------------------- figure 12


Levels = list[LevelsReference]
"""Levels of all quantized weights of a checkpoint."""


def _levels(state: State, ckpt: sp.Checkpoint) -> Levels:
    references = (ckpt.parent_reference(part.key, part.spec) for part in parts(state).arrays)
    return [reference for reference in references if isinstance(reference, LevelsReference)]


def _of_codec(workload: Workload, codec: Quantize) -> tuple[list[Levels], str]:
    """Levels along a training, ten steps apart, by one codec without pruning."""
    run, head, config, found = Run(workload, 0), None, sp.Config([sp.Rule("weight", codec)]), []
    kinds = kinds_of(run.model)
    for step in range(_APART, workload.steps + 1, _APART):
        run.train(step)
        state = {"model": run.state()["model"]}
        head = sp.compress(state, head, config, kinds=kinds)
        found.append(_levels(state, head))
    return found, "16 bins, nothing pruned"


def _searched(workload: Workload, say: Callable[[str], None]) -> tuple[list[Levels], str]:
    """Levels along a training, ten steps apart, by the configuration searched each time."""
    training = trained(workload, workload.steps // _APART)
    options = sp.SearchOptions(cube=Cube(system="inshrinkerator"), direction="lower", progress=False)
    steps = chain(training, THRESHOLDS[-1], say, options)
    points = [step.found.point for step in steps if step.found.point is not None]
    bins, prune = (statistics.fmean(values) for values in zip(*((p.bins, p.prune) for p in points), strict=True))
    found = [_levels(at.state, step.stored) for at, step in zip(training.checkpoints, steps, strict=True)]
    return (
        found,
        f"searched at each checkpoint for 5 % of the loss: {bins:.3g} bins, {100 * prune:.3g} % pruned on average",
    )


def _huffman_of_differences(old: LevelsReference, new: LevelsReference, coder: Callable[..., Any]) -> int:
    return len(coder(delta(old.levels, new.levels, max(old.size, new.size))))


CODERS: dict[str, Callable[[LevelsReference, LevelsReference], int]] = {
    "Huffman": partial(_huffman_of_differences, coder=entropy.encode_huffman),
    "run lengths + Huffman": partial(_huffman_of_differences, coder=entropy.encode_published),
    "rearranged": lambda old, new: len(entropy.encode_rearranged(new.levels, new.size, old.levels, old.size)),
    "ours": lambda old, new: len(entropy.encode_levels(new.levels, new.size, old.levels, old.size, "smallest")),
}
_FIGURE = {"Huffman": (25.0, 30.0), "run lengths + Huffman": (28.0, 79.0), "rearranged": (39.0, 366.0)}
"""Overall and highest ratio on ResNet-152."""
SEARCHED, _APART = "searched", 10
_POLICIES = {
    "codebook refit": Quantize(bins=16, solver="kmeans++", sigma=0.2, policy="refit", coder="published"),
    "codebook frozen": Quantize(bins=16, solver="exact", policy="frozen"),
    SEARCHED: None,
}
"""How the codebook of each checkpoint is made: by a codec, or as the paper does, by a search over its whole space."""


def ablation(name: str, options: Options) -> list[Row]:
    """Figure 12: the same levels by each coder, for codebooks refit, frozen, and searched with pruning."""
    rows, paper = Rows(name), "Inshrinkerator, section 9.3, ResNet-152"
    with threads(1):
        for label, policy in itertools.product(("MLP",) if options.quick else ("CNN", "GPT"), _POLICIES):
            workload, codec = _workload(label, options.quick), _POLICIES[policy]
            found, how = _searched(workload, options.say) if codec is None else _of_codec(workload, codec)
            ratios: dict[str, list[float]] = {coder: [] for coder in CODERS}
            for previous, levels in itertools.pairwise(found):
                raw = 4 * sum(reference.levels.size for reference in levels)
                for coder, size in CODERS.items():
                    ratios[coder].append(raw / sum(size(*pair) for pair in zip(previous, levels, strict=True)))
            note = f"{how}; {len(found) - 1} deltas {_APART} steps apart, bytes of the levels alone over float32"
            for coder, values in ratios.items():
                figures = _FIGURE.get(coder, (None, None)) if policy == SEARCHED else (None, None)
                ends = ("overall", statistics.harmonic_mean(values)), ("highest", max(values))
                for (what, value), figure in zip(ends, figures, strict=True):
                    peer = paper if figure else None, figure
                    rows.add(f"{label}, {policy}, {coder}, {what}", value, "x", peer, note)
    return rows


# ---------------------------------------------------------------------------------------------------- figure 5


def rankings(name: str, options: Options) -> list[Row]:
    """Figure 5b: how far magnitude and sensitivity agree on the importance of weights."""
    rows = Rows(name)
    with threads(1):
        for label in ("MLP",) if options.quick else ("MLP", "CNN"):
            training, _ = _trained(label, options.quick)
            for checkpoint in training.checkpoints[:: max(1, len(training.checkpoints) - 1)]:
                ranks = _ranks(checkpoint.state["model"], checkpoint.grads or {})
                where, size = f"{label} at step {checkpoint.step}", ranks.shape[1]
                agreement = float(np.corrcoef(*ranks)[0, 1])
                rows.add(f"{where}, correlation of the ranks", agreement, "", size=size)
                for share in (0.005, 0.2):
                    both = 100 * float((ranks > 1 - share).all(axis=0).sum() / (ranks[0] > 1 - share).sum())
                    what = f"of the {100 * share:g} % largest, those also most sensitive"
                    rows.add(f"{where}, {what}", both, "%", size=size)
    return rows


def _ranks(model: State, grads: Mapping[str, Any]) -> npt.NDArray[Any]:
    """Return each matrix element's rank by magnitude and by sensitivity, from 0 to 1."""
    names = [key for key, x in model.items() if x.ndim > 1]
    weights, slopes = (torch.cat([arrays[key].flatten() for key in names]) for arrays in (model, grads))
    scores = weights.abs(), (weights * slopes).abs()
    return np.stack([(score.argsort().argsort() / (score.numel() - 1)).numpy() for score in scores])


EXPERIMENTS = (
    *(
        Experiment(f"Inshrinkerator bins on {label}", partial(bins, label, ON_THE_LADDER))
        for label in workloads.WORKLOADS
    ),
    *(
        Experiment(f"Inshrinkerator spaces on {label}", partial(bins, label, IN_THEIR_SPACES))
        for label in workloads.WORKLOADS
    ),
    Experiment("Inshrinkerator delta coder", ablation),
    Experiment("Inshrinkerator rankings", rankings),
)
