"""Options that several commands have, and the configuration that options choose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..codec.errors import BadArgumentError
from ..codec.format.bounded_json import loads
from ..demo.config import presets
from .output import nearest

if TYPE_CHECKING:
    from ..codec.config import Config

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
Step = Annotated[str | None, typer.Option(help="Step or tag of a store; by default the newest intact step.")]
Parents = Annotated[
    list[Path] | None,
    typer.Option("--parent", help="A file of the chain that a delta file needs; repeatable, in any order."),
]
StoreUrl = Annotated[str, typer.Argument(metavar="STORE", help="A folder or fsspec URL.")]


def config(
    preset: str | None, file: Path | None, rate: float | None = None, max_rel_error: float | None = None
) -> Config:
    """Return the configuration that the options of a command choose.

    Args:
        preset: a name of `demo.config.presets`; None: the configuration in `file`, else "default".
        file: JSON of `Config.to_json`, or None.
        rate: replaces the rate of the configuration, unless None.
        max_rel_error: replaces the error limit of the configuration, unless None.

    Raises:
        BadArgumentError: both a preset and a file; an unknown preset; a file that is not a configuration; out of range.
        OSError: the file cannot be read.
    """
    if preset is not None and file is not None:
        raise BadArgumentError("--preset and --config are both given; use one of them")
    if file is not None:
        found = _read(file)
    else:
        known = presets()
        if (preset or "default") not in known:
            near = nearest(str(preset), known)
            raise BadArgumentError(f"--preset is {preset!r}; it must be one of {', '.join(known)}{near}")
        found = known[preset or "default"]()
    return replace(
        found,
        max_rel_error=found.max_rel_error if max_rel_error is None else max_rel_error,
        rate=found.rate if rate is None else rate,
    )


def _read(file: Path) -> Config:
    from ..codec.config import Config

    try:
        data = loads(file.read_bytes())
    except ValueError as error:
        raise BadArgumentError(f"{file}: not JSON: {str(error)[:200]}") from None
    try:
        return Config.from_json(data)
    except BadArgumentError as error:
        raise BadArgumentError(f"{file}: {error}") from None
