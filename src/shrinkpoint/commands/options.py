"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there under the output's name.")]
Step = Annotated[str | None, typer.Option(help="Step or tag of a store; by default the newest one.")]
Parents = Annotated[
    list[Path] | None,
    typer.Option("--parent", help="A file of the chain that a delta file needs; say it once for each, in any order."),
]
StoreUrl = Annotated[str, typer.Argument(metavar="STORE", help="A folder or fsspec URL.")]
