"""Verification: read every step of a store and find those that are not intact."""

from __future__ import annotations

from collections.abc import Callable

from ..codec.errors import ShrinkpointError
from .catalog import Catalog, Entry
from .chain import FOLDER, Found, forest, resolve, walk
from .files import Files
from .frozen_sets import FrozenSets, needed_by
from .retention import is_whole

Progress = Callable[[int, int, int], None]
"""Called with (step, done, total) after each step."""


def problems(files: Files, catalog: Catalog, progress: Progress | None = None) -> dict[int, str]:
    """Read every step with its chain, each file once; return the damaged steps and the reasons.

    Args:
        files: of the store; copies in memory are not used.
        catalog: of the store.
        progress: called after each step.
    """
    entries, found = catalog.readable()
    total = len(entries) + len(found)
    done = len(found)
    known: dict[str, bool] = {}
    frozen = _FrozenProblems(files)
    for root in forest(entries.values()):
        for visited in walk(files, root):
            entry = visited.node.entry
            if entry is None:
                continue
            step = entry.manifest.step
            if visited.problem is not None:
                why = _still_wrong(files, catalog, entry, visited.problem)
                if why:
                    found[step] = why
            elif why := _wrong_shards(files, entry, known) or frozen.of(visited, catalog):
                found[step] = why
            done += 1
            if progress is not None:
                progress(step, done, total)
    return dict(sorted(found.items()))


def _wrong_shards(files: Files, entry: Entry, known: dict[str, bool]) -> str:
    """Name the damaged files of ranks for a message; "" if all are intact.

    Each file is read once, see `known`.
    """
    for name, _ in entry.manifest.shards:
        if name not in known:
            known[name] = is_whole(files, name)
    wrong = [files.path(f"{FOLDER}/{name}") for name, _ in entry.manifest.shards if not known[name]]
    return f"step {entry.manifest.step}: missing or damaged: {', '.join(wrong[:5])}" if wrong else ""


class _FrozenProblems:
    """Damaged and missing frozen sets of a store; each set is read once."""

    def __init__(self, files: Files) -> None:
        self._sets = FrozenSets(files)
        self._known: dict[str, str] = {}

    def of(self, visited: Found, catalog: Catalog) -> str:
        """Return why a set that an intact step needs cannot be read; "" if all can.

        Also "" if the step was removed meanwhile.
        """
        entry = visited.node.entry
        if entry is None or visited.checkpoint is None or entry.manifest.shards:
            return ""
        wrong = [why for digest in sorted(needed_by(visited.checkpoint)) if (why := self._problem(digest))]
        step = entry.manifest.step
        return f"step {step}: {wrong[0]}" if wrong and catalog.get(step) is not None else ""

    def _problem(self, digest: str) -> str:
        if digest not in self._known:
            try:
                self._sets.load(digest)
                self._known[digest] = ""
            except ShrinkpointError as e:
                self._known[digest] = f"its frozen parameters: {e}"
        return self._known[digest]


def _still_wrong(files: Files, catalog: Catalog, entry: Entry, problem: ShrinkpointError) -> str:
    """Return why a step is damaged; "" if it was only moved or removed meanwhile."""
    step = entry.manifest.step
    try:
        now = catalog.get(step)
        if now is not None and now.generation != entry.generation:
            catalog.settled(step, lambda e: resolve(files, e.manifest))
    except ShrinkpointError as e:
        return str(e)
    if now is None or now.generation != entry.generation:
        return ""
    text = str(problem)
    return text if text.startswith(f"step {step}:") else f"step {step}: below it, {text}"
