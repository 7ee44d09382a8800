"""Training states of many optimizers, schedulers and generators, resumed from bytes."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp

from .common import difference, known, round_trip, through_bytes

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW amsgrad, tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=1e-2, max_iter=3),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4, 9]),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=50),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ConstantLR(o)],
        milestones=[2],
    ),
}


class Job:
    def __init__(self, optimizer: Make, scheduler: Callable[[torch.optim.Optimizer], Any], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(12, 40), torch.nn.BatchNorm1d(40), torch.nn.Dropout(0.2), torch.nn.Linear(40, 1)
        )
        self.optimizer = optimizer(self.model.parameters())
        self.scheduler = scheduler(self.optimizer)

    def step(self) -> float:
        x = torch.randn(8, 12)

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

        loss = self.optimizer.step(closure)  # type: ignore[arg-type]
        if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(float(loss.detach()))
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.scheduler.step()
        return float(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self.scheduler.load_state_dict(copy.deepcopy(state["scheduler"]))
        torch.set_rng_state(state["rng"]["torch"])
        random.setstate(state["rng"]["python"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_to_the_bit_from_a_lossless_chain(name: str) -> None:
    _resumes(OPTIMIZERS[name], SCHEDULERS["CosineAnnealingLR"])


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_resumes_to_the_bit(name: str) -> None:
    _resumes(OPTIMIZERS["SGD momentum"], SCHEDULERS[name])


def _resumes(optimizer: Make, scheduler: Callable[[torch.optim.Optimizer], Any]) -> None:
    cfg = sp.presets.lossless()
    job = Job(optimizer, scheduler)
    blobs, prev = [], None
    for _ in range(3):
        job.step()
        job.step()
        prev = sp.compress(job.state(), prev, cfg)
        blobs.append(prev.to_bytes())
    after = [job.step() for _ in range(3)]
    read = None
    for blob in blobs:
        read = sp.Checkpoint.from_bytes(blob, read)
    state = sp.decompress(read)
    again = Job(optimizer, scheduler, seed=1)
    again.load(state)
    assert difference(state, again.state()) == "" or name_of_version_only(state, again.state())
    assert [again.step() for _ in range(3)] == after


def name_of_version_only(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return whether two states differ only in entries that torch changes on loading."""
    return all(difference(a[k], b[k]) == "" for k in ("model", "rng"))


def test_the_default_keeps_what_must_be_exact() -> None:
    """By default norms, biases, steps, generators and schedulers are exact."""
    job = Job(OPTIMIZERS["AdamW"], SCHEDULERS["OneCycleLR"])
    for _ in range(3):
        job.step()
    state = job.state()
    state["model"] = dict(state["model"]) | {"big.weight": torch.randn(64, 64), "final_norm.weight": torch.randn(4096)}
    back = round_trip(state, kinds={"model/big.weight": "linear"})
    assert difference(state["scheduler"], back["scheduler"]) == ""
    assert difference(state["rng"], back["rng"]) == ""
    for name, x in state["model"].items():
        assert name == "big.weight" or difference([x], [back["model"][name]]) == "", name
    assert difference(state["optimizer"]["param_groups"], back["optimizer"]["param_groups"]) == ""
    for number, entry in back["optimizer"]["state"].items():
        assert type(number) is int
        assert entry["step"].shape == ()
        assert float(entry["step"]) == 3.0


def test_unknown_optimizer_entries_are_never_lossy_by_guess() -> None:
    """Unknown optimizer entries are exact at any depth."""
    rng = np.random.default_rng(0)
    x = [rng.normal(size=(64, 64)).astype("f4") ** 2 for _ in range(6)]
    state = {
        "optimizer": {"state": {0: {"shampoo": {"L": x[0], "R": [x[1]]}, "exp_avg_sq_row": x[2], "hessian": x[3]}}},
        "optimizer_state": {"weight": {"second_order": x[4]}},
    }
    back = round_trip(state)
    assert difference(state["optimizer"], back["optimizer"]) == ""


def test_generator_states() -> None:
    random.seed(5)
    legacy = np.random.RandomState(3)
    legacy.randn()
    state = {
        "python": random.getstate(),
        "gauss": (random.gauss(0, 1), random.getstate()),
        "legacy": legacy.get_state(),
        "legacy dict": legacy.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "torch generator": torch.Generator().manual_seed(7).get_state(),
        **{
            kind.__name__: kind(11).state
            for kind in (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
        },
    }
    back = round_trip(state)
    assert difference(state, back) == ""
    random.setstate(back["python"])
    legacy.set_state(back["legacy"])
    legacy.set_state(back["legacy dict"])
    torch.Generator().set_state(back["torch generator"])
    for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64):
        bits = kind(1)
        bits.state = back[kind.__name__]
        assert np.random.Generator(bits).integers(1 << 60) == np.random.Generator(kind(11)).integers(1 << 60)


@pytest.mark.parametrize("path", ["layers/0/v", "model/layers/0/m", "decoder/3/nu", "state/layers/0/v"])
@pytest.mark.parametrize("kinds", [None, "attention", sp.Kind("attention")], ids=["none", "layer", "kind"])
def test_a_value_projection_is_no_second_moment(path: str, kinds: Any) -> None:
    """A layer called `v` is exact, or a weight if kinds say so."""
    x: Any = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for key in reversed(path.split("/")):
        x = {int(key) if key.isdigit() else key: x}
    with pytest.warns(sp.UnknownArraysWarning) if kinds is None else nullcontext():
        (row,) = sp.compress(x, kinds=None if kinds is None else {path: kinds}).summary()
    assert row.stream == ("bytes" if kinds is None else "levels")


@pytest.mark.parametrize("path", ["opt/0/v", "optimizer/7/nu", "my_optim/groups/0/v", "optimizer/state/w/v"])
def test_short_names_below_an_optimizer_are_moments(path: str) -> None:
    x: Any = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) * 1e-6 + 1e-9
    for key in reversed(path.split("/")):
        x = {int(key) if key.isdigit() else key: x}
    (row,) = sp.compress(x).summary()
    assert row.stream == "rank-one"


def test_biases_by_any_name_are_exact() -> None:
    modules = {
        "lstm": torch.nn.LSTM(8, 512, bidirectional=True),
        "gru": torch.nn.GRU(8, 512),
        "attention": torch.nn.MultiheadAttention(2048, 8, add_bias_kv=True),
    }
    for name, module in modules.items():
        for kinds in (None, sp.kinds(module)):
            rows = sp.compress(module.state_dict(), kinds=kinds).summary()
            assert [r.path for r in rows if "bias" in r.path and r.measure != "exact"] == [], name
            assert any(r.measure != "exact" for r in rows)


@pytest.mark.parametrize("arguments", [("x",), ({"a": 1},), (None, "x"), (torch.optim.SGD([torch.zeros(1)]),)])
def test_kinds_of_what_is_none_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(sp.BadArgumentError, match="which has no"):
        sp.kinds(*arguments)


@pytest.mark.parametrize(
    "cfg", [sp.Config(), sp.Config(rate=0.01), sp.presets.inshrinkerator(), sp.Config(max_rel_error=0.1)]
)
def test_what_diverged_does_not_grow(cfg: sp.Config) -> None:
    nan = torch.full((256, 256), float("nan"))
    mixed = nan.clone()
    mixed[::2] = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    state = {"model": {"weight": nan, "x": mixed, "emb.weight": -nan}, "optimizer": {"state": {0: {"exp_avg_sq": nan}}}}
    kinds = known("model/weight", "model/x", "model/emb.weight")
    base = sp.compress(state, cfg=cfg, kinds=kinds)
    delta = sp.compress(state, base, cfg, kinds=kinds)
    for ckpt in (base, delta):
        assert ckpt.nbytes < 0.8 * ckpt.raw_nbytes
        assert bool(through_bytes(ckpt, base if ckpt.is_delta else None)["model"]["weight"].isnan().all())
