"""Trainings of the campaign: what a lossy checkpoint changes at once, later, and at the end.

A row is one family, setting and seed, one line of JSON. Everything is a function of these three, so a row that was
measured is never measured again. A line names the commit that measured it, the versions of this package and torch, and
the configuration; lines that were measured before lines named it have null there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shrinkpoint as sp

from ... import machine
from ...devices import threads
from ..faults import InStore, Size, System, killed_training, ratio
from ..workloads import Run, State
from .families import FAMILIES, SET_ASIDE, Family
from .held_back import ALL, HELD_BACK, PACKAGES
from .settings import KILLED, LEVELS, NULL, PARTS, config_of

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
    null = setting == NULL
    system: System = Perturbed(seed) if null else InStore(config_of(setting), spacing=SPACING)
    judge = None if null else partial(answers, family)
    done = killed_training(family.workload, seed, system, failures, SPACING, judge)
    restores = [{"step": step, **divergence(family, before, after)} for step, before, after in done.restores]
    end = answers(family, done.run)
    found = {"loss": end.loss, "accuracy": end.accuracy, "restores": restores}
    return found if null else found | _ratios(done.sizes)


def _ratios(sizes: Sequence[Size]) -> Record:
    return {"ratio": ratio(sizes), "weights": ratio(sizes, "weights")}


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
    return {setting: _ratios(found) for setting, found in sizes.items()}


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


# ------------------------------------------------------------------------------------------------- rows kept in a file

RESULTS = Path(__file__).parents[2] / "results" / "harm.jsonl"
"""Where rows are kept."""
UNINTERRUPTED = "uninterrupted"
Key = tuple[str, str, str, int]


class Rows:
    """Rows in a file of JSON lines, each written as soon as it is measured.

    Args:
        path: of the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the process was stopped while it wrote a line
            path.write_text(whole)
        self.rows = [json.loads(line) for line in whole.splitlines()]
        self.keys = {_key(row) for row in self.rows}

    def has(self, what: str, family: str, setting: str, seed: int) -> bool:
        """Return whether this was measured."""
        return (what, family, setting, seed) in self.keys

    def add(self, what: str, family: str, setting: str, seed: int, found: Record) -> None:
        """Keep a row."""
        row = {"what": what, "family": family, "setting": setting, "seed": seed, **found, **_origin(setting)}
        with self.path.open("a") as file:
            file.write(json.dumps(_rounded(row)) + "\n")
        self.rows.append(row)
        self.keys.add(_key(row))


@cache
def _commit() -> str | None:
    """Return the commit as of the first row.

    Code that is changed later is not what this process runs.
    """
    return machine.commit(RESULTS)


def _origin(setting: str) -> Record:
    """Return what a row was measured with: commit, versions, configuration."""
    config = None if setting in (NULL, UNINTERRUPTED) else config_of(setting).to_json()
    return {"commit": _commit(), "shrinkpoint": sp.__version__, "torch": torch.__version__, "config": config}


def _key(row: Record) -> Key:
    return row["what"], row["family"], row["setting"], row["seed"]


def _rounded(found: Any) -> Any:
    """Round numbers to seven digits, to keep the file small."""
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    if isinstance(found, list):
        return [_rounded(value) for value in found]
    return float(f"{found:.7g}") if isinstance(found, float) else found


def measure(
    rows: Rows,
    seeds: Iterable[int],
    *,
    families: Sequence[str] = tuple(ALL),
    levels: Sequence[str] = KILLED,
    parts: Sequence[str] = tuple(PARTS),
    say: Callable[[str], None] = print,
) -> None:
    """Measure the missing rows: killed trainings by seed, then each part's own effect.

    A family whose optimizer's package is not installed is left out.

    Of seed 0 the ratios of chains are measured, too; of the first seed, whether a lossless training ends as the
    uninterrupted one does.

    Args:
        rows: of earlier runs; measured rows are added.
        seeds: of the trainings; effects of parts are measured for the first one.
        families: by name.
        levels: settings of the killed trainings.
        parts: settings of one part each; measured for the families that chose the default.
        say: receives the name of the next measurement.
    """
    with threads(1):
        seeds = list(seeds)
        for seed in seeds:
            for name in families:
                with _installed(name, say):
                    _levels(rows, ALL[name](), seed, levels, say)
        for name in families if seeds else ():
            with _installed(name, say):
                _killed(rows, ALL[name](), seeds[0], "lossless", say)
            if name not in HELD_BACK:
                _resumed(rows, ALL[name](), seeds[0], levels, parts, say)


@contextmanager
def _installed(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Report a family whose optimizer's package is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        say(f"{name}: not measured: {error.name} is not installed")


def _levels(rows: Rows, family: Family, seed: int, levels: Sequence[str], say: Callable[[str], None]) -> None:
    if not rows.has("end", family.name, UNINTERRUPTED, seed):
        say(f"{family.name}, seed {seed}: uninterrupted")
        rows.add("end", family.name, UNINTERRUPTED, seed, uninterrupted(family, seed))
    for setting in levels:
        _killed(rows, family, seed, setting, say)
    chains = [s for s in LEVELS if not rows.has("chain", family.name, s, seed)]
    if chains and not seed:
        say(f"{family.name}, seed {seed}: chains")
        for setting, found in chain(family, chains, seed).items():
            rows.add("chain", family.name, setting, seed, found)


def _killed(rows: Rows, family: Family, seed: int, setting: str, say: Callable[[str], None]) -> None:
    if not rows.has("killed", family.name, setting, seed):
        say(f"{family.name}, seed {seed}: killed, {setting}")
        # Processors round differently: whether ends are equal shows only next to a training of the same machine.
        pair = {UNINTERRUPTED: uninterrupted(family, seed)} if setting == "lossless" else {}
        rows.add("killed", family.name, setting, seed, killed(family, setting, seed) | pair)


def _resumed(
    rows: Rows, family: Family, seed: int, levels: Sequence[str], parts: Sequence[str], say: Callable[[str], None]
) -> None:
    wanted = [s for s in levels if s != NULL]
    if family.name in FAMILIES and family.name not in SET_ASIDE:
        wanted += parts
    missing = [setting for setting in wanted if not rows.has("resumed", family.name, setting, seed)]
    if missing:
        say(f"{family.name}, seed {seed}: resumed by {len(missing)} settings")
        resumed(family, missing, seed, lambda setting, found: rows.add("resumed", family.name, setting, seed, found))
