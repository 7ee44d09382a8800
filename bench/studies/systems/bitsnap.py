"""BitSnap's figures 8 to 13, tables 3 and 4, and its quality score."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import shrinkpoint as sp
from shrinkpoint.kernels.cluster import cluster_quantize
from shrinkpoint.kernels.packing import changed_mask, gather

from ...harness import (
    Call,
    CheckFailed,
    Options,
    Row,
    Rows,
    interleave,
    one_thread_clock,
    seconds_of,
    threads,
    times_smaller,
)
from .. import workloads
from ..baselines.excp import ExCP
from ..baselines.quantizers import Naive8Bit
from ..workloads import Run, State, Workload
from .table import FIGURES, Experiment, States, l2_errors, mean, raw_bytes, restored, slowed, states, stored_bytes

Array = npt.NDArray[Any]
_ELEMENTS = 1 << 20
_SHARES = (1 / 32, 0.15, 0.5, 15 / 16, 1.0)
"""Changed: where the paper's COO breaks even, its example, half, where its mask breaks even, all."""


def coo_bytes(changed: int, total: int) -> int:
    """Return the bytes of changed values with coordinates, or of all values if fewer."""
    return min(6 * changed, 2 * total)


def sparsified(name: str, options: Options) -> list[Row]:
    """Figure 8: ratio against the share of changed values, next to uint16 coordinates."""
    n = _ELEMENTS // (8 if options.quick else 1)
    rng = np.random.default_rng(0)
    before = {"model.weight": torch.from_numpy((0.02 * rng.standard_normal(n)).astype(np.float16)).view(-1, 1024)}
    rows, base = Rows(name), sp.compress(before, cfg=sp.presets.bitsnap())
    for share in _SHARES:
        count = round(share * n)
        places = torch.from_numpy(rng.permutation(n)[:count])
        after = {"model.weight": before["model.weight"].clone()}
        after["model.weight"].view(-1).view(torch.int16)[places] ^= 1
        found = sp.compress(after, base, sp.presets.bitsnap())
        if not torch.equal(sp.decompress(found, base)["model.weight"], after["model.weight"]):
            raise CheckFailed("a sparsified model state differs after its restore")
        value = 2 * n / stored_bytes(found)
        theory = min(16.0, 2 * n / min(2 * n, n / 8 + 2 * count)) if count else 16.0
        what = f"{100 * share:.4g} % changed"
        note = f"float16, {n:,} drawn values, one bit changed in {count:,} of them"
        paper = "BitSnap, section 3.3: 2 n over n / 8 + 2 c bytes", theory
        rows.add(what, value, "x", paper, f"{note}; its text has nearly 5 x at 15 % and 16 x at best", size=n)
        peer = 2 * n / coo_bytes(count, n)
        note += "; computed; figure 8: better than COO above 3.125 %"
        coordinates = "uint16 row, column and value", peer
        rows.add(f"{what}, beside COO", value, "x", coordinates, note, ratio=value / peer, size=n)
    return rows


def _mixed(state: State) -> dict[str, torch.Tensor]:
    """Return the model in bfloat16, as mixed precision stores it."""
    return {name: value.to(torch.bfloat16) for name, value in state["model"].items()}


_SLOWER = (1, 10, 100)
"""By how much the learning rate of the stages is smaller than that of the training."""


def iterations(name: str, options: Options) -> list[Row]:
    """Figure 9: ratio against the number of iterations since the base, at ever smaller steps."""
    rows = []
    with threads(1):
        for slower in _SLOWER:
            trained = states(options.quick) if slower == 1 else slowed(options.quick, slower)
            stage = "" if slower == 1 else f", learning rate / {slower}"
            rows += _iterations(name, trained, stage)
    return rows


def _iterations(name: str, trained: States, stage: str) -> list[Row]:
    """Rows of one stage: ratio by the number of iterations since the base."""
    rows, first = Rows(name), _mixed(trained.after[0])
    base = sp.compress({"model": first}, cfg=sp.presets.bitsnap())
    for apart in (1, 2, 5, 10):
        now = _mixed(trained.after[apart])
        found = sp.compress({"model": now}, base, sp.presets.bitsnap())
        raw = raw_bytes(found)
        changed = sum(int((now[key] != first[key]).sum()) for key in now) / sum(x.numel() for x in now.values())
        note = f"{trained.where()} in bfloat16, learning rate {trained.rate:.1e}; {100 * changed:.1f} % changed"
        paper = ("BitSnap, figure 9, nearly", 16.0) if apart == 1 else ("BitSnap, figure 9, more than", 8.0)
        what = f"{apart} iterations from the base{stage}"
        rows.add(what, raw / stored_bytes(found), "x", paper, note, size=raw // 2)
    return rows


# ---------------------------------------------------------------------------------------------------- tables 3 and 4


def _moments(state: State, which: str) -> Array:
    """Concatenate one moment of all matrices."""
    entries = state["optimizer"]["state"].values()
    found: Array = torch.cat([entry[which].flatten() for entry in entries if entry[which].ndim >= 2]).numpy()
    return found


def errors(x: Array, y: Array) -> tuple[float, float]:
    """Mean relative error over the nonzero x, and mean squared error.

    Example:
        >>> errors(np.array([1.0, 0.0, 2.0]), np.array([1.5, 0.0, 2.0]))
        (0.25, 0.08333333333333333)
    """
    a, b = x.astype(np.float64), y.astype(np.float64)
    met = a != 0
    return float((np.abs(a - b)[met] / np.abs(a[met])).mean()), float(np.square(a - b).mean())


def clustered(name: str, options: Options) -> list[Row]:
    """Tables 3 and 4: errors of the moments, next to naive 8-bit; and the ratio of section 3.4."""
    with threads(1):
        trained = states(options.quick)
        state = trained.after[0]
        found, naive = sp.compress(state, cfg=sp.presets.bitsnap()), Naive8Bit(moments=True)
        both = {"BitSnap": sp.decompress(found), "naive 8-bit": naive.decode(naive.encode(state, None), None)}
    rows, paper = Rows(name), "BitSnap, table 4 (GPT-2 Medium)"
    note = trained.where()
    for place, (system, other) in enumerate(both.items()):
        for (moment, measure), value in _errors(state, other).items():
            figure = paper, FIGURES["bitsnap table 4"][f"{moment}, {measure}"][place]
            rows.add(f"{moment}, {measure}, {system}", value, "", figure, note, size=_moments(state, moment).size)
    ends = ("exp_avg", "exp_avg_sq")
    ratio = raw_bytes(found, *ends) / stored_bytes(found, *ends)
    rows.add("ratio of the moments", ratio, "x", ("BitSnap, section 3.4", 2.67), "12 bits a value")
    return rows


_SIZES = ((1, 32, 2), (2, 64, 2), (4, 128, 4), (6, 192, 6))
"""Layers, width and heads of ours."""


def by_size(name: str, options: Options) -> list[Row]:
    """Table 3: errors of the moments by the size of the model."""
    rows = Rows(name)
    with threads(1):
        for place, shape in enumerate(_SIZES[:2] if options.quick else _SIZES):
            options.say(f"{name}: {shape[0]} layers of {shape[1]}")
            run = Run(workloads.gpt(*shape, steps=10 if options.quick else 120), 0)
            run.train(run.workload.steps * 9 // 10)
            state, size = run.state(), run.workload.parameters
            back = restored(state, sp.presets.bitsnap())
            paper = f"BitSnap, table 3, {('345 M', '0.5 B', '1 B', '3 B')[place]}"
            note = f"GPT of {shape[0]} layers of {shape[1]} after {run.step} steps"
            for (moment, measure), value in _errors(state, back).items():
                figure = FIGURES["bitsnap table 3"][f"{moment}, {measure}"][place]
                what = f"{moment}, {measure}, {size / 1e6:.2g} M parameters"
                rows.add(what, value, "", (paper, figure), note, size=size)
    return rows


def _errors(exact: State, restored: State) -> dict[tuple[str, str], float]:
    """Return the mean relative and the mean squared error of either moment."""
    moments = ("exp_avg", "exp_avg_sq")
    values = {moment: errors(_moments(exact, moment), _moments(restored, moment)) for moment in moments}
    return {(moment, measure): found[i] for moment, found in values.items() for i, measure in enumerate(("MRE", "MSE"))}


# ---------------------------------------------------------------------------------------------------- figures 12 and 13

_EVERY = 5


def _in_half(workload: Workload) -> Workload:
    """A workload whose weights are bfloat16, as the model states of mixed precision."""

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        cast = torch.utils._pytree.tree_map(lambda x: x.bfloat16() if x.is_floating_point() else x, batch)
        return workload.loss(model, cast).float()

    return dataclasses.replace(workload, model=lambda: workload.model().bfloat16(), loss=loss)


def continued(name: str, options: Options) -> list[Row]:
    """Figure 12: losses of a run restored from sparsified checkpoints, and of an exact one."""
    further, steps = (20, 80) if options.quick else (60, 360)
    rows = Rows(name)
    config = sp.Config([sp.Rule("model/*", sp.Changed("published")), sp.Rule("*", sp.Exact())])
    with threads(1):
        for label in ("MLP",) if options.quick else ("MLP", "GPT"):
            workload = _in_half(dataclasses.replace(workloads.WORKLOADS[label](), steps=steps))
            run, again = (Run(workload, 0, until=steps * 3 // 4) for _ in range(2))
            base = sp.compress(again.state(), cfg=config)
            apart, ratios = [], []
            for step in range(run.step + 1, run.step + further + 1):
                batch = workload.batch(np.random.default_rng([run.seed, step]))
                losses = [float(part.train(step).loss(batch).detach()) for part in (run, again)]
                apart.append(abs(losses[1] - losses[0]))
                if step % _EVERY == 0:
                    found = sp.compress(again.state(), base, config)
                    again.restore(sp.decompress(found))
                    ratios.append(raw_bytes(found, start="model/") / stored_bytes(found, start="model/"))
            note = (
                f"weights in bfloat16, the optimizer's states exact; restored every {_EVERY} iterations from a mask "
                f"and changed values over the base, {min(ratios):.3g} to {max(ratios):.3g} times smaller"
            )
            what = f"{label}, largest difference of the loss over {further} iterations"
            paper = "BitSnap, figure 12: the curves are one", 0.0
            rows.add(what, max(apart), "", paper, note, size=workload.parameters)
    return rows


def resumed(name: str, options: Options) -> list[Row]:
    """Figure 13: the loss along the iterations after a restore from clustered states."""
    points, rows = (0, 5, 20) if options.quick else (0, 1, 5, 20, 60), Rows(name)
    with threads(1):
        for label in ("MLP",) if options.quick else ("MLP", "CNN", "GPT"):
            steps = 80 if options.quick else 360 if label == "GPT" else 600
            changes: dict[int, list[float]] = {further: [] for further in points}
            workload = dataclasses.replace(workloads.WORKLOADS[label](), steps=steps)
            for seed in range(1 if options.quick or label == "GPT" else 3):
                options.say(f"{name}: {label}, seed {seed}")
                run, again = Run(workload, seed, until=steps // 2), Run(workload, seed)
                again.restore(restored(run.state(), sp.presets.bitsnap()))
                for further, values in changes.items():
                    exact, loss = (part.train(steps // 2 + further).held_out_loss() for part in (run, again))
                    values.append(100 * (loss / exact - 1))
            for further, values in changes.items():
                note = f"{mean(values)}; restored in the middle of {steps} steps"
                paper = ("BitSnap, figure 13: about 4.5 %", 4.5) if further else ("exact model states: 0", 0.0)
                what = f"{label}, loss {f'after {further} steps' if further else 'at once'}"
                rows.add(what, mean(values).mean, "% change", paper, note, size=workload.parameters)
    return rows


# ---------------------------------------------------------------------------------------------------- figures 10 and 11

_LAYERS, _WIDTH = 16, 1024
_PARALLEL = {"one rank": (1, 1), "mp4 pp1": (4, 1), "mp2 pp2": (2, 2)}
"""Ranks among which a matrix is divided, and stages among which the layers are."""


def stages(name: str, options: Options) -> list[Row]:
    """Figures 10 and 11: milliseconds of each stage on one rank, by parallelism."""
    rows, width = Rows(name), _WIDTH // (8 if options.quick else 1)
    rng = np.random.default_rng(0)
    with threads(1):
        alone: dict[str, float] = {}
        for parallel, (model, pipeline) in _PARALLEL.items():
            shape = width // model, width
            moments = [0.01 * rng.standard_normal(shape, np.float32) for _ in range(2 * _LAYERS // pipeline)]
            weights = [rng.integers(0, 1 << 16, shape, np.uint16).reshape(-1) for _ in range(_LAYERS // pipeline)]
            later = [np.where(rng.random(x.size) < _SHARES[1], x ^ np.uint16(1), x) for x in weights]
            calls: dict[str, tuple[Call, int]] = {
                "clustering and quantization of the moments": (partial(_each, cluster_quantize, moments), 1),
                "delta encoding of the weights": (partial(_each, _packed, later, weights), 1),
            }
            for stage, timing in interleave(calls, clock=one_thread_clock()).items():
                value, size = 1e3 * timing.median, _LAYERS * width * width // (model * pipeline)
                peer = "one rank", alone.setdefault(stage, value)
                note = f"{size:,} drawn bfloat16 weights a rank, 15 % of them changed, two float32 moments each"
                rows.add(
                    f"{parallel}, {stage}", value, "ms", peer, note, ratio=times_smaller(value, peer[1]), size=size
                )
    return rows


def _each(call: Callable[..., object], *lists: list[Array]) -> list[object]:
    return list(map(call, *lists))


def _packed(now: Array, before: Array) -> Array:
    """Return the changed values, behind a mask that is made for them."""
    changed: Array = gather(now, changed_mask(now, before))
    return changed


# ---------------------------------------------------------------------------------------------------- quality score

_WEIGHTS = {"training": (0.2, 0.4, 0.4), "checkpointing": (0.4, 0.2, 0.4)}
"""Ratio, speed, precision: training w2 ~ w3 > w1, checkpointing w1 ~ w3 > w2."""


def score(name: str, options: Options) -> list[Row]:
    """Return the score Q of several systems on one state; the note names open choices."""
    presets = {"bitsnap": sp.presets.bitsnap(), "default": sp.Config()}
    presets |= {"inshrinkerator": sp.presets.inshrinkerator(), "lossless": sp.presets.lossless()}
    found: dict[str, tuple[float, float, float]] = {}
    with threads(1):
        trained = states(options.quick)
        first, state = trained.after[0], trained.after[5]
        raw = sum(x.numel() * x.element_size() for x in torch.utils._pytree.tree_leaves(state) if hasattr(x, "numel"))

        def judge(system: str, call: Callable[[], Any], restore: Callable[[Any], State]) -> None:
            seconds, saved = seconds_of(call, one_thread_clock(), 3), call()
            found[system] = raw / saved.nbytes, seconds, statistics.fmean(l2_errors(state, restore(saved)).values())

        for system, cfg in presets.items():
            base = sp.compress(first, cfg=cfg, kinds=trained.kinds)
            judge(system, partial(sp.compress, state, base, cfg, kinds=trained.kinds), sp.decompress)
        for baseline in (Naive8Bit(moments=True), ExCP()):
            start = baseline.decode(baseline.encode(first, None), None)
            judge(baseline.name, partial(baseline.encode, state, start), partial(baseline.decode, previous=start))
    best, fastest = max(r for r, _, _ in found.values()), min(s for _, s, _ in found.values())
    rows = Rows(name)
    for use, weights in _WEIGHTS.items():
        for system, (ratio, seconds, error) in found.items():
            scores = (math.log(ratio) / math.log(best), fastest / seconds, 1 - min(1.0, error))
            note = (
                f"ratio {ratio:.2f} (score {scores[0]:.2f}), {seconds * 1e3:.0f} ms (score {scores[1]:.2f}), relative "
                f"l2 error {error:.2g} (score {scores[2]:.2f}); weights {weights}; {trained.where()}, 5 steps on"
            )
            quality = sum(w * s for w, s in zip(weights, scores, strict=True))
            rows.add(f"{use}, {system}", quality, "Q", note=note, size=raw // 12)
    return rows


EXPERIMENTS = (
    Experiment("BitSnap ratio by changed values", sparsified),
    Experiment("BitSnap ratio by iterations", iterations),
    Experiment("BitSnap error of the moments", clustered),
    Experiment("BitSnap error by model size", by_size),
    Experiment("BitSnap loss of sparsified states", continued),
    Experiment("BitSnap loss after a restore", resumed),
    Experiment("BitSnap stages by parallelism", stages),
    Experiment("BitSnap quality score", score),
)
