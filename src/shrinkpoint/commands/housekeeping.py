"""Commands that change a store: `compact`, `gc`, `drop`, `pin`, `unpin`, `tag`, `untag`, `rate`, `copy`."""

from __future__ import annotations

import warnings
from typing import Annotated

import typer

from .options import AsJson, StoreUrl
from .output import busy, emit, line, note, steps_done

StepArgument = Annotated[str, typer.Argument(metavar="STEP", help="Number or tag.")]


def compact(
    store: StoreUrl,
    max_cost: Annotated[float, typer.Option(help="Of restoring any step, in multiples of a base, at least 1.")] = 2.5,
    as_json: AsJson = False,
) -> None:
    """Shorten long chains, so that restoring is quick. Every step stays loadable meanwhile; `gc` frees what is left.

    Ends with 1 if steps stay as they are because they are not intact.
    """
    from ..store.store import NotCompactedWarning
    from .sources import open_store

    opened = open_store(store)
    with warnings.catch_warnings(record=True) as caught, steps_done("compact", quiet=as_json) as progress:
        warnings.simplefilter("always")
        changed = opened.compact(max_cost, progress)
    problems = [str(w.message) for w in caught if issubclass(w.category, NotCompactedWarning)]
    if as_json:
        emit({"store": store, "changed": changed, "problems": problems})
    else:
        line(f"{len(changed)} steps are stored otherwise than before; `shrinkpoint gc` frees their former files")
        for problem in problems:
            line(f"NOT COMPACTED: {problem}")
    if problems:
        raise typer.Exit(1)


def gc(
    store: StoreUrl,
    keep_last: Annotated[int | None, typer.Option(help="Keep so many of the newest steps.")] = None,
    keep_every: Annotated[int | None, typer.Option(help="Keep steps whose number this divides.")] = None,
    keep_best: Annotated[int | None, typer.Option(help="Keep so many steps with the best metric.")] = None,
    largest: Annotated[bool, typer.Option("--largest", help="A large metric is a good one.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for savers to finish.")] = 60.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, only say what would be.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove steps that need not be kept, and files that no step needs.

    Without any --keep option every step is kept. Pinned and tagged steps always are, and so is the newest one.
    """
    from ..codec.errors import BadArgumentError
    from ..store.catalog import FOLDER, Catalog
    from ..store.files import open_files
    from ..store.manifest import manifest_name
    from ..store.retention import Retention
    from .sources import open_store

    retention = None
    if any(option is not None for option in (keep_last, keep_every, keep_best)):
        last = 1 if keep_last is None else keep_last
        retention = Retention(last, keep_every, 0 if keep_best is None else keep_best, largest)
    elif largest:
        raise BadArgumentError("--largest says nothing without --keep-best")
    opened = open_store(store, empty=True)
    before = Catalog(open_files(opened.url)).generations()
    with busy("gc"):
        removed = opened.gc(retention, timeout=timeout, dry_run=dry_run)
    names = set(removed)
    gone = [step for step, known in before.items() if f"{FOLDER}/{manifest_name(step, known[-1])}" in names]
    if as_json:
        emit({"store": store, "dry_run": dry_run, "removed_steps": gone, "removed_files": removed})
        return
    if dry_run:
        for name in removed:
            line(f"would remove {name}")
    does = "would be removed" if dry_run else "removed"
    line(f"{len(gone)} steps and {len(removed)} files {does}; {len(before) - len(gone)} steps kept")


def drop(
    store: StoreUrl,
    steps: Annotated[list[int] | None, typer.Argument(metavar="[STEP...]", help="Which.")] = None,
    after: Annotated[str | None, typer.Option(metavar="STEP", help="All above this one (number or tag).")] = None,
    as_json: AsJson = False,
) -> None:
    """Remove steps, intact or not; others stored against them stay readable. `gc` frees the files."""
    from ..codec.errors import BadArgumentError
    from .sources import open_store, parse_step

    if bool(steps) == (after is not None):
        raise BadArgumentError("say either which steps, or --after STEP")
    opened = open_store(store)
    if after is not None:
        steps = opened.drop_after(parse_step(after))
    else:
        opened.drop(*(steps or []))
    _told(as_json, f"removed {', '.join(map(str, steps or [])) or 'none'}", store=store, removed_steps=steps)


def pin(store: StoreUrl, step: StepArgument, as_json: AsJson = False) -> None:
    """Keep a step, whatever `gc` is told."""
    from .sources import open_store, parse_step

    opened = open_store(store)
    opened.pin(parse_step(step))
    _told(as_json, f"pinned: {', '.join(map(str, opened.pins()))}", store=store, pins=opened.pins())


def unpin(store: StoreUrl, step: StepArgument, as_json: AsJson = False) -> None:
    """Take a pin back."""
    from ..codec.errors import BadArgumentError
    from .sources import open_store, parse_step

    opened = open_store(store)
    asked = parse_step(step)
    number = opened.tags().get(asked) if isinstance(asked, str) else asked
    if number is None or number not in opened.pins():
        raise BadArgumentError(f"{step} is not pinned in {store}")
    opened.unpin(number)
    _told(as_json, f"pinned: {', '.join(map(str, opened.pins())) or 'none'}", store=store, pins=opened.pins())


def tag(
    store: StoreUrl,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Letters, digits, '_', '.' and '-'.")],
    step: StepArgument,
    as_json: AsJson = False,
) -> None:
    """Give a step a name, which keeps it too; a name that exists moves."""
    from .sources import open_store, parse_step

    opened = open_store(store)
    opened.tag(name, parse_step(step))
    _told(as_json, f"{name}: step {opened.tags()[name]}", store=store, tags=opened.tags())


def untag(
    store: StoreUrl,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag.")],
    as_json: AsJson = False,
) -> None:
    """Forget a tag."""
    from ..codec.errors import BadArgumentError
    from .sources import open_store

    opened = open_store(store)
    if not opened.untag(name):
        raise BadArgumentError(f"{store} has no tag {name!r}")
    damaged = opened.verify_labels()
    for why in damaged.values():
        note(why)
    _told(as_json, f"no tag {name} any more", store=store, tags=None if damaged else opened.tags())


def rate(
    store: StoreUrl,
    step: StepArgument,
    metric: Annotated[float, typer.Argument(metavar="METRIC", help="Any finite number.")],
    as_json: AsJson = False,
) -> None:
    """Say how good the model of a step is, for `gc --keep-best` and the report."""
    from .sources import open_store, parse_step

    opened = open_store(store)
    opened.rate(parse_step(step), metric)
    number = opened.describe(parse_step(step)).step
    _told(as_json, f"step {number}: metric {metric:g}", store=store, step=number, metric=metric)


def copy(
    store: StoreUrl,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A folder or fsspec URL; a store or nothing yet.")],
    steps: Annotated[
        list[str] | None, typer.Option("--step", help="Only this step (number or tag) and what it needs; repeatable.")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Read what the target has already, and write anew what is damaged.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy steps with all they need to another store, pins and tags too; every file is checked on its way."""
    from .sources import open_store, parse_step

    opened = open_store(store)
    asked = sorted({opened.describe(parse_step(step)).step for step in steps or []})
    before = opened.steps()
    with busy(f"copying to {target}"):
        there = opened.copy(target, asked or None, repair=repair).steps()
    # What a run beside this has removed or added meanwhile may be there or not.
    chosen = asked or sorted(set(there) & {*before, *opened.steps()})
    _told(
        as_json,
        f"{len(chosen)} steps are in {target}, which has {len(there)}",
        store=store,
        target=target,
        steps=chosen,
    )


def _told(as_json: bool, text: str, **data: object) -> None:
    if as_json:
        emit(data)
    else:
        line(text)
