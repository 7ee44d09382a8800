"""Keras 3 as it is on the registry, on the torch back end: killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import shrinkpoint as sp
from shrinkpoint.commands.sources import header_of

os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip("keras", reason="keras is not installed")

from shrinkpoint.trainers.keras import CompressedBackup

from .keras_run import build, main

pytestmark = pytest.mark.filterwarnings("ignore")
RUN = Path(__file__).with_name("keras_run.py")


def by_epoch(folder: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    for line in (folder / "losses.txt").read_text().splitlines():
        assert found.setdefault(int(line.split()[0]), line) == line
    return found


@pytest.mark.slow
def test_a_killed_run_resumed_equals_one_that_was_not(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, str(RUN), str(tmp_path / "killed"), "5000"], start_new_session=True)
    limit = time.monotonic() + 120
    while not (tmp_path / "killed" / "losses.txt").exists() or len(by_epoch(tmp_path / "killed")) < 4:
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
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
