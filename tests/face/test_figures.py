"""Figures in the pages' own words are those of `bench/results`: each sentence is made from the JSON and looked for.

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

from shrinkpoint.bench import training

HOME = Path(__file__).parents[2]
RESULTS = HOME / "bench" / "results"
Columns = dict[str, dict[str, Any]]


def document(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def rows(pattern: str) -> list[dict[str, Any]]:
    return [row for path in sorted(RESULTS.glob(f"{pattern}.json")) for row in document(path.stem)["rows"]]


TRAINED = training.table(rows("training*"))
"""Model -> system -> column -> row, of trainings with ten failures."""
END, WEIGHTS, WHOLE = "degradation at the end", "weights, all checkpoints", "whole state, all checkpoints"
HIGH = "rate 0.01, 12 bins, bases every 100"
SIXTEEN = "rate 0.002, 16 bins"
LOW = "rate 0.004, 12 bins, bases every 100"
TEN, TWELVE = (f"rate 0.02, {bins} bins, first moments 1.25, bases every 100" for bins in (10, 12))
FINER = "rate 0.02, 10 bins, finer moments, bases every 100"
QUARTER = "rate 0.005, 10 bins, finer moments, bases every 100"


def of(model: str, system: str, column: str) -> float:
    value = TRAINED[model][system][column]["value"]
    assert isinstance(value, float), (model, system, column)
    return value


def seeds(model: str, system: str) -> tuple[float, float]:
    """Least and greatest degradation over the seeds."""
    return training.interval(TRAINED[model][system][END])


def demo() -> Iterator[str]:
    found = document("demo")
    held_out, once = found["held_out"], [probe["change_percent"] for probe in found["one_restore"]]
    yield (
        f"Held-out loss at the end {held_out['run']:.4f} against {held_out['baseline']:.4f} without compression and "
        f"kills ({held_out['change_percent']:+.2f} %)"
    )
    yield (
        f"one restore late in the run changes it by {found['one_restore_change_percent']:+.2f} % "
        f"({min(once):+.2f} ... {max(once):+.2f})"
    )
    trained = [row["size"] for row in rows("training*") if END in row["row"] and row["value"] is not None]
    most = max(found["parameters"], *trained)
    yield f"the largest training behind a loss on this page has {most / 1e6:.1f} M parameters"


def headline() -> Iterator[str]:
    """The default's least and greatest chain, and the greatest of all settings, whole states, in tens."""
    chains: dict[str, list[float]] = {}
    for row in rows("ratio-*"):
        where, _, what = row["row"].partition(": ")
        system = where.partition(", ")[2]
        if what == "whole state, chain with its bases" and system.startswith(("default", "rate ")) and row["value"]:
            chains.setdefault(system, []).append(row["value"])
    most = max(x for values in chains.values() for x in values)
    least, great, most = (x // 10 * 10 for x in (min(chains["default"]), max(chains["default"]), most))
    yield f"Makes training checkpoints {least:.0f} to {great:.0f} times smaller by default, up to {most:.0f} times with"


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
    yield f"| its metadata come last | {counts['DCP']:.0f} of {of_all} |"
    exact = {
        row["row"].rpartition(", ")[2]: row["peer_value"]
        for row in rows("systems")
        if row["row"].startswith("lossless ratio: float32") and row["peer"] == "moonclip"
    }
    yield (
        f"| moonclip | weights: {exact['single']:.2f} x | nothing, or a smaller dtype | yes; weights: "
        f"{exact['10 steps apart']:.2f} x |"
    )


def killed() -> Iterator[str]:
    for name in ("MLP", "embedding", "GPT"):
        assert of(name, FINER, END) <= training.BOUND
        assert min(of(name, FINER, WEIGHTS), of(name, FINER, WHOLE)) >= training.WANTED
    assert all(of("CNN", name, END) > training.BOUND for name in TRAINED["CNN"] if training.is_own(name))
    yield (
        f"no setting of ours keeps to 0.5 %: `Config()` ends {of('CNN', 'default', END):+.1f} %, the setting above "
        f"{of('CNN', FINER, END):+.1f} % at {of('CNN', FINER, WEIGHTS):.0f} times"
    )
    yield f"is ruined by it ({of('ViT', FINER, END):.0f} % worse)"
    end, weights, whole = (
        [of("GPT wider", s, what) for s in (FINER, QUARTER, "default")] for what in (END, WEIGHTS, WHOLE)
    )
    yield f"it saves more and costs more, {end[0]:+.1f} % at {weights[0]:.0f} and {whole[0]:.0f} times"
    assert abs(end[1] - end[2]) < 0.05
    yield (
        f"0.005, ends {end[1]:+.1f} % there at {weights[1]:.0f} and {whole[1]:.0f} times, as `Config()` does at "
        f"{weights[2]:.0f} and {whole[2]:.0f}; other batches end {of('GPT wider', training.YARDSTICK, END):+.1f} %"
    )
    for name in ("embedding long", "GPT long"):
        assert 0 < of(name, HIGH, END) <= training.BOUND
        assert min(of(name, HIGH, WEIGHTS), of(name, HIGH, WHOLE)) >= training.WANTED
    missed = of("MLP long", HIGH, END) - training.BOUND
    assert missed > 0
    yield f"On the MLP it is missed by {missed:.1f} points (mean of three seeds at 3,600 steps)"
    apart = [abs(of(model, training.YARDSTICK, END)) for model in ("MLP", "CNN", "ViT")]
    yield f"other batches alone end {min(apart):.0f} to {max(apart):.0f} % apart"


def often_killed() -> Iterator[str]:
    models = ("MLP", "embedding", "GPT")
    losses, small, large = ([of(model, FINER, what) for model in models] for what in (END, WEIGHTS, WHOLE))
    yield (
        f"MLP, embedding model and GPT, ten kills in 900 steps, ended {losses[0]:.1f}, {losses[1]:.1f} and "
        f"{losses[2]:.1f} % worse, {small[0]:.0f}, {small[1]:.0f} and {small[2]:.0f} times smaller on the weights, "
        f"{large[0]:.0f}, {large[1]:.0f} and {large[2]:.0f} on the whole state"
    )
    yield (
        f"the ViT, which still learns fast when its schedule ends, {of('ViT', FINER, END):.0f} % worse, a CNN "
        f"{of('CNN', FINER, END):.1f} %, and a GPT of 10.7 M parameters, one seed, {of('GPT wider', FINER, END):.1f} % "
        f"worse at {of('GPT wider', FINER, WEIGHTS):.0f} and {of('GPT wider', FINER, WHOLE):.0f} times"
    )
    yield (
        f"at a rate of 0.005 it ended {of('GPT wider', QUARTER, END):.1f} % worse at "
        f"{of('GPT wider', QUARTER, WEIGHTS):.0f} and {of('GPT wider', QUARTER, WHOLE):.0f}, as `Config()` did"
    )


def saves() -> Iterator[str]:
    found = [row for row in rows("saver") if row["row"] == "time until durable"]
    mega = {row["size"]: row["note"].split(", ")[1].split(" MB")[0] for row in rows("saver") if " MB; " in row["note"]}
    small, large = found
    yield (
        f"({mega[small['size']]} MB are durable after {small['value']:.2f} s, {mega[large['size']]} MB after "
        f"{large['value']:.1f} s)"
    )


def short() -> Iterator[str]:
    """The short schedules of the evidence page."""
    yield f"The default ends {of('CNN', 'default', END):+.2f} % at {of('CNN', 'default', WHOLE):.0f} times"
    yield (
        f"first moments end {of('CNN', TWELVE, END):+.2f} % at {of('CNN', TWELVE, WEIGHTS):.0f} times on the weights "
        f"and {of('CNN', TWELVE, WHOLE):.0f} on the whole state, 10 with both moments finer "
        f"{of('CNN', FINER, END):+.2f} % at {of('CNN', FINER, WEIGHTS):.0f} and {of('CNN', FINER, WHOLE):.0f}"
    )
    met = [name for name in TRAINED["GPT"] if training.is_own(name) and of("GPT", name, END) <= training.BOUND]
    assert met == [FINER]
    yield (
        f"10 bins end {of('GPT', FINER, END):+.1f} % at {of('GPT', FINER, WEIGHTS):.0f} and "
        f"{of('GPT', FINER, WHOLE):.0f}"
    )
    yield (
        f"with second moments in cells of one octave too, 10 bins end {of('embedding', FINER, END):+.2f} % at "
        f"{of('embedding', FINER, WEIGHTS):.0f} times on the weights and {of('embedding', FINER, WHOLE):.0f} on the"
    )
    yield (
        f"with both moments finer 10 bins end {of('MLP', FINER, END):+.2f} % at {of('MLP', FINER, WEIGHTS):.0f} and "
        f"{of('MLP', FINER, WHOLE):.0f}"
    )
    yield (
        f"{of('MLP', TWELVE, END):+.2f} % at {of('MLP', TWELVE, WEIGHTS):.0f} times on the weights and "
        f"{of('MLP', TWELVE, WHOLE):.0f} on the whole state, 10 bins just within ({of('MLP', TEN, END):+.2f} %, "
        f"{of('MLP', TEN, WEIGHTS):.0f} times), a rate of 0.002 and 16 bins {of('MLP', SIXTEEN, END):+.2f} % at "
        f"{of('MLP', SIXTEEN, WHOLE):.0f} times"
    )
    assert of("MLP", TEN, END) <= training.BOUND
    yield f"10 at 0.02 {of('ViT', TEN, END):+.1f} %"
    yield f"{of('CNN', 'rate 0.0005', END):+.1f} % at {of('CNN', 'rate 0.0005', WHOLE):.0f} times"
    low, high = seeds("CNN", training.YARDSTICK)
    yield f"Another order of the data ends {low:+.1f} to {high:+.1f} %"
    yield (
        f"the default {of('ViT', 'default', END):+.1f} %, a rate of 0.0005 {of('ViT', 'rate 0.0005', END):+.1f} % "
        f"({of('ViT', 'rate 0.0005, one base', END):+.1f} % with one base), the published pipeline "
        f"{of('ViT', 'inshrinkerator', END):+.1f} %, another order of the data "
        f"{of('ViT', training.YARDSTICK, END):+.1f} %"
    )
    low, high = seeds("GPT", training.YARDSTICK)
    yield (
        f"the default {of('GPT', 'default', END):+.1f} % at {of('GPT', 'default', WHOLE):.0f} times, a rate of 0.0005 "
        f"{of('GPT', 'rate 0.0005', END):+.1f} % at {of('GPT', 'rate 0.0005', WHOLE):.0f}, 0.002 with 16 bins "
        f"{of('GPT', SIXTEEN, END):+.1f} % at {of('GPT', SIXTEEN, WHOLE):.0f}, 10 bins at 0.02 with finer first "
        f"moments {of('GPT', TEN, END):+.1f} % at {of('GPT', TEN, WEIGHTS):.0f} times on the weights and "
        f"{of('GPT', TEN, WHOLE):.0f} on the whole state, the published pipeline "
        f"{of('GPT', 'inshrinkerator', END):+.1f} %, another order of the data "
        f"{of('GPT', training.YARDSTICK, END):+.1f} % ({low:+.1f} and {high:+.1f} %)"
    )
    yield (
        f"`rate=0.0005` with one base for all stays within half a percent and reaches "
        f"{of('embedding', 'rate 0.0005, one base', WHOLE):.0f} x on the whole state and "
        f"{of('embedding', 'rate 0.0005, one base', WEIGHTS):.0f} x on the weights "
        f"({of('embedding', 'rate 0.0005', WHOLE):.0f} and {of('embedding', 'rate 0.0005', WEIGHTS):.0f} x with a base "
        f"in 20, {of('embedding', 'rate 0.0005', END):+.2f} %)"
    )


def others() -> Iterator[str]:
    """What is said of other systems over all short schedules."""
    name = "QD-compressor"
    short = [model for model in training.STUDIES if name in TRAINED.get(model, {})]
    weights, whole = ([of(model, name, what) for model in short] for what in (WEIGHTS, WHOLE))
    assert all(abs(of(model, name, END)) <= training.BOUND for model in training.STUDIES)
    yield (
        f"at {min(weights):.0f} to {max(weights):.0f} times on the weights and {min(whole):.1f} to {max(whole):.1f} on "
        f"the whole state; naive 8-bit, on the MLP alone, at {of('MLP', 'naive 8-bit', WEIGHTS):.0f} and "
        f"{of('MLP', 'naive 8-bit', WHOLE):.1f}"
    )
    published = [of(model, "inshrinkerator", WHOLE) for model in training.STUDIES]
    yield f"which is why its whole state shrinks by {max(published):.1f} times at most"


def long() -> Iterator[str]:
    """The long schedules of the evidence page."""
    name = "embedding long"
    yield (
        f"12 bins at a rate of 0.004 end {of(name, LOW, END):+.2f} % on the mean of two seeds "
        f"({seeds(name, LOW)[1]:+.2f} % the worse one) at {of(name, LOW, WEIGHTS):.0f} times on the weights and "
        f"{of(name, LOW, WHOLE):.0f} on the whole state, at 0.01 {of(name, HIGH, END):+.2f} % at "
        f"{of(name, HIGH, WEIGHTS):.0f} and {of(name, HIGH, WHOLE):.0f} times, at 0.02 with finer first moments "
        f"{of(name, TWELVE, END):+.2f} % at {of(name, TWELVE, WEIGHTS):.0f} and {of(name, TWELVE, WHOLE):.0f}"
    )
    yield f"Another order of the data costs {of(name, training.YARDSTICK, END):+.2f} %"
    base = "inshrinkerator, one base"
    yield (
        f"The published pipeline loses {of(name, base, END):+.2f} % at {of(name, base, WEIGHTS):.0f} times on the "
        f"weights and {of(name, base, WHOLE):.1f} on the whole state"
    )
    often = of("MLP long", "default", END)
    low, high = seeds("MLP long", training.YARDSTICK)
    yield (
        f"Four times the length (three seeds): the default ends {often:+.1f} %, 12 bins at 0.004 "
        f"{of('MLP long', LOW, END):+.1f} % at {of('MLP long', LOW, WEIGHTS):.0f} and "
        f"{of('MLP long', LOW, WHOLE):.0f} times, at 0.01 {of('MLP long', HIGH, END):+.1f} % at "
        f"{of('MLP long', HIGH, WEIGHTS):.0f} and {of('MLP long', HIGH, WHOLE):.0f}; another order of the data "
        f"{low:+.1f} to {high:+.1f} %"
    )
    low, high = seeds("MLP longer", training.YARDSTICK)
    yield (
        f"Twelve times (two seeds): {of('MLP longer', LOW, END):+.1f} % at "
        f"{of('MLP longer', LOW, WEIGHTS):.0f} and {of('MLP longer', LOW, WHOLE):.0f} times, "
        f"{of('MLP longer', HIGH, END):+.1f} % at {of('MLP longer', HIGH, WEIGHTS):.0f} and "
        f"{of('MLP longer', HIGH, WHOLE):.0f}; another order of the data {low:+.1f} and {high:+.1f} %"
    )
    fine = [of(name, TWELVE, END) for name in ("MLP long", "MLP longer")]
    yield f"which meet the aim in 900 steps, end {fine[0]:+.1f} and {fine[1]:+.1f} %"
    name = "GPT long"
    yield (
        f"The default ends {of(name, 'default', END):+.1f} % at {of(name, 'default', WEIGHTS):.0f} and "
        f"{of(name, 'default', WHOLE):.0f} times, 12 bins at 0.004 {of(name, LOW, END):+.2f} % at "
        f"{of(name, LOW, WEIGHTS):.0f} and {of(name, LOW, WHOLE):.0f}, at 0.01 {of(name, HIGH, END):+.2f} % at "
        f"{of(name, HIGH, WEIGHTS):.0f} and {of(name, HIGH, WHOLE):.0f}"
    )


def wider() -> Iterator[str]:
    """The larger GPT of the evidence page."""
    name = "GPT wider"
    yield (
        f"10 bins with both moments finer end {of(name, FINER, END):+.1f} % at {of(name, FINER, WEIGHTS):.0f} times "
        f"on the weights and {of(name, FINER, WHOLE):.0f} on the whole state, 12 bins with finer first moments "
        f"{of(name, TWELVE, END):+.1f} % at {of(name, TWELVE, WEIGHTS):.0f} and {of(name, TWELVE, WHOLE):.0f}. The "
        f"default ends {of(name, 'default', END):+.1f} % at {of(name, 'default', WEIGHTS):.0f} and "
        f"{of(name, 'default', WHOLE):.0f} times, other batches {of(name, training.YARDSTICK, END):+.1f} %"
    )
    yield f"than on the small GPT ({of('GPT', FINER, WEIGHTS):.0f} and {of('GPT', FINER, WHOLE):.0f} times)"
    lower = "rate 0.002, 12 bins, finer moments, bases every 100"
    yield (
        f"A quarter of the rate, 0.005, ends {of(name, QUARTER, END):+.2f} % at {of(name, QUARTER, WEIGHTS):.0f} and "
        f"{of(name, QUARTER, WHOLE):.0f} times, a tenth with 12 bins {of(name, lower, END):+.2f} % at "
        f"{of(name, lower, WEIGHTS):.0f} and {of(name, lower, WHOLE):.0f}"
    )


def thresholds() -> Iterator[str]:
    of_all = {t: f"default, searched for {t:.1%}" for t in training.THRESHOLDS}
    plain = [of("MLP", name, END) for name in of_all.values()]
    assert all(of("MLP", name, "loss change at a restore") < 0 for name in of_all.values())
    yield f"the training ends {min(plain):.1f} to {max(plain):.1f} % worse"
    best = f"{of_all[0.05]}, ahead"
    assert of("MLP", best, "loss change at a restore") > 0
    losses, ratios, _ = zip(*(row for name, row in training.PUBLISHED.items() if "1 %" not in name), strict=True)
    yield (
        f"the training ends {of('MLP', best, END):+.2f} % at {of('MLP', best, WEIGHTS):.0f} times on the weights and "
        f"{of('MLP', best, WHOLE):.0f} on the whole state; the paper has {min(ratios):.0f} to {max(ratios):.0f} times "
        f"on the weights, at {min(losses):+.1f} to {max(losses):+.1f} %"
    )
    middle, least = (f"{of_all[t]}, ahead" for t in (0.01, 0.001))
    published, mildest = (f"inshrinkerator, searched for {t}" for t in ("1.0%", "0.1%"))
    yield (
        f"the training ends {of('MLP', middle, END):+.1f} and {of('MLP', least, END):+.1f} %: at 1 % better than the "
        f"published pipeline, which ends {of('MLP', published, END):+.1f} % at {of('MLP', published, WEIGHTS):.0f} and "
        f"{of('MLP', published, WHOLE):.1f} times, but by {of('MLP', middle, WEIGHTS):.0f} and "
        f"{of('MLP', middle, WHOLE):.0f} times; at 0.1 % worse than it ({of('MLP', mildest, END):+.1f} %)"
    )


def ablation() -> Iterator[str]:
    found: dict[str, Columns] = {}
    for row in rows("training-mlp-ablation"):
        where, _, what = row["row"].partition(": ")
        found.setdefault(where.removeprefix("MLP ablation, "), {})[what] = row
    bits, end = (
        {name: columns[what]["value"] for name, columns in found.items() if what in columns}
        for what in ("late weight deltas", END)
    )
    whole = bits["own, all parts"]
    parts = ("no rate-distortion encoder", "codebook refit each time", "published coder")
    encoder, kept, coder = (100 * (1 - whole / bits[f"own, {part}"]) for part in parts)
    yield (
        f"The rate-distortion encoder takes {encoder:.0f} % off the late deltas, the kept codebook {kept:.0f} %, the "
        f"conditional coder {coder:.0f} %"
    )
    weights = {name: columns[WEIGHTS]["value"] for name, columns in found.items() if WEIGHTS in columns}
    ahead, behind = "own, all parts", "own, not ahead of the drift"
    yield (
        f"without it the training ends {end[behind]:+.2f} %, not {end[ahead]:+.2f} %, at {weights[behind]:.0f} times "
        f"on the weights instead of {weights[ahead]:.0f}"
    )
    yield (
        f"with them exact it ends {end['own, moments exact']:+.2f} %; with exact weights instead, which do not lead by "
        f"the steps that lost moments would have brought, {end['own, weights exact']:+.2f} %"
    )


def crashes() -> Iterator[str]:
    found = document("crash")
    told, killed = found["injections"], found["random_kills"]["trials"]
    assert told["planned"] == told["confirmed_by_strace"]
    assert not told["wrong"]
    assert not found["failures"]
    yield (
        f"Of {told['planned']} system calls at which processes were killed or told ENOSPC or EIO, and {killed} kills "
        "at random moments, none lost a step"
    )


CLAIMS: dict[str, tuple[Callable[[], Iterator[str]], ...]] = {
    "README.md": (demo, headline, alternatives, killed, saves),
    "docs/evidence.md": (short, others, long, wider, thresholds, ablation),
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
    """The table of docs/scaling.md, ranks -> its cells, and the page; what is computed is in italics there."""
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
    """(2 n + 40) E + 26 R L + (100 + 41 C) R here; 140 bytes a shard with torch: a weight and two moments, cut."""
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
