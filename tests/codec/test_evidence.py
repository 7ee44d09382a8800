"""Evidence: an array changes only if its role is known; all others are restored exactly."""

from __future__ import annotations

import copy
import math
import warnings
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import shrinkpoint as sp

from .common import difference

QUIET = "ignore:.*of the float bytes stay exact:UserWarning"


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whys(state: Any, **how: Any) -> dict[str, tuple[bool, str]]:
    """Return for each array whether it is exact, and the reason."""
    ckpt = sp.compress(state, **how)
    back = sp.compress(sp.decompress(ckpt), cfg=sp.presets.lossless())
    values = {row.path: (row, after) for row, after in zip(ckpt.summary(), back.summary(), strict=True)}
    return {path: (row.measure == "exact", row.why) for path, (row, _) in values.items()}


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, features: int, steps: int = 3) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(drawn(16, features, seed=step)).square().mean().backward()
        optimizer.step()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64))


# ------------------------------------------------------------------------------- weights: which of them may change


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_parameters_that_entries_belong_to_may_change(flat: bool, named: bool) -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, 64)
    if named or flat:
        weights, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    else:
        weights, state = model.state_dict(), optimizer.state_dict()
    found = whys({"model": weights, "optimizer": state})
    assert found["model/0.weight"] == (False, "structure: an optimizer entry belongs to it")
    assert found["model/1.weight"] == (True, "exact: norm")
    assert found["model/0.bias"] == (True, "exact: bias")
    moments = [path for path in found if "exp_avg" in path and ("0.weight" in path or "/0/" in path)]
    assert len(moments) == 2
    assert not any(found[path][0] for path in moments)


@pytest.mark.parametrize("kinds", [False, True])
def test_a_frozen_parameter_stays_exact_and_costs_a_delta_nothing(kinds: bool) -> None:
    model = layers()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    trained(model, optimizer, 64)
    _, named = get_state_dict(model, optimizer)
    how = {"kinds": sp.kinds(model, optimizer)} if kinds else {}
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict() if kinds else named}
    base = sp.compress(state, **how)
    rows = {row.path: row for row in base.summary()}
    assert rows["model/0.weight"].measure == "exact"
    assert rows["model/2.weight"].error > 0
    assert torch.equal(sp.decompress(base)["model"]["0.weight"], model[0].weight)
    delta = {row.path: row for row in sp.compress(state, prev=base, **how).summary()}
    assert delta["model/0.weight"].stored_bytes < 64


@pytest.mark.filterwarnings(QUIET)
def test_a_parameter_in_no_group_of_the_optimizer_stays_exact() -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model[2].parameters())
    trained(model, optimizer, 64)
    found = whys({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, kinds=sp.kinds(model, optimizer))
    assert found["model/0.weight"][0]
    assert not found["model/2.weight"][0]
    # Without kinds, numbers and shapes do not agree: nothing is known then.
    found = whys({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert all(found[f"model/{i}.weight"][0] for i in (0, 2))


def test_a_frozen_parameter_among_the_groups_is_told_by_its_missing_entry() -> None:
    model = layers()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, 64)
    found = whys({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert found["model/0.weight"] == (True, "frozen: no optimizer entry belongs to it")
    assert not found["model/2.weight"][0]


@pytest.mark.filterwarnings(QUIET)
def test_a_match_with_two_candidates_is_no_evidence() -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, 64)
    other = {k: v + 1 for k, v in model.state_dict().items()}
    found = whys({"a": model.state_dict(), "b": other, "optimizer": optimizer.state_dict()})
    assert all(found[f"{tree}/0.weight"][0] for tree in "ab")
    # Shapes do not decide which of the two is an average.
    found = whys({"model": model.state_dict(), "ema": other, "optimizer": optimizer.state_dict()})
    assert not found["model/0.weight"][0]
    assert found["ema/0.weight"][0]


def test_two_models_with_an_optimizer_each() -> None:
    one, other = layers(), nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (one, other)]
    for model, optimizer in zip((one, other), optimizers, strict=True):
        trained(model, optimizer, 64)
    state = {"G": one.state_dict(), "D": other.state_dict(), "optG": optimizers[0].state_dict()}
    found = whys({**state, "optD": optimizers[1].state_dict()})
    assert not any(found[path][0] for path in ("G/0.weight", "G/2.weight", "D/0.weight", "D/1.weight"))
    lists = {"models": [one.state_dict(), other.state_dict()], "optimizers": [o.state_dict() for o in optimizers]}
    found = whys(lists)
    assert not any(found[path][0] for path in ("models/0/0.weight", "models/1/1.weight"))


def test_two_optimizers_of_one_model() -> None:
    model = layers()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizers = [
        torch.optim.SGD(matrices, lr=0.1, momentum=0.9),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2]),
    ]
    for optimizer in optimizers:
        trained(model, optimizer, 64)
    found = whys({"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]})
    assert not any(found[f"model/{i}.weight"][0] for i in (0, 2))


def test_optimizers_that_claim_one_parameter_are_no_evidence() -> None:
    entry = {"exp_avg": drawn(64, 64), "exp_avg_sq": drawn(64, 64).square()}
    state = {"model": {"fc.weight": drawn(64, 64)}, "opt_a": {"state": {"fc.weight": entry}}}
    assert not whys(state)["model/fc.weight"][0]
    assert whys({**state, "opt_b": {"state": {"fc.weight": {k: v.clone() for k, v in entry.items()}}}})[
        "model/fc.weight"
    ][0]


def test_an_entry_of_another_shape_contradicts() -> None:
    entry = {"exp_avg": drawn(64, 64), "exp_avg_sq": drawn(64, 64).square()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sp.UnknownArraysWarning)
        found = whys({"model": {"fc.weight": drawn(64, 96)}, "optimizer": {"state": {"fc.weight": entry}}})
    assert all(exact for exact, _ in found.values())
    assert "another shape" in found["optimizer/state/fc.weight/exp_avg"][1]


# -------------------------------------------------------------------------------------- names, where nothing else is


@pytest.mark.no_evidence
@pytest.mark.parametrize(
    "state",
    [
        nn.Linear(64, 64).state_dict(),
        {"model": nn.Embedding(64, 64).state_dict()},
        {"model": nn.LSTM(32, 64).state_dict()},
        {"net": OrderedDict({"attn.in_proj_weight": drawn(96, 64)}), "epoch": 3},
        {"params": {"dense": {"kernel": np.float32(drawn(64, 64)), "bias": np.zeros(64, np.float32)}}},
        {"epoch": 3, "fc.weight": drawn(64, 64)},
    ],
)
def test_names_alone_are_no_evidence(state: Any) -> None:
    """A frozen layer, a buffer and a trained layer may have the same name and shape."""
    with pytest.warns(sp.UnknownArraysWarning, match="nothing says what these arrays are"):
        found = whys(state)
    assert all(exact for exact, _ in found.values())


@pytest.mark.no_evidence
@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize(
    "state",
    [
        {"model": {"freqs": drawn(64, 64)}},
        {"model": {"weight": drawn(4096)}},
        {"w": drawn(64, 64)},
        {"model": {"vq.codebook.weight": drawn(64, 64)}},
        {"quantizer": {"embedding.weight": drawn(64, 64)}},
        {"loader": {"weight": drawn(64, 64)}},
        {"more": {"replay": {"buffer.weight": drawn(64, 64)}}},
        {"scheduler": {"weight": drawn(64, 64)}},
        {"ema": {"fc.weight": drawn(64, 64)}},
        {"weight": drawn(64, 64), "learning rate": 0.1},
        [{"weight": drawn(64, 64)}, drawn(64, 64)][1:],
        {"obs_normalizer": {"weight": drawn(64, 64)}},
    ],
)
def test_what_no_name_says_is_exact(state: Any) -> None:
    assert all(exact for exact, _ in whys(state).values())
    assert difference(state, sp.decompress(sp.compress(state))) == ""


def test_with_an_optimizer_names_alone_are_no_evidence() -> None:
    state = {"fc.weight": {"exp_avg": drawn(64, 64), "exp_avg_sq": drawn(64, 64).square()}}
    found = whys({"model": {"fc.weight": drawn(64, 64), "frozen.weight": drawn(64, 64)}, "optimizer": {"state": state}})
    assert not found["model/fc.weight"][0]
    assert found["model/frozen.weight"] == (True, "frozen: no optimizer entry belongs to it")


# ------------------------------------------------------------------------------------------------------------- kinds


@pytest.mark.filterwarnings(QUIET)
def test_buffers_and_unknown_layers_stay_exact_with_kinds_too() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 64)
            self.points = nn.Parameter(drawn(2048, 3))
            self.register_buffer("freqs", drawn(64, 64))

    model = Layer()
    found = whys({"model": model.state_dict()}, kinds=sp.kinds(model))
    assert {path: exact for path, (exact, _) in found.items()} == {
        "model/points": True, "model/freqs": True, "model/fc.weight": False, "model/fc.bias": True,
    }  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    (model.fc(drawn(8, 64)).sum() + model.points.sum()).backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for how in ({}, {"kinds": sp.kinds(model, optimizer)}):
        # One record of three numbers a row: points, not a matrix.
        assert whys(state, **how)["model/points"][0]


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_kinds_of_a_wrapped_model_hold_for_it_and_not_for_a_copy(prefix: str, with_optimizer: bool) -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, 64)
    state: dict[str, Any] = {
        "model": {prefix + name: x for name, x in model.state_dict().items()},
        "fisher": {name: x.square() for name, x in model.state_dict().items()},
    }
    if with_optimizer:
        state["optimizer"] = optimizer.state_dict()
    rows = whys(state, kinds=sp.kinds(model, optimizer))
    assert rows[f"model/{prefix}0.weight"] == (False, "kinds: linear")
    assert rows["fisher/0.weight"] == (True, "kinds are those of model/")


@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize("kinds", [False, True])
@pytest.mark.parametrize("as_list", [False, True])
def test_arrays_in_the_shapes_of_the_trained_parameters_are_not_the_parameters(as_list: bool, kinds: bool) -> None:
    """A list of gradients or Fisher matrices agrees with the optimizer; the model with a frozen layer does not."""
    model = layers()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    trained(model, optimizer, 64)
    fisher = {n.replace(".", "_"): torch.rand_like(p) for n, p in model.named_parameters() if p.requires_grad}
    state = {
        "model": model.state_dict(),
        "fisher": list(fisher.values()) if as_list else fisher,
        "optimizer": optimizer.state_dict(),
    }
    rows = whys(state, kinds=sp.kinds(model, optimizer) if kinds else None)
    assert all(is_exact for path, (is_exact, _) in rows.items() if path.startswith("fisher/"))
    assert rows["model/2.weight"][0] is not kinds


@pytest.mark.parametrize("kinds", [False, True])
@pytest.mark.parametrize("key", ["late", "net"])
def test_torchs_averaged_model_is_exact_under_any_key(key: str, kinds: bool) -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, 64)
    average = torch.optim.swa_utils.AveragedModel(model)
    state = {"policy": model.state_dict(), key: average.state_dict(), "optimizer": optimizer.state_dict()}
    rows = whys(state, kinds=sp.kinds(model, optimizer) if kinds else None)
    assert not rows["policy/0.weight"][0]
    assert rows[f"{key}/module.0.weight"][0]
    del state["policy"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert whys(state)[f"{key}/module.0.weight"][0]


@pytest.mark.no_evidence
@pytest.mark.filterwarnings(QUIET)
@pytest.mark.parametrize(
    "state",
    [
        {"state": {"particles": {"v": drawn(64, 64).abs(), "m": drawn(64, 64), "momentum": drawn(64, 64)}}},
        {"simulation": {"state": {"mesh": {"v": drawn(64, 64).abs(), "mu": drawn(64, 64), "nu": drawn(64, 64).abs()}}}},
        {"env": {"state": {0: {"v": drawn(64, 64).abs(), "trace": drawn(64, 64)}}}},
        {"cache": {"state": {0: {"k": drawn(96, 64), "v": drawn(96, 64).abs()}}}},
        {"state.0.v": drawn(64, 64).abs(), "state.0.m": drawn(64, 64)},
        {"blocks": [{"mu": {"kernel": drawn(64, 64)}, "nu": {"kernel": drawn(64, 64).abs()}}]},
    ],
)
@pytest.mark.parametrize("with_optimizer", [False, True])
def test_short_names_are_moments_only_below_an_optimizer(state: dict[str, Any], with_optimizer: bool) -> None:
    """A velocity, a mass, the values of a cache; next to an optimizer as well."""
    others = dict(state)
    if with_optimizer:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters())
        trained(model, optimizer, 64)
        others |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert difference(state, {key: sp.decompress(sp.compress(others))[key] for key in state}) == ""


@pytest.mark.filterwarnings(QUIET)
def test_a_part_that_kinds_do_not_mean_is_exact_in_all_its_arrays() -> None:
    """The model lacks a layer that an earlier copy has."""
    model = layers()
    weights = model.state_dict()
    state = {
        "model": {n: x for n, x in weights.items() if n[0] != "0"},
        "before": {n: x + 1 for n, x in weights.items()},
    }
    rows = whys(state, kinds=sp.kinds(model))
    assert rows["model/2.weight"] == (False, "kinds: linear")
    assert rows["before/2.weight"] == rows["before/0.weight"] == (True, "kinds are those of model/")


@pytest.mark.filterwarnings(QUIET)
def test_kinds_of_a_model_say_nothing_of_a_part_with_the_same_names() -> None:
    model = nn.Linear(64, 64)
    state = {"model": model.state_dict(), "more": {"replay": {"weight": drawn(64, 64)}}, "x": {"weight": drawn(64, 32)}}
    found = whys(state, kinds=sp.kinds(model))
    assert not found["model/weight"][0]
    assert found["more/replay/weight"][0]
    assert sp.kinds(model)["weight"].shape == (64, 64)


def test_a_rule_that_names_an_array_is_evidence() -> None:
    state = {"splats": {"xyz": drawn(4096, 3), "count": torch.arange(4096)}, "norm": {"weight": drawn(64, 64)}}
    cfg = sp.Config([("splats/*", sp.Quantize()), ("norm/*", sp.Quantize()), ("weight", sp.Quantize(bins=4))])
    found = whys(state, cfg=cfg)
    assert found["splats/xyz"] == (False, "rule 'splats/*'")
    assert found["splats/count"][0]
    assert found["norm/weight"][0]


@pytest.mark.filterwarnings(QUIET)
def test_a_rule_by_kind_needs_evidence() -> None:
    state = {"table": drawn(64, 64)}
    cfg = sp.Config([("weight", sp.Quantize()), ("linear", sp.Quantize())])
    assert whys(state, cfg=cfg)["table"][0]
    assert not whys(state, cfg=cfg, kinds={"table": "linear"})["table"][0]


# ----------------------------------------------------------------------------------------------------------- moments


@pytest.mark.parametrize(
    "spoil",
    [
        lambda e: e["exp_avg_sq"].view(-1)[5].neg_(),
        lambda e: e["exp_avg_sq"].view(-1)[5].fill_(math.nan),
        lambda e: e["exp_avg"].view(-1)[5].fill_(math.nan),
    ],
)
def test_moments_that_cannot_be_moments_are_exact(spoil: Any) -> None:
    entry = {"exp_avg": drawn(64, 64), "exp_avg_sq": drawn(64, 64).square() + 1e-3}
    state = {"optimizer": {"state": {0: entry}, "param_groups": [{"params": [0]}]}}
    assert not any(exact for exact, _ in whys(state).values())
    spoil(entry)
    restored = sp.decompress(sp.compress(state))["optimizer"]["state"][0]
    spoilt = {name for name, x in entry.items() if x.isnan().any() or (name == "exp_avg_sq" and (x < 0).any())}
    for name in spoilt | {"exp_avg"}:
        assert difference(entry[name], restored[name]) == ""


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.Adagrad(p), lambda p: torch.optim.Rprop(p), lambda p: torch.optim.ASGD(p),
])  # fmt: skip
def test_entries_that_are_not_known_moments_are_exact(make: Any) -> None:
    model = layers()
    optimizer = make(model.parameters())
    trained(model, optimizer, 64)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for how in ({}, {"kinds": sp.kinds(model, optimizer)}):
        found = whys(state, **how)
        assert all(exact for path, (exact, _) in found.items() if path.startswith("optimizer/"))
        assert not found["model/0.weight"][0]


class Normalized(torch.optim.AdamW):
    """As LaProp: `exp_avg` is an average of g / sqrt(v)."""

    def step(self, closure: Any = None) -> Any:
        for p in (p for group in self.param_groups for p in group["params"]):
            s = self.state[p]
            if not s:
                s |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            gradient = 1e3 * p.grad
            s["exp_avg_sq"].lerp_(gradient.square(), 0.01)
            s["exp_avg"].lerp_(gradient / (s["exp_avg_sq"].sqrt() + 1e-8), 0.1)


class Renamed(torch.optim.AdamW):
    """AdamW under another name."""


class Wrapped:
    """As Accelerate's: another class around the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self) -> None:
        self.optimizer.step()


@pytest.mark.parametrize(
    ("make", "paired"),
    [
        (torch.optim.AdamW, True),
        (Renamed, True),
        (lambda p: Wrapped(torch.optim.AdamW(p)), True),
        (Normalized, False),
        (lambda p: Wrapped(Normalized(p)), False),
    ],
)
def test_first_moments_are_in_units_of_the_second_only_for_optimizers_that_are_known(make: Any, paired: bool) -> None:
    model = layers()
    optimizer = make(model.parameters())
    trained(model, optimizer, 64)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    rows = {row.path: row for row in sp.compress(state, kinds=sp.kinds(model, optimizer)).summary()}
    assert (rows["optimizer/state/0/exp_avg"].stream == "grid") == paired
    assert rows["optimizer/state/0/exp_avg"].error <= (0.58 if paired else 0.25)


SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}


@pytest.mark.parametrize(
    ("settings", "more", "paired"),
    [
        ({}, {}, True),
        (SETTINGS, {}, True),
        (SETTINGS | {"amsgrad": False, "tag": "head"}, {}, True),
        (SETTINGS | {"weight_decouple": True}, {}, False),
        (SETTINGS | {"amsgrad": False, "centered": False}, {}, False),
        ({"lr": 1e-3}, {}, False),
        ({}, {"max_exp_avg_sq": drawn(64, 64).square() + 9}, True),
        ({}, {"previous_grad": 9 * drawn(64, 64)}, False),
    ],
)
def test_without_kinds_settings_and_entries_may_contradict_a_pair(settings: Any, more: Any, paired: bool) -> None:
    entry = {"exp_avg": drawn(64, 64), "exp_avg_sq": drawn(64, 64).square() + 1e-3, **more}
    state = {"optimizer": {"state": {0: entry}, "param_groups": [{"params": [0], **settings}]}}
    rows = {row.path.rpartition("/")[2]: row for row in sp.compress(state).summary()}
    assert (rows["exp_avg"].stream == "grid") == paired
    assert rows["exp_avg"].measure != "exact"


@pytest.mark.parametrize(("factor", "exact"), [(0.99, True), (1.5, False)])
def test_an_unknown_entry_whose_square_may_be_subtracted_keeps_the_second_moment_exact(
    factor: float, exact: bool
) -> None:
    square = drawn(64, 64).square() + 1e-3
    entry = {"exp_avg": drawn(64, 64), "exp_avg_sq": square, "exp_mean": factor * square.sqrt()}
    found = whys({"optimizer": {"state": {0: entry}}})
    assert found["optimizer/state/0/exp_avg_sq"][0] == exact
    assert found["optimizer/state/0/exp_mean"][0]


@pytest.mark.parametrize(("scale", "exact"), [(1.0, True), (0.5, False)])
def test_a_maximum_of_gradients_under_the_name_of_a_second_moment_is_exact(scale: float, exact: bool) -> None:
    """Optax's Adamax calls it `nu`; it bounds the first moment everywhere."""
    mu = {"dense": drawn(64, 64), "out": drawn(64, 64, seed=1)}
    nu = {name: scale * x.abs() for name, x in mu.items()}
    params = {name: x + 9 for name, x in mu.items()}
    found = whys({"params": params, "opt_state": {"0": {"count": torch.tensor(3), "mu": mu, "nu": nu}}})
    assert {found[f"opt_state/0/{tree}/{name}"][0] for tree in ("mu", "nu") for name in mu} == {exact}


@pytest.mark.filterwarnings(QUIET)
def test_an_optax_tree_without_a_count_is_no_first_moment() -> None:
    """SM3 keeps maxima over rows and columns in `mu`."""
    state = {"params": {"dense": drawn(64, 64)}, "opt_state": {"0": {"mu": {"dense": [drawn(64), drawn(64)]}}}}
    assert all(exact for path, (exact, _) in whys(state).items() if path.startswith("opt_state"))


def test_names_within_containers_of_an_entry_are_no_moments() -> None:
    blocks = [{"exp_avg": drawn(64, 64), "exp_avg_sq": drawn(64, 64).square()}]
    assert all(exact for exact, _ in whys({"optimizer": {"state": {0: {"blocks": blocks}}}}).values())


def test_moments_of_another_shape_than_their_parameter_are_exact() -> None:
    """As those of single rows (Nero) or of a mask (SPAM), with and without `kinds=`."""
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    trained(model, optimizer, 64)
    optimizer.state[model[0].weight]["exp_avg_sq"] = drawn(96, 1).square()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for how in ({}, {"kinds": sp.kinds(model, optimizer)}):
        found = whys(state, **how)
        assert found["optimizer/state/0/exp_avg_sq"][0]
        assert not found["optimizer/state/1/exp_avg_sq"][0]


@pytest.mark.parametrize("kinds", [False, True])
def test_an_average_of_the_weights_under_the_name_of_a_moment_is_exact(kinds: bool) -> None:
    """AccSGD calls one `momentum_buffer`."""
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained(model, optimizer, 64)
    optimizer.state[model[0].weight]["momentum_buffer"] = model[0].weight.detach() + 0.01 * drawn(96, 64)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    found = whys(state, kinds=sp.kinds(model, optimizer) if kinds else None)
    why = "exact: it follows the weights, not their gradients"
    assert found["optimizer/state/0/momentum_buffer"] == (True, why)
    assert not found["optimizer/state/1/momentum_buffer"][0]


# ----------------------------------------------------------------------------------------------------------- warnings


def test_a_base_that_stays_exact_for_want_of_evidence_says_so_once() -> None:
    state = {"u": drawn(64, 96), "v": drawn(64, 64), "fc.weight": drawn(64, 64)}
    with pytest.warns(sp.UnknownArraysWarning, match=r"71% .*: u, v.*kinds=sp.kinds\(model, optimizer\).*'u'"):
        base = sp.compress(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sp.compress(state, prev=base)
        sp.compress(state, cfg=sp.presets.lossless())
        sp.compress(state, cfg=sp.Config([("[uv]", sp.Exact())]))
        sp.compress({**state, "u": drawn(4, 4), "v": drawn(8, 8)})


@pytest.mark.filterwarnings(QUIET)
def test_tied_weights_count_once_while_they_share_memory() -> None:
    """Tied weights match the optimizer's one entry; copies are two arrays and need `kinds=`."""
    embed, out = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
    out.weight = embed.weight
    model = nn.ModuleDict({"embed": embed, "out": out})
    optimizer = torch.optim.AdamW(model.parameters())
    model["out"](model["embed"](torch.arange(64))).square().mean().backward()
    optimizer.step()
    tied = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert not whys(tied)["model/embed.weight"][0]
    copied = {**tied, "model": {name: x.clone() for name, x in tied["model"].items()}}
    found = whys(copied)
    assert found["model/embed.weight"] == (True, "the optimizer's parameters could not be matched")
    assert found["model/out.weight"][0]
    assert not whys(copied, kinds=sp.kinds(model, optimizer))["model/embed.weight"][0]


# ------------------------------------------------------------------------------------------------------ never a guess

NAMES = st.sampled_from(
    ["weight", "w", "kernel", "freqs", "exp_avg", "exp_avg_sq", "mu", "nu", "state", "0", "1", "model", "ema", "params",
     "optimizer", "fc.weight", "norm.weight", "loader", "momentum_buffer", "buffer", "v", "m"]
)  # fmt: skip


@pytest.mark.no_evidence
@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(NAMES, min_size=1, max_size=4), min_size=1, max_size=6))
def test_every_array_that_changes_has_evidence(paths: list[list[str]]) -> None:
    state: dict[str, Any] = {}
    for seed, keys in enumerate(paths):
        node = state
        for key in keys[:-1]:
            node = node.setdefault(key, {}) if isinstance(node.get(key, {}), dict) else {}
        node.setdefault(keys[-1], drawn(32, 40, seed=seed))
    if not state:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sp.UnknownArraysWarning)
        ckpt = sp.compress(state)
    back = sp.compress(sp.decompress(ckpt), cfg=sp.presets.lossless())
    for row in ckpt.summary():
        changed = row.measure != "exact"
        assert not changed or row.why.startswith(("structure: ", "name and shape")), row
    assert len(back.summary()) == len(ckpt.summary())


@pytest.mark.parametrize("best_first", [False, True])
def test_a_kept_best_model_with_its_optimizer_does_not_hide_the_trained_one(best_first: bool) -> None:
    """Each of two models belongs to the optimizer next to it, so that both may be lossy."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 64)).square().mean().backward()
    optimizer.step()
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    best: dict[str, Any] = {"best": copy.deepcopy(parts)}
    state = best | parts if best_first else parts | best
    for kinds in (None, sp.kinds(model, optimizer)):
        found = {row.path: row.codec for row in sp.compress(state, kinds=kinds).summary()}
        for tree in ("model", "best/model"):
            assert [found[f"{tree}/{layer}.weight"] for layer in (0, 2)] == ["quantize"] * 2, (tree, kinds is None)


def test_an_unknown_array_that_no_rule_can_name() -> None:
    x = torch.randn(64, 64)
    assert torch.equal(sp.decompress(sp.compress({"": x}))[""], x)
