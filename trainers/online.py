"""Online updates: a model that is serving takes over one incremental checkpoint after another, tensor by tensor."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..codec.checkpoint import ArrayRecord, Checkpoint, check_resolved
from ..codec.state import tree
from ..codec.state.leaves import build_leaf
from ..kernels.errors import BadArgumentError


@dataclass(frozen=True, slots=True)
class Update:
    """What `apply_update` did.

    Args:
        checkpoint: the model's state now, resolved: `current` of the next update.
        changed: names of the tensors that were written, those that did not change left out.
        nbytes: bytes of the update.
    """

    checkpoint: Checkpoint
    changed: tuple[str, ...]
    nbytes: int


def apply_update(
    model: nn.Module,
    update: bytes | Checkpoint,
    current: Checkpoint | None = None,
    *,
    prefix: str = "model",
    lock: AbstractContextManager[Any] | None = None,
    strict: bool = True,
) -> Update:
    """Bring a model from one checkpoint to the next, in place.

    The update is checked whole before anything is written: its checksums, its parent, names, shapes and dtypes. Then
    tensors are decoded and written one at a time, so one decoded tensor is held beside the model and `current`. Until
    it returns, readers that do not take `lock` see old and new tensors side by side.

    Args:
        model: the module, on any device.
        update: a checkpoint's bytes, or the checkpoint; a delta over `current`, or a base.
        current: what the model holds, resolved; None where `update` is a base.
        prefix: key of the model's state dict in the checkpoint; "": the checkpoint is the state dict.
        lock: entered for each tensor while it is written; may be entered again and again (`threading.Lock`).
        strict: the checkpoint has exactly the tensors of the model; False: those that both have are taken over.

    Returns:
        What changed, and the checkpoint for the next update.

    Raises:
        MissingParentError: `update` is a delta over another checkpoint; the model is as it was.
        CorruptDataError: `update` is damaged; the model is as it was.
        BadArgumentError: it has no such prefix, or its tensors are not the model's; the model is as it was.

    Example:
        >>> import shrinkpoint as sp
        >>> model, exact = nn.Linear(2, 1), sp.presets.lossless()
        >>> base = sp.compress({"model": model.state_dict()}, cfg=exact)
        >>> moved = {"weight": torch.ones(1, 2), "bias": model.bias.detach()}
        >>> delta = sp.compress({"model": moved}, prev=base, cfg=exact)
        >>> done = apply_update(model, delta.to_bytes(), base)
        >>> done.changed, model.weight.tolist()
        (('weight',), [[1.0, 1.0]])

    Source: Check-N-Run, section 2 (publishing models for inference while they train).
    """
    if not isinstance(model, nn.Module):
        raise BadArgumentError(f"model must be a torch.nn.Module, not {type(model).__qualname__}")
    ckpt = _resolved(update, current)
    places = _places(ckpt, prefix)
    targets = model.state_dict()
    lines = _misfits(targets, places, strict)
    if lines:
        shown = "\n  ".join(lines[:20])
        raise BadArgumentError(f"the update does not fit the model; nothing was changed\n  {shown}")
    changed = []
    guard = contextlib.nullcontext() if lock is None else lock
    with torch.no_grad():
        for name, record in places.items():
            if name not in targets:
                continue
            target = targets[name]
            new = torch.as_tensor(build_leaf(ckpt.values_of(record), record.spec)).to(target.device)
            if _same_bits(new, target):
                continue
            with guard:
                target.copy_(new)
            changed.append(name)
    return Update(ckpt, tuple(changed), ckpt.nbytes)


def _resolved(update: Any, current: Checkpoint | None) -> Checkpoint:
    if isinstance(update, (bytes, bytearray, memoryview)):
        ckpt = Checkpoint.from_bytes(update)
        return Checkpoint.from_bytes(update, current) if ckpt.is_delta and current is not None else check_resolved(ckpt)
    if not isinstance(update, Checkpoint):
        raise BadArgumentError(f"update must be bytes or a Checkpoint, not {type(update).__qualname__}")
    if not update.is_resolved and current is not None:
        return Checkpoint.from_bytes(update.to_bytes(), current)
    return check_resolved(update)


class _Array:
    """A place in the tree that an array stands at."""

    def __init__(self, record: ArrayRecord) -> None:
        self.record = record


def _places(ckpt: Checkpoint, prefix: str) -> dict[str, ArrayRecord]:
    """Names of a state dict's tensors with their records; tied ones have the same."""
    state = tree.unflatten(ckpt.header["tree"], lambda number, _place: _Array(ckpt.records[number]))
    if prefix:
        if not isinstance(state, dict) or prefix not in state:
            held = ", ".join(map(str, state)) if isinstance(state, dict) else type(state).__qualname__
            raise BadArgumentError(f"the update has no {prefix!r}; it holds {held}")
        state = state[prefix]
    if not isinstance(state, dict):
        raise BadArgumentError(f"the update's {prefix or 'tree'} is no state dict but a {type(state).__qualname__}")
    return {str(name): place.record for name, place in state.items() if isinstance(place, _Array)}


def _misfits(targets: dict[str, Any], places: dict[str, ArrayRecord], strict: bool) -> list[str]:
    lines = []
    if strict:
        lines += [f"{name}: not in the update" for name, t in targets.items() if name not in places and _is_tensor(t)]
        lines += [f"{name}: not in the model" for name in places if name not in targets]
    for name, record in places.items():
        if name in targets:
            mine = str(targets[name].dtype).removeprefix("torch."), tuple(targets[name].shape)
            if mine != (record.spec.dtype, record.spec.shape):
                lines.append(f"{name}: {record.spec.dtype} {record.spec.shape} in the update, {mine[0]} {mine[1]} here")
    return lines


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit: 0.0 is not -0.0, and a NaN is itself."""
    if a.numel() == 0:
        return True
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
