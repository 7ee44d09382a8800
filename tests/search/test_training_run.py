"""A training with tracker, search, store and saver stores the searched configuration."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shrinkpoint as sp
from shrinkpoint.codec.errors import BadArgumentError
from shrinkpoint.searching import Cube

CUBE = Cube(bins=(8, 16, 32), prune=(0.0, 0.2), protect=(0.0005,))
EVERY, STEPS = 10, 40
SAVED = range(EVERY, STEPS + 1, EVERY)
CHAIN = sp.ChainPolicy(base_every=3)


class Saved:
    """Searches of a training, and the exact state at each."""

    def __init__(self) -> None:
        self.found: list[sp.SearchResult] = []
        self.parents: list[str | None] = []
        self.exact: list[dict[str, Any]] = []
        self.grads: list[dict[str, torch.Tensor] | None] = []


def training(kept: Saved | None, store: sp.Store | None, saver: sp.Saver | None) -> list[float]:
    """Train a small model with global generators; return its losses."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(16, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 4)
    )
    held_out = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(4, (64,)))
    probe = copy.deepcopy(model)  # in training mode, as one forgets
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tracker = sp.SensitivityTracker(model, every=EVERY, window=4) if kept is not None else None
    losses = []

    @torch.no_grad()
    def evaluate(restored: dict[str, Any]) -> float:
        probe.load_state_dict(restored["model"])
        batches = torch.utils.data.DataLoader(held_out, batch_size=32, shuffle=True)
        return sum(float(nn.functional.cross_entropy(probe(x), y)) for x, y in batches)

    for number in range(1, STEPS + 1):
        x = torch.randn(8, 16)
        loss = nn.functional.cross_entropy(model(x), (x[:, :4]).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if kept is None or tracker is None or store is None or number % EVERY:
            continue
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": number}
        kept.exact.append(copy.deepcopy(state))
        if saver is not None and (done := saver.wait()) is not None:
            store.follow(done.step)
        last = kept.found[-1] if kept.found else None
        parent, grads = store.parent, tracker.grads()
        kept.parents.append(None if parent is None else parent.id)
        kept.grads.append(grads)
        found = sp.search(
            state,
            evaluate,
            0.05,
            prev=parent,
            last=last,
            grads=grads,
            options=sp.SearchOptions(cube=CUBE, progress=False),
        )
        kept.found.append(found)
        (saver or store).save(number, state, grads=grads, cfg=found.config)
    if tracker is not None:
        tracker.remove()
    return losses


@pytest.mark.parametrize("how", ["store", "thread", "process"])
def test_the_losses_are_the_same_to_the_bit_and_what_was_searched_is_saved(how: str, tmp_path: Path) -> None:
    plain = training(None, None, None)
    kept, store = Saved(), sp.Store(tmp_path / how, sp.Config(chain=CHAIN))
    if how == "store":
        losses = training(kept, store, None)
    else:
        with sp.Saver(store, mode=how) as saver:
            losses = training(kept, store, saver)
    assert losses == plain
    reader = sp.Store(tmp_path / how)
    assert reader.steps() == list(SAVED)
    bases = [not reader.read(step).is_delta for step in SAVED]
    # The store's chain policy decides on bases, not the search, and the search knew it.
    assert bases == [True, False, False, True]
    assert [p is None for p in kept.parents] == bases
    assert any(f.met for f in kept.found)
    assert len({f.config for f in kept.found} | {sp.Config()}) > 1
    prev = None
    for number, (step, found) in enumerate(zip(SAVED, kept.found, strict=True)):
        stored = reader.read(step)
        prev = None if bases[number] else prev
        assert kept.parents[number] == (None if prev is None else prev.id)
        # To the byte what compressing with the searched configuration gives.
        assert stored.id == sp.compress(kept.exact[number], prev, found.config, grads=kept.grads[number]).id
        assert found.nbytes == 0 or stored.nbytes == pytest.approx(found.nbytes, rel=0.02)
        prev = stored


@pytest.mark.parametrize("how", ["store", "thread", "process"])
def test_a_configuration_for_one_save_is_for_that_one(how: str, tmp_path: Path) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    coarse = sp.Config([("weight", sp.Quantize(bins=4, protect=0.0))], chain=sp.ChainPolicy(base_every=1))
    store = sp.Store(tmp_path, sp.presets.lossless())
    saver = None if how == "store" else sp.Saver(store, mode=how)
    to = saver or store
    to.save(1, {"weight": x}, cfg=coarse, kinds={"weight": "linear"})
    to.save(2, {"weight": x})
    with pytest.raises(BadArgumentError, match="cfg must be a Config"):
        to.save(3, {"weight": x}, cfg=sp.presets.lossless)  # type: ignore[arg-type]
    if saver is not None:
        saver.close()
    back = [sp.Store(tmp_path).load(step, count=False)["weight"] for step in (1, 2)]
    assert torch.equal(back[0], sp.decompress(sp.compress({"weight": x}, cfg=coarse))["weight"])
    assert not torch.equal(back[0], x)
    assert torch.equal(back[1], x)
    # The chain of `coarse` was not asked.
    assert sp.Store(tmp_path).read(2).is_delta


def test_the_parent_is_what_the_next_delta_is_against(tmp_path: Path) -> None:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    store = sp.Store(tmp_path, sp.Config(chain=sp.ChainPolicy(base_every=2)))
    assert store.parent is None
    saved = [store.save(1, {"weight": x})]
    assert store.parent is not None
    assert store.parent.id == saved[0].checkpoint.id
    saved.append(store.save(2, {"weight": x + 0.001}))
    assert saved[1].is_delta
    # Two in a chain: the next one is a base.
    assert store.parent is None
    assert not store.save(3, {"weight": x}).is_delta
