"""Online updates: a serving model follows a training one, to the bit, and is left alone by what does not fit."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import shrinkpoint as sp
from shrinkpoint.trainers import apply_update

from ..codec.common import difference


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 16)
        self.norm = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 300, bias=False)
        self.out.weight = self.table.weight
        self.head = nn.Linear(16, 90)


def train(model: Net, optimizer: torch.optim.Optimizer) -> None:
    model.head(model.norm(model.table(torch.arange(8)))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("cfg", [sp.presets.lossless(), sp.Config(), sp.presets.check_n_run()])
def test_a_serving_model_follows_delta_by_delta(cfg: sp.Config) -> None:
    torch.manual_seed(0)
    trained, serving = Net(), Net()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    held: sp.Checkpoint | None = None
    sent: sp.Checkpoint | None = None
    for step in range(4):
        train(trained, optimizer)
        sent = sp.compress({"model": trained.state_dict(), "step": step}, prev=sent, cfg=cfg)
        done = apply_update(serving, sent.to_bytes(), held, lock=threading.Lock())
        held = done.checkpoint
        assert done.nbytes == sent.nbytes
        expected = sp.decompress(sent)["model"]
        assert difference(dict(serving.state_dict()), {n: expected[n] for n in serving.state_dict()}) == ""
        assert serving.out.weight is serving.table.weight
    assert held.id == sent.id  # type: ignore[union-attr]


def test_only_what_changed_is_written() -> None:
    model = Net()
    base = sp.compress(model.state_dict(), cfg=sp.presets.lossless())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["head.bias"][3] = -0.0 if float(state["head.bias"][3]) == 0.0 else 7.0
    delta = sp.compress(state, prev=base, cfg=sp.presets.lossless())
    versions = {name: tensor._version for name, tensor in model.state_dict().items()}
    entered: list[int] = []

    class Lock:
        def __enter__(self) -> None:
            entered.append(1)

        def __exit__(self, *_: object) -> None:
            pass

    done = apply_update(model, delta, base, prefix="", lock=Lock())  # type: ignore[arg-type]
    assert done.changed == ("head.bias",)
    assert entered == [1]
    moved = {name for name, tensor in model.state_dict().items() if tensor._version != versions[name]}
    assert moved == {"head.bias"}


def test_zeros_of_another_sign_and_nan_are_told_apart() -> None:
    model = nn.Linear(2, 1)
    for weight in ([0.0, 1.0], [-0.0, 1.0], [float("nan"), 1.0]):
        state = {"weight": torch.tensor([weight]), "bias": model.bias.detach().clone()}
        base = sp.compress(state, cfg=sp.presets.lossless())
        assert apply_update(model, base, prefix="").changed == ("weight",)
        assert apply_update(model, base, prefix="").changed == ()
        assert difference(dict(model.state_dict()), state) == ""


def test_what_does_not_fit_changes_nothing() -> None:
    model = nn.Linear(40, 40)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moved = {name: tensor + 1 for name, tensor in before.items()}
    base = sp.compress({"model": before})
    delta = sp.compress({"model": moved}, prev=base)
    other = sp.compress({"model": moved})
    blob = delta.to_bytes()
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (blob, None, sp.MissingParentError, "without its parent"),
        (blob, other, sp.MissingParentError, "the parent is"),
        (blob[:-1] + bytes([blob[-1] ^ 1]), base, sp.CorruptDataError, "check"),
        (sp.compress({"model": {"weight": moved["weight"]}}), None, sp.BadArgumentError, "bias: not in the update"),
        (sp.compress({"model": moved | {"x": torch.ones(1)}}), None, sp.BadArgumentError, "x: not in the model"),
        (sp.compress({"model": moved | {"bias": torch.ones(41)}}), None, sp.BadArgumentError, r"\(41,\) in the update"),
        (sp.compress({"model": {n: t.double() for n, t in moved.items()}}), None, sp.BadArgumentError, "float64"),
        (sp.compress({"weights": moved}), None, sp.BadArgumentError, "has no 'model'; it holds weights"),
        (sp.compress({"model": [1]}), None, sp.BadArgumentError, "no state dict but a list"),
        (3, None, sp.BadArgumentError, "must be bytes or a Checkpoint, not int"),
    ]
    for update, current, error, why in cases:
        with pytest.raises(error, match=why):
            apply_update(model, update, current)
        assert difference(dict(model.state_dict()), before) == ""
    with pytest.raises(sp.BadArgumentError, match=r"must be a torch\.nn\.Module"):
        apply_update(3, blob, base)  # type: ignore[arg-type]


def test_not_strict_takes_what_both_have() -> None:
    model = nn.Linear(4, 4)
    update = sp.compress({"model": {"weight": torch.ones(4, 4), "more": torch.ones(2)}})
    bias = model.bias.detach().clone()
    assert apply_update(model, update, strict=False).changed == ("weight",)
    assert torch.equal(model.bias, bias)
