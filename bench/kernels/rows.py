"""Rows of embedding tables, each quantized by its own numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from shrinkpoint.kernels import rows as kernels

from ..harness import Case, Job, host
from .place import COLUMNS, FEW, ROWS, Call, Place

_SLOW = 1 << 20
"""Most elements of a case that takes many steps an element."""


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject."""
    few = at.few(_SLOW)
    return [
        at.case("row_quantize 4 bit adaptive", lambda: quantized(at, 4, "adaptive", 45)),
        at.case("row_quantize 8 bit", lambda: quantized(at, 8, "asymmetric", 45)),
        at.case("row_dequantize", lambda: dequantized(at)),
        few.case("row_quantize 2 bit adaptive", lambda: quantized(few, 2, "adaptive", 25)),
        few.case("row_quantize 3 bit adaptive", lambda: quantized(few, 3, "adaptive", 25)),
        few.case("row_kmeans 2 bit", lambda: clustered(few)),
        at.case("row_lookup", lambda: looked_up(at)),
    ]


def quantized(at: Place, bits: int, method: Any, bins: int) -> Job:
    """Quantize rows by even levels."""
    named, first = {"num_bins": bins, "ratio": 1.0}, max(1, at.prefix // COLUMNS)
    call = Call("rows.row_quantize", (at.matrix(),), (bits, method), named=named, first=first)
    return at.compared(call, 5, note=ROWS)


def dequantized(at: Place) -> Job:
    """Restore rows."""
    found = [host(part) for part in kernels.row_quantize(at.matrix(), 8, "asymmetric")]
    return at.compared(Call("rows.row_dequantize", tuple(found), first=max(1, at.prefix // COLUMNS)), 5, note=ROWS)


def _few(at: Place) -> int:
    return max(1, min(at.n, FEW) // COLUMNS)


def clustered(at: Place) -> Job:
    """Quantize rows by k-means."""
    call = Call("rows.row_kmeans", (at.matrix(),), (2,), first=_few(at))
    return at.compared(call, 5, note=f"{ROWS}, 15 iterations at most")


def looked_up(at: Place) -> Job:
    """Look up the entries of each row's codebook."""
    rows = at.matrix()
    codes = (at.sample.levels_before(rows.size) % 4).reshape(rows.shape)
    call = Call("rows.row_lookup", (codes, np.ascontiguousarray(rows[:, :4])), first=_few(at))
    return at.compared(call, 5, note=f"{ROWS}, 4 entries each")
