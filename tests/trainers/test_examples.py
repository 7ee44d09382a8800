"""The examples run, twice: the second time they resume."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import shrinkpoint as sp

HOME = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", HOME / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_plain_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = example("plain_loop").main
    main(str(tmp_path), 1)
    main(str(tmp_path), 2)
    said = capsys.readouterr().out
    assert "resumed at step 0" in said
    assert "resumed at step 20" in said
    assert sp.Store(tmp_path).steps() == [20, 40, 60]


@pytest.mark.filterwarnings("ignore")
def test_lightning_trainer(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    main = example("lightning_trainer").main
    main(str(tmp_path), 1)
    main(str(tmp_path), 2)
    assert len(sp.Store(tmp_path / "shrinkpoint").steps()) == 2


@pytest.mark.filterwarnings("ignore")
def test_transformers_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    main = example("transformers_trainer").main
    main(str(tmp_path), 10)
    assert main(str(tmp_path), 20).state.global_step == 20


def test_publish_model(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    base = {"w": torch.randn(300, 300)}
    for name, state in (("base", base), ("tuned", {"w": base["w"] + (torch.rand(300, 300) < 0.01)})):
        (tmp_path / name).mkdir()
        safetensors.save_file(state, tmp_path / name / "model.safetensors")
    folders = [str(tmp_path / name) for name in ("tuned", "base", "small", "restored")]
    assert example("publish_model").main(*folders) > 5
    found, expected = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("restored", "tuned"))
    assert found == expected
