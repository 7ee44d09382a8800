"""The global random generators: where they were before `evaluate`, they are after it."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Whatever draws from the global generators of Python, NumPy and torch inside, nothing outside notices.

    A training that draws from them (dropout, the order of a DataLoader) goes on as if there had been no search. On CUDA
    devices that is so where CUDA was initialized before. Generators that somebody holds in objects of their own are not
    known here.
    """
    python, torch = random.getstate(), sys.modules.get("torch")
    numpy = np.random.get_state()  # noqa: NPY002 - the global generator is what others draw from
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
