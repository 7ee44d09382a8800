"""Search spaces of Inshrinkerator's tables 9 to 12 as data, and one ladder for all.

A space gives a state's candidates by ascending bins, and the search, the same for all, takes the first whose restored
state is good enough. Where layers have bins of their own, their mean counts each layer by its elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

import shrinkpoint as sp
from shrinkpoint.searching.cube import Cube

from ..workloads import State
from .quantizers import Floats, Range, Sketch, clustered, even, greedy_ranges, weights_of, with_weights

Kinds = Mapping[str, Any]
LADDER = (4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 160, 192, 254)
POWERS = (8, 16, 32, 64, 128, 256)


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
    """Table 9, for `presets.inshrinkerator`: bins, protected shares, bins of embeddings; as table 7 without pruning."""
    weights, cube = weights_of(state), Cube(prune=(0.0,), metric=("magnitude",), system="inshrinkerator")

    def restored(config: sp.Config) -> Any:
        return sp.decompress(sp.compress(state, cfg=config, kinds=kinds))

    found = []
    for point, embedding_bins in itertools.product(cube, cube.embedding_bins):
        bins = _apart(weights, kinds, point.bins, embedding_bins)
        config = point.config(embedding_bins=embedding_bins)
        found.append(Candidate(_mean(weights, bins), (*bins.values(), point.protect), partial(restored, config)))
    return iter(sorted(found, key=lambda one: one.bins))


def uniform(state: State, _: Kinds) -> Iterator[Candidate]:
    """Table 10, for QD-compressor: even bins by a layer's entropy, between two limits."""
    from ..baselines.qd import QDCompressor, wanted_bins

    weights = weights_of(state)
    wanted = {name: wanted_bins(x) for name, x in weights.items()}

    def restored(bins: Mapping[str, int]) -> State:
        return with_weights(state, {name: even(x, bins[name]) for name, x in weights.items()})

    found = []
    for least, most in itertools.product(POWERS, POWERS):
        if least <= most:
            system = QDCompressor(least, most)
            bins = {name: system.within(count) for name, count in wanted.items()}
            found.append(Candidate(_mean(weights, bins), tuple(bins.values()), partial(restored, bins)))
    return iter(sorted(found, key=lambda one: one.bins))


STEPS, RATIOS = (10, 25, 50, 100), (0.1, 0.2, 0.3, 0.4, 0.5)
"""Of Check-N-Run's greedy search: parts that a range is cut into, and shares of it that are walked through."""


def adaptive(state: State, _: Kinds) -> Iterator[Candidate]:
    """Table 11, for Check-N-Run: even bins in a range narrowed by a layer's greedy search, when it is reached."""
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
    weights = weights_of(state)

    def restored(bins: Mapping[str, int]) -> State:
        return with_weights(state, {name: clustered(x, bins[name]) for name, x in weights.items()})

    found = []
    for count, embedding_bins in itertools.product(POWERS, (16, 32)):
        bins = _apart(weights, kinds, count, embedding_bins)
        found.append(Candidate(_mean(weights, bins), tuple(bins.values()), partial(restored, bins)))
    return iter(sorted(found, key=lambda one: one.bins))
