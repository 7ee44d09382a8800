"""Committed results under `bench/results`: documents, rows, and their origin."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from .cells import Json, markdown
from .provenance import HEADER, commits, manifest_line

HOME = Path(__file__).resolve().parents[2]
RESULTS = HOME / "bench" / "results"


def documents(pattern: str) -> dict[str, Json]:
    """Return the JSON documents under `bench/results` whose names match, by name."""
    return {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob(pattern))}


def rows_of(pattern: str) -> list[Json]:
    """Return the rows of all matching documents."""
    return [row for document in documents(pattern).values() for row in document["rows"]]


def by_place(rows: Iterable[Json], prefix: str = "") -> dict[str, dict[str, Json]]:
    """Group rows by the text before the colon of their names, then by the text after it.

    Args:
        rows: of results.
        prefix: only names that begin with it; it is taken off.

    Example:
        >>> by_place([{"row": "transfer CNN: ratio"}, {"row": "cost: stages"}], "transfer ")
        {'CNN': {'ratio': {'row': 'transfer CNN: ratio'}}}
    """
    found: dict[str, dict[str, Json]] = {}
    for row in rows:
        where, _, what = row["row"].partition(": ")
        if where.startswith(prefix):
            found.setdefault(where.removeprefix(prefix), {})[what] = row
    return found


def commit_of(name: str, holding: str = "") -> str:
    """Return the commits of a result's rows with this in their name, the most frequent first."""
    document = documents(name).get(name, {})
    rows = [row for row in document.get("rows", []) if holding in row["row"]]
    return ", ".join(f"`{commit}`" for commit, _ in commits({**document, "rows": rows}).most_common())


def manifest() -> str:
    """Table of the origin of all results; "+" marks uncommitted changes."""
    return markdown(HEADER, [manifest_line(*found) for found in documents("*.json").items()])
