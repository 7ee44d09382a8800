"""The command: `python -m bench NAME [--quick] [--json FILE] [--plot FILE]`, also `shrinkpoint bench NAME`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console

from shrinkpoint.kernels.errors import ShrinkpointError

from . import machine
from .harness import Options, is_red
from .table import show

BENCHMARKS = ("kernels", "codec", "ratio", "search", "store", "saver", "systems", "trainers", "training")
"""Each is a module here with `TITLE`, `run(options) -> rows` and `plot(rows, path)`."""


def result(rows: Sequence[Any]) -> dict[str, Any]:
    """The JSON document of a run."""
    return {
        "machine": machine.machine(),
        "versions": machine.versions(),
        "commit": machine.commit(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark: 0, or 1 if a correctness check failed, or 2 for wrong usage."""
    asked = _parser().parse_args(sys.argv[1:] if arguments is None else list(arguments) or ["--help"])
    console = Console(stderr=True)
    module = import_module(f".{asked.name}", __package__)

    def say(what: str) -> None:
        if console.is_terminal:
            console.print(f"[dim]{what}[/dim]")

    options = Options(asked.quick, asked.large, asked.state, asked.only, say=say)
    try:
        rows = module.run(options)
        if asked.json is not None:
            asked.json.write_text(json.dumps(result(rows), indent=1) + "\n", encoding="utf-8")
        show(rows, module.TITLE, Console())
        if asked.plot is not None:
            module.plot(rows, asked.plot)
    except (ShrinkpointError, OSError) as error:
        console.print(f"bench: {error}", markup=False, style="red")
        return 2
    return 1 if any(is_red(row) for row in rows) else 0


def _parser() -> argparse.ArgumentParser:
    titles = "\n".join(f"  {name:<10} {import_module(f'.{name}', __package__).TITLE}" for name in BENCHMARKS)
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Measure this machine. Nothing is timed before its result has been checked.",
        epilog=f"benchmarks:\n{titles}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", choices=BENCHMARKS, help=f"one of {', '.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="small sizes, within 30 seconds")
    parser.add_argument("--large", action="store_true", help="sizes up to 1e9 elements too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (needs Matplotlib)")
    parser.add_argument(
        "--state", type=Path, metavar="PATH", help="real checkpoints: a demo folder, a store, a .pt file"
    )
    parser.add_argument("--only", metavar="WORDS", help="only rows whose name has one of these words, comma separated")
    return parser


if __name__ == "__main__":
    sys.exit(main())
