"""The command line, `shrinkpoint COMMAND` or `python -m shrinkpoint COMMAND`.

Errors become one line without a traceback, and an exit code.
"""

from __future__ import annotations

import contextlib
import errno
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .commands import convert, diff, housekeeping, inspect, seal, try_levels, warm
from .commands.inputs import AsJson
from .commands.outputs import emit, note, printable
from .kernels.errors import BadArgumentError, ShrinkpointError, ShrinkpointWarning
from .report import report

WRONG, USAGE, FAULT = 1, 2, 70
"""Exit codes for damaged data or failing storage, for wrong usage, and for a fault of this program (`EX_SOFTWARE` of
sysexits.h); Ctrl-C gives 130."""

_MEANT = {
    "restore": "decompress extract unpack load export",
    "compress": "save encode pack import",
    "info": "show inspect summary",
    "ls": "list steps",
}
"""What users call commands."""


class Guarded(TyperGroup):
    """A group of commands whose errors become one line and an exit code."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names, with advice for the names of other tools."""
        for command, others in _MEANT.items():
            if args and args[0] in others.split():
                fail(f"there is no command {args[0]!r}; did you mean {command!r}?", USAGE)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            with plain_warnings():
                return super().invoke(ctx)
        except BadArgumentError as error:
            fail(str(error), USAGE)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of our output has closed it
            fail(_text_of(error), WRONG)
        except ShrinkpointError as error:
            fail(str(error), WRONG)
        except MemoryError:
            fail("this needs more memory than is available", WRONG)


def fail(message: str, code: int) -> None:
    """Print an error message and exit."""
    note(message)
    raise typer.Exit(code)


def _text_of(error: OSError) -> str:
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    text = error.strerror or str(error) or type(error).__name__
    # A save that fails notes that the steps before it are intact.
    return "; ".join([f"{' -> '.join(names)}: {text}" if names else text, *getattr(error, "__notes__", ())])


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Show warnings as one line without their place in the code."""

    def show(message: Warning | str, *_place: object, **_more: object) -> None:
        text = message.for_command_line() if isinstance(message, ShrinkpointWarning) else message
        print(f"shrinkpoint: warning: {printable(text)}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


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
    as_json: AsJson = False,
) -> None:
    """Train a small GPT, kill it, resume it, and compare it with a run that is never killed.

    It resumes from compressed checkpoints.

    It learns the source code of Python's standard library, on the CPU; the two runs take about two minutes on two
    cores, with --full about five.
    """
    from rich.console import Console

    from .demo import demo_config
    from .demo.run import run_demo

    config = demo_config(out, steps=steps, every=every, kills=kills, seed=seed, preset=preset, size=size, full=full)
    result = run_demo(config, Console(stderr=as_json))
    if as_json:
        emit(result)


@app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Measure this machine: `bench kernels`, `bench codec`; `bench --help` lists all benchmarks."""
    from .bench.__main__ import main as run

    raise typer.Exit(run(context.args))


app.command("try")(try_levels.try_levels)
_READING = (inspect.info, inspect.ls, inspect.verify, seal.seal, diff.diff)
_WRITING = (convert.compress, convert.restore, report, *housekeeping.COMMANDS, warm.warm)
for command in (*_READING, *_WRITING):
    # A metric may be negative, which looks like an option.
    app.command(context_settings={"ignore_unknown_options": command is housekeeping.rate})(command)


def main() -> None:
    """Run the command line."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        traceback.print_exc()
        note(
            f"this is a fault of shrinkpoint, the data is intact: {type(error).__name__}: {error}; "
            "please report it with the lines above"
        )
        sys.exit(FAULT)


if __name__ == "__main__":
    main()
