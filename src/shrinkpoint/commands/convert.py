"""`compress` and `restore`: convert from and to files of other formats."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..codec.errors import BadArgumentError
from . import inputs
from .inputs import AsJson, Force, Parents, Step, check_exists, newest_intact, open_store, parse_step, resolved, subtree
from .interchange import SUFFIXES, check_target, format_of, load_state, save_state
from .outputs import busy, check_free, emit, line, listed, note, result, size, write_file

if TYPE_CHECKING:
    from ..codec.checkpoint import Checkpoint

ENDING = ".spt"
STEP_WORDS = ("step", "iter(?:ation)?", "checkpoint|ckpt", "epoch")
"""Words before the step in the name of a checkpoint; the first word of this list that the name contains is used."""


def compress(
    *,
    sources: Annotated[
        list[Path] | None,
        typer.Argument(metavar="SOURCE", help="A .pt or safetensors file, or a DCP folder; or several of them."),
    ] = None,
    target: Annotated[
        str, typer.Argument(metavar="FILE.spt|STORE", help="A single file if it ends in .spt, otherwise a store.")
    ],
    step: Annotated[int | None, typer.Option(help="The step in the store; required for a store.")] = None,
    step_from_name: Annotated[
        bool,
        typer.Option(
            "--step-from-name", help="For a store: take the steps from the names, and save the sources in that order."
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(help="For a store: step or tag to store a delta against; by default the newest intact one."),
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="For a store: store a base, not a delta.")] = False,
    metric: Annotated[float | None, typer.Option(help="For a store: the quality of the model.")] = None,
    parents: Annotated[
        list[Path] | None,
        typer.Option(
            "--parent",
            help="For a file: the .spt file to store a delta against; then the rest of its chain, in any order.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="default, lossless, exact-weights, precise, compact, inshrinkerator, lc-checkpoint, check-n-run or "
            "bitsnap."
        ),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Lambda of the rate-distortion encoder, 0 or more.")] = None,
    max_rel_error: Annotated[
        float | None, typer.Option(help="Relative L2 error that no array may exceed, between 0 and 1.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="A configuration as Config.to_json writes it.")
    ] = None,
    under: Annotated[str, typer.Option(help="Only the part of the state at this path.")] = "",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Compress a checkpoint of another format, or a series of them to a chain of deltas.

    Nothing in a source is executed: a .pt file or DCP folder that holds more than tensors and plain values is refused.
    """
    if not sources:
        raise BadArgumentError(
            f"the destination is missing: shrinkpoint compress {target} DESTINATION, a file ending in .spt or a store"
        )
    cfg = inputs.config(preset, config, rate, max_rel_error)
    given = {"--step": step is not None, "--step-from-name": step_from_name, "--against": against is not None}
    given |= {"--base": base, "--metric": metric is not None, "--parent": bool(parents)}
    numbered = _placed(sources, target, step, given)
    for source in sources:
        check_exists(str(source))

    def load(source: Path) -> Any:
        with busy(f"reading {source}"):
            state = load_state(source)
            return _root(subtree(state, under), under) if under else state

    if numbered is None:
        from ..codec.compress import compress as encode

        check_free(Path(target), force)
        state = load(sources[0])
        with busy("compressing"):
            ckpt = encode(state, resolved(parents[0], parents[1:]) if parents else None, cfg)
            write_file(Path(target), force, methodcaller("write_bytes", ckpt.to_bytes()))
        if as_json:
            emit(_saved_fields(ckpt, {"file": target}))
        else:
            _print_saved(ckpt, {"file": target})
        return
    from ..store.store import Store

    store = Store(target, cfg)
    taken = sorted(set(store.steps()) & set(numbered))
    if taken and not force:
        names = f"step {taken[0]}" if len(taken) == 1 else f"steps {listed([str(s) for s in taken])}"
        it = "it" if len(taken) == 1 else "them"
        raise BadArgumentError(f"{target} already has {names}; --force replaces {it}")
    saved: list[dict[str, Any]] = []
    for number, source in numbered.items():
        state = load(source)
        with busy(f"compressing {source}"):
            # Loading a step makes it the parent of the next save; later ones are deltas against the one before.
            if not saved and against is not None:
                store.load(parse_step(against), count=False)
            elif not saved and not base and store.steps():
                newest_intact(store, lambda s: store.load(s, count=False))
            ckpt = store.save(number, state, metric=metric).checkpoint
        where = {"store": target, "step": number}
        saved.append(_saved_fields(ckpt, where))
        if not as_json:
            _print_saved(ckpt, where)
    if as_json:
        emit({"store": target, "steps": saved} if step_from_name else saved[0])


def _placed(
    sources: Sequence[Path], target: str, step: int | None, given: Mapping[str, bool]
) -> dict[int, Path] | None:
    """Return the sources by step, or None if the target is a single file.

    Args:
        sources: the files.
        target: a single file, or a store.
        step: of one source in a store.
        given: whether each option is given; all are for stores, but --parent.

    Raises:
        BadArgumentError: options that contradict each other or the target.
    """
    single, is_named = target.endswith(ENDING), given["--step-from-name"]
    for option, is_given in given.items():
        if is_given and single == (option != "--parent"):
            kind = "a single file" if single else f"a store; one file ends in {ENDING}"
            raise BadArgumentError(f"{option}: the target {target} is {kind}")
    if given["--base"] and given["--against"]:
        raise BadArgumentError("--base and --against are both given; use one of them")
    if is_named and (given["--step"] or given["--metric"]):
        raise BadArgumentError("--step-from-name: neither --step nor --metric may be given with it")
    if len(sources) > 1 and not is_named:
        raise BadArgumentError(f"{len(sources)} sources are given; several need --step-from-name and a store")
    if single:
        return None
    if is_named:
        return steps_from_names(sources)
    if step is None:
        raise BadArgumentError(
            f"--step or --step-from-name is needed for the store {target} (a single file ends in {ENDING})"
        )
    return {step: sources[0]}


def steps_from_names(paths: Sequence[Path]) -> dict[int, Path]:
    """Return the steps of files by their names, ascending.

    A step is the number after the word step, iteration, checkpoint or epoch, the first of these that the name has, or
    the only number in the name.

    Raises:
        BadArgumentError: a name has no such number or several, or two names have the same one.

    Example:
        >>> list(steps_from_names([Path("epoch=3-step=900.ckpt"), Path("epoch=0-step=300.ckpt")]))
        [300, 900]
    """
    found: dict[int, Path] = {}
    for path in paths:
        name = path.name.removesuffix(path.suffix) if path.suffix in SUFFIXES else path.name
        named = (re.search(rf"(?:{word})s?[-_=. ]*(\d+)", name, re.IGNORECASE) for word in STEP_WORDS)
        numbers = re.findall(r"\d+", name)
        match = next((m for m in named if m is not None), None)
        if match is None and len(numbers) != 1:
            what = "several numbers" if numbers else "no number"
            raise BadArgumentError(
                f"--step-from-name: {path.name} has {what} in its name, and none of them follows 'step'"
            )
        step = int(match.group(1) if match is not None else numbers[0])
        if step in found:
            raise BadArgumentError(f"--step-from-name: {found[step].name} and {path.name} are both step {step}")
        found[step] = path
    return dict(sorted(found.items()))


def _saved_fields(ckpt: Checkpoint, where: dict[str, Any]) -> dict[str, Any]:
    sizes = {"nbytes": ckpt.nbytes, "raw_nbytes": ckpt.raw_nbytes, "ratio": ckpt.ratio}
    delta = {"id": ckpt.id, "delta": ckpt.is_delta, "parent": ckpt.parent_id}
    return where | sizes | delta | {"worst_errors": _worst_errors(ckpt)}


def _worst_errors(ckpt: Checkpoint) -> dict[str, float]:
    errors = [row for row in ckpt.summary() if row.measure != "exact"]
    return {m: max(r.error for r in errors if r.measure == m) for m in sorted({r.measure for r in errors})}


def _print_saved(ckpt: Checkpoint, where: dict[str, Any]) -> None:
    kind = "delta" if ckpt.is_delta else "base"
    to = ", ".join(map(str, where.values()))
    line(f"{size(ckpt.raw_nbytes)} -> {size(ckpt.nbytes)}, ratio {ckpt.ratio:.2f}, {kind}: {to}")
    worst = ", ".join(f"{measure} {error:.3g}" for measure, error in _worst_errors(ckpt).items())
    line(f"largest error of an array: {worst}" if worst else "every array is exact")


def _root(state: Any, under: str) -> Any:
    """Return the state as a tree; a single array becomes a dict with its name."""
    return state if isinstance(state, (dict, list, tuple)) else {under.rpartition("/")[2]: state}


def restore(
    source: Annotated[str, typer.Argument(metavar="FILE|STORE", help="A checkpoint file, or a store.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="A .pt or .safetensors file, or a folder for DCP.")],
    step: Step = None,
    parents: Parents = None,
    to: Annotated[str | None, typer.Option(help="pt, safetensors or dcp; by default from the output's suffix.")] = None,
    paths: Annotated[
        list[str] | None,
        typer.Option("--paths", help="For a store: read only arrays that match this shell glob; repeatable."),
    ] = None,
    under: Annotated[str, typer.Option(help="Only the part of the state at this path, as the root.")] = "",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Restore a checkpoint to a file or folder of another format.

    Without --step the newest intact step of a store is restored, and damaged newer steps are reported. This does not
    count as a restore of the run.
    """
    kind = format_of(target, to)
    check_target(target, kind, force, [source, *map(str, parents or [])])
    with busy(f"reading {source}"):
        state, where = _state(source, step, parents, paths)
    if under:
        state = _root(subtree(state, under), under)
    with busy(f"writing {target}"):
        save_state(state, target, kind, force)
    text = f"{', '.join(f'{k} {v}' for k, v in where.items())} -> {target} ({kind})"
    result(as_json, text, **where, output=str(target), format=kind)


def _state(
    source: str, step: str | None, parents: list[Path] | None, paths: list[str] | None
) -> tuple[Any, dict[str, Any]]:
    from ..codec.checkpoint import decompress

    if Path(source).is_file():
        for option, given in (("--step", step), ("--paths", paths)):
            if given:
                raise BadArgumentError(f"{option}: {source} is a file, not a store")
        return decompress(resolved(Path(source), parents or [])), {"file": source}
    if parents and not inputs.is_url(source):
        os.stat(source)
    if parents:
        raise BadArgumentError(f"--parent: {source} is a store, which finds parents by itself")
    store = open_store(source)
    number, state = inputs.read_step(store, step, lambda s: store.load(s, paths, count=False))
    if step is None and number != (newest := store.steps()[-1]):
        note(f"warning: restored step {number} instead of {newest}")
    return state, {"store": source, "step": number}
