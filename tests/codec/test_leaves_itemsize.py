"""Item sizes known without torch equal torch's, and headers are read without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

import shrinkpoint as sp
from shrinkpoint.codec.state.leaves import _TORCH_ITEMSIZES


def test_known_item_sizes_are_those_of_torch() -> None:
    assert {name: getattr(torch, name).itemsize for name in _TORCH_ITEMSIZES} == _TORCH_ITEMSIZES


def test_a_header_is_read_without_torch(tmp_path: Path) -> None:
    arrays = {str(dtype): torch.zeros(3, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64)}
    sp.Store(tmp_path / "run").save(1, arrays)
    code = (
        "import sys; from shrinkpoint.__main__ import app; from typer.testing import CliRunner\n"
        f"for words in (['ls', {str(tmp_path / 'run')!r}], ['info', {str(tmp_path / 'run')!r}]):\n"
        "    found = CliRunner().invoke(app, words); assert found.exit_code == 0, found.output\n"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
