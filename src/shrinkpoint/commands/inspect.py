"""`info`, `ls` and `verify`: list checkpoints and check them."""

from __future__ import annotations

import contextlib
import fnmatch
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError, NewerFormatError
from ..store import history, labels
from ..store.manifest import FROZEN, Catalog, lacking
from . import inputs
from .inputs import AsJson, Parents, Step, StoreUrl, is_spt, is_store, open_store
from .outputs import busy, emit, line, listed, nearest, note, result, size, steps_done, table
from .seal import is_sealed, newest_sealed, verify_sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from ..codec.checkpoint import Checkpoint
    from ..codec.display import Row
    from ..store.manifest import Manifest

    Ranks = Mapping[Any, Checkpoint]
    """The headers of a sharded checkpoint by rank, or that of another one under None."""
    RankRow = tuple[int | None, Row]
    """A row of a summary, and the rank of a sharded checkpoint."""

ORDERS: dict[str, Callable[[Row], float]] = {
    "path": lambda _: 0.0,
    "bytes": lambda row: -row.stored_bytes,
    "error": lambda row: -row.error,
}
"""Keys of the orders of arrays; "path" is the order in which they are stored."""
_ERRORS = (">relative L2", ">worst element")
"""Columns of `error_columns`."""


def info(
    source: Annotated[
        str,
        typer.Argument(metavar="FILE|STORE|FOLDER", help="A checkpoint file, a store, or a folder of the DCP writer."),
    ],
    step: Step = None,
    rank: Annotated[int | None, typer.Option(help="Only this rank of a sharded checkpoint.")] = None,
    paths: Annotated[
        list[str] | None, typer.Option("--paths", help="Only arrays whose path matches this shell glob; repeatable.")
    ] = None,
    sort: Annotated[str, typer.Option(help="Order: path (as stored), bytes, or error (relative L2).")] = "path",
    as_json: AsJson = False,
) -> None:
    """Show the header of a checkpoint, and a line for each array.

    The error columns are the relative L2 error of each array (or its bound, after <=), and the largest relative error
    of its elements where the codec bounds that. "why" is the rule or evidence that chose the codec. Only the header is
    read; the content hash of a file is not computed. A sharded checkpoint has a header for each rank.
    """
    if sort not in ORDERS:
        raise BadArgumentError(f"--sort is {sort!r}; it must be one of {', '.join(ORDERS)}")
    ckpts, about = _open(source, step)
    if rank is not None and rank not in ckpts:
        ranks = "it is not sharded" if None in ckpts else f"its ranks are {listed([*map(str, ckpts)])}"
        raise BadArgumentError(f"--rank {rank}: {ranks}")
    shown = ckpts if rank is None else {rank: ckpts[rank]}
    rows = _matching([(at, row) for at, ckpt in shown.items() for row in ckpt.summary()], paths)
    rows = sorted(rows, key=lambda found: ORDERS[sort](found[1]))
    if as_json:
        parts = []
        for at, ckpt in shown.items():
            own = {} if at is None else {"rank": at}
            parts.append(own | _header(ckpt) | {"rows": [dict(row) for other, row in rows if other == at]})
        emit(about | (parts[0] if None in shown else {"ranks": parts}))
        return
    where = f"{source}, step {about['step']}" if "step" in about else source
    for at, ckpt in shown.items():
        kind = f"delta of {ckpt.parent_id[:16]}..." if ckpt.parent_id else "base"
        line(f"{where}{'' if at is None else f', rank {at}'}: {kind}{f', id {ckpt.id[:16]}...' if ckpt.id else ''}")
        line(f"{size(ckpt.raw_nbytes)} in {len(ckpt.records)} arrays -> {size(ckpt.nbytes)}, ratio {ckpt.ratio:.2f}")
    if about.get("lacks"):
        line("thinned: " + lacking(about["lacks"].items()))
    line()
    sharded = [] if None in shown else [">rank"]
    columns = ("path", "codec", "stream", "dtype", "shape", ">raw", ">stored", ">bits", *_ERRORS, "why", "note")
    table(
        (*sharded, *columns),
        [
            (
                *([at] if sharded else []),
                row.path,
                row.codec,
                row.stream,
                row.dtype,
                "x".join(map(str, row.shape)) or "()",
                size(row.raw_bytes),
                size(row.stored_bytes),
                f"{row.bits_per_element:.2f}",
                *error_columns(row.error, row.measure),
                row.why,
                row.note,
            )
            for at, row in rows
        ],
    )


def _header(ckpt: Checkpoint) -> dict[str, Any]:
    """Return what --json has of the header of a container."""
    return {
        "id": ckpt.id or None,
        "delta": ckpt.is_delta,
        "parent": ckpt.parent_id,
        "nbytes": ckpt.nbytes,
        "raw_nbytes": ckpt.raw_nbytes,
        "ratio": ckpt.ratio,
        "arrays": len(ckpt.records),
    }


def error_columns(error: float, measure: str) -> tuple[str, str]:
    """The relative L2 error of an array, and the largest relative error of its elements.

    The second is empty where it is not known.

    The largest relative error of the elements bounds the relative L2 error, so the first column compares all arrays.

    Example:
        >>> error_columns(0.01, "relative L2"), error_columns(0.05, "relative"), error_columns(0.0, "exact")
        (('0.01', ''), ('<= 0.05', '0.05'), ('exact', ''))
    """
    if measure == "exact":
        return "exact", ""
    return (f"<= {error:.3g}", f"{error:.3g}") if measure == "relative" else (f"{error:.3g}", "")


def _open(source: str, step: str | None) -> tuple[Ranks, dict[str, Any]]:
    """Read the header of a checkpoint, or of each rank of a sharded one.

    Its origin is named for --json.
    """
    path = Path(source)
    if path.is_file() or (not is_store(source) and inputs.is_sharded(path)):
        if step is not None:
            kind = "file" if path.is_file() else "folder of one checkpoint"
            raise BadArgumentError(f"--step {step!r}: {source} is a {kind}, not a store")
        if path.is_file():
            return {None: inputs.header_of_file(path)}, {"file": source}
        return inputs.headers_of_folder(path), {"folder": source}
    store = open_store(source)
    number, ckpts = inputs.read_step(store, step, lambda s: inputs.headers_of_step(store, store.describe(s)))
    manifest = store.describe(number)
    return ckpts, {
        "store": source,
        "step": number,
        "metric": manifest.metric,
        "chain": list(manifest.chain),
        "restore_cost": manifest.restore_cost,
        "lacks": dict(manifest.lacks),
    }


def _matching(rows: list[RankRow], paths: list[str] | None) -> list[RankRow]:
    if not paths:
        return rows
    for pattern in paths:
        if not any(fnmatch.fnmatchcase(row.path, pattern) for _, row in rows):
            near = nearest(pattern, parts_of(row.path for _, row in rows))
            raise BadArgumentError(f"--paths {pattern!r}: no array matches{near}")
    return [(at, row) for at, row in rows if any(fnmatch.fnmatchcase(row.path, pattern) for pattern in paths)]


def parts_of(paths: Iterable[str]) -> list[str]:
    """Return all paths and their parents, each once.

    Example:
        >>> parts_of(["model/a", "model/b"])
        ['model/a', 'model', 'model/b']
    """
    found: dict[str, None] = {}
    for path in paths:
        keys = path.split("/")
        found |= dict.fromkeys("/".join(keys[:n]) for n in range(len(keys), 0, -1))
    return list(found)


def ls(store: StoreUrl, as_json: AsJson = False) -> None:
    """List the steps of a store. Exit code 1 if a manifest cannot be read.

    A delta names the step of its base: "(its file)" means that only the file of that step is kept, for the delta. A
    thinned step names the arrays that `gc --thin-after` has left out.

    The last line has two sums: the bytes of the files of the steps listed, and all bytes in the folder, which also
    holds files that only removed steps or older generations need. `compact` and `gc` free these. In between it names
    the bytes of frozen parameters that the steps share, if there are any.
    """
    files = inputs.open_listing(store)
    pins, tags = labels.pins(files), labels.tags(files)
    found: list[dict[str, Any]] = []
    entries, problems = Catalog(files).readable()
    for step in sorted(entries.keys() | problems.keys()):
        names = [name for name, number in tags.items() if number == step]
        entry: dict[str, Any] = {"step": step, "pinned": step in pins, "tags": names}
        if step in problems:
            found.append(entry | {"problem": problems[step]})
            continue
        m = entries[step].manifest
        entry |= {"delta": m.is_delta, "nbytes": m.stored_nbytes, "raw_nbytes": m.raw_nbytes, "ratio": m.ratio}
        entry |= {"base": base_of(m), "lacks": dict(m.lacks)}
        found.append(entry | {"restore_cost": m.restore_cost, "metric": m.metric, "id": m.id})
    wrong = [entry for entry in found if "problem" in entry]
    restores = history.count_restores(files)
    occupied = folder_nbytes(store)
    frozen = sum(entry.manifest.stored_nbytes for entry in Catalog(files.below(FROZEN)).readable()[0].values())
    if as_json:
        sizes = {"folder_nbytes": occupied, "frozen_nbytes": frozen}
        emit({"store": store, "restores": restores, **sizes, "steps": found})
    else:
        columns = (">step", "kind", ">raw", ">stored", ">ratio", ">restore", ">metric", "labels")
        table(columns, [_ls_row(entry, entries.keys()) for entry in found])
        stored = sum(entry.get("nbytes", 0) for entry in found)
        line()
        shared = f"{size(frozen)} of frozen parameters, " if frozen else ""
        sums = f"{size(stored)} in their own files, {shared}{size(occupied)} in the folder"
        line(f"{len(found)} steps, {sums}; restored {restores} times")
    for entry in wrong:
        note(entry["problem"])
    if wrong:
        raise typer.Exit(1)


def folder_nbytes(url: str) -> int:
    """The bytes of all files below a folder or URL."""
    from ..store.objects import ObjectFiles
    from ..store.urls import open_files

    files = open_files(url)
    if isinstance(files, ObjectFiles):
        return int(files.fs.du(files.root))
    total = 0
    for folder, _, names in os.walk(files.root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a save or `gc` may remove it at this moment
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def base_of(manifest: Manifest) -> int:
    """Return the step of the base that a step is decoded from: its own for a base."""
    files = [name for name, _ in manifest.shards] or [manifest.chain[-1]]
    return min(int(name.split("-", 1)[0]) for name in files)


def _ls_row(entry: dict[str, Any], steps: Collection[int]) -> tuple[object, ...]:
    if "problem" in entry:
        return (entry["step"], "unreadable", "", "", "", "", "", "")
    labels = ["pinned"] * entry["pinned"] + entry["tags"]
    lost = "" if entry["base"] in steps else " (its file)"
    kind = f"delta of {entry['base']}{lost}" if entry["delta"] else "base"
    return (
        entry["step"],
        f"{kind}, thinned (no {' or '.join(f'{role}s' for role in entry['lacks'])})" if entry["lacks"] else kind,
        size(entry["raw_nbytes"]),
        size(entry["nbytes"]),
        f"{entry['ratio']:.2f}",
        f"{entry['restore_cost']:.2f} bases",
        "" if entry["metric"] is None else f"{entry['metric']:g}",
        " ".join(labels),
    )


def verify(
    sources: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Stores, checkpoint files, or sealed folders and files.")
    ],
    parents: Parents = None,
    newest: Annotated[
        bool, typer.Option("--newest", help="Print the newest intact checkpoint of the run folder PATH.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read all files and check them. Exit code 1 if anything is not intact.

    PATH is a store, a checkpoint file (.spt), or a folder or file with a seal. In a store, every step is checked with
    its whole chain, and every tag. A delta file is decoded if its chain is among the files or given by --parent;
    otherwise only its checksums are checked, and this is reported. In a sealed folder, every file that is torn,
    missing, altered or added is reported. --json has the content hash of each checkpoint file.
    """
    if newest:
        _print_newest(sources, as_json)
        return
    problems: list[dict[str, Any]] = []
    checked: list[dict[str, Any]] = []
    files: list[Path] = []
    for source in sources:
        if is_store(source):
            store = open_store(source)
            checked += [{"store": source, "step": step} for step in store.steps()]
            with steps_done("verify", quiet=as_json) as progress:
                found = store.verify(progress)
            problems += [{"store": source, "step": step, "problem": why} for step, why in found.items()]
            problems += [{"store": source, "file": name, "problem": why} for name, why in store.verify_labels().items()]
        elif is_spt(path := Path(source)) or (path.suffix == ".spt" and not is_sealed(path)):
            files.append(path)
        else:
            checked.append({"path": source})
            problems += _verify_sealed(source, as_json)
    for file in _verify_files(files, parents or []):
        checked.append({key: file[key] for key in ("file", "how", "id")})
        if file["problem"]:
            problems.append({"file": file["file"], "problem": file["problem"]})
        elif not as_json and file["how"] == "checksums":
            line(f"{file['file']}: intact by its checksums; not decoded, because its parent was not given")
    if as_json:
        emit({"intact": not problems, "checked": checked, "problems": problems})
    else:
        for problem in problems:
            line(f"NOT INTACT: {problem['problem']}")
        others = sum("step" not in problem and "store" in problem for problem in problems)
        damaged = {problem.get("path", number) for number, problem in enumerate(problems)}
        records = f", {others} tags or records damaged" if others else ""
        line(f"{len(checked)} checkpoints checked, {len(damaged) - others} not intact{records}")
    if problems:
        raise typer.Exit(1)


def _verify_sealed(source: str, quiet: bool) -> list[dict[str, Any]]:
    path = Path(source)
    if not is_sealed(path):
        inputs.check_exists(source)
        raise CorruptDataError(
            f"{source}: neither a store nor a checkpoint file, and it has no seal; "
            f"`shrinkpoint seal {source}` writes one while it is intact"
        )
    try:
        found = verify_sealed(path, quiet)
        return [{"path": str(path), "file": d.file, "kind": d.kind, "problem": f"{path}: {d}"} for d in found]
    except CorruptDataError as error:
        return [{"path": source, "problem": str(error)}]


def _print_newest(sources: list[str], as_json: bool) -> None:
    """Print the newest intact checkpoint of a run folder, or the newest intact step of a store."""
    if len(sources) != 1:
        raise BadArgumentError(f"--newest takes one run folder, not {len(sources)}")
    run = sources[0]
    found: dict[str, Any]
    if is_store(run):
        store = open_store(run)
        step, _ = inputs.newest_intact(store, store.read)
        found = {"store": run, "step": step}
    else:
        if not Path(run).is_dir():
            inputs.check_exists(run)
            raise BadArgumentError(f"--newest: {run} is not a folder")
        found = {"path": str(newest_sealed(Path(run), as_json))}
    result(as_json, str(found.get("path", found.get("step"))), **found)


def _verify_files(files: list[Path], parents: list[Path]) -> list[dict[str, Any]]:
    from ..codec.checkpoint import decompress

    found: dict[Path, Any] = {}
    problems: dict[Path, str] = {}
    for path in dict.fromkeys([*files, *parents]):
        try:
            found[path] = inputs.read_file(path)
        except (CorruptDataError, NewerFormatError) as error:
            problems[path] = str(error)
    below = {ckpt.identity: ckpt for ckpt in found.values()}
    results: list[dict[str, Any]] = []
    for path in files:
        how = "not decoded"
        if path in found:
            try:
                with busy(f"verify {path}"):
                    decompress(inputs.chain_of(found[path], path, below))
                how = "decoded"
            except MissingParentError:
                how = "checksums"
            except CorruptDataError as error:
                problems[path] = f"{path}: {error}"
        known = found[path].id if path in found else None
        results.append({"file": str(path), "how": how, "id": known, "problem": problems.get(path, "")})
    return results
