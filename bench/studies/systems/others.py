"""Other libraries and systems on whole models: exact and lossy coders, ExCP."""

from __future__ import annotations

import contextlib
import io
import itertools
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

import shrinkpoint as sp
from shrinkpoint.codec.entropy import Matrix, in_context
from shrinkpoint.kernels.packing import pack_bits
from shrinkpoint.kernels.planes import difference

from ... import peers
from ...harness import CheckFailed, Options, Row, Rows, at_least, threads
from ...peers import library
from .. import workloads
from ..baselines.excp import ZSTD_LEVEL, ExCP, KimBelyaev, coded_size
from ..baselines.parts import parts
from ..workloads import Run, State
from .table import Chain, Experiment, l2_errors, states

Array = npt.NDArray[Any]
Model = dict[str, torch.Tensor]
Peer = Callable[[Model, Model | None], tuple[int, str]]
"""Bytes of a model, over another or alone, and the coded input."""


def _patterns(model: Model) -> Array:
    """Bit patterns of all arrays, one after the other."""
    words = {4: torch.uint32, 2: torch.uint16}
    found: Array = torch.cat([x.flatten().view(words[x.element_size()]) for x in model.values()]).numpy()
    return found


ARITHMETIC, XOR = "arithmetic differences of ordered patterns", "exclusive or of patterns"


def inputs(model: Model, before: Model | None) -> dict[str, Array]:
    """Return inputs for a coder of one array: bit patterns, or differences of either kind."""
    now = _patterns(model)
    if before is None:
        return {"patterns": now}
    old, dtype = _patterns(before), "float32" if now.itemsize == 4 else "bfloat16"
    return {ARITHMETIC: difference(now, old, "arithmetic", dtype=dtype), XOR: difference(now, old, "xor", dtype=dtype)}


def _smaller(coder: str) -> Peer:
    """Peer that codes each input of an array, and returns the fewest bytes."""

    def size(model: Model, before: Model | None) -> tuple[int, str]:
        found = inputs(model, before)
        if before is None and found["patterns"].itemsize == 4:
            found = {"patterns": found["patterns"].view(np.float32)}
        sizes = {how: peers.coded_size(coder, [values]) for how, values in found.items()}
        best = min(sizes, key=lambda how: sizes[how])
        others = [f"{size:,} bytes by {how}" for how, size in sizes.items() if how != best]
        return sizes[best], "; ".join([best, *others]) if others else ""

    return size


def _own(coder: Callable[[Model, Model | None], int], how: str) -> Peer:
    """Peer that computes differences itself."""
    return lambda model, before: (coder(model, before), how if before else "")


def _size(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def _moonclip(model: Model, before: Model | None) -> int:
    manager = library("moonclip").CheckpointManager
    with tempfile.TemporaryDirectory() as folder:
        store, size = manager(folder, async_save=False, world_size=1, rank=0), 0
        for step, state in enumerate(x for x in (before, model) if x is not None):
            size = _size(folder)
            store.save(step + 1, model=SimpleNamespace(state_dict=lambda state=state: state))
            store.flush()
        return _size(folder) - size


def _lmzip(model: Model, before: Model | None) -> int:
    lmz, save = library("lmz"), library("safetensors.torch").save_file
    with tempfile.TemporaryDirectory() as folder:
        archive, size = f"{folder}/weights.lmz", 0
        for number, state in enumerate(x for x in (before, model) if x is not None):
            path = f"{folder}/{number}.safetensors"
            save({name: x.contiguous() for name, x in state.items()}, path)
            if number == 0:
                lmz.compress(path, archive, workers=1)
            else:
                size = Path(archive).stat().st_size
                lmz.append(archive, path, workers=1)
        return Path(archive).stat().st_size - size


def _z4ai(model: Model, before: Model | None) -> int:
    now = _patterns(model)
    if before is None:
        return peers.coded_size("z4ai", [now])
    z4ai, data, old = library("z4ai"), now.tobytes(), _patterns(before).tobytes()
    packed = z4ai.compress_delta(data, old, dtype="fp32" if now.itemsize == 4 else "bf16", threads=1)
    if z4ai.decompress_delta(packed, old) != data:
        raise CheckFailed("z4ai does not restore its input")
    return len(packed)


PEERS: dict[str, Peer] = {
    **{name: _smaller(name) for name in ("zstd -19", "zipnn", "pcodec", "blosc2", "OpenZL")},
    "moonclip": _own(_moonclip, "its own difference, files of whole pages"),
    "lmzip": _own(_lmzip, "its own difference to what the archive holds"),
    "z4ai": _own(_z4ai, "its own difference"),
}


_FULL = tuple((dtype, apart) for dtype in (torch.float32, torch.bfloat16) for apart in (None, 1, 10))
_QUICK = ((torch.float32, None), (torch.bfloat16, 1))
"""Format, and steps between the two states of a difference; None: one state alone."""


def compared(name: str, options: Options) -> list[Row]:
    """Our exact ratio next to each peer's, and against the best of them."""
    found = states(options.quick)
    rows = Rows(name)
    with threads(1):
        for dtype, apart in _QUICK if options.quick else _FULL:
            models = {n: {k: v.to(dtype) for k, v in s["model"].items()} for n, s in found.after.items()}
            raw = sum(x.numel() * x.element_size() for x in models[0].values())
            model, before = models[apart or 0], None if apart is None else models[0]
            what = f"{str(dtype).removeprefix('torch.')}, {'single' if apart is None else f'{apart} steps apart'}"
            ours, rows.size = raw / _ours(model, before), raw
            ratios: dict[str, float] = {}
            for peer, size in PEERS.items():
                note = f"weights of {found.where()}, {raw:,} bytes"
                try:
                    stored, how = size(model, before)
                    ratios[peer] = raw / stored
                    note += f"; {how}" if how else ""
                except ImportError as error:
                    note = f"not measured: {error.name or error} is not installed"
                theirs = ratios.get(peer)
                rows.add(what, ours, "x", (peer, theirs), note, ratio=None if theirs is None else ours / theirs)
            if ratios:
                best, note = max(ratios, key=lambda peer: ratios[peer]), f"of {', '.join(ratios)}"
                peer_, ratio = (best, ratios[best]), ours / ratios[best]
                rows.add(f"{what}, the best", ours, "x", peer_, note, ratio=ratio, target=at_least(1))
    return rows


def _ours(model: Model, before: Model | None) -> int:
    """Bytes of all arrays, after a check that every bit is restored."""
    config = sp.presets.lossless()
    base = None if before is None else sp.compress(before, cfg=config)
    ckpt = sp.compress(model, base, config)
    again = sp.decompress(ckpt, base)
    if not all(torch.equal(again[name], x) for name, x in model.items()):
        raise CheckFailed("lossless: a tensor differs after its restore")
    return sum(part.stored_bytes for part in ckpt.summary())


# ------------------------------------------------------------------------------------------------------ lossy libraries

SMALL = 4096
"""Elements below which an array is kept as it is, as 8-bit optimizers do."""


def floats_of(state: State) -> Model:
    """The float arrays of a state by their paths."""
    found = torch.utils._pytree.tree_flatten_with_path(state)[0]
    return {
        torch.utils._pytree.keystr(path): leaf
        for path, leaf in found
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    }


def with_floats(state: State, floats: Mapping[str, Tensor]) -> State:
    """A state with its float arrays replaced."""

    def one(path: Any, leaf: Any) -> Any:
        return floats.get(torch.utils._pytree.keystr(path), leaf)

    replaced: State = torch.utils._pytree.tree_map_with_path(one, state)
    return replaced


def _zstd(data: bytes) -> int:
    return len(library("zstandard").ZstdCompressor(level=19).compress(data))


def _bitsandbytes(floats: Model, before: Model | None) -> tuple[int, Model]:
    """Every large array by dynamic 8-bit codes in blocks, then zstd: it has no differences."""
    functional = library("bitsandbytes.functional")
    codes, scales, kept = [], [], []
    restored = {}
    for path, x in floats.items():
        if x.numel() < SMALL:
            restored[path] = x
            kept.append(x.contiguous().numpy().tobytes())
            continue
        code, how = functional.quantize_blockwise(x.contiguous())
        restored[path] = functional.dequantize_blockwise(code, how).reshape(x.shape)
        codes.append(code.numpy().tobytes())
        scales.append(how.absmax.numpy().tobytes())
    return sum(_zstd(b"".join(part)) for part in (codes, scales, kept)), restored


def _deltatensors(floats: Model, before: Model | None) -> tuple[int, Model]:
    """8-bit differences to the parent; a base as safetensors and zstd."""
    if before is None:
        return _zstd(library("safetensors.torch").save({k: x.contiguous() for k, x in floats.items()})), floats
    deltatensors = library("deltatensors")
    shapes = {path: x.shape for path, x in floats.items()}
    now, old = ({p: x.reshape(max(1, x.numel())) for p, x in s.items()} for s in (floats, before))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "delta.wdelta"
        deltatensors.save_delta(path, now, old, strategy="quantized", use_gpu=False)
        found = deltatensors.load_delta(path, old)
        size = path.stat().st_size
    return size, {name: torch.as_tensor(found[name]).reshape(shape) for name, shape in shapes.items()}


LOSSY: dict[str, Callable[[Model, Model | None], tuple[int, Model]]] = {
    "bitsandbytes 8-bit + zstd": _bitsandbytes,
    "deltatensors, quantized": _deltatensors,
}
"""Each gives its bytes and what comes back; `before` is what came back of the parent, or None for a base."""


# ------------------------------------------------------------------------------------------------------------ prior art

_LENGTH, _APART = 6, 10


LATER: dict[str, Any] = {
    "exact_weights": sp.presets.exact_weights(),
    "Config()": sp.Config(),
    "compact": sp.presets.compact(),
    "ExCP": ExCP(),
    "Kim and Belyaev": KimBelyaev(),
}


def prior_art(name: str, options: Options) -> list[Row]:
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
        for system, made in LATER.items():
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


EXPERIMENTS = (Experiment("lossless ratio", compared), Experiment("Prior art", prior_art))
