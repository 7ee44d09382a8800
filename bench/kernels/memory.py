"""A copy to newly allocated memory, where page faults count."""

from __future__ import annotations

from ..harness import Case, Job
from .place import Place, comes_back


def cases(at: Place) -> list[Case]:
    """Return the case of the copy."""

    def fresh() -> Job:
        (x,) = at.arrays(at.sample.before(at.n))
        copied = x.clone if at.device.gpu else x.copy
        return at.job(copied, comes_back("copy", copied, x, "all"), 8)

    return [at.case("copy to new memory", fresh)]
