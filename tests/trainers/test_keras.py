"""Keras 3 as it is on the registry, on the torch back end: killed and resumed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shrinkpoint as sp
from shrinkpoint.commands.sources import header_of

os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip("keras", reason="keras is not installed; `make frameworks` has it")

from shrinkpoint.trainers.keras import CompressedBackup

from ..forking import Script
from .keras_run import build, main
from .killing import run_and_kill

pytestmark = pytest.mark.filterwarnings("ignore")
RUN = Path(__file__).with_name("keras_run.py")


def by_epoch(folder: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    for line in (folder / "losses.txt").read_text().splitlines():
        assert found.setdefault(int(line.split()[0]), line) == line
    return found


@pytest.mark.slow
def test_a_killed_run_resumed_equals_one_that_was_not(tmp_path: Path) -> None:
    killed = tmp_path / "killed"
    with Script(RUN) as script:
        begun = lambda: (killed / "losses.txt").exists() and len(by_epoch(killed)) >= 4  # noqa: E731
        run_and_kill(script, killed, 5000, once=begun)
    epochs = len(by_epoch(tmp_path / "killed")) + 4
    main(tmp_path / "killed", epochs)
    main(tmp_path / "whole", epochs)
    assert by_epoch(tmp_path / "killed") == by_epoch(tmp_path / "whole")


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "rmsprop", "sgd", "adagrad"])
def test_an_optimizers_variables_are_known_for_what_they_are(tmp_path: Path, optimizer: str) -> None:
    keras = pytest.importorskip("keras")
    made = {
        "adamw": keras.optimizers.AdamW(0.01),
        "lamb": keras.optimizers.Lamb(0.01),
        "rmsprop": keras.optimizers.RMSprop(0.01, momentum=0.9),
        "sgd": keras.optimizers.SGD(0.01, momentum=0.9),
        "adagrad": keras.optimizers.Adagrad(0.01),
    }[optimizer]
    layers = [keras.layers.Input((64,)), keras.layers.Dense(64, name="first"), keras.layers.Dense(1, name="last")]
    model = keras.Sequential(layers, name="net")
    model.compile(made, "mse")
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    store = sp.Store(tmp_path)
    model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[CompressedBackup(store)])
    rows = {row.path: row.codec for row in header_of(store, 2).summary()}
    kernel = "optimizer/net/first/kernel"
    assert rows["model/net/first/kernel"] == "levels"
    if optimizer in ("adamw", "lamb"):
        assert (rows[f"{kernel}/momentum"], rows[f"{kernel}/velocity"]) == ("grid", "rank-one")
    elif optimizer == "rmsprop":  # its momentum is of the update
        assert (rows[f"{kernel}/momentum"], rows[f"{kernel}/velocity"]) == ("log-buckets", "rank-one")
    elif optimizer == "sgd":
        assert rows[f"{kernel}/momentum"] == "log-buckets"
    else:
        assert rows[f"{kernel}/accumulator"] == "bytes"
    assert all(rows[path] == "bytes" for path in rows if path.endswith(("iteration", "learning_rate", "bias")))


def test_steps_are_those_of_the_optimizer(tmp_path: Path) -> None:
    """Epochs number the checkpoints; weights are coded ahead of their drift by steps."""
    model = unnamed(64)
    with sp.Saver(sp.Store(tmp_path, sp.Config(rate=0.002))) as saver:
        fitted(model, CompressedBackup(saver), epochs=3)
    store = sp.Store(tmp_path, sp.Config(rate=0.002))
    state = store.load(3)
    store.load(2)
    assert int(model.optimizer.iterations) % 3 == 0
    assert store.earlier(state, 3).steps == int(model.optimizer.iterations) / 3 > 1


def test_another_model_is_refused_with_a_list(tmp_path: Path) -> None:
    store = main(tmp_path, 1)
    model = build(32)
    before = [w.copy() for w in model.get_weights()]
    with pytest.raises(sp.BadArgumentError, match=r"first/kernel: shape \(8, 64\) in the checkpoint, \(8, 32\)"):
        CompressedBackup(store).resume(model)
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(sp.BadArgumentError, match="must be a Saver or a Store, not int"):
        CompressedBackup(3)  # type: ignore[arg-type]
    with pytest.raises(sp.BadArgumentError, match="every is 0"):
        CompressedBackup(sp.Store(tmp_path), every=0)


def unnamed(width: int = 32, dtype: str | None = None) -> Any:
    """Layers that Keras names itself, two of a kind, so that their numbers depend on what was built before."""
    import keras

    layers = [
        keras.layers.Input((8,)),
        keras.layers.Dense(width, activation="tanh", dtype=dtype),
        keras.layers.BatchNormalization(dtype=dtype),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(width, dtype=dtype),
        keras.layers.Dense(1, dtype=dtype),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def fitted(model: Any, *callbacks: Any, epochs: int = 2, start: int = 0) -> None:
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    model.fit(x, x[:, :1] ** 2, batch_size=16, epochs=epochs, initial_epoch=start, verbose=0, callbacks=[*callbacks])


def values(model: Any) -> list[Any]:
    return [np.array(v.value.detach().float()) for v in [*model.variables, *model.optimizer.variables]]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) > 0 and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_model_without_names_that_is_built_again_goes_on(tmp_path: Path) -> None:
    model = unnamed()
    store = sp.Store(tmp_path, cfg=sp.presets.lossless())
    fitted(model, CompressedBackup(store))
    again = unnamed()
    assert {v.path for v in again.variables} != {v.path for v in model.variables}
    assert not same(values(again), values(model))
    backup = CompressedBackup(store)
    start = backup.resume(again)
    assert start == 2
    assert same(values(again), values(model))
    fitted(again, backup, epochs=3, start=start)
    resumed = unnamed()
    assert CompressedBackup(store).resume(resumed) == 3
    assert same(values(resumed), values(again))
    other = unnamed(16)
    before = [w.copy() for w in other.get_weights()]
    with pytest.raises(sp.BadArgumentError, match=r"kernel: shape \(8, 32\) in the checkpoint, \(8, 16\) in the model"):
        CompressedBackup(store).resume(other)
    assert same(other.get_weights(), before)


def test_other_dtypes_stores_and_unfinished_models_are_refused(tmp_path: Path) -> None:
    import keras

    store = sp.Store(tmp_path / "a", cfg=sp.presets.lossless())
    fitted(unnamed(), CompressedBackup(store))
    other = unnamed(dtype="bfloat16")
    before = [np.array(w, dtype=np.float32) for w in other.get_weights()]
    with pytest.raises(
        sp.BadArgumentError, match=r"kernel: torch\.float32 in the checkpoint, torch\.bfloat16 in the model"
    ):
        CompressedBackup(store).resume(other)
    assert same([np.array(w, dtype=np.float32) for w in other.get_weights()], before)
    foreign = sp.Store(tmp_path / "b")
    foreign.save(0, {"weights": np.ones(3), "step": 1})
    with pytest.raises(sp.BadArgumentError, match="no checkpoint of CompressedBackup; it holds weights, step"):
        CompressedBackup(foreign).resume(unnamed())
    foreign.save(1, [1, 2])
    with pytest.raises(sp.BadArgumentError, match="it holds list"):
        CompressedBackup(foreign).resume(unnamed())
    for model, why in (
        (keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)]), r"is not compiled \(model.compile\)"),
        (keras.Sequential([keras.layers.Dense(1)]), r"is not built \(give its input's shape"),
        (3, "must be a keras.Model, not int"),
    ):
        with pytest.raises(sp.BadArgumentError, match=why):
            CompressedBackup(store).resume(model)
