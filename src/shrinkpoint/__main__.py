"""The command line, `shrinkpoint COMMAND` or `python -m shrinkpoint COMMAND`."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from .commands import convert, diff, housekeeping, inspect, report, seal, try_levels, warm
from .commands.exit_codes import FAULT, Guarded, fault

app = typer.Typer(
    name="shrinkpoint",
    help="Compressed training checkpoints.",
    epilog="Exit codes: 0 success, 1 damaged data or failing storage, 2 wrong usage, 70 a fault of shrinkpoint, "
    "130 interrupted.",
    cls=Guarded,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"shrinkpoint {version('shrinkpoint')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    steps: Annotated[
        int | None, typer.Option(help="Training steps of each run; the default depends on --size.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the checkpoints, the results and the picture.")] = Path(
        "demo-out"
    ),
    preset: Annotated[str, typer.Option(help="How to compress: default, inshrinkerator, ...")] = "default",
    kills: Annotated[
        int, typer.Option(help="Number of times the trainer is killed, once in the middle of a save.")
    ] = 2,
    every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; by default about 25 checkpoints are saved.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the model, the order of the data and the times of the kills.")] = 0,
    size: Annotated[str, typer.Option(help="Size of the model: small, or tiny for a quick look.")] = "small",
    full: Annotated[
        bool, typer.Option("--full", help="Train three times as long, as for the committed picture.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON; progress goes to standard error.")
    ] = False,
) -> None:
    """Train a small GPT, kill it, resume it, and compare it with a run that is never killed.

    It resumes from compressed checkpoints.

    It learns the source code of Python's standard library, on the CPU; the two runs take about two minutes on two
    cores, with --full about five.
    """
    from rich.console import Console

    from .demo.config import demo_config
    from .demo.run import run_demo

    config = demo_config(out, steps=steps, every=every, kills=kills, seed=seed, preset=preset, size=size, full=full)
    result = run_demo(config, Console(stderr=as_json))
    if as_json:
        import json

        typer.echo(json.dumps(result))


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Measure this machine: `bench kernels`, `bench codec`; `bench --help` lists all benchmarks."""
    from .bench.__main__ import main as run

    raise typer.Exit(run(context.args))


app.command("try")(try_levels.try_levels)
for command in (
    inspect.info,
    inspect.ls,
    inspect.verify,
    seal.seal,
    diff.diff,
    convert.compress,
    convert.restore,
    report.report,
    housekeeping.compact,
    housekeeping.gc,
    housekeeping.drop,
    housekeeping.pin,
    housekeeping.unpin,
    housekeeping.tag,
    housekeeping.untag,
    housekeeping.rate,
    housekeeping.copy,
    warm.warm,
):
    # A metric may be negative, which looks like an option.
    app.command(context_settings={"ignore_unknown_options": command is housekeeping.rate})(command)


def main() -> None:
    """Run the command line; see `commands.exit_codes` for its exit codes."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        traceback.print_exc()
        typer.echo(f"shrinkpoint: {fault(error)}", err=True)
        sys.exit(FAULT)


if __name__ == "__main__":
    main()
