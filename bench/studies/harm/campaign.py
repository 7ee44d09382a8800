"""The campaign of `bench harm`: settings, trainings, rows in a file, and their summary.

A row is one family, setting and seed, one line of JSON. Everything is a function of these three, so a row that was
measured is never measured again. A line names the commit that measured it, the versions of this package and torch, and
the configuration; lines that were measured before lines named it have null there.
"""

from __future__ import annotations

import json
import math
import statistics
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
from shrinkpoint.codec.named_presets import NAMED

from ... import machine
from ...harness import Row, Rows, Target, threads
from ..faults import InStore, Size, System, killed_training, ratio
from ..workloads import Run, State
from .families import FAMILIES, SET_ASIDE, Family
from .held_back import ALL, HELD_BACK, PACKAGES

NULL = "null"
"""All arrays within 1e-4, and not stored at all: what a training's own sensitivity makes of next to nothing."""
LEVELS = {name: NAMED[name] for name in ("default", "precise", "exact_weights", "compact", "lossless")}
KILLED = (NULL, "default", "precise", "exact_weights", "compact")
"""Levels that trainings are killed with; a lossless one ends where the uninterrupted training does."""

_EXACT = {"weight": sp.Exact(), "first moment": sp.Exact(), "second moment": sp.Exact()}


def _alone(kind: str, codec: sp.Quantize | sp.FirstMoment | sp.SecondMoment) -> Callable[[], sp.Config]:
    return lambda: sp.Config([(k, codec if k == kind else exact) for k, exact in _EXACT.items()])


PARTS: dict[str, Callable[[], sp.Config]] = {
    **{f"weights, {n} bins": _alone("weight", sp.Quantize(bins=n)) for n in (24, 48, 64, 96)},
    **{
        f"second moments, {octaves:g} octaves": _alone("second moment", sp.SecondMoment(octaves=octaves))
        for octaves in (2.0, 1.0, 0.5, 0.25)
    },
    **{
        f"first moments, step {step:g}": _alone("first moment", sp.FirstMoment(step=step, max_error=1.0))
        for step in (1.0, 0.5, 0.25)
    },
}
"""One part of the state lossy, everything else exact: its effect per byte."""


def config_of(setting: str) -> sp.Config:
    """Return the configuration of a setting by its name."""
    return (LEVELS | PARTS)[setting]()


# --------------------------------------------------------------------------------------------------------- one training

UNINTERRUPTED = "uninterrupted"
"""Setting of a training that is not killed."""
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
        """Return the newest state with perturbed parameters that train, and nothing else changed."""
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
    make = partial(Run, family.workload, seed)
    done = killed_training(make, family.workload.steps, system, failures, SPACING, judge)
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


# -------------------------------------------------------------------------------------------------------------- summary

# Ends are paired twice: each killed training with the uninterrupted one of its seed, and the difference with that of
# the null (all arrays within 1e-4), which is the effect of a tiny change on a training. Bounds are one-sided, 95 %, by
# the t distribution of these differences.

_T95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)
"""Quantiles of the t distribution at 95 % for 1 to 10 degrees of freedom."""

RATIO = {"default": 24.0, "precise": 10.0, "exact_weights": 3.8, "compact": 80.0, "lossless": 1.4}
"""Mean ratio of the whole AdamW state over a chain with bases that a level is to reach."""
LEAST = {"default": 18.0, "precise": 7.5, "exact_weights": 3.3, "lossless": 1.38}
"""Ratio that no family is to stay below."""
LOSS = {"default": 0.8, "precise": 1.0, "exact_weights": 1.0, "compact": 2.0}
"""Upper bound of the loss at the end after ten kills, percent."""
ACCURACY = 0.3
"""Points of accuracy that `Config()` may lose at most, by its upper bound."""
AGREEMENT, RMS, RMS_BATCH_NORM = 99.5, 0.3, 1.6
"""Percent of answers that are the same at a restore, and root mean square of the loss's change, percent."""


@dataclass(frozen=True)
class Effect:
    """A mean with standard error and one-sided 95 % bound, both None for a single value."""

    mean: float
    error: float | None
    bound: float | None
    seeds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Effect | None:
        """Return the effect of values, the larger the worse; None without any.

        Example:
            >>> Effect.of([0.1, 0.2, 0.3]).bound
            0.3686
        """
        if not values:
            return None
        mean, n = statistics.fmean(values), len(values)
        if n == 1:
            return cls(mean, None, None, 1)
        error = statistics.stdev(values) / math.sqrt(n)
        quantile = _T95[n - 2] if n - 2 < len(_T95) else 1.8
        return cls(mean, error, round(mean + quantile * error, 4), n)

    def __str__(self) -> str:
        error = "" if self.error is None else f" +- {self.error:.2f}"
        return f"{self.mean:+.2f}{error}, {self.seeds} seed{'s' if self.seeds > 1 else ''}"


@dataclass(frozen=True)
class Found:
    """Effect of one setting on one family.

    Args:
        agreement: percent of examples whose most likely class stays at a restore; None for a regression.
        divergence: mean over restores, nats of KL or relative L2.
        rms: root mean square of the relative change of the loss at a restore, percent.
        worst: largest rise of the loss at a restore, percent.
        loss: percent above the null's at the end; None where seeds do not pair.
        accuracy: points lost at the end, less those of the null; None for a regression.
        ratio: of the whole state over the chain of an uninterrupted training.
        weights: of the weights alone.
    """

    agreement: float | None
    divergence: float
    rms: float
    worst: float
    loss: Effect | None
    accuracy: Effect | None
    ratio: float
    weights: float


class Campaign:
    """Rows of a campaign, by family, setting and seed."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self.rows = {(row["what"], row["family"], row["setting"], row["seed"]): row for row in rows}

    def of(self, what: str, family: str, setting: str) -> dict[int, dict[str, Any]]:
        """Return rows by seed."""
        return {k[3]: row for k, row in self.rows.items() if k[:3] == (what, family, setting)}

    def ends(self, family: str, setting: str, what: str) -> dict[int, float]:
        """Return by seed how much worse a killed training ends: percent, or points.

        A row may hold the uninterrupted training of its own machine.
        """
        exact, found = self.of("end", family, UNINTERRUPTED), {}
        for seed, row in self.of("killed", family, setting).items():
            pair = row.get("uninterrupted") or exact.get(seed)
            if pair is not None and row[what] is not None:
                own, other = row[what], pair[what]
                found[seed] = 100 * (own / other - 1) if what == "loss" else 100 * (other - own)
        return found

    def against_null(self, family: str, setting: str, what: str) -> Effect | None:
        """Return the ends by seed, less what the null loses in the same seed."""
        null, own = self.ends(family, NULL, what), self.ends(family, setting, what)
        return Effect.of([own[seed] - null[seed] for seed in own if seed in null])

    def found(self, family: str, setting: str) -> Found | None:
        """Return the effect of a setting on a family; None where it was not measured."""
        rows = list(self.of("killed", family, setting).values())
        if not rows or setting == NULL:
            return None
        restores = [restore for row in rows for restore in row["restores"]]
        changed = [r["changed"] for r in restores if r["changed"] is not None]
        losses = [100 * r["loss"] for r in restores]
        return Found(
            100 * (1 - statistics.fmean(changed)) if changed else None,
            statistics.fmean(r["divergence"] for r in restores),
            math.sqrt(statistics.fmean(loss * loss for loss in losses)),
            max(losses),
            self.against_null(family, setting, "loss"),
            self.against_null(family, setting, "accuracy"),
            self.ratio(family, setting) or math.nan,
            self.ratio(family, setting, "weights") or math.nan,
        )

    def ratio(self, family: str, setting: str, what: str = "ratio") -> float | None:
        """Return the ratio over chains, else over killed trainings.

        Args:
            family: of models.
            setting: the configuration.
            what: "ratio" of whole states (default), or "weights".
        """
        rows = self.of("chain", family, setting) or self.of("killed", family, setting)
        found = [row[what] for row in rows.values() if what in row]
        return statistics.fmean(found) if found else None


def bench_rows(campaign: Campaign, sizes: dict[str, int]) -> list[Row]:
    """Return the rows of the command: loss and ratio of each level and family.

    Args:
        campaign: the measured rows.
        sizes: parameters by family.
    """
    rows = Rows()
    for setting in LEVELS:
        ratios: list[float] = []
        for family in ALL:
            rows.start, rows.size = f"{family}, {setting}", sizes[family]
            found = campaign.found(family, setting)
            smaller = campaign.ratio(family, setting)
            ratios += [] if smaller is None else [smaller]
            _add(rows, "whole state, chain", smaller, "x", LEAST.get(setting), least=True)
            if setting != "lossless":
                _quality(rows, family, setting, found)
        rows.start, rows.size = f"mean, {setting}", 0
        mean, note = statistics.fmean(ratios) if ratios else None, f"{len(ratios)} of {len(ALL)} families"
        _add(rows, "whole state, chain", mean, "x", RATIO[setting], note, least=True)
    return rows


def _quality(rows: Rows, family: str, setting: str, found: Found | None) -> None:
    """Add the loss of quality of a setting on a family."""
    own, classifies = setting == "default", found is None or found.agreement is not None
    aside = "chose no setting; " if family in SET_ASIDE or family in HELD_BACK else ""
    ends = (
        ("loss", "loss", "%", LOSS.get(setting)),
        ("accuracy", "accuracy lost", "points", ACCURACY if own else None),
    )
    for what, lost, unit, limit in ends if classifies else ends[:1]:
        effect: Effect | None = getattr(found, what, None)
        note = aside + (f"mean {effect}" if effect else "")
        _add(rows, f"{lost} after ten kills, 95 % bound", getattr(effect, "bound", None), unit, limit, note)
    if setting == "exact_weights":
        return
    if classifies:
        same = getattr(found, "agreement", None)
        _add(rows, "same answers at a restore", same, "%", AGREEMENT if own else None, least=True)
    limit = None if not own else RMS_BATCH_NORM if "batch norm" in family else RMS
    note = f"worst {found.worst:+.2f} %, divergence {found.divergence:.2g}" if found else ""
    _add(rows, "loss change at a restore, rms", getattr(found, "rms", None), "%", limit, note)


def _add(
    rows: Rows, what: str, value: float | None, unit: str, limit: float | None, note: str = "", *, least: bool = False
) -> None:
    note = note if value is not None else f"not measured; {note}".rstrip("; ")
    rows.add(what, value, unit, note=note, target=None if limit is None else Target(limit, "value", least))


# ------------------------------------------------------------------------------------------------- rows kept in a file

RESULTS = Path(__file__).parents[2] / "results" / "harm.jsonl"
"""Where rows are kept."""


class RowFile(Campaign):
    """Rows of a campaign in a file of JSON lines, each written as soon as it is measured.

    Args:
        path: of the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the process was stopped while it wrote a line
            path.write_text(whole)
        super().__init__(json.loads(line) for line in whole.splitlines())

    def has(self, *key: str | int) -> bool:
        """Return whether this was measured."""
        return key in self.rows

    def add(self, what: str, family: str, setting: str, seed: int, found: Record) -> None:
        """Keep a row."""
        row = {"what": what, "family": family, "setting": setting, "seed": seed, **found, **_origin(setting)}
        with self.path.open("a") as file:
            file.write(json.dumps(_rounded(row)) + "\n")
        self.rows[what, family, setting, seed] = row


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


def _rounded(found: Any) -> Any:
    """Round numbers to seven digits, to keep the file small."""
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    if isinstance(found, list):
        return [_rounded(value) for value in found]
    return float(f"{found:.7g}") if isinstance(found, float) else found


def measure(
    rows: RowFile,
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


def _levels(rows: RowFile, family: Family, seed: int, levels: Sequence[str], say: Callable[[str], None]) -> None:
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


def _killed(rows: RowFile, family: Family, seed: int, setting: str, say: Callable[[str], None]) -> None:
    if not rows.has("killed", family.name, setting, seed):
        say(f"{family.name}, seed {seed}: killed, {setting}")
        # Processors round differently: whether ends are equal shows only next to a training of the same machine.
        pair = {UNINTERRUPTED: uninterrupted(family, seed)} if setting == "lossless" else {}
        rows.add("killed", family.name, setting, seed, killed(family, setting, seed) | pair)


def _resumed(
    rows: RowFile, family: Family, seed: int, levels: Sequence[str], parts: Sequence[str], say: Callable[[str], None]
) -> None:
    wanted = [s for s in levels if s != NULL]
    if family.name in FAMILIES and family.name not in SET_ASIDE:
        wanted += parts
    missing = [setting for setting in wanted if not rows.has("resumed", family.name, setting, seed)]
    if missing:
        say(f"{family.name}, seed {seed}: resumed by {len(missing)} settings")
        resumed(family, missing, seed, lambda setting, found: rows.add("resumed", family.name, setting, seed, found))
