"""Small harm, measured on the model itself: its answers at once, later, and at the end.

A row is one family, setting and seed, plain JSON. Everything is a function of these three, so a row that was measured
need not be measured again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shrinkpoint as sp

from ..faults import InStore, Size, System, noted, ratio, through_kills
from ..workloads import Run, State
from .families import Family
from .settings import NULL, config_of

SPACING = 10
"""Steps from one checkpoint to the next."""
FAILURES = 10
AFTER = (0, 20, 100, 200)
"""Further steps after which a resumed training is compared with an exact resume."""
_PLATEAU = 0.9
"""Share of the schedule at which the loss is noted, too: a plateau is where little is gained from there on."""

_NEAR = 1e-4
_PERTURBED = (
    "weight", "bias", "exp_avg", "exp_avg_sq", "weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "up", "down",
    "max_exp_avg_sq", "exp_avg_slow", "square_avg", "momentum_buffer", "z", "masters",
)  # fmt: skip
"""Ends of the names of weights, moments, iterates and masters."""
Record = dict[str, Any]


class Perturbed(System):
    """The null: states in memory, restored within a relative L2 error of 1e-4.

    Args:
        seed: of the training; the noise is a function of it and of the step.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.state: State = {}
        self.frozen: set[str] = set()

    def save(self, run: Run) -> None:
        """Keep the run's state."""
        self.state = run.state()
        named = run.model.named_parameters(remove_duplicate=False)
        self.frozen = {name for name, p in named if not p.requires_grad}

    def restore(self) -> State:
        """Return the newest state, perturbed; buffers, frozen parameters and counts stay as they are."""
        generator = torch.Generator().manual_seed(1000 * self.seed + self.state["step"])

        def near(path: Any, x: Any) -> Any:
            name = next((str(key.key) for key in reversed(path) if hasattr(key, "key")), "")
            if not isinstance(x, Tensor) or not name.endswith(_PERTURBED) or name in self.frozen:
                return x
            noise = 2 * math.sqrt(3) * (torch.rand(x.shape, generator=generator) - 0.5)
            return x * (1 + _NEAR * noise)

        found: State = torch.utils._pytree.tree_map_with_path(near, self.state)
        return found


@dataclass(frozen=True)
class Answers:
    """Answers on the held-out set: outputs of all examples, mean loss, share of correct ones."""

    outputs: Tensor
    loss: float
    accuracy: float | None


@torch.no_grad()
def answers(family: Family, run: Run) -> Answers:
    """Return the answers of the model that a run is judged by; the run is not changed."""
    batches = family.workload.held_out()
    targets = [family.targets(batch) for batch in batches]
    with run.judged() as model:
        outputs = [family.outputs(model, batch) for batch in batches]
        loss = sum(float(run.loss(batch, model)) * len(y) for batch, y in zip(batches, targets, strict=True))
    found, right = torch.cat(outputs), torch.cat(targets)
    accuracy = float((found.argmax(-1) == right).double().mean()) if family.classifies else None
    return Answers(found, loss / len(right), accuracy)


def divergence(family: Family, exact: Answers, other: Answers) -> Record:
    """Return how far a model's answers are from those of the exact one, over the examples.

    `divergence` is the mean KL divergence of classes in nats, or the relative L2 distance of values; `changed` the
    share of examples whose most likely class is another; `loss` the relative change of the held-out loss.
    """
    if family.classifies:
        p, q = F.log_softmax(exact.outputs.double(), -1), F.log_softmax(other.outputs.double(), -1)
        far = float((p.exp() * (p - q)).sum(-1).mean())
        changed = float((exact.outputs.argmax(-1) != other.outputs.argmax(-1)).double().mean())
    else:
        far = float((other.outputs - exact.outputs).norm() / exact.outputs.norm())
        changed = None
    return {"divergence": far, "changed": changed, "loss": other.loss / exact.loss - 1}


def uninterrupted(family: Family, seed: int) -> Record:
    """Return loss and accuracy of an uninterrupted training, and its loss at nine tenths."""
    run = Run(family.workload, seed, until=round(_PLATEAU * family.workload.steps))
    before = answers(family, run)
    run.train(family.workload.steps)
    end = answers(family, run)
    return {"loss": end.loss, "accuracy": end.accuracy, "before": before.loss}


def killed(family: Family, setting: str, seed: int, failures: int = FAILURES) -> Record:
    """Train through evenly spread failures; return the end, each restore, and ratios.

    A checkpoint is taken every `SPACING` steps with bases as the configuration has them; a kill comes half way between
    two, and the training goes on from the stored checkpoint. Of the null only the end is looked at.
    """
    null, steps = setting == NULL, family.workload.steps
    system: System = Perturbed(seed) if null else InStore(config_of(setting), spacing=SPACING)
    watched = set() if null else noted(steps, failures, SPACING)
    stored: dict[int, Answers] = {}
    sizes: list[Size] = []
    restores = []

    def save(run: Run) -> None:
        size = system.save(run)
        sizes.extend([] if size is None else [size])
        if run.step in watched:
            stored[run.step] = answers(family, run)

    def restore(run: Run) -> Run:
        state, run = system.restore(), Run(family.workload, seed)
        run.restore(state)
        system.begin(run)
        if run.step in watched:
            restores.append({"step": run.step, **divergence(family, stored[run.step], answers(family, run))})
        return run

    run = Run(family.workload, seed)
    system.begin(run)
    try:
        run = through_kills(run, steps, failures, SPACING, advance=Run.train, save=save, restore=restore)
    finally:
        system.end()
    end = answers(family, run)
    found = {"loss": end.loss, "accuracy": end.accuracy, "restores": restores}
    if null:
        return found
    deltas, late = [s for s in sizes if s.is_delta], [s for s in sizes[2 * len(sizes) // 3 :] if s.is_delta]
    bases = [s for s in sizes if not s.is_delta]
    return found | {
        "ratio": ratio(sizes), "weights": ratio(sizes, "weights"), "bases": ratio(bases), "deltas": ratio(deltas),
        "late": ratio(late),
    }  # fmt: skip


def chain(family: Family, settings: Sequence[str], seed: int) -> dict[str, Record]:
    """Return the ratios of chains of one uninterrupted training, which settings share."""
    systems = {setting: InStore(config_of(setting), spacing=SPACING) for setting in settings}
    run = Run(family.workload, seed)
    sizes: dict[str, list[Size]] = {setting: [] for setting in settings}
    for step in range(SPACING, family.workload.steps + 1, SPACING):
        run.train(step)
        for setting, system in systems.items():
            sizes[setting].append(system.save(run))
    for system in systems.values():
        system.end()
    return {s: {"ratio": ratio(found), "weights": ratio(found, "weights")} for s, found in sizes.items()}


def resumed(
    family: Family, settings: Sequence[str], seed: int, done: Callable[[str, Record], None],
    after: Sequence[int] = AFTER,
) -> None:  # fmt: skip
    """Resume one training from its middle by several settings; hand over the row of each.

    The third checkpoint of a chain is restored. `after` holds, by further steps, how far the resumed training's
    answers are from those of an exact resume; `bits` the stored bits an element of weights, first and second moments,
    in the base and in the last delta.
    """
    run = Run(family.workload, seed)
    middle = family.workload.steps // 2 // SPACING * SPACING
    states = [run.train(step).state() for step in (middle - 2 * SPACING, middle - SPACING, middle)]
    kinds = run.kinds()
    exact = _going_on(family, seed, states[-1], after)
    for setting in settings:
        chain: list[sp.Checkpoint] = []
        for state in states:
            chain.append(sp.compress(state, chain[-1] if chain else None, config_of(setting), kinds=kinds))
        pairs = zip(after, exact, _going_on(family, seed, sp.decompress(chain[-1]), after), strict=True)
        far = {str(n): divergence(family, a, b) for n, a, b in pairs}
        done(setting, {"after": far, "bits": {"base": _bits(chain[0]), "delta": _bits(chain[-1])}})


def _going_on(family: Family, seed: int, state: State, after: Sequence[int]) -> list[Answers]:
    run = Run(family.workload, seed)
    run.restore(state)
    begin = run.step
    return [answers(family, run.train(begin + steps)) for steps in after]


def _bits(ckpt: sp.Checkpoint) -> Record:
    """Return stored bits an element of matrices: of weights, first and second moments."""
    ends = {"exp_avg": "first moments", "exp_avg_sq": "second moments"}
    sums: dict[str, list[int]] = {}
    for row in ckpt.summary():
        part = ends.get(row.path.rpartition("/")[2], "weights" if row.path.startswith("model/") else "")
        if part and len(row.shape) > 1:
            held = sums.setdefault(part, [0, 0])
            held[0] += 8 * row.stored_bytes
            held[1] += row.raw_bytes // 4
    return {part: bits / count for part, (bits, count) in sums.items()}
