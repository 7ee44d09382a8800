"""A small resumable JAX run.

`python orbax_run.py FOLDER STEPS [store|process|v1 store|v1 process]`
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

import shrinkpoint as sp
from shrinkpoint.trainers.orbax import CompressedHandler, CompressedRestore, CompressedSave, checkpointable_handler

EVERY = 3


class Adam(NamedTuple):
    """Moments, as Optax keeps them."""

    count: jax.Array
    mu: Any
    nu: Any


class Empty(NamedTuple):
    """A transformation without a state."""


def build(width: int = 64) -> dict[str, Any]:
    """Return the initial state of a run."""
    first, second, rng = jax.random.split(jax.random.PRNGKey(0), 3)
    params = {
        "first": {"kernel": jax.random.normal(first, (16, width)) / 4, "bias": jnp.zeros(width)},
        "last": {"kernel": jax.random.normal(second, (width, 16)) / 8, "bias": jnp.zeros(16)},
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    opt = (Empty(), Adam(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.copy, zeros)))
    return {"params": params, "opt": opt, "rng": rng, "done": 0}


def loss_of(params: Any, x: jax.Array, keep: jax.Array) -> jax.Array:
    """Return the loss of a network with dropout, which learns to square its input."""
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"]) * keep
    return jnp.mean((hidden @ params["last"]["kernel"] + params["last"]["bias"] - x**2) ** 2)


@functools.partial(jax.jit, donate_argnums=(0, 1, 2))
def step(params: Any, opt: Any, rng: jax.Array) -> tuple[Any, Any, jax.Array, jax.Array]:
    """Train one step of Adam; the buffers of the old state are donated."""
    rng, data, drop = jax.random.split(rng, 3)
    x = jax.random.normal(data, (32, 16))
    keep = jax.random.bernoulli(drop, 0.8, (32, params["first"]["bias"].shape[0])).astype(jnp.float32)
    loss, grads = jax.value_and_grad(loss_of)(params, x, keep)
    empty, adam = opt
    count = adam.count + 1
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, adam.mu, grads)
    nu = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, adam.nu, grads)
    rate = 1e-3 * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, mu, nu)
    return params, (empty, Adam(count, mu, nu)), rng, loss


def trained(state: dict[str, Any], steps: int) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield the states and losses of further steps."""
    for _ in range(steps):
        params, opt, rng, loss = step(state["params"], state["opt"], state["rng"])
        state = {"params": params, "opt": opt, "rng": rng, "done": state["done"] + 1}
        yield state, float(loss)


def abstract(state: Any) -> Any:
    """Return the restore target: arrays without values."""
    return jax.tree.map(lambda x: ocp.tree.to_shape_dtype_struct(x) if hasattr(x, "shape") else x, state)


@contextlib.contextmanager
def opened(folder: Path, how: str = "store", cfg: sp.Config | None = None, **options: Any) -> Iterator[Any]:
    """Yield a manager of compressed checkpoints; `how`: store, or a Saver's mode."""
    store = sp.Store(folder / "shrinkpoint", cfg=cfg)
    with contextlib.ExitStack() as stack:
        handler = CompressedHandler(store if how == "store" else stack.enter_context(sp.Saver(store, mode=how)))
        chosen = ocp.CheckpointManagerOptions(**options)
        yield stack.enter_context(ocp.CheckpointManager(folder, item_handlers=handler, options=chosen))


def with_handler(saver: sp.Saver | sp.Store, name: str = "state", *, others: bool = False) -> Any:
    """Return a context of Orbax v1 whose registry has our handler, for one checkpointable."""
    from orbax.checkpoint.experimental import v1

    context = v1.Context()
    context.checkpointables.registry = v1.handlers.local_registry(include_global_registry=others)
    context.checkpointables.registry.add(checkpointable_handler(saver), checkpointable_name=name)
    return context


@contextlib.contextmanager
def opened_v1(folder: Path, how: str = "store", keep: int = 2) -> Iterator[Any]:
    """Yield an exact checkpointer of Orbax v1 that saves at each call.

    Args:
        folder: of its store.
        how: "store", or the mode of a `Saver`.
        keep: steps that stay.
    """
    from orbax.checkpoint.experimental.v1 import training

    store = sp.Store(folder / "shrinkpoint", cfg=sp.presets.lossless())
    latest, always = (
        training.preservation_policies.LatestN(keep),
        training.save_decision_policies.FixedIntervalPolicy(1),
    )
    with contextlib.ExitStack() as stack:
        context = with_handler(store if how == "store" else stack.enter_context(sp.Saver(store, mode=how)))
        options = {"context": context, "preservation_policy": latest, "save_decision_policy": always}
        yield stack.enter_context(training.Checkpointer(folder, **options))


def main(folder: Path, steps: int, how: str = "store", keep: int = 2) -> None:
    """Train to `steps`; write a line for each step."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if how.startswith("v1 "):
            checkpointer = stack.enter_context(opened_v1(folder / "run", how.removeprefix("v1 "), keep))
            last, load, save = checkpointer.latest, checkpointer.load, checkpointer.save_async
        else:
            manager = stack.enter_context(opened(folder / "run", how, sp.presets.lossless(), max_to_keep=keep))
            last = manager.latest_step()

            def load(step: Any, item: Any) -> Any:
                return manager.restore(step, args=CompressedRestore(item))

            def save(step: int, item: Any) -> Any:
                return manager.save(step, args=CompressedSave(item))

        begin = build()
        if last is not None:
            begin = load(last, abstract(begin))
        for state, loss in trained(begin, steps - begin["done"]):
            with (folder / "losses.txt").open("a") as out:
                print(state["done"], loss.hex(), file=out)
            if state["done"] % EVERY == 0:
                save(state["done"], state)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
