"""Protection and pruning thresholds over the shards of all ranks.

Each rank counts its own weights in log buckets. The sum of the histograms of all ranks is the histogram of the whole
state, from which one rank computes the thresholds for all. Ranks send only the counts of the buckets in use, for each
codec and layer type: about 15 kB, for a model of any size.

Source: Inshrinkerator, sections 4.1 to 4.3 (global thresholds from mergeable sketches).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from ...codec.base import Codec, Leaf, Prepare, Reference
from ...codec.checkpoint import Checkpoint
from ...codec.config import Config
from ...codec.errors import ShrinkpointError
from ...codec.inputs import Inputs
from ...codec.plan import ArrayPlan, plan
from ...codec.weights import planning
from ...codec.weights.planning import Limits, Plan, Sketch
from ...codec.weights.quantize import Quantize
from ...kernels.quantizer import Thresholds


@dataclass(frozen=True, slots=True)
class Summary:
    """Sketches of one rank's weights of one codec.

    Args:
        sketches: one of the magnitudes of each layer type.
        before: its parent's thresholds, or None.
    """

    sketches: tuple[Sketch, ...]
    before: Thresholds | None


class Weights:
    """Sketches of a rank's weights whose codecs have global thresholds.

    Args:
        state: what will be compressed.
        cfg: how.
        kinds: as for `compress`.
        parent: checkpoint that it will be a delta against.

    Raises:
        BadArgumentError: pruning by sensitivity, which needs gradients.
        UnsupportedLeafError: a leaf that cannot be stored.
    """

    def __init__(self, state: Any, cfg: Config, kinds: Mapping[str, Any], parent: Checkpoint | None) -> None:
        planned = plan(replace(Inputs.of(state, parent, kinds), is_whole=False), cfg)
        groups: dict[Quantize, list[ArrayPlan]] = {}
        for one in planned:
            if isinstance(one.codec, Quantize) and (one.codec.protect or one.codec.prune):
                groups.setdefault(one.codec, []).append(one)
        self.sketches: dict[Quantize, dict[str, Sketch]] = {}
        self.summaries: dict[Quantize, Summary] = {}
        for codec, plans_of_codec in groups.items():
            group = [one.leaf for one in plans_of_codec]
            planning.check_gradients(codec, group)
            found = planning.sketched(codec, group)
            self.sketches[codec] = {leaf.key: sketch for leaf, sketch in zip(group, found, strict=True)}
            self.summaries[codec] = Summary(
                _by_layer(found), planning.thresholds_before([one.parent for one in plans_of_codec])
            )

    def prepared_by(self, decided: Mapping[Quantize, Limits]) -> dict[Codec, Prepare]:
        """Return functions that plan these weights under the given thresholds, by codec."""
        return {codec: partial(self._plans, codec, decided[codec]) for codec in self.sketches}

    def _plans(
        self, codec: Quantize, decided: Limits, leaves: Sequence[Leaf], parents: Sequence[Reference | None]
    ) -> list[Plan]:
        return planning.plans(codec, leaves, parents, [self.sketches[codec][leaf.key] for leaf in leaves], decided)


def _by_layer(sketches: Sequence[Sketch]) -> tuple[Sketch, ...]:
    """Merge the sketches of each layer type to one, which is sent to other ranks."""
    layers = dict.fromkeys(s.layer for s in sketches)
    return tuple(
        Sketch.of(layer, planning.magnitudes(s.values for s in sketches if s.layer == layer)) for layer in layers
    )


def decide(summaries: Sequence[Mapping[Quantize, Summary]]) -> dict[Quantize, Limits]:
    """Compute the thresholds of every codec from the summaries of all ranks."""
    decided = {}
    for codec in dict.fromkeys(codec for of_rank in summaries for codec in of_rank):
        received = [of_rank[codec] for of_rank in summaries if codec in of_rank]
        sketches = [sketch for summary in received for sketch in summary.sketches]
        before = next((summary.before for summary in received if summary.before is not None), None)
        decided[codec] = planning.limits(codec, sketches, before)
    return decided


def agree(mine: Mapping[Quantize, Summary] | Exception, group: Any) -> dict[Quantize, Limits]:
    """Compute thresholds over all ranks of a process group; a collective.

    Args:
        mine: this rank's summaries, or its error. The error is raised here, and the other ranks raise one that names
            this rank.
        group: the process group; None: the default one.

    Raises:
        ShrinkpointError: another rank met an error.
        RuntimeError: a rank is gone or does not answer (of torch, after the timeout of the process group).
    """
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    first = dist.get_global_rank(group, 0) if group is not None else 0
    received: list[Any] | None = [None] * world if rank == 0 else None
    sent = f"{type(mine).__name__}: {mine}" if isinstance(mine, Exception) else mine
    dist.gather_object(sent, received, dst=first, group=group)
    answer: list[Any] = [None]
    if received is not None:
        failed = [f"rank {number}: {what}" for number, what in enumerate(received) if isinstance(what, str)]
        answer = ["; ".join(failed)] if failed else [decide(received)]
    dist.broadcast_object_list(answer, src=first, group=group)
    if isinstance(mine, Exception):
        raise mine
    if isinstance(answer[0], str):
        raise ShrinkpointError(f"nothing was written, since another rank could not: {answer[0]}")
    decided: dict[Quantize, Limits] = answer[0]
    return decided
