"""Kinds: names that resemble an optimizer's, and moments that must be exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.evidence.kind import Kind

from .common import difference, through_bytes

CONFIGS = {
    "default": sp.Config(),
    "rate": sp.Config(rate=0.001),
    "target": sp.Config(max_rel_error=0.1),
    "asked for": sp.Config([("*", sp.LogBuckets(0.25))]),
    "inshrinkerator": sp.presets.inshrinkerator(),
    "lc": sp.presets.lc_checkpoint(),
    "check-n-run": sp.presets.check_n_run(moment_bits=8),
    "bitsnap": sp.presets.bitsnap(),
}


UNKNOWN = pytest.mark.filterwarnings("ignore::shrinkpoint.UnknownArraysWarning")
"""For states of which the kinds name a part."""


def drawn(seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(128, 96)).astype("f4")


def nested(path: str, x: Any) -> Any:
    for key in reversed(path.split("/")):
        x = {key: x}
    return x


@pytest.mark.parametrize("cfg", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("kinds", [False, True])
@pytest.mark.parametrize(
    ("second", "average"),
    [
        ("optimizer/state/0/square_avg", "optimizer/state/0/grad_avg"),
        ("optimizer/net/first/kernel/velocity", "optimizer/net/first/kernel/average_gradient"),
        ("opt_state/0/nu/first/kernel", "opt_state/0/mu/first/kernel"),
    ],
    ids=["torch", "keras", "optax"],
)
def test_what_a_square_is_subtracted_from_is_exact(cfg: sp.Config, kinds: bool, second: str, average: str) -> None:
    """Both terms of v - m**2 are exact, because the difference can be close to zero."""
    g = drawn()
    entry = {second: g * g * np.float32(1.0001), average: g}
    table = None
    if kinds:
        table = {
            second: sp.Kind("linear", "second moment", "weight"),
            average: sp.Kind("linear", "first moment", "weight"),
        }
    prev = read = None
    for factor in (1.0, 1.01):
        state: dict[str, Any] = {"optimizer": {"x": 1}}
        for path, x in entry.items():
            _put(state, path, x * np.float32(factor if path == average else factor**2))
        prev = sp.compress(state, prev, cfg, kinds=table)
        read = sp.Checkpoint.from_bytes(prev.to_bytes(), read)
        back = sp.decompress(read)
        assert difference(state, back) == ""
        assert (_at(back, second) >= _at(back, average) ** 2).all()


def _put(state: dict[str, Any], path: str, x: Any) -> None:
    *above, last = path.split("/")
    for key in above:
        state = state.setdefault(key, {})
    state[last] = x


def _at(state: Any, path: str) -> Any:
    for key in path.split("/"):
        state = state[key]
    return state


def test_optax_adam_is_told_from_its_centered_rmsprop() -> None:
    """Adam is recognised by a count or by a first moment above the root of its second."""
    g = drawn()
    entry = {"mu": {"weight": g}, "nu": {"weight": g * g * np.float32(1.1)}}
    for more, factor, codec in (
        ({}, 1.0, "bytes"),
        ({"count": np.int32(3)}, 1.0, "rank-one"),
        ({"count": np.asarray(3)}, 1.0, "rank-one"),
        ({}, 0.5, "rank-one"),
    ):
        nu = {"weight": entry["nu"]["weight"].copy()}
        nu["weight"][3, 4] *= np.float32(factor)
        rows = sp.compress({"opt_state": [{**more, "mu": entry["mu"], "nu": nu}]}).summary()
        assert next(r.stream for r in rows if "/nu/" in r.path) == codec


def test_the_summary_says_why() -> None:
    g = drawn()
    (row, _) = sp.compress({"optimizer": {"state": {0: {"square_avg": 2 * g * g, "grad_avg": g}}}}).summary()
    assert row.why == "exact: an update subtracts the square of an average from it"


@pytest.mark.parametrize("rate", [0.0, 0.001])
def test_centered_rmsprop_goes_on(rate: float) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(256, 32), torch.randn(256, 16)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, centered=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    for _ in range(300):
        step()
    state = through_bytes(sp.compress({"optimizer": optimizer.state_dict()}, cfg=sp.Config(rate=rate)))
    optimizer.load_state_dict(state["optimizer"])
    losses = [step() for _ in range(20)]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "path",
    [
        "opt/layers/3/v", "opt/decoder/layers/3/nu", "optical_flow/encoder/0/v", "policy/optimal_q/0/v", "options/0/v",
        "adopt/0/v", "model/momentum", "layers/3/nu/kernel", "model/velocity/momentum",
    ],
)  # fmt: skip
def test_weights_are_not_taken_for_moments(path: str) -> None:
    """Weights with a name of moments are exact without evidence, and weights with it."""
    x = nested(path, drawn())
    if not path.endswith("kernel"):
        with pytest.warns(sp.UnknownArraysWarning, match=path):
            (row,) = sp.compress(x).summary()
        assert (row.codec, row.measure, row.why) == ("exact", "exact", "nothing says what it is")
    (row,) = sp.compress(x, kinds=None if path.endswith("kernel") else {path: "linear"}).summary()
    assert row.stream == "levels"
    assert row.error < 0.1


def layer(seed: int) -> dict[str, Any]:
    """Return a JAX layer without negative values, as in a second moment."""
    return {"kernel": abs(drawn(seed)), "bias": abs(drawn(seed + 1)[0]) + 1}


@pytest.mark.parametrize("name", ["mu", "nu"])
@pytest.mark.parametrize(
    "root", [lambda p: (p, {"step": 1}), lambda p: {"models": [p, p]}, lambda p: {"layers": {"0": p}}]
)
def test_a_layer_called_mu_is_no_moment(name: str, root: Any) -> None:
    """Layers called `mu` or `nu` are weights: kernels may be lossy, biases are exact."""
    state = root({"encoder": {name: layer(0), "logvar": layer(5)}})
    base = sp.compress(state)
    rows = {row.path: row for row in sp.compress(state, prev=base).summary()}
    for path, row in rows.items():
        assert row.measure == "exact" or (path.endswith("kernel") and row.error < 0.1), path
        assert row.bits_per_element < 0.3, path
    assert difference(state, sp.decompress(sp.compress(state, cfg=sp.presets.lossless()))) == ""


@pytest.mark.parametrize("more", [{}, {"nu": {"weight": drawn() ** 2}}])
def test_below_a_number_alone_moments_are_recognised_by_a_count(more: dict[str, Any]) -> None:
    """Moments of Optax in a tuple stand next to the number of steps."""
    state = ({"weight": drawn(2)}, ({**more, "count": np.asarray(3), "mu": {"weight": drawn(1)}},))
    codecs = {row.path: row.stream for row in sp.compress(state).summary()}
    assert codecs["1/0/mu/weight"] in ("grid", "log-buckets")
    assert codecs.get("1/0/nu/weight", "rank-one") == "rank-one"


def test_a_kind_told_by_hand_is_kept_below_a_number() -> None:
    state = ({"weight": drawn(2)}, ({"mu": {"weight": drawn(1)}},))
    told = {"0/weight": "linear", "mu/weight": Kind("linear", "first moment")}
    assert {r.path: r.stream for r in sp.compress(state, kinds=told).summary()}["1/0/mu/weight"] == "log-buckets"


@UNKNOWN
@pytest.mark.parametrize("both", [False, True])
def test_kinds_of_one_model_say_nothing_of_another_whose_layers_are_called_alike(both: bool) -> None:
    torch.manual_seed(0)
    one = torch.nn.Sequential(torch.nn.Linear(64, 64))
    other = torch.nn.Sequential(torch.nn.LayerNorm(2048), torch.nn.Linear(2048, 1))
    torch.nn.init.normal_(other[0].weight)
    given = {**sp.kinds(other), **sp.kinds(one)} if both else sp.kinds(one)
    state = {"model": one.state_dict(), "other": other.state_dict(), "average": one.state_dict()}
    rows = {row.path: row for row in sp.compress(state, kinds=given).summary()}
    assert rows["other/0.weight"].measure == "exact"
    assert rows["model/0.weight"].stream == "levels"


def test_a_copy_of_a_model_is_of_its_kinds() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm((64, 64)))
    torch.nn.init.normal_(model[0].weight)
    state = {"model": model.state_dict(), "average": {k: v + 1 for k, v in model.state_dict().items()}}
    assert {row.measure for row in sp.compress(state, kinds=sp.kinds(model)).summary()} == {"exact"}


@pytest.mark.parametrize("path", ["opt/0/v", "optimizer/3/nu", "optimizer/state/w/v", "opt_state/1/nu/kernel"])
def test_what_is_negative_is_no_second_moment(path: str) -> None:
    """A second moment with negative values is exact, and so is its first moment."""
    x = drawn()
    x[:-1] = abs(x[:-1])
    beside = path.replace("nu", "mu") if "nu" in path else path[:-1] + "m"
    state: dict[str, Any] = {}
    _put(state, path, x)
    _put(state, beside, drawn(1))
    assert difference(state, sp.decompress(sp.compress(state))) == ""


@pytest.mark.parametrize(
    "path",
    [
        "opt/0/v", "optim/0/v", "optims/1/0/v", "optimizer/7/nu", "optimizers/0/3/v", "optimizer_0/3/v",
        "opt_state/0/v", "my_optim/groups/0/v", "optimizer_states/0/0/v", "optim-g/0/v", "g_opt/0/v",
        "fused_optimizer/0/v", "optimiser/0/v", "optG/0/v", "optimizerA/3/v", "optimG/0/v", "optax_state/0/nu",
        "optimizer/state/w/v", "optimizer/layers/3/v", "Optimizer/0/v",
    ],
)  # fmt: skip
def test_optimizers_by_many_names(path: str) -> None:
    (row,) = sp.compress(nested(path, drawn() ** 2 + np.float32(1e-9))).summary()
    assert row.stream == "rank-one"


@pytest.mark.parametrize("path", ["optimizer/state/0/momentum", "opt/momentum/w0/momentum"])
def test_momentum_below_an_optimizer_is_a_first_moment(path: str) -> None:
    (row,) = sp.compress(nested(path, drawn())).summary()
    assert row.stream == "log-buckets"


@UNKNOWN
def test_kinds_of_another_state_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(64, 64), torch.nn.Linear(64, 64))
    other = {f"policy.{name}": x for name, x in model.state_dict().items()}
    cfg = sp.Config([("embedding", sp.Exact())])
    with pytest.raises(sp.BadArgumentError, match=r"none of its 3 paths \(0.weight, .*\) is .* \(policy.0.weight, "):
        sp.compress(other, cfg=cfg, kinds=sp.kinds(model))
    with pytest.raises(sp.BadArgumentError, match="kinds: none"):
        sp.compress({"a": drawn()}, kinds={"b": "embedding"})
    # Of the state they are for, they may tell more than it holds, and less.
    optimizer = torch.optim.AdamW(model.parameters())
    (row, *_) = sp.compress({"model": model.state_dict()}, cfg=cfg, kinds=sp.kinds(model, optimizer)).summary()
    assert row.measure == "exact"
    sp.compress({"model": other}, kinds={"policy.0.weight": "embedding"})
    sp.compress({"step": 3}, kinds=sp.kinds(model))


@UNKNOWN
def test_kinds_may_name_the_second_name_of_a_tied_array() -> None:
    w = torch.randn(64, 64)
    sp.compress({"head.weight": w, "table.weight": w}, kinds={"table.weight": "embedding"})


@UNKNOWN
def test_a_framework_may_save_a_part_of_what_its_kinds_name(tmp_path: Any) -> None:
    """Kinds may name arrays that the saved part of a state does not have."""
    from shrinkpoint.trainers.pointers import load_at, save_at

    state = {"adapter.weight": torch.randn(64, 64)}
    save_at(tmp_path / "x", sp.Store(tmp_path / "store"), state, kinds={"base.a": "embedding"})
    assert load_at(tmp_path / "x")["adapter.weight"].shape == (64, 64)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.int32])
@pytest.mark.parametrize("path", ["optimizer/state/0/v", "layers/0/nu/kernel"])
def test_names_of_moments_on_dtypes_that_have_no_order(path: str, dtype: torch.dtype) -> None:
    state = nested(path, torch.ones(9, 40).to(dtype))
    assert difference(state, sp.decompress(sp.compress(state))) == ""


@UNKNOWN
def test_what_stands_beside_a_word_of_optimizers_in_a_model_is_not_exact() -> None:
    kinds = {"net/mg": "linear", "net/kernel": "linear"}
    (first, second) = sp.compress({"net": {"mg": drawn(), "kernel": drawn(1)}}, kinds=kinds).summary()
    assert (first.stream, second.stream) == ("levels", "levels")


def test_a_weight_that_a_name_takes_for_a_moment_has_its_gradient() -> None:
    weights = {"layers": [{"nu": {"weight": drawn()}}]}
    gradients = {"layers": [{"nu": {"weight": drawn(1)}}]}
    cfg = sp.Config([("*", sp.Quantize(prune=0.2, prune_metric="sensitivity"))])
    assert sp.compress(weights, cfg=cfg, grads=gradients).summary()[0].stream == "levels"


def test_gradients_of_subnormal_size() -> None:
    gradients = {"weight": np.full((64, 64), 1e-310)}
    assert (
        sp.compress({"weight": drawn()[:64, :64].copy()}, cfg=sp.Config(rate=0.001), grads=gradients).is_delta is False
    )


# ------------------------------------------------------------------------------------------- several trees of one name


def trained_pair() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(32, 32)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def lossy(state: Any, kinds: Any = None) -> set[str]:
    """Return the paths of weights that `compress` changes."""
    return {row.path for row in sp.compress(state, kinds=kinds).summary() if row.codec == "quantize"}


@pytest.mark.parametrize("copy", ["best_model", "fisher", "policy_old", "master_weights", "zz"])
def test_kinds_are_those_of_the_model_and_of_no_copy(copy: str) -> None:
    model, optimizer = trained_pair()
    weights = model.state_dict()
    others = {name: value * 0.9 for name, value in weights.items()}
    state = {copy: others, "model": weights, "optimizer": optimizer.state_dict()}
    assert lossy(state, sp.kinds(model, optimizer)) == {"model/0.weight", "model/2.weight"}
    reasons = {row.path: row.why for row in sp.compress(state, kinds=sp.kinds(model, optimizer)).summary()}
    assert reasons[f"{copy}/2.weight"] == "kinds are those of model/"


def test_kinds_that_fit_several_trees_are_no_evidence() -> None:
    model, optimizer = trained_pair()
    weights = model.state_dict()
    state = {"online": weights, "second": {name: 2 * value for name, value in weights.items()}}
    kinds = sp.kinds(model, optimizer)
    with pytest.warns(sp.UnknownArraysWarning, match=r"online/, second/.*PART \+ name"):
        assert lossy(state, kinds) == set()
    with pytest.warns(sp.UnknownArraysWarning, match="second/2.weight"):
        found = lossy(state, {"online/" + name: kind for name, kind in kinds.items()})
    assert found == {"online/0.weight", "online/2.weight"}


def test_the_tree_of_an_optimizer_has_the_kinds() -> None:
    """Two models with equal names and an optimizer each keep their kinds."""
    (generator, first), (critic, second) = trained_pair(), trained_pair()
    state = {
        "gen": generator.state_dict(),
        "disc": critic.state_dict(),
        "opt_g": first.state_dict(),
        "opt_d": second.state_dict(),
    }
    kinds = {**sp.kinds(generator, first), **sp.kinds(critic, second)}
    assert lossy(state, kinds) == {f"{part}/{i}.weight" for part in ("gen", "disc") for i in (0, 2)}


def test_ranks_hold_the_same_tree() -> None:
    model, optimizer = trained_pair()
    state = {"ranks": {str(i): {"model": {k: v + i for k, v in model.state_dict().items()}} for i in range(2)}}
    assert len(lossy(state, sp.kinds(model, optimizer))) == 4


@pytest.mark.no_evidence
def test_a_name_alone_is_no_evidence() -> None:
    model, _ = trained_pair()
    model.register_buffer("kernel", torch.randn(64, 1, 5, 5))
    with pytest.warns(sp.UnknownArraysWarning, match="nothing says what these arrays are"):
        assert lossy({"model": model.state_dict()}) == set()
    assert lossy({"model": model.state_dict()}, sp.kinds(model)) == {"model/0.weight", "model/2.weight"}


@pytest.mark.parametrize(
    ("trained", "copy"), [("policy", "best/model"), ("policy", "fisher/params"), ("weights", "a/net")]
)
def test_a_copy_that_is_called_as_a_model_deeper_in_a_state_is_no_model(trained: str, copy: str) -> None:
    model, optimizer = trained_pair()
    weights, (outer, inner) = model.state_dict(), copy.split("/")
    others = {name: value * 0.9 for name, value in weights.items()}
    with pytest.warns(sp.UnknownArraysWarning, match="kinds fit several parts"):
        assert lossy({trained: weights, outer: {inner: others}}, sp.kinds(model, optimizer)) == set()


@pytest.mark.no_evidence
def test_a_copy_of_the_trained_part_of_a_model_is_not_what_the_optimizer_trains() -> None:
    model, optimizer = trained_pair()
    weights = model.state_dict()
    copy = {name: value * 0.9 for name, value in weights.items()}
    state = {"net": {**weights, "more.weight": torch.randn(64, 64)}, "ref": copy, "opt": optimizer.state_dict()}
    with pytest.warns(sp.UnknownArraysWarning):
        assert lossy(state) == set()


def test_lazy_modules_have_kinds_before_their_first_call() -> None:
    """Their parameters have no shape yet; a save of them is refused with the path."""

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.LazyLinear(64), torch.nn.LazyBatchNorm1d())

    lazy, called = model(), model()
    before = sp.kinds(lazy)
    called(torch.ones(4, 64))
    assert before == sp.kinds(called)
    with pytest.raises(sp.UnsupportedLeafError, match=r"0\.weight: an uninitialized parameter has no values"):
        sp.compress(lazy.state_dict(), kinds=before)
    rows = sp.compress(called.state_dict(), kinds=before).summary()
    assert {row.path: row.why for row in rows} == {
        row.path: row.why for row in sp.compress(called.state_dict(), kinds=sp.kinds(called)).summary()
    }
