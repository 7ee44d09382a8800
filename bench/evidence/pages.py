"""Pages of the documentation, and the tables in each.

In a page, the text between `<!-- table NAME -->` and `<!-- end -->` is the table NAME, made from the JSON under
`bench/results`; do not edit it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

from shrinkpoint.kernels.errors import BadArgumentError

from . import (
    catalogue,
    frameworks,
    levels,
    optimizers,
    parts,
    ratios,
    results,
    scale,
    speeds,
    systems,
)

PAGES = (
    "README.md",
    "docs/evidence.md",
    "docs/alternatives.md",
    "docs/choosing.md",
    "docs/systems.md",
    "docs/saver.md",
    "docs/trainers.md",
    "docs/scaling.md",
    "docs/security.md",
    "bench/results/tables.md",
)
_BLOCK = re.compile(r"(<!-- table ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_AIMS = ("training", "kernels", "codec", "search", "store", "saver", "systems")
TABLES: dict[str, Callable[[], str]] = {
    "demo": parts.demo,
    "speed": speeds.speed,
    "choices": speeds.choices,
    "states": speeds.states,
    "frameworks": frameworks.frameworks,
    "saver": parts.saver,
    "saver overhead": parts.saver_overhead,
    "saves": parts.saves,
    "trainers": frameworks.trainers,
    "ranks": frameworks.ranks,
    "ratio": ratios.chains,
    "ratio targets": ratios.targets,
    "ratio losses": ratios.losses,
    "ratio weights": ratios.weights,
    "ratio peers": ratios.peers,
    "papers": systems.papers,
    "transfer": scale.transferred,
    "table 5 all": scale.table5,
    "continued": scale.going_on,
    "shard": scale.shard,
    "scale": scale.others,
    "computed": scale.computed,
    "optimizers": optimizers.optimizers,
    "optimizers not run": optimizers.optimizers_not_run,
    "manifest": results.manifest,
    "real": parts.real,
    "flips": parts.flips,
    "fuzzed": parts.fuzzed,
    "kernels": catalogue.kernels,
    "kernel sizes": parts.kernel_sizes,
    "store peers": partial(parts.beside, "store.json", ("MB/s", "x raw state")),
    "stall peers": partial(parts.beside, "saver.json", ("ms",)),
    "levels": levels.levels,
    "levels by group": levels.levels_by_group,
    "levels evaluation": levels.evaluation,
    "levels origin": levels.origin,
    "overview": levels.overview,
    "exact levels": levels.exact_levels,
    "front": levels.front,
    **{f"level {name}": partial(levels.level, name) for name in ("precise", "default", "compact")},
    **{f"aims {bench}": partial(parts.aims, bench) for bench in _AIMS},
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
    wrong = []
    for page in PAGES:
        text = (results.HOME / page).read_text(encoding="utf-8")
        if regenerated(text) != text:
            wrong.append(page)
    return wrong
