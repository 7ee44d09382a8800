"""The bench `kernels`: every kernel against its floor and peers, on a CPU thread and a GPU.

A module lists the cases of a few subjects of `shrinkpoint.kernels`; a case says if it is of one kind of device
only. First one size with all peers, then sizes from 10,000 up (not with --quick), then the GPU. Without a GPU its rows
are open.
"""

from __future__ import annotations

from pathlib import Path

from ..data import Sample
from ..harness import FLOORS, Case, Device, Options, Row, cpu, run_cases, threads
from ..harness import gpu as gpu_device
from ..plot import Bar, Bars, Lines, draw, limit
from . import bits, codebooks, entropy, levels, moments, quantizers, states
from .place import Place

TITLE = "each kernel against memcpy and its peers, on one CPU thread and on the GPU"
SUBJECTS = (codebooks, quantizers, levels, bits, moments, entropy, states)
SWEPT = (
    *("copy to new memory", "log_histogram", "assign", "split_by_level", "merge_by_level", "difference"),
    *("huffman_encode", "huffman_decode", "rans_encode conditional", "rans_decode conditional"),
    *("end to end encode", "end to end decode"),
)
"""Rows that are also measured over the sizes."""
LARGEST = 10**8


def run(options: Options) -> list[Row]:
    """All rows."""
    size = 1 << 22 if options.quick else 25_000_000
    host = cpu()
    with threads(1):
        at = Place(host, Sample(size), size)
        found = run_cases(cases(at), options, host.clock)
        found += codebooks.loss_rows(at, options)
        found += [] if options.quick else sweep(host, options)
        return found + on_gpu(options)


def cases(at: Place) -> list[Case]:
    """Return all cases of the place's kind of device."""
    kind = "gpu" if at.device.gpu else "cpu"
    return [case for subject in SUBJECTS for case in subject.cases(at) if case.on in ("", kind)]


def sweep(device: Device, options: Options) -> list[Row]:
    """The swept rows at sizes from 10,000 up."""
    sample, found = Sample(LARGEST), []
    for n in (10**e for e in range(4, len(str(LARGEST)))):
        here = (case.against_floor() for case in cases(Place(device, sample, n)) if case.row in SWEPT)
        found += run_cases(here, options, device.clock)
    return found


def on_gpu(options: Options) -> list[Row]:
    """The GPU's rows; one large size, half a gigabyte of float32, and the sweep."""
    card, size = gpu_device(), 1 << 24 if options.quick else 1 << 27
    sample = Sample(size, drawn=1 << 24)  # drawing more would take longer than measuring
    found = run_cases(cases(Place(card, sample, size)), options, card.clock)
    return found + ([] if card.missing or options.quick else sweep(card, options))


_LONGEST = 3.0
"""Times the copy at which a bar of the picture ends: a few functions read less than they describe."""


def plot(rows: list[Row], path: Path) -> None:
    """Share of the copy a row at the first size that was measured, and rate over the sizes."""
    shown = [row for row in rows if not row.row.endswith(codebooks.SAME_POINTS)]
    floors = [row for row in shown if row.peer in FLOORS and row.value is not None]
    by_row: dict[tuple[str, str], list[Row]] = {}
    for row in floors:
        by_row.setdefault((row.row, row.device), []).append(row)
    several = len({row.device for row in floors}) > 1
    names = {key: f"{key[0]} ({key[1]})" if several else key[0] for key in by_row}
    firsts = [(names[key], found[0]) for key, found in by_row.items() if "tensors" not in key[0]]
    bars = [Bar(name, row.ratio or 0.0, limit(row, "x"), row.met is False) for name, row in firsts]
    lines = {
        names[key]: sorted((row.size, _elements(row)) for row in found)
        for key, found in by_row.items()
        if len({row.size for row in found}) > 2
    }
    where = f", {floors[0].device}" if floors and not several else ""
    panels: list[Bars | Lines] = [Bars(f"Share of the copy's bandwidth{where}", "x copy", bars, _LONGEST)]
    if lines:
        panels.append(Lines(f"Rate over size{where}", "elements", "10⁹ elements a second", lines))
    draw(path, panels)


def _elements(row: Row) -> float:
    """Billions of float32 weights, or of the symbols that stand for them, a second."""
    value = row.value or 0.0
    return value / 4 if row.unit == "GB/s" else value
