"""Figures in the text of pages equal those of `bench/results`.

Tables between markers are compared elsewhere (`bench.evidence --check`); this is for what is written by hand around
them. Where a result changes, the assertion shows the sentence as it has to read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shrinkpoint.bench.studies import endurance

HOME = Path(__file__).parents[2]
RESULTS = HOME / "bench" / "results"


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def rows(pattern: str) -> list[dict[str, Any]]:
    return [row for path in sorted(RESULTS.glob(f"{pattern}.json")) for row in document(path.stem)["rows"]]


TRAINED = endurance.table(rows("training*"))
"""Model -> system -> column -> row, of trainings with ten failures."""
END, WHOLE = "degradation at the end", "whole state, all checkpoints"
FINER = "rate 0.02, 10 bins, finer moments, bases every 100"


def of(model: str, system: str, column: str) -> float:
    value = TRAINED[model][system][column]["value"]
    assert isinstance(value, float), (model, system, column)
    return value


def seeds(model: str, system: str) -> tuple[float, float]:
    """Return the least and greatest degradation over the seeds."""
    return endurance.interval(TRAINED[model][system][END])


def alternatives() -> Iterator[str]:
    flips = [row for row in rows("store") if row["row"].startswith("flipped bits")]
    of_all = flips[0]["size"]
    counts = {row["peer"]: row["peer_value"] for row in flips}
    for mode in ("default", "lossless"):
        yield f"| **shrinkpoint**, {mode} |"
    yield f"| yes | yes | {flips[0]['value']:.0f} of {of_all} | yes | yes, a process | through DCP |"
    yield f"| yes | {flips[0]['value']:.0f} of {of_all} | yes | yes | through DCP |"
    yield f"| torch.save | 1 x | nothing | no | no | {counts['torch.save']:.0f} of {of_all} |"
    yield f"| safetensors | 1 x | nothing | no | no | {counts['safetensors']:.0f} of {of_all} |"
    yield f"| metadata written last | {counts['DCP']:.0f} of {of_all} |"
    exact = {
        row["row"].rpartition(", ")[2]: row["peer_value"]
        for row in rows("systems")
        if row["row"].startswith("lossless ratio: float32") and row["peer"] == "moonclip"
    }
    yield (
        f"| moonclip | weights: {exact['single']:.2f} x | nothing, or a smaller dtype | yes; weights: "
        f"{exact['10 steps apart']:.2f} x |"
    )


def often_killed() -> Iterator[str]:
    models = ("MLP", "embedding", "GPT")
    losses, whole = ([of(model, FINER, what) for model in models] for what in (END, WHOLE))
    yield (
        f"MLP, embedding model and GPT, ten kills in 900 steps, ended at most {max(losses):.1f} % worse, "
        f"{min(whole):.0f} to {max(whole):.0f} times smaller on the whole state"
    )
    yield (
        f"A CNN ended {of('CNN', FINER, END):.1f} % worse, a GPT of 10.7 M parameters (one seed) "
        f"{of('GPT wider', FINER, END):.1f} %, the ViT, which still learns fast when its schedule ends, "
        f"{of('ViT', FINER, END):.0f} %"
    )


def crashes() -> Iterator[str]:
    found = document("crash")
    told, killed = found["injections"], found["random_kills"]["trials"]
    assert told["planned"] == told["confirmed_by_strace"]
    assert not told["wrong"]
    assert not found["failures"]
    yield (
        f"Of {told['planned']} system calls at which processes were killed or got ENOSPC or EIO, and {killed} kills "
        "at random moments, none lost a step"
    )


def headline() -> Iterator[str]:
    sizes = {row["row"]: row["value"] for row in rows("overview") if row["row"].endswith(": size")}
    least = sizes["torch.save: size"] / sizes["exact_weights: size"]
    yield f"that are {least:.0f} to {document('demo')['ratio']['whole']:.0f} times smaller"
    lines = (RESULTS / "harm.jsonl").read_text(encoding="utf-8").splitlines()
    bits = [row["bits"] for row in map(json.loads, lines) if row["what"] == "resumed" and row["setting"] == "default"]
    base, delta = (sorted(3 * 32 / sum(one[part].values()) for one in bits) for part in ("base", "delta"))
    yield (
        f"a *base* becomes {base[0]:.0f} to {base[-1]:.0f} times smaller, a *delta* {delta[0]:.0f} to {delta[-1]:.0f}"
    )
    chains = sorted(
        row["value"] for row in rows("ratio-*") if row["row"].endswith(", default: whole state, chain with its bases")
    )
    yield f"with late deltas, four models have chains that are {chains[0]:.0f} to {chains[-1]:.0f} times smaller"
    memory = [row["value"] for row in rows("saver") if row["row"] == "memory of the worker"]
    assert 0.4 < min(memory) <= max(memory) < 0.68  # "half to two thirds of the state"


CLAIMS: dict[str, tuple[Callable[[], Iterator[str]], ...]] = {
    "README.md": (headline,),
    "docs/alternatives.md": (alternatives,),
    "docs/advanced.md": (often_killed,),
    "docs/recovery.md": (crashes,),
}


@pytest.mark.parametrize(
    ("page", "claim"), [pytest.param(p, c, id=f"{p}: {c.__name__}") for p, of_page in CLAIMS.items() for c in of_page]
)
def test_figures_in_words_are_those_of_the_results(page: str, claim: Callable[[], Iterator[str]]) -> None:
    text = " ".join((HOME / page).read_text(encoding="utf-8").split())
    lacking = [said for said in claim() if said not in text]
    assert not lacking, "\n".join([f"{page} has to say:", *lacking])


# ------------------------------------------------------------------------------------------------------------ scaling


def llama() -> tuple[dict[int, list[int]], str]:
    """Return the table of docs/scaling.md by ranks, and the page's text."""
    text = (HOME / "docs" / "scaling.md").read_text(encoding="utf-8")
    lines = re.findall(
        r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,*-]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", text, re.MULTILINE
    )
    cells = [[int(cell.strip("*").replace(",", "") or -1) if cell != "-" else -1 for cell in line] for line in lines]
    return {line[0]: line[1:] for line in cells}, " ".join(text.split())


def test_computed_figures_of_a_thousand_ranks() -> None:
    table, text = llama()
    assert list(table) == [1, 2, 4, 16, 64, 256, 1000]
    torch = {ranks: cells[1] for ranks, cells in table.items()}
    a_rank = (torch[64] - torch[16]) / 48
    assert torch[1000] == round(torch[64] + 936 * a_rank, -6)
    assert f"*{torch[1000]:,}*" in text
    _, _, results, theirs, plan = table[1000]
    assert (
        f"receives {plan * 1000 / 1e9:.2f} GB of plans and {results * 1000 / 1e9:.2f} GB of results (torch's writer: "
        f"{theirs * 1000 / 1e9:.2f} GB)"
    ) in text
    assert f"writes {table[1000][0] / 1e6:.1f} MB" in text


def test_counted_figures_follow_the_formulas() -> None:
    """Counted metadata bytes follow the page's formulas, for this package and for torch."""
    table, text = llama()
    entries, layouts, chain = 2892, 6, 20
    assert f"E = {entries:,} entries, chains of C = {chain} containers" in text
    predicted = 26 * layouts + 100 + 41 * chain
    assert f"26 L + 100 + 41 C = {predicted:,} bytes (L = {layouts})" in text
    for few, many in ((1, 16), (16, 64), (64, 256), (256, 1000)):
        assert (table[many][0] - table[few][0]) / (many - few) == pytest.approx(predicted, rel=0.05)
    assert (table[64][1] - table[16][1]) / 48 == pytest.approx(140 * 3 * 723, rel=0.05)
    rows_of_a_rank = math.ceil(1024 / 1000)
    assert f"still has {rows_of_a_rank * 8192:,} weights" in text
