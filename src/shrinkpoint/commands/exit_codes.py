"""Exit codes of the command line, and errors as one line without a traceback."""

from __future__ import annotations

import contextlib
import errno
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

from ..kernels.errors import BadArgumentError, ShrinkpointError, ShrinkpointWarning
from .output import printable

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
    typer.echo(f"shrinkpoint: {printable(message)}", err=True)
    raise typer.Exit(code)


def fault(error: Exception) -> str:
    """Return the message for an error that no command expects."""
    return (
        f"this is a fault of shrinkpoint, the data is intact: {printable(f'{type(error).__name__}: {error}')}; "
        "please report it with the lines above"
    )


def _text_of(error: OSError) -> str:
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    text = error.strerror or str(error) or type(error).__name__
    # A save that fails notes that the steps before it are intact.
    return "; ".join([f"{' -> '.join(names)}: {text}" if names else text, *getattr(error, "__notes__", ())])


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Show warnings as one line without their place in the code."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = message.for_command_line() if isinstance(message, ShrinkpointWarning) else message
        print(f"shrinkpoint: warning: {printable(text)}", file=file or sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
