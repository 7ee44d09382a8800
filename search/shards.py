"""Sketches of a model whose arrays are spread over processes: counts add up, so merging is one all-reduce.

Thresholds read from merged sketches are those of the whole model, though no process holds it. This is for parts that
are plain arrays; of a DTensor `compress` and `search` gather the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..codec.errors import BadArgumentError
from ..codec.weights.partition import Sketch
from ..kernels.histogram import Histogram
from .team import Team


def merge_sketches(sketches: Sequence[Sketch], group: Any) -> list[Sketch]:
    """The sketches of whole arrays from those of each process's parts.

    Args:
        sketches: of the same arrays in the same order on every process, each of this process's part of it (an empty
            part counts nothing); parts must not overlap, or what is held twice is counted twice.
        group: `torch.distributed` process group, all members of which call this.

    Returns:
        One sketch an array, the same on every process.

    Raises:
        BadArgumentError: the processes do not have sketches of the same arrays (number, layer type, format, bits).

    Source: Inshrinkerator, section 4.3 (mergeable sketches).
    """
    import torch
    import torch.distributed as dist

    team = Team(group)
    layout = [_layout(s) for s in sketches]
    if any(other != layout for other in team.all(lambda: layout)):
        raise BadArgumentError("the processes do not have sketches of the same arrays in the same order")
    parts = [h for s in sketches for h in (s.signed, s.sensitivity) if h is not None]
    if not parts:
        return list(sketches)
    counts = torch.from_numpy(np.concatenate([h.counts for h in parts]))
    if dist.get_backend(group) == "nccl":
        counts = counts.cuda()
    dist.all_reduce(counts, group=group)
    merged = iter(np.split(counts.cpu().numpy(), np.cumsum([h.counts.size for h in parts])[:-1]))

    def whole(histogram: Histogram | None) -> Histogram | None:
        return None if histogram is None else dataclasses.replace(histogram, counts=next(merged).copy())

    found = []
    for sketch in sketches:
        signed = dataclasses.replace(sketch.signed, counts=next(merged).copy())
        found.append(Sketch.of(sketch.layer, signed, whole(sketch.sensitivity)))
    return found


def _layout(sketch: Sketch) -> list[Any]:
    parts = (sketch.signed, sketch.sensitivity)
    return [sketch.layer, *([h.format, h.bits, h.counts.size] if h is not None else None for h in parts)]
