"""The settings that quantize weights, checked."""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.backend.arguments import check_field, choice, flag, integer, number, or_none
from ...kernels.quantizer import Thresholds
from ..base import Leaf
from ..errors import BadArgumentError
from ..state.leaves import LeafSpec
from .codebook import Fit
from .levels import MAX_BINS, LevelsReference

FINEST_SKETCH = 2.0**-13
_STEP = 8
"""A codebook is refit when its array's protected share passes a power of this times the configured share."""
_FEW = 32
"""Fewer protected elements than these may come and go by chance."""


@dataclass(frozen=True, slots=True)
class QuantizeSettings:
    """Fields of `Quantize` with their checks; `Quantize` documents them.

    Raises:
        BadArgumentError: a value out of range; the message names it and its limits.
    """

    bins: int = 64
    embedding_bins: int | None = None
    prune: float = 0.0
    prune_metric: str = "magnitude"
    protect: float = 0.0005
    alpha: float = 0.01
    sigma: float = 1.0
    solver: str = "uniform"
    policy: str = "frozen"
    trigger: float = 1.05
    coder: str = "smallest"
    seed: int = 0
    max_error: float | None = None
    rate: float | None = None
    residual: bool = False

    def __post_init__(self) -> None:
        check_field(self, "bins", integer, 2, MAX_BINS)
        check_field(self, "embedding_bins", or_none, integer, 2, MAX_BINS)
        check_field(self, "prune", number, 0, 1, open_high=True)
        check_field(self, "protect", number, 0, 1, open_high=True)
        if self.prune + self.protect > 1:
            raise BadArgumentError(f"prune + protect is {self.prune + self.protect:g}; it must be at most 1")
        check_field(self, "alpha", number, FINEST_SKETCH, 1, open_high=True)
        check_field(self, "sigma", number, 0, 1)
        check_field(self, "trigger", number, 1, 1e9)
        check_field(self, "max_error", or_none, number, 0, 1, open_low=True, open_high=True)
        check_field(self, "rate", or_none, number, 0, 1e6)
        check_field(self, "residual", flag)
        check_field(self, "seed", integer, 0, 2**63 - 1)
        for name, allowed in (
            ("prune_metric", ("magnitude", "sensitivity")),
            ("solver", ("uniform", "exact", "kmeans++")),
            ("policy", ("frozen", "warm", "refit")),
            ("coder", ("smallest", "published")),
        ):
            check_field(self, name, choice, allowed)
        if self.policy == "warm" and self.solver == "uniform":
            raise BadArgumentError(
                "policy 'warm' is for solver 'exact' or 'kmeans++': a step, which is all that 'uniform' (the default) "
                "has, is not iterated; 'frozen' or 'refit' is needed"
            )

    @property
    def chooses_step(self) -> bool:
        """Return whether the error target determines step and protected share, too."""
        return self.max_error is not None and self.solver == "uniform"

    def fit_for(self, leaf: Leaf) -> Fit:
        """Return the settings of the fit of an array's codebook."""
        bins = self.embedding_bins if self.embedding_bins and leaf.kind.layer == "embedding" else self.bins
        return Fit(bins, self.sigma, self.solver, self.policy, self.trigger, self.seed)

    def outgrown(self, share: float, before: LevelsReference | None, spec: LeafSpec) -> str:
        """Return the reason to refit a codebook because the array protects more than before, or "".

        Thresholds are for all arrays together, so one array's share may grow unseen. Its codebook is refit each
        time that share passes 8, 64, ... times `protect` and is of 32 elements or more.

        Args:
            share: of the array's finite elements, protected now.
            before: the parent.
            spec: of the array.
        """
        if before is None or not self.protect or not spec.size:
            return ""
        was = before.protected.size / spec.itemsize / spec.size
        passed = any(was < _STEP**n * self.protect <= share for n in range(1, 20))
        passed = passed and share * spec.size >= _FEW
        return f"refit: {share:.2%} are protected, {was:.2%} were" if passed else ""

    def moved(self, thresholds: Thresholds, before: LevelsReference | None) -> str:
        """Return a note if the protection threshold, frozen like codebooks, still changed; else ""."""
        if self.policy != "frozen" or before is None:
            return ""
        now, was = thresholds.protect_magnitude, before.thresholds.protect_magnitude
        return "" if now == was else f"; protected from {now:.6g} on, before from {was:.6g}"
