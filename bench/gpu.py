"""The bench `gpu`: everything that a first GPU is measured with, in one command.

The GPU's rows of `bench kernels`, and the states that `bench codec` compresses from a GPU.
"""

from __future__ import annotations

from . import data, gpustates, kernels
from .devices import threads
from .harness import Options, Row

TITLE = "the GPU's rows of the benches kernels and codec"
plot = kernels.plot


def run(options: Options) -> list[Row]:
    """All rows; open ones without a GPU."""
    with threads(1):
        rows = kernels.on_gpu(options)
    if gpustates.wanted("drawn", options):
        real = data.trained(quick=options.quick)
        rows += gpustates.rows(data.drawn_state(real, 5_000_000 if options.quick else 100_000_000), "drawn", options)
    return rows
