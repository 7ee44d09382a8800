"""Weights extrapolated by their drift: no lag, and errors against the true weights."""

from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec.weights.level_assignment import Distances
from shrinkpoint.codec.weights.levels import GAIN_STEPS, LARGEST_GAIN, LevelsReference
from shrinkpoint.kernels.error_sums import distortion

from .common import bits, put_together, take_apart, through_bytes

COARSE = [("weight", sp.Quantize(bins=24)), ("first moment", sp.FirstMoment(step=8, max_error=1))]
RATED = sp.Config(COARSE, rate=0.002)


def memory(ckpt: sp.Checkpoint) -> LevelsReference:
    found = ckpt.reference_of(ckpt.records[0])
    assert isinstance(found, LevelsReference)
    return found


def drifting(step: int, size: int = 160) -> Any:
    """Return weights that drift in a constant direction, with noise."""
    rng = np.random.default_rng(3)
    w, way = rng.standard_normal((2, size, size)).astype("f4")
    shaken = np.random.default_rng(100 + step).standard_normal((size, size)).astype("f4")
    return w + np.float32(0.003 * step) * way + np.float32(0.004) * shaken


def chain(steps: int, cfg: sp.Config = RATED, *, window: int = 10, aimed: bool = True, state: Any = None) -> list[Any]:
    """Return tuples of weights, earlier weights and checkpoint along the drift."""
    made: list[Any] = []
    for step in range(steps):
        now, old = drifting(step), drifting(max(0, step - window))
        prev = made[-1][2] if made else None
        given = {"weight": old} if aimed and step else None
        made.append((now, old, sp.compress({"weight": now, **(state or {})}, prev, cfg, earlier=given)))
    return made


def lag(now: Any, old: Any, restored: Any) -> float:
    """Return the share of the way from old to now that the restored weights lack."""
    way, error = (now - old).astype("f8"), (now - restored).astype("f8")
    return float((error * way).sum() / (way * way).sum())


def test_what_is_restored_is_not_behind() -> None:
    plain, aimed = chain(30, aimed=False), chain(30)
    lags = [[lag(now, old, sp.decompress(c)["weight"]) for now, old, c in made[-5:]] for made in (plain, aimed)]
    assert min(lags[0]) > 0.5
    assert abs(statistics.fmean(lags[1])) < 0.05
    assert memory(plain[-1][2]).drift_gain == 0.0
    assert memory(aimed[-1][2]).drift_gain > 0.3


def test_errors_are_those_against_the_true_weights() -> None:
    for now, _, ckpt in chain(12)[4:]:
        error = np.linalg.norm(now.astype("f8") - sp.decompress(ckpt)["weight"]) / np.linalg.norm(now.astype("f8"))
        stated = ckpt.summary()[0].error
        assert error <= stated <= 1.02 * error


def test_protected_values_are_the_true_ones() -> None:
    made = chain(14, sp.Config([("*", sp.Quantize(bins=16, protect=0.02))], rate=0.002))
    now, _, ckpt = made[-1]
    assert memory(ckpt).drift_gain > 0
    at = memory(ckpt).levels.reshape(now.shape) == 1
    assert at.sum() > 100
    want = torch.from_numpy(now[at]).bfloat16().float().numpy()
    np.testing.assert_array_equal(sp.decompress(ckpt)["weight"][at], want)


@pytest.mark.parametrize("cfg", [RATED, sp.Config(max_rel_error=0.05, ahead=True)])
def test_an_aim_does_not_follow_a_jump(cfg: sp.Config) -> None:
    """A jump of the weights is not extrapolated."""
    for size in (0.3, 1.0):
        plain = aimed = None
        for step in range(24):
            now, old = drifting(step), drifting(max(0, step - 10))
            if step >= 20:
                now = np.float32(1 - size) * now + np.float32(size) * drifting(step)[::-1]
            plain = sp.compress({"weight": now}, plain, cfg)
            aimed = sp.compress(
                {"weight": now}, aimed, cfg, earlier=sp.PastWeights({"weight": old}, 90) if step else None
            )
            errors = [ckpt.summary()[0].error for ckpt in (aimed, plain)]
            assert errors[0] < 1.15 * errors[1], (size, step)
            assert aimed.records[0].stream == "levels"
            if step == 19:
                assert memory(aimed).drift_gain > 0.3


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_weights_that_have_gone_farther_than_they_are_long_are_not_aimed(factor: float) -> None:
    """Weights that were zeroed or negated get no gain."""
    plain = aimed = None
    for step in range(8):
        now = drifting(step) if step < 7 else np.float32(factor) * drifting(step)
        given = sp.PastWeights({"weight": drifting(max(0, step - 10))}, 30) if step else None
        state = {"model": {"weight": now}, **adam(drifting(step), step)}
        plain, aimed = sp.compress(state, plain, RATED), sp.compress(state, aimed, RATED, earlier=given)
        assert step != 6 or memory(aimed).drift_gain > 0.3
    errors = [ckpt.summary()[0].error for ckpt in (aimed, plain) if ckpt]
    assert errors[0] <= 1.02 * errors[1]
    assert factor or not sp.decompress(aimed)["model"]["weight"].any()


def test_a_lead_is_no_longer_than_the_rest_of_the_error() -> None:
    """The lead of moments is limited by the remaining error."""
    prev = None
    for step in range(12):
        now, old = (np.random.default_rng(s).standard_normal((160, 160)).astype("f4") for s in (step, step - 1 + 99))
        given = sp.PastWeights({"weight": old}, 30) if step else None
        prev = sp.compress({"model": {"weight": now}, **adam(now, step)}, prev, RATED, earlier=given)
        assert prev.summary()[0].error < 0.1


@pytest.mark.parametrize("cfg", [sp.presets.lossless(), sp.presets.lc_checkpoint(), sp.presets.bitsnap()])
def test_what_is_not_stored_as_levels_is_not_aimed(cfg: sp.Config) -> None:
    base = sp.compress({"weight": drifting(0)}, cfg=cfg)
    now, old = {"weight": drifting(20)}, {"weight": drifting(10)}
    assert sp.compress(now, base, cfg, earlier=old).to_bytes() == sp.compress(now, base, cfg).to_bytes()


def test_nearest_levels_of_weights_that_began_on_them_are_behind_too() -> None:
    """After a restore, nearest levels lag too, and a gain corrects it."""
    cfg = sp.Config([("*", sp.Quantize(bins=12))])
    base = sp.compress({"weight": drifting(0)}, cfg=cfg)
    w = sp.decompress(base)["weight"]
    way = np.random.default_rng(8).standard_normal(w.shape).astype("f4")
    behind = {}
    for aimed in (False, True):
        prev = base
        for step in range(1, 12):
            now, old = (w + np.float32(0.002 * s) * way for s in (step, max(0, step - 10)))
            prev = sp.compress({"weight": now}, prev, cfg, earlier={"weight": old} if aimed else None)
        behind[aimed] = lag(now, old, sp.decompress(prev)["weight"])
    assert behind[False] > 0.9
    assert abs(behind[True]) < 0.5


def test_a_parent_from_bytes_is_as_good_as_the_one_in_memory() -> None:
    read = None
    for step, (now, old, ckpt) in enumerate(chain(6)):
        again = sp.compress({"weight": now}, read, RATED, earlier={"weight": old} if step else None)
        assert again.to_bytes() == ckpt.to_bytes()
        read = sp.Checkpoint.from_bytes(ckpt.to_bytes(), read) if read else sp.Checkpoint.from_bytes(ckpt.to_bytes())
        assert memory(read).drift_gain == memory(ckpt).drift_gain


def test_earlier_weights_in_any_library_and_a_wider_dtype_are_the_same() -> None:
    prev = chain(5)[-1][2]
    now, old = drifting(5), np.round(drifting(2) * 64) / np.float32(64)
    made = {
        sp.compress({"weight": now}, prev, RATED, earlier=given).to_bytes()
        for given in (
            {"weight": old},
            {"weight": old.astype("f8")},
            {"weight": torch.from_numpy(old)},
            {"weight": np.asfortranarray(old)},
            sp.PastWeights({"weight": old}),
        )
    }
    assert len(made) == 1
    assert made != {sp.compress({"weight": now}, prev, RATED).to_bytes()}


def test_half_precision_weights() -> None:
    """Extrapolated weights are not rounded to the dtype of the weights."""
    prev, lags = {True: None, False: None}, {}
    for step in range(25):
        now, old = (torch.from_numpy(drifting(s)).bfloat16() for s in (step, max(0, step - 10)))
        for aimed in (True, False):
            prev[aimed] = sp.compress(
                {"weight": now}, prev[aimed], RATED, earlier={"weight": old} if aimed and step else None
            )
            restored = sp.decompress(prev[aimed])["weight"]
            assert restored.dtype == torch.bfloat16
            if step:
                lags[aimed] = lag(*(x.float().numpy() for x in (now, old, restored)))
    assert lags[False] > 0.4
    assert abs(lags[True]) < 0.1


def adam(w: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    m, v = rng.standard_normal((2, *w.shape)).astype("f4")
    return {"optimizer": {"state": {0: {"step": 7, "exp_avg": 0.2 * m, "exp_avg_sq": v * v + np.float32(0.1)}}}}


def test_what_first_moments_lose_is_made_up_for() -> None:
    """The gain compensates the loss of first moments on a coarse grid."""
    ended = {}
    for steps in (90.0, None):
        prev = None
        for step in range(40):
            now, old = drifting(step), drifting(max(0, step - 9))
            state = {"model": {"weight": now}, **adam(now, step)}
            given = sp.PastWeights({"weight": old}, steps) if step else None
            prev = sp.compress(state, prev, RATED, earlier=given)
            if step:
                ended.setdefault(steps, []).append(lag(now, old, sp.decompress(prev)["model"]["weight"]))
    assert abs(statistics.fmean(ended[None][-5:])) < 0.03
    assert -0.13 < statistics.fmean(ended[90.0][-5:]) < -0.07


def test_of_a_short_way_a_fifth_is_made_up_for_and_no_more() -> None:
    now, old, prev = drifting(9), drifting(2), None
    for step in range(8):
        prev = sp.compress({"model": {"weight": drifting(step)}, **adam(now, 9)}, prev, RATED)
    made = [
        sp.compress(
            {"model": {"weight": now}, **adam(now, 9)}, prev, RATED, earlier=sp.PastWeights({"weight": old}, steps)
        )
        for steps in (1, 15, 30, 90, None)
    ]
    gains = [memory(ckpt).drift_gain for ckpt in made]
    assert gains[0] == gains[1] == gains[2] > gains[3] > gains[4] > 0
    assert gains[0] - gains[4] == pytest.approx(0.1, abs=1 / GAIN_STEPS)


def test_without_moments_nothing_is_made_up_for() -> None:
    now, old, prev = drifting(5), drifting(2), chain(5)[-1][2]
    made = [
        sp.compress({"weight": now}, prev, RATED, earlier=sp.PastWeights({"weight": old}, s)).to_bytes()
        for s in (None, 9)
    ]
    assert made[0] == made[1]


@pytest.mark.parametrize("name", ["earlier", "grads"])
def test_what_has_the_path_of_one_weight_is_not_for_another(name: str) -> None:
    """Past weights apply to their own path, or to all paths that end so."""
    now, old, prev = drifting(5), drifting(2), chain(5)[-1][2]
    state = {"weight": now, "sub": {"weight": now[:, :80]}, "norm": {"weight": now[0]}}
    prev = sp.compress({**state, "weight": drifting(4)}, prev, RATED)
    made = sp.compress(state, prev, RATED, **{name: {"weight": old}})
    if name == "earlier":
        alone = {row.path: row for row in sp.compress(state, prev, RATED).summary()}
        assert [row.path for row in made.summary() if row != alone[row.path]] == ["weight"]
        base = None
        for step in range(6):
            both = {"a": {"weight": drifting(step)}, "b": {"weight": drifting(step) + np.float32(0.001)}}
            base = sp.compress(both, base, RATED, earlier={"weight": drifting(max(0, step - 3))})
        assert all(record.meta.get("a", [0])[0] > 0 for record in base.records)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"v": np.zeros((160, 160), "f4")}, "earlier/v: the state has no such weight"),
        ({"weight": np.zeros((160, 161), "f4")}, r"weight: earlier/weight has shape \(160, 161\), not \(160, 160\)"),
        ({"weight": np.zeros((160, 160), "i4")}, "weight: earlier/weight has dtype int32"),
        (np.zeros((160, 160), "f4"), "earlier must be a tree"),
        ({"weight": {1}}, "earlier/weight: builtins.set cannot be stored"),
    ],
)
def test_earlier_weights_that_do_not_fit(given: Any, words: str) -> None:
    with pytest.raises(sp.ShrinkpointError, match=words):
        sp.compress({"weight": drifting(1)}, cfg=RATED, earlier=given)


@pytest.mark.parametrize("given", [5, "weight", [{1}]])
def test_a_message_names_the_argument(given: Any) -> None:
    for name in ("earlier", "grads"):
        with pytest.raises(sp.ShrinkpointError, match=f"^{name}"):
            sp.compress({"weight": drifting(1)}, cfg=RATED, **{name: given})


@pytest.mark.parametrize("steps", [0, -1, math.inf, math.nan, "9", True])
def test_steps_out_of_range(steps: Any) -> None:
    with pytest.raises(sp.BadArgumentError, match="steps"):
        sp.PastWeights({}, steps)


@pytest.mark.parametrize("gain", [-1, GAIN_STEPS * int(LARGEST_GAIN) + 1, 1.0, True, None, "1", [1], 1 << 70])
def test_an_aim_that_is_none_is_damage(gain: Any) -> None:
    blob = chain(1)[0][2].to_bytes()
    header, pieces = take_apart(blob)
    header["groups"][0]["m"]["a"] = [gain]
    with pytest.raises(sp.CorruptDataError, match="no gain"):
        sp.decompress(sp.Checkpoint.from_bytes(put_together(header, pieces)))
    header["groups"][0]["m"]["a"] = [GAIN_STEPS * int(LARGEST_GAIN)]
    assert bits(through_bytes(sp.Checkpoint.from_bytes(put_together(header, pieces)))["weight"]) == bits(
        sp.decompress(sp.Checkpoint.from_bytes(blob))["weight"]
    )


def floats(draw: Any, n: int, width: int) -> Any:
    return np.array(draw(st.lists(st.floats(width=width), min_size=n, max_size=n)), f"f{width // 8}")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_values_at_all(data: Any) -> None:
    """Any values, now or earlier, give exact protected values and finite others."""
    width = data.draw(st.sampled_from([16, 32, 64]))
    n = 4200
    pool, other = floats(data.draw, 12, width), floats(data.draw, 12, data.draw(st.sampled_from([16, 32, 64])))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    w, old = rng.standard_normal((2, n))
    now, before = w.astype(pool.dtype), old.astype(other.dtype)
    spots = rng.integers(0, n, 40)
    now[spots], before[rng.permutation(spots)] = rng.choice(pool, 40), rng.choice(other, 40)
    now, before = now.reshape(60, 70), before.reshape(60, 70)
    last = None
    for step in range(3):
        made = sp.compress({"weight": now}, last, RATED, earlier={"weight": before} if step else None)
        restored, last = through_bytes(made, last), made
        finite = np.isfinite(now)
        assert np.isfinite(restored["weight"][finite]).all()
        assert (np.isnan(restored["weight"]) == np.isnan(now)).all()
        assert (restored["weight"][~finite & ~np.isnan(now)] == now[~finite & ~np.isnan(now)]).all()
        now = now + np.asarray(0.01, now.dtype)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 99), st.floats(0, LARGEST_GAIN), st.floats(0, 0.4), st.floats(-6, 6))
def test_the_aim_moves_by_half_of_the_lag(seed: int, gain: float, lead: float, share: float) -> None:
    """The gain moves by half of the lag, as computed in float64, and the lead is limited."""
    rng = np.random.default_rng(seed)
    w, way, noise = rng.standard_normal((3, 500))
    restored, old = w - share * way + 0.1 * noise, w - way
    behind = float(((w - restored) * way).sum() / (way * way).sum())
    found = Distances(distortion(w, restored), distortion(w, old), distortion(old, restored))
    rest = float(np.linalg.norm(w - restored - min(0.0, behind) * way) / np.linalg.norm(way))
    lead = min(lead, rest)
    got = found.next_gain(gain, lead)
    assert got == found.next_gain(gain, 1.0 + lead) or lead < rest
    far, most = -behind - lead, 0.5 * math.sqrt(found.met.squared_error / found.drift.squared_error)
    if found.drift.squared_error > found.drift.squared_norm:
        assert found.overshoot(gain, lead) == gain
    elif gain and abs(far - most) > 1e-9:
        assert found.overshoot(gain, lead) == (pytest.approx(far) if far > most else 0.0)
    assert found.overshoot(0.0, lead) == 0.0
    assert got == pytest.approx(min(LARGEST_GAIN, max(0.0, gain + 0.5 * (behind + lead))), abs=0.51 / GAIN_STEPS)
    assert got * GAIN_STEPS == round(got * GAIN_STEPS)


def test_an_aim_stays_where_there_is_no_drift_or_none_that_can_be_summed() -> None:
    w = np.linspace(-1, 1, 100)
    same, far = distortion(w, w), distortion(w, np.full(100, 1e200))
    assert Distances(distortion(w, w + 0.1), same, distortion(w, w + 0.1)).next_gain(0.25, 0.1) == 0.25
    assert Distances(distortion(w, w + 0.1)).next_gain(0.25, 0.1) == 0.25
    assert Distances(far, far, far).next_gain(0.25, 0.1) == 0.25
