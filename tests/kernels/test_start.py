"""Costs of importing, and that compiled code runs in parallel with Python."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from shrinkpoint import kernels as k

from .test_cache import start

MODULES = [
    m.name for m in pkgutil.walk_packages(k.__path__, "shrinkpoint.kernels.") if m.name.rpartition(".")[2] != "gpu"
]
jit = pytest.mark.skipif(
    bool(numba.config.DISABLE_JIT),  # type: ignore[attr-defined]
    reason="nothing is compiled where NUMBA_DISABLE_JIT is set",
)


def test_the_import_adds_less_than_a_third_of_a_second_to_that_of_torch() -> None:
    """The import adds little processor time to that of torch; least of several runs.

    With what `compress` needs, for the package alone imports nothing. A slow machine may take longer, as long as torch
    does too. Python may keep its bytecode, as that of an installed package is kept: the first of the starts compiles a
    hundred modules where none did before.
    """
    code = (
        "import json, time, torch; before = time.process_time()\n"
        "from shrinkpoint import Config, compress, presets\n"
        "print(json.dumps([before, time.process_time() - before]))"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times = []
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
        times.append(json.loads(done.stdout))
    torch_alone, added = (min(t) for t in zip(*times, strict=True))
    assert added < max(0.3, 0.2 * torch_alone), times


def test_the_package_alone_imports_nothing_of_its_own() -> None:
    """Importing the package imports no other module of it."""
    code = "import sys, shrinkpoint; print([n for n in sys.modules if n.startswith(('shrinkpoint', 'numpy', 'numba'))])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "['shrinkpoint']\n"


@jit
def test_no_module_compiles_anything_at_its_import(tmp_path: Path) -> None:
    code = f"""
import json
from importlib import import_module
from numba.core import event
with event.install_recorder("numba:compile") as seen:
    from shrinkpoint import *
    from shrinkpoint.kernels import *
    for name in {MODULES!r}:
        import_module(name)
    at_import = len(seen.buffer)
    import numpy as np
    from shrinkpoint.kernels.packing.cpu import pack_mask
    pack_mask(np.ones(3, bool))
print(json.dumps([at_import, len(seen.buffer)]))
"""
    process = start(code, NUMBA_CACHE_DIR=str(tmp_path / "numba"))
    printed, said = process.communicate(timeout=300)
    assert process.returncode == 0, said[-2000:]
    at_import, with_a_call = json.loads(printed)
    assert at_import == 0
    assert with_a_call > 0  # the recorder does see compilations


def dispatchers() -> dict[str, Any]:
    """Return every compiled function of the CPU back end by name."""
    found = {}
    for name in MODULES:
        module = import_module(name)
        for own, value in vars(module).items():
            if hasattr(value, "py_func") and value.py_func.__module__ == name:
                found[f"{name}.{own}"] = value
    return found


@jit
def test_every_compiled_function_releases_the_lock_and_is_exact() -> None:
    found = dispatchers()
    assert len(found) > 100
    for where, dispatcher in found.items():
        options = dispatcher.targetoptions
        assert options["nogil"] is True, where
        assert options["fastmath"] is False, where
        kept = type(dispatcher._cache).__name__ == "Kept"
        assert kept != options.get("no_cpython_wrapper", False), where


@jit
def test_a_helper_without_machine_code_runs_uncompiled_from_python() -> None:
    helpers = {where: d for where, d in dispatchers().items() if d.targetoptions.get("no_cpython_wrapper")}
    assert len(helpers) > 30
    ones = helpers["shrinkpoint.kernels.packing.cpu._ones"]
    before = list(ones.signatures)
    with np.errstate(over="ignore"):
        assert ones(np.uint64(0b1011)) == 3
    assert list(ones.signatures) == before


def turns_beside(work: Callable[[], object]) -> int:
    """Count the clock readings of this thread while another thread works."""
    times: list[float] = []

    def timed() -> None:
        begin = time.perf_counter()
        work()
        times.extend((begin, time.perf_counter()))

    thread = threading.Thread(target=timed)
    thread.start()
    seen = []
    while not times:
        seen.append(time.perf_counter())
    thread.join()
    begin, end = times
    quarter = (end - begin) / 4
    return sum(begin + quarter < at < end - quarter for at in seen)


@jit
def test_python_runs_while_a_kernel_does() -> None:
    values = np.tile(np.arange(16, dtype=np.uint8), 3 << 20)
    lengths = k.huffman_lengths(np.ones(16, np.int64))
    k.huffman_encode(values[:16], lengths)  # compiled, or loaded
    # On a busy machine this thread may not get its turn in time; what holds the lock gives it none at all.
    assert any(turns_beside(lambda: k.huffman_encode(values, lengths)) > 50 for _ in range(20))
    assert turns_beside(lambda: sum(range(20_000_000))) < 50
