"""A saver whose worker compiles kernels does not delay training."""

from __future__ import annotations

import json
from pathlib import Path

from ..kernels.test_cache import start

CODE = """
import json, os, signal, time
import torch, shrinkpoint as sp

def main():
    torch.manual_seed(0)
    x = torch.randn(300, 300)  # more elements than NumPy takes instead of a compiled kernel
    found = []
    with sp.Saver(sp.Store(FOLDER), on_busy="skip") as saver:
        for step in range(2):
            begin = time.perf_counter()
            future = saver.save(step, {"model": {"layer.weight": x + 1e-3 * step}})
            found.append(time.perf_counter() - begin)
        found.append(future.result().status)
        begin = time.perf_counter()
        saver.wait()
        found.append(time.perf_counter() - begin)
        os.kill(saver.pid, signal.SIGKILL)
        try:
            saver.save(2, {"step": 2})
            saver.wait()
        except ChildProcessError as error:
            found.append(str(error))
    print(json.dumps(found))

if __name__ == "__main__":
    main()
"""


def test_training_goes_on_while_the_worker_compiles(tmp_path: Path) -> None:
    """Saves return while the worker compiles for over a second."""
    code = tmp_path / "train.py"
    code.write_text(CODE.replace("FOLDER", repr(str(tmp_path / "store"))), encoding="utf-8")
    process = start(f"import runpy; runpy.run_path({str(code)!r}, run_name='__main__')", NUMBA_CACHE_DIR=str(tmp_path))
    printed, said = process.communicate(timeout=300)
    assert process.returncode == 0, said[-2000:]
    first, second, status, rest, died = json.loads(printed)
    assert status == "skipped", "the worker was ready before the second save: this test shows nothing"
    assert rest > 1
    assert max(first, second) < rest / 4
    assert died.endswith("was killed by SIGKILL"), "the notice about kernels is not the reason"
