"""Stores of torch arrays, in processes that have not imported torch; its import is slow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import shrinkpoint as sp

SLOW = """
import importlib.abc, sys, threading, time

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            assert threading.current_thread() is threading.main_thread(), "torch is imported by a thread"
        if name.startswith("torch.") and not hasattr(sys.modules["torch"], "Tensor"):
            time.sleep(0.03)

sys.meta_path.insert(0, Slow())
"""
ACTS = {
    "load": "assert len(store.load()['model']) == 8",
    "load a step": "assert len(sp.Store(url).load(1)['model']) == 8",
    "load a part": "assert len(store.load(2, paths=['model/0.*'])['model']) == 2",
    "verify": "assert store.verify() == {}",
    "restore": "run('restore', url, url + '/../state.pt')",
    "restore safetensors": "run('restore', url, url + '/../weights.safetensors', '--under', 'model')",
    "info": "run('info', url)",
    "diff": "run('diff', url, '1', '2')",
    "copy": "run('copy', url, url + '/../copy')",
    "compact": "assert store.compact(1.0) == [2]",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a base and a delta of a training; its arrays are decoded by several threads."""
    folder = tmp_path_factory.mktemp("without") / "run"
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    store = sp.Store(str(folder))
    for step in (1, 2):
        model(torch.randn(8, 512)).square().mean().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        store.save(step, state, kinds=sp.kinds(model, optimizer))
    return folder


@pytest.mark.parametrize("name", ACTS)
def test_torch_is_imported_before_threads_need_it(name: str, run: Path) -> None:
    code = f"""{SLOW}
import shrinkpoint as sp
from shrinkpoint.__main__ import main
url = {str(run)!r}
store = sp.Store(url)
def run(*words):
    sys.argv = ["shrinkpoint", *words]
    main()
{ACTS[name]}
"""
    environment = {**os.environ, "SHRINKPOINT_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_numpy_arrays_need_no_torch(tmp_path: Path) -> None:
    sp.Store(str(tmp_path)).save(1, {"weight": np.ones((64, 64), np.float32), "order": list(range(100))})
    code = f"import sys, shrinkpoint as sp; sp.Store({str(tmp_path)!r}).load(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
