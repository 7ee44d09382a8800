"""Kernels with instructions that only some processors have give the same bytes without them."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import numpy as np
from shrinkpoint.kernels.backend.instructions import HAS_BMI2
from shrinkpoint.kernels.planes import cpu as categories
from shrinkpoint.kernels.rans import wide as wide_rans
from shrinkpoint.kernels.sparse_delta import apply_changes, collect_changes
symbols, frequencies = np.arange(5000, dtype=np.uint8) % 7 % 3, np.asarray([[2000, 1000, 1096]], np.uint32)
stored = wide_rans.encode(symbols, None, frequencies)
assert (wide_rans.decode(stored, None, frequencies, 5000) == symbols).all()
print(HAS_BMI2, wide_rans.HAS_PACKING)
print(stored.tobytes().hex())
for dtype in ("uint16", "uint32"):
    n = np.arange(5000, dtype=np.uint64)
    values = ((n * 2654435761 % 2**32) >> (n % 32)).astype(dtype)
    found, extra = categories.split_categories(values, 3)
    assert (categories.join_categories(found, extra, 3, dtype) == values).all()
    print(found.tobytes().hex(), extra.tobytes().hex())
    old, new = (x.astype(dtype).view(f"f{values.itemsize}") for x in (values, np.where(n % 5 == 0, values ^ 3, values)))
    delta = collect_changes(new, old, (9, 99))
    assert apply_changes(old, delta, (9, 99)).tobytes() == new.tobytes()
    print(delta.ranks.tobytes().hex(), delta.changes.tobytes().hex())
"""


def _printed(**more: str) -> str:
    environment = {**os.environ, **more}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def test_the_same_bytes_on_other_processors() -> None:
    own = _printed().split("\n", 1)
    other = _printed(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="").split("\n", 1)
    assert other[0] == "False False"
    assert len(own[1]) > 1000
    assert own[1] == other[1]
