"""States that lie on a GPU: quantized there, so that only stored bytes cross to the host.

Held against copying the state once on the device, and once to the host, which is the least that a save without
compression does. Restoring has no row: a file is decoded on the host, and `bench codec` times that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

import shrinkpoint as sp

from .data import Pair
from .devices import Device, gpu
from .harness import Case, CheckFailed, Job, Options, Peer, Row, run_cases
from .whole_states import check_errors

TO_HOST = "copy to the host"
PLACE = "from a GPU"
"""Distinguishes its rows from those of the host's states."""
_BYTES = 60
"""Memory of the GPU a parameter: two AdamW states of 12 bytes, both ends of a copy, and what coding needs next to."""


def wanted(label: str, options: Options) -> bool:
    """Return whether any of the rows is asked for."""
    asked = [options.wanted(name(kind, label)) for kind in ("base", "delta")]  # both, so that `--only` can list them
    return any(asked)


def name(kind: str, label: str) -> str:
    """Row name of a base or delta."""
    return f"compress {kind} {PLACE}, default, {label}"


def rows(pair: Pair, label: str, options: Options) -> list[Row]:
    """Compress a base and the delta after it, measured where there is a GPU."""
    card = gpu()
    return run_cases(cases(card, pair, label), options, card.clock)


def cases(card: Device, pair: Pair, label: str) -> list[Case]:
    """Return the cases; without a GPU or room for the states they say so.

    Args:
        card: where the state is.
        pair: the states, on the host.
        label: as `bench codec` names the state.
    """
    size = pair.parameters
    work = _Work(card, pair)
    return [
        Case(
            name(kind, label),
            size,
            "MB/s",
            make,
            card.name,
            peers=(card.floor, TO_HOST),
            missing=card.missing or no_room(card, size),
        )
        for kind, make in (("base", work.base), ("delta", work.delta))
    ]


def no_room(card: Device, parameters: int) -> str:
    """Return why a state of this size cannot be measured on the device; "" if it can."""
    if not card.gpu:
        return ""
    free, _ = torch.cuda.mem_get_info()
    needed = parameters * _BYTES
    return f"needs {needed / 1e9:.0f} GB of the GPU's memory, {free / 1e9:.0f} are free" if needed > free else ""


class _Work:
    """The states of a pair on a device, made when they are first asked for."""

    def __init__(self, card: Device, pair: Pair) -> None:
        self.card, self.pair = card, pair

    @cached_property
    def before(self) -> Any:
        return self._there(self.pair.before)

    @cached_property
    def after(self) -> Any:
        return self._there(self.pair.after)

    @cached_property
    def parent(self) -> sp.Checkpoint:
        return sp.compress(self.before)

    def _there(self, state: Any) -> Any:
        """Move the tensors to the device; AdamW's step counts stay on the host, as in PyTorch."""

        def moved(x: Any) -> Any:
            return self.card.array(x.numpy()) if isinstance(x, torch.Tensor) and x.ndim else x

        return torch.utils._pytree.tree_map(moved, state)

    def base(self) -> Job:
        return self._job(self.pair.before, self.before, None)

    def delta(self) -> Job:
        return self._job(self.pair.after, self.after, self.parent)

    def _job(self, on_host: Any, state: Any, parent: sp.Checkpoint | None) -> Job:
        stored = sp.compress(state, parent)

        def check() -> str:
            if sp.compress(state, parent).to_bytes() != stored.to_bytes():
                raise CheckFailed("the same state gives other bytes the second time")
            return check_errors(on_host, sp.decompress(stored), stored)

        note = f"ratio {stored.ratio:.2f}, {stored.raw_nbytes / 1e6:.1f} MB raw; {self.pair.origin}"
        floors = [self.card.copy(stored.raw_nbytes), Peer(TO_HOST, lambda: self._to_host(state))]
        return Job(lambda: sp.compress(state, parent), check, float(stored.raw_nbytes), floors, note)

    def _to_host(self, state: Any) -> Callable[[], object]:
        """Copying all tensors to page-locked memory that is there already."""
        sources = [torch.as_tensor(x) for x in torch.utils._pytree.tree_leaves(state) if hasattr(x, "shape")]
        places = [torch.empty(x.shape, dtype=x.dtype, pin_memory=self.card.gpu) for x in sources]

        def call() -> None:
            for place, source in zip(places, sources, strict=True):
                place.copy_(source, non_blocking=True)

        return call
