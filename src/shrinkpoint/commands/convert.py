"""`compress` and `restore`: from the files of others to a store or a checkpoint file, and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AsJson, Force, Parents, Step
from .output import busy, emit, line, note, size

if TYPE_CHECKING:
    from ..codec.checkpoint import Checkpoint
    from ..codec.config import Config

ENDING = ".spt"


def compress(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A .pt or safetensors file, or a DCP folder.")],
    target: Annotated[
        str, typer.Argument(metavar="FILE.spt|STORE", help="What ends in .spt is a single file, all else a store.")
    ],
    step: Annotated[int | None, typer.Option(help="The step it is in the store; needed for one.")] = None,
    parents: Annotated[
        list[Path] | None,
        typer.Option(
            "--parent",
            help="For a file: a .spt file to store a delta against, first; then the rest of its chain, in any order.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="For a store: step or tag to store a delta against; by default the newest intact one."),
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="For a store: no delta, whatever is there.")] = False,
    preset: Annotated[
        str | None,
        typer.Option(help="How to compress: default, lossless, inshrinkerator, lc-checkpoint, check-n-run or bitsnap."),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Lambda of the rate-distortion encoder, 0 or more.")] = None,
    max_rel_error: Annotated[
        float | None, typer.Option(help="Relative L2 error that no array may exceed, between 0 and 1.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="A configuration as Config.to_json writes it.")
    ] = None,
    under: Annotated[str, typer.Option(help="Only the part of the state at this path.")] = "",
    metric: Annotated[float | None, typer.Option(help="For a store: how good the model is.")] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Compress a checkpoint of another format.

    Nothing in the source is executed: a .pt file or DCP folder that holds more than tensors and plain values is
    refused.
    """
    from ..codec.errors import BadArgumentError
    from .configs import config as configured
    from .foreign import load_state
    from .sources import subtree

    cfg = configured(preset, config, rate, max_rel_error)
    single = target.endswith(ENDING)
    misplaced = {
        "--step": single and step is not None,
        "--against": single and against is not None,
        "--base": single and base,
        "--metric": single and metric is not None,
        "--parent": not single and bool(parents),
    }
    for option, wrong in misplaced.items():
        if wrong:
            kind = "a single file" if single else f"a store; one file ends in {ENDING}"
            raise BadArgumentError(f"{option}: the target {target} is {kind}")
    if base and against is not None:
        raise BadArgumentError("--base and --against are both given; say one of them")
    if single:
        from .files import check_free

        check_free(Path(target), force)
    elif step is None:
        raise BadArgumentError(f"--step is needed for the store {target} (a single file ends in {ENDING})")
    else:
        _check_step(target, step, force)
    with busy(f"reading {source}"):
        state = load_state(source)
        if under:
            state = _root(subtree(state, under), under)
    with busy("compressing"):
        if single:
            ckpt = _to_file(state, Path(target), parents or [], cfg, force)
            where: dict[str, Any] = {"file": target}
        else:
            assert step is not None
            ckpt, where = _to_store(state, target, step, against, base, cfg, metric)
    errors = [row for row in ckpt.summary() if row.measure != "exact"]
    worst = {m: max(r.error for r in errors if r.measure == m) for m in sorted({r.measure for r in errors})}
    if as_json:
        sizes = {"nbytes": ckpt.nbytes, "raw_nbytes": ckpt.raw_nbytes, "ratio": ckpt.ratio}
        emit(where | sizes | {"id": ckpt.id, "delta": ckpt.is_delta, "parent": ckpt.parent_id, "worst_errors": worst})
        return
    kind = "delta" if ckpt.is_delta else "base"
    to = ", ".join(map(str, where.values()))
    line(f"{size(ckpt.raw_nbytes)} -> {size(ckpt.nbytes)}, ratio {ckpt.ratio:.2f}, {kind}: {to}")
    told = ", ".join(f"{measure} {error:.3g}" for measure, error in worst.items())
    line(f"largest error of an array: {told}" if told else "every array is exact")


def _check_step(url: str, step: int, force: bool) -> None:
    from ..codec.errors import BadArgumentError
    from ..store.store import Store

    if step in Store(url).steps() and not force:
        raise BadArgumentError(f"{url} has a step {step}; say --force to replace it")


def _root(state: Any, under: str) -> Any:
    """What is left must be a tree: one array alone is put into a dict, under its name."""
    return state if isinstance(state, (dict, list, tuple)) else {under.rpartition("/")[2]: state}


def _to_file(state: Any, target: Path, parents: list[Path], cfg: Config, force: bool) -> Checkpoint:
    from ..codec.compress import compress as encode
    from .files import write_file
    from .sources import resolved

    ckpt = encode(state, resolved(parents[0], parents[1:]) if parents else None, cfg)
    data = ckpt.to_bytes()
    write_file(target, force, lambda path: path.write_bytes(data))
    return ckpt


def _to_store(
    state: Any, url: str, step: int, against: str | None, base: bool, cfg: Config, metric: float | None
) -> tuple[Checkpoint, dict[str, Any]]:
    from ..store.store import Store
    from .sources import newest_intact, parse_step

    store = Store(url, cfg)
    # Loading is what tells a store what the next delta is against.
    if against is not None:
        store.load(parse_step(against), count=False)
    elif not base and store.steps():
        newest_intact(store, lambda s: store.load(s, count=False))
    saved = store.save(step, state, metric=metric)
    return saved.checkpoint, {"store": url, "step": step}


def restore(
    source: Annotated[str, typer.Argument(metavar="FILE|STORE", help="A checkpoint file, or a store.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="A .pt or .safetensors file, or a folder for DCP.")],
    step: Step = None,
    parents: Parents = None,
    to: Annotated[str | None, typer.Option(help="pt, safetensors or dcp; by default as the output ends.")] = None,
    paths: Annotated[
        list[str] | None,
        typer.Option("--paths", help="Only what matches this shell glob, and no more is read; a store's; repeatable."),
    ] = None,
    under: Annotated[str, typer.Option(help="Only the part of the state at this path, as the root.")] = "",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Restore a checkpoint to a format of others.

    Without --step the newest intact step of a store is taken; those passed over are named. This is not counted as a
    restore of the run.
    """
    from .foreign import check_target, format_of, save_state
    from .sources import subtree

    kind = format_of(target, to)
    check_target(target, kind, force, [source, *map(str, parents or [])])
    with busy(f"reading {source}"):
        state, where = _state(source, step, parents, paths)
    if under:
        state = _root(subtree(state, under), under)
    with busy(f"writing {target}"):
        save_state(state, target, kind, force)
    if as_json:
        emit(where | {"output": str(target), "format": kind})
    else:
        line(f"{', '.join(f'{k} {v}' for k, v in where.items())} -> {target} ({kind})")


def _state(
    source: str, step: str | None, parents: list[Path] | None, paths: list[str] | None
) -> tuple[Any, dict[str, Any]]:
    from ..codec.checkpoint import decompress
    from ..codec.errors import BadArgumentError
    from .sources import is_url, newest_intact, open_store, parse_step, resolved

    if Path(source).is_file():
        for option, given in (("--step", step), ("--paths", paths)):
            if given:
                raise BadArgumentError(f"{option}: {source} is a file, no store")
        return decompress(resolved(Path(source), parents or [])), {"file": source}
    if parents and not is_url(source):
        os.stat(source)
    if parents:
        raise BadArgumentError(f"--parent: {source} is a store, which knows its chains")
    store = open_store(source)
    if step is None:
        number, state = newest_intact(store, lambda s: store.load(s, paths, count=False))
        newest = store.steps()[-1]
        if number != newest:
            note(f"warning: restored step {number}, not {newest}")
    else:
        number, state = store.describe(parse_step(step)).step, store.load(parse_step(step), paths, count=False)
    return state, {"store": source, "step": number}
