"""Clusters of optimizer states, as BitSnap quantizes them."""

from __future__ import annotations

from shrinkpoint.kernels import cluster as kernels

from ..harness import Case, Job, host, same
from .place import Call, Place, oracle


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject."""
    quantize = lambda: at.compared(Call("cluster.cluster_quantize", (at.pair()[0],), (16,)), 6)  # noqa: E731
    return [at.case("cluster_quantize", quantize), at.case("cluster_dequantize", lambda: dequantized(at))]


def dequantized(at: Place) -> Job:
    """Restore values from labels and codes."""
    found = kernels.cluster_quantize(*at.arrays(at.sample.before(at.n)))

    def check() -> str:
        few = (found.codes[: at.prefix], found.labels[: at.prefix], found.scale, found.minimum)
        same("values", kernels.cluster_dequantize(*few), oracle("cluster").cluster_dequantize(*map(host, few)))
        return at.says

    return at.job(lambda: kernels.cluster_dequantize(*found), check, 6)
