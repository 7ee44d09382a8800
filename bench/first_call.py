"""Processor time of the first saves and the first load, with an empty kernel cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .harness import Options, Row

SAVE, LOAD = "first base and delta, empty kernel cache", "first load, empty kernel cache"
LIMITS = {SAVE: 6.0, LOAD: 2.5}
LAYERS, WIDTH = 8, 512
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
_CODE = """
import json, sys, time
import torch, shrinkpoint as sp
from pathlib import Path
torch.set_num_threads(1); sp.set_threads(1); torch.manual_seed(0)
width = int(sys.argv[4])
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(int(sys.argv[3]))))
optimizer = torch.optim.AdamW(model.parameters())
def state():
    for _ in range(3):
        optimizer.zero_grad(); model(torch.randn(64, width)).square().mean().backward(); optimizer.step()
    return {"model": {n: x.clone() for n, x in model.state_dict().items()}}
folder = Path(sys.argv[2])
if sys.argv[1] == "save":
    import copy
    states = []
    for _ in range(2):
        states.append({**state(), "optimizer": copy.deepcopy(optimizer.state_dict())})
    begin = time.process_time()
    base = sp.compress(states[0]); delta = sp.compress(states[1], base)
    spent = time.process_time() - begin
    (folder / "base").write_bytes(base.to_bytes()); (folder / "delta").write_bytes(delta.to_bytes())
    good = delta.is_delta
else:
    files = (folder / "base").read_bytes(), (folder / "delta").read_bytes()
    begin = time.process_time()
    delta = sp.Checkpoint.from_bytes(files[1], prev=sp.Checkpoint.from_bytes(files[0]))
    back = sp.decompress(delta)
    spent = time.process_time() - begin
    good = sorted(back["model"]) == sorted(model.state_dict())
print(json.dumps([spent, good]))
"""


def rows(options: Options) -> list[Row]:
    """Both rows: medians of three processes (one with --quick) with kernel caches of their own."""
    if not any(options.wanted(name) for name in LIMITS):
        return []
    options.say("first call")
    times: dict[str, list[float]] = {SAVE: [], LOAD: []}
    for _ in range(1 if options.quick else 3):
        with tempfile.TemporaryDirectory() as folder:
            for name, what in ((SAVE, "save"), (LOAD, "load")):
                environment = {**os.environ, "NUMBA_CACHE_DIR": str(Path(folder) / f"cache-{what}")}
                done = subprocess.run(
                    [sys.executable, "-P", "-c", _CODE, what, folder, str(LAYERS), str(WIDTH)],
                    check=True, capture_output=True, env=environment,
                )  # fmt: skip
                spent, good = json.loads(done.stdout)
                if not good:
                    raise AssertionError(f"{name}: the result is not that of the state")
                times[name].append(spent)
    return [_row(name, sorted(found)) for name, found in times.items()]


def _row(name: str, found: list[float]) -> Row:
    value = found[len(found) // 2]
    target = f"<= {LIMITS[name]:g} s"
    note = f"processor time, {len(found)} processes, {found[0]:.2f} to {found[-1]:.2f} s; imports not counted"
    return Row(name, "cpu, 1 thread", PARAMETERS, value, "s", None, None, None, target, value <= LIMITS[name], note)
