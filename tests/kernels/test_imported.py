"""A module that another thread still imports counts as not imported."""

from __future__ import annotations

import importlib.machinery
import re
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

import shrinkpoint as sp
from shrinkpoint.codec.state.leaves import is_sharded
from shrinkpoint.kernels.backend import dispatch
from shrinkpoint.kernels.backend.arrays import imported, is_torch
from shrinkpoint.kernels.backend.dispatch import load
from shrinkpoint.searching.quality import preserved

HOME = Path(__file__).parents[2]


@pytest.fixture
def half_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put modules without contents in place of torch and of a part of it, as in an import."""
    for name in ("torch", "torch.distributed.tensor"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__spec__._initializing = True  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)


def test_only_complete_modules_are_returned() -> None:
    assert imported("numpy") is np
    assert imported("no.such.module") is None
    made = types.ModuleType("made")  # without a specification
    sys.modules["made"] = made
    assert imported("made") is made
    del sys.modules["made"]


def test_threads_enter_a_circle_of_modules_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The modules of Numba import each other so. Without the lock, one of the threads gets a module without its names.
    for own, other in (("circle_a", "circle_b"), ("circle_b", "circle_a")):
        text = f"import time\ntime.sleep(0.2)\nimport {other}\n{own} = 1\ndef used(): return {other}.{other}\n"
        (tmp_path / f"{own}.py").write_text(text)
        (tmp_path / f"entry_{own}.py").write_text(f"import {own}\nfound = {own}.used()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    barrier, found = threading.Barrier(2), []

    def enter(name: str) -> None:
        barrier.wait()
        try:
            found.append(load(name).found)
        except (ImportError, AttributeError) as error:
            found.append(error)

    entries = [threading.Thread(target=enter, args=(f"entry_circle_{name}",)) for name in "ab"]
    for thread in entries:
        thread.start()
    for thread in entries:
        thread.join()
    for name in [name for name in sys.modules if "circle_" in name]:
        del sys.modules[name]
    assert found == [1, 1]


@pytest.mark.usefixtures("half_imported")
def test_nothing_is_asked_of_a_module_during_its_import() -> None:
    x = np.arange(100_000)
    assert imported("torch") is None
    assert not is_torch(x)
    assert not is_sharded(x)
    assert dispatch._is_plain(x)
    with preserved():
        pass
    ckpt = sp.compress({"x": x, "order": list(range(100))})
    back = sp.decompress(sp.Checkpoint.from_bytes(ckpt.to_bytes()))
    np.testing.assert_array_equal(back["x"], x)


def test_modules_are_looked_up_in_one_place() -> None:
    found = {
        str(path.relative_to(HOME))
        for folder in ("kernels", "codec", "search", "store", "trainers", "src/shrinkpoint")
        for path in (HOME / folder).rglob("*.py")
        if re.search(r"sys\.modules\.get\(|in sys\.modules", path.read_text(encoding="utf-8"))
    }
    assert found == {"kernels/backend/arrays.py"}
