"""Means over seeds, one-sided bounds, and the rows of `python -m bench harm`.

Ends are paired twice: each killed training with the uninterrupted one of its seed, and the difference with that of the
null (all arrays within 1e-4), which is the effect of a tiny change on a training. Bounds are one-sided, 95 %, by the t
distribution of these differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...harness import Row, Rows, Target
from .families import SET_ASIDE
from .held_back import ALL, HELD_BACK
from .settings import LEVELS, NULL

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
        exact, found = self.of("end", family, "uninterrupted"), {}
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
        chains = list(self.of("chain", family, setting).values()) or rows
        changed = [r["changed"] for r in restores if r["changed"] is not None]
        losses = [100 * r["loss"] for r in restores]
        return Found(
            100 * (1 - statistics.fmean(changed)) if changed else None,
            statistics.fmean(r["divergence"] for r in restores),
            math.sqrt(statistics.fmean(loss * loss for loss in losses)),
            max(losses),
            self.against_null(family, setting, "loss"),
            self.against_null(family, setting, "accuracy"),
            statistics.fmean(row["ratio"] for row in chains),
            statistics.fmean(row["weights"] for row in chains),
        )

    def plateau(self, family: str) -> float | None:
        """Return the percent by which the loss falls over the last tenth, mean over seeds."""
        ends = self.of("end", family, "uninterrupted").values()
        return statistics.fmean(100 * (row["before"] / row["loss"] - 1) for row in ends) if ends else None


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
            chains = [row["ratio"] for row in campaign.of("chain", family, setting).values()]
            ratio = found.ratio if found else statistics.fmean(chains) if chains else None
            ratios += [] if ratio is None else [ratio]
            _add(rows, "whole state, chain", ratio, "x", LEAST.get(setting), least=True)
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
