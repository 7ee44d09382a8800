"""Pages of the documentation, the tables in each, and the pictures.

In a page, the text between `<!-- table NAME -->` and `<!-- end -->` is the table NAME, made from the JSON under
`bench/results`; do not edit it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from shrinkpoint.demo.report import draw as demo_picture
from shrinkpoint.kernels.errors import BadArgumentError

from .. import kernels
from ..harness import Row
from ..studies import ratio as ratio_study
from . import levels, ratios, results, speeds, systems, tables
from .results import HOME, documents, rows_of

_SHOWN = ("evidence", "alternatives", "choosing", "systems", "saver", "trainers", "scaling", "security")
PAGES = ("README.md", *(f"docs/{page}.md" for page in _SHOWN), "bench/results/tables.md")
_BLOCK = re.compile(r"(<!-- table ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_AIMS = ("training", "kernels", "codec", "search", "store", "saver", "systems")


def _named(*made: Callable[[], str], start: str = "") -> dict[str, Callable[[], str]]:
    """Return tables by the names of their functions."""
    return {f"{start}{table.__name__.replace('_', ' ')}": table for table in made}


TABLES: dict[str, Callable[[], str]] = {
    **_named(speeds.speed, speeds.choices, speeds.states, systems.papers, results.manifest, speeds.kernels),
    **_named(tables.demo, tables.real, tables.flips, tables.fuzzed, tables.kernel_sizes, tables.saves),
    **_named(tables.saver_overhead, tables.frameworks, tables.trainers, tables.ranks, tables.optimizers),
    **_named(tables.optimizers_not_run, tables.shard, tables.scale, tables.computed, tables.table_5_all),
    **_named(tables.continued, tables.transfer, ratios.ratio),
    **_named(ratios.targets, ratios.losses, ratios.weights, ratios.peers, start="ratio "),
    **_named(levels.levels, levels.levels_by_group, levels.overview, levels.exact_levels, levels.front),
    **_named(levels.evaluation, levels.origin, start="levels "),
    "store peers": partial(tables.beside, "store.json", ("MB/s", "x raw state")),
    **{f"level {name}": partial(levels.level, name) for name in ("precise", "default", "compact")},
    **{f"aims {bench}": partial(tables.aims, bench) for bench in _AIMS},
    **{f"systems {name}": made for name, made in systems.TABLES.items()},
}


def regenerated(text: str) -> str:
    """Return a page with its tables made again.

    Raises:
        BadArgumentError: a marker names no table.
    """

    def block(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise BadArgumentError(f"table {name!r} is unknown; one of {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[name]()}\n{match[3]}"

    return _BLOCK.sub(block, text)


def renew() -> None:
    """Write all pages with their tables made again."""
    for page in PAGES:
        path = results.HOME / page
        path.write_text(regenerated(path.read_text(encoding="utf-8")), encoding="utf-8")


def out_of_step() -> list[str]:
    """Return the pages whose tables differ from the results."""
    texts = {page: (results.HOME / page).read_text(encoding="utf-8") for page in PAGES}
    return [page for page, text in texts.items() if regenerated(text) != text]


# ------------------------------------------------------------------------------------------------------------ pictures

FOLDER = HOME / "docs" / "pictures"
"""Where the pictures are."""


def _kernels(path: Path) -> None:
    kernels.plot([Row(**row) for row in rows_of("kernels.json")], path)


def _ratio(path: Path) -> None:
    ratio_study.plot([Row(**row) for row in ratios.measured()], path)


def _cost(path: Path) -> None:
    speeds.picture(rows_of("codec.json"), rows_of("saves.json"), path)


def _demo(path: Path) -> None:
    ran = documents("demo.json")["demo.json"]
    demo_picture(ran, ran["curves"], path)


PICTURES: dict[str, Callable[[Path], object]] = {
    "levels.png": levels.picture, "ratio.png": _ratio, "kernels.png": _kernels, "cost.png": _cost, "demo.png": _demo,
}  # fmt: skip
"""The function that draws each picture from the results."""
