"""Averages of the weights by torch, timm and diffusers.

`kinds(averages=)` and `save(ema=)` take them.
Where timm or diffusers is not installed, a stand-in has its attributes and the layout of its state.
"""

from __future__ import annotations

import copy
import importlib.util
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shrinkpoint as sp
from shrinkpoint import trainers

DECAY = 0.75


class ModuleAverage(nn.Module):
    """As timm's ModelEmaV2 and ModelEmaV3: a copy of the model as `module`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module, self.decay = copy.deepcopy(model).eval(), DECAY

    def update(self, model: nn.Module) -> None:
        with torch.no_grad():
            for mine, other in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
                mine.copy_(DECAY * mine + (1 - DECAY) * other)


class ListedAverage:
    """As diffusers' EMAModel: `shadow_params` in the order of parameters, and counters."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow_params, self.optimization_step = [p.detach().clone() for p in model.parameters()], 0

    def update(self, model: nn.Module) -> None:
        self.optimization_step += 1
        for mine, other in zip(self.shadow_params, model.parameters(), strict=True):
            mine.sub_((1 - DECAY) * (mine - other.detach()))

    def state_dict(self) -> dict[str, Any]:
        counters = {"optimization_step": self.optimization_step, "inv_gamma": 1.0, "power": None}
        return {"decay": DECAY, **counters, "shadow_params": self.shadow_params}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimization_step, self.shadow_params = state["optimization_step"], state["shadow_params"]


def of_torch(model: nn.Module) -> Any:
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))  # type: ignore[no-untyped-call]
    average.update = average.update_parameters
    return average


def of_timm(name: str) -> Callable[[nn.Module], Any]:
    def build(model: nn.Module) -> Any:
        package = importlib.util.find_spec("timm")
        if package is None or package.origin is None:
            pytest.skip("timm is not installed")
        # Its file alone: the package needs torchvision.
        path = Path(package.origin).parent / "utils" / "model_ema.py"
        spec = importlib.util.spec_from_file_location("timm_model_ema", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)(model, decay=DECAY)

    return build


def of_diffusers(model: nn.Module) -> Any:
    training = pytest.importorskip("diffusers.training_utils", reason="diffusers is not installed")
    average = training.EMAModel(model.parameters(), decay=DECAY)
    average.update = lambda model: average.step(model.parameters())
    return average


FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "torch AveragedModel": of_torch,
    "like timm": ModuleAverage,
    "like diffusers": ListedAverage,
    "timm ModelEmaV2": of_timm("ModelEmaV2"),
    "timm ModelEmaV3": of_timm("ModelEmaV3"),
    "diffusers EMAModel": of_diffusers,
}


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.Linear(96, 96))


def moved(model: nn.Module, average: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())), alpha=0.1)
    average.update(model)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
def test_declared_they_are_coded_as_weights(form: str) -> None:
    model = model_of()
    average = FORMS[form](model)
    moved(model, average)
    state = {"model": model.state_dict(), "ema": average.state_dict()}
    kinds = sp.kinds(model, averages={"ema": average})
    rows = [row for row in sp.compress(state, kinds=kinds).summary() if row.path.startswith("ema/")]
    matrices = [row for row in rows if len(row.shape) == 2]
    assert [row.why for row in matrices] == ["kinds: average"] * 2
    assert all(0 < row.error < 0.03 for row in matrices)
    assert all(row.measure == "exact" for row in rows if row not in matrices)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", FORMS)
def test_a_run_saves_and_resumes_them(form: str) -> None:
    """They are stored exactly by the default level too, and go on as the others would."""
    model = model_of()
    average = FORMS[form](model)
    moved(model, average)
    store = sp.Store(f"memory://averages-{uuid.uuid4()}")
    trainers.save(store, 3, model, ema=average)
    wanted = copy.deepcopy(average.state_dict())
    resumed = model_of()
    other = FORMS[form](resumed)
    assert trainers.resume(store, resumed, ema=other) == 3
    assert same(other.state_dict(), wanted)
    assert not same(resumed.state_dict(), model.state_dict())
    resumed.load_state_dict(model.state_dict())
    moved(model, average)
    moved(resumed, other)
    assert not same(other.state_dict(), wanted)
    assert same(other.state_dict(), average.state_dict())
