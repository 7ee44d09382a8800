"""Lossless ratios of weights, single and as differences, against other libraries."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import shrinkpoint as sp
from shrinkpoint.kernels.planes import difference

from ... import coders
from ...devices import threads
from ...harness import CheckFailed, Options, Row, Rows, at_least
from ...peers import library
from .table import Experiment, states

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
        sizes = {how: coders.size(coder, [values]) for how, values in found.items()}
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
        return coders.size("z4ai", [now])
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


EXPERIMENTS = (Experiment("lossless ratio", compared),)
