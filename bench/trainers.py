"""The bench `trainers`: the cost of checkpoints in each framework against its own.

A small network is trained without checkpoints, with the framework's own, and with this package's, in turn. Exactness:
a run that was stopped at half and resumed from a lossless checkpoint ends with the weights of one that was not, bit for
bit; nothing else of a framework is reported where it does not. The change of loss is that of the same stop and resume
with the default configuration. Ranks: the same state of one size, cut over 1, 2 and 4 processes over gloo.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import torch

import shrinkpoint as sp

from . import frameworks, ranks
from .frameworks import FRAMEWORKS, Job, Outcome, saved_bytes
from .harness import CheckFailed, Options, Row, Target, at_most
from .plot import Bars, draw

TITLE = "checkpoints in trainers, against each framework's own"
DEVICE = "cpu, training on 1 thread"
QUICK = ("plain loop", "DCP")
ROUNDS = 5
"""Trainings of each kind; a stall is the median over all saves of all of them, 20 or more in the full form."""
DIFFERENT = at_most(0)


def run(options: Options) -> list[Row]:
    """All rows."""
    rows: list[Row] = []
    for name in FRAMEWORKS:
        if not options.wanted(name):
            continue
        if options.quick and name not in QUICK:
            rows.append(_row(name, 0, None, "ms", note="not measured: --quick"))
            continue
        options.say(name)
        try:
            rows += options.done(_framework(name, options))
        except ImportError as error:
            rows.append(_row(name, 0, None, "ms", note=f"not measured: {error.name or error} is not installed"))
        except CheckFailed as error:
            note = f"CHECK FAILED: {error}"
            rows.append(_row(f"{name}: resume, lossless", 0, None, "weights", target=DIFFERENT, met=False, note=note))
    if options.wanted("ranks"):
        rows += _ranks(options)
    return rows


def _framework(name: str, options: Options) -> list[Row]:
    """Rows of one framework: exactness first, which fails for all."""
    width, steps, every = (192, 240, 120) if options.quick else (1280, 240, 60)
    about = FRAMEWORKS[name]

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)

        def train(what: str, how: str, to: int, cfg: sp.Config | None = None, *, timed: bool = False) -> Outcome:
            job = Job(root / what, how, sp.Config() if cfg is None else cfg, to, every, width, timed)
            return frameworks.run(name, job)

        half = steps // 2 // every * every
        whole = train("whole", "none", steps)
        size = sum(w.numel() for w in whole.weights)
        train("exact", "ours", half, sp.presets.lossless())
        different = _different(train("exact", "ours", steps, sp.presets.lossless()).weights, whole.weights)
        if different:
            raise CheckFailed(f"{name}: {different} of {size} weights differ after a lossless resume")
        train("lossy", "ours", half)
        lossy = frameworks.held_out_loss(train("lossy", "ours", steps).weights, width)
        loss = frameworks.held_out_loss(whole.weights, width)

        taken: dict[str, list[Outcome]] = {"none": [], "own": [], "ours": []}
        nbytes: dict[str, float] = {}
        for number in range(1 if options.quick else ROUNDS):
            for how in ("own", "ours", "none")[number % 3 :] + ("own", "ours", "none")[: number % 3]:
                what = f"{how}-{number}"
                taken[how].append(train(what, how, steps, timed=True))
                if how != "none":
                    nbytes[how] = saved_bytes(root / what) / taken[how][-1].saves
    stalls = {
        how: _median([s for one in found for s in one.stalls]) * 1e3 for how, found in taken.items() if how != "none"
    }
    seconds = {how: _median([one.seconds for one in found]) for how, found in taken.items()}
    over = {how: _overhead(taken[how], taken["none"]) for how in ("own", "ours")}
    saves = sum(len(one.stalls) for one in taken["ours"])
    said = f"{steps} steps of {seconds['none'] / steps * 1e3:.1f} ms, a save every {every}; {saves} saves"
    waited = [s for one in taken["ours"] for s in one.waited]
    stalled = f"{said}; of it {_median(waited) * 1e3:.1f} ms waiting for the save before" if waited else said
    times = "; ".join(f"{who}: {_spread(over[how])}" for how, who in (("ours", "ours"), ("own", about.peer)))
    made = _made_of(taken["ours"], seconds["none"], _median(over["ours"]))
    changed = f"held-out loss {lossy:.5g} against {loss:.5g} uninterrupted; Config(); one seed"
    lines = [sum(1 for line in text.splitlines() if line.strip()) for text in (about.ours, about.own)]
    exact = f"stopped after {half} of {steps} steps and resumed, every weight compared bit for bit; {about.drawn}"
    return [
        _row(f"{name}: stall of a save", size, stalls["ours"], "ms", about.peer, stalls["own"], note=stalled),
        _row(
            f"{name}: overhead of the run",
            size,
            _told(over["ours"]),
            "%",
            about.peer,
            _told(over["own"]),
            note=f"{said}; {times}; {made}",
        ),
        _row(
            f"{name}: bytes of a save",
            size,
            nbytes["ours"],
            "bytes",
            about.peer,
            nbytes["own"],
            note=f"the folder over its saves, the base among them; {saves} saves",
        ),
        _row(f"{name}: lines", size, lines[0], "lines", about.peer, lines[1], note=about.ours.replace("\n", "; ")),
        _row(
            f"{name}: resume, lossless",
            size,
            different,
            "weights",
            target=DIFFERENT,
            note=f"weights that differ; {exact}",
        ),
        _row(f"{name}: loss after a lossy resume", size, 100 * (lossy / loss - 1), "%", note=changed),
    ]


def _overhead(found: list[Outcome], none: list[Outcome]) -> list[float]:
    """Percent by which each training took longer than the one of its round without checkpoints."""
    return [100 * (a.seconds / b.seconds - 1) for a, b in zip(found, none, strict=True)]


def _told(over: list[float]) -> float | None:
    """Return the median of the rounds; None if their signs differ."""
    return None if min(over) < 0 < max(over) else _median(over)


def _spread(over: list[float]) -> str:
    if len(over) == 1:
        return "one training each"
    text = f"median {_median(over):+.1f} % of {len(over)} rounds, {min(over):+.1f} to {max(over):+.1f} %"
    return text if _told(over) is not None else f"{text}, not to be told from noise"


def _made_of(found: list[Outcome], seconds: float, over: float) -> str:
    """Return the parts of the time: calls, the end, and the worker's share."""
    calls = 100 * _median([sum(one.stalls) for one in found]) / seconds
    closing = 100 * _median([one.closing for one in found]) / seconds
    rest = over - calls - closing
    return f"of ours {calls:.1f} % in the calls of save, {closing:.1f} % after the last step, {rest:+.1f} % beside them"


def _different(found: list[torch.Tensor], expected: list[torch.Tensor]) -> int:
    """Number of weights whose bits differ."""
    pairs = zip(found, expected, strict=True)
    return sum(int((a.view(torch.int32) != b.contiguous().view(torch.int32)).sum()) for a, b in pairs)


def _ranks(options: Options) -> list[Row]:
    """Rows of several processes on this machine."""
    parameters = 8_000_000
    rows = []
    for world in (1, 2, 4):
        names = [f"DCP, {world} ranks: {what}" for what in ("save", "bytes of a save", "metadata")]
        if options.quick:
            rows += [_row(name, parameters, None, "s", note="not measured: --quick") for name in names[:1]]
            continue
        options.say(f"{world} ranks")
        found = ranks.measure(world, parameters)
        said = (
            f"{world} processes over gloo, one thread each; {parameters:,} weights with AdamW's moments; deltas, lossy"
        )
        peer = "FileSystemWriter"
        slowest = f"{said}; the slowest rank, median of {found['saves']} saves"
        last = f"{said}; the last save's own files"
        rows += [
            _row(names[0], parameters, found["ours"]["seconds"], "s", peer, found["own"]["seconds"], note=slowest),
            _row(names[1], parameters, found["ours"]["nbytes"], "bytes", peer, found["own"]["nbytes"], note=last),
            _row(names[2], parameters, found["ours"]["metadata"], "bytes", peer, found["own"]["metadata"], note=said),
        ]
    return rows


def _median(values: list[float]) -> float:
    return statistics.median(values)


def _row(
    name: str,
    size: int,
    value: float | None,
    unit: str,
    peer: str | None = None,
    peer_value: float | None = None,
    *,
    target: Target | None = None,
    met: bool | None = None,
    note: str = "",
) -> Row:
    """Row with its ratio to the peer: how many times smaller, where both are above zero."""
    ratio = peer_value / value if value and peer_value and value > 0 and peer_value > 0 else None
    if target is not None and met is None:
        met = target.met(value, ratio)
    text = target.text(unit) if target else None
    return Row(name, DEVICE, size, value, unit, peer, peer_value, ratio, text, met, note)


def plot(rows: list[Row], path: Path) -> None:
    """Stall and bytes of each framework next to its own."""
    panels = []
    for what, unit in (("stall of a save", "ms"), ("bytes of a save", "bytes")):
        bars: list[tuple[str, float, float | None]] = []
        for row in rows:
            name, _, measured = row.row.partition(": ")
            if measured != what or row.value is None or row.peer_value is None:
                continue
            bars += [(name, row.value, None), (f"vs {row.peer}", row.peer_value, None)]
        if bars:
            panels.append(Bars(what, unit, bars))
    draw(path, panels)
