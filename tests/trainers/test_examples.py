"""The examples run twice, and resume the second time."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.groups import Coded
from shrinkpoint.codec.registry import CODECS, STREAMS
from shrinkpoint.trainers.dcp import Reader

HOME = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", HOME / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
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
    pytest.importorskip("lightning", reason="lightning is not installed; `make frameworks` has it")
    main = example("lightning_trainer").main
    main(str(tmp_path), 1)
    main(str(tmp_path), 2)
    assert len(sp.Store(tmp_path / "shrinkpoint").steps()) == 2


@pytest.mark.filterwarnings("ignore")
def test_transformers_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; `make frameworks` has it")
    pytest.importorskip("accelerate", reason="accelerate is not installed; `make frameworks` has it")
    main = example("transformers_trainer").main
    main(str(tmp_path), 10)
    assert main(str(tmp_path), 20).state.global_step == 20


def test_publish_model(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    base = {"weight": torch.randn(300, 300)}
    for name, state in (("base", base), ("tuned", {"weight": base["weight"] + (torch.rand(300, 300) < 0.01)})):
        (tmp_path / name).mkdir()
        safetensors.save_file(state, tmp_path / name / "model.safetensors")
    folders = [str(tmp_path / name) for name in ("tuned", "base", "small", "restored")]
    assert example("publish_model").main(*folders) > 5
    found, expected = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("restored", "tuned"))
    assert found == expected


@pytest.mark.parametrize("name", ["publish_model", "fsdp2"])
def test_without_what_it_needs_an_example_says_how_it_is_called(name: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run([sys.executable, str(HOME / f"{name}.py")], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(rf"usage: .*{name}\.py .*\n", done.stderr)


@pytest.mark.parametrize(
    ("name", "package", "said"),
    [
        ("lightning_trainer", "lightning", "needs Lightning: pip install 'lightning>=2.4'"),
        ("transformers_trainer", "transformers", "needs Transformers: pip install 'transformers>=4.50'"),
        ("transformers_trainer", "accelerate", "needs Transformers: pip install 'transformers>=4.50'"),
    ],
)
def test_without_its_framework_an_example_says_how_to_get_it(name: str, package: str, said: str) -> None:
    code = "import runpy, sys; sys.modules[sys.argv[1]] = None; runpy.run_path(sys.argv[2], run_name='__main__')"
    command = [sys.executable, "-c", code, package, str(HOME / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(rf"this example {re.escape(said)}.*\n", done.stderr)


def test_own_codec() -> None:
    module = example("own_codec")
    try:
        assert 1.8 < module.main() < 4
        cfg = sp.Config([("linear", module.Rounded(3))])
        assert sp.Config.from_json(cfg.to_json()) == cfg
        odd = torch.full((64, 64), float("nan"))
        odd[0, 0], odd[1] = torch.finfo(torch.float32).max, 0.0
        assert torch.equal(
            sp.decompress(sp.compress({"weight": odd}, cfg=cfg))["weight"].nan_to_num(7), odd.nan_to_num(7)
        )
        weight = torch.randn(64, 64)
        weight[0, 0], weight[1] = torch.finfo(torch.float32).max, 0.0
        ckpt = sp.compress({"weight": weight}, cfg=cfg)
        (row,) = ckpt.summary()
        assert row.error <= 2**-4
        (record,) = ckpt.records
        blob = bytearray(ckpt.to_bytes())
        blob[-3] ^= 1
        with pytest.raises(sp.CorruptDataError):
            sp.decompress(sp.Checkpoint.from_bytes(bytes(blob)))
        for piece in (b"", b"nonsense", b"".join(bytes(p) for p in ckpt.pieces_of(record))[:-1]):
            with pytest.raises(sp.CorruptDataError, match=r"example\.rounded"):
                module.decode(Coded((record.spec,), {}, [memoryview(piece)], (None,)))
        with pytest.raises(sp.BadArgumentError, match="bits is 24"):
            module.Rounded(24)
    finally:
        CODECS.pop(module.NAME)
        STREAMS.pop(module.NAME)


def test_own_kernel() -> None:
    """The example of a kernel agrees on all back ends, in a process that interprets Triton."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, str(HOME / "own_kernel.py")], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r"agree to the bit: reference, cpu.*, interpreter", done.stdout)


@pytest.mark.slow
def test_fsdp2(tmp_path: Path) -> None:
    """The FSDP2 example runs on two ranks, and resumes from the newest complete checkpoint."""

    # Ranks are forked from one process that has imported everything, because imports take longer than the work.
    code = f"""
import os, sys, warnings
sys.path.insert(0, {str(HOME)!r})
warnings.simplefilter("ignore")
import fsdp2, torch
import torch.distributed as dist
torch.set_num_threads(1)
for steps in (40, 60):
    # Where the ranks meet, at a port that nobody else can take meanwhile: as torchrun does it.
    meet = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pids = []
    for rank in (0, 1):
        pids.append(os.fork())
        if not pids[-1]:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
            os.environ.update(MASTER_PORT=str(meet.port), TORCHELASTIC_USE_AGENT_STORE="True")
            fsdp2.main({str(tmp_path / "run")!r}, steps)
            sys.stdout.flush()
            os._exit(0)
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0
    # A save that was interrupted: data, and no metadata.
    os.makedirs({str(tmp_path / "run" / "step-000041" / "data")!r}, exist_ok=True)
"""
    command = [sys.executable, "-c", code]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed at step 0" in done.stdout
    assert "resumed at step 40" in done.stdout
    newest = tmp_path / "run" / "step-000060"
    assert [len(file.chain) for file in Reader(newest).read_metadata().storage_data.files] == [3, 3]


def test_reinforcement_learning_with_a_served_copy(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import rl_sync; print(rl_sync.main({str(tmp_path)!r}, versions=3, width=48))"],
        cwd=HOME,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert "'equal': True" in done.stdout, done.stdout
    assert "version 2: reward" in done.stdout
