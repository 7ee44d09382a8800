"""Figures in the text of pages equal those of `bench/results`.

Tables between markers are compared elsewhere (`bench.evidence --check`); this is for what is written by hand around
them. Where a result changes, the assertion shows the sentence as it has to read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shrinkpoint.bench.evidence.levels import campaign
from shrinkpoint.bench.studies.harm.campaign import Effect
from shrinkpoint.bench.studies.harm.held_back import HELD_BACK

HOME = Path(__file__).parents[2]
RESULTS = HOME / "bench" / "results"


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def rows(pattern: str) -> list[dict[str, Any]]:
    return [row for path in sorted(RESULTS.glob(f"{pattern}.json")) for row in document(path.stem)["rows"]]


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


def levels_hold() -> Iterator[str]:
    def ends(level: str) -> list[tuple[str, Effect]]:
        """Return the held-back families with their ends, the one with the largest bound first."""
        found = [(name, one.loss) for name in HELD_BACK if (one := campaign().found(name, level)) and one.loss]
        return sorted(found, key=lambda pair: pair[1].bound or 0.0, reverse=True)

    def shown(end: Effect) -> str:
        return f"{end.mean:+.2f} +- {end.error:.2f} %"

    for level in ("exact_weights", "precise"):
        name, worst = ends(level)[0]
        yield f"`presets.{level}()` holds +1 % on all thirteen: the largest bound is {worst.bound:+.2f} % ({name})"
        assert (worst.bound or 2.0) <= 1.0
    above = [f"{name} ({shown(end)})" for name, end in ends("default") if (end.bound or 1.0) > 0.8]
    yield f"`Config()` holds +0.8 % by its bound on all but {'; '.join(above)}"
    above = [f"{name} ({shown(end)})" for name, end in ends("compact") if (end.bound or 3.0) > 2.0]
    yield f"`presets.compact()` holds +2 % by its bound on all but {'; '.join(above)}"
    for level, limit in (("exact_weights", 3.3), ("precise", 7.5)):
        small = {name: one.ratio for name in HELD_BACK if (one := campaign().found(name, level)) and one.ratio < limit}
        listed = "; ".join(f"{name} {small[name]:.1f} x" for name in sorted(small, key=small.__getitem__))
        yield f"{level} stays below {limit:g} times on {listed}"


def spread(values: list[float], digits: int = 3) -> str:
    return f"{min(values):.{digits}g} to {max(values):.{digits}g}"


def papers() -> Iterator[str]:
    found = {row["row"]: row["value"] for row in rows("systems*")}

    def shown(experiment: str, what: str) -> str:
        return f"{found[f'{experiment}: {what}']:.3g}"

    steps = partial(shown, "BitSnap ratio by iterations")
    apart, slow = "{} iterations from the base", "{} iterations from the base, learning rate / 100"
    yield (
        f"| {steps(apart.format(1))} x after one step, {steps(apart.format(10))} x after ten; "
        f"{steps(slow.format(1))} x and {steps(slow.format(10))} x at a hundredth of the learning rate |"
    )
    for bits, said in ((2, "{} x with 2 bits"), (3, "{} x with 3")):
        sizes = [
            100 / v for k, v in found.items() if k.startswith("LC-Checkpoint sizes") and f"{bits} bits, E+P+H" in k
        ]
        yield said.format(spread(sizes))
    whole = [
        shown("Check-N-Run policies", f"2 bits, intermittent: {w} over full float32 checkpoints") for w in _REDUCED
    ]
    yield f"| {whole[0]} x, {whole[1]} x |"
    marks = [shown("Check-N-Run row tracker", f"of a step{what}") for what in ("", ", sparse gradients")]
    yield f"The tracker takes {marks[0]} % of a step with dense and {marks[1]} % with sparse gradients"
    for bits, count, said in ((3, 3, "3 bits after 3 restores ({:.2f} %)"), (4, 20, "4 bits after 20 ({:.2f} %)")):
        yield said.format(found[f"Check-N-Run restores: {bits} bits, {count} restores, accuracy lost"])
    coders = [
        100 * (1 - found[f"{place}, rearranged, overall"] / found[f"{place}, ours, overall"])
        for place in (f"Inshrinkerator delta coder: {model}, {p}" for model in ("CNN", "GPT") for p in _CODEBOOKS)
    ]
    yield f"saves {spread(coders, 2)} % of the rearrangement's bytes"
    errors = "BitSnap error of the moments: {}, {}, {}"
    naive = {
        (moment, measure): found[errors.format(moment, measure, "naive 8-bit")]
        / found[errors.format(moment, measure, "BitSnap")]
        for moment in ("exp_avg", "exp_avg_sq")
        for measure in ("MSE", "MRE")
    }
    for measure, said in (("MSE", "{:.0f} and {:.0f} times smaller"), ("MRE", "{:.0f} and {:.0f} times larger here")):
        yield said.format(*(naive[moment, measure] for moment in ("exp_avg", "exp_avg_sq")))
    for moment in ("exp_avg", "exp_avg_sq"):
        scale = [v for k, v in found.items() if k.startswith("BitSnap error") and f": {moment}, MRE" in k]
        yield spread([v for v in scale if v != found[errors.format(moment, "MRE", "naive 8-bit")]], 2)
    for threshold, said in (("0.1", "need {} times as many at 0.1 %"), ("1", "and {} times at 1 %")):
        systems = ("uniform", "Inshrinkerator")
        places = [f"Inshrinkerator spaces on {model}: {threshold} % degradation" for model in _NO_EMBEDDINGS]
        pairs = [[found[f"{place}, {system}"] for system in systems] for place in places]
        yield said.format(spread([uniform / ours for uniform, ours in pairs], 2))


def items() -> Iterator[str]:
    found = {row["row"]: row["value"] for row in rows("systems*")}
    overhead = found["LC-Checkpoint overhead: matrix factorization, 3 bits, a save each iteration"]
    yield f"systems: LC-Checkpoint overhead | done: {overhead:.1f} %, {'met' if overhead <= 4 else 'missed'} |"
    failure = found[
        "LC-Checkpoint cost of a failure: extra iterations to the same loss, LC-Checkpoint, 3 bits, each iteration"
    ]
    yield f"systems: cost of a failure | done: {failure:.1f} iterations, published 1 |"
    whole, most = (
        found[f"LC-Checkpoint exponents: differences of one iteration of the last convolution, buckets of {share}"]
        for share in ("100%", "99%")
    )
    yield f"done on LeNet: {whole:.0f} buckets, {most:.0f} of them hold 99 % of a difference"
    yield f"grow to {found['Check-N-Run policies: one_shot: largest difference']:.0f} % of a full checkpoint"
    yield f"done: {found['Check-N-Run policies: intermittent: first full one again']:.0f}th interval, published 8th"
    peaks = [
        row["value"]
        for row in rows("training-table-5-*")
        if ", Inshrinkerator, " in row["row"] and row["row"].endswith("weights, smallest checkpoint")
    ]
    yield f"done: peaks of {min(peaks):.0f} (ViT) to {max(peaks):.0f} times"


_REDUCED = ("bandwidth", "capacity")
_CODEBOOKS = ("codebook refit", "codebook frozen")
_NO_EMBEDDINGS = ("GPT", "CNN", "MLP", "ViT")


CLAIMS: dict[str, tuple[Callable[[], Iterator[str]], ...]] = {
    "README.md": (headline,),
    "docs/alternatives.md": (alternatives,),
    "docs/choosing.md": (levels_hold,),
    "docs/recovery.md": (crashes,),
    "docs/systems.md": (papers,),
    "bench/studies/systems/items.md": (items,),
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
