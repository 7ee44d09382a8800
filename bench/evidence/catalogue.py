"""Catalogue of kernels: back ends, tests, and speeds on CPU and GPU."""

from __future__ import annotations

import re
from types import FunctionType

from shrinkpoint import kernels as public

from ..devices import FLOORS
from ..kernels import histogram, kmeans
from .cells import NONE, Json, markdown, number
from .results import HOME, rows_of

ROWS = {
    "weighted_kmeans": kmeans.solved(kmeans.CODES),
    "weighted_kmeans_many": kmeans.TOGETHER,
    "quantization_loss": kmeans.LOSS,
    "log_histogram_many": histogram.row("log_histogram"),
    "kept_histogram_many": histogram.row("kept_histogram"),
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
