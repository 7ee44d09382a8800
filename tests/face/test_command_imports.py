"""Commands that only read headers start without PyTorch and without a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import shrinkpoint as sp


@pytest.mark.parametrize("command", ["ls", "info"])
def test_reading_headers_imports_neither_torch_nor_numba(command: str, tmp_path: Path) -> None:
    sp.Store(str(tmp_path)).save(1, {"weight": np.ones((8, 8), np.float32)})
    code = f"""
import sys
from shrinkpoint.__main__ import app
app(["{command}", {str(tmp_path)!r}], standalone_mode=False)
print(sorted({{"torch", "numba"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
