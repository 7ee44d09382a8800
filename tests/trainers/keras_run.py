"""A small Keras run for the tests: `python keras_run.py FOLDER EPOCHS`; it resumes if it can. A line an epoch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np

import shrinkpoint as sp
from shrinkpoint.trainers.keras import CompressedBackup


def build(width: int = 64) -> Any:
    """A network with dropout and batch normalization, compiled."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Input((8,)),
        keras.layers.Dense(width, activation="tanh", name="first"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.3, name="drop"),
        keras.layers.Dense(1, name="last"),
    ]
    model = keras.Sequential(layers, name="net")
    model.compile(keras.optimizers.Adam(0.01, name="adam"), "mse")
    return model


class Lines(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes the loss of each epoch."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        with self.path.open("a") as out:
            print(epoch, float(logs["loss"]).hex(), file=out)


def main(folder: Path, epochs: int) -> sp.Store:
    """Train to so many epochs."""
    folder.mkdir(parents=True, exist_ok=True)
    model = build()
    x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    store = sp.Store(folder / "store", cfg=sp.presets.lossless())
    backup = CompressedBackup(store)
    start = backup.resume(model)
    callbacks = [Lines(folder / "losses.txt"), backup]
    model.fit(x, x[:, :1] ** 2, batch_size=16, epochs=epochs, initial_epoch=start, verbose=0, callbacks=callbacks)
    return store


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
