"""The campaign: one JSON line a family, setting and seed, never measured twice.

A line names the commit that measured it, the versions of this package and torch, and the configuration. Lines that were
measured before lines named it have null there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

import shrinkpoint as sp

from ... import machine
from ...devices import threads
from .by_optimizer import PACKAGES
from .families import FAMILIES, SET_ASIDE, Family
from .groups import ALL, HELD_BACK
from .measure import Record, chain, killed, resumed, uninterrupted
from .settings import KILLED, LEVELS, NULL, PARTS, config_of

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
        row = {"what": what, "family": family, "setting": setting, "seed": seed, **found, **_origin(setting)}
        with self.path.open("a") as file:
            file.write(json.dumps(_rounded(row)) + "\n")
        self.rows.append(row)
        self.keys.add(_key(row))


@cache
def _commit() -> str | None:
    """Return the commit as of the first row.

    Code that is changed later is not what this process runs.
    """
    return machine.commit(RESULTS)


def _origin(setting: str) -> Record:
    """Return what a row was measured with: commit, versions, configuration."""
    config = None if setting in (NULL, UNINTERRUPTED) else config_of(setting).to_json()
    return {"commit": _commit(), "shrinkpoint": sp.__version__, "torch": torch.__version__, "config": config}


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
    families: Sequence[str] = tuple(ALL),
    levels: Sequence[str] = KILLED,
    parts: Sequence[str] = tuple(PARTS),
    say: Callable[[str], None] = print,
) -> None:
    """Measure the missing rows: killed trainings by seed, then each part's own effect.

    A family whose optimizer's package is not installed is left out.

    Of seed 0 the ratios of chains are measured, too; of the first seed, whether a lossless training ends as the
    uninterrupted one does.

    Args:
        rows: of earlier runs; measured rows are added.
        seeds: of the trainings; effects of parts are measured for the first one.
        families: by name.
        levels: settings of the killed trainings.
        parts: settings of one part each; measured for the families that chose the default.
        say: receives the name of the next measurement.
    """
    with threads(1):
        seeds = list(seeds)
        for seed in seeds:
            for name in families:
                with _installed(name, say):
                    _levels(rows, ALL[name](), seed, levels, say)
        for name in families if seeds else ():
            with _installed(name, say):
                _killed(rows, ALL[name](), seeds[0], "lossless", say)
            if name not in HELD_BACK:
                _resumed(rows, ALL[name](), seeds[0], levels, parts, say)


@contextmanager
def _installed(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Report a family whose optimizer's package is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        say(f"{name}: not measured: {error.name} is not installed")


def _levels(rows: Rows, family: Family, seed: int, levels: Sequence[str], say: Callable[[str], None]) -> None:
    if not rows.has("end", family.name, UNINTERRUPTED, seed):
        say(f"{family.name}, seed {seed}: uninterrupted")
        rows.add("end", family.name, UNINTERRUPTED, seed, uninterrupted(family, seed))
    for setting in levels:
        _killed(rows, family, seed, setting, say)
    chains = [s for s in LEVELS if not rows.has("chain", family.name, s, seed)]
    if chains and not seed:
        say(f"{family.name}, seed {seed}: chains")
        for setting, found in chain(family, chains, seed).items():
            rows.add("chain", family.name, setting, seed, found)


def _killed(rows: Rows, family: Family, seed: int, setting: str, say: Callable[[str], None]) -> None:
    if not rows.has("killed", family.name, setting, seed):
        say(f"{family.name}, seed {seed}: killed, {setting}")
        # Processors round differently: whether ends are equal shows only next to a training of the same machine.
        pair = {UNINTERRUPTED: uninterrupted(family, seed)} if setting == "lossless" else {}
        rows.add("killed", family.name, setting, seed, killed(family, setting, seed) | pair)


def _resumed(
    rows: Rows, family: Family, seed: int, levels: Sequence[str], parts: Sequence[str], say: Callable[[str], None]
) -> None:
    wanted = [s for s in levels if s != NULL]
    if family.name in FAMILIES and family.name not in SET_ASIDE:
        wanted += parts
    missing = [setting for setting in wanted if not rows.has("resumed", family.name, setting, seed)]
    if missing:
        say(f"{family.name}, seed {seed}: resumed by {len(missing)} settings")
        resumed(family, missing, seed, lambda setting, found: rows.add("resumed", family.name, setting, seed, found))
