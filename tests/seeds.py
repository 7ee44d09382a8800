"""Seeds of random tests: new ones in each run, or fixed ones where a run must be repeatable."""

from __future__ import annotations

import os
import random
import sys

VARIABLE = "SHRINKPOINT_TEST_SEED"


def is_fixed() -> bool:
    """Return whether the environment asks for a repeatable run.

    Hypothesis then draws the same examples each time.
    """
    return VARIABLE in os.environ


def fresh_seed() -> int:
    """Return a seed below 2**32 and print it, so that a failure names it."""
    seed = int(os.environ[VARIABLE]) if is_fixed() else random.SystemRandom().randrange(1 << 32)
    sys.stderr.write(f"seed of the random data: {seed}\n")
    return seed
