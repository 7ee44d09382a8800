"""Verification: read every step of a store and find those that are not intact."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..codec.errors import ShrinkpointError
from .catalog import Catalog, Entry
from .chain import FOLDER, forest, reason, resolve, walk
from .frozen_sets import FrozenSets, needed_by
from .retention import is_whole

Progress = Callable[[int, int, int], None]
"""Called with (step, done, total) after each step."""


def problems(catalog: Catalog, progress: Progress | None = None) -> dict[int, str]:
    """Read every step with its chain, each file once; return the damaged steps and the reasons.

    Args:
        catalog: of the store; copies in memory are not used.
        progress: called after each step.
    """
    files, sets = catalog.files, FrozenSets(catalog.files)
    is_intact = functools.cache(functools.partial(is_whole, files))

    @functools.cache
    def problem_of_set(digest: str) -> str:
        try:
            sets.load(digest)
        except ShrinkpointError as e:
            return f"its frozen parameters: {e}"
        return ""

    entries, reasons = catalog.readable()
    done, total = len(reasons), len(entries) + len(reasons)
    for root in forest(entries.values()):
        for node, ckpt, problem in walk(files, root):
            if node.entry is None:
                continue
            manifest, why = node.entry.manifest, ""
            if problem is not None:
                why = _still_wrong(catalog, node.entry, problem)
            elif manifest.shards:
                wrong = [files.path(f"{FOLDER}/{name}") for name, _ in manifest.shards if not is_intact(name)]
                why = f"step {manifest.step}: missing or damaged: {', '.join(wrong[:5])}" if wrong else ""
            elif ckpt is not None:
                lost = [why_lost for digest in sorted(needed_by(ckpt)) if (why_lost := problem_of_set(digest))]
                if lost and catalog.get(manifest.step) is not None:  # otherwise it was removed meanwhile
                    why = f"step {manifest.step}: {lost[0]}"
            if why:
                reasons[manifest.step] = why
            done += 1
            if progress is not None:
                progress(manifest.step, done, total)
    return dict(sorted(reasons.items()))


def _still_wrong(catalog: Catalog, entry: Entry, problem: ShrinkpointError) -> str:
    """Return why a step is damaged; "" if it was only moved or removed meanwhile."""
    step = entry.manifest.step
    try:
        now = catalog.get(step)
        if now is None:
            return ""
        if now.generation != entry.generation:
            catalog.settled(step, lambda e: resolve(catalog.files, e.manifest))
            return ""
    except ShrinkpointError as e:
        return str(e)
    return reason(step, problem)
