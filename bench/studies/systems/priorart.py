"""Prior art: ExCP, Kim and Belyaev on whole states; entropy coders of the same codes."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import zstandard

import shrinkpoint as sp
from shrinkpoint.codec.entropy import Matrix, in_context
from shrinkpoint.kernels.packing import pack_bits

from ...devices import threads
from ...harness import Options, Row, Rows
from .. import workloads
from ..baselines.excp import ZSTD_LEVEL, ExCP
from ..baselines.kimbelyaev import KimBelyaev, coded_size
from ..baselines.parts import parts
from ..workloads import Run, State
from .table import Chain, Experiment, l2_errors

_LENGTH, _APART = 6, 10


SYSTEMS: dict[str, Any] = {
    "exact_weights": sp.presets.exact_weights(),
    "Config()": sp.Config(),
    "compact": sp.presets.compact(),
    "ExCP": ExCP(),
    "Kim and Belyaev": KimBelyaev(),
}


def compared(name: str, options: Options) -> list[Row]:
    """Rows of the last delta of a chain by each system, and of coders of the same codes."""
    workload = workloads.mlp(100) if options.quick else workloads.gpt(steps=360)
    run = Run(workload, 0)
    first = workload.steps * 6 // 10
    states = []
    with threads(1):
        for number in range(_LENGTH):
            run.train(first + _APART * number)
            states.append(run.state())
        kinds = sp.kinds(run.model, run.optimizer)
        exact = run.held_out_loss()
        where = f"{workload.name}, {_LENGTH} checkpoints {_APART} steps apart, the last at step {run.step}"
        rows = []
        for system, made in SYSTEMS.items():
            options.say(f"{name}: {system}")
            chain = Chain(made)
            for state in states:
                chain.save(state, kinds)
            rows += _of_system(name, system, chain, states[-1], run, exact, where)
        return rows + _coders(name, states, where)


def _of_system(name: str, system: str, chain: Chain, state: State, run: Run, exact: float, where: str) -> list[Row]:
    restored = chain.restored()
    errors = l2_errors(state, restored)
    run.restore(restored)
    change = 100 * (run.held_out_loss() / exact - 1)
    said = ", ".join(f"{what} {value:.3g}" for what, value in errors.items())
    note = f"{where}; relative l2 error: {said}; held-out loss {change:+.3g} % at once"
    tensors = [x for x in torch.utils._pytree.tree_leaves(state) if isinstance(x, torch.Tensor)]
    whole, weights = sum(x.nbytes for x in tensors), sum(x.nbytes for x in state["model"].values())
    rows = Rows(name)
    for part, ratio in (("whole state", whole / chain.saved.nbytes), ("weights", weights / chain.weights)):
        rows.add(f"{system}, {part}, late delta", ratio, "x", note=note, size=run.workload.parameters)
    return rows


def _coders(name: str, states: list[State], where: str) -> list[Row]:
    """Bits of ExCP's codes by each coder, with the residuals' codes before as contexts."""
    how, size, bits = ExCP(), 0, dict.fromkeys(("packed, zstandard", "Kim and Belyaev", "ours"), 0)
    last: dict[str, Any] = {}
    for before, state in itertools.pairwise(states[-3:]):
        for part, quantized in how.shrunk(parts(state), parts(before)):
            if quantized is None or part.role != "weight":
                continue
            codes = quantized[1]
            if part.key in last:
                size += codes.size
                packed = zstandard.ZstdCompressor(ZSTD_LEVEL).compress(pack_bits(codes, how.bits).tobytes())
                bits["packed, zstandard"] += 8 * len(packed)
                bits["Kim and Belyaev"] += 8 * coded_size(codes, last[part.key], part.spec)
                columns = codes.size // part.spec.shape[0]
                bits["ours"] += 8 * len(in_context(codes, last[part.key], 16, 1.0, Matrix(columns))[0].done())
            last[part.key] = codes
    note = f"{where}; ExCP's 4-bit codes of exact residuals, in the context of the residuals' codes before them"
    rows = Rows(name)
    for coder, count in bits.items():
        rows.add(f"coder of the same codes, {coder}", count / size, "bits", note=note, size=size)
    return rows


EXPERIMENTS = (Experiment("Prior art", compared),)
