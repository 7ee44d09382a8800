"""Other lossy libraries for a state's floats: their bytes and the floats restored."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..peers import library
from .workloads import State

Floats = dict[str, Tensor]
SMALL = 4096
"""Elements below which an array is kept as it is, as 8-bit optimizers do."""


def floats_of(state: State) -> Floats:
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


def _bitsandbytes(floats: Floats, before: Floats | None) -> tuple[int, Floats]:
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


def _deltatensors(floats: Floats, before: Floats | None) -> tuple[int, Floats]:
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


LOSSY: dict[str, Callable[[Floats, Floats | None], tuple[int, Floats]]] = {
    "bitsandbytes 8-bit + zstd": _bitsandbytes,
    "deltatensors, quantized": _deltatensors,
}
"""Each gives its bytes and what comes back; `before` is what came back of the parent, or None for a base."""
