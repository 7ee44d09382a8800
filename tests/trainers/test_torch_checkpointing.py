"""torch-checkpointing's manager with our storage."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shrinkpoint as sp

pytest.importorskip("torch_checkpointing", reason="torch-checkpointing is not installed; `make frameworks` has it")

from torch_checkpointing import CheckpointManager
from torch_checkpointing.checkpoint_layout import LayoutInfo, RawSerialization
from torch_checkpointing.schema import ItemSpec

from shrinkpoint.trainers.torch_checkpointing import CompressedStorageConfig, pack, unpack

pytestmark = pytest.mark.filterwarnings("ignore")
EXACT = sp.presets.lossless()


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 128), torch.nn.ReLU(), torch.nn.Linear(128, 96))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 96)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def manager(cfg: Any, kinds: Any = None, *, background: bool = False, **items: ItemSpec) -> Any:
    config = CheckpointManager.Config.with_async_save() if background else CheckpointManager.Config.with_sync_save()
    config.storage_config, config.items = CompressedStorageConfig(cfg=cfg, kinds=kinds), items
    return config.build()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def test_exact_states_come_back_from_the_worker_process(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "names": {"a", "b"}}
    saving = manager(EXACT, background=True)
    for step in range(2):
        saving.save(str(tmp_path / f"{step}"), state).result()
        found = saving.load(str(tmp_path / f"{step}"), dict.fromkeys(state))
        assert same(found, state)
        assert (tmp_path / f"{step}" / "model_0.pt").read_bytes()[1:4] == b"SPT"
    saving.close()


def test_known_kinds_are_lossy_in_their_items(tmp_path: Path) -> None:
    model, optimizer = trained()
    # Kinds are for the one tree that they were made from: a copy in it stays exact.
    weights = model.state_dict()
    state = {
        "model": weights | {"copy": {k: v.clone() for k, v in weights.items()}},
        "optimizer": optimizer.state_dict(),
    }
    saving = manager(sp.Config(), sp.kinds(model, optimizer))
    saving.save(str(tmp_path / "a"), state)
    found = saving.load(str(tmp_path / "a"), {"model": None, "optimizer": None})
    assert same(found["model"]["copy"], dict(weights))
    for name, value in weights.items():
        error = float((found["model"][name] - value).norm() / value.norm())
        assert 0 < error < 0.05 if value.ndim == 2 else error == 0, name
    for key, moments in state["optimizer"]["state"].items():
        assert torch.equal(found["optimizer"]["state"][key]["step"], moments["step"])
    rows = {
        item: {
            row.path: row.stream
            for row in sp.Checkpoint.from_bytes((tmp_path / f"a/{item}_0.pt").read_bytes()).summary()
        }
        for item in state
    }
    assert rows["model"]["state/0.weight"] == "levels"
    assert rows["optimizer"]["state/state/0/exp_avg"] == "grid"


def test_what_is_not_a_tensor_stays_as_it_is(tmp_path: Path) -> None:
    shared = torch.arange(100.0)
    odd = {
        "view": shared[10:20],
        "tied": [shared, shared],
        "transposed": torch.randn(30, 40).T,
        "half": torch.randn(40, 50).bfloat16(),
        "complex": torch.randn(9, dtype=torch.complex64).conj(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "sparse": torch.eye(4).to_sparse(),
        1: "a number",
        "parameter": torch.nn.Parameter(torch.randn(20, 60)),
    }
    saving = manager(EXACT, raw=ItemSpec(layout=LayoutInfo("raw.bin", RawSerialization())))
    clash = {1: torch.zeros(9), "1": torch.ones(9)}
    saving.save(str(tmp_path / "a"), {"odd": odd, "clash": clash, "raw": b"\x00" * 20_000})
    found = saving.load(str(tmp_path / "a"), dict.fromkeys(("odd", "clash", "raw")))
    assert found["raw"] == b"\x00" * 20_000
    assert same(found["clash"], clash)
    assert (tmp_path / "a/clash_0.pt").read_bytes()[:2] == b"PK"
    for name, value in odd.items():
        again = found["odd"][name]
        assert type(again) is type(value)
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            assert again.stride() == value.stride()
            assert torch.equal(again, value)
    assert found["odd"]["tied"][0].data_ptr() == found["odd"]["tied"][1].data_ptr()
    assert torch.equal(found["odd"]["sparse"].to_dense(), torch.eye(4))


def test_the_bytes_are_those_of_torch(tmp_path: Path) -> None:
    torch.save({"weight": torch.randn(64, 64), "note": "x"}, tmp_path / "own.pt")
    data = bytearray((tmp_path / "own.pt").read_bytes())
    packed = pack(data, EXACT, None)
    assert unpack(packed) == data
    with pytest.raises(sp.CorruptDataError):
        unpack(packed[:-40] + bytes(40))
    with pytest.raises(sp.CorruptDataError, match="not a file of torch-checkpointing"):
        unpack(sp.compress({"weight": torch.zeros(4)}).to_bytes())


def test_other_numbers_of_ranks_load(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("torch_checkpointing_run.py")), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["two ranks: same", "one rank: same"]


def test_a_save_that_fails_leaves_no_file(tmp_path: Path) -> None:
    storage = CompressedStorageConfig().create_storage()
    with pytest.raises(ZeroDivisionError), storage.get_write_stream(tmp_path / "a.pt", None) as stream:
        stream.write(bytes(1 // 0))
    assert not (tmp_path / "a.pt").exists()
