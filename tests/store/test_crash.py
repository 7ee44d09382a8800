"""Writers killed at random moments: what had been saved when they died is there, and it is right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A process without threads forks writers, so each trial costs milliseconds; a writer tells by a pipe what it has saved.
_DRIVER = """
import os, random, signal, struct, sys, time, warnings
os.environ["SHRINKPOINT_THREADS"] = "1"
import numpy as np
import shrinkpoint as sp

folder, trials = sys.argv[1], int(sys.argv[2])
seed = random.SystemRandom().randrange(1 << 32)
rng = random.Random(seed)
cfg = sp.presets.lossless(chain=sp.ChainPolicy(*rng.choice([(3, "previous"), (5, "base"), (20, "previous")])))

def state(step):
    g = np.random.default_rng(step)
    return {"step": step, "w": g.standard_normal(60_000), "i": np.arange(2000) * step}

def right(found):
    expected = state(found["step"])
    return all(np.array_equal(found[k], expected[k]) for k in expected)

warm = sp.Store(folder + "-warm", cfg)  # what is compiled here need not be compiled in each writer
for step in range(4):
    warm.save(step, state(step))
assert right(sp.Store(folder + "-warm", cfg).load())
store = sp.Store(folder, cfg)
store.save(0, state(0))
warnings.simplefilter("error")
newest, hit = 0, 0
for trial in range(trials):
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            own = sp.Store(folder, cfg)
            step = own.load()["step"]
            while True:
                step += 1
                own.save(step, state(step))
                os.write(into, struct.pack("<q", step))
        except BaseException as e:
            print("writer:", repr(e), flush=True)
            os._exit(1)
    os.close(into)
    time.sleep(rng.choice([0.0, 0.02, 0.1]) + rng.random() * 0.1)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), f"seed {seed}: the writer ended by itself"
    told = b""
    while part := os.read(out, 1 << 16):
        told += part
    os.close(out)
    if told:
        newest = struct.unpack("<q", told[-8:])[0]
    reader = sp.Store(folder, cfg)
    found = reader.load()
    assert right(found), f"seed {seed}: step {found['step']} is wrong"
    assert newest <= found["step"] <= newest + 1, f"seed {seed}: {newest} was saved, {found['step']} is there"
    newest = found["step"]
    hit += any(n.startswith(".tmp-") for d in ("data", "steps") for n in os.listdir(f"{folder}/{d}"))
    if trial % 10 == 9:
        assert reader.verify() == {}, f"seed {seed}"
        reader.gc()
        assert not any(n.startswith(".tmp-") for d in ("data", "steps") for n in os.listdir(f"{folder}/{d}"))
final = sp.Store(folder, cfg)
assert final.verify() == {}
assert all(right(final.load(step)) for step in final.steps()[-20:])
print("trials", trials, "steps", len(final.steps()), "killed in the middle of a write", hit)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_killed_at_random_moments(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _DRIVER, str(tmp_path / "run"), "60"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout.split()
    assert int(words[3]) > 10, done.stdout
    assert int(words[-1]) > 0, f"no kill hit a write: {done.stdout}"
