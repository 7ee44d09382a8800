"""The released Orbax: managers over our handler, killed, rotated, resharded."""

from __future__ import annotations

import contextlib
import doctest
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shrinkpoint as sp

ocp = pytest.importorskip("orbax.checkpoint", reason="orbax-checkpoint is not installed; `make frameworks` has it")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from fsspec.implementations.local import LocalFileSystem  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from shrinkpoint.codec.parallel import map_chunks  # noqa: E402
from shrinkpoint.store.compaction import Compaction  # noqa: E402
from shrinkpoint.store.local import LocalFiles  # noqa: E402
from shrinkpoint.trainers import orbax as adapter  # noqa: E402
from shrinkpoint.trainers.orbax import CompressedHandler, CompressedRestore, CompressedSave  # noqa: E402
from tests.pages import run_page  # noqa: E402

from ..forking import Script  # noqa: E402
from .killing import by_step, run_and_kill  # noqa: E402
from .orbax_run import abstract, build, main, opened, trained  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
RUN = Path(__file__).with_name("orbax_run.py")
DEVICES = 4
with contextlib.suppress(RuntimeError):  # where other tests have used JAX
    jax.config.update("jax_num_cpu_devices", DEVICES)


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with Script(RUN) as found:
        yield found


def same(a: Any, b: Any) -> bool:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).dtype == np.asarray(y).dtype and np.array_equal(x, y) for x, y in pairs)


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["store", "process", "v1 store", "v1 process"])
def test_a_killed_run_resumed_equals_one_that_was_not(script: Script, tmp_path: Path, how: str) -> None:
    killed, home = tmp_path / "killed", tmp_path / "killed" / "run"

    def saving() -> bool:
        """Return whether a save is in flight after the first ones."""
        begun = (killed / "losses.txt").exists() and len(by_step(killed)) >= 14
        return begun and bool(list(home.glob("*orbax-checkpoint-tmp*")))

    run_and_kill(script, killed, 50_000, how, once=saving, every=0.001)
    steps = len(by_step(tmp_path / "killed")) + 7
    main(tmp_path / "killed", steps, how)
    main(tmp_path / "whole", steps)
    assert by_step(tmp_path / "killed") == by_step(tmp_path / "whole")
    # What the save that was cut off had left in the store is not there any more either.
    assert len(sp.Store(home / "shrinkpoint").steps()) <= 3


def test_rotation_reaches_the_store_and_deltas_stay_whole(tmp_path: Path) -> None:
    states = {}
    with opened(tmp_path, cfg=sp.presets.lossless(), max_to_keep=2) as manager:
        for state, _ in trained(build(), 6):
            states[state["done"]] = jax.tree.map(np.array, state)
            assert manager.save(state["done"], args=CompressedSave(state))
        manager.wait_until_finished()
        assert manager.all_steps() == [5, 6]
        for step in (5, 6):
            assert same(manager.restore(step, args=CompressedRestore(states[step])), states[step])
    store = sp.Store(tmp_path / "shrinkpoint")
    assert [store.describe(step).is_delta for step in store.steps()] == [True, True]
    assert not store.verify()
    # A step that a user deletes is removed too, and a continued run saves a delta.
    with opened(tmp_path, cfg=sp.presets.lossless()) as manager:
        manager.restore(6)
        manager.delete(5)
        manager.save(7, args=CompressedSave(states[6]))
    store = sp.Store(tmp_path / "shrinkpoint")
    assert len(store.steps()) == 2
    assert store.describe(store.steps()[-1]).is_delta


def test_a_manager_that_only_reads_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only manager does not remove a committed step without a pointer."""
    states = [jax.tree.map(np.array, state) for state, _ in trained(build(), 2)]
    writes = adapter.pointers.write_pointer

    def later(*given: Any) -> Any:
        options = ocp.CheckpointManagerOptions(read_only=True)
        handler = CompressedHandler(sp.Store(tmp_path / "shrinkpoint", sp.presets.lossless()))
        with ocp.CheckpointManager(tmp_path, item_handlers=handler, options=options) as reader:
            reader.restore(reader.latest_step(), args=CompressedRestore())
        return writes(*given)

    with opened(tmp_path, cfg=sp.presets.lossless()) as manager:
        manager.save(1, args=CompressedSave(states[0]))
        manager.wait_until_finished()
        monkeypatch.setattr(adapter.pointers, "write_pointer", later)
        manager.save(2, args=CompressedSave(states[1]))
        manager.wait_until_finished()
        assert same(manager.restore(2, args=CompressedRestore(states[1])), states[1])


def test_in_the_background_a_step_is_kept_until_the_next_is_complete(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "shrinkpoint", cfg=sp.presets.lossless())
    state = build()
    with sp.Saver(store) as saver:
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        manager = ocp.CheckpointManager(tmp_path, item_handlers=CompressedHandler(saver), options=options)
        manager.save(1, args=CompressedSave(state))
        manager.wait_until_finished()
        assert saver.pid is not None
        os.kill(saver.pid, signal.SIGSTOP)
        manager.save(2, args=CompressedSave(state))
        assert manager.is_saving_in_progress()
        assert not (tmp_path / "2").exists()
        os.kill(saver.pid, signal.SIGKILL)
        with pytest.raises(ChildProcessError):
            manager.wait_until_finished()
        assert (tmp_path / "1").exists()
        assert same(manager.restore(1, args=CompressedRestore(abstract(state))), state)
        # It was reported once; the next save is not refused for it.
        manager.save(3, args=CompressedSave(state))
        manager.wait_until_finished()
        manager.close()
    # Orbax has forgotten to remove what the save that failed was to replace; as long as the folder is there it is kept.
    assert len(store.steps()) == 2
    with opened(tmp_path) as manager:
        assert manager.all_steps() == [1, 3]
        for step in (1, 3):
            assert same(manager.restore(step, args=CompressedRestore(abstract(state))), state)


def test_buffers_may_be_given_away_while_a_save_is_in_flight(tmp_path: Path) -> None:
    with opened(tmp_path, "thread", sp.presets.lossless()) as manager:
        copies = {}
        for state, _ in trained(build(), 4):
            copies[state["done"]] = jax.tree.map(np.array, state)
            manager.save(state["done"], args=CompressedSave(state))
        manager.wait_until_finished()
        for step, copy in copies.items():
            assert same(manager.restore(step, args=CompressedRestore(copy)), copy)


def test_lossy_by_default_and_smaller_than_what_orbax_writes(tmp_path: Path) -> None:
    state = list(trained(build(512), 30))[-1][0]
    with opened(tmp_path / "small") as manager:
        manager.save(30, args=CompressedSave(state))
        manager.wait_until_finished()
        found = manager.restore(30, args=CompressedRestore(abstract(state)))
    with ocp.CheckpointManager(tmp_path / "raw") as manager:
        manager.save(30, args=ocp.args.StandardSave(state))
    store = sp.Store(tmp_path / "small" / "shrinkpoint")
    rows = {row.path: row for row in store.header(store.describe(store.steps()[-1])).summary()}
    codecs = {path: row.stream for path, row in rows.items()}
    assert codecs["params/first/kernel"] == "levels"
    assert codecs["opt/1/mu/first/kernel"] in ("grid", "log-buckets")
    assert codecs["opt/1/nu/first/kernel"] == "rank-one"
    assert {codecs[path] for path in ("params/first/bias", "opt/1/count", "rng")} == {"bytes"}
    assert bytes_in(tmp_path / "small") < bytes_in(tmp_path / "raw") / 4
    for name in ("first", "last"):
        before, after = state["params"][name]["kernel"], found["params"][name]["kernel"]
        error = float(jnp.linalg.norm(after - before) / jnp.linalg.norm(before))
        assert 0 < error < 0.1
        assert np.array_equal(state["params"][name]["bias"], found["params"][name]["bias"])


@pytest.mark.parametrize("asynchronous", [True, False])
def test_another_sharding_dtype_and_container(tmp_path: Path, asynchronous: bool) -> None:
    if len(jax.devices()) < DEVICES:
        pytest.skip("JAX was used before with fewer devices")
    rows = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), P("x"))
    columns = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("y",)), P(None, "y"))
    whole = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    tree = {
        "weight": jax.device_put(whole, rows),
        "half": jnp.asarray(whole, jnp.bfloat16),
        "list": [np.arange(5, dtype=np.int64), (jnp.float32(3), True)],
        "scale": 1.5,
        "nothing": None,
    }
    options = {"enable_async_checkpointing": asynchronous}
    with opened(tmp_path, "thread" if asynchronous else "store", sp.presets.lossless(), **options) as manager:
        manager.save(1, args=CompressedSave(tree))
        manager.wait_until_finished()
        again = manager.restore(1, args=CompressedRestore(tree))
        assert same(again, tree)
        assert again["weight"].sharding == rows
        assert isinstance(again["list"][0], np.ndarray)
        wanted = {**tree, "weight": jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=columns)}
        wanted["half"] = jax.ShapeDtypeStruct((64, 32), jnp.float32)
        moved = manager.restore(1, args=CompressedRestore(wanted))
        assert moved["weight"].sharding == columns
        assert [shard.data.shape for shard in moved["weight"].addressable_shards] == [(64, 16)] * 2
        assert np.array_equal(moved["weight"], whole)
        assert moved["half"].dtype == jnp.float32
        assert np.array_equal(moved["half"], np.asarray(tree["half"]).astype(np.float32))
        assert (moved["scale"], moved["nothing"], moved["list"][1][1]) == (1.5, None, True)
        plain = manager.restore(1)
        assert set(plain) == {"weight", "half", "list", "scale"}
        assert np.array_equal(plain["list"]["0"], tree["list"][0])
        assert plain["half"].dtype == jnp.bfloat16


def test_several_items_and_single_checkpoints(tmp_path: Path) -> None:
    state, stores = build(), {name: sp.Store(tmp_path / "run" / f"{name}-store") for name in ("state", "ema")}
    handlers = {name: CompressedHandler(store) for name, store in stores.items()}
    manager = ocp.CheckpointManager(
        tmp_path / "run",
        item_handlers={**handlers, "note": ocp.handlers.JsonCheckpointHandler()},
        options=ocp.CheckpointManagerOptions(max_to_keep=1, best_fn=lambda m: m["score"]),
    )
    with manager:
        for step, score in ((1, 0.5), (2, 0.25)):
            items = {"state": CompressedSave(state), "ema": CompressedSave(state["params"])}
            args = ocp.args.Composite(**items, note=ocp.args.JsonSave({"step": step}))
            manager.save(step, args=args, metrics={"score": score})
        manager.wait_until_finished()
        assert manager.all_steps() == [1]  # the best
        found = manager.restore(1, args=ocp.args.Composite(ema=CompressedRestore(abstract(state["params"]))))
        assert same(found["ema"]["first"]["bias"], state["params"]["first"]["bias"])
    assert [len(store.steps()) for store in stores.values()] == [1, 1]
    for how in (ocp.Checkpointer, ocp.AsyncCheckpointer):
        store = sp.Store(tmp_path / how.__name__ / "shrinkpoint", cfg=sp.presets.lossless())
        with how(CompressedHandler(store)) as checkpointer:
            checkpointer.save(tmp_path / how.__name__ / "one", args=CompressedSave(state))
            checkpointer.save(tmp_path / how.__name__ / "two", args=CompressedSave(state))
            getattr(checkpointer, "wait_until_finished", lambda: None)()
            for name in ("one", "two"):
                args = CompressedRestore(abstract(state))
                assert same(checkpointer.restore(tmp_path / how.__name__ / name, args=args), state)


def test_a_moved_folder_and_one_that_is_read_from_elsewhere(tmp_path: Path) -> None:
    state = build()
    with opened(tmp_path / "here", cfg=sp.presets.lossless()) as manager:
        manager.save(1, args=CompressedSave(state))
    (tmp_path / "here").rename(tmp_path / "there")
    with opened(tmp_path / "other") as manager:
        found = manager.restore(1, directory=tmp_path / "there", args=CompressedRestore(abstract(state)))
    assert same(found, state)


def test_what_does_not_fit_is_refused_with_a_list(tmp_path: Path) -> None:
    state = build()
    with opened(tmp_path) as manager:
        manager.save(1, args=CompressedSave(state))
        manager.wait_until_finished()
        renamed = abstract(state)
        renamed["params"]["second"] = renamed["params"].pop("last")
        with pytest.raises(sp.BadArgumentError, match="params/last/bias: not in item") as caught:
            manager.restore(1, args=CompressedRestore(renamed))
        assert "params/second/kernel: not in the checkpoint" in str(caught.value)
        with pytest.raises(sp.BadArgumentError, match=r"first/kernel: shape \(16, 64\) in the checkpoint, \(16, 32\)"):
            manager.restore(1, args=CompressedRestore(abstract(build(32))))


def test_floats_do_not_become_integers(tmp_path: Path) -> None:
    with opened(tmp_path, cfg=sp.presets.lossless()) as manager:
        manager.save(1, args=CompressedSave({"weight": jnp.full(5, 1.5), "n": jnp.arange(3), "scale": 1.5}))
        manager.wait_until_finished()

        def restored(**other: Any) -> Any:
            item = {"weight": jax.ShapeDtypeStruct((5,), jnp.float32), "n": jnp.zeros(3, jnp.int32), "scale": 0.0}
            return manager.restore(1, args=CompressedRestore(item | other))

        for name, wanted, why in (
            ("weight", jax.ShapeDtypeStruct((5,), jnp.int32), "weight: float32 in the checkpoint, int32 in item"),
            ("weight", np.zeros(5, np.int8), "weight: float32 in the checkpoint, int8 in item"),
            ("n", jnp.zeros(3, bool), "n: int32 in the checkpoint, bool in item"),
            ("scale", 0, "scale: 1.5 in the checkpoint, int in item"),
        ):
            with pytest.raises(sp.BadArgumentError, match=f"json: the checkpoint does not fit item\n  {why}"):
                restored(**{name: wanted})
        # Other floats are asked for, and counts may become floats.
        found = restored(weight=jax.ShapeDtypeStruct((5,), jnp.bfloat16), n=jnp.zeros(3))
        assert found["weight"].dtype == jnp.bfloat16
        assert found["n"].tolist() == [0.0, 1.0, 2.0]


def test_a_part_alone_and_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {**build(), "key": jax.random.key(3), "odd [name]*": jnp.arange(4.0), "half": jnp.ones(3, jnp.bfloat16)}
    with opened(tmp_path, cfg=sp.presets.lossless()) as manager:
        for step in (1, 2):
            manager.save(step, args=CompressedSave({**state, "done": step}))
        manager.wait_until_finished()
        found = manager.item_metadata(2)
        assert found["params"]["first"]["kernel"] == jax.ShapeDtypeStruct((16, 64), jnp.float32)
        assert found["half"] == jax.ShapeDtypeStruct((3,), jnp.bfloat16)
        assert (found["opt"]["1"]["count"].dtype, found["done"]) == (jnp.int32, 2)
        whole = manager.restore(2, args=CompressedRestore(found))
        assert np.array_equal(whole["params"]["first"]["kernel"], state["params"]["first"]["kernel"])
        store = sp.Store(tmp_path / "shrinkpoint")
        restores = store.restores()

        with monkeypatch.context() as patch:
            whole_of = LocalFiles.read
            forbidden = lambda self, name: whole_of(self, name) if "data/" not in name else pytest.fail(name)  # noqa: E731
            patch.setattr(LocalFiles, "read", forbidden)
            assert manager.item_metadata(1)["done"] == 1

        item = {"params": {"last": abstract(state["params"]["last"])}, "key": state["key"], "odd [name]*": jnp.zeros(4)}
        part = manager.restore(2, args=CompressedRestore(item, partial_restore=True))
        assert jax.tree.structure(part) == jax.tree.structure(item)
        assert same(part["params"]["last"], state["params"]["last"])
        assert np.array_equal(part["odd [name]*"], np.arange(4))
        assert np.array_equal(jax.random.key_data(part["key"]), jax.random.key_data(state["key"]))
        assert store.restores() == restores, "a part is no restore of the run"
        for bad, why in (
            ({"params": {"last": {"weight": jnp.zeros(3)}}}, "params/last/weight"),
            (
                {"params": {"last": {"bias": jnp.zeros(3)}}},
                r"params/last/bias: shape \(16,\) in the checkpoint, \(3,\)",
            ),
            (None, "item must say which part"),
            ({}, "partial_restore: item is empty"),
        ):
            with pytest.raises(sp.BadArgumentError, match=why):
                manager.restore(2, args=CompressedRestore(bad, partial_restore=True))
        with pytest.raises(sp.BadArgumentError, match="half: not in item"):
            manager.restore(2, args=CompressedRestore(item))


def test_the_metadata_is_an_item_that_loses_nothing(tmp_path: Path) -> None:
    wide = {"n": np.array([2**40 + 5]), "x": np.array([1 / 3]), "z": np.array([1 / 3 + 2j]), "weight": jnp.ones(3)}
    with opened(tmp_path, cfg=sp.presets.lossless()) as manager:
        manager.save(1, args=CompressedSave(wide))
        manager.wait_until_finished()
        item = manager.item_metadata(1)
        for more in ({}, {"partial_restore": True}):
            found = manager.restore(1, args=CompressedRestore(item, **more))
            assert same(found, wide)
            assert isinstance(found["weight"], jax.Array)


@pytest.mark.parametrize(
    ("saved", "wanted", "why"),
    [
        (np.zeros(2, np.uint8), jax.random.key(0), "uint8 in the checkpoint, a key of uint32 in item"),
        (np.zeros(2, bool), jax.random.key(0), "bool in the checkpoint, a key of uint32 in item"),
        (np.zeros(2, np.float32), jax.random.key(0), "float32 in the checkpoint, a key of uint32 in item"),
        (np.zeros((3, 2), np.uint32), jax.random.key(0), r"shape \(3, 2\) in the checkpoint, \(2,\) in item"),
        ("text", jax.random.key(0), r"shape \(\) in the checkpoint, \(2,\) in item"),
        (jax.random.key(0), jnp.zeros(2, bool), "uint32 in the checkpoint, bool in item"),
        (jax.random.key(0), jax.random.key(0, impl="rbg"), r"shape \(2,\) in the checkpoint, \(4,\) in item"),
        (jax.random.key(0), 7, r"shape \(2,\) in the checkpoint, \(\) in item"),
    ],
)
def test_keys_that_do_not_fit_are_refused_too(tmp_path: Path, saved: Any, wanted: Any, why: str) -> None:
    with opened(tmp_path, cfg=sp.presets.lossless()) as manager:
        manager.save(1, args=CompressedSave({"weight": jnp.ones(3), "key": saved}))
        manager.wait_until_finished()
        with pytest.raises(sp.BadArgumentError, match=f"key: {why}"):
            manager.restore(1, args=CompressedRestore({"weight": jnp.ones(3), "key": wanted}))


def test_keys_come_back_in_any_target(tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(3), 4)
    with opened(tmp_path, cfg=sp.presets.lossless()) as manager:
        manager.save(1, args=CompressedSave({"keys": keys}))
        manager.wait_until_finished()
        for wanted in (keys, jax.ShapeDtypeStruct(keys.shape, keys.dtype)):
            found = manager.restore(1, args=CompressedRestore({"keys": wanted}))["keys"]
            assert found.dtype == keys.dtype
            assert np.array_equal(jax.random.key_data(found), jax.random.key_data(keys))


def test_a_save_lists_no_file_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    real = LocalFileSystem.ls
    monkeypatch.setattr(
        LocalFileSystem, "ls", lambda self, path, *a, **k: listed.append(path) or real(self, path, *a, **k)
    )
    with opened(tmp_path, cfg=sp.presets.lossless(), max_to_keep=2) as manager:
        for step in range(5):
            manager.save(step, args=CompressedSave({"weight": jnp.arange(3)}))
        manager.wait_until_finished()
    assert len(sp.Store(tmp_path / "shrinkpoint").steps()) == 2
    assert listed
    assert not [path for path in listed if "shrinkpoint" in path.removeprefix(str(tmp_path))]


def test_missing_and_damaged_steps(tmp_path: Path) -> None:
    state = build()
    with opened(tmp_path, cfg=sp.presets.lossless()) as manager:
        for step in (1, 2):
            manager.save(step, args=CompressedSave(state))
        manager.wait_until_finished()
        with pytest.raises(FileNotFoundError):
            manager.restore(3, args=CompressedRestore(abstract(state)))
        store = sp.Store(tmp_path / "shrinkpoint")
        last = Path(store.url) / "data" / store.describe(store.steps()[-1]).file
        content = bytearray(last.read_bytes())
        content[len(content) // 2] ^= 255
        last.chmod(0o644)
        last.write_bytes(content)
        with pytest.raises(sp.CorruptDataError):
            manager.restore(2, args=CompressedRestore(abstract(state)))
        assert same(manager.restore(1, args=CompressedRestore(abstract(state))), state)
        store.drop(store.steps()[0])
        with pytest.raises(sp.MissingParentError, match="points to step 0"):
            manager.restore(1)
        (tmp_path / "2" / "default" / "shrinkpoint.json").unlink()
        with pytest.raises(sp.BadArgumentError, match="not a checkpoint of shrinkpoint"):
            manager.restore(2)


def test_a_saver_that_compacts_does_not_keep_a_rotation_waiting(tmp_path: Path, monkeypatch: Any) -> None:
    def run(_: Any) -> list[int]:
        while True:
            map_chunks(time.sleep, [0.001])

    monkeypatch.setattr(Compaction, "run", run)
    store = sp.Store(tmp_path / "shrinkpoint", sp.presets.lossless(chain=sp.ChainPolicy(None)))
    options, w = ocp.CheckpointManagerOptions(max_to_keep=1), jnp.arange(4096.0)
    with sp.Saver(store, mode="thread", compact=1.0) as saver:
        with ocp.CheckpointManager(tmp_path, options=options, item_handlers=CompressedHandler(saver)) as manager:
            for step in range(4):
                # That it never ends is what stands for a long time: a drop that waited for it would raise TimeoutError.
                w = w.at[step].set(-1.0)
                manager.save(step, args=CompressedSave({"weight": w}))
                manager.wait_until_finished()
        assert len(store.steps()) == 1


@jax.tree_util.register_pytree_with_keys_class
class Alike:
    """A container whose two leaves have the same name."""

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        """Return keys and leaves."""
        return [(jax.tree_util.GetAttrKey("x"), jnp.ones(3)), (jax.tree_util.DictKey("x"), jnp.zeros(3))], None

    @classmethod
    def tree_unflatten(cls, _: None, leaves: Any) -> Alike:
        """Return a new container."""
        return cls()


def test_the_page_and_the_docstrings_are_true() -> None:
    report = run_page(Path(__file__).parents[2] / "docs" / "trainers" / "jax.md")
    assert report.ran >= 1
    result = doctest.testmod(adapter)
    assert result.attempted
    assert not result.failed


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(sp.BadArgumentError, match="must be a Saver or a Store, not int"):
        CompressedHandler(3)  # type: ignore[arg-type]
    kept = sp.Saver(sp.Store(tmp_path / "kept"), mode="thread", keep=sp.Retention())
    with kept, pytest.raises(sp.BadArgumentError, match="leave keep= out"):
        CompressedHandler(kept)
    # Not asynchronous: Orbax waits for five minutes at exit for the folder of a save that was refused.
    state, options = {"weight": jnp.ones(3)}, ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    elsewhere = CompressedHandler(sp.Store(tmp_path / "elsewhere" / "shrinkpoint"))
    with (
        ocp.CheckpointManager(tmp_path / "run", item_handlers=elsewhere, options=options) as manager,
        pytest.raises(sp.BadArgumentError, match="the store must be next to the steps"),
    ):
        manager.save(1, args=CompressedSave(state))
    with opened(tmp_path / "names", enable_async_checkpointing=False) as manager:
        with pytest.raises(sp.BadArgumentError, match="2 leaves have 1 names"):
            manager.save(1, args=CompressedSave({"list": Alike()}))
        assert not manager.all_steps()
        with pytest.raises(sp.UnsupportedLeafError, match="set"):
            manager.save(2, args=CompressedSave({"set": {1}}))
        assert not manager.all_steps()
        manager.save(3, args=CompressedSave({"key": jax.random.key(5)}))
        found = manager.restore(3, args=CompressedRestore({"key": jax.random.key(0)}))["key"]
        assert np.array_equal(jax.random.key_data(found), jax.random.key_data(jax.random.key(5)))


@pytest.mark.parametrize("shared", ["handler", "store"])
def test_a_store_shared_by_two_items_is_an_error(tmp_path: Path, shared: str) -> None:
    store = sp.Store(tmp_path / "shrinkpoint")
    one = CompressedHandler(store)
    other = one if shared == "handler" else CompressedHandler(store)
    manager = ocp.CheckpointManager(tmp_path, item_handlers={"a": one, "b": other})
    args = ocp.args.Composite(a=CompressedSave({"weight": jnp.ones(3)}), b=CompressedSave({"weight": jnp.zeros(3)}))
    manager.save(1, args=args)
    with pytest.raises(sp.ShrinkpointError):
        manager.wait_until_finished()


@pytest.mark.slow
def test_arrays_that_are_spread_over_two_processes(tmp_path: Path) -> None:
    with socket.socket() as taken:
        # Held, so that nobody else is given it; whom JAX listens by shares it.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("localhost", 0))
        port = taken.getsockname()[1]
        command = [sys.executable, str(RUN.with_name("orbax_ranks.py")), str(port), str(tmp_path)]
        running = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
        assert [process.communicate(timeout=900)[0].splitlines()[-1] for process in running] == ["as it was"] * 2
    assert [process.returncode for process in running] == [0, 0]
    assert len(sp.Store(tmp_path / "shrinkpoint").steps()) == 2
