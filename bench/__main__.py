"""The command `python -m bench NAME [--quick] [--json FILE] [--plot FILE]`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shlex
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from shrinkpoint.codec.plan import UnknownArraysWarning
from shrinkpoint.kernels.backend import dispatch
from shrinkpoint.kernels.errors import BadArgumentError, ShrinkpointError

from . import machine
from .harness import Options, Row, is_red
from .plot import plot, pyplot
from .table import show

BENCHMARKS = ("kernels", "gpu", "codec", "store", "saver", "sync", "trainers")
"""Each is a module here with `TITLE`, `run(options) -> rows`, and `plot(rows, path)` if it has a picture of its own."""
_STUDIES = ("harm", "optimizers", "overview", "ratio", "real", "scale", "search", "systems", "training")
STUDIES = _STUDIES if find_spec(".studies", __package__) else ()
"""The same under `studies/`, which is in a checkout but not in the wheel."""

NAMES = (*BENCHMARKS, *STUDIES)

RESUMED = ("gpu",)
"""Benches that take `--minutes`, keep rows in `--json` as they are measured, and go on from them."""


def _module(name: str) -> Any:
    """Import a bench by its name."""
    return import_module(f".studies.{name}" if name in STUDIES else f".{name}", __package__)


def about(arguments: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the head of a JSON document: machine, versions, commit, and the command.

    Args:
        arguments: of the command line; None: without a command line.
    """
    found = {"machine": machine.machine(), "versions": machine.versions(), "commit": machine.commit()}
    return found if arguments is None else found | {"run": dict(arguments)}


def result(rows: Sequence[Any], head: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Build the JSON document of a run.

    Args:
        rows: its rows.
        head: `about` when it began; None: now, without a command line.
    """
    return {**(about() if head is None else head), "rows": [dataclasses.asdict(row) for row in rows]}


def asked_for(asked: argparse.Namespace) -> dict[str, Any]:
    """Return the command line of a run without the paths of this machine.

    Example:
        >>> asked_for(_parser().parse_args(["codec", "--only", "many small", "--json", "x"]))["command"]
        "python -m bench codec --only 'many small'"
    """
    words = ["python", "-m", "bench", asked.name]
    words += ["--quick"] if asked.quick else []
    for flag, value in (("minutes", asked.minutes), ("only", asked.only)):
        words += [] if value is None else [f"--{flag}", str(value)]
    return {"command": shlex.join(words), "only": asked.only, "quick": asked.quick}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark.

    Returns:
        0; 1 if a correctness check failed; 2 for wrong usage (as `--only` without rows), or where something that a
        user can mend went wrong; 130 if it was interrupted.
    """
    asked = _parser().parse_args(sys.argv[1:] if arguments is None else list(arguments) or ["--help"])
    console = Console(stderr=True)
    dispatch.compile_at_once()
    warnings.simplefilter("error", UnknownArraysWarning)  # a figure of exact arrays would not be what its row says
    module = _module(asked.name)

    def say(what: str) -> None:
        if console.is_terminal:
            console.print(f"[dim]{what}[/dim]")

    options = Options(asked.quick, asked.only, say=say)
    stopped: BaseException | None = None
    try:
        _check(asked)
        head = about(asked_for(asked))
        if asked.name in RESUMED and asked.json is not None:
            options = _resumed(options, asked, head)
    except (ShrinkpointError, OSError) as error:
        console.print(f"bench: {error}", markup=False, style="red")
        return 2
    try:
        rows = module.run(options)
        if options.strange() or (options.only is not None and not rows):
            _say_names(console, options)
    except (KeyboardInterrupt, Exception) as error:
        stopped, rows = error, list(options.measured)
        head["stopped"] = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
    seeds = sorted(options.seeds) or list(range(getattr(module, "SEEDS", 0)))
    head["run"] |= {"seeds": seeds or None}
    try:
        if rows:
            _write(asked, module, options, rows, head)
    except (ShrinkpointError, OSError) as error:
        stopped = stopped or error
    if stopped is not None:
        return _stop(console, stopped, rows)
    if not rows:
        return 2
    if any(is_red(row) for row in rows):
        return 1
    return 2 if options.strange() else 0


def _resumed(options: Options, asked: argparse.Namespace, head: Mapping[str, Any]) -> Options:
    """Options with the measured rows of the JSON file, which is written after every case."""
    earlier: dict[tuple[str, str, int], list[Row]] = {}
    if asked.json.exists():
        for fields in json.loads(asked.json.read_text(encoding="utf-8"))["rows"]:
            row = Row(**fields)
            if row.value is not None:
                earlier.setdefault((row.row, row.device, row.size), []).append(row)

    def keep(rows: Sequence[Row]) -> None:
        asked.json.write_text(json.dumps(result(rows, head), indent=1) + "\n", encoding="utf-8")

    until = math.inf if asked.minutes is None else time.monotonic() + 60 * asked.minutes
    return dataclasses.replace(options, earlier=earlier, keep=keep, until=until)


def _write(asked: argparse.Namespace, module: Any, options: Options, rows: list[Row], head: Mapping[str, Any]) -> None:
    """Print the table, which cannot fail, and then write the files."""
    show(rows, module.TITLE, Console())
    if asked.json is not None:
        document = result(rows, head) | options.kept
        asked.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if asked.plot is not None:
        getattr(module, "plot", plot)(rows, asked.plot)


def _stop(console: Console, error: BaseException, rows: Sequence[Row]) -> int:
    """Print why a run ended early; raise exceptions that are not expected here."""
    if isinstance(error, KeyboardInterrupt):
        console.print(f"bench: interrupted; {len(rows)} rows were measured", markup=False, style="red")
        return 130
    if not isinstance(error, ShrinkpointError | OSError):
        raise error
    console.print(f"bench: {error}", markup=False, style="red")
    return 2


def _check(asked: argparse.Namespace) -> None:
    """Check arguments and files before minutes are spent on measuring.

    Raises:
        BadArgumentError: they cannot, or this bench does not use an argument.
    """
    for flag, path in (("--json", asked.json), ("--plot", asked.plot)):
        if path is None:
            continue
        folder = path.resolve().parent
        if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            why = "is a folder" if path.is_dir() else "no such folder" if not folder.is_dir() else "may not be written"
            raise BadArgumentError(f"{flag} {path}: {why}")
    if asked.plot is not None:
        pyplot()
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        kinds = FigureCanvasAgg.get_supported_filetypes()
        if asked.plot.suffix.removeprefix(".") not in kinds:
            raise BadArgumentError(f"--plot {asked.plot}: its name must end in one of {', '.join(sorted(kinds))}")
    if asked.minutes is not None:
        if asked.name not in RESUMED:
            raise BadArgumentError(f"--minutes: bench {asked.name} has no limit of time; {', '.join(RESUMED)} does")
        if not 0 < asked.minutes < math.inf:
            raise BadArgumentError(f"--minutes {asked.minutes:g}: it must be more than 0, and finite")


def _say_names(console: Console, options: Options) -> None:
    """Print the row names that `--only` can select, when it selects none."""
    nothing = ", ".join(repr(word) for word in options.strange()) or repr(options.only)
    quick = " with --quick" if options.quick else ""
    console.print(
        f"bench: --only: no row for {nothing}{quick}; a word of it can be a part of:", markup=False, style="red"
    )
    for name in options.names:
        console.print(f"  {name}", markup=False, highlight=False, soft_wrap=True)


def _known(name: str) -> str:
    """Return the name of a bench if it exists.

    Raises:
        ArgumentTypeError: the name is unknown here.
    """
    if name in NAMES:
        return name
    where = "" if STUDIES else f"; studies ({', '.join(_STUDIES)}) are in bench/studies of a checkout of the repository"
    raise argparse.ArgumentTypeError(f"{name!r} is unknown; one of {', '.join(NAMES)}{where}")


def _parser() -> argparse.ArgumentParser:
    titles = "\n".join(f"  {name:<10} {_module(name).TITLE}" for name in NAMES)
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Measure this machine. Nothing is timed before its result has been checked.",
        epilog=f"benchmarks:\n{titles}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", type=_known, help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, within 30 seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (needs Matplotlib)")
    parser.add_argument("--minutes", type=float, metavar="N", help="gpu: how long what needs a GPU may take")
    parser.add_argument("--only", metavar="WORDS", help="only rows whose name has one of these words, comma separated")
    return parser


if __name__ == "__main__":
    sys.exit(main())
