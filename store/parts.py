"""The parts of a store, and the operations over all of a store: copies, and verification.

The parts are the folders that copies, checks, sizes and collection (`retention`) cover. Manifests, data files and
frozen sets are copied step by step; the other parts have a `copy` of their own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError, ShrinkpointError
from . import history, labels
from .chain import forest, is_whole, naming_errors, opener, reason, resolve, walk
from .files import Files
from .frozen_sets import FrozenSets, needed_by
from .lock import Lease
from .manifest import DATA, FROZEN, STEPS, Catalog, Entry, Manifest, is_content


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a store.

    Args:
        folder: its name.
        read: reads one of its files, or raises CorruptDataError; None: its files are checked with the steps.
        copy: copies what belongs to some steps (number -> identity) from one store to another; None: copied with them.
        is_store: whether it is a store with the same parts.
    """

    folder: str
    read: Callable[[Files, str], object] | None = None
    copy: Callable[[Files, Files, Mapping[int, str]], None] | None = None
    is_store: bool = False


PARTS = (
    Part(STEPS),
    Part(DATA),
    Part(FROZEN, is_store=True),
    Part(labels.PINS, copy=labels.copy_pins),
    Part(labels.TAGS, read=labels.read_file, copy=labels.copy_tags),
    Part(history.RESTORES, copy=history.copy_restores),
    Part(history.LEFT, read=history.read_rewind, copy=history.copy_rewinds),
)


def stores(files: Files) -> Iterator[tuple[str, Files]]:
    """Yield a store and the stores within it: the prefix of their names, and their files."""
    yield "", files
    for part in PARTS:
        if part.is_store:
            yield f"{part.folder}/", files.below(part.folder)


def unreadable(files: Files) -> dict[str, str]:
    """Return path -> reason of the damaged files that are not checked with the steps."""
    reasons = {}
    for prefix, inner in stores(files):
        for folder, read in [(part.folder, part.read) for part in PARTS if part.read is not None]:
            for name in inner.list(folder):
                try:
                    read(inner, name)
                except CorruptDataError as e:
                    reasons[f"{prefix}{folder}/{name}"] = str(e)
    return reasons


def copy_all(
    source: Catalog,
    chosen: Mapping[int, Manifest],
    target: Catalog,
    lease: Lease,
    *,
    may_go: bool = False,
    repair: bool = False,
) -> list[int]:
    """Copy steps, the lowest first, each after its frozen set; then the other parts.

    Args:
        source: the store to copy from.
        chosen: manifests of the steps.
        target: the store to copy to.
        lease: on the target, held shared; renewed at every step.
        may_go: leave out a step that another process removes before its turn; otherwise it is an error.
        repair: also read the files of steps that the target has already, and rewrite damaged ones.

    Returns:
        The chosen steps that the target has now.

    Raises:
        BadArgumentError: the target has a different step or tag of that name; nothing is copied.
        CorruptDataError, MissingParentError, NewerFormatError: a step is not intact; those before it are copied.
    """
    there = _existing(source, chosen, target)
    sound: set[str] = set()
    source_sets, target_sets, copied = FrozenSets(source.files), FrozenSets(target.files), set[str]()
    has_sets = bool(source_sets.catalog.steps())

    def copy_sets(manifest: Manifest) -> None:
        """Copy the frozen sets of a step, each once."""
        for digest in sorted(needed_by(opener(source.files, manifest)(None)) - copied) if not manifest.shards else ():
            try:
                source_sets.copy_to(target_sets, digest, repair=repair)
            except (CorruptDataError, MissingParentError) as e:
                raise type(e)(f"step {manifest.step}: {e}") from None
            copied.add(digest)

    def copy_step(manifest: Manifest) -> None:
        copy_files(source.files, manifest, target.files, sound)
        copy_sets(manifest)
        target.commit(manifest)

    chosen = dict(chosen)
    for step in sorted(chosen):
        # A whole step takes the place of a thinned one.
        if step not in there or (there[step].lacks and not chosen[step].lacks):
            try:
                source.settled(step, lambda e: copy_step(e.manifest))
            except MissingParentError:
                if not may_go or source.get(step) is not None:
                    raise
                del chosen[step]
            lease.renew()
            continue
        if has_sets:
            source.settled(step, lambda e: copy_sets(e.manifest))
        if repair:
            try:
                copy_files(source.files, there[step], target.files, sound)
            except MissingParentError:
                raise MissingParentError(
                    f"step {step}: damaged in {target.url}, and {source.url} has it in other files, because one was "
                    "compacted: drop it there, and copy again"
                ) from None
        lease.renew()
    identities = {step: manifest.identity for step, manifest in chosen.items()}
    for part in PARTS:
        if part.copy is not None:
            part.copy(source.files, target.files, identities)
    return sorted(chosen)


def _existing(source: Catalog, chosen: Mapping[int, Manifest], target: Catalog) -> dict[int, Manifest]:
    """Return the manifests of chosen steps that the target has, made durable.

    Raises: as `copy_all`, where the target has a different step or tag.
    """
    tags = {name: step for name, step in labels.tags(source.files).items() if step in chosen}
    try:
        entries = {step: e for step, e in target.all().items() if step in chosen}
    except CorruptDataError as e:
        raise CorruptDataError(f"{target.url}: {e}; drop the step there, and copy again") from None
    for step, entry in entries.items():
        if entry.manifest.identity != chosen[step].identity:
            raise BadArgumentError(f"step {step}: {target.url} has another one of that number")
    labels.check_alike(target.files, tags)
    for name, step in labels.tags(target.files).items():
        if tags.get(name, step) != step:
            raise BadArgumentError(f"tag {name!r}: {target.url} has it at step {step}")
    # A copy may have been killed after it created a manifest, before that was durable.
    target.files.sync([e.path for e in entries.values()])
    return {step: entry.manifest for step, entry in entries.items()}


def copy_files(source: Files, manifest: Manifest, target: Files, sound: set[str]) -> None:
    """Copy the missing or damaged files of a step, the base of its chain before its deltas.

    Args:
        source: the files to copy from.
        manifest: of the step.
        target: the files to copy to.
        sound: names of files that the target is known to have; the files of the chain are added.

    Raises:
        CorruptDataError, MissingParentError: a file does not match its name, or is missing.
    """
    for name in reversed(manifest.files):
        path, is_sound = f"{DATA}/{name}", name in sound
        with contextlib.suppress(CorruptDataError, MissingParentError), naming_errors(target, manifest.step, name):
            if not is_sound and target.exists(path) and is_content(name, target.read(path)):
                target.sync([path])
                is_sound = True
        if not is_sound:
            with naming_errors(source, manifest.step, name):
                data = source.read(path)
            if not is_content(name, data):
                raise CorruptDataError(f"step {manifest.step}: {source.path(path)} does not match its name")
            target.write(path, data)
        sound.add(name)


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
                wrong = [files.path(f"{DATA}/{name}") for name, _ in manifest.shards if not is_intact(name)]
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
