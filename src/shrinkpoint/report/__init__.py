"""`report`: write an HTML page about a run, from collected data and charts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..commands.inputs import AsJson, Force, is_store, open_store, parse_step
from ..commands.outputs import check_apart, check_free, note, result, size, steps_done, write_file


def report(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A store, or a folder with a store in it, as the demo writes.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
    step: Annotated[
        str | None, typer.Option(help="Step or tag whose histograms are shown; by default the newest intact one.")
    ] = None,
    search: Annotated[
        list[Path] | None, typer.Option("--search", help="JSON of SearchResult.to_json to show; repeatable.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a self-contained HTML page about a run.

    It shows size and ratio of each step, bytes by kind of array, errors, metric, restores, choices of codecs, and the
    histogram of any tensor with its codebook. The page loads no other file.
    """
    from .collect import collect
    from .page import page

    folder = Path(run)
    inside = folder / "store"
    url = str(inside) if not is_store(run) and is_store(str(inside)) else run
    check_apart(output, [url, *map(str, search or ())])
    check_free(output, force)
    store = open_store(url)
    with steps_done("report", quiet=as_json) as progress:
        found = collect(
            store,
            name=run,
            step=None if step is None else parse_step(step),
            searches=search or (),
            results=folder / "results.json" if url != run else None,
            progress=progress,
        )
    html = page(found)
    write_file(output, force, lambda path: path.write_text(html, encoding="utf-8"))
    for problem in found.problems:
        note(f"warning: {problem}")
    nbytes, tensors = len(html.encode()), len(found.tensors)
    result(
        as_json,
        f"{output}: {len(found.steps)} steps, {tensors} histograms, {size(nbytes)}",
        report=str(output),
        nbytes=nbytes,
        steps=[s.step for s in found.steps],
        all_steps=found.all_steps,
        tensors=tensors,
        all_tensors=found.all_tensors,
        problems=list(found.problems),
    )
