"""The pictures of the documents, each drawn from the results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from shrinkpoint.demo.report import draw as demo_picture

from .. import kernels
from ..harness import Row
from ..studies import ratio as bench_ratio
from . import levels, ratios, speeds
from .results import HOME, documents, rows_of

PICTURES = HOME / "docs" / "pictures"


def pictures() -> dict[str, Callable[[Path], object]]:
    """Return the drawing function of each file under `docs/pictures` that has results."""
    found: dict[str, Callable[[Path], object]] = {}
    if levels.measured():
        found["levels.png"] = levels.picture
    if ratios.measured():
        found["ratio.png"] = lambda path: bench_ratio.plot([Row(**row) for row in ratios.measured()], path)
    rates = [Row(**row) for row in rows_of("kernels.json")]
    if rates:
        found["kernels.png"] = lambda path: kernels.plot(rates, path)
    spent = {name: rows_of(f"{name}.json") for name in ("codec", "saver")}
    if all(spent.values()):
        found["cost.png"] = lambda path: speeds.picture(spent["codec"], spent["saver"], path)
    ran = documents("demo.json").get("demo.json")
    if ran is not None:
        found["demo.png"] = lambda path: demo_picture(ran, ran["curves"], path)
    return found
