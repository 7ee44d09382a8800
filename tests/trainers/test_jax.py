"""The functional API on JAX pytrees, with registered containers and Optax's."""

from __future__ import annotations

import collections
import doctest
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shrinkpoint as sp

jax = pytest.importorskip("jax", reason="JAX is not installed; `make frameworks` has it")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from shrinkpoint.trainers import jax as adapter  # noqa: E402
from shrinkpoint.trainers.jax import fitted, nested  # noqa: E402
from tests.pages import run_page  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
Moments = collections.namedtuple("Moments", "count mu nu")


@jax.tree_util.register_dataclass
@dataclass
class Run:
    """A dataclass that is registered with JAX."""

    params: Any
    opt: Any
    done: int


def run_of(seed: int = 0) -> Run:
    weights, moments = (jax.random.normal(key, (64, 48)) for key in jax.random.split(jax.random.PRNGKey(seed)))
    params = {"kernel": weights, "bias": jnp.zeros(48, jnp.bfloat16)}
    mu = {"kernel": moments * 1e-3, "bias": jnp.ones(48, jnp.bfloat16)}
    return Run(params, (None, Moments(jnp.asarray(7, jnp.int32), mu, jax.tree.map(jnp.square, mu))), 12)


def same(a: Any, b: Any) -> bool:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = list(zip(jax.tree.leaves(nested(a)), jax.tree.leaves(nested(b)), strict=True))
    return all(type(x) is type(y) and np.asarray(x).dtype == np.asarray(y).dtype for x, y in pairs) and all(
        np.array_equal(x, y) for x, y in pairs
    )


def test_a_tree_of_registered_classes_comes_back() -> None:
    state, later = run_of(), run_of(1)
    exact = sp.presets.lossless()
    base = sp.compress(nested(state), cfg=exact)
    delta = sp.compress(nested(later), base, exact)
    assert {row["path"] for row in base.summary()} >= {"params/kernel", "opt/1/mu/kernel"}
    assert same(fitted(sp.decompress(base), later), state)
    assert same(fitted(sp.decompress(delta, base), state), later)


def test_the_refusal_names_the_way() -> None:
    state = run_of()
    for tree in ({"run": state}, {"opt": state.opt}):
        with pytest.raises(sp.UnsupportedLeafError, match=r"trainers\.jax\.nested\(tree\), fitted"):
            sp.compress(tree)
    for root in (state, state.opt[1]):
        with pytest.raises(sp.BadArgumentError, match=r"trainers\.jax\.nested\(tree\), fitted"):
            sp.compress(root)
    with pytest.raises(sp.UnsupportedLeafError) as caught:
        sp.compress({"set": {1}})
    assert "jax" not in str(caught.value)


def test_dtypes_and_shardings_are_those_of_the_target() -> None:
    state = nested(run_of())
    ckpt = sp.decompress(sp.compress(state, cfg=sp.presets.lossless()))
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    like = jax.tree.map(lambda x: x, run_of(3))
    where = NamedSharding(mesh, P("x"))
    like.params["kernel"] = jax.ShapeDtypeStruct((64, 48), jnp.bfloat16, sharding=where)
    like.params["bias"] = np.zeros(48, np.float32)
    found = fitted(ckpt, like)
    assert (found.params["kernel"].dtype, found.params["kernel"].sharding) == (jnp.bfloat16, where)
    assert isinstance(found.params["bias"], np.ndarray)
    assert found.params["bias"].dtype == np.float32
    assert found.done == 12


def test_what_does_not_fit_is_listed() -> None:
    plain = nested(run_of())
    like = run_of()
    like.params["more"] = jnp.zeros(2)
    like.params["kernel"] = jnp.zeros((64, 47))
    like.opt[1].mu["bias"] = jnp.zeros(48, jnp.int32)
    like.opt[1].nu.pop("bias")
    like.done = "twelve"
    with pytest.raises(sp.BadArgumentError) as caught:
        fitted(plain, like)
    for line in (
        "done: 12 in the checkpoint, str in like",
        "opt/1/mu/bias: bfloat16 in the checkpoint, int32 in like",
        "opt/1/nu/bias: not in like",
        "params/kernel: shape (64, 48) in the checkpoint, (64, 47) in like",
        "params/more: not in the checkpoint",
    ):
        assert line in str(caught.value)
    many = {f"w{i:02}": 1 for i in range(30)}
    with pytest.raises(sp.BadArgumentError, match="w19: not in like\n  and 10 more"):
        fitted(many, {})


def test_kinds_of_numbers_are_kept() -> None:
    for held, wanted, fits in [
        ("float32", "int32", False),
        ("int32", "uint32", False),
        ("int32", "bool", False),
        ("int32", "float32", True),
        ("uint8", "int32", True),
        ("float32", "bfloat16", True),
        ("bool", "int32", True),
    ]:
        plain, like = {"x": jnp.ones(3, held)}, {"x": jnp.zeros(3, wanted)}
        if fits:
            assert fitted(plain, like)["x"].dtype == wanted
        else:
            with pytest.raises(sp.BadArgumentError, match=f"x: {held} in the checkpoint, {wanted} in like"):
                fitted(plain, like)


def test_integers_that_the_target_does_not_hold_are_refused() -> None:
    """They came back modulo 2**32."""
    for held, dtype in ((np.int64(3_000_000_000), "int32"), (np.uint64(1 << 63), "int32"), (300, "int8")):
        with pytest.raises(sp.BadArgumentError, match=f"n: u?int64 .* values that {dtype} in like does not hold"):
            fitted({"n": held}, {"n": jnp.zeros((), dtype)})
        assert fitted({"n": held}, {"n": jnp.float32(0)})["n"] == np.float32(held)
    assert fitted({"n": np.int64(7)}, {"n": jnp.int8(0)})["n"] == 7


def test_what_jax_has_no_dtype_for_comes_back_as_numpy() -> None:
    plain: dict[str, Any] = {"n": np.array([2**40 + 5]), "x": np.array([1 / 3]), "z": np.array([1 / 3 + 2j])}
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in plain.items()}
    found = fitted(plain, like)
    assert all(isinstance(x, np.ndarray) for x in found.values())
    assert same(found, plain)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like["x"] = jax.ShapeDtypeStruct((1,), np.float64, sharding=where)
    with pytest.raises(sp.BadArgumentError, match="x: float64 with a sharding in like: JAX has no such array"):
        fitted(plain, like)
    with jax.enable_x64(True):
        found = fitted(plain, like)
        assert all(isinstance(x, jax.Array) for x in found.values())
        assert all(found[name].dtype == x.dtype and np.array_equal(found[name], x) for name, x in plain.items())
    assert fitted(plain, {**like, "x": jnp.zeros(1)})["x"].dtype == jnp.float32, "what is asked for is no surprise"


def test_typed_keys_come_back() -> None:
    keys = {"one": jax.random.key(3), "more": jax.random.split(jax.random.key(4, impl="rbg"), 3)}
    plain = sp.decompress(sp.compress(nested(keys)))
    for like in (jax.tree.map(jnp.zeros_like, keys), jax.eval_shape(lambda: keys)):
        found = fitted(plain, like)
        for name, key in keys.items():
            assert jax.random.key_impl(found[name]) == jax.random.key_impl(key)
            assert np.array_equal(jax.random.key_data(found[name]), jax.random.key_data(key))
    with pytest.raises(sp.BadArgumentError, match=r"one: shape \(2,\) in the checkpoint, \(4,\) in like"):
        fitted(plain, keys | {"one": jax.random.key(3, impl="rbg")})


def test_names_that_meet_are_refused() -> None:
    with pytest.raises(sp.BadArgumentError, match="2 leaves have 1 names"):
        nested({"b": _Both(1, 2)})
    with pytest.raises(sp.BadArgumentError, match="a single"):
        nested(jnp.ones(3))


class _Both:
    """A container whose two leaves have the same name."""

    def __init__(self, *leaves: Any) -> None:
        self.leaves = leaves


jax.tree_util.register_pytree_with_keys(
    _Both, lambda both: ([(jax.tree_util.DictKey("x"), leaf) for leaf in both.leaves], None), lambda _, ls: _Both(*ls)
)


def test_optax_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    optax = pytest.importorskip("optax", reason="optax is not installed; `make frameworks` has it")
    x = jax.random.normal(jax.random.PRNGKey(5), (256, 64))
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(optax.add_noise(1e-3, 0.5, 0), {"kernel": True, "bias": False}),
        optax.adamw(optax.cosine_decay_schedule(1e-2, 40)),
        optax.ema(0.9),
    )

    def loss(params: Any) -> Any:
        return jnp.square(x @ params["kernel"] + params["bias"] - jnp.sin(x[:, :48])).mean()

    @jax.jit
    def step(state: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    def begun() -> Any:
        params = {"kernel": jax.random.normal(jax.random.PRNGKey(1), (64, 48)) / 8, "bias": jnp.zeros(48)}
        return {"params": params, "opt": optimizer.init(params)}

    def trained(state: Any, steps: int, store: Any = None) -> Any:
        for _ in range(steps):
            state, _ = step(state)
            if store is not None:
                store.save((store.steps() or [0])[-1] + 1, nested(state))
        return state

    store = sp.Store(tmp_path / "exact", cfg=sp.presets.lossless())
    trained(begun(), 6, store)
    resumed = fitted(sp.Store(tmp_path / "exact").load(), begun())
    assert same(trained(resumed, 6), trained(begun(), 12))

    lossy = sp.Store(tmp_path / "lossy")
    state = trained(begun(), 12, lossy)
    found = fitted(lossy.load(), begun())
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert float(loss(found["params"])) == pytest.approx(float(loss(state["params"])), rel=0.05)


def test_the_page_and_the_docstrings_are_true() -> None:
    pytest.importorskip("optax", reason="optax is not installed; `make frameworks` has it")
    assert run_page(Path(__file__).parents[2] / "docs" / "trainers" / "jax.md").ran >= 1
    result = doctest.testmod(adapter)
    assert result.attempted
    assert not result.failed


@pytest.mark.parametrize("name", ["schedule_free_adamw", "prodigy", "adadelta", "adan", "adafactor", "sgd"])
def test_entries_of_optax_that_are_no_known_moments_are_exact(name: str) -> None:
    optax = pytest.importorskip("optax")
    makes = {
        "schedule_free_adamw": lambda: optax.contrib.schedule_free_adamw(1e-3),
        "prodigy": lambda: optax.contrib.prodigy(),
        "sgd": lambda: optax.sgd(1e-3, momentum=0.9),
    }
    made = makes.get(name, lambda: getattr(optax, name)(1e-3))()
    params = {"k": jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.float32)}
    _, state = made.update(params, made.init(params), params)
    rows = sp.compress(nested({"opt_state": state}), cfg=sp.Config()).summary()
    assert all({"mu", "nu", "trace"} & set(row.path.split("/")) for row in rows if row.error)
