"""The bench `gpu`: everything that a first GPU is measured with, in one command.

The GPU's rows of `bench kernels`, and states that are trained on the GPU and compressed from it. With `--json FILE`
rows are kept as they are measured; the same command goes on where an earlier one stopped, by `--minutes` or an
interruption.
"""

from __future__ import annotations

from . import gpustates, kernels, trained_models
from .devices import gpu, threads
from .harness import Options, Row

TITLE = "the GPU's rows: each kernel against a copy on the device, and whole states compressed from it"
plot = kernels.plot


def run(options: Options) -> list[Row]:
    """All rows; open ones without a GPU."""
    device = "cpu" if gpu().missing else "cuda"
    large, medium = (trained_models.LARGE, trained_models.MEDIUM) if device == "cuda" else (trained_models.SMALL,) * 2
    rows: list[Row] = []
    every = tuple(name for name in gpustates.CONFIGS if name not in gpustates.CODED_THERE)
    usual = ("default", *gpustates.CODED_THERE)
    if gpustates.wanted(large.says, options, usual) or options.wanted(gpustates.STALL):
        pair = trained_models.trained(large, device)
        rows += gpustates.rows(pair, large.says, options, usual)
        rows += gpustates.stall(pair, large.says, options)
    with threads(1):
        rows += kernels.on_gpu(options)
    if gpustates.wanted(f"all presets, {medium.says}", options, every):
        pair = trained_models.trained(medium, device)
        rows += gpustates.rows(pair, f"all presets, {medium.says}", options, every)
    return rows
