"""`shrinkpoint warm` compiles all that saves, loads and searches need, and a second run nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shrinkpoint.kernels.backend.cache import KERNELS

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
def test_nothing_is_compiled_after_warming(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}

    def run(*words: str) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, env=environment, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert "Compiling kernels" not in done.stderr
        return done.stdout, done.stderr

    said, progress = run("-m", "shrinkpoint", "warm")
    compiled = re.fullmatch(r"(\d+) of \1 kernels compiled in \d+ s\n", said)
    assert compiled
    assert abs(int(compiled[1]) - KERNELS) < 10, f"set KERNELS to {compiled[1]}"
    assert re.findall(r"kernels: (\d+/\d+)", progress)[:2] == [f"7/{KERNELS}", f"14/{KERNELS}"]
    assert run("-m", "shrinkpoint", "warm") == (f"all {compiled[1]} kernels are compiled\n", "")
    files = sorted(cache.rglob("*.nbc"))
    seconds, _ = run("-W", "ignore", "-c", USE, str(tmp_path))
    # The notice comes after two seconds; less leaves room for slower machines.
    assert float(seconds) < 1.0
    assert sorted(cache.rglob("*.nbc")) == files  # the worker of the Saver compiled nothing either
    next(cache.rglob("cpu._least*.nbc")).unlink()
    assert run("-m", "shrinkpoint", "warm")[0].startswith("1 of ")
