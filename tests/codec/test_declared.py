"""Averages, masters and iterates that `kinds` declares, and lone first moments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shrinkpoint as sp
from shrinkpoint.codec.evidence.kind import Kind

from .common import through_bytes

UNKNOWN = pytest.mark.filterwarnings("ignore::shrinkpoint.UnknownArraysWarning")


def model_of(dtype: torch.dtype = torch.float32, seed: int = 0, width: int = 96) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 96), nn.Linear(96, 96)).to(dtype)


def trained(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for step in range(steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (model(x) - x.repeat(1, 2)[:, :96]).square().mean().backward()
        optimizer.step()


def relative_l2(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((y.double() - x.double()).norm() / x.double().norm())


def rows_of(ckpt: sp.Checkpoint) -> dict[str, Any]:
    return {row.path: row for row in ckpt.summary()}


def masters_of(model: nn.Module) -> list[torch.Tensor]:
    """Return float32 values that round to the parameters."""
    drawn = torch.Generator().manual_seed(1)
    found = []
    for p in model.parameters():
        exact = p.detach().float()
        found.append(exact * (1 + (torch.rand(exact.shape, generator=drawn) - 0.5) * 2**-10))
        assert torch.equal(found[-1].to(p.dtype), p.detach())
    return found


def average_forms() -> dict[str, Any]:
    model = model_of()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    listed = {"decay": 0.9, "shadow_params": [p.detach().clone() for p in model.parameters()]}
    named = {name: p.detach().clone() for name, p in model.named_parameters()}
    return {
        "AveragedModel": (average, average.state_dict()),
        "state dict": (average.state_dict(), average.state_dict()),
        "by name": (named, named),
        "shadow_params": (listed, listed),
        "list": (listed["shadow_params"], listed["shadow_params"]),
    }


@UNKNOWN
@pytest.mark.parametrize("form", average_forms())
def test_declared_averages_are_coded_as_weights(form: str) -> None:
    """Each layout of averages is lossy with `averages=`, and exact without."""
    model = model_of()
    given, stored = average_forms()[form]
    state = {"model": model.state_dict(), "ema": stored}
    matrices = [
        path for path, row in rows_of(sp.compress(state)).items() if path.startswith("ema/") and len(row.shape) > 1
    ]
    assert len(matrices) == 3
    plain = rows_of(sp.compress(state, kinds=sp.kinds(model)))
    declared = sp.compress({"run": state}, kinds=sp.kinds(model, averages={"ema": given}))
    for path in matrices:
        assert plain[path].measure == "exact"
        row = rows_of(declared)[f"run/{path}"]
        assert row.why == "kinds: average"
        assert row.stream == "copy" or 0 < row.error < 0.03
    through_bytes(declared)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (lambda: model_of(width=80), "ema/0.weight has shape"),
        (lambda: nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 96)), "ema/1.weight: the module has no parameter"),
        (lambda: [p.detach() for p in model_of().parameters()][:-1], "ema has 5 arrays; the module has 6"),
        (lambda: [p.detach() for p in model_of().parameters()][::-1], "ema/0 has shape"),
        (lambda: {"shadow_params": [torch.zeros(3)]}, "ema/shadow_params has 1 arrays"),
        (lambda: [1.0] * 6, "ema/0 is a float"),
        (lambda: 3, "ema is a int"),
    ],
)
def test_averages_of_another_model_are_refused(given: Any, wrong: str) -> None:
    """The message names the path."""
    with pytest.raises(sp.BadArgumentError, match=wrong):
        sp.kinds(model_of(), averages={"ema": given()})


def test_arguments_of_the_wrong_type_are_refused() -> None:
    """Averages and masters need the module and keys."""
    model = model_of()
    for given in ({"averages": {"ema": model}}, {"masters": {"x": []}}):
        with pytest.raises(sp.BadArgumentError, match="need the module"):
            sp.kinds(**given)
        with pytest.raises(sp.BadArgumentError, match="must map the key"):
            sp.kinds(model, **{name: [1] for name in given})
        with pytest.raises(sp.BadArgumentError, match="non-empty string"):
            sp.kinds(model, **{name: {0: value} for name, value in given.items()})
    with pytest.raises(sp.BadArgumentError, match="no trained parameter has an entry 'master_param'"):
        sp.kinds(model, torch.optim.SGD(model.parameters()), masters="master_param")
    with pytest.raises(sp.BadArgumentError, match="declared is"):
        Kind("linear", declared="copy")


@UNKNOWN
def test_an_average_in_two_places_stays_exact() -> None:
    """Two paths that end in the key of one average are ambiguous."""
    model, average = model_of(), model_of(seed=1)
    kinds = sp.kinds(model, averages={"ema": average})
    ckpt = sp.compress({"a": {"ema": average.state_dict()}, "b": {"ema": model_of(seed=2).state_dict()}}, kinds=kinds)
    assert all(row.measure == "exact" for row in ckpt.summary())
    assert "several parts" in rows_of(ckpt)["a/ema/0.weight"].why


@UNKNOWN
def test_an_average_that_changes_its_shape_stays_exact() -> None:
    """Kinds hold for arrays of their own shape only."""
    model = model_of()
    kinds = sp.kinds(model, averages={"ema": model_of(seed=1)})
    ckpt = sp.compress({"model": model.state_dict(), "ema": model_of(seed=1, width=128).state_dict()}, kinds=kinds)
    assert rows_of(ckpt)["ema/0.weight"].measure == "exact"
    assert rows_of(ckpt)["ema/3.weight"].measure != "exact"


def test_averages_of_frozen_parameters_stay_exact() -> None:
    """An average of a frozen parameter is constant."""
    model, average = model_of(), model_of(seed=1)
    model[0].requires_grad_(False)
    state = {"model": model.state_dict(), "ema": average.state_dict()}
    rows = rows_of(sp.compress(state, kinds=sp.kinds(model, averages={"ema": average})))
    assert rows["ema/0.weight"].measure == "exact"
    assert rows["ema/2.weight"].measure != "exact"


@pytest.mark.parametrize("layout", ["lists", "names", "entry"])
def test_masters_are_coded_and_their_copies_cost_nothing(layout: str) -> None:
    """In each layout the 16-bit weights become copies of the masters."""
    model = model_of(torch.bfloat16)
    masters = masters_of(model)
    optimizer = torch.optim.AdamW(model.parameters())
    given: Any
    state: Any = {"model": model.state_dict()}
    if layout == "lists":
        given = {"fp32_from_fp16_params": [masters[:2], masters[2:]]}
        state["optimizer"] = given
    elif layout == "names":
        given = {"masters": dict(zip(dict(model.named_parameters()), masters, strict=True))}
        state |= given
    else:
        given = "master_param"
        for p, master in zip(model.parameters(), masters, strict=True):
            optimizer.state[p] = {"step": torch.tensor(1.0), "master_param": master}
        state["optimizer"] = optimizer.state_dict()
    ckpt = sp.compress(state, kinds=sp.kinds(model, optimizer, masters=given))
    rows = ckpt.summary()
    coded = [row for row in rows if row.why == "kinds: master"]
    assert len(coded) == 3
    assert all(0 < row.error < 0.03 for row in coded)
    assert [row.stream for row in rows if row.path.endswith(".weight") and row.dtype == "bfloat16"] == ["copy"] * 3
    through_bytes(ckpt)


def test_masters_in_another_order_are_refused() -> None:
    """Shape and values decide; layers of one shape differ in their values only."""
    model = model_of(torch.bfloat16)
    masters = masters_of(model)
    with pytest.raises(sp.BadArgumentError, match=r"masters: x/0 has shape \(96,\)"):
        sp.kinds(model, masters={"x": masters[::-1]})
    model = nn.Sequential(nn.Linear(96, 96, bias=False), nn.Linear(96, 96, bias=False)).bfloat16()
    masters = masters_of(model)
    with pytest.raises(sp.BadArgumentError, match=r"masters: x/0: its values are not those of 0\.weight"):
        sp.kinds(model, masters={"x": masters[::-1]})
    with pytest.raises(sp.BadArgumentError, match="masters: x has 1 arrays"):
        sp.kinds(model, masters={"x": masters[:1]})
    masters[0][3, 4] = torch.inf  # a run that diverges can still be saved
    assert sp.kinds(model, masters={"x": masters})["x/0"].declared == "master"


def made(name: str, model: nn.Module) -> Any:
    if name == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.01)


@pytest.mark.parametrize("name", ["SGD", "Muon"])
def test_momentum_is_on_a_grid_of_its_own_estimate(name: str) -> None:
    """With the class as evidence momentum is on a grid without bias, else in log buckets."""
    model = model_of()
    optimizer = made(name, model)
    trained(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    ckpt = sp.compress(state, kinds=sp.kinds(model, optimizer))
    restored = through_bytes(ckpt)
    path = "optimizer/state/0/momentum_buffer"
    assert rows_of(ckpt)[path].stream == "own-grid"
    assert rows_of(sp.compress(state))[path].stream == "log-buckets"
    m, n = (tree["optimizer"]["state"][0]["momentum_buffer"].double() for tree in (state, restored))
    assert float((m * n).sum() / (m * m).sum()) == pytest.approx(1, abs=0.01)
    error = relative_l2(m, n)
    assert error <= rows_of(ckpt)[path].error * 1.001 < (0.4 if name == "SGD" else 0.1)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30, 1e-30])
def test_momentum_that_no_grid_suits(value: float) -> None:
    """NaN makes it exact; infinities and extreme values keep their size."""
    model = model_of()
    optimizer = made("SGD", model)
    trained(model, optimizer)
    moment = optimizer.state[model[0].weight]["momentum_buffer"]
    moment.mul_(value) if abs(value) < 1e31 else moment[0, 0].fill_(value)
    if value != value:
        moment[0, 0] = torch.nan
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    ckpt = sp.compress(state, kinds=sp.kinds(model, optimizer))
    restored = through_bytes(ckpt)["optimizer"]["state"][0]["momentum_buffer"]
    row = rows_of(ckpt)["optimizer/state/0/momentum_buffer"]
    if value != value:
        assert row.measure == "exact"
        assert np.array_equal(restored.numpy(), moment.numpy(), equal_nan=True)
    elif value == torch.inf:
        assert torch.equal(restored.isinf(), moment.isinf())
    else:
        assert relative_l2(moment / value, restored / value) < 0.3


@UNKNOWN
def test_a_moment_that_changes_its_shape_is_exact() -> None:
    """Its kind is that of the shape that `kinds` saw."""
    model = model_of()
    optimizer = made("SGD", model)
    trained(model, optimizer)
    kinds = sp.kinds(model, optimizer)
    state: Any = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["optimizer"]["state"][0]["momentum_buffer"] = torch.randn(64, 64)
    row = rows_of(sp.compress(state, kinds=kinds))["optimizer/state/0/momentum_buffer"]
    assert row.measure == "exact"
