"""The campaign: one JSON line a family, setting and seed, never measured twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ...devices import threads
from .families import SET_ASIDE, Family
from .groups import ALL as FAMILIES
from .measure import Record, chain, killed, resumed, uninterrupted
from .settings import KILLED, LEVELS, NULL, PARTS

RESULTS = Path(__file__).parents[2] / "results" / "harm.jsonl"
"""Where rows are kept."""
UNINTERRUPTED = "uninterrupted"
Key = tuple[str, str, str, int]


class Rows:
    """Rows in a file of JSON lines, each written as soon as it is measured.

    Args:
        path: of the file; it need not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:  # the process was stopped while it wrote a line
            path.write_text(whole)
        self.rows = [json.loads(line) for line in whole.splitlines()]
        self.keys = {_key(row) for row in self.rows}

    def has(self, what: str, family: str, setting: str, seed: int) -> bool:
        """Return whether this was measured."""
        return (what, family, setting, seed) in self.keys

    def add(self, what: str, family: str, setting: str, seed: int, found: Record) -> None:
        """Keep a row."""
        row = {"what": what, "family": family, "setting": setting, "seed": seed, **found}
        with self.path.open("a") as file:
            file.write(json.dumps(_rounded(row)) + "\n")
        self.rows.append(row)
        self.keys.add(_key(row))


def _key(row: Record) -> Key:
    return row["what"], row["family"], row["setting"], row["seed"]


def _rounded(found: Any) -> Any:
    """Round numbers to seven digits, to keep the file small."""
    if isinstance(found, dict):
        return {key: _rounded(value) for key, value in found.items()}
    if isinstance(found, list):
        return [_rounded(value) for value in found]
    return float(f"{found:.7g}") if isinstance(found, float) else found


def measure(
    rows: Rows,
    seeds: Iterable[int],
    *,
    families: Sequence[str] = tuple(FAMILIES),
    levels: Sequence[str] = KILLED,
    parts: Sequence[str] = tuple(PARTS),
    say: Callable[[str], None] = print,
) -> None:
    """Measure the missing rows: each part's own effect, then killed trainings, by seed.

    Args:
        rows: of earlier runs; measured rows are added.
        seeds: of the trainings; effects of parts are measured for the first one.
        families: by name.
        levels: settings of the killed trainings.
        parts: settings of one part each; not measured for the families that are set aside.
        say: receives the name of the next measurement.
    """
    with threads(1):
        for number, seed in enumerate(seeds):
            for name in families:
                family = FAMILIES[name]()
                if not number and name not in SET_ASIDE:
                    _parts(rows, family, seed, parts, say)
            for name in families:
                _levels(rows, FAMILIES[name](), seed, levels, say)


def _parts(rows: Rows, family: Family, seed: int, parts: Sequence[str], say: Callable[[str], None]) -> None:
    missing = [part for part in parts if not rows.has("resumed", family.name, part, seed)]
    if missing:
        say(f"{family.name}, seed {seed}: {len(missing)} parts")
        resumed(family, missing, seed, lambda setting, found: rows.add("resumed", family.name, setting, seed, found))


def _levels(rows: Rows, family: Family, seed: int, levels: Sequence[str], say: Callable[[str], None]) -> None:
    if not rows.has("end", family.name, UNINTERRUPTED, seed):
        rows.add("end", family.name, UNINTERRUPTED, seed, uninterrupted(family, seed))
    for setting in levels:
        if not rows.has("killed", family.name, setting, seed):
            say(f"{family.name}, seed {seed}: killed, {setting}")
            rows.add("killed", family.name, setting, seed, killed(family, setting, seed))
    missing = [s for s in levels if s != NULL and not rows.has("resumed", family.name, s, seed)]
    if missing and not seed:
        resumed(family, missing, seed, lambda setting, found: rows.add("resumed", family.name, setting, seed, found))
    chains = [s for s in LEVELS if not rows.has("chain", family.name, s, seed)]
    if chains and not seed:
        for setting, found in chain(family, chains, seed).items():
            rows.add("chain", family.name, setting, seed, found)
