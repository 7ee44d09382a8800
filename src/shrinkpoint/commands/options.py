"""Options that several commands have, and groups of options of one command."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing output.")]
Step = Annotated[str | None, typer.Option(help="Step or tag of a store; by default the newest intact step.")]
Parents = Annotated[
    list[Path] | None,
    typer.Option("--parent", help="A file of the chain that a delta file needs; repeatable, in any order."),
]
StoreUrl = Annotated[str, typer.Argument(metavar="STORE", help="A folder or fsspec URL.")]


@dataclasses.dataclass(frozen=True, slots=True)
class Coding:
    """The options that choose a configuration."""

    preset: Annotated[
        str | None,
        typer.Option(
            help="default, lossless, exact-weights, precise, compact, inshrinkerator, lc-checkpoint, check-n-run or "
            "bitsnap."
        ),
    ] = None
    rate: Annotated[float | None, typer.Option(help="Lambda of the rate-distortion encoder, 0 or more.")] = None
    max_rel_error: Annotated[
        float | None, typer.Option(help="Relative L2 error that no array may exceed, between 0 and 1.")
    ] = None
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="A configuration as Config.to_json writes it.")
    ] = None


@dataclasses.dataclass(frozen=True, slots=True)
class InStore:
    """The options of a checkpoint that is saved to a store."""

    step: Annotated[int | None, typer.Option(help="The step in the store; required for a store.")] = None
    step_from_name: Annotated[
        bool,
        typer.Option(
            "--step-from-name", help="For a store: take the steps from the names, and save the sources in that order."
        ),
    ] = False
    against: Annotated[
        str | None,
        typer.Option(help="For a store: step or tag to store a delta against; by default the newest intact one."),
    ] = None
    base: Annotated[bool, typer.Option("--base", help="For a store: store a base, not a delta.")] = False
    metric: Annotated[float | None, typer.Option(help="For a store: the quality of the model.")] = None


def grouped(function: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a dataclass of options by its fields, as Typer needs them.

    Args:
        function: a command; its groups are keyword parameters without defaults.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    shown: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in groups:
            shown.append(parameter.replace(annotation=hints[name], kind=parameter.KEYWORD_ONLY))
            continue
        types = get_type_hints(groups[name], include_extras=True)
        shown += [
            inspect.Parameter(f.name, parameter.KEYWORD_ONLY, default=f.default, annotation=types[f.name])
            for f in dataclasses.fields(groups[name])
        ]

    def make(kind: Any, values: dict[str, Any]) -> Any:
        return kind(**{f.name: values.pop(f.name) for f in dataclasses.fields(kind)})

    @functools.wraps(function)
    def command(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = make(kind, values)
        function(**values)

    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in shown}
    del command.__wrapped__  # inspect would use its signature
    return command
