"""`try`: show what a checkpoint becomes at every level, and its quality; nothing is written.

Below the table are the reasons of exact arrays, remedies, and calls to paste.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib
import math
import os
import shlex
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..codec.errors import UnsupportedLeafError
from ..codec.evidence.kind import NOTHING, UNMATCHED
from ..codec.state import tree
from ..codec.state.leaves import as_bytes, is_array, read_leaf
from ..kernels.errors import BadArgumentError
from .convert import steps_from_names
from .dcp import is_dcp
from .diff import side_of
from .inputs import AsJson, check_exists
from .interchange import load_state
from .outputs import busy, emit, line, listed, size, stages_done, table
from .trials import packages, try_level, try_package

if TYPE_CHECKING:
    from ..codec.display import Row
    from .trials import Trial

OPTIMIZER = "optimizer.pt"
"""File of the optimizer's state in a folder that Transformers' Trainer saves."""
LEVELS = ("lossless", "exact_weights", "precise", "default", "compact")
_LINES = 3
"""Maximum number of lines about exact arrays."""
_NONE = "-"
"""Cell of a value that does not exist."""
_IMPORT = "import shrinkpoint as sp"
_LITTLE = 1.1
"""Ratio of two sizes below which the smaller one gains little."""
_MUCH = 0.2
"""Share of the bytes in arrays of unknown role from which `_advice` has a remedy."""


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint that was read.

    Args:
        path: as given.
        kind: "file" (also a DCP folder), "model" (a folder of safetensors files), or "trainer" (the same with the
            optimizer's state).
        state: its arrays and plain values.
        refused: why other values are left out, one reason a value.
    """

    path: Path
    kind: str
    state: Any
    refused: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Reason:
    """A reason for which arrays are exact at the default level.

    Args:
        why: the reason.
        share: of the bytes of the state.
        arrays: their number.
        largest: path of the largest one.
        is_unknown: whether the role of the arrays is unknown.
    """

    why: str
    share: float
    arrays: int
    largest: str
    is_unknown: bool


def try_levels(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A .pt or safetensors file, a DCP folder, or a model's folder of safetensors files.",
        ),
    ],
    following: Annotated[
        Path | None, typer.Argument(metavar="NEXT", help="A later checkpoint of the same run, to store as a delta.")
    ] = None,
    evaluate: Annotated[
        str | None,
        typer.Option(
            "--eval",
            metavar="MODULE:FUNCTION",
            help="Call this function with each restored state, and show the number that it returns (a loss, an "
            "accuracy). The module may be in the current folder; its code is run.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what your checkpoint becomes at each level, without writing anything.

    The state is compressed, restored and compared. The L2 columns are the largest relative L2 error of an array of
    weights, and of an array of an optimizer's moments. Memory is the peak while compressing, in addition to the state.
    Where nothing is gained, the lines below the table say why.
    """
    function = None if evaluate is None else load_function("--eval", evaluate)
    paths = [path for path in (checkpoint, following) if path is not None]
    for path in paths:
        check_exists(str(path))
    read = []
    for path in paths:
        with busy(f"reading {path}"):
            read.append(read_source(path))
    sizes = [_nbytes(source.state) for source in read]
    if not sizes[0]:
        raise BadArgumentError(f"{checkpoint}: it has no arrays, so there is nothing to compress")
    trials = _trials([source.state for source in read], function)
    lossless, default = trials[0], trials[LEVELS.index("default")]
    reasons = _reasons(default.rows)
    advice = _advice(lossless, default, reasons, read)
    # For a first run: exact weights, or lossless where those gain little.
    level = "exact_weights" if lossless.nbytes > _LITTLE * trials[1].nbytes else "lossless"
    calls = _calls(read, level)
    results = [_result(trial, default, sizes) for trial in trials]
    if as_json:
        emit(
            {
                "checkpoint": str(checkpoint),
                "next": None if following is None else str(following),
                "raw_nbytes": sizes[0],
                "arrays": len(default.rows),
                "levels": results,
                "exact": [dataclasses.asdict(reason) for reason in reasons],
                "advice": advice,
                "calls": calls,
            }
        )
        return
    width = shutil.get_terminal_size().columns
    line(f"{checkpoint}: {size(sizes[0])} in {len(default.rows)} arrays")
    line()
    _print_table([_cells(result) for result in results], width)
    line()
    if reasons:
        table((">share", ">arrays", "exact at the default level, because"), _reason_cells(reasons))
        line()
    for paragraph in advice:
        for text in textwrap.wrap(paragraph, width, break_long_words=False, break_on_hyphens=False):
            line(text)
        line()
    for name, lines in calls.items():
        for text in lines:
            line(f"{name + ':' if text is lines[0] else '':13} {text}")


def read_source(path: Path) -> Source:
    """Read a checkpoint, executing nothing in it.

    Raises:
        BadArgumentError, CorruptDataError, OSError, UnsupportedLeafError: it cannot be read; see `load_state`.
    """
    kind = "file"
    if path.is_dir() and not is_dcp(path) and any(path.glob("*.safetensors")):
        from ..trainers.hub import ModelFolder

        kind = "model"
        folder = ModelFolder(path)
        # Folders in it hold other checkpoints, or other parts of a pipeline.
        folder.raw, folder.rest = (
            [file for file in part if file.parent == Path()] for part in (folder.raw, folder.rest)
        )
        folder.compressed = []
        state: Any = folder.all()
        if (path / OPTIMIZER).is_file():
            kind, state = "trainer", {"model": state, "optimizer": load_state(path / OPTIMIZER)}
    else:
        state = load_state(path)
    found, refused = _storable(state)
    return Source(path, kind, found, refused)


def _storable(state: Any) -> tuple[Any, list[str]]:
    """Return the part of a state that can be stored without pickle, and why the rest cannot."""
    with contextlib.suppress(UnsupportedLeafError):
        _check_storable(state)
        return state, []
    root: list[Any] = []
    refused = []
    stack: list[tuple[Any, Any, tuple[Any, ...]]] = [([state], root, ())]
    while stack:
        source, target, keys = stack.pop()
        for key, value in source.items() if isinstance(source, dict) else enumerate(source):
            if isinstance(value, (dict, list)) or type(value) is tuple:
                kept: Any = [] if type(value) is tuple else type(value)()
                stack.append((value, kept, (*keys, key)))
            else:
                try:
                    _check_storable([value])
                except UnsupportedLeafError as error:
                    refused.append(
                        "/".join(map(str, (*keys[1:], key))) + str(error).removeprefix("0").partition(";")[0]
                    )
                    continue
                kept = value
            if isinstance(target, dict):
                target[key] = kept
            else:
                target.append(kept)
    return root[0], refused


def _check_storable(state: Any) -> None:
    """Raise UnsupportedLeafError for a value that cannot be stored, such as a sparse tensor."""
    for node in tree.flatten(state, is_array)[1]:
        read_leaf(node.value, node.path, in_memory=True)


def _nbytes(state: Any) -> int:
    """Return the bytes of all arrays, each once, after every page of them was read."""
    total = 0
    for spec, _, values in side_of(state).arrays.values():
        # Pages of a mapped file would otherwise count as memory of the first level.
        as_bytes(values())[::4096].max(initial=0)
        total += spec.nbytes
    return total


def _trials(states: Sequence[Any], function: Callable[[Any, str], float] | None) -> list[Trial]:
    from ..codec.named_presets import NAMED
    from ..kernels.backend import dispatch

    dispatch.compile_at_once()  # otherwise the first seconds would be those of kernels that are not compiled yet
    found = []
    others = packages()
    with stages_done(len(LEVELS) + len(others)) as begin:
        for name in LEVELS:
            begin(name)
            found.append(try_level(name, NAMED[name](), states[0], states[1] if len(states) > 1 else None, function))
        for name in others:
            begin(name)
            found.append(try_package(name, states[0]))
    return found


def _result(trial: Trial, default: Trial, sizes: Sequence[int]) -> dict[str, Any]:
    """Return a trial as `--json` shows it; None: not measured, or without such arrays."""
    moments = {row.path for row in default.rows if "moment" in row.why}
    of_moments = [trial.errors.get(path, 0.0) for path in moments]
    result = {
        "level": trial.name,
        "nbytes": trial.nbytes,
        "ratio": trial.ratio,
        "compress_seconds": trial.compress.seconds,
        "restore_seconds": trial.restore.seconds,
        "peak_nbytes": trial.compress.peak_nbytes,
        "weight_error": max((error for path, error in trial.errors.items() if path not in moments), default=0.0),
        "moment_error": max(of_moments, default=None),
    }
    if len(sizes) > 1:
        delta = trial.delta_nbytes
        result |= {"delta_nbytes": delta, "delta_ratio": None if delta is None else sizes[1] / delta}
    return result if default.metric is None else result | {"eval": trial.metric}


def _cells(result: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a row by their columns."""
    shown: dict[str, tuple[str, Callable[[Any], str]]] = {
        "level": ("level", str),
        "nbytes": (">size", size),
        "ratio": (">ratio", _ratio),
        "compress_seconds": (">compress", _seconds),
        "restore_seconds": (">restore", _seconds),
        "peak_nbytes": (">memory", size),
        "weight_error": (">weight L2", _error),
        "moment_error": (">moment L2", _error),
        "delta_nbytes": (">delta", size),
        "delta_ratio": (">delta ratio", _ratio),
        "eval": (">eval", lambda metric: f"{metric:#.6g}"),
    }
    missing = {"peak_nbytes": "n/a"}
    return {
        column: missing.get(key, _NONE) if result[key] is None else text(result[key])
        for key, (column, text) in shown.items()
        if key in result
    }


def _ratio(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def _error(value: float) -> str:
    return "exact" if value == 0 else "not finite" if not math.isfinite(value) else f"{value:#.2g}"


def _print_table(rows: Sequence[dict[str, str]], width: int) -> None:
    """Print rows as one table, or as several that fit the terminal.

    Each has the first column, and no rows without values.
    """
    first, *columns = rows[0]
    while columns:
        count, used = 0, max(len(row[first]) for row in rows)
        while count < len(columns):
            column = columns[count]
            used += 2 + max(len(column) - 1, *(len(row[column]) for row in rows))
            if used > width and count:
                break
            count += 1
        shown, columns = [first, *columns[:count]], columns[count:]
        cells = [[row[column] for column in shown] for row in rows]
        table(shown, [row for row in cells if set(row[1:]) != {_NONE}])
        if columns:
            line()


def _reason_cells(reasons: Sequence[Reason]) -> list[tuple[str, int, str]]:
    """Return the lines about exact arrays; the last one has what does not fit."""
    shown = list(reasons) if len(reasons) <= _LINES else list(reasons[: _LINES - 1])
    rest = reasons[len(shown) :]
    found = [(_percent(reason.share), reason.arrays, reason.why) for reason in shown]
    if rest:
        others = "; ".join(reason.why for reason in rest)
        found.append((_percent(sum(r.share for r in rest)), sum(r.arrays for r in rest), textwrap.shorten(others, 60)))
    return found


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= 0.0005 else "<0.1 %"


def _reasons(rows: Sequence[Row]) -> list[Reason]:
    """Return the reasons of exact arrays, those of the most bytes first.

    Args:
        rows: `summary()` at the default level.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row.measure == "exact" and row.raw_bytes:
            groups.setdefault(row.why.removeprefix("exact: "), []).append(row)
    raw = sum(row.raw_bytes for row in rows)
    found = [
        Reason(
            why,
            sum(row.raw_bytes for row in group) / raw,
            len(group),
            max(group, key=lambda row: row.raw_bytes).path,
            why in (NOTHING, UNMATCHED),
        )
        for why, group in groups.items()
    ]
    return sorted(found, key=lambda reason: -reason.share)


def _advice(lossless: Trial, default: Trial, exact: Sequence[Reason], sources: Sequence[Source]) -> list[str]:
    """Return paragraphs on levels that gain little, and on remedies.

    Args:
        lossless, default: results of these levels.
        exact: see `_reasons`.
        sources: the checkpoint, and perhaps a later one.
    """
    unknown = [reason for reason in exact if reason.is_unknown]
    share = sum(reason.share for reason in unknown)
    is_lossy = any(row.measure != "exact" for row in default.rows)
    found = []
    if not is_lossy:
        found.append(
            "Nothing is gained by the lossy levels: all arrays are exact, for the reasons above, and every level is "
            f"{lossless.ratio:.2f} x lossless."
        )
    elif lossless.nbytes < _LITTLE * default.nbytes:
        found.append(
            f"Little is gained by the default level: {default.ratio:.2f} x; lossless is {lossless.ratio:.2f} x."
        )
    elif share > _MUCH:
        found.append(f"More could be gained: nothing says what {share:.0%} of the bytes are.")
    if share > _MUCH:
        pattern = glob.escape(unknown[0].largest)
        is_matched = all(reason.why != UNMATCHED for reason in unknown)
        optimizer = "save the optimizer's state in the same checkpoint, or " if is_matched else ""
        found.append(
            "An array changes only where something names its kind, as an optimizer's entry does. If these are "
            f"trained weights, {optimizer}say so in Python: kinds=sp.kinds(model, optimizer), or a rule "
            f"for each, such as cfg=sp.Config([({pattern!r}, sp.Quantize())]). `shrinkpoint compress` takes such a "
            "configuration as --config FILE.json, which Config.to_json() writes."
        )
    if lossless.ratio < _LITTLE:
        found.append(f"Little is gained without loss: {lossless.ratio:.2f} x. The bytes of these arrays look random.")
    if default.delta_nbytes is not None and default.delta_nbytes > default.nbytes / _LITTLE:
        found.append("The delta is not smaller than a base: the two checkpoints are not near each other.")
    for source in sources:
        if source.refused:
            found.append(
                f"`compress` and `Store.save` refuse {source.path} until these values are plain ones; they are left "
                f"out here: {listed(source.refused, 3)}."
            )
    return found


def _calls(sources: Sequence[Source], level: str) -> dict[str, list[str]]:
    """Return the lines to paste, by their language.

    Args:
        sources: the checkpoint, and perhaps a later one.
        level: to be used.
    """
    source = sources[0]
    preset = "sp.Config()" if level == "default" else f"sp.presets.{level}()"
    if source.kind == "trainer":
        callback = f"trainer.add_callback(CompressCallback({preset}))"
        return {"Python": [_IMPORT, "from shrinkpoint.trainers.transformers import CompressCallback", callback]}
    if source.kind == "model":
        folder = str(source.path)
        return {"Python": [_IMPORT, f"sp.save_pretrained({folder!r}, {folder + '-small'!r}, cfg={preset})"]}
    found = {"Python": [_IMPORT, f'sp.Store("run", {preset}).save(step, state)']}
    if source.refused:
        return found
    words = [str(source.path), f"{source.path.stem}.spt"]
    if len(sources) > 1:
        with contextlib.suppress(BadArgumentError):  # the names do not give the steps
            steps_from_names([s.path for s in sources])
            words = [*(str(s.path) for s in sources), "run", "--step-from-name"]
    words = ["shrinkpoint", "compress", *words, "--preset", level.replace("_", "-")]
    return found | {"command line": [shlex.join(words)]}


def load_function(option: str, name: str) -> Callable[[Any, str], float]:
    """Import a function by its name, also from a module of the current folder.

    What the module and the function print goes to standard error.

    Args:
        option: of the command, for messages.
        name: "module:function".

    Returns:
        A function of a state and a description of it, which calls the user's function with the state.

    Raises:
        BadArgumentError: it does not exist, or its module cannot be imported. The returned function raises it if the
            user's function raises or does not return a number.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise BadArgumentError(f"{option} is {name!r}; it must be module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with _guarded(f"{option} {name}: the module {module_name} cannot be imported"):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        what = "has no function" if function is None else f"has {type(function).__name__}, not a function,"
        raise BadArgumentError(f"{option} {name}: {module.__name__} ({module.__file__}) {what} {function_name!r}")

    def evaluate(state: Any, what: str) -> float:
        with _guarded(f"{option} {name} failed on the state restored from {what}"):
            found = function(state)
        try:
            return float(found.detach() if hasattr(found, "detach") else found)
        except (TypeError, ValueError, RuntimeError):
            raise BadArgumentError(f"{option} {name} returned {type(found).__name__}; it must be a number") from None

    return evaluate


@contextlib.contextmanager
def _guarded(message: str) -> Iterator[None]:
    """Raise an error of the user's code as BadArgumentError that names its type and place."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        said = str(error).partition("\n")[0][:200]
        where = f" ({place.filename}, line {place.lineno})" if os.path.isfile(place.filename) else ""
        raise BadArgumentError(f"{message}: {type(error).__name__}{': ' * bool(said)}{said}{where}") from error
