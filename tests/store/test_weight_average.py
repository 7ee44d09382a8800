"""The weight average of a store and a saver, and its effect on saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.store.weight_average import needs_average

RATED = sp.Config(rate=0.002, chain=sp.ChainPolicy(base_every=None))


def drifting(step: int, shape: tuple[int, ...] = (90, 100)) -> Any:
    """Return a state with drifting weights, moments and exact arrays."""
    rng = np.random.default_rng(3)
    w, way, m, v = rng.standard_normal((4, *shape)).astype("f4")
    shaken = np.random.default_rng(100 + step).standard_normal(shape).astype("f4")
    weights = w + np.float32(0.0003 * step) * way + np.float32(0.004) * shaken
    moments = {"exp_avg": 0.2 * m, "exp_avg_sq": v * v + np.float32(0.1)}
    return {"model": {"weight": weights, "b": weights[0]}, "optimizer": {"state": {0: moments}}, "step": step}


def lag(store: sp.Store, step: int, window: int = 90) -> float:
    """Return the share of the weights' drift that a restored step lacks."""
    now, old = (drifting(s)["model"]["weight"].astype("f8") for s in (step, step - window))
    error = now - store.load(step, paths="model/weight")["model"]["weight"]
    return float((error * (now - old)).sum() / ((now - old) ** 2).sum())


@pytest.mark.parametrize(
    ("cfg", "wanted"),
    [
        (sp.Config(), False),
        (sp.Config(rate=0.001), True),
        (sp.Config(rate=0.001, ahead=False), False),
        (sp.Config(ahead=True), True),
        (sp.Config(rate=0.001, chain=sp.ChainPolicy(against="base")), False),
        (sp.Config([("*", sp.Quantize(rate=0.001))]), True),
        (sp.Config([("*", sp.Quantize(rate=0.0))]), False),
        (sp.Config(max_rel_error=0.01), False),
        (sp.presets.inshrinkerator(), False),
    ],
)
def test_who_aims(cfg: sp.Config, wanted: bool) -> None:
    assert needs_average(cfg) is wanted
    assert sp.Config.from_json(cfg.to_json()) == cfg


@pytest.mark.parametrize("ahead", ["yes", 1, 0.0])
def test_ahead_is_a_truth_value(ahead: Any) -> None:
    with pytest.raises(sp.BadArgumentError, match="ahead"):
        sp.Config(ahead=ahead)
    with pytest.raises(sp.BadArgumentError, match=r"chain\.against"):
        sp.Config(ahead=True, chain=sp.ChainPolicy(against="base"))


@pytest.mark.parametrize("step", ["10", float("nan"), float("inf"), True, [10], np.ones(2)])
def test_steps_that_are_no_numbers(step: Any) -> None:
    state = drifting(0)
    ckpt = sp.compress(state)
    with pytest.raises(sp.BadArgumentError, match="step is "):
        sp.WeightAverage(ckpt, step)
    trail = sp.WeightAverage(ckpt, 0)
    with pytest.raises(sp.BadArgumentError, match="step is "):
        trail.earlier(state, step)
    with pytest.raises(sp.BadArgumentError, match="step is "):
        trail.follow(state, ckpt, step)
    assert trail.earlier(state, np.int64(10)).steps == 10.0  # and nothing was followed


@pytest.mark.parametrize("ckpt", [b"", {}, 5, np.ones(3)])
def test_a_trail_of_what_is_no_checkpoint(ckpt: Any) -> None:
    with pytest.raises(sp.BadArgumentError, match=r"checkpoint is .* a Checkpoint is needed"):
        sp.WeightAverage(ckpt)
    for no in (ckpt, None):
        with pytest.raises(sp.BadArgumentError, match=r"checkpoint is .* a Checkpoint is needed"):
            sp.WeightAverage().follow(drifting(0), no)


def test_a_trail_of_a_delta_without_its_parent() -> None:
    delta = sp.compress(drifting(10), sp.compress(drifting(0)))
    with pytest.raises(sp.MissingParentError, match="read without its parent"):
        sp.WeightAverage(sp.Checkpoint.from_bytes(delta.to_bytes()))


def test_a_checkpoint_of_other_shapes_is_not_followed() -> None:
    trail = sp.WeightAverage()
    trail.follow(drifting(0), sp.compress(drifting(0, (70, 100))), 0)
    assert trail.earlier(drifting(0)).weights == {}


def test_a_store_saves_what_compress_makes_of_the_trail(tmp_path: Path) -> None:
    cfg = sp.Config(rate=0.002, chain=sp.ChainPolicy(base_every=8))
    store, trail, parent = sp.Store(tmp_path, cfg), sp.WeightAverage(), None
    for number in range(20):
        step, state = 10 * number, drifting(10 * number)
        parent = None if number % 8 == 0 else parent
        ckpt = sp.compress(state, parent, cfg, earlier=trail.earlier(state, step))
        trail.follow(state, ckpt, step)
        told = sp.compress(state, store.parent, cfg, earlier=store.earlier(state, step))
        assert told.to_bytes() == store.save(step, state).checkpoint.to_bytes() == ckpt.to_bytes()
        parent = ckpt


def test_what_is_restored_leads_by_the_steps_that_moments_lose(tmp_path: Path) -> None:
    rules = [("first moment", sp.FirstMoment(step=8, max_error=1.0))]
    stores = {
        ahead: sp.Store(tmp_path / str(ahead), sp.Config(rules, rate=0.002, ahead=ahead)) for ahead in (True, False)
    }
    for step in range(0, 400, 10):
        for store in stores.values():
            store.save(step, drifting(step))
    behind = {ahead: np.mean([lag(store, step) for step in range(300, 400, 10)]) for ahead, store in stores.items()}
    assert behind[False] > 0.4
    assert -0.2 < behind[True] < -0.03


def test_after_a_restore_the_trail_begins_with_what_was_restored(tmp_path: Path) -> None:
    store = sp.Store(tmp_path, RATED)
    for step in range(0, 60, 10):
        store.save(step, drifting(step))
    again = sp.Store(tmp_path, RATED)
    restored = again.load(50)
    parent = again.read(50)
    trail = sp.WeightAverage(parent, 50)
    np.testing.assert_array_equal(trail.earlier(restored).weights["model/weight"], restored["model"]["weight"])
    for step in (60, 70, 80):
        state = drifting(step)
        parent = sp.compress(state, parent, RATED, earlier=trail.earlier(state, step))
        trail.follow(state, parent, step)
        assert again.save(step, state).checkpoint.to_bytes() == parent.to_bytes()
    # The state that was given away may be changed without harm.
    restored["model"]["weight"][:] = 0


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_saver_saves_the_same(tmp_path: Path, mode: str) -> None:
    plain = sp.Store(tmp_path / "plain", RATED)
    with sp.Saver(sp.Store(tmp_path / "saver", RATED), mode=mode) as saver:
        for step in range(0, 50, 10):
            done = saver.save(step, drifting(step))
            assert done.result(60).id == plain.save(step, drifting(step)).checkpoint.id


def test_a_save_that_fails_leaves_the_trail_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [sp.Store(tmp_path / name, RATED) for name in "ab"]
    for step in (0, 10, 20):
        for store in stores:
            store.save(step, drifting(step))
    files = stores[0]._files
    with monkeypatch.context() as patched:
        patched.setattr(files, "write", lambda *a: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            stores[0].save(25, drifting(25))
    made = [store.save(30, drifting(30)).checkpoint.to_bytes() for store in stores]
    assert made[0] == made[1]


def test_weights_that_come_go_or_change_their_shape(tmp_path: Path) -> None:
    store = sp.Store(tmp_path, RATED)
    first = drifting(0)
    store.save(0, first)
    larger = drifting(10, (95, 100))
    store.save(10, {**larger, "new": drifting(10)["model"]["weight"]})
    store.save(20, drifting(20, (95, 100)))
    store.save(30, first)
    assert store.verify() == {}
    np.testing.assert_allclose(store.load(30)["model"]["weight"], first["model"]["weight"], atol=1.5)


def test_a_trail_is_the_mean_it_says() -> None:
    """The average is `s += (w - s) / 10` in float32, and so is its step."""
    cfg, trail = sp.Config(rate=0.002), sp.WeightAverage()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        trail, mean, since = sp.WeightAverage(), None, None
        for number in range(5):
            w = torch.from_numpy(drifting(10 * number)["model"]["weight"]).to(dtype)
            state = {"weight": w}
            ckpt = sp.compress(state, cfg=cfg, earlier=trail.earlier(state, 10 * number))
            trail.follow(state, ckpt, 10 * number)
            mean = w.float().clone() if mean is None else mean + 0.1 * (w.float() - mean)
            since = 10.0 * number if since is None else since + 0.1 * (10 * number - since)
            w.zero_()  # the trail has a copy of its own
            found = trail.earlier(state, 50)
            assert found.weights["weight"].dtype == torch.float32
            torch.testing.assert_close(found.weights["weight"], mean)
            assert found.steps == pytest.approx(50 - since)
    assert trail.earlier({"weight": w}).steps is None
    assert trail.earlier({"weight": w}, 0).steps is None  # a run that has gone back has no way behind it
    assert trail.earlier({"v": w}).weights == {}


def test_steps_that_nobody_told_make_nothing_up() -> None:
    state = drifting(0)
    trail = sp.WeightAverage()
    ckpt = sp.compress(state, cfg=RATED, earlier=trail.earlier(state, 5))
    trail.follow(state, ckpt)
    assert trail.earlier(state, 10).steps is None
    trail.follow(state, ckpt, 10)
    assert trail.earlier(state, 30).steps == 20


def counting(step: int, count: Any) -> Any:
    state = drifting(step)
    state["optimizer"]["state"][0]["step"] = count
    return state


@pytest.mark.parametrize("kind", [float, torch.tensor, np.float32, lambda n: np.array([n], "i8")])
def test_an_optimizer_that_counts_its_steps_is_believed(kind: Any) -> None:
    """The optimizer's step count decides, not the numbers of checkpoints."""
    stores = {spacing: sp.Store(f"memory://counting-{kind}-{spacing}", RATED) for spacing in (1, 40, 1000)}
    for number in range(6):
        state = counting(40 * number, kind(40 * number))
        told = {s: store.earlier(state, s * number).steps for s, store in stores.items()}
        files = {s: store.save(s * number, state).checkpoint.to_bytes() for s, store in stores.items()}
        if kind is not float:
            assert len(set(told.values())) == len(set(files.values())) == 1
        elif number:
            assert len(set(told.values())) == 3  # a plain number next to the arrays is not used
    # Who goes on from a checkpoint knows it from there.
    again = sp.Store(stores[1].url, RATED)
    again.load()
    assert again.earlier(counting(300, kind(300)), 8).steps == (100 if kind is not float else 3)


def test_counts_of_another_kind_begin_anew() -> None:
    trail = sp.WeightAverage()
    for step, count in ((10, None), (20, 500.0), (30, 600.0), (40, float("nan")), (50, None), (60, 700.0)):
        state = drifting(step) if count is None else counting(step, np.array(count))
        found = trail.earlier(state, step).steps
        assert found == {30: 100.0, 50: 10.0}.get(step)
        trail.follow(state, sp.compress(state, cfg=RATED), step)


@pytest.mark.filterwarnings("ignore::shrinkpoint.codec.plan.UnknownArraysWarning")
def test_what_is_no_single_number_is_no_count() -> None:
    state = counting(10, np.array([5.0, 6.0]))
    state["step"], state["data"] = np.array(7.0), {"count": np.array(8)}
    trail = sp.WeightAverage()
    trail.follow(state, sp.compress(state, cfg=RATED), 10)
    assert trail.earlier(state, 12).steps == 2.0


def follow(trail: sp.WeightAverage, w: Any, step: int) -> Any:
    state = {"weight": w}
    trail.follow(state, sp.compress(state, cfg=RATED, earlier=trail.earlier(state, step)), step)
    return trail.earlier(state).weights["weight"]


def test_a_name_that_other_weights_end_in(tmp_path: Path) -> None:
    """The average of `w` is not used for `sub/w`."""
    store = sp.Store(tmp_path, RATED)
    for step in range(0, 30, 10):
        w = drifting(step)["model"]["weight"]
        store.save(
            step,
            {
                "weight": w,
                "norm": {"weight": w[0]},
                "list": {"weight": np.arange(5)},
                **({"sub": {"weight": w.T}} if step else {}),
            },
        )
    assert store.verify() == {}


@pytest.mark.filterwarnings("ignore::shrinkpoint.codec.plan.UnknownArraysWarning")
@pytest.mark.parametrize("names", [(0, "0"), ("a", "b")])
def test_paths_that_do_not_tell_weights_apart(tmp_path: Path, names: Any) -> None:
    """Ambiguous paths do not share an average."""
    store = sp.Store(tmp_path, RATED)
    for step in range(0, 30, 10):
        w = drifting(step)["model"]["weight"]
        store.save(step, {0: w, "0": w.T} if names[0] == 0 else {"a": {"b": w}, "a/b": w.T})
    assert store.verify() == {}


def test_saves_in_inference_mode_and_out_of_it(tmp_path: Path) -> None:
    """Saves in and out of inference mode give equal bytes."""
    stores = [sp.Store(tmp_path / name, RATED) for name in "ab"]
    for step in range(0, 40, 10):
        made = set()
        for store, inside in zip(stores, (step % 20 == 0, False), strict=True):
            with torch.inference_mode(inside):
                state = {"weight": torch.from_numpy(drifting(step)["model"]["weight"]) * 1}
                made.add(store.save(step, state).checkpoint.to_bytes())
        assert len(made) == 1


@pytest.mark.parametrize("library", [np.array, torch.tensor])
def test_a_value_that_was_not_finite_is_forgotten(library: Any) -> None:
    trail, w = sp.WeightAverage(), drifting(0)["model"]["weight"]
    follow(trail, library(w), 0)
    for bad in (np.inf, np.nan, -np.inf):
        broken = w.copy()
        broken[3, 4] = bad
        follow(trail, library(broken), 10)
        found = np.asarray(follow(trail, library(w), 20))
        np.testing.assert_allclose(found, w, rtol=1e-6)


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_a_trail_that_has_no_room_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """Without memory for the average the step is stored and the average starts again."""
    store = sp.Store(tmp_path, RATED)
    store.save(0, drifting(0))
    with monkeypatch.context() as patched:
        patched.setattr(sp.WeightAverage, "follow", lambda *a: (_ for _ in ()).throw(error("no room")))
        store.save(10, drifting(10))
    saved = store.save(20, drifting(20)).checkpoint
    again = sp.Store(tmp_path, RATED)
    again.follow(10)
    assert again.save(20, drifting(20)).checkpoint.to_bytes() == saved.to_bytes()


def test_whether_one_save_is_aimed_is_a_matter_of_the_stores_chain(tmp_path: Path) -> None:
    """The store's chain policy, not a save's, decides on coding ahead."""
    based = sp.ChainPolicy(against="base")
    plain, ahead = sp.Config(rate=0.002), sp.Config(rate=0.002, chain=based)
    for name, own, given, other in (("a", based, plain, ahead), ("b", RATED.chain, ahead, plain)):
        stores = [sp.Store(tmp_path / name / n, sp.Config(chain=own)) for n in "xy"]
        for step in range(0, 50, 10):
            made = [s.save(step, drifting(step), cfg=c) for s, c in zip(stores, (given, other), strict=True)]
            assert made[0].checkpoint.to_bytes() == made[1].checkpoint.to_bytes()
        assert (made[0].checkpoint.records[0].meta.get("a", [0])[0] > 0) is (name == "b")
    with pytest.raises(sp.BadArgumentError, match=r"chain\.against"):
        sp.Store(tmp_path / "c", sp.Config(chain=based)).save(0, drifting(0), cfg=sp.Config(ahead=True))


@pytest.mark.parametrize("how", ["load", "follow"])
def test_who_goes_back_begins_a_new_trail(tmp_path: Path, how: str) -> None:
    """Going back starts a new average, as opening the store does."""
    made = []
    for name in "ab":
        store = sp.Store(tmp_path / name, RATED)
        for step in range(0, 40, 10):
            store.save(step, drifting(step))
        store = store if name == "a" else sp.Store(tmp_path / name, RATED)
        getattr(store, how)(30)
        made.append([store.save(step, drifting(step)).checkpoint.to_bytes() for step in (40, 50)])
    assert made[0] == made[1]


def test_a_save_that_is_not_aimed_ends_the_trail(tmp_path: Path) -> None:
    made = []
    for name in "ab":
        store = sp.Store(tmp_path / name, RATED)
        for step in range(0, 40, 10):
            store.save(step, drifting(step), cfg=sp.Config(rate=0.002, ahead=False) if step == 30 else None)
        if name == "b":
            store = sp.Store(tmp_path / name, RATED)
            store.follow(30)
        made.append([store.save(step, drifting(step)).checkpoint.to_bytes() for step in (40, 50)])
    assert made[0] == made[1]
