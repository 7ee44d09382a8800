"""The commands that change a store, and `copy`."""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from ..codec.errors import BadArgumentError
from ..store.manifest import Catalog, manifest_path
from .inputs import AsJson, StoreUrl, open_store, parse_step
from .outputs import busy, emit, line, note, result, steps_done

StepArgument = Annotated[str, typer.Argument(metavar="STEP", help="Number or tag.")]


def compact(
    store: StoreUrl,
    max_cost: Annotated[
        float, typer.Option(help="Largest cost of restoring a step, in multiples of a base, at least 1.")
    ] = 2.5,
    as_json: AsJson = False,
) -> None:
    """Shorten long chains, so that restoring is fast.

    Every step stays loadable; `gc` removes the former files.

    Exit code 1 if steps are left unchanged because they are not intact.
    """
    from ..store.store import NotCompactedWarning

    opened = open_store(store)
    with warnings.catch_warnings(record=True) as caught, steps_done("compact", quiet=as_json) as progress:
        warnings.simplefilter("always")
        changed = opened.compact(max_cost, progress)
    problems = [str(w.message) for w in caught if issubclass(w.category, NotCompactedWarning)]
    if as_json:
        emit({"store": store, "changed": changed, "problems": problems})
    else:
        line(f"{len(changed)} steps are stored differently now; `shrinkpoint gc` removes their former files")
        for problem in problems:
            line(f"NOT COMPACTED: {problem}")
    if problems:
        raise typer.Exit(1)


def gc(
    store: StoreUrl,
    keep_last: Annotated[int | None, typer.Option(help="Keep this number of the newest steps.")] = None,
    keep_every: Annotated[int | None, typer.Option(help="Keep steps whose number is a multiple of this.")] = None,
    keep_best: Annotated[int | None, typer.Option(help="Keep this number of steps with the best metric.")] = None,
    largest: Annotated[bool, typer.Option("--largest", help="A larger metric is better.")] = False,
    thin_after: Annotated[
        int | None,
        typer.Option(help="Keep only the weights of steps older than this number of the newest; see docs/store.md."),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for savers to finish.")] = 60.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the files to remove, and remove nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove steps that the --keep options do not keep, and files that no step needs.

    Without a --keep option every step is kept. Pinned and tagged steps and the newest step are always kept.

    With --thin-after, kept steps lose the moments of optimizers: they can be loaded, and training cannot continue from
    them. Pinned and tagged steps stay whole.
    """
    from ..store.retention import Retention, steps_to_thin
    from ..store.urls import open_files

    retention = None
    if any(option is not None for option in (keep_last, keep_every, keep_best)):
        last = 1 if keep_last is None else keep_last
        retention = Retention(last, keep_every, 0 if keep_best is None else keep_best, largest, thin_after)
    elif largest:
        raise BadArgumentError("--largest has no effect without --keep-best")
    elif thin_after is not None:
        retention = Retention(every=1, thin_after=thin_after)
    opened = open_store(store, empty=True)
    catalog = Catalog(open_files(opened.url))
    before = catalog.generations()
    thinned = set() if thin_after is None else _thinned(catalog)
    with busy("gc"):
        removed = opened.gc(retention, timeout=timeout, dry_run=dry_run)
    names = set(removed)
    gone = [step for step, known in before.items() if manifest_path(step, known[-1]) in names]
    new: list[int] = []
    if retention is not None and thin_after is not None and dry_run:
        new = sorted(steps_to_thin(catalog, retention, read=True).difference(gone))
    elif thin_after is not None:
        new = sorted(_thinned(catalog) - thinned)
    if as_json:
        found = {"removed_steps": gone, "removed_files": removed, "thinned_steps": new}
        emit({"store": store, "dry_run": dry_run, **found})
        return
    if dry_run:
        for name in removed:
            line(f"would remove {name}")
    does = "would be removed" if dry_run else "removed"
    line(f"{len(gone)} steps and {len(removed)} files {does}; {len(before) - len(gone)} steps kept")
    if thin_after is not None:
        line(f"{len(new)} steps {'would be ' if dry_run else ''}thinned: they keep all but moments of optimizers")


def _thinned(catalog: Catalog) -> set[int]:
    """Return the thinned steps."""
    return {step for step, entry in catalog.readable()[0].items() if entry.manifest.lacks}


def drop(
    store: StoreUrl,
    steps: Annotated[list[int] | None, typer.Argument(metavar="[STEP...]", help="Numbers of steps.")] = None,
    after: Annotated[
        str | None, typer.Option(metavar="STEP", help="Remove all steps after this one (number or tag).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove steps, intact or not; deltas against them stay readable. `gc` removes the files."""
    if bool(steps) == (after is not None):
        raise BadArgumentError("give either steps, or --after STEP")
    opened = open_store(store)
    if after is not None:
        steps = opened.drop_after(parse_step(after))
    else:
        opened.drop(*(steps or []))
    result(as_json, f"removed {', '.join(map(str, steps or [])) or 'none'}", store=store, removed_steps=steps)


def pin(store: StoreUrl, step: StepArgument, as_json: AsJson = False) -> None:
    """Protect a step from `gc`."""
    opened = open_store(store)
    opened.pin(parse_step(step))
    result(as_json, f"pinned: {', '.join(map(str, opened.pins()))}", store=store, pins=opened.pins())


def unpin(store: StoreUrl, step: StepArgument, as_json: AsJson = False) -> None:
    """Remove the pin of a step."""
    opened = open_store(store)
    asked = parse_step(step)
    number = opened.tags().get(asked) if isinstance(asked, str) else asked
    if number is None or number not in opened.pins():
        raise BadArgumentError(f"{step} is not pinned in {store}")
    opened.unpin(number)
    result(as_json, f"pinned: {', '.join(map(str, opened.pins())) or 'none'}", store=store, pins=opened.pins())


def tag(
    store: StoreUrl,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, '_', '.' and '-'.")],
    step: StepArgument,
    as_json: AsJson = False,
) -> None:
    """Give a step a name, which also protects it from `gc`; an existing name moves to it."""
    opened = open_store(store)
    opened.tag(name, parse_step(step))
    result(as_json, f"{name}: step {opened.tags()[name]}", store=store, tags=opened.tags())


def untag(
    store: StoreUrl, name: Annotated[str, typer.Argument(metavar="NAME", help="The tag.")], as_json: AsJson = False
) -> None:
    """Remove a tag; the step stays."""
    opened = open_store(store)
    if not opened.untag(name):
        raise BadArgumentError(f"{store} has no tag {name!r}")
    damaged = opened.verify_labels()
    for why in damaged.values():
        note(why)
    result(as_json, f"removed the tag {name}", store=store, tags=None if damaged else opened.tags())


def rate(
    store: StoreUrl,
    step: StepArgument,
    metric: Annotated[float, typer.Argument(metavar="METRIC", help="Any finite number.")],
    as_json: AsJson = False,
) -> None:
    """Record the quality of the model at a step, for `gc --keep-best` and the report."""
    opened = open_store(store)
    opened.rate(parse_step(step), metric)
    number = opened.describe(parse_step(step)).step
    result(as_json, f"step {number}: metric {metric:g}", store=store, step=number, metric=metric)


def copy(
    store: StoreUrl,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A folder or fsspec URL: a store, or a new one.")],
    steps: Annotated[
        list[str] | None, typer.Option("--step", help="Only this step (number or tag) and its parents; repeatable.")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Also read the files that the target has, and replace damaged ones.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy steps with their parents, pins and tags to another store; every file is verified."""
    opened = open_store(store)
    asked = sorted({opened.describe(parse_step(step)).step for step in steps or []})
    before = opened.steps()
    with busy(f"copying to {target}"):
        there = opened.copy(target, asked or None, repair=repair).steps()
    # A concurrent run may add or remove steps during the copy.
    chosen = asked or sorted(set(there) & {*before, *opened.steps()})
    text = f"{len(chosen)} steps are in {target}, which has {len(there)}"
    result(as_json, text, store=store, target=target, steps=chosen)


COMMANDS = (compact, gc, drop, pin, unpin, tag, untag, rate, copy)
"""All of them, in the order of the help."""
