"""Public names: all are listed, including lazy ones; warnings share a base class."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import numpy as np
import pytest

import shrinkpoint as sp

OPTIONAL = (
    "accelerate", "deepspeed", "jax", "lightning", "megatron", "numcodecs", "orbax", "ray",
    "torch_checkpointing", "transformers", "zarr",
)  # fmt: skip
"""Modules of `trainers` that import what may not be there."""


def test_a_listing_has_what_is_imported_late() -> None:
    """`dir()` lists lazily imported names before their first use."""
    code = (
        "import shrinkpoint as sp\n"
        "assert {'Store', 'Saver', 'search', 'trainers', 'kernels', 'store', *sp.__all__} <= set(dir(sp))\n"
        "assert set(sp.trainers.__all__) <= set(dir(sp.trainers))\n"
        "import shrinkpoint.presets\n"
        "from shrinkpoint.presets import lossless\n"
        "assert lossless is sp.presets.lossless and sp.codec.presets is sp.presets is shrinkpoint.presets\n"
        "print(sp.trainers.save.__name__, sp.kernels.assign.__name__, sp.store.__name__, callable(sp.search))\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert said.stdout == "save assign shrinkpoint.store True\n", said.stderr


@pytest.mark.parametrize("package", ["kernels", "codec", "searching", "store", "trainers", "trainers.dcp"])
def test_every_warning_is_of_the_family(package: str) -> None:
    where = importlib.import_module(f"shrinkpoint.{package}")
    for module in pkgutil.iter_modules(where.__path__):
        if module.name in OPTIONAL or module.name == "gpu":
            continue
        for name, found in vars(importlib.import_module(f"{where.__name__}.{module.name}")).items():
            if isinstance(found, type) and issubclass(found, Warning) and found.__module__.startswith("shrinkpoint."):
                assert issubclass(found, sp.ShrinkpointWarning), name


def test_a_row_of_a_summary_is_a_mapping() -> None:
    row = sp.compress({"weight": np.arange(4000.0)}).summary()[0]
    assert list(row) == list(row.keys()) == list(dict(row))
    assert len(row) == len(dict(row))
    assert "error" in row
    assert "colour" not in row
    assert row["path"] == row.path == "weight"


def test_checkpoints_of_the_same_bytes_are_equal() -> None:
    state = {"weight": np.arange(4000.0)}
    base = sp.compress(state)
    assert base == sp.compress(state) == sp.Checkpoint.from_bytes(base.to_bytes())
    assert len({base, sp.compress(state), sp.compress({"weight": np.arange(4001.0)})}) == 2
    assert base != base.to_bytes()


def test_a_configuration_in_the_place_of_the_parent_is_named() -> None:
    with pytest.raises(
        sp.BadArgumentError, match="prev must be a Checkpoint, not Config; a configuration goes to cfg="
    ):
        sp.compress({"weight": np.zeros(3)}, sp.Config())  # type: ignore[arg-type]
