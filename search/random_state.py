"""Preserve the global random generators across calls of `evaluate`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np

from ..kernels.backend.imported import imported


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch when the context ends.

    A training that draws from them (dropout, the order of a DataLoader) then continues as without a search. Generators
    of CUDA devices are included if CUDA was initialized before. Generator objects of the caller are not known here.
    """
    python, torch = random.getstate(), imported("torch")
    numpy = np.random.get_state()  # noqa: NPY002 - the global generator is the one that trainings draw from
    if torch is None:
        host = devices = None
    else:
        host = torch.get_rng_state()
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        if torch is not None:
            torch.set_rng_state(host)
            if devices is not None:
                torch.cuda.set_rng_state_all(devices)
