"""The tracker: the average it says, before checkpoints only; under accumulation, AMP, DDP, FSDP2; without a trace."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

import shrinkpoint as sp
from shrinkpoint.codec.errors import BadArgumentError
from shrinkpoint.search.cube import Cube

from . import sensitivity_worker as worker

Grads = dict[str, Tensor]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 8))


def average(history: list[Grads], beta: float) -> Grads:
    """The formula, in float64."""
    out: Grads = {}
    for gradients in history:
        for name, g in gradients.items():
            out[name] = beta * g.double() + (1 - beta) * out.get(name, torch.zeros_like(g, dtype=torch.float64))
    return out


def close(found: Grads | None, expected: Grads) -> bool:
    assert found is not None
    assert list(found) == list(expected)
    return all(torch.allclose(found[n].double(), g, rtol=1e-5, atol=1e-7) for n, g in expected.items())


def step(model: nn.Module, optimizer: torch.optim.Optimizer, parts: int = 1) -> Grads:
    """One batch in so many micro-batches; returns the gradients that were used."""
    optimizer.zero_grad()
    for _ in range(parts):
        (model(torch.randn(4, 16)).square().mean() / parts).backward()
    used = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return used


def hooks() -> tuple[int, int]:
    return len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)


@settings(max_examples=25)
@given(
    every=st.integers(1, 9),
    window=st.integers(1, 12),
    beta=st.floats(0.05, 1.0),
    parts=st.integers(1, 3),
    done=st.integers(0, 8),
    set_to_none=st.booleans(),
)
def test_the_average_of_the_window_before_each_checkpoint(
    every: int, window: int, beta: float, parts: int, done: int, set_to_none: bool
) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    history: list[Grads] = []
    with sp.SensitivityTracker(model, every, beta=beta, window=window, done=done) as tracker:
        for batch in range(done, done + 12):
            optimizer.zero_grad(set_to_none=set_to_none)
            into = batch % every - (every - window)
            if every > window and into == 0:
                history = []
            used = step(model, optimizer, parts)
            if every <= window or into >= 0:
                history.append(used)
            assert tracker.batch == batch + 1
            assert tracker.recorded == len(history)
            if history:
                assert close(tracker.grads(), average(history, beta))
            else:
                assert tracker.grads() is None


def test_no_micro_batch_is_taken_for_a_batch() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sp.SensitivityTracker(model, every=None) as tracker:
        used = [step(model, optimizer, parts=4) for _ in range(3)]
        assert (tracker.batch, tracker.recorded) == (3, 3)
        assert close(tracker.grads(), average(used, 0.9))


def test_without_an_optimizer_each_backward_pass_is_a_batch() -> None:
    model = network()
    history = []
    with sp.SensitivityTracker(model, every=4, window=2) as tracker:
        for batch in range(8):
            model(torch.randn(4, 16)).square().mean().backward()
            used = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            history = [*history, used][-2:]
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.01 * p.grad  # type: ignore[operator]
                    p.grad = None
            assert tracker.batch == batch + 1
            if batch % 4 == 3:
                assert tracker.recorded == 2
                assert close(tracker.grads(), average(history, 0.9))


def test_under_amp_gradients_are_unscaled_and_skipped_steps_are_not_seen() -> None:
    for fused in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        history = []
        with sp.SensitivityTracker(model, every=None) as tracker:
            for batch in range(6):
                optimizer.zero_grad()
                loss = model(torch.randn(4, 16)).square().mean()
                if batch == 2:
                    loss = loss * float("inf")
                scale = scaler.get_scale()
                scaler.scale(loss).backward()
                used = {n: p.grad / scale for n, p in model.named_parameters() if p.grad is not None}
                scaler.step(optimizer)
                scaler.update()
                if batch != 2:
                    history.append(used)
            assert tracker.recorded == 5
            assert close(tracker.grads(), average(history, 0.9))


def test_clipped_gradients_are_what_is_averaged() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sp.SensitivityTracker(model, every=1) as tracker:
        model(100 * torch.ones(4, 16)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        total = torch.cat([g.flatten() for g in (tracker.grads() or {}).values()]).norm()
    assert float(total) == pytest.approx(0.9 * 0.01, rel=1e-3)


def test_two_optimizers_frozen_and_tied_parameters_and_other_dtypes() -> None:
    model = nn.ModuleDict(
        {
            "a": nn.Linear(8, 8, dtype=torch.float64),
            "b": nn.Linear(8, 8, dtype=torch.bfloat16),
            "c": nn.Embedding(16, 8, sparse=True),
            "frozen": nn.Linear(8, 8),
            "unused": nn.Linear(8, 8),
        }
    )
    model["frozen"].requires_grad_(False)
    first = torch.optim.SGD([*model["a"].parameters(), *model["b"].parameters()], lr=0.1)
    second = torch.optim.SGD([*model["c"].parameters(), *model["unused"].parameters()], lr=0.1)
    stranger = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    history = []
    with sp.SensitivityTracker(model, every=None, beta=0.5) as tracker:
        for _ in range(3):
            x = model["c"](torch.randint(16, (5,)))
            loss = model["a"](x.double()).square().mean() + model["b"](x.bfloat16()).float().square().mean()
            for optimizer in (first, second, stranger):
                optimizer.zero_grad()
            loss.backward()
            history.append({n: p.grad.to_dense() for n, p in model.named_parameters() if p.grad is not None})
            for optimizer in (first, second, stranger):
                optimizer.step()
        found = tracker.grads() or {}
    assert {n.split(".")[0] for n in found} == {"a", "b", "c"}
    assert found["a.weight"].dtype == torch.float64
    assert found["b.weight"].dtype == found["c.weight"].dtype == torch.float32
    expected = average(history, 0.5)
    assert close({n: found[n] for n in expected}, expected)


def test_squares_are_the_fisher_information() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sp.SensitivityTracker(model, every=None, squares=True) as tracker:
        used = [step(model, optimizer) for _ in range(3)]
        assert close(tracker.squares(), average([{n: g * g for n, g in u.items()} for u in used], 0.9))
        assert close(tracker.grads(), average(used, 0.9))
    with sp.SensitivityTracker(model, every=None) as tracker, pytest.raises(BadArgumentError, match="squares"):
        tracker.squares()


def test_what_was_read_does_not_change_later() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sp.SensitivityTracker(model, every=None) as tracker:
        step(model, optimizer)
        read = tracker.grads() or {}
        kept = {n: g.clone() for n, g in read.items()}
        step(model, optimizer)
        assert all(torch.equal(read[n], g) for n, g in kept.items())


def test_it_is_removed_without_a_trace() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = hooks()
    tracker = sp.SensitivityTracker(model, every=None)
    assert hooks() != before
    step(model, optimizer)
    tracker.remove()
    tracker.remove()
    assert hooks() == before
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())  # type: ignore[attr-defined]
    read = tracker.grads()
    step(model, optimizer)
    assert tracker.recorded == 1
    assert read is not None
    assert close(tracker.grads(), {n: g.double() for n, g in read.items()})
    # Nor does one that is merely forgotten leave anything behind.
    forgotten = sp.SensitivityTracker(model, every=None)
    alive = weakref.ref(forgotten)
    step(model, optimizer)
    del forgotten
    gc.collect()
    assert alive() is None
    assert hooks() == before


def test_a_run_with_tracker_search_and_store_has_the_same_losses_to_the_bit(tmp_path: Path) -> None:
    held_out = torch.randn(64, 16, generator=torch.Generator().manual_seed(9))

    def run(saved: bool) -> list[float]:
        model = network()
        wide = nn.Sequential(model, nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 8))
        probe = copy.deepcopy(wide).eval()
        optimizer = torch.optim.AdamW(wide.parameters(), lr=1e-2)
        tracker = sp.SensitivityTracker(wide, every=10, window=4) if saved else None
        store = sp.Store(tmp_path / "run") if saved else None
        torch.manual_seed(1)
        losses, last, prev = [], None, None
        for number in range(1, 31):
            loss = wide(torch.randn(4, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if number % 10 == 0 and tracker is not None and store is not None:
                state = {"model": wide.state_dict(), "optimizer": optimizer.state_dict()}

                @torch.no_grad()
                def evaluate(restored: dict[str, Any]) -> float:
                    probe.load_state_dict(restored["model"])
                    return float(1.0 + probe(held_out).square().mean())

                grads = tracker.grads()
                assert grads is not None
                cube = Cube(bins=(8, 32), prune=(0.0, 0.2), protect=(0.0005,))
                last = sp.search(state, evaluate, 0.01, prev=prev, last=last, grads=grads, cube=cube)
                prev = sp.compress(state, prev, last.config, grads=grads)
                store.save(number, state, grads=grads)
        if tracker is not None:
            tracker.remove()
        return losses

    assert run(saved=True) == run(saved=False)


def test_replicas_and_shards_average_the_gradients_of_the_whole_batch(tmp_path: Path) -> None:
    script = Path(worker.__file__)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(worker.SIZE)
    ]  # fmt: skip
    try:
        said = [p.communicate(timeout=120)[0].decode() for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0] * worker.SIZE, said
    alone = worker.model()
    with sp.SensitivityTracker(alone, every=None) as tracker:
        worker.train(alone, tracker, None)
        expected = tracker.grads() or {}
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(worker.SIZE)]
    for one in found:
        for kind in ("ddp", "fsdp"):
            assert list(one[kind]) == list(expected)
            for name, g in expected.items():
                torch.testing.assert_close(one[kind][name], g, rtol=1e-4, atol=1e-7)
    # Each process holds its own part only, and both write the same checkpoint.
    assert sum(one["own part"] for one in found) == sum(g.numel() for g in expected.values())
    assert found[0]["checkpoint"] == found[1]["checkpoint"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every"),
        ({"every": 2.5}, "every"),
        ({"every": 5, "window": 0}, "window"),
        ({"every": 5, "beta": 0.0}, "beta"),
        ({"every": 5, "beta": 1.5}, "beta"),
        ({"every": 5, "done": -1}, "done"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    before = hooks()
    with pytest.raises(BadArgumentError, match=message):
        sp.SensitivityTracker(network(), **arguments)
    with pytest.raises(BadArgumentError, match="no parameter"):
        sp.SensitivityTracker(nn.ReLU(), every=5)
    assert hooks() == before
