"""Speeds of states and peers, the picture of costs, and the catalogue of kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

from shrinkpoint import kernels as public

from ..codec import FRESH
from ..harness import FLOORS
from ..kernels import codebooks
from ..plot import pyplot
from .results import HOME, NONE, Json, commit_of, crossed, markdown, number, rows_of

DRAWN = "default, GPT"
"""What the names of the rows of the large state hold."""
LEVELS = ("default", "precise", "exact_weights", "lossless")


def _rows() -> Iterator[tuple[str, str, str, Json]]:
    """Yield the figure's name, configuration, state and row of each row of `bench codec`."""
    for row in rows_of("codec.json"):
        what, config, state = [*row["row"].split(", "), "", ""][:3]
        if config in LEVELS:
            yield what, config, state, row


def choices() -> str:
    """Return the size and speed of every level and peer on the states of the GPT, on one thread."""
    found: dict[str, dict[str, float | None]] = {}
    for what, config, state, row in _rows():
        if state != "GPT" or row["device"] != "cpu, 1 thread":
            continue
        found.setdefault(f"**shrinkpoint**, {config}", {})[what] = row["value"]
        if config == "lossless" and what.endswith("base") and row["peer"]:
            found.setdefault(row["peer"], {})[what] = row["peer_value"]
    whats = ("size of the base", "size of the delta", "compress base", "decompress base")
    shown = {who: cells for who, cells in found.items() if cells.get("compress base") is not None}
    order = sorted(shown, key=lambda who: not who.startswith("**"))
    lines = [[who, *(number(shown[who][what]) if what in shown[who] else "" for what in whats)] for who in order]
    return markdown(["", "times smaller", "a delta", "encode, MB/s", "decode, MB/s"], lines)


def states() -> str:
    """Return the ratios of each level on the states of `bench codec`, and the best peer."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    best: dict[str, tuple[float, str]] = {}
    for what, config, state, row in _rows():
        if not what.startswith("size of") or row["value"] is None:
            continue
        found.setdefault(state, {}).setdefault(config, {})[what] = row["value"]
        if row["peer_value"] is not None:
            best[state] = max(best.get(state, (0.0, "")), (row["peer_value"], row["peer"]))
    lines = []
    for state, of in found.items():
        cells = (" / ".join(map(number, of[name].values())) if name in of else "" for name in LEVELS)
        lines.append([state, *cells, f"{number(best[state][0])} ({best[state][1]})" if state in best else ""])
    return markdown(["base / delta", *LEVELS, "smallest exact peer"], lines)


def speed() -> str:
    """Return MB/s of `bench codec` on its large state, on one and two threads, and the peers'."""
    cells, size, one = [], 0, "cpu, 1 thread"
    columns = {name: name for name in ("1 thread", "2 threads", "zstd -1", "zipnn", "OpenZL", "torch.save")}
    columns |= {"memcpy": "memory copy", FRESH: "copy to new memory"}
    for what, config, state, row in _rows():
        if f"{config}, {state}" != DRAWN or not row["device"].startswith("cpu") or row["unit"] != "MB/s":
            continue
        size = row["size"]
        pairs = [(row["device"].removeprefix("cpu, "), row["value"])]
        pairs += [(row["peer"], row["peer_value"])] if row["device"] == one else []
        cells += [(what, columns[name], number(value)) for name, value in pairs if name in columns]
    title = f"MB/s of raw state, {size / 1e6:.0f} M parameters, commit {commit_of('codec.json', DRAWN)}"
    # Only decompression writes to new memory.
    cells = [*((what, columns[FRESH], "") for what, _, _ in cells), *cells]
    return crossed(cells, columns.values(), NONE, title)


# ------------------------------------------------------------------------------------------------- the picture of costs

_OWN, _OTHER = "#2a6f97", "#b5651d"
WAYS = ("compress base", "compress delta", "decompress base", "decompress delta")
STALL = "stall"
COPY = "one copy of memory"
OWN = ("shrinkpoint", "Saver")
"""What the names of our own bars begin with."""


def speeds_by_way(rows: Sequence[Json]) -> dict[str, dict[str, float]]:
    """Return MB/s of raw state by way and system: ours on one and two threads, peers on one.

    Args:
        rows: of `bench codec`; those of its large state are taken.
    """
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        way, _, rest = row["row"].partition(", ")
        if way not in WAYS or rest != "default, GPT":
            continue
        count = row["device"].removeprefix("cpu, ")
        of = {f"shrinkpoint, {count}": row["value"]}
        if count == "1 thread" and row["peer"] != "memcpy":
            of[row["peer"]] = row["peer_value"]
        found.setdefault(way, {}).update((who, value) for who, value in of.items() if value is not None)
    return {way: dict(sorted(of.items(), key=lambda one: not one[0].startswith(OWN))) for way, of in found.items()}


def stalls(rows: Sequence[Json]) -> dict[str, dict[str, float]]:
    """Return milliseconds that a save blocks the caller, by state and system.

    Args:
        rows: of `bench saver`.
    """
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        start, _, part = row["row"].partition(": ")
        if part == STALL and None not in (row["value"], row["peer_value"]):
            mode, _, size = start.rpartition(" of ")
            found.setdefault(size, {})[mode] = 1e3 * row["value"]
            found[size].setdefault(COPY, 1e3 * row["peer_value"])
    return found


def picture(codec: Sequence[Json], saver: Sequence[Json], path: Path) -> None:
    """Draw both, speeds on the left.

    Args:
        codec: rows of `bench codec`.
        saver: rows of `bench saver`.
        path: of the PNG file.

    Raises:
        BadArgumentError: Matplotlib is not installed.
    """
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 4.6), layout="constrained")
    _bars(axes[0], speeds_by_way(codec), "MB/s of raw state (more is better), 25 M parameters")
    _bars(axes[1], stalls(saver), "ms for which a save holds up training (less is better)")
    axes[1].set_xscale("log")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axis: Any, groups: Mapping[str, Mapping[str, float]], label: str) -> None:
    """Draw groups of bars with their values; ours in one colour, others in another."""
    at, ticks = 0.0, []
    for group, bars in groups.items():
        axis.text(0.0, at - 0.75, group, transform=axis.get_yaxis_transform(), fontsize=9, fontweight="bold")
        for who, value in bars.items():
            axis.barh(at, value, height=0.8, color=_OWN if who.startswith(OWN) else _OTHER)
            axis.annotate(f"{value:,.3g}" if value < 100 else f"{value:,.0f}", (value, at), xytext=(3, 0),
                          textcoords="offset points", va="center", fontsize=8)  # fmt: skip
            ticks.append((at, who))
            at += 1.0
        at += 1.3
    axis.set_yticks([y for y, _ in ticks], [who for _, who in ticks], fontsize=8)
    axis.set_ylim(at - 1.3, -1.3)
    axis.margins(x=0.12)
    axis.set_xlabel(label)
    axis.spines[["top", "right"]].set_visible(False)


# -------------------------------------------------------------------------------------------------------------- kernels

ROWS = {
    "weighted_kmeans": codebooks.solved(codebooks.CODES),
    "weighted_kmeans_many": codebooks.TOGETHER,
    "quantization_loss": codebooks.LOSS,
    "log_histogram_many": codebooks.row("log_histogram"),
    "kept_histogram_many": codebooks.row("kept_histogram"),
    "pack_bits": "pack_bits 5",
    "unpack_bits": "unpack_bits 5",
    "row_quantize": "row_quantize 4 bit adaptive",
    "row_kmeans": "row_kmeans 2 bit",
    "rans_encode": "rans_encode conditional",
    "rans_decode": "rans_decode conditional",
}
"""Functions whose row in `bench kernels` is not named as they are."""
SCALAR = ("bits_for", "magnitude_bits")
"""Functions without a row: a few operations on one number."""
IN_STATES = (
    "collect_and_locate",
    "distortion_many",
    "factors_many",
    "least_losses",
    "residual_symbols_many",
    "residual_values_many",
    "uniform_levels_many",
    "uniform_values_many",
    "used_buckets_many",
)
"""Functions without a row: `bench codec` and `bench sync` measure them in states of small arrays and in deltas."""


def functions() -> dict[str, str]:
    """Return the module of each function of `shrinkpoint.kernels`, below that package."""
    named = {name: getattr(public, name) for name in public.__all__}
    return {
        name: value.__module__.removeprefix(f"{public.__name__}.")
        for name, value in named.items()
        if isinstance(value, FunctionType)
    }


def kernels() -> str:
    """Table of kernels, one line for each function."""
    found: dict[tuple[str, bool], Json] = {}
    for row in (*rows_of("gpu.json"), *rows_of("kernels.json")):
        found.setdefault((row["row"], row["device"].startswith("cpu")), row)  # keeps the row of the first size
    lines = []
    for name, subject in functions().items():
        files = sorted((HOME / "tests/kernels").glob("test_*.py"), key=lambda path: path.stem != f"test_{subject}")
        test = next(p.name for p in files if _stands(f"tests/kernels/{p.name}", rf"\b{name}\b"))
        host, card = (found.get((ROWS.get(name, name), cpu)) for cpu in (True, False))
        on_card = NONE if _stands(f"kernels/{subject}/gpu.py", rf"^def {name}(_many)?\(") else ""
        page = f"kernels/{subject.replace('.', '/')}"
        page = f"{page}/__init__.py" if (HOME / page).is_dir() else f"{page}.py"
        places = [f"[`{name}`](../../{page})", f"[test](../../tests/kernels/{test})"]
        lines.append([*places, _figure(host), _figure(card) or on_card])
    return markdown(["", "", "CPU, one thread, x memcpy", "GPU"], lines)


def _stands(path: str, pattern: str) -> bool:
    """Return whether a file exists and matches the pattern."""
    file = HOME / path
    return file.exists() and re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE) is not None


def _figure(row: Json | None) -> str:
    """Format a rate with its share of the copy's, or a time; "" without a row."""
    if row is None:
        return ""
    if row["value"] is None:
        return NONE
    share = f", {number(row['ratio'], 2)} x" if row["peer"] in FLOORS else ""
    return f"{number(row['value'])} {row['unit']}{share}"
