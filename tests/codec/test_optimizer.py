"""Moments in units of the update: bounds, escapes, siblings, chains, and hostile headers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.base import Leaf
from shrinkpoint.codec.evidence.kind import Kind
from shrinkpoint.codec.groups import Coded
from shrinkpoint.codec.moments.logbuckets import LogBuckets
from shrinkpoint.codec.moments.secondmoment import decode_rank_one, matrix_shape
from shrinkpoint.codec.registry import STREAMS
from shrinkpoint.codec.state.leaves import LeafSpec, as_bytes

from .common import difference, regression


def adam(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Any]:
    """Return an AdamW entry as in training: v nearly of rank one, m a fraction of its root."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.exp(torch.randn(shape[0], *[1] * (len(shape) - 1), generator=g))
    columns = torch.exp(torch.randn(1, *shape[1:], generator=g))
    v = 1e-8 * rows * columns * torch.exp(0.4 * torch.randn(shape, generator=g))
    m = 0.3 * v.sqrt() * torch.randn(shape, generator=g)
    return {"step": torch.tensor(100.0), "exp_avg": m.to(dtype), "exp_avg_sq": v.to(dtype)}


def state(entry: dict[str, Any]) -> dict[str, Any]:
    return {"optimizer": {"state": {0: entry}}}


def rows_of(ckpt: sp.Checkpoint) -> dict[str, Any]:
    return {r.path.rsplit("/", 1)[-1]: r for r in ckpt.summary()}


@pytest.mark.parametrize("shape", [(64, 100), (3, 5, 7, 40), (2000, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bounds_and_size(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    entry = adam(shape, dtype)
    ckpt = sp.compress(state(entry))
    rows = rows_of(ckpt)
    assert (rows["exp_avg"].stream, rows["exp_avg_sq"].stream) == ("grid", "rank-one")
    got = sp.decompress(sp.Checkpoint.from_bytes(ckpt.to_bytes()))["optimizer"]["state"][0]
    m, v = entry["exp_avg"].double(), entry["exp_avg_sq"].double()
    m2, v2 = got["exp_avg"].double(), got["exp_avg_sq"].double()
    assert got["exp_avg"].dtype == got["exp_avg_sq"].dtype == dtype
    # Within a step of a factor of 2**0.5, and so is its mean.
    assert (torch.log2(v2 / v).abs() <= 0.6).all()
    assert (v2 > 0).all()
    # Half a step of a half, in units of the root of the decoded second moment, and the rounding of the table.
    assert ((m2 - m).abs() <= 0.5 * v2.sqrt() + 0.01 * m.abs()).all()
    assert abs(float((m2.sum() - m.sum()) / m.abs().sum())) < 0.02
    assert torch.equal(got["step"], entry["step"])
    worst = float(((v2 - v).abs() / v).max())
    assert rows["exp_avg_sq"].error == pytest.approx(worst, rel=0.01)


def test_it_is_small() -> None:
    for step, octaves, first, second in ((0.5, 0.25, 1.8, 3.4), (1.0, 1.0, 0.8, 1.6), (4.0, 3.0, 0.3, 0.6)):
        rules = [
            ("first moment", sp.FirstMoment(step=step, max_error=1)),
            ("second moment", sp.SecondMoment(octaves=octaves)),
        ]
        rows = rows_of(sp.compress(state(adam((512, 256))), cfg=sp.Config(rules)))
        assert rows["exp_avg"].bits_per_element < first
        assert rows["exp_avg_sq"].bits_per_element < second


@pytest.mark.parametrize("rate", [0.0, 0.0005, 0.02])
def test_a_rate_leaves_moments_as_they_are(rate: float) -> None:
    found = sp.decompress(sp.compress(state(adam((64, 64))), cfg=sp.Config(rate=rate)))
    assert difference(found, sp.decompress(sp.compress(state(adam((64, 64)))))) == ""


@pytest.mark.parametrize("scale", [1.0, 0.3, 0.1])
def test_a_first_moment_keeps_half_of_itself_unless_its_codec_gives_that_up(scale: float) -> None:
    """A coarse grid is refined until the relative error of a first moment is 0.58."""
    entry = adam((64, 96))
    entry["exp_avg"] *= scale
    for step, bound, least in ((0.5, None, 0.0), (4.0, None, 0.0), (4.0, 1, 0.9)):
        cfg = sp.Config([("first moment", sp.FirstMoment(step=step, max_error=bound))])
        ckpt = sp.compress(state(entry), cfg=cfg)
        row = rows_of(ckpt)["exp_avg"]
        met = relative(entry["exp_avg"], sp.decompress(ckpt)["optimizer"]["state"][0]["exp_avg"])
        assert least <= met <= 0.58 + 0.43 * (bound == 1)
        assert row.stream == "grid"
        assert ("as good as zero" in row.note) == (row.error >= 0.9) == (bound == 1)


def test_second_moments_keep_to_fractions_of_an_octave() -> None:
    entry = adam((64, 96))
    sizes, errors = [], []
    for octaves in (0.125, 0.25, 0.5, 1, 2):
        cfg = sp.Config([("second moment", sp.SecondMoment(octaves=octaves))])
        ckpt = sp.compress(state(entry), cfg=cfg)
        row = rows_of(ckpt)["exp_avg_sq"]
        v, back = entry["exp_avg_sq"], sp.decompress(ckpt)["optimizer"]["state"][0]["exp_avg_sq"]
        off = torch.log2(back.double() / v.double())
        assert float(off.abs().max()) <= 1.45 * octaves + 0.02
        # The step lengths that Adam takes, m / sqrt(v), stay as they are on average.
        assert float((v / back).sqrt().mean()) == pytest.approx(1, abs=0.05 * octaves**2 + 0.005)
        sizes.append(row.stored_bytes)
        errors.append(row.error)
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)


def test_zeros_and_what_is_not_finite_are_kept() -> None:
    entry = adam((64, 64))
    entry["exp_avg"][3] = 0
    entry["exp_avg_sq"][3] = 0
    entry["exp_avg"][0, :3] = torch.tensor([float("nan"), float("inf"), 1e30])
    entry["exp_avg_sq"][0, 3:6] = torch.tensor([float("nan"), float("inf"), 1e-42])
    got = sp.decompress(sp.compress(state(entry)))["optimizer"]["state"][0]
    assert (got["exp_avg"][3] == 0).all()
    assert (got["exp_avg_sq"][3] == 0).all()
    for name, part in (("exp_avg", slice(0, 3)), ("exp_avg_sq", slice(3, 6))):
        kept = got[name][0, part].view(torch.int32)
        assert torch.equal(kept, entry[name][0, part].view(torch.int32))


def test_a_zero_second_moment_under_a_first_one_falls_back() -> None:
    """A first moment over a zero second moment is not stored on a grid."""
    entry = adam((64, 64))
    entry["exp_avg_sq"][:] = 0
    ckpt = sp.compress(state(entry))
    assert rows_of(ckpt)["exp_avg"].stream == "log-buckets"
    m, m2 = entry["exp_avg"], sp.decompress(ckpt)["optimizer"]["state"][0]["exp_avg"]
    assert ((m2 - m).abs() <= 0.25 * m.abs()).all()


def test_without_a_sibling_or_a_matrix() -> None:
    entry = adam((64, 64))
    del entry["exp_avg_sq"]
    assert rows_of(sp.compress(state(entry)))["exp_avg"].stream == "log-buckets"
    flat = {k: v.reshape(-1) if v.ndim else v for k, v in adam((64, 64)).items()}
    rows = rows_of(sp.compress(state(flat)))
    assert rows["exp_avg_sq"].stream == "log-buckets"
    assert rows["exp_avg"].stream == "grid"
    assert matrix_shape(LeafSpec("torch", "float32", (1, 50))) is None
    assert matrix_shape(LeafSpec("torch", "float64", (5, 50))) is None


def test_along_a_chain_and_read_as_an_unresolved_delta() -> None:
    base = sp.compress(state(adam((64, 64))))
    delta = sp.compress(state(adam((64, 64), seed=1)), base)
    expected = sp.decompress(delta)["optimizer"]["state"][0]
    alone = sp.Checkpoint.from_bytes(delta.to_bytes())
    got = sp.decompress(alone, prev=sp.Checkpoint.from_bytes(base.to_bytes()))["optimizer"]["state"][0]
    for name in expected:
        assert torch.equal(got[name], expected[name])


@pytest.mark.parametrize("exact", ["exp_avg", "exp_avg_sq"])
def test_either_may_be_exact(exact: str) -> None:
    entry = adam((64, 64))
    cfg = sp.Config([(f"*/{exact}", sp.Exact())])
    base = sp.compress(state(entry), cfg=cfg)
    delta = sp.compress(state(entry), base, cfg)
    for ckpt in (base, delta):
        got = sp.decompress(ckpt)["optimizer"]["state"][0]
        assert torch.equal(got[exact], entry[exact])
    if exact == "exp_avg_sq":
        m, v = entry["exp_avg"], entry["exp_avg_sq"]
        m2 = sp.decompress(delta)["optimizer"]["state"][0]["exp_avg"]
        assert ((m2 - m).abs() <= 0.5 * v.sqrt() + 0.01 * m.abs()).all()


def test_the_second_moment_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def counted(coded: Coded) -> Any:
        calls.append(coded)
        return decode_rank_one(coded)

    blob = sp.compress(state(adam((96, 160)))).to_bytes()
    ckpt = sp.Checkpoint.from_bytes(blob)
    monkeypatch.setitem(STREAMS, "rank-one", dataclasses.replace(STREAMS["rank-one"], decode=counted))
    assert difference(sp.decompress(ckpt), sp.decompress(sp.Checkpoint.from_bytes(blob))) == ""
    assert len(calls) == 2


def moments(cfg: sp.Config, entry: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return summary rows of both moments, after a check of their errors."""
    ckpt = sp.compress(state(entry), cfg=cfg)
    got = sp.decompress(sp.Checkpoint.from_bytes(ckpt.to_bytes()))["optimizer"]["state"][0]
    rows = {row.path.rpartition("/")[2]: row for row in ckpt.summary()}
    for name in ("exp_avg", "exp_avg_sq"):
        error = float((got[name].double() - entry[name].double()).norm() / entry[name].double().norm())
        assert error <= (cfg.max_rel_error or 1.0)
        # The reported error is rounded up to three digits, and a grid's error is a sum of float64s.
        assert error <= rows[name].error <= 1.011 * error + 1e-9
    return rows


@pytest.mark.parametrize("target", [0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.003, 0.001, 1e-4])
def test_an_error_target_is_met_by_the_smallest_coding(target: float) -> None:
    entry = adam((64, 96))
    rows = moments(sp.Config(max_rel_error=target), entry)
    buckets = [("*/exp_avg", sp.LogBuckets()), ("*/exp_avg_sq", sp.LogBuckets())]
    plain = moments(sp.Config(buckets, max_rel_error=target), entry)
    for name in ("exp_avg", "exp_avg_sq"):
        assert rows[name].measure == "relative L2"
        assert rows[name].stored_bytes <= plain[name].stored_bytes
    if 0.02 <= target <= 0.1:
        assert rows["exp_avg"].stream == "grid"
        assert rows["exp_avg"].stored_bytes < 0.85 * plain["exp_avg"].stored_bytes


def test_a_target_chooses_between_rank_one_log_buckets_and_exact() -> None:
    entry = adam((64, 96))
    found = [moments(sp.Config(max_rel_error=t), entry)["exp_avg_sq"].stream for t in (0.6, 0.02)]
    assert found == ["rank-one", "log-buckets"]
    for row in sp.compress(state(entry), cfg=sp.Config(max_rel_error=1e-6)).summary():
        if row.path.endswith(("exp_avg", "exp_avg_sq")):
            assert (row.stream, row.error) == ("bytes", 0.0)
            assert row.note == "exact: log buckets miss the error target 1e-06"


def test_a_codecs_own_target_comes_before_the_configurations() -> None:
    entry = adam((64, 96))
    own = [("*/exp_avg", sp.FirstMoment(max_error=0.3)), ("*/exp_avg_sq", sp.SecondMoment(max_error=0.5))]
    rows = {
        r.path.rpartition("/")[2]: r
        for r in sp.compress(state(entry), cfg=sp.Config(own, max_rel_error=0.01)).summary()
    }
    assert 0.05 < rows["exp_avg"].error <= 0.3
    assert rows["exp_avg_sq"].stream == "rank-one"


@pytest.mark.parametrize("exponent", [-700, -565, 509, 700])
def test_an_error_target_where_squares_leave_the_range_of_a_float64(exponent: int) -> None:
    generator = np.random.default_rng(0)
    x = np.ldexp(np.exp2(generator.integers(-1, 1, 4096)) * (1 + generator.random(4096) / 64), exponent)
    x[7] = np.inf
    ckpt = sp.compress({"opt": {"state": {"0": {"exp_avg": x}}}}, cfg=sp.Config(max_rel_error=0.05))
    got = sp.decompress(ckpt)["opt"]["state"]["0"]["exp_avg"]
    near, exact = (np.ldexp(np.delete(a, 7), -exponent) for a in (got, x))
    error = np.linalg.norm(near - exact) / np.linalg.norm(exact)
    (row,) = ckpt.summary()
    assert got[7] == np.inf
    assert row.stream == "log-buckets"
    assert 0 < error <= row.error <= 0.05


def test_narrower_cells_are_tried_where_the_widest_cannot_keep_to_the_target() -> None:
    generator = np.random.default_rng(0)
    scales = np.outer(np.exp(generator.normal(size=96)), np.exp(generator.normal(size=96)))
    v = (1e-6 * scales * np.exp(0.05 * generator.normal(size=(96, 96)))).astype(np.float32)
    sizes = set()
    for octaves in (1, 2, 3, 16):
        rules = [("*/exp_avg_sq", sp.SecondMoment(octaves=octaves, max_error=0.08))]
        (row,) = sp.compress({"opt": {"state": {"0": {"exp_avg_sq": v}}}}, cfg=sp.Config(rules)).summary()
        assert row.stream == "rank-one"
        assert row.error <= 0.08
        sizes.add(row.stored_bytes)
    assert len(sizes) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: sp.FirstMoment(step=0.0),
        lambda: sp.FirstMoment(step=17.0),
        lambda: sp.FirstMoment(alpha=0.6),
        lambda: sp.SecondMoment(octaves=0),
        lambda: sp.SecondMoment(octaves=17),
        lambda: sp.SecondMoment(octaves=0.3),
        lambda: sp.SecondMoment(alpha=0.0),
        lambda: sp.SecondMoment(max_error=0.0),
        lambda: sp.FirstMoment(max_error=1.1),
        lambda: sp.LogBuckets(max_error=-1.0),
    ],
)
def test_out_of_range(make: Any) -> None:
    with pytest.raises(sp.BadArgumentError, match=r"must be"):
        make()


def test_resuming_hardly_changes_a_run() -> None:
    """AdamW resumed from compressed moments ends as from exact ones, within its noise."""
    run, fresh = regression(lambda parameters: torch.optim.AdamW(parameters, lr=2e-3, betas=(0.9, 0.999)))
    model, optimizer = fresh()
    run(model, optimizer, 300, 0)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    moments = optimizer.state_dict()
    restored = sp.decompress(sp.compress({"optimizer": moments}))["optimizer"]
    codecs = {r.stream for r in sp.compress({"optimizer": moments}).summary()}
    assert {"grid", "rank-one"} <= codecs
    ends = []
    for resumed in (moments, restored):
        model, optimizer = fresh()
        model.load_state_dict(weights)
        optimizer.load_state_dict(resumed)
        ends.append(np.mean([run(model, optimizer, 100, seed) for seed in (1, 2)]))
    assert ends[1] == pytest.approx(ends[0], rel=0.05)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def relative(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    return float((y - x).norm() / x.norm())


ADAFACTOR = {
    f"state/0/{name}": sp.Kind("linear", f"{which} moment", "weight", "Adafactor")
    for name, which in (("exp_avg", "first"), ("exp_avg_sq", "second"))
}


@pytest.mark.parametrize(
    ("entry", "kinds"),
    [
        pytest.param({"exp_avg": 1e-4 * drawn(64, 64), "exp_inf": 1e-3 * drawn(64, 64).abs()}, None, id="Adamax"),
        pytest.param(
            {"momentum_buffer": 5 * drawn(64, 64), "square_avg": 1e4 * drawn(64, 64) ** 2}, None, id="RMSprop"
        ),
        pytest.param({"exp_avg": 1e-3 * drawn(4096), "exp_avg_sq": drawn(4096) ** 2}, ADAFACTOR, id="Adafactor"),
    ],
)
def test_averages_in_another_unit_than_the_root_of_the_second_moment(
    entry: dict[str, torch.Tensor], kinds: dict[str, Any] | None
) -> None:
    ckpt = sp.compress(state(entry), kinds=kinds)
    restored = sp.decompress(ckpt)["optimizer"]["state"][0]
    first, second = entry
    assert rows_of(ckpt)[first].stream == "log-buckets"
    assert relative(entry[first], restored[first]) < 0.125
    if second == "exp_inf":
        assert torch.equal(restored[second], entry[second])


def test_the_stated_error_of_bfloat16_first_moments_holds_after_rounding() -> None:
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        m = (torch.randn(64, 64, generator=g) * 1e-4).bfloat16()
        v = (torch.rand(64, 64, generator=g) * 1e-6 + 1e-7).bfloat16()
        ckpt = sp.compress(state({"exp_avg": m, "exp_avg_sq": v}))
        row = rows_of(ckpt)["exp_avg"]
        assert row.stream == "grid"
        assert relative(m, sp.decompress(ckpt)["optimizer"]["state"][0]["exp_avg"]) <= row.error


def test_second_moments_near_the_top_of_their_range_stay_finite() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        v = torch.full((64, 64), 3.38e38)
        v[:, ::2] /= 2
        entry = {"exp_avg_sq": v.to(dtype)}
        ckpt = sp.compress(state(entry))
        back = sp.decompress(ckpt)["optimizer"]["state"][0]["exp_avg_sq"]
        assert bool(torch.isfinite(back).all())
        assert rows_of(ckpt)["exp_avg_sq"].error < 1


@pytest.mark.parametrize("many", [1, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_whose_estimate_overflows_stay_zero(dtype: torch.dtype, many: int) -> None:
    v = torch.zeros(64, 64)
    v[0] = v[:, 0] = 3e38
    v[0, 0] = 0.0
    ckpt = sp.compress({"optimizer": {"state": {i: {"exp_avg_sq": v.to(dtype)} for i in range(many)}}})
    back = sp.decompress(sp.Checkpoint.from_bytes(ckpt.to_bytes()))["optimizer"]["state"]
    for i in range(many):
        assert torch.equal(back[i]["exp_avg_sq"] == 0, v == 0)
        assert bool(torch.isfinite(back[i]["exp_avg_sq"]).all())
    assert all(row.error <= 0.25 for row in ckpt.summary())


@pytest.mark.parametrize("alpha", [0.5, 0.1, 1 / 32, 0.01, 2.0**-17])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_first_moments_alone_keep_to_alpha(dtype: torch.dtype, alpha: float) -> None:
    """Buckets are moved against the bias only as far as `alpha` allows."""
    near_an_edge = torch.full((64, 64), 1.0625 - 2.0**-10)
    near_an_edge[0] = 1.05859375
    for m in (near_an_edge, torch.linspace(-1, 1, 4096).reshape(64, 64).double() * torch.finfo(dtype).max):
        cfg = sp.Config([("first moment", sp.FirstMoment(alpha=alpha))])
        m = m.to(dtype)
        back = sp.decompress(sp.compress(state({"momentum_buffer": m}), cfg=cfg))["optimizer"]["state"][0]
        off = (back["momentum_buffer"].double() - m.double()).abs()
        assert bool((off <= alpha * m.double().abs()).all())


@pytest.mark.parametrize("seed", [59, 75, 84])
def test_the_error_of_a_grid_counts_the_rounding_of_its_gain(seed: int) -> None:
    rng = np.random.default_rng(seed)
    v, m = np.full((32, 64), 1e-6, "f4"), np.zeros((32, 64), "f4")
    m[0, 0] = 1e-3 * 32 * rng.uniform(1.00385, 1.003906)  # a gain of 257 / 256 nearly restores it
    m[1:] = rng.standard_normal((31, 64)) * 1e-11
    ckpt = sp.compress(state({"exp_avg": m, "exp_avg_sq": v}))
    back = sp.decompress(ckpt)["optimizer"]["state"][0]["exp_avg"].astype("f8")
    row = rows_of(ckpt)["exp_avg"]
    assert row.stream == "grid"
    assert np.linalg.norm(back - m) <= row.error * np.linalg.norm(m.astype("f8"))


@pytest.mark.parametrize(("owner", "codec"), [("AdamW", "grid"), ("Lamb", "grid"), ("RMSprop", "log-buckets")])
def test_moments_by_other_names_go_by_the_optimizers_class(owner: str, codec: str) -> None:
    kinds = {
        "weight/momentum": sp.Kind("linear", "first moment", "weight", owner),
        "weight/velocity": sp.Kind("linear", "second moment", "weight", owner),
    }
    entry = adam((64, 100))
    tree = {"optimizer": {"weight": {"momentum": entry["exp_avg"], "velocity": entry["exp_avg_sq"]}}}
    rows = rows_of(sp.compress(tree, kinds=kinds))
    assert (rows["momentum"].stream, rows["velocity"].stream) == (codec, "rank-one")


def test_a_tree_of_parameters_below_each_moment_is_paired_like_any_other() -> None:
    """Moments in Optax's layout are paired like those of torch."""
    entries = {name: adam((64, 96), seed=seed) for seed, name in enumerate(("dense/kernel", "out/kernel"))}
    optax = {
        kind: {name.split("/")[0]: {"kernel": entry[own]} for name, entry in entries.items()}
        for kind, own in (("mu", "exp_avg"), ("nu", "exp_avg_sq"))
    }
    ckpt = sp.compress({"opt_state": [{"count": torch.tensor(3), **optax}]})
    usual = sp.compress({"optimizer": {"state": dict(enumerate(entries.values()))}})
    streams = sorted(row.stream for row in ckpt.summary())
    assert streams == ["bytes", "grid", "grid", "rank-one", "rank-one"]
    moments_of = [sum(r.stored_bytes for r in c.summary() if r.stream != "bytes") for c in (ckpt, usual)]
    assert moments_of[0] == moments_of[1]
    back = sp.decompress(sp.Checkpoint.from_bytes(ckpt.to_bytes()))["opt_state"][0]
    kept = sp.decompress(usual)["optimizer"]["state"]
    for at, name in enumerate(("dense", "out")):
        assert torch.equal(back["mu"][name]["kernel"], kept[at]["exp_avg"])
    lone = sp.compress({"opt_state": [{"count": torch.tensor(3), "mu": optax["mu"]}, {"nu": optax["nu"]}]})
    assert {row.stream for row in lone.summary() if "/mu/" in row.path} == {"log-buckets"}


@pytest.mark.parametrize("spread", [6.0, 8.0, 10.0, 12.0])
def test_second_moments_of_any_spread_keep_to_their_cells(spread: float) -> None:
    """Second moments beyond the range of their factors stay within the bound."""
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        v = (10.0 ** (spread * torch.randn(64, 96, generator=g, dtype=torch.float64))).clamp(1e-44, 3e38).float()
        ckpt = sp.compress(state({"exp_avg_sq": v}))
        back = sp.decompress(sp.Checkpoint.from_bytes(ckpt.to_bytes()))["optimizer"]["state"][0]["exp_avg_sq"]
        off = (torch.log2(back.double()) - torch.log2(v.double())).abs()
        assert float(off.max()) < 2.2
        assert rows_of(ckpt)["exp_avg_sq"].error < 4


@pytest.mark.parametrize("rate", [0.0, 0.001, 0.01])
def test_a_grid_that_holds_nothing_is_not_taken(rate: float) -> None:
    """A grid on which a first moment would be all zeros is not used."""
    g = torch.Generator().manual_seed(0)
    v = 1e-2 * torch.rand(4096, generator=g)
    for size, codec in ((1e-4, "log-buckets"), (3e-2, "grid")):
        m = size * torch.randn(4096, generator=g)
        ckpt = sp.compress(state({"exp_avg": m, "exp_avg_sq": v}), cfg=sp.Config(rate=rate))
        row = rows_of(ckpt)["exp_avg"]
        assert row.stream == codec
        if codec == "log-buckets":
            assert relative(m, sp.decompress(ckpt)["optimizer"]["state"][0]["exp_avg"]) <= 0.25
    # An array of mostly zeros with a few large values is on the grid as before.
    m = torch.zeros(4096)
    m[::512] = 0.3 * v[::512].sqrt()
    assert rows_of(sp.compress(state({"exp_avg": m, "exp_avg_sq": v})))["exp_avg"].stream == "grid"


@pytest.mark.parametrize("library", ["torch", "numpy"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_log_buckets_at_hand_are_those_a_reader_sees(library: str, dtype: str) -> None:
    """The encoder's decoded log buckets equal the reader's, bit for bit."""
    rng = np.random.default_rng(5)
    x = (rng.standard_normal(600) * np.exp(3 * rng.standard_normal(600))).astype(dtype)
    x[[3, 50, 51, 99]] = np.nan, np.inf, -np.inf, 0.0
    x[7] = -np.asarray(np.nan, dtype)  # another pattern of the same
    spec = LeafSpec(library, dtype, (600,))
    flat = torch.from_numpy(x) if library == "torch" else x
    stored = LogBuckets().encode(Leaf("v", "v", spec, Kind("other", "second moment"), flat), None)
    assert stored.stream == "log-buckets"
    assert stored.decoded is not None
    pieces = [memoryview(piece) for piece in stored.pieces]
    (reference,) = STREAMS[stored.stream].decode(Coded((spec,), stored.meta, pieces, (None,)))
    seen = reference.values(spec)
    np.testing.assert_array_equal(as_bytes(stored.decoded()), as_bytes(seen))


@pytest.mark.parametrize("spread", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("shape", [(64, 96), (300, 700)])
def test_first_moments_come_back_without_bias(spread: float, shape: tuple[int, int]) -> None:
    """The projection of the restored first moment on the original is the original's size."""
    torch.manual_seed(1)
    v = torch.exp(2 * torch.randn(shape)).float()
    u = torch.randn(shape) * 0.25 * torch.exp(spread * torch.randn(shape[0], 1))
    entry = {"step": torch.tensor(10.0), "exp_avg": u * v.sqrt(), "exp_avg_sq": v}
    back = sp.decompress(sp.compress(state(entry)))["optimizer"]["state"][0]["exp_avg"].double()
    m = entry["exp_avg"].double()
    assert 0.98 <= float((back * m).sum() / (m * m).sum()) <= 1.02


def test_a_coarse_grid_without_bound_has_no_gain() -> None:
    entry = adam((64, 96))
    cfg = sp.Config([("first moment", sp.FirstMoment(step=4.0, max_error=1))])
    back = sp.decompress(sp.compress(state(entry), cfg=cfg))["optimizer"]["state"][0]["exp_avg"]
    assert float((back * entry["exp_avg"]).sum() / entry["exp_avg"].square().sum()) < 0.9


def test_moments_of_another_basis_and_maxima_are_exact() -> None:
    entry = adam((64, 96))
    rotated = entry | {"Q": [torch.eye(64), torch.eye(96)]}
    assert rows_of(sp.compress(state(rotated)))["exp_avg"].measure == "exact"
    largest = entry | {"max_exp_avg_sq": 2 * entry["exp_avg_sq"]}
    rows = rows_of(sp.compress(state(largest)))
    assert rows["max_exp_avg_sq"].measure == "exact"
    assert rows["exp_avg"].stream == "grid"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("power", [1, 3])
def test_first_moments_without_a_second_neither_grow_nor_shrink(dtype: torch.dtype, power: int) -> None:
    """Midpoints of buckets alone are 2 to 10 % too long."""
    m = (torch.randn(64, 100, generator=torch.Generator().manual_seed(power)) ** power).to(dtype)
    back = sp.decompress(sp.compress(state({"momentum_buffer": m})))["optimizer"]["state"][0]["momentum_buffer"]
    wide, restored = m.double(), back.double()
    assert 0.99 < float((wide * restored).sum() / (wide * wide).sum()) < 1.01
    assert bool(((restored - wide).abs() <= 0.25 * wide.abs()).all())
    assert bool(((restored == 0) == (wide == 0)).all())
