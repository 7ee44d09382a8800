"""`resume` decodes into the tensors that exist, unless it may refuse the checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shrinkpoint as sp
from shrinkpoint import trainers
from shrinkpoint.store.store import ThinnedCheckpointWarning

from ..codec.common import difference

WIDTH = 48


class Turned(nn.Linear):
    """A layer that stores its weight transposed, by a hook."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, bias=False)
        self.register_load_state_dict_pre_hook(self._turn)

    @staticmethod
    def _turn(_module: Any, state: dict[str, Any], prefix: str, *_more: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].t()


class Doubled(nn.Linear):
    """A layer that loads twice the saved values, by a method."""

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        state[f"{prefix}weight"] = 2 * state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, *more)  # type: ignore[no-untyped-call]


def run(seed: int, *more: nn.Module, optimizer: str = "AdamW") -> dict[str, Any]:
    """Return the parts of a run after one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *more, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 2 * WIDTH))
    ema = torch.optim.swa_utils.AveragedModel(model)
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    model(torch.randn(5, WIDTH)).square().sum().backward()
    made.step()
    ema.update_parameters(model)
    return {"model": model, "optimizer": made, "ema": ema}


def tree(parts: dict[str, Any]) -> Any:
    return sp.decompress(sp.compress(trainers.TrainingState(**parts).tree(0), cfg=sp.presets.lossless()))


def large(parts: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the large tensors that the parts hold."""
    found = dict(parts["model"].named_parameters())
    found |= {f"ema.{name}": p for name, p in parts["ema"].named_parameters()}
    entries = parts["optimizer"].state.items()
    found |= {f"{i}.{k}": v for i, (_, entry) in enumerate(entries) for k, v in entry.items()}
    return {name: t for name, t in found.items() if t.nbytes > 1 << 12}


@pytest.mark.parametrize("preset", ["default", "lossless", "check_n_run"])
@pytest.mark.parametrize("url", ["{}", "memory://resume-in-place{}"])
def test_live_tensors_get_the_values_that_new_ones_would(tmp_path: Path, preset: str, url: str) -> None:
    cfg = sp.Config() if preset == "default" else getattr(sp.presets, preset)()
    store = sp.Store(url.format(tmp_path), cfg)
    for step in range(3):
        trainers.save(store, step, **run(step))
    fresh = run(9)
    fresh["optimizer"] = torch.optim.AdamW(fresh["model"].parameters(), lr=0.1)
    for step in (2, 0):
        live = run(8)
        before = {name: t.data_ptr() for name, t in large(live).items()}
        assert len(before) == 8
        assert trainers.resume(store, **live, step=step) == trainers.resume(store, **fresh, step=step) == step
        assert {name: t.data_ptr() for name, t in large(live).items()} == before
        assert difference(tree(live), tree(fresh)) == ""


@pytest.mark.parametrize("layer", [Turned, lambda: Doubled(WIDTH, WIDTH, bias=False)])
def test_modules_that_change_what_they_load(tmp_path: Path, layer: Any) -> None:
    store = sp.Store(tmp_path, "lossless")
    saved = run(0, layer())
    trainers.save(store, 1, **saved)
    live, wanted = run(1, layer()), run(2, layer())
    assert trainers.resume(store, **live) == 1
    for name in ("model", "ema"):
        wanted[name].load_state_dict({k: v.clone() for k, v in saved[name].state_dict().items()})
    wanted["optimizer"].load_state_dict(saved["optimizer"].state_dict())
    assert difference(tree(live), tree(wanted)) == ""


def test_tensors_that_share_memory(tmp_path: Path) -> None:
    """One tensor with two names gets the later value, as from `load_state_dict`."""
    store = sp.Store(tmp_path, "lossless")
    saved = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    trainers.save(store, 1, saved)
    tied = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    tied[1].weight = tied[0].weight
    trainers.resume(store, tied)
    assert torch.equal(tied[0].weight, saved[1].weight)
    trainers.save(store, 2, tied)
    apart = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    trainers.resume(store, apart)
    assert all(torch.equal(layer.weight, saved[1].weight) for layer in apart)
    assert apart[0].weight.data_ptr() != apart[1].weight.data_ptr()


@pytest.mark.parametrize("what", ["other class", "thinned", "other parts", "no training"])
def test_what_is_refused_changes_nothing(tmp_path: Path, what: str) -> None:
    store = sp.Store(tmp_path, "lossless")
    parts = run(0, optimizer="Adam" if what == "other class" else "AdamW")
    if what == "no training":
        store.save(0, {"model": parts["model"].state_dict(), "step": 0})
    else:
        trainers.save(store, 0, parts["model"], parts["optimizer"], ema=None if what == "other parts" else parts["ema"])
    if what == "thinned":
        trainers.save(store, 1, **run(1))
        store.gc(sp.Retention(last=2, thin_after=1))
        assert store.describe(0).lacks
    live = run(5)
    before = tree(live)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ThinnedCheckpointWarning)
        with pytest.raises(sp.BadArgumentError):
            trainers.resume(store, **live, step=0)
    assert difference(before, tree(live)) == ""


def test_an_older_step_fills_live_tensors_if_the_newest_is_damaged(tmp_path: Path) -> None:
    store = sp.Store(tmp_path, "lossless")
    for step in (1, 2):
        trainers.save(store, step, **run(step))
    newest = max((tmp_path / "data").iterdir())
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    live, wanted = run(8), run(9)
    with pytest.warns(UserWarning, match="skipped step 2"):
        assert trainers.resume(sp.Store(tmp_path), **live) == 1
    trainers.resume(sp.Store(tmp_path), **wanted, step=1)
    assert difference(tree(live), tree(wanted)) == ""
