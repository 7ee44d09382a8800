"""After `shrinkpoint warm` nothing that takes long is compiled: no notice appears."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

USE = """
import sys, time, torch, shrinkpoint as sp
from numba.core import event

class Sum(event.Listener):
    depth, begin, spent = 0, 0.0, 0.0
    def on_start(self, event):
        self.begin = self.begin if self.depth else time.monotonic()
        self.depth += 1
    def on_end(self, event):
        self.depth -= 1
        self.spent += 0.0 if self.depth else time.monotonic() - self.begin

compiled = Sum()
event.register("numba:compile", compiled)
torch.manual_seed(0)
models = [
    torch.nn.Sequential(torch.nn.Embedding(2000, 64), torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)),
    torch.nn.Sequential(torch.nn.Conv2d(16, 64, 3), torch.nn.BatchNorm2d(64)),
    torch.nn.Sequential(*(torch.nn.Linear(48, 48) for _ in range(8))),
]

def states(model, dtype):
    model = model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters())
    kinds = sp.kinds(model, optimizer)
    while True:
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        yield {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "order": list(range(2000))}, kinds

levels = [sp.Config(), *(getattr(sp.presets, n)() for n in ("lossless", "exact_weights", "precise", "compact"))]
for model in models:
    for dtype in (torch.float32, torch.bfloat16):
        training = states(model, dtype)
        for cfg in levels:
            prev = None
            for _ in range(2):
                state, kinds = next(training)
                prev = sp.compress(state, prev, cfg, kinds=kinds)
            sp.decompress(prev)
training = states(models[0], torch.float32)
store = sp.Store(sys.argv[1] + "/store")
with sp.Saver(sp.Store(sys.argv[1] + "/saver")) as saver:
    for step in (1, 2, 3):
        state, kinds = next(training)
        store.save(step, state, kinds=kinds)
        saver.save(step, state, kinds=kinds)
store.load(), store.verify(), store.compact()
sp.search(state, lambda s: float(s["model"]["1.weight"].square().mean()), 0.1, kinds=kinds)
print(compiled.spent)
"""


@pytest.mark.slow
def test_no_notice_appears_after_warming(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, env=environment, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert "Compiling kernels" not in done.stderr
        return done.stdout

    assert "functions compiled" in run("-m", "shrinkpoint", "warm")
    # The notice comes after two seconds; less leaves room for slower machines.
    assert float(run("-W", "ignore", "-c", USE, str(tmp_path))) < 1.0
