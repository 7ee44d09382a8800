"""Each part of the codec off in turn, in trainings that are killed and restored.

Two systems are taken apart: this project's own (equidistant codebook, kept along the chain, conditional coder,
rate-distortion encoder, extrapolated weights, gradients for protection) and the published one (pruning by
sensitivity, protection, k-means++ refit each time, rearrangement and Huffman). A variant changes one field of the
configuration or leaves the gradients out. Coders are compared on the *same* levels separately: late in an
uninterrupted training, between neighbouring checkpoints.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import shrinkpoint as sp
from shrinkpoint.codec import entropy
from shrinkpoint.codec.state import tree
from shrinkpoint.codec.state.leaves import is_array
from shrinkpoint.codec.weights.levels import LevelsReference
from shrinkpoint.kernels.levels import delta

from ..harness import Options, Row
from .faults import InStore, Searching
from .workloads import Run

if TYPE_CHECKING:
    from .endurance import Make, Model, Study

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
    from .endurance import OWN_CUBE

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
    """Bits and loss of every variant, and of the coders on the same levels."""
    from .endurance import DEVICE, over_seeds

    found: list[Row] = []
    name, size = model.workload.name, model.size
    options.seeds.update(range(study.ablation))
    for label, variant in variants().items():
        options.say(f"{name}, ablation, {label}")
        make: Make = variant.make
        outcomes = model.outcomes(make, range(study.ablation), FAILURES, study.spacing, study.batches)
        about = f"seeds 0 to {len(outcomes) - 1}, {FAILURES} failures"
        here = []
        for what, field, unit in (
            ("weights, all checkpoints", "weights", "x"),
            ("late weight deltas", "weight_bits", "bits"),
            ("loss change at a restore", "at_restore", "%"),
            ("degradation at the end", "degradation", "%"),
        ):
            values = [getattr(o, field) for o in outcomes]
            row, note = f"{name} ablation, {label}: {what}", f"{over_seeds(values)}; {about}"
            here.append(Row(row, DEVICE, size, statistics.fmean(values), unit, None, None, None, None, None, note))
        found += options.done(here)
    for label, bits in coded(model, study.spacing).items():
        row = f"{name} ablation, coders, {label}: late weight deltas"
        note = "seed 0, uninterrupted; levels alone, nearest entries, checkpoints of the last third"
        found.append(Row(row, DEVICE, size, bits, "bits", None, None, None, None, None, note))
    return found


CODERS = ("Huffman of differences", "run lengths and Huffman", "rearranged, run lengths and Huffman", "conditional")


def coded(model: Model, spacing: int) -> dict[str, float]:
    """Return bits a weight of late levels given those of the checkpoint before, by coder.

    Once with a codebook that is refit each time, as published, and once with one that is kept.
    """
    workload = model.workload
    run = Run(workload, 0)
    run.train(2 * workload.steps // 3)
    bits: dict[str, float] = {}
    configs = {
        "refit": published(prune=0.0, prune_metric="magnitude"),
        "kept": published(prune=0.0, prune_metric="magnitude", solver="exact", policy="frozen"),
    }
    heads: dict[str, sp.Checkpoint | None] = dict.fromkeys(configs)
    totals = {(policy, coder): 0 for policy in configs for coder in CODERS}
    weights = 0
    while run.step < workload.steps:
        run.train(min(run.step + spacing, workload.steps))
        state = {"model": run.state()["model"]}
        for policy, config in configs.items():
            before, heads[policy] = heads[policy], sp.compress(state, heads[policy], config)
            if before is None:
                continue
            for earlier, later in _levels(state, before, heads[policy]):
                for coder in CODERS:
                    totals[policy, coder] += len(_code(coder, earlier, later))
                weights += later.levels.size if policy == "kept" else 0
    for (policy, coder), total in totals.items():
        bits[f"{coder}, codebook {policy}"] = 8 * total / weights
    return bits


def _levels(state: Any, before: Any, after: Any) -> list[tuple[LevelsReference, LevelsReference]]:
    """Levels of the arrays that both checkpoints of a state quantized."""
    found = []
    for node in tree.flatten(state, is_array)[1]:
        record = after.record_at(node.key)
        pair = [ckpt.parent_reference(node.key, record.spec) for ckpt in (before, after)]
        if isinstance(pair[0], LevelsReference) and isinstance(pair[1], LevelsReference):
            found.append((pair[0], pair[1]))
    return found


def _code(coder: str, before: LevelsReference, after: LevelsReference) -> bytes:
    """Code the levels of an array by one of the coders."""
    if coder == "conditional":
        return entropy.encode_levels(after.levels, after.size, before.levels, before.size, "smallest")
    if coder.startswith("rearranged"):
        return entropy.encode_rearranged(after.levels, after.size, before.levels, before.size)
    differences = np.asarray(delta(before.levels, after.levels, max(before.size, after.size)))
    return entropy.encode_huffman(differences) if coder.startswith("Huffman") else entropy.encode_published(differences)
