"""Table of the entries of optimizers: which of them may change."""

from __future__ import annotations

from collections.abc import Iterable

from .cells import Json, markdown
from .results import documents

_HEADER = ("", "entries that may change: relative L2 error", "exact entries", "weights by", "next update")


def optimizers() -> str:
    """Table of all optimizers that were run; those with the same entries share a line."""
    document = documents("optimizers.json").get("optimizers.json", {"packages": {}, "optimizers": {}})
    lines: list[list[str]] = []
    groups: dict[tuple[str, tuple[str, ...], tuple[str, ...], bool], dict[str, Json]] = {}
    for name, found in document["optimizers"].items():
        if not isinstance(found, str):
            changed, exact = names_of(found)
            key = (name.split(".")[0], changed, exact, found["weights"].startswith("structure"))
            groups.setdefault(key, {})[name] = found
    for (package, changed, exact, structure), records in groups.items():
        errors = ", ".join(f"{n} {_range(r['entries'][n]['error'] for r in records.values())}" for n in changed)
        updates = _range(record["update"] for record in records.values())
        title = f"{package} {document['packages'][package]}: {_joined(records)}"
        lines.append([title, errors, ", ".join(exact), "structure" if structure else "`kinds=`", updates])
    return markdown(_HEADER, lines)


def optimizers_not_run() -> str:
    """List of the optimizers that were not run or whose state is refused, by reason."""
    reasons: dict[str, list[str]] = {}
    for document in documents("optimizers.json").values():
        for name, found in document["optimizers"].items():
            if isinstance(found, str):
                reasons.setdefault(_plain(found), []).append(name)
    return markdown(["optimizer", "reason"], [[_joined(names), why] for why, names in reasons.items()])


def names_of(record: Json) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of entries that may change and of those that stay exact.

    Example:
        >>> names_of({"entries": {"step": {"lossy": False}, "exp_avg": {"lossy": True}}})
        (('exp_avg',), ('step',))
    """
    entries = sorted(record["entries"].items())
    return tuple(n for n, e in entries if e["lossy"]), tuple(n for n, e in entries if not e["lossy"])


def _joined(names: Iterable[str]) -> str:
    return ", ".join(name.partition(".")[2].removeprefix("optim.") for name in names)


def _plain(text: str) -> str:
    return text.partition("; allowed are")[0].replace("|", "/").replace("<", "").replace(">", "")


def _range(values: Iterable[float]) -> str:
    texts = [f"{value:.2f}" for value in sorted(values)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"
