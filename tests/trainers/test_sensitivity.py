"""The gradient tracker: its average under accumulation, AMP, DDP and FSDP2."""

from __future__ import annotations

import gc
import inspect
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
from shrinkpoint import trainers
from shrinkpoint.codec.errors import BadArgumentError
from shrinkpoint.trainers.sensitivity import SensitivityWarning, batches_that_count

from . import sensitivity_worker as worker

Grads = dict[str, Tensor]


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 8))


def average(history: list[Grads], beta: float) -> Grads:
    """Compute the average by its formula in float64."""
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
    """Train one batch in `parts` micro-batches; return the gradients."""
    optimizer.zero_grad()
    for _ in range(parts):
        (model(torch.randn(4, 16)).square().mean() / parts).backward()
    used = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return used


def hooks() -> tuple[int, int]:
    return len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks)


# Read at every batch, not at checkpoints only.
@pytest.mark.filterwarnings("ignore::shrinkpoint.trainers.sensitivity.SensitivityWarning")
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


@pytest.mark.parametrize(("beta", "read"), [(0.9, 13), (0.5, 40), (0.3, 50), (1.0, 12)])
def test_of_a_window_that_is_read_which_the_average_can_tell(beta: float, read: int) -> None:
    """Batches that cannot change the average in float32 are not recorded."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(-2, 3, (60,), generator=generator)
    gradients = [size * torch.randn(7, generator=generator) for size in sizes]
    weight = torch.nn.Parameter(torch.zeros(7))
    model = nn.ParameterDict({"weight": weight})
    optimizer = torch.optim.SGD([weight], lr=0.0)
    with sp.SensitivityTracker(model, every=60, window=50, beta=beta) as tracker:
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        assert tracker.recorded == read == batches_that_count(50, beta)
        found = tracker.grads()
    assert found is not None
    whole = torch.zeros(7, dtype=torch.float64)
    for gradient in gradients[10:]:
        whole = beta * gradient.double() + (1 - beta) * whole
    torch.testing.assert_close(found["weight"].double(), whole, rtol=2**-21, atol=1e-6 * float(whole.abs().max()))


def test_defaults_are_the_papers() -> None:
    defaults = {name: p.default for name, p in inspect.signature(sp.SensitivityTracker).parameters.items()}
    assert (defaults["beta"], defaults["window"]) == (0.9, 50)


@pytest.mark.parametrize("beta", [0.05, 0.3, 0.6, 0.9, 0.999, 1.0])
def test_what_a_window_leaves_out_weighs_nothing(beta: float) -> None:
    for window in (1, 12, 13, 50, 1000):
        read = batches_that_count(window, beta)
        assert min(window, 12) <= read <= window
        assert read == window or (1 - beta) ** read <= 2.0**-40
        assert read <= 12 or (1 - beta) ** (read - 1) > 2.0**-40
        assert type(read) is int


@pytest.mark.parametrize("beta", [5e-324, 1e-17, 1e-3])
def test_where_all_batches_weigh_alike_all_are_read(beta: float) -> None:
    assert batches_that_count(50, beta) == 50


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


# ------------------------------------------------------------------ which batch a gradient is of


def marked(model: nn.Module, number: int) -> None:
    """Set every gradient to the number of its batch."""
    for p in model.parameters():
        p.grad = torch.full_like(p, float(number))


def newest(tracker: sp.SensitivityTracker) -> float | None:
    """Return the newest gradient from an average that weighs only it."""
    grads = tracker.grads()
    return None if grads is None else float(next(iter(grads.values())).flatten()[0])


def amp_run(fused: bool, told: bool, skipped: int, batches: int) -> list[tuple[float | None, int]]:
    """Train with AMP skipping some batches; return averages and counts at every 20th."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=10**6)
    seen = []
    with sp.SensitivityTracker(model, every=20, window=5, beta=1.0) as tracker:
        for number in range(batches):
            if told:
                tracker.at(number)
            loss = sum((p * 1e-3).sum() for p in model.parameters()) * number
            optimizer.zero_grad()
            scaler.scale(loss * float("inf") if 0 < number <= skipped else loss).backward()
            scaler.step(optimizer)
            scaler.update(2.0**8)
            if (number + 1) % 20 == 0:
                found = newest(tracker)
                seen.append((None if found is None else round(found * 1e3, 2), tracker.recorded))
    return seen


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("skipped", [3, 8])
def test_windows_stay_before_checkpoints_where_amp_skips_steps(fused: bool, skipped: int) -> None:
    assert amp_run(fused, True, skipped, 60) == [(19.0, 5), (39.0, 5), (59.0, 5)]


def test_it_is_said_where_steps_were_skipped_and_nobody_told() -> None:
    assert amp_run(True, False, 8, 40) == [(19.0, 5), (39.0, 5)]
    with pytest.warns(
        SensitivityWarning, match=r"batch 32: the newest gradient there is of batch 20.*tracker\.at"
    ) as w:
        assert amp_run(False, False, 8, 60) == [(None, 0), (27.0, 5), (47.0, 5)]
    assert len(w) == 1
    # Fewer than the window: still the newest, but not all of the window.
    with pytest.warns(SensitivityWarning, match="batch 17: the newest gradient there is of batch 17"):
        assert amp_run(False, False, 3, 20) == [(19.0, 2)]


def test_nothing_is_said_at_checkpoints() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with sp.SensitivityTracker(model, every=10, window=3, done=8) as tracker:
        assert tracker.grads() is None
        for number in range(8, 40):
            step(model, optimizer)
            if (number + 1) % 10 == 0:
                assert tracker.grads() is not None
    with sp.SensitivityTracker(model, every=10, window=3) as tracker:
        tracker.at(40)
        assert tracker.grads() is None
        tracker.at(50)
        with pytest.warns(SensitivityWarning, match="after batch 50: no gradient is there"):
            assert tracker.grads() is None


@pytest.mark.parametrize("at", [7, 15, 18])
@pytest.mark.parametrize("kept", [False, True])
def test_an_optimizer_made_anew_goes_on_from_the_last(at: int, kept: bool) -> None:
    """A new optimizer continues the window of the last one."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    others = []
    with sp.SensitivityTracker(model, every=20, window=5, beta=1.0) as tracker:
        for number in range(40):
            if number in (at, 22):
                others += [optimizer] * kept
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            marked(model, number)
            optimizer.step()
            assert tracker.batch == number + 1
            if number % 20 == 19:
                assert (newest(tracker), tracker.recorded) == (number, 5)


def test_optimizers_by_turns_and_one_split_in_two() -> None:
    model = network()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.01) for _ in range(2))
    with sp.SensitivityTracker(model, every=20, window=5, beta=1.0) as tracker:
        for number in range(40):
            marked(model, number)
            (first, second)[number % 3 == 1].step()
            assert tracker.batch == number + 1
        assert (newest(tracker), tracker.recorded) == (39, 5)
        parts = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (model[0], model[3])]  # type: ignore[index]
        for number in range(40, 60):
            marked(model, number)
            for one in parts:
                one.step()
            assert tracker.batch == number + 1
        assert (newest(tracker), tracker.recorded) == (59, 5)
        # Parameters that join an optimizer, or one of their own, late.
    with sp.SensitivityTracker(model, every=20, window=5, beta=1.0) as tracker:
        one, other = (torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (model[0], model[3]))  # type: ignore[index]
        for number in range(40):
            marked(model, number)
            one.step()
            if number >= 17:
                other.step()
            if number == 30:
                other.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
            assert tracker.batch == number + 1
        grads = tracker.grads() or {}
        assert {float(g.flatten()[0]) for g in grads.values()} == {39.0}
        assert len(grads) == 4


@pytest.mark.parametrize("how", ["one group", "a group each", "of all from the start"])
def test_layers_that_are_unfrozen_by_and_by(how: str) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    model[:2].requires_grad_(False)  # type: ignore[operator]
    begin = model if how == "of all from the start" else model[2]
    optimizer = torch.optim.SGD(begin.parameters(), lr=0.01)
    with sp.SensitivityTracker(model, every=None, beta=1.0) as tracker:
        for number in range(9):
            layer = model[2 - number // 3]
            layer.requires_grad_(True)
            if number in (3, 6) and how == "one group":
                optimizer.param_groups[0]["params"].extend(layer.parameters())
            elif number in (3, 6) and how == "a group each":
                optimizer.add_param_group({"params": list(layer.parameters())})
            for p in model.parameters():
                p.grad = torch.full_like(p, float(number)) if p.requires_grad else None
            optimizer.step()
            found = {n: float(g[0, 0]) for n, g in (tracker.grads() or {}).items()}
            assert found == {f"{i}.weight": number for i in range(2 - number // 3, 3)}
            assert tracker.batch == number + 1


def test_complex_parameters_are_left_out() -> None:
    model = nn.ParameterDict({"z": nn.Parameter(torch.ones(4, dtype=torch.complex64)), "weight": torch.ones(4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sp.SensitivityTracker(model, every=None) as tracker:
        (model["z"].abs().square().sum() + model["weight"].sum()).backward()
        optimizer.step()
        assert list(tracker.grads() or ()) == ["weight"]
    del model["weight"]
    with pytest.raises(BadArgumentError, match="no parameter that requires a gradient, but for complex ones"):
        sp.SensitivityTracker(model, every=None)


class Wrapped(torch.optim.Optimizer):
    """An optimizer like ZeroRedundancyOptimizer, around others."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        super().__init__([p for one in inner for g in one.param_groups for p in g["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return [one.step(closure) if closure is not None else one.step() for one in self.inner]  # type: ignore[func-returns-value]


class Derived(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Failing(torch.optim.SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise RuntimeError("out of memory")
        return super().step(closure)


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("how", ["wrapped", "twice wrapped", "two in one", "derived"])
def test_a_step_within_a_step_is_one_batch(how: str, closure: bool) -> None:
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer: Any = plain
    if how == "derived":
        optimizer = Derived(model.parameters(), lr=0.01)
    elif how == "two in one":
        optimizer = Wrapped(*(torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (model[0], model[3])))  # type: ignore[index]
    else:
        optimizer = Wrapped(plain) if how == "wrapped" else Wrapped(Wrapped(plain))
    history = []
    with sp.SensitivityTracker(model, every=None) as tracker:
        for number in range(3):
            x = torch.randn(4, 16)

            def evaluate(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(x).square().mean()
                loss.backward()  # type: ignore[no-untyped-call]
                return loss

            torch.manual_seed(number)
            evaluate()
            history.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
            if closure:
                torch.manual_seed(number)
                optimizer.zero_grad()
                optimizer.step(evaluate)
            else:
                optimizer.step()
        assert (tracker.batch, tracker.recorded) == (3, 3)
        if not (closure and how == "two in one"):  # there each optimizer within makes gradients of its own
            assert close(tracker.grads(), average(history, 0.9))


def test_a_step_that_fails_does_not_hide_those_after_it() -> None:
    model = network()
    optimizer = Failing(model.parameters(), lr=0.01)
    with sp.SensitivityTracker(model, every=None, beta=1.0) as tracker:
        for number in range(6):
            marked(model, number)
            optimizer.fails = number % 2 == 0
            if optimizer.fails:
                with pytest.raises(RuntimeError, match="out of memory"):
                    optimizer.step()
            else:
                optimizer.step()
            assert newest(tracker) == number
    assert not tracker._nesting._under_way


@pytest.mark.parametrize("rows", [False, True])
def test_a_step_that_fails_keeps_nothing_alive(rows: bool) -> None:
    """A failed step keeps no reference to model or optimizer."""
    model = nn.Sequential(nn.Embedding(8, 4)) if rows else network()
    optimizer = Failing(model.parameters(), lr=0.01)
    tracker: Any = sp.RowTracker(model) if rows else sp.SensitivityTracker(model, every=None)
    marked(model, 1)
    optimizer.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    assert tracker._nesting._under_way
    gone = [weakref.ref(optimizer), *([] if rows else map(weakref.ref, model.parameters()))]
    del model, optimizer
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)
    if rows:
        tracker.close()
    else:
        tracker.remove()
    assert not tracker._nesting._under_way


def test_gradients_that_a_closure_makes_are_read_after_it() -> None:
    """Gradients of a closure are read after it, for Lightning and LBFGS."""
    for make in (lambda p: torch.optim.SGD(p, lr=0.01), lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=4)):
        model = nn.Linear(16, 8)
        optimizer = make(model.parameters())
        history: list[Grads] = []
        with sp.SensitivityTracker(model, every=None) as tracker:
            for number in range(3):
                x, evaluations = torch.randn(4, 16), []

                def evaluate(
                    model: nn.Module = model,
                    optimizer: Any = optimizer,
                    x: Tensor = x,
                    evaluations: list[Grads] = evaluations,
                ) -> Tensor:
                    optimizer.zero_grad()
                    loss: Tensor = model(x).square().mean()
                    loss.backward()  # type: ignore[no-untyped-call]
                    evaluations.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
                    return loss

                loss = optimizer.step(evaluate) if number else optimizer.step(closure=evaluate)
                assert isinstance(loss, Tensor)
                history.append(evaluations[0])
                assert tracker.recorded == number + 1
            assert close(tracker.grads(), average(history, 0.9))


@pytest.mark.parametrize("read", [12, 40])
def test_an_element_that_is_not_finite_begins_anew(read: int) -> None:
    """The average of a non-finite element starts again, with a warning."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with sp.SensitivityTracker(model, every=5, squares=True) as tracker:

        def train(begin: int, end: int) -> None:
            for number in range(begin, end):
                marked(model, number)
                if number in (3, 7):
                    model[0].weight.grad[1, number] = float("nan" if number == 3 else "-inf")  # type: ignore[index, union-attr]
                optimizer.step()

        train(0, read)
        with pytest.warns(SensitivityWarning, match="^4 elements of gradient averages were not finite") as said:
            squares = tracker.squares() or {}
        found = tracker.grads() or {}
        assert len(said) == 1
        assert (tracker.not_finite, tracker.recorded) == (4, read)
        expected = average([{"": torch.tensor(float(number))} for number in range(read)], 0.9)[""]
        for name, g in found.items():
            right = torch.ones_like(g)
            if name == "0.weight" and read == 12:
                right[1, 3] = right[1, 7] = 0
            torch.testing.assert_close(g, right * expected.float())
            assert bool(squares[name].isfinite().all())
        # From the next gradient on they are as all others.
        train(read, read + 5)
        assert float((tracker.grads() or {})["0.weight"][1, 3]) == pytest.approx(read + 4, abs=0.2)
        # A sum beyond the range does not count as non-finite.
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e38)
        optimizer.step()
        assert all(bool((g > 8e37).all()) for g in (tracker.grads() or {}).values())


def compiled(model: nn.Module) -> nn.Module:
    wrapped: Any = torch.compile(model, backend="eager")
    found: nn.Module = wrapped
    return found


def test_names_are_those_of_the_bare_model() -> None:
    model = network()
    names = [n for n, _ in model.named_parameters()]
    inner = nn.Sequential(compiled(network()), nn.Linear(8, 8))
    cases: list[tuple[nn.Module, list[str], bool]] = [
        (nn.DataParallel(model), names, True),
        (compiled(model), names, True),
        (inner, [*(f"0.{n}" for n in names), "1.weight", "1.bias"], True),
        (compiled(nn.DataParallel(compiled(model))), names, False),  # which torch itself does not see through
    ]
    for number, (wrapped, expected, saved) in enumerate(cases):
        with sp.SensitivityTracker(wrapped, every=None) as tracker:
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
            marked(wrapped, 1)
            optimizer.step()
            assert list(tracker.grads() or ()) == expected
            if saved:
                store = sp.Store(f"memory://sensitivity-names-{number}", sp.presets.inshrinkerator())
                trainers.save(store, 1, wrapped, optimizer, sensitivity=tracker)
                assert store.steps() == [1]


def test_save_and_resume_tell_the_tracker_the_step() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    store = sp.Store("memory://sensitivity-loop", sp.presets.lossless())
    with sp.SensitivityTracker(model, every=10, window=3, beta=1.0) as tracker:
        for number in range(20):
            marked(model, number)
            if number != 4:  # skipped
                optimizer.step()
            if number % 10 == 9:
                trainers.save(store, number + 1, model, optimizer, sensitivity=tracker)
                assert tracker.batch == number + 1
        assert (newest(tracker), tracker.recorded) == (19, 3)
        assert trainers.resume(store, model, optimizer, sensitivity=tracker, step=10) == 10
        assert (tracker.batch, tracker.recorded, tracker.grads()) == (10, 0, None)
        for number in range(10, 20):
            marked(model, number)
            optimizer.step()
        assert (newest(tracker), tracker.recorded) == (19, 3)
        with pytest.raises(BadArgumentError, match="give one of them"):
            trainers.save(store, 20, model, sensitivity=tracker, grads={})
    for call in (lambda **x: trainers.save(store, 20, model, **x), lambda **x: trainers.resume(store, model, **x)):
        with pytest.raises(BadArgumentError, match="must be a SensitivityTracker, not int"):
            call(sensitivity=3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as it imports its compiler
def test_a_compiled_step_is_followed() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepping = torch.compile(optimizer.step, backend="eager")
    with sp.SensitivityTracker(model, every=None, beta=1.0) as tracker:
        for number in range(3):
            marked(model, number)
            stepping()
            assert (tracker.batch, tracker.recorded, newest(tracker)) == (number + 1, number + 1, number)


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
        said = [p.communicate(timeout=900)[0].decode() for p in processes]
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
        for kind in ("ddp", "zero", "fsdp"):
            assert list(one[kind]) == list(expected)
            for name, g in expected.items():
                torch.testing.assert_close(one[kind][name], g, rtol=1e-4, atol=1e-7)
        # A wrapped optimizer's step is one, though the tracker sees that of the optimizer within, too.
        assert one["zero batches"] == (worker.BATCHES, worker.BATCHES)
        assert one["on the host"] == {"cpu"}
        assert one["shards"] == list(expected)
        assert one["partial"].tolist() == [3.0] * 4
    assert [one["saved"] for one in found] == [True, False]
    assert sp.Store(str(tmp_path / "store")).steps() == [worker.BATCHES]
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
