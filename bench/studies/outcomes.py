"""Outcomes of `bench ratio`, and the rows computed from them: ratios, losses, verdicts.

Rows are computed from the numbers of finished trainings, so they can be made again from a result's JSON.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shrinkpoint.codec.errors import BadArgumentError

from ..harness import Row, Rows, at_least, times_smaller
from .faults import over_seeds

FURTHER = 200
"""Steps that a restored training goes on, at most."""
PUBLISHED = ("inshrinkerator 16", "inshrinkerator 32")
"""The preset's own bins, and twice as many."""
PAIRS = ((0.5, 80.0, 300.0), (0.1, 30.0, 70.0))
"""Loss change in percent after further steps; ratio of the chain and of late deltas wanted there."""
EQUAL = "late weight deltas at no more loss than"
WITHIN = "late weight deltas at a loss within a standard error of"
RUINED = "ruined"
"""The word for a loss of NaN: the training that went on from there did not survive."""
CASES = ("no parent", "10 steps apart")


@dataclass(frozen=True)
class Outcome:
    """Outcome of a system on one training: ratios, bits, loss changes in percent, staleness."""

    chain: float
    late: float
    base: float
    weight_bits: float
    at_once: float
    later: float
    staleness: float


@dataclass(frozen=True)
class Restored:
    """Result of one restored state: ratio, loss changes in percent, staleness in steps."""

    ratio: float
    at_once: float
    later: float
    staleness: float


Losses = Outcome | Restored
"""Changes of held-out loss at once and after further steps, percent; staleness, steps."""


@dataclass(frozen=True)
class Pair:
    """A checkpoint restored alone, and restored as a delta over the one before it."""

    single: Restored
    delta: Restored


@dataclass(frozen=True)
class System:
    """A system over the seeds: the mean, and one outcome a seed."""

    mean: Outcome
    outcomes: tuple[Outcome, ...]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> System:
        """Build a system from its outcomes, one for each seed."""
        mean = Outcome(*(statistics.fmean(getattr(o, f.name) for o in outcomes) for f in dataclasses.fields(Outcome)))
        return cls(mean, tuple(outcomes))

    @classmethod
    def of_json(cls, outcomes: Sequence[Mapping[str, float | None]]) -> System:
        """Build a system from its outcomes in a result."""
        return cls.of([outcome_of(one) for one in outcomes])

    def __str__(self) -> str:
        at_once, later = (spread(self.outcomes, what) for what in ("at_once", "later"))
        return f"loss at once {at_once} %, later {later} %, {steps(self.mean.staleness)}"


def to_json(found: Any) -> Any:
    """Convert outcomes to JSON, with None for NaN."""
    if isinstance(found, Mapping):
        return {str(key): to_json(value) for key, value in found.items()}
    if isinstance(found, Sequence) and not isinstance(found, str):
        return [to_json(one) for one in found]
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        return to_json(dataclasses.asdict(found))
    return None if isinstance(found, float) and math.isnan(found) else found


def outcome_of(found: Mapping[str, float | None]) -> Outcome:
    """Convert one outcome from JSON."""
    return Outcome(**{key: math.nan if value is None else value for key, value in found.items()})


# ------------------------------------------------------------------------------------------------------------ words


def percent(value: float) -> str:
    """Format a change of loss; "ruined" for NaN.

    Example:
        >>> percent(0.125), percent(float("nan"))
        ('+0.12', 'ruined')
    """
    return RUINED if math.isnan(value) else f"{value:+.2f}"


def spread(found: Sequence[Any], what: str) -> str:
    """Format mean and range over the seeds."""
    values = [getattr(o, what) for o in found]
    return RUINED if any(math.isnan(value) for value in values) else over_seeds(values)


def steps(staleness: float) -> str:
    """Return staleness in words; it is undefined without progress or for a ruined training."""
    return "staleness not defined" if math.isnan(staleness) else f"staleness {staleness:+.1f} steps"


def lost(found: Sequence[Losses]) -> str:
    """Describe the loss changes and the staleness after a restore, over the seeds."""
    staleness = statistics.fmean(o.staleness for o in found)
    return f"{spread(found, 'at_once')} % at once, {spread(found, 'later')} % later, {steps(staleness)}"


# ------------------------------------------------------------------------------------------------------------ pairs


def differences(own: Sequence[Losses], other: Sequence[Losses]) -> list[float]:
    """Differences of the later loss, ours minus theirs, by seed."""
    return [a.later - b.later for a, b in zip(own, other, strict=True)]


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean; 0 for a single value."""
    return float(statistics.stdev(values) / len(values) ** 0.5) if len(values) > 1 else 0.0


def above(own: System, other: System) -> str:
    """Return by how many points ours loses more, with the standard error over the seeds."""
    found = differences(own.outcomes, other.outcomes)
    error = f" +- {standard_error(found):.2f}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):+.2f}{error} points"


def no_more(own: Sequence[Losses], other: Sequence[Losses]) -> bool:
    """Return whether the mean difference of later losses is at most its standard error.

    A training that is ruined has lost everything; where both are, nothing is proved and the answer is no.
    """
    if any(math.isnan(o.later) for o in own):
        return False
    if any(math.isnan(o.later) for o in other):
        return True
    found = differences(own, other)
    return statistics.fmean(found) <= standard_error(found)


# ------------------------------------------------------------------------------------------------------------- rows

TABLE = (
    ("whole state, chain with its bases", "chain", "x"),
    ("whole state, late deltas", "late", "x"),
    ("whole state, bases", "base", "x"),
    ("weights, late deltas", "weight_bits", "bits"),
    ("loss change at once", "at_once", "%"),
    ("loss change later", "later", "%"),
)


def _aimed(rows: Rows, name: str, value: float | None, note: str, limit: float) -> None:
    """Add a row that is held against a least value; a value that no setting reaches misses it."""
    rows.add(name, value, "x", note=note, target=at_least(limit, "value"))
    rows[-1] = dataclasses.replace(rows[-1], met=bool(rows[-1].met))


def system_rows(name: str, system: str, size: int, found: Sequence[Outcome]) -> list[Row]:
    """Rows of one system on one model."""
    mean, rows = System.of(found), Rows(f"{name}, {system}", size)
    for label, what, unit in TABLE:
        value = getattr(mean.mean, what)
        rows.add(label, None if math.isnan(value) else value, unit, note=f"{mean}, {len(found)} seeds")
    return rows


def alone_rows(name: str, size: int, found: Mapping[int, Sequence[Restored]]) -> list[Row]:
    """Return rows of weights without a parent by bins, and the smallest within 1 % at once."""
    rows = Rows(size=size)
    best: tuple[float | None, str] = None, "no setting loses so little"
    for bins, outcomes in found.items():
        ratio, loss = (statistics.fmean(getattr(o, what) for o in outcomes) for what in ("ratio", "at_once"))
        note = f"loss {lost(outcomes)}, {len(outcomes)} seeds"
        rows.add(f"{name}, alone, {bins} bins: weights", ratio, "x", note=note)
        if loss <= 1 and ratio > (best[0] or 0.0):
            best = ratio, f"{bins} bins, {note}"
    _aimed(rows, f"{name}: weights alone, no parent, loss <= 1 %", best[0], best[1], 10)
    return rows


def peer_rows(name: str, size: int, peer: str, own: Mapping[str, Sequence[Pair]], other: Sequence[Pair]) -> list[Row]:
    """Return rows of ours and another library's on the same two states.

    Args:
        name: of the model.
        size: its parameters.
        peer: the library.
        own: of each of our settings, its pairs by seed. The smallest that loses no more than the library speaks for
            us; the first where none does.
        other: the library's pairs by the same seeds.
    """
    rows = Rows(f"{name}, against {peer}", size)
    for case, what in zip(CASES, ("single", "delta"), strict=True):
        theirs = [getattr(pair, what) for pair in other]
        settings = {setting: [getattr(pair, what) for pair in pairs] for setting, pairs in own.items()}
        fitting = [setting for setting, found in settings.items() if no_more(found, theirs)]
        setting = max(fitting, key=lambda s: _ratio(settings[s])) if fitting else next(iter(settings))
        ours = settings[setting]
        value, figure = _ratio(ours), (peer, _ratio(theirs))
        seeds = f"{len(ours)} seeds" if len(ours) > 1 else "one seed"
        note = f"ours loses {lost(ours)}; theirs {lost(theirs)}; {seeds}; ours: {setting}"
        rows.add(f"whole state, {case}", value, "x", figure, note, ratio=value / figure[1], target=at_least(1))
        if not fitting:
            rows[-1] = dataclasses.replace(rows[-1], met=False)
    return rows


def _ratio(found: Sequence[Restored]) -> float:
    return statistics.fmean(o.ratio for o in found)


def missing_row(name: str, size: int, peer: str, why: str) -> Row:
    """Row of a library that is not installed."""
    rows = Rows(f"{name}, against {peer}", size)
    rows.add("whole state", None, "x", (peer, None), f"not measured: {why}", target=at_least(1))
    return rows[0]


_SPREAD = r"(\S+)(?: \(\S+ \.\.\. \S+\))? %"
_LOST = re.compile(
    rf"ours loses {_SPREAD} at once, {_SPREAD} later[^;]*; theirs {_SPREAD}(?: at once)?, {_SPREAD}(;| later).*"
)


def lost_later(note: str) -> tuple[str, str]:
    """Return the mean later losses, ours and theirs, from the note of a row of `peer_rows`.

    Raises:
        BadArgumentError: the note does not say.
    """
    found = _LOST.fullmatch(f"{note};")
    if found is None:
        raise BadArgumentError(f"no losses of ours and theirs in {note!r}")
    ours, theirs = (RUINED if found[i] == "+nan" else found[i] for i in (2, 4))
    return ours, theirs


def setting_of(note: str) -> str:
    """Return the setting of ours from the note of a row of `peer_rows`.

    Raises:
        BadArgumentError: the note does not say.
    """
    said = re.search(r"; ours: ([^;]+)", note)
    if said is None:
        raise BadArgumentError(f"no setting of ours in {note!r}")
    return said[1]


def own(found: Mapping[str, System], loss: float) -> dict[str, System]:
    """Our settings for whole states whose later loss is at most `loss` percent."""
    return {s: o for s, o in found.items() if s.startswith(("default", "rate")) and o.mean.later <= loss}


def nearest_to(found: Mapping[str, System], chain: float, late: float) -> str | None:
    """Return the setting nearest to two ratios, by the ratio it misses most."""
    return max(found, key=lambda s: min(found[s].mean.chain / chain, found[s].mean.late / late), default=None)


def summary_rows(name: str, size: int, found: Mapping[str, System]) -> list[Row]:
    """Return rows that compare all systems of a model, and the targets."""
    rows = Rows(name, size)
    for published in (p for p in PUBLISHED if p in found):
        rows += weights_rows(name, size, found, published)
    for loss, chain, late in PAIRS:
        best = nearest_to(own(found, loss), chain, late)
        for label, what, limit in (("chain with its bases", "chain", chain), ("late deltas", "late", late)):
            value, note = None, "no setting loses so little"
            if best is not None:
                value, note = getattr(found[best].mean, what), f"{best}; {found[best]}"
            _aimed(rows, f"whole state, {label}, loss <= {loss:g} %", value, note, limit)
    return rows


def weights_rows(name: str, size: int, found: Mapping[str, System], published: str) -> list[Row]:
    """Rows of our smallest weights whose loss is at most the published pipeline's.

    Next to the published moments, or within settings for whole states: their moments are lossier, so their loss is at
    least the loss of their weights.

    First strictly, by the means; then with every setting whose difference, seed by seed, is within its standard error.
    """
    weights = {s: o for s, o in found.items() if s.startswith(("weights", "default", "rate"))}
    theirs, rows = found[published], Rows(name, size)
    strict = [s for s, o in weights.items() if o.mean.later <= theirs.mean.later]
    several = len(theirs.outcomes) > 1
    paired = [s for s, o in weights.items() if several and no_more(o.outcomes, theirs.outcomes)]
    for words, settings in ((EQUAL, strict), (WITHIN, paired)):
        best = min(settings, key=lambda s: weights[s].mean.weight_bits, default=None)
        value, note = None, f"no setting loses as little as {spread(theirs.outcomes, 'later')} %"
        if best is not None:
            value = found[best].mean.weight_bits
            note = f"ours: {best}; loss later above the published one's by {above(found[best], theirs)}"
        bits = theirs.mean.weight_bits
        rows.add(f"{words} {published}", value, "bits", (published, bits), note, ratio=times_smaller(value, bits))
    return rows


def medians(rows: Iterable[Row]) -> list[Row]:
    """Return medians over the models of our weights' size against the published pipeline's.

    Args:
        rows: of all models, from one run or several.
    """
    rows, found = list(rows), Rows()
    for published in PUBLISHED:
        for words, target in ((EQUAL, at_least(4.0)), (WITHIN, None)):
            name = f"{words} {published}"
            of = [row for row in rows if row.row.endswith(f": {name}")]
            shares = [row.ratio for row in of]
            if not shares:
                continue
            # If every setting of ours loses more, ours is not smaller at equal loss: such a chain counts as 0.
            median, known = statistics.median(share or 0.0 for share in shares), len(shares) - shares.count(None)
            note = f"median over {len(shares)} chains, {known} of them with a setting that loses no more"
            found.add(name, median, "x", (published, 1.0), note, ratio=median, target=target)
    return found
