"""`bench real`: files are read without running code, and a missing package is reported."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shrinkpoint.bench.harness import Options
from shrinkpoint.bench.studies import real


def small() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, 64)).square().sum().backward()
    optimizer.step()
    return {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> real.File:
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('its code was run')")
    torch.save(small() | {"scheduler": {"shift": np.arange(3.0)}}, package / "file.pt")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = real.File("some", "some-package", "some_package", "*.pt", outputs=lambda state: state["model"]["weight"])
    monkeypatch.setattr(real, "FILES", (found,))
    return found


@pytest.mark.filterwarnings("ignore::shrinkpoint.codec.plan.UnknownArraysWarning")
def test_rows_of_a_file(file: real.File) -> None:
    rows = {row.row: row.value for row in real.run(Options(only="some"))}
    for level in ("default", "exact_weights", "compact", "lossless"):
        assert rows[f"some, {level}: whole state"] > 1  # type: ignore[operator]
    exact = ("lossless: error of the weights", "lossless: error of the second moments")
    exact += ("exact_weights: error of the weights", "exact_weights: change of the outputs")
    assert [rows[f"some, {name}"] for name in exact] == [0.0] * len(exact)
    assert 0 < rows["some, default: error of the weights"] < 0.1  # type: ignore[operator]
    assert rows["some, default: change of the outputs"] == pytest.approx(
        rows["some, default: error of the weights"], rel=0.2
    )
    assert rows["some, lossless: whole state, against zstd -19"] == rows["some, lossless: whole state"]


def test_errors_are_of_each_kind() -> None:
    state, other = small(), small()
    for moments in other["optimizer"]["state"].values():
        moments["exp_avg"] *= 1.5
    found = real.errors(state, other)
    assert found == {"weights": 0.0, "first moments": pytest.approx(0.5), "second moments": 0.0}


def test_a_file_that_needs_code_is_refused(tmp_path: Path) -> None:
    torch.save({"code": Path("x")}, tmp_path / "file.pt")
    with pytest.raises(pickle.UnpicklingError):
        real.read(tmp_path / "file.pt")


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "FILES", (real.File("none", "no-such-package", "no_such_package", "*"),))
    (row,) = real.run(Options())
    assert row.value is None
    assert row.note == "not measured: no-such-package is not installed (pip install --no-deps no-such-package)"
