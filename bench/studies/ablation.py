"""Each part of the codec off in turn, in trainings that are killed and restored.

Two systems are taken apart: this project's own (equidistant codebook, kept along the chain, conditional coder,
rate-distortion encoder, extrapolated weights, gradients for protection) and the published one (pruning by
sensitivity, protection, k-means++ refit each time, rearrangement and Huffman). A variant changes one field of the
configuration or leaves the gradients out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import shrinkpoint as sp

from ..harness import Options, Row
from .endurance import OWN_CUBE, Model, Study, of_seeds
from .faults import InStore, Searching

RATE = 0.002
PRUNED = 0.1
OWN, PAPER = "own", "published"
FAILURES = 10


def own(rate: float = RATE, ahead: bool = True, **changes: Any) -> sp.Config:
    """Return our configuration with fields of its `Quantize` changed."""
    return sp.Config([("weight", sp.Quantize(**changes))], rate=rate, ahead=ahead)


def published(**changes: Any) -> sp.Config:
    """Return the published configuration with fields of its `Quantize` changed."""
    config = sp.presets.inshrinkerator(prune=PRUNED, prune_metric="sensitivity")
    weights, *rest = config.rules
    return sp.Config([("weight", dataclasses.replace(weights.codec, **changes)), *rest])  # type: ignore[type-var]


def with_exact(*kinds: str) -> sp.Config:
    """Return our configuration with some kinds of arrays exact."""
    return sp.Config([*((kind, sp.Exact()) for kind in kinds), *own().rules], rate=RATE, ahead=True)


@dataclasses.dataclass(frozen=True)
class Variant:
    """Variant of a system: its configuration, and whether it uses gradients or a search."""

    config: Callable[[], sp.Config]
    grads: bool = True
    searching: Searching | None = None

    def make(self, spacing: int) -> InStore:
        """Build the system, which saves every `spacing` steps."""
        return InStore(self.config(), grads=self.grads, spacing=spacing, searching=self.searching)


def variants() -> dict[str, Variant]:
    """Return all variants by name; the first of each system is the unchanged system."""
    return {
        f"{OWN}, all parts": Variant(own),
        f"{OWN}, no protection": Variant(lambda: own(protect=0.0)),
        f"{OWN}, pruning on": Variant(lambda: own(prune=PRUNED)),
        f"{OWN}, no sensitivity": Variant(own, grads=False),
        f"{OWN}, best entries, not equidistant": Variant(lambda: own(solver="exact")),
        f"{OWN}, k-means++ entries": Variant(lambda: own(solver="kmeans++")),
        f"{OWN}, codebook refit each time": Variant(lambda: own(policy="refit")),
        f"{OWN}, published coder": Variant(lambda: own(coder="published")),
        f"{OWN}, no rate-distortion encoder": Variant(lambda: own(rate=0.0)),
        f"{OWN}, weights not extrapolated": Variant(lambda: own(ahead=False)),
        f"{OWN}, moments exact": Variant(lambda: with_exact("first moment", "second moment")),
        f"{OWN}, weights exact": Variant(lambda: with_exact("weight")),
        f"{OWN}, searched for 1 %": Variant(own, searching=Searching(0.01, OWN_CUBE)),
        f"{PAPER}, all parts": Variant(published),
        f"{PAPER}, no protection": Variant(lambda: published(protect=0.0)),
        f"{PAPER}, no pruning": Variant(lambda: published(prune=0.0)),
        f"{PAPER}, no sensitivity": Variant(lambda: published(prune_metric="magnitude"), grads=False),
        f"{PAPER}, exact codebook": Variant(lambda: published(solver="exact")),
        f"{PAPER}, codebook kept": Variant(lambda: published(solver="exact", policy="frozen")),
        f"{PAPER}, conditional coder": Variant(lambda: published(coder="smallest")),
    }


def rows(model: Model, study: Study, options: Options) -> list[Row]:
    """Bits and loss of every variant."""
    found: list[Row] = []
    options.seeds.update(range(study.ablation))
    for label, variant in variants().items():
        options.say(f"{model.workload.name}, ablation, {label}")
        outcomes = model.outcomes(variant.make, range(study.ablation), FAILURES, study.spacing, study.batches)
        columns = ((what, unit, [getattr(o, field) for o in outcomes]) for what, field, unit in _COLUMNS)
        about = f"seeds 0 to {len(outcomes) - 1}, {FAILURES} failures"
        found += options.done(
            of_seeds(f"{model.workload.name} ablation, {label}", model.workload.place, columns, about)
        )
    return found


_COLUMNS = (
    ("weights, all checkpoints", "weights", "x"),
    ("late weight deltas", "weight_bits", "bits"),
    ("loss change at a restore", "at_restore", "%"),
    ("degradation at the end", "degradation", "%"),
)
