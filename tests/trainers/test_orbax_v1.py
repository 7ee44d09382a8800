"""Orbax v1 itself over our handler; a killed run of it is in test_orbax.py."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shrinkpoint as sp

ocp = pytest.importorskip(
    "orbax.checkpoint.experimental.v1", reason="Orbax v1 is not installed; `make frameworks` has it"
)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from shrinkpoint.trainers import orbax as adapter  # noqa: E402
from shrinkpoint.trainers.orbax import CompressedRestore, CompressedSave, checkpointable_handler  # noqa: E402

from .orbax_run import abstract, build, opened, opened_v1, trained, with_handler  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SMALL = {"weight": jnp.arange(4.0), "done": 1}


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Collect the coroutines of refused saves, which Orbax forgets.

    Here warnings of them are ignored.
    """
    yield
    gc.collect()


def same(a: Any, b: Any) -> bool:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


def exact(folder: Path, name: str = "shrinkpoint") -> sp.Store:
    return sp.Store(folder / name, cfg=sp.presets.lossless())


@pytest.mark.parametrize("how", ["store", "thread"])
def test_a_checkpointer_saves_loads_and_rotates(tmp_path: Path, how: str) -> None:
    states = {}
    with opened_v1(tmp_path, how) as checkpointer:
        for state, _ in trained(build(), 5):
            states[state["done"]] = jax.tree.map(np.array, state)
            checkpointer.save_async(state["done"], state)
        checkpointer.save(6, states[5])
        assert [found.step for found in checkpointer.checkpoints] == [5, 6]
        assert same(checkpointer.load(5, abstract(states[5])), states[5])
        shapes = checkpointer.checkpointables_metadata(6).metadata["state"]
        assert shapes["params"]["first"]["kernel"] == jax.ShapeDtypeStruct((16, 64), jnp.float32)
        assert checkpointer.load(6)["opt"]["1"]["count"] == 5
    store = exact(tmp_path)
    assert len(store.steps()) == 3  # those that a save has removed, and the one it replaced then
    assert store.describe(store.steps()[-1]).is_delta
    assert not store.verify()


def test_each_version_reads_the_other(tmp_path: Path) -> None:
    with opened(tmp_path / "old", cfg=sp.presets.lossless()) as manager:
        manager.save(3, args=CompressedSave(SMALL))
    with with_handler(exact(tmp_path / "old"), "default"):
        assert same(ocp.load_checkpointables(tmp_path / "old" / "3", {"default": SMALL})["default"], SMALL)
    with ocp.training.Checkpointer(tmp_path / "new", context=with_handler(exact(tmp_path / "new"), "default")) as new:
        new.save(3, SMALL, checkpointable_name="default")
    with opened(tmp_path / "new") as manager:
        assert same(manager.restore(3, args=CompressedRestore(SMALL)), SMALL)


@pytest.mark.parametrize("how", ["store", "thread"])
def test_saves_that_overlap_keep_their_steps(tmp_path: Path, how: str) -> None:
    store = exact(tmp_path)
    with contextlib.ExitStack() as stack:
        saver = store if how == "store" else stack.enter_context(sp.Saver(store, mode=how))
        stack.enter_context(with_handler(saver))
        saves = [ocp.save_async(tmp_path / f"{step}", {**SMALL, "done": step}) for step in range(4)]
        for save in saves:
            save.result()
        for step in range(4):
            assert ocp.load_checkpointables(tmp_path / f"{step}")["state"]["done"] == step
    assert exact(tmp_path).steps() == [0, 1, 2, 3]


def test_a_folder_that_is_renamed_meanwhile_keeps_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished, reads = tmp_path / "0.orbax-checkpoint-tmp", adapter.pointers.read_pointer

    def renamed(path: str) -> Any:
        if unfinished.exists():
            unfinished.rename(tmp_path / "0")
        return reads(path)

    with with_handler(exact(tmp_path)):
        ocp.save(tmp_path / "0", SMALL)
        (tmp_path / "0").rename(unfinished)
        monkeypatch.setattr(adapter.pointers, "read_pointer", renamed)
        ocp.save(tmp_path / "1", {**SMALL, "done": 2})
        assert same(ocp.load_checkpointables(tmp_path / "0")["state"], SMALL)


def test_other_checkpointables_gradients_and_parts(tmp_path: Path) -> None:
    store = exact(tmp_path)
    with with_handler(store, "model", others=True) as context:
        tree = {"weight": jnp.arange(8.0), "bias": jnp.ones(2)}
        given = {"model": CompressedSave(tree, grads={"weight": jnp.ones(8)}), "data": {"position": 7}}
        ocp.save_checkpointables(tmp_path / "1", given)
        wanted = CompressedRestore({"bias": jax.ShapeDtypeStruct((2,), jnp.float32)}, partial_restore=True)
        found = ocp.load_checkpointables(tmp_path / "1", {"model": wanted, "data": {"position": 0}})
        assert same(found, {"model": {"bias": jnp.ones(2)}, "data": {"position": 7}})
    # Without a name, it takes all trees with arrays, and leaves others to other handlers.
    context.checkpointables.registry = ocp.handlers.local_registry().add(checkpointable_handler(store))
    with context:
        ocp.save_checkpointables(tmp_path / "2", {"model": tree, "data": {"position": 8}})
        assert (tmp_path / "2" / "model" / "shrinkpoint.json").exists()
        assert not (tmp_path / "2" / "data" / "shrinkpoint.json").exists()
        assert same(ocp.load_checkpointables(tmp_path / "2")["model"], tree)
        assert same(ocp.load_checkpointables(tmp_path / "2", {"model": abstract(tree)})["model"], tree)


def test_a_save_that_orbax_gives_up_does_not_keep_its_step(tmp_path: Path) -> None:
    class Failing:
        async def save(self, directory: Any) -> Any:
            raise RuntimeError("no")

        async def load(self, directory: Any) -> Any:
            return None

    store = exact(tmp_path)
    with with_handler(store, "model", others=True):
        ocp.save_checkpointables(tmp_path / "0", {"model": SMALL})
        with pytest.raises(RuntimeError, match="no"):
            ocp.save_checkpointables(tmp_path / "1", {"model": SMALL, "other": Failing()})
        assert store.steps() == [0, 1]
        gc.collect()
        ocp.save_checkpointables(tmp_path / "2", {"model": SMALL})
    assert len(exact(tmp_path).steps()) == 2
    assert not (tmp_path / "1").exists()


def test_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(sp.BadArgumentError, match="must be a Saver or a Store, not int"):
        checkpointable_handler(3)  # type: ignore[arg-type]
    with with_handler(exact(tmp_path)):
        ocp.save(tmp_path / "1", SMALL)
        with pytest.raises(sp.BadArgumentError, match=r"weight: shape \(4,\) in the checkpoint, \(3,\) in item"):
            ocp.load_checkpointables(tmp_path / "1", {"state": {"weight": jnp.zeros(3), "done": 0}})
        with pytest.raises(sp.BadArgumentError, match="not a container of leaves"):
            ocp.partial.save(tmp_path / "2", SMALL)
        with pytest.raises(sp.BadArgumentError, match="not a container of leaves"):
            ocp.save(tmp_path / "2", jnp.ones(3))
        (tmp_path / "1" / "state" / "shrinkpoint.json").unlink()
        with pytest.raises(sp.BadArgumentError, match="not a checkpoint of shrinkpoint"):
            ocp.load_checkpointables(tmp_path / "1", {"state": SMALL})
    with (
        with_handler(exact(tmp_path / "elsewhere")),
        pytest.raises(sp.BadArgumentError, match="the store must be next to the steps"),
    ):
        ocp.save(tmp_path / "3", SMALL)
    context = ocp.Context()
    context.checkpointables.registry = ocp.handlers.local_registry().add(checkpointable_handler(exact(tmp_path)))
    with context, pytest.raises(sp.BadArgumentError, match="b: the handler and its store belong to a"):
        ocp.save_checkpointables(tmp_path / "4", {"a": SMALL, "b": SMALL})
