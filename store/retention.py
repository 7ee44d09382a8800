"""The steps that garbage collection keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..kernels.backend.arguments import check_field, flag, integer, or_none


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules for the steps to keep; others are removed unless they are pinned or tagged.

    Args:
        last: number of newest intact steps to keep, 1 or more; default 1.
        every: keep the steps that are multiples of this number, 1 or more; None: no such rule.
        best: number of steps with the best metric to keep, 0 or more; default 0. Among equal metrics the newest.
        largest: whether a larger metric is better; default False (a loss).

    Example:
        >>> sorted(Retention(last=2, every=100, best=1).kept({90: None, 100: 0.5, 110: 0.3, 120: 0.4, 130: None}))
        [100, 110, 120, 130]
    """

    last: int = 1
    every: int | None = None
    best: int = 0
    largest: bool = False

    def __post_init__(self) -> None:
        check_field(self, "last", integer, 1)
        check_field(self, "every", or_none, integer, 1)
        check_field(self, "best", integer, 0)
        check_field(self, "largest", flag)

    def kept(self, metrics: Mapping[int, float | None]) -> set[int]:
        """Return the steps to keep, given the metric of each (None: not measured)."""
        steps = sorted(metrics)
        keep = set(steps[-self.last :])
        if self.every is not None:
            keep.update(step for step in steps if step % self.every == 0)
        measured = [(value if self.largest else -value, step) for step, value in metrics.items() if value is not None]
        keep.update(step for _, step in sorted(measured, reverse=True)[: self.best])
        return keep
