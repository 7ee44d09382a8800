"""The bench `kernels`: every kernel against its floor and peers, on a CPU thread and a GPU.

First one size with all peers, then sizes from 10,000 up (not with --quick), then models of many small tensors, then
the GPU. Without a GPU its rows are open.
"""

from __future__ import annotations

from pathlib import Path

from . import codebooks, coders, data, elementwise, gpu, many, remaining, sparse, tables
from .data import Sample
from .devices import FLOORS, Device, cpu, threads
from .devices import gpu as gpu_device
from .elementwise import Place
from .harness import Case, Options, Row, run_cases
from .plot import Bars, Lines, draw

TITLE = "each kernel against memcpy and its peers, on one CPU thread and on the GPU"
SWEPT = (
    "copy to new memory",
    "log_histogram",
    "assign",
    "split_by_level",
    "merge_by_level",
    "difference",
    "huffman_encode",
    "huffman_decode",
    "rans_encode conditional",
    "rans_decode conditional",
    "end to end encode",
    "end to end decode",
)
"""Rows that are also measured over the sizes."""


def run(options: Options) -> list[Row]:
    """All rows."""
    pair = None if options.state is None else data.read(options.state)
    host, card = cpu(), gpu_device()
    size = 1 << 22 if options.quick else 25_000_000
    sizes = [] if options.quick else [10**e for e in range(4, 10 if options.large else 9)]
    rows: list[Row] = []
    with threads(1):
        sample = Sample(size, pair)
        at = Place(host, sample, size)
        rows += run_cases(cpu_cases(at), options, host.clock)
        rows += codebooks.loss_rows(at, options)
        if sizes:
            swept = Sample(max(sizes), pair)
            for n in sizes:
                rows += run_cases(_swept(host, swept, n), options, host.clock)
        rows += _on_gpu(card, options, pair)
    return rows


def cpu_cases(at: Place) -> list[Case]:
    """Return the cases of one CPU thread."""
    found = elementwise.cases(at.device, at.sample, at.n)
    for part in (remaining, coders, codebooks, tables, many, sparse):
        found += part.cases(at)
    return found


def _swept(device: Device, sample: Sample, n: int) -> list[Case]:
    """The swept cases at one size."""
    found = elementwise.cases(device, sample, n)
    if not device.gpu:
        found += coders.cases(Place(device, sample, n))
    return [case.against_floor() for case in found if case.row in SWEPT]


def _on_gpu(card: Device, options: Options, pair: data.Pair | None) -> list[Row]:
    """The GPU's rows; one large size, and the sweep."""
    size = 1 << 24 if options.quick else 1 << 28
    most = size if card.missing or options.quick else max(size, 10 ** (9 if options.large else 8))
    sample = Sample(most, pair)
    at = Place(card, sample, size)
    rows = run_cases(elementwise.cases(card, sample, size) + remaining.cases(at), options, card.clock)
    rows += run_cases(gpu.cases(at), options, card.clock)
    if not card.missing and not options.quick:
        for n in [10**e for e in range(4, 10 if options.large else 9)]:
            rows += run_cases(_swept(card, sample, n), options, card.clock)
    return rows


def plot(rows: list[Row], path: Path) -> None:
    """Share of the copy a row at the first size that was measured, and rate over the sizes."""
    shown = [row for row in rows if not row.row.endswith(codebooks.SAME_POINTS)]
    floors = [row for row in shown if row.peer in FLOORS and row.value is not None]
    largest: dict[tuple[str, str], Row] = {}
    counts: dict[tuple[str, str], set[int]] = {}
    for row in floors:
        counts.setdefault((row.row, row.device), set()).add(row.size)
        largest.setdefault((row.row, row.device), row)
    several = len({row.device for row in floors}) > 1
    bars = [
        (f"{name} ({device})" if several else name, row.ratio or 0.0, _share_target(row))
        for (name, device), row in largest.items()
        if "tensors" not in name
    ]
    lines = {
        f"{name} ({device})" if several else name: sorted(
            (row.size, _elements(row)) for row in floors if (row.row, row.device) == (name, device)
        )
        for (name, device), sizes in counts.items()
        if len(sizes) > 2
    }
    device = next(iter(floors), None)
    where = "" if device is None or several else f", {device.device}"
    panels: list[Bars | Lines] = [Bars(f"Share of the copy's bandwidth{where}", "x copy", bars)]
    if lines:
        panels.append(Lines(f"Rate over size{where}", "elements", "10⁹ elements a second", lines))
    draw(path, panels)


def _elements(row: Row) -> float:
    """Billions of float32 weights, or of the symbols that stand for them, a second."""
    value = row.value or 0.0
    return value / 4 if row.unit == "GB/s" else value


def _share_target(row: Row) -> float | None:
    """The target as a share of the copy, where it is one."""
    if row.target is None or not row.target.endswith(" x"):
        return None
    return float(row.target.split()[1])
