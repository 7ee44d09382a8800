"""First moments on a grid scaled by second moments."""

from __future__ import annotations

from typing import Any

import numpy as np

from shrinkpoint.kernels import moment_grid as kernels

from ..harness import Case, Job
from .place import ROUNDING, Call, Place


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject."""
    return [
        at.case("grid_symbols", lambda: symbols(at)),
        at.case("grid_values", lambda: values(at)),
        at.case("grid_products", lambda: products(at)),
    ]


def _moments(at: Place) -> tuple[Any, Any]:
    """A first moment and the square of its scale: two checkpoints' weights stand for them."""
    before, after = at.pair()
    return before, np.square(after)


def symbols(at: Place) -> Job:
    """Round moments to the grid."""
    call = Call("moment_grid.grid_symbols", _moments(at), (0.5,), within=ROUNDING)
    return at.compared(call, 9, note="step 0.5")


def values(at: Place) -> Job:
    """Look up the moments of symbols."""
    x, square = _moments(at)
    table = np.linspace(-3, 3, 256, dtype=np.float32)
    found = kernels.grid_symbols(x, square, 0.5)[0]
    return at.compared(Call("moment_grid.grid_values", (found, square), (table,)), 9)


def products(at: Place) -> Job:
    """Compare the moments of symbols with the moments."""
    x, square = _moments(at)
    table = np.linspace(-3, 3, 256, dtype=np.float32)
    found = kernels.grid_symbols(x, square, 0.5)[0]
    return at.compared(Call("moment_grid.grid_products", (x, square, found), (table,), within=ROUNDING), 9)
