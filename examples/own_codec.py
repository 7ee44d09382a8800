"""A codec of your own: weights with fewer mantissa bits (docs/add-a-codec.md).

python examples/own_codec.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import zstandard

import shrinkpoint as sp
from shrinkpoint.codec.base import Leaf, Reference, Stored
from shrinkpoint.codec.groups import Coded, Stream
from shrinkpoint.codec.lossless.exact import Exact
from shrinkpoint.codec.moments.logbuckets import ValuesReference
from shrinkpoint.codec.registry import register
from shrinkpoint.codec.state.leaves import check_memory, from_bytes
from shrinkpoint.kernels.backend.arguments import check_field, integer

NAME = "example.rounded"


def decode(coded: Coded) -> list[Reference]:
    """Decode a stream into an array, and check every field of it first."""
    spec, pieces = coded.spec, coded.pieces
    if spec.dtype != "float32" or len(pieces) != 1:
        raise sp.CorruptDataError(f"{NAME}: {len(pieces)} pieces of {spec.dtype}")
    check_memory(2 * spec.nbytes, NAME)
    try:
        data = zstandard.ZstdDecompressor().decompress(bytes(pieces[0]), max_output_size=spec.nbytes)
    except zstandard.ZstdError as e:
        raise sp.CorruptDataError(f"{NAME}: {e}") from None
    if len(data) != spec.nbytes:
        raise sp.CorruptDataError(f"{NAME}: {len(data)} bytes, not {spec.nbytes}")
    planes = np.frombuffer(data, np.uint8).reshape(4, -1)
    return [ValuesReference(from_bytes(np.ascontiguousarray(planes.T).reshape(-1), spec))]


@register
@dataclass(frozen=True, slots=True)
class Rounded:
    """Keep `bits` mantissa bits (0 to 23) of float32: relative error up to `2**-(bits + 1)`."""

    bits: int = 7
    id: ClassVar[str] = NAME
    by_kind: ClassVar[bool] = False
    streams: ClassVar[dict[str, Stream]] = {NAME: Stream(decode, NAME)}

    def __post_init__(self) -> None:
        check_field(self, "bits", integer, 0, 23)

    def prepare(self, leaves: Sequence[Leaf], parents: Sequence[Reference | None]) -> Sequence[None]:
        """Do nothing: each array is coded by itself."""
        return [None] * len(leaves)

    def encode(self, leaf: Leaf, parent: Reference | None, plan: None = None) -> Stored:
        """Encode one array; arrays of other types are kept exactly, and the summary says so."""
        x = np.asarray(leaf.flat.cpu() if isinstance(leaf.flat, torch.Tensor) else leaf.flat)
        if leaf.spec.dtype != "float32" or not np.isfinite(x).all():
            return Exact().encode(leaf, parent)
        drop = 23 - self.bits
        half = (1 << drop) >> 1
        words = (x.view(np.uint32).astype(np.uint64) + half) >> drop << drop
        rounded = words.astype(np.uint32)
        rounded = np.where(np.isfinite(rounded.view(np.float32)), rounded, x.view(np.uint32))  # never infinite
        planes = rounded.view(np.uint8).reshape(-1, 4).T
        piece = zstandard.ZstdCompressor(3).compress(np.ascontiguousarray(planes).tobytes())
        size = np.abs(x)
        error = np.abs(rounded.view(np.float32) - x)[size > 0] / size[size > 0]
        reference = ValuesReference(from_bytes(rounded.view(np.uint8), leaf.spec))
        return Stored(NAME, {}, [piece], reference, float(error.max(initial=0.0)), "relative")


def main() -> float:
    """Test the codec: its JSON, its rule and its bound; return the ratio."""
    torch.manual_seed(0)
    state = {"model": {"layer.weight": torch.randn(512, 512), "layer.bias": torch.zeros(512)}}
    cfg = sp.Config([("linear", Rounded(bits=7))])
    assert sp.Config.from_json(cfg.to_json()) == cfg
    ckpt = sp.compress(state, cfg=cfg, kinds={"layer.weight": "linear"})
    ckpt = sp.Checkpoint.from_bytes(ckpt.to_bytes())
    for row in ckpt.summary():
        print(f"{row.path}: {row.codec}, {row.raw_bytes:,} -> {row.stored_bytes:,} bytes, error {row.error:.2g}")
    assert [row.codec for row in ckpt.summary()] == [NAME, "exact"]
    weight, restored = (tree["model"]["layer.weight"] for tree in (state, sp.decompress(ckpt)))
    assert float(((restored - weight).abs() / weight.abs()).max()) <= 2**-8
    return ckpt.ratio


if __name__ == "__main__":
    print(f"{main():.2f} to 1")
